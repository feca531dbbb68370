"""The Well's datasets as a Source.

A file of The Well has fields of order 0, 1 and 2 (scalars, vectors, tensors) in the groups
t0_fields, t1_fields and t2_fields. The shape of a field is [N if sample_varying] + [T if
time_varying] + [each grid axis that dim_varying names] + (D,) * order. Missing axes are filled up
by repetition. Fields that do not vary in time become static channels.
"""
from itertools import product

import numpy as np

from data import SPLITS
from runtime.stored import names_of
from sources.formats import open_hdf5, refuse
from sources.own import Own, Piece, Source, find_runs, reader


def fields_of(path):
    """(dataset_name, {HDF5 name: its axes}, {HDF5 name: its channels}) of all fields, those that vary first."""
    axes_of, channels_of = {}, {}
    with open_hdf5(path) as file:
        kind, title = (names_of(file.attrs[key])[0] for key in ('grid_type', 'dataset_name'))
        space = names_of(file['dimensions'].attrs['spatial_dims'])
        if kind.lower() != 'cartesian' or len(space) not in (2, 3):
            refuse(path, 'a Cartesian grid of two or three dimensions', f'{kind}, {space}', 'it cannot be converted')
        for order in range(3):
            for name in names_of(file[f't{order}_fields'].attrs['field_names']):
                key = f't{order}_fields/{name}'
                varies = np.hstack([file[key].attrs[f'{what}_varying'] for what in ('sample', 'time', 'dim')])
                axes_of[key] = ''.join(axis for axis, flag in zip('NTXYZ', varies) if flag) + 'CK'[:order]
                suffixes = [''.join(some) for some in product(space, repeat=order)]
                channels_of[key] = [f'{name}_{suffix}'.strip('_') for suffix in suffixes]
    axes_of = dict(sorted(axes_of.items(), key=lambda item: 'T' not in item[1]))
    return title, len(space), axes_of, channels_of


def the_well(source, uneven=False):
    """A dataset of The Well, with its own splits and axes, cut to the shortest trajectory.

    Its scalars are left out. Uneven times or grid points, and a time between frames that differs,
    are refused, or with `uneven` taken as even.
    """
    base = source / 'data' if (source / 'data').is_dir() else source
    files = {split: sorted((base / split).glob('[!.]*.h*5')) for split in SPLITS}
    if not (files['train'] and files['test']):
        refuse(source, 'HDF5 files in its folders data/train, data/test and perhaps data/valid',
               [split for split in files if files[split]], 'name it')
    paths = sum(files.values(), [])
    form = title, dims, axes_of, channels_of = fields_of(paths[0])
    for path in paths:
        if fields_of(path) != form:
            refuse(path, form, fields_of(path), 'remove what is of another dataset')
    layout = ['NTXYZ'[:2 + dims], *(f'{name}={axes}' for name, axes in axes_of.items())]
    runs = find_runs(paths, Own(layout=tuple(layout), variables=tuple(axes_of), uneven=uneven))
    lengths = [length for *_, length in runs.trajectories]
    if min(lengths) < max(lengths):
        print(f'{source}: trajectories of {min(lengths)} to {max(lengths)} frames, of which the first '
              f'{min(lengths)} are taken')
    items = {split: [(Piece(parts), n) for parts, n, _ in runs.trajectories if parts[0][0] in files[split]]
             for split in SPLITS if files[split]}
    channels = [channel for name in axes_of for channel in channels_of[name]]
    static = [channel for name, axes in axes_of.items() if 'T' not in axes for channel in channels_of[name]]
    attributes = dict(channels=channels, static=static, dt=runs.dt or 1.0, pde=f'The Well, {title}',
                      source=source.resolve().name)
    return Source((min(lengths), *runs.grid, len(channels)), items, reader(runs), attributes)
