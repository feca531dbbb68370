"""Score a trained model: one step, rollouts over the test trajectories, and rollouts of 500 steps.

    python evaluate.py                          the newest run under out/, on the data that it was trained on
    python evaluate.py --checkpoint out/small --data data --datasets swe_pdb dr_pdb --json scores.json
    python evaluate.py --figures out/figures --channel u        with a picture of each dataset
    python evaluate.py --rollout 500 --figures out/figures      along a reference that our solver makes
    python evaluate.py --checkpoint out/mine --frames run.nc --rollout 100 --write forecast.nc
    torchrun --standalone --nproc_per_node=8 evaluate.py          the same numbers, sooner

Each dataset is scored on its native grid against its original data, on the channels that evolve; in
a rollout all others keep their values.

Shapes: B batch, T input frames, F predicted frames, N trajectories, C field channels of the model,
C' of the dataset, C'' of those that evolve; (*space) are the grid points of the model, (*space')
those of the dataset. A model that is scored or rolled out is in evaluation mode from then on.
"""
import runtime  # noqa: F401, isort: skip, before torch
import math
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import aotpot
import configs
import data
from configs import InputError
from data import fluctuation, norm, size_of
from nets import experts
from runtime import checkpoint, distributed, reports, terminal
from runtime.terminal import Progress

SCORED_WINDOWS = 64             # of a dataset in a scoring of a training, at most
LONG = 'ns2d_fno_1e-3'          # the dataset of the paper's long rollouts (Sec. 5.4)
MARKS = 20, 50, 100, 200, 500   # the steps of long rollouts in tables (Table 3)
ALL = math.inf                  # for their number: as many as the test data have

# ------------------------------------------------------------------------------------------------ a trained network

def load(path, form='fast'):
    """The network in a checkpoint, in evaluation mode. `data` says what it was trained on.

    path: a file of train.py, finetune.py, DPOT or MoE-POT, or the folder of a run.
    form: 'fast', or 'paper' for the equations as aotpot.py prints them.
    Raises InputError for any other file.
    """
    return checkpoint.load_model(checkpoint.load_file(path), form)


class Predictor:
    """A model as a time stepper of one dataset: `step` maps a state to the next.

    dataset: a data.Trajectories, or anything with its name, space, evolving and units.
    """

    def __init__(self, model, dataset, device, dtype='fp32'):
        self.model = model
        self.dataset = dataset
        self.config = model.config
        C = self.config.channels
        self.constant = torch.ones(C, dtype=torch.bool, device=device)          # (C,), padding and static channels
        self.constant[dataset.evolving] = False
        units = units_of(model, dataset)
        self.floor = data.AT_REST * units.deviation[1, dataset.evolving].to(device)      # (C''), of a channel at rest
        if not self.config.normalize:
            units = data.Units.none(C)
        self.units = data.Units(*(x.to(device) for x in units.padded(C)))
        self.own = bool(self.units.own.any())
        header = trained_on(model).get(dataset.name, {})
        coarser = tuple(map(min, self.config.resolution, dataset.space))
        self.training_grid = tuple(header['shape'][2:-1]) if 'shape' in header else coarser
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == 'bf16')

    def state(self, frames):
        """Native frames (B, T, *space', C') -> a state (B, T, *space, C), dimensionless on the model grid."""
        u = F.pad(frames, (0, self.config.channels - frames.shape[-1]), value=data.PADDING)
        u = (u - self.units.mean[0]) / self.units.deviation[0]
        return data.resize(u, self.config.resolution)

    def step(self, state):
        """A state (B, T, *space, C) -> the next state, whose last frame is the new one."""
        u, condition = data.standardize(state, self.config.frames, self.units.own, self.own)
        dtype = next(self.model.parameters(), state).dtype
        inputs = [x.to(dtype) for x in ((u, condition) if self.config.normalize else (u,))]
        with self.autocast:
            v = self.model(*inputs).to(state.dtype)
        mean, deviation = condition.view(len(u), 2, *[1] * (v.ndim - 2), -1).unbind(1)
        v = (v * deviation + mean)[:, None]
        return torch.cat([state[:, 1:], torch.where(self.constant, state[:, -1:], v)], dim=1)

    def along(self, frames, steps):
        """Native frames (B, T, *space', C') -> yields the `prediction` of each step after them."""
        state = self.state(frames)
        for _ in range(steps):
            state = self.step(state)
            yield self.prediction(state)
            state = self.fed_back(state)

    def fed_back(self, state):
        """A state with a new frame as the next step takes it: by way of the grid of the training data."""
        u = data.resize(data.resize(state[:, -1:], self.training_grid), self.config.resolution)
        return torch.cat([state[:, :-1], torch.where(self.constant, state[:, -1:], u)], dim=1)

    def prediction(self, state):
        """The newest frame of a state, native, in the channels that evolve: (B, *space', C'')."""
        u = state[:, -1:] * self.units.deviation[1] + self.units.mean[1]
        return data.resize(u[..., self.dataset.evolving], self.dataset.space)[:, 0]

    def truth(self, frames):
        """Those channels of native frames (..., *space', C'): (..., *space', C'')."""
        return frames[..., self.dataset.evolving]


def units_of(model, dataset):
    """The data.Units of a dataset in the training, or else its own.

    DPOT's --normalize 1 takes mean and deviation from each sample, and nothing from a dataset.
    """
    header = trained_on(model).get(dataset.name)
    if header and 'units' in header:
        return data.Units.read(header)
    if model.config.normalize and not trained_on(model):
        return data.Units.none(dataset.units.mean.shape[1], own=True)
    return dataset.units


def trained_on(model):
    """{dataset: header} of the files of the training; empty if the checkpoint does not say."""
    return {name: splits.get('train') or splits['test'] for name, splits in getattr(model, 'data', {}).items()}


@torch.no_grad()
def rollout(model, frames, steps, dataset='', channels=(), batch_size=16):
    """The `steps` frames after native `frames` (N, T, *space', C'): (N, steps, *space', C').

    The result is an array or a tensor, as `frames` are. Channels that do not evolve keep their last
    values.
    model: as `load` returns it, or the path of a checkpoint.
    frames: on any grid, with the channels of a dataset of the training in its order and units. The
    last T of them count; without the axis N the result has N = 1.
    dataset: its name, needed where the training read C' channels in several ways.
    channels: the names of the channels, to be compared with those of the training.
    Raises InputError for frames that do not fit or are not finite in the type of the weights.
    """
    if isinstance(model, (str, Path)):
        model = load(model)
    config = model.config
    T = config.frames
    rank = config.dims + 2
    values = real_values(frames, 'frames')
    if steps < 0 or batch_size < 1:
        raise InputError(f'steps {steps}, batch_size {batch_size}: expected at least 0 steps and a batch of 1')
    sides = {header['shape'][2] for header in trained_on(model).values() if 'shape' in header}
    one_dimensional = sides == {1} and values.ndim in (3, 4) and values.shape[-3] != 1
    if one_dimensional:                                            # (N, T, X, C) -> (N, T, 1, X, C)
        values = values.unsqueeze(-3)
    if values.ndim not in (rank, rank + 1) or 0 in values.shape or values.shape[-1] > config.channels:
        axes = ', '.join('HWD'[:config.dims])
        raise InputError(f'frames: the shape {tuple(values.shape)}; this model takes (N, {T}, {axes}, C), or the same '
                         f'without N, where C is at most {config.channels}')
    if values.shape[-rank] < T:
        raise InputError(f'frames: {values.shape[-rank]} of them; this model needs {T} to predict the next')
    values = values.reshape(-1, *values.shape[-rank:])[:, -T:]
    weights = next(model.parameters())
    values = values.to(weights.dtype)
    if not values.isfinite().all():
        raise InputError('frames: non-finite values; a prediction needs finite ones')
    evolving = evolving_channels(model, values.shape[-1], dataset, channels)
    trained = list(trained_on(model))
    if not dataset and len(trained) == 1:
        dataset = trained[0]
    header = trained_on(model).get(dataset, {})
    if header:
        note(far_from(header, values))
    units = None if 'units' in header else units_of_frames(model, values, evolving, dataset)
    layout = Namespace(name=dataset, space=values.shape[2:-1], evolving=evolving, units=units)
    predictor = Predictor(model.eval(), layout, weights.device)
    predictions = values[:, -1:].repeat(1, steps, *[1] * (values.ndim - 2))
    for part, batch in zip(predictions.split(batch_size), values.split(batch_size)):
        for step, u in enumerate(predictor.along(batch.to(weights.device), steps)):
            part[:, step, ..., evolving] = u.to(part)
    if one_dimensional:
        predictions = predictions[:, :, 0]
    if isinstance(frames, torch.Tensor):
        return predictions.to(frames.device)
    return (predictions.float() if predictions.dtype == torch.bfloat16 else predictions).numpy()    # which has no bf16


FAR = 10                        # deviations of a channel, between its mean in frames and in the training


def far_from(header, values):
    """What makes frames (N, T, *space', C') unlike those of a dataset of the training, in words, or ''."""
    space = tuple(values.shape[2:-1])
    trained = tuple(header.get('shape', [0, 0, *space, 0])[2:-1])
    if len({round(a / b, 3) for a, b in zip(space, trained)}) > 1:
        return (f'frames: the grid {configs.show(space)} has other proportions than that of the training, '
                f'{configs.show(trained)}')
    if 'units' in header:
        units = data.Units.read(header)
        means = values.flatten(0, -2).mean(0).tolist()
        for channel, mean, usual, deviation in zip(header['channels'], means, *(x[0].tolist() for x in units[:2])):
            if abs(mean - usual) > FAR * deviation and not units.own.any():
                return (f'frames: the mean of {channel} is {mean:.4g}, and in the training {usual:.4g} with a '
                        f'deviation of {deviation:.2g}')
    return ''


def units_of_frames(model, values, evolving, dataset):
    """The data.Units of frames (N, T, *space', C'), for a network that does not know the `dataset`.

    They are those of the training, if all its datasets of C' channels have the same, and else of
    the frames by themselves. A channel that never varies in these has the mean deviation of the
    training.
    """
    trained = [data.Units.read(header) for header in trained_on(model).values()
               if 'units' in header and len(header['channels']) == values.shape[-1]]
    if trained and all(units.header() == trained[0].header() for units in trained):
        return trained[0]
    variances, means = torch.var_mean(values.flatten(2, -2), 2, correction=0)                   # (N, T, C')
    units = data.Units.of(means, variances, evolving)
    if trained:
        at_rest = variances.flatten(0, 1).amax(0) == 0
        usual = torch.stack([units.deviation for units in trained]).mean(0)
        units = units._replace(deviation=torch.where(at_rest, usual, units.deviation))
    if trained_on(model) and model.config.normalize and not dataset:
        note('rollout: without dataset=, the frames get mean 0 and deviation 1 by their own numbers')
    return units


def real_values(values, name):
    """A new float64 tensor on the CPU. Raises InputError, with `name`, for what is not real numbers."""
    if isinstance(values, torch.Tensor):
        if not values.is_complex():
            return values.detach().to('cpu', torch.float64, copy=True)
    else:
        values = np.ma.asanyarray(values)                       # which knows the masks in a list
        if np.ma.is_masked(values):
            raise InputError(f'{name}: masked values; fill them, or leave these trajectories out')
        if values.dtype.kind in 'fiub':
            return torch.from_numpy(np.array(values, np.float64))
    raise InputError(f'{name}: values of the type {values.dtype}; expected real numbers')


def evolving_channels(model, C, dataset='', channels=()):
    """Which of C channels evolve in the training; all of them if the checkpoint does not say."""
    trained = trained_on(model)
    listed = '; '.join(f'{name}: {" ".join(header["channels"])}' for name, header in trained.items())
    ways = set()
    for name, header in trained.items():
        names = header['channels']
        if dataset in ('', name) and len(names) == C and list(channels) in ([], names):
            ways.add(tuple(i for i, channel in enumerate(names) if channel not in header['static']))
    if len(ways) > 1:
        raise InputError(f'frames: the training read {C} channels in several ways; name one with dataset= ({listed})')
    if ways:
        return list(ways.pop())
    if trained or dataset or channels:
        given = f'{C} channels {" ".join(channels)}'.strip() + (f' of {dataset}' if dataset else '')
        raise InputError(f'frames: {given}; expected those of a dataset of the training, in its order ({listed})')
    return list(range(C))


# ------------------------------------------------------------------------------------------------ metrics

def l2re(prediction, target):
    """The relative L2 error ||u - v|| / ||v||, arrays or tensors u, v (N, F, *space, C) -> a float.

    The norms are over all frames and grid points, one for each trajectory and channel; the result
    is the mean over both, and inf if it is not finite. Channels that do not evolve count if they
    are not left out. Raises InputError for two shapes, for masked values and for what is not real
    numbers.
    """
    u = real_values(prediction, 'the prediction')
    v = real_values(target, 'the target')
    if u.shape != v.shape:
        raise InputError(f'l2re: the prediction has the shape {tuple(u.shape)} and the target {tuple(v.shape)}')
    floor = data.AT_REST * v.flatten(0, -2).std(0, correction=0).clamp_min(torch.finfo(v.dtype).tiny)
    return mean(l2re_of_samples(u, v, floor).mean(-1))


# Metrics of predictions u for truths v, (B, F, *space, C'') -> (B, C''). floor (C''): of data.size_of.

def l2re_of_samples(u, v, floor):
    """||u - v|| / ||v|| over all but the first and the last axis."""
    return norm(u - v) / size_of(v, floor)


def vrmse_of_samples(u, v, floor):
    """The same over ||v - mean(v)||, so that a large mean flatters nobody."""
    return norm(u - v) / size_of(fluctuation(v), floor)


def l2re_of_frames(u, v, floor):
    """`l2re_of_samples` of each frame, and its mean over the frames. PDEBench's nRMSE."""
    return l2re_of_samples(u.flatten(0, 1), v.flatten(0, 1), floor).unflatten(0, u.shape[:2]).mean(1)


def vrmse_of_frames(u, v, floor):
    """`vrmse_of_samples` of each frame, and its mean over the frames: The Well's VRMSE."""
    return vrmse_of_samples(u.flatten(0, 1), v.flatten(0, 1), floor).unflatten(0, u.shape[:2]).mean(1)


def relative_l1(u, v, floor):
    """||u - v||_1 / ||v||_1 of the last frame, over all points and channels."""
    size = v[:, -1].abs().flatten(1).sum(1, keepdim=True)
    return (u - v)[:, -1].abs().flatten(1).sum(1, keepdim=True) / size.clamp_min(torch.finfo(v.dtype).tiny)


class Metric(NamedTuple):
    """A column of the table."""
    kind: str                   # what it scores, see `score`: 'rollout' or 'one step'
    caption: str                # of its column
    error: Callable             # a function of u, v and floor, as above
    steady: bool = False        # whether it is for steady problems


METRICS = {                     # by their names in JSON
    'rollout': Metric('rollout', 'L2RE', l2re_of_samples),
    'rollout_vrmse': Metric('rollout', 'VRMSE', vrmse_of_frames),
    'step': Metric('one step', 'L2RE', l2re_of_frames),
    'step_vrmse': Metric('one step', 'VRMSE', vrmse_of_frames),
    'l1': Metric('one step', 'relative L1', relative_l1, steady=True),
}
RATIOS = {'rollout': 'rollout_vrmse', 'one step': 'step_vrmse'}     # the metric of persistence over that of the model
FORECASTS = ('model', 'persistence')            # both are scored in the same way


# ------------------------------------------------------------------------------------------------ scores

def score_all(model, datasets, processes, batch_size=16, dtype='fp32'):
    """{name: `score`} of every data.Trajectories."""
    bar = Progress(datasets, desc='evaluating', disable=processes.rank > 0, leave=False)
    return {dataset.name: score(model, dataset, processes, batch_size, dtype) for dataset in bar}


@torch.no_grad()
def score(model, dataset, processes, batch_size=16, dtype='fp32'):
    """The METRICS of every trajectory, {'model' or 'persistence': {name: (N,) float64}}, equal on
    all processes.

    A 'rollout' of t_test frames starts from the first T and goes on from its own predictions; 'one
    step' predicts each frame from T true ones. Persistence is the newest true frame, repeated. The
    result also says 'frames', t_test, whether the dataset is 'steady', and of 'channels' the means
    {channel: {forecast: {name: mean}}}.
    """
    T = model.config.frames
    F = dataset.t_test
    model.eval()
    predictor = Predictor(model, dataset, processes.device, dtype)
    floor = predictor.floor
    shape = len(METRICS), dataset.count, len(dataset.evolving_names)
    scores = {forecast: torch.zeros(shape, dtype=torch.float64) for forecast in FORECASTS}
    for batch in processes.batches(dataset.count, batch_size):
        frames = dataset.windows([(i, 0) for i in batch], T + F).to(processes.device)       # (B, T+F, *space', C')
        truth = predictor.truth(frames[:, T:])
        rollout = list(predictor.along(frames[:, :T], F))
        steps = rollout[:1]                    # the first step of a rollout is one from true frames
        for t in range(1, F):
            state = predictor.state(frames[:, t:T + t])
            steps.append(predictor.prediction(predictor.step(state)))
        newest = predictor.truth(frames[:, T - 1:-1])
        predictions = {                                                       # (B, F, *space', C'')
            'model': {'rollout': torch.stack(rollout, 1), 'one step': torch.stack(steps, 1)},
            'persistence': {'rollout': newest[:, :1].expand_as(newest), 'one step': newest},
        }
        for forecast, values in scores.items():
            for row, metric in zip(values, METRICS.values()):
                error = metric.error(predictions[forecast][metric.kind], truth, floor)
                row[list(batch)] = error.reshape(len(batch), -1).cpu().double()             # (B, C'')
    scores = {forecast: dict(zip(METRICS, processes.sum(values))) for forecast, values in scores.items()}
    channels = {}
    for c, channel in enumerate(dataset.evolving_names):
        channels[channel] = {forecast: {name: mean(values[:, c]) for name, values in of_forecast.items()}
                             for forecast, of_forecast in scores.items()}
    means = {forecast: {name: values.mean(1) for name, values in of_forecast.items()}
             for forecast, of_forecast in scores.items()}
    return {**means, 'frames': F, 'steady': dataset.steady, 'channels': channels}


def mean(scores):
    """The mean over samples; a sample that diverged makes it inf and is not averaged away."""
    value = scores.mean().item()
    return value if math.isfinite(value) else math.inf


def score_table(results):
    """Lines of the table of {dataset: its `score`}: the METRICS, and the VRMSE of persistence over
    that of the model.

    A row names the channels that are behind persistence. The input of a steady dataset is another
    quantity than its solution, so that persistence means nothing there.
    """
    rows = {}
    for dataset, scores in results.items():
        row = {'tests': len(scores['model']['rollout']), 'frames': scores['frames']}
        remarks = []
        behind = []
        for kind, compared in RATIOS.items():
            for name, metric in METRICS.items():
                if metric.kind == kind and not metric.steady:
                    row[f'{kind}\n{metric.caption}'] = mean(scores['model'][name])
            ratio = mean(scores['persistence'][compared]) / max(mean(scores['model'][compared]), 1e-12)
            row[f'{kind}\nratio'] = None if scores['steady'] else f'{ratio:.1f}x'
            behind += [channel for channel, means in scores['channels'].items()
                       if means['model'][compared] > means['persistence'][compared]]
        if behind and not scores['steady']:
            remarks.append(f'{" ".join(dict.fromkeys(behind))} behind persistence')
        for name, metric in METRICS.items():
            if metric.steady and scores['steady']:
                remarks.append(f'median {metric.caption} {scores["model"][name].median().item():.4f}')
        failures = scores['model']['rollout'].isfinite().logical_not().sum().item()
        if failures:
            remarks.append(f'{failures} not finite')
        row[''] = ', '.join(remarks)
        rows[dataset] = row
    return terminal.table('dataset', rows)


def validation_windows(dataset):
    """(trajectory, first frame) of at most SCORED_WINDOWS, spread over all of them."""
    count = min(dataset.count, SCORED_WINDOWS)
    return [(i * dataset.count // count, (2 * i + 1) * dataset.t_test // (2 * count)) for i in range(count)]


@torch.no_grad()
def validation_error(model, datasets, processes, dtype='fp32', samples=16):
    """The L2RE of one step from true frames on the `validation_windows` of each dataset, a mean
    over the datasets.

    samples: the windows of a batch.
    """
    T = model.config.frames
    means = []
    model.eval()
    for dataset in datasets:
        places = validation_windows(dataset)
        predictor = Predictor(model, dataset, processes.device, dtype)
        errors = torch.zeros(len(places), dtype=torch.float64)
        for batch in processes.batches(len(places), samples):
            frames = dataset.windows([places[i] for i in batch], T + 1).to(processes.device)    # (B, T+1, *space', C')
            state = predictor.step(predictor.state(frames[:, :T]))
            truth = predictor.truth(frames[:, T])
            error = l2re_of_samples(predictor.prediction(state), truth, predictor.floor).mean(-1)               # (B,)
            errors[list(batch)] = error.cpu().double()
        means.append(mean(processes.sum(errors)))
    model.train()
    return sum(means) / len(means)


# ------------------------------------------------------------------------------------------------ long rollouts

@torch.no_grad()
def rollout_curve(model, dataset, processes, steps, batch_size=16, dtype='fp32', channel=0):
    """Rollouts along the trajectories of a dataset of T + steps frames: {'model', 'persistence',
    'pictures'}.

    'model' and 'persistence' are the L2RE of the frame of each step, (steps, N) float64. 'pictures'
    show one of the channels that evolve in the first trajectory, true and predicted,
    (steps, 2, H, W); in 3-D it is the middle slice, and on other ranks than 0 it is another
    trajectory.
    """
    T = model.config.frames
    model.eval()
    predictor = Predictor(model, dataset, processes.device, dtype)
    floor = predictor.floor
    errors = {forecast: torch.zeros(steps, dataset.count, dtype=torch.float64) for forecast in FORECASTS}
    pictures = []
    for batch in processes.batches(dataset.count, batch_size):
        first = dataset.windows([(i, 0) for i in batch], T).to(processes.device)        # (B, T, *space', C')
        last = predictor.truth(first[:, -1])                                     # (B, *space', C'')
        bar = Progress(range(steps), desc=f'rollout of {dataset.name}', disable=processes.rank > 0, leave=False)
        for t, u in zip(bar, predictor.along(first, steps)):
            frame = dataset.windows([(i, T + t) for i in batch], 1).to(processes.device)
            v = predictor.truth(frame[:, 0])
            errors['model'][t, list(batch)] = l2re_of_samples(u, v, floor).mean(-1).cpu().double()
            errors['persistence'][t, list(batch)] = l2re_of_samples(last, v, floor).mean(-1).cpu().double()
            if len(pictures) < steps:
                pair = torch.stack([v[0, ..., channel], u[0, ..., channel]]).cpu()    # (2, *space')
                pictures.append(pair if pair.ndim == 3 else pair[..., pair.shape[-1] // 2])
    curves = {forecast: processes.sum(curve) for forecast, curve in errors.items()}
    return {**curves, 'pictures': torch.stack(pictures) if pictures else None}


def reference(trained, dataset, args, processes):
    """The T + N frames along which --rollout N goes: the test set, or what our solver makes."""
    config = trained.model.config
    name = dataset.name
    if dataset.frames >= config.frames + args.rollout:
        return dataset
    from sources import generate  # the solvers, where data have to be made
    if dataset.steady or name not in generate.FAMILIES:
        raise InputError(f'--rollout {args.rollout}: the test trajectories of {name} have {dataset.frames} frames, '
                         f'and no solver of ours makes longer ones; try --rollout {dataset.frames - config.frames}')
    ours = {**dataset.header, 'source': generate.plan(name).attributes()['source']}
    what, words = data.difference(dataset.header, ours, dataset.path, 'our solver')
    if what:
        raise InputError(f'--rollout {args.rollout}: {words}, so it would make other data; try --rollout '
                         f'{dataset.frames - config.frames}')
    split = generate.long_reference(dataset, args.rollout, args.samples, config, processes)
    return open_dataset(trained, dataset.path.parent.parent, name, split)


def names_to_roll_out(names):
    """The datasets that --rollout takes: LONG, or the first with a solver, or else all."""
    from sources import generate  # the solvers, where data have to be made
    solved = [name for name in names if name in generate.FAMILIES and configs.DATASETS[name].frames > 2]
    if LONG in solved:
        return [LONG]
    return solved[:1] or names


def channel_to_draw(dataset, args):
    """The place of --channel among the channels that evolve: of its name, or 0 without one."""
    names = dataset.evolving_names
    if args.channel and args.channel not in names:
        raise InputError(f'--channel {args.channel}: the channels of {dataset.name} that evolve are {" ".join(names)}')
    return names.index(args.channel) if args.channel else 0


def draw_tests(trained, args, processes, datasets):
    """--figures without --rollout: draw --trajectory of each dataset to its last test frame."""
    from lab import figures  # only where something is drawn
    for dataset in datasets:
        if dataset.steady:
            continue
        if not 0 <= args.trajectory < dataset.count:
            raise InputError(f'--trajectory {args.trajectory}: {dataset.path} has {dataset.count} of them, from 0 on')
        one = open_dataset(trained, dataset.path.parent.parent, dataset.name, rows=[args.trajectory])
        channel = channel_to_draw(one, args)
        curves = rollout_curve(trained.model, one, processes, one.t_test, dtype=args.dtype, channel=channel)
        steps = sorted({1, (one.t_test + 1) // 2, one.t_test})
        figures.draw_rollout(one, curves['pictures'], steps, channel, args.trajectory, args.figures)


def print_rollouts(trained, args, processes, report):
    """--rollout: print the errors along a `reference` of each dataset; draw with --figures."""
    datasets = open_tests(trained, args, processes, args.samples)
    if args.rollout == ALL:
        args.rollout = min(dataset.frames for dataset in datasets) - trained.model.config.frames
    processes.print(f'{args.rollout} steps from the first true frames of at most {args.samples} trajectories')
    steps = [mark for mark in MARKS if mark < args.rollout] + [args.rollout]
    report['rollout'] = {}
    for dataset in [reference(trained, dataset, args, processes) for dataset in datasets]:
        name = dataset.name
        channel = channel_to_draw(dataset, args)
        curves = rollout_curve(trained.model, dataset, processes, args.rollout, args.batch_size, args.dtype, channel)
        rows = {}
        cells = {}
        for forecast in FORECASTS:
            errors = [mean(of_step) for of_step in curves[forecast]]
            growth = errors[-1] / max(errors[steps[0] - 1], 1e-12)
            at = {str(step): errors[step - 1] for step in steps}
            rows[forecast] = {'curve': errors, 'step': {**at, 'growth': growth}}
            cells[forecast] = {**at, 'growth': f'{growth:.1f}x'} if len(steps) > 1 else at
        report['rollout'][name] = rows
        processes.print('\n'.join(terminal.table(f'{name}: L2RE at step', cells)))
        if args.figures:
            from lab import figures  # only where something is drawn
            figures.draw_rollout(dataset, curves['pictures'], steps, channel, 0, args.figures)


# ------------------------------------------------------------------------------------------------ forecasts

def forecast_from_files(trained, args, processes):
    """--frames and --write: go on from the last frames in files as the dataset was made of, and write what follows."""
    from sources import forecast  # what reads files of one's own
    if not (args.sources and args.write and 0 < args.rollout < ALL):
        raise InputError('a forecast needs --frames FILE, --write FILE and --rollout N')
    known = trained_on(trained.model)
    names = configs.datasets_of(args.datasets) or list(known)
    if len(names) != 1 or names[0] not in known:
        raise InputError(f'--datasets {" ".join(names)}: a forecast needs one dataset of the training, of '
                         f'{" ".join(known)}')
    if processes.rank:
        return
    header = known[names[0]]
    forecast.require_new(args.write)
    u, dt = forecast.frames_of(args.sources, header, trained.model.config.frames)
    here = ' '.join(map(str, args.sources))
    what, words = data.difference({**header, 'dt': dt or 1.0}, header, here, f'the training of {trained.path}')
    if what:
        raise InputError(words)
    v = rollout(trained.model, u, args.rollout, names[0], batch_size=args.batch_size)
    forecast.write_forecast(args.write, v, header)
    print(f'{args.write}: {args.rollout} frames after the last of {here}', flush=True)
    if args.figures:
        from lab import figures  # only where something is drawn
        evolving = [channel for channel in header['channels'] if channel not in header['static']]
        channel = args.channel or evolving[0]
        if channel not in evolving:
            raise InputError(f'--channel {channel}: the channels of {names[0]} that evolve are {" ".join(evolving)}')
        figures.draw_forecast(v[0, ..., header['channels'].index(channel)], f'{names[0]}, {channel}', args.figures)


# ------------------------------------------------------------------------------------------------ the command

@dataclass
class Trained:
    """A network that a command evaluates, and what it was trained on."""
    name: str                   # stands for the checkpoint in --json and in figures
    path: Path
    model: nn.Module
    data: str                   # the folder of its training data
    datasets: tuple             # the names of these


def parser_of(description):
    """A parser with the flags of the commands on a trained model."""
    parser = terminal.Parser(description=description)
    add = parser.add_argument
    add('--checkpoint', default='', help='default: the newest run under out/')
    add('--data', default='', help='folder of the datasets; default: that of the training')
    add('--datasets', nargs='+', default=(), help='default: those of the training, or with --data all')
    add('--resolution', default='', metavar='X', help='another model grid, such as 256 or 96x192')
    add('--batch_size', type=int, default=16, metavar='N', help='trajectories at once [16]')
    add('--figures', default='', metavar='DIR', help='draw into this folder')
    add('--json', default='', metavar='FILE', help='write every number to this file')
    add('--device', default='auto', help='auto, cpu, cuda, cuda:0')
    add('--dtype', default='fp32', choices=('fp32', 'bf16'), help='bf16: autocast [fp32]')
    parser.set_defaults(rollout=0, channel='', trajectory=0)
    return parser


def open_checkpoint(args):
    """Open --checkpoint and print a line on it. Returns a Trained, the processes, and a report for
    `finish`.

    Rank 0 alone writes --json and --figures, so on all others these flags become ''.
    """
    configs.bounded('--batch_size', args.batch_size, least=1)
    reports.require_report(args.json)
    if args.figures:
        from lab import figures
        figures.pyplot()         # or one line says before any work that matplotlib is not installed
    processes = distributed.setup(args.device, settings=vars(args))
    if processes.rank > 0:
        args.figures = args.json = ''
    saved = checkpoint.load_file(args.checkpoint or checkpoint.newest())
    path = saved['path']
    model = checkpoint.load_model(saved, device=processes.device)
    if args.resolution:
        model.config = configs.override(model.config, Namespace(resolution=args.resolution))
    count = aotpot.parameters(model)
    processes.print(f'{path}: step {saved["step"]}, {model.config.title}, {count:,} parameters, '
                    f'{configs.show(model.config.resolution)} grid, on {processes.device}')
    run = saved['config'].get('run', {})
    report = {'checkpoint': str(path), 'step': saved['step'], 'parameters': count,
              'activated': experts.activated(model), 'resolution': model.config.resolution}
    trained = Trained(checkpoint.name_of(path), path, model, run.get('data', ''), run.get('datasets', ()))
    return trained, processes, report


def open_tests(trained, args, processes, rows=None):
    """The test data.Trajectories of --datasets, at most `rows` of each; absent ones of built-in
    mixtures are made.

    Without --datasets they are those of the training, or all in another folder, and of these
    `names_to_roll_out`.
    """
    folder = args.data or trained.data
    names = configs.datasets_of(args.datasets)
    if not names:
        if trained.data == folder:
            names = trained.datasets
        names = names or data.find(folder, split='test')
        if args.rollout:
            names = names_to_roll_out(names)
    absent = [name for name in names if not Path(folder, name, 'test.h5').exists()]
    if absent and not args.data and processes.rank == 0:
        from sources import generate  # the solvers, where data have to be made
        generate.builtin_tests(folder, absent, processes.device)
    distributed.barrier(processes)
    return [open_dataset(trained, folder, name, rows=rows) for name in data.find(folder, names, 'test')]


def open_dataset(trained, folder, name, split='test', rows=None):
    """The data.Trajectories of a split of a dataset, at most `rows`, as the network takes them.

    Raises InputError if channels, static ones or dt are not those of the training on a dataset of
    this name; another source, and a dataset without a training, is a line.
    """
    config = trained.model.config
    dataset = data.Trajectories(folder, name, split, config.frames, config.channels, rows, config.dims)
    headers = trained_on(trained.model)
    if name in headers:
        what, words = data.difference(dataset.header, headers[name], dataset.path, f'the training of {trained.path}')
        if what in ('channels', 'static', 'dt'):
            raise InputError(words)
        note(words)
    elif headers:
        names = dataset.channel_names
        orders = [header['channels'] for header in headers.values() if sorted(header['channels']) == sorted(names)]
        if orders and names not in orders:
            raise InputError(f'{dataset.path}: channels {" ".join(names)}; {trained.path} was trained on them in the '
                             f'order {" ".join(orders[0])}')
        steps = sorted({header.get('dt', 1.0) for header in headers.values()} - {1.0})
        if steps and dataset.dt not in (1.0, *steps):
            note(f'{dataset.path} has the dt {dataset.dt}, but the training of {trained.path} '
                 f'{" ".join(map(str, steps))}')
        source = dataset.path
        if config.normalize and source.with_name('train.h5').exists():
            training = data.Trajectories(folder, name, 'train', config.frames, config.channels, dims=config.dims)
            dataset.units = training.units
            source = training.path
        if config.normalize:
            note(f'{name} is not a dataset of the training; its fields become dimensionless by the mean and deviation '
                 f'of {source}')
    return dataset


def note(words):
    """Print a line on what a user may not expect, if there is one, on one process."""
    if words and os.environ.get('RANK', '0') == '0':
        terminal.warn(words)


def main():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add('--rollout', type=int, nargs='?', const=ALL, metavar='N',
        help='roll out N steps, along a long reference, or without N as far as the test data go')
    add('--samples', type=int, default=8, metavar='N', help='trajectories of --rollout [8]')
    add('--frames', dest='sources', nargs='+', default=(), metavar='FILE',
        help='go on from the last frames in these files of your own')
    add('--write', default='', metavar='FILE', help='of --frames: the forecast, a new .npy, .h5 or .nc')
    add('--channel', default='', metavar='NAME', help='of --figures: the channel to draw; default: the first')
    add('--trajectory', type=int, default=0, metavar='N', help='of --figures without --rollout: that to draw [0]')
    args = parser.parse_args()
    configs.bounded('--samples', args.samples, least=1)
    if args.rollout != ALL:
        configs.bounded('--rollout', args.rollout, least=0, most=10 ** 6)
    trained, processes, report = open_checkpoint(args)
    if args.sources or args.write:
        forecast_from_files(trained, args, processes)
    elif args.rollout:
        print_rollouts(trained, args, processes, report)
    else:
        datasets = open_tests(trained, args, processes)
        report['datasets'] = score_all(trained.model, datasets, processes, args.batch_size, args.dtype)
        processes.print('\n'.join(score_table(report['datasets'])))
        if args.figures:
            draw_tests(trained, args, processes, datasets)
    reports.finish(args, processes, trained.name, report)


if __name__ == '__main__':
    terminal.cli(main)
