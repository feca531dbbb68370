"""What makes a run safe. Commands import this before torch, which then reads how OpenMP's threads wait."""
import os
import sys

os.environ.setdefault('GOMP_SPINCOUNT', '1000')     # by default 300000 rounds, far too long beside busy processes
for _name in ('stdin', 'stdout', 'stderr'):
    if getattr(sys, _name) is None:                 # closed, as by cron: else the next file would get its number
        setattr(sys, _name, open(os.devnull, 'r' if _name == 'stdin' else 'w'))
