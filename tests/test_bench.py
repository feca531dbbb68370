"""The speed script on a small case: what it reports must be what the runs logged."""
import json
import sys

import pytest

import bench
import configs
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


def test_a_bad_flag_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['bench.py', 'train', '--minutes', '0'])
    with pytest.raises(SystemExit) as stop:
        configs.cli(bench.main)
    assert stop.value.code == 2 and capsys.readouterr().err.count('\n') == 1
