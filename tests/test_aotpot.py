"""The network against the paper's own, slower form, and what its parts must mean."""
import argparse
import dataclasses
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F

import aotpot
import configs

SMALL = dict(width=16, mlp=24, depth=2, heads=2, patch=4, resolution=16, frames=3, channels=2, out_width=6)


def build(dtype=torch.float64, **overrides):
    """A small network whose gates and affine parameters are not at their trivial start."""
    model = aotpot.AOTPOT(configs.model('tiny', **{**SMALL, **overrides})).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 and 'gamma' not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def field(model, B=2, grid=None):
    config = model.config
    return torch.randn(B, config.frames, *(grid or config.resolution), config.channels,
                       dtype=next(model.parameters()).dtype)


# ------------------------------------------------------------------------------------------------ the paper's form

def sinkhorn_loop(logits, iters):
    p = logits.exp()
    for _ in range(iters):
        p = p / p.sum(-2, keepdim=True)
        p = p / p.sum(-1, keepdim=True)
    return p


def embedding(model, u):
    """Eqs. (4), (5) for every frame by itself: convs over field and coordinate channels, then the sum over t."""
    embed, P = model.embed, model.config.patch
    B, T, H, W, C = u.shape
    kernel = embed.patch_weight.permute(3, 2, 0, 1)                                     # (E, C+3, P, P)
    z = 0
    for t, time in enumerate(torch.linspace(0, 1, T, dtype=u.dtype)):
        x = torch.linspace(0, 1, H, dtype=u.dtype).view(1, 1, H, 1).expand(B, 1, H, W)
        y = torch.linspace(0, 1, W, dtype=u.dtype).view(1, 1, 1, W).expand(B, 1, H, W)
        frame = torch.cat([u[:, t].permute(0, 3, 1, 2), x, y, time.expand(B, 1, H, W)], 1)
        z_t = F.conv2d(F.gelu(F.conv2d(frame, kernel, embed.patch_bias, stride=P)),
                       embed.project.weight[:, :, None, None], embed.project.bias)      # (B, D, h, w)
        position = F.interpolate(embed.position.permute(2, 0, 1)[None], size=z_t.shape[2:], mode='bilinear')
        z_t = (z_t + position).permute(0, 2, 3, 1) * torch.cos(embed.gamma * time)
        z = z + z_t @ embed.time_weight[t]
    return z


def mixer(module, x):
    """Eq. (8) in complex numbers, head by head, with an FFT over all spatial axes."""
    grid, axes = x.shape[1:-1], tuple(range(1, x.ndim - 1))
    full = torch.fft.rfftn(x, dim=axes, norm='ortho')
    kept = torch.ones(full.shape[1:-1], dtype=torch.bool)
    for axis, n in enumerate(grid):
        k = torch.fft.fftfreq(n, 1 / n).round() if axis < len(grid) - 1 else torch.arange(n // 2 + 1)
        low = (k >= -module.modes) & (k < module.modes) | (axis < len(grid) - 1 and n <= 2 * module.modes)
        kept = kept & low.view(-1, *[1] * (len(grid) - 1 - axis))
    heads = []
    for i, z in enumerate(full.chunk(module.K, dim=-1)):
        w1, w2, b1, b2 = (torch.complex(p[0, i], p[1, i]) for p in (module.w1, module.w2, module.b1, module.b2))
        z = z @ w1 + b1
        z = torch.complex(F.gelu(z.real), F.gelu(z.imag)) @ w2 + b2
        heads.append(z * kept[..., None])
    y = torch.fft.irfftn(torch.cat(heads, -1), s=grid, dim=axes, norm='ortho')
    return x + y if module.skip else y


def norm(module, x):
    if isinstance(module, torch.nn.Identity):
        return x
    return F.group_norm(x.permute(0, 3, 1, 2).contiguous(), 8, module.weight, module.bias).permute(0, 2, 3, 1)


def aot(module, x, config):
    """Eqs. (11), (12) of explicit streams x (B, S, h, w, D)."""
    B, S, h, w, D = x.shape
    v = x.mean((2, 3)).reshape(B, S * D)
    v = v / v.square().mean(1, keepdim=True).add(torch.finfo(v.dtype).eps).sqrt()
    column, logits = 0, {}
    for name, size in (('a', S), ('d', S), ('T', S * S)):
        if name not in config.ablate:
            logits[name] = module.alpha[name] * (v @ module.phi[:, column:column + size]) + module.bias[name]
            column += size
    a, d, T = torch.full((B, S), 1 / S, dtype=x.dtype), torch.ones(B, S, dtype=x.dtype), torch.eye(S, dtype=x.dtype)
    if 'a' in logits:
        a = torch.sigmoid(logits['a']) / torch.sigmoid(logits['a']).sum(1, keepdim=True)
    if 'd' in logits:
        d = 2 * torch.sigmoid(logits['d'])
    T = sinkhorn_loop(logits['T'].view(B, S, S), config.sinkhorn_iters) if 'T' in logits else T.expand(B, S, S)
    return a, d, T


def readout(model, x):
    out, P = model.readout, model.config.patch
    kernel = out.weight.unflatten(1, (P, P)).permute(0, 3, 1, 2)                        # (D, O, P, P)
    y = F.gelu(F.conv_transpose2d(x.permute(0, 3, 1, 2), kernel, out.bias, stride=P))
    first, last = out.pointwise[1], out.pointwise[3]
    y = F.gelu(F.conv2d(y, first.weight[:, :, None, None], first.bias))
    return F.conv2d(y, last.weight[:, :, None, None], last.bias).permute(0, 2, 3, 1)


def paper(model, u):
    """The whole network as Sec. 4 writes it, with S explicit streams (B, S, h, w, D)."""
    config, z = model.config, embedding(model, u)
    mlp = lambda block, x: block.mlp[2](F.gelu(block.mlp[0](x)))
    if config.residual == 'plain':
        for block in model.blocks:
            z = z + mlp(block, norm(block.norm2, mixer(block.mixer, norm(block.norm1, z))))
        return readout(model, z)
    x = z[:, None].expand(-1, config.streams, -1, -1, -1)
    for block in model.blocks:
        for mappings, sublayer in (
                (block.aot1, lambda s: norm(block.post1, mixer(block.mixer, norm(block.norm1, s)))),
                (block.aot2, lambda s: norm(block.post2, mlp(block, norm(block.norm2, s))))):
            a, d, T = aot(mappings, x, config)
            y = sublayer(torch.einsum('bs,bs...->b...', a, x))
            x = torch.einsum('brs,bs...->br...', T, x) + torch.einsum('br,b...->br...', d, y)       # Eq. (9)
    return readout(model, torch.einsum('s,bs...->b...', torch.softmax(model.gate, 0), x))           # Eq. (13)


@pytest.mark.parametrize('overrides', [
    dict(), dict(alpha=0.5), dict(alpha=0.5, streams=1), dict(alpha=0.5, streams=2, sinkhorn_iters=3),
    dict(ablate='a', alpha=0.5), dict(ablate='d', alpha=0.5), dict(ablate='T', alpha=0.5), dict(ablate='adT'),
    dict(post_norm=False, alpha=0.5), dict(modes=1, alpha=0.5), dict(residual='plain'),
    dict(residual='plain', modes=1), dict(resolution=(8, 24), alpha=0.5)], ids=str)
def test_outputs_and_gradients_equal_the_papers_form(overrides):
    model = build(**overrides)
    u = field(model).requires_grad_()
    upstream = torch.randn(2, *model.config.resolution, model.config.channels, dtype=u.dtype)
    results = []
    for forward in (model, lambda u: paper(model, u)):
        out = forward(u)
        results.append((out, torch.autograd.grad((out * upstream).sum(), [u, *model.parameters()])))
    (fast, fast_gradients), (slow, slow_gradients) = results
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-10)
    for name, a, b in zip(['u', *dict(model.named_parameters())], fast_gradients, slow_gradients):
        assert (a - b).abs().max() <= 1e-10 * max(1, b.abs().max()), name


def test_the_papers_form_holds_on_a_grid_that_was_not_trained():
    model = build(alpha=0.5, modes=2)
    u = field(model, grid=(32, 24))
    torch.testing.assert_close(model(u), paper(model, u), rtol=0, atol=1e-10)


def gradients(out, parameters, **kwargs):
    return torch.autograd.grad(out.square().sum(), parameters, **kwargs)


@pytest.mark.parametrize('overrides', [dict(alpha=0.5), dict(alpha=0.5, dims=3), dict(post_norm=False)], ids=str)
def test_the_forms_of_eager_mode_on_a_cpu_equal_those_of_a_compiler_or_gpu(overrides, monkeypatch):
    model = build(**overrides)
    u, parameters = field(model), list(model.parameters())
    out = model(u)
    monkeypatch.setattr(aotpot, 'unfused', lambda x: False)
    plain = model(u)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-10)
    for a, b in zip(gradients(out, parameters), gradients(plain, parameters)):
        assert (a - b).abs().max() <= 1e-10 * max(1, b.abs().max())


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('mode', ['eager', 'default', 'reduce-overhead'])
def test_the_network_on_cuda_equals_that_on_a_cpu_eager_compiled_and_as_a_cuda_graph(mode):
    model = build(dtype=torch.float32, alpha=0.5)
    u, parameters = field(model), list(model.parameters())
    out = model(u)
    expected = [out.detach(), *gradients(out, parameters)]
    model.cuda()
    run = model if mode == 'eager' else torch.compile(model, mode=mode, fullgraph=True)
    for _ in range(3):                                              # a graph is recorded at the second, replayed then
        out = run(u.cuda())
        found = [out.detach(), *gradients(out, list(model.parameters()))]
    for name, a, b in zip(['out', *dict(model.named_parameters())], found, expected):
        assert (a.cpu() - b).abs().max() <= 1e-3 * max(1, b.abs().max()), name


def test_gradients_of_interleaved_passes_and_of_some_parameters_only():
    """The bank in which gradients replace outputs belongs to one forward pass, and is filled from its end."""
    model = build(alpha=0.5)
    u, v = field(model), field(model, 3)
    parameters = list(model.parameters())
    expected = [gradients(model(w), parameters) for w in (u, v)]
    outs = [model(w) for w in (u, v)]
    with torch.no_grad():
        model(u)
    for out, wanted in zip(outs, expected):
        assert all(torch.equal(a, b) for a, b in zip(gradients(out, parameters), wanted))
    names = [name for name, _ in model.named_parameters()]
    for part in ('blocks.1.', 'readout', 'embed', 'blocks.0.aot2'):
        chosen = [i for i, name in enumerate(names) if part in name]
        for i, gradient in zip(chosen, gradients(model(u), [parameters[i] for i in chosen])):
            assert torch.equal(gradient, expected[0][i]), names[i]
    model.embed.requires_grad_(False)
    for name, parameter, gradient in zip(names, parameters, expected[0]):
        parameter.grad = None
    model(u).square().sum().backward()
    assert all(parameter.grad is None if 'embed' in name else torch.equal(parameter.grad, gradient)
               for name, parameter, gradient in zip(names, parameters, expected[0]))


def test_a_second_backward_pass_and_second_derivatives_are_refused():
    model = build()
    parameters = list(model.parameters())
    out = model(field(model))
    gradients(out, parameters[-3:], retain_graph=True)              # of the readout: no stream is touched
    gradients(out, parameters, retain_graph=True)
    with pytest.raises(RuntimeError, match='backward once'):
        gradients(out, parameters, retain_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        sum(g.sum() for g in gradients(model(field(model)), parameters, create_graph=True)).backward()


def test_the_bank_is_freed_with_the_graph(monkeypatch):
    banks, init = [], aotpot.Streams.__init__
    monkeypatch.setattr(aotpot.Streams, '__init__',
                        lambda self, *args: init(self, *args) or banks.append(weakref.ref(self.bank)))
    model = build()
    gc.disable()
    try:
        model(field(model)).square().sum().backward()
        assert banks[0]() is None, 'a cycle keeps the outputs of a finished step'
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------ the AOT block

def ordinary(model, u):
    """x <- x + F(x) with the same sub-layers: what the paper calls the standard residual connection."""
    x = embedding(model, u)
    for block in model.blocks:
        for _, sublayer in block.sublayers():
            x = x + sublayer(x)
    return readout(model, x)


def mappings(model, u):
    """The (a, d, T) of every sub-layer in one forward pass."""
    seen = []
    hooks = [module.register_forward_hook(lambda *args: seen.append(args[2]))
             for module in model.modules() if isinstance(module, aotpot.AOT)]
    with torch.no_grad():
        model(u)
    for hook in hooks:
        hook.remove()
    return seen


def fresh(**overrides):
    return aotpot.AOTPOT(configs.model('tiny', **{**SMALL, **overrides})).double()


@pytest.mark.parametrize('T', ['as it starts', 'any other'])
def test_alpha_0_is_the_ordinary_residual_network(T):
    model = fresh(alpha=0.0)
    if T == 'any other':
        for module in model.modules():
            if isinstance(module, aotpot.AOT):
                module.bias['T'].data.normal_()
    u = field(model)
    torch.testing.assert_close(model(u), ordinary(model, u), rtol=1e-12, atol=1e-12)


def test_alpha_of_a_hundredth_changes_the_network_by_about_a_percent():
    model = fresh(alpha=0.01)
    u = field(model, 8)
    plain, out = ordinary(model, u), model(u)
    assert 1e-4 < (out - plain).norm() / plain.norm() < 3e-2


def test_one_stream_is_a_residual_scaled_by_d():
    """S = 1: a = 1 and T = 1, and only d = 2 sigmoid(...) is left of the mappings."""
    model = build(streams=1, alpha=0.5)
    u = field(model)
    x = embedding(model, u)
    for block in model.blocks:
        for aot_module, sublayer in block.sublayers():
            v = F.rms_norm(x.mean((1, 2)), x.shape[-1:])
            d = 2 * torch.sigmoid(aot_module.alpha['d'] * (v @ aot_module.phi[:, 1]) + aot_module.bias['d'])
            x = x + d[:, None, None, None] * sublayer(x)
    torch.testing.assert_close(model(u), readout(model, x), rtol=0, atol=1e-12)


def test_T_differs_between_inputs_and_moves_within_a_few_steps():
    model = fresh().float()
    u, target = field(model, 4), torch.randn(4, 16, 16, 2)
    before = torch.stack([T for _, _, T in mappings(model, u)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        (model(u) - target).square().mean().backward()
        optimizer.step()
    after = torch.stack([T for _, _, T in mappings(model, u)])                          # (sub-layers, B, S, S)
    assert (after - before).abs().amax((1, 2, 3)).min() > 1e-3, 'T of a sub-layer did not move'
    assert (after[:, 0] - after[:, 1]).abs().amax((1, 2)).min() > 1e-4, 'T does not depend on the input'


def test_the_forward_gain_of_every_product_of_Ts_is_1():
    model = build(alpha=1.0, depth=4, dtype=torch.float32)
    Ts = [T.double() for _, _, T in mappings(model, field(model, 3))]
    for start in range(len(Ts)):
        product = torch.eye(4, dtype=torch.float64).expand(3, 4, 4)
        for T in Ts[start:]:
            product = T @ product
        assert (product.abs().sum(-1) - 1).abs().max() < 1e-5
        assert product.sum(-2).max() < 2


def test_a_is_on_the_simplex_and_d_within_0_and_2():
    model = build(alpha=3.0)
    for a, d, T in mappings(model, field(model, 3)):
        torch.testing.assert_close(a.sum(1), torch.ones(3, dtype=a.dtype), rtol=0, atol=1e-12)
        assert a.min() > 0 and d.min() > 0 and d.max() < 2 and T.min() >= 0
        assert d.std() > 1e-3


@pytest.mark.parametrize('letter, value', [('a', 0.25), ('d', 1.0), ('T', None)])
def test_an_ablated_mapping_is_uniform_ones_or_identity(letter, value):
    model = build(alpha=1.0, ablate=letter)
    for found in mappings(model, field(model)):
        mapping = found['adT'.index(letter)]
        expected = torch.eye(4).double().expand_as(mapping) if value is None else torch.full_like(mapping, value)
        assert torch.equal(mapping, expected)
        others = [m for name, m in zip('adT', found) if name != letter]
        assert all((m[0] - m[1]).abs().max() > 1e-4 for m in others)


def test_samples_of_a_batch_do_not_see_one_another():
    model = build(alpha=1.0)
    u = field(model, 3)
    changed = u.clone()
    changed[1] = torch.randn_like(changed[1])
    out, other = model(u), model(changed)
    assert torch.equal(out[[0, 2]], other[[0, 2]]) and not torch.allclose(out[1], other[1])


# ------------------------------------------------------------------------------------------------ the mixer

def test_the_mixer_keeps_few_modes_of_both_signs():
    """A reflection along the full axis exchanges the signs of its frequencies and must pass through unharmed."""
    module = aotpot.Mixer(configs.model('tiny', **{**SMALL, 'modes': 3}), skip=False).double()
    module.b1.data.zero_(), module.b2.data.zero_()
    spectrum = torch.fft.rfft2(torch.randn(2, 16, 20, 16, dtype=torch.float64), dim=(1, 2))
    spectrum[:, 3], spectrum[:, -3] = 0, 0              # modes -3 ... 2 are kept; without -3 the set is symmetric
    x = torch.fft.irfft2(spectrum, s=(16, 20), dim=(1, 2))
    flip = lambda z: z.flip(1).roll(1, 1)
    y = module(x)
    assert torch.fft.rfft2(y, dim=(1, 2))[:, [-1, -2]].abs().amax((0, 2, 3)).min() > 1e-6
    torch.testing.assert_close(module(flip(x)), flip(y), rtol=0, atol=1e-12)


@pytest.mark.parametrize('modes', [2, 3, 32])
@pytest.mark.parametrize('grid', [(9, 8), (8, 9), (6, 4, 10), (5, 7, 3), (1, 1)], ids=str)
def test_the_mixer_is_the_complex_one_on_any_grid_in_2d_and_3d(grid, modes):
    module = aotpot.Mixer(configs.model('tiny', **{**SMALL, 'modes': modes}), skip=True).double()
    for parameter in module.parameters():
        parameter.data.normal_()
    x = torch.randn(2, *grid, 16, dtype=torch.float64)
    torch.testing.assert_close(module(x), mixer(module, x), rtol=1e-10, atol=1e-10)


def test_both_halves_of_the_complex_weights_get_gradients_and_no_parameter_is_complex():
    model = build()
    model(field(model)).square().sum().backward()
    assert not any(parameter.is_complex() for parameter in model.parameters())
    for block in model.blocks:
        for name in ('w1', 'w2', 'b1'):
            assert getattr(block.mixer, name).grad[1].abs().max() > 0, name


def test_the_mixer_takes_bf16_and_keeps_its_transforms_in_fp32():
    module = aotpot.Mixer(configs.model('tiny', **SMALL), skip=True)
    x = torch.randn(2, 8, 8, 16)
    expected = module(x)
    out = module.bfloat16()(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() < 1e-2 * expected.norm()


def test_the_coefficients_of_the_streams_are_the_same_inside_autocast():
    y = torch.randn(5, 3, 4, 4, 8)
    a, d = torch.rand(3, 4), torch.rand(3, 4)
    T = torch.softmax(torch.randn(3, 4, 4), -1)
    results = []
    for enabled in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
            streams = aotpot.Streams(y[0], 4, 5)
            for output in y[1:]:
                streams.combine(a)
                streams.update(T, d, output)
            results.append((streams.c, streams.mean(), streams.combine(a)))
    for fp32, inside in zip(*results):
        assert inside.dtype == torch.float32 and torch.equal(fp32, inside)


@pytest.mark.parametrize('residual', ['aot', 'plain'])
def test_bf16_autocast_is_close_to_fp32_and_gradients_are_finite(residual):
    model = build(dtype=torch.float32, residual=residual)
    u = field(model, 4)
    expected = model(u)
    with torch.autocast('cpu', torch.bfloat16):
        out = model(u)
    out.float().square().sum().backward()
    assert (out.float() - expected).norm() < 3e-2 * expected.norm()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())


# ------------------------------------------------------------------------------------------------ grids, dimensions

@pytest.mark.parametrize('grid', [(64, 128), (96, 192)])
def test_non_square_grids_run_and_a_transposed_grid_gives_another_field(grid):
    model = build(patch=8, dtype=torch.float32)
    u = field(model, grid=grid)
    out = model(u)
    assert out.shape == (2, *grid, 2) and out.isfinite().all()
    assert not torch.allclose(model(u.transpose(2, 3)).transpose(1, 2), out, atol=1e-3)


def test_patches_and_unpatch_are_inverse_and_hold_the_right_points():
    u = torch.arange(2 * 1 * 8 * 12 * 3).view(2, 1, 8, 12, 3)
    tokens = aotpot.patches(u, 4)                                                       # (B, h, w, T, P*P*C)
    assert torch.equal(tokens[1, 0, 2, 0].view(4, 4, 3), u[1, 0, 0:4, 8:12])
    assert torch.equal(aotpot.unpatch(tokens[:, :, :, 0].unflatten(-1, (16, 3)), 4), u[:, 0])
    u = torch.randn(2, 1, 4, 8, 12, 3)
    assert torch.equal(aotpot.unpatch(aotpot.patches(u, 4)[..., 0, :].unflatten(-1, (64, 3)), 4), u[:, 0])


def test_blocks_of_a_2d_model_load_into_a_3d_one_and_mix_a_constant_axis_alike():
    flat, solid = build(alpha=0.5), build(alpha=0.5, dims=3)
    solid.blocks.load_state_dict(flat.blocks.state_dict())
    two, three = flat.blocks[0].mixer, solid.blocks[0].mixer
    for module in (two, three):
        module.b1.data.zero_(), module.b2.data.zero_()
    x = torch.randn(2, 4, 4, 16, dtype=torch.float64)
    # the orthonormal transform of a constant axis of 4 points doubles the spectrum, which is what the MLP sees
    y = three(x[:, None].expand(-1, 4, -1, -1, -1) / 2) * 2
    torch.testing.assert_close(y, two(x)[:, None].expand_as(y), rtol=0, atol=1e-10)
    assert solid(field(solid)).shape == (2, 16, 16, 16, 2)


@pytest.mark.parametrize('size, millions', [('tiny', 7.4), ('small', 29.9), ('medium', 122.4), ('large', 511)])
def test_parameter_counts(size, millions):
    with torch.device('meta'):
        model = aotpot.AOTPOT(configs.model(size))
    assert abs(aotpot.parameters(model) / millions / 1e6 - 1) < 0.005


def test_initial_distributions():
    model = aotpot.AOTPOT(configs.model('tiny', depth=1))
    embed, block = model.embed, model.blocks[0]
    assert abs(embed.time_weight.std() * 10 * 512 ** 0.5 - 1) < 0.01
    assert abs(block.aot1.phi.std() * (4 * 512) ** 0.5 - 1) < 0.02
    scale = (512 / 4) ** -2
    w1 = block.mixer.w1
    assert 0 <= w1.min() and w1.max() <= scale and abs(w1.mean() / scale - 0.5) < 0.01
    assert embed.gamma[0] == 2 ** -10 and embed.gamma[-1] == 2 ** 10
    assert torch.equal(block.aot1.bias['T'], torch.eye(4).flatten()) and block.aot1.alpha['T'] == torch.tensor(0.01)
    assert embed.patch_weight.abs().max() <= (7 * 64) ** -0.5 and abs(embed.position.std() - 0.02) < 0.001


# ------------------------------------------------------------------------------------------------ refusals, files

@pytest.mark.parametrize('shape, words', [
    ((1, 4, 16, 16, 2), '3, H, W, 2'), ((1, 3, 16, 16, 5), '3, H, W, 2'), ((3, 16, 16, 2), '3, H, W, 2'),
    ((1, 3, 18, 16, 2), '18x16')])
def test_an_input_of_the_wrong_shape_is_refused_with_the_right_one(shape, words):
    with pytest.raises(configs.InputError, match=words):
        fresh()(torch.zeros(shape))


def test_a_checkpoint_gives_the_network_back_and_other_files_are_refused(tmp_path):
    model = build(dtype=torch.float32)
    path = tmp_path / 'a.pt'
    torch.save({'model': model.state_dict(), 'step': 3,
                'config': {'model': dataclasses.asdict(model.config)}}, path)
    u = field(model)
    assert torch.equal(aotpot.load(path)(u), model(u))
    (tmp_path / 'html.pt').write_text('<html>')
    torch.save({'weights': torch.zeros(3)}, tmp_path / 'other.pt')
    torch.save({'model': {}, 'config': {}, 'step': 0, 'code': print}, tmp_path / 'code.pt')
    for name in ('none.pt', 'html.pt', 'other.pt', 'code.pt'):
        with pytest.raises(configs.InputError, match=name):
            aotpot.load(tmp_path / name)


def test_math_of_the_initial_T():
    """exp(I) projects to 0.475 on the diagonal, not to the identity."""
    T = mappings(fresh(alpha=0.0), field(fresh(), 1))[0][2]
    e = math.e
    assert abs(T[0, 0, 0] - e / (e + 3)) < 1e-12


# ------------------------------------------------------------------------------------------------ DPOT's checkpoints

def dpot_state(C=2, T=3, P=4, grid=4, D=16, hidden=24, depth=2, K=2, O=6, gamma=True):
    """Random weights under the names and in the shapes of DPOT's own network."""
    E, random = C * P + 3, torch.randn
    state = {'patch_embed.proj.0.weight': random(E, C + 3, P, P), 'patch_embed.proj.0.bias': random(E),
             'patch_embed.proj.2.weight': random(D, E, 1, 1), 'patch_embed.proj.2.bias': random(D),
             'pos_embed': random(1, D, grid, grid), 'time_agg_layer.w': random(T, D, D) / D,
             'cls_head.0.weight': random(D, D), 'cls_head.0.bias': random(D),
             'out_layer.0.weight': random(D, O, P, P), 'out_layer.0.bias': random(O),
             'out_layer.2.weight': random(O, O, 1, 1), 'out_layer.2.bias': random(O),
             'out_layer.4.weight': random(C, O, 1, 1), 'out_layer.4.bias': random(C)}
    if gamma:
        state['time_agg_layer.gamma'] = 2 ** random(1, D)
    for i in range(depth):
        for name, shape in (('filter.w1', (2, K, D // K, D // K)), ('filter.w2', (2, K, D // K, D // K)),
                            ('filter.b1', (2, K, D // K)), ('filter.b2', (2, K, D // K)),
                            ('norm1.weight', (D,)), ('norm1.bias', (D,)), ('norm2.weight', (D,)), ('norm2.bias', (D,)),
                            ('mlp.0.weight', (hidden, D, 1, 1)), ('mlp.0.bias', (hidden,)),
                            ('mlp.2.weight', (D, hidden, 1, 1)), ('mlp.2.bias', (D,))):
            state[f'blocks.{i}.{name}'] = random(shape) / D ** 0.5
    return state


def dpot(state, u, K=2, depth=2):
    """DPOT as its paper and public weights have it, on u (B, X, Y, T, C), one frame and one mode after another."""
    B, X, Y, T, C = u.shape
    z = 0
    for t in range(T):
        time = t / (T - 1)
        x, y = (torch.linspace(0, 1, n, dtype=u.dtype) for n in (X, Y))
        x, y = x[:, None].expand(B, X, Y), y.expand(B, X, Y)
        image = torch.stack([*u[:, :, :, t].unbind(-1), x, y, torch.full_like(x, time)], 1)
        P = state['patch_embed.proj.0.weight'].shape[-1]
        image = F.conv2d(image, state['patch_embed.proj.0.weight'], state['patch_embed.proj.0.bias'], stride=P)
        token = F.conv2d(F.gelu(image), state['patch_embed.proj.2.weight'], state['patch_embed.proj.2.bias'])
        token = (token + state['pos_embed']).permute(0, 2, 3, 1)
        if 'time_agg_layer.gamma' in state:
            token = token * torch.cos(time * state['time_agg_layer.gamma'][0])
        z = z + token @ state['time_agg_layer.w'][t]
    z = z.permute(0, 3, 1, 2)
    for i in range(depth):
        w = {name.removeprefix(f'blocks.{i}.'): value for name, value in state.items() if f'blocks.{i}.' in name}
        x = F.group_norm(z, 8, w['norm1.weight'], w['norm1.bias'])
        full = torch.fft.rfft2(x, norm='ortho').unflatten(1, (K, -1))                   # (B, K, D/K, h, w/2+1)
        for layer in '12':
            weight, bias = torch.complex(*w[f'filter.w{layer}']), torch.complex(*w[f'filter.b{layer}'])
            full = torch.einsum('bkixy,kio->bkoxy', full, weight) + bias[None, :, :, None, None]
            if layer == '1':
                full = torch.complex(F.gelu(full.real), F.gelu(full.imag))
        x = x + torch.fft.irfft2(full.flatten(1, 2), s=x.shape[2:], norm='ortho')
        x = F.group_norm(x, 8, w['norm2.weight'], w['norm2.bias'])
        x = F.conv2d(F.gelu(F.conv2d(x, w['mlp.0.weight'], w['mlp.0.bias'])), w['mlp.2.weight'], w['mlp.2.bias'])
        z = z + x
    z = F.gelu(F.conv_transpose2d(z, state['out_layer.0.weight'], state['out_layer.0.bias'], stride=P))
    z = F.gelu(F.conv2d(z, state['out_layer.2.weight'], state['out_layer.2.bias']))
    return F.conv2d(z, state['out_layer.4.weight'], state['out_layer.4.bias']).permute(0, 2, 3, 1)


@pytest.mark.parametrize('form', ['with arguments', 'parallel', 'weights only', 'linear in time'])
def test_a_checkpoint_of_dpot_gives_the_outputs_of_dpot(form, tmp_path):
    state = dpot_state(gamma=form != 'linear in time')
    saved = {'args': argparse.Namespace(modes=32, act='gelu', train_paths=['swe_pdb']), 'model': state, 'optimizer': {}}
    if form == 'parallel':
        saved['model'] = {f'module.{name}': value for name, value in state.items()}
    torch.save(state if form == 'weights only' else saved, tmp_path / 'model_Ti.pth')
    model = aotpot.from_dpot(tmp_path / 'model_Ti.pth')
    assert model.config == configs.model('tiny', **SMALL, residual='plain')
    u = torch.randn(2, 3, 16, 16, 2, dtype=torch.float64)
    with torch.no_grad():
        theirs = dpot({name: value.double() for name, value in state.items()}, u.permute(0, 2, 3, 1, 4))
        ours, single = model.double()(u), model.float()(u.float())
    assert (ours - theirs).norm() < 1e-10 * theirs.norm() and (single - theirs).norm() < 1e-5 * theirs.norm()


class Unwanted:
    def __reduce__(self):
        return print, ('this ran',)


def test_checkpoints_that_are_not_dpots_network_are_refused_by_name(tmp_path, capsys):
    state, path = dpot_state(), tmp_path / 'model.pth'
    args = argparse.Namespace(act='tanh')
    for saved, words in (
            ({'model': {**state, 'blocks.0.mlp.experts.0.conv.0.weight': torch.ones(1)}}, 'MoE-POT'),
            ({'model': {**state, 'scale_feats_mu.weight': torch.ones(1)}}, '--normalize'),
            ({'model': state, 'args': args}, '--act tanh'),
            ({'model': {**state, 'blocks.0.extra': torch.ones(1)}}, 'blocks.0.extra'),
            ({'model': {name: value for name, value in state.items() if name != 'pos_embed'}}, 'pos_embed'),
            ({'model': {**state, 'out_layer.4.weight': torch.ones(3, 6, 1, 1)}}, 'looks like DPOT'),
            ({'model': state, 'args': Unwanted()}, 'print'),
            ({'model': {}, 'config': {'model': {}, 'train': {}}, 'step': 1}, 'aotpot.load')):
        torch.save(saved, path)
        with pytest.raises(configs.InputError, match=words) as refused:
            aotpot.from_dpot(path)
        assert str(path) in str(refused.value) and '\n' not in str(refused.value)
    assert 'this ran' not in capsys.readouterr().out
