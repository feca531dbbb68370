"""One process, or several that torchrun started: rank, device and threads, sums over them, waiting for one another."""
import math
import os
from datetime import timedelta
from typing import NamedTuple

from configs import InputError

import torch
import torch.distributed as dist

WORK_OF_A_THREAD = 2e8          # multiply-adds in a forward pass that make one more thread worth its waiting


class Processes(NamedTuple):
    """This process among all: its rank, their number and its device."""
    rank: int
    world_size: int
    device: torch.device

    def print(self, text):
        """Print on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    def sum(self, tensor):
        """The sum of a tensor over all processes, on the device of the tensor, which itself does not change."""
        if self.world_size == 1:
            return tensor
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def batches(self, count, size):
        """The indices of range(count) that this process takes, every world_size-th, as ranges of at most `size`."""
        own = range(self.rank, count, self.world_size)
        return [own[i:i + size] for i in range(0, len(own), size)]


def choose_device(name='auto', local_rank=0):
    """The device --device: 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'. 'auto' is CUDA if there is any, else the CPU.

    local_rank: index of the CUDA device if `name` has none. Raises InputError if the device is unknown or absent.
    """
    try:
        device = torch.device(('cuda' if torch.cuda.is_available() else 'cpu') if name == 'auto' else name)
        if device.type == 'cuda' and device.index is None:
            device = torch.device('cuda', local_rank)
        torch.zeros(1, device=device).item()            # which the device 'meta' cannot
    except (RuntimeError, AssertionError) as error:
        raise InputError(f'--device {name}: not available here ({str(error).splitlines()[0]})') from None
    return device


def setup(device='auto'):
    """Join torchrun's process group, if any, and choose the device as `choose_device` does."""
    rank, local_rank, world_size = (int(os.environ.get(name, default)) for name, default in
                                    (('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)))
    chosen = choose_device(device, local_rank)
    if chosen.type == 'cuda':
        torch.cuda.set_device(chosen)
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group('nccl' if chosen.type == 'cuda' else 'gloo', timeout=timedelta(minutes=30))
    return Processes(rank, world_size, chosen)


def use_threads(work, given=0):
    """Set the number of threads of this process on a CPU, and return it.

    It is `given` if that is not 0, else what OMP_NUM_THREADS says, which torchrun sets to 1 for several processes on a
    node unless the user has set it. Without either it is one thread for every WORK_OF_A_THREAD of the `work`
    multiply-adds of a forward pass, and at most PyTorch's default, one for each core.
    """
    if given:
        torch.set_num_threads(given)
    elif 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), math.ceil(work / WORK_OF_A_THREAD)))
    return torch.get_num_threads()


def wait(processes):
    """Wait until all processes are here, without a time-out: rank 0 may generate data for hours before it comes."""
    if processes.world_size > 1:
        dist.barrier(group=dist.new_group(backend='gloo', timeout=timedelta(days=365)))


def leave(processes):
    """Leave torchrun's process group, if any."""
    if processes.world_size > 1:
        dist.destroy_process_group()
