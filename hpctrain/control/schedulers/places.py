"""The names that kubectl has for jobs (``job/NAME``, ``mpijob/NAME``), and its commands for them."""

from __future__ import annotations

import re

from hpctrain.common.errors import HpctrainError

# https://kubernetes.io/docs/reference/labels-annotations-taints/#app-kubernetes-io-instance
INSTANCE = "app.kubernetes.io/instance"

_PLACE = re.compile(r"(job|mpijob)[a-z0-9.]*/([a-z0-9-]+)")


def kubectl_commands(kind: str, name: str, namespace: str | None = None) -> str:
    """How to see a job on Kubernetes, follow it, and end it.

    Args:
        kind: ``job`` or ``mpijob``, as kubectl names it.
        namespace: None for the default namespace of kubectl.
    """
    where = f" -n {namespace}" if namespace else ""
    chosen = f"-l {INSTANCE}={name}{where}"
    return (
        f"see its state: kubectl get {kind},pods {chosen}\n"
        f"  follow it: kubectl logs -f {chosen}\n"
        f"  end it: kubectl delete {kind},service,configmap {chosen}"
    )


def refuse_kubernetes_job(target: str) -> None:
    """Refuse a job of Kubernetes where a run directory is asked for.

    Raises:
        HpctrainError: it is one; with the commands of kubectl for it.
    """
    if place := _PLACE.fullmatch(target):
        raise HpctrainError(
            "HT-run-is-kubernetes-job",
            "{target} is a job of Kubernetes: name its run directory, where the volume is mounted, or ask kubectl",
            kubectl_commands(place[1], place[2]),
            target=target,
        )
