"""What all commands share: flags, one line for an error, signals, printed tables."""
import os
import signal
import subprocess
import sys

import pytest

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
    ("import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB')",
     'CUDA out of memory; take a smaller --batch_size, or of a training a larger --accumulate'),
    ("{}['our mistake']", ''), ("int('ours')", '')])
def test_errors_of_input_and_files_are_one_line_and_mistakes_in_our_code_have_a_traceback(
        code, line, capsys, monkeypatch):
    for variable in ('', '1'):
        monkeypatch.setenv('AOTPOT_TRACEBACK', variable)
        with pytest.raises(SystemExit if line else (KeyError, ValueError)) as stop:
            terminal.cli(lambda: exec(code, {'terminal': terminal}))
        error = capsys.readouterr().err
        assert not line or stop.value.code == 2 and f'error: {line}' in error.splitlines()[-1]
        assert error.startswith('Traceback') if variable and line else error.count('\n') == bool(line)


PRINTING = """if True:
    import runtime, os, sys
    from runtime import terminal
    def main():
        for i in range(3000):
            print(i)
            print(i, file=sys.stderr)
        open('done', 'w').close()
        {}
    terminal.cli(main)"""


@pytest.mark.parametrize('streams, code', [
    ('<&- >&- 2>&-', 0), ('2>&1 | head -1', 128 + signal.SIGPIPE)])
def test_a_command_goes_on_without_its_streams_and_ends_in_silence_with_the_reader_of_one(streams, code, tmp_path):
    (tmp_path / 'a.py').write_text(PRINTING.format("assert os.open('new', os.O_CREAT) > 2"))
    shell = ['bash', '-c', f'set -o pipefail; {sys.executable} a.py {streams}']
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert done.returncode == code and (tmp_path / 'done').exists() == (code == 0), done.stderr
    assert done.stdout.count('\n') == ('>&- 2' not in streams) and not done.stderr


def test_a_name_that_the_terminal_cannot_show_does_not_end_a_command():
    code = r"from runtime import terminal; terminal.cli(lambda: print('\u03c1 \udcff'))"
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, 'PYTHONIOENCODING': 'latin-1'})
    assert done.stdout == r'\u03c1 \udcff' + '\n', done.stderr


SIGNALLED = """if True:
    import os, signal, threading, time
    from runtime import files, terminal
    from runtime.terminal import SIGNALS
    def main(number):
        threading.Thread(target=time.sleep, args=[600]).start()
        with files.replacing('a.json') as part:
            part.write_text('half')
            print('half')
            signal.raise_signal(number)
    for number in SIGNALS:
        if os.fork() == 0:
            terminal.cli(lambda: main(number))
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)                    # as under nohup
    terminal.cli(lambda: signal.raise_signal(signal.SIGHUP) or print('goes on'))"""


def test_a_signal_tidies_up_and_ends_with_128_plus_its_number_and_one_that_is_ignored_stays_so(tmp_path):
    done = run('-c', SIGNALLED, cwd=tmp_path)
    numbers = terminal.SIGNALS
    assert done.stdout == ''.join(f'half\n{128 + number}\n' for number in numbers) + 'goes on\n', done.stderr
    assert done.stderr == ''.join(f'stopped by {signal.Signals(number).name}\n' for number in numbers)
    assert not list(tmp_path.iterdir())
