"""The comparisons of docs/findings.md, from the errors of each seed.

    python -m lab.ratios                    of the reports in docs/seeds
    python -m lab.ratios out/reproduce/contrasts-nano.json         of another report

A ratio of two rows is of geometric means over the datasets and the seeds. Its interval of 95 % is
by Student's t, with the deviation of the logarithms of all rows of its study together, as in an
analysis of variance: three seeds of one row know little of it. Seeds are not paired, for the same
seed on another processor is another run.
"""
import json
import math
import re
from pathlib import Path

import numpy as np

from lab.reproduce import DIVERGED, MEAN
from runtime import files, terminal
from sources.kinds import library

COMPARISONS = {                 # {study: [(a row, that below the line)]}
    'contrasts': [
        ('AOT-POT', "DPOT's block"),
        ('AOT-POT', "DPOT's block, equal time"),
        ('AOT-POT, AdamW', "DPOT's block, AdamW"),
        ('one stream', "DPOT's block"),
        ('one stream, equal time', "DPOT's block, equal time"),
        ('AOT-POT', 'AOT-POT, AdamW'),
        ('AOT-POT', 'AOT-POT, AdamW, equal time')],
    'pieces': [
        ("DPOT's block, post-norm", "DPOT's block"),
        ('one stream, pre-norm, w/o d', "DPOT's block"),
        ('one stream, w/o d', 'one stream, pre-norm, w/o d'),
        ('one stream', 'one stream, w/o d'),
        ('AOT-POT', 'AOT-POT, w/o d'),
        ('AOT-POT', 'one stream')],
}


def ratio_of(errors, others, rows):
    """How {seed: error} relates to others, 'ratio [low, high]', or 'ratio' if no row has two seeds.

    rows: {row: {seed: error}}, all those that know the deviation.
    """
    logarithms = [np.log(list(seeds.values())) for seeds in rows.values()]
    freedom = sum(len(logs) - 1 for logs in logarithms)
    gap = np.log(list(errors.values())).mean() - np.log(list(others.values())).mean()
    if not freedom:
        return f'{math.exp(gap):.3f}'
    stats = library('the intervals', 'scipy.stats')
    variance = sum(((logs - logs.mean()) ** 2).sum() for logs in logarithms) / freedom
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance * (1 / len(errors) + 1 / len(others)))
    return f'{math.exp(gap):.3f} [{math.exp(gap - half):.3f}, {math.exp(gap + half):.3f}]'


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('reports', nargs='*', default=sorted(Path('docs/seeds').glob('*.json')),
                        help='JSON reports of contrasts or pieces by lab.reproduce')
    for path in map(Path, parser.parse_args().reports):
        rows = {}
        problem = 'not a report of contrasts or pieces by lab.reproduce'
        with files.naming(path, problem, (*files.OF_FILES, TypeError)):
            report = json.loads(re.sub(r'\bnull\b', 'Infinity', path.read_text()))    # it diverged
            for metric in ('rollouts', 'one step'):
                table = report['tables'][f'L2RE of {metric}']['seeds']
                means = {row: columns[MEAN] for row, columns in table.items() if columns.get(MEAN)}
                for row in [row for row in means if max(means[row].values()) >= DIVERGED]:
                    print(f'{path.stem}, {metric}: without {row}, of which a seed has diverged')
                    del means[row]
                for row, other in COMPARISONS[report['study']]:
                    if row in means and other in means:
                        ratio = ratio_of(means[row], means[other], means)
                        rows.setdefault(f'{row} / {other}', {})[metric] = ratio
        print('', *terminal.table(f'{path.stem}: ratio of errors', rows), sep='\n')


if __name__ == '__main__':
    terminal.cli(main)
