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
import hashlib
import os
from contextlib import ExitStack, contextmanager
from itertools import groupby, pairwise
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn.functional as F

import configs
from configs import InputError
from runtime import files, hdf5
from runtime.layouts import float_of, layout_of_channels, positive, require, with_coefficients

PADDING = 1.0                       # the value of channels that a dataset lacks (paper, App. B.1)
SPLITS = 'test', 'valid', 'train'   # in the order in which they are written: a folder with a train.h5 is complete
ATTRIBUTES = 'channels', 'static', 'scale', 'dt', 't_test', 'pde', 'source'     # of `data`, see above


# ------------------------------------------------------------------------------------------------ writing

@contextmanager
def writer(path, shape, **attributes):
    """Yield a new h5py.File, whose `data` of `shape` (N, T, *space, C) the caller fills; it appears after the block.

    attributes: those of the layout above. Raises InputError for others, and if a part of a dataset was not written.
    """
    for name in attributes:
        require(name in ATTRIBUTES, f'{path}: there is no attribute {name!r}{configs.nearest(name, ATTRIBUTES)}')
    with hdf5.replacing(path) as file:
        file.create_dataset('data', shape, dtype='float32').attrs.update(attributes)
        yield file


def write(folder, train, test, valid=None, **attributes):
    """Write arrays (N, T, *space, C) with two or three spatial axes as a dataset: folder/train.h5, test.h5, valid.h5.

    The arrays may be anything that NumPy reads as real numbers; N and T may differ between them. `attributes` are those
    of the layout above. The files appear together and replace those of an older dataset. Raises InputError for what
    `check` refuses, for other attributes, and for values that are not finite in float32.

        data.write('data/mine', u[:90], u[90:], channels=('u', 'v'))        # then: train.py --data data --datasets mine
    """
    folder = Path(folder)
    splits = {'train': np.asanyarray(train), 'test': np.asanyarray(test)}
    if valid is not None:
        splits['valid'] = np.asanyarray(valid)
    headers = {}
    for split, values in splits.items():
        dtype = np.dtype('f4') if values.dtype.kind in 'fiub' else values.dtype
        headers[split] = values.shape, dtype, attributes
    check(folder, headers)
    with files.lock(folder, wait='writing'), ExitStack() as stack:
        paths = {split: folder / f'{split}.h5' for split in SPLITS if split in splits}
        opened = {}
        for split in reversed(paths):               # a stack is left from its end, so test.h5 appears first
            opened[split] = stack.enter_context(writer(paths[split], splits[split].shape, **attributes))
        for split, path in paths.items():
            for i, trajectory in enumerate(splits[split]):
                opened[split]['data'][i] = in_float32(trajectory, f'{path}: trajectory {i}')
            opened[split].close()
        # Only renaming is left, which cannot fail. Wherever a kill falls, files beside a train.h5 belong to it.
        (folder / 'train.h5').unlink(missing_ok=True)
        if valid is None:
            (folder / 'valid.h5').unlink(missing_ok=True)


def in_float32(trajectory, name):
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
    preset = f' --preset {folder.name}' if folder.name in configs.BUILTIN else ''
    present = sorted(path.parent.name for path in folder.glob(f'*/{split}.h5'))
    wanted = []
    for name in names:
        wanted += [name] if name in present else configs.MIXTURES.get(name, [name])
    absent = [name for name in wanted if name not in present]
    if not folder.is_dir():
        known = [name for name in absent if name in configs.DATASETS] or (['builtin'] if preset else [])
        how = 'name another, with data of sources.generate or sources.prepare'
        if known:
            how = f'name another, or run: python -m sources.generate {" ".join(known)}{preset} --data {folder}'
        raise InputError(f'--data {folder}: no such folder; {how}')
    for name in absent:
        how = configs.nearest(name, dict.fromkeys([*present, *configs.DATASETS]))
        if name in configs.DATASETS:
            how = f'; run: python -m sources.generate {name}{preset} --data {folder}'
        raise InputError(f'{flag} {name}: no {folder / name / split}.h5{how}')
    require(present, f'--data {folder}: the folder holds no <dataset>/{split}.h5')
    return list(dict.fromkeys(wanted)) or present


def validation_split(folder, name):
    """The split on which best.pt is chosen: 'valid' if the dataset has it, else 'test'."""
    return 'valid' if (Path(folder) / name / 'valid.h5').exists() else 'test'


def layout(path, shape, dtype, attributes):
    """The Layout of the `data` of one file. Raises InputError for what the layout above does not allow."""
    fields = len(shape or ()) in (5, 6) and dtype.kind == 'f' and 0 not in shape and shape[1] > 1
    require(fields, f"{path}: 'data' is {dtype} {shape}; expected floating-point numbers of shape (N, T, H, W, C) or "
                    f'(N, T, H, W, D, C), with at least two frames and no empty axis')
    return layout_of_channels(path, shape[-1], attributes)


def check(folder, headers):
    """{split: (shape, dtype, attributes) of `data`} -> {split: Layout}. Raises InputError if one is bad or differs."""
    order = [split for split in SPLITS if split in headers]
    order += [split for split in headers if split not in SPLITS]
    layouts = {split: layout(Path(folder) / f'{split}.h5', *headers[split]) for split in order}
    named = all('channels' in attributes for *_, attributes in headers.values())
    forms = {}
    for split, form in layouts.items():
        names = f' {form.words}' if named else ''
        forms[split] = f'a grid of {configs.show(headers[split][0][2:-1])} and {len(form.channels)} channels{names}'
    for (one, form), (other, other_form) in pairwise(forms.items()):
        require(form == other_form,
                f'{folder}: {one}.h5 has {form}, but {other}.h5 {other_form}; they must be equal')
    return layouts


def header(path):
    """(shape, dtype, attributes) of the `data` of a file."""
    with files.naming(path), h5py.File(path, 'r') as file:
        data = file['data']
        return getattr(data, 'shape', None), getattr(data, 'dtype', 'a group'), dict(data.attrs)


def scale_of(file, key):
    """The divisor of the coefficient `key`, an HDF5 dataset (N, *space) or (N,) beside `data`."""
    N, _, *space, _ = file['data'].shape
    field = file[key] if key in file else None
    fits = getattr(field, 'shape', None) in ((N,), (N, *space)) and field.dtype.kind in 'fiu'
    require(fits, f"{file.filename}: --coefficients {key}: no such field beside 'data'; the file has "
                  f'{sorted(set(file) - {"data"}) or "none"}')
    scale = field.attrs.get('scale', 1)
    require(positive(scale),
            f'{file.filename}: scale {scale} of --coefficients {key}: expected a positive number')
    return float_of(scale)


class Trajectories:
    """One split of one dataset, read window by window.

    folder: DATA; name: the dataset; split: one of SPLITS; frames: T; channels: C of the model, or None.
    coefficients: further HDF5 datasets of the file, (N, *space) or (N,), which are appended as static channels.
    rows: the trajectories to use, or an int n for the first n; None: all. dims: of the model's space, if any.
    Raises InputError for a file that is missing, damaged or not as `check` expects, and if it does not fit the model.
    """
    def __init__(self, folder, name, split, frames, channels, coefficients=(), rows=None, dims=None):
        self.name = name
        self.path = Path(folder, name, f'{split}.h5')
        self.coefficients = tuple(coefficients)

        parts = [split]
        if split in SPLITS:                                             # those of a dataset have to agree
            parts += [part for part in SPLITS if part != split and self.path.with_name(f'{part}.h5').exists()]
        headers = {part: header(self.path.with_name(f'{part}.h5')) for part in parts}
        layout = check(self.path.parent, headers)[split]
        shape, _, attributes = headers[split]
        N, self.frames, *space, C = shape
        self.source = str(attributes.get('source', ''))
        self._rows = range(N)[:rows] if rows is None or isinstance(rows, int) else rows
        self.count = len(self._rows)
        self.space = tuple(space)
        self.channels = C + len(coefficients)
        self.shape = self.count, self.frames, *self.space, self.channels
        self.steady = self.frames == 2                                  # the input and the solution

        require(frames < self.frames, f'{self.path}: {self.frames} frames are too few for a model that takes {frames}; '
                                      f'train with --frames {self.frames - 1} or fewer')
        require(dims in (None, len(space)),
                f'{self.path}: {len(space)} dimensions of space, the model has {dims}; train with --dims {len(space)}, '
                f'and name datasets of this kind alone')
        require(channels is None or self.channels <= channels,
                f'{self.path}: {self.channels} channels, the model has {channels}; train with '
                f'--channels {self.channels}')
        for key in coefficients:
            require(key not in layout.channels, f'{self.path}: --coefficients {key}: a channel has this name already')

        with hdf5.opened(self.path) as file:
            scales = [scale_of(file, key) for key in coefficients]
            stored = file['data']
            plain = stored.id.get_type().equal(h5py.h5t.IEEE_F32LE) and not coefficients
            self._offset = stored.id.get_offset() if plain else None    # of its first byte; None: HDF5 must read it
            stored_in = stored.file.filename                            # `data` may be a link to another file
        with files.naming(self.path):
            self._file = h5py.File(self.path, 'r') if self._offset is None else open(stored_in, 'rb')
        self.layout = with_coefficients(layout, coefficients, scales)
        self.channel_names = self.layout.channels
        self.evolving = self.layout.evolving
        self._scale = self.layout.divisors
        # as a slice where it can be one: an index that is a list is copied to the GPU in every step, which waits for it
        leading = self.evolving == list(range(len(self.evolving)))
        self.fields = slice(len(self.evolving)) if leading else self.evolving
        self.dt = layout.dt
        self.t_test = int(min(layout.t_test, self.frames - frames))
        self.weight = configs.DATASETS[name].weight if name in configs.DATASETS else 1.0

    def read(self, trajectory, start, stop, out=None):
        """The frames start..stop-1 of one trajectory: (stop - start, *space, C). Raises InputError for inf and NaN."""
        if out is None:
            out = np.empty((stop - start, *self.shape[2:]), np.float32)
        row = self._rows[trajectory]
        with files.naming(self.path, f'trajectory {row} cannot be read'):
            if self._offset is None:
                C = self.channels - len(self.coefficients)
                out[..., :C] = self._file['data'][row, start:stop]
                for channel, key in enumerate(self.coefficients, C):
                    out[..., channel] = self._file[key][row]
            else:                               # in a third of the time for small fields
                place = self._offset + (row * self.frames + start) * out[0].nbytes
                read_bytes(self._file, place, memoryview(out).cast('B'))
        with np.errstate(over='ignore', invalid='ignore'):              # most often the finite sum proves it
            if not np.isfinite(out.sum()) and not np.isfinite(out).all():
                raise InputError(f'{self.path}: trajectory {row}, frames {start}..{stop - 1}: non-finite values')
        if (self._scale != 1).any():
            out /= self._scale
        return out

    def windows(self, places, frames, pinned=False):
        """Windows (b, frames, *space, C) from the places (trajectory, first frame). pinned: where a GPU copies from."""
        batch = torch.empty(len(places), frames, *self.shape[2:], pin_memory=pinned)
        for window, (trajectory, start) in zip(batch.numpy(), places):
            self.read(trajectory, start, start + frames, out=window)
        return batch


def read_bytes(file, place, out):
    """Fill the memoryview `out` from a place in a file, whose position does not change: threads may share the file."""
    while out:
        count = os.preadv(file.fileno(), [out], place)
        if count == 0:
            raise OSError('truncated')
        out = out[count:]
        place += count


def fingerprints(folder, names, coefficients=(), splits=SPLITS):
    """What tells the data of these names from others, as JSON holds it: {'<name>/<split>.h5': {what: value}}.

    Of each file, its header and four frames are read, which takes milliseconds; splits that are absent are left out.
    """
    prints = {}
    for name in names:
        for split in (split for split in splits if Path(folder, name, f'{split}.h5').exists()):
            item = Trajectories(folder, name, split, 1, None, coefficients)
            checksum = hashlib.blake2b(digest_size=8)
            for trajectory, frame in np.linspace((0, 0), (item.count - 1, item.frames - 1), 4, dtype=int).tolist():
                checksum.update(item.read(trajectory, frame, frame + 1))
            prints[f'{name}/{split}.h5'] = {
                'source': item.source, 'shape': list(item.shape), 'channels': item.channel_names,
                'static': item.layout.static, 'checksum': checksum.hexdigest()}
    return prints


def headers(folder, names, splits=SPLITS):
    """What the headers of the data of these names say, as JSON holds it: {name: {split: {what: value}}}.

    Splits that are absent are left out. Raises InputError for files that `Trajectories` refuses.
    """
    found = {name: {} for name in names}
    for name in names:
        for split in (split for split in splits if Path(folder, name, f'{split}.h5').exists()):
            item = Trajectories(folder, name, split, 1, None)
            found[name][split] = {'source': item.source, 'shape': list(item.shape), 'channels': item.channel_names,
                                  'static': item.layout.static, 'dt': item.dt, 't_test': item.layout.t_test}
    return found


def difference(before, now):
    """The first difference between `headers` of the files that are in both, in words; '' if there is none."""
    files_of_both = [(name, split) for name in before for split in before[name] if split in now.get(name, {})]
    for name, split in files_of_both:
        for what, value in before[name][split].items():
            if value != now[name][split].get(what):
                return f'the {what} of {name}/{split}.h5 was {value!r}, is {now[name][split].get(what)!r}'
    return ''


def solution_units(sets, channels):
    """The mean and deviation of each channel of the solutions of steady datasets: (2, channels), a mean over the sets.

    sets: their Trajectories, of which at most 256 each are read. Channels that a dataset lacks have mean 0 and
    deviation 1, and so has the deviation of a constant.
    """
    units = torch.tensor([0., 1.]).repeat(len(sets), channels, 1)                       # (sets, C, 2)
    for item, rows in zip(sets, units):
        solutions = item.windows([(i, 1) for i in range(min(item.count, 256))], 1).double().flatten(0, -2)
        deviation, mean = torch.std_mean(solutions, 0)                                  # (C')
        rows[:item.channels] = torch.stack([mean, torch.where(deviation > 0, deviation, 1)], 1)
    return units.mean(0).T.contiguous()


def read_frames(test, trajectories, start, stop, device):
    """Frames start..stop-1 of several trajectories, as they are stored: (B, stop - start, *space', C') on `device`."""
    return torch.stack([torch.from_numpy(test.read(i, start, stop)) for i in trajectories]).to(device)


# ------------------------------------------------------------------------------------------------ balanced sampling

class Windows:
    """Training windows of T + 1 frames of a mixture, drawn with p(sample of dataset k) = w_k / (|D_k| sum w).

    This is App. B.1 of the paper without its stray factor 1/K. Sample n of the run is a pure function of (seed, epoch,
    index), epoch, index = divmod(n, sum |D_k|), whatever the batch size and the number of threads and processes.
    """
    def __init__(self, sets, frames, seed, pinned=False):
        self.sets = sets
        self.frames = frames
        self.seed = seed
        self.pinned = pinned                                    # the windows lie where a GPU copies from
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
        return [(k, self.sets[k].windows(places, self.frames + 1, self.pinned), seeds)
                for k, (places, seeds) in sorted(groups.items(), key=lambda group: (self.sets[group[0]].space, group))]


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
    generator = torch.Generator(u.device)
    noise = torch.zeros_like(u)
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
