"""pdes/shallow_water.py beside PyClaw (pip install clawpack, which needs a Fortran compiler), PDEBench's solver.

The reference of both is the radial equation on 4000 cells, solved by PyClaw too.
"""
import functools
import logging

import numpy as np
import pytest
import torch

from differences import differences
from sources.pdes.shallow_water import shallow_water

pytest.importorskip('clawpack', reason='pip install clawpack')
RADIUS, FRAMES = 0.5, 2                                     # at t = 0.5 and 1


def evolve(claw, solver, axes, start, source=None):
    """h at t = 0.5 and 1 from the state `start`, with the settings of PDEBench."""
    logging.getLogger('pyclaw').setLevel(logging.ERROR)
    solver.limiters, solver.max_steps = claw.limiters.tvd.MC, 10 ** 6
    solver.num_eqn = len(start)
    for axis in range(len(axes)):
        solver.bc_lower[axis] = solver.bc_upper[axis] = claw.BC.extrap
    if source:
        solver.bc_lower[0], solver.step_source, solver.source_split = claw.BC.wall, source, 2
    domain = claw.Domain(axes)
    state = claw.State(domain, len(start))
    state.problem_data.update(grav=1.0, efix=True, dry_tolerance=1e-8, sea_level=0.0)
    state.q[:] = start
    solution = claw.Solution(state, domain)
    for frame in range(FRAMES):
        solver.evolve_to_time(solution, (frame + 1) / FRAMES)
        yield state.q[0].copy()


def radial(claw, riemann, n=4000, length=3.6):
    """The dam break as an equation of the radius -> radii, h at the frames; -hu/r and -hu^2/r are sources."""
    solver = claw.ClawSolver1D(riemann.shallow_roe_with_efix_1D)
    solver.num_waves = 2
    edges = np.linspace(0, length, n + 1)
    r = (edges[1:] + edges[:-1]) / 2

    def source(solver, state, tau):                         # the midpoint rule
        h, hu = state.q
        h_half, hu_half = h - tau / 2 * hu / r, hu - tau / 2 * hu * hu / h / r
        state.q[0] -= tau * hu_half / r
        state.q[1] -= tau * hu_half ** 2 / h_half / r
    h = 1 + np.clip((RADIUS - edges[:-1]) * n / length, 0, 1)
    return r, list(evolve(claw, solver, [claw.Dimension(0, length, n, name='r')], [h, 0 * h], source))


def averaged(N, values, n=16):
    """Averages of a function of the radius over the N x N cells of [-2.5, 2.5]^2, from n x n points a cell."""
    x = -2.5 + 5 * (np.arange(n * N) + 0.5) / (n * N)
    return values(np.hypot(x[:, None], x)).reshape(N, n, N, n).mean((1, 3))


@pytest.fixture
def claw(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                             # it writes its log into the working directory
    from clawpack import pyclaw, riemann
    return pyclaw, riemann


def test_the_radial_dam_break_converges_to_the_same_solution(claw):
    pyclaw, riemann = claw
    r, fine = radial(*claw)
    errors = {}
    for N in (64, 128, 256):
        h0 = averaged(N, lambda r: 1.0 + (r < RADIUS))
        solver = pyclaw.ClawSolver2D(riemann.shallow_roe_with_efix_2D)
        solver.num_waves = 3
        axes = [pyclaw.Dimension(-2.5, 2.5, N, name=name) for name in 'xy']
        theirs = np.stack(list(evolve(pyclaw, solver, axes, [h0, 0 * h0, 0 * h0])))
        start = [torch.from_numpy(field)[None] for field in (h0, 0 * h0, 0 * h0)]
        ours = shallow_water(*start, frames=FRAMES + 1, dt=1 / FRAMES)[0, 1:].numpy()
        exact = np.stack([averaged(N, functools.partial(np.interp, xp=r, fp=h)) for h in fine])
        for name, h in (('ours', ours), ('PyClaw', theirs)):
            errors[name, N] = abs(h - exact).sum((1, 2)) / abs(exact - 1).sum((1, 2))
            print(f'{name}, {N}^2, L1 over L1 of h - 1, t = 0.5, 1:', errors[name, N].round(3))
        differences(f'ours and PyClaw, {N}^2, of h - 1', ours - 1, theirs - 1)
    for name in ('ours', 'PyClaw'):
        for N in (64, 128):
            assert (errors[name, N] > 1.5 * errors[name, 2 * N]).all(), 'it falls in first order'
    for N in (128, 256):
        assert (errors['ours', N] < 1.1 * errors['PyClaw', N]).all() and (errors['PyClaw', N] < 0.05).all()
