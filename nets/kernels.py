"""Eq. (9) and its mappings on a GPU: two Triton kernels forward, two backward, in the place of some sixty small ones.

`mappings` and `step` compute what AOTBlock and Mappings of aotpot.py say, for the streams of one sub-layer after the
other; nets/fast.py calls them where `usable` says so. The rounds of Sinkhorn are those of sinkhorn.py.

B samples   S streams   D width   M = h w D numbers of a stream   Q rows that enter a step: S, or 1 before the first,
since all streams are equal there   K = 2 S + S^2 logits
"""
import functools

import configs

import torch

import sinkhorn
from aotpot import AOTBlock
from nets.precision import no_autocast, transformed, weighted

EPS = torch.finfo(torch.float32).eps        # that of F.rms_norm in fp32


def usable(x, config):
    """Whether the kernels can run for the tokens x: on CUDA with Triton, not in fp64, with all three mappings."""
    return ((x.is_cuda or sinkhorn.INTERPRET) and sinkhorn.TRITON and x.dtype != torch.float64
            and not config.ablate and config.streams <= 16
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
        blocks = [(AOTBlock(config), torch.nn.Linear(16, 16)) for _ in range(3)]
        parameters = [parameter for block in blocks for module in block for parameter in module.parameters()]
        for parameter in parameters:
            torch.nn.init.normal_(parameter, std=0.3)
        x, gate, results = torch.randn(2, 4, 4, 16), torch.tensor([0.4, 0.3, 0.2, 0.1]), []
        plain = x[:, None].expand(-1, 4, -1, -1, -1)
        for block, sublayer in blocks:
            plain = block(plain, sublayer)
        for out in (sublayers(x, blocks, gate), weighted('s,bs...->b...', gate, plain)):
            gradients = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
            results.append([out, *(g for g in gradients if g is not None and g.norm() > 1e-3)])
        return all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(*results, strict=True))


@functools.cache
def kernels():
    """The four kernels: (mappings, its backward, step, its backward). A program of the first two takes one sample."""
    global tl, rounds, adjoint, logits                          # Triton looks a kernel's names up among the globals
    import triton
    import triton.language as tl
    _, _, rounds, adjoint = sinkhorn.kernels()

    @triton.jit
    def logits(z_ptr, alpha_ptr, b_ptr, scale, offset, i, mask):
        """(alpha, z, alpha * scale * z + b) of the logits at the offsets i: Eq. (11) with v = scale * mean."""
        alpha = tl.load(alpha_ptr)
        z = tl.load(z_ptr + offset + i, mask=mask, other=0.)
        return alpha, z, alpha * scale * z + tl.load(b_ptr + i, mask=mask, other=0.)

    @triton.jit
    def forward(m_ptr, z_ptr, alpha_a, alpha_d, alpha_T, b_a, b_d, b_T, a_ptr, Td_ptr, log_ptr, sum_ptr, scale_ptr,
                B, S, SD, eps, iters: tl.constexpr, N: tl.constexpr, L: tl.constexpr):
        b = tl.program_id(0).to(tl.int64)
        i, k = tl.arange(0, L), tl.arange(0, N)
        m = tl.load(m_ptr + b * SD + i, mask=i < SD, other=0.)
        scale = 1 / tl.sqrt(tl.sum(m * m, 0) / SD + eps)                                # v = scale * mean
        z_ptr += b * (2 * S + S * S)
        _, _, a = logits(z_ptr, alpha_a, b_a, scale, 0, k, k < S)
        _, _, d = logits(z_ptr, alpha_d, b_d, scale, S, k, k < S)
        a = tl.where(k < S, tl.sigmoid(a), 0.)
        tl.store(a_ptr + b * S + k, a / tl.sum(a, 0), mask=k < S)                       # Eq. (12)
        tl.store(Td_ptr + (b * S + k) * (S + 1) + S, 2 * tl.sigmoid(d), mask=k < S)
        r, s = k[None, :, None], k[None, None, :]
        inside = (r < S) & (s < S)
        _, _, T = logits(z_ptr, alpha_T, b_T, scale, 2 * S, r * S + s, inside)
        T = tl.where(inside, T, tl.where((r < S) == (s < S), 0., -float('inf')))
        T = rounds(T, sum_ptr, b + 0 * r, r, s, B, S, iters)
        tl.store(log_ptr + (b * S + r) * S + s, T, mask=inside)
        tl.store(Td_ptr + (b * S + r) * (S + 1) + s, tl.exp(T), mask=inside)
        tl.store(scale_ptr + b, scale)

    @triton.jit
    def backward(ga_ptr, gTd_ptr, gm_ptr, ga_stride, ga_step, gm_stride, m_ptr, z_ptr, alpha_a, alpha_d, alpha_T, b_a,
                 b_d, b_T, log_ptr, sum_ptr, scale_ptr, gz_ptr, out_ptr, part_ptr, B, S, SD, iters: tl.constexpr,
                 N: tl.constexpr, L: tl.constexpr):
        b = tl.program_id(0).to(tl.int64)
        i, k, K = tl.arange(0, L), tl.arange(0, N), 2 * S + S * S
        scale = tl.load(scale_ptr + b)
        z_ptr += b * K
        gz_ptr += b * K
        part_ptr += b * (K + 3)                                 # what this sample adds to the gradients of b and alpha
        one_a, za, a = logits(z_ptr, alpha_a, b_a, scale, 0, k, k < S)
        one_d, zd, d = logits(z_ptr, alpha_d, b_d, scale, S, k, k < S)
        a, d = tl.where(k < S, tl.sigmoid(a), 0.), tl.sigmoid(d)
        ga = tl.load(ga_ptr + b * ga_stride + k * ga_step, mask=k < S, other=0.)
        gd = tl.load(gTd_ptr + (b * S + k) * (S + 1) + S, mask=k < S, other=0.)
        ga = (ga - tl.sum(ga * a, 0) / tl.sum(a, 0)) / tl.sum(a, 0) * a * (1 - a)
        gd = 2 * gd * d * (1 - d)
        r, s = k[None, :, None], k[None, None, :]
        inside = (r < S) & (s < S)
        log = tl.load(log_ptr + (b * S + r) * S + s, mask=inside, other=-float('inf'))
        gT = tl.load(gTd_ptr + (b * S + r) * (S + 1) + s, mask=inside, other=0.) * tl.exp(log)
        gT = adjoint(gT, log, sum_ptr, b + 0 * r, r, s, B, S, iters)
        one_T, zT, _ = logits(z_ptr, alpha_T, b_T, scale, 2 * S, r * S + s, inside)
        tl.store(gz_ptr + k, one_a * scale * ga, mask=k < S)
        tl.store(gz_ptr + S + k, one_d * scale * gd, mask=k < S)
        tl.store(gz_ptr + 2 * S + r * S + s, one_T * scale * gT, mask=inside)
        tl.store(part_ptr + k, ga, mask=k < S)
        tl.store(part_ptr + S + k, gd, mask=k < S)
        tl.store(part_ptr + 2 * S + r * S + s, gT, mask=inside)
        sum_a, sum_d, sum_T = tl.sum(ga * za, 0), tl.sum(gd * zd, 0), tl.sum(tl.sum(tl.sum(gT * zT, 2), 1), 0)
        tl.store(part_ptr + K, scale * sum_a)
        tl.store(part_ptr + K + 1, scale * sum_d)
        tl.store(part_ptr + K + 2, scale * sum_T)
        m = tl.load(m_ptr + b * SD + i, mask=i < SD, other=0.)                          # through the scale
        gm = tl.load(gm_ptr + b * gm_stride + i, mask=i < SD, other=0.)
        gm -= (one_a * sum_a + one_d * sum_d + one_T * sum_T) * scale * scale * scale / SD * m
        tl.store(out_ptr + b * SD + i, gm, mask=i < SD)

    @triton.jit
    def streams_forward(x_ptr, y_ptr, Td_ptr, a_ptr, new_ptr, u_ptr, M, S: tl.constexpr, Q: tl.constexpr,
                        ROWS: tl.constexpr, BLOCK: tl.constexpr):
        b = tl.program_id(1).to(tl.int64)
        i, q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)[:, None]
        x = tl.load(x_ptr + (b * Q + q) * M + i[None, :], mask=(q < Q) & (i[None, :] < M), other=0.).to(tl.float32)
        y = tl.load(y_ptr + b * M + i, mask=i < M, other=0.).to(tl.float32)
        u = tl.zeros([BLOCK], tl.float32)
        for r in tl.static_range(S):
            row = Td_ptr + (b * S + r) * (Q + 1)
            new = tl.sum(tl.load(row + q, mask=q < Q, other=0.) * x, 0) + tl.load(row + Q) * y          # Eq. (9)
            u += tl.load(a_ptr + b * S + r) * new                                       # a_l x_l of the next sub-layer
            tl.store(new_ptr + (b * S + r) * M + i, new, mask=i < M)
        tl.store(u_ptr + b * M + i, u, mask=i < M)

    @triton.jit
    def streams_backward(gnew_ptr, gu_ptr, x_ptr, y_ptr, Td_ptr, a_ptr, gx_ptr, gy_ptr, part_ptr, M,
                         S: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        b = tl.program_id(1).to(tl.int64)
        i, q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)[:, None]
        inside = (q < Q) & (i[None, :] < M)
        x = tl.load(x_ptr + (b * Q + q) * M + i[None, :], mask=inside, other=0.).to(tl.float32)
        y = tl.load(y_ptr + b * M + i, mask=i < M, other=0.).to(tl.float32)
        gu = tl.load(gu_ptr + b * M + i, mask=i < M, other=0.).to(tl.float32)
        gx, gy = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        part_ptr += (b * tl.num_programs(0) + tl.program_id(0)) * S * (Q + 2)       # this block's share of sums over i
        for r in tl.static_range(S):
            row, part = Td_ptr + (b * S + r) * (Q + 1), part_ptr + r * (Q + 2)
            T, d = tl.load(row + q, mask=q < Q, other=0.), tl.load(row + Q)
            g = tl.load(gnew_ptr + (b * S + r) * M + i, mask=i < M, other=0.).to(tl.float32)
            g += tl.load(a_ptr + b * S + r) * gu
            gx += T * g[None, :]
            gy += d * g
            tl.store(part + q, tl.sum(g[None, :] * x, 1, keep_dims=True), mask=q < Q)               # of T
            tl.store(part + Q, tl.sum(g * y, 0))                                                    # of d
            tl.store(part + Q + 1, tl.sum(gu * (tl.sum(T * x, 0) + d * y), 0))                      # of a
        tl.store(gx_ptr + (b * Q + q) * M + i[None, :], gx, mask=inside)
        tl.store(gy_ptr + b * M + i, gy, mask=i < M)

    return forward, backward, streams_forward, streams_backward


BLOCK = 1024                    # numbers of a stream that a program of `step` takes


def sizes(B, S, SD):
    """What the kernels of the mappings take last: sizes, and those that are padded to a power of two."""
    return dict(B=B, S=S, SD=SD, N=sinkhorn.padded(S), L=sinkhorn.padded(SD))


def launch_step(kernel, *tensors, x, S):
    B, Q, M = x.shape
    kernel[(-(-M // BLOCK), B)](*tensors, M, S=S, Q=Q, ROWS=sinkhorn.padded(Q), BLOCK=BLOCK)


# as operators, torch.compile takes the kernels as they are and does not look inside
@torch.library.custom_op('aotpot::mappings', mutates_args=())
def run_mappings(m: torch.Tensor, z: torch.Tensor, alphas: list[torch.Tensor], bs: list[torch.Tensor],
                 iters: int) -> list[torch.Tensor]:
    """The means m (B, SD) and their products z (B, K) -> a (B, S), [T | d] (B, S, S+1), and what backward needs."""
    B, S = len(m), len(bs[0])
    out = empty_mappings(m, z, alphas, bs, iters)
    with torch.cuda.device_of(m):                               # Triton launches on the current device
        kernels()[0][(B,)](m, z, *alphas, *bs, *out, eps=EPS, iters=iters, **sizes(B, S, m.shape[1]))
    return out


@run_mappings.register_fake
def empty_mappings(m, z, alphas, bs, iters):
    B, S = len(m), len(bs[0])
    return [m.new_empty(shape) for shape in ((B, S), (B, S, S + 1), (B, S, S), (iters, 2, B, S), (B,))]


@torch.library.custom_op('aotpot::mappings_backward', mutates_args=())
def run_mappings_backward(ga: torch.Tensor, gTd: torch.Tensor, gm: torch.Tensor, m: torch.Tensor, z: torch.Tensor,
                          alphas: list[torch.Tensor], bs: list[torch.Tensor], log: torch.Tensor, sums: torch.Tensor,
                          scale: torch.Tensor) -> list[torch.Tensor]:
    """dL/dz, dL/dm but for its part through z, and what each sample adds to the gradients of b and alpha (B, K+3)."""
    out = empty_mappings_backward(ga, gTd, gm, m, z, alphas, bs, log, sums, scale)
    with torch.cuda.device_of(m):
        kernels()[1][(len(m),)](ga, gTd, gm, *ga.stride(), gm.stride(0), m, z, *alphas, *bs, log, sums, scale, *out,
                                iters=len(sums), **sizes(len(m), len(bs[0]), m.shape[1]))
    return out


@run_mappings_backward.register_fake
def empty_mappings_backward(ga, gTd, gm, m, z, alphas, bs, log, sums, scale):
    return [torch.empty_like(z), torch.empty_like(m), z.new_empty(len(z), z.shape[1] + 3)]


@torch.library.custom_op('aotpot::step', mutates_args=())
def run_step(x: torch.Tensor, y: torch.Tensor, Td: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
    out = empty_step(x, y, Td, a)
    with torch.cuda.device_of(x):
        launch_step(kernels()[2], x, y, Td, a, *out, x=x, S=a.shape[1])
    return out


@run_step.register_fake
def empty_step(x, y, Td, a):
    return [x.new_empty(len(x), a.shape[1], x.shape[2]), x.new_empty(y.shape)]


@torch.library.custom_op('aotpot::step_backward', mutates_args=())
def run_step_backward(gnew: torch.Tensor, gu: torch.Tensor, x: torch.Tensor, y: torch.Tensor, Td: torch.Tensor,
                      a: torch.Tensor) -> list[torch.Tensor]:
    out = empty_step_backward(gnew, gu, x, y, Td, a)
    with torch.cuda.device_of(x):
        launch_step(kernels()[3], gnew, gu, x, y, Td, a, *out, x=x, S=a.shape[1])
    return out


@run_step_backward.register_fake
def empty_step_backward(gnew, gu, x, y, Td, a):
    B, Q, M = x.shape
    return [torch.empty_like(x), torch.empty_like(y), a.new_empty(B, -(-M // BLOCK), a.shape[1], Q + 2)]


class Maps(torch.autograd.Function):
    """Eqs. (11) and (12) after a sub-layer: Td (B, S, Q+1), rows (B, Q+1, D) -> m (B, S, D), a_l and the new [T | d].

    Td is [T | d] of that sub-layer, and the rows are the means over the grid of the streams before it and of its
    output, so that m = Td rows holds those after it.
    """

    @staticmethod
    def forward(ctx, Td, rows, iters, *parameters):
        phis, alphas, bs = parameters[::3], list(parameters[1::3]), list(parameters[2::3])
        m, phi = torch.bmm(Td, rows), torch.cat(phis, 1)                # the three phi side by side, (SD, K)
        z = m.flatten(1) @ phi
        a, new, *kept = run_mappings(m.flatten(1), z, alphas, bs, iters)
        ctx.save_for_backward(Td, rows, m, z, phi, *kept, *alphas, *bs)
        return m, a, new

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gm, ga, gnew):
        Td, rows, m, z, phi, log, sums, scale, *parameters = ctx.saved_tensors
        S, flat, alphas, bs = m.shape[1], m.flatten(1), parameters[:3], parameters[3:]
        gz, gm, parts = run_mappings_backward(ga, gnew.contiguous(), gm.flatten(1), flat, z,
                                              alphas, bs, log, sums, scale)
        gm = torch.addmm(gm, gz, phi.T).view(m.shape)
        *gb, galpha = parts.sum(0).split([S, S, S * S, 3])
        gphi = [flat.T @ part for part in gz.split([S, S, S * S], 1)]   # one by one, as the parameters are laid out
        triples = zip(gphi, galpha, (g.view_as(b) for g, b in zip(gb, bs)))
        return torch.bmm(gm, rows.mT), torch.bmm(Td.mT, gm), None, *(g for triple in triples for g in triple)


class Step(torch.autograd.Function):
    """Eq. (9) and the next aggregation: x (B, Q, M), y (B, M) -> T x + d y (B, S, M), and a of that (B, M)."""

    @staticmethod
    def forward(ctx, x, y, Td, a):
        ctx.save_for_backward(x, y, Td, a)
        return tuple(run_step(x, y, Td, a))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gnew, gu):
        gx, gy, parts = run_step_backward(gnew.contiguous(), gu.contiguous(), *ctx.saved_tensors)
        parts = parts.sum(1)                                                            # (B, S, Q+2)
        return gx, gy, parts[..., :-1], parts[..., -1]


def sublayers(x, blocks, gate):
    """The S streams of a batch through all sub-layers: tokens x (B, *grid, D) -> the gated sum of Eq. (13), alike.

    blocks: (AOTBlock, F) of each sub-layer, in their order. gate (S,): the weights of the sum.
    """
    B, shape, pool = len(x), x.shape, lambda y: y.flatten(1, -2).mean(1, True, dtype=torch.float32)     # (B, 1, D)
    parameters = [(block.mappings.iters, *block.mappings.parameters()) for block, _ in blocks]
    with no_autocast(x):
        means = pool(x)
        _, _, Td = Maps.apply(means.new_ones(B, len(gate), 1), means, *parameters[0])
        # all streams are equal here: one row stands for all of them, and a_l x is x
        u, x, Td = x, x.reshape(B, 1, -1), torch.stack([Td[..., :-1].sum(-1), Td[..., -1]], -1)
    for l, (_, sublayer) in enumerate(blocks):
        y = sublayer(u)
        with no_autocast(y):
            new, a = None, gate.expand(B, -1).contiguous()
            if l + 1 < len(blocks):
                means, a, new = Maps.apply(Td, torch.cat([means, pool(y)], 1), *parameters[l + 1])
            x, u = Step.apply(x, y.reshape(B, -1), Td, a)
        Td, u = new, u.view(shape)
    return u
