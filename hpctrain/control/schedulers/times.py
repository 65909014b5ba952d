"""Durations as Slurm writes and reads them."""

from __future__ import annotations

import re

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)


def slurm_seconds(text: str) -> int | None:
    """The seconds of a duration, or None for any other text, such as ``UNLIMITED``.

    Slurm's forms are minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds (``man sbatch``, ``--time``). ``squeue`` and ``sacct`` print some of them.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, *numbers = (None if part is None else int(part) for part in match.groups())
    given = [number for number in numbers if number is not None]
    if days is not None:
        hours, minutes, seconds = (*given, 0, 0)[:3]
    elif len(given) == 3:
        hours, minutes, seconds = given
    else:
        hours, minutes, seconds = 0, *(*given, 0)[:2]
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
