"""Events and a script that are not those of the last attempt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import EndEvent
from hpctrain.common.run.plan import Plan, Script
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.resuming.attempts import Attempt, changed_script, script_sha256
from hpctrain.control.resuming.resume import resumption

PLAN = Plan(recipe=load_recipe("digits"), framework="torch", ranks=1, hosts=(), threads_per_rank=1)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create(PLAN)
    with EventWriter(made.events) as events:
        events.emit(Attempt().start(PLAN, "none"))
        events.emit(EndEvent(status="resumable"))
    return made


@pytest.mark.parametrize(
    ("line", "told"),
    [('{"time": 1.0, "event": "step", "iter}', True), ('{"time": 1.0, "event": "later", "value": 1}', False)],
)
def test_a_damaged_step_is_a_warning(directory: RunDirectory, line: str, told: bool) -> None:
    """A run goes on without it, but its report does not."""
    lines = directory.events.read_text().splitlines()
    directory.events.write_text("\n".join([lines[0], line, *lines[1:], ""]))
    further = resumption(directory, TrainingRequest(work=None, run_dir=directory.path, dry_run=True))
    assert further is not None and further.attempt.number == 2
    warned = [warning for warning in further.warnings if warning.startswith(f"{directory.events}:2: not an event")]
    assert bool(warned) == told


def test_a_script_that_has_changed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("one")
    plan = Plan(script=Script(path=script), ranks=1, hosts=(), threads_per_rank=1)
    start = Attempt().start(plan, "none")
    assert json.loads(start.model_dump_json())["script"] == script_sha256(plan)
    assert changed_script([start], script_sha256(plan)) is None
    script.write_text("two")
    assert changed_script([start], script_sha256(plan)) == (start.script, script_sha256(plan))
    script.unlink()
    assert script_sha256(plan) is None
    assert changed_script([start], None) is None
