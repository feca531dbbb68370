"""Every test starts from a seed derived from its own name, on one thread, which is fastest for small tensors."""
import os
import signal
import sys
import zlib
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = os.environ.get('OMP_NUM_THREADS', '1')      # before torch is imported
sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ['PYTHONPATH'] = str(Path(__file__).parent.parent)               # for `python -m` in other folders

import pytest
import torch

import configs
import train
from helpers import command, main, save, small_model, write_test_sets, write_two
from runtime import terminal

ROOT = Path(configs.__file__).parent
torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))


def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true', help='run the slow tests too')


def pytest_configure(config):
    for number in signal.SIGINT, signal.SIGHUP:             # which nohup and the background of a shell let be ignored
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    config.addinivalue_line('markers', 'slow: runs with --slow, or if it is named as tests/test_x.py::test_y')


def pytest_collection_modifyitems(config, items):
    named = {argument.split('::')[-1].split('[')[0] for argument in config.args if '::' in argument}
    slow = [item for item in items if item.get_closest_marker('slow') and item.originalname not in named]
    if slow and not config.option.slow:
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)


@pytest.fixture(autouse=True)
def seed(request, monkeypatch):
    torch.manual_seed(zlib.crc32(request.node.name.encode()))
    monkeypatch.setattr('lab.figures.FRAMES', 2)                            # of an animation, at most
    monkeypatch.setattr('os.fsync', lambda file: None)                      # against power cuts, which no test makes


@pytest.fixture
def call(monkeypatch, capsys):
    """call(flags, script) is `helpers.main`: (exit code, standard error, standard output)."""
    return lambda flags, *script: main(flags, monkeypatch, capsys, *script)


@pytest.fixture
def refused(call):
    """refused(flags, words, script) checks that a command ends with code 2 and one line: (standard error, output)."""
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
    """The folder of a short run on the datasets of `helpers.write_two`, for those who only need one. Do not write."""
    folder = tmp_path_factory.mktemp('pretrained')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('sys.argv', list(map(str, command(write_two(folder / 'data'), folder / 'pre', steps=8))))
        terminal.cli(train.main)
    return folder / 'pre'


@pytest.fixture
def plt():
    """Matplotlib's pyplot, all of whose figures are closed at the end; a test without the package is skipped."""
    pytest.importorskip('matplotlib', reason='the figures need it')
    from lab import figures
    yield figures.pyplot()
    figures.pyplot().close('all')
