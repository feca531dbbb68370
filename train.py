"""Pre-train AOT-POT on a mixture of PDE datasets.

    python train.py                                     nano, for a laptop, on data that the script generates itself
    torchrun --standalone --nproc_per_node=8 train.py --size small         on GPUs, compiled and in bf16
    python train.py --size tiny --datasets swe_pdb dr_pdb --lr 5e-4 --out out/two
    python train.py --size small --resume               start this run, or continue it exactly if it has begun

The folder out/<size>/ gets last.pt (all that is needed to resume), config.json and log.jsonl (one line every
--log_every steps and one for each scoring), and where a dataset has a valid.h5 also best.pt, the weights with the
lowest error on it. A folder that holds a run is refused without --resume. Defaults in brackets are those of --size.
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
from nets import experts
from nets.build import build, matrices
from nets.muon import Muon
from runtime import distributed, files, runs, terminal
from runtime.checkpoint import maps_in, read, start_from

SCORED = 64                     # windows of a dataset in a scoring, at most

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
            generate.write(folder, [generate.plan(name, builtin) for name in mixture], device=processes.device)
    distributed.wait(processes)
    return dataclasses.replace(run, data=folder, datasets=tuple(data.find(folder, names)))


def grid_advice(sets, config):
    """A line that suggests the largest grid of the data for a model whose grid is none of theirs, or ''."""
    grids = [item.space for item in sets]
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


def inputs(grids, sets, config, noise):
    """The noisy input u (B, T, *space, C) on the model grid, from samples as data.by_grid has them, in order."""
    parts = []
    for frames, groups in grids:
        seeds, evolving = zip(*((seed, sets[k].fields) for k, seeds in groups for seed in seeds))
        parts.append(data.add_noise(data.resize(frames[:, :-1], config.resolution), noise, seeds, evolving))
    return torch.cat(parts)


def relative_l2(prediction, target):
    """||prediction - target||_2 / ||target||_2 of each sample and channel: (B, ..., C), (B, ..., C) -> (B, C).

    A target that is zero throughout adds to the loss but nothing to its gradient.
    """
    return data.relative(data.norm(prediction - target), data.norm(target))


def relative(prediction, frames):
    """DPOT's loss, of a prediction (b, *space, C) of the last of the frames (b, T+1, *space, C): (b, C)."""
    return relative_l2(prediction, frames[:, -1])


def change(prediction, frames):
    """The same over the square root of ||u_T+1 - u_T|| / ||u_T+1||, clamped to 0.01 to 1: not in the paper.

    Whoever repeats the last frame then has nearly the same loss on data that change slowly and on others.
    """
    target = frames[:, -1]
    size = data.relative(data.norm(target - frames[:, -2]), data.norm(target)).clamp(0.01, 1)
    return relative_l2(prediction, target) / size.sqrt()


def squared(prediction, frames):
    """Eq. (14) for one frame, as a mean over the grid points."""
    return (prediction - frames[:, -1]).square().flatten(1, -2).mean(1)


LOSSES = {'relative': relative, 'change': change, 'squared': squared}       # --loss


def loss_of(prediction, grids, sets, kind='relative'):
    """The error of the predicted next frame on evolving channels and native grid points, a mean over the samples.

    prediction: (B, *space, C); grids: the same samples, as data.by_grid has them. kind: one of LOSSES.
    """
    losses = []
    parts = prediction.split([len(frames) for frames, _ in grids])
    for part, (frames, groups) in zip(parts, grids):
        native = data.resize(part[:, None], frames.shape[2:-1])[:, 0]
        errors = LOSSES[kind](native, frames)                                           # (b, C)
        of_datasets = errors.split([len(seeds) for _, seeds in groups])
        losses += [error[:, sets[k].fields].mean(1) for (k, _), error in zip(groups, of_datasets)]
    return torch.cat(losses).mean()


# ------------------------------------------------------------------------------------------------ the loop

def compiled(model, run, sizes, processes):
    """The model as the loop calls it, compiled if `run` says so and the compiler does not fail.

    sizes: how many samples it is trained and scored with at once, each of which is compiled here.
    """
    if not run.compile:
        return model
    config = model.config
    network = torch.compile(model, mode='reduce-overhead' if run.graphs else 'default', dynamic=False)
    buffers = [buffer.clone() for buffer in model.buffers()]
    passes = terminal.Progress(list(zip((True, False), sizes)), desc='compiling', unit='pass', leave=False,
                               disable=processes.rank > 0)
    try:
        for training, samples in passes:
            u = torch.ones(samples, config.frames, *config.resolution, config.channels, device=processes.device)
            with torch.set_grad_enabled(training), autocast(run, processes):
                prediction = network.train(training)(u)
            if training:
                prediction.float().square().mean().backward()
    except Exception as error:              # of whatever kind; what is the model's fault fails eagerly, too
        network = model
        if processes.rank == 0:
            terminal.warn(f'--compile: {" ".join(str(error).split())[:300]}; the run goes on without it')
    for buffer, before in zip(model.buffers(), buffers):
        buffer.data.copy_(before)
    model.train()
    return network


def autocast(run, processes):
    """The precision of --dtype, as a context."""
    return torch.autocast(processes.device.type, torch.bfloat16, enabled=run.dtype == 'bf16')


def validation_windows(item):
    """(trajectory, first frame) of at most SCORED windows, spread over all trajectories and all frames to predict."""
    count = min(item.count, SCORED)
    return [(i * item.count // count, (2 * i + 1) * item.t_test // (2 * count)) for i in range(count)]


@torch.no_grad()
def validation_error(network, sets, processes, dtype='fp32', size=16):
    """The L2RE of one step from true frames on the `validation_windows` of each dataset, a mean over the datasets.

    size: the windows of a batch, always: a compiled network has a graph for each size.
    """
    T = network.config.frames
    means = []
    for item in sets:
        windows = validation_windows(item)
        predictor = evaluate.Predictor(network, item, processes.device, dtype)
        errors = torch.zeros(len(windows), dtype=torch.float64)
        for batch in processes.batches(len(windows), size):
            padded = [*batch, *[batch[-1]] * (size - len(batch))]
            frames = item.windows([windows[i] for i in padded], T + 1).to(processes.device)  # (B, T+1, *space', C')
            state = predictor.step(predictor.state(frames[:, :T]))
            error = evaluate.relative_error(predictor.scored(state), predictor.truth(frames[:, T]))         # (B,)
            errors[list(batch)] = error[:len(batch)].double().cpu()
        means.append(evaluate.mean(processes.sum(errors)))
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


def fit(model, command, sets, kept, processes, saved=None):
    """Train `model` by a Command, with its number of steps, on sets['train']. Returns the signal that ended it, or 0.

    kept: what all its checkpoints hold, 'config' and 'data'. The rest is as of `train_model`. Raises InputError for
    data, a loss or a gradient that are not finite.
    """
    recipe = command.recipe
    run = command.run
    steps = recipe.steps
    samples = runs.at_once(recipe.batch_size, processes.world_size, run.accumulate)
    scored = min(samples, math.ceil(SCORED / processes.world_size))
    windows = data.Windows(sets['train'], model.config.frames, recipe.seed, pinned=processes.device.type == 'cuda')
    model.train()
    optimizer = optimizer_of(model, recipe, processes.device, run.dtype)
    folder = runs.Folder(run.out, model, optimizer, kept, processes)
    state = folder.begin(saved, steps)
    gradients = distributed.Gradients(model.parameters(), processes)
    network = compiled(model, run, (samples, scored), processes)
    log = runs.Log(run.out, state, steps, recipe.batch_size, windows.draws, processes)
    numbers = runs.batches_of_rank(state.step, steps, recipe.batch_size, processes.rank, processes.world_size,
                                   run.accumulate)
    batches = runs.Batches(windows, numbers, run.accumulate, processes.device)
    stop = 0

    def due(step):
        return step == steps or step % run.save_every == 0

    def score():
        start = time.perf_counter()
        error = validation_error(network, sets['valid'] or sets['test'], processes, run.dtype, scored)
        network.train()
        state.scored = state.step
        log.scored(state, error, time.perf_counter() - start)
        if sets['valid'] and error < state.best:
            state.best = error
            folder.save('best.pt', state.step, valid=error)
        if run.keep:
            folder.save(f'step{state.step}.pt', state.step)
        if state.step == steps:
            folder.save_last(state)                                         # there will be no other one

    with distributed.requests_to_stop() as requests, log.bar, closing(batches):
        if due(state.step) and state.step > state.scored:                   # the run ended before this scoring
            score()
        for step in range(state.step + 1, steps + 1):
            lr = one_cycle(step - 1, steps, recipe.lr, recipe.warmup)
            losses = []
            gradients.zero()
            for part in next(batches):                                      # --accumulate parts of a batch
                grids = data.by_grid(part, sets['train'], model.config.channels)
                u = inputs(grids, sets['train'], model.config, recipe.noise)            # (B, T, *space, C), noisy
                with autocast(run, processes):
                    prediction = network(u)                                             # (B, *space, C)
                loss = loss_of(prediction.float(), grids, sets['train'], recipe.loss) / run.accumulate
                balance, share = balance_of(model, recipe)
                (loss + balance).backward()
                losses.append(loss.detach())
            loss, norm = gradients.average(sum(losses))
            gradients.clip(norm, recipe.grad_clip)
            advance(model, optimizer, lr)
            state.step = step
            log.add(loss, norm, share)
            if due(step) or step % run.log_every == 0:
                log.write(state, lr, batches.waited)
                stop = distributed.agreed(processes, requests)
            if due(step) or stop:
                folder.save_last(state)
            if stop:
                break
            if due(step):
                score()
    if stop:
        processes.print(f'stopped by {signal.Signals(stop).name} at step {state.step}; continue with the same command '
                        f'and --resume')
    return stop


# ------------------------------------------------------------------------------------------------ a run

def open_data(run, config, rows=None):
    """{split: the data.Trajectories of the run's datasets}, of 'valid' those that exist. rows: those to train on."""
    def read(split, rows=None):
        return [data.Trajectories(run.data, name, split, config.frames, config.channels, rows, config.dims)
                for name in run.datasets if split != 'valid' or Path(run.data, name, 'valid.h5').exists()]
    return {'train': read('train', rows), 'test': read('test'), 'valid': read('valid')}


def weigh(sets, recipe):
    """Give the data.Trajectories their weights of --sampling. Raises InputError for an unknown dataset."""
    names = [item.name for item in sets]
    for name in recipe.weights():               # those of a preset that are absent here have no effect
        if name not in {*names, *configs.DATASETS}:
            raise InputError(f'--sampling {name}: there is no such dataset in the mixture'
                             + configs.nearest(name, names))
    for item in sets:
        item.weight = recipe.weights().get(item.name, item.weight)


def require_trainable(command, sets, processes, frozen):
    """Raise InputError for a batch or datasets that the network cannot train on. frozen: whether its routers are."""
    config = command.model
    batch_size = command.recipe.batch_size
    parts = command.run.accumulate
    distributed.refuse_beyond_memory(config, runs.at_once(batch_size, processes.world_size, parts), processes.device)
    if config.normalize and len({item.steady for item in sets}) > 1:
        raise InputError('--normalize: some of these datasets are steady, others not; train them apart, or with '
                         '--no-normalize')
    if config.experts and not frozen and (parts > 1 or batch_size == 1):
        raise InputError('--experts: the BatchNorm in the router needs whole batches of at least 2 samples; lower '
                         '--batch_size instead of --accumulate')


def announce(model, sets, recipe, run, processes):
    """Print the header: the network, the machine, the datasets and their shares of the draws."""
    config = model.config
    hardware = f'{processes.world_size} x {processes.device.type}'
    if run.compile:
        form = 'compiled as CUDA graphs' if run.graphs else 'compiled'
        hardware += f', {form} before the first step, which takes a minute or two'
    size = f'{aotpot.parameters(model):,} parameters'
    if config.experts:
        size += f', {experts.activated(model):,} of them activated'
    processes.print(f'{config.title}, {size}, {show(config.resolution)} grid, {run.dtype} on {hardware}, global batch '
                    f'{recipe.batch_size} -> {run.out}')
    weights = sum(item.weight for item in sets)
    for item in sets:
        processes.print(f'  {item.name:<34} {item.count:>6} trajectories of {item.frames:>3} frames, '
                        f'{show(item.space)}, weight {item.weight:g}: {item.weight / weights:.0%} of the draws')
    advice = grid_advice(sets, config)
    if advice:
        processes.print(advice)


def begin(model, sets, source, processes):
    """Give a new network what is not random: weights of the checkpoint `source`, fixed maps, units of solutions."""
    config = model.config
    loaded = ''
    if source:
        processes.print(start_from(model, source))
        loaded = source['config']['model'].get('channel_maps')
    if config.channel_maps not in ('', 'learned', loaded):
        model.load_state_dict(maps_in(config.channel_maps, config.channels), strict=False)
    if config.normalize and sets[0].steady:
        model.units.solution = data.solution_units(sets, config.channels).to(processes.device)
        processes.print('  --normalize: predictions get the mean and deviation of the training solutions')


def train_model(command, sets, processes, saved=None, source=None, tune=None):
    """Build the network of a Command, train it, and print its errors on sets['test']. Returns the exit code.

    sets: as of `open_data`. saved: the dict of the last.pt to resume. source: that of a checkpoint from which a new run
    starts. tune: the FinetuneConfig of finetune.py. Raises InputError for another run than that of `saved`.
    """
    config = command.model
    recipe = command.recipe
    frozen = bool(tune and not tune.from_scratch)
    settings = {'model': vars(config), 'train': vars(recipe), 'run': vars(command.run)}
    if tune:
        settings['finetune'] = vars(tune)
    run = dataclasses.replace(command.run, dtype=distributed.precision(command.run.dtype, processes.device))
    draws = sum(item.count for item in sets['train'])
    recipe = dataclasses.replace(recipe, steps=recipe.steps or math.ceil(recipe.epochs * draws / recipe.batch_size))
    command = command._replace(run=run, recipe=recipe)
    headers = data.headers(run.data, run.datasets)
    for item in sets['train']:
        headers[item.name]['train']['largest'] = data.largest(item)
    distributed.require_equal(processes, saved['step'] if saved else 0)
    if saved:
        runs.require_unchanged(saved, settings)
        difference = data.difference(saved['data'], headers)
        if difference:
            raise InputError(f'--resume: the data in {run.data} are not those of the run: {difference}; restore them, '
                             f'or choose another --out')
        if saved['scored'] == recipe.steps:
            processes.print(f'the run in {run.out} is finished, at step {saved["step"]}; there is nothing left to do')
            distributed.leave(processes)
            return 0
    require_trainable(command, sets['train'], processes, frozen)
    started = time.perf_counter()
    torch.manual_seed(recipe.seed)
    model = build(config, run.form, processes.device).to(processes.device)
    model.data = headers
    announce(model, sets['train'], recipe, run, processes)
    if not saved:
        begin(model, sets['train'], source, processes)
    if frozen:
        experts.freeze_routers(model)
    stop = fit(model, command, sets, {'config': settings, 'data': headers}, processes, saved)
    if not stop:
        trained = time.perf_counter()
        results = evaluate.score_all(model.eval(), sets['test'], processes)
        processes.print('\n'.join(evaluate.table(results)))
        processes.print(f'{trained - started:.0f} s of training, {time.perf_counter() - trained:.0f} s of evaluation; '
                        f'checkpoints in {run.out}')
    distributed.leave(processes)
    return 128 + stop if stop else 0


def main():
    command = parse()
    run = command.run
    source = read(run.init_from) if run.init_from else None
    processes = distributed.setup(run.device, run.threads)
    with files.lock(run.out, processes):
        saved = runs.begun(run)
        run = with_data(run, command.size, processes)
        sets = open_data(run, command.model)
        weigh(sets['train'], command.recipe)
        return train_model(command._replace(run=run), sets, processes, saved, source)


if __name__ == '__main__':
    terminal.cli(main)
