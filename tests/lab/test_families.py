"""The picture of the families: the first and the last frame of each, in their places."""
import numpy as np
import pytest
import torch

pytest.importorskip('matplotlib', reason='figures need it')

from lab import families  # noqa: E402, after the skip


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
