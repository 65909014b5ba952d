"""A script's steps are counted on from where it says that it was resumed, however an attempt ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import kept, read_events
from support import needs
from support.launching import Launch

# Trains 20 steps and saves every 5, and is killed after the eighth and the twelfth.
SCRIPT = """
import os
import torch
import torch.distributed as dist
import hpctrain as ht
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
if os.path.exists("state.pt"):
    state = torch.load("state.pt")
    model.module.load_state_dict(state["model"])
    step = state["step"]
    ht.resumed_at(step)
while step < 20:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        torch.save({"model": model.module.state_dict(), "step": step}, "new.pt")
        os.replace("new.pt", "state.pt")
    if step in (8, 12) and not os.path.exists(f"died-{step}"):
        open(f"died-{step}", "w").close()
        os.kill(os.getpid(), 9)
"""


@needs.pytorch
def test_steps_after_a_hard_death_are_neither_lost_nor_counted_twice(hpctrain: Launch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    result = hpctrain("run", "script.py", "-np", "1", "--run-dir", "run", "--restarts", "2")
    assert result.returncode == 0, result.stdout
    directory = RunDirectory(tmp_path / "run")
    assert json.loads(directory.summary.read_text())["steps"] == 20
    events = [*read_events(directory.events)]
    assert [event.iteration for event in events if event.event == "continued"] == [5, 10]
    assert [event.iteration for event in kept(events) if event.event == "step"] == [*range(1, 21)]


MISUSE = Path(__file__).parent / "programs" / "resumed_misuse.py"
BEGIN_AGAIN = "this run was resumed, but its data begin again"


@needs.pytorch
@pytest.mark.long
def test_a_resumed_script_without_a_place_is_told_once_and_so_is_one_that_saves_a_part(
    hpctrain: Launch, tmp_path: Path
) -> None:
    run = ["run", str(MISUSE), "-np", "2", "--backend", "gloo", "--run-dir"]
    first = hpctrain(*run, "run", "--", "fail")
    assert first.returncode != 0
    assert BEGIN_AGAIN not in first.stdout
    before, saved = first.stdout.split("whole saved")
    share = "((4, 4) of (8, 4))"
    assert "pickles" not in before and saved.count("pickles") == saved.count(share) == 1
    again = hpctrain("run", "--resume", "--run-dir", "run")
    assert again.stdout.count(BEGIN_AGAIN) == 1, again.stdout
