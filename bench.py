"""Speed and precision, measured where it runs.

    python bench.py train                           five minutes of `tiny` at 128x128, bf16 and compiled, against fp32
    python bench.py train --size nano --resolution 64 --minutes 0.5 --no-compile           the same on a CPU
    python bench.py generate                        our Navier-Stokes solver against the benchmark's own scheme
    python bench.py loader --peer ../DPOT           training samples a second of one worker, next to DPOT's own loader
    python bench.py sinkhorn                        the forms of sinkhorn.py against its plain loop

`train` generates the built-in mixture at --resolution if it is not in --data, then runs train.py itself: a short run in
fp32 and one in bf16 with the same seed, whose losses are compared, and a long one in bf16. `generate` solves the same
trajectories with both schemes and compares both with a finely stepped reference. Every command prints a table and the
same numbers as one last line of JSON.
"""
import argparse
import contextlib
import functools
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch

import aotpot
import configs
import data
import evaluate
import generate
import train as training
from configs import InputError
from sinkhorn import sinkhorn

HERE = Path(__file__).parent


def run(script, *flags):
    """Run one of our scripts and return what it printed; its own error ends this one too."""
    process = subprocess.run([sys.executable, HERE / script, *map(str, flags)], stdout=subprocess.PIPE, text=True)
    if process.returncode:
        sys.exit(process.returncode)
    return process.stdout


def train(args, name, steps, *flags):
    """One run of train.py: its log, a list of dicts, one for every tenth step."""
    out = Path(args.out) / name
    run('train.py', '--size', args.size, '--resolution', args.resolution, '--batch_size', args.batch_size,
        '--data', args.data, '--out', out, '--device', args.device, '--log_every', 10, '--save_every', steps,
        '--steps', steps, *flags)
    return [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]


def rate(log):
    """Median samples/s after the first fifth of the log, in which compilation and warm-up fall."""
    return statistics.median(line['samples_per_s'] for line in log[len(log) // 5:])


def machine(device):
    if device != 'cpu' and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f'{torch.get_num_threads()} CPU threads, {platform.machine()}'


def listed(results):
    """Print a dict, a line an entry, and return it."""
    for name, value in results.items():
        if isinstance(value, dict):
            value = ', '.join(f'{dataset} {error:.4f}' for dataset, error in value.items())
        print(f'{name:<32}{value:.4g}' if isinstance(value, float) else f'{name:<32}{value}')
    return results


def bench_train(args):
    """bf16 against fp32: samples/s, memory, the losses of the first steps, the errors of the trained model."""
    if args.minutes <= 0 or args.short < 20:
        raise InputError('--minutes must be positive and --short at least 20')
    if not Path(args.data).exists():
        run('generate.py', 'builtin', '--resolution', args.resolution, '--train', args.trajectories, '--test', 8,
            '--data', args.data, '--device', args.device)
    fast = ['--dtype', 'bf16', '--compile' if args.compile else '--no-compile']
    full = train(args, 'fp32', args.short)
    half = train(args, 'bf16', args.short, *fast)
    gap = max(abs(b['loss'] / a['loss'] - 1) for a, b in zip(full, half))
    steps = max(args.short, math.ceil(60 * args.minutes * rate(half) / args.batch_size))
    log = train(args, 'long', steps, *fast)
    errors = {}
    for dtype in ('fp32', 'bf16'):
        path = Path(args.out) / f'{dtype}.json'
        run('evaluate.py', '--checkpoint', Path(args.out) / 'long/last.pt', '--dtype', dtype, '--json', path,
            '--device', args.device)
        scores = json.loads(path.read_text())['datasets']
        errors[dtype] = {name: score['step']['mean'] for name, score in scores.items()}
    return listed({
        'machine': machine(args.device), 'torch': str(torch.__version__), 'size': args.size,
        'parameters': aotpot.parameters(aotpot.load(Path(args.out) / 'long/last.pt')),
        'batch_size': args.batch_size, 'steps': steps, 'first_loss': log[0]['loss'], 'last_loss': log[-1]['loss'],
        'fp32_samples_per_s': rate(full), 'bf16_samples_per_s': rate(log), 'ratio': rate(log) / rate(full),
        'fp32_memory_mb': full[-1]['memory_mb'], 'bf16_memory_mb': log[-1]['memory_mb'],
        'data_wait': statistics.median(line['data_wait'] for line in log), 'skipped': log[-1]['skipped'],
        'largest_loss_difference': gap, 'one_step_fp32': errors['fp32'], 'one_step_bf16': errors['bf16']})


# ------------------------------------------------------------------------------------------------ the solver

def euler(w0, viscosity, frames, dt=1.0, forcing=0.1, tau=1e-4):
    """The scheme of the FNO files, for the equation and with the arguments and the result of generate.navier_stokes.

        (1 + tau viscosity k^2 / 2) w' = (1 - tau viscosity k^2 / 2) w + tau (f - u.grad w)

    Pseudo-spectral with full complex transforms and 2/3 de-aliasing, Crank-Nicolson for diffusion, explicit Euler for
    the rest: first order in the step tau. Written from that description (Li et al. 2021, App. A.3).
    """
    N = w0.shape[-1]
    k = torch.fft.fftfreq(N, 1 / N, device=w0.device).to(w0.dtype)
    kx, ky = 2 * math.pi * k[:, None], 2 * math.pi * k[None, :]
    k2 = kx ** 2 + ky ** 2
    kept = (k[:, None].abs() <= N / 3) & (k[None, :].abs() <= N / 3)
    x = torch.arange(N, device=w0.device).to(w0.dtype) / N
    phase = 2 * math.pi * (x[:, None] + x[None, :])
    f, w, out = torch.fft.fft2(forcing * (phase.sin() + phase.cos())), torch.fft.fft2(w0), []
    steps = math.ceil(dt / tau - 1e-9)
    decay = dt / steps * viscosity * k2 / 2
    for _ in range(frames):
        for _ in range(steps):
            psi = w / k2.clamp(min=1)
            u, v, wx, wy = (torch.fft.ifft2(1j * field).real for field in (ky * psi, -kx * psi, kx * w, ky * w))
            advection = kept * torch.fft.fft2(u * wx + v * wy)
            w = ((1 - decay) * w + dt / steps * (f - advection)) / (1 + decay)
        out.append(torch.fft.ifft2(w).real)
    return torch.stack(out, dim=1)


def timed(device, solve, *args, **kwargs):
    """A solver's frames and its seconds: of one CPU core its own time, whatever else runs there; else of the clock."""
    cpu = torch.device(device).type == 'cpu'
    clock = time.process_time if cpu and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    frames = solve(*args, **kwargs)
    if not cpu:
        torch.cuda.synchronize()
    return frames, clock() - start


def bench_generate(args):
    """Seconds a trajectory and error of our Navier-Stokes solver and of the benchmark's own scheme, on the same core.

    Both in fp32 from the same starts on the same grid. Errors: L2RE of the frames up to --units against our solver in
    fp64 with 4 steps a grid point and unit of time. Ours is timed over whole trajectories, the median of three; the
    other over --units only, and the rest extrapolated: all its steps cost the same.
    """
    configs.at_least(1, trajectories=args.trajectories, units=args.units, threads=args.threads)
    if not args.step > 0:
        raise InputError(f'--step {args.step} must be positive')
    torch.set_num_threads(args.threads)
    device = args.device if args.device != 'auto' else 'cuda' if torch.cuda.is_available() else 'cpu'
    plan, viscosity = generate.plan(args.family), float(args.family.split('_')[-1])
    w0 = torch.from_numpy(generate.initial(plan, 'train', range(args.trajectories))['w0']).to(device)
    reference = generate.navier_stokes(w0, viscosity, args.units, plan.dt, steps=4 * w0.shape[-1])
    w0, score = w0.float(), lambda frames: ((frames - reference).flatten(1).norm(dim=1)
                                            / reference.flatten(1).norm(dim=1)).mean().item()
    error = score(generate.navier_stokes(w0, viscosity, args.units, plan.dt))
    ours = statistics.median(timed(device, generate.navier_stokes, w0, viscosity, plan.frames, plan.dt)[1]
                             for _ in range(3)) / len(w0)
    frames, seconds = timed(device, euler, w0, viscosity, args.units, plan.dt, tau=args.step)
    theirs = seconds / len(w0) / args.units * plan.frames
    count = sum(plan.counts.values())
    return listed({
        'machine': machine(device), 'torch': str(torch.__version__), 'family': args.family,
        'grid': w0.shape[-1], 'trajectories': len(w0), 'frames': plan.frames, 'units_compared': args.units,
        'error': error, 'benchmark_error': score(frames), 'seconds_per_trajectory': ours,
        'benchmark_seconds_extrapolated': theirs, 'ratio': theirs / ours,
        'paper_trajectories': count, 'paper_minutes': count * ours / 60,
        'benchmark_paper_hours': count * theirs / 3600})


# ------------------------------------------------------------------------------------------------ the loader

STORAGE = {'contiguous': {}, 'chunks of 1 frame': dict(chunks=1), 'chunks of 11 frames': dict(chunks=11),
           'chunks of 1 frame, lzf': dict(chunks=1, compression='lzf', shuffle=True)}


def smooth(N, T, H, C):
    """Sums of eight random travelling waves, (N, T, H, H, C) float32: files with bytes like those of a solver."""
    random, x = np.random.default_rng(0), np.arange(H, dtype=np.float32) / H
    values = np.zeros((N, T, H, H, C), np.float32)
    for k in range(1, 9):
        shift, slope = random.random((2, N, 1, 1, 1, C), np.float32)
        t = np.arange(T, dtype=np.float32).reshape(-1, 1, 1, 1) / T
        values += np.sin(6.2831855 * k * (x[:, None, None] + slope * x[:, None] + shift * (1 + t))) / k
    return values


def stored(folder, name, values, chunks=None, **options):
    """values -> folder/name/train.h5, with chunks of so many frames."""
    (folder / name).mkdir(parents=True)
    with h5py.File(folder / name / 'train.h5', 'w') as file:
        shape = (1, min(chunks, values.shape[1]), *values.shape[2:]) if chunks else None
        file.create_dataset('data', data=values, chunks=shape, **options)


def stored_for_peer(folder, name, values):
    """The same as DPOT stores it, (H, W, T, C): one file a trajectory, FNO's and CFDBench's all in one."""
    values = values.transpose(0, 2, 3, 1, 4)
    (folder / name).mkdir(parents=True)
    if name == 'cfdbench' or 'fno' in name:
        with h5py.File(folder / name / 'train.hdf5', 'w') as file:
            file['data'] = values[..., 0] if 'fno' in name else values
        return folder / name / 'train.hdf5'
    for i, trajectory in enumerate(values):
        with h5py.File(folder / name / f'data_{i}.hdf5', 'w') as file:
            file['data'] = trajectory
    return folder / name


def samples_per_s(runs, repeats):
    """Of every function in `runs`, called in turn with 0..repeats-1 for 20 samples each: (repeats, runs).

    In CPU time of this process, which other processes disturb little; nothing waits for a disk here.
    """
    seconds = np.zeros((repeats + 1, len(runs)))
    for i, j in np.ndindex(*seconds.shape):
        start = time.process_time()
        runs[j](max(i - 1, 0))                              # the first round warms up
        seconds[i, j] = time.process_time() - start
    return 20 / seconds[1:]


def compare(sets, config, repeats, peer=None):
    """Medians of one mixture of data.Trajectories, a dict; peer: DPOT's module, whose loader gets the same draws."""
    windows, parts = data.Windows(sets, config.frames, seed=0), [range(20 * i, 20 * i + 20) for i in range(repeats)]
    runs = [lambda i: windows[parts[i]], lambda i: training.inputs(windows[parts[i]], sets, config, 0)]
    if peer:
        theirs = peer.MixedTemporalDataset([item.name for item in sets], n_channels=config.channels)
        first = [0, *theirs.cumulative_sizes]
        runs.append(lambda i: torch.utils.data.default_collate(
            [theirs[first[k] + trajectory] for k, trajectory, *_ in map(windows.draw, parts[i])]))
    rates = samples_per_s(runs, repeats)
    drawn = [sets[windows.draw(n)[0]].shape for part in parts for n in part]
    used, whole = (np.mean([4e-6 * math.prod(shape[2:]) * (frames or shape[1]) for shape in drawn])
                   for frames in (config.frames + 1, None))
    row = dict(zip(('ours', 'model', 'peer'), np.median(rates, axis=0)))
    row['ours_mb'] = row['ours'] * used               # and no more is read
    if peer:
        ratios = np.median(rates[:, :2] / rates[:, 2:], axis=0)
        row.update(peer_mb=row['peer'] * used, peer_read_mb=row['peer'] * whole, ratio=ratios[0],
                   model_ratio=ratios[1])
    return {key: float(value) for key, value in row.items()}


def bench_loader(args):
    """Training samples/s of one worker (this process, one thread) from files in the page cache, in batches of 20.

    ours: windows of T + 1 frames as a worker delivers them. model: the same, then resized to 128 x 128 and padded to 4
    channels as the training step does, here on the same core. --peer: DPOT's loader on the same fields, which delivers
    that. mb: MB/s of windows, read_mb: MB/s taken from the files. Medians of alternating rounds.
    """
    configs.at_least(1, trajectories=args.trajectories, repeats=args.repeats)
    for name in args.datasets:
        if name not in configs.PRETRAINING:
            raise InputError(f'--datasets {name}{configs.nearest(name, configs.PRETRAINING)}')
    peer, config, rows = None, configs.model('tiny'), {}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.data or None) as folder:
        folder = Path(folder).absolute()
        if args.peer:
            sys.path.insert(0, str(Path(args.peer).absolute()))
            try:
                with contextlib.chdir(folder):              # its import writes a file
                    from utils import griddataset as peer
            except ImportError as error:
                raise InputError(f'--peer {args.peer}: {error}') from None

        def opened(kind, name):
            return data.Trajectories(folder / kind, name, 'train', config.frames, config.channels)

        for name in args.datasets:
            source = configs.PRETRAINING[name]
            values = smooth(args.trajectories, source.frames, source.resolution, len(source.channels))
            stored(folder / 'ours', name, values)
            if peer:
                peer.DATASET_DICT[name].update(train_path=str(stored_for_peer(folder / 'peer', name, values)),
                                               train_size=args.trajectories)
        sets = [opened('ours', name) for name in args.datasets]
        for item in sets:
            rows[item.name] = compare([item], config, args.repeats, peer)
        rows['mixture'] = compare(sets, config, args.repeats, peer)

        largest = max(sets, key=lambda item: math.prod(item.shape[2:]))
        values = np.stack([largest.read(i, 0, largest.frames) for i in range(largest.count)])
        kinds = {}
        for kind, options in STORAGE.items():
            stored(folder / kind, largest.name, values, **options)
            kinds[kind] = opened(kind, largest.name)
        for where in ('ram', 'device'):
            kinds[f'--cache {where}'] = opened('ours', largest.name)
            data.cache([kinds[f'--cache {where}']], where, evaluate.Processes(0, 1, torch.device('cpu')))
        drawn = [data.Windows([item], config.frames, seed=0) for item in kinds.values()]
        rates = samples_per_s([lambda i, w=w: w[range(20 * i, 20 * i + 20)] for w in drawn], args.repeats)
        storage = dict(zip(kinds, np.median(rates, axis=0).tolist()))

    columns = list(rows['mixture'])
    print(f'{"samples/s":<34}' + ''.join(f'{column:>13}' for column in columns))
    for name, row in rows.items():
        print(f'{name:<34}' + ''.join(f'{row[column]:>13.1f}' for column in columns))
    for kind, value in storage.items():
        print(f'{largest.name}, {kind:<26}{value:>10.1f} samples/s')
    return {'machine': machine('cpu'), 'torch': str(torch.__version__), 'loader': rows, 'storage': storage}


# ------------------------------------------------------------------------------------------------ Sinkhorn

def seconds(device, call):
    """Of one call; on a device between events, the launches of all its kernels included."""
    if device == 'cpu':
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def launches(call):
    """Kernels that one call launches on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def bench_sinkhorn(args):
    """Microseconds of Sinkhorn's forms, forward and forward + backward, for logits ~ N(0, --sigma^2) in fp32.

    loop: the plain ten lines; auto: what the network calls on this device. --peer: a checkout of lucidrains'
    hyper-connections (needs einops), its sinkhorn_knopps. Medians of alternating rounds, ratio: loop / form.
    """
    configs.at_least(1, batch=args.batch, iters=args.iters, repeats=args.repeats, threads=args.threads)
    configs.at_least(1, n=min(args.n))
    torch.set_num_threads(args.threads)
    device = args.device if args.device != 'auto' else 'cuda' if torch.cuda.is_available() else 'cpu'
    forms = {form: functools.partial(sinkhorn, iters=args.iters, check=False, impl=impl)
             for form, impl in (('loop', 'torch'), ('auto', 'auto'))}
    if args.peer:
        sys.path.insert(0, str(Path(args.peer).absolute()))
        try:
            from hyper_connections.mHCv2 import sinkhorn_knopps
        except ImportError as error:
            raise InputError(f'--peer {args.peer}: {error}') from None
        forms['peer'] = functools.partial(sinkhorn_knopps, iters=args.iters)
    rows = {}
    for n in args.n:
        z = (args.sigma * torch.randn(2, args.batch, n, n, generator=torch.Generator().manual_seed(0))).to(device)
        leaf, upstream = z[0].clone().requires_grad_(), z[1]
        for name, of in (('forward', lambda form: lambda: form(z[0])),
                         ('both', lambda form: lambda: torch.autograd.grad(form(leaf), leaf, upstream))):
            calls = {form: of(call) for form, call in forms.items()}
            times = np.array([[seconds(device, call) for call in calls.values()] for _ in range(args.repeats + 3)])[3:]
            row = {form: 1e6 * value for form, value in zip(forms, np.median(times, axis=0).tolist())}
            ratios = np.median(times[:, :1] / times, axis=0).tolist()
            row |= {f'{form}_ratio': ratio for form, ratio in zip(forms, ratios) if form != 'loop'}
            if device != 'cpu':
                row |= {f'{form}_launches': launches(call) for form, call in calls.items()}
            rows[f'n = {n}, {name}'] = row
    columns = list(row)
    print(f'{"microseconds":<20}' + ''.join(f'{column:>15}' for column in columns))
    for name, row in rows.items():
        print(f'{name:<20}' + ''.join(f'{row[column]:>15.4g}' for column in columns))
    if not args.peer:
        print('peer: not measured; give a checkout of hyper-connections with --peer')
    return {'machine': machine(device), 'torch': str(torch.__version__), 'batch': args.batch, 'iters': args.iters,
            'sigma': args.sigma, 'sinkhorn': rows}


def main():
    parser = configs.Parser(description=__doc__)
    commands = parser.add_subparsers(dest='command', required=True, parser_class=configs.Parser)
    command = commands.add_parser('train', help=bench_train.__doc__, description=bench_train.__doc__)
    command.set_defaults(bench=bench_train)
    command.add_argument('--size', default='tiny', choices=list(configs.SIZES), help='preset [tiny]')
    command.add_argument('--resolution', default='128', help='of the data and the model [128]')
    command.add_argument('--batch_size', type=int, default=20, help="[20, the paper's on each of 8 GPUs]")
    command.add_argument('--minutes', type=float, default=5, help='of the long run [5]')
    command.add_argument('--short', type=int, default=100, help='steps of the two runs that are compared [100]')
    command.add_argument('--trajectories', type=int, default=32, help='to generate of each dataset [32]')
    command.add_argument('--compile', action=argparse.BooleanOptionalAction, default=True, help='[on]')
    command.add_argument('--data', default='data/bench', help='[data/bench]')
    command.add_argument('--out', default='out/bench', help='[out/bench]')
    command.add_argument('--device', default='auto', help='[auto]')
    command = commands.add_parser('generate', help=bench_generate.__doc__.split('\n')[0],
                                  description=bench_generate.__doc__)
    command.set_defaults(bench=bench_generate)
    families = [name for name in generate.FAMILIES if name.startswith('ns2d_fno')]
    command.add_argument('--family', default=families[0], choices=families, help=f'[{families[0]}]')
    command.add_argument('--trajectories', type=int, default=4, help='solved at once by both [4]')
    command.add_argument('--units', type=int, default=2, help='of time, compared with the reference [2]')
    command.add_argument('--step', type=float, default=1e-4, help="the benchmark's time step [1e-4]")
    command.add_argument('--threads', type=int, default=1, help='CPU threads [1]')
    command.add_argument('--device', default='auto', help='[auto]')
    command.add_argument('--json', default='', metavar='FILE', help='write the last line to a file too')
    command = commands.add_parser('loader', help=bench_loader.__doc__.splitlines()[0], description=bench_loader.__doc__)
    command.set_defaults(bench=bench_loader)
    command.add_argument('--peer', default='', metavar='DIR', help='a checkout of DPOT to compare with')
    command.add_argument('--datasets', nargs='+', default=list(configs.PRETRAINING), help="[the paper's twelve]")
    command.add_argument('--trajectories', type=int, default=4, metavar='N', help='in each file [4]')
    command.add_argument('--repeats', type=int, default=9, metavar='N', help='rounds of 20 samples [9]')
    command.add_argument('--data', default='', metavar='DIR', help="for the temporary files, 0.7 GB [the system's]")
    command.add_argument('--json', default='', metavar='FILE', help='write the last line to a file too')
    command = commands.add_parser('sinkhorn', help=bench_sinkhorn.__doc__.splitlines()[0],
                                  description=bench_sinkhorn.__doc__)
    command.set_defaults(bench=bench_sinkhorn)
    command.add_argument('--batch', type=int, default=1024, help='matrices [1024]')
    command.add_argument('--n', type=int, nargs='+', default=[4, 16], help='streams [4 16]')
    command.add_argument('--iters', type=int, default=20, help='rounds [20]')
    command.add_argument('--sigma', type=float, default=1., help='of the logits [1]')
    command.add_argument('--repeats', type=int, default=15, metavar='N', help='alternating rounds [15]')
    command.add_argument('--threads', type=int, default=1, help='CPU threads [1]')
    command.add_argument('--peer', default='', metavar='DIR', help='a checkout of hyper-connections to compare with')
    command.add_argument('--device', default='auto', help='[auto]')
    command.add_argument('--json', default='', metavar='FILE', help='write the last line to a file too')
    args = parser.parse_args()
    results = args.bench(args)
    if getattr(args, 'json', ''):
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(results))
    print(json.dumps(results))


if __name__ == '__main__':
    configs.cli(main)
