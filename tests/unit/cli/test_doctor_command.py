"""``hpctrain doctor``: what a user sees, and what a program reads."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from hpctrain.cli import doctor
from hpctrain.common.cluster.checks import Check
from support.launching import Launch

KEYS = {"name", "status", "found", "wanted", "remedy", "where"}


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_fault_comes_first_with_what_mends_it(few_files: None, hpctrain: Launch) -> None:
    result = hpctrain("doctor")
    assert result.returncode == 3
    first = result.stdout.splitlines()
    assert first[0].startswith("FAILED  ")
    remedy = next(line for line in first if line.startswith("        remedy  "))
    assert "-n 4096" in remedy or "limits.conf" in remedy
    assert any(line.startswith("        wanted  ") and line.endswith(" 4,096") for line in first)


def test_hosts_of_a_failed_check_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tuple(f"gpu{number}" for number in range(1, 33))
    long = "reset the fabric " * 20
    doctor._print([Check(name="memlock", status="failed", found="64 KiB", remedy=long, where=hosts)])
    said = capsys.readouterr().out
    assert "memlock (gpu[1-32])" in said
    # A command is never cut into lines.
    assert long.strip() in said
