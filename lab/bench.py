"""Speed and precision, measured on the machine where it runs.

    python -m lab.bench step --peer ../DPOT     train step and forward pass of `tiny`, beside plain and DPOT's code
    python -m lab.bench step --size moe-tiny --peer ../MoE-POT              the same with experts, beside MoE-POT's code
    python -m lab.bench step --peer ../DPOT --dtype fp32 --no-compile       the same on a GPU as DPOT's code runs there
    python -m lab.bench memory --peer ../DPOT   peak memory of a train step
    python -m lab.bench latency --peer ../DPOT  single steps as the paper times them, eager and compiled
    python -m lab.bench rollout                 500 steps of batch 64 against 500 forward passes
    python -m lab.bench busy                    training beside other processes, by the bound on OpenMP's spinning
    python -m lab.bench generate                our Navier-Stokes solver against the benchmark's own scheme
    python -m lab.bench loader --peer ../DPOT   training samples a second of one worker, beside DPOT's own loader
    python -m lab.bench sinkhorn                the forms of sinkhorn.py against its plain loop
    python -m lab.bench gpu --json gpu.json     all that a page about a GPU needs, in eight minutes

Every command prints tables and, as one last line of JSON, its flags and the same numbers. --peer is a checkout of
github.com/HaoZhongkai/DPOT, for sizes with experts of github.com/haiyangxin/MoEPOT; their networks need einops.
"""
import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import configs
from configs import InputError

import h5py
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import data
import evaluate
import nets
import train as training
from lab import reproduce
from nets import experts
from runtime import distributed, terminal
from sinkhorn import sinkhorn
from sources import generate
from sources.pdes.navier_stokes import FAMILIES, navier_stokes


def machine(device):
    """A description of the GPU, or of the CPU if `device` is 'cpu' or there is no GPU."""
    if device != 'cpu' and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f'{torch.get_num_threads()} CPU threads, {platform.machine()}'


def peer_module(checkout, name):
    """Import the module `name` of another project's checkout. Raises InputError if it cannot be imported."""
    sys.path.insert(0, str(Path(checkout).absolute()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f'--peer {checkout}: {error}; see --help for the checkout that it takes') from None
    finally:
        sys.path.pop(0)


# ------------------------------------------------------------------------------------------------ time

def paired(runs, repeats, device, inner=1, warmup=None):
    """Call the functions in the dict `runs` in turn, `warmup` rounds and then `repeats`: {name: seconds (repeats,)}.

    On a GPU they are timed by events, with `inner` calls between two events and nothing in flight before the first. On
    a CPU it is the clock or, with one thread, this process's CPU time, which other processes disturb little.
    """
    cuda = device.type == 'cuda'
    if warmup is None:
        warmup = 3 if cuda else 1                                   # a CUDA graph is recorded at the second call
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = {name: [] for name in runs}
    for _ in range(warmup + repeats):
        for name, call in runs.items():
            if cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize(device)
                start.record()
                for _ in range(inner):
                    call()
                end.record()
                end.synchronize()
                seconds[name].append(start.elapsed_time(end) / 1000 / inner)
            else:
                start = clock()
                call()
                seconds[name].append(clock() - start)
    return {name: np.array(values[warmup:]) for name, values in seconds.items()}


PEERS = {'dpot': 'DPOT', 'moepot': 'MoE-POT'}                       # names of the networks of other projects


def ratios(values, unit='ms', scale=1000):
    """Of {name: values of each round}: medians in `unit`, and of the rounds' ratios to plain and to a peer's code."""
    rows = {}
    for name, own in values.items():
        plain = 'plain' if name in PEERS else name.replace('aot', 'plain')
        rows[name] = {unit: scale * np.median(own), 'of plain': np.median(own / values[plain])}
        for peer in PEERS.keys() & values.keys():
            rows[name][f'of {PEERS[peer]}'] = np.median(own / values[peer])
    return rows


# ------------------------------------------------------------------------------------------------ the network

def prepare(args):
    """(config, device, names of the networks) of the flags; the defaults that depend on the machine are filled in.

    Raises InputError if a flag is wrong or the peer cannot be imported.
    """
    config = configs.model(args.size, **({'resolution': args.resolution} if args.resolution else {}))
    peer = 'moepot' if config.experts else 'dpot'
    if args.peer:
        peer_module(args.peer, f'models.{peer}')                    # an error here comes before any measurement
        if len(set(config.resolution)) > 1:
            raise InputError(f'--peer: {PEERS[peer]} takes square grids; --resolution is '
                             f'{configs.show(config.resolution)}')
    torch.set_num_threads(args.threads or torch.get_num_threads())
    device = distributed.setup(args.device).device
    cuda = device.type == 'cuda'
    args.threads, args.resolution = torch.get_num_threads(), configs.show(config.resolution)
    args.batch_size = args.batch_size or (20 if cuda else 8)
    args.dtype = args.dtype or ('bf16' if cuda else 'fp32')
    args.compile = cuda if args.compile is None else args.compile
    return config, device, ['aot', 'plain'] + [peer] * bool(args.peer)


def network(name, args, config, device):
    """(module, random input) of our network with residual 'aot' or 'plain', or of a peer's code, of the same sizes."""
    torch.manual_seed(0)
    B, T, C = args.batch_size, config.frames, config.channels
    u = torch.randn(B, T, *config.resolution, C, device=device)
    if name not in PEERS:
        return nets.build(dataclasses.replace(config, residual=name), args.form).to(device), u
    peer = getattr(peer_module(args.peer, f'models.{name}'), {'dpot': 'DPOTNet', 'moepot': 'MoEPOTNet'}[name])(
        img_size=config.resolution[0], patch_size=config.patch, mixing_type='afno', in_channels=C, out_channels=C,
        in_timesteps=T, out_timesteps=1, n_blocks=config.heads, embed_dim=config.width, out_layer_dim=config.out_width,
        depth=config.depth, modes=config.modes, mlp_ratio=config.mlp / config.width, n_cls=12, normalize=False,
        act='gelu', time_agg='exp_mlp')
    return peer.to(device), u.permute(0, 2, 3, 1, 4).contiguous()


def passes(name, args, config, device, mode='default'):
    """{'forward': a forward pass without gradients, 'train step': forward and backward}, functions without arguments.

    Ours run in --dtype and, with --compile, compiled; a peer's code runs as its authors run it, eager in fp32.
    """
    module, u = network(name, args, config, device)
    ours = name not in PEERS
    if ours:
        module.one_backward = True                                  # as train.py sets it
        if args.compile:
            module.compile(mode=mode)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=ours and args.dtype == 'bf16')

    def forward():
        if module.training:
            module.eval()
        with torch.no_grad(), autocast:
            module(u)

    def step():
        if not module.training:
            module.train()
        module.zero_grad()
        with autocast:
            prediction = module(u)
        loss = (prediction if ours else prediction[0]).float().square().mean()
        if config.experts:                                              # the balance loss
            loss = loss + (experts.balance_loss(experts.shares(module), len(u)) if ours else prediction[2])
        loss.backward()
    return {'forward': forward, 'train step': step}


def flops(call):
    """Floating-point operations of one more call, in eager mode, as torch.utils.flop_counter counts them.

    It counts matrix products and convolutions, 2 for every multiplication, but no FFTs: they are in DPOT's code and in
    --form paper.
    """
    with torch.compiler.set_stance('force_eager'), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


PEAKS = {'NVIDIA H100 80GB HBM3': 989e12, 'NVIDIA H200': 989e12}        # FLOP/s of the SXM, from NVIDIA's data sheets


def peak_flops(args, device):
    """(FLOP/s that the machine can do, where this number is from): --peak_tflops, else PEAKS, else measured here."""
    if args.peak_tflops:
        return 1e12 * args.peak_tflops, 'as given'
    if machine(device.type) in PEAKS:
        return PEAKS[machine(device.type)], 'data sheet, bf16, dense'
    a = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16 if args.dtype == 'bf16' else None)
    seconds = paired({'product': lambda: a @ a}, 3, device)['product']
    return float(2 * 2048 ** 3 / seconds.min()), 'reached by one large product'


def with_work(runs, seconds, args, peak):
    """`ratios` of the `seconds` of `runs`, with samples/s, GFLOP and the share of the peak in FLOP/s (MFU)."""
    rows = ratios(seconds)
    for name, row in rows.items():
        work = flops(runs[name])
        row.update({'samples/s': 1000 * args.batch_size / row['ms'], 'GFLOP': work / 1e9,
                    'of peak': 1000 * work / row['ms'] / peak})
    return rows


def bench_step(args):
    """Forward pass and train step of AOT, of our plain network and of a peer's code of the same sizes, in alternation.

    A train step is the forward and backward pass of a mean square, with experts also of their balance loss, and without
    an optimizer. Ratios are medians of the ratios of single rounds. GFLOP: matrix products and convolutions, but no
    FFTs. of peak: MFU, the share of the FLOP/s that the machine can do.
    """
    config, device, names = prepare(args)
    peak, rows = peak_flops(args, device), {}
    functions = {name: passes(name, args, config, device) for name in names}
    for kind in ('forward', 'train step'):
        runs = {name: function[kind] for name, function in functions.items()}
        rows[kind] = with_work(runs, paired(runs, args.repeats, device, inner=10), args, peak[0])
    return {'peak': peak, **rows}


def first_steps(name, args, config, device, started):
    """In a new process: the peak memory of a train step, and the seconds from `started` to the end of the first one."""
    torch.set_num_threads(args.threads)
    cuda = device.type == 'cuda'
    args.compile = args.compile and cuda                            # on a CPU the compiler's own memory would count
    if cuda:
        torch.cuda.set_device(device)
    step = passes(name, args, config, device)['train step']
    before = 0 if cuda else distributed.memory_mb(device)           # of a process that has only built the network
    step()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)                  # compiling is over
    first = time.time() - started
    step()
    return {'MB': distributed.memory_mb(device) - before, 'first step s': first}


def bench_memory(args):
    """Peak memory of a train step of AOT, of our plain network and of a peer's code, each in a process of its own.

    On a GPU it is all that is allocated at once, with weights and gradients. On a CPU it is the resident memory above
    that of the process after it built the network, and ours is eager. Medians of --repeats. first step: seconds from
    the start of the process, imports included, to the end of its first train step.
    """
    config, device, names = prepare(args)
    found = {name: [] for name in names}
    for name in names * args.repeats:
        with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
            found[name].append(pool.submit(first_steps, name, args, config, device, time.time()).result())
    rows = ratios({name: np.array([run['MB'] for run in runs]) for name, runs in found.items()}, 'MB', 1)
    for name, runs in found.items():
        rows[name]['first step s'] = np.median([run['first step s'] for run in runs])
    return {'memory': rows}


def bench_latency(args):
    """Milliseconds of a single step at batch 1, eager and, with --compile, compiled: a CUDA graph on a GPU.

    The protocol is the paper's (App. C.12): the mean over 1200 forward passes after 50 of warm-up,
    each timed once the one before is over, on a GPU by events; but the input is random numbers and the networks take
    turns. Beside the mean stand the paper's on an H200 and our median (ms).
    """
    config, device, names = prepare(args)
    peak, runs, compiled = peak_flops(args, device), {}, args.compile
    for args.compile in (False, True)[:1 + compiled]:
        for name in names[:2] if args.compile else names:
            runs[name + ' compiled' * args.compile] = passes(name, args, config, device, 'reduce-overhead')['forward']
    seconds = paired(runs, args.repeats, device, warmup=50)
    rows, paper = with_work(runs, seconds, args, peak[0]), reproduce.paper('timing', args.size)
    for name, row in rows.items():
        row['mean ms'] = 1000 * seconds[name].mean()
        if paper:
            ms = paper['AOT-POT' if name.startswith('aot') else 'DPOT']['ms']
            row.update({'paper ms': ms, 'of paper': row['mean ms'] / ms})
    return {'peak': peak, 'latency': rows}


def bench_rollout(args):
    """A rollout of --steps against as many forward passes of the same batch, with the state always on the device.

    The steps are those of evaluate.py. On a GPU PyTorch warns if one of them waits for the device.
    """
    config, device, _ = prepare(args)
    module, u = network('aot', args, config, device)
    module.eval()
    predictor = evaluate.Predictor(torch.compile(module) if args.compile else module,
                                   SimpleNamespace(evolving=list(range(config.channels))), device, args.dtype)

    def forward(state):
        with predictor.autocast:                # entered in every step, as in a rollout: it caches the cast weights
            predictor.model(u)

    @torch.no_grad()
    def repeat(step, state=u):
        for _ in range(args.steps):
            state = step(state)

    runs = {'rollout': lambda: repeat(predictor.step), 'forward': lambda: repeat(forward)}
    if device.type == 'cuda':
        runs['rollout']()                                           # compiling may wait for the device
        torch.cuda.set_sync_debug_mode('warn')
        runs['rollout']()
        torch.cuda.set_sync_debug_mode('default')
    seconds = paired(runs, args.repeats, device)
    return {'one step': {name: {'ms': 1000 * np.median(own) / args.steps,
                                'of forward': np.median(own / seconds['forward'])} for name, own in seconds.items()}}


# ------------------------------------------------------------------------------------------------ a busy machine

def train_seconds(steps, threads):
    """In a new process: the seconds of so many training steps of `nano` at batch 8 on a CPU, after three of warm-up."""
    torch.set_num_threads(threads)
    config = configs.model('nano')
    model, u = nets.build(config), torch.randn(8, config.frames, *config.resolution, config.channels)
    model.one_backward, optimizer = True, torch.optim.AdamW(model.parameters(), fused=True)
    times = []
    for _ in range(3 + steps):
        times.append(time.perf_counter())
        optimizer.zero_grad()
        model(u).square().mean().backward()
        optimizer.step()
    return time.perf_counter() - times[3]


def bench_busy(args):
    """Seconds of training steps of `nano` on an idle machine and beside other processes, by the bound on spinning.

    OpenMP's threads spin up to GOMP_SPINCOUNT rounds while they wait for one another, 300000 by default; 0 leaves the
    choice to configs.py. The runs, each in a process of its own, take turns: one alone, one beside --others processes
    that are always busy. Ratios are medians over the rounds, to the first of --spins.
    """
    seconds = {}
    for _, others, spins in itertools.product(range(args.repeats), (0, args.others), args.spins):
        os.environ.pop('GOMP_SPINCOUNT', None)
        if spins:
            os.environ['GOMP_SPINCOUNT'] = str(spins)
        load = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(others)]
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
                found = pool.submit(train_seconds, args.steps, args.threads or torch.get_num_threads()).result()
        finally:
            for process in load:
                process.kill()
                process.wait()
        seconds.setdefault((others, spins), []).append(found)
    seconds = {run: np.array(values) for run, values in seconds.items()}
    rows = {}
    for spins in args.spins:
        rows[f'GOMP_SPINCOUNT {spins or "of configs.py"}'] = row = {}
        for others, name in ((0, 'idle'), (args.others, 'busy')):
            own, first = seconds[others, spins], seconds[others, args.spins[0]]
            row.update({f'{name}, s': np.median(own), f'{name}, of the first': np.median(own / first)})
    return {'training steps': rows}


# ------------------------------------------------------------------------------------------------ the solver

def euler(w0, viscosity, frames, dt=1.0, forcing=0.1, tau=1e-4):
    """The scheme behind the FNO files, for the equation, the arguments and the result of pdes.navier_stokes.

        (1 + tau viscosity k^2 / 2) w' = (1 - tau viscosity k^2 / 2) w + tau (f - u.grad w)

    Pseudo-spectral with full complex transforms and 2/3 de-aliasing, Crank-Nicolson for diffusion and explicit Euler
    for the rest, so of first order in the step tau. Written from that description (Li et al. 2021, App. A.3).
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


def bench_generate(args):
    """Seconds a trajectory and error of our Navier-Stokes solver and of the benchmark's own scheme, on the same core.

    Both run in fp32 from the same initial states on the same grid. Errors are the L2RE of the frames up to --units
    against our solver in fp64 with 4 steps a grid point and unit of time. Ours is timed over whole trajectories, the
    median of three; the other over --units only and extrapolated, since all its steps cost the same.
    """
    torch.set_num_threads(args.threads)
    device, plan = distributed.setup(args.device).device, generate.plan(args.family)
    w0 = torch.from_numpy(generate.initial(plan, 'train', range(args.trajectories))['w0']).to(device)
    ours = functools.partial(navier_stokes, viscosity=float(args.family.split('_')[-1]), dt=plan.dt)
    theirs = functools.partial(euler, **ours.keywords, tau=args.step)
    reference = ours(w0, frames=args.units, steps=4 * w0.shape[-1]).flatten(1)
    w0 = w0.float()
    error, benchmark_error = (
        ((solve(w0, frames=args.units).flatten(1) - reference).norm(dim=1) / reference.norm(dim=1)).mean().item()
        for solve in (ours, theirs))
    seconds = np.median(paired({'': lambda: ours(w0, frames=plan.frames)}, 3, device, warmup=0)['']) / len(w0)
    part = paired({'': lambda: theirs(w0, frames=args.units)}, 1, device, warmup=0)[''].item() / len(w0)
    benchmark_seconds, count = part / args.units * plan.frames, sum(plan.counts.values())
    return {
        'grid': w0.shape[-1], 'frames': plan.frames, 'error': error, 'benchmark_error': benchmark_error,
        'seconds_per_trajectory': seconds, 'benchmark_seconds_extrapolated': benchmark_seconds,
        'ratio': benchmark_seconds / seconds, 'paper_trajectories': count, 'paper_minutes': count * seconds / 60,
        'benchmark_paper_hours': count * benchmark_seconds / 3600}


def write_for_peer(folder, name, values):
    """Write values (N, T, H, W, C) as DPOT stores them, (H, W, T, C), and return the path that it takes."""
    values, folder = values.transpose(0, 2, 3, 1, 4), folder / name
    if name == 'cfdbench' or 'fno' in name:                         # one file
        path, files = folder / 'train.hdf5', {'train': values[..., 0] if 'fno' in name else values}
    else:                                                           # one file for every trajectory
        path, files = folder, {f'data_{i}': trajectory for i, trajectory in enumerate(values)}
    folder.mkdir(parents=True, exist_ok=True)
    for stem, array in files.items():
        with h5py.File(folder / f'{stem}.hdf5', 'w') as file:
            file['data'] = array
    return path


def bench_loader(args):
    """Training samples/s of one worker (this process, one thread) from files in the page cache, in batches of 20.

    ours: windows of T + 1 frames, as a worker delivers them. model: the same, then resized to 128 x 128 and padded to 4
    channels as in a training step, here on the same core. --peer: DPOT's loader on the same fields, which delivers
    that. ratio, model_ratio: ours and model over DPOT's. Medians of alternating rounds, in CPU time.
    """
    peer, config, rows = None, configs.model('tiny'), {}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.data or None) as folder:
        folder = Path(folder).absolute()
        if args.peer:
            checkout = Path(args.peer).absolute()
            with contextlib.chdir(folder):                  # importing it writes a file
                peer = peer_module(checkout, 'utils.griddataset')
        for name in args.datasets:
            source = configs.PRETRAINING[name]
            shape = args.trajectories, source.frames, source.resolution, source.resolution, len(source.channels)
            values = np.random.default_rng(0).standard_normal(shape, np.float32)
            data.write(folder / 'ours' / name, values, values[:1])
            if peer:
                path = write_for_peer(folder / 'peer', name, values)
                peer.DATASET_DICT[name].update(train_path=str(path), train_size=args.trajectories)
        sets = [data.Trajectories(folder / 'ours', name, 'train', config.frames, config.channels)
                for name in args.datasets]
        for mixture in (*([item] for item in sets), sets):
            windows = data.Windows(mixture, config.frames, seed=0)
            runs = {'ours': lambda batch: windows[batch],
                    'model': lambda batch: training.inputs(windows[batch], mixture, config, 0)}
            if peer:
                theirs = peer.MixedTemporalDataset([item.name for item in mixture], n_channels=config.channels)
                first = [0, *theirs.cumulative_sizes]
                runs['peer'] = lambda batch: torch.utils.data.default_collate(
                    [theirs[first[k] + trajectory] for k, trajectory, *_ in map(windows.draw, batch)])
            batches = [range(20 * i, 20 * i + 20) for i in range(1 + args.repeats)]
            calls = {name: map(call, batches).__next__ for name, call in runs.items()}
            seconds = paired(calls, args.repeats, torch.device('cpu'), warmup=1)
            row = {name: np.median(20 / own) for name, own in seconds.items()}
            if peer:
                row.update(ratio=np.median(seconds['peer'] / seconds['ours']),
                           model_ratio=np.median(seconds['peer'] / seconds['model']))
            rows['mixture' if mixture is sets else mixture[0].name] = row
    return {'samples/s': rows}


def launches(call):
    """(number of kernels that one call launches on a GPU, microseconds for which they run)"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(found), sum(event.time_range.elapsed_us() for event in found)


def bench_sinkhorn(args):
    """Microseconds of Sinkhorn's forms, forward and forward + backward, for logits ~ N(0, --sigma^2) in fp32.

    loop: the plain loop. auto: what the network calls on this device. --peer: sinkhorn_knopps of a checkout of
    lucidrains' hyper-connections (needs einops and torch-einops-utils). Medians of alternating rounds; ratio: loop /
    form. On a GPU the times are between events, launches included; beside them, the kernels' number and own time.
    """
    torch.set_num_threads(args.threads)
    device = distributed.setup(args.device).device
    forms = {form: functools.partial(sinkhorn, iters=args.iters, check=False, impl=impl)
             for form, impl in (('loop', 'torch'), ('auto', 'auto'))}
    if args.peer:
        peer = peer_module(args.peer, 'hyper_connections.mHCv2').sinkhorn_knopps
        forms['peer'] = functools.partial(peer, iters=args.iters)
    rows = {}
    for n in args.n:
        z = (args.sigma * torch.randn(2, args.batch, n, n, generator=torch.Generator().manual_seed(0))).to(device)
        leaf, upstream = z[0].clone().requires_grad_(), z[1]
        for name, of in (('forward', lambda form: lambda: form(z[0])),
                         ('both', lambda form: lambda: torch.autograd.grad(form(leaf), leaf, upstream))):
            calls = {form: of(call) for form, call in forms.items()}
            times = paired(calls, args.repeats, device)
            row = {form: 1e6 * np.median(own) for form, own in times.items()}
            row |= {f'{form}_ratio': np.median(times['loop'] / own) for form, own in times.items() if form != 'loop'}
            if device.type == 'cuda':
                for form, call in calls.items():
                    row[f'{form}_launches'], row[f'{form}_kernels'] = launches(call)
            rows[f'n = {n}, {name}'] = row
    return {'microseconds': rows}


# ------------------------------------------------------------------------------------------------ a page about a GPU

def gpu_rows(args, folder):
    """{row: arguments of python}, the most important first; `folder` gets generated data and a run."""
    sizes, peer, stored = ('tiny', 'small', 'medium'), ['--peer', args.peer], ['--data', folder / 'data']
    benches = {**{f'step {size}': ['step', '--batch_size', 20, '--size', size, *peer] for size in sizes},
               **{f'latency {size}': ['latency', '--size', size, '--compile'] for size in sizes},
               **{f'sinkhorn {batch}': ['sinkhorn', '--batch', batch] for batch in (2048, 4096)},
               **{f'memory {size}': ['memory', '--batch_size', 20, '--size', size, *peer] for size in sizes[:2]},
               'rollout': ['rollout', '--batch_size', 64, '--steps', 500]}
    return {'tests': ['-m', 'pytest', '-q', '-rs', '-k', 'cuda'],
            **{name: ['-m', 'lab.bench', *flags] for name, flags in benches.items()},
            'data': ['-m', 'sources.generate', 'ns2d_fno_1e-3', 'swe_pdb', '--train', 64, '--test', 8, *stored],
            'training': ['train.py', '--size', 'tiny', '--dtype', 'bf16', '--compile', '--steps', 1000, *stored,
                         '--batch_size', 64, '--out', folder / 'run']}


def bench_gpu(args):
    """All that a page about a GPU needs, by commands each of which is shown and saved when it is done or has failed."""
    rows, until = {}, time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        for name, command in gpu_rows(args, Path(folder)).items():
            print(f'\n== {name}', flush=True)
            try:
                done = subprocess.run([sys.executable, *map(str, command)], cwd=Path(__file__).parent.parent, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      timeout=until - time.monotonic())         # below 0: ends at once
                print(done.stdout[-3000:], flush=True)
                rows[name] = {'exit code': done.returncode, 'last line': done.stdout.strip().split('\n')[-1]}
            except subprocess.TimeoutExpired:
                rows[name] = {'exit code': None, 'last line': f'not finished within {args.minutes} minutes'}
            if args.json:
                terminal.write(args.json, json.dumps(rows, indent=1))
    return {'rows': rows}


# ------------------------------------------------------------------------------------------------ the command line

NETWORK = dict(size='tiny', resolution='', batch_size=None, form='fast', dtype=None, compile=None, threads=0,
               repeats=10, device='auto', peak_tflops=0.)
COMMANDS = {                                    # the flags of every benchmark and their defaults
    bench_step: NETWORK | dict(peer=''),
    bench_memory: NETWORK | dict(peer='', repeats=1),
    bench_latency: NETWORK | dict(peer='', batch_size=1, repeats=1200),
    bench_rollout: NETWORK | dict(batch_size=64, repeats=3, steps=500),
    bench_busy: dict(steps=20, others=4, spins=[300000, 0], threads=0, repeats=3),
    bench_generate: dict(family=next(iter(FAMILIES)), trajectories=4, units=2, step=1e-4, threads=1, device='auto'),
    bench_loader: dict(datasets=list(configs.PRETRAINING), trajectories=4, repeats=9, data='', peer=''),
    bench_sinkhorn: dict(batch=1024, n=[4, 16], iters=20, sigma=1., repeats=15, threads=1, device='auto', peer=''),
    bench_gpu: dict(minutes=8., peer='', device='auto')}
FLAGS = {                                       # help, and what argparse cannot take from the default
    'size': ('preset of the network', dict(choices=list(configs.SIZES))),
    'resolution': "model grid, 128 or 96x192; without it the preset's", 'threads': "CPU threads; 0: PyTorch's choice",
    'batch_size': ('without it 8, on a GPU 20', dict(type=int)), 'device': 'cpu, cuda or cuda:1',
    'form': ('of ours; fast: with exact rewrites, paper: as printed', dict(choices=('fast', 'paper'))),
    'dtype': ('of ours; bf16: autocast; without it fp32, on a GPU bf16', dict(choices=('fp32', 'bf16'))),
    'compile': ('ours; without it on a GPU only', dict(action=argparse.BooleanOptionalAction)),
    'repeats': "rounds; of latency the forward passes of each network: 1200 as in the paper, fewer for a quick look",
    'peak_tflops': 'of the machine; 0: of a known GPU from its data sheet, else measured',
    'peer': "to compare with: a checkout of DPOT, with experts of MoE-POT, for sinkhorn lucidrains' hyper-connections",
    'steps': 'of a rollout, or training steps', 'others': 'busy processes beside the run',
    'spins': ('values of GOMP_SPINCOUNT; 0: the choice of configs.py', dict(type=int, nargs='+')),
    'trajectories': 'to solve at once, or to store in each file',
    'data': "folder of temporary files, 0.5 GB (without it the system's)",
    'family': ('of sources/generate.py', dict(choices=list(FAMILIES))), 'units': 'of time, compared with the reference',
    'step': "the benchmark's time step", 'batch': 'matrices', 'iters': 'Sinkhorn rounds', 'sigma': 'of the logits',
    'datasets': ("of the paper's twelve", dict(nargs='+', choices=list(configs.PRETRAINING))),
    'n': ('sizes of the matrices', dict(type=int, nargs='+')), 'minutes': 'for all rows together',
    'json': 'file to write the last line to'}


def main():
    parser = terminal.Parser(description=__doc__)
    commands = parser.add_subparsers(dest='command', required=True, parser_class=terminal.Parser)
    for bench, defaults in COMMANDS.items():
        command = commands.add_parser(bench.__name__.removeprefix('bench_'), help=bench.__doc__.splitlines()[0],
                                      description=bench.__doc__)
        command.set_defaults(bench=bench, device='cpu', peer=None)
        for name, default in (defaults | {'json': ''}).items():
            shown = '' if default in ('', None) or isinstance(default, list) else f' [{default}]'
            text, options = FLAGS[name] if isinstance(FLAGS[name], tuple) else (FLAGS[name], {'type': type(default)})
            command.add_argument(f'--{name}', default=default, help=text + shown, **options)
    args = parser.parse_args()
    for name, default in COMMANDS[args.bench].items():
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            zero = default == 0 or isinstance(default, list) and 0 in default
            if type(number) in (int, float) and not (number > 0 or number == 0 and zero):
                raise InputError(f'--{name} {number} must be {"at least 0" if zero else "positive"}')
    if args.json:
        terminal.writable('json', args.json, ('.json',))
    found = args.bench(args)                                        # fills in flags whose default is None
    flags = {name: value for name, value in vars(args).items() if name not in ('bench', 'json')}
    results = {'machine': machine(args.device), 'torch': str(torch.__version__), **flags, **found}
    values = {name: {'': value} for name, value in results.items() if not isinstance(value, (dict, list))}
    for title, rows in ({'': values} | found).items():
        if isinstance(rows, dict):
            print('', *terminal.table(title, rows, '.4g'), sep='\n')
    if args.peer == '':
        print('peer: not measured; give its checkout as --peer DIR')
    if args.json:
        terminal.write(args.json, json.dumps(results))
    print(json.dumps(results))


if __name__ == '__main__':
    terminal.cli(main)
