"""evaluate.py --rollout: errors, spectra and pictures of rollouts beside a reference, and what is left without one.

Shapes: B batch, T input frames, F frames of a picture, N trajectories, C' channels of the dataset, C'' of those that
evolve; (*space') are the grid points of the dataset.
"""
import math

import torch

import data
from configs import InputError
from data import norm, relative
from evaluate import FORECASTS, Predictor, evaluating, mean, relative_error, test_sets
from lab.predict import rollout_of_channel
from runtime import commands, terminal
from runtime.terminal import Progress

LONG = 'ns2d_fno_1e-3'          # the dataset of the paper's long rollouts (Sec. 5.4); our solver makes the reference
FRAMES = 50                     # of the animation of a rollout, at most


# ------------------------------------------------------------------------------------------------ what is measured

def rollouts(model, test, processes, steps, batch_size, dtype):
    """For every batch of this process: its indices, its first T true frames, and an iterator of `steps` predictions."""
    predictor = Predictor(model, test, processes.device, dtype)
    for batch in processes.batches(test.count, batch_size):
        first = data.read_frames(test, batch, 0, model.config.frames, processes.device)     # (B, T, *space', C')
        predictions = Progress(predictor.along(first, steps), desc=f'rollout of {test.name}', total=steps, unit='step',
                               disable=processes.rank > 0, leave=False)
        yield list(batch), first, predictions


@evaluating
def rollout_curve(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """Rollouts along the trajectories of `test`, which has T + steps frames: {'model', 'persistence', 'spectra'}.

    'model', 'persistence': the L2RE of the frame of each step, (steps, N) float64. 'spectra': {step: {'truth', 'model':
    (shells,)}}, `spectrum` of the first channel that evolves at some steps, the mean over the trajectories.
    """
    T = model.config.frames
    marks = [mark for mark in (1, 20, 100) if mark < steps] + [steps]
    norms = torch.zeros(3, steps, test.count, len(test.evolving), dtype=torch.float64)
    spectra = torch.zeros(len(marks), 2, shells(test.space).max() + 1, dtype=torch.float64)
    for batch, first, predictions in rollouts(model, test, processes, steps, batch_size, dtype):
        last = first[:, -1][..., test.evolving]
        along = []
        for t, u in enumerate(predictions):
            frame = data.read_frames(test, batch, T + t, T + t + 1, processes.device)[:, 0]
            target = frame[..., test.evolving]
            along.append(torch.stack([norm(x) for x in (target, u - target, last - target)]))        # (3, B, C'')
            if t + 1 in marks:
                both = torch.stack([spectrum(x[..., 0]).sum(0) for x in (target, u)])
                spectra[marks.index(t + 1)] += both.cpu() / test.count
        norms[:, :, batch] = torch.stack(along, dim=1).cpu().double()
    size, error, change = processes.sum(norms).square()
    spectra = processes.sum(spectra)
    return {'model': relative_error(error, size), 'persistence': relative_error(change, size),
            'spectra': {mark: dict(zip(('truth', 'model'), both)) for mark, both in zip(marks, spectra)}}


def shells(space):
    """The shell of each mode of fftn, |k| rounded to an integer: (*space) int64. k counts waves on the longest axis."""
    k = [torch.fft.fftfreq(side, 1 / max(space)) for side in space]
    return torch.stack(torch.meshgrid(*k, indexing='ij')).norm(dim=0).round().long()


def spectrum(u):
    """The part of each of the `shells` in mean_x u^2 of the fields u (B, *space): (B, shells) float64."""
    power = torch.fft.fftn(u.cpu().double(), dim=tuple(range(1, u.ndim)), norm='forward').abs().square()
    shell = shells(u.shape[1:]).flatten()
    return torch.zeros(len(u), shell.max() + 1, dtype=torch.float64).index_add_(1, shell, power.flatten(1))


def report_of(curves):
    """What the JSON has of a `rollout_curve`, with the paper's marks (Table 3) in 'step'."""
    rows = {}
    for forecast in FORECASTS:
        curve = [mean(step) for step in curves[forecast]]
        marks = [mark for mark in (20, 50, 100, 200, 500) if mark < len(curve)] + [len(curve)]
        step = {str(mark): curve[mark - 1] for mark in marks}
        step['growth'] = curve[-1] / max(next(iter(step.values())), 1e-12)
        rows[forecast] = {'curve': curve, 'step': step}
    rows['spectra'] = {mark: {name: values.tolist() for name, values in both.items()}
                       for mark, both in curves['spectra'].items()}
    return rows


@evaluating
def beyond(model, test, processes, steps, batch_size=16, dtype='fp32'):
    """Rollouts longer than the trajectories of `test`: {'finite', 'norm', 'mean': (N,) float64}.

    'finite' is 1 where all predictions are finite. With u the last of them and v the last true frame, 'norm' is
    | ||u|| - ||v|| | / ||v|| and 'mean' |mean u - mean v| / rms v, both the mean over the channels.
    """
    values = torch.zeros(3, test.count, dtype=torch.float64)
    for batch, first, predictions in rollouts(model, test, processes, steps, batch_size, dtype):
        finite = torch.ones(len(batch), dtype=torch.bool, device=processes.device)
        for u in predictions:
            finite &= u.flatten(1).isfinite().all(1)
        v = data.read_frames(test, batch, test.frames - 1, test.frames, processes.device)[:, 0][..., test.evolving]
        size, growth = (norm(x).cpu().double() for x in (v, u))                                     # (B, C'')
        rms = size / math.prod(test.space) ** 0.5
        shift = (u - v).flatten(1, -2).mean(1).cpu().double()
        values[0, batch] = finite.cpu().double()
        values[1, batch] = relative((growth - size).abs(), size).mean(-1)
        values[2, batch] = relative(shift.abs(), rms).mean(-1)
    return dict(zip(('finite', 'norm', 'mean'), processes.sum(values)))


# ------------------------------------------------------------------------------------------------ the command

def roll_out(models, args, processes, report):
    """--rollout: the lines of each dataset with a `reference`, then one of each other dataset, as they come."""
    commands.agreed(models, 'resolution')
    T = commands.agreed(models, 'frames')
    sets = test_sets(models, args, processes, args.samples)
    without = []
    for tests in zip(*sets.values()):
        if tests[0].steady:
            raise InputError(f'--rollout: {tests[0].name} is steady, there is nothing to roll out; name others with '
                             '--datasets')
    yield f'{args.rollout} steps from the first {T} true frames of at most {args.samples} trajectories'
    for tests in zip(*sets.values()):
        references = [reference(opened, test, models, args, processes) for opened, test in zip(models, tests)]
        if None in references:
            without.append(tests)
        else:
            yield from beside_reference(models, references, args, processes, report)
    if without:
        yield ('no reference is so long: rollouts that stay finite, and how far the last frame is from the last true '
               'one, in norm and in mean')
    for tests in without:
        yield beyond_the_data(models, tests, args, processes, report)


def reference(opened, test, models, args, processes):
    """The trajectories of T + N frames along which a model is rolled out on a dataset, or None.

    They are the test trajectories if these are so long. Those of LONG, if all models were trained on it or --datasets
    names it, are else made by our solver, once, and kept.
    """
    if test.frames >= opened.model.config.frames + args.rollout:
        return test
    asked = args.datasets or all(LONG in other.run.datasets for other in models)
    if test.name != LONG or not asked:
        return None
    from sources import generate  # the solvers, where data have to be made
    return generate.long_reference(test.path.parent.parent, LONG, args.rollout, args.samples, opened.model.config,
                                   processes)


def beside_reference(models, references, args, processes, report):
    """Lines with the errors of rollouts along the trajectories of one dataset; their figures."""
    name = references[0].name
    curves = {}
    cells = {}
    for opened, test in zip(models, references):
        curves[opened.name] = rollout_curve(opened.model, test, processes, args.rollout, args.batch_size, args.dtype)
        rows = report_of(curves[opened.name])
        report['models'][opened.name].setdefault('rollout', {})[name] = rows
        cells[opened.name] = rows['model']['step']
    cells['persistence'] = rows['persistence']['step']
    cells = {label: {**row, 'growth': f'{row["growth"]:.1f}x'} for label, row in cells.items()}
    if args.figures:
        from lab import figures  # only where something is drawn
        figures.save(args.figures, f'rollout_{name}', figures.plot_rollout(curves))
        figures.save(args.figures, f'spectrum_{name}', figures.plot_spectra(curves))
        steps = range(1, args.rollout + 1, math.ceil(args.rollout / FRAMES))
        shown = [step - 1 for step in steps]
        channel = references[0].channel_names[references[0].evolving[0]]
        fields = {}
        for opened, test in zip(models, references):
            truth, prediction, _ = rollout_of_channel(opened.model, test, channel, args.rollout, args.dtype)
            fields[opened.name] = prediction[shown]
        figures.animate(args.figures, f'rollout_{name}', truth[shown], fields, steps, f'{channel} of {name}')
    return terminal.table(f'{name}: L2RE at step', cells, best='column')


def beyond_the_data(models, tests, args, processes, report):
    """The line on rollouts of one dataset that has no reference of that length."""
    parts = []
    for opened, test in zip(models, tests):
        values = beyond(opened.model, test, processes, args.rollout, args.batch_size, args.dtype)
        report['models'][opened.name].setdefault('rollout', {})[test.name] = values
        label = f'{opened.name} ' if len(models) > 1 else ''
        parts.append(f'{label}{int(values["finite"].sum())} of {test.count} finite, norm {mean(values["norm"]):.3g}, '
                     f'mean {mean(values["mean"]):.3g}')
    return f'{test.name}: ' + '; '.join(parts)
