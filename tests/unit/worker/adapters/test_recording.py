"""What a script tells of itself: events of its run, and lines on its output."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpctrain as ht
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.common.run.events.kinds import StartEvent, StoppedEvent
from hpctrain.common.run.plan import Plan, Script, Slots
from hpctrain.report.page import read_summary
from hpctrain.worker.adapters import recording
from hpctrain.worker.comm.rank_run import run
from hpctrain.worker.comm.single import SingleCommunicator
from support.refusals import refused


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(run, "recording", None)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Of a script that has begun."""
    found = RunDirectory(tmp_path / "run")
    hosts = (Slots(host="node1", slots=2),)
    found.create(Plan(script=Script(path=Path("train.py")), backend="mpi", ranks=2, hosts=hosts, threads_per_rank=1))
    with EventWriter(found.events) as events:
        events.emit(StartEvent(attempt=1, iteration=0, launcher="none", hosts=("node1",)))
    recording.begin(found.events)
    return found


def steps_and_logs(directory: RunDirectory) -> list[tuple[str, int]]:
    return [(event.event, getattr(event, "iteration", None)) for event in read_events(directory.events)][1:]


def train(steps: int) -> None:
    own = recording.recording()
    assert own.begin_run(SingleCommunicator("test"), "torch", own, 12)
    assert not own.begin_run(SingleCommunicator("test"), "torch", SingleCommunicator("other"), 34)
    for step in range(steps):
        own.step_done(0.1 / (step + 1))
        ht.log(loss=1 / (step + 1), step=None)
    ht.log({"test/accuracy": 0.75, "odd": math.inf})


def test_events_and_summary_of_a_script(directory):
    train(4)
    kinds = [event.event for event in read_events(directory.events)]
    assert kinds == ["start", "run", *["step", "log"] * 4, "log"]
    summary = read_summary(directory)
    assert summary["metrics"] == {"loss": 0.25, "test/accuracy": 0.75, "odd": None}
    assert (summary["steps"], summary["epochs"], summary["samples_per_s"]) == (4, None, None)
    assert (summary["framework"], summary["backend"]) == ("torch", "single")


def test_steps_of_the_first_optimizer_count_by_themselves(directory):
    torch = pytest.importorskip("torch")
    models = [torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        ht.distribute(model, optimizer, comm=SingleCommunicator("test"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.5)
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        schedule.step()
        ht.log(loss=torch.tensor(2.0, requires_grad=True))
    assert steps_and_logs(directory)[1:] == [(kind, step) for step in (1, 2, 3) for kind in ("step", "log")]
    events = list(read_events(directory.events))
    assert events[1].parameters == 4
    assert [event.learning_rate for event in events if event.event == "step"] == [0.5, 0.25, 0.125]
    assert events[-1].values == {"loss": 2.0}


@pytest.mark.long
def test_fit_tells_its_steps_and_the_metrics_of_its_epochs(directory):
    keras = pytest.importorskip("keras")
    comm = SingleCommunicator("test")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model, optimizer = ht.distribute(model, keras.optimizers.SGD(0.01), comm=comm)
    model.compile(optimizer, "mse")
    x = keras.ops.ones((6, 3))
    data, history = (x, x[:, :1]), []
    for _ in range(2):
        callbacks = ht.keras.callbacks(comm=comm)
        fitted = model.fit(*data, batch_size=2, epochs=2, verbose=0, validation_data=data, callbacks=callbacks).history
        history += [dict(zip(fitted, row, strict=True)) for row in zip(*fitted.values(), strict=True)]
    events = iter(steps_and_logs(directory))
    assert next(events) == ("run", None)
    for last in (3, 6, 9, 12):
        assert list(islice(events, 4)) == [("step", last - 2), ("step", last - 1), ("step", last), ("log", last)]
    logged = [event.values for event in read_events(directory.events) if event.event == "log"]
    assert logged == [pytest.approx(each) for each in history]


def test_without_a_run_directory_the_newest_values_are_printed(capsys, monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(recording.time, "monotonic", lambda: now.seconds)
    for step in range(5):
        ht.log(loss=step / 2, step=step)
        now.seconds += 0.4
    recording.recording().flush()
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert lines == [["step", step, "loss", loss] for step, loss in (("0", "0"), ("3", "1.5"), ("4", "2"))]


@pytest.mark.parametrize(
    ("given", "code", "values"),
    [
        ({}, "HT-argument-not-valid", {}),
        ({"loss": "low"}, "HT-not-one-number", {"name": "loss"}),
        ({"loss": [1.0, 2.0]}, "HT-not-one-number", {"name": "loss"}),
    ],
)
def test_what_cannot_be_logged(given, code, values):
    with refused(code, **values):
        ht.log(**given)


@pytest.mark.parametrize("stops", [(), (5,)])
@pytest.mark.parametrize("said", [None, 7])
def test_where_a_script_goes_on(directory, monkeypatch, stops, said):
    train(12)
    with EventWriter(directory.events, alone=False) as events:
        for step in stops:
            events.emit(StoppedEvent(iteration=step, reason="SIGTERM"))
    monkeypatch.setattr(run, "recording", None)
    recording.begin(directory.events)
    if said is not None:
        ht.resumed_at(said)
    recording.recording().step_done(0.1)
    recording.recording().step_done(0.1)
    place = said if said is not None else max(stops, default=0)
    assert steps_and_logs(directory)[-3:] == [("continued", place), ("step", place + 1), ("step", place + 2)]
