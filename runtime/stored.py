"""What HDF5 files hold, as other programs write them: attributes, absent parts, compression."""
import math
from contextlib import suppress

import h5py
import numpy as np

from configs import InputError

with suppress(ImportError):
    import hdf5plugin  # noqa: F401, which registers its filters


def require(ok, message):
    """Raise InputError with this message unless `ok`."""
    if not ok:
        raise InputError(message)


def text_of(value):
    """A text of any kind, or anything else, as a str. Bytes that are not UTF-8 are Latin-1."""
    if not isinstance(value, bytes):
        value = str(value).encode('utf-8', 'backslashreplace')      # a file's name may be no UTF-8
    with suppress(UnicodeDecodeError):
        return value.decode()
    return value.decode('latin-1')


def names_of(value):
    """An attribute that names things, one text or several, as a list of str."""
    require(not isinstance(value, (set, frozenset)), f'{value}: names in a set have no order')
    several = np.iterable(value) and not isinstance(value, (str, bytes))
    value = [*value] if several else [value]
    names = [text_of(name) for name in np.array(value, object).ravel().tolist()]
    return [] if names == [''] else names


def number_of(value):
    """An attribute that is a number, or an array of one; NaN if it is neither, as a span of time."""
    value = np.asarray(value)
    with suppress(TypeError, ValueError):
        return float(value.item()) if value.dtype.kind not in 'mM' else math.nan
    return math.nan


def storable(attributes):
    """Attributes of the layout as HDF5 holds them: lists of texts, numbers, texts; None is none.

    What should be a number and is not stays as it is.
    """
    form_of = dict.fromkeys(['channels', 'static', 'variables', 'layout', 'said'], names_of)
    form_of |= dict.fromkeys(['pde', 'source'], text_of)
    forms = {name: form_of.get(name, number_of)(value) for name, value in attributes.items()
             if value is not None}
    return {name: value if value == value else attributes[name] for name, value in forms.items()}


# netCDF's attributes that give stored numbers another meaning, and the value of each that does not
NETCDF = dict(scale_factor=1.0, add_offset=0.0, _FillValue=math.nan, missing_value=math.nan,
              valid_min=None, valid_max=None, valid_range=None, _Unsigned=None)


def whole(stored):
    """The same HDF5 dataset.

    Raises InputError where HDF5 would read bytes that are absent as 0 and where netCDF's rules
    apply, and for a filter that is not installed.
    """
    path = stored.file.filename
    where = f'{path}: {stored.name}'
    properties = stored.id.get_create_plist()
    for code, *_ in map(properties.get_filter, range(properties.get_nfilters())):
        require(h5py.h5z.filter_avail(code), f'{where} is compressed, and its filter {code} is not '
                                             f'installed; pip install hdf5plugin')
    require(not (stored.is_virtual or stored.external),
            f'{where} lies in other files; copy it into one')
    expected = stored.size * stored.id.get_type().get_size()                            # bytes
    present = stored.id.get_storage_size()
    if stored.chunks:
        expected = math.prod(map(math.ceil, np.divide(stored.shape, stored.chunks)))
        present = stored.id.get_num_chunks()
    require(present >= expected,
            f'{path}: a part of {stored.name} was never written; write or download it again')
    for name in filter(stored.attrs.__contains__, NETCDF):
        value = stored.attrs[name]
        same = str(number_of(value)) == str(NETCDF[name])                   # since nan is not nan
        require(same and np.size(value) == 1,
                f"{where} has netCDF's attribute {name}, so its numbers are packed or have gaps; "
                f'name it FILE.nc, which sources.prepare --source FILE.nc --layout ... reads')
    return stored
