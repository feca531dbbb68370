"""The comparisons of docs/findings.md, from the errors of each seed in docs/seeds.

    python -m lab.ratios        prints the tables, and draws docs/figures/ratios.png

A ratio of two rows is a geometric mean over the datasets and the seeds, with an interval of 95 %.
"""
import json
from pathlib import Path
from statistics import geometric_mean

from lab import figures, tables
from runtime import terminal

CONTRASTS = {                   # in words: the file in docs/seeds, the row and that below the line
    'AOT-POT / DPOT, nano': ('optimizer', 'AOT-POT, Muon', 'DPOT, Muon'),
    'AOT-POT / DPOT, mini': ('optimizer-mini', 'AOT-POT, Muon', 'DPOT, Muon'),
    'AOT-POT / DPOT, nano by AdamW': ('optimizer', 'AOT-POT, AdamW', 'DPOT, AdamW'),
    'AOT-POT / DPOT, mini by AdamW': ('optimizer-mini', 'AOT-POT, AdamW', 'DPOT, AdamW'),
    'one stream / DPOT, nano': ('optimizer', 'one stream, Muon', 'DPOT, Muon'),
    'one stream / DPOT, mini': ('optimizer-mini', 'one stream, Muon', 'DPOT, Muon'),
    'Muon / AdamW, nano': ('optimizer', 'AOT-POT, Muon', 'AOT-POT, AdamW'),
    'Muon / AdamW, mini': ('optimizer-mini', 'AOT-POT, Muon', 'AOT-POT, AdamW'),
    'with the overlap / without': ('overlap', 'AOT-POT, overlap', 'AOT-POT'),
    'normalised inputs / raw': ('normalize', 'AOT-POT, normalized', 'AOT-POT'),
    'without a / with': ('ablation', 'w/o a', 'AOT-POT'),
    'without d / with': ('ablation', 'w/o d', 'AOT-POT'),
    'without T / with': ('ablation', 'w/o T', 'AOT-POT'),
}
KINDS = {                       # of equations: what the names of their datasets begin with
    'gases': 'ns2d_pdb', "FNO's flows": 'ns2d_fno', 'slow fields': ('swe_pdb', 'dr_pdb'),
    'smoke': ('ns2d_pda', 'ns2d_cond_pda'), 'obstacles': 'cfdbench', 'waves': 'wave',
}
METRICS = 'rollouts', 'one step'


def errors_of(file, row, metric, prefix=''):
    """{seed: geometric mean of the errors over the datasets that begin with a prefix} of a row."""
    errors = {}
    for line in Path('docs/seeds', f'{file}.jsonl').read_text().splitlines():
        run = json.loads(line)
        if run.pop('row') == row:
            seed = run.pop('seed')
            values = [pair[METRICS.index(metric)] for name, pair in run.items() if name.startswith(prefix)]
            if values:
                errors[seed] = geometric_mean(values)
    return errors


def ratio(file, row, other, metric, prefix=''):
    """The tables.paired of two rows, {} if a kind of equation is not in them."""
    return tables.paired(errors_of(file, row, metric, prefix), errors_of(file, other, metric, prefix))


def main():
    terminal.Parser(description=__doc__).parse_args()
    rows = {}
    for words, contrast in CONTRASTS.items():
        rows[words] = {metric: ratio(*contrast, metric) for metric in METRICS}
    kinds = {}
    for kind, prefix in KINDS.items():
        for size, file in (('nano', 'optimizer'), ('mini', 'optimizer-mini')):
            for metric in METRICS:
                pair = ratio(file, 'AOT-POT, Muon', 'DPOT, Muon', metric, prefix)
                if pair:
                    kinds.setdefault(kind, {})[f'{size}, {metric}'] = tables.show_pair(pair)
    shown = []
    for words, pairs in rows.items():
        shown.append((words, {metric: tables.show_pair(pair) for metric, pair in pairs.items()}))
    print('\n'.join(tables.markdown('ratio of errors', shown)))
    print('\n'.join(tables.markdown('AOT-POT / DPOT by Muon', [*kinds.items()])))
    figures.save_figure('docs/figures', 'ratios', figures.plot_ratios(rows))


if __name__ == '__main__':
    terminal.cli(main)
