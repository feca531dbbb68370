"""One process, or several that torchrun started: rank, device, threads and memory, sums, waiting for one another."""
import math
import os
import signal
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from configs import InputError
from runtime.terminal import SIGNALS, handling


class Processes(NamedTuple):
    """This process among all: its rank, their number and its device."""
    rank: int
    world_size: int
    device: torch.device
    patient: object = None          # the group of all processes for `wait`

    def print(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def sum(self, tensor):
        """The sum of a tensor over all processes, on the device of the tensor, which itself does not change."""
        if self.world_size == 1:
            return tensor
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def share(self, tensors):
        """Overwrite the tensors, on the device of the process, with those of rank 0."""
        for tensor in tensors if self.world_size > 1 else ():
            dist.broadcast(torch.view_as_real(tensor) if tensor.is_complex() else tensor, 0)

    def batches(self, count, size):
        """The indices of range(count) that this process takes, every world_size-th, as ranges of at most `size`."""
        share = range(self.rank, count, self.world_size)
        return [share[i:i + size] for i in range(0, len(share), size)]


def choose_device(name='auto', local_rank=0):
    """The device --device: 'auto' (CUDA if there is any, else the CPU), 'cpu', 'cuda' (number local_rank), 'mps'"""
    try:
        device = torch.device(('cuda' if torch.cuda.is_available() else 'cpu') if name == 'auto' else name)
        if device.type == 'cuda' and device.index is None:
            device = torch.device('cuda', local_rank)
        torch.zeros(1, device=device).item()            # on 'meta' there are no numbers
    except (RuntimeError, AssertionError) as error:
        raise InputError(f'--device {name}: not available here ({str(error).splitlines()[0]})') from None
    return device


def environment(name, default=0):
    """The whole number in a variable of the environment."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise InputError(f'{name}={value}: expected a whole number, as torchrun sets it')
    return int(value)


def precision(dtype, device):
    """--dtype, where 'auto' is 'bf16' on a GPU that has it, and else 'fp32'."""
    bf16 = device.type == 'cuda' and torch.cuda.is_bf16_supported(including_emulation=False)
    return dtype if dtype != 'auto' else 'bf16' if bf16 else 'fp32'


def setup(device='auto', threads=0):
    """The Processes, on the device of `choose_device`, once torchrun's, if any, have joined.

    threads: how many this process has on a CPU; 0: as many as PyTorch chooses, or OMP_NUM_THREADS says.
    """
    rank = environment('RANK')
    local_rank = environment('LOCAL_RANK')
    world_size = environment('WORLD_SIZE')
    device = choose_device(device, local_rank)
    torch.backends.cudnn.allow_tf32 = False         # or convolutions in fp32 would take it, unlike products
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    if threads:
        torch.set_num_threads(threads)
    if world_size < 2:                              # whatever rank the environment has
        return Processes(0, 1, device)
    if not dist.is_initialized():
        try:
            dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo', timeout=timedelta(minutes=30))
        except ValueError as error:                 # a variable that torchrun sets is absent or wrong
            raise InputError(f'WORLD_SIZE={world_size}: {error}; start several processes with torchrun') from None
    return Processes(rank, world_size, device, dist.new_group(backend='gloo', timeout=timedelta(days=365)))


def refuse_beyond_memory(config, samples, device):
    """Raise InputError for so many samples at once if a rough count of what they need is beyond the GPU, or the RAM.

    What a sample leaves for the backward pass is a fit to counts of AOT-POT in bf16. Other networks need at least the
    fields, of two batches.
    """
    if device.type == 'cuda':
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    points = math.prod(config.resolution)
    needed = 8 * points * config.channels * (config.frames + 1)                 # bytes
    if config.network == 'aotpot':
        needed += 905 * points + config.tokens * config.depth * (37 * config.width + 3.5 * config.mlp)
    if samples * needed > total:
        raise InputError(f'--batch_size: {samples} samples at a time take about {samples * needed / 1e9:.1f} GB, and '
                         f'there are {total / 1e9:.1f} GB; lower it, or give --accumulate')


def memory_mb(device):
    """The peak memory of this process in MB, on its GPU or else in RAM; 0 on a system that does not tell it."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 1e6
    status = Path('/proc/self/status')              # getrusage would start from the peak of the parent process
    return 1.024e-3 * int(status.read_text().split('VmHWM:')[1].split()[0]) if status.exists() else 0.0


def wait(processes):
    """Wait until all processes are here, without a time-out: rank 0 may generate data for hours before it comes."""
    if processes.world_size > 1:
        dist.barrier(group=processes.patient)


def require_equal(processes, values):
    """Raise InputError on all processes if one of the `values`, {what: value}, is not that of rank 0 on each."""
    if processes.world_size == 1:
        return
    texts = {what: str(value) for what, value in values.items()}
    everyone = [None] * processes.world_size
    dist.all_gather_object(everyone, texts, group=processes.patient)
    for rank, theirs in enumerate(everyone):
        for what, value in everyone[0].items():
            if theirs.get(what) != value:
                raise InputError(f'rank {rank} has {what} {theirs.get(what)}, but rank 0 {value}; all processes need '
                                 f'the same flags and data, and an --out on a disk that they share')


def leave(processes):
    if processes.world_size > 1:
        dist.destroy_process_group()


@contextmanager
def requests_to_stop():
    """Yield a list of those of SIGNALS that arrive within the block; a second Ctrl-C ends the process at once."""
    requests = []

    def note(number, _):
        if number == signal.SIGINT and number in requests:
            sys.exit(128 + number)
        requests.append(number)
    with handling(SIGNALS, note):
        yield requests
