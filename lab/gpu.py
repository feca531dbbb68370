"""What `python -m lab.bench gpu` runs: the rows of its four parts, and the checks among them.

    python -m lab.gpu sinkhorn      the kernel of sinkhorn.py against its loop
    python -m lab.gpu kernels       the kernels of nets/kernels.py against the paper's form
    python -m lab.gpu forms         loss and gradients: CPU, GPU, bf16 and compiled against the paper's form
    python -m lab.gpu resume        a run that is stopped half-way and resumed against one that is not
    python -m lab.gpu curve         the losses of a training against those of the same training on a CPU
    python -m lab.gpu syncs         how often the host waits for the GPU within a training step
    python -m lab.gpu profile       launches of a training step, and the share of its time in which the GPU works
    python -m lab.gpu training      a training with its log

Trainings run as train.py does them, on the twelve datasets of the paper in synthetic form. A check prints each result
as a line of JSON when it has it, and ends with exit code 1 if a result has "ok": false.
"""
import dataclasses
import json
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import configs
from configs import InputError

import numpy as np
import torch

import data
import nets
import sinkhorn as sinkhorn_file
import train as training
from nets import kernels as kernels_file
from runtime import distributed, terminal
from runtime.checkpoint import read, read_log


def rows(args):
    """{row: (its limit in seconds, the arguments of python)} of the part args.part, the most important row first."""
    sizes, most, batch = [args.size] if args.size else ['tiny', 'small', 'medium'], args.steps or 1000, args.batch_size
    place = ['--device', args.device, *(['--resolution', args.resolution] if args.resolution else [])]
    repeats = ['--repeats', args.repeats] if args.repeats else []

    def check(name, size=sizes[0], samples=batch, steps=40):
        return ['-m', 'lab.gpu', name, '--size', size, '--batch_size', samples, '--steps', min(steps, most), *place]

    def measure(name, *flags, size=sizes[0]):
        return ['-m', 'lab.bench', name, '--size', size, *place, *repeats, *flags]
    if args.part == 'correctness':
        return {'versions': (60, ['-m', 'torch.utils.collect_env']),
                'sinkhorn': (60, check('sinkhorn')), 'kernels': (120, check('kernels')),
                'tests': (180, ['-m', 'pytest', '-q', '-rs', '-k', 'cuda']),
                'forms': (180, check('forms')), 'syncs': (90, check('syncs')), 'resume': (120, check('resume')),
                'curve': (180, check('curve', 'nano', min(6, batch), 300))}
    if args.part == 'eager':
        peer = ['--peer', Path(args.peer).absolute()] if args.peer else []
        return {f'step {sizes[0]}': (120, measure('step', '--batch_size', batch, '--no-compile', *peer)),
                'profile': (120, check('profile')),
                **{f'step {size}': (150, measure('step', '--batch_size', batch, '--no-compile', size=size))
                   for size in sizes[1:]}}
    if args.part == 'compiled':
        memory = ['step', '--train', '--no-compile', '--repeats', 1]
        return {**{f'step {size}': (150, measure('step', '--batch_size', batch, '--compile', '--train', size=size))
                   for size in sizes},
                **{f'memory {size} {samples}': (90, measure(*memory, '--batch_size', samples, size=size))
                   for size in sizes for samples in (batch, 8 * batch)}}
    return {**{f'sinkhorn {count}': (60, measure('sinkhorn', '--batch_size', count)) for count in (20, 2048)},
            'training': (240, check('training', samples=8 * batch, steps=1000)),
            'rollout': (180, measure('rollout', '--steps', min(500, most))),
            **{f'latency {size}': (180, measure('latency', '--compile', size=size)) for size in sizes}}


# ------------------------------------------------------------------------------------------------ kernels and forms

def sinkhorn(args):
    """Values and gradients of the kernel and of the loop for 4 x 4 matrices."""
    if args.device.type != 'cuda' and not sinkhorn_file.INTERPRET or not sinkhorn_file.TRITON:
        raise InputError('sinkhorn: needs CUDA and Triton')
    for count in (1, 16, 20, 160):
        z, upstream = torch.randn(2, count, 4, 4, device=args.device)
        z = (2 * z).requires_grad_()
        loop, kernel = ((P.detach(), torch.autograd.grad(P, z, upstream)[0]) for P in (
            sinkhorn_file.sinkhorn(z, impl=impl) for impl in ('torch', 'triton')))
        apart = [(a - b).abs().max().item() for a, b in zip(loop, kernel)]
        yield f'{count} matrices', {'values apart': apart[0], 'gradients apart': apart[1],
                                    'ok': all(difference < 1e-4 for difference in apart)}


def example(config, samples):
    """The paper's form of a network with mappings far from their start, an input and a target, all in fp64 on the CPU.

    As it starts, all streams are equal, so that the gradients of T are nothing but rounding.
    """
    torch.manual_seed(0)
    paper = nets.build(config, 'paper').double()
    for name, parameter in paper.named_parameters():
        if 'mappings' in name or name == 'gate':
            parameter.data.add_(torch.rand_like(parameter), alpha=0.3)
    u = torch.randn(samples, config.frames + 1, *config.resolution, config.channels, dtype=torch.float64)
    return paper, u[:, :-1], u[:, -1]


def gradients(network, u, target, dtype='fp32'):
    """(loss, {parameter: its gradient in fp64 on the CPU}) of the relative error of a network."""
    with torch.autocast(u.device.type, torch.bfloat16, enabled=dtype == 'bf16'):
        prediction = network(u)
    loss = training.relative_l2(prediction.to(target.dtype), target).mean()
    loss.backward()
    return loss.item(), {name: parameter.grad.double().cpu() for name, parameter in network.named_parameters()}


def against(paper, u, target, expected, device, dtype='fp32', compiled=False):
    """The form of nets/fast.py on a device against (loss, gradients) of the paper's form, as a row.

    Gradients that are 0 but for rounding are left out: T and a do nothing while all streams are equal.
    """
    network = nets.build(paper.config)
    network.load_state_dict(paper.state_dict())
    network.to(device).one_backward = True
    if compiled:
        network.compile()
    loss, grads = gradients(network, u.float().to(device), target.float().to(device), dtype)
    least = 1e-9 * sum(grad.square().sum() for grad in expected[1].values()).sqrt()
    cosines = {name: torch.cosine_similarity(grads[name].flatten(), grad.flatten(), 0, 1e-300).nan_to_num(-1).item()
               for name, grad in expected[1].items() if grad.norm() > least}
    worst, apart = sorted(cosines, key=cosines.get)[:3], abs(loss / expected[0] - 1)
    limits = (1e-4, 0.9999) if dtype == 'fp32' else (1e-2, 0.99)
    return {'loss': loss, 'relative difference': apart, 'tensors': len(cosines), 'left out': len(grads) - len(cosines),
            'lowest cosines': {name: cosines[name] for name in worst},
            'ok': apart < limits[0] and cosines[worst[0]] > limits[1]}


def kernels(args):
    """nets/kernels.py in fp32 against the paper's form, for several numbers of streams."""
    for streams in (4, 1, 3, 8):
        config = dataclasses.replace(args.config, streams=streams)
        paper, u, target = example(config, args.batch_size)
        if not kernels_file.usable(u.float().to(args.device), config):
            raise InputError('kernels: needs CUDA and Triton')
        expected = gradients(paper.to(args.device), u.to(args.device), target.to(args.device))
        yield f'{streams} streams', against(paper, u, target, expected, args.device)


def forms(args):
    """The network in fp32 on the CPU and in every form on the device against the paper's form in fp64 on the CPU."""
    paper, u, target = example(args.config, args.batch_size)
    expected = gradients(paper, u, target)
    yield 'paper, cpu fp64', {'loss': expected[0]}
    cases = [(args.device, dtype, compiled) for compiled in (False, True) for dtype in ('fp32', 'bf16')]
    for device, dtype, compiled in dict.fromkeys([(torch.device('cpu'), 'fp32', False), *cases]):
        yield (f'{device.type} {dtype}' + ' compiled' * compiled,
               against(paper, u, target, expected, device, dtype, compiled))


# ------------------------------------------------------------------------------------------------ trainings

def train(args, out, *flags, steps, at=None, device=None):
    """train.py in this process; at[n]() is called when its step n, counted from 1, begins. Returns its folder.

    Every field of the data is a wave that travels, each trajectory in its own direction.
    """
    folder, random, one_cycle = args.folder / 'data', np.random.default_rng(0), training.one_cycle
    for name, source in configs.PRETRAINING.items() if not folder.exists() else ():
        n, C = min(source.resolution, max(args.config.resolution)), len(source.channels)
        x, t = np.linspace(0, 2 * np.pi, n, endpoint=False)[:, None], np.arange(args.config.frames + 4)
        k, l, speed, phase = random.integers(1, 4, (4, 9, 1, 1, 1, C))
        u = np.cos(k * x[:, None] + l * x + 0.1 * speed * t[:, None, None, None] + phase)     # (9, frames, n, n, C)
        data.write(folder / name, u[:8], u[8:], channels=source.channels, static=source.static)

    def schedule(step, *rest):
        (at or {}).get(step + 1, lambda: None)()
        return one_cycle(step, *rest)
    command = ['train.py', '--size', args.size, '--resolution', configs.show(args.config.resolution), '--data', folder,
               '--batch_size', args.batch_size, '--steps', steps, '--device', device or args.device,
               '--out', args.folder / out, *flags]
    with mock.patch.object(training, 'one_cycle', schedule), mock.patch.object(sys, 'argv', [*map(str, command)]):
        training.main()
    return args.folder / out


def resume(args):
    """Weights of a run of --steps steps and of one that SIGTERM stops half-way and that is then resumed."""
    whole = train(args, 'whole', steps=args.steps)
    try:
        train(args, 'halves', steps=args.steps, at={args.steps // 2: lambda: signal.raise_signal(signal.SIGTERM)})
    except SystemExit as stop:
        yield 'stopped', {'exit code': stop.code, 'step': read(args.folder / 'halves/last.pt')['step']}
    halves = train(args, 'halves', '--resume', steps=args.steps)
    one, other = (read(out / 'last.pt')['model'] for out in (whole, halves))
    apart = {name: ((one[name] - other[name]).norm() / one[name].norm().clamp_min(1e-30)).item() for name in one}
    worst = max(apart, key=apart.get)
    yield 'weights', {'tensors': len(one), 'bitwise equal': sum(torch.equal(one[name], other[name]) for name in one),
                      'largest relative difference': apart[worst], 'of': worst, 'ok': apart[worst] < 1e-3}


def curve(args):
    """The losses of a training in fp32 on the CPU and on the device, whose noise on the input differs."""
    every, logs = max(1, args.steps // 15), []
    for device in ('cpu', args.device):
        out = train(args, f'curve{len(logs)}', '--log_every', every, '--dtype', 'fp32', steps=args.steps, device=device)
        logs.append({line['step']: line['loss'] for line in read_log(out / 'log.jsonl')})
    for step, loss in logs[0].items():
        yield f'step {step}', {'loss on a CPU': loss, 'loss here': logs[1][step]}
    one, other = (np.mean([*log.values()][-len(log) // 3:]) for log in logs)
    yield 'last third', {'ratio': other / one, 'ok': bool(0.9 < other / one < 1.1)}


def syncs(args):
    """The calls for which the host waits for the GPU in four steps of the loop."""
    if args.device.type != 'cuda':
        raise InputError('syncs: needs CUDA')
    mode = torch.cuda.set_sync_debug_mode
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        train(args, 'syncs', steps=8, at={3: lambda: mode('warn'), 7: lambda: mode('default')})
    places = Counter(f'{Path(item.filename).name}:{item.lineno}' for item in caught
                     if 'called a synchronizing' in str(item.message))
    yield 'a step', {'syncs': sum(places.values()) / 4}
    for place, count in places.most_common():
        yield place, {'syncs': count / 4}


def profile(args):
    """Launches of a step, and the time in which the GPU works over that of a step before the profiler slows it.

    On a CPU these are PyTorch's operators instead.
    """
    cuda, profiler, times, steps = args.device.type == 'cuda', torch.profiler.profile(), [], 5

    def mark(then=lambda: None):
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        then()
    train(args, 'profile', steps=4 + 2 * steps,
          at={4: mark, 4 + steps: lambda: mark(profiler.start), 4 + 2 * steps: lambda: mark(profiler.stop)})
    profiler.export_chrome_trace(str(args.folder / 'trace.json'))
    kinds = ('kernel', 'gpu_memcpy', 'gpu_memset') if cuda else ('cpu_op',)
    events = [event for event in json.loads((args.folder / 'trace.json').read_text())['traceEvents']
              if event.get('cat') in kinds]
    busy, until, names = 0, 0, Counter()
    for event in sorted(events, key=lambda event: event['ts']):                     # in microseconds; some overlap
        end = event['ts'] + event['dur']
        busy, until = busy + max(0, end - max(until, event['ts'])), max(until, end)
        names[event['name'][:60]] += event['dur'] / 1000 / steps
    ms = 1000 * (times[1] - times[0]) / steps
    yield 'a step', {'launches' if cuda else 'operators': len(events) / steps, 'ms': ms, 'busy ms': busy / 1000 / steps,
                     'share': busy / 1000 / steps / ms}
    for name, total in names.most_common(8):
        yield name, {'ms': total}


def training_log(args):
    """A training, compiled on a GPU, with the lines of its log."""
    compiled = ['--compile'] * (args.device.type == 'cuda')
    out = train(args, 'training', '--log_every', max(1, args.steps // 20), *compiled, steps=args.steps)
    for line in read_log(out / 'log.jsonl'):
        yield f'step {line.pop("step")}', line


CHECKS = {'sinkhorn': sinkhorn, 'kernels': kernels, 'forms': forms, 'resume': resume, 'curve': curve, 'syncs': syncs,
          'profile': profile, 'training': training_log}


def main():
    parser = terminal.Parser(description=__doc__)
    add = parser.add_argument
    add('check', choices=CHECKS)
    add('--size', default='tiny', choices=list(configs.SIZES), help='preset of the network [tiny]')
    add('--resolution', help="model grid, 128 or 96x192 [the preset's]")
    add('--batch_size', type=int, default=20, help='samples [20]')
    add('--steps', type=int, default=40, help='of resume, curve and training [40]')
    add('--device', default='auto', help='cpu, cuda or cuda:1 [CUDA if there is any]')
    args = parser.parse_args()
    configs.at_least(1, batch_size=args.batch_size, steps=args.steps)
    args.config = configs.model(args.size, **({'resolution': args.resolution} if args.resolution else {}))
    args.device, passed = distributed.setup(args.device).device, True
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        for name, row in CHECKS[args.check](args):
            print(json.dumps({name: row}), flush=True)
            passed = passed and row.get('ok', True)
    sys.exit(not passed)



if __name__ == '__main__':
    terminal.cli(main)
