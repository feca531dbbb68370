"""The folder of a run: what it survives, where it goes on, and that nothing is replaced by accident."""
import resource
import shutil
import signal
import time
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import configs
import evaluate
import train
from helpers import at_step, command, locked_by_another, log, same, signalled, travelling, write, write_two
from runtime import distributed, runs


@pytest.fixture
def folder(tmp_path):
    return write_two(tmp_path / 'data')


def assert_equal(whole, broken):
    """The last checkpoints of two runs, and the numbers in their logs, are equal bit for bit."""
    a, b = (torch.load(out / 'last.pt', weights_only=True) for out in (whole, broken))
    for key in ('model', 'optimizer', 'step', 'epoch', 'skipped', 'best', 'scored', 'rng', 'mixture'):
        assert same(a[key], b[key]), key
    for key in ('step', 'epoch', 'loss', 'lr', 'grad_norm'):
        assert [line[key] for line in log(whole)] == [line[key] for line in log(broken)], key


def interrupt(flags, step, number):
    """A run gets a signal when it is about to take its step number `step`; the exit code."""
    return signalled(number, 'train', 'one_cycle', f'args[0] == {step - 1}', flags)[0]


@pytest.mark.slow
def test_killed_and_resumed_runs_equal_the_uninterrupted_one_bit_for_bit(folder, tmp_path, call):
    steps = dict(steps=72, save_every=6)
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    assert call(command(folder, whole, **steps)[1:])[0] == 0
    assert interrupt(command(folder, broken, **steps)[1:], 16, signal.SIGKILL) == -signal.SIGKILL
    assert torch.load(broken / 'last.pt', weights_only=True)['step'] == 12 and len(log(broken)) == 14
    with open(broken / 'log.jsonl', 'a') as file:
        file.write('{"step": 71, "lo')                  # a crash in the middle of a line
    resume = ['--resume', broken / 'last.pt']
    assert interrupt(resume, 33, signal.SIGTERM) == 128 + signal.SIGTERM
    second = torch.load(broken / 'last.pt', weights_only=True)['step']
    assert second == len(log(broken)) == 34, 'SIGTERM must save after one more step'
    assert call(resume)[0] == 0 and not list(broken.glob('*.part'))
    assert_equal(whole, broken)


def test_resume_takes_another_form_and_refuses_data_of_another_shape(folder, tmp_path, call, refused):
    out = str(tmp_path / 'out')
    assert call(command(folder, out, steps=4)[1:])[0] == 0
    assert train.parse(['--resume', out, '--form', 'paper'])[2].form == 'paper'
    assert train.parse(['--resume', '--out', out])[2].out == out
    write(folder, 'swe_pdb', travelling(5, 7, 12, 1, 0.7), 'train')
    refused(['--resume', out], 'the run was trained on', lines=None)


@pytest.mark.parametrize('script', ['train', 'finetune'])
def test_resume_and_scores_notice_data_of_the_same_shape_that_have_changed(
        folder, pretrained, tmp_path, script, call, refused):
    script = import_module(script)
    out = tmp_path / 'out'
    flags = command(folder, out, steps=2)[1:]
    if script is not train:
        flags = ['--checkpoint', pretrained, '--dataset', 'swe_pdb', '--data', folder, '--out', out, '--steps', '2',
                 '--device', 'cpu']
    assert call(flags, script)[0] == 0
    scores = ['--checkpoint', out, '--device', 'cpu']
    code, error, _ = call(scores, evaluate)
    assert (code, error) == (0, '')
    assert call(['--resume', out], script)[0] == 0, 'the run was finished'
    write(folder, 'swe_pdb', 2 * travelling(6, 7, 12, 1, 0.7), 'train')
    assert call(scores, evaluate)[:2] == (0, ''), 'the tests are as they were'
    words = f'--resume: the data in {folder} are not those of the run: the checksum of swe_pdb/train.h5 was '
    error, _ = refused(['--resume', out], words, script, lines=None)
    assert error.rstrip().endswith('restore them, or start another run from its weights with --init_from')
    write(folder, 'swe_pdb', travelling(3, 7, 12, 1, 0.7), 'test', channels=['h'])
    code, error, _ = call(scores, evaluate)
    assert code == 0 and error == (f'warning: {out}/last.pt: the data in {folder} have changed since it was trained: '
                                   f"the channels of swe_pdb/test.h5 was ['0'], is ['h']\n")


def test_the_same_command_with_resume_auto_starts_continues_and_then_has_nothing_to_do(
        folder, tmp_path, monkeypatch, call, refused):
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    assert call(command(folder, whole, '--log_every', 3, steps=8)[1:])[0] == 0       # a stop falls between two lines
    same_command = command(folder, broken, '--resume', 'auto', '--log_every', 3, steps=8)[1:]
    # a signal counts one step later, or at once where a checkpoint follows the step
    for step, end, number in ((2, 3, signal.SIGINT), (4, 4, signal.SIGTERM), (6, 7, signal.SIGTERM)):
        with monkeypatch.context() as patch:
            at_step(step, lambda number=number: signal.raise_signal(number), patch)
            code, error, printed = call(same_command)
        assert code == 128 + number and f'stopped by {number.name} at step {end}; ' in printed, error
    usual = configs.recipe('nano').lr
    for flags, words in ((['--lr', '0.5'], f'--lr 0.5: the run to resume has {usual}'),
                         (['--size', 'tiny'], '--lr 0.001: the run to resume has 0.01')):
        refused([*same_command, *flags], words, lines=None)
    code, error, _ = call(same_command)
    assert code == 0, error
    assert_equal(whole, broken)
    files = {path: path.stat().st_mtime_ns for path in broken.iterdir()}
    shutil.rmtree(folder)                              # a finished run needs no data
    code, error, printed = call(same_command)
    assert (code, error) == (0, '')
    assert printed == f'the run in {broken} is finished, at step 8; there is nothing left to do\n'
    assert files == {path: path.stat().st_mtime_ns for path in broken.iterdir()}


def contents(out):
    """The bytes of all files in a folder."""
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_a_run_is_replaced_only_with_overwrite_and_only_when_the_new_one_starts(folder, tmp_path, call, refused):
    out = tmp_path / 'out'
    assert call(command(folder, out, '--keep', steps=8)[1:])[0] == 0
    before, again = contents(out), command(folder, out, '--lr', '0.1', steps=4)[1:]
    refused(again, f'continue it with --resume {out}, choose another --out, or replace it with --over')
    values = travelling(3, 9, 16, 3, 0.4)
    good = (folder / 'own/test.h5').read_bytes()
    values[2, 5, 3, 3, 0] = np.inf
    write(folder, 'own', values, 'test', channels=('u', 'v', 'c'), static=('c',), t_test=4)
    for flags, words in ((['--datasets', 'none'], '--datasets none: no '),
                         ([], 'own/test.h5: trajectory 2, frames 0..6: non-finite values')):
        refused([*again, '--overwrite', *flags], words)
    assert contents(out) == before
    (folder / 'own/test.h5').write_bytes(good)
    assert call([*again, '--overwrite'])[0] == 0
    assert sorted(contents(out)) == ['best.pt', 'config.json', 'last.pt', 'log.jsonl', 'step4.pt'][:4]
    assert len(log(out)) == 4 and torch.load(out / 'best.pt', weights_only=True)['config']['train']['lr'] == 0.1
    for more in (), ('--resume', 'auto'):               # a run that was killed before its first checkpoint starts again
        for name in ('last.pt', 'best.pt'):
            (out / name).unlink()
        assert call([*again, *more])[0] == 0 and (out / 'last.pt').exists()
    (out / 'last.pt').unlink()
    assert 'holds a run (best.pt)' in call([*again, '--resume', 'auto'])[1]


def test_the_best_of_a_run_belongs_to_the_split_on_which_it_was_measured(folder, tmp_path, call):
    out = tmp_path / 'out'
    with pytest.MonkeyPatch.context() as patch:
        at_step(6, lambda: signal.raise_signal(signal.SIGTERM), patch)
        assert call(command(folder, out, steps=8)[1:])[0] == 143
    first = torch.load(out / 'best.pt', weights_only=True)
    assert first['chosen_on'] == {'own': 'test', 'swe_pdb': 'test'}
    falling = travelling(3, 7, 12, 1, 0.7) * 0.01 ** np.arange(7).reshape(7, 1, 1, 1)             # hard to predict
    write(folder, 'swe_pdb', falling, 'valid')
    code, _, printed = call(['--resume', out])
    best = torch.load(out / 'best.pt', weights_only=True)
    assert code == 0 and 'chosen on the validation split, and of own on these tests' in printed
    assert best['chosen_on'] == {'own': 'test', 'swe_pdb': 'valid'} and best['valid'] > 2 * first['valid']
    assert best['step'] == 8 and log(out)[-1]['valid'] == best['valid']


def test_an_older_run_goes_when_the_new_one_has_a_checkpoint_and_not_before(folder, tmp_path, call, refused):
    out, again = tmp_path / 'out', command(folder, tmp_path / 'out', '--overwrite', steps=12)[1:]
    assert call(command(folder, out, '--keep', steps=8)[1:])[0] == 0
    before = contents(out)
    good = (folder / 'own/train.h5').read_bytes()
    write(folder, 'own', travelling(6, 9, 16, 3, 0.4, scale=1e30), 'train')             # every step is skipped
    refused([*again, '--datasets', 'own', '--save_every', 50], 'stopped at step 10: ', lines=0)
    assert contents(out) == before
    (folder / 'own/train.h5').write_bytes(good)
    with pytest.MonkeyPatch.context() as patch:
        at_step(4, lambda: before.update(at_the_fourth_step=contents(out)), patch)
        patch.setattr(runs.Record, 'score', lambda *_: signal.raise_signal(signal.SIGTERM))      # after step 4
        assert call(again)[0] == 143
    early = before.pop('at_the_fourth_step')
    assert early.pop('lock') == b'' and early == before
    assert sorted(contents(out)) == ['config.json', 'last.pt', 'log.jsonl']
    assert [line['step'] for line in log(out)] == [1, 2, 3, 4, 5, 6], 'the lines from before the checkpoint too'
    wall = [line['wall_s'] for line in log(out)]
    assert 0 < wall[0] and all(one < other for one, other in zip(wall, wall[1:])), 'the time goes on where it was'


@pytest.mark.parametrize('name, text, words', [
    ('step4.pt', 'weights', 'the folder holds a run (step4.pt); continue it with --resume'),
    ('config.json', '{"architectures": ["Bert"]}', 'config.json: it is not the file of that name that this project'),
    ('config.json', '{"model": {', 'config.json: it is not the file of that name that this project writes; move it'),
    ('log.jsonl', '{"epoch": 1}\n', 'log.jsonl: line 1 is not of the log of a run; move the file away'),
    ('log.jsonl', 'started\n', 'log.jsonl: line 1 is not of the log of a run; move the file away'),
    ('lock', 'of another program', 'lock: this file is not empty, so it is not a lock of ours'),
    ('film.part', 'half a download', ''), ('stepwise.pt', 'of another program', '')])
def test_files_that_are_of_no_run_of_ours_stay(name, text, words, folder, tmp_path, call, refused):
    out = tmp_path / 'out'
    out.mkdir()
    (out / name).write_text(text)
    flags = command(folder, out, steps=1)[1:]
    if words:
        refused(flags, words)
        assert contents(out) == {name: text.encode()}
    else:
        assert call(flags)[0] == 0 and (out / name).read_text() == text
    if name == 'config.json':
        refused([*flags, '--overwrite'], words)


def test_a_report_replaces_only_a_report(pretrained, tmp_path, call, refused):
    shutil.copy(pretrained / 'config.json', tmp_path / 'config.json')
    flags = ['--checkpoint', pretrained, '--json', tmp_path / 'config.json']
    refused(flags, 'config.json: it is not the file of that name', evaluate)
    assert (tmp_path / 'config.json').read_bytes() == (pretrained / 'config.json').read_bytes()
    for _ in range(2):
        assert call(['--checkpoint', pretrained, '--json', tmp_path / 'scores.json'], evaluate)[0] == 0


def change(saved, *keys, to=None):
    """Replace the value under the keys of nested dicts, or remove it."""
    for key in keys[:-1]:
        saved = saved[key]
    if to is None:
        del saved[keys[-1]]
    else:
        saved[keys[-1]] = to


@pytest.mark.parametrize('keys, to, words', [
    (['rng'], None, "its 'rng' is missing or not a Tensor"), (['best'], 'low', "its 'best' is missing or not a float"),
    (['losses'], None, "its 'losses' is missing"), (['mixture'], [1], "its 'mixture' is missing or not a dict"),
    (['config', 'train'], None, "its 'train' is missing"), (['rng'], torch.zeros(3), "'optimizer' or 'rng' does not"),
    (['optimizer', 'state'], None, "its 'optimizer' or 'rng' does not fit this network"),
    (['optimizer', 'state', 0, 'exp_avg'], torch.zeros(3), "its 'optimizer' or 'rng' does not fit this network"),
    (['model', 'readout.hidden.bias'], torch.full((4,), torch.nan), 'the weights readout.hidden.bias are not finite'),
    (['model', 'readout.hidden.bias'], torch.zeros(4).to_sparse(), 'the tensor readout.hidden.bias is sparse'),
    (['config', 'model', 'width'], 'wide', "neither a checkpoint of train.py nor one of DPOT")])
def test_a_checkpoint_with_a_missing_or_wrong_field_is_one_line_and_stays(
        keys, to, words, pretrained, tmp_path, refused):
    out = tmp_path / 'out'
    shutil.copytree(pretrained, out)
    saved = torch.load(out / 'last.pt', weights_only=True)
    change(saved, *keys, to=to)
    torch.save(saved, out / 'last.pt')
    before = contents(out)
    refused(['--resume', out], words, lines=0)
    assert contents(out) == before


def test_a_copy_goes_on_where_it_lies_and_moved_data_are_named(folder, tmp_path, call, refused):
    out, copy, moved = tmp_path / 'a', tmp_path / 'b', tmp_path / 'moved'
    with pytest.MonkeyPatch.context() as patch:
        at_step(3, lambda: signal.raise_signal(signal.SIGTERM), patch)
        assert call(command(folder, out, steps=8)[1:])[0] == 143
    shutil.copytree(out, copy)
    original = contents(out)
    folder.rename(moved)
    refused(['--resume', copy], f'--data {folder}: no such folder')
    assert call(['--resume', copy, '--data', moved])[0] == 0
    assert torch.load(copy / 'last.pt', weights_only=True)['step'] == 8 == len(log(copy))
    assert contents(out) == original


def test_a_second_run_into_a_folder_is_refused_until_the_first_process_is_dead(folder, tmp_path, call, refused):
    out = tmp_path / 'new' / 'out'
    with locked_by_another(out):
        for flags in ([], ['--resume', 'auto'], ['--overwrite']):
            refused([*command(folder, out, steps=2)[1:], *flags], f'error: {out}/lock: another process is writing into')
            assert sorted(contents(out)) == ['lock']
    assert (out / 'lock').exists(), 'a killed process leaves its file, but not its lock'
    assert call(command(folder, out, steps=2)[1:])[0] == 0
    assert not (out / 'lock').exists()


def test_what_fails_in_a_scoring_or_a_full_disk_loses_nothing(folder, tmp_path, monkeypatch, call):
    whole, broken = tmp_path / 'whole', tmp_path / 'stopped'
    assert call(command(folder, whole, steps=8)[1:])[0] == 0
    test, resume = folder / 'swe_pdb/test.h5', ['--resume', broken]
    good = test.read_bytes()
    write(tmp_path, 'broken', np.nan * travelling(3, 7, 12, 1, 0.7), 'test')
    bad = (tmp_path / 'broken/test.h5').read_bytes()
    with monkeypatch.context() as patch:
        at_step(3, lambda: test.write_bytes(bad), patch)
        code, error, _ = call(command(folder, broken, steps=8)[1:])
    assert code == 2 and 'swe_pdb/test.h5: trajectory 0, frames 0..3: non-finite values' in error
    assert torch.load(broken / 'last.pt', weights_only=True)['step'] == 4 and not (broken / 'best.pt').exists()
    test.write_bytes(good)

    before, limits = (broken / 'last.pt').read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, limits[1]))
    try:
        with monkeypatch.context() as patch:
            at_step(7, lambda: signal.raise_signal(signal.SIGTERM), patch)
            code, error, _ = call(resume)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and f'error: {broken}/last.pt: cannot be written (File too large)' in error
    assert (broken / 'last.pt').read_bytes() == before
    assert sorted(contents(broken)) == ['best.pt', 'config.json', 'last.pt', 'log.jsonl']       # no .part
    assert call(resume)[0] == 0
    assert_equal(whole, broken)


@pytest.mark.parametrize('threads, parts', [(0, 1), (1, 1), (3, 1), (3, 2)])
def test_threads_read_the_batches_in_order_and_not_far_ahead(threads, parts):
    read = []

    def slowly(numbers):
        read.append(numbers)
        time.sleep(0.002 * (numbers[0] % 3))                # a later part may be read sooner
        return [(0, torch.tensor(numbers), numbers)]
    numbers = [[n, n + 1] for n in range(0, 40, 2)]
    run = SimpleNamespace(workers=threads, accumulate=parts)
    windows = type('Windows', (), {'__getitem__': lambda self, part: slowly(part)})()
    batches = runs.Batches(windows, numbers, run, distributed.Processes(0, 1, torch.device('cpu')))
    found = [next(batches) for _ in range(3)]
    assert [seeds for batch in found for [(_, _, seeds)] in batch] == numbers[:3 * parts]
    assert [frames.tolist() for batch in found for [(_, frames, _)] in batch] == numbers[:3 * parts]
    assert len(read) <= 4 * parts + 2 * threads + 1
    batches.close()
    assert not batches.pool or not any(thread.is_alive() for thread in batches.pool._threads)
