"""The studies: what they run, that nothing is run twice, and the tables that they print."""
import contextlib
import importlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import configs
import data
import train
from helpers import run, travelling
from lab import reproduce, tables
from nets import baselines
from nets.build import build
from runtime import terminal

NAMES = 'ns2d_fno_1e-3', 'ns2d_fno_1e-4', 'swe_pdb'
FLAGS = ['--steps', 4, '--seeds', 1, '--device', 'cpu', '--data', 'data', '--out', 'out']


class Inline:
    """A subprocess.Popen of one of our scripts, which runs in this process: that saves seconds for each command."""

    def __init__(self, words, env, stdout, stderr):
        program = words[2:]
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stdout), \
                contextlib.redirect_stderr(stderr):
            patch.setattr(sys, 'argv', program)
            try:
                self.code = terminal.cli(importlib.import_module(program[0]).main)
            except SystemExit as stop:
                self.code = stop.code

    def wait(self):
        return self.code


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """A working directory with small datasets of four names of the paper."""
    monkeypatch.chdir(tmp_path)
    for name, N, T in ((NAMES[0], 4, 12), (NAMES[1], 16, 7), (NAMES[2], 4, 7), ('cno_poisson', 4, 2)):
        u = travelling(N + 2, T, 16, 1, 0.3).astype(np.float32)
        data.write(f'data/{name}', train=u[:N], test=u[N:], channels=configs.DATASETS[name].channels, dt=0.1)
    return tmp_path


@pytest.fixture
def folder(datasets, monkeypatch):
    """The same, with a small network and commands that run one after the other in this process."""
    pool = SimpleNamespace(map=map, shutdown=lambda **_: None)
    monkeypatch.setattr(reproduce, 'ThreadPoolExecutor', lambda _: contextlib.nullcontext(pool))
    monkeypatch.setattr(reproduce, 'subprocess', SimpleNamespace(Popen=Inline))
    small = configs.model('nano', resolution=16, width=16, mlp=16, out_width=4)
    monkeypatch.setitem(configs.SIZES, 'nano', (small, configs.recipe('nano', batch_size=4)))
    for name, old, new in ('rollout', '500', '20'), ('timing', 'latency', 'latency --repeats 2'):
        study = reproduce.STUDIES[name]
        measure = study.measure._replace(command=study.measure.command.replace(old, new))
        monkeypatch.setitem(reproduce.STUDIES, name, study._replace(measure=measure))
    return datasets


def numbers(study, more=''):
    """The rows of the first table of a study."""
    return next(iter(json.loads(open(f'out/{study}-nano-4_steps{more}.json').read())['tables'].values()))


@pytest.mark.slow
def test_every_study_runs_from_data_to_table(folder, monkeypatch, call):
    columns = {'downstream': ['cno_poisson (L1)'], 'few_shot': ['ns2d_fno_1e-4 16'], 'poseidon': [], 'unseen': [],
               'rollout': ['20', 'growth'], 'probe': ['ns2d_fno', 'swe_pdb', 'mean'], 'heterogeneity': [], 'moe': [],
               'scaling': ['M activated parameters', 'score'], 'timing': ['ms'],
               'gains': ['forward', 'backward', 'forward composite', 'backward composite'],
               'stability': ['steps', 'final loss', 'lowest', 'skipped', 'spikes', 'largest gradient']}
    usual = ['geometric mean', 'ns2d_fno_1e-3', 'ns2d_fno_1e-4', 'swe_pdb']
    for study, config in reproduce.STUDIES.items():
        names = [name for name in config.rows if 'fixed' not in name or name.endswith(NAMES[0])]
        names = [name for name in names if name != '0 rounds']      # which may end in inf, as in the paper
        rows = {name: config.rows[name] for name in names[:1] + names[1:][-1:]}           # two of them
        if study in ('scaling', 'timing'):          # of the paper's sizes, which are too slow here
            rows = {'DPOT': '--residual plain', 'AOT-POT': ''}
        if study in ('main', 'peers'):              # the networks of other packages are in test_baselines.py
            rows = {name: config.rows[name] for name in ('AOT-POT', 'UNet')}
        if study == 'unseen':                       # which are not there
            continue
        monkeypatch.setitem(reproduce.STUDIES, study, config._replace(rows=rows))
        code, error, printed = call([study, *FLAGS], reproduce)
        assert code == 0, error
        assert list(numbers(study)) == list(rows)
        for row in numbers(study).values():
            assert all(math.isfinite(cell['mean']) for cell in row.values())
            assert sorted(row) == sorted(columns.get(study, usual)), study


@pytest.mark.slow
def test_what_is_done_is_not_run_again_and_what_was_killed_goes_on(folder, call):
    flags = ['ablation', *FLAGS]
    assert call(flags, reproduce)[0] == 0
    before, runs = numbers('ablation'), folder / 'out/nano-4_steps'
    logs = {path: path.stat().st_mtime_ns for path in runs.glob('*/log.jsonl')}
    assert len(logs) == 4
    (runs / 'ablate_a-seed_0/evaluate.json').unlink()           # as if it had been killed before it was measured
    assert call(flags, reproduce)[0] == 0 and numbers('ablation') == before
    assert {path: path.stat().st_mtime_ns for path in logs} == logs
    code, _, printed = call([*flags, '--list'], reproduce)
    assert code == 0 and printed == ''


@pytest.mark.parametrize('args', [['--collect'], []])
def test_a_table_of_runs_on_data_that_have_changed_says_so_in_one_line(folder, call, args):
    flags = ['ablation', *FLAGS, '--datasets', NAMES[2], '--rows', 'AOT-POT', 'w/o a']
    code, error, _ = call(flags, reproduce)
    assert code == 0 and 'warning' not in error
    u = travelling(4, 7, 16, 1, 0.5).astype(np.float32)
    data.write(f'data/{NAMES[2]}', train=u, test=u[:2], channels=['h'], source='another')
    code, error, _ = call([*flags, *args], reproduce)
    line, = (line for line in error.splitlines() if 'warning' in line)
    both = ' '.join(f'out/nano-4_steps/{name}-seed_0' for name in ('ablate_a', 'aot'))
    assert code == 0 and line == (f'warning: {both}: the data in data have changed since then: the source of '
                                  f"swe_pdb/test.h5 was '', is 'another'; remove these folders to repeat the runs")


@pytest.mark.slow
def test_commands_run_in_processes_of_their_own_and_a_signal_is_passed_on_to_them(datasets):
    command = ['-m', 'lab.reproduce', 'ablation', '--rows', 'AOT-POT', 'w/o a', '--datasets', NAMES[2], '--seeds', '1',
               '--data', 'data', '--device', 'cpu', '--jobs', '2', '--out', 'out']
    long = [sys.executable, *command, '--steps', '100000']
    with subprocess.Popen(long, stderr=subprocess.PIPE, text=True) as process:
        folders = [datasets / f'out/nano-100000_steps/{name}-seed_0' for name in ('aot', 'ablate_a')]
        logs = [folder / 'log.jsonl' for folder in folders]
        while not all(path.exists() and path.stat().st_size for path in logs):          # the first steps are done
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 128 + signal.SIGTERM
    for folder in folders:
        assert torch.load(folder / 'last.pt', weights_only=True)['step'] > 0
    command.remove('w/o a')
    done = run(*command, '--steps', '2')
    assert done.returncode == 0, done.stderr
    tables = json.loads((datasets / 'out/ablation-nano-2_steps-AOT-POT-swe_pdb.json').read_text())['tables']
    for label in 'L2RE of rollouts', 'L2RE of one step':
        assert math.isfinite(tables[label]['AOT-POT'][NAMES[2]]['mean'])


def test_every_job_has_a_gpu_of_its_own_or_its_share_of_the_cores(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,6')
    monkeypatch.setattr(os, 'cpu_count', lambda: 8)
    for gpus, name, values in (2, 'CUDA_VISIBLE_DEVICES', ['4', '6', '4']), (0, 'OMP_NUM_THREADS', ['2', '2', '2']):
        monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus)
        places = reproduce.environments(SimpleNamespace(device='auto', jobs=3))
        assert [place[name] for place in places] == values


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def test_a_run_of_another_mixture_folder_or_recipe_is_refused_and_nothing_changes(
        folder, monkeypatch, call, refused):
    monkeypatch.setitem(reproduce.STUDIES, 'ablation', reproduce.Study('one', {'AOT-POT': ''}))
    flags = ['ablation', *FLAGS, '--datasets']
    assert call([*flags, NAMES[2], NAMES[0]], reproduce)[0] == 0
    shutil.copytree('data', 'copied')
    before = contents(folder / 'out')
    for more, words in (([NAMES[0]], f"--datasets ['{NAMES[0]}', '{NAMES[2]}'], not ['{NAMES[0]}'] as in this command"),
                        ([NAMES[0], NAMES[2], '--data', 'copied'], f'--data {folder}/data, not {folder}/copied as in')):
        for mode in [], ['--list'], ['--collect']:
            error, printed = refused([*flags, *more, *mode], words, reproduce)
            assert 'aot-seed_0: the run' in error and not printed and contents(folder / 'out') == before
    (folder / 'link').symlink_to('data')                        # the same data
    assert call([*flags, NAMES[0], NAMES[2], '--data', 'link', '--collect'], reproduce)[0] == 0
    monkeypatch.setitem(configs.SIZES, 'nano', (configs.SIZES['nano'][0], configs.recipe('nano', batch_size=3)))
    refused([*flags, NAMES[0], NAMES[2]], 'the run there has --batch_size 4, not 3 as in this command', reproduce)


def test_scaling_trains_every_system_at_its_own_size():
    args = SimpleNamespace(size='nano', name='nano', steps=0, seeds=1, data='data', datasets=['swe_pdb'], out='out',
                           device='cpu', recipe='--lr 1 --datasets a')
    for row, _, job, _ in reproduce.plan(reproduce.STUDIES['scaling'], args):
        system, size = row.split(', ')
        experts, residual = 'MoE' in system, 'plain' if system in ('DPOT', 'MoE-POT') else 'aot'
        model, recipe, run, *_ = train.parse(job.settings(args))
        assert model == configs.model('moe-' * experts + size, residual=residual), row
        assert recipe.lr == 1 and run.datasets == ('a',), 'the recipe comes after the size and the mixture'


def test_the_folders_of_runs_are_named_by_their_flags():
    args = SimpleNamespace(name='nano-9_steps', seeds=2, datasets=['swe_pdb'], out='out')
    names = [job.folder.as_posix() for _, seed, job, _ in reproduce.plan(reproduce.STUDIES['gain'], args) if seed == 1]
    assert names == [f'out/nano-9_steps/{name}-seed_1' for name in (
        'residual_plain', 'streams_1', 'aot', 'stream_start_distinct', 'ablate_T', 'ablate_ad')]
    args.seeds, part = 1, reproduce.STUDIES['downstream'].rows['DPOT-FT'][2]
    (_, _, job, _), = reproduce.plan(reproduce.Study('one', {'row': [part]}), args)
    assert job.folder.name == 'residual_plain-dataset_cno_poisson-seed_0'


@pytest.mark.slow
def test_listed_commands_run_in_a_shell_and_end_in_the_same_table(folder, monkeypatch, call):
    flags, study = ['downstream', *FLAGS], reproduce.STUDIES['downstream']
    rows = {row: study.rows[row] for row in ('DPOT', 'DPOT-FT')}
    monkeypatch.setitem(reproduce.STUDIES, 'downstream', study._replace(rows=rows))
    code, _, first = call([*flags, '--list'], reproduce)
    assert code == 0 and [line.split()[2] for line in first.splitlines()] == ['train']
    assert call([*flags], reproduce)[0] == 0
    whole = numbers('downstream')
    for path in folder.glob('out/nano-4_steps/*cno*/evaluate.json'):
        path.unlink()
    _, _, second = call([*flags, '--list'], reproduce)
    assert len(second.splitlines()) == 2 and all(' -m evaluate ' in line for line in second.splitlines())
    assert subprocess.run(second.splitlines()[0], shell=True, capture_output=True, timeout=240).returncode == 0
    code, error, _ = call([*flags, '--collect'], reproduce)
    assert code == 0 and {row: cells for row, cells in numbers('downstream').items() if cells} == \
        {list(whole)[0]: next(iter(whole.values()))}


def test_single_steps_are_timed_without_data_and_each_system_at_its_own_size(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    flags = ['timing', '--size', 'tiny', '--seeds', 1]
    _, _, listed = call([*flags, '--jobs', 2, '--list'], reproduce)
    sizes = [line.split('--size ')[1].split()[0] for line in listed.splitlines()]
    assert all(' latency ' in line and ' train ' not in line for line in listed.splitlines())
    assert sizes == ['tiny', 'moe-tiny', 'tiny', 'moe-tiny']
    _, _, listed = call(['timing', '--seeds', 1, '--list'], reproduce)
    assert [line.split('--size ')[1].split()[0] for line in listed.splitlines()] == ['nano', 'nano'], 'without experts'
    for folder, times in ('aot', {0: 3, 2: 6, 3: 8}), ('residual_plain', {0: 2, 1: 9, 2: 4, 3: 5}):
        for seed, ms in times.items():
            path = tmp_path / f'out/reproduce/tiny/{folder}-seed_{seed}/bench_latency-auto.json'
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps({'latency': {'aot': {'mean ms': ms}, 'plain': {'mean ms': ms}}}))
    collect = [*flags[:-1], 4, '--collect']
    call(collect, reproduce)
    [rows] = json.loads((tmp_path / 'out/reproduce/timing-tiny.json').read_text())['tables'].values()
    times, plain = rows['AOT-POT']['ms'], rows['DPOT']['ms']
    assert plain == {'mean': 5, 'deviation': statistics.stdev([2, 9, 4, 5]), 'seeds': 4, 'paper': 5.317, 'to': {}}
    assert times['seeds'] == times['to']['DPOT']['pairs'] == 3
    assert times['to']['DPOT']['difference'] == 2, 'seed 1 is missing and shifts no other'
    assert not rows['MoE-POT']
    call([*collect, '--device', 'cpu'], reproduce)
    [rows] = json.loads((tmp_path / 'out/reproduce/timing-tiny.json').read_text())['tables'].values()
    assert not any(rows.values()), 'times of another device'


def test_a_failing_run_is_named_and_the_others_go_on(folder, monkeypatch, refused):
    monkeypatch.setitem(reproduce.STUDIES, 'ablation', reproduce.Study('broken', {'good': '', 'bad': '--ablate x'}))
    error, _ = refused(['ablation', *FLAGS], "--ablate 'x'", reproduce, lines=0)
    assert "--ablate 'x'" in error.splitlines()[-1] and 'Traceback' not in error
    assert numbers('ablation')['good'] and not numbers('ablation')['bad']


def test_spikes_are_counted_against_the_ten_lines_before(tmp_path):
    losses = [1.] * 9 + [3., 2.1, 1.9, None, 2.1, 4.1, 1.]          # no spike before there are ten lines; None: skipped
    log = [{'step': 20 * i, 'loss': loss, 'grad_norm': None if i == 3 else i, 'skipped': int(i > 12), 'lr': 1}
           for i, loss in enumerate(losses, start=1)]
    (tmp_path / 'log.jsonl').write_text('{"step": 1, "lo\n{"step": 2}\n')
    with pytest.raises(configs.InputError, match='log.jsonl: line 1 is not of the log of a run'):
        reproduce.stability({'checkpoint': str(tmp_path / 'last.pt')})
    (tmp_path / 'log.jsonl').write_text('\n'.join(map(json.dumps, log)) + '\n{"step": 340, "lo')    # a crash
    assert reproduce.stability({'checkpoint': tmp_path / 'last.pt'}) == {
        'steps': 320, 'final loss': 1, 'lowest': 1, 'skipped': 1, 'spikes': 3, 'largest gradient': 16}


def test_the_scaling_score_is_100_where_every_error_is_a_hundredth():
    for errors, score in ([1e-2] * 3, 100), ([1e-1, 1e-3], 100), ([1.], 0), ([math.inf, 0.1], -math.inf):
        datasets = {str(i): {'model': {'rollout': {'mean': error}}, 'steady': False} for i, error in enumerate(errors)}
        row = reproduce.scaling({'parameters': 3e6, 'activated': 2e6, 'datasets': datasets})
        assert row == {'M activated parameters': 2, 'score': pytest.approx(score)}


def test_a_steady_problem_has_the_papers_median_relative_l1_and_no_part_in_the_geometric_mean():
    steady = {'rollout': {'mean': 9}, 'step': {'mean': 9}, 'l1': {'samples': [0.5, 0.1, None]}}
    other = {'rollout': {'mean': 0.4}, 'step': {'mean': None}, 'l1': {'samples': [7]}}
    report = {'datasets': {'cno_poisson': {'model': steady, 'steady': True},
                           NAMES[2]: {'model': other, 'steady': False}}}
    columns = reproduce.rollout_errors(report)
    assert columns == {'cno_poisson (L1)': 0.5, NAMES[2]: 0.4} and set(columns) <= set(
        [*tables.paper_table('downstream', 'small')['DPOT'], NAMES[2]]), 'the column of the paper'
    assert reproduce.one_step_errors(report) == {NAMES[2]: math.inf}
    table = {'a': {column: {0: value} for column, value in columns.items()}}
    _, numbers = tables.tabulate(reproduce.Study('t', {}), {'L2RE of rollouts': table}, {})
    assert numbers['L2RE of rollouts']['a']['geometric mean']['mean'] == pytest.approx(0.4)


def test_fine_tuning_follows_the_papers_protocol():
    args = SimpleNamespace(name='small', size='small', steps=0, seeds=1, data='data', datasets=['swe_pdb'], out='out',
                           device='cpu', recipe='')
    jobs = [job for _, _, job, _ in reproduce.plan(reproduce.STUDIES['finetune'], args)]
    assert len({job.folder for job in jobs}) == 4 * 12, 'every system on every dataset'
    few = [job for row, _, job, _ in reproduce.plan(reproduce.STUDIES['few_shot'], args) if row == 'AOT-POT-FT']
    assert len(few) == 10 and all('--epochs 500' in ' '.join(job.settings(args)) for job in few)
    turbulence, *others = [' '.join(job.settings(args)) for row, _, job, _ in
                           reproduce.plan(reproduce.STUDIES['downstream'], args) if row == 'DPOT']
    assert '--resolution 512' in turbulence and not any('--resolution' in settings for settings in others)
    args.steps = 3
    assert few[0].settings(args)[-10:-8] == ['--steps', '3'] and '--epochs' not in few[0].settings(args)


def test_peers_have_as_many_parameters_within_a_tenth():
    args = SimpleNamespace(size='nano', name='nano', steps=0, seeds=1, data='data', datasets=['swe_pdb'], out='out',
                           device='cpu', recipe='')
    counts = {}
    for row, _, job, _ in reproduce.plan(reproduce.STUDIES['peers'], args):
        if 'FNO' not in row or not baselines.lacking('baselines:FNO'):
            model, recipe, *_ = train.parse(job.settings(args))
            sizes = [p.numel() * (2 if p.is_complex() else 1) for p in build(model).parameters()]
            counts[row] = sum(sizes)
            assert not model.normalize and recipe.steps > 0, 'which other networks lack'
    assert {'AOT-POT', 'DPOT, alone', 'UNet'} <= set(counts)
    assert all(abs(count / counts['AOT-POT'] - 1) < 0.1 for count in counts.values()), counts


@pytest.mark.slow
def test_the_maps_of_the_motivating_experiment_are_those_that_were_learned(folder, call):
    flags, more = ['motivation', *FLAGS, '--datasets', 'swe_pdb'], '-swe_pdb'
    assert call(flags, reproduce)[0] == 0
    rows = numbers('motivation', more)
    assert list(rows) == ['DPOT', 'DPOT + linear', 'fixed swe_pdb'], 'of the mixture, though the folder holds others'
    assert call([*flags, '--out', folder / 'out', '--collect'], reproduce)[0] == 0
    assert numbers('motivation', more) == rows
    learned, frozen = (torch.load(next(folder.glob(f'out/**/{name}/last.pt')), weights_only=True)['model'] for name in (
        '*channel_maps_learned-datasets_swe_pdb-seed_0', '*given*swe_pdb*'))
    assert not torch.equal(learned['map_out.weight'], torch.eye(4))
    assert torch.equal(frozen['map_out.weight'], learned['map_out.weight'])


def test_list_without_a_study_prints_their_titles(call):
    code, _, printed = call(['--list'], reproduce)
    assert code == 0 and [line.split(maxsplit=1) for line in printed.splitlines()] == [
        [name, study.title] for name, study in reproduce.STUDIES.items()]
