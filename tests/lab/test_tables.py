"""Tables: means, deviations and the differences between rows, paired by seed, against loops and values by hand."""
import math
import statistics

import numpy as np
import pytest

from lab import reproduce, tables

A, B = 'ns2d_fno_1e-3', 'ns2d_fno_1e-4'


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
    lines, _, rows = table({'DPOT': {A: seeds(0.1, 0.3), B: seeds(0.2)}, 'AOT-POT': {A: seeds(0.2, 0.2)}},
                           {'DPOT': {A: 0.5}})
    assert rows['DPOT'][A] == {'mean': pytest.approx(0.2), 'seeds': 2, 'paper': 0.5,
                               'deviation': pytest.approx(statistics.stdev([0.1, 0.3])), 'to': {}}
    assert rows['DPOT'][B]['deviation'] is None and rows['AOT-POT'][A]['paper'] is None
    assert lines[0] == ['L2RE of rollouts', A, B, 'geometric mean']
    assert lines[2] == ['DPOT', '0.2 ± 0.14', '0.2', '0.2 ± 0.14'] and lines[3] == ['*paper*', '0.5', '-', '0.5']
    assert lines[4] == ['AOT-POT', '0.2 ± 0', '-', '0.2 ± 0']
    assert table({'DPOT': {A: seeds(0.1), B: seeds(0.4)}})[0][-1] == ['DPOT', '0.1', '0.4', '0.2']
    lines, pairs, _ = table({'DPOT': {A: seeds(0.1, 0.4), B: seeds(0.4, 0.4)}, 'none': {}})
    assert lines[2:] == [['DPOT', '0.25 ± 0.21', '0.4 ± 0', '0.3 ± 0.14'], ['none', '-', '-', '-']] and not pairs
    lines, _, _ = table({'DPOT': {'20': seeds(0.1, math.nan)}})
    assert lines[0] == ['L2RE of rollouts', '20'] and lines[2] == ['DPOT', 'diverged']


def test_the_geometric_mean_is_over_the_datasets_of_one_seed_though_another_seed_is_missing():
    _, _, rows = table({'DPOT': {A: seeds(0.1, None, 0.4), B: seeds(None, 0.9, 0.1)}})
    assert rows['DPOT'][A]['seeds'] == 2 and rows['DPOT']['geometric mean']['seeds'] == 1
    assert rows['DPOT']['geometric mean']['mean'] == pytest.approx(0.2)


@pytest.mark.parametrize('error', [1e10, 10., math.inf, math.nan])
def test_a_geometric_mean_of_an_error_of_ten_or_more_has_diverged_and_is_compared_with_none(error):
    """Of the row q one seed has diverged on one dataset, which is no part of the others' means and ratios."""
    fine = {A: seeds(0.5, 0.5, 0.5), B: seeds(2, 2, 2)}
    wild = {A: seeds(0.25, 0.25, 0.25), B: seeds(2, error, 9.9)}
    lines, pairs, rows = table({'p': fine, 'q': wild, 'r': fine}, {'q': {A: 0.5, B: 20.}}, controls=('p', 'q'))
    assert [line[-1] for line in lines[2:]] == ['1 ± 0', 'diverged', 'diverged', '1 ± 0']
    assert [line[0] for line in pairs[2:]] == ['q', 'r'] and pairs[2][1] == '0.500 [0.500, 0.500]'
    assert [line[-1] for line in pairs[2:]] == ['-', '1.000 [1.000, 1.000]']
    assert list(rows['r']['geometric mean']['to']) == ['p'] and not rows['q']['geometric mean']['to']
    wild[B] = seeds(2, 9.9, 9.9)
    assert 'diverged' not in str(table({'p': fine, 'q': wild})[0])


def test_numbers_that_are_no_errors_are_not_compared():
    lines, pairs, rows = table({'p': {'x': seeds(1, 2, 3)}, 'q': {'x': seeds(4, 5, 6)}}, label='gain')
    assert lines[2:] == [['p', '2 ± 1'], ['q', '5 ± 1']] and not pairs and rows['q']['x']['to'] == {}


def test_errors_are_compared_as_ratios_in_the_logarithm_against_a_loop():
    """With a seed missing in the middle of a row, by which pairs by position would shift."""
    rng = np.random.default_rng(0)
    rows = {row: {name: seeds(*(0.1 * np.exp(rng.normal(size=6))).tolist()) for name in (A, B)} for row in 'pq'}
    for numbers in rows['q'].values():
        numbers.update({seed: 0.5 * number for seed, number in numbers.items()})
    del rows['q'][A][2], rows['p'][B][4]
    _, pairs, cells = table(rows)
    means = {row: {seed: math.sqrt(values[A][seed] * values[B][seed]) for seed in range(6)
                   if seed in values[A] and seed in values[B]} for row, values in rows.items()}
    for column, first, other in ((A, rows['p'][A], rows['q'][A]), ('geometric mean', means['p'], means['q'])):
        logs = [math.log(other[seed] / first[seed]) for seed in range(6) if seed in first and seed in other]
        half = {5: 2.776, 4: 3.182}[len(logs)] * np.std(logs, ddof=1) / math.sqrt(len(logs))
        cell = cells['q'][column]['to']['p']
        assert cell['ratio'] == pytest.approx(math.exp(np.mean(logs))) and cell['pairs'] == len(logs)
        assert cell['interval'] == pytest.approx(np.exp([np.mean(logs) - half, np.mean(logs) + half]), rel=1e-3)
    assert pairs[2][0] == 'q' and pairs[2][1].startswith(f'{cells["q"][A]["to"]["p"]["ratio"]:.3f} [')


def test_intervals_by_hand_and_pairs_with_each_control_above():
    """The logarithms of the ratios are 0.1, 0.2 and 0.3: half the interval is 4.303 * 0.1 / sqrt(3) = 0.2484."""
    others = {3: 1., 1: 2., 2: 3., 0: 99.}
    errors = {seed: other * math.exp(0.1 * seed) for seed, other in others.items() if seed}
    rows = {'first': {A: others}, 'p': {A: errors}, 'q': {A: errors}}
    _, pairs, cells = table(rows, controls=('first', 'p'))
    cell = cells['q'][A]['to']['first']
    assert cell['pairs'] == 3 and cell['interval'] == pytest.approx(np.exp([0.2 - 0.2484, 0.2 + 0.2484]), rel=1e-4)
    assert pairs[0][0] == f'{ERRORS}, ratio to first' and pairs[2][:2] == ['p', '1.221 [0.953, 1.566]']
    assert list(cells['q'][A]['to']) == ['first', 'p'] and list(cells['p'][A]['to']) == ['first']
    assert cells['q'][A]['to']['p']['ratio'] == 1 and cells['first'][A]['to'] == {}
    two = tables.compared(seeds(9, 11), seeds(3, 11))
    assert two == {'ratio': pytest.approx(3 ** 0.5), 'interval': None, 'pairs': 2}
    assert tables.compared(seeds(1), {5: 1}) == tables.compared(seeds(1, math.inf), seeds(1, 1)) == {}


def test_the_papers_numbers_stand_in_the_first_table_alone():
    rows = {'first': {A: seeds(1, 1, 1)}, 'p': {A: seeds(0.9, 0.93, 0.88)}}
    both = {ERRORS: rows, 'L2RE of one': rows}
    text, numbers = tables.tabulate(reproduce.Study('t', {}), both, {'p': {A: 0.5}})
    assert numbers[ERRORS]['p'][A]['paper'] == 0.5 and numbers['L2RE of one']['p'][A]['paper'] is None
    assert text.count('ratio to first') == 2 and 'not the choice of the test' in text


def test_the_quantiles_are_those_of_students_t():
    """The integral of the density up to each of them, with 2, 3, ... degrees of freedom, is 0.975."""
    for degrees in range(2, 41):
        quantile = tables.quantile(degrees)
        x = np.linspace(0, quantile, 20001)
        constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
        density = constant * (1 + x ** 2 / degrees) ** (-(degrees + 1) / 2)
        assert (density[1:] + density[:-1]).sum() * x[1] / 2 == pytest.approx(0.475, abs=1e-4), degrees


def test_the_papers_tables_are_read():
    assert tables.paper_table('main', 'small')['AOT-POT']['ns2d_fno_1e-3'] == 0.00293
    assert tables.paper_table('rollout', 'small')['DPOT-FT'] == {
        '20': 0.00121, '50': 0.00139, '100': 0.00292, '200': 0.00933, '500': 0.02911}
    assert tables.paper_table('few_shot', 'tiny')['AOT-POT-FT']['wave_layer 128'] == 0.15
    assert tables.paper_table('ablation', 'medium')['w/o T']['ns2d_cond_pda'] == 0.28587
    assert tables.paper_table('depth', 'nano') == {}
    for study in ('main', 'downstream', 'few_shot', 'ablation', 'streams', 'sinkhorn', 'alpha', 'heterogeneity',
                  'poseidon'):
        assert set(tables.paper_table(study, 'small')) & set(reproduce.STUDIES[study].rows), study
