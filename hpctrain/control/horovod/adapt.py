"""Changes to Horovod's 2023 sources for today's frameworks, as data."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.errors import HpctrainError


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """A text in one file that is replaced, and the reason.

    ``package`` is the framework that needs it; None where every build does.
    """

    file: str
    old: str
    new: str
    reason: str
    package: str | None = None


_FIND_MPI = """\
if(DEFINED ENV{HPCTRAIN_MPI_PREFIX})
        set(MPI_FOUND TRUE)
        set(MPI_INCLUDE_PATH "$ENV{HPCTRAIN_MPI_PREFIX}/include")
        set(MPI_LIBRARIES "$ENV{HPCTRAIN_MPI_PREFIX}/lib/libmpi.so")
    else()
        find_package(MPI ${MPI_REQUIRED})
        list(GET MPI_LIBRARIES 0 MPI_LIBRARY)
        get_filename_component(CMAKE_INSTALL_RPATH "${MPI_LIBRARY}" DIRECTORY)
    endif()
    list(APPEND CMAKE_INSTALL_RPATH $ENV{HPCTRAIN_RPATH})
    set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
"""

_HEADERS = "the headers of GCC 13 and later include fewer others"

ADAPTATIONS = (
    *(
        Adaptation(
            file=file,
            old="set(CMAKE_CXX_STANDARD 14)",
            new="set(CMAKE_CXX_STANDARD 20)",
            reason="the headers of PyTorch 2.12 and later are C++20",
            package="torch",
        )
        for file in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
    ),
    Adaptation(
        file="horovod/common/common.h",
        old="#include <memory>\n",
        new="#include <memory>\n#include <stdexcept>\n",
        reason=_HEADERS,
    ),
    Adaptation(
        file="horovod/common/group_table.h",
        old="#include <queue>\n",
        new="#include <cstdint>\n#include <queue>\n#include <string>\n",
        reason=_HEADERS,
    ),
    Adaptation(
        file="horovod/common/nvtx_op_range.h",
        old="#define HOROVOD_NVTX_OP_RANGE_H\n",
        new="#define HOROVOD_NVTX_OP_RANGE_H\n\n#include <cstdint>\n",
        reason=_HEADERS,
    ),
    Adaptation(
        file="third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        old="  const size_type count_;\n",
        new="  size_type count_;\n",
        reason="GCC 14 refuses the assignment to a constant in an operator that nothing calls",
    ),
    Adaptation(
        file="horovod/tensorflow/CMakeLists.txt",
        old='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        new="",
        reason="TensorFlow's package no longer ships the XLA headers that this file includes",
        package="tensorflow",
    ),
    Adaptation(
        file="CMakeLists.txt",
        old="find_package(MPI ${MPI_REQUIRED})\n",
        new=_FIND_MPI,
        reason=(
            "CMake's FindMPI splits the compiler wrapper's flags at the spaces of a path, and CMake would record the "
            "build's own absolute paths in the library, so that a cached wheel fits one environment only"
        ),
    ),
    Adaptation(
        file="CMakeLists.txt",
        old='"\\"dummy\\": \\"none\\"\\n}"',
        new='"\\"hpctrain\\": $ENV{HPCTRAIN_FINGERPRINT}\\n}"',
        reason="the installed package itself then says what it was built for",
    ),
)


def version() -> str:
    """A short hash that changes with every change of the adaptations."""
    return hashlib.sha256(repr(ADAPTATIONS).encode()).hexdigest()[:12]


def adapt(source: Path, packages: Collection[str]) -> None:
    """Change the sources in place for the frameworks that are to be built.

    Raises:
        HpctrainError: a text that should be replaced is not there, so the sources are not the ones that are known.
    """
    for adaptation in ADAPTATIONS:
        if adaptation.package is None or adaptation.package in packages:
            _apply(source, adaptation)


def _apply(source: Path, adaptation: Adaptation) -> None:
    path = source / adaptation.file
    text = path.read_text() if path.is_file() else ""
    if adaptation.old not in text:
        raise HpctrainError(
            "HT-horovod-build-failed",
            "Horovod's {file} lacks the text {text!r} that has to change ({reason})",
            "the source package is not the release that hpctrain knows; update hpctrain",
            exit_code=1,
            file=adaptation.file,
            text=adaptation.old.strip(),
            reason=adaptation.reason,
        )
    path.write_text(text.replace(adaptation.old, adaptation.new))
