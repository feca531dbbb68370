"""docs/tour.md: every line prints what the page shows."""
import doctest
import re
from pathlib import Path

import configs

import pytest
import torch

import aotpot
from runtime import checkpoint

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / 'docs/tour.md').read_text()
NUMBER = re.compile(r'-?\d+\.\d*')


@pytest.fixture(autouse=True)
def root(monkeypatch):
    """The page is read at the root of the repository, and changes how torch prints."""
    monkeypatch.chdir(ROOT)
    yield
    torch.set_printoptions(profile='default')


def close(expected, printed):
    """Whether two decimal numbers differ by at most 2 %, or by one in the last digit of the expected one."""
    digits = len(expected.split('.')[1])
    return abs(float(expected) - float(printed)) < max(0.02 * abs(float(expected)), 1.01 * 10 ** -(digits or 3))


class Checker(doctest.OutputChecker):
    """Decimal numbers are compared with a tolerance, for processors round differently, and all else word for word."""

    def check_output(self, expected, printed, flags):
        words = [''.join(NUMBER.sub('#', text).split()) for text in (expected, printed)]
        return words[0] == words[1] and all(map(close, NUMBER.findall(expected), NUMBER.findall(printed)))


def test_every_line_of_the_tour_prints_what_the_page_shows():
    page = doctest.DocTestParser().get_doctest(re.sub('(?m)^```.*$', '', PAGE), {}, 'tour', 'docs/tour.md', 0)
    report = []
    result = doctest.DocTestRunner(Checker(), verbose=False).run(page, out=report.append)
    assert result.attempted > 70 and not result.failed, ''.join(report)


@pytest.mark.slow
def test_the_page_runs_with_a_network_of_another_size_too(tmp_path):
    """As its last paragraph promises of `nano`: the lines print other numbers, and none ends in an error."""
    torch.manual_seed(0)
    config = configs.model('nano')
    path = tmp_path / 'last.pt'
    checkpoint.write({'model': aotpot.AOTPOT(config).state_dict(), 'config': {'model': vars(config)}, 'step': 1}, path)
    text = re.sub('(?m)^```.*$', '', PAGE).replace("'weights/mini.pt'", repr(str(path)))
    page = doctest.DocTestParser().get_doctest(text, {}, 'tour', 'docs/tour.md', 0)
    report = []
    doctest.DocTestRunner(Checker(), verbose=False).run(page, out=report.append)
    assert 'Traceback' not in ''.join(report), ''.join(report)


@pytest.mark.parametrize('expected, printed, same', [
    ('(0.0191, 0.1657)', '(0.0192, 0.1651)', True), ('(0.0191, 0.1657)', '(0.0191, 0.1757)', False),
    ('(0.0191, 0.1657)', '(0.0196, 0.1657)', False), ('tensor([-0.000, 1.])', 'tensor([0.000, 1.000])', True),
    ('tensor([1.])', 'tensor([1.100])', False), ('[0.122,  0.4]', '[-0.122, 0.4]', False),
    ('torch.Size([1, 128])', 'torch.Size([1, 127])', False), ('20 rounds: 0.1', '21 rounds: 0.1', False),
    ('tensor(True)', 'tensor(False)', False), ('[0.1, 0.2]', '[0.1]', False)])
def test_the_comparison_forgives_rounding_alone(expected, printed, same):
    assert Checker().check_output(expected, printed, 0) == same
