"""``nvidia-smi topo -m``: a matrix of distance classes, CPU and NUMA affinity, and a legend of the adapters' names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpctrain.common.cluster.adapter_kinds import link_layer_of_name
from hpctrain.common.cluster.cores import cores_of_list, cores_of_nodes
from hpctrain.common.cluster.node_map import PCI_CLASSES, Adapter, Gpu, NodeMap, NumaNode, checked
from hpctrain.common.errors import HpctrainError

_REMEDY = "write it on the host with: nvidia-smi topo -m > node.txt; for other GPUs, lstopo --of xml node.xml"
# The header is underlined even in a file, and terminals add colours and erasures.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\([0-9A-B])")
_LEGEND = re.compile(r"\s*(NIC\d+):\s+(\S+)\s*")
# Where a GPU's memory is a NUMA node too, the first node of the list has the CPUs: 0,2-17.
_NUMA = re.compile(r"([0-9]{1,4})(?:,[0-9,-]*)?")
_NUMBERED = re.compile(r"NIC\d+")
_UNKNOWN = "N/A"
# The columns' names are no device names, so no rank is restricted to them.
_NO_LEGEND = "{}: no NIC Legend, so the adapters' device names are not known and no rank is restricted to any"


# The cells of a row, and where it is.
_Row = tuple[list[str], str]


def read(text: str, where: str) -> NodeMap:
    """The node map of a matrix. It describes one host, so it is a NodeMap rather than fabric records.

    The format has no bus IDs and no link layers: an adapter counts as Ethernet only where its name says so. NUMA
    nodes are those near a GPU.

    Raises:
        HpctrainError: there is no such matrix, or its rows do not fit its header.
    """
    lines = [(f"{where}:{number}", _ESCAPES.sub("", line)) for number, line in enumerate(text.splitlines(), start=1)]
    start = next((i for i, (_, line) in enumerate(lines) if line.split()[:1] == ["GPU0"]), None)
    if start is None:
        raise HpctrainError(
            "HT-node-file-not-valid",
            "{where}: no header line that starts with GPU0",
            f"{_REMEDY}; lstopo --of xml and NCCL_TOPO_DUMP_FILE write other files that are read",
            where=where,
        )
    header, line = lines[start]
    devices, affinities = _header(header, line)
    place, last = lines[-1]
    name = next(iter(last.replace(":", " ").split()), "")
    if name in devices and not text.endswith("\n"):
        # Nothing else would show what is missing at the end of this row, or of this line of the legend.
        raise _unfit(place, name)
    rows = _rows(devices, lines[start + 1 :], header)
    gpus = [name for name in devices if _is_gpu(name)]
    cells = [(rows[gpu][0][len(devices) :], rows[gpu][1]) for gpu in gpus]
    numa_nodes, numa_of_gpu = _numa_nodes(cells, affinities)
    names = _adapters(devices, lines, header)
    # An adapter with two ports may be listed for each.
    adapters = dict.fromkeys(
        (name, tuple(rows[gpu][0][devices.index(column)] for gpu in gpus)) for column, name in names.items()
    )
    return checked(
        NodeMap(
            gpus=tuple(
                Gpu(index=int(gpu.removeprefix("GPU")), bus_id=None, numa=numa)
                for gpu, numa in zip(gpus, numa_of_gpu, strict=True)
            ),
            adapters=tuple(
                Adapter(
                    name=name,
                    bus_id=None,
                    numa=_numa_near(distances, numa_of_gpu),
                    link_layer=link_layer_of_name(name),
                )
                for name, distances in adapters
            ),
            numa_nodes=numa_nodes,
            gpu_adapter=tuple(tuple(distances_of[row] for _, distances_of in adapters) for row in range(len(gpus))),
            warnings=(_NO_LEGEND.format(where),) if any(map(_is_nameless, names.values())) else (),
            whole=False,
        ),
        where,
    )


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"GPU(0|[1-9][0-9]{0,3})", name) is not None


def _header(where: str, line: str) -> tuple[list[str], tuple[str, ...]]:
    """The devices of the columns, and which affinities follow them."""
    columns, *affinities = re.split(r"\b(CPU Affinity|NUMA Affinity|GPU NUMA ID)\b", line)
    devices = columns.split()
    twice = [name for name in devices if devices.count(name) > 1]
    if twice:
        raise _unfit(where, twice[0])
    return devices, tuple(affinities[::2])


def _rows(devices: list[str], lines: Sequence[tuple[str, str]], header: str) -> dict[str, _Row]:
    """The cells of each device's row: its distances in the order of the header, then its affinities.

    Refuses a row with too few cells, with X anywhere but on the diagonal, or with NVLinks to an adapter.
    """
    rows: dict[str, _Row] = {}
    for where, line in lines:
        name, *cells = line.split() or [""]
        if name not in devices:
            continue
        if name in rows or len(cells) < len(devices):
            raise _unfit(where, name)
        for column, cell in zip(devices, cells, strict=False):
            links = re.fullmatch(r"NV[1-9]\d*", cell) and _is_gpu(name) and _is_gpu(column)
            if cell != "X" if name == column else not (links or cell in PCI_CLASSES):
                raise HpctrainError(
                    "HT-node-file-not-valid",
                    "{where}: {value!r} is not a distance between {row} and {column}",
                    f"valid: X for itself, NV and a number between GPUs, {', '.join(PCI_CLASSES)}; {_REMEDY}",
                    where=where,
                    value=cell[:40],
                    row=name,
                    column=column,
                )
        rows[name] = cells, where
    if missing := [name for name in devices if name not in rows]:
        raise _unfit(header, missing[0])
    return rows


def _unfit(where: str, part: str) -> HpctrainError:
    return HpctrainError(
        "HT-node-file-not-valid",
        "{where}: {part!r} is missing, cut off, or there twice: not one whole matrix of one host",
        _REMEDY,
        where=where,
        part=part,
    )


def _numa_nodes(gpus: Sequence[_Row], affinities: Sequence[str]) -> tuple[tuple[NumaNode, ...], list[int | None]]:
    """The NUMA nodes near GPUs, and that of each GPU.

    GPUs of one affinity are on one node. Older drivers, and machines whose GPUs are near several nodes, give it no
    number: it gets a negative one. Machines that number the cores of two sockets alternately have a list of single
    CPUs, which is cut after six (0,2,4,6,8,10), and would not show which CPUs share a core if it were not.
    """
    found: dict[tuple[str, int | None], int] = {}
    cpus_of: dict[int, tuple[int, ...]] = {}
    numa_of_gpu: list[int | None] = []
    for words, where in gpus:
        # A blank cell leaves fewer words than columns, which could be of any column.
        cells = dict(zip(affinities, words, strict=False)) if len(words) >= len(affinities) else {}
        cpus, numa = cells.get("CPU Affinity", _UNKNOWN), _NUMA.fullmatch(cells.get("NUMA Affinity", _UNKNOWN))
        number = int(numa[1]) if numa else None
        if cpus == _UNKNOWN:
            numa_of_gpu.append(number)
            continue
        if (cpus, number) not in found:
            taken = set(found.values())
            index = number if number is not None and number not in taken else -1 - len(found)
            found[cpus, number] = index
            cpus_of[index] = () if cpus.endswith((",", "-")) else cores_of_list(cpus, where)
        numa_of_gpu.append(found[cpus, number])
    cores = dict(zip(cpus_of, cores_of_nodes([*cpus_of.values()]), strict=True))
    nodes = [NumaNode(index=index, cores=cores[index] or (), complete=bool(cores[index])) for index in sorted(cores)]
    return tuple(nodes), numa_of_gpu


def _numa_near(distances: Sequence[str], numa_of_gpu: Sequence[int | None]) -> int | None:
    """The NUMA node of an adapter: that of the GPUs nearer than SYS, if they share one."""
    near = {numa for distance, numa in zip(distances, numa_of_gpu, strict=True) if distance != "SYS"}
    return near.pop() if len(near) == 1 else None


def _adapters(devices: Sequence[str], lines: Sequence[tuple[str, str]], header: str) -> dict[str, str]:
    """The name of each adapter by its column: from the legend, or the column's own where drivers print no legend."""
    legend = {match[1]: match[2] for _, line in lines if (match := _LEGEND.fullmatch(line))}
    columns = [name for name in devices if not _is_gpu(name)]
    unnamed = [name for name in columns if _is_nameless(name) and name not in legend]
    if unnamed and legend:
        raise _unfit(header, unnamed[0])
    return {name: legend.get(name, name) for name in columns}


def _is_nameless(name: str) -> bool:
    return _NUMBERED.fullmatch(name) is not None
