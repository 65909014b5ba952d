"""Checks, before ranks are started, whether the installed Horovod fits what is installed now. Reads files only."""

from __future__ import annotations

from hpctrain.common.cluster.checks import Check, judge, skip
from hpctrain.common.cluster.mpi import BUILD_HINT, find_mpi
from hpctrain.common.errors import HpctrainError
from hpctrain.control.horovod import PACKAGES, TITLES, VERSION, cuda
from hpctrain.control.horovod.fingerprint import Installed, find_installed, mpi_identity, package_version

# The MPI that is wanted; hpctrain's own engine needs one too.
AN_MPI = "an MPI"
_FIRST_BUILD = f"{BUILD_HINT} (compiles for about five minutes on two cores)"


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
        if check.status != "ok":
            raise HpctrainError(
                "HT-horovod-build-unfit",
                "{found}; wanted: {wanted}",
                check.remedy,
                found=check.found,
                wanted=check.wanted or "the framework",
            )


def report() -> list[Check]:
    """The state of every part of the build; nothing is missing if no status is ``failed``."""
    installed = find_installed()
    frameworks = [_framework(name, installed) for name in PACKAGES]
    return [_horovod(installed), _mpi(installed), *frameworks, _nccl(installed)]


def _horovod(installed: Installed | None) -> Check:
    if installed is None:
        return judge("horovod", "Horovod is not built", failed=True, wanted=VERSION, remedy=_FIRST_BUILD)
    whose = "" if installed.fingerprint else ", not built by hpctrain, so its MPI is not known"
    return Check(name="horovod", status="ok", found=f"Horovod {installed.version}{whose}", wanted=VERSION)


def _mpi(installed: Installed | None) -> Check:
    try:
        mpi = mpi_identity(find_mpi())
    except HpctrainError as error:
        return judge("mpi", error.message, failed=True, wanted=AN_MPI, remedy=error.hint)
    built = installed.fingerprint.mpi if installed and installed.fingerprint else mpi
    found = mpi if built == mpi else f"Horovod is built for {built}"
    return judge("mpi", found, failed=built != mpi, wanted=mpi, remedy=BUILD_HINT)


def _framework(framework: str, installed: Installed | None) -> Check:
    package = PACKAGES[framework]
    version, title = package_version(package), TITLES[package]
    if version is None:
        return skip(framework, f"{title} is not installed", f"pip install 'hpctrain[{framework}]', then {BUILD_HINT}")
    built = None
    if installed and package in installed.packages:
        built = getattr(installed.fingerprint, package) if installed.fingerprint else version
    found = f"Horovod is built for {title} {built}" if built else f"Horovod is not built for {title}"
    wanted = f"{title} {version}"
    found = wanted if built == version else found
    return judge(framework, found, failed=built != version, wanted=wanted, remedy=BUILD_HINT)


def _nccl(installed: Installed | None) -> Check:
    toolkit, nccl = cuda.find_accelerator()
    if toolkit is None:
        needed = "the CUDA toolkit (CUDA_HOME) and CUDA builds of the frameworks"
        return skip("nccl", "no CUDA toolkit, or frameworks for CPUs", f"to use GPUs: {needed}, then {BUILD_HINT}")
    remedy = f"apt-get install libnccl-dev, or set NCCL_HOME, then {BUILD_HINT}"
    if nccl is None:
        found = f"CUDA {toolkit.version} without NCCL's header and library"
        return judge("nccl", found, failed=True, wanted="nccl.h and libnccl.so", remedy=remedy)
    built = installed.fingerprint.nccl if installed and installed.fingerprint else None
    found = f"Horovod is built {f'for NCCL {built}' if built else 'without NCCL'}"
    if built == nccl.version:
        found = f"NCCL {built}, CUDA {toolkit.version}"
    return judge("nccl", found, failed=built != nccl.version, wanted=f"NCCL {nccl.version}", remedy=BUILD_HINT)
