"""Studies of the paper over several trained models.

    python reproduce.py scaling --checkpoint out/*/best.pt          score against parameters
    python reproduce.py heterogeneity --checkpoint out/nano-6/last.pt out/nano-12/last.pt
                                                checkpoints of growing mixtures, on the datasets that they share
    python reproduce.py stability --checkpoint out/*/last.pt        loss, gradient norm, spikes and skipped steps
"""
import math
from statistics import median

import configs
from configs import InputError

import aotpot
import checkpoint
import evaluate

# ------------------------------------------------------------------------------------------------ scaling

def scaling_score(errors):
    """50 mean(-log10 L2RE) over datasets; 100 is an error of 0.01 on each (paper, App. Scaling Experiments)."""
    return -50 * sum(math.log10(max(error, 1e-12)) for error in errors) / len(errors)


def scaling(models, args, processes, report):
    """Score against parameters over the checkpoints: report['scaling']."""
    errors, title = rollout_errors(models, args, processes, report), f'{args.scoring} scoring'
    report['scaling'] = rows = {item.name: {
        'residual': item.model.config.residual, 'parameters': aotpot.parameters(item.model),
        'score': scaling_score(errors[item.name].values())} for item in models}
    if args.figures:
        import figures
        figures.save(args.figures, 'scaling', figures.plot_scaling(rows, title))
    return configs.table(f'50 mean(-log10 L2RE), {title}', {
        f'{name}, {row["residual"]}': {'M parameters': row['parameters'] / 1e6, 'score': row['score']}
        for name, row in rows.items()}, '.4g')


def rollout_errors(models, args, processes, report, names=()):
    """{checkpoint: {dataset: L2RE of the rollout}}; all scores go into the report."""
    results = evaluate.score_all(models, args, processes, report, names)
    return {model: {name: evaluate.mean(scores['rollout']) for name, scores in of.items()}
            for model, of in results.items()}


# ------------------------------------------------------------------------------------------------ heterogeneity

def heterogeneity(models, args, processes, report):
    """Checkpoints of growing mixtures on --datasets or those that all were trained on: report['heterogeneity'].

    Raises InputError if there is none.
    """
    smallest = min((item.run.datasets for item in models), key=len)         # which gives their order
    names = args.datasets or [name for name in smallest if all(name in item.run.datasets for item in models)]
    if not names:
        raise InputError('heterogeneity: there is no dataset that all the checkpoints were trained on; '
                         'say which with --datasets')
    errors = rollout_errors(models, args, processes, report, names)
    report['heterogeneity'] = {name: {**row, 'mean': sum(row.values()) / len(row)} for name, row in errors.items()}
    return configs.table(f'L2RE, {args.scoring} scoring', {
        f'{item.name} ({len(item.run.datasets)} datasets)': report['heterogeneity'][item.name] for item in models},
        '.5f', 'column')


# ------------------------------------------------------------------------------------------------ stability

def stability(models, args, processes, report):
    """Training curves of the runs of the checkpoints: report['curves']."""
    logs = list(dict.fromkeys(item.path.parent / 'log.jsonl' for item in models))
    curves = {name: training_curve(path) for name, path in zip(checkpoint.short_names(logs), logs)}
    report['curves'] = {name: summary(run) for name, run in curves.items()}
    if args.figures:
        import figures
        figures.save(args.figures, 'curves', figures.plot_training(curves))
    return configs.table('training', report['curves'], '.6g')


def training_curve(path):
    """A log.jsonl of train.py: lists 'step', 'loss', 'grad_norm', 'skipped' (so far), an item for each line, 'spikes'.

    A spike is the step of a line whose loss is over twice the median of the ten losses before it. A line has no loss if
    all its steps were skipped. Raises InputError if the file is missing or not a log of train.py.
    """
    try:
        log = checkpoint.read_log(path)
        found = {name: [line[name] for line in log] for name in ('step', 'loss', 'grad_norm', 'skipped')}
    except OSError:
        raise InputError(f'--checkpoint: no {path}; train.py writes it beside its checkpoints') from None
    except KeyError as error:
        raise InputError(f'{path}: not a log of train.py ({error} is missing)') from None
    if not any(found['loss']):
        raise InputError(f'{path}: holds no loss yet')
    known = [(step, loss) for step, loss in zip(found['step'], found['loss']) if loss is not None]
    found['spikes'] = [known[i][0] for i in range(10, len(known))
                       if known[i][1] > 2 * median(loss for _, loss in known[i - 10:i])]
    return found


def summary(run):
    """The numbers of a `training_curve` in the table of stability."""
    loss, norm = ([value for value in run[kind] if value is not None] for kind in ('loss', 'grad_norm'))
    return {'steps': run['step'][-1], 'final loss': loss[-1], 'lowest': min(loss), 'skipped': run['skipped'][-1],
            'spikes': len(run['spikes']), 'largest gradient': max(norm, default=math.nan)}


# ------------------------------------------------------------------------------------------------ the command

STUDIES = {'scaling': scaling, 'heterogeneity': heterogeneity, 'stability': stability}


def parse():
    """The flags and the study. Raises InputError for those that would change nothing."""
    parser = configs.evaluation_parser(__doc__, 'scaling or stability')
    parser.add_argument('study', choices=STUDIES, metavar='STUDY', help=', '.join(STUDIES))
    args = parser.parse_args()
    if args.study == 'heterogeneity' and args.figures:
        raise InputError('--figures: heterogeneity is a table without a figure')
    if args.study == 'stability' and args.scoring == 'paper':
        raise InputError('--scoring paper: stability has no scores')
    return args, STUDIES[args.study]


def main():
    evaluate.run(*parse())


if __name__ == '__main__':
    configs.cli(main)
