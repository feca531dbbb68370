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
BLOCKS = re.compile(r'(?s)```python\n(.*?)```\n(?:\n```\n(.*?)```\n)?')     # and what is printed


@pytest.fixture(autouse=True)
def root(monkeypatch):
    """The page is read at the root of the repository, and changes how torch prints."""
    monkeypatch.chdir(ROOT)
    yield
    torch.set_printoptions(profile='default')


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


def pasted(page):
    """Paste the blocks of a page into Python; yields (block, as shown, printed, errors)."""
    console = code.InteractiveConsole({'__name__': '__console__'})
    for block, shown in BLOCKS.findall(page):
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            for line in [*block.splitlines(), '']:
                console.push(line)
        yield block, shown, printed.getvalue(), errors.getvalue()


def test_every_block_of_the_tour_can_be_pasted_and_prints_what_the_page_shows():
    results = [*pasted(PAGE)]
    assert len(results) > 10
    for block, shown, printed, errors in results:
        assert not errors and same_text(shown, printed), f'{block}\n{errors}\n{shown}\n{printed}'


@pytest.mark.slow
def test_the_page_runs_with_a_network_of_another_size_too(tmp_path):
    """As its last paragraph promises of `nano`: the lines print other numbers, but no error."""
    config = configs.model('nano')
    header = {'train': dict(channels=['u'], static=[], units=data.Units.none(1).header())}
    weights = aotpot.AOTPOT(config).state_dict()
    saved = {'model': weights, 'config': {'model': vars(config)}, 'step': 1,
             'data': {'ns2d_fno_1e-3': header, 'swe_pdb': header}}
    checkpoint.save_file(saved, tmp_path / 'last.pt')
    page = PAGE.replace("'weights/mini.pt'", repr(str(tmp_path / 'last.pt')))
    for block, _, _, errors in pasted(page):
        assert not errors, f'{block}\n{errors}'
