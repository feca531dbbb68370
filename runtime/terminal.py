"""What all commands share: flags, one line for an error, signals, progress and tables."""
import argparse
import dataclasses
import os
import re
import signal
import sys
import traceback
from contextlib import contextmanager, suppress
from itertools import zip_longest

from tqdm import tqdm

from configs import InputError, nearest, show

# which end a command, and a training once it is saved; by SIGPIPE a reader such as `head` has gone
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, no abbreviations, and flags for dataclass fields."""

    def __init__(self, description=None, **kwargs):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message):
        unknown = re.match(r'unrecognized arguments: (--\w+)', message)
        fail(message + (nearest(unknown[1], self._option_string_actions) if unknown else ''))

    def add(self, config, title, without=()):
        """Add flags for the fields of a dataclass but `without`; one not given is in no result."""
        group = self.add_argument_group(title)
        for field in dataclasses.fields(config):
            if field.name in without or not field.metadata['flag']:
                continue
            options = dict(field.metadata['options'])
            value = show(getattr(config, field.name))
            options['help'] += f' [{value}]' if value else ''
            if field.type is bool:
                options['action'] = argparse.BooleanOptionalAction
            elif 'nargs' not in options:
                options.setdefault('type', field.type)
            group.add_argument(f'--{field.name}', default=argparse.SUPPRESS, **options)


def warn(message):
    """Print a warning, of several processes by the first."""
    if os.environ.get('RANK', '0') == '0':
        print(f'warning: {message}', file=sys.stderr, flush=True)


def fail(message):
    """Print one line on standard error, with AOTPOT_TRACEBACK=1 below the traceback; exit 2."""
    if os.environ.get('AOTPOT_TRACEBACK') and sys.exc_info()[0]:
        traceback.print_exc()
    line = message.replace('\n', '\\n')                        # a name may have line breaks
    print(f'error: {line}\n', end='', file=sys.stderr, flush=True)     # at once, beside others
    sys.exit(2)


@contextmanager
def handling(numbers, handler):
    """Let `handler` take the signals within the block, but for those that are ignored, such as
    SIGHUP under nohup. Python itself ignores SIGPIPE.
    """
    heard = [number for number in numbers
             if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGPIPE]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def cli(main):
    """Run `main`, which returns an exit code or None.

    What is wrong with the input or a file is one line and code 2, SIGNALS are one line and 128 +
    their number. Other errors are Python's.
    """
    def stop(number, _):
        raise KeyboardInterrupt(number)               # as Ctrl-C, so that what is half-written goes
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='backslashreplace')       # for names that its encoding lacks
    at_once = 'TORCHELASTIC_RUN_ID' in os.environ   # gloo's threads may abort a process as it ends
    try:
        with handling(SIGNALS, stop):
            code = main() or 0
            sys.stdout.flush()
    except KeyboardInterrupt as error:
        code = 128 + error.args[0]
        at_once = True                     # sys.exit would wait for solvers in threads of their own
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)           # or the next line may send it again
        with suppress(BrokenPipeError):
            print(f'stopped by {signal.Signals(error.args[0]).name}', file=sys.stderr)
    except RuntimeError as error:
        if type(error).__name__ != 'OutOfMemoryError':      # PyTorch's, which not all commands load
            raise
        fail(f'{str(error).split(". ")[0]}; take a smaller --batch_size, or of a training a larger '
             f'--accumulate')
    except (InputError, FloatingPointError, OSError) as error:
        path = getattr(error, 'filename', None)
        fail(f'{path}: {error.strerror}' if path else str(error))
    if at_once:
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def Progress(*items, disable=False, **options):
    """tqdm's bar on a terminal, nothing elsewhere, such as in the log of a cluster."""
    return tqdm(*items, disable=disable or None, **options)


def table(title, rows, float_format='.4f'):
    """The lines of a table of {row: {column: value}}, with `title` above the names of the rows.

    float_format: of the floats; large ones are written in powers of ten. A heading may have several
    lines.
    """
    def cell(value):
        if not isinstance(value, float):
            return '-' if value is None else str(value)
        large = float_format[-1] == 'f' and abs(value) >= 1e4
        return f'{value:.2e}' if large else f'{value:{float_format}}'
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    headings = [heading.split('\n')[::-1] for heading in (title, *columns)]     # the lowest first
    grid = [*zip_longest(*headings, fillvalue='')][::-1]
    grid += [(name, *(cell(row.get(column)) for column in columns)) for name, row in rows.items()]
    first, *widths = [max(map(len, column)) + 2 for column in zip(*grid)]
    lines = [name.ljust(first) + ''.join(map(str.rjust, cells, widths)) for name, *cells in grid]
    return [line.rstrip() for line in lines]
