"""Horovod's source package: one pinned release, downloaded by pip and checked against its hash."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.control.horovod import VERSION

# Of horovod-0.28.1.tar.gz, the last release, as https://pypi.org/project/horovod/0.28.1/#files states it.
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


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
            f"pip could not download horovod {VERSION}: {' '.join(reasons[:3]) or answer.stderr.strip()}",
            "check the network and pip's index (pip config list), or put the file into a folder named by "
            "PIP_FIND_LINKS",
            exit_code=1,
        )
    with tarfile.open(directory / f"horovod-{VERSION}.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    return directory / f"horovod-{VERSION}"
