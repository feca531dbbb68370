"""Imports point one way, and the three files of the method run alone."""
import ast
import re
import shutil
import sys

import torch

from conftest import ROOT

METHOD = 'aotpot', 'sinkhorn', 'configs'
ROOMS = '', 'nets', 'runtime', 'sources', 'sources/pdes', 'lab'
PATHS = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).glob('*.py')]
KNOWN = {'.'.join(path.with_suffix('').parts).removesuffix('.__init__'): ROOT / path
         for path in PATHS}                                     # {module: path} of what is no test


def imported(nodes):
    """The modules of KNOWN that some nodes of a syntax tree import."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f'{node.module}.{alias.name}' for alias in node.names}
    return names & KNOWN.keys()


TREES = {module: ast.parse(path.read_text()) for module, path in KNOWN.items()}
ARROWS = {module: imported(ast.walk(tree)) for module, tree in TREES.items()}
AT_ONCE = {module: imported(tree.body) for module, tree in TREES.items()}   # not in functions


def reached(module, arrows):
    """All modules to which arrows lead from `module`."""
    found, todo = set(), [module]
    while todo:
        new = arrows[todo.pop()] - found
        found |= new
        todo += new
    return found


def test_three_files_in_an_empty_folder_are_the_method(tmp_path, monkeypatch):
    for name in METHOD:
        shutil.copy(ROOT / f'{name}.py', tmp_path)
    for name in KNOWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    import aotpot
    import configs
    config = configs.model('nano', resolution=32)
    model = aotpot.AOTPOT(config)
    v = model(torch.randn(1, config.frames, 32, 32, config.channels))
    assert v.shape == (1, 32, 32, config.channels), v.shape
    v.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert KNOWN.keys() & sys.modules == {*METHOD}, 'others would come from the checkout'


def test_no_file_imports_itself_in_a_circle_not_even_inside_a_function():
    circles = [module for module in KNOWN if module in reached(module, ARROWS)]
    assert not circles, circles


def test_the_network_imports_its_two_files_and_no_room_reaches_to_its_right():
    assert ARROWS['aotpot'] == {'configs', 'sinkhorn'} and not ARROWS['sinkhorn']
    top = 'data', 'evaluate', 'train', 'sources', 'lab'
    for room, right in {'nets': top, 'runtime': top, 'sources': ('train', 'lab')}.items():
        for module in KNOWN:
            reaches = [name for name in reached(module, ARROWS) if name.split('.')[0] in right]
            assert not module.startswith(room) or not reaches, (module, reaches)


def test_what_trains_loads_nothing_that_draws_and_no_solvers():
    for script in ('train', 'finetune', 'evaluate'):
        loaded = {script} | reached(script, AT_ONCE)
        assert not [module for module in loaded if re.match(r'(lab|sources)\b', module)], script
        for module in loaded:
            text = KNOWN[module].read_text()
            assert not re.search('^(import|from) matplotlib', text, re.M), module
