"""Installs Horovod and proves it on two ranks, and compiles it first if no cached wheel fits."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from hpctrain.common.cluster.mpi import MpiInstallation, find_mpi
from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.control.horovod import PACKAGES, TITLES, cuda, wheel
from hpctrain.control.horovod.fingerprint import BuildFingerprint, current_fingerprint, find_installed
from hpctrain.control.horovod.wheel import Say

_PIP_SECONDS = 600.0
_SECONDS = 300.0
# For an mpirun that does not end its ranks by itself.
_END_SECONDS = 30.0


def build(say: Say) -> tuple[BuildFingerprint, str]:
    """Make the installed Horovod fit this environment's frameworks and MPI.

    Args:
        say: gets the name of each step.

    Returns:
        What Horovod is built for now, and how it came to be: ``already installed``, ``from the cache`` or
        ``compiled``.

    Raises:
        HpctrainError: something that the build needs is missing, or the build or its proof failed.
    """
    mpi = find_mpi()
    toolkit, nccl = cuda.find_accelerator()
    wanted = current_fingerprint(mpi, toolkit, nccl)
    if not wanted.packages:
        raise HpctrainError(
            "HT-package-not-installed",
            "there is no framework to build Horovod for",
            "pip install 'hpctrain[torch]' or [keras]",
        )
    installed = find_installed()
    if installed and installed.fingerprint == wanted:
        return wanted, "already installed"
    found = wheel.cached_wheel(wanted)
    built = found or wheel.compile_wheel(wanted, mpi, toolkit, nccl, say)
    say("installing")
    _pip("install", "--no-deps", "--force-reinstall", str(built))
    try:
        prove(mpi, wanted.packages, say)
    except HpctrainError:
        # Removed, so that the next command does not take an unproved build for a working one, and compiles anew.
        built.unlink(missing_ok=True)
        _pip("uninstall", "--yes", "horovod")
        raise
    return wanted, "from the cache" if found else "compiled"


def _pip(*arguments: str) -> None:
    answer = run_program(sys.executable, "-m", "pip", *arguments, seconds=_PIP_SECONDS)
    if answer.returncode != 0:
        raise HpctrainError(
            "HT-horovod-build-failed",
            "pip {command} failed: {reason}",
            f"may you write to {Path(sys.prefix)}?",
            exit_code=1,
            command=arguments[0],
            reason=answer.stderr.strip(),
        )
    # Python has to see modules that were installed or removed.
    importlib.invalidate_caches()


def prove(mpi: MpiInstallation, packages: tuple[str, ...], say: Say) -> None:
    """Start the self-test of :mod:`hpctrain.worker.comm.selftest` on two ranks, once a framework.

    Raises:
        HpctrainError: a rank failed or computed other numbers; with the end of what it printed.
    """
    for framework, package in PACKAGES.items():
        if package in packages:
            say(f"proving {TITLES[package]} on 2 ranks")
            _run_selftest(mpi, framework, TITLES[package])


def _run_selftest(mpi: MpiInstallation, framework: str, title: str) -> None:
    # Some login nodes have fewer slots than the proof has ranks, so ranks may share cores.
    options = ["--oversubscribe", "--bind-to", "none"] if mpi.flavour.startswith("open-mpi") else []
    selftest = [sys.executable, "-m", "hpctrain.worker.comm.selftest", "--framework", framework]
    env = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Every mpirun that is known ends its ranks after this many seconds.
        "MPIEXEC_TIMEOUT": f"{_SECONDS:g}",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [str(mpi.mpirun), *options, "-np", "2", *selftest]
    answer = run_program(*command, environment=env, seconds=_SECONDS + _END_SECONDS)
    if answer.returncode != 0:
        end = "\n".join(f"{answer.stdout}{answer.stderr}".strip().splitlines()[-12:])
        raise HpctrainError(
            "HT-horovod-build-failed",
            "Horovod was compiled, but its test with {framework} on 2 ranks of {mpi} failed (exit "
            "{status}); the end of its output:\n{output}",
            "it was removed again; `hpctrain horovod check` names the MPI and the frameworks",
            exit_code=1,
            framework=title,
            mpi=mpi.name,
            status=answer.returncode,
            output=end,
        )
