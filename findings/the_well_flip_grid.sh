#!/usr/bin/env bash
# A flipped sample of The Well flows against the grid that comes with it.
#
# RandomAxisFlip, RandomAxisPermute and RandomRotation90 are applied to the fields and to the grid of a sample. Here a
# bump of density moves with its velocity field, by (3, 1) between two frames.
# A good guess: after each of them the bump still moves with the velocity, in the coordinates of space_grid.
# the_well 1.2.0 turns the velocities, but each point keeps its old coordinates and is only put elsewhere in the arrays.
# So the bump moves by (3, 1) as before and the velocity says (-3, 1), or (1, 3) after a permutation. Velocity and array
# index do agree. A network that is told the coordinates sees densities move against the velocity.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'the_well==1.2.0' 'torch==2.13.0' 'numpy==2.4.6' 'matplotlib==3.11.2' \
    'scipy==1.17.1'
cat > seen.py <<'END'
import torch
from the_well.data.augmentation import RandomAxisFlip, RandomAxisPermute, RandomRotation90


def sample():
    grid = torch.stack(torch.meshgrid(torch.arange(32.), torch.arange(32.), indexing='ij'), -1)
    bump = [torch.exp(-((grid - torch.tensor(centre)) ** 2).sum(-1) / 4) for centre in ([14., 15.], [17., 16.])]
    fields = {0: {'density': torch.stack(bump)}, 1: {'velocity': torch.tensor([3., 1.]).expand(2, 32, 32, 2)}, 2: {}}
    return dict(variable_fields=fields, constant_fields={0: {}, 1: {}, 2: {}}, space_grid=grid)


for name, data in {
        'stored': sample(), 'flipped': RandomAxisFlip.flip(sample(), torch.tensor([True, False])),
        'permuted': RandomAxisPermute.permute(sample(), torch.tensor([1, 0])),
        'rotated': RandomRotation90.rotate90(sample(), torch.tensor([1, 0]), torch.tensor([0, 1]))}.items():
    density = data['variable_fields'][0]['density'][..., None]
    first, second = (density * data['space_grid']).sum((1, 2)) / density.sum((1, 2))        # centres of mass
    velocity = data['variable_fields'][1]['velocity'][0, 0, 0]
    print(f'{name}: velocity {velocity.tolist()}, the bump moves by {(second - first).round(decimals=3).tolist()}')
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
stored: velocity [3.0, 1.0], the bump moves by [3.0, 1.0]
flipped: velocity [-3.0, 1.0], the bump moves by [3.0, 1.0]
permuted: velocity [1.0, 3.0], the bump moves by [3.0, 1.0]
rotated: velocity [1.0, -3.0], the bump moves by [3.0, 1.0]
END
