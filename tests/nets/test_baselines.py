"""Other networks: the same loop, files and errors as for AOT-POT."""
import importlib.util
import sys

import pytest
import torch

import configs
import evaluate
import finetune
from configs import InputError
from helpers import CPU, command, log, small_model, trajectories, write_two
from nets import baselines
from runtime import checkpoint


def network(name, **options):
    """A small network of nets/baselines.py. The test is skipped if its package is not installed."""
    if name == 'FNO' and not importlib.util.find_spec('neuralop'):
        pytest.skip('pip install neuraloperator')
    return small_model(**{'network': name, 'patch': 2, 'width': 32, **options})


@pytest.mark.parametrize('name', baselines.BASELINES)
@pytest.mark.parametrize('dims', [2, 3])
def test_every_sample_is_mapped_alone_and_depends_on_every_frame_and_channel(name, dims):
    model = network(name, dims=dims)
    u = torch.randn(2, 3, *[16] * dims, 4, requires_grad=True)
    v = model(u)
    assert v.shape == (2, *[16] * dims, 4)
    torch.testing.assert_close(model(u[1:]), v[1:], rtol=1e-4, atol=1e-5)
    for channel in range(4):
        gradient, = torch.autograd.grad(v[0, ..., channel].sum(), u, retain_graph=True)
        assert (gradient[0].abs().flatten(1, -2).sum(1) > 0).all() and not gradient[1].any()


def test_the_unet_takes_any_grid_and_keeps_the_places_of_its_axes():
    model = network('UNet', depth=2)
    u = torch.zeros(1, 3, 21, 10, 4)
    v = model(u)
    u[0, 1, 18, 3, 2] = 1.
    changed = (model(u) - v)[0].abs().sum(-1)
    assert v.shape == (1, 21, 10, 4) and changed[14:, :8].mean() > 3 * changed[:10].mean(), 'GroupNorm alone sees all'
    levels = [level[0].out_channels for level in model.down]
    assert levels == [8, 16, 32], 'D channels on the coarsest level, half as many on each finer one'


@pytest.mark.parametrize('name, flags', [*((name, []) for name in baselines.BASELINES), ('UNet', ['--dtype', 'bf16'])])
def test_the_checkpoint_of_a_run_gives_the_scores_that_it_printed_and_is_fine_tuned(name, flags, tmp_path, call):
    network(name)
    folder, whole, tuned = write_two(tmp_path / 'data'), tmp_path / 'whole', tmp_path / 'tuned'
    code, error, printed = call(command(folder, whole, '--network', name, '--width', 32, '--patch', 2, *flags,
                                        steps=6)[1:])
    assert code == 0 and printed.startswith(f'{name}, '), error
    assert len({line['loss'] for line in log(whole)}) == 6
    if not flags:
        loaded = checkpoint.load_model(checkpoint.load_file(whole / 'last.pt'))
        error = evaluate.score(loaded, trajectories(folder, 'own'), CPU)['model']['step'].mean()
        assert f'{error:.4f}' in printed.split('\nown ')[1].split('\n')[0]
    code, error, lines = call(['--checkpoint', whole / 'last.pt', '--dataset', 'own', '--out', tuned, '--steps', 2,
                               '--device', 'cpu'], finetune)
    assert code == 0 and ' tensors loaded, 0 resized, 0 fresh' in lines, error
    assert torch.load(tuned / 'last.pt', weights_only=True)['config']['model']['network'] == name


def test_what_is_no_network_or_lacks_its_package_or_a_part_of_aot_pot_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, 'neuralop.models', None)           # as if it were not installed
    for options, words in (({'network': 'UNett'}, 'network UNett: .*; did you mean UNet?'),
                           ({'network': 'FNO'}, 'network FNO: .*; pip install neuraloperator'),
                           ({'network': 'UNet', 'streams': 1}, 'streams 1: the network UNet has no such thing')):
        with pytest.raises(InputError, match=words):
            small_model(**options)
    assert not configs.model('nano', network='UNet').overlap and not configs.model('moe-tiny', network='UNet').experts
