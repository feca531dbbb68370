"""The Triton kernels of nets/kernels.py against the equations of aotpot.py, in Triton's interpreter, and compiled."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import aotpot
import configs
import sinkhorn
from helpers import SMALL, field
from nets import fast, kernels

ROOT = Path(configs.__file__).parent
pytestmark = [pytest.mark.skipif(not sinkhorn.TRITON, reason='needs triton')]


def run(program, **environment):
    """Run a program in a process of its own, because the interpreter is chosen when triton is imported."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / 'tests')))
    plain = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=300,
                          env={**plain, 'PYTHONPATH': path, 'CUDA_VISIBLE_DEVICES': '', **environment})
    assert done.returncode == 0, done.stderr


def parts_agree(S, Q, D=24, N=70, B=3):
    """`Sublayer` and `Start`, outputs and all gradients, against the norm and Eqs. (9), (11) and (12) in fp64."""
    torch.manual_seed(0)
    mappings = aotpot.Mappings(configs.model('tiny', **{**SMALL, 'width': D, 'streams': S})).double()
    for parameter in mappings.parameters():
        parameter.data.normal_(std=0.3)                         # alpha far from its start, and of either sign
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in (
        (B, N, D), (B, Q, N * D), (B, Q, D), (B, S, Q + 1), (D,), (D,))]

    def plain(f, x, means, Td, w, b, *_):
        y = F.group_norm(f.mT, 8, w, b).mT
        new, m = Td @ torch.cat([x, y.reshape(B, 1, -1)], 1), Td @ torch.cat([means, y.mean(1, True)], 1)    # Eq. (9)
        a_l, d_l, T_l = mappings(m)
        _, d_1, T_1 = mappings(means[:, :1].expand(-1, S, -1))
        return ((a_l[:, None] @ new).view_as(f), new, m, torch.cat([T_l, d_l[:, :, None]], 2),
                torch.cat([T_1, d_1[:, :, None]], 2))

    def ours(f, x, means, Td, w, b, *parameters):
        return (*kernels.Sublayer.apply(f, x, means, Td, means[0, 0, :S], 1e-5, w, b, 20, *parameters),
                kernels.Start.apply(means[:, 0].contiguous(), S, 20, *parameters))
    leaves += mappings.parameters()
    expected, single = plain(*leaves), [leaf.detach().float().requires_grad_() for leaf in leaves]
    results = ours(*single)
    upstream = [torch.randn_like(out) for out in expected]
    want = torch.autograd.grad(expected, leaves, upstream)
    got = torch.autograd.grad(results, single, [u.float() for u in upstream])
    for i, (a, b) in enumerate(zip((*results, *got), (*expected, *want), strict=True)):
        assert (a.double() - b).norm() <= 1e-4 * b.norm() + 1e-6, (S, Q, i)


def networks_agree(streams, dtype=torch.float32, compiled=False, **overrides):
    """The whole network with the kernels, eager or as one graph, against the paper's form, forward and backward."""
    torch.manual_seed(0)
    config = configs.model('tiny', **{**SMALL, 'streams': streams, 'alpha': 0.5, **overrides})
    model, paper = fast.Fast(config), aotpot.AOTPOT(config)
    for name, parameter in model.named_parameters():
        if 'mappings' in name or name == 'gate':
            parameter.data.add_(0.3 * torch.rand_like(parameter))
    paper.load_state_dict(model.state_dict())
    model.one_backward, u = True, field(model).float()
    assert fast.usable(u, config)
    results = []
    for network in (model, paper.double()):
        fp64 = network is paper
        run = torch.compile(network, fullgraph=True, backend='aot_eager') if compiled and not fp64 else network
        with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16 and not fp64):
            out = run(u.double() if fp64 else u)
        out.double().square().sum().backward()
        results.append([out.detach(), *(parameter.grad for parameter in network.parameters())])
    tolerance, total = 1e-3 if dtype == torch.float32 else 0.2, sum(b.norm() ** 2 for b in results[1][1:]) ** 0.5
    for i, (a, b) in enumerate(zip(*results)):
        assert (a.double() - b).norm() <= tolerance * (b.norm() + 1e-2 * total * (i > 0)), (streams, i)


def a_small_network_agrees():
    """The comparison that stands before the first use on a GPU, and that it sees a kernel that is wrong."""
    config, run = configs.model('nano'), kernels.launch
    assert not fast.largest_difference(config, dtype=torch.float32, tolerance=1e-2)

    def wrong(name, grid, tensors, constants):
        run(name, grid, tensors, constants)
        if name == 'step_backward':
            tensors[-2].mul_(1.1)
    kernels.launch = wrong
    assert 'mappings' in fast.largest_difference(config, dtype=torch.float32, tolerance=1e-2)


def a_compiled_graph_takes_kernels_that_were_tried():
    """torch.compile asks once before it compiles, and takes the equations where the kernels have failed."""
    config, launched = configs.model('tiny', **SMALL), []
    kernels.launch = lambda *_: launched.append(1)
    for passes in (False, True):
        torch._dynamo.reset()
        fast.TRUSTED.clear()
        sinkhorn.trusted = lambda passes=passes: passes
        model = fast.Fast(config)
        with torch.no_grad():
            torch.compile(model, fullgraph=True, backend='aot_eager')(field(model).float())
        assert fast.TRUSTED == {'kernels': passes} and bool(launched) == passes


def a_batch_of_another_size_is_no_other_graph():
    config, graphs = configs.model('tiny', **SMALL), []
    kernels.launch = lambda *_: None
    model = fast.Fast(config)
    model.one_backward = True

    def backend(graph, _):
        graphs.append(graph)
        return graph
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for B in (2, 3, 5):
        compiled(field(model, B).float()).sum().backward()
    assert len(graphs) == 2, f'{len(graphs)} graphs, not one for the first size, and one for all others'


@pytest.mark.parametrize('program', [
    'for S, Q in ((1, 1), (3, 3), (4, 1)): tests.parts_agree(S, Q)',
    'tests.a_small_network_agrees()',
    'tests.parts_agree(4, 4, D=264)', 'tests.parts_agree(8, 8, N=530)',
    'for S in (1, 3, 4, 8): tests.networks_agree(S)', 'tests.networks_agree(4, compiled=True)',
    'tests.a_compiled_graph_takes_kernels_that_were_tried()', 'tests.a_batch_of_another_size_is_no_other_graph()',
    'tests.networks_agree(4, tests.torch.bfloat16); tests.networks_agree(2, dims=3, resolution=8, experts=4)'])
@pytest.mark.slow
def test_the_kernels_equal_the_equations_in_tritons_interpreter(program):
    run(f'import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_kernels as tests\n{program}',
        TRITON_INTERPRET='1')


COMPILE = """
import configs, torch
import triton
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from aotpot import AOTBlock, Norm
from nets import kernels

def note(name, grid, tensors, constants):
    launches[name, str([(x.dtype, x.shape) for x in tensors])] = tensors, constants

kernels.launch = note
for size, S in (('tiny', 4), ('large', 4), ('tiny', 8)):
    config, launches = configs.model(size, streams=S), {}
    with FakeTensorMode():
        blocks = [(AOTBlock(config), Norm(config.width), lambda u: u.float())] * 2
        x = torch.zeros(20, 16, 16, config.width, dtype=torch.bfloat16, requires_grad=True)
        kernels.sublayers(x, blocks, torch.zeros(S)).sum().backward()
    assert len(launches) == 12          # two of norm, its backward and the others, Start's as well as Sublayer's
    for (name, _), (tensors, constants) in launches.items():
        kernel, numbers = kernels.kernels()[name], {'eps': 'fp32', 'B': 'i32'}
        types = ['*bf16' if x.dtype == torch.bfloat16 else '*fp32' for x in tensors]
        given = {key: numbers.pop(key) for key in constants if key in numbers and (name, key) != ('samples', 'B')}
        constants = {key: value for key, value in constants.items() if key not in given}
        types = {**dict(zip(kernel.arg_names, types)), **given, **dict.fromkeys(constants, 'constexpr')}
        compiled = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget('cuda', 90, 32))
        assert '.target sm_90' in compiled.asm['ptx'] and compiled.asm['cubin']
        assert compiled.metadata.shared <= 4096, (size, S, name, compiled.metadata.shared)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100_without_one(tmp_path):
    run(COMPILE, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason='needs a machine where the kernels cannot run')
def test_kernels_that_do_not_run_are_not_taken_and_a_warning_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(sinkhorn, 'trusted', lambda: True)
    monkeypatch.setattr(fast, 'TRUSTED', {})
    with pytest.warns(UserWarning, match='the kernels of nets/kernels.py are not taken .*; the streams are slower'):
        assert not fast.trusted()
    assert not fast.trusted(), 'without another warning'


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_the_kernels_equal_the_paper_on_cuda():
    model = fast.Fast(configs.model('tiny', **SMALL, alpha=0.5)).cuda()
    u = field(model).float().cuda()
    expected = model(u)
    model.one_backward = True
    torch.testing.assert_close(model(u), expected, rtol=1e-3, atol=1e-3)
