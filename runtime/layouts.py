"""What the channels of a dataset are: the attributes that its files and the checkpoints trained on it have.

data.py has the layout of the files; this file needs none of them. Shape: C channels.
"""
import math
from typing import NamedTuple

import numpy as np

from configs import InputError


def require(ok, message):
    """Raise InputError with this message unless `ok`."""
    if not ok:
        raise InputError(message)


def float_of(value):
    """An attribute as a float, NaN if it is not one number. Some programs store a number as an array of one element."""
    try:
        return float(np.asarray(value).reshape(()))
    except (TypeError, ValueError):
        return math.nan


def positive(value):
    """Whether an attribute is a positive number in float32."""
    with np.errstate(over='ignore', under='ignore'):
        return 0 < np.float32(float_of(value)) < math.inf


def names_of(value):
    """An attribute that names things, a text or an array of texts of any kind, as a list of str."""
    values = np.ravel(value).tolist()       # what is not UTF-8 becomes unprintable, as in texts that h5py decodes
    return [value.decode(errors='surrogateescape') if isinstance(value, bytes) else str(value) for value in values]


class Layout(NamedTuple):
    """What the attributes of `data` say, or the defaults; a checkpoint has those of every dataset of the training."""
    channels: list
    static: list
    scale: list
    dt: float
    t_test: float

    @property
    def evolving(self):
        """The indices of the channels that are not static."""
        return [i for i, channel in enumerate(self.channels) if channel not in self.static]

    @property
    def divisors(self):
        """What each channel is divided by when it is read: (C,) float32."""
        scales = dict(zip(self.static, self.scale))
        return np.array([scales.get(channel, 1) for channel in self.channels], np.float32)

    @property
    def words(self):
        """The channels for a message, such as 'u v c (c / 1000 static)'."""
        static = [name if scale == 1 else f'{name} / {scale:g}' for name, scale in zip(self.static, self.scale)]
        return ' '.join(self.channels) + (f' ({", ".join(static)} static)' if static else '')


def layout_of_channels(path, C, attributes):
    """The Layout of C channels. Raises InputError, which starts with `path`, for attributes that cannot be."""
    values = {key: np.asarray(value).tolist() for key, value in attributes.items()}
    channels = names_of(values.get('channels', range(C)))
    static = names_of(values.get('static', []))
    scale = values.get('scale', [1] * len(static))
    dt = float_of(values.get('dt', 1))
    t_test = float_of(values.get('t_test', math.inf))

    different = len(set(channels)) == len(channels) == C and all(name.isprintable() for name in channels)
    require(different, f'{path}: channels {channels}: expected {C} different names')
    require(set(static) < set(channels),
            f'{path}: static {static}: expected names of the channels {channels}, but not all')
    require(np.shape(scale) == (len(static),) and all(map(positive, scale)),
            f'{path}: scale {scale}: expected a list with one positive number for each of the static channels {static}')
    require(positive(dt), f'{path}: dt {values.get("dt")}: expected a positive number')
    require(t_test >= 1 and (t_test == math.inf or t_test % 1 == 0),
            f'{path}: t_test {values.get("t_test")}: expected a whole number of at least 1')
    return Layout(channels, static, scale, dt, t_test)


def with_coefficients(layout, names, scales):
    """The Layout of fields to which coefficients have been appended as static channels."""
    return layout._replace(channels=layout.channels + list(names), static=layout.static + list(names),
                           scale=layout.scale + scales)


def changed(before, now):
    """The first difference between `fingerprints` of the files that are in both, in words; '' if there is none."""
    for file in (file for file in before if file in now):
        for what, value in before[file].items():
            if value != now[file].get(what):
                return f'the {what} of {file} was {value!r}, is {now[file].get(what)!r}'
    return ''
