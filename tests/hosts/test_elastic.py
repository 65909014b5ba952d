"""Restarts of an elastic run take in hosts that were lost and are back, and new ones."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fault_campaign.oracle import kept_steps, read_lines, wrong_order
from support.hosts.local_hosts import LocalHosts

torch = pytest.importorskip("torch")

_VARIABLES = {"HPCTRAIN_HOST_TIMEOUT": "8"}
_SAMPLES, _BATCH, _SEED = 1437, 64, 7


class Run:
    """``hpctrain run`` on the first host, in a folder, with ``--run-dir run`` and ``--hostfile hosts.txt``."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._printed = folder / "printed"
        self._path = folder / "run" / "events.jsonl"

    @property
    def said(self) -> str:
        return self._printed.read_text()

    def events(self) -> list[Any]:
        return read_lines(self._path) if self._path.exists() else []

    def starts(self) -> list[tuple[str, ...]]:
        return [tuple(event["hosts"]) for event in self.events() if event["event"] == "start"]

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._process.poll() is None, f"ended before {what}: {self.said}"
            assert time.monotonic() < deadline, f"waited {seconds:g} s until {what}: {self.said}"
            time.sleep(0.1)

    def end(self) -> None:
        assert self._process.wait(120) == 0, self.said


@contextlib.contextmanager
def started(hosts: LocalHosts, folder: Path, *words: str) -> Iterator[Run]:
    options = ("--hostfile", "hosts.txt", "--backend", "mpi", "--run-dir", "run", "--set", "fault_tolerance=elastic")
    command = hosts.command("h1", "hpctrain", "run", *options, *words, cwd=folder, **_VARIABLES)
    with (folder / "printed").open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield Run(process, folder)
        finally:
            process.kill()


@pytest.mark.long
def test_hosts_come_go_and_come_back(hosts: LocalHosts, tmp_path: Path):
    """h3 is off at the beginning and boots, h2 is lost and boots again, h3 is lost, and h4 is added to the hostfile."""
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("h1\nh2\nh3\n")
    hosts.kill("h3")
    with started(hosts, tmp_path, "digits", "--set", "checkpoints.every_steps=5", "--set", "epochs=6") as run:

        def saved() -> bool:
            """Whether the newest attempt has a checkpoint."""
            kinds = [event["event"] for event in run.events()]
            return "checkpoint" in kinds[len(kinds) - kinds[::-1].index("start") :]

        run.wait("it begins without h3", lambda: run.starts() == [("h1", "h2")] and saved())
        hosts.boot("h3")
        hosts.kill("h2")
        run.wait("it goes on with h3 and without h2", lambda: run.starts()[1:] == [("h1", "h3")])
        run.wait("it goes on", saved)
        hostfile.write_text("h1\nh2\nh3\nh4\n")
        hosts.boot("h2")
        hosts.kill("h3")
        run.wait("h2 and h4 join", lambda: set(run.starts()[-1]) == {"h1", "h2", "h4"})
        run.end()
    assert "h3 does not answer ssh" in run.said
    # As a host, as a rank on it or as one that gives no answer, whichever is noticed first.
    assert re.search(r"\bh2\b.*; resuming", run.said), run.said
    # As if nothing had been: each sample once an epoch, in the order of the recipe.
    assert list(wrong_order(kept_steps(run.events()), samples=_SAMPLES, seed=_SEED, batch=_BATCH)) == []
    epochs = [event for event in run.events() if event["event"] == "epoch"]
    assert epochs[-1]["epoch"] == 6
    assert epochs[-1]["test_accuracy"] > 0.95


# It ends after an epoch in which there is a file "enough", or after as many as it is told.
SCRIPT = """\
import sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import hpctrain as ht

comm = ht.init()
torch.manual_seed(0)
data = TensorDataset(torch.arange(240), torch.randn(240, 8).double(), torch.randn(240, 1).double())
model = torch.nn.Linear(8, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
state, epoch = Path("state.pt"), 0
if state.exists():
    saved = torch.load(state, weights_only=True)
    epoch = saved["epoch"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
model, optimizer = ht.distribute(model, optimizer)
while True:
    order = torch.Generator().manual_seed(epoch)
    used = []
    for numbers, x, y in ht.shard(DataLoader(data, batch_size=24, shuffle=True, generator=order)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        used += numbers.tolist()
        time.sleep(0.05)
    epoch += 1
    used = sorted(comm.allgather_object(used))
    if comm.rank == 0:
        torch.save(dict(epoch=epoch, model=model.state_dict(), optimizer=optimizer.state_dict()), "new.pt")
        Path("new.pt").rename(state)
        with open("used", "a") as file:
            print(epoch, *sum(used, []), file=file)
    if comm.broadcast_object(Path("enough").exists()) or sys.argv[1:] == [str(epoch)]:
        break
    if ht.should_stop():
        sys.exit(ht.RESUMABLE)
"""


@pytest.mark.thorough
def test_a_script_goes_on_with_the_hosts_that_there_are(hosts: LocalHosts, tmp_path: Path):
    """h3 is added, and h2 is lost; what is learnt is what one process learns."""
    (tmp_path / "script.py").write_text(SCRIPT)
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("h1\nh2\n")

    def epochs() -> list[list[int]]:
        """The number of each epoch that ended, and its samples."""
        return [list(map(int, line.split())) for line in (tmp_path / "used").read_text().splitlines()]

    with started(hosts, tmp_path, "script.py") as run:
        run.wait("it begins", lambda: (tmp_path / "state.pt").exists())
        hostfile.write_text("h1\nh2\nh3\n")
        hosts.kill("h2")
        run.wait("it goes on with h3 and without h2", lambda: run.starts()[1:] == [("h1", "h3")])
        before = len(epochs())
        run.wait("it goes on", lambda: len(epochs()) > before)
        (tmp_path / "enough").touch()
        run.end()
    assert [epoch for epoch, *_ in epochs()] == list(range(1, len(epochs()) + 1))
    assert all(Counter(used) == Counter(range(240)) for _, *used in epochs())
    alone = tmp_path / "alone"
    alone.mkdir()
    subprocess.run([sys.executable, tmp_path / "script.py", str(len(epochs()))], cwd=alone, check=True, timeout=120)
    learnt, expected = (torch.load(folder / "state.pt", weights_only=True) for folder in (tmp_path, alone))
    assert learnt["epoch"] == expected["epoch"]
    for name, value in expected["model"].items():
        torch.testing.assert_close(learnt["model"][name], value, rtol=0, atol=1e-10)
