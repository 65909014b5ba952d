"""The checks of one host: limits, memory, disks, GPUs and Horovod, with those of its network."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil

from hpctrain.common.cluster.checks import Check, judge, skip
from hpctrain.common.cluster.gpus import visible_devices
from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import nearest_existing
from hpctrain.common.settings import BACKEND, SHARE_GPUS
from hpctrain.control.doctor import network_checks
from hpctrain.control.doctor.host_facts import Host
from hpctrain.control.horovod import check as horovod_check

_FILES = 4096
_SHARED_BYTES = 1 << 30
_FREE_BYTES = 10**9
_FREE_FILES = 1000
# From a node's own storage it takes some seconds; the limit is for a file system that does not answer.
_IMPORT_SECONDS, _IMPORT_LIMIT = 30.0, 120.0
_WRITTEN_BYTES = 8 << 20
# A file system slower than this takes 20 s for a checkpoint of 200 MB (ResNet-50 with momentum).
_BYTES_PER_S = 10e6
_SLURM = "under Slurm also LimitMEMLOCK=infinity of slurmd.service and PropagateResourceLimitsExcept=MEMLOCK"
_PEER_MODULES = frozenset({"nvidia_peermem", "nv_peer_mem"})
# Adapters can use GPU memory as a DMA-BUF since Linux 5.12; of NVIDIA's drivers only the open one exports it.
_DMA_BUF_KERNEL = (5, 12)
_OPEN_DRIVER = "Open Kernel Module"


def memlock(host: Host) -> Check:
    """RDMA pins the memory that it sends from, which the limit has to allow."""
    soft, hard = host.memlock
    found = "unlimited" if soft == math.inf else f"{soft / 1024:,.0f} KiB"
    if not host.ports:
        return skip("memlock", f"{found}; nothing here pins memory: no InfiniBand or RoCE adapter")
    remedy = "ulimit -l unlimited"
    if hard != math.inf:
        remedy = f"as root: '* - memlock unlimited' in /etc/security/limits.conf; {_SLURM}"
    return judge("memlock", found, failed=soft != math.inf, wanted="unlimited", remedy=remedy)


def open_files(host: Host) -> Check:
    """Connections over TCP take a file each, one a peer and more; data loaders take further ones."""
    soft, hard = host.nofile
    remedy = f"ulimit -n {_FILES}" if hard >= _FILES else "as root: '* - nofile 65536' in /etc/security/limits.conf"
    found = "unlimited" if soft == math.inf else f"{soft:,.0f}"
    return judge("open files", found, failed=soft < _FILES, wanted=f"at least {_FILES:,}", remedy=remedy)


def shared_memory(host: Host) -> Check:
    """Ranks of one host, and the workers of data loaders, pass data through /dev/shm."""
    free = host.shared_memory
    found = "there is no /dev/shm that can be written to" if free is None else f"{free / 1e9:.3g} GB free in /dev/shm"
    remedy = "docker run --shm-size=1g, or as root: mount -o remount,size=50% /dev/shm; old files: ls /dev/shm"
    failed = free is None or free < _SHARED_BYTES
    return judge("shared memory", found, failed=failed, wanted="at least 1 GiB free", remedy=remedy)


def temporary_folder(host: Host) -> Check:
    """mpirun and Python put files there."""
    return judge(
        "temporary folder",
        f"{host.temporary} {host.temporary_fault or 'can be written to'}",
        failed=bool(host.temporary_fault),
        wanted="1 MB free",
        remedy="free some space there, or name another: export TMPDIR=DIR",
    )


def visible_gpus(host: Host) -> Check:
    """Each rank of a host needs a GPU of its own: those that all see, or one or more that it alone sees.

    Ranks that share GPUs need one that they see.
    """
    name, here = "GPUs of each rank", [gpu.index for gpu in host.node_map.gpus]
    if not here:
        return skip(name, "no GPU")
    seen = [visible_devices(value, len(here)) for value in host.visible]
    blind = sum(not devices for devices in seen)
    distinct = len({device for devices in seen for device in devices})
    settings = sorted({"not set" if value is None else value or "empty" for value in host.visible})
    found = f"{distinct} of {len(here)} GPUs for {host.ranks} ranks (CUDA_VISIBLE_DEVICES {', '.join(settings)})"
    shared = bool(SHARE_GPUS.read(host.environment))
    return judge(
        name,
        f"{found}; {blind} ranks see none" if blind else found,
        failed=blind > 0 or (distinct < host.ranks and not shared),
        wanted="a GPU that each rank sees" if shared else "a GPU for each rank",
        remedy="unset CUDA_VISIBLE_DEVICES, ask Slurm for --gpus-per-node, start fewer ranks, or try out with "
        "--share-gpus",
    )


def peer_memory(host: Host) -> Check:
    """Adapters read and write GPU memory through nvidia-peermem, or as DMA-BUF of the open driver."""
    name = "GPUDirect RDMA"
    if not host.node_map.gpus or not host.ports:
        return skip(name, "no InfiniBand or RoCE adapter" if host.node_map.gpus else "no GPU")
    module = sorted(_PEER_MODULES & host.modules)
    dma_buf = _OPEN_DRIVER in host.driver and host.kernel >= _DMA_BUF_KERNEL
    return judge(
        name,
        f"module {module[0]}" if module else "DMA-BUF" if dma_buf else "neither nvidia-peermem nor DMA-BUF",
        failed=not module and not dma_buf,
        wanted="nvidia-peermem loaded, or the open driver on Linux 5.12 or later",
        remedy="as root: modprobe nvidia-peermem",
    )


CHECKS: tuple[Callable[[Host], Check], ...] = (
    memlock,
    open_files,
    shared_memory,
    temporary_folder,
    *network_checks.CHECKS,
    visible_gpus,
    peer_memory,
)


def check_host(host: Host, run_directory: Path) -> list[Check]:
    """Everything that can be checked on a host by itself.

    Args:
        run_directory: where runs are to write; need not be there yet.
    """
    checks = [check(host) for check in CHECKS]
    return [*checks, home_folder(), *disk(run_directory), *horovod(horovod_check.report(), len(host.node_map.gpus))]


def home_folder() -> Check:
    """Python's packages and the caches of libraries are there, mostly under a quota and on servers that all share."""
    remedy = "remove files there, or name another place for caches: export XDG_CACHE_HOME=DIR HF_HOME=DIR"
    return _room("home folder", nearest_existing(Path.home()), remedy)


def _room(name: str, folder: Path, remedy: str) -> Check:
    """How much a folder's file system takes, as far as it tells: many count quotas in, and some no files."""
    kinds = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((kinds[path] for path in (folder, *folder.parents) if path in kinds), "unknown file system")
    status = os.statvfs(folder)
    free, counted = status.f_bavail * status.f_frsize, status.f_files > 0
    files = f" and {status.f_favail:,} files" if counted else ""
    return judge(
        name,
        f"{free / 1e9:.3g} GB{files} free in {folder} ({kind})",
        failed=free < _FREE_BYTES or (counted and status.f_favail < _FREE_FILES),
        wanted=f"at least {_FREE_BYTES / 1e9:g} GB (a checkpoint of a ResNet-50 has 0.2) and {_FREE_FILES:,} files",
        remedy=remedy,
    )


def import_of_torch() -> Check:
    """Each rank reads thousands of files to import PyTorch, and from a shared file system all ranks at once."""
    name = "import of torch"
    if find_spec("torch") is None:
        return skip(name, "there is no PyTorch in this Python")
    begin = time.perf_counter()
    try:
        done = run_program(sys.executable, "-c", "import torch", seconds=_IMPORT_LIMIT)
        failed, found = done.returncode != 0, done.stderr.strip().rpartition("\n")[2]
    except HpctrainError as error:
        failed, found = True, error.message
    seconds = time.perf_counter() - begin
    return judge(
        name,
        found if failed else f"{seconds:.1f} s",
        failed=failed or seconds > _IMPORT_SECONDS,
        wanted=f"at most {_IMPORT_SECONDS:g} s",
        remedy="put the environment on each node's own storage: docs/clusters.md, The environment as one archive",
    )


def disk(run_directory: Path) -> list[Check]:
    """Every rank writes its log and its record there, rank 0 the checkpoints. Writes a file, and removes it."""
    folder = nearest_existing(run_directory)
    # Random bytes, because file systems that compress would not write zeros.
    data = os.urandom(_WRITTEN_BYTES)
    rate = 0.0
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".hpctrain-doctor-", buffering=0) as file:
            start = time.perf_counter()
            file.write(data)
            os.fsync(file.fileno())
            rate = len(data) / (time.perf_counter() - start)
        found = f"{rate / 1e6:,.0f} MB/s with fsync in {folder}"
    except OSError as error:
        found = f"{folder}: {error.strerror}"
    return [
        _room("free disk", folder, "remove old runs, or choose another place with --run-dir"),
        judge(
            "write to run directory",
            found,
            failed=rate < _BYTES_PER_S,
            wanted=f"writable, at least {_BYTES_PER_S / 1e6:g} MB/s",
            remedy="make the folder writable for you (ls -ld), or choose a faster file system with --run-dir; your "
            "cluster's documentation names it (scratch, work)",
        ),
    ]


def horovod(checks: Sequence[Check], gpus: int) -> list[Check]:
    """The checks of ``hpctrain horovod check`` under names of their own.

    What a build lacks is a failure where runs are to use Horovod, and a built one that does not fit this host's GPUs.
    """
    absent = any(check.name == "horovod" and check.status == "failed" for check in checks)
    needed = BACKEND.read() == "horovod" or (gpus and not absent)
    named = []
    for check in checks:
        renamed = replace(check, name="Horovod" if check.name == "horovod" else f"Horovod {check.name}")
        # hpctrain's own engine needs an MPI too.
        if check.status == "failed" and check.wanted != horovod_check.AN_MPI and not needed:
            found = f"{check.found}; only --backend horovod needs it"
            renamed = replace(renamed, status="not applicable", found=found)
        named.append(renamed)
    return named
