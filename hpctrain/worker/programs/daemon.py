"""Runs a daemon of mpirun's, which starts ranks on its host, so that Slurm's SIGTERM cannot end it before its ranks.

``python -m hpctrain.worker.programs.daemon RUN_DIRECTORY DAEMON ARGUMENT…`` in a step of a Slurm job. When a job is
requeued, preempted or cancelled, its steps get SIGTERM, at which a daemon would end its ranks within a second. Here the
daemon starts with the signal blocked, and unblocks it in its ranks (odls_pdefault_module.c of PRRTE). Instead this
process asks all ranks of the run to stop. Slurm sends SIGKILL later, and mpirun ends its daemons
by messages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from urllib.parse import unquote

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.stopping import ask


def main(folder: str, *daemon: str) -> int:
    """Run the daemon to its end, and return its exit status.

    Args:
        folder: the run directory, percent-encoded because mpirun splits the command at spaces.
        daemon: the daemon's program and arguments.
    """
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    pid = os.posix_spawnp(daemon[0], daemon, os.environ, setsigmask=[signal.SIGTERM])
    while True:
        if signal.sigwait(signals) == signal.SIGTERM:
            with contextlib.suppress(HpctrainError):
                ask(RunDirectory(Path(unquote(folder))).stop, signal.SIGTERM.name)
            continue
        # SIGCHLD also says that the daemon was stopped or goes on, as where Slurm suspends a job.
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
