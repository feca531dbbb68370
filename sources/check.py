"""What data look like and what is wrong with them: statistics of fields, and the checks of `sources.prepare --check`.

Shapes: N trajectories, T frames, `space` all spatial axes, C channels, C'' those that evolve, M statistics.
"""
import hashlib
import math
import re
import sys
from itertools import combinations
from pathlib import Path

import h5py
import numpy as np
import torch

import configs
from configs import SCALES, InputError
from data import Trajectories, header, relative, validation_split
from runtime import files, terminal
from runtime.terminal import Progress


@np.errstate(all='ignore')              # values that are not finite are among the defects
def survey(folder, name, split):
    """Print the statistics of one split, in float32 as it is read -> hashes of its trajectories, a list of defects.

    change: the mean over trajectories and frames of ||u_t+1 - u_t|| / ||u_t+1||, the one-step error of persistence.
    """
    item = Trajectories(folder, name, split, 1, sys.maxsize)
    N, T, C = item.count, item.frames, item.channels
    points = math.prod(item.space)
    hashes = []
    low, high, total, square, change = np.empty((5, N, T, C))
    stored = np.zeros((N, C), bool)     # whether there is a value other than 0 in the file
    with files.naming(item.path), h5py.File(item.path, 'r') as file:
        for i in Progress(range(N), desc=f'{name} {split}', leave=False):
            digest = hashlib.blake2b()
            before = 0
            for t in range(T):
                frame = file['data'][i, t].reshape(points, C)
                digest.update(frame)
                stored[i] |= frame.any(0)
                u = frame.astype(np.float32).astype(float)
                low[i, t] = u.min(0)
                high[i, t] = u.max(0)
                total[i, t] = u.sum(0)
                square[i, t] = (u ** 2).sum(0)
                change[i, t] = ((u - before) ** 2).sum(0)
                before = u
            hashes.append(digest.digest())
    mean = total.mean((0, 1)) / points
    deviation = np.sqrt((square.mean((0, 1)) / points - mean ** 2).clip(0))
    errors = relative(torch.from_numpy(change), torch.from_numpy(square)).sqrt()[:, 1:].mean((0, 1))
    rows = {channel: dict(min=low[..., c].min(), max=high[..., c].max(), mean=mean[c], std=deviation[c],
                          change=errors[c].item()) for c, channel in enumerate(item.channel_names)}
    print(f'{item.path}: {item.shape}, dt {item.dt:g}', *terminal.table('channel', rows, '.4g'), sep='\n')

    defects = []
    infinite = np.flatnonzero(~np.isfinite(square).all((1, 2)))
    still = (change[:, :0:-1].any(-1).cumsum(1) == 0).sum(1)            # frames at the end without a change
    copies = N - len(set(hashes))
    zero = ((low == 0) & (high == 0)).all(1)                            # (N, C)
    if len(infinite):
        defects.append(f'{len(infinite)} trajectories have values that are not finite in float32; the first is '
                       f'{infinite[0]}')
    if still.any():
        defects.append(f'{(still > 0).sum()} of {N} trajectories end in equal frames, up to {still.max() + 1} of them')
    if copies:
        defects.append(f'{copies} trajectories are copies of an earlier one')
    for c, channel in enumerate(item.channel_names):
        lost = (zero & stored)[:, c].sum()
        empty = (zero & ~stored)[:, c].sum()
        if lost:
            defects.append(f'{channel} is too small for float32 in {lost} of {N} trajectories, where it is read as '
                           f'zero; rescale it')
        if empty and c in item.evolving:
            defects.append(f'{channel} is zero throughout in {empty} of {N} trajectories, which have no relative '
                           f'error; leave them out, or call the channel static')
    return hashes, [f'{item.path}: {line}' for line in defects]


def defects(folder, name):
    """Print the statistics of all splits of folder/name and return what is wrong with them, one line each."""
    splits = dict.fromkeys(('train', validation_split(folder, name), 'test'))
    splits = {split: survey(folder, name, split) for split in splits}
    lines = [line for _, lines in splits.values() for line in lines]
    for (one, (hashes, _)), (other, (others, _)) in combinations(splits.items(), 2):
        copies = sum(digest in set(hashes) for digest in others)
        if copies:
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

    absent = []
    for split, shape in shapes.items():
        path = Path(folder) / f'{split}.h5'
        if not path.exists():
            absent.append(split)
            continue
        stored, _, found = header(path)
        there = about(stored, found)
        plan = about(shape, attributes)
        if there != plan:
            raise InputError(f'{path}: exists with {there}, not {plan}; remove it or choose another --data')
    return absent


def channel_attributes(name, frames, channels=()):
    """The attributes of `data` that follow from the frames and channels of a dataset of configs.py, see data.py."""
    channels = tuple(channels or configs.DATASETS[name].channels)
    static = tuple(channel for channel in channels if channel in SCALES)
    attributes = dict(channels=channels, static=static, t_test=min(configs.DATASETS[name].t_test, frames - 1))
    if static:
        attributes['scale'] = tuple(SCALES[channel] for channel in static)
    return attributes
