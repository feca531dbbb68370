"""Checkpoints: reading, writing, taking over weights; DPOT's own files become ours."""
import argparse
import dataclasses
import os
import re

import torch

from configs import InputError, ModelConfig


def read(path):
    """The dict of a checkpoint written by train.py or finetune.py, on the CPU: 'model', 'config', 'step' and more.

    A checkpoint of DPOT's own code becomes one with residual='plain', see `convert_dpot`. Only tensors, plain types and
    argparse.Namespace, which DPOT's hold, are unpickled. Raises InputError where the file is missing, broken or of
    another kind.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except FileNotFoundError:
        raise InputError(f'{path}: no such checkpoint') from None
    except Exception as error:      # torch.load has no common class for what can be wrong with a file
        wanted = re.search(r'GLOBAL (\S+)', str(error))
        why = f'it wants to load {wanted[1]}, which could run code' if wanted else type(error).__name__
        raise InputError(f'{path}: not a readable checkpoint ({why})') from None
    state = checkpoint.get('model', checkpoint) if isinstance(checkpoint, dict) else {}
    if isinstance(state, dict) and any(name.endswith('patch_embed.proj.0.weight') for name in state):
        return convert_dpot(state, checkpoint.get('args'), path)
    if not isinstance(checkpoint, dict) or not {'model', 'config', 'step'} <= set(checkpoint):
        raise InputError(f"{path}: not a checkpoint of train.py, which holds 'model', 'config' and 'step'")
    return checkpoint


def convert_dpot(state, args, path):
    """The state dict of DPOT's DPOTNet -> the dict of a checkpoint of ours with residual='plain'.

    The sizes are read off the weights. The two networks are equal where the latent grid has at most `modes` (32) points
    a side, as all of DPOT's presets; beyond, DPOT drops the kept frequencies' negatives. Its classification head is
    left out.
    args: the argparse.Namespace of DPOT's run, or None. Raises InputError for what is not this network.
    """
    state = {name.removeprefix('module.'): value for name, value in state.items()}
    if any('experts' in name for name in state):
        raise InputError(f'{path}: a checkpoint of MoE-POT, whose mixture of experts this network does not have')
    if any(name.startswith('scale_feats') for name in state):
        raise InputError(f'{path}: DPOT trained with --normalize 1, which this network does not have')
    if getattr(args, 'act', 'gelu') != 'gelu':
        raise InputError(f'{path}: DPOT trained with --act {args.act}; this network has gelu')
    try:
        E, inputs, P = state['patch_embed.proj.0.weight'].shape[:3]
        T, D = state['time_agg_layer.w'].shape[:2]
        position = state['pos_embed'][0]                                                # (D, h, w)
        depth = 1 + max(int(name.split('.')[1]) for name in state if name.startswith('blocks.'))
        config = ModelConfig(
            channels=inputs - 3, frames=T, resolution=tuple(P * n for n in position.shape[1:]), patch=P, width=D,
            mlp=len(state['blocks.0.mlp.0.weight']), depth=depth, heads=state['blocks.0.filter.w1'].shape[1],
            modes=getattr(args, 'modes', 32), out_width=len(state['out_layer.2.weight']), residual='plain')
        weights = {
            'embed.patch_weight': state['patch_embed.proj.0.weight'].permute(2, 3, 1, 0),
            'embed.patch_bias': state['patch_embed.proj.0.bias'],
            'embed.project.weight': state['patch_embed.proj.2.weight'],
            'embed.project.bias': state['patch_embed.proj.2.bias'],
            'embed.position': position.permute(1, 2, 0),
            'embed.time_weight': state['time_agg_layer.w'],
            'embed.gamma': state.get('time_agg_layer.gamma', torch.zeros(D)),           # 'mlp' aggregation: cos 0 = 1
            'readout.weight': state['out_layer.0.weight'].permute(0, 2, 3, 1),          # (D, O, P, P)
            'readout.bias': state['out_layer.0.bias'],
        }
        weights |= {f'readout.pointwise.{i - 1}.{kind}': state[f'out_layer.{i}.{kind}']
                    for i in (2, 4) for kind in ('weight', 'bias')}
        weights |= {name.replace('.filter.', '.mixer.'): value for name, value in state.items()
                    if name.startswith('blocks.')}
        import aotpot
        with torch.device('meta'):
            own = aotpot.AOTPOT(config).state_dict()
        if set(own) != set(weights):
            raise KeyError(*set(own) ^ set(weights))
        weights = {name: weights[name].reshape(value.shape).contiguous() for name, value in own.items()}
    except (KeyError, RuntimeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f'{path}: looks like DPOT but is not the network of its models/dpot.py ({error})') from None
    return {'model': weights, 'config': {'model': dataclasses.asdict(config)}, 'step': 0}


def write(checkpoint, path):
    """Write beside, fsync and replace: a process killed at any moment leaves the old file or the new one."""
    part = path.with_name(path.name + '.part')
    with open(part, 'wb') as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def initialise(model, state):
    """Copy the weights of a state dict into the model where they fit: (loaded, resized, fresh), three lists of names.

    A position embedding of another grid is interpolated; what is absent or of another shape stays fresh. So do, as a
    whole, embedding and readout where channels, patch or dimension are others (paper, parameter-informed setting).
    """
    import aotpot
    own, lists = model.state_dict(), ([], [], [])
    boundary = ('embed.patch_', 'embed.project.', 'readout.')
    other = state['embed.patch_weight'].shape != own['embed.patch_weight'].shape
    for name, value in own.items():
        old = state.get(name, value.new_empty(0))
        if other and name.startswith(boundary):
            lists[2].append(name)
        elif old.shape == value.shape:
            value.copy_(old)
            lists[0].append(name)
        elif name == 'embed.position' and old.ndim == value.ndim and old.shape[-1] == value.shape[-1]:
            value.copy_(aotpot.interpolate(old, value.shape[:-1]))
            lists[1].append(name)
        else:
            lists[2].append(name)
    return lists
