"""A campaign against files and processes, which takes too long for the tests: pytest does not collect it.

    python tests/campaign.py --out docs/robustness.md

It damages files, fills up disks, kills the programs at random moments and runs 20,000 steps of a tiny network. What
must hold is in the docstrings; the exit code is 1 if anything did not. The programs run as forks of this process, which
has imported everything. A part of the campaign alone replaces its own rows in the table of the page --out.
"""
import io
import itertools
import multiprocessing
import os
import pickle
import random
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'             # the steps after a resumption are then the same bit for bit
sys.path.insert(0, str(Path(__file__).parent.parent))

import configs
from configs import InputError

import h5py
import numpy as np
import torch
import torch._dynamo  # which the first optimizer step imports, here once for all forks
from tqdm import tqdm

import aotpot
import checkpoint
import data
import evaluate
import prepare
import train
from conftest import ROOT
from helpers import command, same, travelling, write_two
from trained import CPU

CNS, SAVE_EVERY = 'ns2d_pdb_M1_eta1e-1_zeta1e-1', 8
BEGUN = {'training': 'log.jsonl', 'checkpoint writing': 'last.pt.part', 'generation': '*/*.part',
         'conversion': '*/*.part', 'data.write': '*/*.part'}                # these files show that the work has begun
WRITE = """import configs, data, numpy, sys
configs.cli(lambda: data.write(sys.argv[1] + '/own', *numpy.random.default_rng(0).random((2, 20, 9, 32, 32, 2))))"""


class Wrong(Exception):
    """Something that must hold does not."""


# ------------------------------------------------------------------------------------------------ the programs

def programs(inputs, out):
    """{activity: script and flags of a program that writes into the folder `out`}."""
    begin = partial(command, inputs, out, '--resume', 'auto', '--datasets', 'swe_pdb')
    return {'training': begin(steps=80, save_every=SAVE_EVERY),
            'checkpoint writing': begin('--width', '512', '--mlp', '2048', '--batch_size', '2', steps=5, save_every=1),
            'generation': [ROOT / 'generate.py', 'ns2d_fno_1e-3', '--preset', 'nano', '--resolution', '16',
                           '--train', '16', '--test', '8', '--frames', '20', '--data', out],
            'conversion': [ROOT / 'prepare.py', CNS, '--source', inputs / 'raw.h5', '--data', out],
            'data.write': [inputs / 'write.py', out]}


def started(arguments, error, largest=resource.RLIM_INFINITY):
    """A process that runs a script, with its standard error in the open file `error` and files of `largest` bytes."""
    def script():
        for stream, file in ((1, os.open(os.devnull, os.O_WRONLY)), (2, error.fileno())):
            os.dup2(file, stream)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        tqdm._instances.clear()                 # the bar of the campaign
        sys.argv = [*map(str, arguments)]
        runpy.run_path(sys.argv[0], run_name='__main__')
    process = multiprocessing.get_context('fork').Process(target=script)
    process.start()
    return process


def finished(process, error, out, *codes):
    """The exit code of a process, one of `codes`, that printed no traceback and, unless killed, left no *.part."""
    process.join(300)
    error.seek(0)
    code, printed, left = process.exitcode, error.read().decode(), [*out.rglob('*.part')]
    if (code not in codes or 'Traceback' in printed or left and code != -signal.SIGKILL
            or code == 2 and not printed.splitlines()[-1].startswith('error: ')):
        raise Wrong(f'exit code {code}; left: {left}; printed: {printed[-1500:]!r}')
    return code


def result(out):
    """What a program has written, to be compared: the bytes of HDF5 files, the run and the losses of a training."""
    found = {path.name: path.read_bytes() for path in out.rglob('*.h5')}
    for path in out.glob('last.pt'):
        saved = checkpoint.read(path)
        found['run'] = [saved[key] for key in ('model', 'optimizer', 'step', 'best', 'rng')]
        found['losses'] = [line['loss'] for line in checkpoint.read_log(out / 'log.jsonl')]
    return found


def complete(arguments, out, begun=''):
    """Run a program to its end: its `result`, the seconds of its work, and the bytes of its largest file."""
    with tempfile.TemporaryFile() as error:
        process, since = started(arguments, error), None
        while process.is_alive():
            since = since or (time.perf_counter() if not begun or any(out.glob(begun)) else None)
            time.sleep(0.002)
        finished(process, error, out, 0)
    return result(out), time.perf_counter() - since, max(path.stat().st_size for path in out.rglob('*.*'))


def rerun(arguments, out, wanted):
    """Run a program again after it failed: it writes what an uninterrupted run does, bit for bit."""
    if not same(complete(arguments, out)[0], wanted):
        raise Wrong('the rerun has written something else than an uninterrupted run')


def kill(name, number, inputs, known, chance):
    """Send a program a signal at a random moment of its work, then run it again.

    It prints no traceback and leaves no *.part after SIGTERM and SIGINT; its exit code is 128 + the number of the
    signal; the datasets that it has finished are complete. A training has saved its last step, or after SIGKILL the
    last one at which a checkpoint was due.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted, seconds, _ = known[name]
        out, delay, code = Path(folder) / 'out', chance.random() * seconds, 0
        arguments = programs(inputs, out)[name]
        while not code:                         # a program that was quicker is started anew
            subprocess.run(['rm', '-rf', out], check=True)
            with tempfile.TemporaryFile() as error:
                process = started(arguments, error)
                for pause in (delay, 0.1 * chance.random())[:1 + (name == 'checkpoint writing')]:
                    while process.is_alive() and not any(out.glob(BEGUN[name])):
                        time.sleep(0.002)
                    time.sleep(pause)
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
                code = finished(process, error, out, 0, -9 if number == signal.SIGKILL else 128 + number)
            delay /= 2
        for path in out.rglob('*.h5'):
            if path.read_bytes() != wanted[path.name]:
                raise Wrong(f'{path} is not complete')
        if (out / 'log.jsonl').exists():
            saved = checkpoint.read(out)['step'] if (out / 'last.pt').exists() else 0
            lost, every = len(checkpoint.read_log(out / 'log.jsonl')) - saved, 1 if 'check' in name else SAVE_EVERY
            if lost > (every if code < 0 else 0):
                raise Wrong(f'{lost} steps after the last checkpoint of step {saved}, after exit code {code}')
        rerun(arguments, out, wanted)
        return f'exit code {128 - code if code < 0 else code}, rerun complete'


def fill(name, share, inputs, known):
    """Run a program whose files may have a share of their bytes at most, as on a full disk, then again without limit.

    It ends with exit code 2 and one line, and leaves no *.part.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as error:
        out, (wanted, _, largest) = Path(folder) / 'out', known[name]
        finished(started(programs(inputs, out)[name], error, int(share * largest)), error, out, 2)
        rerun(programs(inputs, out)[name], out, wanted)
        return 'exit code 2, rerun complete'


def long_run(inputs, steps, folder):
    """Resident memory and open files of a training: from its first thousand steps on, they grow by 2 MB and 0 files."""
    out, seen = folder / 'long', []
    with tempfile.TemporaryFile() as error:
        process = started(command(inputs, out, '--datasets', 'own', '--batch_size', '2', '--log_every', '100',
                                  steps=steps, save_every=1000), error)
        while process.is_alive():
            with suppress(OSError, IndexError, ValueError, InputError):
                proc, step = Path(f'/proc/{process.pid}'), checkpoint.read_log(out / 'log.jsonl')[-1]['step']
                pages, files = int((proc / 'statm').read_text().split()[1]), len([*(proc / 'fd').iterdir()])
                seen.append((step, pages * resource.getpagesize() / 1e6, files))
            time.sleep(0.2)
        finished(process, error, out, 0)
    first, last = next(row for row in seen if row[0] >= min(1000, steps // 2)), seen[-1]
    text = '; '.join(f'step {step:,}: {memory:.1f} MB, {files} open files' for step, memory, files in (first, last))
    if last[1] - first[1] > 2 or last[2] > first[2]:
        raise Wrong(text)
    return text


# ------------------------------------------------------------------------------------------------ damaged files

def damage(content, chance):
    """A copy of some bytes with one to three random changes."""
    content = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 3))):
        start, other, size = chance.randrange(len(content)), chance.randrange(len(content)), chance.choice((1, 4, 64))
        words = [found.span() for found in re.finditer(rb'[A-Za-z_.]{3,}', content)]
        kind = chance.choice(('flip', 'cut', 'fill', 'swap', 'copy', 'word'))
        if kind == 'flip':
            content[start] ^= 1 << chance.randrange(8)
        elif kind == 'cut' and chance.random() < 0.3:
            del content[max(start, 1):]
        elif kind == 'fill':
            content[start:start + size] = bytes([chance.choice((0, 1, 127, 255))]) * len(content[start:start + size])
        elif kind == 'swap':
            size = min(size, len(content) - max(start, other))
            content[start:start + size], content[other:other + size] = (
                content[other:other + size], content[start:start + size])
        elif kind == 'copy':
            content[start:start] = content[other:other + size]
        elif words:
            (a, b), (c, d) = chance.choice(words), chance.choice(words)
            content[a:b] = content[c:d][:b - a].ljust(b - a, b'_')
    return bytes(content)


def damage_pickle(content, chance):
    """A copy of a checkpoint, which is a zip archive, whose pickle is damaged."""
    new = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(new, 'w') as file:
        for name in old.namelist():
            values = old.read(name)
            file.writestr(name, damage(values, chance) if name.endswith('data.pkl') else values)
    return new.getvalue()


def edit(content, chance):
    """A copy of a checkpoint in which one value, however deep, is missing or another one."""
    saved, file = torch.load(io.BytesIO(content), weights_only=True), io.BytesIO()
    place = saved
    while True:
        key = chance.choice([*place] if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], (dict, list)) and place[key]) or chance.random() < 0.1:
            break
        place = place[key]
    if chance.random() < 0.2:
        del place[key]
    else:
        place[key] = chance.choice([None, 'x', -1, 10 ** 7, float('nan'), [], {}, {'x': 1}, [1.0], torch.ones(3), True])
    torch.save(saved, file)
    return file.getvalue()


class Call:
    """Something whose pickle calls a function when it is loaded without care."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


FORMATS = (torch.save, lambda saved, file: torch.save(saved, file, _use_new_zipfile_serialization=False),
           lambda saved, file: file.write(pickle.dumps(saved)))
CRAFTED = [*itertools.product(range(7), ('config', 'optimizer', 'model', 'args'), FORMATS)]


def craft(content, canary, number, place, write):
    """A checkpoint that wants to run code, which would make the file `canary`."""
    python, shell = f'open({str(canary)!r}, "w")', f'touch {canary}'
    call = [Call(os.system, shell), Call(eval, python), Call(exec, python), Call(subprocess.getoutput, shell),
            Call(open, str(canary), 'w'), Call(Path.touch, canary), Call(torch.save, 1, str(canary))][number]
    saved, file = torch.load(io.BytesIO(content), weights_only=True), io.BytesIO()
    saved[place] = {**saved[place], 'more': call} if place in saved else call
    write(saved, file)
    return file.getvalue()


def forked(action):
    """What `action` comes to in a process of its own, with a minute of time: it works, or is refused in one line."""
    readable, writable = os.pipe()
    process = os.fork()
    if not process:
        signal.alarm(60)                        # its default action ends even a hanging library
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            action()
            text = 'read'
        except (InputError, SystemExit) as error:
            text = 'refused in one line' if '\n' not in str(error) else f'several lines: {error}'
        except BaseException as error:
            trace = error.__traceback__
            while trace.tb_next:
                trace = trace.tb_next
            text = f'{type(error).__name__}: {error} in {trace.tb_frame.f_code.co_qualname}, line {trace.tb_lineno}'
        os.write(writable, text.encode()[:2000])
        os._exit(0)
    os.close(writable)
    with open(readable, 'rb') as file:
        text = file.read().decode(errors='replace')
    status = os.waitpid(process, 0)[1]
    return text if os.WIFEXITED(status) else f'ended by {signal.Signals(os.WTERMSIG(status)).name}'


def use_checkpoint(path):
    """Load the network, apply it, and resume the run for its last two steps."""
    model = aotpot.load(path)
    config = model.config
    with torch.no_grad():
        model(torch.ones(1, config.frames, *config.resolution, config.channels))
    sys.argv = ['train.py', '--resume', str(path.parent), '--device', 'cpu']
    train.main()


def use_dataset(path):
    """Read both splits whole, and score a network on the test split."""
    model = aotpot.AOTPOT(configs.model('tiny', width=16, mlp=16, depth=1, heads=2, patch=4, resolution=16, frames=3))
    for split in ('train', 'test'):
        item = data.Trajectories(path.parent.parent, path.parent.name, split, 3, 4)
        for i in range(item.count):
            item.read(i, 0, item.frames)
    evaluate.score(model.eval(), item, CPU)


def attack(change, others, name, use, folder):
    """Put a damaged file among the `others` {name: bytes} and use it.

    No code is run, nothing but an InputError is raised, there is no crash, no hang and no unfinished file.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        own = Path(place) / 'own'
        own.mkdir()
        for key, values in {**others, name: change(Path(place) / 'canary')}.items():
            (own / key).write_bytes(values)
        text = forked(lambda: use(own / name))
        left = [path.name for path in Path(place).rglob('*') if path.suffix == '.part' or path.name == 'canary']
    if left or text not in ('read', 'refused in one line'):
        raise Wrong(f'{text}; left: {left}')
    return text


def attacks(count, inputs, folder, seed):
    """Yield (row of the table, function) for each of `count` mutations, and for all crafted checkpoints."""
    run, plain, packed = ({path.name: path.read_bytes() for path in (inputs / name).iterdir()}
                          for name in ('run', 'plain/own', 'packed/own'))
    raw, convert = (inputs / 'small.h5').read_bytes(), lambda path: prepare.convert(CNS, path, path.parent / 'data')
    kinds = [('bytes of the pickle of a checkpoint', damage_pickle, run, 'last.pt', use_checkpoint),
             ('bytes of a checkpoint', damage, run, 'last.pt', use_checkpoint),
             ('a value of a checkpoint', edit, run, 'last.pt', use_checkpoint),
             ('bytes of a contiguous HDF5 dataset', damage, plain, 'test.h5', use_dataset),
             ('bytes of a compressed HDF5 dataset', damage, packed, 'test.h5', use_dataset),
             ('bytes of a download to convert', damage, {'small.h5': raw}, 'small.h5', convert)]
    for i in range(count):
        row, change, files, name, use = kinds[i % len(kinds)]
        chance = random.Random(f'{seed} {i}')
        yield f'damaged: {row}', partial(attack, lambda _, change=change, files=files, name=name, chance=chance:
                                         change(files[name], chance), files, name, use, folder)
    for which in CRAFTED if count else ():
        yield 'a checkpoint that wants to run code', partial(attack, lambda canary, which=which: craft(
            run['last.pt'], canary, *which), run, 'last.pt', use_checkpoint, folder)


# ------------------------------------------------------------------------------------------------ the command

def prepare_inputs(inputs):
    """Write the data, the downloads and the run that the campaign works on."""
    write_two(inputs)
    (inputs / 'write.py').write_text(WRITE)
    values = travelling(3, 7, 8, 2, 0.4)
    for kind, options in (('plain', {}), ('packed', dict(chunks=(1, 2, 8, 8, 2), compression='gzip', shuffle=True))):
        for split in ('train', 'test'):
            (inputs / kind / 'own').mkdir(parents=True, exist_ok=True)
            with h5py.File(inputs / kind / 'own' / f'{split}.h5', 'w') as file:
                stored = file.create_dataset('data', data=values.astype('f4'), **options)
                stored.attrs.update(channels=['u', 'c'], static=['c'], scale=[2.0], dt=0.1, t_test=3, pde='u_t = u_x')
    for name, N, H, options in (('raw.h5', 12, 64, dict(chunks=(1, 1, 64, 64), compression='gzip')),
                                ('small.h5', 4, 4, {})):
        with h5py.File(inputs / name, 'w') as file:
            for channel in configs.DATASETS[CNS].channels:
                file.create_dataset(channel, data=np.random.default_rng(N).random((N, 21, H, H), np.float32), **options)
    complete(command(inputs / 'plain', inputs / 'run', steps=2, save_every=2), inputs / 'run')
    saved = torch.load(inputs / 'run/last.pt', weights_only=True)
    saved['config']['train']['steps'] = 4                   # so that a resumption has something to do
    torch.save(saved, inputs / 'run/last.pt')


def main():
    parser = configs.Parser(description=__doc__)
    for flag, default, text in (('kills', 20, 'of each signal'), ('mutations', 600, 'of files'),
                                ('steps', 20_000, 'of the long run'), ('seed', 0, 'of what is random')):
        parser.add_argument(f'--{flag}', type=int, default=default, metavar='N', help=f'{text} [{default}]')
    parser.add_argument('--out', metavar='FILE', help='a page with the table between two lines <!-- table -->')
    args = parser.parse_args()
    tqdm.monitor_interval = 0                               # a process with threads should not fork
    rows, wrong = defaultdict(Counter), []
    with tempfile.TemporaryDirectory() as place:
        inputs, known = Path(place) / 'inputs', {}
        inputs.mkdir()
        prepare_inputs(inputs)
        jobs = [*attacks(args.mutations, inputs, place, args.seed)]
        for name in BEGUN if args.kills else ():
            known[name] = complete(programs(inputs, inputs / name)[name], inputs / name, BEGUN[name])
            jobs += [(f'a full disk, {name}', partial(fill, name, share, inputs, known)) for share in (0.02, 0.5, 0.9)]
        for (i, name), number in itertools.product(zip(range(args.kills), itertools.cycle([*BEGUN][:-1])),
                                                   (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)):
            jobs.append((f'{number.name}, {name}', partial(kill, name, number, inputs, known,
                                                           random.Random(f'{args.seed} {i} {number}'))))
        jobs += [(f'{args.steps:,} steps of training', partial(long_run, inputs, args.steps, Path(place)))
                 ] * bool(args.steps)
        for row, action in (bar := tqdm(jobs, desc='campaign')):
            try:
                rows[row][action()] += 1
            except Wrong as error:
                rows[row]['WRONG'] += 1
                wrong.append(f'{row}: {error}')
                bar.write(wrong[-1], file=sys.stderr)
    lines = {f'| {row} ': f'| {row} | {counts.total():,} | ' + '; '.join(
        f'{count} x {text}' if len(counts) > 1 else text for text, count in counts.most_common()) + ' |'
        for row, counts in sorted(rows.items())}
    print(*lines.values(), *wrong, sep='\n')
    if args.out:
        page, mark = Path(args.out), '<!-- table -->\n'
        before, table, after = page.read_text().split(mark)
        lines = {'|'.join(line.split('|')[:2]): line for line in table.splitlines()} | lines
        with configs.writing(page), configs.replacing(page) as part:
            part.write_text(mark.join([before, '\n'.join(lines.values()) + '\n', after]))
    sys.exit(bool(wrong))


if __name__ == '__main__':
    configs.cli(main)
