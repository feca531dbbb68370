"""Imports point one way, and the three files of the method run alone."""
import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import configs

ROOT = Path(configs.__file__).parent
METHOD = 'aotpot.py', 'sinkhorn.py', 'configs.py'
ALONE = """
import torch
import aotpot, configs
for size in ('tiny', 'nano'):
    config = configs.model(size, resolution=32)
    model = aotpot.AOTPOT(config)
    u = torch.randn(1, config.frames, 32, 32, config.channels)
    v = model(u)
    assert v.shape == (1, 32, 32, config.channels), v.shape
    v.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
"""


def test_three_files_in_an_empty_folder_are_the_method(tmp_path):
    for name in METHOD:
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run([sys.executable, '-c', ALONE], cwd=tmp_path, env={'PATH': ''}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def modules():
    """{module: path} of all Python beside the tests."""
    rooms = '', 'nets', 'runtime', 'sources', 'sources/pdes', 'lab'
    paths = [path.relative_to(ROOT) for room in rooms for path in (ROOT / room).glob('*.py')]
    return {'.'.join(path.with_suffix('').parts).removesuffix('.__init__'): ROOT / path for path in paths}


def imported(path, known):
    """The modules of `known` that a file imports at its top level: what a function imports waits until it is called."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f'{node.module}.{alias.name}' for alias in node.names}
    return names & known.keys()


KNOWN = modules()
ARROWS = {module: imported(path, KNOWN) for module, path in KNOWN.items()}


def reached(module):
    """All modules that are loaded when `module` is imported."""
    found, todo = set(), [module]
    while todo:
        new = ARROWS[todo.pop()] - found
        found |= new
        todo += new
    return found


def test_no_file_imports_itself_in_a_circle():
    assert ARROWS['aotpot'] == {'configs', 'sinkhorn'}
    runtime = set.union(*(ARROWS[module] for module in KNOWN if module.startswith('runtime')))
    assert not [module for module in runtime if module.split('.')[0] in ('data', 'sources', 'lab')]
    circles = [module for module in KNOWN if module in reached(module)]
    assert not circles, circles


def test_what_trains_loads_nothing_that_draws():
    for script in ('train', 'finetune', 'evaluate'):
        loaded = {script} | reached(script)
        assert not [module for module in loaded if module.startswith('lab')], script
        for module in loaded:
            assert not re.search('^(import|from) matplotlib', KNOWN[module].read_text(), re.MULTILINE), module


def test_a_model_is_scored_without_the_solvers():
    """They are loaded where data have to be made."""
    assert not [module for module in reached('evaluate') if module.startswith('sources')]
