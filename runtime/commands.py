"""What the commands on trained models share: flags, the opened checkpoints, and the report."""
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import aotpot
import configs
from configs import InputError
from nets import experts
from runtime import checkpoint, distributed, files, terminal


def evaluation_parser(description, drawings):
    """A parser with the flags of all commands on trained models. drawings: what --figures draws."""
    parser = terminal.Parser(description=description)
    parser.add_argument('--checkpoint', nargs='+', default=(), help='one or several; default: the newest under out/')
    parser.add_argument('--data', default='', help='folder of the datasets; default: that of the training')
    parser.add_argument('--datasets', nargs='+', default=(), help='default: those of the training, or with --data all')
    parser.add_argument('--resolution', default='', metavar='X', help='another model grid, such as 256 or 96x192')
    parser.add_argument('--batch_size', type=int, default=16, metavar='N', help='trajectories at once [16]')
    parser.add_argument('--figures', default='', metavar='DIR', help=f'draw {drawings} into this folder')
    parser.add_argument('--json', default='', metavar='FILE', help='write every number to this file')
    parser.add_argument('--device', default='auto', help='auto, cpu, cuda, cuda:0')
    parser.add_argument('--dtype', default='fp32', choices=('fp32', 'bf16'), help='bf16: autocast [fp32]')
    parser.add_argument('--form', default='fast', choices=('fast', 'paper'), help='paper: equations as printed [fast]')
    parser.add_argument('--network', nargs='+', default=(), metavar='X', help='MODULE:CLASS of networks of your own')
    return parser


class Opened(NamedTuple):
    """A checkpoint on the command line; `name` stands for it in tables, JSON and figures."""
    name: str
    path: Path
    step: int
    model: aotpot.AOTPOT
    run: configs.RunConfig
    fingerprints: dict              # of the data of its training, see data.py


def open_checkpoints(paths, form='fast', resolution='', network=''):
    """The checkpoints at `paths`, with their networks on the CPU. resolution: another model grid, such as '96x192'."""
    paths = [checkpoint.locate(path) for path in paths]
    models = []
    for name, path in zip(checkpoint.short_names(paths), paths):
        saved = checkpoint.read(path)
        model = checkpoint.network(saved, form)
        if resolution:
            model.config = dataclasses.replace(model.config, resolution=resolution)
        run = configs.RunConfig(**saved['config'].get('run', {}))
        models.append(Opened(name, path, saved['step'], model, run, saved['data']))
    return models


def agreed(models, field):
    """The value of a field of ModelConfig or RunConfig, if it is the same in all checkpoints."""
    values = [{**vars(opened.model.config), **vars(opened.run)}[field] for opened in models]
    for opened, value in zip(models, values):
        if value != values[0]:
            remedy = f'name one with --{field}' if field in ('data', 'datasets', 'resolution') else 'choose one'
            raise InputError(f'--checkpoint: {models[0].name} and {opened.name} differ in {field}, '
                             f'{configs.show(values[0])} and {configs.show(value)}; {remedy}')
    return values[0]


def execute(args, mode):
    """Open the checkpoints, print the lines that mode(models, args, processes, report) returns, write the report.

    On all ranks but 0 --figures is empty. In the JSON a tensor is its mean and its values, what is not finite is null.
    """
    configs.at_least(1, batch_size=args.batch_size)
    if args.json:
        files.writable('json', args.json, ('.json',))
        files.read_json(args.json, 'models')            # what is replaced has to be a report
    if args.figures:
        from lab import figures
        figures.pyplot()                        # or one line says before any work that matplotlib is not installed
    processes = distributed.setup(args.device)
    report = {'models': {}}
    if processes.rank > 0:
        args.figures = args.json = ''
    models = open_checkpoints(args.checkpoint or [checkpoint.newest()], args.form, args.resolution, args.network)
    for opened in models:
        model = opened.model.to(processes.device)
        report['models'][opened.name] = {'checkpoint': str(opened.path), 'step': opened.step,
                                         'parameters': aotpot.parameters(model),
                                         'activated': experts.activated(model),
                                         'resolution': model.config.resolution}
        processes.print(f'{opened.path}: step {opened.step}, {model.config.title}, '
                        f'{aotpot.parameters(model):,} parameters, {configs.show(model.config.resolution)} grid, '
                        f'on {processes.device}')
    for line in mode(models, args, processes, report):
        processes.print(line)
    if args.json:
        text = json.dumps(report, default=lambda x: {'mean': x.mean().item(), 'samples': x.flatten().tolist()})
        files.write(args.json, json.dumps(json.loads(text, parse_constant=lambda name: None), indent=1))
    distributed.leave(processes)                # else gloo's threads may abort a process that ends
