"""Proves a build: two ranks reduce numbers with it in each framework, and check them."""

from __future__ import annotations

import os
import subprocess
import sys

from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.common.errors import HpctrainError
from hpctrain.control.horovod import PACKAGES, TITLES
from hpctrain.control.horovod.wheel import Progress

_SECONDS = "300"


def prove(mpi: MpiInstallation, packages: tuple[str, ...], progress: Progress) -> None:
    """Start the self-test of :mod:`hpctrain.worker.comm.selftest` on two ranks, once a framework.

    Raises:
        HpctrainError: a rank failed or computed other numbers; with the end of what it printed.
    """
    for framework, package in PACKAGES.items():
        if package in packages:
            progress(f"proving {TITLES[package]} on 2 ranks", None)
            _run(mpi, framework, TITLES[package])


def _run(mpi: MpiInstallation, framework: str, title: str) -> None:
    # The proof starts more ranks than some login nodes have slots, and binds none to a core.
    options = ["--oversubscribe", "--bind-to", "none"] if mpi.flavour.startswith("open-mpi") else []
    selftest = [sys.executable, "-m", "hpctrain.worker.comm.selftest", "--framework", framework]
    env = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Every mpirun that is known ends its ranks after this many seconds.
        "MPIEXEC_TIMEOUT": _SECONDS,
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [str(mpi.mpirun), *options, "-np", "2", *selftest]
    answer = subprocess.run(
        command,
        check=False,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if answer.returncode != 0:
        end = "\n".join(answer.stdout.strip().splitlines()[-12:])
        raise HpctrainError(
            f"Horovod was compiled, but its test with {title} on 2 ranks of {mpi.name} failed (exit "
            f"{answer.returncode}); the end of its output:\n{end}",
            "it was removed again; `hpctrain horovod check` names the MPI and the frameworks",
            exit_code=1,
        )
