"""Files that appear whole, errors that name them, and the lock of a folder."""
import errno

import pytest

import configs
from runtime import files


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    path = tmp_path / 'a.json'
    path.write_text('old')
    full = OSError(errno.ENOSPC, 'No space left')
    for error, kind, words in ((full, configs.InputError, r'a.json: cannot be written \(No space left\)'),
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


@pytest.mark.parametrize('replaced', [False, True])
@pytest.mark.parametrize('what', ['.', 'lock'])
def test_who_has_locked_a_folder_that_is_moved_or_replaced_writes_nothing_more_and_leaves_it(what, replaced, tmp_path):
    out = tmp_path / 'out'
    with pytest.raises(KeyError, match='ours'), files.lock(out):        # the first error, not one of cleaning up
        (out / what).resolve().rename(tmp_path / 'elsewhere')
        if replaced:
            out.mkdir(exist_ok=True)
            (out / 'lock').touch()
        with pytest.raises(configs.InputError, match=f'^{out}: this folder or the lock in it was deleted, moved or'):
            files.write_text(out / 'a', 'of the second')
        raise KeyError('ours')
    assert (out / 'lock').exists() == replaced and out.exists() == (replaced or what == 'lock')
    files.write_text(out / 'a', 'without a lock')


def test_a_block_that_fails_leaves_no_new_folder(tmp_path):
    for out in (tmp_path, tmp_path / 'new'):
        with pytest.raises(KeyError, match='ours'), files.lock(out):
            raise KeyError('ours')
    assert [path.name for path in tmp_path.iterdir()] == ['lock']


@pytest.mark.parametrize('error', [NameError, AttributeError, IndexError, TypeError])
def test_a_mistake_of_ours_is_not_said_to_be_one_of_the_file(error):
    with pytest.raises(error), files.naming('a.h5'):
        raise error
    for kind in files.OF_FILES:
        with pytest.raises(configs.InputError, match='a.h5: cannot be read'), files.naming('a.h5'):
            raise kind
