"""The recipes in lab/runs: shells parse them, and their commands take all the flags."""
import re
import subprocess

import pytest

import train
from conftest import ROOT
from sources import generate

SCRIPTS = sorted((ROOT / 'lab/runs').glob('*.sh'))


@pytest.mark.parametrize('path', SCRIPTS, ids=lambda path: path.stem)
def test_a_recipe_is_a_script_whose_commands_take_its_flags(path, capsys):
    text = path.read_text()
    assert subprocess.run(['bash', '-n', path], capture_output=True).returncode == 0
    given = set(re.findall(r'(?<=\s)--(\w+)', re.sub(r'#.*', '', text)))
    known = set()
    for main in train.parse, generate.main:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr('sys.argv', ['script', '--help'])
            main()
        known |= set(re.findall(r'--(\w+)', capsys.readouterr().out))
    of_torchrun = {'nnodes', 'nproc_per_node', 'max_restarts', 'rdzv_backend', 'rdzv_id', 'rdzv_endpoint', 'standalone'}
    assert len(given) > 4 and given <= known | of_torchrun, given - known
