"""Reads the node map that ``--node`` names: from a file of any known tool, or of this machine."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.common.cluster.node_map import NodeMap
from hpctrain.common.files.regular import read_text
from hpctrain.control.topology.readers import hwloc, nccl, nvidia_smi

# NCCL's dump has some ten thousand bytes per host, and may hold many hosts.
_MOST_BYTES = 2**26
LIVE = "live"
# The root of hwloc's and of NCCL's files, after a declaration and what a launcher puts before each line.
_XML = re.compile(r"^(?P<prefix>[^<\n]*)(?:<[?!][^>\n]*>)*<(?P<root>topology|system)\b", re.MULTILINE)


def node_map_of(node: str) -> NodeMap:
    """The node map that ``--node`` names: from a file, or of this machine. A file that cannot be read is an error."""
    if node != LIVE:
        return read_node_map(Path(node))
    # Imported here because it loads pynvml, which reading a file does not need.
    from hpctrain.control.topology.live import this_node

    return this_node()


def read_node_map(path: Path) -> NodeMap:
    """The node map in the output of ``lstopo --of xml``, NCCL (``NCCL_TOPO_DUMP_FILE``) or ``nvidia-smi topo -m``.

    Raises:
        HpctrainError: the file cannot be read, or no such tool wrote it.
    """
    text = read_text(path, "node file", "lstopo --of xml writes such a file", limit=_MOST_BYTES, errors="replace")
    if found := _XML.search(text):
        text = _bare_xml(text, found)
    if found and found["root"] == "system":
        return nccl.read(text, str(path))
    return hwloc.read(text, str(path)) if text.lstrip().startswith("<") else nvidia_smi.read(text, str(path))


def _bare_xml(text: str, found: re.Match[str]) -> str:
    """The XML without what was printed before and after it, and without the prefix of each line, as of ``srun
    --label``. Lines keep their numbers.
    """
    begin = found.start("root") - 1
    root = "\n".join(line.removeprefix(found["prefix"]) for line in text[begin:].splitlines())
    return "\n" * text.count("\n", 0, begin) + root[: root.rfind(">") + 1]
