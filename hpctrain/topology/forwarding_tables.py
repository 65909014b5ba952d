"""Forwarding entries joined to the switches of a fabric."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpctrain.errors import HpctrainError
from hpctrain.topology.cabling import Found, counted, some
from hpctrain.topology.fabric import NO_PORT, Fabric


def with_tables(fabric: Fabric, found: Found) -> Fabric:
    """The fabric with the tables of ``found.forwards``; a switch is known by its LID.

    Raises:
        HpctrainError: no table belongs to a switch of the fabric: the files are of different fabrics.
    """
    switches = np.flatnonzero((fabric.level != 0) & (fabric.host < 0)).tolist()
    by_lid = {int(fabric.lid[node]): node for node in switches if fabric.lid[node]}
    by_guid = {
        guid: by_lid[node.lid] for guid, node in found.nodes.items() if node.kind == "switch" and node.lid in by_lid
    }
    row: dict[int, int] = {}
    strangers: dict[str, None] = {}
    rows, lids, ports = [], [], []
    for entry in found.forwards:
        node = by_guid.get(entry.switch or "", by_lid.get(entry.switch_lid or 0))
        if node is None:
            strangers[entry.switch or f"LID {entry.switch_lid}"] = None
            continue
        rows.append(row.setdefault(node, len(row)))
        lids.append(entry.lid)
        ports.append(entry.port)
    if not rows:
        raise HpctrainError(
            f"{found.forwards[0].where}: the forwarding tables are of switches that {found.where} does not have: "
            + some(list(strangers)),
            "write both files on one fabric, at one time",
        )
    tables = np.full((len(row), max(*lids, int(fabric.lid.max())) + 1), NO_PORT, np.int16)
    tables[rows, lids] = ports
    warnings = list(fabric.warnings)
    if strangers:
        warnings.append(counted("forwarding tables of unknown switches, left out", list(strangers)))
    if without := [fabric.names[node] for node in by_lid.values() if node not in row]:
        warnings.append(counted("switches without a forwarding table", without))
    return replace(fabric, tables=tables, table_switches=np.array(list(row), np.int32), warnings=tuple(warnings))
