"""Predictions of files are those of the arrays, and pictures show the fields."""
import h5py
import numpy as np
import pytest
import torch

import data
import evaluate
from helpers import pictures, save, slow_rollout, small_model, trajectories, travelling, write
from lab import figures, predict


@pytest.mark.parametrize('source, target', [('frames.npy', 'new/out.h5'), ('frames.hdf5', 'out.npy')])
def test_predictions_of_a_file_are_those_of_the_array_without_any_dataset(
        model, checkpoint, tmp_path, monkeypatch, call, source, target):
    frames = travelling(2, 3, 12, 2, 0.4)
    monkeypatch.chdir(tmp_path)
    if source == 'frames.npy':
        np.save(source, frames)
    else:
        with h5py.File(source, 'w') as file:
            file['data'] = frames
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', source, '--steps', '4', '--to', target, '--static', '1']
    code, error, printed = call(flags, predict)
    assert code == 0 and printed.endswith(f'wrote {target}: (2, 4, 12, 12, 2)\n'), error
    predictions = np.load(target) if target == 'out.npy' else h5py.File(target)['data'][()]
    assert np.array_equal(predictions, evaluate.rollout(model, frames, 4, [1]))


def test_static_channels_and_their_scale_are_those_of_the_file_and_predictions_keep_its_units(
        model, checkpoint, folder, call):
    """The target of an HDF5 file is in the layout of data.py: what it holds is predicted again."""
    values = travelling(2, 4, 12, 3, 0.4)
    values[..., 1] = 1500.
    attributes = dict(channels=('u', 'c', 'v'), static=('c',), scale=(1000.,), dt=0.5, t_test=1)
    write(folder, 'scaled', values, 'test', **attributes)
    flags = [folder / 'scaled/test.h5', '--checkpoint', checkpoint, '--device', 'cpu', '--steps', '3',
             '--to', folder / 'next/test.h5']
    assert call(flags, predict)[0] == 0
    test, after = trajectories(folder, 'scaled'), data.Trajectories(folder, 'next', 'test', 2, 4)
    assert (after.channel_names, after.evolving, after.dt, after.t_test) == (['u', 'c', 'v'], [0, 2], 0.5, 1)
    frames = np.stack([test.read(i, 1, 4) for i in range(2)])
    assert (frames[..., 1] == 1.5).all() and (h5py.File(after.path)['data'][..., 1] == 1500).all()
    np.testing.assert_allclose([after.read(i, 0, 3) for i in range(2)], evaluate.rollout(model, frames, 3, [1]),
                               rtol=1e-6)


def test_a_file_without_attributes_is_read_as_the_checkpoint_learned_which_a_line_says(model, folder, call, refused):
    values = np.float32(travelling(2, 4, 12, 3, 0.4))
    values[..., 1] = 1500.
    wave = dict(channels=('u', 'c', 'v'), static=('c',), scale=(1000.,), dt=0.5)
    write(folder, 'wave', values, 'test', **wave)
    np.save(folder / 'raw.npy', values)
    path = save(model, folder, 'wave/last.pt', layouts={'wave': wave, 'flow': dict(channels=('a', 'b', 'c'))})
    flags = ['--steps', '2', '4', '3', '--checkpoint', path, '--device', 'cpu', '--to']
    code, error, printed = call([folder / 'wave/test.h5', *flags, folder / 'own.h5'], predict)
    assert code == 0 and 'test.h5: channels u c v (c / 1000 static), as its attributes say\n' in printed, error
    flags = [folder / 'raw.npy', *flags]
    refused([*flags, folder / 'a.npy'], 'several ways; name a dataset with dataset= or --dataset', predict)
    for name, more in (('one.npy', []), ('two.npy', ['--static', '1'])):
        code, error, printed = call([*flags, folder / name, '--dataset', 'wave', *more], predict)
        assert code == 0 and 'raw.npy: channels u c v (c / 1000 static), as in wave\n' in printed, error
    with h5py.File(folder / 'own.h5') as file:
        kept, attributes = file['data'][()], dict(file['data'].attrs)
    assert all(np.array_equal(np.load(folder / name), kept) for name in ('one.npy', 'two.npy'))
    assert kept.shape == (2, 3, 12, 12, 3) and (kept[..., 1] == 1500).all()
    assert 'dt' not in attributes and attributes['scale'] == [1000]
    expected = evaluate.rollout(model, values / np.float32([1, 1000, 1]), 4, [1])[:, 1:]
    np.testing.assert_allclose(kept[..., [0, 2]], expected[..., [0, 2]], rtol=1e-5)


def test_coefficients_beside_the_frames_are_static_channels(model, folder, call, refused):
    values, c, number = np.float32(travelling(2, 3, 12, 1, 0.4)), np.full((2, 12, 12), 2500.), np.array([3., 5.])
    with h5py.File(folder / 'mine.h5', 'w') as file:
        file['data'], file['c'], file['number'] = values, c, number
        file['c'].attrs['scale'] = 1000.
    path = save(model, folder, 'wave/last.pt', coefficients=('c', 'number'))
    flags = [folder / 'mine.h5', '--checkpoint', path, '--device', 'cpu', '--steps', '2']
    code, error, printed = call([*flags, '--to', folder / 'out.h5'], predict)
    assert code == 0 and 'channels 0 c number (c / 1000, number static), as its attributes say\n' in printed, error
    with h5py.File(folder / 'out.h5') as file:
        result = file['data'][()]
        assert file['data'].attrs['static'].tolist() == ['c', 'number']
    assert (result[..., 1] == 2500).all() and (result[0, ..., 2] == 3).all() and (result[1, ..., 2] == 5).all()
    beside = np.stack([c / 1000, np.ones_like(c) * number[:, None, None]], -1)                        # (2, 12, 12, 2)
    frames = np.concatenate([values, np.repeat(beside[:, None], 3, axis=1)], -1)
    expected = evaluate.rollout(model, frames, 2, [1, 2])
    np.testing.assert_allclose(result[..., 0], expected[..., 0], rtol=1e-5)
    with h5py.File(folder / 'mine.h5', 'a') as file:
        del file['c']
        file.create_dataset('c', (2, 12, 12), 'float32')
    refused([*flags, '--to', folder / 'a.h5'], 'mine.h5: a part of /c was never written', predict)


def test_predictions_that_are_not_finite_are_written_and_counted(model, folder, monkeypatch, call):
    torch.nn.init.constant_(model.readout.project.bias, 3e38)            # the next step overflows
    path = save(model, folder, 'small/last.pt')
    np.save(folder / 'frames.npy', np.ones((3, 8, 8, 2)))
    monkeypatch.chdir(folder)
    code, _, printed = call(['frames.npy', '--steps', 2, '--to', 'out.npy', '--checkpoint', path, '--device', 'cpu'],
                            predict)
    assert code == 0 and (folder / 'out.npy').exists() and '; 1 have values that are not finite\n' in printed


@torch.no_grad()
def test_a_traced_channel_is_that_of_the_slow_rollout_and_of_the_middle_slice(model, folder):
    test = trajectories(folder, 'own')
    truth, u, last = predict.rollout_of_channel(model, trajectories(folder, 'own', rows=[3]), 'v', 4)
    expected = slow_rollout(model, torch.from_numpy(test.read(3, 0, 7)), test.evolving, 4)[..., 1]
    torch.testing.assert_close(u, expected, rtol=1e-5, atol=1e-6)
    assert len(last) == 4 and all(np.array_equal(frame, test.read(3, 2, 3)[0, ..., 2]) for frame in last)
    assert np.array_equal(truth, test.read(3, 3, 7)[..., 2])
    write(folder, 'deep', np.random.rand(1, 6, 8, 8, 8, 1), 'test')
    solid = small_model(resolution=8, dims=3)
    deep = data.Trajectories(folder, 'deep', 'test', 3, 4)
    truth, u, last = predict.rollout_of_channel(solid, deep, '0', 2)
    assert u.shape == last.shape == (2, 8, 8) and np.array_equal(truth, deep.read(0, 3, 5)[..., 4, 0])


def test_the_fields_of_a_scaled_dataset_are_those_of_the_numbers_that_the_network_reads(model, folder):
    wave = dict(channels=('u', 'c'), static=('c',), scale=(1000.,))
    values = travelling(2, 6, 16, 2, 0.4)
    values[..., 1] = 1500.
    write(folder, 'wave', values, 'test', **wave)
    loaded = evaluate.load(save(model, folder, 'wave/last.pt', layouts={'wave': wave}))
    test = trajectories(folder, 'wave')
    u = predict.rollout_of_channel(loaded, test, 'u', 3)[1]
    expected = slow_rollout(model, torch.from_numpy(test.read(0, 0, 6)), [0], 3)[..., 0]
    torch.testing.assert_close(u, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_fields_are_drawn_of_all_models(plt, checkpoint, folder, call):
    other = folder / 'out/other/last.pt'
    other.parent.mkdir()
    other.write_bytes(checkpoint.read_bytes())
    flags = ['--checkpoint', checkpoint, other, '--device', 'cpu', '--figures', folder / 'new/figures', '--fields',
             '--datasets', 'own', '--channel', 'v', '--steps', '1', '3', '--trajectory', '2']
    code, error, printed = call(flags, predict)
    assert code == 0 and f'drew {folder}/new/figures/own_v.png' in printed, error
    (name, png), = pictures(folder / 'new/figures').items()
    network = evaluate.load(checkpoint)
    truth, u, last = predict.rollout_of_channel(network, trajectories(folder, 'own', rows=[2]), 'v', 3)
    figures.save(folder, 'expected', figures.plot_fields(truth, {'small': u, 'other': u, 'persistence': last}, [1, 3],
                                                         'v', 'own, test trajectory 2'))
    expected = pictures(folder, '*.png')['expected.png']
    assert name == 'own_v.png' and np.array_equal(png.convert('RGB'), expected.convert('RGB'))
