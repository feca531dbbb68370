"""Pre-train AOT-POT on a mixture of PDE datasets.

    python train.py                     nano, for a laptop, on data that the script generates itself
    torchrun --standalone --nproc_per_node=8 train.py --size small      on GPUs, compiled, in bf16
    python train.py --size tiny --datasets swe_pdb dr_pdb --lr 5e-4 --out out/two
    python train.py --size small --resume       start this run, or continue it exactly

The folder out/<size>/ gets last.pt (all that is needed to resume), config.json and log.jsonl (one
line every --log_every steps and one for each scoring), and where every dataset has a valid.h5 also
best.pt, the weights with the lowest error on it. A folder that holds a run is refused without
--resume. Defaults in brackets are those of --size.
"""
import runtime  # noqa: F401, isort: skip, before torch
import argparse
import dataclasses
import json
import math
import signal
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

import aotpot
import configs
import data
import evaluate
from configs import InputError, show
from nets import experts
from nets.build import OPTIMIZERS, autocast, build, compile_model, optimizer_of
from runtime import distributed, files, memory, runs, terminal
from runtime.checkpoint import load_file, maps_in, save_file, start_from

# -------------------------------------------------------------------------------------------- flags

class Command(NamedTuple):
    """What a command line asks for."""
    model: configs.ModelConfig
    recipe: configs.TrainConfig
    run: configs.RunConfig
    given: frozenset            # the names of the flags in it
    size: str = ''              # the preset of train.py
    tune: dict = {}             # the settings of finetune.py


def parse(argv=None):
    """The Command of a command line. Raises InputError for flags that contradict one another."""
    first = terminal.Parser(add_help=False)
    first.add_argument('--size', default=argparse.SUPPRESS,
                       help=f'preset, one of {" ".join(configs.SIZES)} [nano]')
    size = getattr(first.parse_known_args(argv)[0], 'size', 'nano')
    parser = terminal.Parser(description=__doc__, parents=[first])
    parser.add(configs.model(size), f'model ({size})')
    parser.add(configs.recipe(size), f'recipe ({size})')
    parser.add(configs.run(size), 'run')
    args = parser.parse_args(argv)
    model = configs.override(configs.model(size, network=getattr(args, 'network', 'aotpot')), args)
    recipe = configs.override(configs.recipe(size), args)
    cuda = distributed.choose_device(getattr(args, 'device', 'auto')).type == 'cuda'
    run = configs.override(configs.run(size, cuda), args)
    name = size if model.network == 'aotpot' else f'{size}-{model.network}'
    run = dataclasses.replace(run, out=run.out or f'out/{name}')
    return Command(model, recipe, run, frozenset(vars(args)), size)


# --------------------------------------------------------------------------------------------- data

def with_data(run, size, processes):
    """The run config with folder and datasets; rank 0 generates those of configs.BUILTIN."""
    folder = run.data
    names = run.datasets
    if not folder:
        found = any(Path('data').glob('*/train.h5'))
        builtin = size if found or size in configs.BUILTIN else 'nano'
        if builtin != size:
            terminal.warn(f'--size {size} without --data: there is no data/<dataset>/train.h5, so '
                          f'this run trains on data/nano; sources.generate and .prepare fill data/')
        mixture = configs.BUILTIN.get(builtin, ())
        folder = f'data/{builtin}' if mixture else 'data'
        names = configs.datasets_of(names) or sorted(mixture)
        absent = [name for name in names if not Path(folder, name, 'train.h5').exists()]
        if processes.rank == 0 and absent and {*absent} <= {*mixture}:
            from sources import generate  # the solvers, where data have to be made
            print(f'generating small datasets of the built-in mixture in {folder}', flush=True)
            plans = [generate.plan(name, builtin) for name in absent]
            generate.generate(folder, plans, device=processes.device)
    distributed.barrier(processes)
    return dataclasses.replace(run, data=folder, datasets=tuple(data.find(folder, names)))


def shape_of_data(config, datasets):
    """{field: value} of a model config for data.Trajectories: at least its channels, at most its
    frames. One's own data are dimensionless and, if all have one grid, give it, in whole patches.
    """
    fields = {'channels': max(config.channels, *(dataset.channels for dataset in datasets)),
              'frames': min(config.frames, *(dataset.frames - 1 for dataset in datasets))}
    if {dataset.name for dataset in datasets} & {*configs.DATASETS}:
        return fields
    grid, *others = {dataset.space for dataset in datasets}
    if not others:
        P = config.patch
        fields['resolution'] = tuple(math.ceil(size / P) * P for size in grid)
    return {**fields, 'normalize': True}


def fitted(command, processes):
    """The Command, fitted to one's own data where no flag says otherwise."""
    run = command.run
    if {*run.datasets} & {*configs.DATASETS}:
        return command
    datasets = [data.Trajectories(run.data, name, 'train', 1, None) for name in run.datasets]
    fields = shape_of_data(command.model, datasets)
    model = dataclasses.replace(command.model, **{
        name: value for name, value in fields.items() if name not in command.given})
    announce_shape(command.model, model, datasets, processes)
    return command._replace(model=model)


def announce_shape(before, now, datasets, processes):
    """Print what of a model config has changed for the data, as flags, if anything has."""
    flags = [f'--{name} {show(getattr(now, name))}' for name in ('resolution', 'frames', 'channels')
             if getattr(now, name) != getattr(before, name)]
    if now.normalize and not before.normalize:
        flags.append('--normalize')
    if flags:
        processes.print(f'on these data the network has {" ".join(flags)}')
    for grid in sorted({dataset.space for dataset in datasets} - {now.resolution}):
        processes.print(f'fields of {show(grid)} are interpolated to {show(now.resolution)}, '
                        f'whole patches of {now.patch} points')


def open_splits(run, config, rows=None):
    """{split: [data.Trajectories]} of a run, of 'valid' those that exist. rows: of the training."""
    def opened(split, names=run.datasets, rows=None):
        return [data.Trajectories(run.data, name, split, config.frames, config.channels, rows,
                                  config.dims) for name in names]
    valid = [name for name in run.datasets if Path(run.data, name, 'valid.h5').exists()]
    train = opened('train', rows=rows)
    return {'train': train, 'test': opened('test'), 'valid': opened('valid', valid)}


def sampling_weights(names, recipe):
    """w_k of each dataset: --sampling's, the paper's, or 1. InputError: unknown dataset."""
    given = recipe.weights()
    for name in given:                       # those of a preset that are absent here have no effect
        if name not in {*names, *configs.DATASETS}:
            raise InputError(f'--sampling {name}: there is no such dataset in the mixture'
                             f'{configs.nearest(name, names)}')
    paper = {name: dataset.weight for name, dataset in configs.DATASETS.items()}
    return [given.get(name, paper.get(name, 1.0)) for name in names]


# -------------------------------------------------------------------------------------------- a run

class Training(NamedTuple):
    """A run, new or continued, before its next step."""
    command: Command            # whose steps and precision are set
    splits: dict                # as of `open_splits`
    windows: data.Windows       # the training data
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    progress: runs.State
    metadata: dict              # of its checkpoints: {'config', 'data', 'dtype'}


def headers_of(command, splits, processes, resumed, pretrained):
    """{dataset: {split: what a checkpoint keeps of its file}}: the header, and the `checksum` of its
    fields; of training data their `units` as well, which are set in `splits`.

    resumed, pretrained: as in `new_or_continued`. Data that these know keep their units, by which
        the weights know them.
    """
    config, _, run, *_ = command
    saved = resumed or pretrained or {}
    headers = {name: data.read_headers(Path(run.data, name)) for name in run.datasets}
    for dataset in splits['train']:
        before = saved.get('data', {}).get(dataset.name, {}).get('train', {})
        # the source of files of one's own is their names, which others have, too
        named = 'layout' not in before and before.get('source') and dataset.header['source']
        same = resumed or named and not data.difference(dataset.header, before, '', '')[0]
        if 'units' in before and same:
            dataset.units = data.Units.read(before)
        elif 'units' in before and config.normalize and saved['config']['model'].get('normalize'):
            processes.print(f'{dataset.name}: fields are divided by the numbers of {dataset.path}, '
                            f'not by those of the earlier training')
        headers[dataset.name]['train']['units'] = dataset.units.header()
    for split, datasets in splits.items():
        for dataset in datasets:
            headers[dataset.name][split]['checksum'] = dataset.checksum()
    return headers


def new_or_continued(command, splits, processes, resumed=None, pretrained=None):
    """The Training of a Command; None: it is finished.

    resumed: the last.pt of the run that goes on. pretrained: the checkpoint from whose weights a
    new one starts. Both are of `load_file`; their tensors are let go.
    """
    config, recipe, run, given, _, tune = command
    if run.threads:                                                     # of each process
        torch.set_num_threads(run.threads)
    frozen = bool(tune) and not tune['from_scratch']                    # as are the routers then
    for name, known in ('loss', LOSSES), ('optimizer', OPTIMIZERS):
        chosen = getattr(recipe, name)
        if chosen not in known:
            raise InputError(f'--{name} {chosen}: there is none{configs.nearest(chosen, known)}')
    few = recipe.batch_size < 2 * processes.world_size
    if config.experts and not frozen and (run.accumulate > 1 or few):
        raise InputError('--experts: the BatchNorm in the router needs whole batches of at least '
                         '2 samples in each process; lower --batch_size instead of --accumulate')
    headers = headers_of(command, splits, processes, resumed, pretrained)
    if resumed:
        runs.require_same_data(resumed['data'], headers, run.data)
    sampling = sampling_weights(run.datasets, recipe)
    windows = data.Windows(splits['train'], config, sampling, recipe.seed)
    steps = recipe.steps or math.ceil(recipe.epochs * windows.draws / recipe.batch_size)
    if resumed and resumed['scored'] == steps:
        processes.print(f'the run in {run.out} is finished, at step {resumed["step"]}; there is '
                        f'nothing left to do but python evaluate.py --checkpoint {run.out}')
        return None
    if not resumed and 'save_every' not in given:       # or best.pt would have few to choose from
        run = dataclasses.replace(run, save_every=min(run.save_every, math.ceil(steps / 10)))
    settings = runs.settings_of(command._replace(run=run))
    dtype = (resumed['dtype'] if resumed else
             distributed.precision(run.dtype, processes, config.width))
    command = command._replace(recipe=dataclasses.replace(recipe, steps=steps),
                               run=dataclasses.replace(run, dtype=dtype))
    torch.manual_seed(recipe.seed)
    model = build(config, run.form, headers).to(processes.device)
    announce(model, windows, sampling, command, processes)
    if pretrained:
        known = {name: its['train'] for name, its in pretrained['data'].items()}
        for dataset in splits['train']:
            for _, words in evaluate.unlike(dataset, known, pretrained['path']):
                terminal.warn(words)
        processes.print(start_from(model, pretrained))
    earlier = pretrained['config']['model'] if pretrained else {}
    loaded = earlier.get('channels') == config.channels and earlier.get('channel_maps')
    if not resumed and config.channel_maps not in ('', 'learned', loaded):
        model.load_state_dict(maps_in(config.channel_maps, config.channels), strict=False)
    if frozen:
        experts.freeze_routers(model)
    optimizer = optimizer_of(model, recipe, processes.device, dtype)
    progress = runs.restore(resumed, model, optimizer) if resumed else runs.State()
    (resumed or pretrained or {}).clear()       # or its tensors would stay until the end of the run
    metadata = {'config': settings, 'data': headers, 'dtype': dtype}
    return Training(command, splits, windows, model, optimizer, progress, metadata)


def announce(model, windows, sampling, command, processes):
    """Print the header: the network, the machine, the datasets and their shares of the draws."""
    config, recipe, run, *_ = command
    hardware = f'{processes.world_size} x {processes.device.type}'
    if run.compile != 'off':
        hardware += ', compiled before the first step, which takes a minute or two'
    size = f'{aotpot.parameters(model):,} parameters'
    if config.experts:
        size += f', {experts.activated(model):,} of them activated'
    processes.print(f'{config.title}, {size}, {show(config.resolution)} grid, {run.dtype} on '
                    f'{hardware}, global batch {recipe.batch_size} -> {run.out}')
    for dataset, weight, share in zip(windows.datasets, sampling, windows.share):
        processes.print(f'  {dataset.name:<34} {dataset.count:>6} trajectories of '
                        f'{dataset.frames:>3} frames, {show(dataset.space)}, weight {weight:g}: '
                        f'{share:.0%} of the draws')


# ----------------------------------------------------------------------------------------- one step

def one_cycle(step, steps, peak, warmup, start=1e-4, end=1e-8):
    """The learning rate of step 0..steps-1: a cosine from start * peak to peak, then to end * peak.

    This is torch's OneCycleLR with DPOT's divisors and a fixed beta1, without any state.
    """
    top = warmup * steps - 1
    if steps == 1:
        return peak
    if step <= top:
        low = start
        phase = step / top if top else 1.0
    else:
        low = end
        phase = 1 - (step - top) / (steps - 1 - top)
    return peak * (low + (1 - low) * (1 - math.cos(math.pi * phase)) / 2)


def relative_loss(prediction, windows, size):
    """DPOT's loss of a prediction (b, *space, C) of windows (b, T+1, *space, C): (b, C).

    size: (b, C), the norm of the next frame, with --normalize of its fluctuation about the mean.
    """
    return data.norm(prediction - windows[:, -1]) / size


def change_loss(prediction, windows, size):
    """`relative_loss` over the square root of ||u_T+1 - u_T|| / size, clamped to [0.01, 1], so that
    data that change slowly count as much as others. Not in the paper.
    """
    change = relative_loss(windows[:, -2], windows, size).clamp(0.01, 1)
    return relative_loss(prediction, windows, size) / change.sqrt()


def squared_loss(prediction, windows, size):
    """Eq. (14) for one frame, as a mean over the grid points."""
    return (prediction - windows[:, -1]).square().flatten(1, -2).mean(1)


LOSSES = {'relative': relative_loss, 'change': change_loss, 'squared': squared_loss}       # --loss


def loss_of(prediction, batch, kind='relative', normalize=False):
    """The mean error of the next frames on evolving channels and native grid points.

    prediction: (B, *space, C) of the samples of a data.Batch, in its order. kind: one of LOSSES.
    normalize: whether an error counts relative to the fluctuation of the frame, and at most as many
        times as that exceeds the floor: a channel at rest is then one of many, or it would decide.
    """
    sizes = [len(windows) for windows in batch.windows]
    parts = prediction.split(sizes), batch.windows, batch.floor.split(sizes)
    errors = []
    for part, windows, floor in zip(*parts):
        native = data.resize(part[:, None], windows.shape[2:-1])[:, 0]
        target = windows[:, -1]
        size = data.size_of(data.fluctuation(target) if normalize else target, floor)
        error = LOSSES[kind](native, windows, size)                                     # (b, C)
        if normalize and kind != 'squared':
            error = error / (1 + error * data.size_of(torch.zeros_like(target), floor) / size)
        errors.append(error)
    errors = torch.where(batch.evolving, torch.cat(errors), 0)                          # (B, C)
    return (errors.sum(1) / batch.evolving.sum(1)).mean()


# ----------------------------------------------------------------------------------------- the loop

def score_weights(training, log, processes):
    """Score the weights on valid.h5, or where there is none on test.h5, and log it.

    They become best.pt if every dataset has a valid.h5 and no others had a lower error, and with
    --keep step<N>.pt. The time does not count as training.
    """
    command, splits, _, model, _, progress, metadata = training
    _, recipe, run, *_ = command
    split = 'valid' if splits['valid'] else 'test'
    samples = data.samples_per_pass(recipe.batch_size, processes.world_size, run.accumulate)
    error = evaluate.validation_error(model, splits[split], processes, run.dtype, samples)
    progress.scored = progress.step
    names = [dataset.name for dataset in splits[split]]
    whose = '' if len(names) == len(splits['train']) else f' ({" ".join(names)} alone)'
    processes.print(f'step {progress.step}: {split} {error:.4f}{whose}')
    weights = {'model': model.state_dict(), 'step': progress.step, **metadata}
    if split == 'valid' and not whose and error < progress.best:
        progress.best = error
        if processes.rank == 0:
            save_file({**weights, 'valid': error}, Path(run.out, 'best.pt'))
    if run.keep and processes.rank == 0:
        save_file(weights, Path(run.out, f'step{progress.step}.pt'))
    log.append({'step': progress.step, split: error if math.isfinite(error) else None})


def is_due(step, command):
    """Whether a run is saved and scored after so many steps."""
    return step > 0 and (step == command.recipe.steps or step % command.run.save_every == 0)


def fit(training, network, batches, log, arrived, processes):
    """Minimise Eq. (3) until all steps are done, or a signal has come, which is returned, or 0.

    network: the model, compiled and parallel. batches: yields a data.Batch for each part of a step.
    arrived: a list of signals, which several processes compare when they write a line of the log.
    """
    command, _, windows, model, optimizer, progress, _ = training
    config, recipe, run, *_ = command
    while True:
        if is_due(progress.step, command) and progress.step > progress.scored:
            score_weights(training, log, processes)
        if progress.step == recipe.steps:
            runs.save(training, processes)
            return distributed.first_signal(arrived, processes)
        lr = one_cycle(progress.step, recipe.steps, recipe.lr, recipe.warmup)
        for group in optimizer.param_groups:
            group['lr'] = lr * group.get('ratio', 1)
        loss = 0.0
        for part, batch in enumerate(islice(batches, run.accumulate), start=1):
            if processes.world_size > 1:
                # as DistributedDataParallel's no_sync
                network.require_backward_grad_sync = part == run.accumulate
            u = data.noisy_inputs(batch, config, recipe.noise)                  # (B, T, *space, C)
            with autocast(run.dtype, u.device):
                prediction = network(u, batch.condition)                        # (B, *space, C)
            of_part = loss_of(prediction.float(), batch, recipe.loss, config.normalize)
            of_part = of_part / run.accumulate
            (of_part + recipe.balance * experts.balance_loss(model)).backward()
            loss += of_part.detach()
        norm = clip_grad_norm_(network.parameters(), recipe.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)   # which stay where the compiler and DDP expect them
        progress.step += 1
        load = experts.after_step(model) if config.experts else norm.new_empty(0)
        log.add(loss, norm, load)
        due = is_due(progress.step, command)
        stop = 0
        if due or progress.step % run.log_every == 0 or arrived and processes.world_size == 1:
            log.write(progress.step, lr, progress.step * recipe.batch_size / windows.draws)
            stop = distributed.first_signal(arrived, processes)
        if due or stop:
            runs.save(training, processes)
        if stop:
            return stop


def run_to_the_end(training, processes):
    """Train, and print the errors on the test data. Returns the exit code."""
    command, splits, windows, model, _, progress, metadata = training
    _, recipe, run, *_ = command
    samples = data.samples_per_pass(recipe.batch_size, processes.world_size, run.accumulate)
    if progress.step == 0:
        runs.save(training, processes)
    if processes.rank == 0:
        settings = {**metadata['config'], 'data': metadata['data'], 'steps': recipe.steps}
        files.write_text(Path(run.out, 'config.json'), json.dumps(settings, indent=1))
    log = runs.Log(Path(run.out, 'log.jsonl'), progress.step, recipe, processes)
    started = time.perf_counter()
    if processes.device.type == 'cpu':
        with autocast(run.dtype, processes.device):
            processes.print(memory.forecast(model.eval(), samples, run.accumulate))
    compiled = compile_model(model.train(), run, samples, processes.device)
    numbers = data.numbers_of_rank(range(progress.step, recipe.steps), recipe.batch_size,
                                   processes.rank, processes.world_size, run.accumulate)
    batches = data.batches(windows, numbers, processes.device, run.workers)
    arrived = []

    def note(number, _):
        arrived.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)            # Ctrl-C after a signal kills
    log.since = time.perf_counter()                         # compiling does not count
    with terminal.handling(terminal.SIGNALS, note), closing(batches):
        # the network of several processes has no name here: it has to go before the group that it
        # uses, or both may wait
        stop = fit(training, distributed.data_parallel(compiled, processes), batches, log, arrived,
                   processes)
    if stop:
        processes.print(f'stopped by {signal.Signals(stop).name} at step {progress.step}; continue '
                        f'with the same command and --resume')
    else:
        trained = time.perf_counter()
        results = evaluate.score_all(model, splits['test'], processes, min(samples, 16))
        processes.print('\n'.join(evaluate.score_table(results)))
        processes.print(f'{trained - started:.0f} s of training, '
                        f'{time.perf_counter() - trained:.0f} s of evaluation; checkpoints in '
                        f'{run.out}')
    distributed.leave(processes)
    return 128 + stop if stop else 0


def main():
    command = parse()
    processes = distributed.setup(command.run.device, runs.flat(runs.settings_of(command)))
    with files.lock(command.run.out, processes):
        resumed = runs.checkpoint_to_resume(command.run, processes)
        pretrained = None
        if resumed:
            command = runs.taken_over(command, resumed)
        elif command.run.init_from:
            pretrained = load_file(command.run.init_from)
        command = command._replace(run=with_data(command.run, command.size, processes))
        if not resumed:
            command = fitted(command, processes)
        splits = open_splits(command.run, command.model)
        training = new_or_continued(command, splits, processes, resumed, pretrained)
        return run_to_the_end(training, processes) if training else 0


if __name__ == '__main__':
    terminal.cli(main)
