"""torch.distributed as the carrier: under mpirun without torchrun, and under torchrun without MPI.

That training equals one process's is in test_torch_equivalence.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.refusals import codes
from support.startup import warm_start

pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent / "programs"


def torchrun(program: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program), *arguments]
    environment = {**os.environ, **warm_start.READ_AT_IMPORT, **variables}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=program.parent
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        # It ends its ranks with it.
        process.terminate()
        process.wait(timeout=200)
    return subprocess.CompletedProcess(command, process.returncode, output)


@pytest.mark.long
def test_the_engine_under_mpirun(mpirun):
    assert mpirun(PROGRAMS / "torch_distributed.py", 3).stdout.count("engine agrees") == 3


@pytest.mark.long
def test_the_control_plane_under_torchrun_then_a_rank_that_dies():
    result = torchrun(PROGRAMS / "comm_control.py", "die", HPCTRAIN_BACKEND="gloo")
    assert result.stdout.count("collectives agree") == 2, result.stdout
    assert "HT-collective-failed" in codes(result.stdout) and "TransientError: error[" in result.stdout
    assert result.returncode != 0
