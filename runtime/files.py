"""Files that appear whole, errors that name them, and the lock that keeps a second process out of a folder."""
import os
import socket
import tempfile
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

from configs import InputError

from runtime.terminal import explain, warn


@contextmanager
def naming(path, problem='cannot be read', *libraries):
    """Within the block, an error that `explain` explains becomes an InputError: the path, the problem, its cause."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (InputError, BrokenPipeError)) or not (cause := explain(error, *libraries)):
            raise
        raise InputError(f'{path}: {problem} ({cause})') from None


@contextmanager
def tidy(folder):
    """At the end of the block, remove those of `folder` and its parents that are new and still empty."""
    parents = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        yield
    finally:
        for parent in parents:
            with suppress(OSError):         # it holds something, or was never made
                parent.rmdir()


@contextmanager
def replacing(path):
    """Yield the path of a part to write, which replaces `path` at the end of the block, or is removed if that fails."""
    path = Path(path)
    part = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}.part')       # no other process's
    with naming(path, 'cannot be written'), tidy(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            with open(part, 'rb') as file:
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def write(path, text):
    with replacing(path) as part:
        part.write_text(text)


def writable(flag, path, endings=()):
    """Raise InputError unless the folder `path`, or with `endings` a file of that name, can be written; try it out."""
    path, folder = Path(path), Path(path).parent if endings else Path(path)
    if endings and (path.suffix not in endings or path.is_dir()):
        raise InputError(f'--{flag} {path}: expected a file whose name ends in {", ".join(endings)}')
    lowest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not os.path.isdir(lowest):
        raise InputError(f'--{flag} {path}: {lowest} is not a folder')
    with naming(f'--{flag} {path}', 'nothing can be written there'), tidy(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.NamedTemporaryFile(dir=folder, prefix=path.name if endings else '').close()


@contextmanager
def lock(folder, processes=None, wait=''):
    """Keep other processes out of `folder` within the block, by a POSIX lock of rank 0 on the file <folder>/lock.

    The kernel frees it at the end of the process, and the processes that read data do not inherit it. wait: what the
    other process is doing, such as 'generating', to wait for its end. Without it, raises InputError.
    """
    if processes and processes.rank:
        yield
        return
    path = Path(folder) / 'lock'
    with tidy(path.parent), _locked(path, wait):
        for part in path.parent.glob('*.part'):         # a killed process has left them
            part.unlink(missing_ok=True)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path, wait):
    """The open and locked file `path`, which holds the name of this process."""
    while True:
        with naming(path, 'cannot be written'):
            path.parent.mkdir(parents=True, exist_ok=True)      # the process before this one may have removed it
            file = open(path, 'a+')
        try:
            import fcntl  # here, because Windows lacks it
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            owner = file.read() or 'another process'
            if not wait:
                raise InputError(f'{path}: {owner} is writing into this folder; wait for it, stop it or choose another '
                                 f'--out') from None
            print(f'{path.parent}: {owner} is {wait} this; waiting', flush=True)
            fcntl.lockf(file, fcntl.LOCK_EX)
        except (ImportError, OSError) as error:
            warn(f'{path}: there are no locks on this disk ({error}), so nothing keeps a second process out')
        if os.fstat(file.fileno()).st_nlink:                    # else its owner has just removed it
            break
        file.close()
    file.truncate(0)
    with suppress(OSError):                 # the first file of the block reports a full disk
        os.write(file.fileno(), f'process {os.getpid()} on {socket.gethostname()}'.encode())
    return file
