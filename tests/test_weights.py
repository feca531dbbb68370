"""The trained models in weights/: that they need nothing else, and are what the documentation says."""
import numpy as np
import pytest

import configs
import data
import evaluate
from helpers import save
from runtime import checkpoint
from sources import generate
from sources.pdes import FAMILIES

# {family: its frames, None: those of --preset mini}, as in lab/runs
MINI = dict.fromkeys(configs.PRETRAINING)
TINY = {'dr_pdb': 21, 'swe_pdb': 21, 'ns2d_pdb_M1_eta1e-1_zeta1e-1': 21,
        **dict.fromkeys(['ns2d_cond_pda', 'ns2d_fno_1e-3', 'ns2d_fno_1e-5', 'ns2d_pda'])}


def test_it_is_scored_on_test_sets_that_are_generated_for_it(model, tmp_path, monkeypatch, call):
    """In a folder without data and runs, with a small network in the place of the trained one."""
    monkeypatch.chdir(tmp_path)
    names = 'swe_pdb', evaluate.LONG, 'ns2d_fno_1e-4'
    monkeypatch.setitem(configs.BUILTIN, 'mini', names)
    monkeypatch.setattr(generate, 'NANO', dict(resolution=16, train=1, test=2))
    for name in names:
        small = FAMILIES[name]._replace(nano=dict(frames=12), grid=16)
        monkeypatch.setitem(FAMILIES, name, small)
    path = save(model, tmp_path / 'clone', 'mini.pt', data='data/mini', datasets=names[1:])
    monkeypatch.setattr(checkpoint, 'TRAINED', path.rename(tmp_path / 'mini.pt'))
    code, error, printed = call(['--device', 'cpu'], evaluate)
    assert code == 0 and printed.startswith(f'{tmp_path}/mini.pt: step 7'), error
    assert data.find('data/mini', split='test') == [evaluate.LONG, 'ns2d_fno_1e-4']
    assert not [*tmp_path.glob('data/mini/*/train.h5')]
    again = call(['--device', 'cpu'], evaluate)[2]
    assert 'generating' in printed and 'generating' not in again
    assert again.splitlines()[-2:] == printed.splitlines()[-2:]
    code, error, _ = call(['--device', 'cpu', '--data', 'elsewhere'], evaluate)
    assert code == 2 and error.startswith('error: --data elsewhere: the folder holds no')


@pytest.mark.parametrize('name, size, families', [
    ('mini', 4e6, MINI), pytest.param('tiny', 16e6, TINY, marks=pytest.mark.slow)])
def test_a_model_in_the_box_is_small_knows_its_families_and_beats_persistence(name, size, families):
    path = checkpoint.TRAINED.with_stem(name)
    assert path.stat().st_size < size
    model = evaluate.load(path)
    T = model.config.frames
    resolution = model.config.resolution[0]
    assert model.data.keys() == families.keys()
    for family, splits in model.data.items():
        header = splits['train']
        plan = generate.plan(family, 'mini', resolution=resolution, frames=families[family])
        attributes = plan.attributes()
        assert header['shape'][1:] == [*plan.shapes['train'][1:]]
        assert all(header[key] == attributes[key] for key in ('source', 'dt', 't_test'))
        assert all(header[key] == [*attributes[key]] for key in ('channels', 'static'))
    for family in evaluate.LONG, 'swe_pdb':
        plan = generate.plan(family, 'mini', resolution=resolution, frames=T + 6)
        u = generate.simulate(plan, 'test', [0, 1])                     # (2, T + 6, H, W, 1)
        prediction = evaluate.rollout(model, u[:, :T], 6, family)
        error, persistence = (np.square(forecast - u[:, T:]).sum((2, 3, 4))[:, -1]
                              for forecast in (prediction, u[:, T - 1:T]))
        assert (error < persistence / 4).all(), f'{family}: {error / persistence}'
