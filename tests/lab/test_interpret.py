"""Gains, the probe and the collected T against loops, and the command."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import configs
import data
from helpers import CPU, ONE_LAYER, read, slow_rollout, small_model, trajectories, travelling, write
from lab import interpret
from nets.build import build


def test_gains_equal_a_loop_over_samples_and_suffix_products():
    T = torch.randn(3, 5, 4, 4, dtype=torch.float64)
    gain = interpret.gains(T)
    for b in range(3):
        for l in range(5):
            product = np.eye(4)
            for later in T[b, l:].numpy():
                product = later @ product                               # x <- T_l x, T_l first
            for kind, M in (('', T[b, l].numpy()), ('_composite', product)):
                np.testing.assert_allclose(gain['forward' + kind][b, l], np.linalg.norm(M, np.inf), rtol=1e-12)
                np.testing.assert_allclose(gain['backward' + kind][b, l], np.linalg.norm(M, 1), rtol=1e-12)


def step_by_hand(model, u, what='', means=None):
    """The next frame, by the equations of aotpot.py with one mapping fixed, and [a; d; T] of all sub-layers."""
    x = model.aggregate(model.embed(u))
    x = x[:, None].expand(-1, model.config.streams, *x.shape[1:])
    blocks, found = [], []
    for layer in model.layers:
        blocks.append((layer.aot1.mappings, lambda x, layer=layer: layer.post1(layer.mixer(layer.norm1(x)))))
        blocks.append((layer.aot2.mappings, lambda x, layer=layer: layer.post2(layer.mlp(layer.norm2(x)))))
    for l, (mappings, F) in enumerate(blocks):
        a, d, T = mappings(x.mean((2, 3)))
        found.append(torch.cat([a[:, None], d[:, None], T], 1))
        a = means[l, 0].expand_as(a) if what == 'a' else a
        d = means[l, 1].expand_as(d) if what == 'd' else d
        T = means[l, 2:].expand_as(T) if what == 'T' else T
        y = F(torch.einsum('bs,bshwd->bhwd', a, x))
        x = torch.einsum('brs,bshwd->brhwd', T, x) + torch.einsum('br,bhwd->brhwd', d, y)
        if what == 'streams':
            x = x.mean(1, keepdim=True).expand_as(x)
    return model.readout(torch.einsum('s,bshwd->bhwd', torch.softmax(model.gate, 0), x)), found


@torch.no_grad()
def test_what_is_observed_is_what_each_block_computes_for_its_streams():
    model = small_model(depth=2, alpha=2.0, streams=3)
    u = torch.randn(2, 3, 16, 16, 4)
    with interpret.observed(model) as values:
        model(u)
    assert not any(module._forward_hooks for module in model.modules()), 'nothing is left behind'
    torch.testing.assert_close(values, step_by_hand(model, u)[1], rtol=1e-4, atol=1e-5)
    assert (values[1][0] - values[1][1]).abs().max() > 0.01


def test_windows_are_spread_over_trajectories_and_then_frames(folder):
    test = trajectories(folder, 'own')                                  # 5 trajectories, 4 windows each
    assert interpret.evenly_spaced_inputs(test, 3) == [(0, 0), (1, 0), (2, 0)]
    assert interpret.evenly_spaced_inputs(test, 10) == [(i, start) for start in (0, 2) for i in range(5)]
    assert sorted(interpret.evenly_spaced_inputs(test, 100)) == [(i, start) for i in range(5) for start in range(4)]


def windows_of(test, limit):
    """The frames (N, 4, *space, C) of the inputs of a step and of its truth, one after another."""
    places = interpret.evenly_spaced_inputs(test, limit)
    return torch.stack([torch.from_numpy(read(test, i, start, start + 4)) for i, start in places])


@torch.no_grad()
def test_inputs_are_collected_in_batches_with_the_error_of_a_step(model, folder):
    test = trajectories(folder, 'own')
    values, errors = interpret.observe(model, test, CPU, 7, batch_size=3)
    windows = windows_of(test, 7)
    with interpret.observed(model) as expected:
        model(data.to_model(windows[:, :3], (16, 16), 4))
    torch.testing.assert_close(values.float(), torch.stack(expected, 1))
    for error, window in zip(errors, windows, strict=True):
        step = slow_rollout(model, window, test.evolving, 1)[0]
        torch.testing.assert_close(error, relative_error(step, window[3][..., test.evolving]), rtol=1e-4, atol=0)


def relative_error(u, v):
    """The mean over the channels of ||u - v|| / ||v|| of fields (H, W, C)."""
    return ((u - v).double().norm(dim=(0, 1)) / v.double().norm(dim=(0, 1))).mean()


@torch.no_grad()
@pytest.mark.parametrize('form', ['fast', 'paper'])
def test_what_is_fixed_is_fixed_at_its_mean_over_the_inputs_of_all_datasets(folder, form):
    """Beside the equations of the block, with the streams themselves averaged."""
    torch.manual_seed(0)
    model = build(configs.model('tiny', **{**ONE_LAYER, 'depth': 2}, alpha=2.0), form).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    sets = [trajectories(folder, name) for name in ('own', 'coarse')]
    collected = lambda test: interpret.observe(model, test, CPU, 6)
    rows = interpret.fixed(model, sets, collected)
    means = torch.cat([collected(test)[0] for test in sets]).mean(0).float()
    found = {what: [] for what in rows}
    for test in sets:
        windows = windows_of(test, 6)
        state = data.to_model(windows[:, :3], (16, 16), 4)
        for what in rows:
            frames, _ = step_by_hand(model, state, what, means)
            u = data.resize(frames[:, None], test.space)[:, 0][..., test.evolving]
            errors = [relative_error(*pair) for pair in zip(u, windows[:, 3][..., test.evolving])]
            found[what].append(torch.stack(errors).mean().item())
    for what, errors in found.items():
        np.testing.assert_allclose([*rows[what].values()], errors, rtol=1e-4, err_msg=what)
    ratios = interpret.ratios(rows)
    by_hand = np.sqrt(np.prod(found['d']) / np.prod(found['nothing']))
    assert [*ratios] == ['a', 'd', 'T', 'streams'] and ratios['d'] == pytest.approx(by_hand, rel=1e-4)
    assert min(abs(ratio - 1) for ratio in ratios.values()) > 5e-4, ratios
    own = interpret.fixed(model, sets, collected, own=True)
    for test in sets:                                   # as if there were no other dataset
        alone = interpret.fixed(model, [test], collected)
        assert {what: errors[test.name] for what, errors in own.items()} == pytest.approx(
            {what: errors[test.name] for what, errors in alone.items()}, rel=1e-6)
    assert own['d'] != rows['d']


def test_an_unseen_dataset_gets_its_own_template_and_leaves_the_others_alone():
    sets = [SimpleNamespace(name=name, count=4, t_test=1) for name in ('a', 'ns2d_fno_1', 'ns2d_fno_2')]
    values = [0., 0, 1, 7], [4., 4, 5, 5], [6., 6, 6, 6]                 # 0 and 2 make templates 0.5, 4.5 and 6
    T = {test.name: torch.tensor(of).view(4, 1, 1, 1) for test, of in zip(sets, values)}
    _, alone = interpret.classify({name: T[name] for name in ('a', 'ns2d_fno_1')}, sets[:2])
    assert alone['confusion'] == [[1, 1], [0, 2]] and alone['groups'] == ['a', 'ns2d_fno']
    assert alone['accuracy'] == pytest.approx((0.5 + 1) / 2), 'the mean over the groups'
    _, rows = interpret.classify(T, sets, ['ns2d_fno_2'])
    assert rows['groups'] == ['a', 'ns2d_fno', 'ns2d_fno_2'], 'not in the group of its family'
    assert rows['confusion'] == [[1, 0, 1], [0, 2, 0], [0, 0, 2]]
    assert rows['right'] == {'a': 0.5, 'ns2d_fno': 1, 'ns2d_fno_2': 1}


def test_unseen_datasets_join_the_probe_and_nothing_else(checkpoint, folder, call):
    flags = ['--checkpoint', checkpoint, '--probe', '--gains', '--samples', '6', '--device', 'cpu', '--json']
    assert call([*flags, folder / 'alone.json'], interpret)[0] == 0
    write(folder, 'new', travelling(4, 7, 8, 2, 0.3, scale=3), 'test')
    flags += [folder / 'unseen.json', '--datasets', 'coarse', 'own', '--unseen', 'new']
    code, error, printed = call(flags, interpret)
    assert code == 0, error
    alone, unseen = (json.loads((folder / f'{name}.json').read_text())['models']['small']
                     for name in ('alone', 'unseen'))
    for kind, values in alone['gains'].items():
        np.testing.assert_allclose(unseen['gains'][kind]['max'], values['max'], rtol=1e-6)
    np.testing.assert_allclose(unseen['probe']['mean']['own'], alone['probe']['mean']['own'], rtol=1e-5)
    assert len(unseen['probe']['confusion']) == 3 and len(alone['probe']['confusion']) == 2
    assert printed.splitlines()[-1].split()[:3] == ['(3)', 'new', f'{unseen["probe"]["right"]["new"]:.3f}']


def test_gains_and_probe_print_and_write_what_the_functions_give(model, checkpoint, folder, call):
    """Without one of their flags the command does both."""
    flags = ['--checkpoint', checkpoint, '--samples', '6', '--device', 'cpu', '--json', folder / 'T.json']
    code, _, printed = call(flags, interpret)
    written = json.loads((folder / 'T.json').read_text())['models']['small']
    T = [interpret.observe(model, trajectories(folder, name), CPU, 6)[0][:, :, 2:] for name in ('coarse', 'own')]
    gain = interpret.gains(torch.cat(T))['backward_composite']
    np.testing.assert_allclose(written['gains']['backward_composite']['mean'], gain.mean(0), rtol=1e-9)
    np.testing.assert_allclose(written['gains']['backward_composite']['max'], gain.amax(0), rtol=1e-9)
    of_sets = dict(zip(('coarse', 'own'), T))
    _, probe = interpret.classify(of_sets, [trajectories(folder, name) for name in of_sets])
    assert code == 0 and written['probe']['confusion'] == probe['confusion'] and 'datasets' not in written
    np.testing.assert_allclose(written['probe']['mean']['own'], T[1].mean(0), rtol=1e-9)
    assert f'{gain.amax(0)[0]:.4f}' in printed and f'accuracy {probe["accuracy"]:.3f}' in printed
    _, _, printed = call([*flags, '--gains'], interpret)
    alone = json.loads((folder / 'T.json').read_text())['models']['small']
    assert alone['gains'] == written['gains'] and 'probe' not in alone and 'nearest' not in printed
    _, _, printed = call([*flags, '--fixed'], interpret)
    written = json.loads((folder / 'T.json').read_text())['models']['small']
    rows, own = written['fixed'], written['fixed_by_dataset']
    assert [line.split() for line in printed.splitlines()[-4:]] == [
        [what, f'{ratio:.2f}', f'{interpret.ratios(own)[what]:.2f}'] for what, ratio in interpret.ratios(rows).items()]


@pytest.mark.parametrize('form', ['fast', 'paper'])
def test_the_control_of_the_probe_takes_the_pooled_tokens_before_each_layer(form):
    model, u = build(configs.model('tiny', **ONE_LAYER, residual='plain'), form), torch.randn(3, 3, 16, 16, 4)
    with interpret.observed(model) as tokens:
        model(u)
    x, means = model.aggregate(model.embed(u)), []
    for layer in model.layers:
        means.append(x.mean((1, 2)))
        x = x + layer.mlp(layer.norm2(layer.mixer(layer.norm1(x))))
    torch.testing.assert_close(tokens, means, rtol=1e-4, atol=1e-5)
