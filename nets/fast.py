"""The network of aotpot.py in less work: exact rewrites of its equations, one after another, for the same modules.

Every function says which equation it rewrites and why that is less work. docs/speed.md has the measured gains, and
tests/nets/test_fast.py compares both forms, outputs and gradients, for every switch.

B batch   T input frames   C field channels   P patch size   D token width   S streams   K heads   O outputs of the
patch convolution   J sub-layer outputs so far. `space` stands for H, W (or three axes) and `grid` for h, w.
"""
import dataclasses
import functools
import math

import numpy as np
import torch
import torch.nn.functional as F

import configs
import sinkhorn
from aotpot import AOTPOT, at_least_fp32, no_autocast, weighted
from nets import kernels
from nets.experts import Experts

# ------------------------------------------------------------------------------------------------ the network

class Fast(AOTPOT):
    """AOTPOT by the rewrites of this file: the same parameters, the same function.

    one_backward: the caller promises at most one backward pass through each forward pass, and no second derivative.
    Then, and without gradients, the streams take less work too, by `kernels.sublayers` or `sublayers_on_cpu`.
    """
    one_backward = False

    def __init__(self, config, experts=Experts):
        super().__init__(config, experts)

    def network(self, u, units=None):
        x = embed(self.embed, self.aggregate, u)                                        # (B, *grid, D)  Eqs. (4), (5)
        if units is not None:
            x = self.units(x, units)
        if self.config.residual == 'plain':
            for layer in self.layers:
                x = x + mlp(layer.mlp, layer.norm2(mix(layer.mixer, layer.norm1(x))))
            return readout(self.readout, x)
        blocks = []                                                     # F of Eq. (9) ends with a norm
        for layer in self.layers:
            blocks.append((layer.aot1, layer.post1, lambda x, layer=layer: mix(layer.mixer, layer.norm1(x))))
            blocks.append((layer.aot2, layer.post2, lambda x, layer=layer: mlp(layer.mlp, layer.norm2(x))))
        gate = torch.softmax(self.gate, 0)
        once = self.one_backward or not torch.is_grad_enabled()
        if once and usable(x, self.config):
            return readout(self.readout, kernels.sublayers(x, blocks, gate))
        if once and x.device.type == 'cpu' and not torch.compiler.is_compiling():
            return readout(self.readout, sublayers_on_cpu(x, blocks, gate))
        x = x[:, None].expand(-1, len(gate), *x.shape[1:])
        for block, post, sublayer in blocks:
            x = block(x, lambda u, post=post, sublayer=sublayer: post(sublayer(u)))
        return readout(self.readout, weighted('s,bs...->b...', gate, x))                # Eq. (13)


# ------------------------------------------------------------------------------------------------ Eqs. (4) and (5)

def patches(u, P):
    """(B, T, *space, C) -> (B, *grid, T, P*P*C): a token holds its patch of every frame, ready for a matrix product."""
    B, T, *space, C = u.shape
    u = u.reshape(B, T, *[n for N in space for n in (N // P, P)], C)                    # (B, T, h, P, w, P, C)
    u = u.permute(0, *range(2, u.ndim - 1, 2), 1, *range(3, u.ndim - 1, 2), u.ndim - 1)
    return u.flatten(len(space) + 2)                                                    # (B, h, w, T, P*P*C)


def unpatch(x, P):
    """(B, *grid, P*P, C) -> (B, *space, C), the inverse of `patches` for one frame."""
    B, *grid, _, C = x.shape
    dims = len(grid)
    x = x.reshape(B, *grid, *[P] * dims, C)                                             # (B, h, w, P, P, C)
    x = x.permute(0, *[axis for i in range(1, dims + 1) for axis in (i, dims + i)], -1)
    return x.reshape(B, *[n * P for n in grid], C)                                      # (B, H, W, C)


def coordinate_bias(conv, C, T, space):
    """What the coordinates x, y, t contribute to the patch convolution, and its bias: (*grid, T, O).

    They are constants, so Eq. (4) need not carry them as channels; each enters linearly, one term for each axis.
    """
    P = conv.stride[0]
    dims = len(space)
    line = lambda n: torch.linspace(0, 1, n, device=conv.weight.device, dtype=conv.weight.dtype)
    bias = torch.outer(line(T), conv.weight[:, C + dims].flatten(1).sum(1))             # (T, O)
    for axis, N in enumerate(space):
        weight = conv.weight[:, C + axis].movedim(1 + axis, 1).flatten(2).sum(2)        # (O, P)
        term = line(N).view(-1, P) @ weight.T                                           # (N/P, O)
        bias = bias + term.view(*[-1 if i == axis else 1 for i in range(dims)], 1, len(weight))
    return bias + conv.bias


def embed(embedding, aggregation, u):
    """Eqs. (4) and (5): (B, T, *space, C) -> (B, *grid, D).

    Between GELU and the sum over t everything is linear. So the 1x1 convolution V, the wave and W_t become one matrix
    for each frame, V diag(cos(gamma t)) W_t, and no (B, T, *grid, D) tensor is formed. A patch convolution, whose
    stride is its kernel, is a matrix product.
    """
    _, T, *space, C = u.shape
    conv, project = embedding.conv, embedding.project
    P = conv.stride[0]
    weight = conv.weight[:, :C].flatten(2).permute(2, 1, 0).flatten(0, 1)               # (P*P*C, O)
    z = F.gelu(patches(u, P) @ weight + coordinate_bias(conv, C, T, space))             # (B, *grid, T, O)
    waves = aggregation.waves()                                                         # (T, D)
    folded = torch.bmm(waves[:, None] * project.weight.T, aggregation.weight)           # (T, O, D)
    x = z.flatten(-2) @ folded.flatten(0, 1)                                            # (B, *grid, D)
    position = embedding.position_on([N // P for N in space]) + project.bias            # (*grid, D)
    return x + position @ (waves[:, :, None] * aggregation.weight).sum(0)


# ------------------------------------------------------------------------------------------------ Eq. (8)

MATRICES = {}                               # those that fourier_matrix has made


def fourier_matrix(n, modes, half, device, dtype):
    """The orthonormal DFT of n points as a real matrix F (2m, n or 2n); its transpose, weighted, is the inverse.

    m counts the lowest `modes` frequencies of both signs, or all if there are no more; half: the non-negative ones of
    real input. Rows are ordered (real/imaginary, frequency), columns (point, real/imaginary), or (point) if half.
    """
    if (key := (n, modes, half, device, dtype)) in MATRICES:
        return MATRICES[key]
    k = np.arange(n // 2 + 1 if half else n)
    k = k[(k < modes) | (k >= n - modes) & (not half)]
    angle = 2 * math.pi * (np.outer(k, np.arange(n)) % n) / n                           # exact: integers modulo n
    cos = np.cos(angle) / math.sqrt(n)                                                  # (m, n)
    sin = np.sin(angle) / math.sqrt(n)
    if half:
        matrix = np.concatenate([cos, -sin])
        twice = np.where((k == 0) | (2 * k == n), 1.0, 2.0)                             # for the frequencies left out
        inverse = (np.tile(twice, 2)[:, None] * matrix).T
    else:
        matrix = np.concatenate([np.stack([cos, sin], -1), np.stack([-sin, cos], -1)]).reshape(2 * len(k), 2 * n)
        inverse = matrix.T
    with torch.inference_mode(False):                                                   # or training could not reuse it
        pair = tuple(torch.tensor(x, device=device, dtype=dtype) for x in (matrix, inverse))
    if type(pair[0]) is torch.Tensor:       # torch.export gets stand-ins, which are worth nothing when it has ended
        MATRICES[key] = pair
    return pair


# Or a compiled graph would make them in every pass. This is torch.compiler.assume_constant_result without its import.
fourier_matrix._dynamo_marked_constant = True


def complex_linear(x, weight, bias):
    """A complex linear layer as one real batched product with [[Re W, Im W], [-Im W, Re W]].

    x (K, N, 2*i) = [real | imaginary] -> (K, N, 2*o) alike; weight (2, K, i, o) and bias (2, K, o) hold both parts.
    """
    re, im = weight
    matrix = torch.cat([torch.cat([re, im], 2), torch.cat([-im, re], 2)], 1)            # (K, 2i, 2o)
    return torch.baddbmm(torch.cat(tuple(bias), 1)[:, None].to(x.dtype), x, matrix.to(x.dtype))


def mix(mixer, x):
    """Eq. (8): (B, *grid, D) -> the same.

    The Fourier transform is a product with a DFT matrix, axis by axis, of the kept modes alone, which is faster than an
    FFT on grids as small as the latent one. The complex MLP is two real batched products.
    """
    B, *grid, D = x.shape
    K = mixer.K
    z = at_least_fp32(x)
    matrices = [fourier_matrix(n, mixer.modes, axis == len(grid) - 1, z.device, z.dtype) for axis, n in enumerate(grid)]
    with no_autocast(x):
        z = matrices[-1][0] @ z.reshape(-1, grid[-1], D)                                      # (B*h, 2w', D)
        for axis in reversed(range(len(grid) - 1)):
            z = matrices[axis][0] @ z.reshape(B * math.prod(grid[:axis]), 2 * grid[axis], -1)           # (B, 2h', w'*D)
    modes = math.prod([inverse.shape[1] // 2 for _, inverse in matrices])               # h' * w'
    z = z.view(B, 2, modes, K, D // K).permute(3, 0, 2, 1, 4).reshape(K, B * modes, 2 * D // K)
    z = F.gelu(complex_linear(z, mixer.w1, mixer.b1))                                   # on real and imaginary parts
    z = complex_linear(z, mixer.w2, mixer.b2)                                           # (K, B*modes, 2D/K)
    z = z.view(K, B, modes, 2, D // K).permute(1, 3, 2, 0, 4).to(matrices[0][1].dtype)  # (B, 2, modes, K, D/K)
    with no_autocast(x):
        for axis, (_, inverse) in enumerate(matrices):
            z = inverse @ z.reshape(B * math.prod(grid[:axis]), inverse.shape[1], -1)
    z = z.view(x.shape).to(x.dtype)
    return x + z if mixer.inner_skip else z


# ------------------------------------------------------------------------------------------------ the MLP

def mlp(module, z):
    """An ordinary MLP, or Experts.forward by the chosen experts alone: z (B, *grid, D) -> the same.

    Their weights are gathered for each sample, so that the host need not know who was chosen nor how often.
    """
    if isinstance(module, torch.nn.Sequential):
        return module(z)
    f = F.gelu(module.features(z)).flatten(1, -2)                                       # (B, N, h)
    w, chosen = module.router(f).topk(module.router.k)                                  # (B, k)
    # cast after the choice: the gradients of experts that several samples chose are summed in fp32
    weight = module.weight.index_select(0, chosen.flatten()).to(f.dtype).view(len(f), -1, f.shape[-1])  # (B, k*D, h)
    bias = module.bias.index_select(0, chosen.flatten()).view(len(f), 1, -1)            # (B, 1, k*D)
    y = F.gelu(torch.baddbmm(bias.to(f.dtype), f, weight.mT)).unflatten(-1, (w.shape[1], -1))           # (B, N, k, D)
    shared = F.gelu(F.linear(f, module.shared_weight.flatten(0, 1), module.shared_bias.flatten()))
    shared = shared.unflatten(-1, module.shared_bias.shape).mean(-2)                    # (B, N, D)
    return (shared + torch.einsum('bk,bnkd->bnd', w.to(y.dtype), y)).view(z.shape)


# ------------------------------------------------------------------------------------------------ Eqs. (9) and (13)

def sublayers_on_cpu(x, blocks, gate):
    """The streams through all sub-layers: tokens x (B, *grid, D) -> the gated sum of Eq. (13), of the same shape.

    The streams are kept as combinations x^(i) = sum_j c_ij y_j of the sub-layer outputs y_0 = x ... y_J. Since a_l, d_l
    and T_l are the same for all tokens of a sample, Eq. (9), x <- T_l x + d_l^T F(a_l x), acts on the small c (B, S, J)
    alone: c <- [T_l c | d_l]. No tensor of S times the tokens is formed, the mean of the streams over the grid is
    c mean(y), and a_l x is one product with a bank of all outputs. c stays in fp32 inside autocast.
    blocks, gate: as for `kernels.sublayers`.
    """
    def pool(y):
        return at_least_fp32(y).flatten(1, -2).mean(1)                                  # (B, D)

    c = gate.new_ones(len(x), len(gate), 1)                                             # (B, S, J)
    bank = c.new_empty(len(blocks) + 1, len(x), x[0].numel())                           # of all outputs
    later = {}                                                                          # for `Combine`
    y = x
    pooled = [pool(y)]
    for block, post, sublayer in blocks:
        with no_autocast(c):
            a_l, d_l, T_l = block.mappings(c @ torch.stack(pooled, 1))                  # of the means (B, S, D)
            a_l = (a_l[:, None] @ c)[:, 0]                                              # (B, J)
        y = post(sublayer(Combine.apply(a_l, y, bank, later)))
        with no_autocast(c):
            c = torch.cat([T_l @ c, d_l[:, :, None]], dim=2)
        pooled.append(pool(y))
    with no_autocast(c):
        gate = gate @ c                                                                 # (B, J)
    return Combine.apply(gate, y, bank, later)


class Combine(torch.autograd.Function):
    """x = sum_j w_j y_j as one product with a bank (outputs, B, N*D), w (B, J); its backward has the same form.

    dL/dy_j is the sum of w_mj g_m over the sums m >= j, where g_m is the gradient of x_m. Only the newest output is an
    input of the graph, so sum m runs backward after all later ones. By then y_m is not needed, and g_m takes its place
    in the bank: every gradient is formed once. `later` holds {m: w_m}.
    """

    @staticmethod
    def forward(ctx, w, y, bank, later):
        J = w.shape[1]
        bank[J - 1] = y.flatten(1)
        ctx.save_for_backward(w)
        ctx.bank = bank
        ctx.later = later
        ctx.dtype = y.dtype
        with no_autocast(w):
            return torch.bmm(w[:, None], bank[:J].transpose(0, 1)).view(y.shape).to(y.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        bank, later = ctx.bank, ctx.later
        w = ctx.saved_tensors[0].detach()                                           # `later` must not hold the graph
        m = w.shape[1] - 1
        if m in later:
            raise RuntimeError('with one_backward, the streams of a forward pass can be run backward once')
        with no_autocast(w):
            outputs = bank[:m + 1].permute(1, 2, 0)
            g_w = torch.bmm(g.reshape(len(w), 1, -1).to(bank.dtype), outputs)[:, 0]     # (B, J)  <g, y_j>
            bank[m] = g.flatten(1)
            later[m] = w
            w_m = torch.stack([later[k][:, m] for k in range(m, m + len(later))], 1)    # newest first
            g_y = torch.bmm(w_m[:, None], bank[m:m + len(later)].transpose(0, 1))
        return g_w, g_y.view(g.shape).to(ctx.dtype), None, None


# ------------------------------------------------------------------------------------------------ the readout

def readout(module, x):
    """Readout.forward: (B, *grid, D) -> (B, *space, C).

    The transposed convolution, whose stride is its kernel, is a matrix product. The 1x1 layers act before the patches
    are laid out, so that only C channels are scattered. Neither holds for patches that overlap.
    """
    conv = module.conv
    if conv.kernel_size != conv.stride:
        return module(x)
    P = conv.stride[0]
    weight = conv.weight.flatten(2).mT                                                  # (D, P*P, out_width)
    x = (x @ weight.flatten(1)).unflatten(-1, weight.shape[1:]) + conv.bias             # (B, *grid, P*P, out_width)
    return unpatch(module.project(F.gelu(module.hidden(F.gelu(x)))), P)


# ------------------------------------------------------------------------------------------------ beside aotpot.py

@functools.cache
def difference(config, device='cpu'):
    """Why this file cannot stand for aotpot.py with the switches of `config` on a device, in words, '' if it can.

    Two small networks are compared: in fp64 on the CPU and, if that is another device, there in fp32, in which the
    kernel of sinkhorn.py runs.
    """
    try:
        words = largest_difference(config)
        if not words and device != 'cpu':
            words = largest_difference(config, device, torch.float32, tolerance=1e-2)
    except Exception as error:                                          # a renamed module, for example
        words = f'{type(error).__name__}: {error}'
    return f'nets/fast.py does not compute what aotpot.py does ({words})' if words else ''


def largest_difference(config, device='cpu', dtype=torch.float64, tolerance=1e-8):
    """What differs most between the two forms of a small network, in words, '' if nothing is beyond the tolerance.

    Outputs and all gradients, in training and in evaluation, with three frames and fewer modes than the grids have,
    which are no squares; that of the evaluation was not trained. The parameters are far from their start, where T would
    make no difference. device, dtype: of the fast form; the paper's is in fp64 on the CPU.
    """
    space = (12, 8, 16)[:config.dims]
    small = dataclasses.replace(config, frames=3, channels=2, patch=2, resolution=space, modes=2, width=32, mlp=8,
                                heads=math.gcd(config.heads, 4), depth=2, channel_maps='')
    apart = {}
    with (torch.random.fork_rng(devices=[]), torch.device('cpu'), torch.inference_mode(False), torch.enable_grad(),
          torch.autocast(torch.device(device).type, enabled=False)):
        torch.default_generator.manual_seed(0)                          # torch.manual_seed would seed the GPUs, too
        paper = AOTPOT(small, Experts).double()
        fast = Fast(small)
        fast.one_backward = True                                        # as in training
        for parameter in paper.parameters():
            parameter.data.add_(torch.rand_like(parameter), alpha=0.3)
        fast.to(device, dtype).load_state_dict(paper.state_dict())
        for training, space in ((True, (12, 8, 16)), (False, (4, 24, 16))):
            u = torch.randn(2, small.frames, *space[:config.dims], small.channels, dtype=torch.float64)
            expected = results(paper.train(training), u)
            found = results(fast.train(training), u.to(device, dtype))
            floor = 1e-4 * max(value.norm() for value in expected.values())
            for name, value in expected.items():
                error = (found[name].to(value) - value).norm() / (value.norm() + floor)
                error = error.nan_to_num(math.inf).item()
                apart[error] = f'{name} are {error:.1e} apart in ' + ('training' if training else 'evaluation')
    return apart[max(apart)] if max(apart) > tolerance else ''


def results(model, u):
    """{name: tensor} of the outputs for u and of all gradients of the sum of their squares, from one seed."""
    torch.default_generator.manual_seed(1)
    names, parameters = zip(*model.named_parameters())
    u = u.clone().requires_grad_()
    outputs = model(u)
    gradients = torch.autograd.grad(outputs.square().sum(), [u, *parameters], allow_unused=True, materialize_grads=True)
    titles = [f'the gradients of {name}' for name in ('the input', *names)]
    return {'the outputs': outputs.detach(), **dict(zip(titles, gradients))}


def usable(x, config):
    """Whether nets/kernels.py can run for tokens x: on CUDA with Triton, not in fp64, with all mappings."""
    return ((x.is_cuda or sinkhorn.INTERPRET) and sinkhorn.TRITON and x.dtype != torch.float64
            and not config.ablate and config.streams <= 16 and config.sinkhorn_iters
            and not sinkhorn.transformed(x) and trusted())


TRUSTED = {}                                                            # the answer, once there is one


def trusted():
    """Whether the kernels run here and equal aotpot.py, seen once a process; a warning says if not."""
    if not TRUSTED:
        TRUSTED['kernels'] = True                                       # while they are tried, they are taken
        TRUSTED['kernels'] = sinkhorn.trusted() and (not torch.cuda.is_available() or sinkhorn.passes(
            lambda: not largest_difference(configs.model('nano'), 'cuda', torch.float32, tolerance=1e-2),
            'the kernels of nets/kernels.py are not taken ({}); the streams are slower'))
    return TRUSTED['kernels']


# torch.compile calls it while it reads the network, and takes the answer: what it compiles has been tried
trusted._dynamo_marked_constant = True
