"""An elastic run goes on with hosts that were lost and are back, and with new ones."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_hosts import LocalHosts
from oracle import kept_steps, read_lines, wrong_order

pytest.importorskip("torch")

_VARIABLES = {"HPCTRAIN_HOST_TIMEOUT": "8", "HPCTRAIN_HOST_INTERVAL": "1"}
_SAMPLES, _BATCH, _SEED = 1437, 64, 7


def test_hosts_come_go_and_come_back(hosts: LocalHosts, tmp_path: Path):
    """h3 is off at the beginning and boots, h2 is lost and boots again, h4 is added to the hostfile."""
    hostfile, path, printed = tmp_path / "hosts.txt", tmp_path / "run" / "events.jsonl", tmp_path / "printed"
    hostfile.write_text("h1\nh2\nh3\n")
    hosts.kill("h3")
    settings = ("fault_tolerance=elastic", "checkpoints.every_steps=5", "epochs=6")
    options = ("--hostfile", "hosts.txt", "--backend", "mpi", "--run-dir", "run")
    words = ("run", "digits", *options, *(word for setting in settings for word in ("--set", setting)))
    command = hosts.command("h1", "hpctrain", *words, cwd=tmp_path, **_VARIABLES)

    def starts() -> list[tuple[str, ...]]:
        events = read_lines(path) if path.exists() else []
        return [tuple(event["hosts"]) for event in events if event["event"] == "start"]

    def saved() -> bool:
        """Whether the newest attempt has a checkpoint; without one it got nowhere, and is taken back."""
        kinds = [event["event"] for event in read_lines(path)]
        return "checkpoint" in kinds[len(kinds) - kinds[::-1].index("start") :]

    with printed.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:

        def wait(what: str, condition: Callable[[], bool], seconds: float = 120) -> None:
            deadline = time.monotonic() + seconds
            while not condition():
                assert process.poll() is None, f"ended before {what}: {printed.read_text()}"
                assert time.monotonic() < deadline, f"waited {seconds:g} s until {what}: {printed.read_text()}"
                time.sleep(0.1)

        try:
            wait("it begins without h3", lambda: starts() == [("h1", "h2")])
            hosts.boot("h3")
            wait("h3 joins", lambda: starts()[1:] == [("h1", "h2", "h3")])
            wait("it goes on", saved)
            hosts.kill("h2")
            wait("it goes on without h2", lambda: starts()[2:] == [("h1", "h3")])
            hostfile.write_text("h1\nh2\nh3\nh4\n")
            hosts.boot("h2")
            wait("h2 and h4 join", lambda: set(starts()[-1]) == {"h1", "h2", "h3", "h4"})
            assert process.wait(120) == 0, printed.read_text()
        finally:
            process.kill()
    said = printed.read_text()
    assert "h3 does not answer ssh" in said
    assert "h3 joins" in said
    # As a host, as a rank on it or as one that gives no answer, whichever is noticed first.
    assert re.search(r"\bh2\b.*; going on from step", said), said
    events = read_lines(path)
    # As if nothing had been: each sample once an epoch, in the order of the recipe.
    assert list(wrong_order(kept_steps(events), samples=_SAMPLES, seed=_SEED, batch=_BATCH)) == []
    epochs = [event for event in events if event["event"] == "epoch"]
    assert epochs[-1]["epoch"] == 6
    assert epochs[-1]["test_accuracy"] > 0.95
