"""Score trained models: one step, rollouts over the test trajectories, and rollouts of 500 steps; look into their T.

    python evaluate.py                          the newest checkpoint under out/, on the data that it was trained on
    python evaluate.py --checkpoint out/tiny/best.pt --data data --datasets swe_pdb dr_pdb --json scores.json
    python evaluate.py --checkpoint out/*/best.pt       several, side by side, wherever a flag below makes sense for it
    python evaluate.py --rollout 500            against long trajectories of our own solver, made once and kept
    python evaluate.py --rollout 500 --datasets swe_pdb         without a reference: energy, extrema and spectrum
    python evaluate.py --scoring paper --metrics        as DPOT scores it, on the model grid; nRMSE and VRMSE too
    python evaluate.py --timing                 milliseconds of a single step
    python evaluate.py --gains --probe          how the T of its sub-layers amplify, and whether they tell PDEs apart
    python evaluate.py --checkpoint out/nano/step*.pt --probe --unseen wave_layer       how that emerges in training
    python evaluate.py --checkpoint out/*/best.pt --scaling     score against parameters; --heterogeneity: mixtures of
                                                growing size on the datasets they share; --curves: their training
    python evaluate.py --figures figures --fields --gif         rollouts in pictures; beside another flag: its figures
    torchrun --standalone --nproc_per_node=8 evaluate.py          the same numbers, sooner

The architecture, the resolution and the data folder come from the checkpoint. Everything is scored on the native grid
of a dataset against its untouched data, on the channels that evolve: padding and static channels are never scored, and
in a rollout they are put back as known. --scoring paper differs in the grid alone; a table holds one scoring.

Shapes: B batch, T input frames, F frames, H W grid points (space), C field channels; L sub-layers, S streams, and T
(B, L, S, S) their mixing matrices.
"""
import argparse
import importlib.util
import json
import math
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from tqdm import tqdm

import aotpot
import checkpoint
import configs
import data
import distributed
import generate
from configs import InputError

FAMILY = 'ns2d_fno_1e-3'                        # of the long rollouts (paper, Sec. 5.3)
MARKS = (20, 50, 100, 200, 500)                 # steps at which they are reported
MARGIN = 0.1                                    # of the training range: without it most test data are outside
PAPER_MS = {'aot': {'tiny': 5.491, 'small': 8.010, 'medium': 15.976},           # of a single step on an H200, batch 1
            'plain': {'tiny': 5.317, 'small': 7.795, 'medium': 15.901}}         # (paper, Table tab-timing)


# ------------------------------------------------------------------------------------------------ the metric

def relative_l1(prediction, target):
    """||prediction - target||_1 / ||target||_1 of each sample over all points and channels: (B, ..., C) -> (B,)."""
    error, size = (x.flatten(1).abs().sum(1) for x in (prediction - target, target))
    return error / size.clamp_min(1e-7)


def squares(x):
    """Sums of squares over the grid: (B, *space, C) -> (B, C), from which a rollout of any length is scored."""
    return x.square().flatten(1, -2).sum(1)


def l2re(error, size):
    """L2RE of each sample from sums of squares of error and target, (..., C) -> (...): mean over the channels."""
    return (error.double() / size.double().clamp_min(1e-14)).sqrt().mean(-1)


# ------------------------------------------------------------------------------------------------ prediction

class Predictor:
    """A model as a time stepper of one dataset: `step` maps a state on the model grid to the next one.

    like: the data.Trajectories whose grid and channels are scored. dtype 'bf16' runs the model under autocast.
    scoring: 'native': the prediction is brought to the dataset's grid and scored against its untouched data. 'paper',
    DPOT's: the truth is brought to the model grid, and every (model // native)-th point is scored there. They agree
    where the grids do, else not: these points lie between the native ones, so that the truth of 'paper' is smoothed.

    Raises InputError for 'paper' where the native grid does not divide the model grid. (DPOT then rounds the factor
    down, to 1 at least: more points than are native, or, of a finer native grid, every model point.)
    """

    def __init__(self, model, like, device, dtype='fp32', scoring='native'):
        self.model, self.like = model, like
        self.config = model.config
        self.points = None if scoring == 'native' else coinciding(like, self.config.resolution)
        known = [channel not in like.evolving for channel in range(self.config.channels)]
        self.known = torch.tensor(known, device=device)                                 # (C,) padding and static
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == 'bf16')

    def state(self, frames):
        """Native frames (B, T, *space', C') -> a state (B, T, *space, C) on the model grid."""
        return data.to_model(frames, self.config.resolution, self.config.channels)

    def step(self, state):
        """A state -> the next state; the newest frame is the last one."""
        with self.autocast:
            u = self.model(state)
        u = torch.where(self.known, state[:, -1], u.to(state.dtype))
        return torch.cat([state[:, 1:], u[:, None]], dim=1)

    def native(self, state):
        """The newest frame of a state: (B, *space', C'') on the native grid, evolving channels only."""
        return data.to_native(state[:, -1:], self.like)[:, 0]

    def scored(self, state):
        """The newest frame of a state where it is scored: (B, *points, C''), evolving channels only."""
        return self.native(state) if self.points is None else state[:, -1, ..., self.like.evolving][self.points]

    def truth(self, frame):
        """A native frame (B, *space', C') where it is scored: (B, *points, C''), evolving channels only."""
        frame = frame[..., self.like.evolving]
        return frame if self.points is None else data.resize(frame[:, None], self.config.resolution)[:, 0][self.points]


def coinciding(test, resolution):
    """The index of (B, *space, C) on the model grid that takes as many points as the native grid of `test` has."""
    if len(resolution) != len(test.space) or any(size % native for size, native in zip(resolution, test.space)):
        raise InputError(f'--scoring paper: the grid of {test.name}, {configs.show(test.space)}, does not divide the '
                         f'model grid, {configs.show(resolution)}; use --scoring native')
    return slice(None), *(slice(None, None, size // native) for size, native in zip(resolution, test.space))


def read(test, trajectories, start, stop, device):
    """Frames start..stop-1 of several trajectories, native: (B, F, *space, C) on the device."""
    return torch.stack([torch.from_numpy(test.read(i, start, stop)) for i in trajectories]).to(device)


@torch.no_grad()
def score(model, test, processes, batch_size=16, dtype='fp32', limit=None, steps=None, scoring='native'):
    """Errors of every test trajectory: a dict of (N,) float64 tensors, equal on all processes.

    u is the prediction and v the truth of one sample and channel, t runs over frames and x over grid points; every
    number but the last is the mean of its formula over the channels.
        'rollout'   sqrt(sum_tx (u-v)^2 / sum_tx v^2)           t_test frames from the first T: DPOT's l2_full
        'nrmse'     mean_t sqrt(mean_x (u-v)^2 / mean_x v^2)    the same frames: PDEBench's nRMSE, DPOT's l2_step
        'vrmse'     mean_t sqrt(mean_x (u-v)^2 / var_x v)       the same frames: VRMSE of The Well, there var + 1e-7
        'step'      as 'nrmse', of the t_test frames each predicted from T true ones
        'l1'        sum_x |u-v| / sum_x |v| of the last of these, the sums over the channels too
    '..._persistence': u is the last input frame; of a steady problem its input. VRMSE is 1 for the mean of a frame, and
    huge where a true frame is constant. Input frames are never scored.

    Each process takes every world_size-th trajectory. limit: at most so many trajectories; steps: at most so many
    frames. scoring: where, see Predictor.
    """
    T, count, frames = model.config.frames, min(test.count, limit or test.count), min(test.t_test, steps or test.t_test)
    predictor = Predictor(model, test, processes.device, dtype, scoring)
    names = ('rollout', 'rollout_persistence', 'step', 'step_persistence', 'l1', 'nrmse', 'nrmse_persistence', 'vrmse',
             'vrmse_persistence')
    scores = torch.zeros(len(names), count, dtype=torch.float64)
    for batch in processes.batches(count, batch_size):
        truth = read(test, batch, 0, T + frames, processes.device)                      # (B, T+F, *space, C)
        state, last, sums = predictor.state(truth[:, :T]), predictor.truth(truth[:, T - 1]), []
        previous = last
        for t in range(frames):
            target = predictor.truth(truth[:, T + t])
            state = predictor.step(state)
            forced = predictor.step(predictor.state(truth[:, t:T + t])) if t else state     # a rollout starts alike
            one = predictor.scored(forced)
            spread = target - target.mean(tuple(range(1, target.ndim - 1)), keepdim=True)
            fields = target, spread, *(u - target for u in (predictor.scored(state), last, one, previous))
            sums.append(torch.stack([squares(field) for field in fields]))
            previous = target
        size, spread, *errors = torch.stack(sums).cpu().double().unbind(1)              # (F, B, C) each
        full = [l2re(error.sum(0), size.sum(0)) for error in errors[:2]]                # one norm over all frames
        step, nrmse, vrmse = ([l2re(error, by).mean(0) for error in some] for some, by in
                              ((errors[2:], size), (errors[:2], size), (errors[:2], spread)))
        l1 = relative_l1(one, target).cpu().double()
        scores[:, list(batch)] = torch.stack([*full, *step, l1, *nrmse, *vrmse])
    return dict(zip(names, processes.sum(scores)))


def mean(scores):
    """Mean over samples; a diverged one makes it inf and is not averaged away."""
    value = scores.mean().item()
    return value if math.isfinite(value) else math.inf


def shown(value, form='.4f'):
    """A number in a table; one that would outgrow its column as 1.23e+05."""
    return f'{value:{form}}' if abs(value) < 1e4 or form[-1] != 'f' else f'{value:.2e}'


def table(results, scoring='native'):
    """Lines of the table of {dataset: score(...)}: rollout and one step, model and persistence."""
    wide = max([26, *(len(name) + 1 for name in results)])
    lines = [f'{f"L2RE, {scoring} scoring":<{wide + 8}}{"rollout over the test frames":^36}{"one step":^28}',
             f'{"dataset":<{wide}}{"tests":>6}{"frames":>8}{"model":>10}{"persistence":>13}{"ratio":>7}'
             f'{"model":>10}{"persistence":>13}{"ratio":>7}']
    for name, scores in results.items():
        line = f'{name:<{wide}}{len(scores["rollout"]):>6}{scores["frames"]:>8}'
        for kind in ('rollout', 'step'):
            model, persistence = mean(scores[kind]), mean(scores[kind + '_persistence'])
            line += f'{shown(model):>10}{shown(persistence):>13}{persistence / max(model, 1e-12):>6.1f}x'
        if scores.get('steady'):
            line += f'   median relative L1 {scores["l1"].median().item():.4f}'
        diverged = int((~scores['rollout'].isfinite()).sum())
        lines.append(line + (f'   {diverged} not finite' if diverged else ''))
    return lines


def metrics_table(results, scoring='native'):
    """Lines of the table of nRMSE and VRMSE of the rollouts, model and persistence."""
    wide = max([26, *(len(name) + 1 for name in results)])
    lines = [f'{f"rollout, {scoring} scoring":<{wide}}{"nRMSE":^25}{"VRMSE":^25}',
             f'{"dataset":<{wide}}' + f'{"model":>12}{"persistence":>13}' * 2]
    for name, scores in results.items():
        lines.append(f'{name:<{wide}}' + ''.join(
            f'{shown(mean(scores[kind])):>12}{shown(mean(scores[kind + "_persistence"])):>13}'
            for kind in ('nrmse', 'vrmse')))
    return lines


def side_by_side(title, cells, best='', form='.4f'):
    """Lines of a table {row: {column: number}}; the lowest finite number of each 'row' or 'column' (`best`) has a *."""
    columns = list(next(iter(cells.values())))
    wide, widths = max(26, len(title) + 1, *(len(row) + 1 for row in cells)), [max(10, len(c) + 3) for c in columns]
    lines = [f'{title:<{wide}}' + ''.join(f'{column:>{w - 1}} ' for column, w in zip(columns, widths))]
    for row, numbers in cells.items():
        line = f'{row:<{wide}}'
        for (column, value), w in zip(numbers.items(), widths):
            rivals = {'': (), 'row': numbers.values(), 'column': [other[column] for other in cells.values()]}[best]
            lowest = min(filter(math.isfinite, rivals), default=math.nan)
            line += f'{shown(value, form):>{w - 1}}' + ('*' if value == lowest else ' ')
        lines.append(line)
    return [line.rstrip() for line in lines]


def scaling(errors):
    """50 mean(-log10 L2RE) over datasets; 100 is an error of 0.01 on each (paper, App. Scaling Experiments)."""
    return -50 * sum(math.log10(max(error, 1e-12)) for error in errors) / len(errors)


def evaluate(model, sets, processes, batch_size=16, dtype='fp32', scoring='native'):
    """`score` of every data.Trajectories in `sets`: {name: scores, 'frames', 'steady'}. Raises as `Predictor`."""
    results = {}
    for test in sets if scoring == 'paper' else ():
        coinciding(test, model.config.resolution)           # before the first is scored
    for test in tqdm(sets, desc='evaluating', disable=processes.rank > 0, leave=False):
        results[test.name] = {**score(model, test, processes, batch_size, dtype, scoring=scoring),
                              'frames': test.t_test, 'steady': test.steady}
    return results


# ------------------------------------------------------------------------------------------------ long rollouts

@torch.no_grad()
def rollout_curve(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """Error against step: relative L2 errors (steps, N) of model and persistence, at the step and over all so far.

    Memory does not grow with `steps` but for four numbers a sample and step: the state is T frames, the reference is
    read frame by frame, and nothing is read back from the device until the end. Returns a dict of float64 tensors.
    """
    T, predictor = model.config.frames, Predictor(model, test, processes.device, dtype)
    batches = processes.batches(test.count, batch_size)
    curves = torch.zeros(3, steps, test.count, len(test.evolving), dtype=torch.float64)
    bar = tqdm(total=steps * len(batches), desc='rollout', unit='step', disable=processes.rank > 0, leave=False)
    for batch in batches:
        first = read(test, batch, 0, T, processes.device)
        state, last, sums = predictor.state(first), first[:, -1, ..., test.evolving], []
        for t in range(steps):
            target = read(test, batch, T + t, T + t + 1, processes.device)[:, 0, ..., test.evolving]
            state = predictor.step(state)
            sums.append(torch.stack([squares(target), squares(predictor.native(state) - target),
                                     squares(last - target)]))
            bar.update()
        curves[:, :, list(batch)] = torch.stack(sums, 1).cpu().double()
    bar.close()
    curves = processes.sum(curves)
    return {f'{kind}{name}': l2re(error[k], error[0]) for kind, error in (('step', curves), ('full', curves.cumsum(1)))
            for k, name in ((1, ''), (2, '_persistence'))}


def long_reference(folder, steps, samples, config, processes):
    """Trajectories of T + steps frames, at least 11, of the FNO family in folder/<family>/: made by our solver if new.

    Raises InputError for a grid that the solver does not make, and where they cannot be written.
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
            raise InputError(f'--rollout: cannot write {path} ({str(error).splitlines()[0]})') from None
    distributed.wait(processes)
    return data.Trajectories(folder, FAMILY, split, config.frames, config.channels)


def marks_of(steps):
    """The steps of a rollout that are reported."""
    return [mark for mark in MARKS if mark < steps] + [steps]


def rollout_table(curves, steps):
    """Lines of the long-rollout table and its numbers as a dict (paper, Table 3)."""
    marks = marks_of(steps)
    rows, lines = {}, [f'{"L2RE at step":<28}' + ''.join(f'{mark:>10}' for mark in marks)
                       + f'{f"{marks[0]} to {marks[-1]}":>14}']
    for name, title in (('step', 'model, at the step'), ('full', 'model, over all so far'),
                        ('step_persistence', 'persistence, at the step')):
        values = [mean(curves[name][mark - 1]) for mark in marks]
        rows[name] = dict(zip(map(str, marks), values), growth=values[-1] / max(values[0], 1e-12))
        lines.append(f'{title:<28}' + ''.join(f'{shown(value):>10}' for value in values)
                     + f'{rows[name]["growth"]:>13.1f}x')
    error = curves['step']
    beyond = (~(error <= 1)).any(1).nonzero().flatten()
    infinite = (~error.isfinite()).sum().item()
    rows['first_step_past_1'] = int(beyond[0]) + 1 if len(beyond) else None
    rows['non_finite'] = infinite
    lines.append(f'first step at which a sample is past error 1: {rows["first_step_past_1"] or "none"}; '
                 f'non-finite steps: {infinite} of {error.numel()}')
    return lines, rows


# ------------------------------------------------------------------------------------------------ beyond the reference

def octaves(space):
    """Octave bands of wavenumber on a grid: their names, and (modes, bands), 1 where a mode of fftn is in a band.

    |k| counts waves along the longest axis, the spacing being equal on all; the last band has all from N/4 on, of an N
    rounded down to a power of two.
    """
    count, k = max(1, int(math.log2(max(space))) - 1), [torch.fft.fftfreq(N, 1 / max(space)) for N in space]
    k = torch.stack(torch.meshgrid(*k, indexing='ij')).norm(dim=0).flatten()
    band = (k + 1e-6).log2().floor().clamp(max=count - 1)               # 1e-6: rounding of k; k = 0 is in no band
    names = [f'k {2 ** b}-{2 ** (b + 1)}' for b in range(count - 1)] + [f'k {2 ** (count - 1)}-']
    return names, (band[:, None] == torch.arange(count)).float()


def statistics(u, bands):
    """Energy, mean, least, largest value and spectrum of fields u (B, *space, C) -> (B, M, C), M = 4 + bands.

    Energy is the mean of u^2; that of the modes in each of `bands`, of `octaves`, adds up to it less the mean squared.
    """
    flat = u.flatten(1, -2)
    power = torch.fft.fftn(u, dim=tuple(range(1, u.ndim - 1)), norm='forward').abs().square().flatten(1, -2)
    moments = torch.stack([flat.square().mean(1), flat.mean(1), flat.amin(1), flat.amax(1)], 1)
    return torch.cat([moments, torch.einsum('bkc,km->bmc', power, bands)], 1)


def split_statistics(split, processes):
    """`statistics` of all frames of a data.Trajectories: (N, F, M, C''), evolving channels, equal on all processes."""
    bands = octaves(split.space)[1].to(processes.device)
    found = torch.zeros(split.count, split.frames, 4 + bands.shape[1], len(split.evolving), dtype=torch.float64)
    for i in tqdm(range(processes.rank, split.count, processes.world_size), desc=f'statistics of {split.path}',
                  disable=processes.rank > 0, leave=False):
        frames = read(split, [i], 0, split.frames, processes.device)[0]
        found[i] = statistics(frames[..., split.evolving], bands).cpu().double()
    return processes.sum(found)


@torch.no_grad()
def free_rollout(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """`statistics` of a rollout from the first T frames of each trajectory of `test`: (steps, N, M, C''), float64.

    On the native grid, evolving channels; nothing is read back from the device until a batch has ended.
    """
    predictor, bands = Predictor(model, test, processes.device, dtype), octaves(test.space)[1].to(processes.device)
    found = torch.zeros(steps, test.count, 4 + bands.shape[1], len(test.evolving), dtype=torch.float64)
    for batch in processes.batches(test.count, batch_size):
        state, along = predictor.state(read(test, batch, 0, model.config.frames, processes.device)), []
        for _ in tqdm(range(steps), desc='rollout', unit='step', disable=processes.rank > 0, leave=False):
            state = predictor.step(state)
            along.append(statistics(predictor.native(state), bands))
        found[:, list(batch)] = torch.stack(along).cpu().double()
    return processes.sum(found)


def outside(found, within):
    """The first step, from 1, at which each sample leaves the range `within` by MARGIN, 0 where it never does.

    found (steps, N, M, C''), within (2, M, C''), least and largest -> (N,) of integers. Not finite is outside.
    """
    margin = MARGIN * within.abs().amax(0)
    margin[1:4] = MARGIN * within[1, 0].sqrt()              # of values: the mean may have been 0 in all of the training
    beyond = ~((found >= within[0] - margin) & (found <= within[1] + margin)).flatten(2).all(2)
    return torch.where(beyond.any(0), beyond.int().argmax(0) + 1, 0)


def free_table(found, within, names, channels):
    """Lines of a rollout without a reference, and its numbers as a dict: means over the samples at MARKS.

    found: of `free_rollout`; within (2, M, C''): least and largest in training; names of the statistics and channels.
    """
    lines, first, rows = [], outside(found, within), {}
    for c, channel in enumerate(channels):
        rows[channel] = {name: {'from': within[0, m, c].item(), 'to': within[1, m, c].item(),
                                **{f'step {mark}': mean(found[mark - 1, :, m, c]) for mark in marks_of(len(found))}}
                         for m, name in enumerate(names)}
        lines += side_by_side(f'{channel}: range in training', rows[channel], form='.3g')
    lines.append(f'outside the training range: {(first > 0).sum()} of {len(first)} samples'
                 + (f', the first at step {first[first > 0].min()}' if first.any() else ''))
    return lines, {'statistics': rows, 'first_step_outside': [step or None for step in first.tolist()]}


# ------------------------------------------------------------------------------------------------ timing

@torch.no_grad()
def latency(model, sets, device, dtype='fp32', passes=1200, warmup=50):
    """Mean time of one forward pass in milliseconds, batch 1 (paper, App. on inference time).

    The inputs go round the data.Trajectories in `sets` and through their trajectories. Only the model is timed, not the
    reading: by events on a GPU, each pass once the one before is over; by the wall clock elsewhere. `warmup` passes
    before, in which a compiled model compiles, are not counted.
    """
    predictors, cuda, total = [Predictor(model, test, device, dtype) for test in sets], device.type == 'cuda', 0.0
    for i in range(-warmup, passes):
        predictor, test = predictors[i % len(sets)], sets[i % len(sets)]
        state = predictor.state(read(test, [i // len(sets) % test.count], 0, model.config.frames, device))
        if cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            start.record()
        started = time.perf_counter()
        with predictor.autocast:
            model(state)
        if cuda:
            end.record()
            end.synchronize()
        if i >= 0:
            total += start.elapsed_time(end) if cuda else 1000 * (time.perf_counter() - started)
    return total / passes


def timing(model, sets, device, dtype='fp32', passes=1200, compiled=False):
    """`latency` eager and, if asked for, compiled (on a GPU as a CUDA graph): the lines of its table and a dict."""
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else f'CPU, threads: {torch.get_num_threads()}'
    paper = PAPER_MS[model.config.residual]
    rows = {'device': name, 'dtype': dtype, 'passes': passes, 'eager': latency(model, sets, device, dtype, passes)}
    if compiled:
        fast = torch.compile(model, mode='reduce-overhead')
        rows['compiled'] = latency(fast, sets, device, dtype, passes)
    lines = [f'single step, batch 1, {dtype}, mean of {passes} passes over {len(sets)} datasets, on {name}']
    lines += [f'{kind:<26}{rows[kind]:>10.3f} ms' for kind in ('eager', 'compiled') if kind in rows]
    lines.append(f'{"paper, on an H200":<26}' + ', '.join(f'{size} {ms:.3f} ms' for size, ms in paper.items()))
    return lines, {**rows, 'paper': paper}


# ------------------------------------------------------------------------------------------------ the matrices T

def mappings(model, u):
    """T of every sub-layer in one forward pass of u (B, T, *space, C): (B, L, S, S), in order, L = 2 depth."""
    found = []
    hooks = [module.register_forward_hook(lambda module, inputs, outputs: found.append(outputs[2]))
             for module in model.modules() if isinstance(module, aotpot.Mappings)]
    try:
        model(u)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found, 1)


def spread(test, limit):
    """At most `limit` windows of a dataset, (trajectory, first frame) each, evenly over trajectories, then frames.

    They are among those of the one-step score; the first test.count of them have a trajectory each.
    """
    N = min(limit, test.count * test.t_test)
    return [(i % test.count, i // test.count * test.t_test // math.ceil(N / test.count)) for i in range(N)]


@torch.no_grad()
def kernels(model, test, processes, limit=100, batch_size=16, dtype='fp32'):
    """T of the windows of `spread`: (N, L, S, S) float64 on the CPU, equal on all processes."""
    places, predictor, config = spread(test, limit), Predictor(model, test, processes.device, dtype), model.config
    T = torch.zeros(len(places), 2 * config.depth, config.streams, config.streams, dtype=torch.float64)
    for batch in processes.batches(len(places), batch_size):
        frames = test.windows([places[i] for i in batch], config.frames).to(processes.device)
        with predictor.autocast:
            T[list(batch)] = mappings(model, predictor.state(frames)).cpu().double()
    return processes.sum(T)


def gains(T):
    """Amax gains of each sample, T (B, L, S, S) -> {name: (B, L)}: how far the residual path can amplify.

    With x_(l+1) = T_l x_l, 'forward': the largest row sum of |T_l|, which bounds what happens to the largest value of a
    stream; 'backward': the largest column sum, which does so for the gradient. 1 if T_l is doubly stochastic.
    '..._composite': of the product T_L ... T_l, from sub-layer l to the end. The paper finds a forward gain of 1 and,
    at its peak, a composite backward gain of 1.27 (tiny), 1.39 (small), 1.58 (medium) (App., Propagation Stability).
    """
    products = torch.stack([*accumulate(reversed(T.unbind(1)), torch.matmul)][::-1], 1)
    return {name + kind: M.abs().sum(axis).amax(-1) for kind, M in (('', T), ('_composite', products))
            for name, axis in (('forward', -1), ('backward', -2))}


def gains_table(gain):
    """Lines of the table of `gains` and its numbers as a dict: mean and max over the samples for every sub-layer."""
    rows = {name: {'mean': values.mean(0).tolist(), 'max': values.amax(0).tolist()} for name, values in gain.items()}
    lines = [f'{"Amax gain":<14}' + ''.join(f'{name.replace("_", " "):>20}' for name in rows),
             f'{"sub-layer":<14}' + f'{"mean":>10}{"max":>10}' * len(rows)]
    for l in range(len(rows['forward']['mean'])):
        lines.append(f'{l + 1:>3} {("mixer", "MLP")[l % 2]:<10}'
                     + ''.join(f'{row[kind][l]:>10.4f}' for row in rows.values() for kind in ('mean', 'max')))
    return lines, rows


def group(name):
    """The group of a dataset in the probe: 2-D Navier-Stokes of FNO is one, of PDEBench another (paper, Sec. 5.5)."""
    return next((family for family in ('ns2d_fno', 'ns2d_pdb') if name.startswith(family + '_')), name)


def probe(features, labels, fit):
    """Classify by the nearest mean template, Euclid: counts (G, G), true group in the row, nearest in the column.

    features (N, ...), labels (N,) in 0..G-1; fit (N,): True where a sample counts towards the template of its group,
    False where it is classified. A template that no sample made is NaN.
    """
    G, features = int(labels.max()) + 1, features.flatten(1)
    templates = torch.stack([features[fit & (labels == g)].mean(0) for g in range(G)])
    nearest = torch.cdist(features[~fit], templates).argmin(1)
    return torch.bincount(G * labels[~fit] + nearest, minlength=G * G).view(G, G)


def classify(T, sets, unseen=()):
    """`probe` of T {name: (N, L, S, S)}: {group: share that is right}, and the counts (G, G) as lists.

    A dataset in `unseen` is a group of its own.
    T: of `kernels` with the windows of `spread`, sets: their data.Trajectories. Trajectories of even number make the
    templates, the others are classified, so that no trajectory is on both sides.
    Raises InputError where a dataset has windows of one trajectory only, or all are of one group.
    """
    group_of = {name: name if name in unseen else group(name) for name in T}
    groups = list(dict.fromkeys(group_of.values()))
    for test in sets:
        if test.name in T and min(len(T[test.name]), test.count) < 2:
            raise InputError(f'--probe: {test.name}: one trajectory; it needs one for the template, one to classify')
    if len(groups) < 2:
        raise InputError(f'--probe: only {groups[0]} is there; datasets of at least two groups are needed')
    labels = torch.tensor([groups.index(group_of[name]) for name in T for _ in T[name]])
    fit = torch.tensor([trajectory % 2 == 0 for test in sets if test.name in T
                        for trajectory, _ in spread(test, len(T[test.name]))])
    confusion = probe(torch.cat([*T.values()]), labels, fit)
    return dict(zip(groups, (confusion.diagonal() / confusion.sum(1)).tolist())), confusion.tolist()


def probe_table(T, sets, unseen=()):
    """Lines of the interpretability experiment and its numbers as a dict (paper, Sec. 5.5).

    T, sets: as for `classify`. 'accuracy' is the mean over the groups, as if all had equally many samples; the paper
    finds 0.997 for small. `unseen`: names of datasets of T that were not trained on. They are left out at first, then
    added with a template of their own, and all are classified again (paper, App., Extended Interpretability).
    """
    right, confusion = classify({name: values for name, values in T.items() if name not in unseen}, sets)
    groups = [*right]
    rows = {'accuracy': sum(right.values()) / len(groups), 'groups': groups, 'right': right, 'confusion': confusion,
            'mean': {name: values.mean(0).tolist() for name, values in T.items()}}
    wide = max([26, *(len(name) + 6 for name in groups)])
    lines = [f'nearest mean T: accuracy {rows["accuracy"]:.3f} of {len(groups)} groups, chance {1 / len(groups):.3f}',
             f'{"true group / nearest":<{wide}}{"right":>7}'
             + ''.join(f'{f"({g + 1})":>6}' for g in range(len(groups)))]
    for g, name in enumerate(groups):
        counts = ''.join(f'{count:>6}' for count in confusion[g])
        lines.append(f'{f"({g + 1}) {name}":<{wide}}{right[name]:>7.3f}{counts}')
    if unseen:
        right, confusion = classify(T, sets, unseen)
        rows['unseen'] = {'groups': [*right], 'right': right, 'confusion': confusion}
        lines += [f'{f"unseen, of {len(right)} groups":<{wide}}{"right":>7}',
                  *(f'{name:<{wide}}{right[name]:>7.3f}' for name in unseen)]
    return lines, rows


# ------------------------------------------------------------------------------------------------ training curves

def curve(path):
    """A log.jsonl of train.py: lists 'step', 'loss', 'grad_norm', 'skipped' (so far), one item a line, and 'spikes'.

    A spike is the step of a line whose loss is over twice the median of the ten before it. A line all of whose steps
    were skipped has no loss.
    Raises InputError where there is no such file, or no lines of train.py in it.
    """
    try:
        log = [json.loads(line) for line in path.read_text().splitlines()]
        found = {name: [line[name] for line in log] for name in ('step', 'loss', 'grad_norm', 'skipped')}
    except OSError:
        raise InputError(f'--curves: no {path}; train.py writes it beside its checkpoints') from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f'--curves: {path}: not a log of train.py ({error})') from None
    if not any(found['loss']):
        raise InputError(f'--curves: {path}: holds no loss yet')
    known = [(step, loss) for step, loss in zip(found['step'], found['loss']) if loss is not None]
    found['spikes'] = [known[i][0] for i in range(10, len(known))
                       if known[i][1] > 2 * median(loss for _, loss in known[i - 10:i])]
    return found


def curves_table(found):
    """Lines of the table of {run: `curve`} and its numbers as a dict."""
    rows = {}
    for name, run in found.items():
        loss, norm = ([value for value in run[kind] if value is not None] for kind in ('loss', 'grad_norm'))
        rows[name] = {'steps': run['step'][-1], 'final loss': loss[-1], 'lowest': min(loss),
                      'skipped': run['skipped'][-1], 'spikes': len(run['spikes']),
                      'largest gradient': max(norm, default=math.nan)}
    return side_by_side('training', rows, form='.6g'), rows


# ------------------------------------------------------------------------------------------------ the checkpoints

class Opened(NamedTuple):
    """A checkpoint on the command line; `name` stands for it in tables, JSON and figures."""
    name: str
    path: Path
    step: int
    model: aotpot.AOTPOT
    run: configs.RunConfig
    finetuned: bool

    def headline(self, device):
        config = self.model.config
        return (f'{self.path}: step {self.step}, {config.residual}, '
                f'{aotpot.parameters(self.model):,} parameters, {configs.show(config.resolution)} grid, on {device}'
                + (f', fine-tuned from {self.run.init_from or "random weights"}'
                   if self.finetuned else ''))


def newest(folder='out'):
    """The checkpoint under `folder` that was written last."""
    found = sorted(Path(folder).glob('*/*.pt'), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(f'--checkpoint: none given and no {folder}/*/*.pt here; run: python train.py')
    return found[-1]


def names_of(paths):
    """A short name of each file, its own: the folder, else folder/stem, else all of the path.

    Raises InputError for a path given twice.
    """
    kinds = [(path.absolute().parent.name, f'{path.absolute().parent.name}/{path.stem}', str(path)) for path in paths]
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f'--checkpoint {path}: given twice')
    return [next(name for i, name in enumerate(own) if [other[i] for other in kinds].count(name) == 1) for own in kinds]


def open_all(paths):
    """The checkpoints at `paths`, their networks on the CPU; of the rest, an optimizer's state too, nothing is kept."""
    paths = [Path(path) for path in paths]
    saved = ((path, checkpoint.read(path)) for path in paths)
    return [Opened(name, path, found['step'], aotpot.from_checkpoint(found),
                   configs.RunConfig(**found['config'].get('run', {})), 'finetune' in found['config'])
            for name, (path, found) in zip(names_of(paths), saved)]


def in_turn(models, processes):
    """The checkpoints one after the other, each on the device while it is its turn."""
    for item in models:
        item.model.to(processes.device)
        yield item
        item.model.cpu()


def agreed(what, models, of, advice):
    """of(model), equal for all the checkpoints in one table; else an InputError names the two that differ."""
    for item in models[1:]:
        if of(item) != of(models[0]):
            raise InputError(f'--checkpoint: {models[0].name} and {item.name} differ in {what}, '
                             f'{of(models[0])} and {of(item)}; {advice}')
    return of(models[0])


def folder_of(models, args):
    """The folder of the datasets: --data, or where all the checkpoints were trained."""
    for item in models:
        if not (args.data or item.run.data):
            raise InputError(f'--data is needed: {item.path} does not say what it was trained on')
    return args.data or agreed('data', models, lambda item: item.run.data, 'say which with --data')


def sets_of(models, args, names=(), without=()):
    """{model: test sets, in one order for all}: of `names`, --datasets, those trained on, or with --data all.

    Raises InputError where the checkpoints were not trained on the same and neither was given.
    """
    folder = folder_of(models, args)
    names = names or args.datasets
    if not names and all(item.run.data == folder for item in models):
        agreed('datasets', models, lambda item: ' '.join(sorted(item.run.datasets)), 'say which with --datasets')
        names = models[0].run.datasets
    found = [name for name in data.find(folder, names, 'test') if name not in without]
    if not found:
        raise InputError(f'--unseen {" ".join(without)}: no other dataset is left; name some with --datasets')
    return {item.name: [test_set(item, folder, name) for name in found] for item in models}


def test_set(item, folder, name, split='test', rows=None):
    """The trajectories of a dataset, at most `rows`, as the network of a checkpoint takes them.

    Raises InputError as data.Trajectories, and where they have other dimensions of space than the network.
    """
    config = item.model.config
    how = folder, name, split, config.frames, config.channels, item.run.coefficients
    found = data.Trajectories(*how)
    if len(found.space) != config.dims:
        raise InputError(f'{found.path}: {len(found.space)} dimensions of space, {item.path} has {config.dims}')
    return data.Trajectories(*how, rows=range(rows)) if rows and found.count > rows else found


def comparable(models, args):
    """T, the input frames of all; raises InputError where they would be scored on different frames, or own grids."""
    if args.rollout or args.scoring == 'paper':
        agreed('--resolution', models, lambda item: configs.show(item.model.config.resolution), 'give one')
    return agreed('--frames', models, lambda item: item.model.config.frames, 'they predict different frames; give one')


# ------------------------------------------------------------------------------------------------ figures

COLOURS = '#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#000000'       # Okabe and Ito's, for all


def pyplot():
    """matplotlib.pyplot without a display. Raises InputError where what draws the figures is not installed."""
    if not all(importlib.util.find_spec(name) for name in ('matplotlib', 'sklearn')):       # the t-SNE is of the second
        raise InputError('--figures needs matplotlib and scikit-learn: pip install matplotlib scikit-learn')
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    pyplot.rcParams.update({'figure.dpi': 120, 'figure.constrained_layout.use': True, 'lines.linewidth': 1.2,
                            'font.size': 8, 'axes.titlesize': 8, 'axes.spines.top': False, 'axes.spines.right': False,
                            'figure.titlesize': 8, 'legend.frameon': False})
    return pyplot


def coloured(models):
    """[(name, value, colour)] of {name: value}: a model has one colour in all figures, up to seven of them."""
    many = [pyplot().cm.viridis(i / len(models)) for i in range(len(models))]
    return [*zip(models, models.values(), COLOURS if len(models) <= len(COLOURS) else many)]


def picture(figure):
    """A figure as it is now, as a pillow Image of 256 colours: a third of the bytes, no colour 3 % off."""
    from PIL import Image  # matplotlib needs it too
    figure.canvas.draw()
    drawn = Image.frombytes('RGBA', figure.canvas.get_width_height(), bytes(figure.canvas.buffer_rgba()))
    return drawn.convert('RGB').quantize(256, Image.Quantize.MAXCOVERAGE)


def draw(args, processes, name, figure, *what):
    """Write figure(*what) to DIR/name.png, if --figures asks for it."""
    if args.figures and processes.rank == 0:
        path, drawn = Path(args.figures) / f'{name}.png', figure(*what)
        picture(drawn).save(path, optimize=True)
        pyplot().close(drawn)
        processes.print(f'drew {path}')


def band(ax, values, colour, label):
    """Median of values (steps, N), its quartiles shaded; NaN is the largest, and what is not finite drawn as a gap."""
    values = values.nan_to_num(math.inf, math.inf, -math.inf)
    low, middle, high = values.quantile(values.new_tensor([0.25, 0.5, 0.75]), dim=1)
    ax.plot(range(1, len(values) + 1), middle, color=colour, label=label)
    ax.fill_between(range(1, len(values) + 1), low, high, color=colour, alpha=0.2, linewidth=0)


def rollout_figure(models):
    """Error against step of the curves of `rollout_curve` in {name: curves}, and of persistence in grey."""
    figure, ax = pyplot().subplots(figsize=(5, 3))
    for name, curves, colour in coloured(models):
        band(ax, curves['step'], colour, name)
    band(ax, curves['step_persistence'], 'grey', 'persistence')
    marks = [step for step in (1, 2, 5, 10, *MARKS) if step <= len(curves['step'])]
    ax.set(xscale='log', yscale='log', xlabel='step', ylabel='relative L2 error', xticks=marks, xticklabels=marks)
    ax.set_xticks([], minor=True)
    ax.grid(axis='x', color='0.9', linewidth=0.6)
    ax.legend()
    return figure


def free_figure(models, within, names, channels, dataset):
    """`free_rollout` of each {name: (steps, N, M, C)}, a row a channel; the range of training (2, M, C) is shaded.

    names: of the M statistics, the octaves from the fifth on. An axis ends at three times the largest training value.
    """
    figure, axes = pyplot().subplots(len(channels), 4, figsize=(7.6, 0.9 + 1.6 * len(channels)), squeeze=False)
    octaves = [name.removeprefix('k ') for name in names[4:]]
    for c, line in enumerate(axes):
        line[0].set_ylabel(channels[c])
        for ax, rows, size in zip(line, ([0], [1], [2, 3]), ([0], [2, 3], [2, 3])):
            for m in rows:
                ax.axhspan(*within[:, m, c].tolist(), color='0.87', zorder=0)
                for name, found, colour in coloured(models):
                    band(ax, found[:, :, m, c], colour, name)
            (low, high), most = ax.get_ylim(), 3 * within[:, size, c].abs().max().item()
            ax.set_ylim(max(low, -most if m else 0), min(high, most))
        line[3].fill_between(octaves, *within[:, 4:, c], color='0.87', zorder=0)
        line[3].set_yscale('log')
        for name, found, colour in coloured(models):
            for step, style in ((0, ':'), (-1, '.-')):
                line[3].plot(octaves, found[step, :, 4:, c].median(0).values, style, color=colour)
    for column, title, below in zip(axes.T, ('energy', 'mean', 'least, largest value', 'spectrum, step 1 dotted'),
                                    ('step', 'step', 'step', 'wavenumber')):
        column[0].set_title(title)
        column[-1].set_xlabel(below)
    figure.suptitle(f'{dataset}, no reference; grey: range of the training data')
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncol=4)
    return figure


def probe_figure(models):
    """Of each {name: (T, rows)} of `probe_table`, a line: t-SNE of T (scikit-learn, seed 0), confusion in per cent.

    Unseen groups, on which the network was not trained, have crosses for markers (paper, Fig. interpret).
    """
    from sklearn.manifold import TSNE
    plt = pyplot()
    figure, axes = plt.subplots(len(models), 2, figsize=(7, 3 * len(models)), squeeze=False)
    for (model, (T, rows)), (left, right) in zip(models.items(), axes):
        found = rows.get('unseen', rows)                                # with or without them
        groups, unseen = found['groups'], set(found['groups']) - set(rows['groups'])
        names = [name if name in unseen else group(name) for name in T for _ in T[name]]
        features = torch.cat([*T.values()]).flatten(1).numpy()
        flat = TSNE(perplexity=min(30, len(features) / 4), random_state=0).fit_transform(features)
        hues = (plt.cm.tab10 if len(groups) <= 10 else plt.cm.tab20).colors * len(groups)
        for g, (which, hue) in enumerate(zip(groups, hues)):
            marker, label = ('x', f'{g + 1} unseen') if which in unseen else ('.', g + 1)
            left.scatter(*flat[[name == which for name in names]].T, s=16, linewidth=0.7, color=hue, marker=marker,
                         label=label)
        left.set(xticks=[], yticks=[], xlabel='t-SNE of T', title=model if len(models) > 1 else None)
        left.spines[:].set_visible(True)
        left.legend(loc='center left', bbox_to_anchor=(1, 0.5), handletextpad=0.1)
        counts = torch.tensor(found['confusion'], dtype=torch.float64)
        share = (100 * counts / counts.sum(1, keepdim=True)).numpy()
        right.imshow(share, cmap='viridis', vmin=0, vmax=100)
        for row, column in torch.ones(share.shape).nonzero().tolist():
            right.text(column, row, f'{share[row, column]:.0f}', ha='center', va='center',
                       color='white' if share[row, column] < 60 else 'black')
        right.set(xticks=range(len(groups)), xticklabels=range(1, len(groups) + 1), yticks=range(len(groups)),
                  yticklabels=[f'{which} ({g + 1})' for g, which in enumerate(groups)],
                  xlabel='group of the nearest mean T, in %')
        for label, hue in zip(right.get_yticklabels(), hues):
            label.set_color(hue)
        right.spines[:].set_visible(False)
    return figure


def kernels_figure(models):
    """Mean T (L, S, S) in {name: {dataset: T}}, on one colour scale: a row a dataset, a column a sub-layer."""
    T = {name: torch.stack([torch.as_tensor(values) for values in sets.values()]) for name, sets in models.items()}
    L, names = sum(values.shape[1] for values in T.values()), [*next(iter(models.values()))]
    size = 1.2 + 0.07 * max(map(len, names)) + 0.45 * L, 0.6 + 0.45 * len(names)
    figure, axes = pyplot().subplots(1, len(T), figsize=size, squeeze=False, layout='compressed')
    scale = {'vmin': min(values.min() for values in T.values()), 'vmax': max(values.max() for values in T.values())}
    for (name, values), ax in zip(T.items(), axes[0]):
        R, L, S, _ = values.shape
        gaps = torch.nn.functional.pad(values, (0, 1, 0, 1), value=math.nan)       # (R, L, S+1, S+1) -> one image
        image = ax.imshow(gaps.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:-1, :-1].numpy(), **scale)
        rows, columns = (torch.arange(n) * (S + 1) + (S - 1) / 2 for n in (R, L))
        ax.set(yticks=rows, yticklabels=names, xticks=columns, xticklabels=range(1, L + 1), xlabel='sub-layer',
               title=name if len(T) > 1 else None)
        ax.tick_params(length=0, labelleft=ax is axes[0, 0])
        ax.spines[:].set_visible(False)
    figure.get_layout_engine().set(wspace=0.05)
    figure.colorbar(image, ax=axes, label='mean T')
    return figure


def gains_figure(models):
    """Amax gains of the rows of `gains_table` in {name: rows}, a column each (paper, Fig. propagation_stability)."""
    figure, axes = pyplot().subplots(2, len(models), figsize=(1.6 + 2.2 * len(models), 3.8), sharex='col', sharey='row',
                                     squeeze=False)
    for (name, rows, colour), column in zip(coloured(models), axes.T):
        for ax, kind in zip(column, ('', '_composite')):
            for way, hue in (('forward', 'grey'), ('backward', colour)):
                layers = range(1, len(rows[way + kind]['mean']) + 1)
                ax.plot(layers, rows[way + kind]['mean'], '.-', color=hue, label=way)
                ax.plot(layers, rows[way + kind]['max'], ':', color=hue, label=f'{way}, largest')
        column[0].set_title(name if len(models) > 1 else None)
        column[1].set(xlabel='sub-layer', xticks=layers[::math.ceil(len(layers) / 12)])
    axes[0, 0].set_ylabel('Amax gain')
    axes[1, 0].set_ylabel('Amax gain, composite')
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncol=2 + 2 * (len(models) > 1))
    return figure


def scaling_figure(models, title):
    """Score against parameters of each {'residual', 'parameters', 'score'} in {name: row}, joined by residual."""
    from matplotlib.ticker import EngFormatter, LogLocator
    (figure, ax), counts = pyplot().subplots(figsize=(4, 3)), [row['parameters'] for row in models.values()]
    for residual, style in (('aot', '-'), ('plain', '--')):
        line = sorted((row['parameters'], row['score']) for row in models.values() if row['residual'] == residual)
        ax.plot(*zip(*line) if line else ([], []), style, color='grey', label=residual, zorder=1)
    for name, row, colour in coloured(models):
        ax.scatter(row['parameters'], row['score'], color=colour, s=20)
        ax.annotate(name, (row['parameters'], row['score']), xytext=(4, 4), textcoords='offset points')
    ax.set(xscale='log', xlabel='parameters', ylabel=f'50 mean(−log10 L2RE), {title}',
           xlim=(min(counts) / 2, 2 * max(counts)))
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(EngFormatter(sep=''))
    ax.set_xticks([], minor=True)
    ax.margins(y=0.15)
    ax.legend()
    return figure


def curves_figure(runs):
    """Loss and gradient norm of {run: `curve`}; crosses below: steps were skipped, triangles: spikes of the loss."""
    figure, axes = pyplot().subplots(1, 2, figsize=(7, 2.8))
    for name, run, colour in coloured(runs):
        for ax, kind in zip(axes, ('loss', 'grad_norm')):
            values = [math.nan if value is None else value for value in run[kind]]
            ax.plot(run['step'], values, color=colour, label=name, linewidth=0.8)
            ax.set(yscale='log', xlabel='step')
        axes[0].plot(run['spikes'], [run['loss'][run['step'].index(step)] for step in run['spikes']], 'v', color=colour,
                     markerfacecolor='none', label=f'{name}, spikes: {len(run["spikes"])}')
        skipped = [step for step, before, now in zip(run['step'], [0, *run['skipped']], run['skipped']) if now > before]
        axes[0].plot(skipped, [0.03] * len(skipped), 'x', color=colour, transform=axes[0].get_xaxis_transform(),
                     label=f'{name}, skipped: {run["skipped"][-1]}')
    axes[0].set_ylabel('loss')
    axes[1].set_ylabel('gradient norm')
    axes[0].legend()
    return figure


# ------------------------------------------------------------------------------------------------ pictures of fields

@torch.no_grad()
def trace(model, test, trajectory, channel, steps, device, dtype='fp32'):
    """A rollout of one channel of one trajectory on the native grid: truth, prediction (steps, H, W), on the CPU.

    In 3-D (steps, H, W) is the middle slice of the last axis.
    """
    T, predictor = model.config.frames, Predictor(model, test, device, dtype)
    truth = read(test, [trajectory], 0, T + steps, device)
    state, predicted = predictor.state(truth[:, :T]), []
    for _ in range(steps):
        state = predictor.step(state)
        predicted.append(predictor.native(state))
    at = test.evolving.index(test.channel_names.index(channel))
    fields = (u[..., at].cpu() for u in (truth[0, T:, ..., test.evolving], torch.cat(predicted)))
    return [u if u.ndim == 3 else u[..., u.shape[-1] // 2] for u in fields]


def panels(truth, predictions):
    """{title: (F, H, W)} in the paper's order: truth, {name: prediction}, absolute errors."""
    return {'truth': truth, **predictions, **{f'|error|\n{name}': (u - truth).abs() for name, u in predictions.items()}}


def fields_figure(truth, predictions, steps, channel):
    """Fields at `steps` (1 is the first), a column each; where there is only one, all in a row.

    truth and each of {name: prediction} (F, H, W), x to the right, y up. Truth and predictions have one colour scale,
    the range of the truth, centred at 0 where that has both signs (the smaller from 5 % of the larger on); the errors
    have another, to the largest finite one. Both are over all F frames.
    """
    low, high, M, drawn = truth.min().item(), truth.max().item(), len(predictions), panels(truth, predictions)
    bound, single = max(-low, high), len(steps) == 1
    scale = {'cmap': 'RdBu_r', 'vmin': -bound, 'vmax': bound} if min(-low, high) > 0.05 * bound else {
        'cmap': 'viridis', 'vmin': low, 'vmax': high}
    errors = torch.stack([*drawn.values()][M + 1:]).nan_to_num(0, 0)
    worst = {'cmap': 'magma', 'vmin': 0, 'vmax': errors.max().item()}
    rows, columns = (1, 2 * M + 1) if single else (2 * M + 1, len(steps))
    figure, axes = pyplot().subplots(rows, columns, squeeze=False, layout='compressed', figsize=(
        (0.3 if single else 1) + 1.2 * columns, (1 if single else 0.2) + 1.15 * rows * truth.shape[2] / truth.shape[1]))
    axes = axes.T if single else axes
    for i, (line, (title, u)) in enumerate(zip(axes, drawn.items())):
        for ax, step in zip(line, steps):
            ax.imshow(u[step - 1].T.numpy(), origin='lower', interpolation='nearest', **(scale if i <= M else worst))
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        line[0].set(**{'title' if single else 'ylabel': title})
    for ax, step in zip(axes[0], () if single else steps):
        ax.set_title(f'step {step}')
    for line, label in ((axes[:M + 1], channel), (axes[M + 1:], f'|error| of {channel}')):
        figure.colorbar(line[0, 0].images[0], ax=line.ravel().tolist(), label=label, aspect=30,
                        location='bottom' if single else 'right')
    return figure


def animate(truth, predictions, channel, path):
    """Write a GIF of the `fields_figure` of each frame, with the scales of them all."""
    figure, fields = fields_figure(truth, predictions, [1], channel), [*panels(truth, predictions).values()]
    figure.canvas.draw()
    figure.set_layout_engine('none')                        # laid out once: nothing moves but the fields
    pictures = []
    for step in range(len(truth)):
        for ax, u in zip(figure.axes, fields):
            ax.images[0].set_data(u[step].T.numpy())
        figure.axes[0].set_title(f'step {step + 1}\ntruth')
        pictures.append(picture(figure))
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=125, loop=0)
    pyplot().close(figure)


# ------------------------------------------------------------------------------------------------ the command

def jsonable(results):
    """Tensors -> mean and values of each sample; what is not finite -> null."""
    if isinstance(results, torch.Tensor):
        values = jsonable(results.flatten().tolist())
        return {'mean': None if None in values else mean(results), 'samples': values}
    if isinstance(results, dict):
        return {name: jsonable(value) for name, value in results.items()}
    if isinstance(results, list):
        return [jsonable(value) for value in results]
    return None if isinstance(results, float) and not math.isfinite(results) else results


def rollouts(models, args, processes, report):
    """--rollout of the FNO family, or of --datasets, against a reference of that length where there is one.

    report[model]['rollout'] holds the numbers, with --datasets one dict a dataset. A reference: long trajectories of
    our solver for the FNO family, the test trajectories where they have as many frames. Else `free_rollout`, with the
    training split to compare its statistics with. Raises InputError for a steady dataset.
    """
    T, folder, lines, N = comparable(models, args), folder_of(models, args), [], args.samples or 8
    names = data.find(folder, args.datasets, 'test') if args.datasets else [FAMILY]
    for name in names:
        if args.datasets and test_set(models[0], folder, name).steady:
            raise InputError(f'--rollout: {name} is steady, there is nothing to roll out')
    for name in names:
        tests = {item.name: long_reference(folder, args.rollout, N, item.model.config, processes) if name == FAMILY
                 else test_set(item, folder, name, rows=N) for item in models}
        test, found, rows = tests[models[0].name], {}, {}
        reference = test.frames >= T + args.rollout
        if not reference:
            kinds = ['energy', 'mean', 'least', 'largest', *octaves(test.space)[0]]
            channels = [test.channel_names[c] for c in test.evolving]
            train = split_statistics(test_set(models[0], folder, name, 'train'), processes)
            within = torch.stack(train.flatten(0, 1).aminmax(dim=0))
            own = outside(split_statistics(test, processes).transpose(0, 1), within)
            lines.append(f'{name}: no reference of {args.rollout} steps; {(own > 0).sum()} of the {len(own)} true test '
                         f'trajectories leave the training range by {MARGIN:.0%}')
        elif args.datasets:
            lines.append(f'{name}:')
        for item in in_turn(models, processes):
            how = item.model, tests[item.name], processes, args.rollout, args.batch_size, args.dtype
            if reference:
                found[item.name] = rollout_curve(*how)
                more, rows[item.name] = rollout_table(found[item.name], args.rollout)
                rows[item.name]['curve'] = [mean(step) for step in found[item.name]['step']]
            else:
                found[item.name] = free_rollout(*how)
                more, rows[item.name] = free_table(found[item.name], within, kinds, channels)
            lines += [] if reference and len(models) > 1 else headed(models, item, more)
            place = report['models'][item.name]
            place['rollout'] = {**place.get('rollout', {}), name: rows[item.name]} if args.datasets else rows[item.name]
        if reference and len(models) > 1:
            at = {name: row['step'] for name, row in rows.items()}
            at['persistence'] = rows[models[0].name]['step_persistence']
            at = {name: {step: row[step] for step in row if step != 'growth'} for name, row in at.items()}
            lines += side_by_side('L2RE at step', at, 'column', '.5f')
        which = f'_{name}' if len(names) > 1 else ''
        if reference:
            draw(args, processes, f'rollout{which}', rollout_figure, found)
        else:
            draw(args, processes, f'free{which}', free_figure, found, within, kinds, channels, name)
    return lines


def headed(models, item, lines):
    """The lines of one checkpoint, under its name where there are several."""
    return [f'{item.name}:', *lines] if len(models) > 1 else lines


def timings(models, args, processes, report):
    """--timing: one process times, undisturbed; report[model]['timing']."""
    sets, lines = sets_of(models, args), []
    compiled = processes.device.type == 'cuda' if args.compile is None else args.compile
    for item in in_turn(models, processes) if processes.rank == 0 else ():
        more, report['models'][item.name]['timing'] = timing(item.model, sets[item.name], processes.device, args.dtype,
                                                             args.timing, compiled)
        lines += headed(models, item, more)
    return lines


def matrices(models, args, processes, report):
    """--gains and --probe: report[model]['gains'] and ['probe']; of several, by step, report['emergence'].

    Raises InputError for a model without T, residual 'plain' or T switched off, or of one stream, where T is 1, and
    for --unseen that is not there or was trained on.
    """
    for item in models:
        config = item.model.config
        for without, why in ((config.residual == 'plain', '--residual plain'), (config.streams == 1, '--streams 1'),
                             ('T' in config.ablate, f'--ablate {config.ablate}')):
            if without:
                raise InputError(f'--gains and --probe: {item.path} has no T to look at, it was made with {why}')
    folder = folder_of(models, args)
    try:
        unseen = data.find(folder, args.unseen, 'test') if args.unseen else []
    except InputError as error:
        raise InputError(str(error).replace('--datasets', '--unseen')) from None
    for item, name in ((item, name) for item in models for name in unseen if name in item.run.datasets):
        raise InputError(f'--unseen {name}: {item.path} was trained on it')
    models = sorted(models, key=lambda item: (item.path.parent, item.step))
    sets, T, lines = sets_of(models, args, without=unseen), {}, []
    for item in in_turn(models, processes):
        own = sets[item.name] + [test_set(item, folder, name) for name in unseen]
        T[item.name] = found = {
            test.name: kernels(item.model, test, processes, args.samples or 100, args.batch_size, args.dtype)
            for test in tqdm(own, desc='collecting T', disable=processes.rank > 0, leave=False)}
        place = report['models'][item.name]
        if args.gains:
            more, place['gains'] = gains_table(gains(torch.cat([found[test.name] for test in sets[item.name]])))
            lines += headed(models, item, more)
        if args.probe:
            more, place['probe'] = probe_table(found, own, unseen)
            lines += more if len(models) == 1 else []
    if args.probe and len(models) > 1:
        probes = {item.name: report['models'][item.name]['probe'] for item in models}
        report['emergence'] = {
            name: {**found['right'], 'mean': found['accuracy'],
                   **{f'{new}, unseen': found['unseen']['right'][new] for new in unseen}}
            for name, found in probes.items()}
        lines += side_by_side('right by the nearest mean T', report['emergence'], form='.3f')
    if args.gains:
        draw(args, processes, 'gains', gains_figure, {name: of['gains'] for name, of in report['models'].items()})
    if args.probe:
        probes = {item.name: (T[item.name], report['models'][item.name]['probe']) for item in models}
        draw(args, processes, 'probe', probe_figure, probes)
        draw(args, processes, 'kernels', kernels_figure, {name: rows['mean'] for name, (_, rows) in probes.items()})
    return lines


def scores(models, args, processes, report):
    """The default, --scaling and --heterogeneity: report[model]['datasets'], report['scaling'], ['heterogeneity']."""
    comparable(models, args)
    sets, results = sets_of(models, args, shared(models, args) if args.heterogeneity else ()), {}
    for item in in_turn(models, processes):
        results[item.name] = evaluate(item.model, sets[item.name], processes, args.batch_size, args.dtype,
                                      scoring=args.scoring)
        report['models'][item.name].update(scoring=args.scoring, datasets=results[item.name])
    first, title = results[models[0].name], f'{args.scoring} scoring'
    errors = {model: {name: mean(found['rollout']) for name, found in of.items()} for model, of in results.items()}
    if args.scaling:
        report['scaling'] = {item.name: {'residual': item.model.config.residual,
                                         'parameters': aotpot.parameters(item.model),
                                         'score': scaling(errors[item.name].values())} for item in models}
        draw(args, processes, 'scaling', scaling_figure, report['scaling'], title)
        return side_by_side(f'50 mean(-log10 L2RE), {title}', {
            f'{name}, {row["residual"]}': {'M parameters': row['parameters'] / 1e6, 'score': row['score']}
            for name, row in report['scaling'].items()}, form='.4g')
    if args.heterogeneity:
        report['heterogeneity'] = {name: {**row, 'mean': sum(row.values()) / len(row)} for name, row in errors.items()}
        return side_by_side(f'L2RE, {title}', {
            f'{item.name} ({len(item.run.datasets)} datasets)': report['heterogeneity'][item.name] for item in models},
            'column', '.5f')
    if len(models) == 1:
        return table(first, args.scoring) + (metrics_table(first, args.scoring) if args.metrics else [])
    return [line for kind, name in (('rollout', 'L2RE of the rollout'), ('step', 'L2RE of one step'),
                                    ('nrmse', 'nRMSE'), ('vrmse', 'VRMSE'))[:4 if args.metrics else 2]
            for line in side_by_side(f'{name}, {title}', {
                test: {**{model: mean(of[test][kind]) for model, of in results.items()},
                       'persistence': mean(first[test][kind + '_persistence'])} for test in first}, 'row')]


def shared(models, args):
    """--datasets, or those that all the checkpoints were trained on, in the order of the smallest mixture.

    Raises InputError where there is none.
    """
    smallest = min((item.run.datasets for item in models), key=len)
    names = args.datasets or [name for name in smallest if all(name in item.run.datasets for item in models)]
    if not names:
        raise InputError('--heterogeneity: there is no dataset that all the checkpoints were trained on; '
                         'say which with --datasets')
    return names


def training(models, args, processes, report):
    """--curves of the runs of the checkpoints: report['curves']."""
    logs = list(dict.fromkeys(item.path.parent / 'log.jsonl' for item in models))
    found = {name: curve(path) for name, path in zip(names_of(logs), logs)}
    lines, report['curves'] = curves_table(found)
    draw(args, processes, 'curves', curves_figure, found)
    return lines


def pictures(models, args, processes, report):
    """--fields: a rollout of one trajectory of each dataset as DIR/<dataset>_<channel>.png, with --gif as .gif too.

    Raises InputError, before any is drawn, for a channel, step or trajectory that a dataset does not have.
    """
    T = comparable(models, args)
    sets, plans = sets_of(models, args), []
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
        plans.append((f'{test.name}_{channel}', channel, steps))
    for k, (name, channel, steps) in enumerate(plans) if processes.rank == 0 else ():
        found = {item.name: trace(item.model, sets[item.name][k], args.trajectory, channel, max(steps),
                                  processes.device, args.dtype) for item in in_turn(models, processes)}
        truth, predictions = found[models[0].name][0], {name: u for name, (_, u) in found.items()}
        draw(args, processes, name, fields_figure, truth, predictions, steps, channel)
        if args.gif:
            animate(truth, predictions, channel, Path(args.figures) / f'{name}.gif')
            processes.print(f'drew {Path(args.figures) / f"{name}.gif"}')
    return []


def writable(flag, folder):
    """Make the folder that a flag names. Raises InputError, before any work, where no file can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f'--{flag} {folder}: no folder to write into ({error.strerror})') from None


def parse():
    """The flags. Raises InputError for those that contradict one another or would change nothing."""
    parser = configs.Parser(description=__doc__)
    parser.add_argument('--checkpoint', nargs='+', default=(), help='one or several; default: the newest under out/')
    parser.add_argument('--data', default='', help='folder of the datasets; default: that of the training')
    parser.add_argument('--datasets', nargs='+', default=(), help='default: those of the training, with --data all')
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument('--rollout', type=int, default=0, metavar='N',
                         help=f'roll N steps along reference trajectories of {FAMILY} instead, or of --datasets; '
                              'one that has none that long is compared with its training data')
    instead.add_argument('--timing', type=int, nargs='?', default=0, const=1200, metavar='N',
                         help='time single steps of batch 1 instead: the mean of N passes [1200]')
    instead.add_argument('--scaling', action='store_true', help='score against parameters over the checkpoints instead')
    instead.add_argument('--heterogeneity', action='store_true',
                         help='checkpoints of growing mixtures on the datasets that they share instead')
    instead.add_argument('--curves', action='store_true', help='training curves of the runs instead, from log.jsonl')
    instead.add_argument('--fields', action='store_true', help='with --figures: pictures of rollouts instead')
    parser.add_argument('--channel', default='', metavar='NAME', help='channel of --fields; default: the first')
    parser.add_argument('--steps', type=int, nargs='+', metavar='N', help='steps of --fields; default: four')
    parser.add_argument('--trajectory', type=int, metavar='I', help='test trajectory of --fields [0]')
    parser.add_argument('--gif', action='store_true', default=None,
                        help='animate --fields too, up to the last of --steps')
    parser.add_argument('--compile', action=argparse.BooleanOptionalAction,
                        help='--timing of the compiled model too, default: on a GPU')
    parser.add_argument('--scoring', default='native', choices=('native', 'paper'),
                        help='native: on the grid of the dataset; paper: as DPOT, on the model grid [native]')
    parser.add_argument('--metrics', action='store_true', help='a table of nRMSE and VRMSE too')
    parser.add_argument('--gains', action='store_true', help='gains of T, single and composite, instead of scores')
    parser.add_argument('--probe', action='store_true', help='classify the datasets by their T instead of scores')
    parser.add_argument('--unseen', nargs='+', default=(), metavar='NAME',
                        help='add datasets to --probe that were not trained on')
    parser.add_argument('--samples', type=int, metavar='N',
                        help='trajectories of --rollout [8]; windows of each dataset of --gains and --probe [100]')
    parser.add_argument('--batch_size', type=int, default=16, metavar='N', help='trajectories at once [16]')
    parser.add_argument('--figures', default='', metavar='DIR', help='draw figures into this folder too')
    parser.add_argument('--json', default='', metavar='FILE', help='write every number to a file too')
    parser.add_argument('--device', default='auto', help='auto, cpu, cuda, cuda:0')
    parser.add_argument('--dtype', default='fp32', choices=('fp32', 'bf16'), help='bf16: autocast [fp32]')
    args = parser.parse_args()
    configs.at_least(0, rollout=args.rollout, timing=args.timing)
    configs.at_least(1, samples=1 if args.samples is None else args.samples, batch_size=args.batch_size)
    only = {'unseen': ['probe'], 'samples': ['rollout', 'gains', 'probe'], 'compile': ['timing'],
            **dict.fromkeys(('channel', 'steps', 'trajectory', 'gif'), ['fields'])}
    for name, modes in only.items():
        if getattr(args, name) not in (None, '', ()) and not any(getattr(args, mode) for mode in modes):
            raise InputError(f'--{name} is an option of --{", --".join(modes)}; add it')
    drawn = args.rollout or args.gains or args.probe or args.scaling or args.curves or args.fields
    if args.metrics and (drawn or args.timing or args.heterogeneity):
        raise InputError('--metrics is a table of its own; leave the other out, --json has its numbers')
    if args.scoring == 'paper' and (args.timing or drawn) and not (args.scaling or args.heterogeneity):
        raise InputError('--scoring paper is for the scores over the test frames; what is asked for is always native')
    if args.fields and not args.figures:
        raise InputError('--fields: into which folder? add --figures DIR')
    if args.figures and not drawn:
        raise InputError('--figures: of what? add --fields, --rollout N, --gains, --probe, --scaling or --curves')
    args.trajectory = args.trajectory or 0
    configs.at_least(1, steps=min(args.steps or [1]))
    configs.at_least(0, trajectory=args.trajectory)
    return args


def main():
    args = parse()
    if args.figures:
        pyplot()
        writable('figures', Path(args.figures))
    if args.json:
        writable('json', Path(args.json).parent)
        if Path(args.json).is_dir():
            raise InputError(f'--json {args.json}: a folder; name a file')
    models = open_all(args.checkpoint or [newest()])
    processes = distributed.setup(args.device)
    for item in models:
        processes.print(item.headline(processes.device))
    report, lines = {'models': {item.name: {'checkpoint': str(item.path), 'step': item.step,
                                     'parameters': aotpot.parameters(item.model)} for item in models}}, []
    T, other = args.gains or args.probe, args.rollout or args.timing or args.curves or args.fields
    for wanted, mode in ((args.rollout, rollouts), (args.timing, timings), (args.curves, training), (T, matrices),
                         (args.fields, pictures),
                         (args.scaling or args.heterogeneity or not (T or other), scores)):
        if wanted:
            lines += mode(models, args, processes, report)
    for line in lines:
        processes.print(line)
    if args.json and processes.rank == 0:
        if len(models) == 1:
            report = {**report.pop('models')[models[0].name], **report}
        Path(args.json).write_text(json.dumps(jsonable(report), indent=1))


if __name__ == '__main__':
    configs.cli(main)
