"""Fine-tune a pre-trained network on one dataset, or train it there from random weights.

    python finetune.py --checkpoint out/small --dataset wave_gauss
    python finetune.py --checkpoint out/small --dataset wave_gauss --samples 128 --from_scratch
    python finetune.py --checkpoint model_Ti.pth --dataset swe_pdb --residual aot     DPOT's weights

Embedding and readout are fresh if the number of field channels, the spatial dimension or the patch
size differs, the temporal weights for another number of input frames, of which a steady problem has
one. The position embedding is resized to another grid. The router of experts stays as it is, unless
the training is from scratch, and there is no balance loss. The rest is as in train.py, but the
network and most of the recipe are those of the checkpoint, whatever stands in brackets below.
"""
import runtime  # noqa: F401, isort: skip, before torch
import dataclasses
from pathlib import Path

import numpy as np

import configs
import data
import train
from configs import FinetuneConfig, InputError, TrainConfig
from runtime import distributed, files, runs, terminal
from runtime.checkpoint import load_file, name_of

KNOWN_EPOCHS = 200              # on a dataset of the pre-training (paper, App. B.3)
NEW_EPOCHS = 500                # on another dataset
BATCH = 20           # MoE-POT's batch size; DPOT's is 32, and the paper states none for fine-tuning


def parse(argv=None):
    """A train.Command, whose defaults depend on the checkpoint and the dataset, and the checkpoint.

    --help shows the defaults of tiny and of a new dataset.
    """
    parser = terminal.Parser(description=__doc__)
    for config, title in ((FinetuneConfig(), 'fine-tuning'), (configs.model('tiny'), 'model'),
                          (TrainConfig(epochs=NEW_EPOCHS, noise=0, batch_size=BATCH), 'recipe'),
                          (configs.RunConfig(), 'run')):
        parser.add(config, title, without=('datasets', 'init_from'))
    args = parser.parse_args(argv)
    tune = configs.override(FinetuneConfig(), args)
    run = configs.override(configs.RunConfig(), args)
    pretrained = load_file(tune.checkpoint)
    config = pretrained['config']
    folder = run.data or config.get('run', {}).get('data', 'data')
    if not run.data and not Path(folder, tune.dataset, 'train.h5').exists():
        folder = 'data'
    data.find(folder, [tune.dataset], flag='--dataset')
    dataset = data.Trajectories(folder, tune.dataset, 'train', 1, None)
    model = configs.override(adapted(configs.ModelConfig(**config['model']), dataset), args)
    recipe = configs.override(recipe_for(tune, config, dataset.count), args)
    if not tune.from_scratch and model.experts != config['model'].get('experts', 0):
        raise InputError(f'--experts {model.experts}: {tune.checkpoint} has no router for so many, '
                         f'which fine-tuning leaves as it is; use train.py --init_from')
    marks = {str(tune.samples): tune.samples, f'seed{recipe.seed}': recipe.seed,
             'scratch': tune.from_scratch}
    words = [name_of(pretrained['path']), tune.dataset, *(mark for mark in marks if marks[mark])]
    run = dataclasses.replace(run, data=folder, datasets=(tune.dataset,),
                              out=run.out or 'out/' + '-'.join(words),
                              init_from='' if tune.from_scratch else tune.checkpoint)
    return train.Command(model, recipe, run, frozenset(vars(args)), tune=vars(tune)), pretrained


def adapted(config, dataset):
    """The model config of a checkpoint for the data.Trajectories of another dataset."""
    fields = train.shape_of_data(config, [dataset])
    if len(dataset.space) != config.dims:
        fields.setdefault('resolution', dataset.space)
    return dataclasses.replace(config, **fields)


def recipe_for(tune, config, count):
    """The recipe of a fine-tuning on so many trajectories. config: that of the checkpoint."""
    before = config.get('train', {})
    inherited = 'lr', 'grad_clip', 'optimizer', 'ratio', 'momentum'
    fields = {name: before[name] for name in inherited if name in before}
    if config['model'].get('experts') and not tune.from_scratch:       # then the routers are frozen
        fields['balance'] = 0.0
    known = tune.dataset in config.get('run', {}).get('datasets', ())
    batch_size = min(BATCH, before.get('batch_size', BATCH), tune.samples or count)
    epochs = KNOWN_EPOCHS if known else NEW_EPOCHS
    return TrainConfig(epochs=epochs, noise=0, batch_size=batch_size, **fields)


def subset(count, samples, seed):
    """`samples` of `count` rows, 0: all, drawn by the seed; fewer of them lie within more."""
    if samples > count:
        raise InputError(f'--samples {samples}: the training split has only {count} trajectories')
    return np.sort(np.random.default_rng(seed).permutation(count)[:samples or count])


def main():
    command, pretrained = parse()
    processes = distributed.setup(command.run.device, runs.flat(runs.settings_of(command)))
    with files.lock(command.run.out, processes):
        resumed = runs.checkpoint_to_resume(command.run, processes)
        if resumed:
            command = runs.taken_over(command, resumed)
        names = pretrained['config'].get('run', {}).get('datasets', ())
        processes.print(f'{pretrained["path"]}: step {pretrained["step"]}, trained on '
                        f'{" ".join(names) or "unknown data"}')
        [name] = command.run.datasets
        count = data.Trajectories(command.run.data, name, 'train', 1, None).count
        rows = subset(count, command.tune['samples'], command.recipe.seed)
        splits = train.open_splits(command.run, command.model, rows)
        before = configs.ModelConfig(**pretrained['config']['model'])
        train.announce_shape(before, command.model, splits['train'], processes)
        if resumed or command.tune['from_scratch']:
            pretrained.clear()                  # or its tensors would stay until the end of the run
        training = train.new_or_continued(command, splits, processes, resumed, pretrained)
        return train.run_to_the_end(training, processes) if training else 0


if __name__ == '__main__':
    terminal.cli(main)
