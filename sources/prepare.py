"""Convert public benchmark downloads, and files of your own, into the layout of data.py.

    python -m sources.prepare swe_pdb --source 2D_rdb_NA_NA.h5      a benchmark, into data/swe_pdb/
    python -m sources.prepare layer --source FOLDER --from the_well      a dataset of The Well
    python -m sources.prepare mine --source u.npz --layout NTCHW --channels p v c
    python -m sources.prepare mine --source runs --variables u v p nu --layout TYX

Of your own files, .npy .npz .mat .nc .h5, --layout names the axes in their order: N trajectories, T
frames, H W D (or X Y Z) in space, C channels. Without N a file is a trajectory, without N and T a
frame. --variables become channels, and those without T, such as a mask or a number, static ones. Of
a benchmark, the first trajectories are for training, and those reserved at its end for testing.
"""
import math
from contextlib import ExitStack
from itertools import groupby, product
from pathlib import Path

import numpy as np

import configs
import data
from configs import DATASETS, InputError
from runtime import terminal
from runtime.files import lock
from runtime.stored import require
from runtime.terminal import Progress, warn
from sources.formats import OFFICIAL, refuse, the_well
from sources.kinds import KINDS, reading
from sources.own import Own, own_source
from sources.pdes import FAMILIES

BLOCK = 2 ** 25                                         # bytes that are read at once, as float32


def official(name, path):
    """The Source of a benchmark's download, with the splits and all attributes of our dataset."""
    dataset, benchmark = DATASETS[name], OFFICIAL[name]
    source = benchmark.source(name, path)
    channels = source.attributes.get('channels', dataset.channels)
    T, C = dataset.frames, len(channels)
    if (source.shape[0], len(source.shape) - 2, source.shape[-1]) != (T, dataset.dims, C):
        refuse(path, f'{T} frames, {dataset.dims} dimensions, {C} channels',
               f'the shape {source.shape}')
    pde = benchmark.pde or FAMILIES[name].pde
    attributes = dict(pde=pde, dt=dataset.dt, t_test=dataset.t_test,
                      channels=channels, static=[key for key in channels if key in dataset.static],
                      source=(path if path.is_file() else path.resolve()).name)
    return source._replace(items=split_trajectories(name, source.items),
                           attributes=attributes | source.attributes)


def split_trajectories(name, items):
    """{split: [(file, index)]}, as many as the paper uses, or in proportion."""
    dataset = DATASETS[name]
    if isinstance(items, dict):             # CFDBench's: the paper's sizes cut off most of the tube
        return items
    test = round(len(items) * dataset.test / (dataset.train + dataset.test))
    test = min(dataset.test, max(1, test))
    whole = len(items) >= OFFICIAL[name].count
    start = max(0, len(items) - (OFFICIAL[name].tail if whole else test))
    return {'test': items[start:start + test], 'train': items[:min(dataset.train, start)]}


def read_blocks(source, items, nan_to_num):
    """(where in words, place in the output, (t, *space, C)) of parts of trajectories.

    About BLOCK bytes are read at once. Raises InputError for what is not real or has another shape.
    """
    T, *shape = source.shape
    frames = max(1, BLOCK // (4 * math.prod(shape)))
    several = max(1, frames // T)                                       # trajectories
    with Progress(total=len(items) * T, unit=' frames', desc='converting') as bar:
        by_file = groupby(enumerate(items), lambda row: (row[1][0], row[1][1] - row[0]))
        for (path, shift), run in by_file:                          # of consecutive trajectories
            rows = [row for row, _ in run]
            for first, t in product(rows[::several], range(0, T, frames)):
                stop = min(first + several, rows[-1] + 1)
                n, t = slice(first + shift, stop + shift), slice(t, min(t + frames, T))
                where = f'{path}, trajectory {n.start}'
                with reading(where):
                    block = source.read(path, n, t)
                expected = stop - first, t.stop - t.start, *shape
                if block.dtype.kind not in 'fiub' or block.shape != expected:
                    refuse(where, f'real numbers of shape {expected[1:]}',
                           f'{block.dtype} of shape {block.shape[1:]}')
                if nan_to_num:
                    block = np.where(np.isnan(block), 0, block)
                for i, part in enumerate(block):
                    yield f'{path}, trajectory {n.start + i}', (first + i, t), part
                bar.update((stop - first) * (t.stop - t.start))


def statistics(frames):
    """Count, mean, variance, least and largest number of each channel, (5, C). NaN is none."""
    x = np.ascontiguousarray(frames.reshape(-1, frames.shape[-1]).T, np.float64)
    return np.stack([np.isfinite(x).sum(1), np.nanmean(x, 1), np.nanvar(x, 1),
                     np.nanmin(x, 1), np.nanmax(x, 1)])


def report(channels, parts):
    """Print range, mean and deviation of each channel by the `statistics` of parts; the means."""
    counts, means, variances, low, high = np.stack(parts, 1)                    # (parts, C)
    mean = np.average(means, 0, counts)
    deviation = np.average(variances + (means - mean) ** 2, 0, counts) ** 0.5
    for row in zip(channels, low.min(0), high.max(0), mean, deviation):
        print('  {}: {:.4g} to {:.4g}, mean {:.4g}, deviation {:.4g}'.format(*row))
    return mean


def hashes(frames):
    """Of frames (t, *space, C), to find which occur twice, but for those that are constant."""
    space = tuple(range(1, frames.ndim - 1))
    varies = (np.nanmax(frames, space) > np.nanmin(frames, space)).any(-1)
    return {hash(frame.tobytes()) for frame in frames[varies]}


def fill(block, gaps, means):
    """Frames (t, *space, C) with `means` in their gaps, and a channel `mask`, which is 0 there."""
    mask = np.broadcast_to(~gaps.any(-1, keepdims=True), (*block.shape[:-1], 1))
    filled = np.where(gaps, means.astype(block.dtype), block)
    return np.concatenate([filled, mask], -1, dtype=block.dtype)


def gaps_in(path, n, source, masked):
    """Where the first frame of trajectory n in a file of a Source has gaps, (*space, C), and its
    mean in each channel.

    masked: whether nan is a gap; not in a channel that is nan everywhere.
    """
    with reading(path), np.errstate(over='ignore'):
        first = source.read(path, slice(n, n + 1), slice(0, 1))[0, 0].real.astype(np.float32)
    points = first.reshape(-1, first.shape[-1])
    means = np.where(np.isfinite(points), points, 0).mean(0, dtype=np.float64).astype(np.float32)
    gaps = np.isnan(first) & ~np.isnan(points).all(0) & masked
    if gaps.any():
        require('mask' not in source.attributes['channels'],
                f'{path}: gaps need a static channel mask, and there is one; give it another name '
                f'by --channels')
        print(f'{gaps.any(-1).mean():.1%} of the points are gaps in all frames: they get the mean '
              f'of their channel, and 0 in the static channel mask')
    return gaps, means


def float32_of(block, gaps, where, first, there, nan_to_num):
    """Frames (t, *space, C) as float32. Raises InputError unless they are nan in `gaps` alone.

    where, first, there: the trajectory, the number of the first frame, and in which file the gaps
        were found, '' if nan is none; for messages.
    """
    with np.errstate(over='ignore'):
        rounded = block.astype(np.float32, copy=False)
    wrong = (np.isnan(rounded) != gaps) | np.isinf(rounded)
    if wrong.any():
        where += f', frame {first + np.argwhere(wrong)[0, 0]}'
        expected = 'finite values' + (', or nan at the same points of all frames' if there else '')
        found = f'numbers where {there} has gaps' if np.isfinite(rounded[wrong]).all() else (
            'nan, infinity or too large a number')
        refuse(where, expected, found,
               'leave it out' if nan_to_num else '--nan_to_num replaces nan by 0')
    return rounded


def convert(folder, source, nan_to_num=False, masked=False):
    """Write folder/test.h5, train.h5 and perhaps valid.h5 of a Source, unless they exist.

    They appear when all are whole. Prints what they hold.
    nan_to_num: write 0 for nan.
    masked: whether nan at the same points of all frames, such as land, is a gap, which gets the
        mean of its channel, and 0 in a static channel `mask`.
    Raises InputError for files of other contents, and for values that are not finite.
    """
    attributes = source.attributes
    channels = attributes['channels']
    evolving = data.evolving_of(attributes)
    (path, n), *_ = next(iter(source.items.values()))
    gaps, guess = gaps_in(path, n, source, masked and not nan_to_num)
    if gaps.any():
        new = {key: [*attributes[key], 'mask'] for key in ('channels', 'static')}
        attributes = attributes | new
    shapes = {split: (len(items), *source.shape[:-1], len(attributes['channels']))
              for split, items in source.items.items()}
    data.check_headers(folder, {split: (shape, np.dtype('f4'), attributes)
                                for split, shape in shapes.items()})
    with lock(folder), ExitStack() as stack:
        missing = sorted(data.splits_to_write(folder, shapes, attributes), key=data.SPLITS.index)
        outputs = {}
        for split in missing[::-1]:                             # the last to appear is train.h5
            print(f'{folder.name} {split} {shapes[split]} from {attributes["source"]}')
            file = data.writer(folder / f'{split}.h5', shapes[split], **attributes)
            outputs[split] = stack.enter_context(file)['data']
        parts = []
        seen = {split: set() for split in data.SPLITS}
        for split, output in outputs.items():
            for where, place, block in read_blocks(source, source.items[split], nan_to_num):
                rounded = float32_of(block, gaps, where, place[1].start, masked and path, nan_to_num)
                parts.append(statistics(rounded))
                seen[split] |= hashes(rounded[..., evolving])
                output[place] = fill(block, gaps, guess) if gaps.any() else block
        means = report(channels, parts) if outputs else None
        if gaps.any():                                          # by now the means are known
            for output in outputs.values():
                for i, trajectory in enumerate(output.stored):
                    output.stored[i] = fill(trajectory[..., :-1], gaps, means)
    twice = len(seen['test'] & seen['train'])
    if twice:
        warn(f'{twice} of {len(seen["test"])} frames of the test set are in the training set as '
             f'well, as of windows that overlap, which --split order or --frames on the uncut '
             f'trajectories keeps apart, or of runs with one initial state')


def main():
    parser = terminal.Parser(description=__doc__)
    add = parser.add_argument
    add('name', help='a dataset of configs.py; with --from or --layout, any name')
    add('--source', metavar='X', required=True, nargs='+', help='the file or folder, as downloaded')
    add('--from', dest='origin', choices=['the_well'], help="a dataset in The Well's form")
    add('--data', default='data', metavar='X', help='folder of the datasets [data]')
    add('--nan_to_num', action='store_true', help="write 0 for nan, as The Well's loader does")
    parser.add(Own(), 'files of your own')
    args = parser.parse_args()
    own = configs.override(Own(), args)
    path = Path(args.source[0])
    folder = Path(args.data, args.name)
    if args.name in ('', '..') or Path(args.name).name != args.name:
        raise InputError(f'{args.name!r}: expected the name of a folder in --data')
    published = args.origin or args.name in OFFICIAL and not own.layout
    of_both = ['uneven'] if args.origin else []
    mine = [f'--{name}' for name in vars(own) if name in args and name not in of_both]
    if published and (mine or len(args.source) > 1):
        raise InputError(f'{(mine or ["--source"])[0]}: for files of your own, with --layout; a '
                         f'benchmark is one file or folder')
    if published:
        source = the_well(path, own.uneven) if args.origin else official(args.name, path)
    else:
        require(mine or path.suffix.lower() in KINDS,
                f'unknown dataset {args.name!r}{configs.nearest(args.name, OFFICIAL)}; for files '
                f'of your own give --layout, such as NTHWC')
        for split in data.SPLITS:
            file = folder / f'{split}.h5'
            require(not file.exists(),
                    f'{file}: exists; remove it, or choose another name or --data')
        source = own_source(args.source, own)
    convert(folder, source, args.nan_to_num, masked=not published)


if __name__ == '__main__':
    terminal.cli(main)
