"""Scores against slow loops written here, and the command on real checkpoints."""
import dataclasses
import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import aotpot
import checkpoint
import configs
import data
import distributed
import evaluate
import train
from conftest import ROOT
from test_train import main as run_here
from test_train import run, travelling, write

CPU = distributed.Processes(0, 1, torch.device('cpu'))
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
    torch.testing.assert_close(train.relative_l2(prediction, target), torch.tensor([[3 / 5, 2.]]))
    assert torch.equal(train.relative_l2(target, target), torch.zeros(1, 2))


def test_relative_l2_of_a_perfect_prediction_has_a_finite_gradient():
    prediction = torch.ones(1, 2, 2, 1, requires_grad=True)
    train.relative_l2(prediction, torch.ones(1, 2, 2, 1)).sum().backward()
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
    """The nine numbers of each trajectory, as the README words them."""
    scores, F_ = [], test.t_test
    relative = lambda a, b: np.mean([((a - b)[..., c].norm() / b[..., c].norm()).item() for c in range(b.shape[-1])])
    scaled = lambda a, b: np.mean([((a - b)[..., c].square().mean() / b[..., c].var(correction=0)).sqrt().item()
                                   for c in range(b.shape[-1])])
    for i in range(test.count):
        truth = torch.from_numpy(test.read(i, 0, 3 + F_))
        targets, inputs = truth[3:][..., test.evolving], truth[..., test.evolving]
        predicted = slow_rollout(model, truth, test.evolving, F_)
        one = [slow_rollout(model, truth[t:t + 3], test.evolving, 1)[0] for t in range(F_)]
        scores.append([relative(predicted, targets), relative(inputs[2].expand_as(targets), targets),
                       np.mean([relative(u, v) for u, v in zip(one, targets)]),
                       np.mean([relative(u, v) for u, v in zip(inputs[2:-1], targets)]),
                       ((one[-1] - targets[-1]).abs().sum() / targets[-1].abs().sum()).item(),
                       *(np.mean([error(u, v) for u, v in zip(by, targets)]) for error in (relative, scaled)
                         for by in (predicted, inputs[2].expand_as(targets)))])
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

    class Rank(distributed.Processes):
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


@torch.no_grad()
def test_where_the_truth_is_zero_or_at_rest_a_long_rollout_has_the_numbers_of_the_short_one(model, tmp_path):
    for name, value in (('zero', 0.), ('rest', 3.)):
        write(tmp_path, name, np.full((2, 28, 16, 16, 1), value), 'test')
        test = trajectories(tmp_path, name)
        curves, scores = evaluate.rollout_curve(model, test, CPU, 25), evaluate.score(model, test, CPU)
        for kind in ('', '_persistence'):
            torch.testing.assert_close(curves['full' + kind][-1], scores['rollout' + kind], rtol=1e-5, atol=0)
            torch.testing.assert_close(curves['step' + kind].mean(0), scores['nrmse' + kind], rtol=1e-5, atol=0)
        rows = evaluate.rollout_table(curves, 25)[1]
        assert rows['step_persistence'] == {'20': 0, '25': 0, 'growth': 0} and rows['non_finite'] == 0


# ------------------------------------------------------------------------------------------------ the two scorings

def slow_paper(model, test, i, wide=16):
    """DPOT's scoring of one trajectory, point by point: 'rollout', 'nrmse' and 'step'."""
    truth, F_, skip = torch.from_numpy(test.read(i, 0, 3 + test.t_test)), test.t_test, wide // test.space[0]
    up = lambda u: F.interpolate(u.permute(0, 3, 1, 2), (wide, wide), mode='bilinear').permute(0, 2, 3, 1)
    padded = torch.ones(len(truth), wide, wide, 4)
    padded[..., :truth.shape[-1]] = up(truth)

    def roll(frames, steps):
        frames = list(frames)
        for _ in range(steps):
            new = model(torch.stack(frames[-3:])[None])[0]
            known = [c for c in range(4) if c not in test.evolving]
            new[..., known] = frames[-1][..., known]
            frames.append(new)
        return frames[3:]

    def sums(u, v, c):
        points = [(x, y) for x in range(0, wide, skip) for y in range(0, wide, skip)]
        return np.array([(sum((u[x, y, c] - v[x, y, c]).item() ** 2 for x, y in points),
                          sum(v[x, y, c].item() ** 2 for x, y in points))])
    full, one, step = [], [], []
    for c in test.evolving:
        along = np.concatenate([sums(u, v, c) for u, v in zip(roll(padded[:3], F_), padded[3:])])
        forced = np.concatenate([sums(roll(padded[t:t + 3], 1)[0], padded[t + 3], c) for t in range(F_)])
        full.append(np.sqrt(along[:, 0].sum() / along[:, 1].sum()))
        one.append(np.sqrt(along[:, 0] / along[:, 1]).mean())
        step.append(np.sqrt(forced[:, 0] / forced[:, 1]).mean())
    return np.mean(full), np.mean(one), np.mean(step)


@torch.no_grad()
def test_the_papers_scoring_equals_a_slow_loop_and_differs_from_native_only_where_the_grids_do(model, folder):
    for name in ('coarse', 'own'):
        test = trajectories(folder, name)
        native, paper = (evaluate.score(model, test, CPU, scoring=kind) for kind in ('native', 'paper'))
        for i in (0, 2):
            by_hand = slow_paper(model, test, i)
            np.testing.assert_allclose([paper[key][i] for key in ('rollout', 'nrmse', 'step')], by_hand, rtol=2e-5)
        for key in native:
            assert torch.equal(native[key], paper[key]) == (name == 'own'), key


def test_the_papers_truth_is_smoothed_and_taken_at_each_axis_own_points(model, folder):
    write(folder, 'tall', travelling(2, 7, 8, 1, 0.7)[:, :, :, ::2], 'test')            # 8 x 4 on the 16 x 16 grid
    predictor = evaluate.Predictor(model, trajectories(folder, 'tall'), CPU.device, scoring='paper')
    frame = torch.zeros(1, 8, 4, 1)
    frame[0, 3, 2] = 1.
    found = predictor.truth(frame)[0, :, :, 0]
    # without aligned corners, point i of the model grid lies at (i + 1/2) / factor - 1/2 of the native one
    expected = torch.zeros(8, 4)
    expected[3, 2], expected[4, 2], expected[3, 3], expected[4, 3] = .75 * .625, .25 * .625, .75 * .375, .25 * .375
    torch.testing.assert_close(found, expected)
    state = torch.arange(256.).reshape(1, 1, 16, 16, 1).expand(1, 3, 16, 16, 4)
    assert torch.equal(predictor.scored(state)[0, :, :, 0], state[0, 0, ::2, ::4, 0])


class Constant(torch.nn.Module):
    """Predicts the same frame whatever it sees."""

    def __init__(self, config, frame):
        super().__init__()
        self.config, self.frame = config, frame

    def forward(self, u):
        return self.frame.expand(len(u), *self.frame.shape)


def test_nrmse_and_vrmse_by_hand(model, tmp_path):
    values = np.ones((2, 5, 16, 16, 2))
    values[:, 3:, ::2, :, 0] = np.array([5., 9.])[:, None, None]    # half 1, half 5 or 9: mean 3, 5; variance 4, 16
    values[:, 3:, ::2, :, 1] = -1.                                  # mean 0, variance 1
    values[1] += 9                                                  # another trajectory changes nothing of the first
    write(tmp_path, 'hand', values, 'test', t_test=2)
    test = trajectories(tmp_path, 'hand')
    scores = evaluate.score(Constant(model.config, torch.full((16, 16, 4), 3.)), test, CPU)
    # mean squares: error 4, 20 and 10, 10; truth 13, 41 and 1, 1
    by = lambda *ratios: np.mean(np.sqrt(ratios))
    found = [scores[key][0] for key in ('nrmse', 'vrmse', 'rollout')]
    expected = [by(4 / 13, 20 / 41, 10, 10), by(4 / 4, 20 / 16, 10, 10), by(24 / 54, 10)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(scores['nrmse_persistence'][0], by(8 / 13, 32 / 41, 2, 2), rtol=1e-6)


def test_vrmse_of_the_mean_of_each_frame_is_one_even_far_from_zero(model, tmp_path):
    values = 1000 + 1e-2 * travelling(3, 7, 16, 1, 0.7)             # a variance that sum v^2 - (sum v)^2 loses
    write(tmp_path, 'far', values, 'test')
    test = trajectories(tmp_path, 'far')
    stored = torch.from_numpy(test.read(0, 3, 7)).mean()
    scores = evaluate.score(Constant(model.config, stored.expand(16, 16, 4)), test, CPU)
    assert abs(scores['vrmse'] - 1).max() < 2e-4 and (scores['nrmse'] < 1e-4).all()


# ------------------------------------------------------------------------------------------------ timing

class Counting(torch.nn.Module):
    """Notes the first number of each input, and rests."""

    def __init__(self, config, seconds=0.):
        super().__init__()
        self.config, self.seconds, self.seen = config, seconds, []

    def forward(self, u):
        self.seen.append((len(u), u[0, 0, 0, 0, 0].item()))
        time.sleep(self.seconds)
        return u[:, -1]


def test_timing_counts_its_passes_over_all_inputs_and_leaves_the_warm_up_out(model, folder):
    sets = [trajectories(folder, name) for name in ('own', 'coarse')]
    counting = Counting(model.config, seconds=2e-3)
    found = evaluate.latency(counting, sets, CPU.device, passes=7, warmup=3)
    assert len(counting.seen) == 10 and 2 <= found < 20, 'milliseconds'
    first = [evaluate.Predictor(model, test, CPU.device).state(evaluate.read(test, range(4), 0, 3, CPU.device))
             [:, 0, 0, 0, 0].tolist() for test in sets]
    assert counting.seen[3:] == [(1, first[i % 2][i // 2]) for i in range(7)], 'every dataset in turn, batch 1'

    class Slow(Counting):
        def forward(self, u):
            self.seconds = 0.1 if len(self.seen) < 2 else 0.
            return super().forward(u)
    assert evaluate.latency(Slow(model.config), sets, CPU.device, passes=5, warmup=2) < 20


def test_a_grid_that_the_papers_scoring_refuses_is_refused_before_the_first_is_scored(model, folder):
    write(folder, 'odd', travelling(1, 7, 12, 1, 0.7), 'test')
    write(folder, 'fine', travelling(1, 7, 32, 1, 0.7), 'test')
    for name in ('odd', 'fine'):
        counting = Counting(model.config)
        with pytest.raises(configs.InputError, match=f'grid of {name}'):
            evaluate.evaluate(counting, [trajectories(folder, n) for n in ('own', name)], CPU, scoring='paper')
        assert not counting.seen


# ------------------------------------------------------------------------------------------------ the matrices T

def test_gains_equal_a_loop_over_samples_and_suffix_products():
    T = torch.randn(3, 5, 4, 4, dtype=torch.float64)
    found = evaluate.gains(T)
    for b in range(3):
        for l in range(5):
            product = np.eye(4)
            for later in T[b, l:].numpy():
                product = later @ product                               # x <- T_l x, T_l first
            for kind, M in (('', T[b, l].numpy()), ('_composite', product)):
                np.testing.assert_allclose(found['forward' + kind][b, l], np.linalg.norm(M, np.inf), rtol=1e-12)
                np.testing.assert_allclose(found['backward' + kind][b, l], np.linalg.norm(M, 1), rtol=1e-12)


def test_gains_by_hand():
    first, last = torch.tensor([[1., 0], [1, 0]]), torch.tensor([[0.5, 0.5], [0, 1]])
    found = evaluate.gains(torch.stack([first, last])[None])            # last @ first = first, rows sum to 1
    assert all(torch.equal(found[name], torch.ones(1, 2)) for name in ('forward', 'forward_composite'))
    assert found['backward'].tolist() == [[2, 1.5]] and found['backward_composite'].tolist() == [[2, 1.5]]
    mixed = torch.stack([0.3 * torch.eye(4) + 0.7 * torch.eye(4).roll(l + 1, 0) for l in range(6)])[None]
    assert all((gain - 1).abs().max() < 1e-6 for gain in evaluate.gains(mixed).values()), 'doubly stochastic'


@torch.no_grad()
def test_the_collected_T_is_what_each_block_computes_for_its_streams():
    model = aotpot.AOTPOT(configs.model('tiny', **{**SMALL, 'depth': 2}, alpha=2.0, streams=3)).eval()
    u = torch.randn(2, 3, 16, 16, 4)
    found, x = evaluate.mappings(model, u), model.aggregate(model.embed(u))[:, None].repeat(1, 3, 1, 1, 1)
    for l, layer in enumerate(model.layers):
        torch.testing.assert_close(found[:, 2 * l], layer.aot1.mappings(x.mean((2, 3)))[2], rtol=1e-4, atol=1e-5)
        x = layer.aot1(x, lambda x: layer.post1(layer.mixer(layer.norm1(x))))
        torch.testing.assert_close(found[:, 2 * l + 1], layer.aot2.mappings(x.mean((2, 3)))[2], rtol=1e-4, atol=1e-5)
        x = layer.aot2(x, lambda x: layer.post2(layer.mlp(layer.norm2(x))))
    assert found.shape == (2, 4, 3, 3) and (found[0] - found[1]).abs().max() > 0.01
    assert not any(module._forward_hooks for module in model.modules()), 'nothing is left behind'


def test_windows_are_spread_over_trajectories_and_then_frames(folder):
    test = trajectories(folder, 'own')                                  # 5 trajectories, 4 windows each
    assert evaluate.spread(test, 3) == [(0, 0), (1, 0), (2, 0)]
    assert evaluate.spread(test, 10) == [(i, start) for start in (0, 2) for i in range(5)]
    assert sorted(evaluate.spread(test, 100)) == [(i, start) for i in range(5) for start in range(4)]


def test_ranks_collect_disjoint_windows_whose_sum_is_the_whole(model, folder):
    test = trajectories(folder, 'own')
    whole = evaluate.kernels(model, test, CPU, 7, batch_size=3)
    u = torch.stack([torch.from_numpy(test.read(i, start, start + 3)) for i, start in evaluate.spread(test, 7)])
    torch.testing.assert_close(whole.float(), evaluate.mappings(model, data.to_model(u, (16, 16), 4)))

    class Rank(distributed.Processes):
        def sum(self, tensor):
            return tensor
    parts = [evaluate.kernels(model, test, Rank(rank, 3, CPU.device), 7) for rank in range(3)]
    assert [int((part != 0).flatten(1).any(1).sum()) for part in parts] == [3, 2, 2]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-7)


def test_the_probe_by_hand():
    features = torch.tensor([0., 2, 10, 12, 0, 0.5, 5.5, 11, 4])[:, None]    # templates 1 and 11, the middle is 6
    labels = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1])
    fit = torch.arange(9) < 4
    assert evaluate.probe(features, labels, fit).tolist() == [[3, 0], [1, 1]]


def test_the_probe_separates_what_is_separable_and_nothing_else():
    random, labels = torch.Generator().manual_seed(0), torch.arange(400) % 4
    features = torch.eye(4)[labels].repeat(1, 3) + 0.05 * torch.randn(400, 12, generator=random)
    fit = torch.arange(400) % 8 < 4
    assert evaluate.probe(features, labels, fit).equal(50 * torch.eye(4).long())
    shuffled = evaluate.probe(features, labels[torch.randperm(400, generator=random)], fit)
    assert 0.15 < shuffled.trace() / shuffled.sum() < 0.35


def test_groups_join_the_families_of_the_paper():
    groups = [evaluate.group(name) for name in configs.PRETRAINING]
    assert len(set(groups)) == 7 and groups.count('ns2d_fno') == 3 and groups.count('ns2d_pdb') == 4


def test_an_unseen_dataset_gets_its_own_template_and_leaves_the_others_alone():
    sets = [SimpleNamespace(name=name, count=4, t_test=1) for name in ('a', 'ns2d_fno_1', 'ns2d_fno_2')]
    values = [0., 0, 1, 7], [4., 4, 5, 5], [6., 6, 6, 6]                 # 0 and 2 make templates 0.5, 4.5 and 6
    T = {test.name: torch.tensor(of).view(4, 1, 1, 1) for test, of in zip(sets, values)}
    alone, rows = (evaluate.probe_table({name: T[name] for name in names}, sets, unseen)[1]
                   for names, unseen in (([*T][:2], ()), ([*T], ['ns2d_fno_2'])))
    assert alone['confusion'] == rows['confusion'] == [[1, 1], [0, 2]] and rows['groups'] == ['a', 'ns2d_fno']
    assert rows['unseen']['groups'] == ['a', 'ns2d_fno', 'ns2d_fno_2'], 'not in the group of its family'
    assert rows['unseen']['confusion'] == [[1, 0, 1], [0, 2, 0], [0, 0, 2]]
    assert rows['unseen']['right'] == {'a': 0.5, 'ns2d_fno': 1, 'ns2d_fno_2': 1}


# ------------------------------------------------------------------------------------------------ without a reference

def test_statistics_of_waves_by_hand():
    x, y = torch.meshgrid(torch.arange(24) * 2 * np.pi / 24, torch.arange(12) * 2 * np.pi / 12, indexing='ij')
    waves = [2 + 3 * torch.cos(5 * x + y), torch.sin(2 * y) - torch.cos(11 * x)]          # 2 on y, half as long, is 4
    names, bands = evaluate.octaves((24, 12))
    found = evaluate.statistics(torch.stack(waves, -1)[None], bands)[0]
    assert names == ['k 1-2', 'k 2-4', 'k 4-'] and bands.sum() == 24 * 12 - 1, 'all but the mean, once'
    torch.testing.assert_close(found[:2], torch.tensor([[4 + 4.5, 1.], [2., 0.]]))
    torch.testing.assert_close(found[2:4, 0], torch.tensor([-1., 5.]))
    torch.testing.assert_close(found[4:], torch.tensor([[0, 0], [0, 0], [4.5, 1.]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(bands.view(24, 12, 3)[[0, 1, 1, 3, 4], [0, 0, 1, 1, 0]].argmax(-1),
                               torch.tensor([0, 0, 1, 1, 2]))               # |k| = 0, 1, 2.2, 3.6, 4: two a step of y


def test_a_sample_is_outside_from_the_first_step_past_the_margin():
    within = torch.tensor([[1., 0, -2, 1, 2], [4., 0, -1, 2, 4]], dtype=torch.float64)[:, :, None]     # (2, M, 1)
    found = within.mean(0).expand(5, 6, 5, 1).clone()
    found[2:, 0, 0], found[:, 1, 0], found[3, 2, 4] = 4.5, 4.3, math.nan    # energy: 4 and 10 % of it
    found[4, 3, 1], found[4, 4, 1], found[1:, 5, 4] = 0.19, -0.21, 1.5      # mean: 10 % of the largest rms, 2
    assert evaluate.outside(found, within).tolist() == [3, 0, 4, 0, 5, 2]


@torch.no_grad()
def test_the_free_rollout_equals_a_slow_loop_on_the_native_grid(model, folder):
    for name in ('own', 'coarse'):
        test = trajectories(folder, name)
        found, bands = evaluate.free_rollout(model, test, CPU, 6, batch_size=3), evaluate.octaves(test.space)[1].numpy()
        for i in (0, 3):
            fields = slow_rollout(model, torch.from_numpy(test.read(i, 0, 3)), test.evolving, 6).double().numpy()
            power = np.abs(np.fft.fft2(fields, axes=(1, 2))) ** 2 / test.space[0] ** 4
            expected = [(fields ** 2).mean((1, 2)), *(getattr(fields, kind)((1, 2)) for kind in ('mean', 'min', 'max')),
                        *(power.reshape(6, -1, 1, len(test.evolving)) * bands[..., None]).sum(1).transpose(1, 0, 2)]
            np.testing.assert_allclose(found[:, i], np.stack(expected, 1), rtol=1e-3, atol=1e-6)
        u = torch.from_numpy(test.read(2, 0, test.frames))[..., test.evolving]
        assert torch.equal(evaluate.split_statistics(test, CPU)[2].float(), evaluate.statistics(u, torch.tensor(bands)))


# ------------------------------------------------------------------------------------------------ training curves

def test_spikes_are_counted_against_the_ten_lines_before(tmp_path):
    losses = [1.] * 9 + [3., 2.1, 1.9, None, 2.1, 4.1, 1.]          # no spike before there are ten lines; None: skipped
    log = [{'step': 20 * i, 'loss': loss, 'grad_norm': None if i == 3 else i, 'skipped': int(i > 12), 'lr': 1}
           for i, loss in enumerate(losses, start=1)]
    (tmp_path / 'log.jsonl').write_text('\n'.join(map(json.dumps, log)))
    found = evaluate.curve(tmp_path / 'log.jsonl')
    assert found['spikes'] == [220, 280, 300] and found['loss'][12] is None and found['step'][-1] == 320
    _, rows = evaluate.curves_table({'run': found})
    assert rows['run'] == {'steps': 320, 'final loss': 1, 'lowest': 1, 'skipped': 1, 'spikes': 3,
                           'largest gradient': 16}


# ------------------------------------------------------------------------------------------------ the command

def saved(model, folder, place, step=7, **run):
    """A checkpoint of `model` in folder/out."""
    path = folder / 'out' / place
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({'model': model.state_dict(), 'step': step, 'config': {
        'model': dataclasses.asdict(model.config), 'run': {'data': str(folder), **run}}}, path)
    return path


@pytest.fixture
def checkpoint(model, folder):
    return saved(model, folder, 'small/last.pt')


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
    summary = json.loads((folder / 'scores.json').read_text())
    scores = summary['datasets']
    assert summary['scoring'] == 'native' and 'L2RE, native scoring' in printed and 'nRMSE' not in printed
    for name in ('own', 'coarse'):
        value = evaluate.score(model, trajectories(folder, name), CPU)['rollout'].mean().item()
        assert abs(scores[name]['rollout']['mean'] / value - 1) < 1e-9 and f'{value:.4f}' in printed


def test_scoring_and_metrics_have_a_table_and_json(checkpoint, folder, monkeypatch, capsys):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--scoring', 'paper', '--metrics', '--json',
             folder / 'paper.json']
    code, _, printed = main(flags, monkeypatch, capsys)
    summary = json.loads((folder / 'paper.json').read_text())
    assert code == 0 and summary['scoring'] == 'paper' and 'native scoring' not in printed
    assert 'L2RE, paper scoring' in printed and 'rollout, paper scoring' in printed
    scores = evaluate.score(aotpot.load(checkpoint), trajectories(folder, 'coarse'), CPU, scoring='paper')
    line = printed.splitlines()[-2].split()
    kinds = 'nrmse', 'nrmse_persistence', 'vrmse', 'vrmse_persistence'
    assert line == ['coarse', *(f'{scores[kind].mean():.4f}' for kind in kinds)]
    for kind in kinds:
        np.testing.assert_allclose(summary['datasets']['coarse'][kind]['samples'], scores[kind], rtol=1e-6)


def test_timing_has_a_table_and_json(checkpoint, folder, monkeypatch, capsys):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--timing', '3', '--json', folder / 'time.json']
    code, _, printed = main(flags, monkeypatch, capsys)
    found = json.loads((folder / 'time.json').read_text())['timing']
    assert code == 0 and 'on CPU' in printed and f'{found["eager"]:.3f} ms' in printed and 'compiled' not in found
    assert found['eager'] > 0 and found['passes'] == 3 and found['paper']['tiny'] == 5.491 and '5.491 ms' in printed


def numbers(nest):
    """All numbers in what json.loads gave, in order, null as NaN."""
    if isinstance(nest, (dict, list)):
        return [x for item in (nest.values() if isinstance(nest, dict) else nest) for x in numbers(item)]
    return [] if isinstance(nest, str) else [math.nan if nest is None else nest]


def test_two_processes_give_the_numbers_of_one(checkpoint, model, folder, monkeypatch, capsys):
    """Of two checkpoints, with a reference and without; test_train.py has the table of scores."""
    write(folder, 'own', travelling(3, 5, 16, 3, 0.4), 'train', channels=('u', 'c', 'v'), static=('c',))
    write(folder, 'coarse', travelling(2, 13, 8, 1, 0.7), 'test')                   # long enough for a reference
    flags = ['--checkpoint', str(checkpoint), str(saved(model, folder, 'other/last.pt', step=8)), '--rollout', '9',
             '--datasets', 'coarse', 'own', '--device', 'cpu', '--json']
    assert main([*flags, folder / 'one.json'], monkeypatch, capsys)[0] == 0
    two = run('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', str(ROOT / 'evaluate.py'), *flags,
              str(folder / 'two.json'))
    assert two.returncode == 0, two.stderr
    one, two = (numbers(json.loads((folder / f'{n}.json').read_text())) for n in ('one', 'two'))
    assert len(one) > 80
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


@pytest.fixture
def three(model, folder):
    """Three checkpoints: two steps of one run, and another network; they share 'own', the last knows it alone."""
    torch.manual_seed(5)
    other = aotpot.AOTPOT(configs.model('tiny', **SMALL, residual='plain'))
    both = dict(datasets=('coarse', 'own'))
    return [saved(model, folder, 'aot/step9.pt', 9, **both), saved(model, folder, 'aot/step10.pt', 10, **both),
            saved(other, folder, 'plain/last.pt', datasets=('own',))]


def several(paths, flags, folder, monkeypatch, capsys):
    """The command on several checkpoints: what it printed, line by line, and its JSON."""
    code, error, printed = main(['--checkpoint', *paths, *flags, '--device', 'cpu', '--json', folder / 'several.json'],
                                monkeypatch, capsys)
    assert code == 0, error
    return printed.splitlines(), json.loads((folder / 'several.json').read_text())


def test_several_checkpoints_stand_side_by_side_with_the_numbers_of_each_alone(three, folder, monkeypatch, capsys):
    lines, found = several(three, ['--metrics', '--datasets', 'own', 'coarse'], folder, monkeypatch, capsys)
    assert list(found['models']) == ['aot/step9', 'aot/step10', 'plain'] and set(found) == {'models'}
    for path, name in zip(three, found['models']):
        _, alone = several([path], ['--datasets', 'own', 'coarse'], folder, monkeypatch, capsys)
        assert alone == found['models'][name] and alone['checkpoint'] == str(path)
    tables = [line for line in lines if line.split()[0] in ('own', 'coarse')]
    kinds = [(kind, name) for kind in ('rollout', 'step', 'nrmse', 'vrmse') for name in ('own', 'coarse')]
    assert len(tables) == len(kinds)
    for line, (kind, name) in zip(tables, kinds):
        rows = [model['datasets'][name] for model in found['models'].values()]
        values = [*(row[kind]['mean'] for row in rows), rows[0][kind + '_persistence']['mean']]
        assert line.split()[1:] == [f'{value:.4f}' + '*' * (value == min(values)) for value in values]


def test_the_lowest_of_each_row_or_column_is_marked():
    cells = {'a': {'x': 1., 'y': 5.}, 'b': {'x': 2., 'y': math.inf}, 'c': {'x': 1., 'y': 0.5}}
    stars = {best: [[cell.endswith('*') for cell in line.split()[1:]] for line in
                    evaluate.side_by_side('t', cells, best, '.1f')[1:]] for best in ('row', 'column', '')}
    assert stars['row'] == [[True, False], [True, False], [False, True]]
    assert stars['column'] == [[True, False], [False, False], [True, True]] and not any(map(any, stars['']))
    diverged = {'a': {'x': math.inf, 'y': math.nan}, 'b': {'x': math.inf, 'y': 2.}}
    assert [line.count('*') for line in evaluate.side_by_side('t', diverged, 'column')] == [0, 0, 1]


def test_large_numbers_stay_apart_in_every_table():
    scores = {'frames': 3, **dict.fromkeys(('rollout', 'step', 'nrmse', 'vrmse'), torch.tensor([1e30]))}
    scores |= {f'{kind}_persistence': torch.tensor([9999.]) for kind in ('rollout', 'step', 'nrmse', 'vrmse')}
    line, other = (of({'a': scores})[-1].split() for of in (evaluate.table, evaluate.metrics_table))
    assert line == ['a', '1', '3', *['1.00e+30', '9999.0000', '0.0x'] * 2]
    assert other == ['a', *['1.00e+30', '9999.0000'] * 2]
    curves = dict.fromkeys(('step', 'full', 'step_persistence'), torch.full((50, 1), 12345., dtype=torch.float64))
    assert evaluate.rollout_table(curves, 50)[0][1].split()[-3:] == ['1.23e+04', '1.23e+04', '1.0x']
    assert evaluate.side_by_side('t', {'a': {'x': -3e6, 'y': 9999.}})[1].split() == ['a', '-3.00e+06', '9999.0000']


def test_names_are_as_short_as_they_can_be_and_unique():
    paths = [Path(path) for path in ('a/x/last.pt', 'b/x/last.pt', 'a/y/s1.pt', 'a/y/s2.pt', 'a/z/last.pt')]
    assert evaluate.names_of(paths) == ['a/x/last.pt', 'b/x/last.pt', 'y/s1', 'y/s2', 'z']
    assert evaluate.names_of(paths[:1]) == ['x'] and evaluate.names_of([Path('last.pt')]) == [Path.cwd().name]


def test_the_scaling_score_is_100_where_every_error_is_a_hundredth(three, folder, monkeypatch, capsys):
    assert evaluate.scaling([1e-2] * 3) == pytest.approx(100) == evaluate.scaling([1e-1, 1e-3])
    assert evaluate.scaling([1.]) == 0 and evaluate.scaling([math.inf, 0.1]) == -math.inf
    lines, found = several(three, ['--scaling', '--datasets', 'own', 'coarse'], folder, monkeypatch, capsys)
    for path, (name, row) in zip(three, found['scaling'].items()):
        errors = [of['rollout']['mean'] for of in found['models'][name]['datasets'].values()]
        network = aotpot.load(path)
        assert row['score'] == pytest.approx(-50 * np.log10(errors).mean()) and len(errors) == 2
        assert row['parameters'] == aotpot.parameters(network) and row['residual'] == network.config.residual
        assert any(line.startswith(f'{name}, {row["residual"]}') and f'{row["score"]:.4g}' in line for line in lines)


def test_heterogeneity_is_scored_on_what_all_were_trained_on(three, folder, monkeypatch, capsys):
    lines, found = several(three, ['--heterogeneity'], folder, monkeypatch, capsys)
    error = evaluate.score(aotpot.load(three[2]), trajectories(folder, 'own'), CPU)['rollout'].mean().item()
    assert all(list(row) == ['own', 'mean'] for row in found['heterogeneity'].values())
    assert found['heterogeneity']['plain']['own'] == pytest.approx(error) and lines[-1].split()[:3] == \
        ['plain', '(1', 'datasets)']
    _, found = several(three, ['--heterogeneity', '--datasets', 'coarse', 'own'], folder, monkeypatch, capsys)
    assert all(row['mean'] == pytest.approx((row['own'] + row['coarse']) / 2) != row['own']
               for row in found['heterogeneity'].values())


def test_rollouts_have_a_reference_where_it_is_long_enough_and_else_the_training(model, three, folder, monkeypatch,
                                                                                capsys):
    values = travelling(3, 5, 8, 1, 0.4) * np.array([1., 2, 4, 1, 2])[:, None, None, None]
    write(folder, 'coarse', values, 'train')
    lines, found = several(three, ['--rollout', '5', '--datasets', 'own', 'coarse', '--samples', '2'], folder,
                           monkeypatch, capsys)
    assert any('coarse: no reference of 5 steps; ' in line for line in lines) and 'own:' in lines
    known, free = (found['models']['aot/step9']['rollout'][name] for name in ('own', 'coarse'))
    cells = [line.replace('*', '').split() for line in lines]
    assert ['L2RE', 'at', 'step', '5'] in cells and ['persistence', f'{known["step_persistence"]["5"]:.5f}'] in cells
    pair = data.Trajectories(folder, 'own', 'test', 3, 4, rows=range(2))
    np.testing.assert_allclose(known['curve'], evaluate.rollout_curve(model, pair, CPU, 5)['step'].mean(1), rtol=1e-5)
    pair = data.Trajectories(folder, 'coarse', 'test', 3, 4, rows=range(2))
    expected = evaluate.free_rollout(model, pair, CPU, 5)
    energy, mean = free['statistics']['0']['energy'], free['statistics']['0']['mean']
    np.testing.assert_allclose([energy['step 5'], mean['step 5']], expected[4, :, :2, 0].mean(0), rtol=1e-5)
    squares = np.float32(values).astype(float) ** 2
    np.testing.assert_allclose([energy['from'], energy['to']], [extreme(squares.mean((2, 3))) for extreme in
                                                                (np.min, np.max)], rtol=1e-5)
    assert free['first_step_outside'] == [1, 1] and 'outside the training range: 2 of 2 samples, the first at step 1' \
        in lines, 'an untrained network'


def test_the_probe_over_the_steps_of_a_run_is_the_table_of_emergence(three, folder, monkeypatch, capsys):
    write(folder, 'new', travelling(4, 7, 8, 2, 0.3, scale=3), 'test')
    flags = ['--probe', '--gains', '--samples', '6']
    lines, found = several([three[1], three[0]], [*flags, '--unseen', 'new'], folder, monkeypatch, capsys)
    _, alone = several(three[:1], flags, folder, monkeypatch, capsys)
    assert list(found['emergence']) == ['aot/step9', 'aot/step10'], 'in the order of the steps'
    own, row = found['models']['aot/step9'], found['emergence']['aot/step9']
    assert own['gains'] == alone['gains'] and own['probe']['confusion'] == alone['probe']['confusion']
    assert row['mean'] == alone['probe']['accuracy'] and row['own'] == alone['probe']['right']['own']
    unseen = own['probe']['unseen']
    assert row['new, unseen'] == unseen['right']['new'] and len(unseen['confusion']) == 3
    assert lines[-2].split() == ['aot/step9', *(f'{value:.3f}' for value in row.values())]


def test_curves_are_those_of_each_run_once(three, folder, monkeypatch, capsys):
    for run_, loss in (('aot', 0.5), ('plain', 0.25)):
        (folder / 'out' / run_ / 'log.jsonl').write_text(
            json.dumps({'step': 20, 'loss': loss, 'grad_norm': 2., 'skipped': 1}))
    lines, found = several(three, ['--curves'], folder, monkeypatch, capsys)
    assert list(found['curves']) == ['aot', 'plain'] and found['curves']['plain']['final loss'] == 0.25
    assert lines[-2].split() == ['aot', '20', '0.5', '0.5', '1', '0', '2']


@pytest.mark.parametrize('which, flags, words', [
    ((0, 0), [], 'step9.pt: given twice'), ((0, 2), [], 'aot and plain differ in datasets, coarse own and own; say'),
    ((0, 3), ['--datasets', 'own'], 'differ in --frames, 3 and 4'), ((0, 4), [], 'differ in data, '),
    ((0, 5), ['--datasets', 'own', '--scoring', 'paper'], 'differ in --resolution, 16x16 and 32x32'),
    ((2, 4), ['--heterogeneity', '--data', '.'], 'no dataset that all the checkpoints were trained on'),
    ((0, 2), ['--probe'], 'plain/last.pt has no T to look at'), ((0,), ['--unseen', 'own'], '--unseen is an option of'),
    ((0,), ['--probe', '--unseen', 'own'], '--unseen own: '), ((0,), ['--curves'], 'no '),
    ((0,), ['--probe', '--datasets', 'new', '--unseen', 'new'], 'no other dataset is left'),
    ((0,), ['--rollout', '5', '--datasets', 'steady'], 'steady is steady'),
    ((0,), ['--datasets', 'own', 'deep'], 'deep/test.h5: 3 dimensions of space, '),
    ((0,), ['--probe', '--unseen', 'nwe'], '--unseen nwe: no '),
    ((0,), ['--rollout', '5', '--datasets', 'coarse'], 'coarse/train.h5: no such file'),
    ((0,), ['--scaling', '--curves'], 'not allowed with'), ((6,), ['--curves'], 'not a log of train.py'),
    ((7,), ['--curves'], 'holds no loss yet')])
def test_what_cannot_be_compared_is_one_line(three, model, folder, monkeypatch, capsys, which, flags, words):
    monkeypatch.chdir(folder)
    write(folder, 'new', travelling(2, 7, 8, 1, 0.3), 'test')
    write(folder, 'deep', np.random.rand(1, 7, 8, 8, 8, 1), 'test')
    write(folder, 'steady', travelling(2, 2, 8, 1, 0.3), 'test')
    odd = [aotpot.AOTPOT(configs.model('tiny', **{**SMALL, **size})) for size in (dict(frames=4), dict(resolution=32))]
    if 'steady' in flags:
        odd[0] = aotpot.AOTPOT(configs.model('tiny', **{**SMALL, 'frames': 1}))
        three[0] = saved(odd[0], folder, 'one/last.pt')
    three += [saved(odd[0], folder, 'four/last.pt'), saved(model, folder, 'far/last.pt', data='far', datasets=('new',)),
              saved(odd[1], folder, 'fine/last.pt'), saved(model, folder, 'bad/last.pt'),
              saved(model, folder, 'empty/last.pt')]
    (folder / 'out/bad/log.jsonl').write_text('{"step": 1')
    (folder / 'out/empty/log.jsonl').write_text('{"step": 1, "loss": null, "grad_norm": null, "skipped": 1}')
    code, error, _ = main(['--checkpoint', *(three[i] for i in which), '--device', 'cpu', *flags], monkeypatch, capsys)
    assert code == 2 and error.count('\n') == 1 and words in error


def test_gains_and_probe_print_and_write_what_the_functions_give(model, checkpoint, folder, monkeypatch, capsys):
    flags = ['--checkpoint', checkpoint, '--gains', '--probe', '--samples', '6', '--device', 'cpu', '--json',
             folder / 'T.json']
    code, _, printed = main(flags, monkeypatch, capsys)
    written = json.loads((folder / 'T.json').read_text())
    T = [evaluate.kernels(model, trajectories(folder, name), CPU, 6) for name in ('coarse', 'own')]
    gain = evaluate.gains(torch.cat(T))['backward_composite']
    np.testing.assert_allclose(written['gains']['backward_composite']['mean'], gain.mean(0), rtol=1e-9)
    np.testing.assert_allclose(written['gains']['backward_composite']['max'], gain.amax(0), rtol=1e-9)
    fit = torch.tensor([True, False, True, False, True, False, True, False, True, False, True, True])
    confusion = evaluate.probe(torch.cat(T), torch.arange(12) // 6, fit)     # of 'own' (0, 2) follows (4, 0)
    np.testing.assert_allclose(written['probe']['mean']['own'], T[1].mean(0), rtol=1e-9)
    assert code == 0 and written['probe']['confusion'] == confusion.tolist() and 'datasets' not in written
    assert f'{gain.amax(0)[0]:.4f}' in printed and f'accuracy {written["probe"]["accuracy"]:.3f}' in printed
    assert written['probe']['accuracy'] == pytest.approx((confusion.diagonal() / confusion.sum(1)).mean().item())


@pytest.mark.parametrize('flags, options, words', [
    (['--gains'], dict(residual='plain'), 'no T to look at, it was made with --residual plain'),
    (['--probe'], dict(streams=1), 'no T to look at, it was made with --streams 1'),
    (['--probe'], dict(ablate='dT'), 'no T to look at, it was made with --ablate dT'),
    (['--probe', '--samples', '1'], {}, 'one trajectory'), (['--probe', '--datasets', 'own'], {}, 'two groups')])
def test_what_cannot_be_probed_is_one_line(checkpoint, folder, monkeypatch, capsys, flags, options, words):
    model = aotpot.AOTPOT(configs.model('tiny', **SMALL, **options))
    saved = {**torch.load(checkpoint), 'model': model.state_dict()}
    torch.save({**saved, 'config': {**saved['config'], 'model': dataclasses.asdict(model.config)}}, checkpoint)
    code, error, _ = main(['--checkpoint', checkpoint, '--device', 'cpu', *flags], monkeypatch, capsys)
    assert code == 2 and error.count('\n') == 1 and words in error


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
    longer = aotpot.AOTPOT(configs.model('tiny', **{**SMALL, 'frames': 4}))         # it needs a frame more
    code, _, printed = main(['--checkpoint', saved(longer, folder, 'four/last.pt'), *flags[2:-2]], monkeypatch, capsys)
    assert code == 0 and 'making 2 reference trajectories of 26 frames' in printed


def test_a_short_rollout_has_a_reference_too_and_one_that_cannot_be_written_is_one_line(checkpoint, folder, monkeypatch,
                                                                                    capsys):
    flags = ['--checkpoint', checkpoint, '--rollout', '2', '--samples', '1', '--device', 'cpu']
    code, _, printed = main(flags, monkeypatch, capsys)
    assert code == 0 and 'making 1 reference trajectories of 11 frames' in printed, 'the fewest that the solver makes'
    (folder / 'ns2d_fno_1e-3').rename(folder / 'moved')
    (folder / 'ns2d_fno_1e-3').write_bytes(b'not a folder')
    code, error, _ = main(flags, monkeypatch, capsys)
    assert code == 2 and error.splitlines()[-1].startswith(f'error: --rollout: cannot write {folder}/ns2d_fno_1e-3/')


@pytest.mark.parametrize('flags, words', [
    (['--checkpoint', 'none.pt'], 'none.pt: there is no such checkpoint'), (['--data', 'none'], '--data none: no such folder'),
    (['--datasets', 'cors'], 'did you mean'), (['--rollout', '-1'], '--rollout -1'), (['--sample', '3'], '--samples'),
    (['--batch_size', '0'], '--batch_size 0'), (['--timing', '-3'], '--timing -3'),
    (['--timing', '--rollout', '9'], 'not allowed with'), (['--json', '.'], '--json .: a folder; name a file'),
    (['--json', 'own/test.h5/a.json'], '--json own/test.h5: no folder to write into'),
    (['--samples', '3'], '--samples is an option of --rollout, --gains, --probe'),
    (['--no-compile'], '--compile is an option of --timing'),
    (['--scaling', '--metrics'], '--metrics is a table of its own'),
    (['--rollout', '9', '--scoring', 'paper'], '--scoring paper is for the scores'),
    (['--scoring', 'dpot'], "'native', 'paper'"),
    (['--scoring', 'paper', '--datasets', 'own', 'odd'], 'grid of odd, 12x12, does not divide the model grid, 16x16')])
def test_bad_input_is_one_line_and_exit_code_2(checkpoint, folder, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(folder)
    write(folder, 'odd', travelling(1, 7, 12, 1, 0.7), 'test')
    code, error, _ = main(flags, monkeypatch, capsys)
    assert code == 2 and error.count('\n') == 1 and words in error


def test_no_checkpoint_at_all_says_what_to_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, error, _ = main([], monkeypatch, capsys)
    assert code == 2 and 'run: python train.py' in error


def test_the_accuracy_of_a_group_is_the_share_of_its_own_windows():
    sets = [SimpleNamespace(name=name, count=4, t_test=1) for name in 'ab']
    T = {'a': torch.tensor([0.0, 0.0, 0.0, 9.0]), 'b': torch.full((4,), 10.0)}      # one of the two of a is taken for b
    _, rows = evaluate.probe_table({name: values.view(4, 1, 1, 1) for name, values in T.items()}, sets)
    assert rows['confusion'] == [[1, 1], [0, 2]] and rows['accuracy'] == pytest.approx((0.5 + 1) / 2)


# ------------------------------------------------------------------------------------------------ figures

@pytest.fixture
def plt():
    for name in ('matplotlib', 'sklearn'):
        pytest.importorskip(name, reason=f'the figures need {name}')
    yield evaluate.pyplot()
    evaluate.pyplot().close('all')


def lines(ax, label=None):
    """The values (points,) of the lines of an axis, or of those with a label."""
    return [np.asarray(line.get_ydata(), float) for line in ax.lines if label in (None, line.get_label())]


def test_without_matplotlib_one_line_says_what_to_install_before_any_work(checkpoint, folder):
    code = """if True:
        import sys
        finders = sys.meta_path[:]

        class Without:
            def find_spec(self, name, *where):
                found = (finder.find_spec(name, *where) for finder in finders)
                return next(filter(None, found), None) if name.partition('.')[0] != 'matplotlib' else None
        sys.meta_path[:] = [Without()]
        import configs, evaluate
        configs.cli(evaluate.main)"""
    found = run('-c', code, '--checkpoint', str(checkpoint), '--gains', '--figures', str(folder / 'figures'),
                cwd=ROOT)
    assert found.returncode == 2 and found.stdout == '' and not (folder / 'figures').exists()
    assert found.stderr == 'error: --figures needs matplotlib and scikit-learn: pip install matplotlib scikit-learn\n'


def test_a_model_has_one_colour_in_all_figures(plt):
    colours = [[colour for _, _, colour in evaluate.coloured(dict.fromkeys(range(n)))] for n in (2, 3, 12)]
    assert colours[0] == colours[1][:2] and [len(set(few)) for few in colours] == [2, 3, 12]


def test_the_rollout_figure_shows_median_and_quartiles_and_a_diverged_sample_is_the_worst(plt):
    error = torch.rand(30, 5, dtype=torch.float64)
    error[20:, 1], error[25:, 2] = math.nan, math.inf
    curves = {'step': error, 'step_persistence': 2 * error[:, :4]}
    ax, = evaluate.rollout_figure({'one': {**curves, 'step': error + 1}, 'two': curves}).axes
    worst = np.where(np.isnan(error.numpy()), np.inf, error.numpy())
    np.testing.assert_allclose(lines(ax, 'two')[0], np.sort(worst)[:, 2])
    np.testing.assert_allclose(lines(ax, 'one')[0], 1 + np.sort(worst)[:, 2])
    np.testing.assert_allclose(lines(ax, 'persistence')[0][:20], np.median(2 * worst[:20, :4], 1))
    _, below = evaluate.pyplot().subplots()
    evaluate.band(below, torch.tensor([[1., 2.], [-math.inf, -math.inf], [3., 4.]]), 'grey', '')
    assert below.get_ylim()[0] > 0, 'what falls without bound is a gap too'
    shade, quartiles = ax.collections[1].get_paths()[0].vertices[:, 1], np.sort(worst)[:25, [1, 3]]
    np.testing.assert_allclose([shade.min(), shade.max()], [quartiles.min(), quartiles.max()])
    assert ax.get_yscale() == 'log' and ax.lines[-1].get_color() == 'grey'
    assert [ax.lines[i].get_color() for i in (0, 1)] == [*evaluate.COLOURS[:2]]


def test_the_figure_without_a_reference_shades_the_range_of_the_training(plt):
    found = torch.rand(12, 3, 6, 2, dtype=torch.float64)
    within, names = torch.stack([found.amin((0, 1)) / 2, found.amax((0, 1)) * 2]), [*'abcd', 'k 1-2', 'k 2-']
    found[5:, :, 1, 1] = 1e9
    figure = evaluate.free_figure({'one': found, 'two': found / 2}, within, names, ['u', 'v'], 'own')
    axes = np.array(figure.axes).reshape(2, 4)
    for c in range(2):
        for ax, statistics in zip(axes[c], ([0], [1], [2, 3])):
            shown = [(patch.get_y(), patch.get_y() + patch.get_height()) for patch in ax.patches]
            np.testing.assert_allclose(shown, within[:, statistics, c].T)
            for m, line in zip(statistics, lines(ax, 'one')):
                np.testing.assert_allclose(line, found[:, :, m, c].median(1).values)
        last = found[-1, :, 4:, c].median(0).values
        np.testing.assert_allclose(lines(axes[c, 3])[1::2], torch.stack([last, last / 2]))
        np.testing.assert_allclose(lines(axes[c, 3])[0], found[0, :, 4:, c].median(0).values)
    assert 'no reference' in figure.get_suptitle() and axes[1, 1].get_ylim()[1] <= 3 * within[1, 2:4, 1].max()


def test_the_probe_figure_has_a_dot_a_window_and_per_cents_of_each_row(plt):
    T = {name: 5. * g + torch.rand(12, 2, 3, 3, dtype=torch.float64) for g, name in enumerate(
        ('ns2d_fno_1e-3', 'ns2d_fno_1e-4', 'swe_pdb', 'wave_gauss'))}
    rows = {'groups': ['ns2d_fno', 'swe_pdb'], 'confusion': [[3, 1], [0, 2]], 'unseen': {
        'right': {'wave_gauss': 1.}, 'groups': ['ns2d_fno', 'swe_pdb', 'wave_gauss'],
        'confusion': [[3, 1, 0], [0, 2, 0], [4, 0, 4]]}}
    trained = {name: T[name] for name in list(T)[:3]}, {name: rows[name] for name in ('groups', 'confusion')}
    figure = evaluate.probe_figure({'with': (T, rows), 'without': trained})
    left, right, left_without, right_without = figure.axes
    assert [len(dots.get_offsets()) for dots in left.collections] == [24, 12, 12]
    assert [len(dots.get_offsets()) for dots in left_without.collections] == [24, 12]
    np.testing.assert_allclose(right.images[0].get_array(), [[75, 25, 0], [0, 100, 0], [50, 0, 50]])
    assert [text.get_text() for text in right_without.texts] == ['75', '25', '0', '100']
    paths = [len(dots.get_paths()[0].vertices) for dots in left.collections]
    assert paths[0] == paths[1] > 4 == paths[2], 'crosses for what was not trained on'
    again = evaluate.probe_figure({'with': (T, rows)}).axes[0]
    for one, other in zip(left.collections, again.collections):
        assert np.array_equal(one.get_offsets(), other.get_offsets())


def test_the_heat_maps_of_T_are_in_their_places_on_one_scale(plt):
    T, deeper = torch.rand(3, 4, 2, 2), torch.rand(3, 6, 2, 2) + 1
    models = {'small': dict(zip('abc', T.tolist())), 'large': dict(zip('abc', deeper.tolist()))}
    figure = evaluate.kernels_figure(models)
    images = [ax.images[0] for ax in figure.axes[:2]]
    for image, values in zip(images, (T, deeper)):
        shown = np.ma.filled(image.get_array(), np.nan)
        assert np.isnan(shown[2::3]).all() and np.isnan(shown[:, 2::3]).all()
        for r in range(3):
            for l in range(values.shape[1]):
                np.testing.assert_allclose(shown[3 * r:3 * r + 2, 3 * l:3 * l + 2], values[r, l], rtol=1e-6)
        assert image.get_clim() == (T.min(), deeper.max())
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [*'abc']


def test_the_figures_of_gains_scaling_and_training_show_their_numbers(plt):
    rows = evaluate.gains_table(evaluate.gains(torch.rand(7, 4, 3, 3)))[1]
    figure = evaluate.gains_figure({'one': rows, 'two': rows})
    for ax, kind in zip(figure.axes, ('', '', '_composite', '_composite')):
        np.testing.assert_allclose(lines(ax), [rows[way + kind][of] for way in ('forward', 'backward')
                                               for of in ('mean', 'max')])
    keys = 'residual', 'parameters', 'score'
    table = {'b': ('aot', 200, 40), 'a': ('aot', 100, 30), 'c': ('plain', 9, 20)}
    models = {name: dict(zip(keys, row)) for name, row in table.items()}
    ax, = evaluate.scaling_figure(models, 'native scoring').axes
    assert [list(line) for line in lines(ax)] == [[30, 40], [20]] and ax.get_xscale() == 'log'
    assert [dot.get_offsets().tolist() for dot in ax.collections] == [[[200, 40]], [[100, 30]], [[9, 20]]]
    run = {'step': [20, 40, 60, 80], 'loss': [1., None, 9., 1.], 'grad_norm': [2., None, 3., 4.],
           'skipped': [0, 20, 20, 21], 'spikes': [60]}
    left, right = evaluate.curves_figure({'run': run}).axes
    loss, spikes, skipped = left.lines
    np.testing.assert_array_equal(loss.get_ydata(), [1, np.nan, 9, 1])
    np.testing.assert_array_equal(lines(right)[0], [2, np.nan, 3, 4])
    assert spikes.get_xydata().tolist() == [[60, 9]] and list(skipped.get_xdata()) == [40, 80]


@pytest.mark.parametrize('signed', [True, False])
def test_truth_and_predictions_share_a_scale_and_errors_have_another(plt, signed):
    truth = torch.rand(6, 8, 12) - (0.3 if signed else 0)
    truth[0, 0, 0] = -0.01 if not signed else truth[0, 0, 0]                # a rounding error is no sign
    models = {'one': truth + torch.rand(6, 8, 12), 'two': truth - 0.5 * torch.rand(6, 8, 12)}
    figure = evaluate.fields_figure(truth, models, [2, 5, 6], 'h')
    axes = np.array(figure.axes[:15]).reshape(5, 3)
    shown = [truth, *models.values(), *((u - truth).abs() for u in models.values())]
    for row, u in zip(axes, shown):
        for ax, step in zip(row, (2, 5, 6)):
            np.testing.assert_array_equal(ax.images[0].get_array(), u[step - 1].T)
            assert ax.images[0].origin == 'lower'
    limits = np.array([[ax.images[0].get_clim() for ax in row] for row in axes])
    bound = truth.abs().max()
    assert (limits[:3] == ([-bound, bound] if signed else [truth.min(), truth.max()])).all()
    assert (limits[3:] == [0, torch.stack(shown[3:]).max()]).all()
    assert axes[0, 0].images[0].get_cmap().name == axes[2, 2].images[0].get_cmap().name == (
        'RdBu_r' if signed else 'viridis')
    assert [ax.get_title() for ax in axes[0]] == ['step 2', 'step 5', 'step 6'] and axes[1, 0].get_ylabel() == 'one'
    assert [ax.get_ylabel() for ax in figure.axes[15:]] == ['h', '|error| of h']
    models['one'][:] = math.inf
    alone = evaluate.fields_figure(truth, models, [3], 'h')
    assert [ax.get_title() for ax in alone.axes[:5]] == ['truth', 'one', 'two', '|error|\none', '|error|\ntwo']
    assert alone.axes[4].images[0].get_clim() == (0, shown[4].max()), 'what is not finite sets no scale'


@torch.no_grad()
def test_a_traced_channel_is_that_of_the_slow_rollout_and_of_the_middle_slice(model, folder):
    test = trajectories(folder, 'own')
    truth, predicted = evaluate.trace(model, test, 3, 'v', 4, CPU.device)
    expected = slow_rollout(model, torch.from_numpy(test.read(3, 0, 7)), test.evolving, 4)[..., 1]
    torch.testing.assert_close(predicted, expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(truth, test.read(3, 3, 7)[..., 2])
    write(folder, 'deep', np.random.rand(1, 6, 8, 8, 8, 1), 'test')
    solid = aotpot.AOTPOT(configs.model('tiny', **{**SMALL, 'resolution': 8}, dims=3)).eval()
    deep = data.Trajectories(folder, 'deep', 'test', 3, 4)
    truth, predicted = evaluate.trace(solid, deep, 0, '0', 2, CPU.device)
    assert predicted.shape == (2, 8, 8) and np.array_equal(truth, deep.read(0, 3, 5)[..., 4, 0])


def pictures(folder):
    """{name: pillow's Image} of all files of a folder."""
    from PIL import Image
    return {path.name: Image.open(path) for path in sorted(folder.iterdir())}


def test_fields_are_drawn_of_all_models_as_png_and_gif(plt, checkpoint, folder, monkeypatch, capsys):
    other = folder / 'out/other/last.pt'
    other.parent.mkdir()
    other.write_bytes(checkpoint.read_bytes())
    flags = ['--checkpoint', checkpoint, other, '--device', 'cpu', '--figures', folder / 'new/figures', '--fields',
             '--gif', '--datasets', 'own', '--channel', 'v', '--steps', '1', '3', '--trajectory', '2']
    code, _, printed = main(flags, monkeypatch, capsys)
    found = pictures(folder / 'new/figures')
    assert code == 0 and [*found] == ['own_v.gif', 'own_v.png'] and f'drew {folder}/new/figures/own_v.png' in printed
    png, gif = found['own_v.png'], found['own_v.gif']
    assert png.format == 'PNG' and png.mode == 'P' and gif.format == 'GIF' and gif.n_frames == 3
    truth, u = evaluate.trace(aotpot.load(checkpoint), trajectories(folder, 'own'), 2, 'v', 3, CPU.device)
    drawn = evaluate.picture(evaluate.fields_figure(truth, {'small': u, 'other': u}, [1, 3], 'v'))
    assert np.array_equal(png.convert('RGB'), drawn.convert('RGB'))
    frames = [np.asarray((gif.seek(k), gif.convert('RGB'))[1], int) for k in range(3)]
    still = (np.abs(frames[0] - frames[2]).max(-1) <= 16).mean(1)          # rows in which nothing moves
    assert (still[-len(still) // 4:] == 1).all() and still.min() < 0.8, 'the fields move, the colour bars do not'


def test_every_mode_draws_its_figures(plt, checkpoint, folder, monkeypatch, capsys):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--figures', folder / 'figures']
    assert main([*flags, '--gains', '--probe', '--samples', '6'], monkeypatch, capsys)[0] == 0
    (checkpoint.parent / 'log.jsonl').write_text('{"step": 1, "loss": 2.0, "grad_norm": 3.0, "skipped": 0}\n')
    write(folder, 'coarse', travelling(4, 7, 8, 1, 0.7), 'train')
    for mode in (['--rollout', '4', '--datasets', 'own'], ['--rollout', '5', '--datasets', 'coarse'], ['--scaling'],
                 ['--curves']):
        assert main([*flags, *mode], monkeypatch, capsys)[0] == 0
    found = pictures(folder / 'figures')
    assert [*found] == [f'{name}.png' for name in ('curves', 'free', 'gains', 'kernels', 'probe', 'rollout', 'scaling')]
    assert all(picture.format == 'PNG' and picture.size[0] > 300 for picture in found.values())


@pytest.mark.parametrize('flags, words', [
    (['--channel', 'w'], '--channel w: coarse does not predict it; known: 0'), (['--datasets', 'own', '--channel', 'c'],
                                                                               '--channel c: own'),
    (['--steps', '1', '5'], '--steps 5: coarse has 4 frames after the 3'), (['--steps', '0'], '--steps 0 must be'),
    (['--trajectory', '4'], '--trajectory 4: coarse has 0 to 3'), (['--trajectory', '-1'], '--trajectory -1 must be')])
def test_bad_flags_of_fields_are_one_line(plt, checkpoint, folder, monkeypatch, capsys, flags, words):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--figures', folder / 'figures', '--fields', *flags]
    code, error, _ = main(flags, monkeypatch, capsys)
    assert code == 2 and error.count('\n') == 1 and words in error and not [*folder.glob('figures/*')]


@pytest.mark.parametrize('flags, words', [
    (['--fields'], 'add --figures DIR'), (['--steps', '3'], '--steps is an option of --fields'),
    (['--trajectory', '0'], '--trajectory is an option of --fields'), (['--figures', 'new'], '--figures: of what?'),
    (['--gains', '--figures', 'own/test.h5'], 'own/test.h5: no folder')])
def test_bad_flags_of_figures_are_one_line(plt, checkpoint, folder, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(folder)
    code, error, _ = main(['--device', 'cpu', *flags], monkeypatch, capsys)
    assert code == 2 and error.count('\n') == 1 and words in error
