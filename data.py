"""The file layout, and how a batch is read from it.

DATA/<dataset>/train.h5, test.h5 and perhaps valid.h5 each hold one HDF5 dataset `data` of float32 numbers with the
shape (N, T, H, W, C), in 3-D (N, T, H, W, D, C): trajectories, frames, grid points, field channels. It is contiguous,
so that a window is one read; other storage and floating-point types are read too. Any folder in this layout can be used
by its name alone. best.pt is chosen on valid.h5, or without one on test.h5. The attributes of `data` are all optional:

    channels  the names, in order           static  the names of channels that do not evolve (a geometry mask)
    dt        the time between two frames   t_test  the number of frames to predict at test
    pde       the equation, in words        source  the generator and its seed, or the benchmark's file
    scale     a number for each static channel, by which it is divided when read, such as 1000 for a wave speed in m/s

Coefficients that the model does not see are further HDF5 datasets. A steady problem has two frames, input and solution.

Shapes: B batch, T input frames, H W grid points (`space` stands for all spatial axes), C field channels.
"""
import math
import os
from collections import namedtuple
from contextlib import ExitStack, contextmanager
from itertools import groupby, pairwise
from pathlib import Path

import configs
from configs import InputError

import h5py
import numpy as np
import torch
import torch.nn.functional as F

from runtime import files, hdf5

PADDING = 1.0                       # the value of channels that a dataset lacks (paper, App. B.1)
SPLITS = 'test', 'valid', 'train'   # in the order in which they are written: a folder with a train.h5 is complete


# ------------------------------------------------------------------------------------------------ writing

@contextmanager
def writer(path, shape, **attributes):
    """Yield a new h5py.File, whose `data` of `shape` (N, T, *space, C) the caller fills; it appears after the block."""
    with hdf5.replacing(path) as file:
        file.create_dataset('data', shape, dtype='float32').attrs.update(attributes)
        yield file


def write(folder, train, test, valid=None, **attributes):
    """Write arrays (N, T, *space, C) with two or three spatial axes as a dataset: folder/train.h5, test.h5, valid.h5.

    The arrays may be anything that NumPy reads as real numbers; N and T may differ between them. `attributes` are those
    of the layout above. The files appear together and replace those of an older dataset. Raises InputError for what
    `check` refuses, and for values that are not finite in float32.

        data.write('data/mine', u[:90], u[90:], channels=('u', 'v'))        # then: train.py --data data --datasets mine
    """
    splits = {split: np.asanyarray(values) for split, values in zip(SPLITS, (test, valid, train)) if values is not None}
    check(folder, {split: (values.shape, np.dtype('f4') if values.dtype.kind in 'fiub' else values.dtype, attributes)
                   for split, values in splits.items()})
    with files.lock(folder, wait='writing'), ExitStack() as stack:
        for split, values in splits.items():
            path = Path(folder) / f'{split}.h5'
            file = stack.enter_context(writer(path, values.shape, **attributes))
            for i, trajectory in enumerate(values):
                file['data'][i] = single(trajectory, f'{path}: trajectory {i}')
            file.close()                                    # after all splits only renaming is left, which cannot fail
        if valid is None:
            (Path(folder) / 'valid.h5').unlink(missing_ok=True)


def single(trajectory, name):
    """A trajectory (T, *space, C) in float32. Raises InputError, which starts with `name`, if that loses values."""
    axes = tuple(range(1, trajectory.ndim - 1))
    with np.errstate(over='ignore', under='ignore'):
        rounded = np.float32(trajectory)
    lost = trajectory.any(axes) & ~rounded.any(axes)
    if np.ma.is_masked(trajectory) or not np.isfinite(rounded).all() or lost.any():
        raise InputError(f'{name}: values that are masked, not finite in float32 or too small for it')
    return rounded


# ------------------------------------------------------------------------------------------------ reading

def find(folder, names=(), split='train', flag='--datasets'):
    """The sorted names of all datasets in `folder` that have this split, or `names`, each checked to exist.

    One of configs.MIXTURES stands for its datasets, unless the folder has one of that name. flag: what gave `names`.
    Raises InputError for a folder without datasets and for an unknown name.
    """
    folder = Path(folder)
    small = f' --preset {folder.name}' * (folder.name in configs.BUILTIN)
    if not folder.is_dir():
        how = (f'run: python -m sources.generate builtin{small} --data {folder}' if small else
               'name one with data of sources.generate or sources.prepare')
        raise InputError(f'--data {folder}: no such folder; {how}')
    present = sorted(path.parent.name for path in folder.glob(f'*/{split}.h5'))
    names = [name for word in names for name in ([word] if word in present else configs.MIXTURES.get(word, [word]))]
    for name in names:
        if name not in present:
            how = (f'; run: python -m sources.generate {name}{small} --data {folder}' if name in configs.DATASETS else
                   configs.nearest(name, dict.fromkeys([*present, *configs.DATASETS])))
            raise InputError(f'{flag} {name}: no {folder / name / split}.h5{how}')
    if not present:
        raise InputError(f'--data {folder}: the folder holds no <dataset>/{split}.h5')
    return list(dict.fromkeys(names)) or present


def validation_split(folder, name):
    """The split on which best.pt is chosen: 'valid' if the dataset has it, else 'test'."""
    return 'valid' if (Path(folder) / name / 'valid.h5').exists() else 'test'


def number(value):
    """An attribute as a float, NaN if it is not one number. Some programs store a number as an array of one element."""
    try:
        return float(np.asarray(value).reshape(()))
    except (TypeError, ValueError):
        return math.nan


def positive(value):
    """Whether an attribute is a positive number in float32."""
    return 0 < np.float32(number(value)) < math.inf


def texts(value):
    """An attribute that names things, a text or an array of texts of any kind, as a list of str."""
    return [name.decode() if isinstance(name, bytes) else str(name) for name in np.ravel(value).tolist()]


Layout = namedtuple('Layout', 'channels static scale dt t_test')        # what the attributes of `data` say, or defaults


def layout(path, shape, dtype, attributes):
    """The Layout of the `data` of one file. Raises InputError for what the layout above does not allow."""
    if len(shape or ()) not in (5, 6) or dtype.kind != 'f' or 0 in shape or shape[1] < 2:
        raise InputError(f"{path}: 'data' is {dtype} {shape}; expected floating-point numbers of shape "
                         f'(N, T, H, W, C) or (N, T, H, W, D, C), with at least two frames and no empty axis')
    C, values = shape[-1], {key: np.asarray(value).tolist() for key, value in attributes.items()}
    channels, static = texts(values.get('channels', range(C))), texts(values.get('static', []))
    dt, t_test = number(values.get('dt', 1)), number(values.get('t_test', math.inf))
    scale = values.get('scale', [1] * len(static))
    for name, value, allowed, expected in (
            ('channels', channels, len(set(channels)) == len(channels) == C, f'{C} different names'),
            ('static', static, set(static) < set(channels), f'names of the channels {channels}, but not all'),
            ('scale', scale, np.shape(scale) == (len(static),) and all(map(positive, scale)),
             f'a list with one positive number for each of the static channels {static}'),
            ('dt', values.get('dt'), positive(dt), 'a positive number'),
            ('t_test', values.get('t_test'), t_test >= 1 and not t_test % 1 > 0, 'a whole number of at least 1')):
        if not allowed:
            raise InputError(f'{path}: {name} {value}: expected {expected}')
    return Layout(channels, static, scale, dt, t_test)


def check(folder, headers):
    """{split: (shape, dtype, attributes) of `data`} -> {split: Layout}. Raises InputError if one is bad or differs."""
    layouts = {split: layout(Path(folder) / f'{split}.h5', *headers[split])
               for split in dict.fromkeys([*SPLITS, *headers]) if split in headers}
    named, forms = all('channels' in attributes for *_, attributes in headers.values()), {}
    for split, (names, static, scale, *_) in layouts.items():
        forms[split] = f'a grid of {configs.show(headers[split][0][2:-1])} and {len(names)} channels' + named * (
            f' {" ".join(names)}' + f' ({" ".join(static)} static, scale {scale})' * bool(static))
    for (one, form), (other, other_form) in pairwise(forms.items()):
        if form != other_form:
            raise InputError(f'{folder}: {one}.h5 has {form}, but {other}.h5 {other_form}; they must be equal')
    return layouts


def scale_of(file, key):
    """The divisor of the coefficient `key`, an HDF5 dataset (N, *space) or (N,) beside `data`."""
    field, shape = file.get(key), file['data'].shape
    if getattr(field, 'shape', None) not in (shape[:1], shape[:1] + shape[2:-1]) or field.dtype.kind not in 'fiu':
        raise InputError(f"{file.filename}: --coefficients {key}: no such field beside 'data'; the file has "
                         f'{sorted(set(file) - {"data"}) or "none"}')
    scale = field.attrs.get('scale', 1)
    if not positive(scale):
        raise InputError(f'{file.filename}: scale {scale} of --coefficients {key}: expected a positive number')
    return number(scale)


class Trajectories:
    """One split of one dataset, read window by window.

    folder: DATA; name: the dataset; split: one of SPLITS; frames: T; channels: C of the model, or None.
    coefficients: further HDF5 datasets of the file, (N, *space) or (N,), which are appended as static channels.
    rows: the trajectories to use, or an int n for the first n; None: all. dims: of the model's space, if any.
    Raises InputError for a file that is missing, damaged or not as `check` expects, and if it does not fit the model.
    """
    def __init__(self, folder, name, split, frames, channels, coefficients=(), rows=None, dims=None):
        self.name, self.path, self.coefficients = name, Path(folder, name, f'{split}.h5'), tuple(coefficients)
        self._process = None                                            # the one that has opened the file
        rest, headers = [part for part in SPLITS if split in SPLITS and self.path.with_name(f'{part}.h5').exists()], {}
        for part in dict.fromkeys([split, *rest]):
            with hdf5.opened(self.path.with_name(f'{part}.h5')) as (_, data):
                headers[part] = data.shape, data.dtype, dict(data.attrs)
        layout = check(self.path.parent, headers)[split]
        with hdf5.opened(self.path) as (file, data):
            hdf5.check_written(data)
            scales = [scale_of(file, key) for key in coefficients]
            plain = (data.dtype == np.dtype('<f4') and not data.external and not coefficients
                     and os.path.samefile(data.file.filename, self.path))
            self._offset = data.id.get_offset() if plain else None      # of its first byte; None: HDF5 must read it
            N, self.frames, *space, C = data.shape
        self._rows = range(N)[:rows] if rows is None or isinstance(rows, int) else rows
        self.count, self.space, self.channels = len(self._rows), tuple(space), C + len(coefficients)
        self.shape = self.count, self.frames, *self.space, self.channels
        self.steady = self.frames == 2                                  # the input and the solution
        if frames >= self.frames:
            raise InputError(f'{self.path}: {self.frames} frames are too few for a model that takes {frames}; train '
                             f'with --frames {self.frames - 1} or fewer')
        if dims not in (None, len(space)):
            raise InputError(f'{self.path}: {len(space)} dimensions of space, the model has {dims}; train with '
                             f'--dims {len(space)}, and name datasets of this kind alone')
        if channels is not None and self.channels > channels:
            raise InputError(f'{self.path}: {self.channels} channels, the model has {channels}; train with '
                             f'--channels {self.channels}')
        self.channel_names, static = layout.channels + list(coefficients), layout.static + list(coefficients)
        self._scale = np.ones(self.channels, np.float32)
        self._scale[[self.channel_names.index(channel) for channel in static]] = [*layout.scale, *scales]
        self.evolving = [i for i, channel in enumerate(self.channel_names) if channel not in static]
        # as a slice where it can be one: an index that is a list is copied to the GPU in every step, which waits for it
        self.fields = slice(len(self.evolving)) if self.evolving == [*range(len(self.evolving))] else self.evolving
        self.dt, self.t_test = layout.dt, int(min(layout.t_test, self.frames - frames))
        self.weight = configs.DATASETS[name].weight if name in configs.DATASETS else 1.0

    def read(self, trajectory, start, stop, out=None):
        """The frames start..stop-1 of one trajectory: (stop - start, *space, C). Raises InputError for inf and NaN."""
        out = np.empty((stop - start, *self.shape[2:]), np.float32) if out is None else out
        row, C = self._rows[trajectory], self.channels - len(self.coefficients)
        with files.naming(self.path, f'trajectory {row} cannot be read'):
            if self._process != os.getpid():    # an open file must not cross a fork: each worker opens its own
                self._file = h5py.File(self.path, 'r') if self._offset is None else open(self.path, 'rb')
                self._process = os.getpid()
            if self._offset is None:
                out[..., :C] = self._file['data'][row, start:stop]
                for channel, key in enumerate(self.coefficients, C):
                    out[..., channel] = self._file[key][row]
            else:                               # in a third of the time for small fields
                self._file.seek(self._offset + (row * self.frames + start) * out[0].nbytes)
                if self._file.readinto(out) < out.nbytes:
                    raise OSError('truncated')
        with np.errstate(over='ignore', invalid='ignore'):              # most often the finite sum proves it
            if not np.isfinite(out.sum()) and not np.isfinite(out).all():
                raise InputError(f'{self.path}: trajectory {row}, frames {start}..{stop - 1}: non-finite values')
        if (self._scale != 1).any():
            out /= self._scale
        return out

    def windows(self, places, frames):
        """Windows (b, frames, *space, C) from the places (trajectory, first frame)."""
        batch = np.empty((len(places), frames, *self.shape[2:]), np.float32)
        for window, (trajectory, start) in zip(batch, places):
            self.read(trajectory, start, start + frames, out=window)
        return torch.from_numpy(batch)


def read_frames(test, trajectories, start, stop, device):
    """Frames start..stop-1 of several trajectories, as they are stored: (B, stop - start, *space', C') on `device`."""
    return torch.stack([torch.from_numpy(test.read(i, start, stop)) for i in trajectories]).to(device)


# ------------------------------------------------------------------------------------------------ balanced sampling

class Windows(torch.utils.data.Dataset):
    """Training windows of T + 1 frames of a mixture, drawn with p(sample of dataset k) = w_k / (|D_k| sum w).

    This is App. B.1 of the paper without its stray factor 1/K. Sample n of the run is a pure function of (seed, epoch,
    index), epoch, index = divmod(n, sum |D_k|), whatever the batch size and the number of workers and processes.
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
        ends = self.sets[k].count, self.sets[k].frames - self.frames, 2 ** 62
        return k, *(int(random.integers(end)) for end in ends)

    def __getitem__(self, numbers):
        """Samples by dataset, with those on one grid in a row: [(k, windows (b, T+1, *space, C), noise seeds)]."""
        groups = {}
        for k, trajectory, start, seed in map(self.draw, numbers):
            places, seeds = groups.setdefault(k, ([], []))
            places.append((trajectory, start))
            seeds.append(seed)
        return [(k, self.sets[k].windows(places, self.frames + 1), seeds)
                for k, (places, seeds) in sorted(groups.items(), key=lambda group: (self.sets[group[0]].space, group))]


def batches_of_rank(first, last, batch_size, rank=0, world_size=1, parts=1):
    """The sample numbers of one rank for the steps first..last-1: a list with one range for each of a step's `parts`.

    Step s takes the samples s * batch_size .. (s + 1) * batch_size - 1, of which each rank has an equal share.
    """
    if batch_size % (world_size * parts):
        raise InputError(f'--batch_size {batch_size} is not divisible by {world_size} processes'
                         + f' times --accumulate {parts}' * (parts > 1))
    size = batch_size // (world_size * parts)
    return [range(start, start + size) for step in range(first, last) for part in range(parts)
            for start in [step * batch_size + (rank * parts + part) * size]]


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
    return resize(u[..., like.fields], like.space)


def norm(x):
    """L2 norms over everything between the first and the last axis, (B, ..., C) -> (B, C), also of 1e20 and 1e-30."""
    x = x.flatten(1, -2)
    if x.dtype == torch.float32 and x.device.type == 'cpu':
        return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).float()
    return scaled_norm(x)


def scaled_norm(x):
    """The same of x (B, N, C) without fp64, which is slow on many GPUs."""
    largest = x.detach().abs().amax(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return (x / largest).norm(dim=1) * largest[:, 0]


def relative(error, size):
    """error / size. Where the truth has the size 0, it is 0 for a prediction of 0 as well, and else 1."""
    return error / torch.where(size > 0, size, error.clamp_min(torch.finfo(error.dtype).tiny))


def add_noise(u, scale, seeds, evolving):
    """u (B, T, *space, C) plus scale * ||u||_2 * N(0, 1) on the evolving channels (paper, Sec. 2.2 and App. B.1).

    As in DPOT, the norm of a sample and channel is a sum over all frames and grid points. seeds: one a sample;
    evolving: the channels of each sample.
    """
    if not scale:
        return u
    generator, noise = torch.Generator(u.device), torch.zeros_like(u)
    for sample, seed, channels in zip(noise, seeds, evolving):
        drawn = torch.empty_like(sample[..., channels], memory_format=torch.contiguous_format)
        sample[..., channels] = drawn.normal_(generator=generator.manual_seed(seed))
    return noise.mul_(scale * norm(u).view(len(u), *[1] * (u.ndim - 2), -1)).add_(u)


def by_grid(groups, sets, channels):
    """The groups of Windows, those on one grid together: [(padded frames (b, T+1, *space, C), [(k, seeds)])]."""
    grids = []
    for _, part in groupby(groups, lambda group: sets[group[0]].space):
        ks, windows, seeds = zip(*part)
        frames = torch.cat([F.pad(window, (0, channels - window.shape[-1]), value=PADDING) for window in windows])
        grids.append((frames, list(zip(ks, seeds))))
    return grids
