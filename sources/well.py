"""Opening a public download, with one line that says what is wrong with it; and The Well's datasets as a source.

A file of The Well has fields of order 0, 1 and 2 (scalars, vectors, tensors) in the groups t0_fields, t1_fields and
t2_fields. The shape of a field is [N if sample_varying] + [T if time_varying] + [each grid axis that dim_varying names]
+ (D,) * order; missing axes are filled up by repetition. Fields that do not vary in time become static channels.

Shapes: N trajectories of a file, T frames, D dimensions of space, C channels.
"""
import math
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

from configs import DATASETS, InputError, show

import h5py
import numpy as np

from data import SPLITS, texts
from runtime.files import naming

AGAIN = 'download it again'
DAMAGED = f'a truncated or damaged file; {AGAIN}'
SIGNATURES = {'HDF5': b'\x89HDF\r\n\x1a\n', 'MATLAB v5': b'MATLAB 5.0', 'NumPy': b'\x93NUMPY'}


# ------------------------------------------------------------------------------------------------ downloads

class Source(NamedTuple):
    """Which trajectories a download holds and how they are read."""
    description: str
    shape: tuple                    # (T, *space, C) of one trajectory, in our order
    items: object                   # [(file, index)] of all trajectories in order; {split: list} if it is split already
    read: object                    # (open file, slice of indices, slice of frames) -> (n, t, *space, C)
    open: object = lambda path: open_hdf5(path)         # file -> context of the open file
    channels: tuple = ()            # their names, if not those of configs.py
    dt: float = None                # time between two frames, if not that of configs.py
    extra: object = lambda file, indices: {}            # (open file, slice of indices) -> {name: n values}
    about: dict = {}                # further attributes of `data`
    nan_to_num: bool = False        # replace values that are not finite, or else refuse them


def refuse(path, expected, instead, advice="is it another benchmark's file?"):
    """Raise an InputError; `instead` is what there is, in words or as the exception of a reader."""
    if isinstance(instead, Exception):
        reason = (str(instead) or type(instead).__name__).splitlines()[0]
        instead, advice = f'a truncated or damaged file ({reason})', AGAIN
    raise InputError(f'--source {path}: expected {expected}, found {instead}; {advice}')


def file_format(path, *allowed):
    """Which of SIGNATURES a file has, by its first bytes, if it is one of those `allowed`."""
    with naming(f'--source {path}'), open(path, 'rb') as file:
        head = file.read(520)
    for name, signature in SIGNATURES.items():
        if head.startswith(signature) or head.startswith(signature, 512):       # MATLAB v7.3 has 512 bytes before HDF5
            return name if name in allowed else refuse(path, ' or '.join(allowed), name)
    kind = 'a web page' if head.lstrip().startswith(b'<') else f'the bytes {head[:8]!r}'
    if head.startswith(b'version https://git-lfs'):
        refuse(path, 'a data file', 'a git-lfs pointer', 'fetch the file with git lfs pull, or remove it')
    refuse(path, 'a data file', kind, AGAIN)


@contextmanager
def open_hdf5(path):
    """An HDF5 file, as netCDF-4 and MATLAB v7.3 are, too."""
    file_format(path, 'HDF5')
    with naming(f'--source {path}', DAMAGED), h5py.File(path, 'r') as file:
        yield file


def find_array(group, key, *axes):
    """The HDF5 dataset `key`, which must be float with the axes of one of the strings `axes`, one letter an axis."""
    array = group.get(key)
    expected = f"'{key}', float " + ' or '.join(f"({', '.join(letters)})" for letters in axes)
    if not isinstance(array, h5py.Dataset):
        refuse(group.file.filename, expected, f"{' '.join(list(group)[:8]) or 'nothing'} in {group.name}")
    if array.dtype.kind != 'f' or array.ndim not in map(len, axes):
        refuse(group.file.filename, expected, f'{array.dtype} {array.shape}')
    return array


# ------------------------------------------------------------------------------------------------ The Well

GROUPS = ('dimensions', 'scalars', 't0_fields', 't1_fields', 't2_fields')


class Contents(NamedTuple):
    form: tuple                     # dataset_name, grid, Fields; equal in all files
    frames: int
    dt: np.ndarray                  # (N,)
    scalars: list                   # names of those that do not vary in time
    parameters: dict                # {name: value}


class Field(NamedTuple):
    place: str                      # the name of its HDF5 dataset
    channels: tuple                 # names of its components, those of a tensor row by row
    static: bool


def attribute(item, key):
    if key not in item.attrs:
        refuse(item.file.filename, f"the attribute '{key}' of {item.name}, as The Well has it", 'none')
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


def listed(file, group, sizes, components=1):
    """(name, HDF5 dataset) of all that a group lists, which must have the shapes that their attributes say."""
    for name in texts(attribute(file[group], 'field_names')):
        item = file[group].get(name)
        if not isinstance(item, h5py.Dataset):
            refuse(file.filename, f'{group}/{name}, which {group} lists', ' '.join(file[group]) or 'nothing', AGAIN)
        shape = tuple(size for size, varies in zip(sizes, varying(item, sizes)) if varies)
        if item.shape[:len(shape)] != shape or math.prod(item.shape[len(shape):]) != components:
            refuse(file.filename, f'{item.name} {shape} x {components}, as its attributes say', item.shape, AGAIN)
        if item.dtype.kind not in 'fiub':
            refuse(file.filename, f'real numbers in {item.name}', item.dtype)
        yield name, item


def fields_of(file, sizes, axes):
    """A tuple of Field, in the order of their channels: first those that vary in time."""
    fields = []
    for order, group in enumerate(GROUPS[2:]):
        suffixes = [''.join(suffix) for suffix in product(axes, repeat=order)]
        for name, item in listed(file, group, sizes, len(suffixes)):
            channels = tuple(f'{name}_{suffix}' if suffix else name for suffix in suffixes)
            fields.append(Field(item.name, channels, not varying(item, sizes)[1]))
    return tuple(sorted(fields, key=lambda field: field.static))


def frame_distance(path, time):
    """The time between two frames, from the float32 array `time` (T) or (N, T), where it is constant: (1) or (N)."""
    times = np.atleast_2d(np.float64(time)) if time.dtype.kind in 'fiu' else np.full((1, 1), np.nan)
    dt = (times[:, -1] - times[:, 0]) / max(times.shape[1] - 1, 1)
    rounding = 1e-3 * dt[:, None] + 4 * np.spacing(np.float32(abs(times).max()))
    if not np.isfinite(times).all() or not (dt > 0).all() or not (abs(np.diff(times) - dt[:, None]) <= rounding).all():
        refuse(path, 'at least two frames at a constant distance in dimensions/time', np.ravel(time)[:8].tolist())
    return dt


def read_contents(path):
    """The Contents of one file."""
    with open_hdf5(path) as file:
        if lacking := [group for group in GROUPS if group not in file]:
            refuse(path, f'groups {" ".join(GROUPS)}, as The Well has them', f'no {" ".join(lacking)}')
        kind, D, name = (attribute(file, key) for key in ('grid_type', 'n_spatial_dims', 'dataset_name'))
        if kind.lower() != 'cartesian' or D not in (2, 3):
            refuse(path, 'a Cartesian grid of two or three dimensions', f'{kind}, {D} dimensions',
                   'this dataset cannot be converted')
        dimensions, N = file['dimensions'], attribute(file, 'n_trajectories')
        axes, T = texts(attribute(dimensions, 'spatial_dims')), dimensions['time'].shape[-1]
        grid = tuple(dimensions[axis].shape[-1] for axis in axes)
        dt = np.broadcast_to(frame_distance(path, dimensions['time'][()]), N)
        scalars = [scalar for scalar, item in listed(file, 'scalars', (N, T)) if not varying(item, (N, T))[1]]
        parameters = {key: attribute(file, key) for key in texts(attribute(file, 'simulation_parameters'))}
        return Contents((name, grid, fields_of(file, (N, T, *grid), axes)), T, dt, scalars, parameters)


def find_files(source):
    """{split: files sorted by name} of a dataset: `source` or its folder data has the folders train, valid and test."""
    base = source / 'data' if (source / 'data').is_dir() else source
    files = {split: sorted(path for path in (base / split).glob('*') if path.suffix in ('.h5', '.hdf5'))
             for split in SPLITS}
    if not files['train'] or not files['test']:
        refuse(source, 'HDF5 files in its folders data/train, data/test and perhaps data/valid',
               ', '.join(f'{len(files[split])} in {split}' for split in SPLITS), 'give the folder of one dataset')
    return {split: paths for split, paths in files.items() if paths}


def the_well(name, source):
    """A dataset of The Well: the components of its fields are channels; its splits and axes stay as they are.

    All are cut to the shortest trajectory. Kept beside `data` are the parameters, the scalars that do not vary in time,
    and frame_dt, the time between two frames, if it differs; coordinates and boundary conditions are left out.
    """
    if name in DATASETS:
        raise InputError(f"{name} is one of the paper's datasets; choose another name for a dataset of The Well")
    files = find_files(source)
    contents_of = {path: read_contents(path) for paths in files.values() for path in paths}
    first, *_ = contents_of.values()
    (title, grid, fields), kinds = first.form, {}
    for path, contents in contents_of.items():
        if contents.form != first.form:
            refuse(path, *(f'{title} on {show(grid)} with ' + ' '.join(
                ' '.join(field.channels) + ' (static)' * field.static for field in fields)
                for title, grid, fields in (first.form, contents.form)), 'remove what is of another dataset')
        for key, value in contents.parameters.items():
            kind = np.shape(value), 'text' if np.asarray(value).dtype.kind in 'SU' else 'numbers'
            shape, form = kinds.setdefault(key, kind)
            if kind != (shape, form):
                refuse(path, f'the parameter {key} with the shape {shape} and {form}, as in other files', value)
    channels, static = ([channel for field in fields for channel in field.channels if field.static >= least]
                        for least in (False, True))
    lengths, steps = zip(*((contents.frames, contents.dt) for contents in contents_of.values()))
    T, dt = min(lengths), np.concatenate(steps)
    if T < max(lengths):
        print(f'{source}: trajectories of {T} to {max(lengths)} frames, of which the first {T} are taken')
    even = dt.max() / dt.min() < 1 + 1e-3

    def read(file, n, t):
        sizes = n.stop - n.start, t.stop - t.start, *grid
        parts = [part_of(file[field.place], sizes, (n, t)) for field in fields]
        return np.concatenate([np.broadcast_to(part, (*sizes, part.shape[-1])) for part in parts], -1)

    def extra(file, n):
        contents, count = contents_of[Path(file.filename)], n.stop - n.start
        values = {key: [value] * count for key, value in contents.parameters.items()}
        for key in contents.scalars:
            values[key] = np.broadcast_to(part_of(file['scalars'][key], (count, T), (n, slice(1))).ravel(), count)
        return values if even else {**values, 'frame_dt': contents.dt[n]}
    about = dict(channels=channels, dt=float(np.median(dt)) if even else 1.0, pde=f'The Well, {title}', static=static)
    items = {split: [(path, i) for path in paths for i in range(len(contents_of[path].dt))]
             for split, paths in files.items()}
    return Source(f'The Well, {title}: {len(contents_of)} files', (T, *grid, len(channels)), items, read,
                  channels=channels, extra=extra, about=about)
