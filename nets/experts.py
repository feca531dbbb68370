"""The mixture of experts of MoE-POT, a baseline of the paper, in the place of the MLP (--experts).

B batch   D token width   h inputs of an expert   E experts   k experts that a sample takes
`grid` stands for h, w.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from aotpot import at_least_fp32, no_autocast, parameters, weighted


class BatchNorm(nn.BatchNorm1d):
    """PyTorch's, over the samples of this process; a frozen one is always as in evaluation."""

    def train(self, mode=True):
        return super().train(mode and self.weight.requires_grad)


class Router(nn.Module):
    """MoE-POT's choice of experts for a sample: features f (B, *grid, h) -> weights (B, E).

        v = GELU(BN(W_1 mean f))            v <- v * sigmoid(2 phi(v))
        s = W_3 GELU(BN(W_2 v))             w = softmax(top-k(s) / tau)

    All but the k largest weights are 0. The mean is over the grid. phi is an attention over
    channels that adds pools by average and by maximum, equal on a single point: hence the 2.
    `after_step` lowers the temperature tau.
    """

    def __init__(self, h, E, k):
        super().__init__()
        self.k = k
        self.weights = None                 # of the last training pass, for `balance_loss`
        self.load = None                    # the mean share of each expert in it, for `after_step`
        self.register_buffer('tau', torch.tensor(2.0))
        self.w1 = nn.Linear(h, 2 * h)
        self.norm1 = BatchNorm(2 * h)
        self.squeeze = nn.Linear(2 * h, 2 * h // 16)                    # phi
        self.excite = nn.Linear(2 * h // 16, 2 * h)
        self.w2 = nn.Linear(2 * h, h)
        self.norm2 = BatchNorm(h)
        self.w3 = nn.Linear(h, E)

    def forward(self, f):
        with no_autocast(f):                                    # bf16 would round the choice
            v = at_least_fp32(f).flatten(1, -2).mean(1).to(self.w1.weight.dtype)        # (B, h)
            v = F.gelu(self.norm1(self.w1(v)))                                          # (B, 2h)
            v = v * torch.sigmoid(2 * self.excite(F.gelu(self.squeeze(v))))
            s = self.w3(F.gelu(self.norm2(self.w2(v))))                                 # (B, E)
            best, chosen = s.topk(self.k)
            w = torch.zeros_like(s).scatter(1, chosen, torch.softmax(best / self.tau, 1))
        if self.training:
            self.weights = w
        return w


class Experts(nn.Module):
    """MoE-POT's mixture of experts in the place of the MLP: tokens z (B, *grid, D) -> the same.

        f = GELU(W z)        out = mean_i GELU(S_i f) + sum_e w_e GELU(V_e f), S_i: shared by all

    The experts are one parameter, which has a gradient whoever is chosen.
    """

    def __init__(self, config):
        super().__init__()
        D, h, E = config.width, config.mlp, config.experts
        self.features = nn.Linear(D, h)
        self.router = Router(h, E, config.top_k)

        def draw(*shape):               # U(+-1 / sqrt(fan in)), PyTorch's default, as in MoE-POT
            return nn.Parameter(torch.empty(shape).uniform_(-h ** -0.5, h ** -0.5))
        self.shared_weight = draw(config.shared, D, h)
        self.weight = draw(E, D, h)
        self.shared_bias = draw(config.shared, D)
        self.bias = draw(E, D)

    def forward(self, z):
        f = F.gelu(self.features(z))                                    # (B, *grid, h)
        w = self.router(f)                                              # (B, E)
        shared = [F.gelu(F.linear(f, W, b)) for W, b in zip(self.shared_weight, self.shared_bias)]
        experts = [F.gelu(F.linear(f, W, b)) for W, b in zip(self.weight, self.bias)]
        chosen = sum(weighted('b,b...->b...', w_e, y) for w_e, y in zip(w.T, experts))
        return sum(shared) / len(shared) + chosen


def expert_layers(model):
    """The Experts of all layers, in order."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def balance_loss(model):
    """MoE-POT's loss of the last training pass, sum_layers mean_e (sum_b w_be - B/E)^2, over B.

    It is differentiable, of the B samples of this process, and 0 without experts. It is taken once
    after each forward pass of a training: it notes the shares of the experts and lets go of the
    graph.
    """
    routers = [layer.router for layer in expert_layers(model)]
    if not routers:
        return 0.0
    weights = torch.stack([router.weights for router in routers], 1)            # (B, layers, E)
    shares = weights.mean(0)
    for router, share in zip(routers, shares.detach()):
        router.weights = None
        router.load = share
    return len(weights) * (shares - 1 / shares.shape[1]).square().mean(1).sum()


@torch.no_grad()
def after_step(model):
    """The mean share of each expert in the last pass whose `balance_loss` was taken, (layers, E).

    This lowers the temperature of every router by a hundredth, from 2 down to 1/2: not between the
    passes of a step, for a compiled backward pass would see it. Of several processes all take the
    statistics of the first, as last.pt does.
    """
    routers = [layer.router for layer in expert_layers(model)]
    for router in routers:
        router.tau.mul_(0.99).clamp_(min=0.5)
        if dist.is_initialized():
            for buffer in router.buffers():
                dist.broadcast(buffer, 0)
    return torch.stack([router.load for router in routers])


def freeze_routers(model):
    """Fine-tune as MoE-POT: routers and W stay as they are, with their BatchNorm in evaluation mode,
    and tau is 1/2.
    """
    for layer in expert_layers(model):
        layer.features.requires_grad_(False)
        layer.router.requires_grad_(False).train()
        layer.router.tau.fill_(0.5)


def activated(model):
    """The number of parameters that a sample uses: without the experts that it does not take."""
    unused = 1 - model.config.top_k / max(model.config.experts, 1)
    experts = sum(layer.weight.numel() + layer.bias.numel() for layer in expert_layers(model))
    return parameters(model) - round(unused * experts)
