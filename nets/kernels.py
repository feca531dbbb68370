"""The streams on a GPU: three Triton kernels a sub-layer forward, four backward, in the place of some eighty.

`sublayers` computes what AOTBlock, Mappings and the norm after a sub-layer say in aotpot.py; nets/fast.py calls it
where `usable` says so. The rounds of Sinkhorn are those of sinkhorn.py. No kernel adds atomically, so that the same
input gives the same bits; sums over blocks of tokens, or over samples, are left to the next kernel.

B samples   S streams   N tokens   D width   Q rows that enter a step: S, or 1 before the first, since all streams are
equal there   K = 2 S + S^2 logits   f: what a sub-layer gives before its norm
"""
import functools

import configs

import torch

import sinkhorn
from aotpot import AOTBlock, Norm
from nets.precision import no_autocast, transformed, weighted


def usable(x, config):
    """Whether the kernels can run for the tokens x: on CUDA with Triton, not in fp64, with all mappings and norms."""
    return ((x.is_cuda or sinkhorn.INTERPRET) and sinkhorn.TRITON and x.dtype != torch.float64
            and config.post_norm and not config.ablate and config.streams <= 16
            and not transformed(x) and (torch.compiler.is_compiling() or trusted()))


@functools.cache
def trusted():
    """Whether the kernels run on this machine and equal aotpot.py, seen once a process; a warning says if not.

    A graph that is compiled takes them without this look.
    """
    if not sinkhorn.trusted() or not torch.cuda.is_available():
        return sinkhorn.trusted()
    return sinkhorn.passes(lambda: agree('cuda'),
                           'the kernels of nets/kernels.py are not taken ({}); the streams are slower')


def agree(device):
    """Whether `sublayers` equals three blocks of aotpot.py in fp32, the output and all gradients."""
    config = configs.model('nano', width=16, heads=2)
    with torch.random.fork_rng(), torch.device(device), torch.inference_mode(False), torch.enable_grad(), \
            torch.autocast(device, enabled=False):
        torch.manual_seed(0)
        blocks = [(AOTBlock(config), Norm(16), torch.nn.Linear(16, 16)) for _ in range(3)]
        parameters = [parameter for block in blocks for module in block for parameter in module.parameters()]
        for parameter in parameters:
            torch.nn.init.normal_(parameter, std=0.3)
        x, gate, results = torch.randn(2, 4, 4, 16), torch.tensor([0.4, 0.3, 0.2, 0.1]), []
        plain = x[:, None].expand(-1, 4, -1, -1, -1)
        for block, post, sublayer in blocks:
            plain = block(plain, lambda u, post=post, sublayer=sublayer: post(sublayer(u)))
        for out in (sublayers(x, blocks, gate), weighted('s,bs...->b...', gate, plain)):
            gradients = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
            results.append([out, *(g for g in gradients if g is not None and g.norm() > 1e-3)])
        return all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(*results, strict=True))


EPS = torch.finfo(torch.float32).eps        # that of F.rms_norm in fp32


@functools.cache
def kernels():
    """The seven kernels by name. Shapes are constants, because Triton's interpreter cannot count to a tensor."""
    global tl, rounds, adjoint, logits, tile                    # Triton looks a kernel's names up among the globals
    import triton
    import triton.language as tl
    _, _, rounds, adjoint = sinkhorn.kernels()

    @triton.jit
    def norm(f_ptr, w_ptr, b_ptr, scale_ptr, shift_ptr, mean_ptr, pool_ptr, rstd_ptr, eps, N: tl.constexpr,
             D: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
        """A program takes one of the 8 groups of GroupNorm of a sample, whose D / 8 channels are padded to W."""
        b, c = tl.program_id(1).to(tl.int64), tl.arange(0, W)
        inside, c, n = c < D // 8, c + tl.program_id(0) * (D // 8), tl.arange(0, R)[:, None]
        f_ptr += b * N * D + n * D + c[None, :]
        total, squares = tl.zeros([R, W], tl.float32), tl.zeros([R, W], tl.float32)
        for i in range(0, N, R):
            total += tl.load(f_ptr + i * D, mask=(i + n < N) & inside[None, :], other=0.).to(tl.float32)
        mean = tl.sum(total, 0) / N
        mu = tl.sum(mean, 0) / (D // 8)
        for i in range(0, N, R):
            mask = (i + n < N) & inside[None, :]
            centred = tl.where(mask, tl.load(f_ptr + i * D, mask=mask, other=0.).to(tl.float32) - mu, 0.)
            squares += centred * centred
        rstd = 1 / tl.sqrt(tl.sum(tl.sum(squares, 1), 0) / (N * D // 8) + eps)
        scale = tl.load(w_ptr + c, mask=inside, other=0.) * rstd
        shift = tl.load(b_ptr + c, mask=inside, other=0.) - mu * scale
        tl.store(scale_ptr + b * D + c, scale, mask=inside)                             # y = scale * f + shift
        tl.store(shift_ptr + b * D + c, shift, mask=inside)
        tl.store(mean_ptr + b * D + c, mean, mask=inside)
        tl.store(pool_ptr + b * D + c, scale * mean + shift, mask=inside)               # the mean of y over the tokens
        tl.store(rstd_ptr + b * 8 + tl.program_id(0), rstd)

    @triton.jit
    def norm_backward(g_ptr, f_ptr, sums_ptr, gpool_ptr, scale_ptr, mean_ptr, rstd_ptr, w_ptr, gf_ptr, part_ptr,
                      N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr):
        b, c = tl.program_id(1).to(tl.int64), tl.arange(0, W)
        inside, c, n = c < D // 8, c + tl.program_id(0) * (D // 8), tl.arange(0, R)[:, None]
        scale = tl.load(scale_ptr + b * D + c, mask=inside, other=0.)
        mean = tl.load(mean_ptr + b * D + c, mask=inside, other=0.)
        gpool = tl.load(gpool_ptr + b * D + c, mask=inside, other=0.)
        gscale, gshift = gpool * mean, gpool
        for i in range(0, BLOCKS, R):
            sums, mask = sums_ptr + (b * BLOCKS + i + n) * 2 * D + c[None, :], (i + n < BLOCKS) & inside[None, :]
            gscale += tl.sum(tl.load(sums, mask=mask, other=0.), 0)
            gshift += tl.sum(tl.load(sums + D, mask=mask, other=0.), 0)
        rstd, w = tl.load(rstd_ptr + b * 8 + tl.program_id(0)), tl.load(w_ptr + c, mask=inside, other=0.)
        mu = tl.sum(mean, 0) / (D // 8)
        gw = rstd * (gscale - mu * gshift)
        tl.store(part_ptr + b * 2 * D + c, gw, mask=inside)
        tl.store(part_ptr + b * 2 * D + D + c, gshift, mask=inside)
        slope = -rstd * rstd * tl.sum(w * gw, 0) / (N * D // 8)                         # through rstd
        constant = gpool * scale / N - rstd * tl.sum(w * gshift, 0) / (N * D // 8) - mu * slope
        offset = b * N * D + n * D + c[None, :]
        for i in range(0, N, R):
            mask = (i + n < N) & inside[None, :]
            g = tl.load(g_ptr + offset + i * D, mask=mask, other=0.).to(tl.float32)
            f = tl.load(f_ptr + offset + i * D, mask=mask, other=0.).to(tl.float32)
            tl.store(gf_ptr + offset + i * D, g + constant[None, :] + slope * f, mask=mask)

    @triton.jit
    def logits(z, scale, alpha_ptr, b_ptr, i, mask):
        """(alpha, alpha * scale * z + b) of the logits i: Eq. (11) with v = scale * mean."""
        alpha = tl.load(alpha_ptr)
        return alpha, alpha * scale * z + tl.load(b_ptr + i, mask=mask, other=0.)

    @triton.jit
    def tile(means_ptr, pool_ptr, b, q, c, Q: tl.constexpr, D: tl.constexpr):
        """The means of the Q streams before a sub-layer and, as row Q, that of its output, at the channels c."""
        means = tl.load(means_ptr + (b * Q + q) * D + c, mask=(q < Q) & (c < D), other=0.)
        return means + tl.load(pool_ptr + b * D + c + 0 * q, mask=(q == Q) & (c < D), other=0.)

    @triton.jit
    def mappings(Td_ptr, means_ptr, pool_ptr, phi_a, alpha_a, b_a, phi_d, alpha_d, b_d, phi_T, alpha_T, b_T, a_ptr,
                 new_ptr, m_ptr, z_ptr, log_ptr, sum_ptr, scale_ptr, eps, iters: tl.constexpr, B: tl.constexpr,
                 S: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
                 C: tl.constexpr):
        """A program takes a sample: the means of its streams, and the mappings of Eqs. (11) and (12) from them."""
        b, k, q, j = tl.program_id(0).to(tl.int64), tl.arange(0, P), tl.arange(0, ROWS), tl.arange(0, C)
        r, s = k[:, None], k[None, :]
        inside, square = (r < S) & (s < S), tl.zeros([C], tl.float32)
        za, zd, zT = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32), tl.zeros([P, P], tl.float32)
        for start in range(0, D, C):
            c = start + j
            rows = tile(means_ptr, pool_ptr, b, q[:, None], c[None, :], Q, D)
            for t in range(S):
                T = tl.load(Td_ptr + (b * S + t) * (Q + 1) + q, mask=q <= Q, other=0.)
                m, v = tl.sum(T[:, None] * rows, 0), t * D + c[:, None]                 # Eq. (9), of the means
                tl.store(m_ptr + (b * S + t) * D + c, m, mask=c < D)
                square += m * m
                mask = (c < D)[:, None] & (k < S)[None, :]
                za += tl.sum(m[:, None] * tl.load(phi_a + v * S + s, mask=mask, other=0.), 0)
                zd += tl.sum(m[:, None] * tl.load(phi_d + v * S + s, mask=mask, other=0.), 0)
                zT += tl.sum(m[:, None, None] * tl.load(phi_T + (v[:, :, None] * S + r[None]) * S + s[None],
                                                        mask=(c < D)[:, None, None] & inside[None], other=0.), 0)
        scale = 1 / tl.sqrt(tl.sum(square, 0) / (S * D) + eps)                          # v = scale * mean
        tl.store(scale_ptr + b, scale)
        z_ptr += b * (2 * S + S * S)
        tl.store(z_ptr + k, za, mask=k < S)
        tl.store(z_ptr + S + k, zd, mask=k < S)
        tl.store(z_ptr + 2 * S + r * S + s, zT, mask=inside)
        _, a = logits(za, scale, alpha_a, b_a, k, k < S)
        _, d = logits(zd, scale, alpha_d, b_d, k, k < S)
        _, T = logits(zT, scale, alpha_T, b_T, r * S + s, inside)
        a = tl.where(k < S, tl.sigmoid(a), 0.)
        tl.store(a_ptr + b * S + k, a / tl.sum(a, 0), mask=k < S)                       # Eq. (12)
        tl.store(new_ptr + (b * S + k) * (S + 1) + S, 2 * tl.sigmoid(d), mask=k < S)
        T = tl.where(inside, T, tl.where((r < S) == (s < S), 0., -float('inf')))[None]
        T = rounds(T, sum_ptr, b + 0 * r[None], r[None], s[None], B, S, iters)
        tl.store(log_ptr + (b * S + r[None]) * S + s[None], T, mask=inside[None])
        tl.store(new_ptr + (b * S + r[None]) * (S + 1) + s[None], tl.exp(T), mask=inside[None])

    @triton.jit
    def mappings_backward(part_ptr, gnew_ptr, gm_ptr, Td_ptr, means_ptr, pool_ptr, phi_a, alpha_a, b_a, phi_d, alpha_d,
                          b_d, phi_T, alpha_T, b_T, m_ptr, z_ptr, log_ptr, sum_ptr, scale_ptr, gTd_ptr, gmeans_ptr,
                          gpool_ptr, gz_ptr, share_ptr, iters: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
                          Q: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
                          BLOCKS: tl.constexpr):
        b, k, q, j = tl.program_id(0).to(tl.int64), tl.arange(0, P), tl.arange(0, ROWS), tl.arange(0, C)
        r, s, K = k[:, None], k[None, :], 2 * S + S * S
        inside = (r < S) & (s < S)
        gTd, n = tl.zeros([P, ROWS], tl.float32), tl.arange(0, 64)[:, None, None]
        for i in range(0, BLOCKS, 64):                          # the sums over the tokens, a in the last column
            part = part_ptr + ((b * BLOCKS + i + n) * S + r[None]) * (Q + 2) + q[None, None, :]
            mask = (i + n < BLOCKS) & (r < S)[None] & (q < Q + 2)[None, None, :]
            gTd += tl.sum(tl.load(part, mask=mask, other=0.), 0)
        ga = tl.sum(tl.where(q[None, :] == Q + 1, gTd, 0.), 1)
        scale = tl.load(scale_ptr + b)
        z_ptr += b * K
        za, zd = tl.load(z_ptr + k, mask=k < S, other=0.), tl.load(z_ptr + S + k, mask=k < S, other=0.)
        zT = tl.load(z_ptr + 2 * S + r * S + s, mask=inside, other=0.)
        one_a, a = logits(za, scale, alpha_a, b_a, k, k < S)
        one_d, d = logits(zd, scale, alpha_d, b_d, k, k < S)
        a, d, one_T = tl.where(k < S, tl.sigmoid(a), 0.), tl.sigmoid(d), tl.load(alpha_T)
        ga = (ga - tl.sum(ga * a, 0) / tl.sum(a, 0)) / tl.sum(a, 0) * a * (1 - a)
        gd = 2 * tl.load(gnew_ptr + (b * S + k) * (S + 1) + S, mask=k < S, other=0.) * d * (1 - d)
        log = tl.load(log_ptr + (b * S + r) * S + s, mask=inside, other=-float('inf'))
        gT = tl.load(gnew_ptr + (b * S + r) * (S + 1) + s, mask=inside, other=0.) * tl.exp(log)
        gT = adjoint(gT[None], log[None], sum_ptr, b + 0 * r[None], r[None], s[None], B, S, iters)
        gT = tl.sum(gT, 0)
        share_ptr += b * (K + 3)                                # what this sample adds to the gradients of b and alpha
        tl.store(share_ptr + k, ga, mask=k < S)
        tl.store(share_ptr + S + k, gd, mask=k < S)
        tl.store(share_ptr + 2 * S + r * S + s, gT, mask=inside)
        sum_a, sum_d, sum_T = tl.sum(ga * za, 0), tl.sum(gd * zd, 0), tl.sum(tl.sum(gT * zT, 1), 0)
        tl.store(share_ptr + K, scale * sum_a)
        tl.store(share_ptr + K + 1, scale * sum_d)
        tl.store(share_ptr + K + 2, scale * sum_T)
        through = (one_a * sum_a + one_d * sum_d + one_T * sum_T) * scale * scale * scale / (S * D)     # the scale
        ga, gd, gT, gz_ptr = one_a * scale * ga, one_d * scale * gd, one_T * scale * gT, gz_ptr + b * K
        tl.store(gz_ptr + k, ga, mask=k < S)
        tl.store(gz_ptr + S + k, gd, mask=k < S)
        tl.store(gz_ptr + 2 * S + r * S + s, gT, mask=inside)
        for start in range(0, D, C):
            c = start + j
            rows = tile(means_ptr, pool_ptr, b, q[:, None], c[None, :], Q, D)
            grows, mask = tl.zeros([ROWS, C], tl.float32), (c < D)[:, None] & (k < S)[None, :]
            for t in range(S):
                at, v = (b * S + t) * D + c, t * D + c[:, None]
                g = tl.load(gm_ptr + at, mask=c < D, other=0.) - through * tl.load(m_ptr + at, mask=c < D, other=0.)
                g += tl.sum(ga[None, :] * tl.load(phi_a + v * S + s, mask=mask, other=0.), 1)
                g += tl.sum(gd[None, :] * tl.load(phi_d + v * S + s, mask=mask, other=0.), 1)
                g += tl.sum(tl.sum(gT[None] * tl.load(phi_T + (v[:, :, None] * S + r[None]) * S + s[None],
                                                      mask=(c < D)[:, None, None] & inside[None], other=0.), 2), 1)
                T = tl.load(Td_ptr + (b * S + t) * (Q + 1) + q, mask=q <= Q, other=0.)
                grows += T[:, None] * g[None, :]
                gTd += tl.where(r == t, tl.sum(g[None, :] * rows, 1)[None, :], 0.)
            row, mask = q[:, None], (c < D)[None, :]
            tl.store(gmeans_ptr + (b * Q + row) * D + c[None, :], grows, mask=(row < Q) & mask)
            tl.store(gpool_ptr + b * D + c[None, :] + 0 * row, grows, mask=(row == Q) & mask)
        tl.store(gTd_ptr + (b * S + r) * (Q + 1) + q[None, :], gTd, mask=(r < S) & (q <= Q)[None, :])

    @triton.jit
    def step(f_ptr, x_ptr, scale_ptr, shift_ptr, Td_ptr, a_ptr, new_ptr, u_ptr, N: tl.constexpr, D: tl.constexpr,
             S: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, R: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr):
        """A program takes R tokens and C channels of all streams of a sample."""
        b, M = tl.program_id(2).to(tl.int64), N * D
        n, c = tl.program_id(0) * R + tl.arange(0, R)[:, None], tl.program_id(1) * C + tl.arange(0, C)[None, :]
        i, inside, q = n * D + c, (n < N) & (c < D), tl.arange(0, P)[:, None, None]
        x = tl.load(x_ptr + (b * Q + q) * M + i[None], mask=(q < Q) & inside[None], other=0.).to(tl.float32)
        y = tl.load(f_ptr + b * M + i, mask=inside, other=0.).to(tl.float32)
        y = (tl.load(scale_ptr + b * D + c, mask=c < D, other=0.) * y
             + tl.load(shift_ptr + b * D + c, mask=c < D, other=0.))                    # the norm after a sub-layer
        u = tl.zeros([R, C], tl.float32)
        for r in tl.static_range(S):
            row = Td_ptr + (b * S + r) * (Q + 1)
            new = tl.sum(tl.load(row + q, mask=q < Q, other=0.) * x, 0) + tl.load(row + Q) * y          # Eq. (9)
            u += tl.load(a_ptr + b * S + r) * new                                       # a_l x_l of the next sub-layer
            if not LAST:
                tl.store(new_ptr + (b * S + r) * M + i, new, mask=inside)
        tl.store(u_ptr + b * M + i, u, mask=inside)

    @triton.jit
    def step_backward(gnew_ptr, gu_ptr, f_ptr, x_ptr, scale_ptr, shift_ptr, Td_ptr, a_ptr, gx_ptr, g_ptr, part_ptr,
                      sums_ptr, N: tl.constexpr, D: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
                      R: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr):
        b, M = tl.program_id(2).to(tl.int64), N * D
        n, c = tl.program_id(0) * R + tl.arange(0, R)[:, None], tl.program_id(1) * C + tl.arange(0, C)[None, :]
        i, inside, q = n * D + c, (n < N) & (c < D), tl.arange(0, P)[:, None, None]
        x = tl.load(x_ptr + (b * Q + q) * M + i[None], mask=(q < Q) & inside[None], other=0.).to(tl.float32)
        f = tl.load(f_ptr + b * M + i, mask=inside, other=0.).to(tl.float32)
        gu = tl.load(gu_ptr + b * M + i, mask=inside, other=0.).to(tl.float32)
        scale = tl.load(scale_ptr + b * D + c, mask=c < D, other=0.)
        y = scale * f + tl.load(shift_ptr + b * D + c, mask=c < D, other=0.)
        gx, gy = tl.zeros([P, R, C], tl.float32), tl.zeros([R, C], tl.float32)
        block = (b * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
        part_ptr += block * S * (Q + 2)                         # this block's share of sums over the tokens
        for r in tl.static_range(S):
            row, part = Td_ptr + (b * S + r) * (Q + 1), part_ptr + r * (Q + 2)
            T, d, g = tl.load(row + q, mask=q < Q, other=0.), tl.load(row + Q), tl.load(a_ptr + b * S + r) * gu
            if not LAST:
                g += tl.load(gnew_ptr + (b * S + r) * M + i, mask=inside, other=0.).to(tl.float32)
            gx += T * g[None]
            gy += d * g
            of_T = tl.sum(tl.sum(g[None] * x, 2, keep_dims=True), 1, keep_dims=True)
            of_a = gu * (tl.sum(T * x, 0) + d * y)
            tl.store(part + q, of_T, mask=q < Q)
            tl.store(part + Q, tl.sum(tl.sum(g * y, 1), 0))                                             # of d
            tl.store(part + Q + 1, tl.sum(tl.sum(of_a, 1), 0))
        tl.store(gx_ptr + (b * Q + q) * M + i[None], gx, mask=(q < Q) & inside[None])
        tl.store(g_ptr + b * M + i, scale * gy, mask=inside)
        sums_ptr += (b * tl.num_programs(0) + tl.program_id(0)) * 2 * D + c
        tl.store(sums_ptr, tl.sum(gy * f, 0, keep_dims=True), mask=c < D)                               # of the scale
        tl.store(sums_ptr + D, tl.sum(gy, 0, keep_dims=True), mask=c < D)                               # of the shift

    @triton.jit
    def samples(m_ptr, gz_ptr, share_ptr, norm_ptr, phi_a, phi_d, phi_T, sums_ptr, B: tl.constexpr, S: tl.constexpr,
                SD: tl.constexpr, K: tl.constexpr, L: tl.constexpr, P: tl.constexpr, C: tl.constexpr):
        """Sums over the samples: the gradients of the three phi, of L numbers of the norm and of K of alpha and b."""
        i, k, n = tl.program_id(0) * C + tl.arange(0, C), tl.arange(0, P), (SD + C - 1) // C
        r, s = k[:, None], k[None, :]
        inside = (r < S) & (s < S)
        if tl.program_id(0) < n:
            ga, gd, gT = tl.zeros([C, P], tl.float32), tl.zeros([C, P], tl.float32), tl.zeros([C, P, P], tl.float32)
            for b in range(B):
                m, gz = tl.load(m_ptr + b * SD + i, mask=i < SD, other=0.), gz_ptr + b * (2 * S + S * S)
                ga += m[:, None] * tl.load(gz + s, mask=s < S, other=0.)
                gd += m[:, None] * tl.load(gz + S + s, mask=s < S, other=0.)
                gT += m[:, None, None] * tl.load(gz + 2 * S + r * S + s, mask=inside, other=0.)[None]
            mask = (i < SD)[:, None] & (s < S)
            tl.store(phi_a + i[:, None] * S + s, ga, mask=mask)
            tl.store(phi_d + i[:, None] * S + s, gd, mask=mask)
            tl.store(phi_T + (i[:, None, None] * S + r[None]) * S + s[None], gT,
                     mask=(i < SD)[:, None, None] & inside[None])
        else:
            i, total = i - n * C, tl.zeros([C], tl.float32)
            for b in range(B):
                total += tl.load(norm_ptr + b * L + i, mask=i < L, other=0.)
                total += tl.load(share_ptr + b * K + i - L, mask=(i >= L) & (i < L + K), other=0.)
            tl.store(sums_ptr + i, total, mask=i < L + K)

    return {kernel.__name__: kernel for kernel in (norm, norm_backward, mappings, mappings_backward, step,
                                                   step_backward, samples)}


# ------------------------------------------------------------------------------------------------ their operators

def operator(schema):
    """Register a kernel as an operator, which torch.compile takes as it is. The function that follows has its name.

    It gives, from the operator's arguments, (outputs, grid, inputs of the kernel, its constants).
    """
    def register(plan):
        def run(*args):
            outputs, grid, inputs, constants = plan(*args)
            with torch.cuda.device_of(inputs[0]):               # Triton launches on the current device
                kernels()[plan.__name__][grid](*inputs, *outputs, **constants)
            return outputs
        run.__name__ = plan.__name__
        found = torch.library.custom_op(f'aotpot::{plan.__name__}', run, mutates_args=(), schema=schema)
        found.register_fake(lambda *args: plan(*args)[0])
        found.plan = plan
        return found
    return register


def norm_sizes(N, D):
    W = sinkhorn.padded(D // 8)
    return dict(N=N, D=D, W=W, R=max(1, 4096 // W))


@operator('(Tensor f, Tensor w, Tensor b, float eps) -> Tensor[]')
def norm(f, w, b, eps):
    """f (B, N, D) -> scale, shift, mean of f, mean of y (B, D) and 1 / deviation (B, 8): y = scale f + shift."""
    B, N, D = f.shape
    outputs = [w.new_empty(shape, dtype=torch.float32) for shape in 4 * [(B, D)] + [(B, 8)]]
    return outputs, (8, B), (f, w, b), dict(eps=eps, **norm_sizes(N, D))


@operator('(Tensor g, Tensor f, Tensor sums, Tensor gpool, Tensor scale, Tensor mean, Tensor rstd, Tensor w)'
          ' -> Tensor[]')
def norm_backward(g, f, sums, gpool, scale, mean, rstd, w):
    """dL/df from g, its part with a constant scale, and the shares (B, 2 D) of the samples in dL/dw and dL/db."""
    B, N, D = f.shape
    outputs = [torch.empty_like(f), scale.new_empty(B, 2 * D)]
    return outputs, (8, B), (g, f, sums, gpool, scale, mean, rstd, w), dict(BLOCKS=sums.shape[1], **norm_sizes(N, D))


def mapping_sizes(Td, means, iters):
    (B, S, Q), P = Td.shape, sinkhorn.padded(Td.shape[1])
    return dict(iters=iters, B=B, S=S, Q=Q - 1, D=means.shape[2], P=P, ROWS=sinkhorn.padded(Q + 1),
                C=min(256, max(16, 4096 // P ** 2)))


@operator('(Tensor Td, Tensor means, Tensor pool, Tensor[] parameters, int iters) -> Tensor[]')
def mappings(Td, means, pool, parameters, iters):
    """[T | d] (B, S, Q+1), means (B, Q, D), mean of y (B, D) -> the next a, [T | d] and means; what backward needs."""
    (B, S, _), D = Td.shape, pool.shape[1]
    outputs = [pool.new_empty(shape) for shape in (
        (B, S), (B, S, S + 1), (B, S, D), (B, 2 * S + S * S), (B, S, S), (iters, 2, B, S), (B,))]
    return outputs, (B,), (Td, means, pool, *parameters), dict(eps=EPS, **mapping_sizes(Td, means, iters))


@operator('(Tensor part, Tensor gnew, Tensor gm, Tensor Td, Tensor means, Tensor pool, Tensor[] parameters, '
          'Tensor[] kept) -> Tensor[]')
def mappings_backward(part, gnew, gm, Td, means, pool, parameters, kept):
    """dL/d[T | d], dL/dmeans, dL/dpool, dL/dz, and the shares (B, K+3) of the samples in those of b and alpha."""
    outputs = [torch.empty_like(Td), torch.empty_like(means), torch.empty_like(pool), torch.empty_like(kept[1]),
               pool.new_empty(len(pool), kept[1].shape[1] + 3)]
    return outputs, (len(pool),), (part, gnew, gm, Td, means, pool, *parameters, *kept), dict(
        BLOCKS=part.shape[1], **mapping_sizes(Td, means, len(kept[3])))


def step_sizes(f, x, a, last):
    """The grid of the steps, and their constants."""
    (B, N, D), S, R = f.shape, a.shape[1], 128 // sinkhorn.padded(a.shape[1])
    return (-(-N // R), -(-D // 32), B), dict(N=N, D=D, S=S, Q=x.shape[1], P=sinkhorn.padded(x.shape[1]), R=R, C=32,
                                            LAST=last)


@operator('(Tensor f, Tensor x, Tensor scale, Tensor shift, Tensor Td, Tensor a, bool last) -> Tensor[]')
def step(f, x, scale, shift, Td, a, last):
    """Eq. (9) and the next aggregation: x (B, Q, N D) -> T x + d y (B, S, N D), which the last one drops; a of that."""
    grid, constants = step_sizes(f, x, a, last)
    new = x.new_empty(len(x), 0 if last else a.shape[1], x.shape[2])
    return [new, x.new_empty(f.shape)], grid, (f, x, scale, shift, Td, a), constants


@operator('(Tensor gnew, Tensor gu, Tensor f, Tensor x, Tensor scale, Tensor shift, Tensor Td, Tensor a, bool last)'
          ' -> Tensor[]')
def step_backward(gnew, gu, f, x, scale, shift, Td, a, last):
    """dL/dx, scale dL/dy, and sums over blocks: (B, blocks, S, Q+2) for T, d and a, (B, blocks, 2, D) for the norm."""
    grid, constants = step_sizes(f, x, a, last)
    B, S, Q = Td.shape
    outputs = [torch.empty_like(x), x.new_empty(f.shape), a.new_empty(B, grid[0] * grid[1], S, Q + 1),
               a.new_empty(B, grid[0], 2, f.shape[2])]
    return outputs, grid, (gnew, gu, f, x, scale, shift, Td, a), constants


@operator('(Tensor m, Tensor gz, Tensor share, Tensor norm) -> Tensor[]')
def samples(m, gz, share, norm):
    """The gradients of the three phi, and the sums (L + K,) of the shares in those of the norm, b and alpha."""
    (B, S, D), K, L = m.shape, share.shape[1], norm.shape[1]
    outputs = [gz.new_empty(shape) for shape in ((S * D, S), (S * D, S), (S * D, S * S), (L + K,))]
    return outputs, (-(-S * D // 32) - (-(L + K) // 32),), (m, gz, share, norm), dict(
        B=B, S=S, SD=S * D, K=K, L=L, P=sinkhorn.padded(max(S, 1)), C=32)


def gradients(m, gz, share, norm):
    """dL/dw and dL/db of the norm, if it has shares, and the gradients of a Mappings' parameters, in their order."""
    S, *phis, sums = m.shape[1], *samples(m, gz, share, norm)
    w, b, *rest, alpha_a, alpha_d, alpha_T = sums.split([*2 * [norm.shape[1] // 2], S, S, S * S, 1, 1, 1])
    rest[2] = rest[2].view(S, S)
    alphas = (alpha.squeeze() for alpha in (alpha_a, alpha_d, alpha_T))
    return w, b, *(g for triple in zip(phis, alphas, rest) for g in triple)


class Start(torch.autograd.Function):
    """The mappings of the first sub-layer, Eqs. (11) and (12): means of the tokens (B, D) -> [T | d] (B, S, S+1)."""

    @staticmethod
    def forward(ctx, pool, S, iters, *parameters):
        Td, means = pool.new_ones(len(pool), S, 1), pool.new_empty(len(pool), 0, pool.shape[1])
        _, new, *kept = mappings(Td, means, pool, parameters, iters)
        ctx.save_for_backward(Td, means, pool, *kept, *parameters)
        return new

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gnew):
        Td, means, pool, *kept = ctx.saved_tensors
        kept, parameters = kept[:5], kept[5:]
        _, _, gpool, gz, share = mappings_backward(
            pool.new_empty(len(pool), 0, Td.shape[1], 2), gnew.contiguous(), torch.zeros_like(kept[0]), Td, means, pool,
            parameters, kept)
        return gpool, None, None, *gradients(kept[0], gz, share, pool.new_empty(len(pool), 0))[2:]


class Sublayer(torch.autograd.Function):
    """All that follows what a sub-layer gives, f (B, N, D): norm, Eq. (9), mappings and input of the next sub-layer.

    The streams x (B, Q, N D), their means (B, Q, D) and [T | d] (B, S, Q+1) become those of the next one, after its
    input u. gate (S,): instead, after the last, u is the sum with these weights.
    """

    @staticmethod
    def forward(ctx, f, x, means, Td, gate, eps, iters, w, b, *parameters):
        scale, shift, mean, pool, rstd = norm(f, w, b, eps)
        if gate is None:
            a, new, *kept = mappings(Td, means, pool, parameters, iters)
        else:
            a, new, kept = gate.expand(len(f), -1).contiguous(), None, [None]
        ctx.save_for_backward(f, x, means, Td, a, w, scale, shift, mean, pool, rstd, *kept, *parameters)
        ctx.last = gate is not None
        x, u = step(f, x, scale, shift, Td, a, ctx.last)
        return u, x, kept[0], new

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gu, gx, gm, gnew):
        f, x, means, Td, a, w, scale, shift, mean, pool, rstd, *kept = ctx.saved_tensors
        gx, g, part, sums = step_backward(gx.contiguous(), gu.contiguous(), f, x, scale, shift, Td, a, ctx.last)
        if ctx.last:
            part = part.sum(1)
            gf, share = norm_backward(g, f, sums, torch.zeros_like(pool), scale, mean, rstd, w)
            return gf, gx, None, part[..., :-1], part[..., -1].sum(0), None, None, *share.sum(0).chunk(2)
        kept, parameters = kept[:5], kept[5:]
        gTd, gmeans, gpool, gz, share = mappings_backward(part, gnew.contiguous(), gm.contiguous(), Td, means, pool,
                                                          parameters, kept)
        gf, of_norm = norm_backward(g, f, sums, gpool, scale, mean, rstd, w)
        return gf, gx, gmeans, gTd, None, None, None, *gradients(kept[0], gz, share, of_norm)


def sublayers(x, blocks, gate):
    """The S streams of a batch through all sub-layers: tokens x (B, *grid, D) -> the gated sum of Eq. (13), alike.

    blocks: (AOTBlock, Norm after F, F) of each sub-layer, in their order. gate (S,): the weights of the sum.
    """
    B, shape = len(x), x.shape
    parameters = [(block.mappings.iters, *block.mappings.parameters()) for block, _, _ in blocks]
    with no_autocast(x):
        means = x.flatten(1, -2).mean(1, dtype=torch.float32)                           # (B, D)
        Td = Start.apply(means, len(gate), *parameters[0])
        # all streams are equal here: one row stands for all of them, and a_l x is x
        u, x, means, Td = x, x.reshape(B, 1, -1), means[:, None], torch.stack([Td[..., :-1].sum(-1), Td[..., -1]], -1)
    for l, (_, post, sublayer) in enumerate(blocks):
        f = sublayer(u).flatten(1, -2).contiguous()
        with no_autocast(f):
            last = l + 1 == len(blocks)
            iters, *others = parameters[(l + 1) % len(blocks)]
            u, x, means, Td = Sublayer.apply(f, x, means, Td, gate if last else None, post.eps, iters, post.weight,
                                             post.bias, *([] if last else others))
        u = u.view(shape)
    return u
