"""DPOT's block that is told which dataset a sample is from: a control for gates that find it out.

    python -m lab.oracle --residual plain ...           train.py with the same flags
    python -m lab.oracle --checkpoint RUN/last.pt       evaluate.py with the same flags

Each layer has one gain for each dataset, which multiplies what the layer adds and begins at one.
A sample's dataset is the one with the deviations that the network gets for channels at rest.
"""
import sys

import torch
from torch import nn

import data
import evaluate
import train
from configs import PRETRAINING
from nets import fast
from runtime import terminal


class Oracle(fast.Fast):
    """nets.fast.Fast with residual='plain' and a gain for each layer and dataset of PRETRAINING."""

    def __init__(self, config, experts=fast.Experts):
        super().__init__(config, experts)
        self.gain = nn.Parameter(torch.ones(len(PRETRAINING), config.depth))

    def forward(self, u, scale=None):
        names = list(self.data)
        sizes = [data.scale_of(torch.tensor(self.data[name]['train']['sizes']), u.shape[-1]) for name in names]
        apart = torch.cdist(scale, torch.stack(sizes).to(scale))        # (B, datasets)
        self.rows = [[*PRETRAINING].index(names[k]) for k in apart.argmin(1)]
        return super().forward(u, scale)

    def predict(self, u, units=None):
        gains = self.gain[self.rows]                                    # (B, depth)
        x = self.units(fast.embed(self.embed, self.aggregate, u), units)
        for layer, gain in zip(self.layers, gains.unbind(1)):
            y = fast.mlp(layer.mlp, layer.norm2(fast.mix(layer.mixer, layer.norm1(x))))
            x = x + gain.view(-1, *[1] * (x.ndim - 1)) * y
        return self.readout(x)


def main():
    fast.Fast = Oracle
    fast.disagreement = lambda config, device='cpu': ''                 # aotpot.py has no such gains
    return (evaluate if '--checkpoint' in sys.argv else train).main()


if __name__ == '__main__':
    terminal.cli(main)
