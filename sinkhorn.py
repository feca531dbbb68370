"""Sinkhorn-Knopp: make a square matrix doubly stochastic. Needs torch and nothing else: copy this file and use it.

    sinkhorn(logits)                the fastest form for the device: impl='auto'
    sinkhorn(logits, impl='torch')  the plain loop, on any device, differentiable any number of times
    sinkhorn(logits, impl='triton') one kernel forward and one backward, n <= 16, float32 inside

Problem.  Given logits Z, find the doubly stochastic matrix diag(u) exp(Z) diag(v): entries >= 0, every row and every
          column sums to 1. It is the one nearest to exp(Z) in KL divergence. This file stops after `iters` rounds.
Source.   Sinkhorn & Knopp, "Concerning nonnegative matrices and doubly stochastic matrices", Pacific J. Math. 1967. In
          the AOT-POT paper T_l = Sinkhorn-Knopp(T~_l), Eq. (constraint), onto the Birkhoff polytope, Eq. (birkhoff).
Shapes.   logits (..., n, n) -> same shape and dtype; any batch shape, also none or empty. n is the number of streams.
          Computed in float32, or float64 for a float64 input, inside any autocast; only the result is cast back.
Axes.     Row r is the result stream, column s the source stream: new x_r = sum_s T[r, s] x_s.
Order.    A round is columns, then rows; rows come last. So every row sums to 1 to rounding and each result stream is
          an exact average of the sources; the column sums (how much of a source survives) are right up to Error.
          A constant added to a column of logits changes nothing; one added to a row, about as much as Error.
Forms.    The loop is the specification; the others equal it to rounding. 'auto' takes the kernel on CUDA where triton
          is installed, n <= 16 and the input is not float64; `scaled` on the CPU in eager mode; the loop elsewhere.
Domain.   Logarithms, so logits of +-1e4 are fine; plain exponentials underflow there in whole rows. The two fast forms
          take the maximum of every column out, then of every row: each then holds a 0, every later sum lies between
          1/n and n, and no further maximum is needed. `scaled` leaves the logarithm after that.
Error.    Largest |column sum - 1| of a matrix, median and worst of 4096 random 4x4 ones with logits ~ N(0, sigma^2), in
          float32, whose rounding is 2e-7. `python sinkhorn.py` prints this table:

          iters |    sigma 0.1    |     sigma 1     |     sigma 2     |     sigma 4
              5 |   6e-08   2e-07 |   3e-04   7e-02 |   1e-02   2e-01 |   8e-02   9e-01
             10 |   6e-08   2e-07 |   4e-07   1e-02 |   5e-04   8e-02 |   2e-02   2e-01
             20 |   6e-08   2e-07 |   5e-08   4e-04 |   9e-07   3e-02 |   3e-03   7e-02
             50 |   6e-08   2e-07 |   5e-08   3e-07 |   6e-08   1e-02 |   9e-06   2e-02

Gradient. Exact for `iters` rounds, converged or not: of the loop by autograd, of the others by its adjoint, once
          differentiable. With P the matrix after half a round and H = dL/d log P, half a round back is
          H <- H - P * (sum of H along what was normalised). Memory grows with `iters`.
Infinity. -inf is a structural zero: the entry is exactly 0, its gradient too, and all gradients stay finite. Columns
          can only converge if some permutation avoids all zeros. A row or column of -inf alone, or a +inf, gives NaN.
Raises.   TypeError: not a floating-point tensor. ValueError: not (..., n, n), iters < 1, an impl that is unknown or
          cannot take this input, or NaN in the logits. ImportError: impl='triton' without triton. NaN is
          looked for on the CPU in eager mode only, and with check=False nowhere: looking would stall a device or cut a
          compiled graph. There a matrix that holds a NaN comes out all NaN, its batch mates untouched.

Published variants differ; with the streams' axes named as above:

          variant                 exact at the end                         domain
          this file               rows: each result stream is an average   log
          DeepSeek TileKernels    rows (it stores T transposed)            exp, from softmax + eps
          lucidrains              columns: the sum of the streams stays    exp, log as an option

Example.  The limit for [[a, b], [c, d]] has sqrt(ad) / (sqrt(ad) + sqrt(bc)) in its corner, here e / (e + 1):

>>> T = sinkhorn(torch.tensor([[2., 0.], [0., 0.]]))
>>> T
tensor([[0.7311, 0.2689],
        [0.2689, 0.7311]])
>>> x = torch.tensor([[1., 10.], [3., 30.]])    # two streams, two channels
>>> torch.einsum('rs,sd->rd', T, x)             # both move towards the average; the sum of the streams stays
tensor([[ 1.5379, 15.3788],
        [ 2.4621, 24.6212]])
"""
import functools
import importlib.util
import math
import os

import torch

TRITON = importlib.util.find_spec('triton') is not None     # itself it is imported at its first use
INTERPRET = os.environ.get('TRITON_INTERPRET') == '1'       # on a CPU, to test


def sinkhorn(logits, iters=20, check=True, impl='auto'):
    """(..., n, n) logits -> (..., n, n) doubly stochastic: rows sum to 1, columns nearly. See the top of the file."""
    if not torch.is_tensor(logits) or not logits.is_floating_point():
        got = getattr(logits, 'dtype', type(logits).__name__)
        raise TypeError(f'logits are {got}; expected a floating-point torch tensor (..., n, n)')
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f'logits have shape {tuple(logits.shape)}; expected square matrices (..., n, n)')
    if iters < 1:
        raise ValueError(f'iters is {iters}; expected at least 1')
    if impl not in ('auto', 'torch', 'triton'):
        raise ValueError(f"impl is {impl!r}; expected 'auto', 'torch' or 'triton'")
    fits = logits.shape[-1] <= 16 and logits.dtype != torch.float64
    if impl == 'triton' and not fits:
        raise ValueError(f"impl 'triton' got {logits.dtype}, n = {logits.shape[-1]}; expected n <= 16 and no float64")
    if impl == 'triton' and not TRITON:
        raise ImportError("impl 'triton' needs triton: pip install triton")
    if impl == 'triton' and not (logits.is_cuda or INTERPRET):
        raise ValueError(f"impl 'triton' got logits on {logits.device}; expected CUDA (or TRITON_INTERPRET=1 to test)")
    # elsewhere a look at the values would wait for the GPU, or break the compiled graph in two
    eager = logits.device.type == 'cpu' and not torch.compiler.is_compiling()
    if check and eager and logits.numel() and logits.amax().isnan():
        raise ValueError(f'logits hold {int(logits.isnan().sum())} NaN among {logits.numel()} values; expected none')
    with torch.autocast(logits.device.type, enabled=False):     # bf16 rounds would leave rows 0.5 % off
        z = logits if logits.dtype == torch.float64 else logits.float()
        if z.numel() and (impl == 'triton' or impl == 'auto' and z.is_cuda and TRITON and fits):
            p = fused(z.reshape(-1, *z.shape[-2:]), iters)[0].view(z.shape)
        elif z.numel() and impl == 'auto' and eager:
            p = scaled(z, iters)
        else:
            p = loop(z, iters)
        return p.to(logits.dtype)


def loop(z, iters):
    """The plain form."""
    for _ in range(iters):
        # not z - z.logsumexp(): around -1e4 that rounds to 1e-3, while log_softmax takes the maximum out first
        z = z.log_softmax(-2).log_softmax(-1)
    return z.exp()


def sinkhorn_reference(z, iters=20):
    """The specification: one matrix (n, n), float64, exp domain, obvious at a glance."""
    p = z.double().exp()
    for _ in range(iters):
        p = p / p.sum(0)                        # columns
        p = p / p.sum(1, keepdim=True)          # then rows
    return p


# ------------------------------------------------------------------------------------------------ CPU

def scaled(z, iters):
    """`loop` with the batch as the last axis, so that every operation is one vector operation, in the exp domain.

    Half a round changes an entry by a factor of at most n. So one that underflowed, below e^-87, stays negligible while
    n^(2 iters) <= e^60; and if none starts below e^-40, none ever underflows: the logarithms of the two scalings then
    differ by at most 40 each. Else the loop is taken; so it is for a few matrices, where nothing is saved.
    """
    n = z.shape[-1]
    if z.numel() < 1024:
        return loop(z, iters)
    with torch.no_grad():
        P = z.reshape(-1, n, n).permute(1, 2, 0).contiguous()                           # (n, n, B)
        P = P - P.amax(0, keepdim=True)
        top = P.amax(1, keepdim=True)
        P, top = P.sub_(top).exp_(), top.exp()
    if 2 * iters * math.log(n) > 60 and not P.amin() >= math.exp(-40):                  # a NaN may hide a smaller one
        return loop(z, iters)
    return Scaled.apply(z, P, top, iters)


class Scaled(torch.autograd.Function):
    """The rounds of `scaled` on P (n, n, B), whose row maxima top (n, 1, B) were taken out; backward: see Gradient."""

    @staticmethod
    def forward(ctx, z, P, top, iters):
        sums, column = [], (P * top).sum(0, keepdim=True)
        for _ in range(iters):
            P.mul_(column.reciprocal())                         # much faster than to divide
            row = P.sum(1, keepdim=True)
            P.mul_(row.reciprocal())
            sums.append((column, row))
            column = P.sum(0, keepdim=True)
        sums[0][1].mul_(top)                                    # the row sums with the maxima still in
        ctx.P, ctx.sums = P, sums
        return P.permute(2, 0, 1).reshape(z.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        P = ctx.P.clone()
        H = upstream.reshape(-1, *upstream.shape[-2:]).permute(1, 2, 0).contiguous().mul_(P)
        for column, row in reversed(ctx.sums):
            H.addcmul_(P, H.sum(1, keepdim=True), value=-1)
            P.mul_(row)
            H.addcmul_(P, H.sum(0, keepdim=True), value=-1)
            P.mul_(column)
        return H.permute(2, 0, 1).reshape(upstream.shape), None, None, None


# ------------------------------------------------------------------------------------------------ CUDA

@functools.cache
def kernels():
    """Triton's two kernels, for BLOCK matrices a program, n padded to N: (launch forward, launch backward)."""
    global tl                                                   # where a kernel's names are looked up
    import triton
    import triton.language as tl

    @triton.jit
    def forward(z_ptr, p_ptr, log_ptr, sum_ptr, B, n, iters, N: tl.constexpr, BLOCK: tl.constexpr):
        b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
        r, s = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
        # what pads a matrix is a block of its own, whose sums are finite and touch no other
        inside = (b < B) & (r < n) & (s < n)
        z = tl.load(z_ptr + (b * n + r) * n + s, mask=inside, other=tl.where((r < n) == (s < n), 0., -float('inf')))
        z -= tl.max(z, 1, keep_dims=True)
        top = tl.max(z, 2, keep_dims=True)
        z -= top
        column = tl.log(tl.sum(tl.exp(z + top), 1, keep_dims=True))
        for t in range(iters):
            z -= column
            row = tl.log(tl.sum(tl.exp(z), 2, keep_dims=True))
            z -= row
            tl.store(sum_ptr + (2 * t * B + b) * n + s, column, mask=(b < B) & (s < n))
            tl.store(sum_ptr + ((2 * t + 1) * B + b) * n + r, row + top, mask=(b < B) & (r < n))
            top *= 0                                            # in the sums of the first round only
            column = tl.log(tl.sum(tl.exp(z), 1, keep_dims=True))
        tl.store(log_ptr + (b * n + r) * n + s, z, mask=inside)
        tl.store(p_ptr + (b * n + r) * n + s, tl.exp(z), mask=inside)

    @triton.jit
    def backward(upstream_ptr, log_ptr, sum_ptr, h_ptr, B, n, iters, N: tl.constexpr, BLOCK: tl.constexpr):
        b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
        r, s = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
        inside = (b < B) & (r < n) & (s < n)
        z = tl.load(log_ptr + (b * n + r) * n + s, mask=inside, other=-float('inf'))
        h = tl.load(upstream_ptr + (b * n + r) * n + s, mask=inside, other=0.) * tl.exp(z)
        for t in range(iters):
            back = iters - 1 - t
            row = tl.load(sum_ptr + ((2 * back + 1) * B + b) * n + r, mask=(b < B) & (r < n), other=0.)
            column = tl.load(sum_ptr + (2 * back * B + b) * n + s, mask=(b < B) & (s < n), other=0.)
            h -= tl.exp(z) * tl.sum(h, 2, keep_dims=True)
            z += row
            h -= tl.exp(z) * tl.sum(h, 1, keep_dims=True)
            z += column
        tl.store(h_ptr + (b * n + r) * n + s, h, mask=inside)

    def launch(kernel, *tensors, B, n, iters):
        N = triton.next_power_of_2(n)
        BLOCK = max(1, 128 // N ** 2)       # one warp: its sums are shuffles, without shared memory or a barrier
        with torch.cuda.device_of(tensors[0]):                  # Triton launches on the current device
            kernel[(triton.cdiv(B, BLOCK),)](*tensors, B, n, iters, N=N, BLOCK=BLOCK, num_warps=1)
    return functools.partial(launch, forward), functools.partial(launch, backward)


# operators, so that torch.compile takes the kernels as they are, without a look inside
@torch.library.custom_op('aotpot::sinkhorn', mutates_args=(),
                         schema='(Tensor z, int iters) -> (Tensor, Tensor, Tensor)')
def fused(z, iters):
    """z (B, n, n) float32 -> P, its logarithm, and the logarithms (iters, 2, B, n) of the sums of every round."""
    B, n, _ = z.shape
    z = z.contiguous()
    P, log, sums = torch.empty_like(z), torch.empty_like(z), z.new_empty(iters, 2, B, n)
    kernels()[0](z, P, log, sums, B=B, n=n, iters=iters)
    return P, log, sums


@torch.library.custom_op('aotpot::sinkhorn_backward', mutates_args=(),
                         schema='(Tensor upstream, Tensor log, Tensor sums) -> Tensor')
def fused_backward(upstream, log, sums):
    """dL/dz from dL/dP and what `fused` returned beside P; every round's matrix is recomputed from its sums."""
    iters, _, B, n = sums.shape
    H = torch.empty_like(log)
    kernels()[1](upstream.contiguous(), log, sums, H, B=B, n=n, iters=iters)
    return H


fused.register_fake(lambda z, iters: (torch.empty_like(z, memory_format=torch.contiguous_format),
                                      torch.empty_like(z, memory_format=torch.contiguous_format),
                                      z.new_empty(iters, 2, *z.shape[:2])))
fused_backward.register_fake(lambda upstream, log, sums: torch.empty_like(log))


def keep(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)            # else zeros would be made for what is not differentiated: two launches


fused.register_autograd(lambda ctx, upstream, *_: (fused_backward(upstream, *ctx.saved_tensors), None),
                        setup_context=keep)


# ------------------------------------------------------------------------------------------------ the table of errors

def column_error(sigma, iters, matrices=4096, n=4, seed=0):
    """(median, worst) over random matrices, logits ~ N(0, sigma^2), of the largest |column sum - 1| of a matrix."""
    logits = sigma * torch.randn(matrices, n, n, generator=torch.Generator().manual_seed(seed))
    error = (sinkhorn(logits, iters).double().sum(-2) - 1).abs().amax(-1)
    return error.median().item(), error.max().item()


if __name__ == '__main__':
    sigmas = (0.1, 1, 2, 4)
    print('iters | ' + ' | '.join(f'{f"sigma {sigma}":^15}' for sigma in sigmas).rstrip())
    for iters in (5, 10, 20, 50):
        cells = ('{:7.0e} {:7.0e}'.format(*column_error(sigma, iters)) for sigma in sigmas)
        print(f'{iters:5} | ' + ' | '.join(cells))
