"""The MPI engine on real ranks: closed forms for each type, size and arrangement of nodes; what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "mpi_engine.py"
# The last one leaves a rank out, as if it had died.
CHECKS = (
    "layouts",
    "large_values",
    "stale_reads",
    "order",
    "overlap",
    "one_thread",
    "different_buffers",
    "different_copies",
    "gradients_after_shutdown",
    "rebuild",
)


@pytest.mark.long
def test_reductions_agree_with_closed_forms_on_every_arrangement_of_nodes(mpirun):
    result = mpirun(PROGRAM, 4, *CHECKS, timeout=400)
    for check in CHECKS:
        assert result.stdout.count(f"{check} agrees") == 4


@pytest.fixture
def places(tmp_path):
    """Folders of the test's own for all that Open MPI puts into files, and the variables that name them."""
    names = ("shared", "session")
    for name in names:
        (tmp_path / name).mkdir()
    shared = str(tmp_path / "shared")
    yield {
        "SHARED_FILES": shared,
        "OMPI_MCA_osc_sm_backing_directory": shared,
        "OMPI_MCA_btl_sm_backing_directory": shared,
        "TMPDIR": str(tmp_path / "session"),
    }
    left = [path.name for name in names for path in (tmp_path / name).iterdir()]
    assert [name for name in left if not name.startswith("torchinductor")] == []  # PyTorch's own cache


@pytest.mark.long
def test_a_hundred_cycles_leak_nothing_and_a_script_that_just_ends_leaves_nothing_behind(mpirun, places):
    output = mpirun(PROGRAM, 2, "cycles", "exit", **places).stdout
    assert output.count("cycles agrees") == output.count("exit agrees") == 2


def test_an_exception_on_one_rank_ends_all_and_leaves_nothing_behind(mpirun, places):
    """Of the others, one waits in a reduction, and one in the control plane."""
    result = mpirun(PROGRAM, 3, "crash", check=False, timeout=200, **places)
    assert result.returncode != 0
    assert "this rank" in result.stdout


MPICH = Path(__file__).parents[2] / ".mpich"
ON_MPICH = ("large_values", "order", "overlap", "different_buffers", "gradients_after_shutdown")


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
    command = [str(MPICH / "bin" / "mpiexec"), "-n", "4", sys.executable, "-u", str(PROGRAM), *ON_MPICH]
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
    for check in ON_MPICH:
        assert output.count(f"{check} agrees") == 4, output
