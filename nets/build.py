"""The network of a config: that of aotpot.py, in less work, or another; compiled; its optimizer."""
import warnings

import torch
from torch import nn

from aotpot import AOTPOT, FourierMixer, TemporalAggregation
from configs import InputError, nearest
from nets import fast, sinkhorn_kernel  # noqa: F401, whose import gives `sinkhorn` its kernel
from nets.baselines import BASELINES
from nets.experts import Experts
from nets.muon import Muon
from runtime.terminal import warn


def build(config, form='fast', headers=None):
    """The network of a configs.ModelConfig with fresh weights, on the CPU.

    form: 'fast', nets.fast.Fast, or 'paper', aotpot.AOTPOT; the parameters are the same. If the two
    differ, because somebody has changed an equation, a line says so and the network is AOTPOT.
    headers: its attribute `data`, of the training's files, {name: data.read_headers}.
    Raises InputError for an unknown network or a missing package.
    """
    if config.network == 'aotpot':
        difference = fast.disagreement(config) if form == 'fast' else ''
        if difference:
            form = 'paper'
            warn(f'{difference}: aotpot.py is taken, which is slower')
        model = {'fast': fast.Fast, 'paper': AOTPOT}[form](config, Experts)
    elif config.network in BASELINES:
        model = BASELINES[config.network](config)
        model.config = config
    else:
        raise InputError(f'network {config.network}: there is none of that name'
                         + nearest(config.network, ['aotpot', *BASELINES]))
    model.data = headers or {}
    return model


def matrices(model):
    """The parameters that nets.muon.Muon takes as matrices, {form: list}, and a list of the rest.

    Matrices are linear layers and convolutions between hidden features, the W_t of Eq. (5), the
    mixers and the experts. The rest are the doors of a network (convolutions to and from patches,
    layers from or to fewer than 16 features), position embeddings, norms, biases and mappings.
    """
    forms = {'matrix': [], 'stack': [], 'complex': []}
    for module in model.modules():
        if isinstance(module, TemporalAggregation):
            forms['stack'].append(module.weight)
        elif isinstance(module, Experts):
            forms['stack'] += [module.weight, module.shared_weight]
        elif isinstance(module, FourierMixer):
            forms['complex'] += [module.w1, module.w2]
        elif isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            strides = getattr(module, 'stride', ())
            if min(module.weight.shape[:2]) >= 16 and set(strides) <= {1}:
                forms['matrix'].append(module.weight)
    taken = {id(parameter) for parameters in forms.values() for parameter in parameters}
    return forms, [parameter for parameter in model.parameters() if id(parameter) not in taken]


OPTIMIZERS = {                              # --optimizer
    'adamw': lambda model, recipe, half, **settings: torch.optim.AdamW(
        model.parameters(), **settings),
    'muon': lambda model, recipe, half, **settings: Muon(
        *matrices(model), recipe.ratio, recipe.momentum, half, **settings),
}


def optimizer_of(model, recipe, device, dtype='fp32'):
    """The optimizer of --optimizer; AdamW in one pass where PyTorch has that."""
    fused = (device.type in ('cpu', 'cuda')
             and not any(parameter.is_complex() for parameter in model.parameters()))
    return OPTIMIZERS[recipe.optimizer](
        model, recipe, dtype == 'bf16', lr=recipe.lr, fused=fused,
        betas=(recipe.beta1, recipe.beta2), weight_decay=recipe.weight_decay)


def autocast(dtype, device):
    """The precision of --dtype, as a context. Raises InputError for another than fp32 and bf16."""
    if dtype not in ('fp32', 'bf16'):
        raise InputError(f'--dtype {dtype}: expected fp32 or bf16')
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == 'bf16')


def compile_model(model, run, samples, device):
    """The model as the loop calls it: compiled if --compile says so and the compiler does not fail.

    A training pass of so many samples is compiled here, before the first step and outside
    DistributedDataParallel.
    """
    if run.compile == 'off':
        return model
    config = model.config
    torch._dynamo.config.optimize_ddp = False           # or it would split the graph later
    warnings.filterwarnings('ignore', module='torch._inductor')         # its advice for fp32
    for parameter in model.parameters():
        if parameter.requires_grad:         # gradients add to it: a CUDA graph reuses its own
            parameter.grad = torch.zeros_like(parameter)
    buffers = [buffer.clone() for buffer in model.buffers()]
    mode = 'reduce-overhead' if run.compile == 'graphs' else 'default'
    compiled = torch.compile(model, mode=mode, dynamic=False)
    u = torch.ones(samples, config.frames, *config.resolution, config.channels, device=device)
    try:
        with autocast(run.dtype, device):
            prediction = compiled(u, u.new_zeros(samples, 2, config.channels))
        prediction.float().square().mean().backward()
    except Exception as error:      # of whatever kind; what is the model's fault fails eagerly, too
        compiled = model
        warn(f'--compile: {" ".join(str(error).split())[:300]}; the run goes on without it')
    for buffer, before in zip(model.buffers(), buffers):
        buffer.data.copy_(before)
    model.zero_grad(set_to_none=False)
    return compiled
