"""Runs written by hand, whose every figure is known."""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

import hpctrain.common.recipes
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, line_of, parse_event
from hpctrain.common.run.plan import Plan, Script, Slots
from hpctrain.report.record import Record

Line = dict[str, Any]
"""An event as JSON has it."""

STEPS = 4
EPOCHS = 3


def digits() -> Recipe:
    file = Path(hpctrain.common.recipes.__path__[0]) / "digits.yaml"
    return Recipe.model_validate_json(json.dumps(yaml.safe_load(file.read_text())))


def recipe_plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "recipe": digits(),
        "framework": "torch",
        "backend": "horovod",
        "ranks": 2,
        "hosts": (Slots(host="node1", slots=2),),
        "threads_per_rank": 1,
        "versions": {"torch": "2.13.0", "horovod": "0.28.1"},
    }
    return Plan(**{**values, **changes})


def script_plan(path: str = "train.py") -> Plan:
    return recipe_plan(recipe=None, script=Script(path=Path(path), arguments=("--lr", "0.1")), framework=None)


def run_events(epochs: int = EPOCHS) -> list[Line]:
    """A run of ``EPOCHS`` x ``STEPS`` steps, cut off after ``epochs``; the first step is slow, as in a real run.

    Every later step takes 0.5 s for 64 samples, 0.1 s of it in communication: 128 samples/s, a fifth.
    """
    events: list[Line] = [
        {
            "event": "run",
            "recipe": "digits",
            "framework": "torch",
            "backend": "horovod",
            "ranks": 2,
            "hosts": ["node1", "node1"],
            "epochs": EPOCHS,
            "iterations_per_epoch": STEPS,
            "parameters": 12345,
        }
    ]
    for iteration in range(1, epochs * STEPS + 1):
        epoch = (iteration - 1) // STEPS + 1
        events.append(
            {
                "event": "step",
                "iteration": iteration,
                "epoch": epoch,
                "loss": 2.0 / iteration,
                "learning_rate": 0.1 * (1 - iteration / 20),
                "samples": 64,
                "seconds": 5.0 if iteration == 1 else 0.5,
                "communication_seconds": 4.0 if iteration == 1 else 0.1,
                "data_seconds": 0.05,
            }
        )
        if iteration % STEPS == 0:
            events.append(
                {
                    "event": "epoch",
                    "epoch": epoch,
                    "seconds": 2.0,
                    "samples_per_s": 128.0,
                    "train_loss": 2.0 / epoch,
                    "test_loss": 2.1 / epoch,
                    "test_accuracy": 1 - 0.3 / epoch,
                }
            )
    if epochs == EPOCHS:
        events.append({"event": "end", "status": "done", "seconds": 10.5})
    return [{"time": 1_700_000_000.0 + second, **event} for second, event in enumerate(events)]


def typed(line: Line) -> Event:
    """An event as readers get it."""
    return parse_event(json.dumps(line).encode(), "an event of a test")


def typed_run(epochs: int = EPOCHS) -> list[Event]:
    """The same as :func:`run_events`."""
    return [*map(typed, run_events(epochs))]


def write_run(path: Path, plan: Plan, events: list[Line] | None) -> RunDirectory:
    directory = RunDirectory(path)
    directory.create(plan)
    if events is not None:
        directory.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


def record_of(events: Iterable[Event]) -> Record:
    """The record of a run with these events."""
    folder = tempfile.TemporaryDirectory()
    directory = RunDirectory(Path(folder.name))
    directory.events.write_bytes(b"".join(map(line_of, events)))
    record = Record(directory)
    # Not before, because a record reads its file again.
    weakref.finalize(record, folder.cleanup)
    return record
