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


def expected_memory(config, parameters, samples, device='cuda'):
    """GB that AOT takes to train on so many samples at once: on a GPU in bf16, a fit to the counts of lab/count.py.

    On a CPU in fp32, a fit to the peak memory of nano, tiny and small with 1 to 24 samples, of which PyTorch takes 0.4.
    """
    points = math.prod(config.resolution)
    layers = config.depth * (37 * config.width + 3.5 * config.mlp)
    activations = 905 * points + config.tokens * layers                     # bytes of a sample
    if device == 'cpu':
        return 0.43 + (21 * parameters + 1.65 * samples * activations) / 1e9
    projection = (4 * config.out_width + 16) * points                       # in fp32 inside autocast
    return (16 * parameters + samples * (activations + projection)) / 1e9


def available_memory(device):
    """GB of a GPU, or of RAM that each process of this machine could get now; inf where the system does not tell.

    A tenth of the RAM is left to other programs, and to the error of what is expected.
    """
    if device.type == 'cuda':
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    status = Path('/proc/meminfo')
    limit = Path('/sys/fs/cgroup/memory.max')           # of a container
    if not status.exists():
        return math.inf
    available = 1024 * int(status.read_text().split('MemAvailable:')[1].split()[0])
    if limit.exists() and limit.read_text().strip().isdecimal():
        available = min(available, int(limit.read_text()))
    return 0.9 * available / environment('LOCAL_WORLD_SIZE', 1) / 1e9


def fitting_memory(model, samples, parts, processes):
    """The `expected_memory` of a step in so many parts. Raises InputError if there is less, with flags that fit."""
    def expected(samples):
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return expected_memory(model.config, parameters, samples, processes.device.type)
    most = available_memory(processes.device)
    if expected(samples // parts) > most:
        line = f'--batch_size: {samples // parts} samples at a time take about {expected(samples // parts):.1f} GB, '
        line += f'and there are {most:.1f} GB'
        fewer = next((n for n in range(samples, 0, -1) if expected(n) <= most), 0)
        if not fewer:
            raise InputError(f'{line}, too few for a single sample; choose a smaller --size or --resolution')
        parts = next(n for n in range(parts, samples + 1) if samples % n == 0 and samples // n <= fewer)
        other = f'--batch_size {fewer * processes.world_size}'
        raise InputError(f'{line}; give ' + (other if model.config.experts else f'--accumulate {parts}, or {other}'))
    return expected(samples // parts)


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
