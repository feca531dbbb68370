"""Every test starts from a seed of its own name, on one thread, fastest for small tensors."""
import os
import signal
import sys
import zlib
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = os.environ.get('OMP_NUM_THREADS', '1')      # before torch
sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ['PYTHONPATH'] = str(Path(__file__).parent.parent)    # for `python -m` elsewhere

import pytest
import torch

import train
from helpers import command, save, small_model, write_test_sets, write_two
from runtime import terminal

ROOT = Path(train.__file__).parent
torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))


def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true', help='run the slow tests too')


def pytest_configure(config):
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():                           # which nohup ignores
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    config.addinivalue_line('markers', 'slow: runs with --slow, or if named as FILE::TEST')


def pytest_collection_modifyitems(config, items):
    named = {argument.split('::')[-1].split('[')[0] for argument in config.args if '::' in argument}
    slow = [item for item in items
            if item.get_closest_marker('slow') and item.originalname not in named]
    if slow and not config.option.slow:
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)


@pytest.fixture(autouse=True)
def seed(request, monkeypatch):
    torch.manual_seed(zlib.crc32(request.node.name.encode()))
    monkeypatch.setattr('lab.figures.FRAMES', 2)                # of an animation, at most
    monkeypatch.setattr('os.fsync', lambda file: None)          # no test cuts the power


@pytest.fixture
def call(monkeypatch, capsys):
    """call(flags, script) runs its `main`: (exit code, standard error, standard output)."""
    def run(flags, script=train):
        monkeypatch.setattr(sys, 'argv', [script.__name__, *map(str, flags)])
        try:
            code = terminal.cli(script.main) or 0
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return code, printed.err, printed.out
    return run


@pytest.fixture
def refused(call):
    """refused(flags, words, script) fails with code 2 and a line: (standard error, output)."""
    def check(flags, words, *script, lines=1):
        code, error, printed = call(flags, *script)
        assert code == 2 and words in error and error.splitlines()[-1].startswith('error: '), error
        assert not lines or error.count('\n') == lines, error
        return error, printed
    return check


@pytest.fixture
def model():
    return small_model()


@pytest.fixture
def folder(tmp_path):
    return write_test_sets(tmp_path)


@pytest.fixture
def checkpoint(model, folder):
    return save(model, folder, 'small/last.pt')


@pytest.fixture(scope='session')
def pretrained(tmp_path_factory):
    """The folder of a short run on the datasets of `helpers.write_two`. Do not write into it."""
    folder = tmp_path_factory.mktemp('pretrained')
    with pytest.MonkeyPatch.context() as patch:
        flags = command(write_two(folder / 'data'), folder / 'pre', steps=8)
        patch.setattr('sys.argv', flags)
        terminal.cli(train.main)
    return folder / 'pre'


@pytest.fixture
def plt():
    """Matplotlib's pyplot, whose figures are closed at the end; without it a test is skipped."""
    pytest.importorskip('matplotlib', reason='the figures need it')
    from lab import figures
    yield figures.pyplot()
    figures.pyplot().close('all')
