"""The comparisons of docs/findings.md, from the errors of each seed in docs/seeds.

    python -m lab.ratios                prints the tables; draws ratios.png and mixtures.png in docs/figures
    python -m lab.ratios out/reproduce/contrasts-nano.json      first adds the errors of this study to docs/seeds

A ratio of two rows is of geometric means over the datasets and the seeds. Its interval of 95 % has
the deviation of all rows of its study. "visible" is the smallest ratio that four of five such studies
would show.
"""
import json
import math
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from configs import InputError
from lab import figures, tables
from runtime import files, terminal

SEEDS = Path('docs/seeds')
METRICS = 'rollouts', 'one step'
# with as many parameters, too
DPOT_EQUAL = "DPOT's block, equal time"
ONE_EQUAL = 'one stream, equal time'
CONTRASTS = {                   # in words: the study in docs/seeds, the row and that below the line
    "AOT-POT / DPOT's block, nano": ('contrasts', 'AOT-POT', "DPOT's block"),
    "AOT-POT / DPOT's block, nano, equal time": ('contrasts', 'AOT-POT', DPOT_EQUAL),
    "AOT-POT / DPOT's block, nano, AdamW": ('contrasts', 'AOT-POT, AdamW', "DPOT's block, AdamW"),
    "one stream / DPOT's block, nano": ('contrasts', 'one stream', "DPOT's block"),
    "one stream / DPOT's block, nano, equal time": ('contrasts', ONE_EQUAL, DPOT_EQUAL),
    'Muon / AdamW, nano': ('contrasts', 'AOT-POT', 'AOT-POT, AdamW'),
    'Muon / AdamW, nano, equal time': ('contrasts', 'AOT-POT', 'AOT-POT, AdamW, equal time'),
    "AOT-POT / DPOT's block, mini, 600 steps": ('contrasts-mini', 'AOT-POT', "DPOT's block"),
    "AOT-POT / DPOT's block, mini, 600 steps, equal time": ('contrasts-mini', 'AOT-POT', DPOT_EQUAL),
    "AOT-POT / DPOT's block, mini, 4000 steps": ('optimizer-mini', 'AOT-POT, Muon', 'DPOT, Muon'),
    "one stream / DPOT's block, mini, 600 steps": ('contrasts-mini', 'one stream', "DPOT's block"),
    "one stream / DPOT's block, mini, 600 steps, equal time": ('contrasts-mini', ONE_EQUAL, DPOT_EQUAL),
    "one stream / DPOT's block, mini, 4000 steps": ('optimizer-mini', 'one stream, Muon', 'DPOT, Muon'),
    'Muon / AdamW, mini, 600 steps': ('contrasts-mini', 'AOT-POT', 'AOT-POT, AdamW'),
    'Muon / AdamW, mini, 600 steps, equal time': ('contrasts-mini', 'AOT-POT', 'AOT-POT, AdamW, equal time'),
    'Muon / AdamW, mini, 4000 steps': ('optimizer-mini', 'AOT-POT, Muon', 'AOT-POT, AdamW'),
    'with the overlap / without': ('overlap', 'AOT-POT, overlap', 'AOT-POT'),
    'normalised inputs / raw': ('normalize', 'AOT-POT, normalized', 'AOT-POT'),
    'loss by the change / relative': ('loss', 'change', 'relative'),
    'without a / with': ('ablation', 'w/o a', 'AOT-POT'),
    'without T / with': ('ablation', 'w/o T', 'AOT-POT'),
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
KINDS = {                       # of equations: what the names of their datasets begin with
    'gases': 'ns2d_pdb', "FNO's flows": 'ns2d_fno', 'slow fields': ('swe_pdb', 'dr_pdb'),
    'smoke': ('ns2d_pda', 'ns2d_cond_pda'), 'obstacles': 'cfdbench', 'waves': 'wave',
}
MIXED = 1, 3, 6, 12             # datasets in the mixtures of the study mixtures


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


def errors_of(study, metric, prefix=''):
    """{row: {seed: geometric mean of the errors over the datasets that begin with a prefix}}."""
    first, *runs = map(json.loads, (SEEDS / f'{study}.jsonl').read_text().splitlines())
    columns = [k for k, name in enumerate(first['datasets']) if name.startswith(prefix)]
    if study.startswith('pieces'):
        contrasts = errors_of(study.replace('pieces', 'contrasts'), metric, prefix)
        rows = {row: contrasts[row] for row in SHARED if row in contrasts}
    else:
        rows = {}
    for run in runs if columns else ():
        errors = [run['errors'][k][METRICS.index(metric)] for k in columns]
        rows.setdefault(run['row'], {})[run['seed']] = geometric_mean(errors)
    return rows


def ratio(study, row, other, metric, prefix=''):
    """The tables.ratio_of of two rows, {} if a kind of equation is not in them."""
    rows = errors_of(study, metric, prefix)
    return tables.ratio_of(rows.get(row, {}), rows.get(other, {}), rows)


def pieces_of(study, prefix=''):
    """{words: {metric: tables.ratio_of}} of the comparisons of PIECES."""
    return {words: {metric: ratio(study, *rows, metric, prefix) for metric in METRICS}
            for words, rows in PIECES.items()}


def by_mixture(metric):
    """{arm: {K: tables.ratio_of to DPOT's block}} of the study mixtures, and under 'doubling' how
    this ratio changes with each doubling of K, by a line through the logarithms of each seed.
    """
    rows = errors_of('mixtures', metric)
    arms = dict.fromkeys(row.partition(', K = ')[0] for row in rows)
    growth = {}                             # {arm: {seed: factor by which the error grows}}
    for arm in arms:
        seeds = [rows.get(f'{arm}, K = {K}', rows[f"DPOT's block, K = {K}"]) for K in MIXED]
        growth[arm] = {}
        for seed in set.intersection(*map(set, seeds)):
            logs = [math.log(errors[seed]) for errors in seeds]
            growth[arm][seed] = math.exp(np.polyfit(np.log2(MIXED), logs, 1)[0])
    ratios = {}
    for arm in [*arms][1:]:
        ratios[arm] = {}
        for K in MIXED:
            of_K = {row: errors for row, errors in rows.items() if row.endswith(f', K = {K}')}
            ratios[arm][K] = tables.ratio_of(of_K.get(f'{arm}, K = {K}', {}), of_K[f"DPOT's block, K = {K}"], of_K)
        ratios[arm]['doubling'] = tables.ratio_of(growth[arm], growth["DPOT's block"], growth)
    return ratios


def print_ratios(title, rows):
    """Print {row: {column: tables.ratio_of}} as a table."""
    shown = []
    for words, pairs in rows.items():
        texts = {str(column): tables.show_pair(pair) for column, pair in pairs.items() if pair}
        if pairs.get('rollouts', {}).get('visible'):
            texts['visible in rollouts'] = f'{pairs["rollouts"]["visible"]:.2f}'
        shown.append((words, texts))
    print('\n'.join(tables.markdown(title, shown)))


def plot_mixtures(mixtures):
    """The ratios of {metric: `by_mixture`} over K with their intervals, a panel for each metric."""
    figure, axes = figures.pyplot().subplots(1, len(mixtures), figsize=(8, 3.2), sharey=True)
    for ax, (metric, arms) in zip(axes, mixtures.items()):
        ax.axhline(1, color='grey', linewidth=1)
        for shift, (arm, pairs) in enumerate(arms.items()):
            K = [K for K in MIXED if pairs[K]]
            ratios = [pairs[k]['ratio'] for k in K]
            places = np.array(K) * 1.03 ** (shift - len(arms) / 2)          # beside one another
            [line] = ax.plot(places, ratios, 'o-', markersize=4, label=arm)
            for place, k in zip(places, K):
                ax.plot([place] * 2, pairs[k]['interval'] or [pairs[k]['ratio']] * 2, color=line.get_color(), alpha=0.4)
        ax.set(xscale='log', xlabel='datasets in a mixture', title=metric)
        ax.set_xticks(MIXED, map(str, MIXED))
        ax.set_xticks([], minor=True)
    axes[0].set(ylabel="error over that of DPOT's block")
    axes[0].legend(fontsize=8)
    return figure


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('reports', nargs='*', help='JSON reports of lab.reproduce to keep in docs/seeds')
    for path in parser.parse_args().reports:
        keep(path)
    contrasts = {words: {metric: ratio(*rows, metric) for metric in METRICS} for words, rows in CONTRASTS.items()}
    print_ratios('ratio of errors', contrasts)
    pieces = pieces_of('pieces')
    print_ratios('what the AOT block is made of, nano', pieces)
    print_ratios('the same, mini', pieces_of('pieces-mini'))
    print_ratios('the same, mini, the gases alone', pieces_of('pieces-mini', KINDS['gases']))
    kinds = {}
    for kind, prefix in KINDS.items():
        kinds[kind] = {}
        for size, rows in (('nano, equal time', ('mixtures', 'AOT-POT, K = 12', "DPOT's block, K = 12")),
                           ('mini, equal steps', ('contrasts-mini', 'AOT-POT', "DPOT's block"))):
            for metric in METRICS:
                kinds[kind][f'{size}, {metric}'] = ratio(*rows, metric, prefix)
    print_ratios("AOT-POT / DPOT's block by Muon", kinds)
    mixtures = {metric: by_mixture(metric) for metric in METRICS}
    for metric, arms in mixtures.items():
        print_ratios(f"{metric}: ratio to DPOT's block in mixtures of K datasets", arms)
    known = {words: pairs for words, pairs in {**contrasts, **pieces}.items() if all(pairs.values())}
    figures.save_figure('docs/figures', 'ratios', figures.plot_ratios(known))
    figures.save_figure('docs/figures', 'mixtures', plot_mixtures(mixtures))


if __name__ == '__main__':
    terminal.cli(main)
