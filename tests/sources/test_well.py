"""The Well's files, converted and read again, and the choice of best.pt on a split of its own.

Files are written in The Well's layout, and what becomes of them is compared with the arrays that went in.
"""
import shutil

import h5py
import numpy as np
import pytest
import torch

import configs
import data
import evaluate
import finetune
import train
from aotpot import load
from helpers import TINY, log, travelling, write
from runtime import distributed
from sources import prepare

T = 4


def write_group(file, name, datasets):
    """Write {key: (values, attributes)} into a group that lists them."""
    group = file.require_group(name)
    group.attrs['field_names'] = list(datasets)
    for key, (values, attributes) in datasets.items():
        group[key] = values
        group[key].attrs.update(attributes)


def flags(sample=True, time=True, dims=()):
    """The attributes that say which axes a field or scalar has."""
    return {'sample_varying': sample, 'time_varying': time, **({'dim_varying': list(dims)} if dims else {})}


def write_well(path, grid=(6, 4), N=2, frames=T, seed=0, nu=0.5, dt=0.1, thin=True):
    """Write a file with fields of each order -> (fields (N, T, *grid, C), names). thin: some lack axes."""
    random, D, axes = np.random.default_rng(seed), len(grid), 'xyz'[:len(grid)]
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)
    every, along_x, across_x = [True] * D, [True, *[not thin] * (D - 1)], [*[True] * (D - 1), not thin]
    density, wind, velocity = draw(N, frames, *grid), draw(frames, *grid[:sum(along_x)]), draw(N, frames, *grid, D)
    mask, stress = draw(*grid[:sum(across_x)]), draw(N, frames, *grid, D, D)
    flat = draw(N, *grid, D * D) if thin else draw(N, *grid, D, D)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, 'w') as file:
        file.attrs.update(dataset_name='layer', grid_type='cartesian', n_spatial_dims=D, n_trajectories=N, nu=nu,
                          gas='air', simulation_parameters=['nu', 'gas'])
        file.create_group('dimensions').attrs['spatial_dims'] = list(axes)
        for key, values in (('time', 5 + dt * np.arange(frames)), *((a, np.arange(n)) for a, n in zip(axes, grid))):
            file['dimensions'][key] = np.float32(values)
            file['dimensions'][key].attrs['sample_varying'] = False
        for axis, kind in zip(axes, ('periodic', 'WALL', 'OPEN')):
            side = file.create_group(f'boundary_conditions/{axis}_{kind}')
            side.attrs.update(bc_type=kind, associated_dims=[axis], associated_fields=[], **flags(False, False))
            side['mask'] = np.ones(grid[axes.index(axis)], bool)
        write_group(file, 'scalars', {
            'nu': (nu, flags(False, False)), 'seed': (np.arange(N) + seed, flags(True, False)),
            'forcing': (draw(N, frames), flags()), 'clock': (draw(frames), flags(False))})
        write_group(file, 't0_fields', {
            'mask': (mask, flags(False, False, across_x)), 'density': (density, flags(dims=every)),
            'wind': (wind, flags(False, True, along_x))})
        write_group(file, 't1_fields', {'velocity': (velocity, flags(dims=every))})
        write_group(file, 't2_fields', {'flat': (flat, flags(True, False, every)),
                                        'stress': (stress, flags(dims=every))})
    whole = N, frames, *grid
    wind, mask = (u.reshape(*u.shape, *[1] * (n - u.ndim)) for u, n in ((wind, 2 + D), (mask, 1 + D)))
    fields = [density[..., None], np.broadcast_to(wind, (*whole, 1)), velocity, stress.reshape(*whole, -1),
              np.broadcast_to(mask, (*whole, 1)),
              np.broadcast_to(flat.reshape(N, 1, *grid, -1), (*whole, D * D))]
    tensor = [a + b for a in axes for b in axes]
    return np.concatenate(fields, -1), ['density', 'wind', *(f'velocity_{a}' for a in axes),
                                        *(f'stress_{ab}' for ab in tensor), 'mask', *(f'flat_{ab}' for ab in tensor)]


def write_dataset(folder, grid=(6, 4), thin=True, **parts):
    """Files of several splits, {split: [arguments of write_well]} -> {split: fields of all files}, names."""
    parts = parts or dict(train=[dict(seed=1), dict(N=3, seed=2, nu=0.7)], valid=[dict(N=1, seed=3)],
                          test=[dict(seed=4)])
    fields = {}
    for split, files in parts.items():
        for i, file in enumerate(files):
            values, names = write_well(folder / f'data/{split}/f{i}.{"hdf5" if i else "h5"}', grid, thin=thin, **file)
            fields.setdefault(split, []).append(values)
    return {split: [*values] for split, values in fields.items()}, names


def convert(folder, *more):
    """The flags that convert a folder written by `write_dataset`."""
    return ['layer', '--source', folder / 'raw', '--from', 'the_well', '--data', folder / 'data', *more]


@pytest.mark.parametrize('grid', [(6, 4), (4, 3, 5)])
def test_every_field_becomes_channels_and_every_split_stays_itself(grid, tmp_path, monkeypatch, call):
    fields, names = write_dataset(tmp_path / 'raw', grid)
    monkeypatch.setattr(prepare, 'BLOCK', 4 * 2 * fields['test'][0][0, 0].size)             # two frames at once
    code, error, printed = call(convert(tmp_path), prepare)
    assert code == 0 and 'layer train (5, 4, ' in printed, error
    for split, values in fields.items():
        item = data.Trajectories(tmp_path / 'data', 'layer', split, 2, None)
        assert item.channel_names == names and item.dt == pytest.approx(0.1)
        assert [names[i] for i in item.evolving] == names[:-1 - len(grid) ** 2]
        read = np.stack([item.read(i, 0, T) for i in range(item.count)])
        np.testing.assert_array_equal(read, np.concatenate(values))
    with h5py.File(tmp_path / 'data/layer/train.h5') as file:
        attributes = file['data'].attrs
        assert attributes['pde'] == 'The Well, layer' and attributes['source'] == 'raw'
        np.testing.assert_allclose(file['nu'], [0.5, 0.5, 0.7, 0.7, 0.7], rtol=1e-6)
        assert [*file['seed']] == [1, 2, 2, 3, 4] and [*file['gas']] == [b'air'] * 5
        assert [*file['source_file']] == [b'data/train/f0.h5'] * 2 + [b'data/train/f1.hdf5'] * 3
        assert [*file['source_index']] == [0, 1, 0, 1, 2] and 'frame_dt' not in file
        assert 'forcing' not in file and 'clock' not in file, 'scalars that vary in time are no coefficients'
    assert data.Trajectories(tmp_path / 'data', 'layer', 'valid', 2, None, ('nu',)).read(0, 0, 1)[..., -1].max() == 0.5


def test_files_may_differ_in_frames_which_are_cut_in_dt_which_is_kept_and_in_scalars(tmp_path, call):
    fields, _ = write_dataset(tmp_path / 'raw', train=[dict(frames=7), dict(dt=0.3, seed=1)], test=[dict(seed=2)])
    with h5py.File(tmp_path / 'raw/data/train/f0.h5', 'r+') as file:
        file['scalars'].attrs['field_names'] = ['nu']
    shutil.move(tmp_path / 'raw/data', tmp_path / 'moved')              # the folder of the splits itself will do, too
    code, error, printed = call(convert(tmp_path, '--source', tmp_path / 'moved'), prepare)
    assert code == 0 and 'trajectories of 4 to 7 frames, of which the first 4 are taken' in printed, error
    with h5py.File(tmp_path / 'data/layer/train.h5') as file:
        np.testing.assert_array_equal(file['data'], np.concatenate([values[:, :4] for values in fields['train']]))
        assert file['data'].attrs['dt'] == 1 and np.allclose(file['frame_dt'], [0.1, 0.1, 0.3, 0.3])
        np.testing.assert_array_equal(file['seed'], [np.nan, np.nan, 1, 2])
    assert not (tmp_path / 'data/layer/valid.h5').exists()


LAST = 'data/train/f1.hdf5'                                 # the last file of the training split


def one_frame(file):
    file['dimensions'].move('time', 'old')
    file['dimensions/time'] = np.float32([0])
    for group in ('t0_fields', 't1_fields', 't2_fields', 'scalars'):
        file[group].attrs['field_names'] = []


def not_finite(file):
    file['t1_fields/velocity'][1, 3, 2, 1, 0] = np.nan
    file['t0_fields/density'][2, 0, 0, 0] = -np.inf


@pytest.mark.parametrize('damage, words', [
    (lambda file: file.attrs.update(grid_type='spherical'), 'f1.hdf5: expected a Cartesian grid'),
    (lambda file: file['dimensions'].attrs.update(spatial_dims=['x']), "found cartesian, ['x']"),
    (lambda file: file.pop('t2_fields'), "object 't2_fields' doesn't exist"),
    (lambda file: file['t1_fields/velocity'].attrs.pop('time_varying'), "can't locate attribute: 'time_varying'"),
    (lambda file: file['t1_fields/velocity'].attrs.update(sample_varying=False),
     'expected /t1_fields/velocity (4, 6, 4) x 2, as its attributes say, found (3, 4, 6, 4, 2)'),
    (lambda file: file['t0_fields'].attrs.update(field_names=['density', 'mask']), "expected ('layer', (6, 4), "),
    (lambda file: file['dimensions/time'].write_direct(np.float32([5, 5.1, 5.22, 5.3])),
     'at a constant distance in dimensions/time'), (one_frame, 'expected at least two frames'),
    (lambda file: file['dimensions/time'].write_direct(np.float32([5, 5.1, np.nan, 5.3])),
     'in dimensions/time, found [5.0,'),
    (not_finite, 'f1.hdf5, velocity_x, trajectory 1: expected finite values'),
    ('missing', 'raw: expected HDF5 files in its folders data/train'), ('truncated', 'truncated, damaged')])
def test_what_cannot_be_converted_is_refused_in_one_line(damage, words, tmp_path, refused):
    write_dataset(tmp_path / 'raw')
    path = tmp_path / 'raw' / LAST
    if damage == 'missing':
        shutil.rmtree(tmp_path / 'raw/data/test')
    elif damage == 'truncated':
        path.write_bytes(path.read_bytes()[:-2000])
    else:
        with h5py.File(path, 'r+') as file:
            damage(file)
    error, _ = refused(convert(tmp_path), words, prepare, lines=0)                  # a progress bar may come before it
    error = error.splitlines()[-1]
    assert error.startswith('error: --source') and words in error, error
    assert not list((tmp_path / 'data').rglob('train.h5*'))


def test_nan_to_num_replaces_what_is_not_finite(tmp_path, call):
    fields, names = write_dataset(tmp_path / 'raw')
    with h5py.File(tmp_path / 'raw' / LAST, 'r+') as file:
        not_finite(file)
    assert call(convert(tmp_path, '--nan_to_num'), prepare)[0] == 0
    expected = np.concatenate(fields['train'])
    expected[2 + 1, 3, 2, 1, names.index('velocity_x')] = 0
    expected[2 + 2, 0, 0, 0, names.index('density')] = np.finfo('f4').min
    with h5py.File(tmp_path / 'data/layer/train.h5') as file:
        np.testing.assert_array_equal(file['data'], expected)


@pytest.fixture
def folder(tmp_path):
    """Datasets 'kept' (with a valid.h5 of slower and larger waves) and 'swe_pdb' (without), with 16^2 cells."""
    for split, N, speed, scale in (('train', 8, 0.4, 1), ('valid', 3, 0.1, 3), ('test', 5, 0.8, 1)):
        write(tmp_path / 'data', 'kept', travelling(N, 6, 16, 1, speed, scale), split)
    for split, N in (('train', 6), ('test', 3)):
        write(tmp_path / 'data', 'swe_pdb', travelling(N, 7, 12, 1, 0.7), split)
    return tmp_path / 'data'


def validation_error(path, folder, **splits):
    """The mean over datasets of the validation errors of a checkpoint, {name: split}."""
    model, processes = load(path), distributed.setup('cpu')
    tests = [data.Trajectories(folder, name, split, 3, 4) for name, split in splits.items()]
    return train.validation_error(model, tests, processes)


@pytest.mark.parametrize('names, splits', [
    (['kept'], dict(kept='valid')), (['kept', 'swe_pdb'], dict(kept='valid', swe_pdb='test')),
    (['swe_pdb'], dict(swe_pdb='test'))])
def test_best_pt_is_chosen_on_valid_h5_and_the_final_table_is_of_test_h5(names, splits, folder, tmp_path, call):
    out = tmp_path / 'out'
    code, error, printed = call([*TINY, '--data', folder, '--datasets', *names, '--out', out, '--steps', 6,
                                 '--save_every', 1, '--keep', '--lr', 0.02])
    assert code == 0, error
    errors = {step: validation_error(out / f'step{step}.pt', folder, **splits) for step in range(1, 7)}
    best = torch.load(out / 'best.pt', weights_only=True)
    assert best['valid'] == pytest.approx(min(errors.values()))
    assert best['valid'] == pytest.approx(errors[best['step']])
    on_test = validation_error(out / 'best.pt', folder, **dict.fromkeys(names, 'test'))
    assert ('the weights of best.pt, chosen on the validation split' in printed) == ('valid' in splits.values())
    assert ('split, and of swe_pdb on these tests, whose errors' in printed) == (len(names) == 2)
    assert ('the weights of last.pt; best.pt was chosen on these tests' in printed) == ('valid' not in splits.values())
    assert (on_test == pytest.approx(best['valid'])) == ('valid' not in splits.values())
    code, error, again = call(['--checkpoint', out], evaluate)                 # takes the weights of the table
    chosen = 'best.pt' if 'valid' in splits.values() else 'last.pt'
    assert code == 0 and again.startswith(f'{out}/{chosen}: step ') and again.splitlines()[1:] == (
        printed.splitlines()[-len(again.splitlines()):-1]), again


def test_without_a_finite_validation_error_the_last_weights_are_scored(folder, tmp_path, call):
    with h5py.File(folder / 'kept/valid.h5', 'r+') as file:
        file['data'][:] = 3e38
    flags = [*TINY, '--data', folder, '--datasets', 'kept', '--out', tmp_path / 'out', '--steps', 2]
    code, error, printed = call(flags)
    line = 'step 2: valid inf\nno validation error was finite, so there is no best.pt; the weights of last.pt:\n'
    assert code == 0 and line in printed, error
    assert 'kept ' in printed.splitlines()[-2] and not (tmp_path / 'out/best.pt').exists()
    assert log(tmp_path / 'out')[-1]['valid'] is None


@pytest.mark.parametrize('more', [[], ['--validation', 0.25]])
def test_fine_tuning_chooses_on_valid_h5_unless_it_holds_out_training_trajectories(
        more, folder, pretrained, tmp_path, call):
    code, error, printed = call(['--checkpoint', pretrained, '--dataset', 'kept', '--data', folder, '--out',
                                 tmp_path / 'out', '--steps', 2, *more], finetune)
    assert code == 0 and 'chosen on the validation split' in printed, error
    best = torch.load(tmp_path / 'out/best.pt', weights_only=True)
    on_valid = validation_error(tmp_path / 'out/best.pt', folder, kept='valid')
    assert (best['valid'] == pytest.approx(on_valid)) == (not more)


def test_a_third_array_is_written_as_valid_h5_and_check_compares_all_splits(tmp_path, call):
    train, test, valid = (travelling(N, 12, 16, 1, 0.4) for N in (5, 3, 2))
    valid[1], test[2] = train[0], valid[0]
    data.write(tmp_path / 'own', train, test, valid=valid)
    item = data.Trajectories(tmp_path, 'own', 'valid', 2, None)
    np.testing.assert_array_equal(item.read(1, 0, 12), np.float32(train[0]))
    code, _, printed = call(['own', '--check', '--data', tmp_path], prepare)
    assert code == 1 and [line.split('/')[-1] for line in printed.splitlines() if line.startswith('WRONG')] == [
        f'{split}.h5: 1 of {N} trajectories are in {other}.h5 too'
        for split, N, other in (('valid', 2, 'train'), ('test', 3, 'valid'))]
    with h5py.File(tmp_path / 'own/valid.h5', 'r+') as file:
        del file['data']
        file['data'] = np.float32(valid[:, :, :8])
    with pytest.raises(configs.InputError, match=r'test.h5 has a grid of 16x16 .* valid.h5 a grid of 8x16'):
        data.Trajectories(tmp_path, 'own', 'train', 2, None)
