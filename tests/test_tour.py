"""docs/tour.md: every line prints what the page shows."""
import code
import contextlib
import io
import re

import torch

from conftest import ROOT

PAGE = (ROOT / 'docs/tour.md').read_text()
NUMBER = re.compile(r'-?\d+\.\d*')
BLOCKS = re.compile(r'(?s)```python\n(.*?)```\n(?:\n```\n(.*?)```\n)?')     # and what is printed


def close(expected, printed):
    """Whether two decimal numbers differ by 2 % at most, or by one in the last digit."""
    last = 10 ** -(len(expected.split('.')[1]) or 3)
    expected, printed = float(expected), float(printed)
    return abs(expected - printed) < max(0.02 * abs(expected), 1.01 * last)


def same_text(expected, printed):
    """Decimal numbers are `close`, for processors round differently, and all else is the same."""
    words, others = (''.join(NUMBER.sub('#', text).split()) for text in (expected, printed))
    numbers, found = (NUMBER.findall(text) for text in (expected, printed))
    return words == others and all(map(close, numbers, found))


def test_every_block_of_the_tour_can_be_pasted_and_prints_what_the_page_shows(monkeypatch):
    monkeypatch.chdir(ROOT)
    console = code.InteractiveConsole({'__name__': '__console__'})
    blocks = BLOCKS.findall(PAGE)
    assert len(blocks) > 10
    for block, shown in blocks:
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            for line in [*block.splitlines(), '']:
                console.push(line)
        found, errors = printed.getvalue(), errors.getvalue()
        assert not errors and same_text(shown, found), f'{block}\n{errors}\n{shown}\n{found}'
    torch.set_printoptions(profile='default')                   # which the page changes
