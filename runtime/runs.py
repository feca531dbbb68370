"""A run in its folder: which one a command continues, its last.pt, its log."""
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import configs
from configs import InputError, ModelConfig, RunConfig, TrainConfig, show
from runtime import checkpoint, distributed, files

FORMAT = 2          # of last.pt; a change of what it holds gets another number
# flags that a resumed run may change: those of the machine, which the command always sets, and
# others that change no step of the training; its datasets are compared with their files
OF_THE_MACHINE = {'out', 'device', 'compile', 'resume'}
MAY_DIFFER = {*OF_THE_MACHINE, 'data', 'datasets', 'workers', 'save_every', 'log_every', 'keep'}
INSTEAD = 'choose another --out, from its weights with --init_from or by finetune.py --checkpoint'


@dataclass
class State:
    """How far a run is."""
    step: int = 0               # steps done
    scored: int = 0             # the last step that was scored
    best: float = math.inf      # the lowest error on validation data


def checkpoint_to_resume(run, processes):
    """The dict of the last.pt that --resume continues, {} for a new run.

    Raises InputError if a run would be replaced, and where processes have found different ones.
    """
    out = Path(run.out)
    found = sorted(path.name for path in out.glob('*')
                   if path.suffix == '.pt' or path.name in ('log.jsonl', 'config.json'))
    saved = checkpoint.load_file(out) if run.resume and 'last.pt' in found else {}
    if found and saved.get('format') != FORMAT:
        raise InputError(f'--out {out}: the folder holds {" ".join(found)}; continue the last.pt '
                         f'of a run of this version with --resume, or {INSTEAD}')
    distributed.require_same({'resume': f'of {out} at step {saved.get("step", 0)}'}, processes)
    return saved


def settings_of(command):
    """All settings of a train.Command: {'size', 'model', 'train', 'run', 'finetune'}."""
    return {'size': command.size, 'model': {**vars(command.model)},
            'train': {**vars(command.recipe)}, 'run': {**vars(command.run)},
            'finetune': {**command.tune}}


def flat(settings):
    """{flag: value} of what `settings_of` returns."""
    return {'size': settings['size'], **settings['model'], **settings['train'], **settings['run'],
            **settings['finetune']}


def taken_over(command, saved):
    """The train.Command that goes on with the run in `saved`, a last.pt, with the settings of that.

    Raises InputError for a flag that the command gives and that differs, but for MAY_DIFFER.
    """
    settings = saved['config']
    scripts = 'train.py', 'finetune.py'
    if bool(settings['finetune']) != bool(command.tune):
        raise InputError(f'--out {command.run.out}: the run to resume is of '
                         f'{scripts[bool(settings["finetune"])]}; repeat its command')
    now = flat(settings_of(command))
    before = flat(settings)
    for name in sorted(command.given - MAY_DIFFER):
        asked, its = (show(values.get(name, '')) for values in (now, before))
        if asked != its:
            raise InputError(f'--{name} {asked}: the run to resume has {its or "none"}; repeat its '
                             f'command, or {INSTEAD}')
    kept = {name: now[name] for name in OF_THE_MACHINE | MAY_DIFFER & command.given}
    if command.size and 'compile' not in command.given:         # whose default is that of its size
        cuda = distributed.choose_device(command.run.device).type == 'cuda'
        kept['compile'] = configs.run(settings['size'], cuda).compile
    return command._replace(
        size=settings['size'], model=ModelConfig(**settings['model']), tune=settings['finetune'],
        recipe=TrainConfig(**settings['train']), run=RunConfig(**{**settings['run'], **kept}))


def require_same_data(before, now, folder):
    """Raise InputError for {dataset: headers of its files} that differ from those of a run."""
    if [*before] != [*now]:
        raise InputError(f'--datasets {" ".join(now)}: the run to resume has {" ".join(before)}')
    for name, headers in now.items():
        for split in ('test', 'valid', 'train'):
            here, there = headers.get(split), before[name].get(split)
            if here != there:
                what = 'is not the file of the run, but has other fields or attributes; restore it'
                if not here:
                    what = 'is missing'
                elif not there:
                    what = 'is new, and the run had none; remove it'
                raise InputError(f'--resume: {folder}/{name}/{split}.h5 {what}, or choose another '
                                 f'--out')


def save(training, processes):
    """Write the last.pt of a train.Training, with all that `restore` takes over."""
    if processes.rank == 0:
        state = {'model': training.model.state_dict(), 'optimizer': training.optimizer.state_dict(),
                 'rng': torch.get_rng_state(), 'format': FORMAT}
        checkpoint.save_file({**state, **vars(training.progress), **training.metadata},
                             Path(training.command.run.out, 'last.pt'))


def restore(saved, model, optimizer):
    """Take over what `save` has written. Returns the State."""
    checkpoint.load_weights(model, saved)
    optimizer.load_state_dict(saved['optimizer'])
    torch.set_rng_state(saved['rng'])
    return State(saved['step'], saved['scored'], saved['best'])


def read_log(path):
    """The lines of a log.jsonl, one dict a step, which a scoring joins; one that a crash has cut
    off at the end is left out.
    """
    steps = {}
    with files.naming(path, 'damaged, or not the log of a run', (*files.OF_FILES, TypeError)):
        for text in Path(path).read_text(encoding='utf-8').split('\n')[:-1]:
            line = json.loads(text)
            steps.setdefault(line['step'], {}).update(line)
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
        self.pending = []           # the numbers of each step since the last line, on the device
        lines = read_log(path) if path.exists() else []
        lines = [line for line in lines if line['step'] <= step]
        if processes.rank == 0:
            files.write_text(path, ''.join(json.dumps(line) + '\n' for line in lines))
        self.since = time.perf_counter()            # from when on the next steps are timed
        self.began = self.since - max((line.get('wall_s', 0) for line in lines), default=0.0)

    def add(self, loss, norm, load):
        """Note the loss and gradient norm of a step, and the load of its experts (layers, E)."""
        self.pending.append(torch.cat([torch.stack([loss, norm]), load.flatten()]))
        self.shape = load.shape

    def write(self, step, lr, epoch):
        """Write and print a line on the steps since the last one, for which the host waits here.

        Raises InputError for a loss or a gradient that is not finite.
        """
        rows = self.processes.sum(torch.stack(self.pending)).cpu().double()
        rows /= self.processes.world_size
        for number, (loss, norm, *_) in enumerate(rows.tolist(), step - len(rows) + 1):
            if not math.isfinite(loss + norm):
                advice = 'begin another run with a lower --lr or --grad_clip'
                if number == 1:
                    advice = 'before any update; train with --normalize, or in other units'
                raise InputError(f'step {number}: the loss is {loss} and the norm of its gradient '
                                 f'{norm}; {advice}')
        seconds = time.perf_counter() - self.since
        loss = rows[:, 0].mean().item()
        speed = self.recipe.batch_size * len(rows) / seconds
        line = {'step': step, 'loss': loss, 'epoch': epoch, 'lr': lr,
                'grad_norm': rows[-1, 1].item(), 'samples_per_s': speed,
                'gpu_memory_mb': torch.cuda.max_memory_allocated() / 1e6}
        load = rows[:, 2:].mean(0).view(self.shape).tolist()
        self.append({**line, 'load': load} if load else line)
        self.processes.print(f'step {step}/{self.recipe.steps}: loss {loss:.4f}, lr {lr:.2e}, '
                             f'{1000 * seconds / len(rows):.0f} ms, {speed:.0f} samples/s')
        self.pending = []

    def append(self, line):
        """Append a line with the seconds since the run began, over all its processes."""
        if self.processes.rank == 0:
            text = json.dumps({**line, 'wall_s': time.perf_counter() - self.began})
            files.require_held(self.path.parent)
            with files.naming(self.path, 'cannot be written', OSError), self.path.open('a') as file:
                file.write(text + '\n')
        self.since = time.perf_counter()            # a scoring does not count
