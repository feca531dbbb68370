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

import runtime.spinning  # noqa: F401, before torch is imported

import numpy as np
import torch

import configs
import data
from configs import InputError
from data import norm, relative
from runtime import commands, distributed, terminal
from runtime.layouts import Layout, layout_of_channels
from runtime.terminal import Progress

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
        self.model = model
        self.like = like
        self.config = model.config
        self.points = None
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
        grid = self.config.resolution
        coarser = tuple(map(min, self.config.resolution, self.like.space))
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
    evolving = layout.evolving
    divisors = torch.from_numpy(layout.divisors).to(weights)
    like = SimpleNamespace(name=name, space=tuple(values.shape[2:-1]), evolving=evolving, fields=evolving)
    predictor = Predictor(model, like, weights.device, dtype)
    predictions = values[:, -1:].repeat(1, len(kept), *[1] * (values.ndim - 2))
    for part, batch in zip(predictions.split(batch_size), values.split(batch_size)):
        for step, u in enumerate(predictor.along(batch.to(weights.device) / divisors, kept[-1]), 1):
            if step in kept:
                part[:, kept.index(step), ..., evolving] = u.to(part.device)
    return predictions if isinstance(frames, torch.Tensor) else predictions.numpy()


def layout_of(model, C, dataset='', static=(), name='frames'):
    """How the training read C channels: the Layout, and the names of its datasets if the checkpoint has it.

    dataset: one that the model was trained on, needed where it read C channels in several ways, or a Layout.
    static: further channels that do not evolve, by their indices or as a boolean for each. If the checkpoint has no
    layouts, all others evolve. Raises InputError, which starts with `name`, for what does not fit.
    """
    own = isinstance(dataset, Layout)
    known = {name: dataset} if own else {key: layout_of_channels(key, len(splits['train']['channels']), splits['train'])
                                         for key, splits in getattr(model, 'data', {}).items()}
    if dataset and not own:
        if dataset not in known:
            hint = configs.nearest(dataset, known) if known else ''
            raise InputError(f'{name}: the checkpoint has no layout of the dataset {dataset}{hint}')
        known = {dataset: known[dataset]}
    fitting = {key: layout for key, layout in known.items() if len(layout.channels) == C}
    listed = '; '.join(f'{key}: {layout.words}' for key, layout in (fitting or known).items())
    if known and not fitting:
        raise InputError(f'{name}: {C} channels; give all channels of a dataset of the training ({listed})')
    if len({(*layout.evolving, *layout.divisors) for layout in fitting.values()}) > 1:
        raise InputError(f'{name}: the training read {C} channels in several ways; name a dataset with dataset= or '
                         f'--dataset ({listed})')
    layout = next(iter(fitting.values())) if fitting else layout_of_channels(name, C, {})
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
    values = frames if isinstance(frames, torch.Tensor) else np.asanyarray(frames)
    rank = config.dims + 2
    shape = tuple(values.shape)
    T = config.frames
    C = config.channels
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
    error = (pair.prediction - pair.target).flatten(1).abs().sum(1)
    size = pair.target.flatten(1).abs().sum(1)
    return relative(error, size)


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
FORECASTS = ('model', 'persistence')            # both are scored in the same way


# ------------------------------------------------------------------------------------------------ scores

@evaluating
def score(model, test, processes, batch_size=16, dtype='fp32', scoring='native'):
    """The METRICS of every test trajectory, {'model' or 'persistence': {name: (N,) float64}}, equal on all processes.

    The predictions are of t_test frames: 'rollout' starts from the first T frames and goes on from its own predictions;
    'one step' predicts each frame from T true ones. Persistence is the newest true frame, repeated.
    scoring: see `Predictor`.
    """
    T = model.config.frames
    predictor = Predictor(model, test, processes.device, dtype, scoring)
    scores = {forecast: torch.zeros(len(METRICS), test.count, dtype=torch.float64) for forecast in FORECASTS}
    for batch in processes.batches(test.count, batch_size):
        truth = data.read_frames(test, batch, 0, T + test.t_test, processes.device)          # (B, T+F, *space', C')
        pairs = compare(predictor, truth, T)
        for forecast in FORECASTS:
            for i, metric in enumerate(METRICS.values()):
                values = metric.function(pairs[forecast, metric.of])
                scores[forecast][i, list(batch)] = values.cpu().double()
    return {forecast: dict(zip(METRICS, processes.sum(values))) for forecast, values in scores.items()}


def compare(predictor, truth, T):
    """The predictions of the frames after the first T of `truth` (B, T+F, *space', C') beside these frames.

    Returns {(forecast, of): Comparison}, where `of` is 'rollout' or 'one step'.
    """
    state = predictor.state(truth[:, :T])
    last = newest = predictor.truth(truth[:, T - 1])
    sizes = []
    deviations = []
    errors = {}
    for t in range(truth.shape[1] - T):
        target = predictor.truth(truth[:, T + t])
        state = predictor.step(state)
        # the first step of a rollout is a step from true frames
        after_truth = predictor.step(predictor.state(truth[:, t:T + t])) if t else state
        predictions = {
            ('model', 'rollout'): predictor.scored(state),
            ('model', 'one step'): predictor.scored(after_truth),
            ('persistence', 'rollout'): last,
            ('persistence', 'one step'): newest,
        }
        for key, u in predictions.items():
            errors.setdefault(key, []).append(norm(u - target))
        sizes.append(norm(target))
        deviations.append(norm(target - target.mean(tuple(range(1, target.ndim - 1)), keepdim=True)))
        newest = target
        state = predictor.fed_back(state)
    size = squares(sizes)
    deviation = squares(deviations)
    points = math.prod(target.shape[1:-1])
    return {key: Comparison(squares(errors[key]), size, deviation, points, predictions[key], target) for key in errors}


def squares(norms):
    """The squares of norms (B, C'') of F frames: (F, B, C'') float64, which holds them, on the CPU."""
    return torch.stack(norms).cpu().double().square()


def score_all(model, sets, processes, batch_size=16, dtype='fp32', scoring='native'):
    """`score` of every data.Trajectories in `sets`, once all are known to fit: {name: scores, 'frames', 'steady'}."""
    for test in sets:
        Predictor(model, test, processes.device, dtype, scoring)
    results = {}
    for test in Progress(sets, desc='evaluating', disable=processes.rank > 0, leave=False):
        scores = score(model, test, processes, batch_size, dtype, scoring=scoring)
        results[test.name] = {**scores, 'frames': test.t_test, 'steady': test.steady}
    return results


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
    for dataset, scores in sorted(results.items(), key=lambda result: bool(result[1].get('steady'))):
        steady = scores.get('steady')
        row = {'tests': len(scores['model']['rollout']), 'frames': scores['frames']}
        for name in shown(scores, names):
            head = f'{METRICS[name].title}\n{METRICS[name].of}\n'
            model = mean(scores['model'][name])
            row[f'{head}model'] = model
            if not steady:
                persistence = mean(scores['persistence'][name])
                row[f'{head}persistence'] = persistence
                row[f'{head}ratio'] = f'{persistence / max(model, 1e-12):.1f}x'
        remarks = []
        if steady:
            remarks.append(f'median relative L1 {scores["model"]["l1"].median().item():.4f}')
        if failures := int((~scores['model']['rollout'].isfinite()).sum()):
            remarks.append(f'{failures} not finite')
        row[''] = ', '.join(remarks)
        rows[dataset] = row
    return terminal.table(f'{scoring} scoring\n\ndataset', rows)


def tables_side_by_side(results, scoring='native', names=MAIN):
    """Lines of a table for each of `names`, of {checkpoint: {dataset: score(...)}}."""
    lines = []
    first = next(iter(results.values()))
    for name in names:
        rows = {}
        for dataset in (dataset for dataset, scores in first.items() if name in shown(scores, names)):
            rows[dataset] = {model: mean(sets[dataset]['model'][name]) for model, sets in results.items()}
            if not first[dataset]['steady']:
                rows[dataset]['persistence'] = mean(first[dataset]['persistence'][name])
        if rows:
            title = f'{METRICS[name].title} of {METRICS[name].of}, {scoring} scoring'
            lines += terminal.table(title, rows, best='row')
    return lines


# ------------------------------------------------------------------------------------------------ the command

def test_sets(models, args, processes, rows=None):
    """{checkpoint: its data.Trajectories, at most `rows` of each, of the datasets that the command is on}.

    These are --datasets, those of the training, or with another --data all. Those of a built-in mixture are generated
    if need be. A warning names the first checkpoint that was trained with other test sets in the same folder.
    """
    folder = args.data or commands.agreed(models, 'data')
    names = args.datasets
    if not names and all(opened.run.data == folder for opened in models):
        names = commands.agreed(models, 'datasets')
    absent = [name for name in names if not Path(folder, name, 'test.h5').exists()]
    if absent and not args.data and processes.rank == 0:
        from sources import generate  # the solvers, where data have to be made
        generate.builtin_tests(folder, absent, processes.device)
    distributed.wait(processes)
    names = data.find(folder, names, 'test')
    for opened in models if processes.rank == 0 else ():
        if Path(opened.run.data).resolve() == Path(folder).resolve():
            if difference := data.difference(opened.fingerprints, data.headers(folder, names, ['test'])):
                terminal.warn(f'{opened.path}: the data in {folder} have changed since it was trained: {difference}')
                break
    return {opened.name: [dataset_of(opened, folder, name, rows) for name in names] for opened in models}


def dataset_of(opened, folder, name, rows=None):
    """The test data.Trajectories of a dataset, at most `rows`, as the network of a commands.Opened takes them."""
    config = opened.model.config
    return data.Trajectories(folder, name, 'test', config.frames, config.channels, rows=rows,
                             dims=config.dims)


def print_scores(models, args, processes, report):
    """The default: the scores of one checkpoint in one table, of several, or with --metrics, a table a metric."""
    commands.agreed(models, 'frames')
    if args.scoring == 'paper':
        commands.agreed(models, 'resolution')
    sets = test_sets(models, args, processes)
    results = {}
    for opened in models:
        scores = score_all(opened.model, sets[opened.name], processes, args.batch_size, args.dtype, args.scoring)
        results[opened.name] = scores
        report['models'][opened.name].update(scoring=args.scoring, datasets=scores)
    if len(models) == 1 and not args.metrics:
        return table(scores, args.scoring)
    return tables_side_by_side(results, args.scoring, METRICS if args.metrics else MAIN)


def main():
    parser = commands.evaluation_parser(__doc__, 'the errors, spectra and fields of --rollout')
    add = parser.add_argument
    add('--scoring', default='native', choices=('native', 'paper'), help='paper: on the model grid, as DPOT [native]')
    add('--metrics', action='store_true', help='print nRMSE, VRMSE and relative L1 too')
    add('--rollout', type=int, metavar='N', help='roll out N steps, along the test data where they are so long')
    add('--samples', type=int, default=8, metavar='N', help='trajectories of --rollout [8]')
    args = parser.parse_args()
    configs.at_least(1, samples=args.samples)
    if args.rollout is not None:
        configs.bounded('rollout', args.rollout, least=1, most=100_000)
        if args.metrics or args.scoring == 'paper':
            raise InputError('--metrics and --scoring paper are for the test frames; leave --rollout out')
    elif args.figures:
        raise InputError('--figures: of what? add --rollout N')
    if args.rollout is None:
        commands.execute(args, print_scores)
    else:
        from lab import rollouts  # here, because it imports this file
        commands.execute(args, rollouts.roll_out)


if __name__ == '__main__':
    terminal.cli(main)
