"""What models do beyond their scores: how far T amplifies, whether it tells PDEs apart, which experts are taken.

    python -m lab.interpret                     both, for the newest checkpoint under out/
    python -m lab.interpret --gains             how far T, and products of T, can amplify
    python -m lab.interpret --probe --unseen wave_layer  classify the datasets by their T, with some that are new to it
    python -m lab.interpret --checkpoint out/plain --probe  the control: a plain network, by the means of its tokens
    python -m lab.interpret --checkpoint out/nano/step*.pt --probe      how that emerges in training
    python -m lab.interpret --experts           which experts each dataset takes, of a network with experts
    python -m lab.interpret --figures out/figures  gains.png, probe.png, kernels.png, experts.png

Shapes: B batch, N samples, L = 2 depth sub-layers, S streams; T (B, L, S, S), whose row is the stream that results;
C field channels, C'' of those that evolve; E experts.
"""
import math
from itertools import accumulate

import configs
from configs import InputError

import torch

import aotpot
import data
import evaluate
from nets import experts
from runtime import terminal
from runtime.terminal import Progress

# ------------------------------------------------------------------------------------------------ collecting

def in_forward_pass(modules, take, model, u):
    """take(inputs, outputs) of each of the modules, in order, in one forward pass of u (B, frames, *space, C)."""
    found = []
    hooks = [module.register_forward_hook(lambda module, inputs, outputs: found.append(take(inputs, outputs)))
             for module in modules]
    try:
        model(u)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def T_of_forward_pass(model, u):
    """T of every sub-layer, in order, in one forward pass of u (B, frames, *space, C): (B, L, S, S)."""
    mappings = [module for module in model.modules() if isinstance(module, aotpot.Mappings)]
    return torch.stack(in_forward_pass(mappings, lambda _, outputs: outputs[2], model, u), 1)


def weights_of_forward_pass(model, u):
    """The weight of each expert in every layer, in one forward pass of u (B, frames, *space, C): (B, layers, E)."""
    routers = [module for module in model.modules() if isinstance(module, experts.Router)]
    return torch.stack(in_forward_pass(routers, lambda _, outputs: outputs, model, u), 1)


def evenly_spaced_windows(test, limit):
    """At most `limit` windows of a dataset, (trajectory, first frame) each, evenly over trajectories, then frames.

    They are among those of the one-step score. The first test.count of them are of different trajectories.
    """
    N = min(limit, test.count * test.t_test)
    return [(i % test.count, i // test.count * test.t_test // math.ceil(N / test.count)) for i in range(N)]


def tokens_of_forward_pass(model, u):
    """The mean over the grid of the tokens before every layer of a plain network, for u as above: (B, layers, D).

    From such means, of its streams, an AOT block computes its T.
    """
    norms = [layer.norm1 for layer in model.layers]
    return torch.stack(in_forward_pass(norms, lambda inputs, _: inputs[0].flatten(1, -2).mean(1), model, u), 1)


@torch.no_grad()
def collect(of_forward_pass, shape, model, test, processes, limit=100, batch_size=16, dtype='fp32'):
    """What `of_forward_pass` finds, (B, *shape), in the windows of `evenly_spaced_windows`.

    (N, *shape) float64 on the CPU, equal on all processes.
    """
    places, config = evenly_spaced_windows(test, limit), model.config
    predictor = evaluate.Predictor(model, test, processes.device, dtype)
    found = torch.zeros(len(places), *shape, dtype=torch.float64)
    for batch in processes.batches(len(places), batch_size):
        frames = test.windows([places[i] for i in batch], config.frames).to(processes.device)
        with predictor.autocast:
            found[list(batch)] = of_forward_pass(model, predictor.state(frames)).cpu().double()
    return processes.sum(found)


def collect_T(model, *where, **options):
    """T of the windows of a dataset, (N, L, S, S); the arguments are those of `collect` after the model."""
    config = model.config
    return collect(T_of_forward_pass, (2 * config.depth, config.streams, config.streams), model, *where, **options)


def collect_tokens(model, *where, **options):
    """The pooled tokens of the windows of a dataset, (N, layers, D); the arguments are as for T."""
    return collect(tokens_of_forward_pass, (model.config.depth, model.config.width), model, *where, **options)


def collect_weights(model, *where, **options):
    """The weights of the experts in the windows of a dataset, (N, layers, E); the arguments are as for T."""
    return collect(weights_of_forward_pass, (model.config.depth, model.config.experts), model, *where, **options)


# ------------------------------------------------------------------------------------------------ gains

def gains(T):
    """Amax gains of each sample, T (B, L, S, S) -> {name: (B, L)}: how far the residual path can amplify.

    With x_(l+1) = T_l x_l, 'forward' is the largest row sum of |T_l|, which bounds the growth of the largest value of a
    stream; 'backward' is the largest column sum, which bounds that of the gradient. Both are 1 for a doubly stochastic
    T_l. '..._composite' is that of the product T_L ... T_l from sub-layer l to the end. The paper finds a forward gain
    of 1 and, at its peak, a composite backward gain of 1.27 (tiny), 1.39 (small), 1.58 (medium) (App. C.14).
    """
    products = torch.stack([*accumulate(reversed(T.unbind(1)), torch.matmul)][::-1], 1)
    return {name + kind: M.abs().sum(axis).amax(-1) for kind, M in (('', T), ('_composite', products))
            for name, axis in (('forward', -1), ('backward', -2))}


def gains_table(gain):
    """Lines of the table of `gains` and its numbers as a dict: mean and max over the samples for every sub-layer."""
    rows = {name: {'mean': values.mean(0).tolist(), 'max': values.amax(0).tolist()} for name, values in gain.items()}
    heads = {name: '\n'.join(name.split('_')[::-1]) if '_' in name else f'\n{name}' for name in rows}
    return terminal.table('Amax gain\nsub-layer', {
        f'{l + 1:>3} {("mixer", "MLP")[l % 2]}': {f'{heads[name]}\n{kind}': row[kind][l] for name, row in rows.items()
                                                  for kind in ('mean', 'max')}
        for l in range(len(rows['forward']['mean']))}), rows


# ------------------------------------------------------------------------------------------------ the probe

def probe_group(name):
    """The group of a dataset in the probe: FNO's 2-D Navier-Stokes is one, PDEBench's another (paper, Sec. 5.7)."""
    return next((family for family in ('ns2d_fno', 'ns2d_pdb') if name.startswith(family + '_')), name)


def confusion_of_nearest_mean(features, labels, fit):
    """Classify by the nearest mean in the Euclidean norm: counts (G, G), true group in the row, nearest in the column.

    features (N, ...), labels (N,) in 0..G-1. fit (N,): True if a sample counts towards the mean of its group, False if
    it is classified. A mean of no samples is NaN.
    """
    G, features = int(labels.max()) + 1, features.flatten(1)
    templates = torch.stack([features[fit & (labels == g)].mean(0) for g in range(G)])
    nearest = torch.cdist(features[~fit], templates).argmin(1)
    return torch.bincount(G * labels[~fit] + nearest, minlength=G * G).view(G, G)


def classify(T, sets, unseen=()):
    """Classify the windows by their T or other features: 'groups', 'group_of' each dataset, 'right', 'confusion'.

    T {name: (N, L, S, S)} as of `collect_T`, sets: their data.Trajectories. 'right' is the share of each group that is
    classified rightly, 'confusion' the counts (G, G) as lists. A dataset in `unseen` is a group of its own.
    Trajectories of even number make the means and the others are classified: no trajectory is on both sides.
    Raises InputError if a dataset has windows of only one trajectory, or if all are of one group.
    """
    group_of = {name: name if name in unseen else probe_group(name) for name in T}
    groups, sets = list(dict.fromkeys(group_of.values())), [test for test in sets if test.name in T]
    for test in sets:
        if min(len(T[test.name]), test.count) < 2:
            raise InputError(f'--datasets: {test.name} has one trajectory; it needs one for the mean, one to classify')
    if len(groups) < 2:
        raise InputError(f'--datasets: all are of the group {groups[0]}; at least two groups are needed')
    labels = torch.tensor([groups.index(group_of[name]) for name in T for _ in T[name]])
    fit = torch.tensor([trajectory % 2 == 0 for test in sets
                        for trajectory, _ in evenly_spaced_windows(test, len(T[test.name]))])
    confusion = confusion_of_nearest_mean(torch.cat([*T.values()]), labels, fit)
    right = dict(zip(groups, (confusion.diagonal() / confusion.sum(1)).tolist()))
    return {'groups': groups, 'group_of': group_of, 'right': right, 'confusion': confusion.tolist()}


def probe_table(T, sets, unseen=(), features='T'):
    """Lines of the interpretability experiment and its numbers as a dict (paper, Sec. 5.7).

    T, sets: as for `classify`. 'accuracy' is the mean over the groups, as if all had equally many samples; the paper
    finds 0.997 for small. `unseen` names datasets of T that were not trained on. They are left out at first. Then they
    are added as groups with means of their own, and all are classified again (paper, App. C.11).
    features: what T stands for.
    """
    rows = classify({name: values for name, values in T.items() if name not in unseen}, sets)
    groups, right = rows['groups'], rows['right']
    rows['accuracy'] = sum(right.values()) / len(groups)
    rows['mean'] = {name: values.mean(0).tolist() for name, values in T.items()}
    lines = [f'nearest mean {features}: accuracy {rows["accuracy"]:.3f} of {len(groups)} groups, '
             f'chance {1 / len(groups):.3f}']
    lines += terminal.table('true group / nearest', {
        f'({g + 1}) {name}': {'right': right[name], **{f'({i + 1})': count for i, count in enumerate(counts)}}
        for g, (name, counts) in enumerate(zip(groups, rows['confusion']))}, '.3f')
    if unseen:
        rows['unseen'] = more = classify(T, sets, unseen)
        lines += terminal.table(f'unseen, of {len(more["groups"])} groups',
                               {name: {'right': more['right'][name]} for name in unseen}, '.3f')
    return lines, rows


def experts_table(weights, sets):
    """Lines of which experts each dataset takes, and its numbers as a dict: the router as a classifier of PDEs.

    weights {name: (N, layers, E)} as of `collect_weights`, sets: their data.Trajectories. 'share' is the mean weight of
    each expert over the windows, (layers, E) as lists; the lines have its mean over the layers. The rest is that of
    `classify` with the weights in the place of T.
    """
    rows = {'share': {name: w.mean(0).tolist() for name, w in weights.items()}}
    mean = {name: w.mean((0, 1)).tolist() for name, w in weights.items()}
    lines = terminal.table('share of expert', {
        name: {str(e): share for e, share in enumerate(shares, 1)} for name, shares in mean.items()}, '.2f')
    if len({probe_group(name) for name in weights}) > 1:
        rows |= classify(weights, sets)
        rows['accuracy'] = sum(rows['right'].values()) / len(rows['right'])
        lines += [f'nearest mean of the weights: accuracy {rows["accuracy"]:.3f} of {len(rows["right"])} groups, '
                  f'chance {1 / len(rows["right"]):.3f}']
    return lines, rows


# ------------------------------------------------------------------------------------------------ the command

def features_of(item):
    """What --probe classifies by: T, or for a plain network, as a control, its tokens."""
    return 'pooled tokens' if item.model.config.residual == 'plain' else 'T'


def interpret(models, args, processes, report):
    """--gains, --probe, --experts: report['models'][name]['gains'] and so on; of several also report['emergence'].

    Raises InputError for a model without T (residual 'plain' with --gains, T switched off, or one stream) or without
    experts if they are asked for, and for an --unseen dataset that is missing or was trained on.
    """
    folder = evaluate.data_folder(models, args)
    unseen = data.find(folder, args.unseen, 'test', flag='--unseen') if args.unseen else []
    for item in models:
        config = item.model.config
        if config.network != 'aotpot':
            raise InputError(f'--checkpoint: {item.path} is a {config.network}; only AOT-POT and its experts can be '
                             f'interpreted')
        plain, no_T = config.residual == 'plain', config.streams == 1 or 'T' in config.ablate
        if args.gains and plain or (args.gains or args.probe) and no_T and not plain:
            raise InputError(f'--checkpoint: {item.path} has no T to look at, it was made with --residual '
                             f'{config.residual} --streams {config.streams} --ablate "{config.ablate}"')
        if args.experts and not config.experts:
            raise InputError(f'--experts: {item.path} has none, it was made with --experts 0')
        for name in unseen:
            if name in item.run.datasets:
                raise InputError(f'--unseen {name}: {item.path} was trained on it')
    models = sorted(models, key=lambda item: (item.path.parent, item.step))
    sets, T, lines = evaluate.test_sets(models, args, processes), {}, []
    for item in evaluate.each_on_device(models, processes):
        seen = [test for test in sets[item.name] if test.name not in unseen]
        if not seen:
            raise InputError(f'--unseen {" ".join(unseen)}: no other dataset is left; name some with --datasets')
        both = seen + [item.dataset(folder, name) for name in unseen]
        place = report['models'][item.name]

        def collected(function, tests):
            values = {test.name: function(item.model, test, processes, args.samples, args.batch_size, args.dtype)
                      for test in Progress(tests, desc='collecting', disable=processes.rank > 0, leave=False)}
            for name in values:
                if not values[name].isfinite().all():
                    raise InputError(f'--checkpoint: the network in {item.path} gives values that are not finite on '
                                     f'{name}, so there is nothing to interpret')
            return values
        if args.gains or args.probe:
            T[item.name] = found = collected(collect_T if features_of(item) == 'T' else collect_tokens, both)
        if args.experts:
            more, place['experts'] = experts_table(collected(collect_weights, seen), seen)
            lines += [f'{item.name}:', *more] if len(models) > 1 else more
        if args.gains:
            more, place['gains'] = gains_table(gains(torch.cat([found[test.name] for test in seen])))
            lines += [f'{item.name}:', *more] if len(models) > 1 else more
        if args.probe:
            more, place['probe'] = probe_table(found, both, unseen, features_of(item))
            lines += more if len(models) == 1 else []
    rows = report['models']
    if args.probe and len(models) > 1:
        report['emergence'] = {}
        for item in models:
            probe = rows[item.name]['probe']
            report['emergence'][item.name] = {
                **probe['right'], 'mean': probe['accuracy'],
                **{f'{name}, unseen': probe['unseen']['right'][name] for name in unseen}}
        lines += terminal.table(f'right by the nearest mean {" or ".join(dict.fromkeys(map(features_of, models)))}',
                               report['emergence'], '.3f')
    if args.figures:
        from lab import figures
        if args.gains:
            figures.save(args.figures, 'gains', figures.plot_gains({name: row['gains'] for name, row in rows.items()}))
        if args.experts:
            figures.save(args.figures, 'experts', figures.plot_experts(
                {name: row['experts']['share'] for name, row in rows.items()}))
        if args.probe:
            probes = {item.name: rows[item.name]['probe'] for item in models}
            figures.save(args.figures, 'probe', figures.plot_probe(
                {name: (T[name], probe) for name, probe in probes.items()}))
            with_T = {item.name: probes[item.name]['mean'] for item in models if features_of(item) == 'T'}
            if with_T:
                figures.save(args.figures, 'kernels', figures.plot_mean_T(with_T))
    return lines


def parse():
    """The flags. Raises InputError for those that contradict one another."""
    parser = terminal.evaluation_parser(__doc__, 'gains, probe and mean T', scoring=False)
    parser.add_argument('--gains', action='store_true', help='only the gains of T, single and composite')
    parser.add_argument('--probe', action='store_true', help='only the classification of the datasets by their T')
    parser.add_argument('--experts', action='store_true', help='which experts each dataset takes')
    parser.add_argument('--unseen', nargs='+', default=(), metavar='NAME',
                        help='add datasets to --probe that were not trained on')
    parser.add_argument('--samples', type=int, default=100, metavar='N', help='windows of each dataset [100]')
    args = parser.parse_args()
    configs.at_least(1, samples=args.samples)
    if not (args.gains or args.probe or args.experts):
        args.gains = args.probe = True
    if args.unseen and not args.probe:
        raise InputError('--unseen is an option of --probe; add it')
    return args


def main():
    evaluate.run(parse(), interpret)


if __name__ == '__main__':
    terminal.cli(main)
