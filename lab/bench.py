"""Speed, measured on the machine where it runs: tables, and as one last line of JSON the numbers with all flags.

    python -m lab.bench step --peer ../DPOT     train step and forward pass of `tiny`, beside plain and DPOT's code
    python -m lab.bench step --size moe-tiny --peer ../MoE-POT              the same with experts, beside MoE-POT's code
    python -m lab.bench latency                 single steps as the paper times them, eager and compiled
    python -m lab.bench loader                  training samples a second, by the number of threads that read
    python -m lab.bench count --size small      launches, bytes, memory and host time of a train step, without a GPU
    python -m lab.bench gpu --part correctness  what a page about a GPU needs, in parts of nine minutes: docs/speed.md

--peer is a checkout of github.com/HaoZhongkai/DPOT, with experts of github.com/haiyangxin/MoEPOT; both need einops.
"""
import argparse
import dataclasses
import importlib
import json
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
from unittest import mock

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import configs
import data
from configs import InputError
from lab import count, gpu
from nets import experts
from nets.build import build
from runtime import distributed, files, runs, terminal


def paired(calls, repeats, device, inner=1, warmup=1):
    """Call the functions in the dict `calls` in turn, each `inner` times in a round: {name: seconds (repeats,)}."""
    cuda = device.type == 'cuda'
    # with one thread this process's CPU time, which other processes disturb little
    clock = time.process_time if torch.get_num_threads() == 1 and not cuda else time.perf_counter
    seconds = {name: [] for name in calls}
    for _ in terminal.Progress(range(warmup + repeats), desc='measuring', leave=False):
        for name, call in calls.items():
            start = clock()
            for _ in range(inner):
                call()
            if cuda:
                torch.cuda.synchronize(device)
            seconds[name].append((clock() - start) / inner)
    return {name: np.array(values[warmup:]) for name, values in seconds.items()}


def network(name, args, config, device):
    """(module, random input) of our network with residual 'aot' or 'plain', or of the code in --peer."""
    torch.manual_seed(0)
    u = torch.randn(args.batch_size, config.frames, *config.resolution, config.channels, device=device)
    if name != 'peer':
        return build(dataclasses.replace(config, residual=name), args.form).to(device), u
    try:
        with mock.patch.object(sys, 'path', [str(Path(args.peer).absolute()), *sys.path]):      # it has a train.py, too
            module = importlib.import_module('models.moepot' if config.experts else 'models.dpot')
    except ImportError as error:
        raise InputError(f'--peer {args.peer}: {error}; see --help for the checkout that it takes') from None
    peer = (module.MoEPOTNet if config.experts else module.DPOTNet)(
        img_size=config.resolution[0], patch_size=config.patch, mixing_type='afno', in_channels=config.channels,
        out_channels=config.channels, in_timesteps=config.frames, out_timesteps=1, n_blocks=config.heads,
        embed_dim=config.width, out_layer_dim=config.out_width, depth=config.depth, modes=config.modes,
        mlp_ratio=config.mlp / config.width, n_cls=12, normalize=False, act='gelu', time_agg='exp_mlp')
    return peer.to(device), u.permute(0, 2, 3, 1, 4).contiguous()


def function(kind, name, args, config, device, compiled=False, mode='default'):
    """A function that computes a 'forward' pass, without gradients, or the passes of a 'train step'."""
    module, u = network(name, args, config, device)
    module.train(kind == 'train step')
    module.one_backward = ours = name != 'peer'                         # as train.py sets it
    if compiled and ours:                                               # a peer's code runs as it is: eager, in fp32
        module.compile(mode=mode)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == 'bf16' and ours)

    def forward():
        with torch.no_grad(), autocast:
            module(u)

    def step():
        module.zero_grad()
        with autocast:
            prediction = module(u)
        loss = (prediction if ours else prediction[0]).float().square().mean()
        if config.experts:
            loss = loss + (experts.balance_loss(experts.shares(module), len(u)) if ours else prediction[2])
        loss.backward()
    return forward if kind == 'forward' else step


def flops(call):
    """Floating-point operations of one more call in eager mode: of products and convolutions, but not of FFTs."""
    with torch.compiler.set_stance('force_eager'), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def compare(calls, args, device, **options):
    """Rows of times, ratios to plain and to a peer's code (medians over the rounds), samples/s and GFLOP of `calls`."""
    rows = {}
    for name, call in calls.items():
        start = time.monotonic()
        call()                                      # in which a compiled network is compiled
        rows[name] = {'first s': time.monotonic() - start}
    rounds = paired(calls, args.repeats, device, **options)
    for name, seconds in rounds.items():
        others = {'plain': 'plain compiled' if name.endswith('compiled') else 'plain', 'peer': 'peer'}
        ratios = {f'of {key}': np.median(seconds / rounds[other]) for key, other in others.items() if other in rounds}
        rows[name] |= {'ms': 1000 * np.median(seconds), 'mean ms': 1000 * seconds.mean(), **ratios,
                       'samples/s': args.batch_size / np.median(seconds), 'GFLOP': flops(calls[name]) / 1e9}
    return rows


def peak_memory(name, args, config):
    """In a process of its own: the peak memory of train steps in MB, on a CPU without that of the network as built."""
    device = distributed.setup(args.device).device
    step = function('train step', name, args, config, device)
    built = distributed.memory_mb(device) if device.type == 'cpu' else 0
    step()
    return distributed.memory_mb(device) - built


def bench_step(args, config, device):
    """Forward pass and train step of AOT, our plain network and a peer's code of the same sizes, in alternation."""
    names = ['aot', 'plain'] + (['peer'] if args.peer else [])
    mode = 'reduce-overhead' if args.graphs else 'default'
    tables = {}
    for kind in ('forward', 'train step')[args.train:]:
        calls = {name: function(kind, name, args, config, device, args.compile, mode) for name in names}
        tables[kind] = compare(calls, args, device, inner=10 if device.type == 'cuda' else 1)
    for name in names:
        with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:                 # which does not fork
            tables['train step'][name]['peak MB'] = pool.submit(peak_memory, name, args, config).result()
    return tables


def bench_latency(args, config, device):
    """A single step at batch 1, eager and, with --compile, compiled, on a GPU as a CUDA graph (paper, App. C.12)."""
    cuda = device.type == 'cuda'
    args.repeats = args.repeats or (1200 if cuda else 50)       # the paper's number, which takes half an hour on a CPU
    names = ['aot', 'plain', 'peer'] if args.peer else ['aot', 'plain']
    calls = {name: function('forward', name, args, config, device) for name in names}
    for name in names[:2] if args.compile else ():
        calls[f'{name} compiled'] = function('forward', name, args, config, device, True, 'reduce-overhead')
    return {'latency': compare(calls, args, device, warmup=50 if cuda else 5)}


def bench_loader(args, config, device):
    """Samples/s that a training gets from files in the page cache, on its device, by the number of reading threads."""
    torch.set_num_threads(1)
    rows = {}
    names = args.datasets or list(configs.PRETRAINING)
    with tempfile.TemporaryDirectory() as folder:
        gpu.waves(folder, config, names)
        sets = [data.Trajectories(folder, name, 'train', config.frames, config.channels) for name in names]
        windows = data.Windows(sets, config.frames, seed=0, pinned=device.type == 'cuda')
        for threads in (0, 1, 2, 4):
            run = SimpleNamespace(workers=threads, accumulate=1)
            numbers = runs.batches_of_rank(0, args.repeats + 20, args.batch_size)       # the first 20 are warm-up
            batches = runs.Batches(windows, numbers, run, distributed.Processes(0, 1, device))
            for _ in range(20):
                next(batches)
            start = time.perf_counter()
            for _ in range(args.repeats):
                next(batches)
            seconds = time.perf_counter() - start
            rows[f'{threads} threads'] = args.repeats * args.batch_size / seconds
            batches.close()
    return {'samples/s': {'mixture': rows}}


def bench_count(args, config, device):
    """What a bf16 train step asks of a GPU and its host by lab/count.py, for AOT and our plain network."""
    rows = {}
    for name in ('aot', 'plain'):
        step = dataclasses.replace(config, residual=name), configs.recipe(args.size), args.batch_size
        rows[name] = {**count.train_step(*step), 'host_ms': count.host_ms(*step)}
    return {'train step': rows}


def limited(arguments, seconds, **environment):
    """Run Python in a process group for at most so many seconds: its 'exit code' or None, 'seconds' and 'output'."""
    start = time.monotonic()
    code = None
    with tempfile.TemporaryFile('w+', encoding='utf-8', errors='replace') as output:    # children may hold a pipe open
        process = subprocess.Popen([sys.executable, '-u', *map(str, arguments)], cwd=Path(__file__).parents[1],
                                   env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            with suppress(ProcessLookupError):                          # the children of a row that failed, too
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):                   # a GPU that hangs may keep it from ending
                process.wait(10)
        output.seek(0)
        text = output.read()
        if code is None:
            text += f'\nended after {seconds:.0f} s, its limit'
    return {'exit code': code, 'seconds': time.monotonic() - start, 'output': text.strip()}


def bench_gpu(args, config, device):
    """One part of lab/gpu.py, row after row: what fails or reaches its limit is noted, and the next row follows."""
    rows = {}
    until = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:           # for what rows that are killed leave, and Inductor's cache
        for name, (limit, arguments) in gpu.rows(args).items():
            print(f'\n== {name}: python {" ".join(map(str, arguments))}', flush=True)
            seconds = max(0, min(limit * args.minutes / 9, until - time.monotonic()))
            rows[name] = limited(arguments, seconds, TMPDIR=folder)
            print(rows[name]['output'][-3000:], flush=True)
            if args.json:                                           # what is done stays if a later row takes all down
                files.write(args.json, json.dumps({**vars(args), 'rows': rows}))
    return {'rows': rows}


COMMANDS = {        # and those of --batch_size, --repeats and --steps that are not 20, none and none
    'step': (bench_step, {'batch_size': 8, 'repeats': 10}),
    'latency': (bench_latency, {'batch_size': 1}),
    'loader': (bench_loader, {'repeats': 100}),
    'count': (bench_count, {}),
    'gpu': (bench_gpu, {}),
    'forms': (gpu.forms, {}),
    'resume': (gpu.resume, {'steps': 40}),
    'syncs': (gpu.syncs, {'steps': 8}),
    'profile': (gpu.profile, {'steps': 12})}


def main():
    parser = terminal.Parser(description=__doc__)
    add = parser.add_argument
    add('command', choices=COMMANDS)
    add('--size', choices=list(configs.SIZES), help='preset of the network [tiny; gpu: tiny, small and medium]')
    add('--resolution', help="model grid, 128 or 96x192 [the preset's]")
    add('--batch_size', type=int, help='samples [step 8, latency 1, else 20]')
    add('--form', default='fast', choices=('fast', 'paper'), help='of ours [fast: with exact rewrites]')
    add('--dtype', choices=('fp32', 'bf16'), help='of ours; bf16: autocast [fp32, on a GPU bf16]')
    add('--compile', action=argparse.BooleanOptionalAction, help='ours [on a GPU only]')
    add('--graphs', action='store_true', help='of step, with --compile: as a CUDA graph, launched at once')
    add('--train', action='store_true', help='of step the train step alone')
    add('--repeats', type=int, help='rounds [10; latency 1200 as in the paper, on a CPU 50]')
    add('--steps', type=int, help='of a training')
    add('--datasets', nargs='+', choices=list(configs.PRETRAINING), help="of loader [the paper's twelve]")
    add('--part', default='correctness', choices=gpu.PARTS, help='of gpu [correctness]')
    add('--minutes', type=float, default=9, help='of a part of gpu; the limits of its rows follow [9]')
    add('--peer', default='', help='a checkout of DPOT, for sizes with experts of MoE-POT')
    add('--device', default='auto', help='cpu, cuda or cuda:1 [CUDA if there is any]')
    add('--json', default='', help='file for the last line')
    args = parser.parse_args()
    command, defaults = COMMANDS[args.command]
    for name, default in {'batch_size': 20, 'repeats': None, 'steps': None, **defaults}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        else:
            configs.at_least(1, **{name: getattr(args, name)})
    if args.json:
        files.writable('json', args.json, ('.json',))
        files.read_json(args.json, 'command')
    config = device = None
    if args.command != 'gpu':                           # whose rows choose for themselves
        args.size = args.size or 'tiny'
        config = configs.model(args.size, **({'resolution': args.resolution} if args.resolution else {}))
        device = distributed.setup(args.device).device
        cuda = device.type == 'cuda'
        args.resolution = configs.show(config.resolution)
        args.dtype = args.dtype or ('bf16' if cuda else 'fp32')
        args.compile = cuda if args.compile is None else args.compile
    tables = command(args, config, device)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    machine += f', {torch.get_num_threads()} CPU threads, PyTorch {torch.__version__}'
    text = json.dumps({'machine': machine, **vars(args), **tables})
    for title, rows in tables.items():
        rows = {name: {key: value for key, value in row.items() if key != 'output'} for name, row in rows.items()}
        print('', *terminal.table(title, rows, '.4g'), sep='\n')
    if args.json:
        files.write(args.json, text)
    print(text)
    if any(row.get('ok') is False for rows in tables.values() for row in rows.values()):
        sys.exit(1)


if __name__ == '__main__':
    terminal.cli(main)
