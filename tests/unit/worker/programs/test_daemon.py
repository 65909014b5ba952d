"""The parent of mpirun's daemons in a Slurm job: Slurm's signal asks the ranks to stop, and ends nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from hpctrain.common.run.stopping import reason_in

# As Open MPI's daemon it would leave at the signal. It ends by itself once the signal has been sent.
DAEMON = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
open("ready", "w").close()
while not os.path.exists("sent"): time.sleep(0.02)
time.sleep(0.5)
sys.exit(5)
"""


@pytest.mark.parametrize(
    ("earlier", "suspended"), [(None, False), ("cancelled", False), (None, True)], ids=["", "asked", "suspended"]
)
def test_the_daemon_outlives_the_signal_and_the_ranks_are_asked(
    tmp_path: Path, earlier: str | None, suspended: bool
) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    if earlier:
        (run / "stop").write_text(earlier)
    words = [
        sys.executable,
        "-P",
        "-m",
        "hpctrain.worker.programs.daemon",
        quote(str(run)),
        sys.executable,
        "-c",
        DAEMON,
    ]
    process = subprocess.Popen(words, cwd=tmp_path, start_new_session=True)
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        if suspended:
            # Slurm's suspension of a job, of which the parent is told as of an end.
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.killpg(process.pid, number)
                time.sleep(0.1)
        # To the daemon too, as Slurm does where it tracks processes by their group.
        os.killpg(process.pid, signal.SIGTERM)
        (tmp_path / "sent").touch()
        assert process.wait(100) == 5
    finally:
        process.kill()
        process.wait()
    assert reason_in(run / "stop") == (earlier or "SIGTERM")
