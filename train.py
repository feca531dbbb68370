"""Pre-train AOT-POT on a mixture of PDE datasets.

    python train.py                                                 nano on a laptop, with data it generates itself
    torchrun --standalone --nproc_per_node=8 train.py --size small --dtype bf16 --compile
    python train.py --size tiny --datasets swe_pdb dr_pdb --lr 5e-4 --out out/two
    python train.py --resume out/small/last.pt                      continue exactly, with the flags it was started with

Writes out/<size>/: last.pt (everything a resumption needs), best.pt (the weights with the lowest one-step test error),
log.jsonl (one line every --log_every steps) and config.json. The flags and defaults shown are those of --size.
"""
import dataclasses
import json
import math
import platform
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import aotpot
import configs
import data
import distributed
import evaluate
import generate
from checkpoint import initialise, read, write
from configs import InputError, show

MAX_SKIPPED = 10                                # non-finite steps in a row that end a run


# ------------------------------------------------------------------------------------------------ flags and data

def parse(argv=None):
    """(model config, recipe, run config, checkpoint to resume or None, was --data given) of a command line."""
    size = configs.Parser(add_help=False)
    size.add_argument('--size', default='nano')
    name = size.parse_known_args(argv)[0].size
    model, recipe, run = configs.model(name), configs.recipe(name), configs.RunConfig()
    parser = configs.Parser(description=__doc__)
    parser.add_argument('--size', default='nano', choices=list(configs.SIZES), help='preset [nano]')
    for config, title in ((model, f'model ({name})'), (recipe, f'recipe ({name})'), (run, 'run')):
        parser.add(config, title)
    args = parser.parse_args(argv)
    if 'steps' in args and 'epochs' in args:
        raise InputError('--steps and --epochs: give one of the two')
    if 'epochs' in args:
        args.steps = 0
    checkpoint = None
    if 'resume' in args:
        out = Path(getattr(args, 'out', '') or f'out/{name}')
        path = out / 'last.pt' if args.resume == 'last.pt' else Path(args.resume)
        checkpoint = read(path / 'last.pt' if path.is_dir() else path)
        model, recipe, run = restore(checkpoint, path)
        unchanged(args, model, recipe)
    model, recipe, run = (configs.override(config, args) for config in (model, recipe, run))
    if not run.data:
        paper = Path('data')
        run = dataclasses.replace(run, data=str(paper if name != 'nano' and any(paper.glob('*/train.h5')) else
                                                paper / 'nano'))
    if not run.out:
        run = dataclasses.replace(run, out=f'out/{name}')
    return model, recipe, run, checkpoint, 'data' in args


def unchanged(args, *saved):
    """Raise InputError where a flag contradicts the configs of the run to resume."""
    for config in saved:
        for field in dataclasses.fields(config):
            was, now = getattr(config, field.name), getattr(configs.override(config, args), field.name)
            if was != now:
                raise InputError(f'--{field.name} {show(now)}: the run to resume has {show(was)}; '
                                 f'use its checkpoint to start another run from its weights')


def restore(checkpoint, path):
    """The three configs in a checkpoint. Raises InputError where it has no optimizer state to go on with."""
    if 'optimizer' not in checkpoint:
        raise InputError(f'--resume {path}: holds weights only; resume from last.pt, or use --init_from')
    config = checkpoint['config']
    return (configs.ModelConfig(**config['model']), configs.TrainConfig(**config['train']),
            configs.RunConfig(**config['run']))


def find_data(run, given, processes):
    """The names of the datasets to train on; the built-in mixture is generated first where there is no data.

    given: --data was given; then the folder is generated only if absent and no dataset was asked for by name.
    Rank 0 generates, the others wait for it.
    """
    folder = Path(run.data)
    if processes.rank == 0 and not folder.exists() and not (given and run.datasets):
        for name in run.datasets:
            if name not in configs.BUILTIN:
                raise InputError(f'--datasets {name}: there is no {folder} and this is not a built-in dataset'
                                 f'{configs.nearest(name, configs.BUILTIN)}')
        print(f'no data in {folder}: generating the built-in mixture there, {len(configs.BUILTIN)} datasets in small '
              f'form', flush=True)
        generate.builtin(folder, device=processes.device)
    distributed.wait(processes)
    return data.find(folder, run.datasets)


# ------------------------------------------------------------------------------------------------ one step

def one_cycle(step, steps, peak, warmup, start=1e-4, end=1e-8):
    """Learning rate of step 0..steps-1: cosine from start * peak up to peak, then down to end * peak.

    The schedule of torch's OneCycleLR with DPOT's divisors, as a function of the step, so that it has no state.
    """
    top = warmup * steps - 1
    if step <= top:
        low, share = start, step / top if top else 1.0
    else:
        low, share = end, 1 - (step - top) / max(steps - 1 - top, 1)
    return peak * (low + (1 - low) * (1 - math.cos(math.pi * share)) / 2)


def inputs(groups, sets, config, noise):
    """Groups of native windows -> u (B, T, *space, C) on the model grid, with noise, group after group."""
    counts = [len(windows) for _, windows, _ in groups]
    u = groups[0][1].new_full((sum(counts), config.frames, *config.resolution, config.channels), data.PADDING)
    for part, (k, windows, seeds) in zip(u.split(counts), groups):
        part[..., :sets[k].channels] = data.add_noise(data.resize(windows[:, :-1], config.resolution), noise, seeds,
                                                      sets[k].evolving)
    return u


def relative_l2(prediction, target):
    """||prediction - target||_2 / ||target||_2 of each sample and channel: (B, ..., C), (B, ..., C) -> (B, C).

    The norms run over everything between the first and the last axis: grid points and, if given, frames.
    """
    error, size = ((x.flatten(1, -2)).norm(dim=1) for x in (prediction - target, target))
    return error / size.clamp_min(1e-7)


def loss_of(prediction, groups, sets, kind='relative'):
    """The mean over the samples of the error of the next frame, on evolving channels and native grid points.

    prediction (B, *space, C) in the order of the groups. 'relative': L2RE, DPOT's loss; 'squared': Eq. (14), a mean.
    """
    losses = []
    for (k, windows, _), u in zip(groups, prediction.split([len(windows) for _, windows, _ in groups])):
        native = data.to_native(u[:, None], sets[k])[:, 0]
        target = windows[:, -1, ..., sets[k].evolving]
        losses.append(relative_l2(native, target).mean(1) if kind == 'relative' else
                      (native - target).square().flatten(1).mean(1))
    return torch.cat(losses).mean()


def reduce_in_bf16(_, bucket):
    """The mean of a bucket of gradients over the processes, sent in bf16. (PyTorch's own such hook refuses gloo.)"""
    part = bucket.buffer().bfloat16() / torch.distributed.get_world_size()
    sent = torch.distributed.all_reduce(part, async_op=True).get_future()
    return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def memory_mb(device):
    """Peak memory of this process in MB: on the GPU where it runs there, else resident."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 1e6
    import resource  # not on Windows, and only needed here
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == 'darwin' else 1e3)


# ------------------------------------------------------------------------------------------------ the loop

class Log:
    """log.jsonl in `out`, one line every `every` steps, and the progress bar, on rank 0."""

    def __init__(self, out, every, first, steps, batch_size, processes):
        self.path, self.every, self.steps, self.batch_size = out / 'log.jsonl', every, steps, batch_size
        self.processes = processes
        if processes.rank == 0:         # a resumed run has logged steps after its checkpoint: they come again
            old = self.path.read_text().splitlines() if first and self.path.exists() else []
            self.path.write_text(''.join(line + '\n' for line in old if json.loads(line)['step'] <= first))
        self.bar = tqdm(total=steps, initial=first, desc='training', unit='step', mininterval=1,
                        disable=processes.rank > 0)
        self.restart(first)

    def restart(self, step):
        self.losses, self.waited, self.last, self.since = [], 0.0, step, time.perf_counter()

    def step(self, done, **values):
        """Count step number `done`; every so often write the mean loss since the last line and `values`."""
        self.bar.update()
        if done % self.every and done != self.steps:
            return
        passed = time.perf_counter() - self.since
        line = {'step': done, 'loss': sum(self.losses) / len(self.losses) if self.losses else None, **values,
                'samples_per_s': self.batch_size * (done - self.last) / passed, 'data_wait': self.waited / passed,
                'memory_mb': memory_mb(self.processes.device)}
        if self.processes.rank == 0:
            with open(self.path, 'a') as file:
                file.write(json.dumps(line) + '\n')
        self.bar.set_postfix_str(f'loss {line["loss"] or math.nan:.4f}, {line["samples_per_s"]:.0f} samples/s, '
                                 f'{line["data_wait"]:.0%} waiting for data, {line["skipped"]} skipped')
        self.restart(done)


def fit(model, sets, tests, recipe, run, processes, checkpoint=None, finetune=None):
    """Train `model` on the data.Trajectories `sets`, scoring on `tests`: True unless SIGTERM ended it.

    `checkpoint`: the dict of a last.pt to continue. Writes the four files of the module's docstring into run.out.
    `finetune`: what finetune.py wants to remember in them.
    All decisions (skip, stop, save) are taken on numbers that were summed over the processes.
    """
    device, rank, out = processes.device, processes.rank, Path(run.out)
    data.cache(sets, run.cache, processes)
    windows = data.Windows(sets, model.config.frames, recipe.seed)
    steps = recipe.steps or math.ceil(recipe.epochs * windows.epoch / recipe.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, (recipe.beta1, recipe.beta2),
                                  weight_decay=recipe.weight_decay, fused=device.type in ('cpu', 'cuda'))
    mixture = {item.name: [item.count, item.frames] for item in sets}
    description = {'model': dataclasses.asdict(model.config), 'train': dataclasses.asdict(recipe),
                   'run': dataclasses.asdict(run), **({'finetune': finetune} if finetune else {})}
    first, skipped, best, worse = 0, 0, math.inf, 0
    if checkpoint:
        if checkpoint['mixture'] != mixture:
            raise InputError(f'--resume: the run was trained on {checkpoint["mixture"]}, {run.data} holds {mixture}')
        model.load_state_dict(checkpoint['model'])
        optimizer.load_state_dict(checkpoint['optimizer'])
        first, skipped, best = checkpoint['step'], checkpoint['skipped'], checkpoint['best']
        worse = checkpoint['worse']
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / 'config.json').write_text(json.dumps({**description, 'mixture': mixture, 'steps': steps}, indent=1))

    network = torch.compile(model) if run.compile else model
    if processes.world_size > 1:
        network = DistributedDataParallel(network, device_ids=[device] if device.type == 'cuda' else None,
                                          gradient_as_bucket_view=True, static_graph=True)
        if run.gradients == 'bf16':
            network.register_comm_hook(None, reduce_in_bf16)
    held = run.cache == 'device'                # then windows are gathered on the device, by this process
    workers = 0 if held else run.workers if run.workers >= 0 else 4 if device.type == 'cuda' else 0
    batches = iter(torch.utils.data.DataLoader(
        windows, batch_size=None, sampler=data.batches_of_rank(first, steps, recipe.batch_size, rank, processes.world_size),
        num_workers=workers, pin_memory=device.type == 'cuda' and not held))
    if checkpoint:                              # after the loader was made, which draws a number too
        torch.set_rng_state(checkpoint['rng'])
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=run.dtype == 'bf16')

    stop = []
    handler = signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    log, in_a_row, done = Log(out, run.log_every, first, steps, recipe.batch_size, processes), 0, first
    stopping = early = False
    with log.bar:
        for done in range(first + 1, steps + 1):
            start = time.perf_counter()
            groups = [(k, w.to(device, non_blocking=True), seeds) for k, w, seeds in next(batches)]
            log.waited += time.perf_counter() - start
            for group in optimizer.param_groups:
                group['lr'] = one_cycle(done - 1, steps, recipe.lr, recipe.warmup)

            u = inputs(groups, sets, model.config, recipe.noise)
            with autocast:
                prediction = network(u)
            loss = loss_of(prediction.float(), groups, sets, recipe.loss)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip or math.inf).item()
            status = processes.sum(torch.stack([loss.detach(), loss.new_tensor(float(bool(stop)))])).tolist()
            value, stopping = status[0] / processes.world_size, status[1] > 0
            finite = math.isfinite(value) and math.isfinite(norm)       # the same numbers on every process
            if finite:
                optimizer.step()
                log.losses.append(value)
            skipped, in_a_row = skipped + (not finite), 0 if finite else in_a_row + 1
            epoch = done * recipe.batch_size / windows.epoch
            log.step(done, epoch=epoch, lr=optimizer.param_groups[0]['lr'], grad_norm=norm if finite else None,
                     skipped=skipped)
            if in_a_row == MAX_SKIPPED:
                sys.exit(f'stopped at step {done}: the loss or its gradient was not finite {MAX_SKIPPED} times in a '
                         f'row; lower --lr or --grad_clip, or look at the data of {" ".join(mixture)}')

            if not stopping and (done == steps or done % run.save_every == 0):
                pause = time.perf_counter()
                error = sum(evaluate.mean(evaluate.score(model, test, processes, limit=64, steps=1)['step'])
                            for test in tests) / len(tests)
                worse = 0 if error < best else worse + 1
                if error < best:
                    best = error
                    if rank == 0:
                        write({'model': model.state_dict(), 'step': done, 'config': description, 'one_step': error},
                             out / 'best.pt')
                if run.keep and rank == 0:
                    write({'model': model.state_dict(), 'step': done, 'config': description}, out / f'step{done}.pt')
                log.since += time.perf_counter() - pause                # not training time
            early = recipe.patience and worse >= recipe.patience
            if rank == 0 and (stopping or done == steps or done % run.save_every == 0):
                versions = {'torch': str(torch.__version__), 'python': platform.python_version()}
                write({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': done, 'epoch': epoch,
                      'skipped': skipped, 'best': best, 'worse': worse, 'rng': torch.get_rng_state(),
                      'mixture': mixture, 'config': description, 'versions': versions}, out / 'last.pt')
            if stopping or early:
                break
    signal.signal(signal.SIGTERM, handler)
    if early:
        processes.print(f'stopped early at step {done}: {worse} scorings without a better one; see {out / "best.pt"}')
    if stopping:
        processes.print(f'stopped by SIGTERM at step {done}; go on with: python train.py --resume {out / "last.pt"}')
    return not stopping


def train(config, recipe, run, sets, tests, processes, source=None, checkpoint=None, validation=None, finetune=None):
    """Build the network, start it from the checkpoint `source` if any, `fit` it and print its errors on `tests`.

    checkpoint: of the run to continue. validation: sets to score on in between, instead of `tests`.
    finetune: see `fit`.
    """
    started = time.perf_counter()
    torch.manual_seed(recipe.seed)
    model = aotpot.AOTPOT(config).to(processes.device)
    count = aotpot.parameters(model)
    processes.print(f'{config.residual}, {count:,} parameters, {show(config.resolution)} grid, {run.dtype} on '
                    f'{processes.world_size} x {processes.device.type}, global batch {recipe.batch_size} -> {run.out}')
    weights = sum(item.weight for item in sets)
    for item in sets:
        processes.print(f'  {item.name:<34} {item.count:>6} trajectories of {item.frames:>3} frames, '
                        f'{show(item.space)}, weight {item.weight:g}: {item.weight / weights:.0%} of the draws')
    if source:
        for title, parts in zip(('loaded', 'resized', 'fresh'), initialise(model, source['model'])):
            processes.print(f'{run.init_from}, {title} ({len(parts)}): {" ".join(parts) or "none"}')
    if not checkpoint and (Path(run.out) / 'last.pt').exists():
        processes.print(f'replacing the run in {run.out}; --resume would have continued it')
    finished = fit(model, sets, validation or tests, recipe, run, processes, checkpoint, finetune)
    if finished:
        trained = time.perf_counter()
        if validation:
            distributed.wait(processes)                            # rank 0 may still be writing it
            model.load_state_dict(read(Path(run.out) / 'best.pt')['model'])
            processes.print('the weights of best.pt, chosen on the validation split:')
        results = evaluate.evaluate(model, tests, processes)
        processes.print('\n'.join(evaluate.table(results)))
        processes.print(f'{count:,} parameters; {trained - started:.0f} s of training, '
                        f'{time.perf_counter() - trained:.0f} s of evaluation; checkpoints in {run.out}')
    if processes.world_size > 1:
        torch.distributed.destroy_process_group()


def main():
    config, recipe, run, checkpoint, given = parse()
    source = read(run.init_from) if run.init_from and not checkpoint else None
    processes = distributed.setup(run.device)
    data.batches_of_rank(0, 0, recipe.batch_size, world_size=processes.world_size)       # refuses before data is generated
    names = find_data(run, given, processes)
    run = dataclasses.replace(run, datasets=tuple(names))
    sets, tests = ([data.Trajectories(run.data, name, split, config.frames, config.channels, run.coefficients)
                    for name in names] for split in ('train', 'test'))
    train(config, recipe, run, sets, tests, processes, source, checkpoint)


if __name__ == '__main__':
    configs.cli(main)
