#!/usr/bin/env bash
# The same number of points on the same periodic interval: where does the first one lie?
#
# A good guess: two solvers on a periodic interval have the same points, so that a state of one is a state of the other.
# py-pde 0.59.0 has cell centres, (i + 1/2) / N. exponax 0.2.0 has i / N. The state of one is, for the other, moved by
# half a cell: 10 % of the size of a wave over 32 points, which is more than most networks err in one step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'py-pde==0.59.0' 'scipy==1.17.1' 'numba==0.68.1' 'exponax==0.2.0' 'jax==0.10.2' \
    'numpy==2.4.6'
cat > seen.py <<'END'
import exponax
import numpy as np
import pde


def points(N):
    grid = pde.CartesianGrid([[0, 1]], N, periodic=True)
    return grid.axes_coords[0], np.asarray(exponax.make_grid(1, 1., N))[0]


for name, x in zip(('py-pde', 'exponax'), points(4)):
    print(name, x)
one, other = (np.sin(2 * np.pi * x) for x in points(32))
print(f'a wave over 32 points: relative difference {np.linalg.norm(one - other) / np.linalg.norm(other):.2f}')
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
py-pde [0.125 0.375 0.625 0.875]
exponax [0.   0.25 0.5  0.75]
a wave over 32 points: relative difference 0.10
END
