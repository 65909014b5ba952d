"""What a bare ``pip install hpctrain`` runs: the commands of the login half, with the base dependencies alone."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hpctrain.cli.main import main
from hpctrain.common.cluster.machine import Machine
from hpctrain.common.extras import MODULES, missing_extra, require
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.planning.planner import make_plan
from support import needs
from support.refusals import refused
from support.requirements_of_project import PROJECT, PYPROJECT, closure

FABRIC = """\
SwitchName=leaf1 Nodes=n[1-2]
SwitchName=leaf2 Nodes=n[3-4]
SwitchName=spine Switches=leaf[1-2]
"""
COMMANDS = [
    ["--help"],
    ["recipes", "list"],
    ["recipes", "list", "--json"],
    ["recipes", "show", "digits"],
    ["recipes", "show", "digits", "--world", "4"],
    ["topology", "show", "topology.conf"],
    ["topology", "place", "--fabric", "topology.conf", "--hosts", "n[1-4]"],
    ["plan", "digits", "-np", "2"],
    ["plan", "digits", "--fabric", "topology.conf", "--hosts", "n[1-4]", "-np", "8"],
    ["predict", "digits", "--gpu", "cpu", "--gpus-per-node", "2"],
    ["run", "digits", "-np", "1", "--dry-run"],
    ["submit", "digits", "--cluster", "cpu", "--dry-run"],
    ["status", "run"],
    ["logs", "run"],
    ["checkpoint", "list", "run"],
    ["horovod", "check"],
    ["verify", "--help"],
]
# As in an environment with these modules alone.
PROGRAM = """
import json, sys
from importlib.machinery import PathFinder

commands, there = map(json.loads, sys.argv[1:])
there = {*there, *sys.stdlib_module_names}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        return PathFinder.find_spec(name, path, target) if top in there or top.startswith("_sysconfigdata") else None

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
from hpctrain.cli.main import main
codes = [main(command) for command in commands]
print(json.dumps([codes, sorted(sys.modules)]), file=sys.stderr)
"""


@functools.cache
def packages() -> Mapping[str, list[str]]:
    """The distributions of each module."""
    return metadata.packages_distributions()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], list[str]]:
    folder = tmp_path_factory.mktemp("login")
    (folder / "topology.conf").write_text(FABRIC)
    machine = Machine(host="n1", cores=2, frameworks=frozenset({"torch"}), versions={})
    RunDirectory(folder / "run").create(make_plan(TrainingRequest(work=load_recipe("digits")), machine))
    base = closure(PROJECT["dependencies"])
    there = ["hpctrain", *(module for module, names in packages().items() if base & {*map(canonicalize_name, names)})]
    assert {"numpy", "yaml", "pydantic_core"} < {*there}
    assert not {"torch", "sklearn", "matplotlib", "networkx"} & {*there}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS), json.dumps(there)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    codes, modules = json.loads(done.stderr.splitlines()[-1])
    return codes, modules


@pytest.mark.long
def test_the_commands_need_base_dependencies_only(loaded: tuple[list[int], list[str]]) -> None:
    answers = {" ".join(command): code for command, code in zip(COMMANDS, loaded[0], strict=True)}
    # It says that no Horovod is built.
    assert answers.pop("horovod check") == 3
    assert {command: code for command, code in answers.items() if code} == {}


@pytest.mark.slow
def test_what_would_make_an_answer_slow_is_not_imported() -> None:
    """Each of these takes as long to import as the answer itself takes to find."""
    spared = {"hpctrain.common.run.events.kinds", "hpctrain.control.resuming.attempts"}
    assert all(find_spec(module) for module in spared)
    program = (
        "import json, sys; from hpctrain.cli.main import main; code = main(json.loads(sys.argv[1])); "
        "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    )
    command = json.dumps(["submit", "digits", "--cluster", "cpu", "--dry-run"])
    words = [sys.executable, "-c", program, command]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code == 0 and "digits" in done.stdout
    assert spared & set(modules) == set()


def test_the_contract_of_the_layers_names_all_that_they_import(loaded: tuple[list[int], list[str]]) -> None:
    (contract,) = (each for each in PYPROJECT["tool"]["importlinter"]["contracts"] if each["type"] == "forbidden")
    held = tuple(contract["source_modules"])
    modules = {name for name in loaded[1] if name.partition(".")[0] == "hpctrain"} - {"hpctrain"}
    assert {name for name in modules if not any(f"{name}.".startswith(f"{one}.") for one in held)} == set()
    assert len(modules) > 100


@needs.both_frameworks
def test_the_extras_bring_the_modules_that_messages_ask_them_for() -> None:
    for extra, modules in MODULES.items():
        requirements = PROJECT["optional-dependencies"][extra]
        names = {canonicalize_name(Requirement(each).name) for each in requirements} - {"hpctrain"}
        assert all(set(map(canonicalize_name, packages().get(module, [module]))) & names for module in modules), extra
        assert len(modules) == len(names), extra


@pytest.mark.parametrize(
    ("missing", "command", "told"),
    [
        ("PIL", ["data", "shard", ".", "shards"], "pip install 'hpctrain[imagenet]'"),
        pytest.param(
            "mpi4py",
            ["run", "digits"],
            "error[HT-package-not-installed]: mpi4py is not installed in this Python\n  pip install 'hpctrain[train]'",
            marks=needs.pytorch,
        ),
        pytest.param(
            "tensorboard",
            ["run", "digits", "--run-dir", "run"],
            "pip install 'hpctrain[train]'",
            marks=needs.pytorch,
        ),
        ("torch", ["bench", "step"], "pip install 'hpctrain[torch]'"),
    ],
)
def test_a_missing_extra_is_named(
    missing: str,
    command: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "topology.conf").write_text(FABRIC)
    forget(monkeypatch, missing)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["topology.conf"]


def test_without_a_framework_a_plan_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("torch", "tensorflow", "keras", "mpi4py", "tensorboard", "sklearn"):
        monkeypatch.setitem(sys.modules, module, None)
    for command in (
        ["run", "digits", "--dry-run"],
        ["plan", "digits"],
        ["submit", "digits", "--cluster", "cpu", "--dry-run"],
    ):
        assert main(command) == 0
        output = capsys.readouterr()
        assert "neither PyTorch" in output.err
        assert "digits" in output.out
    assert main(["run", "digits"]) == 2
    assert "'hpctrain[torch]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@needs.both_frameworks
def test_what_is_there_is_not_asked_for() -> None:
    # These are beside the environment of the tests.
    require(*(extra for extra in MODULES if extra not in ("lightning", "huggingface", "spark")))
    assert missing_extra(ModuleNotFoundError("no", name="hpctrain.nothing")) is None
    assert missing_extra(ModuleNotFoundError("no", name="torch.nothing")) is None


def test_several_missing_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mpi4py", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    with refused("HT-package-not-installed", modules="mpi4py, matplotlib") as caught:
        require("train", "report")
    assert "hpctrain[train,report]" in caught.value.hint


def forget(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Let a module be missing, also for modules of hpctrain that have imported it."""
    monkeypatch.setitem(sys.modules, missing, None)
    for name in [name for name in sys.modules if name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("report.plots", "report.tracking.tensorboard_files"):
        monkeypatch.delitem(sys.modules, f"hpctrain.{name}", raising=False)
