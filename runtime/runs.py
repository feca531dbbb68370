"""A run in its folder: which one a command continues, its last.pt, its log."""
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from configs import InputError, ModelConfig, RunConfig, TrainConfig, show
from runtime import checkpoint, files
from runtime.terminal import warn

FORMAT = 1                      # of last.pt; a change of what it holds gets another number
# flags that a resumed run may change: those of the machine, which it always takes from the command, and others that
# change nothing that is computed; its datasets are compared with their files
OF_THE_MACHINE = {'out', 'device', 'compile', 'resume'}
MAY_DIFFER = {*OF_THE_MACHINE, 'data', 'datasets', 'workers', 'save_every', 'log_every', 'keep'}
CHECKPOINTS = 'init_from', 'checkpoint', 'channel_maps'         # flags that name one


@dataclass
class State:
    """How far a run is."""
    step: int = 0               # steps done
    scored: int = 0             # the last step that was scored
    best: float = math.inf      # the lowest error on validation data


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
        if 'optimizer' not in saved:
            raise InputError(f'{out}/last.pt: these are weights without a run to resume; train.py --init_from or '
                             f'finetune.py --checkpoint starts a new one from them, with another --out')
        if saved.get('format') != FORMAT:
            raise InputError(f'{out}/last.pt: another version wrote this run; start another --out from its weights '
                             f'with --init_from {out} (format {saved.get("format")}, here {FORMAT})')
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
    """All settings of a train.Command: {'size', 'model', 'train', 'run', 'finetune'}."""
    return {'size': command.size, 'model': {**vars(command.model)}, 'train': {**vars(command.recipe)},
            'run': {**vars(command.run)}, 'finetune': {**command.tune}}


def flat(settings):
    """{flag: value} of what `settings_of` returns."""
    model, recipe, run, tune = (settings[part] for part in ('model', 'train', 'run', 'finetune'))
    return {'size': settings['size'], **model, **recipe, **run, **tune}


def taken_over(command, saved):
    """The train.Command that goes on with the run in `saved`, a last.pt, with the settings of that.

    Raises InputError for a flag that the command gives and that differs, but for MAY_DIFFER.
    """
    def comparable(name, value):
        return str(Path(value).resolve()).removesuffix('/last.pt') if name in CHECKPOINTS and value else value
    now = flat(settings_of(command))
    before = flat(saved['config'])
    for name in sorted(command.given - MAY_DIFFER):
        if comparable(name, now[name]) == comparable(name, before.get(name)):
            continue
        if name in ('steps', 'epochs'):
            raise InputError(f'--{name} {now[name]}: the run to resume has {before[name]}, and its learning rate falls '
                             f'until then; to train on, begin another --out with --init_from {command.run.out}, or in '
                             f'finetune.py with --checkpoint')
        raise InputError(f'--{name} {show(now[name]) or "(none)"}: the run to resume has '
                         f'{show(before.get(name, "")) or "none"}; repeat its command, or choose another --out')
    kept = {name: now[name] for name in OF_THE_MACHINE | MAY_DIFFER & command.given}
    settings = saved['config']
    return command._replace(
        model=ModelConfig(**settings['model']), recipe=TrainConfig(**settings['train']),
        run=RunConfig(**{**settings['run'], **kept}), size=settings['size'], tune=settings['finetune'])


def require_same_data(before, now, folder):
    """Raise InputError for the first difference between the headers of the data of a run and those now.
    """
    if [*before] != [*now]:
        raise InputError(f'--datasets {" ".join(now)}: the run to resume has {" ".join(before)}')
    for name, split in ((name, split) for name in now for split in ('test', 'valid', 'train')):
        one, other = before[name].get(split, {}), now[name].get(split, {})
        for what in {**one, **other}:
            if one.get(what) != other.get(what):
                raise InputError(f'--resume: the data in {folder} are not those of the run: the {what} of '
                                 f'{name}/{split}.h5 was {one.get(what)!r}, is {other.get(what)!r}; restore them, or '
                                 f'choose another --out')


# ---------------------------------------------------------------------------------------- its files

def save(training, processes):
    """Write the last.pt of a train.Training, with all that `restore` takes over."""
    if processes.rank == 0:
        state = {'model': training.model.state_dict(), 'optimizer': training.optimizer.state_dict(),
                 'rng': torch.get_rng_state(), 'format': FORMAT}
        path = Path(training.command.run.out, 'last.pt')
        checkpoint.save_file({**state, **vars(training.progress), **training.metadata}, path)


def restore(saved, model, optimizer):
    """Take over what `save` has written. Returns the State."""
    checkpoint.load_weights(model, saved)
    optimizer.load_state_dict(saved['optimizer'])
    torch.set_rng_state(saved['rng'])
    return State(saved['step'], saved['scored'], saved['best'])


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


class Log:
    """The log.jsonl of a run, which rank 0 writes: a line on the steps since the last one, or on a
    scoring.

    A killed run repeats the lines after its last.pt, which is of the step `step`.
    """

    def __init__(self, path, step, recipe, processes):
        self.path = path
        self.recipe = recipe
        self.processes = processes
        self.pending = []                       # the numbers of each step since the last line, on the device
        lines = read_log(path) if path.exists() else []
        lines = [line for line in lines if line['step'] <= step]
        if processes.rank == 0:
            files.write_text(path, ''.join(json.dumps(line) + '\n' for line in lines))
        self.began = time.perf_counter() - max((line['wall_s'] for line in lines), default=0.0)
        self.go_on()

    def go_on(self):
        """Begin to measure time; what came before, such as a scoring, does not count."""
        self.since = time.perf_counter()
        self.waited = 0.0                       # seconds of waiting for batches

    def timed(self, batches):
        """Yield the batches, and measure how long the training waits for them."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def add(self, loss, norm, load):
        """Note the loss and the norm of the gradient of a step, and the load of its experts (layers, E)."""
        self.pending.append(torch.cat([torch.stack([loss, norm]), load.flatten()]))
        self.shape = load.shape

    def write(self, step, lr, epoch):
        """Write and print a line on the steps since the last one, for which the host waits here.

        Raises InputError for a loss or a gradient that is not finite.
        """
        rows = self.processes.sum(torch.stack(self.pending)).cpu().double() / self.processes.world_size
        for number, (loss, norm, *_) in enumerate(rows.tolist(), step - len(rows) + 1):
            if not math.isfinite(loss + norm):
                advice = 'begin another run with a lower --lr or --grad_clip'
                if number == 1:
                    advice = 'before any update; train with --normalize, or in other units of the data'
                raise InputError(f'step {number}: the loss is {loss} and the norm of its gradient {norm}; {advice}')
        now = time.perf_counter()
        seconds = now - self.since
        loss = rows[:, 0].mean().item()
        load = rows[:, 2:].mean(0).view(self.shape).tolist()
        speed = self.recipe.batch_size * len(rows) / seconds
        line = {'step': step, 'loss': loss, 'epoch': epoch, 'lr': lr, 'grad_norm': rows[-1, 1].item(),
                'data_wait': self.waited / seconds, 'samples_per_s': speed,
                'gpu_memory_mb': torch.cuda.max_memory_allocated() / 1e6}
        self.append({**line, 'load': load} if load else line)
        self.processes.print(f'step {step}/{self.recipe.steps}: loss {loss:.4f}, lr {lr:.2e}, '
                             f'{1000 * seconds / len(rows):.0f} ms, {speed:.0f} samples/s')
        self.pending = []
        self.go_on()

    def append(self, line):
        """Append a line with the seconds since the run began, over all its processes."""
        if self.processes.rank == 0:
            text = json.dumps({**line, 'wall_s': time.perf_counter() - self.began})
            files.require_held(self.path.parent)
            with files.naming(self.path, 'cannot be written', OSError), open(self.path, 'a', encoding='utf-8') as file:
                file.write(text + '\n')
