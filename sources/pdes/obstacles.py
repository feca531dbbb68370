"""Incompressible flow in a box with solid cells, and CFDBench's cases: cavity, tube and cylinder."""
import math

import numpy as np
import torch
import torch.nn.functional as F

from sources.pdes.march import Family, half_slope, march


def flow_past_obstacles(mask, viscosity, dx, dy, inlet, lid, frames=20, dt=1.0, staggered=False, steps=None):
    """2-D incompressible Navier-Stokes in a box with solid cells, started from rest (CFDBench).

        u_t + div(u u) = -grad p + viscosity Lap u,    div u = 0,    u = 0 at walls and solids, (lid, 0) at the top

    With inlet = 0 the box is closed. Otherwise the left side is an inlet with velocity (inlet, 0)
    and the right side an outlet with u_t + inlet u_x = 0 and v_x = 0, through which as much leaves
    at every time as enters. Staggered (MAC) finite volumes, second order: MUSCL with the MC
    limiter; SSP Runge-Kutta of order 2 with 5 stages, each projected exactly, by cosine transforms
    and a small matrix of the forces that stop the flow through the solids' faces. (The benchmark:
    Fluent.)

    mask: (B, N, N), axis order y, x, 1 in the fluid and at inlet and outlet.
    viscosity (kinematic), dx, dy, inlet, lid: (B,).
    Returns u, v at the cell centres, (B, T, N, N, 2), at t = dt, ..., T dt; with staggered=True
    u[y, x] and v[x, y] on the faces, (B, T, 2, N, N+1).
    """

    def show(w):
        u, v = (w[..., 1:] + w[..., :-1]) / 2
        return w.movedim(0, 1) if staggered else torch.stack([u, v.mT], -1)
    box = Box(mask, viscosity, dx, dy, inlet, lid)
    w = torch.zeros_like(box.free)
    w[0, ..., [0, -1]] = box.inlet
    return march(box.project(w), frames, dt, box.step, box.limit, show, first=False, steps=steps, safety=0.8, check=4)


class Box:
    """Boxes with solid cells. The flow w (2, B, N, N+1): u[y, x], v[x, y] on faces."""

    def __init__(self, mask, viscosity, dx, dy, inlet, lid):
        N = mask.shape[-1]
        self.viscosity, dx, dy, self.inlet, self.lid = (x[:, None, None] for x in (viscosity, dx, dy, inlet, lid))
        self.along = torch.stack([dx, dy])  # size of a cell along each component of w: (2, B, 1, 1)
        self.across = self.along.flip(0)                    # and across it
        # a mirror cell above the top (for u) or right of the box (for v) is `beyond` times the inner cell plus `drive`
        self.beyond = torch.stack([-torch.ones_like(dx), (self.inlet != 0).to(dx) * 2 - 1])     # an outlet continues v
        self.drive = torch.stack([2 * self.lid, 0 * self.lid])
        solid = F.pad(1 - torch.stack([mask, mask.mT]), (1, 1))
        low = solid[..., :-1]                          # the two sides of every face: (2, B, N, N+1)
        high = solid[..., 1:]
        self.free = 1 - torch.maximum(low, high)
        inside = F.pad((low * high)[..., 1:-1], (0, 0, 1, 1))
        # a difference across a solid's wall counts twice, as the velocity beyond it is -u, not the 0 that is stored
        self.weight = 1 + torch.maximum(inside[..., 1:, :], inside[..., :-1, :])
        k = torch.arange(N, dtype=torch.float64, device=mask.device)
        modes = torch.cos(math.pi / N * k[:, None] * (k + 0.5)) * ((2 - (k == 0).double()) / N).sqrt()[:, None]
        decay = 2 - 2 * torch.cos(math.pi / N * k)
        decay = decay[:, None] / dy.double() ** 2 + decay / dx.double() ** 2    # of -Lap: (B, N, N)
        inverse = (1 / decay.clamp(min=1e-300)) * (k[:, None] + k > 0)
        C = modes.to(mask)
        minus_inverse = -inverse.to(mask)
        self.potential = lambda d: C.T @ (C @ d @ C.T * minus_inverse) @ C          # q with Lap q = d, without solids
        surface = (low != high)[..., 1:-1].movedim(1, 0)                            # (B, 2, N, N-1)
        most = int(surface.sum((1, 2, 3)).max())                     # the most faces that a box has
        boxes = [surface_forces(*box, modes, most) for box in zip(surface, inverse, dx, dy)]
        self.cells, self.response = (torch.stack(parts) for parts in zip(*boxes))   # (B, 2 most), (B, most, most)

    def step(self, w, tau):
        """The state w a time tau later: SSP Runge-Kutta of order 2, 5 projected stages."""
        stage = w
        for _ in range(5):
            stage = self.project(stage + tau / 4 * self.rate(stage))
        return (w + 4 * stage) / 5

    def limit(self, w):
        """The largest stable time step, one for the whole batch."""
        rate = w.abs() / self.along
        of_u, of_v = torch.maximum(rate[..., 1:], rate[..., :-1])
        rate = torch.maximum((of_u + of_v.mT).amax((1, 2), keepdim=True), self.lid / self.along[0])
        return 4 / (rate + 2 * self.viscosity * (1 / self.along ** 2).sum(0)).max()

    def rate(self, w):
        """The rate of change of w by advection and friction, without pressure."""
        sides = F.pad(w[..., 1:-1], (0, 0, 1, 1))                         # with mirror cells across
        inner = sides[..., 1:-1, :]
        sides[..., 0, :] = -inner[..., 0, :]
        sides[..., -1:, :] = self.beyond * inner[..., -1:, :] + self.drive
        crossing = ((w[..., 1:, :] + w[..., :-1, :]) / 2).flip(0).mT        # at the corners: (2, B, N+1, N-1)
        d = w.diff(dim=-1)
        d_across = sides.diff(dim=-2) * self.weight
        flux = upwind(w, F.pad(d, (1, 1)), (w[..., 1:] + w[..., :-1]) / 2) - self.viscosity / self.along * d
        flux_across = -self.viscosity / self.across * d_across       # at the low side this is all: v = 0 at the inlet
        flux_across[..., 1:-1, :] += upwind(inner.mT, d_across.mT, crossing[..., 1:-1, :].mT).mT
        flux_across[..., -1, :] += crossing[..., -1, :] * inner[..., -1, :]
        rate = F.pad(flux.diff(dim=-1) / -self.along - flux_across.diff(dim=-2) / self.across, (1, 1))
        rate[0, ..., -1:] = self.inlet / self.along[0] * (w[0, ..., -2:-1] - w[0, ..., -1:])
        return rate

    def project(self, w):
        """The part of w that has no divergence and does not enter solids."""
        w = w * self.free
        of_u, of_v = w.diff(dim=-1) / self.along
        d = of_u + of_v.mT                                               # the divergence: (B, N, N)
        q = self.potential(d)
        if self.cells.numel():
            low, high = q.flatten(1).gather(1, self.cells).chunk(2, 1)
            f = (self.response @ (high - low)[..., None])[..., 0]
            q = self.potential(d.flatten(1).scatter_add(1, self.cells, torch.cat([f, -f], 1)).view_as(d))
        w[..., 1:-1] -= torch.stack([q, q.mT]).diff(dim=-1) / self.along
        return w.mul_(self.free)


def upwind(q, d, speed):
    """Fluxes of q (..., n) between values, by its differences d (..., n+1)."""
    slope = half_slope(d)
    return (speed.clamp(min=0) * (q + slope)[..., :-1]).addcmul_(speed.clamp(max=0), (q - slope)[..., 1:])


def surface_forces(surface, inverse, dx, dy, modes, most):
    """How forces stop the flow through the n faces of the solids in one box, padded to `most` faces.

    Forces f on these faces E make P (w + E f) zero there, where P is the projection of the box
    without solids: (E^T P E) f = -E^T P w. The matrix is singular, as pressure inside a solid has
    no effect.

    surface: (2, N, N-1).
    Returns the cells on the low, then on the high sides, (2 most,), and the matrix from rises of q to f / dx.
    """
    of_v, line, place = surface.nonzero().split(1, 1)                       # (n, 1)
    of_v = of_v > 0
    ends = place + torch.arange(2, device=place.device)
    cells = torch.where(of_v, ends * len(modes) + line, line * len(modes) + ends).T
    mode = modes.T[line[:, 0]]                                              # (n, N)
    slope = modes.diff(dim=1).T[place[:, 0]]
    y = torch.where(of_v, slope / dy, mode)
    x = torch.where(of_v, mode, slope / dx)
    q = (y[:, :, None] * x[:, None, :] * inverse.sqrt()).flatten(1)         # P = 1 - q q^T
    size = torch.where(of_v, dy, dx)
    response = torch.linalg.pinv(torch.eye(len(q)).to(q) - q @ q.T, hermitian=True, rtol=1e-6) / (size * size.T)
    return F.pad(cells, (0, most - len(q))).flatten(), F.pad(response, (0, most - len(q)) * 2).to(dx)


# numbers of cases that vary speed, fluid, lengths; base, least and largest value in SI units, of lengths by our choice
PROBLEMS = {
    'cavity': ((50, 84, 25), dict(speed=(10, 1, 50), density=(1, 0.1, 10), viscosity=(1e-5, 1e-5, 1e-2),
                                  width=(0.01,), height=(0.01,))),
    'tube': ((50, 100, 25), dict(speed=(1, 0.1, 5), density=(100, 10, 1000), viscosity=(0.1, 0.01, 1),
                                 width=(1,), height=(0.1,))),
    'cylinder': ((50, 115, 20), dict(speed=(1, 0.1, 5), density=(10, 10, 10), viscosity=(1e-3, 2e-4, 1e-2),
                                     left=(0.06,), right=(0.16,), below=(0.06,), above=(0.06,), radius=(0.01,))),
}


def random_case(random, N):
    """One case of CFDBench -> mask (N, N), axis order y, x, and its numbers in SI units.

    A case varies its speed, its fluid or its lengths; viscosity is log-uniform, all else uniform.
    The three problems are equally frequent; of the benchmark's frames 73 % are of the cylinder.

    problem: the place in PROBLEMS.
    interval: the time between frames, our choice, at most 0.005 d^2 / nu, d the shorter side.
    """
    index = random.integers(len(PROBLEMS))
    problem, (cases, ranges) = [*PROBLEMS.items()][index]
    subset = random.choice(3, p=np.array(cases) / sum(cases))
    case = {}
    for name, (base, *ends) in ranges.items():
        low, high = ends or (base / 1.5, base * 1.5)
        varies = {'speed': 0, 'density': 1, 'viscosity': 1}.get(name, 2) == subset
        if name == 'viscosity':
            value = math.exp(random.uniform(math.log(low), math.log(high)))
        else:
            value = random.uniform(low, high)
        case[name] = value if varies else base              # a number is drawn in either case
    mask = np.ones((N, N))
    if problem == 'cylinder':
        case.update(width=case['left'] + case['right'], height=case['below'] + case['above'])
        x = (np.arange(N) + 0.5) * case['width'] / N
        y = (np.arange(N)[:, None] + 0.5) * case['height'] / N
        mask = 1.0 * (np.hypot(x - case['left'], y - case['below']) > case['radius'])
    width = case['width']
    height = case['height']
    viscosity = case['viscosity'] / case['density']
    distance = width / {'cavity': 2, 'tube': 20, 'cylinder': 10}[problem]
    interval = min(distance / case['speed'], 0.005 * min(width, height) ** 2 / viscosity)
    return dict(mask=mask, problem=index, interval=interval,
                **{key: case[key] for key in ('speed', 'density', 'viscosity', 'width', 'height')})


def solve_cases(stride, mask, problem, speed, density, viscosity, width, height, interval, **options):
    """A batch of `random_case` -> u, v in m/s, mask: (B, T, N/stride, N/stride, 3)."""
    N = mask.shape[-1]
    distance = speed * interval
    closed = problem == [*PROBLEMS].index('cavity')
    fields = flow_past_obstacles(mask, viscosity / density * interval, width / N, height / N, inlet=distance * ~closed,
                                 lid=distance * closed, **options)
    average = lambda field, y: field.unflatten(y + 1, (-1, stride)).unflatten(y, (-1, stride)).mean((y + 1, y + 3))
    mask = average(mask, 1).round()[:, None, :, :, None]
    fields = average(fields / interval[:, None, None, None, None], 2) * mask
    return torch.cat([fields, mask.expand(*fields.shape[:-1], 1)], -1)


FAMILIES = {'cfdbench': Family(
    'u_t + u.grad u = -grad p / density + viscosity / density Lap u, div u = 0, from rest: cavity under a moving lid, '
    'tube, tube with a cylinder; time in intervals, axes y x', random_case, solve_cases,
    dict(train=20, test=4, grid=64), 128)}
