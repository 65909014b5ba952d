"""Waits for the pods of a run: a headless service gives a pod's name an address when its containers run."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.stopping import RESUMABLE

# Nodes may have to be added to the cluster first, and each fetches an image of several gigabytes.
PODS_SECONDS = 1800.0
_POLL_SECONDS = 0.5


def await_names(
    names: Sequence[str], *, notice: Callable[[str], None], seconds: float = PODS_SECONDS, poll: float = _POLL_SECONDS
) -> None:
    """Wait until every name has an address.

    Raises:
        HpctrainError: some have none in time; with the exit code of a resumable run, as they may still appear.
    """
    deadline, told = time.monotonic() + seconds, False
    while missing := [name for name in names if not _has_address(name)]:
        if time.monotonic() > deadline:
            raise HpctrainError(
                "HT-host-no-address",
                "{hosts} had no address within {seconds:g} s",
                "`kubectl get pods` shows which pods are not running, and `kubectl describe pod NAME` why",
                exit_code=RESUMABLE,
                hosts=fold_hosts(missing),
                seconds=seconds,
            )
        if not told:
            notice(f"waiting for {fold_hosts(missing)}, for {seconds:g} s at most")
            told = True
        time.sleep(poll)


def _has_address(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False
