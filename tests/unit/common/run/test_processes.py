"""Which processes belong to a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events.kinds import StartEvent
from hpctrain.common.run.records import RankRecord, works_in, write_record
from hpctrain.control.resuming.attempts import require_attempt_ended
from hpctrain.control.schedulers.cancel import stop_launcher
from support.refusals import refused


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.ranks.mkdir(parents=True)
    return made


@pytest.fixture(params=[False, True], ids=["another's", "the run's"])
def process(request: pytest.FixtureRequest, directory: RunDirectory) -> Iterator[tuple[psutil.Process, bool]]:
    """A process that names the directory in its command line and works in it, and may hold it open as well."""
    program = f"import os, sys, time; held = {request.param} and os.open('.', os.O_RDONLY); print(flush=True)"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{program}; time.sleep(60)", str(directory.path)],
        stdout=subprocess.PIPE,
        cwd=directory.path,
    )
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield psutil.Process(child.pid), request.param
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_who_holds_the_directory_works_in_it(
    directory: RunDirectory, process: tuple[psutil.Process, bool], tmp_path: Path
) -> None:
    assert works_in(process[0], directory.path) == process[1]
    assert not works_in(process[0], tmp_path)
    (tmp_path / "link").symlink_to(directory.path)
    assert works_in(process[0], tmp_path / "link") == process[1]
    directory.path.rename(tmp_path / "moved")
    assert works_in(process[0], tmp_path / "moved") == process[1]
    # What has its name now is another one.
    directory.path.mkdir()
    assert not works_in(process[0], directory.path)


def test_cancel_ends_no_other_process(directory: RunDirectory, process: tuple[psutil.Process, bool]) -> None:
    each, own = process
    start = StartEvent(attempt=1, iteration=0, host=os.uname().nodename, pid=each.pid)
    said = list(stop_launcher(directory, start, 10.0))
    assert bool(said) == own
    assert each.is_running() == (not own)


def test_ranks_of_the_last_attempt_are_the_runs_processes(
    directory: RunDirectory, process: tuple[psutil.Process, bool]
) -> None:
    each, own = process
    record = RankRecord(rank=0, host=os.uname().nodename, pid=each.pid, started=each.create_time(), status="running")
    write_record(directory, record)
    with refused("HT-run-still-alive", pids=str(each.pid)) if own else contextlib.nullcontext():
        require_attempt_ended(directory)
