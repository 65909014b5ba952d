"""Which layouts can train a transformer at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.common.errors import HpctrainError

if TYPE_CHECKING:
    from hpctrain.common.recipes.transformer import Transformer
    from hpctrain.control.predict.transformers.layout import Layout


def check_layout(
    layout: Layout,
    network: Transformer,
    *,
    sequence: int | None = None,
    global_batch: int | None = None,
) -> None:
    """Refuse a layout that cannot train a transformer.

    Args:
        sequence: tokens of a sample, by default the network's context.
        global_batch: samples of a step; by default what micro-batches and data-parallel ranks make.

    Raises:
        HpctrainError: with what does not fit, and what would.
    """
    require_positions(network, sequence or network.context)
    sizes = layout.sizes
    for axis, of, parts in (
        ("tp", "heads", network.heads),
        ("tp", "mlp", network.mlp),
        ("cp", "sequence", sequence or network.context),
    ):
        if parts % sizes[axis]:  # type: ignore[index]
            raise HpctrainError(
                "HT-layout-not-divisible",
                "{axis} {size} does not divide {of} ({parts})",
                f"valid: {', '.join(map(str, divisors(parts)))}",
                axis=axis,
                size=sizes[axis],  # type: ignore[index]
                of=of,
                parts=parts,
            )
    if network.kv_heads % sizes["tp"] and sizes["tp"] % network.kv_heads:
        raise HpctrainError(
            "HT-layout-kv-heads",
            "tp {tp} neither divides kv_heads ({heads}) nor is a multiple of it",
            f"valid: {', '.join(map(str, divisors(network.kv_heads)))}",
            tp=sizes["tp"],
            heads=network.kv_heads,
        )
    if layout.stages > network.layers:
        raise HpctrainError(
            "HT-layout-more-stages-than-layers",
            "pp {pp} with {virtual_stages} stages a rank makes {stages} stages of {layers} layers",
            "give each stage a layer at least",
            pp=sizes["pp"],
            virtual_stages=layout.virtual_stages,
            stages=layout.stages,
            layers=network.layers,
        )
    _check_batch(layout, global_batch)


def _check_batch(layout: Layout, global_batch: int | None) -> None:
    rounds = max(1, layout.micro_batches // layout.sizes["pp"])
    if layout.schedule.startswith("interleaved") and layout.micro_batches % rounds:
        raise HpctrainError(
            "HT-layout-interleaved-micro-batches",
            "{micro_batches} micro-batches are not {rounds} equal rounds, which {schedule} over pp {pp} needs",
            f"for example a multiple of {layout.sizes['pp']}",
            micro_batches=layout.micro_batches,
            rounds=rounds,
            schedule=layout.schedule,
            pp=layout.sizes["pp"],
        )
    if global_batch is not None and global_batch != layout.global_batch:
        raise HpctrainError(
            "HT-layout-batch-not-divisible",
            "a batch of {global_batch} is not {data_ranks} data-parallel ranks x {micro_batches} micro-batches x "
            "{micro_batch} samples = {product}",
            global_batch=global_batch,
            data_ranks=layout.mesh.data_ranks,
            micro_batches=layout.micro_batches,
            micro_batch=layout.micro_batch,
            product=layout.global_batch,
        )


def require_positions(network: Transformer, sequence: int) -> None:
    """Refuse samples that have more tokens than a transformer has learned positions.

    Raises:
        HpctrainError: they do.
    """
    if network.positions == "learned" and sequence > network.context:
        raise HpctrainError(
            "HT-layout-sequence-too-long",
            "a sequence of {sequence} tokens is longer than the {context} positions that the network learns",
            f"at most --set sequence={network.context}, or a network of a larger context",
            sequence=sequence,
            context=network.context,
        )


def divisors(number: int) -> list[int]:
    """All numbers that divide another."""
    return [each for each in range(1, number + 1) if number % each == 0] if number < 1 << 20 else [1]


def micro_batches(global_batch: int, data_ranks: int) -> str:
    """The micro-batches that divide a batch, in words."""
    if global_batch % data_ranks:
        return f"none, as {data_ranks} data-parallel ranks do not divide the batch"
    return ", ".join(map(str, divisors(global_batch // data_ranks)))
