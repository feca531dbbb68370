"""The studies over several checkpoints."""
import json
import math

import configs

import numpy as np
import pytest

import aotpot
import evaluate
import reproduce
from helpers import main, travelling, write
from trained import CPU, save, save_three, several, small_model, trajectories, write_test_sets


@pytest.fixture
def model():
    return small_model()


@pytest.fixture
def folder(tmp_path):
    return write_test_sets(tmp_path)


@pytest.fixture
def three(model, folder):
    return save_three(model, folder)


def test_spikes_are_counted_against_the_ten_lines_before(tmp_path):
    losses = [1.] * 9 + [3., 2.1, 1.9, None, 2.1, 4.1, 1.]          # no spike before there are ten lines; None: skipped
    log = [{'step': 20 * i, 'loss': loss, 'grad_norm': None if i == 3 else i, 'skipped': int(i > 12), 'lr': 1}
           for i, loss in enumerate(losses, start=1)]
    (tmp_path / 'log.jsonl').write_text('\n'.join(map(json.dumps, log)))
    found = reproduce.training_curve(tmp_path / 'log.jsonl')
    assert found['spikes'] == [220, 280, 300] and found['loss'][12] is None and found['step'][-1] == 320
    assert reproduce.summary(found) == {'steps': 320, 'final loss': 1, 'lowest': 1, 'skipped': 1, 'spikes': 3,
                                        'largest gradient': 16}


def test_the_scaling_score_is_100_where_every_error_is_a_hundredth(three, folder, monkeypatch, capsys):
    assert reproduce.scaling_score([1e-2] * 3) == pytest.approx(100) == reproduce.scaling_score([1e-1, 1e-3])
    assert reproduce.scaling_score([1.]) == 0 and reproduce.scaling_score([math.inf, 0.1]) == -math.inf
    lines, found = several(reproduce, three, ['scaling', '--datasets', 'own', 'coarse'], folder, monkeypatch, capsys)
    for path, (name, row) in zip(three, found['scaling'].items()):
        errors = [of['rollout']['mean'] for of in found['models'][name]['datasets'].values()]
        network = aotpot.load(path)
        assert row['score'] == pytest.approx(-50 * np.log10(errors).mean()) and len(errors) == 2
        assert row['parameters'] == aotpot.parameters(network) and row['residual'] == network.config.residual
        assert any(line.startswith(f'{name}, {row["residual"]}') and f'{row["score"]:.4g}' in line for line in lines)


def test_heterogeneity_is_scored_on_what_all_were_trained_on(three, folder, monkeypatch, capsys):
    lines, found = several(reproduce, three, ['heterogeneity'], folder, monkeypatch, capsys)
    error = evaluate.score(aotpot.load(three[2]), trajectories(folder, 'own'), CPU)['rollout'].mean().item()
    assert all(list(row) == ['own', 'mean'] for row in found['heterogeneity'].values())
    assert found['heterogeneity']['plain']['own'] == pytest.approx(error) and lines[-1].split()[:3] == \
        ['plain', '(1', 'datasets)']
    _, found = several(reproduce, three, ['heterogeneity', '--datasets', 'coarse', 'own'], folder, monkeypatch, capsys)
    assert all(row['mean'] == pytest.approx((row['own'] + row['coarse']) / 2) != row['own']
               for row in found['heterogeneity'].values())


def test_stability_shows_the_curves_of_each_run_once(three, folder, monkeypatch, capsys):
    for run_, loss in (('aot', 0.5), ('plain', 0.25)):
        (folder / 'out' / run_ / 'log.jsonl').write_text(
            json.dumps({'step': 20, 'loss': loss, 'grad_norm': 2., 'skipped': 1}))
    lines, found = several(reproduce, three, ['stability'], folder, monkeypatch, capsys)
    assert list(found['curves']) == ['aot', 'plain'] and found['curves']['plain']['final loss'] == 0.25
    assert lines[-2].split() == ['aot', '20', '0.5', '0.5', '1', '0', '2']


@pytest.mark.parametrize('which, flags, words', [
    ((1, 0), ['heterogeneity', '--data', '.'], 'no dataset that all the checkpoints were trained on'),
    ((2,), ['stability'], 'no '), ((3,), ['stability'], 'not a log of train.py'),
    ((4,), ['stability'], 'holds no loss yet'), ((2,), ['scaling', 'stability'], 'stability'),
    ((2,), ['curves'], "invalid choice: 'curves'"), ((2,), ['heterogeneity', '--figures', 'x'], 'without a figure'),
    ((2,), ['stability', '--scoring', 'paper'], 'stability has no scores')])
def test_what_cannot_be_studied_is_one_line(model, folder, monkeypatch, capsys, which, flags, words):
    monkeypatch.chdir(folder)
    write(folder, 'new', travelling(2, 7, 8, 1, 0.3), 'test')
    paths = [save(model, folder, 'far/last.pt', data='far', datasets=('new',)),
             save(model, folder, 'plain/last.pt', datasets=('own',)), *(save(model, folder, f'{name}/last.pt')
                                                                        for name in ('none', 'bad', 'empty'))]
    (folder / 'out/bad/log.jsonl').write_text('{"step": 1')
    (folder / 'out/empty/log.jsonl').write_text('{"step": 1, "loss": null, "grad_norm": null, "skipped": 1}')
    code, error, _ = main([*flags, '--checkpoint', *(paths[i] for i in which), '--device', 'cpu'], monkeypatch, capsys,
                          reproduce)
    assert code == 2 and error.count('\n') == 1 and words in error


# ------------------------------------------------------------------------------------------------ all commands

def test_runs_in_folders_named_persistence_or_truth_keep_rows_of_their_own(model, folder, monkeypatch, capsys):
    paths = [save(model, folder, f'{name}/last.pt') for name in ('persistence', 'truth', 'other')]
    for flags in (['--datasets', 'own'], ['--rollout', '4', '--datasets', 'own']):
        lines, found = several(evaluate, paths, flags, folder, monkeypatch, capsys)
        heads = ' '.join(lines[3:]).split()
        assert list(found['models']) == ['persistence/last', 'truth/last', 'other']
        assert all(name in heads for name in ('persistence/last', 'truth/last', 'other', 'persistence'))


def test_a_folder_stands_for_its_last_checkpoint_and_the_output_says_so(model, folder, monkeypatch, capsys):
    checkpoint = save(model, folder, 'small/last.pt')
    code, _, printed = main(['--checkpoint', checkpoint.parent, '--device', 'cpu', '--datasets', 'own'], monkeypatch,
                            capsys, evaluate)
    assert code == 0 and printed.startswith(f'{checkpoint}: step 7')


def test_an_output_that_nobody_reads_is_not_taken_for_a_file(model, folder):
    checkpoint = save(model, folder, 'small/last.pt')

    def mode(*_):
        raise BrokenPipeError
    args = configs.evaluation_parser('', '').parse_args(['--checkpoint', str(checkpoint), '--device', 'cpu'])
    with pytest.raises(BrokenPipeError):
        evaluate.run(args, mode)
