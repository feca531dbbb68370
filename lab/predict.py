"""Own frames in, predictions out; pictures of the fields of rollouts.

    python -m lab.predict frames.npy --steps 100 --to prediction.npy    what comes after your own frames
    python -m lab.predict frames.npy --steps 20 100 500 --dataset wave_layer --to prediction.h5     three of the frames
    python -m lab.predict --fields --figures out/figures        the truth, predictions and errors of each dataset

The model is that of --checkpoint, by default the newest under out/. In a notebook, `evaluate.rollout` takes arrays.
"""
import os
from pathlib import Path

import numpy as np
import torch

import configs
import data
import evaluate
from configs import InputError
from runtime import commands, files, hdf5, terminal
from runtime.layouts import layout_of_channels, with_coefficients

FORMATS = '.npy', '.h5', '.hdf5'
KEPT = 'channels', 'static', 'scale', 'dt', 'pde', 'source'     # attributes that predictions take over, see data.write


def open_frames(path, coefficients=()):
    """The array of frames in a file, in HDF5 the dataset `data`, and a dict of its attributes in KEPT.

    Those of the `coefficients` that lie beside `data` are appended as static channels, as in training.
    """
    if path.suffix not in FORMATS:
        raise InputError(f'{path}: the name of a file of frames ends in {", ".join(FORMATS)}')
    if path.suffix == '.npy':
        with files.naming(path, 'not readable as .npy', 'numpy'):
            return np.lib.format.open_memmap(path, mode='r'), {}        # unlike np.load, it takes nothing but .npy
    with hdf5.opened(path) as file:
        stored = file['data']
        frames = stored[()]
        attributes = {key: value for key, value in stored.attrs.items() if key in KEPT}
        names = [key for key in coefficients if key in file]
        scales = [data.scale_of(file, key) for key in names]
        for key in names:
            field = file[key][()]                                                       # (N, *space) or (N,)
            field = field.reshape(len(field), 1, *(field.shape[1:] or [1] * (frames.ndim - 3)), 1)
            frames = np.concatenate([frames, np.broadcast_to(field, (*frames.shape[:-1], 1))], -1)
        if names:
            layout = layout_of_channels(path, stored.shape[-1], attributes)
            layout = with_coefficients(layout, names, scales)
            attributes |= dict(channels=layout.channels, static=layout.static, scale=layout.scale)
    return frames, attributes


def predict(models, args, processes, report):
    """`evaluate.rollout` of a file into the file --to, in its units; its attributes are taken over.

    Which channels are static, and their scale, is what the attributes say, or else what the checkpoint keeps.
    """
    if len(models) > 1 or processes.world_size > 1:
        raise InputError('one process writes the predictions of one --checkpoint; give one, and no torchrun')
    opened = models[0]
    path = Path(args.frames)
    target = Path(args.to)
    frames, attributes = open_frames(path)
    frames = evaluate.last_frames(opened.model.config, frames, str(path)).numpy()
    C = frames.shape[-1]
    own = layout_of_channels(path, C, attributes) if 'static' in attributes and not args.dataset else ''
    layout, names = evaluate.layout_of(opened.model, C, args.dataset or own, args.static, str(path))
    if names:
        origin = f'as in {" ".join(names)}'
    else:
        origin = 'as its attributes say' if own else 'of which the checkpoint keeps no layout'
    processes.print(f'{path}: channels {layout.words}, {origin}')
    steps = args.steps[0] if len(args.steps) == 1 else args.steps
    predictions = evaluate.rollout(opened.model, frames, steps, (), args.batch_size, args.dtype, str(path), layout)
    if len(args.steps) > 1:
        attributes.pop('dt', None)                                      # these frames need not be equally far apart
    if target.suffix == '.npy':
        with files.replacing(target) as part, open(part, 'wb') as file:
            np.save(file, predictions)
    else:
        with data.writer(target, predictions.shape, **attributes) as file:
            file['data'][:] = predictions
    diverged = sum(not np.isfinite(u).all() for u in predictions)
    remark = f'; {diverged} have values that are not finite' if diverged else ''
    return [f'wrote {target}: {predictions.shape}{remark}']


def rollout_of_channel(model, test, channel, steps, dtype='fp32'):
    """One channel of a trajectory, (steps, H, W): true, predicted and the last input; in 3-D the middle slice."""
    T = model.config.frames
    c = test.channel_names.index(channel)
    layout = test.layout._replace(scale=[1] * len(test.layout.static))          # `read` has divided by it
    frames = torch.from_numpy(test.read(0, 0, T + steps))
    predictions = evaluate.rollout(model, frames[:T], steps, dtype=dtype, name=str(test.path), dataset=layout)[0]
    values = frames[T:, ..., c], predictions[..., c], frames[T - 1:T, ..., c].expand_as(frames[T:, ..., c])
    return [u if u.ndim == 3 else u[..., u.shape[-1] // 2] for u in values]


def draw_fields(models, args, processes, report):
    """--fields: a rollout of one trajectory of each dataset as DIR/<dataset>_<channel>.png."""
    from lab import figures
    T = commands.agreed(models, 'frames')
    for test in evaluate.test_sets(models, args, processes)[models[0].name]:
        names = [test.channel_names[c] for c in test.evolving]
        most = test.frames - T
        predictions = {}
        channel = args.channel or names[0]
        steps = args.steps or sorted({1 + round(i * (test.t_test - 1) / 3) for i in range(4)})
        if channel not in names:
            raise InputError(f'--channel {channel}: {test.name} does not predict it{configs.nearest(channel, names)}')
        if max(steps) > most:
            raise InputError(f'--steps {max(steps)}: {test.name} has {most} frames after the {T} that go in')
        if args.trajectory >= test.count:
            raise InputError(f'--trajectory {args.trajectory}: {test.name} has 0 to {test.count - 1}')
        for opened in models:
            test = evaluate.dataset_of(opened, test.path.parent.parent, test.name, [args.trajectory])
            truth, predictions[opened.name], last = rollout_of_channel(
                opened.model, test, channel, max(steps), args.dtype)
        if args.figures:
            predictions['persistence'] = last
            title = f'{test.name}, test trajectory {args.trajectory}'
            picture = figures.plot_fields(truth, predictions, steps, channel, title)
            figures.save(args.figures, f'{test.name}_{channel}', picture)
    return []


def main():
    parser = commands.evaluation_parser(__doc__, 'the --fields')
    parser.add_argument('frames', nargs='?', metavar='FILE', help='.npy or .h5 file, (N, T, H, W, C) or without N')
    parser.add_argument('--to', default='', metavar='FILE', help='the .npy or .h5 file for the predictions')
    parser.add_argument('--steps', type=int, nargs='+', metavar='N', help='how many to predict, or several: which to '
                        'write; of --fields which to draw [four]')
    parser.add_argument('--dataset', default='', metavar='NAME', help='of the training, whose channels FILE has')
    parser.add_argument('--static', type=int, nargs='+', default=(), metavar='C', help='further channels to keep')
    parser.add_argument('--fields', action='store_true', help='draw the fields of rollouts into the folder --figures')
    parser.add_argument('--channel', metavar='NAME', help='channel of --fields; default: the first')
    parser.add_argument('--trajectory', type=int, default=0, metavar='I', help='test trajectory of --fields [0]')
    args = parser.parse_args()
    configs.at_least(0, trajectory=args.trajectory)
    for steps in args.steps or ():
        configs.bounded('steps', steps, least=1, most=100_000)
    for wrong, message in (
            (bool(args.frames) == args.fields, 'give a FILE of frames or --fields'),
            (args.fields and not args.figures, '--fields: into which folder? add --figures DIR'),
            (args.frames and not args.to, f'{args.frames}: into which file? add --to FILE'),
            (args.frames and not args.steps, f'{args.frames}: how many frames? add --steps N'),
            (args.to and Path(args.to).suffix not in FORMATS, f'--to {args.to}: the name must end in .npy, .h5, .hdf5'),
            (args.to and os.path.lexists(args.to), f'--to {args.to}: this exists; remove it or name another file')):
        if wrong:
            raise InputError(message)
    commands.execute(args, predict if args.frames else draw_fields)


if __name__ == '__main__':
    terminal.cli(main)
