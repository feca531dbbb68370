"""The file layout, and how a batch is read from it.

DATA/<dataset>/train.h5, test.h5 and perhaps valid.h5 each hold one HDF5 dataset `data` of float32 numbers with the
shape (N, T, H, W, C), in 3-D (N, T, H, W, D, C): trajectories, frames, grid points, field channels. The data are stored
contiguously in that order, so that a window, consecutive frames of one trajectory, is one contiguous read. Chunked and
compressed files and other floating-point types are read too. Where there is a valid.h5, best.pt is chosen on it, and on
test.h5 otherwise. The attributes of `data` are all optional:

    channels  the names, in order           static  the names of channels that do not evolve (a geometry mask)
    dt        the time between two frames   t_test  the number of frames to predict at test
    pde       the equation, in words        source  the generator and its seed, or the benchmark's file
    scale     one number for each static channel, which is divided by it when read, so that a wave speed in m/s becomes
              a number of order 1

A coefficient that the model does not see (such as the wave speed) is another HDF5 dataset in the same file. A steady
problem has two frames, the input and the solution. Any folder in this layout can be used by its name alone.

Shapes: B batch, T input frames, H W grid points (`space` stands for all spatial axes), C field channels.
"""
import hashlib
import io
import math
import os
import re
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import configs
from configs import InputError

import h5py
import numpy as np
import torch
import torch.nn.functional as F

import metrics
from runtime import distributed, terminal
from runtime.terminal import Progress

PADDING = 1.0                       # the value of channels that a dataset lacks (paper, App. B.1)
SPLITS = 'test', 'valid', 'train'   # in the order in which they are written: a folder with a train.h5 is complete


# ------------------------------------------------------------------------------------------------ writing

class Disk(io.FileIO):
    """A new file that h5py writes. What goes wrong first is raised and kept in `failed`, later writes are pretended.

    HDF5 crashes the interpreter if a write fails while it closes a file, and buries the reason in a paragraph. What a
    signal has interrupted it may try again at the end of the program, when this file is closed: then nothing is done.
    """
    failed = None

    def write(self, data):
        rest = memoryview(data)
        while rest and not self.failed and not self.closed:
            rest = rest[self._first_failure(super().write, rest):]
        return len(data)

    def truncate(self, size=None):
        return size if self.failed or self.closed else self._first_failure(super().truncate, size)

    def seek(self, offset, whence=0):
        return offset if self.closed else super().seek(offset, whence)

    def flush(self):
        if not self.closed:
            super().flush()

    def _first_failure(self, action, argument):
        try:
            return action(argument)
        except BaseException as error:                      # Ctrl-C as well, which HDF5 might swallow
            self.failed = error
            raise


@contextmanager
def writer(path, shape, **attributes):
    """Create `path` and yield the open h5py.File, whose `data` of `shape` (N, T, *space, C) the caller fills.

    The file appears at the end of the block, see `terminal.replacing`. `attributes` are those of the layout above. The
    caller may create further HDF5 datasets in the file.
    """
    with terminal.replacing(path) as part, Disk(part, 'w+') as disk:
        try:
            with h5py.File(disk, 'w') as file:
                data = file.create_dataset('data', shape, dtype='float32')
                for name, value in attributes.items():
                    data.attrs[name] = list(value) if isinstance(value, tuple) else value
                yield file
        finally:
            if disk.failed:
                raise disk.failed


def write(folder, train, test, valid=None, **attributes):
    """Write arrays (N, T, *space, C) with two or three spatial axes as a dataset: folder/train.h5, test.h5, valid.h5.

    The arrays may be anything that NumPy reads as real numbers, a memory-mapped file included; the trajectories are
    rounded to float32 one at a time. N and T may differ between them. `attributes` are those of the layout above.

        data.write('data/mine', u[:90], u[90:], channels=('u', 'v'))        # then: train.py --data data --datasets mine

    The files appear together, in place of an older dataset's. Raises InputError, which names the split and what is
    wrong with it (see `check`), before anything is written.
    """
    splits = {split: np.asanyarray(values) for split, values in zip(SPLITS, (test, valid, train)) if values is not None}
    check(folder, {split: (values.shape, np.dtype('f4') if values.dtype.kind in 'fiub' else values.dtype, attributes)
                   for split, values in splits.items()})
    for split, values in splits.items():
        grid = tuple(range(1, values.ndim - 2))
        for i, trajectory in enumerate(values):
            with np.errstate(over='ignore', under='ignore'):
                rounded = np.float32(trajectory)
            for wrong, what in ((np.ma.is_masked(trajectory), 'masked values'),
                                (not np.isfinite(rounded).all(), 'non-finite values in float32'),
                                ((trajectory.any(grid) & ~rounded.any(grid)).any(), 'fields that are 0 in float32')):
                if wrong:
                    raise InputError(f'{Path(folder) / split}.h5: trajectory {i}: {what}')
    with distributed.lock(folder, wait='writing'), ExitStack() as stack:
        for split, values in splits.items():
            file = stack.enter_context(writer(Path(folder) / f'{split}.h5', values.shape, **attributes))
            for i, trajectory in enumerate(values):
                file['data'][i] = np.float32(trajectory)
            file.close()                                    # after all splits only renaming is left, which cannot fail
        if valid is None:
            (Path(folder) / 'valid.h5').unlink(missing_ok=True)


def missing(folder, plan):
    """The splits of a plan that have no file yet. Raises InputError if an existing file differs from the plan.

    A file may have been solved in batches of another size, as on another device (generate.write).
    """
    def about(attributes):
        return re.sub(r' batch \d+$', '', str(attributes.get('source'))), attributes.get('pde'), attributes.get('dt')
    splits = []
    for split in plan.counts:
        path = Path(folder) / plan.name / f'{split}.h5'
        if not path.exists():
            splits.append(split)
            continue
        with terminal.naming(path, 'exists but is not a dataset; remove it'), h5py.File(path, 'r') as file:
            found = file['data'].shape, *about(file['data'].attrs)
        planned = plan.shape(split), *about(plan.attributes())
        for old, new in zip(found, planned):
            if old != new:
                raise InputError(f'{path}: exists with {old} instead of {new}; remove it or choose another --data')
    return splits


def free_space(folder):
    """The number of free bytes on the disk of `folder`, which need not exist yet."""
    path = Path(folder).absolute()
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free


def check_space(folder, size):
    """Raise InputError if the disk of `folder`, which need not exist yet, has fewer than `size` bytes left."""
    free = free_space(folder)
    if size > free:
        raise InputError(f'--data {folder}: {size / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB are free on its disk')


# ------------------------------------------------------------------------------------------------ reading

def find(folder, names=(), split='train', flag='--datasets'):
    """The names of all datasets in `folder` that have this split, sorted; or `names`, each checked to exist.

    The name of one of configs.MIXTURES stands for its datasets, unless the folder has a dataset of that name.
    flag: the one that gave `names`.
    Raises InputError, which names the folder, or the flag and the dataset with the nearest known name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f'--data {folder}: no such folder; name one that sources.generate or '
                         f'sources.prepare has filled')
    present = sorted(path.parent.name for path in folder.glob(f'*/{split}.h5'))
    names = [dataset for name in names for dataset in
             ((name,) if name in present else configs.MIXTURES.get(name, (name,)))]
    for name in names:
        if name not in present:
            small = f' --preset {folder.name}' * (folder.name in configs.BUILTIN)
            how = (f'; run: python -m sources.generate {name}{small} --data {folder}' if name in configs.DATASETS else
                   configs.nearest(name, present + [known for known in configs.DATASETS if known not in present]))
            raise InputError(f'{flag} {name}: no {folder / name / split}.h5{how}')
    if not present:
        raise InputError(f'--data {folder}: the folder holds no <dataset>/{split}.h5')
    return list(dict.fromkeys(names)) or present


def validation_split(folder, name):
    """The split on which best.pt is chosen: 'valid' if the dataset has it, else 'test'."""
    return 'valid' if (Path(folder) / name / 'valid.h5').exists() else 'test'


class Layout(NamedTuple):
    """What the attributes of `data` say, see the layout above."""
    channels: list              # names; if the file has none, '0', '1', ...
    static: list                # names
    scale: list                 # a number for each static channel
    dt: float
    t_test: float               # infinite if the file does not say


def number(value):
    """An attribute as a float, NaN if it is not one number. Some programs store a number as an array of one element."""
    try:
        return float(np.asarray(value).reshape(()))
    except (TypeError, ValueError):
        return math.nan


def texts(value):
    """An attribute that names things, a text or an array of texts of any kind, as a list of str."""
    return [name.decode() if isinstance(name, bytes) else str(name) for name in np.ravel(value).tolist()]


def check(folder, splits):
    """What the `data` of the splits of a dataset say, {split: (shape, dtype, attributes)} -> {split: Layout}.

    `write` calls this before it writes, Trajectories (and thus sources/prepare.py --check) when it opens files.
    Raises InputError, which names the file, if a shape, type or attribute is not as the layout above says, or if the
    splits differ in their grid or channels (and in what these are, if both name theirs).
    """
    found, forms = {}, {}
    for split, (shape, dtype, attributes) in splits.items():
        path, shape = Path(folder) / f'{split}.h5', shape or ()
        given = {key: np.asarray(value).tolist() for key, value in attributes.items()}
        if len(shape) not in (5, 6) or dtype.kind != 'f' or 0 in shape or shape[1] < 2:
            raise InputError(f"{path}: 'data' is {dtype} {shape}; expected floating-point numbers of shape "
                             f'(N, T, H, W, C) or (N, T, H, W, D, C), with at least two frames and no empty axis')
        channels = texts(given['channels']) if 'channels' in given else [str(i) for i in range(shape[-1])]
        static, dt = texts(given.get('static', [])), number(given.get('dt', 1))
        t_test = number(given.get('t_test', math.inf))
        scale = given.get('scale', [1] * len(static))
        if not len(set(channels)) == len(channels) == shape[-1]:
            raise InputError(f'{path}: channels {channels}: expected {shape[-1]} different names, one for each channel')
        if set(static) - set(channels) or len(static) >= shape[-1]:
            raise InputError(f'{path}: static channels {static} of {channels}: a name is unknown, or no channel is '
                             f'left to evolve')
        if np.shape(scale) != (len(static),) or not all(0 < np.float32(number(value)) < math.inf for value in scale):
            raise InputError(f'{path}: scale {scale}: expected a list with one positive number for each of the static '
                             f'channels {static}')
        if not 0 < dt < math.inf:
            raise InputError(f"{path}: dt {given['dt']}: expected a positive number")
        if not t_test >= 1 or t_test % 1 > 0:
            raise InputError(f"{path}: t_test {given['t_test']}: expected a whole number of frames, at least 1")
        found[split] = Layout(channels, static, scale, dt, t_test)
        forms[split] = f'a grid of {configs.show(shape[2:-1])} and {shape[-1]} channels'
        if all('channels' in others for *_, others in splits.values()):
            forms[split] += f' {" ".join(channels)}'
            forms[split] += f' ({" ".join(static)} static, scale {scale})' if static else ''
    for (split, form), (other, wanted) in zip(forms.items(), [*forms.items()][1:]):
        if form != wanted:
            raise InputError(f'{folder}: {split}.h5 has {form}, but {other}.h5 {wanted}; they must be equal')
    return found


def check_written(data):
    """Raise InputError if a part of an HDF5 dataset was never written or has no source, where HDF5 would give zeros.

    A file whose writer was killed may be so. Sources of a virtual dataset whose names have a % are not looked at.
    """
    path, written = Path(data.file.filename), data.id.get_storage_size() >= data.nbytes
    if data.is_virtual:
        sources = data.virtual_sources()
        written = sum(source.vspace.get_select_npoints() for source in sources) >= data.size
        for name, key in {(source.file_name, source.dset_name) for source in sources if '%' not in source.file_name}:
            places = path.parent / name, path.parent / Path(name).name, Path(name)
            place = path if name == '.' else next((place for place in places if place.exists()), None)
            if not place:
                raise InputError(f"{path}: 'data' is a virtual dataset, of which the file {name} is missing")
            with terminal.naming(f'{path}: its source {place}'), h5py.File(place, 'r') as file:
                check_written(file[key])
        written |= any('%' in source.file_name for source in sources)
    elif data.chunks:
        written = data.id.get_num_chunks() >= math.prod(map(math.ceil, np.divide(data.shape, data.chunks)))
    if not written:
        raise InputError(f'{path}: a part of {data.name} was never written; write the file again')


def header(path, coefficients=()):
    """What an HDF5 file says of itself, as a tuple of five.

    shape, dtype and attributes of `data`; the scales of the `coefficients`; the place of the first byte of `data` if
    it is plain float32 in this very file and there are no coefficients, else None: then HDF5 must read it.
    Raises InputError if the file cannot be read, or if `data` or a coefficient is missing or a link to nothing.
    """
    with terminal.naming(path), h5py.File(path, 'r') as file:
        data, others = file.get('data'), sorted(set(file) - {'data'}) or 'nothing'
        if not isinstance(data, h5py.Dataset):
            raise InputError(f"{path}: no dataset 'data', found {others}" if 'data' not in file.keys() else
                             f"{path}: 'data' is no dataset, or a link to nothing")
        scales = []
        for key in coefficients:
            field = file.get(key)
            if getattr(field, 'shape', None) not in (data.shape[:1], data.shape[:1] + data.shape[2:-1]) \
                    or field.dtype.kind not in 'fiu':
                raise InputError(f"{path}: --coefficients {key}: no such field beside 'data'; found {others}")
            scales.append(number(field.attrs.get('scale', 1)))
        plain = (data.dtype == np.dtype('<f4') and not data.external and not coefficients
                 and os.path.samefile(data.file.filename, path))
        return data.shape, data.dtype, dict(data.attrs), scales, data.id.get_offset() if plain else None


class Trajectories:
    """One split of one dataset, read window by window.

    folder: DATA; name: the dataset; split: one of SPLITS; frames: T; channels: C of the model, or None.
    coefficients: further HDF5 datasets of the file, (N, *space) or (N,), which are appended as static channels.
    rows: the trajectories to use, or how many of the first at most; None: all. dims: of the model's space, if any.
    Raises InputError if the file is missing, truncated or not HDF5, if its `data` is not as `check` expects or differs
    from the other split's, or if it has fewer than T + 1 frames, other dimensions or more channels than the model.
    `read` raises it for non-finite values.
    """

    def __init__(self, folder, name, split, frames, channels, coefficients=(), rows=None, dims=None):
        folder = Path(folder) / name
        self.name, self.path = name, folder / f'{split}.h5'
        self._file = self._data = self._process = self._held = None
        present = [part for part in SPLITS if (folder / f'{part}.h5').exists()]
        headers = {part: header(folder / f'{part}.h5', coefficients if part == split else ())
                   for part in (present if split in present else [split])}
        layout = check(folder, {part: found[:3] for part, found in headers.items()})[split]
        with terminal.naming(self.path), h5py.File(self.path, 'r') as file:
            check_written(file['data'])
        stored, *_, scales, self._offset = headers[split]
        rows = range(min(rows, stored[0])) if isinstance(rows, int) else rows
        self._rows, self._coefficients = rows, coefficients
        self.shape = (stored[0] if rows is None else len(rows), *stored[1:-1], stored[-1] + len(coefficients))
        self.count, self.frames, *_, self.channels = self.shape
        self.space = self.shape[2:-1]
        self.steady = self.frames == 2                                  # the input and the solution
        if self.frames < frames + 1:
            raise InputError(f'{self.path}: {self.frames} frames are too few for a model that takes {frames}; train '
                             f'with --frames {self.frames - 1}{" (a steady problem)" if self.steady else " or fewer"}')
        if dims is not None and len(self.space) != dims:
            raise InputError(f'{self.path}: {len(self.space)} dimensions of space, the model has {dims}; train with '
                             f'--dims {len(self.space)}, and name datasets of this kind alone')
        if channels is not None and self.channels > channels:
            raise InputError(f'{self.path}: {self.channels} channels, the model has {channels}; '
                             f'train with --channels {self.channels}')
        if not all(0 < np.float32(value) < math.inf for value in scales):
            raise InputError(f'{self.path}: scale {scales} of --coefficients {" ".join(coefficients)}: expected '
                             f'positive numbers')
        known = configs.DATASETS.get(name)
        self.channel_names, static = layout.channels + list(coefficients), layout.static + list(coefficients)
        self._scale = np.ones(self.channels, np.float32)
        self._scale[[self.channel_names.index(channel) for channel in static]] = [*layout.scale, *scales]
        self.evolving = [i for i, channel in enumerate(self.channel_names) if channel not in static]
        self.dt = layout.dt
        self.t_test = int(min(layout.t_test, self.frames - frames))
        self.weight = known.weight if known else 1.0

    def read(self, trajectory, start, stop, out=None):
        """Frames start..stop-1 of one trajectory, float32 (stop - start, *space, C). Nothing else is read.

        The frames are written into `out` if it is given.
        """
        out = np.empty((stop - start, *self.shape[2:]), np.float32) if out is None else out
        with terminal.naming(self.path, f'trajectory {trajectory} cannot be read'):
            self._fill(out, trajectory, start)
        # A finite sum proves that all values are finite; only a non-finite sum needs the full check.
        with np.errstate(over='ignore', invalid='ignore'):
            if not np.isfinite(out.sum()) and not np.isfinite(out).all():
                frame = start + int(np.isfinite(out).all(tuple(range(1, out.ndim))).argmin())
                row = trajectory if self._rows is None else self._rows[trajectory]
                raise InputError(f'{self.path}: trajectory {row}, frames {start}..{stop - 1}: non-finite values, first '
                                 f'in frame {frame}')
        if (self._scale != 1).any():
            out /= self._scale
        return out

    def _fill(self, out, trajectory, start):
        """Fill `out` with the frames from `start` on: the plain bytes of contiguous float32 data, or through HDF5."""
        row = trajectory if self._rows is None else self._rows[trajectory]
        if self._process != os.getpid():        # an open file must not cross a fork: each worker opens its own
            self._file = h5py.File(self.path, 'r') if self._offset is None else open(self.path, 'rb')
            self._data = self._file['data'] if self._offset is None else None
            self._process = os.getpid()
        if self._offset is None and self._coefficients:
            out[..., :self._data.shape[-1]] = self._data[row, start:start + len(out)]
            for i, key in enumerate(self._coefficients, start=self._data.shape[-1]):
                out[..., i] = self._file[key][row]
        elif self._offset is None:
            self._data.read_direct(out, np.s_[row, start:start + len(out)])
        else:
            self._file.seek(self._offset + (row * self.frames + start) * out[0].nbytes)
            if self._file.readinto(out) < out.nbytes:
                raise OSError('truncated')

    def hold(self, device, bar):
        """Read all trajectories onto the device; from now on `windows` takes its frames from there."""
        held = torch.empty(self.shape, device=device)
        for i, trajectory in enumerate(held):
            trajectory.copy_(torch.from_numpy(self.read(i, 0, self.frames)))
            bar.update(4 * trajectory.numel())
        self._held = held

    def windows(self, places, frames):
        """Windows (b, frames, *space, C) from the places (trajectory, first frame); on the device after `hold`."""
        if self._held is not None:
            return torch.stack([self._held[trajectory, start:start + frames] for trajectory, start in places])
        shape = len(places), frames, *self.shape[2:]
        if torch.utils.data.get_worker_info():              # memory that the training process shares, to save a copy
            windows = torch.empty(0).set_(torch.UntypedStorage._new_shared(4 * math.prod(shape))).view(shape)
        else:
            windows = torch.from_numpy(np.empty(shape, np.float32))     # huge pages, unlike torch.empty's
        for window, (trajectory, start) in zip(windows.numpy(), places):
            self.read(trajectory, start, start + frames, out=window)
        return windows


# ------------------------------------------------------------------------------------------------ the cache

def free_memory(device):
    """The number of free bytes on a GPU, or in this machine's RAM. The limit of a container is not considered."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path('/proc/meminfo').read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith('MemAvailable'))
    except OSError:                                         # not Linux: take all of the RAM
        return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def cache(sets, where, processes):
    """If `where` is 'device', read each Trajectories of `sets` whole onto the device of each process.

    Their windows are then taken from there, equal to the bit. Rank 0 prints a line.
    Raises InputError if the data do not fit, with both sizes, and if any value is not finite.
    """
    if where != 'device':
        return
    started, device, size = time.perf_counter(), processes.device, sum(4 * math.prod(item.shape) for item in sets)
    copies = 1 if device.type == 'cuda' else int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    free = free_memory(device)
    if size * copies > free:
        raise InputError(f'--cache device: {size * copies / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB are free '
                         f'{"on " + str(device) if device.type == "cuda" else "in RAM"}')
    with Progress(total=size, desc='caching', unit='B', unit_scale=True, disable=processes.rank > 0,
                  leave=False) as bar:
        for item in sets:
            item.hold(device, bar)
    processes.print(f'--cache device: {size / 1e9:.3g} GB of training data read in '
                    f'{time.perf_counter() - started:.1f} s')


# ------------------------------------------------------------------------------------------------ balanced sampling

class Windows(torch.utils.data.Dataset):
    """Training windows of T + 1 frames of a mixture, drawn with p(sample of dataset k) = w_k / (|D_k| sum w).

    This is App. B.1 of the paper without its stray factor 1/K. Sample number n of the run is a pure function of (seed,
    epoch, index) with epoch, index = divmod(n, sum |D_k|), so that it depends neither on the batch size nor on the
    number of workers and processes, and a resumed run continues with the same samples.
    """

    def __init__(self, sets, frames, seed):
        self.sets, self.frames, self.seed = sets, frames, seed
        weights = np.array([item.weight for item in sets], dtype=float)
        self.share = weights / weights.sum()
        self._up_to = self.share.cumsum() / self.share.cumsum()[-1]
        self.epoch = sum(item.count for item in sets)           # the draws of an epoch, whatever the weights

    def draw(self, number):
        """Sample `number` of the run: (dataset k, trajectory, first frame, seed of its noise)."""
        random = np.random.default_rng((self.seed, *divmod(number, self.epoch)))
        k = int(self._up_to.searchsorted(random.random(), side='right'))
        trajectory = int(random.integers(self.sets[k].count))
        start = int(random.integers(self.sets[k].frames - self.frames))
        return k, trajectory, start, int(random.integers(2 ** 62))

    def __getitem__(self, numbers):
        """The samples of these numbers, grouped by dataset: a list of (k, windows (b, T+1, *space, C), noise seeds)."""
        groups = {}
        for k, trajectory, start, seed in map(self.draw, numbers):
            places, seeds = groups.setdefault(k, ([], []))
            places.append((trajectory, start))
            seeds.append(seed)
        return [(k, self.sets[k].windows(places, self.frames + 1), seeds)
                for k, (places, seeds) in sorted(groups.items())]


def batches_of_rank(first, last, batch_size, rank=0, world_size=1):
    """The sample numbers of one rank for the steps first..last-1: a list with one range a step.

    Step s of the run takes the samples s * batch_size .. (s + 1) * batch_size - 1, of which each rank has a contiguous
    part of equal length. Raises InputError if batch_size is not divisible by world_size.
    """
    if batch_size % world_size:
        raise InputError(f'--batch_size {batch_size} is not divisible by {world_size} processes')
    part = batch_size // world_size
    return [range(step * batch_size + rank * part, step * batch_size + (rank + 1) * part)
            for step in range(first, last)]


# ------------------------------------------------------------------------------------------------ the model grid

def resize(u, space):
    """Interpolate (B, T, *space', C) to (B, T, *space, C), (tri)linearly; u itself is returned if it has this grid."""
    if u.shape[2:-1] == tuple(space):
        return u
    fields = u.flatten(0, 1).movedim(-1, 1)                                         # (B*T, C, *space')
    fields = F.interpolate(fields, size=tuple(space), mode='bilinear' if len(space) == 2 else 'trilinear')
    return fields.movedim(1, -1).unflatten(0, u.shape[:2])                          # (B, T, *space, C)


def to_model(u, space, channels):
    """Fields of a dataset (B, T, *space', C') on the model's grid, padded to its channels (B, T, *space, C)."""
    return F.pad(resize(u, space), (0, channels - u.shape[-1]), value=PADDING)


def to_native(u, like):
    """The evolving channels of the model's fields (B, T, *space, C) on the native grid of the Trajectories `like`."""
    return resize(u[..., like.evolving], like.space)


def add_noise(u, scale, seeds, evolving):
    """u (B, T, *space, C) plus scale * ||u||_2 * N(0, 1) on the evolving channels (paper, Sec. 2.2 and App. B.1).

    As in DPOT, the norm of each sample and channel is the one over all frames and grid points, not a root mean square.
    The noise of each sample comes from its own seed, so that it does not depend on the rest of the batch.
    """
    if not scale:
        return u
    every = len(evolving) == u.shape[-1]
    fields = u if every else u[..., evolving]
    generator, noise = torch.Generator(u.device), torch.empty_like(fields)
    for sample, seed in zip(noise, seeds):
        sample.normal_(generator=generator.manual_seed(seed))
    noise = noise.mul_(scale * metrics.norm(fields).view(len(u), *[1] * (u.ndim - 2), -1)).add_(fields)
    return noise if every else u.index_copy(-1, torch.tensor(evolving, device=u.device), noise)


# ------------------------------------------------------------------------------------------------ checking

def read_frames(test, trajectories, start, stop, device):
    """Frames start..stop-1 of several trajectories, as they are stored: (B, stop - start, *space', C') on `device`."""
    return torch.stack([torch.from_numpy(test.read(i, start, stop)) for i in trajectories]).to(device)


def octave_bands(space):
    """Octave bands of wavenumber on a grid: their names, and (modes, bands), 1 where a mode of fftn is in a band.

    |k| counts waves along the longest axis, if all axes have the same spacing. The last band has everything from N/4
    on, where N is the length of that axis rounded down to a power of two.
    """
    count, k = max(1, int(math.log2(max(space))) - 1), [torch.fft.fftfreq(N, 1 / max(space)) for N in space]
    k = torch.stack(torch.meshgrid(*k, indexing='ij')).norm(dim=0).flatten()
    octave = (k + 1e-6).log2().floor().clamp(max=count - 1)             # 1e-6: rounding of k; k = 0 is in no band
    names = [f'k {2 ** b}-{2 ** (b + 1)}' for b in range(count - 1)] + [f'k {2 ** (count - 1)}-']
    return names, (octave[:, None] == torch.arange(count)).float()


def field_statistics(u, bands):
    """Energy, mean, smallest and largest value, and spectrum of fields: (B, *space, C) -> (B, M, C), M = 4 + bands.

    Energy is the mean of u^2. The spectrum is its part in each of `bands`, see `octave_bands`; without the squared mean
    the parts add up to it. All is in float64, since float32 does not hold the squares of 1e20 or 1e-30.
    """
    u = u if u.device.type == 'mps' else u.double()                     # which has no float64
    flat = u.flatten(1, -2)
    power = torch.fft.fftn(u, dim=tuple(range(1, u.ndim - 1)), norm='forward').abs().square().flatten(1, -2)
    moments = torch.stack([flat.square().mean(1), flat.mean(1), flat.amin(1), flat.amax(1)], 1)
    return torch.cat([moments, torch.einsum('bkc,km->bmc', power, bands.to(u.dtype))], 1)


def split_statistics(split, processes):
    """`field_statistics` of all frames of a data.Trajectories: (N, frames, M, C'') float64, equal on all processes."""
    bands = octave_bands(split.space)[1].to(processes.device)
    found = torch.zeros(split.count, split.frames, 4 + bands.shape[1], len(split.evolving), dtype=torch.float64)
    for i in Progress(range(processes.rank, split.count, processes.world_size), desc=f'statistics of {split.path}',
                  disable=processes.rank > 0, leave=False):
        frames = read_frames(split, [i], 0, split.frames, processes.device)[0]
        found[i] = field_statistics(frames[..., split.evolving], bands).cpu().double()
    return processes.sum(found)


def zeros(item, counts):
    """What is wrong with a Trajectories of which counts[c] trajectories are zero in channel c, one line a channel."""
    return [f'{item.path}: {item.channel_names[c]} is zero throughout in {int(counts[c])} of {item.count} '
            f'trajectories, which have no relative error; leave them out, or call the channel static'
            for c in item.evolving if counts[c]]


def survey(folder, name, split):
    """Print the statistics of one split -> hashes of the first frames, hashes of the trajectories, a list of defects.

    change: the mean over trajectories and frames of ||u_t+1 - u_t|| / ||u_t+1||, the one-step error of persistence.
    """
    item = Trajectories(folder, name, split, 1, sys.maxsize)
    N, T, C, names, points = item.count, item.frames, item.channels, item.channel_names, math.prod(item.space)
    starts, whole, statistics = [], [], np.empty((5, N, T, C))
    with terminal.naming(item.path), h5py.File(item.path, 'r') as file, np.errstate(all='ignore'):      # see below
        for i in Progress(range(N), desc=f'{name} {split}', leave=False):
            digest, previous = hashlib.blake2b(), 0
            for t in range(T):
                frame = file['data'][i, t]
                digest.update(frame)
                starts += [digest.digest()] * (t == 0)
                u = frame.reshape(points, C).astype(float)
                statistics[:, i, t] = u.min(0), u.max(0), u.sum(0), (u ** 2).sum(0), ((u - previous) ** 2).sum(0)
                previous = u
            whole.append(digest.digest())
        low, high, total, square, moved = statistics                               # (N, T, C) each
        mean, mean_square = total.mean((0, 1)) / points, square.mean((0, 1)) / points
        change = metrics.relative(*map(torch.from_numpy, (moved, square))).sqrt().numpy()[:, 1:].mean((0, 1))
        columns = dict(min=low.min((0, 1)), max=high.max((0, 1)), mean=mean,
                       std=np.sqrt((mean_square - mean ** 2).clip(0)), change=change)
        broken = np.flatnonzero(~np.isfinite(low + high).all((1, 2)))
    print(f'{item.path}: {item.shape}, dt {item.dt:g}')
    rows = {channel: {title: column[c] for title, column in columns.items()} for c, channel in enumerate(names)}
    print(*terminal.table('channel', rows, '.4g'), sep='\n')
    moves = np.pad(moved[:, 1:].any(2), ((0, 0), (1, 0)), constant_values=True)     # (N, T), is t unlike t - 1?
    still = moves[:, ::-1].argmax(1)                    # frames at the end that are like the one before
    copies = N - len(set(whole))
    repeated = copies if name == 'cfdbench' else N - len(set(starts))              # its cases all start from rest
    needed = 2 if name in configs.DATASETS and configs.DATASETS[name].frames == 2 else 11
    wrong = [
        (broken.size, f'{broken.size} trajectories have values that are not finite; the first is {broken[:1]}'),
        (still.any(), f'{(still > 0).sum()} of {N} trajectories end in equal frames, up to {still.max() + 1} of them'),
        (repeated, f'{repeated} trajectories have the first frame of an earlier one, {copies} all its frames'),
        (T < needed, f'{T} frames, but at least {needed} are needed')]
    for c, (channel, lowest) in enumerate(zip(names, columns['min'])):
        if channel in ('density', 'pressure'):
            wrong.append((not lowest > 0, f'{channel} is not positive: {lowest:g}'))
        if channel == 'mask':
            solid = np.flatnonzero((high[..., c] == 0).all(1))
            wrong += [(lowest > 0, 'the mask is 0 nowhere, so it marks no solid'),
                      (solid.size, f'the mask is 0 everywhere in {solid.size} trajectories; the first is {solid[:1]}')]
    return starts, whole, [*(f'{item.path}: {text}' for is_wrong, text in wrong if is_wrong),
                           *zeros(item, ((low == 0) & (high == 0)).all(1).sum(0))]


def defects(folder, name):
    """Print the statistics of all splits of folder/name and return what is wrong with them, one line each."""
    splits = list(dict.fromkeys(('train', validation_split(folder, name), 'test')))
    found = {split: survey(folder, name, split) for split in splits}
    wrong = [line for *_, lines in found.values() for line in lines]
    for one, other in combinations(splits, 2):
        starts, copies = (sum(map(set(a).__contains__, b)) for a, b in list(zip(found[one], found[other]))[:2])
        if (copies if name == 'cfdbench' else starts) > 0:
            wrong.append(f'{Path(folder) / name / other}.h5: {starts} of {len(found[other][0])} trajectories have the '
                         f'first frame of one in {one}.h5, {copies} all its frames: it is not independent')
    return wrong
