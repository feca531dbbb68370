"""Poisson's equation, the steady problem of CNO."""
import math

import numpy as np
import torch

from sources.pdes.march import Family, steady


def poisson(f):
    """Poisson's equation on the unit square with u = 0 on the boundary (CNO, Raonic et al. 2023).

        -Lap u = f,    f = sum over i, j of f_ij sin(pi i x) sin(pi j y),    u_ij = f_ij / (pi^2 (i^2 + j^2))

    Sine transforms, exact to rounding if i, j < N - 1. f: (B, N, N) at the nodes i / (N-1), which include the boundary;
    values there count as 0. Returns u (B, N, N).
    """
    N = f.shape[-1] - 1
    modes = torch.arange(N + 1, dtype=torch.float64)
    S = torch.sin(math.pi / N * modes[:, None] * modes) * math.sqrt(2 / N)          # its own inverse on inner nodes
    k2 = math.pi ** 2 * (modes[:, None] ** 2 + modes ** 2).clamp(min=1)             # avoids 0/0: mode 0 has no sine
    S, k2 = S.to(f), k2.to(f)
    return S @ (S @ f @ S / k2) @ S


def sine_source(random, N, K=16):
    """pi / K^2 times the sum over i, j = 1..K of a_ij sqrt(i^2 + j^2) sin(pi i x) sin(pi j y), a ~ U(-1, 1) -> (N, N).

    At the nodes i / (N-1). The benchmark's out-of-distribution set has K = 20.
    """
    i = np.arange(1, K + 1)
    sines = np.sin(np.pi * i * np.arange(N)[:, None] / (N - 1)) * (i < N - 1)       # (N, K); the grid resolves i < N-1
    return np.pi / K ** 2 * sines @ (random.uniform(-1, 1, (K, K)) * np.hypot(i[:, None], i)) @ sines.T


FAMILIES = {
    'cno_poisson': Family('-Lap u = f, unit square, u = 0 on the boundary; frame 0 is f, frame 1 is u',
                          lambda random, N: {'f': sine_source(random, N)},
                          lambda f, **options: steady(f, poisson(f)), nano=dict(train=256, test=32)),
}
