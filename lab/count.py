"""What a train step asks of a GPU, counted without one: launches, bytes and memory.

The step is that of train.py, eager in bf16. It runs on tensors without storage (torch's FakeTensorMode) with the dtypes
of CUDA's autocast. Every operation that is no view is one launch, which reads its inputs and writes its outputs once;
an optimizer or a norm over all parameters is one. Left out are copies within an operation, such as those of GroupNorm,
which takes no channels-last tokens on CUDA, and the caches of the GPU.
"""
import itertools
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
        self.launches, self.bytes, self.live, self.peak = 0, 0, {}, 0

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
    with (mock.patch.object(fast, 'usable', lambda x, config: not config.ablate and config.post_norm),
          mock.patch.object(kernels, 'launch', lambda name, grid, used, constants: launch(used)),
          mock.patch.object(data, 'norm', lambda x: data.scaled_norm(x.flatten(1, -2))),
          mock.patch.object(torch.nn.utils, 'clip_grad_norm_', partial(clip_grad_norm_, foreach=True))):
        yield


def mixture(samples):
    """The paper's twelve datasets as far as a step knows them, and as many samples of each as the sampling draws."""
    sets = [SimpleNamespace(channels=len(item.channels), space=(item.resolution, item.resolution), weight=item.weight,
                            fields=slice(len(item.channels) - len(item.static)))
            for item in sorted(configs.PRETRAINING.values(), key=lambda item: item.resolution)]
    ends = torch.tensor([0.0, *(item.weight for item in sets)]).cumsum(0)
    return sets, (ends * samples / ends[-1]).round().int().diff().tolist()


def train_step(config, recipe, samples):
    """{'launches', 'gb', 'memory_gb'} of a train step of `samples` samples of the paper's mixture.

    gb: all bytes that are read and written. memory_gb: the most that is live, with weights, gradients and optimizer.
    """
    for half, size in itertools.product((False, True), config.resolution):      # a run has them before its second step
        fast.fourier_matrix(size // config.patch, config.modes, half, torch.device('cpu'), torch.float32)
    sets, counts = mixture(samples)
    autocast = torch.autocast('cpu', torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True), Autocast(), Counter() as counter, on_a_gpu(counter.launch):
        model = fast.Fast(config)
        model.one_backward = True
        optimizer = train.adamw(model, recipe, torch.device('cpu'))
        groups = [(k, torch.zeros(n, config.frames + 1, *item.space, item.channels), list(range(n)))
                  for k, (item, n) in enumerate(zip(sets, counts)) if n]
        for _ in range(2):                                      # the first one makes the states of the optimizer
            counter.launches = counter.bytes = counter.peak = 0
            train.gradients(model, model, [groups], sets, recipe, autocast)
            train.advance(model, optimizer, torch.zeros(()), [])
    return {'launches': counter.launches, 'gb': counter.bytes / 1e9, 'memory_gb': counter.peak / 1e9}
