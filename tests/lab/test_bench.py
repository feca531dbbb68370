"""The benchmark on a small case. No assertion depends on how fast the machine is or how busy."""
import dataclasses
import json
import sys

import pytest

import configs
from lab import bench

# it takes the arguments of MoE-POT's network, but is a single layer
PEER = """
import torch
class MoEPOTNet(torch.nn.Module):
    def __init__(self, img_size, patch_size, mixing_type, in_channels, out_channels, in_timesteps,
                 out_timesteps, n_blocks, embed_dim, out_layer_dim, depth, modes, mlp_ratio, n_cls,
                 normalize, act, time_agg):
        super().__init__()
        self.layer = torch.nn.Linear(in_channels, out_channels)
    def forward(self, x):
        assert x.shape[1:] == (64, 64, 5, 4) and x.dtype == torch.float32
        return self.layer(x[:, :, :, -1:]), None, x.new_tensor(0.3)
"""


@pytest.mark.parametrize('command, kinds', [
    ('step', ['forward', 'train step']), ('latency', ['forward']),
    pytest.param('optimizer', ['optimizer step'], marks=pytest.mark.slow), ('read', ['batch'])])
def test_what_is_compared_takes_turns(command, kinds, tmp_path, monkeypatch, call):
    nano, recipe = configs.SIZES['nano']
    monkeypatch.setitem(configs.SIZES, 'nano', (dataclasses.replace(nano, experts=5), recipe))
    peers = [tmp_path / 'one', tmp_path / 'the other']
    for peer in peers:
        (peer / 'models').mkdir(parents=True)
        (peer / 'models/moepot.py').write_text(f'{PEER}open({str(peer / "taken")!r}, "w")\n')
    flags = '--size', 'nano', '--device', 'cpu', '--batch_size', 2, '--repeats', 1
    flags += ('--peer', 'paper', *peers) if 'forward' in kinds else ()
    code, error, printed = call([command, *flags], bench)
    assert code == 0 and str(peers[1]) not in sys.path, error
    report = json.loads(printed.splitlines()[-1])
    assert [kind for kind in report if isinstance(report[kind], dict)] == kinds
    for rows in map(report.get, kinds):
        assert len(rows) > 1
        if 'aot' in rows:
            assert list(rows) == ['aot', 'plain', 'paper', *map(str, peers)]
            assert all((peer / 'taken').exists() for peer in peers)
        for row in rows.values():
            for other in rows:
                assert row[f'of {other}'] == pytest.approx(row['ms'] / rows[other]['ms'])
