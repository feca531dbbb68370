"""The Well's files, converted and read again: files in its layout, compared with the arrays that went in."""
import os
import shutil

import h5py
import numpy as np
import pytest

import data
from helpers import read
from sources import prepare

T = 4


def write_well(path, grid=(6, 4), N=2, frames=T, seed=0, dt=0.1):
    """Write a file with fields of each order, some of which lack axes -> (fields (N, T, *grid, C), names)."""
    random, D, axes = np.random.default_rng(seed), len(grid), 'xyz'[:len(grid)]
    kinds = {                                   # {place: which axes it has}, in the order of the channels
        't0_fields/density': [True] * (2 + D), 't0_fields/wind': [False, True, True, *[False] * (D - 1)],
        't1_fields/velocity': [True] * (2 + D), 't2_fields/stress': [True] * (2 + D),
        't0_fields/mask': [False, False, *[True] * (D - 1), False], 't2_fields/flat': [True, False, *[True] * D]}
    fields, names = [], []
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, 'w') as file:
        file.attrs.update(dataset_name='layer', grid_type='cartesian', n_trajectories=N)
        file['scalars/forcing'] = np.ones((N, frames))                                      # is left out
        for key, values in (('time', 5 + dt * np.arange(frames)), *((a, np.arange(n)) for a, n in zip(axes, grid))):
            file[f'dimensions/{key}'] = np.float32(values)
        file['dimensions'].attrs['spatial_dims'] = list(axes)
        for place, flags in kinds.items():
            sizes = [size if varies else 1 for size, varies in zip((N, frames, *grid), flags)]
            tensor = [D] * int(place[1])
            values = random.standard_normal((*sizes, *tensor)).astype(np.float32)
            file[place] = values.reshape([size for size, varies in zip(sizes, flags) if varies] + tensor)
            file[place].attrs.update(sample_varying=flags[0], time_varying=flags[1], dim_varying=flags[2:])
            fields.append(np.broadcast_to(values.reshape(*sizes, -1), (N, frames, *grid, D ** len(tensor))))
            suffixes = [''], [f'_{a}' for a in axes], [f'_{a}{b}' for a in axes for b in axes]
            names += [place.split('/')[1] + suffix for suffix in suffixes[len(tensor)]]
        for group in ('t0_fields', 't1_fields', 't2_fields'):
            file[group].attrs['field_names'] = sorted(file[group])
    return np.concatenate(fields, -1), names


def write_dataset(folder, grid=(6, 4), **parts):
    """Files of several splits, {split: [arguments of write_well]} -> {split: fields of each file}, names."""
    parts = parts or dict(train=[dict(seed=1), dict(N=3, seed=2)], valid=[dict(N=1, seed=3)], test=[dict(seed=4)])
    fields = {split: [] for split in parts}
    for split, files in parts.items():
        for i, file in enumerate(files):
            values, names = write_well(folder / f'data/{split}/f{i}.{"hdf5" if i else "h5"}', grid, **file)
            fields[split].append(values)
    return fields, names


def convert(folder, *more):
    """The flags that convert a folder written by `write_dataset`."""
    return ['layer', '--source', folder / 'raw', '--from', 'the_well', '--data', folder / 'data', *more]


@pytest.mark.parametrize('grid', [(6, 4), (4, 3, 5)])
def test_every_field_becomes_channels_and_every_split_stays_itself(grid, tmp_path, monkeypatch, call):
    fields, names = write_dataset(tmp_path / 'raw', grid)
    monkeypatch.setattr(prepare, 'BLOCK', 4 * 2 * fields['test'][0][0, 0].size)             # two frames at once
    replace, order = os.replace, []
    monkeypatch.setattr(os, 'replace', lambda part, path: (order.append(path.stem), replace(part, path)))
    code, error, printed = call(convert(tmp_path), prepare)
    assert order == ['test', 'valid', 'train'], 'a folder with a train.h5 is complete'
    assert code == 0 and 'layer train (5, 4, ' in printed, error
    for split, values in fields.items():
        item = data.Trajectories(tmp_path / 'data', 'layer', split, 2, None)
        assert item.channel_names == names and item.dt == pytest.approx(0.1)
        assert item.evolving_names == names[item.evolving] == names[:-1 - len(grid) ** 2]
        frames = np.stack([read(item, i, 0, T) for i in range(item.count)])
        np.testing.assert_array_equal(frames, np.concatenate(values))
    with h5py.File(tmp_path / 'data/layer/train.h5') as file:
        attributes = file['data'].attrs
        assert attributes['pde'] == 'The Well, layer' and attributes['source'] == 'raw'


def test_files_may_differ_in_frames_which_are_cut_and_in_dt_if_that_is_accepted(tmp_path, call, refused):
    fields, _ = write_dataset(tmp_path / 'raw', train=[dict(frames=7), dict(dt=0.3, seed=1)], test=[dict(seed=2)])
    shutil.move(tmp_path / 'raw/data', tmp_path / 'moved')              # the folder of the splits itself will do, too
    flags = convert(tmp_path, '--source', tmp_path / 'moved')
    refused(flags, 'the time between frames is 0.3, in ', prepare)
    code, error, printed = call([*flags, '--uneven'], prepare)
    assert code == 0 and 'trajectories of 4 to 7 frames are cut to the shortest' in printed, error
    with h5py.File(tmp_path / 'data/layer/train.h5') as file:
        np.testing.assert_array_equal(file['data'], np.concatenate([values[:, :4] for values in fields['train']]))
        assert file['data'].attrs['dt'] == pytest.approx(0.5 / 3)
    assert not (tmp_path / 'data/layer/valid.h5').exists()


LAST = 'data/train/f1.hdf5'                                 # the last file of the training split


@pytest.mark.parametrize('damage, words', [
    (lambda file: file.attrs.update(grid_type='spherical'), 'f1.hdf5: expected a Cartesian grid'),
    (lambda file: file['dimensions/y'].write_direct(np.cos(np.pi * np.arange(4) / 3).astype('f4')),
     'f1.hdf5: dimensions/y: the steps of 1 0.5'),
    (lambda file: file['dimensions/time'].write_direct(np.float32([0, 1, 2, 4])),
     'dimensions/time: the steps of 0 1 2 4 ... are uneven'),
    (lambda file: file.pop('t2_fields'), "object 't2_fields' doesn't exist"),
    (lambda file: file['t1_fields/velocity'].attrs.update(sample_varying=False),
     'remove what is of another dataset'),
    (lambda file: file['t0_fields'].attrs.update(field_names=['density', 'mask']), "expected ('layer', 2, "),
    (lambda file: file['t0_fields/density'].write_direct(np.full((3, 4, 6, 4), np.inf, 'f4')),
     'f1.hdf5, trajectory 0, frame 0: expected finite values')])
def test_what_cannot_be_converted_is_refused_in_one_line(damage, words, tmp_path, refused):
    write_dataset(tmp_path / 'raw')
    with h5py.File(tmp_path / 'raw' / LAST, 'r+') as file:
        damage(file)
    error, _ = refused(convert(tmp_path), words, prepare, lines=0)                  # a progress bar may come before it
    error = error.splitlines()[-1]
    assert str(tmp_path / 'raw') in error and words in error, error
    assert not list((tmp_path / 'data').rglob('train.h5*'))
