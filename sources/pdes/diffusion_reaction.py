"""The FitzHugh-Nagumo diffusion-reaction equations of PDEBench."""
import torch
import torch.nn.functional as F

from sources.pdes.march import RK4_REAL, Family, march, rk4


def diffusion_reaction(u0, v0, frames=101, dt=0.05, Du=1e-3, Dv=5e-3, k=5e-3, steps=None):
    """FitzHugh-Nagumo activator u and inhibitor v on [-1, 1]^2 without flux through the sides (PDEBench).

        u_t = Du Lap u + u - u^3 - k - v,    v_t = Dv Lap v + u - v

    Cell-centred finite volumes (5 points, second order), RK4. The benchmark starts from white
    noise, one number per cell, so another grid poses another problem.

    u0, v0: (B, N, N). Returns (B, T, N, N, 2) at t = 0, dt, ...
    """
    N = u0.shape[-1]
    diffusion = torch.tensor([Du, Dv]).to(u0)[:, None, None] * (N / 2) ** 2         # D / dx^2

    def f(y):                                                                       # (B, 2, N, N)
        p = F.pad(y, (1, 1, 1, 1), mode='replicate')        # mirror cells outside: no flux through the boundary
        u, v = y.unbind(1)
        flow = (p[..., 2:, 1:-1] + p[..., :-2, 1:-1]).add_(p[..., 1:-1, 2:]).add_(p[..., 1:-1, :-2])
        flow.add_(y, alpha=-4).mul_(diffusion)
        flow[:, 0] += (u - u ** 3).sub_(k).sub_(v)
        flow[:, 1] += u - v
        return flow
    return march(torch.stack([u0, v0], 1), frames, dt, lambda y, tau: rk4(f, y, tau),
                 lambda y: RK4_REAL / (8 * max(Du, Dv) * (N / 2) ** 2 + 3 * (y[:, 0] ** 2).max() + 1),
                 lambda y: y.movedim(1, -1), steps=steps, safety=0.5)


FAMILIES = {'dr_pdb': Family(
    'u_t = 1e-3 Lap u + u - u^3 - 5e-3 - v, v_t = 5e-3 Lap v + u - v, [-1, 1]^2, no flux',
    lambda random, N: dict(zip(('u0', 'v0'), random.standard_normal((2, N, N)))),
    lambda stride, **options: diffusion_reaction(**options),
    nano=dict(frames=11, dt=0.5, train=96))}     # every tenth frame: consecutive ones hardly differ
