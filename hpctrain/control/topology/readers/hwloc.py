"""hwloc's XML, versions 2 and 3: what ``lstopo --of xml`` writes. Format: hwloc2.dtd and hwloc.h of open-mpi/hwloc."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from hpctrain.common.cluster.adapter_kinds import (
    LIBFABRIC,
    Port,
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

_REMEDY = "hwloc 2 or later writes one with: lstopo --of xml node.xml"
_NVIDIA, _AMD = "10de", "1002"
# PCI classes: displays of any kind, and for AMD, whose processors have displays too, 3D and other controllers and
# processing accelerators.
_GPUS = {_NVIDIA: ("03",), _AMD: ("0302", "0380", "12")}
_NUMBER = re.compile(r"(?:nvml|rsmi)([0-9]{1,4})")
_PORT = re.compile(r"Port([0-9]{1,3})(State|LID)")
_LID = re.compile(r"0x[0-9a-fA-F]{1,8}")
_PORT_ACTIVE = "4"
# hwloc_obj_osdev_type_e: a number in version 2, a bit in version 3.
_OPENFABRICS = {"2": lambda kind: kind == 3, "3": lambda kind: bool(kind & 1 << 5)}


@dataclass(frozen=True, kw_only=True)
class _Device:
    """A PCI device, with the NUMA nodes around it and the bridges above it.

    Attributes:
        pci_class, vendor, model: of its type, such as ``0302 [10de:20b0] [10de:144e] a1``.
        functions: its devices in the operating system: nvml0, mlx5_0, ib0.
    """

    bus_id: str
    pci_class: str
    vendor: str
    model: str
    functions: list[Element]
    nodes: tuple[int, ...]
    bridges: Bridges

    @property
    def is_virtual(self) -> bool:
        return is_virtual_function(self.vendor, self.model)


@dataclass(kw_only=True)
class _Found:
    numa_nodes: list[Element] = field(default_factory=list)
    cores: list[Element] = field(default_factory=list)
    threads: list[Element] = field(default_factory=list)
    devices: list[_Device] = field(default_factory=list)
    # The CPUs of all parts of the machine, those too that may not be used.
    placed: set[int] = field(default_factory=set)


def read(text: str, where: str) -> NodeMap:
    """The node map of an export. It describes one host, so it is a NodeMap rather than fabric records.

    Raises:
        HpctrainError: the text is no such export, or of hwloc 1, cut short, or without a NUMA node.
    """
    topology = parse(text, where, root="topology", remedy=_REMEDY)
    version = topology.get("version", "1").partition(".")[0]
    if version not in _OPENFABRICS:
        raise not_valid(topology.where, f"hwloc XML of version {version}, not 2 or 3", _REMEDY)
    found = _walk(topology)
    numa_nodes = _numa_nodes(found)
    if not numa_nodes:
        raise not_valid(topology.where, "no NUMA node in this file", _REMEDY)
    with_cores = {node.index for node in numa_nodes if node.cores or not node.complete}

    def numa(device: _Device) -> int | None:
        """The device's NUMA node, if only one is near. GPU memories, which are nodes without cores, do not count."""
        near = with_cores.intersection(device.nodes)
        return near.pop() if len(near) == 1 else None

    gpus = [device for device in found.devices if device.pci_class.startswith(_GPUS.get(device.vendor, "none"))]
    rdma = [device for device in found.devices if _rdma(device, _OPENFABRICS[version])]
    whole = any(not device.is_virtual for device in rdma)
    numbers = gpu_numbers([_number(gpu) for gpu in gpus], [gpu.bus_id for gpu in gpus])
    return node_map_of_tree(
        {
            Gpu(index=index, bus_id=gpu.bus_id, numa=numa(gpu)): gpu.bridges
            for index, gpu in zip(numbers, gpus, strict=True)
        },
        {
            replace(adapter, numa=numa(device), virtual=whole and device.is_virtual): device.bridges
            for device in found.devices
            for adapter in _adapters(device, _OPENFABRICS[version])
        },
        numa_nodes,
        where=topology.where,
        warnings=list(_restricted(topology, found.placed)),
    )


def _restricted(topology: Element, placed: set[int]) -> Iterator[str]:
    """A warning if hwloc ran inside a job that may use only a part of the machine, and so saw only that part."""
    for machine in topology.all("object"):
        seen, whole = (_set(machine, name) for name in ("cpuset", "complete_cpuset"))
        nodes_missing = _set(machine, "complete_nodeset") - _set(machine, "nodeset")
        # CPUs that are offline, as second threads with hyper-threading off, are in no part of the machine.
        if nodes_missing or placed & (whole - seen):
            yield (
                f"{topology.where}: written where {len(seen)} of the {len(whole)} CPUs may be used, so it has only "
                "these cores; lstopo --disallowed --of xml lists all"
            )


def _set(element: Element, name: str) -> set[int]:
    return set(cores_of_mask(element.get(name, ""), element.where))


def _walk(topology: Element) -> _Found:
    found = _Found()
    below: list[tuple[Element, tuple[int, ...], Bridges]] = [(topology, (), ())]
    while below:
        element, nodes, bridges = below.pop()
        kind = element.get("type", "")
        if "nodeset" in element.attrib:
            nodes = cores_of_mask(element.attrib["nodeset"], element.where)
        if kind == "NUMANode":
            found.numa_nodes.append(element)
        elif kind == "Core":
            found.cores.append(element)
        elif kind == "PU":
            found.threads.append(element)
        elif kind == "Bridge":
            bridges = (*bridges, element.get("pci_busid") or element.attribute("bridge_pci"))
        elif kind == "PCIDev":
            bus_id, identity = element.attribute("pci_busid"), element.get("pci_type", "")
            device = _Device(
                bus_id=bus_id,
                pci_class=identity[:4],
                vendor=identity[6:10],
                model=identity[11:15],
                functions=[child for child in element.all("object") if child.get("type") == "OSDev"],
                nodes=nodes,
                # Without bridges in the export, the devices that share one are unknown.
                bridges=bridges or (bus_id,),
            )
            found.devices.append(device)
        if kind not in ("Machine", "NUMANode"):
            found.placed |= _set(element, "complete_cpuset")
        below += [(child, nodes, bridges) for child in reversed(element.all("object"))]
    return found


def _numa_nodes(found: _Found) -> list[NumaNode]:
    """Every memory with its cores; of several memories of the same cores (DDR and HBM) the first has them.

    An export without cores does not show which hardware threads share one; without threads too, it shows only the
    CPUs of each memory.
    """
    memories = sorted(found.numa_nodes, key=lambda node: node.number("os_index"))
    beside = [cores_of_mask(node.attribute("cpuset"), node.where) for node in memories]
    if found.cores:
        masks = [cores_of_mask(core.attribute("cpuset"), core.where) for core in found.cores]
        free = {threads[0] for threads in masks if threads}
    elif found.threads:
        free = {cpu for pu in found.threads for cpu in cores_of_mask(pu.attribute("cpuset"), pu.where)}
    else:
        free = {cpu for cpus in beside for cpu in cpus}
    first_threads = []
    for cpus in beside:
        first_threads.append(tuple(cpu for cpu in cpus if cpu in free))
        free.difference_update(cpus)
    cores = list[tuple[int, ...] | None](first_threads) if found.cores else cores_of_nodes(first_threads)
    return [
        NumaNode(index=node.number("os_index"), cores=node_cores or (), complete=node_cores is not None)
        for node, node_cores in zip(memories, cores, strict=True)
    ]


def _number(gpu: _Device) -> int | None:
    """The driver's number."""
    found = [_NUMBER.fullmatch(function.get("name", "")) for function in gpu.functions]
    return next((int(match[1]) for match in found if match), None)


def _rdma(device: _Device, is_rdma: Callable[[int], bool]) -> list[Element]:
    """The RDMA devices of a PCI device. Versions without support for Slingshot list only its interface, hsn0."""
    found = [function for function in device.functions if is_rdma(function.number("osdev_type"))]
    if not found and link_layer_of_vendor(device.vendor, device.model) in LIBFABRIC:
        found = [each for each in device.functions if link_layer_of_name(each.attribute("name")) in LIBFABRIC]
    return found


def _adapters(device: _Device, is_rdma: Callable[[int], bool]) -> list[Adapter]:
    """The adapters of a PCI device: its RDMA devices, or the device itself if its kind has RDMA but no driver."""
    rdma = _rdma(device, is_rdma)
    of_vendor = link_layer_of_vendor(device.vendor, device.model)
    bare = of_vendor or link_layer(device.pci_class, ())
    if not rdma and bare in ("InfiniBand", *LIBFABRIC):
        return [Adapter(name=device.bus_id, bus_id=device.bus_id, numa=None, link_layer=bare)]
    adapters = []
    for function in rdma:
        ports = _ports(function)
        name = function.attribute("name")
        layer = of_vendor or layer_of(name, link_layer(device.pci_class, ports))
        # An active Ethernet port beside an InfiniBand port does not make the adapter active.
        used = [port for port in ports if port.lid] or ports
        states = [port.active for port in used if port.active is not None]
        adapters.append(
            Adapter(
                name=name,
                bus_id=device.bus_id,
                numa=None,
                link_layer=layer,
                active=any(states) if states else None,
            )
        )
    return adapters


def _ports(function: Element) -> list[Port]:
    """The adapter's ports, as far as hwloc lists them: ``Port1State`` and ``Port1LID``."""
    values: dict[str, dict[str, str]] = {}
    for info in function.all("info"):
        if match := _PORT.fullmatch(info.attribute("name")):
            values.setdefault(match[1], {})[match[2]] = info.get("value", "")
    return [
        Port(
            lid=int(lid, 16) if _LID.fullmatch(lid := port.get("LID", "")) else 0,
            active=port["State"] == _PORT_ACTIVE if "State" in port else None,
        )
        for port in values.values()
    ]
