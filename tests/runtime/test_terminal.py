"""What all commands share: one line for an error, signals, progress, printed tables."""
import io
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT
from helpers import run
from runtime import files, terminal


def test_the_program_ends_silently_when_nobody_reads():
    code = "from runtime import terminal; terminal.cli(lambda: [print('a line') for _ in range(100000)])"
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          cwd=ROOT) as process:
        assert process.stdout.readline() == b'a line\n'
        process.stdout.close()
        assert process.stderr.read() == b'' and process.wait(240) == 128 + 13


def test_a_program_whose_standard_error_is_closed_runs_to_its_end():
    code = ("from runtime import terminal; "
            "terminal.cli(lambda: [terminal.warn('x'), *terminal.Progress([1])] and print('done'))")
    done = subprocess.run(['sh', '-c', 'exec "$0" -c "$1" 2>&-', sys.executable, code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b'done\n')


def test_the_lowest_of_each_row_or_column_is_marked():
    cells = {'a': {'x': 1., 'y': 5.}, 'b': {'x': 2., 'y': math.inf}, 'c': {'x': 1., 'y': 0.5}}
    stars = {best: [[cell.endswith('*') for cell in line.split()[1:]] for line in
                    terminal.table('t', cells, '.1f', best)[1:]] for best in ('row', 'column', '')}
    assert stars['row'] == [[True, False], [True, False], [False, True]]
    assert stars['column'] == [[True, False], [False, False], [True, True]] and not any(map(any, stars['']))
    diverged = {'a': {'x': math.inf, 'y': math.nan}, 'b': {'x': math.inf, 'y': 2.}}
    assert [line.count('*') for line in terminal.table('t', diverged, best='column')] == [0, 0, 1]


def test_a_table_has_headings_of_several_lines_and_dashes():
    rows = {'first': {'n': 7, 'a\nx': 0.5, 'a\ny': 12345.678, 'b\ny': -3e6},
            'second': {'n': None, 'b\ny': 9999., 'z': 'own'}}
    assert terminal.table('name', rows) == [
        '                  a                    b',
        'name      n       x         y          y    z',
        'first     7  0.5000  1.23e+04  -3.00e+06    -',
        'second    -       -         -  9999.0000  own']
    assert terminal.table('name', {'a': {'x': math.nan, 'y': 1e9}}, '.3g') == [
        'name      x      y', 'a       nan  1e+09']


@pytest.mark.parametrize('code, words', [
    ("open('no such')", 'no such: No such file or directory'), ("open('a\\nb')", 'a\\nb: No such file or directory'),
    ("open('\\udcff')", '\\udcff: No such file or directory'), ("'\\udcff'.encode()", 'surrogates not allowed'),
    ("import errno; raise OSError(errno.ENOSPC, '')", 'No space left on device'),
    ("import numpy; numpy.empty(2 ** 50)", 'not enough memory: Unable to allocate'),
    ("import torch; torch.empty(2 ** 50)", 'not enough memory: '),
    ("import h5py; h5py.File('x', 'w', driver='core', backing_store=False)['y']", "object 'y' doesn't exist"),
    ("raise terminal.InputError('one\\ntwo')", 'one\\ntwo'),
    ("raise FloatingPointError('it blew up')", 'error: it blew up'), ('raise MemoryError', 'not enough memory'),
    ("raise RuntimeError('[/gloo/pair.cc:5] Connection closed by peer')", 'to another process is lost, which may say'),
    ("{}['our mistake']", ''), ("int('ours')", '')])
def test_errors_of_the_machine_and_of_files_are_one_line_and_mistakes_in_our_code_have_a_traceback(
        code, words, monkeypatch):
    monkeypatch.setattr(sys, 'stderr', io.TextIOWrapper(io.BytesIO(), errors='backslashreplace'))   # as in a terminal
    with pytest.raises(SystemExit if words else (KeyError, ValueError)) as stop:
        terminal.cli(lambda: exec(code, {'terminal': terminal, '__name__': 'ours'}))
    error = sys.stderr.buffer.getvalue().decode()
    assert not words or stop.value.code == 2 and words in error
    assert not words or error.startswith('error: ') and error.count('\n') == 1


def test_a_terminal_without_the_sign_gets_the_table_with_a_question_mark():
    code = "from runtime import terminal; terminal.cli(lambda: print('1 \\u00b1 2'))"
    done = run('-c', code, cwd=ROOT, env={**os.environ, 'PYTHONIOENCODING': 'ascii'})
    assert (done.returncode, done.stdout, done.stderr) == (0, '1 ? 2\n', '')


@pytest.mark.parametrize('command', [['train.py'], ['-m', 'lab.bench', 'step'], ['-m', 'sources.generate']])
def test_ctrl_c_during_the_imports_is_one_line(command, tmp_path):
    (tmp_path / 'torch.py').write_text('import signal; signal.raise_signal(signal.SIGINT)')
    done = run(*command, cwd=ROOT, env={**os.environ, 'PYTHONPATH': str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, '', 'stopped by SIGINT\n')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_tidies_up_and_ends_with_128_plus_its_number(number, tmp_path, capsys):
    before = signal.getsignal(number)

    def main():
        with files.replacing(tmp_path / 'a.json') as part:
            part.write_text('half')
            os.kill(os.getpid(), number)
            time.sleep(5)
    with pytest.raises(SystemExit) as stop:
        terminal.cli(main)
    assert (stop.value.code, capsys.readouterr().err) == (128 + number, f'stopped by {number.name}\n')
    assert not list(tmp_path.iterdir()) and signal.getsignal(number) == before


def test_an_ignored_signal_remains_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)                               # as nohup does
    try:
        terminal.cli(lambda: os.kill(os.getpid(), signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_progress_is_a_bar_on_a_terminal_and_a_line_every_so_often_elsewhere(monkeypatch):
    now = [1000.]
    monkeypatch.setattr(terminal.time, 'monotonic', lambda: now[0])

    def printed(stream, **options):
        monkeypatch.setattr(sys, 'stderr', stream)
        with terminal.Progress(total=100, desc='training', unit='step', mininterval=0, **options) as bar:
            for step in range(100):
                now[0] += 1
                bar.update()
                bar.set_postfix_str(f'loss {step}')
        return stream.getvalue()
    lines = printed(io.StringIO()).splitlines()
    assert [(line.split('|')[0], line.rpartition(', ')[2]) for line in lines] == [
        (f'training:  {done}%', f'loss {done - 2}]') for done in (30, 60, 90)]
    assert not printed(io.StringIO(), disable=True)
    screen = io.StringIO()
    screen.isatty = lambda: True
    bar = printed(screen)
    assert bar.count('\r') > 90 and '|' in bar and bar.count('\n') == 1
