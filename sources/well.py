"""The Well's datasets as a source for sources/prepare.py: 2-D and 3-D fields on Cartesian grids.

A file has fields of order 0, 1 and 2 (scalars, vectors, tensors) in the groups t0_fields, t1_fields, t2_fields. The
shape of one is [N if sample_varying] + [T if time_varying] + [each grid axis that dim_varying names] + (D,) * order;
axes that are missing are filled up by repetition. Fields that do not vary in time become static channels.

Shapes: N trajectories of a file, T frames, D dimensions of space, C channels.
"""
import json
import math
from itertools import product
from pathlib import Path
from typing import NamedTuple

from configs import DATASETS, InputError, show

import h5py
import numpy as np

from data import SPLITS, texts
from sources.downloads import AGAIN, Source, open_hdf5, refuse

GROUPS = ('boundary_conditions', 'dimensions', 'scalars', 't0_fields', 't1_fields', 't2_fields')


class Contents(NamedTuple):
    """What one file says of itself."""
    form: tuple                     # dataset_name, grid and fields, which are equal in all files
    frames: int
    dt: np.ndarray                  # (N,)
    scalars: dict                   # {name: does it vary in time}
    boundaries: str                 # in words
    parameters: dict                # {name: value}


class Field(NamedTuple):
    """One field of a file."""
    place: str                      # the name of its HDF5 dataset
    channels: tuple                 # names of its components, those of a tensor row by row
    static: bool

    def __str__(self):
        return ' '.join(self.channels) + ' (static)' * self.static


def attribute(item, key):
    """The attribute `key` of an HDF5 object as Python has it. Raises InputError if there is none."""
    if key not in item.attrs:
        refuse(item.file.filename, f"the attribute '{key}' of {item.name}, as The Well has it", 'none')
    value = np.asarray(item.attrs[key]).tolist()
    return value.decode() if isinstance(value, bytes) else value


def varying(item, dims=0):
    """Whether an HDF5 dataset has an axis for trajectories, for frames and for each dimension: a list of 2 + dims."""
    keys = ('sample_varying', 'time_varying', *['dim_varying'] * (dims > 0))
    return [bool(flag) for key in keys for flag in np.ravel(attribute(item, key))]


def part_of(item, sizes, parts):
    """A part of an HDF5 dataset with all axes: those that it lacks have the length 1, its components come last.

    sizes: the length of each part (trajectories, frames); or of these and the axes of space. parts: slices of the first
    two axes.
    """
    flags = varying(item, len(sizes) - 2)
    values = item[tuple(part for part, varies in zip(parts, flags) if varies)]
    return np.reshape(values, [size if varies else 1 for size, varies in zip(sizes, flags)] + [-1])


def listed(file, group, sizes, components=1):
    """(name, HDF5 dataset) of all that a group lists. Raises InputError if one is absent or does not have its shape."""
    for name in texts(attribute(file[group], 'field_names')):
        item = file[group].get(name)
        if not isinstance(item, h5py.Dataset):
            refuse(file.filename, f'{group}/{name}, which {group} lists', ' '.join(file[group]) or 'nothing', AGAIN)
        shape = tuple(size for size, varies in zip(sizes, varying(item, len(sizes) - 2)) if varies)
        if item.shape[:len(shape)] != shape or math.prod(item.shape[len(shape):]) != components:
            refuse(file.filename, f'{item.name} {shape} x {components}, as its attributes say', item.shape, AGAIN)
        if item.dtype.kind not in 'fiub':
            refuse(file.filename, f'real numbers in {item.name}', item.dtype, 'such a dataset cannot be converted')
        yield name, item


def fields_of(file, sizes, axes):
    """The fields of a file as a tuple of Field, in the order of their channels: first those that vary in time."""
    fields = []
    for order, group in enumerate(GROUPS[3:]):
        suffixes = [''.join(suffix) for suffix in product(axes, repeat=order)]
        for name, item in listed(file, group, sizes, len(suffixes)):
            channels = tuple(f'{name}_{suffix}' if suffix else name for suffix in suffixes)
            fields.append(Field(item.name, channels, not varying(item)[1]))
    return tuple(sorted(fields, key=lambda field: field.static))


def frame_distance(path, time):
    """The time between two frames of each trajectory, from the array `time` (T) or (N, T): float64 (1) or (N).

    Raises InputError if it is not finite and constant, but for the rounding of `time`, which is float32.
    """
    if time.dtype.kind not in 'fiu' or not np.isfinite(time).all():
        refuse(path, 'finite numbers in dimensions/time', f'{time.dtype} {np.ravel(time)[:8].tolist()}',
               'such a dataset cannot be converted')
    times = np.atleast_2d(np.float64(time))
    dt = (times[:, -1] - times[:, 0]) / max(times.shape[1] - 1, 1)
    rounding = 1e-3 * dt[:, None] + 4 * np.spacing(np.float32(abs(times).max()))
    if not (dt > 0).all() or (abs(np.diff(times) - dt[:, None]) > rounding).any():
        refuse(path, 'at least two frames at a constant distance in dimensions/time', times[0, :8].tolist(),
               'such a dataset cannot be converted')
    return dt


def read_contents(path):
    """The Contents of one file. Raises InputError, which names the file, for what sources/prepare.py cannot convert."""
    with open_hdf5(path) as file:
        lacking = [group for group in GROUPS if group not in file]
        if lacking:
            refuse(path, f'groups {" ".join(GROUPS)}, as The Well has them', f'no {" ".join(lacking)}')
        kind, D, name = (attribute(file, key) for key in ('grid_type', 'n_spatial_dims', 'dataset_name'))
        if kind.lower() != 'cartesian' or D not in (2, 3):
            refuse(path, 'a Cartesian grid of two or three dimensions', f'{kind}, {D} dimensions',
                   'this dataset cannot be converted')
        dimensions, N = file['dimensions'], attribute(file, 'n_trajectories')
        axes, T = texts(attribute(dimensions, 'spatial_dims')), dimensions['time'].shape[-1]
        grid = tuple(dimensions[axis].shape[-1] for axis in axes)
        dt = np.broadcast_to(frame_distance(path, dimensions['time'][()]), N)
        sides = sorted(f'{" ".join(texts(attribute(side, "associated_dims")))} {attribute(side, "bc_type").upper()}'
                       for side in file['boundary_conditions'].values())
        scalars = {scalar: varying(item)[1] for scalar, item in listed(file, 'scalars', (N, T))}
        return Contents((name, grid, fields_of(file, (N, T, *grid), axes)), T, dt, scalars, ', '.join(sides),
                        {key: attribute(file, key) for key in texts(attribute(file, 'simulation_parameters'))})


def find_files(source):
    """{split: files sorted by name} of a dataset: `source` or its folder data has the folders train, valid and test."""
    base = source / 'data' if (source / 'data').is_dir() else source
    files = {split: sorted(path for path in (base / split).glob('*') if path.suffix in ('.h5', '.hdf5'))
             for split in SPLITS}
    if not files['train'] or not files['test']:
        refuse(source, 'HDF5 files in its folders data/train, data/test and perhaps data/valid',
               ', '.join(f'{len(paths)} in {split}' for split, paths in files.items()),
               'give the folder of one dataset')
    return {split: paths for split, paths in files.items() if paths}


def the_well(name, source):
    """A dataset of The Well: the components of its fields are channels, and its splits stay as they are.

    If trajectories differ in length, all are cut to the shortest, which is printed. The axes stay as they are; the
    coordinates and the masks of the boundary conditions are left out. Kept beside `data` are the scalars and those
    parameters that are no scalars, and frame_dt if the time between two frames differs between trajectories.
    """
    if name in DATASETS:
        raise InputError(f"{name} is one of the paper's datasets; choose another name for a dataset of The Well")
    files = find_files(source)
    found = {path: read_contents(path) for paths in files.values() for path in paths}
    first, *_ = found.values()
    (title, grid, fields), lengths = first.form, [contents.frames for contents in found.values()]
    for path, contents in found.items():
        if contents.form != first.form:
            refuse(path, *(f'{title} on {show(grid)} with {" ".join(map(str, fields))}'
                           for title, grid, fields in (first.form, contents.form)), 'remove what is of another dataset')
    channels = tuple(channel for field in fields for channel in field.channels)
    T, steps = min(lengths), np.concatenate([contents.dt for contents in found.values()])
    if T < max(lengths):
        print(f'{source}: trajectories of {T} to {max(lengths)} frames, of which the first {T} are taken')
    even = steps.max() / steps.min() < 1 + 1e-3
    scalars = {key: any(contents.scalars.get(key) for contents in found.values())
               for contents in found.values() for key in contents.scalars}

    def read(file, n, t):
        sizes, first = (n.stop - n.start, t.stop - t.start, *grid), 0
        block = np.empty((*sizes, len(channels)), np.float32)
        for field in fields:
            last = first + len(field.channels)
            block[..., first:last] = part_of(file[field.place], sizes, (n, t))
            first = last
        return block

    def extra(file, n):
        contents, count = found[Path(file.filename)], n.stop - n.start
        values = {key: [value] * count for key, value in contents.parameters.items() if key not in scalars}
        for key in contents.scalars:
            value = np.broadcast_to(part_of(file['scalars'][key], (count, T), (n, slice(T)))[..., 0], (count, T))
            values[key] = value if scalars[key] else value[:, 0]
        return values if even else {**values, 'frame_dt': contents.dt[n]}
    parameters = {}
    for key, value in (item for contents in found.values() for item in contents.parameters.items()):
        if value not in parameters.setdefault(key, []):
            parameters[key].append(value)
    for path, contents in found.items():
        for key, value in contents.parameters.items():
            (shape, text), *_ = forms = [(np.shape(item), np.asarray(item).dtype.kind in 'SU')
                                         for item in (parameters[key][0], value)]
            if forms[0] != forms[1]:
                refuse(path, f'the parameter {key} with the shape {shape} and {"text" if text else "numbers"}, as in '
                             f'other files', value)
    about = dict(channels=channels, dt=float(np.median(steps)) if even else 1.0, pde=f'The Well, {title}',
                 boundary_conditions=sorted({c.boundaries for c in found.values()}),
                 parameters=json.dumps(parameters),
                 static=[channel for field in fields if field.static for channel in field.channels])
    items = {split: [(path, i) for path in paths for i in range(len(found[path].dt))] for split, paths in files.items()}
    return Source(f'The Well, {title}: {len(found)} files', (T, *grid, len(channels)), items, read, channels=channels,
                  extra=extra, about=about)
