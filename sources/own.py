"""Files of one's own, of several kinds and with axes in any order, as a Source of formats.py.

.npy, .npz, MATLAB's .mat (v7.3 is HDF5, older ones need SciPy), netCDF (needs netCDF4) and HDF5.
Only what is asked for is read, but an array of an .npz or an older .mat as a whole.

N trajectories, T frames, X Y Z (or H W D) axes of space, C channels. An axis that --layout lacks is
the one along which the files go.
"""
import functools
import math
import re
import warnings
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from configs import arg, check_fields
from runtime.stored import require, whole
from sources.formats import Source, even, library, reading

NETCDF = '.nc', '.nc4', '.cdf'
KINDS = '.npy', '.npz', '.mat', *NETCDF, '.h5', '.hdf5', '.hdf'
POINTS = dict(time='T', times='T', t='T', x='X', y='Y', z='Z')          # usual names of times and grid points
POINTS |= {f'{axis.lower()}-coordinate': axis for axis in 'TXYZ'}       # and those of PDEBench
SEVERAL = dict(nargs='+', metavar='X')


@dataclass(frozen=True)
class Own:
    """How files of one's own become a dataset."""
    layout: tuple = arg((), 'the axes of an array in their order, such as NTCHW, and of single ones, such as nu=N',
                        **SEVERAL)
    variables: tuple = arg((), 'those to read, in the order of the channels; default: the only one', **SEVERAL)
    channels: tuple = arg((), 'their names; default: of the variables', **SEVERAL)
    frames: int = arg(0, 'cut trajectories into pieces of N frames', least=0, metavar='N')
    dt: float = arg(0.0, 'the time between two frames; 0: as in the file, or 1', metavar='X')
    uneven: bool = arg(False, 'take uneven times and grid points as even, of The Well, too')
    test_source: tuple = arg((), 'files that are the test set', **SEVERAL)
    test: float = arg(0.1, 'share of the trajectories', most=0.99, metavar='X')
    valid: float = arg(0.1, 'share of the trajectories', most=0.99, metavar='X')
    split: str = arg('seed', 'seed: they are drawn, order: they are the last', choices=['seed', 'order'])
    seed: int = arg(0, 'that draws them', least=0, metavar='N')

    def __post_init__(self):
        check_fields(self)


# ------------------------------------------------------------------------------------------------ one file

class Stored:
    """An array of an HDF5 file, read at `[index]`; MATLAB's have their axes reversed there."""

    def __init__(self, item):
        self._item = item
        self._step = -1 if 'MATLAB_class' in item.attrs else 1
        self.shape = item.shape[::self._step]
        text = item.attrs.get('MATLAB_class') in (b'char', 'char')
        self.dtype = np.dtype('O') if text else item.dtype

    def __getitem__(self, index):
        values = whole(self._item.file, self._item.name)[index[::self._step]]
        return values.T if self._step < 0 else values


@functools.lru_cache(2)
def in_memory(path, names, changed):
    """{name: array} of `names`, or of all, in an .npz or an older .mat. changed: when it was written."""
    if path.suffix.lower() == '.mat':
        return library(path, 'scipy.io', 'scipy').loadmat(path, variable_names=names or None)
    with np.load(path, allow_pickle=False) as file:
        found = {} if names else dict.fromkeys(file.files)
        for name in names or file.files:
            with suppress(ValueError, KeyError):                        # an object array, or none of this name
                found[name] = file[name]
        return found


@contextmanager
def opened(path, names=()):
    """{name: array} of the real numbers in a file, in its attributes, too; and the names of the rest."""
    kind = path.suffix.lower()
    attributes, found = {}, {}
    with reading(path), ExitStack() as stack:
        if kind == '.npy':
            found = dict.fromkeys(['', path.stem], np.load(path, mmap_mode='r', allow_pickle=False))
        elif kind == '.npz' or kind == '.mat' and not h5py.is_hdf5(path):
            found = in_memory(path, names, path.stat().st_mtime_ns)
        elif kind in NETCDF:
            stack.enter_context(warnings.catch_warnings(action='error', category=UserWarning))  # gaps it cannot tell
            file = stack.enter_context(library(path, 'netCDF4', 'netCDF4').Dataset(path))
            attributes = {name: file.getncattr(name) for name in file.ncattrs()}
            groups = [file]
            for group in groups:
                groups += group.groups.values()
                found |= {f'{group.path}/{name}'.strip('/'): array for name, array in group.variables.items()}
        else:
            file = stack.enter_context(h5py.File(path))
            attributes = file.attrs
            file.visititems(lambda name, item: found.update({name: Stored(item)} if hasattr(item, 'dtype') else {}))
        found = {name: np.ravel(value)[0] for name, value in attributes.items() if np.size(value) == 1} | found
        numbers = {name: array for name, array in found.items()
                   if getattr(getattr(array, 'dtype', None), 'kind', 'O') in 'fiub'}
        yield numbers, [name for name in found if name and name not in numbers and not name.startswith('__')]


def places(shape, axes):
    """The places of `axes` in a shape, which may have others of size 1; None if they do not fit."""
    longer = [i for i, size in enumerate(shape) if size > 1]
    return [*range(len(shape))] if len(shape) == len(axes) else longer if len(longer) == len(axes) else None


def arranged(array, axes, order, **cut):
    """The numbers of an array at {axis: slice}, its axes in `order`, with 1 for those that it lacks."""
    at = dict(zip(axes, places(array.shape, axes)))
    index = [slice(None)] * len(array.shape)
    for axis in cut.keys() & at:
        index[at[axis]] = cut[axis]
    values = array[tuple(index)]
    if np.ma.isMaskedArray(values):
        values = values.astype(np.float64).filled(np.nan)
    there = [axis for axis in order if axis in at]
    values = np.reshape(values, [np.shape(values)[place] for place in at.values()])
    values = values.transpose([axes.index(axis) for axis in there])
    return np.expand_dims(values, [i for i, axis in enumerate(order) if axis not in at])


# ------------------------------------------------------------------------------------------------ axes

def parse_layout(words):
    """The words of --layout -> axes of what evolves, '' for none, and {variable: axes} of those it names."""
    named = {}
    for word in words:
        name, _, text = word.rpartition('=')
        axes = text.upper().translate(str.maketrans('HWD', 'XYZ'))
        require(name not in named and len({*axes}) == len(axes) and {*axes} <= {*'NTXYZC'},
                f'--layout {word}: expected the axes of an array in their order, each once: N trajectories, T frames, '
                f'H W D (or X Y Z) in space, C channels, such as NTCHW or TX')
        named[name] = axes
    main = named.pop('', max(named.values(), key=len, default=''))
    return main, named


def contents(path, names, main):
    """What a file says of `names`, or of its only variable with the axes `main`.

    Returns {variable: (shape, names of its dimensions, '' where it says none)}, {axis: times or grid
    points}, and all variables in words.
    """
    with opened(path, names and (*names, *POINTS)) as (found, rest):
        listed = ', '.join(f'{name} {array.shape}' for name, array in found.items() if name and array.shape) or 'none'
        listed += f' (not of real numbers: {" ".join(rest)})' if rest else ''
        require(main, f'--layout is missing: the axes in their order, such as NTHWC for {path}: {listed}')
        fields = [name for name, array in found.items() if places(array.shape, main)]
        require(names or len(fields) == 1 or '' in fields,
                f'--source {path}: name the variables with --variables; there are {listed}')
        arrays = {name: (found[name].shape, getattr(found[name], 'dimensions', [''] * len(found[name].shape)))
                  for name in names or fields[:1] if name in found}
        points = {POINTS[name.lower()]: np.ravel(array[(slice(None),) * len(array.shape)])
                  for name, array in found.items() if name.lower() in POINTS and sum(n > 1 for n in array.shape) < 2}
        return arrays, points, listed


def fit_axes(path, arrays, main, named, grid):
    """({name: axes}, {axis: size}) of the arrays in a file, as --layout says.

    Axes of an array that it does not name are told by its dimensions' names, or by their sizes.
    grid: the sizes of axes of space in other files.
    """
    axes = {name: named.get(name, main if places(shape, main) else None) for name, (shape, _) in arrays.items()}
    require(main in axes.values(), f'--source {path}: --layout {main} fits none of ' + ', '.join(
        f'{name} {shape}' for name, (shape, _) in arrays.items()))
    sizes = dict(grid)
    axis_of = {}                                                                # {name of a dimension: axis}
    for name in sorted(arrays, key=lambda name: axes[name] is None):
        shape, dimensions = arrays[name]
        if axes[name] is None:
            longer = [i for i, size in enumerate(shape) if size > 1]
            said = [axis_of.get(dimensions[i], '') for i in longer]
            fits = [''.join(said)] if all(said) else [
                ''.join(some) for some in combinations(main, len(longer))
                if [sizes[axis] for axis in some] == [shape[i] for i in longer]]
            require(len(fits) == 1, f'{name} has the shape {shape}, along {" or ".join(fits) or "none"} of the axes '
                                    f'{sizes}; say which: --layout {main} {name}={(fits or ["XY"])[0]}')
            axes[name], = fits
        require('T' not in axes[name] or {*main} <= {*axes[name], 'C'},
                f'{name} has the axes {axes[name]}: what changes in time needs all of {main}')
        at = places(shape, axes[name])
        require(at is not None, f'--source {path}: --layout {axes[name]} does not fit {name} {shape}')
        for axis, place in zip(axes[name], at):
            require(axis == 'C' or sizes.setdefault(axis, shape[place]) == shape[place],
                    f'--source {path}: {name} {shape} has {shape[place]} along {axis}, but others {sizes.get(axis)}')
            if dimensions[place] and not dimensions[place].startswith('phony_dim'):     # netCDF4's own, by size
                axis_of[dimensions[place]] = axis
    return axes, sizes


# ------------------------------------------------------------------------------------------------ several files

def paths_of(sources):
    """Files in the order of the numbers in their names; a folder stands for its files."""
    paths = set()
    for source in map(Path, sources):
        inside = source.iterdir() if source.is_dir() else [source]
        inside = [path for path in inside if path.is_file() and path.suffix.lower() in KINDS and path.name[0] != '.']
        require(inside, f'--source {source}: there is no such file of the kinds {" ".join(KINDS)}')
        paths.update(inside)

    def numbers(path):
        parts = re.split(r'(\d+\.\d+|\d+)', str(path))
        return [float(word) if i % 2 else word for i, word in enumerate(parts)]
    return sorted(paths, key=numbers)


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
    main, named = parse_layout(own.layout)
    held = {(path,): contents(path, own.variables, main) for path in paths}
    arrays, _, listed = held[paths[0],]
    names = own.variables or (*arrays,)
    if not own.variables:
        print(f'{paths[0].name}: read {names[0] or "it"} of {listed}')
    require({*named} <= {*names}, f'--layout {" ".join(own.layout)}: the variables are {" ".join(names)}')
    how = 'trajectories (N)' if 'T' in main else 'frames (T)'
    homes = [(name, path) for (path,), (arrays, *_) in held.items() for name in arrays]
    if len(homes) == len(names) and {name for name, _ in homes} == {*names} and {path for _, path in homes} == {*paths}:
        arrays, points = ({name: it for of_path in held.values() for name, it in of_path[i].items()} for i in (0, 1))
        held = {tuple(paths): (arrays, points, listed)}
        how = 'channels'
    if len(paths) > 1:
        print(f'{len(paths)} files are joined as {how}: {paths[0].name} ... {paths[-1].name}')
    axes = {}
    sizes = {}                                                                  # {part: {axis: size}}
    grid = {}                                                                   # the same of space
    for part, (arrays, _, listed) in held.items():
        for name in names:
            require(name in arrays, f'--variables {name}: not in {part[0]}, which has {listed}')
        axes, sizes[part] = fit_axes(part[0], {name: arrays[name] for name in names}, main, axes or named, grid)
        grid = {axis: sizes[part][axis] for axis in 'XYZ' if axis in sizes[part]}
    widths = {name: math.prod(arrays[name][0]) // math.prod(sizes[part][axis] for axis in axes[name] if axis != 'C')
              for name in names}
    runs = [(part,) for part in held]
    if 'T' not in main:                                                     # the frames in a folder are a trajectory
        runs = [tuple(parts) for _, parts in groupby(held, lambda part: part[0].parent)]
    sizes = {parts: {'T': len(parts), 'N': 1, **sizes[parts[0]]} for parts in runs}
    trajectories = [(parts, n, sizes[parts]['T']) for parts in runs for n in range(sizes[parts]['N'])]
    points = {part: points for part, (_, points, _) in held.items()}
    return Runs(main, axes, widths, tuple(grid.values()), dt_of(sizes, points, own.uneven), trajectories)


def dt_of(sizes, points, uneven):
    """The time between two frames, or None; an InputError for times or grid points that are uneven or differ.

    sizes: {parts: {axis: size}}.
    points: {part: {axis: its times or grid points}}.
    """
    steps = []
    for parts, of_parts in sizes.items():
        path = parts[0][0]
        times = np.concatenate([points[part].get('T', []) for part in parts])
        for axis, line in (points[parts[0]] | {'T': times}).items():
            if 1 < len(line) == of_parts.get(axis):                         # or it is not that of the fields
                require(uneven or even(line), f'--source {path}: {"times" if axis == "T" else axis} {line[:5]} ... are '
                                              f'uneven; --uneven takes them as even')
                steps += [(np.diff(line).mean(), path)] if axis == 'T' else []
    (low, here), (high, there) = (limit(steps, default=(1, '')) for limit in (min, max))
    require(uneven or np.isclose(low, high, rtol=1e-3, atol=0),
            f'--source {there}: the time between frames is {high:g}, in {here} {low:g}; --uneven takes them as equal')
    return float(np.mean([step for step, _ in steps])) if steps else None


# ------------------------------------------------------------------------------------------------ the source

class Piece(NamedTuple):
    """Where a trajectory, or a piece of one, lies."""
    parts: tuple                # along T, each of one path or several
    start: int                  # its first frame in them

    def __str__(self):
        return f'{self.parts[0][0]}, frame {self.start}'


def reader(runs):
    """The function `read` of a Source."""
    order = ['N', 'T', *sorted({*runs.main} & {*'XYZ'}), 'C']

    def block(paths, **cut):
        with ExitStack() as stack:
            found = {}
            for path in paths:
                found |= stack.enter_context(opened(path, tuple(runs.axes)))[0]
            arrays = [arranged(found[name], axes, order, **cut) for name, axes in runs.axes.items()]
        shape = np.broadcast_shapes(*(values.shape[:-1] for values in arrays))
        values = np.concatenate([np.broadcast_to(values, (*shape, values.shape[-1])) for values in arrays], -1)
        return values[:, :, None] if len(order) == 4 else values                        # one dimension is (1, X)

    def read(piece, n, t):
        t = slice(piece.start + t.start, piece.start + t.stop)
        if 'T' in runs.main:
            return block(piece.parts[0], N=n, T=t)
        return np.concatenate([block(paths, N=n) for paths in piece.parts[t]], 1)
    return read


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
            f'--source {paths[0]}: trajectories of {frames} to {max(lengths)} frames; --frames {frames} cuts them into '
            f'pieces of as many')
    require(frames <= max(lengths), f'--frames {frames}: the longest trajectory has {max(lengths)}')
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
    channels = []
    static = []
    for name, axes in runs.axes.items():
        width = runs.widths[name]
        its = [name] if name and width == 1 else [f'{name}_{c}'.strip('_') for c in range(width)]
        channels += its
        if {*runs.main} - {*axes, 'C'}:
            print(f'{name} is static, {"along " + axes if axes else "a number"}')
            static += its
    called = dict(zip(channels, own.channels or channels))
    require(len(own.channels) in (0, len(channels)),
            f'--channels {" ".join(own.channels)}: there are {len(channels)} channels, {" ".join(channels)}')
    layout = ' '.join([runs.main, *(f'{name}={axes}' for name, axes in runs.axes.items() if axes != runs.main)])
    attributes = dict(channels=[*called.values()], static=[called[name] for name in static], dt=dt, layout=layout,
                      source=' '.join(dict.fromkeys([paths[0].name, paths[-1].name])), variables=[*runs.axes])
    grid = (1, *runs.grid) if len(runs.grid) == 1 else runs.grid
    items = {split: pieces for split, pieces in items.items() if pieces}
    return Source((frames, *grid, len(channels)), items, reader(runs), attributes)
