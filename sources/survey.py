"""What files of one's own say, taken together: sizes, names, units, steps in time and space.

N trajectories, T frames, X Y Z (or H W D) axes of space, C channels, or C K of a tensor.
"""
import math
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs import InputError
from data import UNSAID, difference
from runtime.stored import number_of, require, storable
from runtime.terminal import warn
from sources.axes import (
    SAID,
    SECONDS,
    TIMES,
    dt_said,
    even_steps,
    fit_axes,
    grid_steps,
    labels_of,
    parse_layout,
    points_of,
    text_said,
    texts_of,
)
from sources.joined import numbered
from sources.kinds import Stored, contents, opened

BETWEEN = 'time between frames'


class Part(NamedTuple):
    """What the files of one part of a run say."""
    path: Path                  # the first of them
    sizes: dict                 # {axis: size}
    times: dict                 # {name: (N, T)}
    dts: list                   # the times between frames, where they are said as numbers


class Survey:
    """What the files of all runs say together: `add` takes in one run after another.

    names: of the variables. own: an Own. Raises InputError where two files cannot be of one dataset.
    """

    def __init__(self, names, own):
        self.names = names
        self.own = own
        self.main, self.axes = parse_layout(own.layout)     # axes: {name: its axes}, see fit_axes
        self.grid, self.axis_of = {}, {}                    # {axis of space: size}, see fit_axes
        self.between = []                                   # [(time between frames, file)]
        self.points = {}                                    # {coordinate: [(first, step, file)]}
        self.said = {}                                      # {name: (what a file says, the file)}
        self.units = {}                                     # {name: {unit: a file}}
        self.counts = {}                                    # {name: (its numbers at a point, a file)}
        self.moving = set()                                 # variables without T that still move
        self.spans = []                                     # [(first time, last, file)] of runs
        self.lines = {}                                     # {what: a line}, each printed once

    def add(self, run):
        """Take in the parts of a run; returns the numbers of its frames and trajectories."""
        known = {}
        parts = [self.part(paths, known) for paths in run]
        one, *others = parts
        N = one.sizes.get('N', 1)
        for other in others:
            require(other.sizes.get('N', 1) == N, f'{other.path}: {other.sizes.get("N", 1)} '
                                                  f'trajectories, in {one.path} {N}')
        self.add_times(run, parts)
        return one.sizes.get('T', len(parts)), N

    def near(self, name):
        """The key by which names of arrays are sorted: first those in the group of the first
        variable, then those in the groups around it, from the inside out, then all others.
        """
        *group, _ = name.split('/')
        *around, _ = self.names[0].split('/')
        return group != around[:len(group)], -len(group)

    def part(self, paths, known):
        """The Part in some files.

        known: what the first part of the run says, {name: a hash of its numbers} and {'trajectories
            of name': (what they are called, the file)}; gets what is new.
        """
        path = paths[0]
        with opened(paths, (*self.names, *SAID)) as found:
            fields = self.fields(found, path)
            sizes = dict(self.grid)
            self.axes = fit_axes(' '.join(map(str, paths)), fields, self.main, self.axes, sizes,
                                 self.axis_of)
            self.grid = {axis: sizes[axis] for axis in 'XYZ' if axis in sizes}
            near_first = {name: found.texts.get(name, found[name])
                          for name in sorted(found, key=self.near)}
            self.look_at_labels(fields, near_first, path, known)
            self.look_at_numbers(fields, sizes, path, known)
            theirs = {*map(id, fields.values())}                            # may be called z, too
            others = {name: found[name] for name in near_first if id(found[name]) not in theirs}
            places = grid_steps(path, others, self.grid, self.axis_of, self.points, self.own.uneven)
            for name, (first, step) in places.items():
                self.points.setdefault(name, []).append((first, step, path))
            times = self.times(others, path, sizes.get('T', 1))
            beside = [array for name, array in others.items()   # in the field's group or around it
                      if name.split('/')[-1] == 'dt' and not self.near(name)[0]]
            dts = dt_said(fields, beside, sizes)
            if beside and not (dts or times):
                self.lines.setdefault('dt', f'{path}: dt is no number, or several, and is not used')
        if len(paths) > 1:
            self.agree(paths)
        return Part(path, sizes, times, dts)

    def agree(self, paths):
        """Raise InputError if files of a part differ in times, coordinates, or variables in all."""
        said = {}
        along = {name for name, axis in self.axis_of.items() if axis in 'NTXYZ'}
        shared = {*self.names}.intersection(*(contents(path, self.names)[0] for path in paths))
        for path in paths:
            with opened([path], (*self.names, *SAID)) as found:
                sizes = {1, *chain(*(array.shape for array in found.values() if array is not None))}
                for name, values in points_of(found, SAID, sizes, along, dated=True):
                    first, there = said.setdefault(name, (values, path))
                    rounding = 1e-3 * np.ptp(values) / values.size
                    same = np.shape(first) == values.shape and np.allclose(first, values, 0, rounding)
                    require(self.own.uneven or same, f'{path}: {name} differs from that of {there}; '
                                                     f'--uneven takes them as equal')
                for name in along & found.texts.keys():
                    texts = texts_of(np.ma.asanyarray(found.texts[name][()]))
                    first, there = said.setdefault(name, (texts, path))
                    require(np.array_equal(first, texts),
                            f'{path}: {name} differs from that of {there}')
                for name in shared:
                    values = found[name][()]
                    first, there = said.setdefault(f'variable {name}', (np.asarray(values), path))
                    same = first.shape == values.shape and np.allclose(first, values, 1e-6, 0, True)
                    require(same, f'{path}: {name} differs from that of {there}')

    def fields(self, found, path):
        """{name: array} of the variables among those `found` in a file; notes what it says of them."""
        fields = {name: found.get(name) for name in self.names}
        for name, array in fields.items():
            if array is None:
                advice = ('; without --variables, --channels names what a .npy holds'
                          if path.suffix == '.npy' and len(self.names) == 1 else '')
                raise InputError(f'--variables {name or "(none)"}: not in {path}, which has '
                                 f'{contents(path)[1]}{advice}')
            self.units.setdefault(name, {}).setdefault(text_said(array), path)
        return fields

    def look_at_labels(self, fields, found, path, known):
        """Compare names of channels with those of other files, and of trajectories in one run.

        known: as in `part`.
        """
        for name, array in fields.items():
            its = self.axes[name]
            names = [] if 'K' in its else labels_of(array, its, 'C', found)
            if name and (len(fields) > 1 or any(map(math.isfinite, map(number_of, names)))):
                names = [f'{name}_{label}' for label in names]
            ours = array.said if isinstance(array, Stored) else {}
            here = {**UNSAID, **storable({'channels': names if len(names) > 1 else [], **ours})}
            if not self.said.get(name, (UNSAID,))[0]['channels']:           # the first with names
                self.said[name] = here, path
            first, there = self.said[name]
            what, words = difference(first, here, there, path)
            require(not what, words)
            members = labels_of(array, its, 'N', found)
            first, there = known.setdefault(f'trajectories of {name}', (members, path))
            require(members == first or sorted(members) != sorted(first),
                    f'{path}: the trajectories of {name} are {" ".join(members[:4])} ..., in {there} '
                    f'{" ".join(first[:4])} ...')

    def look_at_numbers(self, fields, sizes, path, known):
        """Count the numbers at a point, and see which variables without T move.

        sizes: {axis: size}. known: as in `part`.
        """
        for name, its in self.axes.items():
            if 'T' not in self.main and name not in self.moving:
                here = hash(np.asarray(fields[name][()], np.float32).tobytes())
                if known.setdefault(name, here) != here:
                    self.moving.add(name)
            points = math.prod(sizes[axis] for axis in its if axis not in 'CK')
            C = math.prod(fields[name].shape) // points
            known_C, there = self.counts.setdefault(name, (C, path))
            require(C == known_C, f'{path}: {name} has {C} channels, in {there} {known_C}')

    def times(self, others, path, T):
        """{name: (N, T)} of the times among {name: array} in a file; notes those of no use."""
        along = {name: self.axis_of.get((getattr(array, 'dimensions', ()) or ('',))[-1], 'T')
                 for name, array in others.items()}
        frames = {name: others[name] for name, axis in along.items() if axis == 'T'}
        times = {}
        for end in [T, T + 1] if T > 1 else [T]:                # PDEBench says when it ends, too
            times |= {name: points[:, :T] for name, points in points_of(frames, TIMES, [end])}
        for name, array in others.items():
            called = name.split('/')[-1] in TIMES and not self.near(name)[0] and along[name] in 'NT'
            if called and not times and (array is None or math.prod(array.shape) > 1):
                self.lines.setdefault(name, f'{path}: {name} is no number of each frame, and is not '
                                            f'used')
            if name in times and text_said(array).split(' ')[0].lower() in SECONDS:
                self.units.setdefault('time', {}).setdefault('s', path)             # as they became
        return times

    def add_times(self, run, parts):
        """Note the time between the frames of a run, when it begins and when it ends."""
        times = {name: np.concatenate([part.times[name] for part in parts], 1)
                 for name in parts[0].times if all(name in part.times for part in parts)}
        dts = [(dt, part.path) for part in parts for dt in part.dts]
        between = steps_of_run(run, times, dts, self.own)
        self.between += between
        for (dt, path), (step, _) in zip(dts, between * len(dts)):  # without times the same
            if not math.isclose(dt, step, rel_tol=1e-3) and not self.own.dt:
                self.lines.setdefault('dt', f'{path}: dt is {dt:g}, but its times have steps of '
                                            f'{step:g}, which count; --dt says which is right')
        line = next(iter(times.values()), ())
        if len(line) == 1:                                                  # of one trajectory
            self.spans.append((line[0, 0], line[0, -1], parts[-1].path))

    def warn_of_pieces(self):
        """Note where a run begins as another ends, which may be pieces of one."""
        least = min([dt for dt, _ in self.between], default=0)
        for (_, end, one), (start, _, other) in zip(self.spans, self.spans[1:]):
            if 0 <= start - end < 1.01 * least and not {one, other} & {*self.own.test_source}:
                self.lines.setdefault('span', f'{other} begins where {one} ends; if they are pieces '
                                              f'of one run, join them in one file, or pieces of it '
                                              f'lie in several splits')

    def require_one_way(self):
        """Raise InputError if one dimension of an axis of space rises and another one falls."""
        ways = {}
        for name, ((_, step, path), *_) in self.points.items():
            if name in self.axis_of and step:
                first, up = ways.setdefault(self.axis_of[name], (name, step > 0))
                require(self.own.uneven or up == (step > 0),
                        f'{path}: {name} goes the other way than {first}, along one axis; turn the '
                        f'axis for one of them, or --uneven takes them as equal')

    def attributes(self):
        """Those of `data` in the layout of data.py. Prints the lines on what the files say."""
        self.require_one_way()
        self.warn_of_pieces()
        for line in self.lines.values():
            warn(line)
        saying = what_all_say(self.between, self.points, self.units, self.own.uneven)
        saying += [f'axis of {name} is {axis}' for name, axis in self.axis_of.items()]
        channels, static = [], []                           # static: whether each is
        for name, its in self.axes.items():
            known, C = self.said[name][0], self.counts[name][0]
            new = [name] if name and C == 1 else [f'{name}_{c}'.strip('_') for c in range(C)]
            if len(known['channels']) == C:
                new = known['channels']
                saying.append(f'order of channels in {name} is {" ".join(new)}')
            if len(new) > 1:
                saying.append(f'number of channels in {name} is {len(new)}')
            still = 'T' not in its and name not in self.moving
            if still:
                print(f'{name} is static, {"along " + its if its else "a number"}')
            channels += new
            static += [still or channel in known['static'] for channel in new]
        given = self.own.channels or channels
        require(len(given) == len(channels), f'--channels {" ".join(given)}: there are '
                                             f'{len(channels)} channels, {" ".join(channels)}')
        require(len({*given}) == len(given), f'{self.said[self.names[0]][1]}: the channels '
                                             f'{" ".join(given)} need different names; give them '
                                             f'by --channels')
        dts = [dt for dt, _ in self.between]
        return dict(
            channels=[*given], static=[name for name, still in zip(given, static) if still],
            dt=float(np.mean(dts)) if dts else None, variables=[*self.axes], said=saying,
            layout=[self.main, *(f'{name}={its}' for name, its in self.axes.items()
                                 if its != self.main)])


def what_all_say(between, points, units, uneven):
    """`said` in the layout of data.py, of files that agree in it.

    between: [(time between frames, file)]. points: {coordinate: [(first, step, file)]}. Raises
        InputError for different steps, unless they may be `uneven`.
    units: {variable: {unit or '': a file}}. A line says where these differ, or the first points.
    """
    said = []
    steps = {BETWEEN: between} if between else {}
    steps |= {f'step of {name}': [(step, path) for _, step, path in several]
              for name, several in points.items()}
    for what, several in steps.items():
        (low, here), (high, there) = min(several), max(several)
        words = f'{there}: the {what} is {high:g}, in {here} {low:g}'
        if not np.isclose(low, high, rtol=1e-3, atol=0):
            require(uneven, f'{words}; ' + ('turn the axis in one of them' if low == -high else
                                            '--uneven takes them as equal'))
            warn(f'{words}; they are taken as equal')
        said.append(f'{what} is {low:.9g}')
    for name, several in points.items():
        several = [each for each in several if each[0] is not None] or [(math.inf, 0, '')]
        (low, step, here), (high, _, there) = min(several), max(several)
        if high - low > abs(step):
            warn(f'{there}: {name} begins at {high:g}, in {here} at {low:g}; the fields are taken as '
                 f'if they lay in one place')
        elif low < math.inf:
            said.append(f'start of {name} is {low:.9g}')
    for name, files in units.items():
        words = [f'in {unit} in {path}' for unit, path in files.items() if unit]
        if len(words) > 1:
            warn(f'{name} is {", ".join(words)}; the numbers are taken as they are')
        said += [f'unit of {name} is {unit}' for unit in files if unit][:1]
    return said


def steps_of_run(run, times, numbers, own):
    """[(time between frames, file)] of a run, whose dt the files say as `numbers` or by their times.

    times: {name: (N, T)} of all its frames.
    numbers: [(dt, file)], which count if there are no times.
    Without times a line says where the names of its files may not be in the order of its frames.
    """
    lines = {name: line for name, line in times.items() if line.shape[1] > 1}
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
