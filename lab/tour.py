"""Draw the pictures of docs/tour.md from the variables of that page, whose lines are run first, without their output.

    python -m lab.tour --figures out/tour       by default into docs/figures
"""
import doctest
from pathlib import Path

import numpy as np

from lab import figures
from runtime import terminal
from sinkhorn import sinkhorn_reference

STREAMS = '#09236f', '#d05517', '#127f48', '#c669b7'        # the colours of the four streams


def plot_network(plt, u, z, x, v, a_l, d_l, T_l, frame, **_):
    """The whole network on the left and one AOT block on the right, with the shapes of the page's tensors."""
    ax = plt.figure(figsize=(8.6, 7.9)).add_subplot(xlim=(0, 8.6), ylim=(-0.25, 7.65))
    ax.axis('off')
    u, z, v, one, four, a_l, d_l, T_l, frame = (tuple(y.shape) for y in (u, z, v, x[:, 0], x, a_l, d_l, T_l, frame))

    def box(x, y, text, width=1.7, height=0.46, colour='#f5e6d8'):
        ax.add_patch(plt.Rectangle((x - width / 2, y - height / 2), width, height, facecolor=colour, edgecolor='k'))
        ax.text(x, y, text, ha='center', va='center', fontsize=11)

    def arrow(x, y, to_x, to_y, text='', colours='k', **style):
        for i, colour in enumerate(colours):
            gap = 0.1 * (i - (len(colours) - 1) / 2)
            right, up = (gap, 0) if x == to_x else (0, gap)
            ax.annotate('', (to_x + right, to_y + up), (x + right, y + up), arrowprops=dict(
                arrowstyle='-|>', color=colour, linewidth=1.3, shrinkA=0, shrinkB=0, **style))
        ax.text(x + gap + 0.1, (y + to_y) / 2, text, va='center', fontsize=11)

    for i, (text, shape, colours) in enumerate((
            ('five frames', u, 'k'), ('patch embedding, Eq. (4)', z, 'k'), ('sum over frames, Eq. (5)', one, 'k'),
            ('four equal streams', four, STREAMS), ('AOT block: mixer, Eq. (8)', '   8 times', STREAMS),
            ('AOT block: MLP', four, STREAMS), ('gated sum, Eq. (13)', one, 'k'), ('readout', frame, 'k'))):
        box(1.5, 7.38 - 0.98 * i, text, 2.5, colour='#dfe5f5')
        arrow(1.5, 7.15 - 0.98 * i, 1.5, 6.63 - 0.98 * i, shape, colours)
    for i, (text, shape) in enumerate(((f'$a_l$ {a_l}', one), ('norm', ''), ('F: mixer or MLP', ''), ('norm', one))):
        box(6.75, 4.7 - 0.88 * i, text, colour='#dfe5f5' if i else '#f5e6d8')
        arrow(6.75, 4.47 - 0.88 * i, 6.75, 4.05 - 0.88 * i, shape)
    for place in ((1.5, 2.97, '', 2.8, 1.66, 'none'), (6.15, 3.68, '', 4.85, 7.8, 'none'), (4.5, 1.18, '+', 0.8),
                  (6.15, 7.33, r'AOT block, Eq. (9):  $x_{l+1} = T_l\,x_l + d_l^\top F(a_l\,x_l)$', 4.85, 0.5, 'none'),
                  (7.05, 6, f'v {v}: means of x, RMSNorm\nα v φ + b, Eqs. (11), (12)', 2.9, 0.7),
                  (6.75, 1.18, f'$d_l$ {d_l}'), (4.5, 2.94, f'$T_l$ {T_l}\nSinkhorn', 1.3, 0.66)):
        box(*place)
    for path in ((4.5, 7, 4.5, 3.27), (4.65, 4.7, 5.9, 4.7), (4.5, 2.61, 4.5, 1.41), (5.9, 1.18, 4.9, 1.18),
                 (4.5, 0.95, 4.5, -0.1, four)):
        arrow(*path, colours=STREAMS)
    for path in ((4.65, 6, 5.6, 6), (7.95, 5.65, 7.6, 4.7), (5.75, 5.65, 5.15, 2.94), (8.35, 5.65, 7.6, 1.18)):
        arrow(*path, colours=['#8c192c'], linestyle='--', connectionstyle='angle,angleA=90,angleB=0,rad=0')


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
    for l, colour in ((6, STREAMS[0]), (8, STREAMS[1])):
        ax.semilogy([*errors], [row[l - 1] for row in errors.values()], colour, label=f'sub-layer {l}')
    ax.set(xlabel='rounds', ylabel='error of the columns', ylim=(1e-7, 3), xlim=(1, 50))
    ax.legend()


def plot_streams(plt, streams, sublayers, spreads, **_):
    """Above how T and d F change the spread of the streams, below which streams are read (a) and written (d)."""
    _, axes = plt.subplots(3, 1, figsize=(8.6, 5.6), sharex=True, height_ratios=(3, 1, 1))
    place, (before, mixed, after) = np.arange(1, 17), spreads.numpy()
    axes[0].plot([place - 0.5, place], [before, mixed], STREAMS[0])
    axes[0].plot([place, place + 0.5], [mixed, after], STREAMS[1], linestyle='--')
    axes[0].legend(axes[0].lines[15:17], ['T', 'd F'])
    axes[0].set(ylabel='distance from the mean', ylim=0)
    mappings = [block.mappings(x.mean((2, 3)))[:2] for (block, _), x in zip(sublayers, streams)]
    for ax, name, values, most in zip(axes[1:], ('a: read', 'd: written'), zip(*mappings), (1, 2)):
        ax.imshow(np.concatenate(values).T, 'cividis', aspect='auto', clim=(0, most), extent=(0.5, 16.5, 4.5, 0.5))
        ax.set(ylabel=f'{name}\n(0 to {most})', yticks=range(1, 5), xticks=place)
    ax.set_xlabel('sub-layer')


def plot_kernels(plt, kernels, kernels_of, **_):
    """T in all sub-layers for two samples of one equation and one of another."""
    _, axes = plt.subplots(3, 16, figsize=(8.6, 2))
    for line, (name, used) in zip(axes, kernels_of.items()):
        line[0].set_ylabel(name, rotation=0, ha='right', va='center')
        for l, (ax, T_l) in enumerate(zip(line, used), 1):
            ax.imshow(T_l[0].numpy(), 'cividis', clim=(0, 1))
            ax.set(xticks=[], yticks=[], title=l if used is kernels else '')


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('--figures', default='docs/figures', metavar='DIR', help='folder [docs/figures]')
    folder, plt, variables = parser.parse_args().figures, figures.pyplot(), {'print': lambda *_: None}
    for example in doctest.DocTestParser().get_examples(Path('docs/tour.md').read_text()):
        exec(example.source, variables)
    for plot in (plot_network, plot_sinkhorn, plot_streams, plot_kernels):
        plot(plt, **variables)
        figures.save(folder, plot.__name__.replace('plot', 'tour'), plt.gcf())


if __name__ == '__main__':
    terminal.cli(main)
