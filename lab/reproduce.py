"""One command for each table of the paper: it trains networks, measures them and prints the table.

    python -m lab.reproduce ablation --size nano --seeds 3          the paper's Table 5, small
    python -m lab.reproduce ablation --size small --data data       on the paper's own data
    python -m lab.reproduce main --list | xargs -P 4 -I{} sh -c '{}'        four runs at once

Studies share their runs in OUT/<size>/. Each training goes on with --resume: a finished run ends at
once, and one with other settings is refused. OUT/<study>-<size>.md and .json get the table, with
the paper's numbers from lab/paper.md. A line of --list is a training with all that starts from it,
so that the lines may run in any order, before the command without it; with
`xargs --process-slot-var=CUDA_VISIBLE_DEVICES` each has a GPU of its own.
"""
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

import configs
import data
import train
from configs import MIXTURES, PRETRAINING, InputError
from evaluate import LONG
from nets import baselines
from runtime import files, terminal

# ------------------------------------------------------------------------------- what is measured
# Each function makes {column: number} of what a report says of a network.

def rollout_errors(report, kind='rollout'):
    """The L2RE of rollouts, and of steady problems the paper's median relative L1."""
    columns = {}
    for name, parts in report['datasets'].items():
        if parts['steady']:
            columns[f'{name} (L1)'] = statistics.median(parts['model']['l1']['samples'])
        else:
            columns[name] = parts['model'][kind]['mean']
    return columns


def scaling(report):
    """The size and the score of App. C.4, which is 100 if each error is 0.01."""
    logarithms = [math.log10(max(error, 1e-12)) for error in rollout_errors(report).values()]
    return {'M activated parameters': report['activated'] / 1e6,
            'score': -50 * statistics.fmean(logarithms)}


def largest_gains(report):
    """The largest gain of each kind over samples and sub-layers."""
    return {name.replace('_', ' '): max(rows['max']) for name, rows in report['gains'].items()}


SCORES = {'L2RE of rollouts': rollout_errors,
          'L2RE of one step': lambda report: rollout_errors(report, 'step')}
RIGHT = {'share that is classified rightly': lambda report: {
    **report['probe']['right'], 'mean': report['probe']['accuracy']}}

# ------------------------------------------------------------------------------------ the studies

class Study(NamedTuple):
    """A table of the paper."""
    title: str
    rows: dict                      # row -> the flags of train.py, or a list of `Part`
    command: str = 'evaluate'       # a module with flags that writes a report; {samples}: --samples
    tables: dict = SCORES           # {label: a function of the report}


class Part(NamedTuple):
    """A network of a row, of finetune.py if its flags have a --checkpoint, else of train.py."""
    flags: str                      # {start}: the checkpoint below; {each}: each dataset in turn
    start: str | None = None        # flags of a run of train.py before it
    equal: str = ''                 # the key in EQUAL of what makes it as large and slow as AOT-POT


SYSTEMS = {'DPOT': '--residual plain', 'MoE-POT': '--residual plain --experts 16', 'AOT-POT': '',
           'AOT-MoE': '--experts 16'}
GROWING = {f'{system}, {name.removeprefix("mixture_")} datasets': f'{flags} --datasets {name}'
           for system, flags in SYSTEMS.items() for name in MIXTURES}
LINEAR = '--residual plain --channel_maps'
OF_NO_TIME = {'t_init', 'alpha', 'normalize', 'change'}              # fields of a model
# flags for about as many parameters as AOT-POT, and steps in the time of one of its own, on EPYC
EQUAL = {
    'nano': {'plain': ('--width 72', 1.17), 'single': ('--width 72', 0.895), 'AdamW': ('', 1.09)},
    'mini': {'plain': ('--width 144', 1.12), 'single': ('--width 144', 0.868), 'AdamW': ('', 1.14)},
}


def finetuning(datasets, starts=(('', ' --from_scratch'), ('-FT', ''))):
    """Rows of each system and start on all datasets, each of which may have further flags."""
    return {system + suffix: [Part(f'--checkpoint {{start}} --dataset {dataset}{start}', flags)
                              for dataset in datasets]
            for system, flags in SYSTEMS.items() for suffix, start in starts}


STUDIES = {
    'main': Study('Main results: pre-trained; baselines, on each dataset alone', SYSTEMS | {
        name: f'--network {name} --datasets {{each}}' for name in baselines.BASELINES}),
    'finetune': Study('Main results: fine-tuned on each set', finetuning(PRETRAINING, [('', '')])),
    'downstream': Study('Downstream tasks', finetuning((
        'ns2d_pdb_M1_eta1e-8_zeta1e-8_turb_512 --resolution 512', 'ns3d_pdb_M1_turb', 'cno_poisson',
        'kolmogorov'))),
    'rollout': Study(f'Long rollouts of {LONG}', finetuning([LONG]),
                     f'evaluate --rollout 500 --datasets {LONG} --samples {{samples}}',
                     {'L2RE at the step': lambda report: report['rollout'][LONG]['model']['step']}),
    'few_shot': Study('Few-shot fine-tuning, by the number of trajectories', finetuning([
        *(f'ns2d_fno_1e-4 --samples {n} --epochs 500' for n in (16, 32, 64, 128, 512, 2000)),
        *(f'wave_layer --samples {n} --epochs 500' for n in (16, 32, 64, 128))])),
    'poseidon': Study('The waves of Poseidon, fine-tuned without and with their speed c', {
        'AOT-POT': [Part('--checkpoint {start} --dataset wave_gauss', '')],
        'AOT-POT, with c': [Part(f'--checkpoint {{start}} --dataset {dataset} --channels 3', '')
                            for dataset in ('wave_layer', 'wave_gauss_c')]}),
    'ablation': Study('Ablation of the three mappings', {
        'AOT-POT': '', **{f'w/o {x}': f'--ablate {x}' for x in 'adT'}}),
    'streams': Study('Number of streams', {
        f'S = {S}': '' if S == 4 else f'--streams {S}' for S in (1, 2, 4, 8)}),
    'sinkhorn': Study('Sinkhorn-Knopp rounds', {
        f'rounds = {n}': '' if n == 20 else f'--sinkhorn_iters {n}'
        for n in (0, 1, 5, 10, 20, 40)}),
    'alpha': Study('Initial value of alpha', {
        'alpha = 0.01': '', 'alpha = 0.05': '--alpha 0.05', 'alpha = 0.1': '--alpha 0.1'}),
    'heterogeneity': Study('Growing mixtures', GROWING),
    'moe': Study('AOT over a mixture of experts', {
        row: flags for row, flags in GROWING.items()
        if not row.startswith('DPOT') and '10 datasets' not in row}),
    'motivation': Study('Linear maps of the channels, learned or taken from another dataset', {
        'DPOT': '--residual plain --datasets {each}',
        'DPOT + linear': f'{LINEAR} learned --datasets {{each}}',
        **{f'fixed {source}': [Part(f'{LINEAR} {{start}} --datasets {{each}}',
                                    f'{LINEAR} learned --datasets {source}')]
           for source in PRETRAINING}}),
    'probe': Study('Datasets told apart by T', {'AOT-POT': ''}, 'lab.interpret --probe', RIGHT),
    'unseen': Study('Datasets that were not trained on, told apart by T', {'AOT-POT': ''},
                    'lab.interpret --probe --unseen wave_layer wave_gauss', RIGHT),
    'gains': Study('Largest gains of the residual path', {'AOT-POT': ''}, 'lab.interpret --gains',
                   {'largest Amax gain': largest_gains}),
    'scaling': Study('Scaling: 50 mean(-log10 L2RE) over the datasets', {
        f'{system}, {size}': f'{flags} --size {size}'
        for size in ('tiny', 'small', 'medium') for system, flags in SYSTEMS.items()},
        tables={'score and size': scaling}),
    'contrasts': Study("AOT-POT, one stream and DPOT's block, at equal steps, or time and size", {
        "DPOT's block": '--residual plain',
        "DPOT's block, equal time": [Part('--residual plain', equal='plain')],
        'one stream': '--streams 1',
        'one stream, equal time': [Part('--streams 1', equal='single')],
        'AOT-POT': '',
        "DPOT's block, AdamW": '--residual plain --optimizer adamw',
        'AOT-POT, AdamW': '--optimizer adamw',
        'AOT-POT, AdamW, equal time': [Part('--optimizer adamw', equal='AdamW')]}),
    'pieces': Study('What the AOT block is made of', {
        "DPOT's block": '--residual plain',
        "DPOT's block, post-norm": '--residual plain --norm sandwich',
        'one stream, pre-norm, w/o d': '--streams 1 --ablate d --norm pre',
        'one stream, w/o d': '--streams 1 --ablate d',
        'one stream': '--streams 1',
        'AOT-POT, w/o d': '--ablate d',
        'AOT-POT': ''}),
}

# ------------------------------------------------------------------------------------------- runs

class Job(NamedTuple):
    """A run and its measure, for a row of the table. A command is a tuple of words."""
    row: str
    count: str                      # ' N' of --samples N, which is a part of the column's name
    seed: int
    trainings: tuple                # of the run from whose weights this one starts, and of the run
    measuring: tuple                # the command of the measure
    report: Path                    # the JSON file that it writes, in the folder of the run


def asked_of(args):
    """What --size and --recipe ask of train.py, a train.Command."""
    return train.parse(shlex.split(f'--size {args.size} {args.recipe}'))


def job_of(study, row, part, seed, args):
    """The Job of a `Part`."""
    name = slug(part.flags)
    flags = part.flags
    before = ()
    if part.start is not None:
        name = f'{slug(part.start)}-{name}'
        start = job_of(study, row, Part(part.start), seed, args)
        before = start.trainings
        flags = flags.format(start=shlex.quote(str(start.report.with_name('last.pt'))))
    script = 'finetune' if '--checkpoint' in flags else 'train'
    if args.steps:
        flags = re.sub(r'--epochs \d+', '', flags) + f' --steps {args.steps}'
    if script == 'train':                   # of a flag that stands there twice, the last one counts
        datasets = shlex.join(args.datasets)
        flags = f'--size {args.size} --datasets {datasets} {args.recipe} {flags}'
        if '--experts' in flags:
            flags = re.sub('--size (?=tiny|small|medium)', '--size moe-', flags)
    if part.equal:
        name += '-equal'
        width, share = EQUAL[args.size][part.equal]
        asked = asked_of(args)
        if {'epochs', *vars(configs.ModelConfig())} - OF_NO_TIME & asked.given:
            raise InputError(f'{row}: as large and slow as AOT-POT by --steps alone, and not with '
                             f'--recipe {args.recipe}')
        flags += f' {width} --steps {round(share * (args.steps or asked.recipe.steps))}'
    folder = Path(args.out, args.name, f'{name}-seed_{seed}')
    command = study.command.format(samples=args.samples)
    report = folder / f'{slug(command.removeprefix("lab."))}.json'
    training = (sys.executable, '-m', script, *shlex.split(flags), '--data', args.data, '--out',
                str(folder), '--seed', str(seed), '--device', args.device, '--resume')
    measuring = (sys.executable, '-m', *command.split(), '--checkpoint', str(folder / 'last.pt'),
                 '--device', args.device, '--json', str(report))
    count = ''.join(re.findall(r'--samples( \d+)', part.flags))
    return Job(row, count, seed, (*before, training), measuring, report)


def slug(flags):
    """Flags as a part of a file's name: '--ablate a --depth 2' is 'ablate_a-depth_2'."""
    flags = flags.replace('--checkpoint {start} ', '').replace('{start}', 'given')
    return re.sub(r'[^\w.-]+', '_', flags.replace(' --', '-').strip('- ')) or 'aot'


def jobs_of(study, args):
    """The jobs of a study, and a line for each dataset for lack of which others are left out."""
    jobs = []
    left_out = set()
    asked = asked_of(args)
    recipe = asked.recipe
    rows = {row: [Part(parts)] if isinstance(parts, str) else parts
            for row, parts in study.rows.items()}
    trainings = [part.flags if part.start is None else part.start
                 for part in sum(rows.values(), [])]
    of_rows = {'residual', 'network', 'experts', *re.findall(r'--(\w+)', ' '.join(trainings))}
    if of_both := of_rows & asked.given & vars(configs.ModelConfig()).keys():
        raise InputError(f'--recipe {args.recipe}: the rows differ in --{min(of_both)}; leave it '
                         f'out')
    for row, parts in rows.items():
        for part in parts:
            for name in args.datasets if '{each}' in part.flags else ['']:
                one = part._replace(flags=part.flags.replace('{each}', name))
                needed = re.findall(r'--datasets? (\S+)', f'{one.start} {one.flags}')
                try:
                    data.find(args.data, needed)
                    unseen = study.command.partition('--unseen ')[2].split()
                    data.find(args.data, unseen, 'test', '--unseen')
                    if one.equal and args.size not in EQUAL:
                        raise InputError(f'{row}: EQUAL of lab/reproduce.py lacks the step times '
                                         f'of {args.size}')
                    if '--optimizer adamw' in one.flags and recipe.optimizer == 'adamw':
                        raise InputError(f'{row}: {args.size} has AdamW in all rows')
                except InputError as error:
                    left_out.add(f'left out: {error}')
                    continue
                jobs += [job_of(study, row, one, seed, args) for seed in range(args.seeds)]
    return jobs, sorted(left_out)


def commands(job):
    """What a job has to run: its trainings, and its measure unless there is a younger report."""
    yield from job.trainings
    log = job.report.with_name('log.jsonl')
    times = [path.stat().st_mtime_ns for path in (log, job.report) if path.exists()]
    if len(times) < 2 or times[0] > times[1]:
        yield 'rm', '-f', str(job.report)      # an older one of ours, which no measure replaces
        yield job.measuring


@cache                                              # many jobs begin with the same training
def succeeds(words):
    """Run a command, which ends with us: whether it succeeds."""
    process = subprocess.Popen(words)
    try:
        return process.wait() == 0
    except BaseException:
        process.terminate()                         # a training then saves and leaves
        process.wait()
        raise


# ------------------------------------------------------------------------------------- the tables
# A column of a row is {seed: number}.

MEAN = 'geometric mean'
DIVERGED = 10                   # the error from which on a mean says nothing


def paper_table(name, size):
    """{row: {column: number}} of a table in lab/paper.md; empty if there is none."""
    text = Path(__file__).with_name('paper.md').read_text()
    _, _, section = text.partition(f'### {name}, {size}\n')
    section, _, _ = section.partition('###')
    lines = [line.strip('| ').split(' | ') for line in section.splitlines() if line.startswith('|')]
    table = {}
    for row, *cells in lines[2:]:                  # above them are the columns and a line of dashes
        table[row] = {name: float(cell) for name, cell in zip(lines[0], cells) if cell != '-'}
    return table


def gather(study, measure, jobs):
    """{row: {column: {seed: number}}} of a study, by a measure of the reports of its jobs."""
    rows = {row: {} for row in study.rows}
    for job in jobs:
        with files.naming(job.report, 'not a report of this study; delete it to make it again'):
            text = re.sub(r'\bnull\b', 'Infinity', job.report.read_text())      # is not finite
            [report] = json.loads(text)['models'].values()
            for name, value in measure(report).items():
                rows[job.row].setdefault(name + job.count, {})[job.seed] = value
    return rows


def geometric_mean(row, columns):
    """The mean over the columns of a row, for each seed that all have; inf: it diverged."""
    means = {}
    for seed in sorted(set.intersection(*(set(row.get(name, ())) for name in columns))):
        errors = np.array([row[name][seed] for name in columns])
        means[seed] = math.exp(np.log(errors).mean()) if (errors < DIVERGED).all() else math.inf
    return means


def show(numbers):
    """The mean of {seed: number} ± its deviation."""
    values = list(numbers.values())
    if not all(map(math.isfinite, values)):
        return 'diverged'
    if len(values) == 1:
        return f'{values[0]:.5g}'
    return f'{statistics.fmean(values):.4g} ± {statistics.stdev(values):.2g}'


def tabulate(study, jobs, reference):
    """The Markdown of a study, and its numbers {label: {'seeds': {row: {column: {seed: number}}}}}.

    reference: as of `paper_table`, for the first table. A table of errors begins with the geometric
    mean of each seed over the datasets that all rows have.
    """
    text = [f'# {study.title}', '', f'`python -m lab.reproduce {shlex.join(sys.argv[1:])}`', '```']
    numbers = {}
    for label, measure in study.tables.items():
        table = gather(study, measure, jobs)
        filled = [cells for cells in table.values() if cells]
        common = [name for name in (filled or [{}])[0]      # a blank: another metric or a number
                  if ' ' not in name and all(name in cells for cells in filled)]
        rows = {}
        for row, cells in table.items():
            rows[row] = cells
            paper = reference.get(row, {})
            paper = {name: {0: paper[name]} for name in cells if name in paper}
            if paper:
                rows[f'{row}, paper'] = paper
        if label in SCORES and common:
            rows = {row: {MEAN: geometric_mean(cells, common), **cells}
                    for row, cells in rows.items()}
        numbers[label] = {'seeds': rows}
        reference = {}
        text += ['', *terminal.table(label, {
            row: {column: show(seeds) for column, seeds in cells.items() if seeds}
            for row, cells in rows.items()})]
    text += ['```', 'Means over the seeds ± their standard deviation; a geometric mean of errors '
             f'of which one is {DIVERGED} or more has diverged.', '']
    return '\n'.join(text), numbers


# ------------------------------------------------------------------------------------ the command

def parse():
    """The flags, and the study with the rows that they leave."""
    parser = terminal.Parser(description=__doc__)
    add = parser.add_argument
    add('study', choices=STUDIES, metavar='STUDY', help=', '.join(STUDIES))
    sizes = [size for size, (model, _) in configs.SIZES.items() if not model.experts]
    add('--size', default='nano', choices=sizes, help='preset of the networks [nano]')
    add('--seeds', type=int, default=3, metavar='N', help='of each network, seeds 0 to N-1 [3]')
    add('--steps', type=int, default=0, metavar='N', help="of every training; 0: the preset's")
    add('--recipe', default='', metavar="'--X Y'", help='flags of train.py, before those of a row')
    add('--data', default='', metavar='DIR', help='of datasets [data; for nano and mini data/SIZE]')
    add('--datasets', nargs='+', default=(), metavar='X', help="mixture [the paper's in --data]")
    add('--rows', nargs='+', default=(), metavar='ROW', help='only these rows of the table [all]')
    add('--samples', type=int, default=8, metavar='N', help='trajectories of the study rollout [8]')
    add('--out', default='out/reproduce', metavar='DIR', help='of runs and tables [%(default)s]')
    add('--device', default='auto', help='auto, cpu, cuda')
    add('--list', action='store_true', help='print the commands that are to be run, one a line')
    args = parser.parse_args()
    for name, least in dict(seeds=1, steps=0, samples=1).items():
        configs.bounded(f'--{name}', getattr(args, name), least=least)
    with files.naming(f'--recipe {args.recipe}', 'not words of a shell', ValueError):
        shlex.split(args.recipe)
    study = STUDIES[args.study]
    mixture = args.datasets
    args.name = args.size
    if args.steps:
        args.name += f'-{args.steps}_steps'
    if args.recipe:
        args.name += f'-{slug(args.recipe)}'
    name = '-'.join([args.study, args.name, *map(slug, [*args.rows, *mixture])])
    args.table = Path(args.out, name[:200])
    args.data = args.data or (f'data/{args.size}' if args.size in configs.BUILTIN else 'data')
    names = data.find(args.data, mixture)
    args.datasets = names if mixture else [name for name in PRETRAINING if name in names] or names
    for name in args.rows:
        if name not in study.rows:
            raise InputError(f'--rows {name!r}: {args.study} has the rows {", ".join(study.rows)}')
    return args, study._replace(rows={name: study.rows[name] for name in args.rows or study.rows})


def main():
    args, study = parse()
    jobs, left_out = jobs_of(study, args)
    for line in left_out:
        print(line, file=sys.stderr if args.list else sys.stdout, flush=True)
    if args.list:
        lines = {}                                  # {training: all that starts from it}
        for job in jobs:
            training, *others = commands(job)
            if job.measuring in others:
                lines.setdefault(training, []).append(' && '.join(map(shlex.join, others)))
        for training, others in lines.items():
            print(f'{shlex.join(training)} && ({"; ".join(others)})')
        return
    if not jobs:
        raise InputError(f'{args.study}: {args.data} has none of the datasets that it needs')
    done = [job for job in jobs if all(map(succeeds, commands(job)))]
    if done:
        text, numbers = tabulate(study, done, paper_table(args.study, args.size))
        print(text)
        files.write_text(f'{args.table}.md', text)
        report = {'study': args.study, 'size': args.size, 'tables': numbers}
        text = re.sub(r'\bInfinity\b', 'null', json.dumps(report, indent=1))     # as in evaluate.py
        files.write_text(f'{args.table}.json', text)
    failed = [str(job.report.parent) for job in jobs if job not in done]
    if failed:
        raise InputError(f'these runs failed, as the lines above say: {" ".join(failed)}')


if __name__ == '__main__':
    terminal.cli(main)
