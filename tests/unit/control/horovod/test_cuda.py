"""CUDA and NCCL are found by their files, and only where a framework can use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.control.horovod import cuda

NCCL_HEADER = """\
#ifndef NCCL_H_
#define NCCL_MAJOR 2
#define NCCL_MINOR 21
#define NCCL_PATCH 5
#define NCCL_SUFFIX ""
#define NCCL_VERSION_CODE 22105
"""
CPU_TORCH = "from typing import Optional\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA_TORCH = "from typing import Optional\ncuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"
CPU_TENSORFLOW = "build_info = collections.OrderedDict([('is_cuda_build', False), ('is_rocm_build', False)])\n"
CUDA_TENSORFLOW = "build_info = collections.OrderedDict([('cuda_version', '12.5.1'), ('is_cuda_build', True)])\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages; one that is not in it is not installed."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.setattr(cuda, "package_directory", lambda name: site / name if (site / name).is_dir() else None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("NCCL_HOME", raising=False)
    return site


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("torch", "tensorflow", "expected"),
    [
        (CPU_TORCH, CPU_TENSORFLOW, False),
        (CUDA_TORCH, CPU_TENSORFLOW, True),
        (CUDA_TORCH, None, True),
        (CPU_TORCH, CUDA_TENSORFLOW, True),
        (None, CUDA_TENSORFLOW, True),
        (None, None, False),
    ],
)
def test_which_framework_was_built_with_cuda(
    packages: Path, torch: str | None, tensorflow: str | None, expected: bool
) -> None:
    if torch:
        write(packages / "torch" / "version.py", torch)
    if tensorflow:
        write(packages / "tensorflow" / "python" / "platform" / "build_info.py", tensorflow)
    assert cuda.framework_has_cuda() is expected


def test_cuda_home_names_the_toolkit(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = write(tmp_path / "a toolkit" / "bin" / "nvcc", "#!/bin/sh\necho 'release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "a toolkit"))
    assert cuda.find_toolkit() == cuda.Toolkit(version="12.4", home=tmp_path / "a toolkit")


def test_nccl_of_the_package_that_torch_brings(packages: Path, tmp_path: Path) -> None:
    toolkit = cuda.Toolkit(version="12.4", home=tmp_path / "cuda")
    header = write(packages / "nvidia" / "nccl" / "include" / "nccl.h", NCCL_HEADER)
    library = write(packages / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    assert cuda.find_nccl(toolkit) == cuda.Nccl(version="2.21.5", include=header.parent, libraries=library.parent)


def test_nccl_home_goes_first(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for home, text in (
        (packages / "nvidia" / "nccl", NCCL_HEADER),
        (tmp_path / "own", NCCL_HEADER.replace("MINOR 21", "MINOR 28")),
    ):
        write(home / "include" / "nccl.h", text)
        write(home / "lib" / "libnccl.so")
    monkeypatch.setenv("NCCL_HOME", str(tmp_path / "own"))
    found = cuda.find_nccl(cuda.Toolkit(version="12.4", home=tmp_path / "cuda"))
    assert found is not None
    assert found.version == "2.28.5"
