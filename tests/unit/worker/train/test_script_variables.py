"""What other libraries of a script are told of its run: read by W&B's and MLflow's own packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventWriter, run_id
from hpctrain.common.run.events.kinds import StartEvent
from hpctrain.worker.train import hub, script_variables
from hpctrain.worker.train.script_variables import keep_dumps, keep_tracked_runs, set_variables
from support import needs
from support.launching import Launch

NAMES = (
    *("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR", "MLFLOW_RUN_ID", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that has begun, under a name that is relative to the working directory."""
    for name in NAMES:
        # Set first, so that what a test sets is taken back too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "node"))
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    # What other tests have imported is not changed.
    for module in (script_variables, hub):
        monkeypatch.setattr(module, "change_after_import", lambda _: None)
    directory = RunDirectory(Path("run"))
    with EventWriter(directory.events) as events:
        events.emit(StartEvent(attempt=1, iteration=0))
    return directory


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_they_follow_from_the_run_the_rank_and_the_node(directory: RunDirectory, tmp_path: Path) -> None:
    set_variables(directory, 0)
    keep_dumps(directory)
    compiled = f"{tmp_path}/node/hpctrain-compiled-{os.getuid()}"
    dumps = f"{tmp_path}/run/logs/flight-recorder-rank-"
    expected = {
        "WANDB_DIR": f"{tmp_path}/run",
        "TORCHINDUCTOR_CACHE_DIR": compiled,
        "TRITON_CACHE_DIR": f"{compiled}/triton",
        "TORCH_FR_DUMP_TEMP_FILE": dumps,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": dumps,
    }
    assert variables() == expected


def test_what_the_user_has_set_stays(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mlflow_run.write_text("of this run")
    own = {name: "the user's" for name in NAMES if name != "TORCH_FR_DUMP_TEMP_FILE"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    set_variables(directory, 0)
    keep_dumps(directory)
    assert variables() == own


SCRIPT = """
import os, signal
from pathlib import Path
import mlflow, wandb
import hpctrain as ht

ht.init()
again = Path("state").exists()
tracked = wandb.init(project="p", mode="offline")
mlflow.start_run()
for step in range(3, 6) if again else range(3):
    tracked.log({"loss": step}, step=step)
    mlflow.log_metric("loss", step, step=step)
tracked.finish()
if not again:
    Path("state").touch()
    os.kill(os.getpid(), signal.SIGKILL)
mlflow.end_run()
"""


def inspected(file: Path) -> str:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.long
@needs.mlflow
@needs.wandb
def test_trackers_go_on_after_a_resume(tmp_path: Path, hpctrain: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's own reader and MLflow's own client see one run each, of a script that was killed in between."""
    (tmp_path / "script.py").write_text(SCRIPT)
    store = f"file://{tmp_path}/mlruns"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    first = hpctrain("run", "script.py", "-np", "1", "--run-dir", "run")
    assert first.returncode == 4, first.stderr
    again = hpctrain("run", "--resume", "--run-dir", "run")
    assert again.returncode == 0, again.stderr

    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    files = [next(folder.glob("run-*.wandb")) for folder in folders]
    records = [json.loads(line) for file in files for line in inspected(file).splitlines()]
    assert {record["run"]["run_id"] for record in records if record["type"] == "run"} == {
        run_id(RunDirectory(tmp_path / "run").events)[16:]
    }
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [item["loss"] for item in items] == [0, 1, 2, 3, 4, 5]

    from mlflow.tracking import MlflowClient

    client = MlflowClient(store)
    (run,) = client.search_runs(["0"])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(step, step) for step in range(6)]
    assert run.info.status == "FINISHED"


FOLDS = """
import sys
from pathlib import Path
import wandb
from hpctrain.common.run.directory import RunDirectory
from hpctrain.worker.train.script_variables import set_variables

set_variables(RunDirectory(Path("run")), int(sys.argv[2]))
own = wandb.init(project="p", mode="offline", id="own")
own.finish()
for fold in range(int(sys.argv[1])):
    run = wandb.init(project="p", mode="offline", reinit=True)
    print("fold", run.id)
    run.finish()
"""


def begun(folds: int, rank: int = 0) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", FOLDS, str(folds), str(rank)], check=True, capture_output=True, text=True
    )
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("fold ")]


@pytest.mark.long
@needs.wandb
def test_a_script_goes_on_with_its_only_run(directory: RunDirectory) -> None:
    """The folds of a cross-validation are runs of their own; one with an identity of its own leaves the run's alone."""
    identity = run_id(directory.events)[16:]
    assert begun(1) == begun(1) == [identity]
    # Scripts that track on each rank have a run each.
    assert begun(1, rank=3) == [f"{identity}-3"]
    first, second = begun(2)
    assert first == identity != second
    # Nobody can say which of two goes on.
    assert not {*begun(1)} & {first, second}


class Server:
    """What MLflow's module has, for runs that a server makes, of which it forgets some."""

    MlflowException = RuntimeError

    def __init__(self, known: set[str]) -> None:
        self.known = known

    def start_run(self, nested: bool = False) -> SimpleNamespace:
        asked = os.environ.pop("MLFLOW_RUN_ID", None)
        if asked and asked not in self.known:
            raise RuntimeError("not found")
        identity = asked or f"run{len(self.known)}"
        self.known.add(identity)
        return SimpleNamespace(info=SimpleNamespace(run_id=identity))


def test_runs_of_mlflow(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    known: set[str] = set()

    def attempt() -> Server:
        server = Server(known)
        monkeypatch.setattr(
            script_variables,
            "change_after_import",
            lambda changes: [change(server) for name, change in changes.items() if "mlflow" in name],
        )
        keep_tracked_runs(directory, 0)
        return server

    assert attempt().start_run().info.run_id == attempt().start_run().info.run_id == "run0"
    # One that its server has forgotten is replaced, and the next attempt goes on with that.
    known.clear()
    known.add("other")
    assert attempt().start_run().info.run_id == attempt().start_run().info.run_id == "run1"
    server = attempt()
    assert [server.start_run().info.run_id, server.start_run(nested=True).info.run_id] == ["run1", "run2"]
    server = attempt()
    assert [server.start_run().info.run_id, server.start_run().info.run_id] == ["run1", "run3"]
    assert attempt().start_run().info.run_id == "run4"


def test_a_damaged_identity_is_none(directory: RunDirectory) -> None:
    for content in (b"", b"\xff", b"a\0b", b"x" * 10_000):
        directory.mlflow_run.write_bytes(content)
        keep_tracked_runs(directory, 0)
        assert "MLFLOW_RUN_ID" not in os.environ
    directory.mlflow_run.unlink()
    os.mkfifo(directory.mlflow_run)
    keep_tracked_runs(directory, 0)
    assert "MLFLOW_RUN_ID" not in os.environ
