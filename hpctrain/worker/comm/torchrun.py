"""The variables in which torchrun tells a process its rank, for libraries that look for them.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
"""

from __future__ import annotations

import os
import socket

from hpctrain.common.cluster.launcher import AS_TORCHRUN, TORCHRUN, TORCHRUN_MARK, detect
from hpctrain.common.settings import SHARE_GPUS
from hpctrain.worker.comm.base import Communicator


def torchrun_variables(
    *, rank: int, size: int, local_rank: int, local_size: int, node: int, nodes: int, address: tuple[str, int]
) -> dict[str, str]:
    """The variables of one rank.

    Args:
        node: the number of the rank's host, from 0.
        nodes: how many hosts there are.
        address: host and port of torch.distributed's store, or where a script can make one.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # The agent's store is torchrun's own.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        TORCHRUN_MARK: AS_TORCHRUN,
    }


def set_torchrun_variables(comm: Communicator) -> None:
    """Set the variables of this rank, unless torchrun has. Collective.

    Where the launcher set them from a plan, only the store's address is new.
    """
    hosts = list(dict.fromkeys(comm.allgather_object(comm.host)))
    local_rank, local_size, node, nodes = comm.local_rank, comm.local_size, hosts.index(comm.host), len(hosts)
    if SHARE_GPUS.read():
        # Ranks that share GPUs see one each, and are to libraries like the only rank of a node.
        local_rank, local_size, node, nodes = 0, 1, comm.rank, comm.size
    found = torchrun_variables(
        rank=comm.rank,
        size=comm.size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        address=comm.store_address or ("127.0.0.1", comm.broadcast_object(_free_port())),
    )
    launcher = detect()
    if launcher and launcher.name == TORCHRUN:
        return
    if os.environ.get(TORCHRUN_MARK) == AS_TORCHRUN:
        found = {name: found[name] for name in ("MASTER_ADDR", "MASTER_PORT") if comm.store_address}
    os.environ.update(found)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
