"""What ``ibnetdiscover`` would print of cables that a test names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


def listing(cables: Iterable[tuple[str, str]], *, alone: Iterable[str] = ()) -> str:
    """The listing of cables (end, end), ports in their order.

    A name of two words, "host device", is an adapter; any other is a switch. ``alone`` are nodes without a cable.
    """
    ports: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for one, other in cables:
        ports[one].append((other, len(ports[other]) + 1))
        ports[other].append((one, len(ports[one])))
    names = [*dict.fromkeys([*ports, *alone])]
    # The driver's place in a GUID, and a number that leaves room for the ports.
    guid = {name: f"{0x2C90300000000000 + 16 * number:016x}" for number, name in enumerate(names, start=1)}
    lid = {name: number for number, name in enumerate(names, start=1)}
    text = "#\n# Topology file: written by a test\n#\n"
    for name in names:
        text += "\nvendid=0x2c9\ndevid=0xd2f2\n"
        if _is_adapter(name):
            text += f'caguid=0x{guid[name]}\nCa\t{len(ports[name])} "H-{guid[name]}"\t\t# "{name}"\n'
        else:
            text += f"switchguid=0x{guid[name]}({guid[name]})\n"
            text += f'Switch\t64 "S-{guid[name]}"\t\t# "{name}" enhanced port 0 lid {lid[name]} lmc 0\n'
        for port, (peer, peer_port) in enumerate(ports[name], start=1):
            peer_guid = f"({guid[peer]}) " if _is_adapter(peer) else ""
            end = f'"{"H" if _is_adapter(peer) else "S"}-{guid[peer]}"[{peer_port}]{peer_guid}'
            own = f"({guid[name]})" if _is_adapter(name) else ""
            words = f'lid {lid[name]} lmc 0 "{peer}" lid {lid[peer]}' if own else f'"{peer}" lid {lid[peer]}'
            text += f"[{port}]{own} \t{end}\t\t# {words} 4xNDR\n"
    return text


def _is_adapter(name: str) -> bool:
    return " " in name
