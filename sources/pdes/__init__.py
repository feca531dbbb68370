"""Solvers of the benchmark PDEs, one equation a file, and FAMILIES, the table of the datasets that they generate.

A solver is a plain function of its initial state, batched over trajectories, on the device and in the precision of that
state. The physics, the initial states and the sampling are the benchmarks'; the numerics are our own, so values agree
with the published files to the schemes' error, and in distribution only where an initial state cannot be drawn again.

To add an equation, write pdes/<equation>.py with the solver, the draw of its initial states and its rows FAMILIES, as
in pdes/diffusion_reaction.py; add one line here and, for each dataset, its sizes to configs.DATASETS.

Shapes: B trajectories, T frames, N grid points a side, C channels.
"""
from sources.pdes import (
    compressible,
    darcy,
    diffusion_reaction,
    navier_stokes,
    obstacles,
    poisson,
    shallow_water,
    smoke,
    wave,
)
from sources.pdes.march import Family

__all__ = ['FAMILIES', 'Family']

FAMILIES = {
    **navier_stokes.FAMILIES,
    **diffusion_reaction.FAMILIES,
    **shallow_water.FAMILIES,
    **wave.FAMILIES,
    **navier_stokes.KOLMOGOROV,
    **poisson.FAMILIES,
    **darcy.FAMILIES,
    **smoke.FAMILIES,
    **compressible.FAMILIES,
    **obstacles.FAMILIES,
}
