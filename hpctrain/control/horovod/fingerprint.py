"""What a Horovod wheel depends on, the cache key derived from it, and what the installed Horovod was built for."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.cluster.machine import installed_version
from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.control.horovod import METADATA_KEYS, VERSION, adapt, cuda


@dataclass(frozen=True, kw_only=True)
class BuildFingerprint:
    """The versions that a wheel is built from and for; None for what it does not use."""

    horovod: str
    adaptations: str
    python: str
    mpi: str
    torch: str | None
    tensorflow: str | None
    cuda: str | None
    nccl: str | None

    @property
    def packages(self) -> tuple[str, ...]:
        """The frameworks, by package."""
        return tuple(name for name in ("torch", "tensorflow") if getattr(self, name))

    @property
    def key(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def current_fingerprint(mpi: MpiInstallation, toolkit: cuda.Toolkit | None, nccl: cuda.Nccl | None) -> BuildFingerprint:
    """The fingerprint of the wheel that fits this environment and these libraries."""
    return BuildFingerprint(
        horovod=VERSION,
        adaptations=adapt.version(),
        python=f"{sys.implementation.cache_tag} {sysconfig.get_platform()}",
        mpi=mpi_identity(mpi),
        torch=package_version("torch"),
        tensorflow=package_version("tensorflow"),
        cuda=toolkit.version if toolkit else None,
        nccl=nccl.version if nccl else None,
    )


def environment_prefix(mpi: MpiInstallation) -> Path | None:
    """The prefix of this Python's environment if MPI is a package of it, else None."""
    prefix = Path(sys.prefix).resolve()
    return prefix if mpi.mpirun.resolve().is_relative_to(prefix) else None


def mpi_identity(mpi: MpiInstallation) -> str:
    """A text that identifies an MPI: a wheel finds it relative to itself or at an absolute path."""
    return f"{mpi.name} {'of this environment' if environment_prefix(mpi) else f'at {mpi.mpirun.resolve()}'}"


def package_version(package: str) -> str | None:
    """The version of an installed framework, read without importing it; None if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return None
    return installed_version(package) or "of unknown version"


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The Horovod of this environment; ``fingerprint`` is None where something other than hpctrain built it."""

    version: str
    packages: tuple[str, ...]
    fingerprint: BuildFingerprint | None


def find_installed() -> Installed | None:
    """The Horovod of this environment, if there is one."""
    directory = cuda.package_directory("horovod")
    if directory is None:
        return None
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        # Only a folder of that name is on the module path, such as Horovod's sources.
        return None
    path = directory / "metadata.json"
    metadata = json.loads(path.read_text()) if path.is_file() else {}
    record = metadata.get("hpctrain")
    return Installed(
        version=version,
        packages=tuple(package for package, key in METADATA_KEYS.items() if key in metadata),
        fingerprint=BuildFingerprint(**record) if record else None,
    )
