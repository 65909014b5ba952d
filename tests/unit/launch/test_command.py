"""The command of each MPI, against files that a person can read.

After a change that is meant: ``REGENERATE=1 python -m pytest tests/unit/launch/test_command.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from hpctrain.cluster.mpi import Flavour, MpiInstallation
from hpctrain.launch.command import Command, launch_command
from hpctrain.planning.machine import Machine
from hpctrain.planning.planner import make_plan
from hpctrain.recipes.load import load_recipe

GOLDEN = Path(__file__).parents[2] / "golden" / "launch"
MACHINE = Machine(host="n1", cores=8, frameworks=frozenset({"torch"}), versions={})
RUN_DIRECTORY = Path("/home/me/it's a run")


def command(flavour: Flavour | None, ranks: int, *, root: bool = False) -> Command:
    mpi = flavour and MpiInstallation(
        flavour=flavour, version="0", mpirun=Path("/opt/mpi/bin/mpirun"), mpicc=None, mpicxx=None
    )
    plan = make_plan(load_recipe("digits"), MACHINE, ranks=ranks)
    return launch_command(
        plan, RUN_DIRECTORY, python=Path("/venv/bin/python"), launcher=mpi or None, cores=MACHINE.cores, root=root
    )


CASES = {"single": command(None, 1)}
for each in get_args(Flavour):
    CASES[each] = command(each, 2)
    CASES[f"{each}-more-ranks-than-cores"] = command(each, 9)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    path = GOLDEN / f"{name}.sh"
    text = f"{CASES[name].shell()}\n"
    if os.environ.get("REGENERATE"):
        path.write_text(text)
    assert text == path.read_text(), f"if the change is meant: REGENERATE=1 python -m pytest {__file__}"


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("flavour", get_args(Flavour))
def test_only_open_mpi_is_told_of_the_superuser(flavour: Flavour) -> None:
    added = set(command(flavour, 2, root=True).arguments) - set(command(flavour, 2).arguments)
    assert added == ({"--allow-run-as-root"} if flavour.startswith("open-mpi") else set())


def test_the_shell_text_is_the_same_command() -> None:
    odd = ["a b", "it's", 'say "x"', "$HOME", "`id`", "line\nbreak", "*", "", "--"]
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['A'], 'B' in os.environ]))"
    made = Command(program=(sys.executable, "-c", show, *odd), environment={"A": "1 'x' $y"}, without=("B",))
    for arguments in (["sh", "-c", made.shell()], list(made.arguments)):
        environment = made.environment_from({**os.environ, "B": "1"}) if arguments[0] != "sh" else {"B": "1"}
        printed = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True).stdout
        assert json.loads(printed) == [odd, "1 'x' $y", False]


def test_one_rank_forgets_the_step_around_it() -> None:
    inherited = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7"}
    environment = CASES["single"].environment_from(inherited)
    assert "SLURM_STEP_NUM_TASKS" not in environment
    assert environment["SLURM_JOB_ID"] == "7"
