"""What files say is compared with what a network was trained on; a forecast from file to file."""
from argparse import Namespace

import h5py
import numpy as np
import pytest
import torch

import data
import evaluate
import finetune
from helpers import KINDS, command, save, small_model, travelling, write
from sources import prepare

SOLVER = 'generate.py seed 0 grid 64 version 2'
WAVE = {**KINDS['wave'], 'dt': 0.3}


@pytest.fixture
def trained(tmp_path):
    """trained(**attributes) is a checkpoint of a network that was trained on `wave`."""
    def checkpoint(name='wave', **attributes):
        layouts = {name: {**WAVE, 'source': SOLVER, **attributes}}
        return save(small_model(), tmp_path, 'run/last.pt', layouts=layouts, datasets=(name,))
    return checkpoint


@pytest.mark.parametrize('name, attributes, expected, words', [
    ('wave', {**WAVE, 'channels': ('p', 'q', 'c')}, 2, 'wave/test.h5 has the channels p q c, but '),
    ('wave', {**WAVE, 'static': ()}, 2, 'wave/test.h5 has the static none, but '),
    ('wave', {**WAVE, 'dt': 0.1}, 2, 'wave/test.h5 has the dt 0.1, but '),
    ('wave', {**WAVE, 'source': 'Poseidon'}, 0, 'wave/test.h5 has the source Poseidon, but'),
    ('wave', {**WAVE, 'source': SOLVER.replace('2', '3')}, 0, 'wave/test.h5 has the source '),
    ('wave', {**WAVE, 'source': SOLVER.replace('0 grid 64', '7 grid 32')}, 0, ''),
    ('wave', WAVE, 0, ''), ('wave', {**WAVE, 'dt': 0.3 + 1e-9}, 0, ''),
    ('new', dict(dt=0.1), 0, 'new/test.h5 has the dt 0.1, but '),
    ('new', dict(channels=('u_t', 'u', 'c')), 2, 'new/test.h5: channels u_t u c; '),
    ('new', dict(channels=('c', 'u', 'u_t')), 2, ' took them in the order u u_t c\n'), ('new', WAVE, 0, ''),
    ('new', dict(channels=('q', 'u', 'c')), 0, 'new/test.h5: channels q u c; '),
    ('new', dict(channels=('u', 'u_t', 'c')), 0, 'new/test.h5: c evolves; in '),
    ('new', dict(channels=('p', 'q', 'r')), 0, '')])
def test_data_unlike_those_of_the_training_are_refused_or_scored_with_a_line(
        trained, tmp_path, call, name, attributes, expected, words):
    values = travelling(3, 8, 16, 3, 0.4)
    values[..., 2] = values[:, :1, ..., 2]
    write(tmp_path, name, values, 'test', **attributes)
    path = trained()
    flags = ['--checkpoint', path, '--device', 'cpu', '--datasets', name]
    code, error, _ = call(flags, evaluate)
    assert code == expected and words in error, error
    assert (f'the training of {path}' in error) == bool(words), error


def test_a_longer_reference_of_ours_is_not_put_beside_other_data(trained, tmp_path, refused):
    name = evaluate.LONG
    attributes = dict(channels=('w',), dt=1.0, source='FNO, ns_V1e-3.mat')
    write(tmp_path, name, travelling(3, 8, 16, 1, 0.4), 'test', **attributes)
    path = trained(name, static=(), **attributes)
    flags = ['--checkpoint', path, '--device', 'cpu', '--rollout', 20]
    words = 'has the source FNO, ns_V1e-3.mat, but our solver has generate.py'
    error, _ = refused(flags, words, evaluate, lines=None)
    assert 'try --rollout 5' in error and not [*tmp_path.glob('*/rollout*')]
    write(tmp_path, name, travelling(3, 8, 16, 1, 0.4), 'test', **{**attributes, 'source': ''})
    refused(flags, 'no solver of ours makes longer ones; try --rollout 5', evaluate, lines=None)
    assert not [*tmp_path.glob('*/rollout*')]


def test_data_without_a_training_get_the_numbers_of_their_own_training_file(tmp_path, capsys):
    path = save(small_model(normalize=True), tmp_path, 'a/last.pt', layouts=KINDS)
    u = travelling(3, 7, 16, 1, 0.4)
    write(tmp_path, 'new', u + 100, 'train', channels=['h'])
    write(tmp_path, 'new', u, 'test', channels=['h'])
    trained = Namespace(model=evaluate.load(path), path=path)
    units = evaluate.open_dataset(trained, tmp_path, 'new').units
    assert torch.all((units.mean - 100).abs() < 2)
    assert f'{tmp_path}/new/train.h5' in capsys.readouterr().err


@pytest.mark.parametrize('layout', [{}, dict(layout='NTXYC', variables=['data'])])
def test_fine_tuning_keeps_the_units_of_the_training_and_says_what_differs(tmp_path, call, layout):
    """Files of one's own, which have a layout, often have the names of others."""
    def write_own(folder, scale, name='own', **attributes):
        for split in 'train', 'test':
            u = scale * travelling(4, 8, 16, 1, 0.4)
            write(tmp_path / folder, name, u, split, **attributes, **layout)
    write_own('data', 1, source=SOLVER, dt=0.1)
    run = tmp_path / 'run'
    assert call(command(tmp_path / 'data', run, '--normalize', steps=1)[1:])[0] == 0
    before = evaluate.load(run).data['own']['train']['units']
    flags = ['--checkpoint', run, '--dataset', 'own', '--steps', 1, '--device', 'cpu']
    for folder, source, dt, what in (
            ('same', SOLVER, 0.1, ''), ('silent', '', 0.1, ''),
            ('another', 'another solver', 0.1, 'source'), ('slower', SOLVER, 0.3, 'dt')):
        write_own(folder, 3, source=source, dt=dt)
        tuned = tmp_path / f'tuned-{folder}'
        code, error, _ = call([*flags, '--data', tmp_path / folder, '--out', tuned], finetune)
        assert code == 0 and ('but the training of ' in error) == bool(what), error
        assert not what or f'own/train.h5 has the {what} ' in error
        kept = evaluate.load(tuned).data['own']['train']['units'] == before
        assert kept == (folder == 'same' and not layout), folder
    write_own('data', 1, 'new', dt=0.5)
    flags = ['--checkpoint', run, '--dataset', 'new', '--steps', 1, '--device', 'cpu']
    code, error, _ = call([*flags, '--data', tmp_path / 'data', '--out', tmp_path / 'tuned'], finetune)
    assert code == 0 and 'new/train.h5 has the dt 0.5, but the training of ' in error


def test_frames_of_other_proportions_or_another_size_are_a_line(trained, tmp_path, capsys):
    units = data.Units(torch.tensor(2 * [[0., 0, 3]]), torch.ones(2, 3), torch.zeros(3)).header()
    model = evaluate.load(trained(shape=[9, 9, 16, 16, 3], units=units))
    for grid, offset, words in (
            ((16, 16), 0, ''), ((8, 8), 0, ''),
            ((16, 12), 0, 'the grid 16x12 has other proportions'),
            ((16, 16), 40, 'u has the mean 40 and the deviation 0, and in the training 0 and 1')):
        evaluate.rollout(model, np.zeros((2, 3, *grid, 3)) + [offset, 0, 3], 2, 'wave')
        said = capsys.readouterr().err
        assert words in said and bool(said) == bool(words)
    in_cm = 100 * np.random.default_rng(0).standard_normal((2, 9, 16, 16, 3)) * [1, 0, 0] + [0, 0, 3]
    evaluate.rollout(model, in_cm, 2, 'wave')
    assert ' the deviation 99, and in the training 0 and 1\n' in capsys.readouterr().err
    write(tmp_path, 'wave', in_cm, 'test', **WAVE)
    evaluate.open_dataset(Namespace(model=model, path='x'), tmp_path, 'wave')
    assert f'{tmp_path}/wave/test.h5: u has the mean' in capsys.readouterr().err
    model.data['wave']['train']['units']['own'] = [1, 1, 1]
    evaluate.rollout(model, np.zeros((2, 3, 16, 16, 3)) + [40, 0, 3], 2, 'wave')
    assert not capsys.readouterr().err, 'windows with units of their own may lie anywhere'


def test_a_forecast_keeps_gaps_and_dt_of_its_file_and_refuses_another_order_of_channels(tmp_path, call, refused):
    u = travelling(8, 10, 16, 2, 0.4)
    u[:, :, 3, 4] = np.nan
    for i, run in enumerate(u):
        np.savez(tmp_path / f'run{i}.npz', u=run[..., 0], v=run[..., 1])
    flags = ['mine', '--source', *tmp_path.glob('run*'), '--layout', 'TXY', '--variables', 'u', 'v']
    assert call([*flags, '--data', tmp_path / 'data'], prepare)[0] == 0
    model, new, written = tmp_path / 'run', tmp_path / 'new.npz', tmp_path / 'next.h5'
    assert call(command(tmp_path / 'data', model, '--normalize', steps=2)[1:])[0] == 0
    np.savez(new, u=u[0, ..., 0], v=u[0, ..., 1], dt=0.5)
    flags = ['--checkpoint', model, '--rollout', 2, '--device', 'cpu']
    assert call([*flags, '--frames', new, '--write', written], evaluate)[0] == 0
    with h5py.File(written) as file:
        np.testing.assert_array_equal(np.argwhere(np.isnan(file['v'])), [[0, 3, 4], [1, 3, 4]])
        np.testing.assert_array_equal(file['time'], [0.5, 1])
    for name in 'uv', 'vu':
        data.write(tmp_path / name, np.nan_to_num(u), np.nan_to_num(u[:2]), channels=[*name])
    flags = ['own', '--source', tmp_path / 'uv/train.h5', '--layout', 'NTXYC', '--data', tmp_path / 'own']
    assert call(flags, prepare)[0] == 0
    assert call(command(tmp_path / 'own', tmp_path / 'named', '--normalize', steps=2)[1:])[0] == 0
    flags = ['--checkpoint', tmp_path / 'named', '--rollout', 2, '--device', 'cpu', '--write', tmp_path / 'own.h5']
    refused([*flags, '--frames', tmp_path / 'vu/test.h5'], 'the order of channels in data is v u, in the ', evaluate)
    assert call([*flags, '--frames', tmp_path / 'uv/test.h5'], evaluate)[0] == 0


def test_a_forecast_goes_from_a_file_into_a_file_and_a_picture(tmp_path, call, refused):
    runs = travelling(9, 10, 16, 1, 0.4)[..., 0]
    (tmp_path / 'runs').mkdir()
    for i, run in enumerate(runs[:8]):
        np.save(tmp_path / f'runs/run{i}.npy', run)
    new, written = tmp_path / 'new.npy', tmp_path / 'next.npy'
    np.save(new, runs[8])
    flags = ['mine', '--source', tmp_path / 'runs', '--layout', 'TXY', '--data', tmp_path / 'data']
    assert call([*flags, '--dt', 0.1], prepare)[0] == 0
    model = tmp_path / 'run'
    assert call(command(tmp_path / 'data', model, '--normalize', steps=2)[1:])[0] == 0
    flags = ['--checkpoint', model, '--frames', new, '--rollout', 4, '--device', 'cpu']
    code, error, printed = call([*flags, '--write', written], evaluate)
    assert code == 0 and f'{written}: 4 frames after the last of {new}' in printed, error
    expected = evaluate.rollout(model, np.load(new)[None, -3:, ..., None], 4)
    np.testing.assert_allclose(np.load(written), expected[0, ..., 0], rtol=1e-5, atol=1e-6)
    refused([*flags, '--write', written], f'{written}: this file is there', evaluate, lines=None)
    for power, words in (2, '--uneven takes them'), (1, 'is 1, in the training 0.1; --uneven'):
        timed, again = tmp_path / f'{power}.npz', tmp_path / f'{power}.h5'
        np.savez(timed, new=runs[8], time=np.arange(10) ** power)
        other = [*flags, '--frames', timed, '--write', again]
        refused(other, words, evaluate, lines=None)
        assert call([*other, '--uneven'], evaluate)[0] == 0
        with h5py.File(again) as file:
            np.testing.assert_array_equal(file['0'], np.load(written))
            np.testing.assert_allclose(file['time'], 0.1 * np.arange(1, 5))             # by --dt
    refused(flags, 'a forecast needs --frames FILE, --write FILE and', evaluate, lines=None)
    saved = torch.load(model / 'last.pt', weights_only=True)
    saved['model']['readout.project.weight'] *= 1e25
    torch.save(saved, tmp_path / 'wild.pt')
    refused(['--checkpoint', tmp_path / 'wild.pt', *flags[2:], '--write', tmp_path / 'wild.npy'],
            '--rollout 4: from step 2 on predictions are not finite; --rollout 1 ends before', evaluate, lines=None)
    assert evaluate.load(model).data['mine']['train']['layout'] == ['TXY']
    pytest.importorskip('matplotlib', reason='the figures need it')
    flags += ['--write', tmp_path / 'again.npy', '--figures', tmp_path / 'figures']
    refused([*flags, '--trajectory', 1], f'--trajectory 1: {new} has the ', evaluate, lines=None)
    assert call(flags, evaluate)[0] == 0
    assert (tmp_path / 'figures/forecast.png').stat().st_size > 5000
