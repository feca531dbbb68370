"""Do the tests notice if one operator, comparison or number of a script changes?

    python tests/mutate.py aotpot.py --n 30 --seed 0

draws 30 places at random, changes one at a time in a copy of the project, and runs the tests of that file and of all
refusals there (those that `python -m pytest` runs by default). It prints every change that no test noticed, and how
many were noticed. Many a survivor changes nothing that matters: another small number, a wider bound, a branch for the
GPU.
"""
import argparse
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGES = {'+': '-', '-': '+', '*': '/', '/': '*', '//': '/', '**': '*', '@': '*', '%': '*', '&': '|', '|': '&',
           '+=': '-=', '-=': '+=', '*=': '/=', '/=': '*=', 'and': 'or', 'or': 'and', 'not': '', '==': '!=', '!=': '==',
           '<': '>=,<=', '<=': '>,<', '>': '<=,>=', '>=': '<,>'}


def mutants(text):
    """Every changed version of a program that Python can compile: [(line number, the changed line, the program)]."""
    lines, versions = text.splitlines(keepends=True), []
    for kind, string, (row, start), (_, end), _ in tokenize.generate_tokens(io.StringIO(text).readline):
        new = CHANGES[string].split(',') if string in CHANGES else []
        if kind == tokenize.NUMBER:
            new = [str(int(string) + 1) if string.isdigit() else f'(2 * {string})']
        for change in new:
            line = lines[row - 1][:start] + change + lines[row - 1][end:]
            program = ''.join([*lines[:row - 1], line, *lines[row:]])
            try:
                compile(program, 'mutant', 'exec')
                versions.append((row, line.strip(), program))
            except SyntaxError:                                 # such as / for the * of *arguments
                pass
    return versions


def survives(tests, folder, seconds):
    """Whether the tests pass. They fail if they take longer than `seconds`; then all their processes are killed."""
    environment = {**os.environ, 'PYTHONDONTWRITEBYTECODE': '1'}    # a compiled file of the same second would be stale
    run = subprocess.Popen([sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', *tests], cwd=folder,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, process_group=0)
    try:
        return run.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        return run.wait() == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('script', help='a Python file of the project, for example aotpot.py or nets/fast.py')
    parser.add_argument('--n', type=int, default=30, help='how many changes')
    parser.add_argument('--seed', type=int, default=0, help='of the draw')
    parser.add_argument('--lines', type=int, nargs=2, default=(1, 9999), help='the first and the last line')
    args = parser.parse_args()
    script, (first, last) = Path(args.script), args.lines
    tests = [Path('tests', script.parent, f'test_{script.name}'), Path('tests/test_refusals.py')]
    places = [mutant for mutant in mutants((ROOT / script).read_text()) if first <= mutant[0] <= last]
    chosen = sorted(random.Random(args.seed).sample(places, min(args.n, len(places))))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, ROOT.name)
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns('.*', 'data', 'out', 'venv', '__pycache__'))
        start = time.time()
        if not survives(tests, copy, 3600):
            sys.exit('error: the tests fail without any change')
        limit, noticed = 60 + 3 * (time.time() - start), 0
        for row, line, program in chosen:
            (copy / script).write_text(program)
            if survives(tests, copy, limit):
                print(f'{script}:{row}: {line}', flush=True)
            else:
                noticed += 1
    print(f'{script}: {noticed} of {len(chosen)} changes noticed, of {len(places)} possible ones')


if __name__ == '__main__':
    main()
