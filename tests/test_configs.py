"""Presets and flags."""
import dataclasses
import os
from pathlib import Path

import pytest
import torch

import aotpot
import configs
import finetune
import helpers
import train
from nets.build import build


def test_a_preset_replaces_defaults_and_a_flag_replaces_the_preset():
    assert configs.model('small').width == 1024 and configs.model('small', width=64, streams=2).streams == 2
    flags = '--streams 2 --no-post_norm --resolution 96x192 --lr 5e-4 --datasets a b --compile'.split()
    model, recipe, run, *others = train.parse(['--size', 'small', *flags])
    assert (model.width, model.streams, model.post_norm, model.resolution) == (1024, 2, False, (96, 192))
    assert (recipe.lr, recipe.batch_size, recipe.epochs) == (5e-4, 160, 1000)
    assert (run.datasets, run.compile, run.out, others) == (('a', 'b'), True, 'out/small', [None, 'small'])
    assert all(configs.recipe(size).grad_clip == (1 if size in ('nano', 'mini') else 10_000) for size in configs.SIZES)


@pytest.mark.parametrize('size, count', [
    ('nano', 159_597), ('mini', 1_020_411), ('tiny', 7_404_803), ('small', 29_894_511), ('medium', 122_423_475),
    ('large', 511_505_275)])
def test_presets_have_their_numbers_of_parameters(size, count):
    with torch.device('meta'):
        assert aotpot.parameters(build(configs.model(size))) == count


def test_every_dataset_has_a_usual_grid_and_frames_to_predict():
    for name, dataset in configs.DATASETS.items():
        assert dataset.resolution in (64, 128, 512) and 0 < dataset.t_test < dataset.frames, name
        assert dataset.test < dataset.train and {*dataset.static} <= {*dataset.channels}, name


def test_epochs_override_the_steps_of_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                 # in the working directory there may be a run in out/nano
    assert configs.recipe('nano').steps > 0
    assert train.parse(['--epochs', '3'])[1].steps == 0
    with pytest.raises(configs.InputError, match='--steps and --epochs'):
        train.parse(['--epochs', '3', '--steps', '4'])


def test_another_network_takes_a_preset_without_the_switches_that_it_lacks():
    assert configs.model('nano').normalize
    assert not train.parse(['--network', 'baselines:UNet', '--overwrite'])[0].normalize
    with pytest.raises(configs.InputError, match='--normalize True is for AOT-POT'):
        train.parse(['--network', 'baselines:UNet', '--normalize', '--overwrite'])


def test_sampling_replaces_single_weights():
    assert configs.recipe('tiny', sampling=('a=2', 'b=0.5')).weights() == {'a': 2, 'b': 0.5}
    assert configs.recipe('nano').weights().keys() <= {*configs.BUILTIN['nano']}


def test_every_field_has_a_flag_with_its_default_in_the_help(capsys):
    with pytest.raises(SystemExit):
        train.parse(['--size', 'medium', '--help'])
    text = capsys.readouterr().out
    for kind in (configs.ModelConfig, configs.TrainConfig, configs.RunConfig):
        for field in dataclasses.fields(kind):
            assert f'--{field.name} ' in text or f'--{field.name},' in text, field.name
    assert '[4096]' in text and 'model (medium)' in text and 'recipe (medium)' in text


@pytest.mark.parametrize('flags, words', [
    (['--dept', '3'], 'unrecognized arguments: --dept 3'),
    (['--step', '3'], 'unrecognized arguments: --step 3'),
    (['tiny'], 'unrecognized arguments: tiny'),
    (['--resolution', '60', '--patch', '8'], '--resolution 60x60 is not divisible by --patch 8'),
    (['--experts', '8', '--shared', '0'], '--shared 0'),
    *((['--' + flag], words) for flag, words in (
        ('experts=3', '--top_k 4 is more than --experts 3'), ('experts=-1', '--experts -1'),
        ('form=papre', '--form'), ('residual=none', '--residual'), ('lr=fast', '--lr'), ('ablate=x', "--ablate 'x'"),
        ('size=tinny', "unknown size 'tinny'; did you mean tiny?"), ('width=100', '--width 100 is not divisible'),
        ('resolution=big', "resolution 'big' is not a grid"), ('dims=3', 'add --resolution 64 or 64x64x96'),
        ('streams=0', '--streams 0 must be at least 1'),
        ('lr=0', '--lr 0.0 must be above 0'), ('batch_size=-1', '--batch_size -1'),
        ('sampling=a', '--sampling a: expected a dataset and a number'), ('sampling=a=0', '0.0 must be above 0'),
        ('save_every=-1', '--save_every -1'),
        ('beta1=1', '1.0 must be below 1'), ('beta2=-0.1', '-0.1 must be at least 0'),
        ('weight_decay=-1e-9', 'at least 0'), ('warmup=1', 'below 1'), ('workers=-5', '-5 must be at least -1'),
        ('seed=-1', 'at least 0'), ('streams=65', 'at most 64'), ('depth=10000000', 'at most 256'),
        ('width=1000000', 'at most 16384'), ('resolution=1000000', 'at most 16384'), ('resolution=0', 'at least 1'),
        ('threads=1000000', 'at most 1024'), ('frames=1000000', 'at most 1000')))])
def test_a_bad_flag_is_one_line_and_exit_code_2(flags, words, refused):
    refused(flags, words)


KINDS = configs.ModelConfig, configs.TrainConfig, configs.RunConfig, configs.FinetuneConfig
FIELDS = [(kind, field) for kind in KINDS for field in dataclasses.fields(kind)]


@pytest.mark.parametrize('value', ['nan', 'inf', '-inf'])
def test_every_float_flag_refuses_what_is_not_finite(value):
    floats = [field.name for _, field in FIELDS if field.type is float]
    assert {'lr', 'noise', 'grad_clip', 'weight_decay', 'alpha', 'beta1', 'beta2', 'warmup', 'validation'} <= {*floats}
    for name in floats:
        with pytest.raises(configs.InputError, match=f'^--{name} {value} must be a finite number$'):
            (finetune if name == 'validation' else train).parse([f'--{name}={value}'])


def test_every_whole_number_is_of_64_bits_and_a_value_of_another_type_is_refused():
    for kind, field in FIELDS:
        if field.type is int:
            with pytest.raises(configs.InputError, match=f'^--{field.name} 9223372036854775808 '):
                kind(**{field.name: 2 ** 63})
        if field.type is not object and field.name != 'dims':
            with pytest.raises(configs.InputError, match=f'{field.name} '):
                kind(**{field.name: {'not': 'this'}})
    assert configs.TrainConfig(seed=2 ** 63 - 1).seed == 2 ** 63 - 1
    with pytest.raises(configs.InputError, match="--residual 'none' is none of aot plain"):
        configs.model('tiny', residual='none')


@pytest.mark.parametrize('out, words', [
    ('file', 'file is not a folder'), ('file/below/it', 'file is not a folder'),
    ('closed/new', 'closed is not a folder that can be written')])
@pytest.mark.parametrize('script', [train, finetune])
def test_an_out_that_cannot_be_written_is_refused_before_any_data_are_read(
        out, words, script, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'file').write_text('of the user')
    (tmp_path / 'closed').mkdir(mode=0o500)
    if 'closed' in out and os.access('closed', os.W_OK):
        pytest.skip('a user who may write everywhere')
    flags = ['--out', out, '--data', 'none', '--datasets', 'own', '--size', 'tiny']
    if script is finetune:
        path = helpers.save(helpers.small_model(), tmp_path, 'small/last.pt')
        for split in ('train', 'test'):
            helpers.write(tmp_path, 'own', helpers.travelling(4, 6, 16, 1, 0.4), split)
        flags = ['--checkpoint', path, '--dataset', 'own', '--data', '.', '--out', out]
    before = sorted(tmp_path.rglob('*'))
    error, printed = refused(flags, words, script)
    assert error.startswith(f'error: --out {out}: ') and not printed
    assert sorted(tmp_path.rglob('*')) == before and (tmp_path / 'file').read_text() == 'of the user'


def test_the_flags_that_come_closest_to_dpots_run_have_its_shares_steps_and_clipping():
    """DPOT draws dataset k in proportion to |D_k| w_k with its w below, and sums the loss over 20 samples a process."""
    page = (Path(__file__).parents[1] / 'docs/training.md').read_text()
    command = page.split("## Departures from DPOT's run")[1].split('```')[1].replace('\\', '').split()
    model, recipe, *_ = train.parse(command[2:])
    draws = [dataset.train * w for dataset, w in
             zip(configs.PRETRAINING.values(), (8, 2, 8, 1, 1, 1, 1, 20, 20, 1, 3, 1))]
    assert recipe.weights() == dict(zip(configs.PRETRAINING, draws)) and model.residual == 'plain'
    epoch = sum(dataset.train for dataset in configs.PRETRAINING.values())
    assert f'{sum(draws):,}' in page and f'{epoch:,}' in page
    steps = recipe.epochs * epoch / recipe.batch_size
    assert abs(steps / (1000 * sum(draws) / recipe.batch_size) - 1) < 1e-3
    assert recipe.grad_clip == configs.TrainConfig.grad_clip / 20
