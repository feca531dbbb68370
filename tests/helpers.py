"""What test files share: small networks, datasets, checkpoints, ways to run a script."""
import dataclasses
import fcntl
import os
import socket
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F

import aotpot
import configs
import data
import nets.build
import train
from nets.experts import Experts
from nets.fast import Fast
from runtime import distributed, terminal
from runtime.runs import read_log

SMALL = dict(width=16, mlp=24, depth=2, heads=2, patch=4, resolution=16, frames=3, channels=2,
             out_width=6)


def fresh(form='fast', **overrides):
    """A small network in float64 as it starts, in the form that is asked for."""
    network = {'fast': Fast, 'paper': aotpot.AOTPOT}[form]
    return network(configs.model('tiny', **{**SMALL, **overrides}), Experts).double()


def build(form='fast', dtype=torch.float64, **overrides):
    """A small network whose gates, biases and affine parameters are not at their trivial start."""
    model = fresh(form, **overrides).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 and 'gamma' not in name or name.endswith('b_T'):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def field(model, B=2, grid=None):
    """A random input of a network, on the grid of its config or on another one."""
    config = model.config
    return torch.randn(B, config.frames, *(grid or config.resolution), config.channels,
                       dtype=next(model.parameters()).dtype)


def dpot_state(C=2, T=3, P=4, D=16, depth=2, K=2, O=6, gamma=True, normalize=False):
    """Random weights under the names and in the shapes of DPOT's own network."""
    E, hidden, random, state = C * P + 3, 24, torch.randn, {}
    layers = {'patch_embed.proj.0': (E, C + 3, P, P), 'patch_embed.proj.2': (D, E, 1, 1),
              'cls_head.0': (D, D), 'out_layer.0': (D, O, P, P), 'out_layer.2': (O, O, 1, 1),
              'out_layer.4': (C, O, 1, 1)}
    if normalize:
        layers.update({f'scale_feats_{name}': (D, 2 * C) for name in ('mu', 'sigma')})
    for i in range(depth):
        layers.update({f'blocks.{i}.{name}': shape for name, shape in (
            ('norm1', (D,)), ('norm2', (D,)), ('mlp.0', (hidden, D, 1, 1)),
            ('mlp.2', (D, hidden, 1, 1)))})
        for layer in '12':
            state[f'blocks.{i}.filter.w{layer}'] = random(2, K, D // K, D // K) / D ** 0.5
            state[f'blocks.{i}.filter.b{layer}'] = random(2, K, D // K) / D ** 0.5
    for name, shape in layers.items():
        bias = O if name == 'out_layer.0' else shape[0]                 # which is transposed
        state[f'{name}.weight'] = random(shape) / D ** 0.5
        state[f'{name}.bias'] = random(bias) / D ** 0.5
    state.update({'pos_embed': random(1, D, 4, 4), 'time_agg_layer.w': random(T, D, D) / D})
    return {**state, 'time_agg_layer.gamma': 2 ** random(1, D)} if gamma else state


ONE_LAYER = dict(width=16, mlp=16, depth=1, patch=4, resolution=16, frames=3)
TINY = [f'--{name}={value}' for name, value in ONE_LAYER.items()]
TINY += ('--no-normalize --no-overlap --optimizer adamw --loss relative --sampling swe_pdb=3 '
         '--device cpu --batch_size 4 --log_every 1').split()


def travelling(N, T, H, C, speed, scale=1.0):
    """Periodic plane waves (N, T, H, H, C), each with its own phase."""
    random, x = np.random.default_rng(N * T), 2 * np.pi * np.arange(H) / H
    phase = random.uniform(0, 2 * np.pi, (N, 1, 1, 1, C))
    t = speed * np.arange(T)[None, :, None, None, None]
    return scale * np.sin(x[:, None, None] + 2 * x[:, None] + t + phase) + 0.1


def write(folder, name, values, split, **attributes):
    """Write an array (N, T, *space, C) to folder/name/split.h5."""
    with data.writer(folder / name / f'{split}.h5', values.shape, **attributes) as file:
        file['data'][:] = values


def write_two(folder):
    """Two datasets of other grids and channels, of which one is static; returns `folder`."""
    for split, N in (('train', 6), ('test', 3)):
        values = travelling(N, 9, 16, 3, 0.4)
        values[..., 2] = values[:, :1, ..., 2]
        write(folder, 'own', values, split, channels=('u', 'v', 'c'), static=('c',), t_test=4)
        write(folder, 'swe_pdb', travelling(N, 7, 12, 1, 0.7), split)
    return folder


def command(folder, out, *flags, steps=24, save_every=4):
    """train.py and the flags that train a tiny network on `folder`."""
    return [train.__file__, *TINY, '--data', str(folder), '--out', str(out), '--steps', str(steps),
            '--save_every', str(save_every), *flags]


def run(*arguments, **options):
    """The finished process of Python with these arguments, with what it printed."""
    words = [sys.executable, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, **options)


def fork(main, path, rank=0, port=0, world_size=1, address='127.0.0.1'):
    """Run `main` in a fork of this process, alone or as one of those of a torchrun; its number.

    path: a file for what it prints.
    """
    process = os.fork()
    if process:
        return process
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=address,
                      MASTER_PORT=str(port))
    code = 1
    try:
        sys.stdout = sys.stderr = open(path, 'w')
        code = terminal.cli(main) or 0
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.stdout.flush()
        os._exit(code)


def exit_code(process):
    """That of a process of `fork`, once it has ended; minus the number of a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def free_port():
    """The number of a port that nobody listens to."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


def at_step(step, action, patch):
    """Call `action()` when a run is about to take its step number `step`, counted from 1."""
    schedule = train.one_cycle

    def schedule_and_act(done, *rest):
        if done == step - 1:
            action()
        return schedule(done, *rest)
    patch.setattr(train, 'one_cycle', schedule_and_act)


@contextmanager
def locked_by_another(folder):
    """The lock of `folder` is held within the block as if by another process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'lock', 'a') as file:
        fcntl.flock(file, fcntl.LOCK_SH)                # with which no exclusive lock goes
        yield
        fcntl.flock(file, fcntl.LOCK_UN)                        # which a fork may hold open, too


def log(out):
    """The steps in a run's log.jsonl, one dict each."""
    return read_log(out / 'log.jsonl')


def same(a, b):
    """Whether two nests of dicts, lists and tensors are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


CPU = distributed.Processes(0, 1, torch.device('cpu'))


def small_model(**options):
    return nets.build.build(configs.model('tiny', **{**ONE_LAYER, **options})).eval()


def write_test_sets(folder):
    """'own' has a static channel and the grid of the network, 'coarse' another grid."""
    values = travelling(5, 9, 16, 3, 0.4)
    values[..., 1] = values[:, :1, ..., 1]
    write(folder, 'own', values, 'test', channels=('u', 'c', 'v'), static=('c',), t_test=4)
    write(folder, 'coarse', travelling(4, 7, 8, 1, 0.7), 'test')
    return folder


def trajectories(folder, name, **options):
    return data.Trajectories(folder, name, 'test', 3, 4, **options)


def read(dataset, trajectory, start, stop):
    """The frames start..stop-1 of a trajectory, (stop - start, *space, C)."""
    return dataset.windows([(trajectory, start)], stop - start)[0].numpy()


# the attributes of `data` of several datasets, as a checkpoint may keep them
WAVE = dict(channels=('u', 'u_t', 'c'), static=('c',))
KINDS = {'wave': WAVE, 'same': {**WAVE, 'channels': ('p', 'q', 'c')},
         'mask': dict(channels=('u', 'u_t', 'mask'), static=('mask',)),
         'smoke': dict(channels=('u', 'vx', 'vy')), 'flow': dict(channels=('w',))}


def save(model, folder, place, step=7, layouts=None, **run):
    """A checkpoint of `model` in folder/out. layouts: {dataset: the header of its train.h5}."""
    path = folder / 'out' / place
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = lambda value: [*value] if isinstance(value, tuple) else value
    headers = {name: {'train': {'static': [], **{key: plain(x) for key, x in layout.items()}}}
               for name, layout in (layouts or {}).items()}
    torch.save({'model': model.state_dict(), 'step': step, 'data': headers, 'config': {
        'model': dataclasses.asdict(model.config), 'run': {'data': str(folder), **run}}}, path)
    return path


def slow_rollout(model, truth, evolving, steps):
    """The native predictions (steps, *space', C'') after the first 3 frames (T, *space', C')."""
    def resize(u, space):
        mode = 'bilinear' if len(space) == 2 else 'trilinear'
        return F.interpolate(u.movedim(-1, 0)[None], space, mode=mode)[0].movedim(0, -1)
    grid, out = model.config.resolution, []
    frames = [torch.ones(*grid, 4) for _ in range(3)]
    for frame, u in zip(frames, truth):
        frame[..., :u.shape[-1]] = resize(u, grid)
    for _ in range(steps):
        new = model(torch.stack(frames[-3:])[None])[0]
        out.append(resize(new, truth.shape[1:-1])[..., evolving])
        frames.append(frames[-1].clone())
        frames[-1][..., evolving] = resize(out[-1], grid)
    return torch.stack(out)


def pictures(folder, pattern='*'):
    """{name: pillow's Image} of the files of a folder."""
    from PIL import Image
    return {path.name: Image.open(path) for path in sorted(folder.glob(pattern))}
