"""The output of ``ibroute``, of ``dump_lfts`` and of ``dump_fts`` (infiniband-diags): linear forwarding tables."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpctrain.topology.readers.listing import Listing
from hpctrain.topology.records import Forward, Record

_SWITCH = re.compile(
    r"Unicast lids \[0x[0-9a-f]{1,4}-0x(?P<last>[0-9a-f]{1,4})\] of switch (?:Lid (?P<lid>[0-9]{1,5})|DR path .*?)"
    r" guid 0x(?P<guid>[0-9a-f]{16}) \(.*\):\s*"
)
_ENTRY = re.compile(r"0x([0-9a-f]{4})\s+([0-9]{3})\s+: \(.*\)\s*")
_COLUMNS = re.compile(r"\s*(?:Lid\s+Out\s+Destination|Port\s+Info)\s*")
_END = re.compile(r"([0-9]{1,5}) (?:valid )?lids dumped\s*")
# The port that a table holds for a LID to which there is no way.
_DROP = 255


def read(text: str, where: str) -> Iterator[Record]:
    """The entries of all tables, in their order.

    Lines that the tools print about themselves or to their error output are passed over with one remark; a table
    that ``ibroute`` ended with an error is taken as far as it goes.

    Raises:
        HpctrainError: the text holds no table, a line of it is damaged, or a table is cut off: it has fewer entries
            than its last line says, or neither that line nor an error ends it.
    """
    listing = Listing(text, where, "dump_lfts")
    switch: re.Match[str] | None = None
    entries, ended, seen = 0, True, False
    for number, line in listing:
        if entry := _ENTRY.fullmatch(line):
            if switch is None:
                raise listing.fault(number, "an entry before the switch that it belongs to", line)
            entries += 1
            port = int(entry[2])
            if port < _DROP:
                seen = True
                yield Forward(
                    switch=switch["guid"],
                    switch_lid=int(switch["lid"]) if switch["lid"] else None,
                    lid=int(entry[1], 16),
                    port=port,
                    where=f"{where}:{number}",
                )
        elif found := _SWITCH.fullmatch(line):
            _check_end(listing, number, ended)
            switch, entries, ended = found, 0, False
        elif end := _END.fullmatch(line):
            if int(end[1]) != entries:
                raise listing.fault(number, f"the table says {end[1]} entries and has {entries}")
            ended = True
        elif line.startswith(("0x", "Unicast")):
            raise listing.fault(number, "not an entry of a forwarding table", line)
        elif line.strip() and not _COLUMNS.fullmatch(line):
            listing.pass_over(number, line)
            ended = ended or entries > 0
    if not seen:
        raise listing.fault(1, "no entry of a forwarding table in it: not the output of ibroute or dump_lfts")
    _check_end(listing, listing.last, ended)
    yield from listing.remarks()


def _check_end(listing: Listing, number: int, ended: bool) -> None:
    if not ended:
        raise listing.fault(number, "the forwarding table before this line is cut off")
