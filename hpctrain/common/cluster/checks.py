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
        where: the hosts or ranks it is about; empty for all, or for the only one.
    """

    name: str
    status: Status
    found: str
    wanted: str = ""
    remedy: str = ""
    where: tuple[str, ...] = ()


def judge(name: str, found: str, *, failed: bool, wanted: str, remedy: str, where: tuple[str, ...] = ()) -> Check:
    """A check that applies; the remedy is kept where it failed."""
    status: Status = "failed" if failed else "ok"
    return Check(name=name, status=status, found=found, wanted=wanted, remedy=remedy if failed else "", where=where)


def skip(name: str, why: str, remedy: str = "") -> Check:
    """A check that does not apply here; ``remedy``: what makes it apply."""
    return Check(name=name, status="not applicable", found=why, remedy=remedy)
