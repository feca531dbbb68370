"""Tests of pdes/wave.py: exact solutions, measured orders, reflection."""
import numpy as np
import pytest
import torch

import configs
from fields import PI, centres, l2re, orders
from sources import generate
from sources.pdes.wave import FAMILIES, WAVE_UNIT, wave


def plane(N, t, c, m=(2, 3)):
    x, y = centres(N)
    phase, omega = 2 * PI * (m[0] * x + m[1] * y), 2 * PI * c * np.hypot(*m)
    return torch.cos(phase - omega * t)[None], omega * torch.sin(phase - omega * t)[None]


def test_a_plane_wave_moves_at_speed_c_and_the_scheme_is_sixth_order_in_time():
    u0, v0 = plane(32, 0.0, 0.7)
    c = torch.full_like(u0, 0.7)
    exact = torch.stack(plane(32, 0.5, 0.7), -1)
    *errors, default = [l2re(wave(u0, v0, c, 2, 0.5, 'periodic', n)[:, 1], exact) for n in (25, 50, 100, None)]
    assert errors[-1] < 1e-5 and (abs(orders(errors) - 6) < 0.3).all(), (errors, orders(errors))
    assert default < 1e-4


@pytest.mark.parametrize('speed, centre', [(2000, 0.5), (7000, 0.5), (2000, 0.8)])
@pytest.mark.slow
def test_outgoing_waves_leave_with_little_reflection(speed, centre):
    N, c = 32, speed * WAVE_UNIT
    frames, dt = 13, 1.6 / c / 12           # by then the waves have left the square but not gone round the large torus
    x, y = centres(N)
    u0 = torch.exp(-((x - centre) ** 2 + (y - 0.5) ** 2) / (2 * 0.05 ** 2))[None]
    inside = slice(N + N // 2, 2 * N + N // 2)
    big = torch.zeros(1, 4 * N, 4 * N, dtype=torch.float64)
    big[:, inside, inside] = u0
    free = wave(big, 0 * big, torch.full_like(big, c / 4), frames, dt, 'periodic')[:, :, inside, inside, 0]
    ours = wave(u0, 0 * u0, torch.full_like(u0, c), frames, dt)[..., 0]
    assert (free[:, :5].abs().amax((2, 3)) > 0.1).all()     # a pulse does reach the sides
    assert (ours - free).abs().max() < 6e-3, (ours - free).abs().amax((0, 2, 3))


@pytest.mark.parametrize('name', ['wave_gauss', 'wave_layer'])
@pytest.mark.slow
def test_the_time_step_of_the_small_form_is_fine_enough(name):
    """The fields of each trajectory beside those of 60 steps a frame in double precision."""
    plan = generate.plan(name, 'nano')
    for first in range(0, 16, 4):
        batch = range(first, first + 4)
        start = {key: torch.from_numpy(field) for key, field in generate.initial(plan, 'train', batch).items()}
        exact = FAMILIES[name].solve(stride=1, frames=plan.frames, dt=plan.dt, steps=60, **start)[..., :2]
        found = torch.from_numpy(generate.simulate(plan, 'train', batch))[..., :2]
        errors = ((found - exact).square().sum((1, 2, 3)) / exact.square().sum((1, 2, 3))).sqrt()             # (B, 2)
        assert errors.max() < 1e-4, errors


@pytest.mark.parametrize('name, speed', [('wave_gauss', 2040), ('wave_gauss_c', 2040), ('wave_layer', 3163)])
def test_a_wave_of_the_mean_speed_crosses_4_of_128_points_a_frame_and_the_file_has_km_per_s(name, speed, monkeypatch):
    dataset = configs.DATASETS[name]
    monkeypatch.setattr('sources.pdes.wave.wave', lambda c, frames: c[:, None, :, :, None].expand(1, frames, 2, 2, 2))
    fields = FAMILIES[name].solve(stride=1, c=torch.full((1, 2, 2), float(speed)), frames=3)
    assert (fields[..., :2] * dataset.dt * 128 - 4).abs().max() < 1e-5
    assert fields.shape[-1] == len(dataset.channels) and (fields[..., 2:] * 1000 - speed).abs().sum() < 1e-1


@pytest.mark.parametrize('left, right', [(0.5, 0.9), (0.9, 0.5)])
def test_reflection_and_transmission_at_an_interface_follow_d_alemberts_solution(left, right):
    """u and u_x are continuous: of a wave from the left (c2 - c1) / (c1 + c2) returns and 2 c2 / (c1 + c2) goes on."""
    def error(N):
        face = 0.5 + 0.3 / N                                # inside a cell
        x = centres(N)[0][:, 0]
        pulse = lambda s: torch.exp(-(s - 0.25) ** 2 / (2 * 0.04 ** 2))

        def exact(t):
            back = (right - left) / (left + right) * pulse(2 * face - x - left * t)
            on = 2 * right / (left + right) * pulse(face + (x - face) * left / right - left * t)
            return torch.where(x < face, pulse(x - left * t) + back, on)
        share = (face * N - torch.arange(N)).clamp(0, 1)
        c = (share / left ** 2 + (1 - share) / right ** 2) ** -0.5
        t, eps = 0.35 / left, 1e-6
        u0, v0, c = (f.double()[None, :, None].expand(1, N, N) for f in (
            exact(0.0), (exact(eps) - exact(-eps)) / (2 * eps), c))
        return l2re(wave(u0, v0, c, 2, t, 'periodic')[:, 1, :, 0, 0], exact(t)[None])
    errors = [error(N) for N in (32, 64)]
    assert errors[1] < (0.01 if left < right else 0.06) and orders(errors) > 1.7, errors
