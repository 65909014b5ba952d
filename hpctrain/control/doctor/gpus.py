"""Checks which GPUs ranks see, and whether adapters reach the memory of GPUs directly."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.common.cluster.checks import Check
from hpctrain.common.cluster.node_map import PCI_CLASSES
from hpctrain.common.settings import SHARE_GPUS
from hpctrain.control.doctor.facts import Host

_VISIBLE_SOURCE = "https://slurm.schedmd.com/gres.html"
_PEERMEM_SOURCE = "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-operator-rdma.html"
_DISTANCE_SOURCE = "https://docs.nvidia.com/cuda/gpudirect-rdma/index.html"
_ACS_SOURCE = (
    "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#pci-access-control-services-acs"
)
_PEER_MODULES = frozenset({"nvidia_peermem", "nv_peer_mem"})
# Adapters can use GPU memory as a DMA-BUF since Linux 5.12; of NVIDIA's drivers only the open one exports it.
_DMA_BUF_KERNEL = (5, 12)
_OPEN_DRIVER = "Open Kernel Module"
# Devices of one PCIe root complex.
_ONE_ROOT = ("PIX", "PXB", "PHB")


def visible(host: Host) -> Check:
    """Each rank of a host needs a GPU of its own: those that all see, or one or more that it alone sees.

    Ranks that share GPUs need one that they see.
    """
    name, here = "GPUs of each rank", [gpu.index for gpu in host.node_map.gpus]
    if not here:
        return Check(name=name, status="not applicable", found="no GPU", source=_VISIBLE_SOURCE)
    seen = [_seen(value, here) for value in host.visible]
    blind = sum(not devices for devices in seen)
    distinct = len({device for devices in seen for device in devices})
    settings = sorted({"not set" if value is None else value or "empty" for value in host.visible})
    found = f"{distinct} of {len(here)} GPUs for {host.ranks} ranks (CUDA_VISIBLE_DEVICES {', '.join(settings)})"
    shared = bool(SHARE_GPUS.read(host.environment))
    failed = blind > 0 or (distinct < host.ranks and not shared)
    return Check(
        name=name,
        status="failed" if failed else "ok",
        found=f"{found}; {blind} ranks see none" if blind else found,
        wanted="a GPU that each rank sees" if shared else "a GPU for each rank",
        remedy="unset CUDA_VISIBLE_DEVICES, ask Slurm for --gpus-per-node, start fewer ranks, or try out with "
        "--share-gpus"
        if failed
        else "",
        source=_VISIBLE_SOURCE,
    )


def _seen(value: str | None, here: Sequence[int]) -> tuple[str, ...]:
    """The GPUs that a setting makes visible: an invalid entry hides those after it."""
    if value is None:
        return tuple(map(str, here))
    devices: list[str] = []
    for word in (word.strip() for word in value.split(",")):
        # The names of GPUs and of their MIG slices (GPU-…, MIG-…) cannot be judged by number.
        if not (word.startswith(("GPU-", "MIG-")) or (word.isdecimal() and int(word) in here)):
            break
        devices.append(word)
    return tuple(devices)


def peer_memory(host: Host) -> Check:
    """Adapters read and write GPU memory through nvidia-peermem, or as DMA-BUF of the open driver."""
    name = "GPUDirect RDMA"
    if missing := _missing(host):
        return Check(name=name, status="not applicable", found=missing, source=_PEERMEM_SOURCE)
    module = sorted(_PEER_MODULES & host.modules)
    dma_buf = _OPEN_DRIVER in host.driver and host.kernel >= _DMA_BUF_KERNEL
    found = f"module {module[0]}" if module else "DMA-BUF" if dma_buf else "neither nvidia-peermem nor DMA-BUF"
    failed = not module and not dma_buf
    return Check(
        name=name,
        status="failed" if failed else "ok",
        found=found,
        wanted="nvidia-peermem loaded, or the open driver on Linux 5.12 or later",
        remedy="as root: modprobe nvidia-peermem" if failed else "",
        source=_PEERMEM_SOURCE,
    )


def access_control(host: Host) -> Check:
    """ACS sends transfers between devices of one PCIe switch up to the CPU and back."""
    name = "PCIe ACS"
    if not host.node_map.gpus:
        return Check(name=name, status="not applicable", found="no GPU", source=_ACS_SOURCE)
    if host.acs is None:
        found = "the kernel shows the PCIe configuration to root alone: lspci -vvv | grep ACSCtl"
        return Check(name=name, status="not applicable", found=found, source=_ACS_SOURCE)
    commands = "; ".join(f"setpci -s {bridge} ECAP_ACS+0x6.w=0000" for bridge in host.acs)
    return Check(
        name=name,
        status="failed" if host.acs else "ok",
        found=f"enabled on {', '.join(host.acs)}" if host.acs else "not enabled above any GPU",
        wanted="not enabled, but in virtual machines",
        remedy=f"as root, or in the firmware's setup: {commands}" if host.acs else "",
        source=_ACS_SOURCE,
    )


def distance(host: Host) -> Check:
    """Direct transfers need GPU and adapter below one PCIe root complex."""
    name = "GPU to adapter"
    node_map = host.node_map
    # A single Ethernet adapter need not be meant for training.
    adapters = [each for each in node_map.fabric_adapters if each.is_bond or each.link_layer != "Ethernet"]
    if not node_map.gpus or not adapters:
        found = _missing(host) or "no adapter for training is up"
        return Check(name=name, status="not applicable", found=found, source=_DISTANCE_SOURCE)
    nearest = {
        gpu.index: min((node_map.distance(gpu, adapter) for adapter in adapters), key=PCI_CLASSES.index)
        for gpu in node_map.gpus
    }
    far = {gpu: name for gpu, name in nearest.items() if name not in _ONE_ROOT}
    shown = far or nearest
    return Check(
        name=name,
        status="failed" if far else "ok",
        found=", ".join(f"GPU {gpu} {distance}" for gpu, distance in shown.items()),
        wanted=f"an adapter below the same PCIe root complex: {', '.join(_ONE_ROOT)}",
        remedy="move an adapter to a slot next to the GPU: nvidia-smi topo -m; else export NCCL_NET_GDR_LEVEL=SYS"
        if far
        else "",
        source=_DISTANCE_SOURCE,
    )


def _missing(host: Host) -> str:
    """The missing one of GPU and adapter, or both; empty where this host has both."""
    lacking = ["no GPU"] * (not host.node_map.gpus) + ["no InfiniBand or RoCE adapter"] * (not host.ports)
    return ", ".join(lacking)
