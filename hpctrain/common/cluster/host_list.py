"""Lists of hosts in Slurm's bracket form: ``gpu[001-032,040],login1``."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from hpctrain.common.errors import HpctrainError

# Slurm itself knows at most 65,533 nodes.
MOST_HOSTS = 65536
# The DNS allows no longer host name.
_LONGEST_NAME = 253

# ClusterShell gives '@', '!', '&', '^', '*', '/' and blanks meanings that Slurm's lists do not have.
_RANGES = r"\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\]"
_NAME = rf"(?:[\w.+-]|{_RANGES})+"
_LIST = re.compile(rf"{_NAME}(?:,{_NAME})*", re.ASCII)
_PART = re.compile(rf"({_NAME})(?::([1-9]\d{{0,4}}))?", re.ASCII)
_PARTS = re.compile(rf"{_PART.pattern}(?:,{_PART.pattern})*", re.ASCII)

# What ClusterShell takes for one name, whose number is not too long for it.
_PLAIN = re.compile(r"(?!.*\d{10})[\w.+-]+", re.ASCII)

# Names of switches are the site's own: whatever has no blanks, and no commas and brackets but those of a list.
_ANY_NAME = rf"(?:[^\s,\[\]]|{_RANGES})+"
_ANY_LIST = re.compile(rf"{_ANY_NAME}(?:,{_ANY_NAME})*")

# The slots of hosts by name, in the order in which they are named; None where nothing is said of them.
HostSlots = dict[str, int | None]

_INCOMPLETE = "it is empty, or a bracket, a name or a number in it is incomplete"


def expand_hosts(text: str, where: str) -> tuple[str, ...]:
    """The names in a list, in its order, each once.

    Args:
        text: names with commas between them; ``[1-3,5]`` in a name stands for numbers, zeros in front kept.
        where: what to call the place of the list in a message: file and line, or an option.
    """
    if ":" in text:
        raise _not_a_list(text, where, "no slots belong here", "names alone, for example gpu1,gpu2")
    if not _LIST.fullmatch(text):
        raise _not_a_list(text, where, _INCOMPLETE)
    return _expanded(re.findall(_NAME, text, re.ASCII), text, where)


def expand_names(text: str, where: str) -> tuple[str, ...]:
    """The names in a list of switches, which may be any: Slurm's own say nothing to it but which is which."""
    if not _ANY_LIST.fullmatch(text):
        raise _not_a_list(text, where, _INCOMPLETE)
    return _expanded(re.findall(_ANY_NAME, text), text, where)


def _expanded(parts: Sequence[str], text: str, where: str) -> tuple[str, ...]:
    # Counted first, because expanding a range makes every name.
    if sum(map(_count, parts)) > MOST_HOSTS:
        raise _not_a_list(text, where, f"these are more than {MOST_HOSTS} names")
    names = tuple(dict.fromkeys(name for part in parts for name in _expand(part, text, where)))
    if max(map(len, names)) > _LONGEST_NAME:
        raise _not_a_list(text, where, f"a name has more than {_LONGEST_NAME} characters")
    return names


def expand_slots(text: str, where: str) -> HostSlots:
    """The hosts of a list whose parts may have slots: ``gpu[001-004]:8,login1``.

    Args:
        text: a host list, see :func:`expand_hosts`, in which ``:SLOTS`` may follow each part. The slots of a host in
            several parts are added up.
    """
    if not _PARTS.fullmatch(text):
        expand_hosts(text.replace(":", ""), where)
        raise _not_a_list(text, where, "after ':' is a number of slots, at least 1", "for example gpu[001-032]:8")
    found: HostSlots = {}
    for names, slots in _PART.findall(text):
        for name in expand_hosts(names, where):
            add_slots(found, name, int(slots) if slots else None)
            if len(found) > MOST_HOSTS:
                raise _not_a_list(text, where, f"these are more than {MOST_HOSTS} names")
    return found


def add_slots(hosts: HostSlots, name: str, slots: int | None) -> None:
    """Add a host; one that is there already gets these slots in addition, one where nothing is said of them.

    So do Open MPI's ``--host`` and hostfiles, and Hydra's.
    """
    hosts[name] = slots if name not in hosts else (hosts[name] or 1) + (slots or 1)


def fold_hosts(names: Sequence[str]) -> str:
    """Fold names to the bracket form, sorted. What is no name, or has a long number (a GUID), comes last, as it is."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

    plain = {name for name in names if _PLAIN.fullmatch(name)}
    short = NodeSet.fromlist(sorted(plain), resolver=RESOLVER_NOGROUP)
    return ",".join(filter(None, [str(short), *sorted({*names} - plain)]))


def _count(part: str) -> int:
    """How many names a part stands for."""
    return math.prod(
        sum(abs(int(last or first) - int(first)) + 1 for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges))
        for ranges in re.findall(_RANGES, part)
    )


def _expand(part: str, text: str, where: str) -> Iterator[str]:
    """The names of one part, the last bracket counting up first, and numbers as wide as the first of their range is
    written, as Slurm has them: it writes n001 to n1001 as ``n[001-1001]``.
    """
    pieces = [
        [name for numbers in piece[1:-1].split(",") for name in _numbers(numbers, text, where)]
        if piece.startswith("[")
        else [piece]
        for piece in re.split(f"({_RANGES})", part)
    ]
    return map("".join, itertools.product(*pieces))


def _numbers(numbers: str, text: str, where: str) -> list[str]:
    first, _, last = numbers.partition("-")
    if int(last or first) < int(first):
        raise _not_a_list(text, where, f"{numbers} counts down")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]


def _not_a_list(text: str, where: str, why: str, hint: str = "for example gpu[001-032],login1") -> HpctrainError:
    shown = text if len(text) <= 60 else f"{text[:60]}…"
    return HpctrainError(
        "HT-hosts-not-a-list",
        "{where}: {text!r} is not a list of hosts: {reason}",
        hint,
        where=where,
        text=shown,
        reason=why,
    )
