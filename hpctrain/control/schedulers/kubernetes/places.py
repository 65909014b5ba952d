"""The names that kubectl has for jobs (``job/NAME``, ``mpijob/NAME``), and its commands for them."""

from __future__ import annotations

import re

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


def kubectl_place(target: str) -> str | None:
    """The commands for a job that is named as kubectl names it; None for any other text."""
    place = _PLACE.fullmatch(target)
    return place and f"name its run directory, where the volume is mounted, or {kubectl_commands(place[1], place[2])}"
