"""The memory of each rank that trains a transformer, in closed form, by what holds it.

Sources: Rajbhandari et al. 2020, arXiv
1910.02054, table 1, and Megatron-LM's distrib_optimizer.md for the state; Zhao et al. 2023, arXiv 2304.11277, section
3, for what is gathered; Korthikanti et al. 2022, arXiv 2205.05198, table 2, and Dao et al. 2022, arXiv 2205.14135, for
activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.common.recipes.transformer import Transformer
from hpctrain.control.predict.memory import RankMemory, StateBytes, largest, zero_bytes
from hpctrain.control.predict.transformers.layout import Layout

# The buffers of one communicator of NCCL: NCCL_BUFFSIZE of 4 MiB for Simple and about half of it for LL and LL128, for
# ring and tree, on 32 channels: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html. Assumed.
NCCL_BYTES = 2 * 32 * 6 * 2**20

# Logits that exist at a time where the loss is computed in chunks: _LOGITS of
# hpctrain/worker/train/torch_chunked_loss.py.
_CHUNK = 2**25


def memory(network: Transformer, layout: Layout, *, sequence: int | None = None) -> RankMemory:
    """The memory of the rank along pp that needs most.

    Args:
        sequence: tokens of a sample, by default the network's context.
    """
    return largest(rank_memories(network, layout, sequence=sequence))


def rank_memories(network: Transformer, layout: Layout, *, sequence: int | None = None) -> list[RankMemory]:
    """The memory of each rank along pp; ranks along the other axes have as much as it."""
    return [_Rank(network, layout, rank, sequence or network.context).memory() for rank in range(layout.sizes["pp"])]


def in_flight(layout: Layout, rank: int) -> int:
    """The passes through one of its stages whose activations a rank along pp holds at most.

    Sources: torch.distributed.pipelining, schedules.py, and Megatron-LM, core/pipeline_parallel/schedules.py, for the
    warm-up passes of 1F1B (Narayanan et al. 2019, PipeDream) and interleaved 1F1B (Narayanan et al. 2021, arXiv
    2104.04473, section 2.2). With zero bubble (Qi et al. 2023, arXiv 2401.10241) and ZBV (2024, arXiv 2405.15362) all
    ranks hold as much as 1F1B's first, because activations stay until the gradients of weights are computed.
    """
    pp, turns, batches = layout.sizes["pp"], layout.virtual_stages, layout.micro_batches
    if pp == 1:
        return 1
    # Micro-batches that go through one stage of a rank before the next.
    together = batches // max(1, batches // pp)
    most = {
        "gpipe": batches,
        "1f1b": pp - rank,
        "looped_bfs": batches * turns,
        "interleaved_1f1b": 2 * (pp - rank - 1) + (turns - 1) * together + 1,
        "interleaved_zero_bubble": (turns - 1) * together + pp,
        "zbv": min(2 * pp, batches + rank + 1),
    }[layout.schedule]
    return min(most, batches * turns)


def layer_activations(network: Transformer, layout: Layout, *, sequence: int) -> float:
    """The bytes that one layer keeps of one micro-batch on each rank, without recomputation of more than scores.

    With dropout and materialised scores in 16 bits, this is s b h (34 + 5 a s / h) of Korthikanti et al. 2022 for an
    MLP of 4 h: norms 2 x 2, inputs of linear layers 2 x 2, queries, keys and values 6, attention's output 2, MLP 16,
    masks 2, and 5 a s / h.
    """
    tp, tokens = layout.sizes["tp"], layout.tokens(sequence)
    item, narrow = layout.item_bytes, _linear_bytes(layout)
    split = tp if layout.sequence_parallel else 1
    kept = {
        "norms": 2 * layout.sum_bytes * network.width / split,
        "inputs": _inputs(network, layout) * narrow * network.width / split,
        "queries": item * (network.queries / tp + 2 * _keys(network, tp)),
        "head_norms": item * (network.queries / tp + _keys(network, tp)) if network.head_norms else 0,
        "attended": _both(item, narrow) * network.queries / tp,
        "masks": 2 * network.width / split if layout.dropout else 0,
        "inner": _inner_bytes(network, layout) / tp,
    }
    again = layout.recomputation == "selective" and layout.attention == "materialised"
    return tokens * (sum(kept.values()) + (0 if again else _score_bytes(network, layout, sequence) / tp))


def _inputs(network: Transformer, layout: Layout) -> int:
    """How many copies of attention's and the MLP's inputs are kept: autocast makes one for each matrix that takes them,
    unless queries, keys and values are one, and gate and first product.
    """
    if layout.kernels != "eager" or layout.sum_bytes == layout.item_bytes:
        return 2
    return 3 + (2 if network.kind == "swiglu" else 1)


def _score_bytes(network: Transformer, layout: Layout, sequence: int) -> float:
    """Of a token's attention: softmax alone, with dropout its mask and its outcome too; the sums alone with flash."""
    if layout.attention == "flash":
        return 4 * network.heads
    item, wide = layout.item_bytes, layout.sum_bytes
    return network.heads * sequence * (wide + item + 1 if layout.dropout else _both(wide, item))


def _inner_bytes(network: Transformer, layout: Layout) -> float:
    """Of a token's MLP: what its activation function takes, and what the last matrix takes."""
    item, narrow = layout.item_bytes, _linear_bytes(layout)
    if network.kind == "gelu":
        return (item + narrow) * network.mlp
    # SiLU's outcome is kept too where it is an operator of its own.
    return ((3 if layout.kernels == "eager" else 2) * item + narrow) * network.mlp


def _kept_by_layer(network: Transformer, layout: Layout, sequence: int) -> float:
    """The bytes that one layer keeps of one micro-batch until its backward pass."""
    tokens, item, tp = layout.tokens(sequence), layout.item_bytes, layout.sizes["tp"]
    width = network.width / (tp if layout.sequence_parallel else 1)
    if layout.recomputation == "full":
        return tokens * layout.sum_bytes * width
    if layout.recomputation == "matmuls":
        # The layer's input; of the products in their order queries, values, the MLP's first, and with a gate its last;
        # and attention's output with its sums (torchtitan, distributed/activation_checkpoint.py).
        products = (2 * network.queries + network.mlp) / tp + _keys(network, tp)
        last = width if network.kind == "swiglu" else 0
        return tokens * (layout.sum_bytes * width + item * (products + last) + 4 * network.heads / tp)
    return layer_activations(network, layout, sequence=sequence)


def _keys(network: Transformer, tp: int) -> float:
    """Numbers a token in the keys of a rank; ranks that are more than the heads of keys repeat them."""
    return network.keys / min(tp, network.kv_heads)


def _linear_bytes(layout: Layout) -> float:
    """Bytes of an element that a linear layer keeps of its input."""
    return 1 if layout.precision in ("fp8", "fp4") else layout.item_bytes


def _both(item: float, narrow: float) -> float:
    """What keeps its output, which is the next product's input too unless that is kept in another type."""
    return item if item == narrow else item + narrow


@dataclass(frozen=True)
class _Rank:
    """One rank along pp."""

    network: Transformer
    layout: Layout
    rank: int
    sequence: int

    def memory(self) -> RankMemory:
        """The moment with the most bytes: at the loss, in the backward pass of a layer, or in the update.

        ``gathered`` are parameters of other ranks, or copies in a narrower type, and gradients that are not yet
        divided; ``activations`` are those of all micro-batches in flight; ``working`` are gradients of activations, and
        what is recomputed.
        """
        state, layer = self._state(), _kept_by_layer(self.network, self.layout, self.sequence)
        begun = {
            "parameters": state.parameters,
            "gradients": self._early_gradients(state),
            "optimizer": state.optimizer,
            "gathered": self._gathered(),
            "activations": self._activations(),
            "logits": self._kept_logits(),
            "working": self._working(),
        }
        ended = begun | {"gradients": state.gradients, "activations": min(layer, begun["activations"])}
        logits = begun["logits"] if self.layout.deepspeed_pipeline else 0.0
        idle = {"gathered": 0.0, "activations": 0.0, "logits": logits, "working": self._update()}
        moments = [("backward", begun), ("backward", ended), ("update", ended | idle)]
        if self._last:
            moments.append(("loss", begun | {"logits": self._logits(), "working": 0.0}))
        communication = NCCL_BYTES * sum(size > 1 for size in self.layout.sizes.values())
        return largest(
            [RankMemory(moment=moment, tensors=tensors, communication=communication) for moment, tensors in moments]
        )

    def _early_gradients(self, state: StateBytes) -> float:
        """Those that are there when the backward pass of the first micro-batch begins, with the last layer's own."""
        if self.layout.gradient_buffer or self.layout.micro_batches > 1:
            return state.gradients
        return state.gradients * min(1, self._layer_parameters / self._parameters())

    @property
    def _first(self) -> bool:
        return self.layout.has_first(self.rank)

    @property
    def _last(self) -> bool:
        return self.layout.has_last(self.rank)

    @property
    def _layer_parameters(self) -> float:
        return self.layout.layer_parameters(self.network)

    def _parameters(self) -> float:
        return self.layout.rank_parameters(self.network, self.rank)

    def _state(self) -> StateBytes:
        layout = self.layout
        return zero_bytes(self._parameters(), layout.state, stage=layout.zero, ranks=layout.shards)

    def _gathered(self) -> float:
        """Parameters in the type of the computation, and gradients that are not yet divided."""
        layout, item = self.layout, self.layout.item_bytes
        layer, parts = self._layer_parameters, self.network.parameters
        if layout.shards == 1 or layout.zero < 3:
            # Autocast keeps narrow copies of wider weights.
            return item * self._parameters() if item < layout.state.parameters else 0
        if not layout.reshard:
            return item * self._parameters() + (item + layout.state.gradients) * layer
        embedding = parts.embedding / layout.vocabulary_ranks if self._first else 0
        ends = max(embedding, layout.head_parameters(self.network, self.rank))
        layers = min(1 + layout.prefetch, layout.rank_layers(self.network, self.rank))
        return item * (layers * layer + ends) + (item + layout.state.gradients) * layer

    def _activations(self) -> float:
        """Of all micro-batches in flight."""
        layer = _kept_by_layer(self.network, self.layout, self.sequence)
        found = (
            in_flight(self.layout, self.rank)
            * layer
            * self.layout.rank_layers(self.network, self.rank)
            / self.layout.virtual_stages
        )
        tokens, item = self.layout.tokens(self.sequence), self.layout.item_bytes
        split = self.layout.sizes["tp"] if self.layout.sequence_parallel else 1
        boundary = tokens * self.layout.sum_bytes * self.network.width
        if self._last:
            # The inputs of the last norm and of the head.
            found += (boundary + tokens * item * self.network.width) / split
        if self.layout.deepspeed_pipeline:
            # The copied input, and the output, each where there is a stage before or behind.
            found += in_flight(self.layout, self.rank) * boundary * ((not self._first) + (not self._last))
        if self._first:
            # The tokens' numbers, as int64.
            found += 8 * tokens * in_flight(self.layout, self.rank) / self.layout.virtual_stages
        return found

    def _logits(self) -> float:
        """At the loss: a fused one computes in place of the logits in float32; PyTorch's has the logarithms of the
        probabilities and two gradients, after the logits themselves are gone.
        """
        fused = self.layout.kernels == "fused" or self.layout.deepspeed_pipeline
        each = self.layout.item_bytes + 4 if fused else 12
        return self._logit_count * each + self._kept_logits(before=True)

    def _kept_logits(self, *, before: bool = False) -> float:
        """What earlier micro-batches keep of their loss where no backward pass begins ahead of the last, or where an
        engine refers to the outputs of two.
        """
        if not self._last or self.layout.chunked_loss:
            return 0.0
        others = self.layout.micro_batches - before
        if self.layout.deepspeed_pipeline:
            return 4 * self._logit_count * min(2, others)
        all_first = self.layout.schedule in ("gpipe", "looped_bfs") and self.layout.sizes["pp"] > 1
        return 4 * self._logit_count * others if all_first else 0.0

    @property
    def _logit_count(self) -> float:
        count = self.layout.tokens(self.sequence) * self.network.vocabulary / self.layout.vocabulary_ranks
        return min(count, _CHUNK) if self.layout.chunked_loss else count

    def _working(self) -> float:
        """Gradients of a layer's activations: of the MLP's inner width, less what is freed, and of its width: one of
        the sum and two of products.
        """
        network, layout = self.network, self.layout
        tokens, item, tp = layout.tokens(self.sequence), layout.item_bytes, layout.sizes["tp"]
        again = layout.recomputation in ("full", "matmuls")
        # What is recomputed is freed as it is used.
        inner = (network.matrices - (2 if again else 1)) * network.mlp / tp
        gradients = tokens * (item * (inner + 2 * network.width) + layout.sum_bytes * network.width)
        if again:
            layer = layer_activations(network, layout, sequence=self.sequence)
            return gradients + layer - _kept_by_layer(network, layout, self.sequence)
        if layout.recomputation == "selective" and layout.attention == "materialised":
            return max(gradients, 2 * tokens * _score_bytes(network, layout, self.sequence) / tp)
        return gradients

    def _update(self) -> float:
        """What an update holds besides: narrow gradients in float32 where weights have such copies, and for PyTorch's
        AdamW the root of the mean of squares of all parameters at once. Such copies are those of Megatron-LM and
        DeepSpeed, whose Adam is one kernel.
        """
        layout, state = self.layout, self.layout.state
        wider = 4 if state.gradients < 4 and state.optimizer == 12 else 0
        root = state.optimizer / 2 if layout.kernels == "eager" and state.optimizer <= 8 else 0
        return (wider + root) * self._parameters() / layout.shards
