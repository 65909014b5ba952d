"""Environments with one MPI each, and with the packages of this Python behind their own.

An MPI within this Python's environment would replace its mpirun, and one of the system that of every other program.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_SECONDS = 600
# Of Debian 12, with what its Open MPI loads and the packages of system-packages.txt do not bring.
_DEBIAN = (
    *("openmpi-bin", "openmpi-common", "libopenmpi-dev", "libopenmpi3", "libfabric1", "libibverbs1", "libnl-3-200"),
    *("libnl-route-3-200", "libpsm-infinipath1", "libpsm2-2", "librdmacm1", "libucx0"),
)
# Debian's names for them have endings, between which its alternatives choose. CMake looks for mpiexec, and takes the
# compilers beside it.
_DEBIAN_PROGRAMS = {
    "mpiexec": "orterun",
    "mpirun": "orterun",
    "orted": "orted",
    "mpicc": "opal_wrapper",
    "mpicxx": "opal_wrapper",
}


class FlavourError(Exception):
    """A flavour cannot be had, or does not do what it should; the message has what was said."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python whose mpirun is that of one MPI.

    Attributes:
        python: its interpreter; mpirun lies beside it.
        variables: that a cluster's module of this MPI would set.
    """

    python: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_variables(self) -> dict[str, str]:
        """What programs in it are started with, this process's own variables among them."""
        return {**os.environ, **self.variables, "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"}

    def run(self, *arguments: str, seconds: float = _SECONDS) -> str:
        """What the interpreter prints with these arguments.

        Raises:
            FlavourError: it failed, or takes longer than that.
        """
        return _run(str(self.python), *arguments, variables=self.all_variables, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """An MPI, and who can start its ranks.

    Attributes:
        make: makes its environment in a folder.
        srun: the launcher of hpctrain by which Slurm starts its ranks.
    """

    make: Callable[[Path], Environment]
    srun: str


def _run(
    *command: str, variables: Mapping[str, str] = os.environ, seconds: float = _SECONDS, cwd: Path | None = None
) -> str:
    try:
        process = subprocess.Popen(
            command,
            env=variables,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError as error:
        raise FlavourError(f"{command[0]} cannot be run: {error.strerror}") from error
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise FlavourError(f"{' '.join(command)} did not end in {seconds:g} s") from error
    finally:
        _end(process)
    if process.returncode != 0:
        raise FlavourError(f"{' '.join(command)} exited {process.returncode}:\n{output[-2000:]}")
    return output


def _end(process: subprocess.Popen[str]) -> None:
    """A program that still runs, and all that it started: mpirun and its ranks have sessions of their own."""
    if process.poll() is None:
        started = psutil.Process(process.pid).children(recursive=True)
        for each in (process, *started):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def _beside_this(folder: Path) -> Path:
    """A new environment with the packages of this one behind its own; returns its interpreter."""
    if folder.exists():
        shutil.rmtree(folder)
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Not by PYTHONPATH, which would go before its own packages, and in which editable ones are not found.
    (packages / "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    python = folder / "bin" / "python"
    # By which Horovod is built.
    (folder / "bin" / "cmake").symlink_to(Path(sys.executable).with_name("cmake"))
    return python


def _own(_: Path) -> Environment:
    return Environment(python=Path(sys.executable))


def _of_wheels(*packages: str) -> Callable[[Path], Environment]:
    def make(folder: Path) -> Environment:
        python = folder / "bin" / "python"
        mark = folder / "-".join(package.replace("==", "-") for package in packages)
        if not mark.exists():
            _beside_this(folder)
            pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--ignore-installed")
            _run(*pip, *packages)
            mark.touch()
        return Environment(python=python)

    return make


def _of_debian(folder: Path) -> Environment:
    """Debian's packages unpacked in a folder, and an environment beside it with links to their programs."""
    system, mark = folder / "system", folder / "unpacked"
    python = folder / "environment" / "bin" / "python"
    if not mark.exists():
        if folder.exists():
            shutil.rmtree(folder)
        _beside_this(folder / "environment")
        with tempfile.TemporaryDirectory() as name:
            _run("apt-get", "download", *_DEBIAN, cwd=Path(name))
            for package in sorted(Path(name).glob("*.deb")):
                _run("dpkg", "--extract", str(package), str(system))
        for program, file in _DEBIAN_PROGRAMS.items():
            python.with_name(program).symlink_to(system / "usr" / "bin" / file)
        mark.touch()
    libraries = system / "usr" / "lib" / sysconfig.get_config_var("MULTIARCH")
    places = [libraries, libraries / "openmpi" / "lib", system / "lib" / libraries.name]
    variables = {
        "OPAL_PREFIX": str(system / "usr"),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, places)),
        # Parts for InfiniBand look for libraries at the places that Debian's alternatives make.
        "OMPI_MCA_mca_base_component_show_load_errors": "0",
    }
    return Environment(python=python, variables=variables)


FLAVOURS = {
    "open-mpi-5": Flavour(make=_own, srun="srun-pmix"),
    "open-mpi-4": Flavour(make=_of_debian, srun="srun-pmix"),
    "mpich": Flavour(make=_of_wheels("mpich==5.0.2"), srun="srun-pmi2"),
    "intel-mpi": Flavour(make=_of_wheels("impi-rt==2021.19.0", "impi-devel==2021.19.0"), srun="srun-pmi2"),
}
