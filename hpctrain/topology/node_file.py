"""Reads a node map from a file of any known tool."""

from __future__ import annotations

from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.topology.node_map import NodeMap
from hpctrain.topology.readers import hwloc, nccl, nvidia_smi


def read_node_map(path: Path) -> NodeMap:
    """The node map in the output of ``lstopo --of xml``, NCCL (``NCCL_TOPO_DUMP_FILE``) or ``nvidia-smi topo -m``.

    Args:
        path: ``FILE``, or ``FILE@HOST`` for one of the hosts in a file of NCCL's.

    Raises:
        HpctrainError: it cannot be read, or is none of these.
    """
    host = None
    if "@" in path.name and not path.exists():
        name, _, host = str(path).rpartition("@")
        path = Path(name)
    try:
        text = path.read_text("utf-8-sig", errors="replace")
    except OSError as error:
        raise HpctrainError(f"cannot read {path}: {error.strerror}", "lstopo --of xml writes such a file") from error
    if text.lstrip().startswith("<") and "<system" in text:
        return nccl.read(text, str(path), host)
    if host is not None:
        raise HpctrainError(f"{path} is of one host", f"leave @{host} out")
    return hwloc.read(text, str(path)) if text.lstrip().startswith("<") else nvidia_smi.read(text, str(path))
