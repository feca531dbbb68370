"""OpenMP's threads wait for a bounded time, which is set before torch is imported."""
import os
from pathlib import Path

import pytest

import configs
import helpers
from runtime import spinning

ROOT = Path(configs.__file__).parent
WATCHED = """if True:
    import os, sys

    class AtTorch:
        def find_spec(name, path, target=None):
            if name == 'torch':
                print(os.environ.get('GOMP_SPINCOUNT'), flush=True)
                os._exit(0)
    sys.meta_path.insert(0, AtTorch)
    sys.path.insert(0, sys.argv[2])
    __import__(sys.argv[1])
    print('torch was not imported')"""
COMMANDS = ['.'.join(path.relative_to(ROOT).with_suffix('').parts) for room in ('', 'sources', 'lab')
            for path in (ROOT / room).glob('*.py') if 'terminal.cli(main)' in path.read_text()]


def spins_at_the_import_of_torch(module, **environment):
    unset = {name: value for name, value in os.environ.items() if name not in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')}
    return helpers.run('-c', WATCHED, module, str(ROOT), env={**unset, **environment}).stdout


@pytest.mark.parametrize('module', COMMANDS)
def test_openmps_spinning_is_bounded_before_torch_is_imported(module):
    assert spins_at_the_import_of_torch(module) in ('50000\n', '1000\n')


def test_openmp_spins_for_a_short_time_beside_busy_processes(tmp_path):
    stat, cores = tmp_path / 'stat', os.cpu_count()
    for others, rounds in ((0, 50000), (cores - 1, 50000), (cores, 1000)):
        stat.write_text(f'ctxt 28647737\nprocs_running {1 + others}\nprocs_blocked 0\n')
        assert spinning.spin_rounds(stat) == rounds
    assert spinning.spin_rounds(tmp_path / 'missing') == 50000


def test_the_users_way_of_waiting_stays():
    assert len(COMMANDS) == 10
    assert spins_at_the_import_of_torch('train', GOMP_SPINCOUNT='7') == '7\n'
    assert spins_at_the_import_of_torch('train', OMP_WAIT_POLICY='passive') == 'None\n'
