"""Trains the digits over every MPI that can be had on this machine, and prints a table of the trainings.

``python tests/flavours/flavours.py FOLDER``: environments with one MPI each, and with the packages of this Python
behind their own, are made in the folder and kept there; each gets a Horovod of its own. An MPI within this Python's
environment would replace its mpirun, and one of the system that of every other program. Exits 1 if a training fails, or
reaches less than the recipe's tests hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1]))

from support.launching import AS_ROOT
from support.slurm import local_slurm
from support.slurm.local_slurm import LocalSlurm

_RANKS = "2"
# The floor that the project's other tests hold.
_ACCURACY = 0.975
_BUILD_SECONDS, _TRAINING_SECONDS = 1800, 300
# Prints the version of the MPI in a rank, and in the last line its files.
_LOADED = """
import horovod.torch
from mpi4py import MPI
horovod.torch.init()
print(MPI.Get_library_version().strip("\\0\\n "))
print(*{line.split()[-1] for line in open("/proc/self/maps") if "/libmpi.so" in line})
"""
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


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python whose mpirun is that of one MPI.

    Attributes:
        python: its interpreter; mpirun lies beside it.
        more: variables that a cluster's module of this MPI would set.
    """

    python: Path
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """What programs in it are started with, this process's own variables among them."""
        return {**os.environ, **self.more, "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"}

    def run(self, *arguments: str, seconds: float = 600) -> str:
        """What the interpreter prints with these arguments."""
        return _run(str(self.python), *arguments, env=self.variables, timeout=seconds)


def _run(*command: str, timeout: float = 600, **options: Any) -> str:
    """What a command prints; all that it started has ended then."""
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **streams, **options) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            # mpirun and its ranks have sessions of their own.
            if process.poll() is None:
                for each in (*psutil.Process(process.pid).children(recursive=True), process):
                    each.kill()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} exited {process.returncode}:\n{output[-2000:]}")
    return str(output)


def _beside_this(folder: Path) -> Path:
    """A new environment with the packages of this one behind its own; returns its interpreter."""
    venv.create(folder, symlinks=True, clear=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Not by PYTHONPATH, which would go before its own packages, and in which editable ones are not found.
    (packages / "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    # By which Horovod is built.
    (folder / "bin" / "cmake").symlink_to(Path(sys.executable).with_name("cmake"))
    return folder / "bin" / "python"


def _of_wheels(folder: Path, *packages: str) -> Environment:
    python, mark = folder / "bin" / "python", folder / "-".join(packages).replace("==", "-")
    if not mark.exists():
        _beside_this(folder)
        pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--ignore-installed")
        _run(*pip, *packages)
        mark.touch()
    return Environment(python=python)


def _of_debian(folder: Path) -> Environment:
    """Debian's packages unpacked in a folder, and an environment beside it with links to their programs."""
    system, mark = folder / "system", folder / "unpacked"
    python = folder / "environment" / "bin" / "python"
    if not mark.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _beside_this(folder / "environment")
        with tempfile.TemporaryDirectory() as name:
            _run("apt-get", "download", *_DEBIAN, cwd=name)
            for package in sorted(Path(name).glob("*.deb")):
                _run("dpkg", "--extract", str(package), str(system))
        for program, file in _DEBIAN_PROGRAMS.items():
            python.with_name(program).symlink_to(system / "usr" / "bin" / file)
        mark.touch()
    libraries = system / "usr" / "lib" / sysconfig.get_config_var("MULTIARCH")
    places = [libraries, libraries / "openmpi" / "lib", system / "lib" / libraries.name]
    more = {
        "OPAL_PREFIX": str(system / "usr"),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, places)),
        # Parts for InfiniBand look for libraries at the places that Debian's alternatives make.
        "OMPI_MCA_mca_base_component_show_load_errors": "0",
    }
    return Environment(python=python, more=more)


# What makes an environment in a folder, and the launcher by which Slurm starts its ranks.
FLAVOURS: dict[str, tuple[Callable[[Path], Environment], str]] = {
    "open-mpi-5": (lambda folder: Environment(python=Path(sys.executable)), "srun-pmix"),
    "open-mpi-4": (_of_debian, "srun-pmix"),
    "mpich": (lambda folder: _of_wheels(folder, "mpich==5.0.2"), "srun-pmi2"),
    "intel-mpi": (lambda folder: _of_wheels(folder, "impi-rt==2021.19.0", "impi-devel==2021.19.0"), "srun-pmi2"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the environments are")
    parser.add_argument("--only", choices=FLAVOURS, help="this flavour alone")
    options = parser.parse_args()
    os.environ.update(AS_ROOT)
    print("| MPI | engine | framework | launcher | test accuracy | seconds |\n|---|---|---|---|---|---|", flush=True)
    failures: list[str] = []
    with ExitStack() as stack:
        slurm = None
        if reason := local_slurm.obstacle():
            failures.append(f"no training by srun: {reason}")
        else:
            slurm = stack.enter_context(LocalSlurm())
        for name in [options.only] if options.only else FLAVOURS:
            try:
                failures += _trainings(name, options.folder.resolve() / name, slurm)
            except Exception as error:
                failures.append(f"{name}: {error}")
    print(*failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


def _trainings(name: str, folder: Path, slurm: LocalSlurm | None) -> list[str]:
    """Train with all engines, frameworks and launchers of a flavour; returns what failed."""
    make, by_slurm = FLAVOURS[name]
    environment = make(folder)
    environment.run("-m", "hpctrain", "horovod", "build", seconds=_BUILD_SECONDS)
    mpi = _mpi(environment)
    failures = []
    launchers = ("mpirun", by_slurm) if slurm else ("mpirun",)
    for launcher, engine, framework in product(launchers, ("mpi", "horovod"), ("torch", "keras")):
        begin, result = time.monotonic(), "failed"
        row = f"| {mpi} | {engine} | {framework} | {launcher} |"
        try:
            accuracy = _train(environment, slurm, engine, framework, launcher)
            result = f"{accuracy:.4f}"
            if accuracy < _ACCURACY:
                failures.append(f"{row}: {accuracy} is less than {_ACCURACY}")
        except Exception as error:
            failures.append(f"{row}: {error}")
        print(f"{row} {result} | {time.monotonic() - begin:.0f} |", flush=True)
    return failures


def _mpi(environment: Environment) -> str:
    """The MPI of the environment's mpirun, which has to be the only one that mpi4py and Horovod load."""
    name = environment.run("-c", "from hpctrain.common.cluster.mpi import find_mpi; print(find_mpi().name)").strip()
    version, *files = environment.run("-c", _LOADED).strip().rsplit("\n", 1)
    if name.split()[-1] not in version or len("".join(files).split()) != 1:
        raise RuntimeError(f"mpirun is that of {name}, and ranks load {version} from {files}")
    return name


def _train(environment: Environment, slurm: LocalSlurm | None, engine: str, framework: str, launcher: str) -> float:
    """Train, by srun within an allocation of one node; returns the accuracy that all ranks reached."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-flavours-") as name:
        run = Path(name, "run")
        command = ["-m", "hpctrain", "run", "digits", "-np", _RANKS, "--backend", engine, "--framework", framework]
        command += ["--launcher", launcher, "--run-dir", str(run)]
        if launcher == "mpirun":
            said = environment.run(*command, "--oversubscribe", seconds=_TRAINING_SECONDS)
        else:
            assert slurm
            variables = {key: value for key, value in environment.variables.items() if key not in slurm.environment}
            allocation = ("salloc", "--nodes", "1", "--ntasks", _RANKS, str(environment.python))
            said = slurm.run(*allocation, *command, timeout=_TRAINING_SECONDS, **variables)
        summary = json.loads((run / "summary.json").read_text())
    if (summary["status"], summary["backend"], summary["ranks"]) != ("done", engine, int(_RANKS)):
        raise RuntimeError(f"another training than asked for: {summary}\n{said[-2000:]}")
    return float(summary["metrics"]["test_accuracy"])


if __name__ == "__main__":
    sys.exit(main())
