"""Which files of one's own belong together: of one run its frames, of one part its variables.

Files are sorted by the numbers in their names. N trajectories, T frames.
"""
import re
from itertools import chain, groupby
from pathlib import Path

import h5py
import numpy as np

from configs import InputError
from runtime.stored import require
from runtime.terminal import warn
from sources.axes import parse_layout, places
from sources.kinds import KINDS, NETCDF, contents, reading, variable_of


def numbered(paths):
    """{path: its text and its numbers in turn}, by which paths are sorted, and whether the numbers
    of sorted ones rise by even steps.

    u_10 comes after u_9, t_-1 after t_-2. 1.10 is a number, or 1 and 10 if only these are all
    different or rise by even steps.
    """
    readings = []
    for point in r'\.', '(?!)':
        number = rf'((?:(?<=[_=])-)?\d+(?:{point}\d+(?:[eE][+-]?\d+)?|[eE][+-]\d+)?)'
        keys = {path: tuple(float(word) if i % 2 else word for i, word in
                            enumerate(re.split(number, str(path)))) for path in paths}
        lengths = {len(key) for key in keys.values()}
        steps = [np.diff(numbers) for numbers in zip(*(key[1::2] for key in sorted(keys.values())))]
        alike = len(lengths) == 1 and max(lengths) > 1            # of as many numbers, and some
        even = len(keys) == 1 or alike and all(np.ptp(x) <= 0.1 * abs(x).max() for x in steps)
        readings.append((len({*keys.values()}), even, keys))
    *_, even, keys = max(readings, key=lambda reading: reading[:2])
    return keys, even


def in_order(paths):
    """Paths, or names, sorted by their text and their numbers."""
    return sorted(sorted(paths), key=numbered(paths)[0].get)


def place_of(path):
    """A path in the folder itself where that is a link; a file that is one stands for itself."""
    return path.parent.resolve() / path.name


def groups_of(path, names):
    """The groups of an HDF5 file, if several have arrays of those `names` that it lacks, or [path]."""
    groups = []
    if names and path.suffix.lower() not in NETCDF and path.is_file() and h5py.is_hdf5(path):
        with reading(path), h5py.File(path) as file:
            lacking = [name for name in names if name and name not in file and name not in file.attrs]
            groups = [path / name for name, item in file.items() if isinstance(item, h5py.Group)
                      and not isinstance(file.get(name, getlink=True), h5py.SoftLink)
                      and any(getattr(item.get(word), 'size', 1) > 1 for word in lacking)]
    return in_order(groups) if len(groups) > 1 else [path]


def paths_of(sources, names=()):
    """Files, each once, in the order of the numbers in their names; a folder stands for its files,
    or if it has none, for those of the folders in it; a line says so where it has both.

    An HDF5 file stands for its groups, file/group, if these have the variables `names`.
    """
    def files(paths):
        links_first = sorted(paths, key=lambda path: (not path.parent.is_symlink(), path))
        return {place_of(path): path for path in links_first if path.suffix.lower() in KINDS
                and path.is_file() and path.name[0] != '.'}
    found, folders = {}, {}
    for source in map(Path, sources):
        if source.parent.is_file():                                 # a group of it
            with reading(source.parent), h5py.File(source.parent) as file:
                require(source.name in file, f'{source.parent}: there is no group {source.name}')
            found = {place_of(source): source} | found
            continue
        require(source.exists() or source.is_symlink(), f'{source}: there is no such file or folder')
        inside, below = files([source, *source.glob('*')]), files(source.glob('[!.]*/*'))
        if not (inside or below):
            deeper = f'; name the folders, as {source}/*' if files(source.glob('*/*/*')) else ''
            raise InputError(f'{source}: there is no file of the kinds {" ".join(KINDS)} in it or '
                             f'its folders{deeper}')
        if inside and below:
            warn(f'{source}: its own files are read, and not the {len(below)} in its folders')
        found = (inside or below) | found
    for path in found.values():
        folders.setdefault(path.parent, []).append(path)
    return [group for folder in in_order(folders) for path in in_order(folders[folder])
            for group in groups_of(path, names)]


def each_in_one(paths, names):
    """Whether several files have variables `names`, each of which is in one of them or in all, and
    each file has one of its own.
    """
    if not 1 < len(paths) <= len(names):
        return False
    inside = [{*names} & contents(path, names)[0].keys() for path in paths]
    own = [some - {*names}.intersection(*inside) for some in inside]
    return all(own) and {*chain(*inside)} == {*names} and sum(map(len, own)) == len({*chain(*own)})


def with_equal_numbers(folder, names):
    """The files of a folder in groups whose names differ in the variable alone, in their order."""
    rests = {path: path.name[len(variable_of(path, names)):] for path in folder}
    keys, _ = numbered(rests.values())
    number = lambda path: keys[rests[path]]
    return [[*group] for _, group in groupby(sorted(folder, key=number), number)]


def variables_apart(paths, folders, names):
    """Groups of paths of which each has every variable once, in a file of its own; [] if none has.

    A group is all paths, or a folder, or what differs in a folder by the name of the variable alone.
    Raises InputError where only some of the groups have.
    """
    alike = [tuple(group) for folder in folders if len(names) > 1
             for group in with_equal_numbers(folder, names)]
    for groups in [tuple(paths)], folders, alike:
        others = [group for group in groups if not each_in_one(group, names)]
        if others and len(others) < len(groups):
            raise InputError(f'{others[0][0].parent}: expected each of --variables '
                             f'{" ".join(names)} in one file, as in the others; there is '
                             f'{others[0][0].name}')
        if groups and not others:
            return groups
    return []


def warn_of_names(paths, what):
    """Print a line if names of runs, each of them `what`, a file or a folder, differ in more than
    numbers, and so may be those of variables.
    """
    above = len({path.parent for path in paths}) > 1
    labels = [path.parent.name if what == 'folder' else
              f'{path.parent.name}/{path.stem}' if above else path.stem for path in paths]
    texts = {key[::2]: label for label, key in numbered(labels)[0].items()}
    if len(texts) > 1:
        warn(f'the names {" ".join(sorted(texts.values())[:4])} differ in more than numbers, and each '
             f'{what} is a trajectory; if they are variables of one, name these by --variables')


def variables_of(path, own):
    """The names of the variables to read, those of an Own or the only one in a file that fits."""
    main, named = parse_layout(own.layout)
    names = own.variables
    if not main or not names:
        shapes, listed = contents(path)
        names = [name for name, shape in shapes.items() if places(shape, main)]
        require(main and (len(names) == 1 or '' in names),
                f'{path}: {len(names)} arrays fit --layout {main or "(none)"}; name the axes '
                f'in their order, such as NTHWC, and by --variables what to read; there are '
                f'{listed}')
        names = names[:1]
        print(f'{path.name}: read {names[0] or "it"} of {listed}')
    require(len({*names}) == len(names) and named.keys() <= {*names},
            f'--layout {" ".join(own.layout)}, --variables {" ".join(names)}: expected different '
            f'variables, and the axes of these')
    return names


def join(paths, own):
    """[Piece.parts] of the runs in files, and the names of the variables to read.

    own: an Own. Prints what was joined along what.
    """
    names = variables_of(paths[0], own)
    folders = [tuple(folder) for _, folder in groupby(paths, lambda path: path.parent)]
    of_frames = 'T' not in parse_layout(own.layout)[0]
    groups = variables_apart(paths, folders, names)
    if of_frames and len(groups) > len(folders):      # several in a folder: its frames
        how = 'channels of frames (T)'
        runs = [tuple(run) for _, run in groupby(groups, lambda group: group[0].parent)]
    elif groups:
        how = 'channels' if len(groups) == 1 else 'channels of trajectories (N)'
        runs = [(group,) for group in groups]
    elif of_frames:
        how = 'frames (T)'                                  # those in a folder are a trajectory
        runs = [tuple((path,) for path in folder) for folder in folders]
    else:
        how = 'trajectories (N)'
        runs = [((path,),) for path in paths]
    if len(paths) > 1:
        first, last = ['/'.join(path.parts[-min(len(folders), 2):]) for path in paths[::len(paths) - 1]]
        print(f'{len(paths)} files are joined as {how}: {first} ... {last}')
    if not (groups or own.variables):
        mine = [path for path in paths if path not in own.test_source]
        warn_of_names(mine, 'folder' if of_frames else 'file')
    return runs, names
