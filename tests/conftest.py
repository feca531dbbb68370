"""Every test starts from a seed derived from its own name. Tests with small tensors run fastest on one thread.

OMP_NUM_THREADS sets another number, for this process and for those that the tests start.
"""
import os
import signal
import sys
import zlib
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = os.environ.get('OMP_NUM_THREADS', '1')      # before torch is imported
sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ['PYTHONPATH'] = str(Path(__file__).parent.parent)               # for `python -m` in other folders

import configs

import pytest
import torch

import trained
from helpers import Torchrun, main
from runtime import distributed

ROOT = Path(configs.__file__).parent
torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))
for number in distributed.SIGNALS:
    # nohup, and a shell that starts us in the background, have some ignored, which our programs respect and pass on
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None)


@pytest.fixture(autouse=True)
def seed(request):
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


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
    """A small network with random weights."""
    return trained.small_model()


@pytest.fixture
def folder(tmp_path):
    """A folder with the test sets 'own' and 'coarse'."""
    return trained.write_test_sets(tmp_path)


@pytest.fixture
def checkpoint(model, folder):
    """A checkpoint of `model`."""
    return trained.save(model, folder, 'small/last.pt')


@pytest.fixture
def three(model, folder):
    """Three checkpoints, see `trained.save_three`."""
    return trained.save_three(model, folder)


@pytest.fixture(scope='session')
def torchrun(tmp_path_factory):
    """Two processes of a real torchrun, which run one script after the other."""
    started = Torchrun(tmp_path_factory.mktemp('torchrun'))
    yield started
    started.end()


@pytest.fixture
def plt():
    """Matplotlib's pyplot, all of whose figures are closed at the end; a test without the packages is skipped."""
    for name in ('matplotlib', 'sklearn'):
        pytest.importorskip(name, reason=f'the figures need {name}')
    from lab import figures
    yield figures.pyplot()
    figures.pyplot().close('all')
