"""Lists and masks of CPUs as the kernel, NCCL and hwloc print them."""

from __future__ import annotations

import re

from hpctrain.errors import HpctrainError

# More than any machine has; a wrong file must not fill the memory.
MOST_CPUS = 65536


def cores_of_list(text: str, where: str) -> tuple[int, ...]:
    """The CPUs of a list such as ``0-31,64-95``, ascending.

    Raises:
        HpctrainError: not such a list.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MOST_CPUS:
            raise HpctrainError(f"{where}: {text.strip()[:80]!r} is not a list of CPUs such as 0-31,64-95")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def cores_of_mask(text: str, where: str) -> tuple[int, ...]:
    """The CPUs of a mask of 32-bit words, highest first, such as ``00000000,0000ffff`` or ``0x00000001,,0x0``.

    An empty word is zero. ``0xf...f``, hwloc's endless run of ones, is refused.

    Raises:
        HpctrainError: not such a mask.
    """
    words = text.strip().split(",")
    if len(words) * 32 > MOST_CPUS or not all(re.fullmatch(r"((0x)?[0-9a-fA-F]{1,8})?", word) for word in words):
        raise HpctrainError(f"{where}: {text.strip()[:80]!r} is not a mask of CPUs such as 00000000,0000ffff")
    mask = 0
    for word in words:
        mask = mask << 32 | int(word or "0", 16)
    return tuple(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


def first_threads(cpus: tuple[int, ...]) -> tuple[int, ...]:
    """The first hardware thread of each core among a NUMA node's CPUs, for formats that do not list threads.

    Linux numbers the second threads of all cores after all first ones, so a NUMA node with two threads a core has two
    runs of equal length (0-31,64-95).
    """
    jumps = [i for i in range(1, len(cpus)) if cpus[i] != cpus[i - 1] + 1]
    return cpus[: len(cpus) // 2] if jumps == [len(cpus) / 2] else cpus
