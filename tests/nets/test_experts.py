"""The mixture of experts: the layer by hand, its training on one and two processes, fine-tuning, channel maps."""
import dataclasses
import re

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import aotpot
import configs
import evaluate
import finetune
import helpers
import nets.build
from helpers import field, fresh, log, travelling, write
from nets import experts

SYSTEMS = pytest.mark.parametrize('residual', ['aot', 'plain'])


@pytest.mark.parametrize('size, plain, used, hybrid', [
    ('moe-tiny', 30_166_381 - 528_390, 17.6, 31), ('moe-small', 166_332_813 - 2_105_350, 90.8, 168),
    ('moe-medium', 489_635_501 - 2_105_350, 288.2, 491)])
def test_parameters_are_those_of_moe_pot_and_of_the_hybrid_without_the_classification_head(size, plain, used, hybrid):
    """The head has three linear layers, D -> D -> D -> 6."""
    with torch.device('meta'):
        moe_pot, both = (nets.build.build(configs.model(size, residual=residual)) for residual in ('plain', 'aot'))
    D = moe_pot.config.width
    head = 2 * (D * D + D) + 6 * D + 6
    assert aotpot.parameters(moe_pot) == plain
    assert round((experts.activated(moe_pot) + head) / 1e6, 1) == used
    assert round((aotpot.parameters(both) + head) / 1e6) == hybrid


def test_the_fast_form_computes_the_chosen_experts_only():
    counts = []
    for form, E in (('fast', 3), ('fast', 9), ('paper', 9)):
        model = fresh(form, experts=E, top_k=2)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(field(model))
        counts.append(counter.get_total_flops())
    every = counts[2]
    assert 0 < counts[1] - counts[0] < 0.01 * counts[0] < 0.2 * (every - counts[1])      # the router's last layer


@SYSTEMS
def test_every_parameter_has_a_gradient_whoever_is_chosen(residual):
    model = fresh(residual=residual, experts=16, top_k=1)
    model(field(model)).square().mean().backward()
    experts.balance_loss(model)
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    for part in model.layers[0].mlp.weight, model.layers[0].mlp.shared_weight:
        assert -24 ** -0.5 <= part.min() < -0.2 and 0.2 < part.max() <= 24 ** -0.5, "PyTorch's start for 24 inputs"
    chosen = experts.after_step(model)[0].nonzero()[:, 0].tolist()
    moved = model.layers[0].mlp.weight.grad.flatten(1).abs().amax(1).nonzero()[:, 0].tolist()
    assert chosen == moved and len(chosen) < 16


def test_the_balance_loss_is_moe_pots_over_the_batch_size_and_the_temperature_falls_to_a_half():
    model = fresh('paper', experts=5, top_k=2)
    model(field(model, 3))
    routers = [layer.router for layer in experts.expert_layers(model)]
    weights = [router.weights for router in routers]
    theirs = sum(((w.sum(0) - 3 / 5) ** 2).mean() for w in weights)
    torch.testing.assert_close(experts.balance_loss(model), theirs / 3)
    assert [router.weights for router in routers] == [None, None], 'the graph of the step would be kept'
    shares = torch.stack([w.mean(0) for w in weights]).detach()
    for step in range(150):
        assert routers[0].tau.item() == pytest.approx(max(0.5, 2 * 0.99 ** step), rel=1e-6)
        torch.testing.assert_close(experts.after_step(model), shares)


@pytest.fixture
def folder(tmp_path):
    for split, N in (('train', 6), ('test', 3)):
        write(tmp_path / 'data', 'slow', travelling(N, 9, 16, 2, 0.4), split)
        write(tmp_path / 'data', 'fast', travelling(N, 7, 16, 2, 1.7, scale=3), split)
    return tmp_path / 'data'


def command(folder, out, *flags, steps=10):
    return helpers.command(folder, out, '--experts', '5', *flags, steps=steps, save_every=5)[1:]


def state(out):
    return torch.load(out / 'last.pt', weights_only=True)


@SYSTEMS
def test_a_run_logs_the_load_cools_once_a_step_and_keeps_its_statistics(residual, folder, tmp_path, call):
    out = tmp_path / 'out'
    code, error, printed = call(command(folder, out, '--residual', residual, '--log_every', '2'))
    assert code == 0 and 'of them activated' in printed, error
    load = np.array([line['load'] for line in log(out)])
    assert load.shape == (6, 1, 5) and np.allclose(load.sum(2), 1) and load.min() >= 0 and load.std(2).min() > 0
    assert state(out)['model']['layers.0.mlp.router.tau'].item() == pytest.approx(2 * 0.99 ** 10, rel=1e-5)
    assert (evaluate.load(out).layers[0].mlp.router.norm1.running_mean != 0).any()


def test_two_processes_have_the_statistics_of_the_first_which_are_saved(tmp_path):
    """Each normalises its own samples, so that without this a resumed run would have other scores."""
    model = helpers.small_model(experts=4).train()

    def process():
        torch.distributed.init_process_group('gloo')
        torch.manual_seed(torch.distributed.get_rank())
        for _ in range(2):
            model(field(model))
            experts.balance_loss(model)
            experts.after_step(model)
        torch.save(dict(model.named_buffers()), tmp_path / f'{torch.distributed.get_rank()}.pt')
    port = helpers.free_port()
    both = [helpers.fork(process, tmp_path / 'printed', rank, port, 2) for rank in range(2)]
    assert [helpers.exit_code(one) for one in both] == [0, 0], (tmp_path / 'printed').read_text()
    saved = [torch.load(tmp_path / f'{rank}.pt') for rank in range(2)]
    assert helpers.same(*saved) and not helpers.same(saved[0], dict(model.named_buffers()))


def test_a_training_with_more_of_the_balance_loss_ends_with_evener_shares(folder, tmp_path, monkeypatch, call):
    model, recipe = configs.SIZES['nano']
    unevenness = []
    for balance in (0.0, 1e3):
        monkeypatch.setitem(configs.SIZES, 'nano', (model, dataclasses.replace(recipe, balance=balance)))
        assert call(command(folder, tmp_path / f'{balance}', '--lr', '2e-2', steps=12))[0] == 0
        load = np.array([line['load'] for line in log(tmp_path / f'{balance}')][-12:])  # (12, 1, E)
        unevenness.append(load.mean(0).std())
    assert unevenness[1] < unevenness[0] / 2, unevenness


def test_fine_tuning_leaves_routers_and_features_as_they_are(folder, tmp_path, call):
    out = tmp_path / 'out'
    assert call(command(folder, out, steps=5))[0] == 0
    before = state(out)['model']
    flags = ['--checkpoint', out / 'last.pt', '--dataset', 'slow', '--steps', 3, '--lr', '1e-2', '--batch_size', 1]
    code, error, _ = call([*flags, '--device', 'cpu', '--out', tmp_path / 'tuned'], finetune)
    assert code == 0, error
    saved = state(tmp_path / 'tuned')
    after, frozen = saved['model'], [name for name in before if '.router.' in name or '.features.' in name]
    assert saved['config']['train']['balance'] == 0 and len(frozen) == 2 + 10 + 10 + 1
    assert finetune.recipe_for(configs.FinetuneConfig(from_scratch=True), saved['config'], 9).balance == 0.1
    for name in before:         # in the first sub-layer the streams are equal: a and T have no gradient but rounding
        if not re.fullmatch(r'layers\.0\.aot1\.mappings\..*_[aT]', name):
            assert torch.equal(after[name], before[name]) == (name in frozen and 'tau' not in name), name
    assert after['layers.0.mlp.router.tau'] == 0.5 < before['layers.0.mlp.router.tau']


@SYSTEMS
def test_channel_maps_start_as_the_identity_and_are_applied_to_the_field(residual):
    model, maps = fresh(residual=residual), fresh(residual=residual, channel_maps='learned', channels=2)
    maps.load_state_dict(model.state_dict(), strict=False)
    u = field(model)
    torch.testing.assert_close(maps(u), model(u))
    for module in (maps.map_in, maps.map_out):
        module.weight.data.normal_(), module.bias.data.normal_()
    weights = [maps.map_in.weight, maps.map_in.bias, maps.map_out.weight, maps.map_out.bias]
    inside = model(torch.einsum('cd,bthwd->bthwc', *(weights[0], u)) + weights[1])
    torch.testing.assert_close(maps(u), torch.einsum('cd,bhwd->bhwc', weights[2], inside) + weights[3])


def test_the_maps_of_another_run_are_taken_and_frozen_and_need_no_file_afterwards(folder, tmp_path, call, refused):
    learned, frozen = tmp_path / 'learned', tmp_path / 'frozen'

    def with_maps(out, maps, *flags):
        return command(folder, out, '--experts', '0', '--channel_maps', str(maps), *flags)
    assert call(with_maps(learned, 'learned'))[0] == 0
    maps = {name: value for name, value in state(learned)['model'].items() if name.startswith('map_')}
    assert len(maps) == 4 and not torch.equal(maps['map_in.weight'], torch.eye(4))
    assert call(with_maps(frozen, learned / 'last.pt'))[0] == 0
    (learned / 'last.pt').unlink()
    assert call(with_maps(frozen, learned / 'last.pt', '--resume'))[0] == 0
    model = evaluate.load(frozen / 'last.pt')
    assert all(torch.equal(model.state_dict()[name], value) for name, value in maps.items())
    assert not model.map_in.weight.requires_grad and not model.map_out.bias.requires_grad
    refused(with_maps(tmp_path / 'wrong', frozen / 'last.pt', '--channels', '3'), 'no maps of 3 channels')
