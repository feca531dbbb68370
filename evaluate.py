"""Score a trained model: one step, rollouts over the test trajectories, and rollouts of 500 steps.

    python evaluate.py                  the newest run under out/, on the data of its training
    python evaluate.py --checkpoint out/small --data data --datasets swe_pdb --json scores.json
    python evaluate.py --figures out/figures --channel u            with a picture of each dataset
    python evaluate.py --rollout 500 --figures out/figures          along what our solver makes
    python evaluate.py --checkpoint out/mine --frames run.nc --rollout 100 --write forecast.nc
    torchrun --standalone --nproc_per_node=8 evaluate.py            the same numbers, sooner

Each dataset is scored on its native grid against its original data, on the channels that evolve; in
a rollout all others keep their values.

Shapes: B batch, T input frames, F predicted frames, N trajectories, C field channels of the model,
C' of the dataset, C'' of those that evolve; (*space) are the grid points of the model, (*space')
those of the dataset. A model that is scored or rolled out is in evaluation mode from then on.
"""
import runtime  # noqa: F401, isort: skip, before torch
import json
import math
import operator
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import aotpot
import configs
import data
from configs import InputError
from data import fluctuation, norm, size_of
from nets import experts
from nets.build import autocast
from runtime import checkpoint, distributed, files, terminal
from runtime.stored import require
from runtime.terminal import Progress, warn

SCORED_WINDOWS = 64             # of a dataset in a scoring of a training, at most
FAR = 10                        # times the deviation of the training: a difference worth a line
LONG = 'ns2d_fno_1e-3'          # the dataset of the paper's long rollouts (Sec. 5.4)
MARKS = 20, 50, 100, 200, 500   # the steps of long rollouts in tables (Table 3)

# ------------------------------------------------------------------------------ a trained network

def load(path, form='fast'):
    """The network in a checkpoint, in evaluation mode. `data` says what it was trained on.

    path: a file of train.py, finetune.py, DPOT or MoE-POT, or the folder of a run.
    form: 'fast', or 'paper' for the equations as aotpot.py prints them.
    Raises InputError for any other file.
    """
    return checkpoint.load_model(checkpoint.load_file(path), form)


def trained_on(model):
    """{dataset: header} of the files of the training; empty if the checkpoint does not say."""
    return {name: splits['train'] for name, splits in getattr(model, 'data', {}).items()}


class Predictor:
    """A model as a time stepper of one dataset: `step` maps a state to the next.

    dataset: anything with the name, space, evolving and units of a data.Trajectories. If the
        training knew it, the units are those of the training.
    """

    def __init__(self, model, dataset, device, dtype='fp32'):
        self.model = model
        self.dataset = dataset
        self.config = model.config
        C = self.config.channels
        self.constant = torch.ones(C, dtype=torch.bool, device=device)    # (C,), padding and static
        self.constant[dataset.evolving] = False
        header = trained_on(model).get(dataset.name, {})
        units = data.Units.read(header) if 'units' in header else dataset.units
        self.steady = not units.mean[0].equal(units.mean[1])
        usual = units.deviation[1, dataset.evolving]
        self.floor = data.AT_REST * usual.to(device)                # (C''), of a channel at rest
        known = trained_on(model)
        # DPOT's networks take the numbers of each sample, in the units of the data
        self.least = data.AT_REST if known else 1e-6
        units = (units.padded(C) if self.config.normalize and known else
                 data.Units.none(C, own=self.config.normalize))
        self.units = data.Units(*(x.to(device) for x in units))
        self.own = bool(units.own.any())
        coarser = tuple(map(min, self.config.resolution, dataset.space))
        self.training_grid = tuple(header['shape'][2:-1]) if 'shape' in header else coarser
        self.autocast = autocast(dtype, device)

    def state(self, frames):
        """Native frames (B, T, *space', C') -> a state (B, T, *space, C), dimensionless."""
        u = F.pad(frames, (0, self.config.channels - frames.shape[-1]), value=data.PADDING)
        u = (u - self.units.mean[0]) / self.units.deviation[0]
        return data.resize(u, self.config.resolution)

    def step(self, state):
        """A state (B, T, *space, C) -> the next state, whose last frame is the new one."""
        u, condition = data.standardize(state, self.config.frames, self.units.own, self.own,
                                        self.least)
        dtype = next(self.model.parameters(), state).dtype
        with self.autocast:
            v = self.model(u.to(dtype), condition.to(dtype)).to(state.dtype)
        mean, deviation = condition.view(len(u), 2, *[1] * (v.ndim - 2), -1).unbind(1)
        v = (v * deviation + mean)[:, None]
        return torch.cat([state[:, 1:], torch.where(self.constant, state[:, -1:], v)], dim=1)

    def along(self, frames, steps):
        """Native frames (B, T, *space', C') -> yields the `prediction` of each step after them."""
        if steps > 1 and self.steady:
            raise InputError(f'{steps} steps: the input of a steady problem is another field than '
                             f'its solution, after which there is no step')
        state = self.state(frames)
        for _ in range(steps):
            state = self.step(state)
            yield self.prediction(state)
            state = self.fed_back(state)

    def fed_back(self, state):
        """A state whose new frame went to the grid of the training data, that of the loss, and back."""
        u = data.resize(data.resize(state[:, -1:], self.training_grid), self.config.resolution)
        return torch.cat([state[:, :-1], torch.where(self.constant, state[:, -1:], u)], dim=1)

    def prediction(self, state):
        """The newest frame of a state, native, in the channels that evolve: (B, *space', C'')."""
        u = state[:, -1:] * self.units.deviation[1] + self.units.mean[1]
        return data.resize(u[..., self.dataset.evolving], self.dataset.space)[:, 0]


# -------------------------------------------------------------------------- frames of one's own

@torch.no_grad()
def rollout(model, frames, steps, dataset='', batch_size=16, dtype='fp32'):
    """The `steps` frames after native `frames` (N, T, *space', C'): (N, steps, *space', C').

    They are an array or a tensor, as `frames` are. Static channels keep their last values.
    model: as `load` returns it, or the path of a checkpoint.
    frames: on any grid, with the channels of a dataset of the training in its order and units. The
        last T of them count; without the axis N the result has N = 1.
    dataset: its name, needed where the training read C' channels in several ways.
    batch_size: trajectories at once. dtype: fp32, or bf16 by autocast.
    Raises InputError for frames that do not fit or are not finite in the type of the weights, and
    for numbers out of bounds.
    """
    if isinstance(model, (str, Path)):
        model = load(model)
    with files.naming('rollout: steps, batch_size', 'expected whole numbers', TypeError):
        steps, batch_size = operator.index(steps), operator.index(batch_size)
    configs.bounded('steps', steps)
    configs.bounded('batch_size', batch_size, least=1)
    dataset = dataset or ''
    config = model.config
    weights = next(model.parameters())
    values = real_values(frames, 'frames').to(weights.dtype)
    given = tuple(values.shape)
    shapes = [header['shape'] for name, header in trained_on(model).items()
              if dataset in ('', name) and 'shape' in header]
    flat = {shape[2] for shape in shapes} == {1}
    one_frame = config.frames == 1 and values.ndim == 4             # of each trajectory
    lacks_axis = flat and values.ndim in (3, 4) and (values.shape[-3] != 1 or one_frame)
    if lacks_axis:                                                 # (N, T, X, C) -> (N, T, 1, X, C)
        values = values.unsqueeze(-3)
    rank = config.dims + 2                                                     # of (T, *space', C')
    fits = values.ndim in (rank, rank + 1) and 0 not in values.shape
    if not fits or values.shape[-rank] < config.frames or values.shape[-1] > config.channels:
        space = 'X' if flat else ', '.join('HWD'[:config.dims])
        raise InputError(f'frames: the shape {given}; this model takes (N, T, {space}, C), or the '
                         f'same without N, where T is at least {config.frames} and C is at most '
                         f'{config.channels}')
    values = values.reshape(-1, *values.shape[-rank:])[:, -config.frames:]
    if not values.isfinite().all():
        raise InputError('frames: non-finite values; a prediction needs finite ones')
    layout = layout_of(model, values, dataset)
    deviation, mean = torch.std_mean(values.flatten(0, -2), 0, correction=0)
    warn_if_far(trained_on(model).get(layout.name, {}), 'frames', layout.space, mean, deviation)
    predictor = Predictor(model.eval(), layout, weights.device, dtype)
    predictions = values[:, -1:].repeat(1, steps, *[1] * (values.ndim - 2))
    for part, batch in zip(predictions.split(batch_size), values.split(batch_size)):
        for step, u in enumerate(predictor.along(batch.to(weights.device), steps)):
            part[:, step, ..., layout.evolving] = u.to(part)
    if lacks_axis:
        predictions = predictions[:, :, 0]
    if isinstance(frames, torch.Tensor):
        return predictions.to(frames.device)
    if predictions.dtype == torch.bfloat16:                                     # which NumPy lacks
        predictions = predictions.float()
    return predictions.numpy()


def real_values(values, name):
    """A new float64 tensor on the CPU. Raises InputError, with `name`, for what is not real."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values if values.is_complex() else values.double()).numpy()    # which has no bf16
    values = np.ma.asanyarray(values)                           # which knows the masks in a list
    if np.ma.is_masked(values):
        raise InputError(f'{name}: masked values; fill them, or leave these trajectories out')
    if values.dtype.kind not in 'fiub':
        raise InputError(f'{name}: values of the type {values.dtype}; expected real numbers')
    return torch.from_numpy(np.array(values, np.float64))


def layout_of(model, values, dataset):
    """Name, space, units and evolving channels of frames (N, T, *space', C') of a dataset.

    dataset: of the training, '': any of it that fits. The units are those of the training, if all
        that fits has the same, and else of the frames by themselves; a channel that never varies in
        these has the mean deviation of the training.
    Raises InputError if nothing fits, or what fits has other channels that evolve.
    """
    C = values.shape[-1]
    trained = trained_on(model)
    fitting = {name: header for name, header in trained.items()
               if dataset in ('', name) and len(header['channels']) == C}
    evolving, *others = [data.evolving_of(header) for header in fitting.values()] or [[*range(C)]]
    if (trained or dataset) and not fitting or any(other != evolving for other in others):
        known = [f'{name}: {" ".join(header["channels"])}' for name, header in trained.items()]
        raise InputError(f'frames: {C} channels, dataset={dataset!r}; name the dataset of the '
                         f'training whose channels they have, in its order ({"; ".join(known)})')
    if len(fitting) == 1:
        [dataset] = fitting                                 # whose units the Predictor takes
    known = [data.Units.read(header) for header in fitting.values() if 'units' in header]
    if known and all(other.header() == known[0].header() for other in known):
        units = known[0]
    else:
        variances, means = torch.var_mean(values.flatten(2, -2), 2, correction=0)       # (N, T, C')
        units = data.Units.of(means, variances, evolving)
        if known:
            at_rest = variances.flatten(0, 1).amax(0) == 0
            deviations = torch.stack([other.deviation for other in known])
            usual = torch.where(at_rest, deviations.mean(0), units.deviation)
            units = units._replace(deviation=usual)
            if model.config.normalize:
                warn('rollout: without dataset=, frames get mean 0 and deviation 1 by themselves')
    return Namespace(name=dataset, space=values.shape[2:-1], evolving=evolving, units=units)


def warn_if_far(header, where, space, means, deviations):
    """Print how frames on the grid `space` are unlike those of a dataset of the training.

    means, deviations: (C'), of the frames. where: their file, for the line.
    """
    if 'units' not in header:
        return
    trained = tuple(header['shape'][2:-1])
    if len({round(a / b, 3) for a, b in zip(space, trained)}) > 1:
        warn(f'{where}: the grid {configs.show(space)} has other proportions than that of the '
             f'training, {configs.show(trained)}')
    units = data.Units.read(header)
    numbers = zip(means.tolist(), deviations.tolist(), units.mean[0].tolist(),
                  units.deviation[0].tolist())
    for name, (mean, deviation, usual, its) in zip(header['channels'], numbers):
        if math.hypot(mean - usual, deviation) > FAR * its and not units.own.any():
            warn(f'{where}: {name} has the mean {mean:.4g} and the deviation {deviation:.2g}, and '
                 f'in the training {usual:.4g} and {its:.2g}')


# ---------------------------------------------------------------------------------------- metrics

def l2re(prediction, target):
    """The relative L2 error ||u - v|| / ||v||, arrays or tensors (N, F, *space, C) -> a float.

    The norms are over all frames and grid points, one for each trajectory and channel; the result
    is the mean over both, and inf if it is not finite. Static channels count, too.
    Raises InputError for two shapes, masked values and what is not real numbers.
    """
    u = real_values(prediction, 'the prediction')
    v = real_values(target, 'the target')
    if u.shape != v.shape:
        raise InputError(f'l2re: the prediction has the shape {tuple(u.shape)} and the target '
                         f'{tuple(v.shape)}')
    usual = v.flatten(0, -2).std(0, correction=0)
    floor = data.AT_REST * usual.clamp_min(torch.finfo(v.dtype).tiny)
    return mean(l2re_of_samples(u, v, floor).mean(-1))


# Metrics of predictions u for truths v, (B, F, *space, C'') -> (B, C''), or one number a sample.
# floor: of data.size_of.

def l2re_of_samples(u, v, floor):
    """||u - v|| / ||v|| over all but the first and the last axis."""
    return norm(u - v) / size_of(v, floor)


def vrmse_of_samples(u, v, floor):
    """The same over ||v - mean(v)||, so that a large mean flatters nobody."""
    return norm(u - v) / size_of(fluctuation(v), floor)


def of_frames(error):
    """A metric that is the mean of `error` over the frames, each by itself."""
    def mean_over_frames(u, v, floor):
        errors = error(u.flatten(0, 1), v.flatten(0, 1), floor)
        return errors.unflatten(0, u.shape[:2]).mean(1)
    return mean_over_frames


l2re_of_frames = of_frames(l2re_of_samples)             # PDEBench's nRMSE
vrmse_of_frames = of_frames(vrmse_of_samples)           # The Well's VRMSE


def relative_l1(u, v, floor):
    """||u - v||_1 / ||v||_1 of the last frame, over all points and channels."""
    error, size = (x[:, -1].abs().flatten(1).sum(1, keepdim=True) for x in (u - v, v))
    return error / size.clamp_min(torch.finfo(v.dtype).tiny)


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
RATIOS = {'rollout': 'rollout_vrmse', 'one step': 'step_vrmse'}     # of persistence to the model
FORECASTS = ('model', 'persistence')            # both are scored in the same way


def mean(scores):
    """The mean over samples; a sample that diverged makes it inf and is not averaged away."""
    value = scores.mean().item()
    return value if math.isfinite(value) else math.inf


# ----------------------------------------------------------------------------------------- scores

def score_all(model, datasets, processes, batch_size=16, dtype='fp32'):
    """{name: `score`} of every data.Trajectories."""
    bar = Progress(datasets, desc='evaluating', disable=processes.rank > 0, leave=False)
    return {dataset.name: score(model, dataset, processes, batch_size, dtype) for dataset in bar}


@torch.no_grad()
def score(model, dataset, processes, batch_size=16, dtype='fp32'):
    """The METRICS of every trajectory, {'model' or 'persistence': {name: (N,) float64}}.

    A 'rollout' of t_test frames starts from the first T and goes on from its own predictions; 'one
    step' predicts each frame from T true ones. Persistence is the newest true frame, repeated. The
    result, equal on all processes, also says 'frames', which is t_test, whether the dataset is
    'steady', and of 'channels' the means {channel: {forecast: {name: mean}}}.
    """
    T = model.config.frames
    F = dataset.t_test
    predictor = Predictor(model.eval(), dataset, processes.device, dtype)
    shape = len(METRICS), dataset.count, len(dataset.evolving_names)
    scores = {forecast: torch.zeros(shape, dtype=torch.float64) for forecast in FORECASTS}
    for batch in processes.batches(dataset.count, batch_size):
        frames = dataset.windows([(i, 0) for i in batch], T + F).to(processes.device)
        evolving = frames[..., dataset.evolving]                            # (B, T+F, *space', C'')
        truth = evolving[:, T:]
        newest = evolving[:, T - 1:-1]
        rollout = list(predictor.along(frames[:, :T], F))
        steps = rollout[:1]                    # the first step of a rollout is one from true frames
        for t in range(1, F):
            state = predictor.state(frames[:, t:T + t])
            steps.append(predictor.prediction(predictor.step(state)))
        predictions = {                                                       # (B, F, *space', C'')
            'model': {'rollout': torch.stack(rollout, 1), 'one step': torch.stack(steps, 1)},
            'persistence': {'rollout': newest[:, :1].expand_as(newest), 'one step': newest}}
        for forecast, values in scores.items():
            for row, metric in zip(values, METRICS.values()):
                error = metric.error(predictions[forecast][metric.kind], truth, predictor.floor)
                row[list(batch)] = error.reshape(len(batch), -1).cpu().double()          # (B, C'')
    channels = {channel: {} for channel in dataset.evolving_names}
    for forecast, values in scores.items():
        values = dict(zip(METRICS, processes.sum(values)))                                # (N, C'')
        scores[forecast] = {name: errors.mean(1) for name, errors in values.items()}
        for c, means in enumerate(channels.values()):
            means[forecast] = {name: mean(errors[:, c]) for name, errors in values.items()}
    return {**scores, 'frames': F, 'steady': dataset.steady, 'channels': channels}


def score_table(results):
    """Lines of the table of {dataset: its `score`}, with the VRMSE of persistence over the model's.

    A row names the channels that are behind persistence, which means nothing for a steady dataset:
    its input is another quantity than its solution.
    """
    rows = {}
    for dataset, scores in results.items():
        model, persistence = (scores[forecast] for forecast in FORECASTS)
        row = {'tests': len(model['rollout']), 'frames': scores['frames']}
        remarks = []
        for kind, vrmse in RATIOS.items():
            for name, metric in METRICS.items():
                if metric.kind == kind and not metric.steady:
                    row[f'{kind}\n{metric.caption}'] = mean(model[name])
            ratio = mean(persistence[vrmse]) / max(mean(model[vrmse]), 1e-12)
            row[f'{kind}\nratio'] = None if scores['steady'] else f'{ratio:.1f}x'
        behind = [channel for channel, means in scores['channels'].items() if any(
            means['model'][vrmse] > means['persistence'][vrmse] for vrmse in RATIOS.values())]
        if scores['steady']:
            remarks += [f'median {metric.caption} {model[name].median().item():.4f}'
                        for name, metric in METRICS.items() if metric.steady]
        elif behind:
            remarks.append(f'{" ".join(behind)} behind persistence')
        failures = len(model['rollout']) - model['rollout'].isfinite().sum().item()
        if failures:
            remarks.append(f'{failures} not finite')
        rows[dataset] = {**row, '': ', '.join(remarks)}
    return terminal.table('dataset', rows)


@torch.no_grad()
def rollout_curve(model, dataset, processes, steps, batch_size=16, dtype='fp32', places=None):
    """The L2RE of the frame of each step: {'model' or 'persistence': (steps, N) float64}.

    places: N pairs (trajectory, first frame) where rollouts begin; None: each trajectory at 0.
    """
    T = model.config.frames
    places = places or [(i, 0) for i in range(dataset.count)]
    predictor = Predictor(model.eval(), dataset, processes.device, dtype)
    errors = torch.zeros(len(FORECASTS), steps, len(places), dtype=torch.float64)
    for batch in processes.batches(len(places), batch_size):
        starts = [places[i] for i in batch]
        frames = dataset.windows(starts, T).to(processes.device)
        last = frames[:, -1, ..., dataset.evolving]                             # (B, *space', C'')
        bar = Progress(range(steps), desc=f'rollout of {dataset.name}', leave=False,
                       disable=processes.rank > 0 or steps == 1)
        for t, u in zip(bar, predictor.along(frames, steps)):
            truth = dataset.windows([(i, first + T + t) for i, first in starts], 1)
            v = truth.to(processes.device)[:, 0, ..., dataset.evolving]
            for row, forecast in zip(errors, (u, last)):
                error = l2re_of_samples(forecast, v, predictor.floor)
                row[t, list(batch)] = error.mean(-1).cpu().double()
    return dict(zip(FORECASTS, processes.sum(errors)))


def validation_windows(dataset):
    """(trajectory, first frame) of at most SCORED_WINDOWS, spread over all of them."""
    count = min(dataset.count, SCORED_WINDOWS)
    return [(i * dataset.count // count, (2 * i + 1) * dataset.t_test // (2 * count))
            for i in range(count)]


def validation_error(model, datasets, processes, dtype='fp32', batch_size=16):
    """The mean over the datasets of the L2RE of one step on their `validation_windows`."""
    curves = [rollout_curve(model, dataset, processes, 1, batch_size, dtype,
                            validation_windows(dataset)) for dataset in datasets]
    model.train()
    return sum(mean(curve['model']) for curve in curves) / len(datasets)


# ----------------------------------------------------------------------- long rollouts, pictures

def reference(trained, dataset, args, processes):
    """The T + N frames along which --rollout N goes: the test set, or what our solver makes."""
    config = trained.model.config
    if dataset.frames >= config.frames + args.rollout:
        return dataset
    from sources import generate  # the solvers, where data have to be made
    solved = dataset.name in generate.FAMILIES and not dataset.steady and dataset.header['source']
    source = generate.plan(dataset.name).attributes()['source'] if solved else ''
    ours = {**dataset.header, 'source': source}
    _, words = data.difference(dataset.header, ours, dataset.path, 'our solver')
    if words or not solved:
        why = f', for {words}' if words else ''
        raise InputError(f'--rollout {args.rollout}: the test trajectories of {dataset.name} have '
                         f'{dataset.frames} frames, and no solver of ours makes longer ones{why}; '
                         f'try --rollout {dataset.frames - config.frames}')
    split = generate.long_reference(dataset, config.frames + args.rollout, args.samples, processes)
    return open_dataset(trained, dataset.path.parent.parent, dataset.name, split)


def roll_out(trained, datasets, args, processes):
    """--rollout: print the errors along a `reference` of each dataset. Returns them for --json."""
    shortest = min(dataset.frames for dataset in datasets)
    args.rollout = args.rollout or shortest - trained.model.config.frames
    processes.print(f'{args.rollout} steps from the first true frames of at most {args.samples} '
                    f'trajectories')
    steps = [mark for mark in MARKS if mark < args.rollout] + [args.rollout]
    report = {}
    for dataset in [reference(trained, dataset, args, processes) for dataset in datasets]:
        draw(trained.model, dataset, steps, args, processes)
        curves = rollout_curve(trained.model, dataset, processes, args.rollout, args.batch_size,
                               args.dtype)
        report[dataset.name] = {}
        cells = {}
        for forecast, curve in curves.items():
            errors = [mean(of_step) for of_step in curve]
            at = {str(step): errors[step - 1] for step in steps}
            growth = errors[-1] / max(errors[steps[0] - 1], 1e-12)
            report[dataset.name][forecast] = {'curve': errors, 'step': {**at, 'growth': growth}}
            cells[forecast] = {**at, 'growth': f'{growth:.1f}x'} if len(steps) > 1 else at
        processes.print('\n'.join(terminal.table(f'{dataset.name}: L2RE at step', cells)))
    return report


def channel_to_draw(args, where, count, names):
    """--channel, or the first of `names`, those that evolve. InputError: there is none to draw."""
    channel = args.channel or names[0]
    if channel not in names or not 0 <= args.trajectory < count:
        raise InputError(f'--channel {channel} --trajectory {args.trajectory}: {where} has the '
                         f'trajectories 0 to {count - 1}, and of its channels {" ".join(names)} '
                         f'evolve')
    return channel


@torch.no_grad()
def draw(model, dataset, steps, args, processes):
    """--figures: draw --channel of --trajectory and its prediction, at `steps` and along all."""
    if not args.figures:
        return
    from lab import figures  # only where something is drawn
    names = dataset.evolving_names
    channel = channel_to_draw(args, dataset.path, dataset.count, names)
    T = model.config.frames
    predictor = Predictor(model.eval(), dataset, processes.device, args.dtype)
    frames = dataset.windows([(args.trajectory, 0)], T + steps[-1])
    forecast = predictor.along(frames[:, :T].to(processes.device), steps[-1])
    prediction = torch.cat([u[..., names.index(channel)].cpu() for u in forecast])  # (F, *space')
    truth = frames[0, T:, ..., dataset.channel_names.index(channel)]
    pictures = torch.stack([truth, prediction], 1)                                 # (F, 2, *space')
    if pictures.ndim == 5:
        pictures = pictures[..., pictures.shape[-1] // 2]
    figures.draw_rollout(dataset, pictures, steps, channel, args.trajectory, args.figures)


def forecast_from_files(trained, args, processes):
    """--frames and --write: go on from the last frames in files as the dataset was made of."""
    from sources import forecast, joined  # what reads files of one's own
    known = trained_on(trained.model)
    [name, *others] = configs.datasets_of(args.datasets) or known or ['']
    if not (args.sources and args.write and args.rollout) or others or name not in known:
        raise InputError(f'a forecast needs --frames FILE, --write FILE and --rollout N, and of '
                         f'--datasets one of the training, {" ".join(known)}')
    if processes.rank:
        return
    header = known[name]
    forecast.require_writable(args.write)
    paths = joined.paths_of(args.sources, header.get('variables', ()))    # as their forecasts go
    u, dt, gaps = forecast.frames_of(paths, header, trained.model.config.frames, args.uneven)
    here = forecast.in_words(paths)
    names = [header['channels'][c] for c in data.evolving_of(header)]
    channel = channel_to_draw(args, here, len(u), names)
    v = rollout(trained.model, u, args.rollout, name, args.batch_size, args.dtype)
    finite = np.isfinite(v).all((0, *range(2, v.ndim)))                         # of each step
    if not finite.all():
        step = finite.argmin()
        raise InputError(f'--rollout {args.rollout}: from step {step + 1} on predictions are not '
                         f'finite' + (f'; --rollout {step} ends before' if step else ''))
    header = {**header, 'dt': header['dt'] or dt}
    forecast.write_forecast(args.write, np.where(gaps, np.nan, v), header)
    print(f'{args.write}: {args.rollout} frames after the last of {here}', flush=True)
    if args.figures:
        from lab import figures  # only where something is drawn
        u = v[args.trajectory, ..., header['channels'].index(channel)]
        figures.draw_forecast(u, f'{name}, {channel}', args.figures)


# ------------------------------------------------------------------------------------ the command

def parser_of(description):
    """A parser with the flags of the commands on a trained model."""
    parser = terminal.Parser(description=description)
    add = parser.add_argument
    add('--checkpoint', default='', help='default: the newest run under out/, or weights/mini.pt')
    add('--data', default='', help='folder of the datasets; default: that of the training')
    add('--datasets', nargs='+', default=(),
        help='default: those of the training, or in evaluate.py all in another --data')
    add('--resolution', default='', metavar='X', help='another model grid, such as 256 or 96x192')
    add('--batch_size', type=int, default=16, metavar='N', help='trajectories at once [16]')
    add('--figures', default='', metavar='DIR', help='draw into this folder')
    add('--json', default='', metavar='FILE', help='write every number to this file')
    add('--device', default='auto', help='auto, cpu, cuda, cuda:0')
    add('--dtype', default='fp32', choices=('fp32', 'bf16'), help='bf16: autocast [fp32]')
    return parser


def open_checkpoint(args):
    """Open --checkpoint and print a line on it: what is evaluated, the processes, a report.

    What is evaluated has a model, path and name, and the flags data and datasets of its training.
    --json and --figures become '' on all ranks but 0, which alone writes.
    """
    configs.bounded('--batch_size', args.batch_size, least=1)
    if args.figures:
        from lab import figures
        figures.pyplot()                # or a line says before any work that matplotlib is missing
    processes = distributed.setup(args.device, settings=vars(args))
    if processes.rank > 0:
        args.figures = args.json = ''
    if args.json:
        files.require_new(args.json)
    saved = checkpoint.load_file(args.checkpoint or checkpoint.newest())
    model = checkpoint.load_model(saved, device=processes.device)
    if args.resolution:
        dims = model.config.dims
        model.config = configs.override(model.config, Namespace(resolution=args.resolution))
        if model.config.dims != dims:
            raise InputError(f'--resolution {args.resolution}: {saved["path"]} takes '
                             f'grids of {dims} dimensions')
    config = model.config
    path = saved['path']
    run = {'data': '', 'datasets': (), **saved['config'].get('run', {})}
    trained = Namespace(name=checkpoint.name_of(path), path=path, model=model, data=run['data'],
                        datasets=run['datasets'])
    count = aotpot.parameters(model)
    report = {'checkpoint': str(path), 'step': saved['step'], 'parameters': count,
              'activated': experts.activated(model), 'resolution': config.resolution}
    processes.print(f'{path}: step {saved["step"]}, {config.title}, {count:,} parameters, '
                    f'{configs.show(config.resolution)} grid, on {processes.device}')
    return trained, processes, report


def open_tests(trained, names, args, processes, rows=None, flag='--datasets'):
    """The test data.Trajectories of some datasets, () for all, at most `rows` of each.

    Absent ones of a built-in mixture are made. flag: what gave the names.
    """
    folder = args.data or trained.data
    absent = [name for name in names if not Path(folder, name, 'test.h5').exists()]
    if absent and not args.data and processes.rank == 0:
        from sources import generate  # the solvers, where data have to be made
        generate.builtin_tests(folder, absent, processes.device)
    distributed.barrier(processes)
    names = data.find(folder, names, 'test', flag)
    return [open_dataset(trained, folder, name, rows=rows) for name in names]


def open_dataset(trained, folder, name, split='test', rows=None):
    """The data.Trajectories of a split of a dataset, at most `rows`, as the network takes them.

    Raises InputError for other channels or static ones than in the training, and for another dt
    than in that on a dataset of this name; what else differs is a line.
    """
    config = trained.model.config
    headers = trained_on(trained.model)
    shape = config.frames, config.channels
    dataset = data.Trajectories(folder, name, split, *shape, rows, config.dims)
    for mistake, words in unlike(dataset, headers, trained.path):
        require(not mistake, words)
        warn(words)
    if name in headers:
        units = dataset.units
        warn_if_far(headers[name], dataset.path, dataset.space, units.mean[0], units.deviation[0])
    elif headers and config.normalize:
        source = dataset
        if dataset.path.with_name('train.h5').exists():
            source = data.Trajectories(folder, name, 'train', *shape)
            dataset.units = source.units
        warn(f'{name} is not a dataset of the training; its fields become dimensionless by the '
             f'mean and deviation of {source.path}')
    return dataset


def unlike(dataset, headers, path):
    """Yield (whether it is a mistake, a line) of what in a data.Trajectories differs from the
    training of the checkpoint at `path`: channels, static ones, dt or source.

    headers: {dataset: header} of that. Where none has this name, dt, and the order of channels and
        which of them are static, are compared with all.
    """
    there = f'the training of {path}'
    if dataset.name in headers:
        what, words = data.difference(dataset.header, headers[dataset.name], dataset.path, there)
        if what:
            yield what != 'source', words
        return
    names = dataset.channel_names
    known = [header for header in headers.values() if {*names} & {*header['channels']}]
    orders = [header['channels'] for header in known]
    same = [order for order in orders if sorted(order) == sorted(names)]
    moved = [order for c, name in enumerate(names) for order in orders if name in order
             and not any(other[c:c + 1] == [name] for other in orders)]
    if moved or same and names not in same:
        yield bool(same), (f'{dataset.path}: channels {" ".join(names)}; {there} took them in the '
                           f'order {" ".join([*same, *moved][0])}')
    for name in names:
        still = {name in header['static'] for header in known if name in header['channels']}
        if still == {name not in dataset.header['static']}:
            what, other = ('evolves', 'static') if still == {True} else ('is static', 'evolving')
            yield False, f'{dataset.path}: {name} {what}; in {there} it is {other}'
    dt = dataset.header['dt']
    steps = sorted({header.get('dt') for header in headers.values()} - {None})
    if dt and steps and not any(math.isclose(dt, step, rel_tol=1e-3) for step in steps):
        yield False, f'{dataset.path} has the dt {dt}, but {there} has {" ".join(map(str, steps))}'


def finish(args, processes, trained, report):
    """Write a report to --json, tensors as means and values, non-finite as null; then leave."""
    if args.json:
        text = json.dumps({'models': {trained.name: report}}, default=lambda x: {
            'mean': x.mean().item(), 'samples': x.flatten().tolist()})
        finite = json.loads(text, parse_constant=lambda name: None)
        files.write_text(args.json, json.dumps(finite, indent=1))
    distributed.leave(processes)


def main():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add('--rollout', type=int, nargs='?', const=0, metavar='N',
        help='roll out N steps, along a long reference, or without N as far as the test data go')
    add('--samples', type=int, default=8, metavar='N', help='trajectories of --rollout [8]')
    add('--frames', dest='sources', nargs='+', default=(), metavar='FILE',
        help='go on from the last frames in these files of your own')
    add('--write', default='', metavar='FILE', help='the forecast of --frames: .npy, .h5 or .nc')
    add('--uneven', action='store_true',
        help='of --frames: take steps of time or grid that are uneven or differ as equal')
    add('--channel', default='', metavar='NAME', help='of --figures [the first that evolves]')
    add('--trajectory', type=int, default=0, metavar='N', help='of --figures: that to draw [0]')
    args = parser.parse_args()
    configs.bounded('--samples', args.samples, least=1)
    configs.bounded('--rollout', args.rollout or 0, least=0)
    trained, processes, report = open_checkpoint(args)
    if args.sources or args.write:
        forecast_from_files(trained, args, processes)
        return finish(args, processes, trained, report)
    long = args.rollout is not None
    names = configs.datasets_of(args.datasets)
    if not names and (not args.data or Path(args.data).resolve() == Path(trained.data).resolve()):
        names = [LONG] if long and LONG in trained.datasets else trained.datasets
    tests = open_tests(trained, names, args, processes, args.samples if long else None)
    if long:
        report['rollout'] = roll_out(trained, tests, args, processes)
    else:
        for dataset in [test for test in tests if not test.steady]:
            steps = sorted({1, (dataset.t_test + 1) // 2, dataset.t_test})
            draw(trained.model, dataset, steps, args, processes)
        report['datasets'] = score_all(trained.model, tests, processes, args.batch_size, args.dtype)
        processes.print('\n'.join(score_table(report['datasets'])))
    finish(args, processes, trained, report)


if __name__ == '__main__':
    terminal.cli(main)
