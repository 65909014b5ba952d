"""How a transformer's training is laid out over ranks: the mesh, the micro-batches, and what each rank keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh import Axis, Mesh, PipelineSchedule
from hpctrain.common.recipes.transformer import Transformer
from hpctrain.control.predict.memory import Stage, StateBytes

if TYPE_CHECKING:
    from hpctrain.common.recipes.schema import Recipe

LayoutPrecision = Literal["bf16", "fp16", "fp8", "fp4", "float32"]
Recomputation = Literal["none", "selective", "matmuls", "full"]
Attention = Literal["flash", "materialised"]
Kernels = Literal["fused", "eager"]

CHOICES: Mapping[str, tuple[object, ...]] = {
    "zero": get_args(Stage),
    "schedule": ("gpipe", "1f1b", "interleaved_1f1b"),
    "recomputation": get_args(Recomputation),
    "attention": get_args(Attention),
    "precision": get_args(LayoutPrecision),
    "kernels": get_args(Kernels),
}
# Schedules in which each rank has one stage.
ONE_STAGE = ("gpipe", "1f1b")

# Bytes of one parameter's state, by who keeps it so.
STATES: Mapping[str, StateBytes] = {
    # https://github.com/NVIDIA/Megatron-LM, docs/source/api-guide/dist_optimizer.md (distrib_optimizer.md): with the
    # distributed optimizer 6 + 12/d, 4 + 16/d and 8 + 8/d bytes. Of the 16, 4 are gradients in float32 that exist in
    # the update alone (megatron/core/optimizer/optimizer.py, _copy_model_grads_to_main_grads and zero_grad).
    "megatron": StateBytes(parameters=2, gradients=4, optimizer=12),
    "megatron_fp16": StateBytes(parameters=2, gradients=2, optimizer=12),
    # With grad_reduce_in_fp32=False, as NVIDIA's MLPerf submissions.
    "megatron_bf16_gradients": StateBytes(parameters=2, gradients=2, optimizer=12),
    # DeepSpeed's ZeRO 1 in bf16: gradients in bf16, and added up in float32 in a buffer that is not divided
    # (https://github.com/deepspeedai/DeepSpeed at 0acdb021, deepspeed/runtime/bf16_optimizer.py).
    "deepspeed_bf16": StateBytes(parameters=2, gradients=6, optimizer=12),
    # Weights, gradients and AdamW's state in float32, which PyTorch's autocast and FSDP2's MixedPrecisionPolicy leave
    # as they are; hpctrain's own.
    "float32": StateBytes(parameters=4, gradients=4, optimizer=8),
    # Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1: 2 + 2 + 12; DeepSpeed, InternLM, Colossal-AI.
    "narrow": StateBytes(parameters=2, gradients=2, optimizer=12),
    # All of it in bf16, as llm-foundry's low precision and torch's model.to(bfloat16).
    "bf16": StateBytes(parameters=2, gradients=2, optimizer=4),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A training over a number of ranks.

    Attributes:
        mesh: without -1, from :meth:`~hpctrain.common.recipes.mesh.Mesh.at`. Ranks along cp have the same parameters
            and other tokens, so that dp_shard and cp together divide the state.
        micro_batch: samples that a data-parallel rank computes at once; in a step it has ``micro_batches`` of them.
        samples: of a step over all ranks, where some ranks have fewer than their micro-batches could hold; by default
            as many as all micro-batches have.
        zero: 1 divides the optimizer's state, 2 the gradients too, 3 the parameters too (FSDP); 0 nothing.
        reshard: with zero 3, parameters are freed behind the forward pass and gathered anew for the backward pass.
        prefetch: layers that are gathered ahead of their use.
        sequence_parallel: ranks along tp divide tokens outside of attention and MLP (Korthikanti et al. 2022).
        asynchronous_tp: tp's gathers and scatters are cut into pieces that overlap with the products.
        virtual_stages: of the pipeline that each rank has.
        recomputation: in the backward pass; ``selective`` of the scores of attention alone (Korthikanti et al. 2022),
            ``matmuls`` of everything but attention and every second matrix product (torchtitan's selective op),
            ``full`` of each layer.
        precision: of matrix products; what is kept between layers is bf16 with fp8 and fp4.
        autocast: weights are float32 and only matrix products are computed in 16 bits, as under PyTorch's autocast and
            in recipes: what is added up between layers, and with it what norms keep, is float32.
        kernels: whether activations and norms are one kernel each, or PyTorch's operators one by one, which keep more.
        dropout: behind attention, its projection and the MLP, whose masks are kept.
        gradient_buffer: gradients lie in a buffer of their own all the time, as Megatron-LM's and a data-parallel
            engine's buckets; otherwise they appear in the backward pass of the first micro-batch.
        divided_vocabulary: tp divides embedding and head too, as Megatron-LM and torchtitan do, and hpctrain does not.
        chunked_loss: logits and loss are computed for some tokens at a time, as hpctrain does.
        deepspeed_pipeline: DeepSpeed's pipeline engine runs the stages, one alone too. It refers to each stage's output
            until its buffer is used again, copies each stage's input, and computes the loss as Megatron-LM does. It has
            one schedule, 1f1b, and refuses ZeRO 2 and 3
            (https://github.com/deepspeedai/DeepSpeed at v0.5.8, deepspeed/runtime/pipe/engine.py).
    """

    mesh: Mesh = field(default_factory=lambda: Mesh().at(1))
    micro_batch: int = 1
    micro_batches: int = 1
    samples: int | None = None
    zero: Stage = 3
    reshard: bool = True
    prefetch: int = 1
    sequence_parallel: bool = False
    asynchronous_tp: bool = False
    schedule: PipelineSchedule = "1f1b"
    virtual_stages: int = 1
    recomputation: Recomputation = "none"
    attention: Attention = "flash"
    precision: LayoutPrecision = "bf16"
    autocast: bool = False
    state: StateBytes = STATES["float32"]
    kernels: Kernels = "fused"
    dropout: bool = False
    gradient_buffer: bool = True
    divided_vocabulary: bool = True
    chunked_loss: bool = False
    deepspeed_pipeline: bool = False

    def __post_init__(self) -> None:
        for name, valid in CHOICES.items():
            if (value := getattr(self, name)) not in valid:
                remedy = f"valid: {', '.join(map(str, valid))}"
                raise HpctrainError("HT-choice-unknown", "{key} is {value!r}", remedy, key=name, value=value)
        if problem := self._conflict():
            raise HpctrainError("HT-keys-not-together", "{problem}", problem=problem)

    def _conflict(self) -> str | None:
        """Why keys exclude each other."""
        if self.asynchronous_tp and not self.sequence_parallel:
            return "asynchronous_tp overlaps the gathers and scatters of sequence_parallel, which is off: set it too"
        if not self.zero and self.sizes["dp_shard"] > 1:
            return "zero 0 divides nothing, but the mesh has dp_shard: choose zero 1, 2 or 3, or dp_replicate"
        if self.deepspeed_pipeline and (self.zero > 1 or self.schedule != "1f1b" or self.chunked_loss):
            return (
                "deepspeed_pipeline trains with zero 0 or 1, schedule 1f1b and chunked_loss false, and not with "
                f"zero {self.zero}, {self.schedule} and chunked_loss {str(self.chunked_loss).lower()}"
            )
        pp, stages = self.sizes["pp"], self.virtual_stages
        if (stages == 1) == (pp == 1 or self.schedule in ONE_STAGE):
            return None
        return (
            f"pp {pp} by schedule {self.schedule} has {stages} stages a rank: a mesh without pp, gpipe and 1f1b have "
            "1, interleaved_1f1b 2 or more"
        )

    @cached_property
    def sizes(self) -> dict[Axis, int]:
        """Ranks along each axis of the mesh."""
        return self.mesh.sizes

    @property
    def ranks(self) -> int:
        """All ranks."""
        return math.prod(self.sizes.values())

    @property
    def shards(self) -> int:
        """The ranks over which zero divides state."""
        return self.sizes["dp_shard"] * self.sizes["cp"] if self.zero else 1

    @property
    def global_batch(self) -> int:
        """Samples of a step over all ranks."""
        return self.samples or self.mesh.data_ranks * self.micro_batch * self.micro_batches

    @property
    def stages(self) -> int:
        """Stages of the pipeline over all ranks."""
        return self.sizes["pp"] * self.virtual_stages

    def rank_layers(self, network: Transformer, rank: int) -> int:
        """How many layers all stages of a rank along pp have: each pp-th stage, as Megatron-LM gives them.

        Where layers do not divide evenly, embedding and head count as a layer each if that is even (Megatron-LM,
        ``account_for_embedding_in_pipeline_split``); else the stages in the middle have one more.
        """
        return sum(divided_layers(network.layers, self.stages)[rank :: self.sizes["pp"]])

    # What one rank has.

    def tokens(self, sequence: int) -> float:
        """Of a micro-batch."""
        return self.micro_batch * sequence / self.sizes["cp"]

    @property
    def item_bytes(self) -> int:
        """Bytes of an element within layers."""
        return 4 if self.precision == "float32" else 2

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element of what layers add to."""
        return 4 if self.autocast else self.item_bytes

    @property
    def vocabulary_ranks(self) -> int:
        """Ranks that divide embedding and head."""
        return self.sizes["tp"] if self.divided_vocabulary else 1

    def has_last(self, rank: int) -> bool:
        """Whether a rank along pp has the last stage."""
        return rank == self.sizes["pp"] - 1

    def layer_parameters(self, network: Transformer) -> float:
        """Of one layer: tp divides matrices, and keys and values as far as they have heads."""
        parts, tp = network.parameters, self.sizes["tp"]
        keys = 2 * network.width * network.keys
        return (parts.attention - keys + parts.mlp) / tp + keys / min(tp, network.kv_heads) + parts.norms

    def head_parameters(self, network: Transformer, rank: int) -> float:
        """Of the head, 0 where it is another rank's; a tied one is a copy unless the rank has the embedding too."""
        if not self.has_last(rank):
            return 0.0
        parts = network.parameters
        copied = network.tied and rank > 0
        return (parts.embedding if copied else parts.head) / self.vocabulary_ranks

    def rank_parameters(self, network: Transformer, rank: int) -> float:
        """Of all stages of a rank along pp, before zero divides them."""
        parts = network.parameters
        found = self.rank_layers(network, rank) * self.layer_parameters(network)
        if rank == 0:
            found += parts.embedding / self.vocabulary_ranks + parts.positions
        if self.has_last(rank):
            found += parts.final_norm + parts.transform + self.head_parameters(network, rank)
        return found

    @classmethod
    def of_batch(
        cls, network: Transformer, global_batch: int, *, sequence: int | None = None, **settings: Any
    ) -> Layout:
        """The layout of a batch: as many micro-batches as it takes; other arguments are a layout's."""
        one = cls(**settings)
        data_ranks = one.mesh.data_ranks
        count, rest = divmod(global_batch, data_ranks * one.micro_batch)
        if rest or not count:
            share, odd = divmod(global_batch, data_ranks)
            valid = f"none, as {data_ranks} data-parallel ranks do not divide the batch"
            raise HpctrainError(
                "HT-layout-batch-not-divisible",
                "a batch of {global_batch} is no multiple of {data_ranks} data-parallel ranks x {micro_batch} samples",
                f"valid micro-batches: {valid if odd else ', '.join(map(str, divisors(share)))}",
                global_batch=global_batch,
                data_ranks=data_ranks,
                micro_batch=one.micro_batch,
            )
        found = replace(one, micro_batches=count)
        check_layout(found, network, sequence=sequence)
        return found

    @classmethod
    def of_recipe(cls, recipe: Recipe, ranks: int) -> Layout:
        """The layout of a recipe whose model is ``gpt``, over a number of ranks."""
        mesh = recipe.mesh.at(ranks)
        resolved = recipe.at_data_ranks(mesh.data_ranks)
        # The rank with the most samples is the slowest one.
        at_once = resolved.batch.at_once(mesh.data_ranks)
        parts = resolved.batch.parts(resolved.global_batch, mesh.data_ranks)
        cuts = recipe.pipeline.count(mesh.pp) if mesh.pp > 1 else 1
        schedule = recipe.pipeline.schedule
        zero = recipe.sharding.zero if mesh.sizes["dp_shard"] > 1 else 0
        return cls(
            mesh=mesh,
            micro_batch=-(-at_once // cuts),
            micro_batches=parts * cuts,
            samples=resolved.global_batch,
            # With zero 2, and in pipelines, FSDP2 keeps a rank's part beside gathered parameters.
            zero=3 if zero == 2 else zero,
            reshard=zero == 3 and mesh.pp == 1,
            schedule=schedule,
            virtual_stages=1 if schedule in ONE_STAGE or mesh.pp == 1 else 2,
            recomputation="full" if recipe.sharding.recompute else "none",
            precision=recipe.precision,
            autocast=recipe.precision != "float32",
            kernels="eager",
            # The engine's buckets, or what CUDA graphs add to; FSDP2 reduces the gradients of models that are divided.
            gradient_buffer=recipe.compile == "graphs"
            or (mesh.data_ranks > 1 and zero < 2 and mesh.tp == mesh.pp == 1),
            divided_vocabulary=False,
            chunked_loss=True,
        )


@lru_cache(maxsize=1024)
def divided_layers(layers: int, stages: int) -> tuple[int, ...]:
    """How many layers each stage has, see :meth:`Layout.rank_layers`."""
    each, more = divmod(layers, stages)
    if more and (layers + 2) % stages == 0 and layers + 2 > stages:
        whole = (layers + 2) // stages
        return tuple(whole - (stage in (0, stages - 1)) for stage in range(stages))
    first = (stages - more) // 2
    return tuple(each + (first <= stage < first + more) for stage in range(stages))


def check_layout(layout: Layout, network: Transformer, *, sequence: int | None = None) -> None:
    """Refuse a layout that cannot train a transformer with samples of so many tokens, by default the context."""
    require_positions(network, sequence or network.context)
    for problem, remedy in _misfits(layout, network, sequence or network.context):
        raise HpctrainError("HT-layout-not-possible", "{problem}", remedy, problem=problem)


def _misfits(layout: Layout, network: Transformer, sequence: int) -> Iterator[tuple[str, str]]:
    """What of a layout does not fit a transformer, with what would."""
    tp, cp, pp = (layout.sizes[axis] for axis in ("tp", "cp", "pp"))
    for axis, size, of, parts in (
        ("tp", tp, "heads", network.heads),
        ("tp", tp, "mlp", network.mlp),
        ("cp", cp, "sequence", sequence),
    ):
        if parts % size:
            yield f"{axis} {size} does not divide {of} ({parts})", f"valid: {', '.join(map(str, divisors(parts)))}"
    heads = network.kv_heads
    if heads % tp and tp % heads:
        valid = ", ".join(map(str, divisors(heads)))
        yield f"tp {tp} neither divides kv_heads ({heads}) nor is a multiple of it", f"valid: {valid}"
    if layout.stages > network.layers:
        stages = f"pp {pp} with {layout.virtual_stages} stages a rank makes {layout.stages} stages"
        yield f"{stages} of {network.layers} layers", "give each stage a layer at least"
    rounds = max(1, layout.micro_batches // pp)
    if layout.schedule.startswith("interleaved") and layout.micro_batches % rounds:
        needed = f"are not {rounds} equal rounds, which {layout.schedule} over pp {pp} needs"
        yield f"{layout.micro_batches} micro-batches {needed}", f"for example a multiple of {pp}"


def require_positions(network: Transformer, sequence: int) -> None:
    """Refuse samples that have more tokens than a transformer has learned positions."""
    if network.positions == "learned" and sequence > network.context:
        raise HpctrainError(
            "HT-layout-not-possible",
            "{problem}",
            f"at most --set sequence={network.context}, or a network of a larger context",
            problem=f"a sequence of {sequence} tokens is longer than the {network.context} positions that it learns",
        )


def divisors(number: int) -> list[int]:
    """All numbers that divide another."""
    return [each for each in range(1, number + 1) if number % each == 0] if number < 1 << 20 else [1]
