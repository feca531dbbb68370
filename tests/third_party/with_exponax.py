"""Kolmogorov flow of pdes/navier_stokes.py beside exponax (pip install exponax, which brings jax)."""
import math

import numpy as np
import pytest
import torch

from sources.pdes.navier_stokes import navier_stokes, random_vorticity

exponax = pytest.importorskip('exponax', reason='pip install exponax')
import jax  # noqa: E402

REYNOLDS, FRAMES = 200, 2


def differences(what, ours, theirs):
    """L2RE of each frame, the first axis of both arrays; printed with the name `what` (python -m pytest -rP)."""
    values = [float(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b)) for a, b in zip(ours, theirs, strict=True)]
    print(f'{what}:', *(f'{value:.1e}' for value in values))
    return values


def start(N):
    return 4 * random_vorticity(np.random.default_rng(0), N)


def their_frames(N, tau=0.02):
    """Vorticity at t = 1, 2. Theirs has the opposite sign, which turns the force round: we shift it by half a wave."""
    jax.config.update('jax_enable_x64', True)
    stepper = exponax.stepper.KolmogorovFlowVorticity(2, 2 * math.pi, N, tau, diffusivity=1 / REYNOLDS, drag=-0.1,
                                                      injection_mode=4, order=4)
    advance, w = jax.jit(exponax.repeat(stepper, round(1 / tau))), -np.roll(start(N), N // 8, 1)[None]
    for _ in range(FRAMES):
        w = advance(w)
        yield -np.roll(np.asarray(w[0]), -(N // 8), 1)


def our_frames(N, **options):
    y = 2 * math.pi / N * torch.arange(N, dtype=torch.float64)
    return navier_stokes(torch.from_numpy(start(N))[None], 1 / REYNOLDS, FRAMES, drag=0.1, length=2 * math.pi,
                         forcing=-4 * torch.cos(4 * y).expand(N, N), **options)[0].numpy()


def test_kolmogorov_flow_differs_by_the_truncated_modes_only():
    theirs, ours = {N: list(their_frames(N)) for N in (64, 128)}, {N: our_frames(N) for N in (64, 128)}
    coarse = differences('Kolmogorov, 64^2, t = 1, 2', ours[64], theirs[64])
    fine = differences('Kolmogorov, 128^2', ours[128], theirs[128])
    step = differences('our time step, 128^2', ours[128], our_frames(128, steps=512))
    our_grid = differences('our grid, 64^2', ours[64], [w[::2, ::2] for w in theirs[128]])
    their_grid = differences('their grid, 64^2', theirs[64], [w[::2, ::2] for w in ours[128]])
    assert max(fine) < 2e-3 and all(a > 10 * b for a, b in zip(coarse, fine)), 'the difference falls with the grid'
    assert max(step) < 1e-4 and max(our_grid) < 5e-2 and max(their_grid) < 3e-2
