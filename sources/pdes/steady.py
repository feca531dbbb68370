"""Poisson's and Darcy's equations, the steady problems of CNO (Raonic et al. 2023)."""
import math

import numpy as np
import torch
import torch.nn.functional as F

from sources.pdes.march import Family


def poisson(f):
    """-Lap u = f on the unit square with u = 0 on the boundary: u_ij = f_ij / (pi^2 (i^2 + j^2)).

    f is the sum of f_ij sin(pi i x) sin(pi j y), and u is exact to rounding if i, j < N - 1.

    f: (B, N, N) at the nodes i / (N-1), of which those on the boundary count as 0. Returns u (B, N, N).
    """
    N = f.shape[-1] - 1
    modes = torch.arange(N + 1, dtype=torch.float64)
    S = torch.sin(math.pi / N * modes[:, None] * modes) * math.sqrt(2 / N)          # its own inverse on inner nodes
    k2 = math.pi ** 2 * (modes[:, None] ** 2 + modes ** 2).clamp(min=1)             # avoids 0/0: mode 0 has no sine
    S = S.to(f)
    k2 = k2.to(f)
    return S @ (S @ f @ S / k2) @ S


def sine_source(random, N, K=16):
    """pi/K^2 sum_ij a_ij sqrt(i^2+j^2) sin(pi i x) sin(pi j y), a ~ U(-1, 1): (N, N)."""
    i = np.arange(1, K + 1)
    sines = np.sin(np.pi * i * np.arange(N)[:, None] / (N - 1)) * (i < N - 1)       # (N, K); the grid resolves i < N-1
    return np.pi / K ** 2 * sines @ (random.uniform(-1, 1, (K, K)) * np.hypot(i[:, None], i)) @ sines.T


def conductances(a):
    """Harmonic means of a (B, N, N) at faces: (B, N+1, N) across x, (B, N, N+1) y."""
    def across(a):
        inner = 2 * a[:, 1:] * a[:, :-1] / (a[:, 1:] + a[:, :-1])
        return torch.cat([2 * a[:, :1], inner, 2 * a[:, -1:]], 1)         # u = 0 is half a cell off
    return across(a), across(a.mT).mT


def darcy(a, f=1.0, refine=1, iterations=200):
    """-div(a grad u) = f on the unit square with u = 0 on the boundary: u (B, N, N).

    Cell-centred finite volumes of second order where a is smooth; conjugate gradients,
    preconditioned by the solution for a = 1 with sine transforms as matrix products.

    a: the permeability (B, N, N), one value per cell.
    f: a number, or (B, N, N).
    refine: solve on refine^2 cells for each, over which u is then averaged. With 64^2 cells of 3 or
        12, refine = 1, 2, 4 differ from 8 by 8e-3, 3e-3, 7e-4 (L2RE).
    Raises FloatingPointError if `iterations` do not suffice.
    """
    f = torch.as_tensor(f).to(a).expand_as(a)
    a, f = (field.repeat_interleave(refine, 1).repeat_interleave(refine, 2) for field in (a, f))
    N = a.shape[-1]
    k = torch.arange(1, N + 1, dtype=torch.float64)[:, None]
    S = torch.sin(math.pi / N * k * (torch.arange(N) + 0.5)) * (2 / N) ** 0.5       # orthonormal rows, but the last
    S[-1] /= math.sqrt(2)                                           # one, of +1 and -1, is too long
    eigenvalues = 4 * torch.sin(math.pi / 2 / N * k) ** 2
    S = S.to(a)
    inverse = 1 / (eigenvalues + eigenvalues.mT).to(a)
    gx, gy = conductances(a)
    precondition = lambda r: S.T @ (inverse * (S @ r @ S.T)) @ S
    dot = lambda p, q: (p * q).sum((1, 2), keepdim=True)
    r = f / N ** 2
    u = torch.zeros_like(a)
    p = precondition(r)
    rho = dot(r, p)
    goal = rho * (8 * torch.finfo(a.dtype).eps) ** 2
    for _ in range(iterations):
        if (rho <= goal).all():
            return F.avg_pool2d(u[:, None], refine)[:, 0]
        drops = F.pad(p, (1, 1, 1, 1))
        Ap = -(gx * drops[:, :, 1:-1].diff(dim=1)).diff(dim=1) - (gy * drops[:, 1:-1].diff(dim=2)).diff(dim=2)
        length = torch.where(rho > goal, rho / dot(p, Ap), 0)           # samples that have converged stay as they are
        u = u + length * p
        r = r - length * Ap
        z = precondition(r)
        before = rho
        rho = dot(r, z)
        p = z + torch.where(rho > goal, rho / before, 0) * p
    raise FloatingPointError(f'the conjugate gradients have not converged in {iterations} iterations')


def two_phase_medium(random, N, modes=64):
    """12 where a Gaussian random field is positive and 3 elsewhere, at the cell centres: (N, N).

    The field has covariance (-Lap + 9)^-2, no slope at the boundary, mean 0 (FNO's Darcy data). It
    is drawn as cosines, up to `modes` half waves a side: a seed gives the same field at every N.
    """
    k = np.arange(modes)
    cosines = np.cos(np.pi / N * (np.arange(N)[:, None] + 0.5) * k)
    amplitudes = random.standard_normal((modes, modes)) / (np.pi ** 2 * (k[:, None] ** 2 + k ** 2) + 9)
    cosines[:, 0] = 0.5 ** 0.5             # normalised: a constant has twice the square of a cosine
    amplitudes[0, 0] = 0
    return np.where(cosines @ amplitudes @ cosines.T > 0, 12.0, 3.0)


FAMILIES = {
    'cno_poisson': Family('-Lap u = f, unit square, u = 0 on the boundary; frame 0 is f, frame 1 is u',
                          lambda random, N: {'f': sine_source(random, N)},
                          lambda f, **options: torch.stack([f, poisson(f)], 1)[..., None], dict(train=256, test=32)),
    'cno_darcy': Family('-div(a grad u) = 1, a = 3 or 12, unit square, u = 0 on the boundary; frame 0 is a, frame 1 '
                        'is u, at the cell centres', lambda random, N: {'a': two_phase_medium(random, N)},
                        lambda a, **options: torch.stack([a, darcy(a, refine=4)], 1)[..., None],
                        dict(train=256, test=32)),
}
