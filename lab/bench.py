"""How fast the network is on this machine, beside the plain one and the code of DPOT or MoE-POT.

    python -m lab.bench step                        the forward pass and the train step of `tiny`
    python -m lab.bench step --compile graphs       also the same compiled, and as CUDA graphs
    python -m lab.bench latency --size small --peer ../DPOT         a forward pass at batch 1

The networks take turns, so that the ratio of their times hardly depends on what else the machine
does. On a GPU that has bf16, ours take it. --peer is a checkout of github.com/HaoZhongkai/DPOT, for
sizes with experts of github.com/haiyangxin/MoEPOT; both need einops.
"""
import dataclasses
import importlib
import json
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch

import configs
from nets import experts
from nets.build import build
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
    return network(
        img_size=config.resolution[0], patch_size=config.patch, mixing_type='afno',
        in_channels=config.channels, out_channels=config.channels, in_timesteps=config.frames,
        out_timesteps=1, n_blocks=config.heads, embed_dim=config.width,
        out_layer_dim=config.out_width, depth=config.depth, modes=config.modes,
        mlp_ratio=config.mlp / config.width, n_cls=12, normalize=False, act='gelu',
        time_agg='exp_mlp')


def function(kind, name, args, config, device):
    """A function that runs a 'forward' pass without gradients, or a 'train step': both passes.

    name: 'aot' or 'plain', perhaps with 'compiled' or 'graph', or 'peer', eager and in fp32.
    """
    residual, *mode = name.split()
    torch.manual_seed(0)
    u = torch.randn(args.batch_size, config.frames, *config.resolution, config.channels, device=device)
    if name == 'peer':
        model = peer_network(args.peer, config)
        u = u.permute(0, 2, 3, 1, 4).contiguous()
    else:
        model = build(dataclasses.replace(config, residual=residual))
    training = kind == 'train step'
    model = model.to(device).train(training)
    if mode:
        model.compile(mode='reduce-overhead' if mode == ['graph'] else 'default')
    bf16 = args.dtype == 'bf16' and name != 'peer'

    def run():
        with (torch.autocast(device.type, torch.bfloat16, enabled=bf16),
              torch.set_grad_enabled(training)):
            prediction = model(u)
        if training:
            prediction = prediction[0] if name == 'peer' else prediction
            loss = prediction.float().square().mean() + experts.balance_loss(model)
            loss.backward()
            model.zero_grad()
    return run


def compare(kind, names, args, config, device):
    """{name: {what: number}}: the median times of functions, and medians of ratios to others."""
    calls = {}
    rows = {}
    cuda = device.type == 'cuda'
    for name in names:
        rows[name] = {}
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        calls[name] = function(kind, name, args, config, device)
        calls[name]()                                      # in which a compiled network is compiled
        if cuda:
            rows[name]['peak MB'] = (torch.cuda.max_memory_allocated(device) - held) / 1e6
    times = {name: [] for name in names}                                # milliseconds
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
        plain = name.replace('aot', 'plain').replace('peer', 'plain')
        row['of plain'] = np.median(times[name] / times[plain])
        if 'peer' in times:
            row['of peer'] = np.median(times[name] / times['peer'])
    return rows


def main():
    parser = terminal.Parser(description=__doc__)
    add = parser.add_argument
    add('command', choices=('step', 'latency'),
        help='step: of training; latency: of a prediction at batch 1')
    add('--size', default='tiny', choices=list(configs.SIZES), help='preset of the network [tiny]')
    add('--batch_size', type=int, help='samples [8; latency 1]')
    add('--compile', default='off', choices=FORMS,
        help='on: also ours, compiled; graphs: also as CUDA graphs [off]')
    add('--repeats', type=int, help='rounds [10; latency 50, and 1200 in the paper]')
    add('--peer', default='', metavar='DIR', help='also the code in a checkout of DPOT or MoE-POT')
    add('--device', default='auto', help='cpu, cuda or cuda:1 [CUDA if there is any]')
    args = parser.parse_args()
    kinds, usual = {'step': (('forward', 'train step'), dict(batch_size=8, repeats=10)),
                    'latency': (('forward',), dict(batch_size=1, repeats=50))}[args.command]
    for name, number in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, number)
        configs.bounded(f'--{name}', getattr(args, name), least=1)
    processes = distributed.setup(args.device)
    device = processes.device
    args.dtype = distributed.precision('auto', processes)
    names = [name + form for form in FORMS[args.compile] for name in ('aot', 'plain')]
    names += ['peer'] if args.peer else []
    config = configs.model(args.size)
    tables = {kind: compare(kind, names, args, config, device) for kind in kinds}
    name = torch.cuda.get_device_name() if device.type == 'cuda' else platform.machine()
    machine = f'{name}, {torch.get_num_threads()} CPU threads, PyTorch {torch.__version__}'
    for title, rows in tables.items():
        print('', *terminal.table(title, rows, '.4g'), sep='\n')
    print(json.dumps({'machine': machine, **vars(args), **tables}))


if __name__ == '__main__':
    terminal.cli(main)
