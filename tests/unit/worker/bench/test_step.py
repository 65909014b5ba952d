"""What the training loop adds to a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import hpctrain as ht
from hpctrain.common.run.events import read_events
from hpctrain.worker.bench.step import loop_overhead, with_guard
from hpctrain.worker.comm.single import SingleCommunicator


def test_it_looks_at_gradients_and_records_a_step(tmp_path: Path):
    model = torch.nn.Linear(3, 2)
    model, optimizer = ht.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), comm=SingleCommunicator("a test")
    )
    model(torch.ones(1, 3)).sum().backward()
    calls = loop_overhead(model, optimizer, SingleCommunicator("a test"), tmp_path)
    for call in calls.values():
        call()
    (event,) = read_events(tmp_path / "supervision.jsonl")
    assert event.event == "step"
    assert json.dumps(event.order).isdigit()


def test_the_guard_is_spread_over_the_steps_between_two_checks():
    found = with_guard({"ddp over gloo": [1.0, 2.0], "supervision": [0.01, 0.02], "guard's check": [0.5, 0.4]})
    guard = "of it the guard"
    assert list(found) == ["ddp over gloo", "all supervision", guard]
    assert found[guard] == pytest.approx([0.005, 0.004])
    assert found["all supervision"] == pytest.approx([0.015, 0.024])
