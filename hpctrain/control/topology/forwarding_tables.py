"""Joins forwarding entries to the switches of a fabric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hpctrain.common.errors import HpctrainError, counted, some
from hpctrain.control.topology.cabling import Found
from hpctrain.control.topology.fabric import NO_PORT, Fabric


def with_tables(fabric: Fabric, found: Found, switches: Mapping[str, int]) -> Fabric:
    """The fabric with the tables of ``found.forwards``; a switch is known by its GUID, or by its LID where
    the table does not give one.

    Args:
        switches: the number of each switch by its GUID.

    Raises:
        HpctrainError: no table belongs to a switch of the fabric: the files are of different fabrics.
    """
    by_lid = {int(fabric.lid[node]): node for node in switches.values()}
    row: dict[int, int] = {}
    strangers: dict[str, None] = {}
    rows, lids, ports = [], [], []
    for entry in found.forwards:
        node = switches.get(entry.switch) if entry.switch else by_lid.get(entry.switch_lid or 0)
        if node is None:
            strangers[entry.switch or f"LID {entry.switch_lid}"] = None
            continue
        rows.append(row.setdefault(node, len(row)))
        lids.append(entry.lid)
        ports.append(entry.port)
    if not rows:
        raise HpctrainError(
            f"{found.forwards[0].where}: the forwarding tables belong to switches that {found.where} does not have: "
            + some(list(strangers)),
            "write both files on the same fabric, at the same time",
        )
    tables = np.full((len(row), max(*lids, int(fabric.lid.max())) + 1), NO_PORT, np.int16)
    tables[rows, lids] = ports
    warnings = list(fabric.warnings)
    if strangers:
        warnings.append(counted("forwarding tables of unknown switches, left out", list(strangers)))
    if without := [fabric.names[node] for node in switches.values() if node not in row]:
        warnings.append(counted("switches without a forwarding table", without))
    return replace(fabric, tables=tables, table_switches=np.array(list(row), np.int32), warnings=tuple(warnings))
