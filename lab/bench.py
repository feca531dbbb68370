"""How fast this machine computes and reads, beside the plain network, other forms and peers.

    python -m lab.bench step                            forward pass and train step of `tiny`
    python -m lab.bench step --compile graphs           also the same compiled, and as CUDA graphs
    python -m lab.bench step --size nano --depth 24     of a network with other sizes
    python -m lab.bench step --peer paper FNO ../DPOT   also aotpot.py as printed, other networks
    python -m lab.bench latency --size small            a forward pass at batch 1
    python -m lab.bench optimizer --size mini           a step of Muon, AdamW and torch.optim.Muon
    python -m lab.bench read --batch_size 20            a batch of windows, from a file and memory

What is compared takes turns, so that the ratio of two times hardly depends on what else the machine
does. On a GPU that has bf16, our networks take it. A --peer is `paper`, a network of
nets/baselines.py, or a checkout of github.com/HaoZhongkai/DPOT, for sizes with experts of
github.com/haiyangxin/MoEPOT, which need einops.
"""
import dataclasses
import importlib
import itertools
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import configs
import data
from nets import experts
from nets.baselines import BASELINES
from nets.build import build, optimizer_of
from nets.muon import Muon
from runtime import distributed, files, terminal

WARMUP = 2                                                  # rounds, which record a CUDA graph
FORMS = {'off': ('',), 'on': ('', ' compiled'), 'graphs': ('', ' compiled', ' graph')}  # --compile


def peer_network(folder, config):
    """The network of the same sizes in the code of DPOT or MoE-POT, which takes (B, H, W, T, C)."""
    sys.path.insert(0, str(Path(folder).absolute()))
    file, name = ('moepot', 'MoEPOTNet') if config.experts else ('dpot', 'DPOTNet')
    with files.naming(f'--peer {folder}', 'the code of the peer cannot be imported', ImportError):
        network = getattr(importlib.import_module(f'models.{file}'), name)
    del sys.path[0]                                                     # it has a train.py, too
    for module in [module for module in sys.modules if module.partition('.')[0] == 'models']:
        del sys.modules[module]                                     # of this peer, not of the next
    return network(
        img_size=config.resolution[0], patch_size=config.patch, mixing_type='afno',
        in_channels=config.channels, out_channels=config.channels, in_timesteps=config.frames,
        out_timesteps=1, n_blocks=config.heads, embed_dim=config.width,
        out_layer_dim=config.out_width, depth=config.depth, modes=config.modes,
        mlp_ratio=config.mlp / config.width, n_cls=12, normalize=False, act='gelu',
        time_agg='exp_mlp')


def passes(kind, args, config, device):
    """Yield the name of each network and a function that runs its 'forward' pass without gradients,
    or both passes, a 'train step'.
    """
    training = kind == 'train step'
    shape = args.batch_size, config.frames, *config.resolution, config.channels
    names = [block + form for form in FORMS[args.compile] for block in ('aot', 'plain')]
    for name in names + args.peer:
        first, *mode = [name] if name in args.peer else name.split()    # a folder may have blanks
        torch.manual_seed(0)
        u = torch.randn(shape, device=device)
        ours = first in ('aot', 'plain', 'paper')
        if ours:
            block = config
            if first == 'plain':
                lacking = {field: getattr(configs.ModelConfig, field)
                           for field in configs.OF_THE_STREAMS}
                block = dataclasses.replace(config, residual='plain', **lacking)
            model = build(block, 'paper' if first == 'paper' else 'fast')
        elif name in BASELINES:
            model = build(configs.override(configs.model(args.size, network=name), args))
        else:
            model = peer_network(name, config)
            u = u.permute(0, 2, 3, 1, 4).contiguous()
        model = model.to(device).train(training)
        if mode:
            model.compile(mode='reduce-overhead' if mode == ['graph'] else 'default')

        def run(model=model, u=u, bf16=ours and args.dtype == 'bf16'):
            with (torch.autocast(device.type, torch.bfloat16, enabled=bf16),
                  torch.set_grad_enabled(training)):
                prediction = model(u)
            if training:
                prediction = prediction[0] if isinstance(prediction, tuple) else prediction
                loss = prediction.float().square().mean() + experts.balance_loss(model)
                loss.backward()
                model.zero_grad()
        yield name, run


def optimizer_steps(kind, args, config, device):
    """Yield names of optimizers and their steps, of two for the parameters of two axes alone."""
    of_torch = ['torch.optim.Muon'] if hasattr(torch.optim, 'Muon') else []
    for name in ['muon', 'adamw', 'muon, 2-D', *of_torch]:
        model = build(config).to(device)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        if name in of_torch:
            optimizer = torch.optim.Muon(matrices, lr=1e-3)
        elif name == 'muon, 2-D':
            optimizer = Muon({'matrix': matrices}, [], lr=1e-3, half=args.dtype == 'bf16')
        else:
            recipe = configs.recipe(args.size, optimizer=name)
            optimizer = optimizer_of(model, recipe, device, args.dtype)
        yield name, optimizer.step


def batches_read(kind, args, config, device):
    """Yield names and functions: a batch of windows from a file, and as copies from the memory."""
    T = config.frames
    u = np.zeros((16, T + 11, *config.resolution, config.channels), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        data.write(f'{folder}/made', u, u[:1])
        dataset = data.Trajectories(folder, 'made', 'train', T, config.channels)
    windows = data.Windows([dataset], config, [1], seed=0)
    numbers = data.numbers_of_rank(itertools.count(), args.batch_size)

    def copies():
        drawn = map(windows.draw, next(numbers))
        return np.stack([u[i, first:first + T + 1] for _, i, first, _ in drawn])
    yield 'file', lambda: windows[next(numbers)]
    yield 'memory', copies


KINDS = {                       # {command: {what is measured: what yields the functions}}
    'step': {'forward': passes, 'train step': passes},
    'latency': {'forward': passes},
    'optimizer': {'optimizer step': optimizer_steps},
    'read': {'batch': batches_read}}


def compare(kind, functions, args, config, device):
    """{name: {what: number}}: the median times of functions, and those of ratios to others."""
    cuda = device.type == 'cuda'
    calls = {}
    rows = {}
    for name, call in functions(kind, args, config, device):
        call()                                             # in which a compiled network is compiled
        calls[name] = call
        rows[name] = {}
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
            call()
            rows[name] = {'peak MB': (torch.cuda.max_memory_allocated(device) - held) / 1e6}
    times = {name: [] for name in calls}                                # milliseconds
    for _ in terminal.Progress(range(WARMUP + args.repeats), desc='measuring', leave=False):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if cuda:
                torch.cuda.synchronize(device)
            times[name].append(1000 * (time.perf_counter() - start))
    times = {name: np.array(of_name[WARMUP:]) for name, of_name in times.items()}
    for name, row in rows.items():
        row['ms'] = np.median(times[name])
        row |= {f'of {other}': np.median(times[name] / times[other]) for other in times}
    return rows


def main():
    parser = terminal.Parser(description=__doc__)
    add = parser.add_argument
    add('command', choices=KINDS, help='what is measured, see above')
    add('--size', default='tiny', choices=list(configs.SIZES), help='preset of the network [tiny]')
    add('--batch_size', type=int, help='samples [8; latency 1]')
    add('--compile', default='off', choices=FORMS,
        help='on: also ours, compiled; graphs: also as CUDA graphs [off]')
    add('--repeats', type=int, help='rounds [10; latency 50, and 1200 in the paper]')
    add('--peer', default=[], nargs='+', metavar='X', help='other networks that take turns')
    add('--device', default='auto', help='cpu, cuda or cuda:1 [CUDA if there is any]')
    parser.add(configs.model('tiny'), 'model (tiny)', without=('network', 'residual'))
    args = parser.parse_args()
    if args.command in ('optimizer', 'read') and (args.peer or args.compile != 'off'):
        raise configs.InputError(f'--peer, --compile: for step and latency, not {args.command}')
    usual = dict(batch_size=8, repeats=10)
    if args.command == 'latency':
        usual = dict(batch_size=1, repeats=50)
    for name, number in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, number)
        configs.bounded(f'--{name}', getattr(args, name), least=1)
    processes = distributed.setup(args.device)
    device = processes.device
    args.dtype = distributed.precision('auto', processes)
    config = configs.override(configs.model(args.size), args)
    if args.command == 'step' and config.experts:           # of which the router has a BatchNorm
        configs.bounded('--batch_size', args.batch_size, least=2)
    tables = {kind: compare(kind, functions, args, config, device)
              for kind, functions in KINDS[args.command].items()}
    name = torch.cuda.get_device_name() if device.type == 'cuda' else platform.machine()
    machine = f'{name}, {torch.get_num_threads()} CPU threads, PyTorch {torch.__version__}'
    for title, rows in tables.items():
        print('', *terminal.table(title, rows, '.4g'), sep='\n')
    print(json.dumps({'machine': machine, **vars(args), **tables}))


if __name__ == '__main__':
    terminal.cli(main)
