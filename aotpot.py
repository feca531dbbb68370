"""AOT-POT as the paper prints it, in the paper's order (Sec. 4; equations are numbered as printed).

    u (B, T, H, W, C)                                  T frames of a field
      -> PatchEmbedding       (B, T, h, w, D)          Eq. (4)
      -> TemporalAggregation  (B, h, w, D)             Eq. (5)
      -> S equal streams      (B, S, h, w, D)
      -> depth x Layer        (B, S, h, w, D)          Eq. (9) round the mixer, Eq. (8), and the MLP
      -> gated sum            (B, h, w, D)             Eq. (13)
      -> Readout              (B, H, W, C)             the next frame

B batch   T input frames   H, W grid points   C field channels   P patch size   h, w latent grid
D token width (C in the paper's Sec. 4)   S streams (n in the paper)   K heads (h in the paper)
a_l, d_l, T_l are the three mappings of sub-layer l, as in the paper; T alone counts frames.
In three dimensions the grid is (H, W, depth): `space` and `grid` in a shape are two or three axes.

The streams are Hyper-Connections (Zhu et al., arXiv 2409.19606). Their doubly stochastic mixing is
mHC (Xie et al., arXiv 2512.24880), the paper's stated source; docs/findings.md names others.

nets/fast.py computes the same function in less work. The commands use it as long as the two agree,
and this file as soon as somebody changes an equation in it.
"""
import torch
import torch.nn.functional as F
from torch import nn

from configs import NORM_GROUPS, InputError, ModelConfig, show
from sinkhorn import sinkhorn

# ---------------------------------------------------------------------------------------- precision
# 16 bits are too few for input, prediction, Fourier transforms, streams, Sinkhorn and the choice of experts.

def no_autocast(x):
    """A region without autocast on the device of x."""
    return torch.autocast(x.device.type, enabled=False)


def at_least_fp32(x):
    """x in float32, or as it is if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def weighted(equation, weights, x):
    """torch.einsum of weights (B, ...) and x, in fp32: bf16 streams would not hold averages."""
    with no_autocast(x):
        return torch.einsum(equation, weights, x.to(weights.dtype)).to(x.dtype)


# ---------------------------------------------------------------------------------- patch embedding

class PatchEmbedding(nn.Module):
    """Patches with their coordinates become tokens, Eq. (4): (B, T, *space, C) -> (B, T, *grid, D).

    The paper adds W_p (x, y, t) to the field. Here, as in DPOT, x, y, t are further channels, and
    the P x P convolution, with C P + 3 outputs, holds W_p. GELU and a 1x1 convolution to D follow.
    """

    def __init__(self, config):
        super().__init__()
        conv = nn.Conv2d if config.dims == 2 else nn.Conv3d
        hidden = config.channels * config.patch + config.dims + 1
        self.conv = conv(config.channels + config.dims + 1, hidden, config.patch, stride=config.patch)
        self.project = nn.Linear(hidden, config.width)                  # a 1x1 convolution
        grid = [N // config.patch for N in config.resolution]
        self.position = nn.Parameter(torch.empty(config.width, *grid))

    def forward(self, u):
        B, T = u.shape[:2]
        p = self.coordinates(u)                                         # (T, *space, 3)
        z = torch.cat([u, p.expand(B, *p.shape)], -1)                   # (B, T, *space, C+3)
        z = z.flatten(0, 1).movedim(-1, 1)                              # (B*T, C+3, *space)
        z = F.gelu(self.conv(z)).movedim(1, -1)                         # (B*T, *grid, C*P+3)
        z = self.project(z) + self.position_on(z.shape[1:-1])           # Eq. (4)
        return z.unflatten(0, (B, T))                                   # (B, T, *grid, D)

    @staticmethod
    def coordinates(u):
        """x, y and t in [0, 1] of every point of the frames u (B, T, *space, C): (T, *space, 3)."""
        axes = [torch.linspace(0, 1, N, device=u.device, dtype=u.dtype) for N in u.shape[1:-1]]
        time, *places = torch.meshgrid(*axes, indexing='ij')            # (T, *space) each
        return torch.stack([*places, time], -1)

    def position_on(self, grid):
        """The position embedding on this latent grid, (*grid, D)."""
        return self.resize(self.position, grid).movedim(0, -1)

    @staticmethod
    def resize(position, grid):
        """A position embedding (D, *grid') interpolated linearly to another grid: (D, *grid)."""
        if position.shape[1:] == tuple(grid):
            return position
        mode = 'bilinear' if len(grid) == 2 else 'trilinear'
        x = at_least_fp32(position)[None]
        return F.interpolate(x, tuple(grid), mode=mode)[0].to(position)


class TemporalAggregation(nn.Module):
    """The frames become one, Eq. (5): (B, T, *grid, D) -> (B, *grid, D).

    z_agg = sum_t W_t (z_t * cos(gamma t)), t in [0, 1]. As in DPOT, the cosine is the real part of
    the paper's exp(-i gamma t).
    """

    def __init__(self, config):
        super().__init__()
        D = config.width
        self.weight = nn.Parameter(torch.empty(config.frames, D, D))
        self.gamma = nn.Parameter(torch.empty(D))

    def waves(self):
        """cos(gamma t) for every frame, (T, D)."""
        gamma = self.gamma
        t = torch.linspace(0, 1, len(self.weight), device=gamma.device, dtype=gamma.dtype)
        return torch.cos(torch.outer(t, gamma))

    def forward(self, z):
        return torch.einsum('bt...d,td,tde->b...e', z, self.waves(), self.weight)   # Eq. (5)


# --------------------------------------------------------------------------------------- sub-layers

class Norm(nn.GroupNorm):
    """GroupNorm for channels-last tokens (B, *grid, D)."""

    def __init__(self, D):
        super().__init__(NORM_GROUPS, D)

    def forward(self, x):
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)


class FourierMixer(nn.Module):
    """A two-layer complex MLP on each Fourier mode, in K heads, Eq. (8): (B, *grid, D) -> the same.

    An integral operator with a translation-invariant kernel, Eq. (6), multiplies every mode by the
    transform of the kernel, Eq. (7). Here one MLP, the same for all modes, replaces this product.
    As in AFNO and DPOT, it acts on half of the spectrum, which determines a real field. It keeps
    -modes <= k < modes on every axis, and so 0 <= k < modes on the last one, the half axis of rfft.
    There a grid of n = 2 modes points loses its Nyquist frequency k = n/2, as in DPOT.
    inner_skip: add the input to the output, as in DPOT but not in Eq. (8).
    """

    def __init__(self, config, inner_skip):
        super().__init__()
        self.K = config.heads
        self.modes = config.modes
        self.inner_skip = inner_skip
        width = config.width // config.heads                            # below: (real and imaginary part, K, ...)
        self.w1 = nn.Parameter(torch.empty(2, self.K, width, width))
        self.w2 = nn.Parameter(torch.empty(2, self.K, width, width))
        self.b1 = nn.Parameter(torch.empty(2, self.K, width))
        self.b2 = nn.Parameter(torch.empty(2, self.K, width))

    def forward(self, x):
        grid = x.shape[1:-1]
        axes = tuple(range(1, x.ndim - 1))
        with no_autocast(x):                                            # there is no complex bf16
            parameters = self.w1, self.w2, self.b1, self.b2
            w1, w2, b1, b2 = (torch.complex(*at_least_fp32(p)) for p in parameters)
            z = torch.fft.rfftn(at_least_fp32(x), dim=axes, norm='ortho')       # (B, h, w/2+1, D)
            z = z.unflatten(-1, (self.K, -1))                                   # (..., K, D/K)
            z = torch.einsum('b...ki,kio->b...ko', z, w1) + b1
            z = torch.complex(F.gelu(z.real), F.gelu(z.imag))
            z = torch.einsum('b...ki,kio->b...ko', z, w2) + b2
            z = z.flatten(-2) * self.mode_mask(grid).to(x.device)[..., None]
            z = torch.fft.irfftn(z, s=grid, dim=axes, norm='ortho').to(x.dtype)         # Eq. (8)
        return x + z if self.inner_skip else z

    def mode_mask(self, grid):
        """Which modes of the half spectrum are kept, booleans (h, w/2+1) or (h, w, depth/2+1)."""
        axes = [torch.fft.fftfreq(n, 1 / n).round() for n in grid[:-1]]         # 0, 1, ..., -2, -1
        axes.append(torch.arange(grid[-1] // 2 + 1))                            # 0, 1, ..., n/2
        masks = [(k >= -self.modes) & (k < self.modes) for k in axes]
        return torch.stack(torch.meshgrid(*masks, indexing='ij')).all(0)


# ------------------------------------------------------------------------------------ the AOT block

class AOTBlock(nn.Module):
    """The block round a sub-layer F of (B, *grid, D), Eq. (9): x (B, S, *grid, D) -> the same."""

    def __init__(self, config):
        super().__init__()
        self.mappings = Mappings(config)

    def forward(self, x, sublayer):
        a_l, d_l, T_l = self.mappings(at_least_fp32(x).flatten(2, -2).mean(2))  # GAP
        y = sublayer(weighted('bs,bs...->b...', a_l, x))                        # F(a_l x_l)
        mixed = weighted('brs,bs...->br...', T_l, x)                            # T_l x_l
        return mixed + weighted('br,b...->br...', d_l, y)                       # Eq. (9)


class Mappings(nn.Module):
    """The mappings of one sub-layer for each input: a_l (B, S), d_l (B, S) and T_l (B, S, S).

    a_l is on the simplex, d_l in (0, 2) and T_l doubly stochastic; a row of it is a new stream.
    mean: (B, S, D), the means of the streams over the grid.
    config.ablate: letters of mappings that are fixed, at a_l = 1/S, d_l = 1 or T_l = I.
    """

    def __init__(self, config):
        super().__init__()
        S = config.streams
        D = config.width
        self.iters = config.sinkhorn_iters
        self.phi_a = nn.Parameter(torch.empty(S * D, S))
        self.alpha_a = nn.Parameter(torch.tensor(float(config.alpha)))
        self.b_a = nn.Parameter(torch.zeros(S))
        self.phi_d = nn.Parameter(torch.empty(S * D, S))
        self.alpha_d = nn.Parameter(torch.tensor(float(config.alpha)))
        self.b_d = nn.Parameter(torch.zeros(S))
        self.phi_T = nn.Parameter(torch.empty(S * D, S * S))
        self.alpha_T = nn.Parameter(torch.tensor(float(config.alpha)))
        self.b_T = nn.Parameter(config.t_init * torch.eye(S))
        for name, parameter in [*self.named_parameters()]:
            if name[-1] in config.ablate:               # 0, neither learned nor saved
                delattr(self, name)
                self.register_buffer(name, torch.zeros_like(parameter), persistent=False)
        if 'T' in config.ablate:
            self.b_T = 1e4 * (torch.eye(S) - 1)         # exp(b_T) = I, and so T_l = I

    def forward(self, mean):
        _, S, D = mean.shape
        with no_autocast(mean):
            v = F.rms_norm(mean.flatten(1), [S * D])                    # phi would absorb a gain
            a_tilde = self.alpha_a * (v @ self.phi_a.to(v)) + self.b_a                  # Eq. (11)
            d_tilde = self.alpha_d * (v @ self.phi_d.to(v)) + self.b_d
            T_tilde = self.alpha_T * (v @ self.phi_T.to(v)).unflatten(1, (S, S)) + self.b_T
            a_l = torch.sigmoid(a_tilde)
            a_l = a_l / a_l.sum(1, keepdim=True)                                        # Eq. (12)
            d_l = 2 * torch.sigmoid(d_tilde)
            T_l = sinkhorn(T_tilde, self.iters)                                         # Eq. (10)
        return a_l, d_l, T_l


class Layer(nn.Module):
    """Mixer and MLP, each in an AOT block with a norm before and after (Sandwich-Norm, App. B.2).

    x (B, S, *grid, D) -> the same. residual='plain' is DPOT's layer, with experts MoE-POT's: one
    stream (B, *grid, D), one residual round the pair, an inner skip and by default no norm after.
    """

    def __init__(self, config, experts):
        super().__init__()
        D = config.width
        self.residual = config.residual
        self.norm1 = Norm(D)
        self.norm2 = Norm(D)
        self.mixer = FourierMixer(config, inner_skip=config.inner_skip or self.residual == 'plain')
        if config.experts:
            self.mlp = experts(config)
        else:
            self.mlp = nn.Sequential(nn.Linear(D, config.mlp), nn.GELU(), nn.Linear(config.mlp, D))
        self.post1 = Norm(D) if config.sandwich and self.residual == 'aot' else nn.Identity()
        self.post2 = Norm(D) if config.sandwich else nn.Identity()
        if self.residual == 'aot':
            self.aot1 = AOTBlock(config)
            self.aot2 = AOTBlock(config)

    def forward(self, x):
        if self.residual == 'plain':
            return x + self.post2(self.mlp(self.norm2(self.mixer(self.norm1(x)))))
        x = self.aot1(x, lambda u: self.post1(self.mixer(self.norm1(u))))
        return self.aot2(x, lambda u: self.post2(self.mlp(self.norm2(u))))


# ------------------------------------------------------------------------------------------ readout

class Readout(nn.Module):
    """Tokens become the next frame: transposed P x P convolution -> GELU -> 1x1 -> GELU -> 1x1.

    x (B, *grid, D) -> (B, *space, C).
    overlap, not in the paper: each token reaches half a patch beyond its own.
    """

    def __init__(self, config):
        super().__init__()
        conv = nn.ConvTranspose2d if config.dims == 2 else nn.ConvTranspose3d
        P = config.patch
        width = config.out_width
        margin = P // 2 if config.overlap else 0
        self.conv = conv(config.width, width, P + 2 * margin, stride=P, padding=margin)
        self.hidden = nn.Linear(width, width)
        self.project = nn.Linear(width, config.channels)

    def forward(self, x):
        x = F.gelu(self.conv(x.movedim(-1, 1)).movedim(1, -1))          # (B, *space, out_width)
        with no_autocast(x):                            # bf16 rounds fields by 0.0017 of their size
            x = self.hidden(x.to(self.hidden.weight.dtype))
            return self.project(F.gelu(x))                              # (B, *space, C)


# --------------------------------------------------------------------------------------- conditions

class FiLM(nn.Module):
    """Feature-wise linear modulation (Perez et al. 2018) of the tokens, not in the paper.

    It tells them the mean and the deviation that data.py took from a single sample, numbers without
    units, by the layers of DPOT's --normalize 1. x (B, *grid, D), condition (B, 2, C) -> as x.
    """

    def __init__(self, config):
        super().__init__()
        self.scale = nn.Linear(2 * config.channels, config.width)
        self.shift = nn.Linear(2 * config.channels, config.width)

    def forward(self, x, condition):
        condition = condition.reshape(len(x), *[1] * (x.ndim - 2), -1)
        return self.scale(condition) * x + self.shift(condition)


# -------------------------------------------------------------------------------------- the network

class AOTPOT(nn.Module):
    """G_w of Eq. (2): T frames of a solution of some PDE, Eq. (1), become the next one.

    u (B, T, H, W, C) -> (B, H, W, C), for any H, W divisible by P.
    condition: (B, 2, C), with config.normalize, see `FiLM`; None: nothing was taken from a sample.
    config: such as configs.model('tiny'). experts: nets.experts.Experts, if config.experts > 0.
    """

    def __init__(self, config: ModelConfig, experts=None):
        super().__init__()
        if config.experts and experts is None:
            raise InputError(f'experts {config.experts}: AOTPOT needs their class, nets.experts.Experts')
        self.config = config
        self.embed = PatchEmbedding(config)
        self.aggregate = TemporalAggregation(config)
        self.layers = nn.ModuleList(Layer(config, experts) for _ in range(config.depth))
        if config.residual == 'aot':
            self.gate = nn.Parameter(torch.zeros(config.streams))       # w of Eq. (13)
        self.readout = Readout(config)
        if config.normalize:
            self.film = FiLM(config)
        ChannelMap = nn.Linear if config.channel_maps else nn.Identity
        self.map_in = ChannelMap(config.channels, config.channels)      # W_in, Sec. 3
        self.map_out = ChannelMap(config.channels, config.channels)     # W_out
        init_weights(self)
        for layer in (self.map_in, self.map_out):                       # those of another run stay
            layer.requires_grad_(config.channel_maps == 'learned')

    def forward(self, u, condition=None):
        self.check(u)
        with no_autocast(u):
            u = self.map_in(u)
        if condition is None:
            condition = u.new_tensor([[0.0], [1.0]]).expand(len(u), 2, u.shape[-1])
        v = self.predict(u, condition)
        with no_autocast(u):
            return self.map_out(v + u[:, -1] if self.config.change else v)

    def predict(self, u, condition):
        """u (B, T, *space, C), and with config.normalize the condition (B, 2, C) -> (B, *space, C)."""
        with no_autocast(u):                                            # bf16 would round the input
            z = self.embed(u)                                           # (B, T, *grid, D)  Eq. (4)
            x = self.aggregate(z)                                       # (B, *grid, D)     Eq. (5)
            if self.config.normalize:
                x = self.film(x, condition)
        if self.config.residual == 'aot':
            x = x[:, None].expand(-1, self.config.streams, *x.shape[1:])        # (B, S, *grid, D)
        for layer in self.layers:
            x = layer(x)                                                        # Eqs. (8) to (12)
        if self.config.residual == 'aot':
            x = weighted('s,bs...->b...', torch.softmax(self.gate, 0), x)       # Eq. (13)
        return self.readout(x)                                                  # (B, *space, C)

    def check(self, u):
        """Raise InputError for an input that the network does not take."""
        config = self.config
        space = tuple(u.shape[2:-1])
        if u.ndim != config.dims + 3 or u.shape[1:] != (config.frames, *space, config.channels):
            takes = ', '.join(['B', str(config.frames), *'HWD'[:config.dims], str(config.channels)])
            raise InputError(f'the input has shape {tuple(u.shape)}; this model takes ({takes})')
        if any(N % config.patch for N in space):
            raise InputError(f'the grid {show(space)} is not divisible by patch {config.patch}')


@torch.no_grad()
def init_weights(model):
    """Every group of parameters, its distribution at the start, and why.

    Conv, Linear                 U(+-1 / sqrt(fan in)), PyTorch's default: DPOT's.
    GroupNorm                    weight 1, bias 0, PyTorch's default.
    PatchEmbedding.position      N(0, 0.02^2), truncated: DPOT's.
    TemporalAggregation.weight   N(0, 1 / (T sqrt(D))^2): DPOT's.
    TemporalAggregation.gamma    2^-10 ... 2^10: DPOT's, from a constant to noise.
    FourierMixer                 U(0, 1 / (D/K)^2): DPOT's. The mixer starts as a small constant.
    Mappings.phi                 N(0, 1 / (S D)): |v| = sqrt(S D), so logits start as alpha N(0, 1).
    Mappings.alpha               config.alpha; with 0 the network is x + F(x), whatever T_l.
    Mappings.b_a, b_d, b_T       0, 0, config.t_init I, in the paper I: a_l is uniform, d_l is 1.
    FiLM                         weights 0, shift 0, scale 1: it begins as the identity.
    gate                         0, the uniform mean of the streams, Eq. (13).
    map_in, map_out              the identity, bias 0.
    """
    for module in model.modules():
        if isinstance(module, PatchEmbedding):
            nn.init.trunc_normal_(module.position, std=0.02)
        elif isinstance(module, TemporalAggregation):
            T, D, _ = module.weight.shape
            module.weight.normal_(std=1 / (T * D ** 0.5))
            module.gamma.copy_(2 ** torch.linspace(-10, 10, D))
        elif isinstance(module, FourierMixer):
            for parameter in (module.w1, module.w2, module.b1, module.b2):
                parameter.uniform_(0, module.w1.shape[-1] ** -2)
        elif isinstance(module, FiLM):
            for parameter in module.parameters():
                parameter.zero_()
            module.scale.bias.fill_(1)
        elif isinstance(module, Mappings):
            for name, parameter in module.named_parameters():
                if name.startswith('phi'):
                    parameter.normal_(std=len(parameter) ** -0.5)
    for module in (model.map_in, model.map_out):
        if isinstance(module, nn.Linear):                               # else nn.Identity
            nn.init.eye_(module.weight)
            nn.init.zeros_(module.bias)


def parameters(model):
    """The number of parameters of a module."""
    return sum(parameter.numel() for parameter in model.parameters())
