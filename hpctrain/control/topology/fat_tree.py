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

    leaves = [_Node("switch", f"leaf{number + 1:03d}") for number in range(leaf_count)]
    adapters = []
    for host in range(hosts):
        for rail in range(rails):
            adapter = _Node("adapter", f"node{host + 1:04d} mlx5_{rail}")
            leaves[host // leaf_down * rails + rail].join(adapter)
            adapters.append(adapter)
    spines = [_Node("switch", f"spine{number + 1:03d}") for number in range(-(-leaf_count // pod) * leaf_up)]
    for number, leaf in enumerate(leaves):
        for place in range(leaf_up):
            leaf.join(spines[number // pod * leaf_up + place])
    cores: list[_Node] = []
    if levels == 3:
        up = spine_up or pod
        cores = [_Node("switch", f"core{number + 1:03d}") for number in range(leaf_up * up)]
        for number, spine in enumerate(spines):
            for place in range(up):
                spine.join(cores[number % leaf_up * up + place])
    return "".join(_listing([*leaves, *spines, *cores], adapters, speed))


@dataclass(slots=True)
class _Node:
    kind: Literal["switch", "adapter"]
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
        node.guid = f"{(_SWITCH_GUID if node.kind == 'switch' else _ADAPTER_GUID) + lid * 16:016x}"
    yield "#\n# Topology file: a generated fat tree\n#\n"
    for switch in switches:
        yield (
            f"\nvendid=0x2c9\ndevid=0xd2f2\nsysimgguid=0x{switch.guid}\nswitchguid=0x{switch.guid}({switch.guid})\n"
            f'Switch\t{most} "S-{switch.guid}"\t\t# "{switch.name}" enhanced port 0 lid {switch.lid} lmc 0\n'
        )
        for port, (peer, peer_port) in enumerate(switch.ports, start=1):
            end = (
                f'"S-{peer.guid}"[{peer_port}]'
                if peer.kind == "switch"
                else f'"H-{peer.guid}"[{peer_port}]({peer.guid}) '
            )
            yield f'[{port}]\t{end}\t\t# "{peer.name}" lid {peer.lid} 4x{speed}\n'
    for adapter in adapters:
        ((leaf, leaf_port),) = adapter.ports
        yield (
            f"\nvendid=0x2c9\ndevid=0x1021\nsysimgguid=0x{adapter.guid}\ncaguid=0x{adapter.guid}\n"
            f'Ca\t1 "H-{adapter.guid}"\t\t# "{adapter.name}"\n'
            f'[1]({adapter.guid}) \t"S-{leaf.guid}"[{leaf_port}]\t\t'
            f'# lid {adapter.lid} lmc 0 "{leaf.name}" lid {leaf.lid} 4x{speed}\n'
        )
