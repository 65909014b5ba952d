"""Decides whether a failed run is restarted, and after what time. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.supervision.failure import Failure

_LONGEST_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The progress of a run.

    Attributes:
        checkpoint: iteration of its newest whole checkpoint, 0 where it has none.
        step: the furthest step of any attempt.
    """

    checkpoint: int = 0
    step: int = 0

    def is_beyond(self, other: Reach) -> bool:
        """Whether the run got further. Steps count only until the first checkpoint: after that they are repeated."""
        return self.checkpoint > other.checkpoint or (self.checkpoint == 0 and self.step > other.step)


def next_restart(
    failure: Failure, before: Reach, after: Reach, *, stepped: bool, idle: int, limit: int, hosts: int = 1
) -> int | None:
    """The number of the next restart among those without progress: 1, 2, …; None if the run ends.

    Args:
        failure: what ended an attempt that no signal interrupted.
        before, after: how far the run was when the attempt began, and is now.
        idle: the number that the attempt itself had, 0 for one that a user or a job began.
        limit: the most restarts without progress.
        hosts: the number of hosts that it ran on.
    """
    if failure.stopped or failure.refused or failure.exit_code == 2:
        return None
    # An attempt that fails before its first step would fail again, unless a host was lost, the cause is temporary, or a
    # rank was killed in a run that has worked before or that has several hosts.
    killed = failure.exit_code == RESUMABLE and (after.step or after.checkpoint or hosts > 1)
    if not (stepped or killed or failure.lost_hosts or failure.passing):
        return None
    number = 1 if after.is_beyond(before) else idle + 1
    return number if number <= limit else None


def wait_seconds(number: int) -> float:
    """The time before a restart, which doubles each time: the cause may pass, and hosts are not asked too often."""
    return float(min(2 ** (number - 1), _LONGEST_SECONDS))
