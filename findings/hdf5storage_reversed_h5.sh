#!/usr/bin/env bash
# A file own.h5 from hdf5storage is called own.h5.mat, and has its axes reversed.
#
# A good guess: savemat('own.h5', {'u': u}) writes own.h5, and since that is not a .mat file h5py reads u as it was.
# hdf5storage 0.2.2 appends .mat to any other ending unless appendmat=False. With that, too, all four axes are reversed,
# as MATLAB stores them, and a vector gets a second axis. Only the attribute MATLAB_class tells such a file from another
# .h5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'hdf5storage==0.2.2' 'h5py==3.16.0' 'numpy==2.4.6'
cat > seen.py <<'END'
import glob

import h5py
import hdf5storage
import numpy as np

fields = {'u': np.zeros((5, 4, 3, 2)), 'times': np.arange(5.)}
hdf5storage.savemat('own.h5', fields)
print(glob.glob('own*'))
hdf5storage.savemat('other.h5', fields, appendmat=False)
with h5py.File('other.h5') as file:
    print(f'u {fields["u"].shape} is {file["u"].shape}, MATLAB_class {file["u"].attrs["MATLAB_class"].decode()}')
    print(f'times {fields["times"].shape} is {file["times"].shape}')
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
['own.h5.mat']
u (5, 4, 3, 2) is (2, 3, 4, 5), MATLAB_class double
times (5,) is (5, 1)
END
