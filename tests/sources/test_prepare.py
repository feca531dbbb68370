"""Conversion of the benchmarks' files, real samples or tiny ones, compared with a second, plain reading of them."""
import json
import random
from collections import Counter
from dataclasses import replace

import h5py
import numpy as np
import pytest

import configs
from fields import raw
from helpers import TINY
from sources import formats, generate, prepare

CNS = 'ns2d_pdb_M1_eta1e-1_zeta1e-1'
CNS_FILE = '2D_CFD_Rand_M1.0_Eta0.1_Zeta0.1_periodic_128_Train.hdf5'


def random_field(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def write_hdf5(path, **datasets):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, 'a') as file:
        for key, values in datasets.items():
            file[key] = values
    return path


def write_compressible(path, N=4, H=4):
    """A file of PDEBench's compressible flow with 22 time stamps and positive density and pressure."""
    fields = {channel: random_field(N, 21, H, H) + 9 * i for i, channel in enumerate(configs.DATASETS[CNS].channels)}
    write_hdf5(path, **fields, **{'t-coordinate': np.arange(22.) / 20})
    return np.stack(list(fields.values()), -1)


def convert(tmp_path, name, source):
    """The fields of train.h5, those of test.h5, and the attributes, which are equal."""
    prepare.convert(tmp_path / 'data' / name, prepare.official(name, source))
    fields, attributes = [], []
    for split in ('train', 'test'):
        with h5py.File(tmp_path / 'data' / name / f'{split}.h5') as file:
            assert file['data'].dtype == np.float32 and file['data'].chunks is None
            fields.append(file['data'][:])
            attributes.append({key: np.ravel(value).tolist() for key, value in file['data'].attrs.items()})
    assert attributes[0] == attributes[1] and attributes[0]['pde']
    return *fields, attributes[0]


def plain_fno(path):
    u = pytest.importorskip('scipy.io').loadmat(path)['u'] if 'V1e-5' in path.name else h5py.File(path)['u'][:].T
    return np.moveaxis(u, 3, 1)[..., None]


def plain_groups(path):
    file = h5py.File(path)
    return np.array([file[f'{i:04d}/data'] for i in range(len(file))])


def plain_cns(path):
    return np.stack([h5py.File(path)[key] for key in ('Vx', 'Vy', 'density', 'pressure')], -1)


def plain_wave(path):
    u, c = (h5py.File(path)[key][:] for key in ('solution', 'c'))
    return np.stack([u, np.repeat(c[:, None] / np.float32(1000), u.shape[1], 1)], -1)


def plain_pda(path):
    files = [h5py.File(path / f'NavierStokes2D_{split}_198010_0.50000_100.h5')[split] for split in ('train', 'test')]
    return np.concatenate([np.stack([file[key] for key in ('u', 'vx', 'vy')], -1) for file in files]).astype(np.float32)


def plain_cfdbench(path):
    """After the shuffle, the first two of the three cases of a problem are for training, the last is for testing."""
    fields = {0: [], 1: []}
    for problem in ('cavity', 'cylinder', 'tube'):
        order = ['prop', 'bc', 'geo']
        random.Random(0).shuffle(order)
        mask = np.ones((64, 64))
        for i in range(64 if problem != 'cavity' else 0):
            for j in range(64):
                x, y = -0.06 + (j + 0.5) * 0.22 / 64, -0.06 + (i + 0.5) * 0.12 / 64
                if i in (0, 63) or j == 0 or problem == 'cylinder' and np.hypot(x, y) < 0.01:
                    mask[i, j] = 0
        for i, part in enumerate(order):
            u, v = (np.load(path / problem / part / 'case0000' / f'{key}.npy')[:20] for key in 'uv')
            fields[i == 2].append(np.stack([u, v, np.broadcast_to(mask, u.shape)], -1))
    return np.array(fields[0] + fields[1], np.float32)


@pytest.mark.parametrize('name, source, plain, tests', [
    ('ns2d_fno_1e-3', 'ns_V1e-3_N5000_T50.mat', plain_fno, 1),
    ('ns2d_fno_1e-5', 'NavierStokes_V1e-5_N1200_T20.mat', plain_fno, 1), (CNS, CNS_FILE, plain_cns, 1),
    ('swe_pdb', '2D_rdb_NA_NA.h5', plain_groups, 1), ('dr_pdb', '2D_diff-react_NA_NA.h5', plain_groups, 1),
    ('ns2d_pda', 'NavierStokes-2D', plain_pda, 1), ('cfdbench', 'CFDBench', plain_cfdbench, 3),
    ('wave_gauss_c', 'Wave-Gauss.nc', plain_wave, 1), ('wave_layer', 'Wave-Layer.nc', plain_wave, 1)])
def test_a_sample_has_the_values_of_a_plain_reading_and_trains(name, source, plain, tests, tmp_path, call):
    source, dataset, folder = raw(source), configs.DATASETS[name], tmp_path / 'data'
    expected = plain(source)
    train, test, attributes = convert(tmp_path, name, source)
    assert np.array_equal(train, expected[:-tests]) and np.array_equal(test, expected[-tests:])
    is_wave = name.startswith('wave')
    attributes.pop('pde')
    assert attributes == dict(
        channels=['u', 'c'] if is_wave else list(dataset.channels), static=['c'] if is_wave else list(dataset.static),
        source=[source.name + ', c / 1000' * is_wave], dt=[dataset.dt], t_test=[dataset.t_test])
    with h5py.File(folder / name / 'test.h5', 'r+') as file:
        file['data'].attrs['t_test'] = 2                    # since a rollout of 91 frames would take long
    flags = [*TINY, '--data', folder, '--out', tmp_path / 'out', '--steps', 2, '--batch_size', 2]
    code, error, printed = call(flags)
    assert code == 0 and name in printed, error


def test_matlab_v73_is_read_with_all_axes_reversed_and_1e_4_keeps_30_of_its_50_frames(tmp_path):
    w = random_field(5, 50, 4, 6)                                                           # (N, T, X, Y)
    with h5py.File(tmp_path / 'any name', 'w', userblock_size=512) as file:
        file['u'] = w.transpose(1, 3, 2, 0)
        file['u'].attrs['MATLAB_class'] = np.bytes_('single')
    train, test, _ = convert(tmp_path, 'ns2d_fno_1e-4', tmp_path / 'any name')
    assert np.array_equal(train[..., 0], w[:4, :30]) and np.array_equal(test[..., 0], w[4:, :30])


def test_compressible_flow_gets_our_order_of_channels_whatever_the_name_of_the_file(tmp_path):
    order = 'Vx', 'Vy', 'Vz', 'pressure', 'density'
    fields = {key: random_field(4, 21, 4, 5, 6) + i for i, key in enumerate(sorted(order))}
    train, test, _ = convert(tmp_path, 'ns3d_pdb_M1_rand', write_hdf5(tmp_path / 'mine', **fields))
    assert np.array_equal([*train, *test], np.stack([fields[key] for key in order], -1))


def test_pieces_are_joined_by_number_and_medium_and_force_become_static_channels(tmp_path):
    u, c, uv = random_field(24, 16, 4, 6), random_field(24, 4, 6), random_field(12, 21, 2, 4, 6)
    for i in range(12):                                                             # 10 must come after 9
        write_hdf5(tmp_path / f'wave/solution_{i}.nc', solution=u[2 * i:2 * i + 2])
        write_hdf5(tmp_path / f'kf/solution_{i}.nc', solution=uv[i:i + 1])
    for i in range(4):                                                              # c is cut at other places than u
        write_hdf5(tmp_path / f'wave/c_{i}.nc', c=c[7 * i:7 * i + 7])
    train, test, attributes = convert(tmp_path, 'wave_gauss', tmp_path / 'wave')
    assert np.array_equal([*train, *test], u[..., None]) and attributes['channels'] == ['u']
    train, test, attributes = convert(tmp_path, 'wave_gauss_c', tmp_path / 'wave')
    both = np.concatenate([train, test])
    assert np.array_equal(both[..., 0], u) and (both[..., 1] == c[:, None] / np.float32(1000)).all()
    assert len(test) == 2 and attributes['static'] == ['c']
    train, test, attributes = convert(tmp_path, 'kolmogorov', tmp_path / 'kf')
    both = np.concatenate([train, test])
    assert np.array_equal(both[..., :2], np.moveaxis(uv, 2, -1))
    x, y = np.arange(4)[:, None] / 4, np.arange(6) / 6
    assert np.abs(both[..., 2] - 0.1 * np.sin(2 * np.pi * (x + y))).max() < 1e-7
    assert attributes['static'] == ['f'] and attributes['dt'] == [0.05]     # the generated flow has dt 0.2
    (tmp_path / 'wave/solution_3.nc').unlink()
    with pytest.raises(configs.InputError, match='solution_3.nc: missing'):
        formats.poseidon_wave('wave_gauss_c', tmp_path / 'wave')


@pytest.mark.parametrize('name, group', [('cno_poisson', 'Sample'), ('cno_darcy', 'sample'), ('cno_airfoil', 'Sample')])
def test_a_steady_problem_becomes_two_frames_and_its_groups_are_sorted_by_number(name, group, tmp_path):
    fields = random_field(12, 2, 4, 6)
    for i in range(12):
        write_hdf5(tmp_path / 'steady.h5', **{f'{group}_{i}/input': fields[i, 0], f'{group}_{i}/output': fields[i, 1]})
    write_hdf5(tmp_path / 'steady.h5', min_inp=0.0)
    train, test, attributes = convert(tmp_path, name, tmp_path / 'steady.h5')
    assert np.array_equal(np.concatenate([train, test])[..., 0], fields)
    assert attributes['t_test'] == [1] and len(test) > 1


def test_pdearena_is_split_by_group_and_not_by_name_cut_to_the_papers_sizes_and_keeps_dt(tmp_path, monkeypatch):
    fields = {}                                                                             # of each file
    for name, group, N in (('a', 'valid', 2), ('b', 'train', 3), ('train_c', 'test', 2), ('d', 'train', 1)):
        fields[name] = random_field(N, 14, 4, 6, 3).astype(float) + len(fields)
        parts = dict(zip(('u', 'vx', 'vy'), np.moveaxis(fields[name], -1, 0)), dt=np.full(N, 5.5),
                     t=np.linspace(18, 102, 14)[None].repeat(N, 0))                 # whose differences are not dt
        write_hdf5(tmp_path / f'raw/NavierStokes2D_{name}.h5', **{f'{group}/{key}': parts[key] for key in parts})
    sizes = replace(configs.DATASETS['ns2d_pda'], train=5, test=1)
    monkeypatch.setitem(configs.DATASETS, 'ns2d_pda', sizes)
    train, test, attributes = convert(tmp_path, 'ns2d_pda', tmp_path / 'raw')
    assert np.array_equal(train, np.float32([*fields['b'], *fields['d'], *fields['a']])[:5])
    assert np.array_equal(test, np.float32(fields['train_c'])[:1]) and attributes['dt'] == [5.5]
    write_hdf5(tmp_path / 'raw/other.h5', **{'train/u': np.ones((1, 13, 4, 6)), 'train/dt': [5.5]})
    for place in 'raw', 'raw/other.h5':                     # of another shape; without a test set
        with pytest.raises(configs.InputError, match='of one shape and dt, with groups train and test, found'):
            formats.pdearena('ns2d_pda', tmp_path / place)


def test_cfdbench_splits_whole_cases_into_dpots_numbers_and_drops_incomplete_ends(tmp_path):
    counts = dict(cavity=(50, 25, 84), tube=(50, 25, 100), cylinder=(50, 20, 115), dam=(1, 0, 0))
    first = tmp_path / 'cavity/prop/case0003'
    for problem, parts in counts.items():
        for part, count in zip(('bc', 'geo', 'prop'), parts):
            for i in range(count):
                case = tmp_path / problem / part / f'case{i:04d}'
                case.mkdir(parents=True)
                np.save(case / 'u.npy', np.zeros((59 if case == first else 20, 3, 3)))
    items = formats.cfdbench('cfdbench', tmp_path).items
    (tmp_path / 'cylinder/geo').rename(tmp_path / 'elsewhere')
    with pytest.raises(configs.InputError, match='cylinder/geo: expected folders case0000 and so on, found none; unp'):
        formats.cfdbench('cfdbench', tmp_path)
    cases = {split: {case for case, _ in rows} for split, rows in items.items()}
    counts = {split: Counter(case.parts[-3] for case in some) for split, some in cases.items()}
    assert counts == dict(train=dict(cavity=127, cylinder=148, tube=140), test=dict(cavity=16, cylinder=19, tube=18))
    assert not cases['train'] & cases['test']
    segments = Counter(case for rows in items.values() for case, _ in rows)
    assert segments[first] == 2 and {*segments.values()} <= {1, 2}                     # 59 frames are two segments


def test_the_cylinder_is_at_the_origin_or_at_the_centre_that_the_case_gives(tmp_path):
    box = dict(radius=0.01, x_min=-0.06, x_max=0.16, y_min=-0.06, y_max=0.06)
    for centre in {}, dict(center_x=0.05, center_y=-0.02):
        (tmp_path / 'case.json').write_text(json.dumps(box | centre))
        mask = formats.mask_of('cylinder', tmp_path, (240, 440))                    # cells of side 5e-4
        i, j = np.nonzero(mask[1:-1, 1:] == 0)
        assert abs(len(i) * 5e-4 ** 2 / (np.pi * 1e-4) - 1) < 0.02                  # its area
        assert abs((j.mean() + 1.5) * 5e-4 - 0.06 - centre.get('center_x', 0)) < 1e-4
        assert abs((i.mean() + 1.5) * 5e-4 - 0.06 - centre.get('center_y', 0)) < 1e-4
    cavity, tube = (formats.mask_of(problem, tmp_path, (5, 5)) for problem in ('cavity', 'tube'))
    assert cavity.all() and tube.sum() == 12 and not tube[[0, -1]].any() and not tube[:, 0].any()


@pytest.mark.parametrize('name, count, train, test', [
    (CNS, 10000, (0, 9000), (9000, 9200)), ('ns2d_fno_1e-3', 5000, (0, 1000), (4800, 5000)),
    ('swe_pdb', 1000, (0, 900), (900, 960)), ('ns3d_pdb_M1_turb', 600, (0, 540), (540, 600)),
    ('wave_layer', 10512, (0, 2000), (10272, 10472)), ('cno_airfoil', 1006, (0, 750), (878, 1006)),
    ('dr_pdb', 1000, (0, 900), (900, 960)), ('cno_poisson', 1408, (0, 1024), (1152, 1408)),
    ('kolmogorov', 20000, (0, 2000), (19760, 19960)),
    ('ns2d_pdb_M1_eta1e-8_zeta1e-8_rand_512', 1000, (0, 900), (900, 920)),
    (CNS, 46, (0, 45), (45, 46)), (CNS, 2, (0, 1), (1, 2)), ('cno_darcy', 30, (0, 20), (20, 30)),
])
def test_the_official_file_is_split_as_published_and_a_smaller_one_in_proportion(name, count, train, test):
    parts = prepare.split_trajectories(name, [('file', i) for i in range(count)])
    for part, (first, last) in dict(train=train, test=test).items():
        assert [index for _, index in parts[part]] == list(range(first, last))


def test_every_dataset_of_the_paper_can_be_converted_and_all_but_the_airfoil_generated():
    assert set(prepare.OFFICIAL) <= set(configs.DATASETS) and set(configs.PRETRAINING) <= set(prepare.OFFICIAL)
    assert set(prepare.OFFICIAL) - set(generate.FAMILIES) == {'cno_airfoil'}


def damage(path, how):
    """Put one defect into a file of `write_compressible`."""
    if how == 'lfs':
        path.write_text('version https://git-lfs.github.com/spec/v1\nsize 5')
        return
    with h5py.File(path, 'r+') as file:
        file.attrs['eta'] = 0.01 if how == 'eta' else 0.1
        if how == 'nan':
            file['pressure'][2, 20, 1, 1] = np.nan
        if how == 'rank':
            file['Vx'] = file.pop('Vx')[..., 0]
        if how == 'unwritten':
            del file['Vx']
            file.create_dataset('Vx', (4, 21, 4, 4), 'f4', chunks=(1, 21, 4, 4))[1:] = 1


@pytest.mark.parametrize('how, words', [
    ('lfs', 'git-lfs pointer; download it again (Unable'), ('rank', 'Vx has the shape (4, 21, 4), along'),
    ('eta', 'expected eta = 0.1, found 0.01'), ('nan', 'trajectory 2, frame 20: expected finite values'),
    ('unwritten', 'a part of /Vx was never written; write or download it again')])
def test_a_bad_source_is_refused_in_one_line_and_leaves_no_training_file(how, words, tmp_path, refused):
    write_compressible(tmp_path / CNS_FILE)
    damage(tmp_path / CNS_FILE, how)
    flags = CNS, '--source', tmp_path / CNS_FILE, '--data', tmp_path / 'data'
    error, _ = refused(flags, words, prepare, lines=0)                                      # a bar may come before it
    assert str(tmp_path / CNS_FILE) in error.splitlines()[-1], error
    assert not list((tmp_path / 'data').rglob('train.h5*'))


def test_waves_are_no_kolmogorov_flow(tmp_path, refused):
    with h5py.File(tmp_path / 'waves.nc', 'w') as file:
        file['solution'] = np.ones((2, 16, 8, 8), 'f4')
    flags = 'kolmogorov', '--source', tmp_path / 'waves.nc', '--data', tmp_path / 'data'
    refused(flags, 'expected 21 frames, 2 dimensions, 3 channels, found the shape (16, 8, 9)', prepare)
