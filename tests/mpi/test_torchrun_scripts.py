"""Scripts written for torchrun, unchanged on the ranks of a run, against one of them in a process by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.comers import cells
from support.comers.cells import SCRIPTS, all_losses
from support.launching import Launch
from support.refusals import codes

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process on the whole batch, without hpctrain."""
    return list(cells.alone("torch").values())


def test_losses_are_those_of_one_process(hpctrain: Launch, tmp_path: Path, alone: list[float]) -> None:
    """Over hpctrain's own groups; a script may destroy the group and ask for another."""
    result = hpctrain("run", str(SCRIPTS / "all.py"), "-np", "2", "--backend", "mpi", "--run-dir", "run")
    assert result.returncode == 0, result.stdout
    assert all_losses(result.stdout) == pytest.approx(6 * alone, rel=0, abs=1e-11)
    assert "each rank by itself" not in result.stdout
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["iteration"] for event in events if event["event"] == "step"] == [*range(1, 11)]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_over_gloo_beside_ht_init_and_by_themselves(
    hpctrain: Launch, tmp_path: Path, alone: list[float], launcher: str
) -> None:
    """The group that ht.init() has made over Gloo is the one that the script asks for."""
    text = (SCRIPTS / "ddp.py").read_text()
    if launcher == "mpirun":
        text = text.replace("import os\n", "import os\n\nimport hpctrain as ht\n\nht.init()\n", 1)
    (tmp_path / "script.py").write_text(text)
    result = hpctrain("run", "script.py", "-np", "2", "--backend", "gloo", "--launcher", launcher)
    assert result.returncode == 0, result.stdout
    assert all_losses(result.stdout) == pytest.approx(alone, rel=0, abs=1e-11)
    assert "each rank by itself" not in result.stdout


def test_one_rank_is_a_group_of_one(hpctrain: Launch, alone: list[float]) -> None:
    result = hpctrain("run", str(SCRIPTS / "ddp.py"), "-np", "1")
    assert result.returncode == 0, result.stdout
    assert all_losses(result.stdout) == pytest.approx(alone, rel=0, abs=1e-11)


@pytest.mark.long
def test_a_backend_without_groups_names_those_that_have_them(hpctrain: Launch) -> None:
    result = hpctrain("run", str(SCRIPTS / "ddp.py"), "-np", "2", "--backend", "horovod")
    assert result.returncode == 2
    assert "HT-backend-unfit" in codes(result.stdout)


@pytest.mark.long
def test_a_killed_rank_is_named_and_the_script_started_again(
    hpctrain: Launch, tmp_path: Path, alone: list[float]
) -> None:
    kill = """
    if step == 4 and rank == 1 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), 9)
    own = slice"""
    (tmp_path / "script.py").write_text((SCRIPTS / "ddp.py").read_text().replace("\n    own = slice", kill))
    result = hpctrain("run", "script.py", "-np", "2", "--restarts", "1", "--run-dir", "run")
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "killed").exists()
    assert all_losses(result.stdout)[-10:] == pytest.approx(alone, rel=0, abs=1e-11)
    assert "HT-rank-killed" in (tmp_path / "run" / "events.jsonl").read_text()
