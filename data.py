"""The file layout, and how a batch is read from it.

DATA/<dataset>/train.h5, test.h5 and perhaps valid.h5 each hold one HDF5 dataset `data` of float32
numbers with the shape (N, T, H, W, C), in 3-D (N, T, H, W, D, C): trajectories, frames, grid
points, field channels. It is contiguous, so that a window is one read; chunks and other types of
real numbers are read too. A steady problem has two frames, the input and the solution. The
attributes of `data` are all optional:

    channels  the names, in order           static  the names of channels that do not evolve (a geometry mask)
    dt        the time between two frames   t_test  the number of frames to predict at test
    pde       the equation, in words        source  the generator and its seed, or the benchmark's file
    layout    the axes in one's own files   variables  the names of the arrays that were read there

Shapes: B batch, T input frames, H W grid points (`space` stands for all spatial axes), C field
channels, C' those of one dataset, b samples of one dataset or one grid. The words of
docs/contributing.md have one meaning in every file.
"""
import functools
import math
import os
import re
import shutil
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import torch
import torch.nn.functional as F

import configs
from configs import InputError
from runtime import files
from runtime.stored import attributes_of, names_of, number_of, require, storable, text_of, whole

READERS = 4                         # threads that read batches ahead
PADDING = 1.0                       # the value of channels that a dataset lacks (paper, App. B.1)
AT_REST = 1e-3                      # at rest is a channel with less than this share of its usual deviation
SPLITS = 'test', 'valid', 'train'   # in the order in which they are written: a folder with a train.h5 is complete
ATTRIBUTES = 'channels', 'static', 'dt', 't_test', 'pde', 'source', 'layout', 'variables'       # of `data`, see above


# ------------------------------------------------------------------------------------------------ the layout

def check_headers(folder, headers):
    """{split: (shape, dtype, attributes) of `data`} -> {split: what it says}, in plain types as
    JSON holds them.

    That is source, shape, channels, static, dt, t_test, and layout and variables where it says them.
    Raises InputError for what is not allowed, and if the splits differ in the grid, the number of
    channels, or what `difference` compares, but the source.
    """
    said = {}
    forms = {}                                                             # in words, of each split
    for split, (shape, dtype, attributes) in headers.items():
        path = f'{folder}/{split}.h5'
        attributes = {name: value for name, value in attributes.items() if value is not None}
        fits = shape and len(shape) in (5, 6) and dtype.kind in 'fiub' and 0 not in shape and shape[1] > 1
        require(fits, f"{path}: 'data' is {dtype} {shape}; expected real numbers of shape (N, T, H, W, C) or "
                      f'(N, T, H, W, D, C), in one dimension (N, T, 1, X, C), with at least two frames and no empty '
                      f'axis')
        _, _, *space, C = shape = [int(size) for size in shape]
        channels = names_of(attributes.get('channels', ''))
        advice = channels_last(space, C)
        require(channels or not advice, f'{path}: {C} channels on a grid of {configs.show(tuple(space))}{advice}; one '
                                        f'channel is u[..., None]; or name them all: channels=')
        channels = channels or [str(c) for c in range(C)]
        static = names_of(attributes.get('static', []))
        dt = number_of(attributes.get('dt', 1))
        t_test = number_of(attributes.get('t_test', math.inf))
        require(len(set(channels)) == len(channels) == C,
                f'{path}: channels {channels}: expected {C} different names{advice}')
        require(set(static) < set(channels),
                f'{path}: static {static}: expected names of the channels {channels}, but not all')
        require(0 < dt < math.inf, f'{path}: dt {attributes.get("dt")}: expected a positive number')
        require(t_test >= 1, f'{path}: t_test {attributes.get("t_test")}: expected at least 1 frame')
        said[split] = dict(source=text_of(attributes.get('source', '')), shape=shape, channels=channels, static=static,
                           dt=dt, t_test=t_test)
        if 'layout' in attributes:                                              # of files of one's own
            said[split]['layout'] = text_of(attributes['layout'])
            said[split]['variables'] = names_of(attributes.get('variables', ''))
        forms[split] = f'a grid of {configs.show(tuple(space))} and {C} channels'
    for one, other in pairwise(said):
        require(forms[one] == forms[other],
                f'{folder}: {one}.h5 has {forms[one]}, but {other}.h5 {forms[other]}; they must be equal')
        what, words = difference(said[one], said[other], f'{one}.h5', f'{other}.h5')
        require(what in ('', 'source'), f'{folder}: {words}; they must be equal')
    return said


SILENT = {'dt': 1.0, 'source': ''}              # what a header says where its file says nothing


def difference(one, other, here, there):
    """The first of channels, static, dt and source in which two headers differ, and words that name
    both; or '' and ''.

    What one of them does not say is not compared. Of a source the seed and the grid do not count.
    one, other: headers as of `check_headers`, called `here` and `there` in the words.
    """
    named = all(header['channels'] != [str(c) for c in range(len(header['channels']))] for header in (one, other))
    for what in ('channels', 'static', *SILENT) if named else SILENT:
        a, b = (header.get(what, SILENT.get(what)) for header in (one, other))
        if what == 'source':
            a, b = (re.sub(r' (seed|grid) \d+', '', source) for source in (a, b))
        if a != b and SILENT.get(what) not in (a, b):
            a, b = (' '.join(x) if isinstance(x, list) else str(x) for x in (a, b))
            return what, f'{here} has the {what} {a or "none"}, but {there} {b or "none"}'
    return '', ''


def channels_last(space, C):
    """What to do with arrays whose channels seem to come first, as the end of a message, or ''."""
    many = C > min([16, *(size for size in space if size > 1)])
    return '; channels come last: np.moveaxis(u, 2, -1)' if many else ''


def read_headers(folder, names, splits=SPLITS):
    """{name: {split: what its file says}} of the files that exist, checked by `check_headers`."""
    said = {}
    for name in names:
        found = {}
        for split in splits:
            path = Path(folder, name, f'{split}.h5')
            if path.exists():
                with files.naming(path), h5py.File(path, 'r') as file:
                    stored = file['data']
                    require(isinstance(stored, h5py.Dataset), f"{path}: 'data' is a group, not a dataset")
                    found[split] = stored.shape, stored.dtype, attributes_of(stored)
        said[name] = check_headers(Path(folder, name), found)
    return said


# ------------------------------------------------------------------------------------------------ writing

class Rounded:
    """The `data` of a new file, in which numbers become float32, and what that takes from each channel."""

    def __init__(self, stored):
        self.stored = stored
        C = stored.shape[-1]
        self.sums = np.zeros((4, C))        # numbers, their sum and squares about `shift`, squares of what is lost
        self.shift = np.zeros(C)            # near the mean, or squares of 101325 would lose the deviation
        self.low = np.full(C, np.inf)       # of the rounded numbers
        self.high = np.full(C, -np.inf)

    def __setitem__(self, index, values):
        values = np.asanyarray(values)
        with np.errstate(over='ignore'):
            rounded = values.astype(np.float32)
        self.stored[index] = rounded
        if values.dtype == np.float32:
            return
        places = np.broadcast_to(np.arange(self.stored.shape[-1]), self.stored.shape)[index]   # a view without memory
        channels = np.unique(places[(0,) * (places.ndim - 1)])
        x, rounded = (np.broadcast_to(u, places.shape).reshape(-1, len(channels)) for u in (values, rounded))
        x = x.astype(np.float64)
        lost = x - rounded
        new = self.sums[0, channels] == 0
        self.shift[channels[new]] = x[0, new]
        x = x - self.shift[channels]
        self.sums[:, channels] += np.stack([np.ones_like(x), x, x * x, lost * lost]).sum(1)
        self.low[channels] = np.minimum(self.low[channels], rounded.min(0))
        self.high[channels] = np.maximum(self.high[channels], rounded.max(0))

    def check(self, path, channels):
        """Print a line on a channel of which float32 keeps little. InputError: it keeps nothing."""
        mean, squares, loss = self.sums[1:] / np.maximum(self.sums[0], 1)
        deviation = np.sqrt(np.maximum(squares - mean ** 2, 0))
        mean = mean + self.shift
        loss = np.sqrt(loss)
        for c in np.flatnonzero(loss > AT_REST * deviation):
            name = channels[c] if c < len(channels) else c
            where = f'{path}: channel {name}: the deviation is {deviation[c]:.1e} and the mean {mean[c]:.7g}'
            advice = 'subtract the mean' if abs(mean[c]) > deviation[c] else 'take larger units'
            require(deviation[c] == 0 or self.low[c] < self.high[c],
                    f'{where}, of which float32 keeps nothing; {advice} before it is written')
            if deviation[c] > 0:
                print(f'{where}, of which float32 loses {loss[c] / deviation[c]:.1%}; {advice} before it is written')


@contextmanager
def writer(path, shape, called='', **attributes):
    """Yield {'data': a `Rounded`} of `shape` (N, T, *space, C), which the caller fills.

    The file appears after the block.

    What the caller has not written is NaN, which is refused when it is read. Raises InputError for
    attributes that are not those of the layout, and for a channel of which float32 keeps nothing.
    called: the path in messages, if it is another one.
    """
    for name in attributes:
        require(name in ATTRIBUTES, f'there is no attribute {name!r}{configs.nearest(name, ATTRIBUTES)}')
    attributes = storable(attributes)
    with files.lock(Path(path).parent), files.replacing(path) as part, h5py.File(part, 'w') as file:
        stored = file.create_dataset('data', shape, 'float32', fillvalue=np.nan)
        stored.attrs.update(attributes)
        rounded = Rounded(stored)
        yield {'data': rounded}
        rounded.check(called or path, attributes.get('channels', []))


def splits_to_write(folder, shapes, attributes):
    """The splits of {split: shape} without a file. Raises InputError for a file of other contents."""
    folder = Path(folder)
    present = read_headers(folder.parent, [folder.name], shapes)[folder.name]
    for split, header in present.items():
        source = header['source'].split(' batch ')[0]                 # which earlier versions named
        there = tuple(header['shape']), source, header['dt']
        wanted = shapes[split], attributes['source'], attributes['dt']
        require(there == wanted,
                f'{folder / split}.h5: exists with {there}, not {wanted}; remove it or choose another --data')
    return [split for split in shapes if split not in present]


def write(folder, train, test, valid=None, **attributes):
    """Write arrays (N, T, *space, C) with two or three spatial axes as a dataset: folder/train.h5,
    test.h5, valid.h5.

    The arrays may be anything that NumPy reads as real numbers; N and T may differ between them. In
    one dimension they are (N, T, X, C), and stored as (N, T, 1, X, C). The files are written in a
    folder .new-... beside those of an older dataset, which they replace when all are whole. What a
    kill leaves there is removed by the next call. Raises InputError as `check_headers` and `writer`
    do, and for values that are not finite in float32.

        data.write('data/mine', u[:90], u[90:], channels=('u', 'v'))        # then: train.py --data data --datasets mine
    """
    folder = Path(folder)
    arrays = {'test': test, 'valid': valid, 'train': train}
    arrays = {split: np.asanyarray(values) for split, values in arrays.items() if values is not None}
    arrays = {split: values[:, :, None] if values.ndim == 4 else values for split, values in arrays.items()}
    check_headers(folder, {split: (values.shape, values.dtype, attributes) for split, values in arrays.items()})
    with files.lock(folder, wait='writing'):
        for left in folder.glob('.new-????????'):                     # by a process that was killed
            shutil.rmtree(left)
        new = Path(tempfile.mkdtemp(prefix='.new-', dir=folder))
        try:
            for split, values in arrays.items():
                with writer(new / f'{split}.h5', values.shape, f'{folder}/{split}.h5', **attributes) as file:
                    for i, trajectory in enumerate(values):
                        where = f'{folder}/{split}.h5: trajectory {i}'
                        require(not np.ma.is_masked(trajectory), f'{where}: masked values')
                        with np.errstate(over='ignore'):
                            check_finite(np.float32(trajectory), where)
                        file['data'][i] = trajectory
        except BaseException:
            shutil.rmtree(new)
            raise
        # Only renaming is left. Wherever a kill falls, files beside a train.h5 belong to it.
        for split in ('train', 'valid'):
            (folder / f'{split}.h5').unlink(missing_ok=True)
        for split in arrays:
            os.replace(new / f'{split}.h5', folder / f'{split}.h5')
        shutil.rmtree(new)


# ------------------------------------------------------------------------------------------------ reading

def find(folder, names=(), split='train', flag='--datasets'):
    """The sorted names of all datasets in `folder` that have this split, or the `names`, each
    checked to exist.

    names: as configs.datasets_of takes them.
    flag: what gave `names`, for the InputError.
    """
    folder = Path(folder)
    require(folder.is_dir(), f'--data {folder}: no such folder; name another, or make it with sources.generate')
    own = folder.absolute()
    require(not (folder / f'{split}.h5').exists(),
            f'--data {folder}: this is a dataset itself; give --data {own.parent} {flag} {own.name}')
    present = sorted(path.parent.name for path in folder.glob(f'*/{split}.h5'))
    wanted = []
    for name in names:                                           # one's own may be called mixture_6
        wanted += [name] if name in present else configs.datasets_of([name])
    wanted = list(dict.fromkeys(wanted))
    for name in wanted:
        how = configs.nearest(name, dict.fromkeys([*present, *configs.DATASETS]))
        if name in configs.DATASETS:
            how = '; python -m sources.generate makes it'
        require(name in present, f'{flag} {name}: no {folder / name / split}.h5{how}')
    require(present, f'--data {folder}: the folder holds no <dataset>/{split}.h5')
    return wanted or present


def check_finite(values, where, first=0):
    """Raise InputError for a value that is not finite, of frames (F, *space, C) from `first` on."""
    flat = values.reshape(-1)
    with np.errstate(over='ignore'):
        square = np.dot(flat, flat)                             # finite only where all values are
    if not np.isfinite(square) and not np.isfinite(values).all():
        frame, *point, c = np.argwhere(~np.isfinite(values))[0].tolist()
        value = values[(frame, *point, c)]
        raise InputError(f'{where}, frame {first + frame}, channel {c}, point {tuple(point)}: {value} is not finite; '
                         f'replace it, or leave this trajectory out')


class FrameLayout(NamedTuple):
    """How the frames of one dataset lie in memory; `Trajectories` has the same four attributes."""
    name: str                   # of the dataset, '' if it is unknown
    space: tuple                # the native grid
    evolving: list | slice      # the channels that are not static, which are predicted and scored
    units: tuple                # their `Units`, for a dataset that the network does not know


class Trajectories:
    """One split of one dataset, read window by window.

    folder: DATA; name: the dataset; split: one of SPLITS, or the name of another file. T, C and
    dims are the model's frames, channels and spatial dimensions; C and dims may be None. rows: the
    trajectories to use, or an int n for the first n; None: all. Raises InputError for a file that
    is missing, damaged or not as `check_headers` expects, and if it does not fit the model.
    """

    def __init__(self, folder, name, split, T, C, rows=None, dims=None):
        self.name = name
        self.path = Path(folder, name, f'{split}.h5')
        splits = SPLITS if split in SPLITS else [split]
        said = read_headers(folder, [name], splits)[name]    # all splits of a dataset have to agree
        require(split in said, f'{self.path}: there is no such file')
        header = said[split]
        N, self.frames, *space, self.channels = header['shape']
        self._T = T
        self._rows = range(N)[:rows] if rows is None or isinstance(rows, int) else rows
        self.count = len(self._rows)
        self.space = tuple(space)
        self.shape = self.count, self.frames, *self.space, self.channels
        self.steady = self.frames == 2                                  # the input and the solution
        require(T < self.frames, f'{self.path}: {self.frames} frames are too few for a model that takes {T}; '
                                 f'train with --frames {self.frames - 1} or fewer')
        require(dims in (None, len(space)),
                f'{self.path}: {len(space)} dimensions of space, the model has {dims}; train with '
                f'--resolution {configs.show(self.space)} and name datasets of this kind alone')
        advice = channels_last(space, self.channels) or f'; train with --channels {self.channels}'
        require(C is None or self.channels <= C,
                f'{self.path}: {self.channels} channels, the model has {C}{advice}')
        self.header = header
        self.channel_names = header['channels']
        evolving = [i for i, channel in enumerate(self.channel_names) if channel not in header['static']]
        self._static = [i for i, channel in enumerate(self.channel_names) if channel in header['static']]
        self.evolving_names = [self.channel_names[i] for i in evolving]
        # as a slice where it can be one: an index that is a list is copied to the GPU in every step, which waits for it
        self.evolving = slice(len(evolving)) if evolving == list(range(len(evolving))) else evolving
        self.dt = header['dt']
        self.t_test = int(min(header['t_test'], self.frames - T))
        with files.naming(self.path):
            stored = h5py.File(self.path, 'r')['data']
            self._file = stored.file                        # stays open, so that HDF5 keeps writers out
            self._data = whole(stored.file, stored.name)
            start = stored.id.get_offset()           # in its file; None: it is not contiguous
            floats = stored.id.get_type().equal(h5py.h5t.IEEE_F32LE)
            if floats and start is not None:
                self._data = np.memmap(stored.file.filename, '<f4', 'r', start, stored.shape)
        self._finite = np.zeros(self.shape[:2], bool)           # the frames that were read and found so

    def windows(self, places, frames, pinned=False):
        """Windows (b, frames, *space, C) from places (trajectory, first frame). InputError: inf or NaN."""
        batch = torch.empty(len(places), frames, *self.shape[2:], pin_memory=pinned)
        for window, (trajectory, start) in zip(batch.numpy(), places):
            row = self._rows[trajectory]
            with files.naming(self.path, f'trajectory {row} cannot be read'), np.errstate(over='ignore'):
                window[...] = self._data[row, start:start + frames]
            finite = self._finite[trajectory, start:start + frames]
            if not finite.all():                                        # each is looked at once
                check_finite(window, f'{self.path}: trajectory {row}', start)
                finite[:] = True
            if self._static:
                known = window[..., self._static]
                require(np.ptp(known, 0).max() <= 1e-5 * np.abs(known).max(),
                        f'{self.path}: trajectory {row}: a static channel varies in time; leave it out of `static`, '
                        f'so that it is predicted')
        return batch

    @functools.cached_property
    def units(self):
        """The `Units` of these trajectories.

        They stand on one window of each of at most 128, and fewer of large frames. The windows
        begin at different times, and of each the first frame and the frame to predict count.
        """
        count = min(self.count, 128, max(16, 2 ** 28 // math.prod(self.shape[2:])))
        means = torch.empty(count, 2, self.channels, dtype=torch.float64)
        variances = torch.empty_like(means)
        for i in range(count):
            trajectory = i * self.count // count
            first = int(i * 0.618 % 1 * (self.frames - self._T))        # the golden ratio spreads any number evenly
            last = 1 if self.steady else first + self._T
            pair = self.windows([(trajectory, first), (trajectory, last)], 1).double().flatten(1, -2)
            variances[i], means[i] = torch.var_mean(pair, 1, correction=0)
        return Units.of(means, variances, self.evolving, self.steady)


# ------------------------------------------------------------------------------------------------ units

class Units(NamedTuple):
    """The numbers by which the fields u of a dataset become dimensionless, (u - mean) / deviation.

    mean, deviation: (2, C'), of the input and of the frame to predict, which differ for a steady
    problem alone.
    own: (C'), 1 where a window then gets its own mean and deviation, too, else 0.
    """
    mean: torch.Tensor
    deviation: torch.Tensor
    own: torch.Tensor

    @staticmethod
    def of(means, variances, evolving, steady=False):
        """The Units of windows, of which some frames have these means and variances, (windows, frames, C').

        The deviation is that within frames, or that of their means for a channel that is constant
        in each. One that never varies has 1. Where windows differ among each other by more than
        they vary in themselves, for a mean over the evolving channels, they get `own` ones.
        steady: whether the two frames are the input and the solution.
        """
        if not steady:
            means = means.flatten(0, 1)[:, None]
            variances = variances.flatten(0, 1)[:, None]
        within = variances.mean(0).sqrt()                                               # (1 or 2, C')
        between = means.std(0, correction=0)
        deviation = torch.where(within > AT_REST * between, within, between)
        deviation = torch.where(deviation > 0, deviation, 1)
        typical = variances.sqrt().mean(0)
        share = (typical / torch.hypot(within, between))[0, evolving].square().nan_to_num(1)   # constant: 0 / 0
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
        return Units(*(F.pad(x, lacking, value=value) for x, value in zip(self, (PADDING, 1.0, 0.0))))


def dimensionless(u, mean, deviation):
    """Windows u (b, T+1, *space, C) by the mean and the deviation (b, 2, C) of input and next frame."""
    T = u.shape[1] - 1
    points = u.shape[-2]                # of a row, by which as one the processor has longer loops
    rows = u.flatten(-2)
    shape = len(u), T + 1, *[1] * (rows.ndim - 3), -1
    mean, deviation = (torch.cat([x[:, :1].expand(-1, T, -1), x[:, 1:]], 1).repeat(1, 1, points).view(shape)
                       for x in (mean, deviation))
    return (rows - mean).div_(deviation).view(u.shape)


def standardize(u, T, own, some_own=True):
    """Windows u with the mean 0 and the deviation 1 of their first T frames, in channels where `own` is 1.

    Returns also the condition (b, 2, C), what was taken: mean and deviation, which is at least
    `AT_REST`, or 0 and 1.
    u: (b, frames, *space, C), dimensionless.
    own: (b, C) or (C,).
    some_own: whether any is 1, which the host knows without waiting for a device.
    """
    if not some_own:
        own = own.expand(len(u), -1)
        return u, torch.stack([torch.zeros_like(own), torch.ones_like(own)], 1)
    variance, mean = torch.var_mean(u[:, :T].flatten(1, -2), 1)
    condition = torch.stack([mean * own, variance.sqrt().clamp_min(AT_REST) ** own], 1)
    mean, deviation = condition.view(len(u), 2, *[1] * (u.ndim - 2), -1).unbind(1)
    return (u - mean).div_(deviation), condition


# ------------------------------------------------------------------------------------------------ balanced sampling

class Batch(NamedTuple):
    """The B samples of a pass, those of one grid side by side, and among them those of one dataset."""
    windows: list               # (b, T+1, *space', C') of each dataset as it is stored, and after `to` of each grid
    units: Units                # of each sample, (B, 2, C) twice and (B, C)
    floor: torch.Tensor         # (B, C), the deviation below which a channel is at rest
    evolving: torch.Tensor      # (B, C), whether the channel is predicted
    noise: list                 # for each sample the seed of its noise, and the channels that get it
    condition: torch.Tensor | None = None       # (B, 2, C), see `standardize`

    def to(self, device):
        """The same batch on a device, dimensionless and padded to C channels.

        From pinned memory it is copied while the host goes on.
        """
        C = self.evolving.shape[1]
        grids = []
        for space, parts in groupby(self.windows, key=lambda part: part.shape[1:-1]):
            parts = [part.to(device, non_blocking=True) for part in parts]
            if len(parts) > 1 or parts[0].shape[-1] < C:
                stored = parts
                parts = [torch.full((sum(map(len, stored)), *space, C), PADDING, device=device)]
                for part, place in zip(stored, parts[0].split([*map(len, stored)])):
                    place[..., :part.shape[-1]] = part
            grids += parts
        some_own = self.units.own.any()
        copied = (x.to(device, non_blocking=True) for x in (*self.units, self.floor, self.evolving))
        *units, floor, evolving = copied
        windows = []
        conditions = []
        for u, mean, deviation, own in zip(grids, *(x.split([len(u) for u in grids]) for x in units)):
            u = dimensionless(u, mean, deviation)
            u, condition = standardize(u, u.shape[1] - 1, own, some_own)
            windows.append(u)
            conditions.append(condition)
        condition = torch.cat(conditions)
        return Batch(windows, Units(*units), floor / condition[:, 1], evolving, self.noise, condition)


class Windows:
    """Training windows of T + 1 frames of a mixture, drawn with p(sample of dataset k) = w_k /
    (|D_k| sum w).

    This is App. B.1 of the paper without its stray factor 1/K. Sample n of the run is a pure
    function of (seed, epoch, index), epoch, index = divmod(n, sum |D_k|), whatever the batch size
    and the number of processes.
    config: that of the model, with its frames T, its channels C, and whether fields become
        dimensionless.
    sampling: w_k of each dataset.
    """
    pinned = False                      # whether a batch lies in memory from which a GPU copies while the host goes on

    def __init__(self, datasets, config, sampling, seed):
        C = config.channels
        self.datasets = datasets
        self.T = config.frames
        self.seed = seed
        self.share = np.divide(sampling, sum(sampling))                 # of the draws, w_k / sum w
        self._up_to = self.share.cumsum() / self.share.cumsum()[-1]
        self.draws = sum(dataset.count for dataset in datasets)  # of an epoch, whatever the weights
        units = [dataset.units if config.normalize else Units.none(C) for dataset in datasets]
        self.units = Units(*map(torch.stack, zip(*(of_dataset.padded(C) for of_dataset in units))))
        floors = torch.stack([dataset.units.padded(C).deviation[1] for dataset in datasets])            # (K, C)
        self.floor = AT_REST * (torch.ones_like(floors) if config.normalize else floors)
        self.evolving = torch.zeros(len(datasets), C, dtype=torch.bool)
        for row, dataset in zip(self.evolving, datasets):
            row[dataset.evolving] = True

    def draw(self, number):
        """Sample `number` of the run: (dataset k, trajectory, first frame, seed of its noise)."""
        epoch, index = divmod(number, self.draws)
        share, *random = np.random.Philox(key=[self.seed, epoch], counter=[0, index, 0, 0]).random_raw(4).tolist()
        k = int(self._up_to.searchsorted((share >> 11) / 2 ** 53, side='right'))
        ends = self.datasets[k].count, self.datasets[k].frames - self.T, 2 ** 62
        return k, *(drawn * end >> 64 for drawn, end in zip(random, ends))              # of 64 random bits

    def __getitem__(self, numbers):
        """The Batch of the samples of these numbers."""
        samples = sorted(map(self.draw, numbers), key=lambda sample: (self.datasets[sample[0]].space, sample[0]))
        ks = [k for k, *_ in samples]
        windows = []
        for k, of_dataset in groupby(samples, key=lambda sample: sample[0]):
            places = [(trajectory, first) for _, trajectory, first, _ in of_dataset]
            windows.append(self.datasets[k].windows(places, self.T + 1, self.pinned))
        noise = [(seed, self.datasets[k].evolving) for k, *_, seed in samples]
        return Batch(windows, Units(*(x[ks] for x in self.units)), self.floor[ks], self.evolving[ks], noise)


def samples_per_pass(batch_size, world_size=1, parts=1):
    """How many samples of a batch a process takes at once. Raises InputError without equal parts."""
    if batch_size % (world_size * parts):
        raise InputError(f'--batch_size {batch_size} is not divisible by {world_size} processes x --accumulate {parts}')
    return batch_size // (world_size * parts)


def numbers_of_rank(steps, batch_size, rank=0, world_size=1, parts=1):
    """Yield the sample numbers of one process for a range of steps, one range for each of the
    `parts` of a step.

    Step s takes the samples s * batch_size .. (s + 1) * batch_size - 1, of which each process has
    an equal share.
    """
    size = samples_per_pass(batch_size, world_size, parts)
    for step in steps:
        for part in range(parts):
            first = step * batch_size + (rank * parts + part) * size
            yield range(first, first + size)


def batches(windows, numbers, device, readers=READERS):
    """Yield windows[part] on the device for each of the `numbers`, while so many threads read ahead.

    On a GPU each batch is copied while the one before it is computed with.
    """
    windows.pinned = device.type == 'cuda'
    read = read_ahead(windows, numbers, readers) if readers else map(windows.__getitem__, numbers)
    if device.type != 'cuda':
        yield from (batch.to(device) for batch in read)
        return
    copies = torch.cuda.Stream(device)
    ahead = None
    for batch in chain(read, [None]):
        ready = ahead
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(copies)               # for the copy of `ready`
        copies.wait_stream(computing)               # the next one may lie where an older batch was
        with torch.cuda.stream(copies):
            ahead = batch.to(device) if batch else None
        if ready:
            yield ready


def read_ahead(windows, numbers, readers):
    """Yield windows[part] for each of the `numbers`; each thread reads a whole batch."""
    threads = ThreadPoolExecutor(readers)
    reading = deque()
    try:
        for part in chain(numbers, [None] * readers):
            reading.append(part and threads.submit(windows.__getitem__, part))
            if len(reading) > readers:
                yield reading.popleft().result()            # which raises what the thread raised
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


# ------------------------------------------------------------------------------------------------ the model grid

def resize(u, space):
    """Interpolate (B, T, *space', C) to (B, T, *space, C) linearly; u itself if it has this grid."""
    if u.shape[2:-1] == tuple(space):
        return u
    x = u.flatten(0, 1).movedim(-1, 1)                                           # (B*T, C, *space')
    x = F.interpolate(x, size=tuple(space), mode='bilinear' if len(space) == 2 else 'trilinear')
    return x.movedim(1, -1).unflatten(0, u.shape[:2])                            # (B, T, *space, C)


def to_native(u, dataset):
    """The evolving channels of frames (B, T, *space, C) of the model on the grid of a dataset."""
    return resize(u[..., dataset.evolving], dataset.space)


def norm(x):
    """L2 norms over all but the first and the last axis, (B, ..., C) -> (B, C), for any units."""
    x = x.flatten(1, -2)
    if x.dtype == torch.float32 and x.device.type == 'cpu':
        return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).float()
    # without fp64, which is slow on many GPUs
    largest = x.detach().abs().amax(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return (x / largest).norm(dim=1) * largest[:, 0]


def size_of(v, floor):
    """||v||_2 of each sample and channel, (B, ..., C) -> (B, C), at least that of a channel at rest.

    floor: (B, C) or (C,), the root mean square of such a channel.
    """
    return torch.maximum(norm(v), floor * v.flatten(1, -2).shape[1] ** 0.5)


def fluctuation(v):
    """v (B, ..., C) without the mean of each sample and channel."""
    return v - v.flatten(1, -2).mean(1).view(len(v), *[1] * (v.ndim - 2), -1)


NORM = (5 * 64 * 64) ** 0.5     # that of 5 frames of 64 x 64 points of deviation 1


def add_noise(u, epsilon, noise, dimensionless=False):
    """u (B, T, *space, C) plus noise N(0, 1) of the size epsilon * ||u||_2
    (paper, Sec. 2.2 and App. B.1).

    As in DPOT, the norm of a sample and channel is a sum over all frames and grid points.
    epsilon: the size, 0 for none.
    noise: for each sample a seed, and the channels that get noise.
    dimensionless: the norm is `NORM`, that of fields of deviation 1, whatever the grid.
    """
    if not epsilon:
        return u
    generator = torch.Generator(u.device)
    added = torch.zeros_like(u)
    for sample, (seed, channels) in zip(added, noise):
        drawn = torch.empty_like(sample[..., channels], memory_format=torch.contiguous_format)
        sample[..., channels] = drawn.normal_(generator=generator.manual_seed(seed))
    if dimensionless:
        return u.add(added, alpha=epsilon * NORM)
    return added.mul_(epsilon * norm(u).view(len(u), *[1] * (u.ndim - 2), -1)).add_(u)


def noisy_inputs(batch, config, epsilon):
    """The noisy input of Eq. (3), (B, T, *space, C), of a Batch on the grid of the model."""
    u = torch.cat([resize(windows[:, :-1], config.resolution) for windows in batch.windows])
    return add_noise(u, epsilon, batch.noise, dimensionless=config.normalize)
