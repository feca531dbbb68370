"""The shallow-water equations and the radial dam breaks of PDEBench."""
import numpy as np
import torch

from sources.pdes.march import Family, half_slope, march


def shallow_water(h0, hu0, hv0, frames=101, dt=0.01, full=False, steps=None):
    """2-D shallow water over a flat bottom, [-2.5, 2.5]^2, g = 1, with outflow everywhere (PDEBench).

        h_t + (hu)_x + (hv)_y = 0,    (hu)_t + (hu^2 + h^2/2)_x + (huv)_y = 0,    and likewise for hv

    Finite volumes: MUSCL-Hancock with the MC limiter in (h, u, v) and HLLC fluxes. (The benchmark:
    PyClaw's Roe solver.) The result is the mean of two solutions, whose steps go along y and then
    x, and along x and then y.

    h0, hu0, hv0: cell averages (B, N, N).
    Returns h (B, T, N, N), or if full h, hu, hv (..., 3), at t = 0, dt, ...
    """
    dx = 5 / h0.shape[-1]
    turn = lambda y: torch.stack([y[0].mT, y[2].mT, y[1].mT])       # exchanges the axes, and the momenta along them

    def sweep(y, ratio):
        """A step tau = ratio dx along the last axis; y: h, momentum across, along."""
        q = torch.cat([y[:1], y[1:] / y[0]])
        q = torch.cat([q[..., :1], q[..., :1], q, q[..., -1:], q[..., -1:]], -1)
        slope = half_slope(q.diff(dim=-1))
        q = q[..., 1:-1]
        h, _, u = q
        middle = torch.addcmul(q, slope, u, value=-ratio)   # half a step later
        middle[0].addcmul_(h, slope[2], value=-ratio)
        middle[2].sub_(slope[0], alpha=ratio)
        hL, vL, uL = (middle + slope)[..., :-1]                      # (..., N+1): left of each face
        hR, vR, uR = (middle - slope)[..., 1:]                                     # and right of it
        cL = hL.sqrt()
        cR = hR.sqrt()
        sL = torch.minimum(uL - cL, uR - cR).clamp_(max=0)           # speeds of the slowest and the
        sR = torch.maximum(uL + cL, uR + cR).clamp_(min=0)                          # fastest wave
        mL = hL * uL
        mR = hR * uR
        a = sR / (sR - sL)
        b = sL * a
        hll = lambda FL, FR, UL, UR: torch.lerp(FR, FL, a).addcmul_(b, UR - UL)
        mass = hll(mL, mR, hL, hR)
        pushL = (hL * hL).mul_(0.5).addcmul_(mL, uL)                          # flux of the momentum
        pushR = (hR * hR).mul_(0.5).addcmul_(mR, uR)
        momentum = hll(pushL, pushR, mL, mR)
        across = mass * torch.where(mass > 0, vL, vR)                   # the contact wave carries v
        return torch.sub(y, torch.stack([mass, across, momentum]).diff(dim=-1), alpha=ratio)

    def step(y, tau):                    # along y, then along x; the turned one the other way round
        return torch.stack([turn(sweep(turn(sweep(z, tau / dx)), tau / dx)) for z in y])

    def limit(y):
        h, hu, hv = y.unbind(1)
        return dx / (torch.maximum(hu.abs(), hv.abs()) / h + h.sqrt()).max()  # NaN if h < 0 anywhere

    def show(y):
        mean = (y[0] + turn(y[-1])) / 2
        return mean.movedim(0, -1) if full else mean[0]
    y = torch.stack([h0, hu0, hv0])
    y = y[None] if torch.equal(y, turn(y)) else torch.stack([y, turn(y)])           # by symmetry one solution is enough
    return march(y, frames, dt, step, limit, show, steps=steps, safety=0.9)


def dam_break(random, N):
    """Cell averages (N, N) of water at rest, of height 2 within R ~ U(0.3, 0.7) of the centre, else 1.

    The benchmark's values at the cell centres, 1 or 2, make only 81 different starts at 128 x 128.
    """
    R = random.uniform(0.3, 0.7)
    edges = np.linspace(-2.5, 2.5, N + 1)
    x = -2.5 + 5 * (np.arange(32 * N) + 0.5) / (32 * N)
    top = np.sqrt(np.maximum(R ** 2 - x ** 2, 0))[:, None]
    within = np.diff(edges.clip(-top, top)).reshape(N, 32, N).mean(1) / (5 / N)     # exact in y, 32 columns a cell in x
    rest = np.zeros((N, N))
    return dict(h0=1 + (within + within.T) / 2, hu0=rest, hv0=rest)


FAMILIES = {'swe_pdb': Family(
    'shallow water, g = 1, flat bottom, [-2.5, 2.5]^2, outflow', dam_break,
    lambda stride, **options: shallow_water(**options)[..., None],
    nano=dict(frames=11, dt=0.1), version=3)}    # every tenth frame: consecutive ones hardly differ
