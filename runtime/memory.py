"""How much memory a training step takes on a CPU, where Linux ends a process without a word."""
import math
import os
import re
from contextlib import suppress
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks


def available():
    """The bytes that this process may still take, of the machine or a container, inf if unknown."""
    meminfo = Path('/proc/meminfo')
    if not meminfo.exists():
        return math.inf
    free = 1024 * int(re.search(r'MemAvailable: +(\d+)', meminfo.read_text())[1])
    group = Path('/sys/fs/cgroup')
    with suppress(OSError, ValueError):                         # ValueError: its limit is 'max'
        limit = int((group / 'memory.max').read_text())
        files = re.search(r'inactive_file (\d+)', (group / 'memory.stat').read_text())[1]
        used = int((group / 'memory.current').read_text()) - int(files)     # which it lets go
        free = min(free, limit - used)
    return free


def saved_bytes(model):
    """The bytes that a forward pass of one sample keeps for its backward pass.

    model: in evaluation mode, or its BatchNorm would change.
    """
    config = model.config
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.ones(1, config.frames, *config.resolution, config.channels))
    for x in [*model.parameters(), *model.buffers()]:
        kept.pop(x.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def forecast(model, samples, parts):
    """A line on what a step needs and what there is; where it does not fit, on what does.

    samples: of a pass. parts: passes of a step, --accumulate.
    """
    weights = sum(x.numel() * x.element_size() for x in model.parameters())
    fixed = 4 * weights                                         # with gradients and two moments
    each = saved_bytes(model)
    need = fixed + each * samples
    free = available() / int(os.environ.get('LOCAL_WORLD_SIZE', 1))         # of torchrun
    line = f'memory: about {need / 1e9:.2g} GB for a step, {free / 1e9:.2g} GB are available'
    if need < free:
        return line
    fitting = [n for n in range(1, samples + 1)
               if samples % n == 0 and fixed + each * samples / n < free]
    advice = f'--accumulate {parts * fitting[0]} fits' if fitting else 'take a smaller --size'
    if fitting and model.config.experts:                        # whose BatchNorm needs whole batches
        advice = f'--batch_size {samples // fitting[0]} for each process fits'
    return f'{line}; {advice}, or the system may end the run without a word'
