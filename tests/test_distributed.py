"""Processes: shares and sums, alone and under torchrun."""
import os

import configs

import pytest
import torch

import distributed
from helpers import run

CPU = torch.device('cpu')


@pytest.mark.parametrize('count, size, world_size', [(10, 3, 1), (10, 3, 4), (2, 5, 3), (0, 4, 2)])
def test_the_batches_of_all_processes_hold_each_index_once(count, size, world_size):
    batches = [distributed.Processes(rank, world_size, CPU).batches(count, size) for rank in range(world_size)]
    assert sorted(i for own in batches for batch in own for i in batch) == list(range(count))
    assert all(1 <= len(batch) <= size for own in batches for batch in own)
    totals = [sum(map(len, own)) for own in batches]
    assert max(totals) - min(totals) <= 1, 'equal shares'


def test_one_process_sums_to_itself_prints_and_does_not_wait(capsys):
    alone, tensor = distributed.Processes(0, 1, CPU), torch.randn(3)
    assert alone.sum(tensor) is tensor
    distributed.wait(alone)
    distributed.leave(alone)
    alone.print('one')
    distributed.Processes(1, 2, CPU).print('two')
    assert capsys.readouterr().out == 'one\n'


def test_the_device_is_the_one_asked_for_or_one_line(monkeypatch):
    for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'):
        monkeypatch.delenv(name, raising=False)
    assert distributed.setup('cpu') == distributed.Processes(0, 1, CPU) and distributed.choose_device('cpu') == CPU
    assert distributed.setup().device.type == ('cuda' if torch.cuda.is_available() else 'cpu')
    for device in ('tpu9', 'cuda:99', 'meta'):
        with pytest.raises(configs.InputError, match=f'^--device {device}: not available here [^\\n]*$'):
            distributed.setup(device)


def test_the_threads_are_the_users_or_follow_from_the_work(monkeypatch):
    before, work = torch.get_num_threads(), distributed.WORK_OF_A_THREAD

    def chosen(*arguments):
        torch.set_num_threads(4)                            # PyTorch's default on four cores
        assert distributed.use_threads(*arguments) == torch.get_num_threads()
        return torch.get_num_threads()
    try:
        monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
        assert [chosen(share * work) for share in (0.1, 1, 1.1, 3, 100)] == [1, 1, 2, 3, 4]
        assert chosen(work, 3) == 3
        monkeypatch.setenv('OMP_NUM_THREADS', '4')
        assert (chosen(work), chosen(work, 2)) == (4, 2)
    finally:
        torch.set_num_threads(before)


def test_two_processes_sum_and_wait(tmp_path):
    script = tmp_path / 'two.py'
    script.write_text("""if True:
        import pathlib, sys, time
        import torch, distributed
        processes, flag = distributed.setup('cpu'), pathlib.Path(sys.argv[1])
        if processes.rank == 0:
            time.sleep(0.5)
            flag.touch()
        distributed.wait(processes)
        assert flag.exists(), 'did not wait'
        own = torch.arange(3.) + 10 * processes.rank
        processes.print(f'{processes.sum(own).tolist()} {own.tolist()}')
        distributed.leave(processes)
        assert not torch.distributed.is_initialized()""")
    root = os.path.dirname(distributed.__file__)
    found = run('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', str(script),
                str(tmp_path / 'flag'), env={**os.environ, 'PYTHONPATH': root})
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ['[10.0, 12.0, 14.0] [0.0, 1.0, 2.0]']
