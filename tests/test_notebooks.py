"""Every notebook runs from its first cell to its last, in a folder of its own, and its stored outputs are today's."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_output
from stored_outputs import comparable, tidied

from hpctrain.common.recipes.load import load_recipe

_NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
_CELL_TIMEOUT_SECONDS = 240
_MOST_BYTES = 200_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a notebook runs, as in a Jupyter that was started without its environment activated."""
    own = Path(sys.executable).parent
    others = [each for each in os.environ["PATH"].split(os.pathsep) if Path(each).absolute() != own]
    monkeypatch.setenv("PATH", os.pathsep.join(others))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path


def _run(name: str, folder: Path) -> NotebookNode:
    """The executed notebook, whose outputs are found to be those that it is stored with."""
    stored, executed = (nbformat.read(_NOTEBOOKS / name, as_version=4) for _ in range(2))
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(executed, timeout=_CELL_TIMEOUT_SECONDS, resources=resources, record_timing=False).execute()
    executed.metadata = stored.metadata
    for cell in _code(executed):
        cell.outputs = tidied(cell.outputs)
    nbformat.write(executed, folder / name)
    update = f"if the outputs were meant to change: cp {shlex.quote(str(folder / name))} {_NOTEBOOKS}"
    for before, after in zip(_code(stored), _code(executed), strict=True):
        assert comparable(before.outputs) == comparable(after.outputs), f"cell {before.id} of {name}; {update}"
    return executed


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _printed(notebook: NotebookNode) -> str:
    outputs = [output for cell in _code(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.long
def test_first_run(folder: Path) -> None:
    printed = _printed(_run("01_first_run.ipynb", folder))
    losses = dict(re.findall(r"ranks: (\d), loss: ([\d.]+)", printed))
    assert float(losses["2"]) == pytest.approx(float(losses["1"]), abs=2e-4)
    assert "epoch 20/20" in printed
    assert (folder / "hpctrain-runs/first/report.html").exists()
    assert list((folder / "hpctrain-runs/first/tensorboard").iterdir())


def test_topology(folder: Path) -> None:
    printed = _printed(_run("02_topology.ipynb", folder))
    rows = re.findall(r"(\w+) +crossings: +(\d+) \(at least (\d+)\), worst link load: ([\d.]+)", printed)
    assert [row[0] for row in rows] == ["given", "name", "tree", "placed"]
    given, *_, placed = rows
    assert int(placed[1]) == int(placed[2]) == 4 < int(given[1])
    assert float(placed[3]) == 1 < float(given[3])
    assert "already optimal" in printed
    assert (folder / "hosts.txt").read_text().splitlines() == [f"node{host:04d} slots=8" for host in (3, 4, 19, 20)]


@pytest.mark.thorough
def test_large_minibatch(folder: Path) -> None:
    shutil.copy(_NOTEBOOKS / "large_minibatch.json", folder)
    printed = _printed(_run("03_large_minibatch.ipynb", folder))
    after = {kind: float(error) for kind, error in re.findall(r"(gradual|no) warm-up: test error ([\d.]+) %", printed)}
    # So few epochs with so high a rate end elsewhere on another processor: 3.6 % or 30.1 %, and 88 % without warm-up.
    assert 2 * after["gradual"] < after["no"]
    rows = {int(batch): float(gradual) for batch, gradual in re.findall(r"^ *(\d+) +([\d.]+) ±", printed, re.M)}
    reported = {row.batch: 100 * (1 - row.value) for row in load_recipe("digits-large-minibatch").reported}
    assert rows == pytest.approx(reported, abs=0.011)


@pytest.mark.thorough
def test_prediction(folder: Path) -> None:
    printed = _printed(_run("04_prediction.ipynb", folder))
    numbers = r"([\d.]+) \[([\d.]+), ([\d.]+)\]$"
    rows = [tuple(map(float, found)) for found in re.findall(rf"^ +(\d+) +\d+ .* {numbers}", printed, re.M)]
    paper, h100, fixed = rows[:2], rows[2:10], rows[10:18]
    # Goyal et al. 2017: 29 hours on one server, one on 32.
    assert all(low <= took <= high for (*_, low, high), took in zip(paper, (29 * 60, 60), strict=True))
    assert [row[0] for row in h100] == [row[0] for row in fixed] == [2**power for power in range(8)]
    assert fixed[-1][1] > fixed[-2][1]
    steps = re.findall(r"two ranks, (\w+): ([\d.]+) ms, from ([\d.]+) ms to ([\d.]+) ms", printed)
    assert [name for name, *_ in steps] == ["assumed", "measured"]
    assert all(float(low) <= float(value) <= float(high) for _, value, low, high in steps)


def test_language_models(folder: Path) -> None:
    printed = _printed(_run("06_language_models.ipynb", folder))
    number = r"([\d.]+)"
    found = re.findall(rf"^.*?{number} tokens/s a GPU \[{number}, {number}\] +{number} GB", printed, re.M)
    published, *meshes = [tuple(map(float, each)) for each in found]
    # torchtitan's docs/performance.md: 331 tokens a second and GPU.
    assert published[1] <= 331 <= published[2]
    assert [each[0] for each in meshes[:8]] == sorted((each[0] for each in meshes[:8]), reverse=True)
    assert all(memory < 186 for *_, memory in meshes)


@pytest.mark.thorough
def test_parallelism(folder: Path) -> None:
    for study in ("loose.json", "loose_gpt.json"):
        shutil.copy(_NOTEBOOKS / study, folder)
    printed = _printed(_run("05_parallelism.ipynb", folder))
    losses = [list(map(float, found.split())) for found in re.findall(r"^step +\d+, loss: (.*)$", printed, re.M)]
    assert [len(row) for row in losses] == [4] * 4
    assert all(row == pytest.approx([row[0]] * 4, abs=2e-5) for row in losses)
    assert losses[-1][0] < losses[0][0] - 2
    assert "below 1e-5: True" in printed
    over = dict(re.findall(r"^(laid|torchtitan's axes, hosts by leaf) +([\d.]+) TB", printed, re.M))
    assert float(over["laid"]) < float(over["torchtitan's axes, hosts by leaf"])


@pytest.mark.parametrize("path", sorted(_NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_stored_as_executed_once(path: Path) -> None:
    code = _code(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(cell.outputs == tidied(cell.outputs) for cell in code)
    assert path.stat().st_size < _MOST_BYTES


def _stream(text: str, name: str = "stdout") -> NotebookNode:
    return new_output("stream", name=name, text=text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("epoch 1/20  train loss 0.0398\n", "epoch 1/30  train loss 0.0398\n"),
        ("   32     1.22 ± 0.28\n", "   32     1.25 ± 0.28\n"),
        ("test accuracy 0.9\n", "test accuracy not finite\n"),
    ],
)
def test_what_is_out_of_date_is_found(one: str, other: str) -> None:
    assert comparable([_stream(one)]) != comparable([_stream(other)])
    assert comparable([_stream(one)]) != comparable([_stream(one, "stderr")])
    assert comparable([_stream(one)]) != comparable([])
