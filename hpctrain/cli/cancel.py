"""``hpctrain cancel``."""

from __future__ import annotations

from hpctrain.cli.options import Target
from hpctrain.report.output import answer

# The launcher first waits for the ranks to stop, and then kills those that are left.
_GRACE_SECONDS = 30.0


def cancel(target: Target = "last") -> None:
    """End a run and all of its jobs, including waiting ones. Does nothing if nothing runs.

    Ranks that can be stopped save their state first, for as long as the run's --stop-seconds allow.
    """
    from hpctrain.common.run.directory import read_model
    from hpctrain.common.run.plan import Plan
    from hpctrain.control.schedulers.cancel import cancel_jobs, stop_launcher
    from hpctrain.control.schedulers.run_jobs import find_run
    from hpctrain.report.record import Record
    from hpctrain.report.status import read_status

    directory = find_run(target)
    cancelled = False
    for line in cancel_jobs(directory):
        answer(line)
        cancelled = True
    if not cancelled and not directory.summary.exists():
        seconds = read_model(directory.plan, Plan).stop.seconds + _GRACE_SECONDS
        start = Record(directory).start
        for line in stop_launcher(directory, start, seconds):
            answer(line)
            cancelled = True
    status, _ = read_status(directory)
    if not cancelled:
        answer("nothing to cancel: no process or job of the run is alive")
    why = f": {status.message}" if status.state == "failed" else ""
    answer(f"the run is {status.state}{why}{f'; resume with: {status.resume}' if status.resume else ''}")
