"""What the comparisons share: the difference of two runs, frame by frame, and code from a checkout."""
import ast
import os
from pathlib import Path

import numpy as np
import pytest


def differences(what, ours, theirs):
    """L2RE of each frame, the first axis of both arrays; printed with the name `what` (python -m pytest -rP)."""
    values = [float(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b)) for a, b in zip(ours, theirs, strict=True)]
    print(f'{what}:', *(f'{value:.1e}' for value in values))
    return values


def from_checkout(variable, path, name, **options):
    """The function or class `name` of a file in the checkout that a variable of the environment names, or a skip.

    Only its definition is executed, with the names in `options`, since scripts of benchmarks start work when imported.
    """
    file = Path(os.environ.get(variable, '')) / path
    if variable not in os.environ or not file.is_file():
        pytest.skip(f'{variable} has to name a checkout that contains {path}', allow_module_level=True)
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, 'name', None) == name]
    exec(compile(tree, str(file), 'exec'), options)
    return options[name]
