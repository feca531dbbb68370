"""What trained models do beyond their scores: the mixing matrices T, and rollouts that have no reference.

How T amplifies and whether it tells PDEs apart is this command; evaluate.py --rollout does the rollouts.

    python interpret.py                         both, for the newest checkpoint under out/
    python interpret.py --gains                 how far T, and products of T, can amplify
    python interpret.py --probe --unseen wave_layer     classify the datasets by their T, with some that are new to it
    python interpret.py --checkpoint out/nano/step*.pt --probe          how that emerges in training
    python interpret.py --figures figures       gains.png, probe.png, kernels.png

Shapes: B batch, N samples, L = 2 depth sub-layers, S streams; T (B, L, S, S), whose row is the stream that results;
C field channels, C'' of those that evolve.
"""
import math
from itertools import accumulate

import torch
from tqdm import tqdm

import aotpot
import configs
import data
import evaluate
from configs import InputError

MARGIN = 0.1                    # widens the training range, which most test data leave otherwise


# ------------------------------------------------------------------------------------------------ collecting T


def T_of_forward_pass(model, u):
    """T of every sub-layer, in order, in one forward pass of u (B, frames, *space, C): (B, L, S, S)."""
    found = []
    hooks = [module.register_forward_hook(lambda module, inputs, outputs: found.append(outputs[2]))
             for module in model.modules() if isinstance(module, aotpot.Mappings)]
    try:
        model(u)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found, 1)


def evenly_spaced_windows(test, limit):
    """At most `limit` windows of a dataset, (trajectory, first frame) each, evenly over trajectories, then frames.

    They are among those of the one-step score. The first test.count of them are of different trajectories.
    """
    N = min(limit, test.count * test.t_test)
    return [(i % test.count, i // test.count * test.t_test // math.ceil(N / test.count)) for i in range(N)]


@torch.no_grad()
def collect_T(model, test, processes, limit=100, batch_size=16, dtype='fp32'):
    """T of the windows of `evenly_spaced_windows`: (N, L, S, S) float64 on the CPU, equal on all processes."""
    places, config = evenly_spaced_windows(test, limit), model.config
    predictor = evaluate.Predictor(model, test, processes.device, dtype)
    T = torch.zeros(len(places), 2 * config.depth, config.streams, config.streams, dtype=torch.float64)
    for batch in processes.batches(len(places), batch_size):
        frames = test.windows([places[i] for i in batch], config.frames).to(processes.device)
        with predictor.autocast:
            T[list(batch)] = T_of_forward_pass(model, predictor.state(frames)).cpu().double()
    return processes.sum(T)


# ------------------------------------------------------------------------------------------------ gains

def gains(T):
    """Amax gains of each sample, T (B, L, S, S) -> {name: (B, L)}: how far the residual path can amplify.

    With x_(l+1) = T_l x_l, 'forward' is the largest row sum of |T_l|, which bounds the growth of the largest value of a
    stream; 'backward' is the largest column sum, which bounds that of the gradient. Both are 1 for a doubly stochastic
    T_l. '..._composite' is that of the product T_L ... T_l from sub-layer l to the end. The paper finds a forward gain
    of 1 and, at its peak, a composite backward gain of 1.27 (tiny), 1.39 (small), 1.58 (medium) (App., Propagation
    Stability).
    """
    products = torch.stack([*accumulate(reversed(T.unbind(1)), torch.matmul)][::-1], 1)
    return {name + kind: M.abs().sum(axis).amax(-1) for kind, M in (('', T), ('_composite', products))
            for name, axis in (('forward', -1), ('backward', -2))}


def gains_table(gain):
    """Lines of the table of `gains` and its numbers as a dict: mean and max over the samples for every sub-layer."""
    rows = {name: {'mean': values.mean(0).tolist(), 'max': values.amax(0).tolist()} for name, values in gain.items()}
    heads = {name: '\n'.join(name.split('_')[::-1]) if '_' in name else f'\n{name}' for name in rows}
    return configs.table('Amax gain\nsub-layer', {
        f'{l + 1:>3} {("mixer", "MLP")[l % 2]}': {f'{heads[name]}\n{kind}': row[kind][l] for name, row in rows.items()
                                                  for kind in ('mean', 'max')}
        for l in range(len(rows['forward']['mean']))}), rows


# ------------------------------------------------------------------------------------------------ the probe

def probe_group(name):
    """The group of a dataset in the probe: FNO's 2-D Navier-Stokes is one, PDEBench's another (paper, Sec. 5.5)."""
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
    """Classify the windows by their T: a dict of 'groups', 'group_of' each dataset, 'right' and 'confusion'.

    T {name: (N, L, S, S)} as of `collect_T`, sets: their data.Trajectories. 'right' is the share of each group that is
    classified rightly, 'confusion' the counts (G, G) as lists. A dataset in `unseen` is a group of its own.
    Trajectories of even number make the means and the others are classified: no trajectory is on both sides.
    Raises InputError if a dataset has windows of only one trajectory, or if all are of one group.
    """
    group_of = {name: name if name in unseen else probe_group(name) for name in T}
    groups, sets = list(dict.fromkeys(group_of.values())), [test for test in sets if test.name in T]
    for test in sets:
        if min(len(T[test.name]), test.count) < 2:
            raise InputError(f'--probe: {test.name} has one trajectory; it needs one for the mean, one to classify')
    if len(groups) < 2:
        raise InputError(f'--probe: all datasets are of the group {groups[0]}; at least two groups are needed')
    labels = torch.tensor([groups.index(group_of[name]) for name in T for _ in T[name]])
    fit = torch.tensor([trajectory % 2 == 0 for test in sets
                        for trajectory, _ in evenly_spaced_windows(test, len(T[test.name]))])
    confusion = confusion_of_nearest_mean(torch.cat([*T.values()]), labels, fit)
    right = dict(zip(groups, (confusion.diagonal() / confusion.sum(1)).tolist()))
    return {'groups': groups, 'group_of': group_of, 'right': right, 'confusion': confusion.tolist()}


def probe_table(T, sets, unseen=()):
    """Lines of the interpretability experiment and its numbers as a dict (paper, Sec. 5.5).

    T, sets: as for `classify`. 'accuracy' is the mean over the groups, as if all had equally many samples; the paper
    finds 0.997 for small. `unseen` names datasets of T that were not trained on. They are left out at first. Then they
    are added as groups with means of their own, and all are classified again (paper, App., Extended Interpretability).
    """
    rows = classify({name: values for name, values in T.items() if name not in unseen}, sets)
    groups, right = rows['groups'], rows['right']
    rows['accuracy'] = sum(right.values()) / len(groups)
    rows['mean'] = {name: values.mean(0).tolist() for name, values in T.items()}
    lines = [f'nearest mean T: accuracy {rows["accuracy"]:.3f} of {len(groups)} groups, chance {1 / len(groups):.3f}']
    lines += configs.table('true group / nearest', {
        f'({g + 1}) {name}': {'right': right[name], **{f'({i + 1})': count for i, count in enumerate(counts)}}
        for g, (name, counts) in enumerate(zip(groups, rows['confusion']))}, '.3f')
    if unseen:
        rows['unseen'] = more = classify(T, sets, unseen)
        lines += configs.table(f'unseen, of {len(more["groups"])} groups',
                               {name: {'right': more['right'][name]} for name in unseen}, '.3f')
    return lines, rows


# ------------------------------------------------------------------------------------------------ without a reference

def octave_bands(space):
    """Octave bands of wavenumber on a grid: their names, and (modes, bands), 1 where a mode of fftn is in a band.

    |k| counts waves along the longest axis, if all axes have the same spacing. The last band has everything from N/4
    on, where N is the length of that axis rounded down to a power of two.
    """
    count, k = max(1, int(math.log2(max(space))) - 1), [torch.fft.fftfreq(N, 1 / max(space)) for N in space]
    k = torch.stack(torch.meshgrid(*k, indexing='ij')).norm(dim=0).flatten()
    octave = (k + 1e-6).log2().floor().clamp(max=count - 1)             # 1e-6: rounding of k; k = 0 is in no band
    names = [f'k {2 ** b}-{2 ** (b + 1)}' for b in range(count - 1)] + [f'k {2 ** (count - 1)}-']
    return names, (octave[:, None] == torch.arange(count)).float()


def field_statistics(u, bands):
    """Energy, mean, smallest and largest value, and spectrum of fields: (B, *space, C) -> (B, M, C), M = 4 + bands.

    Energy is the mean of u^2. The spectrum is its part in each of `bands`, see `octave_bands`; without the squared mean
    the parts add up to it.
    """
    flat = u.flatten(1, -2)
    power = torch.fft.fftn(u, dim=tuple(range(1, u.ndim - 1)), norm='forward').abs().square().flatten(1, -2)
    moments = torch.stack([flat.square().mean(1), flat.mean(1), flat.amin(1), flat.amax(1)], 1)
    return torch.cat([moments, torch.einsum('bkc,km->bmc', power, bands)], 1)


def split_statistics(split, processes):
    """`field_statistics` of all frames of a data.Trajectories: (N, frames, M, C'') float64, equal on all processes."""
    bands = octave_bands(split.space)[1].to(processes.device)
    found = torch.zeros(split.count, split.frames, 4 + bands.shape[1], len(split.evolving), dtype=torch.float64)
    for i in tqdm(range(processes.rank, split.count, processes.world_size), desc=f'statistics of {split.path}',
                  disable=processes.rank > 0, leave=False):
        frames = evaluate.read_frames(split, [i], 0, split.frames, processes.device)[0]
        found[i] = field_statistics(frames[..., split.evolving], bands).cpu().double()
    return processes.sum(found)


def rollout_without_reference(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """`field_statistics` of the rollouts, of the evolving channels on the native grid: (steps, N, M, C'') float64."""
    bands = octave_bands(test.space)[1].to(processes.device)
    return evaluate.along_rollout(model, test, processes, steps, lambda u, *_: field_statistics(u, bands),
                                  (4 + bands.shape[1], len(test.evolving)), batch_size, dtype)


def first_step_outside_range(found, within):
    """The first step, from 1, at which a sample leaves the range `within` by more than MARGIN, or 0: (N,) integers.

    found (steps, N, M, C''); within (2, M, C''), the smallest and the largest. What is not finite is outside.
    """
    margin = MARGIN * within.abs().amax(0)
    margin[1:4] = MARGIN * within[1, 0].sqrt()      # for values their size, as the mean may be 0 in all training data
    beyond = ~((found >= within[0] - margin) & (found <= within[1] + margin)).flatten(2).all(2)
    return torch.where(beyond.any(0), beyond.int().argmax(0) + 1, 0)


def table_without_reference(found, within, names, channels):
    """Lines of the table of `rollout_without_reference`, and its numbers as a dict: means over the samples.

    within (2, M, C''): the smallest and the largest in training; names: of the M statistics; channels: of the C''.
    """
    lines, first, rows = [], first_step_outside_range(found, within), {}
    for c, channel in enumerate(channels):
        rows[channel] = {name: {'from': within[0, m, c].item(), 'to': within[1, m, c].item(),
                                **{f'step {mark}': evaluate.mean(found[mark - 1, :, m, c])
                                   for mark in evaluate.reported_steps(len(found))}}
                         for m, name in enumerate(names)}
        lines += configs.table(f'{channel}: range in training', rows[channel], '.3g')
    lines.append(f'outside the training range: {(first > 0).sum()} of {len(first)} samples'
                 + (f', the first at step {first[first > 0].min()}' if first.any() else ''))
    return lines, {'statistics': rows, 'first_step_outside': [step or None for step in first.tolist()]}


def without_reference(models, sets, args, processes, suffix):
    """The lines and {checkpoint: numbers} of a rollout beside the range of the training split, and its figure."""
    test, found, rows = sets[models[0].name], {}, {}
    names = ['energy', 'mean', 'least', 'largest', *octave_bands(test.space)[0]]
    channels = [test.channel_names[c] for c in test.evolving]
    train = models[0].dataset(test.path.parent.parent, test.name, 'train')
    within = torch.stack(split_statistics(train, processes).flatten(0, 1).aminmax(dim=0))
    own = first_step_outside_range(split_statistics(test, processes).transpose(0, 1), within)
    lines = [f'{test.name}: no reference of {args.rollout} steps; {(own > 0).sum()} of the {len(own)} true test '
             f'trajectories leave the training range by {MARGIN:.0%}']
    for item in evaluate.each_on_device(models, processes):
        found[item.name] = rollout_without_reference(item.model, sets[item.name], processes, args.rollout,
                                                     args.batch_size, args.dtype)
        more, rows[item.name] = table_without_reference(found[item.name], within, names, channels)
        lines += [f'{item.name}:', *more] if len(models) > 1 else more
    if args.figures:
        import figures
        figures.save(args.figures, f'free{suffix}', figures.plot_rollout_without_reference(
            found, within, names, channels, test.name))
    return lines, rows


# ------------------------------------------------------------------------------------------------ the command

def interpret(models, args, processes, report):
    """--gains and --probe: report['models'][name]['gains'] and ['probe']; of several also report['emergence'].

    Raises InputError for a model without T (residual 'plain', T switched off, or one stream), and for an --unseen
    dataset that is missing or was trained on.
    """
    folder = evaluate.data_folder(models, args)
    unseen = data.find(folder, args.unseen, 'test', flag='--unseen') if args.unseen else []
    for item in models:
        config = item.model.config
        if config.residual == 'plain' or config.streams == 1 or 'T' in config.ablate:
            raise InputError(f'--checkpoint: {item.path} has no T to look at, it was made with --residual '
                             f'{config.residual} --streams {config.streams} --ablate "{config.ablate}"')
        for name in unseen:
            if name in item.run.datasets:
                raise InputError(f'--unseen {name}: {item.path} was trained on it')
    models = sorted(models, key=lambda item: (item.path.parent, item.step))
    sets, T, lines = evaluate.test_sets(models, args), {}, []
    for item in evaluate.each_on_device(models, processes):
        seen = [test for test in sets[item.name] if test.name not in unseen]
        if not seen:
            raise InputError(f'--unseen {" ".join(unseen)}: no other dataset is left; name some with --datasets')
        both = seen + [item.dataset(folder, name) for name in unseen]
        T[item.name] = found = {
            test.name: collect_T(item.model, test, processes, args.samples, args.batch_size, args.dtype)
            for test in tqdm(both, desc='collecting T', disable=processes.rank > 0, leave=False)}
        place = report['models'][item.name]
        if args.gains:
            more, place['gains'] = gains_table(gains(torch.cat([found[test.name] for test in seen])))
            lines += [f'{item.name}:', *more] if len(models) > 1 else more
        if args.probe:
            more, place['probe'] = probe_table(found, both, unseen)
            lines += more if len(models) == 1 else []
    rows = report['models']
    if args.probe and len(models) > 1:
        report['emergence'] = {}
        for item in models:
            probe = rows[item.name]['probe']
            report['emergence'][item.name] = {
                **probe['right'], 'mean': probe['accuracy'],
                **{f'{name}, unseen': probe['unseen']['right'][name] for name in unseen}}
        lines += configs.table('right by the nearest mean T', report['emergence'], '.3f')
    if args.figures:
        import figures
        if args.gains:
            figures.save(args.figures, 'gains', figures.plot_gains({name: row['gains'] for name, row in rows.items()}))
        if args.probe:
            probes = {item.name: rows[item.name]['probe'] for item in models}
            figures.save(args.figures, 'probe', figures.plot_probe(
                {name: (T[name], probe) for name, probe in probes.items()}))
            figures.save(args.figures, 'kernels', figures.plot_mean_T(
                {name: probe['mean'] for name, probe in probes.items()}))
    return lines


def parse():
    """The flags. Raises InputError for those that contradict one another."""
    parser = evaluate.new_parser(__doc__, 'gains, probe and mean T', scoring=False)
    parser.add_argument('--gains', action='store_true', help='only the gains of T, single and composite')
    parser.add_argument('--probe', action='store_true', help='only the classification of the datasets by their T')
    parser.add_argument('--unseen', nargs='+', default=(), metavar='NAME',
                        help='add datasets to --probe that were not trained on')
    parser.add_argument('--samples', type=int, default=100, metavar='N', help='windows of each dataset [100]')
    args = parser.parse_args()
    configs.at_least(1, samples=args.samples)
    if not (args.gains or args.probe):
        args.gains = args.probe = True
    if args.unseen and not args.probe:
        raise InputError('--unseen is an option of --probe; add it')
    return args


def main():
    evaluate.run(parse(), interpret)


if __name__ == '__main__':
    configs.cli(main)
