"""Every benchmark on a small case. No assertion depends on how fast the machine is or how busy."""
import dataclasses
import json
import sys

import pytest

import configs
from lab import bench

NANO = '--size', 'nano', '--device', 'cpu'

# it takes the arguments of DPOT's DPOTNet, but is a single layer
PEER = """
import torch
class DPOTNet(torch.nn.Module):
    def __init__(self, img_size, patch_size, mixing_type, in_channels, out_channels, in_timesteps, out_timesteps,
                 n_blocks, embed_dim, out_layer_dim, depth, modes, mlp_ratio, n_cls, normalize, act, time_agg):
        super().__init__()
        assert (img_size, patch_size, in_timesteps, embed_dim, mlp_ratio, depth) == (64, 4, 5, 64, 2.0, 3)
        self.layer = torch.nn.Linear(in_channels, out_channels)
    def forward(self, x):
        assert x.shape[1:] == (64, 64, 5, 4) and x.dtype == torch.float32
        return self.layer(x[:, :, :, -1:]), None, x.new_tensor(0.3)
"""


@pytest.mark.parametrize('command, experts', [('step', 0), ('step', 5), ('latency', 0)])
def test_aot_plain_and_the_peer_are_compared(command, experts, tmp_path, monkeypatch, call):
    nano, recipe = configs.SIZES['nano']
    monkeypatch.setitem(configs.SIZES, 'nano', (dataclasses.replace(nano, experts=experts), recipe))
    (tmp_path / 'models').mkdir()
    name = 'moepot' if experts else 'dpot'
    (tmp_path / f'models/{name}.py').write_text(PEER.replace('DPOTNet', 'MoEPOTNet') if experts else PEER)
    code, error, printed = call([command, *NANO, '--peer', tmp_path, '--batch_size', 2, '--repeats', 1], bench)
    for module in ('models', f'models.{name}'):
        sys.modules.pop(module, None)           # a real checkout has modules of the same names
    assert code == 0 and str(tmp_path) not in sys.path, error
    report = json.loads(printed.splitlines()[-1])
    assert report['dtype'] == 'fp32'
    for kind in ('forward', 'train step') if command == 'step' else ('forward',):
        rows = report[kind]
        assert list(rows) == ['aot', 'plain', 'peer'] and all(row['ms'] > 0 for row in rows.values())
        for row in rows.values():
            for other in ('plain', 'peer'):
                assert row[f'of {other}'] == pytest.approx(row['ms'] / rows[other]['ms'])
