"""Processes: shares and sums, alone and under torchrun."""
import pytest
import torch

from runtime import distributed

CPU = torch.device('cpu')


@pytest.mark.parametrize('count, size, world_size', [(10, 3, 1), (10, 3, 4), (2, 5, 3), (0, 4, 2)])
def test_the_batches_of_all_processes_hold_each_index_once(count, size, world_size):
    shares = [distributed.Processes(rank, world_size, CPU).batches(count, size) for rank in range(world_size)]
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(count))
    assert all(1 <= len(batch) <= size for share in shares for batch in share)
    totals = [sum(map(len, share)) for share in shares]
    assert max(totals) - min(totals) <= 1, 'equal shares'


def test_nothing_takes_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', True)           # PyTorch's default, for convolutions
    distributed.setup('cpu')
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
