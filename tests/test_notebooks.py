"""Every notebook runs from its first cell to its last, in a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from hpctrain.recipes.load import load_recipe

_NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
_CELL_TIMEOUT_SECONDS = 240


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a notebook runs; `hpctrain` is found without an activated environment."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path


def _run(name: str, folder: Path) -> NotebookNode:
    notebook = nbformat.read(_NOTEBOOKS / name, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=_CELL_TIMEOUT_SECONDS, resources=resources).execute()


def _printed(notebook: NotebookNode) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.slow
def test_first_run(folder: Path) -> None:
    printed = _printed(_run("01_first_run.ipynb", folder))
    losses = dict(re.findall(r"ranks: (\d), loss: ([\d.]+)", printed))
    assert float(losses["2"]) == pytest.approx(float(losses["1"]), abs=2e-4)
    assert "epoch 20/20" in printed
    assert (folder / "runs/first/report.html").exists()
    assert list((folder / "runs/first/tensorboard").iterdir())


def test_topology(folder: Path) -> None:
    notebook = _run("02_topology.ipynb", folder)
    printed = _printed(notebook)
    rows = re.findall(r"(\w+) +crossings: +(\d+) \(at least (\d+)\), worst link load: ([\d.]+)", printed)
    assert [row[0] for row in rows] == ["given", "name", "tree", "placed"]
    given, *_, placed = rows
    assert int(placed[1]) == int(placed[2]) == 4 < int(given[1])
    assert float(placed[3]) == 1 < float(given[3])
    assert "already optimal" in printed
    assert (folder / "hosts.txt").read_text().splitlines() == [f"node{host:04d} slots=8" for host in (3, 4, 19, 20)]
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output.data["image/svg+xml"] for output in outputs if "image/svg+xml" in output.get("data", {})]
    (picture,) = pictures
    assert all(picture.count(f">{name}</text>") == 2 for name in ("node0031", "leaf001", "spine004"))
    assert all(picture.count(f">{title}</text>") == 1 for title in ("as given", "placed"))


@pytest.mark.slow
def test_large_minibatch(folder: Path) -> None:
    shutil.copy(_NOTEBOOKS / "large_minibatch.json", folder)
    printed = _printed(_run("03_large_minibatch.ipynb", folder))
    after = {kind: float(error) for kind, error in re.findall(r"(gradual|no) warm-up: test error ([\d.]+) %", printed)}
    assert after["gradual"] < 30 < after["no"]
    rows = {int(batch): float(gradual) for batch, gradual in re.findall(r"^ *(\d+) +([\d.]+) ±", printed, re.M)}
    reported = {row.batch: 100 * (1 - row.value) for row in load_recipe("digits-large-minibatch").reported}
    assert rows == pytest.approx(reported, abs=0.011)


@pytest.mark.parametrize("path", sorted(_NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_committed_without_outputs(path: Path) -> None:
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
