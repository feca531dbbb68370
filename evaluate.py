"""Score trained models: one step, rollouts over the test trajectories, and rollouts of 500 steps.

    python evaluate.py                          the newest checkpoint under out/, on the data that it was trained on
    python evaluate.py --checkpoint out/tiny/best.pt --data data --datasets swe_pdb dr_pdb --json scores.json
    python evaluate.py --checkpoint out/*/best.pt       several checkpoints, side by side
    python evaluate.py --rollout 500            of what it was trained on; the FNO family along long trajectories of our
                                                own solver, which are made once and kept beside its test data
    python evaluate.py --rollout 500 --datasets swe_pdb         without a reference: energy, extrema and spectrum
    python evaluate.py --scoring paper --metrics        as DPOT scores, on the model grid; with nRMSE and VRMSE
    python evaluate.py --fields --gif --figures out/figures       rollouts in pictures
    torchrun --standalone --nproc_per_node=8 evaluate.py          the same numbers, sooner

The architecture, the resolution and the data folder come from the checkpoint. Each dataset is scored on its native grid
against its original data, on the channels that evolve. Padding and static channels are never scored; in a rollout they
keep their known values. --scoring paper differs only in the grid, and a table never mixes the two scorings.

Shapes: B batch, T input frames, F predicted frames, N trajectories, C field channels of the model, C' of the dataset,
C'' of those that evolve; (*space) are the grid points of the model, (*space') those of the dataset.
"""
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import configs
from configs import InputError, Progress

import torch

import aotpot
import checkpoint
import data
import distributed
import generate

FAMILY = 'ns2d_fno_1e-3'                        # the dataset family of the long rollouts (paper, Sec. 5.3)
MARKS = (20, 50, 100, 200, 500)                 # the steps at which they are reported
MARGIN = 0.1                    # widens the training range, which most test data leave otherwise


# ------------------------------------------------------------------------------------------------ metrics

class Comparison(NamedTuple):
    """What a metric is computed from: a prediction u beside the truth v, at the points x where they are scored."""
    error: torch.Tensor         # (F, B, C'') float64: sum_x (u - v)^2 of each frame
    size: torch.Tensor          # (F, B, C'') float64: sum_x v^2
    deviation: torch.Tensor     # (F, B, C'') float64: sum_x (v - mean_x v)^2
    prediction: torch.Tensor    # (B, *points, C''): u of the last frame
    target: torch.Tensor        # (B, *points, C''): v of the last frame


def squares(x):
    """Sums of squares over the grid, (B, *space, C) -> (B, C)."""
    return x.square().flatten(1, -2).sum(1)


def l2re(error, size):
    """Relative L2 error sqrt(error / size) of sums of squares (..., C) -> (...), the mean over the channels."""
    return (error.double() / size.double().clamp_min(1e-14)).sqrt().mean(-1)


def relative_l1(prediction, target):
    """||prediction - target||_1 / ||target||_1 of each sample, over all points and channels: (B, ..., C) -> (B,)."""
    error, size = (x.flatten(1).abs().sum(1) for x in (prediction - target, target))
    return error / size.clamp_min(1e-7)


def l2re_over_all_frames(compared):
    """sqrt(sum_tx (u-v)^2 / sum_tx v^2), the mean over the channels: (B,). DPOT's l2_full."""
    return l2re(compared.error.sum(0), compared.size.sum(0))


def nrmse(compared):
    """mean_t sqrt(mean_x (u-v)^2 / mean_x v^2), the mean over the channels: (B,). PDEBench's nRMSE, DPOT's l2_step."""
    return l2re(compared.error, compared.size).mean(0)


def vrmse(compared):
    """mean_t sqrt(mean_x (u-v)^2 / var_x v), the mean over the channels: (B,). The Well adds 1e-7 to the variance.

    It is 1 for a prediction of the mean of each frame, and huge where a true frame is constant.
    """
    return l2re(compared.error, compared.deviation).mean(0)


class Metric(NamedTuple):
    """One entry of METRICS."""
    title: str                  # in tables
    of: str                     # the prediction that it scores: 'rollout' or 'one step', see `score`
    function: Callable          # Comparison -> (B,)


METRICS = {                     # a new metric is a function above and a line here; its key is its name in JSON
    'rollout': Metric('L2RE', 'rollout', l2re_over_all_frames),
    'step': Metric('L2RE', 'one step', nrmse),
    'nrmse': Metric('nRMSE', 'rollout', nrmse),
    'vrmse': Metric('VRMSE', 'rollout', vrmse),
    'l1': Metric('relative L1', 'one step', lambda compared: relative_l1(compared.prediction, compared.target)),
}
MAIN = ('rollout', 'step')      # always printed; the others with --metrics
SUFFIXES = ('', '_persistence')                 # of names: the model's number, and that of persistence


# ------------------------------------------------------------------------------------------------ prediction

class Predictor:
    """A model as a time stepper of one dataset: `step` maps a state on the model grid to the next one.

    like: the data.Trajectories whose grid and channels are scored. dtype: 'bf16' runs the model under autocast.
    scoring: 'native' brings the prediction to the dataset's grid and scores it against the original data. 'paper', as
    DPOT, brings the truth to the model grid and scores every (model // native)-th point there. The two agree only if
    the grids do: the points of 'paper' lie between the native ones, where the truth is smoothed by interpolation.

    Raises InputError for 'paper' if the native grid does not divide the model grid. (DPOT then rounds the factor down,
    to at least 1, and scores more points than the native grid has, or all model points if the native grid is finer.)
    """

    def __init__(self, model, like, device, dtype='fp32', scoring='native'):
        self.model, self.like = model, like
        self.config = model.config
        self.points = None
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
        with self.autocast:
            u = self.model(state)
        u = torch.where(self.known, state[:, -1], u.to(state.dtype))
        return torch.cat([state[:, 1:], u[:, None]], dim=1)

    def scored(self, state):
        """The newest frame of a state at the points that are scored: (B, *points, C''); by default the native grid."""
        if self.points is None:
            return data.to_native(state[:, -1:], self.like)[:, 0]
        return state[:, -1, ..., self.like.evolving][self.points]

    def truth(self, frame):
        """A native frame (B, *space', C') at the points that are scored: (B, *points, C'')."""
        frame = frame[..., self.like.evolving]
        return frame if self.points is None else data.resize(frame[:, None], self.config.resolution)[:, 0][self.points]


# ------------------------------------------------------------------------------------------------ scores

@torch.no_grad()
def score(model, test, processes, batch_size=16, dtype='fp32', limit=None, steps=None, scoring='native'):
    """The METRICS of every test trajectory: {name: (N,) float64}, equal on all processes.

    Predictions over t_test frames: 'rollout' starts from the first T frames and goes on from its own predictions; 'one
    step' predicts each frame from T true ones. The persistence beside each, '<name>_persistence', repeats the newest
    true frame that it was given; in a steady problem that is the input. Input frames are never scored.

    limit: at most so many trajectories; steps: at most so many frames; scoring: see Predictor. Each process takes every
    world_size-th trajectory. Raises as Predictor.
    """
    T, count, frames = model.config.frames, min(test.count, limit or test.count), min(test.t_test, steps or test.t_test)
    predictor = Predictor(model, test, processes.device, dtype, scoring)
    names = {name + suffix: (metric.function, metric.of + suffix)
             for name, metric in METRICS.items() for suffix in SUFFIXES}
    scores = {name: torch.zeros(count, dtype=torch.float64) for name in names}
    for batch in processes.batches(count, batch_size):
        truth = data.read_frames(test, batch, 0, T + frames, processes.device)               # (B, T+F, *space', C')
        state, first, sums = predictor.state(truth[:, :T]), predictor.truth(truth[:, T - 1]), []
        previous = first
        for t in range(frames):
            target = predictor.truth(truth[:, T + t])
            state = predictor.step(state)
            after_truth = predictor.step(predictor.state(truth[:, t:T + t])) if t else state    # the first is the same
            predictions = {'rollout': predictor.scored(state), 'rollout_persistence': first,
                           'one step': predictor.scored(after_truth), 'one step_persistence': previous}
            deviation = target - target.mean(tuple(range(1, target.ndim - 1)), keepdim=True)
            sums.append({'size': squares(target), 'deviation': squares(deviation),
                         **{name: squares(u - target) for name, u in predictions.items()}})
            previous = target
        sums = {name: torch.stack([frame[name] for frame in sums]).cpu().double() for name in sums[0]}  # (F, B, C'')
        for name, (function, of) in names.items():
            compared = Comparison(sums[of], sums['size'], sums['deviation'], predictions[of], target)
            scores[name][list(batch)] = function(compared).cpu().double()
    return dict(zip(scores, processes.sum(torch.stack([*scores.values()]))))


def evaluate(model, sets, processes, batch_size=16, dtype='fp32', scoring='native'):
    """`score` of every data.Trajectories in `sets`: {name: scores, 'frames', 'steady'}. Raises as `Predictor`."""
    results = {}
    for test in sets:
        Predictor(model, test, processes.device, dtype, scoring)    # refuses a dataset before the first one is scored
    for test in Progress(sets, desc='evaluating', disable=processes.rank > 0, leave=False):
        results[test.name] = {**score(model, test, processes, batch_size, dtype, scoring=scoring),
                              'frames': test.t_test, 'steady': test.steady}
    return results


def mean(scores):
    """The mean over samples; a sample that diverged makes it inf and is not averaged away."""
    value = scores.mean().item()
    return value if math.isfinite(value) else math.inf


def table(results, scoring='native', metrics=MAIN):
    """Lines of the table of {dataset: score(...)}: of each metric the model, persistence and their ratio."""
    rows = {}
    for name, scores in results.items():
        rows[name] = row = {'tests': len(scores['rollout']), 'frames': scores['frames']}
        for metric in metrics:
            model, persistence = (mean(scores[metric + suffix]) for suffix in SUFFIXES)
            head = f'{METRICS[metric].title}\n{METRICS[metric].of}\n'
            row |= {f'{head}model': model, f'{head}persistence': persistence,
                    f'{head}ratio': f'{persistence / max(model, 1e-12):.1f}x'}
        diverged = int((~scores['rollout'].isfinite()).sum())
        row[''] = ', '.join([f'median relative L1 {scores["l1"].median().item():.4f}'] * bool(scores.get('steady'))
                            + [f'{diverged} not finite'] * bool(diverged))
    return configs.table(f'{scoring} scoring\n\ndataset', rows)


# ------------------------------------------------------------------------------------------------ long rollouts

@torch.no_grad()
def along_rollout(model, test, processes, steps, measure, shape, batch_size=16, dtype='fp32'):
    """measure(u, t, batch, first) of each frame of the rollouts from the first T frames: (steps, N, *shape) float64.

    u (B, *space', C'') is the prediction of step t, from 0, on the native grid; batch holds the indices of the
    trajectories, first (B, T, *space', C') their input frames. `measure` returns (B, *shape). Nothing is copied from
    the device before a batch has ended. The result is equal on all processes.
    """
    predictor = Predictor(model, test, processes.device, dtype)
    found = torch.zeros(steps, test.count, *shape, dtype=torch.float64)
    for batch in processes.batches(test.count, batch_size):
        first = data.read_frames(test, batch, 0, model.config.frames, processes.device)
        state, along = predictor.state(first), []
        for t in Progress(range(steps), desc='rollout', unit='step', disable=processes.rank > 0, leave=False):
            state = predictor.step(state)
            along.append(measure(predictor.scored(state), t, batch, first))
        found[:, list(batch)] = torch.stack(along).cpu().double()
    return processes.sum(found)


def rollout_curve(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """L2RE against step: {'step', 'step_persistence', 'full', 'full_persistence': (steps, N) float64}.

    'step' is that of the frame of the step, 'full' that of all frames so far. The reference is read frame by frame.
    """
    def sums(u, t, batch, first):
        frames = first[:, -1], data.read_frames(test, batch, T + t, T + t + 1, processes.device)[:, 0]
        persistence, target = (frame[..., test.evolving] for frame in frames)
        return torch.stack([squares(x) for x in (target, u - target, persistence - target)], 1)         # (B, 3, C'')

    T, curves = model.config.frames, {}
    shape = 3, len(test.evolving)
    size, *errors = along_rollout(model, test, processes, steps, sums, shape, batch_size, dtype).unbind(2)
    for suffix, error in zip(SUFFIXES, errors):
        curves['step' + suffix] = l2re(error, size)
        curves['full' + suffix] = l2re(error.cumsum(0), size.cumsum(0))
    return curves


def long_reference(folder, steps, samples, config, processes):
    """Trajectories of T + steps frames, at least 11, of the FNO family, made by our solver if they are new.

    They are kept in folder/<family>/ beside its test.h5, which the caller has found there.
    Raises InputError for a grid that the solver does not make.
    """
    frames, resolution = max(config.frames + steps, 11), config.resolution          # generate.py makes no fewer
    split = f'rollout{frames}_{configs.show(resolution)}_{samples}'
    path = Path(folder) / FAMILY / f'{split}.h5'
    if resolution[0] != resolution[-1] or len(resolution) != 2:
        raise InputError(f'--rollout: the solver makes square 2-D grids, the checkpoint has {configs.show(resolution)}')
    if processes.rank == 0 and not path.exists():
        print(f'making {samples} reference trajectories of {frames} frames in {path}', flush=True)
        plan = generate.plan(FAMILY, resolution=resolution[0], frames=frames)._replace(counts={split: samples})
        generate.write(folder, [plan], device=processes.device)
    distributed.wait(processes)
    return data.Trajectories(folder, FAMILY, split, config.frames, config.channels)


def reported_steps(steps):
    """The steps of a rollout that are reported."""
    return [mark for mark in MARKS if mark < steps] + [steps]


def rollout_table(curves, steps):
    """Lines of the table of a long rollout and its numbers as a dict (paper, Table 3)."""
    marks = reported_steps(steps)
    rows, cells, growth = {}, {}, f'{marks[0]} to {marks[-1]}'
    for name, title in (('step', 'model, at the step'), ('full', 'model, over all so far'),
                        ('step_persistence', 'persistence, at the step')):
        values = {str(mark): mean(curves[name][mark - 1]) for mark in marks}
        rows[name] = {**values, 'growth': values[str(marks[-1])] / max(values[str(marks[0])], 1e-12)}
        cells[title] = {**values, growth: f'{rows[name]["growth"]:.1f}x'}
    error = curves['step']
    beyond = (~(error <= 1)).any(1).nonzero().flatten()                 # NaN counts too
    rows['first_step_past_1'] = int(beyond[0]) + 1 if len(beyond) else None
    rows['non_finite'] = (~error.isfinite()).sum().item()
    return [*configs.table('L2RE at step', cells),
            f'first step at which a sample has an error above 1: {rows["first_step_past_1"] or "none"}; '
            f'non-finite errors: {rows["non_finite"]} of {error.numel()}'], rows


# ------------------------------------------------------------------------------------------------ without a reference

def rollout_without_reference(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """`field_statistics` of the rollouts, of the evolving channels on the native grid: (steps, N, M, C'') float64."""
    bands = data.octave_bands(test.space)[1].to(processes.device)
    return along_rollout(model, test, processes, steps, lambda u, *_: data.field_statistics(u, bands),
                                  (4 + bands.shape[1], len(test.evolving)), batch_size, dtype)


def first_step_outside_range(found, within):
    """The first step, from 1, at which a sample leaves the range `within` by more than MARGIN, or 0: (N,) integers.

    found (steps, N, M, C''); within (2, M, C''), the smallest and the largest. What is not finite is outside.
    """
    margin = MARGIN * within.abs().amax(0)
    margin[1:4] = MARGIN * within[1, 0].sqrt()      # for values their size, as the mean may be 0 in all training data
    beyond = ~((found >= within[0] - margin) & (found <= within[1] + margin)).flatten(2).all(2)
    return torch.where(beyond.any(0), beyond.int().argmax(0) + 1, 0)


def table_without_reference(found, within, names, channels):
    """Lines of the table of `rollout_without_reference`, and its numbers as a dict: means over the samples.

    within (2, M, C''): the smallest and the largest in training; names: of the M statistics; channels: of the C''.
    """
    lines, first, rows = [], first_step_outside_range(found, within), {}
    for c, channel in enumerate(channels):
        rows[channel] = {name: {'from': within[0, m, c].item(), 'to': within[1, m, c].item(),
                                **{f'step {mark}': mean(found[mark - 1, :, m, c])
                                   for mark in reported_steps(len(found))}}
                         for m, name in enumerate(names)}
        lines += configs.table(f'{channel}: range in training', rows[channel], '.3g')
    lines.append(f'outside the training range: {(first > 0).sum()} of {len(first)} samples'
                 + (f', the first at step {first[first > 0].min()}' if first.any() else ''))
    return lines, {'statistics': rows, 'first_step_outside': [step or None for step in first.tolist()]}


# ------------------------------------------------------------------------------------------------ the checkpoints

class Opened(NamedTuple):
    """A checkpoint on the command line; `name` stands for it in tables, JSON and figures."""
    name: str
    path: Path
    step: int
    model: aotpot.AOTPOT
    run: configs.RunConfig
    finetuned: bool

    def dataset(self, folder, name, split='test', rows=None):
        """The data.Trajectories of a dataset, at most `rows`, as the network takes them. Raises InputError as they do.
        """
        config = self.model.config
        return data.Trajectories(folder, name, split, config.frames, config.channels, self.run.coefficients, rows,
                                 config.dims)


def open_checkpoints(paths, form='fast', network=''):
    """The checkpoints at `paths`, their networks on the CPU; no optimiser is kept. form, network: of aotpot.load."""
    paths, opened = [checkpoint.locate(path) for path in paths], []
    for name, path in zip(checkpoint.short_names(paths), paths):
        saved = checkpoint.read(path)
        opened.append(Opened(name, path, saved['step'], aotpot.from_checkpoint(saved, form, network),
                             configs.RunConfig(**saved['config'].get('run', {})), 'finetune' in saved['config']))
    return opened


def each_on_device(models, processes):
    """The checkpoints one after the other, each on the device for as long as it is used."""
    for item in models:
        item.model.to(processes.device)
        yield item
        item.model.cpu()


def agreed(models, field):
    """The value of a field of ModelConfig or RunConfig in all checkpoints. Raises InputError if two differ in it."""
    values = [{**vars(item.model.config), **vars(item.run)}[field] for item in models]
    for item, value in zip(models, values):
        if value != values[0] and (field != 'datasets' or {*value} != {*values[0]}):        # in whatever order
            raise InputError(f'--checkpoint: {models[0].name} and {item.name} differ in {field}, '
                             f'{configs.show(values[0])} and {configs.show(value)}; '
                             + (f'say which with --{field}' if field in ('data', 'datasets') else 'give one'))
    return values[0]


def data_folder(models, args):
    """The folder of the datasets: --data, or the one where all checkpoints were trained."""
    folder = args.data or agreed(models, 'data')
    if not folder:
        raise InputError(f'--data is needed: {models[0].path} does not say what it was trained on')
    return folder


def test_sets(models, args, names=()):
    """{checkpoint: [test sets]} in one order: `names`, --datasets, those of the training, or with another --data all.

    Raises InputError if neither is given and the checkpoints were not trained on the same datasets.
    """
    folder = data_folder(models, args)
    names = test_names(models, args, folder, names)
    return {item.name: [item.dataset(folder, name) for name in names] for item in models}


def test_names(models, args, folder, names=()):
    """The names of the `test_sets` in one order. Raises InputError as these do."""
    names = names or args.datasets
    if not names and all(item.run.data == folder for item in models):
        names = agreed(models, 'datasets')
    return data.find(folder, names, 'test')


# ------------------------------------------------------------------------------------------------ all commands

def run(args, mode):
    """Open the checkpoints, print the lines that mode(models, args, processes, report) returns, write the report.

    The report goes to --json: {'models': {name: {'checkpoint', 'step', 'parameters'}}}, to which the mode adds. On all
    ranks but 0, the mode finds --figures empty. Raises InputError, before anything is read, for a place where nothing
    can be written and for --figures without matplotlib.
    """
    configs.at_least(1, batch_size=args.batch_size)
    if args.figures:
        import figures
        figures.pyplot()
    processes, report = distributed.setup(args.device), {'models': {}}
    if processes.rank > 0:
        args.figures = args.json = ''
    if args.figures:
        configs.writable('figures', args.figures)
    if args.json:
        configs.writable('json', args.json, file=True)
    models = open_checkpoints(args.checkpoint or [checkpoint.newest()], args.form, args.network)
    for name, path, step, model, trained, finetuned in models:
        config, parameters = model.config, aotpot.parameters(model)
        processes.print(f'{path}: step {step}, {config.title}, {parameters:,} parameters, '
                        f'{configs.show(config.resolution)} grid, on {processes.device}'
                        + (f', fine-tuned from {trained.init_from or "random weights"}' if finetuned else ''))
        report['models'][name] = {'checkpoint': str(path), 'step': step, 'parameters': parameters}
    try:
        for line in mode(models, args, processes, report):
            processes.print(line)
        if args.json:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            with configs.replacing(args.json) as part:
                part.write_text(as_json(report))
    except BrokenPipeError:                         # of our output, which is for configs.cli
        raise
    except OSError as error:                        # what cannot be read is an InputError already
        raise InputError(f'a file cannot be written: {error}') from None


def as_json(report):
    """The text of a report. A tensor becomes its mean and the values of all samples, and what is not finite null."""
    text = json.dumps(report, default=lambda x: {'mean': x.mean().item(), 'samples': x.flatten().tolist()})
    return json.dumps(json.loads(text, parse_constant=lambda name: None), indent=1)


# ------------------------------------------------------------------------------------------------ the command

def score_all(models, args, processes, report, names=()):
    """{checkpoint: `evaluate` of its test sets}, which goes into report['models'][checkpoint]['datasets'] too."""
    for field in ('frames', 'resolution')[:1 + (args.scoring == 'paper')]:
        agreed(models, field)
    sets, results = test_sets(models, args, names), {}
    for item in each_on_device(models, processes):
        results[item.name] = evaluate(item.model, sets[item.name], processes, args.batch_size, args.dtype,
                                      scoring=args.scoring)
        report['models'][item.name].update(scoring=args.scoring, datasets=results[item.name])
    return results


def print_scores(models, args, processes, report):
    """The default: the scores of one checkpoint in one table, those of several in a table for each metric."""
    results = score_all(models, args, processes, report)
    first, others = results[models[0].name], [kind for kind in METRICS if kind not in MAIN]
    if len(models) == 1:
        return [line for metrics in (MAIN, others)[:1 + args.metrics] for line in table(first, args.scoring, metrics)]
    return [line for kind in (*MAIN, *others * args.metrics)
            for line in configs.table(f'{METRICS[kind].title} of {METRICS[kind].of}, {args.scoring} scoring', {
                test: {**{model: mean(scores[test][kind]) for model, scores in results.items()},
                       'persistence': mean(first[test][f'{kind}_persistence'])} for test in first}, best='row')]


def roll_out(models, args, processes, report):
    """--rollout of `test_names`, without the steady ones; report['models'][name]['rollout'] gets {dataset: numbers}.

    The reference of the FNO family is made by our solver if --datasets names it or all models were trained on it; the
    other datasets have their test trajectories, if these are long enough. Without a reference, the statistics of the
    rollout are compared with those of the training split. Raises InputError if one of --datasets is steady, or all are.
    """
    agreed(models, 'resolution')
    T, folder, samples, lines = agreed(models, 'frames'), data_folder(models, args), args.samples or 8, []
    names = test_names(models, args, folder)
    steady = [name for name in names if models[0].dataset(folder, name).steady]
    names = [name for name in names if name not in steady]
    if steady and (args.datasets or not names):
        raise InputError(f'--rollout: {steady[0]} is steady, there is nothing to roll out')
    solved = bool(args.datasets) or all(FAMILY in item.run.datasets for item in models)
    for name in names:
        sets = {item.name: long_reference(folder, args.rollout, samples, item.model.config, processes)
                if name == FAMILY and solved else item.dataset(folder, name, rows=samples) for item in models}
        compare = with_reference if sets[models[0].name].frames >= T + args.rollout else without_reference
        more, rows = compare(models, sets, args, processes, f'_{name}' if len(names) > 1 else '')
        lines += [f'{name}:', *more] if compare is with_reference else more
        for item in models:
            report['models'][item.name].setdefault('rollout', {})[name] = rows[item.name]
    return lines


def with_reference(models, sets, args, processes, suffix):
    """The lines and {checkpoint: numbers} of a rollout along the trajectories of `sets`, and its figure."""
    curves = {item.name: rollout_curve(item.model, sets[item.name], processes, args.rollout, args.batch_size,
                                       args.dtype) for item in each_on_device(models, processes)}
    if args.figures:
        import figures
        figures.save(args.figures, f'rollout{suffix}', figures.plot_rollout(curves))
    rows = {}
    for name, curve in curves.items():
        lines, rows[name] = rollout_table(curve, args.rollout)
        rows[name]['curve'] = [mean(step) for step in curve['step']]
    if len(models) > 1:
        at = {**{name: row['step'] for name, row in rows.items()},
              'persistence': rows[models[0].name]['step_persistence']}
        lines = configs.table('L2RE at step', {name: {step: row[step] for step in row if step != 'growth'}
                                               for name, row in at.items()}, '.5f', 'column')
    return lines, rows


def without_reference(models, sets, args, processes, suffix):
    """The lines and {checkpoint: numbers} of a rollout beside the range of the training split, and its figure."""
    test, found, rows = sets[models[0].name], {}, {}
    names = ['energy', 'mean', 'least', 'largest', *data.octave_bands(test.space)[0]]
    channels = [test.channel_names[c] for c in test.evolving]
    train = models[0].dataset(test.path.parent.parent, test.name, 'train')
    within = torch.stack(data.split_statistics(train, processes).flatten(0, 1).aminmax(dim=0))
    own = first_step_outside_range(data.split_statistics(test, processes).transpose(0, 1), within)
    lines = [f'{test.name}: no reference of {args.rollout} steps; {(own > 0).sum()} of the {len(own)} true test '
             f'trajectories leave the training range by {MARGIN:.0%}']
    for item in each_on_device(models, processes):
        found[item.name] = rollout_without_reference(item.model, sets[item.name], processes, args.rollout,
                                                     args.batch_size, args.dtype)
        more, rows[item.name] = table_without_reference(found[item.name], within, names, channels)
        lines += [f'{item.name}:', *more] if len(models) > 1 else more
    if args.figures:
        import figures
        figures.save(args.figures, f'free{suffix}', figures.plot_rollout_without_reference(
            found, within, names, channels, test.name))
    return lines, rows


def rollout_of_channel(model, test, processes, channel, steps, dtype='fp32'):
    """A rollout of one channel of the first trajectory on the native grid: truth, prediction (steps, H, W), on the CPU.

    In 3-D these are the middle slice of the last axis.
    """
    T, c = model.config.frames, test.channel_names.index(channel)
    at = test.evolving.index(c)
    predicted = along_rollout(model, test, processes, steps, lambda u, *_: u[..., at], test.space, 1, dtype)[:, 0]
    truth = torch.from_numpy(test.read(0, T, T + steps)[..., c])
    return [u if u.ndim == 3 else u[..., u.shape[-1] // 2] for u in (truth, predicted.float())]


def draw_fields(models, args, processes, report):
    """--fields: a rollout of one trajectory of each dataset as DIR/<dataset>_<channel>.png, with --gif as .gif too.

    Raises InputError, before any is drawn, for a channel, step or trajectory that a dataset does not have.
    """
    T, folder, plans, trajectory = agreed(models, 'frames'), data_folder(models, args), [], args.trajectory or 0
    for test in test_sets(models, args)[models[0].name]:
        known = [test.channel_names[channel] for channel in test.evolving]
        channel, most = args.channel or known[0], test.frames - T
        steps = args.steps or sorted({1 + round(i * (test.t_test - 1) / 3) for i in range(4)})
        if channel not in known:
            raise InputError(f'--channel {channel}: {test.name} does not predict it{configs.nearest(channel, known)}')
        if max(steps) > most:
            raise InputError(f'--steps {max(steps)}: {test.name} has {most} frames after the {T} that go in')
        if trajectory >= test.count:
            raise InputError(f'--trajectory {trajectory}: {test.name} has 0 to {test.count - 1}')
        plans.append((test.name, channel, steps))
    for name, channel, steps in plans:
        predictions, title = {}, f'{name}, test trajectory {trajectory}'
        for item in each_on_device(models, processes):
            truth, predictions[item.name] = rollout_of_channel(
                item.model, item.dataset(folder, name, rows=[trajectory]), processes, channel, max(steps), args.dtype)
        if args.figures:
            import figures
            figures.save(args.figures, f'{name}_{channel}', figures.plot_fields(
                truth, predictions, steps, channel, title))
            if args.gif:
                figures.save(args.figures, f'{name}_{channel}', figures.animate_fields(
                    truth, predictions, channel, title))
    return []


def parse():
    """The flags and the mode. Raises InputError for flags that contradict one another or would change nothing."""
    parser = configs.evaluation_parser(__doc__, 'what --rollout or --fields gives')
    parser.add_argument('--metrics', action='store_true', help='print nRMSE, VRMSE and relative L1 too')
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument('--rollout', type=int, metavar='N',
                         help='roll out N steps of each dataset instead, along its test trajectories, or of '
                              f'{FAMILY} along longer ones of our own solver; without trajectories of that length '
                              'compare with the range of its training data')
    instead.add_argument('--fields', action='store_true', help='with --figures: draw the fields of rollouts instead')
    parser.add_argument('--samples', type=int, metavar='N', help='trajectories of --rollout [8]')
    parser.add_argument('--channel', metavar='NAME', help='channel of --fields; default: the first')
    parser.add_argument('--steps', type=int, nargs='+', metavar='N', help='steps of --fields; default: four')
    parser.add_argument('--trajectory', type=int, metavar='I', help='test trajectory of --fields [0]')
    parser.add_argument('--gif', action='store_true', default=None,
                        help='animate --fields too, up to the last of --steps')
    args = parser.parse_args()
    mode = roll_out if args.rollout is not None else draw_fields if args.fields else print_scores
    options = {'samples': 'rollout', 'channel': 'fields', 'steps': 'fields', 'trajectory': 'fields', 'gif': 'fields'}
    configs.bounded('rollout', 1 if args.rollout is None else args.rollout, least=1, most=100_000)
    configs.at_least(0, trajectory=args.trajectory or 0)
    configs.at_least(1, steps=min(args.steps or [1]), samples=1 if args.samples is None else args.samples)
    for wrong, message in (
            *((getattr(args, name) is not None and not getattr(args, of), f'--{name} is an option of --{of}; add it')
              for name, of in options.items()),
            (args.metrics and mode is not print_scores,
             '--metrics adds a table to the scores over the test frames; leave --rollout or --fields out'),
            (args.scoring == 'paper' and mode is not print_scores,
             '--scoring paper is for the scores over the test frames; --rollout and --fields are native'),
            (args.fields and not args.figures, '--fields: into which folder? add --figures DIR'),
            (args.figures and mode is print_scores, '--figures: of what? add --fields or --rollout N')):
        if wrong:
            raise InputError(message)
    return args, mode


def main():
    run(*parse())


if __name__ == '__main__':
    configs.cli(main)
