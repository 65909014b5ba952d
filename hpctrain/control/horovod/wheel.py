"""Downloads Horovod's pinned release, compiles it into a wheel, and caches the wheels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import make_folder
from hpctrain.common.settings import FINGERPRINT, MPI_PREFIX, PREFIX, RPATH
from hpctrain.control.horovod import VERSION
from hpctrain.control.horovod.adapt import adapt
from hpctrain.control.horovod.cuda import Nccl, Toolkit
from hpctrain.control.horovod.fingerprint import BuildFingerprint, environment_prefix

Say = Callable[[str], None]
"""Gets what is being done."""

# The peak memory of one compiler process on PyTorch's headers.
_BYTES_PER_JOB = 2 * 1024**3

# The hash of horovod-0.28.1.tar.gz, the last release, as https://pypi.org/project/horovod/0.28.1/#files states it.
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

_ERROR = re.compile(r"\b(error|fatal)\b|undefined reference|no rule to make|\w+(Error|Exception):", re.IGNORECASE)
_MOST_LINES = 5
_NEEDED = (
    "it needs: pip install 'hpctrain[horovod]', a C++ compiler, make, Python's headers and the MPI's (the cluster's "
    "modules, or apt-get install g++ make python3-dev libopenmpi-dev)"
)


def wheel_home(fingerprint: BuildFingerprint) -> Path:
    """The cache folder of one wheel and its build log, in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "hpctrain" / "wheels" / fingerprint.key


def cached_wheel(fingerprint: BuildFingerprint) -> Path | None:
    """The wheel that was compiled for exactly this fingerprint, if there is one."""
    return next(wheel_home(fingerprint).glob("*.whl"), None)


def compile_wheel(
    fingerprint: BuildFingerprint, mpi: MpiInstallation, toolkit: Toolkit | None, nccl: Nccl | None, say: Say
) -> Path:
    """Download, adapt and compile Horovod; returns the wheel in the cache.

    Raises:
        HpctrainError: it does not compile; with the compiler's first error and the log's path.
    """
    home = wheel_home(fingerprint)
    make_folder(home)
    with tempfile.TemporaryDirectory(prefix="hpctrain-horovod-") as name:
        work = Path(name)
        say("downloading the source package")
        source = fetch(work)
        adapt(source, fingerprint.packages)
        # TensorFlow hands its paths to CMake as one string, so a space in them would end a path.
        (work / "environment").symlink_to(sys.prefix)
        python = work / "environment" / "bin" / "python"
        options = ["--no-build-isolation", "--no-deps", "--no-cache-dir", "--verbose"]
        command = [str(python), "-m", "pip", "wheel", *options, "--wheel-dir", str(work / "wheel"), str(source)]
        # The user's environment without what would make the build differ from its fingerprint.
        odd = ("HOROVOD_", PREFIX, "CMAKE_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(odd)}
        env = {**inherited, **build_settings(fingerprint, work, mpi, toolkit, nccl)}
        _run_logged(command, env, home / "build.log", say)
        built = next((work / "wheel").glob("*.whl"))
        # Moved in two steps, so that the cache never shows a part of a wheel.
        arriving = Path(shutil.copy(built, home / f".{built.name}"))
        return arriving.rename(home / built.name)


def build_settings(
    fingerprint: BuildFingerprint, work: Path, mpi: MpiInstallation, toolkit: Toolkit | None, nccl: Nccl | None
) -> dict[str, str]:
    """The environment variables that tell Horovod's setup.py, CMake and the adapted sources what to build.

    ``work`` is the build's own folder; in it, ``environment`` links to this Python's environment. Horovod's variables
    are those of https://horovod.readthedocs.io/en/stable/install.html.
    """
    programs = work / "environment" / "bin"
    settings = {
        "PATH": os.pathsep.join([str(mpi.mpirun.parent), str(programs), os.environ["PATH"]]),
        "MAKEFLAGS": f"-j{_jobs()}",
        "CMAKE_GENERATOR": "Unix Makefiles",
        # The sources ask for versions of CMake whose behaviour CMake 4 no longer offers.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_CMAKE": find_cmake(programs) or "cmake",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        f"HOROVOD_WITH{'' if fingerprint.torch else 'OUT'}_PYTORCH": "1",
        f"HOROVOD_WITH{'' if fingerprint.tensorflow else 'OUT'}_TENSORFLOW": "1",
        FINGERPRINT.name: fingerprint.to_json(),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    rpath = []
    if prefix := environment_prefix(mpi):
        settings[MPI_PREFIX.name] = str(prefix)
        # From site-packages/horovod/torch/ to the lib/ that holds python3.x/.
        rpath.append("$ORIGIN/../../../..")
    else:
        settings["MPI_HOME"] = str(mpi.mpirun.parent.parent)
    if toolkit and nccl:
        settings |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(toolkit.home),
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_NCCL_INCLUDE": str(nccl.include),
            "HOROVOD_NCCL_LIB": str(_linkable(nccl, work)),
        }
        rpath += ["$ORIGIN/../../nvidia/nccl/lib", str(nccl.libraries)]
    return {**settings, RPATH.name: ";".join(rpath)}


def find_cmake(programs: Path) -> str | None:
    """CMake of an environment with these programs, or else the one on the PATH."""
    return shutil.which("cmake", path=programs) or shutil.which("cmake")


def _linkable(nccl: Nccl, work: Path) -> Path:
    """A folder with ``libnccl.so``, the name that the linker looks for and that NVIDIA's wheels lack."""
    if (nccl.libraries / "libnccl.so").exists():
        return nccl.libraries
    folder = work / "nccl"
    folder.mkdir()
    (folder / "libnccl.so").symlink_to(next(nccl.libraries.glob("libnccl.so.*")))
    return folder


def _jobs() -> int:
    fit: int = psutil.virtual_memory().available // _BYTES_PER_JOB
    return max(1, min(len(os.sched_getaffinity(0)), fit))


def _run_logged(command: list[str], env: dict[str, str], path: Path, say: Say) -> None:
    say(f"compiling, for about five minutes on two cores; the log: {path}")
    with path.open("w") as file:
        done = subprocess.run(
            command, env=env, check=False, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode != 0:
        with path.open(errors="replace") as file:
            error = first_errors(file)
        raise HpctrainError(
            "HT-horovod-build-failed",
            "Horovod does not compile:\n{reason}",
            f"{_NEEDED}; the whole log: {path}",
            exit_code=1,
            reason=error,
        )


def fetch(directory: Path) -> Path:
    """Download and unpack the source package below ``directory``; returns the folder that holds its setup.py.

    Raises:
        HpctrainError: pip finds no such file, or one with another hash.
    """
    requirements = directory / "requirements.txt"
    requirements.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    # pip asks the package for its metadata, which needs the setuptools of this environment.
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), "-r", str(requirements)]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if answer.returncode != 0:
        reasons = [line for line in answer.stderr.splitlines() if "rror" in line or "HASH" in line]
        raise HpctrainError(
            "HT-horovod-build-failed",
            "pip could not download horovod {version}: {reason}",
            "pip install 'hpctrain[horovod]'; check the network and pip's index (pip config list), or put the file "
            "into a folder named by PIP_FIND_LINKS",
            exit_code=1,
            version=VERSION,
            reason=" ".join(reasons[:3]) or answer.stderr.strip(),
        )
    with tarfile.open(directory / f"horovod-{VERSION}.tar.gz") as archive:
        # Python before 3.11.4, such as that of Debian 12, has no filters. Its hash is that of a known file.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(directory)  # noqa: S202
    return directory / f"horovod-{VERSION}"


def first_errors(lines: Iterable[str]) -> str:
    """The first lines that name an error; the last ones where none does."""
    # pip indents what its subprocess prints by two spaces.
    text = [line.rstrip().removeprefix("  ") for line in lines if line.strip()]
    errors = [line for line in text if _ERROR.search(line)]
    return "\n".join(errors[:_MOST_LINES] or text[-_MOST_LINES:])
