"""A forecast from a file and into a file: the axes, the channels and the times as they came."""
from pathlib import Path

import h5py
import numpy as np
import pytest
from test_own import netcdf, package

import data
import evaluate
import train
from configs import InputError
from sources import forecast, joined, prepare
from sources.own import Source

VALUES = np.random.default_rng(1).normal(size=(6, 7, 4, 3, 2)).astype('f4')            # (N, T, X, Y, C)


def waves(H, W, N):
    """Plane waves of N phases, (N, 8, H, W)."""
    x, y = np.arange(H)[:, None] / H, np.arange(W) / W
    return np.sin(2 * np.pi * (x + y) - 0.3 * np.arange(8)[:, None, None] + np.arange(N)[:, None, None, None])


def header_of(call, folder, *flags):
    code, error, _ = call(['mine', '--data', folder / 'data', *flags], prepare)
    assert code == 0, error
    return data.read_headers(folder / 'data/mine')['train']


def laid_out(values, layout):
    """An array (N, T, X, Y, C), of which the axes that `layout` lacks have the size 1, along the axes of `layout`."""
    return np.einsum(f'NTXYCK->{layout}', values[..., None])


@pytest.mark.parametrize('layout', ['NTXYC', 'NTXYCK', 'TCYX', 'NTXY', 'YXT'])
@pytest.mark.parametrize('kind', ['.npy', '.h5', '.nc'])
def test_what_is_written_is_what_was_read(layout, kind, tmp_path, call):
    """A variable keeps its name, even `time`; the numbers of a tensor lie along C."""
    if kind == '.nc':
        package('netCDF4')
    name = 'time' if layout in ('NTXY', 'NTXYCK') else 'u'
    arrays = {name: VALUES} if 'C' in layout else {name: VALUES[..., :1], 'v': VALUES[..., 1:]}
    (tmp_path / 'raw').mkdir()
    parts = [slice(None)] if 'N' in layout else [slice(i, i + 1) for i in range(6)]
    for i, part in enumerate(parts):
        np.savez(tmp_path / f'raw/run{i}.npz', **{key: laid_out(u[part], layout) for key, u in arrays.items()})
    header = header_of(call, tmp_path, '--source', tmp_path / 'raw', '--variables', *arrays, '--layout', layout,
                       '--dt', 0.5)
    path = tmp_path / 'raw/run0.npz'
    frames, dt, _ = forecast.frames_of([path], header, 3)
    np.testing.assert_array_equal(frames, VALUES[parts[0], -3:])
    assert dt is None
    written = tmp_path / f'forecast{kind}'
    forecast.write_forecast(written, frames, header)
    order = layout.strip('K')
    if kind == '.npy':
        order += 'C' * ('C' not in order)
        np.testing.assert_array_equal(np.load(written), laid_out(frames, order))
    else:
        again, dt, _ = forecast.frames_of([written], {**header, 'layout': [order]}, 3)
        np.testing.assert_array_equal(again, frames)
        assert dt == 0.5
    with pytest.raises(InputError, match='this file is there; choose another name'):
        forecast.write_forecast(written, frames, header)
    with pytest.raises(InputError, match='expected a name that ends in .npy .h5 .nc'):
        forecast.write_forecast(tmp_path / 'forecast.txt', frames, header)


@pytest.mark.parametrize('kind', ['.h5', '.nc'])
def test_a_forecast_of_several_variables_is_read_as_their_files_whatever_the_channels_are_called(kind, tmp_path, call):
    if kind == '.nc':
        package('netCDF4')
    fields = {'u': VALUES, 'p q': VALUES[..., 0] + 7, 'bed level': VALUES[0, 0, ..., 1]}
    with h5py.File(tmp_path / 'raw.h5', 'w') as file:
        file.update(fields)
        file['p q'].attrs['units'] = 'Pa'
    flags = '--source', tmp_path / 'raw.h5', '--layout', 'NTXYC', 'p q=NTXY', '--variables', *fields
    header = header_of(call, tmp_path, *flags, '--channels', *'abcd', '--dt', 0.5)
    assert header['layout'] == ['NTXYC', 'p q=NTXY', 'bed level=XY'] and header['static'] == ['d']
    frames, *_ = forecast.frames_of([tmp_path / 'raw.h5'], header, 3)
    written = tmp_path / f'next{kind}'
    forecast.write_forecast(written, frames, header)
    evolves = header | dict(layout=header['layout'][:2], variables=['u', 'p q'])
    again, dt, _ = forecast.frames_of([written], evolves, 3)
    np.testing.assert_array_equal(again, frames[..., :3])
    with h5py.File(written) as file:
        assert {*fields} - {*file} == {'bed level'} and dt == 0.5
        assert kind == '.h5' or file['p q'].attrs['units'] == b'Pa'
    still = {'p q': VALUES[..., 0], 'bed level': VALUES[0, 0, ..., 1]}
    np.savez(tmp_path / 'three.npz', u=VALUES[..., [0, 1, 1]], **still)
    with pytest.raises(InputError, match='three.npz: u has 3 channels, in .*raw.h5 2'):
        forecast.frames_of([tmp_path / 'raw.h5', tmp_path / 'three.npz'], header, 3)


def test_gaps_and_numbers_of_a_run_are_read_as_the_dataset_was(tmp_path, call, capsys):
    for i in range(6):
        u = VALUES[i, ..., 0].copy()
        u[:, 1, 1] = np.nan
        np.savez(tmp_path / f'run{i}.npz', u=u, nu=float(i))
    flags = '--source', *tmp_path.glob('run*'), '--variables', 'nu', 'u', '--layout', 'TXY'
    header = header_of(call, tmp_path, *flags)
    assert header['channels'] == ['nu', 'u', 'mask'] and header['layout'] == ['TXY', 'nu=']
    header['units'] = data.Trajectories(tmp_path / 'data', 'mine', 'train', 2, None).units.header()
    frames, _, gaps = forecast.frames_of([tmp_path / 'run3.npz'], header, 2)
    mask = np.ones((4, 3))
    mask[1, 1] = 0
    np.testing.assert_array_equal(gaps, np.stack([mask > 1, mask == 0, mask > 1], -1))
    np.savez(tmp_path / 'whole.npz', u=VALUES[0, ..., 0], nu=0.0)
    assert not forecast.frames_of([tmp_path / 'whole.npz'], header, 2)[2].any()
    assert 'whole.npz: has no gaps, but the dataset has' in capsys.readouterr().err
    np.testing.assert_array_equal(frames[..., 0], np.full((1, 2, 4, 3), 3))
    np.testing.assert_array_equal(frames[0, ..., 2], np.stack([mask, mask]))
    np.testing.assert_allclose(frames[0, :, 1, 1, 1], header['units']['mean'][0][1], err_msg='as in the training')
    np.testing.assert_array_equal(frames[0, ..., 1][:, mask > 0], VALUES[3, -2:, ..., 0][:, mask > 0])
    several = dict(layout=['TXYC'], channels=[*'uv'], variables=['u'], static=[], dt=None)
    forecast.write_forecast(tmp_path / 'several.npy', VALUES[:2], several)
    np.testing.assert_array_equal(np.load(tmp_path / 'several.npy'), VALUES[:2])
    np.savez(tmp_path / 'long.npz', u=np.concatenate([VALUES[0, ..., 0]] * 2), nu=0.0)
    with pytest.raises(InputError, match='7 frames are too few for a network that takes 8'):
        forecast.frames_of([tmp_path / 'long.npz', tmp_path / 'whole.npz'], header, 8)
    forecast.write_forecast(tmp_path / 'forecast.h5', frames, header)
    with h5py.File(tmp_path / 'forecast.h5') as file:
        assert {*file} == {'u', 'time'} and file['u'].shape == (2, 4, 3) and [*file.attrs['channels']] == ['u']
    with pytest.raises(InputError, match='frames or files have different gaps'):
        forecast.frames_of([tmp_path / 'run3.npz', tmp_path / 'whole.npz'], header, 2)
    np.savez(tmp_path / 'own.npz', u=VALUES[0, ..., 0], nu=np.nan)
    with pytest.raises(InputError, match='own.npz, trajectory 0, frame 5, channel 0, .* nan is not finite'):
        forecast.frames_of([tmp_path / 'own.npz'], header, 2)
    with pytest.raises(InputError, match='the dataset does not say how its files were laid out'):
        forecast.frames_of([tmp_path / 'run3.npz'], {**header, 'layout': []}, 2)


def test_steps_and_units_are_compared_with_those_of_the_dataset(tmp_path, call, capsys):
    def run(name, i=0, step=0.5, x=(0, 1, 2, 3), unit='Pa'):
        with h5py.File(tmp_path / f'{name}.h5', 'w') as file:
            file.update(u=VALUES[i, ..., 0], time=step * np.arange(7), x=x)
            file['u'].attrs['units'] = unit
        return [tmp_path / f'{name}.h5']
    for i in range(6):
        run(f'run{i}', i)
    header = header_of(call, tmp_path, '--source', *tmp_path.glob('run*'), '--layout', 'TXY', '--variables', 'u',
                       '--dt', 5)
    assert header['said'] == ['time between frames is 0.5', 'step of x is 1', 'start of x is 0', 'unit of u is Pa']
    assert header['dt'] == 5
    capsys.readouterr()
    for same in run('same'), run('rounded', x=np.float32([0, 1.0001, 2, 3])):
        assert forecast.frames_of(same, header, 2)[0].shape == (1, 2, 4, 3, 1) and not capsys.readouterr().err
    for other, words in ((run('slow', step=2), 'the time between frames is 2, in the training 0.5; --uneven'),
                         (run('flipped', x=(3, 2, 1, 0)), 'the step of x is -1, in the training 1; turn the axis'),
                         (run('back', step=-0.5), 'the time between frames is -0.5, in the training 0.5; turn the')):
        for uneven in (False, True)[:1 + ('turn' in words)]:
            with pytest.raises(InputError, match=words):
                forecast.frames_of(other, header, 2, uneven)
    forecast.frames_of(run('slow', step=2), header, 2, uneven=True)
    assert 'the time between frames is 2, in the training 0.5; they are taken as equal' in capsys.readouterr().err
    forecast.frames_of(run('elsewhere', x=(5, 6, 7, 8)), header, 2)
    assert 'the start of x is 5, in the training 0' in capsys.readouterr().err
    forecast.frames_of(run('as --dt said', step=5), header, 2)
    capsys.readouterr()
    forecast.frames_of(run('hecto', unit='hPa'), header, 2)
    assert 'the unit of u is hPa, in the training Pa' in capsys.readouterr().err
    (tmp_path / 'still').mkdir()
    stills = [*(run(f'still/{i}', i, step=0)[0] for i in range(6))]                 # times that are none
    still = header_of(call, tmp_path / 'still', '--source', *stills, '--layout', 'TXY', '--variables', 'u', '--dt', 5)
    forecast.frames_of(stills[:1], still, 2)
    finer = header | {'shape': [4, 7, 8, 3, 1]}
    capsys.readouterr()
    forecast.frames_of(run('other', x=np.arange(4) / 2), finer, 2)
    assert not capsys.readouterr().err
    with pytest.raises(InputError, match='the step of x is -0.5, in the training 1; turn the axis'):
        forecast.frames_of(run('turned', x=-np.arange(4) / 2), finer, 2)
    named = {**header, 'said': ['axis of y is X', 'axis of x is Y', 'step of y is 1', 'step of x is 2']}
    with pytest.raises(InputError, match='the step of y is -1, in the training 1; turn the axis'):
        said = ['axis of lat is X', 'axis of lon is Y', 'step of lat is -1', 'step of lon is 2']
        runs = Source((7, 4, 8, 1), [], None, {'dt': 5, 'said': said, 'variables': ['u']})
        forecast.compare(runs, named, 'a.nc', False)


@pytest.mark.parametrize('given, layout', [('u.npy', 'NTCXY'), ('u.npz', 'NTXY'), ('u.npy', 'NTXY')])
@pytest.mark.parametrize('written', ['.npy', '.h5', '.nc'])
def test_one_goes_on_from_a_forecast_of_one_array_in_any_kind_of_file(tmp_path, call, given, layout, written):
    if written == '.nc':
        package('netCDF4')
    u = np.moveaxis(VALUES, -1, 2) if 'C' in layout else VALUES[..., 0]
    np.save(tmp_path / given, u) if given == 'u.npy' else np.savez(tmp_path / given, u=u)
    names = ['--variables', 'u'] if given == 'u.npz' else []
    header = header_of(call, tmp_path, '--source', tmp_path / given, '--layout', layout, *names)
    first, _, _ = forecast.frames_of([tmp_path / given], header, 3)
    forecast.write_forecast(tmp_path / f'next{written}', first, header)
    again, _, _ = forecast.frames_of([tmp_path / f'next{written}'], header, 3)
    np.testing.assert_array_equal(again, first)


def test_a_netcdf_forecast_has_the_dimensions_of_its_dataset(tmp_path):
    netCDF4 = package('netCDF4')
    header = dict(layout=['THW'], channels=['u'], variables=['u'], static=[], dt=None,
                  said=['axis of lat is X', 'axis of lon is Y', 'axis of day is T'])
    forecast.write_forecast(tmp_path / 'named.nc', VALUES[:1, :2, ..., :1], header)
    with netCDF4.Dataset(tmp_path / 'named.nc') as file:
        assert file['u'].dimensions == ('time', 'lat', 'lon')
    vector = dict(layout=['TXYC', 'tasks/b=TXY'], channels=[*'uvb'], variables=['tasks/v', 'tasks/b'], static=[],
                  dt=None, said=['number of channels in tasks/v is 2', 'unit of time is s'])
    u = np.concatenate([VALUES[:1, :2], VALUES[:1, :2, ..., :1]], -1)
    forecast.write_forecast(tmp_path / 'vector.nc', u, vector)
    with netCDF4.Dataset(tmp_path / 'vector.nc') as file:
        assert file['time'].units == 's'
        np.testing.assert_array_equal(file['tasks/v'][:], u[0, ..., :2])
        np.testing.assert_array_equal(file['tasks/b'][:], u[0, ..., 2])


def test_a_number_that_evolves_is_written_as_a_number(tmp_path):
    header = dict(layout=['TXY', 'amp=T'], channels=['u', 'amp'], variables=['u', 'amp'], static=[], dt=None)
    u = np.stack([VALUES[:1, ..., 0], np.broadcast_to(np.arange(7.)[:, None, None], (1, 7, 4, 3))], -1)
    forecast.write_forecast(tmp_path / 'next.h5', u, header)
    with h5py.File(tmp_path / 'next.h5') as file:
        np.testing.assert_allclose(file['amp'], range(7))
        np.testing.assert_array_equal(file['u'], u[0, ..., 0])


def test_a_forecast_of_other_numbers_of_channels_is_refused(tmp_path, call):
    def written(name, C):
        np.savez(tmp_path / f'{name}.npz', u=VALUES[..., :C], v=VALUES[..., :3 - C])
        return tmp_path / f'{name}.npz'
    header = header_of(call, tmp_path, '--source', written('a', 1), '--layout', 'NTXYC', '--variables', 'u', 'v')
    for uneven in False, True:
        with pytest.raises(InputError, match='the number of channels in u is 2, in the training 1'):
            forecast.frames_of([written('b', 2)], header, 2, uneven)
    forecast.frames_of([tmp_path / 'a.npz'], header, 2)


def test_times_that_say_their_unit_become_seconds_and_say_so(tmp_path, call):
    times = ('time',), 6 * np.arange(7), dict(units='hours since 2000-01-01')
    for i in range(6):
        netcdf(tmp_path / f'run{i}.nc', dict(time=7, x=4), time=times, u=(('time', 'x'), VALUES[i, ..., 0, 0]))
    flags = '--source', *tmp_path.glob('run*'), '--layout', 'TX', '--variables', 'u'
    header = header_of(call, tmp_path, *flags)
    assert header['dt'] == 21600 and 'unit of time is s' in header['said']
    forecast.frames_of([tmp_path / 'run3.nc'], header, 2)
    paths = joined.paths_of([tmp_path / 'run2.nc', tmp_path / 'run1.nc'])
    assert forecast.in_words(paths) == f'{tmp_path}/run1.nc {tmp_path}/run2.nc'
    paths = joined.paths_of([tmp_path])
    assert forecast.in_words(paths) == f'{tmp_path}/run0.nc {tmp_path}/run1.nc ... {tmp_path}/run5.nc'


def test_sixty_runs_go_from_their_folder_to_a_forecast_file(tmp_path, monkeypatch, call):
    netCDF4 = package('netCDF4')
    monkeypatch.chdir(tmp_path)
    Path('runs').mkdir()
    runs = waves(16, 24, 60)
    for i, wave in enumerate(runs):
        netcdf(f'runs/run_{i}.nc', dict(time=8, y=24, x=16), coordinates=dict(time=0.25 * np.arange(8)),
               attributes=dict(phase=float(i)), u=(('time', 'y', 'x'), wave.swapaxes(1, 2)),
               mask=(('y', 'x'), np.ones((24, 16))))
    flags = '--source', 'runs', '--variables', 'u', 'mask', 'phase', '--layout', 'TYX', '--split', 'order'
    code, error, printed = call(['mine', *flags], prepare)
    assert code == 0 and '60 files are joined as trajectories (N): run_0.nc ... run_59.nc' in printed, error
    assert 'dt 0.25, of the files' in printed and 'phase is static, a number' in printed
    turned = netcdf('turned.nc', dict(time=8, y=24, x=16), attributes=dict(phase=0.0),
                    u=(('time', 'x', 'y'), runs[0]), mask=(('x', 'y'), np.ones((16, 24))))
    with pytest.raises(InputError, match='turned.nc: the axis of x is Y, in the training X'):
        forecast.frames_of([Path(turned)], data.read_headers('data/mine')['train'], 2)
    header = data.read_headers('data/mine')['train']
    assert (header['shape'], header['dt'], header['static']) == ([48, 8, 16, 24, 3], 0.25, ['mask', 'phase'])
    assert (header['layout'], header['variables']) == (['TYX', 'mask=YX', 'phase='], ['u', 'mask', 'phase'])
    with h5py.File('data/mine/train.h5') as file:
        np.testing.assert_array_equal(file['data'][..., 0], np.float32(runs[:48]))
        np.testing.assert_array_equal(file['data'][:, 3, 4, 5, 2], np.arange(48))
    code, error, _ = call(['--data', 'data', '--datasets', 'mine', '--out', 'out', '--steps', 2, '--batch_size', 2,
                           '--threads', 1, '--device', 'cpu'], train)
    assert code == 0, error
    frames, dt, _ = forecast.frames_of([Path('runs/run_7.nc')], header, 5)
    assert dt == header['dt'] and frames.shape == (1, 5, 16, 24, 3)
    prediction = evaluate.rollout('out', frames, 4)
    forecast.write_forecast('forecast.nc', prediction, header)
    with netCDF4.Dataset('forecast.nc') as file:
        assert file['u'].dimensions == ('time', 'y', 'x') and {*file.variables} == {'u', 'time'}
        np.testing.assert_array_equal(file['time'][:], 0.25 * np.arange(1, 5))
        np.testing.assert_array_equal(file['u'][:].swapaxes(1, 2), prediction[0, ..., 0])
