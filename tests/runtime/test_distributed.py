"""Processes: shares and sums, alone and under torchrun."""
import platform
import resource

import pytest
import torch

import configs
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


@pytest.mark.parametrize('dtype, width, has, expected', [
    ('auto', 512, True, 'bf16'), ('auto', 512, False, 'fp32'), ('auto', 0, True, 'fp32'), ('fp32', 512, True, 'fp32'),
    ('bf16', 0, False, 'bf16'), *(('auto', configs.model(size).width, True, 'fp32') for size in ('nano', 'mini'))])
def test_auto_takes_bf16_on_a_processor_that_has_it_if_the_network_is_wide(dtype, width, has, expected, monkeypatch):
    monkeypatch.setattr(distributed, 'has_amx', lambda: has)
    assert distributed.precision(dtype, distributed.Processes(0, 1, CPU), width) == expected


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='needs glibc')
def test_no_step_faults_in_the_pages_of_its_large_tensors_anew():
    sizes = 2 ** 20, 2 ** 22, 2 ** 24, 2 ** 23                          # floats, up to 64 MB
    for size in sizes:
        torch.ones(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in sizes:
        torch.ones(size)                                                # 29,000 pages
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 3000
