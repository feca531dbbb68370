"""Checkpoints: read, write, take over weights; the files of DPOT's and MoE-POT's own code, converted dict to dict.

A checkpoint of train.py is a dict: 'model', a state dict; 'config', the configs as dicts {'model', 'train', 'run'};
'step'; and in last.pt all that a resumption needs. Nothing but tensors, plain types and argparse.Namespace, which
these files hold, is ever unpickled.
"""
import argparse
import dataclasses
import json
import os
import re
from pathlib import Path

import configs
from configs import InputError, ModelConfig

import torch

import nets
from aotpot import AOTPOT
from runtime import terminal
from runtime.terminal import replacing

PARTS = {'model': ModelConfig, 'train': configs.TrainConfig, 'run': configs.RunConfig,
         'finetune': configs.FinetuneConfig}
RESERVED = '', 'persistence', 'truth', 'weights'    # folders that lend no name: rows of tables, and that of TRAINED
TRAINED = Path(__file__).parent.parent / 'weights/mini.pt'


# ------------------------------------------------------------------------------------------------ files

def locate(path):
    """The path of a checkpoint: `path`, or if it is the folder of a run its last.pt, or without one its best.pt.

    Raises InputError if the folder has neither.
    """
    if not os.path.isdir(path):
        return Path(path)
    for name in ('last.pt', 'best.pt'):
        if (Path(path) / name).exists():
            return Path(path) / name
    raise InputError(f'{path}: this folder has neither a last.pt nor a best.pt')


def read(path):
    """The dict of a checkpoint written by train.py or finetune.py, on the CPU, with its 'path' as of `locate`.

    A checkpoint of DPOT's or MoE-POT's own code is converted to one with residual='plain', see `convert_dpot`. One of
    another version may have a config with more or fewer fields: those that are unknown are dropped, and those of the
    model that are missing keep their defaults, each with a warning.
    Raises InputError if the file is missing, broken or of another kind, or if a field has an impossible value.
    """
    path = locate(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            saved = torch.load(path, map_location='cpu', weights_only=True)
    except FileNotFoundError:
        raise InputError(f'{path}: there is no such checkpoint') from None
    except Exception as error:      # torch.load has no common class for what can be wrong with a file
        wanted = re.search(r'GLOBAL (\S+)', str(error))
        why = f'it wants to load {wanted[1]}, which could run code' if wanted else type(error).__name__
        raise InputError(f'{path}: this is not a readable checkpoint ({why})') from None
    state = saved.get('model', saved) if isinstance(saved, dict) else {}
    if isinstance(state, dict) and any(str(name).endswith('patch_embed.proj.0.weight') for name in state):
        return {**convert_dpot(state, saved.get('args'), path), 'path': path}
    if not isinstance(saved, dict) or not {'model', 'config', 'step'} <= set(saved):
        raise InputError(f"{path}: this is not a checkpoint of train.py, which holds 'model', 'config' and 'step'")
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise InputError(f"{path}: its 'model' is not a state dict, names with their tensors")
    if not isinstance(saved['step'], int) or saved['step'] < 0:
        raise InputError(f"{path}: its 'step' is {saved['step']!r} instead of a number of steps")
    return {**saved, 'config': known_fields(saved['config'], path), 'path': path}


def known_fields(config, path):
    """The 'config' of a checkpoint without what this version does not know; see `read`."""
    if not isinstance(config, dict) or 'model' not in config:
        raise InputError(f"{path}: its 'config' lacks 'model', the fields of a ModelConfig")
    kept = dict(config)
    for part in (part for part in PARTS if part in config):
        fields = {field.name: field.default for field in dataclasses.fields(PARTS[part])}
        if not isinstance(config[part], dict):
            raise InputError(f"{path}: its config of '{part}' is a {type(config[part]).__name__} instead of a dict")
        kept[part] = {name: value for name, value in config[part].items() if name in fields}
        missing = [f'{name} ({fields[name]})' for name in fields if part == 'model' and name not in kept[part]]
        unknown = [str(name) for name in config[part] if name not in fields]
        for names, words in ((unknown, 'has fields that are unknown here and ignored'),
                             (missing, 'lacks fields, whose defaults are taken')):
            if names:
                terminal.warn(f"{path}: its config of '{part}' {words}: {', '.join(names)}")
        try:
            PARTS[part](**kept[part])
        except InputError as error:
            raise InputError(f'{path}: {error}') from None
    return kept


def model_config(saved, network=''):
    """The ModelConfig in a dict of `read`, whose network is ours, one of nets/baselines.py, or named by `network`.

    network: a name MODULE:CLASS, or several. A checkpoint is data, and must not choose by itself which code is run.
    Raises InputError if it names another network.
    """
    config = ModelConfig(**saved['config']['model'])
    given = [network] if isinstance(network, str) else network
    if config.network != 'aotpot' and not config.network.startswith('baselines:') and config.network not in given:
        raise InputError(f'{saved["path"]}: its network is {config.network}, whose code is run only if you name it: '
                         f'give --network {config.network} if you trust that code')
    return config


def alike(found, wanted):
    """Whether a value of a checkpoint has the form of `wanted`: a number, a tensor's shape and type, or their nests.

    `wanted` may also be a type. A dict may have more keys.
    """
    if isinstance(wanted, type):
        return isinstance(found, wanted)
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(key in found and alike(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(alike, found, wanted))
    return isinstance(found, (int, float))


def check_form(saved, wanted, path):
    """Raise InputError for the first entry of a checkpoint that is not `alike` that of the dict `wanted`.

    Also if a random generator does not take the entry 'rng' as its state.
    """
    for name, value in wanted.items():
        try:
            fits = alike(saved.get(name), value) and (name != 'rng' or torch.Generator().set_state(saved[name]))
        except RuntimeError:
            fits = False
        if not fits:
            raise InputError(f"{path}: its '{name}' is not what a run saves, so the run cannot be resumed from it; use "
                             f"--init_from to start another one from its weights")


def weights_for(model, saved):
    """The state dict in a dict of `read` for a network, which may be on the device 'meta'.

    Tensors that the network does not have are left out, with a warning. Raises InputError for one that is missing or
    has another shape.
    """
    own, state, path = model.state_dict(), saved['model'], saved.get('path', 'the checkpoint')
    for name, value in own.items():
        if name not in state:
            raise InputError(f'{path}: the tensor {name} of the network is missing')
        if state[name].shape != value.shape:
            raise InputError(f'{path}: {name} has the shape {tuple(state[name].shape)}, but by the config of the '
                             f'network {tuple(value.shape)}')
    unknown = state.keys() - own.keys()
    if unknown:
        terminal.warn(f'{path}: it has tensors that the network ignores: {", ".join(sorted(map(str, unknown)))}')
    return {name: state[name] for name in own}


def network(saved, form='fast', name=''):
    """The network of a dict of `read` with its weights, in evaluation mode.

    form: of `nets.build`. name: MODULE:CLASS, or several, whose code may be imported if the checkpoint names it, see
    `model_config`. Raises InputError as these, and if the weights do not fit the config.
    """
    model = nets.build(model_config(saved, name), form)
    model.load_state_dict(weights_for(model, saved))
    return model.eval()


def write(saved, path):
    """Write a checkpoint: a process killed at any moment leaves the old file or the new one.

    Raises InputError if the disk is full or it cannot be written for another reason; the old file stays.
    """
    with replacing(path) as part, open(part, 'wb') as file:
        try:
            torch.save(saved, file)
        except RuntimeError as error:       # PyTorch raises its own error while it handles that of the file
            raise error.__context__ if isinstance(error.__context__, OSError) else error


def read_log(path):
    """The lines of a log.jsonl, one dict each, but for a last one that a crash has left incomplete.

    Raises InputError if another line is not one of train.py.
    """
    lines, found = path.read_text(errors='replace').splitlines(), []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
            found[-1]['step']
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                return found[:number - 1]
            raise InputError(f'{path}: line {number} is not one of a log of train.py') from None
    return found


def newest():
    """The path of the checkpoint under out/ that was written last, or without any that of the trained model TRAINED.

    Raises InputError if there is neither.
    """
    found = sorted(Path('out').glob('*/*.pt'), key=lambda path: path.stat().st_mtime) or [TRAINED]
    if not found[-1].exists():
        raise InputError('--checkpoint: none given and no out/*/*.pt here; run: python train.py')
    return found[-1]


def pack(path, to):
    """Write the weights of the checkpoint at `path` into the file `to`, in 16 bits, a tenth of the size of a last.pt.

    Vectors stay as they are: they are small, and gamma, which goes up to 2^10, would not give the same cos gamma t.
    Raises InputError as `read` and `write`.
    """
    saved = read(path)
    weights = {name: value.half() if value.is_floating_point() and value.ndim > 1 else value
               for name, value in saved['model'].items()}
    known = dataclasses.asdict(ModelConfig(**saved['config']['model']))         # with the fields that are newer than it
    write({'model': weights, 'step': saved['step'], 'config': {**saved['config'], 'model': known}}, to)


def short_names(paths):
    """A short and unique name for each path: its folder, else folder/stem, else the whole path.

    A folder does not lend its name if that is RESERVED. Raises InputError if a path is given twice.
    """
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f'--checkpoint {path}: given twice')
    folders = [path.absolute().parent.name for path in paths]
    stems = [f'{folder}/{path.stem}' for folder, path in zip(folders, paths)]
    return [folder if folders.count(folder) == 1 and folder not in RESERVED else
            stem if stems.count(stem) == 1 else str(path) for folder, stem, path in zip(folders, stems, paths)]


# ------------------------------------------------------------------------------------------------ other weights

def initialise(model, state):
    """Copy the weights of a state dict into the model where they fit: (loaded, resized, fresh), three lists of names.

    A position embedding of another grid is interpolated. What is absent or has another shape stays fresh. Embedding and
    readout stay fresh as a whole if channels, patch or dimension differ (paper, parameter-informed setting).
    """
    own, lists = model.state_dict(), ([], [], [])
    boundary, first = ('embed.conv.', 'embed.project.', 'readout.'), 'embed.conv.weight'
    other = first in own and state[first].shape != own[first].shape
    for name, value in own.items():
        old = state.get(name, value.new_empty(0))
        if other and name.startswith(boundary):
            lists[2].append(name)
        elif old.shape == value.shape:
            value.copy_(old)
            lists[0].append(name)
        elif name == 'embed.position' and old.ndim == value.ndim and len(old) == len(value):
            value.copy_(model.embed.resize(old, value.shape[1:]))
            lists[1].append(name)
        else:
            lists[2].append(name)
    return lists


def channel_maps(path, channels):
    """The channel maps in a checkpoint, {name: tensor}. Raises InputError if it has none for so many field channels."""
    found = {name: value for name, value in read(path)['model'].items() if name.startswith(('map_in.', 'map_out.'))}
    if not found or len(found['map_in.bias']) != channels:
        raise InputError(f'--channel_maps {path}: this checkpoint has no maps of {channels} channels; '
                         f'train.py --channel_maps learned makes one')
    return found


# ------------------------------------------------------------------------------------------------ DPOT's and MoE-POT's

# the name of a module or parameter in DPOT's code -> ours; 1x1 convolutions lose their two axes of length one
DPOT_NAMES = {'patch_embed.proj.0': 'embed.conv', 'patch_embed.proj.2': 'embed.project', 'pos_embed': 'embed.position',
              'time_agg_layer.w': 'aggregate.weight', 'time_agg_layer.gamma': 'aggregate.gamma',
              'scale_feats_mu': 'units.shift', 'scale_feats_sigma': 'units.scale',
              'out_layer.0': 'readout.conv', 'out_layer.2': 'readout.hidden', 'out_layer.4': 'readout.project'}
DPOT_LAYER = {'norm1': 'norm1', 'norm2': 'norm2', 'filter': 'mixer', 'mlp': 'mlp'}
MOE_LAYER = {'feature_extractor.conv.0': 'features', 'gating.gate.0': 'router.w1', 'gating.gate.1': 'router.norm1',
             'gating.gate.3.fc.0': 'router.squeeze', 'gating.gate.3.fc.2': 'router.excite',
             'gating.gate.4': 'router.w2', 'gating.gate.5': 'router.norm2', 'gating.gate.7': 'router.w3'}
MOE_NORM = {'running_mean': 'mean', 'running_var': 'variance'}
POINTWISE = ('embed.project.weight', 'readout.hidden.weight', 'readout.project.weight', 'mlp.0.weight', 'mlp.2.weight',
             'features.weight', 'w1.weight', 'w2.weight', 'w3.weight', 'squeeze.weight', 'excite.weight')


def our_name(name):
    """The name of a tensor in the state dict of DPOT or MoE-POT -> that in ours, which for all experts is one.

    Raises KeyError if the network has no such tensor.
    """
    module, _, kind = name.rpartition('.')
    if name in DPOT_NAMES:
        return DPOT_NAMES[name]
    if module in DPOT_NAMES:
        return f'{DPOT_NAMES[module]}.{kind}'
    blocks, i, part, *rest = name.split('.') if name.startswith('blocks.') else (name, '', '')
    if part == 'MoE':
        if rest[0].endswith('experts'):                                 # experts.3.conv.0.weight, shared_experts....
            return f'layers.{i}.mlp.{"shared_" * rest[0].startswith("shared")}{kind}'
        if kind == 'temperature':                                       # not in the files of the published code
            return f'layers.{i}.mlp.router.tau'
        return f'layers.{i}.mlp.{MOE_LAYER[".".join(rest[:-1])]}.{MOE_NORM.get(kind, kind)}'
    if part not in DPOT_LAYER:
        raise KeyError(name)
    return '.'.join(['layers', i, DPOT_LAYER[part], *rest])


def convert_dpot(state, args, path):
    """The state dict of DPOT's DPOTNet or MoE-POT's MoEPOTNet -> the dict of a checkpoint of ours, residual='plain'.

    The sizes are read off the weights. The two networks are equal where the latent grid has at most `modes` (32) points
    a side, as in all of DPOT's presets; beyond that, DPOT drops the negative ones of the kept frequencies. Its
    classification head is left out.
    MoE-POT's files lack the temperature of its routers, which training has lowered to 1/2 in all but its first steps.
    args: the argparse.Namespace of the run, or None. Raises InputError for what is not this network.
    """
    state = {name.removeprefix('module.'): value for name, value in state.items()}
    if getattr(args, 'act', 'gelu') != 'gelu':
        raise InputError(f'{path}: DPOT was trained with --act {args.act}; this network has gelu')
    try:
        weights, experts = {}, {}
        for name, value in state.items():
            if 'experts.' in name:                                      # blocks.0.MoE.experts.3.conv.0.weight
                experts.setdefault(our_name(name), {})[int(name.split('.')[4])] = value.reshape(value.shape[:2])
            elif not name.startswith('cls_head.') and not name.endswith('.num_batches_tracked'):
                weights[our_name(name)] = value
        for name, values in experts.items():
            weights[name] = torch.stack([values[e] for e in range(len(values))])        # (E, D, h) or (E, D)
            weights.setdefault('.'.join([*name.split('.')[:3], 'router.tau']), torch.tensor(0.5))
        weights['embed.position'] = state['pos_embed'][0]                               # (1, D, h, w) -> (D, h, w)
        T, D = weights['aggregate.weight'].shape[:2]
        gamma = weights.get('aggregate.gamma', torch.zeros(D))                          # without it: cos 0 = 1
        weights['aggregate.gamma'] = gamma.reshape(D)
        for name in weights:
            if name.endswith(POINTWISE):
                weights[name] = weights[name].flatten(1)
        hidden, inputs, P = weights['embed.conv.weight'].shape[:3]
        depth = 1 + max(int(name.split('.')[1]) for name in weights if name.startswith('layers.'))
        config = ModelConfig(
            channels=inputs - 3, frames=T, resolution=tuple(P * n for n in weights['embed.position'].shape[1:]),
            patch=P, width=D, depth=depth, **sizes_of_mlp(weights),
            heads=weights['layers.0.mixer.w1'].shape[1], modes=getattr(args, 'modes', 32),
            out_width=len(weights['readout.hidden.weight']), residual='plain',
            normalize='units.shift.weight' in weights)
        with torch.device('meta'):
            expected = AOTPOT(config).state_dict()
        others = {(name, value.shape) for name, value in expected.items()} ^ {
            (name, value.shape) for name, value in weights.items()}
        if others:
            raise KeyError(*sorted({name for name, _ in others}))
    except (KeyError, RuntimeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f'{path}: this looks like DPOT but is not the network of its models/dpot.py, '
                         f'nor that of MoE-POT ({error})') from None
    return {'model': weights, 'config': {'model': dataclasses.asdict(config)}, 'step': 0}


def sizes_of_mlp(weights):
    """The sizes of the MLP, or of the experts, as fields of the config. MoE-POT takes four experts a sample, always."""
    if 'layers.0.mlp.0.weight' in weights:
        return {'mlp': len(weights['layers.0.mlp.0.weight'])}
    E, _, h = weights['layers.0.mlp.weight'].shape
    return {'mlp': h, 'experts': E, 'shared': len(weights['layers.0.mlp.shared_weight']), 'top_k': 4}
