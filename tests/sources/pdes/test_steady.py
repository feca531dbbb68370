"""Tests of pdes/steady.py: sine modes, dense matrices, orders, layers."""
import numpy as np
import pytest
import torch

from fields import PI, centres, l2re, nodes, orders, starts
from sources.pdes import FAMILIES
from sources.pdes.steady import conductances, darcy, poisson, two_phase_medium


def test_every_sine_mode_is_divided_by_its_eigenvalue():
    x, y = (grid * 16 / 15 for grid in nodes(16))           # 0, ..., 1
    for i, j in ((1, 1), (3, 5), (14, 2)):
        mode = (torch.sin(PI * i * x) * torch.sin(PI * j * y))[None]
        assert l2re(poisson(mode), mode / (PI ** 2 * (i ** 2 + j ** 2))) < 1e-13


def test_frame_0_is_what_is_given_and_frame_1_the_solution():
    for name, key, solve in (('cno_poisson', 'f', poisson), ('cno_darcy', 'a', lambda a: darcy(a, refine=4))):
        given = starts(FAMILIES[name].draw, 16, 2)[0]
        frames = FAMILIES[name].solve(stride=1, frames=2, dt=1.0, **{key: given})
        assert torch.equal(frames, torch.stack([given, solve(given)], 1)[..., None])


def media(N, count=3):
    return starts(lambda random, N: [two_phase_medium(random, N)], N, count)[0]


def fluxes(a, u):
    """a times the gradient of u at the faces across x, (B, N+1, N), and across y, (B, N, N+1)."""
    gx, gy = conductances(a)
    padded, N = torch.nn.functional.pad(u, (1, 1, 1, 1)), a.shape[-1]
    return N * gx * padded[:, :, 1:-1].diff(dim=1), N * gy * padded[:, 1:-1].diff(dim=2)


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
