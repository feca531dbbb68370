"""What torchrun starts once for many tests (helpers.Torchrun): each of its processes runs one script after the other.

A script runs in a fork, which has imported PyTorch already. The scripts meet in a store of their own, since torchrun's
keeps the addresses of those before.
"""
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import evaluate  # noqa: F401
from lab import interpret  # noqa: F401
from runtime import terminal  # noqa: F401, before torch is imported


def run(arguments, folder, port, printed):
    """Run a script with its arguments in `folder`, with its output in the files printed.out and printed.err."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE='False', MASTER_PORT=str(port))
    for number, name in ((1, 'out'), (2, 'err')):
        os.dup2(os.open(f'{printed}.{name}', os.O_WRONLY | os.O_CREAT), number)
    code = 1
    try:
        os.chdir(folder)
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).absolute().parent)
        runpy.run_path(arguments[0], run_name='__main__')
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(place):
    torch.optim.AdamW([torch.zeros(1)])             # imports the compiler, which takes as long as PyTorch
    number, rank = 0, os.environ['RANK']
    while not (place / 'end').exists():
        job = place / f'{number}.json'
        if not job.exists():
            time.sleep(0.01)
            continue
        child = os.fork() or run(*json.loads(job.read_text()), place / f'{number}.{rank}')
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if list(place.glob(f'{number}.*.failed')):
                os.kill(child, signal.SIGTERM)          # as torchrun does if one of its processes fails
            time.sleep(0.01)
        code = os.waitstatus_to_exitcode(ended[1])
        (place / f'{number}.{rank}.{"failed" if code else "done"}').touch()
        number += 1


if __name__ == '__main__':
    main(Path(sys.argv[1]))
