"""sources/prepare.py beside The Well's own package.

The package pins old versions of others, so that it needs an environment of its own, with pytest, h5py and tqdm.
"""
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import data
from sources import prepare

pytest.importorskip('the_well', reason='pip install the_well')
sys.path.append(str(Path(__file__).parents[1] / 'sources'))
from test_well import T, write_dataset  # noqa: E402
from the_well.data.data_formatter import DefaultChannelsLastFormatter  # noqa: E402
from the_well.data.datasets import WellDataset  # noqa: E402
from the_well.utils.dummy_data import write_dummy_data  # noqa: E402


def compare(raw, folder, split, frames, finite=True):
    """Compare a split as WellDataset reads it with the converted one, exactly: fields, names, dt."""
    theirs = WellDataset(path=str(raw), well_split_name=split, n_steps_input=1, n_steps_output=frames - 1)
    ours, about = data.Trajectories(folder.parent, folder.name, split, 1, None), theirs.metadata
    assert ours.channel_names == [name for group in (about.field_names, about.constant_field_names)
                                  for order in range(3) for name in group[order]]
    assert ours.count == len(theirs) == sum(about.n_trajectories_per_file)
    for i, sample in enumerate(theirs):
        varying = torch.cat([sample['input_fields'], sample['output_fields']])
        fields = torch.cat([varying, sample['constant_fields'].expand(frames, *[-1] * (varying.ndim - 1))], -1)
        assert bool(fields.isfinite().all()) == finite
        if not finite:
            _, fields = DefaultChannelsLastFormatter(about).process_input(
                {'input_fields': fields[:1, None], 'output_fields': fields, 'constant_fields': fields[:1]})
        np.testing.assert_array_equal(ours.read(i, 0, frames), fields)
        times = torch.cat([sample['input_time_grid'], sample['output_time_grid']])
        np.testing.assert_allclose(times.diff(), ours.dt, rtol=1e-4)


@pytest.mark.parametrize('grid', [(6, 4), (4, 3, 5)])
@pytest.mark.parametrize('finite', [True, False])
def test_files_in_its_format_have_the_values_that_its_loader_reads(grid, finite, tmp_path):
    """Without fields that lack axes of space: its loader does not repeat these along the axis that they lack."""
    write_dataset(tmp_path / 'raw', grid, thin=False)
    if not finite:
        for path in (tmp_path / 'raw').rglob('f*.h*'):
            with h5py.File(path, 'r+') as file:
                file['t0_fields/density'][:, 1, 1] = np.nan
                file['t1_fields/velocity'][:, 2, 1] = np.inf
    prepare.convert('layer', tmp_path / 'raw', tmp_path / 'data', 'the_well', nan_to_num=not finite)
    for split in ('train', 'valid', 'test'):
        compare(tmp_path / 'raw', tmp_path / 'data/layer', split, T, finite)


def test_the_files_that_it_writes_itself_have_the_values_that_its_loader_reads(tmp_path):
    for split in ('train', 'valid', 'test'):
        folder = tmp_path / f'raw/data/{split}'
        folder.mkdir(parents=True)
        for name in ('a.hdf5', 'b.h5'):
            write_dummy_data(str(folder / name))
    prepare.convert('dummy', tmp_path / 'raw', tmp_path / 'data', 'the_well')
    for split in ('train', 'valid', 'test'):
        compare(tmp_path / 'raw', tmp_path / 'data/dummy', split, 10)
