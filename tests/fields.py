"""What the tests of the solvers share: sample files, errors, orders, grids and initial fields.

Their tolerances are 2 to 5 times the error that was measured when the test was written.
"""
import numpy as np
import pytest
import torch

from conftest import ROOT

PI = np.pi


def raw(name):
    """Path of a sample file of the benchmarks. The test is skipped if it is absent."""
    path = ROOT.parent / 'shared' / 'raw' / name
    if not path.exists():
        pytest.skip(f"the benchmarks' sample files are not there: {path}")
    return path


def l2re(a, b):
    """Relative L2 error over all axes but the first, the largest of the batch."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return ((a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1)).max().item()


def orders(errors):
    """log2 of the ratios of consecutive errors."""
    return np.log2(np.array(errors[:-1]) / np.array(errors[1:]))


def nodes(N):
    """x and y of the nodes i / N of the unit torus, (N, 1) and (1, N)."""
    x = torch.arange(N, dtype=torch.float64) / N
    return x[:, None], x[None, :]


def centres(N, low=0.0, high=1.0):
    """x and y of the cell centres, (N, 1) and (1, N)."""
    x = low + (high - low) * (torch.arange(N, dtype=torch.float64) + 0.5) / N
    return x[:, None], x[None, :]


def coarse(field, N):
    """Averages of a finer field (..., M, M) over the cells of an N x N grid."""
    n = field.shape[-1] // N
    return field.unflatten(-1, (N, n)).unflatten(-3, (N, n)).mean((-1, -3))


def starts(draw, N, count, seed=0):
    """Initial fields (count, N, N) of trajectories; `draw` gives a list or a dict of them."""
    draws = [draw(np.random.default_rng((seed, i)), N) for i in range(count)]
    fields = [fields.values() if isinstance(fields, dict) else fields for fields in draws]
    return [torch.from_numpy(np.stack(field)) for field in zip(*fields)]
