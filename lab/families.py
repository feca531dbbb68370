"""The first and the last frame of a test trajectory of each family of equations, in one picture.

    python -m lab.families          docs/figures/families.png, of the small form of each dataset
"""
import torch

from configs import DATASETS, PRETRAINING
from lab import figures
from runtime import terminal
from sources import generate

COLUMNS = 5
TRAJECTORY = 2                              # in which cfdbench has a cylinder that sheds vortices


def plot_families(frames):
    """The pairs of frames (2, H, W) of {name: frames}, side by side below the name."""
    rows = -(-len(frames) // COLUMNS)
    figure, axes = figures.pyplot().subplots(rows, COLUMNS, figsize=(2.4 * COLUMNS, 1.55 * rows))
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, (name, pair) in zip(axes.flat, frames.items()):
        limits, colormap = figures.scale_of_colours(pair)
        gap = torch.full((pair.shape[1] // 16, pair.shape[2]), torch.nan)
        figures.draw_field(ax, torch.cat([pair[0], gap, pair[1]]), limits, colormap, colours=64)
        ax.set_title(name, fontsize=9)
    return figure


def main():
    terminal.Parser(description=__doc__).parse_args()
    frames = {}
    for name in (*PRETRAINING, 'wave_gauss'):
        channels = DATASETS[name].channels
        c = channels.index('density') if 'density' in channels else 0
        plan = generate.plan(name, 'mini')
        u = torch.from_numpy(generate.simulate(plan, 'test', [TRAJECTORY])[0, ..., c])      # (T, H, W)
        x_first = not plan.attributes()['pde'].endswith('axes y x')
        frames[name] = u[[0, -1]] if x_first else u[[0, -1]].mT
    figures.save_figure('docs/figures', 'families', plot_families(frames))


if __name__ == '__main__':
    terminal.cli(main)
