"""What ``hpctrain data shard`` runs on every rank: rank 0 hands out the work, the others do it.

``python shard_ranks.py OUT SHARDING``, the second a :class:`hpctrain.shards.make.Sharding` as JSON. Rank 0 writes
OUT: ``{"manifest": …}``, or ``{"error": …}`` for what the user can correct.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.run.directory import write_json
from hpctrain.shards.make import Sharding, make_shards


def main(out: str, sharding: str) -> None:
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if executor is None:
            return
        write_json(Path(out), _made(Sharding.model_validate_json(sharding), executor))


def _made(sharding: Sharding, executor: Any) -> dict[str, Any]:
    try:
        return {"manifest": make_shards(sharding, executor.map, print).model_dump(mode="json")}
    except HpctrainError as error:
        executor.shutdown(wait=False, cancel_futures=True)
        return {"error": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}}


if __name__ == "__main__":
    main(*sys.argv[1:])
