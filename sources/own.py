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
from itertools import combinations, groupby, product
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from configs import InputError, arg, check_fields
from runtime import files
from runtime.stored import require, whole
from sources.formats import Source, even, library

SPACE = dict(zip('HWD', 'XYZ'))         # the letters of --layout that mean the same axis
NETCDF = '.nc', '.nc4', '.cdf'
KINDS = '.npy', '.npz', '.mat', *NETCDF, '.h5', '.hdf5', '.hdf'
POINTS = dict(time='T', times='T', t='T', x='X', y='Y', z='Z')          # usual names of times and grid points
POINTS |= {f'{axis.lower()}-coordinate': axis for axis in 'TXYZ'}       # and those of PDEBench


@dataclass(frozen=True)
class Own:
    """How files of one's own become a dataset."""
    layout: tuple = arg((), 'the axes of an array in their order, such as NTCHW, and of single ones, such as nu=N',
                        nargs='+', metavar='AXES')
    variables: tuple = arg((), 'those to read, in the order of the channels; default: the only one', nargs='+',
                           metavar='X')
    channels: tuple = arg((), 'their names; default: of the variables', nargs='+', metavar='X')
    frames: int = arg(0, 'cut trajectories into pieces of N frames', least=0, metavar='N')
    dt: float = arg(0.0, 'the time between two frames; 0: as in the file, or 1', least=0, metavar='X')
    uneven: bool = arg(False, 'take uneven times and grid points as even, of The Well, too')
    test_source: tuple = arg((), 'files that are the test set', nargs='+', metavar='X')
    test: float = arg(0.1, 'share of the trajectories', least=0, below=1, metavar='X')
    valid: float = arg(0.1, 'share of the trajectories', least=0, below=1, metavar='X')
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
        found = library(path, 'scipy.io', 'scipy').loadmat(path, variable_names=names or None)
        return {name: values for name, values in found.items() if isinstance(values, np.ndarray)}
    with np.load(path, allow_pickle=False) as file:
        found = {} if names else dict.fromkeys(file.files, np.empty(0, object))
        for name in names or file.files:
            with suppress(ValueError, KeyError):                        # an object array, or none of this name
                found[name] = file[name]
        return found


def in_netcdf(group, prefix=''):
    """{name: array} of a netCDF group and those in it; netCDF4 unpacks their numbers and masks gaps."""
    found = {prefix + name: array for name, array in group.variables.items()}
    for name, inner in group.groups.items():
        found |= in_netcdf(inner, f'{prefix}{name}/')
    return found


@contextmanager
def opened(path, names=()):
    """{name: array} of the real numbers in a file, in its attributes, too; and the names of the rest."""
    kind = path.suffix.lower()
    attributes = {}
    with files.naming(f'--source {path}'), ExitStack() as stack:
        if kind == '.npy':
            array = np.load(path, mmap_mode='r', allow_pickle=False)
            found = {'': array, path.stem: array}
        elif kind == '.npz' or kind == '.mat' and not h5py.is_hdf5(path):
            found = in_memory(path, names, path.stat().st_mtime_ns)
        elif kind in NETCDF:
            stack.enter_context(warnings.catch_warnings(action='error', category=UserWarning))  # gaps it cannot tell
            file = stack.enter_context(library(path, 'netCDF4', 'netCDF4').Dataset(path))
            attributes = {name: file.getncattr(name) for name in file.ncattrs()}
            found = in_netcdf(file)
        else:
            file = stack.enter_context(h5py.File(path))
            attributes = file.attrs
            found = {}
            file.visititems(lambda name, item: found.update({name: Stored(item)} if hasattr(item, 'dtype') else {}))
        found = {name: np.ravel(value)[0] for name, value in attributes.items() if np.size(value) == 1} | found
        numbers = {name: array for name, array in found.items() if getattr(array.dtype, 'kind', 'O') in 'fiub'}
        yield numbers, [name for name in found if name and name not in numbers]


def places(shape, axes):
    """The places of `axes` in a shape, which may have others of size 1; None if they do not fit."""
    longer = [i for i, size in enumerate(shape) if size > 1]
    return [*range(len(shape))] if len(shape) == len(axes) else longer if len(longer) == len(axes) else None


def part(array, axes, order, **cut):
    """The numbers of an array at {axis: slice}, its axes in `order`, with 1 for those that it lacks."""
    at = dict(zip(axes, places(array.shape, axes)))
    cut = {at[axis]: cut[axis] for axis in cut if axis in at}
    values = array[tuple(cut.get(place, slice(None)) for place in range(len(array.shape)))]
    if np.ma.isMaskedArray(values):
        values = values.astype(np.float64).filled(np.nan)
    values = np.reshape(values, [np.shape(values)[place] for place in at.values()])
    values = values.transpose([axes.index(axis) for axis in order if axis in at])
    return np.expand_dims(values, [i for i, axis in enumerate(order) if axis not in at])


# ------------------------------------------------------------------------------------------------ axes

def axes_of(text, partly=False):
    """The letters N T X Y Z C of axes such as NTCHW. Raises InputError for others.

    partly: whether axes of space may be absent.
    """
    axes = ''.join(SPACE.get(letter, letter) for letter in text.upper())
    space = ''.join(sorted({*axes} & {*'XYZ'}))
    require(len({*axes}) == len(axes) and {*axes} <= {*'NTXYZC'} and (partly or space in ('X', 'XY', 'XYZ')),
            f'--layout {text}: expected the axes of the array in their order, each once: N trajectories, T frames, '
            f'H W D (or X Y Z) in space, C channels, such as NTCHW or TX')
    return axes


def parse_layout(words):
    """The words of --layout -> axes of what evolves, '' for none, and {variable: axes} of those it names."""
    named = {}
    for word in words:
        name, partly, text = word.rpartition('=')
        require(name not in named, f'--layout {" ".join(words)}: expected axes once, such as NTHW nu=N')
        named[name] = axes_of(text, partly)
    main = named.pop('', max(named.values(), key=len, default=''))
    return main and axes_of(main), named


def contents(path, names, main):
    """({name: shape} of `names` in a file or of its only one, {axis: times or grid points}, what is there in words)."""
    with opened(path, names and (*names, *POINTS)) as (found, rest):
        listed = ', '.join(f'{name} {array.shape}' for name, array in found.items() if name and array.shape) or 'none'
        listed += f' (not of real numbers: {" ".join(rest)})' if rest else ''
        require(main, f'--layout is missing: the axes in their order, such as NTHWC for {path}: {listed}')
        fields = [name for name, array in found.items() if len(array.shape) == len(main)]
        fields = fields or [name for name, array in found.items() if places(array.shape, main)]
        require(names or len(fields) == 1 or '' in fields,
                f'--source {path}: name the variables with --variables; there are {listed}')
        points = {POINTS[name.lower()]: np.ravel(array[(slice(None),) * len(array.shape)])
                  for name, array in found.items() if name.lower() in POINTS and sum(n > 1 for n in array.shape) < 2}
        return {name: found[name].shape for name in names or fields[:1] if name in found}, points, listed


def fit_axes(shapes, main, named):
    """{name: axes} of the arrays of a file by --layout, or by their sizes where these leave no choice."""
    fields = [shape for name, shape in shapes.items() if named.get(name, main) == main and places(shape, main)]
    require(fields, f'--layout {main} fits none of ' + ', '.join(f'{name} {shape}' for name, shape in shapes.items()))
    sizes = {axis: fields[0][place] for axis, place in zip(main, places(fields[0], main))}
    known = ' '.join(f'{axis} {size}' for axis, size in sizes.items())
    axes = {}
    for name, shape in shapes.items():
        longer = [size for size in shape if size > 1]
        fits = [''.join(some) for some in combinations(main, len(longer)) if [sizes[axis] for axis in some] == longer]
        fits = [named[name]] if name in named else [main] if len(shape) == len(main) else fits
        require(len(fits) == 1, f'{name} has the shape {shape}, which may be {" or ".join(fits) or "none"} of {known}; '
                                f'say which: --layout {main} {name}={(fits or ["XY"])[0]}')
        axes[name], = fits
        require('T' not in fits[0] or {*main} <= {*fits[0], 'C'},
                f'{name} has the axes {fits[0]}: what changes in time needs all of {main}')
    return axes


def sizes_of(path, shapes, axes):
    """{axis: size} of a file, whose arrays have to fit."""
    sizes = {}
    for name, shape in shapes.items():
        at = places(shape, axes[name])
        require(at is not None,
                f'--source {path}: {name} has the shape {shape}, for which --layout {axes[name]} does not fit')
        for axis, place in zip(axes[name], at):
            require(axis == 'C' or sizes.setdefault(axis, shape[place]) == shape[place],
                    f'--source {path}: {name} has {shape[place]} along {axis}, another {sizes.get(axis)}')
    return sizes


# ------------------------------------------------------------------------------------------------ several files

def paths_of(sources):
    """Files in the order of the numbers in their names; a folder stands for its files."""
    paths = []
    for source in map(Path, sources):
        inside = source.iterdir() if source.is_dir() else [source]
        inside = [path for path in inside if path.is_file() and path.suffix.lower() in KINDS and path.name[0] != '.']
        require(inside, f'--source {source}: there is no such file of the kinds {" ".join(KINDS)}')
        paths += inside

    def numbers(path):
        parts = re.split(r'(\d+\.\d+|\d+)', str(path))
        return [float(word) if i % 2 else word for i, word in enumerate(parts)]
    return sorted({*paths}, key=numbers)


class Runs(NamedTuple):
    """What some files hold together."""
    main: str                   # the axes of what evolves
    axes: dict                  # {variable: its axes}
    widths: dict                # {variable: number of its channels}
    grid: tuple
    dt: float                   # by the times in the files; None if they do not say it
    trajectories: list          # [(rows, number in each file, frames)]; a row is the file of each variable


def find_runs(paths, own):
    """The Runs in files, by the flags of an Own. Prints what was joined along what."""
    main, named = parse_layout(own.layout)
    shapes, points, listed = {}, {}, {}
    for path in paths:
        shapes[path], points[path], listed[path] = contents(path, own.variables, main)
    names = own.variables or [*dict.fromkeys(name for path in paths for name in shapes[path])]
    if not own.variables:
        print(f'{paths[0].name}: read {names[0] or "it"} of {listed[paths[0]]}')
    homes = {name: [path for path in paths if name in shapes[path]] for name in names}
    row = tuple(home[0] for home in homes.values() if len(home) == 1)
    apart = own.variables and len(paths) > 1 and len(row) == len(names) and {*row} == {*paths}      # one file for each
    require({*named} <= {*names}, f'--layout {" ".join(own.layout)}: the variables are {" ".join(names)}')
    for name, path in product(() if apart else names, paths):
        require(name in shapes[path], f'--variables {name}: not in {path}, which has {listed[path]}')
    rows = [row] if apart else [(path,) * len(names) for path in paths]
    shapes = {row: {name: shapes[path][name] for name, path in zip(names, row)} for row in rows}
    axes = fit_axes(shapes[rows[0]], main, named)
    sizes = {row: sizes_of(row[0], shapes[row], axes) for row in rows}
    grid, *others = {tuple(size for axis, size in sorted(sizes[row].items()) if axis in 'XYZ'): row for row in rows}
    require(not others, f'--source {rows[0][0]}: the files have grids of {grid} and {others and others[0]}')
    if len(paths) > 1:
        how = 'channels' if apart else 'trajectories (N)' if 'T' in main else 'frames (T)'
        print(f'{len(paths)} files are joined as {how}: {paths[0].name} ... {paths[-1].name}')
    groups = [(row,) for row in rows]
    if 'T' not in main:                                                     # the frames in a folder are a trajectory
        groups = [tuple(group) for _, group in groupby(rows, lambda row: row[0].parent)]
    trajectories = [(group, n, sizes[group[0]].get('T', len(group)))
                    for group in groups for n in range(sizes[group[0]].get('N', 1))]
    widths = {name: math.prod(shape[place] for axis, place in zip(axes[name], places(shape, axes[name])) if axis == 'C')
              for name, shape in shapes[rows[0]].items()}
    return Runs(main, axes, widths, grid, dt_of(points, trajectories, sizes, own.uneven), trajectories)


def dt_of(points, trajectories, sizes, uneven):
    """The time between two frames, or None; an InputError for times or grid points that are uneven or differ.

    points: {file: {axis: its times or grid points}}.
    sizes: {row: {axis: size}}.
    """
    steps = []
    for rows, frames in dict.fromkeys((rows, frames) for rows, _, frames in trajectories):
        path = rows[0][0]
        for axis, values in points[path].items():
            values = np.concatenate([points[row[0]].get('T', []) for row in rows]) if axis == 'T' else values
            if len(values) != (frames if axis == 'T' else sizes[rows[0]].get(axis)) or len(values) < 2:
                continue                                                            # they are not those of the fields
            require(uneven or even(values), f'--source {path}: {"times" if axis == "T" else axis} {values[:5]} ... are '
                                            f'uneven; --uneven takes them as even')
            steps += [(values[-1] - values[0]) / (len(values) - 1)] if axis == 'T' else []
        if steps and not uneven and abs(steps[-1] - steps[0]) > 1e-3 * abs(steps[0]):
            raise InputError(f'--source {path}: the time between frames is {steps[-1]:g}, in other files {steps[0]:g}; '
                             f'--uneven takes them as equal')
    return float(np.mean(steps)) if steps else None


# ------------------------------------------------------------------------------------------------ the source

class Piece(NamedTuple):
    """Where a trajectory, or a piece of one, lies."""
    rows: tuple                 # the files along T; of each the file of each variable
    start: int                  # its first frame in them

    def __str__(self):
        return f'{self.rows[0][0]}, frame {self.start}'


def reader(runs):
    """The function `read` of a Source."""
    order = ['N', 'T', *sorted({*runs.main} & {*'XYZ'}), 'C']

    def block(row, **cut):
        with ExitStack() as stack:
            found = {path: stack.enter_context(opened(path, tuple(name for name, home in zip(runs.axes, row)
                                                                  if home == path)))[0] for path in {*row}}
            parts = [part(found[path][name], axes, order, **cut) for path, (name, axes) in zip(row, runs.axes.items())]
        shape = np.broadcast_shapes(*(values.shape[:-1] for values in parts))
        values = np.concatenate([np.broadcast_to(values, (*shape, values.shape[-1])) for values in parts], -1)
        return values[:, :, None] if len(order) == 4 else values                        # one dimension is (1, X)

    def read(piece, n, t):
        t = slice(piece.start + t.start, piece.start + t.stop)
        if 'T' in runs.main:
            return block(piece.rows[0], N=n, T=t)
        return np.concatenate([block(row, N=n) for row in piece.rows[t]], 1)
    return read


def splits(count, own):
    """{split: sorted numbers} of `count` trajectories, by the flags of an Own."""
    order = np.random.default_rng(own.seed).permutation(count) if own.split == 'seed' else np.arange(count)[::-1]
    tests = 0 if own.test_source else max(1, round(own.test * count))
    valids = tests + round(own.valid * count)
    require(valids < count, f'{count} trajectories are too few for --test {own.test} and --valid {own.valid}; '
                            f'--frames N cuts long ones into pieces of N frames')
    return {'test': sorted(order[:tests]), 'valid': sorted(order[tests:valids]), 'train': sorted(order[valids:])}


def own_source(sources, own):
    """The Source in files of one's own, which is split, by the flags of an Own."""
    paths = paths_of([*sources, *own.test_source])
    runs = find_runs(paths, own)
    lengths = [length for *_, length in runs.trajectories]
    shortest, longest = min(lengths), max(lengths)
    frames = own.frames or shortest
    require(own.frames or shortest == longest, f'--source {paths[0]}: trajectories of {shortest} to {longest} frames; '
                                               f'--frames {frames} cuts them into pieces of as many')
    require(frames <= longest, f'--frames {frames}: the longest trajectory has {longest}')
    if own.frames:
        print(f'{sum(length % frames for length in lengths)} frames at the ends of trajectories are left out')
    tests = {*(paths_of(own.test_source) if own.test_source else ())}
    trajectories = {True: [], False: []}                                        # whether they are in --test_source
    for rows, n, length in runs.trajectories:
        pieces = [(Piece(rows, start), n) for start in range(0, length - frames + 1, frames)]
        trajectories[rows[0][0] in tests] += [pieces] if pieces else []
    mine = trajectories[False]
    if len(mine) == 1 and own.frames:
        print('one trajectory, which is split in time: its last pieces are for testing')
        mine = [[piece] for piece in mine[0]]
        own = replace(own, split='order')
    items = {split: [piece for number in numbers for piece in mine[number]]
             for split, numbers in splits(len(mine), own).items()}
    items['test'] += [piece for pieces in trajectories[True] for piece in pieces]
    items = {split: pieces for split, pieces in items.items() if pieces}
    dt = own.dt or runs.dt or 1.0
    print(f'dt {dt:g}, {"of --dt" if own.dt else "as in the files" if runs.dt else "since no file says it"}')
    channels = []
    static = []
    for name, axes in runs.axes.items():
        width = runs.widths[name]
        channels += [name] if name and width == 1 else [f'{name}_{c}'.strip('_') for c in range(width)]
        if {*runs.main} - {*axes, 'C'}:
            print(f'{name} is static, {"along " + axes if axes else "a number"}')
            static += range(len(channels) - width, len(channels))
    require(len(own.channels) in (0, len(channels)),
            f'--channels {" ".join(own.channels)}: there are {len(channels)} channels, {" ".join(channels)}')
    channels = own.channels or channels
    layout = ' '.join([runs.main, *(f'{name}={axes}' for name, axes in runs.axes.items() if axes != runs.main)])
    attributes = dict(channels=channels, static=[channels[c] for c in static], dt=dt, layout=layout,
                      source=' '.join(dict.fromkeys([paths[0].name, paths[-1].name])), variables=[*runs.axes])
    grid = (1, *runs.grid) if len(runs.grid) == 1 else runs.grid
    return Source((frames, *grid, len(channels)), items, reader(runs), attributes)
