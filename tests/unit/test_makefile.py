"""What the Makefile's targets would run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def would_run(*arguments: str) -> str:
    """What make would run, as from a shell. Within a `make test VARIABLE=value`, MAKEFLAGS would hand that on."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@pytest.mark.parametrize(("target", "builds"), [("train", False), ("test", True)])
def test_only_the_tests_build_horovod(target: str, builds: bool) -> None:
    printed = would_run(target)
    assert ("horovod build" in printed) == builds
    trains = "hpctrain run digits -np 2"
    assert (trains in printed) != builds


def test_what_one_tier_leaves_out_the_other_has() -> None:
    tiers = {}
    for target in ("test", "thorough", "test LEAVE_OUT=thorough"):
        tiers[target] = [line for line in would_run(*target.split()).splitlines() if "-m pytest" in line]
    assert len(tiers["test"]) == 3
    desk, rest = "'not (long or thorough)'", "'long or thorough'"
    assert [line.replace(desk, rest) for line in tiers["test"]] == tiers["thorough"]
    everything_once = tiers["test LEAVE_OUT=thorough"]
    assert [line.replace(desk, "'not (thorough)'") for line in tiers["test"]] == everything_once
    # What continuous integration runs.
    command = "make test LEAVE_OUT=thorough"
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("fails_again", [False, True])
def test_what_passes_only_the_second_time_is_named_at_the_end(fails_again: bool, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_twice.py").write_text(
        "from pathlib import Path\n"
        "def test_first_time_fails():\n"
        "    seen = Path(__file__).with_name('seen')\n"
        f"    again = {fails_again} or not seen.exists()\n"
        "    seen.touch()\n"
        "    assert not again\n"
        "def test_passes(): pass\n"
    )
    makefile = f"include Makefile\nonce:\n\t$(call tests,-c {tmp_path}/pytest.ini {tmp_path})\n"
    flaky = tmp_path / "flaky"
    done = subprocess.run(
        ["make", "--file", "-", "once", f"FLAKY={flaky}", f"BIN={Path(sys.executable).parent}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTEST"))},
        input=makefile,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode != 0) == fails_again, done.stdout + done.stderr
    named = [line.split()[:2] for line in flaky.read_text().splitlines()]
    assert named == ([] if fails_again else [["FLAKY", "test_twice.py::test_first_time_fails:"]])
