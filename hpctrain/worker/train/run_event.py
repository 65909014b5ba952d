"""The event that says what a run trains."""

from __future__ import annotations

from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events.kinds import RunEvent
from hpctrain.worker.comm import Communicator
from hpctrain.worker.train.trainer import Trainer


def run_event(
    recipe: Recipe, comm: Communicator, trainer: Trainer, iterations_per_epoch: int, peak_flops: float | None
) -> RunEvent:
    """The event of a run. Collective.

    Args:
        peak_flops: the peak of a rank's GPU in FLOP/s; None where it is not known.
    """
    event = RunEvent(
        recipe=recipe.name,
        framework=trainer.framework,
        backend=comm.backend,
        ranks=comm.size,
        hosts=tuple(sorted(set(comm.allgather_object(comm.host)))),
        epochs=recipe.epochs,
        iterations_per_epoch=iterations_per_epoch,
        parameters=trainer.parameters,
        bucket_mb=trainer.bucket_mb,
        decode=recipe.data.decode if recipe.data.name == "imagenet" else None,
    )
    if recipe.data.name != "text":
        return event
    tokens = recipe.model.context
    text = {"tokens": tokens, "flops": tokens * recipe.model.flops_per_token, "peak_flops": peak_flops}
    return event.model_copy(update=text)
