"""Tests of pdes/march.py: order and stability of RKL2, the slope limiter, and the errors that every solver raises."""
import pytest
import torch

from fields import orders, starts
from sources.pdes.diffusion_reaction import diffusion_reaction
from sources.pdes.march import half_slope, rkl2
from sources.pdes.navier_stokes import navier_stokes, random_vorticity
from sources.pdes.shallow_water import dam_break, shallow_water
from sources.pdes.wave import wave


def test_rkl2_is_second_order_and_stable_up_to_the_limit_that_it_states():
    rates, one = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def error(s, count):
        y = one
        for _ in range(count):
            y = rkl2(lambda y: -rates * y, y, 0.2 / count, s)
        return (y - torch.exp(-0.2 * rates)).abs().max()
    for s in (2, 3, 8):
        measured = orders([error(s, count) for count in (20, 40, 80)])
        assert (abs(measured - 2) < 0.1).all(), (s, measured)
    for s in (2, 3, 9, 20):
        rate = torch.linspace(0, (s * s + s - 2) / 2, 10001, dtype=torch.float64)   # the limit of Euler's method is 2
        growth = [rkl2(lambda y: -factor * rate * y, torch.ones_like(rate), 1.0, s).abs().max() for factor in (1, 1.2)]
        assert growth[0] < 1 + 1e-12 and growth[1] > 1.01, (s, growth)


def test_the_slope_is_central_at_most_twice_either_one_sided_slope_and_zero_at_an_extremum():
    d = torch.tensor([1.0, 3.0, 0.5, -1.0, -1.0, 0.0], dtype=torch.float64)
    slopes = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.0], dtype=torch.float64)
    assert (2 * half_slope(d) - slopes).abs().max() < 1e-15
    assert (2 * half_slope(d[:, None].repeat(1, 2), 0) - slopes[:, None]).abs().max() < 1e-15


@pytest.mark.parametrize('run', [
    lambda: navier_stokes(8 * starts(lambda random, N: [random_vorticity(random, N)], 64, 1)[0], 1e-5, 3, steps=2),
    lambda: shallow_water(*starts(dam_break, 64, 1), 3, dt=0.2, steps=1)], ids=['navier_stokes', 'shallow_water'])
def test_too_few_steps_raise_instead_of_returning_nonsense(run):
    with pytest.raises(FloatingPointError, match='limit .*; take more steps'):
        run()


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), 1e30])
def test_a_bad_initial_state_raises_instead_of_returning_nan_also_where_the_stability_limit_does_not_see_it(bad):
    field = torch.ones(1, 16, 16)
    broken = field.clone()
    broken[0, 3, 3] = bad
    for run in (lambda: navier_stokes(broken, 1e-3, 2), lambda: diffusion_reaction(broken, field, 2),
                lambda: shallow_water(field, broken, field, 2), lambda: shallow_water(-field, field, field, 2),
                lambda: wave(field, field, broken, 2)):
        with pytest.raises(FloatingPointError):
            run()
    with pytest.raises(FloatingPointError, match='frame 1, step .*: values that are not finite'):
        wave(field * 3e38, field * 0, field, 2, dt=0.1)  # overflows within the first frame
