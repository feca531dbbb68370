"""Numbers of several seeds in, a Markdown table out: means and deviations, and how the rows differ.

Rows are compared seed by seed: two networks of one seed see the same samples. A column of a row is {seed: number}.
"""
import math
import shlex
import sys
from pathlib import Path

import numpy as np

import configs

MEAN = 'geometric mean'
DIVERGED = 10                   # the error from which on a geometric mean says nothing
# Student's |t| that is exceeded in one case of twenty, with 2, 3, ... degrees of freedom
QUANTILES = 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228


def paper_table(name, size):
    """{row: {column: number}} of the paper's table for a study and a size in lab/paper.md; empty without one."""
    _, _, section = Path(__file__).with_name('paper.md').read_text().partition(f'### {name}, {size}\n')
    lines = [[cell.strip() for cell in line.strip('| \n').split('|')]
             for line in section.split('###')[0].splitlines() if line.startswith('|')]
    return {row: {column: float(cell) for column, cell in zip(filter(None, lines[0]), cells) if cell != '-'}
            for row, *cells in lines[2:]}


# ------------------------------------------------------------------------------------------------ numbers

def with_geometric_mean(row, columns):
    """A row {column: {seed: number}} with one more column, for the seeds that all `columns` have; inf: it diverged."""
    seeds = sorted(set.intersection(*({*row.get(name, ())} for name in columns)))
    means = {}
    for seed in seeds:
        errors = np.array([row[name][seed] for name in columns])
        means[seed] = float(np.exp(np.log(errors).mean())) if (errors < DIVERGED).all() else math.inf
    return row | {MEAN: means}


def quantile(degrees):
    """Student's |t| of two or more degrees of freedom that is exceeded in one case of twenty."""
    if degrees < len(QUANTILES) + 2:
        return QUANTILES[degrees - 2]
    return 1.96 + 2.37 / degrees + 2.82 / degrees ** 2          # Abramowitz and Stegun, 26.7.5


def compared(numbers, others):
    """The geometric mean 'ratio' of the errors {seed: number} to others, over the seeds of both, of which are 'pairs'.

    'interval' [low, high] of 95 % by Student's t is None for fewer than three pairs. Without any, or if one of them has
    diverged, it is {}.
    """
    seeds = sorted(numbers.keys() & others.keys())
    gaps = np.array([np.log(numbers[seed]) - np.log(others[seed]) for seed in seeds])
    if not seeds or not np.isfinite(gaps).all():
        return {}
    mean, n = gaps.mean(), len(gaps)
    cell = {'ratio': math.exp(mean), 'interval': None, 'pairs': n}
    if n > 2:
        half = quantile(n - 1) * gaps.std(ddof=1) / math.sqrt(n)
        cell['interval'] = [math.exp(mean - half), math.exp(mean + half)]
    return cell


def cells_of(table, reference, controls):
    """{row: {column: cell}} of {row: {column: {seed: number}}}; cell['to'] has `compared` for each control above it."""
    rows = {}
    for row, columns in table.items():
        above = [control for control in controls if control in rows]
        rows[row] = {}
        for column, numbers in columns.items():
            if not numbers:
                continue
            values = [*numbers.values()]
            pairs = {control: compared(numbers, table[control].get(column, {})) for control in above}
            rows[row][column] = {
                'mean': float(np.mean(values)), 'seeds': len(values),
                'deviation': float(np.std(values, ddof=1)) if len(values) > 1 else None,
                'paper': reference.get(row, {}).get(column, {}).get(0),
                'to': {control: pair for control, pair in pairs.items() if pair}}
    return rows


# ------------------------------------------------------------------------------------------------ as text

@np.errstate(divide='ignore', invalid='ignore')             # of errors that are zero or not finite
def tabulate(study, tables, reference):
    """The Markdown text of a study and its numbers {label: {row: {column: {'mean', 'deviation', 'seeds', 'to', ...}}}}.

    tables: {label: {row: {column: {seed: number}}}}; reference: as of `paper_table`, for the first of them. A table of
    errors ends with the geometric mean of each seed over the datasets that all rows have, and below it the rows are
    compared with each of study.controls, or the first row, that stands above them.
    """
    reference = {row: {column: {0: number} for column, number in cells.items()} for row, cells in reference.items()}
    text = [f'# {study.title}', '', f'`python -m lab.reproduce {shlex.join(sys.argv[1:])}`']
    numbers = {}
    for label, table in tables.items():
        columns = list(dict.fromkeys(column for row in [*table.values(), *reference.values()] for column in row))
        common = [column for column in columns if column in configs.DATASETS
                  and all(column in row for row in table.values() if row)]
        controls = []
        if 'L2RE' in label:
            controls = [control for control in study.controls if control in table] or [*table][:1]
            if common:
                columns.append(MEAN)
                table = {row: with_geometric_mean(cells, common) for row, cells in table.items()}
                reference = {row: with_geometric_mean(cells, common) for row, cells in reference.items()}
        rows = numbers[label] = cells_of(table, reference, controls)
        text += ['', *means_table(label, columns, rows)]
        for control in controls:
            text += comparisons_table(label, control, columns, rows)
        reference = {}
    text += ['', 'Means over the seeds ± their standard deviation, in italics the numbers of the paper; the geometric '
             f'mean of errors of which one is {DIVERGED} or more has diverged. Ratios are geometric means over the '
             "seeds of both rows [95 % interval by Student's t, from three seeds on]; each interval is of one "
             'comparison alone, and covers the seeds and not the choice of the test trajectories.']
    return '\n'.join(text) + '\n', numbers


def means_table(label, columns, rows):
    """The lines of the means, with the paper's numbers below each row."""
    lines = []
    for row, cells in rows.items():
        lines.append((row, {column: show_mean(cell) for column, cell in cells.items()}))
        if paper := {column: cell['paper'] for column, cell in cells.items() if cell['paper'] is not None}:
            lines.append(('*paper*', {column: show_number(number, 5) for column, number in paper.items()}))
    return markdown(label, columns, lines)


def show_number(number, digits):
    return f'{number:.{digits}g}' if math.isfinite(number) else 'diverged'


def show_mean(cell):
    """The mean of a cell ± its deviation."""
    finite = math.isfinite(cell['mean'])
    deviation = f' ± {cell["deviation"]:.2g}' if finite and cell['seeds'] > 1 else ''
    return show_number(cell['mean'], 4) + deviation


def comparisons_table(label, control, columns, rows):
    """The lines of the ratios of the rows below `control` to it, if there are any."""
    lines = []
    for row, cells in rows.items():
        pairs = {column: cell['to'][control] for column, cell in cells.items() if control in cell['to']}
        if pairs:
            lines.append((row, {column: show_ratio(pair) for column, pair in pairs.items()}))
    return ['', *markdown(f'{label}, ratio to {control}', columns, lines)] if lines else []


def show_ratio(pair):
    """A ratio, with its interval in brackets."""
    interval = ' [{:.3f}, {:.3f}]'.format(*pair['interval']) if pair['interval'] else ''
    return f'{pair["ratio"]:.3f}{interval}'


def markdown(title, columns, rows):
    """The lines of a table of [(row, {column: text})]."""
    lines = [[title, *columns], ['---'] * (len(columns) + 1)]
    lines += [[row, *(texts.get(column, '-') for column in columns)] for row, texts in rows]
    return [f'| {" | ".join(line)} |' for line in lines]
