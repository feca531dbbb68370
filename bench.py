"""Speed and precision, measured where it runs.

    python bench.py step --peer ../DPOT             train step and forward pass of `tiny`, next to plain and DPOT's code
    python bench.py step --peer ../DPOT --dtype fp32 --no-compile       on a GPU too as DPOT's code runs, eager in fp32
    python bench.py memory --peer ../DPOT           peak memory of that step
    python bench.py latency --peer ../DPOT          single steps next to the paper's, eager and compiled
    python bench.py rollout                         500 steps of batch 64 against 500 forward passes
    python bench.py scaling                         predicted efficiency on 1 to 64 GPUs, from the step measured here
    python bench.py train                           five minutes of `tiny` at 128x128, bf16 and compiled, against fp32
    python bench.py train --size nano --resolution 64 --minutes 0.5 --no-compile           the same on a CPU
    python bench.py generate                        our Navier-Stokes solver against the benchmark's own scheme
    python bench.py loader --peer ../DPOT           training samples a second of one worker, next to DPOT's own loader
    python bench.py sinkhorn                        the forms of sinkhorn.py against its plain loop

`train` generates the built-in mixture at --resolution if it is not in --data, then runs train.py itself: a short run in
fp32 and one in bf16 with the same seed, whose losses are compared, and a long one in bf16. `generate` solves the same
trajectories with both schemes and compares both with a finely stepped reference. Every command prints a table and the
same numbers as one last line of JSON. --peer: a checkout of github.com/HaoZhongkai/DPOT, whose network needs einops.
All figures of a GPU: the first seven lines, those with --peer also with --size small and medium, and sinkhorn with
--batch 2048 and 4096; before them python -m pytest -k cuda.
"""
import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import aotpot
import configs
import data
import distributed
import evaluate
import generate
import train as training
from configs import InputError
from pdes import FAMILIES
from pdes.navier_stokes import navier_stokes
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


def peer_module(checkout, name, whose='github.com/HaoZhongkai/DPOT, whose network needs einops'):
    """A module of a peer's checkout by the name that it has there. Raises InputError where it cannot be imported."""
    sys.path.insert(0, str(Path(checkout).absolute()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f'--peer {checkout}: {error}; it takes a checkout of {whose}') from None
    finally:
        sys.path.pop(0)


def tabulated(title, rows):
    """Print a dict of rows, dicts of numbers by column, as a table; what a row does not have is a dash."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    left, wide = max(18, *(len(name) + 2 for name in rows)), [max(len(column), 8) + 2 for column in columns]
    print(f'\n{title}\n{"":<{left}}' + ''.join(f'{column:>{width}}' for column, width in zip(columns, wide)))
    for name, row in rows.items():
        cells = (f'{row[column]:.4g}' if column in row else '-' for column in columns)
        print(f'{name:<{left}}' + ''.join(f'{cell:>{width}}' for cell, width in zip(cells, wide)))


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


# ------------------------------------------------------------------------------------------------ what must be done

def products(config, batch):
    """The matrix products of a forward pass: (n, rows, inner, columns, backward), n times (rows, inner) @ (inner,
    columns); backward: how many of that size its gradient takes, 1 where one factor has none, else 2.

    Without the coefficients of the streams, (B, S, J): 0.01 % of `nano`. GELU, norms and weighted sums are no products.
    """
    P, C, T, D, K, O = config.patch, config.channels, config.frames, config.width, config.heads, config.out_width
    grid, pixels, E, M = [N // P for N in config.resolution], P ** config.dims, C * P + config.dims + 1, config.modes
    tokens = batch * math.prod(grid)
    yield 1, tokens * T, pixels * C, E, 1                           # patch conv; its input needs no gradient
    for N in config.resolution:
        yield 1, N // P, P, E, 1                                    # coordinates
    yield T, E, D, D, 2                                             # 1x1 conv folded into W_t
    yield 1, tokens, T * E, D, 2                                    # Eq. (5)
    yield 1, tokens // batch, D, D, 2                               # position embedding
    kept = [min(n, 2 * M) for n in grid[:-1]] + [min(grid[-1] // 2 + 1, M)]
    for _ in range(config.depth):
        for axis, n in enumerate(grid):                             # DFT there and back, last axis first
            rows = batch * math.prod(grid[:axis]) * math.prod(kept[axis + 1:]) * D
            yield 2, rows, n if axis == len(grid) - 1 else 2 * n, 2 * kept[axis], 1
        yield 2 * K, batch * math.prod(kept), 2 * D // K, 2 * D // K, 2                 # Eq. (8)
        yield 1, tokens, D, config.mlp, 2
        yield 1, tokens, config.mlp, D, 2
        if config.residual == 'aot':                                # logits of a, d and T, Eq. (11)
            S = config.streams
            yield 2, batch, S * D, sum(S * S if name == 'T' else S for name in set('adT') - set(config.ablate)), 2
    yield 1, tokens, D, pixels * O, 2                               # readout
    yield 1, tokens * pixels, O, O, 2
    yield 1, tokens * pixels, O, C, 2


def flops(config, batch, training=False):
    """Floating-point operations of the `products`, 2 for every multiplication, as torch.utils.flop_counter counts."""
    return sum(2 * n * rows * inner * columns * (1 + training * backward)
               for n, rows, inner, columns, backward in products(config, batch))


def traffic(config, batch, itemsize, training=False):
    """Bytes that the `products` move: factors read and result written once each, as if all else were fused for free."""
    return itemsize * sum(n * (rows * inner + inner * columns + rows * columns) * (1 + training * backward)
                          for n, rows, inner, columns, backward in products(config, batch))


PEAKS = {'NVIDIA H100 80GB HBM3': (989e12, 3.35e12), 'NVIDIA H200': (989e12, 4.8e12)}      # data sheets of the SXM


def peak(args, device):
    """FLOP/s and bytes/s of the machine and where they are from: the flags, else PEAKS, else measured here."""
    known = PEAKS.get(machine(device.type))
    source = 'data sheet, bf16, dense' if known else 'reached by one large product and one large copy'
    if not known:
        a = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16 if args.dtype == 'bf16' else None)
        b, c = torch.ones(2, 2 ** 25, device=device)
        best = paired({'product': lambda: a @ a, 'copy': lambda: c.copy_(b)}, 3, device).min(0)
        known = 2 * 2048 ** 3 / best[0], 8 * b.numel() / best[1]
    rates = 1e12 * args.peak_tflops or known[0], 1e12 * args.bandwidth or known[1]
    return *rates, f'{rates[0] / 1e12:.3g} TFLOP/s, {rates[1] / 1e12:.3g} TB/s: ' + (
        'as given' if args.peak_tflops and args.bandwidth else source)


# ------------------------------------------------------------------------------------------------ the network

def prepare(args):
    """(config, device) of the flags; those with a default by the device are filled in. Raises InputError."""
    configs.at_least(1, repeats=args.repeats, batch_size=1 if args.batch_size is None else args.batch_size)
    configs.at_least(0, threads=args.threads, peak_tflops=args.peak_tflops, bandwidth=args.bandwidth)
    config = configs.model(args.size, **({'resolution': args.resolution} if args.resolution else {}))
    if args.peer:
        peer_module(args.peer, 'models.dpot')                       # refused now, not after our own figures
        if len(set(config.resolution)) > 1:
            raise InputError(f'--peer: DPOT takes square grids; --resolution is {configs.show(config.resolution)}')
    if args.threads:
        torch.set_num_threads(args.threads)
    device = distributed.setup(args.device).device
    cuda = device.type == 'cuda'
    args.batch_size = args.batch_size or (20 if cuda else 8)
    args.dtype = args.dtype or ('bf16' if cuda else 'fp32')
    args.compile = cuda if args.compile is None else args.compile
    return config, device


def names(args):
    return 'aot', 'plain', *(['dpot'] if args.peer else [])


def network(name, args, config, device):
    """(module, input of random numbers) of ours or of DPOT's code with the same sizes, both eager."""
    torch.manual_seed(0)
    B, T, C = args.batch_size, config.frames, config.channels
    u = torch.randn(B, T, *config.resolution, C, device=device)
    if name != 'dpot':
        return aotpot.AOTPOT(dataclasses.replace(config, residual=name)).to(device), u
    peer = peer_module(args.peer, 'models.dpot').DPOTNet(
        img_size=config.resolution[0], patch_size=config.patch, mixing_type='afno', in_channels=C, out_channels=C,
        in_timesteps=T, out_timesteps=1, n_blocks=config.heads, embed_dim=config.width, out_layer_dim=config.out_width,
        depth=config.depth, modes=config.modes, mlp_ratio=config.mlp / config.width, n_cls=12, normalize=False,
        act='gelu', time_agg='exp_mlp')
    return peer.to(device), u.permute(0, 2, 3, 1, 4).contiguous()


def passes(name, args, config, device, mode='default'):
    """(forward, step), functions without arguments: a pass without gradients; forward and backward, no optimizer.

    Ours in --dtype and, with --compile, compiled; DPOT's as its authors run it, in fp32 and eager.
    """
    module, u = network(name, args, config, device)
    ours = name != 'dpot'
    run = torch.compile(module, mode=mode) if ours and args.compile else module
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=ours and args.dtype == 'bf16')

    def forward():
        with torch.no_grad(), autocast:
            run(u)

    def step():
        module.zero_grad()
        with autocast:
            prediction = run(u)
        (prediction if ours else prediction[0]).float().square().mean().backward()
    return forward, step


def paired(runs, repeats, device, inner=1):
    """Seconds of a call of each function in the dict `runs`, in turn, after some rounds of warm-up: (repeats, runs).

    On a GPU by events, `inner` calls between two of them and nothing in flight before the first; on a CPU by `timed`.
    """
    cuda = device.type == 'cuda'
    warmup = 3 if cuda else 1                                       # a CUDA graph is recorded at the second call
    seconds = np.zeros((warmup + repeats, len(runs)))
    for i, j in np.ndindex(*seconds.shape):
        run = list(runs.values())[j]
        if not cuda:
            seconds[i, j] = timed(device, run)[1]
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(inner):
            run()
        end.record()
        end.synchronize()
        seconds[i, j] = start.elapsed_time(end) / 1000 / inner
    return seconds[warmup:]


def ratios(runs, seconds):
    """{name: medians of `paired`: milliseconds, and their ratios to plain and to DPOT's, round by round}."""
    of, rows = dict(zip(runs, seconds.T)), {}
    for name, own in of.items():
        rows[name] = {'ms': 1000 * np.median(own), 'of plain': np.median(own / of[name.replace('aot', 'plain')])
                      if name != 'dpot' else np.median(own / of['plain'])}
        if 'dpot' in of:
            rows[name]['of DPOT'] = np.median(own / of['dpot'])
    return {name: {column: float(value) for column, value in row.items()} for name, row in rows.items()}


def measured(runs, args, config, device, roof, training=False, inner=1):
    """`ratios` of `runs` with samples/s, GFLOP of a call, the share of the peak (MFU) and the roofline's milliseconds.

    Of DPOT's network the FLOPs are those that torch counts; what it must move is not counted.
    """
    rows, itemsize = ratios(runs, paired(runs, args.repeats, device, inner)), 2 if args.dtype == 'bf16' else 4
    for name, row in rows.items():
        own = dataclasses.replace(config, residual='plain' if 'plain' in name else 'aot')
        work, moved = flops(own, args.batch_size, training), traffic(own, args.batch_size, itemsize, training)
        if name == 'dpot':
            with FlopCounterMode(display=False) as counter:
                runs[name]()
            work = counter.get_total_flops()
        row.update({'samples/s': 1000 * args.batch_size / row['ms'], 'GFLOP': work / 1e9,
                    'of peak': 1000 * work / row['ms'] / roof[0]})
        if name != 'dpot':
            row['limit ms'] = 1000 * max(work / roof[0], moved / roof[1])
    return rows


def header(args, config, device, roof=None):
    """Print what is measured and where; the same as the first entries of the JSON."""
    print(f'{args.size}, {configs.show(config.resolution)}, batch {args.batch_size}, {args.dtype}, '
          f'{"compiled" if args.compile else "eager"}, on {machine(device.type)}, torch {torch.__version__}')
    if args.peer is not None:
        print(f'DPOT: {args.peer}, fp32, eager' if args.peer else 'DPOT: not measured; give its checkout as --peer DIR')
    if roof:
        print(f'peak: {roof[2]}')
    return {'machine': machine(device.type), 'torch': str(torch.__version__), 'size': args.size,
            'resolution': config.resolution, 'batch_size': args.batch_size, 'dtype': args.dtype,
            'compile': args.compile, 'threads': torch.get_num_threads(), **({'peak': roof} if roof else {})}


def peak_mb(device):
    """Peak memory of this process: what was allocated on a GPU, else resident since it began to run this program."""
    status = Path('/proc/self/status')              # Linux; getrusage begins there at the peak of the parent process
    if device.type == 'cuda' or not status.exists():
        return training.memory_mb(device)
    return 1.024e-3 * int(re.search(r'VmHWM:\s+(\d+)', status.read_text())[1])


def child(name, flags):
    """In a process of its own: seconds from its start to the end of a first train step, and the step's peak memory."""
    started, args = flags.pop('started'), SimpleNamespace(**flags)
    config, device = prepare(args)
    step, cuda = passes(name, args, config, device)[1], device.type == 'cuda'
    before = 0 if cuda else peak_mb(device)                         # as of a process that only built the network
    step()
    if cuda:
        torch.cuda.synchronize(device)
    first = time.time() - started
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)                  # compiling is over
    step()
    print(json.dumps({'MB': peak_mb(device) - before, 'first step s': first}))


def fresh(name, args, device):
    """What `child` finds out, a dict; on a CPU always eager, for a compiler's own memory would count there."""
    flags = {key: value for key, value in vars(args).items() if key != 'bench'}
    flags.update(peer=args.peer and str(Path(args.peer).absolute()), compile=args.compile and device.type == 'cuda')
    code = f'import bench; bench.child({name!r}, {flags | {"started": time.time()}!r})'
    process = subprocess.run([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True, cwd=HERE)
    if process.returncode:
        sys.exit(process.returncode)
    return json.loads(process.stdout.splitlines()[-1])


def bench_step(args):
    """Forward pass and train step of AOT, our plain and DPOT's code with the same sizes, in alternation.

    A train step is forward and backward of a mean square; there is no optimizer in it. Ratios are medians of those of
    single rounds. of peak: MFU, the share of the FLOP/s that the machine can do. limit: the time in which the products
    could be done or their operands be moved, whichever is longer. first step: see `memory`.
    """
    config, device = prepare(args)
    first, roof = fresh('aot', args, device)['first step s'], peak(args, device)
    results, rows = header(args, config, device, roof), {}
    functions = {name: passes(name, args, config, device) for name in names(args)}
    for i, kind in enumerate(('forward', 'train step')):
        runs = {name: pair[i] for name, pair in functions.items()}
        rows[kind] = measured(runs, args, config, device, roof, training=i == 1, inner=10)
        tabulated(kind, rows[kind])
    print(f'\naot, from the start of a process to the end of its first step: {first:.2f} s')
    return {**results, **rows, 'first step s': first}


def bench_memory(args):
    """Peak memory of a train step of AOT, our plain and DPOT's code, each in a process of its own.

    On a GPU all that is allocated at once, weights and gradients too. On a CPU the resident memory above that of the
    process when the network was built, and ours is eager. The medians of --repeats. first step: seconds from the start
    of the process, imports included, to the end of its first train step.
    """
    config, device = prepare(args)
    results, rows = header(args, config, device), {}
    for name in names(args):
        runs = [fresh(name, args, device) for _ in range(args.repeats)]
        rows[name] = {column: statistics.median(run[column] for run in runs) for column in runs[0]}
    for row in rows.values():
        row.update({f'of {title}': row['MB'] / rows[other]['MB'] for other, title in
                    (('plain', 'plain'), ('dpot', 'DPOT')) if other in rows})
    tabulated('peak memory of a train step', rows)
    return {**results, 'memory': rows}


def bench_latency(args):
    """Milliseconds of a single step at batch 1, eager and, with --compile, compiled: a CUDA graph on a GPU.

    Each pass starts once the one before is over. Beside them the paper's, on an H200, for tiny, small and medium.
    """
    config, device = prepare(args)
    roof, runs, compiled = peak(args, device), {}, args.compile
    results = header(args, config, device, roof)
    for args.compile in (False, True)[:1 + compiled]:
        for name in names(args) if not args.compile else ('aot', 'plain'):
            runs[name + ' compiled' * args.compile] = passes(name, args, config, device, 'reduce-overhead')[0]
    rows = measured(runs, args, config, device, roof)
    for name, row in rows.items():
        paper = evaluate.PAPER_MS['plain' if name == 'dpot' else name.split()[0]].get(args.size)
        if paper:
            row.update({'paper ms': paper, 'of paper': row['ms'] / paper})
    tabulated('single step', rows)
    return {**results, 'latency': rows}


def bench_rollout(args):
    """A rollout of --steps against as many forward passes of the same batch, state on the device all the time.

    The steps are those of evaluate.py. On a GPU PyTorch warns where one of them waits for the device.
    """
    config, device = prepare(args)
    configs.at_least(1, steps=args.steps)
    results = header(args, config, device)
    module, u = network('aot', args, config, device)
    predictor = evaluate.Predictor(torch.compile(module) if args.compile else module,
                                   SimpleNamespace(evolving=list(range(config.channels))), device, args.dtype)

    @torch.no_grad()
    def rollout():
        state = u
        for _ in range(args.steps):
            state = predictor.step(state)

    @torch.no_grad()
    def forward():
        for _ in range(args.steps):
            with predictor.autocast:            # as in a step: within it, weights would be cast once and for all
                predictor.model(u)
    if device.type == 'cuda':
        rollout()                                                   # compiling may wait
        torch.cuda.set_sync_debug_mode('warn')
        rollout()
        torch.cuda.set_sync_debug_mode('default')
    seconds = paired({'rollout': rollout, 'forward': forward}, args.repeats, device)
    rows = {name: {'ms': float(1000 * np.median(column) / args.steps),
                   'of forward': float(np.median(column / seconds[:, 1]))}
            for name, column in zip(('rollout', 'forward'), seconds.T)}
    tabulated(f'one of {args.steps} steps', rows)
    return {**results, 'steps': args.steps, **rows}


NODE, BUCKET = 8, 25 * 2 ** 20                  # GPUs; bytes of fp32 gradients that DDP sends at once


def scaling(step, backward, size, bucket, nvlink, infiniband, counts=(1, 2, 4, 8, 16, 32, 64)):
    """Predicted efficiency of data parallelism with a constant batch on each GPU: {GPUs: {column: value}}.

    All-reduce of G bytes by rings, g GPUs a node, m nodes, each GPU on its own link to the other nodes:
        t(G) = 2 (g-1)/g G/nvlink + 2 (m-1)/m (G/g)/infiniband
    It goes on during the backward pass; what shows is what is left of it after that, and at least the last bucket,
    which is full only when the backward pass ends:
        efficiency = step / (step + max(t(G) - backward, t(bucket)))
    Times in s, size and bucket in bytes, rates in bytes/s. Latency, stragglers and the reading of data are left out.
    """
    def reduce(n, G):
        g, m = min(n, NODE), max(n // NODE, 1)
        return 2 * (g - 1) / g * G / nvlink + 2 * (m - 1) / m * G / g / infiniband
    shown = {n: max(reduce(n, size) - backward, reduce(n, min(bucket, size))) for n in counts}
    return {n: {'all-reduce ms': 1000 * reduce(n, size), 'shown ms': 1000 * shown[n],
                'efficiency': step / (step + shown[n])} for n in counts}


def bench_scaling(args):
    """Predicted efficiency of training on 1 to 8 GPUs of a node and up to 64 over nodes, from one GPU's step.

    The backward pass is the share of the step that it has in the FLOPs. The formula is printed with the table; nothing
    but the step is measured.
    """
    config, device = prepare(args)
    configs.at_least(0, step_ms=args.step_ms)
    for name in ('nvlink', 'infiniband'):
        if not getattr(args, name) > 0:
            raise InputError(f'--{name} {getattr(args, name)} must be positive')
    results = header(args, config, device)
    step = args.step_ms / 1000 or float(np.median(paired(
        {'step': passes('aot', args, config, device)[1]}, args.repeats, device, inner=10)))
    backward = step * (1 - flops(config, 1) / flops(config, 1, training=True))
    scale = 0.5 if args.gradients == 'bf16' else 1
    with torch.device('meta'):
        size = 4 * scale * aotpot.parameters(aotpot.AOTPOT(config))
    rows = scaling(step, backward, size, scale * BUCKET, 1e9 * args.nvlink, 1e9 * args.infiniband)
    print('\n'.join(line.strip() for line in scaling.__doc__.splitlines()[2:-1]))
    print(f'step {1000 * step:.4g} ms {"as given" if args.step_ms else "measured"}, backward {1000 * backward:.4g} ms, '
          f'gradients {size / 1e6:.4g} MB, NVLink {args.nvlink:g} GB/s, InfiniBand {args.infiniband:g} GB/s')
    tabulated('GPUs, predicted', {str(n): row for n, row in rows.items()})
    return {**results, 'step_ms': 1000 * step, 'gradient_mb': size / 1e6, 'predicted': rows}


# ------------------------------------------------------------------------------------------------ the solver

def euler(w0, viscosity, frames, dt=1.0, forcing=0.1, tau=1e-4):
    """The scheme of the FNO files, for the equation and with the arguments and the result of pdes.navier_stokes.

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
    reference = navier_stokes(w0, viscosity, args.units, plan.dt, steps=4 * w0.shape[-1])
    w0, score = w0.float(), lambda frames: ((frames - reference).flatten(1).norm(dim=1)
                                            / reference.flatten(1).norm(dim=1)).mean().item()
    error = score(navier_stokes(w0, viscosity, args.units, plan.dt))
    ours = statistics.median(timed(device, navier_stokes, w0, viscosity, plan.frames, plan.dt)[1]
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
            checkout = Path(args.peer).absolute()
            with contextlib.chdir(folder):                  # its import writes a file
                peer = peer_module(checkout, 'utils.griddataset')

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
            data.cache([kinds[f'--cache {where}']], where, distributed.Processes(0, 1, torch.device('cpu')))
        drawn = [data.Windows([item], config.frames, seed=0) for item in kinds.values()]
        rates = samples_per_s([lambda i, w=w: w[range(20 * i, 20 * i + 20)] for w in drawn], args.repeats)
        storage = dict(zip(kinds, np.median(rates, axis=0).tolist()))

    tabulated(f'samples/s, on {machine("cpu")}', rows)
    tabulated(f'{largest.name} by storage', {kind: {'samples/s': value} for kind, value in storage.items()})
    if not args.peer:
        print('DPOT: not measured; give its checkout as --peer DIR')
    return {'machine': machine('cpu'), 'torch': str(torch.__version__), 'loader': rows, 'storage': storage}


# ------------------------------------------------------------------------------------------------ Sinkhorn

def launches(call):
    """The kernels that one call launches on a GPU, and the microseconds that they run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(found), sum(event.time_range.elapsed_us() for event in found)


def bench_sinkhorn(args):
    """Microseconds of Sinkhorn's forms, forward and forward + backward, for logits ~ N(0, --sigma^2) in fp32.

    loop: the plain ten lines; auto: what the network calls on this device. --peer: a checkout of lucidrains'
    hyper-connections (needs einops and torch-einops-utils), its sinkhorn_knopps. Medians of alternating rounds,
    ratio: loop / form. On a GPU between events, launches included; beside them the kernels' number and own time.
    """
    configs.at_least(1, batch=args.batch, iters=args.iters, repeats=args.repeats, threads=args.threads)
    configs.at_least(1, n=min(args.n))
    torch.set_num_threads(args.threads)
    device = distributed.setup(args.device).device
    forms = {form: functools.partial(sinkhorn, iters=args.iters, check=False, impl=impl)
             for form, impl in (('loop', 'torch'), ('auto', 'auto'))}
    if args.peer:
        peer = peer_module(args.peer, 'hyper_connections.mHCv2', 'github.com/lucidrains/hyper-connections, which needs '
                           'einops and torch-einops-utils')
        forms['peer'] = functools.partial(peer.sinkhorn_knopps, iters=args.iters)
    rows = {}
    for n in args.n:
        z = (args.sigma * torch.randn(2, args.batch, n, n, generator=torch.Generator().manual_seed(0))).to(device)
        leaf, upstream = z[0].clone().requires_grad_(), z[1]
        for name, of in (('forward', lambda form: lambda: form(z[0])),
                         ('both', lambda form: lambda: torch.autograd.grad(form(leaf), leaf, upstream))):
            calls = {form: of(call) for form, call in forms.items()}
            times = paired(calls, args.repeats, device)
            row = {form: 1e6 * value for form, value in zip(forms, np.median(times, axis=0).tolist())}
            ratios = np.median(times[:, :1] / times, axis=0).tolist()
            row |= {f'{form}_ratio': ratio for form, ratio in zip(forms, ratios) if form != 'loop'}
            if device.type == 'cuda':
                for form, call in calls.items():
                    row[f'{form}_launches'], row[f'{form}_kernels'] = launches(call)
            rows[f'n = {n}, {name}'] = row
    tabulated(f'microseconds, {args.batch} matrices, {args.iters} rounds, on {machine(device.type)}', rows)
    if not args.peer:
        print('peer: not measured; give a checkout of hyper-connections as --peer DIR')
    return {'machine': machine(device.type), 'torch': str(torch.__version__), 'batch': args.batch, 'iters': args.iters,
            'sigma': args.sigma, 'sinkhorn': rows}


def added(commands, name, bench):
    """The sub-command `name`, described by the docstring of `bench`, with the flag that all have."""
    command = commands.add_parser(name, help=bench.__doc__.splitlines()[0], description=bench.__doc__)
    command.set_defaults(bench=bench)
    command.add_argument('--json', default='', metavar='FILE', help='write the last line to a file too')
    return command


def network_flags(commands, name, bench, batch_size=None, repeats=10, peer=True):
    """The sub-command `name` with the flags that all benchmarks of the network have."""
    command = added(commands, name, bench)
    command.set_defaults(peer=None)
    command.add_argument('--size', default='tiny', choices=list(configs.SIZES), help='preset [tiny]')
    command.add_argument('--resolution', default='', help="model grid, 128 or 96x192 [the preset's]")
    command.add_argument('--batch_size', type=int, default=batch_size, metavar='N',
                         help=f'[{batch_size or "8, on a GPU 20"}]')
    command.add_argument('--dtype', choices=('fp32', 'bf16'), help='of ours; bf16: autocast [fp32, on a GPU bf16]')
    command.add_argument('--compile', action=argparse.BooleanOptionalAction, help='ours [on a GPU]')
    command.add_argument('--threads', type=int, default=0, metavar='N', help="CPU threads [PyTorch's choice]")
    command.add_argument('--repeats', type=int, default=repeats, metavar='N', help=f'rounds [{repeats}]')
    command.add_argument('--device', default='auto', help='[auto]')
    command.add_argument('--peak_tflops', type=float, default=0, metavar='X', help='[of the GPU, else measured]')
    command.add_argument('--bandwidth', type=float, default=0, metavar='X', help='TB/s [of the GPU, else measured]')
    if peer:
        command.add_argument('--peer', default='', metavar='DIR', help='a checkout of DPOT to compare with')
    return command


def main():
    parser = configs.Parser(description=__doc__)
    commands = parser.add_subparsers(dest='command', required=True, parser_class=configs.Parser)
    network_flags(commands, 'step', bench_step)
    network_flags(commands, 'memory', bench_memory, repeats=1)
    network_flags(commands, 'latency', bench_latency, batch_size=1, repeats=200)
    command = network_flags(commands, 'rollout', bench_rollout, batch_size=64, repeats=3, peer=False)
    command.add_argument('--steps', type=int, default=500, metavar='N', help='of a rollout [500]')
    command = network_flags(commands, 'scaling', bench_scaling, peer=False)
    command.add_argument('--step_ms', type=float, default=0, metavar='X', help='of one GPU [measured here]')
    command.add_argument('--gradients', default='fp32', choices=('fp32', 'bf16'), help='as they travel [fp32]')
    command.add_argument('--nvlink', type=float, default=450, metavar='X',
                         help='GB/s from each GPU to the others of its node [450: NVLink 4, NVIDIA H100 data sheet, '
                              '900 GB/s both ways together]')
    command.add_argument('--infiniband', type=float, default=50, metavar='X',
                         help='GB/s from each GPU to other nodes [50: NDR, 400 Gb/s, a ConnectX-7 for each GPU, NVIDIA '
                              'DGX H100 data sheet]')
    command = added(commands, 'train', bench_train)
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
    command = added(commands, 'generate', bench_generate)
    families = [name for name in FAMILIES if name.startswith('ns2d_fno')]
    command.add_argument('--family', default=families[0], choices=families, help=f'[{families[0]}]')
    command.add_argument('--trajectories', type=int, default=4, help='solved at once by both [4]')
    command.add_argument('--units', type=int, default=2, help='of time, compared with the reference [2]')
    command.add_argument('--step', type=float, default=1e-4, help="the benchmark's time step [1e-4]")
    command.add_argument('--threads', type=int, default=1, help='CPU threads [1]')
    command.add_argument('--device', default='auto', help='[auto]')
    command = added(commands, 'loader', bench_loader)
    command.add_argument('--peer', default='', metavar='DIR', help='a checkout of DPOT to compare with')
    command.add_argument('--datasets', nargs='+', default=list(configs.PRETRAINING), help="[the paper's twelve]")
    command.add_argument('--trajectories', type=int, default=4, metavar='N', help='in each file [4]')
    command.add_argument('--repeats', type=int, default=9, metavar='N', help='rounds of 20 samples [9]')
    command.add_argument('--data', default='', metavar='DIR', help="for the temporary files, 0.7 GB [the system's]")
    command = added(commands, 'sinkhorn', bench_sinkhorn)
    command.add_argument('--batch', type=int, default=1024, help='matrices [1024]')
    command.add_argument('--n', type=int, nargs='+', default=[4, 16], help='streams [4 16]')
    command.add_argument('--iters', type=int, default=20, help='rounds [20]')
    command.add_argument('--sigma', type=float, default=1., help='of the logits [1]')
    command.add_argument('--repeats', type=int, default=15, metavar='N', help='alternating rounds [15]')
    command.add_argument('--threads', type=int, default=1, help='CPU threads [1]')
    command.add_argument('--peer', default='', metavar='DIR', help='a checkout of hyper-connections to compare with')
    command.add_argument('--device', default='auto', help='[auto]')
    args = parser.parse_args()
    results = args.bench(args)
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(results))
    print(json.dumps(results))


if __name__ == '__main__':
    configs.cli(main)
