"""Files of one's own, written by the packages that simulators use: every number by its value, and what is refused."""
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import data
import evaluate
import train
from sources import own, prepare

VALUES = np.random.default_rng(0).normal(size=(5, 6, 4, 8, 2))                          # (N, T, X, Y, C)
NEEDED = 'it writes the files of this test, and the project does not need it'


def package(name):
    return pytest.importorskip(name, reason=NEEDED)


def netcdf(path, dims, form='NETCDF4', coordinates=None, attributes=None, **arrays):
    """Write a file by netCDF4. dims: {name: size}; arrays: {name: (its dims, values)}."""
    with package('netCDF4').Dataset(path, 'w', format=form) as file:
        for name, size in dims.items():
            file.createDimension(name, size)
        file.setncatts(attributes or {})
        for name, (axes, values) in {**{k: ((k,), v) for k, v in (coordinates or {}).items()}, **arrays}.items():
            values = np.asarray(values)
            file.createVariable(name, values.dtype, axes)[:] = values
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
    elif kind.startswith(own.NETCDF):
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
    values, _ = read(file_of(kind, tmp_path, VALUES[:, :, :, 0, 0]), 'NTX')
    np.testing.assert_array_equal(values, VALUES[:, :, None, :, 0, :1])


def runs(folder, count=12, T=7):
    """Files run_0, run_1, ..., one a trajectory, of u and p (time, y, x) -> their values (count, T, X, Y, 2)."""
    folder.mkdir(parents=True)
    values = np.random.default_rng(count).normal(size=(count, T, 5, 3, 2)).astype('f4')
    axes = 'time', 'y', 'x'
    for i, (u, p) in enumerate(np.moveaxis(values, -1, 1)):
        fields = dict(u=(axes, u.swapaxes(1, 2)), p=(axes, p.swapaxes(1, 2)))
        netcdf(folder / f'run_{i}.nc', dict(time=T, y=3, x=5), coordinates=dict(time=0.25 * np.arange(T)),
               attributes=dict(nu=0.5 * i, title='a run'), **fields)
    return values


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

def test_files_without_n_are_trajectories_in_the_order_of_the_numbers_in_their_names(tmp_path, call):
    values = runs(tmp_path / 'runs')
    flags = '--variables', 'p', 'u', 'nu', '--layout', 'TYX', *IN_ORDER
    found, attributes, printed, _ = prepared(call, tmp_path, '--source', tmp_path / 'runs', *flags)
    both = np.concatenate([found['train'], found['test']])
    np.testing.assert_array_equal(both[..., :2], values[..., ::-1])
    np.testing.assert_array_equal(both[..., 2].min((1, 2, 3)), 0.5 * np.arange(12))
    np.testing.assert_array_equal(both[..., 2].max((1, 2, 3)), 0.5 * np.arange(12))
    assert attributes == dict(channels=['p', 'u', 'nu'], static=['nu'], dt=[0.25], source=['run_0.nc run_11.nc'],
                              layout=['TYX nu='], variables=['p', 'u', 'nu'])
    assert '12 files are joined as trajectories (N): run_0.nc ... run_11.nc' in printed
    assert 'dt 0.25, as in the files' in printed and 'nu is static' in printed


def test_files_without_n_and_t_are_frames_and_several_folders_of_them_are_trajectories(tmp_path):
    for i in range(3):
        (tmp_path / f'run{i}').mkdir()
        for t in range(12):
            np.save(tmp_path / f'run{i}/out_{t}.npy', VALUES[i, t % 6, ..., 0] + t)
    expected = np.stack([VALUES[:3, t % 6] + t for t in range(12)], 1)[..., :1]
    values, _ = read([tmp_path / f'run{i}' for i in (2, 0, 1)], 'XY')
    np.testing.assert_array_equal(values, expected)
    values, source = read(tmp_path / 'run1', 'XY', frames=4)
    np.testing.assert_array_equal(values, expected[1].reshape(3, 4, 4, 8, 1))
    assert [len(source.items[split]) for split in ('train', 'test')] == [2, 1]


def test_files_with_n_are_joined_along_n(tmp_path):
    for i in range(3):
        np.save(tmp_path / f'batch_{i}.npy', VALUES[:, ..., 0] + i)
    values, _ = read([tmp_path / f'batch_{i}.npy' for i in range(3)], 'NTXY')
    np.testing.assert_array_equal(values[..., 0], np.concatenate([VALUES[..., 0] + i for i in range(3)]))


def test_variables_that_lie_each_in_one_file_are_channels_in_the_order_of_the_flag(tmp_path):
    np.savez(tmp_path / 'a.npz', u=VALUES[..., 0])
    np.savez(tmp_path / 'b.npz', v=VALUES[..., 1])
    for name in 'uv':
        np.save(tmp_path / f'{name}.npy', VALUES[..., 'uv'.index(name)])
    for files in ('a.npz', 'b.npz'), ('u.npy', 'v.npy'):
        values, source = read([tmp_path / file for file in files], 'NTXY', ['v', 'u'])
        np.testing.assert_array_equal(values, VALUES[..., ::-1])
        assert source.attributes['channels'] == ['v', 'u']


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
        assert source.attributes['layout'] == 'NTXY nu=N a=NYX mask=XY c='


def test_names_of_dimensions_say_which_axis_is_meant(tmp_path, refused):
    fields = dict(u=(('run', 'time', 'x', 'y'), VALUES[:4, :, :, :4, 0]), nu=(('run',), VALUES[:4, 0, 0, 0, 1]),
                  profile=(('y',), VALUES[0, 0, :, 0, 1]), mask=(('y', 'x'), VALUES[0, 0, :, :4, 1]))
    path = netcdf(tmp_path / 'own.nc', dict(run=4, time=6, x=4, y=4), **fields)
    values, source = read(path, 'NTXY', [*fields])
    _, nu, profile, mask = (part for _, part in fields.values())
    for c, part in enumerate((nu[:, None, None, None], profile, mask.T), 1):
        np.testing.assert_array_equal(values[..., c], np.broadcast_to(part, values.shape[:-1]))
    assert source.attributes['layout'] == 'NTXY nu=N profile=Y mask=YX'
    with h5py.File(tmp_path / 'plain.nc', 'w') as file:                                 # whose dimensions have no names
        file.update(u=fields['u'][1], nu=nu)
    flags = '--data', tmp_path, '--source', tmp_path / 'plain.nc', '--variables', 'u', 'nu', '--layout', 'NTXY'
    refused(['mine', *flags], 'along N or X or Y of the axes', prepare)


# ------------------------------------------------------------------------------------------------ lengths and splits

def test_trajectories_are_cut_into_pieces_that_stay_in_one_split(tmp_path, call, refused):
    for i, T in enumerate((9, 12, 7, 8, 11)):
        np.save(tmp_path / f'run{i}.npy', np.full((T, 2, 3), 100 * i) + np.arange(T)[:, None, None])
    flags = '--source', *sorted(tmp_path.glob('run*')), '--layout', 'TXY'
    refused(['mine', '--data', tmp_path, *flags], 'trajectories of 7 to 12 frames; --frames 7 cuts them', prepare)
    found, _, printed, _ = prepared(call, tmp_path, *flags, '--frames', 4, '--test', 0.4, '--valid', 0)
    numbers = {split: np.unique(values // 100).tolist() for split, values in found.items()}
    assert sorted(numbers['train'] + numbers['test']) == [0, 1, 2, 3, 4] and len(numbers['test']) == 2
    starts = sorted(int(piece[0, 0, 0, 0]) for values in found.values() for piece in values)
    assert starts == [0, 4, 100, 104, 108, 200, 300, 304, 400, 404]
    assert '7 frames at the ends of trajectories are left out' in printed


def test_one_long_trajectory_is_split_in_time(tmp_path, call, refused):
    np.save(tmp_path / 'long.npy', np.arange(40.)[:, None, None] + np.zeros((2, 3)))
    flags = '--source', tmp_path / 'long.npy', '--layout', 'TXY'
    refused(['mine', '--data', tmp_path, *flags], 'too few for --test 0.1 and --valid 0.1; --frames N cuts', prepare)
    found, _, printed, _ = prepared(call, tmp_path, *flags, '--frames', 4, '--test', 0.2)
    assert {split: values[:, 0, 0, 0, 0].tolist() for split, values in found.items()} == dict(
        train=[0, 4, 8, 12, 16, 20, 24], valid=[28], test=[32, 36])
    assert 'one trajectory, which is split in time' in printed


def test_the_split_is_drawn_by_the_seed_or_in_order():
    pieces = [[i] for i in range(20)]
    first = own.splits(pieces, own.Own(test=0.2))
    assert {split: len(numbers) for split, numbers in first.items()} == {'test': 4, 'valid': 2, 'train': 14}
    assert sorted(np.concatenate([*first.values()])) == [*range(20)]
    assert own.splits(pieces, own.Own(test=0.2)) == first != own.splits(pieces, own.Own(test=0.2, seed=1))
    in_order = own.splits(pieces, own.Own(test=0.2, split='order'))
    assert [*in_order['train'], *in_order['valid'], *in_order['test']] == [*range(20)]


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
    windows = np.stack([VALUES.reshape(30, 4, 8, 2)[i:i + 5] for i in range(25)])
    np.save(tmp_path / 'windows.npy', windows)
    flags = '--source', tmp_path / 'windows.npy', '--layout', 'NTXYC'
    assert '10 of 10 frames of the test set' in prepared(call, tmp_path, *flags, '--valid', 0, name='windows')[3]


# ------------------------------------------------------------------------------------------------ gaps

def test_gaps_that_are_the_same_in_all_frames_become_a_mask(tmp_path, call, refused):
    values = 5 + VALUES
    values[..., 1, 2:4, 0] = np.nan
    np.save(tmp_path / 'ocean.npy', values)
    flags = '--source', tmp_path / 'ocean.npy', '--layout', 'NTXYC', *IN_ORDER
    found, attributes, printed, _ = prepared(call, tmp_path, *flags)
    both = np.concatenate([found['train'], found['test']])
    mask = np.ones((4, 8))
    mask[1, 2:4] = 0
    assert attributes['channels'] == ['0', '1', 'mask'] and attributes['static'] == ['mask']
    np.testing.assert_array_equal(both[..., 2], np.broadcast_to(mask, both.shape[:-1]))
    np.testing.assert_allclose(both[..., 0], np.where(mask, values[..., 0], np.nanmean(values[..., 0])), rtol=1e-6)
    np.testing.assert_array_equal(both[..., 1], values[..., 1].astype('f4'))
    assert '6.2% of the points are gaps in all frames' in printed
    words = "channels ['u', 'mask', 'mask']: expected 3 different names"
    refused(['bad', '--data', tmp_path, *flags, '--channels', 'u', 'mask'], words, prepare, lines=None)
    found, *_ = prepared(call, tmp_path, *flags, '--nan_to_num', name='zeros')
    np.testing.assert_array_equal(np.concatenate([found['train'], found['test']]), np.nan_to_num(values).astype('f4'))
    for place, value in ((4, 5, 3, 3, 1), np.nan), ((0, 0, 1, 1, 1), np.inf), ((2, 2, 1, 2, 0), 1.0):
        other = values.copy()
        other[place] = value
        np.save(tmp_path / 'other.npy', other)
        refused(['bad', '--data', tmp_path, '--source', tmp_path / 'other.npy', *flags[2:]],
                f'trajectory {place[0]}: expected finite values, or nan at the same points of all frames', prepare,
                lines=None)
        assert not (tmp_path / 'bad').exists()


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
    refused(['bad', '--data', tmp_path, *flags], 'times [0.  0.3 0.5 0.8 1. ] ... are uneven; --uneven', prepare,
            lines=None)
    _, attributes, _, _ = prepared(call, tmp_path, *flags, '--uneven', '--dt', 0.25, name='accepted')
    assert attributes['dt'] == [0.25]
    nodes = np.cos(np.pi * np.arange(4) / 3)
    axes = 'run', 'time', 'x'
    u = VALUES[..., 0, 0]
    path = netcdf(tmp_path / 'nodes.nc', dict(run=5, time=6, x=4), coordinates=dict(x=nodes), u=(axes, u))
    refused(['bad', '--data', tmp_path, '--source', path, '--layout', 'NTX'], ': X [ 1.   0.5', prepare)


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
    fields = {name: (('sample', 'time', 'x'), VALUES[..., 0, c]) for c, name in enumerate('uv')}
    times = np.datetime64('2026-01-01') + np.arange(6) * np.timedelta64(3, 'h')
    xarray.Dataset(fields, dict(time=times, x=0.1 * np.arange(4))).to_netcdf(tmp_path / 'own.nc')
    values, source = read(tmp_path / 'own.nc', 'NTX', ['u', 'v'])
    np.testing.assert_array_equal(values[:, :, 0], VALUES[:, :, :, 0])
    assert source.attributes['dt'] == 3


def test_matlabs_axes_are_reversed_by_what_the_file_says_and_not_by_its_suffix(tmp_path):
    square = VALUES[:, :5, ..., 0]                                                      # N = T
    matlab(tmp_path / 'own.h5', u=square, name='a text', cells=[1, 2], pair={'a': 1.0})
    with h5py.File(tmp_path / 'own.mat', 'w') as file:
        file['u'] = square
    for file in 'own.h5', 'own.mat':
        np.testing.assert_array_equal(read(tmp_path / file, 'NTXY', ['u'])[0][..., 0], square)


def test_what_is_no_array_of_numbers_beside_the_fields_is_left_out_and_said(tmp_path, refused, capsys):
    mixed = dict(u=VALUES[..., 0], v=VALUES[..., 1])
    np.savez(tmp_path / 'own.npz', params=np.array({'nu': 1}, object), **mixed)
    package('scipy.io').savemat(tmp_path / 'own.mat', dict(params={'nu': 1}, text='hello', **mixed))
    for file in 'own.npz', 'own.mat':
        np.testing.assert_array_equal(read(tmp_path / file, 'NTXY', ['u', 'v'])[0], VALUES)
        error, _ = refused(['mine', '--data', tmp_path, '--source', tmp_path / file, '--layout', 'NTXY'],
                           'name the variables with --variables; there are u (5, 6, 4, 8), v (5, 6, 4, 8)', prepare)
        assert 'not of real numbers: params' in error
    np.savez(tmp_path / 'one.npz', params=np.array({'nu': 1}, object), u=VALUES[..., 0])
    read(tmp_path / 'one.npz', 'NTXY')
    assert 'one.npz: read u of u (5, 6, 4, 8) (not of real numbers: params)' in capsys.readouterr().out


def test_hdf5_by_the_rules_of_netcdf_is_refused_with_what_to_do(tmp_path, refused):
    for name, value in dict(scale_factor=1e-4, _FillValue=-9999.0, _Unsigned='true', valid_range=[0., 1.]).items():
        with h5py.File(tmp_path / 'own.h5', 'w') as file:
            file['u'] = VALUES[..., 0]
            file['u'].attrs.update({'add_offset': 0.0, 'missing_value': np.nan, name: value})
            file['other'] = VALUES
            file['other'].attrs[name] = value
        refused(['mine', '--data', tmp_path, '--source', tmp_path / 'own.h5', '--layout', 'NTXY'],
                f"/u has netCDF's attribute {name}, so its numbers are packed or have gaps; name it FILE.nc", prepare,
                lines=None)
        with h5py.File(tmp_path / 'own.h5', 'r+') as file:
            del file['u'].attrs[name]
        np.testing.assert_array_equal(read(tmp_path / 'own.h5', 'NTXY')[0][..., 0], VALUES[..., 0])


# ------------------------------------------------------------------------------------------------ one line for errors

@pytest.mark.parametrize('flags, words', [
    ('own.npz --layout NTHW', 'own.npz: name the variables with --variables; there are u (5, 6, 4, 8), v (5, 6, 4, 8)'),
    ('own.npz --variables u', '--layout is missing: the axes in their order, such as NTHWC for '),
    ('own.npz --variables u --layout NTHWC', '--layout NTXYC fits none of u (5, 6, 4, 8)'),
    ('own.npz --variables u --layout NTQ', '--layout NTQ: expected the axes of an array in their order'),
    ('own.npz --variables u --layout NT', 'fits none of u (5, 6, 4, 8)'),
    ('own.npz --variables u --layout NTHW --channels a b', '--channels a b: there are 1 channels, u'),
    ('own.npz --variables u --layout NTHW --test .95', '5 trajectories are too few for --test 0.95 and --valid 0.1'),
    ('own.npz --variables u --layout NTHW --valid=-0.05', '--valid -0.05 must be at least 0'),
    ('own.npz --variables u --layout NTHW --test nan', '--test nan must be at least 0'),
    ('own.npz --variables u --layout NTHW --seed=-1', '--seed -1 must be at least 0'),
    ('own.npz --variables u --layout NTHW --frames 7', '--frames 7: the longest trajectory has 6'),
    ('own.npz --variables w --layout NTHW', '--variables w: not in '),
    ('own.npz a.npz --variables u v --layout NTXY', 'a.npz, which has u (5, 6, 4, 8)'),
    ('a.npz c.npz --variables u v --layout NTXY', '--variables v: not in '),
    ('a.npz c.npz --variables u --layout NTXY', 'u (5, 6, 4, 7) has 7 along Y, but others 8'),
    ('a.npz --variables u --test_source c.npz --layout NTXY', 'u (5, 6, 4, 7) has 7 along Y, but others 8'),
    ('a.npz t.npz --variables u --layout NTXY', 't.npz 0.1; --uneven takes them as equal'),
    ('a.npz --variables u --test_source t.npz --layout NTXY', 't.npz 0.1; --uneven takes them as equal'),
    ('nu.npz --variables u n4 --layout NTX', "n4 has the shape (4,), along N or X of the axes {'N': 4, 'T': 6, 'X': 4"),
    ('nu.npz --variables u n4 --layout NTX', "'X': 4}; say which: --layout NTX n4=N"),
    ('nu.npz --variables u n46 --layout NTX', 'n46 has the axes NT: what changes in time needs all of NTX'),
    ('nu.npz --variables u n7 --layout NTX', 'n7 has the shape (7,), along none of the axes'),
    ('nu.npz --variables u n4 --layout NTX n4=NX', 'nu.npz: --layout NX does not fit n4 (4,)'),
    ('nu.npz --variables u n4 --layout NTX mu=N', '--layout NTX mu=N: the variables are u n4'),
    ('nu.npz --variables u n4 --layout NTX n4=Q', '--layout n4=Q: expected the axes of an array in their order'),
    ('bf.npy --layout NTXY', 'bf.npy: name the variables with --variables; there are none (not of real numbers: bf)'),
    ('broken.npz --layout NTXY', 'broken.npz: missing, truncated, damaged or of another kind'),
    ('. --layout NTXY', "'..': expected the name of a folder"),
    ('own.npz --uneven', '--uneven: for files of your own, with --layout'),
    ('own.npz --valid 0.2', '--valid: for files of your own, with --layout'),
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
    np.savez('nu.npz', u=u[:4, :, :, 0], n4=np.ones(4), n46=np.ones((4, 6)), n7=np.ones(7))
    np.save('bf.npy', np.zeros((5, 6, 4, 8), 'V2'))                                     # as JAX saves bfloat16
    Path('broken.npz').write_bytes(Path('own.npz').read_bytes()[:1000])
    name = '..' if 'name of a folder' in words else 'swe_pdb' if ', with --layout' in words else 'mine'
    refused([name, '--data', 'data', '--source', *flags.split()], words, prepare, lines=None)
    assert not Path('data').exists()


def test_a_dataset_is_never_replaced_unasked(tmp_path, call, refused):
    np.savez(tmp_path / 'own.npz', u=VALUES[..., 0])
    flags = '--source', tmp_path / 'own.npz', '--data', tmp_path / 'data', '--layout', 'NTXY'
    prepared(call, tmp_path, *flags)
    before = (tmp_path / 'data/mine/train.h5').read_bytes()
    refused(['mine', *flags, '--seed', 3], 'h5: exists; remove it, or choose another name', prepare)
    assert (tmp_path / 'data/mine/train.h5').read_bytes() == before


def test_range_mean_and_deviation_are_printed_and_what_float32_loses(tmp_path, call):
    values = VALUES * [1, 1e-2] + [7, 101325]
    np.save(tmp_path / 'own.npy', values)
    flags = '--source', tmp_path / 'own.npy', '--layout', 'NTXYC', '--channels', 'p', 'v'
    printed = prepared(call, tmp_path, *flags)[2]
    for name, stored in zip('pv', np.moveaxis(values.astype('f4').astype(float), -1, 0)):
        assert (f'  {name}: {stored.min():.4g} to {stored.max():.4g}, mean {stored.mean():.4g}, deviation '
                f'{stored.std():.4g}') in printed.splitlines()
    assert 'channel v: the deviation is ' in printed and 'float32 loses 2' in printed and 'channel p' not in printed


LIMITED = """
import resource, sys
from runtime import terminal
from sources import prepare
taken = next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmData')) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (taken + 100 * 2 ** 20,) * 2)
prepare.BLOCK = 2 ** 23
terminal.cli(prepare.main)"""


@pytest.mark.parametrize('kind', [pytest.param('npy', marks=pytest.mark.slow), 'h5'])
def test_files_larger_than_memory_are_converted_trajectory_by_trajectory(kind, tmp_path):
    shape = 80, 4, 384, 384                                                             # 0.2 GB, mostly holes
    if kind == 'npy':
        values = np.lib.format.open_memmap(tmp_path / 'own.npy', 'w+', 'f4', shape)
        values[:, 3, 0, 0] = np.arange(80)
        values.flush()
    else:
        with h5py.File(tmp_path / 'own.h5', 'w') as file:
            file.create_dataset('u', shape, 'f4')[:, 3, 0, 0] = np.arange(80)
    flags = 'mine', '--source', f'own.{kind}', '--layout', 'NTXY', '--split', 'order'
    done = subprocess.run([sys.executable, '-c', LIMITED, *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    item = data.Trajectories(tmp_path / 'data', 'mine', 'test', 3, None)
    assert item.windows([(7, 3)], 1)[0, 0, 0, 0] == 79


# ------------------------------------------------------------------------------------------------ from disk to picture

def waves(H, W, N=20):
    """Plane waves of N phases, (N, 8, H, W)."""
    x, y = np.arange(H)[:, None] / H, np.arange(W) / W
    return np.sin(2 * np.pi * (x + y) - 0.3 * np.arange(8)[:, None, None] + np.arange(N)[:, None, None, None])


def pascal_and_kelvin(folder):
    """A channels-first .npz on 24x40 points."""
    wave = waves(24, 40)
    np.savez(folder / 'own.npz', u=np.stack([1e5 + 2e3 * wave, 290 + 5 * wave], 2))
    return 'own.npz', '--layout NTCHW --channels p temperature'


def burgers(folder):
    """A v7.3 .mat of travelling waves of Burgers' equation: u = c - a tanh(a (x - c t) / 2 nu), nu = 0.2."""
    x, t = np.linspace(-1, 1, 64), 0.05 * np.arange(10)[:, None]
    c = np.linspace(0.4, 0.78, 20)[:, None, None]
    a = 1.4 - c
    matlab(folder / 'own.mat', u=c - a * np.tanh(a * (x - c * t) / 0.4))
    return 'own.mat', '--layout NTX'


@pytest.mark.parametrize('make', [pascal_and_kelvin, pytest.param(burgers, marks=pytest.mark.slow)])
def test_a_file_of_ones_own_goes_from_the_disk_to_a_picture_of_the_prediction(make, tmp_path, monkeypatch, call, plt):
    monkeypatch.chdir(tmp_path)
    source, flags = make(tmp_path)
    code, error, printed = call(['mine', '--source', source, *flags.split(), '--dt', 0.1], prepare)
    assert code == 0 and 'mine train (16, ' in printed, error
    code, error, printed = call(['--data', 'data', '--datasets', 'mine', '--out', 'out/mine', '--steps', 60,
                                 '--batch_size', 4, '--threads', 1, '--device', 'cpu'], train)
    assert code == 0 and 'the network takes the shape of the data: ' in printed, error
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.endswith('x')}
    assert float(rows['mine'][7]) < 0.7, 'VRMSE of one step'
    code, error, _ = call(['--checkpoint', 'out/mine/best.pt', '--device', 'cpu', '--figures', 'pictures'], evaluate)
    assert code == 0 and [*tmp_path.glob('pictures/fields_mine_*_0.png')], error
    test = data.Trajectories('data', 'mine', 'test', 5, None)
    frames = test.windows([(0, 0)], test.frames).numpy()
    if make is burgers:
        frames = frames[:, :, 0]                                        # (N, T, X, C)
    assert evaluate.rollout('out/mine', frames[:, :5], 2).shape == frames[:, 5:7].shape
