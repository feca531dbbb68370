"""Files that appear whole, errors that name them, and the lock of a folder."""
import errno
import shutil

import pytest

import configs
from runtime import files


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    path = tmp_path / 'a.json'
    path.write_text('old')
    for error, kind, words in ((OSError(errno.ENOSPC, 'No space left'), configs.InputError, r'a.json: cannot be written \(No space'),
                               (KeyError('broken'), KeyError, 'broken')):
        with pytest.raises(kind, match=words), files.replacing(path) as part:
            part.write_text('half')
            raise error
        assert [*tmp_path.iterdir()] == [path] and path.read_text() == 'old'


def test_two_writers_of_one_file_and_a_part_of_somebody_else_do_not_touch_each_other(tmp_path):
    path, foreign = tmp_path / 'train.h5', tmp_path / 'train.h5.part'
    foreign.write_text('of a browser')
    with files.replacing(path) as first:
        first.write_text('first')
        with pytest.raises(KeyError), files.replacing(path) as second:
            second.write_text('second')
            raise KeyError
    assert path.read_text() == 'first' and foreign.read_text() == 'of a browser' and len([*tmp_path.iterdir()]) == 2
    first.write_text('of a process that was killed')
    with files.lock(tmp_path):
        assert not first.exists() and foreign.exists()


def test_a_link_is_followed_and_what_is_no_file_is_refused(tmp_path):
    (tmp_path / 'link').symlink_to(tmp_path / 'there')
    files.write_text(tmp_path / 'link', 'new')
    assert (tmp_path / 'link').is_symlink() and (tmp_path / 'there').read_text() == 'new'
    with pytest.raises(configs.InputError, match='cannot be written .Is a directory'):
        files.write_text(tmp_path, 'new')


@pytest.mark.parametrize('change', ['gone', 'moved', 'replaced', 'another lock'])
def test_who_has_locked_a_folder_that_is_gone_or_moved_writes_nothing_more(change, tmp_path):
    out = tmp_path / 'out'
    with files.lock(out):
        files.write_text(out / 'a', 'of the first')
        if change == 'another lock':
            (out / 'lock').unlink()
        elif change == 'moved':
            out.rename(tmp_path / 'elsewhere')
        else:
            shutil.rmtree(out)
        if change in ('replaced', 'another lock'):
            out.mkdir(exist_ok=True)
            (out / 'lock').touch()
        with pytest.raises(configs.InputError, match=f'^{out}: this folder or the lock in it was deleted, moved or'):
            files.write_text(out / 'a', 'of the second')
    assert out.exists() == (change in ('replaced', 'another lock'))
    files.write_text(out / 'a', 'without a lock')


def test_who_ends_in_a_folder_that_another_process_has_now_leaves_it_its_lock(tmp_path):
    out = tmp_path / 'out'
    with pytest.raises(KeyError, match='ours'), files.lock(out):        # the first error, not one of cleaning up
        shutil.rmtree(out)
        out.mkdir()
        (out / 'lock').touch()
        raise KeyError('ours')
    assert (out / 'lock').exists()
    (out / 'lock').unlink()
    out.rmdir()
    with pytest.raises(KeyError, match='ours'), files.lock(out):
        raise KeyError('ours')
    assert not out.exists(), 'what one cleans up is one\'s own'


@pytest.mark.parametrize('error', [NameError, AttributeError, IndexError, TypeError])
def test_a_mistake_of_ours_is_not_said_to_be_one_of_the_file(error):
    with pytest.raises(error), files.naming('a.h5'):
        raise error
    for kind in files.OF_FILES:
        with pytest.raises(configs.InputError, match='a.h5: cannot be read'), files.naming('a.h5'):
            raise kind
