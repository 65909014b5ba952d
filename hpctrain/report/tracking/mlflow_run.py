"""A run on an MLflow server, by MLflow's own client, which also repeats what a server does not answer."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from hpctrain.common.extras import require_server
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events import Event, read_events, run_id
from hpctrain.common.run.events.kinds import EndEvent, StartEvent
from hpctrain.common.run.plan import Plan
from hpctrain.report.tracking.curves import Curves, facts, parameters, texts, title

# The most in one request (mlflow/utils/validation.py).
_METRICS, _OTHERS = 1000, 100
_TAG = "hpctrain.id"
_STATUS = {"done": "FINISHED", "failed": "FAILED", "resumable": "KILLED"}


class MlflowRun:
    """Implements :class:`hpctrain.report.tracking.sending.Tracking`.

    A further attempt finds the server's run by a tag. Steps that were lost with a resume and done again are there
    twice, because MLflow deletes no metric.
    """

    def __init__(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # Both print addresses.
        for name in ("mlflow", "urllib3"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._directory = directory
        self._plan = read_model(directory.plan, Plan)
        self._address = require_server()
        self._say = say
        self._client: Any = None
        self._run = ""
        self._curves = Curves()

    def send(self, events: Sequence[Event]) -> None:
        if not self._run:
            self._open()
        from mlflow.entities import RunTag

        if tags := texts(facts(events)):
            self._client.log_batch(self._run, tags=[RunTag(key, value) for key, value in tags.items()])
        metrics = [*self._metrics(events)]
        for first in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + _METRICS])
        self._send_status(events)

    def close(self) -> None:
        """Nothing to do: the client holds no connection."""

    def _open(self) -> None:
        # Imported here, because it takes seconds.
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self._address)
        experiment, identity = self._experiment(), run_id(self._directory.events)
        if known := self._client.search_runs([experiment], f"tags.`{_TAG}` = '{identity}'", max_results=1):
            self._run = known[0].info.run_id
        else:
            tags = {_TAG: identity, "hpctrain.run_dir": str(self._directory.path.absolute())}
            began = _milliseconds(next(read_events(self._directory.events)).time)
            name = title(self._plan, self._directory)
            run = self._client.create_run(experiment, start_time=began, tags=tags, run_name=name)
            self._run = run.info.run_id
            params = [Param(key, value) for key, value in texts(parameters(self._plan)).items()]
            for first in range(0, len(params), _OTHERS):
                self._client.log_batch(self._run, params=params[first : first + _OTHERS])
        place = _shown(self._address)
        self._say(f"mlflow: {place}/#/experiments/{experiment}/runs/{self._run}" if place else f"mlflow: {self._run}")

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._plan.title
        if not (experiment := self._client.get_experiment_by_name(name)):
            # Another run may make it in between.
            with contextlib.suppress(MlflowException):
                return str(self._client.create_experiment(name))
            experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id)

    def _send_status(self, events: Sequence[Event]) -> None:
        changes = [event for event in events if isinstance(event, StartEvent | EndEvent)]
        match changes[-1:]:
            case [EndEvent(status=status) as event]:
                self._client.set_terminated(self._run, _STATUS[status], _milliseconds(event.time))
            case [StartEvent()]:
                self._client.update_run(self._run, "RUNNING")

    def _metrics(self, events: Iterable[Event]) -> Iterator[Any]:
        from mlflow.entities import Metric

        for point in filter(None, map(self._curves.point, events)):
            for name, value in point.values.items():
                yield Metric(name, value, _milliseconds(point.time), point.iteration)


def _shown(address: str) -> str:
    """The scheme, host and port of an address, without what may be a password or a token; empty for a local store."""
    parsed = urlsplit(address)
    return f"{parsed.scheme}://{parsed.netloc.rpartition('@')[2]}" if parsed.scheme.startswith("http") else ""


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
