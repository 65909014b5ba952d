"""The job scripts and their directives, read by the real sbatch."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.control.schedulers.slurm.slurm_scheduler import directive
from support.slurm.local_slurm import LocalSlurm

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "jobs").glob("*.sh"))
# What the local cluster does not have; the tests' profiles name them.
_ELSEWHERE = ("--partition=", "--account=", "--gres=", "--cpus-per-task=", "--mem=", "--ntasks-per-node=")

ODD = [
    "a b",
    " a  b ",
    "it's",
    'say "x"',
    "back\\slash",
    "ends\\",
    "\\\\",
    "#1 # comment",
    "$(touch pwned)",
    "`touch pwned`; $HOME",
    "--nodes=3",
    "=",
    "é ü 中",
    "\t",
    "*?[]{}()<>|&!~",
]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_sbatch_accepts_it(path: Path, slurm: LocalSlurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    lines = path.read_text().splitlines(keepends=True)
    script.write_text("".join(line for line in lines if not any(option in line for option in _ELSEWHERE)))
    # One that it cannot read is refused, so that the test can fail.
    assert "to start at" in slurm.run("sbatch", "--test-only", "--time=10", str(script))
    script.write_text(script.read_text().replace("#SBATCH --nodes=", "#SBATCH --nodes=x"))
    assert "to start at" not in slurm.run("sbatch", "--test-only", "--time=10", str(script), check=False)


@pytest.mark.parametrize("text", ODD)
def test_a_value_reaches_slurm_as_it_is(text: str, slurm: LocalSlurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    lines = [
        "#!/bin/bash",
        directive("job-name", text),
        "#SBATCH --hold",
        "#SBATCH --nodes=2",
        "#SBATCH --output=/dev/null",
    ]
    script.write_text("\n".join([*lines, "true", ""]))
    job = slurm.run("sbatch", "--parsable", str(script)).strip()
    try:
        # --oneliner would end at a blank.
        shown = slurm.run("scontrol", "show", "job", job)
        assert shown.partition("JobName=")[2].partition("\n")[0] == text
        assert "NumNodes=2" in shown
    finally:
        slurm.run("scancel", job)
