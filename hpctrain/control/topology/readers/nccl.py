"""NCCL topology files: what ``NCCL_TOPO_DUMP_FILE`` writes and ``NCCL_TOPO_FILE`` reads.

Each ``<pci>`` with others inside is one PCIe switch; host bridges are not in the file, so that devices of one CPU
without a common switch are PHB, which is NCCL's own meaning of PHB. NCCL merges adapters on several switches to a
``<nic>`` directly below a ``<cpu>``; it is PHB from the GPUs of that CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpctrain.common.cluster.adapter_kinds import (
    LIBFABRIC,
    LinkLayer,
    is_virtual_function,
    layer_of,
    link_layer,
    link_layer_of_name,
    link_layer_of_vendor,
)
from hpctrain.common.cluster.cores import cores_of_mask, cores_of_nodes
from hpctrain.common.cluster.node_map import Adapter, Gpu, NodeMap, NumaNode
from hpctrain.control.topology.pcie import Bridges, gpu_numbers, node_map_of_tree
from hpctrain.control.topology.readers.xml_tree import Element, not_valid, parse

_REMEDY = "NCCL writes one in a job that runs with NCCL_TOPO_DUMP_FILE=topology.xml"
# PCI base classes.
_DISPLAY, _NETWORK = "0x03", "0x02"
# NCCL adds this suffix to an adapter's name for its data-direct function.
_DATA_DIRECT = "_dma"

# A device of the file, the NUMA node of its CPU and the bridges above it.
_Place = tuple[Element, int, Bridges]


def read(text: str, where: str) -> NodeMap:
    """The node map of a topology file. It describes hosts inside, so it is a NodeMap rather than fabric records.

    Adapters are named by their bus ID where the file has no names (clouds ship such files); Ethernet adapters are
    marked.

    Raises:
        HpctrainError: the text is no such file, cut short, has neither GPU nor adapter, or several hosts that differ.
    """
    system = parse(text, where, root="system", remedy=_REMEDY)
    hosts: dict[str, list[Element]] = {}
    for cpu in system.all("cpu"):
        hosts.setdefault(cpu.get("host_hash", ""), []).append(cpu)
    maps = {name: _node_map(cpus, system.where, where) for name, cpus in hosts.items()}
    if not maps:
        raise not_valid(system.where, "no GPU and no adapter in this file", _REMEDY)
    first, *others = maps
    if any(maps[other] != maps[first] for other in others):
        problem = f"of {len(maps)} hosts that differ: {', '.join(maps)}"
        raise not_valid(where, problem, "write the file in a job on one host")
    if not others:
        return maps[first]
    alike = f"{where}: of {len(maps)} hosts, all alike: {first} stands for all"
    return replace(maps[first], warnings=(alike, *maps[first].warnings))


def _node_map(cpus: Sequence[Element], where: str, file: str) -> NodeMap:
    """The node map of one host."""
    places = [place for cpu in cpus for place in _devices(cpu)]
    gpus = [place for place in places if _is(place[0], "gpu", _DISPLAY)]
    nics = [place for place in places if place not in gpus and _is(place[0], "nic", _NETWORK)]
    whole = any(not _is_virtual(device) for device, _, _ in nics)
    adapters = {
        replace(adapter, virtual=whole and _is_virtual(device)): bridges
        for device, numa, bridges in nics
        for adapter in _adapters(device, numa)
    }
    adapters = _each_once(adapters)
    if not gpus and not adapters:
        raise not_valid(where, "no GPU and no adapter in this file", _REMEDY)
    # NCCL's own, of which processes that each see only one GPU give it 0.
    named = [next((gpu for gpu in device.all("gpu") if gpu.get("dev")), None) for device, _, _ in gpus]
    given = [None if gpu is None else gpu.number("dev") for gpu in named]
    numbers = gpu_numbers(given, [device.attribute("busid") for device, _, _ in gpus])
    nameless = sum(adapter.name == adapter.bus_id for adapter in adapters)
    warnings = [f"{file}: {nameless} adapters without a device name are known by their bus ID"] if nameless else []
    node_map = node_map_of_tree(
        {
            Gpu(index=index, bus_id=device.attribute("busid"), numa=numa): bridges
            for index, (device, numa, bridges) in zip(numbers, gpus, strict=True)
        },
        adapters,
        _numa_nodes(cpus),
        where=where,
        warnings=warnings,
    )
    return replace(node_map, whole=False)


def _numa(cpu: Element) -> int:
    """The NUMA node of a CPU; -1 where a virtual machine does not show it."""
    return cpu.number("numaid", least=-1)


def _numa_nodes(cpus: Sequence[Element]) -> list[NumaNode]:
    cores = cores_of_nodes([cores_of_mask(cpu.get("affinity", ""), cpu.where) for cpu in cpus])
    return [
        NumaNode(index=_numa(cpu), cores=node_cores or (), complete=bool(node_cores))
        for cpu, node_cores in zip(cpus, cores, strict=True)
    ]


def _is(device: Element, tag: str, pci_class: str) -> bool:
    return bool(device.all(tag)) or device.get("class", "").startswith(pci_class)


def _devices(cpu: Element) -> Iterator[_Place]:
    """The PCI devices below a CPU with the bridges above each, and the CPU itself if it has adapters."""
    numa = _numa(cpu)
    host_bridge = f"cpu {numa}"
    if cpu.all("nic"):
        yield cpu, numa, (host_bridge,)
    below: list[tuple[Element, Bridges]] = [(pci, (host_bridge,)) for pci in reversed(cpu.all("pci"))]
    while below:
        pci, bridges = below.pop()
        name = pci.attribute("busid")
        inner = pci.all("pci")
        if not inner:
            yield pci, numa, bridges
        # A switch is two bridges: its upstream bridge, and a downstream bridge for each device.
        below += [(child, (*bridges, name, f"{name} port {port}")) for port, child in reversed(list(enumerate(inner)))]


def _adapters(device: Element, numa: int) -> Iterator[Adapter]:
    """The RDMA devices of a PCI device, or of a CPU: one where it is a network device and the file names none."""
    bus_id = device.get("busid")
    nets = [net for nic in device.all("nic") for net in nic.all("net")]
    # Each net is a port: a two-port adapter has two, as separate devices or as ports of one. Their port attribute is
    # not the device's port: NCCL adds the place of the device on its card.
    names: dict[str, list[Element]] = {}
    for net in nets:
        names.setdefault(net.attribute("name"), []).append(net)
    if not nets and bus_id is not None:
        names[bus_id] = []
    layer = _link_layer(device)
    for name, ports in names.items():
        # NCCL uses a network interface, which has port 0, through sockets.
        if ports and link_layer_of_name(name) not in LIBFABRIC and ports[0].get("port") == "0":
            continue
        yield Adapter(
            name=name,
            bus_id=bus_id,
            numa=numa,
            link_layer=layer_of(name, layer),
        )


def _each_once(adapters: dict[Adapter, Bridges]) -> dict[Adapter, Bridges]:
    """The adapters without merged ones whose parts are listed too, and without those with a data-direct function."""
    names = {adapter.name for adapter in adapters}

    def is_repeated(name: str) -> bool:
        return ("+" in name and names.issuperset(name.split("+"))) or name + _DATA_DIRECT in names

    return {adapter: bridges for adapter, bridges in adapters.items() if not is_repeated(adapter.name)}


def _link_layer(device: Element) -> LinkLayer | None:
    """The link layer by vendor and PCI class. A net whose switches reduce (SHARP) is InfiniBand; LIDs are not given."""
    if any(net.get("coll") == "1" for nic in device.all("nic") for net in nic.all("net")):
        return "InfiniBand"
    vendor, model, pci_class = _identity(device)
    return link_layer_of_vendor(vendor, model) or link_layer(pci_class, ())


def _identity(device: Element) -> tuple[str, str, str]:
    """Vendor, model, and class with subclass of a PCI device, in hexadecimal digits."""
    vendor, model, kind = (device.get(name, "")[2:].lower() for name in ("vendor", "device", "class"))
    return vendor, model, kind[:4]


def _is_virtual(device: Element) -> bool:
    return is_virtual_function(*_identity(device)[:2])
