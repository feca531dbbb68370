"""The rows of `python -m lab.bench gpu`, which fail, hang and go on, and the checks of lab/gpu.py on a CPU."""
import importlib
import json
import os
import signal
import time
from itertools import islice
from types import SimpleNamespace

import configs

import pytest
import torch

import sinkhorn
from conftest import ROOT
from helpers import main, run
from lab import bench, gpu

SMALL = ['--size', 'nano', '--resolution', '8', '--batch_size', '2', '--device', 'cpu']


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
    flags = ['gpu', '--part', 'd', '--json', path, '--device', 'cpu']
    code, error, printed = main(flags, monkeypatch, capsys, bench)
    report = json.loads(path.read_text())
    rows = report['rows']
    assert code == 0 and report['part'] == 'long' and 'begun' in printed and list(rows) == list(programs), error
    assert [row['exit code'] for row in rows.values()] == [3, 0, None, 0, 0] and rows['fails']['output'] == 'begun'
    assert json.loads(rows['after it']['output'])['rows'] == {'fails': rows['fails']}
    assert json.loads(rows['goes on']['output'])['rows'] == {name: rows[name] for name in list(programs)[:3]}
    assert not os.path.exists(rows['leaves']['output'])
    main([*flags, '--minutes', 0], monkeypatch, capsys, bench)
    assert {row['output'] for row in json.loads(path.read_text())['rows'].values()} == {
        'not started: the minutes are over'}


@pytest.mark.parametrize('part', bench.PARTS)
@pytest.mark.parametrize('size', [None, 'nano'])
def test_every_row_is_a_command_with_flags_that_exist(part, size, monkeypatch, capsys):
    rows = gpu.rows(SimpleNamespace(part=part, size=size, steps=None, batch_size=20, repeats=None, resolution='64',
                                    device='tpu9', peer=''))
    for name, (limit, (_, module, *flags)) in rows.items():
        assert 0 < limit <= 240
        if module.startswith('lab.'):          # the device is looked at after all other flags
            code, error, _ = main(flags, monkeypatch, capsys, importlib.import_module(module))
            assert (code, error.count('\n')) == (2, 1) and '--device tpu9' in error, (name, error)


# ------------------------------------------------------------------------------------------------ checks

@pytest.fixture
def check(monkeypatch, capsys):
    """check(name, *flags) runs a check of a very small network: (exit code, {result: row})."""
    nano = configs.model('nano', width=16, mlp=16, depth=1, heads=2, frames=2)
    monkeypatch.setitem(configs.SIZES, 'nano', (nano, configs.recipe('nano')))

    def results(name, *flags):
        code, error, printed = main([name, *SMALL, *flags], monkeypatch, capsys, gpu)
        lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{')]
        return code, error, {name: row for line in lines for name, row in line.items()}
    return results


def test_resume_stops_half_way_and_ends_with_equal_weights(check):
    code, error, rows = check('resume', '--steps', 8)
    assert code == 0 and rows['stopped']['exit code'] == 128 + signal.SIGTERM, error
    assert 4 <= rows['stopped']['step'] < 8
    assert rows['weights']['bitwise equal'] == rows['weights']['tensors'] > 20


def test_the_curve_has_the_losses_of_both_devices(check):
    code, error, rows = check('curve', '--steps', 6)
    assert code == 0 and len(rows) == 7 and rows['last third'] == {'ratio': 1, 'ok': True}, error
    assert all(len({*rows[f'step {step}'].values()}) == 1 for step in range(1, 7))      # both are the CPU here


def test_the_profile_counts_the_operators_of_a_step(check):
    code, error, rows = check('profile')
    assert code == 0 and rows['a step']['operators'] > 100 and rows['a step']['busy ms'] > 0 and len(rows) == 9, error


def test_the_log_of_a_training(check):
    code, error, rows = check('training', '--steps', 3)
    assert code == 0 and list(rows) == ['step 1', 'step 2', 'step 3'] and rows['step 2']['loss'] > 0, error


@pytest.mark.parametrize('name', ['sinkhorn', 'kernels', 'syncs'])
def test_a_check_that_needs_a_gpu_says_so(name, check, monkeypatch):
    monkeypatch.setattr(sinkhorn, 'INTERPRET', False)
    code, error, rows = check(name)
    assert (code, error, rows) == (2, f'error: {name}: needs CUDA' + ' and Triton' * (name != 'syncs') + '\n', {})


def test_a_result_that_is_wrong_gives_exit_code_1_after_all_results(check, monkeypatch):
    monkeypatch.setitem(gpu.CHECKS, 'forms', lambda args: iter([('a', {'ok': False}), ('b', {})]))
    code, _, rows = check('forms')
    assert code == 1 and list(rows) == ['a', 'b']


INTERPRETED = """if True:
    from itertools import islice
    from types import SimpleNamespace
    import configs
    import torch
    from lab import gpu
    config = configs.model('nano', resolution=8, width=16, mlp=16, depth=1, heads=2, frames=2)
    args = SimpleNamespace(config=config, batch_size=2, device=torch.device('cpu'))
    for name, row in [*gpu.sinkhorn(args), *islice(gpu.kernels(args), 1)]:
        assert row['ok'] and row.get('tensors', 40) >= 40, (name, row)
    print(name)"""


@pytest.mark.skipif(not sinkhorn.TRITON, reason='needs triton')
def test_the_kernels_pass_their_checks_in_tritons_interpreter():
    done = run('-c', INTERPRETED, cwd=ROOT, env={**os.environ, 'TRITON_INTERPRET': '1'})
    assert (done.returncode, done.stdout) == (0, '4 streams\n'), done.stderr


def test_forms_agree_in_fp32_and_bf16_and_name_the_tensor_that_does_not():
    config = configs.model('nano', resolution=16, width=16, mlp=16, depth=2, heads=2, frames=2)
    args = SimpleNamespace(config=config, batch_size=2, device=torch.device('cpu'))
    rows = dict(islice(gpu.forms(args), 3))                     # without compiling
    assert list(rows) == ['paper, cpu fp64', 'cpu fp32', 'cpu bf16'] and rows['cpu fp32']['ok'], rows
    assert 0 < rows['cpu fp32']['relative difference'] < rows['cpu bf16']['relative difference'] < 0.1
    paper, u, target = gpu.example(config, 2)
    loss, grads = gpu.gradients(paper, u, target)
    grads['embed.conv.weight'] *= -1
    row = gpu.against(paper, u, target, (loss, grads), args.device)
    worst, *_ = row['lowest cosines'].items()
    assert not row['ok'] and row['tensors'] > 60 and worst[0] == 'embed.conv.weight' and worst[1] < -0.9
    row = gpu.against(paper, u, target * torch.nan, (loss, grads), args.device)
    assert not row['ok'] and set(row['lowest cosines'].values()) == {-1}
