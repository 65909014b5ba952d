"""What packaging/ says of version, Python and dependencies, against pyproject.toml."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import hpctrain
from support.requirements_of_project import PROJECT, PYPROJECT, ROOT

FOLDER = ROOT / "packaging"
VERSION = hpctrain.__version__
# Other names for the same.
CONDA = {"python-xxhash": "xxhash"}
EASYBUILD = {"python-xxhash": "xxhash"}
# What comes with modules of other names, as `eb --search` and the files of EasyBuild 5.4.1 have it.
BUNDLED = {
    "jinja2": "python-bundle-pypi",
    "markupsafe": "python-bundle-pypi",
    "psutil": "python-bundle-pypi",
    "rich": "python-bundle-pypi",
    "numpy": "scipy-bundle",
    "annotated-types": "pydantic",
}


def bounds(requirements: Iterable[str]) -> dict[str, SpecifierSet]:
    """What is asked for, by canonical name."""
    found = [Requirement(each) for each in requirements]
    return {canonicalize_name(each.name): each.specifier for each in found}


BASE = bounds(PROJECT["dependencies"])
TRAIN = bounds(PROJECT["optional-dependencies"]["train"])
PYTHON = SpecifierSet(PROJECT["requires-python"])
HATCHLING = bounds(PYPROJECT["build-system"]["requires"])["hatchling"]
TORCH = bounds(PROJECT["optional-dependencies"]["torch"])["torch"]


def conda_recipe() -> dict[str, Any]:
    # An expression in ${{ }} is a plain text for YAML, as the format means it to be.
    recipe: dict[str, Any] = yaml.safe_load((FOLDER / "conda" / "recipe.yaml").read_text())
    return recipe


def conda_bounds(specs: list[str]) -> dict[str, SpecifierSet]:
    found = (spec.partition(" ")[::2] for spec in specs if not spec.startswith("__"))
    return {canonicalize_name(CONDA.get(name, name)): SpecifierSet(bound) for name, bound in found}


def test_conda() -> None:
    recipe = conda_recipe()
    assert recipe["context"]["version"] == VERSION
    assert recipe["about"]["license"] == PROJECT["license"]
    needs = recipe["requirements"]
    assert conda_bounds(needs["run"]) == {**BASE, "python": PYTHON}
    assert conda_bounds(needs["run_constraints"]) == TRAIN
    assert conda_bounds(needs["host"]) == {"hatchling": HATCHLING, "pip": SpecifierSet(), "python": PYTHON}
    (command,) = PROJECT["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(command)]


def test_conda_reads_its_recipe() -> None:
    rattler_build = pytest.importorskip("rattler_build")
    (variant,) = rattler_build.Stage0Recipe.from_file(str(FOLDER / "conda" / "recipe.yaml")).render()
    package = variant.recipe.package
    assert (package.name, package.version) == ("hpctrain", VERSION)


def spack_calls(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """First argument and keywords of each such line of the Spack package; a block's ``when`` counts as its own."""
    (package,) = (FOLDER / "spack").rglob("package.py")
    tree = ast.parse(package.read_text())
    blocks = {id(call): block for block in ast.walk(tree) if isinstance(block, ast.With) for call in ast.walk(block)}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name:
            block = blocks.get(id(call))
            around = block.items[0].context_expr.keywords if block else []  # type: ignore[attr-defined]
            first = ast.literal_eval(call.args[0])
            yield first, {each.arg: ast.literal_eval(each.value) for each in [*around, *call.keywords] if each.arg}


def spack_bound(spec: str) -> tuple[str, SpecifierSet]:
    name, _, versions = spec.partition("@")
    least, _, last = versions.partition(":")
    bound = f">={least}"
    if last:
        # Spack's last version includes all that begin with it.
        major, minor = last.split(".")
        bound += f",<{major}.{int(minor) + 1}"
    return canonicalize_name(name.removeprefix("py-")), SpecifierSet(bound)


def test_spack() -> None:
    assert [version for version, _ in spack_calls("version")] == [VERSION]
    assert [license for license, _ in spack_calls("license")] == [PROJECT["license"]]
    found: dict[str | None, dict[str, SpecifierSet]] = {}
    for spec, keywords in spack_calls("depends_on"):
        name, bound = spack_bound(spec)
        found.setdefault(keywords.get("when"), {})[name] = bound
    assert found == {
        None: {**BASE, "python": PYTHON, "hatchling": HATCHLING},
        "+train": TRAIN,
        "+torch": {"torch": TORCH},
    }
    assert f"hpctrain-{VERSION}.tar.gz" in next((FOLDER / "spack").rglob("package.py")).read_text()


def easyconfig(path: Path) -> dict[str, Any]:
    """Its values; the names ``name`` and ``version`` within them are replaced."""
    text = re.sub(r"\(name, version", f"('hpctrain', '{VERSION}'", path.read_text())
    lines = (each for each in ast.parse(text).body if isinstance(each, ast.Assign))
    return {line.targets[0].id: ast.literal_eval(line.value) for line in lines}  # type: ignore[attr-defined]


def test_easybuild() -> None:
    (path,) = (FOLDER / "easybuild").glob("*.eb")
    values = easyconfig(path)
    toolchain = values["toolchain"]
    assert path.name == f"hpctrain-{VERSION}-{toolchain['name']}-{toolchain['version']}.eb"
    assert values["version"] == VERSION
    assert PYTHON.contains(dict(values["dependencies"])["Python"])
    assert HATCHLING.contains(dict(values["builddependencies"])["hatchling"])
    listed = [*values["dependencies"], *values["exts_list"]]
    versions = {canonicalize_name(EASYBUILD.get(name, name)): version for name, version, *_ in listed}
    for name, bound in {**BASE, **TRAIN}.items():
        if name in BUNDLED:
            assert BUNDLED[name] in versions, name
        else:
            assert bound.contains(versions[name]), name


def test_apptainer() -> None:
    text = (FOLDER / "apptainer" / "hpctrain.def").read_text()
    wheels = set(re.findall(r"hpctrain-([\d.]+)-py3-none-any\.whl", text))
    assert wheels == {VERSION}
    assert re.findall(r"image\.version (\S+)", text) == [VERSION]
    assert re.findall(r"image\.licenses (\S+)", text) == [PROJECT["license"]]
    (python,) = re.findall(r"From: python:([\d.]+)-", text)
    assert PYTHON.contains(f"{python}.0")
    ((extras, torch),) = re.findall(r"\.whl\[([\w,]+)\]' 'torch==([\d.]+)\+cpu'", text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert TORCH.contains(torch)
