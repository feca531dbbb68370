"""Speed, measured on the machine where it runs.

    python -m lab.bench step --peer ../DPOT     train step and forward pass of `tiny`, beside plain and DPOT's code
    python -m lab.bench step --size moe-tiny --peer ../MoE-POT              the same with experts, beside MoE-POT's code
    python -m lab.bench latency --peer ../DPOT  single steps as the paper times them, eager and compiled
    python -m lab.bench rollout                 500 steps of batch 64 against 500 forward passes
    python -m lab.bench loader                  training samples a second of one worker
    python -m lab.bench sinkhorn                Sinkhorn as the network calls it against its plain loop
    python -m lab.bench count --size small      launches, bytes, waits and memory of a train step on a GPU, without one
    python -m lab.bench gpu --part correctness  what a page about a GPU needs, in parts of nine minutes: docs/speed.md

Every command prints tables and, as one last line of JSON, its flags and the same numbers. --peer is a checkout of
github.com/HaoZhongkai/DPOT, for sizes with experts of github.com/haiyangxin/MoEPOT; their networks need einops.
"""
import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import configs
from configs import InputError

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import data
import evaluate
import nets
import train as training
from lab import gpu, reproduce
from nets import experts
from runtime import distributed, files, terminal
from runtime.terminal import Progress
from sinkhorn import sinkhorn

PEERS = {'dpot': ('DPOT', 'DPOTNet'), 'moepot': ('MoE-POT', 'MoEPOTNet')}   # {module: (project, class)}
DEFAULTS = {'latency': (1, 1200), 'rollout': (64, 3), 'sinkhorn': (1024, 10),     # of --batch_size and --repeats
            'count': (20, 1), 'gpu': (20, None)}
PARTS = 'correctness', 'eager', 'compiled', 'long'          # of gpu


def paired(runs, repeats, device, inner=1, warmup=1):
    """Call the functions in the dict `runs` in turn, `warmup` rounds and then `repeats`: {name: seconds (repeats,)}.

    The clock is read around `inner` calls, after which a GPU has nothing more to do.
    """
    cuda = device.type == 'cuda'
    # with one thread this process's CPU time, which other processes disturb little
    clock = time.process_time if torch.get_num_threads() == 1 and not cuda else time.perf_counter
    seconds = {name: [] for name in runs}
    for _ in Progress(range(warmup + repeats), desc='measuring', leave=False):
        for name, call in runs.items():
            start = clock()
            for _ in range(inner):
                call()
            if cuda:
                torch.cuda.synchronize(device)
            seconds[name].append((clock() - start) / inner)
    return {name: np.array(values[warmup:]) for name, values in seconds.items()}


def peer_class(checkout, name):
    """The network of PEERS[name] in another project's checkout. Raises InputError if it cannot be imported."""
    sys.path.insert(0, str(Path(checkout).absolute()))
    try:
        return getattr(importlib.import_module(f'models.{name}'), PEERS[name][1])
    except ImportError as error:
        raise InputError(f'--peer {checkout}: {error}; see --help for the checkout that it takes') from None
    finally:
        sys.path.pop(0)


def prepare(args):
    """(config, device, names of the networks) of the flags; the defaults that depend on the machine are filled in."""
    config = configs.model(args.size, **({'resolution': args.resolution} if args.resolution else {}))
    peer = 'moepot' if config.experts else 'dpot'
    if args.peer:
        peer_class(args.peer, peer)                                 # an error here comes before any measurement
        if len(set(config.resolution)) > 1:
            raise InputError(f'--peer: {PEERS[peer][0]} takes square grids, not {configs.show(config.resolution)}')
    device = distributed.setup(args.device).device
    cuda = device.type == 'cuda'
    args.resolution = configs.show(config.resolution)
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
    peer = peer_class(args.peer, name)(
        img_size=config.resolution[0], patch_size=config.patch, mixing_type='afno', in_channels=C, out_channels=C,
        in_timesteps=T, out_timesteps=1, n_blocks=config.heads, embed_dim=config.width, out_layer_dim=config.out_width,
        depth=config.depth, modes=config.modes, mlp_ratio=config.mlp / config.width, n_cls=12, normalize=False,
        act='gelu', time_agg='exp_mlp')
    return peer.to(device), u.permute(0, 2, 3, 1, 4).contiguous()


def passes(name, args, config, device, mode='default'):
    """The functions 'forward', without gradients, and 'train step'. A peer's code runs as is, eager in fp32."""
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
    """Floating-point operations of one more call in eager mode: of products and convolutions, but not of FFTs."""
    with torch.compiler.set_stance('force_eager'), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def compare(runs, args, device, **options):
    """Rows of times, ratios to plain and to a peer's code (medians over the rounds), samples/s and GFLOP of `runs`."""
    rows, rounds = {}, paired(runs, args.repeats, device, **options)
    for name, seconds in rounds.items():
        plain, median = 'plain' if name in PEERS else name.replace('aot', 'plain'), np.median(seconds)
        rows[name] = {'ms': 1000 * median, 'mean ms': 1000 * seconds.mean(),
                      'of plain': np.median(seconds / rounds[plain])}
        for peer in PEERS.keys() & rounds.keys():
            rows[name][f'of {PEERS[peer][0]}'] = np.median(seconds / rounds[peer])
        rows[name].update({'samples/s': args.batch_size / median, 'GFLOP': flops(runs[name]) / 1e9})
    return rows


def peak_memory(name, args, config):
    """In a new process: the peak memory of a train step in MB, on a CPU without that of the network as it was built."""
    device = distributed.setup(args.device).device
    step, built = passes(name, args, config, device)['train step'], 0
    if device.type == 'cuda':
        step()                                                      # compiling takes memory too
        torch.cuda.reset_peak_memory_stats(device)
    else:
        built = distributed.memory_mb(device)
    step()
    return distributed.memory_mb(device) - built


def bench_step(args):
    """Forward pass and train step of AOT, of our plain network and of a peer's code of the same sizes, in alternation.

    A train step is the forward and backward pass of a mean square, with experts also of their balance loss. With
    --compile, 'first s' is the time of the first call, which compiles.
    """
    config, device, names = prepare(args)
    functions, rows = {name: passes(name, args, config, device) for name in names}, {}
    for kind in ('forward', 'train step')[args.train:]:
        runs, first = {name: functions[name][kind] for name in names}, {}
        for name in names if args.compile else ():
            start = time.monotonic()
            runs[name]()
            first[name] = {'first s': time.monotonic() - start}
            print(f'{kind} of {name}: {first[name]["first s"]:.1f} s for the first call', flush=True)
        rows[kind] = compare(runs, args, device, inner=10 if device.type == 'cuda' else 1)
        rows[kind] = {name: first.get(name, {}) | row for name, row in rows[kind].items()}
    torch.cuda.empty_cache()                                        # for the processes that measure the memory
    for name in names:
        with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
            rows['train step'][name]['peak MB'] = pool.submit(peak_memory, name, args, config).result()
    return rows


def bench_latency(args):
    """Milliseconds of a single step at batch 1, eager and, with --compile, compiled: a CUDA graph on a GPU.

    As in the paper (App. C.12), the mean over 1200 forward passes after 50 of warm-up, beside the paper's on an H200.
    """
    config, device, names = prepare(args)
    runs, compiled = {}, args.compile
    for args.compile in (False, True)[:1 + compiled]:
        for name in names[:2] if args.compile else names:
            runs[name + ' compiled' * args.compile] = passes(name, args, config, device, 'reduce-overhead')['forward']
    rows, printed = compare(runs, args, device, warmup=50), reproduce.paper_table('timing', args.size)
    for name, row in rows.items() if printed else ():
        row['paper ms'] = printed['AOT-POT' if name.startswith('aot') else 'DPOT']['ms']
    return {'latency': rows}


def bench_rollout(args):
    """A rollout of --steps, stepped as in evaluate.py, against as many forward passes of the same batch."""
    config, device, _ = prepare(args)
    module, u = network('aot', args, config, device)
    module.eval()
    predictor = evaluate.Predictor(torch.compile(module) if args.compile else module,
                                   SimpleNamespace(evolving=list(range(config.channels))), device, args.dtype)

    @torch.no_grad()
    def rollout(state=u):
        for _ in range(args.steps):
            state = predictor.step(state)

    @torch.no_grad()
    def forward():
        for _ in range(args.steps):
            with predictor.autocast:            # entered in every step, as in a rollout: it caches the cast weights
                predictor.model(u)
    seconds = paired({'rollout': rollout, 'forward': forward}, args.repeats, device)
    return {'one step': {name: {'ms': 1000 * np.median(values) / args.steps,
                                'of forward': np.median(values / seconds['forward'])}
                         for name, values in seconds.items()}}


def bench_loader(args):
    """Training samples/s of one worker (this process, one thread) from files in the page cache, in batches of 20.

    ours: T + 1 frames, as a worker delivers them. model: the same, then resized and padded as in a training step.
    """
    torch.set_num_threads(1)
    config, names, rows = configs.model('tiny'), args.datasets or configs.PRETRAINING, {}

    def on_the_model_grid(groups, sets):
        return training.inputs(data.by_grid(groups, sets, config.channels), sets, config, 0)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            source = configs.PRETRAINING[name]
            shape = 4, source.frames, source.resolution, source.resolution, len(source.channels)
            values = np.random.default_rng(0).standard_normal(shape, np.float32)
            data.write(Path(folder, name), values, values[:1])
        sets = [data.Trajectories(folder, name, 'train', config.frames, config.channels) for name in names]
        for mixture in (*([item] for item in sets), sets):
            windows = data.Windows(mixture, config.frames, seed=0)
            batches = [range(20 * i, 20 * i + 20) for i in range(1 + args.repeats)]
            runs = {'ours': map(lambda batch: windows[batch], batches).__next__,
                    'model': map(lambda batch: on_the_model_grid(windows[batch], mixture), batches).__next__}
            seconds = paired(runs, args.repeats, torch.device('cpu'))
            rows['mixture' if mixture is sets else mixture[0].name] = {
                name: np.median(20 / values) for name, values in seconds.items()}
    return {'samples/s': rows}


def bench_sinkhorn(args):
    """Microseconds of Sinkhorn of 4 x 4 matrices, the plain loop and what the network calls on this device."""
    torch.set_num_threads(1)
    device, rows = distributed.setup(args.device).device, {}
    z = torch.randn(2, args.batch_size, 4, 4, generator=torch.Generator().manual_seed(0)).to(device)
    leaf = z[0].clone().requires_grad_()
    for name, call in (('forward', lambda impl: sinkhorn(z[0], check=False, impl=impl)),
                       ('both', lambda impl: torch.autograd.grad(sinkhorn(leaf, check=False, impl=impl), leaf, z[1]))):
        seconds = paired({'loop': lambda: call('torch'), 'auto': lambda: call('auto')}, args.repeats, device)
        rows[name] = {**{form: 1e6 * np.median(values) for form, values in seconds.items()},
                      'ratio': np.median(seconds['loop'] / seconds['auto'])}
    return {'microseconds': rows}


def bench_count(args):
    """What a bf16 train step asks of a GPU by the counts of lab/count.py, for AOT and our plain network.

    'H200 ms' is computed, not measured: the longest of 5 us a launch, 0.7 of 4.8 TB/s and half of 989 TFLOP/s.
    """
    from lab import count, inductor  # here, because they take over the operations of torch while they count
    rows = {}
    for residual in ('aot', 'plain'):
        config = configs.model(args.size, residual=residual)
        rows[residual] = (count.train_step(config, configs.recipe(args.size), args.batch_size)
                          | inductor.network(config, args.batch_size))
    for row in rows.values():
        row['H200 ms'] = max(5e-3 * row['launches'], row['gb'] / 3.36, row['tflop'] / 0.49)
    return rows


def limited(arguments, seconds, **environment):
    """Run Python with these arguments as a process group of its own, which ends after so many seconds at the latest.

    Returns {'exit code': None if it did not end by itself, 'seconds', 'output': all that it printed}.
    """
    if seconds <= 0:
        return {'exit code': None, 'seconds': 0.0, 'output': 'not started: the minutes are over'}
    start, code = time.monotonic(), None
    with tempfile.TemporaryFile('w+', encoding='utf-8', errors='replace') as output:    # children may hold a pipe open
        process = subprocess.Popen([sys.executable, '-u', *map(str, arguments)], cwd=reproduce.ROOT,
                                   env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):                          # the children of a row that failed, too
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):                   # a GPU that hangs may keep it from ending
                process.wait(10)
        output.seek(0)
        text = output.read() + f'\nended after {seconds:.0f} s, its limit' * (code is None)
    return {'exit code': code, 'seconds': time.monotonic() - start, 'output': text.strip()}


def bench_gpu(args):
    """One part of lab/gpu.py, row after row: what fails or reaches its limit is noted, and the next row follows."""
    rows, until = {}, time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:           # for what rows that are killed leave, and Inductor's cache
        for name, (limit, arguments) in gpu.rows(args).items():
            print(f'\n== {name}: python {" ".join(map(str, arguments))}', flush=True)
            seconds = min(limit * args.minutes / 9, until - time.monotonic())
            rows[name] = limited(arguments, seconds, TMPDIR=folder)
            print(rows[name]['output'][-3000:], flush=True)
            if args.json:                                           # what is done stays if a later row takes all down
                files.write(args.json, json.dumps({**flags(args), 'rows': rows}))
    return {'rows': rows}


COMMANDS = {'step': bench_step, 'latency': bench_latency, 'rollout': bench_rollout, 'loader': bench_loader,
            'sinkhorn': bench_sinkhorn, 'count': bench_count, 'gpu': bench_gpu}


def flags(args):
    """The flags that have a value."""
    return {name: value for name, value in vars(args).items() if value not in (None, '')}


def main():
    parser = terminal.Parser(description=__doc__)
    add = parser.add_argument
    add('command', choices=COMMANDS)
    add('--size', choices=list(configs.SIZES), help='preset of the network [tiny; gpu: tiny, small and medium]')
    add('--resolution', help="model grid, 128 or 96x192 [the preset's]")
    add('--batch_size', type=int, help='samples [step 8, latency 1, rollout 64, count and gpu 20]; matrices [1024]')
    add('--form', default='fast', choices=('fast', 'paper'), help='of ours [fast: with exact rewrites]')
    add('--dtype', choices=('fp32', 'bf16'), help='of ours; bf16: autocast [fp32, on a GPU bf16]')
    add('--compile', action=argparse.BooleanOptionalAction, help='ours [on a GPU only]')
    add('--train', action='store_true', help='of step the train step alone')
    add('--repeats', type=int, help='rounds [10; latency 1200 as in the paper; rollout 3]')
    add('--steps', type=int, help='of rollout [500]; gpu: at most so many in a training or rollout')
    add('--datasets', nargs='+', choices=list(configs.PRETRAINING), help="of loader [the paper's twelve]")
    add('--part', default='correctness', choices=PARTS, type=lambda name: dict(zip('abcd', PARTS)).get(name, name),
        help='of gpu: one of these, or a to d [correctness]')
    add('--minutes', type=float, default=9, help='of a part of gpu; the limits of its rows follow [9]')
    add('--peer', default='', help='a checkout of DPOT, for sizes with experts of MoE-POT')
    add('--device', default='auto', help='cpu, cuda or cuda:1 [CUDA if there is any]')
    add('--json', default='', help='file for the last line')
    args = parser.parse_args()
    samples, rounds = DEFAULTS.get(args.command, (8, 10))
    args.batch_size = samples if args.batch_size is None else args.batch_size
    args.repeats = rounds if args.repeats is None else args.repeats
    if args.command != 'gpu':
        args.size, args.steps = args.size or 'tiny', 500 if args.steps is None else args.steps
    numbers = {name: getattr(args, name) for name in ('repeats', 'steps', 'batch_size')}
    configs.at_least(1, **{name: number for name, number in numbers.items() if number is not None})
    if args.json:
        files.writable('json', args.json, ('.json',))
    tables = COMMANDS[args.command](args)                           # fills in flags whose default is None
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    results = {'machine': f'{machine}, {torch.get_num_threads()} CPU threads, PyTorch {torch.__version__}',
               **flags(args)}
    print(results['machine'])
    for title, rows in ({'train step': tables} if args.command == 'count' else tables).items():
        rows = {name: {key: value for key, value in row.items() if key != 'output'} for name, row in rows.items()}
        print('', *terminal.table(title, rows, '.4g'), sep='\n')
    text = json.dumps(results | tables)
    if args.json:
        files.write(args.json, text)
    print(text)


if __name__ == '__main__':
    terminal.cli(main)
