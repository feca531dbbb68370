"""pdes/compressible.py beside PDEBench's own code, which needs jax (it is installed with exponax).

PDEBENCH_CHECKOUT names a checkout of the PDEBench repository. The licence of this part of it allows academic and
non-commercial research only; the software was developed by NEC Laboratories Europe GmbH.
"""
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from differences import differences
from sources.pdes.compressible import GAMMA, compressible, random_gas

jax = pytest.importorskip('jax', reason='pip install exponax')
FOLDER = Path(os.environ.get('PDEBENCH_CHECKOUT', '')) / 'pdebench/data_gen/data_gen_NLE'
if not (FOLDER / 'utils.py').is_file():
    pytest.skip('PDEBENCH_CHECKOUT has to name a checkout of PDEBench', allow_module_level=True)
MACH, VISCOSITY = 1.0, 0.1


def their_frames(state, folder, monkeypatch):
    """vx, vy, density, pressure at t = 0, 0.5, 1 in single precision, (3, N, N, 4); it reads no settings file."""
    monkeypatch.setitem(sys.modules, 'hydra', SimpleNamespace(main=lambda **options: lambda main: main))
    monkeypatch.setitem(sys.modules, 'omegaconf', SimpleNamespace(DictConfig=dict))
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(jax.core.Tracer, 'loc', property(lambda array: array.at), raising=False)    # its old name
    spec = importlib.util.spec_from_file_location('pdebench_gas', FOLDER / 'CompressibleFluid/CFD_multi_Hydra.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    start = np.stack([state['density'], *state['velocity'], 0 * state['density'], state['pressure']])
    start = np.pad(start[None, ..., None].astype('float32'), [(0, 0), (0, 0), (2, 2), (2, 2), (2, 2)], mode='wrap')
    module.init_multi_HD_2DRand = lambda *args, **options: jax.numpy.asarray(start)
    N = start.shape[2] - 4
    module.main(SimpleNamespace(args=SimpleNamespace(
        save=f'{folder}/', dt_save=0.5, ini_time=0.0, fin_time=1.0, nx=N, ny=N, nz=1, xL=0.0, xR=1.0, yL=0.0, yR=1.0,
        zL=0.0, zR=1.0, bc='periodic', gamma=GAMMA, eta=VISCOSITY, zeta=VISCOSITY, CFL=0.3, if_second_order=1.0,
        show_steps=1, p_floor=1e-4, numbers=1, init_mode_Multi='2D_rand', M0=MACH, k_tot=4, init_key=0,
        if_rand_param=False)))
    fields = [np.load(next(folder.glob(f'*_{name}.npy')))[0, ..., 0] for name in ('Vx', 'Vy', 'D', 'P')]
    return np.stack(fields, -1).astype(float)


def energy_drift(frames):
    vx, vy, density, pressure = np.moveaxis(frames, -1, 0)
    energy = (pressure / (GAMMA - 1) + density / 2 * (vx ** 2 + vy ** 2)).sum((1, 2))
    return abs(energy / energy[0] - 1).max()


def test_a_viscous_gas_converges_to_the_same_flow(tmp_path, monkeypatch):
    worst = {}
    for N in (16, 32):
        state = random_gas(np.random.default_rng(2021), N, MACH, 2)
        (tmp_path / str(N)).mkdir()
        theirs = their_frames(state, tmp_path / str(N), monkeypatch)
        ours = compressible(*[torch.from_numpy(state[key])[None] for key in ('density', 'velocity', 'pressure')],
                            frames=3, dt=0.5, eta=VISCOSITY, zeta=VISCOSITY)[0].numpy()
        worst[N] = [max(differences(f'gas, {name}, {N}^2, t = 0.5, 1', ours[1:, ..., i], theirs[1:, ..., i]))
                    for i, name in enumerate(('vx', 'vy', 'density', 'pressure'))]
        print(f'energy drift, {N}^2: ours {energy_drift(ours):.1e}, theirs {energy_drift(theirs):.1e}')
        assert energy_drift(ours) < 1e-12
    assert all(a > 1.5 * b for a, b in zip(worst[16][:2], worst[32][:2])), 'the velocities converge in first order'
    assert max(worst[32][2:]) < 1e-2                        # their energy drifts by 2e-3 on both grids
