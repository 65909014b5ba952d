"""Jobs of Spark that do not end by themselves; tests/spark has a real cluster."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.control.programs.spark import _call_or_error, _map_tasks, _reason, _require_java, _wait
from support.refusals import check, refused


class Cluster:
    """Has a task for so many looks, and then none for ever."""

    master = "spark://host:7077"

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self.cancelled = False

    def statusTracker(self) -> Cluster:
        return self

    def getActiveStageIds(self) -> list[int]:
        return [0]

    def getStageInfo(self, stage: int) -> Any:
        self._looks -= 1
        return SimpleNamespace(numActiveTasks=int(self._looks >= 0), numCompletedTasks=3)

    def cancelAllJobs(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize("looks", [0, 3])
def test_a_job_without_an_executor_is_given_up(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all executors were lost after they had begun."""
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.2")
    monkeypatch.setattr("hpctrain.control.programs.spark._POLL_SECONDS", 0.05)
    cluster: Any = Cluster(looks)
    with refused("HT-spark-failed", master="spark://host:7077", seconds=0.2):
        _wait(cluster, Future())
    assert cluster.cancelled


def test_what_is_wrong_names_the_host() -> None:
    """A file system may be missing on one host alone."""

    def wrong(task: str) -> None:
        raise HpctrainError("HT-of-test", "{task} is missing", "mount it", exit_code=1, task=task)

    told = _call_or_error(wrong, "/data/train.tar")
    assert told.message.startswith(f"on {socket.gethostname()}: ")
    check(told, "HT-of-test", task="/data/train.tar")
    assert (told.hint, told.exit_code) == ("mount it", 1)


def test_without_java_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with refused("HT-program-not-found", program="/nowhere/bin/java"):
        _require_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", "/nowhere")
    with refused("HT-program-not-found", program="java"):
        _require_java()


def test_nothing_to_do_is_no_job() -> None:
    nothing: Any = None
    assert list(_map_tasks(nothing, str, [])) == []


def test_the_error_of_an_executor_is_said() -> None:
    """As where its Python lacks hpctrain."""
    text = """Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent failure: Lost task 0.3
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/spark/python/worker.py", line 7, in main
    func = loads()
ModuleNotFoundError: No module named 'hpctrain'

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:572)
"""
    (raised,) = (line for line in text.splitlines() if line.startswith("ModuleNotFoundError: "))
    assert _reason(RuntimeError(text)) == raised
    first = "No master answers"
    assert _reason(RuntimeError(f"\n {first}\n at Java")) == first
