"""The network of a config: that of aotpot.py, the same in less work, or another one."""
import os
import sys

from torch import nn

from aotpot import AOTPOT, FourierMixer, TemporalAggregation
from configs import InputError
from nets import fast, sinkhorn_kernel  # noqa: F401, whose import gives `sinkhorn` its kernel
from nets.baselines import BASELINES
from nets.experts import Experts


def build(config, form='fast', device='cpu', headers=None):
    """The network of a configs.ModelConfig with fresh weights, on the CPU.

    form: 'fast', nets.fast.Fast, or 'paper', aotpot.AOTPOT; the parameters are the same. If the two
    differ, because somebody has changed an equation, a line says so and the network is AOTPOT.
    device: the one that the network is for, on which the two are compared.
    headers: its attribute `data`, of the training's files, as returned by data.read_headers.
    Raises InputError for an unknown network or a missing package.
    """
    if config.network in BASELINES:
        model = BASELINES[config.network](config)
        model.config = config
    elif config.network == 'aotpot':
        difference = fast.disagreement(config, str(device)) if form == 'fast' else ''
        if difference:
            form = 'paper'
            if os.environ.get('RANK', '0') == '0':
                print(f'warning: {difference}: aotpot.py is taken, which is slower',
                      file=sys.stderr, flush=True)
        model = {'fast': fast.Fast, 'paper': AOTPOT}[form](config, Experts)
    else:
        known = ' '.join(['aotpot', *BASELINES])
        raise InputError(f'network {config.network}: there is none of that name; known: {known}')
    model.data = headers or {}
    return model


def matrices(model):
    """The parameters that nets.muon.Muon takes as matrices, {form: list}, and a list of the rest.

    Matrices are linear layers and convolutions between hidden features, the W_t of Eq. (5), the
    mixers and the experts. The rest are the doors of a network (convolutions to and from patches,
    layers from or to fewer than 16 features), position embeddings, norms, biases and mappings.
    """
    forms = {'matrix': [], 'stack': [], 'complex': []}
    for module in model.modules():
        if isinstance(module, TemporalAggregation):
            forms['stack'].append(module.weight)
        elif isinstance(module, Experts):
            forms['stack'] += [module.weight, module.shared_weight]
        elif isinstance(module, FourierMixer):
            forms['complex'] += [module.w1, module.w2]
        elif isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            strides = getattr(module, 'stride', ())
            if min(module.weight.shape[:2]) >= 16 and set(strides) <= {1}:
                forms['matrix'].append(module.weight)
    taken = {id(parameter) for parameters in forms.values() for parameter in parameters}
    return forms, [parameter for parameter in model.parameters() if id(parameter) not in taken]
