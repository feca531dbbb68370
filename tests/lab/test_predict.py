"""Rollouts of arrays, tensors and files against slow loops; saved rollouts, windows and other model grids scored again.

The functions are those of lab/predict.py and metrics.py, the commands those of evaluate.py.
"""
import json
import re

import configs

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import aotpot
import data
import evaluate
import metrics
from conftest import ROOT
from helpers import main, same, travelling, write
from trained import CPU, save, save_three, slow_rollout, small_model, trajectories

# ------------------------------------------------------------------------------------------------ arrays and tensors


@torch.no_grad()
@pytest.mark.parametrize('name', ['own', 'coarse'])
def test_a_rollout_of_arrays_and_tensors_equals_a_slow_loop_on_their_own_grid(model, folder, name):
    test = trajectories(folder, name)
    frames, static = np.stack([test.read(i, 0, 4) for i in range(3)]), [1] * (name == 'own')
    found = evaluate.rollout(model, frames, 5, static, batch_size=2)
    assert type(found) is np.ndarray and found.dtype == np.float32 and found.shape == (3, 5, *frames.shape[2:])
    for i, trajectory in enumerate(torch.from_numpy(frames)):
        expected = slow_rollout(model, trajectory[1:], test.evolving, 5)               # of four frames the last three
        np.testing.assert_allclose(found[i][..., test.evolving], expected, rtol=1e-5, atol=1e-5)
        assert np.array_equal(found[i][..., static], frames[i, [3] * 5][..., static])
    alone = evaluate.rollout(model, frames[1].astype('>f8')[:, ::-1, :, :], 5, static)  # big-endian, negative strides
    flipped = evaluate.rollout(model, torch.from_numpy(frames[1:2]).double().flip(2).requires_grad_(), 5, static)
    assert isinstance(flipped, torch.Tensor) and not flipped.requires_grad and alone.shape == (1, *found.shape[1:])
    assert np.array_equal(alone, flipped)


def test_static_may_be_a_generator_and_a_network_in_training_mode_is_evaluated_and_left_as_it_was(folder):
    model, test = small_model(experts=3, top_k=1), trajectories(folder, 'own')
    frames, static = np.stack([test.read(i, 0, 4) for i in range(3)]), [1]
    expected, scores = evaluate.rollout(model, frames, 2, static), evaluate.score(model, test, CPU)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train().readout.eval()
    modes = [module.training for module in model.modules()]
    assert np.array_equal(evaluate.rollout(model, frames, 2, (channel for channel in static)), expected)
    assert same(evaluate.score(model, test, CPU), scores) and same(dict(model.state_dict()), before)
    assert [module.training for module in model.modules()] == modes and len({*modes}) == 2


@torch.no_grad()
@pytest.mark.parametrize('grid', [(8, 12), (16, 16)])
def test_a_rollout_equals_single_steps_whose_predictions_are_given_back(model, grid):
    frames = np.float32(travelling(2, 3, 16, 2, 0.4)[:, :, :grid[0], :grid[1]])
    found, known = evaluate.rollout(model, frames, 4, [1]), frames
    for _ in range(4):
        known = np.concatenate([known, evaluate.rollout(model, known, 1, [1])], 1)
    np.testing.assert_allclose(found, known[:, 3:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_rollout_in_three_dimensions_equals_steps_of_the_network():
    solid, frames = small_model(resolution=8, dims=3), torch.rand(2, 3, 6, 8, 4, 2)
    resize = lambda u, size: F.interpolate(u.movedim(-1, 1), size, mode='trilinear').movedim(1, -1)
    known = [*frames.unbind(1)]
    for _ in range(2):
        state = [F.pad(resize(u, (8, 8, 8)), (0, 2), value=1.) for u in known[-3:]]
        known.append(resize(solid(torch.stack(state, 1))[..., :2], (6, 8, 4)))
    expected = torch.stack(known[3:], 1)
    torch.testing.assert_close(evaluate.rollout(solid, frames, 2), expected)
    torch.testing.assert_close(evaluate.rollout(solid, frames[1], 2)[0], expected[1])


@pytest.mark.parametrize('frames, options, words', [
    (np.ones((2, 8, 8, 2)), {}, 'frames: 2 frames; this model needs 3 to predict the next, so give at least 3'),
    (np.ones((3, 8, 8, 5)), {}, 'frames: 5 channels on the last axis; this model has 4'),
    (torch.ones(3, 8, 8), {}, r'frames: the shape \(3, 8, 8\); this model takes \(N, 3, H, W, C\), or'),
    (np.ones((1, 3, 8, 8, 8, 2)), {}, r'frames: the shape \(1, 3, 8, 8, 8, 2\)'),
    (np.ones((0, 3, 8, 8, 2)), {}, r'frames: the shape \(0, 3, 8, 8, 2\) has an empty axis'),
    (np.full((3, 8, 8, 1), np.nan), {}, 'frames: non-finite values in the last 3 frames'),
    (np.full((3, 8, 8, 1), 1e300), {'name': 'a.npy'}, 'a.npy: non-finite values'),
    (np.ones((3, 8, 8, 1), complex), {}, 'frames: complex128; expected real numbers'),
    (np.full((3, 8, 8, 1), 'a'), {}, 'frames: <U1; expected real numbers'),
    (torch.ones(3, 8, 8, 2), {'static': [2]}, r'frames: static channels \[2\]; its channels are 0 to 1'),
    (torch.ones(3, 8, 8, 2), {'static': (.5,)}, r'frames: static channels \[0.5\]; its channels are 0 to 1'),
    (torch.ones(3, 8, 8, 2), {'dtype': 'fp16'}, "dtype 'fp16': expected 'fp32' or 'bf16'"),
    (torch.ones(3, 8, 8, 2), {'static': [1, 0]}, 'frames: all channels are static'),
    (torch.ones(3, 8, 8, 2), {'steps': 0}, '--steps 0 must be at least 1')])
def test_what_a_rollout_cannot_take_is_said_with_what_to_give(model, frames, options, words):
    with pytest.raises(configs.InputError, match=words):
        evaluate.rollout(model, frames, **{'steps': 1, **options})


def test_the_lines_for_a_notebook_run_as_they_are_printed(model, tmp_path, monkeypatch):
    write(tmp_path / 'data/nano', 'wave_gauss', travelling(2, 9, 12, 2, 0.4), 'test')
    save(model, tmp_path, 'nano/best.pt')
    block, short = (next(text for text in re.findall(r'```python\n(.*?)```', (ROOT / page).read_text(), re.S)
                         if 'evaluate.rollout' in text) for page in ('docs/evaluation.md', 'README.md'))
    monkeypatch.chdir(tmp_path)
    names, others = {}, {}
    exec(block, names)
    exec(short, others)
    np.testing.assert_allclose(others['prediction'][:, :6], names['prediction'], rtol=1e-5, atol=1e-6)
    test = data.Trajectories('data/nano', 'wave_gauss', 'test', 3, 4)
    after, error = names['u'].shape[1], names['error']
    assert len(block.splitlines()) <= 10 and names['prediction'].shape == (2, 9 - after, 12, 12, 2)
    by_hand = names['prediction'] - np.stack([test.read(i, after, 9) for i in range(2)])
    assert error == pytest.approx(np.linalg.norm(by_hand) / np.linalg.norm([test.read(i, after, 9) for i in range(2)]))


# ------------------------------------------------------------------------------------------------ files


@pytest.fixture
def checkpoint(model, folder):
    return save(model, folder, 'small/last.pt')


def files(folder):
    """All files and folders below a folder, with the content of the files."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob('*')}


@pytest.mark.parametrize('source, target', [('frames.npy', 'new/out.h5'), ('frames.hdf5', 'out.npy')])
def test_predictions_of_a_file_are_those_of_the_array_without_any_dataset(model, checkpoint, tmp_path, monkeypatch,
                                                                          capsys, source, target):
    frames = travelling(2, 3, 12, 2, 0.4)
    monkeypatch.chdir(tmp_path)
    if source == 'frames.npy':
        np.save(source, frames)
    else:
        with h5py.File(source, 'w') as file:
            file['only'] = frames
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--predict', source, '--steps', '4', '--to', target,
             '--static', '1', '--json', 'report.json']
    code, error, printed = main(flags, monkeypatch, capsys, evaluate)
    assert code == 0 and printed.endswith(f'wrote {target}: (2, 4, 12, 12, 2)\n'), error
    found = np.load(target) if target == 'out.npy' else h5py.File(target)['data'][()]
    assert np.array_equal(found, evaluate.rollout(model, frames, 4, [1]))
    report = json.loads((tmp_path / 'report.json').read_text())['models']['small']
    assert report['prediction'] == {'path': target, 'shape': [2, 4, 12, 12, 2]}
    before = (tmp_path / target).read_bytes()
    code, error, _ = main([*flags, '--static', '0'], monkeypatch, capsys, evaluate)
    assert code == 2 and error == f'error: --to {target}: this exists; remove it or name another file\n'
    assert (tmp_path / target).read_bytes() == before


def test_static_channels_and_their_scale_are_those_of_the_file_and_predictions_keep_its_units(
        model, checkpoint, folder, monkeypatch, capsys):
    """The target of an HDF5 file is in the layout of data.py: what it holds is predicted again."""
    values = travelling(2, 4, 12, 3, 0.4)
    values[..., 1] = 1500.
    attributes = dict(channels=('u', 'c', 'v'), static=('c',), scale=(1000.,), dt=0.5, t_test=1)
    write(folder, 'scaled', values, 'test', **attributes)
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--steps', '3', '--predict', folder / 'scaled/test.h5',
             '--to', folder / 'next/test.h5']
    assert main(flags, monkeypatch, capsys, evaluate)[0] == 0
    test, after = trajectories(folder, 'scaled'), data.Trajectories(folder, 'next', 'test', 2, 4)
    assert (after.channel_names, after.evolving, after.dt, after.t_test) == (['u', 'c', 'v'], [0, 2], 0.5, 1)
    frames = np.stack([test.read(i, 1, 4) for i in range(2)])
    assert (frames[..., 1] == 1.5).all() and (h5py.File(after.path)['data'][..., 1] == 1500).all()
    np.testing.assert_allclose([after.read(i, 0, 3) for i in range(2)], evaluate.rollout(model, frames, 3, [1]),
                               rtol=1e-6)


@pytest.mark.parametrize('flags, words', [
    (['--predict', 'none.npy'], '.npy (No such file'), (['--predict', 'none.h5'], 'not readable as .h5 (No such file'),
    (['--predict', 'text.npy'], 'text.npy: not readable as .npy'),
    (['--predict', 'npz.npy'], 'npz.npy: not readable'), (['--predict', 'text.h5'], 'text.h5: not readable'),
    (['--predict', 'a.npz'], 'a.npz: the name of a file of frames ends in .npy, .h5, .hdf5'),
    (['--predict', 'pickle.npy'], 'pickle.npy: not readable as .npy'),
    (['--predict', 'two.h5'], "two.h5: no dataset 'data', found ['a', 'b']; name the frames 'data'"),
    (['--predict', 'none.npy', '--steps', '1', '2'], 'how many frames? add --steps N'),
    (['--predict', 'short.npy'], 'short.npy: 2 frames; this model needs 3'),
    (['--predict', 'fine.npy', '--static', '2'], 'fine.npy: static channels [2]; its channels are 0 to 1'),
    (['--predict', 'static.h5'], "static.h5: static ['c']: expected names of the channels ['0', '1']"),
    (['--predict', 'fine.npy', '--to', 'out.png'], '--to out.png: the name must end in .npy, .h5, .hdf5'),
    (['--predict', 'fine.npy', '--to', 'fine.npy/out.h5'], '--to fine.npy/out.h5: fine.npy is not a folder'),
    (['--predict', 'fine.npy', '--to', './fine.npy'], '--to ./fine.npy: this exists; remove it'),
    (['--predict', 'fine.npy', '--to', 'coarse/test.h5'], '--to coarse/test.h5: this exists; remove it'),
    (['--predict', 'fine.npy', '--to', ''], 'into which file? add --to FILE'),
    (['--predict', 'fine.npy', '--steps', '0'], '--steps 0 must be at least 1'),
    (['--predict', 'fine.npy', '--steps', '100001'], '--steps 100001 must be at most 100000'),
    (['--predict', 'fine.npy', '--data', '.'], '--predict needs no datasets'),
    (['--predict', 'fine.npy', '--metrics'], '--metrics adds a table'),
    (['--predict', 'fine.npy', '--figures', 'f'], '--figures: of what?'),
    (['--predict', 'fine.npy', '--resolution', '30'], '--resolution 30x30 is not divisible by --patch 4'),
    (['--predict', 'fine.npy', '--checkpoint', 'out/small', 'out/other'], '--predict: there are 2 checkpoints')])
def test_bad_input_of_predict_is_one_line_and_writes_nothing(model, checkpoint, folder, monkeypatch, capsys, flags,
                                                             words):
    monkeypatch.chdir(folder)
    save(model, folder, 'other/last.pt')
    for name in ('text.npy', 'text.h5', 'a.npz'):
        (folder / name).write_text('some text')
    np.save('pickle.npy', np.array([{}]))
    np.savez(open('npz.npy', 'wb'), np.ones(2))
    np.save('fine.npy', np.ones((3, 8, 8, 2)))
    np.save('short.npy', np.ones((2, 8, 8, 2)))
    for name, keys in (('two.h5', 'ab'), ('static.h5', ['data'])):
        with h5py.File(name, 'w') as file:
            for key in keys:
                file[key] = np.ones((3, 8, 8, 2))
                file[key].attrs['static'] = ['c']
    before = files(folder)
    defaults = {'--checkpoint': [checkpoint], '--steps': ['1'], '--to': ['new/out.h5'], '--device': ['cpu']}
    defaults = [word for flag, values in defaults.items() if flag not in flags for word in (flag, *values)]
    code, error, _ = main([*defaults, *flags], monkeypatch, capsys, evaluate)
    assert code == 2 and error.count('\n') == 1 and words in error
    assert files(folder) == before


# ------------------------------------------------------------------------------------------------ saved rollouts


def test_saved_rollouts_are_a_dataset_whose_errors_by_hand_are_the_scores(model, folder, monkeypatch, capsys):
    """With a scaled static channel, a coefficient beside `data` and two datasets; nothing is ever replaced."""
    values = travelling(5, 9, 16, 2, 0.4)
    values[..., 1] = 1500.
    attributes = dict(channels=('u', 'c'), static=('c',), scale=(1000.,), dt=0.25, t_test=4, pde='u_t = u')
    with data.writer(folder / 'own/test.h5', values.shape, **attributes) as file:
        file['data'][:] = values
        file['speed'] = np.arange(5.)
        file['soft'], file['external'] = h5py.SoftLink('/gone'), h5py.ExternalLink('gone.h5', 'data')
    path = save(model, folder, 'small/last.pt', datasets=('own', 'coarse'))
    coefficients = save(model, folder, 'more/last.pt', datasets=('own',), coefficients=('speed',))
    flags = ['--device', 'cpu', '--batch_size', '2', '--save']
    code, error, printed = main([*flags, folder / 'new/saved', '--checkpoint', path], monkeypatch, capsys, evaluate)
    assert code == 0 and printed.count('wrote') == 2 and 'of which the last 4 frames are predicted' in printed, error
    for name in ('own', 'coarse'):
        truth, saved = trajectories(folder, name), trajectories(folder / 'new/saved', name)
        assert saved.shape == (truth.count, 7, *truth.shape[2:]) and saved.t_test == 4 and saved.dt == truth.dt
        assert (saved.channel_names, saved.evolving) == (truth.channel_names, truth.evolving)
        stored, original = (h5py.File(item.path)['data'] for item in (saved, truth))
        assert np.array_equal(stored[:, :3], original[:, :3]), 'the true frames, in the units of the file'
        assert stored.attrs['predictions'] == f'frames 3 to 6, by {path}'
        assert stored.attrs.get('pde') == original.attrs.get('pde')
        u, v = (np.float64(item[:, 3:7][..., truth.evolving]) for item in (stored, original))
        by_hand = np.sqrt(((u - v) ** 2).sum((1, 2, 3)) / (v ** 2).sum((1, 2, 3))).mean(-1)
        np.testing.assert_allclose(by_hand, evaluate.score(model, truth, CPU)['rollout'], rtol=1e-5)
    assert (h5py.File(folder / 'new/saved/own/test.h5')['data'][..., 1] == 1500).all()
    for there in (folder / 'new/saved', folder):
        before = files(folder)
        code, error, _ = main([*flags, there, '--checkpoint', path], monkeypatch, capsys, evaluate)
        assert code == 2 and error.endswith(f'{there}/own/test.h5 exists; remove it or name another folder\n')
        assert files(folder) == before
    assert main([*flags, folder / 'with', '--checkpoint', coefficients], monkeypatch, capsys, evaluate)[0] == 0
    again, saved = (trajectories(place, 'own', coefficients=('speed',)) for place in (folder, folder / 'with'))
    assert saved.channel_names == ['u', 'c', 'speed'] and saved.evolving == [0]
    expected = evaluate.rollout(model, again.read(4, 0, 3), 4, [1, 2])[0]
    np.testing.assert_allclose(saved.read(4, 3, 7), expected, rtol=1e-6)


def test_files_are_written_by_one_process_of_one_checkpoint(model, folder):
    opened = evaluate.open_checkpoints([save(model, folder, f'{name}/last.pt') for name in 'ab'])
    for models, world_size, words in ((opened, 1, '--save: there are 2 checkpoints'),
                                      (opened[:1], 2, '--save writes its files in one process')):
        with pytest.raises(configs.InputError, match=words):
            evaluate.alone(models, CPU._replace(world_size=world_size), 'save')


def test_predictions_that_are_not_finite_are_written_with_a_warning(model, folder, monkeypatch, capsys):
    torch.nn.init.constant_(model.readout.project.bias, float('inf'))
    path = save(model, folder, 'small/last.pt')
    np.save(folder / 'frames.npy', np.ones((3, 8, 8, 2)))
    monkeypatch.chdir(folder)
    for flags, file, number in ((['--predict', 'frames.npy', '--steps', 2, '--to', 'out.npy'], 'out.npy', 1),
                                (['--save', 'saved', '--datasets', 'coarse'], 'saved/coarse/test.h5', 4)):
        code, error, _ = main(['--checkpoint', path, '--device', 'cpu', *flags], monkeypatch, capsys, evaluate)
        assert code == 0 and (folder / file).exists()
        assert error == f'warning: {file}: {number} of {number} predictions have values that are not finite\n'


# ------------------------------------------------------------------------------------------------ another model grid


@torch.no_grad()
def test_another_model_grid_is_that_of_the_scores_and_of_predictions(model, checkpoint, folder, monkeypatch, capsys):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--resolution', '24x32']
    code, _, printed = main([*flags, '--datasets', 'coarse', '--json', folder / 'fine.json'], monkeypatch, capsys,
                            evaluate)
    report = json.loads((folder / 'fine.json').read_text())['models']['small']
    assert code == 0 and ' 24x32 grid of --resolution, ' in printed and report['resolution'] == [24, 32]
    found = report['datasets']['coarse']
    test, errors = trajectories(folder, 'coarse'), []
    for i in range(test.count):
        truth = torch.from_numpy(test.read(i, 0, 4)).movedim(-1, 1)                                 # (4, 1, 8, 8)
        state = torch.ones(1, 3, 24, 32, 4)
        state[0, ..., :1] = F.interpolate(truth[:3], (24, 32), mode='bilinear').movedim(1, -1)
        u = F.interpolate(model(state)[..., :1].movedim(-1, 1), (8, 8), mode='bilinear')[0]
        errors.append(((u - truth[3]).norm() / truth[3].norm()).item())
    one = main([*flags, '--predict', folder / 'coarse/test.h5', '--steps', 1, '--to', folder / 'out.npy'], monkeypatch,
               capsys, evaluate)
    assert one[0] == 0
    expected = evaluate.score(aotpot.load(checkpoint), test, CPU, steps=1)['step']
    assert not np.allclose(errors, expected, rtol=1e-3), 'the grid matters'
    finer = evaluate.open_checkpoints([checkpoint], resolution='24x32')[0].model
    np.testing.assert_allclose(evaluate.score(finer, test, CPU, steps=1)['step'], errors, rtol=1e-5)
    np.testing.assert_allclose(evaluate.score(finer, test, CPU)['rollout'], found['rollout']['samples'], rtol=1e-6)
    newest = np.stack([test.read(i, 4, 7) for i in range(4)])
    assert np.array_equal(np.load(folder / 'out.npy'), evaluate.rollout(finer, newest, 1))


# ------------------------------------------------------------------------------------------------ windows


@torch.no_grad()
def test_windows_of_a_rollout_equal_a_slow_loop_over_their_frames(model, folder, monkeypatch, capsys):
    paths = save_three(model, folder)
    flags = ['--device', 'cpu', '--datasets', 'own', '--windows', '1:3', '3:4', '--json', folder / 'windows.json',
             '--checkpoint']
    code, error, printed = main([*flags, paths[1]], monkeypatch, capsys, evaluate)
    assert code == 0, error
    found = json.loads((folder / 'windows.json').read_text())['models']['aot']['datasets']['own']
    assert found['frames'] == 4 and [name for name in found if ':' in name] == [
        f'{kind}_{window}{suffix}' for window in ('1:3', '3:4') for kind in ('rollout', 'nrmse', 'vrmse')
        for suffix in metrics.SUFFIXES]
    test = trajectories(folder, 'own')
    for i in range(test.count):
        truth = torch.from_numpy(test.read(i, 0, 7))
        predicted, targets = slow_rollout(model, truth, test.evolving, 4), truth[3:][..., test.evolving]
        for first, end in ((1, 3), (3, 4)):
            slow = {'rollout': [], 'nrmse': [], 'vrmse': []}
            for c in range(2):
                u, v = predicted[first:end, ..., c], targets[first:end, ..., c]
                slow['rollout'].append((u - v).norm() / v.norm())
                for a, b in zip(u, v):
                    slow['nrmse'].append(((a - b) ** 2).mean().sqrt() / (b ** 2).mean().sqrt())
                    slow['vrmse'].append(((a - b) ** 2).mean().sqrt() / (torch.std(b) ** 2 + 1e-7).sqrt())
            for kind, values in slow.items():
                value = found[f'{kind}_{first}:{end}']['samples'][i]
                assert value == pytest.approx(np.mean(values), rel=2e-5), (kind, first)
    assert [line.split() for line in printed.splitlines() if ':4' in line] == [['rollout', '3:4'] * 3]
    several = main([*flags, *paths[:2]], monkeypatch, capsys, evaluate)[2].splitlines()
    row = several[next(i for i, line in enumerate(several) if line.startswith('VRMSE of rollout 3:4, native')) + 1]
    value = found['vrmse_3:4']['mean']
    assert row.replace('*', '').split()[1:3] == [f'{value:.4f}'] * 2


@pytest.mark.parametrize('flags, words', [
    (['--windows', '3'], '--windows 3: expected FIRST:END such as 6:12'), (['--windows', '4:4'], '--windows 4:4: exp'),
    (['--windows', '0:4', '-1:2'], '-1:2'), (['--windows', 'a:b'], '--windows a:b: expected'),
    (['--windows', '0:4', '2:5'], '--windows 2:5: coarse has 4 predicted frames, 0 to 3; choose other windows'),
    (['--windows', '0:4', '--rollout', '3'], '--windows adds a table to the scores'),
    (['--save', 'new', '--scoring', 'paper'], '--scoring paper is for the scores'),
    (['--save', 'own/test.h5'], '--save own/test.h5: own/test.h5 is not a folder'),
    (['--save', 'new', '--to', 'a.npy'], '--to is an option of --predict'),
    (['--save', 'new', '--steps', '3'], '--steps is an option of --fields and --predict'),
    (['--static', '1'], '--static is an option of --predict'),
    (['--resolution', '30'], '--resolution 30x30 is not divisible by --patch 4'),
    (['--resolution', 'fine'], "resolution 'fine' is not a grid; write 128 or 96x192")])
def test_bad_windows_grids_and_places_are_one_line(checkpoint, folder, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(folder)
    code, error, _ = main(['--checkpoint', checkpoint, '--device', 'cpu', *flags], monkeypatch, capsys, evaluate)
    assert code == 2 and error.count('\n') == 1 and words in error and not (folder / 'new').exists()
