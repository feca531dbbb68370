"""A run in its folder, whose files train.py describes: which one a command continues, its
checkpoints, its log.
"""
import json
import math
import signal
import sys
import time
from pathlib import Path

import torch

from configs import InputError, show
from nets import experts
from runtime import checkpoint, distributed, files
from runtime.terminal import Progress, warn

# flags that a resumed run may change, because they change nothing that is computed
MAY_DIFFER = 'data', 'out', 'device', 'threads', 'compile', 'resume', 'save_every', 'workers', 'keep', 'log_every'
CHECKPOINTS = 'init_from', 'checkpoint', 'channel_maps'         # flags that name one

# ---------------------------------------------------------------------------------------- which run

def checkpoint_to_resume(run, processes):
    """The dict of the last.pt that --resume continues, or None.

    Raises InputError if a run would be replaced, and on all processes unless each has found a run
    at the same step.
    """
    out = Path(run.out)
    saved = None
    if run.resume and (out / 'last.pt').exists():
        saved = checkpoint.load_file(out / 'last.pt')
        if not saved.keys() >= {'optimizer', 'rng', 'best', 'scored'}:
            raise InputError(f'{out}/last.pt: these are weights without a run to resume; train.py --init_from or '
                             f'finetune.py --checkpoint starts a new one from them, with another --out')
    else:
        found = [path.name for path in sorted(out.glob('*'))
                 if path.suffix == '.pt' or path.name in ('log.jsonl', 'config.json')]
        if found:
            raise InputError(f'--out {out}: the folder holds a run ({" ".join(found)}); continue that of a last.pt '
                             f'with --resume, choose another --out, or delete it')
    steps = torch.zeros(processes.world_size, dtype=torch.int64)
    steps[processes.rank] = saved['step'] if saved else 0
    steps = processes.sum(steps).tolist()
    if min(steps) < max(steps):
        raise InputError(f'--resume: the processes have found a run at the steps {steps}; they need an --out on a disk '
                         f'that they share')
    return saved


def settings_of(command):
    """{flag: value} of a train.Command, which is the same on all of several processes."""
    settings = {**vars(command.model), **vars(command.recipe), **vars(command.run)}
    del settings['device']                      # each may name its own card
    return settings


def setting(name, value):
    """A setting as it is compared: a checkpoint by its absolute path."""
    if name not in CHECKPOINTS or not value:
        return value
    return str(Path(value).resolve()).removesuffix('/last.pt')


def require_unchanged(saved, config, headers):
    """Raise InputError for the first setting or header that is another than in `saved`, a last.pt.

    config: the settings of the command; those of finetune.py come first, since others follow.
    headers: of its data, as returned by data.read_headers.
    """
    for part, fields in reversed(config.items()):
        for name, value in fields.items():
            before = saved['config'].get(part, {}).get(name)
            if name not in MAY_DIFFER and setting(name, value) != setting(name, before):
                if name in ('steps', 'epochs'):
                    raise InputError(f'--{name} {value}: the run to resume has {before}, and its learning rate falls '
                                     f'until then; to train on, begin another --out with --init_from '
                                     f'{config["run"]["out"]}, or in finetune.py with --checkpoint')
                raise InputError(f'--{name} {show(value) or "(none)"}: the run to resume has {show(before) or "none"}; '
                                 f'repeat its command, or choose another --out')
    difference = changed_header(saved['data'], headers)
    if difference:
        raise InputError(f'--resume: the data in {config["run"]["data"]} are not those of the run: {difference}; '
                         f'restore them, or choose another --out')


def changed_header(before, now):
    """The first difference between the headers of two times, in words, or ''."""
    for name, splits in before.items():
        for split in ('test', 'valid', 'train'):
            said = splits.get(split, {})
            there = now[name].get(split, {})
            if bool(said) != bool(there):
                return f'{name}/{split}.h5 is ' + ('gone' if said else 'new')
            for what, value in said.items():
                if value != there.get(what, value):               # but for what other versions said
                    return f'the {what} of {name}/{split}.h5 was {value!r}, is {there[what]!r}'
    return ''


def require_finite(step, loss, norm, headers):
    """Raise InputError for a step whose loss or gradient is not finite."""
    if math.isfinite(loss + norm):
        return
    found = f'step {step}: the loss is {loss} and the norm of its gradient {norm}'
    if step > 1:
        raise InputError(f'{found}; begin another run with a lower --lr or --grad_clip')
    sizes = []
    for name, splits in headers.items():
        header = splits['train']
        sizes += [(size, f'{channel} of {name}') for size, channel in zip(header['sizes'][0], header['channels'])]
    size, where = max(sizes)
    raise InputError(f'{found} before any update; the largest values are those of {where}, {size:.1e}')


# ---------------------------------------------------------------------------------------- its files

def read_log(path):
    """The lines of a log.jsonl, one dict a step, without a last one that a crash has left
    incomplete.

    Other lines that are not of a run are left out with a warning. A scoring, {'step', 'valid' or
    'test', 'wall_s'}, joins the line of its step.
    """
    files.require_regular(path)
    steps = {}
    left_out = 0
    for text in Path(path).read_bytes().split(b'\n')[:-1]:
        try:
            line = json.loads(text)
            line.update(step=int(line['step']), wall_s=float(line.get('wall_s', 0)))
            steps.setdefault(line['step'], {}).update(line)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            left_out += 1
    if left_out:
        warn(f'{path}: {left_out} lines are damaged or of another program, and are left out')
    return list(steps.values())


class Record:
    """What a training has done: its step, its checkpoints and its log.jsonl in --out, which rank 0
    writes.

    A new run has a last.pt from its start on.
    command: a train.Command whose number of steps is set.
    model, optimizer: the weights and the state that the checkpoints hold.
    metadata: what they hold beside them, {'config', 'data'}.
    draws: how many samples an epoch has.
    split: what the scorings are of, 'valid' or 'test'.
    whose: of which datasets, in words; '' for all.
    resumed: the dict of the last.pt from which the run goes on.
    """

    def __init__(self, command, model, optimizer, metadata, draws, split, whose, processes, resumed=None):
        self.run = command.run
        self.recipe = command.recipe
        self.out = Path(command.run.out)
        self.model = model
        self.optimizer = optimizer
        self.metadata = metadata
        self.draws = draws
        self.split = split
        self.whose = whose
        self.processes = processes
        self.arrived = []                           # the signals that ask the run to stop
        self.stop = 0                               # the signal that ends the run
        self.step = 0                               # steps done
        self.scored = 0                             # the last step that was scored
        self.best = math.inf                        # the lowest error on validation data
        self.loss = 0.0                             # of the parts of a step that were computed
        self.steps = []             # loss, gradient norm and load of experts of each, on the device
        self.unlogged = []                   # the same as numbers, of all steps since the last line
        if resumed:
            self.restore(resumed)
        else:
            self.save()
        self.path = self.out / 'log.jsonl'
        lines = read_log(self.path) if self.path.exists() else []
        lines = [line for line in lines if line['step'] <= self.step]   # a killed run repeats those after last.pt
        if processes.rank == 0:
            settings = {**metadata['config'], 'data': metadata['data'], 'steps': self.recipe.steps}
            files.write_text(self.out / 'config.json', json.dumps(settings, indent=1))
            files.write_text(self.path, ''.join(json.dumps(line) + '\n' for line in lines))
        self.bar = Progress(total=self.recipe.steps, initial=self.step, desc='training', unit='step',
                            disable=processes.rank > 0)
        self.began = time.perf_counter() - max((line['wall_s'] for line in lines), default=0.0)
        self.since = self.step, self.began      # when the last line was written, or the first batch asked for
        self.waited = 0.0                       # seconds of waiting for batches since then

    # ---------------------------------------------------------------------------------- checkpoints

    def save_weights(self, name, step, **more):
        """Write a checkpoint of the weights."""
        if self.processes.rank == 0:
            state = self.model.state_dict()
            checkpoint.save_file({'model': state, 'step': step, **self.metadata, **more}, self.out / name)

    def save(self):
        """Write last.pt. Raises InputError for a step whose loss is not finite."""
        self.collect()
        self.save_weights('last.pt', self.step, best=self.best, scored=self.scored, unlogged=self.unlogged,
                          optimizer=self.optimizer.state_dict(), rng=torch.get_rng_state())

    def restore(self, saved):
        """Take over what `save` has written."""
        checkpoint.load_weights(self.model, saved)
        self.optimizer.load_state_dict(saved['optimizer'])
        torch.set_rng_state(saved['rng'])
        self.step = saved['step']
        self.scored = saved['scored']
        self.best = saved['best']
        self.unlogged = saved.get('unlogged', [])       # which earlier versions did not have

    def is_due(self):
        """Whether the run is saved and scored after the steps done."""
        return self.step > 0 and (self.step == self.recipe.steps or self.step % self.run.save_every == 0)

    # ------------------------------------------------------------------------------------------ log

    def note(self, number, _):
        """Stop after the step that is being taken; Ctrl-C after a signal kills the process."""
        self.arrived.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def timed(self, batches):
        """Yield the batches, and measure how long the training waits for them."""
        start = time.perf_counter()
        self.since = self.step, start                   # compiling the network does not count
        for batch in batches:
            self.waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def add(self, norm, lr):
        """Note the loss, gradient norm and learning rate of a step, and any signal."""
        numbers = torch.stack([self.loss, norm])
        if self.model.config.experts:
            numbers = torch.cat([numbers, experts.after_step(self.model).flatten()])
        self.steps.append(numbers)
        self.loss = 0.0
        self.step += 1
        self.bar.update()
        line = self.is_due() or self.step % self.run.log_every == 0
        if line or self.processes.world_size == 1:      # several ask one another where they wait anyway
            self.stop = distributed.first_signal(self.arrived, self.processes)
        if line:
            self.write_line(lr)

    def collect(self):
        """Bring the numbers of the last steps to the host, as means over all processes."""
        if self.steps:                                          # here the host waits for the device
            rows = self.processes.sum(torch.stack(self.steps)) / self.processes.world_size
            for step, row in enumerate(rows.tolist(), self.step - len(rows) + 1):
                require_finite(step, *row[:2], self.metadata['data'])
                self.unlogged.append(row)
            self.steps = []

    def write_line(self, lr):
        """Write a line on the steps since the last one."""
        self.collect()
        step, start = self.since
        now = time.perf_counter()
        seconds = now - start
        loss, _, *load = torch.tensor(self.unlogged, dtype=torch.float64).mean(0).tolist()
        speed = self.recipe.batch_size * (self.step - step) / seconds
        line = {'step': self.step,
                'loss': loss,
                'epoch': self.step * self.recipe.batch_size / self.draws,
                'lr': lr,
                'grad_norm': self.unlogged[-1][1],
                'data_wait': self.waited / seconds,
                'samples_per_s': speed,
                'gpu_memory_mb': torch.cuda.max_memory_allocated() / 1e6}
        if load:
            line['load'] = torch.tensor(load).view(-1, self.model.config.experts).tolist()
        self.append(line)
        if sys.stdout.isatty() and sys.stderr.isatty():
            self.bar.set_postfix_str(f'loss {loss:.4f}, {speed:.0f} samples/s, {line["data_wait"]:.0%} waiting for '
                                     f'data', refresh=False)
        else:
            milliseconds = 1000 * seconds / (self.step - step)
            self.processes.print(f'step {self.step}/{self.recipe.steps}: loss {loss:.4f}, lr {lr:.2e}, '
                                 f'{milliseconds:.0f} ms, {speed:.0f} samples/s')
        self.unlogged = []
        self.since = self.step, now
        self.waited = 0.0

    def add_score(self, error):
        """Note the error of a scoring; the weights become best.pt if it is of valid.h5 of all
        datasets and the lowest.

        With --keep they become step<N>.pt. The time of a scoring does not count as training.
        """
        self.scored = self.step
        self.bar.clear()
        self.processes.print(f'step {self.step}: {self.split} {error:.4f}{self.whose}')
        if self.split == 'valid' and not self.whose and error < self.best:
            self.best = error
            self.save_weights('best.pt', self.step, valid=error)
        if self.run.keep:
            self.save_weights(f'step{self.step}.pt', self.step)
        self.append({'step': self.step, self.split: error if math.isfinite(error) else None})
        self.since = self.step, time.perf_counter()

    def append(self, line):
        """Append a line with the seconds since the run began, over all its processes."""
        if self.processes.rank == 0:
            text = json.dumps({**line, 'wall_s': time.perf_counter() - self.began})
            files.require_held(self.path.parent)
            with files.naming(self.path, 'cannot be written', OSError), open(self.path, 'a', encoding='utf-8') as file:
                file.write(text + '\n')
