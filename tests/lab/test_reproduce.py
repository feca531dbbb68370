"""The studies: what they run, that nothing is run twice, and the tables that they print."""
import functools
import importlib
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import configs
import data
import train
from helpers import travelling
from lab import reproduce
from runtime import terminal
from sources import generate

NAMES = 'ns2d_fno_1e-3', 'ns2d_fno_1e-4', 'swe_pdb'
SMALL = '--resolution 16 --width 16 --mlp 16 --batch_size 4'
FLAGS = ['--steps', 4, '--seeds', 1, '--device', 'cpu', '--data', 'data', '--out', 'out']
RUN = reproduce.succeeds


def in_this_process(words):
    """Whether a command of ours succeeds, which runs in this process: that saves seconds for each command."""
    if words[0] == 'rm':
        return RUN(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', list(words[2:]))
        try:
            terminal.cli(importlib.import_module(words[2]).main)
            return True
        except SystemExit as stop:
            return not stop.code


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with datasets of four names, a small network, and commands that run in this process."""
    monkeypatch.chdir(tmp_path)
    for name, N, T in ((NAMES[0], 4, 12), (NAMES[1], 16, 7), (NAMES[2], 4, 7), ('cno_poisson', 4, 2)):
        u = travelling(N + 2, T, 16, 1, 0.3).astype(np.float32)
        source = generate.plan(name).attributes()['source']
        data.write(f'data/{name}', train=u[:N], test=u[N:], channels=configs.DATASETS[name].channels, dt=0.1,
                   source=source)
    command = train.parse(SMALL.split())
    monkeypatch.setitem(configs.SIZES, 'nano', (command.model, command.recipe))
    study = reproduce.STUDIES['rollout']
    monkeypatch.setitem(reproduce.STUDIES, 'rollout', study._replace(command=study.command.replace('500', '20')))
    return tmp_path


@pytest.fixture
def reproduced(folder, monkeypatch, call):
    """reproduced(flags, ...) runs lab.reproduce as a command of its own: (exit code, standard error, output)."""
    def run(*flags):
        monkeypatch.setattr(reproduce, 'succeeds', functools.cache(in_this_process))
        return call(flags, reproduce)
    return run


@pytest.fixture
def jobs(monkeypatch):
    """jobs(study, flag=value, ...) are those of a study, whose datasets are all there."""
    monkeypatch.setattr(data, 'find', lambda folder, names, *_: names)
    flags = dict(size='nano', name='nano', steps=0, seeds=1, data='data', datasets=['swe_pdb'], out='out',
                 device='cpu', recipe='', samples=8)

    def jobs(study, **options):
        return reproduce.jobs_of(reproduce.STUDIES[study], SimpleNamespace(**{**flags, **options}))[0]
    return jobs


def numbers(study):
    """The rows {column: {seed: number}} of the first table of a study."""
    path, = Path('out').glob(f'{study}-nano-*.json')
    return next(iter(json.loads(path.read_text())['tables'].values()))['seeds']


@pytest.mark.slow
def test_every_study_runs_from_data_to_table_and_nothing_of_it_a_second_time(reproduced, monkeypatch):
    columns = {'downstream': ['cno_poisson (L1)'], 'few_shot': ['ns2d_fno_1e-4 16'],
               'rollout': ['20', 'growth'], 'probe': ['ns2d_fno', 'swe_pdb', 'mean'],
               'scaling': ['M activated parameters', 'score'],
               'gains': ['forward', 'backward', 'forward composite', 'backward composite']}
    usual = ['geometric mean', *NAMES]
    monkeypatch.setitem(configs.MIXTURES, 'mixture_6', NAMES)
    for study, config in reproduce.STUDIES.items():
        names = [name for name in config.rows if not name.endswith((' 10 datasets', ' 12 datasets'))]
        names = [name for name in names if 'fixed' not in name or name.endswith(NAMES[0])]
        names = [name for name in names if name != 'rounds = 0']      # which may end in inf, as in the paper
        if study == 'main':                         # FNO may not be installed
            names = ['AOT-POT', 'UNet']
        rows = {name: config.rows[name] for name in (names[0], names[-1])}
        if study == 'scaling':                      # of the paper's sizes, which are too slow here
            rows = {'DPOT': '--residual plain', 'AOT-POT': ''}
        if study in ('unseen', 'poseidon'):         # whose data are not there
            continue
        monkeypatch.setitem(reproduce.STUDIES, study, config._replace(rows=rows))
        code, error, _ = reproduced(study, *FLAGS)
        assert code == 0 or study == 'few_shot' and '--samples 32: the training split has only 16' in error, error
        assert list(numbers(study)) == list(rows)
        for row in numbers(study).values():
            assert all(list(seeds) == ['0'] and math.isfinite(seeds['0']) for seeds in row.values())
            assert sorted(row) == sorted(columns.get(study, usual)), study
        code, error, printed = reproduced(study, *FLAGS, '--list')
        assert code == 0 and not printed or study == 'few_shot', error


def test_a_command_runs_in_a_process_of_its_own_whose_exit_code_counts():
    assert RUN((sys.executable, '-c', '')) and not RUN((sys.executable, '-c', 'exit(1)'))


def test_a_run_of_another_mixture_is_refused_and_nothing_changes(reproduced, monkeypatch):
    def contents():
        return {path: path.read_bytes() for path in Path('out').rglob('*') if path.is_file()}
    monkeypatch.setitem(reproduce.STUDIES, 'ablation', reproduce.Study('one', {'AOT-POT': ''}))
    flags = ['ablation', *FLAGS, '--datasets']
    assert reproduced(*flags, NAMES[2], NAMES[0])[0] == 0
    before = contents()
    code, error, printed = reproduced(*flags, NAMES[0])
    refusal, failed = error.splitlines()
    assert refusal.startswith(f'error: --datasets {NAMES[0]}: the run to resume has {NAMES[2]} {NAMES[0]}')
    assert failed.startswith('error: these runs failed') and failed.endswith('/aot-seed_0')
    assert code == 2 and not printed and contents() == before


def test_failing_runs_and_absent_data_are_named_and_the_others_go_on(reproduced, monkeypatch):
    monkeypatch.setitem(sys.modules, 'neuralop.models', None)           # as if it were not installed
    monkeypatch.setitem(reproduce.STUDIES, 'ablation', reproduce.Study('two', {
        'FNO': '--network FNO', 'tuned': [reproduce.Part('--checkpoint {start} --dataset swe_pdb', '--network FNO')],
        'good': '', 'absent': '--datasets dr_pdb'}))
    code, error, printed = reproduced('ablation', *FLAGS)
    assert code == 2 and error.count('pip install neuraloperator') == 1, 'and what starts from it is not begun'
    assert re.search('these runs failed, as the lines above say: out/nano-4_steps/network_FNO-seed_0 '
                     'out/nano-4_steps/network_FNO-dataset_swe_pdb-seed_0$', error)
    assert [row for row, columns in numbers('ablation').items() if any(columns.values())] == ['good']
    assert 'left out: --datasets dr_pdb: no data/dr_pdb/train.h5; ' in printed
    code, error, _ = reproduced('heterogeneity', *FLAGS)
    assert code == 2 and 'heterogeneity: data has none of the datasets' in error


def test_a_line_of_the_list_is_a_training_with_all_that_starts_from_it(reproduced, monkeypatch):
    study = reproduce.STUDIES['finetune']
    monkeypatch.setitem(reproduce.STUDIES, 'finetune', study._replace(rows={'AOT-POT': study.rows['AOT-POT']}))
    line, = reproduced('finetune', *FLAGS, '--list')[2].splitlines()
    assert line.count(' -m train ') == 1 and line.count(' -m finetune ') == line.count(' -m evaluate ') == len(NAMES)
    flags = 'ablation', *FLAGS, '--seeds', 2, '--rows', 'w/o d', 'w/o T', '--recipe', '--lr 1', '--list'
    found = re.findall(r'--lr 1 --ablate (.) .* --out (\S+) --seed (.) .*/last.pt', reproduced(*flags)[2])
    assert found == [(x, f'out/nano-4_steps-lr_1/ablate_{x}-seed_{seed}', seed) for x in 'dT' for seed in '01']


def test_a_report_that_is_older_than_the_training_is_made_again(tmp_path):
    report = tmp_path / 'evaluate.json'
    job = reproduce.Job('AOT-POT', '', 0, (('train',),), ('evaluate',), report)
    for times, again in (((), True), ((1, 2), False), ((3, 2), True)):          # of the log and of the report
        for path, time in zip((tmp_path / 'log.jsonl', report), times):
            path.touch()
            os.utime(path, (time, time))
        assert [*reproduce.commands(job)] == [('train',), *again * [('rm', '-f', str(report)), ('evaluate',)]]


def test_scaling_trains_every_system_at_its_own_size(jobs):
    for job in jobs('scaling', recipe='--lr 1 --datasets a'):
        system, size = job.row.split(', ')
        experts, residual = 'MoE' in system, 'plain' if system in ('DPOT', 'MoE-POT') else 'aot'
        command = train.parse(job.trainings[-1][3:])
        assert command.model == configs.model('moe-' * experts + size, residual=residual), job.row
        assert command.recipe.lr == 1 and command.run.datasets == ('a',), 'the recipe comes after size and mixture'


def test_fine_tuning_follows_the_papers_protocol(jobs):
    def flags(study, row, **options):
        chosen = [job for job in jobs(study, size='small', name='small', **options) if job.row == row]
        return [' '.join(job.trainings[-1]) for job in chosen]
    assert len({job.report for job in jobs('finetune')}) == 4 * 12, 'every system on every dataset'
    few = flags('few_shot', 'AOT-POT-FT')
    assert len(few) == 10 and all('--epochs 500' in command for command in few)
    assert not any('scratch' in command for command in few)
    assert all('--from_scratch' in command for command in flags('few_shot', 'AOT-POT'))
    turbulence, *others = flags('downstream', 'DPOT')
    assert '--resolution 512' in turbulence and not any('--resolution' in command for command in others)
    short, *_ = flags('few_shot', 'AOT-POT-FT', steps=3)
    assert '--steps 3' in short and '--epochs' not in short


def test_in_equal_time_a_row_has_its_share_of_the_steps_whatever_the_recipe(jobs):
    row = "DPOT's block, equal time"
    width, share = reproduce.EQUAL['nano']['plain']
    steps = configs.recipe('nano').steps
    for options, of_aot in (({}, steps), ({'recipe': '--steps 600'}, 600), ({'steps': 40}, 40)):
        [job] = [job for job in jobs('contrasts', **options) if job.row == row]
        command = train.parse(job.trainings[-1][3:])
        assert command.recipe.steps == round(share * of_aot) and f'--width {command.model.width}' == width
    assert not [job for job in jobs('contrasts', size='small') if job.row == row], 'its time was not measured'
    for study, recipe in ('streams', '--streams 2'), ('alpha', '--alpha 0.1'), ('ablation', '--residual plain'):
        with pytest.raises(configs.InputError, match=f'--recipe {recipe}: the rows differ in {recipe.split()[0]}'):
            jobs(study, recipe=recipe)
    for recipe in '--epochs 20', '--width 96', '--mlp 256':
        with pytest.raises(configs.InputError, match='as large and slow as AOT-POT by --steps alone'):
            jobs('contrasts', recipe=recipe)
    rows = {job.row for job in jobs('contrasts', size='tiny')}
    assert rows == {"DPOT's block", 'one stream', 'AOT-POT'}, 'whose optimizer is AdamW'


@pytest.mark.parametrize('errors, score', [
    ([1e-2] * 3, 100), ([1e-1, 1e-3], 100), ([1.], 0), ([math.inf, 0.1], -math.inf)])
def test_the_scaling_score_is_100_where_every_error_is_a_hundredth(errors, score):
    datasets = {str(i): {'model': {'rollout': {'mean': error}}, 'steady': False} for i, error in enumerate(errors)}
    row = reproduce.scaling({'parameters': 3e6, 'activated': 2e6, 'datasets': datasets})
    assert row == {'M activated parameters': 2, 'score': pytest.approx(score)}


def test_the_largest_gain_is_that_of_all_samples_and_sub_layers():
    gains = {'forward_composite': {'mean': [1, 2, 1], 'max': [3, 5, 4]}}
    assert reproduce.largest_gains({'gains': gains}) == {'forward composite': 5}


# ------------------------------------------------------------------------------------------------ tables

@pytest.fixture
def table(tmp_path):
    """table({row: {column: [number of each seed, or None]}}, reference) is the cells of the lines, and the numbers."""
    def table(rows, reference=()):
        jobs = []
        for row, columns in rows.items():
            for seed in range(max(map(len, columns.values()), default=0)):
                report = tmp_path / f'{row}-{seed}.json'
                report.write_text(json.dumps({'models': {'a': {
                    name: values[seed] for name, values in columns.items() if seed in range(len(values))}}}))
                jobs.append(SimpleNamespace(row=row, seed=seed, count='', report=report))
        label = 'L2RE of rollouts'
        measure = {label: lambda report: {name: value for name, value in report.items() if value != 'none'}}
        text, numbers = reproduce.tabulate(reproduce.Study('t', rows, tables=measure), jobs, dict(reference))
        lines = text.partition('```')[2].partition('```')[0].strip().splitlines()
        return [re.split(' {2,}', line) for line in lines], numbers[label]['seeds']
    return table


A, B = 'ns2d_fno_1e-3', 'ns2d_fno_1e-4'


def test_means_and_deviations_are_over_the_seeds_and_the_papers_numbers_stand_below(table):
    lines, rows = table({'DPOT': {A: [0.1, 0.3], B: [0.2]}, 'AOT-POT': {A: [0.2, 0.2]}}, {'DPOT': {A: 0.5}})
    assert rows['DPOT'][A] == {0: 0.1, 1: 0.3}
    assert lines == [
        ['L2RE of rollouts', 'geometric mean', A, B], ['DPOT', '0.2 ± 0.14', '0.2 ± 0.14', '0.2'],
        ['DPOT, paper', '0.5', '0.5', '-'], ['AOT-POT', '0.2 ± 0', '0.2 ± 0', '-']]
    lines, rows = table({'DPOT': {A: [0.1, 'none', 0.4], B: ['none', 0.9, 0.1]}, 'none': {}})
    assert rows['DPOT']['geometric mean'] == {2: pytest.approx(0.2)}, 'of the seeds that have both'
    assert lines[2] == ['none', '-', '-', '-']
    _, rows = table({'a': {'mine': [0.1], A: [0.4]}})
    assert rows['a']['geometric mean'] == {0: pytest.approx(0.2)}, "one's own datasets, too"


@pytest.mark.parametrize('error', [1e10, 10., None])
def test_a_geometric_mean_of_an_error_of_ten_or_more_has_diverged(table, error):
    fine = {A: [0.5, 0.5, 0.5], B: [2, 2, 2]}
    lines, _ = table({'p': fine, 'q': {A: [0.25, 0.25, 0.25], B: [2, error, 9.9]}})
    assert [line[1] for line in lines[1:]] == ['1 ± 0', 'diverged']


def test_a_steady_problem_has_the_papers_median_relative_l1_and_no_part_in_the_geometric_mean(table):
    steady = {'rollout': {'mean': 9}, 'step': {'mean': 9}, 'l1': {'samples': [0.5, 0.1, math.inf]}}
    other = {'rollout': {'mean': 0.4}, 'step': {'mean': 0.3}, 'l1': {'samples': [7]}}
    report = {'datasets': {'cno_poisson': {'model': steady, 'steady': True}, A: {'model': other, 'steady': False}}}
    columns, one_step = (measure(report) for measure in reproduce.SCORES.values())
    assert columns == {'cno_poisson (L1)': 0.5, A: 0.4} and one_step == {**columns, A: 0.3}
    _, rows = table({'a': {column: [value] for column, value in columns.items()}})
    assert rows['a']['geometric mean'][0] == pytest.approx(0.4)


def test_the_papers_tables_are_read():
    assert reproduce.paper_table('main', 'small')['AOT-POT']['ns2d_fno_1e-3'] == 0.00293
    assert reproduce.paper_table('rollout', 'small')['DPOT-FT']['500'] == 0.02911
    assert 'cno_poisson (L1)' in reproduce.paper_table('downstream', 'small')['DPOT']
    assert reproduce.paper_table('main', 'nano') == {}
    for study in ('main', 'downstream', 'few_shot', 'ablation', 'streams', 'sinkhorn', 'alpha', 'heterogeneity',
                  'poseidon'):
        assert set(reproduce.paper_table(study, 'small')) & set(reproduce.STUDIES[study].rows), study
