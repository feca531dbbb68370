"""The rows of the parts of `python -m lab.bench gpu`, and those commands of lab/bench.py that check a training.

Trainings run as train.py does them, on the twelve datasets of the paper in synthetic form.
"""
import dataclasses
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import configs
import data
import train
from nets import fast
from nets.build import build
from runtime.checkpoint import read

PARTS = 'correctness', 'speed'


def rows(args):
    """{row: (its limit in seconds, the arguments of python)} of the part args.part, the most important row first."""
    sizes = [args.size] if args.size else ['tiny', 'small', 'medium']
    peer = f'--peer {Path(args.peer).absolute()}' if args.peer else ''
    given = ' '.join(f'--{name} {getattr(args, name)}' for name in (
        'batch_size', 'device', 'resolution', 'repeats', 'steps') if getattr(args, name))
    bench = lambda command, size=sizes[0]: f'lab.bench {command} --size {size} {given}'
    if args.part == 'correctness':
        curve = bench('syncs --dtype fp32 --steps 300', 'nano')             # with the scores of that training
        table = {
            'versions': (60, 'torch.utils.collect_env'),
            'tests': (180, 'pytest -q -rs -k cuda'),
            'forms': (180, bench('forms')),
            'syncs': (60, bench('syncs')),
            'resume': (120, bench('resume')),
            'curve': (90, f'{curve} --batch_size 6'),
            'curve on the CPU': (90, f'{curve} --batch_size 6 --device cpu')}
    else:
        table = {
            f'step {sizes[0]}': (120, bench(f'step --no-compile {peer}')),
            **{f'step {size}': (150, bench('step --no-compile', size)) for size in sizes[1:]},
            'profile': (90, bench('profile')),
            **{f'step {size} as a graph': (150, bench('step --compile --graphs --train', size)) for size in sizes[:2]},
            'latency': (180, f'{bench("latency --compile")} --batch_size 1')}
    return {name: (limit, ['-m', *command.split()]) for name, (limit, command) in table.items()}


# ------------------------------------------------------------------------------------------------ forms

def forms(args, config, device):
    """Loss and gradients of nets/fast.py against aotpot.py in fp64: several numbers of streams, bf16, compiled."""
    table = {}
    cpu = torch.device('cpu')
    for streams, place, dtype, compiled in (
            (4, cpu, 'fp32', False), (4, device, 'bf16', False), *((S, device, 'fp32', False) for S in (4, 1, 3, 8)),
            (4, device, 'fp32', True), (4, device, 'bf16', True)):
        torch.manual_seed(0)
        config = dataclasses.replace(config, streams=streams)
        paper = build(config, 'paper').double().to(device)
        network = build(config).to(place)
        for name, parameter in paper.named_parameters():
            if 'mappings' in name or name == 'gate':        # at their start the gradients of T are but rounding
                parameter.data.add_(torch.rand_like(parameter), alpha=0.3)
        network.load_state_dict(paper.state_dict())
        network.one_backward = True
        if compiled:
            network.compile()
        u = torch.randn(args.batch_size, config.frames + 1, *config.resolution, config.channels, dtype=torch.float64)
        single = u.float().to(place)
        name = f'{place.type} {dtype}, {streams} streams'
        if compiled:
            name += ', compiled'
        table[name] = {**compare(gradients(network, single, dtype), gradients(paper, u.to(device)), dtype),
                       'kernels': fast.usable(single, config)}
        print(f'{name}: {table[name]}', flush=True)
    return {'forms': table}


def gradients(network, u, dtype='fp32'):
    """(loss, {parameter: its gradient in fp64 on the CPU}) of the relative error of the last frame of u."""
    with torch.autocast(u.device.type, torch.bfloat16, enabled=dtype == 'bf16'):
        prediction = network(u[:, :-1])
    loss = train.relative_l2(prediction.to(u.dtype), u[:, -1]).mean()
    loss.backward()
    return loss.item(), {name: parameter.grad.double().cpu() for name, parameter in network.named_parameters()}


def compare(results, expected, dtype):
    """How far two results of `gradients` are apart, as a row. Gradients that are 0 but for rounding are left out."""
    (loss, grads), (exact, references) = results, expected
    least = 1e-9 * sum(grad.square().sum() for grad in references.values()).sqrt()
    cosines = {name: torch.cosine_similarity(grads[name].flatten(), grad.flatten(), 0, 1e-300).nan_to_num(-1).item()
               for name, grad in references.items() if grad.norm() > least}
    worst = min(cosines, key=cosines.get)
    apart = abs(loss / exact - 1)
    limits = (1e-4, 0.9999) if dtype == 'fp32' else (1e-2, 0.95)
    return {'loss apart': apart, 'tensors': len(cosines), 'lowest cosine': cosines[worst], 'of': worst,
            'ok': apart < limits[0] and cosines[worst] > limits[1]}


# ------------------------------------------------------------------------------------------------ trainings

def waves(folder, config, names=tuple(configs.PRETRAINING)):
    """Write datasets of the paper with fields of travelling waves, 9 trajectories, each in its own direction."""
    random = np.random.default_rng(0)
    for name in names:
        source = configs.PRETRAINING[name]
        n = min(source.resolution, max(config.resolution))
        C = len(source.channels)
        x = np.linspace(0, 2 * np.pi, n, endpoint=False)[:, None]
        t = np.arange(config.frames + 4)
        k, l, speed, phase = random.integers(1, 4, (4, 9, 1, 1, 1, C))
        u = np.cos(k * x[:, None] + l * x + 0.1 * speed * t[:, None, None, None] + phase)     # (9, frames, n, n, C)
        data.write(Path(folder, name), u[:8], u[8:], channels=source.channels, static=source.static)


def training(args, config, out, *flags):
    """Run train.py in this process on the `waves` beside the folder `out`, and return that folder."""
    if not (out.parent / 'data').exists():
        waves(out.parent / 'data', config)
    command = ['train.py', '--size', args.size, '--resolution', args.resolution, '--batch_size', args.batch_size,
               '--steps', args.steps, '--device', args.device, '--dtype', args.dtype,
               '--data', out.parent / 'data', '--out', out, *flags]
    with mock.patch.object(sys, 'argv', [*map(str, command)]):
        train.main()
    return out


@contextmanager
def at_steps(calls):
    """Within the block, a training calls calls[n]() before its step n, counted from 0."""
    one_cycle = train.one_cycle

    def schedule(step, *rest):
        calls.get(step, lambda: None)()
        return one_cycle(step, *rest)
    with mock.patch.object(train, 'one_cycle', schedule):
        yield


def resume(args, config, device):
    """The weights of a run, and of one that SIGTERM stops half-way and that is then resumed."""
    with tempfile.TemporaryDirectory() as folder:
        whole = training(args, config, Path(folder, 'whole'))
        halves = Path(folder, 'halves')
        with at_steps({args.steps // 2: lambda: signal.raise_signal(signal.SIGTERM)}), suppress(SystemExit):
            training(args, config, halves)
        stopped = read(halves)['step']
        one, other = (read(out)['model'] for out in (whole, training(args, config, halves, '--resume')))
    apart = max(((one[name] - other[name]).norm() / one[name].norm().clamp_min(1e-30)).item() for name in one)
    equal = sum(torch.equal(one[name], other[name]) for name in one)
    ok = stopped < args.steps and apart < 1e-3
    return {'resume': {'weights': {'stopped at': stopped, 'bitwise equal': equal, 'of': len(one),
                                   'largest difference': apart, 'ok': ok}}}


def syncs(args, config, device):
    """The calls for which the host waits for the GPU, for each of four steps of a training, below its scores."""
    mode = torch.cuda.set_sync_debug_mode if device.type == 'cuda' else lambda name: None
    with (tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as messages,
          at_steps({3: lambda: mode('warn'), 7: lambda: mode('default')})):
        warnings.simplefilter('always')
        training(args, config, Path(folder, 'run'))
    places = Counter(f'{Path(message.filename).name}:{message.lineno}' for message in messages
                     if 'called a synchronizing' in str(message.message))
    return {'syncs': {'all': {'a step': places.total() / 4},
                      **{place: {'a step': count / 4} for place, count in places.most_common()}}}


def profile(args, config, device):
    """Launches of a training step and the time for which the GPU works; on a CPU those of PyTorch's operators."""
    cuda = device.type == 'cuda'
    times = []
    profiler = torch.profiler.profile()
    last = args.steps - 1

    def mark(then=lambda: None):
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        then()
    with (tempfile.TemporaryDirectory() as folder,
          at_steps({last - 8: mark, last - 4: lambda: mark(profiler.start), last: lambda: mark(profiler.stop)})):
        training(args, config, Path(folder, 'run'))
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    ms = 250 * (times[1] - times[0])
    events = [event for event in profiler.key_averages() if event.device_type == kind]
    busy = {event.key[:60]: (event.self_device_time_total if cuda else event.self_cpu_time_total) / 4000
            for event in events}
    step = {'launches': sum(event.count for event in events) / 4, 'ms': ms, 'busy ms': sum(busy.values())}
    return {'profile': {'a step': {**step, 'share': step['busy ms'] / ms},
                        **{name: {'busy ms': busy[name]} for name in sorted(busy, key=busy.get)[:-9:-1]}}}
