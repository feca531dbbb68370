"""One process, or several that torchrun started: rank, device, threads, sums, gradients."""
import os
import signal
import zlib
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configs import InputError, show
from runtime.terminal import SIGNALS, handling

WIDE = 256              # the token width from which bf16 pays on a CPU with AVX512_BF16
TIMEOUT = timedelta(hours=1)        # of a wait for others; rank 0 alone generates data, for minutes

# Gloo's threads let a tensor go a moment after its sum. If nobody else holds it they need the GIL for
# that, and in PyTorch 2.6 who leaves the group keeps it and waits for them (its pull request 154976).
HELD = deque(maxlen=8)


class Processes(NamedTuple):
    """This process among all: its rank, their number and its device."""
    rank: int
    world_size: int
    device: torch.device

    def print(self, text):
        if self.rank == 0:
            with suppress(BrokenPipeError):             # of which the process gets a signal, too
                print(text, flush=True)

    def sum(self, tensor):
        """The sum of a tensor over all processes; the tensor itself does not change."""
        if self.world_size == 1:
            return tensor
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total)
        HELD.append(total)
        return total.to(tensor.device)

    def batches(self, count, size):
        """Every world_size-th index of range(count), in ranges of at most `size`."""
        own = range(self.rank, count, self.world_size)
        return [own[i:i + size] for i in range(0, len(own), size)]


def choose_device(name='auto'):
    """The torch.device of --device. Raises InputError if it is not available."""
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    try:
        device = torch.device(name)
        if device.type == 'cuda' and device.index is None:
            device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', 0)))
        torch.zeros(1, device=device).item()            # on 'meta' there are no numbers
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        raise InputError(f'--device {name}: not available ({str(error).splitlines()[0]})') from None
    return device


def precision(dtype, processes, width=0):
    """--dtype, where 'auto' is 'bf16' if all processes gain by it, and else 'fp32'.

    width: that of a token; on a CPU bf16 pays from WIDE on, if it has AVX512_BF16.
    """
    if dtype != 'auto':
        return dtype
    kind = processes.device.type
    gains = (kind == 'cuda' and torch.cuda.is_bf16_supported(including_emulation=False)
             or kind == 'cpu' and width >= WIDE and torch.cpu._is_avx512_bf16_supported())
    return 'bf16' if processes.sum(torch.tensor(float(gains))) == processes.world_size else 'fp32'


def setup(name='auto', settings=None):
    """The Processes, once torchrun's, if any, have joined.

    name: --device.
    settings: {flag: value} of the command, but for the device the same on all of them.
    Raises InputError where they cannot join, or were given different settings.
    """
    device = choose_device(name)
    torch.backends.cudnn.allow_tf32 = False         # or convolutions would take it, unlike products
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    if os.environ.get('WORLD_SIZE', '1') == '1':
        return Processes(0, 1, device)
    own_card = device.type == 'cuda' and ':' not in name            # as NCCL wants it
    with handling(SIGNALS, signal.SIG_DFL):         # it waits in C++, where no handler is heard
        try:
            dist.init_process_group('nccl' if own_card else 'gloo', timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise InputError(f'the processes cannot join ({str(error).splitlines()[0]}); start '
                             f'several with torchrun, or unset WORLD_SIZE for one') from None
        processes = Processes(dist.get_rank(), dist.get_world_size(), device)
        require_same({**(settings or {}), 'device': ''}, processes)
    return processes


def require_same(settings, processes):
    """Raise InputError for the first of {flag: value} that is not the same in all processes."""
    hashes = torch.tensor([zlib.crc32(repr(value).encode()) for value in settings.values()])
    same = processes.sum(hashes) == processes.world_size * hashes
    for (name, value), equal in zip(settings.items(), same):
        if not equal:
            raise InputError(f'--{name} {show(value) or "(none)"}: another process has another '
                             f'value; give all of them the same command, and an --out on a disk '
                             f'that they share')


def barrier(processes):
    """Wait until all processes are here."""
    with handling(SIGNALS if processes.world_size > 1 else (), signal.SIG_DFL):
        processes.sum(torch.zeros(()))


def data_parallel(network, processes):
    """The network, whose backward pass averages the gradients over all processes."""
    if processes.world_size == 1:
        return network
    wrapped = DistributedDataParallel(network, gradient_as_bucket_view=True)
    wrapped.broadcast_buffers = False     # they are equal anyway; its flag has another name in 2.13
    return wrapped


def leave(processes):
    """Leave the group in order: who just ends tears the connections of the others."""
    if processes.world_size > 1:
        dist.destroy_process_group()


def first_signal(arrived, processes):
    """The first of SIGNALS that has arrived at any process, or 0, equal on all that ask."""
    got = processes.sum(torch.tensor([float(number in arrived) for number in SIGNALS])).tolist()
    return next((number for number, count in zip(SIGNALS, got) if count), 0)
