"""A campaign against files and processes, which takes too long for the tests: pytest does not collect it.

    python tests/campaign.py --out docs/robustness.md

It damages files, fills up disks, kills the programs at random moments and runs 20,000 steps of a tiny network. What
must hold is in the docstrings; the exit code is 1 if anything did not. The programs run as forks of this process, which
has imported everything. A part of the campaign alone replaces its own rows in the table of the page --out.
"""
import itertools
import multiprocessing
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
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

from conftest import ROOT
from damage import CNS, Wrong, attacks
from helpers import command, same, travelling, write_two
from runtime import checkpoint, terminal

SAVE_EVERY = 8
BEGUN = {'training': 'log.jsonl', 'checkpoint writing': 'last.pt.*.part', 'generation': '*/*.part',
         'conversion': '*/*.part', 'data.write': '*/*.part'}                # these files show that the work has begun
WRITE = """import data, numpy, sys, terminal
terminal.cli(lambda: data.write(sys.argv[1] + '/own', *numpy.random.default_rng(0).random((2, 20, 9, 32, 32, 2))))"""


# ------------------------------------------------------------------------------------------------ the programs

def programs(inputs, out):
    """{activity: script and flags of a program that writes into the folder `out`}."""
    begin = partial(command, inputs, out, '--resume', 'auto', '--datasets', 'swe_pdb')
    return {'training': begin(steps=80, save_every=SAVE_EVERY),
            'checkpoint writing': begin('--width', '512', '--mlp', '2048', '--batch_size', '2', steps=5, save_every=1),
            'generation': [ROOT / 'sources/generate.py', 'ns2d_fno_1e-3', '--preset', 'nano', '--resolution', '16',
                           '--train', '16', '--test', '8', '--frames', '20', '--data', out],
            'conversion': [ROOT / 'sources/prepare.py', CNS, '--source', inputs / 'raw.h5', '--data', out],
            'data.write': [inputs / 'write.py', out]}


def started(arguments, error, largest=resource.RLIM_INFINITY):
    """A process that runs a script, with its standard error in the open file `error` and files of `largest` bytes."""
    def script():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(error.fileno(), 2)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        tqdm._instances.clear()                 # the bar of the campaign
        sys.argv = [str(argument) for argument in arguments]
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
    """Run a program whose files may have only a share of their bytes, as on a full disk: exit code 2 and one line.

    It leaves no *.part, and is complete when it is run again without the limit."""
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
    first, last = next(row for row in seen if row[0] >= min(1000, steps // 2)), [
        row for row in seen if row[0] < steps][-1]              # later the process may be about to end
    text = '; '.join(f'step {step:,}: {size:.1f} MB, {files} open files' for step, size, files in (first, last))
    if last[1] - first[1] > 2 or last[2] > first[2]:
        raise Wrong(text)
    return text


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
    parser = terminal.Parser(description=__doc__)
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
        jobs += [(f'{args.steps:,} steps', partial(long_run, inputs, args.steps, Path(place)))] * bool(args.steps)
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
        with terminal.writing(page), terminal.replacing(page) as part:
            part.write_text(mark.join([before, '\n'.join(lines.values()) + '\n', after]))
    sys.exit(bool(wrong))


if __name__ == '__main__':
    terminal.cli(main)
