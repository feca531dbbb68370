#!/usr/bin/env bash
# How many frames does a file have whose simulation stopped halfway? Three readers give three answers.
#
# A netCDF-4 file has an unlimited dimension time. The writer stored the times of five frames and was stopped after the
# field of the third.
# A good guess: the field has three frames, or five of which two are gaps, in each reader.
# h5py 3.16.0 gives three frames: HDF5's dataset was never extended. netCDF4 1.7.5.1.post1 gives five frames and masks
# the last two. xarray 2026.9.0 gives five frames without a gap: the last two are 9.97e36, which is finite, for the
# default fill value of netCDF stands in no attribute and xarray looks at attributes alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'netCDF4==1.7.5.1.post1' 'xarray==2026.9.0' 'h5py==3.16.0' 'numpy==2.4.6'
cat > seen.py <<'END'
import h5py
import netCDF4
import numpy as np
import xarray

with netCDF4.Dataset('run.nc', 'w') as file:
    file.createDimension('time', None)
    file.createDimension('x', 2)
    file.createVariable('time', 'f8', ['time'])[:] = np.arange(5)
    file.createVariable('u', 'f4', ['time', 'x'])[:3] = 1
with h5py.File('run.nc') as file:
    print('h5py: shape', file['u'].shape)
with netCDF4.Dataset('run.nc') as file:
    u = file['u'][:]
    print(f'netCDF4: shape {u.shape}, gaps {u.mask.sum()}')
with xarray.open_dataset('run.nc') as file:
    u = file.u.values
    print(f'xarray: shape {u.shape}, gaps {np.isnan(u).sum()}, finite {np.isfinite(u).all()}, largest {u.max():.3g}')
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
h5py: shape (3, 2)
netCDF4: shape (5, 2), gaps 4
xarray: shape (5, 2), gaps 0, finite True, largest 9.97e+36
END
