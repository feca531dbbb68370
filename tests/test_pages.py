"""README and docs: links lead somewhere, commands take their flags, and code runs."""
import importlib
import os
import re
import runpy
import shutil
import subprocess
import unicodedata

import h5py
import numpy as np
import pytest
import torch

import evaluate
import train
from configs import InputError
from conftest import ROOT
from helpers import run, write_two
from nets import baselines
from nets.build import OPTIMIZERS
from runtime.runs import read_log

PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
SCRIPTS = ('train.py', 'finetune.py', 'evaluate.py', 'lab.bench', 'lab.interpret', 'lab.reproduce',
           'sources.generate', 'sources.prepare')


def anchors(page):
    """The anchors of the headings of a page, as GitHub makes them."""
    found = set()
    text = re.sub(r'```.*?```', '', page.read_text(), flags=re.S)
    for title in re.findall(r'^#+ (.*)$', text, re.M):
        title = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', title)
        letters = [c for c in title.lower() if c in ' -_' or unicodedata.category(c)[0] in 'LN']
        found.add(''.join(letters).replace(' ', '-'))
    return found


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r'\]\((?!\w+://)([^)\s]+)\)', page.read_text()):
        path, _, anchor = target.partition('#')
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def flags_of(script, words, capsys):
    """The names of the flags that a script takes, with these words before --help."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr('sys.argv', [script, *words, '--help'])
        module = importlib.import_module(script.removesuffix('.py'))
        getattr(module, 'parse', module.main)()
    return set(re.findall(r'(?:^ +|, )--(\w+)', capsys.readouterr().out, re.M))


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_the_commands_of_the_pages_take_their_flags(page, capsys):
    code = '\n'.join(re.findall(r'```\w*\n(.*?)```', page.read_text(), re.S)).replace('\\\n', ' ')
    for line in code.splitlines():
        line = re.sub(r"'[^']*'", 'X', line.partition(' #')[0])            # flags within a flag
        for script in SCRIPTS:
            found = re.search(rf'(?<=[ /])({re.escape(script)}) (.*?)(&&|;|\||$)', ' ' + line)
            if not found:
                continue
            size = re.search(r'--size (\S+)', found[2])
            known = flags_of(script, size[0].split() if size else [], capsys)
            given = set(re.findall(r'(?<=\s)--(\w+)', ' ' + found[2]))
            assert given <= known, f'{line}: {given - known}'


@pytest.mark.parametrize('path', sorted(ROOT.glob('lab/runs/*.sh')), ids=lambda path: path.stem)
def test_a_recipe_is_a_script_whose_commands_take_its_flags(path, capsys):
    assert subprocess.run(['bash', '-n', path]).returncode == 0
    given = set(re.findall(r'(?<=\s)--(\w+)', re.sub(r'#.*', '', path.read_text())))
    known = {*'standalone nnodes nproc_per_node max_restarts rdzv_backend rdzv_id rdzv_endpoint'.split()}
    for script in ('train.py', 'sources.generate', 'sources.prepare', 'lab.reproduce'):
        known |= flags_of(script, [], capsys)
    assert len(given) > 4 and given <= known, given - known


def blocks_of(title):
    """The blocks of Python below a heading of the contributing page."""
    page = (ROOT / 'docs/contributing.md').read_text()
    _, section = re.split(rf'^## {title}.*$', page, flags=re.M)
    return re.findall(r'```python\n(.*?)```', section.partition('\n## ')[0], re.S)


def test_a_network_a_loss_and_an_optimizer_of_the_contributing_page_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine.py').write_text(blocks_of('Plug in')[0])
    write_two(tmp_path / 'data')
    known = {'Small': baselines.BASELINES, 'absolute': train.LOSSES, 'nadam': OPTIMIZERS}
    for name in known:
        monkeypatch.setitem(known[name], name, None)                    # until the end of the test
    flags = '--network Small --loss absolute --optimizer nadam --lr 1e-3 --out out/small'
    monkeypatch.setattr('sys.argv', ['mine.py', *flags.split(), '--data', 'data', '--steps', '4'])
    runpy.run_path('mine.py', run_name='__main__')
    del baselines.BASELINES['Small']
    with pytest.raises(InputError, match='network Small'):
        evaluate.load('out/small')
    Small = runpy.run_path('mine.py', run_name='mine')['Small']
    assert type(evaluate.load('out/small')) is Small


@pytest.mark.slow
def test_tensorboard_reads_the_log_as_the_page_writes_it(tmp_path, monkeypatch, pretrained):
    pytest.importorskip('tensorboard', reason='pip install tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pretrained, 'out/nano')
    exec(blocks_of('Plug in')[1], {})
    board = EventAccumulator('out/nano').Reload()
    logged = [line for line in read_log('out/nano/log.jsonl') if 'loss' in line]
    for event, line in zip(board.Scalars('loss'), logged, strict=True):
        assert (event.step, event.value) == (line['step'], pytest.approx(line['loss'], rel=1e-6))


def test_safetensors_keep_the_weights_as_the_contributing_page_writes_them(tmp_path, monkeypatch):
    pytest.importorskip('safetensors', reason='pip install safetensors')
    from safetensors.torch import load_file
    (tmp_path / 'weights').symlink_to(ROOT / 'weights')
    monkeypatch.chdir(tmp_path)
    exec(blocks_of('Plug in')[2], {})
    weights = load_file('mini.safetensors')
    for name, value in evaluate.load('weights/mini.pt').state_dict().items():
        assert torch.equal(weights.pop(name), value), name
    assert not weights


def ran(folder, *words):
    """What a command of Python prints that ends well in a folder, with the modules there alone."""
    done = run(*words, cwd=folder, env={**os.environ, 'PYTHONPATH': str(folder)})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_exported_network_predicts_the_same_without_this_project(tmp_path, monkeypatch):
    (tmp_path / 'weights').symlink_to(ROOT / 'weights')
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(blocks_of('Plug in')[3], found)
    *inputs, v = found['u'], found['condition'], found['prediction']
    torch.save((inputs, v), 'fields.pt')
    alone = ("import torch; inputs, v = torch.load('fields.pt'); "
             "torch.testing.assert_close(torch.export.load('mini.pt2').module()(*inputs), v)")
    ran(tmp_path, '-c', alone)
    torch.testing.assert_close(v, found['model'](*inputs), rtol=1e-4, atol=1e-4)


@pytest.fixture
def copy(tmp_path):
    """The folder of a copy of the project, without data and runs."""
    without = shutil.ignore_patterns('.git', 'data', 'out', 'tests', 'docs')
    return shutil.copytree(ROOT, tmp_path / 'copy', ignore=without)


@pytest.mark.slow
def test_the_solver_of_the_contributing_page_is_generated_and_trained_on(copy):
    solver, row = blocks_of('A solver')
    (copy / 'sources/pdes/heat.py').write_text(solver)
    for path, old, new in (
            ('sources/pdes/__init__.py', 'import compressible', 'import heat, compressible'),
            ('sources/pdes/__init__.py', 'EQUATIONS = (', 'EQUATIONS = (heat, '),
            ('configs.py', 'DOWNSTREAM = {\n', 'DOWNSTREAM = {\n' + row)):
        text = (copy / path).read_text()
        assert text.count(old) == 1
        (copy / path).write_text(text.replace(old, new))
    counts = '--train 8 --test 2 --valid 0 --resolution 16'.split()
    ran(copy, '-m', 'sources.generate', 'heat', '--preset', 'nano', *counts)
    ran(copy, *'train.py --data data/nano --datasets heat --steps 30 --resolution 16'.split())
    with h5py.File(copy / 'data/nano/heat/test.h5') as file:
        u = file['data'][0, ..., 0]
    modes = abs(np.fft.fft2(u)[:, 1, 0])
    assert modes[1] / modes[0] == pytest.approx(np.exp(-0.1 * 4 * np.pi ** 2 * 0.01), rel=1e-4)


@pytest.mark.slow
def test_readmes_commands_that_take_seconds_run_as_they_stand(copy):
    """Own data from array to prediction, with a tenth of the steps, and the network in the box."""
    page = (ROOT / 'README.md').read_text()
    write, predict = re.findall(r'```python\n(.*?)```', page, re.S)
    training = re.search(r'^python (train.py --data data --datasets mine .*?) +#', page, re.M)[1]
    scoring = re.search(r'`python (evaluate.py --checkpoint weights/mini.pt .*?)`', page)[1]
    ran(copy, '-c', write)
    ran(copy, *training.replace('--steps 600', '--steps 60').split())
    ran(copy, '-c', predict)
    assert np.load(copy / 'prediction.npy').shape == (1, 10, 64, 64, 1)
    lines = ran(copy, *scoring.split()).splitlines()
    [row] = [line.split() for line in lines if line.startswith('swe_pdb')]
    known = re.search(r'`swe_pdb` \| (\S+),', (ROOT / 'docs/models.md').read_text())[1]
    assert float(row[3]) == pytest.approx(float(known), abs=2e-4), 'as docs/models.md says'
