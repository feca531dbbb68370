"""Files that appear whole, errors that name them, the lock of a folder."""
import errno
import subprocess
import sys

import pytest
import torch

import configs
from conftest import ROOT
from helpers import locked_by_another
from runtime import distributed, files

ALONE = distributed.Processes(0, 1, torch.device('cpu'))


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    path = tmp_path / 'a.json'
    path.write_text('old')
    for error, kind, words in ((OSError(errno.ENOSPC, ''), configs.InputError, r'a.json: cannot be written \(No space'),
                               (KeyError('broken'), KeyError, 'broken')):
        with pytest.raises(kind, match=words), files.replacing(path) as part:
            part.write_text('half')
            raise error
        assert [*tmp_path.iterdir()] == [path] and path.read_text() == 'old'
    part.write_text('of a process that was killed')
    files.write(path, 'new')
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == 'new'


def test_the_lock_of_a_dead_process_is_free(tmp_path):
    out = tmp_path / 'a' / 'b'
    with locked_by_another(out):
        with pytest.raises(configs.InputError, match='b/lock: another process is writing into this folder'):
            with files.lock(out, ALONE):
                pass
        with files.lock(out, ALONE._replace(rank=1)):       # rank 0 holds it for all
            pass
    with files.lock(out, ALONE):
        pass


def test_one_process_after_the_other_has_the_lock(tmp_path):
    """Each adds one to a number several times, which takes long enough for the others to wait for it."""
    (tmp_path / 'number').write_text('0')
    code = """if True:
        import pathlib, sys, time
        from runtime import files
        number = pathlib.Path(sys.argv[1], 'number')
        print('ready', flush=True)
        sys.stdin.readline()
        for _ in range(5):
            with files.lock(sys.argv[1], wait='counting'):
                value = int(number.read_text())
                time.sleep(0.05)
                number.write_text(str(value + 1))"""
    workers = [subprocess.Popen([sys.executable, '-c', code, tmp_path], cwd=ROOT, text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    for worker in workers:
        assert worker.stdout.readline() == 'ready\n'
    for worker in workers:
        worker.stdin.write('go\n')
        worker.stdin.flush()
    said = ''.join(worker.communicate()[0] for worker in workers)
    assert 'another process is counting this; waiting' in said and not any(worker.returncode for worker in workers)
    assert (tmp_path / 'number').read_text() == '15'
