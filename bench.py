"""Speed and precision, measured where it runs.

    python bench.py train                           five minutes of `tiny` at 128x128, bf16 and compiled, against fp32
    python bench.py train --size nano --resolution 64 --minutes 0.5 --no-compile           the same on a CPU

Generates the built-in mixture at --resolution if it is not in --data, then runs train.py itself: a short run in fp32
and one in bf16 with the same seed, whose losses are compared, and a long one in bf16. Prints a table, and the same
numbers as one last line of JSON.
"""
import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch

import aotpot
import configs
from configs import InputError

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


def bench_train(args):
    """bf16 against fp32: samples/s, memory, the losses of the first steps, the errors of the trained model."""
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
    return {'machine': machine(args.device), 'torch': str(torch.__version__), 'size': args.size,
            'parameters': aotpot.parameters(aotpot.load(Path(args.out) / 'long/last.pt')),
            'batch_size': args.batch_size, 'steps': steps, 'first_loss': log[0]['loss'], 'last_loss': log[-1]['loss'],
            'fp32_samples_per_s': rate(full), 'bf16_samples_per_s': rate(log), 'ratio': rate(log) / rate(full),
            'fp32_memory_mb': full[-1]['memory_mb'], 'bf16_memory_mb': log[-1]['memory_mb'],
            'data_wait': statistics.median(line['data_wait'] for line in log), 'skipped': log[-1]['skipped'],
            'largest_loss_difference': gap, 'one_step_fp32': errors['fp32'], 'one_step_bf16': errors['bf16']}


def main():
    parser = configs.Parser(description=__doc__)
    commands = parser.add_subparsers(dest='command', required=True, parser_class=configs.Parser)
    command = commands.add_parser('train', help=bench_train.__doc__, description=bench_train.__doc__)
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
    args = parser.parse_args()
    if args.minutes <= 0 or args.short < 20:
        raise InputError('--minutes must be positive and --short at least 20')
    results = bench_train(args)
    for name, value in results.items():
        if isinstance(value, dict):
            value = ', '.join(f'{dataset} {error:.4f}' for dataset, error in value.items())
        print(f'{name:<26}{value:.4g}' if isinstance(value, float) else f'{name:<26}{value}')
    print(json.dumps(results))


if __name__ == '__main__':
    configs.cli(main)
