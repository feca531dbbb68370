"""Score a trained model: one step, rollouts over the test trajectories, and rollouts of 500 steps; look into its T.

    python evaluate.py                          the newest checkpoint under out/, on the data that it was trained on
    python evaluate.py --checkpoint out/tiny/best.pt --data data --datasets swe_pdb dr_pdb --json scores.json
    python evaluate.py --rollout 500            against long trajectories of our own solver, made once and kept
    python evaluate.py --scoring paper --metrics        as DPOT scores it, on the model grid; nRMSE and VRMSE too
    python evaluate.py --timing                 milliseconds of a single step
    python evaluate.py --gains --probe          how the T of its sub-layers amplify, and whether they tell PDEs apart
    torchrun --standalone --nproc_per_node=8 evaluate.py          the same numbers, sooner

The architecture, the resolution and the data folder come from the checkpoint. Everything is scored on the native grid
of a dataset against its untouched data, on the channels that evolve: padding and static channels are never scored, and
in a rollout they are put back as known. --scoring paper differs in the grid alone; a table holds one scoring.

Shapes: B batch, T input frames, F frames, H W grid points (space), C field channels; L sub-layers, S streams, and T
(B, L, S, S) their mixing matrices.
"""
import argparse
import json
import math
import os
import time
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

import aotpot
import configs
import data
import generate
from configs import InputError

FAMILY = 'ns2d_fno_1e-3'                        # of the long rollouts (paper, Sec. 5.3)
MARKS = (20, 50, 100, 200, 500)                 # steps at which they are reported
PAPER_MS = {'aot': {'tiny': 5.491, 'small': 8.010, 'medium': 15.976},           # of a single step on an H200, batch 1
            'plain': {'tiny': 5.317, 'small': 7.795, 'medium': 15.901}}         # (paper, Table tab-timing)


# ------------------------------------------------------------------------------------------------ processes

class Processes(NamedTuple):
    """What torchrun's environment says, or one process."""
    rank: int
    world_size: int
    device: torch.device

    def print(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def sum(self, tensor):
        """The sum over all processes; a tensor on the CPU goes over the device and comes back."""
        if self.world_size == 1:
            return tensor
        total = tensor.to(self.device)
        dist.all_reduce(total)
        return total.to(tensor.device)


def setup(device='auto'):
    """Join torchrun's process group, if any, and choose the device: --device, or CUDA where there is one.

    Raises InputError for a device that is unknown or absent.
    """
    rank, local_rank, world_size = (int(os.environ.get(name, default)) for name, default in
                                    (('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)))
    name = ('cuda' if torch.cuda.is_available() else 'cpu') if device == 'auto' else device
    try:
        chosen = torch.device(name)
        if chosen.type == 'cuda' and chosen.index is None:
            chosen = torch.device('cuda', local_rank)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f'--device {device}: not available here ({str(error).splitlines()[0]})') from None
    if chosen.type == 'cuda':
        torch.cuda.set_device(chosen)
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group('nccl' if chosen.type == 'cuda' else 'gloo', timeout=timedelta(minutes=30))
    return Processes(rank, world_size, chosen)


# ------------------------------------------------------------------------------------------------ the metric

def relative_l2(prediction, target):
    """||prediction - target||_2 / ||target||_2 of each sample and channel: (B, ..., C), (B, ..., C) -> (B, C).

    The norms run over everything between the first and the last axis: grid points and, if given, frames.
    """
    error, size = ((x.flatten(1, -2)).norm(dim=1) for x in (prediction - target, target))
    return error / size.clamp_min(1e-7)


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
    own = range(processes.rank, count, processes.world_size)
    for batch in (own[i:i + batch_size] for i in range(0, len(own), batch_size)):
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
            line += f'{model:>10.4f}{persistence:>13.4f}{persistence / max(model, 1e-12):>6.1f}x'
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
            f'{mean(scores[kind]):>12.4f}{mean(scores[kind + "_persistence"]):>13.4f}' for kind in ('nrmse', 'vrmse')))
    return lines


def evaluate(model, sets, processes, batch_size=16, dtype='fp32', progress=True, scoring='native'):
    """`score` of every data.Trajectories in `sets`: {name: scores and 'frames'}, with a bar on rank 0."""
    results = {}
    for test in sets if scoring == 'paper' else ():
        coinciding(test, model.config.resolution)           # before the first is scored
    for test in tqdm(sets, desc='evaluating', disable=not progress or processes.rank > 0, leave=False):
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
    own = range(processes.rank, test.count, processes.world_size)
    curves = torch.zeros(3, steps, test.count, len(test.evolving), dtype=torch.float64)
    bar = tqdm(total=steps * math.ceil(len(own) / batch_size), desc='rollout', unit='step', disable=processes.rank > 0,
               leave=False)
    for batch in (own[i:i + batch_size] for i in range(0, len(own), batch_size)):
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
    size, total = curves[0], curves.cumsum(1)
    at = {name: (curves[k] / size).sqrt().mean(-1) for k, name in ((1, 'step'), (2, 'step_persistence'))}
    over = {name: (total[k] / total[0]).sqrt().mean(-1) for k, name in ((1, 'full'), (2, 'full_persistence'))}
    return {**at, **over}


def long_reference(folder, resolution, steps, samples, frames, channels, processes):
    """Trajectories of T + steps frames of the FNO family, nu = 1e-3, in folder/<family>/: made by our solver if new."""
    split = f'rollout{steps}_{configs.show(resolution)}_{samples}'
    path = Path(folder) / FAMILY / f'{split}.h5'
    if resolution[0] != resolution[-1] or len(resolution) != 2:
        raise InputError(f'--rollout: the solver makes square 2-D grids, the checkpoint has {configs.show(resolution)}')
    if processes.rank == 0 and not path.exists():
        print(f'making {samples} reference trajectories of {frames + steps} frames in {path}', flush=True)
        plan = generate.plan(FAMILY, resolution=resolution[0], frames=frames + steps)._replace(counts={split: samples})
        generate.write(folder, [plan], device=processes.device)
    wait(processes)
    return data.Trajectories(folder, FAMILY, split, frames, channels)


def wait(processes):
    """All processes go on once the last one is here; there is no time-out, for rank 0 may be generating data."""
    if processes.world_size > 1:
        dist.barrier(group=dist.new_group(backend='gloo', timeout=timedelta(days=365)))


def rollout_table(curves, steps):
    """Lines of the long-rollout table and its numbers as a dict (paper, Table 3)."""
    marks = [mark for mark in MARKS if mark < steps] + [steps]
    rows, lines = {}, [f'{"L2RE at step":<28}' + ''.join(f'{mark:>10}' for mark in marks)
                       + f'{f"{marks[0]} to {marks[-1]}":>14}']
    for name, title in (('step', 'model, at the step'), ('full', 'model, over all so far'),
                        ('step_persistence', 'persistence, at the step')):
        values = [mean(curves[name][mark - 1]) for mark in marks]
        rows[name] = dict(zip(map(str, marks), values), growth=values[-1] / values[0])
        lines.append(f'{title:<28}' + ''.join(f'{value:>10.4f}' for value in values)
                     + f'{rows[name]["growth"]:>13.1f}x')
    error = curves['step']
    beyond = (~(error <= 1)).any(1).nonzero().flatten()
    infinite = (~error.isfinite()).sum().item()
    rows['first_step_past_1'] = int(beyond[0]) + 1 if len(beyond) else None
    rows['non_finite'] = infinite
    lines.append(f'first step at which a sample is past error 1: {rows["first_step_past_1"] or "none"}; '
                 f'non-finite steps: {infinite} of {error.numel()}')
    return lines, rows


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
    """T of every sub-layer in one forward pass of u (B, T, *space, C): (B, L, S, S), in order, L = 2 depth.

    Raises InputError for a model without T: residual 'plain', or T switched off.
    """
    config, found = model.config, []
    if config.residual == 'plain' or 'T' in config.ablate:
        why = '--residual plain' if config.residual == 'plain' else f'--ablate {config.ablate}'
        raise InputError(f'--gains and --probe: the checkpoint has no T to look at, it was made with {why}')
    hooks = [module.register_forward_hook(lambda module, inputs, outputs: found.append(outputs[2]))
             for module in model.modules() if isinstance(module, aotpot.AOT)]
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
    own = range(processes.rank, len(places), processes.world_size)
    for batch in (own[i:i + batch_size] for i in range(0, len(own), batch_size)):
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


def probe_table(T, sets):
    """Lines of the interpretability experiment and its numbers as a dict (paper, Sec. 5.5).

    T: {name: (N, L, S, S)} of `kernels` with the windows of `spread`, sets: their data.Trajectories. Trajectories of
    even number make the templates, the others are classified, so that no trajectory is on both sides. 'accuracy' is
    the mean over the groups, as if all had equally many samples; the paper finds 0.997 for small.
    Raises InputError where a dataset has windows of one trajectory only, or all are of one group.
    """
    groups = list(dict.fromkeys(group(name) for name in T))
    for test in sets:
        if min(len(T[test.name]), test.count) < 2:
            raise InputError(f'--probe: {test.name}: one trajectory; it needs one for the template, one to classify')
    if len(groups) < 2:
        raise InputError(f'--probe: only {groups[0]} is there; datasets of at least two groups are needed')
    labels = torch.tensor([groups.index(group(name)) for name in T for _ in T[name]])
    fit = torch.tensor([trajectory % 2 == 0 for test in sets for trajectory, _ in spread(test, len(T[test.name]))])
    confusion = probe(torch.cat([*T.values()]), labels, fit)
    right = confusion.diagonal() / confusion.sum(1)
    rows = {'accuracy': right.mean().item(), 'groups': groups, 'confusion': confusion.tolist(),
            'mean': {name: values.mean(0).tolist() for name, values in T.items()}}
    wide = max([26, *(len(name) + 6 for name in groups)])
    lines = [f'nearest mean T: accuracy {rows["accuracy"]:.3f} of {len(groups)} groups, chance {1 / len(groups):.3f}',
             f'{"true group / nearest":<{wide}}{"right":>7}'
             + ''.join(f'{f"({g + 1})":>6}' for g in range(len(groups)))]
    for g, name in enumerate(groups):
        counts = ''.join(f'{count:>6}' for count in rows['confusion'][g])
        lines.append(f'{f"({g + 1}) {name}":<{wide}}{right[g]:>7.3f}{counts}')
    return lines, rows


# ------------------------------------------------------------------------------------------------ the checkpoints

class Opened(NamedTuple):
    """A checkpoint on the command line; `name` stands for it in tables, JSON and figures."""
    name: str
    path: Path
    checkpoint: dict
    model: aotpot.AOTPOT

    @property
    def run(self):
        return configs.RunConfig(**self.checkpoint['config'].get('run', {}))

    @property
    def summary(self):
        return {'checkpoint': str(self.path), 'step': self.checkpoint['step'],
                'parameters': aotpot.parameters(self.model)}

    def headline(self, device):
        config = self.model.config
        return (f'{self.path}: step {self.checkpoint["step"]}, {config.residual}, '
                f'{aotpot.parameters(self.model):,} parameters, {configs.show(config.resolution)} grid, on {device}'
                + (f', fine-tuned from {self.run.init_from or "random weights"}'
                   if 'finetune' in self.checkpoint['config'] else ''))


def newest(folder='out'):
    """The checkpoint under `folder` that was written last."""
    found = sorted(Path(folder).glob('*/*.pt'), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(f'--checkpoint: none given and no {folder}/*/*.pt here; run: python train.py')
    return found[-1]


def names_of(paths):
    """Short names of files, each its own: the folder, else folder/stem, else all of the path.

    Raises InputError for a path given twice.
    """
    kinds = [[path.absolute().parent.name for path in paths],
             [f'{path.absolute().parent.name}/{path.stem}' for path in paths], [str(path) for path in paths]]
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f'--checkpoint {path}: given twice')
    return [next(name for name in of_one if any(kind.count(name) == 1 for kind in kinds)) for of_one in zip(*kinds)]


def open_all(paths):
    """The checkpoints at `paths`, their networks on the CPU."""
    paths, checkpoints = [Path(path) for path in paths], [aotpot.read_checkpoint(path) for path in paths]
    return [Opened(name, path, checkpoint, aotpot.from_checkpoint(checkpoint))
            for name, path, checkpoint in zip(names_of(paths), paths, checkpoints)]


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


def sets_of(models, args, names=()):
    """{model: test sets, in one order for all}: of `names`, --datasets, those trained on, or with --data all.

    Raises InputError where the checkpoints were not trained on the same and neither was given.
    """
    folder = folder_of(models, args)
    names = names or args.datasets
    if not names and all(item.run.data == folder for item in models):
        agreed('datasets', models, lambda item: ' '.join(sorted(item.run.datasets)), 'say which with --datasets')
        names = models[0].run.datasets
    found = data.find(folder, names, 'test')
    return {item.name: [test_set(item, folder, name) for name in found] for item in models}


def test_set(item, folder, name):
    """The test trajectories of a dataset as the network of a checkpoint takes them."""
    config = item.model.config
    return data.Trajectories(folder, name, 'test', config.frames, config.channels, item.run.coefficients)


def comparable(models):
    """Raise InputError where the networks would be scored on different frames or with different references."""
    agreed('--frames', models, lambda item: item.model.config.frames, 'they predict different frames; give one')
    agreed('--resolution', models, lambda item: configs.show(item.model.config.resolution), 'give one')


# ------------------------------------------------------------------------------------------------ the command

def jsonable(results):
    """Tensors -> mean and values of each sample; what is not finite -> null."""
    if isinstance(results, torch.Tensor):
        values = [value if math.isfinite(value) else None for value in results.flatten().tolist()]
        return {'mean': None if None in values else mean(results), 'samples': values}
    if isinstance(results, dict):
        return {name: jsonable(value) for name, value in results.items()}
    if isinstance(results, list):
        return [jsonable(value) for value in results]
    return None if isinstance(results, float) and not math.isfinite(results) else results


def side_by_side(title, cells, best='', digits=4):
    """Lines of a table {row: {column: number}}; the lowest number of each 'row' or 'column' (`best`) gets a *."""
    columns = list(next(iter(cells.values())))
    wide, widths = max(26, len(title) + 1, *(len(row) + 1 for row in cells)), [max(10, len(c) + 3) for c in columns]
    lines = [f'{title:<{wide}}' + ''.join(f'{column:>{w - 1}} ' for column, w in zip(columns, widths))]
    for row, numbers in cells.items():
        line = f'{row:<{wide}}'
        for (column, value), w in zip(numbers.items(), widths):
            rivals = {'': [math.nan], 'row': numbers.values(),
                      'column': [other[column] for other in cells.values()]}[best]
            line += f'{value:>{w - 1}.{digits}f}' + ('*' if value == min(rivals) else ' ')
        lines.append(line)
    return [line.rstrip() for line in lines]


def headed(models, tables):
    """The lines of each model's table; under its name where there are several."""
    return [line for item in models for line in ([f'{item.name}:'] if len(models) > 1 else []) + tables[item.name]]


def rollouts(models, args, processes, report):
    """--rollout: against long references; report[model]['rollout'] and the lines."""
    comparable(models)
    folder, config, curves, tables = folder_of(models, args), models[0].model.config, {}, {}
    test = long_reference(folder, config.resolution, args.rollout, args.samples or 8, config.frames,
                          max(item.model.config.channels for item in models), processes)
    for item in in_turn(models, processes):
        found = rollout_curve(item.model, test, processes, args.rollout, args.batch_size, args.dtype)
        tables[item.name], rows = rollout_table(found, args.rollout)
        report['models'][item.name]['rollout'] = {**rows, 'curve': [mean(step) for step in found['step']]}
        curves[item.name] = found                                       # (steps, N) for the figure
    if len(models) == 1:
        return tables[models[0].name]
    rows = {name: report['models'][name]['rollout']['step'] for name in curves}
    return side_by_side('L2RE at step', rows, 'column', 5)


def timings(models, args, processes, report):
    """--timing: one process times, undisturbed; report[model]['timing'] and the lines."""
    sets, tables = sets_of(models, args), {}
    compiled = processes.device.type == 'cuda' if args.compile is None else args.compile
    for item in in_turn(models, processes) if processes.rank == 0 else ():
        tables[item.name], report['models'][item.name]['timing'] = timing(
            item.model, sets[item.name], processes.device, args.dtype, args.timing, compiled)
    return headed(models, tables) if tables else []


def matrices(models, args, processes, report):
    """--gains and --probe: report[model]['gains'] and ['probe'], and the lines."""
    sets, T, tables = sets_of(models, args), {}, {}
    for item in in_turn(models, processes):
        T = {test.name: kernels(item.model, test, processes, args.samples or 100, args.batch_size, args.dtype)
             for test in tqdm(sets[item.name], desc='collecting T', disable=processes.rank > 0, leave=False)}
        lines, found = tables.setdefault(item.name, []), report['models'][item.name]
        if args.gains:
            more, found['gains'] = gains_table(gains(torch.cat([*T.values()])))
            lines += more
        if args.probe:
            more, found['probe'] = probe_table(T, sets[item.name])
            lines += more
    return headed(models, tables)


def scores(models, args, processes, report):
    """The default: report[model]['datasets'], and the lines."""
    comparable(models)
    sets, results = sets_of(models, args), {}
    for item in in_turn(models, processes):
        results[item.name] = evaluate(item.model, sets[item.name], processes, args.batch_size, args.dtype,
                                      scoring=args.scoring)
        report['models'][item.name].update(scoring=args.scoring, datasets=results[item.name])
    if len(models) == 1:
        [found] = results.values()
        return table(found, args.scoring) + (metrics_table(found, args.scoring) if args.metrics else [])
    lines, first = [], results[models[0].name]
    for kind, title in (('rollout', 'L2RE of the rollout'), ('step', 'L2RE of one step'), ('nrmse', 'nRMSE'),
                        ('vrmse', 'VRMSE'))[:4 if args.metrics else 2]:
        cells = {name: {**{model: mean(found[name][kind]) for model, found in results.items()},
                        'persistence': mean(first[name][kind + '_persistence'])} for name in first}
        lines += side_by_side(f'{title}, {args.scoring} scoring', cells, 'row')
    return lines


def pyplot():
    """matplotlib.pyplot without a display. Raises InputError where what draws the figures is not installed."""
    try:
        import matplotlib
        import sklearn                                                  # noqa: F401, the t-SNE of --probe
    except ImportError:
        raise InputError('--figures needs matplotlib and scikit-learn: '
                         'pip install matplotlib scikit-learn') from None
    matplotlib.use('Agg')
    from matplotlib import pyplot
    return pyplot


def parse():
    parser = configs.Parser(description=__doc__)
    parser.add_argument('--checkpoint', nargs='+', default=(), help='one or several; default: the newest under out/')
    parser.add_argument('--data', default='', help='folder of the datasets; default: that of the training')
    parser.add_argument('--datasets', nargs='+', default=(), help='default: those of the training, with --data all')
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument('--rollout', type=int, default=0, metavar='N',
                         help=f'roll N steps along reference trajectories of {FAMILY} instead')
    instead.add_argument('--timing', type=int, nargs='?', default=0, const=1200, metavar='N',
                         help='time single steps of batch 1 instead: the mean of N passes [1200]')
    parser.add_argument('--compile', action=argparse.BooleanOptionalAction,
                        help='--timing of the compiled model too, default: on a GPU')
    parser.add_argument('--scoring', default='native', choices=('native', 'paper'),
                        help='native: on the grid of the dataset; paper: as DPOT, on the model grid [native]')
    parser.add_argument('--metrics', action='store_true', help='a table of nRMSE and VRMSE too')
    parser.add_argument('--gains', action='store_true', help='gains of T, single and composite, instead of scores')
    parser.add_argument('--probe', action='store_true', help='classify the datasets by their T instead of scores')
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
    return args


def main():
    args = parse()
    if args.figures:
        pyplot()
    models = open_all(args.checkpoint or [newest()])
    processes = setup(args.device)
    for item in models:
        processes.print(item.headline(processes.device))
    report, lines = {'models': {item.name: item.summary for item in models}}, []
    inner = args.gains or args.probe
    for wanted, mode in ((args.rollout, rollouts), (args.timing, timings), (inner, matrices),
                         (not (args.rollout or args.timing or inner), scores)):
        if wanted:
            lines += mode(models, args, processes, report)
    processes.print('\n'.join(lines))
    if args.json and processes.rank == 0:
        if len(models) == 1:
            report = {**report.pop('models')[models[0].name], **report}
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(jsonable(report), indent=1))


if __name__ == '__main__':
    configs.cli(main)
