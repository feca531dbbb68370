"""What the tests of commands on trained models share: a small network, two datasets, checkpoints, a slow rollout."""
import dataclasses
import json

import configs

import torch
import torch.nn.functional as F

import data
import nets
from helpers import main, travelling, write
from runtime import distributed

CPU = distributed.Processes(0, 1, torch.device('cpu'))
SMALL = dict(width=16, mlp=16, depth=1, heads=2, patch=4, resolution=16, frames=3, out_width=4)


def small_model(**options):
    return nets.build(configs.model('tiny', **{**SMALL, **options})).eval()


def write_test_sets(folder):
    """'own' has a static channel and the grid of the network, 'coarse' another grid."""
    values = travelling(5, 9, 16, 3, 0.4)
    values[..., 1] = values[:, :1, ..., 1]
    write(folder, 'own', values, 'test', channels=('u', 'c', 'v'), static=('c',), t_test=4)
    write(folder, 'coarse', travelling(4, 7, 8, 1, 0.7), 'test')
    return folder


def trajectories(folder, name, **options):
    return data.Trajectories(folder, name, 'test', 3, 4, **options)


def save(model, folder, place, step=7, **run):
    """A checkpoint of `model` in folder/out."""
    path = folder / 'out' / place
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({'model': model.state_dict(), 'step': step, 'config': {
        'model': dataclasses.asdict(model.config), 'run': {'data': str(folder), **run}}}, path)
    return path


def save_three(model, folder):
    """Checkpoints of two steps of one run and of another network, which was trained on 'own' alone."""
    torch.manual_seed(5)
    both = dict(datasets=('coarse', 'own'))
    return [save(model, folder, 'aot/step9.pt', 9, **both), save(model, folder, 'aot/step10.pt', 10, **both),
            save(small_model(residual='plain'), folder, 'plain/last.pt', datasets=('own',))]


def several(script, paths, flags, folder, monkeypatch, capsys):
    """A command on several checkpoints: the lines that it printed, and its JSON."""
    code, error, printed = main([*flags, '--checkpoint', *paths, '--device', 'cpu', '--json', folder / 'several.json'],
                                monkeypatch, capsys, script)
    assert code == 0, error
    return printed.splitlines(), json.loads((folder / 'several.json').read_text())


def slow_rollout(model, truth, evolving, steps):
    """One trajectory (T + steps, H, W, C'), frame by frame: native predictions (steps, H, W, C''), also fed back so."""
    H = truth.shape[1]
    up = lambda u: F.interpolate(u.permute(2, 0, 1)[None], (16, 16), mode='bilinear')[0].permute(1, 2, 0)
    down = lambda u: F.interpolate(u.permute(2, 0, 1)[None], (H, H), mode='bilinear')[0].permute(1, 2, 0)
    frames, out = [torch.ones(16, 16, 4) for _ in range(3)], []
    for t in range(3):
        frames[t][..., :truth.shape[-1]] = up(truth[t])
    for _ in range(steps):
        new = model(torch.stack(frames[-3:])[None])[0]
        out.append(down(new)[..., evolving])
        frames.append(frames[-1].clone())
        frames[-1][..., evolving] = up(out[-1])
    return torch.stack(out)


def pictures(folder, pattern='*'):
    """{name: pillow's Image} of the files of a folder."""
    from PIL import Image
    return {path.name: Image.open(path) for path in sorted(folder.glob(pattern))}
