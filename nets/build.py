"""The network of a config: that of aotpot.py, the same in less work, or another one."""
import os

from aotpot import AOTPOT
from configs import InputError
from nets import fast
from nets.baselines import BASELINES
from nets.experts import Experts
from runtime import terminal


def build(config, form='fast', device='cpu'):
    """The network of a configs.ModelConfig with fresh weights, on the CPU.

    form: 'fast', nets.fast.Fast, or 'paper', aotpot.AOTPOT; the parameters are the same. Where the two differ on the
    device that the network is for, because somebody has changed an equation, a line says so and the network is AOTPOT.
    Raises InputError for an unknown network or a missing package.
    """
    if config.network in BASELINES:
        model = BASELINES[config.network](config)
        model.config = config
        return model
    if config.network != 'aotpot':
        raise InputError(f'--network {config.network}: there is none of that name; known: aotpot {" ".join(BASELINES)}')
    difference = fast.difference(config, str(device)) if form == 'fast' else ''
    if difference:
        form = 'paper'
        if os.environ.get('RANK', '0') == '0':
            terminal.warn(f'{difference}: the form of the paper is taken')
    return {'fast': fast.Fast, 'paper': AOTPOT}[form](config, Experts)
