"""The shallow-water equations and the radial dam breaks of PDEBench."""
import numpy as np
import torch
import torch.nn.functional as F

from pdes.march import Family, half_slope, march


def shallow_water(h0, hu0, hv0, frames=101, dt=0.01, length=5.0, g=1.0, cfl=0.8, full=False, steps=None, progress=None):
    """2-D shallow water over a flat bottom, with outflow through every side (PDEBench).

        h_t + (hu)_x + (hv)_y = 0,    (hu)_t + (hu^2 + g h^2/2)_x + (huv)_y = 0,    and likewise for hv

    Finite volumes on a square of side `length`: MUSCL with the MC limiter in (h, u, v), HLLC fluxes (three waves, which
    need no entropy fix; the benchmark uses the Roe solver of PyClaw), SSP-RK2, and zero-order extrapolation outside.
    Second order where the solution is smooth, first order at shocks.
    h0, hu0, hv0: cell averages (B, N, N). cfl: fraction of the stability limit tau (|u|+c + |v|+c) / dx = 1.
    Returns h (B, T, N, N) at t = 0, dt, ..., or with full=True (h, hu, hv), (B, T, N, N, 3). The scheme fails on a dry
    bed (h = 0). Raises FloatingPointError as `march` does.
    """
    dx = length / h0.shape[-1]

    def sweep(h, u, v):
        """Fluxes of h, hu, hv through the faces along the last axis; u is the velocity along that axis."""
        q = F.pad(torch.stack([h, u, v]), (2, 2, 0, 0), mode='replicate')           # (3, B, N, N+4)
        slope, q = half_slope(q.diff(dim=-1)), q[..., 1:-1]
        hL, uL, vL = (q + slope)[..., :-1]                                          # (B, N, N+1): left of each face
        hR, uR, vR = (q - slope)[..., 1:]                                           # and right of it
        cL, cR = (g * hL).sqrt(), (g * hR).sqrt()
        sL = torch.minimum(uL - cL, uR - cR).clamp_(max=0)                          # speeds of the slowest and the
        sR = torch.maximum(uL + cL, uR + cR).clamp_(min=0)                          # fastest wave
        mL, mR = hL * uL, hR * uR
        a, b = sR / (sR - sL), sL * sR / (sR - sL)

        def hll(FL, FR, UL, UR):
            return torch.lerp(FR, FL, a).addcmul_(b, UR - UL)

        mass = hll(mL, mR, hL, hR)
        momentum = hll(mL * uL + g / 2 * hL * hL, mR * uR + g / 2 * hR * hR, mL, mR)
        return mass, momentum, mass * torch.where(mass > 0, vL, vR)                 # the contact wave carries v

    def f(y):                                                                       # (3, B, N, N)
        h, hu, hv = y
        u, v = hu / h, hv / h
        Gh, Ghv, Ghu = sweep(h, v, u)
        Fh, Fhu, Fhv = (flux.mT for flux in sweep(h.mT, u.mT, v.mT))
        return -(torch.stack([Fh, Fhu, Fhv]).diff(dim=-2) + torch.stack([Gh, Ghu, Ghv]).diff(dim=-1)) / dx

    def step(y, tau):
        once = y + tau * f(y)
        return (y + once + tau * f(once)) / 2

    def limit(y):
        h, hu, hv = y
        return dx / ((hu.abs() + hv.abs()) / h + 2 * (g * h).sqrt()).max()          # NaN if h < 0 anywhere

    return march(torch.stack([h0, hu0, hv0]), frames, dt, step, limit,
                 lambda y: y.movedim(0, -1) if full else y[0], steps=steps, safety=cfl, progress=progress)


def dam_break(random, N):
    """Water at rest, of height 2 within R ~ U(0.3, 0.7) of the centre of [-2.5, 2.5]^2, else 1 -> h, hu, hv, (N, N).

    h is the average over each cell. The benchmark asks instead whether the centre of a cell lies within R. Its grid of
    128 x 128 then has only 81 different starts, and each of its test trajectories is also in its training set.
    """
    R = random.uniform(0.3, 0.7)
    edges = np.linspace(-2.5, 2.5, N + 1)
    x = -2.5 + 5 * (np.arange(32 * N) + 0.5) / (32 * N)
    top = np.sqrt(np.maximum(R ** 2 - x ** 2, 0))[:, None]
    within = np.diff(edges.clip(-top, top)).reshape(N, 32, N).mean(1) / (5 / N)     # exact in y, 32 columns a cell in x
    return 1 + (within + within.T) / 2, np.zeros((N, N)), np.zeros((N, N))


FAMILIES = {
    'swe_pdb': Family('shallow water, g = 1, flat bottom, [-2.5, 2.5]^2, outflow',
                      lambda random, N: dict(zip(('h0', 'hu0', 'hv0'), dam_break(random, N))),
                      lambda stride, **given: shallow_water(**given)[..., None],
                      nano=dict(frames=11, dt=0.1)),        # every tenth frame: consecutive ones hardly differ
}
