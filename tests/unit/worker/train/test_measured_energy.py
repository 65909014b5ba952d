"""What a run records of the energy that it draws: a real run of digits, and what hosts tell each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.common.run.events.kinds import EnergyEvent
from hpctrain.common.run.plan import Plan, Script, Slots
from hpctrain.common.run.value_types import HostEnergy
from hpctrain.report.summary import summarise
from hpctrain.worker import energy_meter
from hpctrain.worker.energy_meter import HostMeter, RunEnergy
from support.digits_recipes import digits_recipe
from support.power_zones import SERVER, PowerZones

# Each reading finds 2 J more on the package and 1 J more on the DRAM.
PROGRAM = """
import functools, os, sys
from pathlib import Path

import hpctrain.worker.adapters.recording, hpctrain.worker.energy_meter
import hpctrain.worker.train.recipe
from hpctrain.worker.train.rank import run_rank

root, directory = map(Path, sys.argv[1:])
HostMeter = hpctrain.worker.energy_meter.HostMeter


class Meter(HostMeter):
    def __init__(self):
        super().__init__(powercap=root)

    def reading(self):
        for zone, joules in (("intel-rapl:0", 2), ("intel-rapl:0:1", 1)):
            file = root / zone / "energy_uj"
            if file.exists():
                file.write_text(str(int(file.read_text()) + joules * 1_000_000))
        return super().reading()


hpctrain.worker.energy_meter.HostMeter = Meter
hpctrain.worker.train.recipe.RunEnergy = functools.partial(hpctrain.worker.energy_meter.RunEnergy, meter=Meter)
sys.exit(run_rank(directory))
"""


def plan_of(**values: Any) -> Plan:
    host = Slots(host="here", slots=1)
    return Plan(backend="single", ranks=1, hosts=(host,), threads_per_rank=1, **values)


def run(root: Path, directory: RunDirectory) -> int:
    program = [sys.executable, "-c", PROGRAM, str(root), str(directory.path)]
    return subprocess.run(program, env={**os.environ}, check=False, timeout=120).returncode


def energies(directory: RunDirectory) -> list[EnergyEvent]:
    return [event for event in read_events(directory.events) if isinstance(event, EnergyEvent)]


@pytest.fixture
def begun(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create(plan_of(recipe=digits_recipe(epochs=2, batch={"size": 64}), framework="torch"))
    return directory


@pytest.mark.long
def test_a_run_of_digits(begun: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    zones = PowerZones(tmp_path, SERVER)
    assert run(zones.root, begun) == 0
    events = list(read_events(begun.events))
    kinds = [event.event for event in events if event.event in ("energy", "epoch", "end")]
    assert kinds == ["energy", "epoch", "energy", "epoch", "energy", "end"]
    steps = [event for event in events if event.event == "step"]
    summary = summarise(begun, read_model(begun.plan, Plan), "done")
    assert summary["energy_kwh"] == pytest.approx(9 / 3.6e6)
    assert summary["energy_by_source"] == {
        "gpu": None,
        "cpu": pytest.approx(6 / 3.6e6),
        "dram": pytest.approx(3 / 3.6e6),
    }
    assert summary["joules_per_sample"] == pytest.approx(9 / sum(step.samples for step in steps))
    assert summary["energy_covers"].startswith("no GPUs, ") and summary["energy_covers"].count("1 of 1") == 2


SCRIPT = """
import torch
import hpctrain as ht

ht.init()
model = torch.nn.Linear(2, 1)
model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
raise SystemExit("too bad")
"""


@pytest.mark.thorough
def test_a_script_and_its_end(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    zones, directory = PowerZones(tmp_path, SERVER), RunDirectory(tmp_path / "run")
    (tmp_path / "script.py").write_text(SCRIPT)
    directory.create(plan_of(script=Script(path=tmp_path / "script.py")))
    assert run(zones.root, directory) == 1
    (found,) = energies(directory)
    assert found.iteration == 3
    summary = summarise(directory, read_model(directory.plan, Plan), "failed")
    assert summary["energy_kwh"] == pytest.approx(3 / 3.6e6)
    assert summary["joules_per_sample"] is None, "nobody knows its samples"


class Rank:
    """One of four ranks on two hosts, which finds what the others say in a list."""

    def __init__(self, rank: int, said: list[Any]) -> None:
        self.rank, self.local_rank, self.host = rank, rank % 2, f"n{rank // 2 + 1}"
        self.local_size, self.in_host_memory = 2, False
        self.said = said

    def allgather_object(self, value: Any) -> list[Any]:
        self.said[self.rank] = value
        return list(self.said)


class Meter:
    made = 0

    def __init__(self) -> None:
        Meter.made += 1
        self.joules = 10.0 * Meter.made

    def reading(self) -> HostEnergy:
        self.joules += 1
        return HostEnergy(began=1.0, seconds=1.0, joules={"gpu": self.joules})

    def close(self) -> None:
        """Nothing runs."""


def test_the_first_rank_of_each_host_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meter, "made", 0)
    said: list[Any] = [None] * 4
    comms = [Rank(rank, said) for rank in range(4)]
    with EventWriter(tmp_path / "events.jsonl") as events:
        ranks = [RunEnergy(comm, events if comm.rank == 0 else EventWriter(None), meter=Meter) for comm in comms]
        for each in ranks:
            each.begin()
        assert Meter.made == 2 and [each.due for each in ranks] == [False] * 4
        monkeypatch.setattr(energy_meter, "_INTERVAL_SECONDS", 0.0)
        for each in reversed(ranks):
            each.record(7)
        # By the clock of one rank only, so that all agree.
        assert [each.due for each in ranks] == [True, False, False, False]
        # The first rank of the second host died: its other one measures from now on.
        comms[3].local_rank = 0
        said[2] = None
        for each in (ranks[3], ranks[1], ranks[0]):
            each.record(8)
        assert Meter.made == 3
    first, second = (event.hosts for event in read_events(tmp_path / "events.jsonl") if isinstance(event, EnergyEvent))
    assert {host: own.joules for host, own in first.items()} == {"n1": {"gpu": 11}, "n2": {"gpu": 21}}
    assert {host: own.joules for host, own in second.items()} == {"n1": {"gpu": 12}, "n2": {"gpu": 31}}


def test_gpus_that_other_ranks_see_alone_are_not_counted_and_it_is_said(tmp_path, monkeypatch) -> None:
    for gpu in (None, "GPU-a"):
        monkeypatch.setattr(energy_meter, "only_gpu", lambda gpu=gpu: gpu)
        own = RunEnergy(Rank(0, [None] * 4), EventWriter(None), meter=lambda: HostMeter(powercap=tmp_path))
        own.begin()
        assert own._meter is not None
        assert any("other ranks" in each for each in own._meter.reading().missing) == bool(gpu)
        own.close()


def test_a_run_without_counters_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with EventWriter(tmp_path / "events.jsonl") as events:
        own = RunEnergy(Rank(0, [None] * 4), events, meter=lambda: HostMeter(powercap=tmp_path / "empty"))
        own.record(1)
        own.record(2)
    (found,) = read_events(tmp_path / "events.jsonl")
    assert any(str(tmp_path) in each for each in found.hosts["n1"].missing)
