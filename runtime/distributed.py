"""One process, or several that torchrun started: rank, device, threads and memory, sums, waiting for one another."""
import ctypes
import math
import os
import platform
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

WORK_OF_A_THREAD = 2e8          # parameters times tokens that make one more thread worth its waiting


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


def precision(dtype, device):
    """--dtype, where 'auto' is 'bf16' on a GPU that has it, and else 'fp32'."""
    bf16 = device.type == 'cuda' and torch.cuda.is_bf16_supported(including_emulation=False)
    return dtype if dtype != 'auto' else 'bf16' if bf16 else 'fp32'


def setup(device='auto'):
    """The Processes, on the device of `choose_device`, once torchrun's, if any, have joined."""
    rank = int(os.environ.get('RANK', 0))
    world_size = int(os.environ.get('WORLD_SIZE', 0))
    device = choose_device(device, int(os.environ.get('LOCAL_RANK', 0)))
    torch.backends.cudnn.allow_tf32 = False         # or convolutions in fp32 would take it, unlike products
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    elif device.type == 'cpu':
        keep_memory()
    if world_size < 2:                              # whatever rank the environment has
        return Processes(0, 1, device)
    if not dist.is_initialized():
        dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo', timeout=timedelta(minutes=30))
    return Processes(rank, world_size, device, dist.new_group(backend='gloo', timeout=timedelta(days=365)))


def use_threads(model, samples, threads=0):
    """The number of threads on a CPU: `threads`, OMP_NUM_THREADS, or what a forward pass of `samples` is worth."""
    if not threads and 'OMP_NUM_THREADS' not in os.environ:
        work = samples * model.config.tokens * sum(parameter.numel() for parameter in model.parameters())
        threads = min(torch.get_num_threads(), math.ceil(work / WORK_OF_A_THREAD))
    torch.set_num_threads(threads or torch.get_num_threads())
    return torch.get_num_threads()


def keep_memory():
    """Let glibc keep the memory that tensors free on a CPU, which the kernel would fill with zeros (docs/speed.md)."""
    if platform.libc_ver()[0] == 'glibc':
        for option, limit in ((-3, 2 ** 30), (-1, 2 ** 31 - 1)):        # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, limit)


def expected_memory(config, parameters, samples):
    """GB that AOT takes to train on so many samples at once on a CPU in fp32.

    A fit to the peak memory of nano, tiny and small with 1 to 24 samples, of which PyTorch takes 0.4.
    """
    layers = config.depth * (37 * config.width + 3.5 * config.mlp)
    activations = 905 * math.prod(config.resolution) + config.tokens * layers       # bytes of a sample
    return 0.43 + (21 * parameters + 1.65 * samples * activations) / 1e9


def available_memory():
    """GB of RAM that each process of this machine could get now; inf where the system does not tell.

    A tenth is left to other programs, and to the error of what is expected.
    """
    status = Path('/proc/meminfo')
    limit = Path('/sys/fs/cgroup/memory.max')           # of a container
    if not status.exists():
        return math.inf
    available = 1024 * int(status.read_text().split('MemAvailable:')[1].split()[0])
    if limit.exists() and limit.read_text().strip().isdecimal():
        available = min(available, int(limit.read_text()))
    return 0.9 * available / int(os.environ.get('LOCAL_WORLD_SIZE', 1)) / 1e9


def refuse_what_does_not_fit(model, samples):
    """Raise InputError if so many samples at once take more than the `available_memory`: Linux would kill the run."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    expected = expected_memory(model.config, parameters, samples)
    available = available_memory()
    if expected > available:
        raise InputError(f'--batch_size: {samples} samples at a time take about {expected:.1f} GB, and there are '
                         f'{available:.1f} GB; give a smaller --batch_size, --size or --resolution, or more parts of '
                         f'a batch with --accumulate')


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
