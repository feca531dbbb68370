"""Gains, the probe and the collected T against loops, and the command."""
import copy
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate
from helpers import CPU, read, save, trajectories, travelling, write
from lab import interpret


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


@torch.no_grad()
def test_what_is_observed_is_what_the_mappings_give_for_inputs_spread_over_trajectories_and_then_frames(model, folder):
    test = trajectories(folder, 'own')                                  # 5 trajectories, 4 windows each
    places = interpret.evenly_spaced_inputs(test, 10)
    assert places == [(i, start) for start in (0, 2) for i in range(5)]
    assert interpret.evenly_spaced_inputs(test, 3) == [(0, 0), (1, 0), (2, 0)]
    assert sorted(interpret.evenly_spaced_inputs(test, 100)) == [(i, start) for i in range(5) for start in range(4)]
    observed = interpret.observe(model, test, CPU, 10, batch_size=3)
    assert not any(module._forward_hooks for module in model.modules()), 'nothing is left behind'
    windows = torch.stack([torch.from_numpy(read(test, i, start, start + 3)) for i, start in places])
    predictor = evaluate.Predictor(model, test, CPU.device)
    sublayers = []
    for module in interpret.mappings(model):
        module.register_forward_hook(lambda module, inputs, outputs: sublayers.append(outputs))
    predictor.step(predictor.state(windows))
    assert len(sublayers) == 2 * model.config.depth
    expected = [torch.stack(of_all, 1) for of_all in zip(*sublayers)]
    torch.testing.assert_close([values.float() for values in observed], expected)


@torch.no_grad()
def test_a_fixed_mapping_is_its_mean_for_all_inputs_as_in_a_network_whose_bias_alone_gives_it(model, folder):
    """Eq. (10) to (12) without their parts that depend on the input."""
    tests = [trajectories(folder, name) for name in ('coarse', 'own')]
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    observed = [interpret.observe(model, test, CPU) for test in tests]
    means = [torch.cat(of_all).mean(0) for of_all in zip(*observed)]
    _, report = interpret.scores_if_fixed(model, observed, tests, CPU)
    assert not any(module._forward_hooks for module in model.modules()), 'nothing is left behind'
    inverses = {'a': torch.logit, 'd': lambda mean: torch.logit(mean / 2), 'T': torch.log}
    for (letter, inverse), mean in zip(inverses.items(), means):
        other = copy.deepcopy(model)
        for module, of_sublayer in zip(interpret.mappings(other), mean):
            getattr(module, f'alpha_{letter}').zero_()
            getattr(module, f'b_{letter}').copy_(inverse(of_sublayer))
        for name, scores in evaluate.score_all(other, tests, CPU).items():
            torch.testing.assert_close(report[letter][name]['model'], scores['model'], rtol=1e-4, atol=0)
        for test, unfixed in zip(tests, observed):
            with interpret.fixed(model, letter, means):
                values_of = interpret.observe(model, test, CPU)
            for which, values, before in zip('adT', values_of, unfixed):
                if which == letter:
                    assert (values - before).abs().max() > 1e-3, 'it depended on the input'
                    torch.testing.assert_close(values, mean.expand_as(values), rtol=1e-6, atol=0)
                else:                                   # those of the first sub-layer come before any is fixed
                    assert values[:, 0].equal(before[:, 0])


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


def test_the_command_gives_what_the_functions_give_and_an_unseen_dataset_joins_the_probe_alone(
        model, checkpoint, folder, call):
    def command(name, *flags):
        path = folder / f'{name}.json'
        flags = '--json', path, '--checkpoint', checkpoint, '--device', 'cpu', '--samples', 6, *flags
        code, error, printed = call(flags, interpret)
        assert code == 0, error
        return json.loads(path.read_text())['models']['small'], printed
    fixed, printed = command('fixed', '--fixed')
    assert 'probe' not in fixed and [*fixed['fixed']] == ['none', 'a', 'd', 'T', 'all']
    assert f"{fixed['fixed']['all']['own']['model']['step']['mean']:.4f}" == printed.split()[-1]
    alone, printed = command('alone')
    T = {name: interpret.observe(model, trajectories(folder, name), CPU, 6)[2] for name in ('coarse', 'own')}
    gain = interpret.gains(torch.cat([*T.values()]))['backward_composite']
    means = alone['gains']['backward_composite']['mean']
    np.testing.assert_allclose(means, gain.mean(0), rtol=1e-9)
    _, probe = interpret.classify(T, [trajectories(folder, name) for name in T])
    assert alone['probe']['confusion'] == probe['confusion'] and 'datasets' not in alone
    np.testing.assert_allclose(alone['probe']['mean']['own'], T['own'].mean(0), rtol=1e-9)
    assert f'{gain.amax(0)[0]:.4f}' in printed and f'accuracy {probe["accuracy"]:.3f}' in printed

    write(folder, 'new', travelling(4, 7, 8, 2, 0.3, scale=3), 'test')
    unseen, printed = command('unseen', '--datasets', 'coarse', 'own', '--unseen', 'new')
    for kind, values in alone['gains'].items():
        np.testing.assert_allclose(unseen['gains'][kind]['max'], values['max'], rtol=1e-6)
    assert len(unseen['probe']['confusion']) == 3
    right = f'{unseen["probe"]["right"]["new"]:.3f}'
    assert printed.splitlines()[-1].split()[:3] == ['(3)', 'new', right]


def test_in_another_folder_it_takes_the_datasets_of_the_training(model, folder, call):
    """Of which each may be there in small."""
    path = save(model, folder, 'small/last.pt', datasets=('coarse', 'own'))
    shutil.copytree(folder, folder / 'moved')
    write(folder / 'moved', 'foreign', travelling(4, 7, 8, 1, 0.3), 'test')
    flags = ['--checkpoint', path, '--data', folder / 'moved', '--samples', '4', '--device', 'cpu', '--probe']
    code, error, printed = call(flags, interpret)
    assert code == 0 and 'of 2 groups' in printed and 'foreign' not in printed, error
