"""Solvers of the benchmark PDEs, one equation a file, and FAMILIES, the datasets that they generate.

A solver is a plain function of its initial state, batched over trajectories, on the device and in
the precision of that state. The physics, the initial states and the sampling are the benchmarks';
the numerics are our own. Shapes: B trajectories, T frames, N grid points a side, C channels.
"""
from . import compressible, diffusion_reaction, navier_stokes, obstacles, shallow_water, smoke, steady, wave

EQUATIONS = (navier_stokes, diffusion_reaction, shallow_water, wave, steady, smoke, compressible, obstacles)
FAMILIES = {name: family for equation in EQUATIONS for name, family in equation.FAMILIES.items()}
