"""Metrics by hand, scores and rollouts against slow loops, and the command on real checkpoints."""
import importlib.util
import json
import math
import os
import re

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import configs
import data
import evaluate
from conftest import ROOT
from helpers import CPU, KINDS, WAVE, same, save, several, slow_rollout, small_model, trajectories, travelling, write
from lab import predict, rollouts
from runtime import checkpoint as checkpoints
from runtime import commands, distributed
from sources import generate


class Network(torch.nn.Module):
    """A network that is any function of its input frames (B, T, *space, C)."""

    def __init__(self, model, function):
        super().__init__()
        self.config, self.forward = model.config, function


def slow_score(model, test):
    """{name: (N,)} of all METRICS and their persistence, one trajectory and channel after the other."""
    scores, F_ = [], test.t_test
    relative = lambda a, b: np.mean([((a - b)[..., c].norm() / b[..., c].norm()).item() for c in range(b.shape[-1])])
    scaled = lambda a, b: np.mean([((a - b)[..., c].square().mean() / (b[..., c].std() ** 2 + 1e-7)).sqrt().item()
                                   for c in range(b.shape[-1])])
    l1 = lambda u, v: ((u - v).abs().sum() / v.abs().sum()).item()
    for i in range(test.count):
        truth = torch.from_numpy(test.read(i, 0, 3 + F_))
        rollout = slow_rollout(model, truth, test.evolving, F_).double()
        steps = torch.stack([slow_rollout(model, truth[t:t + 3], test.evolving, 1)[0] for t in range(F_)]).double()
        inputs, targets = truth[..., test.evolving].double(), truth[3:][..., test.evolving].double()
        last, before = inputs[2].expand_as(targets), inputs[2:-1]
        along = lambda error, u: np.mean([error(a, b) for a, b in zip(u, targets)])
        scores.append({
            'rollout': relative(rollout, targets), 'rollout_persistence': relative(last, targets),
            'step': along(relative, steps), 'step_persistence': along(relative, before),
            'nrmse': along(relative, rollout), 'nrmse_persistence': along(relative, last),
            'vrmse': along(scaled, rollout), 'vrmse_persistence': along(scaled, last),
            'l1': l1(steps[-1], targets[-1]), 'l1_persistence': l1(before[-1], targets[-1])})
    names = list(evaluate.METRICS)
    return {forecast: {name: np.array([row[name + suffix] for row in scores]) for name in names}
            for forecast, suffix in (('model', ''), ('persistence', '_persistence'))}


@torch.no_grad()
@pytest.mark.parametrize('name', ['own', 'coarse'])
def test_scores_equal_a_slow_loop_with_static_channels_and_another_grid(model, folder, name):
    test = trajectories(folder, name)
    scores, expected = evaluate.score(model, test, CPU, batch_size=3), slow_score(model, test)
    for forecast in evaluate.FORECASTS:
        assert scores[forecast].keys() >= expected[forecast].keys()
        for metric, values in expected[forecast].items():
            np.testing.assert_allclose(scores[forecast][metric], values, rtol=2e-5, err_msg=metric)


def test_a_new_metric_needs_one_entry_to_be_in_scores_and_tables(model, folder, monkeypatch):
    worst = evaluate.Metric('worst', 'one step', lambda of: evaluate.l2re(of.error, of.size).amax(0))
    monkeypatch.setitem(evaluate.METRICS, 'new', worst)
    scores = evaluate.score(model, trajectories(folder, 'own'), CPU)
    for values in scores.values():
        assert (values['new'] >= values['step']).all()
    head, of, _, row = evaluate.table({'own': {**scores, 'frames': 4}}, names=['step', 'new'])
    assert head.split()[-2:] == ['L2RE', 'worst'] and of.split() == ['one', 'step'] * 2
    assert row.split()[-3:-1] == [f'{values["new"].mean():.4f}' for values in scores.values()]


@pytest.mark.parametrize('scale', [1e-30, 1e-8, 1, 1e20, 1e30])
def test_scores_are_those_of_a_slow_float64_loop_whatever_the_size_of_the_field(model, tmp_path, scale):
    write(tmp_path, 'own', scale * travelling(2, 7, 16, 2, 0.4), 'test', t_test=4)
    test = trajectories(tmp_path, 'own')
    damping = Network(model, lambda u: 0.9 * u[:, -1])
    scores, curves = evaluate.score(damping, test, CPU), rollouts.rollout_curve(damping, test, CPU, 4)
    expected = slow_score(damping, test)
    for forecast in evaluate.FORECASTS:
        for name, values in expected[forecast].items():
            np.testing.assert_allclose(scores[forecast][name], values, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(curves[forecast].mean(0), expected[forecast]['nrmse'], rtol=1e-5)


def test_where_the_truth_is_zero_an_error_is_zero_or_one():
    error, size = torch.tensor([[0., 3.], [2., 0.]]), torch.tensor([[0., 0.], [8., 8.]])
    torch.testing.assert_close(data.relative(error, size), torch.tensor([[0., 1.], [0.25, 0.]]))
    assert data.relative(torch.tensor(math.nan), torch.tensor(0.)).isnan(), 'what is not finite stays so'


def test_batch_size_and_ranks_change_no_number(model, folder):
    class Rank(distributed.Processes):
        def sum(self, tensor):
            return tensor
    test = trajectories(folder, 'own')
    one, many = (evaluate.score(model, test, CPU, batch_size=b) for b in (1, 16))
    parts = [evaluate.score(model, test, Rank(rank, 3, torch.device('cpu'))) for rank in range(3)]
    for forecast, values in many.items():
        for name in values:
            torch.testing.assert_close(one[forecast][name], values[name], rtol=1e-5, atol=0)
            together = sum(part[forecast][name] for part in parts)
            torch.testing.assert_close(together, values[name], rtol=1e-5, atol=0)


def test_a_sample_that_diverges_is_counted_and_not_averaged_away(model, folder):
    test = trajectories(folder, 'own')
    values = torch.tensor([test.read(i, 0, 1)[0, 0, 0, 1] for i in range(5)])
    diverging = Network(model, lambda u: u[:, -1] * torch.where(
        u[:, -1, 0, 0, 1] > values.median(), 1e20, 1.0)[:, None, None, None])      # by the static channel
    scores = evaluate.score(diverging, test, CPU)
    bad = ~scores['model']['rollout'].isfinite()
    assert torch.equal(bad, values > values.median()) and bad.sum() == 2
    line = evaluate.table({'own': {**scores, 'frames': 4}})[-1]
    assert '2 not finite' in line and 'inf' in line and evaluate.mean(scores['model']['rollout']) == math.inf
    curves = rollouts.rollout_curve(diverging, test, CPU, steps=4)
    assert rollouts.report_of(curves)['model']['step']['4'] == math.inf
    beyond = rollouts.beyond(diverging, test, CPU, 6)
    assert torch.equal(beyond['finite'] == 0, bad) and torch.equal(beyond['finite'] == 1, beyond['norm'].isfinite())
    assert evaluate.mean(beyond['norm']) == math.inf


def test_vrmse_of_the_mean_of_each_frame_is_near_one_even_far_from_zero(model, tmp_path):
    values = 1000 + 1e-2 * travelling(3, 7, 16, 1, 0.7)             # a variance that sum v^2 - (sum v)^2 loses
    write(tmp_path, 'far', values, 'test')
    test = trajectories(tmp_path, 'far')
    stored = torch.from_numpy(test.read(0, 3, 7)).mean()
    scores = evaluate.score(Network(model, lambda u: stored.expand(len(u), 16, 16, 4)), test, CPU)['model']
    truth = torch.from_numpy(np.stack([test.read(i, 3, 7)[..., 0] for i in range(3)])).double()
    variance = truth.var((2, 3))
    expected = (variance * 255 / 256 / (variance + 1e-7)).sqrt().mean(1)            # 0.997, of which 0.001 is the 1e-7
    assert abs(scores['vrmse'] - expected).max() < 2e-4 and (scores['nrmse'] < 1e-4).all()


def slow_paper(model, test, i, wide=16):
    """DPOT's scoring of one trajectory, frame by frame: 'rollout', 'nrmse' and 'step'."""
    truth, F_, skip = torch.from_numpy(test.read(i, 0, 3 + test.t_test)), test.t_test, wide // test.space[0]
    padded = torch.ones(len(truth), wide, wide, 4)
    padded[..., :truth.shape[-1]] = F.interpolate(truth.permute(0, 3, 1, 2), (wide, wide), mode='bilinear').permute(
        0, 2, 3, 1)

    def roll(frames, steps):
        frames = list(frames)
        for _ in range(steps):
            new = model(torch.stack(frames[-3:])[None])[0]
            static = [c for c in range(4) if c not in test.evolving]
            new[..., static] = frames[-1][..., static]
            frames.append(new)
        return frames[3:]
    squares = lambda u: (u[::skip, ::skip, test.evolving].double() ** 2).sum((0, 1))
    size = torch.stack([squares(v) for v in padded[3:]])                                            # (F, C'')
    along = torch.stack([squares(u - v) for u, v in zip(roll(padded[:3], F_), padded[3:])])
    forced = torch.stack([squares(roll(padded[t:t + 3], 1)[0] - padded[t + 3]) for t in range(F_)])
    return [ratio.sqrt().mean() for ratio in (along.sum(0) / size.sum(0), along / size, forced / size)]


def test_the_papers_scoring_equals_a_slow_loop_and_differs_from_native_only_where_the_grids_do(model, folder):
    model = Network(model, lambda u: u[:, -1].roll(1, 1))           # a frame that depends much on the one before
    for name in ('coarse', 'own'):
        test = trajectories(folder, name)
        native, paper = (evaluate.score(model, test, CPU, scoring=kind)['model'] for kind in ('native', 'paper'))
        for i in (0, 2):
            scores = [paper[key][i] for key in ('rollout', 'nrmse', 'step')]
            np.testing.assert_allclose(scores, slow_paper(model, test, i), rtol=2e-5)
        for key in native:
            assert torch.equal(native[key], paper[key]) == (name == 'own'), key


def test_the_papers_truth_is_smoothed_and_taken_at_each_axis_own_points(model, folder):
    write(folder, 'tall', travelling(2, 7, 8, 1, 0.7)[:, :, :, ::2], 'test')            # 8 x 4 on the 16 x 16 grid
    predictor = evaluate.Predictor(model, trajectories(folder, 'tall'), CPU.device, scoring='paper')
    frame = torch.zeros(1, 8, 4, 1)
    frame[0, 3, 2] = 1.
    truth = predictor.truth(frame)[0, :, :, 0]
    # without aligned corners, point i of the model grid lies at (i + 1/2) / factor - 1/2 of the native one
    expected = torch.zeros(8, 4)
    expected[3, 2], expected[4, 2], expected[3, 3], expected[4, 3] = .75 * .625, .25 * .625, .75 * .375, .25 * .375
    torch.testing.assert_close(truth, expected)
    state = torch.arange(256.).reshape(1, 1, 16, 16, 1).expand(1, 3, 16, 16, 4)
    assert torch.equal(predictor.scored(state)[0, :, :, 0], state[0, 0, ::2, ::4, 0])


@torch.no_grad()
def test_the_long_rollout_is_the_short_one_step_by_step(model, folder):
    test = trajectories(folder, 'own')
    curves = rollouts.rollout_curve(model, test, CPU, steps=4, batch_size=2)
    scores = evaluate.score(model, test, CPU)
    for forecast in evaluate.FORECASTS:
        torch.testing.assert_close(curves[forecast].mean(0), scores[forecast]['nrmse'], rtol=1e-5, atol=0)
    truth = torch.from_numpy(test.read(1, 0, 7))
    predicted = slow_rollout(model, truth, test.evolving, 4)[3]
    target = truth[6][..., test.evolving]
    by_hand = np.mean([((predicted - target)[..., c].norm() / target[..., c].norm()).item() for c in range(2)])
    assert abs(curves['model'][3, 1].item() / by_hand - 1) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize('value', [0., 3.])
def test_where_the_truth_is_zero_or_at_rest_a_long_rollout_has_the_numbers_of_the_short_one(model, tmp_path, value):
    write(tmp_path, 'own', np.full((2, 28, 16, 16, 1), value), 'test')
    test = trajectories(tmp_path, 'own')
    curves, scores = rollouts.rollout_curve(model, test, CPU, 25), evaluate.score(model, test, CPU)
    for forecast in evaluate.FORECASTS:
        torch.testing.assert_close(curves[forecast].mean(0), scores[forecast]['nrmse'], rtol=1e-5, atol=0)
    assert rollouts.report_of(curves)['persistence']['step'] == {'20': 0, '25': 0, 'growth': 0}


@torch.no_grad()
def test_the_spectra_of_a_rollout_are_those_of_a_slow_loop(model, folder):
    test = trajectories(folder, 'own')
    spectra = rollouts.rollout_curve(model, test, CPU, 5, batch_size=2)['spectra']
    assert [*spectra] == [1, 5]
    for step, both in spectra.items():
        expected = torch.zeros(2, len(both['truth']), dtype=torch.float64)
        for i in range(test.count):
            frames = torch.from_numpy(test.read(i, 0, 8))
            u = slow_rollout(model, frames, test.evolving, 5)[step - 1, ..., 0]
            for j, field in enumerate((frames[2 + step, ..., 0], u)):
                power = np.abs(np.fft.fft2(field.double().numpy()) / 16 ** 2) ** 2
                for x in range(16):
                    for y in range(16):
                        k = math.hypot(min(x, 16 - x), min(y, 16 - y))
                        expected[j, round(k)] += power[x, y] / test.count
        torch.testing.assert_close(both['truth'], expected[0], rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(both['model'], expected[1], rtol=1e-3, atol=1e-9)


def test_the_spectrum_of_waves_is_in_their_shells_and_adds_up_to_the_mean_square():
    x = torch.arange(24)[:, None] * 2 * np.pi / 24
    y = torch.arange(12)[None] * 2 * np.pi / 12                     # one wave on y, half as long, has k = 2
    u = 2 + 3 * torch.cos(5 * x) + torch.sin(2 * y) + torch.cos(x + y)
    expected = torch.zeros(1, 18, dtype=torch.float64)
    expected[0, [0, 5, 4, 2]] = torch.tensor([4, 4.5, 0.5, 0.5], dtype=torch.float64)
    torch.testing.assert_close(rollouts.spectrum(u[None]), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(expected.sum(), u.double().square().mean(), rtol=1e-6, atol=0)


@torch.no_grad()
@pytest.mark.parametrize('name', ['own', 'coarse'])
def test_beyond_the_data_norm_and_mean_are_compared_with_the_last_true_frame(model, folder, name):
    test = trajectories(folder, name)
    values = rollouts.beyond(model, test, CPU, 11, batch_size=3)
    for i in range(test.count):
        frames = torch.from_numpy(test.read(i, 0, test.frames))
        u = slow_rollout(model, torch.cat([frames[:3]]), test.evolving, 11)[-1].double()
        v = frames[-1][..., test.evolving].double()
        norms = [abs(u[..., c].norm() / v[..., c].norm() - 1) for c in range(v.shape[-1])]
        means = [abs((u - v)[..., c].mean()) / v[..., c].square().mean().sqrt() for c in range(v.shape[-1])]
        np.testing.assert_allclose(values['norm'][i], np.mean(norms), rtol=1e-3)
        np.testing.assert_allclose(values['mean'][i], np.mean(means), rtol=1e-3, atol=1e-6)
    assert (values['finite'] == 1).all()


def test_scoring_and_metrics_have_a_table_and_json(checkpoint, folder, call):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--scoring', 'paper', '--metrics', '--json',
             folder / 'paper.json']
    code, _, printed = call(flags, evaluate)
    summary = json.loads((folder / 'paper.json').read_text())['models']['small']
    assert code == 0 and summary['scoring'] == 'paper' and 'native scoring' not in printed
    assert max(map(len, printed.splitlines()[1:])) < 120, 'a table for each metric'
    scores = evaluate.score(evaluate.load(checkpoint), trajectories(folder, 'coarse'), CPU, scoring='paper')
    heads = [line for line in printed.splitlines() if 'paper scoring' in line]
    rows = [line.replace('*', '').split() for line in printed.splitlines() if line.startswith('coarse ')]
    assert len(heads) == len(rows) == len(evaluate.METRICS)
    for head, row, (kind, metric) in zip(heads, rows, evaluate.METRICS.items()):
        assert head.startswith(f'{metric.title} of {metric.of}, paper scoring')
        assert row[1:] == [f'{scores[forecast][kind].mean():.4f}' for forecast in evaluate.FORECASTS]
        for forecast in evaluate.FORECASTS:
            samples = summary['datasets']['coarse'][forecast][kind]['samples']
            np.testing.assert_allclose(samples, scores[forecast][kind], rtol=1e-6)


def numbers(nest):
    """All numbers in what json.loads gave, in order, null as NaN."""
    if isinstance(nest, (dict, list)):
        return [x for item in (nest.values() if isinstance(nest, dict) else nest) for x in numbers(item)]
    return [] if isinstance(nest, str) else [math.nan if nest is None else nest]


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(checkpoint, model, folder, torchrun, call):
    """Of two checkpoints, with a reference and without; test_train.py has the table of scores."""
    write(folder, 'own', travelling(3, 5, 16, 3, 0.4), 'train', channels=('u', 'c', 'v'), static=('c',))
    write(folder, 'coarse', travelling(2, 13, 8, 1, 0.7), 'test')                   # long enough for a reference
    flags = ['--checkpoint', str(checkpoint), str(save(model, folder, 'other/last.pt', step=8)), '--rollout', '9',
             '--datasets', 'coarse', 'own', '--device', 'cpu', '--json']
    assert call([*flags, folder / 'one.json'], evaluate)[0] == 0
    two = torchrun.run(ROOT / 'evaluate.py', *flags, folder / 'two.json')
    assert two.returncode == 0, two.stderr
    one, two = (numbers(json.loads((folder / f'{n}.json').read_text())) for n in ('one', 'two'))
    assert len(one) > 80
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def test_several_checkpoints_stand_side_by_side_with_the_numbers_of_each_alone(three, folder, monkeypatch, capsys):
    lines, report = several(evaluate, three, ['--metrics', '--datasets', 'own', 'coarse'], folder, monkeypatch, capsys)
    assert list(report['models']) == ['aot/step9', 'aot/step10', 'plain'] and set(report) == {'models'}
    for path, name in zip(three, report['models']):
        _, single = several(evaluate, [path], ['--datasets', 'own', 'coarse'], folder, monkeypatch, capsys)
        assert [*single['models'].values()] == [report['models'][name]]
        assert report['models'][name]['checkpoint'] == str(path)
    tables = [line for line in lines if line.split()[0] in ('own', 'coarse')]
    kinds = [(kind, name) for kind in evaluate.METRICS for name in ('own', 'coarse')]
    assert len(tables) == len(kinds)
    for line, (kind, name) in zip(tables, kinds):
        rows = [model['datasets'][name] for model in report['models'].values()]
        values = [*(row['model'][kind]['mean'] for row in rows), rows[0]['persistence'][kind]['mean']]
        assert line.split()[1:] == [f'{value:.4f}' + '*' * (value == min(values)) for value in values]


def test_rollouts_have_a_reference_where_it_is_long_enough_and_else_one_line(
        model, three, folder, monkeypatch, capsys):
    flags = ['--datasets', 'own', 'coarse', '--samples', '2', '--rollout']
    lines, report = several(evaluate, three, [*flags, '5'], folder, monkeypatch, capsys)
    own, coarse = (report['models']['aot/step9']['rollout'][name] for name in ('own', 'coarse'))
    cells = [line.replace('*', '').split() for line in lines]
    assert ['own:', 'L2RE', 'at', 'step', '5', 'growth'] in cells
    assert ['persistence', f'{own["persistence"]["step"]["5"]:.4f}', '1.0x'] in cells
    curves = rollouts.rollout_curve(model, trajectories(folder, 'own', rows=range(2)), CPU, 5)
    for forecast in evaluate.FORECASTS:
        np.testing.assert_allclose(own[forecast]['curve'], curves[forecast].mean(1), rtol=1e-5)
    expected = rollouts.beyond(model, trajectories(folder, 'coarse', rows=range(2)), CPU, 5)
    for name, values in expected.items():
        np.testing.assert_allclose(coarse[name]['samples'], values, rtol=1e-5)
    norm, mean = (f'{expected[name].mean():.3g}' for name in ('norm', 'mean'))
    assert lines[-2].startswith('no reference is so long') and lines[-1].count('2 of 2 finite, norm ') == 3
    assert lines[-1].startswith(f'coarse: aot/step9 2 of 2 finite, norm {norm}, mean {mean}; aot/step10 2 of 2')
    lines, report = several(evaluate, three[:1], [*flags, '30'], folder, monkeypatch, capsys)
    assert [line.split(' of ')[0] for line in lines[-2:]] == ['own: 2', 'coarse: 2']


def test_a_rollout_reads_no_training_data_and_speaks_before_it_reads_any(checkpoint, folder, monkeypatch, capsys, call):
    """Lines come one by one, so that on large data the first is there at once."""
    write(folder, 'coarse', travelling(2, 7, 8, 1, 0.7), 'train')
    flags = ['--checkpoint', checkpoint, '--rollout', 30, '--datasets', 'coarse', '--device', 'cpu']
    read, original = set(), data.Trajectories.read
    monkeypatch.setattr(data.Trajectories, 'read', lambda self, *args, **options: (
        read.add(self.path), original(self, *args, **options))[1])
    assert call(flags, evaluate)[0] == 0 and read == {folder / 'coarse/test.h5'}
    monkeypatch.setattr(rollouts, 'rollouts', lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(flags, evaluate)
    assert '30 steps from the first 3 true frames' in capsys.readouterr().out


FAMILY = rollouts.LONG         # whose long trajectories the solver makes


@pytest.mark.parametrize('how, words', [
    ('values', 'not as the solver has made it; remove it, and it will be made again'),
    ('no checksum', 'not as the solver has made it'),
    ('seed 0', "exists with ((1, 11, 16, 16, 1), 'generate.py seed 1 grid 64'"),
    ('grid 64', "exists with ((1, 11, 16, 16, 1), 'generate.py seed 0 grid 64 version 2'")])
def test_a_reference_that_was_edited_or_is_of_another_solver_is_not_used(model, folder, refused, how, words):
    write(folder, FAMILY, travelling(3, 7, 16, 1, 0.4), 'test')
    path = save(model, folder, 'small/last.pt', datasets=(FAMILY,))
    reference = generate.long_reference(folder, FAMILY, 5, 1, model.config, CPU)
    with h5py.File(reference.path, 'a') as file:
        attributes = file['data'].attrs
        if how == 'values':
            file['data'][0, 7, 3, 3] *= 1.001
        elif how == 'no checksum':
            del attributes['checksum']
        else:
            other = {'seed 0': 'seed 1', 'grid 64': 'grid 64 version 2'}[how]
            attributes['source'] = attributes['source'].replace(how, other)
    refused(['--checkpoint', path, '--rollout', '5', '--samples', '1', '--device', 'cpu'],
            f'error: {reference.path}: {words}', evaluate, lines=None)


def test_the_long_rollout_makes_its_reference_once(model, folder, call):
    write(folder, FAMILY, travelling(3, 7, 16, 1, 0.4), 'test')
    path = save(model, folder, 'small/last.pt', datasets=(FAMILY,))
    flags = ['--checkpoint', str(path), '--rollout', '22', '--samples', '2', '--device', 'cpu', '--json',
             str(folder / 'long.json')]
    code, _, first = call(flags, evaluate)
    assert code == 0 and 'making 2 reference trajectories of 25 frames' in first
    reference, = folder.glob(f'{FAMILY}/rollout*.h5')
    assert str(reference) in first and data.find(folder, split='test') == ['coarse', FAMILY, 'own']
    code, _, second = call(flags, evaluate)
    assert code == 0 and 'making' not in second
    assert second.splitlines()[-3:] == first.splitlines()[-3:]
    rollout = json.loads((folder / 'long.json').read_text())['models']['small']['rollout'][FAMILY]
    rollout = rollout['model']
    assert set(rollout['step']) == {'20', '22', 'growth'} and len(rollout['curve']) == 22
    assert abs(rollout['step']['growth'] - rollout['step']['22'] / rollout['step']['20']) < 1e-9
    short = [*flags[:2], '--rollout', '5', '--samples', '1', *flags[6:-2]]
    assert 'making 1 reference trajectories of 11 frames' in call(short, evaluate)[2], 'the fewest of the solver'
    enough = [*flags[:2], '--rollout', '4', *flags[6:-2]]
    assert 'making' not in call(enough, evaluate)[2], 'the test trajectories are long enough'
    longer = save(small_model(frames=4), folder, 'four/last.pt')        # needs a frame more; the flag names the family
    code, _, printed = call(['--checkpoint', longer, *flags[2:-2], '--datasets', FAMILY], evaluate)
    assert code == 0 and 'making 2 reference trajectories of 26 frames' in printed


@pytest.mark.parametrize('trained', [('own',), (FAMILY, 'own')])
def test_a_rollout_is_on_what_the_model_was_trained_on_and_makes_nothing_that_was_not_asked_for(
        trained, folder, call):
    """A model that never saw the family leaves it alone; so does one with other --data."""
    write(folder / 'other', 'own', travelling(2, 9, 16, 1, 0.3), 'test')
    write(folder, FAMILY, travelling(3, 7, 16, 1, 0.4), 'test')
    path = save(small_model(frames=1), folder, 'small/last.pt', datasets=trained)
    before = {*folder.rglob('*')}
    flags = ['--checkpoint', path, '--rollout', '7', '--samples', '1', '--device', 'cpu']
    code, _, printed = call(flags, evaluate)
    assert code == 0 and re.findall('(.*): L2RE', printed) == [*trained]
    new = {*folder.rglob('*')} - before
    assert [path.parent.name for path in new] == [FAMILY] * (FAMILY in trained)
    code, _, printed = call([*flags, '--data', folder / 'other'], evaluate)
    assert code == 0 and 'own: L2RE' in printed and FAMILY not in printed
    assert {*folder.rglob('*')} - before == new


@torch.no_grad()
@pytest.mark.parametrize('name', ['own', 'coarse'])
def test_a_rollout_of_arrays_and_tensors_equals_a_slow_loop_on_their_own_grid(model, folder, name):
    test = trajectories(folder, name)
    frames, static = np.stack([test.read(i, 0, 4) for i in range(3)]), [1] * (name == 'own')
    result = evaluate.rollout(model, frames, 5, static, batch_size=2)
    assert type(result) is np.ndarray and result.dtype == np.float32 and result.shape == (3, 5, *frames.shape[2:])
    for i, trajectory in enumerate(torch.from_numpy(frames)):
        expected = slow_rollout(model, trajectory[1:], test.evolving, 5)               # of four frames the last three
        np.testing.assert_allclose(result[i][..., test.evolving], expected, rtol=1e-5, atol=1e-5)
        assert np.array_equal(result[i][..., static], frames[i, [3] * 5][..., static])
    alone = evaluate.rollout(model, frames[1].astype('>f8')[:, ::-1, :, :], 5, static)  # big-endian, negative strides
    flipped = evaluate.rollout(model, torch.from_numpy(frames[1:2]).double().flip(2).requires_grad_(), 5, static)
    assert isinstance(flipped, torch.Tensor) and not flipped.requires_grad and alone.shape == (1, *result.shape[1:])
    assert np.array_equal(alone, flipped)


def test_static_may_be_a_generator_and_a_network_in_training_mode_is_evaluated_and_left_as_it_was(folder):
    model, test = small_model(experts=3, top_k=1), trajectories(folder, 'own')
    frames, static = np.stack([test.read(i, 0, 4) for i in range(3)]), [1]
    expected, scores = evaluate.rollout(model, frames, 2, static), evaluate.score(model, test, CPU)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    assert np.array_equal(evaluate.rollout(model, frames, 2, (channel for channel in static)), expected)
    assert same(evaluate.score(model, test, CPU), scores) and same(dict(model.state_dict()), before)
    with pytest.raises(configs.InputError):
        evaluate.rollout(model, np.nan * frames, 2)
    assert all(module.training for module in model.modules()), 'after an error, too'


@torch.no_grad()
def test_a_rollout_in_three_dimensions_equals_steps_of_the_network():
    solid, frames = small_model(resolution=8, dims=3), torch.rand(2, 3, 6, 8, 4, 2)
    resize = lambda u, size: F.interpolate(u.movedim(-1, 1), size, mode='trilinear').movedim(1, -1)
    sequence = [*frames.unbind(1)]
    for _ in range(2):
        state = [F.pad(resize(u, (8, 8, 8)), (0, 2), value=1.) for u in sequence[-3:]]
        sequence.append(resize(solid(torch.stack(state, 1))[..., :2], (6, 8, 4)))
    expected = torch.stack(sequence[3:], 1)
    torch.testing.assert_close(evaluate.rollout(solid, frames, 2), expected)
    torch.testing.assert_close(evaluate.rollout(solid, frames[1], 2)[0], expected[1])


def test_static_channels_are_named_by_indices_or_by_booleans_and_single_steps_are_kept(model):
    frames = torch.rand(3, 3, 12, 12, 3)
    expected = evaluate.rollout(model, frames, 5, [2])
    mask = [False, False, True]
    for static in (mask, np.array(mask), torch.tensor(mask), [np.int64(2)]):
        assert torch.equal(evaluate.rollout(model, frames, 5, static), expected)
    assert torch.equal(expected[..., 2], frames[:, 2:, ..., 2].expand(-1, 5, -1, -1))
    assert torch.equal(evaluate.rollout(model, frames, (5, 2, 5), [2], batch_size=2), expected[:, [1, 4]])
    whole = np.ma.array(frames.numpy(), mask=False)
    assert np.array_equal(evaluate.rollout(model, whole, 5, [2]), expected), 'nothing of it is masked'


@torch.no_grad()
@pytest.mark.parametrize('names, dataset', [(['wave'], ''), (['wave', 'same', 'flow'], ''), ([*KINDS], 'wave')])
def test_frames_in_the_units_of_the_data_are_read_as_in_training(model, folder, capsys, names, dataset):
    """What is static, and its scale, is in the checkpoint: raw numbers give the predictions of their file."""
    values = travelling(2, 3, 12, 3, 0.4)
    values[..., 2] = np.random.default_rng(0).uniform(1000, 3000, (12, 12))
    write(folder, 'wave', np.concatenate([values, values], 1), 'test', **WAVE)
    raw, test = np.float32(values), trajectories(folder, 'wave')
    loaded = evaluate.load(save(model, folder, 'wave/last.pt', layouts={name: KINDS[name] for name in names}))
    result = evaluate.rollout(loaded, raw, 4, dataset=dataset)
    origin = dataset or ' '.join(names[:2])
    assert capsys.readouterr().out == f'frames: channels u u_t c (c / 1000 static), as in {origin}\n'
    for i, u in enumerate(result):
        expected = slow_rollout(model, torch.from_numpy(test.read(i, 0, 3)), [0, 1], 4)
        np.testing.assert_allclose(u[..., :2], expected, rtol=1e-5, atol=1e-5)
        assert np.array_equal(u[..., 2], raw[i, [2] * 4][..., 2]), 'in its own units'
    assert np.array_equal(evaluate.rollout(loaded, raw, 4, [2], dataset=dataset), result)
    tensors = evaluate.rollout(loaded, torch.from_numpy(raw), 4, [1], dataset=dataset)
    assert np.array_equal(tensors[..., 1:], raw[:, [2] * 4][..., 1:]) and not np.array_equal(tensors, result)
    unscaled = evaluate.rollout(model, raw, 4, [2])
    assert not np.allclose(unscaled[..., :2], result[..., :2], rtol=1e-2), 'the scale counts'


def test_tables_of_steady_datasets_have_neither_persistence_nor_a_number_twice(folder, call):
    for name, frames in (('steady', 2), ('moving', 4)):
        write(folder, name, travelling(3, frames, 16, 1, 0.4), 'test')
    paths = [save(small_model(frames=1), folder, f'{name}/last.pt') for name in 'ab']
    flags = ['--device', 'cpu', '--json', folder / 'a.json', '--datasets', 'steady']
    one = call([*flags, '--checkpoint', paths[0]], evaluate)[2].splitlines()
    scores = json.loads((folder / 'a.json').read_text())['models']['a']['datasets']['steady']['model']
    assert one[-1].split() == ['steady', '3', '1', f'{scores["step"]["mean"]:.4f}',
                               *f'median relative L1 {np.median(scores["l1"]["samples"]):.4f}'.split()]
    every = call([*flags, '--metrics', '--checkpoint', paths[0]], evaluate)[2].splitlines()[1:]
    assert every[1::2] == [line for line in every if line.startswith('steady ')], 'a line for each table'
    assert [float(line.split()[1].strip('*')) for line in every[1::2]] == [
        round(scores[name]['mean'], 4) for name in ('step', 'vrmse', 'l1')]
    assert scores['rollout'] == scores['step'] and 'persistence' not in ''.join(one)
    two = call([*flags, '--checkpoint', *paths], evaluate)[2].splitlines()[2:]
    assert len(two) == 2 and two[1].replace('*', '').split()[:2] == ['steady', f'{scores["step"]["mean"]:.4f}']
    assert two[0].startswith('L2RE of one step, ') and 'persistence' not in two[0]
    both = call([*flags, 'moving', '--checkpoint', paths[0]], evaluate)[2].splitlines()
    moving, steady = (next(line for line in both if line.startswith(name)) for name in ('moving', 'steady'))
    assert steady.split()[3:6] == ['-', '-', '-'] and steady.split()[7:9] == ['-', '-'] and '-' not in moving.split()


def test_the_lines_for_a_notebook_run_as_they_are_printed(model, tmp_path, monkeypatch):
    write(tmp_path / 'data/nano', 'wave_gauss', travelling(2, 9, 12, 2, 0.4), 'test')
    save(model, tmp_path, 'nano/best.pt')
    block, own = (re.search(r'```python\n(.*?)```', (ROOT / page).read_text(), re.S)[1]
                  for page in ('docs/evaluation.md', 'README.md'))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(block, names)
    exec(own, {})
    mine, frames = data.Trajectories('data', 'mine', 'test', 5, 4), np.load('frames.npy')
    np.testing.assert_array_equal(mine.read(0, 0, len(frames)), np.float32(frames))
    assert np.ptp(frames) > 1.9, 'a wave'
    test = data.Trajectories('data/nano', 'wave_gauss', 'test', 3, 4)
    after, error = names['u'].shape[1], names['error']
    assert len(block.splitlines()) <= 10 and names['prediction'].shape == (2, 9 - after, 12, 12, 2)
    by_hand = names['prediction'] - np.stack([test.read(i, after, 9) for i in range(2)])
    assert error == pytest.approx(np.linalg.norm(by_hand) / np.linalg.norm([test.read(i, after, 9) for i in range(2)]))


@torch.no_grad()
def test_another_model_grid_is_that_of_the_scores_and_of_predictions(model, checkpoint, folder, call):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--resolution', '24x32']
    code, _, printed = call([*flags, '--datasets', 'coarse', '--json', folder / 'fine.json'], evaluate)
    report = json.loads((folder / 'fine.json').read_text())['models']['small']
    scores = report['datasets']['coarse']
    assert code == 0 and ' 24x32 grid, ' in printed and report['resolution'] == [24, 32]
    test, errors = trajectories(folder, 'coarse'), []
    for i in range(test.count):
        truth = torch.from_numpy(test.read(i, 0, 4)).movedim(-1, 1)                                 # (4, 1, 8, 8)
        state = torch.ones(1, 3, 24, 32, 4)
        state[0, ..., :1] = F.interpolate(truth[:3], (24, 32), mode='bilinear').movedim(1, -1)
        u = F.interpolate(model(state)[..., :1].movedim(-1, 1), (8, 8), mode='bilinear')[0]
        errors.append(((u - truth[3]).norm() / truth[3].norm()).item())
    flags += [folder / 'coarse/test.h5', '--steps', 1, '--to', folder / 'out.npy']
    assert call(flags, predict)[0] == 0
    frames, test.t_test = test.t_test, 1
    expected = evaluate.score(evaluate.load(checkpoint), test, CPU)['model']['step']
    assert not np.allclose(errors, expected, rtol=1e-3), 'the grid matters'
    finer = commands.open_checkpoints([checkpoint], resolution='24x32')[0].model
    np.testing.assert_allclose(evaluate.score(finer, test, CPU)['model']['step'], errors, rtol=1e-5)
    test.t_test = frames
    rollout = evaluate.score(finer, test, CPU)['model']['rollout']
    np.testing.assert_allclose(rollout, scores['model']['rollout']['samples'], rtol=1e-6)
    newest = np.stack([test.read(i, 4, 7) for i in range(4)])
    assert np.array_equal(np.load(folder / 'out.npy'), evaluate.rollout(finer, newest, 1))


def test_the_newest_checkpoint_is_found_and_scored_without_any_flag(checkpoint, folder, monkeypatch, call):
    monkeypatch.chdir(folder)
    older = folder / 'out/older/last.pt'
    older.parent.mkdir()
    older.write_bytes(b'broken')
    os.utime(older, (1, 1))
    code, _, printed = call(['--device', 'cpu', '--datasets', 'own', '--json', 'a.json'], evaluate)
    assert code == 0 and 'small/last.pt: step 7, aot' in printed and 'native scoring' in printed
    assert 'nRMSE' not in printed and not [*folder.glob('*.part')]
    scores = evaluate.score(evaluate.load(checkpoint), trajectories(folder, 'own'), CPU)
    value = scores['model']['rollout'].mean().item()
    scores = json.loads((folder / 'a.json').read_text())['models']['small']['datasets']['own']
    assert abs(scores['model']['rollout']['mean'] / value - 1) < 1e-9 and f'{value:.4f}' in printed


def test_without_matplotlib_one_line_says_what_to_install_before_any_work(folder, monkeypatch, refused):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    words = 'error: --figures needs matplotlib and scikit-learn: pip install matplotlib scikit-learn\n'
    assert not refused(['--rollout', '4', '--figures', folder / 'figures'], words, evaluate)[1]
    assert not (folder / 'figures').exists()


def test_json_has_mean_and_samples_and_null_for_what_is_not_finite(checkpoint, folder):
    args = commands.evaluation_parser('', '').parse_args(['--checkpoint', str(checkpoint), '--device', 'cpu'])
    args.json = folder / 'a.json'
    commands.execute(args, lambda models, args, processes, report: report.update(a=torch.tensor([1., math.inf])) or [])
    assert json.loads(args.json.read_text())['a'] == {'mean': None, 'samples': [1., None]}


def test_the_form_of_the_network_is_that_of_the_flag(checkpoint, monkeypatch):
    forms = []
    monkeypatch.setattr(checkpoints, 'network', lambda saved, form, network: forms.append(form))
    for flags in ([], ['--form', 'paper']):
        commands.open_checkpoints([checkpoint], commands.evaluation_parser('', '').parse_args(flags).form)
    assert forms == ['fast', 'paper']
