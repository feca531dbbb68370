"""Metrics by hand, scores and rollouts against slow loops, and the command on real checkpoints."""
import dataclasses
import importlib.util
import json
import math
import os
import re
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

import configs
import data
import evaluate
import helpers
from conftest import ROOT
from helpers import CPU, read, save, slow_rollout, small_model, trajectories, travelling, write
from sources import generate


def slow_score(model, test):
    """{forecast: {name: (N,)}} of all METRICS, and of a long rollout's 'curve' (N, F).

    One trajectory, frame and channel after the other.
    """
    steps = test.t_test

    def relative(a, b):
        return np.mean([((a - b)[..., c].norm() / b[..., c].norm()).item()
                        for c in range(b.shape[-1])])

    def centred(a, b):
        return relative(*(x - b.flatten(0, -2).mean(0) for x in (a, b)))
    scores = {forecast: [] for forecast in evaluate.FORECASTS}
    for i in range(test.count):
        truth = torch.from_numpy(read(test, i, 0, 3 + steps))
        rollout = slow_rollout(model, truth, test.evolving, steps)
        one_step = torch.cat([slow_rollout(model, truth[t:t + 3], test.evolving, 1)
                              for t in range(steps)])
        truth = truth[..., test.evolving].double()
        v, last, before = truth[3:], truth[2].expand_as(truth[3:]), truth[2:-1]
        for forecast, a, b in ('model', rollout, one_step), ('persistence', last, before):
            a, b = a.double(), b.double()
            scores[forecast].append({
                'rollout': relative(a, v), 'curve': [relative(*pair) for pair in zip(a, v)],
                'rollout_vrmse': np.mean([centred(*pair) for pair in zip(a, v)]),
                'step': np.mean([relative(*pair) for pair in zip(b, v)]),
                'step_vrmse': np.mean([centred(*pair) for pair in zip(b, v)]),
                'l1': ((b - v)[-1].abs().sum() / v[-1].abs().sum()).item()})
    return {forecast: {name: np.array([row[name] for row in rows]) for name in rows[0]}
            for forecast, rows in scores.items()}


@pytest.mark.parametrize('name, scale', [
    ('own', 1), ('coarse', 1), ('scaled', 1e-30), ('scaled', 1e-8), ('scaled', 1e30)])
def test_scores_are_those_of_a_slow_loop_on_any_grid_and_of_any_size(model, folder, name, scale):
    if name == 'scaled':
        growing = scale * np.arange(1, 8).reshape(7, 1, 1, 1) * travelling(2, 7, 16, 2, 0.4)
        write(folder, name, growing, 'test', t_test=4)
        model.forward = lambda u, _=None: 0.9 * u[:, -1]
    test = trajectories(folder, name)
    scores = evaluate.score(model, test, CPU, batch_size=2)
    curves = evaluate.rollout_curve(model, test, CPU, test.t_test, batch_size=2)
    with torch.no_grad():
        expected = slow_score(model, test)
    for forecast in evaluate.FORECASTS:
        assert scores[forecast].keys() == evaluate.METRICS.keys()
        for metric, values in {**scores[forecast], 'curve': curves[forecast].T}.items():
            np.testing.assert_allclose(values, expected[forecast][metric], 2e-5, err_msg=metric)


def test_the_l2re_of_arrays_is_that_of_each_trajectory_and_channel_and_then_the_mean():
    target = np.zeros((2, 2, 1, 2, 2))                              # (N, F, H, W, C)
    target[..., 0], target[..., 1] = 1, 100                         # norms of 2 and 200
    prediction = target.copy()
    prediction[0, 0, 0, 0] += 1, 20                     # trajectory 0: errors 1 / 2 and 20 / 200
    prediction[1, 1, 0, :, 0] -= 2 ** 0.5                           # trajectory 1: 2 / 2 and 0
    assert evaluate.l2re(prediction, target) == pytest.approx((0.5 + 0.1 + 1 + 0) / 4)
    tensors = (torch.from_numpy(u).float() for u in (prediction, target))
    assert evaluate.l2re(*tensors) == pytest.approx(0.4), 'not 0.071, the ratio of all norms'
    target[0, ..., 0] = 0               # the channel's deviation over all is 1/2, its norm here 1
    assert evaluate.l2re(target, target) == 0
    expected = (7 ** 0.5 / 1e-3 + 0.1 + 1 + 0) / 4                      # an error of (2, 1, 1, 1)
    assert evaluate.l2re(prediction, target) == pytest.approx(expected)
    prediction[0, 0, 0, 0, 0] = np.nan
    assert evaluate.l2re(prediction, target) == math.inf


def test_a_sample_that_diverges_is_counted_and_not_averaged_away(model, folder):
    test = trajectories(folder, 'own')
    values = torch.tensor([read(test, i, 0, 1)[0, 0, 0, 1] for i in range(5)])      # static
    factor = lambda static: torch.where(static > values.median(), 1e20, 1)
    model.forward = lambda u, _=None: u[:, -1] * factor(u[:, -1, :1, :1, 1:2])
    scores = evaluate.score(model, test, CPU)
    bad = ~scores['model']['rollout'].isfinite()
    assert torch.equal(bad, values > values.median()) and bad.sum() == 2
    line = evaluate.score_table({'own': scores})[-1]
    assert '2 not finite' in line and 'inf' in line
    args = SimpleNamespace(json=folder / 'a.json')
    evaluate.finish(args, CPU, SimpleNamespace(name='a'), scores['model']['rollout'])
    report = report_of(args.json)
    assert report['mean'] is None and report['samples'].count(None) == 2
    curves = evaluate.rollout_curve(model, test, CPU, steps=4)
    assert evaluate.mean(curves['model'][3]) == math.inf
    assert evaluate.mean(curves['persistence'][3]) < 2


def report_of(path):
    """The report on the only checkpoint in a file of --json."""
    [report] = json.loads(path.read_text())['models'].values()
    return report


def test_the_newest_checkpoint_gets_a_table_of_its_report(checkpoint, folder, monkeypatch, call):
    monkeypatch.chdir(folder)
    older = folder / 'out/older/last.pt'
    older.parent.mkdir()
    older.write_bytes(b'broken')
    os.utime(older, (1, 1))
    flags = ['--device', 'cpu', '--datasets', 'own', 'coarse', '--json', 'a.json']
    code, error, printed = call(flags, evaluate)
    assert code == 0 and 'small/last.pt: step 7, aot' in printed, error
    report = report_of(folder / 'a.json')
    scores = evaluate.score(evaluate.load(checkpoint), trajectories(folder, 'own'), CPU)['model']
    found = report['datasets']['own']['model']['rollout']['samples']
    np.testing.assert_allclose(found, scores['rollout'])
    assert call([*flags[:-1], 'b.json', '--dtype', 'bf16'], evaluate)[0] == 0
    rounded = report_of(folder / 'b.json')['datasets']['own']['model']['rollout']['samples']
    assert rounded != found and rounded == pytest.approx(found, rel=0.1)
    rows = {line.split()[0]: line.split() for line in printed.splitlines()}
    for dataset, scores in report['datasets'].items():
        expected = [dataset, str(len(scores['model']['l1']['samples'])), '4']
        behind = set()
        for name in 'rollout', 'step':
            vrmse = {channel: [means[forecast][f'{name}_vrmse'] for forecast in means]
                     for channel, means in scores['channels'].items()}
            ours, theirs = np.mean([*vrmse.values()], 0)
            l2re = scores['model'][name]['mean']
            expected += [f'{l2re:.4f}', f'{ours:.4f}', f'{theirs / ours:.1f}x']
            behind |= {channel for channel in vrmse if vrmse[channel][0] > vrmse[channel][1]}
        names = [channel for channel in scores['channels'] if channel in behind]
        assert rows[dataset] == expected + [*names, 'behind', 'persistence'] * bool(names)


def test_a_long_rollout_goes_as_far_as_there_are_data(model, checkpoint, folder, call, refused):
    flags = ['--checkpoint', checkpoint, '--device', 'cpu', '--samples', '2',
             '--datasets', 'own', 'coarse', '--rollout']
    code, error, printed = call([*flags, '--json', folder / 'a.json'], evaluate)
    assert code == 0 and printed == call([*flags, '4'], evaluate)[2], error
    cells = [line.split() for line in printed.splitlines()]
    for name, found in report_of(folder / 'a.json')['rollout'].items():
        curves = evaluate.rollout_curve(model, trajectories(folder, name, rows=2), CPU, 4)
        assert [f'{name}:', 'L2RE', 'at', 'step', '4'] in cells
        for forecast in evaluate.FORECASTS:
            curve = found[forecast]['curve']
            np.testing.assert_allclose(curve, curves[forecast].mean(1), rtol=1e-5)
            assert [forecast, f'{curve[3]:.4f}'] in cells
    refused([*flags, '5'], 'error: --rollout 5: the test trajectories of coarse have 7 frames, and '
            'no solver of ours makes longer ones; try --rollout 4\n', evaluate)


def test_a_long_rollout_makes_its_reference_once_with_the_same_dt(model, folder, call, refused):
    name = evaluate.LONG
    source = generate.plan(name).attributes()['source']
    write(folder, name, travelling(3, 7, 16, 1, 0.4), 'test', dt=0.5, source=source)
    path = save(model, folder, 'small/last.pt', datasets=('own', name))
    flags = ['--checkpoint', path, '--samples', '2', '--device', 'cpu', '--rollout']
    code, error, first = call([*flags, '22', '--json', folder / 'long.json'], evaluate)
    assert code == 0 and 'making 2 reference trajectories of 25 frames' in first, error
    reference, = folder.glob('*/rollout*.h5')
    assert str(reference) in first
    assert data.find(folder, split='test') == ['coarse', *sorted([name, 'own'])]
    with h5py.File(reference) as file:
        assert file['data'].shape == (2, 25, 16, 16, 1) and file['data'].attrs['dt'] == 0.5
    code, _, second = call([*flags, '22'], evaluate)
    assert code == 0 and 'making' not in second and second.count('L2RE') == 1
    assert second.splitlines()[-3:] == first.splitlines()[-3:]
    rollout = report_of(folder / 'long.json')['rollout'][name]['model']
    step = rollout['step']
    assert set(step) == {'20', '22', 'growth'} and len(rollout['curve']) == 22
    assert step['growth'] == pytest.approx(step['22'] / step['20'])
    assert 'making' not in call([*flags, '4'], evaluate)[2], 'the test data are long enough'
    code, _, finer = call([*flags, '22', '--resolution', '32'], evaluate)
    assert code == 0 and 'making' not in finer, 'it has the grid of the dataset'
    with h5py.File(reference, 'a') as file:
        file['data'].attrs['source'] += ' version 2'
    refused([*flags, '22'], f'error: {reference}: exists with ((2, 25, 16, 16, 1), ', evaluate,
            lines=None)


# -------------------------------------------------------------------------- frames of one's own

OWN = {'own': dict(channels=('u', 'c', 'v'), static=('c',)), 'coarse': dict(channels=('w',))}


@torch.no_grad()
def test_a_rollout_of_arrays_and_tensors_equals_a_slow_loop(model, folder):
    """What is static is in the checkpoint."""
    test = trajectories(folder, 'own')
    loaded = evaluate.load(save(model, folder, 'a/last.pt', layouts=OWN))
    frames = np.stack([read(test, i, 0, 4) for i in range(3)])
    result = evaluate.rollout(loaded, frames, 5, batch_size=2)
    assert type(result) is np.ndarray and result.dtype == np.float32
    for i, trajectory in enumerate(torch.from_numpy(frames)):       # of four frames the last three
        expected = slow_rollout(model, trajectory[1:], test.evolving, 5)
        np.testing.assert_allclose(result[i][..., test.evolving], expected, rtol=1e-5, atol=1e-5)
        assert np.array_equal(result[i][..., 1], frames[i, [3] * 5][..., 1])
    tensor = torch.from_numpy(frames).double().requires_grad_()
    predicted = evaluate.rollout(loaded, tensor, 5, batch_size=2)
    assert isinstance(predicted, torch.Tensor) and not predicted.requires_grad
    assert np.array_equal(predicted, result)
    unknown = evaluate.rollout(model, frames, 5)
    assert not np.array_equal(unknown[..., 1], result[..., 1]), 'here all evolve'


def test_a_network_in_training_mode_is_evaluated(folder):
    model, test = small_model(experts=3, top_k=1), trajectories(folder, 'own')
    frames = torch.from_numpy(read(test, 0, 0, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for found in (lambda: evaluate.rollout(model, frames, 2),
                  lambda: evaluate.score(model, test, CPU)):
        expected = found()
        model.train()
        assert helpers.same(found(), expected)
    assert helpers.same(dict(model.state_dict()), before)


def test_values_of_any_real_type_are_read_and_a_path_stands_for_its_network(checkpoint):
    v = np.float32(travelling(2, 5, 16, 3, 0.4))[:, ::-1]               # negative strides
    for a, b in ((v, v.astype('>f8')), (list(v), np.ma.array(v, mask=False)),
                 (torch.full((1, 2, 4, 1), 2.).bfloat16(), np.full((1, 2, 4, 1), 2, np.int8))):
        assert evaluate.l2re(a, b) == 0
    expected = evaluate.rollout(evaluate.load(checkpoint), v, 2)
    assert np.array_equal(evaluate.rollout(str(checkpoint), v, 2), expected)
    assert evaluate.rollout(checkpoint, v[0], 0).shape == (1, 0, *v.shape[2:])
    assert np.array_equal(evaluate.rollout(checkpoint, v, np.int64(2), None, np.int32(1)), expected)
    with pytest.raises(configs.InputError, match='dtype f16: expected fp32 or bf16'):
        evaluate.rollout(checkpoint, v, 2, dtype='f16')
    for numbers in (-1, 16), (2, 0), (2.0, 16), ('2', 16), (None, 16):
        with pytest.raises(configs.InputError, match='steps|batch_size'):
            evaluate.rollout(checkpoint, v, numbers[0], batch_size=numbers[1])
    for network in (evaluate.load(checkpoint).half(), evaluate.load(checkpoint).bfloat16()):
        found = evaluate.rollout(network, v, 2)
        np.testing.assert_allclose(found, expected, atol=0.1 * np.abs(expected).max())


@pytest.mark.parametrize('C, dataset', [(3, ''), (3, 'wav'), (3, 'flow'), (2, '')])
def test_frames_of_one_kind_of_the_training_are_named_and_others_refused(model, folder, C, dataset):
    loaded = evaluate.load(save(model, folder, 'wave/last.pt', layouts=helpers.KINDS))
    words = f"frames: {C} channels, dataset='{dataset}'; name the dataset of the training whose "
    with pytest.raises(configs.InputError, match=words) as error:
        evaluate.rollout(loaded, np.ones((3, 8, 8, C)), 1, dataset)
    assert '(wave: u u_t c; same: p q c; ' in str(error.value)
    frames = torch.rand(2, 3, 12, 12, 3)
    result = evaluate.rollout(loaded, frames, 4, 'wave')
    assert torch.equal(result[..., 2], frames[:, [2] * 4][..., 2]), 'c is static'
    expected = slow_rollout(model, frames[1], [0, 1], 4).detach()
    torch.testing.assert_close(result[1, ..., :2], expected, rtol=1e-5, atol=1e-5)


def test_frames_without_a_name_have_the_units_that_all_fitting_datasets_share(capsys):
    model = small_model(normalize=True)
    frames = torch.rand(1, 3, 16, 16, 2)
    for second in 2.0, 4.0:
        units = {name: data.Units(torch.ones(2, 2), torch.full((2, 2), deviation), torch.zeros(2))
                 for name, deviation in (('a', 2.0), ('b', second))}
        model.data = {name: {'train': dict(channels=['u', 'v'], static=[], shape=[1, 9, 16, 16, 2],
                                           units=its.header())} for name, its in units.items()}
        unnamed, named = (evaluate.rollout(model, frames, 2, dataset) for dataset in ('', 'a'))
        assert torch.equal(unnamed, named) == (second == 2)
        assert ('by themselves' in capsys.readouterr().err) == (second == 4)


@pytest.mark.parametrize('shape, T, expected', [
    ((4, 3, 16, 1), 3, (4, 2, 16, 1)), ((3, 16, 1), 3, (1, 2, 16, 1)), ((3, 1, 16, 1), 3, (1, 2, 1, 16, 1)),
    ((4, 3, 1, 16, 1), 3, (4, 2, 1, 16, 1)), ((4, 1, 16, 1), 1, (4, 2, 16, 1))])
def test_frames_along_a_line_need_no_second_axis_of_space(shape, T, expected):
    """Also where the training had another dataset in the plane."""
    model = small_model(frames=T)
    model.data = {name: {'train': dict(channels=['u'], static=[], shape=[9, 9, *space, 1])}
                  for name, space in (('line', (1, 16)), ('plane', (16, 16)))}
    assert evaluate.rollout(model, torch.rand(shape), 2, 'line').shape == expected


def test_nothing_follows_the_solution_of_a_steady_problem():
    units = data.Units(torch.zeros(2, 1), torch.tensor([[1.], [3.]]), torch.zeros(1)).header()
    units['mean'][1] = [2.0]
    for normalize in True, False:
        model = small_model(frames=1, normalize=normalize)
        model.data = {'heat': {'train': dict(channels=['u'], static=[], shape=[9, 2, 16, 16, 1], units=units)}}
        assert evaluate.rollout(model, torch.rand(3, 1, 16, 16, 1), 1).shape == (3, 1, 16, 16, 1)
        with pytest.raises(configs.InputError, match='2 steps: the input of a steady problem is another'):
            evaluate.rollout(model, torch.rand(3, 1, 16, 16, 1), 2)


@torch.no_grad()
def test_a_rollout_in_three_dimensions_equals_steps_of_the_network():
    solid, frames = small_model(resolution=8, dims=3), torch.rand(2, 3, 6, 8, 4, 2)
    expected = torch.stack([slow_rollout(solid, u, [0, 1], 2) for u in frames])
    torch.testing.assert_close(evaluate.rollout(solid, frames, 2), expected)
    torch.testing.assert_close(evaluate.rollout(solid, frames[1], 2)[0], expected[1])


def test_a_steady_dataset_has_no_persistence_but_a_median_relative_l1(folder, call):
    for name, frames in (('steady', 2), ('moving', 4)):
        write(folder, name, travelling(3, frames, 16, 1, 0.4), 'test')
    path = save(small_model(frames=1), folder, 'a/last.pt')
    flags = ['--checkpoint', path, '--device', 'cpu', '--json', folder / 'a.json',
             '--datasets', 'steady', 'moving']
    steady, moving = call(flags, evaluate)[2].splitlines()[-2:]
    scores = report_of(folder / 'a.json')['datasets']['steady']['model']
    step, vrmse = (f'{scores[name]["mean"]:.4f}' for name in ('step', 'step_vrmse'))
    median = f'median relative L1 {np.median(scores["l1"]["samples"]):.4f}'
    assert steady.split() == ['steady', '3', '1', *[step, vrmse, '-'] * 2, *median.split()]
    assert scores['rollout'] == scores['step'] and '-' not in moving.split()


def test_the_lines_for_a_notebook_run_as_they_are_printed(model, tmp_path, monkeypatch):
    write(tmp_path / 'data/nano', 'wave_gauss', travelling(2, 9, 12, 2, 0.4), 'test')
    save(model, tmp_path, 'nano/last.pt', layouts={'wave_gauss': dict(channels=('0', '1'), static=())})
    block = re.search(r'```python\n(.*?)```', (ROOT / 'docs/evaluation.md').read_text(), re.S)[1]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(block, names)
    test = data.Trajectories('data/nano', 'wave_gauss', 'test', 3, 4)
    prediction, after = names['prediction'], names['u'].shape[1]
    truth = np.stack([read(test, i, after, 9) for i in range(2)])
    assert names['error'] == pytest.approx(evaluate.l2re(prediction, truth), rel=1e-5)


def test_another_model_grid_is_that_of_the_scores(checkpoint, folder, call):
    flags = ['--checkpoint', checkpoint, '--datasets', 'coarse', '--device', 'cpu']
    flags += ['--resolution', '24x32', '--json', folder / 'a.json']
    code, _, printed = call(flags, evaluate)
    report = report_of(folder / 'a.json')
    assert code == 0 and ' 24x32 grid, ' in printed and report['resolution'] == [24, 32]
    model, test = evaluate.load(checkpoint), trajectories(folder, 'coarse')
    found = report['datasets']['coarse']['model']['step']['samples']
    assert not np.allclose(found, evaluate.score(model, test, CPU)['model']['step'], rtol=1e-5)
    model.config = dataclasses.replace(model.config, resolution=(24, 32))
    np.testing.assert_allclose(found, evaluate.score(model, test, CPU)['model']['step'], rtol=1e-5)


def test_a_metric_of_ones_own_has_its_column_in_the_table(model, folder, monkeypatch):
    largest = lambda u, v, floor: (u - v).abs().flatten(1).amax(1)
    metric = evaluate.Metric('one step', 'largest', largest)
    monkeypatch.setitem(evaluate.METRICS, 'largest', metric)
    scores = evaluate.score(model, trajectories(folder, 'own'), CPU)
    heads, captions, line = (line.split() for line in evaluate.score_table({'own': scores}))
    assert captions[-3:-1] == ['VRMSE', 'largest']
    assert f'{scores["model"]["largest"].mean().item():.4f}' in line


def test_a_rollout_goes_by_the_grid_that_the_training_read(tmp_path):
    """A network of 16x16 points that was trained on 24x24 never saw its own raw frames."""
    model = small_model()
    write(tmp_path, 'own', travelling(2, 7, 24, 1, 0.4), 'test')
    test = trajectories(tmp_path, 'own')
    frames = test.windows([(0, 0), (1, 0)], 3)
    for grid in 24, 16, None:
        known = {'shape': [2, 7, grid, grid, 1]} if grid else {}
        model.data = {'own': {'train': {'channels': ['0'], 'static': [], **known}}}
        predictor = evaluate.Predictor(model, test, torch.device('cpu'))
        state = predictor.step(predictor.state(frames))
        back, raw = (x[:, -1:, ..., :1] for x in (predictor.fed_back(state), state))
        expected = data.resize(data.resize(raw, (24, 24)), (16, 16)) if grid == 24 else raw
        assert torch.equal(back, expected) and torch.equal(back, raw) == (grid != 24)
        unnamed, named = (evaluate.rollout(model, frames, 2, dataset) for dataset in ('', 'own'))
        assert torch.equal(unnamed, named)


def test_figures_need_matplotlib_and_a_trajectory(checkpoint, folder, monkeypatch, refused):
    flags = ['--checkpoint', checkpoint, '--rollout', '4', '--figures', folder / 'new']
    words = f'--channel u --trajectory 5: {folder}/own/test.h5 has the trajectories 0 to 4, and '
    if importlib.util.find_spec('matplotlib'):
        refused([*flags, '--trajectory', 5, '--datasets', 'own'], words, evaluate)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    words = 'error: figures need matplotlib: pip install matplotlib\n'
    assert not refused(flags, words, evaluate)[1], 'nothing was printed before'
    assert not (folder / 'new').exists()
