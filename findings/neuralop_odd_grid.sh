#!/usr/bin/env bash
# A spectral layer with the identity as its weights changes a field on an odd grid.
#
# neuraloperator's SpectralConv keeps all modes here, and multiplies each by one.
# A good guess: the field comes back to rounding on any grid, for the transforms are exact for odd sizes too.
# neuraloperator 2.0.0 gives it back where the first axis is even. If that is odd, fftshift is undone by fftshift, not
# ifftshift, so each mode comes back one place off. The last axis, of which half is stored, may be odd.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'neuraloperator==2.0.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > seen.py <<'END'
import torch
from neuralop.layers.spectral_convolution import SpectralConv

for shape in (64, 64), (64, 65), (65, 64), (65, 65):
    layer = SpectralConv(1, 1, n_modes=shape, bias=False)
    with torch.no_grad():
        layer.weight.tensor.fill_(1)
        u = torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(0))
        error = (layer(u) - u).norm() / u.norm()
    words = 'the same field' if error < 1e-5 else 'another field' if error > 1 else f'error {error:.3g}'
    print(f'{shape[0]}x{shape[1]}: {words}')
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
64x64: the same field
64x65: the same field
65x64: another field
65x65: another field
END
