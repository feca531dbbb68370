"""How well the time step and the grid resolve what is generated: one trajectory of each family is solved again.

    python -m pytest -rP tests/sources/pdes/resolution.py -k 'wave_gauss and nano'

prints rows of the table in docs/solvers.md. pytest does not collect this file by itself, since large grids take
minutes. Of the largest grids only the first two frames after the start are compared. Poisson's equation is missing: its
solution is exact to rounding.
"""
import importlib

import pytest
import torch

from configs import DATASETS
from fields import coarse, l2re, midpoints
from sources import generate
from sources.pdes import FAMILIES, march

MODULES = [importlib.import_module(f'sources.pdes.{name}') for name in (
    'compressible', 'diffusion_reaction', 'navier_stokes', 'obstacles', 'shallow_water', 'smoke', 'wave')]


def last_frame(plan):
    """The last frame of the first test trajectory (C, N, N) in double precision, without its static channels."""
    start = {key: torch.from_numpy(field).double() for key, field in generate.initial(plan, 'test', [0]).items()}
    fields = FAMILIES[plan.name].solve(stride=plan.stride, frames=plan.frames, dt=plan.dt, **start)
    dataset = DATASETS[plan.name]
    return torch.stack([fields[0, -1, ..., i] for i, name in enumerate(dataset.channels) if name not in dataset.static])


def two_for_one(y, frames, dt, step, *args, **options):
    """`march`, but with two steps of half the length for each step."""
    return march.march(y, frames, dt, lambda y, tau: step(step(y, tau / 2), tau / 2), *args, **options)


def resolution(plan, monkeypatch):
    """L2RE of each channel of the last frame against half the time step, and against twice the grid; both are printed.

    Each is None where it means nothing: the step of a steady problem, and the grid of `dr_pdb`, whose start is white
    noise on it. On twice the grid a solver that has a stability limit takes shorter steps too. Families that store
    every second point or averages over blocks are compared as stored; shallow water is averaged over blocks of cells,
    and other fields are interpolated to the centres of the larger cells, which leaves out two cells at each edge.
    """
    usual, by_step, by_grid = last_frame(plan), None, None
    if DATASETS[plan.name].frames > 2:
        with monkeypatch.context() as patch:
            for module in MODULES:
                patch.setattr(module, 'march', two_for_one)
            by_step = [l2re(*pair) for pair in zip(usual[:, None], last_frame(plan)[:, None])]
    if plan.name != 'dr_pdb':
        N, fine = usual.shape[-1], last_frame(plan._replace(grid=2 * plan.resolution * plan.stride))
        if fine.shape[-1] > N and plan.name == 'swe_pdb':
            fine = coarse(fine, N)
        elif fine.shape[-1] > N:
            usual, fine = usual[..., 2:-2, 2:-2], midpoints(fine)
        by_grid = [l2re(*pair) for pair in zip(usual[:, None], fine[:, None])]
    text = ['; '.join(f'{error:.1e}' for error in errors or []) or '–' for errors in (by_step, by_grid)]
    print(f'| `{plan.name}`, frame {plan.frames - 1} | {plan.resolution * plan.stride} | {" | ".join(text)} |')
    return by_step, by_grid


@pytest.mark.parametrize('size', ['nano', 'paper'])
@pytest.mark.parametrize('name', [name for name in FAMILIES if name != 'cno_poisson'])
def test_print(name, size, monkeypatch):
    plan = generate.plan(name, size)
    if plan.resolution ** DATASETS[name].dims > 2 ** 17:        # more frames would take hours on twice the grid
        plan = plan._replace(frames=3)
    resolution(plan, monkeypatch)
