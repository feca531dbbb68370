"""A training on s * u + c is a training on u: units, noise, channels at rest, and a line where that does not hold."""
import numpy as np
import pytest
import torch

import data
import evaluate
import finetune
import train
from helpers import log, write
from runtime import checkpoint

NANO = ['--frames', 3, '--resolution', 16, '--width', 32, '--mlp', 32, '--depth', 1, '--device', 'cpu', '--threads', 1,
        '--batch_size', 4, '--log_every', 100, '--save_every', 1000]


def waves(N, T=10, H=16, seed=0):
    """Travelling waves of mean 0 and deviation 0.7: (N, T, H, H, 1)."""
    random = np.random.default_rng(seed)
    x = 2 * np.pi * np.arange(H) / H
    t = 0.3 * np.arange(T)[:, None, None]
    u = []
    for _ in range(N):
        k = random.integers(1, 3, 2)
        u.append(np.sin(k[0] * x[:, None] + k[1] * x - t + random.uniform(0, 2 * np.pi)))
    return np.stack(u)[..., None]


def from_rest(N, T=8, H=16):
    """u is a standing wave and v its derivative in time, which begins as 0: (N, T, H, H, 2)."""
    u = waves(N, 1, H)
    t = 0.4 * np.arange(T).reshape(1, T, 1, 1, 1)
    return np.concatenate([u * np.cos(t), -u * np.sin(t)], -1)


def pair(folder, name, u, **attributes):
    """Write a dataset of u (N, T, *space, C), of which a quarter is for testing."""
    write(folder, name, u[len(u) // 4:], 'train', **attributes)
    write(folder, name, u[:len(u) // 4], 'test', **attributes)


@pytest.fixture
def trained(tmp_path, call):
    """trained({name: u}, steps, flags) trains a smaller `nano`: {name: VRMSE of rollouts and of one step}, in `out`."""
    def run(sets, *flags, script=train, out='out'):
        for name, u in sets.items():
            pair(tmp_path / 'data', name, u)
        base = NANO if script is train else ['--batch_size', 4, '--device', 'cpu', '--threads', 1]
        names = ['--datasets', *sets] if script is train else ['--dataset', *sets]
        places = ['--data', tmp_path / 'data', '--out', tmp_path / out]
        code, error, printed = call([*base, *places, *names, *flags], script)
        assert code == 0, error
        rows = [line.split() for line in printed.splitlines() if line.endswith('x')]
        return {row[0]: np.array([float(row[4]), float(row[7])]) for row in rows}
    run.folder = tmp_path
    return run


@pytest.mark.parametrize('scale, offset', [(1e5, 0), (1, 29), pytest.param(1e-6, 100, marks=pytest.mark.slow)])
def test_a_training_in_other_units_has_the_same_error_of_the_fluctuations(trained, scale, offset):
    """And so has a fine-tuning. offset: in deviations. The bound is wide: a training amplifies every rounding."""
    u = waves(16)
    other = scale * (u + offset * u.std())
    plain = trained({'u': u}, '--steps', 120)['u']
    np.testing.assert_allclose(trained({'v': other}, '--steps', 120, out='v')['v'], plain, rtol=0.4)
    assert plain[1] < 0.2
    start = '--steps', 40, '--checkpoint', trained.folder / 'out'
    tuned = trained({'u': u}, *start, script=finetune, out='u-u')['u']
    assert tuned[1] < plain[1]
    np.testing.assert_allclose(trained({'v': other}, *start, script=finetune, out='u-v')['v'], tuned, rtol=0.4)


@pytest.mark.parametrize('H', [32, 64, 96])
def test_noise_is_a_share_of_the_fluctuations_whatever_the_mean_and_the_grid(H):
    u = torch.from_numpy(5 * waves(2, 5, H)).float()
    for offset in 0, 290:
        noise = data.add_noise(u + offset, 1e-4, [(1, slice(1)), (2, slice(1))], fluctuations=True) - (u + offset)
        torch.testing.assert_close(noise.std() / u.std(), torch.tensor(0.0143), rtol=0.02, atol=0)
    noise = data.add_noise(u, 1e-4, [(1, slice(1)), (2, slice(1))]) - u                                 # the paper's
    torch.testing.assert_close(noise.std(), 1e-4 * u[0].norm(), rtol=0.03, atol=0)


def test_from_rest_something_starts_in_each_dataset_of_a_mixture_in_its_own_units(trained):
    sets = {'large': from_rest(16), 'small': 1e-5 * from_rest(16)}
    found = trained(sets, '--frames', 1, '--steps', 250)
    assert found['large'][1] < 0.8 and found['small'][1] < 0.8
    model = evaluate.load(trained.folder / 'out')
    for name, u in sets.items():
        v = evaluate.rollout(model, u[:4, :1], 1, name)[:, 0, ..., 1]                   # 0 if nothing could start
        assert np.linalg.norm(v - u[:4, 1, ..., 1]) < 0.9 * np.linalg.norm(u[:4, 1, ..., 1]), name


def test_a_channel_that_stays_constant_is_predicted_so(trained):
    u = np.concatenate([waves(8), np.full((8, 10, 16, 16, 1), 7.0), np.zeros((8, 10, 16, 16, 1))], -1)
    trained({'u': u}, '--steps', 40)
    found = evaluate.rollout(evaluate.load(trained.folder / 'out'), u[:2, :3], 5)
    assert abs(found[..., 1] / 7 - 1).max() < 1e-3 and abs(found[..., 2]).max() == 0


def test_a_truth_of_round_off_does_not_decide_the_training(trained):
    rest = np.random.default_rng(0).standard_normal((8, 10, 16, 16, 1))
    losses = {}
    for name, size in ('zero', 0), ('roundoff', 1e-17):
        u = np.concatenate([waves(8), rest], -1)
        u[:, :5, ..., 1] *= size
        trained({name: u}, '--steps', 30, '--loss', 'relative', out=name)
        losses[name] = log(trained.folder / name)[-1]['loss']
    assert losses['roundoff'] < 1.5 and losses['roundoff'] == pytest.approx(losses['zero'], rel=0.3)


@pytest.mark.parametrize('units, said', [
    (lambda u: 1e5 * u, True), (lambda u: 1e-5 * u, True), (lambda u: 290 + 5 * u, True), (lambda u: 2 + u, False)])
def test_without_normalize_the_header_names_the_channel_whose_units_are_not_learned(trained, call, units, said):
    pair(trained.folder / 'data', 'u', units(waves(4)), channels=['p'])
    flags = [*NANO, '--data', trained.folder / 'data', '--out', trained.folder / 'out', '--steps', 1]
    assert ('  p of u has values of ' in call([*flags, '--no-normalize'])[2]) == said
    assert 'has values of' not in call([*flags[:-3], trained.folder / 'other', *flags[-2:]])[2]


def test_a_first_loss_that_is_not_finite_names_the_data_and_not_the_rate(trained, refused):
    pair(trained.folder / 'data', 'u', 1e38 * waves(4), channels=['p'])
    flags = [*NANO, '--data', trained.folder / 'data', '--out', trained.folder / 'out', '--steps', 2, '--log_every', 1]
    error, _ = refused([*flags, '--no-normalize', '--loss', 'squared'], 'error: step 1: the loss is ', lines=None)
    assert 'p of u, 7.1e+37' in error and '--lr' not in error


def test_an_older_checkpoint_keeps_the_raw_units(trained):
    u = waves(8)
    trained({'u': u}, '--steps', 4)
    saved = torch.load(trained.folder / 'out/last.pt')
    assert saved['config']['model'].pop('units') == 'log'
    torch.save(saved, trained.folder / 'old.pt')
    assert checkpoint.load_file(trained.folder / 'old.pt')['config']['model']['units'] == 'raw'
    model = evaluate.load(trained.folder / 'old.pt')
    mean, deviation = torch.tensor([1e5, 3.0]), torch.tensor([0.0, 2.0])
    assert torch.equal(model.units.describe(mean, deviation), torch.cat([mean, deviation]))


def test_an_older_network_that_is_tuned_on_other_data_is_no_longer_told_raw_units(trained):
    u = waves(8)
    trained({'u': u}, '--steps', 40)
    saved = torch.load(trained.folder / 'out/last.pt')
    del saved['config']['model']['units']
    torch.save(saved, trained.folder / 'old.pt')
    start = '--steps', 20, '--checkpoint', trained.folder / 'old.pt'
    found = {}
    for name, values in ('v', 2 * u), ('pascal', 1e5 * u), ('kelvin', 290 + 5 * u):
        found[name] = trained({name: values}, *start, script=finetune, out=name)[name]
    np.testing.assert_allclose(found['pascal'], found['v'], rtol=0.4)
    np.testing.assert_allclose(found['kelvin'], found['v'], rtol=0.4)
    trained({'u': u}, *start, script=finetune, out='known')
    units = [evaluate.load(trained.folder / out).config.units for out in ('v', 'known')]
    assert units == ['log', 'raw'], 'its own data it knows in raw units'
