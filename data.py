"""The file layout, and how a batch is read from it.

DATA/<dataset>/train.h5 and test.h5 each hold one HDF5 dataset `data`, float32, (N, T, H, W, C), in 3-D
(N, T, H, W, D, C): trajectories, frames, grid points, field channels. It is stored contiguously in that order, so that
consecutive frames of one trajectory are one contiguous read: one core reads 660 windows of 11 frames (128, 128, 4) a
second, 450 from chunks of one frame, 350 from chunks of 11, 110 of those that lzf compressed (bench.py loader). Files
in chunks, compressed or of other floats are read too. The attributes of `data`, all optional:

    channels  names, in order               static  names of channels that do not evolve (a geometry mask)
    dt        time between two frames       t_test  frames to predict at test
    pde       the equation, in words        source  generator and seed, or the benchmark's file
    scale     one number a static channel, by which it is divided when read: a wave speed in m/s becomes of order 1

A coefficient that the model does not see (the wave speed) is another HDF5 dataset of the same file. A steady problem is
two frames, the input and the solution. A folder in this layout works by its name alone.

Shapes: B batch, T input frames, H W grid points (space, in comments: one or more axes), C field channels.
"""
import math
import os
import shutil
import time
import weakref
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import configs
from configs import InputError

PADDING = 1.0                       # value of the channels that a dataset lacks (paper, App. A.1)


# ------------------------------------------------------------------------------------------------ writing

@contextmanager
def writer(path, shape, **attributes):
    """Create `path` and yield the open h5py.File, whose `data` has `shape` (N, T, *space, C) and waits to be filled.

    The file is written beside its place and renamed when the block ends well; when it does not, nothing is left.
    `attributes` go on `data`: channels, dt, pde, static, source, t_test. Further datasets may be created in the block.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + '.part')
    try:
        with h5py.File(part, 'w') as file:
            data = file.create_dataset('data', shape, dtype='float32')
            for name, value in attributes.items():
                data.attrs[name] = list(value) if isinstance(value, tuple) else value
            yield file
        with open(part, 'rb') as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write(folder, train, test, **attributes):
    """Two arrays (N, T, *space, C), two or three axes of space, -> folder/train.h5 and folder/test.h5: a dataset.

    Anything NumPy reads as numbers, a memory-mapped file too; each trajectory is rounded to float32 on its way. N and T
    may differ between the two. `attributes` as in the layout above: channels=('u', 'v'), dt=0.1. test.h5 comes first,
    so that a folder with train.h5 is complete.

        data.write('data/mine', u[:90], u[90:], channels=('u', 'v'))        # then: train.py --data data --datasets mine

    Raises InputError, before anything is written, naming the split and what is wrong with it.
    """
    splits = {'test': np.asarray(test), 'train': np.asarray(train)}
    for split, values in splits.items():
        if values.ndim not in (5, 6) or values.dtype.kind not in 'fiub' or 0 in values.shape or values.shape[1] < 2:
            raise InputError(f'{folder}: {split} is {values.dtype} {values.shape}; expected real numbers '
                             f'(N, T, H, W, C) or (N, T, H, W, D, C), at least two frames')
        for i, trajectory in enumerate(values):
            with np.errstate(over='ignore'):                # what float32 cannot hold becomes inf
                if not np.isfinite(np.float32(trajectory)).all():
                    raise InputError(f'{folder}: {split}, trajectory {i}: non-finite values in float32')
    shapes = [values.shape[2:] for values in splits.values()]
    if shapes[0] != shapes[1]:
        raise InputError(f'{folder}: test has grid and channels {shapes[0]}, train {shapes[1]}; they must be equal')
    names = attributes.get('channels', [str(i) for i in range(shapes[0][-1])])
    if len(names) != shapes[0][-1]:
        raise InputError(f'{folder}: {len(names)} names of channels {tuple(names)} for {shapes[0][-1]} channels')
    if set(attributes.get('static', ())) - set(names):
        raise InputError(f'{folder}: static {tuple(attributes["static"])} are not all among channels {tuple(names)}')
    for split, values in splits.items():
        with writer(Path(folder) / f'{split}.h5', values.shape, **attributes) as file:
            for i, trajectory in enumerate(values):
                file['data'][i] = np.float32(trajectory)


def missing(folder, plan):
    """The splits of a plan that are still to be written. Raises InputError where one is there but differs."""
    splits = []
    for split in plan.counts:
        path = Path(folder) / plan.name / f'{split}.h5'
        if not path.exists():
            splits.append(split)
            continue
        try:
            with h5py.File(path, 'r') as file:
                there = file['data'].shape, *(file['data'].attrs.get(key) for key in ('source', 'pde', 'dt'))
        except (OSError, KeyError):
            raise InputError(f'{path} is there and is not a dataset; remove it') from None
        asked = plan.shape(split), *(plan.attributes()[key] for key in ('source', 'pde', 'dt'))
        for old, new in zip(there, asked):
            if old != new:
                raise InputError(f'{path} is there with {old}, asked is {new}; remove it or choose another --data')
    return splits


def free_space(folder):
    """Bytes that are free on the disk of `folder`, which need not exist yet."""
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def check_space(folder, size):
    """Raise InputError where the disk of `folder`, which need not exist yet, has fewer than `size` bytes left."""
    free = free_space(folder)
    if size > free:
        raise InputError(f'--data {folder}: {size / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free on its disk')


# ------------------------------------------------------------------------------------------------ reading

def find(folder, names=(), split='train'):
    """The datasets of `folder` that have this split: all, sorted, or `names`, each checked to be there.

    The name of one of configs.MIXTURES stands for its datasets.
    Raises InputError naming the folder or the dataset, with the nearest known name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f'--data {folder}: no such folder')
    present = sorted(path.parent.name for path in folder.glob(f'*/{split}.h5'))
    names = [name for given in names for name in configs.MIXTURES.get(given, (given,))]
    for name in names:
        if name not in present:
            how = (f'; run: python generate.py {name} --data {folder}' if name in configs.DATASETS else
                   configs.nearest(name, present + [known for known in configs.DATASETS if known not in present]))
            raise InputError(f'--datasets {name}: no {folder / name / split}.h5{how}')
    if not present:
        raise InputError(f'--data {folder}: holds no <dataset>/{split}.h5')
    return list(dict.fromkeys(names)) or present


class Trajectories:
    """One split of one dataset, read window by window.

    folder: DATA; name: the dataset; split: 'train' or 'test'; frames: T, input frames; channels: C of the model.
    coefficients: further HDF5 datasets of the file, (N, *space) or (N,), appended as static channels.
    rows: the trajectories to use, default: all.
    Raises InputError where the file is missing, not HDF5 or truncated, lacks `data`, has the wrong rank or type, fewer
    than T + 1 frames or more channels than the model; and, from `read`, where a value is not finite.
    """

    def __init__(self, folder, name, split, frames, channels, coefficients=(), rows=None):
        self.name, self.path = name, Path(folder) / name / f'{split}.h5'
        self._data = self._process = self._held = None
        self._checked = False                   # whether all values are known to be finite
        with self._open() as file:
            if not isinstance(file.get('data'), h5py.Dataset):
                raise InputError(f"{self.path}: no dataset 'data', found {sorted(file) or 'nothing'}")
            data = file['data']
            stored, attributes = data.shape, dict(data.attrs)
            for key in coefficients:
                if key not in file or file[key].shape not in (stored[:1], stored[:1] + stored[2:-1]):
                    raise InputError(f"{self.path}: --coefficients {key}: no such field beside 'data', found "
                                     f"{sorted(set(file) - {'data'}) or 'nothing'}")
            beside = [file[key].attrs.get('scale', 1) for key in coefficients]
            if data.ndim not in (5, 6) or data.dtype.kind != 'f':
                raise InputError(f"{self.path}: 'data' is {data.dtype} {data.shape}; expected float (N, T, H, W, C)")
            plain = data.dtype == np.dtype('<f4') and not data.external and not coefficients
            self._flat = self.path, data.id.get_offset() if plain else None         # no offset where it is chunked
        self._rows, self._coefficients = rows, coefficients
        self.shape = (stored[0] if rows is None else len(rows), *stored[1:-1], stored[-1] + len(coefficients))
        self.count, self.frames, *_, self.channels = self.shape
        self.space = self.shape[2:-1]
        if self.count < 1 or self.frames < frames + 1:
            raise InputError(f'{self.path}: {self.count} trajectories of {self.frames} frames; '
                             f'at least 1 of {frames + 1} (T_in + 1) are needed')
        if channels is not None and self.channels > channels:
            raise InputError(f'{self.path}: {self.channels} channels, the model has {channels}; '
                             f'train with --channels {self.channels}')
        known = configs.DATASETS.get(name)
        self.channel_names = [str(channel) for channel in attributes.get('channels', range(stored[-1]))]
        static = [str(channel) for channel in attributes.get('static', ())]
        scale = [*attributes.get('scale', [1] * len(static)), *beside]
        self.channel_names, static = self.channel_names + list(coefficients), static + list(coefficients)
        if set(static) - set(self.channel_names) or len(static) == self.channels:
            raise InputError(f'{self.path}: static channels {static} of {self.channel_names}: nothing would evolve '
                             f'or the name is unknown')
        self._scale = np.ones(self.channels, np.float32)
        if len(scale) != len(static) or not min(scale, default=1) > 0:
            raise InputError(f'{self.path}: scale {scale} is not one positive number for each static channel '
                             f'{static}')
        self._scale[[self.channel_names.index(channel) for channel in static]] = scale
        self.steady = self.frames == 2                                  # input and solution, no time
        self.evolving = [i for i, channel in enumerate(self.channel_names) if channel not in static]
        self.dt = float(attributes.get('dt', 1))
        self.t_test = min(int(attributes.get('t_test', self.frames)), self.frames - frames)
        self.weight = known.weight if known else 1.0

    def _open(self):
        try:
            return h5py.File(self.path, 'r')
        except FileNotFoundError:
            raise InputError(f'{self.path}: no such file') from None
        except OSError as error:
            raise InputError(f'{self.path}: not a readable HDF5 file ({str(error).splitlines()[0]})') from None

    def read(self, trajectory, start, stop, out=None):
        """Frames start..stop-1 of one trajectory: float32 (stop - start, *space, C), and nothing else is read.

        Into the array `out` where there is one.
        """
        out = np.empty((stop - start, *self.shape[2:]), np.float32) if out is None else out
        try:
            self._fill(out, trajectory, start)
        except OSError as error:
            raise InputError(f'{self.path}: trajectory {trajectory} cannot be read '
                             f'({str(error).splitlines()[0]})') from None
        if not self._checked:
            with np.errstate(over='ignore', invalid='ignore'):      # a finite sum is a quick proof, another is none
                if not np.isfinite(out.sum()) and not np.isfinite(out).all():
                    raise InputError(f'{self.path}: trajectory {trajectory}, frames {start}..{stop - 1}: '
                                     f'non-finite values')
        if (self._scale != 1).any():
            out /= self._scale
        return out

    def _fill(self, out, trajectory, start):
        """Frames from `start` on into `out`: the bytes as they are where they are contiguous float32, or by HDF5."""
        path, offset = self._flat
        row = trajectory if self._rows is None else self._rows[trajectory]
        if self._process != os.getpid():        # a handle must not cross a fork: each worker opens its own
            self._data = self._open()['data'] if offset is None else open(path, 'rb')
            self._process = os.getpid()
        if offset is None and self._coefficients:
            out[..., :self._data.shape[-1]] = self._data[row, start:start + len(out)]
            for i, key in enumerate(self._coefficients, start=self._data.shape[-1]):
                out[..., i] = self._data.parent[key][row]
        elif offset is None:
            self._data.read_direct(out, np.s_[row, start:start + len(out)])
        else:
            self._data.seek(offset + (row * self.frames + start) * out[0].nbytes)
            if self._data.readinto(out) < out.nbytes:
                raise OSError('truncated')

    def keep(self, place):
        """Take all windows from `place` from now on: a tensor, or a path with its bytes, of what `read` gives."""
        if isinstance(place, torch.Tensor):
            self._held = place
        else:
            self._flat, self._data, self._process, self._checked = (place, 0), None, None, True
            self._scale, self._rows, self._coefficients = np.ones_like(self._scale), None, ()

    def windows(self, places, frames):
        """(b, frames, *space, C) from the places (trajectory, first frame): on the device if `cache` put them there."""
        if self._held is not None:
            return torch.stack([self._held[trajectory, start:start + frames] for trajectory, start in places])
        shape = len(places), frames, *self.shape[2:]
        if torch.utils.data.get_worker_info():              # where the training process finds it without a copy
            windows = torch.empty(0).set_(torch.UntypedStorage._new_shared(4 * math.prod(shape))).view(shape)
        else:
            windows = torch.from_numpy(np.empty(shape, np.float32))     # in huge pages, unlike torch.empty
        for window, (trajectory, start) in zip(windows.numpy(), places):
            self.read(trajectory, start, start + frames, out=window)
        return windows


# ------------------------------------------------------------------------------------------------ the cache

def free_memory(device):
    """Bytes free on a GPU, or in this machine's RAM; a container's own limit is not looked at."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path('/proc/meminfo').read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith('MemAvailable'))
    except OSError:                                         # not Linux: all there is
        return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def cache(sets, where, processes):
    """Read each Trajectories of `sets` once and whole; its windows then come from memory, the same to the bit.

    where: 'none'; 'ram': one copy for all workers and ranks of a machine, filled by its first rank; 'device': one on
    each rank's device, to be read by that process alone. Rank 0 prints a line.
    Raises InputError where it does not fit, with the sizes, and where any value is not finite.
    """
    if where == 'none':
        return
    started, size = time.perf_counter(), sum(4 * math.prod(item.shape) for item in sets)
    device = processes.device if where == 'device' else torch.device('cpu')
    local_rank, ranks = (int(os.environ.get(name, default)) for name, default in
                         (('LOCAL_RANK', 0), ('LOCAL_WORLD_SIZE', 1)))
    if where == 'ram' and not hasattr(os, 'memfd_create'):
        raise InputError('--cache ram: only on Linux; use --cache device')
    if where == 'device' or local_rank == 0:
        needed = size * (ranks if where == 'device' and device.type != 'cuda' else 1)
        free = free_memory(device)
        if needed > free:
            raise InputError(f'--cache {where}: {needed / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB are free '
                             f'{"on " + str(device) if device.type == "cuda" else "in RAM"}')
    with tqdm(total=size, desc='caching', unit='B', unit_scale=True, disable=processes.rank > 0, leave=False) as bar:
        if where == 'device':
            places = [device_tensor(item, device, bar) for item in sets]
        else:
            places = [memory_file(item, bar) for item in sets] if local_rank == 0 else None
    if where == 'ram' and processes.world_size > 1:         # this waits too, with no time-out: the disk may be slow
        gathered = [None] * processes.world_size
        dist.all_gather_object(gathered, places, dist.new_group(backend='gloo', timeout=timedelta(days=365)))
        places = gathered[processes.rank - local_rank]
    for item, place in zip(sets, places):
        item.keep(place)
    processes.print(f'--cache {where}: {size / 1e9:.3g} GB of training data read in '
                    f'{time.perf_counter() - started:.1f} s')


def device_tensor(item, device, bar):
    """All of `item`, as `read` gives it, on the device."""
    held = torch.empty(item.shape, device=device)
    for i, trajectory in enumerate(held):
        trajectory.copy_(torch.from_numpy(item.read(i, 0, item.frames)))
        bar.update(4 * trajectory.numel())
    return held


def memory_file(item, bar):
    """All of `item`, as `read` gives it, in a file in RAM without a name: its path for every process of this machine.

    It is open in this process as long as `item` lives, and gone with the last process that has it open, even a killed
    one. It needs no room in /dev/shm, of which containers have little.
    """
    memory = os.memfd_create(item.name)
    weakref.finalize(item, os.close, memory)
    with open(memory, 'wb', closefd=False) as file:
        for i in range(item.count):
            bar.update(file.write(item.read(i, 0, item.frames)))
    return f'/proc/{os.getpid()}/fd/{memory}'


# ------------------------------------------------------------------------------------------------ balanced sampling

class Windows(torch.utils.data.Dataset):
    """Training windows of T + 1 frames of a mixture, drawn with p(sample of dataset k) = w_k / (|D_k| sum w).

    (Paper, App. A.1, without its stray 1/K.) Sample number n of the whole run is a pure function of (seed, epoch,
    index), epoch, index = divmod(n, sum |D_k|): neither batch size nor workers, ranks or resumption change it.
    """

    def __init__(self, sets, frames, seed):
        self.sets, self.frames, self.seed = sets, frames, seed
        weights = np.array([item.weight for item in sets], dtype=float)
        self.share = weights / weights.sum()
        self._up_to = self.share.cumsum() / self.share.cumsum()[-1]
        self.epoch = sum(item.count for item in sets)           # draws an epoch, whatever the weights

    def draw(self, number):
        """Sample `number` of the run -> (dataset k, trajectory, first frame, seed of its noise)."""
        random = np.random.default_rng((self.seed, *divmod(number, self.epoch)))
        k = int(self._up_to.searchsorted(random.random(), side='right'))
        trajectory = int(random.integers(self.sets[k].count))
        start = int(random.integers(self.sets[k].frames - self.frames))
        return k, trajectory, start, int(random.integers(2 ** 62))

    def __getitem__(self, numbers):
        """Samples -> a list of groups of one dataset each: (k, windows (b, T+1, *space, C), noise seeds)."""
        groups = {}
        for k, trajectory, start, seed in map(self.draw, numbers):
            places, seeds = groups.setdefault(k, ([], []))
            places.append((trajectory, start))
            seeds.append(seed)
        return [(k, self.sets[k].windows(places, self.frames + 1), seeds)
                for k, (places, seeds) in sorted(groups.items())]


def batches_of_rank(first, last, batch_size, rank=0, world_size=1):
    """The sample numbers of one rank, a list a step, for the steps first..last-1.

    Step s of the run takes the samples s * batch_size ... (s + 1) * batch_size - 1; each rank has a contiguous,
    equally long part of them. Raises InputError where batch_size is not divisible by world_size.
    """
    if batch_size % world_size:
        raise InputError(f'--batch_size {batch_size} is not divisible by {world_size} processes')
    part = batch_size // world_size
    return [range(step * batch_size + rank * part, step * batch_size + (rank + 1) * part)
            for step in range(first, last)]


# ------------------------------------------------------------------------------------------------ the model grid

def resize(u, space):
    """(B, T, *space', C) -> (B, T, *space, C), bilinear (trilinear in 3-D); u itself where the grid is the same."""
    if u.shape[2:-1] == tuple(space):
        return u
    B, T, C = u.shape[0], u.shape[1], u.shape[-1]
    fields = u.flatten(0, 1).movedim(-1, 1)                                         # (B*T, C, *space')
    fields = F.interpolate(fields, size=tuple(space), mode='bilinear' if len(space) == 2 else 'trilinear')
    return fields.movedim(1, -1).unflatten(0, (B, T))                               # (B, T, *space, C)


def pad(u, channels):
    """(..., C') -> (..., C): the channels that are missing hold the constant 1."""
    return F.pad(u, (0, channels - u.shape[-1]), value=PADDING)


def to_model(u, space, channels):
    """Native (B, T, *space', C') -> model grid and channels (B, T, *space, C)."""
    return pad(resize(u, space), channels)


def to_native(u, like):
    """Model (B, T, *space, C) -> the evolving channels on the native grid of the Trajectories `like`."""
    return resize(u[..., like.evolving], like.space)


def add_noise(u, scale, seeds, evolving):
    """u (B, T, *space, C) plus scale * ||u||_2 * N(0, 1) on the evolving channels (paper, Sec. 2.2 and App. A.1).

    The norm is that of each sample and channel over all frames and grid points, not its root mean square, as in DPOT.
    Each sample's noise comes from its own seed, so that it does not depend on the batch it stands in.
    """
    if not scale:
        return u
    every = len(evolving) == u.shape[-1]
    fields = u if every else u[..., evolving]
    generator, noise = torch.Generator(u.device), torch.empty_like(fields)
    for sample, seed in zip(noise, seeds):
        sample.normal_(generator=generator.manual_seed(seed))
    norm = fields.flatten(1, -2).norm(dim=1)                                        # (B, C')
    noise = noise.mul_(scale * norm.view(len(u), *[1] * (u.ndim - 2), -1)).add_(fields)
    return noise if every else u.index_copy(-1, torch.tensor(evolving, device=u.device), noise)
