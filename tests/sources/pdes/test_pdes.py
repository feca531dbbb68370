"""The families: single precision suffices, a seed is one start, and draws do not change unseen."""
import numpy as np
import pytest
import torch

import configs
from fields import coarse, l2re
from sources import generate
from sources.pdes import FAMILIES


def last_frame(plan):
    """The last frame of the first test trajectory (C, N, N) in double precision, without its static channels."""
    start = {key: torch.from_numpy(field).double() for key, field in generate.initial(plan, 'test', [0]).items()}
    fields = FAMILIES[plan.name].solve(stride=plan.stride, frames=plan.frames, dt=plan.dt, **start)
    dataset = configs.DATASETS[plan.name]
    return torch.stack([fields[0, -1, ..., i] for i, name in enumerate(dataset.channels) if name not in dataset.static])


@pytest.mark.parametrize('name, N, worst', [
    ('ns2d_fno_1e-4', 64, 1e-5), ('ns2d_pdb_M1e-1_eta1e-2_zeta1e-2', 32, 2e-5), ('dr_pdb', 64, 1e-5)])
@pytest.mark.slow
def test_single_precision_suffices(name, N, worst):
    plan = generate.plan(name, 'nano', resolution=N, frames=11)
    single = torch.from_numpy(generate.simulate(plan, 'test', [0])[0, -1]).movedim(-1, 0)
    errors = [l2re(a[None], b[None]) for a, b in zip(single, last_frame(plan))]
    assert min(errors) > 1e-9 and max(errors) < worst, errors


@pytest.mark.parametrize('name, first, worst', [        # every third point: a node, the centre of a cell, or their mean
    ('ns2d_fno_1e-3', 0, 1e-9), ('wave_gauss', 1, 1e-9), ('swe_pdb', None, 1e-2), ('ns2d_pda', 1, 1e-12),
    ('cno_darcy', 1, 0),
    ('ns2d_pdb_M1_eta1e-1_zeta1e-1', 1, 1e-12), ('ns2d_pdb_M1_eta1e-8_zeta1e-8_turb_512', 1, 1e-12),
    ('ns3d_pdb_M1_rand', 1, 1e-12), ('ns3d_pdb_M1_turb', 1, 1e-12)])
def test_a_seed_gives_the_same_start_on_every_grid(name, first, worst):
    D, N = configs.DATASETS[name].dims, 64 if configs.DATASETS[name].dims == 2 else 8
    for seed in range(3 if D == 2 else 1):
        same, finer = (FAMILIES[name].draw(np.random.default_rng(seed), points) for points in (N, 3 * N))
        for field, fine in zip(same.values(), finer.values()):
            if np.ndim(field):
                third = fine[(..., *[slice(first, None, 3)] * D)] if first is not None else coarse(
                    torch.from_numpy(fine), N).numpy()
                assert abs(third - field).max() <= worst * max(abs(field).max(), 1)


DRAWN = {
    ('ns2d_fno_1e-3', 'w0'): 0.2950933, ('kolmogorov', 'w0'): 1.180373, ('dr_pdb', 'u0'): 0.992829,
    ('swe_pdb', 'h0'): 1.043022, ('wave_gauss', 'c'): 2831.683, ('wave_layer', 'c'): 4151.989,
    ('cno_poisson', 'f'): 0.7606447, ('cno_darcy', 'a'): 8.738888, ('ns2d_pda', 'u0'): 1,
    ('ns2d_cond_pda', 'buoyancy'): 0.3665324,
    ('ns2d_pdb_M1_eta1e-1_zeta1e-1', 'velocity'): 1.639397, ('cfdbench', 'mask'): 0.9960861,
    ('cfdbench', 'reynolds'): 101.9087, ('cfdbench', 'speed'): 0.834758}


@pytest.mark.parametrize('name, field', DRAWN)
def test_the_draws_stay_those_whose_statistics_were_compared_with_the_benchmarks(name, field):
    """Root mean squares of three draws. docs/solvers.md compares; others are a new version of the data."""
    draws = [FAMILIES[name].draw(np.random.default_rng(seed), 32)[field] for seed in range(3)]
    assert np.sqrt(np.mean(np.square(draws))) == pytest.approx(DRAWN[name, field], rel=1e-5)
