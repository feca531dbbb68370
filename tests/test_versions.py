"""What our code takes of torch is there in the installed version; what differs by version."""
import ast
import inspect
import pkgutil
import re
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[1]
FILES = [*ROOT.glob('*.py'), *(path for room in ('nets', 'runtime', 'sources', 'lab')
                               for path in (ROOT / room).rglob('*.py'))]
SINCE = {               # the newest names, which make 2.6 the lowest version
    'torch.library.custom_op': 2.4, 'torch.nn.functional.rms_norm': 2.4, 'torch.serialization.safe_globals': 2.5,
    'torch.compiler.set_stance': 2.6,
}


def names_of_torch(text):
    """The full names of torch that a program takes: its F.gelu is torch.nn.functional.gelu."""
    nodes, full = list(ast.walk(ast.parse(text))), {}
    for node in nodes:
        if isinstance(node, ast.Import):
            full |= {name.asname or name.name: name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            full |= {name.asname or name.name: f'{node.module}.{name.name}' for name in node.names}
    taken = set(full.values())
    for node in nodes:
        first, dot, rest = ast.unparse(node).partition('.') if isinstance(node, ast.Attribute) else ('', '', '')
        if first in full and re.fullmatch(r'[\w.]+', rest):
            taken.add(full[first] + dot + rest)
    return {name for name in taken if name.split('.')[0] == 'torch'}


def exists(name):
    """Whether it can be imported, or be reached from what can be."""
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def test_what_the_code_takes_of_torch_exists_and_the_newest_of_it_is_this():
    taken = {path: names_of_torch(path.read_text()) for path in FILES}
    assert not [f'{path}: {name}' for path, names in taken.items() for name in names if not exists(name)]
    assert SINCE.keys() <= set().union(*taken.values()), 'some are gone: is the lowest version in README still true?'
    # train.trainable asks for the newer of these two words, since 2.13
    assert {'forward_sync_buffers', 'broadcast_buffers'} & inspect.signature(DistributedDataParallel).parameters.keys()
