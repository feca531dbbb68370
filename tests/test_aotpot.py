"""The network in the paper's form: what its parts must mean. tests/nets/test_fast.py holds the fast form against it."""
import math

import configs

import pytest
import torch
import torch.nn.functional as F

import aotpot
import nets
from conftest import ROOT
from helpers import build, field, fresh, mappings_of, run
from nets import fast

FORMS = pytest.mark.parametrize('form', ['paper', 'fast'])


def ordinary(model, u):
    """x <- x + F(x) with the same sub-layers: what the paper calls the standard residual connection."""
    x = model.aggregate(model.embed(u))
    for layer in model.layers:
        x = x + layer.post1(layer.mixer(layer.norm1(x)))
        x = x + layer.post2(layer.mlp(layer.norm2(x)))
    return model.readout(x)


def test_alpha_0_is_the_ordinary_residual_network_with_any_T():
    model = fresh('paper', alpha=0.0)
    u = field(model)
    torch.testing.assert_close(model(u), ordinary(model, u), rtol=1e-12, atol=1e-12)
    for layer in model.layers:
        layer.aot1.mappings.b_T.data.normal_(), layer.aot2.mappings.b_T.data.normal_()
    torch.testing.assert_close(model(u), ordinary(model, u), rtol=1e-12, atol=1e-12)


def test_one_stream_is_a_residual_scaled_by_d():
    """S = 1: a = 1 and T = 1, and of the mappings only d = 2 sigmoid(...) is left."""
    model = build('paper', streams=1, alpha=0.5)
    u = field(model)
    x = model.aggregate(model.embed(u))
    for layer in model.layers:
        for block, sublayer in ((layer.aot1, lambda x: layer.post1(layer.mixer(layer.norm1(x)))),
                                (layer.aot2, lambda x: layer.post2(layer.mlp(layer.norm2(x))))):
            module, v = block.mappings, F.rms_norm(x.mean((1, 2)), x.shape[-1:])
            d = 2 * torch.sigmoid(module.alpha_d * (v @ module.phi_d) + module.b_d)
            x = x + d[:, :, None, None] * sublayer(x)
    torch.testing.assert_close(model(u), model.readout(x), rtol=0, atol=1e-12)


def test_an_aot_block_by_hand():
    """Eq. (9) written out for two streams of one token and one channel, F(x) = 10 x."""
    block = aotpot.AOTBlock(configs.model('tiny', streams=2, width=8))
    a, d, T = torch.tensor([[0.25, 0.75]]), torch.tensor([[1.0, 0.5]]), torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])
    block.mappings.forward = lambda mean: (a, d, T)
    x = torch.tensor([2.0, 6.0]).view(1, 2, 1, 1, 1).expand(-1, -1, -1, -1, 8)
    out = block(x, lambda x: 10 * x)                        # a x = 5, F = 50
    expected = torch.tensor([0.9 * 2 + 0.1 * 6 + 50, 0.1 * 2 + 0.9 * 6 + 25]).view(1, 2, 1, 1, 1).expand_as(x)
    torch.testing.assert_close(out, expected)


def test_T_differs_between_inputs_and_moves_within_a_few_steps():
    model = fresh().float()
    u, target = field(model, 4), torch.randn(4, 16, 16, 2)
    before = torch.stack([T for _, _, T in mappings_of(model, u)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        (model(u) - target).square().mean().backward()
        optimizer.step()
    after = torch.stack([T for _, _, T in mappings_of(model, u)])                       # (sub-layers, B, S, S)
    assert (after - before).abs().amax((1, 2, 3)).min() > 1e-3, 'T of a sub-layer did not move'
    assert (after[:, 0] - after[:, 1]).abs().amax((1, 2)).min() > 1e-4, 'T does not depend on the input'


def test_a_is_on_the_simplex_and_d_within_0_and_2():
    model = build(alpha=3.0)
    for a, d, T in mappings_of(model, field(model, 3)):
        torch.testing.assert_close(a.sum(1), torch.ones(3, dtype=a.dtype), rtol=0, atol=1e-12)
        assert a.min() > 0 and d.min() > 0 and d.max() < 2 and T.min() >= 0
        assert d.std() > 1e-3


@pytest.mark.parametrize('letter, value', [('a', 0.25), ('d', 1.0), ('T', None)])
def test_an_ablated_mapping_is_uniform_ones_or_identity(letter, value):
    model = build(alpha=1.0, ablate=letter)
    for found in mappings_of(model, field(model)):
        mapping = found['adT'.index(letter)]
        expected = torch.eye(4).double().expand_as(mapping) if value is None else torch.full_like(mapping, value)
        assert torch.equal(mapping, expected)
        others = [m for name, m in zip('adT', found) if name != letter]
        assert all((m[0] - m[1]).abs().max() > 1e-4 for m in others)


@FORMS
def test_samples_of_a_batch_do_not_see_one_another(form):
    model = build(form, alpha=1.0)
    u = field(model, 3)
    changed = u.clone()
    changed[1] = torch.randn_like(changed[1])
    out, other = model(u), model(changed)
    torch.testing.assert_close(out[[0, 2]], other[[0, 2]], rtol=0, atol=1e-12)
    assert not torch.allclose(out[1], other[1])


@pytest.mark.parametrize('c', [1, 6])
def test_math_of_the_initial_T(c):
    """exp(c I) projects to e^c / (e^c + 3) on the diagonal: 0.475 with the paper's c = 1, 0.993 with 6."""
    T = mappings_of(fresh(alpha=0.0, t_init=float(c)), field(fresh(), 1))[0][2]
    expected = torch.full((4, 4), 1 / (math.exp(c) + 3)).double().fill_diagonal_(math.exp(c) / (math.exp(c) + 3))
    assert (T - expected).abs().max() < 1e-7


@FORMS
def test_the_inner_skip_adds_the_input_of_the_mixer_and_plain_always_has_it(form):
    for options, skips in ((dict(), False), (dict(inner_skip=True), True), (dict(residual='plain'), True)):
        mixer = build(form, **options).layers[0].mixer
        x = torch.randn(2, 4, 4, 16).double()
        torch.nn.init.zeros_(mixer.w2), torch.nn.init.zeros_(mixer.b2)          # so that the MLP gives 0
        y = mixer(x) if form == 'paper' else fast.mix(mixer, x)
        torch.testing.assert_close(y, x if skips else torch.zeros_like(x), rtol=0, atol=1e-12)


@FORMS
@pytest.mark.parametrize('residual', ['aot', 'plain'])
def test_with_normalize_a_field_in_other_units_gives_the_same_frame_in_those_units(form, residual):
    model = build(form, alpha=0.5, normalize=True, residual=residual)
    for linear in (model.units.scale, model.units.shift):
        torch.nn.init.zeros_(linear.weight), torch.nn.init.ones_(linear.bias)           # blind to the units
    u, scale, offset = field(model), torch.tensor([40.0, 0.5]), torch.tensor([-7.0, 300.0])
    torch.testing.assert_close(model(u * scale + offset), model(u) * scale + offset, rtol=1e-4, atol=1e-4)
    for scale in (1e-30, 1e-9, 1e20, 1e30):
        frame = model.float()(scale * u.float()) / scale
        torch.testing.assert_close(frame, model(u.float()), rtol=1e-4, atol=1e-4)
    for value in (2.5, 100.3, 0):                                                       # a channel that is constant
        u[..., 1] = value
        assert (model(u.float())[..., 1] - value).abs().max() <= 1e-4 * value
        assert aotpot.standardize(u.float())[0][..., 1].abs().max() < 0.2
    model, scale = model.double(), torch.tensor([40.0, 0.5])
    torch.nn.init.normal_(model.units.shift.weight)
    assert (model(u * scale + offset) - model(u) * scale - offset).abs().max() > 0.1    # the tokens know them


def test_a_token_of_the_embedding_by_hand():
    """Eqs. (4) and (5) for one token: a product with its patch, its points' coordinates and the frame's time."""
    model = build('paper')
    embed, aggregate, u = model.embed, model.aggregate, field(model, 1)
    z, P = 0, 4
    for t in range(3):
        x, y = torch.arange(8, 12) / 15, torch.arange(4, 8) / 15                        # points of token (2, 1)
        points = torch.stack([x[:, None].expand(P, P), y.expand(P, P), torch.full((P, P), t / 2)])
        patch = torch.cat([u[0, t, 8:12, 4:8].permute(2, 0, 1), points])                # (C+3, P, P)
        hidden = (embed.conv.weight * patch).sum((1, 2, 3)) + embed.conv.bias
        token = embed.project(F.gelu(hidden)) + embed.position[:, 2, 1]
        z = z + (token * torch.cos(aggregate.gamma * t / 2)) @ aggregate.weight[t]
    torch.testing.assert_close(aggregate(embed(u))[0, 2, 1], z, rtol=1e-6, atol=1e-6)


def test_the_mixer_is_a_convolution():
    """Eq. (8) without GELU: without biases a rolled input gives the rolled output, and one mode stays one mode."""
    module = aotpot.FourierMixer(configs.model('tiny', width=16, heads=2), inner_skip=False).double()
    for parameter in module.parameters():
        parameter.data.normal_()
    module.b1.data.zero_(), module.b2.data.zero_()
    x = torch.randn(2, 8, 6, 16, dtype=torch.float64)
    out = module(x)
    constant = x.mean((1, 2), keepdim=True).expand_as(x)
    torch.testing.assert_close(module(constant), out.mean((1, 2), keepdim=True).expand_as(x), rtol=0, atol=1e-10)
    wave = torch.cos(2 * math.pi * torch.arange(8).double() / 8)[:, None, None].expand(1, 8, 6, 16).contiguous()
    spectrum = torch.fft.rfft2(module(wave), dim=(1, 2)).abs().amax((0, 3))
    assert spectrum[1, 0] > 1e-3
    spectrum[[1, -1], 0] = 0
    assert spectrum.max() < 1e-10


@FORMS
def test_the_mixer_keeps_few_modes_of_both_signs(form):
    """A reflection along the full axis exchanges the signs of its frequencies and must pass through unharmed."""
    module = aotpot.FourierMixer(configs.model('tiny', width=16, heads=2, modes=3), inner_skip=False).double()
    torch.nn.init.uniform_(module.w1), torch.nn.init.uniform_(module.w2)
    torch.nn.init.zeros_(module.b1), torch.nn.init.uniform_(module.b2)
    mixed = module if form == 'paper' else lambda x: fast.mix(module, x)
    spectrum = torch.fft.rfft2(torch.randn(2, 16, 20, 16, dtype=torch.float64), dim=(1, 2))
    spectrum[:, 3], spectrum[:, -3] = 0, 0              # modes -3 ... 2 are kept; without -3 the set is symmetric
    module.b2.data.zero_()
    x = torch.fft.irfft2(spectrum, s=(16, 20), dim=(1, 2))
    flip = lambda z: z.flip(1).roll(1, 1)
    y = mixed(x)
    assert torch.fft.rfft2(y, dim=(1, 2))[:, [-1, -2]].abs().amax((0, 2, 3)).min() > 1e-6
    assert torch.fft.rfft2(y, dim=(1, 2))[:, 3:-3].abs().max() < 1e-9
    torch.testing.assert_close(mixed(flip(x)), flip(y), rtol=0, atol=1e-10)


@FORMS
def test_both_halves_of_the_complex_weights_get_gradients_and_no_parameter_is_complex(form):
    model = build(form)
    model(field(model)).square().sum().backward()
    assert not any(parameter.is_complex() for parameter in model.parameters())
    for layer in model.layers:
        for name in ('w1', 'w2', 'b1'):
            assert getattr(layer.mixer, name).grad[1].abs().max() > 0, name


@FORMS
@pytest.mark.parametrize('grid', [(64, 128), (96, 192)])
def test_non_square_grids_run_and_a_transposed_grid_gives_another_field(grid, form):
    model = build(form, patch=8, dtype=torch.float32)
    u = field(model, grid=grid)
    out = model(u)
    assert out.shape == (2, *grid, 2) and out.isfinite().all()
    assert not torch.allclose(model(u.transpose(2, 3)).transpose(1, 2), out, atol=1e-3)


@FORMS
def test_layers_of_a_2d_model_load_into_a_3d_one_and_mix_a_constant_axis_alike(form):
    flat, solid = build(form, alpha=0.5), build(form, alpha=0.5, dims=3)
    solid.layers.load_state_dict(flat.layers.state_dict())
    two, three = flat.layers[0].mixer, solid.layers[0].mixer
    for module in (two, three):
        module.b1.data.zero_(), module.b2.data.zero_()
    mixed = (lambda module, x: module(x)) if form == 'paper' else fast.mix
    x = torch.randn(2, 4, 4, 16, dtype=torch.float64)
    # the orthonormal transform of a constant axis of 4 points doubles the spectrum, which is what the MLP sees
    y = mixed(three, x[:, None].expand(-1, 4, -1, -1, -1) / 2) * 2
    torch.testing.assert_close(y, mixed(two, x)[:, None].expand_as(y), rtol=0, atol=1e-10)
    assert solid(field(solid)).shape == (2, 16, 16, 16, 2)


@pytest.mark.parametrize('size, count', [('tiny', 7_404_803), ('small', 29_894_511), ('medium', 122_423_475),
                                         ('large', 511_505_275)])
def test_parameter_counts(size, count):
    with torch.device('meta'):
        model = nets.build(configs.model(size))
    assert aotpot.parameters(model) == count


def test_initial_distributions():
    model = nets.build(configs.model('tiny', depth=1))
    layer, mappings = model.layers[0], model.layers[0].aot1.mappings
    assert abs(model.aggregate.weight.std() * 10 * 512 ** 0.5 - 1) < 0.01
    assert abs(mappings.phi_T.std() * (4 * 512) ** 0.5 - 1) < 0.02
    assert abs(mappings.phi_a.std() * (4 * 512) ** 0.5 - 1) < 0.04
    scale = (512 / 4) ** -2
    w1 = layer.mixer.w1
    assert 0 <= w1.min() and w1.max() <= scale and abs(w1.mean() / scale - 0.5) < 0.01
    assert model.aggregate.gamma[0] == 2 ** -10 and model.aggregate.gamma[-1] == 2 ** 10
    assert torch.equal(mappings.b_T, torch.eye(4)) and torch.equal(mappings.b_a, torch.zeros(4))
    assert mappings.alpha_T == torch.tensor(0.01) and torch.equal(model.gate, torch.zeros(4))
    assert model.embed.conv.weight.abs().max() <= (7 * 64) ** -0.5
    assert model.readout.conv.weight.abs().max() <= (32 * 64) ** -0.5
    assert abs(model.embed.position.std() - 0.02) < 0.001


def test_both_forms_start_from_the_same_weights_and_there_is_no_third():
    states = []
    for form in ('paper', 'fast'):
        torch.manual_seed(5)
        states.append(fresh(form).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]) and [*states[0]] == [*states[1]]
    with pytest.raises(configs.InputError, match="neither 'fast' nor 'paper'"):
        fresh('quick')


@FORMS
@pytest.mark.parametrize('residual', ['aot', 'plain'])
def test_derivatives_of_every_kind(form, residual):
    """Physics losses differentiate the network more than once, forward, and sample by sample."""
    model = build(form, residual=residual, depth=1, alpha=0.5)
    u, v = field(model), field(model)
    parameters = list(model.parameters())
    loss = lambda u: model(u).square().sum()
    # a directional derivative in three ways: forward mode, reverse mode, and a difference
    value, slope = torch.func.jvp(loss, (u,), (v,))
    gradient = torch.func.grad(loss)(u)
    h = 1e-5
    difference = (loss(u + h * v) - loss(u - h * v)) / (2 * h)
    torch.testing.assert_close(slope, (gradient * v).sum(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-5)
    # two losses on one graph
    out = model(u)
    first = torch.autograd.grad(out.sum(), parameters, retain_graph=True)
    again = torch.autograd.grad(out.sum(), parameters, retain_graph=True)
    assert all((a - b).abs().max() <= 1e-12 * max(1, b.abs().max()) for a, b in zip(again, first))
    # the second derivative along v, again against a difference
    w = u.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(w), w, create_graph=True)
    (second,) = torch.autograd.grad((g * v).sum(), w)
    difference = (torch.func.grad(loss)(u + h * v) - torch.func.grad(loss)(u - h * v)) / (2 * h)
    torch.testing.assert_close(second, difference, rtol=1e-4, atol=1e-4)
    # each sample by itself
    single = torch.func.vmap(lambda sample: model(sample[None])[0])(u)
    torch.testing.assert_close(single, model(u), rtol=0, atol=1e-10)


@FORMS
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('overrides', [dict(), dict(residual='plain'), dict(post_norm=False)], ids=str)
def test_the_whole_network_in_16_bits(form, dtype, overrides):
    model = build(form, dtype=torch.float32, **overrides)
    u = field(model, 4)
    expected = model(u)
    out = model.to(dtype)(u.to(dtype))
    assert out.dtype == dtype and (out.float() - expected).norm() < 5e-2 * expected.norm()
    out.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@FORMS
def test_an_empty_batch_gives_an_empty_field(form):
    for residual in ('aot', 'plain'):
        model = build(form, residual=residual)
        assert model(field(model, 0)).shape == (0, 16, 16, 2)


@FORMS
def test_an_exported_program_takes_any_batch_after_saving_and_loading(form, tmp_path):
    model = build(form, dtype=torch.float32, depth=1, alpha=0.5, sinkhorn_iters=2).eval()
    fast.MATRICES.clear()                        # as in a new process
    batch = torch.export.Dim('batch', min=1, max=64)
    program = torch.export.export(model, (field(model, 3),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / 'network.pt2')
    loaded = torch.export.load(tmp_path / 'network.pt2').module()
    for B in (1, 2, 5):
        u = field(model, B)
        torch.testing.assert_close(loaded(u), model(u), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('shape, words', [
    ((1, 4, 16, 16, 2), '3, H, W, 2'), ((1, 3, 16, 16, 5), '3, H, W, 2'), ((3, 16, 16, 2), '3, H, W, 2'),
    ((1, 3, 18, 16, 2), '18x16')])
def test_an_input_of_the_wrong_shape_is_refused_with_the_right_one(shape, words):
    with pytest.raises(configs.InputError, match=words):
        fresh()(torch.zeros(shape))


def test_importing_the_network_imports_nothing_that_trains_or_draws():
    code = ('import sys, aotpot; print(sorted(set(sys.modules) & {"configs", "sinkhorn", "nets.fast", "runtime", '
            '"data", "train", "evaluate", "figures", "h5py", "matplotlib", "triton"}))')
    done = run('-c', code, cwd=ROOT)
    assert done.stdout.strip() == "['configs', 'sinkhorn']", done.stderr
