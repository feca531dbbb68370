"""The animation of six equations, with random fields in the place of the solvers and of the network."""
from types import SimpleNamespace

import numpy as np
import torch

import configs
import evaluate
from lab import equations, figures
from sources import generate


def test_truth_is_above_and_the_prediction_below_with_y_upwards(plt, monkeypatch, call):
    solved, drawn = {}, []

    def simulate(plan, split, indices):
        shape = 1, plan.frames, 4, 6, len(configs.DATASETS[plan.name].channels)
        return solved.setdefault(plan.name, np.random.default_rng(len(solved)).random(shape))

    def rollout(model, u, steps, dataset):
        assert np.array_equal(u, solved[dataset][:, :5])
        return 1.5 * torch.from_numpy(solved[dataset][:, 5:])
    monkeypatch.setattr(evaluate, 'load', lambda path: SimpleNamespace(config=SimpleNamespace(frames=5)))
    monkeypatch.setattr(evaluate, 'rollout', rollout)
    monkeypatch.setattr(generate, 'simulate', simulate)
    monkeypatch.setattr(figures, 'animate', lambda path, plot, steps, duration: drawn.append(plot(2)))
    assert call([], equations)[0] == 0
    rows = np.array(drawn[0].axes).reshape(2, 6)
    for (name, channel, _), title, above, below in zip(equations.EQUATIONS, equations.EQUATIONS.values(), *rows):
        truth = solved[name][0, 6, ..., configs.DATASETS[name].channels.index(channel)]
        truth = truth if name == 'cfdbench' else truth.T                    # an image has y in its rows
        assert np.array_equal(above.images[0].get_array(), truth) and above.get_title() == title
        assert np.array_equal(below.images[0].get_array(), 1.5 * truth) and below.get_xlabel() == 'error 0.500'
