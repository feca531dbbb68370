"""One process, or several that torchrun started: rank, device, threads, sums, gradients, signals.
"""
import os
import resource
import signal
import socket
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configs import InputError
from runtime.terminal import SIGNALS, warn

WIDE = 256                  # the token width from which bf16 pays on a CPU, unlike in nano and mini
TIMEOUT = timedelta(hours=1)        # of a process that waits for others; rank 0 alone generates data, for minutes
INTERVAL = 3                # seconds between two moments when processes tell one another of signals


class Processes(NamedTuple):
    """This process among all: its rank, their number and its device."""
    rank: int
    world_size: int
    device: torch.device

    def print(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def sum(self, tensor):
        """The sum of a tensor over all processes; the tensor itself does not change."""
        if self.world_size == 1:
            return tensor
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def batches(self, count, size):
        """Every world_size-th index of range(count), in ranges of at most `size`."""
        own = range(self.rank, count, self.world_size)
        return [own[i:i + size] for i in range(0, len(own), size)]


def choose_device(name='auto'):
    """The torch.device of --device. Raises InputError if it is not available."""
    try:
        device = torch.device(('cuda' if torch.cuda.is_available() else 'cpu') if name == 'auto' else name)
        if device.type == 'cuda' and device.index is None:
            device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', 0)))
        torch.zeros(1, device=device).item()            # on 'meta' there are no numbers
    except (AssertionError, RuntimeError, ValueError) as error:
        raise InputError(f'--device {name}: not available here ({str(error).splitlines()[0]})') from None
    return device


def has_amx():
    """Whether the processor has AMX. With AVX512-BF16 alone bf16 is slower than fp32."""
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


def limit_memory():
    """Let allocations fail where the free memory ends; Linux would kill in silence."""
    kilobytes = {line.split(':')[0]: int(line.split()[1]) for line in Path('/proc/meminfo').read_text().splitlines()}
    taken = int(Path('/proc/self/statm').read_text().split()[5]) * resource.getpagesize()
    limit = taken + 1024 * (kilobytes['MemAvailable'] + kilobytes['SwapFree'])
    with suppress(OSError, ValueError):                     # ValueError: it is 'max'
        limit = min(limit, int(Path('/sys/fs/cgroup/memory.max').read_text()))      # of a container
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def variable(name, numbers):
    """A number that torchrun sets in the environment. Raises InputError if it is none of `numbers`.
    """
    text = os.environ.get(name, '')
    if not text.isdecimal() or int(text) not in numbers:
        raise InputError(f'{name} in the environment is {text!r}; start several processes with torchrun, or unset '
                         f'WORLD_SIZE for one')
    return int(text)


def join(backend, rank, world_size):
    """Join all processes. This one waits in Python, which hears signals meanwhile."""
    address = os.environ.get('MASTER_ADDR', 'localhost'), variable('MASTER_PORT', range(1, 2 ** 16))
    hosts = rank == 0 and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'      # else torchrun does, or rank 0
    store = None
    missing = [0]
    line = f'the processes {{}} of {world_size} do not come to {address[0]}:{address[1]}'
    for tenths in range(10 * TIMEOUT.seconds):
        with suppress(OSError):
            if not store and not hosts:
                socket.create_connection(address, timeout=1).close()    # or PyTorch would wait until somebody listens
            store = store or dist.TCPStore(*address, is_master=hosts, timeout=TIMEOUT, wait_for_workers=False)
            store.set(f'process {rank}', '')
            missing = [other for other in range(world_size) if not store.check([f'process {other}'])]
        if not missing:
            return dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
        if tenths == 100:
            warn(f'{line.format(missing)}; waiting')
        time.sleep(0.1)
    raise InputError(line.format(missing))


def setup(name='auto', threads=0):
    """The Processes, once torchrun's, if any, have joined. name, threads: --device and --threads.
    """
    world_size = variable('WORLD_SIZE', range(1, 2 ** 31)) if 'WORLD_SIZE' in os.environ else 1
    rank = variable('RANK', range(world_size)) if world_size > 1 else 0             # whatever rank one process has
    device = choose_device(name)
    torch.backends.cudnn.allow_tf32 = False         # or convolutions in fp32 would take it, unlike products
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    elif Path('/proc/meminfo').exists():
        limit_memory()
    if threads:
        torch.set_num_threads(threads)
    if world_size > 1:
        own_card = device.type == 'cuda' and ':' not in name            # as NCCL wants it
        join('nccl' if own_card else 'gloo', rank, world_size)
    return Processes(rank, world_size, device)


def barrier(processes):
    """Wait until all processes are here."""
    processes.sum(torch.zeros(()))


def data_parallel(network, processes):
    """The network whose backward pass averages the gradients over all processes, if there are
    several.

    It is compiled beforehand, and the gradients exist, so that they stay where they are.
    """
    if processes.world_size == 1:
        return network
    wrapped = DistributedDataParallel(network, gradient_as_bucket_view=True)
    wrapped.broadcast_buffers = False     # they are equal anyway; its flag has another name in 2.13
    return wrapped


def parts_of_step(batches, parts, network):
    """Yield the next `parts` batches; the last one's backward pass averages gradients."""
    several = isinstance(network, DistributedDataParallel)
    with network.no_sync() if several else nullcontext():
        yield from islice(batches, parts - 1)
    yield next(batches)


def leave(processes):
    """Leave the group in order: who just ends tears the connections of the others."""
    if processes.world_size > 1:
        dist.destroy_process_group()


class Requests:
    """The signals that ask a training to stop; Ctrl-C after one kills the process."""

    def __init__(self, processes):
        self.processes = processes
        self.arrived = []
        self.steps = 0                 # for how many steps the processes have not asked one another
        self.wait = 1                           # after how many they do
        self.asked = time.perf_counter()

    def note(self, number, _):
        self.arrived.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def after_step(self):
        """The first of SIGNALS that any process has got, or 0, equal on all: to be asked for after
        every step.

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
