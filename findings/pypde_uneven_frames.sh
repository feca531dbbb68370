#!/usr/bin/env bash
# py-pde stores the frames of an even tracker at uneven times.
#
# A good guess: with steps of 0.1 a tracker of 0.25 stores the times 0, 0.25, 0.5, 0.75 and 1, or the nearest steps.
# py-pde 0.59.0 stores the first step at or after each of these times: 0, 0.3, 0.5, 0.8 and 1. The intervals are 0.3 and
# 0.2 by turns, while the stored fields are the rows of one array. Frames are even if the interval is a multiple of the
# step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'py-pde==0.59.0' 'numpy==2.4.6' 'scipy==1.17.1' 'numba==0.68.1'
cat > seen.py <<'END'
import numpy as np
import pde

field = pde.ScalarField(pde.UnitGrid([8]), 1.)
for dt in 0.1, 0.05:
    storage = pde.MemoryStorage()
    pde.DiffusionPDE().solve(field, t_range=1, dt=dt, tracker=storage.tracker(0.25), backend='numpy')
    print(f'step {dt}:', np.round(storage.times, 9))
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
step 0.1: [0.  0.3 0.5 0.8 1. ]
step 0.05: [0.   0.25 0.5  0.75 1.  ]
END
