"""Files that appear whole, errors that name them."""
import errno

import pytest

import configs
from runtime import files


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
    files.write_text(path, 'new')
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == 'new'
