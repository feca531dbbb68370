"""The comparisons of the findings: what is kept of a report, and how a ratio changes with the mixture."""
import json
import math

import pytest

import configs
from lab import ratios

ARMS = {"DPOT's block": 1.0, 'growing': 0.5, 'level': 2.0}          # arm -> its ratio to the first at K = 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(ratios, 'SEEDS', tmp_path)
    return tmp_path


def report(rows, size='nano', study='mixtures'):
    """The JSON of a study of two datasets, whose rollouts have the errors of `rows` {row: [error of each seed]}."""
    tables = {}
    for label, factor in (('L2RE of rollouts', 1), ('L2RE of one step', 0.1)):
        tables[label] = {'seeds': {}}
        for row, errors in rows.items():
            columns = {'geometric mean': {}, 'dr_pdb': {}, 'ns2d_pda': {}}
            for seed, error in enumerate(errors):
                columns['dr_pdb'][str(seed)] = factor * error * 2
                columns['ns2d_pda'][str(seed)] = factor * error / 2
            tables[label]['seeds'][row] = columns
    return {'study': study, 'size': size, 'tables': tables}


def test_a_kept_report_has_the_errors_of_each_dataset_and_seed(folder):
    (folder / 'report.json').write_text(json.dumps(report({'p': [0.1, 0.12345678], 'q': [0.3]}, 'mini')))
    ratios.keep(folder / 'report.json')
    lines = [json.loads(line) for line in (folder / 'mixtures-mini.jsonl').read_text().splitlines()]
    assert lines == [{'datasets': ['dr_pdb', 'ns2d_pda']},
                     {'row': 'p', 'seed': 0, 'errors': [[0.2, 0.02], [0.05, 0.005]]},
                     {'row': 'p', 'seed': 1, 'errors': [[0.247, 0.0247], [0.0617, 0.00617]]},
                     {'row': 'q', 'seed': 0, 'errors': [[0.6, 0.06], [0.15, 0.015]]}]
    assert ratios.errors_of('mixtures-mini', 'one step')['q'] == {0: pytest.approx(0.03)}
    assert ratios.errors_of('mixtures-mini', 'rollouts', 'ns2d')['p'][0] == pytest.approx(0.05)
    assert ratios.errors_of('mixtures-mini', 'rollouts', 'wave') == {}


def test_runs_that_are_kept_later_stand_beside_those_before_and_in_the_place_of_the_same(folder):
    path = folder / 'report.json'
    for rows in ({'p': [0.1, 0.2], 'q': [0.3]}, {'p': [0.4]}):
        path.write_text(json.dumps(report(rows)))
        ratios.keep(path)
    errors = ratios.errors_of('mixtures', 'rollouts')
    assert errors == {'p': {0: pytest.approx(0.4), 1: pytest.approx(0.2)}, 'q': {0: pytest.approx(0.3)}}
    path.write_text(path.read_text().replace('dr_pdb', 'swe_pdb'))
    before = (folder / 'mixtures.jsonl').read_bytes()
    with pytest.raises(configs.InputError, match='is of other datasets, dr_pdb ns2d_pda'):
        ratios.keep(path)
    assert (folder / 'mixtures.jsonl').read_bytes() == before


def test_pieces_takes_the_rows_that_it_shares_from_contrasts(folder):
    for study, rows in {'contrasts': {'AOT-POT': [0.2], 'AOT-POT, AdamW': [0.9]},
                        'pieces': {'AOT-POT': [0.7], 'AOT-POT, w/o d': [0.4]}}.items():
        (folder / 'report.json').write_text(json.dumps(report(rows, study=study)))
        ratios.keep(folder / 'report.json')
    assert 'AOT-POT"' not in (folder / 'pieces.jsonl').read_text()
    assert ratios.errors_of('pieces', 'rollouts') == {'AOT-POT': {0: pytest.approx(0.2)},
                                                      'AOT-POT, w/o d': {0: pytest.approx(0.4)}}
    found = ratios.pieces_of('pieces')['four streams: with d / without']['rollouts']['ratio']
    assert found == pytest.approx(0.5)


def test_the_ratio_to_dpots_block_grows_by_a_tenth_with_each_doubling(folder):
    pytest.importorskip('scipy', reason="the intervals are SciPy's")
    rows = {}
    for arm, start in ARMS.items():
        for K in ratios.MIXED:
            growth = 1.1 if arm == 'growing' else 1
            noise = [0.99, 1.0, 1 / 0.99]
            rows[f'{arm}, K = {K}'] = [0.01 * start * growth ** math.log2(K) * factor for factor in noise]
    (folder / 'report.json').write_text(json.dumps(report(rows)))
    ratios.keep(folder / 'report.json')
    for metric in ratios.METRICS:
        arms = ratios.by_mixture(metric)
        assert list(arms) == ['growing', 'level']
        assert arms['growing'][1]['ratio'] == pytest.approx(0.5, rel=1e-3)
        assert arms['growing'][12]['ratio'] == pytest.approx(0.5 * 1.1 ** math.log2(12), rel=1e-3)
        assert arms['growing']['doubling']['ratio'] == pytest.approx(1.1, rel=1e-3)
        assert arms['level']['doubling']['ratio'] == pytest.approx(1, rel=1e-3)
        low, high = arms['level'][3]['interval']
        assert low < 2 < high
