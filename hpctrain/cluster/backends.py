"""What reduces gradients, as far as a plan has to know it: the login half imports none of the engines.

:mod:`hpctrain.comm` has the engines themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do, and what it needs.

    Attributes:
        frameworks: whose gradients it reduces.
        joins_ranks: it is for several ranks, which a launcher starts; else for a process without one.
        outlives_ranks: where a rank dies, those that are left can go on.
        needs_gpus: each rank has one of its own.
        needs_build: it is built for the MPI and the frameworks that are there, and may be missing.
    """

    frameworks: frozenset[str] = frozenset(("torch", "keras"))
    joins_ranks: bool = True
    outlives_ranks: bool = False
    needs_gpus: bool = False
    needs_build: bool = False


CAPABILITIES: Mapping[str, Capabilities] = {
    "horovod": Capabilities(needs_build=True),
    "mpi": Capabilities(outlives_ranks=True),
    "nccl": Capabilities(frameworks=frozenset(("torch",)), needs_gpus=True),
    "gloo": Capabilities(frameworks=frozenset(("torch",))),
    # Where the only rank dies, none is left.
    "single": Capabilities(joins_ranks=False, outlives_ranks=True),
}
BACKENDS = ("auto", *CAPABILITIES)
