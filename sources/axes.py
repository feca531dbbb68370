"""The axes of arrays in files of one's own, and what the files say of times and grid points.

N trajectories, T frames, X Y Z (or H W D) axes of space, C channels, or C K of a tensor.
"""
import math
import re
from contextlib import suppress
from importlib import import_module
from itertools import permutations

import numpy as np

from runtime.stored import number_of, require, text_of

TIMES = 'time', 'times', 't', 't-coordinate', 'sim_time'            # the last: PDEBench, Dedalus
GRIDS = 'x', 'y', 'z', 'lat', 'lon', 'latitude', 'longitude', *(f'{x}-coordinate' for x in 'xyz')
SAID = *TIMES, *GRIDS, 'dt'
SECONDS = {word: seconds for words, seconds in {
    'd day days': 86400., 'h hr hrs hour hours': 3600., 'min mins minute minutes': 60.,
    's sec secs second seconds': 1., 'us microsec microsecs microsecond microseconds': 1e-6,
    'ms msec msecs millisec millisecs millisecond milliseconds': 1e-3,
    'ns nanosecond nanoseconds': 1e-9}.items() for word in words.split()}


def places(shape, axes):
    """The places of `axes` in a shape, which may have more of size 1; None if they do not fit."""
    longer = [i for i, size in enumerate(shape) if size > 1]
    if len(shape) == len(axes):
        return [*range(len(shape))]
    return longer if len(longer) == len(axes) else None


def parse_layout(words):
    """The words of --layout -> axes of what evolves, or '', and {variable: axes} of those named."""
    named = {}
    for word in words:
        name, _, text = word.rpartition('=')
        axes = text.upper().translate(str.maketrans('HWD', 'XYZ'))
        require(name not in named and len({*axes}) == len(axes) and {*axes} <= {*'NTXYZCK'},
                f'--layout {word}: expected the axes of an array in their order, each once: '
                f'N trajectories, T frames, H W D or X Y Z in space, C channels, such as NTCHW')
        named[name] = axes
    main = named.pop('', max(named.values(), key=len, default=''))
    return main, named


def fit_axes(path, arrays, main, named, sizes, axis_of):
    """{name: axes} of {name: array} in a file: those that are `named`, or `main`, or the only ones
    that fit the `sizes` of axes and the names of dimensions.

    sizes, axis_of: {axis: size} and {name of a dimension: axis}, which become complete.
    """
    axes = {name: main for name, array in arrays.items() if places(array.shape, main)} | named
    for name in sorted(arrays, key=lambda name: name not in axes):
        shape = arrays[name].shape
        called = getattr(arrays[name], 'dimensions', ())
        single = [word for word in called if word and called.count(word) == 1
                  and word[:9] != 'phony_dim']
        possible = permutations([axis for axis in main if axis in sizes], sum(n > 1 for n in shape))
        guesses = [axes[name]] if name in axes else map(''.join, possible)
        fits = {}
        for its in guesses:
            at = places(shape, its)
            if at is None or 0 in shape:
                continue
            new = {axis: shape[i] for axis, i in zip(its, at) if axis not in 'CK'}
            means = {called[i]: axis for axis, i in zip(its, at) if called and called[i] in single}
            timely = all(axis in 'NT' if word.lower() in TIMES else axis != 'T'     # N: of forecasts
                         for word, axis in means.items() if word.lower() in (*TIMES, *GRIDS))
            # neither the sizes nor the names contradict what is known of them
            if timely and sizes | new == new | sizes and axis_of | means == means | axis_of:
                fits[its] = new, means
        words = ' '.join([str(shape), *filter(None, called)])
        known = f'{sizes or main} {axis_of or ""}'.strip()
        require(len(fits) == 1, f'{path}: {name or "it"} has the shape {words}, along '
                                f'{" or ".join(fits) or "none"} of the axes {known}; say which: '
                                f'--layout {main} {name or "NAME"}=X, or leave out a file that is '
                                f'empty or on another grid')
        (axes[name], (new, means)), = fits.items()
        sizes |= new
        axis_of |= means
    return {name: axes[name] for name in arrays}


def text_said(array, name='units'):
    """The text of an attribute of an array of a file, or ''."""
    value = np.ravel(getattr(array, name, None))
    text = text_of(value[0]) if value.size == 1 and isinstance(value[0], (str, bytes)) else ''
    return ' '.join(text.split())


def points_of(found, names, sizes, dimensions=(), dated=False):
    """Yield names of times or of grid points and their arrays, as (1, size) or (N, size).

    Times that say their unit are in seconds.
    names: the usual ones. If these are of times, arrays of other names follow whose unit is one
        since a date, or is one of time where the array has the name of its dimension.
    sizes: the allowed sizes.
    dimensions: names of dimensions, whose arrays of one axis count, too, if they are finite.
    dated: whether all times that say a date are seconds since 1970, and not only single ones:
        xarray chooses unit and date for each file.
    """
    for usual in True, False:
        for name, array in found.items():
            shape = [size for size in getattr(array, 'shape', ()) if size > 1] or [1]
            name = re.sub(r'(_hash_\w+|/[\d.]+)$', '', name)                 # Dedalus's grids
            unit, since, date = re.split('(?i)( since |$)', text_said(array), maxsplit=1)
            last = name.split('/')[-1]
            itself = getattr(array, 'dimensions', ()) == (last,)
            called = last.lower() in names and (last != 'T' or itself)          # T: a temperature
            since = since or unit.lower() in SECONDS and itself
            along = last in dimensions and len(getattr(array, 'shape', ())) == 1
            fits = array is not None and len(shape) < 3 and shape[-1] in sizes
            if fits and along and not called:
                called = bool(np.isfinite(np.ma.filled(array[()] * 1., np.nan)).all())
            if fits and called == usual and (usual or since and 'time' in names):
                values = SECONDS.get(unit.lower(), 1) * np.reshape(array[()], (-1, shape[-1]))
                if date and (values.size == 1 or dated):        # float32 holds no seconds since
                    with suppress(ValueError, ImportError):
                        cftime = import_module('cftime')            # which comes with netCDF4
                        calendar = text_said(array, 'calendar') or 'standard'
                        start = cftime.num2date(0, f'seconds since {date}', calendar)
                        values = values + cftime.date2num(start, 'seconds since 1970-01-01', calendar)
                yield name, values


def dt_said(arrays, beside, sizes):
    """The numbers that a file gives as the time between frames, if it does.

    arrays: {name: array} of the fields, whose attributes dt come first.
    beside: arrays called dt, the nearest first, which count as one number, one of each trajectory,
        or equal ones of the frames.
    sizes: {axis: size}.
    """
    N, T = sizes.get('N', 1), sizes.get('T', 1)
    said = [[dt for array in arrays.values() if (dt := number_of(getattr(array, 'dt', None))) > 0]]
    for array in beside:
        if array is not None and math.prod(array.shape) in (1, N, T, T - 1):
            values = np.ravel(array[()]) * SECONDS.get(text_said(array).lower(), 1)
            if len(values) in (1, N) or np.allclose(values, values[0], 1e-3, 0):
                said.append(np.unique(values if len(values) in (1, N) else values[:1]).tolist())
    return next((numbers for numbers in said if min(numbers, default=0) > 0), [])


def even_steps(where, lines, uneven):
    """The mean step in each of the lines (n, size) of times or grid points.

    Raises InputError if the steps of one change beyond rounding, and may not be `uneven`.
    where: their file and their name.
    """
    steps = np.diff(np.float64(lines))
    rounding = 4 * np.finfo(np.result_type(lines, np.float16)).eps * np.abs(lines).max()
    even = np.ptp(steps, 1) <= 1e-3 * abs(steps.mean(1)) + rounding
    shown = ' '.join(f'{value:.9g}' for value in lines[even.argmin()][:5])
    require(uneven or even.all(),
            f'{where}: the steps of {shown} ... are uneven; --uneven takes them as even')
    return np.where(abs(steps.mean(1)) > rounding, steps.mean(1), 0)


def grid_steps(path, found, grid, axis_of, known, uneven):
    """{name: (first, step)} of the grid points in a file, where `first` is None on a curved grid.

    grid: {axis of space: size}. axis_of: {name of a dimension: axis}. known: names from other files,
        of which one of the same axis is taken for a new one. uneven: as in `even_steps`.
    """
    dimensions = {name: axis for name, axis in axis_of.items() if axis in 'XYZ'}
    name_of = {axis: name for name, axis in [*dimensions.items()][::-1] if name in known}
    steps = {}
    for name, points in points_of(found, GRIDS, {*grid.values()} - {1}, dimensions):
        if name not in known:
            name = name_of.get(dimensions.get(name.split('/')[-1]), name)
        for way, lines in zip(('', ' across'), (points, points.T)):
            if len(lines.T) > 1:                                # across: the other way in a plane
                step = even_steps(f'{path}: {name}', lines, uneven)[0]
                first = float(lines[0, 0]) if len(points) == 1 else None
                steps.setdefault(f'{name}{way}', (first, step))
    return steps


def texts_of(values):
    """Numbers or texts of a coordinate as texts, [] if they do not tell all points apart."""
    if values.ndim == 2 and values.dtype.kind == 'S':               # of letters, as in Fortran
        values = np.array([b''.join(row) for row in np.ma.filled(values, b'').tolist()])
    if values.ndim != 1:
        return []
    values = np.ma.filled(values, np.nan if values.dtype.kind == 'f' else None)
    if values.dtype.kind in 'fiub':
        values = np.where(abs(values) > 1e-9 * abs(values).max(), values, 0)        # without noise
        values = [f'{value:.0f}' if value == round(value) else f'{value:.6g}'
                  for value in values.tolist()]
    texts = [' '.join(text_of(value).split('\0')[0].split()) for value in values]
    return texts if all(texts) and len({*texts}) == len(texts) else []


def labels_of(array, its, axis, found):
    """The `texts_of` the coordinate of an array along an axis.

    its: the axes of the array. found: {name: array}, the nearest first.
    """
    called = getattr(array, 'dimensions', ())
    if not called or axis not in its:
        return []
    i = places(array.shape, its)[its.index(axis)]
    fitting = [along for name, along in found.items() if name.split('/')[-1] == called[i]
               and getattr(along, 'shape', ())[:1] == (array.shape[i],)]
    texts = texts_of(np.ma.asanyarray(fitting[0][()])) if fitting else []
    return texts if len(texts) == array.shape[i] else []
