"""Checks, before a run begins, that its trackers can be used."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import MODULES, require
from hpctrain.common.recipes.tracking import Tracker

MLFLOW_SERVER = "MLFLOW_TRACKING_URI"
"""The variable that MLflow's own programs read. An address can hold a password, so no file of a run may contain it."""


def require_trackers(trackers: Sequence[Tracker], environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to begin a run whose curves could never reach their tracker.

    A server that does not answer now is no reason to refuse: it may get everything later.

    Raises:
        HpctrainError: a tracker's package is not installed, or no server is named.
    """
    # A tracker without an extra of its own comes with the frameworks.
    require(*(name for name in trackers if name in MODULES))
    if "mlflow" in trackers:
        require_server(environment)


def require_server(environment: Mapping[str, str] = os.environ) -> str:
    """The address of the MLflow server.

    Raises:
        HpctrainError: the environment does not name it.
    """
    if address := environment.get(MLFLOW_SERVER):
        return address
    raise HpctrainError(
        "HT-tracking-no-server",
        "tracking: mlflow needs the address of a server",
        f"export {MLFLOW_SERVER}=http://HOST:PORT",
    )
