"""Buoyant smoke in a closed box, and the two datasets of PDEArena."""
import math

import numpy as np
import torch
import torch.nn.functional as F

from sources.pdes.march import Family, march

LENGTH = 32                                 # side of the box


def advect(q, wx, wy, outside='zeros'):
    """Semi-Lagrangian advection: q where the displacements (wx, wy) to the grid points begin.

    q, wx, wy: (B, N, N) at the same points; wx, wy in halves of the box's side. q is bilinear, and
    0 beyond the outermost points (outside='zeros') or its value at the nearest one ('border').
    """
    at = (2 * torch.arange(q.shape[-1], dtype=q.dtype, device=q.device) + 1) / q.shape[-1] - 1
    at = torch.stack([at - wy, at[:, None] - wx], 1).movedim(1, -1)     # grid_sample expects the last axis first
    return F.grid_sample(q[:, None], at, padding_mode=outside, align_corners=False)[:, 0]


def smoke(u0, vx0, vy0, buoyancy, frames, dt, start=0.0, viscosity=0.01, stride=1):
    """Smoke u that rises along y and stirs the air in a closed box (PDEArena, Gupta et al. 2022).

        u_t + v.grad u = 0,    v_t + v.grad v = -grad p + viscosity Lap v + (0, buoyancy u),    div v = 0

    At the walls v = 0, and u has no gradient. The scheme is the benchmark's, whose numerical
    diffusion is part of its data: on a staggered grid of N = 128, steps of at most 1.5 advect u and
    v by the old v (Euler back-trace, bilinear), add the buoyancy of the new u, diffuse explicitly
    and project, which is exact here, by products with cosines.

    u0: (B, N, N) at the cell centres.
    vx0, vy0: (B, N, N) at the lower face of each cell along x and y, 0 on the first, a wall.
    buoyancy: a number or (B,).
    start: the time of frame 0.
    stride: the side of the blocks of cells that are averaged.
    Returns (u, vx, vy), (B, T, N/stride, N/stride, 3), at t = start, start + dt, ...
    """
    N = u0.shape[-1]
    lift = torch.as_tensor(buoyancy).to(u0).reshape(-1, 1, 1)
    k = math.pi / N * torch.arange(1, N, dtype=torch.float64)[:, None]
    Q = ((2 / N) ** 0.5 * torch.cos(k * (torch.arange(N) + 0.5))).to(u0)            # all cosines but the constant
    inverse_laplacian = (0.5 / (torch.cos(k) + torch.cos(k.mT) - 2)).to(u0)  # of second differences
    inner = torch.ones(2, 1, N, N).to(u0)                                           # 0 on the walls
    inner[0, :, 0] = 0
    inner[1, :, :, 0] = 0

    def advance(y, tau):                                                            # (3, B, N, N)
        u, vx, vy = y
        scale = tau / LENGTH
        rate = viscosity * tau * (N / LENGTH) ** 2
        wx = scale * (vx + F.pad(vx, (0, 0, -1, 1)))                           # of the cell centres
        wy = scale * (vy + F.pad(vy, (-1, 1)))
        u = advect(u, wx, wy, 'border')
        v = torch.stack([advect(vx, 2 * tau / LENGTH * vx, (wy + F.pad(wy, (0, 0, 1, -1))) / 2),
                         advect(vy, (wx + F.pad(wx, (1, -1))) / 2, 2 * tau / LENGTH * vy)
                         + tau / 2 * lift * (u + F.pad(u, (1, -1)))]) * inner
        substeps = max(1, math.ceil(4 * rate))
        for _ in range(substeps):
            p = F.pad(v, (1, 1, 1, 1))
            around = p[..., 2:, 1:-1] + p[..., :-2, 1:-1] + p[..., 1:-1, 2:] + p[..., 1:-1, :-2]
            v = torch.lerp(v, around / 4, 4 * rate / substeps * inner)
        # projection; the parts of p that depend on x or y alone are most of it: taking them first rounds less
        vx = v[0] - v[0].mean(2, keepdim=True)
        vy = v[1] - v[1].mean(1, keepdim=True)
        divergence = F.pad(vx, (0, 0, -1, 1)) - vx + F.pad(vy, (-1, 1)) - vy
        p = Q.T @ (inverse_laplacian * (Q @ divergence @ Q.T)) @ Q
        return torch.stack([u, vx - p.diff(dim=1, prepend=p[:, :1]), vy - p.diff(dim=2, prepend=p[..., :1])])

    def show(y):
        u, vx, vy = y
        s = stride
        u = sum(u[:, i::s, j::s] for i in range(s) for j in range(s)) / s ** 2
        vx = sum(vx[:, ::s, j::s] for j in range(s)) / s
        vy = sum(vy[:, i::s, ::s] for i in range(s)) / s
        return torch.stack([u, vx, vy], -1)
    y = torch.stack([u0, vx0, vy0])
    limit = lambda y: 1.5 + 0 * y.sum()                             # NaN if the state is not finite
    if start:
        y = march(y, 1, start, advance, limit, lambda y: y.movedim(0, 1), first=False, check=9)[:, 0].movedim(1, 0)
    return march(y, frames, dt, advance, limit, show, check=9)


def cloud(random, N):
    """Smoke at rest: the absolute value of smooth noise of deviation 1.

    Its Fourier coefficients are white complex noise times |n|^-12, with |n_x|, |n_y| < 4 and mean 0,
    the same at every N.
    """
    n = np.arange(-3, 4)
    noise = random.standard_normal((7, 7)) + 1j * random.standard_normal((7, 7))
    n2 = n[:, None] ** 2 + n ** 2
    basis = np.exp(2j * math.pi / N * (np.arange(N)[:, None] + 0.5) * n)       # at the cell centres
    field = (basis @ (noise * (n2 > 0) / np.maximum(n2, 1) ** 6) @ basis.T).real
    rest = np.zeros((N, N))
    return dict(u0=abs(field) / field.std(), vx0=rest, vy0=rest)


def smoke_family(text, low, high, **nano):
    """Smoke with buoyancy ~ U(low, high), called `text` in the equation."""
    return Family(f'u_t + v.grad u = 0, v_t + v.grad v = -grad p + 0.01 Lap v + (0, {text} u), div v = 0, axes x y, '
                  f'[0, 32]^2, walls; vx, vy at the lower faces of the cells; first frame t = 13.5',
                  lambda random, N: dict(cloud(random, N), buoyancy=random.uniform(low, high)),
                  lambda **options: smoke(start=13.5, **options), nano, 128, True)


FAMILIES = {'ns2d_pda': smoke_family('0.5', 0.5, 0.5), 'ns2d_cond_pda': smoke_family('buoyancy', 0.2, 0.5, frames=24)}
