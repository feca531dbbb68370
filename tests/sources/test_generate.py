"""Tests of sources/generate.py: the files it writes, seeds, sizes, interruptions and the command line."""
import signal
import time

import h5py
import numpy as np
import pytest

import configs
import data
from fields import l2re
from helpers import exit_code, fork, locked_by_another, read
from sources import generate
from sources.pdes import FAMILIES


@pytest.mark.parametrize('name', [*configs.BUILTIN['nano'], 'kolmogorov', 'wave_layer', 'wave_gauss_c', 'cno_poisson',
                                  'ns2d_pda', 'cfdbench'])
@pytest.mark.slow
def test_families_write_moving_fields_in_the_layout_that_data_py_reads(name, tmp_path):
    family, dataset = FAMILIES[name], configs.DATASETS[name]
    plan = generate.plan(name, 'nano', train=1, test=2, frames=min(dataset.frames, 12))
    generate.generate(tmp_path, [plan])
    for split, T in (('train', 1), ('test', plan.frames - 1)):
        item = data.Trajectories(tmp_path, name, split, T, 4)
        assert item.shape == plan.shapes[split] and item.channel_names == list(dataset.channels)
        assert item.dt == plan.dt == family.nano.get('dt', dataset.dt)
        assert not {*item.evolving_names} & {*dataset.static}
        fields = read(item, item.count - 1, 0, plan.frames)  # raises InputError if a value is not finite
        change = np.abs(np.diff(fields[..., item.evolving], axis=0)).mean((1, 2, 3))
        C = len(item.evolving_names)                                                # they are the first ones
        assert (change > 1e-4).all() and abs(fields[..., C:]).max(initial=0) < 6, change
    again = generate.simulate(plan, 'test', [0, 1])[1]                  # by another number of threads
    np.testing.assert_allclose(fields, again, rtol=1e-4, atol=1e-5)
    for c in range(C, item.channels):
        assert fields[..., c].std((1, 2)).min() > 0.1 and (fields[..., c] == fields[0, ..., c]).all(), 'static'
    with h5py.File(item.path) as file:
        assert [*file] == ['data'] and file['data'].attrs['pde']


SMALL = dict(resolution=16, train=5, test=2, frames=11)


def test_a_seed_fixes_the_draws_and_a_batch_changes_the_solution_by_the_schemes_error(tmp_path):
    plan = generate.plan('dr_pdb', **SMALL)
    for folder in 'ab':
        generate.generate(tmp_path / folder, [plan])
    first, again = (tmp_path / folder / 'dr_pdb/train.h5' for folder in 'ab')
    assert first.read_bytes() == again.read_bytes()
    with h5py.File(first) as file:
        fours = file['data'][:]
        assert file['data'].attrs['source'] == 'generate.py seed 0 grid 16'
    assert generate.plan('wave_layer').attributes()['source'] == 'generate.py seed 0 grid 128 version 5'
    small, four = (generate.plan('swe_pdb', preset).counts for preset in ('nano', 'mini'))
    assert small == dict(train=48, valid=8, test=8) and four == {**small, 'train': 4 * 48}
    single = np.concatenate([generate.simulate(plan, 'train', [i]) for i in range(5)])
    assert l2re(single[:, 0], fours[:, 0]) < 1e-6 and l2re(single, fours) < 1e-3


@pytest.mark.parametrize('name', configs.BUILTIN['nano'])
def test_trajectories_splits_and_seeds_have_different_starts(name):
    draws = [generate.initial(generate.plan(name, 'nano', seed=seed), split, [index])
             for seed in (0, 1) for split in ('train', 'test', 'valid') for index in (0, 1)]
    assert len({next(iter(fields.values())).tobytes() for fields in draws}) == 12


def test_the_waves_without_and_with_c_are_the_same():
    without, with_c = (generate.simulate(generate.plan(name, **SMALL), 'test', [0])
                       for name in ('wave_gauss', 'wave_gauss_c'))
    assert np.array_equal(without, with_c[..., :2])


def test_the_datasets_of_the_command_are_made_once_and_those_of_other_sizes_are_kept(tmp_path, call, refused):
    flags = f'wave_gauss dr_pdb --data {tmp_path} --resolution 16 --train 3 --test 1 --frames 11'.split()
    assert call(flags, generate)[0] == 0 and data.find(tmp_path) == ['dr_pdb', 'wave_gauss']
    assert data.Trajectories(tmp_path, 'wave_gauss', 'train', 10, 4).shape == (3, 11, 16, 16, 2)
    path = tmp_path / 'dr_pdb' / 'train.h5'
    before = path.stat().st_mtime_ns, path.read_bytes()
    assert call(flags, generate)[0] == 0
    for other in ('--train 6', '--seed 3', '--frames 12'):
        refused([*flags, *other.split()], 'remove it or choose another --data', generate, lines=None)
    assert before == (path.stat().st_mtime_ns, path.read_bytes())


@pytest.mark.slow
def test_two_commands_side_by_side_make_each_builtin_dataset_once_also_after_an_interrupted_one(
        tmp_path, monkeypatch):
    folder, printed = tmp_path / 'nano', [tmp_path / f'{i}.txt' for i in range(3)]
    monkeypatch.setattr(generate, 'NANO', dict(resolution=16, train=2, test=1, frames=11))
    for name in configs.BUILTIN['nano']:
        small = FAMILIES[name]._replace(nano=dict(grid=32 if 'fno' in name else 16))
        monkeypatch.setitem(FAMILIES, name, small)
    monkeypatch.setattr('sys.argv', f'generate builtin --preset nano --data {folder}'.split())

    def stopped(path, *args, **options):
        if path.match('dr_pdb/train.h5'):
            signal.raise_signal(signal.SIGTERM)
        return data.writer(path, *args, **options)
    with monkeypatch.context() as patch:
        patch.setattr(generate, 'writer', stopped)
        assert exit_code(fork(generate.main, printed[0])) == 128 + signal.SIGTERM
    left = sorted(path.name for path in (folder / 'dr_pdb').iterdir())
    assert left == ['lock', 'test.h5', 'valid.h5'], 'train.h5 comes last: it means that all is complete'
    done = (folder / 'ns2d_fno_1e-3' / 'train.h5').stat().st_mtime_ns
    deadline = time.time() + 60
    with locked_by_another(folder / 'dr_pdb'):
        both = [fork(generate.main, path) for path in printed[1:]]
        for path in printed[1:]:
            while 'dr_pdb: another process is generating this; waiting\n' not in path.read_text():
                time.sleep(0.1)
                assert time.time() < deadline, path.read_text()
    assert [exit_code(process) for process in both] == [0, 0], printed[1].read_text()
    assert (folder / 'ns2d_fno_1e-3' / 'train.h5').stat().st_mtime_ns == done
    for name in configs.BUILTIN['nano']:
        item = data.Trajectories(folder, name, 'train', 10, 4)
        assert sorted(path.name for path in item.path.parent.iterdir()) == ['lock', 'test.h5', 'train.h5', 'valid.h5']
        assert all(read(item, i, 0, 1).any() for i in range(item.count))
