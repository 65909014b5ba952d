"""The part of the other pods of an Indexed Job, without ranks: what each look at a run's events leads to."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hpctrain.common.cluster.machine import Machine
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import EndEvent, StartEvent
from hpctrain.common.run.plan import Slots, Start
from hpctrain.common.run.records import RankRecord, write_record
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.planning.place_hosts import PlacedHosts
from hpctrain.control.planning.planner import make_plan
from hpctrain.control.supervision.hosts_ready import await_names
from hpctrain.control.supervision.pods import take_part
from support.refusals import refused

RECORD = RankRecord(rank=1, host="a pod that is gone", pid=1, started=0.0, status="running")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run on two hosts of a rank each, of which this is the second."""
    monkeypatch.setenv("HPCTRAIN_POD", "digits")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    machine = Machine(host="a", cores=1, frameworks=frozenset({"torch"}), versions={})
    hosts = PlacedHosts(slots=(Slots(host="a", slots=1), Slots(host="b", slots=1)))
    directory = RunDirectory(tmp_path / "run")
    directory.create(
        make_plan(TrainingRequest(work=load_recipe("digits"), start=Start(launcher="torchrun")), machine, hosts)
    )
    return directory


def begin(directory: RunDirectory, attempt: int) -> None:
    with EventWriter(directory.events) as events:
        hosts = ("a", "b")
        events.emit(StartEvent(attempt=attempt, iteration=0, launcher="torchrun", hosts=hosts, host="a", pid=1))


def end(directory: RunDirectory, status: str) -> None:
    with EventWriter(directory.events) as events:
        events.emit(EndEvent(status=status))


def test_a_run_that_is_done_needs_no_pod_any_more(run: RunDirectory) -> None:
    begin(run, 1)
    end(run, "done")
    assert take_part(run, seconds=5, poll=0.01) == 0


@pytest.mark.parametrize("status", ["failed", "resumable"])
def test_how_it_ended_before_says_nothing_of_how_it_goes_on(run: RunDirectory, status: str) -> None:
    begin(run, 1)
    end(run, status)
    begun = time.monotonic()
    assert take_part(run, seconds=0.3, poll=0.01) == 4
    assert time.monotonic() - begun >= 0.3


def test_an_attempt_that_had_this_pods_ranks_is_not_joined_again(
    run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    begin(run, 1)
    write_record(run, RECORD)
    assert take_part(run, seconds=0.3, poll=0.01) == 4
    assert "attempt" not in capfd.readouterr().err


def test_nothing_begins_in_a_directory_that_is_not_there_yet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert take_part(RunDirectory(tmp_path / "none"), seconds=0.1, poll=0.01) == 4
    assert " 0.1 s" in capfd.readouterr().err


def test_a_pod_that_waits_leaves_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def end_when_it_listens() -> None:
        while signal.getsignal(signal.SIGTERM) is before:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_when_it_listens, daemon=True).start()
    # The limit of a test ends before that of this wait.
    assert take_part(RunDirectory(tmp_path), seconds=3600, poll=0.01) == 4


def test_events_that_cannot_be_read_are_read_again(run: RunDirectory) -> None:
    begin(run, 1)
    end(run, "done")
    text = run.events.read_bytes()
    run.events.write_bytes(b"\0" * 20 + text[20:])
    threading.Timer(0.3, lambda: run.events.write_bytes(text)).start()
    assert take_part(run, seconds=100, poll=0.01) == 0


def test_an_event_that_is_taken_back_is_forgotten(run: RunDirectory) -> None:
    begin(run, 1)
    write_record(run, RECORD)
    text = run.events.read_bytes()
    end(run, "failed")

    def take_back_and_go_on() -> None:
        time.sleep(0.2)
        run.events.write_bytes(text)
        time.sleep(0.4)
        begin(run, 2)
        end(run, "done")

    threading.Thread(target=take_back_and_go_on).start()
    assert take_part(run, seconds=100, poll=0.01) == 0


def test_names_are_waited_for() -> None:
    said: list[str] = []
    await_names(["127.0.0.1", "localhost"], notice=said.append, seconds=0)
    assert not said
    with refused("HT-host-no-address", hosts="digits-1.invalid", seconds=0.2) as raised:
        await_names(["127.0.0.1", "digits-1.invalid"], notice=said.append, seconds=0.2, poll=0.05)
    assert raised.value.exit_code == 4
    assert len(said) == 1 and " digits-1.invalid, " in said[0] and " 0.2 s" in said[0]
