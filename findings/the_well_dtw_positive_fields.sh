#!/usr/bin/env bash
# The Well's WindowedDTW of two unrelated positive fields is zero.
#
# The distance is for series of frames: each is divided by its norm, "along space" as the comment in the code says, and
# the series are aligned in time.
# A good guess: two unrelated densities are far apart, about as far as the same fields with signs.
# the_well 1.2.0 takes the norm over the channels. A field of one channel then becomes its sign, so all positive fields
# are equal, and of others only the signs are compared. norm=False compares values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'the_well==1.2.0' 'torch==2.13.0' 'numpy==2.4.6' 'matplotlib==3.11.2' \
    'scipy==1.17.1'
cat > seen.py <<'END'
import torch
from the_well.benchmark.metrics import WindowedDTW
from the_well.data.datasets import WellMetadata

meta = WellMetadata(
    dataset_name='own', n_spatial_dims=2, spatial_resolution=(16, 16), scalar_names=[], constant_scalar_names=[],
    field_names={0: ['rho']}, constant_field_names={}, boundary_condition_types=['PERIODIC'], n_files=1,
    n_trajectories_per_file=[1], n_steps_per_trajectory=[6])
random = torch.Generator().manual_seed(0)
shape = 1, 6, 16, 16, 1                                     # one trajectory, six frames, one channel
for words, draw in ('positive fields', torch.rand), ('fields with signs', torch.randn):
    one, other = (draw(shape, generator=random) + 0.01 * (draw is torch.rand) for _ in range(2))
    distances = [WindowedDTW.eval(one, other, meta, norm=norm)['dtw_distance'].item() for norm in (True, False)]
    print('{}: {:.1f}, without the norm {:.1f}'.format(words, *distances))
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
positive fields: 0.0, without the norm 0.4
fields with signs: 1.3, without the norm 1.3
END
