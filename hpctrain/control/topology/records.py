"""The records that readers yield: plain facts in the words of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricNode:
    """A switch or a channel adapter.

    Attributes:
        guid: its node GUID, 16 hexadecimal digits in lower case.
        name: the description that it gives of itself; may be empty.
        ports: how many it has.
        device_id: the PCI device, None where the format has none.
        lid: of a switch's port 0; adapters have a LID a port (see Link).
        where: file and line.
    """

    kind: Literal["switch", "adapter"]
    guid: str
    name: str
    ports: int
    where: str
    device_id: int | None = None
    lid: int | None = None


class Link(NamedTuple):
    """One end of a cable, as seen by its node. A cable between two nodes that were both read occurs twice.

    A tuple, because a large fabric has hundreds of thousands, and nothing frozen is made faster.

    Attributes:
        guid, port: this end.
        peer, peer_port: the other end; None where nothing answered.
        lid: of this end's port if this end is an adapter.
        width: lanes, None where the format does not say.
        speed: of a lane: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR, XDR.
    """

    guid: str
    port: int
    where: str
    peer: str | None = None
    peer_port: int | None = None
    lid: int | None = None
    width: int | None = None
    speed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One entry of a switch's forwarding table: packets to ``lid`` leave through ``port``.

    Attributes:
        switch: the switch's GUID where the format gives it, else None.
        switch_lid: its LID.
    """

    switch: str | None
    switch_lid: int | None
    lid: int
    port: int
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchGroup:
    """A switch of a Slurm tree, or a block: names only, no ports.

    Attributes:
        switches: the switches below it.
        hosts: the hosts on it.
        speed: the link speed that the file states, in Slurm's own unit; None where it states none.
        block_sizes: of a block, the hosts of it and of each larger block, as far as the file states them; None for a
            switch and for a block of blocks.
    """

    name: str
    where: str
    switches: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    speed: int | None = None
    block_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """An irregularity that a reader skipped and the user should know about."""

    text: str
    where: str


Record = FabricNode | Link | Forward | SwitchGroup | Remark
