"""The speed script on a small case: what it reports must be what the runs logged."""
import json
import math
import sys

import pytest
import torch

import bench
import configs
import generate
from test_train import run, travelling, write
from conftest import ROOT


def test_bench_train_reports_what_the_runs_logged(tmp_path):
    for split, N in (('train', 4), ('test', 2)):
        write(tmp_path / 'data', 'waves', travelling(N, 9, 16, 1, 0.4), split)
    done = run(str(ROOT / 'bench.py'), 'train', '--size', 'nano', '--resolution', '16', '--batch_size', '2',
               '--minutes', '0.001', '--short', '20', '--no-compile', '--device', 'cpu',
               '--data', str(tmp_path / 'data'), '--out', str(tmp_path / 'out'))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    logs = {name: [json.loads(line) for line in (tmp_path / 'out' / name / 'log.jsonl').read_text().splitlines()]
            for name in ('fp32', 'bf16', 'long')}
    gaps = [abs(b['loss'] / a['loss'] - 1) for a, b in zip(logs['fp32'], logs['bf16'])]
    assert found['largest_loss_difference'] == max(gaps) and 0 < max(gaps) < 0.05
    assert found['steps'] == logs['long'][-1]['step'] and found['last_loss'] == logs['long'][-1]['loss']
    assert found['ratio'] == bench.rate(logs['long']) / bench.rate(logs['fp32'])
    one, two = found['one_step_fp32']['waves'], found['one_step_bf16']['waves']
    assert one != two and abs(two / one - 1) < 0.05


def test_the_benchmarks_scheme_tends_to_our_solution_in_first_order():
    x = torch.arange(32, dtype=torch.float64) / 32 * 2 * math.pi
    w0 = (torch.sin(x)[:, None] * torch.cos(2 * x) + torch.cos(x[:, None] + x))[None]
    exact = generate.navier_stokes(w0, 1e-3, 2, 0.5, steps=40)
    errors = [(bench.euler(w0, 1e-3, 2, 0.5, tau=tau) - exact).norm() / exact.norm() for tau in (0.02, 0.01, 0.005)]
    assert errors[-1] < 1e-3 and all(abs(a / b - 2) < 0.05 for a, b in zip(errors, errors[1:])), errors


def test_bench_generate_reports_errors_and_consistent_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['bench.py', 'generate', '--trajectories', '1', '--units', '1', '--step', '0.01',
                                      '--device', 'cpu', '--json', str(tmp_path / 'speed.json')])
    configs.cli(bench.main)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads((tmp_path / 'speed.json').read_text())
    assert 0 < 3 * found['error'] < found['benchmark_error'] < 1e-2
    ours, theirs = found['seconds_per_trajectory'], found['benchmark_seconds_extrapolated']
    assert found['ratio'] == theirs / ours > 1 and found['frames'] == 50
    assert found['paper_minutes'] == pytest.approx(1200 * ours / 60)
    assert found['benchmark_paper_hours'] == pytest.approx(1200 * theirs / 3600)


@pytest.mark.parametrize('flags', ['train --minutes 0', 'generate --units 0', 'generate --step 0',
                                   'generate --family swe_pdb'])
def test_a_bad_flag_is_one_line(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['bench.py', *flags.split()])
    with pytest.raises(SystemExit) as stop:
        configs.cli(bench.main)
    assert stop.value.code == 2 and capsys.readouterr().err.count('\n') == 1
