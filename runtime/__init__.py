"""What makes a run safe. Every command imports this first, so that Ctrl-C during the other imports is one line."""
import sys


def one_line_for_ctrl_c(kind, error, trace, before=sys.excepthook):
    """An uncaught Ctrl-C, which then ends the program as SIGINT does, needs no traceback; others have theirs."""
    if issubclass(kind, KeyboardInterrupt):
        print('stopped by SIGINT', file=sys.stderr, flush=True)
    else:
        before(kind, error, trace)


sys.excepthook = one_line_for_ctrl_c
