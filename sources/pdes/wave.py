"""The wave equation with a variable speed, and the two wave datasets of Poseidon."""
import math
from functools import partial

import numpy as np
import torch

from sources.pdes.march import Family, march

# The benchmark gives c in m/s, but no units for the square and the time, and a width of the pulses that is not their
# standard deviation. These factors make the mean and the deviation of u come within 12 % of those in its loader.
WAVE_WIDTH = 0.5                            # standard deviation of a pulse over its stated width
WAVE_UNIT = 4 / 128 * 15 / 2040             # 1 m/s in sides of the square per unit of time: waves cross 4 of 128 pixels
LAYER_UNIT = 4 / 128 * 20 / 3163            # per frame at 2040 m/s (Wave-Gauss, dt = 1/15) or 3163 (Wave-Layer, 1/20)


def wave(u0, v0, c, frames=16, dt=1 / 15, boundary='absorbing', steps=None):
    """u_tt = c(x, y)^2 Lap u on the unit square (Poseidon, Herde et al. 2024).

    Fourier derivatives as matrix products; in time leapfrog, of sixth order by powers of A = c^2 Lap
    (Dablain 1986). At an absorbing boundary a perfectly matched layer, a quarter of its side wide,
    extends the square (Grote & Sim 2010), with px, py and the trapezoidal rule, which suits leapfrog:

        u_t = v,    v_t = c^2 div(grad u + p) - (sx + sy) v - sx sy u,    px_t = (sy - sx) u_x - sx px, likewise py

    u0, v0 = u_t, c: (B, N, N), at the cell centres; c in sides of the square per unit of time.
    boundary: 'absorbing', or 'periodic' for a torus.
    Returns (u, u_t), (B, T, N, N, 2), at t = 0, dt, ...
    """
    N = u0.shape[-1]
    pad = N // 4 if boundary == 'absorbing' else 0
    M = N + pad         # the extended square is a torus: between any two sides of the square lies the whole layer
    k = torch.fft.fftfreq(M, 1 / N, dtype=torch.float64) * 2 * math.pi * (torch.arange(M) * 2 != M)
    # D u and u D^T are the derivatives by x and y of the trigonometric interpolant of u
    D = torch.fft.ifft(1j * k[:, None] * torch.fft.fft(torch.eye(M, dtype=torch.float64), dim=0), dim=0).real.to(u0)
    depth = ((torch.arange(M, dtype=torch.float64) + 0.5 - N) / max(pad, 1)).clamp(min=0).to(u0)
    profile = 2 * torch.sin(math.pi * depth) ** 2 * 12 * N / max(pad, 1)            # damps by exp(-12) across the layer
    blend = torch.sin(math.pi / 2 * (3 * depth[N:] - 1).clamp(0, 1)) ** 2           # from c at one edge to the opposite
    c = torch.cat([c, torch.lerp(c[:, -1:], c[:, :1], blend[:, None])], dim=1)
    c = torch.cat([c, torch.lerp(c[:, :, -1:], c[:, :, :1], blend)], dim=2)         # (B, M, M)
    sx = (profile[:, None] * c.mean((1, 2), keepdim=True)).expand_as(c)
    s = torch.stack([sx, sx.mT])                                                    # (2, B, M, M)
    limit = 2.75 / (math.sqrt(2) * math.pi * N * c.max())                           # of a stable time step
    steps = steps or math.ceil(min(1e5, dt / (0.5 * limit)))                        # NaN is for `march` to find
    tau = dt / steps
    part = 1 / (1 + tau / 2 * s)
    keep = 2 * part - 1                         # (1 - tau/2 s) / (1 + tau/2 s): what damping leaves after a step
    into = tau / 2 * part * (s.flip(0) - s)     # half of p is kept: before and after a step add up to their mean
    both, kick, keep_v = s.prod(0), tau * part.prod(0), keep.prod(0)
    D2, c2 = D @ D, c * c
    A = lambda u: (D2 @ u).add_(u @ D2.T).mul_(c2)

    def leapfrog(state, _):
        u, v, p = state
        u = u.add(v, alpha=tau / 2)                                                 # in the middle of the step
        slope = torch.stack([D @ u, u @ D.T])
        q = (keep * p).addcmul_(into, slope)
        x, y = slope.add_(p).add_(q)
        a = (D @ x).add_(y @ D.T).mul_(c2).addcmul_(both, u, value=-1)
        a.add_(A(a.add(A(a), alpha=tau ** 2 / 30)), alpha=tau ** 2 / 12)            # + tau^2/12 A a + tau^4/360 A^2 a
        v = (keep_v * v).addcmul_(kick, a)
        return u.add_(v, alpha=tau / 2), v, q
    # the scheme's v is (1 - tau^2/12 A + tau^4/120 A^2) u_t
    from_v = lambda v: v + tau ** 2 / 12 * A(v - tau ** 2 / 60 * A(v))
    show = lambda state: torch.stack([state[0], from_v(state[1])], -1)[:, :N, :N]
    distance = depth[N:] * pad + 0.5                                   # in cells, from the last one
    fade = torch.cos(math.pi / 2 * (2 * depth[N:]).clamp(0, 1)) ** 2

    def extend(y):
        """A pulse that reaches the edge keeps its slope and fades; cut off, it rings."""
        def beyond(edge, second, third):
            return edge[..., None] + (3 * edge - 4 * second + third)[..., None] / 2 * distance
        after = beyond(*y[..., [-1, -2, -3]].unbind(-1))
        before = beyond(*y[..., :3].unbind(-1))
        return torch.cat([y, after * fade + (before * fade).flip(-1)], -1)
    u, v = extend(extend(torch.stack([u0, v0]).mT).mT)
    state = u, v - tau ** 2 / 12 * A(v - tau ** 2 / 10 * A(v)), torch.zeros_like(s)
    return march(state, frames, dt, leapfrog, lambda state: limit, show, steps=steps)


def bump(N, centre, sigma):
    """A Gaussian of height 1 around `centre` at the cell centres of the unit square, (N, N)."""
    along_x, along_y = (np.exp(-((np.arange(N) + 0.5) / N - middle) ** 2 / (2 * sigma ** 2)) for middle in centre)
    return along_x[:, None] * along_y


def gaussian_pulses(random, N):
    """2-6 Gaussians of height 1, centres U(1/6, 5/6)^2, widths U(.039, .156): (N, N)."""
    pulses = []
    count = random.integers(2, 7)
    while len(pulses) < count:
        centre = random.uniform(1 / 6, 5 / 6, 2)
        sigma = WAVE_WIDTH * random.uniform(0.039, 0.156)
        if all(math.dist(centre, other) > 2 * (sigma + width) for other, width in pulses):
            pulses.append((centre, sigma))
    return sum(bump(N, *pulse) for pulse in pulses)


def gaussian_wave(random, N):
    """Pulses at rest in a medium of four smooth lenses -> u, u_t, c in m/s, (N, N)."""
    u0 = gaussian_pulses(random, N)
    c = np.full((N, N), random.uniform(1500, 2500))
    for quadrant in np.array([(0.25, 0.25), (0.25, 0.75), (0.75, 0.25), (0.75, 0.75)]):
        height = random.uniform(1000, 2500)
        sigma = random.uniform(1 / 12, 1 / 6)
        c += height * bump(N, quadrant + random.uniform(-0.3125, 0.3125, 2), sigma)
    return dict(u0=u0, v0=np.zeros((N, N)), c=c)


def layered_wave(random, N):
    """Pulses at rest in a medium of 3-6 layers, each with c ~ U(2000, 5000) -> u, u_t, c in m/s, (N, N).

    Interface k of n layers: y = (k + U(-0.2, 0.2)) / n + sum over m = 1..10 of 0.1 U(-1, 1) / (n m)
    sin(2 pi m x + U(0, 2 pi)). In a cell that it crosses, 1/c^2, the mass in u_tt / c^2, is its mean.
    """
    u0 = gaussian_pulses(random, N)
    layers = random.integers(3, 7)
    mass = random.uniform(2000, 5000, layers) ** -2
    m = np.arange(1, 11)[:, None]
    x = (np.arange(16 * N) + 0.5) / (16 * N)                         # 16 columns a cell, exact in y
    field = np.full((N, N), mass[-1])
    for k in range(1, layers):
        sines = random.uniform(-0.1, 0.1, (10, 1)) / m * np.sin(2 * np.pi * (m * x + random.uniform(0, 1, (10, 1))))
        interface = (k + random.uniform(-0.2, 0.2) + sines.sum(0)) / layers
        below = np.diff(np.minimum(np.linspace(0, 1, N + 1), interface[:, None])) * N           # share of each cell
        field += (mass[k - 1] - mass[k]) * below.reshape(N, 16, N).mean(1)
    return dict(u0=u0, v0=np.zeros((N, N)), c=field ** -0.5)


def wave_and_speed(c, unit, stride, **options):
    """u, u_t and c in km/s, a static channel: (B, T, N, N, 3). c: in m/s. options: those of `wave`."""
    fields = wave(c=c * unit, **options)
    return torch.cat([fields, c[:, None, ..., None].expand_as(fields[..., :1]) / 1000], dim=-1)


FAMILIES = {
    'wave_gauss': Family(f'u_tt = ({WAVE_UNIT:.6g} c)^2 Lap u, c in m/s, unit square, absorbing boundary',
                         gaussian_wave, lambda stride, c, **options: wave(c=c * WAVE_UNIT, **options),
                         nano=dict(train=96), version=4),
    'wave_gauss_c': Family(f'u_tt = ({1000 * WAVE_UNIT:.6g} c)^2 Lap u, c in km/s, unit square, absorbing boundary',
                           gaussian_wave, partial(wave_and_speed, unit=WAVE_UNIT), nano=dict(train=96), version=2),
    'wave_layer': Family(f'u_tt = ({1000 * LAYER_UNIT:.6g} c)^2 Lap u, c in km/s, unit square, absorbing boundary',
                         layered_wave, partial(wave_and_speed, unit=LAYER_UNIT), nano={}, version=5),
}
