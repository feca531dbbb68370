"""What models do beyond their scores: how far T amplifies, whether it tells PDEs apart, which experts are taken.

    python -m lab.interpret                     --gains and --probe for the newest checkpoint under out/
    python -m lab.interpret --probe --unseen wave_layer  classify the datasets by their T, with some that are new to it
    python -m lab.interpret --checkpoint out/plain --probe  the control: a plain network, by the means of its tokens
    python -m lab.interpret --checkpoint out/nano/step*.pt --probe      how that emerges in training
    python -m lab.interpret --experts           which experts each dataset takes, of a network with experts

Shapes: B batch, N samples, L = 2 depth sub-layers, S streams, E experts, G groups of datasets; T (B, L, S, S), whose
row is the stream that results.
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
from runtime import commands, terminal
from runtime.terminal import Progress

FEATURES = {    # {what is collected: (the modules, what it is of their inputs and outputs, its shape for each sample)}
    'T': (lambda model: [module for module in model.modules() if isinstance(module, aotpot.Mappings)],
          lambda inputs, outputs: outputs[2], lambda config: (2 * config.depth, config.streams, config.streams)),
    'weights': (lambda model: [module for module in model.modules() if isinstance(module, experts.Router)],
                lambda inputs, outputs: outputs, lambda config: (config.depth, config.experts)),
    'pooled tokens': (lambda model: [layer.norm1 for layer in model.layers],            # before each plain layer
                      lambda inputs, outputs: inputs[0].flatten(1, -2).mean(1),
                      lambda config: (config.depth, config.width)),
}


def of_forward_pass(features, model, u):
    """One of FEATURES in a forward pass of u (B, frames, *space, C): (B, *shape)."""
    (modules, take, _), values = FEATURES[features], []
    hooks = [module.register_forward_hook(lambda _, *io: values.append(take(*io))) for module in modules(model)]
    model(u)
    for hook in hooks:
        hook.remove()
    return torch.stack(values, 1)


def evenly_spaced_inputs(test, limit):
    """At most `limit` inputs of the one-step score, (trajectory, first frame): over trajectories, then over frames."""
    N = min(limit, test.count * test.t_test)
    return [(i % test.count, i // test.count * test.t_test // math.ceil(N / test.count)) for i in range(N)]


@torch.no_grad()
def collect(features, model, test, processes, limit=100, batch_size=16, dtype='fp32'):
    """One of FEATURES in the `evenly_spaced_inputs`: (N, *shape) float64 on the CPU, equal on all processes."""
    places, shape = evenly_spaced_inputs(test, limit), FEATURES[features][2](model.config)
    predictor = evaluate.Predictor(model, test, processes.device, dtype)
    values = torch.zeros(len(places), *shape, dtype=torch.float64)
    for batch in processes.batches(len(places), batch_size):
        frames = [torch.from_numpy(test.read(i, t, t + model.config.frames)) for i, t in (places[n] for n in batch)]
        with predictor.autocast:
            u = predictor.state(torch.stack(frames).to(processes.device))
            values[list(batch)] = of_forward_pass(features, model, u).cpu().double()
    values = processes.sum(values)
    if not values.isfinite().all():
        raise InputError(f'--checkpoint: {features} is not finite on {test.name}, so there is nothing to interpret')
    return values


def gains(T):
    """Amax gains of each sample, T (B, L, S, S) -> {name: (B, L)}: how far the residual path can amplify.

    'forward' is the largest row sum of |T_l|, which bounds the growth of the largest value of a stream; 'backward' is
    the largest column sum, which bounds that of the gradient; '..._composite' is the gain of T_L ... T_l (App. C.14).
    """
    products = torch.stack([*accumulate(reversed(T.unbind(1)), torch.matmul)][::-1], 1)
    return {name + kind: matrix.abs().sum(axis).amax(-1) for kind, matrix in (('', T), ('_composite', products))
            for name, axis in (('forward', -1), ('backward', -2))}


def gains_table(gain):
    """Lines of the table of `gains` and its numbers as a dict: mean and max over the samples for every sub-layer."""
    rows = {name: {'mean': values.mean(0).tolist(), 'max': values.amax(0).tolist()} for name, values in gain.items()}
    heads = {name: '\n'.join(name.split('_')[::-1]) if '_' in name else f'\n{name}' for name in rows}
    return terminal.table('Amax gain\nsub-layer', {
        f'{l + 1:>3} {("mixer", "MLP")[l % 2]}': {f'{heads[name]}\n{kind}': row[kind][l] for name, row in rows.items()
                                                  for kind in ('mean', 'max')}
        for l in range(len(rows['forward']['mean']))}), rows


def probe_group(name):
    """The group of a dataset in the probe: FNO's 2-D Navier-Stokes is one, PDEBench's another (paper, Sec. 5.7)."""
    return next((family for family in ('ns2d_fno', 'ns2d_pdb') if name.startswith(family + '_')), name)


def confusion_of_nearest_mean(features, labels, fit):
    """Classify by the nearest mean in the Euclidean norm: counts (G, G), true group in the row, nearest in the column.

    features (N, ...), labels (N,) in 0..G-1. fit (N,): True for samples of the means, False for those to classify.
    """
    G, features = int(labels.max()) + 1, features.flatten(1)
    templates = torch.stack([features[fit & (labels == g)].mean(0) for g in range(G)])
    nearest = torch.cdist(features[~fit], templates).argmin(1)
    return torch.bincount(G * labels[~fit] + nearest, minlength=G * G).view(G, G)


def classify(T, sets, unseen=(), features='T'):
    """Classify by T {dataset: (N, L, S, S)} or other features: a line, and the numbers as a dict. sets: as T.

    'right' is the share of a group that is classified rightly; each dataset in `unseen` is a group of its own.
    Trajectories of even number make the means and the others are classified.
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
                        for trajectory, _ in evenly_spaced_inputs(test, len(T[test.name]))])
    confusion = confusion_of_nearest_mean(torch.cat([*T.values()]), labels, fit)
    right = dict(zip(groups, (confusion.diagonal() / confusion.sum(1)).tolist()))
    accuracy = sum(right.values()) / len(right)
    line = f'nearest mean {features}: accuracy {accuracy:.3f} of {len(groups)} groups, chance {1 / len(groups):.3f}'
    return line, {'groups': groups, 'group_of': group_of, 'right': right, 'confusion': confusion.tolist(),
                  'accuracy': accuracy}


def probe_table(T, sets, unseen=(), features='T'):
    """Lines of the interpretability experiment (paper, Sec. 5.7; with `unseen`, App. C.11) and its numbers."""
    line, rows = classify({name: values for name, values in T.items() if name not in unseen}, sets, (), features)
    rows['mean'] = {name: values.mean(0).tolist() for name, values in T.items()}
    lines = [line, *terminal.table('true group / nearest', {
        f'({g + 1}) {name}': {'right': right, **{f'({i + 1})': count for i, count in enumerate(counts)}}
        for g, ((name, right), counts) in enumerate(zip(rows['right'].items(), rows['confusion']))}, '.3f')]
    if unseen:
        _, more = classify(T, sets, unseen)
        rows['unseen'], cells = more, {name: {'right': more['right'][name]} for name in unseen}
        lines += terminal.table(f'unseen, of {len(more["groups"])} groups', cells, '.3f')
    return lines, rows


def experts_table(weights, sets):
    """Lines and numbers of which experts each dataset takes, by weights {dataset: (N, layers, E)}, and `classify`."""
    rows = {'share': {name: w.mean(0).tolist() for name, w in weights.items()}}
    mean = {name: w.mean((0, 1)).tolist() for name, w in weights.items()}
    lines = terminal.table('share of expert', {
        name: {str(e): share for e, share in enumerate(shares, 1)} for name, shares in mean.items()}, '.2f')
    if len({*map(probe_group, weights)}) == 1:
        return lines, rows
    line, classes = classify(weights, sets, (), 'of the weights')
    return [*lines, line], rows | classes


def features_of(item):
    """What --probe classifies by: T, or for a plain network, as a control, its tokens."""
    return 'pooled tokens' if item.model.config.residual == 'plain' else 'T'


def check(item, args, unseen):
    """Refuse a model without T, or without experts if these are asked for, and one that was trained on `unseen`."""
    config, plain = item.model.config, item.model.config.residual == 'plain'
    no_T = (args.gains or args.probe and not plain) and (plain or config.streams == 1 or 'T' in config.ablate)
    for wrong, why in (
            (config.network != 'aotpot', f'is a {config.network}; only AOT-POT and its experts can be interpreted'),
            (no_T, f'has no T to look at, it was made with --residual {config.residual} --streams {config.streams} '
                   f'--ablate "{config.ablate}"'),
            (args.experts and not config.experts, 'has none, it was made with --experts 0'),
            ({*unseen} & {*item.run.datasets}, f'was trained on one of --unseen {" ".join(unseen)}')):
        if wrong:
            raise InputError(f'--checkpoint: {item.path} {why}')


def report_all(models, args, processes, report):
    """--gains, --probe, --experts: report['models'][name]['gains'] and so on; of several also report['emergence']."""
    folder = args.data or commands.agreed(models, 'data')
    unseen = data.find(folder, args.unseen, 'test', flag='--unseen') if args.unseen else []
    models = sorted(models, key=lambda item: (item.path.parent, item.step))
    for item in models:
        check(item, args, unseen)
    sets, T, lines, rows = commands.test_sets(models, args, processes), {}, [], {}

    def collect_all(features, model, sets):
        return {test.name: collect(features, model, test, processes, args.samples, args.batch_size, args.dtype)
                for test in Progress(sets, desc='collecting', disable=processes.rank > 0, leave=False)}

    for item in models:
        if not (old := [test for test in sets[item.name] if test.name not in unseen]):
            raise InputError(f'--unseen {" ".join(unseen)}: no other dataset is left; name some with --datasets')
        both, tables, rows[item.name] = old + [item.dataset(folder, name) for name in unseen], {}, {}
        if args.gains or args.probe:
            T[item.name] = collect_all(features_of(item), item.model, both)
        if args.experts:
            tables['experts'] = experts_table(collect_all('weights', item.model, old), old)
        if args.gains:
            tables['gains'] = gains_table(gains(torch.cat([T[item.name][test.name] for test in old])))
        if args.probe:
            tables['probe'] = probe_table(T[item.name], both, unseen, features_of(item))
        for kind, (table, rows[item.name][kind]) in tables.items():
            if len(models) == 1 or kind != 'probe':         # of several checkpoints there is one table of emergence
                lines += [f'{item.name}:'] * (len(models) > 1) + table
        report['models'][item.name].update(rows[item.name])
    if args.probe and len(models) > 1:
        features = ' or '.join(dict.fromkeys(map(features_of, models)))
        report['emergence'] = {
            name: {**row['probe']['right'], 'mean': row['probe']['accuracy'],
                   **{f'{new}, unseen': row['probe']['unseen']['right'][new] for new in unseen}}
            for name, row in rows.items()}
        lines += terminal.table(f'right by the nearest mean {features}', report['emergence'], '.3f')
    if args.figures:
        from lab import figures
        if args.gains:
            figures.save(args.figures, 'gains', figures.plot_gains({name: row['gains'] for name, row in rows.items()}))
        if args.experts:
            shares = {name: row['experts']['share'] for name, row in rows.items()}
            figures.save(args.figures, 'experts', figures.plot_experts(shares))
        if args.probe:
            probes = {name: (T[name], row['probe']) for name, row in rows.items()}
            figures.save(args.figures, 'probe', figures.plot_probe(probes))
            if means := {item.name: rows[item.name]['probe']['mean'] for item in models if features_of(item) == 'T'}:
                figures.save(args.figures, 'kernels', figures.plot_mean_T(means))
    return lines


def parse():
    parser = commands.evaluation_parser(__doc__, 'gains, probe and mean T')
    parser.add_argument('--gains', action='store_true', help='only the gains of T, single and composite')
    parser.add_argument('--probe', action='store_true', help='only the classification of the datasets by their T')
    parser.add_argument('--experts', action='store_true', help='which experts each dataset takes')
    parser.add_argument('--unseen', nargs='+', default=(), metavar='NAME', help='new datasets to add to --probe')
    parser.add_argument('--samples', type=int, default=100, metavar='N', help='inputs from each dataset [100]')
    args = parser.parse_args()
    configs.at_least(1, samples=args.samples)
    if not (args.gains or args.probe or args.experts):
        args.gains = args.probe = True
    if args.unseen and not args.probe:
        raise InputError('--unseen is an option of --probe; add it')
    return args


def main():
    commands.run(parse(), report_all)


if __name__ == '__main__':
    terminal.cli(main)
