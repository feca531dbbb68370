#!/usr/bin/env bash
# A spectrum of exponax 0.2.0 is half of that of 0.1.0, except for waves along the first axis.
#
# get_spectrum(u, power=True) sums the squares of the Fourier coefficients in shells of wave numbers.
# A good guess: summed over the shells it is the mean square of the field or half of it, for every field and version.
# exponax 0.1.0: the whole mean square of a wave along y, and half of that of the same wave along x.
# exponax 0.2.0: half of both, so that spectra of two versions compare for no field that has both. In either version a
# wave in the corner of the square of wave numbers is in no shell, so of white noise a fifth of the energy is missing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'exponax==0.1.0' 'jax==0.10.2' 'numpy==2.4.6'
cat > seen.py <<'END'
from importlib.metadata import version

import exponax
import jax.numpy as jnp

x, y = exponax.make_grid(2, 2 * jnp.pi, 32)
fields = {'cos 3x': jnp.cos(3 * x), 'cos 3y': jnp.cos(3 * y), 'cos 14x cos 14y': jnp.cos(14 * x) * jnp.cos(14 * y)}
sums = [f'{words}: {abs(exponax.get_spectrum(u[None], power=True).sum()):.2f} of {(u ** 2).mean():.2f}'
        for words, u in fields.items()]
print(f'{version("exponax")}:', ', '.join(sums))                # the sum over the shells, of the mean square
END
venv/bin/python -W ignore seen.py > seen.txt
venv/bin/pip install --quiet 'exponax==0.2.0'
venv/bin/python -W ignore seen.py >> seen.txt
cat seen.txt
diff - seen.txt <<'END'
0.1.0: cos 3x: 0.25 of 0.50, cos 3y: 0.50 of 0.50, cos 14x cos 14y: 0.00 of 0.25
0.2.0: cos 3x: 0.25 of 0.50, cos 3y: 0.25 of 0.50, cos 14x cos 14y: 0.00 of 0.25
END
