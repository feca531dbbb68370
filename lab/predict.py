"""Frames in, predictions out: the time stepper of evaluate.py, and the same for fields from elsewhere.

`rollout` takes arrays or tensors, `predict_file` files. Neither needs a dataset in the layout of data.py.

Shapes: B batch, T input frames, N trajectories, C field channels of the model, C' of the data, C'' of those that
evolve; (*space) are the grid points of the model, (*space') those of the data.
"""
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import configs
from configs import InputError

import h5py
import numpy as np
import torch

import data
from runtime import terminal
from runtime.terminal import Progress


class Fields(NamedTuple):
    """What a Predictor asks of a data.Trajectories, for frames that come from elsewhere."""
    name: str
    space: tuple                # the native grid
    evolving: list              # the indices of the channels that evolve; the others keep their values


@contextmanager
def in_evaluation_mode(model):
    """Within the block, all modules of a network are in evaluation mode; then each is again in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Predictor:
    """A model, in evaluation mode, as a time stepper of one dataset: `step` maps a state on the model grid to the next.

    like: the data.Trajectories, or Fields, whose grid and channels are scored. dtype: 'bf16' runs the model under
    autocast.
    scoring: 'native' brings the prediction to the dataset's grid and scores it against the original data. 'paper', as
    DPOT, brings the truth to the model grid and scores every (model // native)-th point there. The two agree only if
    the grids do: the points of 'paper' lie between the native ones, where the truth is smoothed by interpolation.

    Raises InputError for another dtype, and for 'paper' if the native grid does not divide the model grid. (DPOT then
    rounds the factor down, to at least 1, and scores more points than the native grid has, or all model points if the
    native grid is finer.)
    """

    def __init__(self, model, like, device, dtype='fp32', scoring='native'):
        self.model, self.like = model, like
        self.config = model.config
        self.points = None
        if dtype not in ('fp32', 'bf16'):
            raise InputError(f"dtype {dtype!r}: expected 'fp32' or 'bf16'")
        if scoring == 'paper':
            resolution = self.config.resolution
            if len(resolution) != len(like.space) or any(N % n for N, n in zip(resolution, like.space)):
                raise InputError(f'--scoring paper: the grid of {like.name}, {configs.show(like.space)}, does not '
                                 f'divide the model grid, {configs.show(resolution)}; use --scoring native')
            self.points = slice(None), *(slice(None, None, N // n) for N, n in zip(resolution, like.space))
        known = [channel not in like.evolving for channel in range(self.config.channels)]
        self.known = torch.tensor(known, device=device)                                 # (C,) padding and static
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == 'bf16')

    def state(self, frames):
        """Native frames (B, T, *space', C') -> a state (B, T, *space, C) on the model grid."""
        return data.to_model(frames, self.config.resolution, self.config.channels)

    def step(self, state):
        """A state (B, T, *space, C) -> the next state, whose last frame is the new one."""
        with self.autocast, in_evaluation_mode(self.model):
            u = self.model(state)
        u = torch.where(self.known, state[:, -1], u.to(state.dtype))
        return torch.cat([state[:, 1:], u[:, None]], dim=1)

    def fed_back(self, state):
        """A state whose newest frame is a prediction, as the network takes it in the next step.

        Where the model grid is the finer one, the frame goes to the native grid and back, as all frames do in training.
        The loss, on the native grid, does not see what is lost there. 'paper' feeds the frame back as it is, as DPOT.
        """
        grid = self.config.resolution
        coarser = tuple(map(min, grid, self.like.space))
        if self.points is not None or coarser == grid:
            return state
        u = data.resize(data.resize(state[:, -1:], coarser), grid)
        return torch.cat([state[:, :-1], torch.where(self.known, state[:, -1:], u)], dim=1)

    def along(self, frames, steps):
        """Native frames (B, T, *space', C') -> yields the predicted ones one after the other, as of `scored`."""
        state = self.state(frames)
        for _ in range(steps):
            state = self.step(state)
            yield self.scored(state)
            state = self.fed_back(state)

    def scored(self, state):
        """The newest frame of a state at the points that are scored: (B, *points, C''); by default the native grid."""
        if self.points is None:
            return data.to_native(state[:, -1:], self.like)[:, 0]
        return state[:, -1, ..., self.like.evolving][self.points]

    def truth(self, frame):
        """A native frame (B, *space', C') at the points that are scored: (B, *points, C'')."""
        frame = frame[..., self.like.evolving]
        return frame if self.points is None else data.resize(frame[:, None], self.config.resolution)[:, 0][self.points]


def native_frames(model, frames, static, name):
    """The last T of the native frames that `rollout` takes, (N, T, *space', C') in the type of the model's weights.

    A tensor stays on its device, an array becomes one on the CPU. Raises as `rollout`.
    """
    T, C, dims = model.config.frames, model.config.channels, model.config.dims
    values = frames if isinstance(frames, torch.Tensor) else np.asarray(frames)
    shape = tuple(values.shape)
    if len(shape) not in (dims + 2, dims + 3):
        raise InputError(f'{name}: the shape {shape}; this model takes (N, {T}, {", ".join("HWD"[:dims])}, C), or the '
                         f'same without N, where C is at most {C}')
    values, shape = (values, shape) if len(shape) == dims + 3 else (values[None], (1, *shape))
    real = values.dtype.kind in 'fiub' if isinstance(values, np.ndarray) else not values.is_complex()
    wrong = [channel for channel in static if channel not in range(shape[-1])]
    for refused, message in (
            (0 in shape, f'the shape {shape} has an empty axis'),
            (shape[1] < T, f'{shape[1]} frames; this model needs {T} to predict the next, so give at least {T}'),
            (shape[-1] > C, f'{shape[-1]} channels on the last axis; this model has {C}'),
            (not real, f'{values.dtype}; expected real numbers'),
            (wrong, f'static channels {wrong}; its channels are 0 to {shape[-1] - 1}'),
            (len({*static}) == shape[-1], 'all channels are static, so none is left to predict')):
        if refused:
            raise InputError(f'{name}: {message}')
    values = values[:, -T:]
    values = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values, np.float64))
    values = values.to(next(model.parameters()).dtype)      # a number that float32 cannot hold becomes infinite
    if not values.isfinite().all():
        raise InputError(f'{name}: non-finite values in the last {T} frames; a prediction needs finite ones')
    return values


@torch.no_grad()
def rollout(model, frames, steps, static=(), batch_size=16, dtype='fp32', name='frames'):
    """The `steps` frames after the last of the native `frames` (N, T, *space', C'): (N, steps, *space', C').

    model: as `aotpot.load` returns it. frames: a NumPy array or a tensor, in the channel order of the training, at
    least T of them, of which the last T count; without the axis N they are one trajectory, and the result has N = 1.
    The result is on the same grid, which may be any: the model works on its own, model.config.resolution. It is a
    tensor on the device of `frames`, or an array, in the type of the model's weights, float32 by default.

    static: the indices of channels that keep the values of the last frame, such as a geometry mask. Channels that the
    frames lack are filled as in training. dtype: 'bf16' runs the model under autocast.
    Raises InputError, which starts with `name`, for another number of axes, too few frames, too many channels, numbers
    that are not real or not finite, and a static channel that does not exist; and if `steps` is below 1.
    """
    configs.at_least(1, steps=steps, batch_size=batch_size)
    static = [*static]
    given, device = native_frames(model, frames, static, name), next(model.parameters()).device
    evolving = [channel for channel in range(given.shape[-1]) if channel not in static]
    predictor = Predictor(model, Fields(name, tuple(given.shape[2:-1]), evolving), device, dtype)
    found = given[:, -1:].repeat(1, steps, *[1] * (given.ndim - 2))
    for part, known in zip(found.split(batch_size), given.split(batch_size)):
        part[..., evolving] = torch.stack([*predictor.along(known.to(device), steps)], 1).to(found.device)
    return found if isinstance(frames, torch.Tensor) else found.numpy()


# ------------------------------------------------------------------------------------------------ files

FORMATS = '.npy', '.h5', '.hdf5'
KEPT = 'channels', 'static', 'scale', 'dt', 'pde', 'source'         # attributes that predictions take over, see data.py


def open_frames(path):
    """The frames in a file of one of FORMATS, an array, and the attributes of data.py that it has, a dict.

    In an HDF5 file they are the dataset `data`, or the only one. Raises InputError for what cannot be read.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise InputError(f'{path}: the name of a file of frames ends in {", ".join(FORMATS)}')
    with terminal.naming(path, f'not readable as {path.suffix}', 'numpy'):
        if path.suffix == '.npy':
            return np.lib.format.open_memmap(path, mode='r'), {}        # unlike np.load, it takes nothing but .npy
        with h5py.File(path, 'r') as file:
            found = [key for key in file if isinstance(file.get(key), h5py.Dataset)]
            if 'data' not in found and len(found) != 1:
                raise InputError(f"{path}: no dataset 'data', found {found or 'nothing'}; name the frames 'data'")
            stored = file['data' if 'data' in found else found[0]]
            return np.asarray(stored[()]), {key: stored.attrs[key] for key in KEPT if key in stored.attrs}


def static_channels(path, channels, attributes):
    """The indices of the channels that the attributes of `path` call static, and the divisor of each channel (C',).

    Raises InputError as data.check.
    """
    scale = np.ones(channels, np.float32)
    if 'static' not in attributes:
        return [], scale
    layout = data.check(path.parent, {path.stem: ((1, 2, 1, 1, channels), scale.dtype, attributes)})[path.stem]
    static = [layout.channels.index(channel) for channel in layout.static]
    scale[static] = layout.scale
    return static, scale


def warn_of_infinities(path, diverged):
    """A line on how many trajectories of predictions in `path` have values that are not finite, if any; (N,) bool."""
    if any(diverged):
        terminal.warn(f'{path}: {sum(diverged)} of {len(diverged)} predictions have values that are not finite')


def predict_file(model, path, target, steps, static=(), batch_size=16, dtype='fp32'):
    """`rollout` of the frames in the file `path`, as `open_frames` reads it, into the file `target`: its shape.

    Channels that the attributes of an HDF5 file call static are so, beside those of `static`, and are divided by their
    `scale` for the model alone. An HDF5 target has the dataset `data` with these attributes. It appears when it is
    complete. Raises InputError as open_frames and rollout.
    """
    path, target = Path(path), Path(target)
    frames, attributes = open_frames(path)
    named, scale = static_channels(path, frames.shape[-1] if frames.ndim else 0, attributes)
    static = sorted({*named, *static})
    found = rollout(model, frames / scale if named else frames, steps, static, batch_size, dtype, str(path)) * scale
    if target.suffix == '.npy':
        with terminal.replacing(target) as part, open(part, 'wb') as file:
            np.save(file, found)
    else:
        with data.writer(target, found.shape, **attributes) as file:
            file['data'][:] = found
    warn_of_infinities(target, ~np.isfinite(found.reshape(len(found), -1)).all(1))
    return found.shape


def save_rollouts(model, test, target, by, batch_size=16, dtype='fp32'):
    """Write the rollouts over a test set, those of `evaluate.score`, in the layout of data.py: the shape of its `data`.

    A trajectory of the file has the T true frames that go in and then the t_test predicted ones, on the native grid.
    Static channels keep the values of the last true frame. Everything is in the units of the test set, whose attributes
    and coefficients the file has too; its attribute `predictions` says `by` which checkpoint they are.
    test: a data.Trajectories. Raises InputError as its `read`.
    """
    T, diverged = model.config.frames, []
    static = [channel for channel in range(test.channels) if channel not in test.evolving]
    with h5py.File(test.path, 'r') as source:
        truth, C = source['data'], source['data'].shape[-1]
        kept = [channel for channel in static if channel < C]                   # the others are coefficients
        attributes = {key: truth.attrs[key] for key in KEPT if key in truth.attrs}
        attributes.update(t_test=test.t_test, predictions=f'frames {T} to {T + test.t_test - 1}, by {by}')
        shape = test.count, T + test.t_test, *test.space, C
        with data.writer(target, shape, **attributes) as file:
            for first in Progress(range(0, test.count, batch_size), desc=test.name, leave=False):
                rows = range(first, min(first + batch_size, test.count))
                frames = np.stack([test.read(i, 0, T) for i in rows])
                found = rollout(model, frames, test.t_test, static, batch_size, dtype, str(test.path))[..., :C]
                before = np.float32(truth[first:rows.stop, :T])
                found[..., kept] = before[:, -1:][..., kept]
                file['data'][first:rows.stop] = np.concatenate([before, found], 1)
                diverged += [*~np.isfinite(found.reshape(len(found), -1)).all(1)]
            for key in set(source) - {'data'}:
                if source.get(key) is not None:                                 # or else it is a link to nothing
                    source.copy(key, file)
    warn_of_infinities(target, diverged)
    return shape
