"""The node map: GPUs, adapters and cores of one host, their distances, and a slot for each rank.

Distances are the classes that ``nvidia-smi topo -m`` prints, nearest first:

===== =========================================================================================
PIX   through at most one PCIe bridge: the two are on one PCIe switch
PXB   through several PCIe bridges, but not through the PCIe host bridge
PHB   through a PCIe host bridge, typically the CPU
NODE  through several PCIe host bridges of one NUMA node
SYS   through the interconnect between NUMA nodes (UPI, Infinity Fabric)
===== =========================================================================================

Source: the legend of ``nvidia-smi topo -m``, https://docs.nvidia.com/deploy/nvidia-smi/. NCCL has NODE within PHB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from hpctrain.common.cluster.adapter_kinds import LIBFABRIC, UNUSED, LinkLayer, verbs_devices
from hpctrain.common.errors import HpctrainError, abbreviated, counted

PCI_CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU.

    Attributes:
        index: its number in CUDA's order by bus ID (``CUDA_DEVICE_ORDER=PCI_BUS_ID``) and in nvidia-smi.
        bus_id: ``domain:bus:device.function``, None where the format has none.
    """

    index: int
    bus_id: str | None
    numa: int | None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An RDMA device.

    Attributes:
        name: ``mlx5_0``; its bus ID (it has colons) where the format names no devices; NCCL's own name of several that
            it merged (``mlx5_0+mlx5_1``).
        bus_id: ``domain:bus:device.function``, None where the format has none.
        active: whether a port of it is up, None where the format does not tell.
        virtual: a virtual function of an adapter that this host has whole. A virtual machine that is given nothing but
            virtual functions has none of these.
    """

    name: str
    bus_id: str | None
    numa: int | None
    link_layer: LinkLayer | None = None
    active: bool | None = None
    virtual: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        """What NCCL and UCX call it, with a port where one is named: ``mlx5_0``, ``mlx4_0:2``.

        Empty where nobody knows, and for adapters that both reach through libfabric.
        """
        return () if self.link_layer in LIBFABRIC else verbs_devices(self.name)


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """A NUMA node.

    Attributes:
        index: the kernel's number; -1 where a virtual machine has none.
        cores: the operating system's number of each core's first hardware thread.
        complete: whether these are all of its cores. Where the format's list is cut, or does not tell which CPUs are
            threads of one core, there are none here.
    """

    index: int
    cores: tuple[int, ...]
    complete: bool = True


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one rank on a host.

    Attributes:
        gpu: the GPU's index, None on a host without GPUs.
        adapter: the name of the adapter nearest to it; None where there is none, or where it has no more reason to use
            one adapter than another.
        cores: as in NumaNode, ascending; empty where the node map does not know them for certain.
        numa: the NUMA node of its cores, of which it takes a share in the job where the cores are not known; None where
            the node map does not tell.
        devices: the adapters that its traffic is restricted to, as NCCL and UCX name them; empty where the node map
            gives no reason to restrict it.
    """

    gpu: int | None
    adapter: str | None
    cores: tuple[int, ...]
    numa: int | None = None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NodeMap:
    """One host.

    Attributes:
        adapters: all RDMA devices, those that training must not use too (see ``fabric_adapters``).
        gpu_adapter: distance class of each GPU and adapter, by position.
        whole: whether the format lists all cores of a host, not only those of NUMA nodes near its devices.
    """

    gpus: tuple[Gpu, ...]
    adapters: tuple[Adapter, ...]
    numa_nodes: tuple[NumaNode, ...]
    gpu_adapter: tuple[tuple[str, ...], ...]
    warnings: tuple[str, ...] = ()
    whole: bool = True

    @property
    def fabric_adapters(self) -> tuple[Adapter, ...]:
        """The adapters for training traffic: not down, no virtual functions, and of one kind, as far as known.

        Ethernet takes part where no adapter is known to be InfiniBand and most GPUs have one nearer to them than what
        else there is: hosts that train over Ethernet bond the ports of each adapter (``mlx5_bond_1``), or have one or
        more adapters a GPU.
        """
        present = (adapter for adapter in self.adapters if adapter.active is not False and not adapter.virtual)
        usable = [adapter for adapter in present if adapter.link_layer not in UNUSED]
        bonds = [adapter for adapter in usable if "bond" in adapter.name]
        plain = [adapter for adapter in usable if adapter.link_layer == "Ethernet" and adapter not in bonds]
        others = [adapter for adapter in usable if adapter not in bonds and adapter not in plain]
        if any(adapter.link_layer == "InfiniBand" for adapter in others):
            return tuple(others)
        if any(adapter.link_layer == "InfiniBand" for adapter in self.adapters):
            plain = []
        kinds = [kind for kind in (others, bonds, plain) if kind]
        best = kinds[0] if kinds else []
        for kind in kinds[1:]:
            nearer = sum(self._steps(gpu, kind) < self._steps(gpu, best) for gpu in self.gpus)
            best = kind if 2 * nearer > len(self.gpus) else best
        return tuple(best)

    def nearest(self, gpu: Gpu) -> tuple[Adapter, ...]:
        """The adapters for training traffic that are nearest to a GPU."""
        usable = self.fabric_adapters
        least = self._steps(gpu, usable)
        return tuple(adapter for adapter in usable if self._steps(gpu, [adapter]) == least)

    def _steps(self, gpu: Gpu, adapters: Sequence[Adapter]) -> int:
        classes = (PCI_CLASSES.index(self.distance(gpu, adapter)) for adapter in adapters)
        return min(classes, default=len(PCI_CLASSES))

    def distance(self, gpu: Gpu, adapter: Adapter) -> str:
        """The distance class of a GPU and an adapter."""
        return self.gpu_adapter[self.gpus.index(gpu)][self.adapters.index(adapter)]


def slots(node_map: NodeMap, ranks: int) -> tuple[Slot, ...]:
    """A slot for each local rank: rank i has GPU i, a nearest adapter, and a share of its NUMA node's cores.

    Adapters at equal distance get equally many ranks, give or take one, and none where no GPU is nearer to some than
    another is. No core is in two slots. A rank whose NUMA node has fewer cores than ranks gets cores of the node with
    the most to spare; one whose GPU's NUMA node is one of several and not known, or has a list that is not complete,
    gets none.
    """
    gpus: list[Gpu | None] = list(node_map.gpus[:ranks]) or [None] * ranks
    if len(gpus) < ranks:
        raise HpctrainError(
            "HT-gpus-too-few",
            "{ranks} ranks for {gpus} GPUs: NCCL takes one rank per GPU",
            f"start at most {len(gpus)} ranks here; or leave --node out, with --share-gpus, to try things out",
            ranks=ranks,
            gpus=len(gpus),
        )
    homes = _homes(node_map, gpus)
    cores = _shares(node_map.numa_nodes, homes)
    choices = [node_map.nearest(gpu) if gpu else _beside(node_map, home) for gpu, home in zip(gpus, homes, strict=True)]
    nearest = [node_map.nearest(gpu) for gpu in node_map.gpus]
    differ = _differ(nearest or [_beside(node_map, node.index) for node in node_map.numa_nodes])
    adapters = _balanced(choices) if differ or len(node_map.fabric_adapters) == 1 else [None] * ranks
    allowed = _allowed(node_map, choices, differ=differ)
    return tuple(
        Slot(
            gpu=gpu.index if gpu else None,
            adapter=adapter,
            cores=share,
            # The kernel's numbers begin at 0; other nodes have negative ones here.
            numa=home if home is not None and home >= 0 else None,
            devices=devices,
        )
        for gpu, adapter, share, home, devices in zip(gpus, adapters, cores, homes, allowed, strict=True)
    )


def _homes(node_map: NodeMap, gpus: Sequence[Gpu | None]) -> list[int | None]:
    """The NUMA node of each rank: its GPU's while that has a core for every rank there."""
    room = {node.index: len(node.cores) for node in node_map.numa_nodes if node.cores}
    only = next(iter(room)) if node_map.whole and len(room) == 1 else None
    wanted = [None if gpu is None else only if gpu.numa is None else gpu.numa for gpu in gpus]
    if not room or not all(node.complete for node in node_map.numa_nodes):
        return wanted
    # A rank whose node is not known is lent none of another, which could be on another socket.
    known = {node.index for node in node_map.numa_nodes}
    bound = [gpu is None or numa in known for gpu, numa in zip(gpus, wanted, strict=True)]
    if sum(bound) > sum(room.values()):
        raise HpctrainError(
            "HT-ranks-too-many",
            "{ranks} ranks for {cores} cores: every rank needs a core of its own",
            f"start at most {sum(room.values())} ranks here; a node map that was written inside a job has only that "
            "job's cores: write it outside, or with lstopo --disallowed --of xml",
            ranks=len(gpus),
            cores=sum(room.values()),
        )
    used: Counter[int] = Counter()
    homes: list[int | None] = []
    lent: list[int] = []
    for rank, numa in enumerate(wanted):
        if numa in room and used[numa] < room[numa]:
            used[numa] += 1
        elif bound[rank]:
            lent.append(rank)
        homes.append(numa)
    spare = []
    for _ in lent:
        roomiest = max(room, key=lambda index: room[index] / (used[index] + 1))
        used[roomiest] += 1
        spare.append(roomiest)
    # Neighbouring ranks talk most: keep them on one node.
    for rank, home in zip(lent, sorted(spare), strict=True):
        homes[rank] = home
    return homes


def _shares(nodes: Sequence[NumaNode], homes: Sequence[int | None]) -> list[tuple[int, ...]]:
    """The cores of each rank: those of its node split evenly, in runs of neighbours."""
    cores = {node.index: sorted(node.cores) for node in nodes}
    ranks = Counter(homes)
    before: Counter[int | None] = Counter()
    shares = []
    for home in homes:
        own = cores.get(home, []) if home is not None else []
        position, before[home] = before[home], before[home] + 1
        shares.append(tuple(share(own, position, ranks[home])))
    return shares


def share(cores: Sequence[int], position: int, ranks: int) -> Sequence[int]:
    """A rank's part of the cores that several ranks have together."""
    return cores[len(cores) * position // ranks : len(cores) * (position + 1) // ranks]


def _beside(node_map: NodeMap, numa: int | None) -> tuple[Adapter, ...]:
    """The adapters for training traffic of a NUMA node, else all."""
    usable = node_map.fabric_adapters
    if numa is None or any(adapter.numa is None for adapter in usable):
        return usable
    return tuple(adapter for adapter in usable if adapter.numa == numa) or usable


def _differ(nearest: Sequence[Collection[Adapter]]) -> bool:
    """Whether some GPUs have other nearest adapters than others: else distances give no reason to choose."""
    return len({frozenset(each) for each in nearest}) > 1


def _balanced(choices: Sequence[Sequence[Adapter]]) -> list[str | None]:
    """The adapter of each rank: of its choices, that with the fewest ranks so far."""
    used: Counter[str] = Counter()
    chosen: list[str | None] = [None] * len(choices)
    # Ranks with few choices come first, because the others can give way.
    for rank in sorted(range(len(choices)), key=lambda rank: len(choices[rank])):
        if choices[rank]:
            name = min(choices[rank], key=lambda adapter: used[adapter.name]).name
            used[name] += 1
            chosen[rank] = name
    return chosen


def _allowed(node_map: NodeMap, choices: Sequence[Sequence[Adapter]], *, differ: bool) -> list[tuple[str, ...]]:
    """The devices that each rank's traffic is restricted to, none where the node map gives no reason to restrict it.

    A list of some must name all that are meant, so that a single adapter without a device name leaves all ranks free.
    """
    usable = node_map.fabric_adapters
    if not all(adapter.devices for adapter in usable):
        return [()] * len(choices)
    if not differ:
        choices = [usable if _sorted_out(node_map) else ()] * len(choices)
    return [tuple(device for adapter in choice for device in adapter.devices) for choice in choices]


def _sorted_out(node_map: NodeMap) -> bool:
    """Whether an adapter that is up is known to be of another kind than those for training traffic."""
    usable = node_map.fabric_adapters
    infiniband = all(adapter.link_layer == "InfiniBand" for adapter in usable)
    others = [each for each in node_map.adapters if each not in usable and each.active is not False]
    kinds = (*UNUSED, "Ethernet") if infiniband else UNUSED
    return any(other.virtual or other.link_layer in kinds for other in others)


def checked(node_map: NodeMap, where: str) -> NodeMap:
    """Check that every device and core of a node map occurs once.

    Its warnings name the adapters that training leaves out.
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
                raise HpctrainError(
                    "HT-node-file-not-valid",
                    "{where}: {kind} {name} appears {count} times",
                    "give one file of one host",
                    where=where,
                    kind=kind,
                    name=name,
                    count=count,
                )
    return replace(
        node_map, warnings=(*node_map.warnings, *_unknown_cores(node_map, where), *_left_out(node_map, where))
    )


def _unknown_cores(node_map: NodeMap, where: str) -> Iterator[str]:
    listed = {node.index: node.complete for node in node_map.numa_nodes}
    of_gpus = {gpu.numa: False for gpu in node_map.gpus if gpu.numa is not None and listed}
    if unknown := [f"node {index}" for index, complete in sorted({**of_gpus, **listed}.items()) if not complete]:
        yield (
            f"{where}: the CPUs of some NUMA nodes are missing, cut off, listed twice, or may be threads of one core, "
            f"so that no rank is bound by these lists: {abbreviated(unknown)}"
        )


def _left_out(node_map: NodeMap, where: str) -> Iterator[str]:
    taken = node_map.fabric_adapters
    if left := [f"{adapter.name} ({_reason(adapter)})" for adapter in node_map.adapters if adapter not in taken]:
        yield f"{where}: {counted('adapters that training leaves out', left)}"
    if not node_map.gpus:
        yield f"{where}: no GPU"
    if not taken:
        yield f"{where}: no adapter with RDMA that is up"


def _reason(adapter: Adapter) -> str:
    if adapter.virtual:
        return "virtual function"
    if adapter.active is False:
        return "down"
    return adapter.link_layer if adapter.link_layer in ("Ethernet", *UNUSED) else "farther than the GPUs' Ethernet"
