"""Other networks: the same loop, files and errors as for AOT-POT, and no code that only a checkpoint names."""
import dataclasses
import os
import re
import sys

import pytest
import torch

import aotpot
import configs
import evaluate
import finetune
import train
from configs import InputError
from conftest import ROOT
from helpers import CPU, command, log, same, small_model, trajectories, write_two
from lab import interpret, reproduce
from nets import baselines
from nets.build import build

UNET = ['--network', 'baselines:UNet']
MINE = ['--network', 'mine:Net']


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two datasets in `data` of the working directory, and mine.py of the documentation, which can be imported anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [f'{tmp_path}/.', *sys.path])      # before the project's folder and its mine.py
    [example] = re.findall(r'```python\n(.*?)```', (ROOT / 'docs/networks.md').read_text(), re.DOTALL)
    (tmp_path / 'mine.py').write_text(example)
    yield write_two(tmp_path / 'data')
    for name in ('mine', 'evil'):
        sys.modules.pop(name, None)


def network(name, **options):
    """A small network of nets/baselines.py. The test is skipped if its package is not installed."""
    if install := baselines.lacking(f'baselines:{name}'):
        pytest.skip(f'baselines:{name} needs another package: pip install {install}')
    return small_model(**{'network': f'baselines:{name}', 'patch': 2, 'width': 32, **options})


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


def test_presets_give_the_unet_about_as_many_parameters_as_aot_pot():
    for size in ('nano', 'tiny', 'small'):
        count, unet = (aotpot.parameters(build(configs.model(size, network=name)))
                       for name in ('aotpot', 'baselines:UNet'))
        assert 0.5 < unet / count < 2, f'{size}: {unet:,} and {count:,}'


@pytest.mark.parametrize('name, flags', [*((name, []) for name in baselines.BASELINES), ('UNet', ['--dtype', 'bf16'])])
def test_the_checkpoint_of_a_run_gives_the_scores_that_it_printed(name, flags, folder, tmp_path, call):
    whole = tmp_path / 'whole'
    flags = ['--network', network(name).config.network, '--width', '32', '--patch', '2', *flags]
    code, error, printed = call(command('data', whole, *flags, steps=6)[1:])
    assert code == 0 and printed.startswith(f'baselines:{name}, '), error
    assert len({line['loss'] for line in log(whole)}) == 6
    if '--dtype' not in flags:
        loaded, test = aotpot.load(whole / 'last.pt'), trajectories('data', 'own')
        error = evaluate.score(loaded, test, CPU)['model']['step'].mean()
        assert f'{error:.4f}' in printed.split('\nown ')[1].split('\n')[0]
        code, error, again = call(['--checkpoint', whole, '--device', 'cpu'], evaluate)
        table = again.splitlines()[1:]
        assert code == 0 and printed.splitlines()[-1 - len(table):-1] == table, error


def test_the_network_of_the_documentation_trains_resumes_and_is_fine_tuned_and_scored(folder, tmp_path, call):
    out, tuned = tmp_path / 'out/nano-Net', tmp_path / 'tuned'
    flags = command('data', out, *MINE, steps=6)[1:]
    flags = flags[:flags.index('--out')] + flags[flags.index('--out') + 2:]                 # its place is the default
    code, error, printed = call(flags)
    assert code == 0 and printed.startswith('mine:Net, ') and sys.path[-1] == os.getcwd(), error
    assert call([*MINE, '--resume', out, '--steps', '8'])[0] == 2      # the run had 6
    before = torch.load(out / 'last.pt', weights_only=True)
    model = aotpot.load(out, network='mine:Net')
    torch.testing.assert_close(model(torch.ones(1, 3, 5, 7, 4)), torch.ones(1, 5, 7, 4) + model.body(
        torch.ones(1, 12, 5, 7)).movedim(1, -1))
    assert same(model.state_dict(), before['model'])
    code, error, scores = call([*MINE, '--checkpoint', out, '--device', 'cpu'], evaluate)
    table = scores.splitlines()[1:]
    assert code == 0 and printed.splitlines()[-1 - len(table):-1] == table, error
    code, error, lines = call([*MINE, '--checkpoint', out, '--dataset', 'own', '--out', tuned, '--steps', '2',
                               '--device', 'cpu'], finetune)
    assert code == 0 and '4 tensors loaded, 0 resized, 0 fresh' in lines, error
    assert torch.load(tuned / 'last.pt', weights_only=True)['config']['model']['network'] == 'mine:Net'


@pytest.mark.parametrize('body, words', [
    ('return u', 'has the shape (4, 3, 16, 16, 4); a frame of the input (4, 3, 16, 16, 4) is (4, 16, 16, 4)'),
    ('return [u]', 'its output has the shape list;')])
def test_an_output_that_is_no_frame_is_refused(body, words, folder, tmp_path, refused):
    (tmp_path / 'mine.py').write_text('import torch\nclass Net(torch.nn.Module):\n    def __init__(self, config):\n'
                                      '        super().__init__()\n        self.w = torch.nn.Parameter(torch.ones(1))\n'
                                      f'    def forward(self, u):\n        {body}\n')
    error, _ = refused(command('data', tmp_path / 'out', *MINE)[1:], words, lines=None)
    assert error.splitlines()[-1].startswith('error: --network mine:Net: ')


@pytest.mark.parametrize('name', ['evil:Net', 'os:system', 'mine:Net'])
def test_a_checkpoint_imports_nothing_that_the_user_has_not_named(
        name, folder, tmp_path, pretrained, monkeypatch, call, refused):
    for module in ('evil', 'mine'):
        (tmp_path / f'{module}.py').write_text('open("imported", "w")\nclass Net: pass\n')
    monkeypatch.setattr('os.system', lambda *_: open('imported', 'w'))
    path, tuned = tmp_path / 'given/last.pt', tmp_path / 'tuned/last.pt'
    path.parent.mkdir(), tuned.parent.mkdir()
    saved = torch.load(pretrained / 'last.pt', weights_only=True)
    saved['config']['model']['network'] = name
    torch.save(saved, path)
    saved['config']['finetune'] = dataclasses.asdict(configs.FinetuneConfig(checkpoint=str(path), dataset='own'))
    torch.save(saved, tuned)
    other = ['--network', 'evil:Net' if name == 'mine:Net' else 'mine:Net']
    for script, *flags in (
            (evaluate, '--checkpoint', path), (evaluate, *UNET, '--checkpoint', path),
            (interpret, '--checkpoint', path), (finetune, '--checkpoint', path, '--dataset', 'own', '--data', 'data'),
            (finetune, '--resume', tuned), (train, '--resume', path), (train, *UNET, '--resume', path)):
        code, error, _ = call(flags, script)
        lines = [line for line in error.splitlines() if not line.startswith('warning: ')]
        assert code == 2 and len(lines) == 1 and f'give --network {name} if you trust' in lines[0], (script, error)
    refused(command('data', 'out', '--init_from', path)[1:], f'of the network {name}, not of --network aotpot')
    for given in ('', other[1]):
        with pytest.raises(InputError, match=f'its network is {name}'):
            aotpot.load(path, network=given)
    assert not (tmp_path / 'imported').exists() and not {'evil', 'mine'} & set(sys.modules)


@pytest.mark.slow
def test_a_missing_package_is_advice_in_train_and_a_dash_in_the_table(folder, monkeypatch, call, refused):
    monkeypatch.setitem(baselines.BASELINES, 'FNO', (baselines.FNO, 'no_such_package', 'neuraloperator'))
    words = 'error: --network baselines:FNO needs another package: pip install neuraloperator\n'
    assert not refused(command('data', 'out', '--network', 'baselines:FNO')[1:], words)[1]
    small = configs.model('nano', resolution=16, width=16, mlp=16, out_width=4, frames=3)
    monkeypatch.setitem(configs.SIZES, 'nano', (small, configs.recipe('nano', batch_size=4)))
    code, error, printed = call(['main', '--rows', 'UNet', 'FNO', '--steps', '2', '--seeds', '1', '--data', 'data',
                                 '--device', 'cpu', '--out', 'out'], reproduce)
    assert code == 0 and 'left out: baselines:FNO (pip install neuraloperator)\n' in printed, error
    assert '\n| FNO | - | - |' in printed or '\n| FNO | - |' in printed
    runs = sorted(path.name for path in folder.parent.glob('out/nano-2_steps/*'))
    assert runs == ['network_baselines_UNet-datasets_swe_pdb-seed_0'], 'each on the datasets of the mixture alone'
    assert re.search(r'\n\| UNet \| \d', printed)
