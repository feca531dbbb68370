"""The speed script on a small case: what it reports must be what the runs logged."""
import importlib
import json
import math
import sys

import h5py
import pytest
import torch

import bench
import configs
import data
import generate
from test_train import main, travelling, write


def test_bench_train_reports_what_the_runs_logged(tmp_path, monkeypatch, capsys):
    # the scripts run in this process, which saves five starts of the interpreter
    monkeypatch.setattr(bench, 'run', lambda script, *flags: main(
        flags, monkeypatch, capsys, importlib.import_module(script.removesuffix('.py'))))
    for split, N in (('train', 4), ('test', 2)):
        write(tmp_path / 'data', 'waves', travelling(N, 9, 16, 1, 0.4), split)
    code, error, printed = main(
        ['train', '--size', 'nano', '--resolution', 16, '--batch_size', 2, '--minutes', 0.001, '--short', 20,
         '--no-compile', '--device', 'cpu', '--data', tmp_path / 'data', '--out', tmp_path / 'out'],
        monkeypatch, capsys, bench)
    assert code == 0, error
    found = json.loads(printed.splitlines()[-1])
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


@pytest.mark.parametrize('flags', [
    'train --minutes 0', 'generate --units 0', 'generate --step 0', 'generate --family swe_pdb',
    'loader --datasets swe', 'loader --repeats 0', 'loader --datasets cfdbench --peer nowhere', 'sinkhorn --n 4 0',
    'sinkhorn --repeats 0', 'sinkhorn --peer nowhere'])
def test_a_bad_flag_is_one_line(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['bench.py', *flags.split()])
    with pytest.raises(SystemExit) as stop:
        configs.cli(bench.main)
    assert stop.value.code == 2 and capsys.readouterr().err.count('\n') == 1


def test_bench_loader_reports_every_dataset_their_mixture_and_every_storage(tmp_path, monkeypatch, capsys):
    threads = torch.get_num_threads()
    flags = ['loader', '--datasets', 'ns2d_fno_1e-5', 'cfdbench', '--trajectories', '2', '--repeats', '1',
             '--data', tmp_path]
    code, error, printed = main(flags, monkeypatch, capsys, bench)
    torch.set_num_threads(threads)
    assert code == 0, error
    found = json.loads(printed.splitlines()[-1])
    assert list(found['loader']) == ['ns2d_fno_1e-5', 'cfdbench', 'mixture']
    assert list(found['storage']) == [*bench.STORAGE, '--cache ram', '--cache device']
    for name, channels in (('ns2d_fno_1e-5', 1), ('cfdbench', 3)):
        row = found['loader'][name]
        assert row['ours'] > row['model'] > 0
        assert row['ours_mb'] == pytest.approx(row['ours'] * 4e-6 * 11 * 64 * 64 * channels)
    assert not list(tmp_path.iterdir())


def test_the_files_of_the_loaders_hold_the_same_fields(tmp_path):
    values = bench.smooth(2, 12, 8, 3)
    assert values.dtype == 'float32' and 1 < abs(values).max() < 3
    bench.stored(tmp_path, 'own', values, chunks=11, compression='lzf')
    read = data.Trajectories(tmp_path, 'own', 'train', 10, 4)
    assert all((read.read(i, 0, 12) == values[i]).all() for i in range(2))
    for name in ('swe_pdb', 'cfdbench', 'ns2d_fno_1e-5'):
        path = bench.stored_for_peer(tmp_path / 'peer', name, values)
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
    assert list(found['sinkhorn']) == [f'n = {n}, {what}' for n in (3, 4) for what in ('forward', 'both')]
    for row in found['sinkhorn'].values():
        assert row['loop'] > row['auto'] > 0 and row['auto_ratio'] > 1
