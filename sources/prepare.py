"""Convert public benchmark downloads into the layout of data.py.

    python -m sources.prepare swe_pdb --source 2D_rdb_NA_NA.h5      a file or a folder, into data/swe_pdb/
    python -m sources.prepare swe_pdb --source dpot/swe_pdb --from dpot  a dataset that DPOT's scripts have converted
    python -m sources.prepare layer --source turbulent_radiative_layer_2D --from the_well  a dataset of The Well

The first trajectories of a file are for training, and those that the benchmark reserves at its end for testing.
"""
import math
from itertools import groupby
from pathlib import Path

import numpy as np

import configs
import data
from configs import DATASETS, InputError
from data import SPLITS, writer
from runtime import terminal
from runtime.files import lock
from runtime.terminal import Progress
from sources.formats import OFFICIAL, dpot, read_block, refuse
from sources.generate import missing
from sources.pdes import FAMILIES
from sources.well import the_well

BLOCK = 2 ** 26                                         # bytes that are read at once, as float32
ORIGINS = {'dpot': dpot, 'the_well': the_well}          # datasets of any name, which are split already


def convert(name, path, folder='data', origin='', nan_to_num=False):
    """Write folder/name/test.h5, train.h5 and perhaps valid.h5, unless they exist, from the download at `path`.

    origin: one of ORIGINS; nan_to_num: write 0 for nan. Raises InputError if the download is not what they say.
    """
    path = Path(path)
    folder = Path(folder) / name
    source = (ORIGINS[origin] if origin else OFFICIAL[name].source)(name, path)
    parts = split_trajectories(name, source)
    shapes = {part: (len(items), *source.shape) for part, items in parts.items()}
    if not all(parts.values()):
        refuse(path, 'at least one trajectory for training and one for testing', shapes, 'download more')
    files = {file for items in parts.values() for file, _ in items}
    attributes = dict(source=(files.pop() if len(files) == 1 else path.resolve()).name, pde='', dt=1.0)
    dataset = DATASETS.get(name)
    if dataset:
        channels = source.attributes.get('channels', dataset.channels)
        expected = dataset.frames, dataset.dims, len(channels)
        if (source.shape[0], len(source.shape) - 2, source.shape[-1]) != expected:
            refuse(path, '%d frames, %d dimensions, %d channels' % expected, f'the shape {source.shape}')
        attributes |= dict(pde=OFFICIAL[name].pde or FAMILIES[name].pde, dt=dataset.dt, t_test=dataset.t_test,
                           channels=channels, static=[key for key in channels if key in dataset.static])
    attributes |= source.attributes
    source = source._replace(nan_to_num=nan_to_num)
    data.check(folder, {part: (shape, np.dtype('f4'), attributes) for part, shape in shapes.items()})
    todo = missing(folder, shapes, attributes)
    for part in parts:
        remark = '' if part in todo else ', exists'
        print(f'{name} {part} {shapes[part]} from {attributes["source"]}{remark}')
    with lock(folder, wait='converting'):
        for part in todo:
            with writer(folder / f'{part}.h5', shapes[part], **attributes) as output:
                copy_trajectories(source, parts[part], output, f'{name} {part}')


def split_trajectories(name, source):
    """{split: [(file, index)]}, as many as the paper uses, or in the same proportion if there are fewer."""
    dataset = DATASETS.get(name)
    items = source.items
    if isinstance(items, dict):             # all of CFDBench: the paper's sizes cut off most of the tube
        return {split: items[split][:None if name == 'cfdbench' else getattr(dataset, split, None)]
                for split in SPLITS if split in items}
    test = min(dataset.test, max(1, round(len(items) * dataset.test / (dataset.train + dataset.test))))
    start = max(0, len(items) - (OFFICIAL[name].tail if len(items) >= OFFICIAL[name].count else test))
    return {'test': items[start:start + test], 'train': items[:min(dataset.train, start)]}


def block_slices(items, shape):
    """Cut [(file, index)] into blocks of at most BLOCK bytes -> (file, slice of places in items, n, t)."""
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


def copy_trajectories(source, items, output, title):
    """Copy the trajectories `items` of the source into the open file `output`."""
    with Progress(total=output['data'].nbytes, desc=title, unit='B', unit_scale=True) as bar:
        for path, place, n, t in block_slices(items, source.shape):
            with source.open(path) as file:
                block = read_block(source, path, file, n, t)
            output['data'][place, t] = block
            bar.update(block.nbytes)


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('name', help='a dataset of configs.py; with --from, any name')
    parser.add_argument('--source', metavar='X', required=True, help='the file or folder as it was downloaded')
    parser.add_argument('--from', dest='origin', default='', choices=ORIGINS, help='stored as by DPOT or The Well')
    parser.add_argument('--data', default='data', metavar='X', help='folder of the datasets [data]')
    parser.add_argument('--nan_to_num', action='store_true', help="write 0 for nan, as The Well's loader does")
    args = parser.parse_args()
    if not args.origin and args.name not in OFFICIAL:
        raise InputError(f'unknown dataset {args.name!r}{configs.nearest(args.name, OFFICIAL)}')
    convert(args.name, args.source, args.data, args.origin, args.nan_to_num)


if __name__ == '__main__':
    terminal.cli(main)
