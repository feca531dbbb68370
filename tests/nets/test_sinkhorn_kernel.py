"""The Triton kernel: equal to the loop of sinkhorn.py, forward and backward."""
import itertools
import os
import subprocess
import sys

import pytest
import torch

from conftest import ROOT
from nets import sinkhorn_kernel as module
from test_sinkhorn import INF, both, loop


def compare(shape, iters, std, zeros=0., layout=lambda z: z):
    """Compare the kernel in float32 with the loop in float64, values and gradients.

    zeros: the share of -inf off the diagonal. layout: a function that moves or rearranges the input tensors.
    """
    n = shape[-1]
    z = std * torch.randn(shape)
    z[(torch.rand(shape) < zeros) & ~torch.eye(n, dtype=torch.bool)] = -INF
    z, upstream = layout(z), layout(torch.randn(shape))
    assert module.takes_kernel(z, iters) or not len(z)
    want, want_gradient = both(z.double(), upstream.double(), iters, loop)
    got, gradient = both(z, upstream, iters)
    error = (got - want).abs().max() if len(z) else 0
    assert error <= 1e-6, (error, shape, iters, std)
    error = (gradient - want_gradient).norm()
    # a gradient that cancels has the rounding errors of its terms, here a tenth of the upstream's
    assert error <= 1e-6 * max(want_gradient.norm(), 0.1 * upstream.norm()), (error, shape, iters)


KERNEL = """
import math, pytest, torch, test_sinkhorn_kernel as tests
from test_sinkhorn import both, derivatives
from sinkhorn import loop, sinkhorn
torch.manual_seed(0)
for shape in ((7, 1, 1), (1, 2, 2), (7, 3, 3), (5, 5, 5), (1, 16, 16), (0, 4, 4)):
    tests.compare(shape, 2, 4)
tests.compare((100, 2, 2), 1, 1)
tests.compare((3, 3, 4, 4), 20, 1)
tests.compare((5, 4, 4), 5, 1, zeros=0.4)
tests.compare((4, 4, 4), 1, 1, layout=lambda z: z.transpose(0, -1).contiguous().transpose(0, -1))
derivatives(torch.float32)
z = torch.randn(3, 4, 4)
z[1, 2, 3] = math.nan
p = sinkhorn(z, 2)
assert p[1].isnan().all() and p[::2].isfinite().all()
z, upstream = torch.randn(5, 4, 4).bfloat16().requires_grad_(), torch.randn(5, 4, 4).bfloat16()
want = tuple(x.bfloat16() for x in both(z.float(), upstream.float(), 2, loop))
for form in (sinkhorn, torch.compile(sinkhorn, fullgraph=True, backend='aot_eager')):
    torch.testing.assert_close(both(z, upstream, 2, form), want)
"""


@pytest.mark.skipif(not module.TRITON, reason='needs triton')
@pytest.mark.slow
def test_kernel_equals_the_loop_in_tritons_interpreter():
    """In a process of its own, because the interpreter is chosen when triton is imported."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / 'tests'), str(ROOT / 'tests/nets')))
    run = subprocess.run([sys.executable, '-c', KERNEL], capture_output=True, text=True, timeout=300,
                         env={**os.environ, 'TRITON_INTERPRET': '1', 'PYTHONPATH': paths, 'CUDA_VISIBLE_DEVICES': ''})
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not torch.cuda.is_available() or not module.TRITON, reason='needs a CUDA device and triton')
@pytest.mark.parametrize('n', [1, 2, 3, 4, 5, 16])
def test_kernel_equals_the_loop_on_cuda(n):
    for B, iters, std in itertools.product((1, 7, 1000), (1, 5, 20), (1, 4)):
        compare((B, n, n), iters, std, layout=lambda z: z.cuda())


@pytest.mark.skipif(torch.cuda.is_available(), reason='needs a machine where the kernel cannot run')
def test_a_kernel_that_does_not_run_is_not_taken_and_a_warning_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(module, 'TRITON', True)
    monkeypatch.setattr(module, 'TRUSTED', [])
    with pytest.warns(UserWarning, match='sinkhorn_kernel.py is not taken .*; the loop is slower'):
        assert not module.trusted()
    assert not module.trusted(), 'without another warning'
