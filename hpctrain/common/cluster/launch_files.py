"""A placement in the formats of launchers and libraries: hostfiles and environment. Pure.

A placement is a list of hosts in the order of their ranks, each with a slot a rank: ranks count through the first
host's slots, then the second's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

from hpctrain.common.cluster.node_map import Slot

# Only the number of slots matters.
HostRanks = Iterable[tuple[str, Sized]]


def open_mpi_hostfile(hosts: HostRanks) -> str:
    """Open MPI's hostfile, versions 4 and 5."""
    return "".join(f"{host} slots={len(ranks)}\n" for host, ranks in hosts)


def hydra_hostfile(hosts: HostRanks) -> str:
    """The hostfile of Hydra, which starts MPICH's and Intel MPI's ranks."""
    return "".join(f"{host}:{len(ranks)}\n" for host, ranks in hosts)


def slurm_hostfile(hosts: HostRanks) -> str:
    """What ``SLURM_HOSTFILE`` names for ``srun --distribution=arbitrary``: the host of each task."""
    return "".join(f"{host}\n" for host, ranks in hosts for _ in range(len(ranks)))


def network_variables(*, interface: str | None = None, rails: bool = False) -> dict[str, str]:
    """The network settings of every rank.

    Args:
        interface: the network interface for connections that are not InfiniBand, None to leave the choice to NCCL,
            Gloo and Open MPI.
        rails: each adapter of a host is on a leaf switch of its own, so that a ring must stay on its rail.

    Sources: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html,
    https://docs.pytorch.org/docs/stable/distributed.html (``GLOO_SOCKET_IFNAME``).
    """
    variables = {"NCCL_CROSS_NIC": "0"} if rails else {}
    if interface:
        # The sign makes NCCL take the name as it is: eth1 alone would take eth10 too.
        variables["NCCL_SOCKET_IFNAME"] = f"={interface}"
        variables["GLOO_SOCKET_IFNAME"] = interface
        variables["OMPI_MCA_btl_tcp_if_include"] = interface
    return variables


def host_variables(slots: Sequence[Slot]) -> dict[str, str]:
    """The device settings of every rank of a host.

    ``CUDA_VISIBLE_DEVICES`` has the host's GPUs in the order of its ranks: a rank's own is the one that its local rank
    counts to, and the others stay visible for transfers between GPUs. ``NCCL_IB_HCA`` leaves out adapters for storage
    and Ethernet, where the node map gives a reason to; its leading ``=`` makes names exact, where ``mlx5_1`` alone
    would take ``mlx5_10`` too.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
    """
    variables = {}
    if gpus := list(dict.fromkeys(str(slot.gpu) for slot in slots if slot.gpu is not None)):
        # The numbers of a slot are nvidia-smi's; CUDA's own order is by speed.
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if devices := list(dict.fromkeys(device for slot in slots for device in slot.devices)):
        variables["NCCL_IB_HCA"] = "=" + ",".join(devices)
    return variables


def slot_variables(slot: Slot) -> dict[str, str]:
    """The settings of one rank besides :func:`host_variables`: the adapters nearest to it.

    Source: https://openucx.readthedocs.io/en/master/faq.html, ``UCX_NET_DEVICES`` (device and port).
    """
    ports = [device if ":" in device else f"{device}:1" for device in slot.devices]
    return {"UCX_NET_DEVICES": ",".join(ports)} if ports else {}
