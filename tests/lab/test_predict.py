"""Predictions of files are those of the arrays, and pictures show the fields."""
from configs import InputError

import h5py
import numpy as np
import pytest
import torch

import aotpot
import data
import evaluate
from helpers import CPU, pictures, save, slow_rollout, small_model, trajectories, travelling, write
from lab import figures, predict


def files(folder):
    """All files and folders below a folder, with the content of the files."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob('*')}


@pytest.mark.parametrize('source, target', [('frames.npy', 'new/out.h5'), ('frames.hdf5', 'out.npy')])
def test_predictions_of_a_file_are_those_of_the_array_without_any_dataset(model, checkpoint, tmp_path, monkeypatch,
                                                                          call, refused, source, target):
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
    before = (tmp_path / target).read_bytes()
    refused([*flags, '--static', '0'], f'error: --to {target}: this exists; remove it or name another file\n', predict)
    assert (tmp_path / target).read_bytes() == before


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


@pytest.mark.parametrize('flags, words', [
    (['none.npy'], '.npy (No such file'), (['none.h5'], 'not readable as .h5 (No such file'),
    (['text.npy'], 'text.npy: not readable as .npy'), (['npz.npy'], 'npz.npy: not readable'),
    (['text.h5'], 'text.h5: not readable'), (['pickle.npy'], 'pickle.npy: not readable as .npy'),
    (['a.npz'], 'a.npz: the name of a file of frames ends in .npy, .h5, .hdf5'),
    (['two.h5'], "two.h5: not readable as .h5 ("),
    (['none.npy', '--steps', '1', '2'], 'how many frames? add --steps N'),
    (['short.npy'], 'short.npy: 2 frames; this model needs 3'),
    (['fine.npy', '--static', '2'], 'fine.npy: static channels [2]; its channels are 0 to 1'),
    (['static.h5'], "static.h5: static ['c']: expected names of the channels ['0', '1']"),
    (['fine.npy', '--to', 'out.png'], '--to out.png: the name must end in .npy, .h5, .hdf5'),
    (['fine.npy', '--to', 'fine.npy/out.h5'], 'fine.npy/out.h5: cannot be written'),
    (['fine.npy', '--to', './fine.npy'], '--to ./fine.npy: this exists; remove it'),
    (['fine.npy', '--to', ''], 'into which file? add --to FILE'),
    (['fine.npy', '--steps', '0'], '--steps 0 must be at least 1'),
    (['fine.npy', '--steps', '100001'], '--steps 100001 must be at most 100000'),
    ([], 'give a FILE of frames or --fields'), (['fine.npy', '--fields'], 'give a FILE of frames'),
    (['--fields'], '--fields: into which folder? add --figures DIR'),
    (['fine.npy', '--checkpoint', 'out/small', 'out/other'], 'one process writes the predictions of one --checkpoint')])
def test_bad_input_of_predict_is_one_line_and_writes_nothing(model, checkpoint, folder, monkeypatch, refused, flags,
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
    refused([*defaults, *flags], words, predict)
    assert files(folder) == before


def test_one_process_writes_the_predictions(model):
    with pytest.raises(InputError, match='one process writes'):
        predict.predict([model], None, CPU._replace(world_size=2), {})


def test_predictions_that_are_not_finite_are_written_and_counted(model, folder, monkeypatch, call):
    torch.nn.init.constant_(model.readout.project.bias, float('inf'))
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
    truth, u, last = predict.rollout_of_channel(aotpot.load(checkpoint), trajectories(folder, 'own', rows=[2]), 'v', 3)
    figures.save(folder, 'expected', figures.plot_fields(truth, {'small': u, 'other': u, 'persistence': last}, [1, 3],
                                                         'v', 'own, test trajectory 2'))
    expected = pictures(folder, '*.png')['expected.png']
    assert name == 'own_v.png' and np.array_equal(png.convert('RGB'), expected.convert('RGB'))


@pytest.mark.parametrize('flags, words', [
    (['--channel', 'w'], 'w: coarse does not predict it'), (['--datasets', 'own', '--channel', 'c'], 'c: own'),
    (['--steps', '1', '5'], '--steps 5: coarse has 4 frames after the 3'), (['--steps', '0'], '--steps 0 must be'),
    (['--trajectory', '4'], '--trajectory 4: coarse has 0 to 3'), (['--trajectory', '-1'], '--trajectory -1 must be')])
def test_bad_flags_of_fields_are_one_line(plt, checkpoint, folder, refused, flags, words):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--figures', folder / 'figures', '--fields', *flags]
    refused(flags, words, predict)
    assert not [*folder.glob('figures/*')]
