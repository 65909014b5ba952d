"""The MPI engine on real ranks: closed forms for each type, size and arrangement of nodes; what it leaves behind."""

from __future__ import annotations

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
