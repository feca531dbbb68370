"""The file layout, and how a batch is read from it.

DATA/<dataset>/train.h5, test.h5 and perhaps valid.h5 each hold one HDF5 dataset `data` of float32
numbers with the shape (N, T, H, W, C), in 3-D (N, T, H, W, D, C): trajectories, frames, grid
points, field channels. It is contiguous, so that a window is one read; chunks and other types of
real numbers are read too. A steady problem has two frames, the input and the solution. The
attributes of `data` are all optional:

    channels  the names, in order       static     the names of channels that do not evolve
    dt        the time between frames   t_test     the number of frames to predict at test
    pde       the equation, in words    source     the generator and its seed, or a benchmark's file
    layout    the axes of own files     variables  the names of the arrays that were read there
    said      what these say of their steps in time and space, units and order of channels

Shapes: B batch, T input frames, H W grid points (`space` stands for all spatial axes), C field
channels, C' those of one dataset, b samples of one dataset or one grid. The words of
docs/contributing.md have one meaning in every file.
"""
import functools
import math
import re
import shutil
import tempfile
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, combinations, groupby
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import torch
import torch.nn.functional as F

import configs
from configs import InputError
from runtime import files
from runtime.stored import number_of, require, storable, whole

PADDING = 1.0                       # the value of channels that a dataset lacks (paper, App. B.1)
AT_REST = 1e-3                      # at rest: a channel with less than this share of its deviation
SPLITS = 'test', 'valid', 'train'   # in the order of writing: a folder with a train.h5 is complete
ATTRIBUTES = 'channels', 'static', 'dt', 't_test', 'pde', 'source', 'layout', 'variables', 'said'
# what a header says where its file says nothing
UNSAID = dict(source='', channels=[], static=[], dt=None, t_test=math.inf)

# --------------------------------------------------------------------------------------- the layout

def check_headers(folder, headers):
    """{split: header} of files: the shape, and all attributes but pde; UNSAID has the defaults.

    headers: {split: (shape, dtype, attributes) of `data`}.
    Raises InputError for what is not allowed, and if the splits differ in more than the source.
    """
    said = {}
    for split, (shape, dtype, attributes) in headers.items():
        path = f'{folder}/{split}.h5'
        fits = shape and len(shape) in (5, 6) and 0 not in shape and shape[1] > 1
        require(fits and dtype.kind in 'fiub',
                f"{path}: 'data' is {dtype} {shape}; expected real numbers of shape "
                f'(N, T, H, W, C), (N, T, H, W, D, C) or (N, T, 1, X, C), with at least two frames')
        _, _, *space, C = shape = [int(size) for size in shape]
        given = {name: value for name, value in attributes.items() if name in ATTRIBUTES
                 and name != 'pde' and not isinstance(value, h5py.Empty)}       # netCDF's for ''
        said[split] = header = {**UNSAID, **storable(given), 'shape': shape}
        if 'layout' in header:                                              # of files of one's own
            header.setdefault('variables', [])
        if not header['channels'] and C < min([17, *(size for size in space if size > 1)]):
            header['channels'] = [str(c) for c in range(C)]
        channels = header['channels']
        rules = {'channels': (len({*channels}) == len(channels) == C,
                              f'{C} different names; channels come last: np.moveaxis(u, 2, -1) '
                              f'brings them there, and u[..., None] adds one'),
                 'static': ({*header['static']} < {*channels}, 'names of channels, but not of all'),
                 'dt': (header['dt'] is None or 0 < number_of(header['dt']) < math.inf,
                        'a positive number'),
                 't_test': (number_of(header['t_test']) >= 1, 'at least 1 frame')}
        for name, (kept, expected) in rules.items():
            require(kept, f'{path}: {name} {attributes.get(name, "")}: expected {expected}')
    for (one, a), (other, b) in combinations(said.items(), 2):
        what, words = difference(a, b, f'{one}.h5', f'{other}.h5')
        for name, x, y in (('static', a['static'], b['static']),
                           ('grid and channels', a['shape'][2:], b['shape'][2:])):
            if x != y:
                what, words = name, f'{one}.h5 has the {name} {x}, but {other}.h5 {y}'
        require(what in ('', 'source'), f'{folder}: {words}; they must be equal')
    return said


def difference(one, other, here, there):
    """The first of channels, static, dt and source in which two headers differ, and a line on it.

    Both are '' if there is none. What a header does not say is not compared, nor the seed and the
    grid of a source, nor a thousandth of dt. here, there: the files, for the line.
    """
    names = one['channels'], other['channels']
    unnamed = any(channels == [str(c) for c in range(len(channels))] for channels in names)
    unnamed = unnamed and len({*map(len, filter(None, names))}) < 2
    for what in ('dt', 'source') if unnamed else ('channels', 'static', 'dt', 'source'):
        a, b = (header.get(what) or '' for header in (one, other))
        if what == 'source':
            a, b = (re.sub(r' (seed|grid) \d+', '', source) for source in (a, b))
        same = math.isclose(a, b, rel_tol=1e-3) if what == 'dt' and a and b else a == b
        if not same and (a and b or what == 'static'):
            a, b = (' '.join(x) if isinstance(x, list) else x for x in (a, b))
            return what, f'{here} has the {what} {a or "none"}, but {there} has {b or "none"}'
    return '', ''


def evolving_of(header):
    """The numbers of the channels that evolve."""
    return [c for c, name in enumerate(header['channels']) if name not in header['static']]


def read_headers(folder, splits=SPLITS):
    """{split: what its file says} of those files of a dataset that exist, by `check_headers`."""
    found = {}
    for split in splits:
        path = Path(folder, f'{split}.h5')
        if path.exists():
            with files.naming(path), h5py.File(path, 'r') as file:
                stored = file['data']
                is_dataset = isinstance(stored, h5py.Dataset)
                require(is_dataset, f"{path}: 'data' is a group, not a dataset")
                found[split] = stored.shape, stored.dtype, dict(stored.attrs)
    return check_headers(folder, found)


# ------------------------------------------------------------------------------------------ writing

class Rounded:
    """The `data` of a new file, where numbers become float32, and what each channel loses by it."""

    def __init__(self, stored, path):
        self.stored = stored
        self.path = path                # for messages
        self.first = {}                 # of a channel, from which sums count, to lose no digits
        self.sums = np.zeros((stored.shape[-1], 4))     # of each channel, see `__setitem__`

    def __setitem__(self, index, values):
        """Write numbers, as h5py does. index: numbers and slices, or one list and slices."""
        single = [i for i in np.index_exp[index] if not isinstance(i, (slice, type(...)))]
        require(len(single) < 2 or not any(map(np.ndim, single)),
                f'{self.path}: expected numbers and slices in an index, or one list and slices')
        with files.naming(self.path, 'expected real numbers', Exception):
            values = np.ma.asanyarray(values)                   # which knows the masks in a list
        require(values.dtype.kind in 'fiub' and not np.ma.is_masked(values),
                f'{self.path}: {values.dtype}, or masked values; expected real numbers')
        with files.naming(self.path, f'expected an index of {self.stored.shape}', Exception):
            # the channel of each number, whatever the index
            channels = np.broadcast_to(np.arange(len(self.sums)), self.stored.shape)[index]
        more = values.ndim - channels.ndim                      # axes of size 1, as h5py allows
        if more > 0 and values.shape[:more] == (1,) * more:
            values = values.reshape(values.shape[more:])
        with np.errstate(over='ignore'):
            rounded = values.astype(np.float32)
        with files.naming(self.path, f'expected numbers of the shape {channels.shape}', Exception):
            self.stored[index] = rounded
        if values.dtype == np.float32:
            return
        values, rounded = (np.broadcast_to(u, channels.shape) for u in (values, rounded))
        for c, sums in enumerate(self.sums):
            u, v = (field[channels == c].astype(np.float64) for field in (values, rounded))
            if u.size:
                above = u - self.first.setdefault(c, u[0])
                sums += u.size, above.sum(), np.square(above).sum(), np.square(u - v).sum()

    def check(self, channels):
        """Print a line on a channel of which float32 keeps little. InputError: it keeps nothing."""
        for c, first in self.first.items():
            mean, square, loss = self.sums[c, 1:] / self.sums[c, 0]
            deviation = max(square - mean ** 2, 0) ** 0.5
            share = loss ** 0.5 / deviation if deviation else 0                 # 0 / 0: a constant
            if share > AT_REST:
                words = (f'{self.path}: channel {channels[c]}: the deviation is {deviation:.1e} and the '
                         f'mean {first + mean:.7g}, of which float32 loses {min(share, 1):.1%}; '
                         f'subtract the mean, or take larger units')
                require(share < 0.999, words)           # else float32 holds another field
                print(words)


@contextmanager
def writer(path, shape, called='', **attributes):
    """Yield {'data': a `Rounded`} of `shape` (N, T, *space, C) to fill; then the file appears.

    What is not filled is NaN, which is refused when it is read. called: the path for messages.
    attributes: those of the layout. Raises InputError for others.
    """
    for name in attributes:
        if name not in ATTRIBUTES:
            raise InputError(f'there is no attribute {name!r}{configs.nearest(name, ATTRIBUTES)}')
    attributes = storable(attributes)
    path = Path(path)
    check_headers(path.parent, {path.stem: (shape, np.dtype('f4'), attributes)})
    with files.lock(path.parent), files.replacing(path) as part, h5py.File(part, 'w') as file:
        need, free = 4 * math.prod(shape), shutil.disk_usage(part).free
        require(need < free, f'{called or path}: needs {need / 1e9:.2g} GB of the disk, of which '
                             f'{free / 1e9:.2g} are free')            # or HDF5 may fail as it closes
        stored = file.create_dataset('data', shape, 'float32', fillvalue=np.nan)
        stored.attrs.update(attributes)
        rounded = Rounded(stored, called or path)
        yield {'data': rounded}
        rounded.check(attributes.get('channels', range(shape[-1])))


def splits_to_write(folder, shapes, attributes):
    """The splits of {split: shape} without a file. InputError: there is one of other contents."""
    present = read_headers(folder, shapes)
    for split, header in present.items():
        there = tuple(header['shape']), header['source'], header['dt']
        wanted = shapes[split], attributes['source'], attributes['dt']
        require(there == wanted, f'{folder}/{split}.h5: exists with {there}, not {wanted}; remove '
                                 f'it or choose another --data')
    return [split for split in shapes if split not in present]


def write(folder, train, test, valid=None, **attributes):
    """Write arrays (N, T, *space, C) as a dataset: folder/train.h5, test.h5, valid.h5.

    They replace those of an older dataset when all are whole.
    train, test, valid: finite real numbers for NumPy, each of its own N and T. In one dimension
        they are (N, T, X, C), and stored as (N, T, 1, X, C).
    attributes: those of the layout, such as channels=('u', 'v').
    """
    folder = Path(folder)
    attributes = storable(attributes)
    arrays = {'test': test, 'valid': valid, 'train': train}
    with files.naming(folder, 'expected arrays of real numbers', Exception):
        arrays = {split: np.ma.asanyarray(u) for split, u in arrays.items()
                  if split != 'valid' or u is not None and len(u)}
    arrays = {split: u[:, :, None] if u.ndim == 4 else u for split, u in arrays.items()}
    check_headers(folder, {split: (u.shape, u.dtype, attributes) for split, u in arrays.items()})
    with files.lock(folder, wait='writing'):
        for left in folder.glob('.new-*'):                                  # by a kill
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix='.new-', dir=folder) as new:
            for split, u in arrays.items():
                path = f'{folder}/{split}.h5'
                with writer(Path(new, f'{split}.h5'), u.shape, path, **attributes) as file:
                    for i, trajectory in enumerate(u):
                        where = f'{path}: trajectory {i}'
                        require(not np.ma.is_masked(trajectory), f'{where}: masked values')
                        with np.errstate(over='ignore'):
                            check_finite(np.float32(trajectory), where)
                        file['data'][i] = trajectory
            # Only renaming is left. Wherever a kill falls, files beside a train.h5 belong to it.
            for split in 'train', 'valid':
                Path(folder, f'{split}.h5').unlink(missing_ok=True)
            for split in arrays:
                Path(new, f'{split}.h5').replace(folder / f'{split}.h5')


# ------------------------------------------------------------------------------------------ reading

def find(folder, names=(), split='train', flag='--datasets'):
    """The names of the datasets in a folder that have this split, or the `names` if they have it.

    names: of datasets, or of the paper's mixtures. flag: what gave them, for the InputError.
    """
    folder = Path(folder)
    present = sorted(path.parent.name for path in folder.glob(f'*/{split}.h5'))
    require(present, f'--data {folder}: the folder holds no <dataset>/{split}.h5; name the one in '
                     f'which the folders of datasets lie, or make it with sources.generate')
    wanted = configs.datasets_of(names)
    for name in wanted:
        if name not in present:
            close = configs.nearest(name, present)
            raise InputError(f'{flag} {name}: no {folder / name / split}.h5{close}; '
                             f"sources.generate makes the paper's")
    return wanted or present


def check_finite(values, where, first=0):
    """Raise InputError for a value that is not finite, of frames (F, *space, C) from `first` on."""
    finite = np.isfinite(values)
    if not finite.all():
        frame, *point, c = np.argwhere(~finite)[0].tolist()
        raise InputError(f'{where}, frame {first + frame}, channel {c}, point {tuple(point)}: '
                         f'{values[(frame, *point, c)]} is not finite; replace it, or leave this '
                         f'trajectory out')


class Trajectories:
    """One split of one dataset, read window by window.

    folder, name, split: DATA, the dataset, and one of SPLITS or the name of another file in it.
    T, C, dims: frames, channels and spatial dimensions of the model; None fits any C and dims.
    rows: the trajectories to use, or an int n for the first n; None: all.
    """

    def __init__(self, folder, name, split, T, C, rows=None, dims=None):
        self.name = name
        self.path = Path(folder, name, f'{split}.h5')
        # all splits of a dataset have to agree
        said = read_headers(self.path.parent, SPLITS if split in SPLITS else [split])
        require(split in said, f'{self.path}: there is no such file')
        self.header = said[split]
        N, self.frames, *space, self.channels = self.header['shape']
        self.space = tuple(space)
        advice = {f'--frames {self.frames - 1}': T >= self.frames,
                  f'--channels {self.channels}': C is not None and self.channels > C,
                  f'--resolution {configs.show(self.space)}, or other whole patches, and no '
                  f'datasets of {dims} dimensions': dims not in (None, len(space))}
        needed = ' '.join(words for words, wanted in advice.items() if wanted)
        require(not needed, f'{self.path}: {self.frames} frames, {len(space)}-D, {self.channels} '
                            f'channels do not fit a model of {T}, {dims}-D, {C}; train with '
                            f'{needed}')
        self._T = T
        self._rows = range(N)[:rows] if rows is None or isinstance(rows, int) else rows
        self.count = len(self._rows)
        self.shape = self.count, self.frames, *self.space, self.channels
        self.steady = all(header['shape'][1] == 2 for header in said.values())
        self.dt = self.header['dt'] or 1.0
        self.t_test = int(min(self.header['t_test'], self.frames - T))
        self.channel_names = names = self.header['channels']
        evolving = evolving_of(self.header)
        self.evolving_names = [names[c] for c in evolving]
        self._static = [c for c in range(self.channels) if c not in evolving]
        # a slice where it can be one: a list is copied to the GPU in every step, which waits for it
        self.evolving = slice(len(evolving)) if evolving == [*range(len(evolving))] else evolving
        with files.naming(self.path):
            stored = h5py.File(self.path, 'r')['data']
            self._file = stored.file                            # stays open: HDF5 keeps writers out
            self._data = whole(stored)
            start = stored.id.get_offset()                      # None: it is not contiguous
            if stored.id.get_type().equal(h5py.h5t.IEEE_F32LE) and start is not None:
                self._data = np.memmap(stored.file.filename, '<f4', 'r', start, stored.shape)
        self._finite = np.zeros(self.shape[:2], bool)           # frames that were read and found so

    def windows(self, places, frames, pinned=False):
        """Windows (b, frames, *space, C) from places (trajectory, first frame).

        Raises InputError for values that are not finite, and for a static channel that varies.
        """
        batch = torch.empty(len(places), frames, *self.shape[2:], pin_memory=pinned)
        for window, (trajectory, first) in zip(batch.numpy(), places):
            row = self._rows[trajectory]
            where = f'{self.path}: trajectory {row}'
            with files.naming(where), np.errstate(over='ignore'):
                window[...] = self._data[row, first:first + frames]
            finite = self._finite[trajectory, first:first + frames]
            if not finite.all():                                # each is looked at once
                check_finite(window, where, first)
                finite[:] = True
            if self._static:
                known = window[..., self._static].reshape(frames, -1, len(self._static))
                require((np.ptp(known, 0).max(0) <= 1e-5 * np.abs(known).max((0, 1))).all(),
                        f'{where}: a static channel varies in time; leave it out of `static`, so '
                        f'that it is predicted')
        return batch

    def places(self):
        """Yield the places of the first and the last frame of a window of a trajectory each.

        They are of at most 128 trajectories, and stand for all fields of the split.
        """
        count = min(self.count, 128, max(16, 2 ** 28 // math.prod(self.shape[2:])))
        for i in range(count):
            trajectory = i * self.count // count
            golden = i * 0.618 % 1                              # spreads any number of them evenly
            first = int(golden * (self.frames - self._T))
            last = 1 if self.steady else first + self._T
            yield (trajectory, first), (trajectory, last)

    def pairs(self):
        """Yield the two frames of each of the `places`, (2, 1, *space, C)."""
        return (self.windows(pair, 1) for pair in self.places())

    @functools.cached_property
    def units(self):
        """The `Units` of the `pairs`, of which float32 has to keep what other types hold."""
        moments = [torch.var_mean(pair.double().flatten(1, -2), 1, correction=0)
                   for pair in self.pairs()]
        if self._data.dtype != np.float32:
            rounded = Rounded(np.empty(self.shape[2:], np.float32), self.path)
            for trajectory, frame in chain(*self.places()):
                rounded[...] = self._data[self._rows[trajectory], frame]
            rounded.check(self.channel_names)
        variances, means = map(torch.stack, zip(*moments))                      # (pairs, 2, C')
        return Units.of(means, variances, self.evolving, self.steady)

    def checksum(self):
        """A number by which the fields of the `pairs` are known again."""
        return functools.reduce(lambda crc, pair: zlib.crc32(pair.numpy(), crc), self.pairs(), 0)


# -------------------------------------------------------------------------------------------- units

class Units(NamedTuple):
    """The numbers by which fields u of a dataset become dimensionless, (u - mean) / deviation."""
    mean: torch.Tensor          # (2, C'), of the input and of the frame to predict, which
    deviation: torch.Tensor     # (2, C')  differ for a steady problem alone
    own: torch.Tensor           # (C'), 1 where windows then get their own mean and deviation, or 0

    @staticmethod
    def of(means, variances, evolving, steady=False):
        """The Units of windows whose frames have these means and variances, (windows, frames, C').

        The deviation is that within frames, at rest that of their means, else 1. Windows that differ
        by more than they vary in themselves, in a mean over evolving channels, get `own` ones.
        steady: whether the two frames are the input and the solution.
        """
        if not steady:
            means, variances = (x.flatten(0, 1)[:, None] for x in (means, variances))
        within = variances.mean(0).sqrt()                                           # (1 or 2, C')
        between = means.std(0, correction=0)
        deviation = torch.where(within > AT_REST * between, within, between)
        deviation = torch.where(deviation > 0, deviation, 1)
        share = variances.sqrt().mean(0) / torch.hypot(within, between)
        share = share[0, evolving].square().nan_to_num(1)                           # of 0 / 0
        own = torch.full(deviation.shape[1:], float(share.mean() < 0.5 and not steady))
        return Units(means.mean(0).expand(2, -1).float(), deviation.expand(2, -1).float(), own)

    @staticmethod
    def none(C, own=False):
        """Units of C channels that change nothing."""
        return Units(torch.zeros(2, C), torch.ones(2, C), torch.full((C,), float(own)))

    @staticmethod
    def read(header):
        """The Units in the header of a checkpoint."""
        return Units(*(torch.tensor(header['units'][name]) for name in Units._fields))

    def header(self):
        """The same in plain types."""
        return {name: value.tolist() for name, value in self._asdict().items()}

    def padded(self, C):
        """The same for C channels, of which those that the dataset lacks become 0."""
        lacking = 0, C - self.mean.shape[-1]
        values = PADDING, 1.0, 0.0
        return Units(*(F.pad(x, lacking, value=value) for x, value in zip(self, values)))


def standardize(u, T, own, some_own=True, least=AT_REST, space=()):
    """Windows u (b, frames, *space, C) with mean 0 and deviation 1 in T frames, where `own` is 1.

    Returns also the condition (b, 2, C): the mean and the deviation that were taken, or 0 and 1.
    own: (b, C) or (C,). some_own: whether any is 1, known without waiting for a device.
    least: the deviation of a channel at rest. space: the grid on which they are taken; (): of u.
    """
    if not some_own:
        own = own.expand(len(u), -1)
        return u, torch.stack([torch.zeros_like(own), torch.ones_like(own)], 1)
    seen = resize(u[:, :T], space or u.shape[2:-1])
    variance, mean = torch.var_mean(seen.flatten(1, -2), 1)
    condition = torch.stack([mean * own, variance.sqrt().clamp_min(least) ** own], 1)
    mean, deviation = condition.view(len(u), 2, *[1] * (u.ndim - 2), -1).unbind(1)
    return (u - mean).div_(deviation), condition


# -------------------------------------------------------------------------------- balanced sampling

class Batch(NamedTuple):
    """The B samples of a pass; side by side are those of one grid, and in it of one dataset."""
    windows: list               # (b, T+1, *space', C') of each dataset; after `to` each grid, and C
    mean: torch.Tensor          # (B, T+1, C), and
    deviation: torch.Tensor     # (B, T+1, C), by which windows become dimensionless
    own: torch.Tensor           # (B, C), see `Units`
    floor: torch.Tensor         # (B, C), the deviation below which a channel is at rest
    evolving: torch.Tensor      # (B, C), whether the channel is predicted
    noise: list                 # of each sample the seed, and the channels that get it
    space: tuple = ()           # the grid of the model; (): that of the windows
    condition: torch.Tensor | None = None       # (B, 2, C), see `standardize`

    def to(self, device):
        """Its dimensionless windows on a device; the host goes on while pinned memory is copied."""
        some_own = self.own.any()
        mean, deviation, own, floor, evolving = (x.to(device, non_blocking=True) for x in self[1:6])
        C = evolving.shape[1]
        grids = [[*parts] for _, parts in groupby(self.windows, lambda part: part.shape[1:-1])]
        sizes = [sum(map(len, parts)) for parts in grids]
        of_grids = (x.split(sizes) for x in (mean, deviation, own))
        done = []
        for parts, mean, deviation, own in zip(grids, *of_grids):
            parts = [part.to(device, non_blocking=True) for part in parts]
            u = torch.cat([F.pad(part, (0, C - part.shape[-1]), value=PADDING) for part in parts])
            shape = *u.shape[:2], *[1] * (u.ndim - 3), -1
            u = (u - mean.view(shape)).div_(deviation.view(shape))
            done.append(standardize(u, u.shape[1] - 1, own, some_own, space=self.space))
        windows, conditions = zip(*done)
        condition = torch.cat(conditions)
        return self._replace(windows=windows, floor=floor / condition[:, 1], evolving=evolving,
                             condition=condition)


class Windows:
    """Training windows of T + 1 frames, drawn with p(sample of dataset k) = w_k / (|D_k| sum w).

    This is App. B.1 of the paper without its stray factor 1/K. Sample n of the run is a function of
    the seed and n alone, whatever the batch size and the number of processes.
    config: that of the model. sampling: w_k of each dataset.
    """
    pinned = False                  # whether a GPU copies a batch while the host goes on

    def __init__(self, datasets, config, sampling, seed):
        C = config.channels
        self.datasets = datasets
        self.T = config.frames
        self.space = config.resolution
        self.seed = seed
        self.share = np.divide(sampling, sum(sampling))             # of the draws, w_k / sum w
        self._up_to = self.share.cumsum() / self.share.cumsum()[-1]
        self.draws = sum(dataset.count for dataset in datasets)     # of an epoch, for any weights
        self._numbers = []                                          # of each dataset, as in a Batch
        frames = [0] * self.T + [1]                                 # the input, and the next
        for dataset in datasets:
            known = dataset.units.padded(C)
            mean, deviation, own = known if config.normalize else Units.none(C)
            floor = AT_REST * (known.deviation[1] / deviation[1])
            evolving = torch.zeros(C, dtype=torch.bool)
            evolving[dataset.evolving] = True
            self._numbers.append((mean[frames], deviation[frames], own, floor, evolving))

    def draw(self, number):
        """Sample `number` of the run: (dataset k, trajectory, first frame, seed of its noise)."""
        epoch, index = divmod(number, self.draws)
        bits = np.random.Philox(key=[self.seed, epoch], counter=[0, index, 0, 0])
        share, *random = bits.random_raw(4).tolist()            # of 64 bits
        k = int(self._up_to.searchsorted((share >> 11) / 2 ** 53, side='right'))
        ends = self.datasets[k].count, self.datasets[k].frames - self.T, 2 ** 62
        return k, *(drawn * end >> 64 for drawn, end in zip(random, ends))

    def __getitem__(self, numbers):
        """The Batch of the samples of these numbers."""
        samples = sorted(map(self.draw, numbers),
                         key=lambda sample: (self.datasets[sample[0]].space, sample[0]))
        windows = []
        for k, of_dataset in groupby(samples, key=lambda sample: sample[0]):
            places = [(trajectory, first) for _, trajectory, first, _ in of_dataset]
            windows.append(self.datasets[k].windows(places, self.T + 1, self.pinned))
        of_samples = zip(*(self._numbers[k] for k, *_ in samples))
        noise = [(seed, self.datasets[k].evolving) for k, *_, seed in samples]
        return Batch(windows, *map(torch.stack, of_samples), noise, self.space)


def samples_per_pass(batch_size, world_size=1, parts=1):
    """How many samples of a batch a process takes at once. InputError: there are no equal parts."""
    if batch_size % (world_size * parts):
        raise InputError(f'--batch_size {batch_size} is not divisible by {world_size} processes x '
                         f'--accumulate {parts}')
    return batch_size // (world_size * parts)


def numbers_of_rank(steps, batch_size, rank=0, world_size=1, parts=1):
    """Yield the sample numbers of one process, a range for each of the `parts` of the steps.

    Step s takes the samples from s * batch_size on, of which each process has an equal share.
    """
    size = samples_per_pass(batch_size, world_size, parts)
    for step in steps:
        for part in range(parts):
            first = step * batch_size + (rank * parts + part) * size
            yield range(first, first + size)


def batches(windows, numbers, device, readers=4):
    """Yield windows[part] on the device for each of the `numbers`; so many threads read ahead."""
    windows.pinned = device.type == 'cuda'
    read = read_ahead(windows, numbers, readers)
    return copied_ahead(read, device) if windows.pinned else (batch.to(device) for batch in read)


def read_ahead(windows, numbers, readers):
    """Yield windows[part] for each of the `numbers`."""
    with ThreadPoolExecutor(max(readers, 1)) as threads:
        reading = deque()
        for part in numbers:
            reading.append(threads.submit(windows.__getitem__, part))
            if len(reading) > readers:
                yield reading.popleft().result()                # or raise what the thread raised
        for batch in reading:
            yield batch.result()


def copied_ahead(batches, device):
    """Yield batches on a GPU, each copied while the one before it is computed with."""
    copies = torch.cuda.Stream(device)
    ahead = None
    for batch in chain(batches, [None]):
        ready = ahead
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(copies)               # for the copy of `ready`
        copies.wait_stream(computing)               # the next may lie where an older batch was
        with torch.cuda.stream(copies):
            ahead = batch.to(device) if batch else None
        if ready:
            yield ready


# ----------------------------------------------------------------------------------- the model grid

def resize(u, space):
    """Interpolate (B, T, *space', C) to (B, T, *space, C) linearly; u itself on that grid."""
    if u.shape[2:-1] == tuple(space):
        return u
    x = u.flatten(0, 1).movedim(-1, 1)                                      # (B*T, C, *space')
    x = F.interpolate(x, size=tuple(space), mode='bilinear' if len(space) == 2 else 'trilinear')
    return x.movedim(1, -1).unflatten(0, u.shape[:2])                       # (B, T, *space, C)


def norm(x):
    """L2 norms over all but the first and the last axis, (B, ..., C) -> (B, C), for any units."""
    x = x.flatten(1, -2)
    if x.dtype == torch.float32 and x.device.type == 'cpu':
        return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).float()
    # without fp64, which is slow on many GPUs
    largest = x.detach().abs().amax(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return (x / largest).norm(dim=1) * largest[:, 0]


def size_of(v, floor):
    """||v||_2 of each sample and channel, (B, ..., C) -> (B, C), at least that of one at rest.

    floor: (B, C) or (C,), the root mean square of such a channel.
    """
    return torch.maximum(norm(v), floor * v.flatten(1, -2).shape[1] ** 0.5)


def fluctuation(v):
    """v (B, ..., C) without the mean of each sample and channel."""
    return v - v.flatten(1, -2).mean(1).view(len(v), *[1] * (v.ndim - 2), -1)


NORM = (5 * 64 * 64) ** 0.5     # that of 5 frames of 64 x 64 points of deviation 1


def noisy_inputs(batch, config, epsilon):
    """The noisy input of Eq. (3), (B, T, *space, C), of a Batch on the grid of the model.

    Noise is N(0, 1) times epsilon ||u||_2 (paper, Sec. 2.2 and App. B.1). As in DPOT, the norm of a
    sample and channel is over all frames and grid points; that of dimensionless ones is `NORM`.
    """
    u = torch.cat([resize(windows[:, :-1], config.resolution) for windows in batch.windows])
    if not epsilon:
        return u
    generator = torch.Generator(u.device)
    noise = torch.zeros_like(u)
    for sample, (seed, channels) in zip(noise, batch.noise):
        drawn = torch.empty_like(sample[..., channels], memory_format=torch.contiguous_format)
        sample[..., channels] = drawn.normal_(generator=generator.manual_seed(seed))
    if config.normalize:
        return u.add(noise, alpha=epsilon * NORM)
    return noise.mul_(epsilon * norm(u).view(len(u), *[1] * (u.ndim - 2), -1)).add_(u)
