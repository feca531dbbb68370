"""The files of DPOT's and MoE-POT's own code, converted to ours: dict in, dict out."""
import dataclasses
import re

import torch

from configs import InputError, ModelConfig
from nets.build import build

# the names in DPOT's and MoE-POT's code -> ours; 1x1 convolutions lose their two axes of length one
NAMES = {
    'module.': '', 'blocks.': 'layers.', '.filter.': '.mixer.', '.MoE.': '.mlp.',
    'patch_embed.proj.0': 'embed.conv', 'patch_embed.proj.2': 'embed.project',
    'pos_embed': 'embed.position',
    'time_agg_layer.w': 'aggregate.weight', 'time_agg_layer': 'aggregate',
    'scale_feats_mu': 'film.shift', 'scale_feats_sigma': 'film.scale',
    'out_layer.0': 'readout.conv', 'out_layer.2': 'readout.hidden',
    'out_layer.4': 'readout.project',
    'feature_extractor.conv.0': 'features',
    'gating.gate.0': 'router.w1', 'gating.gate.1': 'router.norm1',
    'gating.gate.3.fc.0': 'router.squeeze', 'gating.gate.3.fc.2': 'router.excite',
    'gating.gate.4': 'router.w2', 'gating.gate.5': 'router.norm2', 'gating.gate.7': 'router.w3',
    'gating.temperature': 'router.tau',
}


def convert_dpot(state, args):
    """A checkpoint of ours, with residual='plain', of a file of DPOT or MoE-POT: a dict.

    On latent grids of more than `modes` (32) points a side, which none of DPOT's presets has, the
    networks differ: DPOT drops the negative frequencies.
    state: the state dict of DPOT's DPOTNet or of MoE-POT's MoEPOTNet.
    args: the argparse.Namespace of the run, or None.
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
        # one name, of a stack of all experts
        ours = re.sub(r'(shared_)?experts\.\d+\.conv\.0\.', r'\1', ours)
        if value.shape[2:] == (1, 1) and '.conv.' not in ours:
            value = value.flatten(1)
        if expert:
            experts.setdefault(ours, {})[int(expert[1])] = value
        elif 'cls_head.' not in name:
            weights[ours] = value
    for name, values in experts.items():
        weights[name] = torch.stack([values[e] for e in range(len(values))])   # (E, D, h) or (E, D)
        layer = name.rpartition('.')[0]
        weights.setdefault(f'{layer}.router.tau', torch.tensor(0.5))    # not in their files
    weights['embed.position'] = weights['embed.position'][0]             # (1, D, h, w) -> (D, h, w)
    T, D = weights['aggregate.weight'].shape[:2]
    gamma = weights.get('aggregate.gamma', torch.zeros(D))              # without it: cos 0 = 1
    weights['aggregate.gamma'] = gamma.reshape(D)
    if experts:                                        # MoE-POT takes four of them a sample, always
        E, _, h = weights['layers.0.mlp.weight'].shape
        shared = len(weights['layers.0.mlp.shared_weight'])
        mlp = {'mlp': h, 'experts': E, 'shared': shared, 'top_k': 4}
    else:
        mlp = {'mlp': len(weights['layers.0.mlp.0.weight'])}
    _, inputs, P = weights['embed.conv.weight'].shape[:3]
    layers = {name.split('.')[1] for name in weights if name.startswith('layers.')}
    config = ModelConfig(
        channels=inputs - 3, frames=T, patch=P, width=D, depth=len(layers), residual='plain', **mlp,
        resolution=tuple(P * n for n in weights['embed.position'].shape[1:]),
        heads=weights['layers.0.mixer.w1'].shape[1], modes=getattr(args, 'modes', 32),
        out_width=len(weights['readout.hidden.weight']), normalize='film.shift.weight' in weights)
    with torch.device('meta'):
        model = build(config, 'paper')
    model.load_state_dict(weights, assign=True)     # raises RuntimeError if names or shapes differ
    return {'model': weights, 'config': {'model': dataclasses.asdict(config)}, 'step': 0}
