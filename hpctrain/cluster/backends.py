"""The backends and their capabilities. The login half cannot ask the engines themselves, in :mod:`hpctrain.comm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities and requirements of a backend.

    Attributes:
        frameworks: those whose gradients it reduces.
        joins_ranks: it connects several ranks that a launcher starts; otherwise it is for a single process.
        outlives_ranks: the remaining ranks can go on when one dies.
        sends_largest: it can send the largest gradients alone to other nodes, and keep the others for the next step.
        needs_gpus: every rank needs a GPU of its own.
        needs_build: it has to be built for the MPI and the frameworks on the machine, and may be missing.
    """

    frameworks: frozenset[str] = frozenset(("torch", "keras"))
    joins_ranks: bool = True
    outlives_ranks: bool = False
    sends_largest: bool = False
    needs_gpus: bool = False
    needs_build: bool = False


CAPABILITIES: Mapping[str, Capabilities] = {
    "horovod": Capabilities(needs_build=True),
    "mpi": Capabilities(outlives_ranks=True, sends_largest=True),
    "nccl": Capabilities(frameworks=frozenset(("torch",)), needs_gpus=True),
    "gloo": Capabilities(frameworks=frozenset(("torch",))),
    # There are no remaining ranks, and no other nodes.
    "single": Capabilities(joins_ranks=False, outlives_ranks=True, sends_largest=True),
}
BACKENDS = ("auto", *CAPABILITIES)
