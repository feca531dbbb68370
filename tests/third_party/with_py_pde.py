"""pdes/diffusion_reaction.py and pdes/wave.py beside the finite differences of py-pde (pip install py-pde)."""
import numpy as np
import pytest
import torch

from differences import differences
from sources.pdes.diffusion_reaction import diffusion_reaction
from sources.pdes.wave import wave

pde = pytest.importorskip('pde', reason='pip install py-pde')


def solve(equations, grid, start, end, frames, **options):
    """The fields of `equations` at `frames` times up to `end`, (frames, N, N, fields), with a negligible time step."""
    storage = pde.MemoryStorage()
    state = pde.FieldCollection([pde.ScalarField(grid, field) for field in start])
    pde.PDE(equations, **options).solve(state, t_range=end, dt=1e-3, solver='scipy', method='DOP853', rtol=1e-9,
                                      atol=1e-11, backend='numpy', tracker=storage.tracker(end / frames))
    return np.stack([np.stack([field.data for field in frame], -1) for frame in list(storage)[1:]])


def batch(*fields):
    return [torch.from_numpy(field)[None] for field in fields]


def test_diffusion_and_reaction_differ_by_our_time_step_only():
    N = 32
    start = np.random.default_rng(0).standard_normal((2, N, N))
    theirs = solve({'u': '1e-3 * laplace(u) + u - u**3 - 5e-3 - v', 'v': '5e-3 * laplace(v) + u - v'},
                   pde.CartesianGrid([[-1, 1], [-1, 1]], N), start, 5, 5, bc={'derivative': 0})
    ours = diffusion_reaction(*batch(*start), frames=6, dt=1.0)[0, 1:]
    assert max(differences('diffusion-reaction, t = 1..5', ours, theirs)) < 1e-4
    finer = diffusion_reaction(*batch(*start), frames=6, dt=1.0, steps=400)[0, 1:]
    assert max(differences('diffusion-reaction with 400 steps a unit of time', finer, theirs)) < 1e-7


def test_waves_differ_by_the_second_order_of_their_grid():
    def difference(N):
        x = ((np.arange(N) + 0.5) / N)[:, None]
        u = np.exp(-((x - 0.4) ** 2 + (x.T - 0.55) ** 2) / 2 / 0.08 ** 2)
        c = 0.15 * (1 + 0.4 * np.sin(2 * np.pi * x) * np.cos(2 * np.pi * x.T))
        grid = pde.CartesianGrid([[0, 1], [0, 1]], N, periodic=True)
        theirs = solve({'u': 'v', 'v': 's * laplace(u)'}, grid, (u, 0 * u), 1.0, 1,
                       consts={'s': pde.ScalarField(grid, c ** 2)})[0]
        ours = wave(*batch(u, 0 * u, c), frames=2, dt=1.0, boundary='periodic')[0, 1].numpy()
        return differences(f'wave, {N}^2, u and u_t at t = 1', np.moveaxis(ours, -1, 0), np.moveaxis(theirs, -1, 0))
    coarse, fine = difference(32), difference(64)
    assert all(3.5 < a / b < 4.5 for a, b in zip(coarse, fine)) and max(fine) < 2e-2
