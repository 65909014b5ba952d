"""Cuts a model into the stages of a pipeline, and a batch into its micro-batches, whose losses have to be means."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, rows_of, whole_of
from hpctrain.worker.adapters.torch.parallel.sharding import tied_names


@dataclass(frozen=True)
class Cut:
    """Which part of a model is in which stage, by the names of its children and of its blocks.

    Attributes:
        blocks: the name of the ``nn.ModuleDict`` that is cut.
        keys: for each stage, the keys of its blocks.
        first: children that come before the blocks, which are in the first stage.
        last: children that come after the blocks, which are in the last stage.
    """

    blocks: str
    keys: tuple[tuple[str, ...], ...]
    first: frozenset[str]
    last: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, blocks: str, stages: int) -> Cut:
        """The cut into stages of equally many blocks; the first ones have one more where they do not divide evenly."""
        children = [name for name, _ in model.named_children()]
        if blocks not in children or not isinstance(model.get_submodule(blocks), nn.ModuleDict):
            dicts = [name for name, child in model.named_children() if isinstance(child, nn.ModuleDict)]
            raise HpctrainError(
                "HT-pipeline-not-for-model",
                "{model} has no nn.ModuleDict {blocks!r} to cut into pipeline stages",
                nearest(blocks, dicts)
                if dicts
                else "put the layers into self.blocks = nn.ModuleDict({'0': …}), which "
                "keeps their names where a stage lacks some; forward() skips parts that are None",
                model=type(model).__name__,
                blocks=blocks,
            )
        if bare := next((name for name, _ in model.named_parameters(recurse=False)), None):
            raise HpctrainError(
                "HT-pipeline-not-for-model",
                "{model} has a parameter {parameter!r} of its own, which belongs to no stage",
                "put it into a module, before or after the blocks",
                model=type(model).__name__,
                parameter=bare,
            )
        keys = list(model.get_submodule(blocks))  # type: ignore[call-overload]
        if len(keys) < stages:
            raise HpctrainError(
                "HT-model-not-divisible",
                "{stages} pipeline stages need at least as many layers, but {model}.{blocks} has {layers}",
                "choose fewer ranks along pp, or a schedule with one stage per rank: gpipe or 1f1b",
                stages=stages,
                model=type(model).__name__,
                blocks=blocks,
                layers=len(keys),
            )
        size, more = divmod(len(keys), stages)
        starts = [stage * size + min(stage, more) for stage in range(stages + 1)]
        parts = tuple(tuple(keys[start:end]) for start, end in itertools.pairwise(starts))
        place = children.index(blocks)
        return cls(blocks, parts, frozenset(children[:place]), frozenset(children[place + 1 :]))

    def stage_of(self, name: str) -> int:
        """The stage that a parameter is in."""
        child, _, rest = name.partition(".")
        if child in self.first:
            return 0
        if child in self.last:
            return len(self.keys) - 1
        key = rest.partition(".")[0]
        return next(stage for stage, own in enumerate(self.keys) if key in own)

    def take(self, model: nn.Module, stages: Sequence[int]) -> list[nn.Module]:
        """These stages. The model itself becomes the first of them, and drops all parts that are in none."""
        parts = [model]
        for _ in stages[1:]:
            part = copy.copy(model)
            # Copied too, or hooks and tables of children would be shared with the model.
            tables = {key: copy.copy(value) for key, value in vars(model).items() if isinstance(value, dict)}
            vars(part).update(tables)
            parts.append(part)
        for part, stage in zip(parts, stages, strict=True):
            self._prune(part, stage)
        return parts

    def _prune(self, part: nn.Module, stage: int) -> None:
        blocks = part.get_submodule(self.blocks)
        own = nn.ModuleDict({key: blocks[key] for key in self.keys[stage]})  # type: ignore[index]
        gone = set() if stage == 0 else set(self.first)
        gone |= set() if stage == len(self.keys) - 1 else set(self.last)
        for name in gone:
            setattr(part, name, None)
        setattr(part, self.blocks, own.train(part.training))


@dataclass(frozen=True)
class Tie:
    """A parameter that two stages have, such as the embedding that is the output layer's weight too."""

    names: tuple[str, str]
    stages: tuple[int, int]


def ties_of(model: nn.Module, cut: Cut) -> list[Tie]:
    """The parameters that two stages share."""
    found = []
    for names in tied_names(model):
        by_stage = {cut.stage_of(name): name for name in reversed(names)}
        if len(by_stage) > 2:
            raise HpctrainError(
                "HT-pipeline-not-for-model",
                "{names} are one parameter, in {stages} pipeline stages",
                "give each stage a parameter of its own; two stages can share one",
                names=", ".join(map(repr, names)),
                stages=len(by_stage),
            )
        if len(by_stage) == 2:
            (one, first), (other, second) = sorted(by_stage.items())
            found.append(Tie((first, second), (one, other)))
    return found


class TiedGradients:
    """The parameters that this rank's stages share with others, or with each other.

    Args:
        ties: those of the whole model.
        stages: this rank's stages by their numbers.
    """

    def __init__(self, ties: Sequence[Tie], stages: Mapping[int, nn.Module], group: Any) -> None:
        self._group = group
        here, pp = dist.get_rank(group), dist.get_world_size(group)
        # In the order of the stages, in which all ranks add up; None for a parameter of another rank's stage.
        self._shared: list[tuple[list[nn.Parameter | None], int]] = []
        self._copies: set[int] = set()
        for tie in ties:
            own = [
                stages[stage].get_parameter(name) if stage in stages else None
                for name, stage in zip(tie.names, tie.stages, strict=True)
            ]
            peer = next((stage % pp for stage in tie.stages if stage % pp != here), here)
            if own[0] is own[1]:  # neither of them here, or one that is not divided
                continue
            self._shared.append((own, peer))
            if own[1] is not None:
                self._copies.add(id(own[1]))

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether a norm over all stages counts this parameter in another stage."""
        return id(parameter) in self._copies

    @torch.no_grad()
    def restart(self) -> None:
        """Before further backward passes: zero the second copy's gradient, since both copies hold the whole sum."""
        for (_, second), _ in self._shared:
            if second is not None and second.grad is not None:
                second.grad.zero_()

    @torch.no_grad()
    def add_up(self) -> None:
        """Replace the gradients by their sums, so that both copies have what the one parameter would have. Collective.

        Call it after each backward pass, and not only before an update, since a script may clip or change gradients.
        """
        for own, peer in self._shared:
            locals_ = [None if each is None else _local(each) for each in own]
            present = [each for each in locals_ if each is not None]
            if len(present) == 2:
                present[0].add_(present[1])
                present[1].copy_(present[0])
                continue
            received = torch.empty_like(present[0])
            self._exchange(present[0], received, peer)
            # Addition of two numbers is the same either way round.
            present[0].add_(received)

    def _exchange(self, sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
        to = dist.get_global_rank(self._group, peer)
        operations = [
            dist.P2POp(dist.isend, sent, to, self._group),
            dist.P2POp(dist.irecv, received, to, self._group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of the gradient."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if isinstance(gradient, DTensor):
        # An embedding's is whole on every rank of tp, though its weight is divided.
        gradient = gradient.redistribute(placements=cast(Any, parameter).placements)
    parameter.grad = gradient
    local: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return local


@dataclass(frozen=True)
class Part:
    """What this rank computes of a batch.

    Attributes:
        inputs: its rows.
        target: their targets.
        weight: the factor of their mean loss with which the mean over the ranks is that of the batch.
        shared: whether the ranks have one batch, of ``ht.shard``; plain tensors are each rank's own.
    """

    inputs: torch.Tensor
    target: torch.Tensor
    weight: float = 1.0
    shared: bool = False


def part_of(inputs: torch.Tensor, target: torch.Tensor) -> Part:
    """This rank's part of a batch. Collective where its rows are not divided evenly by ``ht.shard``."""
    if not len(inputs) or len(target) != len(inputs):
        raise HpctrainError(
            "HT-pipeline-different-samples",
            "a pipeline got {samples} inputs and {targets} targets, which it cuts into micro-batches together",
            "give one target per sample, along the first dimension; flatten them in the loss",
            exit_code=1,
            samples=len(inputs),
            targets=len(target),
        )
    batches = [each for each in (inputs, target) if isinstance(each, BatchTensor)]
    if not batches:
        return Part(inputs, target)
    rows = batches[0].rows.along(0)
    if 0 in rows.sizes:
        rows = rows.even()
    if 0 in rows.sizes:  # fewer samples than ranks: each computes all
        return Part(whole_of(inputs), whole_of(target), shared=True)
    return Part(rows_of(inputs, rows), rows_of(target, rows), rows.size * rows.ranks.size / rows.total, True)


@dataclass(frozen=True)
class MicroBatches:
    """A batch in micro-batches: their size, the padded targets, and for each its samples that count and its factor."""

    size: int
    target: torch.Tensor
    factors: list[tuple[int, float]]


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor with its last row repeated up to ``rows`` rows, contiguous."""
    missing = rows - len(tensor)
    rest = tensor[-1:].expand(missing, *tensor.shape[1:])
    return (torch.cat([tensor, rest]) if missing else tensor).contiguous()


# How many losses are compared: masks and weights may agree by chance in the first of them.
_CHECKED = 8
# By how much rounding changes a loss, relative to it, by the size of a number in bytes.
_ROUNDING = {2: 3e-2, 4: 1e-3, 8: 1e-6}


class MeanLosses:
    """The check of a pipeline's loss function, which ends after a few comparisons."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._loss = loss
        self._left = _CHECKED
        # The last micro-batch's outputs and targets.
        self._before: list[torch.Tensor] | None = None

    def begin(self) -> None:
        """A batch begins: losses before it had other parameters, where a part of the network is in the loss."""
        self._before = None

    @torch.no_grad()
    def check(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Refuse a loss that is no mean over samples, from a micro-batch without padding and the one before it."""
        if not self._left:
            return
        before, self._before = self._before, [output.detach(), target.detach()]
        parts = _two_parts(before, self._before)
        if parts is None:
            return
        self._left -= 1
        generator = torch.default_generator.get_state()
        own = [float(self._loss(*part)) for part in parts]
        together = float(self._loss(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))))
        if not torch.equal(torch.default_generator.get_state(), generator):  # a loss with random numbers
            torch.default_generator.set_state(generator)
            return
        sizes = [len(part[0]) for part in parts]
        mean = sum(loss * size for loss, size in zip(own, sizes, strict=True)) / sum(sizes)
        tolerance = _ROUNDING.get(output.itemsize, 1e-3) * max(abs(mean), abs(together))
        # A micro-batch of masked samples alone has no mean.
        if not abs(together - mean) <= tolerance + 1e-12 and not math.isnan(together):
            raise HpctrainError(
                "HT-pipeline-loss-not-mean",
                "the loss of two parts of a pipeline's batch is {together:.6g} together, and {mean:.6g} as the mean of "
                "their own: it is no mean over samples, by whose numbers micro-batches are weighted",
                "let the loss return the sum, and give ht.Pipeline what the sum is divided by: "
                "count=lambda target: (target != -100).sum(), or count=len",
                exit_code=1,
                together=together,
                mean=mean,
            )


def _two_parts(before: list[torch.Tensor] | None, now: list[torch.Tensor]) -> Sequence[Sequence[torch.Tensor]] | None:
    """Outputs with targets, twice, that can be joined: of the last two micro-batches, or halves of a batch's first."""
    if before is not None:
        pairs = zip(before, now, strict=True)
        alike = all(one.shape[1:] == other.shape[1:] and one.dtype == other.dtype for one, other in pairs)
        return (before, now) if alike else None
    # A batch may be a single micro-batch. Some losses fail on a single sample.
    half = len(now[0]) // 2
    return list(zip(*(each.tensor_split([half]) for each in now), strict=True)) if half > 1 else None
