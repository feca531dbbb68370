"""Draw the pictures of docs/tour.md but the first from the variables of that page, whose lines are run first.

    python -m lab.tour --figures out/tour       by default into docs/figures
"""
import doctest
from pathlib import Path

import configs  # noqa: F401, before torch, whose threads it tells how to wait

import numpy as np
import torch

from lab import figures
from runtime import terminal
from sinkhorn import sinkhorn_reference


def plot_sinkhorn(plt, T_tilde, errors, **_):
    """T after some rounds with the sums of its columns, and the error of the columns in all sub-layers by rounds."""
    upper, lower = plt.figure(figsize=(8.6, 4.6), dpi=110).subfigures(2, 1)
    for ax, k in zip(upper.subplots(1, 5), (0, 1, 2, 5, 20)):
        T, form = sinkhorn_reference(T_tilde[0], k).numpy(), '.2f' if k else '.1f'
        ax.imshow(T, cmap='cividis', aspect='auto')
        for i, value in enumerate(T.flatten()):
            ax.text(i % 4, i // 4, f'{value:{form}}', ha='center', va='center', color='wk'[int(value > T.max() / 2)])
        ax.set(title=f'rounds: {k}', yticks=[], xticks=range(4), xticklabels=[f'{s:{form}}' for s in T.sum(0)])
    ax = lower.subplots()
    ax.semilogy([*errors], [*errors.values()], color='0.75')
    for l, colour in ((6, figures.COLOURS[0]), (8, figures.COLOURS[3])):
        ax.semilogy([*errors], [row[l - 1] for row in errors.values()], colour, label=f'sub-layer {l}')
    ax.set(xlabel='rounds', ylabel='error of the columns', ylim=(1e-7, 3), xlim=(1, 50))
    ax.legend()


def plot_streams(plt, streams, sublayers, spreads, **_):
    """Above how T and d F change the spread of the streams, below which streams are read (a) and written (d)."""
    _, axes = plt.subplots(3, 1, figsize=(8.6, 5.6), sharex=True, height_ratios=(3, 1, 1))
    place, (before, mixed, after) = np.arange(1, 17), spreads.numpy()
    axes[0].plot([place - 0.5, place], [before, mixed], figures.COLOURS[0])
    axes[0].plot([place, place + 0.5], [mixed, after], figures.COLOURS[3], linestyle='--')
    axes[0].legend(axes[0].lines[15:17], ['T', 'd F'])
    axes[0].set(ylabel='distance from the mean', ylim=0)
    mappings = [block.mappings(x.mean((2, 3)))[:2] for (block, _), x in zip(sublayers, streams)]
    for ax, name, values, most in zip(axes[1:], ('a: read', 'd: written'), zip(*mappings), (1, 2)):
        ax.imshow(np.concatenate(values).T, 'cividis', aspect='auto', clim=(0, most), extent=(0.5, 16.5, 4.5, 0.5))
        ax.set(ylabel=f'{name}\n(0 to {most})', yticks=range(1, 5), xticks=place)
    ax.set_xlabel('sub-layer')


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('--figures', default='docs/figures', metavar='DIR', help='folder [docs/figures]')
    folder, plt, variables = parser.parse_args().figures, figures.pyplot(), {'print': lambda *_: None}
    for example in doctest.DocTestParser().get_examples(Path('docs/tour.md').read_text()):
        exec(example.source, variables)
    for plot in (plot_sinkhorn, plot_streams):
        plot(plt, **variables)
        figures.save(folder, plot.__name__.replace('plot', 'tour'), plt.gcf())
    kernels = {name: torch.cat(tuple(T)) for name, T in variables['kernels_of'].items()}    # of two samples of one
    figures.save(folder, 'tour_kernels', figures.plot_mean_T({'': kernels}, 'T'))            # equation and another


if __name__ == '__main__':
    terminal.cli(main)
