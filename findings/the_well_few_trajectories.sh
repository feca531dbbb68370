#!/usr/bin/env bash
# Three of five trajectories of The Well are the same trajectory three times.
#
# restrict_num_trajectories takes a random part of the data, for trainings on few trajectories.
# A good guess: 3 of 5 gives the samples of three different trajectories, and another seed may give three others.
# the_well 1.2.0 gives the samples of the first trajectory three times, for any seed. A curve of the error over the
# number of trajectories, made like this, has one trajectory everywhere.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'the_well==1.2.0' 'torch==2.13.0' 'numpy==2.4.6' 'matplotlib==3.11.2' \
    'scipy==1.17.1'
cat > seen.py <<'END'
import os

import h5py
import numpy as np
from the_well.data.datasets import WellDataset
from the_well.utils.dummy_data import write_dummy_data

os.mkdir('data')
write_dummy_data('data/own.hdf5')   # The Well's own example; it gets five trajectories
with h5py.File('data/own.hdf5', 'a') as file:
    file.attrs['n_trajectories'] = 5
    for name, space in ('t0_fields/constant_field', ()), ('t1_fields/field', (5, 32, 32, 2)):
        attributes = dict(file[name].attrs)
        del file[name]
        shape = (5, *(space or (32, 32)))
        number = np.arange(5, dtype='float32').reshape(-1, *[1] * (len(shape) - 1))
        file[name] = np.broadcast_to(number, shape)         # each value is the number of its trajectory
        file[name].attrs.update(attributes)
    times = file['dimensions/time'][:5]
    del file['dimensions/time'], file['scalars/time_varying_scalar']
    file['dimensions/time'] = times
    file['dimensions/time'].attrs['sample_varying'] = False
    file['scalars'].attrs['field_names'] = ['a', 'b']
for words, options in (('seed 0', dict(restrict_num_trajectories=3, restriction_seed=0)),
                       ('seed 1', dict(restrict_num_trajectories=3, restriction_seed=1)), ('all', {})):
    samples = WellDataset(path='data', **options)
    numbers = [int(samples[i]['input_fields'].mean()) for i in range(len(samples))]
    print(f'{words}: {len(samples)} samples, of the trajectories {numbers}')
END
venv/bin/python -W ignore seen.py > seen.txt
cat seen.txt
diff - seen.txt <<'END'
seed 0: 12 samples, of the trajectories [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
seed 1: 12 samples, of the trajectories [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
all: 20 samples, of the trajectories [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]
END
