"""Arrays in files of several kinds: .npy, .npz, MATLAB's .mat (v7.3 is HDF5, older ones need SciPy),
netCDF (needs netCDF4) and HDF5.

Only what is asked for is read, but an array of a compressed .npz or an older .mat as a whole.
"""
import functools
import math
import re
import warnings
import zipfile
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module

import h5py
import numpy as np

from configs import InputError
from runtime.files import naming
from runtime.stored import number_of, whole
from sources.axes import SAID

NETCDF = '.nc', '.nc4', '.cdf'
BLOCK = 2 ** 24                                                     # bytes that are read at once
KINDS = '.npy', '.npz', '.mat', *NETCDF, '.h5', '.hdf5', '.hdf'
UNREADABLE = ('missing, truncated, damaged, larger than the memory or of another kind, such as a '
              'git-lfs pointer; download it again')


def reading(where):
    """Within the block, whatever a library says of a file is one line that names it."""
    return naming(where, UNREADABLE, Exception)


def library(path, name):
    """The module `name` of the package that this kind of file needs, and not everybody has."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition('.')[0]
        raise InputError(f'{path}: needs {package}; run: pip install {package}') from None


class Stored:
    """An array of an HDF5 file, read at `[index]`; MATLAB's have their axes reversed there."""

    def __init__(self, item):
        kind = item.attrs.get('MATLAB_class')
        self._item = item
        self._step = -1 if kind else 1
        self.shape = item.shape[::self._step]
        self.dimensions = ('',) * item.ndim
        with suppress(RuntimeError):                            # a scale was deleted
            scales = [dim.label or (dim[0].name if len(dim) else '') or '' for dim in item.dims]
            scales = [item.name] if h5py.h5ds.is_scale(item.id) and item.ndim == 1 else scales
            self.dimensions = tuple(name.split('/')[-1] for name in scales)[::self._step]
        self.dtype = None if kind in (b'char', 'char') else item.dtype
        ours = ['channels', 'static'] if item.name.endswith('/data') else []    # as data.py writes
        said = {name: item.attrs.get(name, 0) for name in ours}
        self.said = {name: value for name, value in said.items()
                     if np.asarray(value).dtype.kind in 'SUO' and np.size(value)}
        self.units, self.dt, self.calendar = map(item.attrs.get, ('units', 'dt', 'calendar'))

    def __getitem__(self, index):
        values = whole(self._item)[index[::self._step]]
        return values.T if self._step < 0 else values


def is_array(item):
    """Whether an HDF5 item is one, and not a dimension of netCDF that has no values."""
    return (isinstance(item, h5py.Dataset) and item.shape is not None
            and 'not a netCDF variable' not in str(item.attrs.get('NAME')))


def stored_among(group, names):
    """{name: Stored} of those of `names` that are arrays in an HDF5 group, or links to some."""
    found = {}
    for name in filter(None, names):
        with suppress(KeyError, OSError):                       # there is none, or it leads nowhere
            if is_array(group[name]):
                found[name] = Stored(group[name])
    return found


def stored_in(group, names):
    """{name: Stored} of all arrays in an HDF5 group, and of links in it that are among `names`."""
    found = {}

    def add(name, item):
        if is_array(item):
            found[name] = Stored(item)
    group.visititems(add)
    return found | stored_among(group, names)


def variables_of(group, place=''):
    """{name: variable} of a netCDF file, those in its groups as group/name."""
    found = {place + name: variable for name, variable in group.variables.items()}
    for name, inner in group.groups.items():
        found |= variables_of(inner, f'{place}{name}/')
    return found


@functools.cache
def check_sum(path, member, changed):
    """Compare a member of an .npz with its checksum, once. changed: when the file was written."""
    with zipfile.ZipFile(path) as file, file.open(member) as stream:
        while stream.read(BLOCK):                               # which compares at the end
            pass


@functools.lru_cache(2)
def in_memory(path, names, changed):
    """{name: array} of an .npz or an older .mat, None for objects; those of an .npz that is not
    compressed are mapped, and of the others only `names` are read, or all.

    changed: when it was written.
    """
    if path.suffix.lower() == '.mat':
        return library(path, 'scipy.io').loadmat(path, variable_names=names or None)
    found = {}
    with zipfile.ZipFile(path) as file:
        for member in file.infolist():
            name = member.filename.removesuffix('.npy')
            found[name] = None
            asked = not names or name in names
            with suppress(ValueError), file.open(member) as stream:
                if member.compress_type == zipfile.ZIP_STORED:
                    np.lib.format.read_magic(file.fp)
                    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file.fp)
                    order = 'F' if by_columns else 'C'
                    found[name] = np.memmap(path, dtype, 'r', file.fp.tell(), shape, order)
                    if asked:
                        check_sum(path, member.filename, changed)
                elif asked:
                    found[name] = np.load(stream, allow_pickle=False)
    return found


def variable_of(path, names):
    """The longest of some names with which that of a file begins, or else what stands there before
    the first number: u in u_0042.npy, and u10 in u10_0042.npy if that is one of the names.
    """
    fitting = [name for name in names if re.match(re.escape(name) + '(?![A-Za-z])', path.stem)]
    return max(fitting, key=len, default=re.split(r'[\W_]*\d', path.stem)[0])


class Found(dict):
    """{name: array} in files and in their attributes, None where one is not of real numbers.

    `texts` has the arrays of texts. Dates become seconds since 1970, spans of time seconds.
    """

    def __init__(self, arrays):
        super().__init__(arrays)
        kinds = {name: getattr(getattr(array, 'datatype', getattr(array, 'dtype', None)), 'kind', 'O')
                 for name, array in arrays.items()}             # netCDF4 has a type of its own
        self.texts = {name: array for name, array in arrays.items() if kinds[name] in 'SUO'
                      and getattr(array, 'shape', ())}
        for name, kind in kinds.items():
            if kind not in 'fiub':
                self[name] = None
            if kind in 'mM':                                        # of dates or spans of time
                with suppress(TypeError):                           # in months
                    since = arrays[name] - np.zeros((), arrays[name].dtype)
                    self[name] = since / np.timedelta64(1, 's')


@contextmanager
def opened(paths, names):
    """The Found in files, where dates are seconds since 1970.

    paths: of files, or file/group for a group of an HDF5 file. With a group, arrays of the file
        itself count, too, if they are among `names` or belong to a dimension of the group's arrays.
    names: of a compressed .npz and an older .mat these alone are read, and of the attributes that
        are texts these and dt become numbers; (): all are read.
    """
    attributes, found = {}, {}
    with reading(' '.join(map(str, paths))), ExitStack() as stack:
        for path in paths:
            kind = path.suffix.lower()
            if kind == '.npy':
                array = np.load(path, mmap_mode='r', allow_pickle=False)
                found |= {'': array, path.stem: array, variable_of(path, names): array}
            elif kind == '.npz' or kind == '.mat' and not h5py.is_hdf5(path):
                found |= in_memory(path, tuple(names), path.stat().st_mtime_ns)
            elif kind in NETCDF:
                problem = 'an attribute must have the type of its variable, or gaps are missed'
                stack.enter_context(naming(path, problem, UserWarning))
                stack.enter_context(warnings.catch_warnings(action='error', category=UserWarning))
                file = stack.enter_context(library(path, 'netCDF4').Dataset(path))
                attributes |= file.__dict__
                found |= variables_of(file)
            else:
                path, group = (path.parent, path.name) if path.parent.is_file() else (path, '/')
                file = stack.enter_context(h5py.File(path))
                attributes |= {**file.attrs, **file[group].attrs}
                inside = stored_in(file[group], names)
                if group != '/':                                    # what belongs to all groups
                    along = {word for array in inside.values() for word in array.dimensions}
                    inside = stored_among(file, {*names, *along} - {*file[group].attrs}) | inside
                found |= inside
        single = {name: np.ravel(value)[0] for name, value in attributes.items()
                  if np.size(value) == 1}
        for name in {*single} & ({*names} - {*SAID} | {'dt'}):
            if isinstance(single[name], (str, bytes)) and math.isfinite(number_of(single[name])):
                single[name] = np.float64(number_of(single[name]))
        yield Found({name: array for name, array in (single | found).items() if name[:2] != '__'})


def contents(path, names=()):
    """{name: shape} of the arrays of real numbers in a file, and all that is in it in words."""
    with opened([path], names) as found:
        shapes = {name: array.shape for name, array in found.items() if array is not None}
        others = ' '.join(name for name in found if name and name not in shapes)
        named = {id(found[name]): f'{name} {shape}' for name, shape in [*shapes.items()][::-1]
                 if name and shape}                                 # of several names the first
    words = [*named.values()][::-1]
    words = ', '.join(words[:20] + ['...'] if len(words) > 20 else words) or 'none'
    return shapes, words + (f' (not of real numbers: {others})' if others else '')
