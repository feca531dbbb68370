"""Opening and comparing checkpoints, and the errors of the user that all commands report alike."""
import json
import os
from pathlib import Path

import configs

import numpy as np
import pytest
import torch

import aotpot
import commands
import evaluate
import interpret
from conftest import ROOT
from helpers import main, run, travelling, write
from trained import CPU, save, save_three, small_model, trajectories, write_test_sets


@pytest.fixture
def model():
    return small_model()


@pytest.fixture
def folder(tmp_path):
    return write_test_sets(tmp_path)


@pytest.fixture
def checkpoint(model, folder):
    return save(model, folder, 'small/last.pt')


@pytest.fixture
def three(model, folder):
    return save_three(model, folder)


def test_the_newest_checkpoint_is_found_and_scored_without_any_flag(checkpoint, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    older = folder / 'out/older/last.pt'
    older.parent.mkdir()
    older.write_bytes(b'broken')
    os.utime(older, (1, 1))
    code, _, printed = main(['--device', 'cpu', '--json', 'scores.json'], monkeypatch, capsys, evaluate)
    assert code == 0 and 'small/last.pt: step 7, aot' in printed
    model = aotpot.load(checkpoint)
    summary = json.loads((folder / 'scores.json').read_text())['models']['small']
    scores = summary['datasets']
    assert summary['scoring'] == 'native' and 'native scoring' in printed and 'L2RE' in printed
    assert 'nRMSE' not in printed and not [*folder.glob('*.part')]
    for name in ('own', 'coarse'):
        value = evaluate.score(model, trajectories(folder, name), CPU)['rollout'].mean().item()
        assert abs(scores[name]['rollout']['mean'] / value - 1) < 1e-9 and f'{value:.4f}' in printed


def test_names_are_as_short_as_they_can_be_and_unique():
    paths = [Path(path) for path in ('a/x/last.pt', 'b/x/last.pt', 'a/y/s1.pt', 'a/y/s2.pt', 'a/z/last.pt')]
    assert commands.short_names(paths) == ['a/x/last.pt', 'b/x/last.pt', 'y/s1', 'y/s2', 'z']
    assert commands.short_names(paths[:1]) == ['x'] and commands.short_names([Path('last.pt')]) == [Path.cwd().name]


@pytest.mark.parametrize('which, flags, words', [
    ((0, 0), [], 'step9.pt: given twice'), ((0, 2), [], 'aot and plain differ in datasets, coarse own and own; say'),
    ((0, 3), ['--datasets', 'own'], 'differ in --frames, 3 and 4'), ((0, 4), [], 'differ in data, '),
    ((0, 5), ['--datasets', 'own', '--scoring', 'paper'], 'differ in --resolution, 16x16 and 32x32'),
    ((0,), ['--rollout', '5', '--datasets', 'steady'], 'steady is steady'),
    ((0,), ['--datasets', 'own', 'deep'], 'deep/test.h5: 3 dimensions of space, '),
    ((0,), ['--rollout', '5', '--datasets', 'coarse'], 'coarse/train.h5: no such file')])
def test_what_cannot_be_compared_is_one_line(three, model, folder, monkeypatch, capsys, which, flags, words):
    monkeypatch.chdir(folder)
    write(folder, 'new', travelling(2, 7, 8, 1, 0.3), 'test')
    write(folder, 'deep', np.random.rand(1, 7, 8, 8, 8, 1), 'test')
    write(folder, 'steady', travelling(2, 2, 8, 1, 0.3), 'test')
    odd = [small_model(frames=4), small_model(resolution=32)]
    if 'steady' in flags:
        three[0] = save(small_model(frames=1), folder, 'one/last.pt')
    three += [save(odd[0], folder, 'four/last.pt'), save(model, folder, 'far/last.pt', data='far', datasets=('new',)),
              save(odd[1], folder, 'fine/last.pt')]
    code, error, _ = main(['--checkpoint', *(three[i] for i in which), '--device', 'cpu', *flags], monkeypatch, capsys,
                          evaluate)
    assert code == 2 and error.count('\n') == 1 and words in error


def test_no_checkpoint_at_all_says_what_to_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, error, _ = main([], monkeypatch, capsys, evaluate)
    assert code == 2 and 'run: python train.py' in error


def test_without_matplotlib_one_line_says_what_to_install_before_any_work(checkpoint, folder):
    code = """if True:
        import sys
        finders = sys.meta_path[:]

        class Without:
            def find_spec(self, name, *where):
                found = (finder.find_spec(name, *where) for finder in finders)
                return next(filter(None, found), None) if name.partition('.')[0] != 'matplotlib' else None
        sys.meta_path[:] = [Without()]
        import configs, interpret
        configs.cli(interpret.main)"""
    found = run('-c', code, '--checkpoint', str(checkpoint), '--gains', '--figures', str(folder / 'figures'),
                cwd=ROOT)
    assert found.returncode == 2 and found.stdout == '' and not (folder / 'figures').exists()
    assert found.stderr == 'error: --figures needs matplotlib and scikit-learn: pip install matplotlib scikit-learn\n'


@pytest.mark.parametrize('flags, words', [
    (['--json', '.'], '--json .: a folder; name a file'), (['--batch_size', '0'], '--batch_size 0'),
    (['--json', 'own/test.h5/a.json'], '--json own/test.h5: no folder to write into'),
    (['--figures', 'own/test.h5'], '--figures own/test.h5: no folder to write into')])
def test_what_cannot_be_written_is_refused_before_any_work(checkpoint, folder, monkeypatch, capsys, flags, words):
    if '--figures' in flags:
        pytest.importorskip('sklearn', reason='the figures need sklearn')
    monkeypatch.chdir(folder)
    code, error, printed = main(['--device', 'cpu', *flags], monkeypatch, capsys, interpret)
    assert code == 2 and error.count('\n') == 1 and words in error and not printed


def test_a_file_that_cannot_be_written_is_one_line_and_leaves_the_old_one(tmp_path):
    (tmp_path / 'a.json').write_text('old')
    with pytest.raises(configs.InputError, match=f'^--json: cannot write {tmp_path}/a.json .No space left'):
        with commands.replacing('--json', tmp_path / 'a.json') as part:
            part.write_text('half')
            raise OSError(28, 'No space left on device')
    assert [path.name for path in tmp_path.iterdir()] == ['a.json'] and (tmp_path / 'a.json').read_text() == 'old'
    with pytest.raises(configs.InputError, match='--json: cannot write'):
        with commands.replacing('--json', tmp_path / 'absent' / 'b.json') as part:
            part.write_text('new')


def test_json_has_mean_and_samples_and_null_for_what_is_not_finite():
    inf, nan = float('inf'), float('nan')
    found = commands.jsonable({'a': torch.tensor([1., 3.]), 'b': torch.tensor([1., inf]), 'c': [nan, 2]})
    assert found == {'a': {'mean': 2., 'samples': [1., 3.]}, 'b': {'mean': None, 'samples': [1., None]}, 'c': [None, 2]}


def test_the_form_of_the_network_is_that_of_the_flag(checkpoint, monkeypatch):
    asked = []
    monkeypatch.setattr(aotpot, 'from_checkpoint', lambda saved, form: asked.append(form))
    for flags in ([], ['--form', 'paper']):
        commands.open_checkpoints([checkpoint], commands.new_parser('', '').parse_args(flags).form)
    assert asked == ['fast', 'paper']
