"""HDF5 files where h5py says nothing: a disk that is full, and data that were never written, which are read as 0."""
import io
import math
import os
from array import array
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np

from configs import InputError
from runtime import files


class Disk(io.FileIO):
    """A new file that ignores all writes after the first that fails: else HDF5 would crash Python as it closes it.

    HDF5 hands over each value once, so the disk also knows which bytes were written.
    """
    failure = None

    def __init__(self, path):
        super().__init__(path, 'w+')
        self.starts = array('q')
        self.stops = array('q')

    def write(self, data):
        start = self.tell()
        rest = memoryview(data)
        while rest and not self.failure:
            try:
                rest = rest[super().write(rest):]
            except BaseException as error:                  # Ctrl-C as well, which HDF5 might swallow
                self.failure = error
                raise
        if self.stops and self.stops[-1] == start:
            self.stops[-1] += len(data)
        else:
            self.starts.append(start)
            self.stops.append(start + len(data))
        return len(data)

    def flush(self):
        """HDF5 calls this when it closes a file, which is then on the disk."""
        super().flush()
        if not self.failure:
            os.fsync(self.fileno())

    def truncate(self, size=None):
        return size if self.failure else super().truncate(size)

    def has_gap(self, first, end):
        """Whether a byte from `first` to `end` - 1 was never written."""
        starts, stops = np.array(self.starts), np.array(self.stops)
        order = np.argsort(starts)
        order = order[(stops[order] > first) & (starts[order] < end)]
        reached = np.maximum.accumulate([first, *stops[order]])
        return bool((np.append(starts[order], end) > reached).any())


@contextmanager
def replacing(path):
    """Yield a new h5py.File, which replaces `path` at the end of the block.

    Raises InputError if a part of its datasets was never written, unless the block has closed the file itself.
    """
    with files.replacing(path) as part:
        disk = Disk(part)                   # closed by hand: after a failure HDF5 uses it until the program ends
        try:
            with h5py.File(disk, 'w') as file:
                yield file
                if file:
                    file.visititems(lambda _, item: check_filled(item, disk, path))
        finally:
            if disk.failure:
                raise disk.failure
        disk.close()


def check_filled(item, disk, path):
    """Raise InputError if a part of an HDF5 dataset on a Disk was not written."""
    if isinstance(item, h5py.Dataset):
        check_written(item, path)
        first = item.id.get_offset()        # None: in chunks, which HDF5 writes as a whole
        if first is not None and disk.has_gap(first, first + item.id.get_storage_size()):
            raise unwritten(item, path)


def unwritten(item, path):
    return InputError(f'{path}: a part of {item.name} was never written; write or download the file again')


class Complete(h5py.File):
    """A file to read, whose datasets are checked when they are looked up by file[name]."""

    def __getitem__(self, name):
        item = super().__getitem__(name)
        if isinstance(item, h5py.Dataset):
            check_written(item, item.file.filename)
        return item


@contextmanager
def opened(path):
    """The open Complete file. Raises InputError, which names `path`, for what h5py cannot read within the block."""
    with files.naming(path), Complete(path, 'r') as file:
        yield file


def check_written(item, path):
    """Raise InputError if HDF5 would give zeros for a part of a dataset, which was never written or has no source."""
    whole = item.id.get_storage_size() >= (item.size or 0) * item.id.get_type().get_size()          # None: it is empty
    if item.is_virtual:
        sources = item.virtual_sources()
        whole = sum(source.vspace.get_select_npoints() for source in sources) >= item.size
        for name, key in {(source.file_name, source.dset_name) for source in sources}:
            place = path if name == '.' else Path(path).parent / name
            with files.naming(f'{path}: its source {name}'), Complete(place, 'r') as file:
                file[key]
    elif item.chunks:
        whole = item.id.get_num_chunks() >= math.prod(map(math.ceil, np.divide(item.shape, item.chunks)))
    if not whole:
        raise unwritten(item, path)
