"""Tests of pdes/navier_stokes.py: exact solutions, measured orders, conserved quantities, the benchmark's own files."""
import h5py
import numpy as np
import pytest
import torch

from fields import PI, l2re, nodes, orders, raw, starts
from sources.pdes import FAMILIES
from sources.pdes.navier_stokes import kolmogorov, navier_stokes, random_vorticity


def vorticity(N, count=2, seed=0):
    return starts(lambda random, N: [random_vorticity(random, N)], N, count, seed)[0]


def test_taylor_green_vortices_decay_at_the_exact_rate():
    x, y = nodes(32)
    w0 = (torch.cos(2 * PI * x) * torch.cos(2 * PI * y))[None]
    frames = navier_stokes(w0, 1e-2, 4, dt=0.5, forcing=0)
    for frame, t in enumerate((0.5, 1, 1.5, 2)):
        assert l2re(frames[:, frame], w0 * np.exp(-8 * PI ** 2 * 1e-2 * t)) < 1e-12


def residual(w, dt, viscosity, sign=1.0):
    """Relative residual of the vorticity equation at the middle one of three frames (3, N, N), with NumPy alone."""
    N = w.shape[-1]
    k = 2 * PI * np.fft.fftfreq(N, 1 / N)
    kx, ky = k[:, None], k[None, :]
    k2 = kx ** 2 + ky ** 2
    hat = np.fft.fft2(w[1])
    back = lambda modes: np.fft.ifft2(modes).real
    psi = hat / np.where(k2 > 0, k2, 1)
    u, v = back(1j * ky * psi), back(-1j * kx * psi)
    x, y = (grid.numpy() for grid in nodes(N))
    f = 0.1 * (np.sin(2 * PI * (x + y)) + np.cos(2 * PI * (x + y)))
    rate = (w[2] - w[0]) / (2 * dt)
    advection = u * back(1j * kx * hat) + v * back(1j * ky * hat)
    error = rate + sign * advection + viscosity * back(k2 * hat) - f
    return np.linalg.norm(error) / np.linalg.norm(advection)


def test_frames_satisfy_the_vorticity_equation_with_the_right_sign_of_advection():
    smooth = navier_stokes(8 * vorticity(64, 1), 1e-2, 1)[:, 0]             # de-aliasing would cut off rougher fields
    frames = navier_stokes(smooth, 1e-3, 3, dt=0.005)[0].numpy()
    right, wrong = residual(frames, 0.005, 1e-3), residual(frames, 0.005, 1e-3, sign=-1.0)
    swapped = residual(frames.transpose(0, 2, 1), 0.005, 1e-3)
    assert right < 1e-3, right
    assert wrong > 1 and swapped > 1, (wrong, swapped)


def test_navier_stokes_is_fourth_order_in_time():
    w0 = 4 * vorticity(32, 1)
    exact = navier_stokes(w0, 1e-3, 1, steps=320)
    measured = orders([l2re(navier_stokes(w0, 1e-3, 1, steps=n), exact) for n in (20, 40, 80)])
    assert (abs(measured - 4) < 0.3).all(), measured


def test_advection_conserves_energy_enstrophy_and_mean_exactly_because_it_is_dealiased():
    N = 32
    noise = 4 * torch.randn(1, N, N, dtype=torch.float64)
    w0 = navier_stokes(noise, 0.0, 1, dt=1e-9, forcing=0) + 1               # has every mode that the solver keeps
    w1 = navier_stokes(w0, 0.0, 1, dt=0.2, forcing=0, steps=200)[:, 0]
    k = 2 * PI * np.fft.fftfreq(N, 1 / N)
    k2 = k[:, None] ** 2 + k[None, :] ** 2
    k2[0, 0] = np.inf
    power = lambda w: abs(np.fft.fft2(w.numpy())) ** 2
    w0 = w0[:, 0]
    assert l2re(w1, w0) > 0.1, 'nothing happened'
    assert abs(w1.mean() - w0.mean()) < 1e-14 and w0.mean() > 0.1
    for name, weight in (('enstrophy', np.isfinite(k2)), ('energy', 1 / k2)):
        before, after = (power(w0) * weight).sum(), (power(w1) * weight).sum()
        assert abs(after / before - 1) < 1e-6, (name, after / before - 1)


def test_navier_stokes_agrees_with_the_benchmark_at_viscosity_1e_3():
    with h5py.File(raw('ns_V1e-3_N5000_T50.mat')) as file:                  # MATLAB: all axes reversed
        a, u = (torch.from_numpy(file[key][:].T.copy()).double() for key in 'au')
    u = u.movedim(-1, 1)                                                    # (N, T, x, y)
    frames = navier_stokes(a, 1e-3, 6)
    # the benchmark's solver takes 10,000 Euler steps per frame in fp32: measured 4e-4 at frame 0, 1.3e-3 at frame 5
    assert l2re(frames[:, 0], u[:, 0]) < 1e-3 and l2re(frames[:, 5], u[:, 5]) < 3e-3
    assert l2re(navier_stokes(u[:, 9], 1e-3, 1)[:, 0], u[:, 10]) < 1e-3
    assert l2re(navier_stokes(a.mT, 1e-3, 6)[:, 5].mT, u[:, 5]) > 0.05      # swapped axes are another flow


def curl_and_divergence(velocity):
    """Spectral w = v_x - u_y and u_x + v_y on the torus of side 2 pi of velocities (..., N, N, 2)."""
    N = velocity.shape[-2]
    k = torch.fft.fftfreq(N, 1 / N, dtype=torch.float64)
    u, v = (torch.fft.fft2(velocity[..., i]) for i in (0, 1))
    back = lambda modes: torch.fft.ifft2(1j * modes).real
    return back(k[:, None] * v - k * u), back(k[:, None] * u + k * v)


def test_kolmogorov_flow_from_rest_reaches_the_laminar_profile():
    frames = kolmogorov(torch.zeros(1, 16, 16, dtype=torch.float64), 100, 0.2, reynolds=20, spin_up=0.4)
    y = 2 * PI * nodes(16)[1]
    exact = torch.sin(4 * y) / (16 / 20 + 0.1)              # 16 / Re by viscosity, 0.1 by drag
    assert l2re(frames[:, -1, ..., 0], exact.expand(1, 16, 16)) < 1e-6 and frames[..., 1].abs().max() < 1e-12
    assert (frames[..., 2] - torch.sin(4 * y)).abs().max() < 1e-13
    rate = 16 / 200 + 0.1                                   # of the dataset, whose start, u = 2 sin 4y, is at t = -16
    frames = FAMILIES['kolmogorov'].solve(-8 * torch.cos(4 * y).expand(1, 16, 16), frames=2, dt=0.3)
    for t, u in zip((16, 16.3), frames[0, ..., 0]):
        exact = torch.sin(4 * y) * (1 / rate + (2 - 1 / rate) * np.exp(-rate * t))
        assert l2re(u[None], exact.expand(1, 16, 16)) < 1e-6


@pytest.mark.parametrize('name', [name for name in FAMILIES if name.startswith('ns2d_fno_')])
def test_the_viscosity_of_a_dataset_is_that_in_its_name(name, monkeypatch):
    monkeypatch.setattr('sources.pdes.navier_stokes.navier_stokes', lambda viscosity: torch.tensor([viscosity]))
    assert FAMILIES[name].solve() == torch.tensor(float(name.removeprefix('ns2d_fno_')))


def test_kolmogorov_flow_is_solenoidal_and_its_energy_changes_by_input_minus_dissipation_minus_drag():
    w0 = 4 * vorticity(32)
    frames = kolmogorov(w0, 3, 0.01, reynolds=100, spin_up=4.0)
    assert torch.equal(kolmogorov(w0, 3, 0.01, 100, 4.0, stride=2), frames[:, :, ::2, ::2])
    velocity, force = frames[..., :2], frames[..., 2]
    w, divergence = curl_and_divergence(velocity)
    assert w.std() > 1 and divergence.abs().max() < 1e-11
    energy = velocity.square().sum(-1).mean((2, 3)) / 2                             # (B, T)
    terms = torch.stack([(force * velocity[..., 0]).mean((2, 3)), -w.square().mean((2, 3)) / 100, -0.2 * energy])
    rate = (energy[:, 2] - energy[:, 0]) / 0.02
    assert (terms[..., 1].abs() > 0.05).all()
    assert (rate - terms.sum(0)[:, 1]).abs().max() < 1e-3, (rate, terms[..., 1])


def test_velocities_belong_to_the_vorticity_and_the_side_of_the_torus_only_sets_the_units():
    w0 = vorticity(32)
    terms = dict(forcing=0.0, drag=0.3)
    unit = navier_stokes(w0, 1e-3, 2, **terms)
    L = 2 * PI
    wide = navier_stokes(w0, 1e-3 * L ** 2, 2, length=L, **terms)
    assert l2re(wide, unit) < 1e-12
    velocity = navier_stokes(w0, 1e-3 * L ** 2, 2, length=L, full=True, **terms)
    assert l2re(curl_and_divergence(velocity)[0], wide) < 1e-12
    still = navier_stokes(torch.ones(1, 16, 16, dtype=torch.float64), 1e-3, 2, **terms)
    assert (still[:, 1] - np.exp(-0.6)).abs().max() < 1e-12
