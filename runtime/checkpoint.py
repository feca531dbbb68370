"""Checkpoints: read, write, take over weights.

A checkpoint of train.py is a dict: 'model', a state dict; 'config', the configs as dicts {'model',
'train', 'run'}; 'step'; 'data', {name: data.read_headers}; 'dtype'; in best.pt 'valid', its error;
and what runs.save adds in last.pt.
"""
import argparse
import re
import warnings
import zipfile
from pathlib import Path

import torch

from configs import InputError, ModelConfig
from nets.build import build
from nets.dpot import convert_dpot
from runtime import files

TRAINED = Path(__file__).parent.parent / 'weights/mini.pt'
torch.serialization.add_safe_globals([argparse.Namespace])         # the arguments of DPOT's runs


def not_finite(weights):
    """The name of the first tensor of {name: tensor} with values that are not finite, or None."""
    return next((name for name, value in weights.items() if not value.isfinite().all()), None)


def load_file(path):
    """The dict of a checkpoint of train.py, finetune.py, DPOT or MoE-POT, or of the last.pt in a
    folder, with its path.

    Only tensors, plain types and argparse.Namespace are unpickled; InputError for anything else.
    """
    path = Path(path, 'last.pt') if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise InputError(f'{path}: there is no such checkpoint')
    try:
        damaged = zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip()      # not DPOT's
        if damaged:
            raise ValueError(f'the checksum of {damaged} is wrong')
        with warnings.catch_warnings(action='ignore'):
            saved = torch.load(path, map_location='cpu', weights_only=True)
        state = saved.get('model', saved)
        if any(name.endswith('patch_embed.proj.0.weight') for name in state):
            saved = convert_dpot(state, saved.get('args'))
        ModelConfig(**saved['config']['model'])
        if name := not_finite(saved['model']):
            raise ValueError(f'the weights {name} are not finite')
        return {'data': {}, **saved, 'path': path, 'step': saved['step']}
    except Exception as error:      # torch.load has no common class for what is wrong with a file
        cause = ' '.join(str(error).split())[:200]
        raise InputError(f'{path}: damaged, or no checkpoint of train.py, DPOT or MoE-POT '
                         f'({cause})') from None


def load_weights(model, saved):
    """Load the weights in a dict of `load_file`. Raises InputError for other tensors."""
    with files.naming(saved['path'], 'not the weights of this network', RuntimeError):
        model.load_state_dict(saved['model'])


def load_model(saved, form='fast', device='cpu'):
    """The network of a dict of `load_file`, in evaluation mode. form: that of `build`."""
    model = build(ModelConfig(**saved['config']['model']), form, saved['data'])
    load_weights(model, saved)
    return model.to(device).eval()


def save_file(saved, path):
    """Write a checkpoint: a process killed at any moment leaves the old file or the new one.

    Raises InputError for weights that are not finite.
    """
    if name := not_finite(saved['model']):
        raise InputError(f'{path}: the weights {name} are not finite at step {saved["step"]}, so '
                         f'they are not saved; begin another run with smaller values of --lr, '
                         f'--alpha and --t_init')
    with files.replacing(path) as part, open(part, 'wb') as file:
        try:
            torch.save(saved, file)
        except RuntimeError as error:       # PyTorch's own, while it handles that of a full disk
            raise error.__context__ if isinstance(error.__context__, OSError) else error


def newest():
    """The last.pt of the run under out/ that has written last, or without any TRAINED."""
    runs = Path('out').glob('*/last.pt')
    return max(runs, key=lambda path: path.stat().st_mtime, default=TRAINED)


def name_of(path):
    """The name of a checkpoint: of its folder, such as out/small, or its own."""
    if re.fullmatch(r'last|best|step\d+', path.stem):
        return path.absolute().parent.name
    return path.stem


def start_from(model, source):
    """Copy the weights in a dict of `load_file` into a model where they fit. Returns a line on what
    became of them.

    A position embedding of another grid is interpolated. Embedding and readout stay fresh as a
    whole if channels, patch or dimension differ (paper, parameter-informed setting). InputError:
    another kind of network, weights of dimensionless fields for raw ones, or another --change.
    """
    path = source['path']
    state = source['model']
    before = ModelConfig(**source['config']['model'])
    if before.network != model.config.network:
        raise InputError(f'{path}: the weights of --network {before.network} do not fit '
                         f'{model.config.network}')
    if before.normalize and not model.config.normalize:
        raise InputError(f'{path}: these weights were trained with --normalize; give --normalize')
    if before.change != model.config.change:
        flag = '--change' if before.change else '--no-change'
        raise InputError(f'{path}: these weights were trained with {flag}; give {flag}')
    tensors = model.state_dict()
    first = 'embed.conv.weight'
    other = first in tensors and state[first].shape != tensors[first].shape
    boundary = ('embed.conv.', 'embed.project.', 'readout.') if other else ()
    resized = []
    fresh = []
    for name, value in tensors.items():
        old = state.get(name, value.new_empty(0))
        if old.shape == value.shape and not name.startswith(boundary):
            value.copy_(old)
        elif name == 'embed.position' and old.ndim == value.ndim and len(old) == len(value):
            value.copy_(model.embed.resize(old, value.shape[1:]))
            resized.append(name)
        else:
            fresh.append(name)

    def listed(names):
        return ''.join(dict.fromkeys(re.sub(r'\.\d+', '.*', f' {name}') for name in names))
    loaded = len(tensors) - len(resized) - len(fresh)
    left_out = listed(name for name in state if name not in tensors)
    return (f'{path}: {loaded} of {len(state)} tensors loaded, {len(resized)} resized, '
            f'{len(fresh)} fresh{listed(fresh)}' + (left_out and f' and left out:{left_out}'))


def maps_in(path, channels):
    """{name: tensor} of W_in and W_out in the checkpoint of --channel_maps."""
    state = load_file(path)['model']
    maps = {name: value for name, value in state.items() if name.startswith('map_')}
    if len(maps.get('map_in.bias', ())) != channels:
        raise InputError(f'--channel_maps {path}: there are no maps of {channels} channels in it')
    return maps
