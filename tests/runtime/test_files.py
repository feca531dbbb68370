"""Files that appear whole, places where nothing can be written, the lock of a folder."""
import errno

import pytest
import torch

import configs
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
    files.write(path, 'new')
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == 'new'


def test_two_writers_of_one_file_do_not_touch_what_the_other_writes(tmp_path):
    with files.replacing(tmp_path / 'new/a') as one:
        one.write_text('one')
        with files.replacing(tmp_path / 'new/a') as other:
            other.write_text('other')
    assert (tmp_path / 'new/a').read_text() == 'one' and [*(tmp_path / 'new').iterdir()] == [tmp_path / 'new/a']


def test_the_lock_of_a_dead_process_is_free_and_a_folder_that_stays_empty_goes(tmp_path):
    out = tmp_path / 'a' / 'b'
    with locked_by_another(out):
        with pytest.raises(configs.InputError, match='b/lock: another process is writing into this folder'):
            with files.lock(out, ALONE):
                pass
        with files.lock(out, ALONE._replace(rank=1)):       # rank 0 holds it for all
            pass
    assert (out / 'lock').exists()
    with files.lock(out, ALONE):
        assert (out / 'lock').exists()
    assert not out.exists()
    (tmp_path / 'file').touch()
    with pytest.raises(configs.InputError, match='file/lock: cannot be written'), files.lock(tmp_path / 'file', ALONE):
        pass


def test_only_unfinished_files_of_our_own_are_removed_and_a_foreign_lock_is_refused(tmp_path):
    foreign = ['film.mp4.part', 'train.h5.part', 'data.part', '.part', 'x.h5.0123abcd.part.txt', 'x.h5.0123ABCD.part']
    for name in (*foreign, 'train.h5.0123abcd.part'):
        (tmp_path / name).write_text('x')
    with files.lock(tmp_path, ALONE):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(foreign)
    (tmp_path / 'lock').write_text('of another program')
    with pytest.raises(configs.InputError, match='lock: this file is not empty'), files.lock(tmp_path, ALONE):
        pass
    assert (tmp_path / 'lock').read_text() == 'of another program'
