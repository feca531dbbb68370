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
