#!/usr/bin/env bash
# A staggered velocity in a file of PhiFlow has a row and a column that are no part of the simulation.
#
# A good guess: `phi.field.write` of a velocity on 3 x 2 cells stores `data` of the shape (3, 2, 2), the two components
# at one point, as it does for a centered grid, or at least only values of the simulation.
# PhiFlow 3.4.0 stores the shape (4, 3, 2), for every boundary: u at the faces in x and v at the faces in y, half a cell
# from each other, and what is missing beyond the last face is filled with the value of the boundary: 0 at a wall, the
# first row once more in a periodic domain. `velocity.at_centers()` is stored as guessed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'phiflow==3.4.0' 'phiml==1.16.1' 'numpy==2.4.6' 'scipy==1.17.1'
cat > seen.py <<'END'
import numpy as np
from phi.field import write
from phi.flow import Box, PERIODIC, StaggeredGrid, vec

for boundary, name in (0, 'walls'), (PERIODIC, 'periodic'):
    velocity = StaggeredGrid(lambda x: x + vec(x=10., y=20.), boundary, x=3, y=2, bounds=Box(x=3, y=2))
    write(velocity, f'{name}.npz')
    write(velocity.at_centers(), f'{name}_at_centers.npz')
    data = np.load(f'{name}.npz')['data']
    print(name, data.shape, 'at centers', np.load(f'{name}_at_centers.npz')['data'].shape)
    print('u', data[..., 0].tolist(), 'v', data[..., 1].tolist(), sep='\n')
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
walls (4, 3, 2) at centers (3, 2, 2)
u
[[0.0, 0.0, 0.0], [11.0, 11.0, 0.0], [12.0, 12.0, 0.0], [0.0, 0.0, 0.0]]
v
[[0.0, 21.0, 0.0], [0.0, 21.0, 0.0], [0.0, 21.0, 0.0], [0.0, 0.0, 0.0]]
periodic (4, 3, 2) at centers (3, 2, 2)
u
[[10.0, 10.0, 10.0], [11.0, 11.0, 11.0], [12.0, 12.0, 12.0], [10.0, 10.0, 10.0]]
v
[[20.0, 21.0, 20.0], [20.0, 21.0, 20.0], [20.0, 21.0, 20.0], [20.0, 21.0, 20.0]]
END
