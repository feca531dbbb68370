"""The line on the memory of a step, against a network whose tensors are counted by hand."""
import math
from types import SimpleNamespace

import pytest
import torch

from helpers import same, small_model
from runtime import memory


class Two(torch.nn.Module):
    """Layers of 8 and 4 outputs, 72 + 36 numbers; a pass keeps the 8 inputs and the 8 values between them."""
    config = SimpleNamespace(frames=2, resolution=(2, 2), channels=1, experts=0)

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, u):
        return self.two(self.one(u.flatten(1)).exp())


def test_what_a_pass_keeps_is_counted_once_without_weights_and_the_prediction():
    assert memory.saved_bytes(Two()) == 4 * (8 + 8)


def test_what_is_available_is_what_the_machine_and_the_limit_of_a_container_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, 'Path', lambda path: tmp_path / path[1:])
    assert memory.available() == math.inf
    (tmp_path / 'proc').mkdir()
    (tmp_path / 'proc/meminfo').write_text('MemTotal:    9 kB\nMemAvailable:    7 kB\n')
    assert memory.available() == 7168
    group = tmp_path / 'sys/fs/cgroup'
    group.mkdir(parents=True)
    (group / 'memory.current').write_text('1500\n')
    (group / 'memory.stat').write_text('anon 900\nactive_file 100\ninactive_file 500\nslab 3\n')
    for limit, left in (('max', 7168), ('5000', 4000), ('9000', 7168)):
        (group / 'memory.max').write_text(f'{limit}\n')
        assert memory.available() == left


@pytest.mark.parametrize('free, words', [
    (10 ** 9, 'GB are available'), (4 * 432 + 700, '; --accumulate 4 fits, or'), (1000, '; take a smaller --size, or')])
def test_where_a_step_does_not_fit_the_accumulation_that_fits_is_named(free, words, monkeypatch):
    """The weights, gradients and moments take 4 * 432 bytes, and each of 20 samples 64."""
    monkeypatch.setattr(memory, 'available', lambda: free)
    line = memory.forecast(Two(), 20, 2)
    assert line.startswith('memory: about 3e-06 GB for a step, ') and words in line
    assert ('--accumulate' in words) == ('--accumulate' in line)
    monkeypatch.setattr(memory, 'available', lambda: 8 * free)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '8')
    assert memory.forecast(Two(), 20, 2) == line
    model = Two()
    model.config = SimpleNamespace(**{**vars(Two.config), 'experts': 4})        # they need whole batches
    assert ('; --batch_size 10 for each process fits' in memory.forecast(model, 20, 2)) == ('--acc' in words)


def test_a_forecast_changes_nothing_in_a_network():
    model = small_model(experts=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert memory.available() > 2 ** 20 and memory.saved_bytes(model) > 10 ** 4
    assert same(before, dict(model.state_dict()))
