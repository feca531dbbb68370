"""Every benchmark on a small case. No assertion depends on how fast the machine is or how busy."""
import dataclasses
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import configs
from helpers import main
from lab import bench
from nets.build import build


def benchmark(flags, monkeypatch, capsys):
    """The report of a command, and all that it printed."""
    code, error, printed = main([*flags, '--device', 'cpu'], monkeypatch, capsys, bench)
    assert code == 0, error
    return json.loads(printed.splitlines()[-1]), printed


def test_bench_loader_reports_the_samples_of_a_mixture(tmp_path, monkeypatch, capsys):
    flags = ['loader', '--datasets', 'ns2d_fno_1e-5', 'cfdbench', '--repeats', 1, '--json', tmp_path / 'times.json']
    report, printed = benchmark(flags, monkeypatch, capsys)
    row = report['samples/s']['mixture']
    assert report == json.loads((tmp_path / 'times.json').read_text()) and report['batch_size'] == 20
    assert 'CPU threads' in printed and min(row.values()) > 0
    assert list(row) == ['0 threads', '1 threads', '2 threads', '4 threads']


@pytest.mark.parametrize('compiled', [False, True])
def test_flops_are_those_of_the_eager_products(compiled):
    layer = torch.nn.Linear(4, 8)
    if compiled:
        layer.compile(backend='eager')
    u = torch.randn(3, 4)
    layer(u)
    assert bench.flops(lambda: layer(u)) == 2 * 3 * 4 * 8
    assert bench.flops(lambda: layer(u).sum().backward()) == 2 * 2 * 3 * 4 * 8       # u needs no gradient


def test_ratios_are_medians_over_rounds_each_to_its_own_network(monkeypatch):
    seconds = {'aot': [1, 2, 3], 'plain': [2, 8, 6], 'peer': [4, 3, 4.], 'aot compiled': [3, 3, 3],
               'plain compiled': [6, 4, 2.]}
    monkeypatch.setattr(bench, 'paired', lambda runs, *_: {name: np.array(seconds[name]) for name in runs})
    monkeypatch.setattr(bench, 'flops', lambda call: 3e9)
    rows = bench.compare(dict.fromkeys(seconds, lambda: None), SimpleNamespace(repeats=3, batch_size=8), None)
    assert all(0 <= row.pop('first s') < 1 for row in rows.values())
    # the ratios of aot are 1/2 1/4 1/2 and 1/4 2/3 3/4
    assert rows['aot'] == pytest.approx({'ms': 2000, 'mean ms': 2000, 'of plain': 0.5, 'of peer': 2 / 3,
                                         'samples/s': 4, 'GFLOP': 3})
    assert rows['plain']['mean ms'] == pytest.approx(16000 / 3)
    assert (rows['peer']['of plain'], rows['peer']['of peer']) == (pytest.approx(2 / 3), 1)
    assert (rows['aot compiled']['of plain'], rows['aot compiled']['of peer']) == (0.75, 0.75)


def test_paired_runs_take_turns_and_the_warm_up_does_not_count(monkeypatch):
    order, now = [], [0.]

    def compute(name, seconds):
        order.append(name)
        now[0] += 30 if len(order) <= 4 else seconds
    for clock in ('process_time', 'perf_counter'):
        monkeypatch.setattr(bench.time, clock, lambda: now[0])
    seconds = bench.paired({'a': lambda: compute('a', 2), 'b': lambda: compute('b', 4)}, 3, torch.device('cpu'),
                           warmup=2)
    assert ''.join(order) == 'ababababab'
    assert {name: list(values) for name, values in seconds.items()} == {'a': [2] * 3, 'b': [4] * 3}


# it takes the arguments of DPOT's DPOTNet, but is a single layer that holds 200 MB while it runs
PEER = """
import torch
class DPOTNet(torch.nn.Module):
    def __init__(self, img_size, patch_size, mixing_type, in_channels, out_channels, in_timesteps, out_timesteps,
                 n_blocks, embed_dim, out_layer_dim, depth, modes, mlp_ratio, n_cls, normalize, act, time_agg):
        super().__init__()
        assert (img_size, patch_size, in_timesteps, embed_dim, mlp_ratio, depth) == (32, 4, 5, 64, 2.0, 3)
        self.layer = torch.nn.Linear(in_channels, out_channels)
    def forward(self, x):
        assert x.shape[1:] == (32, 32, 5, 4) and x.dtype == torch.float32 and x.is_contiguous()
        held = torch.ones(50_000_000)
        return self.layer(x[:, :, :, -1:]) * held[0], None, x.new_tensor(0.3)
"""
NANO = '--size', 'nano', '--resolution', 32


@pytest.fixture
def peer(tmp_path):
    (tmp_path / 'models').mkdir()
    (tmp_path / 'models/dpot.py').write_text(PEER)
    (tmp_path / 'models/moepot.py').write_text(PEER.replace('DPOTNet', 'MoEPOTNet'))
    yield tmp_path
    for name in ('models', 'models.dpot', 'models.moepot'):
        sys.modules.pop(name, None)             # a real checkout has modules of the same names


@pytest.mark.slow
@pytest.mark.parametrize('experts', [0, 5])
def test_bench_step_compares_aot_plain_and_the_peer(experts, peer, monkeypatch, capsys):
    nano, recipe = configs.SIZES['nano']
    monkeypatch.setitem(configs.SIZES, 'nano', (dataclasses.replace(nano, experts=experts), recipe))
    torch.ones(10 ** 8)                         # getrusage of a new process would start from this peak
    report, printed = benchmark(['step', *NANO, '--peer', peer, '--batch_size', 2, '--repeats', 3], monkeypatch, capsys)
    assert (report['form'], report['resolution'], report['dtype']) == ('fast', '32x32', 'fp32') and 'GFLOP' in printed
    model, u = build(configs.model('nano', resolution=32, residual='plain')), torch.randn(2, 5, 32, 32, 4)
    for kind, training in (('forward', False), ('train step', True)):
        rows = report[kind]
        assert list(rows) == ['aot', 'plain', 'peer'] and rows['plain']['of plain'] == rows['peer']['of peer'] == 1
        plain, work = rows['plain'], bench.flops(lambda: model(u).sum().backward() if training else model(u))
        assert plain['samples/s'] == pytest.approx(2000 / plain['ms'])
        assert rows['aot']['GFLOP'] > plain['GFLOP'] and (experts or plain['GFLOP'] == work / 1e9)
        # a layer of 4 x 4 on 2 * 32 * 32 tokens, whose input has no gradient
        assert rows['peer']['GFLOP'] * 1e9 == 2 * 2048 * 16 * (1 + training)
    memory = {name: row['peak MB'] for name, row in report['train step'].items()}
    assert 200 <= memory['peer'] < 260 and 0 < memory['aot'] < 150, memory


def test_bench_step_of_the_compiled_train_step_alone(monkeypatch, capsys):
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda module, mode: None)      # Inductor takes a minute
    flags = ['step', *NANO, '--train', '--compile', '--batch_size', 1, '--repeats', 1]
    assert list(benchmark(flags, monkeypatch, capsys)[0]['train step']) == ['aot', 'plain']


def test_bench_latency_warms_up_and_reports_the_mean(monkeypatch, capsys):
    calls, rounds = [], bench.paired
    monkeypatch.setattr(bench, 'paired', lambda runs, *args, **options: rounds(
        {name: lambda call=call, name=name: (calls.append(name), call()) for name, call in runs.items()}, *args,
        **options))
    report, _ = benchmark(['latency', *NANO, '--form', 'paper'], monkeypatch, capsys)
    assert calls.count('aot') == calls.count('plain') == 5 + 50, 'warm-up and passes, on a CPU not 1200'
    rows = report['latency']
    assert list(rows) == ['aot', 'plain'] and report['batch_size'] == 1 and report['form'] == 'paper'
    assert all(row['mean ms'] > 0 for row in rows.values())
