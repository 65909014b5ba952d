"""Which layouts of a transformer fit a number of GPUs, and which of them is the fastest. Reads and writes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.transformer import Transformer
from hpctrain.control.predict.memory import USABLE
from hpctrain.control.predict.transformers.layout import Layout, check_layout, divisors, require_positions
from hpctrain.control.predict.transformers.rates import System
from hpctrain.control.predict.transformers.step import Setup

# Tokens of a sample on a rank along cp: shorter sequences need no division.
_LEAST_CONTEXT = 8192
_MOST_STAGES = 64
# Schedules of a pipeline, each with the stages that a rank has.
_SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4))


@dataclass(frozen=True, kw_only=True)
class Search:
    """Predicts every layout of a batch over a number of ranks that fits the memory of each.

    Attributes:
        base: fields of a layout that are the same in all; those that it names are not searched.
        of_recipe: whether only layouts are searched that hpctrain's own models have: without cp, with at most two
            stages a rank, whole layers recomputed, and the optimizer's state divided alone only where nothing else is.
        trained: the layout as it is trained, and what trains it; ``runs``: whether a layout can be run at all.
    """

    network: Transformer
    system: System
    ranks: int
    global_batch: int
    memory_bytes: float
    base: Mapping[str, Any]
    of_recipe: bool = False
    trained: Callable[[Layout], tuple[Layout, str]] = lambda layout: (layout, "pytorch")
    runs: Callable[[Layout], bool] = lambda layout: True
    sequence: int | None = None

    def fitting(self) -> list[Setup]:
        """The candidates, the fastest first; an error where there is none, with what the smallest one needs."""
        require_positions(self.network, self._tokens)
        fitting: list[Setup] = []
        least = math.inf
        refused: list[HpctrainError] = []
        seen: set[Layout] = set()
        for layouts in self._layouts(refused):
            for layout in layouts:
                # Fields that are given may make equal layouts of different ones.
                if layout in seen or not self.runs(layout):
                    break
                seen.add(layout)
                trained, software = self.trained(layout)
                tried = Setup(self.network, trained, self.system, software, self.sequence)
                least = min(least, tried.memory.used)
                if tried.memory.fits(self.memory_bytes):
                    fitting.append(tried)
                    # Recomputing more than memory asks for only takes longer.
                    break
        if fitting:
            return sorted(fitting, key=lambda tried: tried.step.seconds)
        if not seen and {error.code for error in refused} == {"HT-keys-not-together"}:
            # Keys that exclude each other, which no other batch and no other number of nodes mends.
            raise refused[0]
        if not seen:
            raise HpctrainError(
                "HT-search-nothing-divides",
                "no mesh of {ranks} ranks divides a batch of {batch} samples and the network's heads and layers",
                "another batch (--set batch=N, for a recipe batch.size=N), or another number of nodes",
                ranks=self.ranks,
                batch=self.global_batch,
            )
        raise HpctrainError(
            "HT-memory-exceeded",
            "no mesh of {ranks} ranks fits: the smallest needs {needed:.3g} GB of the {memory:.3g} GB of {gpu}",
            "more nodes, or GPUs with more memory",
            ranks=self.ranks,
            gpu=self.system.name,
            needed=least / 1e9,
            memory=USABLE * self.memory_bytes / 1e9,
        )

    @property
    def _tokens(self) -> int:
        return self.sequence or self.network.context

    def _layouts(self, refused: list[HpctrainError]) -> Iterator[Iterator[Layout]]:
        """For each mesh, micro-batch and schedule, the layouts in the order of what their recomputation costs."""
        base = self.base
        sizes: Sequence[int] = (
            (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if self.of_recipe else (1, 2, 4, 8, 16, 32, 64)
        )
        sizes = (base["micro_batch"],) if "micro_batch" in base else sizes
        for mesh, sharding in self._meshes():
            share = self.global_batch // mesh.data_ranks
            for size in sizes:
                if share % size:
                    continue
                most = 2 if self.of_recipe else 4
                for schedule, turns in _schedules(self.network, mesh, share // size, most, base.get("schedule")):
                    fields = {
                        "mesh": mesh,
                        "micro_batch": size,
                        "micro_batches": share // size,
                        "schedule": schedule,
                        "virtual_stages": turns,
                        "sequence_parallel": mesh.sizes["tp"] > 1,
                        **sharding,
                        **base,
                    }
                    if fields["zero"] < 3:
                        # Only parameters can be freed behind the forward pass.
                        fields["reshard"] = base.get("reshard", False)
                    if fields["schedule"] == schedule and fields["virtual_stages"] == turns:
                        yield self._checked(fields, refused)

    def _checked(self, fields: Mapping[str, Any], refused: list[HpctrainError]) -> Iterator[Layout]:
        """The layouts of some fields; none where these do not fit each other, and the reason in ``refused``."""
        # In the order of what they cost.
        again: Sequence[Any] = ("none", "full") if self.of_recipe else ("none", "matmuls", "full")
        again = (self.base["recomputation"],) if "recomputation" in self.base else again
        try:
            first = Layout(**{**fields, "recomputation": again[0]})
            check_layout(first, self.network, sequence=self._tokens)
        except HpctrainError as error:
            refused.append(error)
            return
        yield first
        for recomputation in again[1:]:
            yield replace(first, recomputation=recomputation)

    def _meshes(self) -> Iterator[tuple[Mesh, Mapping[str, Any]]]:
        """Each mesh with what its ranks along dp_shard divide; those that divide no batch are left out."""
        network, joined, ranks, own = self.network, self.system.joined, self.ranks, self.of_recipe
        for tp in divisors(min(joined, ranks)):
            if ranks % tp or network.heads % tp or network.mlp % tp:
                continue
            for cp in divisors(ranks // tp):
                if cp > 1 and (own or cp & (cp - 1) or self._tokens // cp < _LEAST_CONTEXT):
                    continue
                for pp in divisors(ranks // tp // cp):
                    data = ranks // tp // cp // pp
                    if pp > min(network.layers, _MOST_STAGES) or self.global_batch % data:
                        continue
                    axes = {"pp": pp, "cp": cp, "tp": tp}
                    if own and data > 1 and tp * cp * pp == 1:
                        yield Mesh(dp_replicate=data, **axes), {"zero": 0, "reshard": False}
                    for replicas, sharding in _shardings(data, cp, pp, max(1, joined // tp // cp)):
                        if own and sharding["zero"] == 1 and tp * pp > 1:
                            continue
                        yield Mesh(dp_replicate=replicas, dp_shard=data // replicas, **axes), sharding


def _shardings(data: int, cp: int, pp: int, near: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Copies of the model, and what ranks of a copy divide, for a number of data-parallel ranks, of which ``near`` are
    joined directly, within which parameters can be gathered fast.
    """
    if data * cp == 1:
        yield 1, {"zero": 0, "reshard": False}
        return
    yield 1, {"zero": 1, "reshard": False}
    # Stages keep what they gathered for all their micro-batches, as gathering anew for each takes too long.
    yield 1, {"zero": 3, "reshard": pp == 1}
    if pp == 1:
        yield 1, {"zero": 3, "reshard": False}
        if 1 < near < data and data % near == 0:
            yield data // near, {"zero": 3, "reshard": True}


def _schedules(
    network: Transformer, mesh: Mesh, micro_batches: int, most_turns: int, given: str | None
) -> Iterator[tuple[str, int]]:
    """The schedules that a mesh's pipeline can have, ``given`` being the only one that is wanted."""
    stages = mesh.sizes["pp"]
    if stages == 1:
        yield given or "1f1b", 1
        return
    if micro_batches < stages:
        return
    even = micro_batches % (micro_batches // stages) == 0
    wanted = [each for each in _SCHEDULES if given in (None, each[0])] or [("gpipe", 1)]
    for schedule, turns in wanted:
        if schedule.startswith("interleaved") and not even:
            continue
        whole = stages * turns
        if turns <= most_turns and (network.layers % whole == 0 or (network.layers + 2) % whole == 0):
            yield schedule, turns
