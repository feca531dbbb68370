"""The comparisons of the findings: what is kept of a report, and ratios by hand."""
import json
import math

import pytest

import configs
from lab import ratios


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(ratios, 'SEEDS', tmp_path)
    return tmp_path


def report(rows, size='nano', study='contrasts'):
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
    lines = [json.loads(line) for line in (folder / 'contrasts-mini.jsonl').read_text().splitlines()]
    assert lines == [{'datasets': ['dr_pdb', 'ns2d_pda']},
                     {'row': 'p', 'seed': 0, 'errors': [[0.2, 0.02], [0.05, 0.005]]},
                     {'row': 'p', 'seed': 1, 'errors': [[0.247, 0.0247], [0.0617, 0.00617]]},
                     {'row': 'q', 'seed': 0, 'errors': [[0.6, 0.06], [0.15, 0.015]]}]
    assert ratios.errors_of('contrasts-mini', 'one step')['q'] == {0: pytest.approx(0.03)}


def test_runs_that_are_kept_later_stand_beside_those_before_and_in_the_place_of_the_same(folder):
    path = folder / 'report.json'
    for rows in ({'p': [0.1, 0.2], 'q': [0.3]}, {'p': [0.4]}):
        path.write_text(json.dumps(report(rows)))
        ratios.keep(path)
    errors = ratios.errors_of('contrasts', 'rollouts')
    assert errors == {'p': {0: pytest.approx(0.4), 1: pytest.approx(0.2)}, 'q': {0: pytest.approx(0.3)}}
    path.write_text(path.read_text().replace('dr_pdb', 'swe_pdb'))
    before = (folder / 'contrasts.jsonl').read_bytes()
    with pytest.raises(configs.InputError, match='is of other datasets, dr_pdb ns2d_pda'):
        ratios.keep(path)
    assert (folder / 'contrasts.jsonl').read_bytes() == before


def test_pieces_takes_the_rows_that_it_shares_from_contrasts(folder):
    for study, rows in {'contrasts': {'AOT-POT': [0.2], 'one stream': [math.inf]},
                        'pieces': {'AOT-POT': [0.7], 'AOT-POT, w/o d': [0.4]}}.items():
        (folder / 'report.json').write_text(json.dumps(report(rows, study=study)))
        ratios.keep(folder / 'report.json')
    assert 'AOT-POT"' not in (folder / 'pieces.jsonl').read_text()
    assert ratios.errors_of('pieces', 'rollouts') == {
        'AOT-POT': {0: pytest.approx(0.2)}, 'one stream': {0: math.inf}, 'AOT-POT, w/o d': {0: pytest.approx(0.4)}}
    lines = ratios.comparison('pieces', ratios.PIECES)
    assert lines[3:] == ['| four streams: with d / without | 0.500 | 0.500 |'], 'one that diverged is left out'


def test_a_ratio_has_students_interval_by_the_deviation_of_all_rows_by_hand():
    """The logarithms are 0, 1, 2 and 3, 4, 5 and, in a row beside them, -2, 2.

    The squares round the means are 2, 2 and 8, so the deviation is sqrt(12 / 5). Its five degrees of freedom
    have the quantile 2.5706.
    """
    pytest.importorskip('scipy', reason="the intervals are SciPy's")
    rows = {row: dict(enumerate(map(math.exp, logs))) for row, logs in {
        'first': (0, 1, 2), 'other': (3, 4, 5), 'wide': (-2, 2)}.items()}
    ratio, interval = ratios.ratio_of(rows['other'], rows['first'], rows)
    error = math.sqrt(12 / 5 * (1 / 3 + 1 / 3))
    assert math.log(ratio) == pytest.approx(3)
    assert [*map(math.log, interval)] == pytest.approx([3 - 2.5706 * error, 3 + 2.5706 * error], abs=2e-4)
    assert ratios.ratio_of({0: 3.}, {0: 1.5}, {'p': {0: 3.}}) == (pytest.approx(2), None)
