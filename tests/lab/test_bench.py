"""Every benchmark on a small case. No assertion depends on how fast the machine is or how busy."""
import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import configs

import h5py
import numpy as np
import pytest
import torch

import nets
from conftest import ROOT
from lab import bench
from runtime import terminal
from sources.pdes.navier_stokes import navier_stokes
from test_train import main


def test_bench_busy_reports_seconds_idle_and_busy(monkeypatch, capsys):
    monkeypatch.setenv('GOMP_SPINCOUNT', '1000')                # the benchmark changes it
    flags = ['busy', '--steps', 1, '--others', 1, '--spins', 1000, '--repeats', 1, '--threads', 2]
    code, error, printed = main(flags, monkeypatch, capsys, bench)
    assert code == 0, error
    rows = json.loads(printed.splitlines()[-1])['training steps']
    assert list(rows) == ['GOMP_SPINCOUNT 1000']
    row = rows['GOMP_SPINCOUNT 1000']
    assert list(row) == ['idle, s', 'idle, of the first', 'busy, s', 'busy, of the first'] and min(row.values()) > 0
    assert row['idle, of the first'] == row['busy, of the first'] == 1


def test_the_benchmarks_scheme_converges_to_our_solution_with_first_order():
    x = torch.arange(32, dtype=torch.float64) / 32 * 2 * math.pi
    w0 = (torch.sin(x)[:, None] * torch.cos(2 * x) + torch.cos(x[:, None] + x))[None]
    exact = navier_stokes(w0, 1e-3, 2, 0.5, steps=40)
    errors = [(bench.euler(w0, 1e-3, 2, 0.5, tau=tau) - exact).norm() / exact.norm() for tau in (0.02, 0.01, 0.005)]
    assert errors[-1] < 1e-3 and all(abs(a / b - 2) < 0.05 for a, b in zip(errors, errors[1:])), errors


def test_bench_generate_reports_errors_and_consistent_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['bench', 'generate', '--trajectories', '1', '--units', '1', '--step', '0.01',
                                      '--device', 'cpu', '--json', str(tmp_path / 'speed.json')])
    terminal.cli(bench.main)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads((tmp_path / 'speed.json').read_text())
    assert 0 < 3 * found['error'] < found['benchmark_error'] < 1e-2
    ours, theirs = found['seconds_per_trajectory'], found['benchmark_seconds_extrapolated']
    assert found['ratio'] == pytest.approx(theirs / ours) and min(ours, theirs) > 0 and found['frames'] == 50
    assert found['paper_minutes'] == pytest.approx(1200 * ours / 60)
    assert found['benchmark_paper_hours'] == pytest.approx(1200 * theirs / 3600)


@pytest.mark.parametrize('flags', [
    'train --minutes 0', 'generate --units 0', 'generate --step 0', 'generate --family swe_pdb',
    'loader --datasets swe', 'loader --repeats 0', 'loader --datasets cfdbench --peer nowhere',
    'step --batch_size 0', 'step --peer nowhere', 'step --peer . --resolution 64', 'step --resolution 60x61',
    'memory --repeats 0', 'latency --threads -1', 'latency --peak_tflops -1', 'latency --form slow',
    'rollout --steps 0', 'rollout --peer .', 'rollout --device cuda:99', 'sinkhorn --n 4 0', 'sinkhorn --repeats 0',
    'sinkhorn --peer nowhere', 'train --short 19'])
def test_a_wrong_flag_gives_one_line_and_exit_code_2(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['bench', *flags.split()])
    with pytest.raises(SystemExit) as stop:
        terminal.cli(bench.main)
    assert stop.value.code == 2 and capsys.readouterr().err.count('\n') == 1


def test_bench_loader_reports_all_datasets_and_their_mixture(tmp_path, monkeypatch, capsys):
    threads = torch.get_num_threads()
    flags = ['loader', '--datasets', 'ns2d_fno_1e-5', 'cfdbench', '--trajectories', '2', '--repeats', '1',
             '--data', tmp_path]
    code, error, printed = main(flags, monkeypatch, capsys, bench)
    torch.set_num_threads(threads)
    assert code == 0, error
    found = json.loads(printed.splitlines()[-1])
    assert 'CPU threads' in printed and 'peer: not measured; give its checkout as --peer DIR' in printed
    assert list(found['samples/s']) == ['ns2d_fno_1e-5', 'cfdbench', 'mixture']
    assert all(set(row) == {'ours', 'model'} and min(row.values()) > 0 for row in found['samples/s'].values())
    assert not list(tmp_path.iterdir())


def test_the_files_for_the_peer_hold_the_same_fields_in_its_order_of_axes(tmp_path):
    values = np.random.default_rng(0).standard_normal((2, 12, 8, 8, 3), np.float32)
    for name in ('swe_pdb', 'cfdbench', 'ns2d_fno_1e-5'):
        path = bench.write_for_peer(tmp_path, name, values)
        with h5py.File(path / 'data_1.hdf5' if path.is_dir() else path) as file:
            theirs = file['data'][:] if path.is_dir() else file['data'][1]
        assert (theirs == (values[1, ..., 0] if 'fno' in name else values[1]).swapaxes(0, 1).swapaxes(1, 2)).all()


def test_bench_sinkhorn_reports_microseconds_and_ratios_to_the_loop(tmp_path, monkeypatch, capsys):
    code, error, printed = main(['sinkhorn', '--batch', 2048, '--n', 3, 4, '--repeats', 3, '--device', 'cpu', '--json',
                                 tmp_path / 'times.json'], monkeypatch, capsys, bench)
    assert code == 0, error
    assert 'peer: not measured' in printed
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads((tmp_path / 'times.json').read_text())
    assert list(found['microseconds']) == [f'n = {n}, {what}' for n in (3, 4) for what in ('forward', 'both')]
    for row in found['microseconds'].values():
        assert min(row.values()) > 0 and set(row) == {'loop', 'auto', 'auto_ratio'}


# ------------------------------------------------------------------------------------------------ the network

@pytest.mark.parametrize('compiled', [False, True])
def test_flops_are_those_of_the_eager_products(compiled):
    layer = torch.nn.Linear(4, 8)
    if compiled:
        layer.compile(backend='eager')
    u = torch.randn(3, 4)
    layer(u)
    assert bench.flops(lambda: layer(u)) == 2 * 3 * 4 * 8
    assert bench.flops(lambda: layer(u).sum().backward()) == 2 * 2 * 3 * 4 * 8       # u needs no gradient


def test_flops_of_the_network_are_dominated_by_the_products_of_its_tokens():
    config = configs.model('nano', resolution=(16, 32), residual='plain')
    model, u = nets.build(config), torch.randn(3, config.frames, 16, 32, config.channels)
    tokens, D = 3 * 4 * 8, config.width
    mlp = config.depth * 2 * 2 * tokens * D * config.mlp
    embedding = 2 * tokens * config.frames * (4 * 4 * 4 + D) * (4 * 4 + 3)
    assert mlp + embedding < bench.flops(lambda: model(u)) < 4 * (mlp + embedding)


def test_ratios_are_medians_over_rounds_each_to_its_own_network():
    names = ['aot', 'plain', 'dpot', 'aot compiled', 'plain compiled']
    seconds = dict(zip(names, np.array([[1, 2, 4, 3, 6.], [2, 8, 3, 3, 4], [3, 6, 4, 3, 2]]).T))
    rows = bench.ratios(seconds)
    # the ratios of aot are 1/2 1/4 1/2 and 1/4 2/3 3/4
    assert rows['aot'] == pytest.approx({'ms': 2000, 'of plain': 0.5, 'of DPOT': 2 / 3})
    assert rows['dpot'] == pytest.approx({'ms': 4000, 'of plain': 2 / 3, 'of DPOT': 1})
    assert rows['aot compiled'] == pytest.approx({'ms': 3000, 'of plain': 0.75, 'of DPOT': 0.75})
    del seconds['dpot']
    assert list(bench.ratios(seconds)['plain']) == ['ms', 'of plain']


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
        return self.layer(x[:, :, :, -1:]) * held[0], None
"""


@pytest.fixture
def peer(tmp_path, monkeypatch):
    (tmp_path / 'DPOT/models').mkdir(parents=True)
    (tmp_path / 'DPOT/models/dpot.py').write_text(PEER)
    moe_pot = PEER.replace('DPOTNet', 'MoEPOTNet').replace('held[0], None', 'held[0], None, x.new_tensor(0.3)')
    (tmp_path / 'DPOT/models/moepot.py').write_text(moe_pot)
    yield tmp_path / 'DPOT'
    for name in ('models', 'models.dpot', 'models.moepot'):
        sys.modules.pop(name, None)             # a real checkout has modules of the same names


def benchmark(flags, monkeypatch, capsys):
    flags = ['--size', 'nano', '--resolution', 32, '--device', 'cpu', '--threads', 1, *flags]
    code, error, printed = main([flags.pop(8), *flags], monkeypatch, capsys, bench)
    assert code == 0, error
    return json.loads(printed.splitlines()[-1]), printed


def test_bench_step_compares_aot_plain_and_the_peer(peer, monkeypatch, capsys):
    found, printed = benchmark(['step', '--peer', peer, '--batch_size', 2, '--repeats', 3, '--peak_tflops', 0.5],
                               monkeypatch, capsys)
    assert found['peak'] == [0.5e12, 'as given'] and 'not measured' not in printed and 'GFLOP' in printed
    assert (found['form'], found['resolution'], found['dtype'], found['threads']) == ('fast', '32x32', 'fp32', 1)
    model, u = nets.build(configs.model('nano', resolution=32, residual='plain')), torch.randn(2, 5, 32, 32, 4)
    for kind, training in (('forward', False), ('train step', True)):
        rows = found[kind]
        assert list(rows) == ['aot', 'plain', 'dpot'] and rows['plain']['of plain'] == rows['dpot']['of DPOT'] == 1
        plain, work = rows['plain'], bench.flops(lambda: model(u).sum().backward() if training else model(u))
        assert plain['samples/s'] == pytest.approx(2000 / plain['ms']) and plain['GFLOP'] == work / 1e9
        assert plain['of peak'] == pytest.approx(work / 0.5e12 / plain['ms'] * 1000)
        assert rows['aot']['GFLOP'] > plain['GFLOP'] and 'limit ms' not in plain
        # a layer of 4 x 4 on 2 * 32 * 32 tokens, whose input has no gradient
        assert rows['dpot']['GFLOP'] * 1e9 == 2 * 2048 * 16 * (1 + training)
    code, error, _ = main(['step', '--peer', peer, '--resolution', '64x32'], monkeypatch, capsys, bench)
    assert code == 2 and error.count('\n') == 1 and 'DPOT takes square grids' in error


def test_bench_step_of_a_size_with_experts_takes_moe_pots_code_as_the_peer(peer, monkeypatch, capsys):
    nano, recipe = configs.SIZES['nano']
    monkeypatch.setitem(configs.SIZES, 'nano', (dataclasses.replace(nano, experts=5), recipe))
    found, _ = benchmark(['step', '--peer', peer, '--batch_size', 2, '--repeats', 1, '--peak_tflops', 1], monkeypatch,
                         capsys)
    for kind, products in (('forward', 1), ('train step', 2)):
        rows = found[kind]
        assert list(rows) == ['aot', 'plain', 'moepot'] and rows['moepot']['of MoE-POT'] == 1
        assert rows['aot']['of MoE-POT'] > 0 and rows['moepot']['GFLOP'] * 1e9 == 2 * 2048 * 16 * products
    code, error, _ = main(['step', '--size', 'moe-tiny', '--peer', peer, '--resolution', '64x32'], monkeypatch, capsys,
                          bench)
    assert code == 2 and error.count('\n') == 1 and 'MoE-POT takes square grids' in error


def test_bench_latency_has_the_papers_column_and_says_that_the_peer_is_missing(monkeypatch, capsys):
    count, rounds = [], bench.paired
    monkeypatch.setattr(bench, 'paired', lambda runs, repeats, *_, warmup=1, **__: rounds(
        {name: lambda call=call, name=name: (count.append(name), call()) for name, call in runs.items()}, repeats,
        *_, warmup=warmup, **__))
    small = configs.model('tiny', resolution=64, width=64, mlp=64, depth=1)       # only the paper's figures are of tiny
    monkeypatch.setitem(configs.SIZES, 'tiny', (small, configs.recipe('tiny')))
    flags = ['latency', '--size', 'tiny', '--repeats', 2, '--form', 'paper']
    found, printed = benchmark(flags, monkeypatch, capsys)
    assert 'peer: not measured; give its checkout as --peer DIR' in printed and 'large product' in found['peak'][1]
    assert count.count('aot') == count.count('plain') == 50 + 2             # warm-up and passes
    rows = found['latency']
    assert list(rows) == ['aot', 'plain'] and found['batch_size'] == 1 and found['form'] == 'paper'
    for name, ms in (('aot', 5.491), ('plain', 5.317)):
        assert rows[name]['paper ms'] == ms and rows[name]['of paper'] == pytest.approx(rows[name]['mean ms'] / ms)
        assert rows[name]['mean ms'] == pytest.approx(rows[name]['ms'])     # two passes have one mean and median


def test_bench_memory_finds_what_a_step_holds_even_if_this_process_is_large(peer, monkeypatch, capsys):
    torch.ones(10 ** 8)                         # getrusage of a new process would start from this peak
    rows = benchmark(['memory', '--peer', peer, '--batch_size', 8], monkeypatch, capsys)[0]['memory']
    assert 200 <= rows['dpot']['MB'] < 260 and 0 < rows['aot']['MB'] < 150, rows
    assert rows['aot']['of plain'] == pytest.approx(rows['aot']['MB'] / rows['plain']['MB'])
    assert rows['aot']['of DPOT'] == pytest.approx(rows['aot']['MB'] / rows['dpot']['MB'])
    assert all(row['first step s'] > 0 for row in rows.values())


def test_bench_rollout_reports_both_and_their_ratio(monkeypatch, capsys):
    found = benchmark(['rollout', '--batch_size', 2, '--steps', 4, '--dtype', 'bf16'], monkeypatch, capsys)[0]
    rows = found['one step']
    assert found['steps'] == 4 and found['dtype'] == 'bf16'
    assert rows['rollout']['ms'] > 0 and rows['rollout']['of forward'] > 0 and rows['forward']['of forward'] == 1


def test_bench_gpu_saves_each_row_and_goes_on_after_one_that_fails(tmp_path, monkeypatch, capsys):
    def rows(minutes, **programs):
        with monkeypatch.context() as patch:
            patch.setattr(bench, 'gpu_rows', lambda *_: {name: ['-c', text] for name, text in programs.items()})
            flags = ['gpu', '--minutes', minutes, '--json', tmp_path / 'gpu.json']
            code, error, printed = main(flags, patch, capsys, bench)
        assert code == 0, error
        table = json.loads(printed.splitlines()[-1])['rows']
        assert json.loads((tmp_path / 'gpu.json').read_text())['rows'] == table
        return table

    assert rows(8, fails='print("begun"); raise SystemExit(3)', works='print("done")') == {
        'fails': {'exit code': 3, 'last line': 'begun'}, 'works': {'exit code': 0, 'last line': 'done'}}
    last_line = 'not finished within 0.002 minutes'
    assert rows(0.002, endless='while True: pass', late='') == dict.fromkeys(
        ('endless', 'late'), {'exit code': None, 'last line': last_line})


def test_bench_refuses_a_file_that_is_not_json_before_it_measures(tmp_path, monkeypatch, capsys):
    (tmp_path / 'last.pt').write_text('weights')
    code, error, printed = main(['sinkhorn', '--json', tmp_path / 'last.pt'], monkeypatch, capsys, bench)
    assert code == 2 and not printed and error == f'error: --json {tmp_path}/last.pt: the name must end in .json\n'
    assert (tmp_path / 'last.pt').read_text() == 'weights'


def test_every_row_of_bench_gpu_is_a_command_that_exists(monkeypatch, capsys):
    for name, (script, *flags) in bench.gpu_rows(SimpleNamespace(peer=''), ROOT).items():
        if script != '-m':
            module = importlib.import_module(Path(script).stem)
            code, error, _ = main([*flags, '--help'], monkeypatch, capsys, module)
            assert code == 0, (name, error)
