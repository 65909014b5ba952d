"""What a run drew: sums over hosts and attempts, what they cover, and where that is shown."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import EnergyEvent, StartEvent
from hpctrain.common.run.value_types import HostEnergy
from hpctrain.report.page import read_summary, render
from hpctrain.report.summary import energy_keys, summarise
from support.golden import check_text
from support.report.written_runs import EPOCHS, STEPS, Line, recipe_plan, record_of, run_events, write_run

SAMPLES = 64


def reading(joules: dict[str, float], began: float = 1.0, missing: tuple[str, ...] = ()) -> HostEnergy:
    return HostEnergy(began=began, seconds=1.0, joules=joules, missing=missing)


def energy(iteration: int, **hosts: HostEnergy) -> Line:
    return json.loads(json.dumps(EnergyEvent(time=1.0, iteration=iteration, hosts=hosts).record()))


def with_energy(directory: Path, *lines: Line, after: int = EPOCHS * STEPS) -> RunDirectory:
    """A run with these events after a step."""
    events = run_events()
    place = next(index for index, event in enumerate(events) if event.get("iteration") == after) + 1
    return write_run(directory, recipe_plan(), [*events[:place], *lines, *events[place:]])


def test_the_keys_of_a_summary(tmp_path: Path) -> None:
    whole = {"gpu": 3.6e6, "cpu": 1.8e6}
    first = energy(4, n1=reading({"gpu": 1.0, "cpu": 2.0}), n2=reading({"gpu": 1.0}))
    last = energy(12, n1=reading(whole, missing=("no right to read it",)), n2=reading({"gpu": 7.2e6}))
    directory = with_energy(tmp_path / "run", first, last)
    summary = summarise(directory, recipe_plan(), "done")
    assert summary["energy_kwh"] == pytest.approx(3.5)
    assert summary["energy_by_source"] == {"gpu": pytest.approx(3), "cpu": pytest.approx(0.5), "dram": None}
    assert summary["joules_per_sample"] == pytest.approx(12.6e6 / (SAMPLES * EPOCHS * STEPS))
    check_text("energy-covers", summary["energy_covers"])


def test_samples_are_of_steps_whose_energy_is_known(tmp_path: Path) -> None:
    directory = with_energy(tmp_path / "run", energy(4, node1=reading({"gpu": 512.0})), after=4)
    assert summarise(directory, recipe_plan(), "done")["joules_per_sample"] == pytest.approx(512 / (SAMPLES * 4))


def test_nothing_could_be_read(tmp_path: Path) -> None:
    directory = with_energy(tmp_path / "run", energy(4, node1=reading({}, missing=("no NVML", "no powercap"))))
    summary = summarise(directory, recipe_plan(), "done")
    assert [summary[key] for key in ("energy_kwh", "energy_by_source", "joules_per_sample")] == [None] * 3
    said = "nothing here can be read: no NVML; no powercap"
    assert summary["energy_covers"] == said
    # A card without a figure would say nothing about the run.
    assert said not in render(directory)


def test_the_report_has_a_figure(tmp_path: Path) -> None:
    directory = with_energy(tmp_path / "run", energy(12, node1=reading({"gpu": 76_800.0})))
    assert read_summary(directory)["energy_kwh"] == pytest.approx(76_800 / 3.6e6)
    covers = summarise(directory, recipe_plan(), "done")["energy_covers"]
    page = render(directory)
    assert "21.33 Wh" in page and "100 J" in page and covers in page


def test_what_was_lost_and_done_again_was_drawn_all_the_same(tmp_path: Path) -> None:
    starts: list[Line] = [
        {"time": 1.0, "event": "start", "attempt": number, "iteration": 0, "job": None} for number in (1, 2, 3)
    ]
    drawn = [energy(8, node1=reading({"gpu": 100.0}, began=1.0)), energy(12, node1=reading({"gpu": 30.0}, began=2.0))]
    once = run_events()
    lost = [event for event in once if event["event"] == "step"][:9]
    events = [starts[0], once[0], *lost, drawn[0], starts[1], starts[2], *once[:-1], drawn[1], once[-1]]
    directory = write_run(tmp_path / "run", recipe_plan(), events)
    summary = summarise(directory, recipe_plan(), "done")
    assert summary["energy_kwh"] == pytest.approx(130 / 3.6e6)
    assert summary["joules_per_sample"] == pytest.approx(130 / (SAMPLES * EPOCHS * STEPS))
    assert re.findall("[0-9]+", summary["energy_covers"].rpartition(",")[2]) == ["2", "3"]


@st.composite
def attempts_of_hosts(draw: st.DrawFn) -> tuple[list[Event], dict[str, float]]:
    """Events of several attempts on several hosts, and what was drawn in all."""
    events: list[Event] = []
    total: dict[str, float] = {}
    for attempt in range(draw(st.integers(1, 3))):
        # Some steps of the attempt before are lost.
        events.append(StartEvent(attempt=attempt + 1, iteration=draw(st.integers(0, 5))))
        hosts = draw(st.lists(st.sampled_from(["n1", "n2", "n3"]), unique=True))
        so_far: dict[str, dict[str, float]] = {host: {} for host in hosts}
        for iteration in range(draw(st.integers(0, 3))):
            for own in so_far.values():
                for source in draw(st.sets(st.sampled_from(["gpu", "cpu", "dram"]))) | own.keys():
                    more = draw(st.integers(0, 1000))
                    own[source] = own.get(source, 0.0) + more
                    total[source] = total.get(source, 0.0) + more
            # A host's last reading of an attempt is often its only one.
            now = {host: reading(dict(own), began=attempt * 10.0) for host, own in so_far.items()}
            events.append(EnergyEvent(iteration=iteration, hosts=now))
    return events, total


@pytest.mark.slow
@given(attempts_of_hosts())
def test_sums_over_hosts_and_attempts(run: tuple[list[Event], dict[str, float]]) -> None:
    events, total = run
    found = energy_keys(record_of(events).events, recipe_plan(), None)
    if not total:
        assert found["energy_kwh"] is None and found["energy_by_source"] is None
        return
    drawn = {source: kwh for source, kwh in found["energy_by_source"].items() if kwh is not None}
    assert drawn == pytest.approx({source: joules / 3.6e6 for source, joules in total.items()})
    assert found["energy_kwh"] == pytest.approx(sum(total.values()) / 3.6e6)
    # A reading that comes again adds nothing.
    again = energy_keys([*events, events[-1]], recipe_plan(), None)
    assert again["energy_by_source"] == found["energy_by_source"]


def test_slurms_accounting_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    # Of one of two jobs it has measured nothing.
    sacct = 'case "$*" in *--jobs=7,8*) printf "5400000\\n\\n";; esac'
    for name, script in {"sacct": sacct, "squeue": ""}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    starts: list[Line] = [
        {"time": 1.0, "event": "start", "attempt": each, "iteration": 0, "job": str(6 + each)} for each in (1, 2)
    ]
    directory = write_run(tmp_path / "run", recipe_plan(), [*starts, *run_events()])
    assert "the scheduler&#39;s accounting" in render(directory)
