"""The file layout, and how a batch is read from it.

DATA/<dataset>/train.h5 and test.h5 each hold one HDF5 dataset `data`, float32, (N, T, H, W, C), in 3-D
(N, T, H, W, D, C): trajectories, frames, grid points, field channels. It is stored contiguously in that order, so that
consecutive frames of one trajectory are one contiguous read. Its attributes, all optional:

    channels  names, in order               static  names of channels that do not evolve (a geometry mask)
    dt        time between two frames       t_test  frames to predict at test
    pde       the equation, in words        source  generator and seed, or the benchmark's file
    scale     one number a static channel, by which it is divided when read: a wave speed in m/s becomes of order 1

A coefficient that the model does not see (the wave speed) is another HDF5 dataset of the same file. A steady problem is
two frames, the input and the solution. A folder in this layout works by its name alone.

Shapes: B batch, T input frames, H W grid points (space, in comments: one or more axes), C field channels.
"""
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn.functional as F

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


def check_space(folder, size):
    """Raise InputError where the disk of `folder`, which need not exist yet, has fewer than `size` bytes left."""
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if size > free:
        raise InputError(f'--data {folder}: {size / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free on its disk')


# ------------------------------------------------------------------------------------------------ reading

def find(folder, names=(), split='train'):
    """The datasets of `folder` that have this split: all, sorted, or `names`, each checked to be there.

    Raises InputError naming the folder or the dataset, with the nearest known name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f'--data {folder}: no such folder')
    present = sorted(path.parent.name for path in folder.glob(f'*/{split}.h5'))
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
    Raises InputError where the file is missing, not HDF5 or truncated, lacks `data`, has the wrong rank or type, fewer
    than T + 1 frames or more channels than the model; and, from `read`, where a value is not finite.
    """

    def __init__(self, folder, name, split, frames, channels):
        self.name, self.path = name, Path(folder) / name / f'{split}.h5'
        self._data = self._process = None
        with self._open() as file:
            if not isinstance(file.get('data'), h5py.Dataset):
                raise InputError(f"{self.path}: no dataset 'data', found {sorted(file) or 'nothing'}")
            data = file['data']
            self.shape, attributes = data.shape, dict(data.attrs)
            if data.ndim not in (5, 6) or data.dtype.kind != 'f':
                raise InputError(f"{self.path}: 'data' is {data.dtype} {data.shape}; expected float (N, T, H, W, C)")
        self.count, self.frames, self.space, self.channels = (
            self.shape[0], self.shape[1], self.shape[2:-1], self.shape[-1])
        if self.count < 1 or self.frames < frames + 1:
            raise InputError(f'{self.path}: {self.count} trajectories of {self.frames} frames; '
                             f'at least 1 of {frames + 1} (T_in + 1) are needed')
        if self.channels > channels:
            raise InputError(f'{self.path}: {self.channels} channels, the model has {channels}; '
                             f'train with --channels {self.channels}')
        known = configs.DATASETS.get(name)
        self.channel_names = [str(channel) for channel in attributes.get('channels', range(self.channels))]
        static = [str(channel) for channel in attributes.get('static', ())]
        if set(static) - set(self.channel_names) or len(static) == self.channels:
            raise InputError(f'{self.path}: static channels {static} of {self.channel_names}: nothing would evolve '
                             f'or the name is unknown')
        self._scale = np.ones(self.channels, np.float32)
        scale = np.asarray(attributes.get('scale', [1] * len(static)), np.float32)
        if scale.shape != (len(static),) or not (scale > 0).all():
            raise InputError(f'{self.path}: scale {scale.tolist()} is not one positive number for each static channel '
                             f'{static}')
        self._scale[[self.channel_names.index(channel) for channel in static]] = scale
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

    def read(self, trajectory, start, stop):
        """Frames start..stop-1 of one trajectory: float32 (stop - start, *space, C), and nothing else is read."""
        if self._process != os.getpid():        # an HDF5 handle must not cross a fork: each worker opens its own
            self._data, self._process = self._open()['data'], os.getpid()
        try:
            window = self._data[trajectory, start:stop].astype(np.float32, copy=False)
        except OSError as error:
            raise InputError(f'{self.path}: trajectory {trajectory} cannot be read '
                             f'({str(error).splitlines()[0]})') from None
        if not np.isfinite(window).all():
            raise InputError(f'{self.path}: trajectory {trajectory}, frames {start}..{stop - 1}: non-finite values')
        return window if (self._scale == 1).all() else window / self._scale


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
        self.epoch = sum(item.count for item in sets)           # draws an epoch, whatever the weights

    def draw(self, number):
        """Sample `number` of the run -> (dataset k, trajectory, first frame, seed of its noise)."""
        random = np.random.default_rng((self.seed, *divmod(number, self.epoch)))
        k = int(random.choice(len(self.sets), p=self.share))
        trajectory = int(random.integers(self.sets[k].count))
        start = int(random.integers(self.sets[k].frames - self.frames))
        return k, trajectory, start, int(random.integers(2 ** 62))

    def __getitem__(self, number):
        k, trajectory, start, noise_seed = self.draw(number)
        window = self.sets[k].read(trajectory, start, start + self.frames + 1)
        return k, torch.from_numpy(window), noise_seed


def shares(first, last, batch_size, rank=0, world_size=1):
    """The sample numbers of one rank, a list a step, for the steps first..last-1.

    Step s of the run takes the samples s * batch_size ... (s + 1) * batch_size - 1; each rank has a contiguous,
    equally long part of them. Raises InputError where batch_size is not divisible by world_size.
    """
    if batch_size % world_size:
        raise InputError(f'--batch_size {batch_size} is not divisible by {world_size} processes')
    part = batch_size // world_size
    return [range(step * batch_size + rank * part, step * batch_size + (rank + 1) * part)
            for step in range(first, last)]


def collate(samples):
    """Samples -> a list of groups of one dataset each: (k, windows (b, T+1, *space, C), noise seeds)."""
    groups = {}
    for k, window, seed in samples:
        groups.setdefault(k, ([], []))
        groups[k][0].append(window)
        groups[k][1].append(seed)
    return [(k, torch.stack(windows), seeds) for k, (windows, seeds) in sorted(groups.items())]


# ------------------------------------------------------------------------------------------------ the model grid

def resize(u, space):
    """(B, T, *space', C) -> (B, T, *space, C), bilinear (trilinear in 3-D); u itself where the grid is the same."""
    if u.shape[2:-1] == tuple(space):
        return u
    B, T, C = u.shape[0], u.shape[1], u.shape[-1]
    fields = u.movedim(-1, 2).flatten(0, 1)                                         # (B*T, C, *space')
    fields = F.interpolate(fields, size=tuple(space), mode='bilinear' if len(space) == 2 else 'trilinear')
    return fields.unflatten(0, (B, T)).movedim(2, -1)                               # (B, T, *space, C)


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
