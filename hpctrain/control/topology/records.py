"""The records that readers yield, not yet checked against each other, and the bandwidth of a link from its speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricNode:
    """A switch or a channel adapter.

    Attributes:
        guid: the node GUID, 16 hexadecimal digits in lower case.
        name: the node's description of itself; may be empty.
        device_id: the PCI device, None where the format has none.
        lid: the LID of a switch's port 0; an adapter's LIDs are those of its ports (see :class:`Link`).
    """

    kind: Literal["switch", "adapter"]
    guid: str
    name: str
    where: str
    device_id: int | None = None
    lid: int | None = None


class Link(NamedTuple):
    """One end of a cable, as seen by its node. A cable between two nodes that were both read occurs twice.

    A tuple, because a large fabric has hundreds of thousands, and no other immutable object is built faster.

    Attributes:
        peer, peer_port: the other end; None where nothing answered.
        lid: the LID of this port if this end is an adapter.
        width: the number of lanes, None where the format does not say.
        speed: the speed of a lane: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR, XDR.
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
        switches: the names of the switches directly below it.
    """

    name: str
    where: str
    switches: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """An irregularity that a reader skipped and the user should know about."""

    text: str
    where: str


Record = FabricNode | Link | Forward | SwitchGroup | Remark

# Payload of a lane in Gbit/s: the signalling rate less its line code (8b/10b up to QDR, 64b/66b up to EDR, 64b/66b
# with forward error correction from HDR on). InfiniBand Trade Association, InfiniBand Architecture Specification,
# volume 2, and its roadmap.
LANE_GBIT = {
    "SDR": 2.0,
    "DDR": 4.0,
    "QDR": 8.0,
    "FDR10": 10.0,
    "FDR": 14.0625 * 64 / 66,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}


def bandwidth(width: int | None, speed: str | None) -> float:
    """Payload in bytes per second and direction; NaN if width or speed is unknown."""
    if width is None or speed is None:
        return float("nan")
    return width * LANE_GBIT[speed] * 1e9 / 8
