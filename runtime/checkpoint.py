"""Checkpoints: read, write, take over weights; the files of DPOT's and MoE-POT's own code, converted dict to dict.

A checkpoint of train.py is a dict: 'model', a state dict; 'config', the configs as dicts {'model', 'train', 'run'};
'step'; 'data', as of data.headers; and in last.pt all that a resumption needs.
"""
import argparse
import dataclasses
import json
import re
import warnings
import zipfile
from pathlib import Path

import torch

from configs import InputError, ModelConfig
from nets.build import build
from runtime import files

TRAINED = Path(__file__).parent.parent / 'weights/mini.pt'


def read(path):
    """The dict of a checkpoint of train.py, finetune.py, DPOT or MoE-POT, or of the last.pt in a folder, with its path.

    Only tensors, plain types and argparse.Namespace are unpickled. Raises InputError for anything else.
    """
    path = Path(path, 'last.pt') if Path(path).is_dir() else Path(path)
    if not path.exists():
        raise InputError(f'{path}: there is no such checkpoint')
    try:
        damaged = zipfile.ZipFile(path).testzip() if zipfile.is_zipfile(path) else None     # not those of DPOT
        if damaged:
            raise ValueError(f'the checksum of {damaged} is wrong')
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings(action='ignore'):
            saved = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:      # torch.load has no common class for what can be wrong with a file
        raise InputError(f'{path}: damaged, or more than tensors and plain types ({type(error).__name__})') from None
    try:
        state = saved.get('model', saved)
        if any(name.endswith('patch_embed.proj.0.weight') for name in state):
            saved = convert_dpot(state, saved.get('args'))
        saved = {'data': {}, **saved, 'path': path, 'step': saved['step']}
        ModelConfig(**saved['config']['model'])
        infinite = [name for name, value in saved['model'].items() if not value.isfinite().all()]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f'{path}: not a checkpoint of train.py, DPOT or MoE-POT that this version reads '
                         f'({error!r})') from None
    if infinite:
        raise InputError(f'{path}: the weights {infinite[0]} are not finite')
    return saved


def load(model, saved):
    """Load the weights in a dict of `read`. Raises InputError if the network has other tensors than these."""
    with files.naming(saved['path'], 'not the weights of this network'):
        model.load_state_dict(saved['model'])


def network(saved, form='fast', device='cpu'):
    """The network of a dict of `read` with its weights and its `data`, in evaluation mode. form: of `build`."""
    model = build(ModelConfig(**saved['config']['model']), form, device)
    load(model, saved)
    model.data = saved['data']
    return model.to(device).eval()


def write(saved, path):
    """Write a checkpoint: a process killed at any moment leaves the old file or the new one."""
    with files.replacing(path) as part, open(part, 'wb') as file:
        try:
            torch.save(saved, file)
        except RuntimeError as error:       # PyTorch raises its own error while it handles that of a full disk
            raise error.__context__ if isinstance(error.__context__, OSError) else error


def read_log(path):
    """The lines of a log.jsonl, one dict a step, without a last one that a crash has left incomplete.

    A scoring, {'step', 'valid', 'wall_s'}, joins the line of its step.
    """
    steps = {}
    for text in Path(path).read_text(encoding='utf-8').splitlines(keepends=True):
        if text.endswith('\n'):
            line = json.loads(text)
            steps.setdefault(line['step'], {}).update(line)
    return list(steps.values())


def newest():
    """The last.pt of the run under out/ that has written last, or without any TRAINED."""
    return max(Path('out').glob('*/last.pt'), key=lambda path: path.stat().st_mtime, default=TRAINED)


def name_of(path):
    """The name of a checkpoint: that of its folder if it is a run, such as small of out/small/last.pt, else its own."""
    if re.fullmatch(r'last|best|step\d+', path.stem):
        return path.absolute().parent.name
    return path.stem


def start_from(model, source):
    """Copy the weights in a dict of `read` into a model where they fit. Returns a line on what became of them.

    A position embedding of another grid is interpolated. Embedding and readout stay fresh as a whole if channels, patch
    or dimension differ (paper, parameter-informed setting). The units of solutions are not taken over. Raises
    InputError for the weights of a network with other units.
    """
    state = source['model']
    normalize = source['config']['model'].get('normalize', False)
    if normalize != model.config.normalize:
        words = 'with --normalize; give --normalize' if normalize else 'without --normalize; give --no-normalize'
        raise InputError(f'{source["path"]}: these weights were trained {words}')
    tensors = {name: value for name, value in model.state_dict().items() if name != 'units.solution'}
    resized = []
    fresh = []
    first = 'embed.conv.weight'
    boundary = ('embed.conv.', 'embed.project.', 'readout.')
    other = first in tensors and state[first].shape != tensors[first].shape
    for name, value in tensors.items():
        old = state.get(name, value.new_empty(0))
        if old.shape == value.shape and not (other and name.startswith(boundary)):
            value.copy_(old)
        elif name == 'embed.position' and old.ndim == value.ndim and len(old) == len(value):
            value.copy_(model.embed.resize(old, value.shape[1:]))
            resized.append(name)
        else:
            fresh.append(name)
    loaded = len(tensors) - len(resized) - len(fresh)
    names = dict.fromkeys(re.sub(r'\.\d+', '.*', name) for name in fresh)
    counts = f'{loaded} of {len(state)} tensors loaded, {len(resized)} resized, {len(fresh)} fresh'
    return ' '.join([f'{source["path"]}: {counts}', *names])


def maps_in(path, channels):
    """The tensors of W_in and W_out, for so many channels, in the checkpoint of --channel_maps: {name: tensor}."""
    maps = {name: value for name, value in read(path)['model'].items() if name.startswith(('map_in.', 'map_out.'))}
    if len(maps.get('map_in.bias', ())) != channels:
        raise InputError(f'--channel_maps {path}: this checkpoint has no maps of {channels} channels')
    return maps


# the names in DPOT's and MoE-POT's code -> ours; 1x1 convolutions lose their two axes of length one
NAMES = {'module.': '', 'patch_embed.proj.0': 'embed.conv', 'patch_embed.proj.2': 'embed.project',
         'pos_embed': 'embed.position', 'time_agg_layer.w': 'aggregate.weight', 'time_agg_layer': 'aggregate',
         'scale_feats_mu': 'units.shift', 'scale_feats_sigma': 'units.scale',
         'out_layer.0': 'readout.conv', 'out_layer.2': 'readout.hidden', 'out_layer.4': 'readout.project',
         'blocks.': 'layers.', '.filter.': '.mixer.', '.MoE.': '.mlp.', 'feature_extractor.conv.0': 'features',
         'gating.gate.0': 'router.w1', 'gating.gate.1': 'router.norm1', 'gating.gate.3.fc.0': 'router.squeeze',
         'gating.gate.3.fc.2': 'router.excite', 'gating.gate.4': 'router.w2', 'gating.gate.5': 'router.norm2',
         'gating.gate.7': 'router.w3', 'gating.temperature': 'router.tau', 'running_mean': 'mean',
         'running_var': 'variance'}


def convert_dpot(state, args):
    """The state dict of DPOT's DPOTNet or MoE-POT's MoEPOTNet -> the dict of a checkpoint of ours, residual='plain'.

    args: the argparse.Namespace of the run, or None. Beyond latent grids of `modes` (32) points a side, as in none of
    DPOT's presets, the networks differ: DPOT drops the negative frequencies.
    """
    if getattr(args, 'act', 'gelu') != 'gelu':
        raise InputError(f'it was trained with --act {args.act}; this network has gelu')
    weights = {}
    experts = {}
    for name, value in state.items():
        ours = name
        expert = re.search(r'experts\.(\d+)\.', name)
        for theirs, replacement in NAMES.items():
            ours = ours.replace(theirs, replacement)
        ours = re.sub(r'(shared_)?experts\.\d+\.conv\.0\.', r'\1', ours)       # one name, of a stack of all experts
        if value.shape[2:] == (1, 1) and '.conv.' not in ours:
            value = value.flatten(1)
        if expert:
            experts.setdefault(ours, {})[int(expert[1])] = value
        elif 'cls_head.' not in name and not name.endswith('.num_batches_tracked'):
            weights[ours] = value
    for name, values in experts.items():
        weights[name] = torch.stack([values[e] for e in range(len(values))])            # (E, D, h) or (E, D)
        weights.setdefault(f'{name.rpartition(".")[0]}.router.tau', torch.tensor(0.5))  # not in their files; it ends so
    weights['embed.position'] = weights['embed.position'][0]                            # (1, D, h, w) -> (D, h, w)
    T, D = weights['aggregate.weight'].shape[:2]
    weights['aggregate.gamma'] = weights.get('aggregate.gamma', torch.zeros(D)).reshape(D)      # without it: cos 0 = 1
    if experts:                                                         # MoE-POT takes four of them a sample, always
        E, _, h = weights['layers.0.mlp.weight'].shape
        mlp = {'mlp': h, 'experts': E, 'shared': len(weights['layers.0.mlp.shared_weight']), 'top_k': 4}
    else:
        mlp = {'mlp': len(weights['layers.0.mlp.0.weight'])}
    _, inputs, P = weights['embed.conv.weight'].shape[:3]
    if 'units.shift.weight' in weights:
        weights['units.solution'] = torch.zeros(2, inputs - 3)          # their predictions have the units of the input
    config = ModelConfig(
        channels=inputs - 3, frames=T, resolution=tuple(P * n for n in weights['embed.position'].shape[1:]),
        patch=P, width=D, depth=1 + max(int(name.split('.')[1]) for name in weights if name.startswith('layers.')),
        heads=weights['layers.0.mixer.w1'].shape[1], modes=getattr(args, 'modes', 32), residual='plain',
        out_width=len(weights['readout.hidden.weight']), normalize='units.shift.weight' in weights, **mlp)
    with torch.device('meta'):
        model = build(config, 'paper')
    model.load_state_dict(weights, assign=True)             # raises RuntimeError if names or shapes differ
    return {'model': weights, 'config': {'model': dataclasses.asdict(config)}, 'step': 0}
