"""The streams on a GPU: three Triton kernels a sub-layer forward, four backward, in the place of some eighty.

`sublayers` computes what AOTBlock, Mappings and the norm after a sub-layer say in aotpot.py; nets/fast.py calls it
where its `usable` says so. The rounds of Sinkhorn are those of sinkhorn.py. No kernel adds atomically, so that the same
input gives the same bits; sums over blocks of tokens, or over samples, are left to the next kernel.

B samples   S streams   N tokens   D width   Q rows that enter a step: S, or 1 before the first, since all streams are
equal there   K = 2 S + S^2 logits   f: what a sub-layer gives before its norm
"""
import functools
import inspect

import torch

import sinkhorn
from aotpot import no_autocast
from sinkhorn import padded


@functools.cache
def kernels():
    """The seven kernels by name. Shapes are constants, because Triton's interpreter cannot count to a tensor."""
    global tl, rounds, adjoint, load, tile, columns, logits     # Triton looks a kernel's names up among the globals
    import triton
    import triton.language as tl
    _, _, rounds, adjoint = sinkhorn.kernels()

    @triton.jit
    def load(ptr, mask):
        return tl.load(ptr, mask=mask, other=0.).to(tl.float32)

    @triton.jit
    def norm(f_ptr, w_ptr, b_ptr, scale_ptr, shift_ptr, mean_ptr, pool_ptr, rstd_ptr, eps, N: tl.constexpr,
             D: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
        """A program takes one of the 8 groups of GroupNorm of a sample, whose D / 8 channels are padded to W."""
        b = tl.program_id(1).to(tl.int64)
        n = tl.arange(0, R)[:, None]
        inside = tl.arange(0, W) < D // 8
        c = tl.program_id(0) * (D // 8) + tl.arange(0, W)
        f_ptr += b * N * D + n * D + c[None, :]
        total = tl.zeros([R, W], tl.float32)
        squares = tl.zeros([R, W], tl.float32)
        for i in range(0, N, R):
            total += load(f_ptr + i * D, (i + n < N) & inside[None, :])
        mean = tl.sum(total, 0) / N
        mu = tl.sum(mean, 0) / (D // 8)
        for i in range(0, N, R):
            mask = (i + n < N) & inside[None, :]
            centred = tl.where(mask, load(f_ptr + i * D, mask) - mu, 0.)
            squares += centred * centred
        rstd = 1 / tl.sqrt(tl.sum(tl.sum(squares, 1), 0) / (N * D // 8) + eps)
        scale = load(w_ptr + c, inside) * rstd
        shift = load(b_ptr + c, inside) - mu * scale
        tl.store(scale_ptr + b * D + c, scale, mask=inside)                             # y = scale * f + shift
        tl.store(shift_ptr + b * D + c, shift, mask=inside)
        tl.store(mean_ptr + b * D + c, mean, mask=inside)
        tl.store(pool_ptr + b * D + c, scale * mean + shift, mask=inside)               # the mean of y over the tokens
        tl.store(rstd_ptr + b * 8 + tl.program_id(0), rstd)

    @triton.jit
    def norm_backward(g_ptr, f_ptr, sums_ptr, gpool_ptr, scale_ptr, mean_ptr, rstd_ptr, w_ptr, gf_ptr, part_ptr,
                      N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr):
        b = tl.program_id(1).to(tl.int64)
        n = tl.arange(0, R)[:, None]
        inside = tl.arange(0, W) < D // 8
        c = tl.program_id(0) * (D // 8) + tl.arange(0, W)
        scale = load(scale_ptr + b * D + c, inside)
        mean = load(mean_ptr + b * D + c, inside)
        gpool = load(gpool_ptr + b * D + c, inside)
        gscale = gpool * mean
        gshift = gpool
        for i in range(0, BLOCKS, R):
            sums = sums_ptr + (b * BLOCKS + i + n) * 2 * D + c[None, :]
            mask = (i + n < BLOCKS) & inside[None, :]
            gscale += tl.sum(load(sums, mask), 0)
            gshift += tl.sum(load(sums + D, mask), 0)
        rstd = tl.load(rstd_ptr + b * 8 + tl.program_id(0))
        w = load(w_ptr + c, inside)
        mu = tl.sum(mean, 0) / (D // 8)
        gw = rstd * (gscale - mu * gshift)
        tl.store(part_ptr + b * 2 * D + c, gw, mask=inside)
        tl.store(part_ptr + b * 2 * D + D + c, gshift, mask=inside)
        slope = -rstd * rstd * tl.sum(w * gw, 0) / (N * D // 8)                         # through rstd
        constant = gpool * scale / N - rstd * tl.sum(w * gshift, 0) / (N * D // 8) - mu * slope
        offset = b * N * D + n * D + c[None, :]
        for i in range(0, N, R):
            mask = (i + n < N) & inside[None, :]
            g = load(g_ptr + offset + i * D, mask)
            f = load(f_ptr + offset + i * D, mask)
            tl.store(gf_ptr + offset + i * D, g + constant[None, :] + slope * f, mask=mask)

    @triton.jit
    def tile(means_ptr, pool_ptr, b, q, c, Q: tl.constexpr, D: tl.constexpr):
        """The means of the Q streams before a sub-layer and, as row Q, that of its output, at the channels c."""
        means = load(means_ptr + (b * Q + q) * D + c, (q < Q) & (c < D))
        return means + load(pool_ptr + b * D + c + 0 * q, (q == Q) & (c < D))

    @triton.jit
    def columns(a_ptr, d_ptr, T_ptr, v, k, mask, S: tl.constexpr):
        """Columns k of row v of three matrices with S, S and S^2 columns side by side, as the K logits are."""
        a = load(a_ptr + v * S + k, mask & (k < S))
        d = load(d_ptr + v * S + k - S, mask & (k >= S) & (k < 2 * S))
        return a + d + load(T_ptr + (v * S - 2) * S + k, mask & (k >= 2 * S) & (k < 2 * S + S * S))

    @triton.jit
    def logits(z_ptr, scale, alpha_a, b_a, alpha_d, b_d, alpha_T, b_T, k, S: tl.constexpr):
        """(alpha, z, alpha * scale * z + b) of the logits k: Eq. (11) with v = scale * mean."""
        alpha = tl.where(k < S, tl.load(alpha_a), tl.where(k < 2 * S, tl.load(alpha_d), tl.load(alpha_T)))
        z = load(z_ptr + k, k < 2 * S + S * S)
        return alpha, z, alpha * scale * z + columns(b_a, b_d, b_T, 0, k, k >= 0, S)

    @triton.jit
    def mappings(Td_ptr, means_ptr, pool_ptr, phi_a, alpha_a, b_a, phi_d, alpha_d, b_d, phi_T, alpha_T, b_T, a_ptr,
                 new_ptr, m_ptr, z_ptr, log_ptr, sum_ptr, scale_ptr, eps, B, iters: tl.constexpr, S: tl.constexpr,
                 Q: tl.constexpr, D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
                 W: tl.constexpr, C: tl.constexpr):
        """A program takes a sample: the means of its streams, and the mappings of Eqs. (11) and (12) from them."""
        b = tl.program_id(0).to(tl.int64)
        k, q = tl.arange(0, W), tl.arange(0, ROWS)
        r, s = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
        inside = (r < S) & (s < S)
        z = tl.zeros([W], tl.float32)
        square = tl.zeros([C], tl.float32)
        for start in range(0, D, C):
            c = start + tl.arange(0, C)
            rows = tile(means_ptr, pool_ptr, b, q[:, None], c[None, :], Q, D)
            for t in range(S):
                T = load(Td_ptr + (b * S + t) * (Q + 1) + q, q <= Q)
                m = tl.sum(T[:, None] * rows, 0)                        # Eq. (9), of the means
                v = t * D + c[:, None]
                tl.store(m_ptr + (b * S + t) * D + c, m, mask=c < D)
                square += m * m
                z += tl.sum(m[:, None] * columns(phi_a, phi_d, phi_T, v, k[None, :], c[:, None] < D, S), 0)
        scale = 1 / tl.sqrt(tl.sum(square, 0) / (S * D) + eps)                          # v = scale * mean
        tl.store(scale_ptr + b, scale)
        z_ptr += b * K
        tl.store(z_ptr + k, z, mask=k < K)
        tl.debug_barrier()                                      # other threads of the program load them
        _, _, x = logits(z_ptr, scale, alpha_a, b_a, alpha_d, b_d, alpha_T, b_T, k, S)
        _, _, T = logits(z_ptr, scale, alpha_a, b_a, alpha_d, b_d, alpha_T, b_T, 2 * S + r * S + s, S)
        a = tl.where(k < S, tl.sigmoid(x), 0.)
        tl.store(a_ptr + b * S + k, a / tl.sum(a, 0), mask=k < S)                       # Eq. (12)
        tl.store(new_ptr + (b * S + k - S) * (S + 1) + S, 2 * tl.sigmoid(x), mask=(k >= S) & (k < 2 * S))
        T = tl.where(inside, T, tl.where((r < S) == (s < S), 0., -float('inf')))[None]
        T = rounds(T, sum_ptr, b + 0 * r[None], r[None], s[None], B, S, iters)
        tl.store(log_ptr + (b * S + r[None]) * S + s[None], T, mask=inside[None])
        tl.store(new_ptr + (b * S + r[None]) * (S + 1) + s[None], tl.exp(T), mask=inside[None])

    @triton.jit
    def mappings_backward(part_ptr, gnew_ptr, gm_ptr, Td_ptr, means_ptr, pool_ptr, phi_a, alpha_a, b_a, phi_d, alpha_d,
                          b_d, phi_T, alpha_T, b_T, m_ptr, z_ptr, log_ptr, sum_ptr, scale_ptr, gTd_ptr, gmeans_ptr,
                          gpool_ptr, gz_ptr, share_ptr, B, iters: tl.constexpr, S: tl.constexpr, Q: tl.constexpr,
                          D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr,
                          C: tl.constexpr, BLOCKS: tl.constexpr):
        b = tl.program_id(0).to(tl.int64)
        k, q = tl.arange(0, W), tl.arange(0, ROWS)
        p = tl.arange(0, P)
        r, s = p[:, None], p[None, :]
        inside = (r < S) & (s < S)
        gTd = tl.zeros([P, ROWS], tl.float32)
        n = tl.arange(0, 64)[:, None, None]
        for i in range(0, BLOCKS, 64):                          # the sums over the tokens, a in the last column
            part = part_ptr + ((b * BLOCKS + i + n) * S + r[None]) * (Q + 2) + q[None, None, :]
            gTd += tl.sum(load(part, (i + n < BLOCKS) & (r < S)[None] & (q < Q + 2)[None, None, :]), 0)
        scale = tl.load(scale_ptr + b)
        z_ptr += b * K
        share_ptr += b * (K + 3)
        _, _, a = logits(z_ptr, scale, alpha_a, b_a, alpha_d, b_d, alpha_T, b_T, p, S)
        _, _, d = logits(z_ptr, scale, alpha_a, b_a, alpha_d, b_d, alpha_T, b_T, S + p, S)
        a = tl.where(p < S, tl.sigmoid(a), 0.)
        d = tl.sigmoid(d)
        ga = tl.sum(tl.where(q[None, :] == Q + 1, gTd, 0.), 1)
        ga = (ga - tl.sum(ga * a, 0) / tl.sum(a, 0)) / tl.sum(a, 0) * a * (1 - a)
        gd = 2 * load(gnew_ptr + (b * S + p) * (S + 1) + S, p < S) * d * (1 - d)
        log = tl.load(log_ptr + (b * S + r) * S + s, mask=inside, other=-float('inf'))
        gT = load(gnew_ptr + (b * S + r) * (S + 1) + s, inside) * tl.exp(log)
        gT = adjoint(gT[None], log[None], sum_ptr, b + 0 * r[None], r[None], s[None], B, S, iters)
        tl.store(share_ptr + p, ga, mask=p < S)                 # what this sample adds to the gradients of b and alpha
        tl.store(share_ptr + S + p, gd, mask=p < S)
        tl.store(share_ptr + 2 * S + r[None] * S + s[None], gT, mask=inside[None])
        tl.debug_barrier()                                      # other threads of the program load them
        alpha, z, _ = logits(z_ptr, scale, alpha_a, b_a, alpha_d, b_d, alpha_T, b_T, k, S)
        g = load(share_ptr + k, k < K)
        tl.store(share_ptr + K, scale * tl.sum(tl.where(k < S, g * z, 0.), 0))
        tl.store(share_ptr + K + 1, scale * tl.sum(tl.where((k >= S) & (k < 2 * S), g * z, 0.), 0))
        tl.store(share_ptr + K + 2, scale * tl.sum(tl.where(k >= 2 * S, g * z, 0.), 0))
        g *= alpha * scale
        tl.store(gz_ptr + b * K + k, g, mask=k < K)
        through = tl.sum(g * z, 0) * scale * scale / (S * D)                            # through the scale
        for start in range(0, D, C):
            c = start + tl.arange(0, C)
            rows = tile(means_ptr, pool_ptr, b, q[:, None], c[None, :], Q, D)
            grows = tl.zeros([ROWS, C], tl.float32)
            for t in range(S):
                at = (b * S + t) * D + c
                v = t * D + c[:, None]
                gm = load(gm_ptr + at, c < D) - through * load(m_ptr + at, c < D)
                gm += tl.sum(g[None, :] * columns(phi_a, phi_d, phi_T, v, k[None, :], c[:, None] < D, S), 1)
                T = load(Td_ptr + (b * S + t) * (Q + 1) + q, q <= Q)
                grows += T[:, None] * gm[None, :]
                gTd += tl.where(r == t, tl.sum(gm[None, :] * rows, 1)[None, :], 0.)
            row = q[:, None]
            mask = (c < D)[None, :]
            tl.store(gmeans_ptr + (b * Q + row) * D + c[None, :], grows, mask=(row < Q) & mask)
            tl.store(gpool_ptr + b * D + c[None, :] + 0 * row, grows, mask=(row == Q) & mask)
        tl.store(gTd_ptr + (b * S + r) * (Q + 1) + q[None, :], gTd, mask=(r < S) & (q <= Q)[None, :])

    @triton.jit
    def step(f_ptr, x_ptr, scale_ptr, shift_ptr, Td_ptr, a_ptr, new_ptr, u_ptr, N: tl.constexpr, D: tl.constexpr,
             S: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, R: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr):
        """A program takes R tokens and C channels of all streams of a sample."""
        b, M = tl.program_id(2).to(tl.int64), N * D
        n = tl.program_id(0) * R + tl.arange(0, R)[:, None]
        c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
        i = n * D + c
        inside = (n < N) & (c < D)
        q = tl.arange(0, P)[:, None, None]
        x = load(x_ptr + (b * Q + q) * M + i[None], (q < Q) & inside[None])
        y = load(scale_ptr + b * D + c, c < D) * load(f_ptr + b * M + i, inside) + load(shift_ptr + b * D + c, c < D)
        u = tl.zeros([R, C], tl.float32)
        for r in tl.static_range(S):
            row = Td_ptr + (b * S + r) * (Q + 1)
            new = tl.sum(load(row + q, q < Q) * x, 0) + tl.load(row + Q) * y                            # Eq. (9)
            u += tl.load(a_ptr + b * S + r) * new                                       # a_l x_l of the next sub-layer
            if not LAST:
                tl.store(new_ptr + (b * S + r) * M + i, new, mask=inside)
        tl.store(u_ptr + b * M + i, u, mask=inside)

    @triton.jit
    def step_backward(gnew_ptr, gu_ptr, f_ptr, x_ptr, scale_ptr, shift_ptr, Td_ptr, a_ptr, gx_ptr, g_ptr, part_ptr,
                      sums_ptr, N: tl.constexpr, D: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
                      R: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr):
        b, M = tl.program_id(2).to(tl.int64), N * D
        n = tl.program_id(0) * R + tl.arange(0, R)[:, None]
        c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
        i = n * D + c
        inside = (n < N) & (c < D)
        q = tl.arange(0, P)[:, None, None]
        x = load(x_ptr + (b * Q + q) * M + i[None], (q < Q) & inside[None])
        f = load(f_ptr + b * M + i, inside)
        gu = load(gu_ptr + b * M + i, inside)
        scale = load(scale_ptr + b * D + c, c < D)
        y = scale * f + load(shift_ptr + b * D + c, c < D)
        gx = tl.zeros([P, R, C], tl.float32)
        gy = tl.zeros([R, C], tl.float32)
        block = b * tl.num_programs(0) + tl.program_id(0)
        part_ptr += (block * tl.num_programs(1) + tl.program_id(1)) * S * (Q + 2)       # its share of sums over tokens
        for r in tl.static_range(S):
            row = Td_ptr + (b * S + r) * (Q + 1)
            part = part_ptr + r * (Q + 2)
            T = load(row + q, q < Q)
            d = tl.load(row + Q)
            g = tl.load(a_ptr + b * S + r) * gu
            if not LAST:
                g += load(gnew_ptr + (b * S + r) * M + i, inside)
            gx += T * g[None]
            gy += d * g
            tl.store(part + q, tl.sum(tl.sum(g[None] * x, 2, keep_dims=True), 1, keep_dims=True), mask=q < Q)   # of T
            tl.store(part + Q, tl.sum(tl.sum(g * y, 1), 0))                                             # of d
            tl.store(part + Q + 1, tl.sum(tl.sum(gu * (tl.sum(T * x, 0) + d * y), 1), 0))               # of a
        tl.store(gx_ptr + (b * Q + q) * M + i[None], gx, mask=(q < Q) & inside[None])
        tl.store(g_ptr + b * M + i, scale * gy, mask=inside)
        tl.store(sums_ptr + block * 2 * D + c, tl.sum(gy * f, 0, keep_dims=True), mask=c < D)           # of the scale
        tl.store(sums_ptr + block * 2 * D + D + c, tl.sum(gy, 0, keep_dims=True), mask=c < D)           # of the shift

    @triton.jit
    def samples(m_ptr, gz_ptr, share_ptr, norm_ptr, phi_a, phi_d, phi_T, sums_ptr, B: tl.constexpr, S: tl.constexpr,
                SD: tl.constexpr, K: tl.constexpr, L: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
        """Sums over the samples: the gradients of the three phi, of L numbers of the norm and of the b and alpha."""
        i = tl.program_id(0) * C + tl.arange(0, C)
        n = (SD + C - 1) // C
        k = tl.arange(0, W)[None, :]
        if tl.program_id(0) < n:
            g = tl.zeros([C, W], tl.float32)
            row = i[:, None]
            mask = i[:, None] < SD
            for b in range(B):
                g += load(m_ptr + b * SD + row, mask) * load(gz_ptr + b * K + k, k < K)
            tl.store(phi_a + row * S + k, g, mask=mask & (k < S))
            tl.store(phi_d + row * S + k - S, g, mask=mask & (k >= S) & (k < 2 * S))
            tl.store(phi_T + (row * S - 2) * S + k, g, mask=mask & (k >= 2 * S) & (k < K))
        else:
            i -= n * C
            total = tl.zeros([C], tl.float32)
            for b in range(B):
                total += load(norm_ptr + b * L + i, i < L)
                total += load(share_ptr + b * (K + 3) + i - L, (i >= L) & (i < L + K + 3))
            tl.store(sums_ptr + i, total, mask=i < L + K + 3)

    return {kernel.__name__: kernel for kernel in (norm, norm_backward, mappings, mappings_backward, step,
                                                   step_backward, samples)}


# ------------------------------------------------------------------------------------------------ their operators

LIBRARY = torch.library.Library('aotpot', 'FRAGMENT')
TYPES = dict(eps='float', iters='int', last='bool', parameters='Tensor[]', kept='Tensor[]')       # others are tensors


def operator(plan):
    """Register a kernel as an operator, which torch.compile takes as it is. `plan` has its name and its arguments.

    It gives (outputs, grid, constants). The kernel takes all tensors of the arguments, the outputs and the constants.
    In eager mode it is called without PyTorch's dispatcher, in which the host would spend more time than on the rest.
    """
    name = plan.__name__

    def call(*args):
        outputs, grid, constants = plan(*args)
        tensors = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])
                   if isinstance(x, torch.Tensor)]
        launch(name, grid, tensors + outputs, constants)
        return outputs
    arguments = ', '.join(f'{TYPES.get(name, "Tensor")} {name}' for name in inspect.signature(plan).parameters)
    LIBRARY.define(f'{name}({arguments}) -> Tensor[]')
    LIBRARY.impl(name, call, 'CompositeExplicitAutograd')
    torch.library.register_fake(f'aotpot::{name}', lambda *args: plan(*args)[0], lib=LIBRARY)
    op = getattr(torch.ops.aotpot, name).default
    return lambda *args: op(*args) if torch.compiler.is_compiling() else call(*args)


def launch(name, grid, tensors, constants):
    with torch.cuda.device_of(tensors[0]):                      # Triton launches on the current device
        kernels()[name][grid](*tensors, **constants)


@operator
def norm(f, w, b, eps):
    """f (B, N, D) -> scale, shift, mean of f, mean of y (B, D) and 1 / deviation (B, 8): y = scale f + shift."""
    B, N, D = f.shape
    W = padded(D // 8)
    outputs = [w.new_empty(shape, dtype=torch.float32) for shape in 4 * [(B, D)] + [(B, 8)]]
    return outputs, (8, B), dict(eps=eps, N=N, D=D, W=W, R=max(1, 4096 // W))


@operator
def norm_backward(g, f, sums, gpool, scale, mean, rstd, w):
    """dL/df from g, its part with a constant scale, and the shares (B, 2 D) of the samples in dL/dw and dL/db."""
    B, N, D = f.shape
    W = padded(D // 8)
    outputs = [torch.empty_like(f), scale.new_empty(B, 2 * D)]
    return outputs, (8, B), dict(N=N, D=D, W=W, R=max(1, 4096 // W), BLOCKS=sums.shape[1])


def mapping_sizes(Td, means, iters):
    """The constants of the kernels for the mappings."""
    B, S, columns = Td.shape
    W = padded(S * (S + 2))
    return dict(iters=iters, B=B, S=S, Q=columns - 1, D=means.shape[2], K=S * (S + 2), P=padded(S),
                ROWS=padded(columns + 1), W=W, C=min(256, max(16, 4096 // W)))


@operator
def mappings(Td, means, pool, parameters, iters):
    """[T | d] (B, S, Q+1), means (B, Q, D), mean of y (B, D) -> the next a, [T | d] and means; what backward needs."""
    B, S, _ = Td.shape
    shapes = (B, S), (B, S, S + 1), (B, S, pool.shape[1]), (B, S * (S + 2)), (B, S, S), (iters, 2, B, S), (B,)
    outputs = [pool.new_empty(shape) for shape in shapes]
    eps = torch.finfo(torch.float32).eps        # that of F.rms_norm in fp32
    return outputs, (B,), dict(eps=eps, **mapping_sizes(Td, means, iters))


@operator
def mappings_backward(part, gnew, gm, Td, means, pool, parameters, kept):
    """dL/d[T | d], dL/dmeans, dL/dpool, dL/dz, and the shares (B, K+3) of the samples in those of b and alpha."""
    B, K = kept[1].shape
    outputs = [*map(torch.empty_like, (Td, means, pool, kept[1])), pool.new_empty(B, K + 3)]
    return outputs, (B,), dict(BLOCKS=part.shape[1], **mapping_sizes(Td, means, kept[3].shape[0]))


def step_sizes(f, x, a, last):
    """The grid of the steps, and their constants."""
    B, N, D = f.shape
    S, Q = a.shape[1], x.shape[1]
    R = 128 // padded(S)
    return (-(-N // R), -(-D // 32), B), dict(N=N, D=D, S=S, Q=Q, P=padded(Q), R=R, C=32, LAST=last)


@operator
def step(f, x, scale, shift, Td, a, last):
    """Eq. (9) and the next aggregation: x (B, Q, N D) -> T x + d y (B, S, N D), which the last one drops; a of that."""
    B, S = a.shape
    outputs = [x.new_empty(B, 0 if last else S, x.shape[2]), x.new_empty(f.shape)]
    return outputs, *step_sizes(f, x, a, last)


@operator
def step_backward(gnew, gu, f, x, scale, shift, Td, a, last):
    """dL/dx, scale dL/dy, and sums over blocks: (B, blocks, S, Q+2) for T, d and a, (B, blocks, 2, D) for the norm."""
    B, S, columns = Td.shape
    grid, constants = step_sizes(f, x, a, last)
    outputs = [torch.empty_like(x), x.new_empty(f.shape), a.new_empty(B, grid[0] * grid[1], S, columns + 1),
               a.new_empty(B, grid[0], 2, f.shape[2])]
    return outputs, grid, constants


@operator
def samples(m, gz, share, norm):
    """The gradients of the three phi, and the sums (L + K+3,) of the shares in those of the norm, b and alpha."""
    B, S, D = m.shape
    K, L = gz.shape[1], norm.shape[1]
    outputs = [gz.new_empty(shape) for shape in ((S * D, S), (S * D, S), (S * D, S * S), (L + K + 3,))]
    blocks = -(-S * D // 32) - (-(L + K + 3) // 32)
    return outputs, (blocks,), dict(B=B, S=S, SD=S * D, K=K, L=L, W=padded(K), C=32)


def gradients(m, gz, share, norm):
    """dL/dw and dL/db of the norm, if it has shares, and the gradients of a Mappings' parameters, in their order."""
    *phis, sums = samples(m, gz, share, norm)
    S = m.shape[1]
    w, b, b_a, b_d, b_T, *alphas = sums.split([*2 * [norm.shape[1] // 2], S, S, S * S, 1, 1, 1])
    biases = b_a, b_d, b_T.view(S, S)
    return w, b, *(g for phi, alpha, bias in zip(phis, alphas, biases) for g in (phi, alpha[0], bias))


class Start(torch.autograd.Function):
    """The mappings of the first sub-layer, Eqs. (11) and (12): means of the tokens (B, D) -> [T | d] (B, S, S+1)."""

    @staticmethod
    def forward(ctx, pool, S, iters, *parameters):
        Td = pool.new_ones(len(pool), S, 1)                     # no T, and d = 1: each stream is the tokens
        means = pool.new_empty(len(pool), 0, pool.shape[1])
        _, new, *kept = mappings(Td, means, pool, parameters, iters)
        ctx.save_for_backward(Td, means, pool, *kept, *parameters)
        return new

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gnew):
        Td, means, pool, *others = ctx.saved_tensors
        kept = others[:5]
        parameters = others[5:]
        part = pool.new_empty(len(pool), 0, Td.shape[1], 2)     # no sum over tokens adds to the gradients
        _, _, gpool, gz, share = mappings_backward(part, gnew.contiguous(), torch.zeros_like(kept[0]), Td, means, pool,
                                                   parameters, kept)
        return gpool, None, None, *gradients(kept[0], gz, share, means[:, :, 0])[2:]


class Sublayer(torch.autograd.Function):
    """All that follows what a sub-layer gives, f (B, N, D): norm, Eq. (9), mappings and input of the next sub-layer.

    The streams x (B, Q, N D), their means (B, Q, D) and [T | d] (B, S, Q+1) become those of the next one, after its
    input u. Without parameters of a next one, u is the sum with the weights gate (S,).
    """

    @staticmethod
    def forward(ctx, f, x, means, Td, gate, eps, w, b, iters, *parameters):
        scale, shift, mean, pool, rstd = norm(f, w, b, eps)
        if parameters:
            a, new, *kept = mappings(Td, means, pool, parameters, iters)
        else:
            a = gate.expand(len(f), -1).contiguous()
            new = None
            kept = [None]
        ctx.save_for_backward(f, x, means, Td, a, w, scale, shift, mean, pool, rstd, *kept, *parameters)
        x, u = step(f, x, scale, shift, Td, a, new is None)
        return u, x, kept[0], new

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gu, gx, gm, gnew):
        f, x, means, Td, a, w, scale, shift, mean, pool, rstd, m, *others = ctx.saved_tensors
        gx, g, part, sums = step_backward(gx.contiguous(), gu.contiguous(), f, x, scale, shift, Td, a, m is None)
        if m is None:                                           # the last
            gf, share = norm_backward(g, f, sums, torch.zeros_like(pool), scale, mean, rstd, w)
            part = part.sum(1)
            return gf, gx, None, part[..., :-1], part[..., -1].sum(0), None, *share.sum(0).chunk(2), None
        kept = [m, *others[:4]]
        parameters = others[4:]
        gTd, gmeans, gpool, gz, share = mappings_backward(part, gnew.contiguous(), gm.contiguous(), Td, means, pool,
                                                          parameters, kept)
        gf, norm_share = norm_backward(g, f, sums, gpool, scale, mean, rstd, w)
        gw, gb, *rest = gradients(m, gz, share, norm_share)
        return gf, gx, gmeans, gTd, None, None, gw, gb, None, *rest


def sublayers(x, blocks, gate):
    """The S streams of a batch through all sub-layers: tokens x (B, *grid, D) -> the gated sum of Eq. (13), alike.

    blocks: (AOTBlock, Norm after F, F) of each sub-layer, in their order. gate (S,): the weights of the sum.
    """
    first, *later = [(block.mappings.iters, *block.mappings.parameters()) for block, _, _ in blocks]
    u = x
    with no_autocast(x):
        means = x.flatten(1, -2).mean(1, dtype=torch.float32)                           # (B, D)
        Td = Start.apply(means, len(gate), *first)                                      # (B, S, S+1)
        # all streams are equal here: one row stands for all of them, and a_l x is x
        x = x.reshape(len(x), 1, -1)                                                    # (B, 1, N D)
        means = means[:, None]                                                          # (B, 1, D)
        Td = torch.stack([Td[..., :-1].sum(-1), Td[..., -1]], -1)                       # (B, S, 2)
    for (_, post, sublayer), parameters in zip(blocks, [*later, (0,)]):
        f = sublayer(u).flatten(1, -2).contiguous()
        with no_autocast(f):
            y, x, means, Td = Sublayer.apply(f, x, means, Td, gate, post.eps, post.weight, post.bias, *parameters)
        u = y.view(u.shape)
    return u
