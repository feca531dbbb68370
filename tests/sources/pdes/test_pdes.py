"""Tests of the table of families: every row names a dataset, and its draw gives what the row and its solver expect."""
import configs

import numpy as np
import pytest

from sources import generate
from sources.pdes import FAMILIES


@pytest.mark.parametrize('name', FAMILIES)
def test_a_family_is_a_known_dataset_and_draws_fields_and_numbers_in_double_precision(name):
    family, N = FAMILIES[name], 16
    assert name in configs.DATASETS and set(family.nano) <= {'train', 'test', *generate.Plan._fields}
    state = family.draw(np.random.default_rng(0), N)
    assert set(family.coefficients) <= set(state)
    for value in state.values():
        assert np.ndim(value) == 0 or value.dtype == np.float64 and set(value.shape[-2:]) == {N}
        assert np.isfinite(value).all()
