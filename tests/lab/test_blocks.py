"""The blocks of the controls, beside networks of aotpot.py that compute the same."""
import pytest
import torch

import configs
from aotpot import AOTPOT
from helpers import SMALL
from lab.blocks import BLOCKS


def randomized(network):
    """A network in fp64, with all its weights changed."""
    torch.manual_seed(0)
    network = network.double()
    for parameter in network.parameters():
        parameter.data.add_(torch.rand_like(parameter), alpha=0.3)
    return network


def test_a_block_round_both_sublayers_is_dpots_layer_with_a_norm_and_a_gate():
    fields = {**SMALL, 'normalize': True, 'channels': 2}
    pair = randomized(BLOCKS['pair'](configs.model('nano', **{**fields, 'streams': 1})))
    for layer, d in zip(pair.layers, (0.5, 1.5)):
        layer.aot1.mappings.alpha_d.data.zero_()
        layer.aot1.mappings.b_d.data.fill_(torch.tensor(d / (2 - d)).log())             # d = 2 sigmoid(b_d)
    plain = AOTPOT(configs.model('nano', **fields, residual='plain', norm='sandwich')).double()
    plain.load_state_dict(pair.state_dict(), strict=False)
    for layer, d in zip(plain.layers, (0.5, 1.5)):
        layer.post2.weight.data *= d
        layer.post2.bias.data *= d
    u = torch.randn(2, SMALL['frames'], *plain.config.resolution, 2, dtype=torch.float64)
    torch.testing.assert_close(pair(u), plain(u))


@pytest.mark.parametrize('block, usual', [('mixer', 'aot2'), ('mlp', 'aot1')])
def test_round_the_other_sublayer_the_streams_have_an_ordinary_residual(block, usual):
    config = configs.model('nano', **{**SMALL, 'normalize': True, 'channels': 2})
    alone = randomized(BLOCKS[block](config))
    everywhere = randomized(AOTPOT(config))
    everywhere.load_state_dict(alone.state_dict(), strict=False)
    for layer in everywhere.layers:
        mappings = getattr(layer, usual).mappings
        for parameter in mappings.parameters():
            parameter.data.zero_()                                                      # a = 1/S and d = 1
        mappings.b_T.data = 1e4 * (torch.eye(config.streams, dtype=torch.float64) - 1)  # T = I
    u = torch.randn(2, SMALL['frames'], *config.resolution, 2, dtype=torch.float64)
    torch.testing.assert_close(alone(u), everywhere(u))
