#!/usr/bin/env bash
# The VRMSE of The Well depends on the units of the field, and its argument eps changes nothing.
#
# VRMSE is the error over the deviation of the truth. So a prediction that is the mean of the frame has a VRMSE of 1.
# A good guess: it has that in any units, and for small fields one passes a smaller eps than 1e-7.
# the_well 1.2.0 adds 1e-7 to the variance, whatever eps is given: VRMSE.eval does not hand it on. For a field of
# deviation 1e-4, such as a vorticity in 1/s, the mean scores 0.30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'the_well==1.2.0' 'torch==2.13.0' 'numpy==2.4.6' 'matplotlib==3.11.2' \
    'scipy==1.17.1'
cat > seen.py <<'END'
import torch
from the_well.benchmark.metrics import VRMSE
from the_well.data.datasets import WellMetadata

meta = WellMetadata(
    dataset_name='own', n_spatial_dims=2, spatial_resolution=(64, 64), scalar_names=[], constant_scalar_names=[],
    field_names={0: ['w']}, constant_field_names={}, boundary_condition_types=['PERIODIC'], n_files=1,
    n_trajectories_per_file=[1], n_steps_per_trajectory=[1])
noise = torch.randn(1, 1, 64, 64, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
noise = noise / noise.std()
for deviation in 1, 1e-3, 1e-4:
    truth = deviation * noise
    prediction = truth.mean((2, 3), keepdim=True).expand_as(truth)
    scores = [f'eps {eps:g} VRMSE {VRMSE.eval(prediction, truth, meta, eps=eps).item():.2f}' for eps in (1e-7, 1e-14)]
    print(f'deviation {deviation:g}:', ', '.join(scores))
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
deviation 1: eps 1e-07 VRMSE 1.00, eps 1e-14 VRMSE 1.00
deviation 0.001: eps 1e-07 VRMSE 0.95, eps 1e-14 VRMSE 0.95
deviation 0.0001: eps 1e-07 VRMSE 0.30, eps 1e-14 VRMSE 0.30
END
