"""What a train step asks of a GPU and of its host, found without one: launches, bytes, memory and time of the host.

The step is that of train.py, eager in bf16. It runs on tensors without storage (torch's FakeTensorMode) with the dtypes
of CUDA's autocast. Every operation that is no view is one launch, which reads its inputs and writes its outputs once;
an optimizer or a norm over all parameters is one. Left out are copies within an operation, such as those of GroupNorm,
which takes no channels-last tokens on CUDA, and the caches of the GPU. The time of the host is that of the same
operations on tiny tensors on a CPU.
"""
import dataclasses
import itertools
import math
import time
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.utils import clip_grad_norm_
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import configs
import data
import train
from nets import fast, kernels

# CUDA's autocast computes these in fp32, while the CPU's, which runs here, leaves them as they are
IN_FP32 = (F.group_norm, torch.group_norm, torch.softmax, F.softmax, torch.rsqrt, torch.exp, torch.pow, torch.sum,
           Tensor.sum, Tensor.pow)


class Autocast(TorchFunctionMode):
    """What CUDA's autocast does beside the CPU's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in IN_FP32 and torch.is_autocast_enabled('cpu'):
            args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        return func(*args, **kwargs)


class Counter(TorchDispatchMode):
    """Launches, bytes and live memory of all operations on tensors."""

    def __init__(self):
        super().__init__()
        self.launches = 0
        self.bytes = 0
        self.peak = 0
        self.live = {}                                                      # storage -> bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:          # trunc_normal_ looks at what it has drawn
            return 0
        out = func(*args, **(kwargs or {}))
        inputs = tensors((args, kwargs))
        outputs = tensors(out)
        old = {x.untyped_storage()._cdata for x in inputs}
        new = [x for x in outputs if x.untyped_storage()._cdata not in old]
        for storage in (x.untyped_storage() for x in new):
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.live.values()))
        if (new or func._schema.is_mutable) and 'empty' not in func.__name__:
            self.launch(inputs + outputs)
        return out

    def launch(self, used):
        self.launches += 1
        self.bytes += sum(x.nbytes for x in {id(x): x for x in used}.values())


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@contextmanager
def on_a_gpu(launch):
    """Take what a GPU would: kernels, in whose place launch(tensors) is called, and one norm of all gradients."""
    with (mock.patch.object(fast, 'usable', lambda x, config: not config.ablate),
          mock.patch.object(kernels, 'launch', lambda name, grid, used, constants: launch(used)),
          mock.patch.object(data, 'norm', lambda x: data.scaled_norm(x.flatten(1, -2))),
          mock.patch.object(torch.nn.utils, 'clip_grad_norm_', partial(clip_grad_norm_, foreach=True))):
        yield


def mixture(samples, grid=None):
    """The paper's twelve datasets as far as a step knows them, and as many samples of each as the sampling draws.

    grid: the points along an axis of every dataset, by default its own.
    """
    sets = [SimpleNamespace(channels=len(item.channels), space=2 * (grid or item.resolution,), weight=item.weight,
                            fields=slice(len(item.channels) - len(item.static)))
            for item in sorted(configs.PRETRAINING.values(), key=lambda item: item.resolution)]
    ends = torch.tensor([0.0, *(item.weight for item in sets)]).cumsum(0)
    return sets, (ends * samples / ends[-1]).round().int().diff().tolist()


def stepper(config, recipe, sets, counts):
    """A function that takes one training step on so many samples of each of the datasets."""
    model = fast.Fast(config)
    model.one_backward = True
    optimizer = train.adamw(model, recipe, torch.device('cpu'))
    groups = [(k, torch.zeros(n, config.frames + 1, *item.space, item.channels), list(range(n)))
              for k, (item, n) in enumerate(zip(sets, counts)) if n]
    autocast = torch.autocast('cpu', torch.bfloat16)

    def step():
        train.gradients(model, model, [groups], sets, recipe, autocast)
        train.advance(model, optimizer, torch.zeros(()), [])
    return step


def train_step(config, recipe, samples):
    """{'launches', 'gb', 'memory_gb'} of a train step of `samples` samples of the paper's mixture.

    gb: all bytes that are read and written. memory_gb: the most that is live, with weights, gradients and optimizer.
    """
    for half, size in itertools.product((False, True), config.resolution):      # a run has them before its second step
        fast.fourier_matrix(size // config.patch, config.modes, half, torch.device('cpu'), torch.float32)
    sets, counts = mixture(samples)
    with FakeTensorMode(allow_non_fake_inputs=True), Autocast(), Counter() as counter, on_a_gpu(counter.launch):
        step = stepper(config, recipe, sets, counts)
        step()                                                  # the first one makes the states of the optimizer
        counter.launches = counter.bytes = counter.peak = 0
        step()
    return {'launches': counter.launches, 'gb': counter.bytes / 1e9, 'memory_gb': counter.peak / 1e9}


def host_ms(config, recipe, samples, repeats=20):
    """The milliseconds of CPU that the operations of such a step take on the smallest tensors: the least of `repeats`.

    It leaves out what CUDA's driver takes to launch them, and Triton, some 10 us for each kernel of nets/kernels.py.
    """
    small = dataclasses.replace(config, width=math.lcm(8, config.heads), mlp=16, frames=2, patch=2, resolution=4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = []
    with on_a_gpu(lambda used: None):
        step = stepper(small, recipe, *mixture(samples, grid=4))
        for _ in range(2 + repeats):                            # two to warm up
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
    torch.set_num_threads(threads)
    return 1000 * min(seconds[2:])
