"""Coordinates of own files, whatever their dimensions are called: no axis is turned and nothing changes places."""
import numpy as np
import pytest

from configs import InputError
from sources import own, prepare

xarray = pytest.importorskip('xarray', reason='it writes the files of this test, and the project does not need it')
pytest.importorskip('netCDF4', reason='the files of this test need it')

N, T, Y, X = 6, 5, 4, 8
VALUES = np.random.default_rng(0).normal(size=(N, T, Y, X))
LON = np.arange(8.)


def save(path, dims, values, /, name='u', **coordinates):
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {dim: np.arange(float(size)) for dim, size in zip(dims.split(), np.shape(values))}
    xarray.Dataset({name: (dims.split(), values)}, known | coordinates).to_netcdf(path)


def read(folder, layout, *variables, **flags):
    flags = own.Own(layout=tuple(layout.split()), variables=variables, split='order', valid=0, test=0.2, **flags)
    source = own.own_source([folder], flags)
    items = source.items['train'] + source.items['test']
    t = slice(0, source.shape[0])
    return np.concatenate([source.read(piece, slice(n, n + 1), t) for piece, n in items]), source.attributes


@pytest.mark.parametrize('names', [('y', 'y'), ('rlat', 'rlat'), ('j', 'j'), ('latitude', 'lat'), ('x1', 'nav_y')])
def test_an_axis_that_is_turned_in_one_of_the_files_is_refused(names, tmp_path):
    for i, values in enumerate(VALUES):
        name = names[i % 2]
        save(tmp_path / f'{i}.nc', f'time {name} k', values[:, ::-1] if i % 2 else values,
             **{name: np.arange(4.)[::-1] if i % 2 else np.arange(4.)})
    with pytest.raises(InputError, match=f'the step of {names[0]} is 1, in .*1.nc -1; turn the axis in one of them'):
        read(tmp_path, 'TXY')


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


def test_times_between_frames_in_an_array_and_as_a_text_count(tmp_path, refused):
    for size in 4, 5:                                                       # T - 1 and T
        np.savez(tmp_path / 'a.npz', u=VALUES, dt=np.full(size, 0.5))
        assert read(tmp_path / 'a.npz', 'NTXY', 'u')[1]['dt'] == 0.5
        np.savez(tmp_path / 'a.npz', u=VALUES, dt=0.1 * np.arange(1, 1 + size))
        with pytest.raises(InputError, match='the time between frames is 0.[45], in .*a.npz 0.1; --uneven'):
            read(tmp_path / 'a.npz', 'NTXY', 'u')
    (tmp_path / 'text').mkdir()
    for i, values in enumerate(VALUES):
        texts = {'dt': '0.25', 'nu': '0.5'}
        xarray.Dataset({'u': (('time', 'j', 'i'), values)}, attrs=texts).to_netcdf(tmp_path / f'text/{i}.nc')
    values, attributes = read(tmp_path / 'text', 'TXY', 'u', 'nu')
    assert attributes['dt'] == 0.25 and (values[..., 1] == 0.5).all()
    refused(['mine', '--source', tmp_path / 'none.nc', '--layout', 'TXY'], 'none.nc: there is no such file or folder',
            prepare)
