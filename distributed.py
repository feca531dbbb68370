"""One process, or as many as torchrun starts: rank and device, sums over the processes, and waiting for one another."""
import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from configs import InputError


class Processes(NamedTuple):
    """What torchrun's environment says, or one process."""
    rank: int
    world_size: int
    device: torch.device

    def print(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def sum(self, tensor):
        """The sum over all processes; a tensor on the CPU goes over the device and comes back."""
        if self.world_size == 1:
            return tensor
        total = tensor.to(self.device)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def batches(self, count, size):
        """This process's share of range(count), in parts of at most `size`."""
        own = range(self.rank, count, self.world_size)
        return [own[i:i + size] for i in range(0, len(own), size)]


def setup(device='auto'):
    """Join torchrun's process group, if any, and choose the device: --device, or CUDA where there is one.

    Raises InputError for a device that is unknown or absent.
    """
    rank, local_rank, world_size = (int(os.environ.get(name, default)) for name, default in
                                    (('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)))
    name = ('cuda' if torch.cuda.is_available() else 'cpu') if device == 'auto' else device
    try:
        chosen = torch.device(name)
        if chosen.type == 'cuda' and chosen.index is None:
            chosen = torch.device('cuda', local_rank)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f'--device {device}: not available here ({str(error).splitlines()[0]})') from None
    if chosen.type == 'cuda':
        torch.cuda.set_device(chosen)
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group('nccl' if chosen.type == 'cuda' else 'gloo', timeout=timedelta(minutes=30))
    return Processes(rank, world_size, chosen)


def wait(processes):
    """All processes go on once the last one is here; there is no time-out, for rank 0 may be generating data."""
    if processes.world_size > 1:
        dist.barrier(group=dist.new_group(backend='gloo', timeout=timedelta(days=365)))
