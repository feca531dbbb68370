"""Numbers in, picture out: each `plot_` function makes a figure and `save_figure` writes it.

    python -m lab.figures out/nano      out/nano/curve.png: loss, validation error, learning rate,
                                        with further runs beside one another

Only functions that draw import this module.
Shapes: H W grid points, L sub-layers, S streams, T (L, S, S), F frames.
"""
import importlib.util
import io
import math
from pathlib import Path

import numpy as np

from configs import InputError
from runtime import files, terminal
from runtime.runs import read_log

FRAMES = 50                     # of an animation, at most


def pyplot():
    """matplotlib.pyplot without a display; raises InputError if it is not installed."""
    if not importlib.util.find_spec('matplotlib'):
        raise InputError('figures need matplotlib: pip install matplotlib')
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    plt.rcParams.update({'figure.dpi': 120, 'figure.constrained_layout.use': True, 'font.size': 10,
                         'axes.titlesize': 10, 'figure.titlesize': 10})
    return plt


def is_new(path):
    """Whether there is no such file yet; else a line says that it stays."""
    if path.exists():
        terminal.warn(f'{path}: this picture is there and stays as it is; delete it, or draw into another folder')
    return not path.exists()


def save_figure(folder, name, figure):
    """Write a figure as folder/name.png, unless there is one."""
    path = Path(folder) / f'{name}.png'
    if is_new(path):
        with files.replacing(path) as part:
            figure.savefig(part, format='png')
        print(f'drew {path}', flush=True)
    pyplot().close('all')


def plot_runs(logs):
    """Loss, validation error and learning rate of some runs {name: lines of its log.jsonl}."""
    figure, (above, below) = pyplot().subplots(2, figsize=(5, 4), sharex=True, height_ratios=(3, 1))
    for k, (name, log) in enumerate(logs.items()):
        first = f'{name}: ' if len(logs) > 1 else ''
        for ax, key, style, label in (
                (above, 'loss', '-', 'loss'), (above, 'valid', 'o--', 'validation error'),
                (above, 'test', 'o--', 'test error'),           # without validation data
                (below, 'lr', '-', 'learning rate')):
            points = [(line['step'], line[key]) for line in log if line.get(key) is not None]
            if points:
                ax.plot(*zip(*points), style, color=f'C{k}', label=first + label)
    above.set(yscale='log', ylabel='relative L2 error')
    above.legend(fontsize=8)
    below.set(xlabel='step', ylabel='learning rate')
    return figure


def plot_mappings(steps, kept):
    """What the blocks do to the inputs of each dataset: a line over the sub-layers for each of {name: (L,)}.

    steps: the mean of d. kept: the mean of the diagonal of T.
    """
    figure, axes = pyplot().subplots(2, figsize=(7, 6), sharex=True)
    panels = ((steps, 'Step: how much of its output a sub-layer adds', 'mean of d, at most 2'),
              (kept, 'Memory: the share of itself that a stream keeps', 'mean diagonal of T, at most 1'))
    for ax, (values, title, label) in zip(axes, panels):
        for k, (name, of_layers) in enumerate(values.items()):
            L = len(of_layers)
            ax.plot(range(1, L + 1), of_layers, 'os^Dv<>P'[k % 8] + '-', color=f'C{k % 10}', markersize=5, label=name)
        ax.set_title(title, loc='left')
        ax.set(ylabel=label, ylim=(0, None))
        ax.grid(alpha=0.3)
    below = axes[1]
    below.set_xticks(range(1, L + 1), [f'{l}\n{"MLP" if l % 2 == 0 else "mixer"}' for l in range(1, L + 1)])
    below.set_xlabel('sub-layer')
    figure.legend(*below.get_legend_handles_labels(), loc='outside right center', title='dataset', fontsize=8)
    return figure


def scale_of_colours(truth):
    """The limits and the map of the colours of a field: round 0 if it has both signs."""
    low = truth.min().item()
    high = truth.max().item()
    if low < 0 < high and min(-low, high) > 0.1 * max(-low, high):
        return (-max(-low, high), max(-low, high)), 'RdBu_r'
    return (low, high), 'viridis'


def draw_field(ax, u, limits, colormap, colours=256):
    """The image of u (H, W) on `ax`: its first axis points to the right, its second up."""
    image = ax.imshow(np.asarray(u).T, origin='lower', interpolation='nearest', clim=limits,
                      cmap=pyplot().get_cmap(colormap, colours))
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return image


def plot_fields(fields, steps, title, colours=256):
    """The truth, the prediction and its error, a row for each of the steps.

    fields: (F, 2, H, W), truth and prediction at the steps from 1 on. x points to the right, y up.
    Both have the range of all of the truth, and the error has the colours of half of that.
    Of a field in one dimension, H = 1, there is one row with images of place and time.
    """
    line = fields.shape[2] == 1
    if line:
        fields = fields.permute(2, 1, 3, 0)                             # (1, 2, W, F)
        steps = [1]
    H, W = fields.shape[-2:]
    size = (7.5, 3 if line else 0.8 + 2 * len(steps) * W / H)
    figure, axes = pyplot().subplots(len(steps), 3, squeeze=False, figsize=size)
    figure.suptitle(title)
    limits, colormap = scale_of_colours(fields[:, 0])
    of_error = (0, (limits[1] - limits[0]) / 2)
    for (left, middle, right), step in zip(axes, steps):
        v, u = fields[step - 1]
        draw_field(left, v, limits, colormap, colours)
        field = draw_field(middle, u, limits, colormap, colours)
        error = draw_field(right, (u - v).abs(), of_error, 'magma', colours)
        left.set_ylabel(f'step {step}')
        middle.set_xlabel(f'L2RE {(u - v).norm() / v.norm():.3f}')
    for ax, label in zip(axes[0], ('truth', 'prediction', '|error|')):
        ax.set_title(label)
    figure.colorbar(field, ax=axes[:, :2], aspect=40, fraction=0.05, pad=0.02)
    figure.colorbar(error, ax=axes[:, 2], aspect=40, fraction=0.08, pad=0.02)
    up = f'{W} steps' if line else f'step {steps[-1]}\ny, {W} points'
    axes[-1, 0].set(xlabel=f'x, {H} points', ylabel=up)
    for ax in axes.flat if line else ():
        ax.set_aspect('auto')
    return figure


def animate(path, plot, steps, duration=125):
    """Write a GIF of the figures `plot(step)`, for at most FRAMES of the steps from 1 on, unless
    there is one.

    duration: of a figure, in milliseconds.
    """
    from PIL import Image
    if not is_new(path):
        return
    pages = []
    for step in range(1, steps + 1, math.ceil(steps / FRAMES)):
        page = io.BytesIO()
        plot(step).savefig(page, dpi=80)
        pyplot().close('all')
        pages.append(Image.open(page).convert('RGB'))
    with files.replacing(path) as part:
        pages[0].save(part, format='gif', save_all=True, append_images=pages[1:],
                      duration=duration, loop=0)
    print(f'drew {path}', flush=True)


def draw_forecast(u, title, folder):
    """Draw the first, the middle and the last frame of a forecast u (F, *space) as folder/forecast.png."""
    u = u[..., u.shape[-1] // 2] if u.ndim == 4 else u
    steps = sorted({1, (len(u) + 1) // 2, len(u)})
    limits, colormap = scale_of_colours(u)
    figure, axes = pyplot().subplots(1, len(steps), figsize=(3 * len(steps), 3), squeeze=False)
    for ax, step in zip(axes[0], steps):
        image = draw_field(ax, u[step - 1], limits, colormap)
        ax.set_title(f'step {step}')
    figure.suptitle(title)
    figure.colorbar(image, ax=axes)
    save_figure(folder, 'forecast', figure)


def draw_rollout(dataset, pictures, steps, channel, trajectory, folder):
    """Draw `pictures`, true and predicted: some steps as a PNG, all of them as a GIF.

    In a GIF 48 colours suffice: with more than its 256 it mixes dots, and is nearly twice as large.
    """
    channel = dataset.evolving_names[channel]
    name = f'{dataset.name}_{channel}_{trajectory}'
    title = f'{channel} of {dataset.name}, trajectory {trajectory}'
    save_figure(folder, f'fields_{name}', plot_fields(pictures, steps, title))
    if pictures.shape[2] > 1:
        animate(Path(folder) / f'rollout_{name}.gif',
                lambda step: plot_fields(pictures, [step], title, colours=48), len(pictures))


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('runs', nargs='+', help='the folders of runs, such as out/nano')
    runs = [Path(run) for run in parser.parse_args().runs]
    logs = {str(run): read_log(run / 'log.jsonl') for run in runs}
    save_figure(runs[0], 'curve', plot_runs(logs))


if __name__ == '__main__':
    terminal.cli(main)
