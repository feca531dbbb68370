"""The studies: what they run, that nothing is run twice, and the tables that they print."""
import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import configs
import data
import train
from helpers import travelling
from lab import reproduce, tables
from nets import fast
from runtime import terminal

NAMES = 'ns2d_fno_1e-3', 'ns2d_fno_1e-4', 'swe_pdb'
SMALL = '--resolution 16 --width 16 --mlp 16 --batch_size 4'
FLAGS = ['--steps', 4, '--seeds', 1, '--device', 'cpu', '--data', 'data', '--out', 'out']


def in_this_process(words):
    """Whether a command of ours succeeds, which runs in this process: that saves seconds for each command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', list(words[2:]))
        for name in ('Fast', 'disagreement'):                   # which lab.blocks replaces
            patch.setattr(fast, name, getattr(fast, name))
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
        data.write(f'data/{name}', train=u[:N], test=u[N:], channels=configs.DATASETS[name].channels, dt=0.1)
    monkeypatch.setattr(reproduce, 'succeeds', in_this_process)
    command = train.parse(SMALL.split())
    monkeypatch.setitem(configs.SIZES, 'nano', (command.model, command.recipe))
    study = reproduce.STUDIES['rollout']
    measure = study.measure._replace(command=study.measure.command.replace('500', '20'))
    monkeypatch.setitem(reproduce.STUDIES, 'rollout', study._replace(measure=measure))
    return tmp_path


@pytest.fixture
def jobs(monkeypatch):
    """jobs(study, flag=value, ...) are those of a study, whose datasets are all there."""
    monkeypatch.setattr(data, 'find', lambda folder, names: names)
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
def test_every_study_runs_from_data_to_table_and_nothing_of_it_a_second_time(folder, monkeypatch, call):
    columns = {'downstream': ['cno_poisson (L1)'], 'few_shot': ['ns2d_fno_1e-4 16'],
               'rollout': ['20', 'growth'], 'probe': ['ns2d_fno', 'swe_pdb', 'mean'],
               'scaling': ['M activated parameters', 'score'],
               'gains': ['forward', 'backward', 'forward composite', 'backward composite']}
    usual = ['geometric mean', *NAMES]
    monkeypatch.setitem(configs.MIXTURES, 'mixture_6', NAMES)
    for study, config in reproduce.STUDIES.items():
        names = [name for name in config.rows if not name.endswith((' 10 datasets', ' 12 datasets'))]
        names = [name for name in names if 'fixed' not in name or name.endswith(NAMES[0])]
        names = [name for name in names if name != '0 rounds']      # which may end in inf, as in the paper
        if study == 'main':                         # FNO may not be installed
            names = ['AOT-POT', 'UNet']
        rows = {name: config.rows[name] for name in (names[0], names[-1])}
        if study == 'scaling':                      # of the paper's sizes, which are too slow here
            rows = {'DPOT': '--residual plain', 'AOT-POT': ''}
        if study in ('unseen', 'poseidon'):         # whose data are not there
            continue
        monkeypatch.setitem(reproduce.STUDIES, study, config._replace(rows=rows))
        code, error, _ = call([study, *FLAGS], reproduce)
        assert code == 0 or study == 'few_shot' and '--samples 32: the training split has only 16' in error, error
        assert list(numbers(study)) == list(rows)
        for row in numbers(study).values():
            assert all(list(seeds) == ['0'] and math.isfinite(seeds['0']) for seeds in row.values())
            assert sorted(row) == sorted(columns.get(study, usual)), study
        code, error, printed = call([study, *FLAGS, '--list'], reproduce)
        assert code == 0 and not printed or study == 'few_shot', error


def test_a_command_runs_in_a_process_of_its_own_whose_exit_code_counts():
    assert reproduce.succeeds([sys.executable, '-c', '']) and not reproduce.succeeds([sys.executable, '-c', 'exit(1)'])


def test_a_run_of_another_mixture_is_refused_and_nothing_changes(folder, monkeypatch, refused, call):
    def contents():
        return {path: path.read_bytes() for path in Path('out').rglob('*') if path.is_file()}
    monkeypatch.setitem(reproduce.STUDIES, 'ablation', reproduce.Study('one', {'AOT-POT': ''}))
    flags = ['ablation', *FLAGS, '--datasets']
    assert call([*flags, NAMES[2], NAMES[0]], reproduce)[0] == 0
    before = contents()
    error, printed = refused([*flags, NAMES[0]], 'these runs failed', reproduce, lines=2)
    assert f'error: --datasets {NAMES[0]}: the run to resume has {NAMES[2]} {NAMES[0]}\n' in error
    assert error.endswith('/aot-seed_0\n') and not printed and contents() == before


def test_failing_runs_and_absent_data_are_named_and_the_others_go_on(folder, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, 'neuralop.models', None)           # as if it were not installed
    monkeypatch.setitem(reproduce.STUDIES, 'ablation', reproduce.Study('two', {
        'FNO': '--network FNO', 'tuned': [reproduce.Part('--checkpoint {start} --dataset swe_pdb', '--network FNO')],
        'good': '', 'absent': '--datasets dr_pdb'}))
    error, printed = refused(['ablation', *FLAGS], 'these runs failed, as the lines above say: ', reproduce, lines=0)
    assert error.count('pip install neuraloperator') == 1, 'and what starts from it is not begun'
    assert error.endswith('/network_FNO-seed_0 out/nano-4_steps/network_FNO-dataset_swe_pdb-seed_0\n')
    assert [row for row, columns in numbers('ablation').items() if any(columns.values())] == ['good']
    assert 'left out: --datasets dr_pdb: no data/dr_pdb/train.h5; ' in printed
    refused(['heterogeneity', *FLAGS], 'heterogeneity: data has none of the datasets', reproduce, lines=0)


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
    assert len({job.folder for job in jobs('finetune')}) == 4 * 12, 'every system on every dataset'
    few = flags('few_shot', 'AOT-POT-FT')
    assert len(few) == 10 and all('--epochs 500' in command for command in few)
    turbulence, *others = flags('downstream', 'DPOT')
    assert '--resolution 512' in turbulence and not any('--resolution' in command for command in others)
    short, *_ = flags('few_shot', 'AOT-POT-FT', steps=3)
    assert '--steps 3' in short and '--epochs' not in short


@pytest.mark.parametrize('errors, score', [
    ([1e-2] * 3, 100), ([1e-1, 1e-3], 100), ([1.], 0), ([math.inf, 0.1], -math.inf)])
def test_the_scaling_score_is_100_where_every_error_is_a_hundredth(errors, score):
    datasets = {str(i): {'model': {'rollout': {'mean': error}}, 'steady': False} for i, error in enumerate(errors)}
    row = reproduce.scaling({'parameters': 3e6, 'activated': 2e6, 'datasets': datasets})
    assert row == {'M activated parameters': 2, 'score': pytest.approx(score)}


def test_a_steady_problem_has_the_papers_median_relative_l1_and_no_part_in_the_geometric_mean(tmp_path):
    steady = {'rollout': {'mean': 9}, 'step': {'mean': 9}, 'l1': {'samples': [0.5, 0.1, None]}}
    other = {'rollout': {'mean': 0.4}, 'step': {'mean': None}, 'l1': {'samples': [7]}}
    datasets = {'cno_poisson': {'model': steady, 'steady': True}, NAMES[2]: {'model': other, 'steady': False}}
    (tmp_path / 'a.json').write_text(json.dumps({'models': {'a': {'datasets': datasets}}}))
    report = reproduce.read_report(tmp_path / 'a.json')
    columns = reproduce.rollout_errors(report)
    assert columns == {'cno_poisson (L1)': 0.5, NAMES[2]: 0.4}
    assert 'cno_poisson (L1)' in tables.paper_table('downstream', 'small')['DPOT'], 'the column of the paper'
    assert reproduce.one_step_errors(report) == {NAMES[2]: math.inf}
    table = {'a': {column: {0: value} for column, value in columns.items()}}
    _, numbers = tables.tabulate(reproduce.Study('t', {}), {'L2RE of rollouts': table}, {})
    assert numbers['L2RE of rollouts']['seeds']['a']['geometric mean'][0] == pytest.approx(0.4)


def test_in_equal_time_a_row_has_its_share_of_the_steps_whatever_the_recipe(jobs):
    row = "DPOT's block, equal time"
    width, share = reproduce.EQUAL['nano']['plain']
    steps = configs.recipe('nano').steps
    for options, of_aot in (({}, steps), ({'recipe': '--steps 600'}, 600), ({'steps': 40}, 40)):
        [job] = [job for job in jobs('contrasts', **options) if job.row == row]
        command = train.parse(job.trainings[-1][3:])
        assert command.recipe.steps == round(share * of_aot) and f'--width {command.model.width}' == width
    assert not [job for job in jobs('contrasts', size='small') if job.row == row], 'its time was not measured'
