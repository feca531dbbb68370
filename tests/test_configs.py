"""Presets and flags."""
import dataclasses

import pytest
import torch

import aotpot
import configs
import train
from conftest import ROOT
from nets.build import build


def test_a_preset_replaces_defaults_and_a_flag_replaces_the_preset():
    assert configs.model('small').width == 1024 and configs.model('small', streams=2).streams == 2
    flags = ('--streams 2 --inner_skip --resolution 96x192 --heads 2 --modes 8 --lr 5e-4 '
             '--beta1 0.8 --beta2 0.99 --weight_decay 0.1 --datasets a b --compile on').split()
    model, recipe, run, _, size, _ = train.parse(['--size', 'small', *flags])
    assert (size, model.width, model.streams, model.inner_skip) == ('small', 1024, 2, True)
    assert (model.heads, model.modes, model.resolution) == (2, 8, (96, 192))
    assert (recipe.beta1, recipe.beta2, recipe.weight_decay) == (0.8, 0.99, 0.1)
    assert (recipe.lr, recipe.batch_size, recipe.epochs) == (5e-4, 160, 1000)
    assert (run.datasets, run.compile, run.out) == (('a', 'b'), 'on', 'out/small')
    weighted = configs.TrainConfig(sampling=('dr_pdb=5',))
    assert train.sampling_weights(['dr_pdb', 'own', 'swe_pdb'], weighted) == [5, 1, 3]
    assert configs.recipe('nano').steps > 0 == train.parse(['--epochs', '3']).recipe.steps
    assert (configs.PAPER.lr, configs.PAPER.warmup, configs.PAPER.beta1, configs.PAPER.beta2) == (1e-3, 0.2, 0.9, 0.9)
    assert (configs.PAPER.weight_decay, configs.PAPER.noise) == (1e-6, 5e-4), 'App. B.3'
    clips = {size: configs.recipe(size).grad_clip for size in configs.SIZES}
    assert clips == dict.fromkeys(configs.SIZES, 10_000) | {'nano': 1, 'mini': 1}


def test_the_mixtures_their_weights_and_the_compiler_are_as_the_paper_and_the_page_say():
    six, ten, twelve = map(set, configs.MIXTURES.values())
    assert ten - six == {'ns2d_fno_1e-4', 'ns2d_pdb_M1_eta1e-1_zeta1e-1', 'ns2d_pda', 'ns2d_cond_pda'}
    assert twelve - ten == {'ns2d_pdb_M1_eta1e-2_zeta1e-2', 'ns2d_pdb_M1e-1_eta1e-1_zeta1e-1'}
    assert (len(six), len(ten), len(twelve)) == (6, 10, 12)
    weights = {name: dataset.weight for name, dataset in configs.DATASETS.items()}
    assert weights == dict.fromkeys(configs.DATASETS, 1) | {'swe_pdb': 3, 'dr_pdb': 3}
    compiled = {(size, cuda): configs.run(size, cuda).compile for size in ('nano', 'tiny') for cuda in (False, True)}
    assert compiled == dict.fromkeys(compiled, 'off') | {('tiny', True): 'graphs'}


@pytest.mark.parametrize('size, count', [
    ('nano', 208_749), ('mini', 1_121_019), ('tiny', 7_404_803), ('small', 29_894_511),
    ('medium', 122_423_475), ('large', 511_505_275)])
def test_presets_have_their_numbers_of_parameters(size, count):
    with torch.device('meta'):
        assert aotpot.parameters(build(configs.model(size))) == count


def test_a_resolution_of_three_sizes_makes_a_network_in_3d_and_one_size_stands_for_all_dimensions():
    solid = train.parse(['--resolution', '64x32x96']).model
    assert (solid.dims, solid.resolution) == (3, (64, 32, 96))
    assert configs.model('tiny', resolution=64).resolution == (64, 64)
    assert dataclasses.replace(solid, resolution='64').resolution == (64, 64, 64)
    assert configs.ModelConfig(**vars(solid)) == solid, 'as a checkpoint holds it'


def test_the_flags_that_come_closest_to_dpots_run_have_its_shares_steps_and_clipping():
    """DPOT draws dataset k in proportion to |D_k| w_k, and sums the loss over 20 samples."""
    page = (ROOT / 'docs/departures.md').read_text()
    command = page.split("## From DPOT's run")[1].split('```')[1].replace('\\', '').split()
    model, recipe, *_ = train.parse(command[2:])
    draws = [dataset.train * w for dataset, w in
             zip(configs.PRETRAINING.values(), (8, 2, 8, 1, 1, 1, 1, 20, 20, 1, 3, 1))]
    assert recipe.weights() == dict(zip(configs.PRETRAINING, draws)) and model.residual == 'plain'
    epoch = sum(dataset.train for dataset in configs.PRETRAINING.values())
    assert f'{sum(draws):,}' in page and f'{epoch:,}' in page
    steps = recipe.epochs * epoch / recipe.batch_size
    assert abs(steps / (1000 * sum(draws) / recipe.batch_size) - 1) < 1e-3
    assert recipe.grad_clip == configs.TrainConfig.grad_clip / 20
