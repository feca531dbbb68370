"""What the solvers share: the loop over frames and steps, time stepping, a slope limiter, `Family`."""
import math
from typing import NamedTuple

import torch

RK4_REAL, RK4_IMAGINARY = 2.78, 2.82    # extent of RK4's stability region along the negative real and imaginary axes


def march(y, frames, dt, step, limit, show, first=True, steps=None, safety=1.0, check=1):
    """Advance the state y in time -> show(y), (B, ...), at `frames` times dt apart: (B, T, ...).

    step: (y, tau) -> y a time tau later.
    limit: y -> the largest stable tau, asked before every `check`-th step.
    first: whether y itself is frame 0.
    steps: of every frame; by default as many as keep tau below `safety` times the limit.
    Raises FloatingPointError if a value is not finite or `steps` too small to be stable.
    """
    out = []
    for frame in range(frames):
        left = 0.0 if first and frame == 0 else dt
        count = 0
        while left > 0:
            if count % check == 0:
                bound = float(limit(y))
            if not bound > dt * 1e-4:     # also true if the state has blown up and the limit is NaN
                raise FloatingPointError(f'frame {frame}, step {count}: it blew up, the stable time step is {bound:g}')
            n = max(1, math.ceil(left / (safety * bound) - 1e-9)) if steps is None else steps - count
            if steps and left / n > bound * (1 + 1e-6):
                raise FloatingPointError(f'frame {frame}, step {count}: the time step {left / n:g} exceeds the limit '
                                         f'{bound:g}; take more steps')
            y = step(y, left / n)
            left = left - left / n if n > 1 else 0.0
            count += 1
        out.append(show(y).clone())             # a view would keep the whole state
        if not torch.isfinite(out[-1]).all():
            raise FloatingPointError(f'frame {frame}, step {count}: values that are not finite')
    return torch.stack(out, 1)


def rk4(f, y, tau):
    """One step of the classical fourth-order Runge-Kutta method for y' = f(y)."""
    k1 = f(y)
    k2 = f(y + tau / 2 * k1)
    k3 = f(y + tau / 2 * k2)
    k4 = f(y + tau * k3)
    return y + tau / 6 * (k1 + 2 * (k2 + k3) + k4)


def rkl2(f, y, tau, stages):
    """One step of the Runge-Kutta-Legendre method of order 2 for diffusive y' = f(y) (Meyer et al. 2014).

    With s >= 2 stages it is stable up to (s^2 + s - 2) / 4 times the limit of Euler's method.
    """
    b = lambda j: (j * j + j - 2) / (2 * j * (j + 1)) if j > 1 else 1 / 3
    w = 4 / (stages * stages + stages - 2)
    start = f(y)
    # both are increments to y: sums that include y itself would lose them to rounding
    before = torch.zeros_like(y)
    now = b(1) * w * tau * start
    for j in range(2, stages + 1):
        mu = (2 * j - 1) / j * b(j) / b(j - 1)
        nu = (1 - j) / j * b(j) / b(j - 2)
        after = f(y + now).add_(start, alpha=b(j - 1) - 1).mul_(mu * w * tau)
        after.add_(now, alpha=mu).add_(before, alpha=nu)
        before = now
        now = after
    return y + now


def half_slope(d, axis=-1):
    """Half of the MC-limited slope (van Leer 1977) in n cells, from n+1 differences d."""
    n = d.shape[axis] - 1
    left = d.narrow(axis, 0, n)
    right = d.narrow(axis, 1, n)
    least = torch.maximum(left, right).clamp_(max=0)
    most = torch.minimum(left, right).clamp_(min=0)
    return torch.clamp((left + right).mul_(0.25), least, most)


class Family(NamedTuple):
    """How one dataset is generated. Its sizes are in configs.DATASETS."""
    pde: str            # the equation in words
    draw: object        # (random, N) -> initial state {argument of `solve`: field (N, N) or number}, in float64
    solve: object       # (stride, frames, dt, batches of these) -> (B, T, N/stride, N/stride, C)
    nano: dict          # sizes of the nano form, where they differ from generate.NANO
    grid: int = 1       # least number of points a side of the solver, of which every stride-th is stored
    fixed: bool = False # whether the solver has exactly that grid, whose errors are part of the data
    version: int = 1    # of the data that a seed gives; raised when solver or draw change
