"""The comparisons of docs/findings.md, from the errors of each seed.

    python -m lab.ratios                    of the reports in docs/seeds
    python -m lab.ratios out/reproduce/contrasts-nano.json          of another report of lab.reproduce

A ratio of two rows is of geometric means over the datasets and the seeds. Its interval of 95 % is
by Student's t, with the deviation of the logarithms of all rows of its study together, as in an
analysis of variance: three seeds of one row know little of it. Seeds are not paired, for the same
seed on another processor is another run.
"""
import json
import math
from pathlib import Path

import numpy as np

from lab import tables
from runtime import files, terminal

EQUAL = ', equal time'          # with as many parameters, too
COMPARISONS = {                 # {study: {in words: (the row, that below the line)}}
    'contrasts': {
        "AOT-POT / DPOT's block": ('AOT-POT', "DPOT's block"),
        "AOT-POT / DPOT's block, equal time": ('AOT-POT', "DPOT's block" + EQUAL),
        "AOT-POT / DPOT's block, AdamW": ('AOT-POT, AdamW', "DPOT's block, AdamW"),
        "one stream / DPOT's block": ('one stream', "DPOT's block"),
        "one stream / DPOT's block, equal time": ('one stream' + EQUAL, "DPOT's block" + EQUAL),
        'Muon / AdamW': ('AOT-POT', 'AOT-POT, AdamW'),
        'Muon / AdamW, equal time': ('AOT-POT', 'AOT-POT, AdamW' + EQUAL)},
    'pieces': {
        "DPOT's block: with a post-norm / without": ("DPOT's block, post-norm", "DPOT's block"),
        '... with a post-norm and d / without both': ("DPOT's block, post-norm and d", "DPOT's block"),
        "one stream, pre-norm, without d / DPOT's block": ('one stream, pre-norm, w/o d', "DPOT's block"),
        'one stream without d: post-norm / pre-norm': ('one stream, w/o d', 'one stream, pre-norm, w/o d'),
        'one stream: with d / without': ('one stream', 'one stream, w/o d'),
        'four streams: with d / without': ('AOT-POT', 'AOT-POT, w/o d'),
        'four streams / one': ('AOT-POT', 'one stream'),
        'a block round the mixer alone / two': ('a block round the mixer alone', 'AOT-POT'),
        'a block round the MLP alone / two': ('a block round the MLP alone', 'AOT-POT')},
}


def ratio_of(errors, others, rows):
    """How {seed: error} relates to others: the ratio, and its interval [low, high] or None.

    rows: {row: {seed: error}}, all those that know the deviation; None where no row has two seeds.
    """
    logarithms = [np.log(list(seeds.values())) for seeds in rows.values()]
    freedom = sum(len(logs) - 1 for logs in logarithms)
    gap = np.log(list(errors.values())).mean() - np.log(list(others.values())).mean()
    if not freedom:
        return math.exp(gap), None
    from scipy import stats  # the only use of SciPy here
    variance = sum(((logs - logs.mean()) ** 2).sum() for logs in logarithms) / freedom
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance * (1 / len(errors) + 1 / len(others)))
    return math.exp(gap), np.exp([gap - half, gap + half]).tolist()


def comparison(title, report):
    """The lines of a table of the ratios in a report, of rows that are there and have not diverged."""
    texts = {words: {} for words in COMPARISONS[report['study']]}
    for metric in ('rollouts', 'one step'):
        means = {row: columns[tables.MEAN]
                 for row, columns in report['tables'][f'L2RE of {metric}']['seeds'].items()}
        means = {row: errors for row, errors in means.items()
                 if errors and max(errors.values()) < tables.DIVERGED}
        for words, (row, other) in COMPARISONS[report['study']].items():
            if row in means and other in means:
                ratio, interval = ratio_of(means[row], means[other], means)
                bounds = ' [{:.3f}, {:.3f}]'.format(*interval) if interval else ''
                texts[words][metric] = f'{ratio:.3f}{bounds}'
    rows = [(words, columns) for words, columns in texts.items() if columns]
    return tables.markdown(f'{title}: ratio of errors', rows)


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('reports', nargs='*', default=sorted(Path('docs/seeds').glob('*.json')),
                        help='JSON reports of contrasts or pieces by lab.reproduce')
    for path in map(Path, parser.parse_args().reports):
        with files.naming(path, 'not a report of contrasts or pieces by lab.reproduce'):
            lines = comparison(path.stem, json.loads(path.read_text()))
        print('\n'.join(lines))


if __name__ == '__main__':
    terminal.cli(main)
