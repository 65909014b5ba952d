"""The predictions of ``hpctrain predict``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.cli.predict import link_rate, node_counts
from support.refusals import refused
from support.topology.two_switches import TREE

H100 = ["--gpu", "h100-sxm", "--gpus-per-node", "8"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("topology.conf").write_text(TREE)


def test_one_number_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "4", "--adapters-per-node", "8", "--link", "400Gb", "--grid-intensity", "300", "--json"]
    assert main(["predict", "goyal2017", *H100, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["nodes"], found["gpus"]) == (4, 32)
    for key in ("step_s", "samples_per_s", "efficiency", "communication_share", "minutes", "memory_bytes", "kwh"):
        assert found[key]["low"] <= found[key]["value"] <= found[key]["high"]
    assert found["kg_co2"]["value"] == pytest.approx(0.3 * found["facility_kwh"]["value"])


def test_a_narrow_terminal_shows_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches, shares and energies that are all wide."""
    asked = ["predict", "digits", "--gpu", "h100-sxm", "--gpus-per-node", "4", "--nodes", "1,2,64"]
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(asked) == 0
    whole = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    assert main(asked) == 0
    table = capsys.readouterr().out
    assert "…" not in table and max(map(len, table.splitlines())) <= 80
    assert table.split() == whole.split() and " Wh " in table


def test_measured_all_reduces_calibrate(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "h100-sxm", "--gpus-per-node", "8", "--json"]
    row = {"engine": "nccl", "ranks": 16, "hosts": 2, "bytes": 1 << 26, "median_s": 2e-3}
    Path("curves.json").write_text(json.dumps({"rows": [row]}))
    times = []
    for more in ([], ["--calibration", "curves.json"]):
        assert main(["predict", "goyal2017", "--nodes", "4", *options, *more]) == 0
        times.append(json.loads(capsys.readouterr().out)["communication_share"]["value"])
    assert times[0] != times[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*H100, "--nodes", "0"], "--nodes 0"),
        ([*H100, "--nodes", "1,x"], "HT-option-bad-value"),
        (["--gpu", "h10", "--gpus-per-node", "8"], "HT-choice-unknown"),
        ([*H100, "--nodes", "5", "--fabric", "topology.conf", "--link", "200Gb"], "has 4 hosts"),
        ([*H100, "--batch", "4"], "HT-option-not-usable-here"),
        ([*H100, "--link", "fast"], "HT-option-bad-value"),
        ([*H100, "--backend", "single"], "HT-backend-unfit"),
        ([*H100, "--backend", "mpi", "--tcp"], "does not use NCCL"),
        ([*H100, "--backend", "nccl", "--set", "fault_tolerance.lost_rank=shrink"], "needs --backend mpi"),
        ([*H100, "--framework", "kerass"], "HT-choice-unknown"),
        ([*H100, "--routes", "."], "add --fabric"),
        ([*H100, "--nodes", "99999999999999999999"], "HT-option-bad-value"),
        ([*H100, "--calibration", "sweeps.json"], "neither sweeps"),
        ([*H100, "--set", "data.limit=100", "--set", "batch.drop_last=true"], "no whole batch"),
        ([*H100, "--calibration", "cut.txt"], "cut.txt"),
        (["--gpu", "cpu", "--gpus-per-node", "2", "--backend", "nccl"], "needs GPUs"),
        (["--cluster", "generic", "--gpus-per-node", "4"], "which GPUs"),
    ],
)
def test_misuse(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    Path("cut.txt").write_text("# nccl-tests")
    Path("sweeps.json").write_text('{"sweeps": []}')
    assert main(["predict", "goyal2017", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_workload_from_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    import hpctrain.common.workloads

    shipped = Path(hpctrain.common.workloads.__file__).parent / "transformer.json"
    shutil.copy(shipped, "mine.json")
    assert main(["predict", "mine.json", *H100, "--batch", "64", "--precision", "bf16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["minutes"] is None
    assert found["step_s"]["value"] > 0
    Path("mine.json").write_text(shipped.read_text()[:200])
    assert main(["predict", "mine.json", *H100, "--batch", "64"]) == 2
    assert "mine.json" in capsys.readouterr().err


LLAMA = ["--transformer", "llama3-8b", *H100, "--set", "batch=64"]


def test_a_transformer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *LLAMA, "--nodes", "1,2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one, two = found["rows"]
    assert (found["recipe"], two["gpus"], two["layout"]["dp_shard"]) == ("llama3-8b", 16, 16)
    for key in ("step_s", "tokens_per_s", "samples_per_s", "efficiency", "memory_bytes"):
        assert one[key]["low"] <= one[key]["value"] <= one[key]["high"]
    assert sum(one["step_terms"].values()) == pytest.approx(one["step_s"]["value"])
    assert one["minutes"] is None


def test_a_transformer_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    text = "layers=4,width=512,heads=8,mlp=1024,vocabulary=1000,context=512,kind=swiglu"
    assert main(["predict", "--transformer", text, *H100, "--set", "batch=64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["global_batch"] == 64


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], "HT-argument-missing"),
        (["goyal2017", "--transformer", "llama3-8b"], "HT-argument-missing"),
        (["--transformer", "llama9"], "HT-choice-unknown"),
        (["--transformer", "llama3-8b", "--mesh", "dp_shard=8", "--set", "batch=4"], "HT-layout-batch-not-divisible"),
        (
            ["--transformer", "llama3-8b", "--precision", "fp8", "--gpu", "a100-sxm-80"],
            "HT-prediction-not-possible",
        ),
        (["--transformer", "gpt2", "--set", "sequence=100000"], "HT-layout-not-possible"),
        (["gpt2-124m", "--mesh", "pp=8"], "HT-pipeline-wrong-micro-batches"),
        (["--transformer", "llama3-8b", "--set", "software=mine"], "HT-choice-unknown"),
        (["--transformer", "llama3-8b", "--backend", "mpi"], "HT-option-not-usable-here"),
        (["--transformer", "llama3.1-405b", "--mesh", "auto"], "HT-memory-exceeded"),
        (["--transformer", "llama3-8b", "--gpu", "cpu"], "HT-prediction-not-possible"),
        (["--transformer", "llama3-8b", "--nodes", "125001"], "HT-ranks-too-many"),
        (["goyal2017", "--mesh", "auto"], "HT-option-not-usable-here"),
        (["goyal2017", "--mesh", "tp=2"], "HT-keys-not-together"),
    ],
)
def test_misuse_of_transformers(capsys: pytest.CaptureFixture[str], arguments: list[str], code: str) -> None:
    assert main(["predict", *H100, *arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code


@pytest.mark.parametrize(
    ("text", "counts"),
    [("8", [8]), ("1,8,64", [1, 8, 64]), ("1..8", [1, 2, 4, 8]), ("3..20", [3, 6, 12, 20]), ("2,1..3", [1, 2, 3])],
)
def test_numbers_of_nodes(text: str, counts: list[int]) -> None:
    assert node_counts(text) == counts


@pytest.mark.parametrize("text", ["", "0", "-1", "1..", "8..1", "a", "1.5", "1,,2", "²"])
def test_no_numbers_of_nodes(text: str) -> None:
    with refused("HT-option-bad-value"):
        node_counts(text)


@pytest.mark.parametrize("text", ["200Gb", "200 Gbit/s", "200G", "200gb/s", "200.0Gbps", "25GB/s"])
def test_rates_of_links(text: str) -> None:
    assert link_rate(text) == 25e9
