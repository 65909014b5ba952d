"""How long a step of a transformer takes on a mesh, as a sum of terms in closed form.

Matrix products run at a share of the data sheet's rate that a GPU's power limits; what else a layer does is bound by
memory; the traffic of each axis overlaps with computing as far as its kind allows. Sources of the bytes:

- tp: two all-reduces of a layer's activations in either direction, as gathers and scatters under sequence parallelism
  (Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198).
- pp: the activations of a micro-batch at each boundary in either direction, divided by tp under sequence parallelism;
  times the stages a rank when they are interleaved (Narayanan et al. 2021, arXiv 2104.04473).
- dp_shard: parameters gathered for the forward pass, and anew for the backward pass when they were freed, and gradients
  scattered, 3 P (d - 1) / d elements (Rajbhandari et al. 2020, arXiv 1910.02054, section 7).
- cp: keys and values pass c - 1 ranks, and in the backward pass their gradients too (Liu et al. 2023, arXiv
  2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hpctrain.control.predict.transformers.rank_memory import memory
from hpctrain.control.predict.transformers.rates import Layer, System, software_named, step_constants, step_file

if TYPE_CHECKING:
    from hpctrain.common.recipes.mesh import Axis
    from hpctrain.common.recipes.transformer import Transformer
    from hpctrain.control.predict.memory import RankMemory
    from hpctrain.control.predict.transformers.layout import Layout

# Bytes of one parameter that the optimizer moves: weights, both moments read and written, the gradient read twice, and
# the narrow weights written, all but these in float32.
_UPDATE_BYTES = 34.0
_NARROW = ("fp8", "fp4", "float32")
# Bytes of one logit that the loss moves: written, converted to float32, read for maximum and sum, and its gradient.
_LOGIT_BYTES = 24.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A predicted step: seconds by cause, which sum to its own, and the tokens of all ranks."""

    terms: Mapping[str, float]
    tokens: float

    @cached_property
    def seconds(self) -> float:
        """The time of the step; ``ranges.py`` says how far it may be off."""
        return sum(self.terms.values())

    @property
    def tokens_per_s(self) -> float:
        """The throughput of all ranks."""
        return self.tokens / self.seconds

    @property
    def bound(self) -> str:
        """The name of the largest term."""
        return max(self.terms.items(), key=lambda item: item[1])[0]


@dataclass(frozen=True)
class Setup:
    """What the time of a step depends on.

    Attributes:
        software: one of ``step.yaml``.
        sequence: tokens of a sample, by default the network's context.
    """

    network: Transformer
    layout: Layout
    system: System
    software: str
    sequence: int | None = None

    @cached_property
    def step(self) -> StepTime:
        """The step; an error if the GPU does not have the precision, or the software is not known."""
        return self.predicted(step_constants())

    def predicted(self, values: Mapping[str, float]) -> StepTime:
        """The step by other values than those of ``step.yaml``, all of them; see :attr:`step`."""
        tokens = self.sequence or self.network.context
        step = _Step(self.network, self.layout, self.system, software_named(self.software), values, tokens)
        terms = step.terms(values[f"software.{self.software}"])
        return StepTime(terms=terms, tokens=self.layout.global_batch * tokens)

    @cached_property
    def memory(self) -> RankMemory:
        """The memory of the rank that needs most."""
        return memory(self.network, self.layout, sequence=self.sequence)

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds by which runs of others are counted; sizes by the power of two that is nearest."""
        layout, network, generation = self.layout, self.network, self.system.generation
        sizes = layout.sizes
        precision = layout.precision if layout.precision in _NARROW else "16 bit"
        divided = "pp" if sizes["pp"] > 1 else "zero 3" if layout.zero == 3 else "tp" if sizes["tp"] > 1 else "dp"
        tokens = layout.tokens(self.sequence or network.context)
        return {
            "software": step_file().software[self.software].like or self.software,
            "precision": f"{generation} {precision}",
            "division": f"{generation} {divided}{' cp' if sizes['cp'] > 1 else ''}",
            "gpus": _power_of_two(layout.ranks),
            "parameters": _power_of_two(network.parameters.total),
            "micro_batch": _power_of_two(tokens * network.parameters.total / sizes["tp"] / sizes["pp"]),
        }


def _power_of_two(size: float) -> str:
    """The nearest one, as its exponent."""
    return str(round(math.log2(size)))


@dataclass(frozen=True)
class _Step(Layer):
    """One step: what a layer computes, and what goes on between ranks."""

    # Traffic.

    def ring(self, axis: Axis, size: int, nbytes: float) -> tuple[float, float]:
        """Bytes a second of a collective among the ranks of an axis, and its latency."""
        shares = self.system.shares(self.layout) if self.system.shares else {}
        return self.system.ring(shares.get(axis, 1.0), size, self.strides[axis], nbytes, self.values)

    @cached_property
    def strides(self) -> Mapping[Axis, int]:
        """How far apart neighbours along an axis are, tp's next to each other; those of dp_shard are with cp."""
        sizes, apart = self.sizes, self.software.stages_apart
        inner = sizes["tp"] * sizes["cp"]
        stages = 1 if apart else sizes["pp"]
        return {
            "tp": 1,
            "cp": sizes["tp"],
            "pp": inner * (sizes["dp_shard"] * sizes["dp_replicate"] if apart else 1),
            "dp_shard": sizes["tp"] * stages,
            "dp_replicate": inner * stages * sizes["dp_shard"],
        }

    def collective(self, axis: Axis, size: int, nbytes: float) -> float:
        """Seconds of a reduction and of a gather among the ranks of an axis, of so many bytes in both."""
        rate, latency = self.ring(axis, size, nbytes / 2)
        return nbytes * (size - 1) / size / rate + 2 * latency

    @cached_property
    def tensor(self) -> float:
        """Seconds of tp's traffic in a layer's forward pass that computing does not hide; as many backward."""
        size = self.sizes["tp"]
        if size == 1:
            return 0.0
        one = self.collective("tp", size, 2 * self.tokens * self.network.width * self.item)
        return 2 * one * (self.values["tensor"] if self.layout.asynchronous_tp else 1.0)

    @cached_property
    def again(self) -> float:
        """Seconds that a layer's backward pass computes the forward pass again."""
        forward = self.passes[0]
        how = self.layout.recomputation
        if how == "full":
            return sum(forward) + self.tensor
        if how == "matmuls":
            return 0.5 * (forward.matmul + forward.memory)
        if how == "selective":
            return forward.attention if self.layout.attention == "materialised" else 0.5 * forward.memory
        return 0.0

    @cached_property
    def context(self) -> tuple[float, float]:
        """Seconds of cp's traffic in either pass of a layer that attention does not hide."""
        size = self.sizes["cp"]
        if size == 1:
            return 0.0, 0.0
        nbytes = self.tokens * 2 * self.network.keys / min(self.sizes["tp"], self.network.kv_heads) * self.item
        rate, _ = self.ring("cp", size, nbytes)
        sent = (size - 1) * nbytes / rate
        forward, backward = self.attention
        return max(0.0, sent - 0.8 * forward) + 0.1 * sent, max(0.0, 2 * sent - 0.8 * backward) + 0.2 * sent

    @cached_property
    def boundary(self) -> float:
        """Seconds of pp's traffic for a micro-batch in both directions that computing does not hide."""
        if self.sizes["pp"] == 1:
            return 0.0
        split = self.sizes["tp"] if self.layout.sequence_parallel else 1
        nbytes = self.tokens * self.network.width * self.item / split
        rate, latency = self.ring("pp", 2, nbytes)
        return 2 * self.layout.virtual_stages * (nbytes / rate + latency) * self.values["pipeline"]

    # A micro-batch.

    def overlapped(self, computing: float, traffic: float) -> float:
        """Seconds of both, which slow each other down a little."""
        return max(computing, traffic) + self.values["overlap"] * min(computing, traffic)

    @cached_property
    def layer(self) -> Mapping[str, float]:
        """Seconds of one layer in both passes of a micro-batch, by cause."""
        forward, backward = self.passes
        context, context_back = self.context
        # Gradients are added to those of earlier micro-batches, in float32.
        accumulated = 8 * self.layer_parameters / self.system.memory_bytes_per_s
        ahead = sum(forward) + self.tensor + context
        behind = sum(backward) + self.tensor + context_back + self.again + accumulated
        launch = self.values["launch"] * self.software.launch
        launched = (_floor(ahead, launch), _floor(behind, launch * (1.2 if not self.again else 2.2)))
        gathered = self.gathered(*launched)
        return {
            "matmul": forward.matmul + backward.matmul,
            "attention": forward.attention + backward.attention,
            "memory": forward.memory + backward.memory + accumulated,
            "recomputation": self.again,
            "tensor": 2 * self.tensor,
            "context": context + context_back,
            "launch": sum(launched) - ahead - behind,
            "sharding": gathered - sum(launched),
        }

    def gathered(self, forward: float, backward: float) -> float:
        """Seconds of both passes with the gathers and scatters of zero 3."""
        size = self.layout.shards
        if self.layout.zero < 3 or size == 1:
            return forward + backward
        nbytes = self.layer_parameters * self.item
        rate, latency = self.ring("dp_shard", size, nbytes)
        gather = nbytes * (size - 1) / size / rate + latency
        scatter = gather * (2 if self.layout.state.gradients > self.item else 1)
        if self.sizes["pp"] > 1:
            # Stages scatter once a step, see :meth:`reduced`.
            scatter, gather = 0.0, gather * self.layout.reshard
        elif not self.layout.reshard:
            gather /= self.layout.micro_batches
            return self.overlapped(forward, gather) + self.overlapped(backward, scatter)
        return self.overlapped(forward, gather) + self.overlapped(backward, gather + scatter)

    @cached_property
    def head(self) -> float:
        """Seconds of logits and loss of a micro-batch in both passes."""
        vocabulary = self.network.vocabulary / self.layout.vocabulary_ranks
        forward, backward = self.products(self.tokens, vocabulary, self.network.width, self.wide_rate)
        return forward + backward + self.tokens * vocabulary * _LOGIT_BYTES / self.system.memory_bytes_per_s

    # The step.

    def terms(self, factor: float) -> dict[str, float]:
        """Seconds of a step by cause."""
        layer, count, pp = self.layer, self.layout.micro_batches, self.sizes["pp"]
        stages = [self.layout.rank_layers(self.network, rank) for rank in range(pp)]
        whole = sum(layer.values())
        ranks = [layers * whole + (self.head if rank == pp - 1 else 0.0) for rank, layers in enumerate(stages)]
        slowest = max(range(pp), key=ranks.__getitem__)
        mean = sum(ranks) / pp
        # Micro-batches' time that a rank waits (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
        waits = (pp - 1) / self.layout.virtual_stages
        layers, longest = float(stages[slowest]), ranks[slowest]
        found = {name: count * layers * seconds for name, seconds in layer.items()}
        found["head"] = count * (longest - layers * whole)
        found["pipeline"] = (count + waits) * self.boundary
        found["bubble"] = waits * mean
        # Interleaved stages are done with their last micro-batches one after the other.
        behind = min(count, pp) if self.layout.virtual_stages > 1 else 1
        found["replicas"] = self.reduced(whole * layers * behind)
        found["update"] = self.update
        found["step"] = self.values["step"]
        found["stragglers"] = sum(found.values()) * self.values["stragglers"] * math.log2(self.layout.ranks)
        return {name: seconds / factor for name, seconds in found.items()}

    @cached_property
    def rank_parameters(self) -> float:
        """Of the rank along pp that has most."""
        return max(self.layout.rank_parameters(self.network, rank) for rank in range(self.sizes["pp"]))

    @cached_property
    def update(self) -> float:
        """Seconds of the optimizer."""
        return self.rank_parameters / self.layout.shards * _UPDATE_BYTES / self.system.memory_bytes_per_s

    def reduced(self, behind: float) -> float:
        """Seconds of reducing gradients between data-parallel ranks that so many seconds of computing do not hide."""
        layout, sizes = self.layout, self.sizes
        gradients, found = layout.state.gradients, 0.0
        if (size := sizes["dp_shard"] * sizes["cp"]) > 1 and (layout.zero < 3 or sizes["pp"] > 1):
            # Gradients are scattered, and gathered too without zero; with it the new parameters are.
            kept = layout.zero == 3 and layout.reshard
            sent = self.rank_parameters * (gradients + (gradients if not layout.zero else 0 if kept else self.item))
            found += self.collective("dp_shard", size, sent)
        if sizes["dp_replicate"] > 1:
            size = sizes["dp_replicate"]
            sent = 2 * self.rank_parameters * gradients / layout.shards
            found += self.collective("dp_replicate", size, sent)
        if not self.software.overlaps:
            return found
        return max(0.0, found - behind) + self.values["replicas"] * min(found, behind)


def _floor(seconds: float, least: float) -> float:
    """About the larger of both, which is smooth where they are equal."""
    return math.sqrt(math.hypot(seconds**2, least**2))
