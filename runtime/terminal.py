"""What all commands share: flags, one line for an error, signals, progress and tables."""
import argparse
import dataclasses
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager

from tqdm import tqdm

from configs import BOUNDS, InputError, show

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, without abbreviations, and with flags for the fields of a dataclass."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message):
        fail(message)

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's, but an empty value, such as of a variable that is not set, is refused."""
        args = sys.argv[1:] if args is None else list(map(str, args))
        for flag, word in zip(['', *args], args):
            if not word or re.fullmatch('--[^=]*=', word):
                self.error(f'{flag if not word else word[:-1]}: an empty value; leave the flag out or give it a value')
        return super().parse_known_args(args, namespace)

    def add(self, config, title, without=()):
        """Add flags for the fields of a dataclass but those `without`; none is an argument if it is not written."""
        group = self.add_argument_group(title)
        for field in (field for field in dataclasses.fields(config) if field.name not in without):
            options = {name: option for name, option in field.metadata.items() if name not in BOUNDS}
            value = show(getattr(config, field.name))
            options['help'] += f' [{value}]' if value else ''
            if field.type is bool:
                options['action'] = argparse.BooleanOptionalAction
            elif 'nargs' not in options:
                options.setdefault('type', field.type)
            group.add_argument(f'--{field.name}', default=argparse.SUPPRESS, **options)


def warn(message):
    print(f'warning: {message}', file=sys.stderr, flush=True)


def fail(message):
    """Print one line on standard error and exit with code 2."""
    print('error: ' + message.replace('\n', '\\n'), file=sys.stderr, flush=True)     # a name may have line breaks
    sys.exit(2)


def explain(error, *libraries):
    """A line on an error of the user, the machine, a file, h5py or other `libraries`; none if our code is at fault."""
    text = str(error)
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if isinstance(error, (InputError, FloatingPointError)):
        return text
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if isinstance(error, MemoryError) or 'allocate memory' in text or 'out of memory' in text:
        return f'not enough memory: {text}'.splitlines()[0] + '; a smaller --batch_size needs less'
    if '/gloo/' in text or type(error).__name__ in ('DistNetworkError', 'DistStoreError'):      # of torch.distributed
        return f'the connection to another process is lost, which may say why ({text.splitlines()[0]})'
    # h5py raises errors of all kinds for damaged files, so what counts is that they are raised there
    outside = frame.f_globals['__name__'].split('.')[0] in ('h5py', *libraries)
    return (outside or isinstance(error, (OSError, UnicodeError, EOFError))) and (' '.join(text.split()) or repr(error))


@contextmanager
def handling(numbers, handler):
    """Let `handler` take the signals within the block, but for those that are ignored, as SIGHUP is under nohup."""
    before = {number: signal.signal(number, handler) for number in numbers
              if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def cli(main):
    """Run `main`. An error that `explain` explains, or a signal, is one line on standard error, without a traceback.

    The exit code is then 2, and 128 + its number after a signal. SIGTERM ends the processes of torchrun at once: one
    may wait for another that is gone, where Python hears no signal. A reader that leaves, as `| head -1`, is no error.
    """
    def stop(number, _):
        raise KeyboardInterrupt(number)                 # which `except Exception` lets pass
    sys.stdout, sys.stderr = (stream or open(os.devnull, 'w') for stream in (sys.stdout, sys.stderr))   # closed: None
    if getattr(sys.stdout, 'errors', '') == 'strict':
        sys.stdout.reconfigure(errors='replace')        # a table with a question mark for ± is better than none
    try:
        with handling(SIGNALS['TORCHELASTIC_RUN_ID' in os.environ:], stop):             # SIGTERM is the first of them
            main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())          # Python flushes once more as it ends
        sys.exit(128 + 13)                                                      # as if SIGPIPE had ended the program
    except KeyboardInterrupt as error:
        number, = error.args or [signal.SIGINT]
        print(f'stopped by {signal.Signals(number).name}', file=sys.stderr, flush=True)
        if any(not thread.daemon for thread in threading.enumerate()[1:]):
            sys.stdout.flush()
            os._exit(128 + number)                  # sys.exit would wait for solvers at work in threads of their own
        sys.exit(128 + number)
    except Exception as error:
        if not (line := explain(error)):
            raise
        fail(f'{error.filename}: {line}' if getattr(error, 'filename', None) else line)


class Progress(tqdm):
    """tqdm's bar on a terminal; elsewhere, in the log of a cluster, a line every 30 seconds."""
    every = 30

    def __init__(self, *args, **options):
        self.lines = not sys.stderr.isatty()
        self.due = time.monotonic() + self.every
        super().__init__(*args, **options, gui=self.lines, ascii=self.lines or None)    # `gui`: tqdm draws nothing

    def display(self, msg=None, pos=None):
        if not self.lines:
            super().display(msg, pos)
        elif time.monotonic() >= self.due:
            self.due = time.monotonic() + self.every
            print(self, file=sys.stderr, flush=True)

    def say(self, text):
        """Print a line on standard output, above the bar."""
        if not self.disable:
            if not self.lines:
                self.clear()
            print(text, flush=True)


def table(title, rows, form='.4f', best=''):
    """The lines of a table of {row: {column: value}}, with `title` above the names of the rows.

    form: the format of the floats; None and what is missing are a dash. best: 'row' or 'column' marks the lowest finite
    float of each with an asterisk. The upper lines of a heading are blank where they equal those of its left neighbour.
    """
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    space = ' ' if best else ''

    def cell(row, column):
        value = row.get(column)
        if not isinstance(value, float):
            return ('-' if value is None else str(value)) + space
        rivals = {'row': row.values(), 'column': [other.get(column) for other in rows.values()]}.get(best, ())
        lowest = min((rival for rival in rivals if isinstance(rival, float) and math.isfinite(rival)), default=None)
        text = f'{value:.2e}' if form[-1] == 'f' and abs(value) >= 1e4 else f'{value:{form}}'
        return text + ('*' if value == lowest else space)
    heads = [title.split('\n'), *((column + space).split('\n') for column in columns)]
    heads = [[''] * (max(map(len, heads)) - len(head)) + head for head in heads]
    for left, right in reversed([*zip(heads, heads[1:])]):
        right[:-1] = ['' if right[:i + 1] == left[:i + 1] else upper for i, upper in enumerate(right[:-1])]
    grid = [*zip(*heads), *([name, *(cell(row, column) for column in columns)] for name, row in rows.items())]
    first, *widths = [max(map(len, column)) + 2 for column in zip(*grid)]
    return [(f'{name:<{first}}' + ''.join(f'{text:>{w}}' for text, w in zip(line, widths))).rstrip()
            for name, *line in grid]
