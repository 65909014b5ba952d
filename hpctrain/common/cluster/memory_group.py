"""The memory that the kernel lets a job or container have on this host: that of its control group.

Files and their meaning: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files, and for the first
version https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

# Of version 1 and 2: the folder of the hierarchy, and the files with limit, peak and counts of killed processes.
_FILES = {
    "memory": ("memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    "": ("", "memory.max", "memory.peak", "memory.events"),
}
# Version 1 has a limit of nearly 2^63 where there is none.
_UNLIMITED = 1 << 60
_MOST_GROUPS = 1000


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """The memory of a control group and those below it.

    Attributes:
        peak: the most that they have had; None where the kernel does not count it.
    """

    limit: int
    peak: int | None
    kills: int

    def __str__(self) -> str:
        limit = f"the limit of this job there is {self.limit / 1e9:.3g} GB"
        return limit if self.peak is None else f"{limit}, and it used {self.peak / 1e9:.3g} GB at most"


def group_memory(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> GroupMemory | None:
    """The memory of the outermost group of this process that has a limit: a job's has one for all of its steps.

    None where no group has one, or the files cannot be read.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in membership.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers in _FILES:
                folder, limit, peak, events = _FILES[controllers]
                for group in accumulate(Path(place).parts[1:], Path.__truediv__, initial=root / folder):
                    if (most := _number(group / limit)) is not None and most < _UNLIMITED:
                        kills = _kills(group, events, below=controllers == "memory")
                        return GroupMemory(limit=most, peak=_number(group / peak), kills=kills)
    return None


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        text = file.read_text().strip()
        return int(text) if text.isdecimal() else None
    return None


def _kills(group: Path, name: str, *, below: bool) -> int:
    """How many processes were killed; of version 1 each group counts its own alone."""
    found = 0
    for file in _some(group.rglob(name)) if below else [group / name]:
        with contextlib.suppress(OSError):
            found += sum(map(int, re.findall(r"^oom_kill (\d+)$", file.read_text(), re.M)))
    return found


def _some(files: Iterator[Path]) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # groups end meanwhile
        yield from (file for file, _ in zip(files, range(_MOST_GROUPS), strict=False))
