"""Numbers in, picture out: each `plot_` function makes one matplotlib figure, which `save` writes.

    python -m lab.figures out/nano          draws the run: loss, validation error, learning rate, as out/nano/curve.png

Only functions that draw import this module. Shapes: H W grid points, L sub-layers, S streams, T (L, S, S), F frames.
"""
import importlib.util
import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from configs import InputError
from runtime import checkpoint, files, terminal

COLOURS = '#09236f', '#8c192c', '#127f48', '#d05517', '#c669b7', '#5ac4e7', '#f0c544'      # ever lighter, for grey
LINES = '-', '--', '-.', (0, (4, 1, 1, 1, 1, 1))                # dotted ones are for what is not a model's prediction
MARKERS = 'osD^v*Xph<>'
FRAMES = 50                     # of an animation, at most


def pyplot():
    """matplotlib.pyplot without a display; raises InputError if it or scikit-learn is not installed."""
    if not all(importlib.util.find_spec(name) for name in ('matplotlib', 'sklearn')):
        raise InputError('--figures needs matplotlib and scikit-learn: pip install matplotlib scikit-learn')
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    plt.rcParams.update({'figure.dpi': 120, 'figure.constrained_layout.use': True, 'lines.linewidth': 1.4,
                         'font.size': 10, 'axes.titlesize': 10, 'axes.spines.top': False, 'axes.spines.right': False,
                         'figure.titlesize': 10, 'legend.frameon': False, 'lines.markersize': 4})
    return plt


def styled(models):
    """[(name, value, style)] of {name: value}: colour, line and marker, each of which tells the models apart."""
    return [(name, value, {'color': COLOURS[i % len(COLOURS)], 'linestyle': LINES[i % len(LINES)],
                           'marker': MARKERS[i % len(MARKERS)], 'markevery': (0.04 * (i % 4), 0.16)})
            for i, (name, value) in enumerate(models.items())]


def save(folder, name, figure):
    """Write a figure as folder/name.png."""
    path = Path(folder) / f'{name}.png'
    with files.replacing(path) as part:
        figure.savefig(part, format='png')
    pyplot().close('all')
    print(f'drew {path}', flush=True)


def plot_median_and_quartiles(ax, values, label, **style):
    """The median of values (steps, N) with its quartiles shaded. NaN counts as the largest, infinity is a gap."""
    values = values.nan_to_num(math.inf, math.inf, -math.inf)
    low, middle, high = values.quantile(values.new_tensor([0.25, 0.5, 0.75]), dim=1)
    ax.plot(range(1, len(values) + 1), middle, label=label, **style)
    ax.fill_between(range(1, len(values) + 1), low, high, color=style['color'], alpha=0.2, linewidth=0)


def plot_rollout(models):
    """Error against step, {name: `evaluate.rollout_curve`}; persistence is grey and dotted."""
    figure, ax = pyplot().subplots(figsize=(5, 3))
    for name, curves, style in styled(models):
        plot_median_and_quartiles(ax, curves['model'], name, **style)
    plot_median_and_quartiles(ax, curves['persistence'], 'persistence', color='grey', linestyle=':')
    ax.set(xscale='log', yscale='log', xlabel='step', ylabel='relative L2 error')
    ax.legend()
    return figure


def plot_run(log):
    """The loss, the validation error and the learning rate of a run, from the lines of its log.jsonl."""
    figure, (above, below) = pyplot().subplots(2, 1, figsize=(5, 4), sharex=True, height_ratios=(3, 1))
    for name, label, ax in (('loss', 'loss', above), ('valid', 'validation error', above), ('lr', '', below)):
        points = [(line['step'], line[name]) for line in log if line.get(name) is not None]
        if points:
            ax.plot(*zip(*points), label=label, color=COLOURS[name == 'valid'],
                    marker='o' if name == 'valid' else None)
    above.set(yscale='log', ylabel='relative L2 error')
    above.legend()
    below.set(xlabel='step', ylabel='learning rate')
    return figure


def plot_probe(models):
    """t-SNE of the T {dataset: (N, L, S, S)} in {name: (T, rows of interpret.probe_table)} (paper, Fig. 4)."""
    from sklearn.manifold import TSNE
    figure, axes = pyplot().subplots(1, len(models), figsize=(4 * len(models), 4.4), squeeze=False)
    for (model, (T, rows)), ax in zip(models.items(), axes[0]):
        group_of = rows.get('unseen', rows)['group_of']
        labels = np.array([group_of[name] for name in T for _ in T[name]])
        features = torch.cat([*T.values()]).flatten(1).numpy()
        points = TSNE(perplexity=min(30, len(features) / 4), random_state=0).fit_transform(features)
        for i, (group, _, style) in enumerate(styled(dict.fromkeys(group_of.values()))):
            unseen = group not in rows['groups']
            ax.scatter(*points[labels == group].T, s=16, linewidth=0.9, color=style['color'],
                       marker='x+12'[i % 4] if unseen else style['marker'],
                       label=f'{group}, unseen' if unseen else group)
        ax.set(xticks=[], yticks=[], xlabel='t-SNE of T', title=model if len(models) > 1 else None)
        ax.legend(loc='upper center', bbox_to_anchor=(0.5, -0.1), ncol=2, handletextpad=0.1, columnspacing=0.8)
    return figure


def plot_mean_T(models):
    """T (L, S, S) of {name: {dataset: T}} on one colour scale: a row for each dataset, a column for each sub-layer."""
    rows = []
    for name, sets in models.items():
        prefix = f'{name}: ' if len(models) > 1 else ''
        rows += [(prefix + dataset, torch.as_tensor(T).numpy()) for dataset, T in sets.items()]
    L = max(len(T) for _, T in rows)
    low = min(T.min() for _, T in rows)
    high = max(T.max() for _, T in rows)
    figure, axes = pyplot().subplots(len(rows), L, figsize=(2.2 + 0.4 * L, 0.7 + 0.4 * len(rows)), squeeze=False)
    for i, (line, (name, T)) in enumerate(zip(axes, rows)):
        line[0].set_ylabel(name, rotation=0, ha='right', va='center')
        for l, ax in enumerate(line):
            ax.set(xticks=[], yticks=[], title='' if i else l + 1, visible=l < len(T))
            image = ax.imshow(T[min(l, len(T) - 1)], vmin=low, vmax=high, cmap='cividis')
    figure.supxlabel('sub-layer')
    figure.colorbar(image, ax=axes, label='mean T (rows: results, columns: sources)')
    return figure


def axes_of_fields(fields, rows=1):
    """A figure and its axes (rows, 1 + 2 models) for `draw_fields`."""
    _, _, H, W = next(iter(fields.values())).shape
    columns = 1 + 2 * len(fields)
    return pyplot().subplots(rows, columns, squeeze=False, figsize=(2.1 * columns, 0.8 + 2.1 * rows * W / H))


def draw_fields(axes, fields, step, colours=256):
    """Draw the fields at a step on a row of axes: the truth, the predictions and their errors.

    fields: {model: (F, 2, H, W)}, where 0 is the truth and 1 the prediction, and F counts the steps from 1 on. x points
    to the right, y up; below a prediction is its L2RE. Truth and predictions share the range of the truth, centred at 0
    if it has both signs, and the errors have the colours of half of it.
    """
    from matplotlib import colormaps
    truth = next(iter(fields.values()))[:, 0]
    low = truth.min().item()
    high = truth.max().item()
    bound = truth.abs().max().item()
    if min(-low, high) > 0.05 * bound:
        low = -bound
        high = bound
    v = truth[step - 1]
    panels = {'truth': v, **{model: pairs[step - 1, 1] for model, pairs in fields.items()}}
    errors = {f'|error| of {model}': (panels[model] - v).abs() for model in fields}
    for ax, (label, u) in zip(axes, {**panels, **errors}.items()):
        limits, name = ((0, (high - low) / 2), 'magma') if label in errors else ((low, high), 'viridis')
        ax.imshow(u.T.numpy(), origin='lower', interpolation='nearest', clim=limits,
                  cmap=colormaps[name].resampled(colours))
        ax.set(xticks=[], yticks=[], title=label,
               xlabel=f'L2RE {(u - v).norm() / v.norm():.3f}' if label in fields else '')
        ax.spines[:].set_visible(False)


def plot_fields(fields, steps, title):
    """The fields of `draw_fields`, a row for each of those steps that there are, and for the last."""
    count = len(next(iter(fields.values())))
    steps = [step for step in steps if step < count] + [count]
    figure, axes = axes_of_fields(fields, len(steps))
    figure.suptitle(title)
    for row, step in zip(axes, steps):
        draw_fields(row, fields, step)
        row[0].set_ylabel(f'step {step}')
    return figure


def animate(folder, name, fields, title):
    """Write folder/name.gif with at most FRAMES frames of the fields of `draw_fields`.

    There are 48 colours: a GIF has 256 and mixes the others of dots, which makes it nearly twice as large.
    """
    from matplotlib.animation import FuncAnimation, PillowWriter
    count = len(next(iter(fields.values())))
    figure, axes = axes_of_fields(fields)

    def draw(step):
        for ax in axes[0]:
            ax.clear()
        draw_fields(axes[0], fields, step, colours=48)
        figure.suptitle(f'{title}, step {step}')
    path = Path(folder) / f'{name}.gif'
    # Pillow knows a format by the end of the name, which that of a part is not
    with files.replacing(path) as part, tempfile.TemporaryDirectory() as temporary:
        drawn = Path(temporary, 'drawn.gif')
        FuncAnimation(figure, draw, range(1, count + 1, math.ceil(count / FRAMES))).save(
            drawn, PillowWriter(fps=8), dpi=80)
        shutil.copyfile(drawn, part)
    pyplot().close('all')
    print(f'drew {path}', flush=True)


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('run', help='the folder of a run, such as out/nano')
    run = Path(parser.parse_args().run)
    if not (run / 'log.jsonl').exists():
        raise InputError(f'{run}: no log.jsonl; name the folder of a run of train.py or finetune.py')
    save(run, 'curve', plot_run(checkpoint.read_log(run / 'log.jsonl')))


if __name__ == '__main__':
    terminal.cli(main)
