"""Where a mesh's traffic goes: which axis stays within a node, within a leaf, or crosses higher switches.

What is computed is in :mod:`hpctrain.control.topology.mesh_layout`, which needs NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from hpctrain.common.frozen import FrozenModel
from hpctrain.common.recipes.mesh import Axis, Mesh, Pipeline, Sharding

ORDERS = {
    "laid": "laid",
    "given": "hosts as given",
    "torch": "torchtitan's axes, hosts as given",
    "torch_placed": "torchtitan's axes, hosts by leaf",
}
"""The compared orders of ranks, and what they are called."""

_LEVELS = ("in the node", "in the leaf", "over leaves")
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@dataclass(frozen=True, kw_only=True)
class MeshModel:
    """A model and its samples, as far as what a mesh sends depends on them.

    Attributes:
        layers: blocks of attention and feed-forward layers; 0 for a network that has none, which is divided along
            dp_replicate and dp_shard alone.
        width: numbers of a token between two layers.
        sequence: the number of tokens in a sample.
        samples: how many each data-parallel rank computes in a step.
        parts: the micro-batches of a rank, whose gradients are added up before they are reduced.
        parameter_bytes: the bytes of one element of the parameters when they are gathered.
        gradient_bytes: the bytes of one element of the gradients when they are reduced.
        activation_bytes: the bytes of one element between layers.
    """

    parameters: float
    layers: int = 0
    width: int = 0
    sequence: int = 0
    samples: float = 0
    parts: int = 1
    parameter_bytes: float = 4
    gradient_bytes: float = 4
    activation_bytes: float = 4


@dataclass(frozen=True, kw_only=True)
class MeshWork:
    """A mesh, and what is trained on it.

    Attributes:
        mesh: a mesh without -1, from :meth:`~hpctrain.common.recipes.mesh.Mesh.at`.
        model: None for a script, whose model is not known: neighbours along the axes are then counted, not bytes.
    """

    mesh: Mesh
    model: MeshModel | None
    sharding: Sharding = field(default_factory=Sharding)
    pipeline: Pipeline = field(default_factory=Pipeline)


class AxisTraffic(FrozenModel):
    """What is sent along one axis in a step."""

    axis: Axis
    ranks: int = Field(description="of a group along the axis")
    sent: float = Field(description="by one rank, at most")
    levels: tuple[float, ...] = Field(
        description="by all ranks: within nodes, within leaves, over the switches above leaves, and over each level "
        "above these that is needed"
    )

    @property
    def between_nodes(self) -> float:
        """The traffic between nodes."""
        return sum(self.levels[1:])


class LaidMesh(FrozenModel):
    """A mesh on hosts in one order."""

    axes: tuple[AxisTraffic, ...]
    busiest_link: float = Field(description="what the link that takes longest carries")
    busiest_seconds: float | None = Field(description="the time it takes; None where speeds or bytes are not known")

    @property
    def over_leaves(self) -> float:
        """The traffic from one leaf to another."""
        return sum(sum(axis.levels[2:]) for axis in self.axes)


class MeshTraffic(FrozenModel):
    """The traffic of a mesh in those of :data:`ORDERS` that can be told; one host has but its own."""

    in_bytes: bool = Field(description="otherwise flows to a neighbour are counted, because the model is not known")
    orders: dict[str, LaidMesh]

    @property
    def laid(self) -> LaidMesh:
        """That of the plan."""
        return self.orders["laid"]

    @property
    def warning(self) -> str | None:
        """A sentence where ranks along tp are on several nodes; None otherwise."""
        for axis in self.laid.axes:
            if axis.axis == "tp" and axis.between_nodes:
                amount = f" ({self.amount(axis.sent)} from each rank a step)" if self.in_bytes else ""
                return (
                    f"tp {axis.ranks} goes over several nodes, and every layer waits for it{amount}; let tp divide the "
                    "ranks of a node, and take pp or dp_shard for the rest"
                )
        return None

    def amount(self, number: float) -> str:
        """Bytes, or a number of flows."""
        if not number:
            return "-"
        return bytes_text(number) if self.in_bytes else f"{number:,.0f}"

    def lines(self) -> list[str]:
        """A table with a row for each axis of the plan's order, and one that compares the orders."""
        depth = max(len(axis.levels) for axis in self.laid.axes)
        levels = [_LEVELS[level] if level < len(_LEVELS) else "higher up" for level in range(depth)]
        axes = [("axis", "ranks", "a rank sends", *levels)]
        for axis in self.laid.axes:
            sent = (*axis.levels, *(0.0,) * (depth - len(axis.levels)))
            axes.append((axis.axis, str(axis.ranks), self.amount(axis.sent), *map(self.amount, sent)))
        if len(self.orders) == 1:
            return [*aligned(axes)]
        compared = [("order of ranks", "over leaves", "busiest link")]
        for name, laid in self.orders.items():
            seconds = "" if laid.busiest_seconds is None else f", {laid.busiest_seconds:.3g} s"
            compared.append((ORDERS[name], self.amount(laid.over_leaves), f"{self.amount(laid.busiest_link)}{seconds}"))
        return [*aligned(axes), "", *aligned(compared)]


def bytes_text(number: float) -> str:
    """Bytes in a unit that fits."""
    unit, size = next(((unit, size) for unit, size in _UNITS if number >= size), ("B", 1.0))
    return f"{number / size:.3g} {unit}"


def aligned(table: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """The lines of a table."""
    wide = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, wide, strict=True)).rstrip()
