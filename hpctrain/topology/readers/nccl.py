"""NCCL topology files: what ``NCCL_TOPO_DUMP_FILE`` writes and ``NCCL_TOPO_FILE`` reads.

Each ``<pci>`` with others inside is one PCIe switch; host bridges are not in the file, so that devices of one CPU
without a common switch are PHB, which is NCCL's own meaning of PHB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpctrain.errors import HpctrainError
from hpctrain.topology.adapter_kinds import LinkLayer, is_virtual_function, link_layer
from hpctrain.topology.cores import cores_of_mask, first_threads
from hpctrain.topology.node_map import Adapter, Gpu, NodeMap, NumaNode, link_layer_of_name
from hpctrain.topology.pcie import Bridges, node_map_of_tree
from hpctrain.topology.readers.xml_tree import Element, parse

_REMEDY = "NCCL writes one in a job that runs with NCCL_TOPO_DUMP_FILE=topology.xml"
# PCI base classes.
_DISPLAY, _NETWORK = "0x03", "0x02"
_NVSWITCH = "0x0680"


def read(text: str, where: str) -> NodeMap:
    """The node map of a topology file. A reader of one host, so it returns a NodeMap rather than fabric records.

    Adapters are known by their bus ID where the file names none (those that clouds ship); Ethernet adapters are marked.

    Raises:
        HpctrainError: not such a file, cut short, or with neither GPU nor adapter.
    """
    system = parse(text, where, root="system", remedy=_REMEDY)
    numa_nodes: list[NumaNode] = []
    gpus: list[tuple[Element, int, Bridges]] = []
    nics: list[tuple[Element, int, Bridges]] = []
    for cpu in system.all("cpu"):
        # A virtual machine may tell none: -1.
        numa = cpu.number("numaid", least=-1)
        cores = first_threads(cores_of_mask(cpu.attributes.get("affinity", ""), cpu.where))
        numa_nodes.append(NumaNode(index=numa, cores=cores))
        for device, bridges in _devices(cpu, f"cpu {numa}"):
            kind = device.attributes.get("class", "")
            if device.all("gpu") or kind.startswith(_DISPLAY):
                gpus.append((device, numa, bridges))
            elif device.all("nic") or kind.startswith(_NETWORK):
                nics.append((device, numa, bridges))
    whole = any(not _is_virtual(device) for device, _, _ in nics)
    adapters = {
        replace(adapter, virtual=whole and _is_virtual(device)): bridges
        for device, numa, bridges in nics
        for adapter in _adapters(device, numa)
    }
    if not gpus and not adapters:
        raise HpctrainError(f"{system.where}: no GPU and no adapter in this file", _REMEDY)
    numbers = _indices([device for device, _, _ in gpus])
    return node_map_of_tree(
        {
            Gpu(index=index, bus_id=device.attribute("busid"), numa=numa): bridges
            for index, (device, numa, bridges) in zip(numbers, gpus, strict=True)
        },
        adapters,
        numa_nodes,
        nvlinks={device.attribute("busid"): _nvlinks(device) for device, _, _ in gpus},
        where=system.where,
        warnings=_unnamed(adapters, where),
    )


def _devices(cpu: Element, host_bridge: str) -> Iterator[tuple[Element, Bridges]]:
    """The PCI devices below a CPU, with the bridges above each."""
    below: list[tuple[Element, Bridges]] = [(pci, (host_bridge,)) for pci in reversed(cpu.all("pci"))]
    while below:
        pci, bridges = below.pop()
        name = pci.attribute("busid")
        inner = pci.all("pci")
        if not inner:
            yield pci, bridges
        # A switch is two bridges: its own, and a port of its own towards each device.
        below += [(child, (*bridges, name, f"{name} port {port}")) for port, child in reversed(list(enumerate(inner)))]


def _indices(gpus: list[Element]) -> list[int]:
    """NCCL's own device numbers where every GPU has one, else CUDA's order by bus ID."""
    own = [gpu.all("gpu")[0] for gpu in gpus if gpu.all("gpu")]
    if own and len(own) == len(gpus):
        return [gpu.number("dev") for gpu in own]
    ordered = sorted(gpu.attribute("busid") for gpu in gpus)
    return [ordered.index(gpu.attribute("busid")) for gpu in gpus]


def _adapters(device: Element, numa: int) -> Iterator[Adapter]:
    bus_id = device.attribute("busid")
    layer = _link_layer(device)
    # A net a port: a two-port adapter comes twice, as devices of their own or as ports of one.
    names = {net.attribute("name"): None for nic in device.all("nic") for net in nic.all("net")}
    for name in names or [bus_id]:
        yield Adapter(name=name, bus_id=bus_id, numa=numa, link_layer=layer or link_layer_of_name(name))


def _link_layer(device: Element) -> LinkLayer | None:
    """By the PCI class; NCCL tells no LIDs, but that a net reduces in its switches, which is SHARP of InfiniBand."""
    if any(net.attributes.get("coll") == "1" for nic in device.all("nic") for net in nic.all("net")):
        return "InfiniBand"
    return link_layer(device.attributes.get("class", "")[2:6].lower(), ())


def _is_virtual(device: Element) -> bool:
    vendor, model = (device.attributes.get(name, "")[2:].lower() for name in ("vendor", "device"))
    return is_virtual_function(vendor, model)


def _nvlinks(device: Element) -> dict[str, int]:
    """The NVLinks of a GPU to other GPUs and to NVSwitches; not those to a POWER9 CPU."""
    links = [link for gpu in device.all("gpu") for link in gpu.all("nvlink")]
    return {
        link.attribute("target"): link.number("count")
        for link in links
        if link.attributes.get("tclass", _NVSWITCH).startswith((_NVSWITCH, _DISPLAY))
    }


def _unnamed(adapters: dict[Adapter, Bridges], where: str) -> list[str]:
    count = sum(adapter.name == adapter.bus_id for adapter in adapters)
    return [f"{where}: {count} adapters without a device name are known by their bus ID"] if count else []
