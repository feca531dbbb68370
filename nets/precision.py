"""Where 16 bits are too few: Fourier transforms, means and sums of streams, Sinkhorn, the choice of experts."""
import contextlib

import torch


def no_autocast(x):
    """A region without autocast on the device of x; entering one costs microseconds, so only if there is autocast."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def at_least_fp32(x):
    return x if x.dtype == torch.float64 else x.float()


def weighted(equation, weights, x):
    """torch.einsum of weights (B, ...) and x, in fp32 inside autocast: streams in bf16 would not hold averages."""
    with no_autocast(x):
        return torch.einsum(equation, weights, x.to(weights.dtype)).to(x.dtype)


def transformed(x):
    """Whether a transform of torch.func or forward-mode differentiation follows x."""
    return not torch.compiler.is_compiling() and (
        torch._C._functorch.is_functorch_wrapped_tensor(x)
        or torch.autograd.forward_ad.unpack_dual(x).tangent is not None)


class Exact(torch.autograd.Function):
    """The product of a constant matrix and x in full fp32, forward and backward, where others take TF32."""

    @staticmethod
    def forward(ctx, matrix, x):
        ctx.matrix, before = matrix, torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision('highest')
        try:
            return matrix @ x
        finally:
            torch.set_float32_matmul_precision(before)

    @staticmethod
    def backward(ctx, g):
        return None, Exact.apply(ctx.matrix.mT, g)


def exact(matrix, x):
    """matrix @ x, in full fp32 also on a GPU where train.py lets other products of fp32 take TF32."""
    faster = x.is_cuda and not torch.compiler.is_compiling() and torch.get_float32_matmul_precision() != 'highest'
    return Exact.apply(matrix, x) if faster and not transformed(x) else matrix @ x
