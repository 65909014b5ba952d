"""Requests for runs, without the command line: what is done, what is written, and who is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.cluster.machine import Machine
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan, Script
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.supervision import begin
from hpctrain.control.supervision.audience import Audience, ReadyRun
from hpctrain.control.supervision.begin import begin_or_resume
from hpctrain.control.supervision.failure import Failure
from hpctrain.control.supervision.interrupts import Interrupts
from hpctrain.report.summary import summarise
from support.refusals import refused


class Heard:
    """An output that remembers."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.ready: list[tuple[ReadyRun, RunDirectory]] = []
        self.lines: list[str] = []
        self.failures: list[Failure | None] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def would_start(self, run: ReadyRun, directory: RunDirectory) -> None:
        self.ready.append((run, directory))

    @contextlib.contextmanager
    def follow(self, plan: Plan, directory: RunDirectory, interrupts: Interrupts) -> Iterator[Audience]:
        yield Audience(output=lambda text: self.lines.extend(text.splitlines()), notice=self.notice)

    def summarise(self, directory: RunDirectory, plan: Plan, status: str) -> dict[str, Any]:
        return summarise(directory, plan, status)

    def ended(self, plan: Plan, directory: RunDirectory, failure: Failure | None, summary: dict[str, Any]) -> None:
        assert json.loads(directory.summary.read_text()) == summary
        self.failures.append(failure)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)


def script(text: str) -> Script:
    path = Path("train.py").absolute()
    path.write_text(text)
    return Script(path=path)


def asked(work: Script | None, **further: Any) -> TrainingRequest:
    return TrainingRequest(work=work, ranks=1, backend="single", run_dir=Path("run"), **further)


def test_a_run_is_begun_and_a_second_resume_finds_it_done() -> None:
    heard = Heard()
    assert begin_or_resume(asked(script("print('hello')")), heard, resume=False) == 0
    assert (heard.lines, heard.failures, heard.notices) == (["hello"], [None], [])
    Path("run/summary.json").unlink()
    again = Heard()
    assert begin_or_resume(asked(None), again, resume=True) == 0
    assert (len(again.notices), again.failures) == (1, [])
    # It was lost between the last event and the summary.
    assert json.loads(Path("run/summary.json").read_text())["status"] == "done"


def test_an_error_of_the_launchers_own_is_on_record_as_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **settings: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("hpctrain.control.supervision.execution.run_attempt", broken)
    with pytest.raises(RuntimeError):
        begin_or_resume(asked(script("")), Heard(), resume=False)
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["status"], summary["failure"]["code"]) == ("failed", "HT-launcher-internal-error")
    assert "RuntimeError: a" in summary["failure"]["message"]


def test_a_script_that_damages_the_events_is_done_all_the_same() -> None:
    heard = Heard()
    damage = "open('run/events.jsonl', 'a').write('nonsense\\n')"
    assert begin_or_resume(asked(script(damage)), heard, resume=False) == 0
    assert heard.failures == [None] and len(heard.notices) == 2
    assert json.loads(Path("run/summary.json").read_text())["status"] == "done"


def test_a_dry_run_starts_and_writes_nothing() -> None:
    heard = Heard()
    request = TrainingRequest(work=load_recipe("digits"), ranks=1, backend="single", dry_run=True)
    assert begin_or_resume(request, heard, resume=False) == 0
    assert len(heard.ready) == 1
    assert {run.launcher for run, _ in heard.ready} == {None}
    assert heard.lines == heard.failures == []
    assert not any(Path().iterdir())


@pytest.mark.parametrize(("begun", "code"), [(True, 4), (False, 1)])
def test_a_signal_before_the_ranks_are_started(begun: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there can be resumed; what was never begun cannot."""
    work = script("raise SystemExit(3)")
    if begun:
        begin_or_resume(asked(work), Heard(), resume=False)

    def interrupt(plan: Plan, machine: Machine) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(begin, "available_launcher", interrupt)
    heard = Heard()
    assert begin_or_resume(asked(work), heard, resume=True) == code
    (notice,) = heard.notices
    assert "SIGTERM" in notice
    assert Path("run").exists() == begun


@pytest.mark.slow
@pytest.mark.parametrize(
    ("further", "code", "values"),
    [
        ({"run_dir": None}, "HT-argument-missing", {}),
        ({"run_dir": Path("nothing")}, "HT-run-not-found", {"path": "nothing"}),
    ],
)
def test_what_cannot_go_on(further: dict[str, Any], code: str, values: dict[str, str]) -> None:
    begin_or_resume(asked(script("raise SystemExit(3)")), Heard(), resume=False)
    request = TrainingRequest(**{"work": None, "run_dir": Path("run"), **further})
    with refused(code, **values):
        begin_or_resume(request, Heard(), resume=True)
