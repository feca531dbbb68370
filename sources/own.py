"""Files of one's own, of several kinds and with axes in any order, as a Source.

N trajectories, T frames, X Y Z (or H W D) axes of space, C channels, or C K of a tensor. An axis
that --layout lacks is the one along which the files go.
"""
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from configs import arg, check_fields, show
from runtime.stored import require
from sources.axes import parse_layout, places
from sources.joined import join, paths_of, place_of
from sources.kinds import opened
from sources.survey import Survey

ORDER = 'NTXYZCK'                                                   # of our axes; K: a tensor's
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
        paths = ' '.join(map(str, self.parts[0]))
        return f'{paths}, from its frame {self.start} on' if self.start else paths


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

    __post_init__ = check_fields


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


def find_runs(paths, own):
    """The Source of whole trajectories in files, by the flags of an Own.

    Its shape is that of the shortest. dt is None if the files do not say it.
    """
    runs, names = join(paths, own)
    survey = Survey(names, own)
    items = []
    for run in runs:
        frames, N = survey.add(run)
        items += [(Piece(run, frames), n) for n in range(N)]
    attributes = survey.attributes()
    attributes['source'] = ' '.join(dict.fromkeys([paths[0].name, paths[-1].name]))
    space = [1, *survey.grid.values()][-max(2, len(survey.grid)):]      # one dimension is (1, X)
    shape = min(piece.frames for piece, _ in items), *space, len(attributes['channels'])
    return Source(shape, items, reader(survey.main, survey.axes, space), attributes)


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
    own = replace(own, test_source=tuple(paths_of(own.test_source, own.variables)))
    source = find_runs(paths_of([*sources, *own.test_source], own.variables), own)
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
            f'--frames {own.frames or "(none)"}: there are trajectories of {shortest} frames, in '
            f'{source.items[lengths.index(shortest)][0]}, to {longest}; --frames {max(2, shortest)} '
            f'cuts them into pieces of as many')
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
