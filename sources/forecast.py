"""A forecast from a file and into a file, as the files are from which a dataset was made by sources.prepare.

`header` is what data.read_headers says of the dataset, which remembers its layout and variables.
"""
from pathlib import Path

import h5py
import numpy as np

from configs import InputError
from runtime import files
from sources.own import Own, find_runs, library, parse_layout, paths_of
from sources.prepare import fill

WRITTEN = '.npy', '.h5', '.nc'
NAMES = dict(N='trajectory', T='time', X='x', Y='y', Z='z', C='channel')        # of axes in netCDF


def frames_of(sources, header, last, uneven=False):
    """The last frames of all trajectories in files, (N, last, *space, C), and the time between two, or None.

    sources: paths of files or folders. uneven: as in `Own`.
    """
    shown = ' '.join(map(str, sources))
    if not header.get('layout'):
        raise InputError(f'{shown}: the dataset does not say how its files were laid out; make it by sources.prepare')
    own = Own(layout=tuple(header['layout'].split()), variables=tuple(header['variables']), uneven=uneven)
    runs = find_runs(paths_of(sources), own)
    frames = []
    for piece, n in runs.items:
        if piece.frames < last:
            raise InputError(f'{piece.parts[0][0]}: {piece.frames} frames are too few for a network that takes {last}')
        frames.append(runs.read(piece, slice(n, n + 1), slice(piece.frames - last, piece.frames)))
    u = np.concatenate(frames).astype(np.float32)
    if [*header['channels'][u.shape[-1]:]] == ['mask']:                         # sources.prepare has added it
        values = np.ma.masked_invalid(u)
        u = fill(u, np.isnan(u[0, 0]), values.mean(tuple(range(u.ndim - 1))).filled(np.nan))
    if u.shape[-1] != len(header['channels']) or not np.isfinite(u).all():
        raise InputError(f'{shown}: expected finite values of {len(header["channels"])} channels, found '
                         f'{u.shape[-1]}, or nan where the dataset has none')
    return u, runs.attributes['dt']


def require_writable(path):
    """Raise InputError for a path to which `write_forecast` cannot write."""
    path = Path(path)
    if path.suffix not in WRITTEN:
        raise InputError(f'{path}: expected a name that ends in {" ".join(WRITTEN)}')
    if path.suffix == '.nc':
        library(path, 'netCDF4')
    files.require_new(path)


def write_forecast(path, u, header):
    """Write the evolving channels of frames u (N, T, *space, C) with the axes of a dataset's own files.

    Each channel is an array, but all are one where these files had an axis C, and in .npy.
    """
    require_writable(path)
    path = Path(path)
    main, named = parse_layout(header['layout'].split())
    main = main.replace('K', '')                                                # a tensor's numbers lie along C
    whole = [name for name in header['variables'] if name not in named]
    evolving = [c for c, name in enumerate(header['channels']) if name not in header['static']]
    names = [header['channels'][c] for c in evolving]
    order = ['N', 'T', *sorted({*main} & {*'XYZ'}), 'C']
    u = (u[:, :, 0] if len(order) == 4 else u)[..., evolving]
    axes = [*main] if 'T' in main else ['T', *main]
    axes = ['N', *axes] if len(u) > 1 and 'N' not in axes else axes
    axes = [*axes, 'C'] if len(names) > 1 and path.suffix == '.npy' and 'C' not in axes else axes

    def arranged(part):
        absent = tuple(i for i, axis in enumerate(order) if axis not in axes)
        there = [axis for axis in order if axis in axes]
        return part.squeeze(absent).transpose([there.index(axis) for axis in axes])
    arrays = {name: arranged(u[..., c:c + 1]) for c, name in enumerate(names)}
    if 'C' in axes:
        arrays = {whole[0] if len(whole) == 1 else 'u': arranged(u)}
    dt = header['dt'] or 1.0
    times = dt * np.arange(1, u.shape[1] + 1)                                   # since the last frame that was given
    timed = {'time': times, **arrays}
    with files.replacing(path) as part:
        if path.suffix == '.npy':
            with open(part, 'wb') as file:
                np.save(file, *arrays.values())
        elif path.suffix == '.h5':
            with h5py.File(part, 'w') as file:
                file.attrs.update(channels=names, dt=dt)
                file.update(timed)
        else:
            with library(path, 'netCDF4').Dataset(part, 'w') as file:
                file.setncatts(dict(channels=' '.join(names), dt=dt))
                for axis, size in zip(axes, [*arrays.values()][0].shape):
                    file.createDimension(NAMES[axis], size)
                for name, values in timed.items():
                    along = [NAMES[axis] for axis in (axes if values.ndim > 1 else 'T')]
                    file.createVariable(name, values.dtype, along)[:] = values
