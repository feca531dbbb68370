"""Opening a public download: which kind of file it is, what it holds, and one line that says what is wrong with it."""
from contextlib import contextmanager
from typing import NamedTuple

from configs import InputError

import h5py

from runtime import terminal

AGAIN = 'download it again'
DAMAGED = f'a truncated or damaged file; {AGAIN}'


def refuse(path, expected, found, advice="is it another benchmark's file?"):
    """Raise an InputError; `found` is given in words or as the exception of a reader, for a damaged file."""
    if isinstance(found, Exception):
        found, advice = f'a truncated or damaged file ({(str(found) or type(found).__name__).splitlines()[0]})', AGAIN
    raise InputError(f'--source {path}: expected {expected}, found {found}; {advice}')


def file_format(path, *allowed):
    """'HDF5', 'MATLAB v5' or 'NumPy', by the first bytes. Raises InputError if the file is none of those `allowed`."""
    with terminal.naming(f'--source {path}'), open(path, 'rb') as file:
        head = file.read(520)
    for name, signature in (('HDF5', b'\x89HDF\r\n\x1a\n'), ('MATLAB v5', b'MATLAB 5.0'), ('NumPy', b'\x93NUMPY')):
        if head.startswith(signature) or head.startswith(signature, 512):       # MATLAB v7.3 has 512 bytes before HDF5
            return name if name in allowed else refuse(path, ' or '.join(allowed), name)
    if head.startswith(b'version https://git-lfs'):
        refuse(path, 'a data file', 'a git-lfs pointer', 'fetch the file with git lfs pull, or remove it')
    if head.lstrip().startswith(b'<'):
        refuse(path, 'a data file', 'a web page', 'open it in a browser and download the file again')
    refuse(path, 'a data file', f'the bytes {head[:8]!r}', AGAIN)


@contextmanager
def open_hdf5(path):
    """An open HDF5 file (netCDF-4 and MATLAB v7.3 are HDF5, too). Raises InputError if it cannot be read."""
    file_format(path, 'HDF5')
    with terminal.naming(f'--source {path}', DAMAGED), h5py.File(path, 'r') as file:
        yield file


def find_array(group, key, *axes):
    """The HDF5 dataset `key`, which must be float with the axes of one of the strings `axes`, one letter an axis."""
    array = group.get(key)
    wanted = f"'{key}', float " + ' or '.join(f"({', '.join(letters)})" for letters in axes)
    if not isinstance(array, h5py.Dataset):
        refuse(group.file.filename, wanted, f"{' '.join(list(group)[:8]) or 'nothing'} in {group.name}")
    if array.dtype.kind != 'f' or array.ndim not in map(len, axes):
        refuse(group.file.filename, wanted, f'{array.dtype} {array.shape}')
    return array


class Source(NamedTuple):
    """A download: which trajectories it holds and how they are read."""
    description: str                # in words, with the axis order of the file
    shape: tuple                    # (T, *space, C) of one trajectory, in our order
    items: object                   # [(file, index)] of all trajectories in order; {split: list} if it is split already
    read: object                    # (open file, slice of indices, slice of frames) -> (n, t, *space, C)
    open: object = open_hdf5        # file -> context of the open file
    channels: tuple = ()            # their names, if not those of configs.py
    dt: float = None                # time between two frames, if not that of configs.py
    extra: object = lambda file, indices: {}            # (open file, slice of indices) -> {name: n values}
    about: dict = {}                # further attributes of `data`
    nan_to_num: bool = False        # replace values that are not finite, or else refuse them
