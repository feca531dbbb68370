"""Scores against slow loops written here, and the command on real checkpoints."""
import dataclasses
import json
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import aotpot
import configs
import data
import evaluate
import generate
from conftest import ROOT
from test_train import main as run_here
from test_train import run, travelling, write

CPU = evaluate.Processes(0, 1, torch.device('cpu'))
SMALL = dict(width=16, mlp=16, depth=1, heads=2, patch=4, resolution=16, frames=3, out_width=4)


@pytest.fixture
def model():
    return aotpot.AOTPOT(configs.model('tiny', **SMALL)).eval()


@pytest.fixture
def folder(tmp_path):
    values = travelling(5, 9, 16, 3, 0.4)
    values[..., 1] = values[:, :1, ..., 1]
    write(tmp_path, 'own', values, 'test', channels=('u', 'c', 'v'), static=('c',), t_test=4)
    write(tmp_path, 'coarse', travelling(4, 7, 8, 1, 0.7), 'test')
    return tmp_path


def trajectories(folder, name):
    return data.Trajectories(folder, name, 'test', 3, 4)


# ------------------------------------------------------------------------------------------------ metrics by hand

def test_relative_l2_by_hand():
    target = torch.tensor([[[[3., 1.], [4., 0.]]]])                     # (1, 1, 2, 2): channels (3, 4) and (1, 0)
    prediction = torch.tensor([[[[3., 1.], [1., 2.]]]])
    torch.testing.assert_close(evaluate.relative_l2(prediction, target), torch.tensor([[3 / 5, 2.]]))
    assert torch.equal(evaluate.relative_l2(target, target), torch.zeros(1, 2))


def test_relative_l2_of_a_perfect_prediction_has_a_finite_gradient():
    prediction = torch.ones(1, 2, 2, 1, requires_grad=True)
    evaluate.relative_l2(prediction, torch.ones(1, 2, 2, 1)).sum().backward()
    assert prediction.grad.isfinite().all()


# ------------------------------------------------------------------------------------------------ rollouts

def slow_rollout(model, truth, evolving, steps):
    """One trajectory (T + steps, H, W, C'), frame by frame: native predictions (steps, H, W, C'')."""
    H = truth.shape[1]
    up = lambda u: F.interpolate(u.permute(2, 0, 1)[None], (16, 16), mode='bilinear')[0].permute(1, 2, 0)
    down = lambda u: F.interpolate(u.permute(2, 0, 1)[None], (H, H), mode='bilinear')[0].permute(1, 2, 0)
    frames, out = [torch.ones(16, 16, 4) for _ in range(3)], []
    for t in range(3):
        frames[t][..., :truth.shape[-1]] = up(truth[t])
    for _ in range(steps):
        new = model(torch.stack(frames[-3:])[None])[0].clone()
        known = [c for c in range(4) if c not in evolving]
        new[..., known] = frames[-1][..., known]
        frames.append(new)
        out.append(down(new)[..., evolving])
    return torch.stack(out)


def slow_score(model, test):
    """The five numbers of each trajectory, as the README words them."""
    scores, F_ = [], test.t_test
    relative = lambda a, b: np.mean([((a - b)[..., c].norm() / b[..., c].norm()).item() for c in range(b.shape[-1])])
    for i in range(test.count):
        truth = torch.from_numpy(test.read(i, 0, 3 + F_))
        targets, inputs = truth[3:][..., test.evolving], truth[..., test.evolving]
        predicted = slow_rollout(model, truth, test.evolving, F_)
        one = [slow_rollout(model, truth[t:t + 3], test.evolving, 1)[0] for t in range(F_)]
        scores.append([relative(predicted, targets), relative(inputs[2].expand_as(targets), targets),
                       np.mean([relative(u, v) for u, v in zip(one, targets)]),
                       np.mean([relative(u, v) for u, v in zip(inputs[2:-1], targets)]),
                       ((one[-1] - targets[-1]).abs().sum() / targets[-1].abs().sum()).item()])
    return np.array(scores).T


@torch.no_grad()
@pytest.mark.parametrize('name', ['own', 'coarse'])
def test_scores_equal_a_slow_loop_with_static_channels_and_another_grid(model, folder, name):
    test = trajectories(folder, name)
    found = evaluate.score(model, test, CPU, batch_size=3)
    np.testing.assert_allclose(np.stack([v.numpy() for v in found.values()]), slow_score(model, test), rtol=2e-5)


def test_batch_size_and_limits_change_no_number(model, folder):
    test = trajectories(folder, 'own')
    one, many = (evaluate.score(model, test, CPU, batch_size=b) for b in (1, 16))
    few = evaluate.score(model, test, CPU, limit=2, steps=1)
    for name in one:
        torch.testing.assert_close(one[name], many[name], rtol=1e-5, atol=0)
    assert len(few['step']) == 2 and torch.equal(few['step'], few['rollout']), 'one step of a rollout is a step'


def test_ranks_fill_disjoint_trajectories_whose_sum_is_the_whole(model, folder):
    test = trajectories(folder, 'own')

    class Rank(evaluate.Processes):
        def sum(self, tensor):
            return tensor
    parts = [evaluate.score(model, test, Rank(rank, 3, torch.device('cpu'))) for rank in range(3)]
    whole = evaluate.score(model, test, CPU)
    for name in whole:
        torch.testing.assert_close(sum(part[name] for part in parts), whole[name], rtol=1e-5, atol=0)


class Diverging(torch.nn.Module):
    """Repeats the last frame; a sample whose static channel is above `level` grows until it overflows."""

    def __init__(self, config, level):
        super().__init__()
        self.config, self.level = config, level

    def forward(self, u):
        return u[:, -1] * torch.where(u[:, -1, 0, 0, 1] > self.level, 1e20, 1.0)[:, None, None, None]


def test_a_sample_that_diverges_is_counted_and_not_averaged_away(model, folder):
    test = trajectories(folder, 'own')
    values = torch.tensor([test.read(i, 0, 1)[0, 0, 0, 1] for i in range(5)])
    diverging = Diverging(model.config, values.median())
    scores = evaluate.score(diverging, test, CPU)
    bad = ~scores['rollout'].isfinite()
    assert torch.equal(bad, values > values.median()) and bad.sum() == 2
    assert evaluate.mean(scores['rollout']) == float('inf')
    line = evaluate.table({'own': {**scores, 'frames': 4}})[-1]
    assert f'{int(bad.sum())} not finite' in line and 'inf' in line
    curves = evaluate.rollout_curve(diverging, test, CPU, steps=4)
    rows = evaluate.rollout_table(curves, 4)[1]
    assert rows['first_step_past_1'] == 1 and rows['non_finite'] >= bad.sum() and rows['step']['4'] == float('inf')


@torch.no_grad()
def test_the_long_rollout_is_the_short_one_step_by_step(model, folder):
    test = trajectories(folder, 'own')
    curves = evaluate.rollout_curve(model, test, CPU, steps=4, batch_size=2)
    scores = evaluate.score(model, test, CPU)
    torch.testing.assert_close(curves['full'][-1], scores['rollout'], rtol=1e-5, atol=0)
    torch.testing.assert_close(curves['full_persistence'][-1], scores['rollout_persistence'], rtol=1e-5, atol=0)
    torch.testing.assert_close(curves['step'][0], curves['full'][0])
    truth = torch.from_numpy(test.read(1, 0, 7))
    predicted = slow_rollout(model, truth, test.evolving, 4)[3]
    target = truth[6][..., test.evolving]
    by_hand = np.mean([((predicted - target)[..., c].norm() / target[..., c].norm()).item() for c in range(2)])
    assert abs(curves['step'][3, 1].item() / by_hand - 1) < 1e-5


# ------------------------------------------------------------------------------------------------ the command

@pytest.fixture
def checkpoint(model, folder):
    path = folder / 'out/small/last.pt'
    path.parent.mkdir(parents=True)
    torch.save({'model': model.state_dict(), 'step': 7, 'config': {
        'model': dataclasses.asdict(model.config), 'run': {'data': str(folder)}}}, path)
    return path


def main(flags, monkeypatch, capsys):
    return run_here(flags, monkeypatch, capsys, script=evaluate)


def test_the_newest_checkpoint_is_found_and_scored_without_any_flag(checkpoint, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    older = folder / 'out/older/last.pt'
    older.parent.mkdir()
    older.write_bytes(b'broken')
    os.utime(older, (1, 1))
    code, _, printed = main(['--device', 'cpu', '--json', 'scores.json'], monkeypatch, capsys)
    assert code == 0 and 'small/last.pt: step 7, aot' in printed
    model = aotpot.load(checkpoint)
    scores = json.loads((folder / 'scores.json').read_text())['datasets']
    for name in ('own', 'coarse'):
        value = evaluate.score(model, trajectories(folder, name), CPU)['rollout'].mean().item()
        assert abs(scores[name]['rollout']['mean'] / value - 1) < 1e-9 and f'{value:.4f}' in printed


def test_two_processes_give_the_numbers_of_one(checkpoint, folder, monkeypatch, capsys):
    flags = ['--checkpoint', str(checkpoint), '--device', 'cpu', '--json']
    assert main([*flags, folder / 'one.json'], monkeypatch, capsys)[0] == 0
    two = run('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', str(ROOT / 'evaluate.py'), *flags,
              str(folder / 'two.json'))
    assert two.returncode == 0, two.stderr
    one, two = (json.loads((folder / f'{n}.json').read_text())['datasets'] for n in ('one', 'two'))
    for name in one:
        for kind in ('rollout', 'rollout_persistence', 'step', 'step_persistence'):
            np.testing.assert_allclose(one[name][kind]['samples'], two[name][kind]['samples'], rtol=1e-5)


def test_the_long_rollout_makes_its_reference_once(checkpoint, folder, monkeypatch, capsys):
    flags = ['--checkpoint', str(checkpoint), '--rollout', '22', '--samples', '2', '--device', 'cpu', '--json',
             str(folder / 'long.json')]
    code, _, first = main(flags, monkeypatch, capsys)
    assert code == 0 and 'making 2 reference trajectories of 25 frames' in first
    made = list(folder.glob('ns2d_fno_1e-3/*.h5'))
    assert len(made) == 1 and data.find(folder, split='test') == ['coarse', 'own'], 'not a dataset of the table'
    code, _, second = main(flags, monkeypatch, capsys)
    assert code == 0 and 'making' not in second
    assert second.splitlines()[-4:] == first.splitlines()[-4:]
    rollout = json.loads((folder / 'long.json').read_text())['rollout']
    assert set(rollout['step']) == {'20', '22', 'growth'} and len(rollout['curve']) == 22
    assert abs(rollout['step']['growth'] - rollout['step']['22'] / rollout['step']['20']) < 1e-9


@pytest.mark.parametrize('flags, words', [
    (['--checkpoint', 'none.pt'], 'none.pt: no such checkpoint'), (['--data', 'none'], '--data none: no such folder'),
    (['--datasets', 'cors'], 'did you mean'), (['--rollout', '-1'], '--rollout -1'), (['--sample', '3'], '--samples'),
    (['--batch_size', '0'], '--batch_size 0')])
def test_bad_input_is_one_line_and_exit_code_2(checkpoint, folder, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(folder)
    code, error, _ = main(flags, monkeypatch, capsys)
    assert code == 2 and error.count('\n') == 1 and words in error


def test_no_checkpoint_at_all_says_what_to_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, error, _ = main([], monkeypatch, capsys)
    assert code == 2 and 'run: python train.py' in error
