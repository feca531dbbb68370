"""Files of one's own, written by the packages that simulators use: every number by its value, and what is refused."""
import importlib.util
import subprocess
import sys
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest

import data
from configs import InputError
from sources import axes, joined, kinds, own, prepare

VALUES = np.random.default_rng(0).normal(size=(5, 6, 4, 8, 2))                          # (N, T, X, Y, C)
NEEDED = 'it writes the files of this test, and the project does not need it'


def package(name):
    return pytest.importorskip(name, reason=NEEDED)


def netcdf(path, dims, form='NETCDF4', coordinates=None, attributes=None, **arrays):
    """Write a file by netCDF4. dims: {name: size}; arrays: {name: (its dims, values[, attributes])}."""
    with package('netCDF4').Dataset(path, 'w', format=form) as file:
        for name, size in dims.items():
            file.createDimension(name, size)
        file.setncatts(attributes or {})
        along = {k: ((k,), v) for k, v in (coordinates or {}).items()}
        for name, (axes, values, *its) in {**along, **arrays}.items():
            values = np.asarray(values)
            variable = file.createVariable(name, values.dtype, axes)
            variable[:] = values
            if its:
                variable.setncatts(*its)
    return path


def matlab(path, **arrays):
    """A .mat of version 7.3 as hdf5storage writes it."""
    package('hdf5storage').savemat(str(path), arrays, format='7.3', appendmat=False)
    return path


def file_of(kind, folder, values):
    """A file of this kind with the variable `u`, as the programs of that kind store it."""
    path = folder / f'own{kind.partition(" ")[0]}'
    if kind == '.npy':
        np.save(path, values)
    elif kind == '.npz':
        np.savez(path, u=values)
    elif kind == '.mat':
        matlab(path, u=values)
    elif kind == '.mat of version 5':
        package('scipy.io').savemat(path, {'u': values})
    elif kind.startswith(kinds.NETCDF):
        dims = {f'a{i}': size for i, size in enumerate(values.shape)}
        netcdf(path, dims, 'NETCDF3_CLASSIC' if '3' in kind else 'NETCDF4', u=(tuple(dims), values))
    else:
        with h5py.File(path, 'w') as file:
            file['u'] = values
    return path


def read(sources, layout, variables=(), **flags):
    """All trajectories of files (N, T, *space, C), in order, and the Source."""
    flags = {'split': 'order', 'valid': 0, 'test': 0.2, **flags}
    flags = own.Own(layout=tuple(layout.split()), variables=tuple(variables), **flags)
    source = own.own_source(sources if isinstance(sources, list) else [sources], flags)
    items = source.items['train'] + source.items['test']
    t = slice(0, source.shape[0])
    return np.concatenate([source.read(piece, slice(n, n + 1), t) for piece, n in items]), source


KINDS = '.npy', '.npz', '.mat', '.mat of version 5', '.nc', '.nc of version 3', '.nc4', '.cdf', '.h5', '.HDF5'


@pytest.mark.parametrize('kind', KINDS)
def test_every_kind_of_file_and_order_of_axes_is_read_by_value(kind, tmp_path):
    for layout, order in (('NTHWC', 'NTXYC'), ('NTCHW', 'NTCXY'), ('cyxnt', 'CYXNT'), ('TXNYC', 'TXNYC')):
        stored = VALUES.transpose(['NTXYC'.index(axis) for axis in order])
        values, source = read(file_of(kind, tmp_path, stored), layout)
        np.testing.assert_array_equal(values, VALUES)
        assert source.attributes['channels'] == (['0', '1'] if kind == '.npy' else ['u_0', 'u_1'])
        part = source.read(*source.items['train'][1][:1], slice(1, 3), slice(2, 4))
        np.testing.assert_array_equal(part, VALUES[1:3, 2:4])


def prepared(call, folder, *flags, name='mine'):
    """Run sources.prepare -> ({split: values}, attributes, what it printed, warnings)."""
    code, error, printed = call([name, '--data', folder / 'data', *flags], prepare)
    assert code == 0, error
    values = {}
    for path in sorted((folder / 'data' / name).glob('*.h5')):
        with h5py.File(path) as file:
            values[path.stem] = file['data'][:]
            attributes = {key: np.ravel(value).tolist() for key, value in file['data'].attrs.items()}
    return values, attributes, printed, error


IN_ORDER = '--split', 'order', '--valid', 0


# ------------------------------------------------------------------------------------------------ files along an axis

def test_files_are_frames_or_parts_of_n_or_channels(tmp_path, capsys):
    for i in range(3):
        (tmp_path / f'run{i}').mkdir()
        for t in range(12):
            np.save(tmp_path / f'run{i}/out_{t}.npy', VALUES[i, t % 6, ..., 0] + t)
    frames = np.stack([VALUES[:3, t % 6] + t for t in range(12)], 1)[..., :1]
    (tmp_path / 'run1/._out_0.npy').write_bytes(b'of macOS')
    (tmp_path / '.trash').mkdir()
    np.save(tmp_path / '.trash/out_12.npy', VALUES[0, 0])
    np.testing.assert_array_equal(read(tmp_path, 'XY')[0], frames)      # a folder of folders
    np.testing.assert_array_equal(read([tmp_path / f'run{i}' for i in (2, 0, 1)], 'XY')[0], frames)
    assert not capsys.readouterr().err
    (tmp_path / 'run2/out_5.npy').unlink()
    read(tmp_path / 'run2', 'XY', frames=4)
    words = 'run2: are out_0.npy out_1.npy out_2.npy ... out_11.npy the frames of one run in their order'
    assert words in capsys.readouterr().err
    values, source = read(tmp_path / 'run1', 'XY', frames=4)
    np.testing.assert_array_equal(values, frames[1].reshape(3, 4, 4, 8, 1))
    assert [len(source.items[split]) for split in ('train', 'test')] == [2, 1]
    np.savez(tmp_path / 'a.npz', u=VALUES[..., 0])
    np.savez_compressed(tmp_path / 'b.npz', v=VALUES[..., 1])
    for name in 'uv':
        np.save(tmp_path / f'{name}.npy', VALUES[..., 'uv'.index(name)])
    for files in ('a.npz', 'b.npz'), ('u.npy', 'v.npy'):
        values, source = read([tmp_path / file for file in files], 'NTXY', ['v', 'u'])
        np.testing.assert_array_equal(values, VALUES[..., ::-1])
        assert source.attributes['channels'] == ['v', 'u']
    values, _ = read([tmp_path / 'u.npy', tmp_path / 'v.npy'], 'NTXY')
    np.testing.assert_array_equal(values[..., 0], np.concatenate([VALUES[..., 0], VALUES[..., 1]]))


def test_a_folder_stands_for_the_folders_of_runs_in_it(tmp_path, call, refused, capsys):
    runs = tmp_path / 'runs'
    for i in range(3):
        (runs / f'run_{i}').mkdir(parents=True)
        for name in 'uv':
            np.save(runs / f'run_{i}/{name}.npy', VALUES[i, ..., 'uv'.index(name)])
    (runs / 'latest').symlink_to(runs / 'run_1')
    np.testing.assert_array_equal(read(runs, 'TXY', ['v', 'u'])[0], VALUES[:3, ..., ::-1])
    assert '6 files are joined as channels of trajectories (N): ' in capsys.readouterr().out
    flags = '--source', runs, '--layout', 'TXY', '--variables', 'u', 'v'
    found, *_ = prepared(call, tmp_path, *flags, '--test_source', runs / 'latest/../run_1', '--valid', 0)
    np.testing.assert_array_equal(found['train'], np.float32(VALUES[[0, 2]]))
    np.testing.assert_array_equal(found['test'], np.float32(VALUES[[1]]))
    read(runs, 'TXY')
    assert 'the names run_2/u run_2/v differ in more than numbers' in capsys.readouterr().err
    flags = ['bad', '--data', tmp_path, *flags]
    v = VALUES[2, ..., 1].copy()
    v[3, 0] = np.nan
    np.save(runs / 'run_2/v.npy', v)
    where = f'{runs}/run_2/u.npy {runs}/run_2/v.npy'
    refused(flags, f'{where}, trajectory 0, frame 3: expected finite', prepare, lines=None)
    v[:, 0] = np.nan
    np.save(runs / 'run_2/v.npy', v)
    refused(flags, f'found numbers where {where} has gaps', prepare, lines=None)
    single = [*flags[:6], 'XY', *flags[7:]]
    for i in range(3):
        for name in 'uv':
            np.save(runs / f'run_{i}/{name}.npy', VALUES[i, 0, ..., 0])
    refused(single, '--layout XY, --frames 0: a trajectory needs two frames', prepare, lines=None)
    (runs / 'run_1/v.npy').unlink()
    (runs / 'latest').unlink()
    words = 'run_1: expected each of --variables u v in one file, as in the others; there is u.npy'
    refused(flags, words, prepare, lines=None)
    np.save(runs / 'u.npy', VALUES[3, ..., 0])
    assert joined.paths_of([runs]) == [runs / 'u.npy']
    assert f'{runs}: its own files are read, and not the 5 in its folders' in capsys.readouterr().err
    for name, dt in ('u', 0.1), ('v', 0.3):
        with h5py.File(tmp_path / f'{name}.h5', 'w') as file:
            file[name] = VALUES[..., 'uv'.index(name)]
            file[name].attrs['dt'] = dt
    files = tmp_path / 'u.h5', tmp_path / 'v.h5'
    refused([*flags[:4], *files, '--layout', 'NTXY', *flags[7:]], 'u.h5: the time between frames is 0.3, in ', prepare)


# ------------------------------------------------------------------------------------------------ numbers of a run

def test_a_part_of_the_axes_makes_a_static_channel(tmp_path):
    u, nu, a, mask = VALUES[..., 0], VALUES[:, 0, 0, 0, 1], VALUES[:, 1, ..., 1], VALUES[0, 0, ..., 1]
    np.savez(tmp_path / 'own.npz', u=u, nu=nu, a=a.swapaxes(1, 2), mask=mask, c=3.0)
    package('scipy.io').savemat(tmp_path / 'own.mat', dict(u=u, nu=nu, a=a.swapaxes(1, 2), mask=mask, c=3.0))
    for file in 'own.npz', 'own.mat':
        values, source = read(tmp_path / file, 'NTXY a=NYX', ['u', 'nu', 'a', 'mask', 'c'])
        parts = u, nu[:, None, None, None], a[:, None], mask, 3.0
        np.testing.assert_array_equal(values, np.stack([np.broadcast_to(part, u.shape) for part in parts], -1))
        assert source.attributes['static'] == ['nu', 'a', 'mask', 'c']
        assert source.attributes['layout'] == ['NTXY', 'nu=N', 'a=NYX', 'mask=XY', 'c=']


def test_names_of_dimensions_say_which_axis_is_meant(tmp_path, refused):
    fields = dict(u=(('run', 'time', 'x', 'y'), VALUES[:4, :, :, :4, 0]), nu=(('run',), VALUES[:4, 0, 0, 0, 1]),
                  profile=(('y',), VALUES[0, 0, :, 0, 1]), mask=(('y', 'x'), VALUES[0, 0, :, :4, 1]))
    path = netcdf(tmp_path / 'own.nc', dict(run=4, time=6, x=4, y=4), **fields)
    values, source = read(path, 'NTXY', [*fields])
    u, nu, profile, mask = (part for _, part in fields.values())
    for c, part in enumerate((u, nu[:, None, None, None], profile, mask.T)):
        np.testing.assert_array_equal(values[..., c], np.broadcast_to(part, values.shape[:-1]))
    assert source.attributes['layout'] == ['NTXY', 'nu=N', 'profile=Y', 'mask=YX']
    fields['v'] = ('run', 'time', 'y', 'x'), fields['u'][1]
    other = netcdf(tmp_path / 'other.nc', dict(run=4, time=6, x=4, y=4), u=fields['v'])
    path = netcdf(tmp_path / 'two.nc', dict(run=4, time=6, x=4, y=4), **fields)
    with h5py.File(path) as file:
        stored = file['v'][:]
    values, _ = read(path, 'NTXY v=NTYX', ['u', 'v'])
    np.testing.assert_array_equal(values[..., 1], stored.swapaxes(2, 3))
    for flags in (path, '--variables', 'u', 'v'), (path, other, '--variables', 'u'):
        refused(['mine', '--data', tmp_path, '--layout', 'NTXY', '--source', *flags],
                "'X': 4, 'Y': 4} {'run': 'N', 'time': 'T', '", prepare, lines=None)
    np.savez(tmp_path / 'plain.npz', u=u, nu=nu, mask=mask)                             # without names of dimensions
    for name, words in dict(nu='along N or X or Y of the axes', mask='along NX or NY or XN').items():
        flags = '--source', tmp_path / 'plain.npz', '--variables', 'u', name, '--layout', 'NTXY'
        refused(['mine', '--data', tmp_path, *flags], words, prepare)


# ------------------------------------------------------------------------------------------------ lengths and splits

def test_trajectories_are_cut_into_pieces_that_stay_in_one_split(tmp_path, call, refused):
    for i, T in enumerate((9, 12, 7, 8, 11)):
        np.save(tmp_path / f'run{i}.npy', np.full((T, 2, 3), 100 * i) + np.arange(T)[:, None, None])
    flags = '--source', *sorted(tmp_path.glob('run*')), '--layout', 'TXY'
    refused(['mine', '--data', tmp_path, *flags],
            f'--frames (none): there are trajectories of 7 frames, in {tmp_path}/run2.npy, to 12; --frames 7 cuts',
            prepare)
    found, _, printed, _ = prepared(call, tmp_path, *flags, '--frames', 4, '--test', 0.4, '--valid', 0)
    numbers = {split: np.unique(values // 100).tolist() for split, values in found.items()}
    assert sorted(numbers['train'] + numbers['test']) == [0, 1, 2, 3, 4] and len(numbers['test']) == 2
    starts = sorted(int(piece[0, 0, 0, 0]) for values in found.values() for piece in values)
    assert starts == [0, 4, 100, 104, 108, 200, 300, 304, 400, 404]
    assert '7 frames at the ends are left out' in printed


def test_one_long_trajectory_is_split_in_time(tmp_path, call):
    np.save(tmp_path / 'long.npy', np.arange(40.)[:, None, None] + np.zeros((2, 3)))
    flags = '--source', tmp_path / 'long.npy', '--layout', 'TXY', '--frames', 4, '--test', 0.2
    found, _, printed, _ = prepared(call, tmp_path, *flags)
    starts = {split: values[:, 0, 0, 0, 0].tolist() for split, values in found.items()}
    assert starts == dict(train=[0, 4, 8, 12, 16, 20, 24], valid=[28], test=[32, 36])
    assert 'one trajectory, which is split in time' in printed


def test_the_split_is_drawn_by_the_seed_or_in_order():
    pieces = [[i] for i in range(20)]
    first, again, other, order = (own.splits(pieces, own.Own(test=0.2, **flags)) for flags in (
        {}, {}, dict(seed=1), dict(split='order')))
    assert first == again != other and sorted(np.concatenate([*first.values()])) == [*range(20)]
    assert {split: len(numbers) for split, numbers in first.items()} == {'test': 4, 'valid': 2, 'train': 14}
    assert [*order['train'], *order['valid'], *order['test']] == [*range(20)]
    assert [len(some) for some in own.splits(pieces[:3], own.Own()).values()] == [1, 0, 2], 'one for testing at least'


def test_a_given_test_set_stays_it_and_frames_in_both_sets_get_a_line(tmp_path, call, refused):
    u = VALUES.transpose(0, 1, 4, 2, 3)                                                 # (N, T, C, X, Y)
    np.save(tmp_path / 'train.npy', u[:4])
    np.save(tmp_path / 'test.npy', u[3:])
    flags = '--source', tmp_path / 'train.npy', '--layout', 'NTCXY', '--channels', 'p', 'v', *IN_ORDER
    found, attributes, _, error = prepared(call, tmp_path, *flags, '--test_source', tmp_path / 'test.npy')
    np.testing.assert_array_equal(found['train'], VALUES[:4].astype('f4'))
    np.testing.assert_array_equal(found['test'], VALUES[3:].astype('f4'))
    assert attributes['channels'] == ['p', 'v']
    assert '6 of 12 frames of the test set are in the training set as well' in error


# ------------------------------------------------------------------------------------------------ gaps

def test_gaps_that_are_the_same_in_all_frames_become_a_mask(tmp_path, monkeypatch, call, refused):
    values = 5 + VALUES
    values[..., 1, 2:4, 0] = np.nan
    values[..., 1, 2, 1] = np.nan
    monkeypatch.setattr(prepare, 'BLOCK', 4 * 4 * VALUES[0, 0].size)                    # four of six frames at once
    np.save(tmp_path / 'ocean.npy', values)
    flags = '--source', tmp_path / 'ocean.npy', '--layout', 'NTXYC', *IN_ORDER
    found, attributes, printed, _ = prepared(call, tmp_path, *flags)
    both = np.concatenate([found['train'], found['test']])
    mask = np.ones((4, 8))
    mask[1, 2:4] = 0
    assert attributes['channels'] == ['0', '1', 'mask'] and attributes['static'] == ['mask']
    np.testing.assert_array_equal(both[..., 2], np.broadcast_to(mask, both.shape[:-1]))
    means = np.nanmean(values, (0, 1, 2, 3))
    np.testing.assert_allclose(both[..., :2], np.where(np.isnan(values), means, values), rtol=1e-6)
    assert '6.2% of the points are gaps in all frames' in printed
    found, *_ = prepared(call, tmp_path, *flags, '--nan_to_num', name='zeros')
    np.testing.assert_array_equal(np.concatenate([found['train'], found['test']]), np.nan_to_num(values).astype('f4'))
    places = (((4, 5, 3, 3, 1), np.nan), ((0, 0, 1, 1, 1), np.inf), ((0, 0, 1, 1, 1), 1e39),
              ((2, 2, 1, 2, 0), 1.0), ((2, 2, 1, 2, 0), np.inf))
    for n, (place, value) in enumerate(places):
        other = values.copy()
        other[place] = value
        np.save(tmp_path / 'other.npy', other)
        error, _ = refused(['bad', '--data', tmp_path, '--source', tmp_path / 'other.npy', *flags[2:]],
                           f'other.npy, trajectory {place[0]}, frame {place[1]}: expected finite values, or nan at '
                           f'the same points of all frames', prepare, lines=None)
        assert 'Warning' not in error and not (tmp_path / 'bad').exists()
        if value == value and abs(value) > 1:                                   # infinity is not a gap
            refused(['bad', '--data', tmp_path, '--source', tmp_path / 'other.npy', *flags[2:], '--nan_to_num'],
                    f'frame {place[1]}: expected finite values, or', prepare, lines=None)
            continue
        found, *_ = prepared(call, tmp_path, '--source', tmp_path / 'other.npy', *flags[2:], '--nan_to_num',
                             name=f'zeros{n}')
        assert np.concatenate([found['train'], found['test']])[place] == np.nan_to_num(value)
    refused(['bad', '--data', tmp_path, *flags, '--channels', 'u', 'mask'], 'give it another name by', prepare)


# ------------------------------------------------------------------------------------------------ what a file knows

def test_uneven_times_of_a_tracker_and_grid_points_are_refused_unless_accepted(tmp_path, call, refused):
    pde = package('pde')
    grid = pde.UnitGrid([8, 6])
    for i in range(12):
        field = pde.ScalarField.random_uniform(grid, rng=np.random.default_rng(i))
        for name, times in ('even', 0.5 * np.arange(6)), ('uneven', (0, 0.3, 0.5, 0.8, 1, 1.3)):
            (tmp_path / name).mkdir(exist_ok=True)
            storage = pde.FileStorage(tmp_path / name / f'run_{i}.hdf5')
            storage.start_writing(field)
            for time in times:
                storage.append((1 + time) * field, time)
            storage.close()
    found, attributes, _, _ = prepared(call, tmp_path, '--source', tmp_path / 'even', '--layout', 'TXY', *IN_ORDER)
    assert attributes['dt'] == [0.5] and attributes['channels'] == ['data'] and found['train'].shape == (11, 6, 8, 6, 1)
    expected = pde.ScalarField.random_uniform(grid, rng=np.random.default_rng(10)).data * 1.5
    np.testing.assert_allclose(found['train'][10, 1, ..., 0], expected, rtol=1e-6)
    flags = '--source', tmp_path / 'uneven', '--layout', 'TXY'
    refused(['bad', '--data', tmp_path, *flags], 'times: the steps of 0 0.3 0.5 0.8 1 ... are uneven; --uneven',
            prepare, lines=None)
    _, attributes, _, _ = prepared(call, tmp_path, *flags, '--uneven', '--dt', 0.25, name='accepted')
    assert attributes['dt'] == [0.25]
    with pytest.raises(InputError, match='a.h5: x: the steps of 0 1 2.02 ... are uneven'):
        axes.even_steps('a.h5: x', np.array([[0, 1, 2.02]]), False)
    nodes = np.cos(np.pi * np.arange(4) / 3)
    plane = np.add.outer(nodes, np.zeros(6))
    path = netcdf(tmp_path / 'plane.nc', dict(run=5, y=4, across=6), lat=(('y', 'across'), plane),
                  u=(('run', 'y', 'across'), VALUES[:, 0, :, :6, 0]))
    refused(['bad', '--data', tmp_path, '--source', path, '--layout', 'NXY'], 'plane.nc: lat: the steps of 1 0.5',
            prepare, lines=None)
    for name in 'x', 'lat':
        path = netcdf(tmp_path / f'{name}.nc', {'run': 5, 'time': 6, name: 4}, coordinates={name: nodes},
                      u=(('run', 'time', name), VALUES[..., 0, 0]))
        refused(['bad', '--data', tmp_path, '--source', path, '--layout', 'NTX'], f'{name}: the steps of 1 0.5',
                prepare)


def test_times_and_grid_points_by_the_names_of_dedalus(tmp_path, refused):
    """As its file handlers of version 3 write them; version 2 calls its grids x/1.0."""
    nodes = np.cos(np.pi * (np.arange(8) + 0.5) / 8)
    for i, (name, points) in enumerate({'s1': 0.5 * np.arange(8), 's2': nodes, 's3': nodes}.items()):
        with h5py.File(tmp_path / f'{name}.h5', 'w') as file:
            file['tasks/velocity'] = VALUES[i].transpose(0, 3, 1, 2)
            file['scales/sim_time'] = 3 * i + 0.25 * np.arange(6)
            file['scales/timestep'] = np.full(6, 0.01)
            file[f'scales/{"y/1.0" if i == 2 else "y_hash_5d1e"}'] = points
    values, source = read(tmp_path / 's1.h5', 'TCXY', ['tasks/velocity'], frames=3)
    np.testing.assert_array_equal(values, VALUES[0].reshape(2, 3, 4, 8, 2))
    assert source.attributes['dt'] == 0.25
    for name in 's2', 's3':
        refused(['bad', '--data', tmp_path, '--source', tmp_path / f'{name}.h5', '--variables', 'tasks/velocity',
                 '--layout', 'TCXY'], f'{name}.h5: scales/y: the steps of 0.98', prepare)


def test_a_dataset_keeps_its_names_and_dt_when_it_is_cut_or_joined(tmp_path, call, refused):
    u = np.concatenate([VALUES, VALUES[:, :1, ..., :1].repeat(6, 1)], -1).astype(np.float32)
    for name, channels, dt in ('a', 'uvm', 0.5), ('b', 'uvm', 0.5), ('swapped', 'vum', 0.5), ('slower', 'uvm', 0.25):
        data.write(tmp_path / name, u, u[:1], channels=[*channels], static=['m'], dt=dt)
    a, b, swapped, slower = (tmp_path / name / 'train.h5' for name in ('a', 'b', 'swapped', 'slower'))
    flags = '--layout', 'NTXYC', '--frames', 3
    found, attributes, printed, _ = prepared(call, tmp_path, '--source', a, b, *flags)
    assert sum(len(values) for values in found.values()) == 20 and 'dt 0.5, of the files' in printed
    assert [attributes[name] for name in ('channels', 'static', 'dt')] == [['u', 'v', 'm'], ['m'], [0.5]]
    found, attributes, _, _ = prepared(call, tmp_path, '--source', a, '--channels', *'pqr', *flags, name='named')
    assert [attributes[name] for name in ('channels', 'static')] == [['p', 'q', 'r'], ['r']]
    for other, words in (swapped, 'has the channels u v m, but'), (slower, 'slower/train.h5 0.25; --uneven'):
        refused(['mine', '--data', tmp_path / 'new', '--source', a, other, *flags], words, prepare, lines=None)


@pytest.mark.parametrize('said, dt', [
    (0.25, 0.25), ([0.25], 0.25), (np.float32(0.25), 0.25), (0, None), ([0.1, 0.2], None), ('fast', None)])
def test_a_number_dt_is_the_time_step_of_files_without_times(said, dt, tmp_path, capsys):
    np.savez(tmp_path / 'a.npz', u=VALUES, dt=said)
    np.savez_compressed(tmp_path / 'b.npz', u=VALUES, dt=said)
    np.savez(tmp_path / 'timed.npz', u=VALUES, dt=said, t=0.125 * np.arange(6))
    for place in 'file', 'array':
        with h5py.File(tmp_path / f'{place}.h5', 'w') as file:
            file['u'] = VALUES
            (file if place == 'file' else file['u']).attrs['dt'] = said
    names = ['a.npz', 'b.npz', 'file.h5', 'array.h5']
    if importlib.util.find_spec('netCDF4'):
        netcdf(tmp_path / 'array.nc', dict(zip('abcde', VALUES.shape)), u=(tuple('abcde'), VALUES, dict(dt=said)))
        names.append('array.nc')
    for name in names:
        assert read(tmp_path / name, 'NTXYC', ['u'])[1].attributes['dt'] == dt
    capsys.readouterr()
    assert read(tmp_path / 'timed.npz', 'NTXYC', ['u'])[1].attributes['dt'] == 0.125
    words = 'timed.npz: dt is 0.25, but its times have steps of 0.125, which count; --dt says which is right'
    assert (words in capsys.readouterr().err) == (dt is not None)
    read(tmp_path / 'timed.npz', 'NTXYC', ['u'], dt=0.125)
    assert not capsys.readouterr().err


def test_times_and_dt_are_those_of_the_group_of_the_field_or_around_it(tmp_path, refused):
    with h5py.File(tmp_path / 'a.h5', 'w') as file:
        file['a/time'], file['b/time'], file['time'] = 7. * np.arange(6), 0.5 * np.arange(6), range(6)
        file['b/run/u'] = VALUES
        file['c/u'], file['c/dt'], file['dt'] = VALUES, [[2.0]], 1.0
        file['c/dt'].attrs['units'] = np.array([b'hours'])
        file['link'] = h5py.SoftLink('/c/u')
    for name, dt in ('b/run/u', 0.5), ('link', 1):
        assert read(tmp_path / 'a.h5', 'NTXYC', [name])[1].attributes['dt'] == dt
    with h5py.File(tmp_path / 'a.h5', 'a') as file:
        for name in 'time', 'a/time', 'b/time':
            del file[name]
    assert read(tmp_path / 'a.h5', 'NTXYC', ['c/u'])[1].attributes['dt'] == 7200
    for i in range(6):
        np.savez(tmp_path / f'f{i}.npz', u=VALUES[0, i], T=300 + 2 * i, time=0.1 * i)      # T: a temperature
    frames = [*tmp_path.glob('f*')]
    assert read(frames, 'XYC', ['u'], frames=2)[1].attributes['dt'] == pytest.approx(0.1)
    for dt, words in ([0.5] * 5, ''), ([0.5] * 4 + [0.25], 'the time between frames is 0.5, in'):
        np.savez(tmp_path / 'each.npz', u=VALUES, dt=dt)
        if words:
            with pytest.raises(InputError, match=words):
                read(tmp_path / 'each.npz', 'NTXYC', ['u'])
        else:
            assert read(tmp_path / 'each.npz', 'NTXYC', ['u'])[1].attributes['dt'] == 0.5


@pytest.mark.parametrize('names, said', [
    ([f'u_{t:.1e}' for t in 1e-4 * np.arange(5, 13)], False), ([f't_{t}' for t in range(-3, 5)], False),
    ([f't=-{t}.5' for t in range(8, 0, -1)], False), ([f'Re100.{i}' for i in range(5, 13)], False),
    ([f'u_t{t:.2e}' for t in np.linspace(0.01, 0.15, 8)], False), ([f'{i}_t{i * 0.1:.1f}' for i in range(8)], False),
    ([f't_{t}' for t in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)], False),
    ([f'{i:03}_t{i * 0.5:.1f}' for i in (*range(5), *range(6, 9))], True), ([f'u_{i}' for i in (*range(7), 8)], True),
    ([*'abcdefgh'], True), ([f'run{r}_{i}' for r in (0, 1) for i in range(4)], True),
    (['a', *(f'u_{i}' for i in range(7))], True)])
def test_frames_come_in_the_order_of_the_numbers_in_their_names(names, said, tmp_path, capsys):
    for folder in 'ab':                                                 # each by itself
        (tmp_path / folder).mkdir()
        for i, name in enumerate(names):
            np.save(tmp_path / f'{folder}/{name}.npy', np.full((4, 8), i))
    values, _ = read([tmp_path / 'b', tmp_path / 'a'], 'XY', frames=2)
    np.testing.assert_array_equal(values[..., 0, 0, 0].ravel(), [*range(8)] * 2)
    assert ('in their order, and is none missing?' in capsys.readouterr().err) == said


def test_a_variable_a_file_beside_others_with_equal_numbers_makes_channels(tmp_path, capsys):
    for run, i in np.ndindex(3, 6):
        folder = tmp_path / f'sim_{run}'
        folder.mkdir(exist_ok=True)
        for c, name in enumerate(('density', 'p')):
            np.save(folder / f'{name}_{i:04}.npy', VALUES[run, i, ..., c])
    values, source = read(tmp_path, 'XY', ['p', 'density'])
    np.testing.assert_array_equal(values, VALUES[:3, ..., ::-1])
    assert source.attributes['channels'] == ['p', 'density'] and not capsys.readouterr().err
    with pytest.raises(InputError, match=r'density_0000.npy ... p_0005.npy are 2 kinds of files; name by --variables'):
        read(tmp_path, 'XY')
    (tmp_path / 'sim_1/p_0003.npy').unlink()
    with pytest.raises(InputError, match='sim_1: expected each of --variables p density in one file'):
        read(tmp_path, 'XY', ['p', 'density'])
    for run in range(3):
        for c, name in enumerate('uv'):
            np.save(tmp_path / f'{name}_run{run}.npy', VALUES[run, ..., c])
    values, _ = read([*tmp_path.glob('*_run*')], 'TXY', ['u', 'v'])
    np.testing.assert_array_equal(values, VALUES[:3])
    (tmp_path / 'dots').mkdir()
    for i, (c, name) in product(range(6), enumerate(('u10', 'v10'))):
        np.save(tmp_path / f'dots/{name}_Re100.{i + 7}.npy', VALUES[0, i, ..., c])
    values, _ = read(tmp_path / 'dots', 'XY', ['u10', 'v10'], frames=2)
    np.testing.assert_array_equal(values.reshape(VALUES[0].shape), VALUES[0])


def test_a_folder_a_variable_gets_a_line(tmp_path, capsys):
    for run, (c, name) in product(range(3), enumerate('uv')):
        (tmp_path / name).mkdir(exist_ok=True)
        np.save(tmp_path / f'{name}/run_{run}.npy', VALUES[run, ..., c])
    read(tmp_path, 'TXY')
    words = 'the names u/run_2 v/run_2 differ in more than numbers, and each file is a trajectory'
    assert words in capsys.readouterr().err


def test_files_that_are_links_are_files_of_their_own(tmp_path):
    np.save(tmp_path / 'start.npy', VALUES[0, 0, ..., 0])
    for run in range(3):
        folder = tmp_path / f'runs/run_{run}'
        folder.mkdir(parents=True)
        (folder / 'f_0.npy').symlink_to(tmp_path / 'start.npy')
        for i in range(1, 6):
            np.save(folder / f'f_{i}.npy', VALUES[run, i, ..., 0])
    values, source = read(tmp_path / 'runs', 'XY', test_source=(tmp_path / 'runs/run_1',))
    assert values.shape == (3, 6, 4, 8, 1) and len(source.items['test']) == 1
    np.testing.assert_array_equal(values[:, 1:, ..., 0], VALUES[[0, 2, 1], 1:, ..., 0])
    assert (values[:, 0, ..., 0] == VALUES[0, 0, ..., 0]).all()
    before = joined.paths_of([tmp_path / 'runs'])
    (tmp_path / 'runs/run_latest').symlink_to(tmp_path / 'runs/run_0')
    assert joined.paths_of([tmp_path / 'runs']) == before, 'a folder that is a link counts once, under its own name'


def test_times_that_are_not_used_or_go_back_or_on_in_another_file_get_a_line(tmp_path, capsys):
    for name, t in ('long', np.arange(7) * 0.1), ('dates', np.arange(6).astype('datetime64[h]')):
        np.savez(tmp_path / f'{name}.npz', u=VALUES, t=t)
        read(tmp_path / f'{name}.npz', 'NTXYC', ['u'])
        assert f'dt {0.1 if name == "long" else 3600}, of the files' in capsys.readouterr().out
    np.savez(tmp_path / 'months.npz', u=VALUES, t=np.arange(6).astype('datetime64[M]') - np.datetime64('1970-01'))
    read(tmp_path / 'months.npz', 'NTXYC', ['u'])
    assert 'months.npz: t is no number of each frame, and is not used' in capsys.readouterr().err
    for i, t in enumerate((0, 0.5, 0.25, 0.75, 1, 1.25)):
        np.savez(tmp_path / f'f_{i}.npz', u=VALUES[0, i], t=t)
    for uneven in False, True:
        with pytest.raises(InputError, match='t goes back: the order of the names is not that of time'):
            read([*tmp_path.glob('f_*')], 'XYC', ['u'], frames=3, uneven=uneven)
    for start, said in (0.0, False), (0.6, True), (0.5, True):
        for i in range(3):
            np.savez(tmp_path / f's{i}.npz', u=VALUES[i], t=0.1 * np.arange(6) + start * i)
        capsys.readouterr()
        read([*tmp_path.glob('s?.npz')], 'TXYC', ['u'])
        assert ('s1.npz begins where ' in capsys.readouterr().err) == said
    with h5py.File(tmp_path / 'starts.h5', 'w') as file:
        file['u'], file['time'] = VALUES, np.arange(5.0)
        file['time'].make_scale('run')
        file['u'].dims[0].attach_scale(file['time'])
    read(tmp_path / 'starts.h5', 'NTXYC', ['u'])
    assert 'starts.h5: time is no number of each frame, and is not used' in capsys.readouterr().err


def test_frames_of_a_run_have_all_its_trajectories(tmp_path):
    for i in range(6):
        np.save(tmp_path / f'f_{i}.npy', VALUES[:5 - (i == 4), i])
    with pytest.raises(InputError, match='f_4.npy: 4 trajectories, in .*f_0.npy 5'):
        read(tmp_path, 'NXYC')


def test_groups_of_one_file_are_runs_or_frames(tmp_path):
    with h5py.File(tmp_path / 'all.h5', 'w') as file:
        for n in range(11, 0, -1):
            for c, name in enumerate('uv'):
                file[f'run_{n}/{name}'] = n + VALUES[0, ..., c]
        file['about/version'] = 1.0
        file['t'], file['bed'] = np.arange(6) / 4, VALUES[0, 0, ..., 0]             # of all runs
    for n in 0, 9:
        with h5py.File(tmp_path / f'frames_{n}.h5', 'w') as file:
            for t, c in product(range(6), range(2)):
                file[f'{t}/{"uv"[c]}'] = VALUES[n // 9, t, ..., c]
    values, _ = read(tmp_path / 'all.h5', 'TXY', 'uv')
    np.testing.assert_array_equal(values, np.stack([n + VALUES[0] for n in range(1, 12)]))
    np.testing.assert_array_equal(read([tmp_path / f'all.h5/run_{n}' for n in (3, 10, 4)], 'TXY', 'uv')[0],
                                  np.stack([n + VALUES[0] for n in (3, 4, 10)]))
    values, source = read(tmp_path / 'all.h5', 'TXY', ['u', 'bed'])
    assert source.attributes['static'] == ['bed'] and source.attributes['dt'] == 0.25
    np.testing.assert_array_equal(values[:, 0, ..., 1], np.broadcast_to(VALUES[0, 0, ..., 0], (11, 4, 8)))
    values, _ = read([tmp_path / 'frames_0.h5', tmp_path / 'frames_9.h5'], 'XY', 'uv')
    np.testing.assert_array_equal(values, VALUES[:2])
    with h5py.File(tmp_path / 'all.h5', 'a') as file:
        del file['run_7/v']
    with pytest.raises(InputError, match='--variables v: not in .*all.h5/run_7, which has u'):
        read(tmp_path / 'all.h5', 'TXY', 'uv')
    with pytest.raises(InputError, match='all.h5: there is no group run_99'):
        read(tmp_path / 'all.h5/run_99', 'TXY', 'uv')
    (tmp_path / 'params').mkdir()
    for i in range(4):                                                              # no runs but what is about one
        with h5py.File(tmp_path / f'params/{i}.h5', 'w') as file:
            file['u'], file['params/nu'], file['init/nu'] = VALUES[i, ..., 0], 0.5, 0.7
            file.attrs['nu'] = 0.1 * i
    values, _ = read(tmp_path / 'params', 'TXY', ['u', 'nu'])
    assert values[:, 0, 0, 0, 1].tolist() == [0.1 * i for i in range(4)]
    with h5py.File(tmp_path / 'own.h5', 'w') as file:
        file['nu'], file['dt'], file['rlat'] = 9.0, 9.0, np.arange(4.0)
        file['rlat'].make_scale('rlat')
        for i in range(4):
            file[f'run_{i}/u'] = VALUES[i, ..., 0]
            file[f'run_{i}/u'].dims[1].attach_scale(file['rlat'])
            file[f'run_{i}'].attrs.update(nu=0.1 * i, dt=0.2)
        file['run_last'] = h5py.SoftLink('/run_3')
    values, source = read(tmp_path / 'own.h5', 'TXY', ['u', 'nu'])
    assert values[:, 0, 0, 0, 1].tolist() == [0.1 * i for i in range(4)]
    assert source.attributes['dt'] == 0.2 and 'step of rlat is 1' in source.attributes['said']


def test_names_of_dimensions_count_in_hdf5_too(tmp_path):
    with h5py.File(tmp_path / 'a.h5', 'w') as file:
        file['u'] = VALUES[..., 0].transpose(1, 0, 2, 3)
        for name, size in ('time', 6), ('run', 5), ('lat', 4), ('lon', 8):
            file[name] = 0.5 * np.arange(size)
            file[name].make_scale(name)
        for i, name in enumerate(('time', 'run', 'lat', 'lon')):
            file['u'].dims[i].attach_scale(file[name])
    values, source = read(tmp_path / 'a.h5', 'TNXY', ['u'])
    np.testing.assert_array_equal(values, VALUES[..., :1])
    assert source.attributes['dt'] == 0.5 and 'axis of lon is Y' in source.attributes['said']
    with pytest.raises(InputError, match='u has the shape .6, 5, 4, 8. time run lat lon, along none'):
        read(tmp_path / 'a.h5', 'NXYT', ['u'])
    with h5py.File(tmp_path / 'a.h5', 'a') as file:
        del file['lon']
    assert read(tmp_path / 'a.h5', 'TNXY', ['u'])[0].shape == (5, 6, 4, 8, 1)


def test_a_mask_in_each_of_single_frames_is_static(tmp_path):
    for i in range(6):
        np.savez(tmp_path / f'f{i}.npz', u=VALUES[0, i, ..., 0], mask=VALUES[0, 0, ..., 1] > 0)
    _, source = read(tmp_path, 'XY', ['u', 'mask'], frames=2)
    assert source.attributes['static'] == ['mask']


def test_what_differs_between_frames_is_no_static_channel(tmp_path):
    for i in range(6):
        others = dict(amp=float(i), nu=0.1, k=i + np.arange(4), c=np.arange(4))
        np.savez(tmp_path / f'f{i}.npz', u=VALUES[0, i, ..., 0], **others)
    values, source = read(tmp_path, 'XY k=X c=X', ['u', 'amp', 'nu', 'k', 'c'], frames=2)
    assert source.attributes['static'] == ['nu', 'c']
    np.testing.assert_array_equal(values[..., 0, 0, 1].ravel(), range(6))


def test_a_layout_against_the_names_of_dimensions_is_refused(tmp_path):
    path = netcdf(tmp_path / 'a.nc', dict(time=6, member=5, lat=4, lon=8),
                  u=(('time', 'member', 'lat', 'lon'), VALUES[..., 0].transpose(1, 0, 2, 3)))
    assert read(path, 'TNXY', ['u'])[0].shape == (5, 6, 4, 8, 1)
    with pytest.raises(InputError, match='a.nc: u has the shape .* time member lat lon, along none of'):
        read(path, 'NXTY', ['u'])
    times = {name: ((name,), step * np.arange(6), dict(units='hours')) for name, step in (('time', 24), ('step', 6))}
    path = netcdf(tmp_path / 'b.nc', dict(time=6, step=6, lat=4), u=((*times, 'lat'), np.ones((6, 6, 4))), **times)
    assert read(path, 'NTX', ['u'])[1].attributes['dt'] == 21600, 'of the axis T, and not of starts'


def test_a_number_dt_of_something_else_is_not_the_time_step(tmp_path, refused):
    with h5py.File(tmp_path / 'a.h5', 'w') as file:
        file['energy'], file['u'], file['solver/dt'] = np.zeros(9), VALUES, 0.001
        file['energy'].attrs['dt'] = 0.001
        file.attrs['dT'] = 10.0
    assert read(tmp_path / 'a.h5', 'NTXYC', ['u'])[1].attributes['dt'] is None
    with h5py.File(tmp_path / 'a.h5', 'a') as file:
        file.attrs['dt'] = 0.5
        file['u'].attrs['dt'] = 0.25
    assert read(tmp_path / 'a.h5', 'NTXYC', ['u'])[1].attributes['dt'] == 0.25
    for i, said in enumerate([dict(t=0.1 * np.arange(6)), dict(dt=0.1), dict(dt=0.5)]):
        np.savez(tmp_path / f'run{i}.npz', u=VALUES[i], **said)
    assert read([tmp_path / f'run{i}.npz' for i in (0, 1)], 'TXYC', ['u'])[1].attributes['dt'] == pytest.approx(0.1)
    refused(['mine', '--data', tmp_path, '--source', *tmp_path.glob('run*'), '--layout', 'TXYC', '--variables', 'u'],
            'run2.npz: the time between frames is 0.5, in', prepare, lines=None)


@pytest.mark.parametrize('name, unit, values, dt', [
    ('XTIME', 'minutes since 2000-01-01 00:00:00', 60 * np.arange(6), 3600),        # as WRF and ROMS write them
    ('ocean_time', 'seconds since 2000-01-01', 3600 * np.arange(6), 3600),
    ('time', 'h', np.arange(6), 3600), ('t', 'ms', np.arange(6), 1e-3), ('T', 'second', 3600 * np.arange(6), 3600),
    ('time', ' Hours  Since 2000-01-01', np.arange(6), 3600), ('TIME', 'millisec', np.arange(6), 1e-3),
    ('t-coordinate', '', 0.05 * np.arange(7), 0.05)])
def test_times_have_a_unit_since_a_date_or_a_usual_name(name, unit, values, dt, tmp_path):
    path = netcdf(tmp_path / 'a.nc', dict(T=6, ends=7, y=4, x=8), attributes=dict(dt=60, DT=60.0),
                  u=(('T', 'y', 'x'), VALUES[0, ..., 0]),
                  **{name: (('T' if len(values) == 6 else 'ends',), values, dict(units=unit))})
    assert read(path, 'TXY', ['u'], frames=3)[1].attributes['dt'] == pytest.approx(dt)


@pytest.mark.parametrize('calendar, dates, dt', [
    ('standard', [f'2020-02-29 0{hour}:00:00' for hour in range(6)], 3600),
    ('standard', [f'2000-1-1 {hour}:0:0' for hour in range(6)], 3600),
    ('standard', [f'2020-01-01T00:00:0{i // 4}.{i % 4 * 25:02}' for i in range(6)], 0.25),
    ('360_day', [f'2000-02-{day}' for day in range(25, 31)], 86400),
    ('noleap', [f'2000-0{2 + (day > 28)}-{day - 28 * (day > 28)}' for day in range(26, 32)], 86400)])
def test_single_times_count_from_their_date(calendar, dates, dt, tmp_path):
    """xarray writes a single time as 0 hours since itself. The time at which a forecast began does not change."""
    for i, date in enumerate(dates):
        itself = ('valid_time',), [0], dict(units=f'hours since {date}', calendar=calendar)
        netcdf(tmp_path / f'frame_{i}.nc', dict(valid_time=1, y=4, x=8), valid_time=itself,
               u=(('valid_time', 'y', 'x'), VALUES[:1, i, ..., 0]), time=((), 0, dict(units='hours since 2020-01-01')))
    assert read(tmp_path, 'XY', ['u'], frames=3)[1].attributes['dt'] == pytest.approx(dt)
    for path in [*tmp_path.iterdir()]:
        path.rename(path.with_suffix('.h5'))
    assert read(tmp_path, 'XY', ['u'], frames=3)[1].attributes['dt'] == pytest.approx(dt), 'read as HDF5'


def test_files_of_different_variables_need_the_same_times_and_grid_points(tmp_path, call, refused):
    x = np.arange(4.)
    np.savez(tmp_path / 'u.npz', u=VALUES[..., 0], t=0.1 * np.arange(6), x=x)
    np.savez(tmp_path / 'v.npz', v=VALUES[..., 1], t=0.1 * np.arange(6), x=x)
    flags = ['mine', '--data', tmp_path, '--variables', 'u', 'v', '--layout', 'NTXY', '--source', tmp_path / 'u.npz']
    for change in dict(t=0.2 * np.arange(6)), dict(t=1 + 0.1 * np.arange(6)), dict(x=-x):
        np.savez(tmp_path / 'other.npz', v=VALUES[..., 1], **{'t': 0.1 * np.arange(6), 'x': x, **change})
        words = f'u.npz: {[*change][0]} differs from that of {tmp_path}/other.npz; --uneven'
        refused([*flags, tmp_path / 'other.npz'], words, prepare, lines=None)
    assert call([*flags, tmp_path / 'v.npz'], prepare)[0] == 0
    for name, year in ('p', 2020), ('q', 2021):
        times = ('time',), np.arange(6), dict(units=f'hours since {year}-01-01')
        netcdf(tmp_path / f'{name}.nc', dict(time=6, y=4), time=times, **{name: (('time', 'y'), VALUES[0, ..., 0, 0])})
    flags = ['own', '--data', tmp_path, '--variables', 'p', 'q', '--layout', 'TX', '--frames', 2]
    flags += ['--source', tmp_path / 'p.nc', tmp_path / 'q.nc']
    refused(flags, 'q.nc: time differs from that of', prepare, lines=None)
    assert call([*flags, '--uneven'], prepare)[0] == 0


def test_arrays_whose_channels_share_their_names_are_told_apart_by_a_flag(tmp_path, refused):
    with h5py.File(tmp_path / 'a.h5', 'w') as file:
        for group in 'ab':
            file[f'{group}/data'] = VALUES + (group == 'b')
            file[f'{group}/data'].attrs['channels'] = ['u', 'v']
    flags = 'NTXYC', ['a/data', 'b/data']
    values, source = read(tmp_path / 'a.h5', *flags, channels=[*'pqrs'])
    np.testing.assert_array_equal(values, np.concatenate([VALUES, VALUES + 1], -1))
    assert source.attributes['channels'] == [*'pqrs']
    refused(['mine', '--data', tmp_path, '--source', tmp_path / 'a.h5', '--layout', 'NTXYC', '--variables', *flags[1]],
            'a.h5: the channels u v u v need different names; give them by --channels', prepare, lines=None)


@pytest.mark.parametrize('kind', ['.nc', '.h5'])
def test_grids_that_differ_between_files_are_refused_and_units_get_a_line(kind, tmp_path, call, refused):
    lat = np.linspace(10, 40, 4)
    runs = {'first': (lat, 'Pa'), 'again': (lat, 'Pa'), 'hecto': (lat, 'hPa'), 'silent': (lat, ''),
            'flipped': (lat[::-1], 'Pa'), 'finer': (lat / 2, 'Pa')}
    for i, (name, (points, unit)) in enumerate(runs.items()):
        path, p = tmp_path / f'{name}{kind}', VALUES[0, ..., 0] + i
        if kind == '.nc':
            netcdf(path, dict(t=6, lat=4, lon=8), coordinates=dict(lat=points),
                   p=(('t', 'lat', 'lon'), p, dict(units=unit)))
        else:
            with h5py.File(path, 'w') as file:
                file.update(p=p, lat=points)
                file['p'].attrs['units'] = unit
    def flags(*names):
        return '--source', *(tmp_path / f'{name}{kind}' for name in names), '--variables', 'p', '--layout', 'TXY'
    for name, words in ('flipped', '-10; turn the axis'), ('finer', '5; --uneven'):
        refused(['bad', '--data', tmp_path, *flags('first', name)], words, prepare, lines=None)
        assert prepared(call, tmp_path, *flags('first', name), '--uneven', *IN_ORDER, name=name)[0]
    planes = [np.meshgrid(points, np.arange(8.), indexing='ij') for points in (lat, lat[::-1])]
    for name, (x, y) in zip(('one', 'two'), planes):
        np.savez(tmp_path / f'{name}.npz', p=VALUES[0, ..., 0], x=x, y=y)
    np.savez(tmp_path / 'noisy.npz', p=VALUES[0, ..., 0] + 9, x=planes[0][0] + 1e-15 * planes[0][1], y=planes[0][1])
    read([tmp_path / 'one.npz', tmp_path / 'noisy.npz'], 'TXY', ['p'])
    refused(['bad', '--data', tmp_path, '--source', tmp_path / 'one.npz', tmp_path / 'two.npz', *flags()[1:]],
            'one.npz: the step of x across is 10, in', prepare, lines=None)
    *_, error = prepared(call, tmp_path, *flags('first', 'again', 'silent'), *IN_ORDER, name='same')
    assert not error
    *_, error = prepared(call, tmp_path, *flags('silent', 'first', 'hecto', 'again'), *IN_ORDER, name='other')
    assert f'p is in Pa in {tmp_path}/again{kind}, in hPa in {tmp_path}/hecto{kind}' in error
    assert error.count('hPa') == 1


# ------------------------------------------------------------------------------------------------ kinds of files

@pytest.mark.parametrize('form', ['NETCDF3_CLASSIC', 'NETCDF4'])
def test_netcdf_is_read_as_its_own_library_reads_it(form, tmp_path):
    netCDF4 = package('netCDF4')
    counts = np.random.default_rng(3).integers(0, 250, (5, 6, 4, 8)).astype('u1')
    with netCDF4.Dataset(tmp_path / 'own.nc', 'w', format=form) as file:
        for axis, size in zip('NTXY', counts.shape):
            file.createDimension(axis, size)                        # without a variable, as most files have some
        packed = file.createVariable('packed', 'i1', tuple('NTXY'))
        packed.setncatts(dict(_Unsigned='true', scale_factor=0.5, add_offset=10.0))
        packed.set_auto_maskandscale(False)
        packed[:] = counts.view('i1')
        limited = file.createVariable('limited', 'f4', tuple('NTXY'))
        limited.valid_range = np.float32([0, 250])
        limited[:] = np.where(np.arange(8) == 3, -999, counts.astype('f4'))
        file.createVariable('unwritten', 'f4', tuple('NTXY'))[:4] = counts[:4]
        file.createVariable('of_another', 'f4', ('X',))
    values, _ = read(tmp_path / 'own.nc', 'NTXY', ['packed', 'limited', 'unwritten'])
    np.testing.assert_array_equal(values[..., 0], 10 + counts / 2)
    np.testing.assert_array_equal(values[..., 1], np.where(np.arange(8) == 3, np.nan, counts))
    np.testing.assert_array_equal(values[:4, ..., 2], counts[:4])
    assert np.isnan(values[4, ..., 2]).all()


def test_a_file_of_xarray_is_read(tmp_path):
    xarray = package('xarray')
    package('netCDF4')
    times = np.datetime64('2026-01-01') + np.arange(6) * np.timedelta64(3, 'h')
    fields = dict(u=(('sample', 'time', 'x'), VALUES[..., 0, 0]))
    xarray.Dataset(fields, dict(time=times, x=0.1 * np.arange(4))).to_netcdf(tmp_path / 'own.nc')
    values, source = read(tmp_path / 'own.nc', 'NTX')
    np.testing.assert_array_equal(values[:, :, 0, :, 0], VALUES[..., 0, 0])
    assert source.attributes['dt'] == 3 * 3600
    for unit in 'hD':                                                                   # 0, 1, 2 ... in either
        times = np.datetime64('2026-01-01', 'ns') + np.arange(6) * np.timedelta64(1, unit)
        xarray.Dataset(fields, dict(time=times)).to_netcdf(tmp_path / f'{unit}.nc')
    with pytest.raises(InputError, match='the time between frames is 86400, in .*h.nc 3600; --uneven'):
        read([tmp_path / 'h.nc', tmp_path / 'D.nc'], 'NTX')


def test_a_field_with_the_name_of_a_coordinate_is_a_field(tmp_path):
    np.savez(tmp_path / 'own.npz', z=VALUES[0, :, 0, :, 0])
    np.save(tmp_path / 'z.npy', VALUES[0, :, 0, :, 0])
    for file, names in ('own.npz', ['z']), ('z.npy', []):
        values, _ = read(tmp_path / file, 'TX', names, frames=2)
        np.testing.assert_array_equal(values.reshape(6, 8), VALUES[0, :, 0, :, 0])


def test_matlabs_axes_are_reversed_by_what_the_file_says_and_not_by_its_suffix(tmp_path):
    square = VALUES[:, :5, ..., 0]                                                      # N = T
    matlab(tmp_path / 'own.h5', u=square, name='a text', cells=[1, 2], pair={'a': 1.0})
    with h5py.File(tmp_path / 'own.mat', 'w') as file:
        file['u'] = square
    for file in 'own.h5', 'own.mat':
        np.testing.assert_array_equal(read(tmp_path / file, 'NTXY', ['u'])[0][..., 0], square)


def test_what_is_no_array_of_numbers_beside_the_fields_is_left_out_and_said(tmp_path, capsys):
    np.savez(tmp_path / 'own.npz', params=np.array({'nu': 1}, object), u=VALUES[..., 0])
    package('scipy.io').savemat(tmp_path / 'own.mat', dict(params={'nu': 1}, u=VALUES[..., 0]))
    names = {'own.npz': 'u', 'own.mat': 'u', 'own.h5': 'u'}
    with h5py.File(tmp_path / 'own.h5', 'w') as file:
        file['u'] = VALUES[..., 0]
        file['none'] = h5py.Empty('f4')
        file['params'] = h5py.Empty('S1').dtype.type(b'a')
    if importlib.util.find_spec('netCDF4'):
        names['own.nc'] = 'run/u'
        with package('netCDF4').Dataset(tmp_path / 'own.nc', 'w') as file:
            for axis, size in zip('ntxy', VALUES.shape):
                file.createDimension(axis, size)
            ragged = file.createVLType(np.float32, 'ragged')
            file.createVariable('params', ragged, ('n',))[0] = np.ones(3, 'f4')
            file.createGroup('run').createVariable('u', 'f8', tuple('ntxy'))[:] = VALUES[..., 0]
    for file, name in names.items():
        np.testing.assert_array_equal(read(tmp_path / file, 'NTXY')[0], VALUES[..., :1])
        said = capsys.readouterr().out
        assert f'{file}: read {name} of {name} (5, 6, 4, 8) (not of real numbers: params)' in said


def test_netcdf_whose_gaps_cannot_be_told_is_refused(tmp_path, refused):
    """A missing_value that does not fit the type of its variable is not called damage."""
    path = netcdf(tmp_path / 'own.nc', dict(zip('NTXY', VALUES.shape)), u=(tuple('NTXY'), np.float32(VALUES[..., 0])))
    with h5py.File(path, 'r+') as file:
        file['u'].attrs['missing_value'] = 1e20
    flags = 'mine', '--data', tmp_path, '--source', path, '--layout', 'NTXY'
    refused(flags, 'own.nc: an attribute must have the type of its variable, or gaps are missed', prepare, lines=None)


def test_hdf5_by_the_rules_of_netcdf_is_refused_with_what_to_do(tmp_path, refused):
    flags = 'mine', '--data', tmp_path, '--source', tmp_path / 'own.h5', '--layout', 'NTXY', '--variables'
    with h5py.File(tmp_path / 'own.h5', 'w') as file:
        file.update(u=VALUES[..., 0], packed=VALUES[..., 1])
        file['packed'].attrs['valid_range'] = [0., 1.]
        absent = file.create_dataset('x', (4,), 'f4', chunks=(4,))          # a dimension alone, as netCDF4 writes it
        absent.attrs['NAME'] = 'This is a netCDF dimension but not a netCDF variable         4'
    refused([*flags, 'packed'], "/packed has netCDF's attribute valid_range, so its numbers are packed or have gaps; "
            'name it FILE.nc', prepare, lines=None)
    np.testing.assert_array_equal(read(tmp_path / 'own.h5', 'NTXY', ['u'])[0][..., 0], VALUES[..., 0])


# ------------------------------------------------------------------------------------------------ one line for errors

@pytest.mark.parametrize('flags, words', [
    ('own.npz --layout NTHW', 'own.npz: 2 arrays fit --layout NTXY; name the axes in their order, such as'),
    ('own.npz --variables u', 'own.npz: 0 arrays fit --layout (none); name the axes in their order, such'),
    ('own.npz --variables u --layout NTHWC', 'u has the shape (5, 6, 4, 8), along none of the axes NTXYC'),
    ('own.npz --variables u --layout NTQ', '--layout NTQ: expected the axes of an array in their order'),
    ('own.npz --variables u --layout NTHW --channels a b', '--channels a b: there are 1 channels, u'),
    ('own.npz --variables u --layout NTHW --test .95', '5 trajectories are too few for --test 0.95 and --valid 0.1'),
    ('own.npz --variables u --layout NTHW --valid=-0.05', '--valid -0.05 must be at least 0'),
    ('own.npz a.npz --variables u v --layout NTXY', 'a.npz, which has u (5, 6, 4, 8)'),
    ('1.npy --variables u --layout NTXY', 'which has 1 (5, 6, 4, 8); without --variables, --channels names what'),
    ('a.npz --variables u --test_source c.npz --layout NTXY', 'or leave out a file that is empty'),
    ('a.npz --variables u --test_source t.npz --layout NTXY', 't.npz 0.1; --uneven takes them as equal'),
    ('nu.npz --variables u n4 --layout NTX', "n4 has the shape (4,), along N or X of the axes {'N': 4, 'T': 6, 'X': 4"),
    ('nu.npz --variables u n46 --layout NTX n46=NT', 'n46=NT: what changes in time needs all of NTX'),
    ('nu.npz --variables u n4 --layout NTX n4=NX', 'n4 has the shape (4,), along none of'),
    ('nu.npz --variables u n4 --layout NTX n4=', 'n4 has the shape (4,), along none of'),
    ('nu.npz --variables u n4 --layout NTX mu=N', '--variables u n4: expected different variables, and'),
    ('a.npz --variables u --test_source a.npz --layout NTXY', '0 trajectories outside --test_source are too few'),
    ('a.npz --variables u --frames 7 --layout NTXY', '--frames 7: there are trajectories of 6 frames, in a.npz, to 6;'),
    ('own.npz --variables u --layout NTXC', '--layout NTXC: 8 channels on a grid of 1x4; if that is'),
    ('own.npz --variables u u --layout NTXY', '--variables u u: expected different variables'),
    ('own.npz e.npz --variables u e --layout NTXY e=X', 'e.npz own.npz: e has the shape (0,), along none of'),
    ('z.npz --variables u --layout NTXY', 'z.npz: time does not rise beyond its rounding; if these are no times, --dt'),
    ('bf.npy --layout NTXY', 'to read; there are none (not of real numbers: bf)'),
    ('broken.npz --layout NTXY', 'broken.npz: missing, truncated, damaged'),
    ('damaged.npz --variables u --layout NTXY', 'damaged.npz: missing, truncated, damaged'),
    ('. --layout NTXY', "'..': expected the name of a folder"),
    ('own.npz --uneven', '--uneven: for files of your own, with --layout'),
    ('own.npz --from the_well --layout NTXY', '--layout: for files of your own'),
    ('.', 'for files of your own give --layout, such as NTHWC')])
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, monkeypatch, refused, flags, words):
    monkeypatch.chdir(tmp_path)
    u, v = VALUES[..., 0], VALUES[..., 1]
    times = np.arange(6)
    np.savez('own.npz', u=u, v=v)
    np.savez('a.npz', u=u, time=0.5 * times)
    np.savez('c.npz', u=u[..., :7], v=v)
    np.savez('t.npz', u=u, time=0.1 * times)
    np.savez('z.npz', u=u, time=0 * times)
    np.savez('e.npz', e=np.ones(0))
    np.savez('nu.npz', u=u[:4, :, :, 0], n4=np.ones(4), n46=np.ones((4, 6)))
    np.save('1.npy', u)
    np.save('bf.npy', np.zeros((5, 6, 4, 8), 'V2'))                                     # as JAX saves bfloat16
    Path('broken.npz').write_bytes(Path('own.npz').read_bytes()[:1000])
    damaged = bytearray(Path('own.npz').read_bytes())
    damaged[2000] ^= 1                                                              # in a number of u, which is mapped
    Path('damaged.npz').write_bytes(damaged)
    name = '..' if 'name of a folder' in words else 'swe_pdb' if ', with --layout' in words else 'mine'
    refused([name, '--data', 'data', '--source', *flags.split()], words, prepare, lines=None)
    assert not Path('data').exists()


def test_a_dataset_is_never_replaced_and_its_range_and_what_float32_loses_are_printed(tmp_path, call, refused):
    values = VALUES * [1, 1e-2] + [7, 101325]
    np.save(tmp_path / 'own.npy', values)
    flags = '--source', tmp_path / 'own.npy', '--layout', 'NTXYC', '--channels', 'p', 'v'
    printed = prepared(call, tmp_path, *flags)[2]
    for name, stored in zip('pv', np.moveaxis(values.astype('f4').astype(float), -1, 0)):
        assert (f'  {name}: {stored.min():.4g} to {stored.max():.4g}, mean {stored.mean():.4g}, deviation '
                f'{stored.std():.4g}') in printed.splitlines()
    assert 'channel v: the deviation is ' in printed and 'float32 loses 2' in printed and 'channel p' not in printed
    before = (tmp_path / 'data/mine/train.h5').read_bytes()
    refused(['mine', '--data', tmp_path / 'data', *flags, '--seed', 3], 'h5: exists; remove it, or choose', prepare)
    assert (tmp_path / 'data/mine/train.h5').read_bytes() == before
    (tmp_path / 'data/mine/train.h5').unlink()                                          # as by a kill
    refused(['mine', '--data', tmp_path / 'data', *flags, '--seed', 3], 'h5: exists; remove it, or choose', prepare)


LIMITED = """
import resource, sys
from runtime import terminal
from sources import prepare
taken = next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmData')) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (taken + 60 * 2 ** 20,) * 2)
prepare.BLOCK = 2 ** 22
terminal.cli(prepare.main)"""


@pytest.mark.parametrize('kind', ['npz', pytest.param('h5', marks=pytest.mark.slow)])
def test_files_larger_than_memory_are_converted_trajectory_by_trajectory(kind, tmp_path):
    shape = 80, 4, 256, 256                                                             # 84 MB, mostly holes
    if kind == 'npz':
        values = np.zeros(shape, 'f4')
        values[:, 3, 0, 0] = np.arange(80)
        np.savez(tmp_path / 'own.npz', u=values)
    else:
        with h5py.File(tmp_path / 'own.h5', 'w') as file:
            file.create_dataset('u', shape, 'f4')[:, 3, 0, 0] = np.arange(80)
    flags = 'mine', '--source', f'own.{kind}', '--layout', 'NTXY', '--split', 'order'
    done = subprocess.run([sys.executable, '-c', LIMITED, *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    item = data.Trajectories(tmp_path / 'data', 'mine', 'test', 3, None)
    assert item.windows([(7, 3)], 1)[0, 0, 0, 0] == 79
