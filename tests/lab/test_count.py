"""What a train step asks of a GPU: the counts that the fast form is made for, and the counter itself."""
import json
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import aotpot
import configs
from lab import bench, count
from nets import kernels

SIZES = pytest.mark.parametrize('size', ['tiny', 'small', 'medium', 'large'])


@SIZES
@pytest.mark.slow
def test_streams_add_at_most_a_quarter_to_the_launches_and_bytes_of_a_step(size):
    aot, plain = (count.train_step(configs.model(size, residual=residual), configs.recipe(size), 20)
                  for residual in ('aot', 'plain'))
    for name in ('launches', 'gb'):
        assert plain[name] < aot[name] <= 1.25 * plain[name], (name, aot, plain)
    assert aot['memory_gb'] > plain['memory_gb'] > 12e-9 * aotpot.parameters(aotpot.AOTPOT(configs.model(size)))


def test_the_norm_the_mappings_and_the_streams_of_a_sublayer_take_three_launches_forward_and_four_backward():
    config, launches = configs.model('tiny', depth=2), []
    with FakeTensorMode(), count.Counter() as counter, count.on_a_gpu(counter.launch):
        blocks = [block for layer in aotpot.AOTPOT(config).layers for block in (
            (layer.aot1, layer.post1, lambda u: u), (layer.aot2, layer.post2, lambda u: u))]
        for n in (2, 3, 4):
            x = torch.zeros(2, 4, 4, config.width, requires_grad=True)
            before = counter.launches
            out = kernels.sublayers(x, blocks[:n], torch.zeros(config.streams))
            middle = counter.launches
            torch.autograd.grad(out, x, out)
            launches.append((middle - before, counter.launches - middle))
    forward, backward = ((c - b, b - a) for a, b, c in zip(*launches, strict=True))
    assert forward == (3, 3) and backward == (4, 4), launches


def test_the_counter_knows_launches_bytes_and_memory():
    with FakeTensorMode(), count.Autocast(), count.Counter() as counter:
        x = torch.zeros(1000)
        assert (counter.launches, counter.bytes, counter.peak) == (1, 4000, 4000)
        y = x.view(10, 100)[:5] + 1                             # a view is no launch
        assert (counter.launches, counter.bytes, counter.peak) == (2, 4000 + 2 * 2000, 6000)
        del x
        y.mul_(2)
        assert (counter.launches, counter.bytes, sum(counter.live.values())) == (3, 10000, 2000)
        with torch.autocast('cpu', torch.bfloat16):
            assert torch.softmax(y.bfloat16(), 0).dtype == torch.float32        # as on CUDA
    sets, counts = count.mixture(20)
    assert sum(counts) == 20 and len(sets) == 12 and {item.space for item in sets} == {(64, 64), (128, 128)}


@pytest.mark.slow
def test_the_command_ends_with_its_counts_as_json(monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['bench', 'count', '--size', 'nano', '--batch_size', '6'])
    bench.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = report['train step']
    assert report['size'] == 'nano' and list(rows) == ['aot', 'plain'] and rows['aot'].keys() == rows['plain'].keys()
    row = SimpleNamespace(**rows['aot'])
    assert row.launches > 500 and row.gb > 0.1 and 0.01 < row.memory_gb < 1 and row.host_ms > 0
