"""Trains a recipe on a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpctrain.common.checkpoints.find import Policy, scores
from hpctrain.common.cluster.gpus import usable_gpus
from hpctrain.common.recipes.families import Framework
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run import stopping
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventsFile, EventWriter, kept
from hpctrain.common.run.events.kinds import StartEvent
from hpctrain.common.run.plan import Plan
from hpctrain.worker.adapters.data_ranks import set_mesh
from hpctrain.worker.comm import Communicator, init
from hpctrain.worker.comm.stalls import reports
from hpctrain.worker.data import open_sources, with_head
from hpctrain.worker.energy_meter import RunEnergy
from hpctrain.worker.train.asynchronous import AsynchronousLoop
from hpctrain.worker.train.checkpoint_interval import CheckpointInterval, failures_seen
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.loop import Loop
from hpctrain.worker.train.recovery import Recovery, require_fault_tolerance
from hpctrain.worker.train.trainer import Trainer

if TYPE_CHECKING:
    from hpctrain.worker.train.torch_trainer import TorchTrainer


def train_recipe(plan: Plan, directory: RunDirectory, joined: Callable[[], None]) -> None:
    """Train the plan's recipe on the ranks that the launcher started. Rank 0 records the run in ``directory``.

    Calls ``joined`` once all of them have met.

    Raises:
        SystemExit: the run was stopped; its code is ``stopping.RESUMABLE``.
        HpctrainError: the settings leave nothing to train, the ranks differ, or a reduction failed.
    """
    assert plan.recipe is not None
    recipe = plan.recipe
    comm = init()
    joined()
    set_mesh(comm, recipe.mesh)
    require_fault_tolerance(comm, recipe.fault_tolerance)
    # Ranks without a GPU compute on their cores.
    decoders = recipe.data.decoders(plan.threads_per_rank - 1 if usable_gpus() else 0)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"workers": decoders})})
    comm.say(f"reading the data: {recipe.data.path or recipe.data.name}")
    train, test = open_sources(recipe, comm)
    recipe = with_head(recipe, train, comm)
    with (
        contextlib.closing(train),
        contextlib.closing(test),
        EventWriter(directory.events if comm.rank == 0 else None) as events,
        _checkpoints(plan, directory, comm, events) as checkpoints,
        contextlib.closing(RunEnergy(comm, events)) as energy,
    ):
        begun = comm.broadcast_object(_resumed_from(directory) if comm.rank == 0 else 0)
        # A checkpoint replaces what a training began with, which need not be there any more.
        trainer = _trainer(plan.framework, recipe.begun() if begun else recipe, comm)
        asynchronous = recipe.sync is not None and recipe.sync.mode == "async"
        loop = (AsynchronousLoop if asynchronous else Loop)(
            recipe,
            comm,
            trainer,
            train,
            test,
            events,
            checkpoints=checkpoints,
            asked=lambda: stopping.this_process.asked(look=comm.rank == 0),
            recovery=Recovery(comm, trainer, events, directory) if plan.fault_tolerant else None,
            energy=energy,
        )
        reports.iteration = lambda: loop.iteration + 1
        # Not "taking the first step": the epoch of the checkpoint may still have to be evaluated.
        comm.say(f"continuing from the checkpoint of step {begun}" if begun else "taking the first step")
        done = loop.run(begun)
    if not done:
        stopping.this_process.agree()
        raise SystemExit(stopping.RESUMABLE)


def _checkpoints(plan: Plan, directory: RunDirectory, comm: Communicator, events: EventWriter) -> Checkpoints:
    assert plan.recipe is not None
    asked = plan.recipe.checkpoints
    # All ranks use rank 0's scores and interval.
    past = EventsFile(directory.events).outline if comm.rank == 0 else []
    mtbf = asked.mtbf_hours and 3600 * asked.mtbf_hours
    return Checkpoints(
        directory.checkpoints,
        comm,
        events,
        plan=plan.model_dump(mode="json"),
        policy=Policy(last=asked.keep_last, best=asked.keep_best, every_epochs=asked.keep_every_epochs),
        scores=scores(kept(past)),
        interval=CheckpointInterval(mtbf, *failures_seen(past)) if asked.every_steps == "auto" else None,
    )


def _resumed_from(directory: RunDirectory) -> int:
    """The iteration at which this attempt begins, as the launcher recorded it."""
    starts = EventsFile(directory.events).few(StartEvent)
    return starts[-1].iteration if starts else 0


def _trainer(framework: Framework | None, recipe: Recipe, comm: Communicator) -> Trainer:
    if framework == "keras":
        comm.say("loading TensorFlow and Keras")
        from hpctrain.worker.train.keras_trainer import KerasTrainer

        make: Callable[[Recipe, Communicator], Trainer] = KerasTrainer
        if comm.strategy is not None and comm.size == 1:
            from hpctrain.worker.train.strategy_trainer import ParameterServerTrainer, StrategyTrainer

            make = ParameterServerTrainer if comm.backend == "parameter_server" else StrategyTrainer
    else:
        comm.say("loading PyTorch")
        make = torch_trainer(recipe, comm)
    comm.say(f"building {recipe.model.name}")
    return make(recipe, comm)


def torch_trainer(recipe: Recipe, comm: Communicator) -> type[TorchTrainer]:
    """The PyTorch trainer for a recipe under its mesh."""
    sizes, zero = recipe.mesh.at(comm.size).sizes, recipe.sharding.zero
    if sizes["pp"] > 1:
        from hpctrain.worker.train.mesh_trainer import PipelineTrainer

        return PipelineTrainer
    if sizes["tp"] > 1 or (sizes["dp_shard"] > 1 and zero > 1):
        from hpctrain.worker.train.mesh_trainer import MeshTrainer

        return MeshTrainer
    from hpctrain.worker.train.torch_trainer import TorchTrainer

    return TorchTrainer
