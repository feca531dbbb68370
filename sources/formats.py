"""The files that others have published: one function a raw format, the table OFFICIAL of the
benchmarks, and The Well.

A new raw format takes a function and a row of OFFICIAL. Shapes: N trajectories, T frames, C
channels, X Y Z grid points; n and t are slices of trajectories and frames.
"""
import json
import random
import re
from itertools import product
from typing import NamedTuple

import h5py
import numpy as np

from configs import DATASETS, InputError
from data import SPLITS
from runtime.stored import names_of, whole
from sources.joined import in_order
from sources.kinds import reading
from sources.own import Own, Source, find_runs
from sources.pdes import FAMILIES
from sources.pdes.compressible import numbers_of


def values(path, key, index=()):
    """The part of an HDF5 dataset at an index."""
    with reading(path), h5py.File(path) as file:
        return whole(file[key])[index]


def refuse(path, expected, instead, advice="is it another benchmark's file?"):
    raise InputError(f'--source {path}: expected {expected}, found {instead}; {advice}')


def runs_of(paths, layout, *variables):
    """The Source of HDF5 or MATLAB files, or of groups file/group, with variables of one layout."""
    own = Own(layout=(layout,), variables=variables, uneven=True)
    return find_runs(paths, own)._replace(attributes={})


def fno(name, path):
    """FNO's vorticity: `u` (N, X, Y, T), in MATLAB v5 or v7.3."""
    source = runs_of([path], 'NXYT', 'u')
    T, *shape = source.shape
    return source._replace(shape=(min(T, DATASETS[name].frames), *shape))


def pdebench_flow(name, path):
    """PDEBench's compressible flow: one dataset a channel, (N, T, X, Y) or (N, T, X, Y, Z)."""
    with reading(path), h5py.File(path) as file:
        for key, ours in numbers_of(name).items():
            if not np.isclose(file.attrs.get(key, ours), ours, rtol=1e-3, atol=0):
                refuse(path, f'{key} = {ours:g}', file.attrs[key])
    return runs_of([path], 'NTXYZ'[:2 + DATASETS[name].dims], *DATASETS[name].channels)


def groups(name, path):
    """PDEBench's shallow water (T, X, Y, C) and diffusion-reaction (T, Y, X, C) in groups "0000".

    CNO's steady problems have `input` and `output` (X, Y) in groups Sample_<i>.
    """
    keys = ('input', 'output') if name.startswith('cno') else ('data',)
    with reading(path), h5py.File(path) as file:
        found = in_order([*filter(re.compile(r'([Ss]ample_)?\d+').fullmatch, file)])
        shape = file[f'{found[0]}/{keys[0]}'].shape

    def read(path, n, t):
        if len(keys) == 1:
            return np.stack([values(path, f'{group}/data', t) for group in found[n]])
        u = [[values(path, f'{group}/{key}') for key in keys[t]] for group in found[n]]
        return np.stack(u)[..., None]
    return Source(shape if len(keys) == 1 else (2, *shape, 1),
                  [(path, i) for i in range(len(found))], read)


def pdearena(name, source):
    """PDEArena's smoke: u, vx, vy (N, T, X, Y) in a group train, valid or test."""
    forms = {}                                              # {file/group: (T, X, Y, dt)}
    for path in sorted(source.glob('[!.]*.h5')) if source.is_dir() else [source]:
        with reading(path), h5py.File(path) as file:
            group, = {'train', 'valid', 'test'} & file.keys()
            forms[path / group] = *file[f'{group}/u'].shape[1:], float(file[f'{group}/dt'][0])
    found = {place.name for place in forms}
    if len({*forms.values()}) != 1 or not {'train', 'test'} <= found:
        refuse(source, 'files *.h5 of one shape and dt, with groups train and test',
               f'{found or "none"} {[*{*forms.values()}]}', 'keep each dataset in its own folder')
    order = sorted(forms, key=lambda place: place.name == 'valid')      # which comes after train
    runs = runs_of(order, 'NTXY', 'u', 'vx', 'vy')
    splits = {'test': [], 'train': []}
    for piece, n in runs.items:
        splits['test' if piece.parts[0][0].name == 'test' else 'train'].append((piece, n))
    return runs._replace(items={split: items[:getattr(DATASETS[name], split)]
                                for split, items in splits.items()},
                         attributes=dict(dt=forms[order[0]][-1]))


def find_pieces(source, key):
    """Rows of `key` in <key>_0.nc, ... or in the joined file -> [(file, index)], their shape."""
    count = len([*source.glob(f'{key}_*.nc')])
    items = []
    for path in [source / f'{key}_{i}.nc' for i in range(count)] or [source]:
        with reading(path), h5py.File(path) as file:
            N, *shape = file[key].shape
        items += [(path, i) for i in range(N)]
    return items, tuple(shape)


def poseidon_wave(name, source):
    """Poseidon's waves: `solution` (N, T, X, Y) and `c` (N, X, Y) in m/s, here km/s.

    wave_gauss is without c, as in MoE-POT's data.
    """
    items, shape = find_pieces(source, 'solution')
    if name == 'wave_gauss':
        return Source((*shape, 1), items, lambda path, n, t: values(path, 'solution', (n, t))[..., None],
                      dict(channels=('u',), source=source.resolve().name))
    speed_of = dict(zip(items, find_pieces(source, 'c')[0]))

    def read(path, n, t):
        u = values(path, 'solution', (n, t))
        speeds = [speed_of[path, i] for i in range(n.start, n.stop)]
        c = np.stack([values(piece, 'c', row) for piece, row in speeds])[:, None] / 1000
        return np.stack([u, np.broadcast_to(c, u.shape)], -1)
    return Source((*shape, 2), items, read, dict(
        channels=('u', 'c'), static=('c',), source=f'{source.resolve().name}, c / 1000'))


def poseidon_kolmogorov(name, source):
    """Poseidon's FNS-KF: `solution` (N, T, C, X, Y), force f = 0.1 sin(2 pi (x + y))."""
    items, (T, C, *space) = find_pieces(source, 'solution')

    def read(path, n, t):
        x, y = (np.arange(side) / side for side in space)
        f = 0.1 * np.sin(2 * np.pi * (x[:, None] + y), dtype=np.float32)[..., None]
        uv = np.moveaxis(values(path, 'solution', (n, t)), 2, -1)
        return np.concatenate([uv, np.broadcast_to(f, (*uv.shape[:-1], 1))], -1)
    return Source((T, *space, C + 1), items, read, dict(dt=0.05))


def cfdbench(name, source):
    """CFDBench's cavity, cylinder and tube: a folder a case with u.npy, v.npy (T, Y, X), case.json.

    Of the cases of each problem, shuffled with seed 0, 80 % are for training, 10 % unused, 10 % for
    testing. A trajectory is 20 consecutive frames; an incomplete end of a case is dropped.
    """
    T = DATASETS[name].frames
    splits = {'test': [], 'train': []}
    for problem in ('cavity', 'cylinder', 'tube'):
        cases = []
        for part in ('prop', 'bc', 'geo'):
            folder = source / problem / part
            cases += in_order([*folder.glob('case*')]) or refuse(
                folder, 'folders case0000 and so on', 'none', 'unpack all zip files into one folder')
        random.Random(0).shuffle(cases)
        count = round if problem == 'cavity' else int                               # as in DPOT
        train = count(0.8 * len(cases))
        test = train + count(0.1 * len(cases))
        for split, part in (('train', cases[:train]), ('test', cases[test:])):
            for case in part:
                with reading(case):
                    frames, *grid = np.load(case / 'u.npy', mmap_mode='r').shape
                splits[split] += [(case, segment) for segment in range(frames // T)]

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
        squares = []                                    # of distances to the cylinder's centre
        for axis, count in zip('yx', grid):
            low, high = box[f'{axis}_min'], box[f'{axis}_max']
            centres = low + (np.arange(count) + 0.5) * (high - low) / count
            squares.append((centres - box.get(f'center_{axis}', 0)) ** 2)
        mask[np.add.outer(*squares) < box['radius'] ** 2] = 0
    return mask


class Official(NamedTuple):
    """A published dataset."""
    source: object              # the function of its raw format: (name, path) -> Source
    count: int = 0              # trajectories in it; 0 if they are split already
    tail: int = 0               # how many of these, the last, are reserved for testing
    pde: str = ''               # the equation in words; '': as in FAMILIES


def pdebench(name):
    """A file of compressible flow, which holds what the name of our dataset says."""
    D, points = DATASETS[name].dims, DATASETS[name].resolution
    count = {(2, 128): 10000, (2, 512): 1000, (3, 128): 100, (3, 64): 600}[D, points]
    pde = f'{FAMILIES[name].pde}, axes {" ".join("xyz"[:D])}'
    return Official(pdebench_flow, count, count // 10, pde)


SMOKE = ('incompressible Navier-Stokes with buoyant smoke u, viscosity 0.01, box of side 32, axes '
         'x y')
WAVE = 'u_tt = (k c)^2 Lap u, k unknown, unit square, absorbing boundary, axes x y'
OFFICIAL = {
    'ns2d_fno_1e-5': Official(fno, 1200, 200),
    'ns2d_fno_1e-4': Official(fno, 10000, 200),
    'ns2d_fno_1e-3': Official(fno, 5000, 200),
    'swe_pdb': Official(groups, 1000, 100, FAMILIES['swe_pdb'].pde + ', axes x y'),
    'dr_pdb': Official(groups, 1000, 100, FAMILIES['dr_pdb'].pde + ', axes y x'),
    'ns2d_pda': Official(pdearena, pde=SMOKE),
    'ns2d_cond_pda': Official(pdearena, pde=SMOKE),
    'cfdbench': Official(cfdbench, pde='incompressible Navier-Stokes: lid-driven cavity, cylinder, '
                                       'tube, axes y x'),
    'kolmogorov': Official(
        poseidon_kolmogorov, 20000, 240,
        'incompressible Navier-Stokes with the force f on u and v, unit torus, axes x y'),
    'wave_layer': Official(poseidon_wave, 10512, 240, WAVE),
    'wave_gauss': Official(poseidon_wave, 10512, 240, WAVE),
    'wave_gauss_c': Official(poseidon_wave, 10512, 240, WAVE),
    'cno_poisson': Official(groups, 1408, 256, '-Lap u = f, unit square, u = 0 at the sides'),
    'cno_darcy': Official(groups, 512, 128, '-div(a grad u) = f, unit square, u = 0 at the sides'),
    'cno_airfoil': Official(groups, 1006, 128, 'steady Euler flow round an airfoil'),
    **{name: pdebench(name) for name in DATASETS if '_pdb_M' in name},
}


# ---------------------------------------------------------------------------------------- The Well

def fields_of(path):
    """(title, D, {HDF5 name: axes}, {HDF5 name: channels}) of a file of The Well.

    Fields of order 0, 1 and 2 (scalars, vectors, tensors) lie in the groups t0_fields, t1_fields
    and t2_fields, along [N if sample_varying] + [T if time_varying] + [each grid axis that
    dim_varying names] + (D,) * order. Those that vary in time come first.
    """
    axes, channels = {}, {}
    with reading(path), h5py.File(path) as file:
        kind, title = (names_of(file.attrs[key])[0] for key in ('grid_type', 'dataset_name'))
        space = names_of(file['dimensions'].attrs['spatial_dims'])
        if kind.lower() != 'cartesian' or len(space) not in (2, 3):
            refuse(path, 'a Cartesian grid of two or three dimensions', f'{kind}, {space}',
                   'it cannot be converted')
        for order in range(3):
            for name in names_of(file[f't{order}_fields'].attrs['field_names']):
                key = f't{order}_fields/{name}'
                varies = np.hstack([file[key].attrs[flag] for flag in (
                    'sample_varying', 'time_varying', 'dim_varying')])
                axes[key] = ''.join(x for x, flag in zip('NTXYZ', varies) if flag) + 'CK'[:order]
                channels[key] = [f'{name}_{"".join(suffix)}'.strip('_')
                                 for suffix in product(space, repeat=order)]
    axes = dict(sorted(axes.items(), key=lambda field: 'T' not in field[1]))
    return title, len(space), axes, channels


def the_well(source, uneven=False):
    """The Source of a dataset of The Well with its own splits, cut to the shortest trajectory.

    Fields that do not vary in time become static channels, axes that one lacks are filled up by
    repetition, and the scalars are left out. `uneven`: as in Own.
    """
    base = source / 'data' if (source / 'data').is_dir() else source
    files = {split: sorted((base / split).glob('[!.]*.h*5')) for split in SPLITS}
    if not (files['train'] and files['test']):
        refuse(source, 'HDF5 files in its folders data/train, data/test and perhaps data/valid',
               [split for split in files if files[split]], 'name it')
    paths = sum(files.values(), [])
    fields = fields_of(paths[0])
    title, D, axes, channels = fields
    for path in paths:
        if fields_of(path) != fields:
            refuse(path, fields, fields_of(path), 'remove what is of another dataset')
    layout = 'NTXYZ'[:2 + D], *(f'{name}={its}' for name, its in axes.items())
    runs = find_runs(paths, Own(layout=layout, variables=tuple(axes), uneven=uneven))
    longest = max(piece.frames for piece, _ in runs.items)
    if longest > runs.shape[0]:
        print(f'{source}: trajectories of {runs.shape[0]} to {longest} frames are cut to the '
              f'shortest')
    items = {split: [(piece, n) for piece, n in runs.items if piece.parts[0][0] in files[split]]
             for split in SPLITS if files[split]}
    attributes = dict(channels=sum((channels[name] for name in axes), []), pde=f'The Well, {title}',
                      static=sum((channels[name] for name in axes if 'T' not in axes[name]), []),
                      dt=runs.attributes['dt'], source=source.resolve().name)
    return runs._replace(items=items, attributes=attributes)
