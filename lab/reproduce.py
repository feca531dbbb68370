"""One command for each table of the paper: it trains the networks, measures them and prints the table.

    python -m lab.reproduce --list                                           the studies
    python -m lab.reproduce ablation --size nano --seeds 3 --data data/nano  the paper's Table 5, small
    python -m lab.reproduce few_shot --size small --data data --jobs 4       the paper's own data, four runs at once
    python -m lab.reproduce main --list                                      the commands that can run now, one a line

Studies share their runs in OUT/<size>/: a finished run is not repeated, a killed one is resumed, and one with other
data or flags is refused. OUT/<study>-<size>.md and .json get the table, with the paper's numbers from lab/paper.md.
"""
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

import configs
import data
import train
from configs import MIXTURES, PRETRAINING, InputError
from lab.tables import paper_table, tabulate
from nets import baselines
from runtime import checkpoint, files, layouts, terminal

LONG = 'ns2d_fno_1e-3'              # of the 500-step rollouts; sources/generate.py makes references as long as needed

# ------------------------------------------------------------------------------------------------ what is measured

class Measure(NamedTuple):
    """A module with flags that writes a JSON file, and the tables that are made of it."""
    command: str                    # {samples} is --samples
    tables: dict                    # label -> the function that makes {column: number} of the file
    trained: bool = True            # whether it needs a checkpoint; lab/bench.py makes networks of its own


def rollout_errors(report):
    """The L2RE of rollouts over the test frames, of each dataset in the JSON of evaluate.py.

    Of a steady problem it is the paper's median relative L1, in a column that has no part in the geometric mean.
    """
    columns = {}
    for name, parts in report['datasets'].items():
        if parts['steady']:
            columns[f'{name} (L1)'] = statistics.median(or_inf(error) for error in parts['model']['l1']['samples'])
        else:
            columns[name] = or_inf(parts['model']['rollout']['mean'])
    return columns


def one_step_errors(report):
    """The L2RE of one step of each dataset in the JSON of evaluate.py that is not steady."""
    return {name: or_inf(parts['model']['step']['mean'])
            for name, parts in report['datasets'].items() if not parts['steady']}


def or_inf(value):
    """A number of a JSON file, in which null stands for one that is not finite."""
    return math.inf if value is None else value


def stability(report):
    """The numbers of the log beside a checkpoint; the loss of a spike is over twice the median of the ten before."""
    log = checkpoint.read_log(Path(report['checkpoint']).with_name('log.jsonl'))
    losses = [line['loss'] for line in log if line['loss'] is not None]
    norms = [line['grad_norm'] for line in log if line['grad_norm'] is not None]
    spikes = [i for i in range(10, len(losses)) if losses[i] > 2 * statistics.median(losses[i - 10:i])]
    return {'steps': log[-1]['step'], 'final loss': losses[-1], 'lowest': min(losses), 'skipped': log[-1]['skipped'],
            'spikes': len(spikes), 'largest gradient': max(norms)}


def scaling(report):
    """The size and the score of the paper's App. C.4, which is 100 for an error of 0.01 on each dataset."""
    logarithms = [math.log10(max(error, 1e-12)) for error in rollout_errors(report).values()]
    return {'M activated parameters': report['activated'] / 1e6, 'score': -50 * statistics.fmean(logarithms)}


def largest_gains(report):
    """The largest gain over samples and sub-layers of each kind in the JSON of lab/interpret.py."""
    return {name.replace('_', ' '): max(rows['max']) for name, rows in report['gains'].items()}


SCORES = Measure('evaluate', {'L2RE of rollouts': rollout_errors, 'L2RE of one step': one_step_errors})
ROLLOUT = Measure(f'evaluate --rollout 500 --datasets {LONG} --samples {{samples}}',
                  {'L2RE at the step': lambda report: report['rollout'][LONG]['model']['step']})
PROBE = Measure('lab.interpret --probe', {'share that is classified rightly': lambda report: {
    **report['probe']['right'], 'mean': report['probe']['accuracy']}})
UNSEEN = Measure('lab.interpret --probe --unseen wave_layer wave_gauss', {
    'share that is classified rightly': lambda report: report['probe']['unseen']['right']})
GAINS = Measure('lab.interpret --gains', {'largest Amax gain': largest_gains})
TIMING = Measure('lab.bench latency', {'time of a step': lambda row: {'ms': row['mean ms']}}, trained=False)
STABILITY = Measure('evaluate', {'numbers of the training log': stability})
SCALING = Measure('evaluate', {'score and size': scaling})


class Study(NamedTuple):
    """A table of the paper."""
    title: str
    rows: dict                      # row -> the flags of train.py, or a list of `Part`
    measure: Measure = SCORES
    controls: tuple = ()            # the rows with which those below them are compared; none: the first row


class Part(NamedTuple):
    """A network of a row: `script` with `flags`, after train.py with the flags `start` if given."""
    flags: str                      # {start} is the checkpoint of that run, {each} each dataset of the mixture in turn
    start: str | None = None
    column: str = ''                # appended to the name of the dataset
    script: str = 'train'


SYSTEMS = {'DPOT': '--residual plain', 'MoE-POT': '--residual plain --experts 16', 'AOT-POT': '',
           'AOT-MoE': '--experts 16'}
GROWING = {f'{system}, {name.removeprefix("mixture_")} datasets': f'{flags} --datasets {name}'
           for system, flags in SYSTEMS.items() for name in MIXTURES}
LINEAR = '--residual plain --channel_maps'
RESIDUALS = {'DPOT': '--residual plain', 'one stream': '--streams 1', 'AOT-POT': ''}
# as many parameters as AOT-POT within a tenth, and about five minutes of one core by the times of their steps
PEERS = {
    'AOT-POT': '--no-normalize --steps 5000',
    'DPOT': '--residual plain --no-normalize --width 72 --mlp 168 --steps 6650',
    'FNO': '--network baselines:FNO --width 104 --steps 5480',
    'UNet': '--network baselines:UNet --width 72 --steps 4830'}


def finetuning(datasets):
    """Rows of fine-tuning: every system from random weights and, with -FT, pre-trained.

    datasets: [(name, further flags, what is appended to the column)].
    """
    rows = {}
    for system, flags in SYSTEMS.items():
        for suffix, extra in (('', ' --from_scratch'), ('-FT', '')):
            rows[system + suffix] = [
                Part(f'--checkpoint {{start}} --dataset {name}{extra}{more}', flags, column, 'finetune')
                for name, more, column in datasets]
    return rows


def few_shot(name, counts):
    """The datasets of `finetuning` with so many trajectories, for 500 epochs also of a dataset of the pre-training."""
    return [(name, f' --samples {count} --epochs 500', f' {count}') for count in counts]


STUDIES = {
    'main': Study('Main results: pre-trained networks on their own datasets; others trained on each dataset alone', {
        **SYSTEMS, **{name: f'--network baselines:{name} --datasets {{each}}' for name in baselines.BASELINES}}),
    'finetune': Study('Main results: fine-tuned on each dataset', {
        row.removesuffix('-FT'): parts for row, parts in finetuning([(name, '', '') for name in PRETRAINING]).items()
        if row.endswith('-FT')}),
    'downstream': Study('Downstream tasks', finetuning([
        ('ns2d_pdb_M1_eta1e-8_zeta1e-8_turb_512', ' --resolution 512', ''), ('ns3d_pdb_M1_turb', '', ''),
        ('cno_poisson', '', ''), ('kolmogorov', '', '')])),
    'rollout': Study(f'Long rollouts of {LONG}, L2RE at a step', finetuning([(LONG, '', '')]), ROLLOUT),
    'few_shot': Study('Few-shot fine-tuning, by the number of trajectories', finetuning([
        *few_shot('ns2d_fno_1e-4', (16, 32, 64, 128, 512, 2000)), *few_shot('wave_layer', (16, 32, 64, 128))])),
    'poseidon': Study('The waves of Poseidon, fine-tuned without and with their speed c', {
        'AOT-POT': [Part('--checkpoint {start} --dataset wave_gauss', '', script='finetune')],
        'AOT-POT, with c': [
            Part('--checkpoint {start} --dataset wave_layer', '', script='finetune'),
            Part('--checkpoint {start} --dataset wave_gauss --coefficients c --channels 3', '', script='finetune')]}),
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
    'probe': Study('Datasets told apart by their T, or by the pooled tokens of a plain network', {
        'AOT-POT': '', 'DPOT, tokens': '--residual plain'}, PROBE),
    'unseen': Study('Datasets that were not trained on, told apart by their T', {'AOT-POT': ''}, UNSEEN),
    'gains': Study('Largest gains of the residual path', {'AOT-POT': ''}, GAINS),
    'stability': Study('Stability of the training', SYSTEMS, STABILITY),
    'timing': Study('A single step at batch 1, milliseconds', SYSTEMS, TIMING),
    'scaling': Study('Scaling: 50 mean(-log10 L2RE) over the datasets', {
        f'{system}, {size}': f'{flags} --size {"moe-" if "experts" in flags else ""}{size}'
        for size in ('tiny', 'small', 'medium') for system, flags in SYSTEMS.items()}, SCALING),
    'depth': Study('Depth of the network', {
        f'{name}, {depth} layers': f'{flags} --depth {depth}' for depth in (1, 2, 4, 8)
        for name, flags in {**SYSTEMS, 'one stream': '--streams 1'}.items()}),
    'normalize': Study('Inputs with mean 0 and deviation 1', {
        name + ending: f'{flags} --{switch}' for ending, switch in (('', 'no-normalize'), (', normalized', 'normalize'))
        for name, flags in RESIDUALS.items()}),
    'overlap': Study('Patches that overlap in the readout, and a readout with as many parameters', {
        name + ending: flags + more for name, flags in {'AOT-POT': '', 'DPOT': '--residual plain'}.items()
        for ending, more in (('', ''), (', overlap', ' --overlap'), (', wide', ' --out_width 56'))},
        controls=('AOT-POT', 'DPOT')),
    'gain': Study('Where the gain begins', {
        **RESIDUALS, 'distinct streams': '--stream_start distinct', 'w/o T': '--ablate T', 'w/o a, d': '--ablate ad'},
        controls=('DPOT', 'one stream', 'AOT-POT')),
    'peers': Study('Other networks with as many parameters and as much time, on all datasets and on each alone', {
        name + ending: flags + more for ending, more in (('', ''), (', alone', ' --datasets {each}'))
        for name, flags in PEERS.items()}, controls=('AOT-POT', 'AOT-POT, alone')),
    'structure': Study('From the plain network to AOT-POT, one part after the other', {
        'plain': '--residual plain', 'two residuals': '--streams 1 --no-post_norm', '+ norm after': '--streams 1',
        '+ streams': '--ablate adT', '+ a': '--ablate dT', '+ d': '--ablate T', '+ T': '',
        'without norm after': '--no-post_norm', 'inner skip': '--inner_skip', 'T starts as I': '--t_init 6'}),
}

# ------------------------------------------------------------------------------------------------ runs

class Job(NamedTuple):
    """One training: `script` with `flags`, after the job `start` if there is one."""
    folder: Path                    # of the run, its reports and output.txt
    flags: str
    seed: int
    start: 'Job' = None
    script: str = 'train'

    @property
    def datasets(self):
        """The datasets that the flags name."""
        name = re.search(r'--datasets? (\S+)', self.flags)
        return MIXTURES.get(name[1], (name[1],)) if name else ()

    def size(self, args):
        """The preset: --size, or that of MoE-POT if there is one and the network has experts."""
        size = args.size.removeprefix('moe-') if '--network' in self.flags else args.size
        return f'moe-{size}' if '--experts' in self.flags and f'moe-{size}' in configs.SIZES else size

    def settings(self, args):
        """The flags of the training; of one that stands there twice, the last one counts."""
        flags = self.flags.format(start=shlex.quote(str(self.start.folder / 'last.pt')) if self.start else '')
        if args.steps:
            flags = re.sub(r'--epochs \d+', '', flags) + f' --steps {args.steps}'
        if self.script == 'train':
            flags = f'--size {self.size(args)} --datasets {shlex.join(args.datasets)} {args.recipe} {flags}'
        return [*shlex.split(flags), '--data', args.data, '--out', str(self.folder), '--seed', str(self.seed),
                '--device', args.device]

    def training(self, args):
        """The command line of the training; it continues what was begun."""
        return [*shlex.split(args.launcher), '-m', self.script, *self.settings(args), '--resume']

    def measuring(self, measure, args):
        """The command line of the measure."""
        network = ['--checkpoint', str(self.folder / 'last.pt')] if measure.trained else ['--size', self.size(args)]
        return [sys.executable, '-m', *measure.command.format(samples=args.samples).split(), *network,
                '--device', args.device, '--json', str(self.report(measure, args))]

    def report(self, measure, args):
        """The JSON file of the measure; times are those of a device."""
        name = measure.command.format(samples=args.samples).removeprefix('lab.')
        if not measure.trained:
            name += f'-{args.device}'
        return self.folder / f'{slug(name)}.json'

    def measured(self, measure, args):
        """What was measured, {label: {column: number}}; empty before it is."""
        path = self.report(measure, args)
        report = files.read_json(path, 'models' if measure.trained else 'latency')
        if not report:
            return {}
        try:
            if measure.trained:
                [report] = report['models'].values()
            else:
                report = report['latency']['plain' if 'plain' in self.flags else 'aot']
            return {label: read(report) for label, read in measure.tables.items()}
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise InputError(f'{path}: it is not what {measure.command} writes; move it away') from None

    def finished(self):
        """Whether the last checkpoint is of the last step; a killed run may have logged that step without saving it."""
        path = self.folder / 'last.pt'
        return path.exists() and checkpoint.read(path)['step'] == files.read_json(self.folder / 'config.json')['steps']

    def check(self, args):
        """Raise InputError if the folder holds a run of other data, another network or recipe."""
        if not (config := files.read_json(self.folder / 'config.json', 'model', 'train', 'run', 'steps')):
            return
        old = {**config['model'], **config['train'], 'datasets': sorted(config['run']['datasets']),
               'data': Path(config['run']['data']).resolve()}
        new = {'datasets': sorted(self.datasets or args.datasets), 'data': Path(args.data).resolve()}
        if self.script == 'train':
            _, model, recipe, _ = train.parse(self.settings(args))
            new |= json.loads(json.dumps({**vars(model), **vars(recipe)}))
        for name, value in new.items():
            if old.get(name, value) != value and name != 'channel_maps':        # a checkpoint, under whatever path
                raise InputError(f'{self.folder}: the run there has --{name} {old[name]}, not {value} as in this '
                                 f'command; name another --out, or remove that folder')

    def lack(self, args):
        """What this training needs and is not there; empty if there is nothing."""
        samples, network = (re.search(rf'--{flag} (\S+)', self.flags) for flag in ('samples', 'network'))
        if network and (package := baselines.lacking(network[1])):
            return f'{network[1]} (pip install {package})'
        for name in self.datasets:
            if not Path(args.data, name, 'train.h5').exists():
                return f'{name} ({args.data} lacks it, see sources/generate.py)'
            if samples and data.Trajectories(args.data, name, 'train', 1, None).count < int(samples[1]):
                return f'{samples[1]} trajectories of {name} ({args.data} has fewer)'
        return self.start.lack(args) if self.start else ''


def slug(flags):
    """Flags as a part of a file's name: '--ablate a --depth 2' is 'ablate_a-depth_2'."""
    flags = flags.replace('--checkpoint {start} ', '').replace('{start}', 'given')
    return re.sub(r'[^\w.-]+', '_', flags.replace(' --', '-').strip('- ')) or 'aot'


def plan(study, args):
    """What the rows of a study are made of: [(row, seed, job, what is appended to its columns)]."""
    def job(flags, seed, start=None, script='train'):
        name = '-'.join(slug(text) for text in (start, flags) if text is not None)
        first = None if start is None else job(start, seed)
        return Job(Path(args.out, args.name, f'{name}-seed_{seed}'), flags, seed, first, script)

    jobs = []
    for row, parts in study.rows.items():
        for seed in range(args.seeds):
            for part in [Part(parts)] if isinstance(parts, str) else parts:
                for name in args.datasets if '{each}' in part.flags else ['']:
                    flags = part.flags.replace('{each}', name)
                    jobs.append((row, seed, job(flags, seed, part.start, part.script), part.column))
    return jobs


def commands(study, args):
    """{folder: [command, ...]} of the jobs that are not done and can run now, and the set of what others `lack`."""
    lines = {}
    lacks = set()
    trained = study.measure.trained
    for job in dict.fromkeys(job for _, _, job, _ in plan(study, args)):
        if job.measured(study.measure, args):
            continue
        if lack := job.lack(args):
            lacks.add(lack)
        elif not trained and '--experts' in job.flags and not job.size(args).startswith('moe-'):
            lacks.add(f'{args.size} with experts (lab/bench.py has moe-tiny, moe-small and moe-medium)')
        elif job.start and not job.start.finished():
            lines[job.start.folder] = [job.start.training(args)]
        else:
            lines[job.folder] = [job.measuring(study.measure, args)]
            if trained and not job.finished():
                lines[job.folder].insert(0, job.training(args))
    return lines, lacks


def environments(args):
    """The environment of each of --jobs: with a GPU of its own, or with its share of the cores."""
    count = torch.cuda.device_count() if args.device in ('auto', 'cuda') else 0
    gpus = os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(count)))).split(',')
    shares = [{}]
    if args.jobs > 1 and count:
        shares = [{'CUDA_VISIBLE_DEVICES': gpus[i % count]} for i in range(args.jobs)]
    elif args.jobs > 1:
        shares = [{'OMP_NUM_THREADS': str(max(1, os.cpu_count() // args.jobs))}] * args.jobs
    return [{**os.environ, **share} for share in shares]


def execute(study, args):
    """Run all commands, --jobs at once, with a signal passed on to them: {folder: last line} of those that failed."""
    errors = {}
    processes = []
    free = environments(args)                                   # as many as there are threads

    def work(folder, lines):
        folder.mkdir(parents=True, exist_ok=True)
        environment = free.pop()
        for line in lines:
            with open(folder / 'output.txt', 'a+') as output:
                process = subprocess.Popen(line, env=environment, stdout=output, stderr=output)
                processes.append(process)
                if code := process.wait():
                    output.seek(0)
                    errors[folder] = (output.read().strip() or f'exit code {code}').splitlines()[-1]
                    break
        free.append(environment)

    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            for _ in range(2):                                  # first what others start from, then the others
                jobs = {folder: lines for folder, lines in commands(study, args)[0].items() if folder not in errors}
                list(terminal.Progress(pool.map(work, jobs, jobs.values()), 'runs', len(jobs), disable=not jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(processes):
                process.terminate()                             # which does nothing to one that has ended
            raise
    return errors

# ------------------------------------------------------------------------------------------------ the command

def collect(study, args):
    """{label: {row: {column: {seed: number}}}} of a study, of the seeds that are there, in the paper's order."""
    tables = {label: {row: {} for row in study.rows} for label in study.measure.tables}
    for row, seed, job, suffix in plan(study, args):
        for label, columns in job.measured(study.measure, args).items():
            for column, value in columns.items():
                tables[label][row].setdefault(column + suffix, {})[seed] = or_inf(value)
    order = {name: i for i, name in enumerate(PRETRAINING)}
    for rows in tables.values():
        for row, cells in rows.items():
            rows[row] = dict(sorted(cells.items(), key=lambda cell: order.get(cell[0], len(order))))
    return tables


def warn_of_other_data(jobs, args):
    """Say in one line which runs of a table were trained or measured on other data than those in --data now."""
    now = {}
    folders = []
    first = ''
    for job in sorted(jobs, key=lambda job: job.folder):
        config = files.read_json(job.folder / 'config.json')
        before = config.get('fingerprints', {})
        known = {Path(file).parts[0] for file in now}
        names = {Path(file).parts[0] for file in before} - known
        now |= data.fingerprints(args.data, sorted(names))
        if changed := layouts.changed(before, now):
            folders.append(str(job.folder))
            first = first or changed
    if folders:
        terminal.warn(f'{" ".join(folders)}: the data in {args.data} have changed since then: {first}; remove these '
                      f'folders to repeat the runs')


def parse():
    """The flags, and the study with the rows that they leave."""
    parser = terminal.Parser(description=__doc__)
    add = parser.add_argument
    add('study', nargs='?', choices=STUDIES, metavar='STUDY', help=', '.join(STUDIES))
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
    add('--jobs', type=int, default=1, metavar='N', help='runs at once, each on its own GPU or share of the cores [1]')
    add('--launcher', default=sys.executable, help='what starts a training [python]')
    add('--list', action='store_true', help='print the commands that can run now, and without STUDY the studies')
    add('--collect', action='store_true', help='only tabulate what is there')
    args = parser.parse_args()
    if not args.study:
        if not args.list:
            raise InputError(f'which STUDY of {", ".join(STUDIES)}? --list prints their titles')
        print(*(f'{name:15}{study.title}' for name, study in STUDIES.items()), sep='\n')
        sys.exit(0)
    for flag in ('recipe', 'launcher'):
        try:
            shlex.split(getattr(args, flag))
        except ValueError as error:
            raise InputError(f'--{flag} {getattr(args, flag)}: {error}') from None
    configs.at_least(1, seeds=args.seeds, jobs=args.jobs, samples=args.samples)
    configs.at_least(0, steps=args.steps)
    mixture = args.datasets
    study = STUDIES[args.study]
    args.name = args.size
    if args.steps:
        args.name += f'-{args.steps}_steps'
    if args.recipe:
        args.name += f'-{slug(args.recipe)}'
    args.table = Path(args.out, '-'.join([args.study, args.name, *map(slug, [*args.rows, *mixture])])[:200])
    args.data = args.data or (f'data/{args.size}' if args.size in configs.BUILTIN else 'data')
    if study.measure.trained:
        names = data.find(args.data, mixture)
        args.datasets = names if mixture else [name for name in PRETRAINING if name in names] or names
    else:
        args.jobs = 1                                           # they would slow one another down
    for name in args.rows:
        if name not in study.rows:
            raise InputError(f'--rows {name!r}: {args.study} has no such row{configs.nearest(name, study.rows)}')
    names = args.rows or list(study.rows)
    if mixture and not args.rows:                               # channel maps come from the mixture
        names = [name for name in names if name.removeprefix('fixed ') in (name, *args.datasets)]
    return args, study._replace(rows={name: study.rows[name] for name in names})


def main():
    args, study = parse()
    jobs = {job for _, _, job, _ in plan(study, args)}
    if study.measure.trained:
        for job in jobs | {job.start for job in jobs} - {None}:
            job.check(args)
    errors = {}
    if not args.collect:
        lines, lacks = commands(study, args)
        if args.list:
            for job in lines.values():
                print(' && '.join(map(shlex.join, job)))
            return
        for lack in sorted(lacks):
            print(f'left out: {lack}', flush=True)
        errors = execute(study, args)
    warn_of_other_data(jobs, args)
    text, tables = tabulate(study, collect(study, args), paper_table(args.study, args.size))
    print(text)
    files.write(f'{args.table}.md', text)
    files.write(f'{args.table}.json', json.dumps({'study': args.study, 'size': args.size, 'tables': tables}, indent=1))
    if errors:
        raise InputError('; '.join(f'{folder}: {line}' for folder, line in errors.items()))


if __name__ == '__main__':
    terminal.cli(main)
