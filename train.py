"""Pre-train AOT-POT on a mixture of PDE datasets.

    python train.py                                     nano, for a laptop, on data that the script generates itself
    torchrun --standalone --nproc_per_node=8 train.py --size small         on GPUs, compiled and in bf16
    python train.py --size tiny --datasets swe_pdb dr_pdb --lr 5e-4 --out out/two
    python train.py --size small --resume               start this run, or continue it exactly if it has begun

The folder out/<size>/ gets last.pt (all that is needed to resume), config.json and log.jsonl (one line every
--log_every steps and one for each scoring), and where every dataset has a valid.h5 also best.pt, the weights with
the lowest error on it. A folder that holds a run is refused without --resume. Defaults in brackets are those of --size.
"""
import runtime  # noqa: F401, isort: skip, before torch
import dataclasses
import math
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

import aotpot
import configs
import data
import evaluate
from configs import InputError, show
from data import norm, relative_l2, safe_divide
from nets import experts
from nets.build import build, matrices
from nets.muon import Muon
from runtime import distributed, files, runs, terminal
from runtime.checkpoint import load_file, maps_in, start_from

SCORED_WINDOWS = 64             # of a dataset in a scoring, at most

# ------------------------------------------------------------------------------------------------ flags and data

class Command(NamedTuple):
    """What a command line asks for."""
    model: configs.ModelConfig
    recipe: configs.TrainConfig
    run: configs.RunConfig
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
    return Command(model, recipe, run, size)


def with_data(run, size, processes):
    """The run config with its folder and all its datasets; without --data rank 0 generates those of configs.BUILTIN."""
    folder = run.data
    names = run.datasets
    if not folder:
        builtin = size if size in configs.BUILTIN or any(Path('data').glob('*/train.h5')) else 'nano'
        if builtin != size and processes.rank == 0:
            terminal.warn(f'--size {size} without --data: there is no data/<dataset>/train.h5, so this run trains '
                          f'on the small built-in mixture in data/nano; sources.generate and .prepare fill data/')
        mixture = configs.BUILTIN.get(builtin, ())
        folder = f'data/{builtin}' if mixture else 'data'
        names = names or sorted(mixture)
        absent = {name for name in names if not Path(folder, name, 'train.h5').exists()}
        if processes.rank == 0 and absent and absent <= {*mixture}:
            from sources import generate  # the solvers, where data have to be made
            print(f'generating the small datasets of the built-in mixture in {folder}', flush=True)
            generate.generate(folder, [generate.plan(name, builtin) for name in mixture], device=processes.device)
    distributed.wait(processes)
    return dataclasses.replace(run, data=folder, datasets=tuple(data.find(folder, names)))


def grid_advice(datasets, config):
    """A line that suggests the largest grid of the data for a model whose grid is none of theirs, or ''."""
    grids = [dataset.space for dataset in datasets]
    largest = tuple(max(sizes) for sizes in zip(*grids))
    if config.resolution in grids or any(size % config.patch for size in largest):
        return ''
    return (f'  the grid of the model, {show(config.resolution)}, is not that of the data; try --resolution '
            f'{show(largest)}')


# ------------------------------------------------------------------------------------------------ one step

def one_cycle(step, steps, peak, warmup, start=1e-4, end=1e-8):
    """The learning rate of step 0..steps-1: it rises as a cosine from start * peak to peak, then falls to end * peak.

    This is torch's OneCycleLR with DPOT's divisors and a fixed beta1, as a function of the step, without any state.
    """
    top = warmup * steps - 1
    if step <= top:
        low = start
        share = step / top if top else 1.0
    else:
        low = end
        share = 1 - (step - top) / max(steps - 1 - top, 1)
    return peak * (low + (1 - low) * (1 - math.cos(math.pi * share)) / 2)


def noisy_inputs(batch, datasets, config, noise):
    """The noisy input u (B, T, *space, C) of Eq. (3) on the model grid. batch: the GridBatches of data.by_grid."""
    fluctuations = config.normalize and config.units != 'raw'
    parts = []
    for windows, groups, _ in batch:
        seeds = [seed for group in groups for seed in group.seeds]
        evolving = [datasets[group.k].evolving for group in groups for _ in group.seeds]
        u = data.resize(windows[:, :-1], config.resolution)
        parts.append(data.add_noise(u, noise, seeds, evolving, fluctuations))
    return torch.cat(parts)


def relative_loss(prediction, windows, scale):
    """DPOT's loss, of a prediction (b, *space, C) of the last frame of the windows (b, T+1, *space, C): (b, C)."""
    return relative_l2(prediction, windows[:, -1], scale)


def change_loss(prediction, windows, scale):
    """The same over the square root of ||u_T+1 - u_T|| / ||u_T+1||, clamped to 0.01 to 1: not in the paper.

    Whoever repeats the last frame then has nearly the same loss on data that change slowly and on others.
    """
    target = windows[:, -1]
    size = safe_divide(norm(target - windows[:, -2]), norm(target)).clamp(0.01, 1)
    return relative_l2(prediction, target, scale) / size.sqrt()


def squared_loss(prediction, windows, scale):
    """Eq. (14) for one frame, as a mean over the grid points."""
    return (prediction - windows[:, -1]).square().flatten(1, -2).mean(1)


LOSSES = {'relative': relative_loss, 'change': change_loss, 'squared': squared_loss}       # --loss


def loss_of(prediction, batch, datasets, kind='relative'):
    """The error of the predicted next frame on evolving channels and native grid points, a mean over the samples.

    prediction: (B, *space, C); batch: the same samples, as the GridBatches of data.by_grid. kind: one of LOSSES.
    """
    losses = []
    parts = prediction.split([len(part.windows) for part in batch])
    for part, (windows, groups, scale) in zip(parts, batch):
        native = data.resize(part[:, None], windows.shape[2:-1])[:, 0]
        errors = LOSSES[kind](native, windows, scale)                                   # (b, C)
        of_groups = errors.split([len(group.seeds) for group in groups])
        losses += [error[:, datasets[group.k].evolving].mean(1) for group, error in zip(groups, of_groups)]
    return torch.cat(losses).mean()


# ------------------------------------------------------------------------------------------------ the loop

def compile_model(model, run, train_samples, score_samples, processes):
    """The model as the loop calls it: compiled if --compile says so and the compiler does not fail.

    A compiled model has one graph for each number of samples. Two are made here, before the first step: that of a
    training pass on so many samples, and that of a scoring pass.
    """
    if run.compile == 'off':
        return model
    config = model.config
    compiled = torch.compile(model, mode='reduce-overhead' if run.compile == 'graphs' else 'default', dynamic=False)
    buffers = [buffer.clone() for buffer in model.buffers()]
    passes = [(True, train_samples), (False, score_samples)]
    bar = terminal.Progress(passes, desc='compiling', unit='pass', leave=False, disable=processes.rank > 0)
    try:
        for training, samples in bar:
            u = torch.ones(samples, config.frames, *config.resolution, config.channels, device=processes.device)
            scale = u.new_zeros(samples, config.channels)
            with torch.set_grad_enabled(training), autocast(run, processes):
                prediction = compiled.train(training)(u, scale)
            if training:
                prediction.float().square().mean().backward()
    except Exception as error:              # of whatever kind; what is the model's fault fails eagerly, too
        compiled = model
        if processes.rank == 0:
            terminal.warn(f'--compile: {" ".join(str(error).split())[:300]}; the run goes on without it')
    for buffer, before in zip(model.buffers(), buffers):
        buffer.data.copy_(before)
    model.train()
    return compiled


def autocast(run, processes):
    """The precision of --dtype, as a context."""
    return torch.autocast(processes.device.type, torch.bfloat16, enabled=run.dtype == 'bf16')


def validation_windows(dataset):
    """(trajectory, first frame) of at most SCORED_WINDOWS, spread over all trajectories and all frames to predict."""
    count = min(dataset.count, SCORED_WINDOWS)
    return [(i * dataset.count // count, (2 * i + 1) * dataset.t_test // (2 * count)) for i in range(count)]


@torch.no_grad()
def validation_error(model, datasets, processes, dtype='fp32', samples=16):
    """The L2RE of one step from true frames on the `validation_windows` of each dataset, a mean over the datasets.

    samples: how many windows a batch has, filled up if need be, since a compiled model has a graph for each number.
    """
    T = model.config.frames
    means = []
    model.eval()
    for dataset in datasets:
        places = validation_windows(dataset)
        predictor = evaluate.Predictor(model, dataset, processes.device, dtype)
        errors = torch.zeros(len(places), dtype=torch.float64)
        for batch in processes.batches(len(places), samples):
            filled = [*batch, *[batch[-1]] * (samples - len(batch))]
            frames = dataset.windows([places[i] for i in filled], T + 1).to(processes.device)   # (B, T+1, *space', C')
            state = predictor.step(predictor.state(frames[:, :T]))
            truth = predictor.truth(frames[:, T])
            error = evaluate.l2re_of_samples(predictor.prediction(state), truth, predictor.scale_of_truth())    # (B,)
            errors[list(batch)] = error[:len(batch)].double().cpu()
        means.append(evaluate.mean(processes.sum(errors)))
    model.train()
    return sum(means) / len(means)


def optimizer_of(model, recipe, device, dtype='fp32'):
    """The optimizer of --optimizer. AdamW runs in one pass over all parameters where PyTorch has that."""
    fused = device.type in ('cpu', 'cuda') and not any(parameter.is_complex() for parameter in model.parameters())
    settings = dict(lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), weight_decay=recipe.weight_decay, fused=fused)
    if recipe.optimizer == 'adamw':
        return torch.optim.AdamW(model.parameters(), **settings)
    return Muon(*matrices(model), recipe.ratio, recipe.momentum, half=dtype == 'bf16', **settings)


def advance(model, optimizer, lr):
    """One step of the optimizer."""
    for group in optimizer.param_groups:
        group['lr'] = lr * group.get('ratio', 1)
    optimizer.step()
    if model.config.experts:
        experts.cool(model)


def balance_of(model, recipe):
    """MoE-POT's balance loss of the last forward pass and the share of each expert (layers, E); without any 0, None."""
    if not model.config.experts:
        return 0, None
    share = experts.shares(model)
    return recipe.balance * experts.balance_loss(share, recipe.batch_size), share.detach()


def backward(model, compiled, parts, datasets, recipe, run, processes):
    """Add up the gradients of a batch, part by part. Returns its loss and the shares of its experts, or None.

    model: as it is and `compiled`. parts: of --accumulate, each of which is a list of data.Group.
    """
    total = 0
    for groups in parts:
        batch = data.by_grid(groups, datasets, model.config.channels)
        u = noisy_inputs(batch, datasets, model.config, recipe.noise)                   # (B, T, *space, C)
        scale = torch.cat([part.scale for part in batch])                               # (B, C)
        with autocast(run, processes):
            prediction = compiled(u, scale)                                             # (B, *space, C)
        loss = loss_of(prediction.float(), batch, datasets, recipe.loss) / run.accumulate
        balance, share = balance_of(model, recipe)
        (loss + balance).backward()
        total += loss.detach()
    return total, share


def require_finite(steps, datasets):
    """Raise InputError for the first of some steps (number, loss, norm of the gradient) that is not finite."""
    for step, loss, gradient in steps:
        if math.isfinite(loss + gradient):
            continue
        found = f'step {step}: the loss is {loss} and the norm of its gradient {gradient}'
        if step > 1:
            raise InputError(f'{found}; begin another run with a lower --lr or --grad_clip')
        size, where = max(sizes_in_words(dataset) for dataset in datasets)
        raise InputError(f'{found} before any update; the largest values are those of {where}, {size:.1e}')


def sizes_in_words(dataset):
    """The largest root mean square of the channels of a data.Trajectories, and the name of that channel."""
    size, channel = max(zip(dataset.sizes[0].tolist(), dataset.channel_names))
    return size, f'{channel} of {dataset.name}'


LEARNABLE = 1e-3, 1e3           # root mean squares of a channel that a network without --normalize learns
OFFSET = 30                     # and so many deviations at most may it have as a mean


def units_advice(datasets, config):
    """A line on the first channel whose units a network that reads raw values does not learn, or ''."""
    if config.network == 'aotpot' and config.normalize and config.units != 'raw':
        return ''
    for dataset in datasets:
        evolving = dataset.sizes[:, dataset.evolving].T.tolist()
        for channel, (size, deviation) in zip(dataset.evolving_names, evolving):
            words = f'values of {size:.1e} with a deviation of {deviation:.1e}'
            if deviation > 0 and not (LEARNABLE[0] < size < LEARNABLE[1] and size < OFFSET * deviation):
                return f'  {channel} of {dataset.name} has {words}, which this network hardly learns; try --normalize'
    return ''


def is_due(step, steps, run):
    """Whether the run is saved and scored after so many of its steps."""
    return step == steps or step % run.save_every == 0


def fit(model, command, splits, sampling, kept, processes, resumed=None):
    """Minimise Eq. (3) over the training data. Returns the signal that ended the run, or 0.

    command: a Command whose number of steps is set. splits: {split: list of data.Trajectories}. sampling: w_k of each
    training dataset. kept: what every checkpoint holds beside the weights, 'config' and 'data'. resumed: the dict of
    the last.pt from which the run goes on. Raises InputError for data, a loss or a gradient that are not finite.
    """
    _, recipe, run, _ = command
    steps = recipe.steps
    datasets = splits['train']
    scored_split = 'valid' if splits['valid'] else 'test'
    scored_datasets = splits[scored_split]
    all_scored = len(scored_datasets) == len(datasets)
    whose = '' if all_scored else f' ({" ".join(dataset.name for dataset in scored_datasets)} alone)'
    samples = runs.at_once(recipe.batch_size, processes.world_size, run.accumulate)
    score_samples = min(samples, math.ceil(SCORED_WINDOWS / processes.world_size))
    windows = data.Windows(datasets, model.config.frames, sampling, recipe.seed, processes.device.type == 'cuda')
    optimizer = optimizer_of(model, recipe, processes.device, run.dtype)
    checkpoints = runs.Checkpoints(run.out, model, optimizer, kept, processes)
    progress = checkpoints.begin(resumed, steps)
    gradients = distributed.Gradients(model.parameters(), processes)
    compiled = compile_model(model.train(), run, samples, score_samples, processes)
    log = runs.Log(run.out, progress.step, steps, recipe.batch_size, windows.draws, processes)
    batches = runs.Batches(windows, progress.step, steps, recipe.batch_size, run.accumulate, processes)
    stop = 0
    with distributed.requests_to_stop() as requests, log.bar, closing(batches):
        while not stop:
            if is_due(progress.step, steps, run) and progress.step > progress.scored:
                error = validation_error(compiled, scored_datasets, processes, run.dtype, score_samples)
                best = scored_split == 'valid' and all_scored
                checkpoints.save_scored(progress, error, best, run.keep)
                log.write_score(progress.step, error, scored_split, whose)
            if progress.step == steps:
                checkpoints.save_last(progress)
                break
            lr = one_cycle(progress.step, steps, recipe.lr, recipe.warmup)
            gradients.zero()
            loss, share = backward(model, compiled, next(batches), datasets, recipe, run, processes)
            loss, norm = gradients.average(loss)
            gradients.clip(norm, recipe.grad_clip)
            advance(model, optimizer, lr)
            progress.step += 1
            log.add(loss, norm, share)
            due = is_due(progress.step, steps, run)
            if due or progress.step % run.log_every == 0:
                taken = log.steps()
                require_finite(taken, datasets)                         # before they are saved
                log.write(taken, lr, batches.waited)
                stop = distributed.agreed(processes, requests)
            if due or stop:
                checkpoints.save_last(progress)
    if stop:
        processes.print(f'stopped by {signal.Signals(stop).name} at step {progress.step}; continue with the same '
                        f'command and --resume')
    return stop


# ------------------------------------------------------------------------------------------------ a run

def open_splits(run, config, rows=None):
    """{split: list of the data.Trajectories of a run}, of 'valid' those that exist. rows: those to train on."""
    def opened(split, rows=None):
        return [data.Trajectories(run.data, name, split, config.frames, config.channels, rows, config.dims)
                for name in run.datasets if split != 'valid' or Path(run.data, name, 'valid.h5').exists()]
    return {'train': opened('train', rows), 'test': opened('test'), 'valid': opened('valid')}


def sampling_weights(names, recipe):
    """w_k of each dataset: that of --sampling, or the paper's, or 1. Raises InputError for an unknown dataset."""
    given = recipe.weights()
    for name in given:                          # those of a preset that are absent here have no effect
        if name not in {*names, *configs.DATASETS}:
            raise InputError(f'--sampling {name}: there is no such dataset in the mixture'
                             + configs.nearest(name, names))
    paper = {name: dataset.weight for name, dataset in configs.DATASETS.items()}
    return [given.get(name, paper.get(name, 1.0)) for name in names]


def require_trainable(command, datasets, frozen):
    """Raise InputError for a batch or datasets that the network cannot train on. frozen: whether its routers are."""
    config = command.model
    batch_size = command.recipe.batch_size
    parts = command.run.accumulate
    if config.normalize and len({dataset.steady for dataset in datasets}) > 1:
        raise InputError('--normalize: some of these datasets are steady, others not; train them apart, or with '
                         '--no-normalize')
    if config.experts and not frozen and (parts > 1 or batch_size == 1):
        raise InputError('--experts: the BatchNorm in the router needs whole batches of at least 2 samples; lower '
                         '--batch_size instead of --accumulate')


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
    for advice in (grid_advice(datasets, config), units_advice(datasets, config)):
        if advice:
            processes.print(advice)


def initialize(model, datasets, pretrained, processes):
    """Give a new network what is not random: pretrained weights, fixed channel maps, the units of solutions."""
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
    """Build the network of a Command, train it, and print its errors on splits['test']. Returns the exit code.

    splits: as of `open_splits`. resumed: the dict of the last.pt of the run to go on with. pretrained: that of the
    checkpoint from whose weights a new run starts. finetuning: the settings of finetune.py, for the checkpoint. frozen:
    whether the routers of experts stay as they are. Raises InputError for another run than that of `resumed`.
    """
    _, recipe, run, _ = command
    saved = resumed or pretrained
    if saved:                                   # whose weights know the units in this form
        units = saved['config']['model']['units']
        command = command._replace(model=dataclasses.replace(command.model, units=units))
    datasets = splits['train']
    settings = {'model': vars(command.model), 'train': vars(recipe), 'run': vars(run)}
    if finetuning:
        settings['finetune'] = finetuning
    dtype = distributed.precision(run.dtype, processes, 0 if resumed else command.model.width)
    if resumed:                                 # perhaps on another processor; earlier versions have not noted it
        dtype = resumed.get('dtype', dtype)
    run = dataclasses.replace(run, dtype=dtype)
    draws = sum(dataset.count for dataset in datasets)
    recipe = dataclasses.replace(recipe, steps=recipe.steps or math.ceil(recipe.epochs * draws / recipe.batch_size))
    command = command._replace(run=run, recipe=recipe)
    sampling = sampling_weights(run.datasets, recipe)
    headers = data.read_headers(run.data, run.datasets)
    for dataset in datasets:
        if resumed:                             # of earlier versions none
            sizes = resumed['data'].get(dataset.name, {}).get('train', {}).get('sizes')
            dataset.sizes = torch.tensor(sizes) if sizes else dataset.sizes
        headers[dataset.name]['train']['sizes'] = dataset.sizes.tolist()
    distributed.require_equal(processes, resumed['step'] if resumed else 0)
    if resumed:
        runs.require_unchanged(resumed, settings)
        difference = data.changed_header(resumed['data'], headers)
        if difference:
            raise InputError(f'--resume: the data in {run.data} are not those of the run: {difference}; restore them, '
                             f'or choose another --out')
        if resumed['scored'] == recipe.steps:
            processes.print(f'the run in {run.out} is finished, at step {resumed["step"]}; there is nothing left to do')
            distributed.leave(processes)
            return 0
    require_trainable(command, datasets, frozen)
    started = time.perf_counter()
    torch.manual_seed(recipe.seed)
    model = build(command.model, run.form, processes.device, headers).to(processes.device)
    announce(model, datasets, sampling, recipe, run, processes)
    if not resumed:
        initialize(model, datasets, pretrained, processes)
    if frozen:
        experts.freeze_routers(model)
    kept = {'config': settings, 'data': headers, 'dtype': run.dtype}
    stop = fit(model, command, splits, sampling, kept, processes, resumed)
    if not stop:
        trained = time.perf_counter()
        results = evaluate.score_all(model, splits['test'], processes)
        processes.print('\n'.join(evaluate.score_table(results)))
        processes.print(f'{trained - started:.0f} s of training, {time.perf_counter() - trained:.0f} s of evaluation; '
                        f'checkpoints in {run.out}')
    distributed.leave(processes)
    return 128 + stop if stop else 0


def main():
    command = parse()
    run = command.run
    pretrained = load_file(run.init_from) if run.init_from else None
    processes = distributed.setup(run.device, run.threads)
    with files.lock(run.out, processes):
        resumed = runs.checkpoint_to_resume(run)
        run = with_data(run, command.size, processes)
        splits = open_splits(run, command.model)
        return train_model(command._replace(run=run), splits, processes, resumed, pretrained)


if __name__ == '__main__':
    terminal.cli(main)
