"""How long OpenMP's threads wait for work before they sleep. A command imports this file before it imports torch.

By default they spin for 300000 rounds, which is far too long beside busy processes; without those, 1000 are too few
(docs/speed.md). OpenMP reads the number when torch is imported. GOMP_SPINCOUNT and OMP_WAIT_POLICY in the environment
take precedence.
"""
import os
from pathlib import Path


def spin_rounds(stat='/proc/stat'):
    """1000 if at least as many other processes as there are cores run now, by the file `stat` of Linux, else 50000."""
    if not Path(stat).exists():
        return 50000
    running = 0
    for line in Path(stat).read_text().splitlines():
        if line.startswith('procs_running'):
            running = int(line.split()[1])                      # this process is one of them
    return 1000 if running > os.cpu_count() else 50000


if 'OMP_WAIT_POLICY' not in os.environ:
    os.environ.setdefault('GOMP_SPINCOUNT', str(spin_rounds()))
