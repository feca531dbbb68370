"""One command for each table of the paper: it trains the networks, measures them and prints the
table.

    python -m lab.reproduce ablation --size nano --seeds 3          the paper's Table 5, small
    python -m lab.reproduce ablation --size small --data data       on the paper's own data
    python -m lab.reproduce main --list | xargs -P 4 -I{} sh -c '{}'        four runs at once; then without --list

Studies share their runs in OUT/<size>/. Each training goes on with --resume: a finished run ends at
once, and one with other settings is refused. OUT/<study>-<size>.md and .json get the table, with
the paper's numbers from lab/paper.md. A line of --list is a training with all that starts from it,
so that the lines may run in any order; with `xargs --process-slot-var=CUDA_VISIBLE_DEVICES` each
has a GPU of its own.
"""
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import configs
import data
import train
from configs import MIXTURES, PRETRAINING, InputError
from evaluate import LONG
from lab import tables
from nets import baselines
from runtime import files, terminal

# ------------------------------------------------------------------------------------------------ what is measured

class Measure(NamedTuple):
    """A module with flags that writes a JSON file, and the tables that are made of it."""
    command: str                    # {samples} is --samples
    tables: dict                    # label -> the function that makes {column: number} of the file


def rollout_errors(report):
    """The L2RE of rollouts in a report, of steady problems the paper's median relative L1."""
    columns = {}
    for name, parts in report['datasets'].items():
        if parts['steady']:
            columns[f'{name} (L1)'] = statistics.median(parts['model']['l1']['samples'])
        else:
            columns[name] = parts['model']['rollout']['mean']
    return columns


def one_step_errors(report):
    """The L2RE of one step in the JSON of evaluate.py, without steady problems."""
    return {name: parts['model']['step']['mean']
            for name, parts in report['datasets'].items() if not parts['steady']}


def read_report(path):
    """The report in a JSON file of evaluate.py or lab.interpret; null is not finite."""
    [report] = json.loads(re.sub(r'\bnull\b', 'Infinity', path.read_text()))['models'].values()
    return report


def scaling(report):
    """The size and the score of App. C.4, which is 100 if each error is 0.01."""
    logarithms = [math.log10(max(error, 1e-12)) for error in rollout_errors(report).values()]
    return {'M activated parameters': report['activated'] / 1e6, 'score': -50 * statistics.fmean(logarithms)}


def largest_gains(report):
    """The largest gain over samples and sub-layers of each kind in the JSON of lab/interpret.py."""
    return {name.replace('_', ' '): max(rows['max']) for name, rows in report['gains'].items()}


SCORES = Measure('evaluate', {'L2RE of rollouts': rollout_errors, 'L2RE of one step': one_step_errors})
ROLLOUT = Measure(f'evaluate --rollout 500 --datasets {LONG} --samples {{samples}}',
                  {'L2RE at the step': lambda report: report['rollout'][LONG]['model']['step']})
RIGHT = {'share that is classified rightly': lambda report: {
    **report['probe']['right'], 'mean': report['probe']['accuracy']}}
PROBE = Measure('lab.interpret --probe', RIGHT)
UNSEEN = Measure('lab.interpret --probe --unseen wave_layer wave_gauss', RIGHT)
GAINS = Measure('lab.interpret --gains', {'largest Amax gain': largest_gains})
SCALING = Measure('evaluate', {'score and size': scaling})


class Study(NamedTuple):
    """A table of the paper."""
    title: str
    rows: dict                      # row -> the flags of train.py, or a list of `Part`
    measure: Measure = SCORES


class Part(NamedTuple):
    """A network of a row: `script` with `flags`, after train.py with the flags `start` if given."""
    flags: str                      # {start}: the checkpoint of that run; {each}: each dataset in turn
    start: str | None = None
    column: str = '{}'              # how a column is named, {} being what the measure calls it
    script: str = 'train'           # or finetune, or 'lab.blocks X', which trains and measures
    equal: str = ''                 # the key in EQUAL of what gives it the parameters and time of AOT-POT


SYSTEMS = {'DPOT': '--residual plain', 'MoE-POT': '--residual plain --experts 16', 'AOT-POT': '',
           'AOT-MoE': '--experts 16'}
GROWING = {f'{system}, {name.removeprefix("mixture_")} datasets': f'{flags} --datasets {name}'
           for system, flags in SYSTEMS.items() for name in MIXTURES}
LINEAR = '--residual plain --channel_maps'
# flags for about as many parameters as AOT-POT, and how many steps fit in the time of one of its own, on an EPYC
EQUAL = {
    'nano': {'plain': ('--width 72', 1.17), 'one stream': ('--width 72', 0.895), 'AdamW': ('', 1.09)},
    'mini': {'plain': ('--width 144', 1.12), 'one stream': ('--width 144', 0.868), 'AdamW': ('', 1.14)},
}


def finetuning(datasets):
    """Rows of each system, random weights and -FT. datasets: {flags: `Part.column`}."""
    rows = {}
    for system, flags in SYSTEMS.items():
        for suffix, extra in (('', ' --from_scratch'), ('-FT', '')):
            rows[system + suffix] = [Part(f'--checkpoint {{start}} --dataset {name}{extra}', flags, column, 'finetune')
                                     for name, column in datasets.items()]
    return rows


def few_shot(name, counts):
    """The datasets of `finetuning` with so many trajectories, each for 500 epochs."""
    return {f'{name} --samples {count} --epochs 500': f'{{}} {count}' for count in counts}


STUDIES = {
    'main': Study('Main results: pre-trained networks on their own datasets; others trained on each dataset alone', {
        **SYSTEMS, **{name: f'--network {name} --datasets {{each}}' for name in baselines.BASELINES}}),
    'finetune': Study('Main results: fine-tuned on each dataset', {
        row.removesuffix('-FT'): parts for row, parts in finetuning(dict.fromkeys(PRETRAINING, '{}')).items()
        if row.endswith('-FT')}),
    'downstream': Study('Downstream tasks', finetuning(dict.fromkeys((
        'ns2d_pdb_M1_eta1e-8_zeta1e-8_turb_512 --resolution 512', 'ns3d_pdb_M1_turb', 'cno_poisson', 'kolmogorov'),
        '{}'))),
    'rollout': Study(f'Long rollouts of {LONG}, L2RE at a step', finetuning({LONG: '{}'}), ROLLOUT),
    'few_shot': Study('Few-shot fine-tuning, by the number of trajectories', finetuning(
        few_shot('ns2d_fno_1e-4', (16, 32, 64, 128, 512, 2000)) | few_shot('wave_layer', (16, 32, 64, 128)))),
    'poseidon': Study('The waves of Poseidon, fine-tuned without and with their speed c', {
        'AOT-POT': [Part('--checkpoint {start} --dataset wave_gauss', '', script='finetune')],
        'AOT-POT, with c': [
            Part('--checkpoint {start} --dataset wave_layer --channels 3', '', script='finetune'),
            Part('--checkpoint {start} --dataset wave_gauss_c --channels 3', '', 'wave_gauss', 'finetune')]}),
    'ablation': Study('Ablation of the three mappings', {'AOT-POT': ''} | {f'w/o {x}': f'--ablate {x}' for x in 'adT'}),
    'streams': Study('Number of streams', {
        'S = 1': '--streams 1', 'S = 2': '--streams 2', 'S = 4': '', 'S = 8': '--streams 8'}),
    'sinkhorn': Study('Sinkhorn-Knopp rounds', {
        '0 rounds': '--sinkhorn_iters 0', '1 round': '--sinkhorn_iters 1', '5 rounds': '--sinkhorn_iters 5',
        '10 rounds': '--sinkhorn_iters 10', '20 rounds': '', '40 rounds': '--sinkhorn_iters 40'}),
    'alpha': Study('Initial value of alpha', {
        'alpha = 0.01': '', 'alpha = 0.05': '--alpha 0.05', 'alpha = 0.1': '--alpha 0.1'}),
    'heterogeneity': Study('Growing mixtures', GROWING),
    'moe': Study('AOT over a mixture of experts', {
        row: flags for row, flags in GROWING.items() if not row.startswith('DPOT') and '10 datasets' not in row}),
    'motivation': Study('Linear maps of the channels, learned or taken from another dataset', {
        'DPOT': '--residual plain --datasets {each}',
        'DPOT + linear': f'{LINEAR} learned --datasets {{each}}',
        **{f'fixed {source}': [Part(f'{LINEAR} {{start}} --datasets {{each}}', f'{LINEAR} learned --datasets {source}')]
           for source in PRETRAINING}}),
    'probe': Study('Datasets told apart by their T', {'AOT-POT': ''}, PROBE),
    'unseen': Study('Datasets that were not trained on, told apart by their T', {'AOT-POT': ''}, UNSEEN),
    'gains': Study('Largest gains of the residual path', {'AOT-POT': ''}, GAINS),
    'scaling': Study('Scaling: 50 mean(-log10 L2RE) over the datasets', {
        f'{system}, {size}': f'{flags} --size {size}'
        for size in ('tiny', 'small', 'medium') for system, flags in SYSTEMS.items()}, SCALING),
    'contrasts': Study("AOT-POT, one stream and DPOT's block, at equal steps, time and parameters", {
        "DPOT's block": '--residual plain',
        "DPOT's block, equal time": [Part('--residual plain', equal='plain')],
        'one stream': '--streams 1',
        'one stream, equal time': [Part('--streams 1', equal='one stream')],
        'AOT-POT': '',
        "DPOT's block, AdamW": '--residual plain --optimizer adamw',
        'AOT-POT, AdamW': '--optimizer adamw',
        'AOT-POT, AdamW, equal time': [Part('--optimizer adamw', equal='AdamW')]}),
    'pieces': Study('What the AOT block is made of', {
        "DPOT's block": '--residual plain',
        "DPOT's block, post-norm": '--residual plain --norm sandwich',
        "DPOT's block, post-norm and d": [Part('--streams 1', script='lab.blocks pair')],
        'one stream, pre-norm, w/o d': '--streams 1 --ablate d --norm pre',
        'one stream, w/o d': '--streams 1 --ablate d',
        'one stream': '--streams 1',
        'AOT-POT, w/o d': '--ablate d',
        'AOT-POT': '',
        'a block round the mixer alone': [Part('', script='lab.blocks mixer')],
        'a block round the MLP alone': [Part('', script='lab.blocks mlp')],
    }),
}

# ------------------------------------------------------------------------------------------------ runs

class Job(NamedTuple):
    """A run and its measure, for a row of the table. A command is a tuple of words."""
    row: str
    column: str                     # as of its Part
    seed: int
    folder: Path                    # of the run and its report
    trainings: tuple                # of the run from whose weights this one starts, if any, and of the run
    measuring: tuple                # the command of the measure
    report: Path                    # the JSON file that it writes


def job_of(row, part, seed, measure, args):
    """The Job of a `Part`."""
    name = slug(part.flags)
    flags = part.flags
    before = ()
    if part.start is not None:
        name = f'{slug(part.start)}-{name}'
        start = job_of(row, Part(part.start), seed, measure, args)
        before = start.trainings
        flags = flags.format(start=shlex.quote(str(start.folder / 'last.pt')))
    if args.steps:
        flags = re.sub(r'--epochs \d+', '', flags) + f' --steps {args.steps}'
    if part.script != 'finetune':           # of a flag that stands there twice, the last one counts
        flags = f'--size {args.size} --datasets {shlex.join(args.datasets)} {args.recipe} {flags}'
        if '--experts' in flags:
            flags = re.sub('--size (?=tiny|small|medium)', '--size moe-', flags)
    if part.equal:
        name += '-equal'
        width, share = EQUAL[args.size][part.equal]
        recipe = train.parse(shlex.split(f'--size {args.size} {args.recipe}')).recipe
        flags += f' {width} --steps {round(share * (args.steps or recipe.steps))}'
    command = measure.command.format(samples=args.samples)
    module, *block = part.script.split()
    if block:
        name = f'{block[0]}-{name}'
        command = part.script
    folder = Path(args.out, args.name, f'{name}-seed_{seed}')
    report = folder / f'{slug(command.removeprefix("lab."))}.json'
    python = sys.executable, '-m'
    device = '--device', args.device
    training = (*python, module, *block, *shlex.split(flags), '--data', args.data,
                '--out', str(folder), '--seed', str(seed), *device, '--resume')
    measuring = (*python, *command.split(), '--checkpoint', str(folder / 'last.pt'), *device,
                 '--json', str(report))
    return Job(row, part.column, seed, folder, (*before, training), measuring, report)


def slug(flags):
    """Flags as a part of a file's name: '--ablate a --depth 2' is 'ablate_a-depth_2'."""
    flags = flags.replace('--checkpoint {start} ', '').replace('{start}', 'given')
    return re.sub(r'[^\w.-]+', '_', flags.replace(' --', '-').strip('- ')) or 'aot'


def jobs_of(study, args):
    """The jobs of a study, and a line for each dataset for lack of which others are left out."""
    jobs = []
    left_out = set()
    for row, parts in study.rows.items():
        for part in [Part(parts)] if isinstance(parts, str) else parts:
            for name in args.datasets if '{each}' in part.flags else ['']:
                one = part._replace(flags=part.flags.replace('{each}', name))
                try:
                    if one.equal and args.size not in EQUAL:
                        raise InputError(f'{row}: the step times of {args.size} are not in EQUAL of lab/reproduce.py')
                    data.find(args.data, re.findall(r'--datasets? (\S+)', f'{one.start} {one.flags}'))
                except InputError as error:
                    left_out.add(f'left out: {error}')
                    continue
                jobs += [job_of(row, one, seed, study.measure, args) for seed in range(args.seeds)]
    return jobs, sorted(left_out)


def measured(job):
    """Whether there is a report that is younger than the training."""
    log = job.folder / 'log.jsonl'
    return job.report.exists() and log.exists() and job.report.stat().st_mtime_ns >= log.stat().st_mtime_ns


def execute(jobs):
    """Run jobs that begin with the same training. Returns those that succeed."""
    done = []
    if succeeds(jobs[0].trainings[0]):
        for job in jobs:
            fine = all(map(succeeds, job.trainings[1:]))
            if fine and not measured(job):
                job.report.unlink(missing_ok=True)              # an older one of ours, which no measure replaces
                fine = succeeds(job.measuring)
            if fine:
                done.append(job)
    return done


def succeeds(words):
    """Run a command, which ends with us: whether it succeeds."""
    process = subprocess.Popen(words)
    try:
        return process.wait() == 0
    except BaseException:
        process.terminate()                                     # a training then saves and leaves
        process.wait()
        raise


# ------------------------------------------------------------------------------------------------ the command

def gather(study, jobs):
    """{label: {row: {column: {seed: number}}}} of a study, from the reports of the jobs."""
    numbers = {label: {row: {} for row in study.rows} for label in study.measure.tables}
    for job in jobs:
        with files.naming(job.report, 'not a report of this study; delete it to make it again'):
            report = read_report(job.report)
            columns = {label: numbers_of(report) for label, numbers_of in study.measure.tables.items()}
        for label, of_label in columns.items():
            for name, value in of_label.items():
                numbers[label][job.row].setdefault(job.column.format(name), {})[job.seed] = value
    return numbers


def parse():
    """The flags, and the study with the rows that they leave."""
    parser = terminal.Parser(description=__doc__)
    add = parser.add_argument
    add('study', choices=STUDIES, metavar='STUDY', help=', '.join(STUDIES))
    add('--size', default='nano', choices=list(configs.SIZES), help='preset of the networks [nano]')
    add('--seeds', type=int, default=3, metavar='N', help='runs of each network, seeds 0 to N-1 [3]')
    add('--steps', type=int, default=0, metavar='N', help="steps of every training; 0: the preset's")
    add('--recipe', default='', metavar="'--X Y'", help='further flags of every train.py, before those of the row')
    add('--data', default='', metavar='DIR', help='folder of the datasets [data; for nano and mini data/SIZE]')
    add('--datasets', nargs='+', default=(), metavar='X', help="of the pre-training [the paper's twelve in --data]")
    add('--rows', nargs='+', default=(), metavar='ROW', help='only these rows of the table [all]')
    add('--samples', type=int, default=8, metavar='N', help='trajectories of the study rollout; the paper has 1000 [8]')
    add('--out', default='out/reproduce', metavar='DIR', help='folder of runs and tables [%(default)s]')
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
    args.table = Path(args.out, '-'.join([args.study, args.name, *map(slug, [*args.rows, *mixture])])[:200])
    args.data = args.data or (f'data/{args.size}' if args.size in configs.BUILTIN else 'data')
    names = data.find(args.data, mixture)
    args.datasets = names if mixture else [name for name in PRETRAINING if name in names] or names
    for name in args.rows:
        if name not in study.rows:
            raise InputError(f'--rows {name!r}: the rows of {args.study} are {", ".join(study.rows)}')
    return args, study._replace(rows={name: study.rows[name] for name in args.rows or study.rows})


def main():
    args, study = parse()
    jobs, left_out = jobs_of(study, args)
    groups = {}                                     # {training: the jobs that begin with it}
    for job in jobs:
        groups.setdefault(job.trainings[0], []).append(job)
    if args.list:
        for training, group in groups.items():
            chains = [[*job.trainings[1:], ('rm', '-f', str(job.report)), job.measuring]
                      for job in group if not measured(job)]
            if chains:
                words = '; '.join(' && '.join(map(shlex.join, chain)) for chain in chains)
                print(f'{shlex.join(training)} && ({words})')
        return
    for line in left_out:
        print(line, flush=True)
    if not jobs:
        raise InputError(f'{args.study}: {args.data} has none of the datasets that it needs, so there is no table')
    done = [job for group in groups.values() for job in execute(group)]
    if done:
        text, numbers = tables.tabulate(study, gather(study, done), tables.paper_table(args.study, args.size))
        print(text)
        files.write_text(f'{args.table}.md', text)
        report = {'study': args.study, 'size': args.size, 'tables': numbers}
        files.write_text(f'{args.table}.json', json.dumps(report, indent=1))
    failed = [str(job.folder) for job in jobs if job not in done]
    if failed:
        raise InputError(f'these runs failed, as the lines above say: {" ".join(failed)}')


if __name__ == '__main__':
    terminal.cli(main)
