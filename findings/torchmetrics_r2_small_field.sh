#!/usr/bin/env bash
# Every prediction of a small field has an R2 of exactly 1 or 0 by torchmetrics.
#
# R2 is 1 minus the squared error over the variance of the truth, so units cancel. Zeros predict a field of mean zero
# with an R2 of 0, and unrelated noise of the same deviation with about -1.
# A good guess: so it is for 4096 points of deviation 1e-4 too, such as a vorticity in 1/s.
# torchmetrics 1.9.0 takes a sum of squares below 1e-4 for zero. The sum over all the points of this field is 4e-5. So
# zeros and noise have an R2 of 1, as if they were exact. The field with the wrong sign gets 0, which is for a constant
# truth, instead of -3. ExplainedVariance and RelativeSquaredError are as in other units.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'torchmetrics==1.9.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > seen.py <<'END'
import torch
from torchmetrics.regression import ExplainedVariance, R2Score, RelativeSquaredError

field, noise = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
field, noise = ((u - u.mean()) / u.std() for u in (field, noise))
for deviation in 1, 1e-3, 1e-4:
    for name, prediction in {'zeros': 0 * field, 'noise': noise, 'the wrong sign': -field}.items():
        scores = [metric()((deviation * prediction).float(), (deviation * field).float()).item()
                  for metric in (R2Score, ExplainedVariance, RelativeSquaredError)]
        print('deviation {:g}, {}: R2 {}, explained variance {}, relative squared error {}'.format(
            deviation, name, *(round(score, 1) + 0. for score in scores)))                # + 0. makes -0.0 of zeros 0.0
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
deviation 1, zeros: R2 0.0, explained variance 0.0, relative squared error 1.0
deviation 1, noise: R2 -1.0, explained variance -1.0, relative squared error 2.0
deviation 1, the wrong sign: R2 -3.0, explained variance -3.0, relative squared error 4.0
deviation 0.001, zeros: R2 0.0, explained variance 0.0, relative squared error 1.0
deviation 0.001, noise: R2 -1.0, explained variance -1.0, relative squared error 2.0
deviation 0.001, the wrong sign: R2 -3.0, explained variance -3.0, relative squared error 4.0
deviation 0.0001, zeros: R2 1.0, explained variance 0.0, relative squared error 1.0
deviation 0.0001, noise: R2 1.0, explained variance -1.0, relative squared error 2.0
deviation 0.0001, the wrong sign: R2 0.0, explained variance -3.0, relative squared error 4.0
END
