"""The folder of a run: what it survives, where it goes on, and that nothing is replaced by accident."""
import re
import resource
import shutil
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import configs
import data
import evaluate
import train
from helpers import at_step, command, exit_code, fork, locked_by_another, log, same, travelling, write, write_two
from runtime import checkpoint, distributed, runs


@pytest.fixture
def folder(tmp_path):
    return write_two(tmp_path / 'data')


def assert_equal(whole, broken):
    """The last checkpoints of two runs, and the numbers in their logs, are equal bit for bit."""
    a, b = (torch.load(out / 'last.pt', weights_only=True) for out in (whole, broken))
    for key in ('model', 'optimizer', 'step', 'best', 'scored', 'rng', 'data'):
        assert same(a[key], b[key]), key
    lines, found = ({line['step']: line for line in log(out)} for out in (whole, broken))       # at a signal one more
    for key in ('epoch', 'lr', 'grad_norm'):
        assert [line[key] for line in lines.values()] == [found[step][key] for step in lines], key
    walls = [line['wall_s'] for line in log(broken)]
    assert walls == sorted(walls), 'a run that goes on counts on'


@pytest.mark.parametrize('optimizer', [pytest.param('adamw', marks=pytest.mark.slow), 'muon'])
def test_killed_and_resumed_runs_equal_the_uninterrupted_one_bit_for_bit(
        optimizer, folder, tmp_path, monkeypatch, call):
    monkeypatch.setitem(train.LOSSES, 'relative', lambda *its: train.relative_loss(*its) * (1 + torch.rand(())))
    steps = dict(steps=24, save_every=6)
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    assert call(command(folder, whole, '--optimizer', optimizer, **steps)[1:])[0] == 0
    resume = command(folder, broken, '--resume', '--optimizer', optimizer, **steps)[1:]

    def interrupt(step, number):
        with monkeypatch.context() as patch:
            at_step(step, lambda: signal.raise_signal(number), patch)
            patch.setattr(sys, 'argv', ['train.py', *map(str, resume)])
            return exit_code(fork(train.main, tmp_path / 'printed'))
    assert interrupt(1, signal.SIGKILL) == -signal.SIGKILL          # before the first step
    assert interrupt(9, signal.SIGKILL) == -signal.SIGKILL
    assert torch.load(broken / 'last.pt', weights_only=True)['step'] == 6 and len(log(broken)) == 8
    with open(broken / 'log.jsonl', 'a') as file:
        file.write('{"step": 23, "lo')                  # a crash in the middle of a line
    assert interrupt(16, signal.SIGTERM) == 128 + signal.SIGTERM
    second = torch.load(broken / 'last.pt', weights_only=True)['step']
    assert second == len(log(broken)) == 16, 'SIGTERM must save after the step'
    assert call(resume)[0] == 0 and not list(broken.glob('*.part'))
    assert_equal(whole, broken)


def test_the_same_command_with_resume_starts_continues_and_then_has_nothing_to_do(
        folder, pretrained, tmp_path, monkeypatch, call):
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    assert call(command(folder, whole, '--log_every', 3, steps=8)[1:])[0] == 0
    same_command = command(folder, broken, '--resume', '--log_every', 3, steps=8)[1:]
    each = [line['loss'] for line in log(pretrained)]               # the same run
    assert log(whole)[0]['loss'] == pytest.approx(np.mean(each[:3]))
    given = []
    monkeypatch.setattr(torch, 'set_num_threads', given.append)
    # a signal counts after the step, whether a line of the log follows or not
    for step, number in ((2, signal.SIGPIPE), (4, signal.SIGINT), (7, signal.SIGUSR1)):
        with monkeypatch.context() as patch:
            at_step(step, lambda number=number: signal.raise_signal(number), patch)
            code, error, printed = call(same_command)
        assert code == 128 + number and f'stopped by {number.name} at step {step}; ' in printed, error
    folder.rename(tmp_path / 'moved')
    broken = broken.rename(tmp_path / 'other')
    same_command += ['--data', tmp_path / 'moved', '--out', broken]
    assert call([*same_command, '--threads', 1])[0] == 0, 'where it runs may differ'
    assert call(['--out', broken, '--data', tmp_path / 'moved', '--resume', '--size', 'nano'])[0] == 0
    assert given == [1] * 5, 'those of the run'
    assert_equal(whole, broken)
    files = contents(broken)
    assert call(same_command) == (0, '', f'the run in {broken} is finished, at step 8; there is nothing left to '
                                  f'do but python evaluate.py --checkpoint {broken}\n')
    assert files == contents(broken)


def contents(out):
    """The bytes of all files in a folder but its lock."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != 'lock'}


@pytest.fixture
def begun(pretrained, folder, tmp_path):
    """The folder of a run on a copy of its data."""
    shutil.copytree(pretrained, tmp_path / 'out')
    shutil.rmtree(folder)
    shutil.copytree(pretrained.parent / 'data', folder)
    return tmp_path / 'out'


@pytest.mark.parametrize('flags, words', [
    (['--lr', '0.5'], '--lr 0.5: the run to resume has 0.01; repeat its command, or choose another --out'),
    (['--init_from', 'a.pt'], '--init_from a.pt: the run to resume has none'),
    (['--size', 'mini'], '--size mini: the run to resume has nano'),
    (['--threads', '2'], '--threads 2: the run to resume has 1'),
    (['--datasets', 'other', 'own', 'swe_pdb'], '--datasets other own swe_pdb: the run to resume has own swe_pdb')])
def test_a_command_that_differs_from_that_of_the_run_is_refused(flags, words, begun, folder, refused):
    before = contents(begun)
    shutil.copytree(folder / 'own', folder / 'other')
    refused([*command(folder, begun, '--resume', steps=8)[1:], *flags], words)
    assert contents(begun) == before


@pytest.mark.parametrize('attributes, split', [
    ({'t_test': 3}, 'test'), ({'source': 'x'}, 'test'), ({'channels': ('v', 'u', 'c')}, 'test'),
    ({'N': 7}, 'train'), ({'valid': 2}, 'valid'), ({'above': 'train'}, 'train'), ({'above': 'test'}, 'test')])
def test_data_that_are_not_those_of_the_run_are_refused(attributes, split, begun, folder, refused):
    attributes = dict(channels=('u', 'v', 'c'), static=('c',), t_test=4) | attributes
    counts = {'train': attributes.pop('N', 6), 'test': 3, 'valid': attributes.pop('valid', 0)}
    above = attributes.pop('above', '')
    for name in filter(counts.get, counts):
        u = travelling(counts[name], 9, 16, 3, 0.4) + 0.1 * (name == above)
        u[..., 2] = u[:, :1, ..., 2]
        write(folder, 'own', u, name, **attributes)
    words = f'--resume: {folder}/own/{split}.h5 is '
    words += 'new, and the run had none; remove it' if split == 'valid' else 'not the file of the run, but has other'
    refused(command(folder, begun, '--resume', steps=8)[1:], words)


def test_a_damaged_log_is_named_and_a_line_that_a_crash_cut_in_two_goes(begun):
    lines, path = log(begun), begun / 'log.jsonl'
    path.write_text(path.read_text() + '{"step": 9, "lo')
    assert log(begun) == lines
    for text in 'of another program\n', '5\n':
        path.write_text(text)
        with pytest.raises(configs.InputError, match=f'{path}: damaged, or not the log of a run'):
            log(begun)


def test_a_run_keeps_the_precision_in_which_it_began_on_a_processor_with_another(folder, tmp_path, monkeypatch, call):
    monkeypatch.setattr(distributed, 'WIDE', 16)                                # the width of the network
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: True)
    out = tmp_path / 'out'
    with monkeypatch.context() as patch:
        at_step(2, lambda: signal.raise_signal(signal.SIGTERM), patch)
        assert call(command(folder, out, steps=3)[1:])[0] == 128 + signal.SIGTERM
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: False)
    before = torch.load(out / 'last.pt', weights_only=True)
    assert before['dtype'] == 'bf16' and before['config']['run']['dtype'] == 'auto'
    assert ' bf16 on 1 x cpu' in call(command(folder, out, '--resume', steps=3)[1:])[2]


@pytest.mark.parametrize('left, resume', [
    ('last.pt', []), ('log.jsonl', []), ('step4.pt', ['--resume']), ('last.pt', ['--resume'])])
def test_no_run_is_replaced_and_none_of_another_version_continued(left, resume, begun, folder, refused):
    saved = torch.load(begun / 'last.pt', weights_only=True)
    torch.save({**saved, 'format': runs.FORMAT + bool(resume)}, begun / 'last.pt')
    (begun / 'step4.pt').write_text('weights')
    for path in begun.iterdir():
        if path.name != left:
            path.unlink()
    before = contents(begun)
    refused([*command(folder, begun, steps=8)[1:], *resume],
            f'--out {begun}: the folder holds {left}; continue the last.pt of a run of this version with --resume, or '
            'choose another --out, from its weights with --init_from')
    assert before and contents(begun) == before


def test_the_best_weights_are_kept_where_there_are_validation_data(folder, tmp_path, call):
    out = tmp_path / 'out'
    falling = travelling(3, 7, 12, 1, 0.7) * 0.01 ** np.arange(7).reshape(7, 1, 1, 1)             # hard to predict
    write(folder, 'swe_pdb', falling, 'valid')
    flags = command(folder, out, '--lr', '0.05', '--keep', steps=12, save_every=3)[1:]
    assert ' (swe_pdb alone)\n' in call([*flags, '--out', tmp_path / 'other'])[2]
    assert not (tmp_path / 'other/best.pt').exists(), 'the other dataset has none'
    shutil.copy(folder / 'own/test.h5', folder / 'own/valid.h5')
    assert call(flags)[0] == 0
    best, last, *kept = (checkpoint.load_file(out / f'{name}.pt') for name in ('best', 'last', *(
        f'step{step}' for step in range(3, 13, 3))))
    valid = [line['valid'] for line in log(out) if 'valid' in line]
    assert best['valid'] == last['best'] == min(valid) and [saved['step'] for saved in kept] == [3, 6, 9, 12]
    assert same(best['model'], kept[valid.index(min(valid))]['model']) and same(last['model'], kept[-1]['model'])
    valid_sets = [data.Trajectories(folder, name, 'valid', 3, 4) for name in ('own', 'swe_pdb')]
    error = evaluate.validation_error(checkpoint.load_model(best), valid_sets, distributed.setup('cpu'))
    assert best['valid'] == pytest.approx(error, rel=1e-5)


def test_a_second_run_into_a_folder_is_refused_until_the_first_process_is_dead(folder, tmp_path, call, refused):
    out = tmp_path / 'new' / 'out'
    with locked_by_another(out):
        for flags in ([], ['--resume']):
            refused([*command(folder, out, steps=2)[1:], *flags], f'error: {out}/lock: another process is writing into')
            assert not contents(out)
    assert call(command(folder, out, steps=2)[1:])[0] == 0


def test_what_fails_in_a_scoring_or_a_full_disk_loses_nothing(folder, tmp_path, monkeypatch, call):
    whole, broken = tmp_path / 'whole', tmp_path / 'stopped'
    assert call(command(folder, whole, steps=8)[1:])[0] == 0
    test, resume = folder / 'swe_pdb/test.h5', command(folder, broken, '--resume', steps=8)[1:]
    good = test.read_bytes()
    write(tmp_path, 'broken', np.nan * travelling(3, 7, 12, 1, 0.7), 'test')
    bad = (tmp_path / 'broken/test.h5').read_bytes()
    with monkeypatch.context() as patch:
        at_step(3, lambda: test.write_bytes(bad), patch)
        code, error, _ = call(resume)
    assert code == 2 and 'swe_pdb/test.h5: trajectory 0, frame 0, channel 0, point (0, 0): nan is not finite' in error
    assert torch.load(broken / 'last.pt', weights_only=True)['step'] == 4
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
    assert sorted(contents(broken)) == ['config.json', 'last.pt', 'log.jsonl']       # no .part
    assert call(resume)[0] == 0
    assert_equal(whole, broken)


def test_processes_that_find_other_runs_refuse_to_train(begun):
    two = SimpleNamespace(world_size=2, sum=lambda hashes: 2 * hashes + 1)
    with pytest.raises(configs.InputError, match=f'--resume of {begun} at step 8: another process has another value'):
        runs.checkpoint_to_resume(SimpleNamespace(out=begun, resume=True), two)


def test_what_a_command_does_not_give_is_that_of_the_run_but_for_the_machine(begun, folder, call):
    """Here none of its flags but --out, and another --log_every; it was compiled on a GPU."""
    saved = torch.load(begun / 'last.pt', weights_only=True)
    saved['config']['run'].update(compile='graphs', device='cuda')
    saved['config']['size'] = 'mini'
    torch.save({**saved, 'step': 4, 'scored': 4, 'best': 0.5}, begun / 'last.pt')
    code, error, printed = call(['--out', begun, '--resume', '--log_every', 2, '--device', 'cpu'])
    assert code == 0 and [int(step) for step in re.findall(r'step (\d)/8: loss', printed)] == [6, 8], error
    now = torch.load(begun / 'last.pt', weights_only=True)
    assert now['best'] == 0.5
    before, now = saved['config'], now['config']
    assert all(now[part] == before[part] for part in ('size', 'model', 'train', 'finetune'))
    assert {name for name in now['run'] if now['run'][name] != before['run'][name]} <= {
        'log_every', 'out', 'resume', 'device', 'compile'}
    assert not error and '\r' not in printed, 'no bar where there is no terminal'
