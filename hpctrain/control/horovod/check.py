"""Checks, before ranks are started, whether the installed Horovod fits what is installed now. Reads files only."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.common.cluster.checks import Check
from hpctrain.common.cluster.mpi import BUILD_HINT, find_mpi
from hpctrain.common.errors import HpctrainError
from hpctrain.control.horovod import PACKAGES, TITLES, VERSION
from hpctrain.control.horovod.cuda import framework_has_cuda
from hpctrain.control.horovod.fingerprint import mpi_identity, package_version
from hpctrain.control.horovod.installed import Installed, find_installed

# The MPI that is wanted; hpctrain's own engine needs one too.
AN_MPI = "an MPI"
_FIRST_BUILD = f"{BUILD_HINT} (compiles for about five minutes on two cores)"
_SOURCE = "https://horovod.readthedocs.io/en/stable/install_include.html"


def require(framework: str | None) -> None:
    """Make sure, before ranks are started, that Horovod can work in them.

    A Horovod that something other than hpctrain built is taken on trust: the ranks themselves compare the number of
    ranks that MPI and Horovod see.

    Args:
        framework: ``torch`` or ``keras``; None where a script chooses by itself, so that only the MPI is known.

    Raises:
        HpctrainError: Horovod is not built, or built for another MPI or version of the framework.
    """
    installed = find_installed()
    if installed is None:
        raise HpctrainError(
            "HT-backend-unavailable", "Horovod is not built", f"{_FIRST_BUILD}; --backend mpi needs no build"
        )
    checks = [_mpi(installed)] if framework is None else [_framework(framework, installed), _mpi(installed)]
    for check in checks:
        if check.status == "failed":
            raise HpctrainError(
                "HT-horovod-build-unfit",
                "{found}; wanted: {wanted}",
                check.remedy,
                found=check.found,
                wanted=check.wanted,
            )
        if check.status == "not applicable":
            raise HpctrainError("HT-horovod-build-unfit", "{found}", check.remedy, found=check.found)


def report() -> list[Check]:
    """The state of every part of the build; nothing is missing if no status is ``failed``."""
    installed = find_installed()
    checks = [_horovod(installed), _mpi(installed), *(_framework(name, installed) for name in PACKAGES)]
    return [replace(check, source=_SOURCE) for check in (*checks, _nccl(installed))]


def _horovod(installed: Installed | None) -> Check:
    if installed is None:
        return Check(name="horovod", status="failed", found="Horovod is not built", wanted=VERSION, remedy=_FIRST_BUILD)
    if installed.fingerprint is None:
        found = f"Horovod {installed.version}, not built by hpctrain, so its MPI is not known"
        return Check(name="horovod", status="ok", found=found, wanted=VERSION, remedy=f"to be sure, {BUILD_HINT}")
    return Check(name="horovod", status="ok", found=f"Horovod {installed.version}", wanted=VERSION)


def _mpi(installed: Installed | None) -> Check:
    try:
        mpi = mpi_identity(find_mpi())
    except HpctrainError as error:
        return Check(name="mpi", status="failed", found=error.message, wanted=AN_MPI, remedy=error.hint)
    built = installed.fingerprint if installed else None
    if built and built.mpi != mpi:
        return Check(
            name="mpi", status="failed", found=f"Horovod is built for {built.mpi}", wanted=mpi, remedy=BUILD_HINT
        )
    return Check(name="mpi", status="ok", found=mpi)


def _framework(framework: str, installed: Installed | None) -> Check:
    package = PACKAGES[framework]
    version = package_version(package)
    title = TITLES[package]
    if version is None:
        return Check(
            name=framework,
            status="not applicable",
            found=f"{title} is not installed",
            remedy=f"to use it: pip install 'hpctrain[{framework}]', then {BUILD_HINT}",
        )
    wanted = f"{title} {version}"
    if installed is None or package not in installed.packages:
        found = f"Horovod is not built for {title}"
        return Check(name=framework, status="failed", found=found, wanted=wanted, remedy=BUILD_HINT)
    built = getattr(installed.fingerprint, package) if installed.fingerprint else version
    if built != version:
        found = f"Horovod is built for {title} {built}"
        return Check(name=framework, status="failed", found=found, wanted=wanted, remedy=BUILD_HINT)
    return Check(name=framework, status="ok", found=wanted)


def _nccl(installed: Installed | None) -> Check:
    # Imported here because it loads the whole build, which no start of ranks needs.
    from hpctrain.control.horovod.install import find_accelerator

    toolkit, nccl = find_accelerator()
    if toolkit is None:
        has_cuda = framework_has_cuda()
        remedy = "install the CUDA toolkit or set CUDA_HOME" if has_cuda else "install CUDA builds of the frameworks"
        return Check(
            name="nccl",
            status="not applicable",
            found="there is no CUDA toolkit" if has_cuda else "the frameworks are built for CPUs",
            remedy=f"to use GPUs: {remedy}, then {BUILD_HINT}",
        )
    if nccl is None:
        return Check(
            name="nccl",
            status="failed",
            found=f"CUDA {toolkit.version} without NCCL's header and library",
            wanted="nccl.h and libnccl.so",
            remedy=f"apt-get install libnccl-dev, or set NCCL_HOME, then {BUILD_HINT}",
        )
    built = installed.fingerprint.nccl if installed and installed.fingerprint else None
    if built != nccl.version:
        found = f"Horovod is built {f'for NCCL {built}' if built else 'without NCCL'}"
        return Check(name="nccl", status="failed", found=found, wanted=f"NCCL {nccl.version}", remedy=BUILD_HINT)
    return Check(name="nccl", status="ok", found=f"NCCL {built}, CUDA {toolkit.version}")
