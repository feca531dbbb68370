"""What files say is compared with what a network was trained on, and a forecast goes from a file into a file."""
import json

import numpy as np
import pytest
import torch

import data
import evaluate
import finetune
from configs import InputError
from helpers import KINDS, command, save, small_model, travelling, write
from sources import generate, prepare

SOLVER = 'generate.py seed 0 grid 64 version 2'


@pytest.fixture
def trained(tmp_path):
    """trained(**attributes) is a checkpoint of a network that was trained on `wave`, with these attributes."""
    def checkpoint(name='wave', **attributes):
        header = {**KINDS['wave'], 'dt': 0.3, 'source': SOLVER, **attributes}
        model = small_model()
        path = save(model, tmp_path, 'run/last.pt', datasets=(name,))
        saved = torch.load(path)
        saved['data'] = {name: {'train': {key: list(value) if isinstance(value, tuple) else value
                                          for key, value in header.items()}}}
        torch.save(saved, path)
        return path
    return checkpoint


def test_the_splits_of_a_dataset_have_one_time_step(tmp_path):
    u = travelling(3, 8, 8, 1, 0.4)
    for split, dt in ('train', 0.1), ('test', 0.3):
        write(tmp_path, 'own', u, split, dt=dt)
    with pytest.raises(InputError, match='own: test.h5 has the dt 0.3, but train.h5 0.1; they must be'):
        data.Trajectories(tmp_path, 'own', 'train', 3, 4)
    write(tmp_path, 'own', u, 'test')
    assert data.Trajectories(tmp_path, 'own', 'train', 3, 4).dt == 0.1, 'one of them does not say'


@pytest.mark.parametrize('other, words', [
    (dict(channels=('p', 'q', 'c')), 'the channels p q c'), (dict(static=()), 'the static none'),
    (dict(dt=0.1), 'the dt 0.1')])
def test_a_dataset_of_the_training_but_with_other_contents_is_refused(trained, tmp_path, refused, other, words):
    values = travelling(3, 8, 16, 3, 0.4)
    values[..., 2] = values[:, :1, ..., 2]
    attributes = {**KINDS['wave'], 'dt': 0.3, **other}
    if 'channels' in other:
        attributes['static'] = ('c',)
    write(tmp_path, 'wave', values, 'test', **attributes)
    error, _ = refused(['--checkpoint', trained(), '--device', 'cpu'], f'has {words}, but the training of ', evaluate)
    assert str(tmp_path / 'wave/test.h5') in error


@pytest.mark.parametrize('source, said', [
    ('Poseidon, Wave-Layer.nc', True), ('', False), ('generate.py seed 7 grid 32 version 2', False),
    ('generate.py seed 0 grid 64 version 3', True)])
def test_data_of_another_source_than_the_training_are_scored_with_a_line(trained, tmp_path, call, source, said):
    values = travelling(3, 8, 16, 3, 0.4)
    values[..., 2] = values[:, :1, ..., 2]
    write(tmp_path, 'wave', values, 'test', **KINDS['wave'], dt=0.3, source=source)
    code, error, _ = call(['--checkpoint', trained(), '--device', 'cpu'], evaluate)
    assert code == 0 and ('test.h5 has the source ' in error) == said
    assert not said or 'but the training of ' in error


def test_a_longer_reference_of_our_solver_is_not_put_in_the_place_of_other_data(trained, tmp_path, refused):
    name = evaluate.LONG
    write(tmp_path, name, travelling(3, 8, 16, 1, 0.4), 'test', channels=('w',), dt=1.0, source='FNO, ns_V1e-3.mat')
    path = trained(name, channels=('w',), static=(), dt=1.0, source='FNO, ns_V1e-3.mat')
    flags = ['--checkpoint', path, '--device', 'cpu', '--rollout', 20]
    error, _ = refused(flags, 'has the source FNO, ns_V1e-3.mat, but '
                       'our solver generate.py', evaluate, lines=None)
    assert 'try --rollout 5' in error and not [*tmp_path.glob('*/rollout*')]
    assert generate.plan(name).attributes()['source'].startswith('generate.py')


def test_data_without_a_training_and_of_another_time_step_are_a_line(trained, tmp_path, call):
    values = travelling(3, 8, 16, 3, 0.4)
    write(tmp_path, 'new', values, 'test', dt=0.1)
    code, error, _ = call(['--checkpoint', trained(), '--device', 'cpu', '--datasets', 'new'], evaluate)
    assert code == 0 and 'new/test.h5 has the dt 0.1, but the training of ' in error


def test_fine_tuning_on_data_of_another_time_step_is_a_line(tmp_path, call):
    for folder, dt in ('a', 0.1), ('b', 0.3):
        for split in 'train', 'test':
            write(tmp_path / folder, 'own', travelling(4, 8, 16, 1, 0.4), split, dt=dt)
    assert call(command(tmp_path / 'a', tmp_path / 'run', steps=1)[1:])[0] == 0
    flags = ['--checkpoint', tmp_path / 'run', '--dataset', 'own', '--steps', 1, '--device', 'cpu']
    for folder, said in ('b', True), ('a', False):
        code, error, _ = call([*flags, '--data', tmp_path / folder, '--out', tmp_path / f'tuned-{folder}'], finetune)
        assert code == 0 and ('own/train.h5 has the dt 0.3, but the training of ' in error) == said


@pytest.mark.parametrize('source, kept', [(SOLVER, True), ('', False), ('another solver', False)])
def test_weights_that_are_tuned_on_data_of_their_training_keep_its_numbers(tmp_path, call, source, kept):
    for folder, scale, words in ('a', 1, SOLVER), ('b', 3, source):
        for split in 'train', 'test':
            write(tmp_path / folder, 'own', scale * travelling(4, 8, 16, 1, 0.4), split, source=words)
    assert call(command(tmp_path / 'a', tmp_path / 'run', '--normalize', steps=1)[1:])[0] == 0
    flags = ['--checkpoint', tmp_path / 'run', '--dataset', 'own', '--steps', 1, '--device', 'cpu']
    code, error, _ = call([*flags, '--data', tmp_path / 'b', '--out', tmp_path / 'tuned'], finetune)
    assert code == 0, error
    units = [evaluate.load(tmp_path / run).data['own']['train']['units'] for run in ('run', 'tuned')]
    assert (units[0] == units[1]) == kept


def test_frames_of_other_proportions_or_another_mean_than_in_the_training_are_a_line(trained, capsys):
    units = data.Units(torch.tensor(2 * [[0., 0, 3]]), torch.ones(2, 3), torch.zeros(3)).header()
    model = evaluate.load(trained(shape=[9, 9, 16, 16, 3], units=units))
    for grid, offset, words in (
            ((16, 16), 0, ''), ((8, 8), 0, ''), ((16, 12), 0, 'the grid 16x12 has other proportions'),
            ((16, 16), 40, 'the mean of u is 40, and in the training 0 with a deviation of 1')):
        evaluate.rollout(model, np.zeros((2, 3, *grid, 3)) + [offset, 0, 3], 2, 'wave')
        said = capsys.readouterr().err
        assert words in said and bool(said) == bool(words)


@pytest.fixture
def own(tmp_path, call):
    """A network that was trained on files of one's own, one a run, and a folder with a new one."""
    runs = travelling(9, 10, 16, 1, 0.4)[..., 0]
    for folder, values in ('runs', runs[:8]), ('new', runs[8:]):
        (tmp_path / folder).mkdir()
        for i, run in enumerate(values):
            np.save(tmp_path / folder / f'run{i}.npy', run)
    flags = ['mine', '--source', tmp_path / 'runs', '--layout', 'TXY', '--data', tmp_path / 'data', '--dt', 0.1]
    code, error, _ = call(flags, prepare)
    assert code == 0, error
    code, error, _ = call(command(tmp_path / 'data', tmp_path / 'run', '--normalize', steps=2)[1:])
    assert code == 0, error
    return tmp_path


def test_a_forecast_goes_from_a_file_into_a_file(own, call, refused):
    new = own / 'new/run0.npy'
    flags = ['--checkpoint', own / 'run', '--frames', new, '--rollout', 4, '--device', 'cpu']
    code, error, printed = call([*flags, '--write', own / 'next.npy'], evaluate)
    assert code == 0 and f'{own}/next.npy: 4 frames after the last of {new}' in printed, error
    expected = evaluate.rollout(own / 'run', np.load(new)[None, -3:, ..., None], 4)
    np.testing.assert_allclose(np.load(own / 'next.npy'), expected[0, ..., 0], rtol=1e-5, atol=1e-6)
    refused([*flags, '--write', own / 'next.npy'], f'{own}/next.npy: expected a new file', evaluate, lines=None)
    refused(flags, 'a forecast needs --frames FILE, --write FILE and --rollout N', evaluate, lines=None)
    assert json.loads((own / 'run/config.json').read_text())['data']['mine']['train']['layout'] == 'TXY'


def test_a_forecast_has_a_picture(own, call, plt):
    flags = ['--checkpoint', own / 'run', '--frames', own / 'new/run0.npy', '--rollout', 4, '--device', 'cpu']
    code, error, _ = call([*flags, '--write', own / 'next.npy', '--figures', own / 'figures'], evaluate)
    assert code == 0 and (own / 'figures/forecast.png').stat().st_size > 5000, error
