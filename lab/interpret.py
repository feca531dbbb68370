"""What a model does beyond its scores: how far T amplifies, whether T tells PDEs apart, what each
mapping is worth.

    python -m lab.interpret                     --gains and --probe for the newest run under out/
    python -m lab.interpret --probe --unseen wave_layer  classify the datasets by their T, with some that are new to it
    python -m lab.interpret --fixed             the error of a step with a, d or T fixed at its mean over all inputs,
                                                or over those of the same dataset

Shapes: B batch, N samples, L = 2 depth sub-layers, S streams, G groups of datasets; T (B, L, S, S),
whose row is the stream that results. As a control, a plain network is probed by the means of its
tokens.
"""
import math
import statistics
from contextlib import ExitStack, contextmanager

import torch

import aotpot
import configs
import evaluate
from configs import InputError
from runtime import terminal
from runtime.terminal import Progress

FIXED = 'a', 'd', 'T', 'streams'        # what --fixed replaces

# ------------------------------------------------------------------------------------------------ what is observed

def mappings(model):
    """The Mappings of all sub-layers, in order."""
    return [module for module in model.modules() if isinstance(module, aotpot.Mappings)]


@contextmanager
def hooks(modules, hook):
    """Within the block, hook(module, inputs, outputs) is called after each module, and may return
    other outputs.
    """
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(hook))
        yield


@contextmanager
def observed(model):
    """Yield a list that a forward pass fills: [a; d; T] (B, S + 2, S) a sub-layer; if plain, mean
    tokens (B, D).
    """
    values = []
    plain = model.config.residual == 'plain'

    def note(module, inputs, outputs):
        if plain:
            values.append(inputs[0].flatten(1, -2).mean(1))
        else:
            a, d, T = outputs
            values.append(torch.cat([a[:, None], d[:, None], T], 1))
    with hooks([layer.norm1 for layer in model.layers] if plain else mappings(model), note):
        yield values


def evenly_spaced_inputs(dataset, limit):
    """At most `limit` inputs of a step, (trajectory, first frame): over trajectories, then over
    frames.
    """
    count = dataset.count
    N = min(limit, count * dataset.t_test)
    rounds = math.ceil(N / count)                   # over the trajectories
    return [(i % count, i // count * dataset.t_test // rounds) for i in range(N)]


@torch.no_grad()
def observe(model, dataset, processes, limit=100, batch_size=16, dtype='fp32'):
    """What is `observed` in a step from the `evenly_spaced_inputs`, (N, L, ...), and the L2RE of
    these steps, (N,).
    """
    T = model.config.frames
    places = evenly_spaced_inputs(dataset, limit)
    values = []
    errors = []
    predictor = evaluate.Predictor(model, dataset, processes.device, dtype)
    silent = processes.rank > 0
    for first in Progress(range(0, len(places), batch_size), desc=dataset.name, disable=silent, leave=False):
        frames = dataset.windows(places[first:first + batch_size], T + 1).to(processes.device)
        with observed(model) as of_batch:
            u = predictor.prediction(predictor.step(predictor.state(frames[:, :T])))
        values.append(torch.stack(of_batch, 1).cpu().double())
        errors.append(evaluate.l2re_of_samples(u, predictor.truth(frames[:, T])).cpu().double())
    values = torch.cat(values)
    if not values.isfinite().all():
        raise InputError(f'--checkpoint: T is not finite on {dataset.name}, so there is nothing to interpret')
    return values, torch.cat(errors)


# ------------------------------------------------------------------------------------------------ gains

def gains(T):
    """Amax gains of each sample, T (B, L, S, S) -> {name: (B, L)}: how far the residual path can
    amplify.

    'forward' is the largest row sum of |T_l|, which bounds the growth of the largest value of a
    stream; 'backward' is the largest column sum, which bounds that of the gradient; '..._composite'
    is the gain of T_L ... T_l (App. C.14).
    """
    products = [T[:, -1]]
    for T_l in reversed(T[:, :-1].unbind(1)):
        products.insert(0, products[0] @ T_l)
    gain = {}
    for kind, matrices in (('', T), ('_composite', torch.stack(products, 1))):
        gain[f'forward{kind}'] = matrices.abs().sum(-1).amax(-1)
        gain[f'backward{kind}'] = matrices.abs().sum(-2).amax(-1)
    return gain


def gains_table(gain):
    """Lines of the table of `gains` and its numbers as a dict: mean and max over the samples for
    every sub-layer.
    """
    rows = {name: {'mean': values.mean(0).tolist(), 'max': values.amax(0).tolist()} for name, values in gain.items()}
    lines = {}
    for l in range(gain['forward'].shape[1]):
        lines[f'{l + 1:>3} {"MLP" if l % 2 else "mixer"}'] = {
            f'{name}\n{kind}': numbers[l] for name, row in rows.items() for kind, numbers in row.items()}
    return terminal.table('Amax gain\nsub-layer', lines), rows


# ------------------------------------------------------------------------------------------------ the probe

def probe_group(name):
    """The group of a dataset in the probe: FNO's 2-D Navier-Stokes is one, PDEBench's another
    (paper, Sec. 5.7).
    """
    return name[:8] if name.startswith(('ns2d_fno_', 'ns2d_pdb_')) else name


def classify(T, datasets, unseen=(), what='T'):
    """Classify by the nearest mean T (paper, Sec. 5.7; with `unseen`, App. C.11): lines of a table,
    and the numbers.

    T: {dataset: (N, L, S, S)}, or other features, which `what` names. Trajectories of even number
    make the means and the others are classified. 'confusion' counts them, the true group in the
    row, 'right' is the share on its diagonal, 'mean' has the mean T of each dataset. Each dataset
    in `unseen` is a group of its own.
    """
    for dataset in datasets:
        if min(len(T[dataset.name]), dataset.count) < 2:
            raise InputError(f'--datasets: {dataset.name} has one trajectory; it needs one for the mean and one to '
                             f'classify')
    group_of = {name: name if name in unseen else probe_group(name) for name in T}
    groups = list(dict.fromkeys(group_of.values()))
    G = len(groups)
    labels = torch.tensor([groups.index(group_of[name]) for name in T for _ in T[name]])
    places = [place for dataset in datasets for place in evenly_spaced_inputs(dataset, len(T[dataset.name]))]
    fit = torch.tensor([trajectory % 2 == 0 for trajectory, _ in places])
    features = torch.cat([*T.values()]).flatten(1)
    means = torch.stack([features[fit & (labels == g)].mean(0) for g in range(G)])
    nearest = torch.cdist(features[~fit], means).argmin(1)
    confusion = torch.bincount(G * labels[~fit] + nearest, minlength=G * G).view(G, G)
    right = (confusion.diagonal() / confusion.sum(1)).tolist()
    rows = {'groups': groups, 'right': dict(zip(groups, right)), 'confusion': confusion.tolist(),
            'accuracy': sum(right) / G, 'mean': {name: values.mean(0).tolist() for name, values in T.items()}}
    table = {}
    for g, name in enumerate(groups):
        counts = {f'({i})': count for i, count in enumerate(rows['confusion'][g], start=1)}
        table[f'({g + 1}) {name}'] = {'right': right[g], **counts}
    return [f'nearest mean {what}: accuracy {rows["accuracy"]:.3f} of {G} groups, chance {1 / G:.3f}',
            *terminal.table('true group / nearest', table, '.3f')], rows


# ------------------------------------------------------------------------------------------------ fixed mappings

def fixing(what, means):
    """A hook for `mappings` that fixes one of FIXED. means: {module: [a; d; T]}, the means over all
    inputs.

    'streams' become their mean after the block, which is the block with the mean of d, and of the
    rows of T, for all.
    """
    def hook(module, inputs, outputs):
        a, d, T = outputs
        mean = means[module].to(T)
        if what == 'streams':
            return a, d.mean(1, keepdim=True).expand_as(d), T.mean(1, keepdim=True).expand_as(T)
        fixed = {'a': mean[0], 'd': mean[1], 'T': mean[2:]}
        return tuple(fixed[name].expand_as(u) if name == what else u for name, u in zip('adT', outputs))
    return hook


def fixed(model, datasets, observed_on, own=False):
    """The L2RE of a step with nothing and with each of FIXED fixed: {what: {dataset: mean}}.

    observed_on: a function of a dataset that returns what `observe` does.
    own: at the mean over the inputs of the same dataset, instead of all.
    """
    values, errors = zip(*map(observed_on, datasets))
    rows = {'nothing': errors}
    for what in FIXED:
        rows[what] = []
        for dataset, of_dataset in zip(datasets, values):
            mean = (of_dataset if own else torch.cat(values)).mean(0)
            with hooks(mappings(model), fixing(what, dict(zip(mappings(model), mean)))):
                rows[what].append(observed_on(dataset)[1])
    return {what: {dataset.name: evaluate.mean(of_dataset) for dataset, of_dataset in zip(datasets, errors)}
            for what, errors in rows.items()}


def ratios(rows):
    """The geometric means over the datasets of the errors of `fixed`, over that with nothing fixed:
    {what: ratio}.
    """
    means = {what: statistics.geometric_mean(errors.values()) for what, errors in rows.items()}
    return {what: means[what] / means['nothing'] for what in FIXED}


# ------------------------------------------------------------------------------------------------ the command

def main():
    parser = evaluate.parser_of(__doc__)
    parser.add_argument('--gains', action='store_true', help='the gains of T, single and composite')
    parser.add_argument('--probe', action='store_true', help='the classification of the datasets by their T')
    parser.add_argument('--fixed', action='store_true', help='the error of a step with a, d, T or the streams fixed')
    parser.add_argument('--unseen', nargs='+', default=(), metavar='NAME', help='new datasets to add to --probe')
    parser.add_argument('--samples', type=int, default=100, metavar='N', help='inputs from each dataset [100]')
    args = parser.parse_args()
    configs.bounded('--samples', args.samples, least=1)
    if not (args.gains or args.probe or args.fixed):
        args.gains = args.probe = True
    trained, processes, report = evaluate.open_checkpoint(args)
    model = trained.model
    plain = model.config.residual == 'plain'
    if (args.gains or args.fixed or not plain) and not mappings(model):
        raise InputError(f'--checkpoint: {trained.path} has no T to look at')
    if {*args.unseen} & {*trained.datasets}:
        raise InputError(f'--checkpoint: {trained.path} was trained on one of --unseen {" ".join(args.unseen)}')
    known = [dataset for dataset in evaluate.open_tests(trained, args, processes) if dataset.name not in args.unseen]
    args.datasets = args.unseen
    datasets = known + (evaluate.open_tests(trained, args, processes) if args.unseen else [])

    def observed_on(dataset):
        return observe(model, dataset, processes, args.samples, args.batch_size, args.dtype)
    if args.gains or args.probe:
        T = {dataset.name: observed_on(dataset)[0] for dataset in datasets}
        if not plain:
            T = {name: values[:, :, 2:] for name, values in T.items()}
    if args.gains:
        table, report['gains'] = gains_table(gains(torch.cat([T[dataset.name] for dataset in known])))
        processes.print('\n'.join(table))
    if args.probe:
        table, report['probe'] = classify(T, datasets, args.unseen, 'pooled tokens' if plain else 'T')
        processes.print('\n'.join(table))
    if args.fixed:
        report['fixed'] = fixed(model, known, observed_on)
        report['fixed_by_dataset'] = fixed(model, known, observed_on, own=True)
        of_all = ratios(report['fixed'])
        own = ratios(report['fixed_by_dataset'])
        rows = {what: {'at its mean': of_all[what], 'by dataset': own[what]} for what in FIXED}
        processes.print('\n'.join(terminal.table('fixed', rows, '.2f')))
        report['d'] = {dataset.name: observed_on(dataset)[0][:, :, 1:2].mean(0).tolist() for dataset in known}
        if args.figures:
            from lab import figures
            figures.save_figure(args.figures, f'gates_{trained.name}', figures.plot_mappings(report['d'], 'mean d'))
    if args.figures and args.probe and not plain:
        from lab import figures
        figure = figures.plot_mappings(report['probe']['mean'], 'mean T (rows: results, columns: sources)')
        figures.save_figure(args.figures, f'kernels_{trained.name}', figure)
    evaluate.finish(args, processes, trained.name, report)


if __name__ == '__main__':
    terminal.cli(main)
