"""Generates the ``ibnetdiscover`` listing of a fat tree, for tests, benchmarks and what-if questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

_SWITCH_GUID = 0x2C90300000000000
_ADAPTER_GUID = 0xE09D730000000000


def fat_tree(
    *,
    hosts: int,
    rails: int = 1,
    leaf_down: int,
    leaf_up: int,
    levels: Literal[2, 3] = 2,
    pod_leaves: int | None = None,
    spine_up: int | None = None,
    speed: str = "NDR",
) -> str:
    """The listing of a fat tree whose hosts are named ``node0001`` … with adapters ``mlx5_0`` …

    A leaf connects one rail of ``leaf_down`` hosts, so that every adapter of a host is on a different leaf, and has one
    cable to each of ``leaf_up`` spines. With 3 levels the spines belong to a pod of ``pod_leaves`` leaves, and each has
    one cable to each of ``spine_up`` cores, which the spines in the same place of all pods share.

    Args:
        hosts: the number of hosts; the last leaves are not full if it is no multiple of ``leaf_down``.
        rails: the number of adapters of each host.
        leaf_down, leaf_up: ports of a leaf to hosts and to spines; oversubscribed where ``leaf_down`` is larger.
        pod_leaves: the leaves of a pod, at most all leaves; by default ``leaf_down``.
        spine_up: ports of a spine to cores; by default ``pod_leaves``, which is non-blocking.
        speed: the speed of a lane; every cable has four lanes.
    """
    leaf_count = -(-hosts // leaf_down) * rails
    pod = min(pod_leaves or leaf_down, leaf_count) if levels == 3 else leaf_count
    cores_of_spine = (spine_up or pod) if levels == 3 else 0
    leaves = [_Node("S", f"leaf{number + 1:03d}") for number in range(leaf_count)]
    adapters = [_Node("H", f"node{host + 1:04d} mlx5_{rail}") for host in range(hosts) for rail in range(rails)]
    spines = [_Node("S", f"spine{number + 1:03d}") for number in range(-(-leaf_count // pod) * leaf_up)]
    cores = [_Node("S", f"core{number + 1:03d}") for number in range(leaf_up * cores_of_spine)]
    for number, adapter in enumerate(adapters):
        host, rail = divmod(number, rails)
        leaves[host // leaf_down * rails + rail].join(adapter)
    for number, leaf in enumerate(leaves):
        for spine in spines[number // pod * leaf_up :][:leaf_up]:
            leaf.join(spine)
    for number, spine in enumerate(spines):
        for core in cores[number % leaf_up * cores_of_spine :][:cores_of_spine]:
            spine.join(core)
    return "".join(_listing([*leaves, *spines, *cores], adapters, speed))


@dataclass(slots=True)
class _Node:
    """A switch (``S``) or an adapter (``H``), with the node and port at the other end of each of its cables."""

    kind: Literal["S", "H"]
    name: str
    guid: str = ""
    lid: int = 0
    ports: list[tuple[_Node, int]] = field(default_factory=list)

    def join(self, other: _Node) -> None:
        """Lay a cable from the next free port of one to the next free port of the other."""
        self.ports.append((other, len(other.ports) + 1))
        other.ports.append((self, len(self.ports)))


def _listing(switches: list[_Node], adapters: list[_Node], speed: str) -> Iterator[str]:
    most = max(len(switch.ports) for switch in switches)
    for lid, node in enumerate([*switches, *adapters], start=1):
        node.lid = lid
        # GUIDs are 16 apart, which leaves room for the port GUIDs of adapters with several ports.
        node.guid = f"{(_SWITCH_GUID if node.kind == 'S' else _ADAPTER_GUID) + lid * 16:016x}"
    yield "#\n# Topology file: a generated fat tree\n#\n"
    for switch in switches:
        yield (
            f"\nvendid=0x2c9\ndevid=0xd2f2\nsysimgguid=0x{switch.guid}\nswitchguid=0x{switch.guid}({switch.guid})\n"
            f'Switch\t{most} "S-{switch.guid}"\t\t# "{switch.name}" enhanced port 0 lid {switch.lid} lmc 0\n'
        )
        for port, (peer, peer_port) in enumerate(switch.ports, start=1):
            guid = f"({peer.guid}) " if peer.kind == "H" else ""
            end = f'"{peer.kind}-{peer.guid}"[{peer_port}]{guid}'
            yield f'[{port}]\t{end}\t\t# "{peer.name}" lid {peer.lid} 4x{speed}\n'
    for adapter in adapters:
        ((leaf, leaf_port),) = adapter.ports
        yield (
            f"\nvendid=0x2c9\ndevid=0x1021\nsysimgguid=0x{adapter.guid}\ncaguid=0x{adapter.guid}\n"
            f'Ca\t1 "H-{adapter.guid}"\t\t# "{adapter.name}"\n'
            f'[1]({adapter.guid}) \t"S-{leaf.guid}"[{leaf_port}]\t\t'
            f'# lid {adapter.lid} lmc 0 "{leaf.name}" lid {leaf.lid} 4x{speed}\n'
        )
