"""Statistics of fields by hand, and what --check finds in data with one defect."""
import h5py
import numpy as np
import pytest

import data
from sources import prepare


def flawless(N, seed):
    """Fields u, density, mask (N, 12, 4, 4, 3) without a defect."""
    u = np.random.default_rng(seed).standard_normal((N, 12, 4, 4, 3)).astype(np.float32)
    u[..., 1], u[..., 2] = 2 + np.sin(u[..., 1]), np.eye(4)
    return u


def test_check_prints_hand_computed_statistics_and_finds_nothing_wrong(tmp_path, call):
    u = np.stack([np.full((12, 4, 4), 2.0) * 1.25 ** np.arange(12)[:, None, None]] * 3)[..., None]
    data.write(tmp_path / 'own', *(u * np.reshape(factor, (3, 1, 1, 1, 1)) for factor in ([1, 2, 3], [4, 5, 6])))
    code, _, printed = call(['own', '--check', '--data', tmp_path], prepare)
    assert code == 0 and 'nothing is wrong' in printed, printed
    low, high, mean, std, change = map(float, printed.splitlines()[2].split()[1:])
    values = u * np.reshape([1, 2, 3], (3, 1, 1, 1, 1))
    expected = 2, values.max(), values.mean(), values.std(), 0.2
    np.testing.assert_allclose((low, high, mean, std, change), expected, rtol=1e-3)


@pytest.mark.parametrize('how, words', [
    ('nan', 'train.h5: 1 trajectories have values that are not finite in float32; the first is 2'),
    ('tail', 'train.h5: 2 of 5 trajectories end in equal frames, up to 5 of them'),
    ('copy', 'train.h5: 1 trajectories are copies of an earlier one'),
    ('leak', 'test.h5: 1 of 3 trajectories are in train.h5 too'),
    ('zero', 'train.h5: u is zero throughout in 2 of 5 trajectories')])
def test_check_reports(how, words, tmp_path, call):
    train, test = flawless(5, 0), flawless(3, 1)
    if how == 'zero':
        train[[1, 3], ..., 0] = 0
    elif how == 'nan':
        train[2, 3, 1, 1, 0] = np.inf
    elif how == 'tail':
        train[1, -5:], train[3, -2:], train[0, 2:7] = train[1, -5], train[3, -2], train[0, 2]   # 0 moves on later
    elif how == 'copy':
        train[4] = train[1]
    else:
        test[0], test[1, 0] = train[3], train[0, 0]         # equal first frames alone are no copies
    for split, values in (('train', train), ('test', test)):
        with data.writer(tmp_path / 'own' / f'{split}.h5', values.shape, channels=('u', 'density', 'mask'),
                         static=('mask',)) as file:
            file['data'][:] = values
    code, _, printed = call(['own', '--check', '--data', tmp_path], prepare)
    lines = [line for line in printed.splitlines() if line.startswith('WRONG ')]
    assert code == 1 and len(lines) == 1 and words in lines[0], printed


@pytest.mark.parametrize('factor, channels, words', [
    (1e-300, slice(None), ['u is too small for float32 in 5 of 5 trajectories, where it is read as zero; rescale it',
                           'density is too small for float32 in 5 of 5', 'mask is too small for float32 in 5 of 5']),
    (1e-60, 0, ['u is too small for float32 in 5 of 5']), (1e-60, 2, ['mask is too small for float32 in 5 of 5']),
    (1e300, 1, ['5 trajectories have values that are not finite in float32; the first is 0'])])
def test_check_reports_fields_that_float32_does_not_hold(tmp_path, call, factor, channels, words):
    train = flawless(5, 0).astype(float)
    train[..., channels] *= factor
    (tmp_path / 'own').mkdir()
    for split, values in (('train', train), ('test', flawless(3, 1))):
        with h5py.File(tmp_path / f'own/{split}.h5', 'w') as file:
            file['data'] = values
            file['data'].attrs.update(channels=['u', 'density', 'mask'], static=['mask'])
    code, _, printed = call(['own', '--check', '--data', tmp_path], prepare)
    lines = [line for line in printed.splitlines() if line.startswith('WRONG ') and 'end in equal' not in line]
    assert code == 1 and len(lines) == len(words), printed
    for line, word in zip(lines, words):
        assert line.startswith(f'WRONG {tmp_path}/own/train.h5: {word}')


def test_damaged_chunks_are_one_line_of_check_that_names_the_file(tmp_path, refused):
    data.write(tmp_path / 'own', flawless(3, 0), flawless(3, 1))
    path = tmp_path / 'own/train.h5'
    with h5py.File(path, 'w') as file:
        stored = file.create_dataset('data', data=flawless(3, 0), compression='gzip')
        place = stored.id.get_chunk_info(0).byte_offset
    content = path.read_bytes()
    path.write_bytes(content[:place] + bytes(40) + content[place + 40:])
    refused(['own', '--check', '--data', tmp_path], f'error: {path}: cannot be read (', prepare)
