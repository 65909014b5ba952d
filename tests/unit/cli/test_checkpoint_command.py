"""``hpctrain checkpoint``: damaged checkpoints are shown, and an exported model is the one that was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpctrain.cli.main import main
from hpctrain.common.checkpoints.find import set_aside
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.events import read_events
from hpctrain.worker.data import open_sources
from support import needs
from support.launching import Launch
from support.refusals import codes
from support.report.written_runs import recipe_plan, run_events, script_plan, write_run
from support.written_checkpoints import progress_of, write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Whole at 4, 8 and 12; the accuracy of each is in the events; 6 was damaged and is set aside."""
    path = write_run(tmp_path / "run", recipe_plan(), run_events()).path
    plan = recipe_plan().model_dump(mode="json")
    for iteration, ends in ((4, True), (6, False), (8, True), (12, True)):
        progress = progress_of(iteration, epoch=-(-iteration // 4), ends_epoch=ends, ranks=2)
        write_checkpoint(path / "checkpoints", progress, {"model.a": np.zeros(3)}, {}, plan=plan)
    set_aside(path / "checkpoints" / "step-00000006")
    return path


def rows(run: Path, capsys: pytest.CaptureFixture[str]) -> list[dict]:
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["checkpoints"]


def damage(path: Path) -> None:
    file = path / "rank-0-of-2.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_list(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Of whoever starts the tests.
    monkeypatch.delenv("COLUMNS", raising=False)
    found = rows(run, capsys)
    keys = ("iteration", "epoch", "ends_epoch", "ranks", "state")
    assert [tuple(row[key] for key in keys) for row in found] == [
        (4, 1, True, 2, "whole"),
        (8, 2, True, 2, "whole"),
        (12, 3, True, 2, "newest"),
        (6, 2, False, 2, "set aside"),
    ]
    accuracies = [event["test_accuracy"] for event in run_events() if event["event"] == "epoch"]
    assert [row["test_accuracy"] for row in found] == [*accuracies, None]
    files = (run / "checkpoints" / "step-00000012").glob("*.safetensors")
    assert found[2]["bytes"] == sum(file.stat().st_size for file in files)
    assert main(["checkpoint", "list", str(run)]) == 0
    text = capsys.readouterr().out
    assert "newest," in text and "--resume" in text and "damaged-step-00000006" in text


def test_a_damaged_one_is_shown_and_resume_takes_the_one_before(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run / "checkpoints" / "step-00000012")
    assert [row["state"] for row in rows(run, capsys)] == ["whole", "newest", "damaged", "set aside"]
    assert main(["checkpoint", "verify", str(run)]) == 3
    said = capsys.readouterr()
    assert "step-00000008: ok" in said.out and "step-00000012: damaged" in said.out
    assert codes(said.err) == ["HT-checkpoint-damaged"] and "step-00000012/rank-0-of-2.safetensors" in said.err
    assert main(["checkpoint", "verify", str(run), "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "failed"
    assert [len(each["faults"]) for each in answer["checkpoints"]] == [0, 0, 1]


@pytest.mark.parametrize("command", [["list"], ["verify"], ["export", "OUT"]], ids=lambda each: each[0])
def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    name, *out = command
    assert main(["checkpoint", name, str(tmp_path / "none"), *(str(tmp_path / "x.pt") for _ in out)]) == 2
    assert codes(capsys.readouterr().err) == ["HT-run-not-found"]


def test_what_is_not_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(out: str, source: Path = run) -> tuple[int, str]:
        return main(["checkpoint", "export", str(source), str(tmp_path / out)]), capsys.readouterr().err

    assert refused("m.h5")[0] == 2
    code, said = refused("m.keras")
    assert (code, codes(said)) == (2, ["HT-format-unknown"]) and "m.pt" in said
    (tmp_path / "m.pt").write_text("mine")
    code, said = refused("m.pt")
    assert (code, codes(said)) == (2, ["HT-output-exists"])
    assert (tmp_path / "m.pt").read_text() == "mine"
    damage(run / "checkpoints" / "step-00000012")
    code, said = refused("n.pt", run / "checkpoints" / "step-00000012")
    assert (code, codes(said)) == (3, ["HT-checkpoint-damaged"])
    script = write_run(tmp_path / "script", script_plan(), []).path
    write_checkpoint(script / "checkpoints", progress_of(1), plan=script_plan().model_dump(mode="json"))
    assert codes(refused("o.pt", script)[1]) == ["HT-checkpoint-not-of-recipe"]


@pytest.mark.long
def test_a_model_that_is_not_the_plans_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    assert main(["checkpoint", "export", str(run), str(tmp_path / "m.pt")]) == 1
    said = capsys.readouterr().err
    assert codes(said) == ["HT-checkpoint-of-other-model"] and "step-00000012" in said
    assert list(tmp_path.iterdir()) == [run]


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    return float((logits.argmax(axis=1) == labels).mean())


@pytest.mark.long
@pytest.mark.parametrize("framework", ["torch", pytest.param("keras", marks=pytest.mark.thorough)])
@needs.pytorch
def test_an_exported_model_has_the_accuracy_of_the_run(hpctrain: Launch, tmp_path: Path, framework: str) -> None:
    pytest.importorskip(framework)
    run = tmp_path / "run"
    done = hpctrain("run", "digits", "--framework", framework, "--set", "epochs=2", "--run-dir", str(run))
    assert done.returncode == 0, done.stdout
    out = tmp_path / {"torch": "model.pt", "keras": "model.keras"}[framework]
    done = hpctrain("checkpoint", "export", str(run), str(out))
    assert done.returncode == 0, done.stdout
    # Nothing of the run is needed any more.
    recorded = [each.test_accuracy for each in read_events(run / "events.jsonl") if each.event == "epoch"]
    shutil.rmtree(run)
    _, test = open_sources(load_recipe("digits"))
    samples = next(test.stream([np.arange(len(test))], 0))
    if framework == "torch":
        import torch

        from hpctrain.worker.models.torch_digits import digits_cnn

        model = digits_cnn().eval()
        model.load_state_dict(torch.load(out, weights_only=True), strict=True)
        with torch.no_grad():
            logits = model(torch.from_numpy(samples.images.transpose(0, 3, 1, 2).copy())).numpy()
    else:
        import keras

        logits = keras.saving.load_model(out, safe_mode=True).predict(samples.images, verbose=0)
    assert accuracy(logits, samples.labels) == recorded[-1]
