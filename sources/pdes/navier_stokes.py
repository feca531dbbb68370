"""The 2-D incompressible Navier-Stokes equations on a torus: FNO's vorticity, and Kolmogorov flow."""
import math

import numpy as np
import torch

from sources.pdes.march import RK4_IMAGINARY, Family, march


def navier_stokes(w0, viscosity, frames, dt=1.0, forcing=0.1, drag=0.0, length=1.0, full=False, stride=1, steps=None):
    """2-D incompressible Navier-Stokes in vorticity form on a torus (FNO, Li et al. 2021).

        w_t + u w_x + v w_y = viscosity Lap w - drag w + forcing (sin 2 pi (x+y) + cos 2 pi (x+y)),
        (u, v) = (psi_y, -psi_x), -Lap psi = w

    Fourier pseudo-spectral with 2/3 de-aliasing; an integrating factor for diffusion and drag, RK4
    for the rest. (The benchmark: Crank-Nicolson and Euler with a step of 1e-4.) N = 64 suffices for
    a viscosity of 1e-3, 128 for 1e-4, 256 for 1e-5.

    w0: (B, N, N) at t = 0, axes x, y.
    forcing: the amplitude, or the whole term as a field (N, N).
    length: the side of the torus, 1 in FNO.
    Returns every stride-th point of w (B, T, N/stride, N/stride), or if full of u, v (..., 2), at t = dt, ...
    """
    N = w0.shape[-1]
    K = (N - 1) // 3                             # products of two modes up to K alias only beyond K
    kx = 2 * math.pi / length * torch.fft.fftfreq(N, 1 / N).to(w0)
    ky = kx[:K + 1, None]                       # the zero modes above K are not stored: (B, K+1, N), axes ky, kx
    k2 = kx ** 2 + ky ** 2
    cut = 2 * math.pi * K / length
    disc = (k2 < (cut + 1 / length) ** 2).to(w0)            # of modes; the corners of a square need shorter steps
    to_velocity = 1j * torch.stack([ky + 0 * kx, -kx + 0 * ky])[:, None] * disc     # (2, 1, K+1, N)
    to_velocity /= k2.clamp(min=1 / length ** 2)            # no division by 0; mode 0 of the velocity is 0 already
    to_advection = (torch.stack([kx ** 2 - ky ** 2, kx * ky])[:, None] * disc).to(to_velocity)
    if not torch.is_tensor(forcing):
        x = torch.arange(N, dtype=torch.float64) / N
        phase = 2 * math.pi * (x[:, None] + x)
        forcing = forcing * (phase.sin() + phase.cos())
    to_modes = lambda field: torch.fft.fft(torch.fft.rfft(field)[..., :K + 1].mT)
    to_grid = lambda w: torch.fft.irfft(torch.fft.ifft(w).mT, n=N)
    f = disc * to_modes(forcing.to(w0))

    def advect(w):
        # for div u = 0, -u.grad w = -(dxx - dyy)(u v) - dxy(v^2 - u^2): this takes four transforms instead of five
        u, v = velocity = to_grid(to_velocity * w)                                  # (2, B, N, N)
        products = torch.empty_like(velocity)               # stacked, they would be written twice
        torch.mul(u, v, out=products[0])
        torch.mul(v - u, v.add_(u), out=products[1])
        a, b = to_modes(products)
        return torch.addcmul(f, to_advection[0], a).addcmul_(to_advection[1], b)

    def step(w, tau):                                      # RK4 for exp((viscosity k^2 + drag) t) w
        half = torch.exp(-(viscosity * k2 + drag) * tau / 2).to(w)
        w_half = half * w
        a = half * advect(w)
        b = advect(torch.add(w_half, a, alpha=tau / 2))
        c = advect(torch.add(w_half, b, alpha=tau / 2))
        d = advect(torch.add(w_half, c, alpha=tau).mul_(half))
        return w_half.add_(a, alpha=tau / 6).add_(b.add_(c), alpha=tau / 3).mul_(half).add_(d, alpha=tau / 6)

    def limit(w):
        return RK4_IMAGINARY / (cut * to_grid(to_velocity * w).square().sum(0).max().sqrt())

    def show(w):
        return (to_grid(to_velocity * w).movedim(0, -1) if full else to_grid(w))[:, ::stride, ::stride]
    return march(disc * to_modes(w0), frames, dt, step, limit, show, first=False, steps=steps, safety=0.9, check=4)


def kolmogorov(w0, frames=21, dt=0.2, reynolds=200.0, spin_up=16.0, stride=1):
    """Kolmogorov flow on a torus of side 2 pi: a body force along x drives it, drag holds it back.

        u_t + u.grad u + grad p = Lap u / reynolds - 0.1 u + (sin 4y, 0),    div u = 0

    Poseidon's FNS-KF is another such flow, with another force, torus and start.

    w0: the vorticity at t = -spin_up, (B, N, N), axes x, y; N = 128 suffices.
    Returns u, v and the force along x, (B, T, N/stride, N/stride, 3), at t = 0, dt, ..., (T-1) dt.
    """
    N = w0.shape[-1]
    y = 2 * math.pi / N * torch.arange(N).to(w0)
    terms = dict(viscosity=1 / reynolds, forcing=-4 * torch.cos(4 * y).expand(N, N), drag=0.1, length=2 * math.pi)
    w = navier_stokes(w0, frames=1, dt=spin_up - dt, **terms)[:, 0]     # frame 0 is computed next and lies dt later
    velocity = navier_stokes(w, frames=frames, dt=dt, full=True, stride=stride, **terms)
    force = torch.sin(4 * y)[::stride].expand(velocity.shape[:-1])
    return torch.cat([velocity, force[..., None]], dim=-1)


def random_vorticity(random, N):
    """Gaussian random field (N, N) of covariance 2 7^3 (-Lap + 49)^-2.5, mean 0, deviation 0.262.

    As in FNO's code of 2021, but |k| < 32 only, so that a seed gives the same field at every N >= 64.
    """
    k = np.fft.fftfreq(63, 1 / 63).astype(int)                                      # 0..31, -31..-1
    noise = random.standard_normal((63, 63)) + 1j * random.standard_normal((63, 63))
    scale = math.sqrt(2) * 7 ** 1.5 * (4 * math.pi ** 2 * (k[:, None] ** 2 + k ** 2) + 49) ** -1.25
    scale[0, 0] = 0
    modes = np.zeros((N, N), complex)
    fits = np.flatnonzero(abs(k) < N / 2)
    modes[np.ix_(k[fits], k[fits])] = (scale * noise)[np.ix_(fits, fits)]
    return np.fft.ifft2(modes).real * N ** 2


def vorticity_family(viscosity, points, **nano):
    return Family(f'w_t + u.grad w = {viscosity:g} Lap w + 0.1 (sin 2 pi (x+y) + cos 2 pi (x+y)), u = (psi_y, -psi_x), '
                  f'-Lap psi = w, unit torus, axes x y', lambda random, N: {'w0': random_vorticity(random, N)},
                  lambda **options: navier_stokes(viscosity=viscosity, **options)[..., None], nano, points)


FAMILIES = {
    'ns2d_fno_1e-3': vorticity_family(1e-3, 64, frames=30),
    'ns2d_fno_1e-4': vorticity_family(1e-4, 128, frames=20, train=24, test=6),
    'ns2d_fno_1e-5': vorticity_family(1e-5, 256, train=24, test=6, grid=128),
    'kolmogorov': Family('u_t + u.grad u + grad p = Lap u / 200 - 0.1 u + (f, 0), f = sin 4y, div (u, v) = 0, torus of '
                         'side 2 pi, axes x y', lambda random, N: {'w0': 4 * random_vorticity(random, N)}, kolmogorov,
                         nano=dict(train=40)),
}
