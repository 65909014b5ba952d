"""What trackers may still do when a run has ended or was stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event
from hpctrain.report.tracking import sending
from hpctrain.report.tracking.sending import Trackers
from hpctrain.report.tracking.tensorboard_files import TensorBoardFiles
from support.report.written_runs import typed_run


def test_a_tracker_that_hangs_keeps_no_run_from_its_end(
    finished: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def hang(self: TensorBoardFiles, events: Sequence[Event]) -> None:
        asked.set()
        answered.wait(60)

    monkeypatch.setattr(TensorBoardFiles, "send", hang)
    monkeypatch.setattr(sending, "_END_SECONDS", 0.5)
    said: list[str] = []
    with Trackers(("tensorboard",), finished, said.append) as trackers:
        longest = 0.0
        for event in typed_run():
            began = time.monotonic()
            trackers.give(event)
            longest = max(longest, time.monotonic() - began)
        assert asked.wait(60)
        began = time.monotonic()
    answered.set()
    assert longest < 1 and time.monotonic() - began < 20
    assert said[-1].startswith("tensorboard took too long")
