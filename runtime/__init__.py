"""What makes a run safe. Commands import this before torch, which then reads how OpenMP's threads wait."""
import os

os.environ.setdefault('GOMP_SPINCOUNT', '1000')     # by default 300000 rounds, far too long beside busy processes
