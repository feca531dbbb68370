"""pdes/diffusion_reaction.py beside PDEBench's own simulator (which needs scipy).

PDEBENCH_CHECKOUT names a checkout of the PDEBench repository.
"""
import functools
import logging

import numpy as np
import pytest
import torch

from differences import differences, from_checkout
from sources.pdes.diffusion_reaction import diffusion_reaction

scipy = pytest.importorskip('scipy', reason='pip install scipy')
SHOWN = [1, 10, 50, 100]


def theirs(**tolerances):
    """A sample on 64 x 64 cells with random numbers of its own, (101, N, N, 2)."""
    simulator = from_checkout('PDEBENCH_CHECKOUT', 'pdebench/data_gen/src/sim_diff_react.py', 'Simulator', np=np,
                              logging=logging, diags=scipy.sparse.diags,
                              solve_ivp=functools.partial(scipy.integrate.solve_ivp, **tolerances))
    return simulator(t=5, tdim=101, xdim=64, ydim=64, seed=3).generate_sample()


def test_diffusion_and_reaction_differ_by_the_time_steps_of_both():
    loose, tight = theirs(), theirs(rtol=1e-9, atol=1e-12)
    start = [torch.from_numpy(field)[None] for field in np.moveaxis(tight[0], -1, 0)]
    ours, exact = (diffusion_reaction(*start, steps=steps)[0, SHOWN] for steps in (None, 40))
    loose, tight = loose[SHOWN], tight[SHOWN]
    assert max(differences('ours with 40 steps a frame and theirs with tight tolerances', exact, tight)) < 1e-6
    assert max(differences('our time step, frames 1 10 50 100', ours, exact)) < 1e-3
    assert max(differences('their tolerances', loose, tight)) < 2e-4
    assert max(differences('as both are run', ours, loose)) < 1e-3
