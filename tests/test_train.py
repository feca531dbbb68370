"""The training loop: real processes, real kills, real files."""
import functools
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import configs
import data
import evaluate
import helpers
import train
from helpers import TINY, at_step, command, log, read, run, same, travelling, write, write_two
from nets.build import build
from runtime import checkpoint
from sources import generate
from sources.pdes import FAMILIES


@pytest.fixture
def folder(tmp_path):
    return write_two(tmp_path / 'data')


def test_a_checkpoint_holds_plain_types_and_no_prefixes(pretrained):
    saved = torch.load(pretrained / 'last.pt', weights_only=True)
    model = build(configs.ModelConfig(**saved['config']['model']))
    assert saved['model'].keys() == model.state_dict().keys()
    assert saved.keys() == {'model', 'optimizer', 'step', 'best', 'scored', 'rng', 'dtype',
                            'config', 'data', 'format'}
    own, one = saved['data']['own']['test'], saved['data']['swe_pdb']['train']
    assert own.pop('checksum') != one.pop('checksum')
    unsaid = dict(source='', dt=None)
    assert own == dict(unsaid, shape=[3, 9, 16, 16, 3], channels=['u', 'v', 'c'], static=['c'],
                       t_test=4.0)
    mean, deviation = [[pytest.approx(0.1)]], [[pytest.approx(0.5 ** 0.5)]]
    units = dict(mean=2 * mean, deviation=2 * deviation, own=[0])
    assert one == dict(unsaid, shape=[6, 7, 12, 12, 1], channels=['0'], static=[], t_test=math.inf,
                       units=units)
    assert sorted(os.listdir(pretrained)) == ['config.json', 'last.pt', 'lock', 'log.jsonl']
    config = json.loads((pretrained / 'config.json').read_text())
    assert (config['model']['width'], [*config['data']], config['steps']) == (16, [*saved['data']], 8)
    assert {'step', 'epoch', 'loss', 'lr', 'grad_norm', 'samples_per_s', 'gpu_memory_mb'} <= {
        *log(pretrained)[0]}


def test_a_normalised_run_on_a_steady_dataset_predicts_in_units_of_its_solutions(tmp_path, call):
    values = travelling(6, 2, 16, 1, 0.4)
    values[:, 1] = 1e-3 * values[:, 1] + 5e-3                   # the solutions: 5.1e-3 +- 0.7e-3
    for split, N in (('train', 6), ('test', 3)):
        write(tmp_path / 'data', 'steady', values[:N], split)
        write(tmp_path / 'data', 'moving', travelling(N, 4, 16, 1, 0.4), split)
    flags = command(tmp_path / 'data', tmp_path / 'out', '--normalize', '--frames', 1, steps=2)[1:]
    code, error, printed = call([*flags, '--datasets', 'steady', 'moving'])
    assert code == 0, error
    model = evaluate.load(tmp_path / 'out')
    means = model.data['steady']['train']['units']['mean']
    assert means == [[pytest.approx(0.1)], [pytest.approx(5.1e-3)]]
    prediction = evaluate.rollout(model, values[:, :1], 1, 'steady')
    assert abs(prediction.mean() - 5.1e-3) < 2.1e-3 and prediction.std() < 2.1e-3
    assert call([*flags, '--resume'])[0] == 0, 'a run that continues'
    steady = data.Trajectories(tmp_path / 'data', 'steady', 'test', 1, 1)
    floor = evaluate.Predictor(model, steady, torch.device('cpu')).floor
    assert floor == pytest.approx(0.7e-6, rel=0.05), 'of the solutions'


def in_two_processes(flags, folder, monkeypatch):
    """Train in two processes: their exit codes, and what each has printed."""
    monkeypatch.setattr(sys, 'argv', [*map(str, flags)])
    port = helpers.free_port()
    processes = [helpers.fork(train.main, folder / f'{rank}.txt', rank, port, 2) for rank in (0, 1)]
    codes = [helpers.exit_code(process) for process in processes]
    return codes, [(folder / f'{rank}.txt').read_text() for rank in range(2)]


@pytest.mark.parametrize('kind', ['forks', *(pytest.param(kind, marks=pytest.mark.slow)
                                             for kind in ('torchrun', 'compiled'))])
def test_two_processes_have_the_losses_of_one(kind, folder, tmp_path, monkeypatch, call):
    one, two = tmp_path / 'one', tmp_path / 'two'
    flags = ['--compile', 'on'] if kind == 'compiled' else '--accumulate 2 --optimizer muon'.split()
    code, _, printed = call(command(folder, one, *flags[2:], steps=8)[1:])
    assert code == 0
    flags = [*map(str, command(folder, two, *flags, steps=8))]
    if kind == 'torchrun':
        done = run('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', *flags)
        assert done.returncode == 0 and 'warning' not in done.stderr.lower(), done.stderr
        of_two = done.stdout
    else:
        if kind == 'compiled':          # without the C++ compiler, which takes minutes
            eager = functools.partial(torch.compile, backend='aot_eager')
            monkeypatch.setattr(torch, 'compile', eager)
        codes, (of_two, other) = in_two_processes(flags, tmp_path, monkeypatch)
        assert codes == [0, 0] and not other, other
    for kind, count, rtol in (('loss', 8, 1e-5), ('test', 2, 1e-4)):
        a, b = ([line[kind] for line in log(out) if kind in line] for out in (one, two))
        assert len(a) == count
        np.testing.assert_allclose(a, b, rtol=rtol)
    for own, other in zip(printed.splitlines()[-3:-1], of_two.splitlines()[-3:-1], strict=True):
        for a, b in zip(own.split(), other.split(), strict=True):   # sums in another order
            assert a == b or float(a) == pytest.approx(float(b), rel=1e-3), f'{own} is not {other}'
    a, b = (checkpoint.load_file(out)['model'].keys() for out in (one, two))
    assert a == b, 'no prefixes'


def test_two_processes_survive_a_signal_and_a_kill_bit_for_bit(folder, tmp_path, monkeypatch):
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    assert in_two_processes(command(folder, whole, steps=8), tmp_path, monkeypatch)[0] == [0, 0]
    resume = command(folder, broken, '--resume', steps=8)
    for step, number, ends in ((3, signal.SIGTERM, [143, 143]), (7, signal.SIGKILL, [1, -9])):
        with monkeypatch.context() as patch:
            at_step(step, lambda: os.environ['RANK'] == '1' and signal.raise_signal(number), patch)
            codes, (printed, _) = in_two_processes(resume, tmp_path, monkeypatch)
        assert codes == ends, printed
        assert number == signal.SIGKILL or 'stopped by SIGTERM at step 3; continue with' in printed
    assert torch.load(broken / 'last.pt', weights_only=True)['step'] == 4
    assert in_two_processes(resume, tmp_path, monkeypatch)[0] == [0, 0]
    a, b = (torch.load(out / 'last.pt', weights_only=True) for out in (whole, broken))
    assert all(same(a[key], b[key]) for key in ('model', 'optimizer', 'step', 'rng'))
    assert [line['loss'] for line in log(whole)] == [line['loss'] for line in log(broken)]


def test_a_loss_that_is_not_finite_ends_the_run_after_its_checkpoint(folder, tmp_path, refused):
    values = travelling(6, 9, 16, 3, 0.4)
    values[2] *= 3e38                                   # finite in the file, but its norm is not
    for split in 'train', 'test':
        write(folder, 'own', values if split == 'train' else values[:1], split)
    out = tmp_path / 'out'
    flags = command(folder, out, '--experts', 4, '--log_every', 3)[1:]
    refused(flags, 'error: step 5: the loss is ', lines=0)
    assert checkpoint.load_file(out)['step'] == 4       # which refuses what is not finite
    assert [line['step'] for line in log(out)] == [3, 4]
    write(folder, 'own', 3e38 * travelling(6, 9, 16, 3, 0.4), 'train')
    flags = command(folder, tmp_path / 'first', '--datasets', 'own', steps=2)[1:]
    error, _ = refused(flags, 'error: step 1: the loss is ', lines=None)
    assert 'before any update; train with --normalize' in error and '--lr' not in error


@pytest.mark.slow
def test_where_the_compiler_fails_a_line_says_so_and_the_run_goes_on(folder, tmp_path, call):
    none = {**os.environ, 'CXX': '/no/compiler', 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path / 'cache')}
    done = run(*command(folder, tmp_path / 'compiled', '--compile', 'on', steps=2), env=none)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('warning: --compile: ') == 1
    assert call(command(folder, tmp_path / 'eager', steps=2)[1:])[0] == 0
    a, b = ([line['loss'] for line in log(tmp_path / name)] for name in ('compiled', 'eager'))
    assert a == pytest.approx(b, rel=1e-6)


def test_a_scoring_takes_one_window_of_each_trajectory_spread_over_the_frames(folder):
    item = data.Trajectories(folder, 'own', 'test', 3, 4)       # three trajectories, t_test = 4
    places = evaluate.validation_windows(item)
    assert places == [(0, 0), (1, 2), (2, 3)]
    windows = evaluate.validation_windows(SimpleNamespace(count=200, t_test=91))
    assert len(windows) == len(dict(windows)) == 64 and max(windows)[0] == 196
    assert [start for _, start in windows][::21] == [0, 30, 60, 90]
    model, expected = helpers.small_model(), []
    model.forward = lambda u, _=None: u[:, -1] + u[:, -1, :1, :1]       # whose error varies with the window
    for window in (read(item, i, start, start + 4) for i, start in places):
        prediction = evaluate.rollout(model, window[:3], 1)[0, 0]
        norm, size = (np.linalg.norm(u, axis=(0, 1)) for u in (prediction - window[3], window[3]))
        expected.append((norm / size)[:2].mean())
    found = evaluate.validation_error(model, [item, item], helpers.CPU)
    assert found == pytest.approx(np.mean(expected), rel=1e-5) and len({*expected}) == 3
    other = data.Trajectories(folder, 'swe_pdb', 'test', 3, 4)
    alone = evaluate.validation_error(model, [other], helpers.CPU)
    both = evaluate.validation_error(model, [item, other], helpers.CPU)
    assert both == pytest.approx((found + alone) / 2) and alone != pytest.approx(found)


@pytest.fixture
def small_mixture(tmp_path, monkeypatch):
    """Makes built-in mixtures smaller and tmp_path the working directory; the flags of a step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, 'NANO', dict(resolution=16, train=2, test=1))
    monkeypatch.setitem(configs.BUILTIN, 'nano', ('swe_pdb', 'dr_pdb'))
    monkeypatch.setitem(configs.MIXTURES, 'mixture_6', ('swe_pdb', 'dr_pdb'))
    for name in configs.BUILTIN['nano']:
        monkeypatch.setitem(FAMILIES, name, FAMILIES[name]._replace(nano=dict(frames=14, grid=16)))
    return [*TINY, '--frames', '10', '--steps', '1']


def test_without_data_nano_generates_its_mixture_once(small_mixture, tmp_path, call, refused):
    for split in ('train', 'test'):
        write(tmp_path / 'data/nano', 'other', travelling(2, 12, 16, 1, 0.4), split)

    def trained_on(*flags):
        shutil.rmtree(tmp_path / 'out', ignore_errors=True)
        code, error, _ = call([*small_mixture, *flags])
        assert code == 0, error
        return json.loads((tmp_path / 'out/nano/config.json').read_text())['run']['datasets']

    def times():
        return {path: path.stat().st_mtime_ns for path in Path('data/nano').glob('*/*.h5')}
    others = times()
    assert trained_on('--datasets', 'swe_pdb') == ['swe_pdb']
    assert not Path('data/nano/dr_pdb').exists()                # of absent ones those asked for
    assert trained_on() == ['dr_pdb', 'swe_pdb']                # generated beside the others
    made = times()
    assert others.items() <= made.items() and len(made) == 6 + 2
    assert trained_on() == ['dr_pdb', 'swe_pdb'] and times() == made                    # reused
    shutil.rmtree('data/nano/swe_pdb')
    assert trained_on('--data', 'data/nano') == ['dr_pdb', 'other']                     # all in it
    absent = [*small_mixture, '--data', 'absent', '--out', 'out/other', '--size', 'mini']
    refused(absent, 'error: --data absent: the folder holds no')        # a named one is never made
    assert not Path('absent').exists()


@pytest.mark.parametrize('flags, folder, warning', [
    (['--size', 'mini', '--datasets', 'mixture_6'], 'data/mini', ''),
    (['--size', 'tiny'], 'data/nano', 'warning: --size tiny without --data: there is no data/')])
def test_mini_and_larger_sizes_generate_small_mixtures(flags, folder, warning, small_mixture, call):
    code, error, printed = call([*small_mixture, *flags])
    assert code == 0 and error.startswith(warning) and bool(error) == bool(warning), error
    assert f'in {folder}\n' in printed and sorted(os.listdir(folder)) == ['dr_pdb', 'swe_pdb']


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_a_training_on_cuda_has_the_losses_of_a_compiled_one_and_of_cuda_graphs(folder, tmp_path):
    losses = []
    for compiled in 'off', 'on', 'graphs':
        out = tmp_path / compiled
        flags = '--device', 'cuda', '--dtype', 'fp32', '--compile', compiled
        done = run(*command(folder, out, *flags, steps=12))
        assert done.returncode == 0 and 'Warning' not in done.stderr, done.stderr
        losses.append([line['loss'] for line in log(out) if 'loss' in line])
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize('steps, warmup', [(50, 0.2), (10, 0.95), (2, 0.8)])
def test_one_cycle_is_that_of_torch(steps, warmup):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], 1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=steps, pct_start=warmup, div_factor=1e4, final_div_factor=1e4,
        cycle_momentum=False)
    for step in range(steps):
        lr = train.one_cycle(step, steps, 3e-3, warmup)
        assert lr == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9, abs=1e-15)
        optimizer.step()
        scheduler.step()
    assert train.one_cycle(0, 1, 1e-3, 0.2) <= 1e-3 and train.one_cycle(3, 4, 1e-3, 0.0) < 1e-6


def slow_loss(native, window, kind):
    """One channel: native (X, Y), window (T+1, X, Y)."""
    *_, before, truth = window
    if kind == 'squared':
        return ((native - truth) ** 2).sum() / truth.numel()
    share = ((truth - before).norm() / truth.norm()).clamp(0.01, 1) if kind == 'change' else 1
    return (native - truth).norm() / truth.norm() / share ** 0.5


@pytest.mark.parametrize('kind', ['relative', 'change', 'squared'])
def test_the_loss_is_the_error_of_evolving_channels_on_the_native_grid(kind, folder):
    sets = [data.Trajectories(folder, name, 'train', 3, 4) for name in data.find(folder)]
    batch = data.Windows(sets, configs.model('tiny', frames=3), [1, 1], seed=0)[range(6)].to('cpu')
    assert len(batch.windows) == 2
    prediction = torch.randn(6, 16, 16, 4)
    expected = []
    windows = [window for part in batch.windows for window in part]
    for field, window, evolving in zip(prediction, windows, batch.evolving.tolist(), strict=True):
        native = F.interpolate(field.movedim(-1, 0)[None], window.shape[1:3], mode='bilinear')[0]
        errors = [slow_loss(native[c], window[..., c], kind) for c in range(4) if evolving[c]]
        expected.append(sum(errors) / len(errors))
    loss = train.loss_of(prediction, batch, kind)
    torch.testing.assert_close(loss, torch.stack(expected).mean())
    moved = batch._replace(windows=[u + 100 for u in batch.windows])
    one, other = (train.loss_of(*its, kind, normalize=True) for its in ((prediction, batch), (prediction + 100, moved)))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=0)


def test_the_input_is_noisy_on_evolving_channels_and_padded_with_one(folder):
    sets = [data.Trajectories(folder, name, 'train', 3, 4) for name in data.find(folder)]
    config = configs.model('tiny', frames=3, resolution=16)
    batch = data.Windows(sets, config, [1, 3], seed=0)[range(6)].to('cpu')
    clean, noisy = (data.noisy_inputs(batch, config, noise) for noise in (0, 1e-2))
    assert clean.shape == noisy.shape == (6, 3, 16, 16, 4)
    for u, v, (seed, channels) in zip(clean, noisy, batch.noise, strict=True):
        evolving = range(4)[channels]
        others = [c for c in range(4) if c not in evolving]
        padding = 3 if len(evolving) == 2 else 1                # of that with a static channel
        assert (u[..., padding:] - 1).abs().max() < 1e-6                # interpolated
        assert torch.equal(u[..., others], v[..., others])
        field = u[..., channels]
        noise = torch.randn(field.shape, generator=torch.Generator().manual_seed(seed))
        expected = 1e-2 * field.flatten(0, 2).norm(dim=0) * noise
        torch.testing.assert_close(v[..., channels] - field, expected, rtol=1e-3, atol=1e-5)
    dimensionless = configs.model('tiny', frames=3, resolution=16, normalize=True)
    added = data.noisy_inputs(batch, dimensionless, 1e-2) - clean
    assert added[added != 0].std().item() == pytest.approx(1.43, rel=0.03), 'whatever the grid'


def test_init_from_starts_from_weights_that_fit(folder, tmp_path, call, refused):
    start, out, same_network = tmp_path / 'start', tmp_path / 'out', ['--normalize', '--depth', '2']
    assert call(command(folder, start, *same_network, steps=2)[1:])[0] == 0
    flags = command(folder, out, '--init_from', start / 'last.pt', '--lr', '1e-12', steps=1)[1:]
    refused(flags, f'error: {start}/last.pt: these weights were trained with --norm', lines=None)
    assert not (out / 'last.pt').exists()
    printed = call([*flags, *same_network])[2]
    a, b = (checkpoint.load_file(run)['model'] for run in (start, out))
    assert f'last.pt: {len(a)} of {len(a)} tensors loaded, 0 resized, 0 fresh\n' in printed
    assert all(torch.allclose(a[name], b[name], atol=1e-9) for name in a)
    code, error, printed = call([*flags, '--normalize', '--out', tmp_path / 'other'])
    words = f'of {len(a)} tensors loaded, 0 resized, 0 fresh and left out: layers.*.norm1.weight '
    assert code == 0 and words in printed, 'those of the second layer'


def test_noise_and_clipping_reach_the_training(folder, tmp_path, call):
    def first(name, *flags):
        flags = [*command(folder, tmp_path / name, steps=1)[1:], *flags]
        assert call(flags)[0] == 0
        optimizer = torch.load(tmp_path / name / 'last.pt', weights_only=True)['optimizer']
        return log(tmp_path / name)[0]['loss'], optimizer
    plain, adamw = first('plain')
    assert first('noisy', '--noise', 0.1)[0] != plain
    loss, clipped = first('clipped', '--grad_clip', 1e-20)
    largest = [max(state['exp_avg'].abs().max() for state in its['state'].values()) for its in (adamw, clipped)]
    assert loss == plain and largest[1] < 1e-20 < largest[0]


def test_a_perfect_prediction_has_no_loss_and_a_finite_gradient():
    for target in (torch.zeros(1, 4, 4, 1), torch.randn(1, 4, 4, 2)):
        perfect = target.clone().requires_grad_()
        loss = data.norm(perfect - target) / data.size_of(target, torch.tensor(1e-3))
        loss.sum().backward()
        assert not loss.any() and perfect.grad.isfinite().all()
