"""Lists of hosts in Slurm's bracket form: ``gpu[001-032,040],login1``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from hpctrain.errors import HpctrainError

# Slurm itself knows at most 65,533 nodes.
MOST_HOSTS = 65536

# ClusterShell gives '@', '!', '&', '^', '*', '/' and blanks meanings that Slurm's lists do not have.
_RANGES = r"\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\]"
_NAME = rf"(?:[\w.+-]|{_RANGES})+"
_LIST = re.compile(rf"{_NAME}(?:,{_NAME})*", re.ASCII)


def expand_hosts(text: str, where: str) -> tuple[str, ...]:
    """The names of a list, in its order, each once.

    Args:
        text: names with commas between them; ``[1-3,5]`` in a name stands for numbers, zeros in front kept.
        where: what to call the place of the list in a message: file and line, or an option.

    Raises:
        HpctrainError: it is empty, not such a list, or longer than :data:`MOST_HOSTS`.
    """
    # A twentieth of a second that `hpctrain --help` does not need.
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetParseError

    if ":" in text:
        hint = "names alone, for example gpu1,gpu2; -np says how many ranks they have together"
        raise _not_a_list(text, where, "a host's name has no ':'", hint)
    if not _LIST.fullmatch(text):
        raise _not_a_list(text, where, "it is empty, or a bracket, a name or a number in it is incomplete")
    parts = re.findall(_NAME, text, re.ASCII)
    # Counted beforehand: ClusterShell makes every number of a range.
    if sum(map(_count, parts)) > MOST_HOSTS:
        raise _not_a_list(text, where, f"these are more than {MOST_HOSTS} names")
    try:
        return tuple(dict.fromkeys(name for part in parts for name in NodeSet(part, resolver=RESOLVER_NOGROUP)))
    # ValueError: of a number with thousands of digits. AssertionError: digits behind a bracket join its numbers, and
    # ClusterShell then finds the range too large.
    except (NodeSetParseError, ValueError, AssertionError) as error:
        raise _not_a_list(text, where, str(error)) from error


def fold_hosts(names: Sequence[str]) -> str:
    """The bracket form of names, sorted; names with long numbers (a GUID) are left as they are, behind the others."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

    long = sorted(name for name in names if re.search(r"\d{10}", name))
    short = NodeSet.fromlist([name for name in names if name not in long], resolver=RESOLVER_NOGROUP)
    return ",".join(filter(None, [str(short), *long]))


def _count(part: str) -> int:
    """How many names a part stands for."""
    return math.prod(
        sum(abs(int(last or first) - int(first)) + 1 for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges))
        for ranges in re.findall(_RANGES, part)
    )


def _not_a_list(text: str, where: str, why: str, hint: str = "for example gpu[001-032],login1") -> HpctrainError:
    shown = text if len(text) <= 60 else f"{text[:60]}…"
    return HpctrainError(f"{where}: {shown!r} is not a list of hosts: {why}", hint)
