"""Numbers in, picture out: each `plot_` function makes a figure and `save_figure` writes it.

    python -m lab.figures out/nano      out/nano/curve.png: loss, validation error, learning rate,
                                        with further runs beside one another

Only functions that draw import this module.
Shapes: H W grid points, L sub-layers, S streams, F frames.
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


def write_picture(path, save):
    """Write a picture by save(part), unless there is one; then a line says that it stays."""
    if path.exists():
        terminal.warn(f'{path}: this picture is there and stays as it is; delete it, or draw into '
                      'another folder')
    else:
        with files.replacing(path) as part:
            save(part)
        print(f'drew {path}', flush=True)
    pyplot().close('all')


def save_figure(folder, name, figure):
    """Write a figure as folder/name.png."""
    write_picture(Path(folder, f'{name}.png'), lambda part: figure.savefig(part, format='png'))


def animate(path, plot, steps, duration=125):
    """Write a GIF of the figures plot(step), for at most FRAMES of the steps from 1 on.

    duration: of a figure, in milliseconds.
    """
    def save(part):
        from PIL import Image
        pages = []
        for step in range(1, steps + 1, math.ceil(steps / FRAMES)):
            page = io.BytesIO()
            plot(step).savefig(page, dpi=80)
            pyplot().close('all')
            pages.append(Image.open(page).convert('RGB'))
        pages[0].save(part, format='gif', save_all=True, append_images=pages[1:],
                      duration=duration, loop=0)
    write_picture(path, save)


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
    above.set(yscale='log', ylabel='loss, relative L2 error')
    above.legend(fontsize=8)
    below.set(xlabel='step', ylabel='learning rate')
    return figure


def plot_mappings(d, T):
    """What the blocks do to the inputs of each dataset: a line over the sub-layers for each.

    d: {name: (N, L, S)} and T: {name: (N, L, S, S)} of N inputs, of which means are drawn.
    """
    figure, axes = pyplot().subplots(2, figsize=(7, 6), sharex=True)
    kept = {name: of_inputs.diagonal(dim1=2, dim2=3) for name, of_inputs in T.items()}
    for ax, values, title, label in (
            (axes[0], d, 'Step: how much of its output a sub-layer adds', 'mean of d, at most 2'),
            (axes[1], kept, 'Memory: the share of itself that a stream keeps',
             'mean diagonal of T, at most 1')):
        for k, (name, of_streams) in enumerate(values.items()):
            means = of_streams.mean((0, 2))
            numbers = range(1, len(means) + 1)
            ax.plot(numbers, means, 'os^Dv<>P'[k % 8] + '-', color=f'C{k}', ms=5, label=name)
        ax.set_title(title, loc='left')
        ax.set(ylabel=label, ylim=(0, None))
        ax.grid(alpha=0.3)
    ax.set_xticks(numbers, [f'{l}\n{"mixer" if l % 2 else "MLP"}' for l in numbers])
    ax.set_xlabel('sub-layer')
    figure.legend(*ax.get_legend_handles_labels(), loc='outside right center', title='dataset',
                  fontsize=8)
    return figure


def scale_of_colours(truth):
    """The limits and the map of the colours of a field: round 0 if it has both signs."""
    low = truth.min().item()
    high = truth.max().item()
    largest = max(-low, high)
    if low < 0 < high and min(-low, high) > 0.1 * largest:
        return (-largest, largest), 'RdBu_r'
    return (low, high), 'viridis'


def draw_field(ax, u, limits, colormap, colours=256):
    """The image of u (H, W) on `ax`: its first axis points to the right, its second up."""
    image = ax.imshow(np.asarray(u).T, origin='lower', interpolation='nearest', clim=limits,
                      cmap=pyplot().get_cmap(colormap, colours))
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return image


def plot_fields(fields, steps, title, colours=256):
    """The truth, the prediction and its error, or a forecast alone, a row for each of the steps.

    fields: (F, 2 or 1, H, W) at the steps from 1 on, of which H points to the right, W up. All
    have the range of the truth, or of a forecast, at all steps; the error has the colours of half of it.
    Of a field in one dimension, H = 1, there is one row with images of place and time.
    """
    line = fields.shape[2] == 1
    if line:
        fields = fields.swapaxes(0, 2).swapaxes(2, 3)                   # (1, 2, W, F)
        steps = [1]
    H, W = fields.shape[-2:]
    labels = ('truth', 'prediction', '|error|') if fields.shape[1] == 2 else ('forecast',)
    size = (4 if len(labels) == 1 else 7.5, 3 if line else 0.8 + 2 * len(steps) * W / H)
    figure, axes = pyplot().subplots(len(steps), len(labels), squeeze=False, figsize=size)
    figure.suptitle(title)
    limits, colormap = scale_of_colours(fields[:, 0])
    of_error = (0, (limits[1] - limits[0]) / 2)
    for row, step in zip(axes, steps):
        for ax, u in zip(row, fields[step - 1]):
            field = draw_field(ax, u, limits, colormap, colours)
        row[0].set_ylabel(f'step {step}')
        if len(row) == 3:
            v, u = fields[step - 1]
            row[1].set_xlabel(f'L2RE {(u - v).norm() / v.norm():.3f}')
            error = draw_field(row[2], (u - v).abs(), of_error, 'magma', colours)
    for ax, label in zip(axes[0], labels):
        ax.set_title(label)
    figure.colorbar(field, ax=axes[:, :2], aspect=40, fraction=0.05, pad=0.02)
    if len(labels) == 3:
        figure.colorbar(error, ax=axes[:, 2], aspect=40, fraction=0.08, pad=0.02)
    up = f'{W} steps' if line else f'step {steps[-1]}\naxis 2, {W} points'
    axes[-1, 0].set(xlabel=f'axis 1, {H} points', ylabel=up)
    if line:
        for ax in axes.flat:
            ax.set_aspect('auto')
    return figure


def draw_forecast(u, title, folder):
    """Draw the first, middle and last frame of a forecast u (F, *space) as folder/forecast.png."""
    u = u[..., u.shape[-1] // 2] if u.ndim == 4 else u
    u = u.reshape(len(u), 1, -1, u.shape[-1])                           # (F, 1, H, W)
    steps = sorted({1, (len(u) + 1) // 2, len(u)})
    save_figure(folder, 'forecast', plot_fields(u, steps, title))


def draw_rollout(dataset, pictures, steps, channel, trajectory, folder):
    """Draw `pictures`, true and predicted: some steps as a PNG, at most FRAMES as a GIF.

    In a GIF 48 colours suffice: with more than its 256 it mixes dots, and is nearly twice as large.
    channel: its name.
    """
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
