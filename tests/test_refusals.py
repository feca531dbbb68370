"""What a user may do wrong: a line says it, the exit code is 2, and no file is new or has changed.

The rows of `COMMANDS` are (script, flags, words of the line), those of `CALLS` (function, argument,
words of the error); `...` stands for any text, and of the flags words in capitals for those of
`ABBREVIATIONS`. A refusal that needs more than a simple start is tested beside its module.
"""
import os
import pickle
import re
import shlex
import shutil
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
import train
from helpers import fresh, save, small_model, travelling, write, write_test_sets, write_two
from lab import bench, interpret, reproduce
from sources import generate, prepare

ABBREVIATIONS = {
    'RUN': [*helpers.TINY, '--data', 'data', '--steps', '2', '--out', 'target'],
    'TUNE': ['--checkpoint', 'pre/last.pt', '--data', 'tune', '--out', 'target'],
    'SMALL': ['--checkpoint', 'out/small', '--device', 'cpu'],
    'AOT': ['--checkpoint', 'out/aot', '--device', 'cpu'],
}
COMMANDS = [
    # flags
    (train, '--dept 3', 'unrecognized arguments: --dept 3; did you mean --depth?'),
    (train, '--size=tinny', "unknown size 'tinny'; did you mean tiny?"),
    (train, '--lr=nan', '--lr nan must be at least 0'),
    (train, f'--steps 1{"0" * 400}', 'must be at most 1000000000'),
    (train, '--width=100', '--width 100 is not divisible by 8, the number of groups'),
    (train, '--epochs 3 --steps 4', '--steps and --epochs'),
    (train, '--sampling=a', '--sampling a: expected a dataset and a number'),
    (train, 'RUN --sampling ownn=50', '--sampling ownn'),
    (train, 'RUN --init_from pre --change', 'pre/last.pt: these weights were trained with --no-change'),
    (train, 'RUN --device cuda:77', '--device cuda:77: not available'),
    (train, 'RUN --experts 4 --accumulate 2', '--experts: the BatchNorm in the router needs'),
    (train, 'RUN --batch_size 3 --accumulate 2', '--batch_size 3 is not divisible by 1 processes x'),
    (train, 'RUN --residual plain --streams 8', '--streams 8: the network plain has no such'),
    (finetune, '--data tune --out target', '--checkpoint'),
    (finetune, 'TUNE --dataset new --samples 41', '--samples 41: the training split has only 40'),
    *((script, f'SMALL --json {path}', f'{path}: this file is there; choose another name')
      for script, path in ((evaluate, 'out/small/last.pt'), (interpret, 'report.json'))),
    (reproduce, 'main --rows UNnet --data data', "--rows 'UNnet'"),
    (reproduce, "main --data data --recipe '\"'", '--recipe ": not words of a shell'),
    (reproduce, "contrasts --data data --recipe '--lr -1'", '--lr -1.0 must be at least 0'),
    *((evaluate, f'SMALL --checkpoint none --json {path}.json', words) for path, words in (
        ('file/a', 'a.json: cannot be written'), ('closed/new/a', 'closed'), ('a' * 300, 'long'))),
    (bench, 'step --size nano --experts 4 --batch_size 1', '--batch_size 1 must be at least 2'),
    (bench, 'step --size nano --peer no/such', '--peer no/such: ...cannot be imported'),
    (generate, '--data target swe', 'did you mean swe_pdb?'),
    (generate, '--data target swe_pdb --resolution 1000000000000000000', 'must be at most'),
    (generate, '--data target ns2d_pda --resolution 96', '--resolution 96: expected a divisor of 128, the grid'),
    (generate, '--data target dr_pdb cno_darcy --frames 20', 'cno_darcy: --frames 20 must be at most 2'),
    (prepare, '--data target swe_pdb', '--source'),
    # grids
    (train, '--resolution=8x8x8x8', "'8x8x8x8' is not a grid, such as 128, 96x192 or 64x64x64"),
    (evaluate, 'SMALL --resolution 30', '--resolution 30x30 is not divisible by patch 4'),
    (evaluate, 'SMALL --resolution 8x8x8', '--resolution 8x8x8: ...small/last.pt takes grids of 2 dimensions'),
    (train, 'RUN --network UNet --overlap', '--overlap: the network UNet has no such thing; leave it out'),
    (train, 'RUN --device hpu', '--device hpu: not available'),
    # data
    (train, 'RUN --datasets swe_pbd', '--datasets swe_pbd: no '),
    (train, 'RUN --channels 2', 'own/train.h5: ...3 channels do not fit ...--channels 3'),
    (train, 'RUN --frames 8', 'swe_pdb/train.h5: 7 frames, ...do not fit ...--frames 6'),
    (finetune, 'TUNE --dataset newer', '/newer/train.h5; did you mean new?'),
    (evaluate, 'SMALL --data none', '--data none: the folder holds no'),
    (evaluate, 'AOT --datasets own deep', 'deep/test.h5: 7 frames, 3-D, '),
    (interpret, 'AOT --unseen nosuch', '--unseen nosuch: no '),
    (interpret, 'AOT --unseen own', 'was trained on one of --unseen own'),
    (prepare, '--data target ns2d_pda --source out', 'files *.h5'),
    # folders and runs
    (train, 'RUN --out file', 'file'),
    (finetune, 'TUNE --dataset new --out pre', '--out pre'),
    (generate, 'swe_pdb --data file', 'file'),
    (finetune, 'TUNE --dataset new --out pre --resume', 'resume'),
    (train, 'RUN --out weights --resume', '--out weights: the folder holds last.pt; continue'),
    # checkpoints
    (evaluate, '--checkpoint pickle.pt', 'pickle.pt: damaged, or no checkpoint of train.py'),
    (train, 'RUN --init_from none.pt', 'none.pt: there is no such checkpoint'),
    (evaluate, '--checkpoint /dev/zero', '/dev/zero: there is no such checkpoint'),
    (train, 'RUN --init_from out/unet', 'out/unet/last.pt: the weights of --network UNet'),
    (interpret, 'AOT --checkpoint out/plain --gains', 'no T to look at'),
    (interpret, 'AOT --checkpoint out/wild', 'T is not finite on coarse'),
]


@pytest.fixture(scope='module')
def start(tmp_path_factory, pretrained):
    """A folder with all that the commands above read: data, checkpoints, a run."""
    folder = tmp_path_factory.mktemp('refusals')
    write_two(folder / 'data')
    write_test_sets(folder)
    write(folder, 'deep', np.ones((1, 7, 8, 8, 8, 1)), 'test')
    for split, N in (('train', 40), ('test', 4)):
        write(folder / 'tune', 'new', travelling(N, 6, 16, 2, 0.4), split)
    shutil.copytree(pretrained, folder / 'pre')

    torch.manual_seed(0)
    small = small_model()
    save(small, folder, 'small/last.pt')
    save(small, folder, 'aot/last.pt', datasets=('coarse', 'own'))
    save(small_model(residual='plain'), folder, 'plain/last.pt', datasets=('own',))
    mappings = small.layers[0].aot2.mappings
    mappings.alpha_T.data.fill_(3e38)                                   # the logits of T overflow
    mappings.phi_T.data.fill_(1e9)
    save(small, folder, 'wild/last.pt', datasets=('coarse', 'own'))
    save(small_model(network='UNet'), folder, 'unet/last.pt')
    (folder / 'weights').mkdir()
    shutil.copy(folder / 'out/small/last.pt', folder / 'weights')
    (folder / 'file').write_text('of the user')
    (folder / 'report.json').write_text('{"models": {"small": {"checkpoint": "another"}}}')
    (folder / 'pickle.pt').write_bytes(pickle.dumps({'model': {}}))
    (folder / 'closed').mkdir(mode=0o500)
    return folder


def contents(folder):
    """What a command may not change: size and time of all files but of locks, which stay empty."""
    found = {}
    for path in folder.rglob('*'):
        status = path.lstat()
        if path.is_file() and (path.name != 'lock' or status.st_size):
            found[path] = status.st_size, status.st_mtime_ns
    return found


def says(line, words):
    """Whether a line holds the words of a row."""
    return re.search('.*'.join(map(re.escape, words.split('...'))), line)


def name_of(value):
    return getattr(value, '__name__', value if isinstance(value, str) else '')


@pytest.mark.parametrize('script, flags, words', COMMANDS, ids=name_of)
def test_a_refusal_is_one_line_and_changes_nothing(script, flags, words, start, monkeypatch, call):
    monkeypatch.chdir(start)
    if 'closed' in flags and os.access('closed', os.W_OK):
        pytest.skip('a user who may write everywhere')
    before = contents(start)
    given = [word for flag in shlex.split(flags) for word in ABBREVIATIONS.get(flag, [flag])]
    code, error, _ = call(given, script)
    assert code == 2 and says(error, words), error
    assert error.startswith('error: ') and error.count('\n') == 1, error
    assert contents(start) == before and not Path('target').exists()


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
        assert not [*Path().glob('mine/*.h5')]


def filled(values):
    with data.writer(Path('mine/train.h5'), values.shape) as file:
        file['data'][:] = values


def opened(damage):
    """A training file in which something was damaged, by its path."""
    write(Path(), 'own', FIELDS, 'train', channels=['u', 'v'])
    damage(Path('own/train.h5'))
    data.Trajectories('.', 'own', 'train', 4, 4)


def beside_a_test_file(attributes, u=FIELDS, **train):
    write(Path(), 'own', FIELDS, 'train', channels=['u', 'v'], dt=0.1, **train)
    write(Path(), 'own', u, 'test', **attributes)
    data.Trajectories('.', 'own', 'test', 4, 4)


def beside_values(u):
    beside_a_test_file({}, u)


def loaded(change):
    """A checkpoint with a change of what is saved."""
    save(small_model(), Path(), 'small/last.pt')
    saved = torch.load('out/small/last.pt')
    change(saved)
    torch.save(saved, 'a.pt')
    evaluate.load('a.pt')


def rollout(frames):
    evaluate.rollout(small_model(), frames, 1)


def l2re(target):
    evaluate.l2re(np.ones((3, 8, 8, 1)), target)


CALLS = [
    # processes
    (lambda count: [*data.numbers_of_rank(range(1), 16, 0, count)], 7,
     '--batch_size 16 is not divisible by 7 processes'),
    # inputs of a network
    (lambda shape: fresh()(torch.zeros(shape)), (1, 3, 18, 16, 2), '18x16'),
    (lambda size: aotpot.AOTPOT(configs.model(size)), 'moe-tiny', 'experts 16: AOTPOT needs'),
    # frames of a rollout
    (rollout, np.ones((2, 8, 8, 2)), 'the shape (2, 8, 8, 2); ...T is at least 3'),
    (rollout, np.ones((3, 8, 8, 5)), '(3, 8, 8, 5); ...C is at most 4'),
    *((rollout, np.full((3, 8, 8, 1), value), 'frames: non-finite values')
      for value in (np.nan, np.inf, 1e300)),
    *((rollout, np.full((3, 8, 8, 1), value), 'frames: values of the type') for value in (
        1j, '2', None, np.datetime64('2020-01-01'))),
    (rollout, np.ma.masked_equal(np.arange(192).reshape(3, 8, 8, 1), 7), 'frames: masked values'),
    # values to compare
    (l2re, np.ones((3, 8, 8, 2)), 'the prediction has the shape (3, 8, 8, 1)'),
    (l2re, np.ma.masked_less(np.ones((3, 8, 8, 1)), 2), 'the target: masked values'),
    (l2re, [np.ma.masked_less(np.ones((8, 8, 1)), 2)] * 3, 'the target: masked values'),
    (l2re, np.ones((3, 8, 8, 1)) * 1j, 'the target: values of the type complex128'),
    # checkpoints
    (loaded, lambda saved: saved.update(code=print), 'error: a.pt: damaged, or no checkpoint'),
    (loaded, lambda saved: saved.pop('model'), "a.pt: damaged, or no checkpoint ...('model')"),
    (loaded, lambda saved: saved['model'].update(gate=1), 'error: a.pt: damaged, or no checkpoint'),
    (loaded, lambda saved: saved['model']['gate'].fill_(np.nan), 'a.pt: ...the weights gate are'),
    (loaded, lambda saved: saved['config']['model'].update(width=64), 'error: a.pt: not '
     'the weights of this network ...size mismatch for embed.position'),
    (loaded, lambda saved: saved['config']['model'].update(network='os:system'), 'os:system'),
    # arrays
    (written, {'test': FIELDS * 1j}, "test.h5: 'data' is complex128 ...; expected real numbers"),
    (written, {'train': fields(2, np.nan)}, 'trajectory 2, frame 5, channel 1, point (1, 1): nan'),
    (written, {'test': fields(1, 1e300)}, 'test.h5: trajectory 1, frame 5, channel 1, ...inf'),
    (written, {'test': np.ma.masked_less(FIELDS, 2)}, 'test.h5: trajectory 0: masked values'),
    *((written, {'train': np.ones(shape), 'test': np.ones(shape)}, 'np.moveaxis(u, 2, -1) ...None]')
      for shape in ((4, 3, 9, 10), (4, 3, 2, 9, 10), (4, 3, 1, 40, 17))),
    *((written, {'test': u, 'channels': ['p', 'v']}, 'channel p: ..., of which float32 loses 100')
      for u in (1e-50 * FIELDS, 101325 + 1e-5 * FIELDS)),
    (written, {'channels': {'u', 'v'}}, 'names in a set have no order'),
    (written, {'test': [[1, 2], [3]]}, 'mine: expected arrays of real numbers (setting an array'),
    (written, {'test': torch.ones(1, requires_grad=True)}, 'mine: expected arrays of real numbers ('),
    (filled, FIELDS * 1j, 'mine/train.h5: complex128, or masked values; expected real numbers'),
    (filled, np.ma.masked_less(FIELDS, 2), 'mine/train.h5: float64, or masked values; expected'),
    (written, {'statics': ['1']}, "there is no attribute 'statics'; did you mean static?"),
    # files of data
    (opened, lambda path: path.write_bytes(path.read_bytes()[:-100]), 'train.h5: ...truncated'),
    (opened, lambda path: h5py.File(path, 'a').move('data', 'fields'), "train.h5: ...'data' does"),
    (opened, lambda path: h5py.File(path, 'w').create_group('data'), "train.h5: 'data' is a group"),
    (beside_values, FIELDS[:, :, :, :5], 'test.h5 has the grid and channels [4, 5, 2], but train.h5'),
    (lambda names: beside_a_test_file({}, static=names), ['v'], 'test.h5 has the static [], but train.h5'),
    (beside_values, FIELDS[:0], 'test.h5: ...(0, 8, 4, 6, 2); expected real numbers of shape'),
    (beside_values, FIELDS[:, :1], 'with at least two frames'),
    (beside_a_test_file, {'channels': ['u']}, "channels ['u']: expected 2 different names"),
    (beside_a_test_file, {'static': ['w']}, "static ['w']: expected names of channels"),
    (beside_a_test_file, {'t_test': 0}, 't_test 0...: expected at least 1 frame'),
    (beside_a_test_file, {'dt': np.nan}, 'dt nan: expected a positive number'),
    (beside_a_test_file, {'dt': 'abc'}, 'own/test.h5: dt abc: expected a positive number'),
    (beside_a_test_file, {'channels': ['v', 'u']}, 'has the channels v u, but train.h5 has u v'),
]


@pytest.mark.parametrize('function, argument, words', CALLS, ids=name_of)
def test_a_function_refuses_in_one_line(function, argument, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(configs.InputError) as error:
        function(argument)
    line = f'error: {error.value}\n'
    assert says(line, words) and line.count('\n') == 1, line
