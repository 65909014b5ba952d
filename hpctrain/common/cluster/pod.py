"""What a pod of Kubernetes tells its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

# The name of the run that a manifest of hpctrain's made the pod for.
RUN = "HPCTRAIN_POD"
# How many processors the manifest asks for: a limit on their time, which no process sees in its affinity.
CPUS = "HPCTRAIN_POD_CPUS"

_INDEX = "JOB_COMPLETION_INDEX"


def in_pod(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs in a pod that was made for a run; a pod of somebody else's is any machine."""
    return bool(environment.get(RUN))


def pod_index(environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of this pod among those of a run's Indexed Job; None elsewhere.

    Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode.
    """
    index = environment.get(_INDEX, "")
    return int(index) if in_pod(environment) and index.isascii() and index.isdigit() else None


def pod_processors(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many processors the pod may use; None where its manifest does not say."""
    cpus = environment.get(CPUS, "")
    return max(1, int(cpus)) if cpus.isascii() and cpus.isdigit() else None
