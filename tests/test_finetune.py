"""Transfer to another dataset: which weights are loaded and fresh, and that all of them move."""
import re
import shutil
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import configs
import evaluate
import finetune
from helpers import at_step, dpot_state, log, same, travelling, write
from nets.build import build
from runtime import checkpoint


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """`own`, named like a dataset of the training of `source`, and datasets of other kinds."""
    folder = tmp_path_factory.mktemp('finetune')
    for split, N in (('train', 40), ('test', 4)):
        for name, C, T in (('own', 2, 6), ('new', 2, 6), ('many', 5, 6), ('steady', 1, 2)):
            write(folder / 'data', name, travelling(N, T, 16, C, 0.4), split)
        write(folder / 'data', 'wide', travelling(N, 6, 32, 2, 0.4)[:, :, :16], split)
        write(folder / 'data', 'short', travelling(4, 3, 20, 2, 0.4)[:, :, :12], split)
        cube = np.repeat(travelling(4, 5, 16, 1, 0.4)[:, :, :, :, None], 8, axis=4)
        write(folder / 'data', 'cube', cube, split)
    return folder


@pytest.fixture
def source(pretrained):
    return pretrained / 'last.pt'


@pytest.fixture
def tune(folder, source, tmp_path, call):
    """tune(dataset, *flags) runs finetune.py and returns what it printed and its last.pt."""
    def command(dataset, *flags, out=tmp_path / 'out', checkpoint=source, expected=0):
        places = '--checkpoint', checkpoint, '--data', folder / 'data', '--out', out
        flags = [*places, '--dataset', dataset, '--log_every', 1, *flags]
        code, error, printed = call(flags, finetune)
        assert code == expected, error
        return printed, torch.load(out / 'last.pt', weights_only=True)
    return command


def initial(source, last):
    """The network of a last.pt before its training from `source`, and what is said of that."""
    torch.manual_seed(last['config']['train']['seed'])
    model = build(configs.ModelConfig(**last['config']['model']))
    return model, checkpoint.start_from(model, checkpoint.load_file(source))


UNMOVED = '--no-normalize', '--steps', 1, '--lr', 1e-30, '--seed', 3         # a step that moves zeros alone


def unmoved(a, b):
    """Whether two state dicts are equal but for such a step."""
    return a.keys() == b.keys() and all(
        torch.allclose(a[name], b[name], rtol=0, atol=1e-25) for name in a)


BOUNDARY = {f'{name}.{kind}' for kind in ('weight', 'bias') for name in (
    'embed.conv', 'embed.project', 'readout.conv', 'readout.hidden', 'readout.project')}


@pytest.mark.parametrize('dataset, flags, resized, fresh', [
    ('new', [], set(), set()),
    ('many', [], set(), BOUNDARY),
    ('wide', ['--resolution', '16x32'], {'embed.position'}, set()),
    ('steady', [], set(), {'aggregate.weight'}),
    ('cube', [], set(), BOUNDARY | {'embed.position'})])
def test_what_fits_is_loaded_and_all_parameters_move(dataset, flags, resized, fresh, tune, source):
    printed, last = tune(dataset, *flags, '--no-normalize', '--steps', 4)
    model, said = initial(source, last)
    loaded = set(last['model']) - resized - fresh
    counts, _, names = said.partition(' fresh')
    assert counts == (f'{source}: {len(loaded)} of {len(last["model"])} tensors loaded, '
                      f'{len(resized)} resized, {len(fresh)}')
    assert said in printed.splitlines() and set(names.split()) == fresh
    before = checkpoint.load_file(source)
    # the first a and T act on equal streams: no gradient
    idle = {f'layers.0.aot1.mappings.{kind}_{mapping}' for kind in ('phi', 'alpha', 'b')
            for mapping in 'aT'}
    if model.config.frames == 1:
        idle.add('aggregate.gamma')                             # cos(gamma t) at t = 0
    for name, value in model.state_dict().items():
        source_value = before['model'].get(name)
        if name in resized:
            source_value = F.interpolate(source_value[None], value.shape[1:], mode='bilinear')[0]
        assert name in fresh or torch.equal(value, source_value), name
        assert name in idle or not torch.equal(value, last['model'][name]), f'{name} did not move'
    assert last['config']['run']['init_from'] == str(source)
    assert last['config']['train']['noise'] == 0


def test_a_run_starts_from_the_source_or_from_random_weights_of_the_seed(tune, source, tmp_path):
    _, tuned = tune('new', *UNMOVED)
    assert unmoved(tuned['model'], checkpoint.load_file(source)['model'])
    printed, scratch = tune('new', *UNMOVED, '--from_scratch', out=tmp_path / 'scratch')
    torch.manual_seed(3)
    random = build(configs.ModelConfig(**tuned['config']['model']))
    assert unmoved(scratch['model'], random.state_dict())
    assert 'loaded' not in printed and scratch['config']['run']['init_from'] == ''
    assert scratch['config']['train'] == tuned['config']['train']
    tune('new', *UNMOVED, '--seed', 4, out=tmp_path / 'other')
    a, b = (log(tmp_path / out)[0]['loss'] for out in ('out', 'other'))
    assert a != b, 'the seed draws the samples, too'


def test_recipe_subset_and_folder_follow_from_the_flags(folder, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(source, 'mini.pt')
    torch.save({'model': dpot_state(C=4)}, 'model_Ti.pth')

    def command(dataset, *flags, checkpoint=source):
        flags = '--checkpoint', checkpoint, '--dataset', dataset, '--data', folder / 'data', *flags
        return finetune.parse([*map(str, flags)])[0]
    known, new = command('own').recipe, command('new').recipe
    assert (known.epochs, new.epochs, new.warmup, known.batch_size) == (200, 500, 0.2, 4)
    assert new.grad_clip == 1, 'that of the checkpoint'
    assert [command('new', '--samples', n).recipe.batch_size for n in (1, 3)] == [1, 3]
    assert command('new', checkpoint='model_Ti.pth').recipe.batch_size == 20
    assert command('new', '--epochs', 7).recipe.epochs == 7
    assert command('new', '--seed', 0, '--lr', 1e-4).run.out == 'out/pre-new'
    sets = [{*finetune.subset(100, samples, 5)} for samples in (16, 32, 64, 0)]
    assert [len(rows) for rows in sets] == [16, 32, 64, 100], 'and nested'
    assert sets[0] < sets[1] < sets[2] < sets[3] and sets[0] != {*finetune.subset(100, 16, 6)}
    more = '--seed', 3, '--samples', 8, '--from_scratch'
    assert command('new', *more).run.out == 'out/pre-new-8-seed3-scratch'
    assert command('new', checkpoint='mini.pt').run.out == 'out/mini-new'
    write(folder / 'data', 'odd', np.ones((2, 5, 18, 18, 10, 1)), 'train')
    assert command('odd').model.resolution == (20, 20, 12), 'whole patches in another dimension'


def test_aot_warm_started_from_dpot_shares_its_layers(tune, folder, tmp_path, call):
    """At step 0 the tokens, the MLP and the readout are DPOT's; the mixer lacks its inner skip."""
    dpot = tmp_path / 'model_Ti.pth'
    torch.save({'model': dpot_state(C=4)}, dpot)
    _, last = tune('new', '--residual', 'aot', *UNMOVED, checkpoint=dpot)
    fresh = initial(dpot, last)[1].partition(' fresh ')[2].split()
    assert len(fresh) > 9 and all(re.search('aot|post|^gate$', name) for name in fresh)
    theirs = checkpoint.load_model(checkpoint.load_file(dpot))
    ours = checkpoint.load_model({'path': 'last.pt', **last})
    u, x = torch.randn(2, 3, 16, 16, 4), torch.randn(2, 4, 4, 16)
    with torch.no_grad():
        tokens = theirs.aggregate(theirs.embed(u))
        torch.testing.assert_close(ours.aggregate(ours.embed(u)), tokens)
        torch.testing.assert_close(ours.readout(x), theirs.readout(x))
        for a, b in zip(ours.layers, theirs.layers):
            torch.testing.assert_close(a.mixer(x) + x, b.mixer(x))
            torch.testing.assert_close(a.mlp(a.norm2(x)), b.mlp(b.norm2(x)))
    _, plain = tune('new', *UNMOVED, checkpoint=dpot, out=tmp_path / 'plain')
    assert unmoved(plain['model'], theirs.state_dict())     # without --residual aot it is DPOT
    flags = ['--checkpoint', dpot, '--data', folder / 'data', '--datasets', 'own']
    code, error, printed = call(flags, evaluate)
    assert code == 0 and 'step 0, plain' in printed, error
    assert call(flags[:2], evaluate)[1].startswith('error: --data .: the folder holds no')


def test_the_network_takes_the_shape_of_data_that_are_not_the_papers(tune, tmp_path, call):
    printed, last = tune('short', '--epochs', 2, '--batch_size', 3)          # of 4 trajectories
    assert (last['step'], last['config']['run']['save_every']) == (3, 1)
    assert 'on these data the network has --resolution 12x20 --frames 2 --normalize\n' in printed
    config = last['config']['model']
    assert (config['resolution'], config['frames'], config['channels']) == ((12, 20), 2, 4)
    code, error, printed = call(['--checkpoint', tmp_path / 'out'], evaluate)
    assert code == 0 and 'short' in printed and 'many' not in printed, error


def test_a_fine_tuning_goes_on_with_its_samples_and_seed(tune, tmp_path, monkeypatch, refused):
    flags = '--steps', 6, '--save_every', 6, '--samples', 8, '--seed', 3
    printed, whole = tune('new', *flags)
    assert re.search(r'new +8 trajectories of', printed)
    with monkeypatch.context() as patch:
        at_step(3, lambda: signal.raise_signal(signal.SIGTERM), patch)
        tune('new', *flags, out=tmp_path / 'broken', expected=128 + signal.SIGTERM)
    refused(['--out', tmp_path / 'broken', '--resume'], 'the run to resume is of finetune.py')
    _, broken = tune('new', '--resume', out=tmp_path / 'broken')
    assert broken['step'] == 6
    assert all(same(broken[key], whole[key]) for key in ('model', 'optimizer'))
