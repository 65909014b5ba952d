"""Reads the files of a fabric, and recognises the tool that wrote each by its content."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import read_text
from hpctrain.control.topology.readers import forwarding, ibnetdiscover, slurm
from hpctrain.control.topology.records import Record

Reader = Callable[[str, str], Iterator[Record]]

# For each format, the beginning of a line that no other format has.
_FORMATS: dict[str, tuple[str, Reader]] = {
    "ibnetdiscover": (r'(?:switchguid|caguid)=|(?:Switch|Ca)\s*[0-9]+\s*"|# Topology file', ibnetdiscover.read),
    "ibnetdiscover -p": (r"(?:SW|CA|RT) +[0-9]+ +[0-9]+ 0x", ibnetdiscover.read_ports),
    "topology.conf or scontrol show topology": (
        r"\s*(?i:SwitchName|BlockName|BlockSizes|AggregatedBlock)\s*=",
        slurm.read,
    ),
}
_LINES = [(re.compile(f"^(?:{line})", re.MULTILINE), reader) for line, reader in _FORMATS.values()]
# Room for a hundred thousand ports with names of hundreds of bytes.
_MOST_BYTES = 2**28


def read_records(paths: Sequence[Path], routes: Path | None = None) -> Iterator[Record]:
    """The records of a fabric's files and its forwarding tables.

    Args:
        paths: a file in one of the formats above, or one file per subnet.
        routes: a folder of files that ``ibroute`` wrote, or one file of ``dump_lfts``.

    Raises:
        HpctrainError: a file cannot be read or is of no known format.
    """
    for path in paths:
        text = _text(path)
        yield from reader_of(text, str(path))(text, str(path))
    if routes is None:
        return
    files = sorted(file for file in routes.iterdir() if file.is_file()) if routes.is_dir() else [routes]
    if not files:
        raise HpctrainError(
            "HT-fabric-unknown-format",
            "{path}: an empty folder",
            "it should hold the output of ibroute of each switch",
            path=routes,
        )
    for file in files:
        yield from forwarding.read(_text(file), str(file))


def reader_of(text: str, where: str) -> Reader:
    """The reader for a text; one of no known format is an error."""
    for line, reader in _LINES:
        if line.search(text):
            return reader
    kind = "an empty file" if not text.strip() else "a binary file" if "\0" in text else "a file of no known format"
    raise HpctrainError(
        "HT-fabric-unknown-format",
        "{where}: {found}",
        f"valid: the output of {', '.join(_FORMATS)}; forwarding tables are for --routes",
        where=where,
        found=kind,
    )


def _text(path: Path) -> str:
    hint = f"valid: the output of {', '.join(_FORMATS)}"
    # A node's description may contain any byte.
    return read_text(path, "fabric file", hint, limit=_MOST_BYTES, errors="replace")
