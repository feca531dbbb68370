"""Numbers of several seeds in, a Markdown table out: means and deviations, and how each row differs from the first.

Rows are compared seed by seed: two networks of one seed see the same samples. A column of a row is {seed: number}.
"""
import shlex
import sys
from pathlib import Path

import configs

import numpy as np

MEAN = 'geometric mean'
STUDENT = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
           2.110, 2.101, 2.093, 2.086)     # 97.5 % quantiles of Student's t for 3, 4, ... pairs; the last one for more


def paper_table(name, size):
    """{row: {column: number}} of the paper's table for a study and a size in lab/paper.md; empty without one."""
    _, _, section = Path(__file__).with_name('paper.md').read_text().partition(f'### {name}, {size}\n')
    lines = [[cell.strip() for cell in line.strip('| \n').split('|')]
             for line in section.split('###')[0].splitlines() if line.startswith('|')]
    return {row: {column: float(cell) for column, cell in zip(filter(None, lines[0]), cells) if cell != '-'}
            for row, *cells in lines[2:]}


def with_geometric_mean(row, columns):
    """A row {column: {seed: number}} with one more column, for the seeds that all of the `columns` have."""
    seeds = sorted(set.intersection(*({*row.get(name, ())} for name in columns)))
    return row | {MEAN: {seed: float(np.exp(np.mean([np.log(row[name][seed]) for name in columns]))) for seed in seeds}}


@np.errstate(divide='ignore', invalid='ignore')             # of errors that are zero or not finite
def paired(numbers, others, kind):
    """The mean 'difference' or geometric mean 'ratio' (kind) of {seed: number} and others, over the seeds of both.

    'interval' [low, high] of 95 % by Student's t and 'differs', whether it excludes equality, are None for fewer than
    three 'pairs'. Without any, it is {}.
    """
    if not (seeds := sorted(numbers.keys() & others.keys())):
        return {}
    scale, back = (np.log, np.exp) if kind == 'ratio' else (np.array, float)
    gaps = np.array([scale(numbers[seed]) - scale(others[seed]) for seed in seeds])
    mean, n = gaps.mean(), len(gaps)
    cell = {kind: float(back(mean)), 'interval': None, 'differs': None, 'pairs': n}
    if n > 2:
        half = STUDENT[min(n - 3, len(STUDENT) - 1)] * gaps.std(ddof=1) / n ** 0.5
        cell |= {'interval': [float(back(mean - half)), float(back(mean + half))], 'differs': bool(abs(mean) > half)}
    return cell


def show(cell, kind):
    """The mean of a cell ± its deviation, or its ratio or difference [the interval], as text."""
    if kind == 'mean':
        return f'{cell["mean"]:.4g}' + (f' ± {cell["deviation"]:.2g}' if cell['seeds'] > 1 else '')
    form = '.3f' if kind == 'ratio' else '.3g'
    interval = ', '.join(f'{end:{form}}' for end in cell['interval'] or ())
    return f'{cell[kind]:{form}}' + f' [{interval}]' * bool(interval) + '*' * bool(cell['differs'])


def markdown(title, columns, rows):
    """The lines of a table of [(row, {column: text})]."""
    lines = [[title, *columns], ['---'] * (len(columns) + 1)]
    lines += [[row, *(texts.get(column, '-') for column in columns)] for row, texts in rows]
    return [f'| {" | ".join(line)} |' for line in lines]


@np.errstate(divide='ignore', invalid='ignore')
def tabulate(study, table, reference):
    """The Markdown text and the numbers {row: {column: {'mean', 'deviation', 'seeds', 'paper'}}} of a study.

    table: {row: {column: {seed: number}}}; reference: as of `paper_table`. If the columns are datasets, the last one is
    the geometric mean of each seed over those that all rows have. Rows after the first have the keys of `paired` too.
    """
    columns = list(dict.fromkeys(column for row in [*table.values(), *reference.values()] for column in row))
    common = [column for column in columns if all(column in row for row in table.values() if row)]
    reference = {row: {column: {0: number} for column, number in cells.items()} for row, cells in reference.items()}
    if common and {*columns} <= {*configs.DATASETS}:
        columns.append(MEAN)
        table, reference = ({row: with_geometric_mean(cells, common) for row, cells in rows.items()}
                            for rows in (table, reference))
    rows, means, pairs, kind, first = {}, [], [], study.measure.kind, next(iter(table))
    for row, cells in table.items():
        paper = {column: cell[0] for column, cell in reference.get(row, {}).items() if cell}
        rows[row] = {column: {
            'mean': float(np.mean([*numbers.values()])), 'seeds': len(numbers), 'paper': paper.get(column),
            'deviation': float(np.std([*numbers.values()], ddof=1)) if len(numbers) > 1 else None,
            **(paired(numbers, table[first].get(column, {}), kind) if row != first else {})}
            for column, numbers in cells.items() if numbers}
        means.append((row, {column: show(cell, 'mean') for column, cell in rows[row].items()}))
        means += [('*paper*', {column: f'{number:.5g}' for column, number in paper.items()})] * bool(paper)
        pairs.append((row, {column: show(cell, kind) for column, cell in rows[row].items() if kind in cell}))
    text = [f'# {study.title}', '', f'`python -m lab.reproduce {shlex.join(sys.argv[1:])}`', '',
            *markdown(study.measure.label, columns, means), '',
            f'Means over the seeds ± their standard deviation{", in italics those of the paper" * bool(reference)}.']
    if any(texts for _, texts in pairs):
        of, equal = ('Geometric means of the ratios', 1) if kind == 'ratio' else ('Means of the differences', 0)
        text += ['', *markdown(f'{kind} to {first}', columns, pairs[1:]), '',
                 f"{of} over the seeds of both rows [95 % interval by Student's t, from three seeds on]. An asterisk "
                 f'marks an interval that excludes {equal}; if nothing differed, one in twenty would do so by chance.']
    return '\n'.join(text) + '\n', rows
