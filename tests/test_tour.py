"""docs/tour.md: every line prints what the page shows."""
import code
import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

import aotpot
import configs
import data
from runtime import checkpoint

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / 'docs/tour.md').read_text()
NUMBER = re.compile(r'-?\d+\.\d*')
BLOCKS = re.compile(r'(?s)```python\n(.*?)```\n(?:\n```\n(.*?)```\n)?')     # and what is printed below


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


def same_text(expected, printed):
    """Decimal numbers are compared with a tolerance, for processors round differently, and all else word for word."""
    words = [''.join(NUMBER.sub('#', text).split()) for text in (expected, printed)]
    return words[0] == words[1] and all(map(close, NUMBER.findall(expected), NUMBER.findall(printed)))


def pasted(page):
    """Paste the blocks of a page into an interactive Python: [(block, what the page shows, what it prints, errors)]."""
    console, results = code.InteractiveConsole({'__name__': '__console__'}), []
    for block, shown in BLOCKS.findall(page):
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as errors:
            for line in [*block.splitlines(), '']:
                console.push(line)
        results.append((block, shown, printed.getvalue(), errors.getvalue()))
    return results


def test_every_block_of_the_tour_can_be_pasted_and_prints_what_the_page_shows():
    results = pasted(PAGE)
    assert len(results) > 10
    for block, shown, printed, errors in results:
        assert not errors and same_text(shown, printed), f'{block}\n{errors}\nexpected:\n{shown}\nprinted:\n{printed}'


@pytest.mark.slow
def test_the_page_runs_with_a_network_of_another_size_too(tmp_path):
    """As its last paragraph promises of `nano`: the lines print other numbers, and none ends in an error."""
    torch.manual_seed(0)
    config = configs.model('nano')
    path = tmp_path / 'last.pt'
    weights = aotpot.AOTPOT(config).state_dict()
    headers = {name: {'train': dict(channels=['u'], static=[], units=data.Units.none(1).header())}
               for name in ('ns2d_fno_1e-3', 'swe_pdb')}
    checkpoint.save_file({'model': weights, 'config': {'model': vars(config)}, 'step': 1, 'data': headers}, path)
    for block, _, _, errors in pasted(PAGE.replace("'weights/mini.pt'", repr(str(path)))):
        assert not errors, f'{block}\n{errors}'
