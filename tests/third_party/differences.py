"""What the comparisons share: the difference of two runs, frame by frame."""
import numpy as np


def differences(what, ours, theirs):
    """L2RE of each frame, the first axis of both arrays; printed with the name `what` (python -m pytest -rP)."""
    values = [float(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b)) for a, b in zip(ours, theirs, strict=True)]
    print(f'{what}:', *(f'{value:.1e}' for value in values))
    return values
