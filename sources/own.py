"""Files of one's own, of several kinds and with axes in any order, as arrays (N, T, *space, C).

.npy, .npz, MATLAB's .mat (v7.3 is HDF5, older ones need SciPy), netCDF's .nc
(version 4 is HDF5, version 3 needs SciPy) and HDF5. Numbers that netCDF's attributes say are packed
are unpacked, and its gaps are refused, as stored.whole does.

N trajectories, T frames, X Y Z (or H W D) axes of space, C channels.
"""
from pathlib import Path

import h5py
import numpy as np

import data
from configs import InputError
from runtime import files, stored

SPACE = dict(zip('HWD', 'XYZ'))         # the letters of --layout that mean the same axis
KINDS = '.npy', '.npz', '.mat', '.nc', '.h5', '.hdf5'


def scipy_io(path):
    """The module scipy.io, which reads what is not HDF5."""
    try:
        import scipy.io
    except ImportError:
        raise InputError(f'--source {path}: SciPy reads files of this kind; run: pip install scipy') from None
    return scipy.io


def hdf5_variables(path):
    """{name: array} of the datasets in an HDF5 file; MATLAB's have reversed axes."""
    found = {}
    with h5py.File(path, 'r') as file:
        def visit(name, item):
            if isinstance(item, h5py.Dataset) and item.dtype.kind in 'fiub' and item.ndim:
                values = stored.whole(file, name)[()]
                found[name] = values.T if path.suffix == '.mat' else values
        file.visititems(visit)
    return found


def netcdf3_variables(path):
    """{name: array} of a netCDF file of version 3."""
    found = {}
    with scipy_io(path).netcdf_file(path, mmap=False) as file:
        for name, variable in file.variables.items():
            attributes = dict(variable._attributes)              # SciPy has no public name for them
            found[name] = stored.Packed(variable.data, attributes, f'{path}: {name}')[()]
    return found


def variables(path):
    """{name: array} of a file of any of these kinds. Raises InputError for another file."""
    if not path.is_file() or path.suffix not in KINDS:
        raise InputError(f'--source {path}: there is no such file of the kinds {" ".join(KINDS)}')
    with files.naming(path):
        if path.suffix == '.npy':
            return {path.stem: np.load(path, mmap_mode='r', allow_pickle=False)}
        if path.suffix == '.npz':
            with np.load(path, allow_pickle=False) as file:
                return dict(file)
        if path.suffix == '.mat' and not h5py.is_hdf5(path):
            found = scipy_io(path).loadmat(path)
            return {name: values for name, values in found.items() if not name.startswith('__')}
        if path.suffix == '.nc' and not h5py.is_hdf5(path):
            return netcdf3_variables(path)
        return hdf5_variables(path)


def layout_of(text):
    """The axes of --layout, such as NTCHW, as letters of N T X Y Z C. Raises InputError for others.
    """
    axes = ''.join(SPACE.get(letter, letter) for letter in text.upper())
    space = sorted(set(axes) & {*'XYZ'})
    known = 'T' in axes and len(set(axes)) == len(axes) and not set(axes) - {*'NTXYZC'}
    if not known or not space or space != [*'XYZ'[:len(space)]]:
        raise InputError(f'--layout {text}: expected the axes of the array in their order, each once: N trajectories, '
                         f'T frames, H W D (or X Y Z) in space, C channels, such as NTCHW or TX')
    return axes


def arranged(values, axes, where):
    """An array as (N, T, *space, C). Raises InputError for another number of axes."""
    if values.ndim != len(axes):
        raise InputError(f'{where} has the shape {values.shape}, for which --layout {axes} does not fit')
    wanted = 'NT' + ''.join(sorted(set(axes) & {*'XYZ'})) + 'C'
    for letter in wanted:
        if letter not in axes:                                      # one trajectory, or one channel
            values = values[..., None]
            axes += letter
    return values.transpose([axes.index(letter) for letter in wanted])


def chosen(sources, names):
    """[(where, array)] of the variables `names` in some files, or of the only one in each file.

    where: how an error names it.
    Raises InputError if a name is missing, or if none is given and there are several.
    """
    parts = []
    for path in sources:
        found = {name: values for name, values in variables(path).items() if np.ndim(values)}
        mine = [name for name in names or found if name in found]
        if not mine or not names and len(mine) > 1:
            listed = ', '.join(f'{name} {values.shape}' for name, values in found.items()) or 'none'
            raise InputError(f'--source {path}: name the variables with --variables; there are {listed}')
        parts += [(f'--source {path}: {name}', found[name]) for name in mine]
    if len(parts) < len(names):
        raise InputError(f'--variables {" ".join(names)}: {len(parts)} of them are in {" ".join(map(str, sources))}')
    return parts


def read(sources, names, layout):
    """Some variables as channels of one array (N, T, *space, C), and the places of the static ones.

    A variable without the axes N and T, such as a mask, holds for all times and is a static channel.

    sources: paths of files.
    names: of variables, or () for the only one.
    layout: the axes of those that evolve.
    """
    parts = chosen(sources, names)
    if not layout:
        shapes = ', '.join(f'{where} {values.shape}' for where, values in parts)
        raise InputError(f'--layout is missing: the axes in their order, such as NTHWC for {shapes}')
    axes = layout_of(layout)
    still = ''.join(letter for letter in axes if letter in 'XYZ')
    channels = []
    static = []
    for where, values in parts:
        if values.ndim == len(still) < len(axes):
            static.append(len(channels))
            channels.append(arranged(values, still, where)[..., 0])             # (1, 1, *space)
        else:
            channels.extend(np.moveaxis(arranged(values, axes, where), -1, 0))
    shapes = {values.shape for c, values in enumerate(channels) if c not in static}
    if len(shapes) != 1:
        raise InputError(f'--variables: the shapes {sorted(shapes)} of what evolves differ')
    return np.stack([np.broadcast_to(values, *shapes) for values in channels], -1), static


def splits(count, valid, test, seed):
    """{split: numbers of trajectories}, drawn by the seed, with these shares of them."""
    order = np.random.default_rng(seed).permutation(count)
    tests = max(1, round(test * count))
    valids = round(valid * count)
    if tests + valids >= count:
        raise InputError(f'{count} trajectories are too few for --test {test} and --valid {valid}')
    return {'test': order[:tests], 'valid': order[tests:tests + valids], 'train': order[tests + valids:]}


def describe(u, names):
    """Lines on an array (N, T, *space, C): shape, range, mean, deviation of each channel."""
    lines = [f'(N, T, *space, C) = {u.shape}']
    for c, name in enumerate(names):
        values = u[..., c].astype(np.float64)
        line = (f'  {name}: {values.min():.4g} to {values.max():.4g}, mean {values.mean():.4g}, deviation '
                f'{values.std():.4g}')
        moving = values.std(tuple(range(2, values.ndim))).max(0) > 0    # of each frame
        if not moving.all():
            line += f'; the same everywhere in the frames {" ".join(map(str, np.flatnonzero(~moving)[:10]))}'
        lines.append(line)
    return lines


def convert_own(name, args):
    """Write a dataset from files of one's own, by flags, and print what was read."""
    u, static = read([Path(path) for path in args.source], args.variables, args.layout)
    names = args.channels or args.variables or [str(c) for c in range(u.shape[-1])]
    if len(names) != u.shape[-1]:
        raise InputError(f'--channels {" ".join(names)}: there are {u.shape[-1]} channels')
    for line in describe(u, names):
        print(line)
    rows = splits(len(u), args.valid, args.test, args.seed)
    parts = {split: u[numbers] for split, numbers in rows.items() if len(numbers)}
    data.write(Path(args.data, name), **parts, channels=names, static=[names[c] for c in static], dt=args.dt,
               source=' '.join(Path(path).name for path in args.source))
    for split, part in parts.items():
        print(f'{args.data}/{name}/{split}.h5: {len(part)} trajectories of {part.shape[1]} frames')
