"""Reactions and diffusion of docs/findings.md."""
import numpy as np

from lab import single


def test_both_reactions_rest_where_their_rates_are_zero_and_follow_a_slow_loop():
    zero = np.zeros((2, 1, 4, 6))
    for rates, (u, v) in ((single.brusselator, (1, 2.2)), (single.prey, (6 / 35, 4 / 7 * 29 / 35))):
        at_rest = np.stack([np.full((1, 4, 6), u), np.full((1, 4, 6), v)])
        assert abs(rates(*at_rest, *zero)).max() < 1e-12
    y = np.random.default_rng(0).uniform(0.5, 1, (2, 1, 4, 6))
    frames = single.react(y, single.brusselator, 0.01, 1, 'wrap')
    u, v = y[:, 0]
    for i, j in ((0, 0), (3, 5), (1, 2)):
        around = [(i - 1) % 4, (i + 1) % 4], [(j - 1) % 6, (j + 1) % 6]
        lu, lv = (sum(w[k, j] for k in around[0]) + sum(w[i, k] for k in around[1]) - 4 * w[i, j] for w in (u, v))
        a, b = u[i, j], v[i, j]
        expected = a + 0.01 * (lu + 1 - 3.2 * a + a * a * b), b + 0.01 * (0.5 * lv + 2.2 * a - a * a * b)
        np.testing.assert_allclose(frames[0, 1, i, j], expected, rtol=1e-12)
