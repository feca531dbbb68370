"""The network of a config: that of aotpot.py, the same in less work, or another one."""
import os

from aotpot import AOTPOT
from nets import baselines, fast
from nets.experts import Experts
from runtime import terminal


def build(config, form='fast', device='cpu'):
    """The network of a configs.ModelConfig with fresh weights, on the CPU.

    form: 'fast', nets.fast.Fast, or 'paper', aotpot.AOTPOT; the parameters are the same. Where the two differ on the
    device that the network is for, because somebody has changed an equation, a line says so and the network is AOTPOT.
    Raises InputError as `baselines.build`.
    """
    if config.network != 'aotpot':
        return baselines.build(config)
    difference = fast.difference(config, str(device)) if form == 'fast' else ''
    if difference:
        form = 'paper'
        if os.environ.get('RANK', '0') == '0':
            terminal.warn(f'{difference}: the form of the paper is taken')
    return {'fast': fast.Fast, 'paper': AOTPOT}[form](config, Experts)
