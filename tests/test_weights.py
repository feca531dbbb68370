"""The trained model in weights/: what it needs where nothing else is, and that it is what the documentation says."""
import numpy as np
import pytest

import configs
import evaluate
import finetune
from helpers import log, save, travelling, write
from runtime import checkpoint
from sources import generate
from sources.pdes import FAMILIES

FAMILY = evaluate.LONG


@pytest.fixture
def fresh(model, tmp_path, monkeypatch):
    """A working directory without data and runs, in which a small network is the trained model; datasets are small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(configs.BUILTIN, 'mini', ('swe_pdb', FAMILY, 'ns2d_fno_1e-4'))
    monkeypatch.setattr(generate, 'NANO', dict(resolution=16, train=1, test=2))
    for name in configs.BUILTIN['mini']:
        monkeypatch.setitem(FAMILIES, name, FAMILIES[name]._replace(nano=dict(frames=12), grid=16))
    path = save(model, tmp_path / 'clone', 'mini.pt', data='data/mini', datasets=('ns2d_fno_1e-4', FAMILY))
    path.rename(tmp_path / 'mini.pt')
    monkeypatch.setattr(checkpoint, 'TRAINED', tmp_path / 'mini.pt')
    return tmp_path


def made(folder):
    return sorted(str(path.relative_to(folder / 'data/mini')) for path in folder.glob('data/**/*.h5'))


def test_it_is_scored_on_test_sets_that_are_generated_for_it(fresh, call):
    code, error, printed = call(['--device', 'cpu'], evaluate)
    assert code == 0, error
    assert printed.splitlines()[0].startswith(f'{fresh / "mini.pt"}: step 7')
    assert made(fresh) == [f'{FAMILY}/test.h5', 'ns2d_fno_1e-4/test.h5']
    again = call(['--device', 'cpu'], evaluate)[2]
    assert 'generating' in printed and 'generating' not in again
    assert again.splitlines()[-2:] == printed.splitlines()[-2:]
    other = call(['--device', 'cpu', '--data', 'elsewhere'], evaluate)
    assert other[0] == 2 and other[1].startswith('error: --data elsewhere: the folder holds no')


@pytest.mark.parametrize('name', [FAMILY, 'swe_pdb'])
def test_a_long_rollout_makes_the_test_set_and_the_reference_of_one_family_and_nothing_else(fresh, call, name):
    flags = ['--datasets', name] if name != FAMILY else []
    code, error, printed = call(['--device', 'cpu', '--rollout', 11, '--samples', 1, *flags], evaluate)
    assert code == 0 and f'{name}: L2RE at step' in printed, error
    assert made(fresh) == [f'{name}/rollout14_16x16_1.h5', f'{name}/test.h5']


def test_fine_tuning_starts_from_its_weights(fresh, call):
    for split in ('train', 'test'):
        write(fresh / 'data', 'mine', travelling(4, 7, 16, 1, 0.4), split)
    flags = ['--checkpoint', 'mini.pt', '--data', 'data', '--dataset', 'mine', '--steps', 1, '--device', 'cpu',
             '--out', 'out']
    code, error, printed = call(flags, finetune)
    assert code == 0 and 'mini.pt: step 7, trained on ns2d_fno_1e-4' in printed and len(log(fresh / 'out')) == 1, error


def test_the_model_in_the_box_is_small_knows_all_families_and_beats_persistence():
    path = checkpoint.TRAINED
    preset = path.stem
    assert path.stat().st_size < 4e6
    saved = checkpoint.load_file(path)
    assert sorted(saved['config']['run']['datasets']) == sorted(configs.PRETRAINING)
    model = evaluate.load(path)
    plans = {family: generate.plan(family, preset) for family in configs.PRETRAINING}
    for family, plan in plans.items():
        attributes = plan.attributes()
        header = next(iter(model.data[family].values()))
        assert header['dt'] == plan.dt and header['t_test'] == attributes['t_test']
        assert all(header[name] == [*attributes[name]] for name in ('channels', 'static'))
    T = model.config.frames
    for family in (FAMILY, 'swe_pdb'):
        u = generate.simulate(generate.plan(family, preset, frames=T + 6), 'test', [0, 1])        # (2, T + 6, H, W, 1)
        axes = tuple(range(2, u.ndim))
        error = np.square(evaluate.rollout(model, u[:, :T], 6, family) - u[:, T:]).sum(axes)             # (2, 6)
        persistence = np.square(u[:, T - 1:T] - u[:, T:]).sum(axes)
        assert (error[:, -1] < persistence[:, -1] / 4).all(), f'{family}: {error / persistence}'
