"""HDF5 files with one line for what goes wrong: a disk that is full, data that were never written or are missing."""
import io
import math
from contextlib import contextmanager
from pathlib import Path

from configs import InputError

import h5py
import numpy as np

from runtime import files


class Disk(io.FileIO):
    """A new file that ignores all writes after the first that fails: else HDF5 would crash Python as it closes it."""
    failure = None

    def write(self, data):
        rest = memoryview(data)
        while rest and not self.failure:
            try:
                rest = rest[super().write(rest):]
            except BaseException as error:                  # Ctrl-C as well, which HDF5 might swallow
                self.failure = error
                raise
        return len(data)

    def truncate(self, size=None):
        return size if self.failure else super().truncate(size)


@contextmanager
def replacing(path):
    """Yield a new h5py.File, which replaces `path` at the end of the block."""
    with files.replacing(path) as part:
        disk = Disk(part, 'w+')             # closed by hand: after a failure HDF5 uses it until the program ends
        try:
            with h5py.File(disk, 'w') as file:
                yield file
        finally:
            if disk.failure:
                raise disk.failure
        disk.close()


@contextmanager
def opened(path):
    """The open HDF5 file and its `data`. Raises InputError if it cannot be read, or if `data` is missing."""
    with files.naming(path), h5py.File(path, 'r') as file:
        data = file.get('data')
        if not isinstance(data, h5py.Dataset):
            raise InputError(f"{path}: no dataset 'data', or a link to nothing; the file has {' '.join(file)}")
        yield file, data


def check_written(data):
    """Raise InputError if a part of an HDF5 dataset was never written or has no source, where HDF5 would give zeros."""
    path, whole = Path(data.file.filename), data.id.get_storage_size() >= data.nbytes
    if data.is_virtual:
        sources = data.virtual_sources()
        whole = sum(source.vspace.get_select_npoints() for source in sources) >= data.size
        for name, key in {(source.file_name, source.dset_name) for source in sources}:
            place = path if name == '.' else path.parent / name
            with files.naming(f"{path}: the source {name} of the virtual 'data'"), h5py.File(place, 'r') as file:
                check_written(file[key])
    elif data.chunks:
        whole = data.id.get_num_chunks() >= math.prod(map(math.ceil, np.divide(data.shape, data.chunks)))
    if not whole:
        raise InputError(f'{path}: a part of {data.name} was never written; write the file again')
