"""What data look like and what is wrong with them: statistics of fields, and the checks of `sources.prepare --check`.

Shapes: N trajectories, T frames, `space` all spatial axes, C channels, C'' those that evolve, M statistics.
"""
import hashlib
import math
import re
import sys
from itertools import combinations
from pathlib import Path

import configs
from configs import SCALES, InputError

import h5py
import numpy as np
import torch

from data import Trajectories, read_frames, relative, validation_split
from runtime import files, terminal
from runtime.terminal import Progress


def octave_bands(space):
    """Octave bands of wavenumber on a grid: their names, and (modes, bands), 1 where a mode of fftn is in a band.

    |k| counts waves along the longest axis. The last band begins at a quarter of its length, or a little below.
    """
    longest = max(space)
    count, k = max(1, int(math.log2(longest)) - 1), [torch.fft.fftfreq(side, 1 / longest) for side in space]
    k = torch.stack(torch.meshgrid(*k, indexing='ij')).norm(dim=0).flatten()
    octave = (k + 1e-6).log2().floor().clamp(max=count - 1)             # 1e-6: rounding of k; k = 0 is in no band
    names = [f'k {2 ** b}-{2 ** (b + 1)}' for b in range(count - 1)] + [f'k {2 ** (count - 1)}-']
    return names, (octave[:, None] == torch.arange(count)).float()


def field_statistics(u, bands):
    """Energy, mean, smallest and largest value, and spectrum of fields: (B, *space, C) -> (B, M, C), M = 4 + bands.

    Energy is the mean of u^2; the spectrum, its part in each of the `octave_bands`, adds up to energy - mean^2.
    """
    u = u.double()                      # float32 does not hold the squares of 1e20 or 1e-30
    flat = u.flatten(1, -2)
    power = torch.fft.fftn(u, dim=tuple(range(1, u.ndim - 1)), norm='forward').abs().square().flatten(1, -2)
    moments = torch.stack([flat.square().mean(1), flat.mean(1), flat.amin(1), flat.amax(1)], 1)
    return torch.cat([moments, torch.einsum('bkc,km->bmc', power, bands.double())], 1)


def split_statistics(split, processes):
    """`field_statistics` of all frames of a data.Trajectories: (N, T, M, C'') float64, equal on all processes."""
    bands = octave_bands(split.space)[1].to(processes.device)
    statistics = torch.zeros(split.count, split.frames, 4 + bands.shape[1], len(split.evolving), dtype=torch.float64)
    for i in Progress(range(processes.rank, split.count, processes.world_size), desc=f'statistics of {split.path}',
                      disable=processes.rank > 0, leave=False):
        frames = read_frames(split, [i], 0, split.frames, processes.device)[0]
        statistics[i] = field_statistics(frames[..., split.evolving], bands).cpu().double()
    return processes.sum(statistics)


@np.errstate(all='ignore')              # values that are not finite are among the defects
def survey(folder, name, split):
    """Print the statistics of one split -> hashes of its trajectories, and a list of defects.

    change: the mean over trajectories and frames of ||u_t+1 - u_t|| / ||u_t+1||, the one-step error of persistence.
    """
    item = Trajectories(folder, name, split, 1, sys.maxsize)
    N, T, C, points = item.count, item.frames, item.channels, math.prod(item.space)
    hashes, statistics = [], np.empty((5, N, T, C))
    with files.naming(item.path), h5py.File(item.path, 'r') as file:
        for i in Progress(range(N), desc=f'{name} {split}', leave=False):
            digest, before = hashlib.blake2b(), 0
            for t in range(T):
                frame = file['data'][i, t]
                digest.update(frame)
                u = frame.reshape(points, C).astype(float)
                statistics[:, i, t] = u.min(0), u.max(0), u.sum(0), (u ** 2).sum(0), ((u - before) ** 2).sum(0)
                before = u
            hashes.append(digest.digest())
    low, high, total, square, change = statistics
    mean, errors = total.mean((0, 1)) / points, relative(*map(torch.from_numpy, (change, square))).sqrt().numpy()
    columns = dict(min=low.min((0, 1)), max=high.max((0, 1)), mean=mean,
                   std=np.sqrt((square.mean((0, 1)) / points - mean ** 2).clip(0)), change=errors[:, 1:].mean((0, 1)))
    rows = {channel: dict(zip(columns, values)) for channel, *values in zip(item.channel_names, *columns.values())}
    print(f'{item.path}: {item.shape}, dt {item.dt:g}', *terminal.table('channel', rows, '.4g'), sep='\n')
    infinite = np.flatnonzero(~np.isfinite(statistics[:2]).all((0, 2, 3)))
    tails = (change[:, :0:-1].any(-1).cumsum(1) == 0).sum(1)                        # frames at the end without a change
    counts = {f'trajectories have values that are not finite; the first is {infinite[:1]}': infinite.size,
              f'of {N} trajectories end in equal frames, up to {tails.max() + 1} of them': (tails > 0).sum(),
              'trajectories are copies of an earlier one': N - len(set(hashes))}
    zeros = (statistics[:2] == 0).all((0, 2)).sum(0)                                # trajectories, for each channel
    return hashes, [*(f'{item.path}: {count} {defect}' for defect, count in counts.items() if count),
                    *(f'{item.path}: {item.channel_names[c]} is zero throughout in {zeros[c]} of {N} trajectories, '
                      'which have no relative error; leave them out, or call the channel static'
                      for c in item.evolving if zeros[c])]


def defects(folder, name):
    """Print the statistics of all splits of folder/name and return what is wrong with them, one line each."""
    splits = dict.fromkeys(('train', validation_split(folder, name), 'test'))
    splits = {split: survey(folder, name, split) for split in splits}
    lines = [line for _, lines in splits.values() for line in lines]
    for (one, (hashes, _)), (other, (others, _)) in combinations(splits.items(), 2):
        if copies := sum(digest in set(hashes) for digest in others):
            lines.append(f'{folder}/{name}/{other}.h5: {copies} of {len(others)} trajectories are in {one}.h5 too')
    return lines


def checksum(data):
    """A checksum of all values of the HDF5 dataset `data`."""
    digest = hashlib.blake2b(digest_size=8)
    for trajectory in data:
        digest.update(trajectory)
    return digest.hexdigest()


def missing(folder, shapes, attributes):
    """The splits of {split: shape} that have no file in `folder`. Raises InputError for a file of another plan."""
    def about(shape, attributes):
        source = re.sub(r' batch \d+$', '', str(attributes.get('source')))      # it may come from another device
        return shape, source, attributes.get('pde'), attributes.get('dt')
    paths = {split: Path(folder) / f'{split}.h5' for split in shapes}
    present = [split for split, path in paths.items() if path.exists()]
    for split in present:
        with files.naming(paths[split]), h5py.File(paths[split], 'r') as file:
            header, plan = about(file['data'].shape, file['data'].attrs), about(shapes[split], attributes)
        if header != plan:
            raise InputError(f'{paths[split]}: exists with {header}, not {plan}; remove it or choose another --data')
    return [split for split in shapes if split not in present]


def channel_attributes(name, frames, channels=()):
    """The attributes of `data` that follow from the frames and channels of a dataset of configs.py, see data.py."""
    channels = tuple(channels or configs.DATASETS[name].channels)
    static = tuple(channel for channel in channels if channel in SCALES)
    scale = dict(scale=tuple(SCALES[channel] for channel in static)) if static else {}
    return dict(channels=channels, static=static, t_test=min(configs.DATASETS[name].t_test, frames - 1), **scale)
