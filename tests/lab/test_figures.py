"""Every figure shows the numbers that it is given."""
import json
import math

import numpy as np
import pytest
import torch

import evaluate
from helpers import pictures, save, small_model, write_test_sets
from lab import figures, interpret
from runtime import checkpoint


def lines(ax, label=None):
    """The values (points,) of the lines of an axis, or of those with a label."""
    return [np.asarray(line.get_ydata(), float) for line in ax.lines if label in (None, line.get_label())]


def grey(colour):
    """The luminance of a colour, from 0, black, to 1."""
    from matplotlib.colors import to_rgb
    return np.dot(to_rgb(colour), (0.299, 0.587, 0.114))


def test_models_differ_in_grey_and_in_their_lines_and_marks(plt):
    styles = [style for _, _, style in figures.styled(dict.fromkeys(range(11)))]
    greys = np.array([grey(style['color']) for style in styles[:7]])
    assert greys[-1] < 0.85 and np.diff(greys).min() > 0.09, f'against white and one another: {greys}'
    assert len({(style['linestyle'], style['marker']) for style in styles}) == 11


@pytest.mark.slow
def test_every_figure_can_be_read_in_grey_and_at_half_size(plt):
    """Lines of one axes differ in more than colour, maps rise in lightness, and text has at least 5 pt at half size."""
    error = torch.rand(30, 5, dtype=torch.float64)
    curves = {'model': error, 'persistence': 2 * error}
    three = ['one', 'two', 'three']
    groups = ['ns2d_fno', 'swe_pdb']
    probe = {'groups': groups, 'confusion': [[3, 1], [0, 2]], 'group_of': dict(zip(groups, groups))}
    for figure in (
            figures.plot_rollout(dict.fromkeys(three, curves)),
            figures.plot_run([{'step': step, 'loss': 0.5, 'valid': 0.4, 'lr': 1e-3} for step in (1, 2)]),
            figures.plot_probe({'one': ({name: torch.rand(12, 4, 3, 3) for name in groups}, probe)}),
            figures.plot_mean_T({'one': dict(zip('abc', torch.rand(3, 4, 2, 2).tolist()))}),
            figures.plot_fields({'one': torch.rand(6, 2, 8, 12)}, [2, 5], 'h of swe_pdb')):
        figure.canvas.draw()
        for ax in figure.axes:
            looks = {}
            for line in ax.lines:
                dash, label = str(line._dash_pattern), str(line.get_label())
                if not label.startswith('_'):
                    looks.setdefault((line.get_linestyle(), dash, line.get_marker()), set()).add(label)
            assert all(len(names) == 1 for names in looks.values()), f'these differ in colour alone: {looks}'
            shapes = [str(dots.get_paths()[0].vertices) for dots in ax.collections
                      if type(dots).__name__ == 'PathCollection']
            assert len({*shapes}) == len(shapes)
            for image in ax.images:
                lightness = [grey(colour) for colour in image.get_cmap()(np.linspace(0, 1, 32))]
                assert np.diff(lightness).min() > 0, f'{image.get_cmap().name} has the same grey twice'
        texts = [text for text in figure.findobj(plt.Text) if text.get_visible() and text.get_text().strip()]
        assert len(texts) > 2 and min(text.get_fontsize() for text in texts) >= 10
        assert figure.get_figwidth() < 9


def test_the_rollout_figure_shows_median_and_quartiles_and_a_diverged_sample_is_the_worst(plt):
    error = torch.rand(30, 5, dtype=torch.float64)
    error[20:, 1], error[25:, 2] = math.nan, math.inf
    curves = {'model': error, 'persistence': 2 * error[:, :4]}
    ax, = figures.plot_rollout({'one': {**curves, 'model': error + 1}, 'two': curves}).axes
    worst = np.where(np.isnan(error.numpy()), np.inf, error.numpy())
    np.testing.assert_allclose(lines(ax, 'two')[0], np.sort(worst)[:, 2])
    np.testing.assert_allclose(lines(ax, 'one')[0], 1 + np.sort(worst)[:, 2])
    np.testing.assert_allclose(lines(ax, 'persistence')[0][:20], np.median(2 * worst[:20, :4], 1))
    _, below = figures.pyplot().subplots()
    falling = torch.tensor([[1., 2.], [-math.inf, -math.inf], [3., 4.]])
    figures.plot_median_and_quartiles(below, falling, '', color='grey')
    assert below.get_ylim()[0] > 0, 'what falls without bound is a gap too'
    shade, quartiles = ax.collections[1].get_paths()[0].vertices[:, 1], np.sort(worst)[:25, [1, 3]]
    np.testing.assert_allclose([shade.min(), shade.max()], [quartiles.min(), quartiles.max()])
    assert ax.get_yscale() == 'log' and ax.lines[-1].get_color() == 'grey'
    assert [ax.lines[i].get_color() for i in (0, 1)] == [*figures.COLOURS[:2]]


def test_the_animation_has_a_frame_for_each_step_with_truth_prediction_and_error(plt, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, 'FRAMES', 4)
    truth = torch.zeros(7, 8, 8)
    truth[:, 0, 0], truth[:, 1, 1] = -1., 1.
    two = truth.clone()
    two[4:] += 1.                                                   # an error in the third and fourth frame
    fields = {'one': torch.stack([truth, truth], 1), 'two': torch.stack([truth, two], 1)}
    figures.animate(tmp_path, 'rollout', fields, 'w')
    picture, = pictures(tmp_path).values()
    assert [*pictures(tmp_path)] == ['rollout.gif'] and picture.format == 'GIF' and picture.n_frames == 4
    frames = []
    for i in range(4):
        picture.seek(i)
        frames.append(np.array(picture.convert('L'), float))
    width = frames[0].shape[1] // 5                                 # truth, one, two and the errors of both
    panels = [[frame[80:-60, width * i + 15:width * (i + 1) - 15].mean() for i in range(5)] for frame in frames]
    for i in (0, 1, 3):                                             # truth, prediction and error do not change
        assert np.ptp([panel[i] for panel in panels]) < 2, panels
    for i in (2, 4):
        assert panels[2][i] > panels[1][i] + 20, panels
    assert not [*tmp_path.glob('*.part')]


def test_a_run_draws_its_curve(plt, tmp_path, call, refused):
    log = [{**dict.fromkeys(checkpoint.LOGGED, 1), 'step': step, 'loss': 1 / step, 'lr': 1e-3 * step}
           for step in (20, 40, 60)]
    log[1]['loss'] = None                                           # all steps of this line were skipped
    log[2]['valid'] = 0.25
    above, below = figures.plot_run(log).axes
    np.testing.assert_array_equal(lines(above, 'loss')[0], [1 / 20, 1 / 60])
    np.testing.assert_array_equal(lines(above, 'validation error')[0], [0.25])
    np.testing.assert_array_equal(lines(below)[0], [0.02, 0.04, 0.06])
    (tmp_path / 'log.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in log))
    assert call([tmp_path], figures) == (0, '', f'drew {tmp_path}/curve.png\n')
    assert pictures(tmp_path, '*.png')['curve.png'].format == 'PNG'
    refused([tmp_path / 'none'], f'{tmp_path}/none: no log.jsonl; name the folder of a run', figures)


def test_the_probe_figure_has_a_dot_a_window_and_crosses_for_what_is_unseen(plt):
    T = {name: 5. * g + torch.rand(12, 2, 3, 3, dtype=torch.float64) for g, name in enumerate(
        ('ns2d_fno_1e-3', 'ns2d_fno_1e-4', 'swe_pdb', 'wave_gauss'))}
    group_of = dict(zip(T, ('ns2d_fno', 'ns2d_fno', 'swe_pdb', 'wave_gauss')))
    seen = {name: group_of[name] for name in list(T)[:3]}
    rows = {'groups': ['ns2d_fno', 'swe_pdb'], 'group_of': seen, 'unseen': {'group_of': group_of}}
    trained = {name: T[name] for name in seen}, {name: rows[name] for name in ('groups', 'group_of')}
    left, right = figures.plot_probe({'with': (T, rows), 'without': trained}).axes
    assert [[len(dots.get_offsets()) for dots in ax.collections] for ax in (left, right)] == [[24, 12, 12], [24, 12]]
    names = [text.get_text() for text in left.get_legend().get_texts()]
    assert names == ['ns2d_fno', 'swe_pdb', 'wave_gauss, unseen']
    shapes = [str(dots.get_paths()[0].vertices) for dots in left.collections]
    assert len({*shapes}) == 3, 'each group has a mark of its own'
    again = figures.plot_probe({'with': (T, rows)}).axes[0]
    for one, other in zip(left.collections, again.collections):
        assert np.array_equal(one.get_offsets(), other.get_offsets())


def test_the_heat_maps_of_T_are_in_their_places_on_one_scale(plt):
    T, deeper = torch.rand(3, 4, 2, 2), torch.rand(3, 6, 2, 2) + 1
    models = {'small': dict(zip('abc', T.tolist())), 'large': dict(zip('abc', deeper.tolist()))}
    *axes, bar = figures.plot_mean_T(models).axes
    axes = np.array(axes).reshape(6, 6)
    assert bar.get_ylabel() == 'mean T (rows: results, columns: sources)'
    for line, rows in zip(axes, [*T, *deeper]):
        for ax, shown in zip(line, rows):
            np.testing.assert_allclose(ax.images[0].get_array(), shown, rtol=1e-6)
            assert ax.images[0].get_clim() == pytest.approx((T.min().item(), deeper.max().item())) and ax.get_visible()
        assert not any(ax.get_visible() for ax in line[len(rows):])
    assert [line[0].get_ylabel() for line in axes[2:4]] == ['small: c', 'large: a']


@pytest.mark.parametrize('signed', [True, False])
def test_truth_and_predictions_share_a_scale_and_errors_have_another(plt, signed):
    truth = torch.rand(6, 8, 12) - (0.3 if signed else 0)
    truth[0, 0, 0] = -0.01 if not signed else truth[0, 0, 0]                # a rounding error is no sign
    models = {'one': truth + torch.rand(6, 8, 12), 'two': truth - 0.5 * torch.rand(6, 8, 12)}
    models['two'][2] = math.inf
    fields = {name: torch.stack([truth, u], 1) for name, u in models.items()}
    figure = figures.plot_fields(fields, [2, 3, 20], 'h of swe_pdb')
    axes = np.array(figure.axes).reshape(3, 5)
    shown = [truth, *models.values(), *((u - truth).abs() for u in models.values())]
    bound = truth.abs().max()
    low, high = (-bound, bound) if signed else (truth.min(), truth.max())
    for row, step in zip(axes, (2, 3, 6)):
        for ax, u in zip(row, shown):
            np.testing.assert_array_equal(ax.images[0].get_array(), u[step - 1].T)
            assert ax.images[0].origin == 'lower'
            assert ax.images[0].get_clim() == ((0, (high - low) / 2) if ax in row[3:] else (low, high))
        error = ((models['one'] - truth)[step - 1] ** 2).sum().sqrt() / (truth[step - 1] ** 2).sum().sqrt()
        assert row[1].get_xlabel() == f'L2RE {error:.3f}' and row[0].get_xlabel() == row[4].get_xlabel() == ''
        assert row[0].get_ylabel() == f'step {step}'
    assert [ax.get_title() for ax in axes[0]] == ['truth', 'one', 'two', '|error| of one', '|error| of two']
    assert figure.get_suptitle() == 'h of swe_pdb'


@pytest.mark.slow
def test_every_command_draws_its_figures(plt, tmp_path, call):
    path = save(small_model(), write_test_sets(tmp_path), 'small/last.pt')
    for script, *flags in (interpret, '--samples', '6'), (evaluate, '--rollout', '4', '--datasets', 'own'):
        code, error, _ = call([*flags, '--checkpoint', path, '--device', 'cpu', '--figures',
                               tmp_path / 'figures'], script)
        assert code == 0, error
    drawn = pictures(tmp_path / 'figures')
    assert [*drawn] == ['fields_own.png', 'kernels.png', 'probe.png', 'rollout_own.gif', 'rollout_own.png']
    assert all(picture.size[0] > 300 for picture in drawn.values())
