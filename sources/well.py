"""The Well's datasets as a Source of formats.py.

A file of The Well has fields of order 0, 1 and 2 (scalars, vectors, tensors) in the groups
t0_fields, t1_fields and t2_fields. The shape of a field is [N if sample_varying] + [T if
time_varying] + [each grid axis that dim_varying names] + (D,) * order. Missing axes are filled up
by repetition. Fields that do not vary in time become static channels.
"""
from itertools import product

import numpy as np

from data import SPLITS
from runtime.stored import names_of, whole
from sources.formats import Source, even, open_hdf5, refuse


def varying(item):
    """Whether an HDF5 dataset has each of the axes: trajectories, frames and those of space."""
    keys = 'sample_varying', 'time_varying', 'dim_varying'
    return [bool(flag) for key in keys for flag in np.ravel(item.attrs[key])]


def part_of(item, sizes, parts):
    """Slices of the first two axes of an HDF5 dataset -> (*sizes, C); 1: axes it lacks."""
    flags = varying(item)
    values = item[tuple(part for part, varies in zip(parts, flags) if varies)]
    return np.reshape(values, [size if varies else 1 for size, varies in zip(sizes, flags)] + [-1])


def fields_of(file, axes):
    """(HDF5 name, channels, whether static) of all fields, those that vary first."""
    fields = []
    for order in range(3):
        suffixes = [''.join(suffix) for suffix in product(axes, repeat=order)]
        group = file[f't{order}_fields']
        for name in names_of(group.attrs['field_names']):
            item = group[name]
            channels = tuple(f'{name}_{suffix}' if suffix else name for suffix in suffixes)
            fields.append((item.name, channels, not varying(item)[1]))
    return sorted(fields, key=lambda field: field[2])


def read_contents(path, uneven):
    """(dataset_name, grid, fields), which all files share, then T and dt (N,)."""
    with open_hdf5(path) as file:
        kind, name = (names_of(file.attrs[key])[0] for key in ('grid_type', 'dataset_name'))
        dimensions = file['dimensions']
        axes = names_of(dimensions.attrs['spatial_dims'])
        if kind.lower() != 'cartesian' or len(axes) not in (2, 3):
            refuse(path, 'a Cartesian grid of two or three dimensions', f'{kind}, {axes}', 'it cannot be converted')
        T, *grid = (dimensions[axis].shape[-1] for axis in ('time', *axes))
        time = np.atleast_2d(dimensions['time'])                                  # (1, T) or (N, T)
        for points in [] if uneven else [*time, *(np.ravel(dimensions[axis]) for axis in axes)]:
            if not even(points):
                refuse(path, 'even times and grid points', f'{points[:5]} ...', '--uneven takes them as even')
        dt = np.broadcast_to((time[:, -1] - time[:, 0]) / (T - 1), file.attrs['n_trajectories'])
        return (name, tuple(grid), fields_of(file, axes)), T, dt


def the_well(source, uneven=False):
    """A dataset of The Well, with its own splits and axes, cut to the shortest trajectory.

    Its scalars are left out. `dt` is the mean time between two frames. Uneven times or grid points,
    and a dt that differs, are refused, or taken as even; dt is 1 then.
    """
    base = source / 'data' if (source / 'data').is_dir() else source
    files = {split: sorted((base / split).glob('[!.]*.h*5')) for split in SPLITS}
    if not (files['train'] and files['test']):
        refuse(source, 'HDF5 files in its folders data/train, data/test and perhaps data/valid',
               [split for split in files if files[split]], 'name it')
    contents_of = {path: read_contents(path, uneven) for paths in files.values() for path in paths}
    layouts, lengths, dts = zip(*contents_of.values())
    for path, layout in zip(contents_of, layouts):
        if layout != layouts[0]:
            refuse(path, layouts[0], layout, 'remove what is of another dataset')
    title, grid, fields = layouts[0]
    channels = [channel for _, names, _ in fields for channel in names]
    static = [channel for _, names, is_static in fields if is_static for channel in names]
    T = min(lengths)
    dt = np.concatenate(dts)
    if T < max(lengths):
        print(f'{source}: trajectories of {T} to {max(lengths)} frames, of which the first {T} are taken')
    same = dt.max() / dt.min() < 1 + 1e-3
    if not (same or uneven):
        refuse(source, 'one time between frames', f'{dt.min():g} to {dt.max():g}', '--uneven takes them as one')

    def read(path, n, t):
        sizes = n.stop - n.start, t.stop - t.start, *grid
        with open_hdf5(path) as file:
            parts = [part_of(whole(file, place), sizes, (n, t)) for place, *_ in fields]
        return np.concatenate([np.broadcast_to(part, (*sizes, part.shape[-1])) for part in parts], -1)
    items = {split: [(path, i) for path in paths for i in range(len(contents_of[path][2]))]
             for split, paths in files.items() if paths}
    attributes = dict(channels=channels, static=static, dt=float(np.median(dt)) if same else 1.0,
                      pde=f'The Well, {title}', source=source.resolve().name)
    return Source((T, *grid, len(channels)), items, read, attributes)
