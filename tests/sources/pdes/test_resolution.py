"""The time step and the grid resolve what is generated; see resolution.py for the other families and sizes."""
import pytest

from resolution import resolution
from sources import generate


@pytest.mark.parametrize('name, side, worst_step, worst_grid', [
    ('swe_pdb', 64, 8e-3, 1e-2), ('dr_pdb', 64, 4e-5, None), ('cno_darcy', 32, None, 2e-2),
    ('ns2d_pdb_M1_eta1e-1_zeta1e-1', 32, 3e-2, 4e-2)])
def test_the_last_frame_changes_little_with_half_the_step_and_with_twice_the_grid(
        name, side, worst_step, worst_grid, monkeypatch):
    by_step, by_grid = resolution(generate.plan(name, 'nano', resolution=side), monkeypatch)
    for errors, worst in ((by_step, worst_step), (by_grid, worst_grid)):
        assert (errors is None) == (worst is None)
        assert worst is None or 0 < min(errors) and max(errors) < worst, errors
