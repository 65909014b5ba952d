"""The mesh: how many ranks each kind of parallelism divides the training over.

The axes have torchtitan's names (https://github.com/pytorch/torchtitan, torchtitan/distributed/parallel_dims.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.checked_yaml import Section, validate
from hpctrain.common.recipes.keys import CheckedSection, Count

Axis = Literal["dp_replicate", "dp_shard", "pp", "cp", "tp"]
# Outermost first, so that the ranks of an axis are the further apart the less it sends: consecutive ranks share a node.
AXES: tuple[Axis, ...] = get_args(Axis)
FILL = -1

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b"]

# More than any cluster has.
_MOST_RANKS = 1_000_000
_Size = Annotated[int, Field(ge=FILL, le=_MOST_RANKS)]


class Mesh(CheckedSection):
    """Ranks along each axis; -1 on one of them takes what the others leave, and without it dp_replicate does."""

    dp_replicate: _Size | None = Field(None, description="copies of the model; by default what the other axes leave")
    dp_shard: _Size = Field(1, description="ranks that divide parameters, gradients and optimizer state (FSDP)")
    pp: _Size = Field(1, description="pipeline stages")
    cp: _Size = Field(1, description="ranks that divide each sequence")
    tp: _Size = Field(1, description="ranks that divide each layer")

    def faults(self) -> Iterator[str]:
        if zero := next((axis for axis in AXES if getattr(self, axis) == 0), None):
            yield f"{zero} is 0; an axis has at least 1 rank, or -1 for what the others leave"
        if len(filled := [axis for axis in AXES if getattr(self, axis) == FILL]) > 1:
            yield f"{' and '.join(filled)} are -1; only one axis can take what the others leave"

    def at(self, ranks: int) -> Mesh:
        """The mesh with every axis a number, for a number of ranks.

        Raises:
            HpctrainError: the axes do not multiply to that, or there are too many ranks.
        """
        if ranks > _MOST_RANKS:
            raise HpctrainError(
                "HT-ranks-too-many",
                "a mesh has at most {most} ranks, and there are {ranks}",
                "fewer nodes, or fewer GPUs of each",
                most=_MOST_RANKS,
                ranks=ranks,
            )
        given = {axis: getattr(self, axis) for axis in AXES}
        filled = next((axis for axis, size in given.items() if size == FILL), None)
        if filled is None and given["dp_replicate"] is None:
            filled = "dp_replicate"
        sizes = {axis: 1 if axis == filled or size is None else size for axis, size in given.items()}
        product = math.prod(sizes.values())
        text = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 and axis != filled) or "1"
        if filled is not None and ranks % product == 0:
            return Mesh(**{**sizes, filled: ranks // product})
        if filled is None and product == ranks:
            return Mesh(**sizes)
        does_not = f"does not divide {ranks} ranks" if filled is not None else f"is not {ranks} ranks"
        raise HpctrainError(
            "HT-ranks-not-divisible",
            "the mesh {mesh} = {product} {problem}",
            f"start a multiple of {product} ranks, or change the mesh: --mesh {_example(ranks)}"
            if filled is not None
            else f"start {product} ranks, or let one axis be filled up: --mesh dp_shard=-1",
            mesh=text,
            product=product,
            problem=does_not,
        )

    @property
    def option(self) -> str:
        """The sizes that were given, as ``--mesh`` and ``HPCTRAIN_MESH`` take them; :func:`parse_mesh` reads them."""
        sizes = {axis: getattr(self, axis) for axis in AXES if axis in self.model_fields_set}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size is not None)

    @property
    def replicates_only(self) -> bool:
        """Whether it is plain data parallelism: every rank has the whole model."""
        return all(size == 1 for axis, size in self.sizes.items() if axis != "dp_replicate")

    # Of a mesh that at() made.

    @property
    def sizes(self) -> dict[Axis, int]:
        """Ranks along each axis, outermost first."""
        return {axis: getattr(self, axis) or 1 for axis in AXES}

    @property
    def data_ranks(self) -> int:
        """The number of parts into which the samples of a step are divided."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """The place of a rank along each axis."""
        found: dict[Axis, int] = {}
        for axis, size in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in AXES}

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size != 1) or "one rank"


class Sharding(Section):
    """What the ranks along dp_shard divide, and what each computes again instead of keeping it."""

    zero: Literal[1, 2, 3] = Field(
        3,
        description="1 divides the optimizer's state, 2 the gradients too, 3 the parameters too (Rajbhandari et al. "
        "2020, arXiv 1910.02054)",
    )
    recompute: bool = Field(
        False, description="a block's activations are recomputed in the backward pass instead of kept until then"
    )


class Pipeline(Section):
    """How the stages along pp take turns."""

    schedule: PipelineSchedule = Field(
        "1f1b", description="the order of forward and backward passes, by the names of torch.distributed.pipelining"
    )
    micro_batches: Count | None = Field(
        None,
        description="parts into which a data-parallel rank cuts what it computes at once; by default as many as pp "
        "has ranks",
    )

    def count(self, ranks: int) -> int:
        """The micro-batches of so many ranks along pp."""
        return self.micro_batches or ranks


def parse_mesh(text: str, where: str = "--mesh") -> Mesh:
    """The mesh of a text such as ``dp_shard=2,tp=2``.

    Args:
        text: sizes by axis, separated by commas.
        where: the option or file that it comes from, for messages.

    Raises:
        HpctrainError: it is no such text, or no mesh; begins with ``where``.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis in sizes or not re.fullmatch(r"-?[0-9]{1,7}", size, re.ASCII):
            raise HpctrainError(
                "HT-mesh-not-valid",
                "{where} {text}: {part!r} is {problem}",
                f"for example {_EXAMPLE}",
                where=where,
                text=text,
                part=part,
                problem="given twice" if axis in sizes else "not of the form AXIS=RANKS",
            )
        sizes[axis] = int(size)
    return validate(sizes, Mesh, lambda location: f"{where} {text}", "mesh", f"for example {_EXAMPLE}")


_EXAMPLE = "--mesh dp_shard=-1,tp=2"


def _example(ranks: int) -> str:
    return f"dp_shard={ranks}"
