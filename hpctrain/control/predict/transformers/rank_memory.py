"""The memory of each rank that trains a transformer, in closed form, by what holds it.

Sources: Rajbhandari et al. 2020, arXiv 1910.02054, table 1, and Megatron-LM's distrib_optimizer.md for the state; Zhao
et al. 2023, arXiv 2304.11277, section 3, for what is gathered; Korthikanti et al. 2022, arXiv 2205.05198, table 2, and
Dao et al. 2022, arXiv 2205.14135, for activations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hpctrain.common.recipes.loss_chunks import chunk_rows
from hpctrain.common.recipes.transformer import Transformer
from hpctrain.control.predict.memory import RankMemory, largest, zero_bytes
from hpctrain.control.predict.transformers.layout import Layout

# The buffers of one communicator of NCCL: NCCL_BUFFSIZE of 4 MiB for Simple and about half of it for LL and LL128, for
# ring and tree, on 32 channels: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html. Assumed.
NCCL_BYTES = 2 * 32 * 6 * 2**20


def memory(network: Transformer, layout: Layout, *, sequence: int | None = None) -> RankMemory:
    """The memory of the rank along pp that needs most, with samples of so many tokens, by default the context."""
    return largest(rank_memories(network, layout, sequence=sequence))


def rank_memories(network: Transformer, layout: Layout, *, sequence: int | None = None) -> list[RankMemory]:
    """The memory of each rank along pp; ranks along the other axes have as much as it."""
    layer = _Layer(network, layout, sequence or network.context)
    return [_Rank(network, layout, layer, rank).memory() for rank in range(layout.sizes["pp"])]


def layer_activations(network: Transformer, layout: Layout, *, sequence: int) -> float:
    """The bytes that one layer keeps of one micro-batch on each rank, without recomputation of more than scores."""
    return _Layer(network, layout, sequence).activations


def in_flight(layout: Layout, rank: int) -> int:
    """The passes through one of its stages whose activations a rank along pp holds at most.

    Sources: torch.distributed.pipelining, schedules.py, and Megatron-LM, core/pipeline_parallel/schedules.py, for the
    warm-up passes of 1F1B (Narayanan et al. 2019, PipeDream) and interleaved 1F1B (Narayanan et al. 2021, arXiv
    2104.04473, section 2.2).
    """
    pp, turns, batches = layout.sizes["pp"], layout.virtual_stages, layout.micro_batches
    if pp == 1:
        return 1
    # Micro-batches that go through one stage of a rank before the next.
    together = batches // max(1, batches // pp)
    most = {
        "gpipe": batches,
        "1f1b": pp - rank,
        "interleaved_1f1b": 2 * (pp - rank - 1) + (turns - 1) * together + 1,
    }[layout.schedule]
    return min(most, batches * turns)


@dataclass(frozen=True)
class _Layer:
    """What one layer keeps of one micro-batch on a rank."""

    network: Transformer
    layout: Layout
    sequence: int

    @cached_property
    def tokens(self) -> float:
        return self.layout.tokens(self.sequence)

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return self.layout.item_bytes

    @property
    def narrow(self) -> int:
        """Bytes of an element that a linear layer keeps of its input."""
        return 1 if self.layout.precision in ("fp8", "fp4") else self.item

    @property
    def tp(self) -> int:
        return self.layout.sizes["tp"]

    @property
    def split(self) -> int:
        """Ranks that divide tokens outside of attention and MLP."""
        return self.tp if self.layout.sequence_parallel else 1

    @property
    def keys(self) -> float:
        """Numbers a token in the keys of a rank; ranks that are more than the heads of keys repeat them."""
        return self.network.keys / min(self.tp, self.network.kv_heads)

    @property
    def scores_again(self) -> bool:
        """Whether scores alone are recomputed."""
        return self.layout.recomputation == "selective" and self.layout.attention == "materialised"

    @cached_property
    def activations(self) -> float:
        """The bytes without recomputation of more than scores.

        With dropout and materialised scores in 16 bits, this is s b h (34 + 5 a s / h) of Korthikanti et al. 2022 for
        an MLP of 4 h: norms 2 x 2, inputs of linear layers 2 x 2, queries, keys and values 6, attention's output 2, MLP
        16, masks 2, and 5 a s / h.
        """
        network, layout, item, tp = self.network, self.layout, self.item, self.tp
        kept = {
            "norms": 2 * layout.sum_bytes * network.width / self.split,
            "inputs": self._inputs() * self.narrow * network.width / self.split,
            "queries": item * (network.queries / tp + 2 * self.keys),
            "head_norms": item * (network.queries / tp + self.keys) if network.head_norms else 0,
            "attended": _both(item, self.narrow) * network.queries / tp,
            "masks": 2 * network.width / self.split if layout.dropout else 0,
            "inner": self._inner_bytes() / tp,
        }
        return self.tokens * (sum(kept.values()) + (0 if self.scores_again else self.score_bytes / tp))

    def _inputs(self) -> int:
        """How many copies of attention's and the MLP's inputs are kept: autocast makes one for each matrix that takes
        them, unless queries, keys and values are one, and gate and first product.
        """
        if self.layout.kernels != "eager" or self.layout.sum_bytes == self.item:
            return 2
        return 5 if self.network.kind == "swiglu" else 4

    @property
    def score_bytes(self) -> float:
        """Of a token's attention: softmax, with dropout its mask and its outcome too; the sums alone with flash."""
        layout, network, wide = self.layout, self.network, self.layout.sum_bytes
        if layout.attention == "flash":
            return 4 * network.heads
        return network.heads * self.sequence * (wide + self.item + 1 if layout.dropout else _both(wide, self.item))

    def _inner_bytes(self) -> float:
        """Of a token's MLP: what its activation function takes, and what the last matrix takes."""
        if self.network.kind == "gelu":
            return (self.item + self.narrow) * self.network.mlp
        # SiLU's outcome is kept too where it is an operator of its own.
        return ((3 if self.layout.kernels == "eager" else 2) * self.item + self.narrow) * self.network.mlp

    @cached_property
    def kept(self) -> float:
        """The bytes until the layer's backward pass."""
        network, layout, tp = self.network, self.layout, self.tp
        width = network.width / self.split
        if layout.recomputation == "full":
            return self.tokens * layout.sum_bytes * width
        if layout.recomputation == "matmuls":
            # The layer's input; of the products in their order queries, values, the MLP's first, and with a gate its
            # last; and attention's output with its sums (torchtitan, distributed/activation_checkpoint.py).
            products = (2 * network.queries + network.mlp) / tp + self.keys
            last = width if network.kind == "swiglu" else 0
            sums = 4 * network.heads / tp
            return self.tokens * (layout.sum_bytes * width + self.item * (products + last) + sums)
        return self.activations

    @cached_property
    def working(self) -> float:
        """Gradients of a layer's activations, of the MLP's inner width, less what is freed, and of its width: one of
        the sum and two of products; and what is recomputed.
        """
        network, layout = self.network, self.layout
        again = layout.recomputation in ("full", "matmuls")
        # What is recomputed is freed as it is used.
        inner = (network.matrices - (2 if again else 1)) * network.mlp / self.tp
        gradients = self.tokens * (self.item * (inner + 2 * network.width) + layout.sum_bytes * network.width)
        if again:
            return gradients + self.activations - self.kept
        return max(gradients, 2 * self.tokens * self.score_bytes / self.tp) if self.scores_again else gradients


def _both(item: float, narrow: float) -> float:
    """What keeps its output, which is the next product's input too unless that is kept in another type."""
    return item if item == narrow else item + narrow


@dataclass(frozen=True)
class _Rank:
    """One rank along pp."""

    network: Transformer
    layout: Layout
    layer: _Layer
    rank: int

    def memory(self) -> RankMemory:
        """The moment with the most bytes: at the loss, in the backward pass of a layer, or in the update."""
        layout, early = self.layout, 1.0
        state = zero_bytes(self._parameters, layout.state, stage=layout.zero, ranks=layout.shards)
        if not layout.gradient_buffer and layout.micro_batches == 1:
            # When the backward pass begins there are those of the last layer alone.
            early = min(1, layout.layer_parameters(self.network) / self._parameters)
        begun = {
            "parameters": state.parameters,
            "gradients": state.gradients * early,
            "optimizer": state.optimizer,
            "gathered": self._gathered(),
            "activations": self._activations(),
            "logits": self._kept_logits(),
            "working": self.layer.working,
        }
        ended = begun | {"gradients": state.gradients, "activations": min(self.layer.kept, begun["activations"])}
        logits = begun["logits"] if layout.deepspeed_pipeline else 0.0
        idle = {"gathered": 0.0, "activations": 0.0, "logits": logits, "working": self._update()}
        moments = [("backward", begun), ("backward", ended), ("update", ended | idle)]
        if self._last:
            moments.append(("loss", begun | {"logits": self._logits(), "working": 0.0}))
        sent = NCCL_BYTES * sum(size > 1 for size in layout.sizes.values())
        return largest([RankMemory(moment=moment, tensors=held, communication=sent) for moment, held in moments])

    @property
    def _last(self) -> bool:
        return self.layout.has_last(self.rank)

    @cached_property
    def _parameters(self) -> float:
        return self.layout.rank_parameters(self.network, self.rank)

    def _gathered(self) -> float:
        """Parameters in the type of the computation, and gradients that are not yet divided."""
        layout, item, layer = self.layout, self.layer.item, self.layout.layer_parameters(self.network)
        if layout.shards == 1 or layout.zero < 3:
            # Autocast keeps narrow copies of wider weights.
            return item * self._parameters if item < layout.state.parameters else 0
        if not layout.reshard:
            return item * self._parameters + (item + layout.state.gradients) * layer
        embedding = self.network.parameters.embedding / layout.vocabulary_ranks if self.rank == 0 else 0
        ends = max(embedding, layout.head_parameters(self.network, self.rank))
        layers = min(1 + layout.prefetch, layout.rank_layers(self.network, self.rank))
        return item * (layers * layer + ends) + (item + layout.state.gradients) * layer

    def _activations(self) -> float:
        """Of all micro-batches in flight."""
        layout, tokens, width = self.layout, self.layer.tokens, self.network.width
        flying = in_flight(layout, self.rank)
        found = flying * self.layer.kept * layout.rank_layers(self.network, self.rank) / layout.virtual_stages
        boundary = tokens * layout.sum_bytes * width
        if self._last:
            # The inputs of the last norm and of the head.
            found += (boundary + tokens * self.layer.item * width) / self.layer.split
        if layout.deepspeed_pipeline:
            # The copied input, and the output, each where there is a stage before or behind.
            found += flying * boundary * ((self.rank > 0) + (not self._last))
        if self.rank == 0:
            # The tokens' numbers, as int64.
            found += 8 * tokens * flying / layout.virtual_stages
        return found

    def _logits(self) -> float:
        """At the loss: a fused one computes in place of the logits in float32; PyTorch's has the logarithms of the
        probabilities and two gradients, after the logits themselves are gone.
        """
        fused = self.layout.kernels == "fused" or self.layout.deepspeed_pipeline
        return self._logit_count * (self.layer.item + 4 if fused else 12) + self._kept_logits(before=True)

    def _kept_logits(self, *, before: bool = False) -> float:
        """What earlier micro-batches keep of their loss where no backward pass begins ahead of the last, or where an
        engine refers to the outputs of two.
        """
        if not self._last or self.layout.chunked_loss:
            return 0.0
        others = self.layout.micro_batches - before
        if self.layout.deepspeed_pipeline:
            return 4 * self._logit_count * min(2, others)
        all_first = self.layout.schedule == "gpipe" and self.layout.sizes["pp"] > 1
        return 4 * self._logit_count * others if all_first else 0.0

    @property
    def _logit_count(self) -> float:
        classes = self.network.vocabulary / self.layout.vocabulary_ranks
        rows = self.layer.tokens
        if self.layout.chunked_loss:
            rows = min(rows, chunk_rows(math.ceil(rows), math.ceil(classes), on_gpu=True))
        return rows * classes

    def _update(self) -> float:
        """What an update holds besides: narrow gradients in float32 where weights have such copies, and for PyTorch's
        AdamW the root of the mean of squares of all parameters at once. Such copies are those of Megatron-LM and
        DeepSpeed, whose Adam is one kernel.
        """
        layout, state = self.layout, self.layout.state
        wider = 4 if state.gradients < 4 and state.optimizer == 12 else 0
        root = state.optimizer / 2 if layout.kernels == "eager" and state.optimizer <= 8 else 0
        return (wider + root) * self._parameters / layout.shards
