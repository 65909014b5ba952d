"""The prediction of a job: in a dry run, and in the run directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import main
from hpctrain.common.cluster.gpu_models import gpus
from hpctrain.common.run.directory import RUNS
from hpctrain.control.schedulers.profiles import load_profile, profile_names
from support import needs
from support.golden import check_text
from support.refusals import codes
from support.schedulers.fake_programs import Programs

pytestmark = needs.pytorch

RESNET = ("mlperf-resnet50@8192", "--set", "data.path=/data")
MODULES = """
import sys
from hpctrain.cli.main import main
code = main(sys.argv[1:])
heavy = [name for name in sys.modules if name == "numpy" or name.startswith("hpctrain.control.predict")]
sys.exit(f"{code} {heavy}" if code or heavy else 0)
"""


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Programs(tmp_path / "bin")
    made.folder.mkdir()
    made.add("sbatch", "print(7)")
    made.add("scancel")
    made.add("squeue")
    monkeypatch.setenv("PATH", made.environment["PATH"])
    monkeypatch.chdir(tmp_path)


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """What follows the heading in a dry run."""
    assert main(["submit", *arguments, "--dry-run"]) == 0
    _, _, text = capsys.readouterr().err.partition("\n# Prediction\n")
    return [line.strip() for line in text.splitlines() if line.strip()]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["predict", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_lines_are_those_of_predict(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ("--cluster", "dgx-h100", "--nodes", "4")
    found = lines(capsys, *RESNET, *cluster)
    assert main(["predict", *RESNET, *cluster]) == 0
    plan = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert found[: len(plan)] == plan
    title = "mlperf-resnet50@8192 on h100-sxm, 8 a node, nccl, 256 samples a rank"
    assert plan[0] == title
    assert found[len(plan)].startswith("suggested: --time ")


def test_a_language_model_on_its_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    gpt = ("gpt2-124m", "--set", "data.path=/text", "--cluster", "dgx-h100", "--nodes", "2")
    meshed = (*gpt, "--mesh", "dp_shard=-1,tp=2")
    found = planned(capsys, *meshed)
    assert (found["layout"]["tp"], found["layout"]["dp_shard"]) == (2, 8)
    shown = lines(capsys, *meshed)
    assert any(line.startswith("mesh: dp_shard 8 (zero 3) x tp 2;") for line in shown)
    assert any(line.startswith("suggested: --time") for line in shown)


def test_the_suggestion_is_for_all_epochs_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    # 42.5 of 44 epochs reach the target; the job trains all of them.
    minutes = planned(capsys, *RESNET, "--cluster", "perlmutter-gpu")["minutes"]
    (line,) = [
        line for line in lines(capsys, *RESNET, "--cluster", "perlmutter-gpu", "--account", "a") if "sugg" in line
    ]
    hours = int(line.split()[2].partition(":")[0])
    needed = minutes["high"] * 44 / 42.5 + 5 + 3
    assert needed <= 60 * hours < needed + 60


def test_a_time_that_is_too_short(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, *RESNET, "--cluster", "perlmutter-gpu", "--account", "a", "--time", "1:00:00")
    assert any("warning:" in line and "--time 1:00:00" in line for line in found)
    found = lines(capsys, *RESNET, "--cluster", "perlmutter-gpu", "--account", "a", "--time", "2-00:00:00")
    assert not any("ends before" in line for line in found)


def test_memory_that_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ("--cluster", "generic", "--gpus-per-node", "4", "--gpu", "p100")
    large = (*RESNET, "--set", "batch.micro_batch=512")
    most = planned(capsys, *large, "--gpu", "p100", "--gpus-per-node", "4")["largest_batch"]
    # Its batch norm is over 64 images, so that 171 or 176 at once would be refused.
    assert 128 <= most < 256
    (warning,) = (line for line in lines(capsys, *large, *cluster) if "batch.micro_batch=128" in line)
    assert " 512 " in warning and "p100 has" in warning and f" {most}: " in warning
    smaller = lines(capsys, *RESNET, *cluster, "--set", "batch.micro_batch=128")
    assert not any("p100 has" in line for line in smaller)


def test_a_profile_that_names_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    said = "none: the profile generic names no GPU; node.gpu in a profile does, or --gpu NAME"
    assert lines(capsys, "digits", "--cluster", "generic") == [said]
    # A job that asks for no GPU of a cluster has none.
    without = lines(capsys, "digits", "--cluster", "dgx-h100", "--gpus-per-node", "0")
    assert without[0] == said.replace("generic", "dgx-h100")


@pytest.mark.long
def test_what_cannot_be_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("")
    assert lines(capsys, "train.py", "--cluster", "dgx-h100") == []
    (script,) = lines(capsys, "train.py", "--cluster", "dgx-h100", "--gpu", "h200")
    (shared,) = lines(capsys, *RESNET, "--cluster", "dgx-h100", "--tasks-per-node", "16")
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nsource: here\nnode: {gpus: 4, gpu: gh200}\n")
    (unknown,) = lines(capsys, "digits", "--cluster", "mine.yaml")
    (tmp_path / "topology.conf").write_text("SwitchName=leaf Nodes=n[1-2]\n")
    nodes = ("--cluster", "generic", "--gpu", "h200", "--gpus-per-node", "4", "--nodes", "2")
    *found, key = lines(capsys, *RESNET, *nodes, "--fabric", "topology.conf")
    assert any("no cables" in line for line in found)
    check_text("job-not-predicted", "\n".join((script, shared, unknown, key)))
    assert lines(capsys, *RESNET, *nodes)[-1] == key


def test_the_gpus_of_the_shipped_profiles_are_known() -> None:
    named = {profile.node.gpu for profile in map(load_profile, profile_names())}
    assert named - {None} <= {*gpus()} and named & {*gpus()}


@pytest.mark.parametrize("command", ["submit", "run"])
def test_a_gpu_that_nobody_knows(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", "generic"] if command == "submit" else []
    assert main([command, "digits", *options, "--gpu", "gh200"]) == 2
    said = capsys.readouterr()
    assert codes(said.err) == ["HT-gpu-unknown"] and "gh200" in said.err and " h200" in said.err
    assert not RUNS.exists()


def test_the_run_directory_has_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = planned(capsys, *RESNET, "--cluster", "dgx-h100", "--nodes", "4")
    assert main(["submit", *RESNET, "--cluster", "dgx-h100", "--nodes", "4"]) == 0
    directory = Path(capsys.readouterr().out.splitlines()[0])
    assert json.loads((directory / "prediction.json").read_text()) == wanted


def test_no_prediction_leaves_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--cluster", "generic"], ["--cluster", "dgx-h100", "--tasks-per-node", "16"]):
        assert main(["submit", "digits", *options]) == 0
        said = capsys.readouterr()
        assert not (Path(said.out.splitlines()[0]) / "prediction.json").exists()
        assert "prediction of" not in said.err and "# Prediction" not in said.err


def test_each_task_of_an_array_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--cluster", "generic", "--gpu", "cpu", "--tasks-per-node", "2", "--array", "1-3")
    assert main(["submit", "digits", *options, "--set", "epochs=%a", "--set", "seed=%a"]) == 0
    directory = Path(capsys.readouterr().out.splitlines()[0])
    found = [json.loads((directory / f"task-{task}" / "prediction.json").read_text()) for task in (1, 2, 3)]
    assert [each["epochs"]["value"] for each in found] == [1, 2, 3]
    assert found[0]["step_s"] == found[2]["step_s"]
    assert not (directory / "prediction.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [["--help"], ["submit", "digits", "--cluster", "generic", "--dry-run"]])
def test_nothing_of_it_is_imported_without_need(command: list[str], tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", MODULES, *command], capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ)
    )
    assert found.returncode == 0, found.stderr
