#!/usr/bin/env bash
# xarray stores the time of every one-frame file of an hourly series as the number 0.
#
# A good guess: hourly frames, each written to a netCDF file of its own, have the stored times 0, 1, 2, ... since one
# date. xarray 2026.9.0 with netCDF4 1.7.5.1 chooses the unit anew for each file and takes its own time as the date:
# the numbers are all 0, in days since one, two, ... o'clock. A reader that joins the numbers finds steps of 0: it has
# to read the unit of each file, or the writer has to give one by `encoding`, as for the last file here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'xarray==2026.9.0' 'netCDF4==1.7.5.1.post1' 'cftime==1.6.6.1' 'numpy==2.4.6'
cat > seen.py <<'END'
import netCDF4
import numpy as np
import xarray

times = np.datetime64('2020-02-29', 'ns') + np.arange(3) * np.timedelta64(1, 'h')
series = xarray.DataArray(np.zeros((3, 4)), [('time', times), ('x', np.arange(4.))], name='u')
for i, encoding in enumerate(({}, {}, {}, {'time': {'units': 'hours since 2020-02-29'}})):
    series[[min(i, 2)]].to_netcdf(f'{i}.nc', engine='netcdf4', encoding=encoding)
    with netCDF4.Dataset(f'{i}.nc') as file:
        print(file['time'][:].tolist(), file['time'].units)
END
venv/bin/python seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
[0] days since 2020-02-29 00:00:00
[0] days since 2020-02-29 01:00:00
[0] days since 2020-02-29 02:00:00
[2] hours since 2020-02-29
END
