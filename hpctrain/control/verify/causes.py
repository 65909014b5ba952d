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
    steps = [each for _, each in ranks]
    for reason in (
        _not_finite(found),
        _one_updates(steps),
        _ranks_differ(found, one[1], steps),
        _scaled(found, one, len(ranks)),
        _other_samples(found, steps),
        _random(found, [one[0], *(facts for facts, _ in ranks)]),
        _optimizer(found),
        _own_statistics(one[0]),
        _one_parameter(found, one[1]),
    ):
        if reason:
            return reason
    if not found.different:
        return ""
    return (
        "the gradients differ, of the same samples. Probably something is computed from a rank's own rows where one "
        "process has the whole batch: a loss within the model, a mean over rows, or data that the script divides"
    )


def _not_finite(found: Comparison) -> str:
    if not found.not_finite:
        return ""
    return f"one process computes no finite numbers, in {_named(found.not_finite)}, which nothing can be compared with"


def _one_updates(steps: Sequence[list[StepRecord]]) -> str:
    made = [len(each) for each in steps]
    if min(made) == max(made):
        return ""
    ranks = [rank for rank, count in enumerate(made) if count == max(made)]
    if min(made) == 0:
        return f"only rank {_listed(ranks)} updates its parameters: every rank has to call optimizer.step()"
    return f"ranks make different numbers of updates: {_listed(made)}"


def _other_samples(found: Comparison, steps: Sequence[list[StepRecord]]) -> str:
    if "other" not in found.samples:
        return ""
    step = found.samples.index("other") + 1
    if found.different and found.different[0].step < step:
        return ""  # what a model that differs already has made may be samples of the next one
    counts = [len(each[step - 1].samples) for each in steps if len(each) >= step]
    text = f"at step {step} the ranks compute other samples than one process ({_listed(counts)} on the ranks)"
    if {"other", "unknown"}.issuperset(found.samples[:step]):
        return (
            f"{text}: the script divides its data by itself, or has a batch size or a seed for each rank. "
            "ht.shard(loader) gives the ranks one process's batches"
        )
    return f"{text}, and the same before: their order or their number depends on the ranks"


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
    alone = by_gradients and all(_is_own(last, name) for name in trained or names)
    if len(names) < total and not (trained and alone):
        return (
            f"{_named(names)} differ between ranks: not given to ht.distribute, or without a gradient on some ranks, "
            "or changed outside of the optimizer"
        )
    if alone:
        return (
            "each rank trains by itself, with the gradients of its own samples. "
            "model, optimizer = ht.distribute(model, optimizer) joins the ranks, as DistributedDataParallel does"
        )
    return (
        "ranks change parameters or gradients differently after the backward pass: random numbers, noise or a schedule "
        "that depends on the rank"
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


def _scaled(found: Comparison, one: RankSteps, ranks: int) -> str:
    step = found.different[0].step if found.different else 0
    by_name = {each.name: each.factor for each in found.different if each.kind == "gradient" and each.step == step}
    factors = [value for value in by_name.values() if value is not None]
    total = sum(each.kind == "gradient" and each.norm > 0 for each in one[1][step - 1].kept) if step else 0
    # Those of hardly any size, as before a batch norm, may be within the noise.
    if not factors or len(factors) < len(by_name) or 2 * len(factors) <= total or not _alike(factors):
        return ""
    first = factors[0]
    if _alike([first, float(ranks)]):
        return (
            f"all gradients are {ranks} times those of one process, on {ranks} ranks: they are sums over the ranks, "
            "of a loss that is a sum over samples. Divide it by its samples, or see ht.sum_loss"
        )
    if _alike([first, 1 / ranks]):
        return (
            f"all gradients are 1/{ranks} of those of one process, on {ranks} ranks: they are divided by {ranks} "
            "twice, or are means over the ranks of a loss that is a sum over samples"
        )
    if "other" in found.samples:
        return ""
    advice = "ht.mean_loss(total, count) divides by that of all ranks"
    if one[0].framework == "keras":
        advice += ", and ht.keras.whole(y, y_pred) gives what other losses need"
    return (
        f"all gradients are {first:.4g} times those of one process: the loss is divided by something else than in one "
        f"process, such as a rank's own number of samples or tokens. {advice}"
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
    synchronised = (
        "BatchNormalization(synchronized=True)"
        if facts.framework == "keras"
        else "nn.SyncBatchNorm.convert_sync_batchnorm(model)"
    )
    return (
        f"{_named(facts.own_statistics)}: each rank normalises by the statistics of its own rows. {synchronised} takes "
        "those of all ranks"
    )


def _one_parameter(found: Comparison, one: list[StepRecord]) -> str:
    if not found.different:
        return ""
    step = found.different[0].step
    names = list(dict.fromkeys(each.name for each in found.different if each.step == step))
    total = sum(each.kind == "parameter" for each in one[step - 1].kept)
    if len(names) == total or len(names) > 3:
        return ""
    return (
        f"only {_named(names)} of {total} tensors differ: not given to ht.distribute, or used for the rows of some "
        "ranks alone"
    )


def as_ddp(found: Comparison, ranks: Sequence[RankSteps]) -> str:
    """What was seen of ranks that average the gradients of samples of their own, as DistributedDataParallel does."""
    known = [each for each in found.samples if each != "unknown"]
    if known[:1] != ["other"] or found.between or any(facts.batches for facts, _ in ranks):
        return ""
    factors = as_means([steps for _, steps in ranks], len(ranks))
    if factors is None or any(not 0 < value <= 1 + _SAME_FACTOR for value in factors):
        return ""
    less = [value for value in factors if value < 1 - 1e-4]
    clipped = f", times {less[0]:.4g} (clipping, or a loss's scale)" if less else ""
    return (
        "the script divides its data by itself, so that one process has other batches; the gradients of all steps are "
        f"the means of what the ranks computed{clipped}, and the parameters are equal on all ranks"
    )


def _named(names: Iterable[str]) -> str:
    """The first of the names, each once, and the number of the others."""
    return abbreviated([*dict.fromkeys(names)])


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
