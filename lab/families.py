"""The first and the last frame of a test trajectory of each family of equations, in one picture.

    python -m sources.generate builtin --preset mini            once
    python -m lab.families                                      docs/figures/families.png, of data/mini
"""
import h5py
import torch

from configs import DATASETS, PRETRAINING
from lab import figures
from runtime import terminal

COLUMNS = 6


def plot_families(frames):
    """The pairs of frames (2, H, W) of {name: frames}, side by side below the name."""
    rows = -(-len(frames) // COLUMNS)
    figure, axes = figures.pyplot().subplots(rows, COLUMNS, figsize=(2.1 * COLUMNS, 1.45 * rows))
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, (name, pair) in zip(axes.flat, frames.items()):
        limits, colormap = figures.scale_of_colours(pair)
        gap = torch.full((pair.shape[1] // 16, pair.shape[2]), torch.nan)
        figures.draw_field(ax, torch.cat([pair[0], gap, pair[1]]), limits, colormap, colours=64)
        ax.set_title(name, fontsize=7)
    return figure


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('--data', default='data/mini', metavar='DIR', help='folder of the datasets [%(default)s]')
    folder = parser.parse_args().data
    frames = {}
    for name in PRETRAINING:
        channels = DATASETS[name].channels
        c = channels.index('density') if 'density' in channels else 0
        with h5py.File(f'{folder}/{name}/test.h5') as file:
            u = file['data']
            frames[name] = torch.from_numpy(u[0, [0, u.shape[1] - 1], ..., c])
    figures.save_figure('docs/figures', 'families', plot_families(frames))


if __name__ == '__main__':
    terminal.cli(main)
