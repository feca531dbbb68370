"""Other networks, with the data, loop, metrics and tables of AOT-POT: `train.py --network UNet`.

A network is made of a ModelConfig and maps u (B, T, *space, C) to the next frame (B, *space, C),
whatever the condition of AOTPOT.forward. To add one, write its class and a line of BASELINES.
"""
import math

import torch
from torch import nn

from aotpot import at_least_fp32, no_autocast
from configs import InputError, ModelConfig


class UNet(nn.Module):
    """Ronneberger et al. 2015, with GroupNorm, on any grid.

    It halves the grid min(depth, 4) times, with D channels on the coarsest level and half as many
    on each finer one.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        conv = nn.Conv2d if config.dims == 2 else nn.Conv3d
        pool = nn.MaxPool2d if config.dims == 2 else nn.MaxPool3d
        C = config.channels
        halvings = min(config.depth, 4)
        widths = [max(1, config.width >> level) for level in range(halvings, -1, -1)]

        def level(inputs, width):
            layers = []
            for n in (inputs, width):
                layers.append(conv(n, width, 3, padding=1, bias=False))
                layers.append(nn.GroupNorm(math.gcd(8, width), width))
                layers.append(nn.GELU())
            return nn.Sequential(*layers)
        inputs = [config.frames * C, *widths]                           # the finest first
        self.down = nn.ModuleList(map(level, inputs, widths))
        self.up = nn.ModuleList(level(n + coarse, n) for n, coarse in zip(widths, widths[1:]))
        self.pool = pool(2, ceil_mode=True)
        self.project = conv(widths[0], C, 1)

    def forward(self, u, condition=None):
        x = self.down[0](u.movedim(-1, 2).flatten(1, 2))                # (B, D / 2^levels, *space)
        fine = []
        for level in self.down[1:]:
            fine.append(x)
            x = level(self.pool(x))
        for level, skip in zip(reversed(self.up), reversed(fine)):
            x = level(torch.cat([nn.functional.interpolate(x, skip.shape[2:]), skip], 1))
        return self.project(x).movedim(1, -1)                           # (B, *space, C)


class FNO(nn.Module):
    """Li et al. 2021, from the package neuraloperator, in fp32: bf16 has no complex numbers.

    It has `depth` Fourier layers of D / 8 channels with the modes of AOT-POT's latent grid.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        try:
            from neuralop.models import FNO as Network
        except ImportError as error:
            raise InputError(f'network FNO: {error}; pip install neuraloperator') from None
        modes = [max(1, min(2 * config.modes, N // config.patch)) for N in config.resolution]
        C = config.channels
        self.network = Network(n_modes=tuple(modes), in_channels=config.frames * C, out_channels=C,
                               hidden_channels=max(1, config.width // 8), n_layers=config.depth)

    def state_dict(self, *args, **options):
        """Without the arguments of its classes, which neuraloperator adds."""
        state = super().state_dict(*args, **options)
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    def forward(self, u, condition=None):
        with no_autocast(u):
            x = at_least_fp32(u).movedim(-1, 2).flatten(1, 2)           # (B, T C, *space)
            return self.network(x).movedim(1, -1)                       # (B, *space, C)


BASELINES = {'UNet': UNet, 'FNO': FNO}          # the values of --network
