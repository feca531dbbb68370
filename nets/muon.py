"""Muon, an optimizer for the matrices of a network. This file needs only torch: copy it.

The momentum of a matrix is replaced by the nearest matrix whose singular values are all one, so
that a step changes all directions of the matrix alike. From K. Jordan et al., Muon: An optimizer
for hidden layers in neural networks, 2024 (https://kellerjordan.github.io/posts/muon), and for
large networks Liu et al., arXiv 2502.16982. Not in the paper.

    optimizer = Muon({'matrix': [layer.weight]}, rest=[layer.bias], lr=1e-2)   # layer: an nn.Linear
"""
from collections import defaultdict

import torch


def orthogonalize(G, rounds=5):
    """Roughly the U V^H of the singular value decompositions G = U diag(s) V^H, (..., m, n) alike.

    Each Newton-Schulz round takes every singular value s of the matrix over its Frobenius norm to
    a s + b s^3 + c s^5. Five rounds bring those of 0.003 to 1 into 0.68 to 1.21; zero stays zero.
    G: real or complex matrices, in whose precision it computes; bf16 suffices.
    """
    a, b, c = 3.4445, -4.7750, 2.0315                                                   # Jordan's
    X = G.flatten(0, -3) if G.ndim > 2 else G[None]                                     # (N, m, n)
    tall = X.shape[1] > X.shape[2]
    if tall:
        X = X.mH
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp_min(1e-12)
    for _ in range(rounds):
        A = torch.bmm(X, X.mH)                                      # (N, m, m), of the shorter side
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)                 # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)                          # a X + B X
    return (X.mH if tall else X).reshape(G.shape)


def matrices_of(x, form):
    """A tensor as a batch of matrices: (N, m, n), or real and imaginary parts (2, N, m, n)."""
    if form == 'matrix':
        return x.flatten(1)[None]
    parts = [2] if form == 'complex' else []
    return x.reshape(*parts, -1, *x.shape[-2:])


class Muon(torch.optim.AdamW):
    """Muon for matrices, and AdamW for the rest of the parameters.

    The update of a matrix is orthogonalize(Nesterov's momentum) times sqrt(max(1, m / n)) and the
    learning rate of its group. A matrix without a gradient, such as that of an expert which no
    sample took, stays as it is.
    matrices: {form: parameters} with m outputs and n inputs, squares in any order. 'matrix': (m, n) or a kernel
        (m, n1, n2). 'stack': (..., m, n). 'complex': (2, ..., m, n), real and imaginary parts.
    rest: the parameters for AdamW, whose other arguments are `settings`.
    ratio: of the first learning rate of the matrices to that of the rest.
    half: products of real matrices are in bf16, which is slow on processors without them.
    """

    def __init__(self, matrices, rest, ratio=1.0, momentum=0.95, half=False, **settings):
        groups = [{'params': rest, 'form': '', 'ratio': 1.0}]
        groups += [{'params': parameters, 'form': form, 'ratio': ratio, 'momentum': momentum}
                   for form, parameters in matrices.items()]
        super().__init__([group for group in groups if group['params']], **settings)
        self.half = half
        for group in self.param_groups:
            group['lr'] *= group['ratio']

    @torch.no_grad()
    def step(self, closure=None):
        """One step, from the gradients of all parameters -> the loss of `closure`, called first."""
        with torch.enable_grad():
            loss = closure() if closure else None
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group['form']]
            super().step()                                              # AdamW, of the rest
        finally:
            self.param_groups = groups
        for group in groups:
            if group['form']:
                self.step_of(group)
        return loss

    def step_of(self, group):
        """The step of a group of matrices; those of one shape are one batch, for on a GPU each
        operation takes the host longer than its numbers take the device.
        """
        form = group['form']
        lr = group['lr']
        momentum = group['momentum']
        parameters = [p for p in group['params'] if p.grad is not None]     # the others are frozen
        if not parameters:
            return
        for p in parameters:
            if not self.state[p]:
                # AdamW's own loading of a state wants a step of all parameters
                self.state[p] = {'step': torch.tensor(0.0), 'momentum': torch.zeros_like(p)}
        gradients = [p.grad for p in parameters]
        means = [self.state[p]['momentum'] for p in parameters]
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        updates = torch._foreach_lerp(gradients, means, momentum)               # Nesterov's
        batches = defaultdict(list)                             # {(m, n): [(p, gradient, update)]}
        for p, *tensors in zip(parameters, gradients, updates):
            g, update = (matrices_of(x, form) for x in tensors)
            batches[g.shape[-2:]].append((p.view(g.shape), g, update))
        for (m, n), batch in batches.items():
            members, gradients, updates = zip(*batch)
            G = torch.cat(updates, -3)
            if form == 'complex':
                X = orthogonalize(torch.complex(*G))
                X = torch.stack([X.real, X.imag])
            else:
                X = orthogonalize(G.bfloat16() if self.half else G).to(G.dtype)
            axes = (0, -2, -1) if form == 'complex' else (-2, -1)
            moves = torch.cat(gradients, -3).abs().amax(axes, keepdim=True).sign()
            counts = [p.shape[-3] for p in members]
            changes = X.mul_(moves).split(counts, -3)
            torch._foreach_mul_(members, (1 - lr * group['weight_decay'] * moves).split(counts, -3))
            torch._foreach_sub_(members, changes, alpha=lr * max(1, m / n) ** 0.5)
