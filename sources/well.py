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
from sources.own import Own, find_runs


def fields_of(path):
    """(dataset_name, D, {HDF5 name: axes}, {HDF5 name: channels}), the fields that vary first."""
    axes, channels = {}, {}
    with open_hdf5(path) as file:
        kind, title = (names_of(file.attrs[key])[0] for key in ('grid_type', 'dataset_name'))
        space = names_of(file['dimensions'].attrs['spatial_dims'])
        if kind.lower() != 'cartesian' or len(space) not in (2, 3):
            refuse(path, 'a Cartesian grid of two or three dimensions', f'{kind}, {space}',
                   'it cannot be converted')
        for order in range(3):
            for name in names_of(file[f't{order}_fields'].attrs['field_names']):
                key = f't{order}_fields/{name}'
                varies = np.hstack([file[key].attrs[flag] for flag in (
                    'sample_varying', 'time_varying', 'dim_varying')])
                axes[key] = ''.join(x for x, flag in zip('NTXYZ', varies) if flag) + 'CK'[:order]
                suffixes = [''.join(suffix) for suffix in product(space, repeat=order)]
                channels[key] = [f'{name}_{suffix}'.strip('_') for suffix in suffixes]
    axes = dict(sorted(axes.items(), key=lambda field: 'T' not in field[1]))
    return title, len(space), axes, channels


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
    fields = title, D, axes, channels = fields_of(paths[0])
    for path in paths:
        if fields_of(path) != fields:
            refuse(path, fields, fields_of(path), 'remove what is of another dataset')
    layout = ['NTXYZ'[:2 + D], *(f'{name}={its}' for name, its in axes.items())]
    runs = find_runs(paths, Own(layout=tuple(layout), variables=tuple(axes), uneven=uneven))
    longest = max(piece.frames for piece, _ in runs.items)
    if longest > runs.shape[0]:
        print(f'{source}: trajectories of {runs.shape[0]} to {longest} frames are cut to the shortest')
    items = {split: [(piece, n) for piece, n in runs.items if piece.parts[0][0] in files[split]]
             for split in SPLITS if files[split]}
    attributes = dict(channels=sum((channels[name] for name in axes), []), pde=f'The Well, {title}',
                      static=sum((channels[name] for name in axes if 'T' not in axes[name]), []),
                      dt=runs.attributes['dt'], source=source.resolve().name)
    return runs._replace(items=items, attributes=attributes)
