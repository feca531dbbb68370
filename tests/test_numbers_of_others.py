"""docs/evaluation.md, "What other people's numbers mean": each row against the package that it names.

A package that is not installed skips its test. The rows without a test here have a script in findings/.
"""
import h5py
import numpy as np
import pytest
import torch

import evaluate

B, F, H, W, C = 3, 4, 16, 12, 2


def fields(offset=0.0):
    """A truth and a prediction (B, F, H, W, C) whose channels differ in size and error."""
    truth = torch.randn(B, F, H, W, C, dtype=torch.float64) * torch.tensor([1.0, 5.0]) + offset
    return truth, truth + torch.randn_like(truth) * torch.tensor([0.1, 2.0]) * torch.rand(B, F, 1, 1, 1)


def ours(metric, prediction, truth):
    """The mean of a metric over the samples and channels, as the table of evaluate.py has it."""
    return getattr(evaluate, metric)(prediction, truth, torch.full([C], 1e-12, dtype=torch.float64)).mean().item()


def test_pdebenchs_nrmse_is_l2re_of_frames():
    """Its formula, written out: root mean squares over the points, averaged over samples, channels and frames."""
    v, u = fields(offset=3.0)
    v, u = (x.permute(0, 4, 2, 3, 1) for x in (v, u))                   # (B, C, H, W, F), PDEBench's order
    error = torch.sqrt(torch.mean((u.reshape(B, C, -1, F) - v.reshape(B, C, -1, F)) ** 2, dim=2))
    size = torch.sqrt(torch.mean(v.reshape(B, C, -1, F) ** 2, dim=2))
    nrmse = torch.mean(error / size, dim=0).mean().item()
    v, u = (x.permute(0, 4, 2, 3, 1) for x in (v, u))
    assert ours('l2re_of_frames', u, v) == pytest.approx(nrmse, rel=1e-12)


def test_neuraloperators_lploss_sums_over_samples_and_channels_and_its_mean_is_the_l2re():
    LpLoss = pytest.importorskip('neuralop', reason='pip install neuraloperator').LpLoss
    v, u = fields(offset=3.0)
    rollout = [x.permute(0, 4, 1, 2, 3) for x in (u, v)]                # (B, C, F, H, W)
    mean = LpLoss(d=3, reduction='mean')(*rollout).item()
    assert mean == pytest.approx(ours('l2re_of_samples', u, v), rel=1e-7)
    assert mean == pytest.approx(evaluate.l2re(u, v), rel=1e-7)
    assert LpLoss(d=3)(*rollout).item() == pytest.approx(B * C * mean, rel=1e-7)
    frames = [x.permute(0, 1, 4, 2, 3) for x in (u, v)]                 # (B, F, C, H, W)
    assert LpLoss(d=2, reduction='mean')(*frames).item() == pytest.approx(ours('l2re_of_frames', u, v), rel=1e-7)


def test_neuraloperators_points_are_at_i_over_n():
    embeddings = pytest.importorskip('neuralop.layers.embeddings', reason='pip install neuraloperator')
    grid = embeddings.GridEmbedding2D(in_channels=1)(torch.zeros(1, 1, 4, 4))[0]
    assert grid[1, :, 0].tolist() == grid[2, 0].tolist() == [0.0, 0.25, 0.5, 0.75]


def test_exponaxs_nrmse_is_the_sum_over_the_channels_of_l2re_of_frames():
    exponax = pytest.importorskip('exponax', reason='pip install exponax')
    v, u = fields()
    frame = [x[0, 0].permute(2, 0, 1)[:, :W].numpy() for x in (u, v)]               # (C, N, N)
    nrmse = float(exponax.metrics.nRMSE(*frame))
    assert nrmse == pytest.approx(C * ours('l2re_of_frames', u[:1, :1, :W], v[:1, :1, :W]), rel=1e-5)


def well():
    from the_well.data.datasets import WellMetadata
    return WellMetadata(
        dataset_name='own', n_spatial_dims=2, spatial_resolution=(H, W), scalar_names=[], constant_scalar_names=[],
        field_names={0: ['u', 'v']}, constant_field_names={}, boundary_condition_types=['PERIODIC'], n_files=1,
        n_trajectories_per_file=[B], n_steps_per_trajectory=[F])


def test_the_wells_vrmse_is_vrmse_of_frames_but_for_its_deviation_and_what_it_adds_to_the_variance():
    metrics = pytest.importorskip('the_well.benchmark.metrics', reason='pip install the_well matplotlib scipy')
    v, u = fields(offset=3.0)
    theirs = metrics.VRMSE.eval(u, v, well()).mean().item()
    N = H * W
    assert theirs == pytest.approx(ours('vrmse_of_frames', u, v) * ((N - 1) / N) ** 0.5, rel=1e-6)
    small = metrics.VRMSE.eval(1e-4 * u, 1e-4 * v, well(), eps=1e-20).mean().item()
    assert small < 0.8 * theirs, 'the units change it, and eps does not help'


def test_the_wells_use_normalization_alone_returns_fields_as_they_are(tmp_path):
    datasets = pytest.importorskip('the_well.data.datasets', reason='pip install the_well')
    from the_well.utils.dummy_data import write_dummy_data
    write_dummy_data(str(tmp_path / 'own.hdf5'))
    with h5py.File(tmp_path / 'own.hdf5', 'a') as file:
        file['t1_fields/field'][:] = 304.0
    sample = datasets.WellDataset(path=str(tmp_path), use_normalization=True)[0]
    np.testing.assert_array_equal(sample['input_fields'], 304.0)
