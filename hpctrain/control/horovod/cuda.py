"""Finds CUDA and NCCL where a framework can use them, by their files, without importing a framework."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.cluster.programs import program_output

_TORCH_CUDA = re.compile(r"^cuda\b[^=]*= *'(?P<version>[\d.]+)'", re.MULTILINE)
_TENSORFLOW_CUDA = re.compile(r"'is_cuda_build', True")
_NVCC_RELEASE = re.compile(r"release (?P<version>[\d.]+)")
_NCCL_NUMBER = re.compile(r"#define NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)")


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """CUDA's compiler and version."""

    version: str
    home: Path


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """NCCL's version, the folder of ``nccl.h`` and the folder of its libraries."""

    version: str
    include: Path
    libraries: Path


def package_directory(package: str) -> Path | None:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def framework_has_cuda() -> bool:
    """Whether the installed PyTorch or TensorFlow was built with CUDA."""
    torch = package_directory("torch")
    if torch and _TORCH_CUDA.search((torch / "version.py").read_text()):
        return True
    tensorflow = package_directory("tensorflow")
    info = tensorflow / "python/platform/build_info.py" if tensorflow else None
    return bool(info and _TENSORFLOW_CUDA.search(info.read_text()))


def find_toolkit() -> Toolkit | None:
    """The CUDA toolkit of ``CUDA_HOME``, or that of the nvcc on the PATH."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if nvcc is None:
        return None
    match = _NVCC_RELEASE.search(program_output(nvcc, "--version"))
    if match is None:
        return None
    return Toolkit(version=match["version"], home=Path(home) if home else Path(nvcc).resolve().parent.parent)


def find_nccl(toolkit: Toolkit) -> Nccl | None:
    """NCCL's development files: of ``NCCL_HOME``, of the package that PyTorch brings, of CUDA or of the system."""
    for include, libraries in _nccl_places(toolkit):
        header = include / "nccl.h"
        if header.is_file() and any(libraries.glob("libnccl.so*")):
            numbers = _NCCL_NUMBER.findall(header.read_text())
            return Nccl(version=".".join(numbers[:3]), include=include, libraries=libraries)
    return None


def _nccl_places(toolkit: Toolkit) -> Iterator[tuple[Path, Path]]:
    homes = [Path(os.environ["NCCL_HOME"])] if "NCCL_HOME" in os.environ else []
    if nvidia := package_directory("nvidia"):
        homes.append(nvidia / "nccl")
    for home in [*homes, toolkit.home, Path("/usr")]:
        for libraries in ("lib", "lib64", f"lib/{os.uname().machine}-linux-gnu"):
            yield home / "include", home / libraries


def find_accelerator() -> tuple[Toolkit | None, Nccl | None]:
    """CUDA and NCCL, each only where an installed framework can use it."""
    toolkit = find_toolkit() if framework_has_cuda() else None
    return toolkit, find_nccl(toolkit) if toolkit else None
