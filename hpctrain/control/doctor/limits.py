"""Checks the limits of the process, shared memory and the temporary folder."""

from __future__ import annotations

import math

from hpctrain.common.cluster.checks import Check
from hpctrain.control.doctor.facts import Host

FILES = 4096
SHARED_BYTES = 1 << 30

_MEMLOCK_SOURCE = "https://www.open-mpi.org/faq/?category=openfabrics#ib-locked-pages"
_FILES_SOURCE = "https://docs.rapids.ai/api/ucxx/stable/os_limits"
_SHARED_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_SOCKET_SOURCE = "https://man7.org/linux/man-pages/man7/unix.7.html"
_SLURM = "under Slurm also LimitMEMLOCK=infinity of slurmd.service and PropagateResourceLimitsExcept=MEMLOCK"


def memlock(host: Host) -> Check:
    """RDMA pins the memory that it sends from, which the limit has to allow."""
    soft, hard = host.memlock
    found = "unlimited" if soft == math.inf else f"{soft / 1024:,.0f} KiB"
    if not host.ports:
        return Check(
            name="memlock",
            status="not applicable",
            found=f"{found}; nothing here pins memory: no InfiniBand or RoCE adapter",
            source=_MEMLOCK_SOURCE,
        )
    remedy = "ulimit -l unlimited"
    if hard != math.inf:
        remedy = f"as root: '* - memlock unlimited' in /etc/security/limits.conf; {_SLURM}"
    failed = soft != math.inf
    return Check(
        name="memlock",
        status="failed" if failed else "ok",
        found=found,
        wanted="unlimited",
        remedy=remedy if failed else "",
        source=_MEMLOCK_SOURCE,
    )


def open_files(host: Host) -> Check:
    """Connections over TCP take a file each, one a peer and more; data loaders take further ones."""
    soft, hard = host.nofile
    failed = soft < FILES
    remedy = f"ulimit -n {FILES}" if hard >= FILES else "as root: '* - nofile 65536' in /etc/security/limits.conf"
    return Check(
        name="open files",
        status="failed" if failed else "ok",
        found="unlimited" if soft == math.inf else f"{soft:,.0f}",
        wanted=f"at least {FILES:,}",
        remedy=remedy if failed else "",
        source=_FILES_SOURCE,
    )


def shared_memory(host: Host) -> Check:
    """Ranks of one host, and the workers of data loaders, pass data through /dev/shm."""
    free = host.shared_memory
    failed = free is None or free < SHARED_BYTES
    remedy = "docker run --shm-size=1g, or as root: mount -o remount,size=50% /dev/shm; old files: ls /dev/shm"
    return Check(
        name="shared memory",
        status="failed" if failed else "ok",
        found="there is no /dev/shm that can be written to"
        if free is None
        else f"{free / 1e9:.3g} GB free in /dev/shm",
        wanted="at least 1 GiB free",
        remedy=remedy if failed else "",
        source=_SHARED_SOURCE,
    )


def temporary_folder(host: Host) -> Check:
    """mpirun and Python put files there, and the processes of a data loader meet at a socket in it."""
    found = host.temporary_fault
    return Check(
        name="temporary folder",
        status="failed" if found else "ok",
        found=f"{host.temporary} {found or 'can be written to'}",
        wanted="1 MB free, and a name of at most 75 bytes for the sockets in it",
        remedy="free some space there, or name another: export TMPDIR=DIR" if found else "",
        source=_SOCKET_SOURCE,
    )
