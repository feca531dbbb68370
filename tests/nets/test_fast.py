"""Every rewrite of nets/fast.py against the paper's form: one model run in both forms, outputs and all gradients."""
import copy
import gc
import importlib
import sys
import weakref
from pathlib import Path

import pytest
import torch

import aotpot
import configs
import nets.build
from helpers import build, field
from nets import experts, fast


def in_both_forms(**overrides):
    """One network in both forms, with the same weights: (fast, paper)."""
    model = build('fast', **overrides)
    paper = aotpot.AOTPOT(model.config, experts.Experts).to(next(model.parameters()).dtype)
    paper.load_state_dict(model.state_dict())
    return model, paper


def results(model, u):
    """The output for u and the gradients of the sum of its squares, by name."""
    u = u.clone().requires_grad_()
    out = model(u)
    gradients = torch.autograd.grad(out.square().sum(), [u, *model.parameters()])
    return dict(zip(['out', 'u', *dict(model.named_parameters())], [out.detach(), *gradients]))


def assert_equal(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for name in expected:
        difference = (found[name] - expected[name]).abs().max()
        assert difference <= tolerance * max(1, expected[name].abs().max()), name


SWITCHES = [
    dict(), dict(alpha=0.5, streams=2, sinkhorn_iters=3, depth=9), dict(ablate='adT'),
    dict(alpha=0.5, streams=16, depth=1), dict(alpha=0.5, depth=5, modes=1, overlap=True),
    dict(ablate='a', alpha=0.5, frames=1), dict(ablate='d', alpha=0.5, norm='pre', streams=1),
    dict(ablate='T', alpha=0.5, inner_skip=True), dict(residual='plain', modes=1, norm='sandwich'),
    dict(t_init=6.0, streams=3, alpha=0.5, resolution=(8, 24)),
    dict(dims=3, resolution=(8, 12, 16), alpha=0.5),
    dict(dims=3, resolution=8, residual='plain', overlap=True),
    dict(experts=5, alpha=0.5, normalize=True, channel_maps='learned'),
    dict(experts=5, shared=1, top_k=1, residual='plain'),
    dict(experts=6, top_k=2, dims=3, resolution=8, alpha=0.5),
    dict(normalize=True, channel_maps='learned', residual='plain', patch=2)]


@pytest.mark.parametrize('overrides', SWITCHES, ids=str)
def test_both_forms_agree_for_every_switch_on_the_trained_grid_and_on_another(overrides):
    model, paper = in_both_forms(**overrides)
    for grid in (model.config.resolution, (4, 12, 20)[:model.config.dims]):
        u = field(model, grid=grid)
        expected = results(paper, u)
        assert_equal(results(model, u), expected)
        with torch.no_grad():
            assert_equal({'out': model(u)}, {'out': expected['out']})
    model.compiled = True
    assert_equal(results(model, u), expected)


@pytest.mark.parametrize('overrides', [
    dict(), dict(residual='plain'), dict(experts=4), dict(channel_maps='learned', normalize=True)], ids=str)
def test_both_forms_agree_inside_autocast_and_in_16_bits(overrides):
    """Four experts are all taken, so that rounding cannot change the choice; fp16 lacks their gradients' range."""
    model, paper = in_both_forms(dtype=torch.float32, **overrides)
    compiled = copy.deepcopy(model)
    compiled.compiled = True
    u = field(model, 4)
    exact = paper(u)
    for dtype in (torch.float32, torch.bfloat16, *([] if 'experts' in overrides else [torch.float16])):
        for form in (model, compiled, paper):
            form.to(dtype).zero_grad()
            with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.float32):
                out = form(u.to(dtype))
            out.float().square().sum().backward()
            assert out.dtype == dtype and all(p.grad.isfinite().all() and p.grad.dtype == dtype
                                              for p in form.parameters())
            assert dtype != torch.float32 or (out.bfloat16() != out).any(), 'rounded at the end'
            assert (out.float() - exact).norm() < 4e-2 * exact.norm(), 'each rounds in its own order'


def test_autocast_rounds_neither_the_input_nor_the_prediction():
    for overrides in (dict(normalize=True, channel_maps='learned'), dict(residual='plain', overlap=True)):
        for form in in_both_forms(dtype=torch.float32, **overrides):
            tokens, hidden = [], []
            form.layers[0].norm1.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0]))
            form.readout.hidden.register_forward_hook(lambda _, inputs, x: hidden.append((inputs[0], x)))
            u = field(form, 4)
            form(u)
            with torch.autocast('cpu', torch.bfloat16):
                form(u)
            torch.testing.assert_close(tokens[1], tokens[0], rtol=1e-5, atol=1e-6)
            x, out = hidden[1]
            torch.testing.assert_close(out, form.readout.hidden(x.float()), rtol=1e-5, atol=1e-6)
    mappings, mean = build(dtype=torch.float32, alpha=1.0).layers[0].aot1.mappings, torch.randn(2, 4, 16)
    with torch.autocast('cpu', torch.bfloat16):
        found = mappings(mean)
    assert all(map(torch.equal, found, mappings(mean))), 'nor the logits of a, d and T'


# ------------------------------------------------------------------------------------------------ an edited aotpot.py

POST = 'self.post1(self.mixer(self.norm1(u)))'
MODES = 'z.flatten(-2) * self.mode_mask(grid)'
EDITS = {       # what differs: (a line of aotpot.py, another one)
    'dropout': (POST, f'F.dropout({POST}, 0.1, self.training)'),
    'times the aspect ratio': (MODES, MODES.replace('*', '* grid[0] / grid[1] *')),
    'a gradient': ('self.mappings(at_least_fp32(x)', 'self.mappings(at_least_fp32(x.detach())')}


def imported(text, folder, monkeypatch):
    """nets.fast beside an aotpot.py of this text."""
    (folder / 'aotpot.py').write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(nets, 'fast', fast)                         # the import replaces it until the end of the test
    for name in ('aotpot', 'nets.fast'):
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module('nets.fast')


@pytest.mark.parametrize('edit', EDITS)
def test_an_edit_of_the_paper_is_seen_and_taken(edit, tmp_path, monkeypatch, capsys):
    text, (old, new) = Path(aotpot.__file__).read_text(), EDITS[edit]
    assert text.count(old) == 1
    edited = imported(text.replace(old, new), tmp_path, monkeypatch)
    monkeypatch.setattr(nets.build, 'fast', edited)
    assert type(nets.build.build(configs.model('nano'))) is aotpot.AOTPOT
    line = capsys.readouterr().err
    assert line.startswith('warning: nets/fast.py does not compute what aotpot.py does')
    assert ' apart' in line and line.endswith(': aotpot.py is taken, which is slower\n')


def test_the_two_forms_agree_with_every_switch_of_a_preset():
    for size in ('nano', 'tiny', 'moe-tiny'):
        assert fast.disagreement(configs.model(size)) == ''


# ------------------------------------------------------------------------------------------------ compiled

@pytest.mark.slow
@pytest.mark.parametrize('overrides', [
    dict(alpha=0.5, sinkhorn_iters=2), dict(residual='plain', overlap=True),
    dict(sinkhorn_iters=2, dims=3, resolution=8, experts=4, normalize=True)], ids=str)
def test_the_compiled_network_is_one_graph_and_equals_the_paper(overrides):
    """Without a C++ compiler: 'aot_eager' computes the graphs of both passes as they are."""
    torch.compiler.reset()
    model, paper = in_both_forms(depth=1, **overrides)
    model.compile(fullgraph=True, backend='aot_eager')
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            u = field(model)
            expected = results(paper, u)
            assert_equal(results(model, u), expected)
    assert_equal(dict(model.named_buffers()), dict(paper.named_buffers()))          # the statistics of a router
    with torch.no_grad():
        assert_equal({'out': model(u)}, {'out': expected['out']})


# ------------------------------------------------------------------------------------------------ one backward pass

def gradients(out, model, part='', **options):
    """{name: gradient} of those parameters whose names contain `part`."""
    chosen = {name: parameter for name, parameter in model.named_parameters() if part in name}
    return dict(zip(chosen, torch.autograd.grad(out.square().sum(), [*chosen.values()], **options)))


def test_gradients_of_interleaved_passes_and_of_some_parameters_only():
    """The bank in which gradients replace outputs belongs to one forward pass, and is filled from its end."""
    model, paper = in_both_forms(alpha=0.5)
    fields = field(model), field(model, 3)
    expected = [gradients(paper(u), paper) for u in fields]
    outs = [model(u) for u in fields]
    with torch.no_grad():
        model(fields[0])
    for out, of_paper in zip(outs, expected):
        assert_equal(gradients(out, model), of_paper)
    for part in ('layers.1.', 'readout', 'embed', 'layers.0.aot2'):
        found = gradients(model(fields[0]), model, part)
        assert_equal(found, {name: expected[0][name] for name in found})


def test_a_second_backward_pass_second_derivatives_and_transforms_are_refused():
    model = build()
    out = model(field(model))
    gradients(out, model, 'readout.project', retain_graph=True)     # no stream is touched
    gradients(out, model, retain_graph=True)
    with pytest.raises(RuntimeError, match='backward once'):
        gradients(out, model, retain_graph=True)
    found = gradients(model(field(model)), model, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        sum(gradient.sum() for gradient in found.values()).backward()
    with pytest.raises(RuntimeError, match='functorch'):
        torch.func.grad(lambda u: model(u).sum())(field(model))


def test_the_bank_is_freed_with_the_graph(monkeypatch):
    banks, combine = [], fast.Combine.apply
    monkeypatch.setattr(fast.Combine, 'apply', lambda *args: banks.append(weakref.ref(args[0])) or combine(*args))
    model = build()
    gc.disable()
    try:
        model(field(model)).square().sum().backward()
        assert banks[0]() is None, 'a cycle keeps the outputs of a finished step'
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('mode', ['eager', 'default', 'reduce-overhead'])
def test_the_network_on_cuda_equals_that_on_a_cpu_eager_compiled_and_as_a_cuda_graph(mode):
    model = build(dtype=torch.float32, alpha=0.5)
    u = field(model)
    expected = results(model, u)
    model.cuda()
    if mode != 'eager':
        model.compile(mode=mode, fullgraph=True)
    for _ in range(3):                                              # a graph is recorded at the second, replayed then
        found = {name: value.cpu() for name, value in results(model, u.cuda()).items()}
    assert_equal(found, expected, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize('gradients', [False, True])
def test_a_network_is_exported_with_and_without_gradients_and_goes_on_as_before(gradients, monkeypatch):
    monkeypatch.setattr(fast, 'MATRICES', {})
    model, paper = in_both_forms()
    u = field(model)
    with torch.set_grad_enabled(gradients):
        for network in (model, paper):
            exported = torch.export.export(network, (u,)).module()
            torch.testing.assert_close(exported(u), paper(u))
            torch.testing.assert_close(network(u), paper(u))
