"""Files that appear whole, places where nothing can be written, the lock of a folder."""
import errno
import os

import configs

import pytest
import torch

from helpers import locked_by_another
from runtime import distributed, files

CPU = torch.device('cpu')


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    path = tmp_path / 'a.json'
    path.write_text('old')
    for error, kind, words in ((OSError(errno.ENOSPC, ''), configs.InputError, r'a.json: cannot be written \(No space'),
                               (KeyError('broken'), KeyError, 'broken')):
        with pytest.raises(kind, match=words), files.replacing(path) as part:
            part.write_text('half')
            raise error
        assert [*tmp_path.iterdir()] == [path] and path.read_text() == 'old'
    files.write(path, 'new')
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == 'new'


def test_two_writers_of_one_file_do_not_touch_what_the_other_writes(tmp_path):
    with files.replacing(tmp_path / 'new/a') as one:
        one.write_text('one')
        with files.replacing(tmp_path / 'new/a') as other:
            other.write_text('other')
    assert (tmp_path / 'new/a').read_text() == 'one' and [*(tmp_path / 'new').iterdir()] == [tmp_path / 'new/a']


def test_the_lock_of_a_dead_process_is_free_and_a_new_folder_that_stays_empty_goes(tmp_path):
    alone, out = distributed.Processes(0, 1, CPU), tmp_path / 'a' / 'b'
    with locked_by_another(out) as process:
        with pytest.raises(configs.InputError, match=f'b/lock: process {process} on .* is writing into this folder'):
            with files.lock(out, alone):
                pass
        with files.lock(out, distributed.Processes(1, 2, CPU)):       # rank 0 holds it for all
            pass
    assert (out / 'lock').exists()
    with files.lock(out, alone):
        assert (out / 'lock').read_text().startswith(f'process {os.getpid()} on ')
    assert not list(out.iterdir())
    with files.lock(tmp_path / 'c' / 'd', alone):
        assert (tmp_path / 'c/d/lock').exists()
    assert not (tmp_path / 'c').exists()
    (tmp_path / 'file').touch()
    with pytest.raises(configs.InputError, match='file/lock: cannot be written'), files.lock(tmp_path / 'file', alone):
        pass
