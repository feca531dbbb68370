"""Score trained models: one step, rollouts over the test trajectories, and rollouts of 500 steps.

    python evaluate.py                          the newest checkpoint under out/, on the data that it was trained on
    python evaluate.py --checkpoint out/*/best.pt --data data --datasets swe_pdb dr_pdb --json scores.json
    python evaluate.py --rollout 500 --figures out/figures      long rollouts of everything that it was trained on
    python evaluate.py --scoring paper --metrics        as DPOT scores, on the model grid; with nRMSE and VRMSE
    torchrun --standalone --nproc_per_node=8 evaluate.py          the same numbers, sooner

The architecture, the resolution and the data folder come from the checkpoint. Each dataset is scored on its native grid
against its original data, on the channels that evolve; in a rollout all others keep their values.

Shapes: B batch, T input frames, F predicted frames, N trajectories, C field channels of the model, C' of the dataset,
C'' of those that evolve; (*space) are the grid points of the model, (*space') those of the dataset.
"""
import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import configs
import runtime.spinning  # noqa: F401, before torch is imported
from configs import InputError

import numpy as np
import torch

import data
from data import norm, relative
from runtime import commands, terminal
from runtime.terminal import Progress
from sources import check, generate

LONG = 'ns2d_fno_1e-3'          # the dataset of the paper's long rollouts (Sec. 5.4); our solver makes the reference
MARGIN = 0.1                    # widens the training range, which most test data leave otherwise


# ------------------------------------------------------------------------------------------------ stepping through time

def evaluating(function):
    """Let function(model, ...) run without gradients and in evaluation mode, which the model then leaves again."""
    @functools.wraps(function)
    @torch.no_grad()
    def evaluated(model, *args, **options):
        training = [module for module in model.modules() if module.training]
        try:
            return function(model.eval(), *args, **options)
        finally:
            for module in training:
                module.training = True
    return evaluated


class Predictor:
    """A model in evaluation mode as a time stepper of one dataset: `step` maps a state on its grid to the next.

    like: a data.Trajectories, or what has its `name`, `space`, `evolving` and `fields`. scoring: 'native' brings the
    prediction to the dataset's grid and scores it against the original data. 'paper', as DPOT, interpolates the truth
    on the model grid and scores every (model // native)-th point, so the native grid has to divide the model's.
    """

    def __init__(self, model, like, device, dtype='fp32', scoring='native'):
        if dtype not in ('fp32', 'bf16'):
            raise InputError(f'--dtype {dtype}: expected fp32 or bf16')
        self.model, self.like, self.config, self.points = model, like, model.config, None
        if scoring == 'paper':
            resolution = self.config.resolution
            factors = [divmod(*sizes) for sizes in zip(resolution, like.space)]
            if len(resolution) != len(like.space) or any(rest for _, rest in factors):
                raise InputError(f'--scoring paper: the grid of {like.name}, {configs.show(like.space)}, does not '
                                 f'divide the model grid, {configs.show(resolution)}; use --scoring native')
            self.points = slice(None), *(slice(None, None, factor) for factor, _ in factors)
        constant = [channel not in like.evolving for channel in range(self.config.channels)]    # padding and static
        self.constant = torch.tensor(constant, device=device)                                   # (C,)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == 'bf16')

    def state(self, frames):
        """Native frames (B, T, *space', C') -> a state (B, T, *space, C) on the model grid."""
        return data.to_model(frames, self.config.resolution, self.config.channels)

    def step(self, state):
        """A state (B, T, *space, C) -> the next state, whose last frame is the new one."""
        with self.autocast:
            u = self.model(state)[:, None]
        return torch.cat([state[:, 1:], torch.where(self.constant, state[:, -1:], u.to(state.dtype))], dim=1)

    def along(self, frames, steps):
        """Native frames (B, T, *space', C') -> yields the predicted ones one after the other, as of `scored`."""
        state = self.state(frames)
        for _ in range(steps):
            state = self.step(state)
            yield self.scored(state)
            state = self.fed_back(state)

    def fed_back(self, state):
        """A state whose newest frame is a prediction, which went to a coarser native grid and back; not for 'paper'."""
        grid, coarser = self.config.resolution, tuple(map(min, self.config.resolution, self.like.space))
        if self.points is not None or coarser == grid:
            return state
        u = data.resize(data.resize(state[:, -1:], coarser), grid)
        return torch.cat([state[:, :-1], torch.where(self.constant, state[:, -1:], u)], dim=1)

    def scored(self, state):
        """The newest frame of a state at the points that are scored: (B, *points, C''); by default the native grid."""
        if self.points is None:
            return data.to_native(state[:, -1:], self.like)[:, 0]
        return state[:, -1, ..., self.like.evolving][self.points]

    def truth(self, frame):
        """A native frame (B, *space', C') at the points that are scored: (B, *points, C'')."""
        frame = frame[..., self.like.evolving]
        return frame if self.points is None else data.resize(frame[:, None], self.config.resolution)[:, 0][self.points]


@evaluating
def rollout(model, frames, steps, static=(), batch_size=16, dtype='fp32', name='frames', dataset=''):
    """The `steps` frames after the last of the native `frames` (N, T, *space', C'): (N, steps, *space', C').

    model: as `aotpot.load` returns it. frames: an array or a tensor on any grid, in the units and with the channels of
    the training data, of which the last T frames count; without the axis N the result has N = 1. It is an array or a
    tensor as `frames` are, in the type of the weights. steps: a number, or those to keep, such as (20, 100, 500).
    dataset, static: of `layout_of`; channels that do not evolve keep the values of the last frame, and if the
    checkpoint knows of them, a line says so. Raises InputError for frames that do not fit, which it calls `name`.
    """
    kept = range(1, steps + 1) if np.ndim(steps) == 0 else sorted({*steps})
    configs.at_least(1, steps=min(kept, default=0), batch_size=batch_size)
    weights = next(model.parameters())
    values = last_frames(model.config, frames, name).to(weights.dtype)
    if not values.isfinite().all():                         # nor are numbers that float32 cannot hold
        raise InputError(f'{name}: non-finite values in the last frames; a prediction needs finite ones')
    layout, names = layout_of(model, values.shape[-1], dataset, static, name)
    if names and layout.static:
        print(f'{name}: channels {layout.words}, as in {" ".join(names)}', flush=True)
    evolving, divisors = layout.evolving, torch.from_numpy(layout.divisors).to(weights)
    like = SimpleNamespace(name=name, space=tuple(values.shape[2:-1]), evolving=evolving, fields=evolving)
    predictor = Predictor(model, like, weights.device, dtype)
    predictions = values[:, -1:].repeat(1, len(kept), *[1] * (values.ndim - 2))
    for part, batch in zip(predictions.split(batch_size), values.split(batch_size)):
        for step, u in enumerate(predictor.along(batch.to(weights.device) / divisors, kept[-1]), 1):
            if step in kept:
                part[:, kept.index(step), ..., evolving] = u.to(part.device)
    return predictions if isinstance(frames, torch.Tensor) else predictions.numpy()


def layout_of(model, C, dataset='', static=(), name='frames'):
    """How the training read C channels: the data.Layout, and the names of its datasets if the checkpoint has it.

    dataset: one that the model was trained on, needed where it read C channels in several ways, or a data.Layout.
    static: further channels that do not evolve, by their indices or as a boolean for each. If the checkpoint has no
    layouts, all others evolve. Raises InputError, which starts with `name`, for what does not fit.
    """
    own, known = isinstance(dataset, data.Layout), getattr(model, 'layouts', {})
    if dataset and not own:
        if dataset not in known:
            hint = configs.nearest(dataset, known) if known else ''
            raise InputError(f'{name}: the checkpoint has no layout of the dataset {dataset}{hint}')
        known = {dataset: known[dataset]}
    fitting = {key: layout for key, layout in known.items() if len(layout.channels) == C}
    listed = '; '.join(f'{key}: {layout.words}' for key, layout in (fitting or known).items())
    if known and not fitting:
        raise InputError(f'{name}: {C} channels; give all channels of a dataset of the training ({listed})')
    if not own and len({(*layout.evolving, *layout.divisors) for layout in fitting.values()}) > 1:
        raise InputError(f'{name}: the training read {C} channels in several ways; name a dataset with dataset= or '
                         f'--dataset ({listed})')
    if own:
        layout = dataset
    elif fitting:
        layout = next(iter(fitting.values()))
    else:
        layout = data.layout_of_channels(name, C, {})
    static = indices(static, C, name)
    if {*layout.evolving} <= {*static}:
        raise InputError(f'{name}: static channels {static}; one of its {C} channels must evolve')
    more = [layout.channels[i] for i in layout.evolving if i in static]
    layout = layout._replace(static=layout.static + more, scale=layout.scale + [1] * len(more))
    return layout, [] if own else [*fitting]


def indices(static, C, name):
    """The list of indices in `static`, which holds indices or a boolean for each of C channels."""
    chosen = np.array([np.asarray(channel) for channel in static])
    if chosen.dtype == bool and len(chosen) == C:
        return np.flatnonzero(chosen).tolist()
    if chosen.dtype == bool or not {*chosen.tolist()} <= {*range(C)}:
        raise InputError(f'{name}: static channels {chosen.tolist()}; its channels are 0 to {C - 1}; give their '
                         f'indices, or a boolean for each channel')
    return chosen.tolist()


def last_frames(config, frames, name):
    """The last T of the frames of `rollout`, as a tensor (N, T, *space', C')."""
    values, rank = frames if isinstance(frames, torch.Tensor) else np.asanyarray(frames), config.dims + 2
    shape, T, C = tuple(values.shape), config.frames, config.channels
    if len(shape) not in (rank, rank + 1) or 0 in shape or shape[-1] > C:
        raise InputError(f'{name}: the shape {shape}; this model takes (N, {T}, {", ".join("HWD"[:config.dims])}, C), '
                         f'or the same without N, where C is at most {C}')
    if shape[-rank] < T:
        raise InputError(f'{name}: {shape[-rank]} frames; this model needs {T} to predict the next, so give as many')
    if values.is_complex() if isinstance(values, torch.Tensor) else values.dtype.kind not in 'fiub':
        raise InputError(f'{name}: {values.dtype}; expected real numbers')
    values = values.reshape(-1, *shape[-rank:])[:, -T:]
    if np.ma.is_masked(values):
        raise InputError(f'{name}: masked values in the last frames; a prediction needs all of them')
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values, np.float64))


# ------------------------------------------------------------------------------------------------ metrics

class Comparison(NamedTuple):
    """What a metric is computed from: a prediction u beside the truth v, at the points x where they are scored."""
    error: torch.Tensor         # (F, B, C'') float64: sum_x (u - v)^2 of each frame
    size: torch.Tensor          # (F, B, C'') float64: sum_x v^2
    deviation: torch.Tensor     # (F, B, C'') float64: sum_x (v - mean_x v)^2
    points: int                 # the number of points x
    prediction: torch.Tensor    # (B, *points, C''): u of the last frame
    target: torch.Tensor        # (B, *points, C''): v of the last frame


def l2re(error, size):
    """Relative L2 error sqrt(error / size) of float64 sums of squares (..., C) -> (...), the mean over the channels."""
    return relative(error, size).sqrt().mean(-1)


def l2re_over_all_frames(pair):
    """sqrt(sum_tx (u-v)^2 / sum_tx v^2), the mean over the channels: (B,). DPOT's l2_full."""
    return l2re(pair.error.sum(0), pair.size.sum(0))


def nrmse(pair):
    """mean_t sqrt(mean_x (u-v)^2 / mean_x v^2), the mean over the channels: (B,). PDEBench's nRMSE, DPOT's l2_step."""
    return l2re(pair.error, pair.size).mean(0)


def vrmse(pair):
    """mean_t sqrt(mean_x (u-v)^2 / (var_x v + 1e-7)), the mean over the channels: (B,). The Well's VRMSE."""
    variance = pair.deviation / (pair.points - 1) + 1e-7        # as there; the 1e-7 is in the units of the field
    return (pair.error / pair.points / variance).sqrt().mean((0, -1))


def relative_l1(pair):
    """||u - v||_1 / ||v||_1 of the last frame, over all points and channels: (B,). For steady problems."""
    return relative(*(x.flatten(1).abs().sum(1) for x in (pair.prediction - pair.target, pair.target)))


class Metric(NamedTuple):
    title: str                  # in tables
    of: str                     # the prediction that it scores: 'rollout' or 'one step', see `score`
    function: Callable          # Comparison -> (B,)


METRICS = {                     # a new metric is a function above and a line here; the keys are the names in JSON
    'rollout': Metric('L2RE', 'rollout', l2re_over_all_frames),
    'step': Metric('L2RE', 'one step', nrmse),
    'nrmse': Metric('nRMSE', 'rollout', nrmse),
    'vrmse': Metric('VRMSE', 'rollout', vrmse),
    'l1': Metric('relative L1', 'one step', relative_l1),
}
MAIN = ('rollout', 'step')      # always printed; the others with --metrics
SUFFIXES = ('', '_persistence')                 # of names: the model's number, and that of persistence


# ------------------------------------------------------------------------------------------------ scores

@evaluating
def score(model, test, processes, batch_size=16, dtype='fp32', limit=None, steps=None, scoring='native'):
    """The METRICS of every test trajectory: {name: (N,) float64}, equal on all processes.

    The predictions are of t_test frames: 'rollout' starts from the first T frames and goes on from its own predictions;
    'one step' predicts each frame from T true ones. '<name>_persistence' is of the newest true frame, repeated.
    limit: at most so many trajectories; steps: at most so many frames; scoring: see `Predictor`.
    """
    T, count, frames = model.config.frames, min(test.count, limit or test.count), min(test.t_test, steps or test.t_test)
    predictor = Predictor(model, test, processes.device, dtype, scoring)
    names = {name + suffix: (metric, metric.of + suffix) for name, metric in METRICS.items() for suffix in SUFFIXES}
    scores = {name: torch.zeros(count, dtype=torch.float64) for name in names}
    for batch in processes.batches(count, batch_size):
        truth = data.read_frames(test, batch, 0, T + frames, processes.device)               # (B, T+F, *space', C')
        state, sums = predictor.state(truth[:, :T]), []
        first = previous = predictor.truth(truth[:, T - 1])
        for t in range(frames):
            target = predictor.truth(truth[:, T + t])
            state = predictor.step(state)
            after_truth = predictor.step(predictor.state(truth[:, t:T + t])) if t else state    # the first is the same
            predictions = {'rollout': predictor.scored(state), 'rollout_persistence': first,
                           'one step': predictor.scored(after_truth), 'one step_persistence': previous}
            deviation = target - target.mean(tuple(range(1, target.ndim - 1)), keepdim=True)
            sums.append({'size': norm(target), 'deviation': norm(deviation),
                         **{name: norm(u - target) for name, u in predictions.items()}})
            previous, state = target, predictor.fed_back(state)
        sums = {name: torch.stack([frame[name] for frame in sums]).cpu().double().square()              # (F, B, C'')
                for name in sums[0]}
        for name, (metric, of) in names.items():
            pair = Comparison(sums[of], sums['size'], sums['deviation'], math.prod(target.shape[1:-1]),
                              predictions[of], target)
            scores[name][list(batch)] = metric.function(pair).cpu().double()
    return dict(zip(scores, processes.sum(torch.stack([*scores.values()]))))


def score_all(model, sets, processes, batch_size=16, dtype='fp32', scoring='native'):
    """`score` of every data.Trajectories in `sets`, once all are known to fit: {name: scores, 'frames', 'steady'}."""
    for test in sets:
        Predictor(model, test, processes.device, dtype, scoring)
    return {test.name: {**score(model, test, processes, batch_size, dtype, scoring=scoring),
                        'frames': test.t_test, 'steady': test.steady}
            for test in Progress(sets, desc='evaluating', disable=processes.rank > 0, leave=False)}


def mean(scores):
    """The mean over samples; a sample that diverged makes it inf and is not averaged away."""
    value = scores.mean().item()
    return value if math.isfinite(value) else math.inf


def shown(scores, names):
    """Those of the metrics `names` that tables have: a steady dataset has one frame to predict, so that some agree."""
    return [name for name in names if not (scores.get('steady') and name in ('rollout', 'nrmse'))]


def table(results, scoring='native', names=MAIN):
    """Lines of the table of {dataset: score(...)}: for each of `names` the model, persistence and their ratio.

    The input of a steady dataset is another quantity than its solution, so that persistence means nothing there. The
    steady ones come last.
    """
    rows = {}
    for dataset, scores in sorted(results.items(), key=lambda item: bool(item[1].get('steady'))):
        rows[dataset] = row = {'tests': len(scores['rollout']), 'frames': scores['frames']}
        for name in shown(scores, names):
            model, persistence = (mean(scores[name + suffix]) for suffix in SUFFIXES)
            head = f'{METRICS[name].title}\n{METRICS[name].of}\n'
            row[f'{head}model'] = model
            if not scores.get('steady'):
                row |= {f'{head}persistence': persistence, f'{head}ratio': f'{persistence / max(model, 1e-12):.1f}x'}
        failures = int((~scores['rollout'].isfinite()).sum())
        row[''] = ', '.join([f'median relative L1 {scores["l1"].median().item():.4f}'] * bool(scores.get('steady'))
                            + [f'{failures} not finite'] * bool(failures))
    return terminal.table(f'{scoring} scoring\n\ndataset', rows)


# ------------------------------------------------------------------------------------------------ long rollouts

@evaluating
def along_rollout(model, test, processes, steps, measure, shape, batch_size=16, dtype='fp32'):
    """measure(u, t, batch, first) of each frame of the rollouts from the first T frames: (steps, N, *shape) float64.

    u (B, *space', C''): the prediction of step t, from 0; batch: the indices of the trajectories; first (B, T, *space',
    C'): their input frames. `measure` returns (B, *shape).
    """
    predictor = Predictor(model, test, processes.device, dtype)
    values = torch.zeros(steps, test.count, *shape, dtype=torch.float64)
    for batch in processes.batches(test.count, batch_size):
        first = data.read_frames(test, batch, 0, model.config.frames, processes.device)
        frames = Progress(predictor.along(first, steps), desc='rollout', total=steps, unit='step',
                          disable=processes.rank > 0, leave=False)
        measures = [measure(u, t, batch, first) for t, u in enumerate(frames)]
        values[:, list(batch)] = torch.stack(measures).cpu().double()
    return processes.sum(values)


def rollout_curve(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """The L2RE of the frame of each step: {'step' and 'step_persistence': (steps, N) float64}."""
    def norms(u, t, batch, first):
        t += model.config.frames
        frames = first[:, -1], data.read_frames(test, batch, t, t + 1, processes.device)[:, 0]
        persistence, target = (frame[..., test.evolving] for frame in frames)
        return torch.stack([norm(x) for x in (target, u - target, persistence - target)], 1)            # (B, 3, C'')
    shape = 3, len(test.evolving)
    size, *errors = along_rollout(model, test, processes, steps, norms, shape, batch_size, dtype).square().unbind(2)
    return {'step' + suffix: l2re(error, size) for suffix, error in zip(SUFFIXES, errors)}


def reported_steps(steps):
    return [mark for mark in (20, 50, 100, 200, 500) if mark < steps] + [steps]


def numbers(curves):
    """The numbers of a `rollout_curve` as a dict for the JSON (paper, Table 3)."""
    rows = {}
    for suffix in SUFFIXES:
        rows['curve' + suffix] = steps = [mean(step) for step in curves['step' + suffix]]
        rows['step' + suffix] = row = {str(mark): steps[mark - 1] for mark in reported_steps(len(steps))}
        row['growth'] = steps[-1] / max(next(iter(row.values())), 1e-12)
    return rows


def first_step_outside_range(statistics, within):
    """The first step, from 1, at which a sample leaves the range by more than MARGIN or is not finite, or 0: (N,).

    statistics (steps, N, M, C'') of `check.field_statistics`; within (2, M, C''), the smallest and the largest.
    """
    margin = MARGIN * within.abs().amax(0)
    margin[1:4] = MARGIN * within[1, 0].sqrt()      # for values their size, as the mean may be 0 in all training data
    outside = ~((statistics >= within[0] - margin) & (statistics <= within[1] + margin)).flatten(2).all(2)
    return torch.where(outside.any(0), outside.int().argmax(0) + 1, 0)


# ------------------------------------------------------------------------------------------------ the command

def print_scores(models, args, processes, report):
    """The default: the scores of one checkpoint in one table, those of several in a table for each metric."""
    commands.agreed(models, 'frames')
    if args.scoring == 'paper':
        commands.agreed(models, 'resolution')
    sets, results = commands.test_sets(models, args, processes), {}
    for item in models:
        scores = score_all(item.model, sets[item.name], processes, args.batch_size, args.dtype, args.scoring)
        results[item.name] = scores
        report['models'][item.name].update(scoring=args.scoring, datasets=scores)
    first, names = results[models[0].name], METRICS if args.metrics else MAIN
    if len(models) == 1:
        return table(first, args.scoring, names)
    lines = []
    for name in names:
        rows = {}
        for test in (test for test, scores in first.items() if name in shown(scores, names)):
            rows[test] = {model: mean(scores[test][name]) for model, scores in results.items()}
            if not first[test]['steady']:
                rows[test]['persistence'] = mean(first[test][f'{name}_persistence'])
        if rows:
            title = f'{METRICS[name].title} of {METRICS[name].of}, {args.scoring} scoring'
            lines += terminal.table(title, rows, best='row')
    return lines


def roll_out(models, args, processes, report):
    """--rollout of each dataset beside its test trajectories, or the range of the training data if they are too short.

    Those of LONG, if it was trained on or asked for, are of our solver. Without any data there is LONG alone.
    """
    commands.agreed(models, 'resolution')
    T, folder = commands.agreed(models, 'frames'), args.data or commands.agreed(models, 'data')
    with_solver = bool(args.datasets) or all(LONG in item.run.datasets for item in models)
    bare = with_solver and {*args.datasets} <= {LONG} and not args.data and not any(Path(folder).glob('*/test.h5'))
    names = [LONG] if bare else commands.test_names(models, args, folder, processes)
    absent = sorted({*models[0].run.datasets} - {LONG}) if bare and not args.datasets else []
    lines, inside = [f'{args.rollout} steps from the first {T} true frames of at most {args.samples} trajectories'], {}
    for name in names:
        sets = {item.name: generate.long_reference(folder, LONG, args.rollout, args.samples, item.model.config,
                                                   processes) if name == LONG and with_solver else
                item.dataset(folder, name, rows=args.samples) for item in models}
        test = sets[models[0].name]
        if test.steady:
            raise InputError(f'--rollout: {name} is steady, there is nothing to roll out; name others with --datasets')
        if test.frames >= T + args.rollout:
            rows, more = beside_reference(models, sets, args, processes, f'_{name}' * (len(names) > 1))
            lines += more
        elif args.datasets or Path(folder, name, 'train.h5').exists():
            rows, inside[name] = beside_training(models, sets, args, processes)
        else:
            absent.append(name)
            continue
        for item in models:
            report['models'][item.name].setdefault('rollout', {})[name] = rows[item.name]
    if inside:
        lines += [f'no reference is so long: samples that stay within the training range, widened by {MARGIN:.0%}',
                  *terminal.table('', inside)]
    if absent:
        lines.append(f'left out, since {folder} lacks their training data (run sources.generate): {" ".join(absent)}')
    return lines


def beside_reference(models, sets, args, processes, suffix):
    """{checkpoint: numbers} and the table of the errors of rollouts along the trajectories of `sets`; their figure."""
    curves = {item.name: rollout_curve(item.model, sets[item.name], processes, args.rollout, args.batch_size,
                                       args.dtype) for item in models}
    if args.figures:
        from lab import figures
        figures.save(args.figures, f'rollout{suffix}', figures.plot_rollout(curves))
    rows = {name: numbers(curve) for name, curve in curves.items()}
    cells = {name: row['step'] for name, row in rows.items()}
    cells['persistence'] = rows[models[0].name]['step_persistence']
    cells = {name: {**row, 'growth': f'{row["growth"]:.1f}x'} for name, row in cells.items()}
    return rows, terminal.table(f'{sets[models[0].name].name}: L2RE at step', cells, best='column')


def beside_training(models, sets, args, processes):
    """{checkpoint: numbers} and {checkpoint: how many rollouts stay within the range of the training split}."""
    test = sets[models[0].name]
    names, bands = check.octave_bands(test.space)
    train = models[0].dataset(test.path.parent.parent, test.name, 'train')
    within = torch.stack(check.split_statistics(train, processes).flatten(0, 1).aminmax(dim=0))         # (2, M, C'')
    bands, shape, rows, cells = bands.to(processes.device), within.shape[1:], {}, {}
    statistics = {item.name: along_rollout(item.model, sets[item.name], processes, args.rollout, lambda u, *_:
                                           check.field_statistics(u, bands), shape, args.batch_size, args.dtype)
                  for item in models}
    statistics['true frames'] = check.split_statistics(test, processes).transpose(0, 1)
    for name, values in statistics.items():                                                     # (steps, N, M, C'')
        first = first_step_outside_range(values, within).tolist()
        steps = [step for step in first if step]
        cells[name] = f'{len(first) - len(steps)} of {len(first)}' + (
            f', the first leaves at step {min(steps)}' if steps else '')
        rows[name] = {'statistics': ['energy', 'mean', 'least', 'largest', *names], 'training': within.tolist(),
                      'first_step_outside': [step or None for step in first],
                      'means': {mark: values[mark - 1].mean(0).tolist() for mark in reported_steps(len(values))}}
    return rows, cells


def main():
    parser = commands.evaluation_parser(__doc__, 'what --rollout gives')
    add = parser.add_argument
    add('--scoring', default='native', choices=('native', 'paper'), help='paper: on the model grid, as DPOT [native]')
    add('--metrics', action='store_true', help='print nRMSE, VRMSE and relative L1 too')
    add('--rollout', type=int, metavar='N', help='roll out N steps, along test data or beside the training range')
    add('--samples', type=int, default=8, metavar='N', help='trajectories of --rollout [8]')
    args = parser.parse_args()
    configs.at_least(1, samples=args.samples)
    if args.rollout is not None:
        configs.bounded('rollout', args.rollout, least=1, most=100_000)
        if args.metrics or args.scoring == 'paper':
            raise InputError('--metrics and --scoring paper are for the test frames; leave --rollout out')
    elif args.figures:
        raise InputError('--figures: of what? add --rollout N')
    commands.run(args, print_scores if args.rollout is None else roll_out)


if __name__ == '__main__':
    terminal.cli(main)
