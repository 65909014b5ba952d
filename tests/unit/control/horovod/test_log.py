"""What a build's log says: how far it is, and its first error."""

from __future__ import annotations

import pytest

from hpctrain.control.horovod.log import first_error, percent_done

NOISE = """\
  Running command Building wheel for horovod (setup.py)
  -- Found MPI: TRUE (found version "3.1")
  [ 10%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/mpi_ops_v2.cc.o
  In file included from /env/include/tensorflow/core/platform/errors.h:27,
  /src/mpi_ops.cc:118:27: warning: 'Unknown' is deprecated: Use absl::UnknownError() instead. [-Wdeprecated]
    118 |     return errors::Unknown(status.reason());
"""
COMPILER = (
    NOISE
    + """\
  /src/horovod/torch/mpi_ops_v2.cc: In function 'int DoAllreduce(at::Tensor)':
  /src/horovod/torch/mpi_ops_v2.cc:71:3: error: 'tensr' was not declared in this scope; did you mean 'tensor'?
     71 |   tensr.size();
        |   ^~~~~
        |   tensor
  /src/horovod/torch/mpi_ops_v2.cc:99:1: error: a later one
  make[2]: *** [CMakeFiles/pytorch.dir/build.make:76: mpi_ops_v2.cc.o] Error 1
  RuntimeError: a consequence
"""
)
CMAKE = (
    NOISE
    + """\
  CMake Error at /usr/share/cmake/Modules/FindPackageHandleStandardArgs.cmake:230 (message):
    Could NOT find NCCL (missing: NCCL_INCLUDE_DIR)

  Call Stack (most recent call first):
"""
)


def test_the_compilers_first_error_with_its_source_line() -> None:
    assert first_error(COMPILER.splitlines(keepends=True)) == (
        "/src/horovod/torch/mpi_ops_v2.cc:71:3: error: 'tensr' was not declared in this scope; did you mean 'tensor'?\n"
        "   71 |   tensr.size();\n"
        "      |   ^~~~~\n"
        "      |   tensor"
    )


def test_cmakes_first_error_with_its_reason() -> None:
    assert first_error(CMAKE.splitlines()) == (
        "CMake Error at /usr/share/cmake/Modules/FindPackageHandleStandardArgs.cmake:230 (message):\n"
        "  Could NOT find NCCL (missing: NCCL_INCLUDE_DIR)"
    )


@pytest.mark.parametrize(
    "line",
    [
        "c++: fatal error: Killed signal terminated program cc1plus",
        "nvcc fatal   : Unsupported gpu architecture 'compute_35'",
        "kernels.cu(12): error: identifier x is undefined",
        "/usr/bin/ld: cannot find -lmpi: No such file or directory",
        "mpi_ops.cc:(.text+0x1f): undefined reference to `MPI_Init'",
        "make[2]: *** No rule to make target '/env/lib/libmpi.so', needed by 'mpi_lib.so'.  Stop.",
        "ModuleNotFoundError: No module named 'pkg_resources'",
        "error: command 'cmake' failed",
    ],
)
def test_errors_of_other_tools_are_recognised(line: str) -> None:
    assert first_error([*NOISE.splitlines(), "  " + line, "make: *** [Makefile:2: all] Error 2"]) == line


def test_a_log_without_a_known_error_gives_its_end() -> None:
    assert first_error([*NOISE.splitlines(), "  gave up", ""]).endswith("gave up")


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("  [  1%] Building CXX object a.o", 1),
        ("[100%] Built target pytorch", 100),
        ("[3/7] Building CXX object a.o", 42),
        ("-- Found MPI [42%]", None),
        ("[0/0] nothing to do", None),
    ],
)
def test_progress_of_make_and_ninja(line: str, percent: int | None) -> None:
    assert percent_done(line) == percent
