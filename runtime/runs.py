"""The run of a folder, whose files train.py describes: which one a command continues, its batches, its log, its end."""
import json
import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch

from configs import InputError, show
from runtime import checkpoint, files
from runtime.terminal import Progress, warn

# flags that a resumed run may change, because they change nothing that is computed
MAY_DIFFER = 'data', 'out', 'device', 'threads', 'compile', 'resume', 'save_every', 'keep', 'log_every'
CHECKPOINTS = 'init_from', 'checkpoint', 'channel_maps'         # flags that name one


@dataclass
class RunProgress:
    """The progress of a run, which last.pt holds."""
    step: int = 0               # steps done
    best: float = math.inf      # the lowest error on validation data
    scored: int = 0             # the last step that was scored


# ------------------------------------------------------------------------------------------------ which run

def checkpoint_to_resume(run):
    """The dict of the last.pt that --resume continues, or None. Raises InputError if a run would be replaced."""
    out = Path(run.out)
    if run.resume and (out / 'last.pt').exists():
        saved = checkpoint.load_file(out / 'last.pt')
        if not saved.keys() >= {'optimizer', 'rng', 'best', 'scored'}:
            raise InputError(f'{out}/last.pt: these are weights without a run to resume; train.py --init_from or '
                             f'finetune.py --checkpoint starts a new one from them, with another --out')
        return saved
    found = [path.name for path in sorted(out.glob('*'))
             if path.suffix == '.pt' or path.name in ('log.jsonl', 'config.json')]
    if found:
        raise InputError(f'--out {out}: the folder holds a run ({" ".join(found)}); continue that of a last.pt with '
                         f'--resume, choose another --out, or delete it')
    return None


def setting(name, value):
    """A setting as it is compared: a checkpoint by its absolute path, in which a folder stands for its last.pt."""
    if name not in CHECKPOINTS or not value:
        return value
    return str(Path(value).resolve()).removesuffix('/last.pt')


def require_unchanged(saved, config):
    """Raise InputError for the first setting of a command's 'config' that is another than in `saved`, its last.pt.

    Those of finetune.py come first, since others follow from them.
    """
    for part, fields in reversed(config.items()):
        for name, value in fields.items():
            before = saved['config'].get(part, {}).get(name)
            if name not in MAY_DIFFER and setting(name, value) != setting(name, before):
                raise InputError(f'--{name} {show(value) or "(none)"}: the run to resume has {show(before) or "none"}; '
                                 f'repeat its command, or choose another --out')


# ------------------------------------------------------------------------------------------------ its batches

def at_once(batch_size, world_size=1, parts=1):
    """How many samples of a batch a process takes at once. Raises InputError if the batch has no such equal parts."""
    if batch_size % (world_size * parts):
        raise InputError(f'--batch_size {batch_size} is not divisible by {world_size} processes x --accumulate {parts}')
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


def read_ahead(windows, numbers, threads):
    """Yield windows[part] for each of the `numbers` in order, while threads read at most twice as many further ones."""
    waiting = deque()
    with ThreadPoolExecutor(threads) as pool:
        for part in numbers:
            waiting.append(pool.submit(windows.__getitem__, part))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class Batches:
    """The batches of this process for the steps first..last-1, read and copied to the device one step ahead.

    A batch is a list of its --accumulate `parts`, and a part is a list of data.Group. Threads read ahead for a GPU
    alone, because a CPU is busy anyway.
    """

    def __init__(self, windows, first, last, batch_size, parts, processes):
        numbers = batches_of_rank(first, last, batch_size, processes.rank, processes.world_size, parts)
        self.device = processes.device
        self.parts = parts
        self.waited = 0.0                                                       # seconds that steps have waited
        cuda = self.device.type == 'cuda'
        self.loaded = read_ahead(windows, numbers, threads=4) if cuda else (windows[part] for part in numbers)
        self.copies = torch.cuda.Stream(self.device) if cuda else None
        self.ahead = self._load()

    def _load(self):
        batch = []
        with torch.cuda.stream(self.copies):                    # which does nothing for None
            for groups in islice(self.loaded, self.parts):
                batch.append([group._replace(windows=group.windows.to(self.device, non_blocking=True))
                              for group in groups])
        return batch

    def __next__(self):
        start = time.perf_counter()
        batch = self.ahead
        if self.copies:
            torch.cuda.current_stream().wait_stream(self.copies)
            for group in chain(*batch):                                 # or a later copy might take their memory
                group.windows.record_stream(torch.cuda.current_stream())
        self.ahead = self._load()
        self.waited += time.perf_counter() - start
        return batch

    def close(self):
        """End the threads, which Python would wait for at its end."""
        self.loaded.close()


# ------------------------------------------------------------------------------------------------ its files

class Checkpoints:
    """The checkpoints of a run in --out, which rank 0 writes. kept: what each holds beside the weights and the step."""

    def __init__(self, out, model, optimizer, kept, processes):
        self.out = Path(out)
        self.model = model
        self.optimizer = optimizer
        self.kept = kept
        self.processes = processes

    def save(self, name, step, **more):
        if self.processes.rank == 0:
            checkpoint.save_file({'model': self.model.state_dict(), 'step': step, **self.kept, **more}, self.out / name)

    def save_last(self, progress):
        self.save('last.pt', **vars(progress), optimizer=self.optimizer.state_dict(), rng=torch.get_rng_state())

    def save_scored(self, progress, error, best, keep):
        """Note a scoring. best: the weights become best.pt if no error was lower; keep: they become step<N>.pt."""
        progress.scored = progress.step
        if best and error < progress.best:
            progress.best = error
            self.save('best.pt', progress.step, valid=error)
        if keep:
            self.save(f'step{progress.step}.pt', progress.step)

    def begin(self, resumed, steps):
        """The RunProgress of a new run, which has a last.pt from its start on, or of the last.pt of a `resumed` one."""
        progress = RunProgress()
        if resumed:
            checkpoint.load_weights(self.model, resumed)
            self.optimizer.load_state_dict(resumed['optimizer'])
            torch.set_rng_state(resumed['rng'])
            progress = RunProgress(**{name: resumed[name] for name in vars(progress)})
        else:
            self.save_last(progress)
        if self.processes.rank == 0:
            text = json.dumps({**self.kept['config'], 'data': self.kept['data'], 'steps': steps}, indent=1)
            files.write_text(self.out / 'config.json', text)
        return progress


def read_log(path):
    """The lines of a log.jsonl, one dict a step, without a last one that a crash has left incomplete.

    Other lines that are not of a run are left out with a warning. A scoring, {'step', 'valid' or 'test', 'wall_s'},
    joins the line of its step.
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
    """The file log.jsonl of a run, and its bar. What a step adds stays on the device until a line is written.

    step: where the run goes on, after which the file is cut off; draws: how many an epoch has.
    """

    def __init__(self, out, step, steps, batch_size, draws, processes):
        self.path = Path(out, 'log.jsonl')
        self.batch_size = batch_size
        self.draws = draws
        self.processes = processes
        lines = read_log(self.path) if self.path.exists() else []
        lines = [line for line in lines if line['step'] <= step]       # a killed run repeats those after last.pt
        if processes.rank == 0:
            files.write_text(self.path, ''.join(json.dumps(line) + '\n' for line in lines))
        self.began = time.perf_counter() - max((line['wall_s'] for line in lines), default=0.0)
        self.bar = Progress(total=steps, initial=step, desc='training', unit='step', disable=processes.rank > 0)
        self.numbers = []                           # of the steps since the last line: loss, norm
        self.shares = []                            # and, with experts, their shares (layers, E)
        self.last = step                            # the step of the last line
        self.waited = 0.0                           # seconds of waiting for data until then
        self.time = time.perf_counter()             # when it was written

    def add(self, loss, norm, share):
        """Note the loss of a step, the norm of its gradient, and the shares of experts (layers, E) or None."""
        self.numbers.append(torch.stack([loss, norm]))
        self.shares.append(share)
        self.bar.update()

    def steps(self):
        """The steps since the last line: [(number, loss, norm of the gradient)]."""
        numbers = torch.stack(self.numbers).tolist()            # here the host waits for the device
        return [(step, *pair) for step, pair in enumerate(numbers, self.last + 1)]

    def write(self, steps, lr, waited):
        """Write a line on the `steps` since the last one, and forget them. waited: the seconds of waiting for data."""
        step = steps[-1][0]
        losses = [loss for _, loss, _ in steps]
        now = time.perf_counter()
        seconds = now - self.time
        line = {'step': step,
                'loss': sum(losses) / len(losses),
                'epoch': step * self.batch_size / self.draws,
                'lr': lr,
                'grad_norm': steps[-1][2],
                'data_wait': (waited - self.waited) / seconds,
                'samples_per_s': self.batch_size * (step - self.last) / seconds,
                'gpu_memory_mb': torch.cuda.max_memory_allocated() / 1e6}
        if self.shares[0] is not None:
            line['load'] = torch.stack(self.shares).mean(0).tolist()
        self.append(line)
        self.bar.set_postfix_str(f'loss {line["loss"]:.4f}, {line["samples_per_s"]:.0f} samples/s, '
                                 f'{line["data_wait"]:.0%} waiting for data', refresh=False)
        self.last = step
        self.waited = waited
        self.time = now
        self.numbers = []
        self.shares = []

    def write_score(self, step, error, split, whose):
        """Write the error of a scoring on a split. The seconds since the last line do not count as training."""
        self.bar.clear()
        self.processes.print(f'step {step}: {split} {error:.4f}{whose}')
        self.append({'step': step, split: error if math.isfinite(error) else None})
        self.time = time.perf_counter()

    def append(self, line):
        """Append a line with the seconds since the run began, as if this process had taken all steps."""
        if self.processes.rank == 0:
            text = json.dumps({**line, 'wall_s': time.perf_counter() - self.began})
            files.require_held(self.path.parent)
            with files.naming(self.path, 'cannot be written', OSError), open(self.path, 'a', encoding='utf-8') as file:
                file.write(text + '\n')
