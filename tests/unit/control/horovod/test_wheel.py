"""What is downloaded, what Horovod's setup.py is told, and what a failed or unproved build leaves behind."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.control.horovod import cuda, install, wheel
from hpctrain.control.horovod.cuda import Nccl, Toolkit
from hpctrain.control.horovod.fingerprint import BuildFingerprint
from hpctrain.control.horovod.wheel import first_errors
from support.refusals import refused

CLUSTER = MpiInstallation(
    flavour="open-mpi-4",
    version="4.1.4",
    mpirun=Path("/opt/mpi/bin/mpirun"),
)
BUILT = BuildFingerprint(
    horovod="0.28.1",
    adaptations="0",
    python="cpython-311 linux-x86_64",
    mpi="Open MPI 4.1.4 at /opt/mpi/bin/mpirun",
    torch="2.13.0",
    tensorflow=None,
    cuda=None,
    nccl=None,
)


def settings(work: Path, mpi: MpiInstallation, *cuda: Toolkit | Nccl | None) -> dict[str, str]:
    return wheel.build_settings(BUILT, work, mpi, *(cuda or (None, None)))


def test_a_clusters_mpi_goes_before_every_other(tmp_path: Path) -> None:
    told = settings(tmp_path, CLUSTER)
    assert told["PATH"].split(os.pathsep)[:2] == ["/opt/mpi/bin", str(tmp_path / "environment" / "bin")]
    assert told["MPI_HOME"] == "/opt/mpi"
    assert "HPCTRAIN_MPI_PREFIX" not in told
    assert told["HPCTRAIN_RPATH"] == ""


def test_the_environments_mpi_is_found_relative_to_the_library(tmp_path: Path) -> None:
    prefix = Path(sys.prefix)
    told = settings(tmp_path, dataclasses.replace(CLUSTER, mpirun=prefix / "bin" / "mpirun"))
    assert told["HPCTRAIN_MPI_PREFIX"] == str(prefix.resolve())
    library = prefix / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "horovod" / "torch"
    assert told["HPCTRAIN_RPATH"].startswith("$ORIGIN/")
    assert Path(os.path.normpath(told["HPCTRAIN_RPATH"].replace("$ORIGIN", str(library)))) == prefix / "lib"


def test_only_installed_frameworks_are_built_and_never_gloo(tmp_path: Path) -> None:
    told = {name for name, value in settings(tmp_path, CLUSTER).items() if name.startswith("HOROVOD_WITH")}
    assert told == {
        "HOROVOD_WITH_MPI",
        "HOROVOD_WITH_PYTORCH",
        "HOROVOD_WITHOUT_TENSORFLOW",
        "HOROVOD_WITHOUT_GLOO",
        "HOROVOD_WITHOUT_MXNET",
    }


def test_nccl_of_a_package_gets_the_name_that_the_linker_looks_for(tmp_path: Path) -> None:
    libraries = tmp_path / "nccl of a package"
    libraries.mkdir()
    (libraries / "libnccl.so.2").touch()
    nccl = Nccl(version="2.21.5", include=tmp_path, libraries=libraries)
    work = tmp_path / "work"
    work.mkdir()
    told = settings(work, CLUSTER, Toolkit(version="12.4", home=Path("/cuda")), nccl)
    assert told["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert told["HOROVOD_CUDA_HOME"] == "/cuda"
    assert (Path(told["HOROVOD_NCCL_LIB"]) / "libnccl.so").resolve() == libraries / "libnccl.so.2"
    assert str(libraries) in told["HPCTRAIN_RPATH"].split(";")


def fail_to_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source package whose setup.py prints what a compiler prints, and fails."""
    setup = (
        "import os, sys\n"
        "if 'egg_info' not in sys.argv and 'dist_info' not in sys.argv:\n"
        "    print('[ 50%] Building CXX object a.o', flush=True)\n"
        "    print('a.cc:1:1: error: ' + str('HOROVOD_WITH_GLOO' in os.environ), flush=True)\n"
        "    os._exit(1)\n"
        "from setuptools import setup\n"
        "setup(name='horovod', version='0.28.1')\n"
    )
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text(setup)
    monkeypatch.setattr(wheel, "fetch", lambda work: source)
    monkeypatch.setattr(wheel, "adapt", lambda source, packages: None)


@pytest.mark.long
def test_a_failed_build_shows_the_first_error_and_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_compile(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    monkeypatch.setenv("HOROVOD_WITH_GLOO", "1")
    seen: list[str] = []
    # False: what the user has set for some other build of Horovod must not change this one.
    with refused("HT-horovod-build-failed") as error:
        wheel.compile_wheel(BUILT, CLUSTER, None, None, seen.append)
    assert error.value.values["reason"].startswith("a.cc:1:1: error: False")
    log = wheel.wheel_home(BUILT) / "build.log"
    assert str(log) in error.value.hint
    assert "object a.o" in log.read_text()
    assert any(str(log) in step for step in seen)
    assert error.value.exit_code == 1
    assert wheel.cached_wheel(BUILT) is None


def test_a_build_that_is_not_proved_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(install, "_pip", lambda *arguments: called.append(arguments))
    monkeypatch.setattr(install, "find_mpi", lambda: CLUSTER)
    monkeypatch.setattr(cuda, "find_accelerator", lambda: (None, None))
    monkeypatch.setattr(install, "current_fingerprint", lambda *inputs: BUILT)
    monkeypatch.setattr(install, "find_installed", lambda: None)
    monkeypatch.setattr(wheel, "cached_wheel", lambda wanted: Path("horovod.whl"))

    def mpirun(program: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        assert program == "/opt/mpi/bin/mpirun"
        return subprocess.CompletedProcess((program, *arguments), 3, "rank 1: a wrong number", "")

    monkeypatch.setattr(install, "run_program", mpirun)
    with refused("HT-horovod-build-failed", status=3, output="rank 1: a wrong number"):
        install.build(lambda step: None)
    assert [arguments[0] for arguments in called] == ["install", "uninstall"]


SETUP = b"from setuptools import setup\nsetup(name='horovod', version='0.28.1')\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that holds another horovod-0.28.1.tar.gz than the real one."""
    path = tmp_path / "an index" / "horovod-0.28.1.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("horovod-0.28.1/setup.py")
        member.size = len(SETUP)
        archive.addfile(member, io.BytesIO(SETUP))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", path.parent.as_uri())
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "a build"
    directory.mkdir()
    return directory


@pytest.mark.slow
def test_a_package_with_another_hash_is_refused(package: Path, place: Path) -> None:
    with refused("HT-horovod-build-failed") as error:
        wheel.fetch(place)
    assert "HASHES" in error.value.values["reason"]
    assert error.value.exit_code == 1
    assert not (place / "horovod-0.28.1").exists()


@pytest.mark.long
def test_a_package_with_the_pinned_hash_is_unpacked(
    package: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    assert (wheel.fetch(place) / "setup.py").read_bytes() == SETUP


NOISE = """\
  Running command Building wheel for horovod (setup.py)
  In file included from /env/include/tensorflow/core/platform/errors.h:27,
  /src/mpi_ops.cc:118:27: warning: 'Unknown' is deprecated: Use absl::UnknownError() instead. [-Wdeprecated]
"""


@pytest.mark.parametrize(
    "line",
    [
        "/src/torch/mpi_ops_v2.cc:71:3: error: 'tensr' was not declared in this scope; did you mean 'tensor'?",
        "CMake Error at /usr/share/cmake/Modules/FindPackageHandleStandardArgs.cmake:230 (message):",
        "nvcc fatal   : Unsupported gpu architecture 'compute_35'",
        "/usr/bin/ld: error: cannot find -lmpi: No such file or directory",
        "mpi_ops.cc:(.text+0x1f): undefined reference to `MPI_Init'",
        "make[2]: *** No rule to make target '/env/lib/libmpi.so', needed by 'mpi_lib.so'.  Stop.",
        "ModuleNotFoundError: No module named 'pkg_resources'",
    ],
)
def test_the_first_error_comes_first(line: str) -> None:
    log = [*NOISE.splitlines(), "  " + line, "make: *** [Makefile:2: all] Error 2"]
    assert first_errors(log).startswith(line)
