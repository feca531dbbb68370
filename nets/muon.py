"""Muon, an optimizer for the matrices of a network; written to be copied: it needs torch alone, 2.6
or newer.

The momentum of a matrix is replaced by the nearest matrix whose singular values are all one, so
that a step changes all directions of the matrix alike. From K. Jordan et al., Muon: An optimizer
for hidden layers in neural networks, 2024 (https://kellerjordan.github.io/posts/muon), and for
large networks Liu et al., arXiv 2502.16982. Not in the paper.

    optimizer = Muon({'matrix': [layer.weight]}, rest=[layer.bias], lr=1e-2)   # layer: an nn.Linear
"""
from collections import defaultdict

import torch

COEFFICIENTS = 3.4445, -4.7750, 2.0315      # of the odd polynomial of a round; they are Jordan's


def orthogonalize(G, rounds=5):
    """The matrices U V^H of the singular value decompositions G = U diag(s) V^H, roughly:
    (..., m, n) -> the same.

    Each Newton-Schulz round takes every singular value s of the matrix over its Frobenius norm to a
    s + b s^3 + c s^5. Five rounds bring those of 0.003 to 1 into 0.68 to 1.21; smaller ones grow up
    to 485 times, and zero stays zero. Real or complex matrices, in the precision of G; bf16
    suffices.
    """
    a, b, c = COEFFICIENTS
    X = G.flatten(0, -3) if G.ndim > 2 else G[None]                                     # (N, m, n)
    tall = X.shape[1] > X.shape[2]
    if tall:
        X = X.mH
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp_min(1e-12)
    for _ in range(rounds):
        A = X @ X.mH                                                # (N, m, m), of the shorter side
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)        # a X + (b A + c A A) X
    return (X.mH if tall else X).reshape(G.shape)


FORMS = {      # of a parameter: its matrices (..., m, n), the parameter from these, the axes of one
    'matrix': (lambda p: p.flatten(1), lambda X, shape: X.view(shape), None),       # (m, n), or a kernel (m, n1, n2)
    'stack': (lambda p: p, lambda X, shape: X, (-2, -1)),                           # (..., m, n)
    'complex': (lambda p: torch.complex(*p), lambda X, shape: torch.stack([X.real, X.imag]), (0, -2, -1)),
}                                                                                   # (2, ..., m, n)


class Muon(torch.optim.AdamW):
    """Muon for matrices, and AdamW for the rest of the parameters.

    matrices: {form: parameters}, the forms being those of FORMS; m is the number of outputs, n that
    of inputs. The momentum is Nesterov's. The update of a matrix is orthogonalize(momentum) times
    sqrt(max(1, m / n)) and the learning rate `lr` of its group, which is at first `ratio` times
    that of the rest. A matrix without a gradient, such as that of an expert which no sample took,
    stays as it is. half: products of real matrices are in bf16, which costs nothing but time where
    the processor has no such products. settings: of torch.optim.AdamW.
    """

    def __init__(self, matrices, rest, ratio=1.0, momentum=0.95, half=False, **settings):
        groups = [{'params': rest, 'form': '', 'ratio': 1.0}]
        groups += [{'params': parameters, 'form': form, 'ratio': ratio, 'momentum': momentum}
                   for form, parameters in matrices.items() if parameters]
        super().__init__([group for group in groups if group['params']], **settings)
        self.half = half
        for group in self.param_groups:
            group['lr'] *= group['ratio']

    @torch.no_grad()
    def step(self):
        """One step, from the gradients of all parameters."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group['form']]
            super().step()                                              # AdamW, of the rest
        finally:
            self.param_groups = groups
        for group in groups:
            if group['form']:
                self.step_of(group)

    def step_of(self, group):
        """The step of a group of matrices; those of one shape are orthogonalized as one batch."""
        matrices_of, parameter_of, axes = FORMS[group['form']]
        momentum = group['momentum']
        batches = defaultdict(list)  # {(m, n): [(parameter, its matrices (..., m, n), which move)]}
        for p in group['params']:
            if p.grad is None:                              # it is frozen
                continue
            if not self.state[p]:
                # AdamW's own loading of a state wants a step of all parameters
                self.state[p] = {'step': torch.tensor(0.0), 'momentum': torch.zeros_like(p)}
            moves = torch.linalg.vector_norm(p.grad, torch.inf, axes, keepdim=True).sign()      # 0 or 1, of each matrix
            mean = self.state[p]['momentum'].lerp_(p.grad, 1 - momentum)
            G = matrices_of(p.grad.lerp(mean, momentum))                                # Nesterov's
            batches[G.shape[-2:]].append((p, G, moves))
        for (m, n), batch in batches.items():
            G = torch.cat([matrices.reshape(-1, m, n) for _, matrices, _ in batch])
            half = self.half and not G.is_complex()
            X = orthogonalize(G.bfloat16() if half else G).to(G.dtype)
            X = X * torch.cat([moves.flatten() for *_, moves in batch])[:, None, None]
            for (p, matrices, moves), part in zip(batch, X.split([moves.numel() for *_, moves in batch])):
                p.mul_(1 - group['lr'] * group['weight_decay'] * moves)
                p.sub_(parameter_of(part.view(matrices.shape), p.shape), alpha=group['lr'] * max(1, m / n) ** 0.5)
