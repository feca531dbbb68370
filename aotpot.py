"""AOT-POT, the whole network, in the order of the paper (Sec. 4; equations numbered as printed).

    u (B, T, H, W, C) -> patches, coordinates, temporal aggregation -> depth x (mixer, MLP), each inside an AOT block
                      -> readout -> the next frame (B, H, W, C)

B batch   T input frames   H, W grid points   C field channels   P patch size   h, w latent grid (H/P, W/P)
D token width (C in the paper's Sec. 4)   S streams (n in the paper)   K heads of the mixer   E width of a patch
J outputs the streams are made of (below).   "space" stands for H, W (or H, W, depth) and "grid" for h, w (or three):
nothing behind the patch embedding knows how many there are.

Four things are computed in another form than the paper writes them. Each is exact algebra, and tests/test_aotpot.py
holds the paper's form beside it:
  - a, d, T are one matrix per sample, the same for all tokens, so the S streams need not exist: `Streams`.
  - Between GELU and the sum over t all is linear, so the 1x1 conv is folded into W_t: `Embedding`.
  - Coordinates are constants: their share of the patch conv is a bias, separable by axis: `Embedding`.
  - A patch conv (stride = kernel) is a matrix product; so are a complex linear layer and, axis by axis, the Fourier
    transform of a small grid: `patches`, `complex_linear`, `fourier`.
"""
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

import checkpoint
from configs import InputError, ModelConfig, show
from sinkhorn import sinkhorn


def uniform(*shape, low=0.0, high=1.0):
    return nn.Parameter(torch.empty(*shape).uniform_(low, high))


def no_autocast(x):
    """A region in which autocast is off: Fourier transforms, norms of the streams and Sinkhorn stay in fp32."""
    return torch.autocast(x.device.type, enabled=False)


def at_least_fp32(x):
    return x if x.dtype == torch.float64 else x.float()


def unfused(x):
    """Eager mode on a CPU, where every operation is one more pass over the tokens; a compiler fuses the plain form."""
    return x.device.type == 'cpu' and not torch.compiler.is_compiling()


# ------------------------------------------------------------------------------------------------ patches

def patches(u, P):
    """(B, T, *space, C) -> (B, *grid, T, P*P*C): a token holds its patch of every frame, ready for a matrix product."""
    B, T, *space, C = u.shape
    d = len(space)
    u = u.reshape(B, T, *[n for N in space for n in (N // P, P)], C)                  # (B, T, h, P, w, P, C)
    u = u.permute(0, *range(2, 2 + 2 * d, 2), 1, *range(3, 3 + 2 * d, 2), 2 + 2 * d)  # (B, h, w, T, P, P, C)
    return u.flatten(d + 2)                                                           # (B, h, w, T, P*P*C)


def unpatch(x, P):
    """(B, *grid, P*P, C) -> (B, *space, C), the inverse of `patches` for one frame."""
    B, *grid, _, C = x.shape
    d = len(grid)
    x = x.reshape(B, *grid, *[P] * d, C)                                              # (B, h, w, P, P, C)
    x = x.permute(0, *[axis for i in range(d) for axis in (1 + i, 1 + d + i)], 1 + 2 * d)
    return x.reshape(B, *[n * P for n in grid], C)                                    # (B, H, W, C)


# ------------------------------------------------------------------------------------------------ embedding

def interpolate(position, grid):
    """A position embedding (*grid', D) on another grid, (bi- or tri-)linearly; itself where the grid is the same."""
    if position.shape[:-1] == tuple(grid):
        return position
    mode = 'bilinear' if len(grid) == 2 else 'trilinear'
    field = F.interpolate(at_least_fp32(position).movedim(-1, 0)[None], size=tuple(grid), mode=mode)
    return field[0].movedim(0, -1).to(position.dtype)


class Embedding(nn.Module):
    """Patch embedding, Eq. (4), and temporal aggregation, Eq. (5): (B, T, *space, C) -> (B, *grid, D).

    z = sum_t W_t (z_t * cos(gamma t)), z_t = V GELU(conv([u_t, x, y, t])) + b + position. The paper writes
    exp(-i gamma t); DPOT takes its real part, and so do we.
    """

    def __init__(self, config):
        super().__init__()
        P, C, T, D, d = config.patch, config.channels, config.frames, config.width, config.dims
        E = C * P + d + 1
        bound = ((C + d + 1) * P ** d) ** -0.5          # fan-in of the patch conv, PyTorch's default for a conv
        self.P, self.C = P, C
        self.patch_weight = uniform(*[P] * d, C + d + 1, E, low=-bound, high=bound)
        self.patch_bias = uniform(E, low=-bound, high=bound)
        self.project = nn.Linear(E, D)
        self.position = nn.Parameter(nn.init.trunc_normal_(
            torch.empty(*[N // P for N in config.resolution], D), std=0.02))
        self.time_weight = nn.Parameter(torch.randn(T, D, D) / (T * D ** 0.5))
        self.gamma = nn.Parameter(2 ** torch.linspace(-10, 10, D))

    def coordinates(self, T, space):
        """The share of x, y, t, each in [0, 1], in the patch conv: a bias (*grid, T, E), a sum of one term an axis."""
        weight, d = self.patch_weight[..., self.C:, :], len(space)                    # (P, P, d+1, E)
        line = lambda n: torch.linspace(0, 1, n, device=weight.device, dtype=weight.dtype)
        bias = torch.outer(line(T), weight[..., d, :].flatten(0, -2).sum(0))          # (T, E)
        for axis, N in enumerate(space):
            w = weight[..., axis, :].movedim(axis, 0).flatten(1, -2).sum(1)           # (P, E)
            term = line(N).view(-1, self.P) @ w                                       # (N/P, E)
            bias = bias + term.view(*[-1 if i == axis else 1 for i in range(d)], 1, term.shape[-1])
        return bias + self.patch_bias

    def forward(self, u):
        B, T, *space, C = u.shape
        weight = self.patch_weight[..., :C, :].flatten(0, -2)                         # (P*P*C, E)
        g = F.gelu(patches(u, self.P) @ weight + self.coordinates(T, space))          # (B, *grid, T, E)
        time = torch.linspace(0, 1, T, device=u.device, dtype=self.gamma.dtype)
        wave = torch.cos(torch.outer(time, self.gamma))                               # (T, D)  cos(gamma t)
        # V, diag(wave_t) and W_t become one matrix a frame: nothing of size B*T*h*w*D is ever formed
        folded = torch.bmm(wave[:, None] * self.project.weight.T, self.time_weight)   # (T, E, D)
        z = g.flatten(-2) @ folded.flatten(0, 1)                                      # (B, *grid, D)
        position = interpolate(self.position, [N // self.P for N in space])           # (*grid, D)
        static = position + self.project.bias
        return z + static @ (wave[:, :, None] * self.time_weight).sum(0)              # Eq. (5)


# ------------------------------------------------------------------------------------------------ mixer and MLP

class Norm(nn.GroupNorm):
    """GroupNorm with 8 groups over channels-last tokens (B, *grid, D)."""

    def __init__(self, D):
        super().__init__(8, D)

    def forward(self, x):
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)


@functools.lru_cache(maxsize=64)
def fourier(n, modes, half, device, dtype):
    """The orthonormal DFT of n points as a real matrix F (2m, n or 2n); its transpose, weighted, is the inverse.

    m: the lowest `modes` frequencies of both signs, all if there are no more; half: the non-negative ones, for real
    input.
    Rows are ordered (real/imaginary, frequency), columns (point, real/imaginary), half: (point). Returns F and inverse.
    """
    k = torch.arange(n // 2 + 1)[:modes] if half else torch.arange(n)
    if not half and n > 2 * modes:
        k = torch.cat([k[:modes], k[-modes:]])
    angle = 2 * math.pi * (torch.outer(k, torch.arange(n)) % n).double() / n          # exact: integers modulo n
    cos, sin = angle.cos() / math.sqrt(n), angle.sin() / math.sqrt(n)                 # (m, n)
    if half:
        F_ = torch.cat([cos, -sin])
        twice = torch.where((k == 0) | (2 * k == n), 1.0, 2.0).double().repeat(2)     # for the frequencies not kept
        inverse = (twice[:, None] * F_).T
    else:
        F_ = torch.cat([torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)]).flatten(1)
        inverse = F_.T
    with torch.inference_mode(False):                                                 # or training could not reuse it
        return F_.to(device, dtype, copy=True), inverse.contiguous().to(device, dtype, copy=True)


# else a compiled graph would make the matrices anew in every pass; torch.compiler.assume_constant_result does no more,
# but imports the compiler, which takes half as long as torch itself
fourier.__wrapped__._dynamo_marked_constant = True


def complex_linear(x, weight, bias):
    """A complex linear layer as one real batched product, y = x W + b in complex numbers.

    x (K, N, 2*i) is [real | imaginary]; weight (2, K, i, o) and bias (2, K, o) hold real and imaginary parts. Returns
    (K, N, 2*o) = [real | imaginary].
    """
    re, im = weight
    matrix = torch.cat([torch.cat([re, im], 2), torch.cat([-im, re], 2)], 1)          # (K, 2i, 2o)
    return torch.baddbmm(torch.cat(tuple(bias), 1)[:, None].to(x.dtype), x, matrix.to(x.dtype))


class Mixer(nn.Module):
    """Fourier mixer, Eq. (8): K heads, each a two-layer complex MLP shared by all modes. (B, *grid, D) -> the same.

    skip: add the input to the output, as DPOT does; the paper's equation does not (see README, departures).
    modes: the lowest `modes` frequencies of either sign are kept on every axis, all where the grid has no more.
    The transforms are products with DFT matrices, axis by axis: for grids this small faster than an FFT, in real
    numbers throughout, and without a change of layout.
    """

    def __init__(self, config, skip):
        super().__init__()
        K, width = config.heads, config.width // config.heads
        self.K, self.modes, self.skip = K, config.modes, skip
        scale = width ** -2                                                           # DPOT's: U(0, 1/(D/K)^2)
        self.w1, self.w2 = (uniform(2, K, width, width, high=scale) for _ in range(2))
        self.b1, self.b2 = (uniform(2, K, width, high=scale) for _ in range(2))

    def forward(self, x):
        B, *grid, D = x.shape
        K, z = self.K, at_least_fp32(x)
        matrices = [fourier(n, self.modes, axis == len(grid) - 1, z.device, z.dtype) for axis, n in enumerate(grid)]
        with no_autocast(x):                                                          # transforms stay in fp32
            z = matrices[-1][0] @ z.reshape(-1, grid[-1], D)                          # (B*h, 2w', D)
            for axis in reversed(range(len(grid) - 1)):
                z = matrices[axis][0] @ z.reshape(B * math.prod(grid[:axis]), 2 * grid[axis], -1)   # (B, 2h', w'*D)
        modes = z.numel() // (2 * B * D)                                              # h' * w'
        z = z.view(B, 2, modes, K, D // K).permute(3, 0, 2, 1, 4).reshape(K, B * modes, 2 * D // K)
        z = F.gelu(complex_linear(z, self.w1, self.b1))                               # on real and imaginary parts
        z = complex_linear(z, self.w2, self.b2)                                       # (K, B*modes, 2D/K)
        z = z.view(K, B, modes, 2, D // K).permute(1, 3, 2, 0, 4).to(matrices[0][1].dtype)   # (B, 2, modes, K, D/K)
        with no_autocast(x):
            for axis, (_, inverse) in enumerate(matrices):
                z = inverse @ z.reshape(B * math.prod(grid[:axis]), inverse.shape[1], -1)
        z = z.view(x.shape).to(x.dtype)
        return x + z if self.skip else z


class Block(nn.Module):
    """One layer: mixer and MLP with their norms and, under residual='aot', the mappings of both sub-layers."""

    def __init__(self, config):
        super().__init__()
        D, aot = config.width, config.residual == 'aot'
        self.norm1, self.norm2 = Norm(D), Norm(D)
        self.mixer = Mixer(config, skip=not aot)
        self.mlp = nn.Sequential(nn.Linear(D, config.mlp), nn.GELU(), nn.Linear(config.mlp, D))
        if aot:
            self.post1, self.post2 = (Norm(D) if config.post_norm else nn.Identity() for _ in range(2))
            self.aot1, self.aot2 = AOT(config), AOT(config)

    def plain(self, x):
        """DPOT's layer: one residual round the pair. (B, *grid, D) -> the same."""
        return x + self.mlp(self.norm2(self.mixer(self.norm1(x))))

    def sublayers(self):
        """(mappings, F) of the two sub-layers, F with norms before and after (Sandwich-Norm, App. A.2)."""
        yield self.aot1, lambda x: self.post1(self.mixer(self.norm1(x)))
        yield self.aot2, lambda x: self.post2(self.mlp(self.norm2(x)))


# ------------------------------------------------------------------------------------------------ the AOT block

class AOT(nn.Module):
    """The three input-dependent mappings of a sub-layer, Eqs. (11) and (12).

    mean (B, S, D), GAP of the streams -> a (B, S) on the simplex, d (B, S) in (0, 2), T (B, S, S) doubly stochastic,
    whose row is the stream that results. A mapping switched off by `ablate` has no parameters: a is uniform, d ones,
    T the identity.
    """

    def __init__(self, config):
        super().__init__()
        S, D = config.streams, config.width
        self.S, self.iters = S, config.sinkhorn_iters
        self.sizes = {name: size for name, size in (('a', S), ('d', S), ('T', S * S)) if name not in config.ablate}
        if self.sizes:      # N(0, 1/(S D)): v has length sqrt(S D), so a logit starts as alpha times a standard normal
            self.phi = nn.Parameter(torch.randn(S * D, sum(self.sizes.values())) / math.sqrt(S * D))
        self.alpha = nn.ParameterDict({name: nn.Parameter(torch.tensor(config.alpha)) for name in self.sizes})
        self.bias = nn.ParameterDict({name: nn.Parameter(torch.eye(S).flatten() if name == 'T' else torch.zeros(size))
                                      for name, size in self.sizes.items()})

    def forward(self, mean):
        B, S, _ = mean.shape
        a, d = mean.new_full((B, S), 1 / S), mean.new_ones(B, S)
        T = torch.eye(S, dtype=mean.dtype, device=mean.device).expand(B, S, S)
        if not self.sizes:
            return a, d, T
        with no_autocast(mean):
            v = F.rms_norm(mean.flatten(1), [mean[0].numel()])                        # no gain: phi absorbs it
            parts = (v @ self.phi.to(v.dtype)).split(list(self.sizes.values()), dim=1)
            logits = {name: self.alpha[name] * part + self.bias[name]                 # Eq. (11)
                      for name, part in zip(self.sizes, parts)}
            if 'a' in logits:
                a = torch.sigmoid(logits['a'])
                a = a / a.sum(1, keepdim=True)                                        # Eq. (12)
            if 'd' in logits:
                d = 2 * torch.sigmoid(logits['d'])
            if 'T' in logits:
                # no check: a NaN must reach the loss, where train.py skips the step on all processes together
                T = sinkhorn(logits['T'].unflatten(1, (S, S)), self.iters, check=False)
        return a, d, T


class Combine(torch.autograd.Function):
    """x = sum_j w_j y_j as one product with a bank (outputs, B, N*D), w (B, J); backward is the same form.

    dL/dy_j = sum of w_mj g_m over the combines m >= j, where g_m is the gradient of x_m. Only the newest output is an
    input of the graph, so combine m runs backward after all later ones; then y_m is needed no more and g_m takes its
    place in the bank: every gradient is formed once, not accumulated combine by combine. `later` holds {m: w_m}.
    """

    @staticmethod
    def forward(ctx, w, y, bank, later):
        J = w.shape[1]
        bank[J - 1] = y.flatten(1)
        ctx.save_for_backward(w)
        ctx.bank, ctx.later, ctx.dtype = bank, later, y.dtype
        with no_autocast(w):
            return torch.bmm(w[:, None], bank[:J].transpose(0, 1)).view(y.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        bank, later, w = ctx.bank, ctx.later, ctx.saved_tensors[0].detach()           # `later` must not hold the graph
        m = w.shape[1] - 1
        if m in later:
            raise RuntimeError('the streams of a forward pass can be run backward once: their outputs are overwritten')
        with no_autocast(w):
            g_w = torch.bmm(g.reshape(len(w), 1, -1), bank[:m + 1].permute(1, 2, 0))[:, 0]        # (B, J)  <g, y_j>
            bank[m], later[m] = g.flatten(1), w
            w_m = torch.stack([later[k][:, m] for k in range(m, m + len(later))], 1)              # newest first
            g_y = torch.bmm(w_m[:, None], bank[m:m + len(later)].transpose(0, 1))
        return g_w, g_y.view(g.shape).to(ctx.dtype), None, None


class Streams:
    """The S streams of a batch, kept as combinations x^(i) = sum_j c_ij y_j of the sub-layer outputs y_0 ... y_J.

    a, d and T are one matrix per sample, so Eq. (9), x <- T x + d^T F(a x), acts on the small c (B, S, J) alone; no
    tensor of S times the tokens is ever formed. All streams start as copies of y (B, *grid, D). c stays in fp32 inside
    autocast: rounded to bf16 at every sub-layer it would no longer hold averages.
    outputs: how many there will be. Every output is followed by one `combine`.
    """

    def __init__(self, y, S, outputs):
        self.y, self.means, self.later = [y], [self.pool(y)], {}
        self.c = self.means[0].new_ones(len(y), S, 1)                                 # (B, S, J)
        self.bank = self.c.new_empty(outputs, len(y), y[0].numel()) if unfused(y) else None

    @staticmethod
    def pool(y):
        return at_least_fp32(y).flatten(1, -2).mean(1)                                # (B, D)  GAP

    def mean(self):
        """GAP of every stream, (B, S, D)."""
        with no_autocast(self.c):
            return self.c @ torch.stack(self.means, 1)

    def combine(self, weights):
        """sum_i weights_i x^(i): weights (B, S) -> (B, *grid, D)."""
        with no_autocast(self.c):
            weights = (weights[:, None] @ self.c)[:, 0]                               # (B, J)
        if self.bank is not None:
            [newest], self.y = self.y, []
            return Combine.apply(weights, newest, self.bank, self.later)
        weights = weights.T.reshape(len(self.y), -1, *[1] * (self.y[0].ndim - 1))     # one number a sample and output
        x = weights[0] * self.y[0]
        for weight, y in zip(weights[1:], self.y[1:]):
            x = torch.addcmul(x, weight, y)
        return x

    def update(self, T, d, y):
        """Eq. (9): T (B, S, S), d (B, S), y = F(a x) (B, *grid, D)."""
        with no_autocast(self.c):
            self.c = torch.cat([T @ self.c, d[:, :, None]], dim=2)
        self.y.append(y)
        self.means.append(self.pool(y))


# ------------------------------------------------------------------------------------------------ readout

class Readout(nn.Module):
    """Transposed conv P x P -> GELU -> 1x1 -> GELU -> 1x1: (B, *grid, D) -> (B, *space, C).

    The 1x1 layers act before the patches are laid out, where they are the same products on less scattered memory.
    """

    def __init__(self, config):
        super().__init__()
        D, O, self.P = config.width, config.out_width, config.patch
        pixels = self.P ** config.dims
        bound = (O * pixels) ** -0.5                    # PyTorch's default for a transposed conv
        self.weight = uniform(D, pixels, O, low=-bound, high=bound)
        self.bias = uniform(O, low=-bound, high=bound)
        self.pointwise = nn.Sequential(nn.GELU(), nn.Linear(O, O), nn.GELU(), nn.Linear(O, config.channels))

    def forward(self, x):
        y = (x @ self.weight.flatten(1)).unflatten(-1, self.weight.shape[1:]) + self.bias   # (B, *grid, P*P, O)
        return unpatch(self.pointwise(y), self.P)


# ------------------------------------------------------------------------------------------------ the network

class AOTPOT(nn.Module):
    """The next frame from T frames: u (B, T, H, W, C) -> (B, H, W, C), any H, W divisible by P.

    config: a configs.ModelConfig, e.g. configs.model('tiny'). residual='plain' is DPOT.
    Raises InputError where the shape of u does not fit the config.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        if config.residual == 'aot':
            self.gate = nn.Parameter(torch.zeros(config.streams))                     # w of Eq. (13)
        self.readout = Readout(config)

    def forward(self, u):
        self.check(u)
        x = self.embed(u)                                                             # (B, *grid, D)  Eqs. (4), (5)
        if self.config.residual == 'plain':
            for block in self.blocks:
                x = block.plain(x)
            return self.readout(x)                                                    # (B, *space, C)
        streams = Streams(x, self.config.streams, 2 * len(self.blocks) + 1)           # S equal copies
        for block in self.blocks:
            for mappings, sublayer in block.sublayers():
                a, d, T = mappings(streams.mean())                                    # Eqs. (11), (12)
                y = sublayer(streams.combine(a))                                      # F(a x)
                streams.update(T, d, y)                                               # Eq. (9)
        gate = torch.softmax(self.gate, 0).expand(len(u), -1)
        return self.readout(streams.combine(gate))                                    # Eq. (13) -> (B, *space, C)

    def check(self, u):
        config = self.config
        if u.ndim != config.dims + 3 or u.shape[1] != config.frames or u.shape[-1] != config.channels:
            axes = 'HWD'[:config.dims]
            raise InputError(f'input of shape {tuple(u.shape)}; this model takes (B, {config.frames}, '
                             f'{", ".join(axes)}, {config.channels})')
        if any(N % config.patch for N in u.shape[2:-1]):
            raise InputError(f'grid {show(tuple(u.shape[2:-1]))} is not divisible by the patch size {config.patch}')


def parameters(model):
    """The number of parameters of a module."""
    return sum(parameter.numel() for parameter in model.parameters())


# ------------------------------------------------------------------------------------------------ checkpoints

def from_checkpoint(saved):
    """The network of a dict from `checkpoint.read`, with its weights, in evaluation mode."""
    model = AOTPOT(ModelConfig(**saved['config']['model']))
    model.load_state_dict(saved['model'])
    return model.eval()


def load(path):
    """The network in a checkpoint of train.py: `aotpot.load('out/nano/best.pt')`."""
    return from_checkpoint(checkpoint.read(path))


def from_dpot(path):
    """The network in a checkpoint of DPOT's own code, such as its published model_Ti.pth; residual='plain'.

    Raises InputError as `checkpoint.read`, and where the checkpoint is not DPOT's.
    """
    saved = checkpoint.read(path)
    if 'train' in saved['config']:
        raise InputError(f'{path}: a checkpoint of train.py; read it with aotpot.load')
    return from_checkpoint(saved)
