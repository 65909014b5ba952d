"""What the build of the pages does not see: links of the README, and a picture that says what pyproject.toml says."""

from __future__ import annotations

import re
import tomllib
from xml.etree import ElementTree

import pytest
from pages import ROOT, files, is_there, scripts

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", ["README.md", "SECURITY.md", "CHANGELOG.md", "slurm/README.md"])
def test_links_outside_the_pages_lead_to_files(name):
    path = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text())
    assert links or name != "README.md"
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_picture_of_the_layers_is_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["type"] == "layers")
    packages = [name.strip().removeprefix("hpctrain.") for layer in contract["layers"] for name in layer.split(":")]
    texts = ElementTree.parse(ROOT / "docs" / "pictures" / "layers.svg").iter(f"{SVG}text")
    # Boxes are labelled in the middle.
    labels = [each.text or "" for each in texts if each.get("text-anchor") == "middle"]
    drawn = [name.strip() for label in labels for name in label.split(":") if name.strip()]
    assert drawn == packages, "draw docs/pictures/layers.svg as [tool.importlinter] in pyproject.toml is"


def test_scripts_are_those_that_are_run():
    assert set(scripts()) == {"digits_torch.py", "digits_keras.py"}


def test_files_named_on_the_pages_exist():
    assert [(page, name) for page, name in files() if not is_there(name)] == []
    assert len(files()) > 50
