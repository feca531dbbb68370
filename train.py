"""Pre-train AOT-POT on a mixture of PDE datasets.

    python train.py                                     nano, for a laptop, on data that the script generates itself
    torchrun --standalone --nproc_per_node=8 train.py --size small --dtype bf16 --compile
    python train.py --size tiny --datasets swe_pdb dr_pdb --lr 5e-4 --out out/two
    python train.py --resume out/small/last.pt          continue this run exactly, with its own flags
    python train.py --size small --resume auto          start this run, or continue it if it has begun

The folder out/<size>/ gets last.pt (all that is needed to resume), best.pt (the weights with the lowest validation
error, on valid.h5, or on test.h5 of a dataset that has none), log.jsonl (one line every --log_every steps and one for
each scoring) and config.json. A folder that holds a run is refused without --resume or --overwrite. Defaults in
brackets are those of --size.
"""
import dataclasses
import inspect
import math
import sys
import time
from contextlib import closing, nullcontext
from pathlib import Path

import runtime.spinning  # noqa: F401, before torch is imported

import torch
from torch.nn.parallel import DistributedDataParallel

import aotpot
import configs
import data
import evaluate
from configs import InputError, show
from nets import experts
from nets.build import build
from runtime import distributed, files, runs, terminal
from runtime.checkpoint import channel_maps, read, start_from
from runtime.terminal import Progress

SCORED = 64                     # windows of a dataset in a scoring, at most

# ------------------------------------------------------------------------------------------------ flags and data

def parse(argv=None):
    """(model config, recipe, run config, dict of the last.pt to resume or None, --size).

    Raises InputError for flags that contradict one another or the run to resume, and if a run would be replaced.
    """
    size = terminal.Parser(add_help=False)
    size.add_argument('--size', default='nano')
    name = size.parse_known_args(argv)[0].size
    model = configs.model(name)
    recipe = configs.recipe(name)
    run = configs.run(name)
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('--size', choices=list(configs.SIZES), help='preset of model and recipe [nano]')
    for config, title in ((model, f'model ({name})'), (recipe, f'recipe ({name})'), (run, 'run')):
        parser.add(config, title)
    args = parser.parse_args(argv)
    network = getattr(args, 'network', '')
    if network:
        model = configs.model(name, network=network)
    out = '-'.join([f'out/{name}', *network.split(':')[1:]])                        # out/nano-FNO of baselines:FNO
    saved = None
    if 'resume' in args:
        saved = runs.resumed('train', args.resume, getattr(args, 'out', ''), out)
    if saved:
        begun = runs.restored(saved, network)
        if args.resume == 'auto':
            runs.unchanged(args, begun, (model, recipe, run))       # the command would have started this run
        elif args.size:
            runs.unchanged(args, begun, (model, recipe, begun[2]))
        else:
            runs.unchanged(args, begun, begun)
        model, recipe, run = begun
    model, recipe, run = (configs.override(config, args) for config in (model, recipe, run))
    run = dataclasses.replace(run, out=run.out or out)
    runs.protect(run, saved)
    return model, recipe, run, saved, name


def with_data(run, size, processes):
    """The run config with its folder of data and all names of its datasets.

    Without --data rank 0 generates the mixture of configs.BUILTIN of this size, or of nano where there are no data.
    """
    folder = run.data
    names = run.datasets
    if not folder:
        builtin = size if size in configs.BUILTIN else ''
        if not builtin and not any(Path('data').glob('*/train.h5')):
            builtin = 'nano'
            if processes.rank == 0:
                terminal.warn(f'--size {size} without --data: there is no data/<dataset>/train.h5, so this run trains '
                              f'on the small built-in mixture in data/nano; sources.generate and .prepare fill data/')
        mixture = configs.BUILTIN.get(builtin, ())
        folder = str(Path('data', builtin))
        names = names or sorted(mixture)
        absent = {name for name in names if not Path(folder, name, 'train.h5').exists()}
        if processes.rank == 0 and absent and absent <= {*mixture}:
            from sources import generate  # the solvers, where data have to be made
            files.writable('data', folder)
            print(f'generating the small datasets of the built-in mixture in {folder}', flush=True)
            generate.write(folder, [generate.plan(name, builtin) for name in mixture], device=processes.device)
    distributed.wait(processes)
    return dataclasses.replace(run, data=folder, datasets=tuple(data.find(folder, names)))


def all_of(names, opened):
    """opened(name) of all datasets. The InputError of the first that does not fit the model names those that do."""
    sets = {}
    errors = []
    for name in names:
        try:
            sets[name] = opened(name)
        except InputError as error:
            errors.append(error)
    if errors:
        without = f'; or leave it out: --datasets {" ".join(sets)}' if sets else ''
        raise InputError(f'{errors[0]}{without}')
    return [*sets.values()]


def grid_advice(sets, config):
    """A line that suggests a smaller grid with as many tokens if all data are coarser along every axis, or ''."""
    largest = tuple(max(sizes) for sizes in zip(*(item.space for item in sets)))
    if not all(size < grid for size, grid in zip(largest, config.resolution)):
        return ''
    most = min(config.patch * size // grid for size, grid in zip(largest, config.resolution))
    patch = next(P for P in range(max(1, most), 0, -1) if all(size % P == 0 for size in largest))
    return (f'  the grid of the model, {show(config.resolution)}, is finer than all data; try --resolution '
            f'{show(largest)} --patch {patch}')


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


def loss_of(prediction, grids, sets, kind='relative'):
    """The error of the predicted next frame on evolving channels and native grid points, a mean over the samples.

    prediction: (B, *space, C); grids: the same samples, as data.by_grid has them. kind: 'relative', DPOT's relative L2
    error, or 'squared', Eq. (14) as a mean over grid points and channels.
    """
    losses = []
    parts = prediction.split([len(frames) for frames, _ in grids])
    for part, (frames, groups) in zip(parts, grids):
        native = data.resize(part[:, None], frames.shape[2:-1])[:, 0]
        target = frames[:, -1]
        if kind == 'relative':
            errors = relative_l2(native, target)                                        # (b, C)
        else:
            errors = (native - target).square().flatten(1, -2).mean(1)
        of_datasets = errors.split([len(seeds) for _, seeds in groups])
        losses += [error[:, sets[k].fields].mean(1) for (k, _), error in zip(groups, of_datasets)]
    return torch.cat(losses).mean()


# ------------------------------------------------------------------------------------------------ the loop

def trainable(network, run, processes):
    """The network as the loop calls it: over several processes it averages their gradients."""
    if processes.world_size == 1:
        return network
    # buffers of ours are equal on all processes, see Record.save_all for others; torch 2.13 has another word for it
    new = 'forward_sync_buffers' in inspect.signature(DistributedDataParallel).parameters
    # six buckets, or fewer of PyTorch's usual size: torch.compile makes a graph for each
    megabytes = sum(parameter.nbytes for parameter in network.parameters()) / 2 ** 20
    return DistributedDataParallel(network, gradient_as_bucket_view=True, static_graph=run.accumulate == 1,
                                   bucket_cap_mb=max(25, math.ceil(megabytes / 6)),
                                   device_ids=[processes.device] if processes.device.type == 'cuda' else None,
                                   **{'forward_sync_buffers' if new else 'broadcast_buffers': False})


def validation_windows(item):
    """(trajectory, first frame) of at most SCORED windows, spread over all trajectories and all frames to predict."""
    count = min(item.count, SCORED)
    trajectories = [i * item.count // count for i in range(count)]
    starts = [(2 * i + 1) * item.t_test // (2 * count) for i in range(count)]
    return list(zip(trajectories, starts))


@evaluate.evaluating
def validation_error(network, sets, processes, dtype='fp32'):
    """The L2RE of one step from true frames on the `validation_windows` of each dataset, a mean over the datasets."""
    T = network.config.frames
    means = []
    for item in sets:
        windows = validation_windows(item)
        predictor = evaluate.Predictor(network, item, processes.device, dtype)
        errors = torch.zeros(len(windows), dtype=torch.float64)
        size = min(16, math.ceil(len(windows) / processes.world_size))
        for batch in processes.batches(len(windows), size):
            padded = [*batch, *[batch[-1]] * (size - len(batch))]       # --compile makes a graph of each size
            frames = item.windows([windows[i] for i in padded], T + 1).to(processes.device)  # (B, T+1, *space', C')
            state = predictor.step(predictor.state(frames[:, :T]))
            error = relative_l2(predictor.scored(state), predictor.truth(frames[:, T]))     # (B, C'')
            errors[list(batch)] = error.mean(1)[:len(batch)].double().cpu()
        means.append(evaluate.mean(processes.sum(errors)))
    return sum(means) / len(means)


def check_finite(sets, frames, processes):
    """Raise InputError for a value that is not finite in what scorings will read, frames T and those to predict."""
    for item in Progress(sets, desc='checking the test data', disable=processes.rank > 0, leave=False):
        for [trajectory] in processes.batches(item.count, 1):
            item.read(trajectory, 0, frames + item.t_test)


def adamw(model, recipe, device):
    """AdamW in one pass over all parameters where PyTorch has that, which is not for complex ones."""
    fused = device.type in ('cpu', 'cuda') and not any(parameter.is_complex() for parameter in model.parameters())
    return torch.optim.AdamW(model.parameters(), recipe.lr, (recipe.beta1, recipe.beta2),
                             weight_decay=recipe.weight_decay, fused=fused)


def advance(model, optimizer, skip, buffers):
    """One step of the optimizer, or none if skip, a number on the device, is 1: the host need not know.

    buffers: copies of the model's from before the step, such as the statistics of a BatchNorm. They come back after a
    skip, and where they are not finite.
    """
    if optimizer.defaults['fused']:
        optimizer.found_inf = skip
        optimizer.step()
    elif not skip:
        optimizer.step()
    if model.config.experts:
        experts.cool(model)
    for buffer, before in zip(model.buffers(), buffers):
        lost = (skip > 0) | ~buffer.isfinite().all()
        buffer.copy_(torch.where(lost, before, buffer))


def gradients(network, model, batch, sets, recipe, autocast):
    """The gradients of a batch, a list of parts, which are added up; each is a list of groups of data.Windows.

    network: the model as `trainable` returns it. Returns the loss, the norm of the gradient before it is clipped, and
    with experts the share of each, (layers, E).
    """
    model.zero_grad()
    losses = []
    share = None
    for i, groups in enumerate(batch, 1):
        averaging = i == len(batch) or not isinstance(network, DistributedDataParallel)
        with nullcontext() if averaging else network.no_sync():
            grids = data.by_grid(groups, sets, model.config.channels)
            u = inputs(grids, sets, model.config, recipe.noise)                         # (B, T, *space, C), noisy
            with autocast:
                prediction = network(u)                                                 # (B, *space, C)
            loss = loss_of(prediction.float(), grids, sets, recipe.loss) / len(batch)
            losses.append(loss.detach())
            if model.config.experts:
                share = experts.shares(model)                                           # (layers, E)
                loss = loss + recipe.balance * experts.balance_loss(share, recipe.batch_size)
                share = share.detach()
            loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip or math.inf)
    return sum(losses), norm, share


def fit(model, sets, held_out, recipe, run, processes, saved=None, finetune=None):
    """Train `model` on the data.Trajectories `sets`, score it on `held_out`, and return the runs.Record.

    saved: the dict of the last.pt to resume. finetune: a dict that finetune.py wants in all checkpoints. Raises
    InputError for data that are not finite and for a file that cannot be written.
    """
    model.train().one_backward = True           # see nets.fast.Fast
    windows = data.Windows(sets, model.config.frames, recipe.seed, pinned=processes.device.type == 'cuda')
    optimizer = adamw(model, recipe, processes.device)
    fingerprints = data.fingerprints(run.data, [item.name for item in sets], run.coefficients)
    record = runs.Record(model, optimizer, windows, held_out, fingerprints, recipe, run, processes, saved, finetune)
    mode = 'reduce-overhead' if run.graphs else 'default'
    compiled = torch.compile(model, mode=mode) if run.compile else model
    network = trainable(compiled, run, processes)
    numbers = runs.batches_of_rank(record.state.step, record.steps, recipe.batch_size, processes.rank,
                                   processes.world_size, run.accumulate)
    batches = runs.Batches(windows, numbers, run, processes)
    autocast = torch.autocast(processes.device.type, torch.bfloat16, enabled=run.dtype == 'bf16')

    def score():
        record.score(lambda: validation_error(compiled, held_out, processes, run.dtype))
    with distributed.requests_to_stop() as requests, record.bar, closing(batches):
        if record.due(record.state.step):                               # the run ended before its last scoring
            score()
        for step in range(record.state.step + 1, record.steps + 1):
            batch = next(batches)
            lr = one_cycle(step - 1, record.steps, recipe.lr, recipe.warmup)
            for group in optimizer.param_groups:
                group['lr'] = lr
            buffers = [buffer.clone() for buffer in model.buffers()]
            loss, norm, share = gradients(network, model, batch, sets, recipe, autocast)
            skip = record.agree(step, lr, loss, norm, share, requests, batches.waited)
            advance(model, optimizer, skip, buffers)
            ended = record.settle(but=1)        # of the step before, for which the GPU need not be waited for
            if ended or record.due(step):
                ended = record.settle() or ended
                record.save_all()
            if ended:
                record.ended = ended
                break
            if record.due(step):
                score()
    record.close(requests)
    return record


def announce(model, sets, recipe, run, processes):
    """Print the header: the network, the machine, the datasets and their shares of the draws."""
    config = model.config
    hardware = processes.device.type
    if hardware == 'cpu':
        threads = torch.get_num_threads()
        hardware += f' with {threads} thread' + ('s' if threads > 1 else '')
    processes.print(f'{config.title}, {size_of(model)}, {show(config.resolution)} grid, {run.dtype} on '
                    f'{processes.world_size} x {hardware}, global batch {recipe.batch_size} -> {run.out}')
    weights = sum(item.weight for item in sets)
    for item in sets:
        processes.print(f'  {item.name:<34} {item.count:>6} trajectories of {item.frames:>3} frames, '
                        f'{show(item.space)}, weight {item.weight:g}: {item.weight / weights:.0%} of the draws')
    if advice := grid_advice(sets, config):
        processes.print(advice)


def size_of(model):
    """The number of parameters in words."""
    count = f'{aotpot.parameters(model):,} parameters'
    return f'{count}, {experts.activated(model):,} of them activated' if model.config.experts else count


def use_solution_units(model, sets):
    """Let predictions of a network with --normalize have the units of the solutions of steady training sets.

    Raises InputError if only some of the sets are steady: the others need those of their input.
    """
    if not all(item.steady for item in sets):
        kinds = [' '.join(item.name for item in sets if item.steady == steady) for steady in (True, False)]
        raise InputError('--normalize: {} steady, {} not; train them apart, or with --no-normalize'.format(*kinds))
    units = data.solution_units(sets, model.config.channels)
    model.units.solution = units.to(next(model.parameters()).device)


def refuse_small_batches(model, recipe, run):
    """Raise InputError if a BatchNorm would see only parts of a batch, or a single sample."""
    norms = torch.nn.modules.batchnorm._BatchNorm, experts.BatchNorm
    if run.accumulate > 1 and any(isinstance(module, norms) for module in model.modules()):
        raise InputError('--accumulate: the BatchNorm in this network needs whole batches; lower --batch_size')
    if recipe.batch_size < 2 and any(parameter.requires_grad for layer in experts.layers(model)
                                     for parameter in layer.router.parameters()):
        raise InputError("--batch_size 1: the BatchNorm in the experts' router needs at least 2 samples")


def train_model(config, recipe, run, sets, held_out, tests, processes, source=None, saved=None, finetune=None):
    """Build the network, start it from the checkpoint `source` if given, `fit` it and print its errors on `tests`.

    held_out, saved, finetune: as for `fit`. Raises InputError for data or a batch that the network cannot take.
    """
    started = time.perf_counter()
    samples = runs.at_once(recipe.batch_size, processes.world_size, run.accumulate)
    distributed.refuse_beyond_memory(config, samples, processes.device)
    torch.manual_seed(recipe.seed)
    model = build(config, run.form).to(processes.device)
    run = dataclasses.replace(run, dtype=distributed.precision(run.dtype, processes.device))
    announce(model, sets, recipe, run, processes)
    for line in start_from(model, source) if source else ():
        processes.print(line)
    inherited = source['config']['model'].get('channel_maps') if source else ''
    if config.channel_maps not in ('', 'learned', inherited) and not saved:
        model.load_state_dict(channel_maps(config.channel_maps, config.channels), strict=False)
    if config.normalize and any(item.steady for item in sets):
        use_solution_units(model, sets)
        processes.print('  --normalize: predictions get the mean and deviation of the training solutions')
    if finetune and not finetune['from_scratch']:
        experts.freeze_routers(model)
    refuse_small_batches(model, recipe, run)
    if processes.rank == 0:
        runs.protect(run, saved)                # another process may have made one since the flags were read
    check_finite(dict.fromkeys([*tests, *held_out]), config.frames, processes)
    record = fit(model, sets, held_out, recipe, run, processes, saved, finetune)
    if not record.ended:
        trained = time.perf_counter()
        processes.print(record.take_chosen())
        results = evaluate.score_all(model.eval(), tests, processes)
        processes.print('\n'.join(evaluate.table(results)))
        processes.print(f'{size_of(model)}; {trained - started:.0f} s of training, '
                        f'{time.perf_counter() - trained:.0f} s of evaluation; checkpoints in {run.out}')
    distributed.leave(processes)
    if record.ended:
        sys.exit(128 + record.ended)


def main():
    config, recipe, run, saved, size = parse()
    source = read(run.init_from) if run.init_from and not saved else None
    processes = runs.join(config, recipe, run, saved)
    run = with_data(run, size, processes)
    names = run.datasets

    def trajectories(name, split):
        return data.Trajectories(run.data, name, split, config.frames, config.channels, run.coefficients,
                                 dims=config.dims)
    sets = all_of(names, lambda name: trajectories(name, 'train'))
    tests = [trajectories(name, 'test') for name in names]
    for name in recipe.weights():               # those of a preset that are absent here have no effect
        if name not in {*names, *configs.DATASETS}:
            raise InputError(f'--sampling {name}: there is no such dataset in the mixture'
                             + configs.nearest(name, names))
    for item in sets:
        item.weight = recipe.weights().get(item.name, item.weight)
    held_out = [trajectories(name, 'valid') if data.validation_split(run.data, name) == 'valid' else test
                for name, test in zip(names, tests)]
    with files.lock(run.out, processes):
        train_model(config, recipe, run, sets, held_out, tests, processes, source, saved)


if __name__ == '__main__':
    terminal.cli(main)
