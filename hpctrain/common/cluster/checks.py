"""The outcome of one check before a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "failed", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was found, what is wanted, and what to do if they differ.

    Attributes:
        found: also why the check is not applicable.
        remedy: the command, or the setting.
        source: address of the documentation that ``wanted`` is from.
        where: the hosts or ranks it is about; empty for all, or for the only one.
    """

    name: str
    status: Status
    found: str
    wanted: str = ""
    remedy: str = ""
    source: str = ""
    where: tuple[str, ...] = ()
