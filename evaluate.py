"""Score trained models: one step, rollouts over the test trajectories, and rollouts of 500 steps.

    python evaluate.py                          the newest checkpoint under out/, on the data that it was trained on
    python evaluate.py --checkpoint out/tiny/best.pt --data data --datasets swe_pdb dr_pdb --json scores.json
    python evaluate.py --checkpoint out/*/best.pt       several checkpoints, side by side
    python evaluate.py --rollout 500            along long trajectories of our own solver, which are made once and kept
    python evaluate.py --rollout 500 --datasets swe_pdb         without a reference: energy, extrema and spectrum
    python evaluate.py --scoring paper --metrics        as DPOT scores, on the model grid; with nRMSE and VRMSE
    python evaluate.py --fields --gif --figures figures         rollouts in pictures
    torchrun --standalone --nproc_per_node=8 evaluate.py          the same numbers, sooner

The architecture, the resolution and the data folder come from the checkpoint. Each dataset is scored on its native grid
against its original data, on the channels that evolve. Padding and static channels are never scored; in a rollout they
keep their known values. --scoring paper differs only in the grid, and a table never mixes the two scorings.

Shapes: B batch, T input frames, F predicted frames, N trajectories, C field channels of the model, C' of the dataset,
C'' of those that evolve; (*space) are the grid points of the model, (*space') those of the dataset.
"""
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import configs
from configs import InputError

import torch
from tqdm import tqdm

import commands
import data
import distributed
import generate

FAMILY = 'ns2d_fno_1e-3'                        # the dataset family of the long rollouts (paper, Sec. 5.3)
MARKS = (20, 50, 100, 200, 500)                 # the steps at which they are reported
MARGIN = 0.1                                    # widens the training range, which most test data leave otherwise


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


def l1_of_last_frame(compared):
    """sum_x |u-v| / sum_x |v| of the last frame, both sums over the channels too: (B,)."""
    return relative_l1(compared.prediction, compared.target).cpu().double()


class Metric(NamedTuple):
    """One entry of METRICS."""
    title: str                  # in tables
    of: str                     # the prediction that it scores: 'rollout' or 'one step', see `score`
    function: Callable          # Comparison -> (B,) float64


METRICS = {                     # a new metric is a function above and a line here; its key is its name in JSON
    'rollout': Metric('L2RE', 'rollout', l2re_over_all_frames),
    'step': Metric('L2RE', 'one step', nrmse),
    'nrmse': Metric('nRMSE', 'rollout', nrmse),
    'vrmse': Metric('VRMSE', 'rollout', vrmse),
    'l1': Metric('relative L1', 'one step', l1_of_last_frame),
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
        self.points = None if scoring == 'native' else scored_points(like, self.config.resolution)
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

    def native(self, state):
        """The newest frame of a state on the native grid: (B, *space', C'')."""
        return data.to_native(state[:, -1:], self.like)[:, 0]

    def scored(self, state):
        """The newest frame of a state at the points that are scored: (B, *points, C'')."""
        return self.native(state) if self.points is None else state[:, -1, ..., self.like.evolving][self.points]

    def truth(self, frame):
        """A native frame (B, *space', C') at the points that are scored: (B, *points, C'')."""
        frame = frame[..., self.like.evolving]
        return frame if self.points is None else data.resize(frame[:, None], self.config.resolution)[:, 0][self.points]


def scored_points(test, resolution):
    """The index into (B, *space, C) on the model grid that takes as many points as the native grid of `test` has.

    Raises InputError if the native grid does not divide the model grid.
    """
    if len(resolution) != len(test.space) or any(size % native for size, native in zip(resolution, test.space)):
        raise InputError(f'--scoring paper: the grid of {test.name}, {configs.show(test.space)}, does not divide the '
                         f'model grid, {configs.show(resolution)}; use --scoring native')
    return slice(None), *(slice(None, None, size // native) for size, native in zip(resolution, test.space))


def read_frames(test, trajectories, start, stop, device):
    """Frames start..stop-1 of several trajectories, as they are stored: (B, stop - start, *space', C') on `device`."""
    return torch.stack([torch.from_numpy(test.read(i, start, stop)) for i in trajectories]).to(device)


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
        truth = read_frames(test, batch, 0, T + frames, processes.device)               # (B, T+F, *space', C')
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
            scores[name][list(batch)] = function(compared)
    return dict(zip(scores, processes.sum(torch.stack([*scores.values()]))))


def evaluate(model, sets, processes, batch_size=16, dtype='fp32', scoring='native'):
    """`score` of every data.Trajectories in `sets`: {name: scores, 'frames', 'steady'}. Raises as `Predictor`."""
    results = {}
    for test in sets if scoring == 'paper' else ():
        scored_points(test, model.config.resolution)        # refuses a dataset before the first one is scored
    for test in tqdm(sets, desc='evaluating', disable=processes.rank > 0, leave=False):
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
        first = read_frames(test, batch, 0, model.config.frames, processes.device)
        state, along = predictor.state(first), []
        for t in tqdm(range(steps), desc='rollout', unit='step', disable=processes.rank > 0, leave=False):
            state = predictor.step(state)
            along.append(measure(predictor.native(state), t, batch, first))
        found[:, list(batch)] = torch.stack(along).cpu().double()
    return processes.sum(found)


def rollout_curve(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """L2RE against step: {'step', 'step_persistence', 'full', 'full_persistence': (steps, N) float64}.

    'step' is that of the frame of the step, 'full' that of all frames so far. The reference is read frame by frame.
    """
    def sums(u, t, batch, first):
        frame, T = first[:, -1, ..., test.evolving], first.shape[1]
        target = read_frames(test, batch, T + t, T + t + 1, processes.device)[:, 0, ..., test.evolving]
        return torch.stack([squares(target), squares(u - target), squares(frame - target)], 1)          # (B, 3, C'')
    shape = 3, len(test.evolving)
    found = along_rollout(model, test, processes, steps, sums, shape, batch_size, dtype).unbind(2)
    return {kind + suffix: l2re(error, size)
            for kind, (size, *errors) in (('step', found), ('full', [x.cumsum(0) for x in found]))
            for suffix, error in zip(SUFFIXES, errors)}


def long_reference(folder, steps, samples, config, processes):
    """Trajectories of T + steps frames, at least 11, of the FNO family in folder/<family>/, made by our solver if new.

    Raises InputError for a grid that the solver does not make, or if they cannot be written.
    """
    frames, resolution = max(config.frames + steps, 11), config.resolution          # generate.py makes no fewer
    split = f'rollout{frames}_{configs.show(resolution)}_{samples}'
    path = Path(folder) / FAMILY / f'{split}.h5'
    if resolution[0] != resolution[-1] or len(resolution) != 2:
        raise InputError(f'--rollout: the solver makes square 2-D grids, the checkpoint has {configs.show(resolution)}')
    if processes.rank == 0 and not path.exists():
        print(f'making {samples} reference trajectories of {frames} frames in {path}', flush=True)
        plan = generate.plan(FAMILY, resolution=resolution[0], frames=frames)._replace(counts={split: samples})
        try:
            generate.write(folder, [plan], device=processes.device)
        except OSError as error:
            raise InputError(f'--rollout: cannot write {path} ({error.strerror or error})') from None
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

def octave_bands(space):
    """Octave bands of wavenumber on a grid: their names, and (modes, bands), 1 where a mode of fftn is in a band.

    |k| counts waves along the longest axis, if all axes have the same spacing. The last band has everything from N/4
    on, where N is the length of that axis rounded down to a power of two.
    """
    count, k = max(1, int(math.log2(max(space))) - 1), [torch.fft.fftfreq(N, 1 / max(space)) for N in space]
    k = torch.stack(torch.meshgrid(*k, indexing='ij')).norm(dim=0).flatten()
    octave = (k + 1e-6).log2().floor().clamp(max=count - 1)             # 1e-6: rounding of k; k = 0 is in no band
    names = [f'k {2 ** b}-{2 ** (b + 1)}' for b in range(count - 1)] + [f'k {2 ** (count - 1)}-']
    return names, (octave[:, None] == torch.arange(count)).float()


def field_statistics(u, bands):
    """Energy, mean, smallest and largest value, and spectrum of fields: (B, *space, C) -> (B, M, C), M = 4 + bands.

    Energy is the mean of u^2. The spectrum is its part in each of `bands`, see `octave_bands`; without the squared mean
    the parts add up to it.
    """
    flat = u.flatten(1, -2)
    power = torch.fft.fftn(u, dim=tuple(range(1, u.ndim - 1)), norm='forward').abs().square().flatten(1, -2)
    moments = torch.stack([flat.square().mean(1), flat.mean(1), flat.amin(1), flat.amax(1)], 1)
    return torch.cat([moments, torch.einsum('bkc,km->bmc', power, bands)], 1)


def split_statistics(split, processes):
    """`field_statistics` of all frames of a data.Trajectories: (N, frames, M, C'') float64, equal on all processes."""
    bands = octave_bands(split.space)[1].to(processes.device)
    found = torch.zeros(split.count, split.frames, 4 + bands.shape[1], len(split.evolving), dtype=torch.float64)
    for i in tqdm(range(processes.rank, split.count, processes.world_size), desc=f'statistics of {split.path}',
                  disable=processes.rank > 0, leave=False):
        frames = read_frames(split, [i], 0, split.frames, processes.device)[0]
        found[i] = field_statistics(frames[..., split.evolving], bands).cpu().double()
    return processes.sum(found)


def rollout_without_reference(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """`field_statistics` of the rollouts, of the evolving channels on the native grid: (steps, N, M, C'') float64."""
    bands = octave_bands(test.space)[1].to(processes.device)
    return along_rollout(model, test, processes, steps, lambda u, *_: field_statistics(u, bands),
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


def score_all(models, args, processes, report, names=()):
    """{checkpoint: `evaluate` of its test sets}, which goes into report['models'][checkpoint]['datasets'] too."""
    commands.input_frames(models, same_grid=args.scoring == 'paper')
    sets, results = commands.test_sets(models, args, names), {}
    for item in commands.each_on_device(models, processes):
        results[item.name] = evaluate(item.model, sets[item.name], processes, args.batch_size, args.dtype,
                                      scoring=args.scoring)
        report['models'][item.name].update(scoring=args.scoring, datasets=results[item.name])
    return results


# ------------------------------------------------------------------------------------------------ the command

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
    """--rollout of the FNO family, or of each of --datasets; the numbers go into report['models'][name]['rollout'].

    The reference of the FNO family is made by our solver; the other datasets have their test trajectories, if these are
    long enough. Without a reference, the statistics of the rollout are compared with those of the training split.
    Raises InputError for a steady dataset.
    """
    T, folder, lines = commands.input_frames(models, same_grid=True), commands.data_folder(models, args), []
    names, samples = data.find(folder, args.datasets, 'test') if args.datasets else [FAMILY], args.samples or 8
    for name in names if args.datasets else ():
        if commands.open_set(models[0], folder, name).steady:
            raise InputError(f'--rollout: {name} is steady, there is nothing to roll out')
    for name in names:
        sets = {item.name: long_reference(folder, args.rollout, samples, item.model.config, processes)
                if name == FAMILY else commands.open_set(item, folder, name, rows=samples) for item in models}
        compare = with_reference if sets[models[0].name].frames >= T + args.rollout else without_reference
        more, rows = compare(models, sets, args, processes, f'_{name}' if len(names) > 1 else '')
        lines += [f'{name}:'] * bool(args.datasets and compare is with_reference) + more
        for item in models:
            place = report['models'][item.name]
            place['rollout'] = {**place.get('rollout', {}), name: rows[item.name]} if args.datasets else rows[item.name]
    return lines


def with_reference(models, sets, args, processes, suffix):
    """The lines and {checkpoint: numbers} of a rollout along the trajectories of `sets`, and its figure."""
    curves = {item.name: rollout_curve(item.model, sets[item.name], processes, args.rollout, args.batch_size,
                                       args.dtype) for item in commands.each_on_device(models, processes)}
    commands.draw(args, processes, f'rollout{suffix}', lambda figures: figures.plot_rollout(curves))
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
    names = ['energy', 'mean', 'least', 'largest', *octave_bands(test.space)[0]]
    channels = [test.channel_names[c] for c in test.evolving]
    train = commands.open_set(models[0], test.path.parent.parent, test.name, 'train')
    within = torch.stack(split_statistics(train, processes).flatten(0, 1).aminmax(dim=0))
    own = first_step_outside_range(split_statistics(test, processes).transpose(0, 1), within)
    lines = [f'{test.name}: no reference of {args.rollout} steps; {(own > 0).sum()} of the {len(own)} true test '
             f'trajectories leave the training range by {MARGIN:.0%}']
    for item in commands.each_on_device(models, processes):
        found[item.name] = rollout_without_reference(item.model, sets[item.name], processes, args.rollout,
                                                     args.batch_size, args.dtype)
        more, rows[item.name] = table_without_reference(found[item.name], within, names, channels)
        lines += commands.under_name(models, item, more)
    commands.draw(args, processes, f'free{suffix}', lambda figures: figures.plot_rollout_without_reference(
        found, within, names, channels, test.name))
    return lines, rows


@torch.no_grad()
def rollout_of_channel(model, test, trajectory, channel, steps, device, dtype='fp32'):
    """A rollout of one channel of one trajectory on the native grid: truth, prediction (steps, H, W), on the CPU.

    In 3-D these are the middle slice of the last axis.
    """
    T, predictor = model.config.frames, Predictor(model, test, device, dtype)
    truth = read_frames(test, [trajectory], 0, T + steps, device)
    state, predicted = predictor.state(truth[:, :T]), []
    for _ in range(steps):
        state = predictor.step(state)
        predicted.append(predictor.native(state))
    at = test.evolving.index(test.channel_names.index(channel))
    fields = (u[..., at].cpu() for u in (truth[0, T:, ..., test.evolving], torch.cat(predicted)))
    return [u if u.ndim == 3 else u[..., u.shape[-1] // 2] for u in fields]


def draw_fields(models, args, processes, report):
    """--fields: a rollout of one trajectory of each dataset as DIR/<dataset>_<channel>.png, with --gif as .gif too.

    Raises InputError, before any is drawn, for a channel, step or trajectory that a dataset does not have.
    """
    T = commands.input_frames(models)
    sets, plans = commands.test_sets(models, args), []
    for test in sets[models[0].name]:
        known = [test.channel_names[channel] for channel in test.evolving]
        channel, most = args.channel or known[0], test.frames - T
        steps = args.steps or sorted({1 + round(i * (test.t_test - 1) / 3) for i in range(4)})
        if channel not in known:
            raise InputError(f'--channel {channel}: {test.name} does not predict it{configs.nearest(channel, known)}')
        if max(steps) > most:
            raise InputError(f'--steps {max(steps)}: {test.name} has {most} frames after the {T} that go in')
        if args.trajectory >= test.count:
            raise InputError(f'--trajectory {args.trajectory}: {test.name} has 0 to {test.count - 1}')
        plans.append((test.name, channel, steps))
    for k, (name, channel, steps) in enumerate(plans) if processes.rank == 0 else ():
        found = {item.name: rollout_of_channel(item.model, sets[item.name][k], args.trajectory, channel, max(steps),
                                               processes.device, args.dtype)
                 for item in commands.each_on_device(models, processes)}
        truth, predictions = found[models[0].name][0], {name: u for name, (_, u) in found.items()}
        title = f'{name}, test trajectory {args.trajectory}'
        commands.draw(args, processes, f'{name}_{channel}', lambda figures: figures.plot_fields(
            truth, predictions, steps, channel, title))
        if args.gif:
            import figures
            commands.save_images(args, processes, f'{name}_{channel}.gif', figures.animate_fields(
                truth, predictions, channel, title))
    return []


def parse():
    """The flags and the mode. Raises InputError for flags that contradict one another or would change nothing."""
    parser = commands.new_parser(__doc__, 'what --rollout or --fields gives')
    parser.add_argument('--scoring', **commands.SCORING)
    parser.add_argument('--metrics', action='store_true', help='print nRMSE, VRMSE and relative L1 too')
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument('--rollout', type=int, default=0, metavar='N',
                         help=f'roll out N steps along reference trajectories of {FAMILY} instead, or of --datasets; '
                              'a dataset without a reference of that length is compared with its training data')
    instead.add_argument('--fields', action='store_true', help='with --figures: draw the fields of rollouts instead')
    parser.add_argument('--samples', type=int, metavar='N', help='trajectories of --rollout [8]')
    parser.add_argument('--channel', default='', metavar='NAME', help='channel of --fields; default: the first')
    parser.add_argument('--steps', type=int, nargs='+', metavar='N', help='steps of --fields; default: four')
    parser.add_argument('--trajectory', type=int, metavar='I', help='test trajectory of --fields [0]')
    parser.add_argument('--gif', action='store_true', default=None,
                        help='animate --fields too, up to the last of --steps')
    args = parser.parse_args()
    configs.at_least(0, rollout=args.rollout)
    options = {'samples': 'rollout', **dict.fromkeys(('channel', 'steps', 'trajectory', 'gif'), 'fields')}
    for name, of in options.items():
        if getattr(args, name) not in (None, '') and not getattr(args, of):
            raise InputError(f'--{name} is an option of --{of}; add it')
    mode = roll_out if args.rollout else draw_fields if args.fields else print_scores
    if args.metrics and mode is not print_scores:
        raise InputError('--metrics adds a table to the scores over the test frames; leave --rollout or --fields out')
    if args.scoring == 'paper' and mode is not print_scores:
        raise InputError('--scoring paper is for the scores over the test frames; --rollout and --fields are native')
    if args.fields and not args.figures:
        raise InputError('--fields: into which folder? add --figures DIR')
    if args.figures and mode is print_scores:
        raise InputError('--figures: of what? add --fields or --rollout N')
    args.trajectory = args.trajectory or 0
    configs.at_least(1, steps=min(args.steps or [1]), samples=1 if args.samples is None else args.samples)
    configs.at_least(0, trajectory=args.trajectory)
    return args, mode


def main():
    commands.run(*parse())


if __name__ == '__main__':
    configs.cli(main)
