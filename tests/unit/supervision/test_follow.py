"""A run's events are shown as they appear."""

from __future__ import annotations

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.events import line_of
from hpctrain.run.events.kinds import EndEvent, StoppedEvent
from hpctrain.supervision.follow import Follower


def test_a_line_that_is_no_event_is_named_by_its_number_in_the_file(tmp_path):
    directory = RunDirectory(tmp_path)
    line = line_of(EndEvent(status="resumable"))
    directory.events.write_bytes(line * 2)
    shown = []
    follower = Follower(directory, shown.append, lambda text: None)
    with directory.events.open("ab") as file:
        file.write(line_of(StoppedEvent(iteration=3, reason="SIGTERM")))
    follower.advance()
    assert [event.event for event in shown] == ["stopped"]
    with directory.events.open("ab") as file:
        file.write(line + b'{"time": 1, "event": "stopped", "iteration": -1, "reason": ""}\n')
    with pytest.raises(HpctrainError, match=r"events\.jsonl:5: the event 'stopped' cannot have iteration = -1: "):
        follower.advance()
