"""Numbers of several seeds in, a Markdown table out: means and deviations, and how the rows differ.

Rows are compared seed by seed: two networks of one seed see the same samples. A column of a row is
{seed: number}.
"""
import math
import shlex
import statistics
import sys
from pathlib import Path

import numpy as np

import configs

MEAN = 'geometric mean'
DIVERGED = 10                   # the error from which on a geometric mean says nothing
LEVEL = 0.05             # of all comparisons of a family together; intervals are those of 1 - LEVEL


def paper_table(name, size):
    """{row: {column: number}} of the paper's table for a study and a size in lab/paper.md; empty
    without one.
    """
    text = Path(__file__).with_name('paper.md').read_text()
    _, _, section = text.partition(f'### {name}, {size}\n')
    section, _, _ = section.partition('###')
    lines = [line.strip('| ').split(' | ') for line in section.splitlines() if line.startswith('|')]
    table = {}
    for row, *cells in lines[2:]:                  # above them are the columns and a line of dashes
        table[row] = {column: float(cell) for column, cell in zip(lines[0], cells) if cell != '-'}
    return table


def with_geometric_mean(row, columns):
    """A row {column: {seed: number}} with one more column, for the seeds that all `columns` have;
    inf: it diverged.
    """
    of_columns = [row.get(name, {}) for name in columns]
    means = {}
    for seed in sorted(set.intersection(*map(set, of_columns))):
        errors = np.array([numbers[seed] for numbers in of_columns])
        means[seed] = float(np.exp(np.log(errors).mean())) if (errors < DIVERGED).all() else math.inf
    return {MEAN: means, **row}


# ------------------------------------------------------------------------------------------------ comparisons

@np.errstate(divide='ignore', invalid='ignore')             # of errors that are zero
def paired(errors, others):
    """The geometric mean 'ratio' of {seed: error} to others, over the seeds of both.

    'interval' [low, high] of 95 % by Student's t is None for fewer than three seeds. Without any,
    or if an error is not finite, it is {}.
    """
    seeds = sorted(errors.keys() & others.keys())
    values = np.array([[errors[seed], others[seed]] for seed in seeds])
    if not seeds or not np.isfinite(values).all():
        return {}
    gaps = np.log(values[:, 0]) - np.log(values[:, 1])
    cell = {'ratio': float(np.exp(gaps.mean())), 'interval': None}
    if len(seeds) > 2:
        from scipy import stats  # which fewer seeds do not need
        test = stats.ttest_1samp(gaps, 0)
        cell['interval'] = np.exp(test.confidence_interval(1 - LEVEL)).tolist()
    return cell


def ratios_of(table, controls):
    """{control: {row: {column: `paired`}}} of {row: {column: {seed: number}}}, for the rows below
    each control.
    """
    rows = list(table)
    ratios = {}
    for control in controls:
        for row in rows[rows.index(control) + 1:]:
            pairs = {column: paired(numbers, table[control].get(column, {})) for column, numbers in table[row].items()}
            if any(pairs.values()):
                ratios.setdefault(control, {})[row] = {column: pair for column, pair in pairs.items() if pair}
    return ratios


# ------------------------------------------------------------------------------------------------ as text

def show_mean(numbers):
    """The mean of {seed: number} ± its deviation."""
    values = list(numbers.values())
    if not np.isfinite(values).all():
        return 'diverged'
    deviation = f' ± {statistics.stdev(values):.2g}' if len(values) > 1 else ''
    return f'{statistics.fmean(values):.4g}{deviation}'


def show_pair(pair):
    """The ratio of `paired`, and its interval in brackets."""
    interval = ' [{:.3f}, {:.3f}]'.format(*pair['interval']) if pair['interval'] else ''
    return f'{pair["ratio"]:.3f}{interval}'


def markdown(title, rows):
    """The lines of a table of [(row, {column: text})]."""
    columns = list(dict.fromkeys(column for _, texts in rows for column in texts))
    lines = [[title, *columns], ['---'] * (len(columns) + 1)]
    lines += [[row, *(texts.get(column, '-') for column in columns)] for row, texts in rows]
    return ['', *(f'| {" | ".join(line)} |' for line in lines)]


def tabulate(study, tables, reference):
    """The Markdown of a study, and its numbers {label: {'seeds', 'paper', 'ratios'}}, the last as
    of `ratios_of`.

    tables: {label: {row: {column: {seed: number}}}}; reference: as of `paper_table`, for the first
    of them. A table of errors begins with the geometric mean of each seed over the datasets that
    all rows have, and its rows are compared with each of study.controls, or the first row.
    """
    papers = {row: {column: {0: number} for column, number in cells.items()} for row, cells in reference.items()}
    numbers = {}
    for label, table in tables.items():
        controls = []
        if 'L2RE' in label:
            controls = [control for control in study.controls if control in table] or [*table][:1]
            filled = [cells for cells in table.values() if cells]
            common = [name for name in configs.DATASETS if filled and all(name in cells for cells in filled)]
            if common:
                table = {row: with_geometric_mean(cells, common) for row, cells in table.items()}
                papers = {row: with_geometric_mean(cells, common) for row, cells in papers.items()}
        numbers[label] = {'seeds': table, 'paper': papers, 'ratios': ratios_of(table, controls)}
        papers = {}                                         # which are for the first table alone
    text = [f'# {study.title}', '', f'`python -m lab.reproduce {shlex.join(sys.argv[1:])}`']
    for label, parts in numbers.items():
        means = []
        for row, columns in parts['seeds'].items():
            means.append((row, {column: show_mean(seeds) for column, seeds in columns.items() if seeds}))
            paper = parts['paper'].get(row, {})
            paper = {column: f'{paper[column][0]:.5g}' for column in columns if paper.get(column)}
            if paper:
                means.append(('*paper*', paper))
        text += markdown(label, means)
        for control, rows in parts['ratios'].items():
            pairs = [(row, {column: show_pair(pair) for column, pair in cells.items()}) for row, cells in rows.items()]
            text += markdown(f'{label}, ratio to {control}', pairs)
    text += ['', 'Means over the seeds ± their standard deviation, in italics the numbers of the paper; a geometric '
             f'mean of errors of which one is {DIVERGED} or more has diverged.']
    if any(parts['ratios'] for parts in numbers.values()):
        text.append("Ratios are geometric means over the seeds [95 % interval by Student's t over them].")
    return '\n'.join(text) + '\n', numbers
