"""What processes in a pod of Kubernetes learn from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpctrain.common.settings import POD

_INDEX = "JOB_COMPLETION_INDEX"


def in_pod(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs in a pod that was made for a run; a pod of somebody else's is any machine."""
    return POD.read(environment) is not None


def pod_index(environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of this pod among those of a run's Indexed Job; None elsewhere.

    Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode.
    """
    index = environment.get(_INDEX, "")
    return int(index) if in_pod(environment) and index.isascii() and index.isdigit() else None
