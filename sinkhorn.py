"""Sinkhorn-Knopp: make a square matrix doubly stochastic. Needs torch and nothing else: copy this file and use it.

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
Domain.   Logarithms throughout, so logits of +-1e4 are fine; in the exp domain whole rows underflow to 0 there.
Error.    Largest |column sum - 1| of a matrix, median and worst of 4096 random 4x4 ones with logits ~ N(0, sigma^2), in
          float32, whose rounding is 2e-7. `python sinkhorn.py` prints this table:

          iters |    sigma 0.1    |     sigma 1     |     sigma 2     |     sigma 4
              5 |   6e-08   2e-07 |   3e-04   7e-02 |   1e-02   2e-01 |   8e-02   9e-01
             10 |   6e-08   2e-07 |   4e-07   1e-02 |   5e-04   8e-02 |   2e-02   2e-01
             20 |   6e-08   2e-07 |   6e-08   4e-04 |   8e-07   3e-02 |   3e-03   7e-02
             50 |   6e-08   2e-07 |   6e-08   2e-07 |   1e-07   1e-02 |   9e-06   2e-02

Gradient. Exact for the rounds that ran, converged or not: autograd through the loop. Memory grows with `iters`.
Infinity. -inf is a structural zero: the entry is exactly 0, its gradient too, and all gradients stay finite. Columns
          can only converge if some permutation avoids all zeros. A row or column of -inf alone, or a +inf, gives NaN.
Raises.   TypeError: not a floating-point tensor. ValueError: not (..., n, n), iters < 1, or NaN in the logits. NaN is
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
import torch


def sinkhorn(logits, iters=20, check=True):
    """(..., n, n) logits -> (..., n, n) doubly stochastic: rows sum to 1, columns nearly. See the top of the file."""
    if not torch.is_tensor(logits) or not logits.is_floating_point():
        got = getattr(logits, 'dtype', type(logits).__name__)
        raise TypeError(f'logits are {got}; expected a floating-point torch tensor (..., n, n)')
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f'logits have shape {tuple(logits.shape)}; expected square matrices (..., n, n)')
    if iters < 1:
        raise ValueError(f'iters is {iters}; expected at least 1')
    # elsewhere a look at the values would wait for the GPU, or break the compiled graph in two
    if check and logits.device.type == 'cpu' and not torch.compiler.is_compiling() and logits.isnan().any():
        raise ValueError(f'logits hold {int(logits.isnan().sum())} NaN among {logits.numel()} values; expected none')
    with torch.autocast(logits.device.type, enabled=False):     # bf16 rounds would leave rows 0.5 % off
        z = logits if logits.dtype == torch.float64 else logits.float()
        for _ in range(iters):
            # not z - z.logsumexp(): around -1e4 that rounds to 1e-3, while log_softmax takes the maximum out first
            z = z.log_softmax(-2).log_softmax(-1)
        return z.exp().to(logits.dtype)


def sinkhorn_reference(z, iters=20):
    """The specification: one matrix (n, n), float64, exp domain, obvious at a glance."""
    p = z.double().exp()
    for _ in range(iters):
        p = p / p.sum(0)                        # columns
        p = p / p.sum(1, keepdim=True)          # then rows
    return p


def column_error(sigma, iters, matrices=4096, n=4, seed=0):
    """(median, worst) over random matrices, logits ~ N(0, sigma^2), of the largest |column sum - 1| of a matrix."""
    logits = sigma * torch.randn(matrices, n, n, generator=torch.Generator().manual_seed(seed))
    error = (sinkhorn(logits, iters).sum(-2) - 1).abs().amax(-1)
    return error.median().item(), error.max().item()


if __name__ == '__main__':
    sigmas = (0.1, 1, 2, 4)
    print('iters | ' + ' | '.join(f'{f"sigma {sigma}":^15}' for sigma in sigmas).rstrip())
    for iters in (5, 10, 20, 50):
        cells = ('{:7.0e} {:7.0e}'.format(*column_error(sigma, iters)) for sigma in sigmas)
        print(f'{iters:5} | ' + ' | '.join(cells))
