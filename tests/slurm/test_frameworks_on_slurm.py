"""Scripts of Lightning and Hugging Face in a real Slurm job of two nodes, whose variables Lightning would read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.framework_scripts import TOLERANCE, VARIABLES, losses_alone, losses_of_all, missing, write_all
from support.launching import AS_ROOT
from support.slurm.local_slurm import LocalSlurm

pytest.importorskip("torch")
if reason := missing():
    pytest.skip(reason, allow_module_level=True)

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["mpirun", "srun-pmix"])
def test_losses_on_two_nodes_are_those_of_one_process(slurm: LocalSlurm, tmp_path: Path, launcher: str) -> None:
    script = write_all(tmp_path)
    job = ("salloc", "-N2", "-n2", f"--chdir={tmp_path}")
    run = (HPCTRAIN, "run", script, "--backend", "mpi", "--launcher", launcher, "--run-dir", "run")
    output = slurm.run(*job, *run, check=False, timeout=280, **AS_ROOT, **VARIABLES)
    alone = tmp_path / "alone"
    alone.mkdir()
    found = losses_of_all(output)
    for name, each in losses_alone(alone).items():
        assert found[name] == pytest.approx(each, rel=0, abs=TOLERANCE), name
    assert "group of 2 over " in output and "over hpctrain" not in output
