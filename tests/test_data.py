"""The file layout and what is read from it, with small HDF5 files."""
import math
import os
import re
import shutil
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


def coded(N, T, H, W, C):
    """A field whose values encode their indices: trajectory, frame, row, column, channel."""
    index = np.indices((N, T, H, W, C)).astype(np.float32)
    return index[0] * 1e4 + index[1] * 100 + index[2] * 10 + index[3] + index[4] / 10


def write_coded(folder, name, N=3, T=8, H=4, W=6, C=2, split='train', values=None, **attributes):
    values = coded(N, T, H, W, C) if values is None else values
    helpers.write(folder, name, values, split, **attributes)
    return values


def test_a_folder_without_any_attribute_works_by_its_name(tmp_path):
    (tmp_path / 'mine').mkdir()
    with h5py.File(tmp_path / 'mine/train.h5', 'w') as file:
        file['data'] = coded(2, 9, 4, 4, 3).astype(np.float64)
    assert data.find(tmp_path) == ['mine']
    item = data.Trajectories(tmp_path, 'mine', 'train', T=4, C=4)
    assert (item.evolving, item.t_test, item.dt) == (slice(3), 5, 1)
    assert read(item, 0, 0, 2).dtype == np.float32


@pytest.mark.parametrize('space, C, dtype', [((4, 6), 3, np.float64), ((2, 4, 6), 5, np.int16)])
def test_arrays_given_to_write_are_read_back(tmp_path, space, C, dtype):
    train, test = (np.arange(N * T * np.prod(space) * C).reshape(N, T, *space, C).astype(dtype) for N, T in
                   ((3, 6), (2, 9)))
    names = tuple('abcde'[:C])
    train[..., 1], test[..., 1] = 5, 7                                  # what is static must not vary in time
    data.write(tmp_path / 'mine', train, torch.tensor(test), channels=names, static=names[1:2], dt=0.5, t_test=1)
    for split, values in (('train', train), ('test', test)):
        item = data.Trajectories(tmp_path, 'mine', split, 4, C)
        assert item.shape == values.shape and np.array_equal(read(item, 1, 0, item.frames), np.float32(values[1]))
        assert (item.dt, item.t_test, item.channel_names, item.steady) == (0.5, 1, [*names], False)
        assert item.evolving == [i for i in range(C) if i != 1]
    assert sorted(path.name for path in (tmp_path / 'mine').iterdir()) == ['lock', 'test.h5', 'train.h5']


@pytest.mark.parametrize('shapes, attributes, words', [
    ([(2, 8, 4, 5, 2), (3, 8, 4, 6, 2)], {}, 'mine: test.h5 has a grid of 4x5 and 2 channels, but train.h5 '
     'a grid of 4x6 and 2 channels; they must be equal'),
    ([(2, 8, 4, 6, 2), (3, 8, 4, 6, 1)], {}, 'and 2 channels, but train.h5 a grid of 4x6 and 1 channels;'),
    ([(0, 8, 4, 6, 2), (3, 8, 4, 6, 2)], {}, '(0, 8, 4, 6, 2); expected real numbers of shape'),
    ([(2, 1, 4, 6, 2), (3, 8, 4, 6, 2)], {}, 'with at least two frames'),
    ([], dict(channels=('u',)), "test.h5: channels ['u']: expected 2 different names"),
    ([], dict(static=['w']), "static ['w']: expected names of the channels ['0', '1'], but not all"),
    ([], dict(dt=np.nan), 'dt nan: expected a positive number'),
    ([], dict(t_test=0), 't_test 0: expected at least 1 frame')])
def test_bad_shapes_and_attributes_are_refused_before_writing_and_on_reading(tmp_path, shapes, attributes, words):
    shapes = dict(zip(('test', 'train'), shapes or [(2, 8, 4, 6, 2), (3, 8, 4, 6, 2)]))
    with pytest.raises(InputError, match=re.escape(words)):
        data.write(tmp_path / 'mine', np.ones(shapes['train']), np.ones(shapes['test']), **attributes)
    assert not (tmp_path / 'mine').exists()
    (tmp_path / 'mine').mkdir()
    for split, shape in shapes.items():
        with h5py.File(tmp_path / f'mine/{split}.h5', 'w') as file:
            file.create_dataset('data', shape, 'f4').attrs.update(attributes)
    with pytest.raises(InputError, match=re.escape(words)):
        data.Trajectories(tmp_path, 'mine', 'test', 4, 4)


def test_attributes_that_other_programs_write_as_bytes_and_arrays_are_understood(tmp_path):
    write_coded(tmp_path, 'own', channels=np.array([b'u', b'mask']), static=np.array([b'mask']),
                dt=np.array([0.5]), t_test=np.array([3.0]))
    item = data.Trajectories(tmp_path, 'own', 'train', 4, 4)
    assert (item.channel_names, item.evolving, item.dt, item.t_test) == (['u', 'mask'], slice(1), 0.5, 3)
    write_coded(tmp_path, 'own', split='test', channels=['u', 'mask'])
    with pytest.raises(InputError, match='test.h5 has the static none, but train.h5 mask; they must be equal'):
        data.Trajectories(tmp_path, 'own', 'train', 4, 4)


STORAGE = {'plain': {}, 'user block': {}, 'chunked': dict(chunks=(1, 3, 4, 6, 1)), 'float64': dict(dtype='f8'),
           'float16': dict(dtype='f2'), 'big-endian': dict(dtype='>f4'),
           'compressed': dict(compression='lzf', shuffle=True), 'integers': dict(dtype='i2')}


@pytest.mark.parametrize('kind', [*STORAGE, 'link'])
def test_every_kind_of_storage_and_link_is_read_by_value(tmp_path, kind):
    values, path = coded(3, 8, 4, 6, 2) / 64 + 1, tmp_path / 'own/train.h5'
    path.parent.mkdir()
    with h5py.File(tmp_path / 'own/other.h5', 'w') as other:
        other['before'], other['group/x'] = np.zeros(77), values
    with h5py.File(path, 'w', userblock_size=512 * (kind == 'user block')) as file:
        file['before'] = np.zeros(7)
        if kind == 'link':
            file['data'] = h5py.ExternalLink('other.h5', 'group/x')
        else:
            file.create_dataset('data', data=values, **{'dtype': 'f4', **STORAGE[kind]})
    with h5py.File(path) as file:
        expected = file['data'][:].astype(np.float32)
    assert np.allclose(expected, values, rtol=1e-3, atol=kind == 'integers')                        # rtol of float16
    item = data.Trajectories(tmp_path, 'own', 'train', 4, 4)
    if kind in STORAGE:
        assert isinstance(item._data, np.memmap) == (kind in ('plain', 'user block')), 'all others go through HDF5'
    for row, start, stop in ((2, 3, 8), (0, 0, 1), (1, 2, 5)):
        assert np.array_equal(read(item, row, start, stop), expected[row, start:stop])
    places = [(2, 3), (0, 0), (2, 1)]
    assert np.array_equal(item.windows(places, 5), [expected[i, t:t + 5] for i, t in places])


def test_the_units_of_a_dataset_are_its_mean_and_the_deviation_within_its_windows(tmp_path):
    u = np.random.default_rng(0).standard_normal((40, 6, 8, 8, 4)) * [0.1, 2, 0, 0] + [101325, -1, 7, 0]
    u[..., 3] = np.arange(40).reshape(40, 1, 1, 1)                      # a number of each run
    write_coded(tmp_path, 'own', values=u)
    units = data.Trajectories(tmp_path, 'own', 'train', 5, 4).units
    assert torch.equal(units.mean[0], units.mean[1]) and torch.equal(units.deviation[0], units.deviation[1])
    torch.testing.assert_close(units.mean[0], torch.tensor([101325, -1, 7, 19.5]), rtol=0.03, atol=0)
    expected = [0.1, 2, 1, np.arange(40).std()]                         # a channel that never varies has 1
    torch.testing.assert_close(units.deviation[0], torch.tensor(expected).float(), rtol=0.03, atol=0)


def test_the_input_and_the_solution_of_a_steady_problem_have_units_of_their_own(tmp_path):
    u = np.random.default_rng(0).standard_normal((40, 2, 8, 8, 1))
    u[:, 0] = 300 + 5 * u[:, 0]
    write_coded(tmp_path, 'own', values=u)
    units = data.Trajectories(tmp_path, 'own', 'train', 1, 4).units
    torch.testing.assert_close(units.mean[:, 0], torch.tensor([300., 0]), rtol=0, atol=0.3)
    torch.testing.assert_close(units.deviation[:, 0], torch.tensor([5., 1]), rtol=0.03, atol=0)
    assert not units.own.any()


@pytest.mark.parametrize('differ, own', [('size', 1), ('mean', 1), ('a little', 0), ('one of three', 0), ('rest', 0)])
def test_windows_that_differ_by_more_than_they_vary_get_units_of_their_own(tmp_path, differ, own):
    random = np.random.default_rng(0)
    u = random.standard_normal((60, 6, 8, 8, 3))
    factor = np.exp(random.standard_normal((60, 1, 1, 1, 1)))
    u = {'size': u * factor ** 2, 'mean': u + 5 * factor, 'a little': u * factor ** 0.3,
         'one of three': u * np.concatenate([factor ** 2, factor ** 0, factor ** 0], -1),
         'rest': u * np.stack([np.ones(6), np.ones(6), np.arange(6) > 2], -1)[:, None, None]}[differ]
    write_coded(tmp_path, 'own', values=u)
    assert data.Trajectories(tmp_path, 'own', 'train', 5, 4).units.own.tolist() == 3 * [own]


@pytest.mark.parametrize('kind, words', [
    ('link', "own/train.h5: cannot be read .*can't open file"), ('contiguous', 'a part of /data was never written'),
    ('chunked', 'own/train.h5: a part of /data was never written; write or download it again'),
    ('stored outside', 'own/train.h5: /data lies in other files; copy it into one'),
    ('virtual', 'own/train.h5: /data lies in other files; copy it into one')])
def test_what_hdf5_would_read_as_zeros_is_refused(tmp_path, kind, words):
    shape, path = (3, 8, 4, 6, 2), tmp_path / 'own/train.h5'
    path.parent.mkdir()
    with h5py.File(path, 'w') as file:
        if kind == 'link':
            file['data'] = h5py.ExternalLink('gone.h5', 'data')
        elif kind in ('contiguous', 'chunked'):
            fields = file.create_dataset('data', shape, 'f4', chunks=(1, *shape[1:]) if kind == 'chunked' else None)
            if kind == 'chunked':
                fields[:2] = 1
        elif kind == 'stored outside':
            file.create_dataset('data', data=np.ones(shape, 'f4'), external=str(tmp_path / 'raw.bin'))
        else:
            layout = h5py.VirtualLayout(shape, 'f4')
            layout[:] = h5py.VirtualSource('gone.h5', 'data', shape)
            file.create_virtual_dataset('data', layout)
    with pytest.raises(InputError, match=words):
        data.Trajectories(tmp_path, 'own', 'train', 4, 4)


def test_what_a_writer_has_not_written_is_refused_when_it_is_read(tmp_path):
    with data.writer(tmp_path / 'own/train.h5', (3, 8, 4, 6, 2)) as file:
        file['data'][:2] = 1
        file['data'][2, :5] = 1
    item = data.Trajectories(tmp_path, 'own', 'train', 4, 4)
    assert (read(item, 1, 0, 8) == 1).all() and (read(item, 2, 0, 5) == 1).all()
    with pytest.raises(InputError, match=r'trajectory 2, frame 5, channel 0, point \(0, 0\): nan is not finite'):
        read(item, 2, 1, 6)


def test_a_frame_is_checked_when_it_is_first_read_and_values_whose_squares_overflow_are_no_damage(tmp_path):
    values = 1e30 * coded(3, 8, 4, 6, 2)
    values[1, 6, 2, 3, 1] = np.nan
    with h5py.File(tmp_path / 'own.h5', 'w') as file:
        file['data'] = values.astype('f4')
    (tmp_path / 'own').mkdir()
    os.replace(tmp_path / 'own.h5', tmp_path / 'own/train.h5')
    item = data.Trajectories(tmp_path, 'own', 'train', 4, 4, rows=[2, 1])
    assert read(item, 1, 0, 5).max() > 1e30 and read(item, 0, 2, 8).any()
    assert item._finite.tolist() == [[False] * 2 + [True] * 6, [True] * 5 + [False] * 3]
    for start in (2, 6, 2):
        with pytest.raises(InputError, match=r'trajectory 1, frame 6, channel 1, point \(2, 3\): nan is not finite'):
            read(item, 1, start, 7)
    assert np.array_equal(read(item, 1, 1, 6), values[1, 1:6].astype('f4'))


def test_a_file_whose_writer_was_killed_is_refused_under_any_name(tmp_path):
    process = os.fork()
    if not process:
        with data.writer(tmp_path / 'own/train.h5', (3, 8, 4, 6, 2)) as file:
            file['data'][:2] = 1
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    part, = (tmp_path / 'own').glob('.*.part')
    shutil.copy(part, tmp_path / 'own/train.h5')
    with pytest.raises(InputError, match='own/train.h5: (cannot be read|trajectory 2, frame 0, channel 0)'):
        read(data.Trajectories(tmp_path, 'own', 'train', 4, 4), 2, 0, 5)
    data.write(tmp_path / 'own', coded(3, 8, 4, 6, 2), coded(2, 8, 4, 6, 2))
    assert read(data.Trajectories(tmp_path, 'own', 'train', 4, 4), 2, 0, 5).all()


def killed_before(step, action):
    """Do `action` in a process that kills itself before its rename or removal number `step`: whether it got so far."""
    process = os.fork()
    if not process:
        calls = []

        def counting(call):
            def act(*args, **options):
                if len(calls) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls.append(call)
                return call(*args, **options)
            return act
        os.replace, os.unlink = counting(os.replace), counting(os.unlink)
        action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


def splits_of(folder):
    """{(split, its attribute pde)} of the files in a folder."""
    return frozenset((path.stem, h5py.File(path)['data'].attrs['pde']) for path in folder.glob('*.h5'))


@pytest.mark.parametrize('old, new', [
    ((), ('test', 'train')), (('test', 'valid', 'train'), ('test', 'train')),
    pytest.param(('test', 'train'), ('test', 'valid', 'train'), marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_loses_neither_dataset_and_the_files_beside_a_train_file_belong_to_it(tmp_path, old, new):
    u = coded(3, 8, 4, 6, 2)
    write = lambda folder, splits, pde: data.write(folder, u, u, u if 'valid' in splits else None, pde=pde)
    before, after = (frozenset((split, pde) for split in splits) for splits, pde in ((old, 'old'), (new, 'new')))
    states = []
    for step in range(20):
        folder = tmp_path / str(step)
        if old:
            write(folder, old, 'old')
        killed = killed_before(step, lambda: write(folder, new, 'new'))
        states.append(splits_of(folder))
        assert states[-1] in (before, after) or 'train' not in dict(states[-1]), (step, states[-1])
        if not killed:
            break
        rest = [file for new in folder.glob('.new-*') for file in splits_of(new)]
        assert states[-1] == before or {*states[-1], *rest} >= after, (step, states[-1], rest)
        write(folder, new, 'new')
        assert splits_of(folder) == after, step
    assert not killed and {*states} > {before, after} and states[-1] == after
    assert sorted(path.name for path in folder.iterdir()) == sorted(['lock', *(f'{split}.h5' for split in new)])


def test_find_names_the_flag_the_nearest_dataset_and_how_to_make_a_built_in_one(tmp_path):
    with pytest.raises(InputError, match='the folder holds no'):
        data.find(tmp_path)
    write_coded(tmp_path, 'swe_pdb'), write_coded(tmp_path, 'alpha'), write_coded(tmp_path, 'beta', split='test')
    assert data.find(tmp_path) == ['alpha', 'swe_pdb'] and data.find(tmp_path, split='test') == ['beta']
    assert data.find(tmp_path, ['swe_pdb', 'alpha', 'swe_pdb']) == ['swe_pdb', 'alpha']
    with pytest.raises(configs.InputError, match='--datasets ns2d_fno_1e-5: '):
        data.find(tmp_path, ['mixture_6'])                      # the paper's six, of which only one exists
    with pytest.raises(InputError, match='--unseen alpha: .*known: beta '):
        data.find(tmp_path, ['alpha'], 'test', flag='--unseen')
    with pytest.raises(InputError, match='dr_pdb/train.h5; python -m sources.generate makes it'):
        data.find(tmp_path, ['dr_pdb'])


WEIGHTS = 1, 3, 1


def windows_of(datasets, C, weights, seed=0, normalize=False):
    """The data.Windows of a network of four frames and C channels."""
    config = configs.model('tiny', frames=4, channels=C, normalize=normalize)
    return data.Windows(datasets, config, weights, seed)


@pytest.fixture
def mixture(tmp_path):
    """Three datasets of 5, 2 and 9 trajectories."""
    for name, N, T in (('a', 5, 8), ('swe_pdb', 2, 12), ('z', 9, 5)):
        write_coded(tmp_path, name, N=N, T=T)
    return [data.Trajectories(tmp_path, name, 'train', 4, 4) for name in data.find(tmp_path)]


def test_the_share_of_a_dataset_follows_its_weight_and_not_its_size(mixture):
    windows = windows_of(mixture, 2, WEIGHTS, seed=0)
    assert windows.draws == 16 and np.allclose(windows.share, [0.2, 0.6, 0.2])
    draws = [windows.draw(number) for number in range(6000)]
    counts = np.bincount([k for k, *_ in draws], minlength=3)
    expected = 6000 * np.array([0.2, 0.6, 0.2])
    assert ((counts - expected) ** 2 / expected).sum() < 13.8           # chi-squared, 2 degrees, p = 0.001
    # within a dataset trajectories and first frames are uniform: p = w_k / (|D_k| sum w)
    for k, item in enumerate(mixture):
        places = [(trajectory, start) for dataset, trajectory, start, _ in draws if dataset == k]
        cells = np.zeros((item.count, item.frames - 4))
        np.add.at(cells, tuple(np.transpose(places)), 1)
        expected, freedom = len(places) / cells.size, cells.size - 1
        assert ((cells - expected) ** 2 / expected).sum() < freedom + 4.5 * (2 * freedom) ** 0.5 + 4


def test_a_sample_is_a_function_of_seed_epoch_and_index_alone(mixture):
    windows = windows_of(mixture, 2, WEIGHTS, seed=0)
    numbers = [37, 3, 37, 11]
    assert [windows.draw(n) for n in numbers] == [windows_of(mixture, 2, WEIGHTS, seed=0).draw(n) for n in numbers]
    assert [windows.draw(n) for n in range(16)] != [windows.draw(16 + n) for n in range(16)], 'epochs repeat'
    other = windows_of(mixture, 2, WEIGHTS, seed=1)
    assert [windows.draw(n) for n in range(16)] != [other.draw(n) for n in range(16)]
    assert windows.draw(37) == (0, 3, 0, 4021533252925086350), 'a run that began before would go on with other samples'
    batch = windows[[37]]
    _, trajectory, start, seed = windows.draw(37)
    assert np.array_equal(batch.windows[0][0].numpy(), coded(9, 12, 4, 6, 2)[trajectory, start:start + 5])
    assert batch.noise == [(seed, slice(2))]


def equal(one, other):
    """Whether two batches are equal bit for bit."""
    fields = 'windows', 'units', 'floor', 'evolving'
    return all(same(getattr(one, field), getattr(other, field)) for field in fields) and (
        [*map(list, one.noise)] == [*map(list, other.noise)])


@pytest.mark.parametrize('readers', [0, 1, 3])
def test_threads_read_what_one_thread_reads_in_order_and_draw_no_random_number(mixture, readers, tmp_path):
    mixture.pop()                                                       # or its file could not be written
    with h5py.File(tmp_path / 'z/train.h5', 'a') as file:               # in chunks, which HDF5 reads
        values = file['data'][:]
        del file['data']
        file.create_dataset('data', data=values, chunks=(1, *values.shape[1:]))
    mixture.append(data.Trajectories(tmp_path, 'z', 'train', 4, 4))
    windows = windows_of(mixture, 3, WEIGHTS, seed=0)
    numbers = [*data.numbers_of_rank(range(3, 40), 6)]
    state = torch.get_rng_state()
    read = [*data.batches(windows, iter(numbers), torch.device('cpu'), readers)]
    assert len(read) == 37 and all(equal(batch, windows[part].to('cpu')) for batch, part in zip(read, numbers))
    assert torch.equal(torch.get_rng_state(), state)
    assert len([*data.batches(windows, numbers[:2], torch.device('cpu'), readers)]) == 2, 'fewer than threads'


@pytest.mark.parametrize('readers', [0, 2])
def test_a_thread_reports_data_that_are_damaged_in_one_line(mixture, readers, tmp_path):
    write_coded(tmp_path, 'a', values=np.full((5, 8, 4, 6, 2), np.nan))
    item = data.Trajectories(tmp_path, 'a', 'train', 4, 4)
    item.units = data.Units.none(2)
    windows = windows_of([item], 2, [1], seed=0)
    line = r'^[^\n]*a/train.h5: trajectory \d, frame \d, channel 0, [^\n]*: nan is not finite[^\n]*$'
    with pytest.raises(InputError, match=line):
        next(data.batches(windows, [[0]], torch.device('cpu'), readers))


@pytest.mark.parametrize('world_size', [1, 2, 3, 6])
def test_the_batches_of_the_ranks_are_disjoint_equally_long_and_complete(world_size):
    ranks = [[*data.numbers_of_rank(range(5, 9), 12, rank, world_size)] for rank in range(world_size)]
    for step, parts in zip(range(5, 9), zip(*ranks)):
        assert {len(part) for part in parts} == {12 // world_size}
        assert sorted(n for part in parts for n in part) == list(range(step * 12, step * 12 + 12))
    resumed = [*data.numbers_of_rank(range(7, 9), 12)]
    assert [*data.numbers_of_rank(range(5, 9), 12)][2:] == resumed, 'a resumed run must continue with the same samples'
    numbers = data.numbers_of_rank(range(10 ** 9), 8, rank=1, world_size=2, parts=2)        # which are not listed
    assert [next(numbers) for _ in range(3)] == [range(4, 6), range(6, 8), range(12, 14)]


def test_a_batch_is_ordered_by_grid_and_keeps_every_sample_with_its_dataset_and_its_noise(mixture, tmp_path):
    values = coded(4, 8, 2, 6, 2)
    values[..., 1] = values[:, :1, ..., 1]
    write_coded(tmp_path, 'other', values=values, channels=('u', 'mask'), static=('mask',))
    sets = [*mixture, data.Trajectories(tmp_path, 'other', 'train', 4, 4)]
    windows = windows_of(sets, 3, [1, 3, 1, 2], seed=0)
    batch = windows[range(20)].to('cpu')
    assert [part.shape[2:] for part in batch.windows] == [(2, 6, 3), (4, 6, 3)]
    rows = [window for part in batch.windows for window in part]
    ks = []
    for window, floor, evolving, (seed, channels) in zip(rows, batch.floor, batch.evolving, batch.noise, strict=True):
        [(k, trajectory, first)] = [draw[:3] for draw in map(windows.draw, range(20)) if draw[3] == seed]
        ks.append(k)
        assert np.array_equal(window[..., :2], read(sets[k], trajectory, first, first + 5))
        assert (window[..., 2] == 1).all()
        assert torch.equal(floor[:2], 1e-3 * sets[k].units.deviation[1]) and channels == sets[k].evolving
        assert evolving.tolist() == [True, k < 3, False]
    assert len(ks) == 20 and ks == sorted(ks, key=lambda k: (sets[k].space, k))


@pytest.mark.parametrize('own, C', [(0.0, 3), (1.0, 3), (0.0, 2), (1.0, 2)])
def test_a_batch_is_dimensionless_and_its_condition_says_what_was_taken(mixture, own, C):
    mixture = mixture[:None if C == 3 else 1]                           # 2: nothing is padded or put side by side
    for k, item in enumerate(mixture):
        item.units = data.Units(torch.full((2, 2), 7.0 * k), torch.tensor([[2.0, 4.0]] * 2), torch.full((2,), own))
    windows = windows_of(mixture, C, WEIGHTS[:len(mixture)], normalize=True)
    batch = windows[range(20)].to('cpu')
    ks = sorted(draw[0] for draw in map(windows.draw, range(20)))
    [given] = batch.windows
    stored = torch.cat(windows[range(20)].windows)
    for u, k, condition, floor, raw in zip(given, ks, batch.condition, batch.floor, stored):
        expected = (raw - 7 * k) / torch.tensor([2.0, 4.0])
        mean, deviation = torch.zeros(2), torch.ones(2)
        if own:
            mean = expected[:4].mean((0, 1, 2))
            deviation = expected[:4].std((0, 1, 2)).clamp_min(1e-3)
        torch.testing.assert_close(u[..., :2], (expected - mean) / deviation, rtol=1e-4, atol=1e-4)
        assert own or torch.equal(u[..., :2], expected)
        torch.testing.assert_close(condition[:, :2], torch.stack([mean, deviation]))
        torch.testing.assert_close(floor[:2], 1e-3 / deviation)
        assert not u[..., 2:].any() and condition[:, 2:].tolist() == [[0] * (C - 2), [1] * (C - 2)], 'lacking'


def test_resize_interpolates_a_linear_field_exactly():
    x = torch.arange(8.) + 0.5                                          # cell centres
    u = (2 * x[:, None] - 3 * x[None])[None, None, :, :, None].repeat(2, 3, 1, 1, 2)
    out = data.resize(u, (16, 16))
    fine = (torch.arange(16.) + 0.5) / 2
    expected = 2 * fine[:, None] - 3 * fine[None]
    torch.testing.assert_close(out[1, 2, 1:-1, 1:-1, 1], expected[1:-1, 1:-1])      # the rim is extrapolated flat
    assert torch.equal(data.resize(u, (8, 8)), u)


NORMAL = np.random.default_rng(0).standard_normal((3, 8, 4, 6, 1))


@pytest.mark.parametrize('u, said', [
    (101325 + 0.02 * NORMAL, 'float32 loses 11.[0-9]%; subtract the m'),
    (1e-50 * NORMAL, None),
    (101325 + 1e-4 * NORMAL, None),
    (2 ** 25 + np.random.default_rng(0).integers(0, 9, (3, 8, 4, 6, 1)), 'float32 loses .*; subtract the mean before'),
    (101325 + 9 * NORMAL, ''),
    (np.full((3, 8, 4, 6, 1), 0.1), ''), (np.ones((3, 8, 4, 6, 1), bool), '')])
def test_what_float32_takes_from_a_channel_is_said_and_all_of_it_is_refused(tmp_path, capsys, u, said):
    if said is None:
        with pytest.raises(InputError, match='own/test.h5: channel p: .*, of which float32 keeps nothing; '):
            data.write(tmp_path / 'own', u, u, channels=['p'])
        assert not [*tmp_path.glob('own/*.h5')]
        return
    data.write(tmp_path / 'own', u, u, channels=['p'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * bool(said) and all(re.search(said, line) for line in lines), lines


def test_what_float32_takes_is_counted_channel_by_channel_however_a_caller_writes(tmp_path, capsys):
    u = np.random.default_rng(0).standard_normal((3, 8, 4, 6, 2)) * [0.02, 1] + [101325, 0]
    whole = slice(None)
    for index in (whole,), (whole, slice(2), Ellipsis), (Ellipsis, 0), (Ellipsis, slice(1)), (1, 2, 3, 4, 0):
        with data.writer(tmp_path / 'own/train.h5', u.shape, channels=['p', 'v']) as file:
            file['data'][index] = u[index]
        said = capsys.readouterr().out
        assert ('channel p' in said) == (len(index) < 5) and 'channel v' not in said, index


def test_to_native_averages_two_by_two_cells_and_drops_static_channels(tmp_path):
    write_coded(tmp_path, 'own', H=4, W=6, C=3, channels=('u', 'mask', 'v'), static=('mask',))
    like = data.Trajectories(tmp_path, 'own', 'train', 4, 4)
    u = torch.randn(2, 1, 8, 12, 4)
    blocks = u.unflatten(3, (6, 2)).unflatten(2, (4, 2)).mean((3, 5))
    torch.testing.assert_close(data.to_native(u, like), blocks[..., [0, 2]])


def test_attributes_as_other_programs_write_them_are_read_or_are_none(tmp_path):
    written = dict(channels=np.array(['u', 'v']), static=None, dt=Decimal('0.1'), pde=None, source=Path('x.h5'))
    data.write(tmp_path / 'own', coded(3, 8, 4, 6, 2), coded(2, 8, 4, 6, 2), **written)
    item = data.Trajectories(tmp_path, 'own', 'train', 4, 4)
    assert (item.channel_names, item.dt, item.evolving) == (['u', 'v'], 0.1, slice(2))
    empty = dict.fromkeys(('dt', 't_test', 'static', 'source'), h5py.Empty('S1'))
    latin = dict(channels=np.array([b'\xe9', b'v']))
    for name, attributes in (('empty', empty), ('latin', latin), ('none', {'static': ''})):
        (tmp_path / name).mkdir()
        with h5py.File(tmp_path / name / 'train.h5', 'w') as file:
            file['data'] = coded(3, 8, 4, 6, 2)
            file['data'].attrs.update(attributes)
        said = data.read_headers(tmp_path, [name])[name]['train']
        assert (said['dt'], said['t_test'], said['static'], said['source']) == (1, math.inf, [], '')
        assert said['channels'] == (['é', 'v'] if name == 'latin' else ['0', '1'])


@pytest.mark.parametrize('attributes', [dict(scale_factor=0.1), dict(_FillValue=200.0), dict(_Unsigned='true')])
def test_numbers_by_the_rules_of_netcdf_are_refused(tmp_path, attributes):
    values = write_coded(tmp_path, 'own')
    with h5py.File(tmp_path / 'own/train.h5', 'r+') as file:
        file['data'].attrs.update(dict(add_offset=0.0, missing_value=np.nan))           # which change nothing
    np.testing.assert_array_equal(read(data.Trajectories(tmp_path, 'own', 'train', 4, 4), 1, 0, 8), values[1])
    with h5py.File(tmp_path / 'own/train.h5', 'r+') as file:
        file['data'].attrs.update(attributes)
    with pytest.raises(InputError, match=f"/data has netCDF's attribute {[*attributes][0]}, so its numbers are packed"):
        data.Trajectories(tmp_path, 'own', 'train', 4, 4)


@pytest.mark.parametrize('axes', ['NTHW', 'NTCHW', 'NT1HC'])
def test_a_last_axis_that_is_not_that_of_channels_is_refused_unless_all_are_named(tmp_path, axes):
    shape = dict(NTHW=(4, 3, 9, 10), NTCHW=(4, 3, 2, 9, 10), NT1HC=(4, 3, 1, 40, 17))[axes]
    u = np.random.default_rng(0).normal(size=shape)
    with pytest.raises(InputError, match=r'channels come last: np.moveaxis\(u, 2, -1\); one channel is u\[..., None\]'):
        data.write(tmp_path / 'own', u, u)
    names = [f'c{i}' for i in range(shape[-1])]
    data.write(tmp_path / 'own', u, u, channels=names, layout='NTXC', variables=['u'])
    said = data.read_headers(tmp_path, ['own'])['own']['train']
    assert said['channels'] == names and said['layout'] == 'NTXC' and said['variables'] == ['u']


def test_a_static_channel_that_varies_in_time_is_refused(tmp_path):
    values = write_coded(tmp_path, 'own', channels=('u', 'f'), static=('f',))
    with pytest.raises(InputError, match='trajectory 1: a static channel varies in time; leave it out of `static`'):
        read(data.Trajectories(tmp_path, 'own', 'train', 4, 4), 1, 0, 4)
    values[..., 1] = values[:, :1, ..., 1] * (1 + 1e-7 * np.arange(8).reshape(8, 1, 1))         # but for round-off
    write_coded(tmp_path, 'own', values=values, channels=('u', 'f'), static=('f',))
    assert read(data.Trajectories(tmp_path, 'own', 'train', 4, 4), 1, 0, 4).any()


def test_nobody_rewrites_a_file_that_is_being_read_and_two_writers_do_not_lose_one_anothers_work(tmp_path):
    write_coded(tmp_path, 'own')
    item = data.Trajectories(tmp_path, 'own', 'train', 4, 4)
    code = f"import h5py; h5py.File({str(item.path)!r}, 'w')"
    assert b'unable to' in subprocess.run([sys.executable, '-c', code], capture_output=True).stderr
    code = f'import data; data.writer({str(tmp_path / "new/train.h5")!r}, (3, 8, 4, 6, 2)).__enter__()'
    with data.writer(tmp_path / 'new/train.h5', (3, 8, 4, 6, 2)) as file:
        assert b'another process is writing' in subprocess.run([sys.executable, '-c', code], capture_output=True).stderr
        file['data'][:] = 1
    assert (read(data.Trajectories(tmp_path, 'new', 'train', 4, 4), 2, 0, 8) == 1).all()


def test_unknown_filters_are_named(tmp_path):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((3, 8, 4, 6, 2))
    properties.set_filter(40000, h5py.h5z.FLAG_OPTIONAL, ())
    (tmp_path / 'packed').mkdir()
    with h5py.File(tmp_path / 'packed/train.h5', 'w') as file:
        space = h5py.h5s.create_simple((3, 8, 4, 6, 2))
        h5py.h5d.create(file.id, b'data', h5py.h5t.IEEE_F32LE, space, properties)
    with pytest.raises(InputError, match='/data is compressed, and its filter 40000 .* pip install hdf5plugin'):
        data.Trajectories(tmp_path, 'packed', 'train', 4, 4)
