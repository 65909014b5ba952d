"""A script of Lightning in a real Slurm job of two nodes, whose variables Lightning reads too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from framework_scripts import REPORT, SCRIPTS, TOLERANCE, VARIABLES, losses, losses_alone, missing
from launching import AS_ROOT
from local_slurm import LocalSlurm

pytest.importorskip("torch")
if reason := missing():
    pytest.skip(reason, allow_module_level=True)

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
NAME = "digits_lightning.py"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "srun-pmix"])
def test_losses_on_two_nodes_are_those_of_one_process(slurm: LocalSlurm, tmp_path: Path, launcher: str) -> None:
    (tmp_path / NAME).write_text(SCRIPTS[NAME] + REPORT)
    job = ("salloc", "-N2", "-n2", f"--chdir={tmp_path}")
    run = (HPCTRAIN, "run", NAME, "--backend", "mpi", "--launcher", launcher, "--run-dir", "run")
    output = slurm.run(*job, *run, check=False, timeout=280, **AS_ROOT, **VARIABLES)
    alone = tmp_path / "alone"
    alone.mkdir()
    assert losses(output) == pytest.approx(losses_alone(alone, NAME), rel=0, abs=TOLERANCE)
    assert "group of 2 over hpctrain" in output
