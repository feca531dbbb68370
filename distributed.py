"""One process, or several that torchrun started: rank and device, sums over them, and waiting for one another."""
import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from configs import InputError


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


def setup(device='auto'):
    """Join the process group if torchrun started this process, and choose the device: `Processes`.

    device: the value of --device; 'auto' is CUDA if available, each process on a GPU of its own, else the CPU.
    Raises InputError for a device that is unknown or not available.
    """
    rank, local_rank, world_size = (int(os.environ.get(name, default)) for name, default in
                                    (('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)))
    name = ('cuda' if torch.cuda.is_available() else 'cpu') if device == 'auto' else device
    try:
        chosen = torch.device(name)
        if chosen.type == 'cuda' and chosen.index is None:
            chosen = torch.device('cuda', local_rank)
        torch.empty(0, device=chosen)                       # fails here rather than later
    except (RuntimeError, AssertionError) as error:
        raise InputError(f'--device {device}: not available here ({str(error).splitlines()[0]})') from None
    if chosen.type == 'cuda':
        torch.cuda.set_device(chosen)
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group('nccl' if chosen.type == 'cuda' else 'gloo', timeout=timedelta(minutes=30))
    return Processes(rank, world_size, chosen)


def wait(processes):
    """Wait until all processes are here, without a time-out: rank 0 may generate data for hours before it comes."""
    if processes.world_size > 1:
        dist.barrier(group=dist.new_group(backend='gloo', timeout=timedelta(days=365)))
