"""Fine-tune a pre-trained network on one dataset, or train the same network on it from random weights.

    python finetune.py --checkpoint out/small/best.pt --dataset wave_gauss
    python finetune.py --checkpoint out/small/best.pt --dataset wave_gauss --samples 128 --from_scratch
    python finetune.py --checkpoint model_Ti.pth --dataset swe_pdb --residual aot       DPOT's weights with fresh AOT
    python finetune.py --resume out/small-wave_gauss/last.pt          also --resume auto, as for train.py

The network is adapted to the dataset, and the script prints which weights were loaded, resized or left fresh. Embedding
and readout are fresh if the number of field channels, the spatial dimension or the patch size differs; the position
embedding is resized to another grid; the temporal weights are fresh for another number of input frames. A steady
problem (two frames, the input and the solution) has one input frame. The router of a mixture of experts stays as it is,
unless the training is from scratch, and there is no balance loss. The rest is as in train.py. The name of the folder
out/<checkpoint>-<dataset>/ goes on with --samples, --seed and --from_scratch where they are not the defaults.
"""
import runtime  # noqa: F401, isort: skip, before torch
import dataclasses
import math
from pathlib import Path

import numpy as np

import configs
import data
import train
from configs import FinetuneConfig, InputError, TrainConfig
from runtime import files, runs, terminal
from runtime.checkpoint import model_config, read

OLD, NEW = 200, 500             # epochs on a dataset of the pre-training and on another dataset (paper, App. B.3)
BATCH = 20                      # DPOT's batch size; the paper states none for fine-tuning


def parse(argv=None):
    """(model config, recipe, run config, fine-tuning config, source or None, last.pt to resume or None).

    The defaults depend on the checkpoint and the dataset; --help shows those of tiny and of a new dataset.
    """
    parser = terminal.Parser(description=__doc__)
    for config, title in ((FinetuneConfig(), 'fine-tuning'), (configs.model('tiny'), 'model'),
                          (TrainConfig(epochs=NEW, noise=0), 'recipe'), (configs.RunConfig(), 'run')):
        parser.add(config, title, without=('datasets', 'init_from'))
    args = parser.parse_args(argv)
    tune = configs.override(FinetuneConfig(), args)
    run = configs.override(configs.RunConfig(), args)
    source = saved = None
    if run.resume in ('', 'auto') or run.resume == configs.IN_OUT and not run.out:
        for name in ('checkpoint', 'dataset'):
            if not getattr(tune, name):
                raise InputError(f'--{name} is needed, or --resume with the last.pt or the folder of a run')
        source = read(tune.checkpoint)
        wanted = tune, *adapted(source, tune, run, args)
        run = wanted[-1]                                                            # with the folder of the run
    if run.resume:
        saved = runs.resumed('finetune', run.resume, run.out)
    if saved:
        begun = FinetuneConfig(**saved['config']['finetune']), *runs.restored(saved, getattr(args, 'network', ''))
        runs.unchanged(args, begun, wanted if run.resume == 'auto' else begun)
        source = None
    else:
        begun = wanted
    tune, model, recipe, run = (configs.override(config, args) for config in begun)
    if source and not tune.from_scratch and model.experts != source['config']['model'].get('experts', 0):
        raise InputError(f'--experts {model.experts}: fine-tuning leaves the router of the experts as it is, and '
                         f'{tune.checkpoint} has none for so many; use train.py --init_from')
    runs.protect(run, saved)
    return model, recipe, run, tune, source, saved


def adapted(source, tune, run, flags):
    """The model config, recipe and run config with which the network in `source` is fine-tuned; flags: as parsed."""
    config = model_config(source, getattr(flags, 'network', ''))
    run = dataclasses.replace(run, data=run.data or source['config'].get('run', {}).get('data', 'data'),
                              init_from='' if tune.from_scratch else tune.checkpoint)
    data.find(run.data, [tune.dataset], flag='--dataset')
    item = data.Trajectories(run.data, tune.dataset, 'train', 1, None)
    config = dataclasses.replace(config, channels=max(config.channels, item.channels),
                                 frames=1 if item.steady else config.frames)
    if len(item.space) != config.dims:
        config = dataclasses.replace(config, dims=len(item.space), resolution=item.space)
    before = source['config'].get('train', {})
    count = tune.samples or item.count
    rest = max(1, count - math.ceil(tune.validation * count))
    fields = {name: before[name] for name in ('lr', 'grad_clip', 'balance') if name in before}
    if config.experts and not tune.from_scratch:                                        # then the routers are frozen
        fields['balance'] = 0.0
    known = tune.dataset in source['config'].get('run', {}).get('datasets', ())
    recipe = TrainConfig(epochs=OLD if known else NEW, noise=0,
                         batch_size=min(BATCH, before.get('batch_size', BATCH), rest), **fields)
    seed = getattr(flags, 'seed', recipe.seed)
    words = [source['path'].parent.name or source['path'].stem, tune.dataset, str(tune.samples or ''),
             f'seed{seed}' if seed else '', 'scratch' if tune.from_scratch else '']
    out = run.out or 'out/' + '-'.join(word for word in words if word)
    return config, recipe, dataclasses.replace(run, datasets=(tune.dataset,), out=out)


def subsets(count, samples, validation, seed):
    """Rows drawn by the seed: (to train on, to validate on). Those of fewer samples lie within those of more, in each.

    Raises InputError if there are not enough.
    """
    if samples > count:
        raise InputError(f'--samples {samples}: the training split has only {count} trajectories')
    rows = np.random.default_rng(seed).permutation(count)[:samples or count]
    held_out = np.diff(np.ceil(validation * np.arange(len(rows) + 1))) > 0      # of every 1 / validation rows the first
    if held_out.all():
        raise InputError(f'--validation {validation}: this leaves none of {len(rows)} trajectories to train on')
    return np.sort(rows[~held_out]), np.sort(rows[held_out])


def main():
    config, recipe, run, tune, source, saved = parse()
    processes = runs.join(config, recipe, run, saved)

    def trajectories(split, rows=None):
        return [data.Trajectories(run.data, tune.dataset, split, config.frames, config.channels, rows)]
    rows, others = subsets(trajectories('train')[0].count, tune.samples, tune.validation, recipe.seed)
    tests = trajectories('test')
    if len(others):
        held_out = trajectories('train', others)
    elif Path(run.data, tune.dataset, 'valid.h5').exists():
        held_out = trajectories('valid')
    else:
        held_out = tests
    source = None if tune.from_scratch else source
    if source:
        names = source['config'].get('run', {}).get('datasets', ())
        processes.print(f'{source["path"]}: step {source["step"]}, trained on {" ".join(names) or "unknown data"}')
    with files.lock(run.out, processes):
        train.train_model(config, recipe, run, trajectories('train', rows), held_out, tests, processes, source, saved,
                          finetune=dataclasses.asdict(tune))


if __name__ == '__main__':
    terminal.cli(main)
