#!/usr/bin/env bash
# A spectral layer that doubles the resolution moves half of a wave to another wave number.
#
# neuraloperator's SpectralConv has resolution_scaling_factor for outputs on a finer or coarser grid, as UNO has inside.
# The weights are one here, and all modes of the input are kept.
# A good guess: a sine of amplitude 1 comes out as the same sine, on the other grid.
# neuraloperator 2.0.0: so it is along the last axis. Along the first, the spectrum is padded or cut at its end, where
# the negative wave numbers are. From 16 to 32 points they become others: half of wave 1 is then wave 15, at the scale
# of two cells. From 16 to 8 points that half is lost.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'neuraloperator==2.0.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > seen.py <<'END'
import torch
from neuralop.layers.spectral_convolution import SpectralConv

for factor in 1, 2, 0.5:
    layer = SpectralConv(1, 1, n_modes=(16, 16), bias=False, resolution_scaling_factor=factor)
    for axis in 'first', 'last':
        wave = torch.sin(2 * torch.pi * torch.arange(16) / 16)
        u = (wave[:, None] if axis == 'first' else wave).expand(1, 1, 16, 16)
        with torch.no_grad():
            layer.weight.tensor.fill_(1)
            out = layer(u)[0, 0]
        line = out.mean(1) if axis == 'first' else out.mean(0)
        sizes = 2 * torch.fft.rfft(line, norm='forward').abs()
        found = [f'{size:.2f} of wave {k}' for k, size in enumerate(sizes) if size > 0.01]
        print(f'{len(u[0, 0])} to {len(line)} points, along the {axis} axis:', ', '.join(found))
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
16 to 16 points, along the first axis: 1.00 of wave 1
16 to 16 points, along the last axis: 1.00 of wave 1
16 to 32 points, along the first axis: 0.50 of wave 1, 0.50 of wave 15
16 to 32 points, along the last axis: 1.00 of wave 1
16 to 8 points, along the first axis: 0.50 of wave 1
16 to 8 points, along the last axis: 1.00 of wave 1
END
