"""Distances between devices with known places in the PCIe tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.common.cluster.node_map import Adapter, Gpu, NodeMap, NumaNode, checked

# The host bridge of a device and the PCIe bridges between it and the device, from the root.
Bridges = tuple[str, ...]


def node_map_of_tree(
    gpus: Mapping[Gpu, Bridges],
    adapters: Mapping[Adapter, Bridges],
    numa_nodes: Sequence[NumaNode],
    *,
    where: str,
    warnings: Sequence[str] = (),
) -> NodeMap:
    """The node map of devices, from the bridges above each.

    Args:
        where: the source of the devices, for messages.

    Raises:
        HpctrainError: a device or core occurs twice.
    """
    ordered = tuple(sorted(gpus, key=lambda gpu: gpu.index))
    ordered_adapters = sorted(adapters, key=lambda adapter: (adapter.bus_id or "", adapter.name))
    # An adapter with two ports may be listed for each.
    names = tuple({(adapter.name, adapters[adapter]): adapter for adapter in reversed(ordered_adapters)}.values())[::-1]
    node_map = NodeMap(
        gpus=ordered,
        adapters=names,
        numa_nodes=tuple(sorted(numa_nodes, key=lambda node: node.index)),
        gpu_adapter=tuple(tuple(pci_class(g.numa, gpus[g], a.numa, adapters[a]) for a in names) for g in ordered),
        warnings=tuple(warnings),
    )
    return checked(node_map, where)


def gpu_numbers(given: Sequence[int | None], bus_ids: Sequence[str]) -> list[int]:
    """The numbers that a file gives its GPUs, if each has another one, else CUDA's by bus ID, which is their order."""
    known = [number for number in given if number is not None]
    return known if len(set(known)) == len(bus_ids) else [sorted(bus_ids).index(bus_id) for bus_id in bus_ids]


def pci_class(numa_a: int | None, a: Bridges, numa_b: int | None, b: Bridges) -> str:
    """The class of two devices from their NUMA nodes and the bridges above them.

    A PCIe switch is an upstream bridge with a downstream bridge for each device below, so two devices of one switch
    have at most one bridge each below the last common one.
    """
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if common == 0:
        return "NODE" if numa_a == numa_b and numa_a is not None else "SYS"
    if common == 1:
        return "PHB"
    return "PIX" if max(len(a), len(b)) - common <= 1 else "PXB"
