#!/usr/bin/env bash
# Whether a number is a gap depends on whether float32 can hold its mark exactly.
#
# A file has a float32 variable and the attribute missing_value in double precision, which is what h5py makes of a
# Python float. -999 and 1e20 are two usual marks.
# A good guess: both are gaps. 1e20 in float32 is what the writer put there.
# netCDF4 1.7.5.1.post1 and xarray 2026.9.0: -999 is a gap for both. 1e20 is a number for both, because the double 1e20
# is not a float32. netCDF4 warns (warnings are off here) and xarray does not. The mean of the field is then 2.5e19.
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

for mark in -999., 1e20:
    with h5py.File('field.nc', 'w') as file:
        stored = file.create_dataset('u', data=np.array([[1, mark], [2, 3]], 'float32'))
        stored.attrs['missing_value'] = np.float64(mark)
    with netCDF4.Dataset('field.nc') as file:
        gaps = np.ma.getmaskarray(file['u'][:]).sum()
    with xarray.open_dataset('field.nc', engine='netcdf4') as file:
        u = file.u.values
    print(f'{mark:g}: gaps of netCDF4 {gaps}, of xarray {np.isnan(u).sum()}')
print(f'mean {u.mean():.2g}')
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
-999: gaps of netCDF4 1, of xarray 1
1e+20: gaps of netCDF4 0, of xarray 0
mean 2.5e+19
END
