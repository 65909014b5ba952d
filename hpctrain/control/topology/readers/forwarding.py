"""The output of ``ibroute``, ``dump_lfts`` and ``dump_fts`` (infiniband-diags): linear forwarding tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from hpctrain.control.topology.readers.listing import Listing
from hpctrain.control.topology.records import Forward, Record

_SWITCH = re.compile(
    r"Unicast lids \[0x[0-9a-f]{1,4}-0x[0-9a-f]{1,4}\] of switch "
    r"(?:Lid (?P<lid>[0-9]{1,5})|DR path .*?) guid 0x(?P<guid>[0-9a-f]{16}) \(.*\):\s*"
)
_HEADING = re.compile(r"^Unicast", re.MULTILINE)
# ibroute -n leaves the destination out.
_ENTRY = re.compile(r"0x([0-9a-f]{4})\s+([0-9]{3})\s+(?:: \(.*\)\s*)?")
_COLUMNS = re.compile(r"\s*(?:Lid\s+Out\s+Destination|Port\s+Info)\s*")
_END = re.compile(r"([0-9]{1,5}) valid lids dumped\s*")
# The port of a table's entries for LIDs that cannot be reached.
_DROP = 255


def read(text: str, where: str) -> Iterator[Record]:
    """The entries of all tables, in their order.

    Lines that the tools print about themselves or to their error output are skipped with one remark; of a table that
    ``ibroute`` ended with an error, the entries before it are used.

    Raises:
        HpctrainError: the text holds no table, a line of it is damaged, or a table is cut off: it has fewer entries
            than its last line says, or neither that line nor an error ends it.
    """
    # ibroute queries one switch, and dump_lfts all of them.
    several = len(list(islice(_HEADING.finditer(text), 2))) > 1
    listing = Listing(text, where, "dump_lfts" if several else "ibroute LID")
    table: _Table | None = None
    has_entries = False
    for number, line in listing:
        if entry := _ENTRY.fullmatch(line):
            if table is None:
                raise listing.damaged("an entry before the switch that it belongs to", number, line)
            table.entries += 1
            port = int(entry[2])
            if port < _DROP:
                has_entries = True
                yield Forward(
                    switch=table.guid, switch_lid=table.lid, lid=int(entry[1], 16), port=port, where=f"{where}:{number}"
                )
        elif heading := _SWITCH.fullmatch(line):
            _check_end(listing, number, table)
            table = _Table(heading["guid"], int(heading["lid"]) if heading["lid"] else None)
        else:
            _other(listing, number, line, table)
    if not has_entries:
        raise listing.foreign("entry of a forwarding table")
    _check_end(listing, listing.last, table)
    yield from listing.remarks()


@dataclass(slots=True)
class _Table:
    guid: str
    lid: int | None
    entries: int = 0
    ended: bool = False


def _other(listing: Listing, number: int, line: str, table: _Table | None) -> None:
    """A line that is no entry and no heading: the end of a table, the names of its columns, or noise."""
    if end := _END.fullmatch(line):
        if table is None or int(end[1]) != table.entries:
            raise listing.damaged(
                f"{table.entries if table else 0} entries before the line that counts them", number, line
            )
        table.ended = True
    elif line.startswith(("0x", "Unicast")):
        raise listing.damaged("not an entry of a forwarding table", number, line)
    elif line.strip() and not _COLUMNS.fullmatch(line):
        listing.pass_over(number, line)
        if table and table.entries:
            table.ended = True


def _check_end(listing: Listing, number: int, table: _Table | None) -> None:
    if table and not table.ended:
        raise listing.damaged(f"the forwarding table of switch {table.guid} is cut off before this line", number)
