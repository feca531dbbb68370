"""The rows of `python -m lab.bench gpu`, which fail, hang and go on, and the checks of lab/gpu.py on a CPU."""
import json
import os
import time
from types import SimpleNamespace

import pytest
import torch

import configs
from helpers import main
from lab import bench, gpu

# ------------------------------------------------------------------------------------------------ rows

def ends(process):
    """Whether the process of this number ends within a minute, or has ended."""
    for _ in range(600):
        try:
            with open(f'/proc/{process}/stat') as file:
                if file.read().rpartition(')')[2].split()[0] in 'ZX':
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


CHILD = """if True:
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print('child', subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)
    """


@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='needs /proc')
def test_a_row_is_ended_with_its_children_and_its_words_are_kept():
    row = bench.limited(['-c', CHILD + 'sys.exit(3)'], 100)
    assert row['exit code'] == 3 and row['seconds'] < 100 and ends(row['output'].split()[1])
    for seconds in (1, 4, 16, 64):                              # until the row has begun, on a busy machine too
        row = bench.limited(['-c', CHILD + 'time.sleep(600)'], seconds)
        assert row['exit code'] is None and row['seconds'] >= seconds
        first, *_, last = row['output'].splitlines()
        if first.startswith('child'):
            break
    assert last == f'ended after {seconds} s, its limit' and ends(first.split()[1])


def test_json_is_whole_after_a_row_that_fails_one_that_hangs_and_one_that_comes_too_late(tmp_path, monkeypatch,
                                                                                         capsys):
    path = tmp_path / 'gpu.json'
    show = f'print(open({str(path)!r}).read())'
    programs = {'fails': (60, 'print("begun"); raise SystemExit(3)'), 'after it': (60, show),
                'hangs': (0.5, 'while True: pass'), 'goes on': (60, show),
                'leaves': (60, 'import tempfile; print(tempfile.mkdtemp())')}
    monkeypatch.setattr(gpu, 'rows', lambda _: {name: (limit, ['-c', text]) for name, (limit, text) in
                                                programs.items()})
    flags = ['gpu', '--part', 'speed', '--json', path, '--device', 'cpu']
    code, error, printed = main(flags, monkeypatch, capsys, bench)
    report = json.loads(path.read_text())
    rows = report['rows']
    assert code == 0 and report['part'] == 'speed' and 'begun' in printed and list(rows) == list(programs), error
    assert [row['exit code'] for row in rows.values()] == [3, 0, None, 0, 0] and rows['fails']['output'] == 'begun'
    assert json.loads(rows['after it']['output'])['rows'] == {'fails': rows['fails']}
    assert json.loads(rows['goes on']['output'])['rows'] == {name: rows[name] for name in list(programs)[:3]}
    assert not os.path.exists(rows['leaves']['output'])
    monkeypatch.setattr(gpu, 'rows', lambda _: {'late': (60, ['-c', 'import time; time.sleep(60)'])})
    main([*flags, '--minutes', 0], monkeypatch, capsys, bench)
    assert json.loads(path.read_text())['rows']['late']['exit code'] is None


@pytest.mark.parametrize('size, steps, graphs', [(None, ['tiny', 'small', 'medium'], 2), ('nano', ['nano'], 1)])
def test_every_row_is_a_command_with_flags_that_exist(size, steps, graphs, monkeypatch, capsys):
    for part in gpu.PARTS:
        rows = gpu.rows(SimpleNamespace(part=part, size=size, steps=12, batch_size=20, repeats=None, resolution='64',
                                        device='tpu9', peer='DPOT'))
        for name, (limit, (_, module, *flags)) in rows.items():
            assert 0 < limit <= 180
            if module == 'lab.bench' and flags[-1] != 'cpu':    # the device is looked at after all other flags
                code, error, _ = main(flags, monkeypatch, capsys, bench)
                assert (code, error.count('\n')) == (2, 1) and '--device tpu9' in error, (name, error)
    assert list(rows) == [f'step {steps[0]}', *(f'step {name}' for name in steps[1:]), 'profile',
                          *(f'step {name} as a graph' for name in steps[:graphs]), 'latency']
    assert '--peer' in rows[f'step {steps[0]}'][1] and ' '.join(rows['latency'][1]).endswith('--batch_size 1')


# ------------------------------------------------------------------------------------------------ checks

@pytest.fixture
def check(monkeypatch, capsys):
    """check(name, *flags) runs a check of a very small network: (exit code, error, {result: row})."""
    nano = configs.model('nano', width=16, mlp=16, depth=1, heads=2, frames=2)
    monkeypatch.setitem(configs.SIZES, 'nano', (nano, configs.recipe('nano')))
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda module: None)        # Inductor takes a minute

    def results(name, *flags):
        small = '--size', 'nano', '--resolution', 8, '--batch_size', 2, '--device', 'cpu'
        code, error, printed = main([name, *small, *flags], monkeypatch, capsys, bench)
        return code, error, code < 2 and json.loads(printed.splitlines()[-1])[name]
    return results


def test_resume_stops_half_way_and_ends_with_equal_weights(check):
    code, error, rows = check('resume', '--steps', 8)
    row = rows['weights']
    assert code == 0 and 4 <= row['stopped at'] < 8 and row['bitwise equal'] == row['of'] > 20 and row['ok'], error


def test_the_profile_counts_the_operators_of_a_step_and_a_cpu_never_waits(check):
    code, error, rows = check('profile', '--steps', 10)
    assert code == 0 and rows['a step']['launches'] > 100 and rows['a step']['busy ms'] > 0 and len(rows) == 9, error
    code, error, rows = check('syncs', '--steps', 8)
    assert code == 0 and rows == {'all': {'a step': 0}}, error


def test_forms_agree_for_all_numbers_of_streams_and_what_does_not_gives_exit_code_1(check, monkeypatch):
    code, error, rows = check('forms')
    assert code == 0 and len(rows) == 7 and all(row['ok'] and row['tensors'] > 30 for row in rows.values()), error
    assert 0 < rows['cpu fp32, 4 streams']['loss apart'] < rows['cpu bf16, 4 streams']['loss apart'] < 0.1
    gradients = gpu.gradients

    def wrong(network, u, dtype='fp32'):
        loss, grads = gradients(network, u, dtype)
        factor = {'fp32': -1, 'bf16': torch.nan}[dtype] if u.dtype == torch.float32 else 1
        return loss, {**grads, 'embed.conv.weight': factor * grads['embed.conv.weight']}
    monkeypatch.setattr(gpu, 'gradients', wrong)
    code, error, rows = check('forms')
    assert code == 1 and {row['of'] for row in rows.values()} == {'embed.conv.weight'}, error
    assert not any(row['ok'] for row in rows.values()) and rows['cpu bf16, 4 streams']['lowest cosine'] == -1
