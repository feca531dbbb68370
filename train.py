"""Pre-train AOT-POT on a mixture of PDE datasets.

    python train.py                                     nano, for a laptop, on data that the script generates itself
    torchrun --standalone --nproc_per_node=8 train.py --size small --dtype bf16 --compile
    python train.py --size tiny --datasets swe_pdb dr_pdb --lr 5e-4 --out out/two
    python train.py --resume out/small/last.pt          continue this run exactly, with its own flags
    python train.py --size small --resume auto          start this run, or continue it if it has begun

The folder out/<size>/ gets last.pt (all that is needed to resume), best.pt (the weights with the lowest one-step error
on valid.h5, or on test.h5 of a dataset that has none), log.jsonl (one line every --log_every steps) and config.json. A
folder that holds a run is refused without --resume or --overwrite. Defaults in brackets are those of --size.
"""
import dataclasses
import importlib.util
import json
import math
import os
import platform
import re
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import configs
from configs import IN_OUT, InputError, show

import torch
from torch.nn.parallel import DistributedDataParallel

import aotpot
import data
import evaluate
import metrics
import nets
from nets import baselines, experts
from runtime import distributed, terminal
from runtime.checkpoint import channel_maps, check_form, initialise, model_config, read, read_log, weights_for, write
from runtime.terminal import Progress, naming, replacing
from sources import generate

MAX_SKIPPED = 10                                # so many non-finite steps in a row end a run


# ------------------------------------------------------------------------------------------------ flags and data

def parse(argv=None):
    """(model config, recipe, run config, dict of the last.pt to resume or None, was --data given) of a command line.

    Raises InputError for flags that contradict one another or the run to resume, and if a run would be replaced.
    """
    size = terminal.Parser(add_help=False)
    size.add_argument('--size', default='nano')
    name = size.parse_known_args(argv)[0].size
    model, recipe, run = configs.model(name), configs.recipe(name), configs.RunConfig()
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('--size', choices=list(configs.SIZES), help='preset of model and recipe [nano]')
    for config, title in ((model, f'model ({name})'), (recipe, f'recipe ({name})'), (run, 'run')):
        parser.add(config, title)
    args = parser.parse_args(argv)
    if 'steps' in args and 'epochs' in args:
        raise InputError('--steps and --epochs: give only one of the two')
    if 'epochs' in args:
        args.steps = 0
    saved, network = None, getattr(args, 'network', '')
    out = '-'.join([f'out/{name}', *network.split(':')[1:]])                        # out/nano-FNO of baselines:FNO
    if 'resume' in args:
        path, saved = resumed(args.resume, getattr(args, 'out', ''), out)
    if saved:
        if 'finetune' in saved['config']:
            raise InputError(f'--resume {path}: this is a run of finetune.py; resume it with: python finetune.py')
        begun = restore(saved, path, network)
        wanted = (model, recipe, run) if args.resume == 'auto' else (model, recipe, begun[2]) if args.size else begun
        unchanged(args, begun, wanted)
        model, recipe, run = begun
    model, recipe, run = (configs.override(config, args) for config in (model, recipe, run))
    if not run.data:
        preset = name if name in configs.BUILTIN else '' if any(Path('data').glob('*/train.h5')) else 'nano'
        mixture = tuple(sorted(configs.BUILTIN.get(preset, ())))
        if preset not in ('', name) and distributed.place(os.environ)[0] == 0:
            terminal.warn(f'--size {name} without --data: there is no data/<dataset>/train.h5, so this run trains on '
                          f'the small built-in mixture in data/{preset}; fill data/ with: python -m sources.generate '
                          f'all, or python -m sources.prepare NAME --source DOWNLOAD')
        run = dataclasses.replace(run, data=str(Path('data', preset)), datasets=run.datasets or mixture)
    run = dataclasses.replace(run, out=run.out or out)
    keep_runs(run, saved)
    return model, recipe, run, saved, 'data' in args


def resumed(resume, out, default=''):
    """(path, saved dict) of the checkpoint that --resume names: a file, a folder with a last.pt, or that in `out`.

    out: --out if it is given; default: the folder that it has otherwise.
    The dict is None if `resume` is 'auto' and --out has no last.pt. All processes look before any of them has written
    anything, since last.pt is first written after a step that all of them take; `join` checks that they saw the same.
    Raises InputError if there is no such checkpoint, if it lacks the state of the optimizer, if the state of the run
    in it has another form than one that was saved, or if it lies outside --out.
    """
    in_out = resume in (IN_OUT, 'auto')
    path = Path(out or default) if in_out else Path(resume)
    path = path / 'last.pt' if path.is_dir() or in_out else path
    if resume == 'auto' and not path.exists():
        return path, None
    saved = read(path)
    if 'optimizer' not in saved:
        raise InputError(f'--resume {path}: this file holds weights only; resume from the last.pt of the run')
    saved = {**dataclasses.asdict(State()), **saved}
    mixture = saved.get('mixture')
    check_form(saved, {**dataclasses.asdict(State()), 'rng': torch.get_rng_state(), 'optimizer': {'state': dict},
                       'mixture': dict.fromkeys(mixture, [0, 0]) if isinstance(mixture, dict) else dict}, path)
    if out and Path(out).resolve() != path.parent.resolve():
        raise InputError(f'--out {out}: the run to resume goes on where it lies, in {path.parent}; leave --out away, '
                         f'or copy the folder and resume the copy')
    return path, saved


def restore(saved, path, network):
    """The model config, recipe and run config in the checkpoint `path`, whose folder is the run's --out from now on.

    network: --network, for `checkpoint.model_config`.
    Its data are where they were relative to that folder, so that they are found from another working directory and
    after the whole tree has moved; if nothing is there, they are where the command that began the run named them.
    """
    config = saved['config']
    run = configs.RunConfig(**config['run'])
    near = os.path.normpath(path.parent / os.path.relpath(run.data, run.out))
    found = near if os.path.isdir(near) and not os.path.isabs(run.data) and not os.path.isabs(run.out) else run.data
    run = dataclasses.replace(run, data=found, out=str(path.parent), overwrite=False)
    return model_config(saved, network), configs.TrainConfig(**config['train']), run


def unchanged(args, begun, wanted):
    """Raise InputError if the configs `wanted`, with the flags in `args`, differ from those that the run began with.

    --resume wants what the run began with, --resume auto what the command would start with, and --size its preset. Of
    the run config only what decides on the network and its input is compared.
    """
    for before, config in zip(begun, wanted):
        names = [field.name for field in dataclasses.fields(before)]
        for name in ('coefficients', 'init_from') if isinstance(before, configs.RunConfig) else names:
            old, new = getattr(before, name), getattr(configs.override(config, args), name)
            if old != new:
                raise InputError(f'--{name} {show(new) or "(none)"}: the run to resume has {show(old) or "none"}; '
                                 f'use its checkpoint to start another run from its weights')


def keep_runs(run, saved):
    """Raise InputError if a new run would replace one in its folder without --overwrite. saved: as of `resumed`.

    Only checkpoints count: a run that was killed before its first one starts again.
    """
    if run.overwrite and run.resume:
        raise InputError('--overwrite and --resume: give only one of the two')
    found = [name for name in ('last.pt', 'best.pt') if (Path(run.out) / name).exists()]
    if found and not saved and not run.overwrite:
        raise InputError(f'--out {run.out}: the folder holds a run ({" ".join(found)}); continue it with --resume '
                         f'{run.out}, choose another --out, or replace it with --overwrite')


def find_data(run, given, processes, saved=None):
    """The names of the datasets to train on. If there is no data, rank 0 generates the built-in mixture first.

    given: whether --data was given; then nothing is generated. Otherwise data/nano may hold other datasets, and the
    built-in mixture is added if a part of it is wanted and absent; so it is with data/mini and its mixture.
    saved: the dict of the last.pt to resume, for which nothing is generated.
    """
    folder = Path(run.data)
    if saved and not folder.is_dir():
        raise InputError(f'--resume: the data of the run are not in {folder}; say with --data where they are')
    mixture = configs.BUILTIN.get(folder.name, ()) if not given and folder.parent == Path('data') else ()
    absent = [name for word in run.datasets for name in configs.MIXTURES.get(word, (word,))
              if not (folder / name / 'train.h5').exists()]
    if processes.rank == 0 and mixture and absent and not saved:
        for name in absent:
            if name not in mixture:
                raise InputError(f'--datasets {name}: {folder} lacks it and it is not a built-in dataset'
                                 f'{configs.nearest(name, mixture)}')
        terminal.writable('data', folder)
        print(f'generating the built-in mixture of {len(mixture)} small datasets in {folder}', flush=True)
        generate.builtin(folder, folder.name, device=processes.device)
    distributed.wait(processes)
    return data.find(folder, run.datasets)


def steps_of(recipe, mixture):
    """The number of steps of a run; mixture: {name of a dataset: [trajectories, frames]}."""
    return recipe.steps or math.ceil(recipe.epochs * sum(count for count, _ in mixture.values()) / recipe.batch_size)


def out_of_patience(recipe, worse):
    """Whether so many scorings without improvement end the run early."""
    return recipe.patience > 0 and worse >= recipe.patience


def join(config, recipe, run, saved):
    """The processes of the run. If --resume auto has found a finished run, the program says so and ends with code 0.

    Raises InputError, before any data is generated or read, if the batch size is not divisible by the number of
    processes, if they have found different checkpoints (without a common disk some would resume and others start), or
    if the code of --network or --tensorboard is not there.
    """
    if run.tensorboard and not importlib.util.find_spec('tensorboard'):
        raise InputError('--tensorboard needs another package: pip install tensorboard')
    if config.network != 'aotpot':
        baselines.find(config.network, run.form)
    processes = distributed.setup(run.device)
    if processes.rank == 0:
        terminal.writable('out', run.out)
    data.batches_of_rank(0, 0, recipe.batch_size, world_size=processes.world_size)
    step = torch.tensor(saved['step'] if saved else 0)
    first = processes.sum(step * (processes.rank == 0))
    if step != first:
        raise InputError(f'--resume {run.resume}: rank {processes.rank} finds step {step}, rank 0 step {first}; '
                         f'--out {run.out} must be on a disk that all nodes share')
    if saved and run.resume == 'auto' and (
            step >= steps_of(recipe, saved['mixture']) or out_of_patience(recipe, saved['worse'])):
        processes.print(f'the run in {run.out} is finished, at step {step}; there is nothing left to do')
        distributed.leave(processes)
        sys.exit(0)
    return processes


# ------------------------------------------------------------------------------------------------ one step

def one_cycle(step, steps, peak, warmup, start=1e-4, end=1e-8):
    """The learning rate of step 0..steps-1: it rises as a cosine from start * peak to peak, then falls to end * peak.

    This is torch's OneCycleLR with DPOT's divisors and a fixed beta1, as a function of the step, without any state.
    """
    top = warmup * steps - 1
    if step <= top:
        low, share = start, step / top if top else 1.0
    else:
        low, share = end, 1 - (step - top) / max(steps - 1 - top, 1)
    return peak * (low + (1 - low) * (1 - math.cos(math.pi * share)) / 2)


def inputs(groups, sets, config, noise):
    """The noisy input u (B, T, *space, C) on the model grid, made from groups of native windows, group after group."""
    counts = [len(windows) for _, windows, _ in groups]
    u = groups[0][1].new_full((sum(counts), config.frames, *config.resolution, config.channels), data.PADDING)
    for part, (k, windows, seeds) in zip(u.split(counts), groups):
        part[..., :sets[k].channels] = data.add_noise(data.resize(windows[:, :-1], config.resolution), noise, seeds,
                                                      sets[k].evolving)
    return u


def relative_l2(prediction, target):
    """||prediction - target||_2 / ||target||_2 of each sample and channel: (B, ..., C), (B, ..., C) -> (B, C).

    The norms run over everything between the first and the last axis: grid points and, if given, frames. A target that
    is zero throughout adds to the loss but nothing to its gradient.
    """
    return metrics.relative(metrics.norm(prediction - target), metrics.norm(target))


def loss_of(prediction, groups, sets, kind='relative'):
    """The error of the predicted next frame on evolving channels and native grid points, a mean over the samples.

    prediction: (B, *space, C) in the order of the groups. kind: 'relative', the relative L2 error that is DPOT's loss,
    or 'squared', Eq. (14) as a mean over grid points and channels.
    """
    losses = []
    for (k, windows, _), u in zip(groups, prediction.split([len(windows) for _, windows, _ in groups])):
        native = data.to_native(u[:, None], sets[k])[:, 0]
        target = windows[:, -1, ..., sets[k].evolving]
        losses.append(relative_l2(native, target).mean(1) if kind == 'relative' else
                      (native - target).square().flatten(1).mean(1))
    return torch.cat(losses).mean()


def reduce_in_bf16(_, bucket):
    """The mean of a bucket of gradients over the processes, sent in bf16. PyTorch's own hook does not support gloo."""
    part = bucket.buffer().bfloat16() / torch.distributed.get_world_size()
    sent = torch.distributed.all_reduce(part, async_op=True).get_future()
    return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))


# ------------------------------------------------------------------------------------------------ the loop

def numbers(line):
    """(name, number) of a line of log.jsonl; the numbers of a nest of lists are named load/1/3 after their places."""
    for name, value in line.items():
        if isinstance(value, list):
            yield from numbers({f'{name}/{i}': item for i, item in enumerate(value, start=1)})
        elif value is not None:
            yield name, value


class Log:
    """The progress bar and log.jsonl in `out`, one line every `every` steps; both on rank 0 only.

    tensorboard: write the numbers of the lines as events of TensorBoard too, into out/tensorboard.
    """

    def __init__(self, out, every, first, steps, batch_size, processes, tensorboard=False):
        self.path, self.every, self.steps, self.batch_size = out / 'log.jsonl', every, steps, batch_size
        self.processes = processes
        if processes.rank == 0:         # a killed run has logged steps after its last checkpoint, which are repeated
            old = read_log(self.path) if first and self.path.exists() else []
            with replacing(self.path) as part:
                part.write_text(''.join(json.dumps(line) + '\n' for line in old if line['step'] <= first))
        self.bar = Progress(total=steps, initial=first, desc='training', unit='step', mininterval=1,
                        disable=processes.rank > 0)
        self.board = None
        if tensorboard and processes.rank == 0:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(out / 'tensorboard', purge_step=first + 1)
        self.restart(first)

    def restart(self, step):
        self.losses, self.shares, self.waited = [], [], 0.0
        self.last, self.since = step, time.perf_counter()

    def step(self, done, **values):
        """Count step number `done`; every `every` steps write `values` and the mean loss since the last line.

        With experts the line also has their load: the mean share of each expert, a list for every layer.
        """
        self.bar.update()
        if done % self.every and done != self.steps:
            return
        passed = time.perf_counter() - self.since
        line = {'step': done, 'loss': sum(self.losses) / len(self.losses) if self.losses else None, **values,
                'samples_per_s': self.batch_size * (done - self.last) / passed, 'data_wait': self.waited / passed,
                'memory_mb': distributed.memory_mb(self.processes.device)}
        if self.shares:
            line['load'] = torch.stack(self.shares).mean(0).tolist()
        if self.processes.rank == 0:
            with naming(self.path, 'cannot be written'), open(self.path, 'a') as file:
                file.write(json.dumps(line) + '\n')
        for name, value in numbers(line) if self.board else ():
            self.board.add_scalar(name, value, done)
        if self.board:
            self.board.flush()
        self.bar.set_postfix_str(f'loss {line["loss"] or math.nan:.4f}, {line["samples_per_s"]:.0f} samples/s, '
                                 f'{line["data_wait"]:.0%} waiting for data, {line["skipped"]} skipped')
        self.restart(done)


@dataclasses.dataclass
class State:
    """The progress of a run, which last.pt holds beside weights, optimizer and random state."""
    step: int = 0                               # steps done
    epoch: float = 0.0                          # epochs done
    skipped: int = 0                            # steps whose loss or gradient was not finite
    best: float = math.inf                      # lowest one-step error so far
    worse: int = 0                              # scorings since then
    scored: int = 0                             # step of the last scoring; last.pt is written before each of them


def batches(windows, first, steps, recipe, run, processes):
    """An iterator over the batches of this process for the steps first..steps-1, each as of data.Windows."""
    on_device = run.cache == 'device'           # then this process itself gathers the windows, on the device
    workers = 0 if on_device else run.workers if run.workers >= 0 else 4 if processes.device.type == 'cuda' else 0
    numbers = data.batches_of_rank(first, steps, recipe.batch_size, processes.rank, processes.world_size)
    loader = iter(torch.utils.data.DataLoader(windows, batch_size=None, sampler=numbers, num_workers=workers,
                                              pin_memory=processes.device.type == 'cuda' and not on_device,
                                              worker_init_fn=distributed.ignore_signals))
    if workers and hasattr(signal, 'SIGCHLD'):
        # PyTorch's handler raises an error wherever the loop is when a process that reads data dies, perhaps between
        # the weights and the state of the optimizer. Without it, `next` notices that within five seconds.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return loader


def next_batch(loader):
    """The next of `batches`. Raises InputError for data that cannot be read, and if a process that reads was killed."""
    try:
        return next(loader)
    except RuntimeError as error:
        if not str(error).startswith('DataLoader worker (pid'):
            raise
        raise InputError(f'{error}: it was killed, perhaps for want of memory; lower --workers') from None


@contextmanager
def ending(loader):
    """End the processes that read data with the block.

    Otherwise they live as long as the loader, which a kept exception keeps, and Python would wait for them at its end,
    since they ignore SIGTERM (distributed.ignore_signals).
    """
    try:
        yield
    finally:
        if hasattr(loader, '_shutdown_workers'):            # a loader without processes has none to end
            loader._shutdown_workers()


def trainable(model, run, processes):
    """The model as the loop calls it: compiled with --compile, and averaging gradients over several processes."""
    network = torch.compile(model) if run.compile else model
    if processes.world_size > 1:            # buffers of ours are equal on all processes, see `save_all` for others
        network = DistributedDataParallel(network, gradient_as_bucket_view=True, static_graph=True,
                                          broadcast_buffers=False,
                                          device_ids=[processes.device] if processes.device.type == 'cuda' else None)
        if run.gradients == 'bf16':
            network.register_comm_hook(None, reduce_in_bf16)
    return network


def one_step_error(model, tests, processes):
    """The one-step error on at most 64 trajectories of each dataset, a mean over the datasets."""
    return sum(evaluate.mean(evaluate.score(model, test, processes, limit=64, steps=1)['step'])
               for test in tests) / len(tests)


def check_finite(sets, frames, processes):
    """Read all that the scorings of the data.Trajectories `sets` will read, each process its share.

    frames: T. Raises InputError for a value that is not finite, which would otherwise end the run after hours, and
    warns of channels that are zero throughout.
    """
    for item in Progress(sets, desc='checking the test data', disable=processes.rank > 0, leave=False):
        counts = torch.zeros(item.channels)
        for [trajectory] in processes.batches(item.count, 1):
            counts += ~torch.from_numpy(item.read(trajectory, 0, frames + item.t_test)).flatten(0, -2).any(0)
        lines = data.zeros(item, processes.sum(counts))
        for line in lines if processes.rank == 0 else ():
            terminal.warn(line)


def fit(model, sets, tests, recipe, run, processes, saved=None, finetune=None):
    """Train `model` on the data.Trajectories `sets`, scoring it on `tests`, and return the signal that ended it, or 0.

    saved: the dict of the last.pt to resume. finetune: a dict that finetune.py wants in all checkpoints. The files of
    the module's docstring are written into run.out. All decisions (to skip, stop or save) are taken on numbers summed
    over the processes, so that all processes take the same ones. Raises InputError for data that are not finite, after
    saving the step before, and for a file that cannot be written.
    """
    device, out, state = processes.device, Path(run.out), State()
    # The loop runs backward once a step; on a CPU the fast form may then recycle the sub-layers' outputs.
    model.train().one_backward = True
    data.cache(sets, run.cache, processes)
    windows = data.Windows(sets, model.config.frames, recipe.seed)
    mixture = {item.name: [item.count, item.frames] for item in sets}
    steps = steps_of(recipe, mixture)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, (recipe.beta1, recipe.beta2),
                                  weight_decay=recipe.weight_decay, fused=device.type in ('cpu', 'cuda')
                                  and not any(parameter.is_complex() for parameter in model.parameters()))
    config = {'model': dataclasses.asdict(model.config), 'train': dataclasses.asdict(recipe),
              'run': dataclasses.asdict(run), **({'finetune': finetune} if finetune else {})}
    if saved:
        if saved['mixture'] != mixture:
            raise InputError(f'--resume: the run was trained on {saved["mixture"]}, but {run.data} holds {mixture}')
        model.load_state_dict(weights_for(model, saved))
        known, own = saved['optimizer']['state'], optimizer.state_dict()        # whose settings are those of the recipe
        check_form(saved, {'optimizer': {'state': {
            i: {'step': torch.tensor(0.0), 'exp_avg': parameter, 'exp_avg_sq': parameter}
            for i, parameter in enumerate(model.parameters()) if i in known}}}, saved['path'])
        optimizer.load_state_dict({**own, 'state': known})
        state = State(**{field.name: saved[field.name] for field in dataclasses.fields(State)})
    if processes.rank == 0:
        for old in () if saved else (out / 'last.pt', out / 'best.pt', *out.glob('step*.pt'),
                                     *out.glob('tensorboard/events.*')):
            old.unlink(missing_ok=True)
        with replacing(out / 'config.json') as part:
            part.write_text(json.dumps({**config, 'mixture': mixture, 'steps': steps}, indent=1))

    network, loader = trainable(model, run, processes), batches(windows, state.step, steps, recipe, run, processes)
    if saved:                                   # only now, since making the loader draws a random number
        torch.set_rng_state(saved['rng'])
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=run.dtype == 'bf16')

    def save(name, **more):
        if processes.rank == 0:
            write({'model': model.state_dict(), 'step': state.step, 'config': config, **more}, out / name)

    def save_all():
        processes.share(model.buffers())        # the statistics of another network's BatchNorm, which is then scored
        versions = {'torch': str(torch.__version__), 'python': platform.python_version()}
        save('last.pt', **dataclasses.asdict(state), optimizer=optimizer.state_dict(), rng=torch.get_rng_state(),
             mixture=mixture, versions=versions)

    def due():
        return state.step > state.scored and (state.step == steps or state.step % run.save_every == 0)

    def score():
        start = time.perf_counter()
        error = one_step_error(model, tests, processes)
        state.scored, state.worse = state.step, 0 if error < state.best else state.worse + 1
        if error < state.best:
            state.best = error
            save('best.pt', one_step=error)
        if run.keep:
            save(f'step{state.step}.pt')
        if state.step == steps or out_of_patience(recipe, state.worse):
            save_all()                                                  # there will be no other one
        log.since += time.perf_counter() - start                        # this is not training time

    log = Log(out, run.log_every, state.step, steps, recipe.batch_size, processes, run.tensorboard)
    skipped_in_a_row, ended, groups, broken = 0, 0, None, None
    with ending(loader), distributed.requests_to_stop() as requests, log.bar:
        if due():                                                       # the run ended before it or in it
            score()
        for step in range(state.step + 1, steps + 1):
            if out_of_patience(recipe, state.worse):
                break
            start = time.perf_counter()
            try:
                groups = [(k, frames.to(device, non_blocking=True), seeds) for k, frames, seeds in next_batch(loader)]
            except InputError as error:
                if groups is None:                                      # there is nothing to save yet
                    raise
                broken = error                  # the others wait for this process, so it repeats the step before
            log.waited += time.perf_counter() - start
            lr = one_cycle(step - 1, steps, recipe.lr, recipe.warmup)
            for group in optimizer.param_groups:
                group['lr'] = lr

            # forward, backward, clip, step
            u = inputs(groups, sets, model.config, recipe.noise)
            with autocast:
                prediction = network(u)
            objective = loss = loss_of(prediction.float(), groups, sets, recipe.loss)
            if model.config.experts:
                shares = experts.shares(model)
                objective = loss + recipe.balance * experts.balance_loss(shares, recipe.batch_size)
            optimizer.zero_grad()
            objective.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip or math.inf).item()
            asked = [broken is not None, *(number in requests for number in distributed.SIGNALS)]
            value, stuck, *asked = processes.sum(torch.cat([loss.detach()[None], loss.new_tensor(asked)])).tolist()
            if stuck:
                save_all()
                distributed.wait(processes)                             # until rank 0 has written last.pt
                raise broken or SystemExit(2)                           # the process that met the data says where
            value /= processes.world_size
            ended = next((number for number, count in zip(distributed.SIGNALS, asked) if count), 0)
            finite = math.isfinite(value) and math.isfinite(norm)       # the same on every process
            if finite:
                optimizer.step()
                log.losses.append(value)
                if model.config.experts:
                    experts.cool(model)
                    log.shares.append(shares.detach())

            # log
            state.step, state.epoch = step, step * recipe.batch_size / windows.epoch
            state.skipped += not finite
            skipped_in_a_row = 0 if finite else skipped_in_a_row + 1
            log.step(step, epoch=state.epoch, lr=lr, grad_norm=norm if finite else None, skipped=state.skipped)
            if skipped_in_a_row == MAX_SKIPPED:
                sys.exit(f'stopped at step {step}: the loss or its gradient was not finite {MAX_SKIPPED} times in a '
                         f'row; lower --lr or --grad_clip, or look for very large values in {" ".join(mixture)}')

            # once in a while: score and save
            if due() or ended:
                save_all()
            if ended:
                break
            if due():
                score()
    if requests and not ended:                  # it came after the last step
        signal.raise_signal(requests[0])
    if out_of_patience(recipe, state.worse):
        processes.print(f'stopped early at step {state.step}: no improvement on {out / "best.pt"} in {state.worse} '
                        f'scorings')
    if ended:
        script = 'finetune.py' if finetune else 'train.py'
        processes.print(f'stopped by {signal.Signals(ended).name} at step {state.step}; continue with: python {script} '
                        f'--resume {out / "last.pt"}')
    return ended


def by_module(names):
    """Names of tensors as one short line: those of a module in all layers become 'layers.*.aot1 (14)'."""
    modules = Counter('.'.join(re.sub(r'\.\d+', '.*', name).split('.')[:3]) for name in names)
    return ' '.join(module + (f' ({count})' if count > 1 else '') for module, count in modules.items())


def train(config, recipe, run, sets, tests, processes, source=None, saved=None, validation=None, finetune=None):
    """Build the network, start it from the checkpoint `source` if given, `fit` it and print its errors on `tests`.

    validation: sets to score on during training, instead of `tests`. saved, finetune: as for `fit`.
    Raises InputError if a batch is larger than all the training data.
    """
    started, windows = time.perf_counter(), sum(item.count * (item.frames - config.frames) for item in sets)
    if recipe.batch_size > windows:
        raise InputError(f'--batch_size {recipe.batch_size}: the training data have only {windows} windows of '
                         f'{config.frames + 1} frames (--frames + 1)')
    torch.manual_seed(recipe.seed)
    model = nets.build(config, run.form).to(processes.device)
    count = f'{aotpot.parameters(model):,} parameters'
    if config.experts:
        count += f', {experts.activated(model):,} of them activated'
    hardware = processes.device.type
    if hardware == 'cpu':
        work = distributed.multiply_adds(config, recipe.batch_size // processes.world_size)
        threads = distributed.use_threads(work, run.threads)
        hardware += f' with {threads} thread' + 's' * (threads > 1)
    processes.print(f'{config.title}, {count}, {show(config.resolution)} grid, {run.dtype} on '
                    f'{processes.world_size} x {hardware}, global batch {recipe.batch_size} -> {run.out}')
    weights = sum(item.weight for item in sets)
    for item in sets:
        processes.print(f'  {item.name:<34} {item.count:>6} trajectories of {item.frames:>3} frames, '
                        f'{show(item.space)}, weight {item.weight:g}: {item.weight / weights:.0%} of the draws')
    if source:
        if source['config']['model'].get('network', 'aotpot') != config.network:
            raise InputError(f'{source["path"]}: these weights are of the network '
                             f'{source["config"]["model"].get("network", "aotpot")}, not of --network {config.network}')
        if source['config']['model'].get('normalize', False) != config.normalize:
            with_or_not, flag = ('without', 'no-normalize') if config.normalize else ('with', 'normalize')
            raise InputError(f'{source["path"]}: these weights were trained {with_or_not} --normalize; give --{flag}')
        loaded, resized, fresh = initialise(model, source['model'])
        own = model.state_dict()
        broken = [name for name, value in own.items() if not value.isfinite().all()]
        if broken:
            raise InputError(f'{source["path"]}: these weights are not finite: {by_module(broken)}; start from others')
        processes.print(f'{source["path"]}: {len(loaded)} tensors loaded, {len(resized)} resized, {len(fresh)} fresh')
        unknown = sorted(source['model'].keys() - own.keys())
        for title, names in (('resized', resized), ('fresh', fresh), ('left out, not in this network', unknown)):
            if names:
                processes.print(f'  {title}: {by_module(names)}')
    taken = source and source['config']['model'].get('channel_maps')
    if config.channel_maps not in ('', 'learned', taken) and not saved:
        model.load_state_dict(channel_maps(config.channel_maps, config.channels), strict=False)
    if finetune and not finetune['from_scratch']:
        experts.freeze_routers(model)
    elif config.experts and recipe.batch_size < 2:
        raise InputError("--batch_size 1: the BatchNorm in the experts' router needs at least 2 samples")
    if processes.rank == 0:
        keep_runs(run, saved)                   # another process may have made one since the flags were read
    check_finite(dict.fromkeys([*tests, *(validation or [])]), config.frames, processes)
    ended = fit(model, sets, validation or tests, recipe, run, processes, saved, finetune)
    if not ended:
        trained = time.perf_counter()
        if validation:
            distributed.wait(processes)                            # rank 0 may still be writing best.pt
            if not (Path(run.out) / 'best.pt').exists():
                raise InputError(f'{run.out}: the error on the validation data was never finite, so there is no '
                                 f'best.pt; lower --lr, or check these data')
            model.load_state_dict(read(Path(run.out) / 'best.pt')['model'])
            processes.print('the weights of best.pt, chosen on the validation split:')
        results = evaluate.evaluate(model.eval(), tests, processes)
        processes.print('\n'.join(evaluate.table(results)))
        processes.print(f'{count}; {trained - started:.0f} s of training, '
                        f'{time.perf_counter() - trained:.0f} s of evaluation; checkpoints in {run.out}')
    distributed.leave(processes)
    if ended:
        sys.exit(128 + ended)


@distributed.together()
def main():
    config, recipe, run, saved, given = parse()
    source = read(run.init_from) if run.init_from and not saved else None
    processes = join(config, recipe, run, saved)
    names = find_data(run, given, processes, saved)
    run = dataclasses.replace(run, datasets=tuple(names))

    def trajectories(name, split):
        return data.Trajectories(run.data, name, split, config.frames, config.channels, run.coefficients,
                                 dims=config.dims)
    sets, tests = ([trajectories(name, split) for name in names] for split in ('train', 'test'))
    validation = [trajectories(name, 'valid') if data.validation_split(run.data, name) == 'valid' else test
                  for name, test in zip(names, tests)]
    with distributed.lock(run.out, processes):
        train(config, recipe, run, sets, tests, processes, source, saved,
              validation=None if validation == tests else validation)


if __name__ == '__main__':
    terminal.cli(main)
