"""Networks of other blocks than aotpot.py has, as controls: train.py and evaluate.py with them.

    python -m lab.blocks pair --streams 1 ...           train.py with the same flags
    python -m lab.blocks pair --checkpoint RUN/last.pt  evaluate.py with the same flags

oracle   --residual plain, told which dataset a sample is from: it has a gain for each of them
pair     one AOT block round mixer and MLP together; with --streams 1 it is DPOT's layer, a norm
         and a gate d
mixer    the AOT block round the mixer alone, App. B.2; round the MLP there is a residual as usual
mlp      the AOT block round the MLP alone
"""
import dataclasses
import sys
from functools import partial

import torch
from torch import nn

import data
import evaluate
import train
from aotpot import AOTBlock
from configs import PRETRAINING
from nets import fast
from runtime import terminal


class Oracle(fast.Fast):
    """nets.fast.Fast with residual='plain' and a gain for each layer and dataset of PRETRAINING.

    A gain multiplies what the layer adds and begins at one. A sample's dataset is the one with the
    deviations that the network gets for channels at rest.
    """

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


class Pair(fast.Fast):
    """nets.fast.Fast with one block round mixer and MLP, which follow each other as in DPOT."""

    def __init__(self, config, experts=fast.Experts):
        super().__init__(dataclasses.replace(config, inner_skip=True), experts)
        for layer in self.layers:
            del layer.aot2, layer.post1

    def blocks(self):
        return [(layer.aot1, layer.norm1, partial(self.both, layer), layer.post2) for layer in self.layers]

    @staticmethod
    def both(layer, x):
        return fast.mlp(layer.mlp, layer.norm2(fast.mix(layer.mixer, x)))


class MixerAlone(fast.Fast):
    """nets.fast.Fast with an AOT block round the mixer; that of the MLP has a = 1/S, d = 1, T = I."""
    usual = 'aot2'

    def __init__(self, config, experts=fast.Experts):
        super().__init__(config, experts)
        for layer in self.layers:
            setattr(layer, self.usual, AOTBlock(dataclasses.replace(config, ablate='adT')))


class MLPAlone(MixerAlone):
    """The same with an AOT block round the MLP."""
    usual = 'aot1'


BLOCKS = {'oracle': Oracle, 'pair': Pair, 'mixer': MixerAlone, 'mlp': MLPAlone}


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('block', choices=BLOCKS)
    fast.Fast = BLOCKS[parser.parse_args(sys.argv[1:2]).block]
    fast.disagreement = lambda config, device='cpu': ''                 # aotpot.py has no such blocks
    del sys.argv[1]
    return (evaluate if '--checkpoint' in sys.argv else train).main()


if __name__ == '__main__':
    terminal.cli(main)
