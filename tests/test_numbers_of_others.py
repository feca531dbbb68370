"""docs/evaluation.md, "What other people's numbers mean": the packages that are installed."""
import h5py
import pytest
import torch

import evaluate

B, F, H, W, C = 3, 4, 16, 12, 2


def fields():
    """A truth and a prediction (B, F, H, W, C) whose channels differ in size and error."""
    scale, off = torch.tensor([1.0, 5.0]), torch.tensor([0.1, 2.0])
    truth = torch.randn(B, F, H, W, C, dtype=torch.float64) * scale + 3
    return truth, truth + torch.randn_like(truth) * off * torch.rand(B, F, 1, 1, 1)


def ours(metric, prediction, truth):
    """The mean of a metric over the samples and channels, as the table of evaluate.py has it."""
    found = getattr(evaluate, metric)(prediction, truth, 1e-12 * torch.ones(C).double())
    return pytest.approx(found.mean().item(), rel=1e-5)


def test_neuraloperators_lploss_sums_over_samples_and_channels_and_its_points_are_at_i_over_n():
    neuralop = pytest.importorskip('neuralop', reason='pip install neuraloperator')
    grid = neuralop.layers.embeddings.GridEmbedding2D(in_channels=1)(torch.zeros(1, 1, 4, 4))[0]
    assert grid[1, :, 0].tolist() == grid[2, 0].tolist() == [0.0, 0.25, 0.5, 0.75]
    LpLoss = neuralop.LpLoss
    v, u = fields()
    rollout = [x.permute(0, 4, 1, 2, 3) for x in (u, v)]                # (B, C, F, H, W)
    frames = [x.permute(0, 1, 4, 2, 3) for x in (u, v)]                 # (B, F, C, H, W)
    assert LpLoss(d=3, reduction='mean')(*rollout).item() == ours('l2re_of_samples', u, v)
    assert LpLoss(d=3)(*rollout).item() / (B * C) == ours('l2re_of_samples', u, v)
    assert LpLoss(d=2, reduction='mean')(*frames).item() == ours('l2re_of_frames', u, v)
    assert evaluate.l2re(u, v) == ours('l2re_of_samples', u, v)


def test_exponaxs_nrmse_is_the_sum_over_the_channels_of_l2re_of_frames():
    exponax = pytest.importorskip('exponax', reason='pip install exponax')
    v, u = (x[:1, :1, :W] for x in fields())
    frames = [x[0, 0].permute(2, 0, 1).numpy() for x in (u, v)]         # (C, N, N)
    assert float(exponax.metrics.nRMSE(*frames)) / C == ours('l2re_of_frames', u, v)


def test_the_wells_vrmse_is_that_of_frames_but_for_its_deviation_and_what_it_adds_to_the_variance():
    reason = 'pip install the_well matplotlib scipy'
    metrics = pytest.importorskip('the_well.benchmark.metrics', reason=reason)
    from the_well.data.datasets import WellMetadata
    about = WellMetadata(
        dataset_name='own', n_spatial_dims=2, spatial_resolution=(H, W), scalar_names=[],
        constant_scalar_names=[], field_names={0: ['u', 'v']}, constant_field_names={},
        boundary_condition_types=['PERIODIC'], n_files=1, n_trajectories_per_file=[B],
        n_steps_per_trajectory=[F])
    v, u = fields()
    theirs = metrics.VRMSE.eval(u, v, about).mean().item()
    assert theirs * (H * W / (H * W - 1)) ** 0.5 == ours('vrmse_of_frames', u, v)
    small = metrics.VRMSE.eval(1e-4 * u, 1e-4 * v, about, eps=1e-20).mean().item()
    assert small < 0.8 * theirs, 'the units change it, and eps does not help'


def test_the_wells_use_normalization_alone_returns_fields_as_they_are(tmp_path):
    datasets = pytest.importorskip('the_well.data.datasets', reason='pip install the_well')
    from the_well.utils.dummy_data import write_dummy_data
    write_dummy_data(str(tmp_path / 'own.hdf5'))
    with h5py.File(tmp_path / 'own.hdf5', 'a') as file:
        file['t1_fields/field'][:] = 304.0
    sample = datasets.WellDataset(path=str(tmp_path), use_normalization=True)[0]
    assert (sample['input_fields'] == 304).all()
