"""Trains the digits over every MPI that can be had on this machine, and prints a table of the trainings.

``python tests/flavours/flavours.py FOLDER``: environments with one MPI each are made in the folder, and kept there;
each gets a Horovod of its own. Exits 1 if a training fails, or reaches less than the recipe's tests hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from flavour_environments import FLAVOURS, Environment, FlavourError

sys.path.append(str(Path(__file__).parents[1]))

from support.launching import AS_ROOT
from support.slurm import local_slurm
from support.slurm.local_slurm import LocalSlurm, SlurmError

_RANKS = "2"
# The floor that the project's other tests hold.
_ACCURACY = 0.975
_BUILD_SECONDS = 1800
_TRAINING_SECONDS = 300
# Prints the version of the MPI in a rank, and in the last line its files.
_LOADED = """
import horovod.torch
from mpi4py import MPI
horovod.torch.init()
print(MPI.Get_library_version().strip("\\0\\n "))
print(*{line.split()[-1] for line in open("/proc/self/maps") if "/libmpi.so" in line})
"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training, and what became of it: an accuracy, or what was said instead."""

    mpi: str
    engine: str
    framework: str
    launcher: str
    accuracy: float | None = None
    seconds: float = 0
    said: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ended as the recipe should."""
        return self.accuracy is not None and self.accuracy >= _ACCURACY

    @property
    def row(self) -> str:
        """Of the table."""
        result = f"{self.accuracy:.4f}" if self.accuracy is not None else "failed"
        return f"| {self.mpi} | {self.engine} | {self.framework} | {self.launcher} | {result} | {self.seconds:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the environments are")
    parser.add_argument("--only", choices=FLAVOURS, help="this flavour alone")
    options = parser.parse_args()
    os.environ.update(AS_ROOT)
    # What is open is closed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    names = [options.only] if options.only else list(FLAVOURS)
    print("| MPI | engine | framework | launcher | test accuracy | seconds |\n|---|---|---|---|---|---|", flush=True)
    failures = []
    with ExitStack() as stack:
        slurm = None
        if reason := local_slurm.obstacle():
            failures.append(f"no training by srun: {reason}")
        else:
            slurm = stack.enter_context(LocalSlurm())
        for name in names:
            for training in _trainings(name, options.folder.resolve() / name, slurm):
                print(training.row, flush=True)
                if not training.passed:
                    failures.append(f"{training.row}\n{training.said}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _trainings(name: str, folder: Path, slurm: LocalSlurm | None) -> Iterator[Training]:
    """All of one flavour, each as it ends."""
    flavour = FLAVOURS[name]
    try:
        environment = flavour.make(folder)
        environment.run("-m", "hpctrain", "horovod", "build", seconds=_BUILD_SECONDS)
        mpi = _mpi(environment)
    except FlavourError as error:
        yield Training(mpi=name, engine="-", framework="-", launcher="-", said=str(error))
        return
    starts = {"mpirun": _by_mpirun(environment)}
    if slurm:
        starts[flavour.srun] = _by_srun(environment, slurm)
    for (launcher, start), engine, framework in product(starts.items(), ("mpi", "horovod"), ("torch", "keras")):
        begin = time.monotonic()
        training = Training(mpi=mpi, engine=engine, framework=framework, launcher=launcher)
        try:
            training = replace(training, accuracy=_train(start, engine, framework, launcher))
        except (FlavourError, SlurmError) as error:
            training = replace(training, said=str(error))
        yield replace(training, seconds=time.monotonic() - begin)


def _mpi(environment: Environment) -> str:
    """The MPI of the environment's mpirun, which has to be the only one that mpi4py and Horovod load."""
    name = environment.run("-c", "from hpctrain.common.cluster.mpi import find_mpi; print(find_mpi().name)").strip()
    version, *files = environment.run("-c", _LOADED).strip().rsplit("\n", 1)
    if name.split()[-1] not in version or len("".join(files).split()) != 1:
        raise FlavourError(f"mpirun is that of {name}, and ranks load {version} from {files}")
    return name


def _by_mpirun(environment: Environment) -> Callable[..., str]:
    return lambda *arguments: environment.run(*arguments, seconds=_TRAINING_SECONDS)


def _by_srun(environment: Environment, slurm: LocalSlurm) -> Callable[..., str]:
    """Within an allocation of one node."""
    variables = {name: value for name, value in environment.all_variables.items() if name not in slurm.environment}
    allocation = ("salloc", "--nodes", "1", "--ntasks", _RANKS, str(environment.python))
    return lambda *arguments: slurm.run(*allocation, *arguments, timeout=_TRAINING_SECONDS, **variables)


def _train(start: Callable[..., str], engine: str, framework: str, launcher: str) -> float:
    """Start a training, and read the accuracy that it reached with all of its ranks."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-flavours-") as name:
        folder = Path(name, "run")
        choices = ("--backend", engine, "--framework", framework, "--launcher", launcher)
        command = ("-m", "hpctrain", "run", "digits", "-np", _RANKS, *choices, "--run-dir", str(folder))
        # Slurm counts the places of its own allocation.
        said = start(*command, *(("--oversubscribe",) if launcher == "mpirun" else ()))
        summary = json.loads((folder / "summary.json").read_text())
        if (summary["status"], summary["backend"], summary["ranks"]) != ("done", engine, int(_RANKS)):
            raise FlavourError(f"another training than asked for: {summary}\n{said[-2000:]}")
        return float(summary["metrics"]["test_accuracy"])


if __name__ == "__main__":
    sys.exit(main())
