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
from helpers import CPU, KINDS, read, same, save, slow_rollout, small_model, trajectories, travelling, write
from runtime import distributed, reports
from sources import generate


class Network(torch.nn.Module):
    """A network that is any function of its input frames (B, T, *space, C)."""

    def __init__(self, model, function):
        super().__init__()
        self.config, self.forward = model.config, function


def slow_score(model, test):
    """{name: (N,)} of all METRICS and of a long rollout's curve, one trajectory and channel after the other."""
    scores, F_ = [], test.t_test
    relative = lambda a, b: np.mean([((a - b)[..., c].norm() / b[..., c].norm()).item() for c in range(b.shape[-1])])
    l1 = lambda u, v: ((u - v).abs().sum() / v.abs().sum()).item()
    centred = lambda a, b: relative(*(x - b.flatten(0, -2).mean(0) for x in (a, b)))
    for i in range(test.count):
        truth = torch.from_numpy(read(test, i, 0, 3 + F_))
        rollout = slow_rollout(model, truth, test.evolving, F_).double()
        steps = torch.stack([slow_rollout(model, truth[t:t + 3], test.evolving, 1)[0] for t in range(F_)]).double()
        inputs, targets = truth[..., test.evolving].double(), truth[3:][..., test.evolving].double()
        last, before = inputs[2].expand_as(targets), inputs[2:-1]
        along = lambda error, u: np.mean([error(a, b) for a, b in zip(u, targets)])
        scores.append({
            'rollout': relative(rollout, targets), 'rollout_persistence': relative(last, targets),
            'step': along(relative, steps), 'step_persistence': along(relative, before),
            'rollout_vrmse': along(centred, rollout), 'rollout_vrmse_persistence': along(centred, last),
            'step_vrmse': along(centred, steps), 'step_vrmse_persistence': along(centred, before),
            'curve': along(relative, rollout), 'curve_persistence': along(relative, last),
            'l1': l1(steps[-1], targets[-1]), 'l1_persistence': l1(before[-1], targets[-1])})
    names = [*evaluate.METRICS, 'curve']
    return {forecast: {name: np.array([row[name + suffix] for row in scores]) for name in names}
            for forecast, suffix in (('model', ''), ('persistence', '_persistence'))}


@torch.no_grad()
@pytest.mark.parametrize('name', ['own', 'coarse'])
def test_scores_equal_a_slow_loop_with_static_channels_and_another_grid(model, folder, name):
    test = trajectories(folder, name)
    scores, expected = evaluate.score(model, test, CPU, batch_size=3), slow_score(model, test)
    for forecast in evaluate.FORECASTS:
        for metric, values in scores[forecast].items():
            np.testing.assert_allclose(values, expected[forecast][metric], rtol=2e-5, err_msg=metric)


@pytest.mark.parametrize('scale', [1e-30, 1e-8, 1, 1e20, 1e30])
def test_scores_are_those_of_a_slow_float64_loop_whatever_the_size_of_the_field(model, tmp_path, scale):
    write(tmp_path, 'own', scale * travelling(2, 7, 16, 2, 0.4), 'test', t_test=4)
    test = trajectories(tmp_path, 'own')
    damping = Network(model, lambda u: 0.9 * u[:, -1])
    scores, curves = evaluate.score(damping, test, CPU), evaluate.rollout_curve(damping, test, CPU, 4)
    expected = slow_score(damping, test)
    for forecast in evaluate.FORECASTS:
        for name, values in scores[forecast].items():
            np.testing.assert_allclose(values, expected[forecast][name], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(curves[forecast].mean(0), expected[forecast]['curve'], rtol=1e-5)


def test_the_l2re_of_arrays_is_that_of_each_trajectory_and_channel_and_then_the_mean():
    target = np.zeros((2, 2, 1, 2, 2))                              # (N, F, H, W, C)
    target[..., 0], target[..., 1] = 1, 100                         # norms of 2 and 200
    prediction = target.copy()
    prediction[0, 0, 0, 0] += 1, 20                                 # trajectory 0: errors of 1 / 2 and 20 / 200
    prediction[1, 1, 0, :, 0] -= 2 ** 0.5                           # trajectory 1: 2 / 2 and 0
    assert evaluate.l2re(prediction, target) == pytest.approx((0.5 + 0.1 + 1 + 0) / 4)
    tensors = (torch.from_numpy(u).float() for u in (prediction, target))
    assert evaluate.l2re(*tensors) == pytest.approx(0.4), 'not 0.071, the ratio of the norms of all values'
    target[0, ..., 0] = 0               # the deviation of the channel over all is 1/2, and the norm of that here 1
    assert evaluate.l2re(target, target) == 0
    expected = (7 ** 0.5 / 1e-3 + 0.1 + 1 + 0) / 4                      # an error of (2, 1, 1, 1)
    assert evaluate.l2re(prediction, target) == pytest.approx(expected)
    prediction[0, 0, 0, 0, 0] = np.nan
    assert evaluate.l2re(prediction, target) == math.inf
    with pytest.raises(configs.InputError, match='the prediction has the shape'):
        evaluate.l2re(prediction[..., :1], target)


def test_batch_size_and_ranks_change_no_number(model, folder):
    class Rank(distributed.Processes):
        def sum(self, tensor):
            return tensor
    test = trajectories(folder, 'own')
    one, many = (evaluate.score(model, test, CPU, batch_size=b) for b in (1, 16))
    parts = [evaluate.score(model, test, Rank(rank, 3, torch.device('cpu'))) for rank in range(3)]
    for forecast in evaluate.FORECASTS:
        for name, values in many[forecast].items():
            torch.testing.assert_close(one[forecast][name], values, rtol=1e-5, atol=0)
            together = sum(part[forecast][name] for part in parts)
            torch.testing.assert_close(together, values, rtol=1e-5, atol=0)


def test_a_sample_that_diverges_is_counted_and_not_averaged_away(model, folder):
    test = trajectories(folder, 'own')
    values = torch.tensor([read(test, i, 0, 1)[0, 0, 0, 1] for i in range(5)])
    diverging = Network(model, lambda u: u[:, -1] * torch.where(
        u[:, -1, 0, 0, 1] > values.median(), 1e20, 1.0)[:, None, None, None])      # by the static channel
    scores = evaluate.score(diverging, test, CPU)
    bad = ~scores['model']['rollout'].isfinite()
    assert torch.equal(bad, values > values.median()) and bad.sum() == 2
    line = evaluate.score_table({'own': scores})[-1]
    assert '2 not finite' in line and 'inf' in line and evaluate.mean(scores['model']['rollout']) == math.inf
    curves = evaluate.rollout_curve(diverging, test, CPU, steps=4)
    assert evaluate.mean(curves['model'][3]) == math.inf and evaluate.mean(curves['persistence'][3]) < 2


@torch.no_grad()
def test_the_long_rollout_is_the_short_one_step_by_step(model, folder):
    test = trajectories(folder, 'own')
    curves = evaluate.rollout_curve(model, test, CPU, steps=4, batch_size=2)
    expected = slow_score(model, test)
    for forecast in evaluate.FORECASTS:
        np.testing.assert_allclose(curves[forecast].mean(0), expected[forecast]['curve'], rtol=1e-5)
    truth = torch.from_numpy(read(test, 1, 0, 7))
    predicted = slow_rollout(model, truth, test.evolving, 4)[3]
    target = truth[6][..., test.evolving]
    by_hand = np.mean([((predicted - target)[..., c].norm() / target[..., c].norm()).item() for c in range(2)])
    assert abs(curves['model'][3, 1].item() / by_hand - 1) < 1e-5


def numbers(nest):
    """All numbers in what json.loads gave, in order, null as NaN."""
    if isinstance(nest, (dict, list)):
        return [x for item in (nest.values() if isinstance(nest, dict) else nest) for x in numbers(item)]
    return [] if isinstance(nest, str) else [math.nan if nest is None else nest]


def test_the_table_has_the_numbers_of_the_report(checkpoint, folder, call):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--datasets', 'own', 'coarse']
    code, error, printed = call([*flags, '--json', folder / 'a.json'], evaluate)
    assert code == 0, error
    report = json.loads((folder / 'a.json').read_text())['models']['small']
    assert report['checkpoint'] == str(checkpoint)
    expected = []
    for dataset, scores in report['datasets'].items():
        row = [dataset, str(len(scores['model']['l1']['samples'])), '4']
        behind = []
        for name in 'rollout', 'step':
            vrmse, persistence = (scores[forecast][f'{name}_vrmse']['mean'] for forecast in ('model', 'persistence'))
            row += [f'{scores["model"][name]["mean"]:.4f}', f'{vrmse:.4f}', f'{persistence / vrmse:.1f}x']
            channels = {channel: [means[forecast][f'{name}_vrmse'] for forecast in ('model', 'persistence')]
                        for channel, means in scores['channels'].items()}
            np.testing.assert_allclose(np.mean([*channels.values()], 0), [vrmse, persistence], rtol=1e-6)
            behind += [channel for channel, (ours, theirs) in channels.items() if ours > theirs]
        expected.append(row + ([*dict.fromkeys(behind), 'behind', 'persistence'] if behind else []))
    rows = [line.split() for line in printed.splitlines()]
    assert [row for row in rows if row[0] in ('own', 'coarse')] == expected


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(checkpoint, folder, torchrun, call):
    """Of long rollouts; test_train.py has the table of scores."""
    flags = ['--checkpoint', checkpoint, '--rollout', '4', '--datasets', 'coarse', 'own', '--device', 'cpu', '--json']
    assert call([*flags, folder / 'one.json'], evaluate)[0] == 0
    two = torchrun.run(ROOT / 'evaluate.py', *flags, folder / 'two.json')
    assert two.returncode == 0, two.stderr
    one, two = (numbers(json.loads((folder / f'{n}.json').read_text())) for n in ('one', 'two'))
    assert len(one) > 24
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def test_a_long_rollout_stands_beside_persistence(model, checkpoint, folder, call):
    flags = ['--checkpoint', checkpoint, '--datasets', 'own', 'coarse', '--samples', '2', '--rollout', '4']
    code, error, printed = call([*flags, '--device', 'cpu', '--json', folder / 'a.json'], evaluate)
    assert code == 0, error
    cells = [line.split() for line in printed.splitlines()]
    for name in 'own', 'coarse':
        found = json.loads((folder / 'a.json').read_text())['models']['small']['rollout'][name]
        curves = evaluate.rollout_curve(model, trajectories(folder, name, rows=range(2)), CPU, 4)
        for forecast in evaluate.FORECASTS:
            np.testing.assert_allclose(found[forecast]['curve'], curves[forecast].mean(1), rtol=1e-5)
        assert [f'{name}:', 'L2RE', 'at', 'step', '4'] in cells
        for forecast in evaluate.FORECASTS:
            assert [forecast, f'{found[forecast]["step"]["4"]:.4f}'] in cells


def test_a_rollout_without_a_number_goes_as_far_as_the_test_data(checkpoint, folder, call):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--samples', '2', '--datasets', 'coarse', '--rollout']
    code, error, printed = call(flags, evaluate)
    assert code == 0 and printed.splitlines()[-4:] == call([*flags, '4'], evaluate)[2].splitlines()[-4:], error


FAMILY = evaluate.LONG


@pytest.mark.parametrize('name, C, dt', [(FAMILY, 1, 1.0), ('wave_gauss', 2, 0.02)])
def test_the_long_rollout_makes_the_reference_of_one_family_once(model, folder, call, name, C, dt):
    """It has the time between frames of the test data; where these are long enough, nothing is made."""
    write(folder, name, travelling(3, 7, 16, C, 0.4), 'test', dt=dt)
    path = save(model, folder, 'small/last.pt', datasets=('own', name))
    flags = ['--checkpoint', path, '--rollout', '22', '--samples', '2', '--device', 'cpu']
    code, error, first = call([*flags, '--json', folder / 'long.json'], evaluate)
    assert code == 0 and 'making 2 reference trajectories of 25 frames' in first, error
    reference, = folder.glob('*/rollout*.h5')
    assert str(reference) in first and data.find(folder, split='test') == ['coarse', *sorted([name, 'own'])]
    with h5py.File(reference) as file:
        assert file['data'].shape == (2, 25, 16, 16, C) and file['data'].attrs['dt'] == dt
    code, _, second = call(flags, evaluate)
    assert code == 0 and 'making' not in second
    assert second.splitlines()[-3:] == first.splitlines()[-3:] and second.count('L2RE') == 1
    rollout = json.loads((folder / 'long.json').read_text())['models']['small']['rollout'][name]['model']
    assert set(rollout['step']) == {'20', '22', 'growth'} and len(rollout['curve']) == 22
    assert abs(rollout['step']['growth'] - rollout['step']['22'] / rollout['step']['20']) < 1e-9
    enough = [*flags[:2], '--rollout', '4', *flags[4:]]
    assert 'making' not in call(enough, evaluate)[2], 'the test trajectories are long enough'


def test_a_reference_of_another_solver_is_not_used(model, folder, refused):
    write(folder, FAMILY, travelling(3, 7, 16, 1, 0.4), 'test')
    path = save(model, folder, 'small/last.pt', datasets=(FAMILY,))
    split = generate.long_reference(trajectories(folder, FAMILY), 5, 1, model.config, CPU)
    reference = folder / FAMILY / f'{split}.h5'
    with h5py.File(reference, 'a') as file:
        file['data'].attrs['source'] += ' version 2'
    refused(['--checkpoint', path, '--rollout', '5', '--samples', '1', '--device', 'cpu'],
            f"error: {reference}: exists with ((1, 11, 16, 16, 1), 'generate.py seed 0 grid 64 version 2'", evaluate,
            lines=None)


@pytest.mark.parametrize('trained, taken', [
    (('own', 'swe_pdb', FAMILY), [FAMILY]), (('cno_poisson', 'wave_gauss', 'own', 'swe_pdb'), ['wave_gauss']),
    (('own', 'coarse'), ('own', 'coarse'))])
def test_without_datasets_one_is_rolled_out_that_has_a_solver(trained, taken):
    assert evaluate.names_to_roll_out(trained) == taken


def test_a_dataset_without_a_solver_has_no_long_reference(checkpoint, refused):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--rollout', '5', '--datasets', 'own', 'coarse']
    refused(flags, 'error: --rollout 5: the test trajectories of coarse have 7 frames, and no solver of ours makes '
            'longer ones; try --rollout 4\n', evaluate)


# ------------------------------------------------------------------------------------------------ frames of one's own

OWN = {'own': dict(channels=('u', 'c', 'v'), static=('c',)), 'coarse': dict(channels=('w',))}


@torch.no_grad()
@pytest.mark.parametrize('name', ['own', 'coarse'])
def test_a_rollout_of_arrays_and_tensors_equals_a_slow_loop_on_their_own_grid(model, folder, name):
    """What is static is in the checkpoint."""
    test, static = trajectories(folder, name), [1] * (name == 'own')
    loaded = evaluate.load(save(model, folder, 'a/last.pt', layouts=OWN))
    frames = np.stack([read(test, i, 0, 4) for i in range(3)])
    result = evaluate.rollout(loaded, frames, 5, batch_size=2)
    assert type(result) is np.ndarray and result.dtype == np.float32 and result.shape == (3, 5, *frames.shape[2:])
    for i, trajectory in enumerate(torch.from_numpy(frames)):
        expected = slow_rollout(model, trajectory[1:], test.evolving, 5)               # of four frames the last three
        np.testing.assert_allclose(result[i][..., test.evolving], expected, rtol=1e-5, atol=1e-5)
        assert np.array_equal(result[i][..., static], frames[i, [3] * 5][..., static])
    alone = evaluate.rollout(loaded, frames[1].astype('>f8')[:, ::-1, :, :], 5)         # big-endian, negative strides
    flipped = evaluate.rollout(loaded, torch.from_numpy(frames[1:2]).double().flip(2).requires_grad_(), 5)
    assert isinstance(flipped, torch.Tensor) and not flipped.requires_grad and alone.shape == (1, *result.shape[1:])
    np.testing.assert_allclose(alone, flipped.numpy(), rtol=1e-5, atol=1e-5)
    masked = np.ma.array(frames, mask=False)
    # nothing of it is masked; batches of another size are rounded differently
    np.testing.assert_allclose(evaluate.rollout(loaded, masked, 5), result, rtol=1e-5, atol=1e-5)
    unknown = evaluate.rollout(model, frames, 5)
    assert static == [] or not np.array_equal(unknown[..., 1], result[..., 1]), 'without a checkpoint all evolve'


def test_a_network_in_training_mode_is_evaluated(folder):
    model, test = small_model(experts=3, top_k=1), trajectories(folder, 'own')
    frames = np.stack([read(test, i, 0, 4) for i in range(3)])
    expected, scores = evaluate.rollout(model, frames, 2), evaluate.score(model, test, CPU)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    assert np.array_equal(evaluate.rollout(model, frames, 2), expected)
    model.train()
    assert same(evaluate.score(model, test, CPU), scores) and same(dict(model.state_dict()), before)


def test_flipped_big_endian_and_16_bit_values_are_read_by_value_and_a_path_stands_for_its_network(checkpoint, folder):
    v = np.float32(travelling(2, 5, 16, 3, 0.4))[:, ::-1]
    u = 1.01 * v
    error = pytest.approx(0.01, rel=1e-4)
    for a, b in ((u, v), (u.astype('>f8'), v.astype('>f4')), (list(u), np.ma.array(v, mask=False))):
        assert evaluate.l2re(a, b) == error
    assert evaluate.l2re(torch.full((1, 2, 4, 1), 3.).bfloat16(), np.full((1, 2, 4, 1), 2, np.int8)) == 0.5
    expected = evaluate.rollout(evaluate.load(checkpoint), v, 2)
    assert np.array_equal(evaluate.rollout(str(checkpoint), v, 2), expected)
    assert evaluate.rollout(checkpoint, v, 0).shape == (2, 0, *v.shape[2:])
    rounded = torch.from_numpy(v.copy()).bfloat16()
    assert torch.equal(evaluate.rollout(checkpoint, rounded, 2), evaluate.rollout(checkpoint, rounded.float(), 2))
    for network in (evaluate.load(checkpoint).half(), evaluate.load(checkpoint).bfloat16()):
        np.testing.assert_allclose(evaluate.rollout(network, v, 2), expected, atol=0.1 * np.abs(expected).max())


@pytest.mark.parametrize('given, words', [
    (dict(C=3), 'the training read 3 channels in several ways; name one with dataset= (wave: u u_t c; same: p q c; '),
    (dict(C=3, dataset='wav'), '3 channels of wav; expected those of a dataset of the training, in its order (wave: '),
    (dict(C=3, dataset='flow'), '3 channels of flow; expected those of a dataset'),
    (dict(C=2), '2 channels; expected those of a dataset'),
    (dict(C=3, channels=['u_t', 'u', 'c']), '3 channels u_t u c; expected those of a dataset'),
    (dict(C=3, channels=['p', 'q', 'c'], dataset='wave'), '3 channels p q c of wave; expected')])
def test_frames_that_the_training_did_not_read_so_are_refused(model, folder, given, words):
    loaded = evaluate.load(save(model, folder, 'wave/last.pt', layouts=KINDS))
    given = dict(given)
    with pytest.raises(configs.InputError, match=re.escape(words)):
        evaluate.rollout(loaded, np.ones((3, 8, 8, given.pop('C'))), 1, **given)


@pytest.mark.parametrize('given', [dict(dataset='wave'), dict(channels=('u', 'u_t', 'c'))])
def test_the_dataset_or_the_names_of_its_channels_tell_what_is_static(model, folder, given):
    loaded, frames = evaluate.load(save(model, folder, 'wave/last.pt', layouts=KINDS)), torch.rand(2, 3, 12, 12, 3)
    result = evaluate.rollout(loaded, frames, 4, **given)
    assert torch.equal(result[..., 2], frames[:, [2] * 4][..., 2])
    for i, u in enumerate(result):
        torch.testing.assert_close(u[..., :2], slow_rollout(model, frames[i], [0, 1], 4).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('dataset', ['own', 'other'])
def test_data_with_the_channels_of_the_training_in_another_order_are_refused(model, folder, call, refused, dataset):
    path = save(model, folder, 'small/last.pt', datasets=('own',), layouts=OWN)
    flags = ['--checkpoint', path, '--device', 'cpu', '--datasets', dataset]
    values = np.stack([read(trajectories(folder, 'own'), i, 0, 9) for i in range(5)])
    write(folder, dataset, values[..., [2, 1, 0]], 'test', channels=('v', 'c', 'u'), static=('c',))
    error, _ = refused(flags, f'{dataset}/test.h5', evaluate)
    assert 'channels v c u' in error and f'{path}' in error and error.endswith(' u c v\n')
    write(folder, dataset, values, 'test', channels=('u', 'c', 'v'), static=('c',))
    assert call(flags, evaluate)[0] == 0
    write(folder, dataset, values, 'test', channels=('x', 'y', 'z'))
    assert call(flags, evaluate)[0] == 2 * (dataset == 'own'), 'other names are those of other data'


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


def test_tables_have_no_persistence_of_steady_datasets_and_the_median_of_their_relative_l1(folder, call):
    for name, frames in (('steady', 2), ('moving', 4)):
        write(folder, name, travelling(3, frames, 16, 1, 0.4), 'test')
    path = save(small_model(frames=1), folder, 'a/last.pt')
    flags = ['--checkpoint', path, '--device', 'cpu', '--json', folder / 'a.json', '--datasets', 'steady', 'moving']
    steady, moving = call(flags, evaluate)[2].splitlines()[-2:]
    scores = json.loads((folder / 'a.json').read_text())['models']['a']['datasets']['steady']['model']
    step, vrmse = (f'{scores[name]["mean"]:.4f}' for name in ('step', 'step_vrmse'))
    assert steady.split() == ['steady', '3', '1', step, vrmse, '-', step, vrmse, '-',
                              *f'median relative L1 {np.median(scores["l1"]["samples"]):.4f}'.split()]
    assert scores['rollout'] == scores['step'] and '-' not in moving.split()


def test_the_lines_for_a_notebook_run_as_they_are_printed(model, tmp_path, monkeypatch):
    write(tmp_path / 'data/nano', 'wave_gauss', travelling(2, 9, 12, 2, 0.4), 'test')
    save(model, tmp_path, 'nano/last.pt')
    block, own = (re.search(r'```python\n(.*?)```', (ROOT / page).read_text(), re.S)[1]
                  for page in ('docs/evaluation.md', 'README.md'))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(block, names)
    exec(own, {})
    mine, frames = data.Trajectories('data', 'mine', 'test', 5, 4), np.load('frames.npy')
    np.testing.assert_array_equal(read(mine, 0, 0, len(frames)), np.float32(frames))
    assert np.ptp(frames) > 1.9, 'a wave'
    test = data.Trajectories('data/nano', 'wave_gauss', 'test', 3, 4)
    after, error = names['u'].shape[1], names['error']
    assert len(block.splitlines()) <= 10 and names['prediction'].shape == (2, 9 - after, 12, 12, 2)
    truth = np.stack([read(test, i, after, 9) for i in range(2)])
    size = lambda x: np.sqrt(np.square(x).sum((1, 2, 3)))                                   # (N, C)
    expected = (size(names['prediction'] - truth) / size(truth)).mean()
    assert error == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_another_model_grid_is_that_of_the_scores(model, checkpoint, folder, call):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--resolution', '24x32']
    code, _, printed = call([*flags, '--datasets', 'coarse', '--json', folder / 'fine.json'], evaluate)
    report = json.loads((folder / 'fine.json').read_text())['models']['small']
    assert code == 0 and ' 24x32 grid, ' in printed and report['resolution'] == [24, 32]
    test = trajectories(folder, 'coarse')
    finer, *_ = evaluate.open_checkpoint(evaluate.parser_of('').parse_args([*map(str, flags)]))
    rollout = evaluate.score(finer.model, test, CPU)['model']['rollout']
    np.testing.assert_allclose(rollout, report['datasets']['coarse']['model']['rollout']['samples'], rtol=1e-6)
    errors = []
    for i in range(test.count):
        truth = torch.from_numpy(read(test, i, 0, 4)).movedim(-1, 1)                                 # (4, 1, 8, 8)
        state = torch.ones(1, 3, 24, 32, 4)
        state[0, ..., :1] = F.interpolate(truth[:3], (24, 32), mode='bilinear').movedim(1, -1)
        u = F.interpolate(model(state)[..., :1].movedim(-1, 1), (8, 8), mode='bilinear')[0]
        errors.append(((u - truth[3]).norm() / truth[3].norm()).item())
    test.t_test = 1
    assert not np.allclose(errors, evaluate.score(model, test, CPU)['model']['step'], rtol=1e-3), 'the grid matters'
    np.testing.assert_allclose(evaluate.score(finer.model, test, CPU)['model']['step'], errors, rtol=1e-5)


def test_the_newest_checkpoint_is_found_and_scored_without_any_flag(checkpoint, folder, monkeypatch, call):
    monkeypatch.chdir(folder)
    older = folder / 'out/older/last.pt'
    older.parent.mkdir()
    older.write_bytes(b'broken')
    os.utime(older, (1, 1))
    code, _, printed = call(['--device', 'cpu', '--datasets', 'own', '--json', 'a.json'], evaluate)
    assert code == 0 and 'small/last.pt: step 7, aot' in printed
    assert not [*folder.glob('*.part')]
    errors = evaluate.score(evaluate.load(checkpoint), trajectories(folder, 'own'), CPU)['model']['rollout']
    value = errors.mean().item()
    scores = json.loads((folder / 'a.json').read_text())['models']['small']['datasets']['own']
    assert abs(scores['model']['rollout']['mean'] / value - 1) < 1e-9 and f'{value:.4f}' in printed


def test_json_has_mean_and_samples_and_null_for_what_is_not_finite(folder):
    args = evaluate.parser_of('').parse_args(['--json', str(folder / 'a.json')])
    reports.finish(args, CPU, 'a', torch.tensor([1., math.inf]))
    assert json.loads((folder / 'a.json').read_text()) == {'models': {'a': {'mean': None, 'samples': [1., None]}}}


def test_an_exact_network_is_exact_on_fields_of_any_size_whatever_the_training_read(model, folder):
    values = np.ones((4, 7, 16, 16, 1)) * np.array([1, 2, 4, 8]).reshape(4, 1, 1, 1, 1)
    write(folder, 'constant', values, 'test')
    exact = Network(model, lambda u: u[:, -1])
    exact.weight = torch.nn.Parameter(torch.zeros(1))
    for header in {}, {'units': data.Units.none(1).header()}:
        exact.data = {'constant': {'train': {'channels': ['0'], 'static': [], **header}}}
        scores = evaluate.score(exact, trajectories(folder, 'constant'), CPU)
        assert scores['model']['rollout'].max() == scores['model']['step'].max() == 0
        assert (evaluate.rollout(exact, torch.from_numpy(values), 9, 'constant')[:, -1] == values[:, 0]).all()
    exact.forward = lambda u: 1e15 * u[:, -1]
    assert evaluate.rollout(exact, torch.from_numpy(values), 3, 'constant')[:, -1].isinf().all()


def test_a_metric_of_ones_own_has_its_column_in_the_table_and_its_numbers_in_the_report(model, folder, monkeypatch):
    largest = evaluate.Metric('one step', 'largest', lambda u, v, scale: (u - v).abs().flatten(1).amax(1))
    monkeypatch.setitem(evaluate.METRICS, 'largest', largest)
    scores = evaluate.score(model, trajectories(folder, 'own'), CPU)
    heads, captions, line = (line.split() for line in evaluate.score_table({'own': scores}))
    assert captions[-3:-1] == ['VRMSE', 'largest'] and f'{scores["model"]["largest"].mean().item():.4f}' in line


def test_a_truth_of_round_off_counts_as_zero_and_a_field_with_a_large_mean_by_what_happens():
    v = torch.zeros(3, 2, 8, 8, 2)
    v[..., 0] = 300 + torch.randn(3, 2, 8, 8)
    floor = 1e-3 * torch.tensor([1.0, 0.5])
    errors = []
    noise = torch.randn_like(v)
    for size in 0, 1e-17:
        v[..., 1] = size * torch.randn(3, 2, 8, 8)
        errors.append(evaluate.l2re_of_samples(v + 0.1 * noise, v, floor))
    torch.testing.assert_close(*errors)
    torch.testing.assert_close(errors[0][:, 1], 0.1 * noise[..., 1].square().mean((1, 2, 3)).sqrt() / 5e-4)
    wrong = v + 0.3 * torch.randn_like(v)
    assert evaluate.l2re_of_samples(wrong, v, floor)[:, 0].max() < 0.002
    found = evaluate.vrmse_of_samples(wrong, v, floor)[:, 0]
    torch.testing.assert_close(found, torch.full((3,), 0.3), rtol=0.3, atol=0)
    wrong[0, 0, 0, 0] = torch.tensor([math.nan, math.inf])
    assert not evaluate.l2re_of_samples(wrong, v, floor)[0].isfinite().any()


def test_the_vrmse_of_a_rollout_is_the_wells_of_each_frame():
    """The mean of each frame, predicted exactly and nothing else, has 1, however much that mean rises."""
    pattern = torch.randn(4, 1, 32, 32, 1)
    truth = pattern + torch.linspace(0, 40, 20).view(1, 20, 1, 1, 1)
    u = truth.mean((2, 3), keepdim=True).expand_as(truth)
    error = evaluate.METRICS['rollout_vrmse'].error(u, truth, torch.zeros(1))
    torch.testing.assert_close(error, torch.ones(4, 1))


def test_a_rollout_goes_by_the_grid_that_the_training_read(tmp_path):
    """A network of 16x16 points that was trained on 24x24 never saw its own raw frames."""
    model = small_model()
    write(tmp_path, 'own', travelling(2, 7, 24, 1, 0.4), 'test')
    test = trajectories(tmp_path, 'own')
    frames = test.windows([(0, 0), (1, 0)], 3)
    for grid, known in ((24, {'shape': [2, 7, 24, 24, 1]}), (16, {'shape': [2, 7, 16, 16, 1]}), (16, {})):
        model.data = {'own': {'train': {'channels': ['0'], 'static': [], **known}}}
        predictor = evaluate.Predictor(model, test, torch.device('cpu'))
        state = predictor.step(predictor.state(frames))
        back = predictor.fed_back(state)[:, -1:, ..., :1]
        raw = state[:, -1:, ..., :1]
        torch.testing.assert_close(back, data.resize(data.resize(raw, (grid, grid)), (16, 16)))
        assert torch.equal(back, raw) == (grid == 16)


def test_without_matplotlib_one_line_says_what_to_install_before_any_work(folder, monkeypatch, refused):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    words = 'error: figures need matplotlib: pip install matplotlib\n'
    assert not refused(['--rollout', '4', '--figures', folder / 'figures'], words, evaluate)[1]
    assert not (folder / 'figures').exists()
