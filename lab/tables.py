"""Numbers of several seeds in, a Markdown table out: means and deviations beside those of the paper.

A column of a row is {seed: number}.
"""
import math
import shlex
import statistics
import sys
from pathlib import Path

import numpy as np

import configs

MEAN = 'geometric mean'
DIVERGED = 10                   # the error from which on a mean says nothing


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


# ------------------------------------------------------------------------------------------------ as text

def show_mean(numbers):
    """The mean of {seed: number} ± its deviation."""
    values = list(numbers.values())
    if not np.isfinite(values).all():
        return 'diverged'
    if len(values) == 1:
        return f'{values[0]:.5g}'
    return f'{statistics.fmean(values):.4g} ± {statistics.stdev(values):.2g}'


def markdown(title, rows):
    """The lines of a table of [(row, {column: text})]."""
    columns = list(dict.fromkeys(column for _, texts in rows for column in texts))
    lines = [[title, *columns], ['---'] * (len(columns) + 1)]
    lines += [[row, *(texts.get(column, '-') for column in columns)] for row, texts in rows]
    return ['', *(f'| {" | ".join(line)} |' for line in lines)]


def tabulate(study, tables, reference):
    """The Markdown of a study, and its numbers {label: {'seeds': {row: {column: {seed: number}}}}}.

    tables: {label: {row: {column: {seed: number}}}}; reference: as of `paper_table`, for the first
    of them. A table of errors begins with the geometric mean of each seed over the datasets that
    all rows have.
    """
    text = [f'# {study.title}', '', f'`python -m lab.reproduce {shlex.join(sys.argv[1:])}`']
    numbers = {}
    for label, table in tables.items():
        rows = {}
        for row, cells in table.items():
            rows[row] = cells
            paper = {name: {0: number} for name, number in reference.get(row, {}).items() if name in cells}
            if paper:
                rows[f'{row}, *paper*'] = paper
        filled = [cells for cells in table.values() if cells]
        common = [name for name in configs.DATASETS if filled and all(name in cells for cells in filled)]
        if common and 'L2RE' in label:
            rows = {row: with_geometric_mean(cells, common) for row, cells in rows.items()}
        numbers[label] = {'seeds': rows}
        reference = {}                                      # which is for the first table alone
        shown = [(row, {column: show_mean(seeds) for column, seeds in cells.items() if seeds})
                 for row, cells in rows.items()]
        text += markdown(label, shown)
    text += ['', 'Means over the seeds ± their standard deviation; a geometric mean of errors of '
                 f'which one is {DIVERGED} or more has diverged.']
    return '\n'.join(text) + '\n', numbers
