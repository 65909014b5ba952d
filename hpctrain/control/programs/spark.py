"""Makes shards and tokens as a job of Spark: one task a shard, on whatever executors the cluster gives."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.settings import TIMEOUT, TIMEOUT_HINT
from hpctrain.common.shards.work import Manifest, Work, make, naming_host, with_absolute_paths
from hpctrain.control.programs.shard import ENVIRONMENT, require_extras, say

if TYPE_CHECKING:
    from pyspark import SparkContext

_POLL_SECONDS = 0.5
_AGAIN = "the same command continues with what is not yet made"


def on_spark(work: Work, master: str | None) -> Manifest:
    """Make the folder, or what of it is missing or damaged.

    Args:
        work: what to make; the executors see its source and its folder, and have this interpreter with hpctrain.
        master: of the cluster, as ``spark://host:7077``; None for that of Spark's configuration, which without one is
            this machine.

    Raises:
        HpctrainError: the source or the folder does not fit, pyspark or Java is missing, the cluster does not answer,
            or it gives the job up.
    """
    require("spark")
    require_extras(work)
    _require_java()
    from pyspark import SparkConf, SparkContext

    # Without it the executors use whatever python3 they find.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    configuration = SparkConf().setAppName("hpctrain")
    if master is not None:
        configuration.setMaster(master)
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    configuration.setExecutorEnv(pairs=[*(ENVIRONMENT | path).items()])
    try:
        context = SparkContext(conf=configuration)
    except Exception as error:
        # The error can be of any type of py4j, which passes on Java's errors, or of PySpark.
        raise HpctrainError(
            "HT-spark-failed",
            "Spark does not start: {reason}",
            "--master URL names a cluster",
            exit_code=1,
            reason=_reason(error),
        ) from error
    with context:
        return make(with_absolute_paths(work), partial(_map_tasks, context), say)


def _require_java() -> None:
    home = os.environ.get("JAVA_HOME")
    program = f"{home}/bin/java" if home else "java"
    if shutil.which(program) is None:
        raise HpctrainError(
            "HT-program-not-found",
            "Spark needs Java, and there is no {program}",
            "install a runtime, as openjdk-17-jre-headless, or set JAVA_HOME",
            program=program,
        )


def _map_tasks(context: SparkContext, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    tasks = list(items)
    if not tasks:
        # Spark makes no job of an empty list.
        return iter(())
    job = context.parallelize(tasks, len(tasks)).map(partial(_call_or_error, function))
    with ThreadPoolExecutor(1) as thread:
        results: Future[list[Any]] = thread.submit(job.collect)
        _wait(context, results)
        try:
            answers: Sequence[Any] = results.result()
        except Exception as error:
            raise HpctrainError(
                "HT-spark-failed", "Spark gave the job up: {reason}", _AGAIN, exit_code=1, reason=_reason(error)
            ) from error
    for answer in answers:
        if isinstance(answer, HpctrainError):
            raise answer
    return iter(answers)


def _call_or_error(function: Callable[[Any], Any], task: Any) -> Any:
    """Return a fault of the source instead of raising it: Spark would retry the task, and report an error of Java."""
    try:
        return naming_host(function, task)
    except HpctrainError as error:
        return error


def _wait(context: SparkContext, results: Future[list[Any]]) -> None:
    """Wait for the end of a job. Spark itself waits for ever where no executor is free, or the last one is lost."""
    limit = TIMEOUT.read()
    deadline = time.monotonic() + limit
    status = context.statusTracker()
    while not results.done():
        stages = [status.getStageInfo(stage) for stage in status.getActiveStageIds()]
        if any(stage and stage.numActiveTasks for stage in stages):
            deadline = time.monotonic() + limit
        if time.monotonic() > deadline:
            context.cancelAllJobs()
            raise HpctrainError(
                "HT-spark-failed",
                "no executor of {master} had a task for {seconds:g} s",
                f"are there workers with free cores and as much memory as spark.executor.memory? {TIMEOUT_HINT}",
                exit_code=1,
                master=context.master,
                seconds=limit,
            )
        time.sleep(_POLL_SECONDS)


def _reason(error: Exception) -> str:
    """The line of an error that matters: the Python error within what may be pages of a Java stack trace."""
    java = getattr(error, "java_exception", None)
    text = str(java.getMessage() if java is not None else error)
    _, traceback, python = text.partition("Traceback (most recent call last):\n")
    lines = [line for line in python.splitlines() if re.match(r"[\w.]+: ", line)] if traceback else []
    lines += [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
