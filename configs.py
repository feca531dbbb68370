"""Named presets: model sizes, training recipes, the table of datasets, how commands run.

The fields of the dataclasses are flags of the commands: `train.py --size tiny --streams 2` has the
network `model('tiny', streams=2)`. An error names the field; `override` makes that its flag.
"""
import dataclasses
import difflib
from dataclasses import dataclass


class InputError(ValueError):
    """The user's input is wrong. `cli` prints the message as one line and exits with code 2."""


def arg(default, help, least=None, most=10 ** 9, flag=True, **options):
    """A dataclass field, which is a flag of the commands.

    least, most: of a number; without `least` a whole one is at least 1, another at least 0.
    flag: whether it is one. options: of argparse.
    """
    if least is None:
        least = 1 if isinstance(default, int) else 0
    metadata = dict(least=least, most=most, flag=flag, options={'help': help, **options})
    return dataclasses.field(default=default, metadata=metadata)


def bounded(name, value, least=0, most=10 ** 9):
    """Raise InputError, which names the number `value`, if it is out of bounds or NaN."""
    if not value >= least:
        raise InputError(f'{name} {value} must be at least {least}')
    if value > most:
        raise InputError(f'{name} {value} must be at most {most}')


def check_fields(config):
    """Raise InputError for the first field of a config that is not a choice or out of bounds."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        choices = field.metadata['options'].get('choices', [value])
        if value not in choices:
            raise InputError(f'{field.name} {value!r} is none of {" ".join(map(str, choices))}')
        if field.type in (int, float):
            bounded(field.name, value, field.metadata['least'], field.metadata['most'])


def grid(value, dims=2):
    """The sizes of a grid: '128' or 128 -> (128, 128), '96x192' or (96, 192) -> (96, 192).

    dims: how often a single size is repeated. Raises InputError for what is not a grid.
    """
    parts = str(value).split('x') if isinstance(value, (int, str)) else value
    try:
        sizes = tuple(int(size) for size in parts)
    except (TypeError, ValueError):
        sizes = ()
    if len(sizes) == 1:
        sizes = sizes * dims
    if len(sizes) not in (2, 3) or not all(1 <= size <= 10 ** 9 for size in sizes):
        raise InputError(f'resolution {value!r} is not a grid, such as 128, 96x192 or 64x64x64')
    return sizes


# --------------------------------------------------------------------------------- model and recipe

NORM_GROUPS = 8                 # of every GroupNorm

# the fields that a network with residual='plain' lacks, and those that nets/baselines.py lacks
OF_THE_STREAMS = 'streams', 'sinkhorn_iters', 'alpha', 't_init', 'ablate'
OF_AOTPOT = (*OF_THE_STREAMS, 'residual', 'norm', 'inner_skip', 'overlap', 'experts', 'shared',
             'top_k', 'channel_maps', 'change')


@dataclass(frozen=True)
class ModelConfig:
    """The network (paper, App. B.3). Capital letters are the sizes in all shape comments."""
    channels: int = arg(4, 'C, field channels; those that a dataset lacks are constant 1')
    frames: int = arg(10, 'T, number of input frames')
    resolution: tuple = arg((128, 128), 'grid of the network, such as 128, 96x192 or 64x64x64',
                            type=str)
    patch: int = arg(8, 'P, patch size')
    width: int = arg(512, 'D, token width')
    mlp: int = arg(512, 'hidden width of the MLP, or h, the inputs of each expert')
    depth: int = arg(4, 'number of layers; each has two sub-layers, a mixer and an MLP')
    heads: int = arg(4, 'K, number of heads of the Fourier mixer')
    modes: int = arg(32, 'Fourier modes to keep, of each sign')
    out_width: int = arg(32, 'width of the readout before its last two 1x1 layers', flag=False)
    residual: str = arg('aot', 'aot: the AOT block; plain: that of DPOT', choices=('aot', 'plain'))
    streams: int = arg(4, 'S, number of parallel streams (n in the paper)')
    sinkhorn_iters: int = arg(20, 'Sinkhorn-Knopp rounds; 0: T = exp of its logits', least=0)
    alpha: float = arg(0.01, 'initial value of the three gating scalars', least=-10 ** 9)
    t_init: float = arg(1.0, 'c of the initial b^T = c I; 6: T starts near I', least=-10 ** 9)
    ablate: str = arg('', 'mappings to switch off, of a (then uniform), d (ones), T (identity)')
    norm: str = arg('', 'sandwich: before and after a sub-layer; pre: before it alone; default: '
                    'sandwich, of --residual plain pre', choices=('', 'sandwich', 'pre'))
    inner_skip: bool = arg(False, 'add the input of the mixer to its output, as DPOT does')
    overlap: bool = arg(False, 'tokens reach half a patch beyond their own, not in the paper')
    experts: int = arg(0, "E, experts of MoE-POT in the place of the MLP; 0: an MLP", least=0)
    shared: int = arg(2, 'further experts, which every sample takes', flag=False)
    top_k: int = arg(4, 'how many of the E experts a sample takes', flag=False)
    channel_maps: str = arg('', 'linear maps of channels: learned, or fixed ones of a checkpoint')
    normalize: bool = arg(False, 'each dataset gets mean 0 and deviation 1, not in the paper')
    change: bool = arg(False, 'predict how much the last frame changes, not in the paper')
    dims: int = arg(2, 'dimensions of space, see `resolution`', choices=(2, 3), flag=False)
    network: str = arg('aotpot', 'another one of nets/baselines.py: UNet or FNO')

    @property
    def title(self):
        """The network in one word: the residual of AOT-POT, or the name of another network."""
        return self.residual if self.network == 'aotpot' else self.network

    @property
    def sandwich(self):
        """Whether there is a norm after a sub-layer, too."""
        return self.norm == 'sandwich' or (not self.norm and self.residual == 'aot')

    def __post_init__(self):
        check_fields(self)
        object.__setattr__(self, 'resolution', grid(self.resolution, self.dims))
        object.__setattr__(self, 'dims', len(self.resolution))
        for name in {'aot': (), 'plain': OF_THE_STREAMS}.get(self.title, OF_AOTPOT):
            value = getattr(self, name)
            if value != getattr(ModelConfig, name):
                given = name if value is True else f'{name} {show(value)}'
                raise InputError(f'{given}: the network {self.title} has no such '
                                 f'thing; leave it out')
        if self.network != 'aotpot':
            return
        if self.experts and self.top_k > self.experts:
            raise InputError(f'experts {self.experts}: a sample takes {self.top_k} of them')
        if set(self.ablate) - set('adT'):
            raise InputError(f'ablate {self.ablate!r} may contain only the letters a, d and T')
        for divisor, name in ((self.heads, 'heads'), (NORM_GROUPS, 'groups of GroupNorm')):
            if self.width % divisor:
                raise InputError(f'width {self.width} is not divisible by {divisor}, the number '
                                 f'of {name}')
        if any(size % self.patch for size in self.resolution):
            raise InputError(f'resolution {show(self.resolution)} is not divisible by patch '
                             f'{self.patch}')


@dataclass(frozen=True)
class TrainConfig:
    """Pre-training as in the paper, App. B.3."""
    epochs: int = arg(1000, 'epochs, each of as many draws as training trajectories')
    steps: int = arg(0, 'optimizer steps; 0: follow from --epochs', least=0)
    batch_size: int = arg(160, 'global batch size, over all processes')
    lr: float = arg(1e-3, 'largest learning rate of the one-cycle schedule')
    warmup: float = arg(0.2, 'fraction of the steps in which the learning rate rises', most=1)
    optimizer: str = arg('adamw', "adamw, the paper's; muon: the matrices by nets/muon.py")
    ratio: float = arg(1.0, 'learning rate of the matrices of muon over --lr', flag=False)
    momentum: float = arg(0.95, 'decay rate of the momentum of muon', flag=False)
    beta1: float = arg(0.9, 'decay rate of the first moment in AdamW', most=0.999_999)
    beta2: float = arg(0.9, 'decay rate of the second moment in AdamW', most=0.999_999)
    weight_decay: float = arg(1e-6, 'decoupled weight decay of AdamW')
    grad_clip: float = arg(1e4, "largest gradient norm, by default DPOT's; 0: no clipping")
    noise: float = arg(5e-4, 'noise on the input over the norm of a sample and channel (epsilon); '
                       'with --normalize 7e-5 is a hundredth of the deviation of a channel')
    loss: str = arg('relative', 'relative: L2RE; change: more of it in slow fields; squared: MSE')
    balance: float = arg(0.1, "weight of MoE-POT's balance loss beside the loss", flag=False)
    sampling: tuple = arg((), "w_k, such as dr_pdb=5; of others the paper's, or 1", nargs='+')
    seed: int = arg(0, 'seed of initial weights, draws and noise', least=0)

    def __post_init__(self):
        check_fields(self)
        self.weights()

    def weights(self):
        """{dataset: w_k} of `sampling`. Raises InputError for what is not NAME=POSITIVE_NUMBER."""
        weights = {}
        for item in self.sampling:
            name, _, number = item.partition('=')
            try:
                weights[name] = float(number)
            except ValueError:
                weights[name] = 0.0
            if not 1e-9 <= weights[name] <= 1e9:
                raise InputError(f'sampling {item}: expected a dataset and a number from 1e-9 to '
                                 f'1e9, such as dr_pdb=5')
        return weights


PAPER = TrainConfig()
OURS = (ModelConfig(frames=5, resolution=64, patch=4, out_width=16, normalize=True, overlap=True),
        TrainConfig(warmup=0.05, optimizer='muon', noise=1e-4, grad_clip=1.0, loss='change'))
SIZES = {
    'nano': (dataclasses.replace(OURS[0], width=64, mlp=128, depth=3),
             dataclasses.replace(OURS[1], steps=1500, batch_size=6, lr=1e-2,
                                 sampling=('dr_pdb=5', 'ns2d_cond_pda=2', 'swe_pdb=1'))),
    'mini': (dataclasses.replace(OURS[0], width=128, mlp=256, depth=8),
             dataclasses.replace(OURS[1], steps=72_000, batch_size=16, lr=4e-3, ratio=3.0, noise=3e-5,
                                 sampling=('ns2d_fno_1e-3=4', 'ns2d_pda=2', 'ns2d_cond_pda=2',
                                           'swe_pdb=1', 'dr_pdb=1'))),
    'tiny': (ModelConfig(), PAPER),
    'small': (ModelConfig(width=1024, mlp=1024, depth=6, heads=8), PAPER),
    'medium': (ModelConfig(width=1024, mlp=4096, depth=12, heads=8), PAPER),
    'large': (ModelConfig(width=1536, mlp=6144, depth=24, heads=16, out_width=128), PAPER),
    'moe-tiny': (ModelConfig(experts=16), PAPER),
    'moe-small': (ModelConfig(width=1024, mlp=1024, depth=6, heads=8, experts=16), PAPER),
    'moe-medium': (ModelConfig(width=1024, mlp=2048, depth=8, heads=8, experts=16), PAPER),
}


def model(size, **fields):
    """The model of a preset of SIZES, with some fields replaced. InputError: an unknown name."""
    if size not in SIZES:
        raise InputError(f'unknown size {size!r}{nearest(size, SIZES)}')
    if fields.get('network', 'aotpot') != 'aotpot':     # which lacks what a preset switches on
        fields = {**{name: getattr(ModelConfig, name) for name in OF_AOTPOT}, **fields}
    return dataclasses.replace(SIZES[size][0], **fields)


def recipe(size, **fields):
    """The training recipe of a preset, with some fields replaced."""
    return dataclasses.replace(SIZES[size][1], **fields)


# ------------------------------------------------------------------------------------- the datasets

@dataclass(frozen=True)
class Dataset:
    """One PDE dataset, as the paper uses it if it does. A folder in the layout of data.py needs no entry."""
    channels: tuple     # their names, in order
    frames: int         # frames of a trajectory; 2 for a steady problem: the input and the solution
    t_test: int         # frames to predict at test
    dt: float           # time between two frames
    train: int          # trajectories of the training split
    test: int           # trajectories of the test split
    resolution: int     # native grid points along each axis
    weight: float = 1   # w_k of the balanced sampling
    static: tuple = ()  # channels that do not evolve
    dims: int = 2       # spatial dimensions


CNS = Dataset(('Vx', 'Vy', 'density', 'pressure'), 21, 11, 0.05, 9000, 200, 128)
CNS_512 = dataclasses.replace(CNS, train=900, test=20, resolution=512)
CNS_3D = Dataset(('Vx', 'Vy', 'Vz', 'pressure', 'density'), 21, 11, 0.05, 90, 10, 128, dims=3)
PRETRAINING = {                 # the paper's twelve
    'ns2d_fno_1e-5': Dataset(('w',), 20, 10, 1.0, 1000, 200, 64),
    'ns2d_fno_1e-4': Dataset(('w',), 30, 20, 1.0, 9800, 200, 64),
    'ns2d_fno_1e-3': Dataset(('w',), 50, 20, 1.0, 1000, 200, 64),
    'ns2d_pdb_M1_eta1e-1_zeta1e-1': CNS,
    'ns2d_pdb_M1_eta1e-2_zeta1e-2': CNS,
    'ns2d_pdb_M1e-1_eta1e-1_zeta1e-1': CNS,
    'ns2d_pdb_M1e-1_eta1e-2_zeta1e-2': CNS,
    'swe_pdb': Dataset(('h',), 101, 91, 0.01, 900, 60, 128, weight=3),
    'dr_pdb': Dataset(('u', 'v'), 101, 91, 0.05, 900, 60, 128, weight=3),
    'ns2d_pda': Dataset(('u', 'vx', 'vy'), 14, 4, 6.0, 6500, 650, 128),
    'ns2d_cond_pda': Dataset(('u', 'vx', 'vy'), 56, 46, 1.5, 3100, 200, 128),
    'cfdbench': Dataset(('u', 'v', 'mask'), 20, 10, 1.0, 9000, 1000, 64, static=('mask',)),
}
DOWNSTREAM = {
    'ns2d_pdb_M1_eta1e-8_zeta1e-8_turb_512': CNS_512,
    'ns2d_pdb_M1e-1_eta1e-8_zeta1e-8_turb_512': CNS_512,
    'ns2d_pdb_M1_eta1e-8_zeta1e-8_rand_512': CNS_512,
    'ns2d_pdb_M1e-1_eta1e-8_zeta1e-8_rand_512': CNS_512,
    'ns3d_pdb_M1_rand': CNS_3D,
    'ns3d_pdb_M1e-1_rand': CNS_3D,
    'ns3d_pdb_M1_turb': dataclasses.replace(CNS_3D, train=540, test=60, resolution=64),
    'kolmogorov': Dataset(('u', 'v', 'f'), 21, 11, 0.2, 2000, 200, 128, static=('f',)),
    'wave_layer': Dataset(('u', 'u_t', 'c'), 21, 5, 1 / 20, 2000, 200, 128, static=('c',)),
    'wave_gauss': Dataset(('u', 'u_t'), 16, 5, 1 / 15, 2000, 200, 128),
    'wave_gauss_c': Dataset(('u', 'u_t', 'c'), 16, 5, 1 / 15, 2000, 200, 128, static=('c',)),
    'cno_poisson': Dataset(('u',), 2, 1, 1.0, 1024, 256, 64),
    'cno_darcy': Dataset(('u',), 2, 1, 1.0, 256, 128, 64),
    'cno_airfoil': Dataset(('u',), 2, 1, 1.0, 750, 128, 128),
}
DATASETS = {**PRETRAINING, **DOWNSTREAM}
BASE = ('ns2d_fno_1e-5', 'ns2d_fno_1e-3', 'ns2d_pdb_M1e-1_eta1e-2_zeta1e-2', 'swe_pdb', 'dr_pdb',
        'cfdbench')
MIXTURES = {                    # mixtures of growing heterogeneity (paper, App. C.10)
    'mixture_6': BASE,
    'mixture_10': (*BASE, 'ns2d_fno_1e-4', 'ns2d_pdb_M1_eta1e-1_zeta1e-1', 'ns2d_pda',
                   'ns2d_cond_pda'),
    'mixture_12': tuple(PRETRAINING),
}
# size -> the datasets that are generated in small form if they are absent
BUILTIN = {
    'mini': tuple(PRETRAINING),
    'nano': ('ns2d_fno_1e-3', 'ns2d_fno_1e-5', 'dr_pdb', 'swe_pdb', 'wave_gauss', 'ns2d_cond_pda'),
}


def datasets_of(names):
    """The names of datasets, each once, where one of MIXTURES stands for its datasets."""
    return list(dict.fromkeys(dataset for name in names for dataset in MIXTURES.get(name, [name])))


@dataclass(frozen=True)
class RunConfig:
    """Where and how to run."""
    data: str = arg('', 'folder of the datasets; default: data/<size> for nano and mini, else data; '
                    'of finetune.py that of the checkpoint')
    datasets: tuple = arg((), "names, or the paper's mixture_6, _10, _12; default: all", nargs='+')
    out: str = arg('', 'folder of the run; default: out/<size>, or of finetune.py '
                   'out/<checkpoint>-<dataset>')
    device: str = arg('auto', 'auto, cpu, cuda, cuda:0, mps; auto takes cuda if there is one')
    threads: int = arg(0, 'of each process on a CPU; 0: PyTorch chooses', least=0)
    dtype: str = arg('auto', 'bf16: by autocast; auto: on a GPU that has it, and from --width 256 on '
                     'a CPU with AVX512_BF16', choices=('auto', 'fp32', 'bf16'))
    form: str = arg('fast', 'paper: each equation as printed, slower', choices=('fast', 'paper'))
    compile: str = arg('off', "on: compile the network; graphs: also as CUDA graphs; default: "
                       "of train.py graphs for the paper's sizes on a GPU",
                       choices=('off', 'on', 'graphs'))
    resume: bool = arg(False, 'continue exactly the run that this command began, or start it')
    init_from: str = arg('', 'start a new run from the weights in this checkpoint')
    accumulate: int = arg(1, 'parts of a batch whose gradients add up: less memory')
    save_every: int = arg(500, 'steps between checkpoints; by default at most a tenth of all')
    workers: int = arg(4, 'threads that read batches ahead; 0: the training reads', least=0)
    keep: bool = arg(False, 'keep the weights of each scoring as step<N>.pt')
    log_every: int = arg(20, 'steps between two lines of log.jsonl')

    __post_init__ = check_fields


def run(size, cuda=False):
    """How train.py runs a preset if no flag says otherwise; cuda: whether it is on a GPU."""
    if size in BUILTIN:
        return RunConfig(threads=1 if size == 'nano' else 0)    # small tensors wait for one another
    # 5000 steps are minutes on a GPU
    return RunConfig(save_every=5000, compile='graphs' if cuda else 'off')


@dataclass(frozen=True)
class FinetuneConfig:
    """What to fine-tune, and on how much data."""
    checkpoint: str = arg('', 'a network of train.py, finetune.py or DPOT', required=True)
    dataset: str = arg('', 'name of the dataset to fine-tune on', required=True)
    samples: int = arg(0, 'training trajectories, nested subsets by --seed; 0: all', least=0)
    from_scratch: bool = arg(False, 'train the same network from random weights')

    __post_init__ = check_fields


def show(value):
    """The value of a field as it is written on the command line."""
    if not isinstance(value, tuple):
        return str(value)
    between = 'x' if all(isinstance(item, int) for item in value) else ' '
    return between.join(map(str, value))


def nearest(name, names):
    """The end of a message about an unknown name: '; did you mean X?', or all `names`."""
    close = difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.5)
    return f'; did you mean {close[0]}?' if close else '; known: ' + ' '.join(names)


def override(config, args):
    """A copy of the dataclass instance `config` with the fields that are flags in `args`.

    --epochs resets steps. Raises InputError, which names the flag, for values that do not fit.
    """
    fields = {name: tuple(value) if isinstance(value, list) else value
              for name, value in vars(args).items() if name in vars(config)}
    if 'epochs' in fields:
        if fields.get('steps'):
            raise InputError('--steps and --epochs: give only one of the two')
        fields['steps'] = 0
    try:
        return dataclasses.replace(config, **fields)
    except InputError as error:
        raise InputError(f'--{error}') from None
