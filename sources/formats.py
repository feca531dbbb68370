"""The files that the benchmarks have published: one function a raw format, and the table OFFICIAL.

A new raw format takes a function and a row of OFFICIAL. Shapes: N trajectories, T frames, C
channels, X Y Z grid points; n and t are slices of trajectories and frames.
"""
import json
import random
import re
from contextlib import contextmanager
from typing import NamedTuple

import h5py
import numpy as np

from configs import DATASETS, InputError
from runtime.stored import whole
from sources.own import Own, Source, by_number, find_runs, reading
from sources.pdes import FAMILIES
from sources.pdes.compressible import numbers_of


@contextmanager
def open_hdf5(path):
    """An HDF5 file, as netCDF-4 and MATLAB v7.3 are, too."""
    with reading(path), h5py.File(path, 'r') as file:
        yield file


def values(path, key, index=()):
    """The part of an HDF5 dataset at an index."""
    with open_hdf5(path) as file:
        return whole(file, key)[index]


def refuse(path, expected, instead, advice="is it another benchmark's file?"):
    raise InputError(f'--source {path}: expected {expected}, found {instead}; {advice}')


def find_pieces(source, key):
    """Rows of `key` in <key>_0.nc, ... or in the joined file -> [(file, index)], their shape."""
    count = len([*source.glob(f'{key}_*.nc')])
    items = []
    for path in [source / f'{key}_{i}.nc' for i in range(count)] or [source]:
        with open_hdf5(path) as file:
            N, *shape = file[key].shape
        items += [(path, i) for i in range(N)]
    return items, tuple(shape)


def fno(name, path):
    """FNO's vorticity: `u` (N, X, Y, T), in MATLAB v5 or v7.3."""
    source = find_runs([path], Own(layout=('NXYT',), variables=('u',), uneven=True))
    T, *shape = source.shape
    return source._replace(shape=(min(T, DATASETS[name].frames), *shape), attributes={})


def pdebench_flow(name, path):
    """PDEBench's compressible flow: one dataset a channel, (N, T, X, Y) or (N, T, X, Y, Z)."""
    with open_hdf5(path) as file:
        for key, ours in numbers_of(name).items():
            if not np.isclose(file.attrs.get(key, ours), ours, rtol=1e-3, atol=0):
                refuse(path, f'{key} = {ours:g}', file.attrs[key])
    layout = 'NTXYZ'[:2 + DATASETS[name].dims]
    own = Own(layout=(layout,), variables=DATASETS[name].channels, uneven=True)
    return find_runs([path], own)._replace(attributes={})


def groups(name, path):
    """PDEBench's shallow water (T, X, Y, C) and diffusion-reaction (T, Y, X, C) in groups "0000".

    CNO's steady problems have `input` and `output` (X, Y) in groups Sample_<i>.
    """
    steady = name.startswith('cno')
    with open_hdf5(path) as file:
        found = sorted(filter(re.compile(r'([Ss]ample_)?\d+').fullmatch, file), key=by_number)
        first = file[found[0]]
        shape = (2, *first['input'].shape, 1) if steady else first['data'].shape

    def read(path, n, t):
        if steady:
            frames = ('input', 'output')[t]
            u = [[values(path, f'{group}/{frame}') for frame in frames] for group in found[n]]
            return np.stack(u)[..., None]
        return np.stack([values(path, f'{group}/data', t) for group in found[n]])
    return Source(shape, [(path, i) for i in range(len(found))], read)


def pdearena(name, source):
    """PDEArena's smoke: u, vx, vy (N, T, X, Y) in a group train, valid or test."""
    splits = {'train': [], 'valid': [], 'test': []}
    group_of = {}                                       # of each file
    forms = set()
    for path in sorted(source.glob('[!.]*.h5')) if source.is_dir() else [source]:
        with open_hdf5(path) as file:
            group, = splits.keys() & file.keys()
            N, *shape = file[f'{group}/u'].shape
            forms.add(((*shape, 3), float(file[f'{group}/dt'][0])))
        group_of[path] = group
        splits[group] += [(path, i) for i in range(N)]
    if len(forms) != 1:
        refuse(source, 'files *.h5 of one shape and dt', forms or 'none', 'keep each dataset in its own folder')
    (shape, dt), = forms

    def read(path, n, t):
        return np.stack([values(path, f'{group_of[path]}/{key}', (n, t)) for key in ('u', 'vx', 'vy')], -1)
    return Source(shape, {'test': splits['test'], 'train': splits['train'] + splits['valid']}, read, dict(dt=dt))


def poseidon_wave(name, source):
    """Poseidon's waves: `solution` (N, T, X, Y) and `c` (N, X, Y) in m/s, here km/s."""
    items, shape = find_pieces(source, 'solution')
    speeds, _ = find_pieces(source, 'c')
    speed_of = dict(zip(items, speeds))

    def read(path, n, t):
        u = values(path, 'solution', (n, t))
        c = np.empty_like(u)
        for i in range(n.start, n.stop):
            piece, row = speed_of[path, i]
            c[i - n.start] = values(piece, 'c', row) / 1000
        return np.stack([u, c], -1)
    return Source((*shape, 2), items, read,
                  dict(channels=('u', 'c'), static=('c',), source=f'{source.resolve().name}, c / 1000'))


def poseidon_kolmogorov(name, source):
    """Poseidon's FNS-KF: `solution` (N, T, C, X, Y), force f = 0.1 sin(2 pi (x + y))."""
    items, shape = find_pieces(source, 'solution')
    T, C, *space = shape

    def read(path, n, t):
        x, y = (np.arange(side) / side for side in space)
        f = 0.1 * np.sin(2 * np.pi * (x[:, None] + y), dtype=np.float32)[..., None]
        uv = np.moveaxis(values(path, 'solution', (n, t)), 2, -1)
        return np.concatenate([uv, np.broadcast_to(f, (*uv.shape[:-1], 1))], -1)
    return Source((T, *space, C + 1), items, read, dict(dt=0.05))


def cfdbench(name, source):
    """CFDBench's cavity, cylinder and tube: one folder a case with u.npy, v.npy (T, Y, X), case.json.

    Of the cases of each problem, shuffled with seed 0, 80 % are for training, 10 % unused, 10 % for
    testing. A trajectory is 20 consecutive frames; an incomplete end of a case is dropped.
    """
    T = DATASETS[name].frames
    splits = {'test': [], 'train': []}
    for problem in ('cavity', 'cylinder', 'tube'):
        cases = []
        for part in ('prop', 'bc', 'geo'):
            cases += sorted((source / problem / part).glob('case*'), key=by_number)
        random.Random(0).shuffle(cases)
        count = round if problem == 'cavity' else int                               # as in DPOT
        train = count(0.8 * len(cases))
        test = train + count(0.1 * len(cases))
        for split, part in (('train', cases[:train]), ('test', cases[test:])):
            for case in part:
                with reading(case):
                    frames, *grid = np.load(case / 'u.npy', mmap_mode='r').shape
                splits[split] += [(case, segment) for segment in range(frames // T)]
    if not splits['test']:
        refuse(source, 'folders cavity/bc/case0000 and so on', 'none', 'unpack the zip files into one folder')

    def read(case, n, t):
        u, v = (np.load(case / f'{component}.npy', mmap_mode='r') for component in 'uv')
        mask = mask_of(case.parts[-3], case, u.shape[1:])
        fields = np.stack([u, v, np.broadcast_to(mask, u.shape)], -1)[n.start * T:n.stop * T]
        return fields.reshape(-1, T, *fields.shape[1:])[:, t]
    return Source((T, *grid, 3), splits, read)


def mask_of(problem, case, grid):
    """The mask (Y, X) of a case of CFDBench, 0 where the field is solid or prescribed."""
    mask = np.ones(grid, np.float32)
    if problem != 'cavity':
        mask[[0, -1]] = mask[:, 0] = 0                  # the walls and the inlet
    if problem == 'cylinder':
        box = json.loads((case / 'case.json').read_text())

        def centres(axis, count):
            """Of the cells, from the centre of the cylinder."""
            low, high = box[f'{axis}_min'], box[f'{axis}_max']
            return low + (np.arange(count) + 0.5) * (high - low) / count - box.get(f'center_{axis}', 0)
        y, x = map(centres, 'yx', grid)
        mask[y[:, None] ** 2 + x ** 2 < box['radius'] ** 2] = 0
    return mask


class Official(NamedTuple):
    """A published dataset."""
    source: object              # the function of its raw format: (name, path) -> Source
    pde: str                    # the equation, in words
    count: int = 0              # trajectories in it; 0 if they are split already
    tail: int = 0               # how many of these, the last, are reserved for testing


def pdebench(name):
    """A file of compressible flow, which holds what the name of our dataset says."""
    dims = DATASETS[name].dims
    count = {(2, 128): 10000, (2, 512): 1000, (3, 128): 100, (3, 64): 600}[dims, DATASETS[name].resolution]
    return Official(pdebench_flow, FAMILIES[name].pde + ', axes ' + ' '.join('xyz'[:dims]), count, count // 10)


SMOKE = Official(
    pdearena, 'incompressible Navier-Stokes with buoyant smoke u, viscosity 0.01, box of side 32, axes x y')
WAVE = Official(poseidon_wave, 'u_tt = c^2 Lap u, c in km/s, unit square, absorbing boundary, axes x y', 10512, 240)
OFFICIAL = {
    'ns2d_fno_1e-5': Official(fno, FAMILIES['ns2d_fno_1e-5'].pde, 1200, 200),
    'ns2d_fno_1e-4': Official(fno, FAMILIES['ns2d_fno_1e-4'].pde, 10000, 200),
    'ns2d_fno_1e-3': Official(fno, FAMILIES['ns2d_fno_1e-3'].pde, 5000, 200),
    **{name: pdebench(name) for name in DATASETS if '_pdb_M' in name},
    'swe_pdb': Official(groups, FAMILIES['swe_pdb'].pde + ', axes x y', 1000, 100),
    'dr_pdb': Official(groups, FAMILIES['dr_pdb'].pde + ', axes y x', 1000, 100),
    'ns2d_pda': SMOKE,
    'ns2d_cond_pda': SMOKE,
    'cfdbench': Official(cfdbench, 'incompressible Navier-Stokes: lid-driven cavity, cylinder, tube, axes y x'),
    'kolmogorov': Official(poseidon_kolmogorov, 'incompressible Navier-Stokes with the force f on u and v, unit torus, '
                           'axes x y', 20000, 240),
    'wave_layer': WAVE,
    'wave_gauss': WAVE,
    'wave_gauss_c': WAVE,
    'cno_poisson': Official(groups, '-Lap u = f, unit square, u = 0 at the sides', 1408, 256),
    'cno_darcy': Official(groups, '-div(a grad u) = f, unit square, u = 0 at the sides', 512, 128),
    'cno_airfoil': Official(groups, 'steady Euler flow round an airfoil', 1006, 128),
}
