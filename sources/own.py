"""Files of one's own, of several kinds and with axes in any order, as a Source.

N trajectories, T frames, X Y Z (or H W D) axes of space, C channels, or C K of a tensor. An axis
that --layout lacks is the one along which the files go.
"""
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs import InputError, arg, check_fields, show
from data import UNSAID, difference
from runtime.stored import require, storable
from runtime.terminal import warn
from sources.axes import (
    SAID,
    SECONDS,
    TIMES,
    ancestry,
    dt_said,
    even_steps,
    fit_axes,
    grid_steps,
    parse_layout,
    places,
    points_of,
    text_said,
)
from sources.kinds import KINDS, Stored, contents, opened, variable_of

ORDER = 'NTXYZCK'                                                   # of our axes; K: a tensor's
BETWEEN = 'time between frames'
SEVERAL = dict(nargs='+', metavar='X')


class Source(NamedTuple):
    """Which trajectories files hold and how they are read."""
    shape: tuple                # (T, *space, C) of one trajectory, in our order
    items: object               # [(file, index)] of all in order; {test: .., train: ..} if split
    read: object                # (file, n, t) -> array (n, t, *space, C)
    attributes: dict = {}       # those of `data`; of a benchmark what differs from configs.py


class Piece(NamedTuple):
    """Where a trajectory, or a piece of one, lies: the `file` of a Source of one's own."""
    parts: tuple                # along T, each some paths, of which each has other variables
    frames: int
    start: int = 0              # its first frame in them

    def __str__(self):
        return ' '.join(map(str, self.parts[0])) + (f', from its frame {self.start} on' if self.start
                                                    else '')


@dataclass(frozen=True)
class Own:
    """How files of one's own become a dataset."""
    layout: tuple = arg((), 'the axes of an array in their order, such as NTCHW, and of single '
                            'ones, such as nu=N', **SEVERAL)
    variables: tuple = arg((), 'those to read, in the order of the channels; default: the only one',
                           **SEVERAL)
    channels: tuple = arg((), 'their names; default: of the variables', **SEVERAL)
    frames: int = arg(0, 'cut trajectories into pieces of N frames', least=0, metavar='N')
    dt: float = arg(0.0, 'the time between two frames; 0: as in the file, or 1', metavar='X')
    uneven: bool = arg(False, 'take steps of time or grid that are uneven or differ as equal; of The '
                              'Well, too')
    test_source: tuple = arg((), 'files that are the test set', **SEVERAL)
    test: float = arg(0.1, 'share of the trajectories', most=0.99, metavar='X')
    valid: float = arg(0.1, 'share of the trajectories', most=0.99, metavar='X')
    split: str = arg('seed', 'test trajectories are drawn, or the last', choices=['seed', 'order'])
    seed: int = arg(0, 'that draws them', least=0, metavar='N')

    def __post_init__(self):
        check_fields(self)


def reader(main, axes, space):
    """The function `read` of a Source on the grid `space` of the variables {name: axes}."""

    def along_all(array, its, cut):
        """An array at {axis: slice}, (N, T, X, Y, Z, C), of which the axes that it lacks are 1."""
        index = [0] * len(array.shape)                                      # of more axes of size 1
        for axis, place in zip(its, places(array.shape, its)):
            index[place] = cut.get(axis, slice(None))
        values = array[tuple(index)]
        if np.ma.isMaskedArray(values):
            values = values.astype(np.float64).filled(np.nan)
        values = np.transpose(values, [its.index(axis) for axis in ORDER if axis in its])
        values = np.expand_dims(values, [i for i, axis in enumerate(ORDER) if axis not in its])
        return values.reshape(*values.shape[:5], -1)

    def block(paths, **cut):
        with opened(paths, axes) as found:
            parts = [along_all(found[name], its, cut) for name, its in axes.items()]
        shape = np.broadcast_shapes(*(part.shape[:5] for part in parts))
        u = np.concatenate([np.broadcast_to(u, (*shape, u.shape[5])) for u in parts], -1)
        return u.reshape(*shape[:2], *space, -1)

    def read(piece, n, t):
        t = slice(piece.start + t.start, piece.start + t.stop)
        if 'T' in main:
            return block(piece.parts[0], N=n, T=t)
        return np.concatenate([block(paths, N=n) for paths in piece.parts[t]], 1)
    return read


# ------------------------------------------------------------------------------------ several files

def numbered(paths):
    """{path: its text and its numbers in turn}, by which paths are sorted, and whether the numbers
    of sorted ones rise by even steps.

    u_10 comes after u_9, t_-1 after t_-2. 1.10 is a number, or 1 and 10 if only these are all
    different or rise by even steps.
    """
    readings = []
    for point in r'\.', '(?!)':
        number = rf'((?:(?<=[_=])-)?\d+(?:{point}\d+(?:[eE][+-]?\d+)?|[eE][+-]\d+)?)'
        parts = {path: re.split(number, str(path)) for path in paths}
        keys = {path: tuple(float(word) if i % 2 else word for i, word in enumerate(words))
                for path, words in parts.items()}
        lengths = {len(key) for key in keys.values()}
        steps = [np.diff(numbers) for numbers in zip(*(key[1::2] for key in sorted(keys.values())))]
        even = len(keys) == 1 or len(lengths) == 1 != max(lengths) and all(
            np.ptp(x) <= 0.1 * abs(x).max() for x in steps)
        readings.append((len({*keys.values()}), even, keys))
    *_, even, keys = max(readings, key=lambda reading: reading[:2])
    return keys, even


def in_order(paths):
    """Paths, or names, sorted by their text and their numbers."""
    return sorted(sorted(paths), key=numbered(paths)[0].get)


def place_of(path):
    """A path in the folder itself where that is a link; a file that is one stands for itself."""
    return path.parent.resolve() / path.name


def paths_of(sources):
    """Files, each once, in the order of the numbers in their names; a folder stands for its files,
    or if it has none, for those of the folders in it; a line says so where it has both."""
    def files(paths):
        links_first = sorted(paths, key=lambda path: (not path.parent.is_symlink(), path))
        return {place_of(path): path for path in links_first if path.suffix.lower() in KINDS
                and path.is_file() and path.name[0] != '.'}
    found, folders = {}, {}
    for source in map(Path, sources):
        inside, below = files([source, *source.glob('*')]), files(source.glob('[!.]*/*'))
        if not (inside or below):
            deeper = f'; name the folders, as {source}/*' if files(source.glob('*/*/*')) else ''
            raise InputError(f'{source}: there is no file of the kinds {" ".join(KINDS)} in it or '
                             f'its folders{deeper}')
        if inside and below:
            warn(f'{source}: its own files are read, and not the {len(below)} in its folders')
        found = (inside or below) | found
    for path in found.values():
        folders.setdefault(path.parent, []).append(path)
    return [path for folder in in_order(folders) for path in in_order(folders[folder])]


def agree(paths, uneven):
    """Raise InputError if files of one run differ in their times or grid points."""
    said = {}
    for path in paths:
        with opened([path], SAID) as found:
            sizes = {1, *chain(*(array.shape for array in found.values() if array is not None))}
            for name, values in points_of(found, SAID, sizes):
                known, there = said.setdefault(name, (values, path))
                rounding = 1e-3 * np.ptp(values) / values.size
                same = known.shape == values.shape and np.allclose(known, values, 0, rounding)
                require(uneven or same, f'{path}: {name} differs from that of {there}; --uneven '
                                        f'takes them as equal')


def each_in_one(paths, names):
    """Whether several files have variables `names`, and each of these is in exactly one of them."""
    if not 1 < len(paths) <= len(names):
        return False
    inside = [{*names} & contents(path, names)[0].keys() for path in paths]
    return all(inside) and sorted(chain(*inside)) == sorted(names)


def with_equal_numbers(folder, names):
    """The files of a folder in groups whose names differ in the variable alone, in their order."""
    rests = {path: path.name[len(variable_of(path, names)):] for path in folder}
    keys, _ = numbered(dict.fromkeys(rests.values()))
    number = lambda path: keys[rests[path]]
    return [[*group] for _, group in groupby(sorted(folder, key=number), number)]


def join(paths, own):
    """[Piece.parts] of the trajectories in files, and the names of the variables to read.

    Prints what was joined along what.
    """
    main, named = parse_layout(own.layout)
    names = own.variables
    if not main or not names:
        shapes, listed = contents(paths[0])
        names = [name for name, shape in shapes.items() if places(shape, main)]
        require(main and (len(names) == 1 or '' in names),
                f'{paths[0]}: {len(names)} arrays fit --layout {main or "(none)"}; name the axes '
                f'in their order, such as NTHWC, and by --variables what to read; there are '
                f'{listed}')
        names = names[:1]
        print(f'{paths[0].name}: read {names[0] or "it"} of {listed}')
    require(len({*names}) == len(names) and named.keys() <= {*names},
            f'--layout {" ".join(own.layout)}, --variables {" ".join(names)}: expected different '
            f'variables, and the axes of these')
    how = 'trajectories (N)'
    runs = [((path,),) for path in paths]
    folders = [tuple(folder) for _, folder in groupby(paths, lambda path: path.parent)]
    if 'T' not in main:
        how = 'frames (T)'                                  # those in a folder are a trajectory
        runs = [tuple((path,) for path in folder) for folder in folders]
    alike = [tuple(group) for folder in folders if len(names) > 1
             for group in with_equal_numbers(folder, names)]
    for groups in [tuple(paths)], folders, alike:
        others = [group for group in groups if not each_in_one(group, names)]
        if len(others) < len(groups):
            if others:
                raise InputError(f'{others[0][0].parent}: expected each of --variables '
                                 f'{" ".join(names)} in one file, as in the others; there is '
                                 f'{others[0][0].name}')
            how = 'channels' if len(groups) == 1 else 'channels of trajectories (N)'
            runs = [(group,) for group in groups]
            if groups is alike and 'T' not in main:
                how = 'channels of frames (T)'
                runs = [tuple(run) for _, run in groupby(alike, lambda group: group[0].parent)]
            for group in groups:
                agree(group, own.uneven)
            break                               # or files of one folder would be opened again
    if len(paths) > 1:
        first, last = ['/'.join(path.parts[-min(len(folders), 2):]) for path in paths[::len(paths) - 1]]
        print(f'{len(paths)} files are joined as {how}: {first} ... {last}')
    what = {'frames (T)': 'folder', 'trajectories (N)': 'file'}.get(how)
    mine = [path if what == 'file' else path.parent for path in paths if path not in own.test_source]
    above = len(folders) > 1 and what == 'file'
    labels = dict.fromkeys(f'{path.parent.name}/{path.stem}' if above else path.stem for path in mine)
    texts = {key[::2]: label for label, key in numbered(labels)[0].items()}
    if what and len(texts) > 1 and not own.variables:
        warn(f'the names {" ".join(sorted(texts.values())[:4])} differ in more than numbers, and each '
             f'{what} is a trajectory; if they are variables of one, name these by --variables')
    return runs, names


def what_all_say(steps, units, uneven):
    """`said` in the layout of data.py, of files that agree in it.

    steps: {what: [(step, file)]}; raises InputError for different ones, unless they may be `uneven`.
    units: {variable: {unit or '': a file}}; a line says where they differ.
    """
    said = []
    for what, several in steps.items():
        low, here = min(several, default=(1, ''))
        high, there = max(several, default=(1, ''))
        words = f'{there}: the {what} is {high:g}, in {here} {low:g}'
        if not np.isclose(low, high, rtol=1e-3, atol=0):
            require(uneven, f'{words}; ' + ('turn the axis in one of them' if low == -high else
                                            '--uneven takes them as equal'))
            warn(f'{words}; they are taken as equal')
        said += [f'{what} is {low:.9g}'] if several else []
    for name, files in units.items():
        words = [f'in {unit} in {path}' for unit, path in files.items() if unit]
        if len(words) > 1:
            warn(f'{name} is {", ".join(words)}; the numbers are taken as they are')
        said += [f'unit of {name} is {unit}' for unit in files if unit][:1]
    return said


def steps_of_run(run, times, numbers, own):
    """[(time between frames, file)] of a run, whose dt the files say as `numbers` or by their times.

    times: {name: [(N, T) of each part]}. numbers: [(dt, file)], which count if there are no times.
    A line says so where the names of its files are not those of frames in their order.
    """
    lines = {name: np.concatenate(parts, 1) for name, parts in times.items()
             if len(parts) == len(run)}
    lines = {name: line for name, line in lines.items() if line.shape[1] > 1}
    first, last = run[0][0], run[-1][0]
    if lines:
        name = min(lines, key=lambda name: np.ptp(lines[name]) == 0)    # that of a forecast's start
        where = ' ... '.join([str(first), last.name][:len(run)]) + f': {name}'
        ways = np.diff(lines[name])
        require(own.dt or not ((ways > 0).any(1) & (ways < 0).any(1)).any(), f'{where} goes back' + (
            ': the order of the names is not that of time' if len(run) > 1 else
            '; if these are no times, --dt says the time between frames'))
        steps = even_steps(where, lines[name], own.uneven)
        require(own.dt or min(steps) > 0, f'{where} does not rise beyond its rounding; if these are '
                                          f'no times, --dt says the time between frames')
        return [(dt, first) for dt in steps]
    names = [path.name for path, *_ in run]
    keys, even = numbered(names)
    texts = Counter(key[::2] for key in keys.values())
    require(len(texts) < 2 or min(texts.values()) < 2,
            f'{first.parent}: {names[0]} ... {names[-1]} are {len(texts)} kinds of files; name by '
            f'--variables what is in each of them, or move them into different folders')
    if not even:
        warn(f'{first.parent}: are {" ".join(names[:3])} ... {last.name} the frames of one run in '
             f'their order, and is none missing? The numbers in the names do not rise by even '
             f'steps; several runs need a folder each')
    return numbers


def channels_of(name, C, ours, saying):
    """The names of the C channels of a variable: its own, or those that a file of `ours` says.

    saying: gets a line on their order.
    """
    if len(ours['channels']) == C:
        saying.append(f'order of channels in {name} is {" ".join(ours["channels"])}')
        return ours['channels']
    return [name] if name and C == 1 else [f'{name}_{c}'.strip('_') for c in range(C)]


def find_runs(paths, own):
    """The Source of whole trajectories in files, by the flags of an Own.

    Its shape is that of the shortest. dt is None if the files do not say it.
    """
    main, axes = parse_layout(own.layout)
    runs, names = join(paths, own)
    near = ancestry(names[0])
    grid, axis_of = {}, {}                                  # {axis of space: size}, see fit_axes
    items, steps = [], {BETWEEN: []}                        # steps: {what: [(step, file)]}
    said, units = {}, {}            # {name: (what it says, in which file)}, {name: {unit: file}}
    moving = set()                                          # variables without T that still move
    counts = {}                                             # {name: its numbers at a point}
    spans, once = [], {}                                    # [(first time, last, file)], {what: line}
    for run in runs:
        times, dts, values = {}, [], {}     # {name: [(N, T)]}, [(dt, file)], {name: a hash of it}
        for part in run:
            path = part[0]
            with opened(part, (*names, *SAID)) as found:
                arrays = {name: found.get(name) for name in names}
                for name, array in arrays.items():
                    if array is None:
                        raise InputError(f'--variables {name or "(none)"}: not in {path}, which '
                                         f'has {contents(path)[1]}')
                    here = {**UNSAID, **storable(array.said if isinstance(array, Stored) else {})}
                    if not said.get(name, (UNSAID,))[0]['channels']:        # the first with names
                        said[name] = here, path
                    what, words = difference(said[name][0], here, said[name][1], path)
                    require(not what, words)
                    units.setdefault(name, {}).setdefault(text_said(array), path)
                sizes = dict(grid)
                axes = fit_axes(' '.join(map(str, part)), arrays, main, axes, sizes, axis_of)
                grid = {axis: sizes[axis] for axis in 'XYZ' if axis in sizes}
                fields = {*map(id, arrays.values())}                        # may be called z, too
                found = {name: found[name] for name in sorted(found, key=near)
                         if id(found[name]) not in fields}
                for what, step in grid_steps(path, found, grid, own.uneven).items():
                    steps.setdefault(what, []).append((step, path))
                T = sizes.get('T', 1)
                along_T = {name: array for name, array in found.items() if 'T' == axis_of.get(
                    (getattr(array, 'dimensions', ()) or ('',))[-1], 'T')}
                read = set()
                for end in [T, T + 1] if T > 1 else [T]:        # PDEBench says when it ends, too
                    for name, points in points_of(along_T, TIMES, [end]):
                        times.setdefault(name, []).append(points[:, :T])
                        read.add(name)
                for name, array in along_T.items():
                    called = name.split('/')[-1] in TIMES and not near(name)[0] and name not in read
                    if called and (array is None or math.prod(array.shape) > 1):
                        once.setdefault(name, f'{path}: {name} is no number of each frame, and is '
                                              f'not used')
                    if name in read and text_said(array).split(' ')[0].lower() in SECONDS:
                        units.setdefault('time', {}).setdefault('s', path)      # as they became
                dts += [(dt, path) for dt in dt_said(arrays, found, near, sizes.get('N'))]
                for name, its in axes.items():
                    if 'T' not in main and name not in moving:
                        numbers = np.asarray(arrays[name][()], np.float32)
                        known = hash(numbers.tobytes())
                        if values.setdefault(name, known) != known:
                            moving.add(name)
                    points = math.prod(sizes[axis] for axis in its if axis not in 'CK')
                    C = math.prod(arrays[name].shape) // points
                    require(counts.setdefault(name, C) == C,
                            f'{path}: {name} has {C} channels, in {paths[0]} {counts[name]}')
        items += [(Piece(run, sizes.get('T', len(run))), n) for n in range(sizes.get('N', 1))]
        between = steps_of_run(run, times, dts, own)
        steps[BETWEEN] += between
        for (dt, _), (step, _) in zip(dts, between * len(dts)):     # the same where there are no times
            if not math.isclose(dt, step, rel_tol=1e-3) and not own.dt:
                once.setdefault('dt', f'{path}: dt is {dt:g}, but its times have steps of {step:g}, '
                                      f'which count; --dt says which is right')
        parts = next(iter(times.values()), [[]])
        if len(parts[0]) == 1:                                          # of one trajectory
            spans.append((parts[0][0, 0], parts[-1][0, -1], path))
    least = min([dt for dt, _ in steps[BETWEEN]], default=0)
    for (_, end, one), (start, _, other) in zip(spans, spans[1:]):
        if 0 <= start - end < 1.01 * least and not {one, other} & {*own.test_source}:
            once.setdefault('span', f'{other} begins where {one} ends; if they are pieces of one run, '
                                    f'join them in one file, or pieces of it lie in several splits')
    for line in once.values():
        warn(line)
    saying = what_all_say(steps, units, own.uneven)
    saying += [f'axis of {name} is {axis}' for name, axis in axis_of.items()]
    channels, fixed = [], []                                # fixed: whether each is static
    for name, its in axes.items():
        new = channels_of(name, counts[name], said[name][0], saying)
        if len(new) > 1:
            saying.append(f'number of channels in {name} is {len(new)}')
        lacks = 'T' not in main or {*main} - {*its, 'C'}
        still = bool(lacks) and 'T' not in its and name not in moving
        if still:
            print(f'{name} is static, {"along " + its if its else "a number"}')
        channels += new
        fixed += [still or channel in said[name][0]['static'] for channel in new]
    require(len(own.channels) in (0, len(channels)), f'--channels {" ".join(own.channels)}: there '
            f'are {len(channels)} channels, {" ".join(channels)}')
    channels = [*(own.channels or channels)]
    require(len({*channels}) == len(channels), f'{paths[0]}: the channels {" ".join(channels)} need '
            f'different names; give them by --channels')
    attributes = dict(
        channels=channels, static=[name for name, still in zip(channels, fixed) if still],
        dt=float(np.mean([dt for dt, _ in steps[BETWEEN]])) if steps[BETWEEN] else None,
        variables=[*axes], said=saying,
        layout=[main, *(f'{name}={its}' for name, its in axes.items() if its != main)],
        source=' '.join(dict.fromkeys([paths[0].name, paths[-1].name])))
    space = [1, *grid.values()][-max(2, len(grid)):]                    # one dimension is (1, X)
    shape = min(piece.frames for piece, _ in items), *space, len(channels)
    return Source(shape, items, reader(main, axes, space), attributes)


# ------------------------------------------------------------------------------------ the dataset

def splits(trajectories, own):
    """{split: pieces} of lists of pieces, one a trajectory, by the flags of an Own."""
    count = len(trajectories)
    order = np.arange(count)[::-1]
    if own.split == 'seed':
        order = np.random.default_rng(own.seed).permutation(count)
    tests = 0 if own.test_source else max(1, round(own.test * count))
    valids = tests + round(own.valid * count)
    where = ' outside --test_source' if own.test_source else ''
    require(valids < count, f'{count} trajectories{where} are too few for --test {own.test} and '
                            f'--valid {own.valid}; --frames N cuts long ones into pieces of N')
    numbers = {'test': order[:tests], 'valid': order[tests:valids], 'train': order[valids:]}
    return {split: [piece for i in sorted(some) for piece in trajectories[i]]
            for split, some in numbers.items()}


def own_source(sources, own):
    """The Source in files of one's own, which is split, by the flags of an Own."""
    own = replace(own, test_source=tuple(paths_of(own.test_source)))
    source = find_runs(paths_of([*sources, *own.test_source]), own)
    attributes = source.attributes
    main, named = parse_layout(attributes['layout'])
    for name, axes in named.items():
        require('T' not in axes or {*main} <= {*axes, 'C', 'K'},
                f'--layout {name}={axes}: what changes in time needs all of {main}')
    *space, C = source.shape[1:]
    few = C <= min([16, *(size for size in space if size > 1)])
    require('C' not in main or own.channels or few,
            f'--layout {" ".join(own.layout)}: {C} channels on a grid of {show(tuple(space))}; if '
            f'that is right, name them by --channels')
    lengths = [piece.frames for piece, _ in source.items]
    shortest, longest = min(lengths), max(lengths)
    require(longest > 1 and own.frames != 1,
            f'--layout {main}, --frames {own.frames}: a trajectory needs two frames; those of a run '
            f'lie in one folder')
    frames = own.frames or longest
    require(frames <= (longest if own.frames else shortest),
            f'--frames {own.frames or "(none)"}: there are trajectories of {shortest} to {longest} '
            f'frames; --frames {max(2, shortest)} cuts them into pieces of as many')
    if own.frames:
        print(f'{sum(length % frames for length in lengths)} frames at the ends are left out')
    tests = [*map(place_of, own.test_source)]
    mine, given = [], []                                            # pieces of each trajectory
    for piece, n in source.items:
        starts = range(0, piece.frames - frames + 1, frames)
        pieces = [(piece._replace(frames=frames, start=start), n) for start in starts]
        (given if place_of(piece.parts[0][0]) in tests else mine).append(pieces)
    if len(mine) == 1 and own.frames:
        print('one trajectory, which is split in time' + (
            '' if given else ': its last pieces are for testing'))
        mine = [[piece] for piece in mine[0]]
        own = replace(own, split='order')
    items = splits([pieces for pieces in mine if pieces], own)
    items['test'] += sum(given, [])
    items = {split: pieces for split, pieces in items.items() if pieces}
    dt = own.dt or attributes['dt']
    other = '' if attributes['dt'] in (None, dt) else f' instead of {attributes["dt"]:g} in the files'
    origin = f'of --dt{other}' if own.dt else 'of the files'
    print('dt 1, since no file says it' if dt is None else f'dt {dt:g}, {origin}')
    return source._replace(shape=(frames, *source.shape[1:]), items=items,
                           attributes=attributes | {'dt': dt})
