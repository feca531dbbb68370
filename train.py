"""Pre-train AOT-POT on a mixture of PDE datasets.

    python train.py                                     nano, for a laptop, on data that the script generates itself
    torchrun --standalone --nproc_per_node=8 train.py --size small         on GPUs, compiled and in bf16
    python train.py --size tiny --datasets swe_pdb dr_pdb --lr 5e-4 --out out/two
    python train.py --size small --resume               start this run, or continue it exactly if it has begun

The folder out/<size>/ gets last.pt (all that is needed to resume), config.json and log.jsonl (one
line every --log_every steps and one for each scoring), and where every dataset has a valid.h5 also
best.pt, the weights with the lowest error on it. A folder that holds a run is refused without
--resume. Defaults in brackets are those of --size.
"""
import runtime  # noqa: F401, isort: skip, before torch
import dataclasses
import math
import signal
import time
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

import aotpot
import configs
import data
import evaluate
from configs import InputError, show
from data import relative_l2, safe_divide
from nets import experts
from nets.build import build, matrices
from nets.muon import Muon
from runtime import distributed, files, runs, terminal
from runtime.checkpoint import load_file, maps_in, start_from

SCORED_WINDOWS = 64             # of a dataset in a scoring, at most

# ----------------------------------------------------------------------------------- flags and data

class Command(NamedTuple):
    """What a command line asks for."""
    model: configs.ModelConfig
    recipe: configs.TrainConfig
    run: configs.RunConfig
    given: frozenset            # the names of the flags in it
    size: str = ''              # the preset of train.py


def parse(argv=None):
    """The Command of a command line. Raises InputError for flags that contradict one another."""
    first = terminal.Parser(add_help=False)
    first.add_argument('--size', default='nano', help='preset of model and recipe, one of ' + ' '.join(configs.SIZES))
    size = first.parse_known_args(argv)[0].size
    parser = terminal.Parser(description=__doc__, parents=[first])
    parser.add(configs.model(size), f'model ({size})')
    parser.add(configs.recipe(size), f'recipe ({size})')
    parser.add(configs.run(size, torch.cuda.is_available()), 'run')
    args = parser.parse_args(argv)
    network = getattr(args, 'network', 'aotpot')
    device = distributed.choose_device(getattr(args, 'device', 'auto'))
    model = configs.override(configs.model(size, network=network), args)
    recipe = configs.override(configs.recipe(size), args)
    run = configs.override(configs.run(size, device.type == 'cuda'), args)
    if not run.out:
        run = dataclasses.replace(run, out=f'out/{size}' if network == 'aotpot' else f'out/{size}-{network}')
    return Command(model, recipe, run, frozenset(vars(args)), size)


def with_data(run, size, processes):
    """The run config with folder and datasets; rank 0 generates those of configs.BUILTIN."""
    folder = run.data
    names = run.datasets
    if not folder:
        builtin = size if size in configs.BUILTIN or any(Path('data').glob('*/train.h5')) else 'nano'
        if builtin != size and processes.rank == 0:
            terminal.warn(f'--size {size} without --data: there is no data/<dataset>/train.h5, so this run trains '
                          f'on the small built-in mixture in data/nano; sources.generate and .prepare fill data/')
        mixture = configs.BUILTIN.get(builtin, ())
        folder = f'data/{builtin}' if mixture else 'data'
        names = configs.datasets_of(names) or sorted(mixture)
        absent = [name for name in names if not Path(folder, name, 'train.h5').exists()]
        if processes.rank == 0 and absent and {*absent} <= {*mixture}:
            from sources import generate  # the solvers, where data have to be made
            print(f'generating small datasets of the built-in mixture in {folder}', flush=True)
            generate.generate(folder, [generate.plan(name, builtin) for name in absent], device=processes.device)
    distributed.barrier(processes)
    return dataclasses.replace(run, data=folder, datasets=tuple(data.find(folder, names)))


def shape_of_data(config, datasets):
    """{field of a model config: value} of the channels, the frames and the grid of some
    data.Trajectories.

    The channels are at least, and the frames at most those of `config`. The grid is left out if it
    is not one, or if the patch does not divide it. Data in one dimension have a side of one point,
    which becomes a patch of equal ones, and the other is rounded up to whole patches.
    """
    fields = {'channels': max(config.channels, *(dataset.channels for dataset in datasets)),
              'frames': min(config.frames, *(dataset.frames - 1 for dataset in datasets))}
    grid, *others = {dataset.space for dataset in datasets}
    if 1 in grid:
        grid = tuple(math.ceil(size / config.patch) * config.patch for size in grid)
    if not others and not any(size % config.patch for size in grid):
        fields['resolution'] = grid
    return fields


def fitted(command, processes):
    """A Command whose network takes the shape of one's own data, where no flag says otherwise."""
    run = command.run
    if {*run.datasets} & {*configs.DATASETS}:
        return command
    datasets = [data.Trajectories(run.data, name, 'train', 1, None) for name in run.datasets]
    fields = {name: value for name, value in shape_of_data(command.model, datasets).items()
              if name not in command.given}
    model = dataclasses.replace(command.model, **fields)
    announce_shape(command.model, model, processes)
    return command._replace(model=model)


def announce_shape(before, now, processes):
    """Print what of a model config has changed for the shape of the data, as flags, if anything has."""
    flags = [f'--{name} {show(getattr(now, name))}' for name in ('resolution', 'frames', 'channels')
             if getattr(now, name) != getattr(before, name)]
    if flags:
        processes.print(f'the network takes the shape of the data: {" ".join(flags)}')


def grid_advice(datasets, config):
    """A line that suggests a grid to a model whose grid is none of the data's, or ''."""
    grids = [dataset.space for dataset in datasets]
    largest = tuple(max(sizes) for sizes in zip(*grids))
    if config.resolution in grids or any(size % config.patch for size in largest):
        return ''
    return (f'  the grid of the model, {show(config.resolution)}, is not that of the data; try --resolution '
            f'{show(largest)}')


# ----------------------------------------------------------------------------------------- one step

def one_cycle(step, steps, peak, warmup, start=1e-4, end=1e-8):
    """The learning rate of step 0..steps-1: it rises as a cosine from start * peak to peak, then
    falls to end * peak.

    This is torch's OneCycleLR with DPOT's divisors and a fixed beta1, as a function of the step,
    without any state.
    """
    top = warmup * steps - 1
    if steps == 1:
        return peak
    if step <= top:
        low = start
        phase = step / top if top else 1.0
    else:
        low = end
        phase = 1 - (step - top) / max(steps - 1 - top, 1)
    return peak * (low + (1 - low) * (1 - math.cos(math.pi * phase)) / 2)


def relative_loss(prediction, windows, scale):
    """DPOT's loss of a prediction (b, *space, C) of windows (b, T+1, *space, C): (b, C)."""
    return relative_l2(prediction, windows[:, -1], scale)


def change_loss(prediction, windows, scale):
    """`relative_loss` over the square root of ||u_T+1 - u_T|| / ||u_T+1||, clamped to [0.01, 1].

    So data that change slowly count as much as others. Not in the paper.
    """
    target = windows[:, -1]
    size = safe_divide(data.norm(target - windows[:, -2]), data.norm(target)).clamp(0.01, 1)
    return relative_l2(prediction, target, scale) / size.sqrt()


def squared_loss(prediction, windows, scale):
    """Eq. (14) for one frame, as a mean over the grid points."""
    return (prediction - windows[:, -1]).square().flatten(1, -2).mean(1)


LOSSES = {'relative': relative_loss, 'change': change_loss, 'squared': squared_loss}       # --loss


def loss_of(prediction, batch, kind='relative'):
    """The error of the predicted next frame on evolving channels and native grid points, a mean
    over the samples.

    prediction: (B, *space, C) of the samples of a data.Batch, in its order. kind: one of LOSSES.
    """
    sizes = [len(windows) for windows in batch.windows]
    errors = []
    for part, windows, scale in zip(prediction.split(sizes), batch.windows, batch.scale.split(sizes)):
        native = data.resize(part[:, None], windows.shape[2:-1])[:, 0]
        errors.append(LOSSES[kind](native, windows, scale))                             # (b, C)
    errors = torch.where(batch.evolving, torch.cat(errors), 0)                          # (B, C)
    return (errors.sum(1) / batch.evolving.sum(1)).mean()


# ----------------------------------------------------------------------------------------- the loop

def compile_model(model, run, samples, processes):
    """The model as the loop calls it: compiled if --compile says so and the compiler does not fail.

    A training pass of so many samples is compiled here, before the first step and outside
    DistributedDataParallel.
    """
    if run.compile == 'off':
        return model
    config = model.config
    torch._dynamo.config.optimize_ddp = False           # or it would split the graph later
    warnings.filterwarnings('ignore', module='torch._inductor')     # what it advises for fp32 is not wanted here
    for parameter in model.parameters():
        if parameter.requires_grad:         # so that gradients are added to it: a CUDA graph reuses its own
            parameter.grad = torch.zeros_like(parameter)
    buffers = [buffer.clone() for buffer in model.buffers()]
    compiled = torch.compile(model, mode='reduce-overhead' if run.compile == 'graphs' else 'default', dynamic=False)
    u = torch.ones(samples, config.frames, *config.resolution, config.channels, device=processes.device)
    try:
        with autocast(run, processes.device):
            prediction = compiled(u, u.new_zeros(samples, config.channels))
        prediction.float().square().mean().backward()
    except Exception as error:      # of whatever kind; what is the model's fault fails eagerly, too
        compiled = model
        if processes.rank == 0:
            terminal.warn(f'--compile: {" ".join(str(error).split())[:300]}; the run goes on without it')
    for buffer, before in zip(model.buffers(), buffers):
        buffer.data.copy_(before)
    model.zero_grad(set_to_none=False)
    return compiled


def autocast(run, device):
    """The precision of --dtype, as a context."""
    return torch.autocast(device.type, torch.bfloat16, enabled=run.dtype == 'bf16')


def validation_windows(dataset):
    """(trajectory, first frame) of at most SCORED_WINDOWS, spread over all of them."""
    count = min(dataset.count, SCORED_WINDOWS)
    return [(i * dataset.count // count, (2 * i + 1) * dataset.t_test // (2 * count)) for i in range(count)]


@torch.no_grad()
def validation_error(model, datasets, processes, dtype='fp32', samples=16):
    """The L2RE of one step from true frames on the `validation_windows` of each dataset, a mean
    over the datasets.

    samples: the windows of a batch; the last one is filled up, as a compiled model would recompile.
    """
    T = model.config.frames
    means = []
    model.eval()
    for dataset in datasets:
        places = validation_windows(dataset)
        predictor = evaluate.Predictor(model, dataset, processes.device, dtype)
        scale = predictor.scale_of_truth()
        errors = torch.zeros(len(places), dtype=torch.float64)
        for batch in processes.batches(len(places), samples):
            filled = [*batch, *[batch[-1]] * (samples - len(batch))]
            frames = dataset.windows([places[i] for i in filled], T + 1).to(processes.device)   # (B, T+1, *space', C')
            state = predictor.step(predictor.state(frames[:, :T]))
            truth = predictor.truth(frames[:, T])
            error = evaluate.l2re_of_samples(predictor.prediction(state), truth, scale)                 # (B,)
            errors[list(batch)] = error[:len(batch)].cpu().double()
        means.append(evaluate.mean(processes.sum(errors)))
    model.train()
    return sum(means) / len(means)


def optimizer_of(model, recipe, device, dtype='fp32'):
    """The optimizer of --optimizer; AdamW in one pass where PyTorch has that."""
    fused = device.type in ('cpu', 'cuda') and not any(parameter.is_complex() for parameter in model.parameters())
    settings = dict(lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), weight_decay=recipe.weight_decay, fused=fused)
    if recipe.optimizer == 'adamw':
        return torch.optim.AdamW(model.parameters(), **settings)
    return Muon(*matrices(model), recipe.ratio, recipe.momentum, half=dtype == 'bf16', **settings)


LEARNABLE = 1e-3, 1e3     # root mean squares of a channel that a network without --normalize learns
OFFSET = 30                     # and so many deviations at most may it have as a mean


def units_advice(datasets, config):
    """A line on the first channel whose units a network of raw values does not learn, or ''."""
    if config.network == 'aotpot' and config.normalize and config.units != 'raw':
        return ''
    for dataset in datasets:
        evolving = dataset.sizes[:, dataset.evolving].T.tolist()
        for channel, (size, deviation) in zip(dataset.evolving_names, evolving):
            words = f'values of {size:.1e} with a deviation of {deviation:.1e}'
            if deviation > 0 and not (LEARNABLE[0] < size < LEARNABLE[1] and size < OFFSET * deviation):
                return f'  {channel} of {dataset.name} has {words}, which this network hardly learns; try --normalize'
    return ''


def fit(network, optimizer, batches, command, record, score):
    """Minimise Eq. (3) over the training data, until all steps are done or a signal has come.

    network: the model as `compile_model` returns it, in DistributedDataParallel if there are
    several processes.
    batches: yields a data.Batch for each of the --accumulate parts of a step.
    command: a Command whose number of steps is set.
    record: the runs.Record, whose step is where the run goes on.
    score: a function that returns the error on the data of the scorings.
    """
    recipe = command.recipe
    while not record.stop:
        if record.is_due() and record.step > record.scored:
            record.add_score(score())
        if record.step == recipe.steps:
            record.save()
            break
        lr = one_cycle(record.step, recipe.steps, recipe.lr, recipe.warmup)
        for group in optimizer.param_groups:
            group['lr'] = lr * group.get('ratio', 1)
        for batch in distributed.parts_of_step(batches, command.run.accumulate, network):
            u = data.noisy_inputs(batch, command.model, recipe.noise)           # (B, T, *space, C)
            with autocast(command.run, u.device):
                prediction = network(u, batch.scale)                            # (B, *space, C)
            loss = loss_of(prediction.float(), batch, recipe.loss) / command.run.accumulate
            (loss + recipe.balance * experts.balance_loss(record.model, recipe.batch_size)).backward()
            record.loss += loss.detach()
        norm = clip_grad_norm_(network.parameters(), recipe.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)   # which stay where the compiler and DDP expect them
        record.add(norm, lr)
        if record.is_due() or record.stop:
            record.save()


# -------------------------------------------------------------------------------------------- a run

def open_splits(run, config, rows=None):
    """{split: [data.Trajectories]} of a run, of 'valid' those that exist. rows: of the training."""
    def opened(split, rows=None):
        return [data.Trajectories(run.data, name, split, config.frames, config.channels, rows, config.dims)
                for name in run.datasets if split != 'valid' or Path(run.data, name, 'valid.h5').exists()]
    return {'train': opened('train', rows), 'test': opened('test'), 'valid': opened('valid')}


def sampling_weights(names, recipe):
    """w_k of each dataset: --sampling's, the paper's, or 1. InputError: unknown dataset."""
    given = recipe.weights()
    for name in given:                       # those of a preset that are absent here have no effect
        if name not in {*names, *configs.DATASETS}:
            raise InputError(f'--sampling {name}: there is no such dataset in the mixture'
                             + configs.nearest(name, names))
    paper = {name: dataset.weight for name, dataset in configs.DATASETS.items()}
    return [given.get(name, paper.get(name, 1.0)) for name in names]


def require_trainable(command, datasets, frozen):
    """Raise InputError for what the network cannot train on. frozen: whether its routers are."""
    config = command.model
    batch_size = command.recipe.batch_size
    parts = command.run.accumulate
    if config.normalize and len({dataset.steady for dataset in datasets}) > 1:
        raise InputError('--normalize: some of these datasets are steady, others not; train them apart, or with '
                         '--no-normalize')
    if config.experts and not frozen and (parts > 1 or batch_size == 1):
        raise InputError('--experts: the BatchNorm in the router needs whole batches of at least 2 samples; lower '
                         '--batch_size instead of --accumulate')


def complete(command, datasets, processes, resumed=None):
    """A Command with what follows from its datasets and its machine: the steps, the precision, the
    workers.

    A resumed run keeps its precision on another machine.
    """
    run = command.run
    recipe = command.recipe
    draws = sum(dataset.count for dataset in datasets)
    steps = recipe.steps or math.ceil(recipe.epochs * draws / recipe.batch_size)
    dtype = distributed.precision(run.dtype, processes, 0 if resumed else command.model.width)
    if resumed:
        dtype = resumed.get('dtype', dtype)                     # earlier versions have not noted it
    save_every = run.save_every
    if 'save_every' not in command.given:
        save_every = min(save_every, math.ceil(steps / 10))                 # or best.pt would have few to choose from
    workers = run.workers
    if workers < 0 and processes.device.type == 'cpu':
        workers = 0
    return command._replace(recipe=dataclasses.replace(recipe, steps=steps),
                            run=dataclasses.replace(run, dtype=dtype, workers=workers, save_every=save_every))


def announce(model, datasets, sampling, recipe, run, processes):
    """Print the header: the network, the machine, the datasets and their shares of the draws."""
    config = model.config
    hardware = f'{processes.world_size} x {processes.device.type}'
    if run.compile != 'off':
        form = 'compiled as CUDA graphs' if run.compile == 'graphs' else 'compiled'
        hardware += f', {form} before the first step, which takes a minute or two'
    size = f'{aotpot.parameters(model):,} parameters'
    if config.experts:
        size += f', {experts.activated(model):,} of them activated'
    processes.print(f'{config.title}, {size}, {show(config.resolution)} grid, {run.dtype} on {hardware}, global batch '
                    f'{recipe.batch_size} -> {run.out}')
    for dataset, weight in zip(datasets, sampling):
        processes.print(f'  {dataset.name:<34} {dataset.count:>6} trajectories of {dataset.frames:>3} frames, '
                        f'{show(dataset.space)}, weight {weight:g}: {weight / sum(sampling):.0%} of the draws')
    advice = [grid_advice(datasets, config), units_advice(datasets, config)]
    advice += [dataset.advice() for dataset in datasets]
    for line in filter(None, advice):
        processes.print(line)


def initialize(model, datasets, pretrained, processes):
    """Give a new network what is not random: pretrained weights, channel maps, units of solutions.
    """
    config = model.config
    maps = ''
    if pretrained:
        processes.print(start_from(model, pretrained))
        maps = pretrained['config']['model'].get('channel_maps')
    if config.channel_maps not in ('', 'learned', maps):
        model.load_state_dict(maps_in(config.channel_maps, config.channels), strict=False)
    if config.normalize and datasets[0].steady:
        model.units.solution = data.solution_units(datasets, config.channels).to(processes.device)
        processes.print('  --normalize: predictions get the mean and deviation of the training solutions')


def train_model(command, splits, processes, resumed=None, pretrained=None, finetuning=None, frozen=False):
    """Build the network of a Command, train it, and print its errors on splits['test']. Returns the
    exit code.

    splits: as returned by `open_splits`.
    resumed: the dict of the last.pt of the run to go on with, which is emptied when its tensors are
    loaded.
    pretrained: that of the checkpoint from whose weights a new run starts, which is emptied, too.
    finetuning: the settings of finetune.py, for the checkpoint.
    frozen: whether the routers of experts stay as they are.
    Raises InputError for another run than that of `resumed`.
    """
    saved = resumed or pretrained or {}
    datasets = splits['train']
    units = configs.ModelConfig.units               # the raw units of other data may be of any size
    if saved and (resumed or {dataset.name for dataset in datasets} <= {*saved['data']}):
        units = saved['config']['model']['units']
    command = command._replace(model=dataclasses.replace(command.model, units=units))
    settings = {'model': vars(command.model), 'train': vars(command.recipe), 'run': vars(command.run)}
    if finetuning:
        settings['finetune'] = finetuning
    command = complete(command, datasets, processes, resumed)
    run = command.run
    recipe = command.recipe
    sampling = sampling_weights(run.datasets, recipe)
    headers = data.read_headers(run.data, run.datasets)
    for dataset in datasets:
        if resumed:                             # of earlier versions none
            sizes = resumed['data'].get(dataset.name, {}).get('train', {}).get('sizes')
            dataset.sizes = torch.tensor(sizes) if sizes else dataset.sizes
        headers[dataset.name]['train']['sizes'] = dataset.sizes.tolist()
    if resumed:
        runs.require_unchanged(resumed, settings, headers)
        if resumed['scored'] == recipe.steps:
            processes.print(f'the run in {run.out} is finished, at step {resumed["step"]}; there is nothing left to do')
            distributed.leave(processes)
            return 0
    require_trainable(command, datasets, frozen)
    torch.manual_seed(recipe.seed)
    model = build(command.model, run.form, processes.device, headers).to(processes.device)
    announce(model, datasets, sampling, recipe, run, processes)
    if not resumed:
        initialize(model, datasets, pretrained, processes)
    if frozen:
        experts.freeze_routers(model)

    samples = data.samples_per_pass(recipe.batch_size, processes.world_size, run.accumulate)
    score_samples = min(samples, math.ceil(SCORED_WINDOWS / processes.world_size))
    split = 'valid' if splits['valid'] else 'test'
    scored = splits[split]
    whose = '' if len(scored) == len(datasets) else f' ({" ".join(dataset.name for dataset in scored)} alone)'
    windows = data.Windows(datasets, model.config.frames, model.config.channels, sampling, recipe.seed)
    optimizer = optimizer_of(model, recipe, processes.device, run.dtype)
    metadata = {'config': settings, 'data': headers, 'dtype': run.dtype}
    record = runs.Record(command, model, optimizer, metadata, windows.draws, split, whose, processes, resumed)
    saved.clear()                             # or it would take its memory until the end of the run
    started = time.perf_counter()
    compiled = compile_model(model.train(), run, samples, processes)
    network = distributed.data_parallel(compiled, processes)
    score = partial(validation_error, compiled, scored, processes, run.dtype, score_samples)
    numbers = data.numbers_of_rank(range(record.step, recipe.steps), recipe.batch_size, processes.rank,
                                   processes.world_size, run.accumulate)
    batches = data.batches(windows, numbers, processes.device, run.workers)
    with terminal.handling(terminal.SIGNALS, record.note), record.bar, closing(batches):
        fit(network, optimizer, record.timed(batches), command, record, score)
    if record.stop:
        processes.print(f'stopped by {signal.Signals(record.stop).name} at step {record.step}; continue with the same '
                        f'command and --resume')
    else:
        trained = time.perf_counter()
        results = evaluate.score_all(model, splits['test'], processes, min(samples, 16))
        processes.print('\n'.join(evaluate.score_table(results)))
        processes.print(f'{trained - started:.0f} s of training, {time.perf_counter() - trained:.0f} s of evaluation; '
                        f'checkpoints in {run.out}')
    distributed.leave(processes)
    return 128 + record.stop if record.stop else 0


def main():
    command = parse()
    run = command.run
    processes = distributed.setup(run.device, run.threads, runs.settings_of(command))
    with files.lock(run.out, processes):
        resumed = runs.checkpoint_to_resume(run, processes)
        pretrained = load_file(run.init_from) if run.init_from and not resumed else None
        run = with_data(run, command.size, processes)
        command = fitted(command._replace(run=run), processes)
        splits = open_splits(run, command.model)
        return train_model(command, splits, processes, resumed, pretrained)


if __name__ == '__main__':
    terminal.cli(main)
