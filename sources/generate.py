"""Generate training data with the PDE solvers in pdes/.

    python -m sources.generate ns2d_fno_1e-3            the paper's sizes, into data/ns2d_fno_1e-3/
    python -m sources.generate builtin --preset nano    small ones, into data/nano/: a minute
    python -m sources.generate builtin --preset mini    the twelve, with four times as many of them
    python -m sources.generate wave_gauss --train 200 --test 20 --device cuda

Shapes: N trajectories of a split, B of a batch, T frames, H W grid points, C channels, M points a
side of the solver.
"""
import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import configs
from configs import DATASETS, InputError
from data import SPLITS, splits_to_write, writer
from runtime import distributed, files, terminal
from runtime.terminal import Progress
from sources.pdes import FAMILIES

NANO = dict(resolution=64, train=48, test=8)    # of which a family's own `nano` replaces some
FLAGS = dict(resolution='grid points a side', train='trajectories', valid='trajectories',
             test='trajectories', frames='of a trajectory', seed='of the initial states [0]')
TRAIN_MULTIPLE = {'nano': 1, 'mini': 4}         # of the training trajectories in NANO


class Plan(NamedTuple):
    """A dataset to be written."""
    name: str
    resolution: int             # grid points a side of the stored fields
    frames: int
    dt: float                   # time between two frames
    counts: dict                # split -> trajectories, in the order of SPLITS
    seed: int
    grid: int = 0               # least number of the solver's points a side; 0: the family's

    @property
    def stride(self):
        """The solver has this many times as many grid points a side as the stored fields."""
        return math.ceil((self.grid or FAMILIES[self.name].grid) / self.resolution)

    @property
    def shapes(self):
        """{split: shape (N, T, H, W, C)}."""
        shape = *[self.resolution] * DATASETS[self.name].dims, len(DATASETS[self.name].channels)
        return {split: (N, self.frames, *shape) for split, N in self.counts.items()}

    def attributes(self):
        """The attributes of `data` in the file, see data.py."""
        family = FAMILIES[self.name]
        dataset = DATASETS[self.name]
        version = f' version {family.version}' if family.version > 1 else ''
        source = f'generate.py seed {self.seed} grid {self.resolution * self.stride}{version}'
        return dict(source=source, pde=family.pde, dt=self.dt, channels=dataset.channels,
                    static=dataset.static, t_test=min(dataset.t_test, self.frames - 1))


def plan(name, preset='paper', **changes):
    """The Plan of a dataset with the sizes of a preset; nano and mini have a valid split like test.

    changes: resolution, train, valid, test, frames, dt and seed, where they are not None.
    Raises InputError for bad ones.
    """
    if name not in FAMILIES:
        hint = configs.nearest(name, [*FAMILIES, 'builtin', 'all'])
        raise InputError(f'no solver makes {name!r}{hint}; python -m sources.prepare converts '
                         f'downloads')
    dataset = DATASETS[name]
    sizes = {key: getattr(dataset, key) for key in ('resolution', 'frames', 'dt', 'train', 'test')}
    if preset in TRAIN_MULTIPLE:
        sizes |= NANO | FAMILIES[name].nano
        sizes['train'] *= TRAIN_MULTIPLE[preset]
    sizes |= {key: value for key, value in changes.items() if value is not None}
    sizes = {'valid': sizes['test'] if preset in TRAIN_MULTIPLE else 0, 'seed': 0} | sizes
    least = dict(resolution=16, train=1, test=1, frames=min(11, dataset.frames))
    most = dict(frames=2) if dataset.frames == 2 else {}            # a steady problem
    for key in ('resolution', 'frames', 'seed', *SPLITS):
        configs.bounded(f'{name}: --{key}', sizes[key], least.get(key, 0), most.get(key, 10 ** 9))
    counts = {split: sizes.pop(split) for split in SPLITS}
    made = Plan(name, counts={split: count for split, count in counts.items() if count}, **sizes)
    grid = made.grid or FAMILIES[name].grid
    if FAMILIES[name].fixed and made.resolution * made.stride != grid:
        raise InputError(f'{name}: --resolution {made.resolution}: expected a divisor of {grid}, '
                         f'the grid whose numerical diffusion is part of the data')
    return made


def initial(plan, split, indices):
    """The initial states, {name: fields (B, M, M) or numbers (B,)} in float64."""
    name = plan.name.removesuffix('_c')                     # the same waves with and without c
    stream = zlib.crc32(f'{name}/{split}'.encode())
    draws = [FAMILIES[plan.name].draw(np.random.default_rng((plan.seed, stream, index)),
                                      plan.resolution * plan.stride) for index in indices]
    return {key: np.stack([fields[key] for fields in draws]) for key in draws[0]}


def simulate(plan, split, indices, device='cpu'):
    """Solve for trajectories of a split: a NumPy array (B, T, H, W, C)."""
    states = {key: torch.from_numpy(field).float().to(device)
              for key, field in initial(plan, split, indices).items()}
    solve = FAMILIES[plan.name].solve
    return solve(stride=plan.stride, frames=plan.frames, dt=plan.dt, **states).cpu().numpy()


def generate(folder, plans, device='cpu'):
    """Write those files of the plans that do not exist yet, on a CPU with batches on all cores.

    A batch of 32 trajectories, on a CPU 4, is solved together, but no more than fill 1 GB. They
    share their time steps, so that each depends on the others by the scheme's error.
    """
    def missing(plan):
        return splits_to_write(Path(folder, plan.name), plan.shapes, plan.attributes())
    cpu = torch.device(device).type == 'cpu'
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads if cpu else 1, 'solver', torch.set_num_threads, (1,))
    try:
        for plan in [*filter(missing, plans)]:                   # all are compared first
            place = Path(folder, plan.name)
            total = sum(plan.counts[split] for split in missing(plan))
            bar = Progress(total=total, unit=' trajectories', desc=plan.name)
            with files.lock(place, wait='generating'), bar:
                for split in missing(plan):                     # which no other process has made
                    N, *shape = plan.shapes[split]
                    size = min(4 if cpu else 32, max(1, 2 ** 28 // math.prod(shape)))
                    batches = [range(N)[first:first + size] for first in range(0, N, size)]
                    solutions = pool.map(partial(simulate, plan, split, device=device), batches)
                    path = place / f'{split}.h5'
                    with writer(path, (N, *shape), **plan.attributes()) as file:
                        for batch, fields in zip(batches, solutions):
                            file['data'][batch.start:batch.stop] = fields
                            bar.update(len(batch))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        torch.set_num_threads(threads)              # the initializer has set MKL's for the process


def long_reference(dataset, frames, samples, processes):
    """Make trajectories of so many frames of a data.Trajectories, on its grid.

    Returns their split, the name of a file beside that of the dataset.
    """
    frames = max(frames, 11)                                                  # `plan` refuses fewer
    space = dataset.space
    path = dataset.path.with_name(f'rollout{frames}_{configs.show(space)}_{samples}.h5')
    if len({*space}) > 1:
        raise InputError(f'--rollout: the solver makes square grids, {dataset.path} has '
                         f'{configs.show(space)}')
    if processes.rank == 0:
        if not path.exists():
            print(f'making {samples} reference trajectories of {frames} frames in {path}',
                  flush=True)
        reference = plan(dataset.name, resolution=space[0], frames=frames, dt=dataset.dt)
        reference = reference._replace(counts={path.stem: samples})
        generate(path.parent.parent, [reference], processes.device)
    distributed.barrier(processes)
    return path.stem


def builtin_tests(folder, names, device):
    """Generate the test sets `names` of a built-in mixture, if `folder` is its data/<preset>."""
    preset = Path(folder).name
    names = [name for name in names if name in configs.BUILTIN.get(preset, ())]
    if names and Path(folder) == Path('data', preset):
        print(f'generating the test sets of {", ".join(names)} in {folder}', flush=True)
        plans = [plan(name, preset) for name in names]
        plans = [each._replace(counts={'test': each.counts['test']}) for each in plans]
        generate(folder, plans, device)


def main():
    parser = terminal.Parser(description=__doc__)
    add = parser.add_argument
    add('names', nargs='+', metavar='name', help=f'all, builtin, or any of {" ".join(FAMILIES)}')
    add('--data', metavar='X', help='folder of the datasets [data, data/nano or data/mini]')
    add('--preset', default='paper', choices=('nano', 'mini', 'paper'), help='which sizes [paper]')
    for size, words in FLAGS.items():
        add(f'--{size}', type=int, metavar='X', help=words)
    add('--device', default='auto', metavar='X', help='auto, cpu, cuda, cuda:0 [auto]')
    args = parser.parse_args()
    builtin = configs.BUILTIN.get(args.preset, configs.BUILTIN['nano'])
    groups = {'all': FAMILIES, 'builtin': builtin}
    names = dict.fromkeys(name for word in args.names for name in groups.get(word, [word]))
    folder = args.data or ('data' if args.preset == 'paper' else f'data/{args.preset}')
    changes = {size: getattr(args, size) for size in FLAGS}
    plans = [plan(name, args.preset, **changes) for name in names]
    generate(folder, plans, distributed.choose_device(args.device))


if __name__ == '__main__':
    terminal.cli(main)
