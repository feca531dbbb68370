"""Files that appear whole, errors that name them, and the lock that keeps a second process out of a folder."""
import fcntl
import os
from contextlib import contextmanager
from pathlib import Path

from configs import InputError
from runtime.terminal import warn


@contextmanager
def naming(path, problem='cannot be read', errors=Exception):
    """Within the block, such an error becomes an InputError that names the path, the problem and its cause."""
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
    """Yield the path of a part to write, which replaces `path` at the end of the block, or is removed if that fails."""
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


def write_text(path, text):
    """Write a text file, which appears whole."""
    with replacing(path) as part:
        part.write_text(text, encoding='utf-8')


@contextmanager
def lock(folder, processes=None, wait=''):
    """Keep other processes out of `folder` within the block, by a lock of rank 0 on the file <folder>/lock.

    A block that fails and has written nothing leaves no new folder.
    wait: what another process with the lock does, such as 'generating', to wait for its end; else raises InputError.
    """
    if processes and processes.rank:
        yield
        return
    path = Path(folder, 'lock')
    new = not wait and not path.parent.exists()         # others that wait need the lock that they wait for
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'a') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise InputError(f'{path}: another process is writing into this folder; stop it or wait') from None
            print(f'{path.parent}: another process is {wait} this; waiting', flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            warn(f'{path}: there are no locks on this disk ({error}), so nothing keeps a second process out')
        try:
            yield
        except BaseException:
            if new and [*path.parent.iterdir()] == [path]:
                path.unlink()
                path.parent.rmdir()
            raise
