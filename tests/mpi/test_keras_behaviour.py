"""What the Keras adapter promises beside the numbers, on real ranks."""

from __future__ import annotations

import importlib.util
import re
import socket
from pathlib import Path

import pytest

from support.refusals import codes

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("no TensorFlow", allow_module_level=True)

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.long
@pytest.mark.parametrize("backend", ["mpi", pytest.param("horovod", marks=pytest.mark.thorough)])
def test_behaviour(mpirun, tmp_path, backend):
    result = mpirun(PROGRAMS / "keras_behaviour.py", 3, backend, str(tmp_path), timeout=400)
    assert all(f"rank {rank} is through\n" in result.stdout for rank in range(3)), result.stdout


@pytest.mark.long
@pytest.mark.slow
def test_horovods_own_optimizer_is_stopped_at_the_first_check(mpirun):
    result = mpirun(PROGRAMS / "keras_horovod_optimizer.py", 2, check=False)
    assert result.returncode == 1, result.stdout
    assert "the end" not in result.stdout
    assert "HT-parameters-differ" in codes(result.stdout)
    assert re.search(rf"step 1\b.*'sequential/only/.*\({socket.gethostname()}\)", result.stdout)
