"""pdes/compressible.py: exact solutions, orders, conserved quantities, positivity, names."""
import numpy as np
import pytest
import torch

import configs
from fields import PI, l2re, orders
from sources.pdes import FAMILIES
from sources.pdes.compressible import GAMMA, compressible, random_gas, turbulent_gas


def mesh(N, D):
    """Coordinates of the cell centres, (D, N, ..., N)."""
    x = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    return torch.stack(torch.meshgrid(*[x] * D, indexing='ij'))


def smooth(N, D=2, speed=0.5):
    """A smooth flow with every kind of wave and no symmetry."""
    x = mesh(N, D)
    y, z = x[1 % D], x[2 % D]
    fields = [torch.sin(2 * PI * (x[0] + y) + d) + torch.cos(2 * PI * z - d) for d in range(D + 2)]
    return dict(density=1 + 0.2 * fields[D][None], velocity=speed * torch.stack(fields[:D])[None],
                pressure=1 + 0.2 * fields[D + 1][None])


def rough(N, D=2, contrast=1e-6, speed=5.0, count=2):
    """Independent draws in every cell: density and pressure over six decades, Mach numbers up to thousands."""
    scale = lambda: contrast ** torch.rand(count, *[N] * D, dtype=torch.float64)
    return dict(density=scale(), velocity=speed * torch.randn(count, D, *[N] * D, dtype=torch.float64),
                pressure=scale())


def conserved(frames):
    """Mass, momentum and energy in each cell of frames (B, T, *N, D+2)."""
    *v, rho, p = frames.unbind(-1)
    energy = p / (GAMMA - 1) + rho / 2 * sum(u * u for u in v)
    return torch.stack([rho, *[rho * u for u in v], energy], -1)


def vortex(N, time):
    """An isentropic vortex in a uniform stream, exact but for its tail of 1e-5 at the sides -> v, rho, p."""
    x, y = (mesh(N, 2) - 0.5 - time * torch.tensor([1.0, 0.5])[:, None, None] + 0.5) % 1 - 0.5
    swirl = 0.6 * torch.exp((1 - (x ** 2 + y ** 2) / 0.08 ** 2) / 2)
    T = 1 - (GAMMA - 1) / (2 * GAMMA) * swirl ** 2
    rho = T ** (1 / (GAMMA - 1))
    return torch.stack([1 - swirl * y / 0.08, 0.5 + swirl * x / 0.08])[None], rho[None], (rho * T)[None]


def test_a_vortex_is_carried_along_unchanged_to_second_order():
    def error(N):
        v, rho, p = vortex(N, 0)
        ours = compressible(rho, v, p, 2, 0.2)[0, 1].movedim(-1, 0)
        v, rho, p = vortex(N, 0.2)
        return (ours - torch.cat([v[0], rho, p])).abs().mean((1, 2)).numpy()
    errors = [error(N) for N in (24, 48, 96)]
    measured = orders(errors)
    assert (measured > 1.9).all() and errors[-1].max() < 3e-4, (errors, measured)


@pytest.mark.parametrize('constant', [0, 1, 2])
def test_a_flow_constant_along_one_axis_of_three_is_the_flow_in_two(constant):
    flat = smooth(12)
    deep = {key: field.unsqueeze(constant - 3).repeat_interleave(12, constant - 3) for key, field in flat.items()}
    axes = [d for d in range(3) if d != constant]
    deep['velocity'] = torch.zeros(1, 3, 12, 12, 12, dtype=torch.float64).index_copy_(
        1, torch.tensor(axes), deep['velocity'])
    friction = dict(eta=0.01, zeta=0.02, frames=2, dt=0.1, steps=12)
    two, three = compressible(**flat, **friction)[:, 1], compressible(**deep, **friction)[:, 1]
    for index in (0, 7):
        cut = three.select(constant + 1, index)
        # in three dimensions RKL2 may take another number of stages
        assert (cut[..., [*axes, 3, 4]] - two).abs().max() < 1e-5
        # a vector unit may round the last cells of a row otherwise
        assert cut[..., constant].abs().max() < 1e-12


def riemann(s, rhoL, pL, rhoR, pR):
    """Exact solution of Sod's kind (rarefaction, contact, shock): rho, u, p at s = x / t (Toro, ch. 4)."""
    cL, cR = np.sqrt(GAMMA * pL / rhoL), np.sqrt(GAMMA * pR / rhoR)
    fan = lambda p: 2 * cL / (GAMMA - 1) * (1 - (p / pL) ** ((GAMMA - 1) / (2 * GAMMA)))
    shock = lambda p: (p - pR) * np.sqrt(2 / rhoR / ((GAMMA + 1) * p + (GAMMA - 1) * pR))
    low, high = pR, pL
    for _ in range(100):
        p = (low + high) / 2
        low, high = (p, high) if fan(p) > shock(p) else (low, p)
    u, c = fan(p), cL * (p / pL) ** ((GAMMA - 1) / (2 * GAMMA))
    speed = cR * np.sqrt((GAMMA + 1) / (2 * GAMMA) * p / pR + (GAMMA - 1) / (2 * GAMMA))
    inside = (2 * cL + (GAMMA - 1) * -s) / (GAMMA + 1)                      # sound speed in the fan
    ratio = (p / pR + (GAMMA - 1) / (GAMMA + 1)) / ((GAMMA - 1) / (GAMMA + 1) * p / pR + 1)
    where = [s < -cL, s < u - c, s < u, s < speed]
    return np.stack([
        np.select(where, [rhoL, rhoL * (inside / cL) ** (2 / (GAMMA - 1)), rhoL * (p / pL) ** (1 / GAMMA),
                          rhoR * ratio], rhoR),
        np.select(where, [0, 2 / (GAMMA + 1) * (cL + s), u, u], 0),
        np.select(where, [pL, pL * (inside / cL) ** (2 * GAMMA / (GAMMA - 1)), p, p], pR)])


@pytest.mark.parametrize('low, worst', [((0.125, 0.1), 6e-3), ((0.02, 0.002), 2e-2)])       # 2nd: a transonic fan
def test_sods_shock_tube_converges_to_the_exact_solution(low, worst):
    """The heavy gas is in the middle half of the torus: Sod's problem twice, back to back."""
    def error(N):
        x = mesh(N, 1)
        rho, p = (torch.where(abs(x - 0.5) < 0.25, 1.0, light).double() for light in low)
        ours = compressible(rho, 0 * rho[None], p, frames=2, dt=0.08)[0, 1, N // 2:].T.numpy()        # u, rho, p
        exact = riemann((x[0, N // 2:].numpy() - 0.75) / 0.08, 1.0, 1.0, *low)
        return abs(ours[[1, 0, 2]] - exact).mean()
    errors = [error(N) for N in (64, 128, 256)]
    assert errors[-1] < worst and orders(errors).mean() > 0.65, (errors, orders(errors))


@pytest.mark.parametrize('wave, v, rates', [        # the exact decay rate / (2 pi)^2 is rates . (eta, zeta + eta/3)
    ((1, 0), (0, 1), (1, 0)), ((0, 1), (1, 0), (1, 0)),                                     # shear along the axes
    ((1, 0), (1, 0), (1, 1)), ((0, 0, 1), (0, 0, 1), (1, 1)), ((1,), (1,), (1, 1)),         # compression along them
    ((1, 1), (1, -1), (2, 1)), ((1, 1), (1, 1), (2, 1)),                                    # both along diagonals
    ((0, 1, 1), (0, 1, 1), (2, 1)), ((1, 0, 1), (1, 0, -1), (2, 1)),
])
def test_waves_of_velocity_decay_at_the_exact_rate_and_heat_the_gas(wave, v, rates):
    """In a gas so viscous that pressure has no time to act. The benchmark's stress is not isotropic."""
    D, N, eta, zeta, dt = len(wave), 16 if len(wave) == 3 else 32, 2.0, 4.0, 1e-3
    phase = 2 * PI * (mesh(N, D) * torch.tensor(wave).view(D, *[1] * D)).sum(0)
    velocity = 1e-2 * torch.tensor(v, dtype=torch.float64).view(1, D, *[1] * D) * torch.sin(phase)
    density = torch.full_like(phase[None], 3.0)
    frames = compressible(density, velocity, 1e-4 * density, 2, dt, eta, zeta, steps=4)[0, 1]
    share = (frames[..., :D] * velocity[0].movedim(0, -1)).sum() / velocity.square().sum()
    rate = 4 * PI ** 2 * np.dot(rates, (eta, zeta + eta / 3))
    assert abs(-share.log().item() / dt / rate - 1) < (0.04 if D == 3 else 0.01), (share, rate)
    loss = density[0] / 2 * (velocity[0].square().sum(0) - frames[..., :D].square().sum(-1))
    assert abs(((frames[..., -1] - 1e-4 * density[0]) / (GAMMA - 1)).mean() / loss.mean() - 1) < 1e-6
    assert (frames[..., -1] >= 1e-4 * density[0] * (1 - 1e-9)).all()


@pytest.mark.parametrize('D', [1, 2, 3])
def test_mass_momentum_and_energy_are_conserved_to_rounding(D):
    frames = compressible(**rough(12 if D < 3 else 8, D, 0.01, 1.0), frames=3, dt=0.02, eta=0.1, zeta=0.1)
    totals = conserved(frames).flatten(2, -2).mean(2)
    assert l2re(frames[:, 2], frames[:, 0]) > 0.1, 'nothing happened'
    assert (totals - totals[:, :1]).abs().max() < 1e-13 * totals.abs().max()


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.slow
def test_density_and_pressure_stay_positive_from_noise_over_six_decades(dtype):
    for D, N in ((1, 64), (2, 12), (3, 6)):
        start = {key: field.to(dtype) for key, field in rough(N, D).items()}
        assert (compressible(**start, frames=3, dt=0.01)[..., D:] > 0).all()


@pytest.mark.parametrize('name, mach, eta, zeta, draw', [
    ('ns2d_pdb_M1_eta1e-1_zeta1e-1', 1, 0.1, 0.1, random_gas),
    ('ns2d_pdb_M1e-1_eta1e-2_zeta1e-2', 0.1, 0.01, 0.01, random_gas),
    ('ns2d_pdb_M1e-1_eta1e-8_zeta1e-8_turb_512', 0.1, 0, 0, turbulent_gas),
    ('ns3d_pdb_M1e-1_rand', 0.1, 0, 0, random_gas), ('ns3d_pdb_M1_turb', 1, 0, 0, turbulent_gas)])
def test_a_dataset_is_what_its_name_says(name, mach, eta, zeta, draw, monkeypatch):
    family, D, arguments = FAMILIES[name], configs.DATASETS[name].dims, {}
    ours = family.draw(np.random.default_rng(3), 16)
    expected = draw(np.random.default_rng(3), 16, mach, D)
    assert all(np.array_equal(ours[key], expected[key]) for key in expected)
    monkeypatch.setattr('sources.pdes.compressible.compressible',
                        lambda **kwargs: arguments.update(kwargs) or torch.arange(D + 2)[None])
    order = family.solve()[0].tolist()
    assert (arguments.get('eta', 0), arguments.get('zeta', 0)) == (eta, zeta)
    assert order == ([0, 1, 2, 3] if D == 2 else [0, 1, 2, 4, 3])
    assert f'M = {mach:g}' in family.pde


def test_stride_returns_the_averages_of_what_is_conserved_and_the_first_frame_is_the_start():
    start = smooth(12)
    fine, coarse = (compressible(**start, frames=2, dt=0.02, stride=stride) for stride in (1, 3))
    assert (fine[:, 0, ..., 3] - start['pressure']).abs().max() < 1e-14
    assert (fine[:, 0, ..., :2] - start['velocity'].movedim(1, -1)).abs().max() < 1e-14
    means = conserved(fine).unflatten(3, (4, 3)).unflatten(2, (4, 3)).mean((3, 5))
    assert (conserved(coarse) - means).abs().max() < 1e-13
