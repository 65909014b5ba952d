"""The node map: GPUs, adapters and cores of one host, their distances, and a slot for each rank.

Distances are the classes that ``nvidia-smi topo -m`` prints, nearest first:

===== =========================================================================================
NV#   over # bonded NVLinks, directly or through NVSwitches
PIX   through at most one PCIe bridge: the two are on one PCIe switch
PXB   through several PCIe bridges, but not through the PCIe host bridge
PHB   through a PCIe host bridge, typically the CPU
NODE  through several PCIe host bridges of one NUMA node
SYS   through the interconnect between NUMA nodes (UPI, Infinity Fabric)
===== =========================================================================================

Source: the legend of ``nvidia-smi topo -m``, https://docs.nvidia.com/deploy/nvidia-smi/. NCCL calls the same classes
NVL, PIX, PXB, PHB and SYS, with NODE within PHB: ``NCCL_P2P_LEVEL`` in
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpctrain.errors import HpctrainError
from hpctrain.topology.cabling import counted

PCI_CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU.

    Attributes:
        index: its number in CUDA's order by bus ID (``CUDA_DEVICE_ORDER=PCI_BUS_ID``) and in nvidia-smi.
        bus_id: ``domain:bus:device.function``, None where the format has none.
        numa: its NUMA node, None where unknown.
    """

    index: int
    bus_id: str | None
    numa: int | None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An RDMA device.

    Attributes:
        name: ``mlx5_0``; its bus ID (it has colons) where the format names no devices.
        bus_id: ``domain:bus:device.function``, None where the format has none.
        numa: its NUMA node, None where unknown.
        link_layer: None where the format does not tell.
        active: whether a port of it is up, None where the format does not tell.
        virtual: a virtual function of an adapter that this host has whole. A virtual machine that is given nothing but
            virtual functions has none of these.
    """

    name: str
    bus_id: str | None
    numa: int | None
    link_layer: Literal["InfiniBand", "Ethernet"] | None = None
    active: bool | None = None
    virtual: bool = False


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """A NUMA node.

    Attributes:
        cores: the operating system's number of each core's first hardware thread.
    """

    index: int
    cores: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one rank on a host.

    Attributes:
        gpu: the GPU's index, None on a host without GPUs.
        adapter: the name of the adapter that its traffic should use, None on a host without one.
        cores: as in NumaNode, ascending; empty where the node map knows no cores, which leaves binding to the launcher.
    """

    gpu: int | None
    adapter: str | None
    cores: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NodeMap:
    """One host.

    Attributes:
        gpus: in the order of their index.
        adapters: all RDMA devices, those that training must not use too (see ``fabric_adapters``).
        numa_nodes: in the order of their index.
        gpu_gpu: distance class of each pair of GPUs, by position; "X" of a GPU and itself.
        gpu_adapter: distance class of each GPU and adapter, by position.
        warnings: what is odd, in sentences.
    """

    gpus: tuple[Gpu, ...]
    adapters: tuple[Adapter, ...]
    numa_nodes: tuple[NumaNode, ...]
    gpu_gpu: tuple[tuple[str, ...], ...]
    gpu_adapter: tuple[tuple[str, ...], ...]
    warnings: tuple[str, ...] = ()

    @property
    def fabric_adapters(self) -> tuple[Adapter, ...]:
        """The adapters for training traffic: not Ethernet, not down, no virtual functions, as far as known.

        Hosts that train over Ethernet bond the ports of each adapter (``mlx5_bond_1``). Bonds take part where no
        adapter is known to be InfiniBand and most GPUs have a bond nearer to them than what else there is.
        """
        usable = [adapter for adapter in self.adapters if adapter.active is not False and not adapter.virtual]
        bonds = [adapter for adapter in usable if is_bond(adapter.name)]
        others = [adapter for adapter in usable if adapter.link_layer != "Ethernet" and adapter not in bonds]
        return tuple(bonds if self._trains_over(bonds, others) else others)

    def _trains_over(self, bonds: Sequence[Adapter], others: Sequence[Adapter]) -> bool:
        if not bonds or any(adapter.link_layer == "InfiniBand" for adapter in others):
            return False
        nearer = sum(self._nearest(gpu, bonds) < self._nearest(gpu, others) for gpu in self.gpus)
        return not others or 2 * nearer > len(self.gpus)

    def _nearest(self, gpu: Gpu, adapters: Sequence[Adapter]) -> int:
        classes = (PCI_CLASSES.index(self.distance(gpu, adapter)) for adapter in adapters)
        return min(classes, default=len(PCI_CLASSES))

    def distance(self, gpu: Gpu, other: Gpu | Adapter) -> str:
        """The distance class of a GPU and another device; "X" for itself."""
        row = self.gpus.index(gpu)
        if isinstance(other, Gpu):
            return self.gpu_gpu[row][self.gpus.index(other)]
        return self.gpu_adapter[row][self.adapters.index(other)]


def slots(node_map: NodeMap, ranks: int) -> tuple[Slot, ...]:
    """A slot for each local rank: rank i has GPU i, a nearest adapter, and a share of its NUMA node's cores.

    Adapters at equal distance get equally many ranks, give or take one. No core is in two slots. A rank whose NUMA
    node is unknown, or has fewer cores than ranks, gets cores of the node with the most to spare.

    Raises:
        HpctrainError: more ranks than GPUs, or than cores.
    """
    gpus: list[Gpu | None] = list(node_map.gpus[:ranks]) or [None] * ranks
    if len(gpus) < ranks:
        raise HpctrainError(
            f"{ranks} ranks for {len(gpus)} GPUs: NCCL takes one rank per GPU", f"start at most {len(gpus)} ranks here"
        )
    homes = _homes(node_map.numa_nodes, [gpu.numa if gpu else None for gpu in gpus])
    cores = _shares(node_map.numa_nodes, homes)
    adapters = _nearest_adapters(node_map, gpus, homes)
    return tuple(
        Slot(gpu=gpu.index if gpu else None, adapter=adapter, cores=share)
        for gpu, adapter, share in zip(gpus, adapters, cores, strict=True)
    )


def _homes(nodes: Sequence[NumaNode], wanted: Sequence[int | None]) -> list[int | None]:
    """The NUMA node of each rank: the wanted one while it has a core for every rank there."""
    room = {node.index: len(node.cores) for node in nodes if node.cores}
    if not room:
        return list(wanted)
    if len(wanted) > sum(room.values()):
        raise HpctrainError(
            f"{len(wanted)} ranks for {sum(room.values())} cores: every rank needs a core of its own",
            f"start at most {sum(room.values())} ranks here; a node map that was written inside a job has only that "
            "job's cores: write it outside, or with lstopo --disallowed --of xml",
        )
    used: Counter[int] = Counter()
    homes: list[int | None] = []
    for numa in wanted:
        seated = numa if numa in room and used[numa] < room[numa] else None
        homes.append(seated)
        if seated is not None:
            used[seated] += 1
    spare = []
    for _ in range(homes.count(None)):
        roomiest = max(room, key=lambda index: room[index] / (used[index] + 1))
        used[roomiest] += 1
        spare.append(roomiest)
    # Neighbouring ranks talk most: keep them on one node.
    others = iter(sorted(spare))
    return [next(others) if home is None else home for home in homes]


def _shares(nodes: Sequence[NumaNode], homes: Sequence[int | None]) -> list[tuple[int, ...]]:
    """The cores of each rank: those of its node split evenly, in runs of neighbours."""
    cores = {node.index: sorted(node.cores) for node in nodes}
    ranks = Counter(homes)
    before: Counter[int | None] = Counter()
    shares = []
    for home in homes:
        own = cores.get(home, []) if home is not None else []
        position, before[home] = before[home], before[home] + 1
        shares.append(tuple(own[len(own) * position // ranks[home] : len(own) * (position + 1) // ranks[home]]))
    return shares


def _nearest_adapters(node_map: NodeMap, gpus: Sequence[Gpu | None], homes: Sequence[int | None]) -> list[str | None]:
    """The adapter of each rank: among the nearest ones, that with the fewest ranks so far."""
    usable = node_map.fabric_adapters
    if not usable:
        return [None] * len(gpus)

    def nearest(rank: int) -> list[Adapter]:
        gpu, home = gpus[rank], homes[rank]
        classes = [node_map.distance(gpu, a) if gpu else ("NODE" if a.numa == home else "SYS") for a in usable]
        best = min(classes, key=PCI_CLASSES.index)
        return [adapter for adapter, name in zip(usable, classes, strict=True) if name == best]

    choices = [nearest(rank) for rank in range(len(gpus))]
    used: Counter[str] = Counter()
    chosen: list[str | None] = [None] * len(gpus)
    # Those with few choices first, so that the others can step aside.
    for rank in sorted(range(len(gpus)), key=lambda rank: len(choices[rank])):
        name = min(choices[rank], key=lambda adapter: used[adapter.name]).name
        used[name] += 1
        chosen[rank] = name
    return chosen


def link_layer_of_name(name: str) -> Literal["InfiniBand", "Ethernet"] | None:
    """The link layer that a device's name suggests, if any.

    Only Ethernet ports are bonded (``mlx5_bond_0``), and rdma-core names devices by their layer: ``ibp…``, ``rocep…``.
    Source: rdma-core, ``kernel-boot/rdma_rename.c``.
    """
    if is_bond(name) or name.startswith(("roce", "iw", "eth", "en")):
        return "Ethernet"
    return "InfiniBand" if name.startswith("ib") else None


def is_bond(name: str) -> bool:
    """Whether a device is a bond of ports: ``mlx5_bond_0``."""
    return "bond" in name


def checked(node_map: NodeMap, where: str) -> NodeMap:
    """Check that every device and core of a node map occurs once.

    Its warnings name the adapters that training leaves out.

    Raises:
        HpctrainError: one comes twice.
    """
    named: dict[str, Sequence[object]] = {
        "GPU": [gpu.index for gpu in node_map.gpus],
        "GPU at": [gpu.bus_id for gpu in node_map.gpus if gpu.bus_id],
        "adapter": [adapter.name for adapter in node_map.adapters],
        "NUMA node": [node.index for node in node_map.numa_nodes],
        "core": [core for node in node_map.numa_nodes for core in node.cores],
    }
    for kind, names in named.items():
        for name, count in Counter(names).items():
            if count > 1:
                raise HpctrainError(f"{where}: {kind} {name} appears {count} times", "give one file of one host")
    return replace(node_map, warnings=(*node_map.warnings, *_left_out(node_map, where)))


def _left_out(node_map: NodeMap, where: str) -> Iterator[str]:
    taken = node_map.fabric_adapters
    virtual, farther = [], []
    for adapter in node_map.adapters:
        if adapter in taken:
            continue
        if adapter.virtual:
            virtual.append(adapter.name)
        elif adapter.active is False:
            yield f"{where}: {adapter.name} is down: left out"
        elif adapter.link_layer == "Ethernet":
            yield f"{where}: {adapter.name} is Ethernet: left out"
        else:
            farther.append(adapter.name)
    if virtual:
        yield f"{where}: {counted('virtual functions, left out', virtual)}"
    if farther:
        yield f"{where}: {counted('adapters farther from the GPUs than its bonds, left out', farther)}"
    if not node_map.gpus:
        yield f"{where}: no GPU"
    if not taken:
        yield f"{where}: no InfiniBand adapter that is up"
