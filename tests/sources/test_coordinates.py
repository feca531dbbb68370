"""Coordinates of own files, whatever their dimensions are called: no axis is turned and nothing changes places."""
import h5py
import numpy as np
import pytest
import test_own

from configs import InputError
from sources import forecast, prepare

xarray = pytest.importorskip('xarray', reason='it writes the files of this test, and the project does not need it')
pytest.importorskip('netCDF4', reason='the files of this test need it')

N, T, Y, X = 6, 5, 4, 8
VALUES = np.random.default_rng(0).normal(size=(N, T, Y, X))
LON = np.arange(8.)


def save(path, dims, values, /, name='u', **coordinates):
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {dim: np.arange(float(size)) for dim, size in zip(dims.split(), np.shape(values))}
    xarray.Dataset({name: (dims.split(), values)}, known | coordinates).to_netcdf(path)


def read(sources, layout, *variables, **flags):
    """The trajectories and the attributes of the Source, as test_own reads them."""
    values, source = test_own.read(sources, layout, variables, **flags)
    return values, source.attributes


@pytest.mark.parametrize('names', [('y', 'y'), ('rlat', 'rlat'), ('j', 'j'), ('latitude', 'lat'), ('x1', 'nav_y')])
def test_an_axis_that_is_turned_in_one_of_the_files_is_refused(names, tmp_path):
    for i, values in enumerate(VALUES):
        name = names[i % 2]
        save(tmp_path / f'{i}.nc', f'time {name} k', values[:, ::-1] if i % 2 else values,
             **{name: np.arange(4.)[::-1] if i % 2 else np.arange(4.)})
    with pytest.raises(InputError, match=f'the step of {names[0]} is 1, in .*1.nc -1; turn the axis in one of them'):
        read(tmp_path, 'TXY')


def test_an_axis_has_one_way_under_several_names(tmp_path):
    for i, values in enumerate(VALUES):                             # j with a coordinate lat(j), then lat itself
        path = tmp_path / f'{i}.nc'
        dims = ('time', 'lat', 'lon') if i else ('time', 'j', 'i')
        lat = ('lat', np.arange(4.)[::-1]) if i else ('j', np.arange(4.))
        xarray.Dataset({'u': (dims, values)}, {'lat': lat}).to_netcdf(path)
    with pytest.raises(InputError, match='the step of lat is 1, in .* -1; turn the axis'):
        read(tmp_path, 'TXY')
    for name, dim, sign in ('u', 'yc', 1), ('v', 'yg', -1):
        save(tmp_path / f'apart/{name}.nc', f'member time {dim} i', VALUES, name, **{dim: sign * np.arange(4.)})
    with pytest.raises(InputError, match='yg goes the other way than yc, along one axis; turn the axis for'):
        read(tmp_path / 'apart', 'NTXY', 'u', 'v')
    assert read(tmp_path / 'apart', 'NTXY', 'u', 'v', uneven=True)[0].shape[-1] == 2


def test_a_forecast_may_name_its_axes_otherwise_but_not_turn_them(tmp_path):
    header = dict(layout=['TXY'], variables=['u'], channels=['u'], static=[], dt=1.0, shape=[4, 5, 4, 8, 1],
                  said=['axis of j is X', 'axis of i is Y', 'step of lat is 1', 'step of i is 1'])
    for name, sign in ('y', -1), ('lat', 1), ('lat', -1):
        save(tmp_path / f'{name}{sign}.nc', f'time {name} i', VALUES[0], **{name: sign * np.arange(4.)})
    forecast.frames_of([tmp_path / 'lat1.nc'], header, 2)
    with pytest.raises(InputError, match='the step of lat is -1, in the training 1; turn the axis'):
        forecast.frames_of([tmp_path / 'lat-1.nc'], header, 2)
    with pytest.raises(InputError, match='the step of j is -1, in the training 1; turn the axis'):
        forecast.frames_of([tmp_path / 'y-1.nc'], header | {'said': [*header['said'][:2], 'step of j is 1']}, 2)


def test_levels_are_a_grid_and_uneven_ones_need_a_flag(tmp_path):
    for i in range(3):
        save(tmp_path / f'{i}.nc', 'time lev k', VALUES[i], lev=[1000., 850., 500., 300.])
    with pytest.raises(InputError, match='lev: the steps of 1000 850 500 300 ... are uneven; --uneven takes'):
        read(tmp_path, 'TXY')
    np.testing.assert_array_equal(read(tmp_path, 'TXY', uneven=True)[0][..., 0], VALUES[:3])


@pytest.mark.parametrize('labels, channels', [([850, 1000], ['u_850', 'u_1000']), (['p', 'q'], ['p', 'q'])])
def test_channels_are_called_by_their_coordinate_and_another_order_is_refused(labels, channels, tmp_path):
    fields = np.stack([VALUES, 10 + VALUES], 2)                                                 # (N, T, C, Y, X)
    for i in range(N):
        save(tmp_path / f'{i}.nc', 'time level j i', fields[i], level=labels)
    values, attributes = read(tmp_path, 'TCXY')
    np.testing.assert_array_equal(np.moveaxis(values, -1, 2), fields)
    assert attributes['channels'] == channels
    save(tmp_path / '3.nc', 'time level j i', fields[3][:, ::-1], level=labels[::-1])
    with pytest.raises(InputError, match='0.nc has the channels {}, but .*3.nc has {}'.format(
            ' '.join(channels), ' '.join(channels[::-1]))):
        read(tmp_path, 'TCXY')


def test_labels_that_tell_nothing_apart_or_differ_by_noise_are_no_names(tmp_path):
    fields = np.stack([VALUES, 10 + VALUES, 20 + VALUES], 2)
    for labels, channels in (([0, 0, 0], ['u_0', 'u_1', 'u_2']), (['', '', ''], ['u_0', 'u_1', 'u_2']),
                             ([np.nan, 1, 2], ['u_0', 'u_1', 'u_2']), ([-0.5, 1e-17, 0.5], ['u_-0.5', 'u_0', 'u_0.5']),
                             ([1550001., 1550002., 1550003.], ['u_1550001', 'u_1550002', 'u_1550003']),
                             (np.array([b'p', b'qq', b'r']), ['p', 'qq', 'r'])):
        for i in range(3):
            noisy = np.negative(labels)[::-1] if labels[1] == 1e-17 and i else labels       # -0.5, -1e-17, 0.5
            save(tmp_path / f'{i}.nc', 'time c j i', fields[i], c=noisy)
        values, attributes = read(tmp_path, 'TCXY')
        np.testing.assert_array_equal(np.moveaxis(values, -1, 2), fields[:3])
        assert attributes['channels'] == channels
    for i in range(3):
        save(tmp_path / f'{i}.nc', 'time c j i', fields[i][:, :1], c=[500.])
    assert read(tmp_path, 'TCXY')[1]['channels'] == ['u']


def test_what_only_looks_like_a_coordinate_of_the_fields_is_none(tmp_path, capsys):
    depth = np.random.default_rng(1).normal(size=(4, 8))
    for i, values in enumerate(VALUES):
        xarray.Dataset({'u': (('time', 'h', 'w'), values), 'lat': (('h', 'w'), depth * 0 + 1e-13 * (i == 3)),
                        'lon': (('h', 'w'), np.broadcast_to(LON, (4, 8)))}).to_netcdf(tmp_path / f'{i}.nc')
        with h5py.File(tmp_path / f'{i}.h5', 'w') as file:
            file['u'], file['h'], file['w'] = values, depth, np.full(8, np.nan)
            for axis, name in enumerate('thw'):
                file['u'].dims[axis].label = name
    for kind in 'nc', 'h5':
        values, attributes = read([*tmp_path.glob(f'*.{kind}')], 'TXY', 'u')
        np.testing.assert_array_equal(values[..., 0], VALUES)
    assert not capsys.readouterr().err
    with h5py.File(tmp_path / 'member.h5', 'w') as file:
        file['u'], file['member'] = VALUES, np.ones((N, 3))        # three numbers of each
        for axis, name in enumerate(('member', *'thw')):
            file['u'].dims[axis].label = name
    np.testing.assert_array_equal(read(tmp_path / 'member.h5', 'NTXY', 'u')[0][..., 0], VALUES)


def test_variables_apart_may_have_levels_and_components_of_their_own(tmp_path):
    for name, level in ('z', 500.), ('t', 850.):
        save(tmp_path / f'{name}.nc', 'time level j i', VALUES[0][:, None], name, level=[level])
    for name, parts in ('v', ['x', 'y']), ('s', ['xx', 'xy', 'yy']):
        fields = np.stack([VALUES] * len(parts), 2)
        save(tmp_path / f'parts/{name}.nc', 'member time part j i', fields, name, part=parts)
    values, _ = read(tmp_path, 'TXY', 'z', 't', frames=2)
    assert (values == values[..., :1]).all()
    assert read(tmp_path / 'parts', 'NTCXY', 'v', 's', channels=tuple('abcde'))[0].shape == (6, 5, 4, 8, 5)


@pytest.mark.parametrize('members', [np.arange(6), np.array([*'abcdef'])], ids=['numbers', 'texts'])
def test_files_of_variables_and_of_frames_have_their_trajectories_in_one_order(members, tmp_path):
    for name, order in ('u', slice(None)), ('v', slice(None, None, -1)):
        save(tmp_path / f'{name}.nc', 'member time j i', VALUES[order], name=name, member=members[order])
    with pytest.raises(InputError, match='v.nc: member differs from that of .*u.nc'):
        read(tmp_path, 'NTXY', 'u', 'v')
    for t in range(T):
        order = slice(None, None, -1 if t == 3 else 1)
        save(tmp_path / f'frames/{t}.nc', 'member j i', VALUES[order, t], member=members[order])
    with pytest.raises(InputError, match='3.nc: the trajectories of u are '):
        read(tmp_path / 'frames', 'NXY')
    save(tmp_path / 'frames/3.nc', 'member j i', VALUES[:, 3], member=members)
    np.testing.assert_array_equal(read(tmp_path / 'frames', 'NXY')[0][..., 0], VALUES)
    for t in range(T):                                                      # samples that are counted on
        save(tmp_path / f'on/{t}.nc', 'member j i', VALUES[:, t], member=np.arange(6) + 6 * t)
    np.testing.assert_array_equal(read(tmp_path / 'on', 'NXY')[0][..., 0], VALUES)
    for i in range(2):                                                      # of further runs other members
        save(tmp_path / f'more/{i}.nc', 'member time j i', VALUES[3 * i:3 * i + 3], member=members[3 * i:3 * i + 3])
    np.testing.assert_array_equal(read(tmp_path / 'more', 'NTXY')[0][..., 0], VALUES)


def test_fields_that_begin_elsewhere_get_a_line(tmp_path, capsys):
    for i, values in enumerate(VALUES):
        save(tmp_path / f'{i}.nc', 'time lat lon', values, lon=45 * LON - (180 if i == 4 else 0))
    read(tmp_path, 'TXY')
    assert '.nc: lon begins at 0, in ' in (printed := capsys.readouterr().err) and '4.nc at -180; the fields' in printed
    for i, values in enumerate(VALUES):                                     # centres of finer and of staggered cells
        save(tmp_path / f'{i}.nc', 'time lat lon', values, lon=45 * LON + (22.5 if i == 4 else 0))
    read(tmp_path, 'TXY')
    assert not capsys.readouterr().err


def test_variables_apart_may_repeat_what_belongs_to_their_run(tmp_path):
    mask = np.arange(32.).reshape(4, 8)
    for i, values in enumerate(VALUES):
        for name, sign in ('u', 1), ('v', -1):
            xarray.Dataset({name: (('time', 'j', 'i'), sign * values), 'mask': (('j', 'i'), mask)},
                           attrs={'nu': 0.1 * (i + 1)}).to_netcdf(path := tmp_path / f'{i}_{name}.nc')
            (tmp_path / f'r{i}').mkdir(exist_ok=True)
            path.rename(tmp_path / f'r{i}/{name}.nc')
    values, attributes = read(tmp_path, 'TXY', 'u', 'v', 'nu', 'mask')
    assert attributes['static'] == ['nu', 'mask']
    for i, u in enumerate(VALUES):
        for c, expected in enumerate((u, -u, np.full_like(u, 0.1 * (i + 1)), np.broadcast_to(mask, u.shape))):
            np.testing.assert_array_equal(values[i, ..., c], expected)
    xarray.Dataset({'v': (('time', 'j', 'i'), -VALUES[2]), 'mask': (('j', 'i'), mask)},
                   attrs={'nu': 0.5}).to_netcdf(tmp_path / 'r2/v.nc', mode='w')
    with pytest.raises(InputError, match='r2/v.nc: nu differs from that of .*r2/u.nc'):
        read(tmp_path, 'TXY', 'u', 'v', 'nu', 'mask')


def test_times_between_frames_in_an_array_and_as_a_text_count(tmp_path, refused, capsys):
    for size in 4, 5:                                                       # T - 1 and T
        np.savez(tmp_path / 'a.npz', u=VALUES, dt=np.full(size, 0.5))
        assert read(tmp_path / 'a.npz', 'NTXY', 'u')[1]['dt'] == 0.5
        for dt in 0.1 * np.arange(1, 1 + size), np.full(size, np.nan), '0.1 s':
            np.savez(tmp_path / 'a.npz', u=VALUES, dt=dt)
            assert read(tmp_path / 'a.npz', 'NTXY', 'u')[1]['dt'] is None
            assert 'a.npz: dt is no number, or several, and is not used' in capsys.readouterr().err
    (tmp_path / 'text').mkdir()
    for i, values in enumerate(VALUES):
        texts = {'dt': '0.25', 'nu': '0.5'}
        xarray.Dataset({'u': (('time', 'j', 'i'), values)}, attrs=texts).to_netcdf(tmp_path / f'text/{i}.nc')
    values, attributes = read(tmp_path / 'text', 'TXY', 'u', 'nu')
    assert attributes['dt'] == 0.25 and (values[..., 1] == 0.5).all()
    refused(['mine', '--source', tmp_path / 'none.nc', '--layout', 'TXY'], 'none.nc: there is no such file or folder',
            prepare)
