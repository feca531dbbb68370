"""Tests of pdes/diffusion_reaction.py: the linearised system, measured orders, the benchmark's own file."""
import h5py
import numpy as np
import pytest
import torch

from fields import PI, centres, coarse, l2re, orders, raw
from sources.pdes.diffusion_reaction import diffusion_reaction


def test_a_small_cosine_mode_follows_the_matrix_exponential_of_the_linearised_system():
    N, eps, time_, k = 16, 1e-6, 1.0, 5e-3
    fixed = -k ** (1 / 3)                                                   # u = v, u^3 = -k
    x, y = centres(N)
    mode = (torch.cos(3 * PI * x) * torch.cos(PI * y))[None]                # no flux at 0 and 1
    dx = 2 / N
    eigenvalue = sum(2 * (np.cos(m * PI / N) - 1) for m in (3, 1)) / dx ** 2
    A = torch.tensor([[1 - 3 * fixed ** 2 + 1e-3 * eigenvalue, -1], [1, -1 + 5e-3 * eigenvalue]], dtype=torch.float64)
    exact = torch.linalg.matrix_exp(A * time_) @ torch.tensor([1.0, 0.5], dtype=torch.float64)
    frames = diffusion_reaction(fixed + eps * mode, fixed + eps / 2 * mode, frames=21, k=k, steps=8)
    growth = ((frames[0, -1] - fixed) / eps * mode[0, ..., None]).sum((0, 1)) / (mode ** 2).sum()
    assert (growth - exact).abs().max() < 1e-5, (growth, exact)
    rest = frames[0, -1] - fixed - eps * growth * mode[0, ..., None]
    assert rest.abs().max() < 1e-4 * eps                # no other mode appears, as the mirror cells are exact


@pytest.mark.slow
def test_diffusion_reaction_is_fourth_order_in_time_and_second_in_space():
    def solve(N, steps, D=5e-3):
        x, y = centres(N, -1, 1)
        u = (torch.cos(PI * x) * torch.cos(PI * y / 2 + PI / 2) + 0.3 * torch.cos(2 * PI * y))[None]
        return diffusion_reaction(u, -u, 2, dt=1.0, Du=D, Dv=2 * D, steps=steps)[:, 1].movedim(-1, 1)
    exact = solve(16, 160)
    in_time = orders([l2re(solve(16, n), exact) for n in (10, 20, 40)])
    assert (abs(in_time - 4) < 0.4).all(), in_time
    exact = coarse(solve(128, 400, 0.01), 8)
    in_space = orders([l2re(coarse(solve(N, 40, 0.01), 8), exact) for N in (8, 16, 32)])
    assert (abs(in_space - 2) < 0.25).all(), in_space


def test_diffusion_reaction_agrees_with_the_benchmark_once_the_grid_noise_is_gone():
    with h5py.File(raw('2D_diff-react_NA_NA.h5')) as file:
        frames = torch.from_numpy(np.stack([file[key]['data'][:] for key in sorted(file)])).double()
    # the benchmark solves on 128 x 128 and keeps every second point: scales of a few cells differ by the coarser grid
    for start, stop, tolerance in ((10, 11, 2e-2), (20, 21, 8e-3), (20, 100, 0.08)):
        u0, v0 = frames[:, start].unbind(-1)
        ours = diffusion_reaction(u0, v0, stop - start + 1)
        assert l2re(ours[:, -1], frames[:, stop]) < tolerance, (start, stop, l2re(ours[:, -1], frames[:, stop]))
    # from white noise on the benchmark's grid the standard deviations of u and v fall in the same way
    u0, v0 = (torch.from_numpy(f)[None] for f in np.random.default_rng(0).standard_normal((2, 128, 128)))
    ours = diffusion_reaction(u0, v0, 21)[:, :, ::2, ::2].std((0, 2, 3))
    theirs = frames[:, :21].std((0, 2, 3))
    assert abs(ours / theirs - 1).max() < 0.1, ours / theirs
