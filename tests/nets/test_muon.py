"""Muon: against singular value decompositions, a slow loop in float64 and PyTorch's own; what it takes as a matrix."""
import importlib.util

import pytest
import torch

import configs
from helpers import CPU, build, small_model
from nets.build import OPTIMIZERS, matrices, optimizer_of
from nets.muon import Muon, orthogonalize

BAND = 0.68, 1.21           # of the singular values after five rounds, for those of 0.003 to 1 before


def with_singular_values(s, m, n, dtype):
    """A random (m, n) matrix that has these singular values."""
    U, V = (torch.linalg.qr(torch.randn(size, len(s), dtype=dtype))[0] for size in (m, n))
    return U * s @ V.mH


@pytest.mark.parametrize('dtype', [torch.float32, torch.complex64])
@pytest.mark.parametrize('m, n, rank', [(6, 6, 6), (4, 9, 4), (9, 4, 4), (1, 5, 1), (8, 12, 3)])
def test_singular_values_come_into_the_published_band_and_zero_stays_zero(m, n, rank, dtype):
    s = torch.logspace(0, -2, rank, dtype=torch.float64).to(dtype)
    G = with_singular_values(s, m, n, dtype)
    for scale in (1, 1e-9, 1e9):
        found = torch.linalg.svdvals(orthogonalize(scale * G))
        assert BAND[0] < found[:rank].min() and found[:rank].max() < BAND[1], found
        assert found[rank:].sum() < 1e-3
    assert not orthogonalize(torch.zeros(2, m, n, dtype=dtype)).any()


def polynomial(s):
    """What five rounds make of the singular values s of a matrix."""
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s ** 3 + 2.0315 * s ** 5
    return s


def slow_muon(p, gradients, form, lr, momentum, decay):
    """The steps of one parameter, matrix by matrix, from singular value decompositions.

    A matrix whose gradient is zero, such as that of an expert that no sample took, stays as it is.
    """
    places = {'matrix': [slice(None)], 'stack': range(len(p)),
              'complex': [(slice(None), k) for k in range(p.shape[1])]}[form]
    mean = torch.zeros_like(p)
    for g in gradients:
        mean = momentum * mean + (1 - momentum) * g
        update = momentum * mean + (1 - momentum) * g
        moves = torch.zeros_like(p)
        for place in places:
            moves[place] = float(g[place].any())
            G = torch.complex(*update[place]) if form == 'complex' else update[place].flatten(1)
            U, s, Vh = torch.linalg.svd(G, full_matrices=False)
            X = max(1, len(G) / G.shape[1]) ** 0.5 * (U * polynomial(s).to(G.dtype) @ Vh)
            update[place] = torch.stack([X.real, X.imag]) if form == 'complex' else X.view(update[place].shape)
        p = p - moves * lr * (decay * p + update)
    return p


def test_three_steps_of_every_form_are_those_of_a_slow_loop_and_the_rest_is_adamw():
    shapes = {'matrix': [(6, 4), (6, 4), (4, 2, 3, 3), (4, 6)], 'stack': [(3, 5, 4)], 'complex': [(2, 3, 4, 4)],
              '': [(7,), (2, 3)]}
    draw = lambda: {form: [torch.randn(shape, dtype=torch.float64) for shape in shapes[form]] for form in shapes}
    start, gradients = draw(), [draw() for _ in range(3)]
    gradients[1]['matrix'][0][:] = gradients[1]['stack'][0][1] = gradients[2]['complex'][0][:, 2] = 0
    ours = {form: [torch.nn.Parameter(p.clone()) for p in start[form]] for form in shapes}
    rest = [torch.nn.Parameter(p.clone()) for p in start['']]
    settings = dict(lr=0.1, betas=(0.9, 0.8), weight_decay=0.01)
    muon = Muon({form: ours[form] for form in shapes if form}, ours[''], ratio=0.5, momentum=0.9, **settings)
    adamw = torch.optim.AdamW(rest, **settings)
    assert [group['lr'] for group in muon.param_groups] == [0.1, 0.05, 0.05, 0.05]
    for of_step in gradients:
        for form, group in [*ours.items(), ('', rest)]:
            for p, g in zip(group, of_step[form]):
                p.grad = g.clone()
        muon.step()
        adamw.step()
    for form in filter(None, shapes):
        for i, p in enumerate(start[form]):
            expected = slow_muon(p, [of_step[form][i] for of_step in gradients], form, 0.05, 0.9, 0.01)
            torch.testing.assert_close(ours[form][i].detach(), expected)
    for p, expected in zip(ours[''], rest):
        torch.testing.assert_close(p, expected)


def test_a_step_takes_a_closure_and_leaves_a_parameter_without_a_gradient_as_it_is():
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    one, two = (Muon({'matrix': [layer.weight]}, [layer.bias], lr=0.1) for layer in layers)

    def closure(layer, optimizer):
        optimizer.zero_grad()
        loss = layer(torch.ones(5, 4)).square().sum()
        loss.backward()
        return loss
    first = closure(layers[0], one)
    assert one.step() is None and torch.equal(two.step(lambda: closure(layers[1], two)), first)
    assert torch.equal(layers[0].weight, layers[1].weight)
    one.zero_grad()
    one.step()
    assert torch.equal(layers[0].weight, layers[1].weight)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_optimizer_has_the_numbers_of_its_recipe(name):
    numbers = dict(lr=0.1, weight_decay=0.2, momentum=0.5)
    recipe = configs.recipe('nano', optimizer=name, beta1=0.8, beta2=0.7, ratio=3.0, **numbers)
    optimizer = optimizer_of(small_model(), recipe, CPU.device, 'bf16')
    for group in optimizer.param_groups:
        assert group['betas'] == (0.8, 0.7)
        assert {key: group[key] for key in numbers if key in group} == {
            **numbers, 'lr': 0.1 * 3} if group.get('form') else dict(lr=0.1, weight_decay=0.2)
    assert getattr(optimizer, 'half', name == 'muon') == (name == 'muon')


def names(model):
    """The names of the parameters by form."""
    forms, rest = matrices(model)
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {form: [of[id(p)] for p in parameters] for form, parameters in {**forms, '': rest}.items()}


@pytest.mark.parametrize('residual', ['aot', 'plain'])
def test_the_matrices_are_those_between_hidden_features_and_each_parameter_has_one_place(residual):
    model = build(residual=residual, width=32, out_width=16, depth=1, channels=4, normalize=True)
    found = names(model)
    assert found['matrix'] == ['embed.project.weight', 'layers.0.mlp.0.weight', 'layers.0.mlp.2.weight',
                               'readout.hidden.weight']
    assert found['stack'] == ['aggregate.weight'] and found['complex'] == ['layers.0.mixer.w1', 'layers.0.mixer.w2']
    assert sorted(sum(found.values(), [])) == sorted(name for name, _ in model.named_parameters())
    assert 'readout.project.weight' in found['']
    assert 'embed.conv.weight' in names(build(channels=13, depth=1))[''], 'patches, of whatever many channels'


def test_other_networks_and_experts_have_matrices_too():
    found = names(build(experts=4, mlp=32, width=32, depth=1))
    assert found['stack'] == ['aggregate.weight', 'layers.0.mlp.weight', 'layers.0.mlp.shared_weight']
    assert 'layers.0.mlp.router.w1.weight' in found['matrix'] and 'layers.0.mlp.router.w3.weight' in found['']
    unet = names(small_model(network='UNet', width=64, depth=2))
    levels = 'down.0', 'down.1', 'down.2', 'up.0', 'up.1'
    assert unet['matrix'] == [f'{level}.{i}.weight' for level in levels for i in (0, 3)][1:]
    if importlib.util.find_spec('neuralop'):
        fno = names(small_model(network='FNO', width=128, depth=2))
        assert len(fno['matrix']) > 2 and all('convs' not in name for name in fno['matrix'])
