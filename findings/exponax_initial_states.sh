#!/usr/bin/env bash
# A random initial state of exponax becomes smaller on a finer grid, since version 0.2.0.
#
# RandomTruncatedFourierSeries with a cutoff of 3 has the same few long waves on every grid.
# A good guess: its size does not depend on the number of points. So it is in exponax 0.1.0.
# exponax 0.2.0: with each doubling of the points on a side the root mean square falls to a half in two dimensions, and
# to a third or less in three. A nonlinear equation then starts in another regime on each grid.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'exponax==0.1.0' 'jax==0.10.2' 'numpy==2.4.6'
cat > seen.py <<'END'
from importlib.metadata import version

import exponax
import jax
import numpy as np

for D in 2, 3:
    series = exponax.ic.RandomTruncatedFourierSeries(D, cutoff=3)
    sizes = []
    for points in 16, 32, 64:
        states = [np.asarray(series(points, key=jax.random.PRNGKey(seed))) for seed in range(20)]
        sizes.append(np.mean([np.sqrt((u ** 2).mean()) for u in states]))
    print(f'{version("exponax")}, {D}-D, 16 32 64 points a side:', *(f'{size:.1f}' for size in sizes))
END
venv/bin/python -W ignore seen.py > seen.txt
venv/bin/pip install --quiet 'exponax==0.2.0'
venv/bin/python -W ignore seen.py >> seen.txt
cat seen.txt
diff - seen.txt <<'END'
0.1.0, 2-D, 16 32 64 points a side: 1.2 1.2 1.2
0.1.0, 3-D, 16 32 64 points a side: 2.0 2.0 2.0
0.2.0, 2-D, 16 32 64 points a side: 0.4 0.2 0.1
0.2.0, 3-D, 16 32 64 points a side: 0.3 0.1 0.0
END
