#!/usr/bin/env bash
# The H(div) loss of neuraloperator knows no divergence: an error without any counts as if it had one.
#
# HdivLoss is for flows whose divergence matters. Its norm is the root of the integral of |v|^2 and of (div v)^2.
# A good guess: of an error without divergence it is the L2 norm, which is less than the H1 norm with all derivatives.
# neuraloperator 2.0.0 adds the derivatives along x and y of each channel by itself, and mixes no two channels. So the
# vortex (sin x cos y, -cos x sin y) gets its whole H1 norm, and the compression wave (sin(x - y), -sin(x - y)) gets its
# L2 norm, as if it had no divergence. FiniteDiff.divergence of the same package is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'neuraloperator==2.0.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > seen.py <<'END'
import torch
from neuralop.losses.data_losses import H1Loss, HdivLoss, LpLoss
from neuralop.losses.differentiation import FiniteDiff

side = 2 * torch.pi
x, y = torch.meshgrid(*[side * torch.arange(256, dtype=torch.float64) / 256] * 2, indexing='ij')
flows = {'vortex': (x.sin() * y.cos(), -x.cos() * y.sin()), 'compression': ((x - y).sin(), -(x - y).sin())}
for name, components in flows.items():
    flow = torch.stack(components)[None]                            # one sample, two channels
    L2, H1, Hdiv = (loss(d=2, measure=side).abs(flow, torch.zeros_like(flow)) for loss in (LpLoss, H1Loss, HdivLoss))
    divergence = FiniteDiff(2, h=side / 256).divergence(flow)
    right = (L2 ** 2 + side ** 2 * (divergence ** 2).mean()).sqrt()
    print(f'{name}: L2 {L2:.2f}, H1 {H1:.2f}, H(div) {right:.2f}, but HdivLoss {Hdiv:.2f}')
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
vortex: L2 6.28, H1 10.88, H(div) 6.28, but HdivLoss 10.88
compression: L2 8.89, H1 15.39, H(div) 12.57, but HdivLoss 8.89
END
