"""Files that appear whole, errors that name them, and the lock that keeps a second process out of a folder."""
import fcntl
import os
from contextlib import contextmanager, suppress
from pathlib import Path

from configs import InputError
from runtime.terminal import warn


@contextmanager
def naming(path, problem='cannot be read', errors=Exception):
    """Within the block, an error becomes an InputError that names the path, the problem and its cause.

    errors: which; by default all, since libraries raise errors of all kinds for damaged files.
    """
    try:
        yield
    except InputError:
        raise
    except errors as error:
        number = getattr(error, 'errno', None)
        cause = os.strerror(number) if number else ' '.join(str(error).split()) or repr(error)
        raise InputError(f'{path}: {problem} ({cause})') from error


@contextmanager
def replacing(path):
    """Yield the path of a part to write, which replaces `path` at the end of the block, or is removed if that fails.

    What a killed process has left of a part, the next one writes over.
    """
    path = Path(path)
    part = path.with_name(f'{path.name}.part')
    with naming(path, 'cannot be written', OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            with open(part, 'rb') as file:
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def write(path, text):
    """Write a text file, which appears whole."""
    with replacing(path) as part:
        part.write_text(text, encoding='utf-8')


def append(path, text):
    """Add a text to the end of a file."""
    with naming(path, 'cannot be written', OSError), open(path, 'a', encoding='utf-8') as file:
        file.write(text)


def writable(flag, path, endings=()):
    """Raise InputError unless the folder `path`, or with `endings` a file of that name, can be made and written."""
    path = Path(path)
    if endings and (path.suffix not in endings or path.is_dir()):
        raise InputError(f'--{flag} {path}: expected a file whose name ends in {", ".join(endings)}')
    folders = path.parents if endings else (path, *path.parents)
    lowest = next(folder for folder in folders if os.path.lexists(folder))
    if not os.path.isdir(lowest) or not os.access(lowest, os.W_OK):
        raise InputError(f'--{flag} {path}: {lowest} is not a folder that can be written')


@contextmanager
def lock(folder, processes=None, wait=''):
    """Keep other processes out of `folder` within the block, by a lock of rank 0 on the file <folder>/lock.

    The system frees it when the process ends, however it ends. wait: what another process with the lock is doing, such
    as 'generating', to wait for its end; else raises InputError.
    """
    if processes and processes.rank:
        yield
        return
    path = Path(folder) / 'lock'
    file = acquire(path, wait)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()                 # which fails unless nothing was written
        file.close()


def acquire(path, wait):
    """The open file at `path` with the lock on it, as of `lock`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, 'a')
    if os.fstat(file.fileno()).st_size:
        raise InputError(f'{path}: this file is not empty, so it is not a lock of ours; move it to another place')
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise InputError(f'{path}: another process is writing into this folder; stop it or wait') from None
        print(f'{path.parent}: another process is {wait} this; waiting', flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        warn(f'{path}: there are no locks on this disk ({error}), so nothing keeps a second process out')
    # its last owner may have removed the file since it was opened here
    return file if os.fstat(file.fileno()).st_nlink else acquire(path, wait)
