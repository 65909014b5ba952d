"""``TF_CONFIG``, in which tf.distribute finds the addresses of all processes; needs no TensorFlow.

Source: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.worker.comm.addresses import exchange_addresses, reservation
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

VARIABLE = "TF_CONFIG"
# Of a script that makes its strategy by itself; its port stays reserved until the process ends.
_reserved: list[socket.socket | None] = []


def write_tf_config(world: MPI.Intracomm, host: str, timeout: Timeout, tasks: Sequence[str]) -> socket.socket | None:
    """Tell all ranks each other's addresses, and write them to ``TF_CONFIG`` of this process. Collective.

    An earlier ``TF_CONFIG``, inherited from a cluster or another process, is overwritten: it names another task.

    Args:
        tasks: ``chief``, ``worker`` or ``ps``, for every rank.

    Returns:
        The socket that reserves this process's port for TensorFlow's server; to be closed with the run.
    """
    own = tasks[world.rank]
    ranks = exchange_addresses(world, host, timeout, "the addresses of TensorFlow's servers", reservation)
    servers: dict[str, list[str]] = {}
    for task, (address, port) in zip(tasks, ranks.endpoints, strict=True):
        servers.setdefault(task, []).append(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
    index = list(tasks[: world.rank]).count(own)
    os.environ[VARIABLE] = json.dumps({"cluster": servers, "task": {"type": own, "index": index}})
    return ranks.own_socket


def name_workers(world: MPI.Intracomm) -> None:
    """Write ``TF_CONFIG`` for a script that makes a MultiWorkerMirroredStrategy by itself. Collective."""
    host = socket.gethostname()
    timeout = Timeout(f"rank {world.rank} on {host}")
    _reserved.append(write_tf_config(world, host, timeout, ["worker"] * world.size))
