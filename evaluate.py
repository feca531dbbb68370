"""Score trained models: one step, rollouts over the test trajectories, and rollouts of 500 steps.

    python evaluate.py                          the newest checkpoint under out/, on the data that it was trained on
    python evaluate.py --checkpoint out/tiny/best.pt --data data --datasets swe_pdb dr_pdb --json scores.json
    python evaluate.py --checkpoint out/*/best.pt       several checkpoints, side by side
    python evaluate.py --rollout 500            of what it was trained on; the FNO family along long trajectories of our
                                                own solver, which are made once and kept beside its test data
    python evaluate.py --rollout 500 --datasets swe_pdb         without a reference: energy, extrema and spectrum
    python evaluate.py --scoring paper --metrics        as DPOT scores, on the model grid; with nRMSE and VRMSE
    python evaluate.py --windows 6:12 13:30     as the Well scores, over windows of the rollout
    python evaluate.py --resolution 256         on another model grid than that of the training
    python evaluate.py --fields --gif --figures out/figures       rollouts in pictures
    python evaluate.py --save out/predictions   the rollouts over the test frames as a folder of datasets
    python evaluate.py --predict frames.npy --steps 100 --to prediction.npy         what comes after your own frames
    torchrun --standalone --nproc_per_node=8 evaluate.py          the same numbers, sooner

The architecture, the resolution and the data folder come from the checkpoint. Each dataset is scored on its native grid
against its original data, on the channels that evolve. Padding and static channels are never scored; in a rollout they
keep their known values. --scoring paper differs only in the grid, and a table never mixes the two scorings.

Shapes: B batch, T input frames, F predicted frames, N trajectories, C field channels of the model, C' of the dataset,
C'' of those that evolve; (*space) are the grid points of the model, (*space') those of the dataset.
"""
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import configs
from configs import InputError

import torch

import aotpot
import data
from lab.predict import FORMATS, Predictor, predict_file, rollout, save_rollouts
from metrics import MAIN, METRICS, SUFFIXES, Comparison, l2re, norm, over_windows
from runtime import checkpoint, distributed, terminal
from runtime.terminal import Progress
from sources import check, generate

FAMILY = 'ns2d_fno_1e-3'                        # the dataset family of the long rollouts (paper, Sec. 5.4)
MARKS = (20, 50, 100, 200, 500)                 # the steps at which they are reported
MARGIN = 0.1                    # widens the training range, which most test data leave otherwise


# ------------------------------------------------------------------------------------------------ scores

@torch.no_grad()
def score(model, test, processes, batch_size=16, dtype='fp32', limit=None, steps=None, scoring='native', windows=()):
    """The METRICS of every test trajectory: {name: (N,) float64}, equal on all processes.

    Predictions over t_test frames: 'rollout' starts from the first T frames and goes on from its own predictions; 'one
    step' predicts each frame from T true ones. The persistence beside each, '<name>_persistence', repeats the newest
    true frame that it was given; in a steady problem that is the input. Input frames are never scored.

    limit: at most so many trajectories; steps: at most so many frames; scoring: see Predictor; windows: see
    `over_windows`. Each process takes every world_size-th trajectory. Raises as Predictor.
    """
    T, count, frames = model.config.frames, min(test.count, limit or test.count), min(test.t_test, steps or test.t_test)
    predictor = Predictor(model, test, processes.device, dtype, scoring)
    names = {name + suffix: (metric, metric.of + suffix)
             for name, metric in {**METRICS, **over_windows(windows)}.items() for suffix in SUFFIXES}
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
            sums.append({'size': norm(target), 'deviation': norm(deviation),
                         **{name: norm(u - target) for name, u in predictions.items()}})
            previous, state = target, predictor.fed_back(state)
        sums = {name: torch.stack([frame[name] for frame in sums]).cpu().double().square()              # (F, B, C'')
                for name in sums[0]}
        points = math.prod(target.shape[1:-1])
        for name, (metric, of) in names.items():
            compared = Comparison(sums[of], sums['size'], sums['deviation'], points, predictions[of], target)
            scores[name][list(batch)] = metric.function(compared.over(metric.window)).cpu().double()
    return dict(zip(scores, processes.sum(torch.stack([*scores.values()]))))


def evaluate(model, sets, processes, batch_size=16, dtype='fp32', scoring='native', windows=()):
    """`score` of every data.Trajectories in `sets`: {name: scores, 'frames', 'steady'}.

    Raises InputError as `Predictor` and for a window beyond the predicted frames, before the first set is scored.
    """
    results = {}
    for test in sets:
        Predictor(model, test, processes.device, dtype, scoring)
        for first, end in windows:
            if end > test.t_test:
                raise InputError(f'--windows {first}:{end}: {test.name} has {test.t_test} predicted frames, 0 to '
                                 f'{test.t_test - 1}; choose other windows, or others of --datasets')
    for test in Progress(sets, desc='evaluating', disable=processes.rank > 0, leave=False):
        results[test.name] = {**score(model, test, processes, batch_size, dtype, scoring=scoring, windows=windows),
                              'frames': test.t_test, 'steady': test.steady}
    return results


def mean(scores):
    """The mean over samples; a sample that diverged makes it inf and is not averaged away."""
    value = scores.mean().item()
    return value if math.isfinite(value) else math.inf


def table(results, scoring='native', metrics=MAIN, windows=()):
    """Lines of the table of {dataset: score(...)}: of each metric the model, persistence and their ratio.

    metrics: names in METRICS, or in `over_windows(windows)`.
    """
    rows, known = {}, METRICS | over_windows(windows)
    for name, scores in results.items():
        rows[name] = row = {'tests': len(scores['rollout']), 'frames': scores['frames']}
        for metric in metrics:
            model, persistence = (mean(scores[metric + suffix]) for suffix in SUFFIXES)
            head = f'{known[metric].title}\n{known[metric].scored}\n'
            row |= {f'{head}model': model, f'{head}persistence': persistence,
                    f'{head}ratio': f'{persistence / max(model, 1e-12):.1f}x'}
        diverged = int((~scores['rollout'].isfinite()).sum())
        row[''] = ', '.join([f'median relative L1 {scores["l1"].median().item():.4f}'] * bool(scores.get('steady'))
                            + [f'{diverged} not finite'] * bool(diverged))
    return terminal.table(f'{scoring} scoring\n\ndataset', rows)


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
        frames = Progress(predictor.along(first, steps), desc='rollout', total=steps, unit='step',
                          disable=processes.rank > 0, leave=False)
        found[:, list(batch)] = torch.stack([measure(u, t, batch, first)
                                             for t, u in enumerate(frames)]).cpu().double()
    return processes.sum(found)


def rollout_curve(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """L2RE against step: {'step', 'step_persistence', 'full', 'full_persistence': (steps, N) float64}.

    'step' is that of the frame of the step, 'full' that of all frames so far. The reference is read frame by frame.
    """
    def norms(u, t, batch, first):
        frames = first[:, -1], data.read_frames(test, batch, T + t, T + t + 1, processes.device)[:, 0]
        persistence, target = (frame[..., test.evolving] for frame in frames)
        return torch.stack([norm(x) for x in (target, u - target, persistence - target)], 1)            # (B, 3, C'')

    T, curves = model.config.frames, {}
    shape = 3, len(test.evolving)
    size, *errors = along_rollout(model, test, processes, steps, norms, shape, batch_size, dtype).square().unbind(2)
    for suffix, error in zip(SUFFIXES, errors):
        curves['step' + suffix] = l2re(error, size)
        curves['full' + suffix] = l2re(error.cumsum(0), size.cumsum(0))
    return curves


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
    return [*terminal.table('L2RE at step', cells),
            f'first step at which a sample has an error above 1: {rows["first_step_past_1"] or "none"}; '
            f'non-finite errors: {rows["non_finite"]} of {error.numel()}'], rows


# ------------------------------------------------------------------------------------------------ without a reference

def rollout_without_reference(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """`field_statistics` of the rollouts, of the evolving channels on the native grid: (steps, N, M, C'') float64."""
    bands = check.octave_bands(test.space)[1].to(processes.device)
    return along_rollout(model, test, processes, steps, lambda u, *_: check.field_statistics(u, bands),
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
        lines += terminal.table(f'{channel}: range in training', rows[channel], '.3g')
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


def open_checkpoints(paths, form='fast', resolution='', network=''):
    """The checkpoints at `paths`, one read after the other, with their networks on the CPU; no optimiser is kept.

    resolution: the model grid to use, '256' or '96x192', instead of that of the training. Raises InputError for one
    that the patch does not divide. form, network: of aotpot.load.
    """
    paths, opened = [checkpoint.locate(path) for path in paths], []
    for name, path in zip(checkpoint.short_names(paths), paths):
        saved = checkpoint.read(path)
        model = checkpoint.network(saved, form, network)
        if resolution:
            model.config = dataclasses.replace(model.config, resolution=resolution)
        opened.append(Opened(name, path, saved['step'], model, configs.RunConfig(**saved['config'].get('run', {})),
                             'finetune' in saved['config']))
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


def test_sets(models, args, processes, names=()):
    """{checkpoint: [test sets]} in one order: `names`, --datasets, those of the training, or with another --data all.

    Without --data, those of a built-in mixture that are not there are generated (generate.builtin_tests).
    Raises InputError if neither is given and the checkpoints were not trained on the same datasets.
    """
    folder = data_folder(models, args)
    if not args.data:
        generate.builtin_tests(folder, names or args.datasets or agreed(models, 'datasets'), processes)
    names = test_names(models, args, folder, names)
    return {item.name: [item.dataset(folder, name) for name in names] for item in models}


def test_names(models, args, folder, names=()):
    """The names of the `test_sets` in one order. Raises InputError as these do."""
    names = names or args.datasets
    if not names and all(item.run.data == folder for item in models):
        names = agreed(models, 'datasets')
    return data.find(folder, names, 'test')


# ------------------------------------------------------------------------------------------------ all commands

@distributed.together()
def run(args, mode, resolution=''):
    """Open the checkpoints, print the lines that mode(models, args, processes, report) returns, write the report.

    The report goes to --json: {'models': {name: {'checkpoint', 'step', 'parameters', 'resolution'}}}, to which the mode
    adds. On all ranks but 0, the mode finds --figures empty. resolution: see `open_checkpoints`. Raises InputError,
    before anything is read, for a place where nothing can be written and for --figures without matplotlib.
    """
    configs.at_least(1, batch_size=args.batch_size)
    if args.figures:
        from lab import figures
        figures.pyplot()
    processes, report = distributed.setup(args.device), {'models': {}}
    if processes.rank > 0:
        args.figures = args.json = ''
    if args.figures:
        terminal.writable('figures', args.figures)
    if args.json:
        terminal.writable('json', args.json, ('.json',))
    models = open_checkpoints(args.checkpoint or [checkpoint.newest()], args.form, resolution, args.network)
    for name, path, step, model, trained, finetuned in models:
        config, parameters = model.config, aotpot.parameters(model)
        processes.print(f'{path}: step {step}, {config.title}, {parameters:,} parameters, '
                        f'{configs.show(config.resolution)} grid{" of --resolution" * bool(resolution)}, on '
                        f'{processes.device}'
                        + (f', fine-tuned from {trained.init_from or "random weights"}' if finetuned else ''))
        report['models'][name] = {'checkpoint': str(path), 'step': step, 'parameters': parameters,
                                  'resolution': config.resolution}
    for line in mode(models, args, processes, report):
        processes.print(line)
    if args.json:
        terminal.write(args.json, as_json(report))


def as_json(report):
    """The text of a report. A tensor becomes its mean and the values of all samples, and what is not finite null."""
    text = json.dumps(report, default=lambda x: {'mean': x.mean().item(), 'samples': x.flatten().tolist()})
    return json.dumps(json.loads(text, parse_constant=lambda name: None), indent=1)


# ------------------------------------------------------------------------------------------------ the command

def score_all(models, args, processes, report, names=()):
    """{checkpoint: `evaluate` of its test sets}, which goes into report['models'][checkpoint]['datasets'] too."""
    for field in ('frames', 'resolution')[:1 + (args.scoring == 'paper')]:
        agreed(models, field)
    sets, results = test_sets(models, args, processes, names), {}
    for item in each_on_device(models, processes):
        results[item.name] = evaluate(item.model, sets[item.name], processes, args.batch_size, args.dtype,
                                      args.scoring, args.windows)
        report['models'][item.name].update(scoring=args.scoring, datasets=results[item.name])
    return results


def print_scores(models, args, processes, report):
    """The default: the scores of one checkpoint in one table, those of several in a table for each metric."""
    results, every = score_all(models, args, processes, report), METRICS | over_windows(args.windows)
    first, groups = results[models[0].name], [MAIN]             # names of metrics, those of one table
    if args.metrics:
        groups.append([name for name in METRICS if name not in MAIN])
    groups += [[*over_windows([window])] for window in args.windows]
    if len(models) == 1:
        return [line for names in groups for line in table(first, args.scoring, names, args.windows)]
    return [line for names in groups for kind in names
            for line in terminal.table(f'{every[kind].title} of {every[kind].scored}, {args.scoring} scoring', {
                test: {**{model: mean(scores[test][kind]) for model, scores in results.items()},
                       'persistence': mean(first[test][f'{kind}_persistence'])} for test in first}, best='row')]


def roll_out(models, args, processes, report):
    """--rollout of `test_names`, without the steady ones; report['models'][name]['rollout'] gets {dataset: numbers}.

    The reference of the FNO family is made by our solver if --datasets names it or all models were trained on it; the
    other datasets have their test trajectories, if these are long enough. Without a reference, the statistics of the
    rollout are compared with those of the training split, without which a dataset is left out, unless --datasets names
    it. Where there are no data at all, as for a trained model in a fresh clone, the family alone is rolled out.
    Raises InputError if one of --datasets is steady, or all are.
    """
    agreed(models, 'resolution')
    T, folder, samples, lines = agreed(models, 'frames'), data_folder(models, args), args.samples or 8, []
    solved = bool(args.datasets) or all(FAMILY in item.run.datasets for item in models)
    if solved and {*args.datasets} <= {FAMILY} and not args.data and not any(Path(folder).glob('*/test.h5')):
        names, steady = [FAMILY], []
    else:
        names = test_names(models, args, folder)
        steady = [name for name in names if models[0].dataset(folder, name).steady]
        names = [name for name in names if name not in steady]
    if steady and (args.datasets or not names):
        raise InputError(f'--rollout: {steady[0]} is steady, there is nothing to roll out')
    for name in names:
        sets = {item.name: generate.long_reference(folder, FAMILY, args.rollout, samples, item.model.config, processes)
                if name == FAMILY and solved else item.dataset(folder, name, rows=samples) for item in models}
        compare = with_reference if sets[models[0].name].frames >= T + args.rollout else without_reference
        if compare is without_reference and not args.datasets and not Path(folder, name, 'train.h5').exists():
            lines.append(f'{name}: left out, for it has neither so many test frames nor a training split')
            continue
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
        from lab import figures
        figures.save(args.figures, f'rollout{suffix}', figures.plot_rollout(curves))
    rows = {}
    for name, curve in curves.items():
        lines, rows[name] = rollout_table(curve, args.rollout)
        for of in SUFFIXES:
            rows[name]['curve' + of] = [mean(step) for step in curve['step' + of]]
    if len(models) > 1:
        at = {**{name: row['step'] for name, row in rows.items()},
              'persistence': rows[models[0].name]['step_persistence']}
        lines = terminal.table('L2RE at step', {name: {step: row[step] for step in row if step != 'growth'}
                                               for name, row in at.items()}, '.5f', 'column')
    return lines, rows


def without_reference(models, sets, args, processes, suffix):
    """The lines and {checkpoint: numbers} of a rollout beside the range of the training split, and its figure."""
    test, found, rows = sets[models[0].name], {}, {}
    names = ['energy', 'mean', 'least', 'largest', *check.octave_bands(test.space)[0]]
    channels = [test.channel_names[c] for c in test.evolving]
    train = models[0].dataset(test.path.parent.parent, test.name, 'train')
    within = torch.stack(check.split_statistics(train, processes).flatten(0, 1).aminmax(dim=0))
    own = first_step_outside_range(check.split_statistics(test, processes).transpose(0, 1), within)
    lines = [f'{test.name}: no reference of {args.rollout} steps; {(own > 0).sum()} of the {len(own)} true test '
             f'trajectories leave the training range by {MARGIN:.0%}']
    for item in each_on_device(models, processes):
        found[item.name] = rollout_without_reference(item.model, sets[item.name], processes, args.rollout,
                                                     args.batch_size, args.dtype)
        more, rows[item.name] = table_without_reference(found[item.name], within, names, channels)
        lines += [f'{item.name}:', *more] if len(models) > 1 else more
    if args.figures:
        from lab import figures
        figures.save(args.figures, f'free{suffix}', figures.plot_rollout_without_reference(
            found, within, names, channels, test.name))
    return lines, rows


def rollout_of_channel(model, test, channel, steps, dtype='fp32'):
    """A rollout of one channel of the first trajectory on the native grid: truth, prediction (steps, H, W), on the CPU.

    In 3-D these are the middle slice of the last axis.
    """
    T, c = model.config.frames, test.channel_names.index(channel)
    static = [channel for channel in range(test.channels) if channel not in test.evolving]
    frames = torch.from_numpy(test.read(0, 0, T + steps))
    predicted = rollout(model, frames[:T], steps, static, dtype=dtype, name=str(test.path))[0]
    return [u if u.ndim == 3 else u[..., u.shape[-1] // 2] for u in (frames[T:, ..., c], predicted[..., c])]


def draw_fields(models, args, processes, report):
    """--fields: a rollout of one trajectory of each dataset as DIR/<dataset>_<channel>.png, with --gif as .gif too.

    Raises InputError, before any is drawn, for a channel, step or trajectory that a dataset does not have.
    """
    T, folder, plans, trajectory = agreed(models, 'frames'), data_folder(models, args), [], args.trajectory or 0
    for test in test_sets(models, args, processes)[models[0].name]:
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
                item.model, item.dataset(folder, name, rows=[trajectory]), channel, max(steps), args.dtype)
        if args.figures:
            from lab import figures
            figures.save(args.figures, f'{name}_{channel}', figures.plot_fields(
                truth, predictions, steps, channel, title))
            if args.gif:
                figures.save(args.figures, f'{name}_{channel}', figures.animate_fields(
                    truth, predictions, channel, title))
    return []


def alone(models, processes, flag):
    """The one checkpoint of a mode that writes files. Raises InputError if there are more, or several processes."""
    if len(models) > 1:
        raise InputError(f'--{flag}: there are {len(models)} checkpoints, whose predictions would have the same names; '
                         f'give one')
    if processes.world_size > 1:
        raise InputError(f'--{flag} writes its files in one process; start it without torchrun')
    models[0].model.to(processes.device)
    return models[0]


def predict(models, args, processes, report):
    """--predict: `predict_file`, whose shape and place go into the report."""
    item, static = alone(models, processes, 'predict'), args.static or ()
    shape = predict_file(item.model, args.predict, args.to, args.steps[0], static, args.batch_size, args.dtype)
    report['models'][item.name]['prediction'] = {'path': args.to, 'shape': shape}
    return [f'wrote {args.to}: {shape}']


def save_all(models, args, processes, report):
    """--save: `save_rollouts` of all test sets. Raises InputError, before any is made, for a file that exists."""
    item, lines = alone(models, processes, 'save'), []
    tests = {Path(args.save) / test.name / 'test.h5': test for test in test_sets(models, args, processes)[item.name]}
    for path in tests:
        if os.path.lexists(path):
            raise InputError(f'--save {args.save}: {path} exists; remove it or name another folder')
    for path, test in tests.items():
        shape = save_rollouts(item.model, test, path, item.path, args.batch_size, args.dtype)
        lines.append(f'wrote {path}: {shape}, of which the last {test.t_test} frames are predicted')
    report['models'][item.name]['saved'] = [*map(str, tests)]
    return lines


def window(text):
    """'6:12' as (6, 12), see `over_windows`. Raises InputError if this is no window."""
    first, _, end = text.partition(':')
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise InputError(f'--windows {text}: expected FIRST:END such as 6:12, the predicted frames 6 to 11, where the '
                         f'first is 0')
    return int(first), int(end)


def parse():
    """The flags and the mode. Raises InputError for flags that contradict one another or would change nothing."""
    parser = terminal.evaluation_parser(__doc__, 'what --rollout or --fields gives')
    parser.add_argument('--metrics', action='store_true', help='print nRMSE, VRMSE and relative L1 too')
    parser.add_argument('--windows', nargs='+', metavar='A:B', help='print L2RE, nRMSE and VRMSE over the predicted '
                        'frames A to B - 1 too, counted from 0, such as 6:12 13:30 in the Well')
    parser.add_argument('--resolution', default='', metavar='X',
                        help='model grid, such as 256 or 96x192; default: that of the training')
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument('--rollout', type=int, metavar='N',
                         help='roll out N steps of each dataset instead, along its test trajectories, or of '
                              f'{FAMILY} along longer ones of our own solver; without trajectories of that length '
                              'compare with the range of its training data')
    instead.add_argument('--fields', action='store_true', help='with --figures: draw the fields of rollouts instead')
    instead.add_argument('--predict', metavar='FILE', help='predict --steps frames after those in a .npy or .h5 file '
                         "instead, (N, T, H, W, C) or without N, into the file --to")
    instead.add_argument('--save', metavar='DIR', help='write the rollouts over the test frames instead, as '
                         'DIR/<dataset>/test.h5 in the layout of data.py')
    parser.add_argument('--samples', type=int, metavar='N', help='trajectories of --rollout [8]')
    parser.add_argument('--channel', metavar='NAME', help='channel of --fields; default: the first')
    parser.add_argument('--steps', type=int, nargs='+', metavar='N',
                        help='steps of --fields, by default four; the number of frames to --predict')
    parser.add_argument('--trajectory', type=int, metavar='I', help='test trajectory of --fields [0]')
    parser.add_argument('--gif', action='store_true', default=None,
                        help='animate --fields too, up to the last of --steps')
    parser.add_argument('--to', metavar='FILE', help='where --predict writes, a .npy or .h5 file')
    parser.add_argument('--static', type=int, nargs='+', metavar='C',
                        help='channels of --predict that keep their values, counted from 0')
    args = parser.parse_args()
    mode = (roll_out if args.rollout is not None else draw_fields if args.fields else predict if args.predict
            else save_all if args.save else print_scores)
    options = {'samples': 'rollout', 'channel': 'fields', 'steps': 'fields predict', 'trajectory': 'fields',
               'gif': 'fields', 'to': 'predict', 'static': 'predict'}
    args.windows = [window(text) for text in args.windows or ()]
    configs.bounded('rollout', 1 if args.rollout is None else args.rollout, least=1, most=100_000)
    configs.at_least(0, trajectory=args.trajectory or 0)
    configs.at_least(1, steps=min(args.steps or [1]), samples=1 if args.samples is None else args.samples)
    for wrong, message in (
            *((getattr(args, name) is not None and not any(getattr(args, flag) for flag in of.split()),
               f'--{name} is an option of --{" and --".join(of.split())}; add it') for name, of in options.items()),
            *((getattr(args, flag) and mode is not print_scores,
               f'--{flag} adds a table to the scores over the test frames; leave --rollout, --fields, --predict or '
               f'--save out') for flag in ('metrics', 'windows')),
            (args.scoring == 'paper' and mode is not print_scores,
             '--scoring paper is for the scores over the test frames; everything else is native'),
            (args.predict and (args.data or args.datasets), '--predict needs no datasets; leave --data and --datasets '
                                                            'out'),
            (args.predict and not args.to, '--predict: into which file? add --to FILE'),
            (args.predict and len(args.steps or ()) != 1, '--predict: how many frames? add --steps N'),
            (args.predict and os.path.lexists(args.to), f'--to {args.to}: this exists; remove it or name another file'),
            (args.fields and not args.figures, '--fields: into which folder? add --figures DIR'),
            (args.figures and mode not in (roll_out, draw_fields),
             '--figures: of what? add --fields or --rollout N')):
        if wrong:
            raise InputError(message)
    if args.predict:
        configs.bounded('steps', args.steps[0], most=100_000)
        terminal.writable('to', args.to, FORMATS)
    if args.save:
        terminal.writable('save', args.save)
    return args, mode


def main():
    args, mode = parse()
    run(args, mode, args.resolution)


if __name__ == '__main__':
    terminal.cli(main)
