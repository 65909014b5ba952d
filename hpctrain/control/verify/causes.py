"""Says from the evidence why ranks compute something else than one process. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hpctrain.common.errors import abbreviated
from hpctrain.common.run.step_records import RankFacts, StepRecord
from hpctrain.control.verify.differences import Comparison, RankSteps, as_means, factor

_SAME_FACTOR = 1e-2


def cause(found: Comparison, one: RankSteps, ranks: Sequence[RankSteps]) -> str:
    """The most probable cause, in one or two sentences."""
    if found.not_finite:
        return f"one process computes no finite numbers, in {_named(found.not_finite)}: nothing compares with them"
    steps = [each for _, each in ranks]
    for reason in (
        _one_updates(steps),
        _ranks_differ(found, one[1], steps),
        _scaled(found, one[1], len(ranks)),
        _other_samples(found),
        _random(found, [one[0], *(facts for facts, _ in ranks)]),
        _optimizer(found),
        _own_statistics(one[0]),
    ):
        if reason:
            return reason
    if not found.different:
        return ""
    return (
        "the gradients differ, of the same samples. Probably something is computed from a rank's own rows where one "
        "process has the whole batch: a loss within the model, a mean over rows, or data that the script divides"
    )


def _one_updates(steps: Sequence[list[StepRecord]]) -> str:
    made = [len(each) for each in steps]
    if min(made) == max(made):
        return ""
    counts = ", ".join(map(str, made))
    return f"ranks make different numbers of updates: {counts}. Every rank has to call optimizer.step()"


def _other_samples(found: Comparison) -> str:
    if "other" not in found.samples:
        return ""
    step = found.samples.index("other") + 1
    if found.different and found.different[0].step < step:
        return ""  # what a model that differs already has made may be samples of the next one
    return (
        f"at step {step} the ranks compute other samples than one process: the script divides its data by itself, or "
        "has a batch size or a seed for each rank. ht.shard(loader) gives the ranks one process's batches"
    )


def _ranks_differ(found: Comparison, one: list[StepRecord], steps: Sequence[list[StepRecord]]) -> str:
    parameters = [each for each in found.between if each.kind == "parameter"]
    if not parameters:
        return ""
    step = parameters[0].step
    names = list(dict.fromkeys(each.name for each in parameters if each.step == step))
    total = sum(each.kind == "parameter" for each in one[step - 1].kept)
    last = steps[parameters[0].rank][step - 1]
    trained = [each.name for each in last.kept if each.kind == "own"]
    by_gradients = any(each.kind == "gradient" and each.step == step for each in found.between)
    known = bool(trained) or len(names) == total
    if by_gradients and known and all(_is_own(last, name) for name in trained or names):
        return (
            "each rank trains by itself, with the gradients of its own samples. "
            "model, optimizer = ht.distribute(model, optimizer) joins the ranks, as DistributedDataParallel does"
        )
    return (
        f"{_named(names)} differ between ranks: not given to ht.distribute, without a gradient on some ranks, or "
        "changed after the backward pass by something that depends on the rank, such as random numbers or a schedule"
    )


def _is_own(step: StepRecord, name: str) -> bool:
    """Whether an optimizer got the gradient that its rank computed, which no other rank had a part in."""
    kept = {each.key: each.values for each in step.kept}
    gradient, own = kept.get(("gradient", name)), kept.get(("own", name))
    return own is None or gradient is None or factor(own, gradient, tolerance=1e-3) is not None


def _random(found: Comparison, facts: Sequence[RankFacts]) -> str:
    names = [name for each in facts for name in each.random]
    if not names or not found.different:
        return ""
    return (
        f"random numbers are drawn in {_named(names)}, on each rank for its own rows. Without them (Dropout(0)) "
        "nothing else should differ"
    )


def _scaled(found: Comparison, one: list[StepRecord], ranks: int) -> str:
    step = found.different[0].step if found.different else 0
    by_name = {each.name: each.factor for each in found.different if each.kind == "gradient" and each.step == step}
    factors = [value for value in by_name.values() if value is not None]
    total = sum(each.kind == "gradient" and each.norm > 0 for each in one[step - 1].kept) if step else 0
    # Those of hardly any size, as before a batch norm, may be within the noise.
    if not factors or len(factors) < len(by_name) or 2 * len(factors) <= total or not _alike(factors):
        return ""
    first = factors[0]
    if "other" in found.samples and not _alike([first, float(ranks)]) and not _alike([first, 1 / ranks]):
        return ""
    return (
        f"all gradients are {first:.4g} times those of one process, on {ranks} ranks: the loss is a sum where a mean "
        "is averaged over the ranks (ht.sum_loss), or is divided by something else than in one process, such as a "
        "rank's own number of samples or tokens (ht.mean_loss, with Keras ht.keras.whole)"
    )


def _alike(factors: Sequence[float]) -> bool:
    return all(math.isclose(each, factors[0], rel_tol=_SAME_FACTOR) for each in factors)


def _optimizer(found: Comparison) -> str:
    first = found.different[0] if found.different else None
    if first is None or first.kind != "parameter":
        return ""
    return (
        "the gradients of that step are equal and the parameters after it are not: the optimizer, its learning rate or "
        "schedule, or weight decay depend on the rank or on the number of ranks"
    )


def _own_statistics(facts: RankFacts) -> str:
    if not facts.own_statistics:
        return ""
    return (
        f"{_named(facts.own_statistics)}: each rank normalises by the statistics of its own rows. "
        "nn.SyncBatchNorm.convert_sync_batchnorm(model), with Keras BatchNormalization(synchronized=True), takes those "
        "of all ranks"
    )


def as_ddp(found: Comparison, ranks: Sequence[RankSteps]) -> str:
    """What was seen of ranks that average the gradients of samples of their own, as DistributedDataParallel does."""
    known = [each for each in found.samples if each != "unknown"]
    if known[:1] != ["other"] or found.between or any(facts.batches for facts, _ in ranks):
        return ""
    factors = as_means([steps for _, steps in ranks], len(ranks))
    if factors is None or any(not 0 < value <= 1 + _SAME_FACTOR for value in factors):
        return ""
    return (
        "the script divides its data by itself, so that one process has other batches; the gradients of all steps are "
        "the means of what the ranks computed, up to clipping, and the parameters are equal on all ranks"
    )


def _named(names: Iterable[str]) -> str:
    """The first of the names, each once, and the number of the others."""
    return abbreviated([*dict.fromkeys(names)])
