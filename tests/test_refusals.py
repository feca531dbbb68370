"""What a user may do wrong: a line says what it is, the exit code is 2, and no file is new or has changed.

The rows of `COMMANDS` are (script, flags, words of the line), those of `CALLS` (function, its argument, words of the
error). In the words `...` stands for any text, and a newline for the end of the line. Of the flags, words in capitals
are those of `ABBREVIATIONS`. A refusal that needs more than a simple start is tested beside its module.
"""
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import aotpot
import configs
import data
import evaluate
import finetune
import helpers
import nets.build
import train
from helpers import CPU, KINDS, fresh, save, save_three, small_model, travelling, write, write_test_sets, write_two
from lab import bench, interpret, predict, reproduce
from runtime import distributed, runs
from sources import generate, prepare

TRAIN = [*helpers.TINY, '--data', 'data', '--steps', '2']
STUDY = ['ablation', '--steps', '4', '--seeds', '1', '--device', 'cpu', '--data', 'data']
ABBREVIATIONS = {
    'RUN': [*TRAIN, '--out', 'target'],
    'TUNE': ['--checkpoint', 'pre/best.pt', '--data', 'tune', '--out', 'target'],
    'SMALL': ['--checkpoint', 'out/small', '--device', 'cpu'],
    'AOT': ['--checkpoint', 'out/aot/step9.pt', '--device', 'cpu'],
    'NEXT': ['--checkpoint', 'out/small', '--device', 'cpu', '--steps', '1', '--to', 'target/out.h5'],
    'FIELDS': ['--checkpoint', 'out/small', '--device', 'cpu', '--datasets', 'coarse', '--fields',
               '--figures', 'target'],
    'STUDY': [*STUDY, '--rows', 'AOT-POT', '--collect', '--out'],
}
OURS = 'it is not the file of that name that this project writes'
COMMANDS = {
    'flags that no command has': [
        (train, '--dept 3', 'unrecognized arguments: --dept 3'),
        (train, 'tiny', 'unrecognized arguments: tiny'),
        (finetune, 'TUNE --dataset new --from_scrach', 'unrecognized arguments: --from_scrach'),
        (evaluate, '--sample 3', 'unrecognized arguments: --sample 3'),
        (bench, 'step --short 19', 'unrecognized arguments: --short 19'),
    ],
    'names that are not known': [
        (train, '--form=papre', '--form'),
        (train, '--residual=none', '--residual'),
        (train, '--ablate=x', "--ablate 'x'"),
        (train, '--size=tinny', "unknown size 'tinny'; did you mean tiny?"),
        (train, 'RUN --datasets swe_pbd', '--datasets swe_pbd: no '),
        (train, 'RUN --sampling ownn=50',
         '--sampling ownn: there is no such dataset in the mixture; did you mean own?'),
        (train, 'RUN --device cuda:77', '--device cuda:77: not available'),
        (finetune, 'TUNE --dataset newer', '/newer/train.h5; did you mean new?'),
        (evaluate, 'SMALL --datasets cors', 'did you mean'),
        (evaluate, 'SMALL --device gpu', '--device gpu: not available here'),
        (evaluate, 'SMALL --scoring dpot', "'native', 'paper'"),
        (predict, 'NEXT fine.npy --dataset own', 'fine.npy: the checkpoint has no layout of the dataset own'),
        (predict, 'FIELDS --channel w', 'w: coarse does not predict it'),
        (predict, 'FIELDS --datasets own --channel c', 'c: own'),
        (interpret, 'AOT --unseen nwe', '--unseen nwe: no '),
        (bench, 'rollout', "command: invalid choice: 'rollout'"),
        (bench, 'loader --datasets swe', "--datasets: invalid choice: 'swe'"),
        (bench, 'step --device cuda:99', '--device cuda:99: not available here'),
        (bench, 'step --peer nowhere', '--peer nowhere: '),
        (bench, 'latency --form slow', "--form: invalid choice: 'slow'"),
        (bench, 'gpu --part long', "--part: invalid choice: 'long'"),
        (reproduce, 'nothing', "invalid choice: 'nothing'"),
        (reproduce, 'main --rows UNnet --data data',
         "error: --rows 'UNnet': main has no such row; did you mean UNet?\n"),
        (generate, '--data target swe', 'did you mean swe_pdb?'),
        (generate, '--data target cno_airfoil', 'sources.prepare converts'),
        (generate, '--data target dr_pdb swe_pdb nosuch', 'no solver makes'),
        (prepare, '--data target swe', 'did you mean swe_pdb?'),
        (prepare, '--data target swe_pdb --from x', 'dpot'),
        (prepare, '--data checked ownn --check', 'did you mean own?'),
    ],
    'numbers that are out of range': [
        (train, '--lr=fast', '--lr'),
        (train, '--lr=0', '--lr 0.0 must be above 0'),
        (train, '--batch_size=-1', '--batch_size -1'),
        (train, '--experts=3', '--top_k 4 is more than --experts 3'),
        (train, '--experts=-1', '--experts -1'),
        (train, '--experts 8 --shared 0', '--shared 0'),
        (train, '--width=100', '--width 100 is not divisible'),
        (train, '--width=1000000', 'at most 16384'),
        (train, '--resolution 60 --patch 8', '--resolution 60x60 is not divisible by --patch 8'),
        (train, '--resolution=big', "resolution 'big' is not a grid"),
        (train, '--resolution=0', 'at least 1'),
        (train, '--resolution=1000000', 'at most 16384'),
        (train, '--dims=3', 'add --resolution 64 or 64x64x96'),
        (train, '--streams=0', '--streams 0 must be at least 1'),
        (train, '--streams=65', 'at most 64'),
        (train, '--depth=10000000', 'at most 256'),
        (train, '--frames=1000000', 'at most 1000'),
        (train, '--sampling=a', '--sampling a: expected a dataset and a number'),
        (train, '--sampling=a=0', '0.0 must be above 0'),
        (train, '--save_every=-1', '--save_every -1'),
        (train, '--beta1=1', '1.0 must be below 1'),
        (train, '--beta2=-0.1', '-0.1 must be at least 0'),
        (train, '--weight_decay=-1e-9', 'at least 0'),
        (train, '--warmup=1', 'below 1'),
        (train, '--workers=-5', '-5 must be at least -1'),
        (train, '--threads=1000000', 'at most 1024'),
        (train, '--seed=-1', 'at least 0'),
        (finetune, 'TUNE --dataset new --samples 41', '--samples 41: the training split has only 40'),
        (finetune, 'TUNE --dataset new --validation 1', 'leaves none of 40'),
        (evaluate, 'SMALL --rollout 0', '--rollout 0 must be at least 1'),
        (evaluate, 'SMALL --rollout 1000000000', 'at most 100000'),
        (evaluate, 'SMALL --batch_size 0', '--batch_size 0'),
        (evaluate, 'SMALL --samples 0', '--samples 0 must be'),
        (evaluate, 'SMALL --resolution 30', '--resolution 30x30 is not divisible by --patch 4'),
        (evaluate, 'SMALL --resolution fine', "resolution 'fine' is not a grid of 2 dimensions; write 128 or 96x192"),
        (predict, 'NEXT fine.npy --static 2', 'fine.npy: static channels [2]; its channels are 0 to 1'),
        (predict, 'NEXT fine.npy --steps 0', '--steps 0 must be at least 1'),
        (predict, 'NEXT fine.npy --steps 100001', '--steps 100001 must be at most 100000'),
        (predict, 'FIELDS --steps 1 5', '--steps 5: coarse has 4 frames after the 3'),
        (predict, 'FIELDS --trajectory 4', '--trajectory 4: coarse has 0 to 3'),
        (predict, 'FIELDS --trajectory -1', '--trajectory -1 must be'),
        (interpret, 'AOT --samples 0', '--samples 0'),
        (bench, 'loader --repeats 0', '--repeats 0 must be at least 1'),
        (bench, 'latency --repeats 0', '--repeats 0 must be at least 1'),
        (bench, 'step --batch_size 0', '--batch_size 0 must be at least 1'),
        (bench, 'step --resolution 60x61', '--resolution 60x61 is not divisible by --patch 8'),
        (bench, 'gpu --steps 0', '--steps 0 must be at least 1'),
        (reproduce, 'main --seeds 0', '--seeds 0'),
        (generate, '--data target swe_pdb --train 0', '--train 0 must be at least 1'),
        (generate, '--data target swe_pdb --resolution 8', '--resolution 8 must be at least 16'),
        (generate, '--data target swe_pdb --frames 10', '--frames 10 must be at least 11'),
        (generate, '--data target swe_pdb --seed -1', '--seed -1'),
    ],
    'flags that are missing, empty or do not go together': [
        (train, '--init_from ""', 'error: --init_from: an empty value; leave the flag out or give it a value'),
        (train, '--data=', 'error: --data: an empty value; leave the flag out or give it a value'),
        (train, 'RUN --graphs', '--graphs: it needs --compile, one process and whole batches'),
        (train, 'RUN --graphs --compile --accumulate 2', '--graphs: it needs --compile, one process'),
        (finetune, '--data tune --out target', '--checkpoint is needed'),
        (finetune, 'TUNE', '--dataset is needed'),
        (train, '--epochs 3 --steps 4', '--steps and --epochs'),
        (train, '--network baselines:UNet --normalize', '--normalize True is for AOT-POT'),
        (evaluate, '--json ""', 'an empty value'),
        (evaluate, '--data=', 'an empty value'),
        (evaluate, 'SMALL --rollout 9 --metrics', 'are for the test frames'),
        (evaluate, 'SMALL --rollout 9 --scoring paper', 'are for the test frames'),
        (evaluate, 'SMALL --figures target', '--figures: of what?'),
        (predict, 'NEXT fine.npy --to ""', '--to: an empty value'),
        (predict, 'NEXT', 'give a FILE of frames or --fields'),
        (predict, 'NEXT fine.npy --fields', 'give a FILE of frames'),
        (predict, 'NEXT --fields', '--fields: into which folder? add --figures DIR'),
        (reproduce, '', f'which STUDY of {", ".join(reproduce.STUDIES)}?'),
        (reproduce, 'STUDY target --recipe "\'open"', "--recipe 'open: No closing quotation"),
        (generate, '--data target', 'required: name'),
        (prepare, '--data target', 'required: name'),
        (prepare, '--data target swe_pdb', '--source is missing'),
    ],
    'folders': [
        (train, '--out file --data none --datasets own --size tiny', 'error: --out file: file is not a folder'),
        (train, '--out file/below/it --data none --size tiny', 'error: --out file/below/it: file is not a folder'),
        (train, '--out closed/new --data none --size tiny',
         'error: --out closed/new: closed is not a folder that can be written'),
        (train, 'RUN --out a.pt', 'a folder whose name ends in .pt would be taken for'),
        (finetune, 'TUNE --dataset new --out file', 'error: --out file: file is not a folder'),
        (finetune, 'TUNE --dataset new --out file/below/it', 'error: --out file/below/it: file is not a folder'),
        (finetune, 'TUNE --dataset new --out closed/new',
         'error: --out closed/new: closed is not a folder that can be written'),
        (evaluate, 'SMALL --data none', 'error: --data none: no such folder; name another'),
        (reproduce, 'main --data nowhere', 'nowhere: no such folder'),
        (reproduce, 'main --data data/nano', 'run: python -m sources.generate builtin --preset nano --data data/nano'),
        (generate, 'swe_pdb --data file', 'cannot be written (Not a directory)'),
        (prepare, '--data target swe_pdb --source out', 'Is a directory'),
        (prepare, '--data target swe_pdb --source out --from the_well', "swe_pdb is one of the paper's datasets"),
        (prepare, '--data target ns2d_pda --source out', 'files *.h5'),
        (prepare, '--data target cfdbench --source out', 'folders cavity'),
        (prepare, '--data target swe_pdb --check',
         'no such folder; name another, or run: python -m sources.generate swe_pdb --data '),
        (prepare, '--data checked swe_pdb --check', 'error: --check swe_pdb: no checked/swe_pdb/train.h5; run: python '
         '-m sources.generate swe_pdb --data checked'),
    ],
    'files': [
        (evaluate, 'SMALL --json own/a.txt', '--json own/a.txt: expected a file whose name ends in .json'),
        (evaluate, 'SMALL --json own/test.h5/a.json --datasets own',
         'own/test.h5/a.json: own/test.h5 is not a folder'),
        (bench, 'loader --json last.pt', '--json last.pt: expected a file whose name ends in .json'),
        (reproduce, 'STUDY cut', f'config.json: {OURS}'),
        (reproduce, 'STUDY foreign', f'config.json: {OURS}'),
        (reproduce, 'STUDY cut_scores', f'evaluate.json: {OURS}'),
        (reproduce, 'STUDY foreign_scores', f'evaluate.json: {OURS}'),
        (reproduce, 'STUDY no_scores', 'evaluate.json: it is not what evaluate writes; move it away'),
        (predict, 'NEXT none.npy', '.npy (No such file'),
        (predict, 'NEXT none.h5', 'none.h5: cannot be read (No such file'),
        (predict, 'NEXT text.npy', 'text.npy: not readable as .npy'),
        (predict, 'NEXT npz.npy', 'npz.npy: not readable'),
        (predict, 'NEXT text.h5', 'text.h5: cannot be read'),
        (predict, 'NEXT pickle.npy', 'pickle.npy: not readable as .npy'),
        (predict, 'NEXT a.npz', 'a.npz: the name of a file of frames ends in .npy, .h5, .hdf5'),
        (predict, 'NEXT two.h5', 'two.h5: cannot be read ('),
        (predict, 'NEXT short.npy', 'short.npy: 2 frames; this model needs 3'),
        (predict, 'NEXT hole.h5', 'hole.h5: a part of /data was never written'),
        (predict, 'NEXT dates.npy', 'dates.npy: datetime64[D]; expected'),
        (predict, 'NEXT words.npy', 'words.npy: <U1; expected real numbers'),
        (predict, 'NEXT words.h5', 'words.h5: object; expected real numbers'),
        (predict, 'NEXT empty.h5', 'empty.h5: the shape ()'),
        (predict, 'NEXT static.h5', "static.h5: static ['c']: expected names of the channels ['0', '1']"),
        (predict, 'NEXT fine.npy --to out.png', '--to out.png: the name must end in .npy, .h5, .hdf5'),
        (predict, 'NEXT fine.npy --to ./fine.npy',
         'error: --to ./fine.npy: this exists; remove it or name another file\n'),
        (predict, 'NEXT fine.npy --to own/test.h5', 'error: --to own/test.h5: this exists; remove it or name another'),
    ],
    'checkpoints': [
        (train, 'RUN --init_from none.pt', 'none.pt: there is no such checkpoint'),
        (train, '--resume pre --steps 5', '--steps 5: the run to resume has 8'),
        (train, '--resume pre/last.pt --streams 2', '--streams 2: the run to resume has 4'),
        (train, '--resume pre --size tiny', 'the run to resume has'),
        (train, '--resume pre --init_from a.pt', '--init_from a.pt: the run to resume has none'),
        (train, '--resume pre --coefficients c', '--coefficients c: the run to resume has none'),
        (train, '--resume pre --overwrite', '--overwrite and --resume: give only one'),
        (train, '--resume pre --out data', 'resume stays in its folder, pre; '),
        (train, '--resume pre/best.pt', 'best.pt: it holds weights alone'),
        (train, '--resume pre/no.pt', '/no.pt: there is no such checkpoint'),
        (train, '--resume --out pre/none', 'none/last.pt: there is no'),
        (finetune, '--resume pre --data tune --out target', 'the run to resume stays in its folder'),
        (evaluate, '--checkpoint own', 'own/last.pt: there is no such checkpoint'),
        (evaluate, '--checkpoint out/aot/step9.pt out/plain --device cpu',
         'aot and plain differ in datasets, coarse own and own; name one with --datasets'),
        (evaluate, '--checkpoint out/aot/step9.pt out/four --device cpu --datasets own',
         'differ in frames, 3 and 4; choose one'),
        (evaluate, '--checkpoint out/aot/step9.pt out/far --device cpu', '; name one with --data'),
        (evaluate, '--checkpoint out/aot/step9.pt out/fine --device cpu --datasets own --scoring paper',
         'differ in resolution, 16x16 and 32x32; name one with --resolution'),
        (predict, 'NEXT fine.npy --checkpoint out/small out/plain',
         'one process writes the predictions of one --checkpoint'),
        (interpret, 'AOT --checkpoint out/plain --gains', 'no T to look at, it was made with --residual plain'),
        (interpret, 'AOT --checkpoint out/one --probe',
         'no T to look at, it was made with --residual aot --streams 1'),
        (interpret, 'AOT --checkpoint out/ablated --probe', '--residual aot --streams 4 --ablate "dT"'),
        (interpret, 'AOT --checkpoint out/aot/step9.pt out/plain --gains', 'plain/last.pt has no T to look at'),
        (interpret, 'AOT --checkpoint out/wild', 'error: --checkpoint: T is not finite on coarse'),
        (interpret, 'AOT --checkpoint out/unet/last.pt',
         'out/unet/last.pt is a baselines:UNet; only AOT-POT and its experts can be interpreted\n'),
    ],
    'data': [
        (train, 'RUN --channels 2', 'own/train.h5: 3 channels, the model has 2; train with --channels 3; or leave it '
         'out: --datasets swe_pdb\n'),
        (train, 'RUN --frames 8', 'swe_pdb/train.h5: 7 frames are too few for a model that takes 8; train with '
         '--frames 6 or fewer; or leave it out: --datasets own\n'),
        (train, 'RUN --frames 9',
         'own/train.h5: 9 frames are too few for a model that takes 9; train with --frames 8 or fewer\n'),
        (finetune, 'TUNE --dataset new --coefficients c', '--coefficients c'),
        (evaluate, 'SMALL --scoring paper --datasets own odd',
         'grid of odd, 12x12, does not divide the model grid, 16x16'),
        (evaluate, 'SMALL --scoring paper --datasets own fine', 'grid of fine, 32x32, does not divide the model grid'),
        (evaluate, '--checkpoint out/short --device cpu --rollout 5 --datasets steady', 'steady is steady'),
        (evaluate, 'AOT --datasets own deep', 'deep/test.h5: 3 dimensions of space, '),
        (interpret, 'AOT --probe --samples 1', 'one trajectory'),
        (interpret, 'AOT --probe --datasets own', 'two groups'),
        (interpret, 'AOT --unseen own', 'was trained on one of --unseen own'),
        (interpret, 'AOT --datasets new --unseen new', 'no other dataset is left'),
    ],
    'other networks': [
        (train, 'RUN --network FNO', "--network 'FNO' is neither aotpot nor MODULE:CLASS, as in baselines:FNO"),
        (train, 'RUN --network baselines:UNett',
         '--network baselines:UNett: there is no such baseline; did you mean UNet?'),
        (train, 'RUN --network absent:Net', '--network absent:Net: importing absent, from absent.py in'),
        (train, 'RUN --network mine.py:Net',
         'importing mine.py, from mine.py.py in the working directory or a package, ends in'),
        (train, 'RUN --network mine:Empty', '--network mine:Empty: it has no parameters to train'),
        (train, 'RUN --network mine:Nett', 'mine.py has no torch.nn.Module Nett'),
        (train, 'RUN --network os:system', 'os.py has no torch.nn.Module system'),
        (train, 'RUN --network baselines:UNet --residual plain',
         '--residual plain is for AOT-POT; the network baselines:UNet has no such thing'),
        (train, 'RUN --network baselines:UNet --experts 4', '--experts 4 is for AOT-POT'),
        (train, 'RUN --network baselines:UNet --size moe-tiny', '--experts 16 is for'),
        (train, 'RUN --network baselines:UNet --form paper',
         '--form paper is for AOT-POT; the network baselines:UNet has one form only'),
    ],
    'what shows when the network has been built': [
        (train, 'RUN --experts 5 --shared 1 --top_k 2 --batch_size 1', '--batch_size 1: '),
        (finetune, 'TUNE --dataset new --normalize', 'weights were trained without --normalize; give --no-normalize'),
        (predict, 'NEXT fine.npy --to fine.npy/out.h5', 'fine.npy/out.h5: cannot be written'),
    ],
}
BUILT = COMMANDS['what shows when the network has been built']


def write_frames(folder):
    """Files of frames for lab.predict, good and bad ones."""
    frames = np.ones((3, 8, 8, 2))
    for name in ('text.npy', 'text.h5', 'a.npz'):
        (folder / name).write_text('some text')
    np.savez(folder / 'npz', frames)
    (folder / 'npz.npz').rename(folder / 'npz.npy')
    np.save(folder / 'pickle.npy', np.array([{}]))
    np.save(folder / 'fine.npy', frames)
    np.save(folder / 'short.npy', frames[1:])
    np.save(folder / 'dates.npy', np.full(frames.shape, '2020-01-01', 'M8[D]'))
    np.save(folder / 'words.npy', np.full(frames.shape, 'a'))
    with h5py.File(folder / 'words.h5', 'w') as file:
        file['data'] = np.full(frames.shape, 'a', object)
    with h5py.File(folder / 'empty.h5', 'w') as file:
        file['data'] = h5py.Empty('f4')
    with h5py.File(folder / 'hole.h5', 'w') as file:
        file.create_dataset('data', frames.shape, 'float32', chunks=(1, 8, 8, 2))[:2] = 1
    with h5py.File(folder / 'two.h5', 'w') as file:
        file['a'] = file['b'] = frames
    with h5py.File(folder / 'static.h5', 'w') as file:
        file['data'] = frames
        file['data'].attrs['static'] = ['c']


def write_checkpoints(folder):
    """Networks that were trained on test sets in `folder` itself."""
    torch.manual_seed(0)
    small = small_model()
    save(small, folder, 'small/last.pt')
    save_three(small, folder)
    save(small, folder, 'far/last.pt', data='far', datasets=('new',))
    both = dict(datasets=('coarse', 'own'))
    for name, options in dict(
            one=dict(streams=1), ablated=dict(ablate='dT'), short=dict(frames=1), four=dict(frames=4),
            fine=dict(resolution=32), unet=dict(network='baselines:UNet', patch=2, width=32)).items():
        save(small_model(**options), folder, f'{name}/last.pt', **both)
    mappings = small.layers[0].aot2.mappings
    mappings.alpha_T.data.fill_(3e38)                                   # the logits of T overflow
    mappings.phi_T.data.fill_(1e9)
    save(small, folder, 'wild/last.pt', **both)


STUDIES = {         # what lies beside the only run of a study
    'cut/config.json': '{"model": {', 'foreign/config.json': '{"architecture": 1}',
    'cut_scores/evaluate.json': '{"models": ', 'foreign_scores/evaluate.json': '[1]',
    'no_scores/evaluate.json': '{"models": {"a": {}}}'}
MINE = """
import torch


class Empty(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
"""


@pytest.fixture(scope='module')
def start(tmp_path_factory, pretrained):
    """A folder with all that the commands above read: data, checkpoints, a run, files of frames, a network."""
    folder = tmp_path_factory.mktemp('refusals')
    write_two(folder / 'data')
    write_test_sets(folder)
    for name, values in dict(
            odd=travelling(1, 7, 12, 1, 0.7), fine=travelling(1, 7, 32, 1, 0.7), new=travelling(2, 7, 8, 1, 0.3),
            steady=travelling(2, 2, 8, 1, 0.3), deep=np.ones((1, 7, 8, 8, 8, 1))).items():
        write(folder, name, values, 'test')
    for split, N in (('train', 40), ('test', 4)):
        write(folder / 'tune', 'new', travelling(N, 6, 16, 2, 0.4), split)
        write(folder / 'checked', 'own', travelling(3, 6, 8, 1, 0.4), split)
    shutil.copytree(pretrained, folder / 'pre')
    write_frames(folder)
    write_checkpoints(folder)
    for name, text in STUDIES.items():
        out, name = name.split('/')
        run = folder / out / 'nano-4_steps/aot-seed_0'
        run.mkdir(parents=True)
        (run / name).write_text(text)
    (folder / 'file').write_text('of the user')
    (folder / 'closed').mkdir(mode=0o500)
    (folder / 'mine.py').write_text(MINE)
    return folder


@pytest.fixture
def here(start, monkeypatch):
    """The same as the working directory, from which a network can be imported."""
    monkeypatch.chdir(start)
    monkeypatch.setattr(sys, 'path', [f'{start}/.', *sys.path])         # before the project's folder and its mine.py
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    yield start
    sys.modules.pop('mine', None)


def contents(folder):
    """What a command may not change: the size and time of every file, and which folders there are."""
    found = {}
    for path in folder.rglob('*'):
        status = path.lstat()
        found[path] = path.is_file() and (status.st_size, status.st_mtime_ns)
    return found


def says(line, words):
    """Whether a line holds the words of a row."""
    return re.search('.*'.join(map(re.escape, words.split('...'))), line)


def rows(table):
    """The rows of a table as pytest takes them, each with a name."""
    named = []
    for group in table.values():
        for script, flags, words in group:
            name = flags if isinstance(flags, str) else words
            named.append(pytest.param(script, flags, words, id=f'{script.__name__}: {name}'))
    return named


@pytest.mark.parametrize('script, flags, words', rows(COMMANDS))
def test_a_command_refuses_in_one_line_and_changes_nothing(script, flags, words, here, request, call):
    if 'closed' in flags and os.access('closed', os.W_OK):
        pytest.skip('a user who may write everywhere')
    if 'FIELDS' in flags:
        request.getfixturevalue('plt')
    before = contents(here)
    given = [word for flag in shlex.split(flags) for word in ABBREVIATIONS.get(flag, [flag])]
    code, error, printed = call(given, script)
    assert code == 2 and says(error, words), error
    assert error.startswith('error: ') and error.count('\n') == 1, error
    said = [line for line in printed.splitlines() if ': step ' not in line]     # the name of a checkpoint that is read
    assert not said or (script, flags, words) in BUILT, said
    assert contents(here) == before


def started(environment):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        distributed.setup('cpu')


def forward(shape):
    fresh()(torch.zeros(shape))


def rollout(frames):
    evaluate.rollout(small_model(), frames, 1)


def rollout_with(options):
    evaluate.rollout(small_model(), **{'frames': torch.ones(3, 8, 8, 2), 'steps': 1, **options})


def rollout_of_channels(options):
    """With a network whose checkpoint knows the channels of five datasets."""
    options = dict(options)
    frames = np.ones((3, 8, 8, options.pop('C')))
    model = aotpot.load(save(small_model(), Path(), 'wave/last.pt', layouts=KINDS))
    evaluate.rollout(model, frames, 1, **options)


def loaded(change):
    """A checkpoint with a change of what is saved."""
    save(small_model(), Path(), 'small/last.pt')
    saved = torch.load('out/small/last.pt')
    change(saved)
    torch.save(saved, 'a.pt')
    aotpot.load('a.pt')


def loaded_with(options):
    """A checkpoint whose config of the network differs in `options`."""
    loaded(lambda saved: saved['config']['model'].update(options))


def loaded_file(text):
    Path('a.pt').write_text(text)
    aotpot.load('a.pt')


FIELDS = np.arange(3. * 8 * 4 * 6 * 2).reshape(3, 8, 4, 6, 2) / 64 + 1


def fields(row, value):
    """Fields with a value in one place."""
    u = FIELDS.copy()
    u[row, 5, 1, 1, 1] = value
    return u


def written(options):
    """A dataset of good arrays but for `options`, of which nothing may appear."""
    try:
        data.write('mine', **{'train': FIELDS, 'test': FIELDS[:2], **options})
    finally:
        assert not Path('mine').exists()


def opened(damage):
    """A training file in which something was damaged, by its path."""
    write(Path(), 'own', FIELDS, 'train', channels=['u', 'v'])
    damage(Path('own/train.h5'))
    data.Trajectories('.', 'own', 'train', 4, 4)


def edited(change, coefficients=()):
    """A training file in which something was changed, by its h5py.File."""
    write(Path(), 'own', FIELDS, 'train', channels=['u', 'v'])
    with h5py.File('own/train.h5', 'a') as file:
        change(file)
    data.Trajectories('.', 'own', 'train', 4, 4, coefficients)


def with_coefficient_u(change):
    edited(change, ['u'])


def with_coefficient_c(change):
    edited(change, ['c'])


def beside_a_test_file(attributes):
    write(Path(), 'own', FIELDS, 'train', channels=['u', 'v'])
    write(Path(), 'own', FIELDS, 'test', **attributes)
    data.Trajectories('.', 'own', 'test', 4, 4)


def of_shape(shape):
    data.write('mine', np.ones(shape), np.ones(shape))
    data.Trajectories('.', 'mine', 'train', 4, 4, dims=2)


def replaced(file, name, values):
    del file['data']
    file[name] = values


def partly_written(file):
    file.create_dataset('c', 3, 'f4', chunks=(1,))[1] = 1


UNWRITTEN = 'error: own/train.h5: a part of /c was never written'
NOT_FINITE = 'values that are masked, not finite in float32 or too small for it'
CALLS = {
    'choices': [
        (lambda form: nets.build.build(configs.model('nano'), form), 'quick', "neither 'fast' nor 'paper'"),
        (lambda residual: configs.model('tiny', residual=residual), 'none',
         "--residual 'none' is none of aot plain"),
    ],
    'devices and processes': [
        (distributed.choose_device, 'meta', 'error: --device meta: not available here'),
        (distributed.choose_device, 'gpu', 'error: --device gpu: not available here'),
        (distributed.choose_device, 'cuda:77', 'error: --device cuda:77: not available here'),
        (lambda processes: runs.at_once(16, processes), 7,
         '--batch_size 16 is not divisible by 7 processes'),
        (started, {'WORLD_SIZE': 'x'}, 'WORLD_SIZE=x: expected a whole number, as torchrun sets it'),
        (started, {'LOCAL_RANK': '-1'}, 'LOCAL_RANK=-1: expected a whole number'),
        (started, {'WORLD_SIZE': '2'}, 'WORLD_SIZE=2: ... expected...; start several processes with torchrun'),
        (lambda processes: predict.predict([small_model()], None, CPU._replace(world_size=processes), {}), 2,
         'one process writes'),
    ],
    'inputs of a network': [
        (forward, (1, 4, 16, 16, 2), '3, H, W, 2'),
        (forward, (1, 3, 16, 16, 5), '3, H, W, 2'),
        (forward, (3, 16, 16, 2), '3, H, W, 2'),
        (forward, (1, 3, 18, 16, 2), '18x16'),
        (forward, (1, 3, 16, 18, 2), '16x18'),
    ],
    'frames of a rollout': [
        (rollout, np.ones((2, 8, 8, 2)), 'frames: 2 frames; this model needs 3 to predict'),
        (rollout, np.ones((3, 8, 8, 5)), '(3, 8, 8, 5); ... where C is at most 4'),
        (rollout, torch.ones(3, 8, 8), 'frames: the shape (3, 8, 8); this model takes (N, 3, H, W, C), or'),
        (rollout, np.ones((1, 3, 8, 8, 8, 2)), 'frames: the shape (1, 3, 8, 8, 8, 2)'),
        (rollout, np.ones((0, 3, 8, 8, 2)), 'frames: the shape (0, 3, 8, 8, 2)'),
        (rollout, np.full((3, 8, 8, 1), np.nan), 'frames: non-finite values in the last frames'),
        (rollout, np.ma.masked_less(np.arange(192.).reshape(3, 8, 8, 1), 191),
         'frames: masked values in the last frames'),
        (rollout, np.ones((3, 8, 8, 1), complex), 'frames: complex128; expected real numbers'),
        (rollout, np.full((3, 8, 8, 1), 'a'), 'frames: <U1; expected real numbers'),
        (rollout, np.full((3, 8, 8, 1), '2020-01-01', 'M8[D]'), 'frames: datetime64[D]; expected real numbers'),
        (rollout, np.full((3, 8, 8, 1), 'a', object), 'frames: object; expected real numbers'),
    ],
    'options of a rollout': [
        (rollout_with, {'frames': np.full((3, 8, 8, 1), 1e300), 'name': 'a.npy'}, 'a.npy: non-finite values'),
        (rollout_with, {'static': [2]}, 'frames: static channels [2]; its channels are 0 to 1'),
        (rollout_with, {'static': (.5,)}, 'frames: static channels [0.5]; its channels are 0 to 1'),
        (rollout_with, {'static': [1, 0]}, 'static channels [1, 0]; one of its 2 channels must evolve'),
        (rollout_with, {'static': [True, True]}, 'static channels [0, 1]; one of its 2 channels must evolve'),
        (rollout_with, {'static': [False, True, True]}, '[False, True, True]; its channels ... or a boolean'),
        (rollout_with, {'dtype': 'bfloat16'}, '--dtype bfloat16: expected fp32 or bf16'),
        (rollout_with, {'dataset': 'own'}, 'frames: the checkpoint has no layout of the dataset own\n'),
        (rollout_with, {'steps': [0, 3]}, '--steps 0 must be at least 1'),
        (rollout_with, {'steps': []}, '--steps 0 must be at least 1'),
        (rollout_with, {'steps': 0}, '--steps 0 must be at least 1'),
        (rollout_of_channels, {'C': 3},
         'frames: the training read 3 channels in several ways; name a dataset with dataset= or --dataset (wave: u u_t '
         'c (c / 1000 static); same: ...; mask: u u_t c (c static); smoke: u vx vy)\n'),
        (rollout_of_channels, {'C': 2},
         'frames: 2 channels; give all channels of a dataset of the training (wave: u u_t c ...; flow: w)\n'),
        (rollout_of_channels, {'C': 3, 'dataset': 'flow'},
         'frames: 3 channels; give all channels of a dataset of the training (flow: w)\n'),
        (rollout_of_channels, {'C': 3, 'dataset': 'wav'},
         'frames: the checkpoint has no layout of the dataset wav; did you mean wave?\n'),
        (rollout_of_channels, {'C': 3, 'dataset': 'wave', 'static': [0, 1]},
         'static channels [0, 1]; one of its 3 channels must evolve'),
    ],
    'checkpoints': [
        (aotpot.load, 'none.pt', 'error: none.pt: there is no such checkpoint'),
        (loaded_file, '<html>', 'error: a.pt: damaged, or more than tensors and plain types'),
        (loaded, lambda saved: [saved.clear(), saved.update(weights=torch.zeros(3))], 'error: a.pt: neither a'),
        (loaded, lambda saved: saved.update(code=print), 'error: a.pt: damaged, or more than tensors and plain types'),
        (loaded, lambda saved: saved.update(step=-1), "error: a.pt: ...'step' is negative"),
        (loaded, lambda saved: saved['model'].pop('gate'), 'error: a.pt: the tensor gate is missing'),
        (loaded, lambda saved: saved['model'].update(gate=[1.]), "error: a.pt: ...'model' holds more than tensors"),
        (loaded, lambda saved: saved['config'].update(model=None), 'error: a.pt: neither a checkpoint of train.py'),
        (loaded, lambda saved: saved['config'].update(train={'lr': float('nan')}),
         'error: a.pt: ...--lr nan must be a finite number'),
        (loaded, lambda saved: saved.update(layouts={'own': dict(static=['c'])}),
         "error: a.pt: ...KeyError('channels')"),
        (loaded, lambda saved: saved.update(layouts={'own': dict(channels=['u', 'c'], static=['c'], scale=[-1])}),
         'error: a.pt: ...the layout of own: scale [-1]: expected a list with one positive number'),
        (loaded_with, {'depth': 3}, 'error: a.pt: the tensor layers.1.norm1.weight is missing'),
        (loaded_with, {'depth': 10 ** 7}, 'error: a.pt: ...--depth 10000000 must be at most 256'),
        (loaded_with, {'width': 64},
         'error: a.pt: the tensor embed.position is missing or not of the shape (64, 4, 4)'),
        (loaded_with, {'width': '16'}, "error: a.pt: ...--width '16' is not of the type int"),
        (loaded_with, {'resolution': None}, 'error: a.pt: ...resolution None is not a grid'),
        (loaded_with, {'network': 'baselines:os'}, 'there is no such baseline'),
        (loaded_with, {'network': 'baselines:ChannelsFirst'}, 'no such baseline'),
        (loaded_with, {'network': 'baselines.os:system'}, 'its network is baselines.os:system'),
        (loaded_with, {'network': 'os.system'}, 'neither aotpot'),
        (loaded_with, {'network': 'baselines:a:b'}, 'neither aotpot'),
    ],
    'arrays': [
        (written, {'train': FIELDS[..., 0]}, "train.h5: 'data' is float32 (3, 8, 4, 6); expected floating-point"),
        (written, {'train': None}, "train.h5: 'data' is object (); expected floating-point"),
        (written, {'train': FIELDS.astype('U3')}, "train.h5: 'data' is <U3 ...expected floating-point"),
        (written, {'test': FIELDS.astype(complex)}, "test.h5: 'data' is complex128 (...expected floating-point"),
        (written, {'train': fields(2, np.nan)}, f'train.h5: trajectory 2: {NOT_FINITE}'),
        (written, {'test': fields(1, 1e300)}, f'test.h5: trajectory 1: {NOT_FINITE}'),
        (written, {'test': np.ma.masked_less(FIELDS, 2)}, f'test.h5: trajectory 0: {NOT_FINITE}'),
        (written, {'test': 1e-60 * FIELDS}, f'test.h5: trajectory 0: {NOT_FINITE}'),
        (written, {'static': ['1'], 'scale': [1e-60]}, 'scale [1e-60]: expected'),
        (written, {'statics': ['1']}, "mine/train.h5: there is no attribute 'statics'; did you mean static?"),
    ],
    'files of data': [
        (opened, lambda path: path.unlink(), 'own/train.h5: ...No such file'),
        (opened, lambda path: path.write_bytes(b'<html></html>'), 'own/train.h5: ...file signature not found'),
        (opened, lambda path: path.write_bytes(path.read_bytes()[:-100]), 'own/train.h5: ...truncated file'),
        (edited, lambda file: file.move('data', 'fields'),
         "own/train.h5: cannot be read ...object 'data' doesn't exist"),
        (edited, lambda file: replaced(file, 'data/fields', FIELDS), "own/train.h5: 'data' is a group"),
        (edited, lambda file: replaced(file, 'data', FIELDS.astype(int)), 'own/train.h5: ...expected floating-point'),
        (edited, lambda file: replaced(file, 'data', np.ones((2, 8, 4, 4, 5))),
         'own/train.h5: 5 channels, the model has 4; train with --channels 5'),
        (edited, lambda file: file['data'].attrs.create('channels', np.array([b'\xff\xfe', b'v'])),
         'own/train.h5: channels ...udcff... different names'),
        (edited, lambda file: file['data'].attrs.create('channels', b'\xff', dtype=h5py.string_dtype()),
         'own/train.h5: channels ...udcff... different names'),
        (with_coefficient_u, lambda file: file.create_dataset('u', data=np.ones(3)),
         'error: own/train.h5: --coefficients u: a channel has this name already'),
        (with_coefficient_c, lambda file: file.create_dataset('c', 3, 'f4'), UNWRITTEN),
        (with_coefficient_c, partly_written, UNWRITTEN),
        (beside_a_test_file, {'channels': ['v', 'u']}, 'has a grid of 4x6 and 2 channels v u... they must be'),
        (beside_a_test_file, {'channels': ['u', 'v'], 'static': ['v']},
         'has a grid of 4x6 and 2 channels u v... they must be'),
        (of_shape, (2, 8, 4, 4, 4, 1), 'mine/train.h5: 3 dimensions of space, the model has 2; train with --dims 3, '
         'and name datasets of this kind'),
        (of_shape, (2, 2, 4, 4, 1),
         'mine/train.h5: 2 frames are too few for a model that takes 4; train with --frames 1 or fewer'),
    ],
}


@pytest.mark.parametrize('function, argument, words', rows(CALLS))
def test_a_function_refuses_in_one_line(function, argument, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(configs.InputError) as error:
        function(argument)
    line = f'error: {error.value}\n'
    assert says(line, words) and line.count('\n') == 1, line
    line.encode()
