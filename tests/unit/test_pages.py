"""What the build of the pages does not see: links of the README, and a picture that says what pyproject.toml says."""

from __future__ import annotations

import re
import tomllib
from types import SimpleNamespace
from xml.etree import ElementTree

import pages
import pytest

from hpctrain.common.cluster.gpu_models import buses, gpus
from hpctrain.control.predict.values import constants
from support.pages import ROOT, files, is_there, scripts

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", ["README.md", "SECURITY.md", "CHANGELOG.md", "slurm/README.md"])
def test_links_outside_the_pages_lead_to_files(name):
    path = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text())
    assert links or name != "README.md"
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_picture_of_the_layers_is_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer for each in contracts if each["type"] == "layers" for layer in each["layers"]]
    packages = [name.strip().removeprefix("hpctrain.") for layer in layers for name in layer.split("|")]
    texts = ElementTree.parse(ROOT / "docs" / "pictures" / "layers.svg").iter(f"{SVG}text")
    # Boxes are labelled in the middle.
    labels = [each.text or "" for each in texts if each.get("text-anchor") == "middle"]
    drawn = [name.strip() for label in labels for name in label.split("|") if name.strip()]
    assert drawn == packages, "draw docs/pictures/layers.svg as [tool.importlinter] in pyproject.toml is"


def test_scripts_are_those_that_are_run():
    names = ("torch", "keras", "resume", "resume_sharded")
    assert set(scripts()) == {"sweep.py", *(f"digits_{name}.py" for name in names)}


def test_files_named_on_the_pages_exist():
    assert [(page, name) for page, name in files() if not is_there(name)] == []
    assert len(files()) > 50


@pytest.mark.slow
def test_the_reference_is_that_of_the_code():
    changed = [page.name for page in pages.REFERENCE if page.read_text() != pages.written(page)]
    assert changed == [], "write them: python .ci/pages.py"


def test_every_constant_of_predictions_is_on_their_page():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="prediction.md"))
    text = pages.on_page_markdown((ROOT / "docs" / "prediction.md").read_text(), page=page)
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    shown = {name.removeprefix("bus."): constant for name, constant in constants().items()}
    for name, constant in shown.items():
        gpu, _, key = name.partition(".")
        if gpu in gpus() and key != "pace":
            cells = [float(cell) for cell in rows[gpu].split("|") if cell.strip().replace(".", "").isdigit()]
            assert any(constant.value == pytest.approx(cell * unit) for cell in cells for unit in (1, 1e9, 1e12)), name
            continue
        assert f"±{constant.spread:.0%} | {constant.kind} | {constant.source.split('http')[0]}" in rows[name]
        if name not in buses():
            assert float(rows[name].split("|")[2].split()[0]) == pytest.approx(constant.value, rel=1e-3)
