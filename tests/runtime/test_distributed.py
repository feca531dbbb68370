"""Processes: shares and sums, alone and under torchrun."""
import os
import platform
import resource
import signal
import socket
import time

import pytest
import torch

import configs
from helpers import exit_code, fork, free_port
from runtime import distributed

CPU = torch.device('cpu')


@pytest.mark.parametrize('count, size, world_size', [(10, 3, 1), (10, 3, 4), (2, 5, 3), (0, 4, 2)])
def test_the_batches_of_all_processes_hold_each_index_once(count, size, world_size):
    shares = [distributed.Processes(rank, world_size, CPU).batches(count, size) for rank in range(world_size)]
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(count))
    assert all(1 <= len(batch) <= size for share in shares for batch in share)


def test_half_of_what_torchrun_sets_is_one_line(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(configs.InputError, match='^the processes cannot join .*RANK expected.*; start several with'):
        distributed.setup('cpu')


def test_a_wait_for_processes_ends_at_a_signal_and_those_of_different_commands_are_refused_on_all_of_them(tmp_path):
    """A wait for nobody, no store, an address without a host, a dead one, two of one rank, another WORLD_SIZE."""
    paths = (tmp_path / str(i) for i in range(20))

    def start(rank, port, settings=None, world_size=2, **options):
        return fork(lambda: distributed.setup('cpu', settings) and None, next(paths),
                    rank, port, world_size, **options)
    alone, late, died, twice, sizes, other = (free_port() for _ in range(6))
    with socket.create_server(('127.0.0.1', 0)) as silent:              # which never answers
        waiting = [start(1, silent.getsockname()[1]), start(0, alone), start(1, late),
                   start(0, late, address='no.such.host.invalid'), start(0, died, world_size=3),
                   *(start(rank, twice, world_size=3) for rank in (0, 1, 1)),
                   start(0, sizes), start(1, sizes, world_size=3)]
        different = [start(rank, other, {'lr': 1.0, 'dtype': dtype}) for rank, dtype in enumerate(('auto', 'bf16'))]
        dead = start(1, died, world_size=3)
        time.sleep(1)
        os.kill(dead, signal.SIGKILL)
        time.sleep(0.3)
        for i, process in enumerate(waiting):
            os.kill(process, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[i % 3])
        ends = [exit_code(process) for process in waiting]
    by_signal = {-number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    assert {*ends} <= by_signal | {2} and ends.count(2) < 5, ends                          # 2: it has failed before
    assert [exit_code(process) for process in (*different, dead)] == [2, 2, -signal.SIGKILL]
    printed = ''.join(path.read_text() for path in tmp_path.iterdir())
    assert all(f'error: --dtype {dtype}: another process has another' in printed for dtype in ('auto', 'bf16'))


def test_processes_leave_right_after_a_sum(tmp_path):
    """Under PyTorch 2.6 two of three pairs waited for ever."""
    def main():
        signal.alarm(60)
        processes = distributed.setup('cpu')
        processes.sum(torch.ones(50000))
        distributed.leave(processes)
    for i in range(4):
        port = free_port()
        pair = [fork(main, tmp_path / f'{i} {rank}', rank, port, 2) for rank in (0, 1)]
        assert [exit_code(process) for process in pair] == [0, 0]


def test_nothing_takes_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', True)           # PyTorch's default, for convolutions
    distributed.setup('cpu')
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize('dtype, width, has, expected', [
    ('auto', 512, True, 'bf16'), ('auto', 512, False, 'fp32'), ('auto', configs.model('mini').width, True, 'fp32'),
    ('fp32', 512, True, 'fp32'), ('bf16', 0, False, 'bf16')])
def test_auto_takes_bf16_on_a_processor_that_has_it_if_the_network_is_wide(dtype, width, has, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: has)
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
