"""Two datasets of docs/findings.md beside README's waves: a Brusselator, and predators and prey.

    python -m lab.single            into data/own/brusselator and data/own/prey

Each has 80 trajectories of 20 frames of two species that react and diffuse.
"""
import numpy as np

import data
from runtime import terminal


def start(H, W, mean, size, least):
    """Random smooth fields (2, 80, H, W) with the means of two species, a deviation, a minimum."""
    rng = np.random.default_rng(0)
    rows = np.fft.fftfreq(H, 1 / H)[:, None]
    waves = np.exp(-(rows ** 2 + np.fft.fftfreq(W, 1 / W) ** 2) / 18)
    noise = np.fft.ifft2(np.fft.fft2(rng.normal(size=(2, 80, H, W))) * waves).real
    return np.clip(np.array(mean)[:, None, None, None] + size * noise / noise.std(), least, None)


def react(y, rate, dt, every, edges):
    """Euler's method on a unit grid, of which every so many steps are frames: (80, 20, H, W, 2)."""
    frames = []
    for step in range(20 * every):
        if step % every == 0:
            frames.append(np.stack([*y], -1))
        p = np.pad(y, ((0, 0), (0, 0), (1, 1), (1, 1)), edges)
        neighbours = p[..., 2:, 1:-1] + p[..., :-2, 1:-1] + p[..., 1:-1, 2:] + p[..., 1:-1, :-2]
        y = y + dt * rate(*y, *(neighbours - 4 * y))
    return np.stack(frames, 1)


def brusselator(u, v, lu, lv):
    """The rates of two chemicals u and v, whose Laplacians are lu and lv."""
    return np.stack([lu + 1 - 3.2 * u + u * u * v, 0.5 * lv + 2.2 * u - u * u * v])


def prey(u, v, lu, lv):
    """The same of prey u and predators v (Rosenzweig and MacArthur)."""
    eaten = u * v / (u + 0.4)
    return np.stack([lu + u * (1 - u) - eaten, lv + 2 * eaten - 0.6 * v])


def main():
    terminal.Parser(description=__doc__).parse_args()
    u = react(start(48, 80, (1, 2.2), 0.5, 0.05), brusselator, 0.01, 50, 'wrap')
    data.write('data/own/brusselator', train=u[:68], test=u[68:], channels=('u', 'v'))
    u = react(start(48, 64, (6 / 35, 4 / 7 * 29 / 35), 0.1, 0.01), prey, 0.05, 60, 'edge')
    data.write('data/own/prey', train=u[:68], test=u[68:], channels=('prey', 'predator'))


if __name__ == '__main__':
    terminal.cli(main)
