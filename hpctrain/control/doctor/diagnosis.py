"""Runs all checks: of this machine alone, or of every host of a run, by ranks that are started there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hpctrain.common.cluster.checks import Check
from hpctrain.common.run.plan import HostOptions, Start
from hpctrain.control.doctor.facts import read_host
from hpctrain.control.doctor.host import check_host, failed_first
from hpctrain.control.doctor.ranks import without_ranks


def diagnose(
    options: HostOptions, start: Start, ranks: int | None, run_directory: Path, *, notice: Callable[[str], None]
) -> list[Check]:
    """The checks, failed ones first.

    Args:
        ranks: their number. None for as many as a run would have; for none if neither hosts nor ``start`` are given.

    Raises:
        HpctrainError: hosts and ranks that do not fit, or no folder for what the ranks write.
    """
    named = options.hosts is not None or options.hostfile is not None or os.environ.get("SLURM_JOB_NODELIST")
    if ranks is None and not named and start == Start():
        return failed_first([*without_ranks(), *check_host(read_host(), run_directory)])
    # Imported here because it takes 80 ms, which a check of this machine alone does not need.
    from hpctrain.common.cluster.machine import this_machine
    from hpctrain.control.doctor.start import check_ranks
    from hpctrain.control.hosts.arrange import arrange

    arranged, warnings = arrange(options, this_machine().host, ranks)
    for warning in warnings:
        notice(f"warning: {warning}")
    checks = check_ranks(arranged, options, start, run_directory)
    if len(checks) == 1:
        # The ranks failed before their hosts were checked; the checks of this machine may show why.
        checks += check_host(read_host(hosts=len(arranged.slots)), run_directory)
    return failed_first(checks)
