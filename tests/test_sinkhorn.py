"""sinkhorn.py: agreement with the reference, properties, exact small cases, errors."""
import doctest
import itertools
import math
import re
from pathlib import Path

import pytest
import torch

import sinkhorn as module
from sinkhorn import loop, sinkhorn

INF = math.inf


def randn(*shape, std=1.):
    return std * torch.randn(*shape, dtype=torch.float64)


def row_error(p):
    return (p.double().sum(-1) - 1).abs().max().item()


def reference(z, iters=20):
    """The rounds with plain exponentials, in float64: columns, then rows."""
    p = z.double().exp()
    for _ in range(iters):
        p = p / p.sum(-2, keepdim=True)
        p = p / p.sum(-1, keepdim=True)
    return p


def both(z, upstream, iters, form=sinkhorn):
    """(values, gradient) of one form, whose output has the upstream gradient `upstream`."""
    z = z.detach().requires_grad_()
    p = form(z, iters)
    return p.detach(), torch.autograd.grad(p, z, upstream)[0]


@pytest.mark.parametrize('std', [1, 8])
@pytest.mark.parametrize('iters', [1, 2, 20])
def test_values_and_gradients_are_those_of_the_reference(std, iters):
    """The upstream gradient is random: with all ones every backward pass would return 0."""
    z, upstream = randn(16, 4, 4, std=std), randn(16, 4, 4)
    assert torch.equal(sinkhorn(z), sinkhorn(z, 20))                    # the same call
    for dtype, worst, close in ((torch.float64, 1e-9, dict(rtol=1e-11, atol=1e-14)),
                                (torch.float32, 1e-3, dict(rtol=0, atol=2e-6))):
        z = z.to(dtype)
        p, gradient = both(z, upstream.to(dtype), iters)
        want, want_gradient = both(z.double(), upstream, iters, reference)
        torch.testing.assert_close(p.double(), want, **close)
        error = (gradient - want_gradient).norm(dim=(1, 2)) / want_gradient.norm(dim=(1, 2))
        assert error.max() < worst, error


@pytest.mark.parametrize('shape', [(4, 4), (2, 3, 4, 4), (2, 0, 3, 3), (257, 2, 2), (20, 16, 16)])
def test_any_batch_shape_equals_the_rounds_with_plain_exponentials(shape):
    z = randn(*shape)
    for iters in 0, 20:
        torch.testing.assert_close(sinkhorn(z, iters), reference(z, iters), rtol=1e-11, atol=1e-14)


def derivatives(dtype):
    """Compare second derivatives and the transforms of torch.func with differences."""
    z, v = torch.randn(2, 3, 4, 4).double().unbind()
    upstream = torch.randn(3, 4, 4).double()
    f = lambda z, form=sinkhorn: (upstream.to(z.dtype) * form(z, 3)).square().sum()
    g = torch.func.grad(lambda z: f(z, loop))
    second = (g(z + 1e-5 * v) - g(z - 1e-5 * v)) / 2e-5
    w = z.to(dtype).requires_grad_()
    first, = torch.autograd.grad(f(w), w, create_graph=True)
    found, = torch.autograd.grad((first * v.to(dtype)).sum(), w)
    torch.testing.assert_close(found.double(), second, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first.detach().double(), g(z), rtol=1e-4, atol=1e-5)
    slope = (f(z + 1e-5 * v) - f(z - 1e-5 * v)) / 2e-5
    z, v = z.to(dtype), v.to(dtype)
    found = torch.func.jvp(f, (z,), (v,))[1].double()
    torch.testing.assert_close(found, slope, rtol=1e-5, atol=1e-6)
    each = torch.func.vmap(torch.func.grad(lambda z: sinkhorn(z, 3)[0, 0]))(z)
    w = z.clone().requires_grad_()
    torch.testing.assert_close(each, torch.autograd.grad(sinkhorn(w, 3)[:, 0, 0].sum(), w)[0])


def test_derivatives_of_every_kind():
    derivatives(torch.float64)


@pytest.mark.parametrize('n', [1, 2, 4, 16])
def test_rows_sum_to_one_and_gradients_are_finite_after_any_number_of_rounds(n):
    """Logarithms that are rounded at 1e4 would be off by 1e-3, and exponentials underflow there."""
    for std, iters in itertools.product((0.1, 1, 8, 1e2, 1e4), (1, 2, 20)):
        z = std * torch.randn(64, n, n)
        p, gradient = both(z, torch.randn_like(z), iters)
        assert p.min() >= 0 and row_error(p) < 1e-6, (std, iters, row_error(p))
        assert gradient.isfinite().all() and (n == 1 or gradient.abs().max() > 0)


def test_constant_on_a_column_of_logits_changes_nothing():
    z = randn(64, 4, 4, std=2)
    for constant, iters in itertools.product((-200., 1., 200.), (1, 20)):
        shift = constant * torch.eye(4, dtype=z.dtype)[1]       # adds to column 1
        assert (sinkhorn(z + shift, iters) - sinkhorn(z, iters)).abs().max() < 1e-12
        single = sinkhorn((z + shift).float(), iters) - sinkhorn(z.float(), iters)
        assert single.abs().max() < 1e-5, (constant, iters, single.abs().max())


@pytest.mark.parametrize('dtype, of_rows', [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_low_precision_input_gives_the_fp32_result_and_gradient_rounded(dtype, of_rows):
    z, upstream = ((2 * torch.randn(64, 4, 4)).to(dtype) for _ in range(2))
    for got, want in zip(both(z, upstream, 20), both(z.float(), upstream.float(), 20)):
        torch.testing.assert_close(got, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)
        assert (got != want.to(dtype)).float().mean() < 0.01, 'ties alone are rounded otherwise'
    assert of_rows / 4 < row_error(sinkhorn(torch.randn(1000, 4, 4).to(dtype))) <= of_rows


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    z = randn(16, 4, 4, std=2).to(dtype)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        p = sinkhorn(z)
    assert p.dtype == dtype
    torch.testing.assert_close(p, sinkhorn(z), rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_minus_infinity_is_a_structural_zero_with_finite_gradients():
    z = randn(32, 4, 4, std=2)
    zero = ~torch.eye(4, dtype=torch.bool) & (torch.rand(32, 4, 4) < 0.4)  # no zero is there
    z = z.masked_fill(zero, -INF)
    p, gradient = both(z, randn(32, 4, 4), 20)
    torch.testing.assert_close(p, reference(z))
    assert (p[zero] == 0).all() and row_error(p) < 1e-12
    assert gradient.isfinite().all() and not gradient[zero].any()
    assert gradient[~zero].abs().max() > 1e-3


@pytest.mark.parametrize('where, value', [
    ((1,), -INF), ((slice(None), 1), -INF), ((1, 2), INF), ((2, 3), math.nan)])
def test_what_has_no_such_matrix_gives_nan_in_its_matrix_alone(where, value):
    z = torch.randn(3, 4, 4)
    z[(1, *where)] = value
    p = sinkhorn(z)
    assert p[1].isnan().all() and p[::2].isfinite().all()
    torch.testing.assert_close(p[::2], sinkhorn(z[::2]))


@pytest.mark.parametrize('logits, options, error, message', [
    (torch.zeros(2, 3, 4), {}, ValueError, 'logits have shape (2, 3, 4); expected square matrices'),
    (torch.eye(4).long(), {}, TypeError, 'logits are torch.int64; expected a floating-point'),
    ([[1., 2.], [3., 4.]], {}, TypeError, 'logits are list; expected a floating-point'),
    *((torch.eye(4), {'iters': n}, ValueError, f'iters is {n}; expected at least 0')
      for n in (-1, 2.5, math.nan))])
def test_an_error_says_what_was_given_and_what_is_expected(logits, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        sinkhorn(logits, **options)


def test_the_column_sums_are_off_by_what_the_table_in_the_file_says():
    rows = re.findall(r'^# +(\d+) \|(.*)$', Path(module.__file__).read_text(), re.MULTILINE)
    assert [int(iters) for iters, _ in rows] == [5, 10, 20, 50]
    for iters, cells in rows:
        for sigma, cell in zip((0.1, 1, 2, 4), cells.split('|'), strict=True):
            logits = sigma * torch.randn(4096, 4, 4, generator=torch.Generator().manual_seed(0))
            error = (sinkhorn(logits, int(iters)).double().sum(-2) - 1).abs().amax(-1)
            for said, found in zip(cell.split(), (error.median(), error.max()), strict=True):
                low, high = float(said) / 2 - 3e-7, 2 * float(said) + 3e-7      # machines differ
                assert low <= found <= high, (iters, sigma)


def test_the_example_prints_what_it_says():
    result = doctest.testmod(module)
    assert result.attempted == 1 and result.failed == 0
