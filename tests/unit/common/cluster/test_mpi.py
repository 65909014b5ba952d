"""Which MPI is found, and how each flavour introduces itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.common.cluster.mpi import find_mpi, parse_version
from support.refusals import refused

HYDRA = """HYDRA build details:
    Version:                                 4.0.2
    Release Date:                            Thu Apr  7 12:34:45 CDT 2022
    CC:                              gcc -Wdate-time -D_FORTIFY_SOURCE=2
    Process Manager:                         pmi
    Launchers available:                     ssh rsh fork slurm ll lsf sge manual persist
"""
INTEL = """Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619 (id: c2e19c2f3e)
Copyright 2003-2023, Intel Corporation.
"""
OPEN_MPI = """mpirun (Open MPI) {}

Report bugs to https://www.open-mpi.org/community/help/
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPEN_MPI.format("4.1.4"), ("open-mpi-4", "4.1.4")),
        (OPEN_MPI.format("4.0.7rc2"), ("open-mpi-4", "4.0.7rc2")),
        (OPEN_MPI.format("5.0.11"), ("open-mpi-5", "5.0.11")),
        (OPEN_MPI.format("6.0.0a1"), ("open-mpi-5", "6.0.0a1")),
        (OPEN_MPI.format("10.1.0"), ("open-mpi-5", "10.1.0")),
        ("Loading compiler/2024\n" + OPEN_MPI.format("5.0.3"), ("open-mpi-5", "5.0.3")),
        (HYDRA, ("mpich-hydra", "4.0.2")),
        (INTEL, ("intel-mpi", "2021.10")),
    ],
)
def test_flavour_and_version_of_each_mpi(text: str, expected: tuple[str, str]) -> None:
    assert parse_version(text, Path("mpirun")) == expected


@pytest.mark.parametrize("text", ["", "mpirun 7.3\n", OPEN_MPI.format("3.1.6"), "mpirun (PRRTE) 3.0.2\n"])
def test_an_unknown_mpi_is_named_with_the_known_ones(text: str) -> None:
    with refused("HT-mpi-unavailable", mpirun="/opt/mpi/bin/mpirun") as error:
        parse_version(text, Path("/opt/mpi/bin/mpirun"))
    assert all(known in error.value.hint for known in ("Open MPI", "MPICH", "Hydra", "Intel MPI"))


def install(directory: Path, text: str, *others: str) -> Path:
    directory.mkdir(parents=True)
    program = directory / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    program.chmod(0o755)
    for name in others:
        (directory / name).write_text("#!/bin/sh\n")
        (directory / name).chmod(0o755)
    return program


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python environment with an MPI of its own, which is not on the PATH."""
    programs = tmp_path / "an environment" / "bin"
    install(programs, OPEN_MPI.format("5.0.11"), "mpicc", "mpicxx")
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return programs


def test_the_mpi_on_the_path_goes_first(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = install(tmp_path / "cluster" / "bin", HYDRA)
    monkeypatch.setenv("PATH", f"{own.parent}:/usr/bin:/bin")
    found = find_mpi()
    assert (found.mpirun, found.flavour, found.name) == (own, "mpich-hydra", "MPICH 4.0.2")


def test_the_environments_mpi_is_found_without_activation(environment: Path) -> None:
    found = find_mpi()
    assert found.mpirun == environment / "mpirun"
    assert found.flavour == "open-mpi-5"


def test_no_mpi_says_how_to_get_one(environment: Path) -> None:
    (environment / "mpirun").unlink()
    with refused("HT-mpi-unavailable") as error:
        find_mpi()
    assert "hpctrain[mpi]" in error.value.hint
