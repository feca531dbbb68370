"""Files of one's own: each kind and order of axes by its values, and from the file to a picture of the prediction."""
import re

import h5py
import numpy as np
import pytest

import data
import evaluate
import train
from configs import InputError
from sources import own, prepare

VALUES = np.random.default_rng(0).normal(size=(5, 6, 4, 8, 2))                          # (N, T, X, Y, C)


def file_of(kind, folder, values):
    """A file of this kind with the variable `u`, as the programs of that kind store it."""
    path = folder / f'own{kind.partition(" ")[0]}'
    if kind == '.npy':
        np.save(path, values)
    elif kind == '.npz':
        np.savez(path, u=values)
    elif kind == '.mat of version 5':
        pytest.importorskip('scipy.io').savemat(path, {'u': values})
    elif kind == '.nc of version 3':
        with pytest.importorskip('scipy.io').netcdf_file(path, 'w') as file:
            for axis, size in enumerate(values.shape):
                file.createDimension(f'a{axis}', size)
            file.createVariable('u', 'f8', [f'a{axis}' for axis in range(values.ndim)])[:] = values
    else:                                           # HDF5; MATLAB's axes are reversed in it
        with h5py.File(path, 'w') as file:
            file['u'] = values.T if kind == '.mat' else values
    return path


KINDS = '.npy', '.npz', '.mat', '.mat of version 5', '.nc', '.nc of version 3', '.h5', '.hdf5'


@pytest.mark.parametrize('kind', KINDS)
def test_every_kind_of_file_and_order_of_axes_is_read_by_value(kind, tmp_path):
    for layout, order in (('NTHWC', 'NTXYC'), ('NTCHW', 'NTCXY'), ('cyxnt', 'CYXNT'), ('TXNYC', 'TXNYC')):
        stored = VALUES.transpose(['NTXYC'.index(letter) for letter in order])
        read, static = own.read([file_of(kind, tmp_path, stored)], (), layout)
        np.testing.assert_array_equal(read, VALUES)
        assert not static
    read, _ = own.read([file_of(kind, tmp_path, VALUES[0, :, :, 0, 0])], (), 'TX')
    np.testing.assert_array_equal(read, VALUES[:1, :, :, 0, :1])


def test_a_variable_without_n_and_t_is_a_static_channel_for_all_times(tmp_path):
    u, mask = VALUES[..., 0], VALUES[0, 0, ..., 1]
    np.savez(tmp_path / 'own.npz', u=u.transpose(1, 0, 3, 2), mask=mask.T)
    read, static = own.read([tmp_path / 'own.npz'], ['u', 'mask'], 'TNYX')
    assert static == [1]
    np.testing.assert_array_equal(read, np.stack([u, np.broadcast_to(mask, u.shape)], -1))


@pytest.mark.parametrize('flags, words', [
    ([], 'own.npz: name the variables with --variables; there are u (5, 6, 4, 8), v (5, 6, 4, 8)'),
    (['--variables', 'u'], '--layout is missing: the axes in their order, such as NTHWC for '),
    (['--variables', 'u', 'x', '--layout', 'NTHW'], '--variables u x: 1 of them are in '),
    (['--variables', 'u', '--layout', 'NTHWC'], 'has the shape (5, 6, 4, 8), for which --layout NTXYC does not fit'),
    (['--variables', 'u', '--layout', 'NTQ'], '--layout NTQ: expected the axes of the array in their order'),
    (['--variables', 'u', '--layout', 'NTHW', '--channels', 'a', 'b'], '--channels a b: there are 1 channels'),
    (['--variables', 'u', '--layout', 'NTHW', '--test', '1'], '5 trajectories are too few for --test 1.0')])
def test_what_a_file_of_ones_own_needs_is_said_in_one_line(tmp_path, refused, flags, words):
    np.savez(tmp_path / 'own.npz', u=VALUES[..., 0], v=VALUES[..., 1])
    refused(['mine', '--source', tmp_path / 'own.npz', '--data', tmp_path, *flags], words, prepare, lines=None)
    assert not (tmp_path / 'mine').exists()


def test_an_unknown_name_says_what_to_do(tmp_path, refused):
    (tmp_path / 'folder').mkdir()
    refused(['mine2', '--source', tmp_path / 'folder'], 'for files of your own give --layout, such as NTHWC', prepare)


def waves(H, W):
    """Plane waves of 20 phases, (20, 8, H, W)."""
    x, y = np.arange(H)[:, None] / H, np.arange(W) / W
    return np.sin(2 * np.pi * (x + y) - 0.3 * np.arange(8)[:, None, None] + np.arange(20)[:, None, None, None])


def pascal_and_kelvin(folder):
    """A channels-first .npz on 48x80 points."""
    wave = waves(48, 80)
    np.savez(folder / 'own.npz', u=np.stack([1e5 + 2e3 * wave, 290 + 5 * wave], 2))
    return 'own.npz', '--layout NTCHW --channels p temperature'


def burgers(folder):
    """A v7.3 .mat of travelling waves of Burgers' equation: u = c - a tanh(a (x - c t) / 2 nu), nu = 0.2."""
    x, t = np.linspace(-1, 1, 64), 0.05 * np.arange(10)[:, None]
    c = np.linspace(0.4, 0.78, 20)[:, None, None]
    a = 1.4 - c
    with h5py.File(folder / 'own.mat', 'w') as file:
        file['u'] = (c - a * np.tanh(a * (x - c * t) / 0.4)).T
    return 'own.mat', '--layout NTX'


def packed_with_a_mask(folder):
    """A packed .nc, whose mask holds for all times."""
    with h5py.File(folder / 'own.nc', 'w') as file:
        file['u'] = np.round(waves(32, 32) / 1e-4).astype('i2')
        file['u'].attrs.update(scale_factor=1e-4, add_offset=0.0, _FillValue=np.int16(-32768))
        file['mask'] = np.tri(32)
    return 'own.nc', '--variables u mask --layout NTHW'


@pytest.mark.parametrize('make', [pascal_and_kelvin, burgers, packed_with_a_mask])
def test_a_file_of_ones_own_goes_from_the_disk_to_a_picture_of_the_prediction(make, tmp_path, monkeypatch, call, plt):
    monkeypatch.chdir(tmp_path)
    source, flags = make(tmp_path)
    code, error, printed = call(['mine', '--source', source, *flags.split(), '--dt', 0.1], prepare)
    assert code == 0 and 'train.h5: 16 trajectories of' in printed, error
    code, error, printed = call(['--data', 'data', '--datasets', 'mine', '--out', 'out/mine', '--steps', 60,
                                 '--batch_size', 4, '--threads', 1, '--device', 'cpu'], train)
    assert code == 0, error
    assert make is packed_with_a_mask or 'the network takes the shape of the data: ' in printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.endswith('x')}
    assert float(rows['mine'][7]) < 0.7, 'VRMSE of one step'
    code, error, _ = call(['--checkpoint', 'out/mine/best.pt', '--device', 'cpu', '--figures', 'pictures'], evaluate)
    assert code == 0 and (tmp_path / 'pictures/fields_mine.png').exists(), error
    test = data.Trajectories('data', 'mine', 'test', 5, None)
    frames = test.windows([(0, 0)], test.frames).numpy()
    if make is burgers:
        frames = frames[:, :, 0]                                        # (N, T, X, C)
    assert evaluate.rollout('out/mine', frames[:, :5], 2).shape == frames[:, 5:7].shape


def test_the_trajectories_are_drawn_by_a_seed_each_into_one_split():
    first = own.splits(20, 0.1, 0.2, seed=0)
    assert {split: len(rows) for split, rows in first.items()} == {'test': 4, 'valid': 2, 'train': 14}
    assert sorted(np.concatenate([*first.values()])) == [*range(20)]
    other = own.splits(20, 0.1, 0.2, seed=1)
    assert [*own.splits(20, 0.1, 0.2, seed=0)['test']] == [*first['test']] != [*other['test']]


def test_what_was_read_is_described():
    u = VALUES.copy()
    u[:, 2, ..., 1] = 0
    lines = own.describe(u, ['p', 'v'])
    assert lines[0] == '(N, T, *space, C) = (5, 6, 4, 8, 2)'
    assert re.fullmatch(r'  p: -\d\.\d+ to \d\.\d+, mean \S+, deviation [01]\.\d+', lines[1])
    assert lines[2].endswith('; the same everywhere in the frames 2')


def test_gaps_are_refused_and_name_their_attribute(tmp_path):
    with h5py.File(tmp_path / 'own.nc', 'w') as file:
        file['u'] = VALUES[..., 0]
        file['u'].attrs['missing_value'] = VALUES[1, 2, 3, 4, 0]
    with pytest.raises(InputError, match='own.nc: /u has gaps, which hold its missing_value'):
        own.read([tmp_path / 'own.nc'], (), 'NTHW')
