"""A forecast from files and into one, as those are of which sources.prepare made a dataset.

`header` is what data.read_headers says of the dataset, which remembers its layout and variables.
"""
from pathlib import Path

import h5py
import numpy as np

from configs import InputError
from data import check_finite, evolving_of
from runtime import files
from runtime.stored import require
from runtime.terminal import warn
from sources.axes import parse_layout
from sources.kinds import library
from sources.own import Own, find_runs
from sources.prepare import fill
from sources.survey import BETWEEN

WRITTEN = '.npy', '.h5', '.nc'
NAMES = dict(N='trajectory', T='time', X='x', Y='y', Z='z', C='channel')        # of axes in netCDF


def frames_of(paths, header, last, uneven=False):
    """The last frames of all trajectories in files, (N, last, *space, C), their dt or None, and
    where they have gaps, (*space, C).

    paths: as joined.paths_of gives them. uneven: as in `Own`.
    """
    shown = in_words(paths)
    require(header.get('layout'), f'{shown}: the dataset does not say how its files were laid out; '
                                  f'make it by sources.prepare')
    variables = tuple(header['variables'])
    if len(variables) == 1 and all(path.suffix.lower() == '.npy' for path in paths):
        variables = '',                                             # whose arrays have no names
    own = Own(layout=tuple(header['layout']), variables=variables, uneven=uneven,
              dt=header['dt'] or 0.0, test_source=tuple(paths))
    try:
        runs = find_runs(paths, own)
    except InputError as error:
        if '--layout' not in str(error) and '--variables' not in str(error):
            raise
        raise InputError(f'{error}; as in the training, the files together need '
                         f'{" ".join(variables) or "an array"} along {" ".join(own.layout)}') from None
    require(runs.shape[0] >= last,
            f'{shown}: {runs.shape[0]} frames are too few for a network that takes {last}')
    u = np.concatenate([
        runs.read(piece, slice(n, n + 1), slice(piece.frames - last, piece.frames))
        for piece, n in runs.items]).astype(np.float32)
    gaps = np.zeros(u.shape[2:], bool)
    if [*header['channels'][u.shape[-1]:]] == ['mask']:             # sources.prepare has added it
        gaps = np.isnan(u[0, 0])
        gaps &= ~gaps.all(tuple(range(gaps.ndim - 1)))
        require(np.isnan(u[:, :, gaps]).all(), f'{shown}: frames or files have different gaps; name '
                                               f'those with the same')
        if not gaps.any():
            warn(f'{shown}: has no gaps, but the dataset has')
        u = fill(u, gaps, np.array(header['units']['mean'][0][:-1]))    # as in the training
        gaps = np.insert(gaps, gaps.shape[-1], False, -1)           # the mask has none
    for (piece, n), trajectory in zip(runs.items, u):
        check_finite(trajectory, f'{piece}, trajectory {n}', piece.frames - last)
    compare(runs, header, shown, uneven)
    return u, runs.attributes['dt'], gaps


def in_words(paths):
    """Paths in words, at most four of them."""
    shown = [*map(str, paths)]
    return ' '.join(shown if len(shown) < 5 else [*shown[:2], '...', shown[-1]])


def said_by(attributes):
    """{what: its value} of the `said` in the attributes of a dataset, see data.py."""
    return dict(words.partition(' is ')[::2] for words in attributes.get('said', []))


def with_names_of(said, known):
    """What is `said` of steps and starts, with the names that `known` has for their axes.

    A file may call an axis lat, and those of the training latitude. Both are of `said_by`.
    """
    axes, names = ({what.removeprefix('axis of '): axis for what, axis in some.items()
                    if what.startswith('axis of ')} for some in (said, known))
    names = {axis: name for name, axis in [*names.items()][::-1] if f'step of {name}' in known}
    renamed = {}
    for what, value in said.items():
        kind, _, name = what.partition(' of ')
        name, across, _ = name.partition(' across')
        if kind in ('step', 'start') and f'step of {name}' not in known:
            what = f'{kind} of {names.get(axes.get(name), name)}{across}'
        renamed[what] = value
    return renamed


def compare(runs, header, shown, uneven):
    """Raise InputError if the steps in files are not those of the dataset; warn of other units.

    runs: the Source in them. On another number of points only the signs of steps are compared.
    """
    known = said_by(header)
    here = with_names_of(said_by(runs.attributes), known)
    mine, its = runs.attributes['variables'], header['variables'] or ['']
    if len(mine) == len(its) == 1:                                  # which in .npy has no name
        here = {what.replace(f' in {mine[0]}', f' in {its[0]}'): value
                for what, value in here.items()}
    dt = header['dt'] or 0                                          # of --dt, and of our forecasts
    if dt and (BETWEEN not in known or np.isclose(runs.attributes['dt'] or 0, dt, 1e-3, 0)):
        known[BETWEEN] = dt
    same = [*runs.shape[1:-1]] == header['shape'][2:-1]
    for what in sorted(known.keys() | here.keys()):
        if what.startswith('number'):
            one, other = here.pop(what, '1'), known.pop(what, '1')
            require(one == other, f'{shown}: the {what} is {one}, in the training {other}')
    warned_of = lambda what: what.startswith(('unit', 'start'))
    for what in sorted(sorted(known.keys() & here.keys()), key=warned_of):      # refusals first
        words = f'{shown}: the {what} is {here[what]}, in the training {known[what]}'
        if what.startswith(('order', 'axis')):
            require(here[what] == known[what], words)
        elif what.startswith('unit'):
            if here[what] != known[what]:
                warn(words)
        elif what.startswith('start'):
            steps = [abs(float(some.get(what.replace('start', 'step', 1), 0)))
                     for some in (here, known)]
            if abs(float(here[what]) - float(known[what])) > sum(steps):
                warn(words)
        else:
            one, other = float(here[what]), float(known[what])
            require(one * other >= 0, f'{words}; turn the axis')
            if (same or what == BETWEEN) and not np.isclose(one, other, rtol=1e-3, atol=0):
                require(uneven, f'{words}; --uneven takes them as equal')
                warn(f'{words}; they are taken as equal')


def require_writable(path):
    """Raise InputError for a path to which `write_forecast` cannot write."""
    path = Path(path)
    require(path.suffix in WRITTEN, f'{path}: expected a name that ends in {" ".join(WRITTEN)}')
    if path.suffix == '.nc':
        library(path, 'netCDF4')
    files.require_new(path)


def laid_out(u, header, apart):
    """{variable: (its axes, its array)} of the evolving channels of frames u (N, T, *space, C), along
    the axes of own files; `apart`: an array for each variable, or else one for all.
    """
    main, named = parse_layout(header['layout'])
    first = '' if 'T' in main else 'T'
    if len(u) > 1 and 'N' not in main:
        first = 'N' + first
    order = 'NT' + ''.join(sorted({*main} & {*'XYZ'})).rjust(2, 'S') + 'C'      # S: one point
    said = said_by(header)
    evolving = evolving_of(header)
    parts, start = {}, 0                                    # {variable: (its axes, its channels)}
    for name in header['variables'] or ['']:
        count = int(said.get(f'number of channels in {name}', 1))
        stop = start + count if len(header['variables']) > 1 else len(header['channels'])
        of_it = [c for c in evolving if start <= c < stop]
        start = stop
        if of_it:
            parts[name or header['channels'][of_it[0]]] = named.get(name, main), of_it
    if len(parts) > 1 and not apart:
        parts = {'u': (main, evolving)}
    found = {}
    for name, (axes, of_it) in parts.items():
        axes = first + axes.replace('K', '')                        # whose numbers lie along C
        axes += 'C' if len(of_it) > 1 and 'C' not in axes else ''
        lacking = tuple(i for i, axis in enumerate(order) if axis in {*'XYZ'} - {*axes})
        part = u[..., of_it].mean(lacking, keepdims=True)           # of a number that evolves
        found[name] = axes, np.einsum(f'{order}->{axes}', part)
    return found


def write_forecast(path, u, header):
    """Write the evolving channels of frames u (N, T, *space, C), and their times, as own files are.

    Each variable of these is an array, but in .npy all are one.
    """
    require_writable(path)
    path = Path(path)
    found = laid_out(u, header, apart=path.suffix != '.npy')
    dt = header['dt'] or 1.0
    timed = {'time': ('T', dt * np.arange(1, u.shape[1] + 1)), **found}
    channels = [header['channels'][c] for c in evolving_of(header)]
    with files.replacing(path) as new:
        if path.suffix == '.npy':
            with open(new, 'wb') as file:                           # a name would get its suffix
                np.save(file, *(array for _, array in found.values()))
        elif path.suffix == '.h5':
            with h5py.File(new, 'w') as file:
                file.attrs.update(channels=channels, dt=dt)
                file.update({name: array for name, (_, array) in timed.items()})
        else:
            with library(path, 'netCDF4').Dataset(new, 'w') as file:
                file.setncatts(dict(channels=' '.join(channels), dt=dt))
                fill_netcdf(file, timed, said_by(header))


def fill_netcdf(file, arrays, said):
    """Write {name: (axes, array)} into a netCDF file, with the units and names of axes as `said`."""
    called = NAMES | {axis: what.removeprefix('axis of ') for what, axis in said.items()
                      if what.startswith('axis of ') and axis in 'XYZ'}
    for name, (axes, array) in arrays.items():
        if len(arrays) > 2:                         # with the times; each has channels of its own
            called['C'] = f'channel_{name.replace("/", "_")}'
        dimensions = [called[axis] for axis in axes]
        for word, size in zip(dimensions, array.shape):
            if word not in file.dimensions:
                file.createDimension(word, size)
        variable = file.createVariable(name, array.dtype, dimensions)
        variable[:] = array
        if f'unit of {name}' in said:
            variable.units = said[f'unit of {name}']
    file['time'].long_name = 'time since the last frame given'
