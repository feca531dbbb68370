"""pdes/smoke.py beside phiflow (pip install phiflow), with which PDEArena's data were made."""
import numpy as np
import pytest
import torch

from differences import differences
from sources.pdes.smoke import cloud, smoke

pytest.importorskip('phi', reason='pip install phiflow')
from phi import flow  # noqa: E402

N, LENGTH, STEPS = 32, 32.0, 40


def their_frames(u0, dt, buoyancy, viscosity):
    """PDEArena's step, but with a direct solve of the pressure -> u, vx, vy without the walls."""
    flow.math.set_global_precision(64)
    u = flow.CenteredGrid(flow.tensor(u0, flow.spatial('x,y')), flow.extrapolation.BOUNDARY,
                          bounds=flow.Box(x=LENGTH, y=LENGTH))
    v = flow.StaggeredGrid(0, 0, x=N, y=N, bounds=flow.Box(x=LENGTH, y=LENGTH))
    for _ in range(STEPS):
        u = flow.advect.semi_lagrangian(u, v, dt)
        v = flow.advect.semi_lagrangian(v, v, dt) + dt * (u * (0, buoyancy)).at(v)
        v = flow.diffuse.explicit(v, viscosity, dt)
        v, _ = flow.fluid.make_incompressible(v, (), flow.Solve('scipy-direct', rank_deficiency=0))
        yield [field.values.numpy('x,y') for field in (u, v.vector['x'], v.vector['y'])]


@pytest.mark.filterwarnings('ignore')
def test_smoke_takes_the_same_steps_to_rounding():
    u0, rest, _ = cloud(np.random.default_rng(0), N).values()
    u, vx, vy = zip(*their_frames(u0, dt=1.5, buoyancy=0.5, viscosity=0.01))
    ours = smoke(*[torch.from_numpy(field)[None] for field in (u0, rest, rest)], buoyancy=0.5, frames=STEPS + 1, dt=1.5)
    ours = ours[0, 1:].numpy()
    shown = slice(9, None, 10)                              # frames 10, 20, 30, 40
    for name, a, b in (('u', ours[..., 0], u), ('vx', ours[:, 1:, :, 1], vx), ('vy', ours[:, :, 1:, 2], vy)):
        assert max(differences(f'smoke, {name}, frames 10 20 30 40', a[shown], b[shown])) < 1e-9
