"""The metrics of evaluate.py as named functions of sums of squares; this file needs only torch.

A new metric is one function and its line in METRICS, from where it comes into every table and every JSON file.

Shapes: B trajectories, F predicted frames, C'' field channels that evolve, `points` the grid points that are scored.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch

from data import norm, relative  # noqa: F401


class Comparison(NamedTuple):
    """What a metric is computed from: a prediction u beside the truth v, at the points x where they are scored."""
    error: torch.Tensor         # (F, B, C'') float64: sum_x (u - v)^2 of each frame
    size: torch.Tensor          # (F, B, C'') float64: sum_x v^2
    deviation: torch.Tensor     # (F, B, C'') float64: sum_x (v - mean_x v)^2
    points: int                 # the number of points x
    prediction: torch.Tensor    # (B, *points, C''): u of the last frame
    target: torch.Tensor        # (B, *points, C''): v of the last frame

    def over(self, window):
        """The same sums of the frames first..end-1 alone, window (first, end)."""
        return self._replace(**{name: getattr(self, name)[slice(*window)] for name in ('error', 'size', 'deviation')})


def l2re(error, size):
    """Relative L2 error sqrt(error / size) of float64 sums of squares (..., C) -> (...), the mean over the channels."""
    return relative(error, size).sqrt().mean(-1)


def relative_l1(prediction, target):
    """||prediction - target||_1 / ||target||_1 of each sample, over all points and channels: (B, ..., C) -> (B,)."""
    return relative(*(x.flatten(1).abs().sum(1) for x in (prediction - target, target)))


def l2re_over_all_frames(compared):
    """sqrt(sum_tx (u-v)^2 / sum_tx v^2), the mean over the channels: (B,). DPOT's l2_full."""
    return l2re(compared.error.sum(0), compared.size.sum(0))


def nrmse(compared):
    """mean_t sqrt(mean_x (u-v)^2 / mean_x v^2), the mean over the channels: (B,). PDEBench's nRMSE, DPOT's l2_step."""
    return l2re(compared.error, compared.size).mean(0)


def vrmse(compared):
    """mean_t sqrt(mean_x (u-v)^2 / (var_x v + 1e-7)), the mean over the channels: (B,). The Well's VRMSE.

    As there, var_x divides by one less than the number of points, and the 1e-7 is in the units of the field: for a
    field of size 1e-4 or less this is no relative error. It is nearly 1 for a prediction of the mean of each frame,
    and huge where a true frame is constant.
    """
    variance = compared.deviation / (compared.points - 1) + 1e-7
    return (compared.error / compared.points / variance).sqrt().mean(-1).mean(0)


class Metric(NamedTuple):
    """One entry of METRICS."""
    title: str                  # in tables
    of: str                     # the prediction that it scores: 'rollout' or 'one step', see `evaluate.score`
    function: Callable          # Comparison -> (B,)
    window: tuple = (0, None)   # the predicted frames that it scores: the first, and the one after the last

    @property
    def scored(self):
        """What it scores, in words: 'rollout', or 'rollout 6:12'."""
        return self.of + (' {}:{}'.format(*self.window) if self.window[1] else '')


METRICS = {                     # a new metric is a function above and a line here; its key is its name in JSON
    'rollout': Metric('L2RE', 'rollout', l2re_over_all_frames),
    'step': Metric('L2RE', 'one step', nrmse),
    'nrmse': Metric('nRMSE', 'rollout', nrmse),
    'vrmse': Metric('VRMSE', 'rollout', vrmse),
    'l1': Metric('relative L1', 'one step', lambda compared: relative_l1(compared.prediction, compared.target)),
}
MAIN = ('rollout', 'step')      # always printed; the others with --metrics
SUFFIXES = ('', '_persistence')                 # of names: the model's number, and that of persistence


def over_windows(windows):
    """{name: Metric} of the METRICS of a rollout in each window (first, end) of it: 'vrmse_6:12' and so on.

    As in the Well, a window holds the predicted frames first..end-1, counted from 0.
    """
    return {f'{name}_{first}:{end}': metric._replace(window=(first, end))
            for first, end in windows for name, metric in METRICS.items() if metric.of == 'rollout'}
