"""Every test starts from a seed of its own name; small tensors run faster, and exactly the same, on one thread."""
import os
import sys
import zlib
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'             # of this process and of those that the tests start

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed(request):
    torch.manual_seed(zlib.crc32(request.node.name.encode()))
