"""The time limit that suits a predicted duration, and what happens to a job with a shorter one."""

from __future__ import annotations

import math

from hpctrain.control.schedulers.request import JobRequest
from hpctrain.control.schedulers.slurm.times import slurm_seconds

# Assumed for the launcher's proof, the ranks' imports and the first samples.
_BEGIN_SECONDS = 300.0
_MINUTE, _HOUR = 60.0, 3600.0
# From here on limits are whole hours, and below it tens of minutes.
_LONG_SECONDS = 4 * _HOUR


def suggested_seconds(high: float, request: JobRequest) -> int:
    """The limit for a run, in seconds: its longest predicted duration, 5 minutes to begin, and the time before the
    limit in which Slurm may send its signal, rounded up to 10 minutes, from 4 hours on to whole hours.

    Args:
        high: the high end of the run's duration in seconds.
    """
    needed = high + _BEGIN_SECONDS + request.early_seconds
    unit = 10 * _MINUTE if needed <= _LONG_SECONDS else _HOUR
    return math.ceil(needed / unit) * int(unit)


def limit_text(seconds: int) -> str:
    """A duration as ``--time`` takes it: H:MM:SS, from two days on D-HH:MM:SS."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}:{minutes:02}:{rest:02}"
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"


def time_lines(request: JobRequest, low: float, high: float) -> list[str]:
    """The suggestion for ``--time``, and a warning where the limit asked for is too short.

    Args:
        low, high: the ends of the interval of the run's duration, in seconds.
    """
    suggested = limit_text(suggested_seconds(high, request))
    early = math.ceil(request.early_seconds / 60)
    rule = f"the upper end of its time, 5 min to start and {early} min before the limit, rounded up"
    lines = [f"suggested: --time {suggested} ({rule})"]
    limit = None if request.time is None else slurm_seconds(request.time)
    # 0 is no limit.
    if not limit or limit >= high:
        return lines
    if limit < low:
        return [
            *lines,
            f"warning: --time {request.time} ends before the run is done: {_continuation(request, limit, low, high)}",
        ]
    return [*lines, f"--time {request.time} may end before the run is done; then {_next_job(request)}"]


def deadline_lines(request: JobRequest, low: float, high: float) -> list[str]:
    """A warning where the deadline asked for, after which nothing goes on by itself, is too short.

    Args:
        low, high: the ends of the interval of the run's duration, in seconds.
    """
    limit = None if request.time is None else slurm_seconds(request.time)
    if not limit or limit >= high:
        return []
    may = "ends" if limit < low else "may end"
    return [
        f"warning: --time {request.time} {may} before the run is done, and the job ends with it: submit it again then"
    ]


def _continuation(request: JobRequest, limit: int, low: float, high: float) -> str:
    # The time to begin is not subtracted, because it is a generous assumption.
    each = limit - request.early_seconds
    if each <= 0:
        return "there is no time to train before its signal comes"
    fewest, most = (math.ceil(seconds / each) for seconds in (low, high))
    again = _times(max(1, fewest - 1), max(1, most - 1))
    if request.chain > 1:
        enough = "" if request.chain >= most else f", and the chain has {request.chain}: --chain {most}"
        return f"it takes {_range(max(2, fewest), max(2, most))} jobs{enough}"
    if request.requeue:
        return f"it goes back to the queue and is resumed {again}"
    return f"another job has to resume it {again}; --chain {max(2, most)} submits them now"


def _next_job(request: JobRequest) -> str:
    if request.chain > 1:
        return "the next job of the chain resumes it"
    return "it goes back to the queue and is resumed" if request.requeue else "another job resumes it"


def _times(low: int, high: int) -> str:
    return "once" if low == high == 1 else f"{_range(low, high)} times"


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
