"""Every benchmark on a small case. No assertion depends on how fast the machine is or how busy."""
import dataclasses
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import configs
from lab import bench

NANO = '--size', 'nano', '--device', 'cpu'


def test_ratios_are_medians_over_rounds_each_to_its_own_network(monkeypatch):
    seconds = {'aot': [1, 2, 3], 'plain': [2, 8, 6], 'peer': [4, 3, 4.], 'aot compiled': [3, 3, 3],
               'plain compiled': [6, 4, 2.]}
    monkeypatch.setattr(bench, 'function', lambda *_: lambda: None)
    monkeypatch.setattr(bench, 'paired', lambda runs, *_: {name: np.array(seconds[name]) for name in runs})
    rows = bench.compare('forward', seconds, SimpleNamespace(repeats=3), None, torch.device('cpu'))
    assert all(0 <= row.pop('first s') < 1 for row in rows.values())
    # the ratios of aot are 1/2 1/4 1/2 and 1/4 2/3 3/4
    assert rows['aot'] == pytest.approx({'ms': 2000, 'mean ms': 2000, 'of plain': 0.5, 'of peer': 2 / 3})
    assert rows['plain']['mean ms'] == pytest.approx(16000 / 3)
    assert (rows['peer']['of plain'], rows['peer']['of peer']) == (pytest.approx(2 / 3), 1)
    assert (rows['aot compiled']['of plain'], rows['aot compiled']['of peer']) == (0.75, 0.75)


def test_paired_runs_take_turns_and_the_warm_up_does_not_count(monkeypatch):
    order, now = [], [0.]

    def compute(name, seconds):
        order.append(name)
        now[0] += 30 if len(order) <= 4 else seconds
    monkeypatch.setattr(bench.time, 'perf_counter', lambda: now[0])
    seconds = bench.paired({'a': lambda: compute('a', 2), 'b': lambda: compute('b', 4)}, 3, torch.device('cpu'),
                           warmup=2)
    assert ''.join(order) == 'ababababab'
    assert {name: list(values) for name, values in seconds.items()} == {'a': [2] * 3, 'b': [4] * 3}


# it takes the arguments of DPOT's DPOTNet, but is a single layer
PEER = """
import torch
class DPOTNet(torch.nn.Module):
    def __init__(self, img_size, patch_size, mixing_type, in_channels, out_channels, in_timesteps, out_timesteps,
                 n_blocks, embed_dim, out_layer_dim, depth, modes, mlp_ratio, n_cls, normalize, act, time_agg):
        super().__init__()
        assert (img_size, patch_size, in_timesteps, embed_dim, mlp_ratio, depth) == (64, 4, 5, 64, 2.0, 3)
        self.layer = torch.nn.Linear(in_channels, out_channels)
    def forward(self, x):
        assert x.shape[1:] == (64, 64, 5, 4) and x.dtype == torch.float32
        return self.layer(x[:, :, :, -1:]), None, x.new_tensor(0.3)
"""


@pytest.mark.parametrize('experts', [0, 5])
def test_step_compares_aot_plain_and_the_peer(experts, tmp_path, monkeypatch, call):
    nano, recipe = configs.SIZES['nano']
    monkeypatch.setitem(configs.SIZES, 'nano', (dataclasses.replace(nano, experts=experts), recipe))
    (tmp_path / 'models').mkdir()
    name = 'moepot' if experts else 'dpot'
    (tmp_path / f'models/{name}.py').write_text(PEER.replace('DPOTNet', 'MoEPOTNet') if experts else PEER)
    code, error, printed = call(['step', *NANO, '--peer', tmp_path, '--batch_size', 2, '--repeats', 3], bench)
    for module in ('models', f'models.{name}'):
        sys.modules.pop(module, None)           # a real checkout has modules of the same names
    assert code == 0 and str(tmp_path) not in sys.path, error
    report = json.loads(printed.splitlines()[-1])
    assert (report['form'], report['dtype']) == ('fast', 'fp32')
    for kind in ('forward', 'train step'):
        rows = report[kind]
        assert list(rows) == ['aot', 'plain', 'peer'] and rows['plain']['of plain'] == rows['peer']['of peer'] == 1
        assert all(row['ms'] > 0 for row in rows.values())


def test_latency_is_the_mean_after_a_warm_up_of_every_mode_that_is_asked_for(monkeypatch, call):
    calls = []
    monkeypatch.setattr(bench, 'function', lambda kind, name, *_: lambda: calls.append((kind, name)))
    code, error, printed = call(['latency', *NANO, '--compile', '--graphs'], bench)
    report = json.loads(printed.splitlines()[-1])
    assert code == 0 and report['batch_size'] == 1, error
    names = ['aot', 'plain', 'aot compiled', 'plain compiled', 'aot graph', 'plain graph']
    assert list(report['latency']) == names and all(row['mean ms'] >= 0 for row in report['latency'].values())
    assert all(calls.count(('forward', name)) == 1 + 5 + 50 for name in names), 'on a CPU not 1200'
