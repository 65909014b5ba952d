"""The backends and their capabilities. Login nodes cannot ask the engines, in :mod:`hpctrain.worker.comm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities and requirements of a backend.

    Attributes:
        frameworks: those whose gradients it reduces.
        joins_ranks: it connects several ranks that a launcher starts; otherwise it is for a single process.
        replicates: its ranks are replicas within a single process.
        outlives_ranks: the remaining ranks can go on when one dies.
        has_meshes: torch.distributed works over it, of whose groups a mesh is made.
        serves_parameters: ranks can read and add to each other's memory without their help.
        needs_gpus: every rank needs a GPU of its own.
        meets_without_mpi: its ranks can find each other by torchrun's means too.
        needs_build: it has to be built for the MPI and the frameworks on the machine, and may be missing.
    """

    frameworks: frozenset[str] = frozenset(("torch", "keras"))
    joins_ranks: bool = True
    replicates: bool = False
    outlives_ranks: bool = False
    has_meshes: bool = True
    serves_parameters: bool = False
    needs_gpus: bool = False
    meets_without_mpi: bool = False
    needs_build: bool = False


_TENSORFLOW = Capabilities(frameworks=frozenset(("keras",)), has_meshes=False)

CAPABILITIES: Mapping[str, Capabilities] = {
    "horovod": Capabilities(has_meshes=False, needs_build=True),
    "mpi": Capabilities(outlives_ranks=True, serves_parameters=True),
    "nccl": Capabilities(frameworks=frozenset(("torch",)), needs_gpus=True, meets_without_mpi=True),
    "gloo": Capabilities(frameworks=frozenset(("torch",)), meets_without_mpi=True),
    # These are strategies of tf.distribute, under its names.
    "mirrored": replace(_TENSORFLOW, joins_ranks=False, replicates=True),
    "multi_worker": _TENSORFLOW,
    "parameter_server": _TENSORFLOW,
    # With one process there are no other ranks to lose.
    "single": Capabilities(joins_ranks=False, outlives_ranks=True),
}
BACKENDS = ("auto", *CAPABILITIES)
