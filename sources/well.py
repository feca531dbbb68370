"""The Well's datasets as a Source of formats.py.

A file of The Well has fields of order 0, 1 and 2 (scalars, vectors, tensors) in the groups t0_fields, t1_fields and
t2_fields. The shape of a field is [N if sample_varying] + [T if time_varying] + [each grid axis that dim_varying names]
+ (D,) * order: N trajectories of a file, T frames, D dimensions; n and t are slices of trajectories and frames. Missing
axes are filled up by repetition. Fields that do not vary in time become static channels.
"""
import math
from itertools import product

import numpy as np

from configs import DATASETS, InputError
from data import SPLITS, names_of, stored
from sources.formats import Source, open_hdf5, refuse


def attribute(item, key):
    value = np.asarray(item.attrs[key]).tolist()
    return value.decode() if isinstance(value, bytes) else value


def varying(item, sizes):
    """Whether an HDF5 dataset has each of the axes of `sizes`: trajectories, frames and perhaps those of space."""
    keys = ('sample_varying', 'time_varying', 'dim_varying')[:len(sizes)]
    return [bool(flag) for key in keys for flag in np.ravel(attribute(item, key))]


def part_of(item, sizes, parts):
    """Slices of the first two axes of an HDF5 dataset -> (*sizes, C), where axes that it lacks have length 1."""
    flags = varying(item, sizes)
    values = item[tuple(part for part, varies in zip(parts, flags) if varies)]
    return np.reshape(values, [size if varies else 1 for size, varies in zip(sizes, flags)] + [-1])


def items_of(file, group, sizes, components):
    """(name, HDF5 dataset) of all that a group lists, which must have the shapes that their attributes say."""
    for name in names_of(attribute(file[group], 'field_names')):
        item = file[f'{group}/{name}']
        shape = tuple(size for size, varies in zip(sizes, varying(item, sizes)) if varies)
        if item.shape[:len(shape)] != shape or math.prod(item.shape[len(shape):]) != components:
            refuse(file.filename, f'{item.name} {shape} x {components}, as its attributes say', item.shape)
        yield name, item


def fields_of(file, sizes, axes):
    """(name of the HDF5 dataset, its channels, whether it is static) of all fields, first those that vary in time."""
    fields = []
    for order in range(3):
        suffixes = [''.join(suffix) for suffix in product(axes, repeat=order)]
        for name, item in items_of(file, f't{order}_fields', sizes, len(suffixes)):
            channels = tuple(f'{name}_{suffix}' if suffix else name for suffix in suffixes)
            fields.append((item.name, channels, not varying(item, sizes)[1]))
    return sorted(fields, key=lambda field: field[2])


def frame_distance(path, time):
    """The time between two frames, from the float32 array `time` (T) or (N, T), where it is constant: (1) or (N)."""
    times = np.atleast_2d(np.float64(time))
    dt = (times[:, -1] - times[:, 0]) / max(times.shape[1] - 1, 1)
    rounding = 1e-3 * dt[:, None] + 4 * np.spacing(np.float32(abs(times).max()))
    if not (dt > 0).all() or not (abs(np.diff(times) - dt[:, None]) <= rounding).all():
        refuse(path, 'at least two frames at a constant distance in dimensions/time', np.ravel(time)[:8].tolist())
    return dt


def read_contents(path):
    """(dataset_name, grid, fields), which all files share, T, dt (N,)."""
    with open_hdf5(path) as file:
        kind, name, N = (attribute(file, key) for key in ('grid_type', 'dataset_name', 'n_trajectories'))
        dimensions = file['dimensions']
        axes = names_of(attribute(file['dimensions'], 'spatial_dims'))
        if kind.lower() != 'cartesian' or len(axes) not in (2, 3):
            refuse(path, 'a Cartesian grid of two or three dimensions', f'{kind}, {axes}', 'it cannot be converted')
        T, *grid = (dimensions[axis].shape[-1] for axis in ('time', *axes))
        dt = np.broadcast_to(frame_distance(path, dimensions['time'][()]), N)
        return (name, tuple(grid), fields_of(file, (N, T, *grid), axes)), T, dt


def the_well(name, source):
    """A dataset of The Well: its splits and axes stay as they are, and all is cut to the shortest trajectory.

    Its scalars and parameters are left out. Where trajectories differ in the time between two frames, `dt` is 1.
    """
    if name in DATASETS:
        raise InputError(f"{name} is one of the paper's datasets; choose another name for a dataset of The Well")
    base = source / 'data' if (source / 'data').is_dir() else source
    files = {split: paths for split in SPLITS if (paths := sorted((base / split).glob('*.h*5')))}
    if not files.keys() >= {'train', 'test'}:
        refuse(source, 'HDF5 files in its folders data/train, data/test and perhaps data/valid', [*files], 'name it')
    contents_of = {path: read_contents(path) for paths in files.values() for path in paths}
    forms, lengths, dts = zip(*contents_of.values())
    for path, form in zip(contents_of, forms):
        if form != forms[0]:
            refuse(path, forms[0], form, 'remove what is of another dataset')
    title, grid, fields = forms[0]
    channels = [channel for _, names, _ in fields for channel in names]
    static = [channel for _, names, is_static in fields if is_static for channel in names]
    T = min(lengths)
    dt = np.concatenate(dts)
    if T < max(lengths):
        print(f'{source}: trajectories of {T} to {max(lengths)} frames, of which the first {T} are taken')
    even = dt.max() / dt.min() < 1 + 1e-3

    def read(file, n, t):
        sizes = n.stop - n.start, t.stop - t.start, *grid
        parts = [part_of(stored(file, place), sizes, (n, t)) for place, *_ in fields]
        return np.concatenate([np.broadcast_to(part, (*sizes, part.shape[-1])) for part in parts], -1)

    items = {split: [(path, i) for path in paths for i in range(len(contents_of[path][2]))]
             for split, paths in files.items()}
    return Source((T, *grid, len(channels)), items, read, attributes=dict(
        channels=channels, static=static, dt=float(np.median(dt)) if even else 1.0, pde=f'The Well, {title}'))
