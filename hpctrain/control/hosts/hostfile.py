"""Reads hostfiles of Open MPI, Hydra and ``SLURM_HOSTFILE``.

A line means what Open MPI 4 and 5 and Hydra make of it, tried with Open MPI 5.0.11 and MPICH 5.0.2: a host named
again gets the new line's slots in addition, one where the line has no number. ``max-slots`` is passed over.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from hpctrain.common.cluster.host_list import MOST_HOSTS, HostSlots, add_slots, expand_hosts
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import read_text

_NUMBER = r"([1-9]\d{0,4})"
_LINE = re.compile(
    rf"([^\s@:^+][^\s@:]*)(?::{_NUMBER}|\s+slots\s*=\s*{_NUMBER}(?:\s+max[-_]slots\s*=\s*\d+)?)?", re.ASCII
)
_HINT = "a line is HOST, HOST slots=N [max-slots=M], or HOST:N; users and ports stand in ~/.ssh/config"
# Room for one line per rank of the largest machines.
_MOST_BYTES = 16 * 2**20


def read_hostfile(path: Path) -> HostSlots:
    """The hosts of a file with their slots, in its order.

    ``HOST slots=N [max-slots=M]`` is Open MPI's form (``max-slots`` is a limit for ranks beyond the slots, which no run
    here starts), ``HOST:N`` Hydra's. Lines of names alone are Slurm's form where names repeat: a line a rank. After
    ``#`` or ``//`` is a comment.

    Raises:
        HpctrainError: it cannot be read, is empty, has a line of another form, or says the slots of a host again;
            names file and line.
    """
    return parse_hostfile(read_text(path, "hostfile", _HINT, limit=_MOST_BYTES), str(path))


def read_pe_hostfile(path: Path) -> HostSlots:
    """The hosts of Grid Engine's ``PE_HOSTFILE`` with their slots: lines of host, slots, queue and processors.

    Raises:
        HpctrainError: as :func:`read_hostfile`.
    """
    lines = read_text(path, "hostfile of Grid Engine", "see sge_pe(5)", limit=_MOST_BYTES).splitlines()
    return parse_hostfile("\n".join(":".join(line.split()[:2]) for line in lines), str(path))


def parse_hostfile(text: str, name: str) -> HostSlots:
    """The hosts in a file's text; ``name`` names the file in messages. Raises as :func:`read_hostfile`."""
    hosts: HostSlots = {}
    alone = Counter[str]()
    for number, raw in enumerate(text.split("\n"), 1):
        content = re.split(r"#|//", raw, maxsplit=1)[0].strip()
        if content:
            _add_line(hosts, alone, content, f"{name}:{number}")
        if len(hosts) > MOST_HOSTS:
            raise _not_valid(name, f"more than {MOST_HOSTS} hosts")
    if not hosts:
        raise _not_valid(name, "no host in it")
    if max(alone.values(), default=1) > 1:
        # Slurm's form: a name on its own line counts for one rank.
        hosts |= {host: 1 for host in alone if hosts[host] is None}
    return hosts


def _not_valid(where: str, problem: str) -> HpctrainError:
    return HpctrainError("HT-hostfile-not-valid", "{where}: {problem}", _HINT, where=where, problem=problem)


def _add_line(hosts: HostSlots, alone: Counter[str], content: str, where: str) -> None:
    match = _LINE.fullmatch(content)
    if match is None:
        shown = content if len(content) <= 60 else f"{content[:60]}…"
        raise _not_valid(where, f"{shown!r} is not a host with its slots")
    names, numbered, keyed = match.groups()
    for host in expand_hosts(names, where):
        if keyed and host in hosts:
            raise _not_valid(where, f"slots= for {host}, which was named before: name it once, with all of its slots")
        slots = numbered or keyed
        add_slots(hosts, host, int(slots) if slots else None)
        if not slots:
            alone[host] += 1
