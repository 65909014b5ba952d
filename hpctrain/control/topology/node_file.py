"""Reads the node map that ``--node`` names: from a file of any known tool, or of this machine."""

from __future__ import annotations

from pathlib import Path

from hpctrain.common.cluster.node_map import NodeMap
from hpctrain.common.files.regular import read_text
from hpctrain.control.topology.readers import hwloc, nvidia_smi

# hwloc's XML of a host with many devices has some hundred thousand bytes.
_MOST_BYTES = 2**26
LIVE = "live"


def node_map_of(node: str) -> NodeMap:
    """The node map that ``--node`` names: from a file, or of this machine. A file that cannot be read is an error."""
    if node != LIVE:
        return read_node_map(Path(node))
    # Imported here because it loads pynvml, which reading a file does not need.
    from hpctrain.control.topology.live import this_node

    return this_node()


def read_node_map(path: Path) -> NodeMap:
    """The node map in the output of ``lstopo --of xml`` or ``nvidia-smi topo -m``.

    Raises:
        HpctrainError: the file cannot be read, or no such tool wrote it.
    """
    text = read_text(path, "node file", "lstopo --of xml writes such a file", limit=_MOST_BYTES, errors="replace")
    read = hwloc.read if text.lstrip().startswith("<") else nvidia_smi.read
    return read(text, str(path))
