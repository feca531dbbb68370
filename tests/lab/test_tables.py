"""Tables: means, deviations and the differences between rows, against values by hand."""
import math
import statistics

import numpy as np
import pytest

from lab import reproduce, tables

A, B = 'ns2d_fno_1e-3', 'ns2d_fno_1e-4'


@pytest.fixture
def scipy():
    pytest.importorskip('scipy', reason="the intervals are SciPy's")


def seeds(*numbers):
    """{seed: number}, without the seeds whose number is None."""
    return {seed: number for seed, number in enumerate(numbers) if number is not None}


ERRORS = 'L2RE of rollouts'


def table(rows, reference=(), label=ERRORS, controls=()):
    """The cells of the lines of a table, those of the comparison below it, and the numbers."""
    study = reproduce.Study('t', {}, controls=controls)
    text, numbers = tables.tabulate(study, {label: rows}, dict(reference))
    lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in text.splitlines() if line[:1] == '|']
    heads = [i for i, line in enumerate(lines) if line[0].startswith(label)] + [len(lines)] * 2
    return lines[heads[0]:heads[1]], lines[heads[1]:heads[2]], numbers[label]


def test_means_and_deviations_are_over_the_seeds_and_the_papers_numbers_stand_below():
    pytest.importorskip('scipy', reason="the intervals of two seeds are SciPy's")
    lines, _, rows = table({'DPOT': {A: seeds(0.1, 0.3), B: seeds(0.2)}, 'AOT-POT': {A: seeds(0.2, 0.2)}},
                           {'DPOT': {A: 0.5}})
    assert rows['seeds']['DPOT'][A] == {0: 0.1, 1: 0.3} and f'{statistics.stdev([0.1, 0.3]):.2g}' == '0.14'
    assert lines[0] == ['L2RE of rollouts', 'geometric mean', A, B]
    assert lines[2] == ['DPOT', '0.2 ± 0.14', '0.2 ± 0.14', '0.2'] and lines[3] == ['*paper*', '0.5', '0.5', '-']
    assert lines[4] == ['AOT-POT', '0.2 ± 0', '0.2 ± 0', '-']
    lines, pairs, _ = table({'DPOT': {A: seeds(0.1, 0.4), B: seeds(0.4, 0.4)}, 'none': {}})
    assert lines[2:] == [['DPOT', '0.3 ± 0.14', '0.25 ± 0.21', '0.4 ± 0'], ['none', '-', '-', '-']] and not pairs
    lines, _, _ = table({'DPOT': {'20': seeds(0.1, math.nan)}})
    assert lines[0] == ['L2RE of rollouts', '20'] and lines[2] == ['DPOT', 'diverged']


def test_the_geometric_mean_is_over_the_datasets_of_one_seed_though_another_seed_is_missing():
    _, _, rows = table({'DPOT': {A: seeds(0.1, None, 0.4), B: seeds(None, 0.9, 0.1)}})
    assert rows['seeds']['DPOT']['geometric mean'] == {2: pytest.approx(0.2)}


@pytest.mark.parametrize('error', [1e10, 10., math.inf, math.nan])
def test_a_geometric_mean_of_an_error_of_ten_or_more_has_diverged_and_is_compared_with_none(scipy, error):
    """Of the row q one seed has diverged on one dataset, which is no part of the others' means and ratios."""
    fine = {A: seeds(0.5, 0.5, 0.5), B: seeds(2, 2, 2)}
    wild = {A: seeds(0.25, 0.25, 0.25), B: seeds(2, error, 9.9)}
    lines, pairs, rows = table({'p': fine, 'q': wild, 'r': fine}, controls=('p', 'q'))
    assert [line[1] for line in lines[2:]] == ['1 ± 0', 'diverged', '1 ± 0']
    assert pairs[2][0] == 'q' and '0.500 [0.500, 0.500]' in pairs[2]
    assert pairs[3] == ['r', *['1.000 [1.000, 1.000]'] * 3]
    assert [control for control, ratios in rows['ratios'].items() if 'geometric mean' in ratios['r']] == ['p']
    assert 'geometric mean' not in rows['ratios']['p']['q']
    wild[B] = seeds(2, 9.9, 9.9)
    assert 'diverged' not in str(table({'p': fine, 'q': wild})[0])


def test_a_ratio_has_students_interval_by_the_deviation_of_all_rows_by_hand(scipy):
    """The logarithms are 0, 1, 2 and 3, 4, 5 and, in a row beside them, -2, 2.

    The squares round the means are 2, 2 and 8, so the deviation is sqrt(12 / 5). Its five degrees of freedom
    have the quantiles 2.5706 (of 97.5 %) and 0.9195 (of 80 %).
    """
    first = {'x': seeds(*np.exp([-5., -4., -3.]))}
    other = {'x': {5: math.exp(-2), 0: math.exp(-1), 1: 1.0}}
    lines, pairs, rows = table({'first': first, 'other': other, 'wide': {'x': seeds(*np.exp([-2., 2.]))}})
    cell = rows['ratios']['first']['other']['x']
    error = math.sqrt(12 / 5 * (1 / 3 + 1 / 3))
    assert math.log(cell['ratio']) == pytest.approx(3)
    assert np.log(cell['interval']) == pytest.approx([3 - 2.5706 * error, 3 + 2.5706 * error], abs=2e-4)
    assert math.log(cell['visible']) == pytest.approx((2.5706 + 0.9195) * error, abs=3e-4)
    assert pairs[0] == [f'{ERRORS}, ratio to first', 'x'] and pairs[2][1].startswith('20.086 [')
    *_, rows = table({'first': first, 'other': other}, label='gain')
    assert rows['ratios'] == {}, 'errors alone are compared'


@pytest.mark.parametrize('wild', [math.inf, math.nan, 0.0])
def test_a_row_that_has_diverged_is_compared_with_none_and_widens_no_interval(scipy, wild):
    fine, other = seeds(1, 2, 3), seeds(2, 4, 6)
    assert tables.ratio_of(seeds(1, 2, wild), fine, {}) == tables.ratio_of(fine, {}, {}) == {}
    alone = tables.ratio_of(other, fine, {'fine': fine, 'other': other})
    assert alone == tables.ratio_of(other, fine, {'fine': fine, 'other': other, 'wild': seeds(1, 9, wild)})
    assert alone['ratio'] == pytest.approx(2)


def test_one_seed_has_a_ratio_without_an_interval():
    cell = tables.ratio_of(seeds(3), seeds(1.5), {'p': seeds(3), 'q': seeds(1.5)})
    assert cell == {'ratio': pytest.approx(2), 'interval': None, 'visible': None}


def test_the_papers_tables_are_read():
    assert tables.paper_table('main', 'small')['AOT-POT']['ns2d_fno_1e-3'] == 0.00293
    assert tables.paper_table('rollout', 'small')['DPOT-FT'] == {
        '20': 0.00121, '50': 0.00139, '100': 0.00292, '200': 0.00933, '500': 0.02911}
    assert tables.paper_table('few_shot', 'tiny')['AOT-POT-FT']['wave_layer 128'] == 0.15
    assert tables.paper_table('ablation', 'medium')['w/o T']['ns2d_cond_pda'] == 0.28587
    assert tables.paper_table('main', 'nano') == {}
    for study in ('main', 'downstream', 'few_shot', 'ablation', 'streams', 'sinkhorn', 'alpha', 'heterogeneity',
                  'poseidon'):
        assert set(tables.paper_table(study, 'small')) & set(reproduce.STUDIES[study].rows), study
