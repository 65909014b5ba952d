"""Reads hostfiles of Open MPI, Hydra and ``SLURM_HOSTFILE``."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from hpctrain.cluster.host_list import MOST_HOSTS, HostSlots, add_slots, expand_hosts
from hpctrain.errors import HpctrainError

_SLOTS = r"[1-9]\d{0,4}"
_LINE = re.compile(
    rf"(?P<hosts>[^\s:=]+)(?::(?P<hydra>{_SLOTS}))?(?:\s+slots\s*=\s*(?P<slots>{_SLOTS}))?(?:\s+max_slots\s*=\s*{_SLOTS})?",
    re.ASCII,
)
_HINT = "a line is HOST, HOST slots=N [max_slots=M], or HOST:N"
# A line for each rank of the largest machines that there are.
_MOST_BYTES = 16 * 2**20


def read_hostfile(path: Path) -> HostSlots:
    """The hosts of a file, in its order, with their slots.

    ``HOST slots=N [max_slots=M]`` is Open MPI's form (``max_slots`` is a limit for ranks beyond the slots, which no
    run here starts), ``HOST:N`` Hydra's. Lines of names alone are Slurm's form where names repeat: a line a rank.
    After ``#`` is a comment.

    Raises:
        HpctrainError: it cannot be read, is empty, has a line of another form, or two numbers of slots for one host;
            names file and line.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1).decode()
    except OSError as error:
        raise HpctrainError(
            f"cannot read {path}: {error.strerror}", "--hostfile FILE lists one host per line"
        ) from error
    except UnicodeDecodeError as error:
        raise HpctrainError(f"{path} is not text: {error.reason}", _HINT) from error
    if len(text) > _MOST_BYTES:
        raise HpctrainError(f"{path} is larger than {_MOST_BYTES >> 20} MiB", _HINT)
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, name: str) -> HostSlots:
    """The hosts in a file's text; ``name`` names the file in messages. Raises as :func:`read_hostfile`."""
    hosts: HostSlots = {}
    alone: Counter[str] = Counter()
    for number, line in enumerate(text.split("\n"), 1):
        content = line.partition("#")[0].strip()
        if content:
            where = f"{name}:{number}"
            names, slots = _line(content, where)
            for host in names:
                add_slots(hosts, host, slots, where)
            alone.update(names if slots is None else ())
        if len(hosts) > MOST_HOSTS:
            raise HpctrainError(f"{name} has more than {MOST_HOSTS} hosts")
    if not hosts:
        raise HpctrainError(f"{name} names no host", _HINT)
    if max(alone.values(), default=1) > 1:
        return {**hosts, **alone}
    return hosts


def _line(content: str, where: str) -> tuple[tuple[str, ...], int | None]:
    match = _LINE.fullmatch(content)
    if match is None or (match["hydra"] and match["slots"]):
        shown = content if len(content) <= 60 else f"{content[:60]}…"
        raise HpctrainError(f"{where}: {shown!r} is not a host with its slots", _HINT)
    slots = match["hydra"] or match["slots"]
    return expand_hosts(match["hosts"], where), int(slots) if slots else None
