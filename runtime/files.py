"""Files that appear whole, errors that name them, and the lock that keeps a second process out of a folder."""
import fcntl
import json
import os
import re
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

from configs import InputError
from runtime.terminal import explain, warn

held = {}                                       # {folder: the open file} of the locks of this process
PART = re.compile(r'.+\.[0-9a-f]{8}\.part')     # the names of unfinished files of ours


@contextmanager
def naming(path, problem='cannot be read', *libraries):
    """Within the block, an error that `explain` explains becomes an InputError: the path, the problem, its cause."""
    try:
        yield
    except Exception as error:
        cause = explain(error, *libraries)
        if isinstance(error, (InputError, BrokenPipeError)) or not cause:
            raise
        raise InputError(f'{path}: {problem} ({cause})') from None


@contextmanager
def replacing(path):
    """Yield the path of a part to write, which replaces `path` at the end of the block, or is removed if that fails."""
    path = Path(path)
    still_ours(path.parent)
    part = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}.part')       # no other process's
    with naming(path, 'cannot be written'):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            with open(part, 'rb') as file:
                os.fsync(file.fileno())
            still_ours(path.parent)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def write(path, text):
    """Write a text file, which appears whole."""
    with replacing(path) as part:
        part.write_text(text, encoding='utf-8')


def append(path, text):
    """Add a text to the end of a file."""
    still_ours(Path(path).parent)
    with naming(path, 'cannot be written'), open(path, 'a', encoding='utf-8') as file:
        file.write(text)


def read_json(path, *keys):
    """The dict in a JSON file, empty if there is no such file. Raises InputError for one that lacks any of `keys`."""
    if not Path(path).exists():
        return {}
    with naming(path, 'it is not the file of that name that this project writes; move it away', 'json'):
        values = json.loads(Path(path).read_text(encoding='utf-8'))
    if not isinstance(values, dict) or not values.keys() >= {*keys}:
        raise InputError(f'{path}: it is not the file of that name that this project writes; move it away')
    return values


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
    """Keep other processes out of `folder` within the block, by a POSIX lock of rank 0 on the file <folder>/lock.

    Its end frees it, and processes that read data do not inherit it. wait: what another process with the lock is doing,
    such as 'generating', to wait for its end; else raises InputError.
    """
    if processes and processes.rank:
        yield
        return
    path = Path(folder) / 'lock'
    file = acquire(path, wait)
    while not os.fstat(file.fileno()).st_nlink:             # its owner, for whose end we waited, has removed it
        file = acquire(path, wait)
    key = os.path.abspath(folder)
    held[key] = file
    try:
        for part in Path(folder).iterdir():
            if PART.fullmatch(part.name):                   # a killed process has left it
                part.unlink(missing_ok=True)
        yield
    finally:
        with suppress(InputError, OSError):                 # if something was written, the folder stays
            still_ours(folder)
            path.unlink()
            Path(folder).rmdir()
        del held[key]
        file.close()


def still_ours(folder):
    """Raise InputError if this process has locked `folder`, and the lock is gone or another one's by now."""
    file = held.get(os.path.abspath(folder))
    if not file:
        return
    with suppress(OSError):
        if os.path.samestat(os.fstat(file.fileno()), os.stat(Path(folder) / 'lock')):
            return
    raise InputError(f'{folder}: the folder was removed or replaced while this process wrote into it, so it stops')


def acquire(path, wait):
    """The open file at `path` with the lock on it, as of `lock`."""
    with naming(path, 'cannot be written'):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, 'a')
    if os.fstat(file.fileno()).st_size:
        raise InputError(f'{path}: this file is not empty, so it is not a lock of ours; move it to another place')
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        if not wait:
            raise InputError(f'{path}: another process is writing into this folder; stop it or wait') from None
        print(f'{path.parent}: another process is {wait} this; waiting', flush=True)
        fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError as error:
        warn(f'{path}: there are no locks on this disk ({error}), so nothing keeps a second process out')
    return file
