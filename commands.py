"""What the commands on trained models share: flags, opening checkpoints and their test sets, reports and pictures.

evaluate.py, interpret.py and reproduce.py parse their flags and call `run` with a function for what was asked,
mode(models, args, processes, report), which returns the lines to print.
"""
import json
import math
import os
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import configs
from configs import InputError

import torch

import aotpot
import checkpoint
import data
import distributed

SCORING = dict(default='native', choices=('native', 'paper'),
               help='native: on the grid of the dataset; paper: on the model grid, as DPOT [native]')


# ------------------------------------------------------------------------------------------------ the command line

def new_parser(description, drawn):
    """A parser with the flags that all commands have. drawn: what --figures draws."""
    parser = configs.Parser(description=description)
    parser.add_argument('--checkpoint', nargs='+', default=(), help='one or several; default: the newest under out/')
    parser.add_argument('--data', default='', help='folder of the datasets; default: that of the training')
    parser.add_argument('--datasets', nargs='+', default=(),
                        help='default: those of the training, or with another --data all')
    parser.add_argument('--batch_size', type=int, default=16, metavar='N', help='trajectories at once [16]')
    parser.add_argument('--figures', default='', metavar='DIR', help=f'draw {drawn} into this folder')
    parser.add_argument('--json', default='', metavar='FILE', help='write every number to this file')
    parser.add_argument('--device', default='auto', help='auto, cpu, cuda, cuda:0')
    parser.add_argument('--dtype', default='fp32', choices=('fp32', 'bf16'), help='bf16: autocast [fp32]')
    parser.add_argument('--form', default='fast', choices=('fast', 'paper'),
                        help='paper: the equations as printed; fast: the same in less work [fast]')
    return parser


def run(args, mode):
    """Open the checkpoints, print the lines that `mode` returns and write its report to --json.

    The report is {'models': {name: {'checkpoint', 'step', 'parameters'}}}, to which the mode adds. Raises InputError,
    before any work, for a folder that cannot be created and for --figures without matplotlib.
    """
    configs.at_least(1, batch_size=args.batch_size)
    if args.figures:
        import figures
        figures.pyplot()
    for flag, folder in (('figures', Path(args.figures)), ('json', Path(args.json).parent)):
        if getattr(args, flag):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f'--{flag} {folder}: no folder to write into ({error.strerror})') from None
    if args.json and Path(args.json).is_dir():
        raise InputError(f'--json {args.json}: a folder; name a file')
    models = open_checkpoints(args.checkpoint or [newest_checkpoint()], args.form)
    processes = distributed.setup(args.device)
    for item in models:
        processes.print(item.headline(processes.device))
    report = {'models': {item.name: {'checkpoint': str(item.path), 'step': item.step,
                                     'parameters': aotpot.parameters(item.model)} for item in models}}
    for line in mode(models, args, processes, report):
        processes.print(line)
    if args.json and processes.rank == 0:
        with replacing('--json', Path(args.json)) as part:
            part.write_text(json.dumps(jsonable(report), indent=1))


def jsonable(results):
    """Tensors -> their mean and the values of all samples; what is not finite -> null."""
    if isinstance(results, torch.Tensor):
        values = jsonable(results.flatten().tolist())
        return {'mean': None if None in values else results.mean().item(), 'samples': values}
    if isinstance(results, dict):
        return {name: jsonable(value) for name, value in results.items()}
    if isinstance(results, list):
        return [jsonable(value) for value in results]
    return None if isinstance(results, float) and not math.isfinite(results) else results


@contextmanager
def replacing(flag, path):
    """Yields the path of a new file, which replaces `path` if the block ends well. Raises InputError for an OSError."""
    part = path.with_name(path.name + '.part')
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        raise InputError(f'{flag}: cannot write {path} ({error.strerror or error})') from None
    finally:
        part.unlink(missing_ok=True)


def draw(args, processes, name, plot):
    """Write DIR/name.png if --figures DIR is given. plot(figures): the figure, made by a function of that module."""
    if args.figures and processes.rank == 0:
        import figures
        save_images(args, processes, f'{name}.png', [figures.as_image(plot(figures))])


def save_images(args, processes, name, images):
    """Write pillow Images to DIR/name, a .png of one image or a .gif of several, eight a second."""
    path = Path(args.figures) / name
    how = dict(optimize=True) if len(images) == 1 else dict(
        save_all=True, append_images=images[1:], duration=125, loop=0)
    with replacing('--figures', path) as part:
        images[0].save(part, format=path.suffix[1:], **how)
    processes.print(f'drew {path}')


# ------------------------------------------------------------------------------------------------ the checkpoints

class Opened(NamedTuple):
    """A checkpoint on the command line; `name` stands for it in tables, JSON and figures."""
    name: str
    path: Path
    step: int
    model: aotpot.AOTPOT
    run: configs.RunConfig
    finetuned: bool

    def headline(self, device):
        config = self.model.config
        return (f'{self.path}: step {self.step}, {config.residual}, {aotpot.parameters(self.model):,} parameters, '
                f'{configs.show(config.resolution)} grid, on {device}'
                + (f', fine-tuned from {self.run.init_from or "random weights"}' if self.finetuned else ''))


def newest_checkpoint(folder='out'):
    """The path of the checkpoint under `folder` that was written last. Raises InputError if there is none."""
    found = sorted(Path(folder).glob('*/*.pt'), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(f'--checkpoint: none given and no {folder}/*/*.pt here; run: python train.py')
    return found[-1]


def short_names(paths):
    """A short and unique name for each path: its folder, else folder/stem, else the whole path.

    Raises InputError if a path is given twice.
    """
    kinds = [(path.absolute().parent.name, f'{path.absolute().parent.name}/{path.stem}', str(path)) for path in paths]
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f'--checkpoint {path}: given twice')
    return [next(name for i, name in enumerate(own) if [other[i] for other in kinds].count(name) == 1) for own in kinds]


def open_checkpoints(paths, form='fast'):
    """The checkpoints at `paths`, one read after the other, with their networks on the CPU; no optimiser is kept."""
    paths = [Path(path) for path in paths]
    loaded = ((path, checkpoint.read(path)) for path in paths)
    return [Opened(name, path, saved['step'], aotpot.from_checkpoint(saved, form=form),
                   configs.RunConfig(**saved['config'].get('run', {})), 'finetune' in saved['config'])
            for name, (path, saved) in zip(short_names(paths), loaded)]


def each_on_device(models, processes):
    """The checkpoints one after the other, each on the device for as long as it is used."""
    for item in models:
        item.model.to(processes.device)
        yield item
        item.model.cpu()


def same_for_all(what, models, of, advice):
    """of(item), if it is equal for all checkpoints; else an InputError names the two that differ."""
    for item in models[1:]:
        if of(item) != of(models[0]):
            raise InputError(f'--checkpoint: {models[0].name} and {item.name} differ in {what}, '
                             f'{of(models[0])} and {of(item)}; {advice}')
    return of(models[0])


def input_frames(models, same_grid=False):
    """T of all checkpoints. Raises InputError if they differ in it or, with `same_grid`, in their grids."""
    if same_grid:
        same_for_all('--resolution', models, lambda item: configs.show(item.model.config.resolution), 'give one')
    return same_for_all('--frames', models, lambda item: item.model.config.frames,
                        'they predict different frames; give one')


def data_folder(models, args):
    """The folder of the datasets: --data, or the one where all checkpoints were trained."""
    for item in models:
        if not (args.data or item.run.data):
            raise InputError(f'--data is needed: {item.path} does not say what it was trained on')
    return args.data or same_for_all('data', models, lambda item: item.run.data, 'say which with --data')


def test_sets(models, args, names=()):
    """{checkpoint: [test sets]} in one order: `names`, --datasets, those of the training, or with another --data all.

    Raises InputError if neither is given and the checkpoints were not trained on the same datasets.
    """
    folder, names = data_folder(models, args), names or args.datasets
    if not names and all(item.run.data == folder for item in models):
        same_for_all('datasets', models, lambda item: ' '.join(sorted(item.run.datasets)), 'say which with --datasets')
        names = models[0].run.datasets
    found = data.find(folder, names, 'test')
    return {item.name: [open_set(item, folder, name) for name in found] for item in models}


def open_set(item, folder, name, split='test', rows=None):
    """The trajectories of a dataset, at most `rows`, as the network of a checkpoint takes them.

    Raises InputError as data.Trajectories, and if their dimension of space is not that of the network.
    """
    config = item.model.config
    how = folder, name, split, config.frames, config.channels, item.run.coefficients
    found = data.Trajectories(*how)
    if len(found.space) != config.dims:
        raise InputError(f'{found.path}: {len(found.space)} dimensions of space, {item.path} has {config.dims}')
    return data.Trajectories(*how, rows=range(rows)) if rows and found.count > rows else found


def under_name(models, item, lines):
    """The lines of one checkpoint, under its name if there are several."""
    return [f'{item.name}:', *lines] if len(models) > 1 else lines
