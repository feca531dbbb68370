"""Convert public benchmark downloads into the layout of data.py.

    python -m sources.prepare swe_pdb --source 2D_rdb_NA_NA.h5      a file or a folder, into data/swe_pdb/
    python -m sources.prepare layer --source turbulent_radiative_layer_2D --from the_well  a dataset of The Well
    python -m sources.prepare mine --source u.npz --layout NTCHW --channels p v c           files of your own
    python -m sources.prepare mine --source runs --variables u v p nu --layout TYX          a folder, one file a run

Of your own files, .npy .npz .mat .nc .h5, --layout names the axes in their order: N trajectories, T
frames, H W D (or X Y Z) in space, C channels. Without N a file is a trajectory, without N and T a
frame. --variables become channels, and those without T, such as a mask or a number, static ones. Of
a benchmark, the first trajectories are for training, and those reserved at its end for testing.
"""
import math
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import numpy as np

import configs
import data
from configs import DATASETS, InputError
from runtime import terminal
from runtime.files import lock
from runtime.terminal import Progress, warn
from sources.formats import OFFICIAL, reading, refuse
from sources.own import KINDS, Own, own_source
from sources.well import the_well

BLOCK = 2 ** 25                                         # bytes that are read at once, as float32
LARGEST = np.finfo(np.float32).max


def official(name, path):
    """The Source of a benchmark's download, with the splits and all attributes of our dataset."""
    dataset = DATASETS[name]
    source = OFFICIAL[name].source(name, path)
    channels = source.attributes.get('channels', dataset.channels)
    expected = dataset.frames, dataset.dims, len(channels)
    if (source.shape[0], len(source.shape) - 2, source.shape[-1]) != expected:
        refuse(path, '%d frames, %d dimensions, %d channels' % expected, f'the shape {source.shape}')
    attributes = dict(pde=OFFICIAL[name].pde, dt=dataset.dt, t_test=dataset.t_test, channels=channels,
                      static=[key for key in channels if key in dataset.static],
                      source=(path if path.is_file() else path.resolve()).name)
    return source._replace(items=split_trajectories(name, source.items), attributes=attributes | source.attributes)


def split_trajectories(name, items):
    """{split: [(file, index)]}, as many as the paper uses, or in proportion."""
    dataset = DATASETS[name]
    if isinstance(items, dict):
        if name == 'cfdbench':              # all of it: the paper's sizes cut off most of the tube
            return items
        return {split: rows[:getattr(dataset, split)] for split, rows in items.items()}
    test = min(dataset.test, max(1, round(len(items) * dataset.test / (dataset.train + dataset.test))))
    start = max(0, len(items) - (OFFICIAL[name].tail if len(items) >= OFFICIAL[name].count else test))
    return {'test': items[start:start + test], 'train': items[:min(dataset.train, start)]}


def block_slices(items, shape):
    """Blocks of at most BLOCK bytes of [(file, index)] -> (file, slice of them, n, t)."""
    T = shape[0]
    frame = 4 * math.prod(shape[1:])
    several = max(1, BLOCK // (frame * T))
    frames = max(1, BLOCK // frame)
    for (file, shift), run in groupby(enumerate(items), lambda row: (row[1][0], row[1][1] - row[0])):
        places = [place for place, _ in run]
        for first in places[::several]:
            stop = min(first + several, places[-1] + 1)
            for t in range(0, T, frames):
                yield file, slice(first, stop), slice(first + shift, stop + shift), slice(t, min(t + frames, T))


def read_blocks(source, items, nan_to_num):
    """(where in words, its place in the output, (t, *space, C)) of parts of trajectories.

    Raises InputError for what is not real or has another shape.
    """
    total = 4 * len(items) * math.prod(source.shape)
    with Progress(total=total, unit='B', unit_scale=True, desc='converting') as bar:
        for path, place, n, t in block_slices(items, source.shape):
            shape = (n.stop - n.start, t.stop - t.start, *source.shape[1:])
            with reading(f'{path}, trajectory {n.start}'):
                block = source.read(path, n, t)
            if block.dtype.kind not in 'fiub' or block.shape != shape:
                refuse(f'{path}, trajectory {n.start}', f'real numbers of shape {shape[1:]}',
                       f'{block.dtype} of shape {block.shape[1:]}')
            if nan_to_num:
                block = np.float64(block) if block.dtype.itemsize > 4 else np.float32(block)
                block = np.nan_to_num(block, posinf=LARGEST, neginf=-LARGEST)
            for i, part in enumerate(block):
                yield f'{path}, trajectory {n.start + i}', (place.start + i, t), part
            bar.update(4 * block.size)


class Survey:
    """What frames hold: range, mean and deviation of each channel, and which of them occur twice.

    gaps: where no frame has a number, (*space, C).
    first: a frame, whose mean is subtracted, or squares of large numbers would lose the deviation.
    evolving: the channels that count where frames are compared.
    """

    def __init__(self, first, gaps, evolving):
        self.gaps = gaps
        self.count = np.sum(~gaps.reshape(-1, gaps.shape[-1]), 0)               # of the points of a frame
        self.evolving = evolving
        self.shift = np.float32(np.where(np.isfinite(first), first, 0).real.reshape(-1, len(self.count)).mean(0))
        self.low, self.high = np.full((2, len(self.count)), [[np.inf], [-np.inf]])
        self.sums = np.zeros((3, len(self.count)))                              # numbers, their sum and squares
        self.frames = {split: set() for split in data.SPLITS}                   # by their hashes

    def add(self, split, block):
        """Count frames (t, *space, C), in float32."""
        x = np.where(self.gaps, 0, block - self.shift)
        frames = x[..., self.evolving].reshape(len(x), -1, len(self.evolving))
        self.frames[split] |= {hash(frame.tobytes()) for frame in frames if (frame != frame[0]).any()}
        x = np.ascontiguousarray(x.reshape(-1, x.shape[-1]).T)                  # (C, points), since sums are faster so
        self.low = np.minimum(self.low, x.min(1))
        self.high = np.maximum(self.high, x.max(1))
        self.sums += len(block) * self.count, x.sum(1, dtype=float), np.einsum('ci,ci->c', x, x, dtype=float)

    def report(self, channels):
        """Print it, and return the mean of each channel."""
        mean, square = self.sums[1:] / self.sums[0]
        deviation = np.sqrt(np.maximum(square - mean ** 2, 0))
        low, high, mean = np.stack([self.low, self.high, mean]) + self.shift
        for row in zip(channels, low, high, mean, deviation):
            print('  {}: {:.4g} to {:.4g}, mean {:.4g}, deviation {:.4g}'.format(*row))
        twice = len(self.frames['test'] & self.frames['train'])
        if twice:
            warn(f'{twice} of {len(self.frames["test"])} frames of the test set are in the training set as well, as of '
                 f'windows that overlap; --split order, or --frames on the uncut trajectories, keeps them apart')
        return mean


def fill(block, gaps, means):
    """Frames (t, *space, C) with `means` in their gaps, and a channel `mask`, which is 0 there."""
    mask = np.broadcast_to(~gaps.any(-1, keepdims=True), (*block.shape[:-1], 1))
    return np.concatenate([np.where(gaps, means.astype(block.dtype), block), mask], -1, dtype=block.dtype)


def convert(folder, source, nan_to_num=False, masked=False):
    """Write folder/test.h5, train.h5 and perhaps valid.h5 of a Source, unless they exist; print what they hold.

    They appear when all are whole.
    nan_to_num: write 0 for nan.
    masked: whether nan at the same points of all frames, such as land, is a gap, which gets the mean
        of its channel, and 0 in a static channel `mask`.
    Raises InputError for files of other contents, and for values that are not finite.
    """
    attributes = source.attributes
    channels = attributes['channels']
    (path, n), *_ = next(iter(source.items.values()))
    with reading(path):
        first = source.read(path, slice(n, n + 1), slice(0, 1))[0, 0]
        gaps = np.isnan(first) & (masked and not nan_to_num)
        survey = Survey(first, gaps, [c for c, name in enumerate(channels) if name not in attributes['static']])
    if gaps.any():
        print(f'{gaps.any(-1).mean():.1%} of the points are gaps in all frames: they get the mean of their channel, '
              f'and 0 in the static channel mask')
        attributes = attributes | {key: [*attributes[key], 'mask'] for key in ('channels', 'static')}
    shapes = {split: (len(items), *source.shape[:-1], len(attributes['channels']))
              for split, items in source.items.items()}
    data.check_headers(folder, {split: (shape, np.dtype('f4'), attributes) for split, shape in shapes.items()})
    with lock(folder), ExitStack() as stack:
        outputs = {}
        missing = data.splits_to_write(folder, shapes, attributes)
        for split in sorted(missing, key=data.SPLITS.index, reverse=True):      # the last to appear is train.h5
            print(f'{folder.name} {split} {shapes[split]} from {attributes["source"]}')
            outputs[split] = stack.enter_context(data.writer(folder / f'{split}.h5', shapes[split], **attributes))
        for split, file in outputs.items():
            for where, place, block in read_blocks(source, source.items[split], nan_to_num):
                with np.errstate(over='ignore'):
                    rounded = block.astype(np.float32, copy=False)
                if (np.isfinite(rounded) == gaps).any() or not survey.count.all():
                    refuse(where, 'finite values' + ', or nan at the same points of all frames' * masked,
                           'nan or infinity', '--nan_to_num writes 0 for nan')
                survey.add(split, rounded)
                file['data'][place] = fill(block, gaps, survey.shift) if gaps.any() else block
        means = survey.report(channels) if outputs else None
        for split, file in outputs.items() if gaps.any() else ():
            stored = file['data'].stored
            for _, n, _, t in block_slices(source.items[split], stored.shape[1:]):
                stored[n, t] = fill(stored[n, t][..., :-1], gaps, means)


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('name', help='a dataset of configs.py; with --from or --layout, any name')
    parser.add_argument('--source', metavar='X', required=True, nargs='+', help='the file or folder, as downloaded')
    parser.add_argument('--from', dest='origin', choices=['the_well'], help="a dataset in The Well's form")
    parser.add_argument('--data', default='data', metavar='X', help='folder of the datasets [data]')
    parser.add_argument('--nan_to_num', action='store_true', help="write 0 for nan, as The Well's loader does")
    parser.add(Own(), 'files of your own')
    args = parser.parse_args()
    own = configs.override(Own(), args)
    path = Path(args.source[0])
    folder = Path(args.data, args.name)
    mine = [f'--{name}' for name in vars(own) if name in args and not (args.origin and name == 'uneven')]
    if args.name in ('', '..') or Path(args.name).name != args.name:
        raise InputError(f'{args.name!r}: expected the name of a folder in --data')
    if args.origin or args.name in OFFICIAL and not own.layout:
        if mine or len(args.source) > 1:
            raise InputError(f'{(mine or ["--source"])[0]}: for files of your own, with --layout; a benchmark is one '
                             f'file or folder')
        convert(folder, the_well(path, own.uneven) if args.origin else official(args.name, path), args.nan_to_num)
        return
    if not mine and path.suffix.lower() not in KINDS:
        raise InputError(f'unknown dataset {args.name!r}{configs.nearest(args.name, OFFICIAL)}; for files of your own '
                         f'give --layout, such as NTHWC')
    for file in [file for file in folder.glob('*.h5') if file.stem in data.SPLITS]:
        raise InputError(f'{file}: exists; remove it, or choose another name or --data')
    convert(folder, own_source(args.source, own), args.nan_to_num, masked=True)


if __name__ == '__main__':
    terminal.cli(main)
