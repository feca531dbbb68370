"""Tables: means, deviations and the differences between rows, against values by hand."""
import math
import statistics

import pytest

from lab import reproduce, tables

A, B = 'ns2d_fno_1e-3', 'ns2d_fno_1e-4'


def seeds(*numbers):
    """{seed: number}, without the seeds whose number is None."""
    return {seed: number for seed, number in enumerate(numbers) if number is not None}


def table(rows, reference=()):
    """The cells of the lines of a table of errors, and its numbers."""
    label = 'L2RE of rollouts'
    text, numbers = tables.tabulate(reproduce.Study('t', {}), {label: rows}, dict(reference))
    lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in text.splitlines() if line[:1] == '|']
    return lines, numbers[label]


def test_means_and_deviations_are_over_the_seeds_and_the_papers_numbers_stand_below():
    lines, rows = table({'DPOT': {A: seeds(0.1, 0.3), B: seeds(0.2)}, 'AOT-POT': {A: seeds(0.2, 0.2)}},
                           {'DPOT': {A: 0.5}})
    assert rows['seeds']['DPOT'][A] == {0: 0.1, 1: 0.3} and f'{statistics.stdev([0.1, 0.3]):.2g}' == '0.14'
    assert lines[0] == ['L2RE of rollouts', 'geometric mean', A, B]
    assert lines[2] == ['DPOT', '0.2 ± 0.14', '0.2 ± 0.14', '0.2'] and lines[3] == ['DPOT, *paper*', '0.5', '0.5', '-']
    assert lines[4] == ['AOT-POT', '0.2 ± 0', '0.2 ± 0', '-']
    lines, _ = table({'DPOT': {A: seeds(0.1, 0.4), B: seeds(0.4, 0.4)}, 'none': {}})
    assert lines[2:] == [['DPOT', '0.3 ± 0.14', '0.25 ± 0.21', '0.4 ± 0'], ['none', '-', '-', '-']]
    lines, _ = table({'DPOT': {'20': seeds(0.1, math.nan)}})
    assert lines[0] == ['L2RE of rollouts', '20'] and lines[2] == ['DPOT', 'diverged']


def test_the_geometric_mean_is_over_the_datasets_of_one_seed_though_another_seed_is_missing():
    _, rows = table({'DPOT': {A: seeds(0.1, None, 0.4), B: seeds(None, 0.9, 0.1)}})
    assert rows['seeds']['DPOT']['geometric mean'] == {2: pytest.approx(0.2)}


@pytest.mark.parametrize('error', [1e10, 10., math.inf, math.nan])
def test_a_geometric_mean_of_an_error_of_ten_or_more_has_diverged(error):
    fine = {A: seeds(0.5, 0.5, 0.5), B: seeds(2, 2, 2)}
    lines, _ = table({'p': fine, 'q': {A: seeds(0.25, 0.25, 0.25), B: seeds(2, error, 9.9)}})
    assert [line[1] for line in lines[2:]] == ['1 ± 0', 'diverged']


def test_the_papers_tables_are_read():
    assert tables.paper_table('main', 'small')['AOT-POT']['ns2d_fno_1e-3'] == 0.00293
    assert tables.paper_table('rollout', 'small')['DPOT-FT']['500'] == 0.02911
    assert tables.paper_table('main', 'nano') == {}
    for study in ('main', 'downstream', 'few_shot', 'ablation', 'streams', 'sinkhorn', 'alpha', 'heterogeneity',
                  'poseidon'):
        assert set(tables.paper_table(study, 'small')) & set(reproduce.STUDIES[study].rows), study
