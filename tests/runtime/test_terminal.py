"""What all commands share: flags, one line for an error, signals, printed tables."""
import os
import re
import signal
import subprocess
import sys

import numpy
import pytest
import torch

from conftest import ROOT
from helpers import run
from runtime import terminal


def test_a_table_has_headings_of_several_lines_and_dashes():
    rows = {'first': {'n': 7, 'a\nx': 0.5, 'a\ny': 12345.678, 'b\ny': -3e6},
            'second': {'n': None, 'b\ny': 9999., 'z': 'own'}}
    assert terminal.table('name', rows) == [
        '                  a         a          b',
        'name      n       x         y          y    z',
        'first     7  0.5000  1.23e+04  -3.00e+06    -',
        'second    -       -         -  9999.0000  own']


@pytest.mark.parametrize('code, line', [
    ("raise terminal.InputError('one\\ntwo')", 'one\\ntwo'), ("raise FloatingPointError('it blew up')", 'it blew up'),
    ("open('no such')", 'no such: No such file or directory'),
    ("import errno; raise OSError(errno.ENOSPC, 'it is full')", '[Errno 28] it is full'),
    ("raise torch.OutOfMemoryError('it is full\\nsee')", 'it is full; a smaller --batch_size needs less'),
    ("torch.empty(2 ** 50)", '4503599.6 GB more were asked for; a smaller --size or --batch_size needs less'),
    ("torch.empty(2 ** 40, 2 ** 40)", 'too little memory: '), ("numpy.empty(2 ** 50)", 'Unable to allocate'),
    ("{}['our mistake']", ''), ("int('ours')", '')])
def test_errors_of_input_and_files_are_one_line_and_mistakes_in_our_code_have_a_traceback(code, line, capsys):
    with pytest.raises(SystemExit if line else (KeyError, ValueError)) as stop:
        terminal.cli(lambda: exec(code, {'terminal': terminal, 'torch': torch, 'numpy': numpy}))
    error = capsys.readouterr().err
    assert not line or stop.value.code == 2 and error.startswith('error: ')
    assert line in error and error.count('\n') == bool(line)


PRINTING = """if True:
    import runtime, os, sys
    from runtime import terminal
    def main():
        for i in range(3000):
            print('caf\\udce9', i)
            print(i, file=sys.stderr)
        open('done', 'w').close()
        {}
    terminal.cli(main)"""


@pytest.mark.parametrize('streams', ['2>&-', '<&- >&- 2>&-', '2>&1 | head -1'])
def test_a_command_outlives_its_streams(streams, tmp_path):
    (tmp_path / 'a.py').write_text(PRINTING.format("assert os.open('new', os.O_CREAT) > 2"))
    shell = ['bash', '-c', f'set -o pipefail; {sys.executable} a.py {streams}']
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env={**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONIOENCODING': 'utf-8:strict'})
    assert (tmp_path / 'done').exists() and done.returncode == 0, done.stderr
    assert ('>&- 2' in streams) == (not done.stdout) and done.stdout.count('\n') in (0, 1, 3000)


def test_a_variable_of_the_environment_shows_tracebacks(monkeypatch, capsys):
    monkeypatch.setenv('AOTPOT_TRACEBACK', '1')
    with pytest.raises(SystemExit):
        terminal.cli(lambda: open('no such'))
    assert re.match(r'(?s)Traceback .*\nerror: no such: No such file or directory\n$', capsys.readouterr().err)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_tidies_up_and_ends_with_128_plus_its_number(number, tmp_path):
    code = f"""if True:
        import signal, threading, time
        from runtime import files, terminal
        def main():
            threading.Thread(target=time.sleep, args=[600]).start()
            with files.replacing('a.json') as part:
                part.write_text('half')
                print('half')
                signal.raise_signal({number:d})
        terminal.cli(main)"""
    done = run('-c', code, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, 'half\n', f'stopped by {number.name}\n')
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_stays_so():
    """As SIGHUP under nohup."""
    code = f"""if True:
        import signal
        from runtime import terminal
        signal.signal({signal.SIGHUP:d}, signal.SIG_IGN)
        terminal.cli(lambda: signal.raise_signal({signal.SIGHUP:d}) or print('goes on'))"""
    done = run('-c', code)
    assert (done.returncode, done.stdout, done.stderr) == (0, 'goes on\n', '')


def test_all_commands_run_without_docstrings():
    modules = ['.'.join(path.relative_to(ROOT).with_suffix('').parts) for room in ('', 'sources', 'lab')
               for path in (ROOT / room).glob('*.py') if 'terminal.cli(main)' in path.read_text()]
    done = run('-OO', '-c', f"""if True:
        import importlib, sys
        sys.argv[1:] = ['--help']
        for module in {modules}:
            try:
                importlib.import_module(module).main()
            except SystemExit as stop:
                print(module, stop.code)""", cwd=ROOT)
    assert not done.stderr and [module for module in modules if f'{module} 0\n' in done.stdout] == modules
