"""Tests of pdes/poisson.py: sine modes, the five-point Laplacian of the solution, the distribution of the sources."""
import numpy as np
import torch

from fields import PI, l2re, nodes, orders, starts
from sources.pdes.poisson import poisson, sine_source


def test_every_sine_mode_is_divided_by_its_eigenvalue():
    x, y = (grid * 16 / 15 for grid in nodes(16))           # 0, ..., 1
    for i, j in ((1, 1), (3, 5), (14, 2)):
        mode = (torch.sin(PI * i * x) * torch.sin(PI * j * y))[None]
        assert l2re(poisson(mode), mode / (PI ** 2 * (i ** 2 + j ** 2))) < 1e-13


def test_the_poisson_solution_has_the_source_as_its_laplacian_and_is_zero_on_the_boundary():
    def residual(N):
        f = starts(lambda random, N: [sine_source(random, N)], N, 2)[0]
        u = poisson(f)
        assert all(u.select(axis, end).abs().max() < 1e-12 for axis in (1, 2) for end in (0, -1))
        inner = u[:, 1:-1, 1:-1]
        around = u[:, 2:, 1:-1] + u[:, :-2, 1:-1] + u[:, 1:-1, 2:] + u[:, 1:-1, :-2]
        return l2re((4 * inner - around) * (N - 1) ** 2, f[:, 1:-1, 1:-1])
    measured = orders([residual(N) for N in (65, 129, 257)])
    assert (abs(measured - 2) < 0.15).all(), measured


def test_the_sources_have_the_power_of_their_modes():
    draws = starts(lambda random, N: [sine_source(random, N)], 64, 200)[0]
    i = np.arange(1, 17) ** 2
    power = (PI / 256) ** 2 * (i[:, None] + i).sum() / 3 / 4        # 1/3 from U(-1, 1), 1/4 from the two sines
    assert abs(draws[:, :-1, :-1].square().mean() / power - 1) < 0.05
