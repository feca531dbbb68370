"""One process, or several that torchrun started: rank, device, threads, sums, gradients, signals."""
import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configs import InputError
from runtime.terminal import SIGNALS

TIMEOUT = timedelta(hours=1)        # of a process that waits for others; rank 0 alone generates data, for minutes
INTERVAL = 3                        # seconds between two moments when processes tell one another of signals


class Processes(NamedTuple):
    """This process among all: its rank, their number and its device."""
    rank: int
    world_size: int
    device: torch.device

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

    def batches(self, count, size):
        """The indices of range(count) that this process takes, every world_size-th, as ranges of at most `size`."""
        own = range(self.rank, count, self.world_size)
        return [own[i:i + size] for i in range(0, len(own), size)]


def choose_device(name='auto'):
    """The torch.device of --device, of which 'cuda' is one card a process. Raises InputError if it is not available."""
    try:
        device = torch.device(('cuda' if torch.cuda.is_available() else 'cpu') if name == 'auto' else name)
        if device.type == 'cuda' and device.index is None:
            device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', 0)))
        torch.zeros(1, device=device).item()            # on 'meta' there are no numbers
    except (RuntimeError, AssertionError) as error:
        raise InputError(f'--device {name}: not available here ({str(error).splitlines()[0]})') from None
    return device


def precision(dtype, device):
    """--dtype, where 'auto' is 'bf16' on a GPU that has it, and else 'fp32'."""
    if dtype != 'auto':
        return dtype
    bf16 = device.type == 'cuda' and torch.cuda.is_bf16_supported(including_emulation=False)
    return 'bf16' if bf16 else 'fp32'


def setup(name='auto', threads=0):
    """The Processes, once torchrun's, if any, have joined. name, threads: --device and --threads."""
    world_size = int(os.environ.get('WORLD_SIZE', 1))
    device = choose_device(name)
    torch.backends.cudnn.allow_tf32 = False         # or convolutions in fp32 would take it, unlike products
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    if threads:
        torch.set_num_threads(threads)
    if world_size < 2:                              # whatever rank the environment has
        return Processes(0, 1, device)
    own_card = device.type == 'cuda' and ':' not in name            # as NCCL wants it
    dist.init_process_group('nccl' if own_card else 'gloo', timeout=TIMEOUT)
    return Processes(dist.get_rank(), world_size, device)


def barrier(processes):
    """Wait until all processes are here."""
    processes.sum(torch.zeros(()))


def data_parallel(network, processes):
    """The network whose backward pass averages the gradients over all processes, if there are several.

    It is compiled beforehand, and the gradients exist, so that they stay where they are.
    """
    if processes.world_size == 1:
        return network
    wrapped = DistributedDataParallel(network, gradient_as_bucket_view=True)
    wrapped.broadcast_buffers = False       # they are equal anyway; its flag has another name in 2.13
    return wrapped


def parts_of_step(batches, parts, network):
    """Yield the next `parts` batches. The last backward pass averages the gradients over all processes."""
    several = isinstance(network, DistributedDataParallel)
    with network.no_sync() if several else nullcontext():
        yield from islice(batches, parts - 1)
    yield next(batches)


def leave(processes):
    """Leave the group in order: a process that ends within it tears the connections of those that still work."""
    if processes.world_size > 1:
        dist.destroy_process_group()


class Requests:
    """The signals that ask a training to stop, of which `note` is the handler; Ctrl-C after one kills the process."""

    def __init__(self, processes):
        self.processes = processes
        self.arrived = []
        self.steps = 0                          # for how many steps the processes have not asked one another
        self.wait = 1                           # after how many they do
        self.asked = time.perf_counter()

    def note(self, number, _):
        self.arrived.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def after_step(self):
        """The first of SIGNALS that any process has got, or 0, equal on all: to be asked for after every step.

        Several processes ask one another every INTERVAL seconds, which they count in steps, since
        clocks differ.
        """
        if self.processes.world_size == 1:
            return self.arrived[0] if self.arrived else 0
        self.steps += 1
        if self.steps < self.wait:
            return 0
        now = time.perf_counter()
        got = [float(number in self.arrived) for number in SIGNALS]
        *got, seconds = self.processes.sum(torch.tensor([*got, now - self.asked])).tolist()
        self.wait = max(1, int(INTERVAL * self.steps * self.processes.world_size / seconds))
        self.steps = 0
        self.asked = now
        return next((number for number, count in zip(SIGNALS, got) if count), 0)
