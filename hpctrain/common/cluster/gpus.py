"""The GPUs of this host, and the best backend for their number."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import read_regular

SHARING_NOTE = (
    "Ranks share GPUs, for trying things out: speeds and energy of this run say nothing about a run with a GPU a rank"
)

_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_MOST_BYTES = 2**16
# Of a GPU, of a part of one (MIG), and of AMD's.
_UUIDS = ("GPU-", "MIG-")


def usable_gpus(environment: Mapping[str, str] = os.environ, amd_nodes: Path = _AMD_NODES) -> int:
    """The number of GPUs that this process may use: NVIDIA's by NVML, else AMD's by their driver (never tried).

    Args:
        environment: CUDA_VISIBLE_DEVICES, or ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES, restrict them.
        amd_nodes: the folder in which AMD's driver lists processors and GPUs.
    """
    with opened_nvml() as nvml:
        present = int(nvml.nvmlDeviceGetCount()) if nvml else sum(map(_is_amd_gpu, amd_nodes.glob("*/properties")))
    for name in ("CUDA_VISIBLE_DEVICES",) if nvml else ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        present = min(present, len(visible_devices(environment.get(name), present)))
    return present


@contextlib.contextmanager
def opened_nvml() -> Iterator[Any]:
    """The module of NVML while its library is open; None where there is no driver of NVIDIA's."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _is_amd_gpu(properties: Path) -> bool:
    """Whether a node has vector units, which processors have not; reading another user's may be forbidden."""
    try:
        return re.search(rb"^simd_count [1-9]", read_regular(properties, _MOST_BYTES), re.MULTILINE) is not None
    except OSError:
        return False


def visible_devices(devices: str | None, present: int) -> list[str]:
    """The devices that a variable names, up to the first that is none; by UUID, those of parts of a GPU too.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if devices is None:
        return [str(number) for number in range(present)]
    named = [device.strip() for device in devices.split(",")]
    return list(takewhile(lambda name: name.startswith(_UUIDS) or (name.isdecimal() and int(name) < present), named))


def only_gpu() -> str | None:
    """The UUID of the one whole GPU of NVIDIA's that this process sees; None if that is not known, or not so."""
    with opened_nvml() as nvml, contextlib.suppress(Exception):
        names = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), nvml.nvmlDeviceGetCount() if nvml else 0)
        if len(names) == 1 and names[0].isdecimal():
            return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(int(names[0]))))
        return names[0] if len(names) == 1 and names[0].startswith("GPU-") else None
    return None


def see_one_each(only: Sequence[str | None]) -> bool:
    """Whether each rank of a host sees one GPU that no other sees, by :func:`only_gpu` of each.

    So a batch system may show them (``srun --gpus-per-task=1``).
    """
    return len({*only} - {None}) == len(only)


def smallest_memory() -> int | None:
    """The bytes of this host's GPU with the least memory; None without a GPU, or where one does not say.

    NVML does not know the memory of GPUs that have none of their own, and may not be allowed to tell.
    """
    with opened_nvml() as nvml:
        if nvml is None:
            return None
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return min((int(nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles), default=None)
        except nvml.NVMLError:
            return None


def gpu_of(local_rank: int, local_size: int, gpus: int, *, shared: bool) -> int | None:
    """The number of a rank's GPU among those that it sees.

    None where there are fewer than ranks, unless ranks share them: then they take turns, so that each GPU has as many
    ranks as another, give or take one.
    """
    if gpus >= local_size:
        return local_rank
    return local_rank % gpus if shared and gpus else None


def own_gpu(local_rank: int, visible: str | None, present: int) -> str | None:
    """``CUDA_VISIBLE_DEVICES`` of a rank that shares GPUs: one of those that it sees; None where it sees none.

    Where a batch system shows each rank a GPU of its own, that one stays.
    """
    devices = visible_devices(visible, present) if present else []
    return devices[local_rank % len(devices)] if devices else None


def sharing_variables(rank: int, host: str) -> dict[str, str]:
    """What lets NCCL connect ranks that share a GPU.

    NCCL refuses two ranks on one GPU only if it takes them for ranks of the same host, so that each rank gets a host's
    name of its own. What connects the processes of one host (CUDA's peer access and shared memory) then has to be off,
    and the ranks talk through the loopback interface.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (``NCCL_HOSTID``).
    """
    return {
        "NCCL_HOSTID": f"{host}-rank-{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def require_shareable(hosts: Iterable[tuple[str, int, int]]) -> None:
    """Refuse to share GPUs on several hosts, where there are none, or where each rank can have its own.

    Args:
        hosts: the name of each, with its ranks and the GPUs that these see.
    """
    (host, ranks, gpus), *others = dict.fromkeys(hosts)
    if elsewhere := [name for name, _, _ in others if name != host]:
        problem = f"it connects the ranks of one host through the loopback interface, and {elsewhere[0]} has ranks too"
    elif gpus == 0:
        problem = "it has no GPU that is visible"
    elif gpus >= ranks:
        problem = f"it has {gpus} GPUs for {ranks} ranks, which is one for each"
    else:
        return
    raise HpctrainError(
        "HT-gpus-not-shareable",
        "--share-gpus on {host}: {problem}",
        "leave --share-gpus out, or give --no-share-gpus to resume a run that had it",
        host=host,
        problem=problem,
    )


def _has_intel_gpu(devices: Path) -> bool:
    """Whether there is one of Intel's for data centres, which are display controllers (0x0380) without a display."""
    for device in devices.glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = (read_regular(device / name, _MOST_BYTES)[:6] for name in ("vendor", "class"))
            if (vendor, kind) == (b"0x8086", b"0x0380"):
                return True
    return False


def fitting_backend(
    framework: str | None, gpus: int, local_ranks: int, host: str, *, shared: bool = False, devices: Path = _PCI_DEVICES
) -> tuple[str, str]:
    """The backend of ``auto`` for several ranks that MPI started, and the reason.

    Args:
        framework: ``torch`` or ``keras``; None where it is not known, which Horovod alone serves either way on GPUs.
        gpus: how many the host has that has fewest for its ranks.
        devices: the folder in which Linux lists this host's devices.
    """
    if gpus < local_ranks and not (shared and gpus):
        if gpus:
            return "mpi", f"{gpus} GPU{'s' * (gpus > 1)} for {local_ranks} ranks on {host}"
        none = "no GPU but Intel's, which are not used," if _has_intel_gpu(devices) else "no GPU"
        return "mpi", f"{none} on {host}"
    each = f"a GPU for each rank on {host}" if gpus >= local_ranks else f"{local_ranks} ranks share GPUs of {host}"
    if framework == "torch":
        return "nccl", f"PyTorch, {each}"
    return "horovod", f"{'Keras' if framework == 'keras' else 'a script of either framework'}, {each}"
