"""The MPI engine on MPICH, where the environment has Open MPI: shared windows, barriers, exchanges between nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "mpi_engine.py"
MPICH = Path(__file__).parents[2] / ".mpich"
CHECKS = ("large_values", "order", "overlap", "different_buffers", "gradients_after_shutdown")


@pytest.mark.thorough
@pytest.mark.skipif(not (MPICH / "bin" / "mpiexec").exists(), reason="no MPICH: make .mpich/installed.stamp")
def test_the_engine_runs_on_mpich(tmp_path):
    library = MPICH / "lib"
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LD_LIBRARY_PATH": str(library),
        # mpi4py's wheel binds to either MPI as it is imported
        "MPI4PY_MPIABI": "mpich",
        "MPI4PY_LIBMPI": str(library / "libmpi.so.12"),
    }
    command = [str(MPICH / "bin" / "mpiexec"), "-n", "4", sys.executable, "-u", str(PROGRAM), *CHECKS]
    process = subprocess.Popen(
        command, env=env, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        # mpiexec ends its ranks when it is told to end
        process.terminate()
        process.wait(timeout=100)
    assert process.returncode == 0, output
    assert output.count("on MPICH") == 4
    for check in CHECKS:
        assert output.count(f"{check} agrees") == 4, output
