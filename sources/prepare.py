"""Convert public benchmark downloads into the layout of data.py.

    python -m sources.prepare swe_pdb --source 2D_rdb_NA_NA.h5      a file or a folder, into data/swe_pdb/
    python -m sources.prepare layer --source turbulent_radiative_layer_2D --from the_well  a dataset of The Well
    python -m sources.prepare mine --source u.npz --layout NTCHW --channels p v c           files of your own

Of your own files, .npy .npz .mat .nc .h5, --layout names the axes in their order: N trajectories, T
frames, H W D (or X Y Z) in space, C channels. Several --variables, or several files, are channels
of one, and a variable without N and T is a static channel. Of a benchmark, the first trajectories
of a file are for training, and those that it reserves at its end for testing.
"""
import math
from itertools import groupby
from pathlib import Path

import numpy as np

import configs
import data
from configs import DATASETS, InputError
from runtime import terminal
from runtime.files import lock, naming
from runtime.terminal import Progress
from sources import own
from sources.formats import DAMAGED, OFFICIAL, refuse
from sources.well import the_well

BLOCK = 2 ** 26                                         # bytes that are read at once, as float32


def convert(name, path, folder='data', well=False, nan_to_num=False):
    """Write folder/name/test.h5, train.h5 and perhaps valid.h5, unless they exist, from a download.

    path: the file or folder.
    well: whether it is a dataset of The Well, of any name.
    nan_to_num: write 0 for nan.
    Raises InputError for another download.
    """
    path = Path(path)
    folder = Path(folder) / name
    source = the_well(path) if well else official(name, path)
    shapes = {split: (len(items), *source.shape) for split, items in source.items.items()}
    attributes = dict(source=(path if path.is_file() else path.resolve()).name) | source.attributes
    data.check_headers(folder, {split: (shape, np.dtype('f4'), attributes) for split, shape in shapes.items()})
    with lock(folder, wait='converting'):
        for split in data.splits_to_write(folder, shapes, attributes):
            print(f'{name} {split} {shapes[split]} from {attributes["source"]}')
            with data.writer(folder / f'{split}.h5', shapes[split], **attributes) as output:
                copy_trajectories(source, source.items[split], output['data'], nan_to_num)


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


def copy_trajectories(source, items, output, nan_to_num):
    """Copy trajectories into an HDF5 dataset. InputError: not real or not finite."""
    with Progress(total=output.nbytes, unit='B', unit_scale=True) as bar:
        for path, place, n, t in block_slices(items, source.shape):
            where = f'{path}, trajectory {n.start}'
            shape = (n.stop - n.start, t.stop - t.start, *source.shape[1:])
            with naming(f'--source {where}', DAMAGED):
                block = source.read(path, n, t)
            if block.dtype.kind not in 'fiub':
                refuse(where, 'real numbers', block.dtype)
            if block.shape != shape:
                refuse(where, shape[1:], block.shape[1:])
            block = block.astype(np.float32, copy=False)
            if nan_to_num:
                block = np.nan_to_num(block)
            for i, trajectory in enumerate(block, n.start):
                if not np.isfinite(trajectory).all():
                    refuse(f'{path}, trajectory {i}', 'finite values', 'nan or infinity',
                           'it is damaged or was published so; --nan_to_num writes 0 for nan')
            output[place, t] = block
            bar.update(block.nbytes)


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('name', help='a dataset of configs.py; with --from or --layout, any name')
    parser.add_argument('--source', metavar='X', required=True, nargs='+', help='the file or folder, as downloaded')
    parser.add_argument('--from', dest='origin', choices=['the_well'], help="a dataset in The Well's form")
    parser.add_argument('--data', default='data', metavar='X', help='folder of the datasets [data]')
    parser.add_argument('--nan_to_num', action='store_true', help="write 0 for nan, as The Well's loader does")
    mine = parser.add_argument_group('files of your own')
    mine.add_argument('--layout', default='', metavar='AXES', help='the axes of an array in their order, such as NTCHW')
    mine.add_argument('--variables', default=(), nargs='+', metavar='X', help='those to read; default: the only one')
    mine.add_argument('--channels', default=(), nargs='+', metavar='X', help='their names; default: of the variables')
    mine.add_argument('--dt', type=float, default=1.0, metavar='X', help='the time between two frames [1]')
    for split in 'valid', 'test':
        mine.add_argument(f'--{split}', type=float, default=0.1, metavar='X', help='share of the trajectories [0.1]')
    mine.add_argument('--seed', type=int, default=0, metavar='N', help='that draws them [0]')
    args = parser.parse_args()
    if args.layout or not args.origin and args.name not in OFFICIAL and Path(args.source[0]).suffix in own.KINDS:
        own.convert_own(args.name, args)
        return
    if not args.origin and args.name not in OFFICIAL:
        raise InputError(f'unknown dataset {args.name!r}{configs.nearest(args.name, OFFICIAL)}; for files of your own '
                         f'give --layout, such as NTHWC')
    if len(args.source) > 1:
        raise InputError('--source: one file or folder, or --layout for files of your own')
    convert(args.name, args.source[0], args.data, args.origin == 'the_well', args.nan_to_num)


if __name__ == '__main__':
    terminal.cli(main)
