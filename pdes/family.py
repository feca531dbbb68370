"""The row type of the table of families."""
from typing import NamedTuple


class Family(NamedTuple):
    """How one dataset is generated. Its sizes are in configs.DATASETS."""
    pde: str                    # the equation in words
    draw: object                # (random, N) -> initial state {argument of `solve`: field (N, N) or number}, in float64
    solve: object               # (stride, frames, dt, progress, batches of these) -> (B, T, N/stride, N/stride, C)
    nano: dict                  # sizes of the nano form, where they differ from generate.NANO
    grid: int = 1               # least number of points a side of the solver, of which every stride-th is stored
    coefficients: tuple = ()    # arguments of `solve` stored beside the data, which the model does not see
