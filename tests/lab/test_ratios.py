"""The comparisons of the findings: ratios by hand, and the numbers of the page."""
import importlib.util
import json
import math
import re

import pytest

from conftest import ROOT
from lab import ratios, reproduce

SCIPY = pytest.mark.skipif(not importlib.util.find_spec('scipy'), reason="the intervals are SciPy's")


def test_a_report_is_compared_row_by_row_but_for_rows_that_diverged_or_have_no_run(tmp_path, call, refused):
    rows = {'AOT-POT': {'0': 0.2}, 'AOT-POT, w/o d': {'0': 0.4}, 'one stream': {'0': math.inf}, "DPOT's block": {}}
    table = {'seeds': {row: {reproduce.MEAN: errors} for row, errors in rows.items()}}
    report = {'study': 'pieces', 'tables': {f'L2RE of {metric}': table for metric in ('rollouts', 'one step')}}
    path = tmp_path / 'pieces-nano.json'
    path.write_text(json.dumps(report).replace('Infinity', 'null'))             # as lab.reproduce writes it
    code, _, printed = call([path], ratios)
    *said, _, header, row = printed.splitlines()
    assert said == [f'pieces-nano, {metric}: without one stream, of which a seed has diverged'
                    for metric in ('rollouts', 'one step')]
    assert code == 0 and [re.split(' {2,}', line) for line in (header, row)] == [
        ['pieces-nano: ratio of errors', 'rollouts', 'one step'], ['AOT-POT / AOT-POT, w/o d', '0.500', '0.500']]
    for text in '{"study": "main"}', '[]':
        path.write_text(text)
        refused([path], f'{path}: not a report of contrasts or pieces', ratios)


@SCIPY
def test_a_ratio_has_students_interval_by_the_deviation_of_all_rows_by_hand():
    """The logarithms are 0, 1, 2 and 3, 4, 5 and, in a row beside them, -2, 2.

    The squares round the means are 2, 2 and 8, so the deviation is sqrt(12 / 5). Its five degrees of freedom
    have the quantile 2.5706.
    """
    rows = {row: dict(enumerate(map(math.exp, logs))) for row, logs in {
        'first': (0, 1, 2), 'other': (3, 4, 5), 'wide': (-2, 2)}.items()}
    numbers = re.split(r'[^\d.]+', ratios.ratio_of(rows['other'], rows['first'], rows))[:3]
    error = math.sqrt(12 / 5 * (1 / 3 + 1 / 3))
    expected = [3, 3 - 2.5706 * error, 3 + 2.5706 * error]
    assert [math.log(float(number)) for number in numbers] == pytest.approx(expected, abs=1e-3)
    assert ratios.ratio_of({0: 3.}, {0: 1.5}, {'p': {0: 3.}}) == '2.000'


@SCIPY
def test_the_kept_reports_give_the_numbers_of_the_page(call, monkeypatch):
    monkeypatch.chdir(ROOT)
    printed = call([], ratios)[2].splitlines()
    page = (ROOT / 'docs/findings.md').read_text()
    for row in ('| `nano`, equal steps |', '| `mini`, 600 steps |'):
        numbers = page.split(row)[1].splitlines()[0].split('|')[:2]
        assert any(line.startswith("AOT-POT / DPOT's block  ") and all(number.strip() in line for number in numbers)
                   for line in printed)
