"""What the commands on trained models share: flags, the opened checkpoints, their test sets, and the report."""
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import configs
from configs import InputError

import aotpot
import data
from nets import experts
from runtime import checkpoint, distributed, files, terminal
from sources import generate


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

    def dataset(self, folder, name, split='test', rows=None):
        """The data.Trajectories of a dataset, at most `rows`, as the network takes them."""
        config = self.model.config
        return data.Trajectories(folder, name, split, config.frames, config.channels, self.run.coefficients, rows,
                                 config.dims)


def open_checkpoints(paths, form='fast', resolution='', network=''):
    """The checkpoints at `paths`, with their networks on the CPU. resolution: another model grid, such as '96x192'."""
    paths, models = [checkpoint.locate(path) for path in paths], []
    for name, path in zip(checkpoint.short_names(paths), paths):
        saved = checkpoint.read(path)
        model = checkpoint.network(saved, form, network)
        if resolution:
            model.config = dataclasses.replace(model.config, resolution=resolution)
        run = configs.RunConfig(**saved['config'].get('run', {}))
        models.append(Opened(name, path, saved['step'], model, run, saved['config'].get('fingerprints', {})))
    return models


def agreed(models, field):
    """The value of a field of ModelConfig or RunConfig, if it is the same in all checkpoints."""
    first, *others = [{**vars(item.model.config), **vars(item.run)}[field] for item in models]
    for item, value in zip(models[1:], others):
        if value != first:
            raise InputError(f'--checkpoint: {models[0].name} and {item.name} differ in {field}, '
                             f'{configs.show(first)} and {configs.show(value)}; choose one')
    return first


def test_names(models, args, folder, processes):
    """The names of the test sets: --datasets, those of the training, or with another --data all.

    A warning names the first checkpoint that was trained with other test sets in the same folder.
    """
    as_trained = not args.datasets and all(item.run.data == folder for item in models)
    names = data.find(folder, agreed(models, 'datasets') if as_trained else args.datasets, 'test')
    for item in models if processes.rank == 0 else ():
        if Path(item.run.data).resolve() == Path(folder).resolve():
            now = data.fingerprints(folder, names, item.run.coefficients, ['test'])
            if changed := data.changed(item.fingerprints, now):
                terminal.warn(f'{item.path}: the data in {folder} have changed since it was trained: {changed}')
                break
    return names


def test_sets(models, args, processes):
    """{checkpoint: its data.Trajectories of `test_names`}. Those of a built-in mixture are generated if need be."""
    if not (folder := args.data):
        folder = agreed(models, 'data')
        generate.builtin_tests(folder, args.datasets or agreed(models, 'datasets'), processes)
    names = test_names(models, args, folder, processes)
    return {item.name: [item.dataset(folder, name) for name in names] for item in models}


def run(args, mode):
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
    processes, report = distributed.setup(args.device), {'models': {}}
    if processes.rank > 0:
        args.figures = args.json = ''
    models = open_checkpoints(args.checkpoint or [checkpoint.newest()], args.form, args.resolution, args.network)
    for item in models:
        model = item.model.to(processes.device)
        report['models'][item.name] = {'checkpoint': str(item.path), 'step': item.step,
                                       'parameters': aotpot.parameters(model), 'activated': experts.activated(model),
                                       'resolution': model.config.resolution}
        processes.print(f'{item.path}: step {item.step}, {model.config.title}, '
                        f'{aotpot.parameters(model):,} parameters, {configs.show(model.config.resolution)} grid, '
                        f'on {processes.device}')
    for line in mode(models, args, processes, report):
        processes.print(line)
    if args.json:
        text = json.dumps(report, default=lambda x: {'mean': x.mean().item(), 'samples': x.flatten().tolist()})
        files.write(args.json, json.dumps(json.loads(text, parse_constant=lambda name: None), indent=1))
