"""Public benchmark downloads, converted into the layout of data.py.

    python prepare.py swe_pdb --source 2D_rdb_NA_NA.h5              one file, into data/swe_pdb/
    python prepare.py ns2d_pda --source NavierStokes-2D             a folder of files
    python prepare.py swe_pdb --source dpot/swe_pdb --from dpot     what DPOT's scripts have written
    python prepare.py swe_pdb --check                               statistics and defects of data/swe_pdb/

One function a source tells what is in the download and how its axes lie; `convert` copies it block by block, in a few
hundred MB of memory whatever the size of the file. Values stay as they are, on their own grid; float64 becomes float32.
Splits: training is the head of a file, the test stands in the tail that the benchmark reserves for it, both of the
paper's sizes (configs.py); a file with fewer trajectories than the official one is split in the same proportion.

Beside `data` stand `source_file` and `source_index`, where each trajectory is from, and what else the benchmark tells
of it (buoyancy, viscosity, its configuration).

Shapes: N trajectories, T frames, H W grid points, C channels; X Y Z where the order of the axes matters.
"""
import hashlib
import json
import math
import random
import re
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import h5py
import numpy as np
import torch
from tqdm import tqdm

import configs
from configs import DATASETS, SCALES, InputError
from data import Trajectories, check_space, free_space, missing, writer
from pdes import FAMILIES
from pdes.navier_stokes import navier_stokes

BLOCK = 2 ** 26                     # bytes read at once, as float32


# ------------------------------------------------------------------------------------------------ opening files

def refuse(path, expected, found, advice="is it another benchmark's file?"):
    raise InputError(f'--source {path}: expected {expected}, found {found}; {advice}')


def kind(path):
    """'HDF5', 'MATLAB v5' or 'NumPy', by the first bytes. Raises InputError saying what else it is."""
    try:
        with open(path, 'rb') as file:
            head = file.read(520)
    except OSError as error:
        refuse(path, 'a data file', error.strerror.lower(), 'correct the path')
    for name, signature, starts in (('HDF5', b'\x89HDF\r\n\x1a\n', (0, 512)),      # MATLAB v7.3 puts 512 bytes before
                                    ('MATLAB v5', b'MATLAB 5.0', (0,)), ('NumPy', b'\x93NUMPY', (0,))):
        if any(head.startswith(signature, start) for start in starts):
            return name
    if head.startswith(b'version https://git-lfs'):
        refuse(path, 'a data file', 'a git-lfs pointer', 'fetch it with git lfs pull, or remove it')
    if head.lstrip().startswith(b'<'):
        refuse(path, 'a data file', 'a web page', 'open it in a browser and download the file again')
    refuse(path, 'a data file', f'the bytes {head[:8]!r}', 'download it again')


@contextmanager
def hdf5(path):
    """An HDF5 file (netCDF-4 and MATLAB v7.3 are) open for reading; what is wrong with it becomes an InputError."""
    if kind(path) != 'HDF5':
        refuse(path, 'HDF5', kind(path))
    try:
        with h5py.File(path, 'r') as file:
            yield file
    except OSError as error:
        refuse(path, 'HDF5', f'it truncated or damaged ({str(error).splitlines()[0]})', 'download it again')


def member(group, key, *forms):
    """The HDF5 dataset `key`, checked to be float and to have the axes of one of `forms`, a letter an axis."""
    found = group.get(key)
    wanted = f"'{key}', float " + ' or '.join(f"({', '.join(form)})" for form in forms)
    if not isinstance(found, h5py.Dataset):
        refuse(group.file.filename, wanted, f"{' '.join(list(group)[:8]) or 'nothing'} in {group.name}")
    if found.dtype.kind != 'f' or found.ndim not in map(len, forms):
        refuse(group.file.filename, wanted, f'{found.dtype} {found.shape}')
    return found


def number(path):
    """The last number in a name: solution_10.nc comes after solution_9.nc."""
    return int(re.findall(r'\d+', '0' + Path(path).stem)[-1])


def pick(name, source):
    """The file that is meant: `source` itself, or in a folder the one named as published, or the only one."""
    if source.is_file():
        return source
    names = OFFICIAL[name].files
    if not source.is_dir():
        refuse(source, ' or '.join(names), 'no such file or folder', 'correct the path')
    files = sorted(path for path in source.iterdir() if path.suffix in ('', '.h5', '.hdf5', '.mat', '.nc'))
    files = [path for path in files if path.stem in names] or [path for path in files if path.suffix]
    if len(files) != 1:
        refuse(source, ' or '.join(names), ' '.join(path.name for path in files[:5]) or 'no data file', 'name the file')
    return files[0]


def pieces(name, source, key, form):
    """All rows of `key` in <key>_0.nc, <key>_1.nc, ... or in the joined file -> [(file, index)], shape of a row."""
    files = sorted(source.glob(f'{key}_*.nc'), key=number)
    if [number(path) for path in files] != list(range(len(files))):
        refuse(source, f'{key}_0.nc, {key}_1.nc, ...', ' '.join(path.name for path in files), 'a piece is missing')
    items = []
    for path in files or [pick(name, source)]:
        with hdf5(path) as file:
            N, *shape = member(file, key, form).shape
        items += [(path, i) for i in range(N)]
    return items, tuple(shape)


def groups(path, pattern):
    """The names of the groups of a file, one a trajectory, in the order of their numbers."""
    with hdf5(path) as file:
        names = sorted((key for key in file if re.fullmatch(pattern, key)), key=number)
        if not names:
            refuse(path, f'groups {pattern}', ' '.join(list(file)[:5]) or 'nothing')
    return names


# ------------------------------------------------------------------------------------------------ one function a source

class Source(NamedTuple):
    """A download: which trajectories it holds and how they are read."""
    found: str                      # what it is, in words, with the axis order of the file
    shape: tuple                    # (T, *space, C) of one trajectory, in our order
    items: object                   # [(file, index)] of all trajectories in order; {split: those} where it is split
    read: object                    # (open file, indices, frames), two slices -> (n, t, *space, C)
    open: object = hdf5             # file -> context of the open file
    channels: tuple = ()            # names, where not those of configs.py
    dt: float = None                # time between two frames, where not that of configs.py
    more: object = lambda file, indices: {}             # (open file, indices) -> {name of a coefficient: n values}


def fno(name, source):
    """FNO's vorticity: `u` at t = 1, 2, ... in MATLAB's (N, X, Y, T); the start at t = 0, `a`, is left out.

    v7.3 is HDF5, which shows all axes reversed, (T, Y, X, N); v5 needs SciPy and is read whole, 0.4 GB for 1e-5. Of
    more frames than the paper's (1e-4 has 50) the first are taken. Raises InputError where x and y are exchanged.
    """
    path = pick(name, source)
    if kind(path) == 'MATLAB v5':
        u = mat5(path)
        (N, X, Y, T), form, opener = u.shape, 'MATLAB v5, u (N, X, Y, T)', lambda path: nullcontext(u)
        read = lambda u, n, t: np.moveaxis(u[n, :, :, t], -1, 1)[..., None]
    else:
        with hdf5(path) as file:
            (T, Y, X, N), form, opener = member(file, 'u', 'TYXN').shape, 'MATLAB v7.3, u (T, Y, X, N)', hdf5
        read = lambda file, n, t: file['u'][t, :, :, n].transpose(3, 0, 2, 1)[..., None]
    result = Source(f'{form}, {N} trajectories', (min(T, DATASETS[name].frames), X, Y, 1),
                    [(path, i) for i in range(N)], read, opener)
    as_is, exchanged = errors(name, result)
    if min(as_is, 0.5) > exchanged:
        refuse(path, form, 'x and y exchanged: only so is it advected rightly', 'take the file as it was published')
    if not as_is < 0.5:
        print(f'warning: {path}: does not solve the equation of {name}, one frame on the error is {as_is:.2g}')
    return result


def mat5(path):
    """`u` (N, X, Y, T) of a MATLAB v5 file."""
    try:
        from scipy.io import loadmat
    except ImportError:
        refuse(path, 'SciPy, to read MATLAB v5', 'no such package', 'run: pip install scipy')
    try:
        u = loadmat(path, variable_names=['u']).get('u')
    except Exception as error:                          # SciPy's reader lets many kinds through
        refuse(path, 'MATLAB v5', f'it truncated or damaged ({str(error).splitlines()[0]})', 'download it again')
    if np.ndim(u) != 4:
        refuse(path, "'u' (N, X, Y, T)", np.shape(u) or 'none')
    return u


def errors(name, source):
    """Relative errors of one frame predicted by the solver from the one before: as it is, and with x and y exchanged.

    A reflection turns the sign of the vorticity, so that a transposed field is advected the wrong way. Measured on the
    first two trajectories of the benchmark's files: the right way 3e-4 at viscosity 1e-3 and 1e-2 at 1e-5, the wrong
    way 0.1 and 0.2.
    """
    frame, pairs = source.shape[0] // 4, []
    for path, i in (source.items['train'] if isinstance(source.items, dict) else source.items)[:2]:
        with source.open(path) as file:
            pairs.append(load(source, file, path, slice(i, i + 1), slice(frame, frame + 2))[0, ..., 0])
    w = torch.from_numpy(np.stack(pairs))                                           # (2, 2, H, W)
    if w.shape[2] != w.shape[3]:
        refuse(path, 'a square grid', f'{tuple(w.shape[2:])}')
    for start, after in (w.unbind(1), w.mT.unbind(1)):
        yield float((navier_stokes(start, float(name.removeprefix('ns2d_fno_')), 1)[:, 0] - after).norm()
                    / after.norm())


def compressible(name, source):
    """PDEBench's compressible flow: a dataset a channel, (N, T, X, Y) or (N, T, X, Y, Z); our channels in our order.

    22 time stamps belong to 21 frames: they are left out, with the coordinates. The attributes M, eta, zeta, where
    there, must be those of the dataset's name.
    """
    path, channels, form = pick(name, source), DATASETS[name].channels, 'NTXYZ'[:2 + DATASETS[name].dims]
    with hdf5(path) as file:
        for channel in channels:
            N, *shape = member(file, channel, form).shape
        for key in ('M', 'eta', 'zeta'):
            wanted = float((re.search(rf'_{key}(\d[^_]*)', name) or [0, '1e-8'])[1])     # 3-D: 1e-8, not in the name
            if abs(float(file.attrs.get(key, wanted)) / wanted - 1) > 1e-3:
                refuse(path, f'{key} = {wanted:g}', f'{float(file.attrs[key]):g}', f'take {OFFICIAL[name].files[0]}')
    return Source(f'{" ".join(channels)} ({", ".join(form)}), {N} trajectories', (*shape, len(channels)),
                  [(path, i) for i in range(N)],
                  lambda file, n, t: np.stack([file[channel][n, t] for channel in channels], -1))


def grouped(name, source):
    """PDEBench's shallow water (T, X, Y, C) and diffusion-reaction (T, Y, X, C): a group "0000", ... a trajectory.

    The axes stay as they are; the text of a trajectory's configuration is kept as `config`, its grid is left out.
    """
    path = pick(name, source)
    names = groups(path, r'\d+')
    with hdf5(path) as file:
        shape = member(file[names[0]], 'data', 'TXYC').shape

    def more(file, n):                                  # the generator's first version put it on the root
        texts = [file[key].attrs.get('config', file.attrs.get(f'{key}/config')) for key in names[n]]
        return {} if None in texts else {'config': texts}
    return Source(f'{len(names)} groups of data {shape}', shape, [(path, i) for i in range(len(names))],
                  lambda file, n, t: np.stack([file[key]['data'][t] for key in names[n]]), more=more)


def pdearena(name, source):
    """PDEArena's buoyant smoke: files of a group train, valid or test with u, vx, vy (N, T, X, Y), float64.

    train and valid are our training. dt is the file's own, which the differences of its `t` are not; buoyancy is kept,
    `t` and the coordinates are left out. vx and vy stay where they are, on the cells' faces, half a cell from u.
    """
    files = sorted(source.glob('*.h5')) if source.is_dir() else [source]
    splits, forms, channels = {'train': [], 'valid': [], 'test': []}, {}, ('u', 'vx', 'vy')
    group = lambda file: next((file[split] for split in splits if split in file), file)
    for path in files:
        with hdf5(path) as file:
            (N, *shape), *others = [member(group(file), channel, 'NTXY').shape for channel in channels]
            forms[(*shape, 3), float(member(group(file), 'dt', 'N')[0])] = path.name
            if group(file) == file or any(other != (N, *shape) for other in others):
                refuse(path, 'u, vx, vy of one shape in a group train, valid or test', ' '.join(file))
            splits[group(file).name[1:]] += [(path, i) for i in range(N)]
    if len(forms) != 1:
        refuse(source, 'files *.h5 of one shape and dt', forms or 'none', 'keep one dataset a folder')
    (shape, dt), = forms
    return Source(f'{len(files)} files, {" ".join(channels)} (N, T, X, Y): '
                  + ', '.join(f'{len(items)} {split}' for split, items in splits.items()), shape,
                  {'train': splits['train'] + splits['valid'], 'test': splits['test']},
                  lambda file, n, t: np.stack([group(file)[channel][n, t] for channel in channels], -1), dt=dt,
                  more=lambda file, n: {'buoyancy': group(file)['buo_y'][n]})


STEP = {'cavity': 0.1, 'cylinder': 0.001, 'tube': 0.1}              # seconds a frame, as CFDBench's loaders take them


def cfdbench(name, source):
    """CFDBench's cavity, cylinder and tube: a folder a case with u.npy, v.npy (T, Y, X), so rows are y, and case.json.

    Whole cases are split: those of prop, bc, geo in the order of their numbers, shuffled with seed 0, 80 % training,
    10 % unused, 10 % test of each problem, so no case stands on both sides. A trajectory is 20 consecutive frames; what
    is left at the end of a case is dropped, not filled up with copies. No cell is added round the 64 x 64. The dam is
    left out. Kept: step (s), density, viscosity, speed of lid or inlet.
    """
    T, splits, known, lost = DATASETS[name].frames, {'train': [], 'test': []}, {}, 0
    for problem in STEP:
        cases = [case for part in ('prop', 'bc', 'geo')
                 for case in sorted((source / problem / part).glob('case*'), key=number)]
        random.Random(0).shuffle(cases)
        count, cut = len(cases), round if problem == 'cavity' else int              # as DPOT cuts
        train = max(1, min(cut(0.8 * count), count - 1))
        unused = max(0, min(cut(0.1 * count), count - train - 1))
        for i, case in enumerate(cases):
            u, v = (mapped(case / f'{component}.npy') for component in 'uv')
            try:
                given = json.loads((case / 'case.json').read_text())
                mask = fluid(problem, given, u.shape[1:])
                known[case] = mask, dict(step=STEP[problem], density=given['density'], viscosity=given['viscosity'],
                                         speed=given['vel_top' if problem == 'cavity' else 'vel_in'])
            except (OSError, ValueError, KeyError) as error:
                refuse(case, 'case.json with its parameters', f'{type(error).__name__} {error}', 'download it again')
            if u.shape != v.shape:
                refuse(case, 'u and v of one shape', f'{u.shape} and {v.shape}', 'download it again')
            if not mask.any() or problem == 'cylinder' and mask[1:-1, 1:].all():
                refuse(case, 'a cylinder that covers cells of the grid', given, 'correct case.json')
            lost += len(u) % T > 0
            if not train <= i < train + unused:
                splits['train' if i < train else 'test'] += [(case, segment) for segment in range(len(u) // T)]
    if not known:
        refuse(source, 'folders cavity/bc/case0000 and so on', 'none', 'unpack the zip files into one folder')

    def opener(case):
        u, v = (mapped(case / f'{component}.npy') for component in 'uv')
        return nullcontext((u, v, np.broadcast_to(known[case][0], u.shape), known[case][1]))

    def read(case, n, t):
        return np.stack([[field[i * T + t.start:i * T + t.stop] for field in case[:3]] for i in range(n.start, n.stop)]
                        ).transpose(0, 2, 3, 4, 1)                                  # (n, t, Y, X, C)
    return Source(f'{len(known)} cases, u v (T, Y, X); {lost} incomplete ends of {T} frames and the dam are left out',
                  (T, *mask.shape, 3), splits, read, opener,
                  more=lambda case, n: {key: [value] * (n.stop - n.start) for key, value in case[3].items()})


def mapped(path):
    """An array (T, Y, X) of CFDBench, of which only what is used is read."""
    if kind(path) != 'NumPy':
        refuse(path, 'NumPy', kind(path))
    try:
        field = np.load(path, mmap_mode='r')
    except ValueError as error:
        refuse(path, 'NumPy', f'it truncated or damaged ({error})', 'download it again')
    if field.ndim != 3:
        refuse(path, '(T, Y, X)', field.shape)
    return field


def fluid(problem, given, grid):
    """The mask of a case, (Y, X): 1 in the fluid, 0 in what is solid or prescribed.

    Cavity: 1 everywhere. Tube and cylinder: 0 on the first and last row, the walls, and the first column, the inlet
    (CFDBench's rule for the cylinder; that the tube, with the same boundary, follows it is our choice). Cylinder: 0
    where a cell's centre is within the radius of the origin, or of center_x, center_y where case.json has them.
    """
    mask = np.ones(grid, np.float32)
    if problem != 'cavity':
        mask[[0, -1]] = mask[:, 0] = 0
    if problem == 'cylinder':
        y, x = (given[f'{axis}_min'] + (np.arange(n) + 0.5) * (given[f'{axis}_max'] - given[f'{axis}_min']) / n
                - given.get(f'center_{axis}', 0) for axis, n in zip('yx', grid))
        mask[y[:, None] ** 2 + x ** 2 < given['radius'] ** 2] = 0
    return mask


def wave(name, source):
    """Poseidon's waves: `solution` (N, T, X, Y) and the speed `c` (N, X, Y) in m/s, here a static channel.

    Joined file, or its pieces in a folder. u_t, with which one frame would be a full state, is not in the download.
    """
    items, shape = pieces(name, source, 'solution', 'NTXY')
    media, grid = pieces(name, source, 'c', 'NXY')
    if len(items) != len(media) or shape[1:] != grid:
        refuse(source, f'{len(items)} speeds {shape[1:]}', f'{len(media)} {grid}', 'is a piece missing?')
    medium = {(str(path), i): place for (path, i), place in zip(items, media)}

    def speed(path, i):
        with hdf5(path) as file:
            return file['c'][i]

    def read(file, n, t):
        u = file['solution'][n, t]
        c = np.stack([speed(*medium[file.filename, i]) for i in range(n.start, n.stop)])
        return np.stack([u, np.broadcast_to(c[:, None], u.shape)], -1)
    return Source(f'solution (N, T, X, Y) and c, {len(items)} trajectories', (*shape, 2), items, read,
                  channels=('u', 'c'))


def kolmogorov(name, source):
    """Poseidon's FNS-KF: `solution` (N, T, C, X, Y), C = u, v; the forcing is added as a static channel.

    f = 0.1 sin(2 pi (x+y)) at the nodes x = i / N of the unit torus.
    """
    items, (T, C, X, Y) = pieces(name, source, 'solution', 'NTCXY')
    f = 0.1 * np.sin(2 * np.pi * (np.arange(X)[:, None] / X + np.arange(Y) / Y), dtype=np.float32)[..., None]

    def read(file, n, t):
        velocity = np.moveaxis(file['solution'][n, t], 2, -1)
        return np.concatenate([velocity, np.broadcast_to(f, (*velocity.shape[:-1], 1))], -1)
    return Source(f'solution (N, T, C, X, Y), {len(items)} trajectories', (T, X, Y, C + 1), items, read, dt=0.05)


def cno(name, source):
    """The steady problems of CNO: a group Sample_<i> (Darcy: sample_<i>) with `input` and `output`, (X, Y) each.

    They become two frames, input and solution. Constants for their normalisation are left out.
    """
    path = pick(name, source)
    names = groups(path, r'[Ss]ample_\d+')
    with hdf5(path) as file:
        shape = member(file[names[0]], 'input', 'XY').shape
    return Source(f'{len(names)} groups of input and output {shape}', (2, *shape, 1),
                  [(path, i) for i in range(len(names))],
                  lambda file, n, t: np.stack([[file[key][part][:] for part in ('input', 'output')[t]]
                                               for key in names[n]])[..., None])


def dpot(name, source):
    """What DPOT's scripts write: `data` (H, W, T, C), in 3-D (H, W, D, T, C), without C for FNO; split already.

    Either folders train and test with a file data_<i>.hdf5 a trajectory, or two files named after the splits, with a
    leading axis N. DPOT's ns2d_fno_1e-3 has x and y exchanged, which is found and put right; its waves are without c.
    """
    known, one = DATASETS.get(name), not (source / 'train').is_dir()
    forms = ['N' * one + space + 'T' + channel for space in ('HW', 'HWD') for channel in ('C', '')
             if known is None or known.dims == len(space)]
    splits = {}
    for split, words in dict(train=('train',), test=('test', 'valid')).items():
        files = [path for path in source.glob('*' if one else f'{split}/*') if path.suffix in ('.h5', '.hdf5')]
        if one:
            files = next(filter(None, ([path for path in files if word in path.stem.lower()] for word in words)), [])
            files = [path for path in files if path.name.lower().startswith(name.lower())] or files
        if not files or one and len(files) > 1:
            refuse(source, f'folders train and test of data_<i>.hdf5, or one file named {" or ".join(words)}',
                   ' '.join(path.name for path in files) or 'none', 'give the folder of one dataset')
        with hdf5(files[0]) as file:
            array = member(file, 'data', *forms)
            form, shape = next(form for form in forms if len(form) == array.ndim), array.shape
        splits[split] = [(path, i) for path in sorted(files, key=number) for i in range(shape[0] if one else 1)]
    axes = {'C': 1, **dict(zip(form, shape))}

    def read(file, n, t):
        u = file['data'][(n,) * one + (..., t) + (slice(None),) * (form[-1] == 'C')]
        u = u if form[-1] == 'C' else u[..., None]
        return np.moveaxis(u if one else u[None], -2, 1)
    shape = tuple(axes[axis] for axis in 'THWDC' if axis in axes)
    result = Source(f'DPOT, data ({", ".join(form)}): {len(splits["train"])} train, {len(splits["test"])} test', shape,
                    splits, read, channels=('u',) if name.startswith('wave_') else ())
    if known and name.startswith('ns2d_fno'):
        as_is, exchanged = errors(name, result)
        if exchanged < as_is:
            return result._replace(found=result.found + '; x and y were exchanged and are put right',
                                   read=lambda *place: read(*place).swapaxes(2, 3))
    return result


# ------------------------------------------------------------------------------------------------ what was published

class Official(NamedTuple):
    """A published dataset."""
    source: object              # its function above
    files: tuple                # names of its file without ending: as published, as DaRUS numbers it
    count: int                  # trajectories in it; 0: they are split already
    tail: int                   # of these, the last, reserved for test
    pde: str


def pdebench(initial, M, eta, number, count=10000, size='_128', dims=2):
    return Official(compressible, (f'{dims}D_CFD_{initial}_M{M}_Eta{eta}_Zeta{eta}_periodic{size}_Train', str(number)),
                    count, count // 10, f'compressible Navier-Stokes, gamma = 5/3, M = {M}, eta = zeta = {eta}, '
                    f'unit torus, axes x y{" z" * (dims == 3)}')


def vorticity(viscosity, file, count):
    return Official(fno, (file,), count, 200, FAMILIES[f'ns2d_fno_{viscosity}'].pde)


SMOKE = Official(pdearena, ('NavierStokes2D_*',), 0, 0,
                 'incompressible Navier-Stokes with buoyant smoke u, viscosity 0.01, box of side 32, axes x y')
WAVE = 'u_tt = c^2 Lap u, c in m/s, unit square, absorbing boundary, axes x y'
OFFICIAL = {
    'ns2d_fno_1e-5': vorticity('1e-5', 'NavierStokes_V1e-5_N1200_T20', 1200),
    'ns2d_fno_1e-4': vorticity('1e-4', 'ns_V1e-4_N10000_T30', 10000),
    'ns2d_fno_1e-3': vorticity('1e-3', 'ns_V1e-3_N5000_T50', 5000),
    'ns2d_pdb_M1_eta1e-1_zeta1e-1': pdebench('Rand', '1.0', '0.1', 164691),
    'ns2d_pdb_M1_eta1e-2_zeta1e-2': pdebench('Rand', '1.0', '0.01', 164690),
    'ns2d_pdb_M1e-1_eta1e-1_zeta1e-1': pdebench('Rand', '0.1', '0.1', 164688),
    'ns2d_pdb_M1e-1_eta1e-2_zeta1e-2': pdebench('Rand', '0.1', '0.01', 164687),
    'swe_pdb': Official(grouped, ('2D_rdb_NA_NA', '133021'), 1000, 100,
                        'shallow water, g = 1, flat bottom, [-2.5, 2.5]^2, outflow, axes x y'),
    'dr_pdb': Official(grouped, ('2D_diff-react_NA_NA', '133017'), 1000, 100,
                       'u_t = 1e-3 Lap u + u - u^3 - 5e-3 - v, v_t = 5e-3 Lap v + u - v, [-1, 1]^2, no flux, axes y x'),
    'ns2d_pda': SMOKE,
    'ns2d_cond_pda': SMOKE,
    'cfdbench': Official(cfdbench, ('CFDBench',), 0, 0,
                         'incompressible Navier-Stokes: lid-driven cavity, cylinder, tube, axes y x'),
    'ns2d_pdb_M1_eta1e-8_zeta1e-8_turb_512': pdebench('Turb', '1.0', '1e-08', 164686, 1000, '_512'),
    'ns2d_pdb_M1e-1_eta1e-8_zeta1e-8_turb_512': pdebench('Turb', '0.1', '1e-08', 164685, 1000, '_512'),
    'ns2d_pdb_M1_eta1e-8_zeta1e-8_rand_512': pdebench('Rand', '1.0', '1e-08', 164692, 1000, '_512'),
    'ns2d_pdb_M1e-1_eta1e-8_zeta1e-8_rand_512': pdebench('Rand', '0.1', '1e-08', 164689, 1000, '_512'),
    'ns3d_pdb_M1_rand': pdebench('Rand', '1.0', '1e-08', 164693, 100, '', 3),
    'ns3d_pdb_M1e-1_rand': pdebench('Rand', '0.1', '1e-08', 173286, 100, '', 3),
    'ns3d_pdb_M1_turb': pdebench('Turb', '1.0', '1e-08', 164694, 600, '', 3),
    'kolmogorov': Official(kolmogorov, ('FNS-KF',), 20000, 240,
                           'incompressible Navier-Stokes with the force f on u and v, unit torus, axes x y'),
    'wave_layer': Official(wave, ('Wave-Layer',), 10512, 240, WAVE),
    'wave_gauss': Official(wave, ('Wave-Gauss',), 10512, 240, WAVE),
    'cno_poisson': Official(cno, ('PoissonData_64x64_IN',), 1408, 256, '-Lap u = f, unit square, u = 0 at the sides'),
    'cno_darcy': Official(cno, ('Darcy_64x64_IN',), 512, 128, '-div(a grad u) = f, unit square, u = 0 at the sides'),
    'cno_airfoil': Official(cno, ('Airfoil_128x128_IN',), 1006, 128, 'steady Euler flow round an airfoil'),
}


# ------------------------------------------------------------------------------------------------ converting

def split(name, source, limit=0):
    """-> {'test': [(file, index)], 'train': ...}, at most `limit` of them together; 0: all that the paper takes.

    Of a source that is split already a limit takes some evenly, so that every file has its share, else the first.
    CFDBench's sizes in the paper are truncations, which cut most of the tube: all that is there is taken.
    """
    known, items, divided = DATASETS.get(name), source.items, isinstance(source.items, dict)
    if divided:
        train, test = (None, None) if known is None or name == 'cfdbench' else (known.train, known.test)
        parts = [items['test'][:test], items['train'][:train]]
    else:
        test = min(known.test, max(1, round(len(items) * known.test / (known.train + known.test))))
        start = max(0, len(items) - (OFFICIAL[name].tail if len(items) >= OFFICIAL[name].count else test))
        parts = [items[start:start + test], items[:min(known.train, start)]]
    total = sum(map(len, parts))
    if limit and limit < total and all(parts):
        test = min(max(1, round(limit * len(parts[0]) / total)), limit - 1)
        parts = [[part[i * len(part) // size] for i in range(size)] if divided else part[:size]
                 for part, size in zip(parts, (test, limit - test))]
    return dict(test=parts[0], train=parts[1])


def load(source, file, path, indices, frames):
    """Trajectories and frames of an open file, (n, t, *space, C) float32, checked for their shape and to be finite."""
    expected = (indices.stop - indices.start, frames.stop - frames.start, *source.shape[1:])
    try:
        block = source.read(file, indices, frames).astype(np.float32, copy=False)
    except (KeyError, ValueError) as error:             # a group that lacks a member, members of different shapes
        refuse(f'{path}, trajectory {indices.start}', expected[1:], error, 'download it again')
    if block.shape != expected:
        refuse(f'{path}, trajectory {indices.start}', expected[1:], block.shape[1:], 'download it again')
    finite = np.isfinite(block).reshape(len(block), -1).all(1)
    if not finite.all():
        refuse(f'{path}, trajectory {indices.start + int(finite.argmin())}', 'finite values', 'nan or infinity',
               'the download is damaged or was published so')
    return block


def blocks(items, shape):
    """Cut [(file, index)] into runs in one file of at most BLOCK bytes -> (file, place in items, indices, frames)."""
    frame = 4 * math.prod(shape[1:])
    several, frames = max(1, BLOCK // (frame * shape[0])), max(1, BLOCK // frame)
    first = 0
    while first < len(items):
        (file, index), stop = items[first], first + 1
        while stop < len(items) and stop - first < several and items[stop] == (file, index + stop - first):
            stop += 1
        for start in range(0, shape[0], frames):
            yield (file, slice(first, stop), slice(index, index + stop - first),
                   slice(start, min(start + frames, shape[0])))
        first = stop


def copy(source, items, root, target, title, attributes):
    """Write the trajectories `items` of the source at `root` to the file `target`, with a bar."""
    bar, done = tqdm(total=len(items), desc=title, bar_format='{desc} |{bar}| {n:.0f}/{total} trajectories [{elapsed}<'
                     '{remaining}{postfix}]'), 0
    with bar, writer(target, (len(items), *source.shape), **attributes) as output:
        for path, place, indices, frames in blocks(items, source.shape):
            with source.open(path) as file:
                block = load(source, file, path, indices, frames)
                more = source.more(file, indices)
            output['data'][place, frames] = block
            for key, values in more.items():
                dtype = h5py.string_dtype() if isinstance(values[0], (str, bytes)) else 'float32'
                output.require_dataset(key, (len(items),), dtype)[place] = values
            done += block.nbytes
            bar.set_postfix_str(f'{done / 1e6 / max(bar.format_dict["elapsed"], 1e-3):.0f} MB/s', refresh=False)
            bar.update(min(len(block) * block.shape[1] / source.shape[0], len(items) - bar.n))     # fractions add up
        output['source_index'] = [index for _, index in items]
        output['source_file'] = [str(path.relative_to(root if root.is_dir() else root.parent)) for path, _ in items]


def convert(name, path, folder='data', origin='', limit=0):
    """Write folder/name/test.h5 and train.h5 from the download at `path`, block by block; what is there is kept.

    origin: 'dpot' for what DPOT has converted; limit: at most so many trajectories. Raises InputError where the
    download is not as it should be, the disk is too small or another dataset is in the way; then nothing new is left.
    """
    path, folder, known = Path(path), Path(folder), DATASETS.get(name)
    source = dpot(name, path) if origin else OFFICIAL[name].source(name, path)
    parts = split(name, source, limit)
    if not all(parts.values()):
        refuse(path, 'at least one trajectory for training and one for test', source.found, 'download more')
    files = {file for items in parts.values() for file, _ in items}
    about = dict(source=(files.pop() if len(files) == 1 else path.resolve()).name, pde='', dt=1.0)
    if known:
        channels = source.channels or known.channels
        found, wanted = (f'{T} frames, {dims} dimensions, {C} channels' for T, dims, C in (
            (source.shape[0], len(source.shape) - 2, source.shape[-1]), (known.frames, known.dims, len(channels))))
        if found != wanted:
            refuse(path, wanted, found)
        static = tuple(channel for channel in channels if channel in SCALES)
        about.update(channels=channels, dt=source.dt or known.dt, pde=OFFICIAL[name].pde, static=static,
                     t_test=min(known.t_test, known.frames - 1))
        about.update({'scale': tuple(SCALES[channel] for channel in static)} if static else {})
    shape = lambda part: (len(parts[part]), *source.shape)
    todo = missing(folder, SimpleNamespace(name=name, counts=parts, shape=shape, attributes=lambda: about))
    size = sum(4 * math.prod(shape(part)) for part in todo)
    print(f'{name}: {about["source"]}: {source.found}')
    if not isinstance(source.items, dict) and len(source.items) < OFFICIAL[name].count:
        print(f'  fewer than the {OFFICIAL[name].count} of the official file: split in the same proportion')
    for part in ('train', 'test'):
        print(f'  {part:5} {shape(part)}{f", the paper {getattr(known, part)}" if known else ""}'
              f'{"" if part in todo else ", is there"}')
    print(f'  {size / 1e9:.2f} GB needed, {free_space(folder) / 1e9:.2f} GB free', flush=True)
    check_space(folder, size)
    try:
        for part in todo:
            copy(source, parts[part], path, folder / name / f'{part}.h5', f'{name} {part}', about)
    except InputError:
        for part in todo:
            (folder / name / f'{part}.h5').unlink(missing_ok=True)
        if not any((folder / name).iterdir()):
            (folder / name).rmdir()
        raise


# ------------------------------------------------------------------------------------------------ checking

def survey(folder, name, split):
    """Print the statistics of one split -> hashes of first frames, hashes of trajectories, what is wrong, in words.

    change: mean over trajectories and frames of ||u_t+1 - u_t|| / ||u_t+1||, the one-step error of persistence.
    """
    item = Trajectories(folder, name, split, 1, sys.maxsize)
    N, T, C, names, points = item.count, item.frames, item.channels, item.channel_names, math.prod(item.space)
    first, whole, still, broken, blank, solid = [], [], [], [], [], 'mask' not in names
    low, high, total, square, change = np.full(C, np.inf), np.full(C, -np.inf), *np.zeros((3, C))
    several = max(1, BLOCK // (16 * points * C))        # float64, and differences
    with h5py.File(item.path, 'r') as file, np.errstate(all='ignore'):             # nan is found and said below
        for trajectory in tqdm(range(N), desc=f'{name} {split}', leave=False, disable=None):
            digest, last, run, finite, fluid = hashlib.blake2b(), [], 0, True, False
            for start in range(0, T, several):
                block = np.ascontiguousarray(file['data'][trajectory, start:start + several])
                digest.update(block)
                if start == 0:
                    first.append(hashlib.blake2b(block[0]).digest())
                u = block.reshape(len(block), points, C).astype(float)
                finite = finite and np.isfinite(u).all()
                low, high = np.minimum(low, u.min((0, 1))), np.maximum(high, u.max((0, 1)))
                total, square = total + u.sum((0, 1)), square + (u ** 2).sum((0, 1))
                u = np.concatenate([*last, u])
                moved, norm = (np.sqrt((field ** 2).sum(1)) for field in (np.diff(u, axis=0), u[1:]))   # (t, C)
                change += (moved / np.maximum(norm, 1e-30)).sum(0)
                for frame in moved:
                    run = 0 if frame.any() else run + 1
                if 'mask' in names:
                    mask = u[..., names.index('mask')]
                    solid, fluid = solid or not mask.all(), fluid or mask.any()
                last = [u[-1:]]
            whole.append(digest.digest())
            still += [run + 1] * (run > 0)
            broken += [trajectory] * (not finite)
            blank += [trajectory] * ('mask' in names and not fluid)
        mean = total / (N * T * points)
        columns = low, high, mean, np.sqrt((square / (N * T * points) - mean ** 2).clip(0)), change / (N * (T - 1))
    print(f'{item.path}: {item.shape}, dt {item.dt:g}\n  ' + ''.join(f'{title:12}' for title in (
        'channel', 'min', 'max', 'mean', 'std', 'change')))
    for channel, row in zip(names, zip(*columns)):
        print(f'  {channel:12}' + ''.join(f'{value:<12.4g}' for value in row))
    need = 2 if name in DATASETS and DATASETS[name].frames == 2 else 11
    repeated, copies = N - len(set(first)), N - len(set(whole))
    if name == 'cfdbench':                  # its cases start alike, from rest
        repeated = copies
    wrong = [text for found, text in (
        (broken, f'{len(broken)} trajectories have values that are not finite, the first is {broken[:1]}'),
        (still, f'{len(still)} of {N} trajectories end in equal frames, up to {max(still, default=0)} of them'),
        (repeated, f'{repeated} trajectories have the first frame of an earlier one, {copies} all its frames'),
        (not solid, 'the mask is 0 nowhere, so no solid is marked'),
        (blank, f'the mask is 0 everywhere in {len(blank)} trajectories, the first is {blank[:1]}'),
        (T < need, f'{T} frames, at least {need} are needed'),
        *((not value > 0, f'{channel} is not positive: {value:g}') for channel, value in zip(names, low)
          if channel in ('density', 'pressure'))) if found]
    return first, whole, [f'{item.path}: {text}' for text in wrong]


def check(folder, name):
    """Print the statistics of both splits of folder/name and return what is wrong with them, a line each."""
    (first, whole, wrong), (*test, more) = survey(folder, name, 'train'), survey(folder, name, 'test')
    starts, copies = (sum(map(set(known).__contains__, hashes)) for known, hashes in zip((first, whole), test))
    leak = (f'{Path(folder) / name / "test.h5"}: {starts} of {len(test[0])} trajectories have the first frame of one '
            f'in train.h5, {copies} all its frames: the test is not independent')
    return wrong + more + [leak] * ((copies if name == 'cfdbench' else starts) > 0)


def main():
    parser = configs.Parser(description=__doc__.split('\n\nOne function')[0])
    parser.add_argument('name', help='dataset, one of configs.py; with --check or --from dpot any')
    parser.add_argument('--source', metavar='X', help='the file or folder as it was downloaded')
    parser.add_argument('--from', dest='origin', default='', choices=('dpot',), help='the source is as DPOT stores it')
    parser.add_argument('--data', default='data', metavar='X', help='folder of the datasets [data]')
    parser.add_argument('--limit', type=int, default=0, metavar='X', help='take at most so many trajectories [all]')
    parser.add_argument('--check', action='store_true',
                        help='print statistics and defects of what is in --data; exit code 1 where there are defects')
    args = parser.parse_args()
    if args.check:
        wrong = check(args.data, args.name)
        print('\n'.join(f'WRONG {line}' for line in wrong) or 'nothing is wrong')
        sys.exit(1 if wrong else 0)
    if not args.origin and args.name not in OFFICIAL:
        raise InputError(f'unknown dataset {args.name!r}{configs.nearest(args.name, OFFICIAL)}')
    if args.source is None:
        files = OFFICIAL[args.name].files if args.name in OFFICIAL else ['its folder']
        raise InputError(f'--source is missing: where {files[0]} was downloaded to')
    if args.limit:
        configs.at_least(2, limit=args.limit)
    try:
        convert(args.name, args.source, args.data, args.origin, args.limit)
    except OSError as error:
        raise InputError(f'--data {args.data}: {error}') from None


if __name__ == '__main__':
    configs.cli(main)
