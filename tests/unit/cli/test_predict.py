"""The predictions of ``hpctrain predict``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.cli.prediction_options import link_rate, node_counts
from support.refusals import refused
from support.topology.two_switches import NODE, TREE

MEASURED = Path(__file__).parents[1] / "control" / "predict" / "measured"
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


@pytest.mark.slow
def test_a_table_of_several_and_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["predict", "goyal2017", *H100, "--nodes", "1..8", "--explain", "--plot", "found.png"]) == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines() if line[:6].strip().isdigit()] == ["1", "2", "4", "8"]
    assert "comes from" in said.out
    assert "--adapters-per-node" in said.err
    assert Path("found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["predict", "goyal2017", *H100, "--nodes", "1,4", "--plot", "found.html"]) == 0
    page = Path("found.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == page.count("</html>") == 1
    assert "goyal2017" in page
    assert "torch.operator_s" in page
    assert "{code}" not in page


def test_a_node_map_has_the_gpus_and_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    Path("node.txt").write_text(NODE)
    assert main(["predict", "goyal2017", "--gpu", "a30", "--nodes", "2", "--node", "node.txt", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["gpus"] == 4
    assert "--adapters-per-node" not in said.err


def test_nccl_tests_calibrate(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "h100-sxm", "--gpus-per-node", "8", "--json"]
    times = []
    for more in ([], ["--calibration", str(MEASURED / "nccl-tests-2.13.txt")]):
        assert main(["predict", "goyal2017", "--nodes", "4", *options, *more]) == 0
        times.append(json.loads(capsys.readouterr().out)["communication_share"]["value"])
    assert times[0] != times[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*H100, "--nodes", "0"], "--nodes 0"),
        ([*H100, "--nodes", "1,x"], "HT-prediction-not-node-counts"),
        (["--gpu", "h10", "--gpus-per-node", "8"], "HT-gpu-unknown"),
        ([*H100, "--nodes", "5", "--fabric", "topology.conf", "--link", "200Gb"], "has 4 hosts"),
        ([*H100, "--batch", "4"], "HT-prediction-option-of-script"),
        ([*H100, "--link", "fast"], "HT-prediction-not-link-rate"),
        ([*H100, "--backend", "single"], "HT-backend-for-one-process"),
        ([*H100, "--backend", "mpi", "--tcp"], "does not use it"),
        ([*H100, "--backend", "nccl", "--set", "communication.compression=top_k"], "need --backend mpi"),
        ([*H100, "--set", "sync.every=8"], "--set sync=null"),
        ([*H100, "--framework", "kerass"], "HT-framework-unknown"),
        ([*H100, "--plot", "found.jpg"], "HT-prediction-unknown-picture-format"),
        ([*H100, "--routes", "."], "add --fabric"),
        ([*H100, "--nodes", "99999999999999999999"], "HT-prediction-not-node-counts"),
        ([*H100, "--calibration", "sweeps.json"], "has no sweeps"),
        ([*H100, "--set", "data.limit=100", "--set", "batch.drop_last=true"], "no whole batch"),
        (["--pue", "2"], "which GPUs"),
        ([*H100, "--calibration", "cut.txt"], "cut.txt"),
        ([*H100, "--calibration", "none.json"], "none.json"),
        (["--gpu", "cpu", "--gpus-per-node", "2", "--backend", "nccl"], "needs GPUs"),
        (["--nodes", "1,8"], "which GPUs"),
        (["--cluster", "generic", "--gpus-per-node", "4"], "which GPUs"),
    ],
)
def test_misuse(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    whole = (MEASURED / "nccl-tests-2.20.txt").read_text()
    Path("cut.txt").write_text(whole[: whole.rindex("# Out of bounds")])
    Path("sweeps.json").write_text('{"sweeps": []}')
    assert main(["predict", "goyal2017", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('nothing is trained here')\n", "HT-script-no-optimizer-step"),
        ("raise ValueError('no data')\n", "no data"),
    ],
)
def test_a_script_that_cannot_be_traced(capsys: pytest.CaptureFixture[str], script: str, said: str) -> None:
    pytest.importorskip("torch")
    Path("train.py").write_text(script)
    assert main(["predict", "train.py", *H100, "--batch", "8"]) != 0
    assert said in capsys.readouterr().err


def test_a_script_needs_its_batch_and_has_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("")
    assert main(["predict", "train.py", *H100]) == 2
    assert "--batch N" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("text", "counts"),
    [("8", [8]), ("1,8,64", [1, 8, 64]), ("1..8", [1, 2, 4, 8]), ("3..20", [3, 6, 12, 20]), ("2,1..3", [1, 2, 3])],
)
def test_numbers_of_nodes(text: str, counts: list[int]) -> None:
    assert node_counts(text) == counts


@pytest.mark.parametrize("text", ["", "0", "-1", "1..", "8..1", "a", "1.5", "1,,2", "²"])
def test_no_numbers_of_nodes(text: str) -> None:
    with refused("HT-prediction-not-node-counts"):
        node_counts(text)


@pytest.mark.parametrize("text", ["200Gb", "200 Gbit/s", "200G", "200gb/s", "200.0Gbps", "HDR", "25GB/s"])
def test_rates_of_links(text: str) -> None:
    assert link_rate(text) == 25e9
