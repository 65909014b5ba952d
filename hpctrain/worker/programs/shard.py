"""What ``hpctrain data shard`` and ``prepare-text`` run on every rank: rank 0 hands out the work, the others do it.

``python shard.py WORK OUT``, the first an :data:`hpctrain.common.shards.shard_work.Work` as JSON. Rank 0 writes OUT:
``{"manifest": …}``, or ``{"error": …}`` for what the user can correct.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run import stopping
from hpctrain.common.run.directory import write_json
from hpctrain.common.shards.shard_work import Manifest, Work, make


def main(work: str, out: str) -> None:
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if executor is None:
            return
        try:
            answer = {"manifest": _make(work, executor).model_dump(mode="json")}
        except HpctrainError as error:
            answer = {"error": error.record()}
        write_json(Path(out), answer)


def _make(work: str, executor: Any) -> Manifest:
    try:
        return make(TypeAdapter[Work](Work).validate_json(work), partial(_map, executor), partial(print, flush=True))
    except BaseException:
        # Shards in progress are finished; the others are left to the next attempt.
        executor.shutdown(wait=False, cancel_futures=True)
        raise


def _map(executor: Any, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    for result in executor.map(partial(_naming_host, function), items):
        if stopping.this_process.asked(look=True):
            print("asked to stop: what is not made yet is left for the next attempt", flush=True)
            sys.exit(stopping.RESUMABLE)
        yield result


def _naming_host(function: Callable[[Any], Any], task: Any) -> Any:
    """The result of a task; an error begins with the name of this host, of which alone the fault may be."""
    try:
        return function(task)
    except HpctrainError as error:
        raise error.but(before=f"on {socket.gethostname()}: ") from error


if __name__ == "__main__":
    main(*sys.argv[1:])
