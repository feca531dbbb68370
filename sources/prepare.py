"""Convert public benchmark downloads into the layout of data.py.

    python -m sources.prepare swe_pdb --source 2D_rdb_NA_NA.h5      one file, into data/swe_pdb/
    python -m sources.prepare ns2d_pda --source NavierStokes-2D     a folder of files
    python -m sources.prepare swe_pdb --source dpot/swe_pdb --from dpot  a dataset that DPOT's scripts have converted
    python -m sources.prepare layer --source turbulent_radiative_layer_2D --from the_well  a dataset of The Well
    python -m sources.prepare swe_pdb --check                       the statistics and defects of data/swe_pdb/

One function per raw format says how the axes of a download are ordered, and `convert` copies it block by block. Values
stay as they are, on their own grid; float64 is rounded to float32. A new raw format takes a function, which returns a
`Source`, and a row of the table OFFICIAL.

The training trajectories are the first of a file, and the test trajectories come from the tail that the benchmark
reserves for testing, in the paper's sizes (configs.py). A file with fewer trajectories than the official one is split
in the same proportion. Beside `data` stand `source_file` and `source_index` of each trajectory, and what else the
benchmark provides (buoyancy, viscosity, ...).

Shapes: N trajectories, T frames, H W grid points, C channels; X Y Z where the order of the axes matters.
"""
import json
import math
import random
import re
import sys
from contextlib import ExitStack, nullcontext
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import configs
from configs import DATASETS, SCALES, InputError

import h5py
import numpy as np
import torch

import data
from data import SPLITS, writer
from runtime import terminal
from runtime.files import lock, naming
from runtime.terminal import Progress
from sources.check import check_space, defects, missing
from sources.pdes import FAMILIES
from sources.pdes.navier_stokes import navier_stokes
from sources.well import AGAIN, DAMAGED, Source, file_format, find_array, open_hdf5, refuse, the_well

BLOCK = 2 ** 26                     # bytes that are read at once, as float32


def last_number(path):
    """For sorting: solution_10.nc comes after solution_9.nc."""
    return int(re.findall(r'\d+', '0' + Path(path).stem)[-1])


def find_file(name, source):
    """`source` itself or, in a folder, the file with a published name, or else the only one."""
    if source.is_file():
        return source
    names = OFFICIAL[name].files
    files = sorted(path for path in source.glob('*') if path.suffix in ('', '.h5', '.hdf5', '.mat', '.nc'))
    files = [path for path in files if path.stem in names] or [path for path in files if path.suffix]
    if len(files) != 1:
        refuse(source, ' or '.join(names), ' '.join(path.name for path in files[:5]) or 'no such file', 'name the file')
    return files[0]


def rows_of_pieces(name, source, key, axes):
    """All rows of `key` in <key>_0.nc, <key>_1.nc, ... or in the joined file -> [(file, index)], shape of a row."""
    files, items = sorted(source.glob(f'{key}_*.nc'), key=last_number), []
    if [last_number(path) for path in files] != list(range(len(files))):
        refuse(source, f'{key}_0.nc, {key}_1.nc, ...', ' '.join(path.name for path in files), 'a piece is missing')
    for path in files or [find_file(name, source)]:
        with open_hdf5(path) as file:
            N, *shape = find_array(file, key, axes).shape
        items += [(path, i) for i in range(N)]
    return items, tuple(shape)


def find_groups(name, source, pattern, key, axes):
    """The groups of a file, one a trajectory -> names sorted by number, [(file, index)], the shape of `key` in one."""
    path = find_file(name, source)
    with open_hdf5(path) as file:
        names = sorted((name for name in file if re.fullmatch(pattern, name)), key=last_number)
        if not names:
            refuse(path, f'groups {pattern}', ' '.join(list(file)[:5]) or 'nothing')
        return names, [(path, i) for i in range(len(names))], find_array(file[names[0]], key, axes).shape


# ------------------------------------------------------------------------------------------------ one function a format

def fno(name, source):
    """FNO's vorticity: `u` at t = 1, 2, ... in MATLAB's order (N, X, Y, T), of which the paper's frames are taken.

    v7.3 is HDF5, which shows all axes reversed, (T, Y, X, N); v5 needs SciPy and is read whole (0.4 GB for 1e-5).
    """
    path, opener = find_file(name, source), open_hdf5
    if file_format(path, 'HDF5', 'MATLAB v5') == 'HDF5':
        with open_hdf5(path) as file:
            T, Y, X, N = find_array(file, 'u', 'TYXN').shape
    else:
        try:
            from scipy.io import loadmat
            u = np.transpose(loadmat(path, variable_names=['u'])['u'])
            T, Y, X, N = u.shape
        except ImportError:
            refuse(path, 'SciPy, to read MATLAB v5', 'no such package', 'run: pip install scipy')
        except Exception as error:                      # SciPy's reader lets many kinds of errors through
            refuse(path, 'MATLAB v5, u (N, X, Y, T)', error)
        opener = lambda path: nullcontext({'u': u})
    return Source(f'u, {N} trajectories', (min(T, DATASETS[name].frames), X, Y, 1), [(path, i) for i in range(N)],
                  lambda file, n, t: file['u'][t, :, :, n].transpose(3, 0, 2, 1)[..., None], opener)


def one_step_errors(name, source):
    """Relative errors of our solver over one frame of a vorticity dataset: as it is, and with x and y exchanged.

    The exchange is a reflection, which changes the sign of vorticity, so that a transposed field is advected in the
    wrong direction: errors of 3e-4 and 0.1 at viscosity 1e-3, of 1e-2 and 0.2 at 1e-5.
    """
    frame, pairs = source.shape[0] // 4, []
    for path, i in (source.items['train'] if isinstance(source.items, dict) else source.items)[:2]:
        with source.open(path) as file:
            pairs.append(read_block(source, file, path, slice(i, i + 1), slice(frame, frame + 2))[0, ..., 0])
    w = torch.from_numpy(np.stack(pairs))                                           # (2, 2, H, W)
    if w.shape[2] != w.shape[3]:
        refuse(path, 'a square grid', tuple(w.shape[2:]))
    for start, after in (w.unbind(1), w.mT.unbind(1)):
        solution = navier_stokes(start, float(name.removeprefix('ns2d_fno_')), 1)[:, 0]
        yield float((solution - after).norm() / after.norm())


def pdebench_flow(name, source):
    """PDEBench's compressible flow: one dataset a channel, (N, T, X, Y) or (N, T, X, Y, Z).

    If the file has the attributes M, eta and zeta, they must be those in the name of our dataset.
    """
    path, channels, axes = find_file(name, source), DATASETS[name].channels, 'NTXYZ'[:2 + DATASETS[name].dims]
    with open_hdf5(path) as file:
        for channel in channels:
            N, *shape = find_array(file, channel, axes).shape
        for key in ('M', 'eta', 'zeta'):
            ours = float((re.search(rf'_{key}(\d[^_]*)', name) or [0, '1e-8'])[1])      # 3-D: 1e-8, not in the name
            if abs(float(file.attrs.get(key, ours)) / ours - 1) > 1e-3:
                refuse(path, f'{key} = {ours:g}', f'{float(file.attrs[key]):g}', f'take {OFFICIAL[name].files[0]}')
    return Source(f'{" ".join(channels)}, {N} trajectories', (*shape, len(channels)), [(path, i) for i in range(N)],
                  lambda file, n, t: np.stack([file[channel][n, t] for channel in channels], -1))


def pdebench_groups(name, source):
    """PDEBench's shallow water (T, X, Y, C) and diffusion-reaction (T, Y, X, C): one group "0000", ... a trajectory."""
    groups, items, shape = find_groups(name, source, r'\d+', 'data', 'TXYC')
    return Source(f'{len(groups)} groups of data {shape}', shape, items,
                  lambda file, n, t: np.stack([file[group]['data'][t] for group in groups[n]]))


def pdearena(name, source):
    """PDEArena's buoyant smoke: files with u, vx, vy (N, T, X, Y), float64, in a group train, valid or test.

    train and valid are our training split. dt is the one that the file states, not the differences of its `t`. The
    buoyancy is kept. vx and vy stay on the faces of the cells, half a cell off u.
    """
    files = sorted(source.glob('*.h5')) if source.is_dir() else [source]
    splits, forms, channels = {'train': [], 'valid': [], 'test': []}, {}, ('u', 'vx', 'vy')
    group_of = lambda file: next((file[split] for split in splits if split in file), file)
    for path in files:
        with open_hdf5(path) as file:
            group = group_of(file)
            (N, *shape), *others = [find_array(group, channel, 'NTXY').shape for channel in channels]
            forms[(*shape, 3), float(find_array(group, 'dt', 'N')[0])] = path.name
            if group == file or any(other != (N, *shape) for other in others):
                refuse(path, 'u, vx, vy of one shape in a group train, valid or test', ' '.join(file))
            splits[group.name[1:]] += [(path, i) for i in range(N)]
    if len(forms) != 1:
        refuse(source, 'files *.h5 of one shape and dt', forms or 'none', 'keep each dataset in its own folder')
    (shape, dt), = forms
    return Source(f'{len(files)} files, {" ".join(channels)}', shape,
                  {'train': splits['train'] + splits['valid'], 'test': splits['test']},
                  lambda file, n, t: np.stack([group_of(file)[channel][n, t] for channel in channels], -1), dt=dt,
                  extra=lambda file, n: {'buoyancy': group_of(file)['buo_y'][n]})


STEP = {'cavity': 0.1, 'cylinder': 0.001, 'tube': 0.1}              # seconds a frame, as in CFDBench's loaders


def cfdbench(name, source):
    """CFDBench's cavity, cylinder and tube: one folder a case with u.npy, v.npy (T, Y, X), rows are y, and case.json.

    Whole cases are split, so that none is on both sides: those of prop, bc and geo, in the order of their numbers, are
    shuffled with seed 0; 80 % of each problem are for training, 10 % unused, 10 % for testing. A trajectory is 20
    consecutive frames; an incomplete end of a case is dropped, not filled up with copies. The dam is left out. Kept are
    step (s), density, viscosity and the speed of the lid or inlet.
    """
    T, splits, about = DATASETS[name].frames, {'train': [], 'test': []}, {}

    def components(case):
        for path in (case / 'u.npy', case / 'v.npy'):
            file_format(path, 'NumPy')
            with naming(f'--source {path}', DAMAGED, 'numpy'):
                yield np.load(path, mmap_mode='r')          # of which only what is used is read
    for problem in STEP:
        cases = [case for part in ('prop', 'bc', 'geo')
                 for case in sorted((source / problem / part).glob('case*'), key=last_number)]
        random.Random(0).shuffle(cases)
        count, rounded = len(cases), round if problem == 'cavity' else int          # as in DPOT
        train = max(1, min(rounded(0.8 * count), count - 1))
        unused = max(0, min(rounded(0.1 * count), count - train - 1))
        for i, case in enumerate(cases):
            u, v = components(case)
            if u.ndim != 3 or u.shape != v.shape:
                refuse(case, 'u and v of one shape (T, Y, X)', f'{u.shape} and {v.shape}', AGAIN)
            about[case] = mask, _ = mask_and_parameters(problem, case, u.shape[1:])
            if not train <= i < train + unused:
                splits['train' if i < train else 'test'] += [(case, segment) for segment in range(len(u) // T)]
    if not about:
        refuse(source, 'folders cavity/bc/case0000 and so on', 'none', 'unpack the zip files into one folder')

    def read(case, n, t):
        u, v = components(case)
        return np.stack([field[n.start * T:n.stop * T].reshape(-1, T, *u.shape[1:])[:, t]
                         for field in (u, v, np.broadcast_to(about[case][0], u.shape))], -1)
    return Source(f'{len(about)} cases, without the dam', (T, *mask.shape, 3), splits, read, nullcontext,
                  extra=lambda case, n: {key: [value] * (n.stop - n.start) for key, value in about[case][1].items()})


def mask_and_parameters(problem, case, grid):
    """The mask (Y, X) of a case of CFDBench, 0 where the field is solid or prescribed, and its parameters by name.

    It is 0 for the tube and the cylinder in the first and last row, the walls, and in the first column, the inlet
    (CFDBench's rule for the cylinder, which we apply to the tube as well), and where the centre of a cell is within the
    cylinder's radius of center_x, center_y, or the origin.
    """
    mask = np.ones(grid, np.float32)
    if problem != 'cavity':
        mask[[0, -1]] = mask[:, 0] = 0
    try:
        values = json.loads((case / 'case.json').read_text())
        if problem == 'cylinder':
            y, x = (values[f'{axis}_min'] + (np.arange(n) + 0.5) * (values[f'{axis}_max'] - values[f'{axis}_min']) / n
                    - values.get(f'center_{axis}', 0) for axis, n in zip('yx', grid))
            mask[y[:, None] ** 2 + x ** 2 < values['radius'] ** 2] = 0
        parameters = dict(step=STEP[problem], density=values['density'], viscosity=values['viscosity'],
                          speed=values['vel_top' if problem == 'cavity' else 'vel_in'])
    except (OSError, ValueError, KeyError) as error:
        refuse(case, 'case.json with its parameters', f'{type(error).__name__} {error}', AGAIN)
    if not mask.any() or problem == 'cylinder' and mask[1:-1, 1:].all():
        refuse(case, 'a cylinder that covers cells of the grid', values, 'correct case.json')
    return mask, parameters


def poseidon_wave(name, source):
    """Poseidon's waves: `solution` (N, T, X, Y) and the speed `c` (N, X, Y) in m/s, which becomes a static channel."""
    items, shape = rows_of_pieces(name, source, 'solution', 'NTXY')
    speeds, grid = rows_of_pieces(name, source, 'c', 'NXY')
    if len(items) != len(speeds) or shape[1:] != grid:
        refuse(source, f'{len(items)} speeds {shape[1:]}', f'{len(speeds)} {grid}', 'is a piece missing?')
    speed_of = {(str(path), i): speed for (path, i), speed in zip(items, speeds)}

    def read(file, n, t):
        fields = np.stack([file['solution'][n, t]] * 2, -1)
        for i in range(n.start, n.stop):
            path, row = speed_of[file.filename, i]
            with open_hdf5(path) as piece:
                fields[i - n.start, ..., 1] = piece['c'][row]
        return fields
    return Source(f'solution and c, {len(items)} trajectories', (*shape, 2), items, read, channels=('u', 'c'))


def poseidon_kolmogorov(name, source):
    """Poseidon's FNS-KF: `solution` (N, T, C, X, Y), C = u, v, and the force f = 0.1 sin(2 pi (x+y)) at x = i / N."""
    items, (T, C, X, Y) = rows_of_pieces(name, source, 'solution', 'NTCXY')
    f = 0.1 * np.sin(2 * np.pi * (np.arange(X)[:, None] / X + np.arange(Y) / Y), dtype=np.float32)[..., None]

    def read(file, n, t):
        uv = np.moveaxis(file['solution'][n, t], 2, -1)
        return np.concatenate([uv, np.broadcast_to(f, (*uv.shape[:-1], 1))], -1)
    return Source(f'solution, {len(items)} trajectories', (T, X, Y, C + 1), items, read, dt=0.05)


def cno(name, source):
    """CNO's steady problems: one group Sample_<i> a sample, whose `input` and `output` (X, Y) become two frames."""
    groups, items, shape = find_groups(name, source, r'[Ss]ample_\d+', 'input', 'XY')

    def read(file, n, t):
        return np.stack([[file[group][frame] for frame in ('input', 'output')[t]] for group in groups[n]])[..., None]
    return Source(f'{len(groups)} groups of input and output {shape}', (2, *shape, 1), items, read)


def dpot(name, source):
    """What DPOT's scripts write: `data` (H, W, T, C), in 3-D (H, W, D, T, C), without C for FNO; it is split already.

    Either folders train and test with one file a trajectory, or two files named after the splits, with an axis N in
    front. DPOT's ns2d_fno_1e-3 has x and y exchanged, which is detected and undone; its waves lack c.
    """
    single, splits = not (source / 'train').is_dir(), {}
    layouts = ['N' * single + space + 'T' + channel for space in ('HW', 'HWD') for channel in ('C', '')
               if name not in DATASETS or DATASETS[name].dims == len(space)]
    for split, words in dict(train=('train',), test=('test', 'valid')).items():
        files = [path for path in source.glob('*' if single else f'{split}/*') if path.suffix in ('.h5', '.hdf5')]
        if single:
            files = next(filter(None, ([path for path in files if word in path.stem.lower()] for word in words)), [])
            files = [path for path in files if path.name.lower().startswith(name.lower())] or files
        if not files or single and len(files) > 1:
            refuse(source, f'folders train and test of data_<i>.hdf5, or one file named {" or ".join(words)}',
                   ' '.join(path.name for path in files) or 'none', 'give the folder of one dataset')
        with open_hdf5(files[0]) as file:
            shape = find_array(file, 'data', *layouts).shape
        splits[split] = [(path, i) for path in sorted(files, key=last_number) for i in range(shape[0] if single else 1)]
    axes = next(axes for axes in layouts if len(axes) == len(shape))
    sizes = {'C': 1, **dict(zip(axes, shape))}

    def read(file, n, t):
        u = file['data'][(n,) * single + (..., t) + (slice(None),) * (axes[-1] == 'C')]
        u = u if axes[-1] == 'C' else u[..., None]
        return np.moveaxis(u if single else u[None], -2, 1)
    result = Source(f'DPOT, data ({", ".join(axes)}): {len(splits["train"])} train, {len(splits["test"])} test',
                    tuple(sizes[axis] for axis in 'THWDC' if axis in sizes), splits, read,
                    channels=('u',) if name.startswith('wave_') else ())
    if name in DATASETS and name.startswith('ns2d_fno'):
        as_is, exchanged = one_step_errors(name, result)
        if exchanged < as_is:
            return result._replace(description=f'{result.description}; the exchange of x and y is undone',
                                   read=lambda *place: read(*place).swapaxes(2, 3))
    return result


ORIGINS = {'dpot': dpot, 'the_well': the_well}          # datasets of any name, which are split already


# ------------------------------------------------------------------------------------------------ what was published

class Official(NamedTuple):
    """A published dataset."""
    source: object              # the function of its raw format: (name, path) -> Source
    files: tuple                # names of its file without suffix: as published, and as DaRUS numbers it
    count: int = 0              # trajectories in it; 0 if they are split already
    tail: int = 0               # how many of these, the last, are reserved for testing
    pde: str = ''               # the equation, in words; without it, as in pdes.FAMILIES


def pdebench(initial, M, eta, number, count=10000, size='_128', dims=2):
    return Official(pdebench_flow, (f'{dims}D_CFD_{initial}_M{M}_Eta{eta}_Zeta{eta}_periodic{size}_Train', str(number)),
                    count, count // 10, f'compressible Navier-Stokes, gamma = 5/3, M = {M}, eta = zeta = {eta}, '
                    f'unit torus, axes x y{" z" * (dims == 3)}')


SMOKE = Official(pdearena, ('NavierStokes2D_*',), 0, 0,
                 'incompressible Navier-Stokes with buoyant smoke u, viscosity 0.01, box of side 32, axes x y')
WAVE = 'u_tt = c^2 Lap u, c in m/s, unit square, absorbing boundary, axes x y'
OFFICIAL = {
    'ns2d_fno_1e-5': Official(fno, ('NavierStokes_V1e-5_N1200_T20',), 1200, 200),
    'ns2d_fno_1e-4': Official(fno, ('ns_V1e-4_N10000_T30',), 10000, 200),
    'ns2d_fno_1e-3': Official(fno, ('ns_V1e-3_N5000_T50',), 5000, 200),
    'ns2d_pdb_M1_eta1e-1_zeta1e-1': pdebench('Rand', '1.0', '0.1', 164691),
    'ns2d_pdb_M1_eta1e-2_zeta1e-2': pdebench('Rand', '1.0', '0.01', 164690),
    'ns2d_pdb_M1e-1_eta1e-1_zeta1e-1': pdebench('Rand', '0.1', '0.1', 164688),
    'ns2d_pdb_M1e-1_eta1e-2_zeta1e-2': pdebench('Rand', '0.1', '0.01', 164687),
    'swe_pdb': Official(pdebench_groups, ('2D_rdb_NA_NA', '133021'), 1000, 100, FAMILIES['swe_pdb'].pde + ', axes x y'),
    'dr_pdb': Official(pdebench_groups, ('2D_diff-react_NA_NA', '133017'), 1000, 100,
                       FAMILIES['dr_pdb'].pde + ', axes y x'),
    'ns2d_pda': SMOKE,
    'ns2d_cond_pda': SMOKE,
    'cfdbench': Official(cfdbench, ('CFDBench',),
                         pde='incompressible Navier-Stokes: lid-driven cavity, cylinder, tube, axes y x'),
    'ns2d_pdb_M1_eta1e-8_zeta1e-8_turb_512': pdebench('Turb', '1.0', '1e-08', 164686, 1000, '_512'),
    'ns2d_pdb_M1e-1_eta1e-8_zeta1e-8_turb_512': pdebench('Turb', '0.1', '1e-08', 164685, 1000, '_512'),
    'ns2d_pdb_M1_eta1e-8_zeta1e-8_rand_512': pdebench('Rand', '1.0', '1e-08', 164692, 1000, '_512'),
    'ns2d_pdb_M1e-1_eta1e-8_zeta1e-8_rand_512': pdebench('Rand', '0.1', '1e-08', 164689, 1000, '_512'),
    'ns3d_pdb_M1_rand': pdebench('Rand', '1.0', '1e-08', 164693, 100, '', 3),
    'ns3d_pdb_M1e-1_rand': pdebench('Rand', '0.1', '1e-08', 173286, 100, '', 3),
    'ns3d_pdb_M1_turb': pdebench('Turb', '1.0', '1e-08', 164694, 600, '', 3),
    'kolmogorov': Official(poseidon_kolmogorov, ('FNS-KF',), 20000, 240,
                           'incompressible Navier-Stokes with the force f on u and v, unit torus, axes x y'),
    'wave_layer': Official(poseidon_wave, ('Wave-Layer',), 10512, 240, WAVE),
    'wave_gauss': Official(poseidon_wave, ('Wave-Gauss',), 10512, 240, WAVE),
    'cno_poisson': Official(cno, ('PoissonData_64x64_IN',), 1408, 256, '-Lap u = f, unit square, u = 0 at the sides'),
    'cno_darcy': Official(cno, ('Darcy_64x64_IN',), 512, 128, '-div(a grad u) = f, unit square, u = 0 at the sides'),
    'cno_airfoil': Official(cno, ('Airfoil_128x128_IN',), 1006, 128, 'steady Euler flow round an airfoil'),
}


# ------------------------------------------------------------------------------------------------ converting

def split_trajectories(name, source):
    """{split: [(file, index)]}, as many as the paper uses."""
    ours, items = DATASETS.get(name), source.items
    if isinstance(items, dict):             # all of CFDBench: the paper's sizes cut off most of the tube
        sizes = {} if ours is None or name == 'cfdbench' else {'train': ours.train, 'test': ours.test}
        return {split: items[split][:sizes.get(split)] for split in SPLITS if split in items}
    test = min(ours.test, max(1, round(len(items) * ours.test / (ours.train + ours.test))))
    start = max(0, len(items) - (OFFICIAL[name].tail if len(items) >= OFFICIAL[name].count else test))
    return {'test': items[start:start + test], 'train': items[:min(ours.train, start)]}


def read_block(source, file, path, indices, frames):
    """Trajectories and frames (two slices) of an open file: (n, t, *space, C), float32, of the right shape, finite."""
    place = f'{path}, trajectory {indices.start}'
    shape = (indices.stop - indices.start, frames.stop - frames.start, *source.shape[1:])
    try:
        block = source.read(file, indices, frames).astype(np.float32, copy=False)
    except (KeyError, ValueError) as error:             # a group lacks a member, or members differ in shape
        refuse(place, shape[1:], error)
    if block.shape != shape:
        refuse(place, shape[1:], block.shape[1:], AGAIN)
    if source.nan_to_num:
        return np.nan_to_num(block)
    finite = np.isfinite(block).all(tuple(range(1, block.ndim - 1)))                # (n, C)
    if not finite.all():
        i, c = np.argwhere(~finite)[0]
        channel = source.channels[c] if source.channels else f'channel {c}'
        refuse(f'{path}, {channel}, trajectory {indices.start + i}', 'finite values', 'nan or infinity',
               'it is damaged or was published so; --nan_to_num writes 0 for nan')
    return block


def block_slices(items, shape):
    """Cut [(file, index)] into blocks of at most BLOCK bytes -> (file, slices of places in items, indices, frames)."""
    T, frame = shape[0], 4 * math.prod(shape[1:])
    several, frames = max(1, BLOCK // (frame * T)), max(1, BLOCK // frame)
    for (file, shift), run in groupby(enumerate(items), lambda row: (row[1][0], row[1][1] - row[0])):
        places = [place for place, _ in run]
        for first in places[::several]:
            stop = min(first + several, places[-1] + 1)
            for t in range(0, T, frames):
                yield file, slice(first, stop), slice(first + shift, stop + shift), slice(t, min(t + frames, T))


def copy_trajectories(source, items, root, output, title):
    """Copy the trajectories `items` of the source at the path `root` into the open file `output`."""
    with Progress(total=output['data'].nbytes, desc=title, unit='B', unit_scale=True) as bar:
        for path, place, indices, frames in block_slices(items, source.shape):
            with source.open(path) as file:
                block = read_block(source, file, path, indices, frames)
                extra = source.extra(file, indices)
            output['data'][place, frames] = block
            for key, values in extra.items():
                text = np.asarray(values[0]).dtype.kind in 'SU'
                output.require_dataset(key, (len(items), *np.shape(values)[1:]), h5py.string_dtype() if text else 'f4',
                                       fillvalue=None if text else np.nan)[place] = values
            bar.update(block.nbytes)
    output['source_index'] = [index for _, index in items]
    output['source_file'] = [str(path.relative_to(root if root.is_dir() else root.parent)) for path, _ in items]


def convert(name, path, folder='data', origin='', nan_to_num=False):
    """Write folder/name/test.h5, train.h5 and perhaps valid.h5 from the download at `path`, block by block.

    origin: one of ORIGINS; nan_to_num: write 0 for nan and the largest numbers for infinities. Existing files are kept.
    """
    path, folder, ours = Path(path), Path(folder) / name, DATASETS.get(name)
    source = (ORIGINS[origin] if origin else OFFICIAL[name].source)(name, path)._replace(nan_to_num=nan_to_num)
    parts = split_trajectories(name, source)
    if not all(parts.values()):
        refuse(path, 'at least one trajectory for training and one for testing', source.description, 'download more')
    files = {file for items in parts.values() for file, _ in items}
    about = dict(source=(files.pop() if len(files) == 1 else path.resolve()).name, pde='', dt=1.0)
    if ours:
        source = source._replace(channels=source.channels or ours.channels)
        forms = [f'{T} frames, {dims} dimensions, {C} channels' for T, dims, C in (
            (ours.frames, ours.dims, len(source.channels)), (source.shape[0], len(source.shape) - 2, source.shape[-1]))]
        if forms[0] != forms[1]:
            refuse(path, *forms)
        static = [channel for channel in source.channels if channel in SCALES]
        about.update(channels=source.channels, dt=source.dt or ours.dt, pde=OFFICIAL[name].pde or FAMILIES[name].pde,
                     static=static, t_test=min(ours.t_test, ours.frames - 1))
        about.update({'scale': [SCALES[channel] for channel in static]} if static else {})
    about.update(source.about)
    shapes = {part: (len(items), *source.shape) for part, items in parts.items()}
    data.check(folder, {part: (shape, np.dtype('f4'), about) for part, shape in shapes.items()})
    todo = missing(folder, shapes, about)
    print(f'{name}: {about["source"]}: {source.description}')
    if not isinstance(source.items, dict) and len(source.items) < OFFICIAL[name].count:
        print(f'  fewer than the {OFFICIAL[name].count} of the official file: split in the same proportion')
    for part in reversed(parts):
        print(f'  {part:5} {shapes[part]}{f", the paper {getattr(ours, part)}" if ours else ""}'
              f'{"" if part in todo else ", exists"}')
    check_space(folder.parent, 4 * sum(math.prod(shapes[part]) for part in todo))
    with lock(folder, wait='converting'), ExitStack() as stack:
        for part in todo:
            output = stack.enter_context(writer(folder / f'{part}.h5', shapes[part], **about))
            copy_trajectories(source, parts[part], path, output, f'{name} {part}')
            output.close()                                  # only renaming is left, so the files appear together


def main():
    parser = terminal.Parser(description=__doc__.split('\n\nOne function')[0])
    parser.add_argument('name', help='a dataset of configs.py; with --check or --from, any name')
    parser.add_argument('--source', metavar='X', help='the file or folder as it was downloaded')
    parser.add_argument('--from', dest='origin', default='', choices=ORIGINS, help='stored as by DPOT or The Well')
    parser.add_argument('--data', default='data', metavar='X', help='folder of the datasets [data]')
    parser.add_argument('--nan_to_num', action='store_true', help="write 0 for nan, as The Well's loader does")
    parser.add_argument('--check', action='store_true', help='print statistics and defects; exit code 1 if any')
    args = parser.parse_args()
    if args.name in ('', '..') or args.name != Path(args.name).name:
        raise InputError(f'{args.name!r}: the name of a dataset is that of a folder in --data, without a slash')
    if args.check:
        lines = defects(args.data, args.name)
        print('\n'.join(f'WRONG {line}' for line in lines) or 'nothing is wrong')
        sys.exit(1 if lines else 0)
    if not args.origin and args.name not in OFFICIAL:
        raise InputError(f'unknown dataset {args.name!r}{configs.nearest(args.name, OFFICIAL)}')
    if args.source is None:
        file = 'its folder' if args.origin else OFFICIAL[args.name].files[0]
        raise InputError(f'--source is missing: give the path to which {file} was downloaded')
    convert(args.name, args.source, args.data, args.origin, args.nan_to_num)


if __name__ == '__main__':
    terminal.cli(main)
