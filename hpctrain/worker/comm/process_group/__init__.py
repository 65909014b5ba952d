"""torch.distributed's process groups over the ranks of a run, for what is built on them: FSDP, DTensor, pipelining.

Over the backend ``mpi`` they are hpctrain's own, registered as ``hpctrain``: shared memory within a node, MPI between
nodes, with the limits of all waits and the naming of stalled ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.worker.comm.base import Communicator


def require_default_group(comm: Communicator) -> None:
    """Make sure that torch.distributed's default group is that of the ranks of a run. Collective; idempotent.

    ``init_device_mesh`` and ``new_group`` work from then on. The group ends with ``comm.shutdown()``.
    """
    comm.process_group()
    # A script that asks for groups builds on them, so the hint about undistributed models is not due.
    comm.distributed = True
