"""One process, or several that torchrun started: rank, device, threads, sums, gradients, signals."""
import math
import os
import signal
from contextlib import contextmanager
from datetime import timedelta
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from configs import InputError
from runtime.terminal import SIGNALS, handling

WIDE = 256                          # the token width from which bf16 pays on a CPU, unlike in nano and mini
PATIENCE = timedelta(hours=1)       # of a process that waits for others; rank 0 alone generates data, for minutes


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
        share = range(self.rank, count, self.world_size)
        return [share[i:i + size] for i in range(0, len(share), size)]


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


def has_amx():
    """Whether the processor has AMX, by what Linux says. With AVX512-BF16 alone, bf16 takes longer than fp32."""
    cpuinfo = Path('/proc/cpuinfo')
    return cpuinfo.exists() and 'amx_bf16' in cpuinfo.read_text().split()


def precision(dtype, processes, width=0):
    """--dtype, where 'auto' is 'bf16' if all processes gain by it, and else 'fp32'.

    That is on a GPU that has it, and on a processor with AMX for a token width of at least WIDE.
    width: that of the network, 0 for fp32 on every processor.
    """
    if dtype != 'auto':
        return dtype
    if processes.device.type == 'cuda':
        gains = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        gains = processes.device.type == 'cpu' and width >= WIDE and has_amx()
    return 'bf16' if processes.sum(torch.tensor(float(gains))) == processes.world_size else 'fp32'


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
    own = device.type == 'cuda' and ':' not in name     # NCCL wants a card of its own for each process
    dist.init_process_group('nccl' if own else 'gloo', timeout=PATIENCE)
    return Processes(dist.get_rank(), world_size, device)


def wait(processes):
    """Wait until all processes are here."""
    processes.sum(torch.zeros(()))


def require_equal(processes, step):
    """Raise InputError on all processes unless each has found a run at the same step, 0 for none."""
    steps = torch.zeros(processes.world_size, dtype=torch.int64)
    steps[processes.rank] = step
    steps = processes.sum(steps).tolist()
    if min(steps) < max(steps):
        raise InputError(f'--resume: the processes have found a run at the steps {steps}; they need an --out on a disk '
                         f'that they share')


class Gradients:
    """The gradients of parameters as parts of one buffer, in which backward passes add up and which one sum averages.

    DistributedDataParallel reaches into the backward pass, which a CUDA graph launches as a whole.
    """

    def __init__(self, parameters, processes):
        self.processes = processes
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        counts = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in trained]
        places = [4 * math.ceil(count / 4) for count in counts]         # of 16 bytes, which vector instructions want
        self.flat = torch.zeros(sum(places) + 1, device=processes.device)
        for parameter, count, place in zip(trained, counts, self.flat[:-1].split(places)):
            shape = parameter.shape
            part = place[:count]
            parameter.grad = torch.view_as_complex(part.view(*shape, 2)) if parameter.is_complex() else part.view(shape)

    def zero(self):
        self.flat.zero_()

    def average(self, loss):
        """Average the gradients and the loss over all processes: the loss and the norm, numbers on the device."""
        if self.processes.world_size > 1:
            self.flat[-1] = loss
            dist.all_reduce(self.flat)
            self.flat /= self.processes.world_size
            loss = self.flat[-1].clone()
        return loss, self.flat[:-1].norm()

    def clip(self, norm, most):
        """Scale the gradients, whose norm is given, down to the norm `most`, if that is not 0."""
        if most:
            self.flat *= (most / (norm + 1e-6)).clamp(max=1)


def leave(processes):
    """Leave the group in order: a process that ends within it tears the connections of those that still work."""
    if processes.world_size > 1:
        dist.destroy_process_group()


@contextmanager
def requests_to_stop():
    """Yield a list of those of SIGNALS that arrive within the block; Ctrl-C after one kills the process."""
    requests = []

    def note(number, _):
        requests.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with handling(SIGNALS, note):
        yield requests


def agreed(processes, requests):
    """The first of SIGNALS that any process has got, by the lists of `requests_to_stop`, or 0: equal on all."""
    counts = processes.sum(torch.tensor([float(number in requests) for number in SIGNALS]))
    return next(compress(SIGNALS, counts.tolist()), 0)
