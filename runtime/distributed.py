"""One process, or several that torchrun started: rank, device, threads and memory, sums, waiting for one another.

Also what a process owes to others: it heeds the signals that ask it to stop, and locks the folder that it writes into.
"""
import ctypes
import math
import os
import platform
import signal
import socket
import sys
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from configs import InputError

import torch
import torch.distributed as dist

from runtime import terminal

WORK_OF_A_THREAD = 1e8          # multiply-adds in a forward pass that make one more thread worth its waiting
SIGNALS = [getattr(signal, name) for name in ('SIGTERM', 'SIGINT', 'SIGHUP') if hasattr(signal, name)]


class Processes(NamedTuple):
    """This process among all: its rank, their number and its device."""
    rank: int
    world_size: int
    device: torch.device
    patient: object = None          # the group of all processes for `wait`

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

    def share(self, tensors):
        """Overwrite the tensors, on the device of the process, with those of rank 0."""
        for tensor in tensors if self.world_size > 1 else ():
            dist.broadcast(tensor, 0)

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


def place(environment):
    """(rank, index on this node, number of processes) in a mapping of environment variables, as torchrun sets them.

    Without WORLD_SIZE above 1, the other variables mean nothing. Raises InputError for what contradicts itself.
    """
    numbers = {}
    for name, default in (('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)):
        try:
            numbers[name] = int(environment.get(name, default))
        except ValueError:
            raise InputError(f'{name}={environment[name]} in the environment is not a whole number') from None
    rank, local_rank, world_size = numbers.values()
    if world_size < 1:
        raise InputError(f'WORLD_SIZE={world_size} in the environment must be at least 1')
    if world_size == 1:
        return 0, 0, 1
    missing = [name for name in ('RANK', 'MASTER_ADDR', 'MASTER_PORT') if name not in environment]
    if missing:
        raise InputError(f'WORLD_SIZE={world_size} is in the environment without {" ".join(missing)}; start several '
                         f'processes with torchrun, or unset WORLD_SIZE')
    if not 0 <= rank < world_size or local_rank < 0:
        raise InputError(f'RANK={rank} and LOCAL_RANK={local_rank} in the environment contradict '
                         f'WORLD_SIZE={world_size}: ranks count from 0 to {world_size - 1}')
    return rank, local_rank, world_size


def setup(device='auto'):
    """Join torchrun's process group, if any, and choose the device as `choose_device` does. Raises as `place` does.

    On a CPU the process keeps its memory from then on, see `keep_memory`.
    """
    rank, local_rank, world_size = place(os.environ)
    chosen = choose_device(device, local_rank)
    if chosen.type == 'cuda':
        torch.cuda.set_device(chosen)
    elif chosen.type == 'cpu':
        keep_memory()
    if world_size == 1:
        return Processes(rank, world_size, chosen)
    if not dist.is_initialized():
        dist.init_process_group('nccl' if chosen.type == 'cuda' else 'gloo', timeout=timedelta(minutes=30))
    if rank == 0:                   # before `new_group`, where all meet: torchrun keeps its store when it restarts them
        dist.distributed_c10d._get_default_store().set('failed', '0')               # see `together`
    return Processes(rank, world_size, chosen, dist.new_group(backend='gloo', timeout=timedelta(days=365)))


def multiply_adds(config, samples):
    """About how many multiply-adds a forward pass takes, in its temporal sum, its layers and its readout."""
    tokens = samples * math.prod(config.resolution) // config.patch ** config.dims
    temporal, readout = config.frames * config.channels * config.patch, config.out_width * config.patch ** config.dims
    maps = 1 + config.shared + config.top_k if config.experts else 2   # of D x mlp
    layer = maps * config.mlp + 4 * config.width // config.heads       # the mixer's are complex, on half the modes
    return tokens * config.width * (temporal + config.depth * layer + readout)


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


def keep_memory():
    """Let the C library keep the memory that tensors free, on a CPU, for the tensors of the next step.

    By default glibc gives it back to the kernel, which must then fill the same pages with zeros in every step: a tenth
    of a step of nano (docs/speed.md). With another C library nothing happens.
    """
    if platform.libc_ver()[0] == 'glibc':
        for option, limit in ((-3, 2 ** 30), (-1, 2 ** 31 - 1)):        # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, limit)


def memory_mb(device):
    """The peak memory of this process in MB: GPU memory if it runs on a GPU, else resident memory."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 1e6
    status = Path('/proc/self/status')              # on Linux, where getrusage starts from the parent's peak
    if status.exists():
        return 1.024e-3 * int(status.read_text().split('VmHWM:')[1].split()[0])
    import resource  # here, because Windows lacks it
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == 'darwin' else 1e3)


def wait(processes):
    """Wait until all processes are here, without a time-out: rank 0 may generate data for hours before it comes."""
    if processes.world_size > 1:
        dist.barrier(group=processes.patient)


@contextmanager
def together():
    """If one of several processes fails within the block, all leave, and only the first one to fail says why.

    The others fail in turn, as they wait for one that is gone. They leave with exit code 2 and without a word.
    """
    try:
        yield
    except Exception:
        if dist.is_initialized():
            try:
                first = dist.distributed_c10d._get_default_store().add('failed', 1) == 1
            except RuntimeError:            # the store was a part of the process that is gone
                first = False
            if not first:
                sys.exit(2)
        raise


def leave(processes):
    """Leave torchrun's process group, if any."""
    if processes.world_size > 1:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ signals, the lock

@contextmanager
def requests_to_stop():
    """Yield a list that gets the number of each of SIGNALS that arrives within the block, instead of its usual effect.

    A second Ctrl-C ends the process at once. A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    """
    arrived = []

    def note(number, _):
        if number == signal.SIGINT and number in arrived:
            sys.exit(128 + number)
        arrived.append(number)
    before = {number: signal.signal(number, note) for number in SIGNALS
              if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals(*_):
    """Ignore SIGNALS, in a process that only reads data: it ends with the one that it reads for.

    A terminal, torchrun and SLURM send a signal to all processes of a run, and the loader of a process whose readers
    died would raise an error before the last step can be saved.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def lock(folder, processes=None, wait=''):
    """Keep other runs out of `folder` within the block, by a lock of rank 0 on the file <folder>/lock.

    The folder is made if it is new, and removed if it is still empty at the end. The kernel frees the lock when the
    process ends, however it ends. It is a POSIX lock, which the processes that read data do not inherit, and which NFS
    passes on to other nodes; on a disk without locks, as some network file systems are, a line says so. Files *.part
    that killed processes have left are removed.
    wait: what the other process is doing, such as 'generating', to wait for its end, which a line says. Without it,
    raises InputError, which names the process that holds the lock.
    """
    if processes and processes.rank:
        yield
        return
    path = Path(folder) / 'lock'
    with ExitStack() as stack:
        with terminal.naming(path, 'cannot be written'):
            stack.enter_context(terminal.making(path.parent))
            stack.enter_context(_locked(path, wait))
        try:
            for part in path.parent.glob('*.part'):
                part.unlink(missing_ok=True)
            yield
        finally:
            with suppress(OSError):
                path.unlink()


def _locked(path, wait):
    """The open and locked file `path`, which holds the name of this process."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)      # the process that we have waited for may have removed it
        file = open(path, 'a+')
        try:
            import fcntl  # here, because Windows lacks it
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            owner = file.read() or 'another process'
            if not wait:
                raise InputError(f'{path}: {owner} is writing into this folder; wait for it, stop it or choose another '
                                 f'--out') from None
            print(f'{path.parent}: {owner} is {wait} this; waiting', flush=True)
            fcntl.lockf(file, fcntl.LOCK_EX)
        except (ImportError, OSError) as error:
            print(f'{path}: there are no locks on this disk ({error}), so nothing keeps a second run out', flush=True)
        if os.fstat(file.fileno()).st_nlink:
            break
        file.close()                        # its owner has just removed it
    with suppress(OSError):                 # a full disk is for the first file of the block to report
        file.truncate(0)
        os.write(file.fileno(), f'process {os.getpid()} on {socket.gethostname()}'.encode())
    return file
