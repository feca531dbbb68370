"""What all commands share: flags, one line for an error, signals, progress and tables."""
import argparse
import dataclasses
import os
import signal
import sys
from contextlib import contextmanager

import torch
from tqdm import tqdm

from configs import BOUNDS, InputError, show

# which end a command, and a training once it is saved; schedulers send any of them
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, without abbreviations, and with flags for the fields of a dataclass."""

    def __init__(self, description=None, **kwargs):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message):
        fail(message)

    def add(self, config, title, without=()):
        """Add flags for the fields of a dataclass but those `without`. A flag that is not given is in no result."""
        group = self.add_argument_group(title)
        for field in dataclasses.fields(config):
            if field.name in without or not field.metadata.get('flag', True):
                continue
            options = {name: option for name, option in field.metadata.items() if name not in (*BOUNDS, 'flag')}
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


@contextmanager
def handling(numbers, handler):
    """Let `handler` take the signals within the block, but for those that are ignored, such as SIGHUP under nohup."""
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: former for number, former in before.items() if former != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def ignore_signals(_):
    """In a process that reads for another one, which may have to finish a step: a second SIGTERM alone ends it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def cli(main):
    """Run `main`, which returns an exit code or None. What is wrong with the input or a file is one line and code 2.

    SIGNALS are one line and 128 + their number. Other errors are Python's.
    """
    def stop(number, _):
        raise KeyboardInterrupt(number)                 # as Ctrl-C, so that what is half-written goes
    try:
        with handling(SIGNALS, stop):
            code = main()
        if 'TORCHELASTIC_RUN_ID' in os.environ:         # gloo's threads may abort one of several processes as it ends
            end(code or 0)
        if code:
            sys.exit(code)
    except KeyboardInterrupt as error:
        [number] = error.args
        print(f'stopped by {signal.Signals(number).name}', file=sys.stderr)
        end(128 + number)                               # sys.exit would wait for solvers in threads of their own
    except (InputError, FloatingPointError) as error:
        fail(str(error))
    except torch.OutOfMemoryError as error:
        fail(f'{str(error).splitlines()[0]}; a smaller --batch_size needs less')
    except OSError as error:
        fail(f'{error.filename}: {error.strerror}' if error.filename else str(error))


def end(code):
    """End the process at once, with nothing left in its buffers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def Progress(*items, disable=False, **options):
    """tqdm's bar on a terminal, nothing elsewhere, such as in the log of a cluster."""
    return tqdm(*items, disable=disable or None, **options)


def table(title, rows, form='.4f'):
    """The lines of a table of {row: {column: value}}. Every heading may have several lines.

    title: the heading of the names of the rows.
    form: the format of the floats.
    """
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    heads = [heading.split('\n') for heading in (title, *columns)]
    height = max(map(len, heads))
    lines = [*zip(*([''] * (height - len(head)) + head for head in heads))]
    for name, row in rows.items():
        lines.append([name, *(cell(row.get(column), form) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*lines)]
    texts = []
    for name, *cells in lines:
        padded = [f'{text:>{width + 2}}' for text, width in zip(cells, widths[1:])]
        texts.append(f'{name:<{widths[0] + 2}}{"".join(padded)}'.rstrip())
    return texts


def cell(value, form):
    """The text of a value in a table: '-' for None, and large numbers with an exponent."""
    if not isinstance(value, float):
        return '-' if value is None else str(value)
    return f'{value:.2e}' if form[-1] == 'f' and abs(value) >= 1e4 else f'{value:{form}}'
