"""The comparisons of docs/findings.md, from the errors of each seed in docs/seeds.

    python -m lab.ratios                prints the tables
    python -m lab.ratios out/reproduce/contrasts-nano.json      first adds the errors of this study to docs/seeds

A ratio of two rows is of geometric means over the datasets and the seeds. Its interval of 95 % is
by Student's t, with the deviation of the logarithms of all rows of its study together, as in an
analysis of variance: three seeds of one row know little of it. Seeds are not paired, for the same
seed on another processor is another run.
"""
import json
import math
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from configs import InputError
from lab import tables
from runtime import files, terminal

SEEDS = Path('docs/seeds')
METRICS = 'rollouts', 'one step'
EQUAL = ', equal time'          # with as many parameters, too
CONTRASTS = {                   # of the study contrasts: in words, the row and that below the line
    "AOT-POT / DPOT's block": ('AOT-POT', "DPOT's block"),
    "AOT-POT / DPOT's block, equal time": ('AOT-POT', "DPOT's block" + EQUAL),
    "AOT-POT / DPOT's block, AdamW": ('AOT-POT, AdamW', "DPOT's block, AdamW"),
    "one stream / DPOT's block": ('one stream', "DPOT's block"),
    "one stream / DPOT's block, equal time": ('one stream' + EQUAL, "DPOT's block" + EQUAL),
    'Muon / AdamW': ('AOT-POT', 'AOT-POT, AdamW'),
    'Muon / AdamW, equal time': ('AOT-POT', 'AOT-POT, AdamW' + EQUAL),
}
PIECES = {                      # the same, of the study pieces
    "DPOT's block: with a post-norm / without": ("DPOT's block, post-norm", "DPOT's block"),
    '... with a post-norm and d / without both': ("DPOT's block, post-norm and d", "DPOT's block"),
    "one stream, pre-norm, without d / DPOT's block": ('one stream, pre-norm, w/o d', "DPOT's block"),
    'one stream without d: post-norm / pre-norm': ('one stream, w/o d', 'one stream, pre-norm, w/o d'),
    'one stream: with d / without': ('one stream', 'one stream, w/o d'),
    'four streams: with d / without': ('AOT-POT', 'AOT-POT, w/o d'),
    'four streams / one': ('AOT-POT', 'one stream'),
    'a block round the mixer alone / two': ('a block round the mixer alone', 'AOT-POT'),
    'a block round the MLP alone / two': ('a block round the MLP alone', 'AOT-POT'),
}
SHARED = "DPOT's block", 'one stream', 'AOT-POT'           # rows of pieces, whose runs are those of contrasts


def keep(path):
    """Add the errors in a JSON report of lab.reproduce to docs/seeds/<study>.jsonl, a line a run.

    A run of the same row and seed is replaced. The first line names the datasets. An error is
    [L2RE of rollouts, of one step], of three digits.
    """
    report = json.loads(Path(path).read_text())
    pairs = [report['tables'][f'L2RE of {metric}']['seeds'] for metric in METRICS]
    datasets = sorted({name for columns in pairs[0].values() for name in columns} - {tables.MEAN})
    runs = {}
    name = report['study'] if report['size'] == 'nano' else f'{report["study"]}-{report["size"]}'
    kept = SEEDS / f'{name}.jsonl'
    if kept.exists():
        first, *lines = map(json.loads, kept.read_text().splitlines())
        if first['datasets'] != datasets:
            raise InputError(f'{path}: {kept} is of other datasets, {" ".join(first["datasets"])}')
        runs = {(line['row'], line['seed']): line['errors'] for line in lines}
    for row, columns in pairs[0].items():
        if report['study'] == 'pieces' and row in SHARED:
            continue
        for seed in columns[datasets[0]]:
            runs[row, int(seed)] = [[float(f'{table[row][name][seed]:.3g}') for table in pairs] for name in datasets]
    lines = [{'datasets': datasets}]
    lines += [{'row': row, 'seed': seed, 'errors': errors} for (row, seed), errors in runs.items()]
    files.write_text(kept, ''.join(json.dumps(line, separators=(',', ':')) + '\n' for line in lines))


def errors_of(study, metric):
    """{row: {seed: geometric mean of the errors over the datasets}} of a study in docs/seeds."""
    rows = {}
    if study.startswith('pieces'):
        contrasts = errors_of(study.replace('pieces', 'contrasts'), metric)
        rows = {row: contrasts[row] for row in SHARED if row in contrasts}
    for line in (SEEDS / f'{study}.jsonl').read_text().splitlines()[1:]:
        run = json.loads(line)
        errors = [pair[METRICS.index(metric)] for pair in run['errors']]
        rows.setdefault(run['row'], {})[run['seed']] = geometric_mean(errors)
    return rows


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


def comparison(study, pairs):
    """The lines of a table of {words: (row, row below the line)}, of rows that are there and have not diverged."""
    lines = []
    for words, (row, other) in pairs.items():
        texts = {}
        for metric in METRICS:
            rows = {name: errors for name, errors in errors_of(study, metric).items()
                    if all(error < tables.DIVERGED for error in errors.values())}
            if {row, other} <= {*rows}:
                ratio, interval = ratio_of(rows[row], rows[other], rows)
                texts[metric] = f'{ratio:.3f}' + (' [{:.3f}, {:.3f}]'.format(*interval) if interval else '')
        if texts:
            lines.append((words, texts))
    return tables.markdown(f'{study}: ratio of errors', lines)


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('reports', nargs='*', help='JSON reports of lab.reproduce to keep in docs/seeds')
    for path in parser.parse_args().reports:
        keep(path)
    for path in sorted(SEEDS.glob('*.jsonl')):
        print('\n'.join(comparison(path.stem, PIECES if path.stem.startswith('pieces') else CONTRASTS)))


if __name__ == '__main__':
    terminal.cli(main)
