"""The picture of the families: each of them, its first and its last frame in their places."""
import numpy as np
import pytest
import torch

import configs

pytest.importorskip('matplotlib', reason='figures need it')

from lab import families  # noqa: E402, after the skip
from sources import generate  # noqa: E402


def test_each_family_shows_its_first_and_its_last_frame_below_its_name():
    frames = {f'family {k}': torch.rand(2, 16, 8) + k for k in range(7)}
    figure = families.plot_families(frames)
    for ax, (name, pair) in zip(figure.axes, frames.items()):
        assert ax.get_title() == name
        shown = np.ma.filled(ax.images[0].get_array(), np.nan)                  # x to the right, y up
        np.testing.assert_allclose(shown[:, :16], pair[0].T, rtol=1e-6)
        np.testing.assert_allclose(shown[:, -16:], pair[1].T, rtol=1e-6)
        assert np.isnan(shown[:, 16:-16]).all()
    assert not figure.axes[7].images


def test_all_families_of_the_pretraining_and_waves_are_drawn_with_x_to_the_right(monkeypatch):
    def simulate(plan, split, indices):
        u = np.zeros((1, 3, 16, 16, 4), np.float32)
        u[:, :, 1] = 1                                          # a line, the second along the first axis
        return u
    drawn = []
    monkeypatch.setattr(generate, 'simulate', simulate)
    monkeypatch.setattr(families.figures, 'save_figure', lambda folder, name, figure: drawn.append(figure))
    monkeypatch.setattr('sys.argv', ['families'])
    families.main()
    shown = {ax.get_title(): ax.images[0].get_array() for ax in drawn[0].axes if ax.images}
    assert [*shown] == [*configs.PRETRAINING, 'wave_gauss']
    for name, image in shown.items():
        y_first = name == 'cfdbench'                            # its first axis is y
        assert (image[1, 0], image[0, 1]) == ((1, 0) if y_first else (0, 1)), name
