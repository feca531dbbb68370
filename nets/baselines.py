"""Other networks beside AOT-POT, with the same data, loop, metrics and tables: `train.py --network baselines:FNO`.

    python train.py --network baselines:UNet --datasets swe_pdb         ours, below
    python train.py --network baselines:FNO                             pip install neuraloperator
    python train.py --network mine:Net                                  the class Net of mine.py here

A network is anything that is made of a ModelConfig and maps u (B, T, *space, C) to the next frame (B, *space, C). These
take their sizes from the fields that they share with AOT-POT, so that a preset gives them about as many parameters
(docs/networks.md).
"""
import importlib
import importlib.util
import math
import os
import sys
import traceback

import torch
from torch import nn

from aotpot import at_least_fp32, no_autocast
from configs import InputError, ModelConfig, nearest

# ------------------------------------------------------------------------------------------------ by name

def build(config, form='fast'):
    """The network config.network, 'MODULE:CLASS', made of the config, which it keeps as its attribute `config`."""
    model = find(config.network, form)(config)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f'--network {config.network}: it has no parameters to train')
    model.config = config
    model.register_forward_hook(check_output)
    return model


def find(network, form='fast'):
    """What 'MODULE:CLASS' names: one of BASELINES, or a class of a module in the working directory or installed."""
    if form != 'fast':
        raise InputError(f'--form {form} is for AOT-POT; the network {network} has one form only')
    module, name = network.split(':')
    if module == 'baselines':
        if name not in BASELINES:
            raise InputError(f'--network {network}: there is no such baseline{nearest(name, BASELINES)}')
        if package := lacking(network):
            raise InputError(f'--network {network} needs another package: pip install {package}')
        return BASELINES[name][0]
    if os.getcwd() not in sys.path:                     # last, so that no file there stands in for one of ours
        sys.path.append(os.getcwd())
    try:
        imported = importlib.import_module(module)
    except Exception as error:                          # whatever code of the user raises
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        raise InputError(
            f'--network {network}: importing {module}, from {module}.py in the working directory or a package, ends in '
            f'{type(error).__name__}: {error} ({frame.f_code.co_filename}:{line})') from None
    made = getattr(imported, name, None)
    if not isinstance(made, type) or not issubclass(made, nn.Module):
        raise InputError(f'--network {network}: {getattr(imported, "__file__", module)} has no torch.nn.Module {name}')
    return made


def lacking(network):
    """What to give to pip install for 'baselines:NAME', or '' if nothing is missing."""
    _, package, install = BASELINES[network.split(':')[1]]
    return install if package and not importlib.util.find_spec(package) else ''


def check_output(model, inputs, output):
    """A forward hook: raise InputError if the output is not one frame of the input, (B, *space, C)."""
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    u, = inputs
    if shape != u[:, -1].shape:
        raise InputError(f'--network {model.config.network}: its output has the shape {shape}; a frame of the input '
                         f'{tuple(u.shape)} is {tuple(u[:, -1].shape)}')


class ChannelsFirst(nn.Module):
    """A network (B, T C, *space) -> (B, C, *space) as one of frames, in fp32: no complex numbers have 16 bits."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def state_dict(self, *args, **options):
        """Without the arguments of its classes, which neuraloperator adds."""
        return {name: x for name, x in super().state_dict(*args, **options).items() if isinstance(x, torch.Tensor)}

    def forward(self, u):
        with no_autocast(u):
            x = at_least_fp32(u).movedim(-1, 2).flatten(1, 2)                           # (B, T C, *space)
            return self.network(x).movedim(1, -1)                                       # (B, *space, C)


# ------------------------------------------------------------------------------------------------ a U-Net

class UNet(nn.Module):
    """Ronneberger et al. 2015, with GroupNorm: u (B, T, *space, C) -> (B, *space, C), on any grid.

    It halves the grid min(depth, 4) times, with D channels on the coarsest level and half as many on each finer one.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        conv, pool = (nn.Conv2d, nn.MaxPool2d) if config.dims == 2 else (nn.Conv3d, nn.MaxPool3d)
        C = config.channels
        halvings = min(config.depth, 4)
        widths = [max(1, config.width >> level) for level in range(halvings, -1, -1)]           # finest first

        def level(inputs, width):
            layers = []
            for n in (inputs, width):
                layers += [conv(n, width, 3, padding=1, bias=False), nn.GroupNorm(math.gcd(8, width), width), nn.GELU()]
            return nn.Sequential(*layers)
        self.down = nn.ModuleList(level(inputs, width) for inputs, width in zip([config.frames * C, *widths], widths))
        self.up = nn.ModuleList(level(coarse + fine, fine) for fine, coarse in zip(widths, widths[1:]))
        self.pool = pool(2, ceil_mode=True)
        self.project = conv(widths[0], C, 1)

    def forward(self, u):
        x = self.down[0](u.movedim(-1, 2).flatten(1, 2))                                # (B, D / 2^levels, *space)
        fine = []
        for level in self.down[1:]:
            fine.append(x)
            x = level(self.pool(x))
        for level, skip in zip(reversed(self.up), reversed(fine)):
            x = level(torch.cat([nn.functional.interpolate(x, skip.shape[2:]), skip], 1))
        return self.project(x).movedim(1, -1)                                           # (B, *space, C)


# ------------------------------------------------------------------------------------------------ of another package

def FNO(config):
    """Li et al. 2021: `depth` Fourier layers of D / 8 channels with the modes of AOT-POT's latent grid."""
    from neuralop.models import FNO as Network
    modes = tuple(max(1, min(2 * config.modes, N // config.patch)) for N in config.resolution)      # of both signs
    return ChannelsFirst(Network(n_modes=modes, in_channels=config.frames * config.channels,
                                 out_channels=config.channels, hidden_channels=max(1, config.width // 8),
                                 n_layers=config.depth))


# name: (what makes it of a ModelConfig, package that it needs, how to install this)
BASELINES = {'UNet': (UNet, '', ''), 'FNO': (FNO, 'neuralop', 'neuraloperator')}
