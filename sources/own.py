"""Files of one's own, of several kinds and with axes in any order, as a Source.

.npy, .npz, MATLAB's .mat (v7.3 is HDF5, older ones need SciPy), netCDF (needs netCDF4) and HDF5.
Only what is asked for is read, but an array of a compressed .npz or an older .mat as a whole.

N trajectories, T frames, X Y Z (or H W D) axes of space, C channels, K of a tensor that has two
such axes. An axis that --layout lacks is the one along which the files go.
"""
import functools
import math
import re
import warnings
import zipfile
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby, permutations
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from configs import InputError, arg, check_fields
from runtime.files import naming
from runtime.stored import require, whole

NETCDF = '.nc', '.nc4', '.cdf'
KINDS = '.npy', '.npz', '.mat', *NETCDF, '.h5', '.hdf5', '.hdf'
TIMES = 'time', 'times', 't', 't-coordinate'                    # usual names; the last is PDEBench's
GRIDS = 'x', 'y', 'z', 'lat', 'lon', 'latitude', 'longitude', *(f'{axis}-coordinate' for axis in 'xyz')
MATLAB = 'double', 'single', 'logical', *(f'{sign}int{bits}' for sign in ('', 'u') for bits in (8, 16, 32, 64))
SEVERAL = dict(nargs='+', metavar='X')
UNREADABLE = ('missing, truncated, damaged, larger than the memory or of another kind, such as a git-lfs '
              'pointer; download it again')


class Source(NamedTuple):
    """Which trajectories a download holds and how they are read."""
    shape: tuple                # (T, *space, C) of one trajectory, in our order
    items: object               # [(file, index)] of all trajectories in order; {test: .., train: ..} if it is split
    read: object                # (file, n, t) -> array (n, t, *space, C)
    attributes: dict = {}       # those of `data` that differ from configs.py


@dataclass(frozen=True)
class Own:
    """How files of one's own become a dataset."""
    layout: tuple = arg((), 'the axes of an array in their order, such as NTCHW, and of single ones, such as nu=N',
                        **SEVERAL)
    variables: tuple = arg((), 'those to read, in the order of the channels; default: the only one', **SEVERAL)
    channels: tuple = arg((), 'their names; default: of the variables', **SEVERAL)
    frames: int = arg(0, 'cut trajectories into pieces of N frames', least=0, metavar='N')
    dt: float = arg(0.0, 'the time between two frames; 0: as in the file, or 1', least=0, metavar='X')
    uneven: bool = arg(False, 'take uneven times and grid points as even, of The Well, too')
    test_source: tuple = arg((), 'files that are the test set', **SEVERAL)
    test: float = arg(0.1, 'share of the trajectories', least=0, below=1, metavar='X')
    valid: float = arg(0.1, 'share of the trajectories', least=0, below=1, metavar='X')
    split: str = arg('seed', 'seed: they are drawn, order: they are the last', choices=['seed', 'order'])
    seed: int = arg(0, 'that draws them', least=0, metavar='N')

    def __post_init__(self):
        check_fields(self)


# ------------------------------------------------------------------------------------------------ one file

def reading(where):
    """Within the block, whatever a library says of a file is one line that names it."""
    return naming(f'--source {where}', UNREADABLE, Exception)


def library(path, name, package):
    """The module `name` of a package that reads a file of this kind, and that not everybody needs."""
    try:
        return import_module(name)
    except ImportError:
        raise InputError(f'--source {path}: {package} reads files of this kind; run: pip install {package}') from None


class Stored:
    """An array of an HDF5 file, read at `[index]`; MATLAB's have their axes reversed there."""

    def __init__(self, item):
        self._item = item
        self._step = -1 if 'MATLAB_class' in item.attrs else 1
        self.shape = item.shape[::self._step]
        self.dtype = item.dtype if item.attrs.get('MATLAB_class') not in (b'char', 'char') else None

    def __getitem__(self, index):
        values = whole(self._item.file, self._item.name)[index[::self._step]]
        return values.T if self._step < 0 else values


@functools.lru_cache(2)
def in_memory(path, names, changed):
    """{name: array} of an .npz or an older .mat, in which those of `names` hold their numbers.

    changed: when the file was written.
    """
    if path.suffix.lower() == '.mat':
        scipy = library(path, 'scipy.io', 'scipy')
        numbers = scipy.loadmat(path, variable_names=names) if names else {}
        return {name: numbers.get(name, np.broadcast_to(0.0, shape) if kind in MATLAB else None)
                for name, shape, kind in scipy.whosmat(path)}
    found = {}
    with zipfile.ZipFile(path) as file:
        for member in file.infolist():
            name = member.filename.removesuffix('.npy')
            found[name] = None                                              # an array of objects
            with suppress(ValueError), file.open(member) as stream:
                start = file.fp.tell()
                np.lib.format.read_magic(stream)
                shape, columns_first, dtype = np.lib.format.read_array_header_1_0(stream)
                if member.compress_type == zipfile.ZIP_STORED:              # it is mapped, as an .npy is
                    place = start + stream.tell()
                    found[name] = np.memmap(path, dtype, 'r', place, shape, 'F' if columns_first else 'C')
                elif name in names:
                    stream.seek(0)
                    found[name] = np.load(stream, allow_pickle=False)
                else:
                    found[name] = np.broadcast_to(np.zeros((), dtype), shape)
    return found


@contextmanager
def opened(paths, names=()):
    """{name: array} of what is in files and in their attributes; None for what is not real numbers.

    names: the arrays whose numbers will be read.
    """
    attributes, found = {}, {}
    with reading(' '.join(map(str, paths))), ExitStack() as stack:
        for path in paths:
            kind = path.suffix.lower()
            if kind == '.npy':
                found[''] = found[path.stem] = np.load(path, mmap_mode='r', allow_pickle=False)
            elif kind == '.npz' or kind == '.mat' and not h5py.is_hdf5(path):
                found |= in_memory(path, tuple(names), path.stat().st_mtime_ns)
            elif kind in NETCDF:
                problem = 'an attribute has another type than its variable, so gaps would be missed; correct it'
                stack.enter_context(naming(f'--source {path}', problem, UserWarning))
                stack.enter_context(warnings.catch_warnings(action='error', category=UserWarning))
                file = stack.enter_context(library(path, 'netCDF4', 'netCDF4').Dataset(path))
                attributes |= {name: file.getncattr(name) for name in file.ncattrs()}
                found |= file.variables | {name: file[name] for name in names if '/' in name}
            else:
                file = stack.enter_context(h5py.File(path))
                attributes |= file.attrs
                file.visititems(lambda name, item: found.update(
                    {name: Stored(item)} if isinstance(item, h5py.Dataset) else {}))
        numbers = {name: np.ravel(value)[0] for name, value in attributes.items() if np.size(value) == 1}
        yield {name: array if getattr(getattr(array, 'dtype', None), 'kind', 'O') in 'fiub' else None
               for name, array in (numbers | found).items() if name[:2] != '__'}


def contents(path):
    """{name: shape} of the arrays of real numbers in a file, and all that is in it in words."""
    with opened([path]) as found:
        shapes = {name: array.shape for name, array in found.items() if array is not None}
        others = ' '.join(name for name in found if name and name not in shapes)
    words = ', '.join(f'{name} {shape}' for name, shape in shapes.items() if name and shape) or 'none'
    return shapes, words + f' (not of real numbers: {others})' * bool(others)


def places(shape, axes):
    """The places of `axes` in a shape, which may have others of size 1; None if they do not fit."""
    longer = [i for i, size in enumerate(shape) if size > 1]
    if len(shape) == len(axes):
        return [*range(len(shape))]
    return longer if len(longer) == len(axes) else None


def stacked(arrays, order, **cut):
    """The channels of all [(array, its axes)] at {axis: slice}, with the axes of `order`, the last one C.

    What lacks an axis is repeated along it.
    """
    parts = []
    for array, axes in arrays:
        index = [0] * len(array.shape)                                          # of further axes of size 1
        for axis, place in zip(axes, places(array.shape, axes)):
            index[place] = cut.get(axis, slice(None))
        values = array[tuple(index)]
        if np.ma.isMaskedArray(values):
            values = values.astype(np.float64).filled(np.nan)
        values = np.transpose(values, [axes.index(axis) for axis in order + 'K' if axis in axes])
        values = np.expand_dims(values, [i for i, axis in enumerate(order) if axis not in axes])
        parts.append(values.reshape(*values.shape[:len(order) - 1], -1))
    shape = np.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return np.concatenate([np.broadcast_to(part, (*shape, part.shape[-1])) for part in parts], -1)


# ------------------------------------------------------------------------------------------------ axes

def parse_layout(words):
    """The words of --layout -> axes of what evolves, '' for none, and {variable: axes} of those it names."""
    named = {}
    for word in words:
        name, _, text = word.rpartition('=')
        axes = text.upper().translate(str.maketrans('HWD', 'XYZ'))
        require(name not in named and len({*axes}) == len(axes) and {*axes} <= {*'NTXYZCK'},
                f'--layout {word}: expected the axes of an array in their order, each once: N trajectories, '
                f'T frames, H W D or X Y Z in space, C channels, such as NTCHW')
        named[name] = axes
    main = named.pop('', max(named.values(), key=len, default=''))
    return main, named


def fit_axes(path, arrays, main, named, sizes):
    """{name: axes} of {name: array} in a file, as --layout says; `sizes` of the axes becomes complete.

    Axes of an array that it does not name are told by the names of its dimensions and by its shape.
    """
    axes = {name: main for name, array in arrays.items() if places(array.shape, main)} | named
    axis_of = {}                                                                # {name of a dimension: axis}
    for name in sorted(arrays, key=lambda name: name not in axes):
        shape = arrays[name].shape
        dimensions = getattr(arrays[name], 'dimensions', [''] * len(shape))
        if name not in axes:
            longer = [i for i, size in enumerate(shape) if size > 1]
            fits = [''.join(some) for some in permutations(main, len(longer)) if all(
                sizes.get(axis) == shape[i] and axis_of.get(dimensions[i], axis) == axis
                for axis, i in zip(some, longer))]
            require(len(fits) == 1, f'--source {path}: {name} has the shape {shape}, along '
                                    f'{" or ".join(fits) or "none"} of the axes {sizes or main}; say which: '
                                    f'--layout {main} {name}={[*fits, "XY"][0]}')
            axes[name], = fits
        at = places(shape, axes[name])
        require(at is not None, f'--source {path}: --layout {axes[name]} does not fit {name} {shape}')
        for axis, place in zip(axes[name], at):
            require(axis in 'CK' or sizes.setdefault(axis, shape[place]) == shape[place],
                    f'--source {path}: {name} {shape} has {shape[place]} along {axis}, but others {sizes.get(axis)}')
            if dimensions[place] and not dimensions[place].startswith('phony_dim'):     # netCDF4's own, by size
                axis_of[dimensions[place]] = axis
    return {name: axes[name] for name in arrays}


def points_of(found, names, size):
    """Yield the times or grid points in a file, (1, size) or (N, size): arrays with usual names and this size."""
    for name, array in found.items():
        if array is not None and name.split('/')[-1].lower() in names:
            if math.prod(array.shape) == size or len(array.shape) == 2 and array.shape[1] == size:
                yield np.reshape(array[(slice(None),) * len(array.shape)], (-1, size))


def even_step(path, points, uneven):
    """The step between numbers. InputError: they differ by more than rounding, and may not be `uneven`."""
    steps = np.diff(np.float64(points))
    rounding = 4 * np.finfo(np.result_type(points, np.float16)).eps * np.abs(points).max()
    require(uneven or np.ptp(steps) <= 1e-3 * abs(steps.mean()) + rounding,
            f'--source {path}: times or grid points {points[:5]} ... are uneven; --uneven takes them as even')
    return steps.mean()


# ------------------------------------------------------------------------------------------------ several files

def by_number(path):
    """For sorting: solution_10.nc comes after solution_9.nc."""
    parts = re.split(r'(\d+\.\d+|\d+)', str(path))
    return [float(word) if i % 2 else word for i, word in enumerate(parts)]


def paths_of(sources):
    """Files in the order of the numbers in their names; a folder stands for its files."""
    paths = set()
    for source in map(Path, sources):
        inside = source.iterdir() if source.is_dir() else [source]
        inside = [path for path in inside if path.is_file() and path.suffix.lower() in KINDS and path.name[0] != '.']
        require(inside, f'--source {source}: there is no such file of the kinds {" ".join(KINDS)}')
        paths.update(inside)
    return sorted(paths, key=by_number)


class Runs(NamedTuple):
    """What some files hold together. A part is a file, or several, of which each has other variables."""
    main: str                   # the axes of what evolves
    axes: dict                  # {variable: its axes}
    widths: dict                # {variable: number of its channels}
    grid: tuple
    dt: float                   # by the times in the files; None if they do not say it
    trajectories: list          # [(parts along T, each a tuple of paths, number in each part, frames)]


def find_runs(paths, own):
    """The Runs in files, by the flags of an Own. Prints what was joined along what."""
    main, axes = parse_layout(own.layout)
    shapes, listed = contents(paths[0])
    require(main, f'--layout is missing: the axes in their order, such as NTHWC for {paths[0]}: {listed}')
    names = own.variables
    if not names:
        names = [name for name, shape in shapes.items() if places(shape, main)]
        require(len(names) == 1 or '' in names,
                f'--source {paths[0]}: name the variables with --variables; there are {listed}')
        names = names[:1]
        print(f'{paths[0].name}: read {names[0] or "it"} of {listed}')
    require(axes.keys() <= {*names}, f'--layout {" ".join(own.layout)}: the variables are {" ".join(names)}')
    how = 'trajectories (N)'
    runs = [((path,),) for path in paths]
    if 'T' not in main:
        how = 'frames (T)'                                          # those in a folder are a trajectory
        runs = [tuple((path,) for path in folder) for _, folder in groupby(paths, lambda path: path.parent)]
    homes = [(name, path) for path in paths if len(paths) <= len(names)
             for name in contents(path)[0] if name in names]
    if sorted(name for name, _ in homes) == sorted(names) and {path for _, path in homes} == {*paths}:
        how = 'channels'
        runs = [(tuple(paths),)]
    if len(paths) > 1:
        print(f'{len(paths)} files are joined as {how}: {paths[0].name} ... {paths[-1].name}')
    grid = {}                                                       # {axis of space: size}
    trajectories, steps = [], []
    for run in runs:
        path = run[0][0]
        times = []
        for part in run:
            with opened(part, (*names, *TIMES, *GRIDS)) as found:
                for name in names:
                    require(found.get(name) is not None, f'--variables {name}: not in {part[0]}, which has {listed}')
                arrays = {name: found[name] for name in names}
                sizes = dict(grid)
                axes = fit_axes(part[0], arrays, main, axes, sizes)
                grid = {axis: sizes[axis] for axis in 'XYZ' if axis in sizes}
                widths = {name: math.prod(array.shape) // math.prod(
                    sizes[axis] for axis in axes[name] if axis not in 'CK') for name, array in arrays.items()}
                for size in {*grid.values()} - {1}:
                    for points in points_of(found, GRIDS, size):
                        even_step(part[0], points[0], own.uneven)
                times += [next(points_of(found, TIMES, sizes.get('T', 1)), [])]
        frames = sizes.get('T', len(run))
        trajectories += [(run, n, frames) for n in range(sizes.get('N', 1))]
        if frames > 1 and all(map(len, times)):
            steps += [(even_step(path, line, own.uneven), path) for line in np.concatenate(times, 1)]
    (low, here), (high, there) = (limit(steps, default=(1, '')) for limit in (min, max))
    require(own.uneven or np.isclose(low, high, rtol=1e-3, atol=0),
            f'--source {there}: the time between frames is {high:g}, in {here} {low:g}; --uneven takes them as equal')
    dt = float(np.mean([step for step, _ in steps])) if steps else None
    return Runs(main, axes, widths, tuple(grid.values()), dt, trajectories)


class Piece(NamedTuple):
    """Where a trajectory, or a piece of one, lies."""
    parts: tuple                # along T, each of one path or several
    start: int = 0              # its first frame in them

    def __str__(self):
        return f'{self.parts[0][0]}, frame {self.start}'


def reader(runs):
    """The function `read` of a Source, of whose items the first is a Piece."""
    order = 'NT' + ''.join(sorted({*runs.main} & {*'XYZ'})) + 'C'

    def block(paths, **cut):
        with opened(paths, runs.axes) as found:
            values = stacked([(found[name], axes) for name, axes in runs.axes.items()], order, **cut)
        return values[:, :, None] if len(order) == 4 else values                # one dimension is (1, X)

    def read(piece, n, t):
        t = slice(piece.start + t.start, piece.start + t.stop)
        if 'T' in runs.main:
            return block(piece.parts[0], N=n, T=t)
        return np.concatenate([block(paths, N=n) for paths in piece.parts[t]], 1)
    return read


# ------------------------------------------------------------------------------------------------ the source

def splits(trajectories, own):
    """{split: pieces} of lists of pieces, one a trajectory, by the flags of an Own."""
    count = len(trajectories)
    order = np.random.default_rng(own.seed).permutation(count) if own.split == 'seed' else np.arange(count)[::-1]
    tests = 0 if own.test_source else max(1, round(own.test * count))
    valids = tests + round(own.valid * count)
    require(valids < count, f'{count} trajectories are too few for --test {own.test} and --valid {own.valid}; '
                            f'--frames N cuts long ones into pieces of N frames')
    numbers = {'test': order[:tests], 'valid': order[tests:valids], 'train': order[valids:]}
    return {split: [piece for i in sorted(some) for piece in trajectories[i]] for split, some in numbers.items()}


def own_source(sources, own):
    """The Source in files of one's own, which is split, by the flags of an Own."""
    paths = paths_of([*sources, *own.test_source])
    runs = find_runs(paths, own)
    lengths = [length for *_, length in runs.trajectories]
    frames = own.frames or min(lengths)
    require(own.frames or frames == max(lengths),
            f'--source {paths[0]}: trajectories of {frames} to {max(lengths)} frames; --frames {frames} cuts them '
            f'into pieces of as many')
    if own.frames:
        print(f'{sum(length % frames for length in lengths)} frames at the ends of trajectories are left out')
    tests = paths_of(own.test_source)
    mine, given = [], []                                                        # the latter in --test_source
    for parts, n, length in runs.trajectories:
        pieces = [(Piece(parts, start), n) for start in range(0, length - frames + 1, frames)]
        if pieces:
            (given if parts[0][0] in tests else mine).append(pieces)
    if len(mine) == 1 and own.frames:
        print('one trajectory, which is split in time: its last pieces are for testing')
        mine = [[piece] for piece in mine[0]]
        own = replace(own, split='order')
    items = splits(mine, own)
    items['test'] += [piece for pieces in given for piece in pieces]
    dt = own.dt or runs.dt or 1.0
    print(f'dt {dt:g}, {"of --dt" if own.dt else "as in the files" if runs.dt else "since no file says it"}')
    channels, static = [], []
    for name, axes in runs.axes.items():
        width = runs.widths[name]
        its = [name] if name and width == 1 else [f'{name}_{c}'.strip('_') for c in range(width)]
        channels += its
        if {*runs.main} - {*axes, 'C'}:
            require('T' not in axes, f'--layout {name}={axes}: what changes in time needs all of {runs.main}')
            print(f'{name} is static, {"along " + axes if axes else "a number"}')
            static += its
    called = dict(zip(channels, own.channels or channels))
    require(len(own.channels) in (0, len(channels)),
            f'--channels {" ".join(own.channels)}: there are {len(channels)} channels, {" ".join(channels)}')
    layout = [runs.main, *(f'{name}={axes}' for name, axes in runs.axes.items() if axes != runs.main)]
    attributes = dict(channels=[*called.values()], static=[called[name] for name in static], dt=dt,
                      layout=' '.join(layout), variables=[*runs.axes],
                      source=' '.join(dict.fromkeys([paths[0].name, paths[-1].name])))
    grid = (1, *runs.grid) if len(runs.grid) == 1 else runs.grid
    items = {split: pieces for split, pieces in items.items() if pieces}
    return Source((frames, *grid, len(channels)), items, reader(runs), attributes)
