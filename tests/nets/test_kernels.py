"""The Triton kernels of nets/kernels.py against the equations of aotpot.py, in Triton's interpreter, and compiled."""
import os
import subprocess
import sys
from pathlib import Path

import configs

import pytest
import torch

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


def parts_agree(S, Q, D=24, M=1500, B=3):
    """`Maps` and `Step`, outputs and all gradients, against Eqs. (9), (11) and (12) in fp64."""
    from aotpot import Mappings
    torch.manual_seed(0)
    mappings = Mappings(configs.model('tiny', **{**SMALL, 'width': D, 'streams': S})).double()
    for name, parameter in mappings.named_parameters():
        parameter.data.normal_(std=0.3)                         # alpha far from its start, and of either sign
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in (
        (B, S, Q + 1), (B, Q + 1, D), (B, Q, M), (B, M), (B, S))]

    def plain(Td, rows, x, y, a, *_):
        a_l, d_l, T_l = mappings(Td @ rows)
        new = Td @ torch.cat([x, y[:, None]], 1)                                        # Eq. (9)
        return Td @ rows, a_l, torch.cat([T_l, d_l[:, :, None]], 2), new, (a[:, None] @ new)[:, 0]

    def ours(Td, rows, x, y, a, *parameters):
        return *kernels.Maps.apply(Td, rows, 20, *parameters), *kernels.Step.apply(x, y, Td, a)
    leaves += mappings.parameters()
    expected, single = plain(*leaves), [leaf.detach().float().requires_grad_() for leaf in leaves]
    results = ours(*single)
    upstream = [torch.randn_like(out) for out in expected]
    want = torch.autograd.grad(expected, leaves, upstream)
    got = torch.autograd.grad(results, single, [u.float() for u in upstream])
    for i, (a, b) in enumerate(zip((*results, *got), (*expected, *want))):
        assert (a.double() - b).norm() <= 1e-4 * b.norm() + 1e-6, (S, Q, i)


def networks_agree(streams, dtype=torch.float32, **overrides):
    """The whole network with the kernels against the paper's form, forward and backward."""
    from aotpot import AOTPOT
    torch.manual_seed(0)
    config = configs.model('tiny', **{**SMALL, 'streams': streams, 'alpha': 0.5, **overrides})
    model, paper = fast.Fast(config), AOTPOT(config)
    for name, parameter in model.named_parameters():
        if 'mappings' in name or name == 'gate':
            parameter.data.add_(0.3 * torch.rand_like(parameter))
    paper.load_state_dict(model.state_dict())
    model.one_backward, u = True, field(model).float()
    assert kernels.usable(u, config)
    results = []
    for network in (model, paper.double()):
        fp64 = network is paper
        with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16 and not fp64):
            out = network(u.double() if fp64 else u)
        out.double().square().sum().backward()
        results.append([out.detach(), *(parameter.grad for parameter in network.parameters())])
    tolerance = 1e-3 if dtype == torch.float32 else 0.2
    total = sum(b.double().norm() ** 2 for b in results[1][1:]) ** 0.5
    for i, (a, b) in enumerate(zip(*results)):
        assert (a.double() - b).norm() <= tolerance * (b.norm() + 1e-2 * total * (i > 0)), (streams, i)


@pytest.mark.parametrize('program', [
    'for S, Q in ((1, 1), (3, 3), (4, 4), (4, 1), (5, 5)): tests.parts_agree(S, Q)',
    'for S in (1, 3, 4): tests.networks_agree(S)', 'assert tests.kernels.agree("cpu")',
    'tests.networks_agree(4, tests.torch.bfloat16); tests.networks_agree(2, dims=3, resolution=8, experts=4)'])
@pytest.mark.slow
def test_the_kernels_equal_the_equations_in_tritons_interpreter(program):
    run(f'import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_kernels as tests\n{program}',
        TRITON_INTERPRET='1')


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nets import kernels
for S, SD in ((4, 2048), (4, 6144), (8, 4096)):
    sizes = dict(iters=20, N=S, L=8192 if SD > 4096 else 4096), dict(S=S, Q=S, ROWS=S, BLOCK=kernels.BLOCK)
    for kernel, constants in zip(kernels.kernels(), (sizes[0], sizes[0], sizes[1], sizes[1])):
        types = {name: 'constexpr' if name in constants else 'fp32' if name == 'eps' else '*bf16' if name in
                 ('x_ptr', 'new_ptr', 'u_ptr', 'gnew_ptr', 'gu_ptr', 'gx_ptr') else '*fp32' if name.endswith('_ptr')
                 or name.startswith(('alpha', 'b_')) else 'i32' for name in kernel.arg_names}
        compiled = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget('cuda', 90, 32))
        assert '.target sm_90' in compiled.asm['ptx'] and compiled.asm['cubin']
        assert compiled.metadata.shared < 1024
"""


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100_without_one(tmp_path):
    run(COMPILE, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason='needs a machine where the kernels cannot run')
def test_kernels_that_do_not_run_are_not_taken_and_a_warning_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(sinkhorn, 'trusted', lambda: True)
    with pytest.warns(UserWarning, match='the kernels of nets/kernels.py are not taken .*; the streams are slower'):
        assert not kernels.trusted.__wrapped__()


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_the_kernels_equal_the_paper_on_cuda():
    model = fast.Fast(configs.model('tiny', **SMALL, alpha=0.5)).cuda()
    u = field(model).float().cuda()
    expected = model(u)
    model.one_backward = True
    torch.testing.assert_close(model(u), expected, rtol=1e-3, atol=1e-3)
