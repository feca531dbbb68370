"""DPOT's block that knows the dataset: which gain a sample gets, and what it multiplies."""
import torch

import configs
from helpers import SMALL
from lab.oracle import Oracle
from nets.fast import Fast


def test_each_sample_gets_the_gains_of_its_own_dataset():
    config = configs.model('nano', **{**SMALL, 'normalize': True, 'residual': 'plain', 'channels': 2})
    oracle = Oracle(config).double()
    sizes = {'swe_pdb': [[1.0], [0.1]], 'dr_pdb': [[1.0, 1.0], [0.1, 0.2]]}
    oracle.data = {name: {'train': {'sizes': value}} for name, value in sizes.items()}
    plain = Fast(config).double()
    plain.load_state_dict(oracle.state_dict(), strict=False)
    T = config.frames
    u = torch.randn(2, T, *config.resolution, 2, dtype=torch.float64)
    scale = torch.tensor([[0.1, 0.2], [0.1, 0.0]], dtype=torch.float64)         # of dr_pdb and of swe_pdb
    torch.testing.assert_close(oracle(u, scale), plain(u, scale))               # all gains are one
    oracle.gain.data[[*configs.PRETRAINING].index('swe_pdb')] = 0.0
    without_layers = Fast(config).double()
    without_layers.load_state_dict(plain.state_dict())
    without_layers.layers = torch.nn.ModuleList()
    torch.testing.assert_close(oracle(u, scale)[0], plain(u, scale)[0])
    torch.testing.assert_close(oracle(u, scale)[1], without_layers(u, scale)[1])
