"""A host whose cable is cut says no goodbye: the others go on without it in time, and nothing trains on there."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.common.run.events import read_events
from support.hosts.local_hosts import LocalHosts

pytest.importorskip("torch")

_TIMEOUT = 8


def _wait(what: str, condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s until {what}"
        time.sleep(0.1)


@pytest.mark.long
def test_a_run_goes_on_without_a_host_whose_cable_was_cut(hosts: LocalHosts, tmp_path: Path):
    arguments = ("digits", "-H", "h1,h2,h3", "--backend", "mpi", "--set", "epochs=2", "--run-dir", "run")
    command = hosts.command("h1", "hpctrain", "run", *arguments, cwd=tmp_path, HPCTRAIN_HOST_TIMEOUT=str(_TIMEOUT))
    path = tmp_path / "run" / "events.jsonl"

    def happened(kind: str) -> int:
        return sum(event.event == kind for event in read_events(path)) if path.exists() else 0

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            _wait("the first epoch is saved", lambda: happened("checkpoint") > 0)
            hosts.cut("h3")
            begin = time.monotonic()
            _wait("h3 is missed", lambda: happened("fault") > 0)
            assert time.monotonic() - begin > _TIMEOUT / 2
            # On h3 they are on their own, and know it.
            ranks = ("pgrep", "-f", "hpctrain.worker.train")
            _wait("nothing trains on h3", lambda: not hosts.run("h3", *ranks, check=False).stdout)
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert re.search(r"host h3 .*; .* 23 with 2 of 3 ranks on h\[1-2\]", said)
    assert [event.hosts for event in read_events(path) if event.event == "run"] == [("h1", "h2", "h3"), ("h1", "h2")]
