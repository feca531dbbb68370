"""Tests of pdes/steady.py: sine modes, dense matrices, orders, layers, conservation, bounds, what is drawn."""
import numpy as np
import pytest
import torch

from fields import PI, centres, coarse, l2re, nodes, orders, starts
from sources.pdes.steady import conductances, darcy, poisson, sine_source, two_phase_medium


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


def media(N, count=3):
    return starts(lambda random, N: [two_phase_medium(random, N)], N, count)[0]


def fluxes(a, u):
    """a times the gradient of u at the faces across x, (B, N+1, N), and across y, (B, N, N+1)."""
    gx, gy = conductances(a)
    padded, N = torch.nn.functional.pad(u, (1, 1, 1, 1)), a.shape[-1]
    return N * gx * padded[:, :, 1:-1].diff(dim=1), N * gy * padded[:, 1:-1].diff(dim=2)


def test_the_solution_is_that_of_the_matrix_of_the_balance_of_every_cell():
    N, a, f = 8, media(8)[:1], torch.randn(1, 8, 8, dtype=torch.float64)
    A = np.zeros((N, N, N, N))
    for i, j in np.ndindex(N, N):
        for n, m in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
            if 0 <= n < N and 0 <= m < N:
                face = 2 / (1 / a[0, i, j] + 1 / a[0, n, m])
                A[i, j, n, m] = -N * N * face
            else:
                face = 2 * a[0, i, j]
            A[i, j, i, j] += N * N * face
    u = np.linalg.solve(A.reshape(N * N, N * N), f.reshape(-1)).reshape(1, N, N)
    assert l2re(darcy(a, f), u) < 1e-12


def test_the_error_against_a_manufactured_solution_with_smooth_permeability_falls_in_second_order():
    def error(N):
        x, y = centres(N)
        a, u = torch.exp(x + y / 2)[None], (torch.sin(PI * x) * torch.sin(2 * PI * y))[None]
        slopes = PI * (torch.cos(PI * x) * torch.sin(2 * PI * y) + torch.sin(PI * x) * torch.cos(2 * PI * y))
        return l2re(darcy(a, a * (5 * PI ** 2 * u - slopes)), u)
    errors = [error(N) for N in (16, 32, 64)]
    assert (abs(orders(errors) - 2) < 0.1).all() and errors[-1] < 1.5e-3, errors


def test_across_layers_the_flux_of_the_exact_potential_is_constant_to_rounding():
    a = torch.tensor([3.0, 12, 12, 5, 3, 12, 1, 1], dtype=torch.float64)[None, :, None].expand(1, 8, 8)
    centre = torch.cumsum(1 / a, 1) - 0.5 / a               # the integral of 1/a up to the centre of each cell, times 8
    for medium, potential, axis in ((a, centre, 1), (a.mT, centre.mT, 2)):
        flux = conductances(medium)[axis - 1].narrow(axis, 1, 7) * potential.diff(dim=axis)
        assert abs(flux - 1).max() < 1e-14


def test_potential_and_flux_through_two_layers_are_of_second_order():
    # The solution is X(x) sin(pi y), where a X' is cos(pi x) + c and the interface lies at x = 1/4; c makes X(1) zero.
    s, low, high = 0.25, 3.0, 12.0
    up = np.sin(PI * s) / PI
    c = -(up / low - up / high) / (s / low + (1 - s) / high)

    def errors(N):
        x, y = centres(N)
        a = torch.where(x < s, low, high).expand(1, N, N)
        primitive = torch.sin(PI * x) / PI + c * x
        X = torch.where(x < s, primitive / low, (up + c * s) / low + (primitive - up - c * s) / high)
        Y, faces = torch.sin(PI * y), torch.arange(N + 1, dtype=torch.float64)[:, None] / N
        u = darcy(a, (PI * torch.sin(PI * x) + PI ** 2 * a * X) * Y)
        return l2re(u, X[None] * Y), l2re(fluxes(a, u)[0], (torch.cos(PI * faces) + c)[None] * Y)
    measured = [errors(N) for N in (16, 32, 64)]
    for which in zip(*measured):
        assert (abs(orders(which) - 2) < 0.2).all() and which[-1] < 1e-3, measured


def test_what_the_source_gives_leaves_through_the_boundary():
    a, f = media(32), torch.rand(3, 32, 32, dtype=torch.float64)
    across_x, across_y = fluxes(a, darcy(a, f))
    outward = across_x[:, 0].sum(1) - across_x[:, -1].sum(1) + across_y[..., 0].sum(1) - across_y[..., -1].sum(1)
    assert torch.allclose(outward / 32, f.mean((1, 2)), rtol=1e-12)


def test_u_is_positive_and_has_no_maximum_where_there_is_no_source():
    a, x, y = media(32), *centres(32)
    f = ((x - 0.4) ** 2 + (y - 0.6) ** 2 < 0.04).double().expand(3, 32, 32)
    u = darcy(a, f)
    highest = torch.nn.functional.max_pool2d(u, 3, stride=1, padding=1)
    peaks = u == highest
    assert u.min() > 0 and peaks.any() and (f[peaks] == 1).all()


def test_a_batch_of_easy_and_hard_samples_equals_single_solves_in_both_precisions():
    a = torch.cat([media(32), torch.full((1, 32, 32), 7.0, dtype=torch.float64), media(32) ** 3])
    alone = torch.cat([darcy(sample[None]) for sample in a])
    assert l2re(darcy(a), alone) < 1e-13
    assert l2re(darcy(a.float()), alone) < 2e-6


@pytest.mark.parametrize('N', [16, 96])
def test_the_conjugate_gradients_reach_rounding_at_the_rate_of_theory_on_every_grid(N):
    a = media(N, 1)
    rounds = int(np.ceil(np.log(4 / (8 * np.finfo(float).eps)) / np.log(3)))        # a factor of 3 for a contrast of 4
    exact = darcy(a)
    assert l2re(darcy(a, iterations=rounds + 1), exact) == 0
    with pytest.raises(FloatingPointError, match='not converged in 8 iterations'):
        darcy(a, iterations=8)
    with pytest.raises(FloatingPointError):
        darcy(a * np.nan, iterations=rounds)


def test_dividing_the_cells_approaches_the_solution_for_the_same_permeability():
    a = media(16)
    fine = darcy(a, refine=8)
    assert l2re(fine, coarse(darcy(a.repeat_interleave(8, 1).repeat_interleave(8, 2)), 16)) < 1e-13
    errors = [l2re(darcy(a, refine=n), fine) for n in (1, 2, 4)]
    assert (orders(errors) > 1).all() and errors[-1] < 1e-2, errors


def test_the_medium_is_the_same_on_every_grid_and_half_of_it_is_permeable():
    a, finer = media(32, 40), media(96, 40)
    assert set(a.unique().tolist()) == {3, 12} and torch.equal(finer[:, 1::3, 1::3], a)
    share = (a == 12).double().mean((1, 2))
    assert abs(share.mean() - 0.5) < 0.1 and share.std() > 0.05
    walls = (finer.diff(dim=1) != 0).double().mean()        # with independent cells it would be 1/2
    assert 0.01 < walls < 0.1, walls
