"""A run on an MLflow server, by MLflow's own client."""

from __future__ import annotations

import contextlib
import getpass
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import EndEvent, StartEvent
from hpctrain.common.run.plan import Plan
from hpctrain.control.supervision.trackers import require_server
from hpctrain.report.tracking.following import NewEvent
from hpctrain.report.tracking.parameters import facts, parameters, texts, title
from hpctrain.report.tracking.progress import TrackerProgress, read_progress, write_progress
from hpctrain.report.tracking.redaction import server

# The most in one request (mlflow/utils/validation.py).
_METRICS, _OTHERS = 1000, 100
# TrackerProgress is recorded after this many.
_ENTRIES = 2000
_TAG = "hpctrain.id"
_STATUS = {"done": "FINISHED", "failed": "FAILED", "resumable": "KILLED"}
# Read by MLflow's client, which tries each request once: the follower repeats everything after a failure.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

T = TypeVar("T")


class MlflowRun:
    """Implements :class:`hpctrain.report.tracking.following.Tracking`.

    The server's run is found again by a tag. Sending a metric again does no harm, because MLflow keeps one of each
    name, step, time and value. Steps that were lost with a resume and done again are there twice, because MLflow
    deletes no metric.

    Args:
        say: prints the address at which the run can be seen.
    """

    rewrites = False

    def __init__(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        for key, value in _ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        self._directory = directory
        self._plan = read_model(directory.plan, Plan)
        self._address = require_server()
        self.place = server(self._address)
        self._say = say
        self._progress = read_progress(directory, "mlflow")
        self._client: Any = None
        self._announced = ""

    def open(self) -> TrackerProgress:
        # Imported here, because it takes seconds.
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self._address)
        experiment = self._experiment()
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{self._progress.id}'", max_results=1)
        run = found[0] if found else self._new(experiment)
        if run.info.run_id != self._progress.run:
            # This is another server than the last time, or the run was deleted there.
            self._keep(run=run.info.run_id, sent=0, time=None)
        # The server already has some of them if it failed in between.
        values = {key: value for key, value in texts(parameters(self._plan)).items() if key not in run.data.params}
        for part in _parts(values.items(), _OTHERS):
            self._client.log_batch(self._run, params=[Param(key, value) for key, value in part])
        if self._run != self._announced:
            self._say(f"{self.place}/#/experiments/{experiment}/runs/{self._run}")
            self._announced = self._run
        return self._progress

    def send(self, entries: Sequence[NewEvent]) -> None:
        from mlflow.entities import RunTag

        tags = texts(facts(entry.event for entry in entries))
        for part in _parts(tags.items(), _OTHERS):
            self._client.log_batch(self._run, tags=[RunTag(key, value) for key, value in part])
        for batch in _parts(entries, _ENTRIES):
            for values in _parts(_values(batch), _METRICS):
                self._client.log_batch(self._run, metrics=values)
            # The last batch counts as sent only with the status, which is then sent again after an error.
            if batch[-1] is not entries[-1]:
                self._keep(sent=batch[-1].number, time=batch[-1].event.time)
        self._send_status(entries)
        self._keep(sent=entries[-1].number, time=entries[-1].event.time)

    def close(self) -> None:
        """Nothing to do: the client holds no connection."""

    @property
    def _run(self) -> str:
        assert self._progress.run is not None
        return self._progress.run

    def _keep(self, **changes: Any) -> None:
        self._progress = self._progress.model_copy(update=changes)
        write_progress(self._directory, "mlflow", self._progress)

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._plan.title
        if found := self._client.get_experiment_by_name(name):
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:
            # Another run has made it in between.
            if found := self._client.get_experiment_by_name(name):
                return str(found.experiment_id)
            raise

    def _new(self, experiment: str) -> Any:
        tags = {
            _TAG: self._progress.id,
            "hpctrain.run_dir": str(self._directory.path.absolute()),
            "mlflow.source.name": self._plan.title,
        }
        # In a container the user may have no name.
        with contextlib.suppress(KeyError, OSError):
            tags["mlflow.user"] = getpass.getuser()
        name = title(self._plan, self._directory)
        return self._client.create_run(experiment, start_time=self._began(), tags=tags, run_name=name)

    def _began(self) -> int | None:
        """When the run began, in milliseconds since the epoch; None where it has no event yet."""
        if not self._directory.events.exists():
            return None
        return next((_milliseconds(event.time) for event in read_events(self._directory.events)), None)

    def _send_status(self, entries: Sequence[NewEvent]) -> None:
        changes = [entry.event for entry in entries if isinstance(entry.event, StartEvent | EndEvent)]
        match changes[-1:]:
            case [EndEvent(status=status) as event]:
                self._client.set_terminated(self._run, _STATUS[status], _milliseconds(event.time))
            case [StartEvent()]:
                self._client.update_run(self._run, "RUNNING")


def _values(entries: Iterable[NewEvent]) -> Iterator[Any]:
    from mlflow.entities import Metric

    for point in (entry.point for entry in entries if entry.point):
        for name, value in point.values.items():
            yield Metric(name, value, _milliseconds(point.time), point.iteration)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _parts(values: Iterable[T], most: int) -> Iterator[list[T]]:
    iterator = iter(values)
    while part := list(itertools.islice(iterator, most)):
        yield part
