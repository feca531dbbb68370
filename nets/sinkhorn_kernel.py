"""A Triton kernel for the rounds of sinkhorn.py, forward and backward, equal to it to rounding.

On a GPU eager PyTorch would launch hundreds of small kernels in a forward pass. With
create_graph=True the second derivative is that of the loop. Importing this module makes
`sinkhorn.sinkhorn` take it.
"""
import functools
import importlib.util
import os
import warnings

import torch
from torch import Tensor
from torch.library import custom_op

import sinkhorn
from sinkhorn import loop

TRITON = importlib.util.find_spec('triton') is not None     # imported at its first use
INTERPRET = os.environ.get('TRITON_INTERPRET') == '1'       # runs the kernel on a CPU, for tests


def rounds(z, iters):
    """The rounds of `sinkhorn.loop`, (..., n, n) -> (..., n, n), by the kernel if it takes them."""
    if takes_kernel(z, iters):
        return fused(z.reshape(-1, *z.shape[-2:]), iters)[0].view(z.shape)
    return loop(z, iters)


def takes_kernel(z, iters):
    """Whether the kernel takes z (..., n, n): n <= 16 in float32, but not under the transforms of
    torch.func nor in forward-mode differentiation.
    """
    small = 0 < z.numel() and z.shape[-1] <= 16 and z.dtype != torch.float64
    if not (z.is_cuda or INTERPRET) or not small or iters == 0 or not trusted():
        return False
    return torch.compiler.is_compiling() or not (
        torch._C._functorch.is_functorch_wrapped_tensor(z)
        or torch.autograd.forward_ad.unpack_dual(z).tangent is not None)


@functools.cache
def kernels():
    """Triton's kernels (forward, backward), for BLOCK matrices whose n is padded to N."""
    global tl                           # Triton looks a kernel's names up among the globals
    import triton
    import triton.language as tl

    # iters is a constant, for Triton's interpreter cannot count to a tensor; no loop is unrolled
    @triton.jit
    def forward(z_ptr, p_ptr, log_ptr, sum_ptr, B, n,
                iters: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
        """P, its logarithm, and the logarithms of the sums of all rounds, from logits."""
        b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
        r = tl.arange(0, N)[None, :, None]
        s = tl.arange(0, N)[None, None, :]
        # the padding of a matrix is a block of its own, whose sums are finite and affect no others
        inside = (b < B) & (r < n) & (s < n)
        padding = tl.where((r < n) == (s < n), 0., -float('inf'))
        z = tl.load(z_ptr + (b * n + r) * n + s, mask=inside, other=padding)
        z -= tl.max(z, 1, keep_dims=True)       # then each row and column sum is between 1/n and n
        top = tl.max(z, 2, keep_dims=True)
        z -= top
        column = tl.log(tl.sum(tl.exp(z + top), 1, keep_dims=True))
        for t in range(iters):
            z -= column
            row = tl.log(tl.sum(tl.exp(z), 2, keep_dims=True))
            z -= row
            tl.store(sum_ptr + (2 * t * B + b) * n + s, column, mask=(b < B) & (s < n))
            tl.store(sum_ptr + ((2 * t + 1) * B + b) * n + r, row + top, mask=(b < B) & (r < n))
            top *= 0                            # only the sums of the first round have the maxima
            column = tl.log(tl.sum(tl.exp(z), 1, keep_dims=True))
        tl.store(log_ptr + (b * n + r) * n + s, z, mask=inside)
        tl.store(p_ptr + (b * n + r) * n + s, tl.exp(z), mask=inside)

    @triton.jit
    def backward(up_ptr, log_ptr, sum_ptr, h_ptr, B, n,
                 iters: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
        """H = dL/dlogits from dL/dP, by going back through the rounds.

        Half a round that ends in the matrix P takes H back to H - P * (sum of H along its axis).
        """
        b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
        r = tl.arange(0, N)[None, :, None]
        s = tl.arange(0, N)[None, None, :]
        inside = (b < B) & (r < n) & (s < n)
        z = tl.load(log_ptr + (b * n + r) * n + s, mask=inside, other=-float('inf'))
        h = tl.load(up_ptr + (b * n + r) * n + s, mask=inside, other=0.) * tl.exp(z)
        for t in range(iters):
            back = iters - 1 - t
            rows = sum_ptr + ((2 * back + 1) * B + b) * n + r
            columns = sum_ptr + (2 * back * B + b) * n + s
            row = tl.load(rows, mask=(b < B) & (r < n), other=0.)
            column = tl.load(columns, mask=(b < B) & (s < n), other=0.)
            h -= tl.exp(z) * tl.sum(h, 2, keep_dims=True)
            z += row
            h -= tl.exp(z) * tl.sum(h, 1, keep_dims=True)
            z += column
        tl.store(h_ptr + (b * n + r) * n + s, h, mask=inside)

    return forward, backward


TRUSTED = []                            # the answer of `trusted`, once there is one


def trusted():
    """Whether the kernel is there and, on a GPU, equals the loop: tried once, with a warning."""
    if not TRUSTED:
        TRUSTED.append(TRITON)
        if TRITON and torch.cuda.is_available():
            try:
                z = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)).cuda()
                torch.testing.assert_close(fused(z, 20)[0], loop(z, 20), rtol=1e-5, atol=1e-5)
            except Exception as error:                  # Triton and its compiler fail in many ways
                TRUSTED[0] = False
                reason = f'{type(error).__name__}: {error}'.splitlines()[0]
                warnings.warn('the Triton kernel of nets/sinkhorn_kernel.py is not taken '
                              f'({reason}); the loop is slower')
    return TRUSTED[0]


# torch.compile calls it while it reads the code, and what it compiles has been tried
trusted._dynamo_marked_constant = True


def launch(kernel, iters, *tensors):
    B, n, _ = tensors[0].shape
    N = 1 << (n - 1).bit_length()               # Triton's blocks have powers of two
    BLOCK = max(1, 128 // N ** 2)               # for one warp, with 512 bytes of shared memory
    with torch.cuda.device_of(tensors[0]):      # Triton launches on the current device
        kernel[(-(-B // BLOCK),)](*tensors, B, n, iters, N=N, BLOCK=BLOCK, num_warps=1)


# as operators, torch.compile takes the kernels as they are and does not look inside
@custom_op('aotpot::sinkhorn', mutates_args=())
def fused(z: Tensor, iters: int) -> tuple[Tensor, Tensor, Tensor]:
    """z (B, n, n) float32 -> P, log P, and the log sums of all rounds (iters, 2, B, n)."""
    z = z.contiguous()
    P = torch.empty_like(z)
    log = torch.empty_like(z)
    sums = z.new_empty(iters, 2, *z.shape[:2])
    launch(kernels()[0], iters, z, P, log, sums)
    return P, log, sums


@custom_op('aotpot::sinkhorn_backward', mutates_args=())
def fused_backward(upstream: Tensor, log: Tensor, sums: Tensor) -> Tensor:
    """dL/dz from dL/dP and what `fused` returned beside P: these give the matrix of each round."""
    H = torch.empty_like(log)
    launch(kernels()[1], len(sums), upstream.contiguous(), log, sums, H)
    return H


fused.register_fake(lambda z, iters: (
    torch.empty_like(z), torch.empty_like(z), z.new_empty(iters, 2, *z.shape[:2])))
fused_backward.register_fake(lambda upstream, log, sums: torch.empty_like(log))


def save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], *output[1:])
    ctx.set_materialize_grads(False)            # zeros for two outputs would be two launches


def backward_of_fused(ctx, upstream, *_):
    z, log, sums = ctx.saved_tensors
    if torch.is_grad_enabled():                 # create_graph: the gradient will be differentiated
        return torch.autograd.grad(loop(z, len(sums)), z, upstream, create_graph=True)[0], None
    return fused_backward(upstream, log, sums), None


fused.register_autograd(backward_of_fused, setup_context=save_for_backward)
sinkhorn.rounds = rounds
