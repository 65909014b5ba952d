"""What trackers need before a run begins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.recipes.tracking import Tracker

MLFLOW_SERVER = "MLFLOW_TRACKING_URI"
"""The variable that MLflow's own programs read, too: an address can hold a password, which no file of a run does."""


def require_trackers(trackers: Sequence[Tracker], environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to begin a run whose curves could never get to where they are to go.

    Whether a server answers is not asked: it may be down now, and get all of it later.

    Raises:
        HpctrainError: a tracker's package is not installed, or nobody says which server.
    """
    require(*(name for name in trackers if name != "tensorboard"))
    if "mlflow" in trackers:
        require_server(environment)


def require_server(environment: Mapping[str, str] = os.environ) -> str:
    """The address of the MLflow server.

    Raises:
        HpctrainError: the environment does not say it.
    """
    if address := environment.get(MLFLOW_SERVER):
        return address
    raise HpctrainError("tracking: mlflow needs the address of a server", f"export {MLFLOW_SERVER}=http://HOST:PORT")
