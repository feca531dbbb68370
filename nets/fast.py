"""The network of aotpot.py in less work: exact rewrites of its equations for the same modules.

Each function names the equation that it rewrites and says why that is less work; docs/speed.md has
how much each gains.

B batch   T input frames   C field channels   P patch size   D token width   S streams   K heads
O outputs of the patch convolution   J sub-layer outputs so far
`space` stands for H, W (or three axes) and `grid` for h, w.
"""
import dataclasses
import math
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F

from aotpot import AOTPOT, at_least_fp32, no_autocast
from nets.experts import Experts

# -------------------------------------------------------------------------------------- the network

class Fast(AOTPOT):
    """AOTPOT by the rewrites of this file: the same parameters, the same function.

    With residual='aot' a forward pass can be run backward once. A second time, second derivatives
    and transforms of torch.func raise RuntimeError; aotpot.AOTPOT has no such limit.
    compiled: True makes the network compute what it hands to torch.compile, for tests.
    """
    compiled = False

    def predict(self, u, condition):
        with no_autocast(u):                                            # bf16 would round the input
            x = embed(self.embed, self.aggregate, u)                    # Eqs. (4), (5)
            if self.config.normalize:
                x = self.film(x, condition)
        if self.config.residual == 'plain':
            for layer in self.layers:
                x = x + layer.post2(mlp(layer.mlp, layer.norm2(mix(layer.mixer, layer.norm1(x)))))
            return readout(self.readout, x)
        compiled = self.compiled or torch.compiler.is_compiling()
        blocks = []
        for layer in self.layers:
            blocks.append((layer.aot1, layer.norm1, partial(mix, layer.mixer), layer.post1))
            blocks.append((layer.aot2, layer.norm2, partial(mlp, layer.mlp), layer.post2))
        x = sublayers(x, blocks, torch.softmax(self.gate, 0), compiled)         # Eqs. (9) to (13)
        return readout(self.readout, x)


# --------------------------------------------------------------------------------- Eqs. (4) and (5)

def patches(u, P):
    """The patches of all frames as vectors: (B, T, *space, C) -> (B, *grid, T, P*P*C)."""
    dims = u.ndim - 3
    for axis in range(dims):
        u = u.unflatten(2 + axis, (-1, P)).movedim(3 + axis, -2)        # (B, T, h, w, P, P, C)
    return u.movedim(1, dims + 1).flatten(dims + 2)                     # (B, h, w, T, P*P*C)


def embed(embedding, aggregation, u):
    """Eqs. (4) and (5): (B, T, *space, C) -> (B, *grid, D).

    A patch convolution, whose stride is its kernel, is a matrix product; the coordinates, the same
    for all samples, are multiplied once. Between GELU and the sum over t everything is linear: the
    1x1 convolution V, the wave and W_t become one matrix a frame, V diag(cos(gamma t)) W_t, and no
    (B, T, *grid, D) tensor is formed.
    """
    C = u.shape[-1]
    conv = embedding.conv
    project = embedding.project
    P = conv.stride[0]
    weight = conv.weight.flatten(2).permute(2, 1, 0)                    # (P*P, C+3, O)
    of_fields = weight[:, :C].flatten(0, 1)
    of_places = weight[:, C:].flatten(0, 1)
    p = patches(embedding.coordinates(u)[None], P) @ of_places          # (1, *grid, T, O)
    z = F.gelu(patches(u, P) @ of_fields + (p + conv.bias))             # (B, *grid, T, O)  Eq. (4)
    waves = aggregation.waves()                                         # (T, D)
    folded = torch.bmm(waves[:, None] * project.weight.T, aggregation.weight)   # (T, O, D)
    x = z.flatten(-2) @ folded.flatten(0, 1)                            # (B, *grid, D)  Eq. (5)
    position = embedding.position_on(x.shape[1:-1]) + project.bias      # (*grid, D)
    return x + position @ (waves[:, :, None] * aggregation.weight).sum(0)


# ------------------------------------------------------------------------------------------ Eq. (8)

MATRICES = {}                               # those that fourier_matrix has made


def fourier_matrix(n, modes, half, device, dtype):
    """The orthonormal DFT of n points as a real matrix (2m, n or 2n), and that of its inverse.

    Rows are ordered (real/imaginary, frequency), columns (point, real/imaginary).
    modes: the number of frequencies to keep, the lowest of either sign; m of them exist.
    half: only frequencies >= 0 of a real input, which determine it; columns are (point).
    """
    key = n, modes, half, device, dtype
    if key in MATRICES:
        return MATRICES[key]
    x = k = np.arange(n)                                                # 0, 1, ..., -2, -1
    k = k[(k < modes) & (2 * k <= n)] if half else k[(k < modes) | (k >= n - modes)]
    turns = np.outer(k, x) % n / n                                      # modulo n, to be exact
    wave = np.exp(-2j * np.pi * turns) / math.sqrt(n)
    real = np.stack([wave.real, -wave.imag], -1)                        # (m, n, 2)
    imaginary = np.stack([wave.imag, wave.real], -1)
    matrix = inverse = np.stack([real, imaginary])                      # (2, m, n, 2)
    if half:
        matrix = matrix[..., 0]                                         # (2, m, n), of real values
        twice = np.where((k == 0) | (2 * k == n), 1.0, 2.0)             # for the frequencies < 0
        inverse = twice[:, None] * matrix
    rows = 2 * len(k)
    with torch.inference_mode(False):                                   # or no training takes it
        pair = matrix.reshape(rows, -1), inverse.reshape(rows, -1).T
        pair = tuple(torch.tensor(M, device=device, dtype=dtype) for M in pair)
    if not torch.compiler.is_compiling():       # torch.export would leave tensors without numbers
        MATRICES[key] = pair
    return pair


# torch.compiler.assume_constant_result without its import: compiled graphs have them as constants
fourier_matrix._dynamo_marked_constant = True


def complex_linear(x, weight, bias):
    """A complex linear layer as a real product: x (K, N, 2*i) = [real | imaginary] -> (K, N, 2*o).
    """
    re, im = weight                                                             # (K, i, o) each
    matrix = torch.cat([torch.cat([re, im], 2), torch.cat([-im, re], 2)], 1)    # (K, 2i, 2o)
    bias = torch.cat(tuple(bias), 1)[:, None]                                   # (K, 1, 2o)
    return torch.baddbmm(bias.to(x.dtype), x, matrix.to(x.dtype))


def mix(mixer, x):
    """Eq. (8): (B, *grid, D) -> the same.

    The Fourier transform is a product with a DFT matrix, axis by axis, of the modes that are kept:
    faster than an FFT on grids as small as the latent one. The complex MLP is two real products.
    Comments: shapes for a grid (h, w), of which h', w' frequencies are kept.
    """
    B, *grid, D = x.shape
    K = mixer.K
    z = at_least_fp32(x)
    dtype = z.dtype
    matrices = [fourier_matrix(n, mixer.modes, axis == len(grid), z.device, dtype)
                for axis, n in enumerate(grid, start=1)]
    batches = [B * math.prod(grid[:axis]) for axis in range(len(grid))]         # B, B*h
    with no_autocast(x):
        for batch, (matrix, _) in zip(reversed(batches), reversed(matrices)):
            z = matrix @ z.reshape(batch, matrix.shape[1], -1)      # (B*h, 2w', D), (B, 2h', w'*D)
    modes = math.prod([inverse.shape[1] // 2 for _, inverse in matrices])       # h' * w'
    z = z.view(B, 2, modes, K, D // K).permute(3, 0, 2, 1, 4)                # (K, B, modes, 2, D/K)
    z = z.reshape(K, B * modes, 2 * D // K)
    z = F.gelu(complex_linear(z, mixer.w1, mixer.b1))                           # on both parts
    z = complex_linear(z, mixer.w2, mixer.b2)                                   # (K, B*modes, 2D/K)
    z = z.view(K, B, modes, 2, D // K).permute(1, 3, 2, 0, 4)                # (B, 2, modes, K, D/K)
    z = z.to(dtype)
    with no_autocast(x):
        for batch, (_, inverse) in zip(batches, matrices):
            z = inverse @ z.reshape(batch, inverse.shape[1], -1)                # (B, 2h, w'*D)
    z = z.view(x.shape).to(x.dtype)
    return x + z if mixer.inner_skip else z


# ----------------------------------------------------------------------------- the MLP, the readout

def mlp(module, z):
    """An ordinary MLP, or Experts.forward by the chosen experts alone: z (B, *grid, D) -> the same.

    Their weights are gathered for each sample, so that the host need not know who was chosen.
    """
    if isinstance(module, torch.nn.Sequential):
        return module(z)
    f = F.gelu(module.features(z)).flatten(1, -2)                               # (B, N, h)
    w, chosen = module.router(f).topk(module.router.k)                          # (B, k)
    chosen = chosen.flatten()
    # cast after the choice: the gradients of experts that several samples chose are summed in fp32
    weight = module.weight.index_select(0, chosen).to(f.dtype)                  # (B*k, D, h)
    weight = weight.view(len(f), -1, f.shape[-1])                               # (B, k*D, h)
    bias = module.bias.index_select(0, chosen).to(f.dtype).view(len(f), 1, -1)  # (B, 1, k*D)
    y = F.gelu(torch.baddbmm(bias, f, weight.mT)).unflatten(-1, (w.shape[1], -1))     # (B, N, k, D)
    shared = F.linear(f, module.shared_weight.flatten(0, 1), module.shared_bias.flatten())
    shared = F.gelu(shared).unflatten(-1, module.shared_bias.shape).mean(-2)    # (B, N, D)
    return (shared + torch.einsum('bk,bnkd->bnd', w.to(y.dtype), y)).view(z.shape)


def readout(module, x):
    """Readout.forward: (B, *grid, D) -> (B, *space, C), as a matrix product where patches do not
    overlap, with only C channels a point to be put in place.
    """
    conv = module.conv
    if conv.kernel_size != conv.stride:
        return module(x)
    weight = conv.weight.movedim(1, -1).flatten(1)                      # (D, P*P*O)
    bias = conv.bias.repeat(conv.weight[0, 0].numel())
    z = F.gelu(F.linear(x, weight.T, bias)).unflatten(-1, (*conv.stride, -1))   # (B, h, w, P, P, O)
    with no_autocast(z):                                                # as in aotpot.py
        z = module.project(F.gelu(module.hidden(z.to(module.hidden.weight.dtype))))
    for axis in range(1, x.ndim - 1):
        z = z.movedim(x.ndim - 1, axis + 1).flatten(axis, axis + 1)
    return z                                                            # (B, *space, C)


# -------------------------------------------------------------------------------- Eqs. (9) and (13)

BASIS = 8               # sub-layers, after which the streams themselves are formed


def sublayers(x, blocks, gate, compiled=False):
    """The streams through all sub-layers, Eq. (9), and their gated sum, Eq. (13).

    The streams are kept as combinations x^(i) = sum_j c_ij y_j of the sub-layer outputs y_0 = x ...
    y_J. Since a_l, d_l and T_l are the same for all tokens of a sample, x <- T_l x + d_l^T F(a_l x)
    acts on the small c (B, S, J) alone: c <- [T_l c | d_l]. The mean of the streams over the grid
    is c mean(y), and a_l x is one product with a bank of the outputs. Only every `BASIS` sub-layers
    the streams themselves, S times the tokens, take the place of the outputs, or each sum of a deep
    network would read more than the one before. c and the bank are in fp32.
    x: (B, *grid, D), as is the result.
    blocks: (AOTBlock, Norm before, F, Norm after) of each sub-layer.
    gate: (S,), the weights of the sum.
    compiled: no bank but a plain sum of all outputs, of which a compiler makes one kernel.
    """
    gate = at_least_fp32(gate)
    S = len(gate)
    c = gate.new_ones(len(x), S, 1)                                     # (B, S, J)
    y = x[:, None]                                      # (B, n, *grid, D), the newest outputs
    dtype = x.dtype
    means = at_least_fp32(y).flatten(2, -2).mean(2)                     # (B, J, D)
    combine = partial(weighted_sum, []) if compiled else empty_bank(y, len(blocks), S)
    for l, (block, before, sublayer, after) in enumerate(blocks):
        with no_autocast(c):
            if l and l % BASIS == 0 and not compiled:
                y = combine(c, y)                                       # the streams, n = S
                means = c @ means
                c = torch.eye(S, device=c.device, dtype=c.dtype).expand(len(x), S, S)
                combine = empty_bank(y, len(blocks) - l, S)
            a_l, d_l, T_l = block.mappings(c @ means)                   # of the means (B, S, D)
            a_l = a_l[:, None] @ c                                      # (B, 1, J)
        y = after(sublayer(before(combine(a_l, y)[:, 0].to(dtype))))[:, None]
        dtype = y.dtype
        with no_autocast(c):
            c = torch.cat([T_l @ c, d_l[:, :, None]], dim=2)
        means = torch.cat([means, at_least_fp32(y).flatten(2, -2).mean(2)], 1)
    with no_autocast(c):
        gate = gate @ c                                                 # (B, J)
    return combine(gate[:, None], y)[:, 0].to(dtype)


def weighted_sum(outputs, w, y):
    """`Combine` for k = 1: y joins the list of `outputs`, and their sum is returned."""
    outputs += y.unbind(1)
    with no_autocast(w):
        x = sum(w_j * y_j.flatten(1) for w_j, y_j in zip(w[:, 0, :, None].unbind(1), outputs))
    return x.view(y[:, :1].shape)


def empty_bank(y, left, S):
    """`Combine` with a bank for y (B, n, *grid, D), for the outputs of the next of `left`
    sub-layers, and for the gradients of S streams in the place of the last.
    """
    rows = y.shape[1] + min(left, BASIS) + S - 1
    bank = at_least_fp32(y[:0]).new_empty(rows, len(y), y[0, 0].numel())
    return partial(Combine.apply, bank, {})


class Combine(torch.autograd.Function):
    """x_k = sum_j w_kj y_j, w (B, k, J), as a product with a bank (rows, B, N*D) of all y_j.

    The outputs y (B, n, *grid, D) join the bank before, and x (B, k, *grid, D) is in fp32.
    dL/dy_j is the sum of w_kj g_k over all x_k from then on, where g_k is the gradient of x_k. Only
    the newest outputs are inputs of the graph, so that sums run backward after all later ones. By
    then their y are not needed, and from the last of these rows on g takes its place in the bank:
    every gradient is formed once. `later` holds {J: w}.
    """

    @staticmethod
    def forward(ctx, bank, later, w, y):
        J = w.shape[2]
        bank[J - y.shape[1]:J] = y.flatten(2).transpose(0, 1)
        ctx.save_for_backward(w, bank.data[:0])         # which runtime.memory counts as the bank
        ctx.bank = bank
        ctx.later = later
        ctx.like = y.shape[1], y.dtype
        with no_autocast(w):
            x = torch.bmm(w, bank[:J].transpose(0, 1))
        return x.view(*w.shape[:2], *y.shape[2:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        bank = ctx.bank
        later = ctx.later
        n, dtype = ctx.like
        w = ctx.saved_tensors[0].detach()                       # `later` must not hold the graph
        J = w.shape[2]
        if J in later:
            raise RuntimeError('a forward pass of nets.fast.Fast can be run backward once; '
                               'take aotpot.AOTPOT')
        with no_autocast(w):
            g_w = torch.bmm(g.flatten(2), bank[:J].permute(1, 2, 0))            # <g_k, y_j>
            bank[J - 1:J - 1 + w.shape[1]] = g.flatten(2).transpose(0, 1)
            later[J] = w
            w_n = torch.cat([later[k][:, :, J - n:J] for k in sorted(later)], 1)    # oldest first
            gradients = bank[J - 1:J - 1 + w_n.shape[1]].transpose(0, 1)
            g_y = torch.bmm(w_n.mT, gradients)
        return None, None, g_w, g_y.view(-1, n, *g.shape[2:]).to(dtype)


# --------------------------------------------------------------------------------- beside aotpot.py

@cache
def disagreement(config):
    """Why this file cannot replace aotpot.py with the switches of `config`, in words; '' if it can.

    Outputs and gradients of small networks in training are compared in fp64, on one grid.
    """
    small = dataclasses.replace(
        config, frames=3, channels=2, patch=2, modes=2, width=32, mlp=8, depth=2, channel_maps='',
        resolution=(12, 8, 16)[:config.dims], heads=math.gcd(config.heads, 4))
    try:
        # whatever the caller has set, and without a trace in its random numbers
        with (torch.random.fork_rng(devices=[]), torch.device('cpu'), torch.inference_mode(False),
              torch.enable_grad()):
            torch.default_generator.manual_seed(0)                      # torch's seeds GPUs, too
            models = [form(small, Experts).double() for form in (AOTPOT, Fast)]
            for parameter in models[0].parameters():            # or T would make no difference
                parameter.data.add_(torch.rand_like(parameter), alpha=0.3)
            models[1].load_state_dict(models[0].state_dict())
            u = torch.randn(2, 3, *small.resolution, 2, dtype=torch.float64)
            results = []
            for model in models:
                out = model(u)
                gradients = torch.autograd.grad(
                    out.square().sum(), [*model.parameters()], materialize_grads=True)
                results.append(torch.cat([x.flatten() for x in (out, *gradients)]))
        error = (results[1] - results[0]).norm() / results[0].norm()
        cause = '' if error <= 1e-11 else f'outputs and gradients are {error:.1e} apart'  # NaN, too
    except Exception as error:                                  # a renamed module, for example
        cause = f'{type(error).__name__}: {error}'
    return cause and f'nets/fast.py does not compute what aotpot.py does ({cause})'
