"""Random damage to files for tests/campaign.py, and what reading the damaged files comes to."""
import io
import itertools
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path

import configs
from configs import InputError

import torch

import aotpot
import data
import evaluate
import nets
import train
from sources import prepare
from trained import CPU

CNS = 'ns2d_pdb_M1_eta1e-1_zeta1e-1'


class Wrong(Exception):
    """Something that must hold does not."""


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
    model = nets.build(configs.model('tiny', width=16, mlp=16, depth=1, heads=2, patch=4, resolution=16, frames=3))
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
