"""What HDF5 files hold, as other programs write them: attributes of any kind, packed numbers, gaps, compression."""
import math
from contextlib import suppress

import h5py
import numpy as np

from configs import InputError


def require(ok, message):
    """Raise InputError with this message unless `ok`."""
    if not ok:
        raise InputError(message)


def attributes_of(stored):
    """The attributes of an HDF5 dataset, without those that netCDF stores for ''."""
    return {name: value for name, value in stored.attrs.items() if not isinstance(value, h5py.Empty)}


def text_of(value):
    """A text of any kind, or anything else, as a str. Bytes that are not UTF-8 are Latin-1."""
    if not isinstance(value, bytes):
        return str(value).encode('utf-8', 'backslashreplace').decode()      # a file's name may be no UTF-8
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode('latin-1')


def names_of(value):
    """An attribute that names things, one text or several, as a list of str."""
    if isinstance(value, (str, bytes)) or not np.iterable(value):
        value = [value]
    names = [text_of(name) for item in value for name in np.ravel(item).tolist()]
    return [] if names == [''] else names


def number_of(value):
    """An attribute that is a number, or an array of one; NaN if it is neither."""
    try:
        return float(np.asarray(value).item())
    except (TypeError, ValueError):
        return math.nan


def storable(attributes):
    """Attributes of the layout as HDF5 holds them: texts, lists of texts, numbers; None is left out."""
    stored = {name: value for name, value in attributes.items() if value is not None}
    for name, value in stored.items():
        if name in ('channels', 'static'):
            stored[name] = names_of(value)
        elif name in ('pde', 'source'):
            stored[name] = text_of(value)
        elif not math.isnan(number_of(value)):
            stored[name] = number_of(value)
    return stored


GAPS = '_FillValue', 'missing_value'           # netCDF's attributes: the values that stand for none
PACKING = 'scale_factor', 'add_offset'              # and how a number is made of a stored one


class Packed:
    """Stored numbers that are packed or may have gaps, by the conventions of netCDF: `[index]`
    reads what they mean.

    stored: an HDF5 dataset or an array. attributes: a dict. where: how an error names it.
    """

    def __init__(self, stored, attributes, where):
        self.shape = stored.shape
        self._stored = stored
        self._attributes = attributes
        self._where = where

    def __getitem__(self, index):
        values = self._stored[index]
        for name in GAPS:
            for gap in np.ravel(self._attributes.get(name, [])):
                require(not (values == gap).any(), f'{self._where} has gaps, which hold its {name} {gap}; fill them, '
                                                   f'or leave these trajectories out')
        factor, offset = (number_of(self._attributes.get(name, default)) for name, default in zip(PACKING, (1, 0)))
        return values if (factor, offset) == (1, 0) else values * factor + offset


def require_filters(stored):
    """Raise InputError for a compression without a filter, even with hdf5plugin."""
    properties = stored.id.get_create_plist()
    for i in range(properties.get_nfilters()):
        code, *_, name = properties.get_filter(i)
        if not h5py.h5z.filter_avail(code):
            with suppress(ImportError):
                import hdf5plugin  # noqa: F401, which registers its filters
        require(h5py.h5z.filter_avail(code),
                f'{stored.file.filename}: {stored.name} is compressed, and its filter {code} {text_of(name)} is not '
                f'installed; pip install hdf5plugin')


def whole(file, key):
    """The HDF5 dataset `key` of an open file, or a `Packed` one. `[index]` reads numbers as they
    are meant.

    Raises InputError where HDF5 would read bytes that are absent as 0, and for a filter that is not
    installed.
    """
    stored = file[key]
    path = stored.file.filename
    require_filters(stored)
    require(not stored.is_virtual and not stored.external,
            f'{path}: {stored.name} lies in other files; copy it into one')
    if stored.chunks:
        expected = math.prod(map(math.ceil, np.divide(stored.shape, stored.chunks)))
        present = stored.id.get_num_chunks()
    else:
        expected = stored.size * stored.id.get_type().get_size()                        # bytes
        present = stored.id.get_storage_size()
    require(present >= expected, f'{path}: a part of {stored.name} was never written; write or download it again')
    attributes = attributes_of(stored)
    packed = attributes.keys() & {*GAPS, *PACKING}
    return Packed(stored, attributes, f'{path}: {stored.name}') if packed else stored
