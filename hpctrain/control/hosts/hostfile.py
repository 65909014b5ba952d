"""Reads hostfiles of Open MPI, Hydra and ``SLURM_HOSTFILE``.

What a line means is what Open MPI 4 and 5 (``src/util/hostfile/hostfile.c`` and ``hostfile_lex.l`` of PRRTE,
https://github.com/openpmix/prrte) and Hydra (``HYDU_process_mfile_token`` and ``HYDU_add_to_node_list`` of MPICH,
https://github.com/pmodels/mpich) make of it, tried with Open MPI 5.0.11 and MPICH 5.0.2:

- a host that is named again gets the new line's slots in addition, one where the line has no number;
- ``slots=`` of a host that was named before is an error in Open MPI, and here;
- ``max-slots=`` alone says the slots too.
"""

from __future__ import annotations

import getpass
import ipaddress
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.common.cluster.host_list import MOST_HOSTS, HostSlots, add_slots, expand_hosts
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import read_text

_NUMBER = re.compile(r"[1-9]\d{0,4}", re.ASCII)
_SLOTS = r"slots|cpu|count"
# The spellings of each key.
_KEYS = {
    "slots": rf"{_SLOTS}",
    "most": rf"max[-_](?:{_SLOTS})|(?:{_SLOTS})[-_]max",
    "user": r"user|user[-_]?name",
    "interface": r"ifname|ifhn",
    "port": r"port",
    "binding": r"binding|boards|sockets(?:[-_]per[-_]board)?|cores(?:[-_]per[-_]socket)?",
}
# The advice for keys that are ignored.
_INSTEAD = {
    "interface": "--interface names it for all hosts",
    "port": "--ssh-port says it for all hosts",
    "binding": "hpctrain gives each rank its cores",
}
_HINT = "a line is HOST, HOST slots=N [max-slots=M], or HOST:N"
# Room for one line per rank of the largest machines.
_MOST_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Hostfile:
    """The hosts of a file with their slots, in its order, and warnings about keys that were ignored."""

    hosts: HostSlots
    warnings: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _Line:
    """What one line says; ``ignored`` has the keys and values that hpctrain does not use."""

    names: tuple[str, ...]
    added: int | None = None
    slots: int | None = None
    ignored: list[tuple[str, str]] = field(default_factory=list)


def read_hostfile(path: Path) -> Hostfile:
    """The hosts of a file.

    ``HOST slots=N [max-slots=M]`` is Open MPI's form (``max-slots`` is a limit for ranks beyond the slots, which no run
    here starts), ``HOST:N`` Hydra's. Lines of names alone are Slurm's form where names repeat: a line a rank. After
    ``#`` or ``//`` is a comment.

    Raises:
        HpctrainError: it cannot be read, is empty, has a line of another form, or says the slots of a host again;
            names file and line.
    """
    return parse_hostfile(read_text(path, "hostfile", _HINT, limit=_MOST_BYTES), str(path))


def parse_hostfile(text: str, name: str) -> Hostfile:
    """The hosts in a file's text; ``name`` names the file in messages. Raises as :func:`read_hostfile`."""
    hosts: HostSlots = {}
    alone = Counter[str]()
    ignored: dict[tuple[str, str], str] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        where = f"{name}:{number}"
        content = re.split(r"#|//", raw, maxsplit=1)[0].strip()
        if not content:
            continue
        line = _line(content, where)
        for host in line.names:
            if line.slots is not None and host in hosts:
                raise HpctrainError(
                    "HT-hostfile-not-valid",
                    "{where}: slots= for {host}, which was named before: Open MPI does not take that either",
                    "name it once, with all of its slots",
                    where=where,
                    host=host,
                )
            add_slots(hosts, host, line.added if line.slots is None else line.slots)
        alone.update(line.names if line.slots is line.added is None else ())
        ignored |= {pair: where for pair in line.ignored if pair not in ignored}
        if len(hosts) > MOST_HOSTS:
            raise HpctrainError(
                "HT-hostfile-not-valid", "{path} has more than {most} hosts", path=name, most=MOST_HOSTS
            )
    if not hosts:
        raise HpctrainError("HT-hostfile-not-valid", "{path} names no host", _HINT, path=name)
    if max(alone.values(), default=1) > 1:
        # Slurm's form: a name on its own line counts for one rank.
        hosts |= {host: 1 for host in alone if hosts[host] is None}
    warnings = (
        f"{where}: {key}={value} is passed over: {_INSTEAD[_kind(key)]}" for (key, value), where in ignored.items()
    )
    return Hostfile(hosts=hosts, warnings=tuple(warnings))


def _line(content: str, where: str) -> _Line:
    first, *rest = re.sub(r"\s*=\s*", "=", content).split()
    _refuse_other_forms(first, rest, where)
    names, colon, added = first.partition(":")
    user, at, host = names.rpartition("@")
    line = _Line(names=expand_hosts(host, where))
    if at:
        _require_own_user(user, host, where)
    if colon:
        line.added = _number(added, content, where)
    values = dict(_pair(word, content, where) for word in rest)
    if len(values) < len(rest) or (colon and "slots" in values):
        raise _not_a_line(content, where)
    if "user" in values:
        _require_own_user(values["user"], host, where)
    numbers = {kind: _number(values[kind], content, where) for kind in ("most", "slots") if kind in values}
    if not colon and numbers:
        line.slots = slots = numbers["slots" if "slots" in numbers else "most"]
        if numbers.get("most", slots) < slots:
            raise HpctrainError(
                "HT-hostfile-not-valid",
                "{where}: {line!r} has more slots than the most that it allows",
                _HINT,
                where=where,
                line=content,
            )
    line.ignored = [(word.partition("=")[0], values[_kind(word)]) for word in rest if _kind(word) in _INSTEAD]
    return line


def _pair(word: str, content: str, where: str) -> tuple[str, str]:
    """The kind of a ``key=value`` word, and its value."""
    _, equals, value = word.partition("=")
    if not equals or not _kind(word):
        raise _not_a_line(content, where)
    return _kind(word), value


def _kind(word: str) -> str:
    key = word.partition("=")[0]
    return next((kind for kind, pattern in _KEYS.items() if re.fullmatch(pattern, key, re.ASCII)), "")


def _number(text: str, content: str, where: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise _not_a_line(content, where)
    return int(text)


def _refuse_other_forms(first: str, rest: list[str], where: str) -> None:
    """Refuse the other forms of a line that Open MPI knows, each with its own advice."""
    if first.startswith("+"):
        raise HpctrainError(
            "HT-hostfile-not-valid",
            "{where}: {entry!r} counts the nodes of an allocation",
            "name the hosts themselves",
            where=where,
            entry=first[:60],
        )
    if first.startswith("^"):
        raise HpctrainError(
            "HT-hostfile-not-valid",
            "{where}: {entry!r} leaves a host out",
            "leave out the lines that name it",
            where=where,
            entry=first[:60],
        )
    if first == "rank" and rest and re.match(r"\d+=", rest[0]):
        raise HpctrainError(
            "HT-hostfile-not-valid",
            "{where}: a line of a rankfile",
            f"hpctrain places ranks itself: {_HINT}",
            where=where,
        )
    address = first.rpartition("@")[2].partition("%")[0].strip("[]")
    if address.count(":") > 1 and _is_address(address):
        raise HpctrainError(
            "HT-hostfile-not-valid",
            "{where}: {address} is an IPv6 address, whose colons are not told from those of slots",
            "give the host a name, in /etc/hosts or ~/.ssh/config",
            where=where,
            address=address,
        )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _require_own_user(user: str, host: str, where: str) -> None:
    """Refuse another user: ranks are started on hosts by name alone, so only ssh's configuration can name one."""
    if user == getpass.getuser():
        return
    raise HpctrainError(
        "HT-hostfile-not-valid",
        "{where}: {host} with the user {user!r}: hosts are named without their user",
        f"write `Host {host}` and below it `User {user[:60]}` into ~/.ssh/config, and leave the user out here",
        where=where,
        host=host,
        user=user[:60],
    )


def _not_a_line(content: str, where: str) -> HpctrainError:
    shown = content if len(content) <= 60 else f"{content[:60]}…"
    return HpctrainError(
        "HT-hostfile-not-valid", "{where}: {line!r} is not a host with its slots", _HINT, where=where, line=shown
    )
