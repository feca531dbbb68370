"""The compressible Navier-Stokes equations in 1-3 dimensions; PDEBench's sets "Rand" and "Turb"."""
import math
import re

import numpy as np
import torch

from configs import DATASETS
from sources.pdes.march import Family, half_slope, march, rkl2

GAMMA = 5 / 3                               # ratio of specific heats in PDEBench's datasets


def compressible(density, velocity, pressure, frames=21, dt=0.05, eta=0.0, zeta=0.0, stride=1, steps=None):
    """Compressible Navier-Stokes of an ideal gas on the unit torus in D dimensions (PDEBench).

        rho_t + div(rho v) = 0,    (rho v)_t + div(rho v v) + grad p = div S,    E_t + div((E + p) v) = div(S v),
        E = p / (gamma - 1) + rho |v|^2 / 2,    S_jd = rho (a + b delta_jd) d_d v_j without summation

    with a = eta, b = zeta + eta/3. PDEBench runs this stress, but states the Newtonian one.
    Finite volumes of order 2 with Strang splitting. Along each direction MUSCL-Hancock with the MC
    limiter in (rho, v, p) and HLLC fluxes (Toro 2009, ch. 10, 14), then one RKL2 step of friction.
    (The benchmark: all directions at once, clipped pressure.)

    density, velocity, pressure: cell averages (B, *N), (B, D, *N), (B, *N).
    stride: the side of the blocks that are averaged.
    Returns (v, rho, p), (B, T, *N/stride, D+2), at t = 0, dt, ..., (T-1) dt.
    """

    def show(y):
        for axis in range(2, y.ndim) if stride > 1 else ():
            y = y.unflatten(axis, (-1, stride)).mean(axis + 1)
        rho, *v, p = primitive(y)
        return torch.stack([*v, rho, p], -1)
    y = torch.cat([density[None], (velocity * density[:, None]).movedim(1, 0),
                   (pressure / (GAMMA - 1) + density / 2 * (velocity ** 2).sum(1))[None]])
    return march(y, frames, dt, lambda y, tau: step(y, tau, eta, zeta + eta / 3), limit, show, steps=steps, safety=0.8)


def primitive(y):
    """From the state y = (rho, rho v, E) to q = (rho, v, p), both (D+2, B, *N)."""
    v = y[1:-1] / y[0]
    return torch.cat([y[:1], v, (GAMMA - 1) * (y[-1:] - y[0] / 2 * (v * v).sum(0, keepdim=True))])


def step(y, tau, a, b, halvings=6):
    """Strang: half a step along each axis and back; again as two if not positive."""
    new = y
    for axis in range(2, y.ndim):
        new = sweep(new, axis, tau / 2)
    if (a or b) and (new[0] > 0).all():
        new = friction(new, tau, a, b)
    for axis in reversed(range(2, y.ndim)):
        new = sweep(new, axis, tau / 2)
    if halvings == 0 or (primitive(new)[::len(y) - 1] > 0).all():       # rho and p
        return new
    return step(step(y, tau / 2, a, b, halvings - 1), tau / 2, a, b, halvings - 1)


def limit(y):
    """The largest stable step of the batch; NaN if a pressure is negative."""
    rho, *v, p = primitive(y)
    return 2 / (y.shape[-1] * ((GAMMA * p / rho).sqrt() + torch.stack(v).abs().amax(0)).max())


def sweep(y, axis, tau):
    """The state y after a step tau along `axis`, by HLLC fluxes, without friction."""
    ratio = tau * y.shape[-1]                                       # tau / dx
    u = axis - 1                                              # index of the velocity along the axis
    L, R = face_states(primitive(y), axis, ratio)
    cL = (L[-1] / L[0]).mul_(GAMMA).sqrt_()                         # the speeds of sound
    cR = (R[-1] / R[0]).mul_(GAMMA).sqrt_()
    sL = torch.minimum(L[u] - cL, R[u] - cR).clamp_(max=0)          # the speeds of the slowest and the fastest wave;
    sR = torch.maximum(L[u] + cL, R[u] + cR).clamp_(min=0)          # if one of them is 0 the flux is that of one side
    mL = L[0] * (sL - L[u])                                   # mass that enters through these waves
    mR = R[0] * (sR - R[u])
    star = (R[-1] - L[-1] + mL * L[u] - mR * R[u]) / (mL - mR)      # speed of the contact wave
    upwind = star > 0
    q = torch.where(upwind, L, R)
    s = torch.where(upwind, sL, sR)
    m = torch.where(upwind, mL, mR)
    v = q[1:-1]
    p = q[-1]
    p_star = torch.addcmul(p, m, star - q[u])                       # pressure at the contact wave
    share = star / (s - star)                                  # the density there is m / (s - star)
    mass = m * share
    energy = (p / q[0]).div_(GAMMA - 1).add_((v * v).sum(0), alpha=0.5)     # of a unit of mass
    flux = torch.cat([mass[None], mass * v, torch.addcmul(mass * energy, share, p_star * s - p * q[u])[None]])
    torch.addcmul(p_star, mass, star, out=flux[u])
    return torch.sub(y, flux.diff(dim=axis), alpha=ratio)


def face_states(q, axis, ratio):
    """MUSCL-Hancock: q in cells -> q on both sides of N+1 faces, half a step later."""
    N = q.shape[-1]
    u = axis - 1                                              # index of the velocity along the axis
    rho_and_p = slice(None, None, len(q) - 1)
    q = torch.cat([q.narrow(axis, -2, 2), q, q.narrow(axis, 0, 2)], axis)
    slope = half_slope(q.diff(dim=axis), axis)
    q = q.narrow(axis, 1, N + 2)
    # with |dv|^2 <= p / rho / gamma short steps keep a cell positive (Berthon 2005)
    dv = slope[1:-1]
    square = (dv * dv).sum(0).mul_(GAMMA).clamp_(min=torch.finfo(q.dtype).tiny)
    dv *= (q[-1] / q[0] / square).sqrt_().clamp_(max=1)
    # in half a step v changes by a term, rho and p by a factor, which is positive up to the limit
    change = (q[u] * dv).mul_(-ratio)
    change[u - 1].addcdiv_(slope[-1], q[0], value=-ratio)
    growth = (slope[rho_and_p] / q[rho_and_p]).mul_(q[u]).mul_(-ratio).add_(1)
    growth[0].sub_(slope[u], alpha=ratio)
    growth[1].sub_(slope[u], alpha=ratio * GAMMA)
    L = q + slope
    R = q - slope
    for side in (L, R):
        side[1:-1] += change
        side[rho_and_p] *= growth
    return L.narrow(axis, 0, N + 1), R.narrow(axis, 1, N + 1)


def friction(y, tau, a, b):
    """y after an RKL2 step of friction: rho v_t = div S, E_t = div(S v)."""
    D = y.ndim - 2
    N = y.shape[-1]
    rho = y[:1]
    at_faces = {axis: (rho + rho.roll(-1, axis)) / 2 for axis in range(2, y.ndim)}
    stiffness = torch.stack([((r + r.roll(1, axis)) / rho).max() / 2 for axis, r in at_faces.items()]).max()
    eye = N * N * torch.eye(D).to(y).view(D, D, *[1] * (D + 1))
    factors = {axis: (a * N * N + b * eye[axis - 2]) * r for axis, r in at_faces.items()}       # S / dx = factor dv

    def rate(w):                                                    # of w = (v, E)
        v = w[:-1]
        total = torch.zeros_like(w)
        for axis, factor in factors.items():
            ahead = v.roll(-1, axis)
            S = (ahead - v) * factor                                # S / dx at the face ahead of a cell
            work = ((ahead + v) * S).sum(0, keepdim=True) / 2       # S v / dx
            flux = torch.cat([S, work])
            total += flux
            total -= flux.roll(1, axis)
        total[:-1] /= rho
        return total
    fastest = 4.5 * N * N * (D * a + b) * float(stiffness)          # the shortest wave has 4; the rest is a margin
    stages = max(3, math.ceil((math.sqrt(9 + 8 * tau * fastest) - 1) / 2) | 1)          # odd numbers damp more
    w = rkl2(rate, torch.cat([y[1:-1] / rho, y[-1:]]), tau, stages)
    return torch.cat([rho, rho * w[:-1], w[-1:]])


def random_modes(random, count, dims):
    """Modes of random phase (count, 9, ..., 9): |k|^-1/2 in 2-D, 1/|k| in 3-D."""
    k = np.stack(np.meshgrid(*[np.arange(-4, 5)] * dims, indexing='ij'))
    scale = np.where(k.all(0), (k ** 2).sum(0).clip(1) ** ((1 - dims) / 4), 0)
    return scale * np.exp(2j * math.pi * random.random((count, *scale.shape)))


def superpose(modes, N):
    """Im sum_k modes exp(2 pi i k.x), k in [-4, 4]^D, at cell centres: (..., *N)."""
    basis = np.exp(2j * math.pi * np.outer(np.arange(-4, 5), (np.arange(N) + 0.5) / N))
    for axis in range(-modes.ndim + 1, 0):
        modes = np.moveaxis(np.tensordot(modes, basis, (axis, 0)), -1, axis)
    return modes.imag


def random_gas(random, N, mach, dims):
    """PDEBench's "Rand": random waves in a uniform gas, in half of the draws inside a box only.

    Density d0 and temperature T0 ~ U(0.1, 10), p0 = d0 T0. v: modes of mean speed M sqrt(gamma T0).
    rho and p: d0 and p0 times 1 + modes of mean size U(0.01, 0.2), drawn again below 5 %. Box:
    lower corner U(0.1, 0.45)^D, sides 0.45 (the benchmark reuses its random keys), and only if the
    first edge is below 0.275.
    """
    d0, T0 = random.uniform(0.1, 10, 2)
    contrast = random.uniform(0.01, 0.2, (2, *[1] * dims))
    corner = random.uniform(0.1, 0.45, dims)
    lowest = 0
    while lowest < 0.05:
        modes = random_modes(random, dims + 2, dims)
        sample = superpose(modes, 64)           # not N points, so that a seed gives the same field at every N
        scale = contrast / abs(sample[dims:]).mean(tuple(range(1, dims + 1)), keepdims=True)
        lowest = 1 + (scale * sample[dims:]).min()
    speed = np.sqrt((sample[:dims] ** 2).sum(0)).mean()
    fields = superpose(modes, N)
    fields[:dims] *= mach * math.sqrt(GAMMA * T0) / speed
    fields[dims:] *= scale
    if corner[0] < 0.275:
        for x, low in zip(np.ix_(*[(np.arange(N) + 0.5) / N] * dims), corner):
            fields *= (np.tanh((x - low) / 0.01) - np.tanh((x - low - 0.45) / 0.01)) / 2
    return dict(density=d0 * (1 + fields[dims]), velocity=fields[:dims], pressure=d0 * T0 * (1 + fields[dims + 1]))


def turbulent_gas(random, N, mach, dims):
    """PDEBench's "Turb": v of mean speed 1, here exactly solenoidal; density 1, p = 1/(gamma M^2)."""
    modes = random_modes(random, dims, dims)
    k = np.stack(np.meshgrid(*[np.arange(-4, 5)] * dims, indexing='ij'))
    modes -= k * (k * modes).sum(0) / (k ** 2).sum(0).clip(1)
    speed = np.sqrt((superpose(modes, 64) ** 2).sum(0)).mean()
    uniform = np.ones([N] * dims)
    return dict(density=uniform, velocity=superpose(modes, N) / speed, pressure=uniform / (GAMMA * mach ** 2))


def numbers_of(name):
    """The numbers in ns<D>d_pdb_M<M>[_eta<eta>_zeta<zeta>]; in 3-D 1e-8."""
    numbers = {key: float(value) for key, value in re.findall(r'_(M|eta|zeta)(\d[\de-]*)', name)}
    return {key: numbers.get(key, 1e-8) for key in ('M', 'eta', 'zeta')}


def gas_family(name):
    """The row of a dataset. A viscosity of 1e-8 is solved as 0 (3e-5 at frame 20)."""
    mach, eta, zeta = numbers_of(name).values()
    viscosity = dict(eta=eta, zeta=zeta) if eta > 1e-8 else {}
    D = DATASETS[name].dims
    draw = turbulent_gas if 'turb' in name else random_gas
    order = [0, 1, 2, 3] if D == 2 else [0, 1, 2, 4, 3]               # of the channels in our files
    nano = dict(train=24, test=6) if D == 2 else dict(train=4, test=2, resolution=32)
    return Family(f'compressible Navier-Stokes, ideal gas, gamma = 5/3, M = {mach:g}, eta = {eta:g}, zeta = {zeta:g} '
                  f'(kinematic, no cross terms), unit torus',
                  lambda random, N: draw(random, N, mach, D),
                  lambda **options: compressible(**viscosity, **options)[..., order], dict(frames=11, **nano))


FAMILIES = {name: gas_family(name) for name in DATASETS if re.match(r'ns[23]d_pdb_', name)}
