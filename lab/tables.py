"""Numbers of several seeds in, a Markdown table out: means and deviations, and how the rows differ.

A column of a row is {seed: number}. Ratios are of geometric means over the seeds. Their intervals
take the deviation of the logarithms from all rows of a table together, as in an analysis of
variance: three seeds of one row know little of it. Seeds are not paired, for the same seed on another
processor is another run.
"""
import math
import shlex
import statistics
import sys
from pathlib import Path

import numpy as np

import configs

MEAN = 'geometric mean'
DIVERGED = 10                   # the error from which on means and ratios say nothing
LEVEL = 0.05                    # intervals are those of 1 - LEVEL
POWER = 0.8                     # how often a ratio that is called visible would be seen


def paper_table(name, size):
    """{row: {column: number}} of a table in lab/paper.md; empty if there is none."""
    text = Path(__file__).with_name('paper.md').read_text()
    _, _, section = text.partition(f'### {name}, {size}\n')
    section, _, _ = section.partition('###')
    lines = [line.strip('| ').split(' | ') for line in section.splitlines() if line.startswith('|')]
    table = {}
    for row, *cells in lines[2:]:                  # above them are the columns and a line of dashes
        table[row] = {column: float(cell) for column, cell in zip(lines[0], cells) if cell != '-'}
    return table


def with_geometric_mean(row, columns):
    """A row with one more column for the seeds that all `columns` have; inf: it diverged."""
    of_columns = [row.get(name, {}) for name in columns]
    means = {}
    for seed in sorted(set.intersection(*map(set, of_columns))):
        errors = np.array([numbers[seed] for numbers in of_columns])
        means[seed] = float(np.exp(np.log(errors).mean())) if (errors < DIVERGED).all() else math.inf
    return {MEAN: means, **row}


# ------------------------------------------------------------------------------------------------ comparisons

def logarithms(numbers):
    """The logarithms of {seed: error}, without any if an error is zero or has `DIVERGED`."""
    errors = np.array(list(numbers.values()), dtype=float)
    return np.log(errors) if ((errors > 0) & (errors < DIVERGED)).all() else np.array([])


def spread(rows):
    """The deviation of log errors within {row: {seed: error}}, and its degrees of freedom."""
    samples = [logs for logs in map(logarithms, rows.values()) if len(logs)]
    freedom = sum(len(logs) - 1 for logs in samples)
    squares = sum(((logs - logs.mean()) ** 2).sum() for logs in samples)
    return math.sqrt(squares / freedom) if freedom else math.nan, freedom


def ratio_of(errors, others, rows):
    """How {seed: error} relates to others: {'ratio', 'interval', 'visible'}, {} if one has diverged.

    The 'interval' [low, high] of 95 % is by Student's t with the `spread` of the rows. 'visible' is
    the smallest ratio that would be seen in four of five such comparisons. Both are None where no
    row has two seeds.
    """
    above = logarithms(errors)
    below = logarithms(others)
    if not len(above) or not len(below):
        return {}
    gap = above.mean() - below.mean()
    cell = {'ratio': float(np.exp(gap)), 'interval': None, 'visible': None}
    deviation, freedom = spread(rows)
    if freedom:
        from scipy import stats  # the only use of SciPy
        error = deviation * math.sqrt(1 / len(above) + 1 / len(below))
        half = stats.t.ppf(1 - LEVEL / 2, freedom) * error
        cell['interval'] = np.exp([gap - half, gap + half]).tolist()
        cell['visible'] = float(np.exp(half + stats.t.ppf(POWER, freedom) * error))
    return cell


def ratios_of(table, controls):
    """{control: {row: {column: `ratio_of`}}} of a table, for the rows below each control."""
    names = list(table)
    ratios = {}
    for control in controls:
        for name in names[names.index(control) + 1:]:
            cells = {}
            for column, errors in table[name].items():
                rows = {row: columns.get(column, {}) for row, columns in table.items()}
                cells[column] = ratio_of(errors, rows[control], rows)
            if any(cells.values()):
                ratios.setdefault(control, {})[name] = {column: cell for column, cell in cells.items() if cell}
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
    """What `ratio_of` returns as text: the ratio and, in brackets, its interval."""
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
        text.append("Ratios are of geometric means over the seeds [95 % interval by Student's t, with the deviation of "
                    'all rows together].')
    return '\n'.join(text) + '\n', numbers
