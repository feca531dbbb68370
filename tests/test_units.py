"""A training on s u + c is a training on u: units, noise, channels at rest, lines."""
import numpy as np
import pytest
import torch

import aotpot
import data
import evaluate
import finetune
import train
from helpers import CPU, same, write
from sources.pdes.navier_stokes import navier_stokes

HERE = '--device', 'cpu', '--threads', 1, '--batch_size', 4
NANO = [*HERE, '--frames', 3, '--resolution', 16, '--width', 32, '--mlp', 32, '--depth', 1,
        '--log_every', 100, '--save_every', 1000]


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


def flow(N, T=9, H=16):
    """Three channels u, v, p of a travelling field, each of deviation 0.7: (N, T, H, H, 3)."""
    u = waves(N, T, H)
    return np.concatenate([2 * waves(N, T, H, c) * np.roll(u, c, 2) for c in range(3)], -1)


def differing(N):
    """The same of other factors and means, so that windows get units of their own."""
    factor = np.exp(np.random.default_rng(0).standard_normal((N, 1, 1, 1, 1)))
    return factor * (flow(N) + 3)


def turbulence(N, T, H=32):
    """Decaying turbulence on the unit torus: u, v and the pressure p, (N, T, H, H, 3)."""
    k = 2 * np.pi * np.fft.fftfreq(H, 1 / H)
    kx, ky = k[:, None], k[None]
    square = kx ** 2 + ky ** 2
    w = np.fft.fft2(np.random.default_rng(0).standard_normal((N, H, H)))
    w = np.fft.ifft2(w * np.exp(-square / (2 * np.pi * 4) ** 2) * (square > 0)).real
    velocity = navier_stokes(torch.from_numpy(6 * w / w.std()), 1e-3, T, 0.12, forcing=0, full=True)
    u, v = np.moveaxis(velocity.numpy(), -1, 0)
    ux, uy, vx, vy = (np.fft.ifft2(1j * q * np.fft.fft2(f)).real for f in (u, v) for q in (kx, ky))
    source = np.fft.fft2(ux ** 2 + 2 * uy * vx + vy ** 2)
    return np.stack([u, v, np.fft.ifft2(source / np.where(square > 0, square, np.inf)).real], -1)


def pair(folder, name, u, **attributes):
    """Write a dataset of u (N, T, *space, C), of which a quarter is for testing."""
    write(folder, name, u[len(u) // 4:], 'train', **attributes)
    write(folder, name, u[:len(u) // 4], 'test', **attributes)


@pytest.fixture
def trained(tmp_path, call):
    """trained({name: u}, flags) trains a smaller `nano`: {name: its two VRMSE}, in `out`."""
    def run(sets, *flags, script=train, out='out'):
        for name, u in sets.items():
            pair(tmp_path / 'data', name, u)
        names = ['--datasets', *sets] if script is train else ['--dataset', *sets]
        places = ['--data', tmp_path / 'data', '--out', tmp_path / out]
        base = NANO if script is train else HERE
        code, error, printed = call([*base, *places, *names, *flags], script)
        assert code == 0, error
        rows = [line.split() for line in printed.splitlines() if {*line.split()[:1]} & {*sets}]
        rows = [row for row in rows if len(row) > 8 and row[3][0].isdigit()]
        return {row[0]: np.array([float(row[4]), float(row[7])]) for row in rows}
    run.folder = tmp_path
    return run


@pytest.mark.parametrize('fields, own, steps', [
    pytest.param(flow, 0, 40, marks=pytest.mark.slow), (differing, 1, 8)])
def test_runs_on_a_power_of_two_of_the_fields_are_the_same_bit_for_bit(trained, fields, own, steps, monkeypatch):
    u = fields(16)
    took, film = [], aotpot.FiLM.forward

    def seen(self, x, condition):
        took.append(self.training and condition[:, 0].any().item())
        return film(self, x, condition)
    monkeypatch.setattr(aotpot.FiLM, 'forward', seen)
    weights = lambda run: torch.load(trained.folder / run / 'last.pt')['model']
    scales = {'u': 1, 'large': 2.0 ** 17, 'small': 2.0 ** -20}
    for name, scale in scales.items():
        trained({name: scale * u}, '--steps', steps, out=name)
        flags = '--steps', steps // 2, '--checkpoint', trained.folder / name
        trained({name: scale * u[:12]}, *flags, script=finetune, out=f'{name}-tuned')
        assert same(weights(name), weights('u')), name
        assert same(weights(f'{name}-tuned'), weights('u-tuned')), name
    header = evaluate.load(trained.folder / 'large').data['large']['train']
    assert header['units']['own'] == 3 * [own]
    assert any(took) == own, 'the network is told the means'


@pytest.mark.parametrize('fields', [flow, pytest.param(differing, marks=pytest.mark.slow)])
def test_fields_in_other_units_give_the_same_table(trained, fields):
    """Every training amplifies rounding, so that this one is short."""
    u = fields(16)
    plain = trained({'u': u}, '--steps', 12)['u']
    for name, other in ('micro', 1e-6 * u), ('mega', 1e6 * u), ('offset', u + 64 * u.std()):
        found = trained({name: other}, '--steps', 12, out=name)[name]
        np.testing.assert_allclose(found, plain, rtol=1e-3, err_msg=name)


def test_pressure_in_pascal_beside_velocities_is_learned_as_well(trained):
    u = flow(16)
    errors = {}
    for name, values in ('one', u), ('pascal', u * [1, 1, 1.3] + [0, 0, 101325]):
        trained({name: values}, '--steps', 40, out=name)
        model = evaluate.load(trained.folder / name)
        test = data.Trajectories(trained.folder / 'data', name, 'test', 3, 3)
        channels = evaluate.score(model, test, CPU)['channels']
        errors[name] = [means['model']['step_vrmse'] for means in channels.values()]
    np.testing.assert_allclose(errors['pascal'], errors['one'], rtol=0.05)


@pytest.mark.slow
def test_turbulence_with_pressure_in_pascal_stays_finite_and_its_pressure_is_learned(trained):
    u = turbulence(55, 40)
    u = u / u.std((0, 1, 2, 3)) * [1, 1, 1.3] + [0, 0, 101325]
    flags = '--resolution 32 --frames 5 --width 64 --mlp 128 --depth 3 --steps 400 --batch_size 3'
    trained({'u': u}, *flags.split())
    model = evaluate.load(trained.folder / 'out')
    test = data.Trajectories(trained.folder / 'data', 'u', 'test', 5, 3)
    assert test.t_test == 35
    scores = evaluate.score(model, test, CPU)
    assert scores['model']['rollout_vrmse'].max() < 5
    p = scores['channels']['2']
    assert p['model']['step_vrmse'] < 0.8 * p['persistence']['step_vrmse'], p


def test_from_rest_something_starts_in_a_mixture_under_a_name_and_without_one(trained):
    """Of a standing wave u and its derivative v in time, which begins as 0."""
    t = 0.4 * np.arange(8).reshape(8, 1, 1, 1)
    u = waves(16, 1) * np.concatenate([np.cos(t), -np.sin(t)], -1)
    sets = {'large': u, 'small': 1e-5 * u}
    found = trained(sets, '--frames', 1, '--steps', 120)
    assert found['large'][1] < 0.8 and found['small'][1] < 0.8
    model = evaluate.load(trained.folder / 'out')
    for name, least, most in ('large', 0.1, 1.9), ('small', 0.1, 1.9), ('', 0.2, 2):
        u = sets[name or 'large'][:4]
        truth = u[:, 1, ..., 1]
        v = evaluate.rollout(model, u[:, :1], 1, name)[:, 0, ..., 1]            # 0: nothing starts
        assert least < np.linalg.norm(v) / np.linalg.norm(truth) < most
        assert not name or np.linalg.norm(v - truth) < 0.9 * np.linalg.norm(truth), name


@pytest.mark.parametrize('loss', ['relative', 'change'])
@pytest.mark.parametrize('rest', [0.0, 1e-17])
def test_an_error_of_a_channel_at_rest_counts_at_most_as_one_and_has_a_slope(rest, loss):
    windows = torch.full((1, 3, 8, 8, 1), rest)
    batch = data.Batch([windows], *[None] * 3, torch.tensor([[1e-3]]), torch.tensor([[True]]), [])
    pattern = torch.linspace(-1, 1, 64).view(1, 8, 8, 1)
    pattern = pattern / pattern.square().mean().sqrt()
    losses = []
    for off in 1e-4, 1e-3, 5e-2, 1:
        u = (rest + off * pattern).requires_grad_()
        losses.append(train.loss_of(u, batch, loss, normalize=True))
        slope, = torch.autograd.grad(losses[-1], u)
        assert (slope * pattern).sum() > 5e-5, 'per deviation'
        ratio = 1e3 * off * (1 if loss == 'relative' else 10)
        assert losses[-1].item() == pytest.approx(ratio / (1 + ratio), rel=1e-3)
    assert train.loss_of(torch.full((1, 8, 8, 1), rest), batch, loss, normalize=True) == 0


@pytest.mark.parametrize('loss, C', [
    pytest.param('relative', 2, marks=pytest.mark.slow), ('change', 3)])
def test_a_channel_at_rest_in_half_of_the_trajectories_learns_to_rest(trained, loss, C):
    constant = np.full((24, 10, 16, 16, 1), 7.0)
    u = np.concatenate([waves(24), waves(24, seed=1), constant], -1)[..., :C]
    u[:, :, ..., 1] *= np.arange(24).reshape(24, 1, 1, 1) % 2
    trained({'u': u}, '--steps', 150, '--loss', loss)
    off = evaluate.rollout(evaluate.load(trained.folder / 'out'), u[:6, :3], 1)[:, 0] - u[:6, 3]
    resting, moving = (np.square(off[first::2]).mean((0, 1, 2)) ** 0.5 for first in (0, 1))
    size = u[..., 1].std()
    assert resting[1] < 0.2 * size and moving[1] < 0.42 * size
    assert resting[2:].sum() < 0.15 and moving[2:].sum() < 0.15


@pytest.mark.parametrize('size, grid, flags, words', [((16, 16), '16x16', [], ''), (
    (20, 30), '20x32', [], 'fields of 20x30 are interpolated to 20x32, whole patches of 4 points'), (
    (16, 16), '8x8', ['--resolution', 8], 'fields of 16x16 are interpolated to 8x8, whole')])
def test_ones_own_data_are_dimensionless_on_their_own_grid(tmp_path, call, size, grid, flags, words):
    pair(tmp_path / 'data', 'mine', np.random.default_rng(0).standard_normal((4, 6, *size, 1)))
    flags = [*HERE, *'--size tiny --width 32 --mlp 32 --depth 1 --patch 4 --steps 1'.split(), *flags]
    code, error, printed = call([*flags, '--data', tmp_path / 'data', '--out', tmp_path / 'out'])
    assert code == 0 and f', {grid} grid' in printed, error
    assert '--normalize' in printed and words in printed
    assert evaluate.load(tmp_path / 'out').config.normalize
