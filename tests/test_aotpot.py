"""The network in the paper's form; tests/nets/test_fast.py holds the fast form against it."""
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import aotpot
import configs
import nets.build
from conftest import ROOT
from helpers import build, field, fresh


def ordinary(model, u):
    """x <- x + F(x) with the same sub-layers: the paper's standard residual connection."""
    x = model.aggregate(model.embed(u))
    for layer in model.layers:
        x = x + layer.post1(layer.mixer(layer.norm1(x)))
        x = x + layer.post2(layer.mlp(layer.norm2(x)))
    return model.readout(x)


@pytest.mark.parametrize('norm', ['', 'pre'])
def test_alpha_0_is_the_ordinary_residual_network_with_any_T(norm):
    model = fresh('paper', alpha=0.0, norm=norm)
    u = field(model)
    torch.testing.assert_close(model(u), ordinary(model, u), rtol=1e-12, atol=1e-12)
    for layer in model.layers:
        layer.aot1.mappings.b_T.data.normal_(), layer.aot2.mappings.b_T.data.normal_()
    torch.testing.assert_close(model(u), ordinary(model, u), rtol=1e-12, atol=1e-12)
    assert any('post' in name for name in model.state_dict()) == (norm == '')


def test_an_aot_block_by_hand():
    """Eq. (9) written out for two streams of one token and one channel, F(x) = 10 x."""
    block = aotpot.AOTBlock(configs.model('tiny', streams=2, width=8))
    mappings = [[0.25, 0.75]], [[1.0, 0.5]], [[[0.9, 0.1], [0.1, 0.9]]]
    block.mappings.forward = lambda mean: [*map(torch.tensor, mappings)]
    x = torch.tensor([2.0, 6.0]).view(1, 2, 1, 1, 1).expand(-1, -1, -1, -1, 8)
    out = block(x, lambda x: 10 * x)                        # a x = 5, F = 50
    expected = [0.9 * 2 + 0.1 * 6 + 50, 0.1 * 2 + 0.9 * 6 + 25]
    torch.testing.assert_close(out, torch.tensor(expected).view(1, 2, 1, 1, 1).expand_as(x))


def test_the_three_mappings_by_hand():
    """Eqs. (11) and (12) for two streams of width 1, alpha far from 1 and one round of Sinkhorn.

    The means are (1, 7), whose root mean square is 5, so v = (0.2, 1.4).
    """
    config = SimpleNamespace(streams=2, width=1, ablate='', sinkhorn_iters=1, alpha=0.0, t_init=0.0)
    mappings, log = aotpot.Mappings(config).double(), math.log
    for name, phi, alpha, b in (
            ('a', [[5, 0], [0, 5]], 0.25, [log(3) - 0.25, -1.75]),  # v phi = (1, 7), a~ = log 3, 0
            # v phi = (1, 2), d~ = (log 3, -log 3)
            ('d', [[5, 10], [0, 0]], 4, [log(3) - 4, -log(3) - 8]),
            # v phi = (1, 7, 0, 2), T~ = [[log 2, log 3], [0, 0]]
            ('T', [[5, 0, 0, 10], [0, 5, 0, 0]], 0.5, [[log(2) - 0.5, log(3) - 3.5], [0, -1]])):
        for kind, value in (('phi', phi), ('alpha', alpha), ('b', b)):
            getattr(mappings, f'{kind}_{name}').data[...] = torch.tensor(value)
    a, d, T = mappings(torch.tensor([[[1.0], [7.0]]], dtype=torch.float64))
    # sigmoid(log 3) = 3/4; exp(T~) = [[2, 3], [1, 1]] has the columns [2/3, 1/3] and [3/4, 1/4]
    expected = [[[0.6, 0.4]], [[1.5, 0.5]], [[[8 / 17, 9 / 17], [4 / 7, 3 / 7]]]]
    for found, numbers in zip((a, d, T), expected):
        torch.testing.assert_close(found, torch.tensor(numbers).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize('letter, value', [('a', 0.25), ('d', 1.0), ('T', None)])
def test_an_ablated_mapping_is_uniform_ones_or_identity(letter, value):
    model = build(alpha=1.0, ablate=letter)
    found = dict(zip('adT', model.layers[1].aot2.mappings(torch.randn(2, 4, 16).double())))
    expected = torch.eye(4).double() if value is None else torch.tensor(value)
    assert (found.pop(letter) == expected).all()
    assert all((mapping[0] - mapping[1]).abs().max() > 1e-4 for mapping in found.values())
    unused = {name for name in build().state_dict() if name.endswith(f'_{letter}')}
    assert {*model.state_dict()} == {*build().state_dict()} - unused and len(unused) == 12


@pytest.mark.parametrize('patch', [4, 3])
def test_with_overlap_a_token_reaches_half_a_patch_further_else_it_is_the_plain_readout(patch):
    options = dict(patch=patch, resolution=4 * patch)
    plain, overlap = (build('paper', **options, overlap=wide).readout for wide in (False, True))
    margin = patch // 2
    x = torch.randn(1, 4, 4, 16).double()
    changed = x.clone()
    changed[0, 1, 2] += 1
    reached = (overlap(x) != overlap(changed)).any(-1)[0].nonzero()    # grid points, (n, 2)
    assert reached.amin(0).tolist() == [patch - margin, 2 * patch - margin]
    assert reached.amax(0).tolist() == [2 * patch + margin - 1, 3 * patch + margin - 1]

    state = plain.state_dict()
    state['conv.weight'] = F.pad(state['conv.weight'], 4 * (margin,))
    overlap.load_state_dict(state)
    torch.testing.assert_close(overlap(x), plain(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize('residual', [dict(alpha=0.5), dict(residual='plain')])
def test_the_tokens_are_told_the_condition_of_each_sample_and_begin_blind_to_it(residual):
    """tests/runtime/test_checkpoint.py holds these layers against DPOT's."""
    model, begun = (form(normalize=True, **residual) for form in (build, fresh))
    u, condition = field(model), torch.rand(2, 2, 2).double()
    assert torch.equal(begun(u, condition), begun(u))
    for layer in model.film.scale, model.film.shift:
        torch.nn.init.normal_(layer.weight)
    nothing = torch.tensor([[0., 0], [1, 1]]).double().expand(2, 2, 2)
    v = model(u)
    assert torch.equal(v, model(u, nothing)) and not torch.equal(v, model(u, condition))


def test_a_network_of_the_change_adds_the_last_frame():
    model = build('paper', change=True)
    u = field(model)
    torch.testing.assert_close(model(u), model.predict(u, None) + u[:, -1])


def test_the_mixer_by_hand():
    """Eq. (8) on 4 x 6 points as sums; a mode that the half spectrum leaves out counts twice."""
    mixer = aotpot.FourierMixer(configs.model('tiny', width=16, heads=2), inner_skip=False).double()
    for parameter in mixer.parameters():
        parameter.data.normal_()
    assert not any(parameter.is_complex() for parameter in mixer.parameters())
    x = torch.randn(4, 6, 16, dtype=torch.float64)
    w1, w2, b1, b2 = (torch.complex(*p.data) for p in (mixer.w1, mixer.w2, mixer.b1, mixer.b2))
    places = torch.cartesian_prod(*(torch.arange(n).double() / n for n in (4, 6))).view(4, 6, 2)
    for modes, last in ((2, 2), (32, 4)):                   # 0 1 -2 -1 by 0 1, and all
        mixer.modes, out = modes, torch.zeros(4, 6, 16).double()
        for k in itertools.product(range(4), range(last)):
            wave = torch.exp(2j * math.pi * (places @ torch.tensor(k).double()))[..., None]
            mode = (x * wave.conj()).sum((0, 1)) / 24 ** 0.5
            for head in range(2):
                part = slice(8 * head, 8 * head + 8)
                z = mode[part] @ w1[head] + b1[head]
                z = torch.complex(F.gelu(z.real), F.gelu(z.imag)) @ w2[head] + b2[head]
                out[..., part] += (1 if k[1] in (0, 3) else 2) * (z * wave).real / 24 ** 0.5
        torch.testing.assert_close(mixer(x[None])[0], out, rtol=1e-10, atol=1e-10)
    skipping = fresh('paper', inner_skip=True).layers[0].mixer
    skipping.load_state_dict(mixer.state_dict())
    torch.testing.assert_close(skipping(x[None])[0] - x, out)
    mixer.modes = 3                                         # of 0 1 2 3 -4 -3 -2 -1, 0 1 2 3 4 5 6
    kept = [[i, j] for i in (0, 1, 2, 5, 6, 7) for j in (0, 1, 2)]
    assert mixer.mode_mask((8, 12)).nonzero().tolist() == kept and mixer.mode_mask((6, 4)).all()
    assert mixer.mode_mask((7, 6))[:, 0].tolist() == [1, 1, 1, 0, 1, 1, 1]
    assert mixer.mode_mask((6, 6)).tolist() == 6 * [[True, True, True, False]]


def test_initial_distributions():
    model = nets.build.build(configs.model('tiny', depth=1))
    layer, mappings = model.layers[0], model.layers[0].aot1.mappings
    assert abs(model.aggregate.weight.std() * 10 * 512 ** 0.5 - 1) < 0.01
    assert abs(mappings.phi_T.std() * (4 * 512) ** 0.5 - 1) < 0.02
    assert abs(mappings.phi_a.std() * (4 * 512) ** 0.5 - 1) < 0.04
    scale = (512 / 4) ** -2
    for part in layer.mixer.parameters():
        assert 0 <= part.min() and part.max() <= scale and abs(part.mean() / scale - 0.5) < 0.05
    assert torch.equal(model.aggregate.gamma, 2 ** torch.linspace(-10, 10, 512))
    assert torch.equal(mappings.b_T, torch.eye(4)) and torch.equal(mappings.b_a, torch.zeros(4))
    assert mappings.alpha_T == torch.tensor(0.01) and torch.equal(model.gate, torch.zeros(4))
    assert model.embed.conv.weight.abs().max() <= (7 * 64) ** -0.5
    assert model.readout.conv.weight.abs().max() <= (32 * 64) ** -0.5
    assert abs(model.embed.position.std() - 0.02) < 0.001


@pytest.mark.parametrize('residual', [dict(alpha=0.5), dict(residual='plain')])
def test_derivatives_of_every_kind(residual):
    """For physics losses; torch.func takes the network with the lines of docs/training.md."""
    model = build('paper', depth=1, **residual)
    u, v = field(model), field(model)
    page = (ROOT / 'docs/training.md').read_text()
    expected = model(u)
    lines = page.split('torch.func.vmap')[1].split('```python')[1].split('```')[0]
    exec(lines, {'model': model, 'aotpot': aotpot})
    torch.testing.assert_close(model(u), expected, rtol=0, atol=1e-12)
    loss = lambda u: model(u).square().sum()
    gradient = torch.func.grad(loss)
    h = 1e-5
    # a directional derivative in three ways: forward mode, reverse mode, and a difference
    slope = torch.func.jvp(loss, (u,), (v,))[1]
    torch.testing.assert_close(slope, (gradient(u) * v).sum(), rtol=1e-9, atol=1e-9)
    difference = (loss(u + h * v) - loss(u - h * v)) / (2 * h)
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-5)
    # the second derivative along v, twice on one graph
    w = u.clone().requires_grad_()
    g, = torch.autograd.grad(loss(w), w, create_graph=True)
    difference = (gradient(u + h * v) - gradient(u - h * v)) / (2 * h)
    for _ in range(2):
        second, = torch.autograd.grad((g * v).sum(), w, retain_graph=True)
        torch.testing.assert_close(second, difference, rtol=1e-4, atol=1e-4)
    # each sample by itself
    single = torch.func.vmap(lambda sample: model(sample[None])[0])(u)
    torch.testing.assert_close(single, model(u), rtol=0, atol=1e-10)
