"""The file layout and what is read from it, with small HDF5 files."""
import math
import os
import re
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import configs
import data
import helpers
from configs import InputError
from helpers import read, same


def coded(N=3, T=8, H=4, W=6, C=2):
    """A field whose values encode their indices: trajectory, frame, row, column, channel."""
    index = np.indices((N, T, H, W, C)).astype(np.float32)
    return index[0] * 1e4 + index[1] * 100 + index[2] * 10 + index[3] + index[4] / 10


def write(folder, name='own', values=None, split='train', **attributes):
    values = coded() if values is None else values
    helpers.write(folder, name, values, split, **attributes)
    return values


def opened(folder, name='own', split='train', T=4, **options):
    return data.Trajectories(folder, name, split, T, 4, **options)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize('space, C, dtype', [
    ((4, 6), 3, np.float64), ((2, 4, 6), 4, np.int16), ((2, 3), 4, np.float32)])
def test_arrays_given_to_write_are_read_back(tmp_path, space, C, dtype):
    train, test = (np.arange(N * T * np.prod(space) * C).reshape(N, T, *space, C).astype(dtype)
                   for N, T in ((3, 6), (2, 9)))
    names = tuple('abcd'[:C])
    train[..., 1], test[..., 1] = 5, 7                        # what is static must not vary in time
    attributes = dict(channels=map(str, names), static=names[1:2], t_test=1, source=Path('x.h5'),
                      layout='NTXC', variables=['u'])
    data.write(tmp_path / 'own', train, torch.tensor(test), dt=Decimal('0.5'), **attributes)
    for split, values in (('train', train), ('test', test)):
        item = opened(tmp_path, split=split)
        assert item.shape == values.shape
        assert np.array_equal(read(item, 1, 0, item.frames), np.float32(values[1]))
        assert (item.dt, item.t_test, item.channel_names) == (0.5, 1, [*names])
        said = [item.header[name] for name in ('source', 'layout', 'variables')]
        assert said == ['x.h5', ['NTXC'], ['u']]
        assert not item.steady and item.evolving == [i for i in range(C) if i != 1]
    assert sorted(os.listdir(tmp_path / 'own')) == ['lock', 'test.h5', 'train.h5']


@pytest.mark.parametrize('attributes, expected', [
    ({}, {}), (dict.fromkeys(('dt', 't_test', 'static', 'source'), h5py.Empty('S1')), {}),
    (dict(static=''), {}), (dict(channels=np.array([b'\xe9', b'v'])), dict(channels=['é', 'v'])),
    (dict(channels=np.array([b'u', b'f']), static=np.array([b'f']), dt=[0.5], t_test=[3.]),
     dict(channels=['u', 'f'], static=['f'], dt=0.5, t_test=3))])
def test_attributes_as_other_programs_write_them_are_read(tmp_path, attributes, expected):
    write(tmp_path)
    with h5py.File(tmp_path / 'own/train.h5', 'a') as file:
        file['data'].attrs.update(attributes)
    said = data.read_headers(tmp_path / 'own')['train']
    silent = dict(channels=['0', '1'], static=[], dt=None, t_test=math.inf, source='')
    assert said == {'shape': [3, 8, 4, 6, 2]} | silent | expected


P = 101325
NORMAL = normal(3, 8, 4, 6, 1)


@pytest.mark.parametrize('u, said', [
    (P + 0.02 * NORMAL, 'loses 11.[0-9]%; subtract the mean'), (2 ** 25 + NORMAL.round(), 'loses'),
    (1e6 * np.arange(3).reshape(3, 1, 1, 1, 1) + NORMAL / 1e3, ''),     # of each trajectory
    (P + 9 * NORMAL, ''), (np.full(NORMAL.shape, 0.1), ''), (np.ones(NORMAL.shape, bool), '')])
def test_what_float32_takes_is_said(tmp_path, capsys, u, said):
    data.write(tmp_path / 'own', u, u, channels=['p'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * bool(said)
    assert all(re.search(f'own/t.*.h5: channel p: .*, of which float32 {said}', x) for x in lines)
    with h5py.File(tmp_path / 'own/train.h5', 'w') as file:                             # in another type
        file['data'] = u
    opened(tmp_path).units
    assert ('own/train.h5: channel 0: ' in capsys.readouterr().out) == bool(said)


def test_another_field_in_float32_is_refused_whatever_wrote_it(tmp_path):
    write(tmp_path)
    with h5py.File(tmp_path / 'own/train.h5', 'w') as file:
        file['data'] = 1e9 + normal(3, 8, 4, 6, 2)
    with pytest.raises(InputError, match='own/train.h5: channel 0: .* loses 100.0%'):
        opened(tmp_path).units


def test_what_does_not_fit_on_the_disk_is_refused_before_any_work(tmp_path):
    with pytest.raises(InputError, match=r'large/train.h5: needs 4e\+08 GB of the disk, of which .* are free'):
        with data.writer(tmp_path / 'large/train.h5', (10 ** 6, 100, 10 ** 4, 10 ** 5, 1)):
            raise AssertionError
    assert not (tmp_path / 'large').exists()


def test_what_float32_takes_is_counted_channel_by_channel_however_a_caller_writes(tmp_path, capsys):
    u = normal(3, 8, 4, 6, 2) * [0.02, 1] + [P, 0]
    whole = slice(None)
    for index in ((whole,), (whole, slice(2), Ellipsis), (Ellipsis, 0), (Ellipsis, slice(1)),
                  (1, 2, 3, 4, 0)):
        with data.writer(tmp_path / 'own/train.h5', u.shape, channels=['p', 'v']) as file:
            file['data'][index] = u[index]
        said = capsys.readouterr().out
        assert ('channel p' in said) == (len(index) < 5) and 'channel v' not in said, index


def killed_before(step, action):
    """Kill a process that does `action` at its rename or removal `step`; whether it got so far."""
    steps = iter(range(step))

    def counting(call):
        def act(*args, **options):
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)
        return act

    def main():
        os.replace, os.unlink = counting(os.replace), counting(os.unlink)
        action()
    return helpers.exit_code(helpers.fork(main, os.devnull)) == -signal.SIGKILL


def splits_of(folder):
    """{(split, its attribute pde)} of the files in a folder."""
    return {(path.stem, h5py.File(path)['data'].attrs['pde']) for path in folder.glob('*.h5')}


@pytest.mark.parametrize('old, new', [
    ((), ('test', 'train')), (('test', 'valid', 'train'), ('test', 'train')),
    pytest.param(('test', 'train'), ('test', 'valid', 'train'), marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_the_old_dataset_or_the_new_one(tmp_path, old, new):
    u = coded()
    before, after = {(split, 'old') for split in old}, {(split, 'new') for split in new}

    def write(splits, pde):
        data.write(folder, u, u, u if 'valid' in splits else None, pde=pde)
    states = []
    for step in range(20):
        folder = tmp_path / str(step)
        if old:
            write(old, 'old')
        killed = killed_before(step, lambda: write(new, 'new'))
        states.append(splits_of(folder))
        whole = states[-1] in (before, after)
        assert whole or 'train' not in dict(states[-1]), (step, states[-1])
        if not killed:
            break
        rest = [file for new in folder.glob('.new-*') for file in splits_of(new)]
        assert states[-1] == before or {*states[-1], *rest} >= after, (step, states[-1], rest)
        write(new, 'new')
        assert splits_of(folder) == after and not [*folder.glob('.new-*')], step
    assert not killed and before in states and states[-1] == after and len({*map(str, states)}) > 2
    assert sorted(os.listdir(folder)) == sorted(['lock', *(f'{split}.h5' for split in new)])


def test_nobody_rewrites_a_file_that_is_being_read_or_written(tmp_path):
    write(tmp_path)
    item = opened(tmp_path)
    code = f"import h5py; h5py.File({str(item.path)!r}, 'w')"
    assert b'unable to' in subprocess.run([sys.executable, '-c', code], capture_output=True).stderr
    with helpers.locked_by_another(tmp_path), pytest.raises(InputError, match='process is writing'):
        with data.writer(tmp_path / 'train.h5', (3, 8, 4, 6, 2)):
            pass


STORAGE = {'plain': {}, 'user block': {}, 'chunked': dict(chunks=(1, 3, 4, 6, 1)),
           **{f'type {dtype}': dict(dtype=dtype) for dtype in ('f8', 'f2', '>f4', 'i2')},
           'compressed': dict(compression='lzf', shuffle=True)}


@pytest.mark.parametrize('kind', [*STORAGE, 'link'])
def test_every_kind_of_storage_and_link_is_read_by_value(tmp_path, kind):
    values, name = coded() / 64 + 1, 'group/x' if kind == 'link' else 'data'
    path = tmp_path / 'own/train.h5'
    path.parent.mkdir()
    with h5py.File(path, 'w', userblock_size=512 * (kind == 'user block')) as file:
        file['before'] = np.zeros(7)
        file.create_dataset(name, data=values, **{'dtype': 'f4', **STORAGE.get(kind, {})})
        expected = file[name][:].astype(np.float32)
    if kind == 'link':
        path.rename(tmp_path / 'own/other.h5')
        with h5py.File(path, 'w') as file:
            file['data'] = h5py.ExternalLink('other.h5', name)
    assert np.allclose(expected, values, rtol=1e-3, atol='i2' in kind)       # rtol of float16
    item = opened(tmp_path)
    assert isinstance(item._data, np.memmap) == (kind in ('plain', 'user block', 'link'))
    places = [(2, 3), (0, 0), (2, 1)]
    assert np.array_equal(item.windows(places, 5), [expected[i, t:t + 5] for i, t in places])


@pytest.mark.parametrize('kind, words', [
    ('link', "cannot be read .*can't open file"),
    *((name, 'a part of /data was never written; write or') for name in ('contiguous', 'chunked')),
    *((name, '/data lies in other files; copy') for name in ('stored outside', 'virtual')),
    ('unknown filter', '/data is compressed, and its filter 40000 .* pip install hdf5plugin'),
    *((name, f"/data has netCDF's attribute {name}, so its numbers are packed")
      for name in ('scale_factor', '_FillValue', '_Unsigned'))])
def test_what_hdf5_would_read_as_zeros_or_other_numbers_is_refused(tmp_path, kind, words):
    shape = 3, 8, 4, 6, 2
    filtered = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    filtered.set_filter(40000, h5py.h5z.FLAG_OPTIONAL, ())
    stored = {'contiguous': {}, 'chunked': dict(chunks=(1, *shape[1:])),
              'stored outside': dict(external='raw.bin'),
              'unknown filter': dict(chunks=shape, dcpl=filtered)}
    layout = h5py.VirtualLayout(shape, 'f4')
    layout[:] = h5py.VirtualSource('gone.h5', 'data', shape)
    (tmp_path / 'own').mkdir()
    with h5py.File(tmp_path / 'own/train.h5', 'w') as file:
        if kind == 'link':
            file['data'] = h5py.ExternalLink('gone.h5', 'data')
        elif kind == 'virtual':
            file.create_virtual_dataset('data', layout)
        elif kind in stored:
            file.create_dataset('data', shape, 'f4', **stored[kind])
        else:
            file['data'] = coded()
            file['data'].attrs.update(add_offset=0.0, missing_value=np.nan)     # change nothing
            value = dict(scale_factor=0.1, _FillValue=200.0, _Unsigned='true')[kind]
            file['data'].attrs[kind] = value
        if kind == 'chunked':
            file['data'][:2] = 1
    with pytest.raises(InputError, match=f'own/train.h5: {words}'):
        opened(tmp_path)


def test_a_frame_is_checked_when_it_is_first_read_and_one_that_was_not_written_is_nan(tmp_path):
    values = np.float32(1e30 * coded())                         # whose squares overflow
    with data.writer(tmp_path / 'own/train.h5', values.shape) as file:
        file['data'][0], file['data'][1, :6] = values[0], values[1, :6]
        file['data'][2], file['data'][1, 7:] = values[2], values[1, 7:]
    item = opened(tmp_path, rows=[2, 1])
    assert read(item, 1, 0, 5).max() > 1e30 and read(item, 0, 2, 8).any()
    assert item._finite.tolist() == [[False] * 2 + [True] * 6, [True] * 5 + [False] * 3]
    for start in (2, 6, 2):
        with pytest.raises(InputError, match=r'trajectory 1, frame 6, channel 0, .* nan is not f'):
            read(item, 1, start, 7)
    assert np.array_equal(read(item, 1, 1, 6), values[1, 1:6])


def test_a_writer_takes_what_h5py_takes_by_numbers_and_slices_and_names_what_it_does_not(tmp_path):
    values = coded().astype(float)                                                          # (3, 8, 4, 6, 2)
    path = tmp_path / 'own/train.h5'
    with data.writer(path, values.shape) as file:
        file['data'][0] = values[:1]
        file['data'][1, :, ..., 0] = values[1:2, ..., 0]
        file['data'][np.int64(1), ..., 1:] = values[1, ..., 1:]
        file['data'][2:] = values[2]
        for rows in [0, 2], np.array([True, False, True]), range(0, 3, 2), np.array(1), torch.tensor(1):
            file['data'][rows] = values[rows]
        for index, wrong, words in (
                ((0, slice(None), slice(None), slice(None), [0, 1]), values[0], 'expected numbers and slices in'),
                (7, values[0], r'expected an index of \(3, 8, 4, 6, 2\)'),
                (0, values[0, ..., 0], r'expected numbers of the shape \(8, 4, 6, 2\)')):
            with pytest.raises(InputError, match=f'{path}: {words}'):
                file['data'][index] = wrong
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file['data'], np.float32(values))
    data.write(tmp_path / 'new', values, values, valid=values[:0], channels=np.array([b'\xc3\xbc', 'v'], object))
    assert [*data.read_headers(tmp_path / 'new')] == ['test', 'train']
    assert data.read_headers(tmp_path / 'new')['train']['channels'] == ['\u00fc', 'v']
    with pytest.raises(InputError, match='dt .*: expected a positive number'):
        data.write(tmp_path / 'span', values, values, dt=np.timedelta64(3600 * 10 ** 9, 'ns'))


def test_a_static_channel_that_varies_in_time_is_refused(tmp_path):
    names = dict(channels=('u', 'f'), static=('f',))
    values = write(tmp_path, **names)
    with pytest.raises(InputError, match='trajectory 1: a static channel varies in time; leave it'):
        read(opened(tmp_path), 1, 0, 4)
    values[..., 1] = values[:, :1, ..., 1] * (1 + 1e-7 * np.arange(8).reshape(8, 1, 1))  # rounding
    write(tmp_path, values=values, **names)
    assert read(opened(tmp_path), 1, 0, 4).any()
    mask = np.broadcast_to(np.arange(8.).reshape(8, 1, 1, 1), values[..., :1].shape)
    values = np.concatenate([values[..., :1], mask, np.full_like(mask, 1e6)], -1)        # beside a large one
    write(tmp_path, values=values, channels=[*'ufg'], static=[*'fg'])
    with pytest.raises(InputError, match='a static channel varies in time'):
        read(opened(tmp_path), 1, 0, 4)


def test_all_splits_are_compared(tmp_path):
    for split, dt in ('train', 0.1), ('valid', 0), ('test', 0.3):
        write(tmp_path, split=split, **{'dt': dt} if dt else {})
    with pytest.raises(InputError, match='test.h5 has the dt 0.3, but train.h5 has 0.1'):
        data.read_headers(tmp_path / 'own')
    write(tmp_path, split='train', channels=('u', 'v'), source='a', dt=0.3)
    assert len(data.read_headers(tmp_path / 'own')) == 3, 'a file without names has any'
    shapes = {'train': (3, 8, 4, 6, 2)}
    assert data.splits_to_write(tmp_path / 'own', shapes, dict(source='a', dt=0.3)) == []
    with pytest.raises(InputError, match='train.h5: exists with'):
        data.splits_to_write(tmp_path / 'own', shapes, dict(source='a', dt=0.1))
    write(tmp_path, dt=0.1)
    write(tmp_path, split='test', dt=float(np.float32(0.1)))
    numbered = data.read_headers(tmp_path / 'own')['train']
    for channels, what in (['u', 'v'], ''), (['0'], 'channels'), (['u', 'v', 'w'], 'channels'):
        assert data.difference(numbered, {**numbered, 'channels': channels}, '', '')[0] == what


@pytest.mark.parametrize('attributes, words', [
    ({'channels': 'u'}, r"train.h5: channels \['u'\]: expected 2 different names"),
    ({'dt': -1}, 'dt -1.0: expected'), ({'static': 'c'}, r"static \['c'\]: expected")])
def test_a_file_that_could_not_be_read_is_not_begun(tmp_path, attributes, words):
    path = tmp_path / 'train.h5'
    with pytest.raises(InputError, match=words), data.writer(path, (3, 8, 4, 6, 2), **attributes):
        pass
    assert not [*tmp_path.iterdir()]


def test_pairs_of_frames_are_a_steady_problem_unless_the_test_is_longer(tmp_path):
    for frames, steady in (2, True), (8, False):
        write(tmp_path, values=normal(20, 2, 8, 8, 1) * np.array([1, 3]).reshape(2, 1, 1, 1))
        write(tmp_path, values=normal(3, frames, 8, 8, 1), split='test')
        train = opened(tmp_path, T=1)
        assert train.steady == steady
        assert torch.equal(*train.units.deviation) == (not steady)


def test_find_names_the_flag_and_the_nearest_dataset(tmp_path):
    for name, split in ('swe_pdb', 'train'), ('alpha', 'train'), ('beta', 'test'):
        write(tmp_path, name, split=split)
    assert data.find(tmp_path) == ['alpha', 'swe_pdb']
    assert data.find(tmp_path, split='test') == ['beta']
    assert data.find(tmp_path, ['swe_pdb', 'alpha', 'swe_pdb']) == ['swe_pdb', 'alpha']
    for names, words in (
            (['mixture_6'], '--datasets ns2d_fno_1e-5: '),          # of which only one exists
            (['dr_pdb'], "dr_pdb/train.h5; .*sources.generate makes the paper's")):
        with pytest.raises(InputError, match=words):
            data.find(tmp_path, names)
    with pytest.raises(InputError, match='--dataset alpha: .*known: beta'):
        data.find(tmp_path, ['alpha'], 'test', flag='--dataset')


def test_the_units_of_a_dataset_are_its_mean_and_the_deviation_within_its_windows(tmp_path):
    u = normal(40, 6, 8, 8, 4) * [0.1, 2, 0, 0] + [P, -1, 7, 0]
    u[..., 3] = np.arange(40).reshape(40, 1, 1, 1)                  # a number of each run
    write(tmp_path, values=u, static=None)
    units = opened(tmp_path, T=5).units
    deviations = [0.1, 2, 1, np.arange(40).std()]                # a channel that never varies has 1
    for found, expected in (units.mean, [P, -1, 7, 19.5]), (units.deviation, deviations):
        assert torch.equal(found[0], found[1])
        torch.testing.assert_close(found[0], torch.tensor(expected).float(), rtol=0.03, atol=0)
    late = np.ones((256, 9, 2, 2, 1)) * (np.arange(256) > 127).reshape(256, 1, 1, 1, 1)
    late = late * np.arange(9).reshape(9, 1, 1, 1)
    write(tmp_path, 'late', late)
    assert opened(tmp_path, 'late', T=1).units.mean[0, 0] == pytest.approx(late.mean(), rel=0.1)


@pytest.mark.parametrize('differ, own', [
    ('size', 1), ('mean', 1), ('a little', 0), ('one of three', 0), ('rest', 0), ('steady', 0)])
def test_windows_that_differ_by_more_than_they_vary_get_units_of_their_own(tmp_path, differ, own):
    random = np.random.default_rng(0)
    u = random.standard_normal((60, 6, 8, 8, 3))
    factor = np.exp(random.standard_normal((60, 1, 1, 1, 1)))
    rest = (np.arange(6) > 2).reshape(6, 1, 1, 1) | (np.arange(3) < 2)
    u = {'size': u * factor ** 2, 'mean': u + 5 * factor, 'a little': u * factor ** 0.3,
         'one of three': u * factor ** [2, 0, 0], 'rest': u * rest,
         'steady': (u * factor ** 2)[:, :2]}[differ]
    write(tmp_path, values=u)
    assert opened(tmp_path, T=u.shape[1] - 1).units.own.tolist() == 3 * [own]
    config = configs.model('tiny', patch=2, resolution=(4, 6), frames=5, channels=3, normalize=True)
    if own:         # the network sees fields of mean 0 and deviation 1, in training as in a rollout
        batch = data.Windows([opened(tmp_path, T=5)], config, [1], 0)[range(4)].to(torch.device('cpu'))
        variance, mean = torch.var_mean(data.noisy_inputs(batch, config, 0).flatten(1, -2), 1)
        torch.testing.assert_close(torch.stack([mean, variance]), torch.tensor([0., 1]).view(2, 1, 1).expand(2, 4, 3))
    v, condition = data.standardize(torch.full((1, 3, 2, 2, 1), 7.0), 2, torch.ones(1))
    assert not v.any() and condition[0, 1] == data.AT_REST


WEIGHTS = 1, 3, 1


def windows_of(datasets, C, weights=WEIGHTS, seed=0, normalize=False):
    """The data.Windows of a network of four frames and C channels on the grid of `coded`."""
    config = configs.model('tiny', frames=4, channels=C, normalize=normalize, patch=2, resolution=(4, 6))
    return data.Windows(datasets, config, weights, seed)


@pytest.fixture
def mixture(tmp_path):
    """Three datasets of 5, 2 and 9 trajectories."""
    for name, N, T in (('a', 5, 8), ('swe_pdb', 2, 12), ('z', 9, 5)):
        write(tmp_path, name, coded(N, T))
    return [opened(tmp_path, name) for name in data.find(tmp_path)]


def test_the_share_of_a_dataset_follows_its_weight_and_not_its_size(mixture):
    windows = windows_of(mixture, 2)
    assert windows.draws == 16 and np.allclose(windows.share, [0.2, 0.6, 0.2])
    draws = [windows.draw(number) for number in range(6000)]
    counts = np.bincount([k for k, *_ in draws], minlength=3)
    expected = 6000 * np.array([0.2, 0.6, 0.2])
    assert ((counts - expected) ** 2 / expected).sum() < 13.8    # chi-squared, 2 degrees, p = 0.001
    # within a dataset trajectories and first frames are uniform: p = w_k / (|D_k| sum w)
    for k, item in enumerate(mixture):
        places = [(trajectory, start) for dataset, trajectory, start, _ in draws if dataset == k]
        cells = np.zeros((item.count, item.frames - 4))
        np.add.at(cells, tuple(np.transpose(places)), 1)
        expected, freedom = len(places) / cells.size, cells.size - 1
        most = freedom + 4.5 * (2 * freedom) ** 0.5 + 4
        assert ((cells - expected) ** 2 / expected).sum() < most


def test_a_sample_is_a_function_of_seed_epoch_and_index_alone(mixture):
    windows, again, other = (windows_of(mixture, 2, seed=seed) for seed in (0, 0, 1))
    epoch = range(16)
    assert [windows.draw(n) for n in (37, 3, 37, 11)] == [again.draw(n) for n in (37, 3, 37, 11)]
    assert [windows.draw(n) for n in epoch] != [windows.draw(16 + n) for n in epoch]
    assert [windows.draw(n) for n in epoch] != [other.draw(n) for n in epoch]
    assert next(data.numbers_of_rank(range(10 ** 9), 8, 1, 2, 2)) == range(4, 6), 'not listed'
    # or a run that began before would go on with other samples
    assert windows.draw(37) == (0, 3, 0, 4021533252925086350)
    batch = windows[[37]]
    assert np.array_equal(batch.windows[0][0], coded(9, 12)[3, :5])
    assert batch.noise == [(4021533252925086350, slice(2))]


@pytest.mark.parametrize('readers', [0, 1, 3])
def test_threads_read_in_order_draw_no_number_and_report_damage(mixture, readers, tmp_path):
    cpu = torch.device('cpu')
    (tmp_path / 'z/train.h5').unlink()
    with h5py.File(tmp_path / 'z/train.h5', 'w') as file:           # which HDF5 reads
        file.create_dataset('data', data=coded(9, 5), chunks=(1, 5, 4, 6, 2))
    windows = windows_of([*mixture[:2], opened(tmp_path, 'z')], 3)
    numbers = [*data.numbers_of_rank(range(3, 20), 6)]
    state = torch.get_rng_state()
    read = [*data.batches(windows, iter(numbers), cpu, readers)]
    assert len(read) == 17 and torch.equal(torch.get_rng_state(), state)
    for batch, part in zip(read, numbers):
        expected = windows[part].to(cpu)
        assert same([*batch[:-2], batch.condition], [*expected[:-2], expected.condition])
        assert [*map(list, batch.noise)] == [*map(list, expected.noise)]
    assert len([*data.batches(windows, numbers[:2], cpu, readers)]) == 2, 'fewer than threads'
    write(tmp_path, values=np.full((5, 8, 4, 6, 2), np.nan))
    item = opened(tmp_path)
    item.units = data.Units.none(2)
    line = r'^[^\n]*own/train.h5: trajectory \d, frame \d, channel 0, [^\n]*: nan is not [^\n]*$'
    with pytest.raises(InputError, match=line):
        next(data.batches(windows_of([item], 2, [1]), [[0]], cpu, readers))


def test_a_batch_is_ordered_by_grid_and_keeps_samples_with_dataset_and_noise(mixture, tmp_path):
    values = coded(4, 8, 2)
    values[..., 1] = values[:, :1, ..., 1]
    write(tmp_path, 'other', values, channels=('u', 'mask'), static=('mask',))
    sets = [*mixture, opened(tmp_path, 'other')]
    windows = windows_of(sets, 3, [1, 3, 1, 2])
    batch = windows[range(20)].to('cpu')
    assert [part.shape[2:] for part in batch.windows] == [(2, 6, 3), (4, 6, 3)]
    rows = [window for part in batch.windows for window in part]
    samples = {draw[3]: draw[:3] for draw in map(windows.draw, range(20))}
    order = [samples[seed][0] for seed, _ in batch.noise]
    assert len(order) == 20 and order == sorted(order, key=lambda k: (sets[k].space, k))
    of_samples = rows, batch.floor, batch.evolving, batch.noise
    for window, floor, evolving, (seed, channels) in zip(*of_samples, strict=True):
        k, trajectory, first = samples[seed]
        assert np.array_equal(window[..., :2], read(sets[k], trajectory, first, first + 5))
        assert (window[..., 2] == 1).all() and channels == sets[k].evolving
        assert torch.equal(floor[:2], 1e-3 * sets[k].units.deviation[1])
        assert evolving.tolist() == [True, k < 3, False]


@pytest.mark.parametrize('own, C', [(0.0, 3), (1.0, 3), (0.0, 2), (1.0, 2)])
def test_a_batch_is_dimensionless_and_its_condition_says_what_was_taken(mixture, own, C):
    mixture = mixture[:None if C == 3 else 1]             # 2: nothing is padded or put side by side
    scale = torch.tensor([2.0, 4.0])
    for k, item in enumerate(mixture):
        means = torch.tensor([[7.0 * k], [7 * k + 1]]).expand(2, 2)     # of the input, of the next frame
        item.units = data.Units(means, scale.expand(2, 2), torch.full((2,), own))
    windows = windows_of(mixture, C, WEIGHTS[:len(mixture)], normalize=True)
    stored = windows[range(20)]
    batch = stored.to('cpu')
    ks = sorted(draw[0] for draw in map(windows.draw, range(20)))
    rows = *batch.windows, ks, batch.condition, batch.floor, torch.cat(stored.windows)
    for u, k, condition, floor, raw in zip(*rows, strict=True):
        expected = (raw - (7 * k + (torch.arange(5) == 4).float().view(5, 1, 1, 1))) / scale
        mean, deviation = torch.zeros(2), torch.ones(2)
        if own:
            deviation, mean = torch.std_mean(expected[:4], (0, 1, 2))
        torch.testing.assert_close(u[..., :2], (expected - mean) / deviation, rtol=1e-4, atol=1e-4)
        assert own or torch.equal(u[..., :2], expected)
        torch.testing.assert_close(condition[:, :2], torch.stack([mean, deviation]))
        torch.testing.assert_close(floor[:2], 1e-3 / deviation)
        lacking = condition[:, 2:].tolist()
        assert not u[..., 2:].any() and lacking == [[0] * (C - 2), [1] * (C - 2)]
