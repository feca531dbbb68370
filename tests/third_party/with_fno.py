"""pdes/navier_stokes.py beside the generator of FNO's vorticity files.

FNO_CHECKOUT names a checkout of the FNO repository from the year 2022, with data_generation/navier_stokes/ns_2d.py.
"""
import math

import numpy as np
import torch

from differences import differences, from_checkout
from sources.pdes.navier_stokes import navier_stokes, random_vorticity

navier_stokes_2d = from_checkout('FNO_CHECKOUT', 'data_generation/navier_stokes/ns_2d.py', 'navier_stokes_2d',
                                 torch=torch, math=math)
N, VISCOSITY, FRAMES = 64, 1e-3, 2
START = torch.from_numpy(random_vorticity(np.random.default_rng(0), N))[None]


def theirs(tau):
    """w at t = 1, 2 with steps of length tau."""
    x = torch.arange(N, dtype=torch.float64) / N
    phase = 2 * math.pi * (x[:, None] + x)
    force = 0.1 * (phase.sin() + phase.cos())
    torch.set_default_dtype(torch.float64)                  # that of their wavenumbers
    try:
        return navier_stokes_2d(START, force, VISCOSITY, FRAMES, tau, FRAMES)[0][0].movedim(-1, 0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_schemes_agree_when_theirs_is_extrapolated_to_vanishing_steps():
    halved = [theirs(tau) for tau in (4e-3, 2e-3, 1e-3)]
    exact = navier_stokes(START, VISCOSITY, FRAMES, steps=512)[0]
    ours = differences('our time step, t = 1, 2', navier_stokes(START, VISCOSITY, FRAMES)[0], exact)
    errors = [differences(f'FNO, step {tau}', w, exact) for tau, w in zip((4e-3, 2e-3, 1e-3), halved)]
    limit = differences('FNO, extrapolated', (8 * halved[2] - 6 * halved[1] + halved[0]) / 3, exact)
    assert max(ours) < 5e-5 and max(limit) < 2e-6
    assert np.allclose(np.divide(errors[:-1], errors[1:]), 2, atol=0.1), 'their error is of first order'
