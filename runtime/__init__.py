"""What makes a run safe. Commands import this before torch, whose threads and memory follow these
settings.
"""
import ctypes
import os
import platform
import sys

os.environ.setdefault('GOMP_SPINCOUNT', '1000')     # not 300000 rounds beside busy processes
if platform.libc_ver()[0] == 'glibc':               # or a step would fault in large tensors anew
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-4, 0)                               # M_MMAP_MAX: large blocks come from the heap, too,
    mallopt(-1, -1)                       # M_TRIM_THRESHOLD: which is not handed back to the system
for _name in ('stdin', 'stdout', 'stderr'):
    if getattr(sys, _name) is None:    # closed, as by cron: else the next file would get its number
        setattr(sys, _name, open(os.devnull, 'r' if _name == 'stdin' else 'w'))
