"""Scripts of Lightning, Fabric, Accelerate and the Trainer on the ranks of a run, against each framework by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.framework_scripts import (
    SCRIPTS,
    TOLERANCE,
    VARIABLES,
    losses,
    losses_alone,
    losses_of_all,
    missing,
    write_all,
)
from support.launching import Launch
from support.refusals import check, codes

pytest.importorskip("torch")
if reason := missing():
    pytest.skip(reason, allow_module_level=True)

PROGRAM = Path(__file__).parent / "programs" / "framework_misuse.py"
LIMITED = {**VARIABLES, "HPCTRAIN_TIMEOUT": "120"}

Alone = dict[str, list[float]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The losses of each script in one process."""
    return losses_alone(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(3, marks=pytest.mark.thorough)]
)
@pytest.mark.long
def test_losses_are_those_of_one_process(hpctrain: Launch, tmp_path: Path, alone: Alone, ranks: int) -> None:
    options = ("-np", str(ranks), "--backend", "mpi", "--oversubscribe", "--run-dir", "run")
    result = hpctrain("run", write_all(tmp_path), *options, **LIMITED)
    assert result.returncode == 0, result.stdout
    found = losses_of_all(result.stdout)
    assert found.keys() == alone.keys()
    for name, each in found.items():
        assert each == pytest.approx(alone[name], rel=0, abs=TOLERANCE), name
        # The group has the name that the script asked for, of which hpctrain is none.
    assert f"group of {ranks} over " in result.stdout and "over hpctrain" not in result.stdout
    alone_on_each = "each rank by itself"
    assert alone_on_each not in result.stdout
    # Of the first optimizer that makes one: a fit of Lightning on several ranks, Fabric's on one.
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    steps = [event["iteration"] for event in events if event["event"] == "step"]
    assert steps == [*range(1, 30 * len(alone["digits_lightning.py" if ranks > 1 else "digits_fabric.py"]) + 1)]


# Rank 1 dies in the third epoch, the first time.
KILL = """
class Kill(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if (trainer.current_epoch, index, trainer.global_rank) == (2, 7, 1) and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

"""
# Lightning makes a group over Gloo for it.
PREPARE = """\
    def prepare_data(self):
        open(f"prepared-by-{self.trainer.global_rank}", "w").close()

    def train_dataloader"""


@pytest.mark.thorough
def test_a_killed_rank_under_lightning_resumes_from_its_checkpoint(
    hpctrain: Launch, tmp_path: Path, alone: Alone
) -> None:
    name = "digits_lightning.py"
    text = SCRIPTS[name].replace('if __name__ == "__main__":', f'{KILL}\nif __name__ == "__main__":')
    text = text.replace("callbacks=[", "callbacks=[Kill(), ").replace("    def train_dataloader", PREPARE)
    (tmp_path / name).write_text(f"import os, signal\n{text}")
    options = ("-np", "2", "--backend", "mpi", "--restarts", "1", "--run-dir", "run")
    result = hpctrain("run", name, *options, **LIMITED)
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "killed").exists()
    assert [path.name for path in tmp_path.glob("prepared-*")] == ["prepared-by-0"]
    assert "rank 1" in result.stdout and "(SIGKILL)" in result.stdout
    # Two epochs ahead of the kill, and those from the checkpoint on.
    assert losses(result.stdout) == pytest.approx(alone[name], rel=0, abs=TOLERANCE)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"


@pytest.mark.long
def test_what_does_not_fit_the_run_is_refused(hpctrain: Launch, tmp_path: Path) -> None:
    result = hpctrain("run", str(PROGRAM), "-np", "2", "--backend", "mpi", "--", str(tmp_path), **LIMITED)
    assert result.returncode == 0, result.stdout
    wanted = {
        # Lightning's and Fabric's own.
        "trainer": ("ValueError", {}),
        "fabric": ("ValueError", {}),
        "size": ("HT-group-made-otherwise", {"name": "world_size", "value": 5, "found": 2}),
        "nccl": ("HT-backend-unfit", {"asked": "nccl"}),
        "twice": ("HT-gradients-reduced-twice", {}),
    }
    for rank in range(2):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told.keys() == wanted.keys()
        for name, (code, values) in wanted.items():
            check(told[name], code, **values)


@pytest.mark.long
def test_a_backend_without_process_groups_names_those_that_have_some(hpctrain: Launch, tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    (tmp_path / "digits_accelerate.py").write_text(SCRIPTS["digits_accelerate.py"])
    result = hpctrain("run", "digits_accelerate.py", "-np", "2", "--backend", "horovod", **LIMITED)
    assert result.returncode == 2, result.stdout
    assert "HT-backend-unfit" in codes(result.stdout)
