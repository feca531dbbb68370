"""The run of a folder, whose files train.py describes: which one a command continues, its batches, its log, its end."""
import itertools
import json
import math
import re
import signal
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch

import configs
from configs import IN_OUT, InputError, show
from nets import baselines
from runtime import checkpoint, distributed, files, layouts
from runtime.terminal import Progress

MAX_SKIPPED = 10                # so many non-finite steps in a row end a run
OF_A_PROCESS = 'data', 'out', 'device', 'threads', 'workers', 'resume', 'overwrite'     # flags that may differ


@dataclass
class State:
    """The progress of a run, which last.pt holds."""
    step: int = 0                                           # steps done
    epoch: float = 0.0                                      # epochs done
    skipped: int = 0                                        # steps that were not finite
    best: float = math.inf                                  # the lowest validation error
    scored: int = 0                                         # the last step that was scored
    chosen_on: dict = field(default_factory=dict)           # {dataset: the split on which `best` was measured}
    losses: list = field(default_factory=list)              # of the steps since the last line of the log
    loads: list = field(default_factory=list)               # the shares of the experts in these steps


# what last.pt has to hold beside the weights, and its type; 'train' and 'run' are parts of its config
RESUMED = {'train': dict, 'run': dict, 'optimizer': dict, 'mixture': dict, 'rng': torch.Tensor,
           **{field.name: field.type for field in fields(State)}}


# ------------------------------------------------------------------------------------------------ which run

def resumed(script, resume, out, default=''):
    """The dict of the last.pt of the run to resume, or None if `resume` is 'auto' and that run has not begun.

    script: 'train' or 'finetune', whose run it has to be. resume: the folder of a run or its last.pt; 'auto' and IN_OUT
    stand for `out`, --out, or else `default`.
    """
    folder = Path((out or default) if resume in (IN_OUT, 'auto') else resume)
    path = folder if folder.suffix == '.pt' else folder / 'last.pt'
    if resume == 'auto' and not path.exists():
        return None
    saved = checkpoint.read(path)
    if 'optimizer' not in saved:
        raise InputError(f'--resume {path}: it holds weights alone; start another run from them with --init_from')
    for name, kind in RESUMED.items():
        if not isinstance({**saved['config'], **saved}.get(name), kind):
            raise InputError(f'--resume {path}: its {name!r} is missing or not a {kind.__name__}; the file is damaged, '
                             f'or of another version: start another run from its weights with --init_from')
    if out and Path(out).resolve() != path.parent.resolve():
        raise InputError(f'--out {out}: the run to resume stays in its folder, {path.parent}; leave --out out')
    own = 'finetune' if 'finetune' in saved['config'] else 'train'
    if own != script:
        raise InputError(f'--resume {path}: a run of {own}.py; resume it with: python {own}.py')
    return saved


def restored(saved, network=''):
    """The model config, recipe and run config in the dict of a last.pt; the run goes on in the folder of that file."""
    run = configs.RunConfig(**{**saved['config']['run'], 'out': str(saved['path'].parent), 'overwrite': False})
    return checkpoint.model_config(saved, network), configs.TrainConfig(**saved['config']['train']), run


def unchanged(args, first, second):
    """Raise InputError if the `second` configs of a run, with the flags in `args`, differ from the `first` ones."""
    for before, config in zip(first, second):           # of a RunConfig only what decides on the input has to be equal
        for name in ('coefficients', 'init_from') if isinstance(before, configs.RunConfig) else vars(before):
            old = getattr(before, name)
            new = getattr(configs.override(config, args), name)
            if old != new:
                raise InputError(f'--{name} {show(new) or "(none)"}: the run to resume has {show(old) or "none"}; '
                                 f'use its checkpoint to start another run from its weights')


def checkpoints(out):
    """The paths of the checkpoints of a run in the folder `out`."""
    return sorted(path for path in Path(out).glob('*.pt') if re.fullmatch(r'last|best|step\d+', path.stem))


def protect(run, saved):
    """Raise InputError if a new run would replace another without --overwrite, or a file that is of no run."""
    if run.overwrite and run.resume:
        raise InputError('--overwrite and --resume: give only one of the two')
    if run.out.endswith('.pt'):
        raise InputError(f'--out {run.out}: a folder whose name ends in .pt would be taken for a checkpoint; choose '
                         f'another name')
    names = [path.name for path in checkpoints(run.out)]
    if names and not saved and not run.overwrite:
        raise InputError(f'--out {run.out}: the folder holds a run ({" ".join(names)}); continue it with --resume '
                         f'{run.out}, choose another --out, or replace it with --overwrite')
    files.read_json(Path(run.out, 'config.json'), 'model', 'train', 'run')
    checkpoint.read_log(Path(run.out, 'log.jsonl'))


def steps_of(recipe, mixture):
    """The number of steps of a run; mixture: {name of a dataset: [trajectories, frames]}."""
    return recipe.steps or math.ceil(recipe.epochs * sum(count for count, _ in mixture.values()) / recipe.batch_size)


def join(config, recipe, run, saved):
    """The processes of a run, after all checks without data; --resume auto ends a finished run here, with code 0."""
    if config.network != 'aotpot':
        baselines.find(config.network, run.form)
    processes = distributed.setup(run.device, run.threads)
    if run.graphs and (not run.compile or run.accumulate > 1 or processes.world_size > 1):
        raise InputError('--graphs: it needs --compile, one process and whole batches, without --accumulate')
    files.writable('out', run.out)
    at_once(recipe.batch_size, processes.world_size, run.accumulate)
    step = saved['step'] if saved else 0
    distributed.require_equal(processes, {'a run to resume at step': step})
    if saved and run.resume == 'auto' and saved['scored'] >= steps_of(recipe, saved['mixture']):
        processes.print(f'the run in {run.out} is finished, at step {step}; there is nothing left to do')
        distributed.leave(processes)
        sys.exit(0)
    return processes


# ------------------------------------------------------------------------------------------------ its batches

def at_once(batch_size, world_size=1, parts=1):
    """How many samples of a batch a process takes at once. Raises InputError if the batch has no such equal parts."""
    if batch_size % (world_size * parts):
        raise InputError(f'--batch_size {batch_size} is not divisible by {world_size} processes'
                         + (f' times --accumulate {parts}' if parts > 1 else ''))
    return batch_size // (world_size * parts)


def batches_of_rank(first, last, batch_size, rank=0, world_size=1, parts=1):
    """Yield the sample numbers of one rank for the steps first..last-1, one range for each of a step's `parts`.

    Step s takes the samples s * batch_size .. (s + 1) * batch_size - 1, of which each rank has an equal share.
    """
    size = at_once(batch_size, world_size, parts)
    for step in range(first, last):
        for part in range(parts):
            start = step * batch_size + (rank * parts + part) * size
            yield range(start, start + size)


class Batches:
    """The batches of this process, each --accumulate parts of data.Windows, read and copied to the device ahead.

    numbers: the samples of each part, as `batches_of_rank` has them. Threads read: a window is one read of a file,
    which needs no Python, so that they do not hinder the loop.
    """

    def __init__(self, windows, numbers, run, processes):
        self.device = processes.device
        self.parts = run.accumulate
        self.waited = 0.0                                                       # seconds that steps have waited
        cuda = self.device.type == 'cuda'
        threads = run.workers if run.workers >= 0 else 4 if cuda else 0
        self.pool = ThreadPoolExecutor(threads) if threads else None
        self.loaded = self._read(windows, numbers, 2 * threads)
        self.copies = torch.cuda.Stream(self.device) if cuda else None
        self.ahead = self._load()

    def _read(self, windows, numbers, most):
        """Yield the parts in order, while threads read at most so many further ones."""
        waiting = deque()
        for part in numbers:
            if not self.pool:
                yield windows[part]
                continue
            waiting.append(self.pool.submit(windows.__getitem__, part))
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _load(self):
        with torch.cuda.stream(self.copies):                    # which does nothing for None
            return [[(k, frames.to(self.device, non_blocking=True), seeds) for k, frames, seeds in groups]
                    for groups in itertools.islice(self.loaded, self.parts)]

    def __next__(self):
        start = time.perf_counter()
        batch = self.ahead
        if self.copies:
            torch.cuda.current_stream().wait_stream(self.copies)
            for _, frames, _ in itertools.chain(*batch):                # or a later copy might take their memory
                frames.record_stream(torch.cuda.current_stream())
        self.ahead = self._load()
        self.waited += time.perf_counter() - start
        return batch

    def close(self):
        """End the threads, which Python would wait for at its end."""
        if self.pool:
            self.pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------------ its files

class Report(NamedTuple):
    """A step whose numbers are on their way to the host."""
    numbers: torch.Tensor       # loss, processes with each of SIGNALS, norm of the gradient
    arrival: object             # the event of CUDA after which the host has them, or None
    step: int
    lr: float
    share: object               # of each expert (layers, E), or None
    waited: float               # seconds that the run has waited for data
    time: float


class Record:
    """What a training leaves in its folder, and the decisions that all processes take together.

    held_out: the data.Trajectories to score on. fingerprints: of all data. saved: the dict of a last.pt to continue; if
    its data are others, raises InputError. finetune: for all checkpoints. An older run in the folder goes when this one
    has a checkpoint.
    """

    def __init__(self, model, optimizer, windows, held_out, fingerprints, recipe, run, processes, saved=None,
                 finetune=None):
        self.model = model
        self.optimizer = optimizer
        self.processes = processes
        self.run = run
        self.out = Path(run.out)
        self.batch_size = recipe.batch_size
        self.epoch = windows.epoch
        self.mixture = {item.name: [item.count, item.frames] for item in windows.sets}
        self.layouts = {item.name: item.layout._asdict() for item in windows.sets}
        self.steps = steps_of(recipe, self.mixture)
        self.skipped_in_a_row = 0
        self.reports = []
        self.ended = 0                                      # the signal that has ended the run
        self.config = {'model': vars(model.config), 'train': vars(recipe), 'run': vars(run)}
        self.config['fingerprints'] = fingerprints
        if finetune:
            self.config['finetune'] = finetune
        self.state = State(**{name: saved[name] for name in vars(State())} if saved else {})
        if saved:
            self._continue(saved)
        splits = {item.name: item.path.stem for item in held_out}
        if self.state.chosen_on != splits:                  # errors on other data say nothing about `best`
            self.state.best = math.inf
            self.state.scored = 0
            self.state.chosen_on = splits
        settings = {f'--{name}': value for part in self.config.values() for name, value in part.items()
                    if name not in OF_A_PROCESS}
        distributed.require_equal(processes, {**settings, 'validation': splits})
        self.older = [] if saved else checkpoints(self.out)
        self.lines = checkpoint.read_log(self.out / 'log.jsonl') if saved else []
        # a killed run has logged steps after its last checkpoint, which are repeated
        self.lines = [line for line in self.lines if line['step'] <= self.state.step]
        earlier = [line['wall_s'] for line in self.lines if 'wall_s' in line]
        self.began = time.perf_counter() - max(earlier, default=0.0)      # as if this process had taken all steps
        if not self.older:
            self._write_texts()
        self.bar = Progress(total=self.steps, initial=self.state.step, desc='training', unit='step', mininterval=1,
                            disable=processes.rank > 0)
        self.line_begins = Report(None, None, self.state.step, 0.0, None, 0.0, time.perf_counter())

    def _continue(self, saved):
        if saved['mixture'] != self.mixture:
            raise InputError(f'--resume: the run was trained on {saved["mixture"]}; {self.run.data} has {self.mixture}')
        if changed := layouts.changed(saved['config'].get('fingerprints', {}), self.config['fingerprints']):
            raise InputError(f'--resume: the data in {self.run.data} are not those of the run: {changed}; restore '
                             f'them, or start another run from its weights with --init_from')
        self.model.load_state_dict(checkpoint.weights_for(self.model, saved))
        try:
            torch.set_rng_state(saved['rng'])
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), 'state': saved['optimizer']['state']})
            for parameter, moments in self.optimizer.state.items():
                if any(value.shape not in (parameter.shape, ()) for value in moments.values()):
                    raise ValueError
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            raise InputError(f"{saved['path']}: its 'optimizer' or 'rng' does not fit this network; start another run "
                             f'from its weights with --init_from') from None
        self.state.loads = [share.to(self.processes.device) for share in self.state.loads]

    def agree(self, step, lr, loss, norm, share, requests, waited):
        """Whether all processes skip this step, as their loss or gradient is not finite: 1. or 0. on the device.

        The host learns of it in `settle`, which waits for these numbers, but not for what the GPU was told later.
        requests: of `distributed.requests_to_stop`; share: of each expert (layers, E); waited: seconds, for data.
        """
        flags = torch.tensor([number in requests for number in distributed.SIGNALS], dtype=loss.dtype)
        flags = flags.to(loss.device, non_blocking=True)
        sums = self.processes.sum(torch.cat([loss.detach()[None] / self.processes.world_size, flags]))
        numbers = torch.cat([sums, norm[None]]).to('cpu', non_blocking=True)
        arrival = torch.cuda.current_stream().record_event() if loss.is_cuda else None
        self.reports.append(Report(numbers, arrival, step, lr, share, waited, time.perf_counter()))
        return (~(sums[0] + norm).isfinite()).to(torch.float32)

    def settle(self, but=0):
        """Log the steps since the last call but for the newest `but`. Returns the signal that ends the run, or 0."""
        ended = 0
        while len(self.reports) > but:
            report = self.reports.pop(0)
            if report.arrival:
                report.arrival.synchronize()
            loss, *counts, norm = report.numbers.tolist()
            self.log(loss, norm, report)
            if self.skipped_in_a_row == MAX_SKIPPED or self.state.skipped == self.steps:
                raise InputError(f'stopped at step {report.step}: the loss or its gradient was not finite '
                                 f'{self.skipped_in_a_row} times in a row; lower --lr or --grad_clip, or look for very '
                                 f'large values in the data')
            ended = ended or next(itertools.compress(distributed.SIGNALS, counts), 0)
        return ended

    def due(self, step):
        """Whether a scoring follows this step."""
        return step > self.state.scored and (step == self.steps or step % self.run.save_every == 0)

    def log(self, loss, norm, report):
        """Count a step, and every --log_every steps write a line with the means since the last one into log.jsonl."""
        state = self.state
        step = report.step
        finite = math.isfinite(loss + norm)
        state.step = step
        state.epoch = step * self.batch_size / self.epoch
        state.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if finite:
            state.losses.append(loss)
            if report.share is not None:
                state.loads.append(report.share)
        self.bar.update()
        if step % self.run.log_every and not self.due(step):
            return
        before = self.line_begins
        seconds = report.time - before.time
        line = {'step': step, 'loss': sum(state.losses) / len(state.losses) if state.losses else None,
                'epoch': state.epoch, 'lr': report.lr, 'grad_norm': norm if finite else None, 'skipped': state.skipped,
                'data_wait': (report.waited - before.waited) / seconds,
                'samples_per_s': self.batch_size * (step - before.step) / seconds,
                'memory_mb': distributed.memory_mb(self.processes.device)}
        if state.loads:
            line['load'] = torch.stack(state.loads).mean(0).tolist()
        state.losses, state.loads = [], []
        self._write_line(line)
        self.bar.set_postfix_str(f'loss {line["loss"] or math.nan:.4f}, {line["samples_per_s"]:.0f} samples/s, '
                                 f'{line["data_wait"]:.0%} waiting for data, {state.skipped} skipped')
        self.line_begins = report

    def _write_line(self, line):
        """Append to log.jsonl, with the wall time of the run, or keep the line while an older run has that file."""
        line['wall_s'] = time.perf_counter() - self.began
        if self.older:
            self.lines.append(line)
        elif self.processes.rank == 0:
            files.append(self.out / 'log.jsonl', json.dumps(line) + '\n')

    def _write_texts(self):
        """Write config.json and the log so far."""
        if self.processes.rank == 0:
            config = {**self.config, 'mixture': self.mixture, 'steps': self.steps}
            if config['train']['steps']:                                 # then the epochs do not count
                config['train'] = {name: value for name, value in config['train'].items() if name != 'epochs'}
            files.write(self.out / 'config.json', json.dumps(config, indent=1))
            files.write(self.out / 'log.jsonl', ''.join(json.dumps(line) + '\n' for line in self.lines))

    def save(self, name, **more):
        if self.processes.rank == 0:
            checkpoint.write({'model': self.model.state_dict(), 'config': self.config, 'layouts': self.layouts, **more},
                             self.out / name)

    def save_all(self):
        """Write last.pt; with the first one, what an older run has left in the folder is replaced."""
        self.processes.share(self.model.buffers())      # the statistics of another network's BatchNorm, then scored
        self.save('last.pt', **vars(self.state), optimizer=self.optimizer.state_dict(), rng=torch.get_rng_state(),
                  mixture=self.mixture)
        if self.older:
            self._write_texts()
            for path in self.older if self.processes.rank == 0 else ():
                if path.name != 'last.pt':
                    path.unlink(missing_ok=True)
            self.older = []

    def score(self, error_of):
        """Score the weights by error_of(), the validation error, and keep the best; this is not training time."""
        start = time.perf_counter()
        error = error_of()
        state = self.state
        state.scored = state.step
        self.bar.say(f'step {state.step}: valid {error:.4f}')
        self._write_line({'step': state.step, 'valid': error if math.isfinite(error) else None})
        if error < state.best:
            state.best = error
            self.save('best.pt', step=state.step, valid=error, chosen_on=state.chosen_on)
        if self.run.keep:
            self.save(f'step{state.step}.pt', step=state.step)
        if state.step == self.steps:
            self.save_all()                                             # there will be no other one
        seconds = time.perf_counter() - start
        self.line_begins = self.line_begins._replace(time=self.line_begins.time + seconds)

    def take_chosen(self):
        """Give the model the weights of the table at the end, on all processes, and return the line that says which.

        They are those of best.pt if it was chosen on other data than the tests, and else the last ones.
        """
        state = self.state
        on_tests = [name for name, split in state.chosen_on.items() if split == 'test']
        if state.best == math.inf:
            return 'no validation error was finite, so there is no best.pt; the weights of last.pt:'
        if len(on_tests) == len(state.chosen_on):
            return 'the weights of last.pt; best.pt was chosen on these tests, since there is no valid.h5:'
        if self.processes.rank == 0:                                    # the others may have no such file
            saved = checkpoint.read(self.out / 'best.pt')
            self.model.load_state_dict(checkpoint.weights_for(self.model, saved))
        self.processes.share(self.model.state_dict().values())
        line = 'the weights of best.pt, chosen on the validation split'
        if on_tests:
            line += f', and of {" ".join(on_tests)} on these tests, whose errors are too good by that choice'
        return line + ':'

    def close(self, requests):
        """Say how to continue a run that a signal has ended; one that came too late has its usual effect."""
        if self.ended:
            script = 'finetune' if 'finetune' in self.config else 'train'
            self.processes.print(f'stopped by {signal.Signals(self.ended).name} at step {self.state.step}; continue '
                                 f'with: python {script}.py --resume {self.out}')
        elif requests:
            signal.raise_signal(requests[0])
