"""The facts that the checks of one host use, read once from /sys, /proc, /dev and the process, under any root."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpctrain.common.cluster.interfaces import all_ports, kernel_text, read_interfaces
from hpctrain.control.topology.live import this_node

# The variables in which Open MPI's mpirun looks for its temporary folder, in this order, and more than the 512 KiB that
# it may write there.
_TEMPORARY, _TEMPORARY_BYTES = ("TMPDIR", "TEMP", "TMP"), 1 << 20


class Host:
    """The host this runs on, as a rank or the login shell sees it.

    Args:
        root: the folder that holds /sys, /proc and /dev.
        ranks: how many ranks run on it.
        hosts: how many hosts the run has.
        visible: ``CUDA_VISIBLE_DEVICES`` of each rank here, None where it is not set; by default all have that of
            ``environment``.

    Raises:
        HpctrainError: there is no /sys.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        environment: Mapping[str, str] = os.environ,
        *,
        ranks: int = 1,
        hosts: int = 1,
        visible: tuple[str | None, ...] | None = None,
    ) -> None:
        self.environment, self.ranks, self.hosts = environment, ranks, hosts
        self.visible = visible if visible is not None else (environment.get("CUDA_VISIBLE_DEVICES"),) * ranks
        # Soft and hard limit in bytes and files, infinite for none.
        self.memlock, self.nofile = _limit(resource.RLIMIT_MEMLOCK), _limit(resource.RLIMIT_NOFILE)
        shared = root / "dev/shm"
        # Bytes free, None where there is none that can be written to.
        self.shared_memory = None if fault(shared, 0) else shutil.disk_usage(shared).free
        # Where mpirun and Python put their temporary files, and what is wrong with it, empty where nothing is.
        self.temporary = Path(next((environment[name] for name in _TEMPORARY if environment.get(name)), "/tmp"))  # noqa: S108
        self.temporary_fault = fault(self.temporary, _TEMPORARY_BYTES)
        self.interfaces = tuple(read_interfaces(root))
        self.ports = tuple(all_ports(root / "sys/class/infiniband"))
        # The devices in /dev/infiniband that this process may open.
        verbs = sorted(root.glob("dev/infiniband/uverbs*"))
        self.verbs = tuple(path.name for path in verbs if os.access(path, os.R_OK | os.W_OK))
        self.node_map = this_node(root)
        self.modules = frozenset(line.split()[0] for line in kernel_text(root / "proc/modules").splitlines())
        # The version text of the GPU driver, empty without one; major and minor version of the kernel.
        self.driver = kernel_text(root / "proc/driver/nvidia/version")
        version = re.match(r"(\d+)\.(\d+)", kernel_text(root / "proc/sys/kernel/osrelease"))
        self.kernel = (int(version[1]), int(version[2])) if version else (0, 0)


def _limit(kind: int) -> tuple[float, float]:
    soft, hard = (math.inf if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
    return soft, hard


def fault(folder: Path, wanted: int) -> str:
    """Why a folder cannot take a file of so many bytes, as the end of a sentence; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".hpctrain-") as file:
            # A full disk still has room for a file without contents.
            file.write(b"\0")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot be written to ({error.strerror})"
    return f"has {free / 1e6:.3g} MB free, and {wanted / 1e6:.3g} MB are needed" if free < wanted else ""
