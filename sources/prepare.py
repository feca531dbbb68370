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
from runtime.files import lock, naming
from runtime.terminal import Progress, warn
from sources.formats import DAMAGED, OFFICIAL, refuse
from sources.own import KINDS, Own, own_source
from sources.well import the_well

BLOCK = 2 ** 26                                         # bytes that are read at once, as float32


def convert(name, path, folder='data', well=False, nan_to_num=False, uneven=False):
    """Write folder/name/test.h5, train.h5 and perhaps valid.h5, unless they exist, from a download.

    path: the file or folder.
    well: whether it is a dataset of The Well, of any name.
    nan_to_num: write 0 for nan.
    uneven: take uneven times and grid points as even.
    Raises InputError for another download.
    """
    path = Path(path)
    folder = Path(folder) / name
    source = the_well(path, uneven) if well else official(name, path)
    attributes = dict(source=(path if path.is_file() else path.resolve()).name) | source.attributes
    source = source._replace(attributes=attributes)
    shapes = shapes_of(folder, source)
    with lock(folder, wait='converting'):
        write_splits(folder, source, data.splits_to_write(folder, shapes, attributes), nan_to_num)


def shapes_of(folder, source):
    """{split: shape of its file} of a Source; an InputError if the files in `folder` could not be read."""
    shapes = {split: (len(items), *source.shape) for split, items in source.items.items()}
    data.check_headers(folder, {split: (shape, np.dtype('f4'), source.attributes) for split, shape in shapes.items()})
    return shapes


def official(name, path):
    """The Source of a benchmark's download, with the splits and all attributes of our dataset."""
    dataset = DATASETS[name]
    source = OFFICIAL[name].source(name, path)
    channels = source.attributes.get('channels', dataset.channels)
    expected = dataset.frames, dataset.dims, len(channels)
    if (source.shape[0], len(source.shape) - 2, source.shape[-1]) != expected:
        refuse(path, '%d frames, %d dimensions, %d channels' % expected, f'the shape {source.shape}')
    attributes = dict(pde=OFFICIAL[name].pde, dt=dataset.dt, t_test=dataset.t_test, channels=channels,
                      static=[key for key in channels if key in dataset.static])
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


def read_blocks(source, items, nan_to_num, words):
    """(where in words, its place in the output, (t, *space, C) in float32, and as read) of parts of trajectories.

    words: beside the bar. Raises InputError for what is not real or has another shape.
    """
    total = 4 * len(items) * math.prod(source.shape)
    with Progress(total=total, unit='B', unit_scale=True, desc=words) as bar:
        for path, place, n, t in block_slices(items, source.shape):
            where = f'{path}, trajectory {n.start}'
            shape = (n.stop - n.start, t.stop - t.start, *source.shape[1:])
            with naming(f'--source {where}', DAMAGED):
                block = source.read(path, n, t)
            if block.dtype.kind not in 'fiub':
                refuse(where, 'real numbers', block.dtype)
            if block.shape != shape:
                refuse(where, shape[1:], block.shape[1:])
            with np.errstate(over='ignore'):
                rounded = block.astype(np.float32, copy=False)
            rounded = np.nan_to_num(rounded) if nan_to_num else rounded
            for i in range(len(block)):
                yield f'{path}, trajectory {n.start + i}', (place.start + i, t), rounded[i], block[i]
            bar.update(rounded.nbytes)


def write_splits(folder, source, splits, nan_to_num):
    """Write splits of a Source into files, which appear when all are whole. InputError: values that are not finite."""
    with ExitStack() as stack:
        outputs = {}
        for split in sorted(splits, key=data.SPLITS.index, reverse=True):       # the last to appear is train.h5
            shape = len(source.items[split]), *source.shape
            print(f'{folder.name} {split} {shape} from {source.attributes["source"]}')
            outputs[split] = stack.enter_context(data.writer(folder / f'{split}.h5', shape, **source.attributes))
        for split, file in outputs.items():
            for where, place, block, _ in read_blocks(source, source.items[split], nan_to_num, 'writing'):
                if not np.isfinite(block).all():
                    refuse(where, 'finite values', 'nan or infinity',
                           'it is damaged or was published so; --nan_to_num writes 0 for nan')
                file['data'][place] = block


# ------------------------------------------------------------------------------------------------ files of one's own

def survey(source, nan_to_num):
    """Read all trajectories once, and print range, mean and deviation of each channel, and what is odd.

    Returns the gaps (*space, C), which are nan in every frame, such as land, and the means (C,). Raises
    InputError for other values that are not finite.
    """
    T, *space, C = source.shape
    names = source.attributes['channels']
    evolving = [c for c, name in enumerate(names) if name not in source.attributes['static']]
    axes = tuple(range(1, 1 + len(space)))
    gaps = shift = None
    low = np.full((T, C), np.inf)
    high = np.full((T, C), -np.inf)
    still = np.ones((T, C), bool)                                   # whether a frame is the same everywhere
    count, total, squares, lost = np.zeros((4, C))
    frames = {split: set() for split in source.items}               # by their hashes
    for split, items in source.items.items():
        for where, (_, t), block, exact in read_blocks(source, items, nan_to_num, 'reading'):
            holes = np.isnan(block)
            gaps = holes[0] if gaps is None else gaps
            if (holes != gaps).any() or np.isinf(block).any() or gaps.reshape(-1, C).all(0).any():
                refuse(where, 'finite values, or nan at the same points of all frames', 'nan or infinity',
                       '--nan_to_num writes 0 for nan')
            least, most = (limit.reduce(block, axis=axes) for limit in (np.fmin, np.fmax))                  # (t, C)
            low[t] = np.fmin(low[t], least)
            high[t] = np.fmax(high[t], most)
            still[t] &= least == most
            shift = least[0].astype(np.float64) if shift is None else shift         # so that squares lose no digits
            values = np.where(gaps, 0, block - shift).reshape(-1, C)
            count += np.sum(~gaps.reshape(-1, C), 0) * len(block)
            total += values.sum(0)
            squares += np.square(values).sum(0)
            lost += np.where(np.isfinite(exact), exact - np.float64(block), 0).reshape(-1, C).var(0) * len(values)
            moving = (least < most)[:, evolving].any(1)
            frames[split] |= {hash(frame[..., evolving].tobytes()) for frame in block[moving]}
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean ** 2, 0))
    for c, name in enumerate(names):
        line = (f'  {name}: {low[:, c].min():.4g} to {high[:, c].max():.4g}, mean {mean[c] + shift[c]:.4g}, deviation '
                f'{deviation[c]:.4g}')
        if c in evolving and still[:, c].any():
            line += f'; the same everywhere in the frames {" ".join(map(str, np.flatnonzero(still[:, c])[:10]))}'
        print(line)
        if lost[c] > 1e-6 * count[c] * deviation[c] ** 2:
            warn(f'{name}: float32 rounds it by more than a thousandth of its deviation; subtract its mean')
    twice = len(frames['test'] & frames['train'])
    if twice:
        warn(f'{twice} of {len(frames["test"])} frames of the test set are in the training set as well, as of windows '
             f'that overlap; --split order, or --frames on the uncut trajectories, keeps them apart')
    return gaps, mean + shift


def fill(source, gaps, means):
    """The Source with the means of the channels in its gaps, and a static channel `mask`, which is 0 there."""
    mask = np.float32(~gaps.any(-1, keepdims=True))
    print(f'{1 - mask.mean():.1%} of the points are gaps in all frames: they get the mean of their channel, and 0 in '
          f'the static channel mask')

    def read(path, n, t):
        block = np.where(gaps, means, source.read(path, n, t))
        return np.concatenate([block, np.broadcast_to(mask, (*block.shape[:-1], 1))], -1)
    channels, static = ([*source.attributes[key], 'mask'] for key in ('channels', 'static'))
    return source._replace(shape=(*source.shape[:-1], len(channels)), read=read,
                           attributes=source.attributes | dict(channels=channels, static=static))


def convert_own(name, sources, own, folder, nan_to_num):
    """Write folder/name/test.h5, train.h5 and perhaps valid.h5 from files of one's own, and print what was read.

    The files are read twice, so that nothing is written of what is refused. Raises InputError for a
    dataset that exists.
    """
    if name in ('', '..') or Path(name).name != name:
        raise InputError(f'{name!r}: expected the name of a folder in --data')
    folder = Path(folder, name)
    for path in [path for path in folder.glob('*.h5') if path.stem in data.SPLITS]:
        raise InputError(f'{path}: exists; remove it, or choose another name or --data')
    source = own_source(sources, own)
    shapes_of(folder, source)
    gaps, means = survey(source, nan_to_num)
    source = fill(source, gaps, means) if gaps.any() else source
    shapes = shapes_of(folder, source)
    with lock(folder):
        write_splits(folder, source, shapes, nan_to_num)


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('name', help='a dataset of configs.py; with --from or --layout, any name')
    parser.add_argument('--source', metavar='X', required=True, nargs='+', help='the file or folder, as downloaded')
    parser.add_argument('--from', dest='origin', choices=['the_well'], help="a dataset in The Well's form")
    parser.add_argument('--data', default='data', metavar='X', help='folder of the datasets [data]')
    parser.add_argument('--nan_to_num', action='store_true', help="write 0 for nan, as The Well's loader does")
    parser.add(Own(), 'files of your own')
    args = parser.parse_args()
    mine = [f'--{name}' for name in vars(Own()) if name in args and not (args.origin and name == 'uneven')]
    if not args.origin and args.name not in OFFICIAL or '--layout' in mine and not args.origin:
        if not mine and Path(args.source[0]).suffix.lower() not in KINDS:
            raise InputError(f'unknown dataset {args.name!r}{configs.nearest(args.name, OFFICIAL)}; for files of your '
                             f'own give --layout, such as NTHWC')
        convert_own(args.name, args.source, configs.override(Own(), args), args.data, args.nan_to_num)
        return
    if mine or len(args.source) > 1:
        raise InputError(f'{mine[0] if mine else "--source"}: for files of your own, with --layout; a benchmark is one '
                         f'file or folder')
    convert(args.name, args.source[0], args.data, args.origin == 'the_well', args.nan_to_num, 'uneven' in args)


if __name__ == '__main__':
    terminal.cli(main)
