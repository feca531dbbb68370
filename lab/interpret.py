"""What the mappings do: how far T amplifies, whether T tells PDEs apart, and what each is worth.

    python -m lab.interpret                     --gains and --probe for the newest run under out/
    python -m lab.interpret --fixed             errors with a, d or T the same for all inputs
    python -m lab.interpret --probe --unseen wave_layer     classify the datasets by their T, with
                                                some that the network was not trained on

Shapes: B batch, N samples, L = 2 depth sub-layers, S streams, G groups of datasets; a (B, L, S),
d (B, L, S) and T (B, L, S, S), whose row is the new stream.
"""
import math
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, repeat

import torch

import aotpot
import configs
import data
import evaluate
from configs import InputError
from runtime import terminal
from runtime.terminal import Progress


def mappings(model):
    """The Mappings of all sub-layers, in order."""
    return [module for module in model.modules() if isinstance(module, aotpot.Mappings)]


@contextmanager
def hooked(model, functions):
    """Within it a function of each sub-layer gets its (a, d, T), and may return others."""
    hooks = [module.register_forward_hook(lambda *call, function=function: function(call[-1]))
             for module, function in zip(mappings(model), functions)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def evenly_spaced_inputs(dataset, limit):
    """At most `limit` inputs, (trajectory, first frame), over trajectories, then over frames."""
    count = dataset.count
    N = min(limit, count * dataset.t_test)
    rounds = math.ceil(N / count)                   # over the trajectories
    return [(i % count, i // count * dataset.t_test // rounds) for i in range(N)]


@torch.no_grad()
def observe(model, dataset, processes, limit=100, batch_size=16, dtype='fp32'):
    """a (N, L, S), d (N, L, S) and T (N, L, S, S) in a step from N inputs."""
    sublayers = []                                  # the (a, d, T) of each, in one batch
    places = evenly_spaced_inputs(dataset, limit)
    predictor = evaluate.Predictor(model, dataset, processes.device, dtype)
    batches = []
    starts = range(0, len(places), batch_size)
    with hooked(model, repeat(sublayers.append)):
        for first in Progress(starts, desc=dataset.name, disable=processes.rank > 0, leave=False):
            frames = dataset.windows(places[first:first + batch_size], model.config.frames)
            sublayers.clear()
            predictor.step(predictor.state(frames.to(processes.device)))
            batches.append([torch.stack(of_all, 1).cpu().double() for of_all in zip(*sublayers)])
    observed = [*map(torch.cat, zip(*batches))]
    for letter, values in zip('adT', observed):
        if not values.isfinite().all():
            raise InputError(f'--checkpoint: {letter} is not finite on {dataset.name}')
    return observed


def fixed(model, letters, means):
    """A context in which all inputs have the same a, d or T, those in `letters`.

    means: a (L, S), d (L, S) and T (L, S, S).
    """
    def replace(outputs, of_sublayer):
        return tuple(mean.to(x).expand_as(x) if letter in letters else x
                     for letter, x, mean in zip('adT', outputs, of_sublayer))

    return hooked(model, [partial(replace, of_sublayer=of_sublayer) for of_sublayer in zip(*means)])


def scores_if_fixed(model, observed, tests, processes, batch_size=16, dtype='fp32'):
    """The errors with no mapping fixed, and with a, d, T or all: lines of a table, and a report.

    observed: [`observe` of a dataset], over whose inputs together the means are taken.
    tests: the data.Trajectories that are scored.
    """
    means = [torch.cat(of_all).mean(0) for of_all in zip(*observed)]
    report = {}
    for which, letters in {'none': '', 'a': 'a', 'd': 'd', 'T': 'T', 'all': 'adT'}.items():
        with fixed(model, letters, means):
            report[which] = evaluate.score_all(model, tests, processes, batch_size, dtype)
    rows = {test.name: {} for test in tests}
    for metric in ('rollout', 'step'):
        for which, scores in report.items():
            for name, row in rows.items():
                column = f'{evaluate.METRICS[metric].kind}\n{which}'
                row[column] = evaluate.mean(scores[name]['model'][metric])
    return terminal.table('L2RE, fixed:\ndataset', rows), report


def gains(T):
    """Amax gains of T (B, L, S, S), {name: (B, L)}: how far the residual path can amplify.

    forward: the largest row sum of |T_l|, which bounds the growth of the largest value of a stream.
    backward: the largest column sum, which bounds that of the gradient.
    ..._composite: the same of T_L ... T_l (App. C.14).
    """
    products = [*accumulate(reversed(T.unbind(1)), torch.matmul)]       # from T_L to T_L ... T_1
    gain = {}
    for kind, matrices in (('', T), ('_composite', torch.stack(products[::-1], 1))):
        gain[f'forward{kind}'] = matrices.abs().sum(-1).amax(-1)
        gain[f'backward{kind}'] = matrices.abs().sum(-2).amax(-1)
    return gain


def gains_table(gain):
    """The mean and max of `gains` over the samples: lines of a table, and {name: {kind: list}}."""
    report = {name: {'mean': values.mean(0).tolist(), 'max': values.amax(0).tolist()}
              for name, values in gain.items()}
    rows = {}
    for l in range(gain['forward'].shape[1]):
        rows[f'{l + 1:>3} {"MLP" if l % 2 else "mixer"}'] = {
            f'{name}\n{kind}': numbers[l]
            for name, kinds in report.items() for kind, numbers in kinds.items()}
    return terminal.table('Amax gain\nsub-layer', rows), report


def classify(T, datasets, unseen=()):
    """Classify by the nearest mean T (Sec. 5.7, App. C.11): lines of a table, and a report.

    Trajectories of even number make the means and the others are classified. The report's
    'confusion' counts them, the true group in the row, and 'right' is the share on its diagonal.
    T: {dataset: (N, L, S, S)}.
    datasets: their data.Trajectories. FNO's 2-D Navier-Stokes are one group, PDEBench's another.
    unseen: names of datasets that are groups of their own all the same.
    """
    groups = {}                                             # {name: [those for the mean], [others]}
    for dataset in datasets:
        name = dataset.name
        values = T[name].flatten(1)
        if min(len(values), dataset.count) < 2:
            raise InputError(f'--samples {len(values)}: {name} has {dataset.count} trajectories; it '
                             f'needs one for the mean and one to classify')
        places = evenly_spaced_inputs(dataset, len(values))
        odd = torch.tensor([trajectory % 2 for trajectory, _ in places])
        if name.startswith(('ns2d_fno_', 'ns2d_pdb_')) and name not in unseen:
            name = name[:8]
        for half, of_group in enumerate(groups.setdefault(name, ([], []))):
            of_group.append(values[odd == half])
    G = len(groups)
    means = torch.stack([torch.cat(fit).mean(0) for fit, _ in groups.values()])
    right = {}
    rows = {}
    confusion = []
    for g, (name, (_, others)) in enumerate(groups.items()):
        nearest = torch.cdist(torch.cat(others), means).argmin(1)
        confusion.append(nearest.bincount(minlength=G).tolist())
        right[name] = confusion[g][g] / len(nearest)
        rows[f'({g + 1}) {name}'] = {'right': right[name], **{
            f'({i})': count for i, count in enumerate(confusion[g], start=1)}}
    accuracy = sum(right.values()) / G
    report = {'groups': list(groups), 'right': right, 'confusion': confusion,
              'accuracy': accuracy, 'mean': {name: T[name].mean(0).tolist() for name in T}}
    line = f'nearest mean T: accuracy {accuracy:.3f} of {G} groups, chance {1 / G:.3f}'
    return [line, *terminal.table('true group / nearest', rows, '.3f')], report


def main():
    parser = evaluate.parser_of(__doc__)
    add = parser.add_argument
    add('--gains', action='store_true', help='the gains of T, single and composite')
    add('--probe', action='store_true', help='the classification of the datasets by their T')
    add('--fixed', action='store_true', help='errors with a, d, T or all at their means over inputs')
    add('--unseen', nargs='+', default=(), metavar='NAME', help='new datasets to add to --probe')
    add('--samples', type=int, default=100, metavar='N', help='inputs from each dataset [100]')
    args = parser.parse_args()
    configs.bounded('--samples', args.samples, least=1)
    if not (args.gains or args.probe or args.fixed):
        args.gains = args.probe = True
    trained, processes, report = evaluate.open_checkpoint(args)
    model = trained.model
    if not mappings(model):
        raise InputError(f'--checkpoint: {trained.path} has no T to look at')
    if {*args.unseen} & {*trained.datasets}:
        raise InputError(f'--checkpoint: {trained.path} was trained on one of --unseen '
                         + ' '.join(args.unseen))
    names = args.datasets or trained.datasets or data.find(args.data or trained.data, split='test')
    datasets = evaluate.open_tests(trained, configs.datasets_of(names), args, processes)
    if args.unseen:
        datasets += evaluate.open_tests(trained, args.unseen, args, processes, flag='--unseen')
    observed = {dataset.name: observe(model, dataset, processes, args.samples, args.batch_size,
                                      args.dtype) for dataset in datasets}
    d = {name: values[1] for name, values in observed.items()}
    T = {name: values[2] for name, values in observed.items()}
    known = [dataset for dataset in datasets if dataset.name not in args.unseen]
    if args.gains:
        gain = gains(torch.cat([T[dataset.name] for dataset in known]))
        table, report['gains'] = gains_table(gain)
        processes.print('\n'.join(table))
    if args.probe:
        table, report['probe'] = classify(T, datasets, args.unseen)
        processes.print('\n'.join(table))
    if args.fixed:
        of_known = [observed[dataset.name] for dataset in known]
        table, report['fixed'] = scores_if_fixed(
            model, of_known, known, processes, args.batch_size, args.dtype)
        processes.print('\n'.join(table))
    if args.figures:
        from lab import figures
        figure = figures.plot_mappings(d, T)
        figures.save_figure(args.figures, f'kernels_{trained.name}', figure)
    evaluate.finish(args, processes, trained, report)


if __name__ == '__main__':
    terminal.cli(main)
