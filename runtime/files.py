"""Files that appear whole, errors that name them, and the lock that keeps a second process out of a
folder.
"""
import fcntl
import os
import secrets
from contextlib import contextmanager, suppress
from pathlib import Path

from configs import InputError
from runtime.terminal import warn

PART = '.{}.part'                   # the name of a part, with 16 random digits
HELD = {}                           # {folder: the file of its lock}, of this process
OF_FILES = OSError, KeyError, ValueError                # what reading a damaged file raises


@contextmanager
def naming(path, problem='cannot be read', errors=OF_FILES):
    """Within the block, such an error becomes an InputError that names the path."""
    try:
        yield
    except InputError:
        raise
    except errors as error:
        cause = getattr(error, 'strerror', None) or str(error) or repr(error)
        raise InputError(f'{path}: {problem} ({" ".join(cause.split())})') from error


@contextmanager
def replacing(path):
    """Yield the path of a part to write, which replaces `path` at the end of the block, or is
    removed if that fails.

    The part has a name of its own beside `path`, or beside the file to which that links.
    """
    with naming(path, 'cannot be written', OSError):
        require_held(Path(path).parent)     # or the folder would be made anew
        place = Path(os.path.realpath(path))
        part = place.with_name(PART.format(secrets.token_hex(8)))
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            with open(part, 'rb') as file:
                os.fsync(file.fileno())
            require_held(Path(path).parent)
            os.replace(part, place)
        finally:
            part.unlink(missing_ok=True)


def write_text(path, text):
    """Write a text file, which appears whole."""
    with replacing(path) as part:
        part.write_text(text, encoding='utf-8')


def require_new(path):
    """Raise InputError for a file that is there or cannot be written, before the work for it."""
    if Path(path).exists():
        raise InputError(f'{path}: this file is there; choose another name')
    with naming(path, 'cannot be written', OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        open(path, 'x').close()
        os.unlink(path)


def require_held(folder):
    """Raise InputError where the lock in a folder is no longer the one that this process took."""
    held = HELD.get(os.path.abspath(folder))
    path = Path(folder, 'lock')
    if held and not (path.exists() and os.path.samestat(os.fstat(held.fileno()), path.stat())):
        raise InputError(f'{folder}: this folder or the lock in it was deleted, moved or replaced '
                         f'by another process; so this one, which wrote into it, ends')


@contextmanager
def lock(folder, processes=None, wait=''):
    """Keep other processes out of `folder` within the block, by a lock of rank 0 on <folder>/lock.

    A process that has the lock already goes on. Where a block fails and has written nothing, a
    folder that is new goes, without `wait`.
    wait: what another process with the lock does, such as 'generating', to wait for its end; else
    raises InputError.
    """
    key = os.path.abspath(folder)
    if processes and processes.rank or key in HELD:
        yield
        return
    path = Path(folder, 'lock')
    new = not wait and not path.parent.exists()  # others that wait need the lock that they wait for
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'a') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise InputError(f'{path}: another process is writing into this folder; stop it '
                                 f'or wait') from None
            print(f'{path.parent}: another process is {wait} this; waiting', flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            warn(f'{path}: no lock here keeps a second process out ({error})')
        else:
            for part in path.parent.glob(PART.format('[0-9a-f]' * 16)):
                part.unlink(missing_ok=True)               # of a killed process, which had the lock
        HELD[key] = file
        try:
            yield
        except BaseException:
            with suppress(InputError):                     # another process has this folder now
                require_held(folder)
                if new and [*path.parent.iterdir()] == [path]:
                    path.unlink()
                    path.parent.rmdir()
            raise
        finally:
            del HELD[key]
