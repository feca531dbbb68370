"""Networks of other blocks than aotpot.py has, as controls: train.py and evaluate.py with them.

    python -m lab.blocks pair --streams 1 ...           train.py with the same flags
    python -m lab.blocks pair --checkpoint RUN/last.pt  evaluate.py with the same flags

pair     one AOT block round mixer and MLP together; with --streams 1 it is DPOT's layer, a norm
         and a gate d
mixer    the AOT block round the mixer alone, App. B.2; round the MLP there is a residual as usual
mlp      the AOT block round the MLP alone
"""
import dataclasses
import sys
from functools import partial

import evaluate
import train
from aotpot import AOTBlock
from nets import fast
from runtime import terminal


class Pair(fast.Fast):
    """nets.fast.Fast with one block round mixer and MLP, which follow each other as in DPOT."""

    def __init__(self, config, experts=None):
        super().__init__(dataclasses.replace(config, inner_skip=True), experts)
        for layer in self.layers:
            del layer.aot2, layer.post1

    def blocks(self):
        def both(layer, x):
            return fast.mlp(layer.mlp, layer.norm2(fast.mix(layer.mixer, x)))
        return [(layer.aot1, layer.norm1, partial(both, layer), layer.post2) for layer in self.layers]


class Alone(fast.Fast):
    """nets.fast.Fast in which the blocks `usual` have a = 1/S, d = 1, T = I."""

    def __init__(self, usual, config, experts=None):
        super().__init__(config, experts)
        for layer in self.layers:
            setattr(layer, usual, AOTBlock(dataclasses.replace(config, ablate='adT')))


BLOCKS = {'pair': Pair, 'mixer': partial(Alone, 'aot2'), 'mlp': partial(Alone, 'aot1')}


def main():
    parser = terminal.Parser(description=__doc__)
    parser.add_argument('block', choices=BLOCKS)
    fast.Fast = BLOCKS[parser.parse_args(sys.argv[1:2]).block]
    fast.disagreement = lambda config: ''                 # aotpot.py has no such blocks
    del sys.argv[1]
    return (evaluate if '--checkpoint' in sys.argv else train).main()


if __name__ == '__main__':
    terminal.cli(main)
