"""Every figure shows the numbers that it is given."""
import json
import math

import numpy as np
import pytest
import torch

import evaluate
from helpers import pictures, read, save, small_model, trajectories, write_test_sets
from lab import figures, interpret


def lines(ax, label=None):
    """The values (points,) of the lines of an axis, or of those with a label."""
    return [np.asarray(line.get_ydata(), float) for line in ax.lines if label in (None, line.get_label())]


def test_a_run_draws_its_curve(plt, tmp_path, call):
    log = [{'step': step, 'loss': 1 / step, 'lr': 1e-3 * step} for step in (20, 40, 60)]
    log[1]['loss'] = None                                           # all steps of this line were skipped
    log[2]['valid'] = 0.25
    above, below = figures.plot_runs({'one': log}).axes
    np.testing.assert_array_equal(lines(above, 'loss')[0], [1 / 20, 1 / 60])
    np.testing.assert_array_equal(lines(above, 'validation error')[0], [0.25])
    np.testing.assert_array_equal(lines(below)[0], [0.02, 0.04, 0.06])
    above, _ = figures.plot_runs({'one': log, 'other': [{'step': 5, 'loss': 0.5}]}).axes
    np.testing.assert_array_equal(lines(above, 'one: loss')[0], [1 / 20, 1 / 60])
    np.testing.assert_array_equal(lines(above, 'other: loss')[0], [0.5])
    (tmp_path / 'log.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in log))
    assert call([tmp_path], figures) == (0, '', f'drew {tmp_path}/curve.png\n')
    assert pictures(tmp_path, '*.png')['curve.png'].format == 'PNG'
    (tmp_path / 'curve.png').write_text('of the user')
    code, error, printed = call([tmp_path], figures)
    assert (code, printed) == (0, '') and f'{tmp_path}/curve.png: this picture is there and stays as it is' in error
    assert (tmp_path / 'curve.png').read_text() == 'of the user'


def test_truth_and_prediction_share_a_scale_and_the_error_has_another(plt):
    truth = torch.rand(6, 8, 12) + 0.3
    prediction = truth + torch.rand(6, 8, 12)
    prediction[2] = math.inf
    error = (prediction - truth).abs()
    figure = figures.plot_fields(torch.stack([truth, prediction], 1), [2, 3, 6], 'h of swe_pdb')
    axes = np.array(figure.axes[:9]).reshape(3, 3)              # the other two are colour bars
    low, high = truth.min(), truth.max()
    for row, step in zip(axes, (2, 3, 6)):
        for ax, u in zip(row, (truth, prediction, error)):
            np.testing.assert_array_equal(ax.images[0].get_array(), u[step - 1].T)
            assert ax.images[0].origin == 'lower'
            assert ax.images[0].get_clim() == ((0, (high - low) / 2) if u is error else (low, high))
        relative = (error[step - 1] ** 2).sum().sqrt() / (truth[step - 1] ** 2).sum().sqrt()
        assert row[1].get_xlabel() == f'L2RE {relative:.3f}' and row[0].get_ylabel().startswith(f'step {step}')
    assert [ax.get_title() for ax in axes[0]] == ['truth', 'prediction', '|error|']
    assert figure.get_suptitle() == 'h of swe_pdb' and axes[2, 0].get_xlabel() == 'axis 1, 8 points'
    assert figures.scale_of_colours(truth - 0.8) == ((-(limit := (truth - 0.8).abs().max().item()), limit), 'RdBu_r')


def test_each_dataset_has_a_line_of_its_mean_d_and_of_the_mean_diagonal_of_its_T(plt):
    d, T = ({name: torch.rand(3, 2, *shape) for name in 'ab'} for shape in ((4,), (4, 4)))
    above, below = figures.plot_mappings(d, T).axes
    for name in 'ab':
        np.testing.assert_allclose(lines(above, name)[0], d[name].mean((0, 2)))
        kept = [[np.trace(T[name][n, l]) / 4 for n in range(3)] for l in range(2)]
        np.testing.assert_allclose(lines(below, name)[0], np.mean(kept, 1), rtol=1e-6)
    assert [label.get_text() for label in below.get_xticklabels()] == ['1\nmixer', '2\nMLP']


@pytest.mark.parametrize('space', [(16,), (8, 12), (8, 12, 6)])
def test_a_forecast_is_drawn_at_three_steps_and_in_one_dimension_along_all(plt, tmp_path, monkeypatch, space):
    monkeypatch.setattr(figures, 'save_figure', lambda folder, name, figure: drawn.append(figure))
    u, drawn = np.random.default_rng(0).random((5, *space)), []
    figures.draw_forecast(u, 'u of own', tmp_path)
    images = [ax.images[0].get_array() for ax in drawn[0].axes if ax.images]
    expected = {1: [u], 2: [u[0].T, u[2].T, u[4].T], 3: [u[t, ..., 3].T for t in (0, 2, 4)]}[len(space)]
    assert len(images) == len(expected) and all(map(np.array_equal, images, expected))


def test_every_command_draws_its_figures_whose_names_have_channel_and_trajectory(plt, tmp_path, monkeypatch, call):
    path = save(small_model(), write_test_sets(tmp_path), 'small/last.pt')
    draw, drawn = figures.draw_rollout, []
    monkeypatch.setattr(figures, 'draw_rollout', lambda *its: (drawn.append(its[1]), draw(*its)))
    for script, *flags in (
            (interpret, '--samples', 6),
            (evaluate, '--rollout', 3, '--datasets', 'own', '--trajectory', 1),
            (evaluate, '--datasets', 'coarse', '--trajectory', '2', '--channel', '0')):
        code, error, _ = call([*flags, '--checkpoint', path, '--device', 'cpu', '--figures', tmp_path / 'new'], script)
        assert code == 0, error
    truth = read(trajectories(tmp_path, 'own'), 1, 3, 6)[..., 0]
    np.testing.assert_array_equal(drawn[0][:, 0], truth)
    drawn = pictures(tmp_path / 'new')
    names = [f'{kind}_{name}' for kind, end in (('fields', 'png'), ('rollout', 'gif'))
             for name in (f'coarse_0_2.{end}', f'own_u_1.{end}')]
    assert sorted(drawn) == sorted([*names, 'kernels_small.png'])
    assert all(picture.size[0] > 300 for picture in drawn.values())
    assert drawn['rollout_own_u_1.gif'].n_frames == figures.FRAMES == 2, 'of three steps'
