"""Processes: shares and sums, alone and under torchrun."""
import os
import platform
import resource
import subprocess
import sys
import time

import pytest
import torch

import configs
from helpers import free_port
from runtime import distributed

CPU = torch.device('cpu')


@pytest.mark.parametrize('count, size, world_size', [(10, 3, 1), (10, 3, 4), (2, 5, 3), (0, 4, 2)])
def test_the_batches_of_all_processes_hold_each_index_once(count, size, world_size):
    shares = [distributed.Processes(rank, world_size, CPU).batches(count, size) for rank in range(world_size)]
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(count))
    assert all(1 <= len(batch) <= size for share in shares for batch in share)
    totals = [sum(map(len, share)) for share in shares]
    assert max(totals) - min(totals) <= 1, 'equal shares'


@pytest.mark.parametrize('variables, words', [
    (dict(WORLD_SIZE='two'), "WORLD_SIZE in the environment is 'two'; start several processes with torchrun"),
    (dict(WORLD_SIZE=''), "WORLD_SIZE in the environment is ''"),
    (dict(WORLD_SIZE='2'), "RANK in the environment is ''"),
    (dict(WORLD_SIZE='2', RANK='2'), "RANK in the environment is '2'"),
    (dict(WORLD_SIZE='2', RANK='0'), "MASTER_PORT in the environment is ''")])
def test_half_of_what_torchrun_sets_is_named(variables, words, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(configs.InputError, match=words):
        distributed.setup('cpu')


@pytest.mark.parametrize('rank', ['0', '1'])
def test_a_wait_for_a_process_that_does_not_come_can_be_stopped(rank):
    environment = dict(WORLD_SIZE='2', RANK=rank, MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()))
    code = 'from runtime import distributed, terminal; print(flush=True); terminal.cli(distributed.setup)'
    with subprocess.Popen([sys.executable, '-c', code], env={**os.environ, **environment}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        time.sleep(1)
        process.terminate()
        assert process.communicate(timeout=20)[1] == 'stopped by SIGTERM\n' and process.returncode == 143


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
    faults = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in (2 ** 20, 2 ** 22, 2 ** 24, 2 ** 23):               # floats, up to 64 MB
            torch.ones(size)                                            # 29,000 pages in all
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(faults) < 3000, faults
