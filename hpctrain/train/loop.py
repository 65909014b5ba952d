"""The training loop, the same for either framework: batches, schedule, evaluation, events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hpctrain.comm import Communicator
from hpctrain.data.samples import Samples
from hpctrain.data.sampling import Indices, batch_count, epoch_order, global_batches, share
from hpctrain.errors import HpctrainError
from hpctrain.events import EventWriter
from hpctrain.optim.schedule import LearningRate
from hpctrain.recipes.schema import Recipe

Timeline = Sequence[tuple[float, str, int]]

# The first step also allocates and compiles.
_TRACED_STEP = 2


class Trainer(Protocol):
    """A model and its optimizer, made to use the communicator by a framework's adapter.

    Attributes:
        framework: ``torch`` or ``keras``.
        parameters: how many numbers are trained.
        communication_seconds: how long the last step waited for reductions after its last gradient.
        timeline: the last step's reductions (see hpctrain.events); empty where they are not measured.
    """

    framework: str
    parameters: int

    @property
    def communication_seconds(self) -> float: ...

    @property
    def timeline(self) -> Timeline: ...

    def step(self, parts: Sequence[Samples], scale: float, learning_rate: float) -> float:
        """One update by the mean over the ranks of the gradient of the returned loss.

        Args:
            parts: this rank's micro-batches, none of them empty. Only the sum of their gradients is reduced.
            scale: what the sum of the samples' losses is multiplied by.
            learning_rate: of this step.

        Returns:
            ``scale`` x the sum of the losses of all samples in ``parts``, before the update.
        """

    def evaluate(self, samples: Samples) -> tuple[float, int]:
        """The sum of the losses, and how many samples are classified rightly."""


class Loop:
    """One run of a recipe on the ranks of a communicator.

    Args:
        recipe: what to train.
        comm: the ranks; every one runs its own loop over the same samples.
        trainer: the model of this rank.
        train, test: all samples, the same on every rank.
        events: where the run is recorded.

    Raises:
        HpctrainError: the batch is so large that an epoch has no step.
    """

    def __init__(
        self, recipe: Recipe, comm: Communicator, trainer: Trainer, train: Samples, test: Samples, events: EventWriter
    ) -> None:
        self._recipe = recipe
        self._comm = comm
        self._trainer = trainer
        self._train = train
        self._test = test
        self._events = events
        self._rate = learning_rate(recipe, len(train))
        self._iteration = 0

    def run(self) -> None:
        """Train for the recipe's epochs, evaluating after each."""
        begin = time.perf_counter()
        self._events.emit(
            "run",
            recipe=self._recipe.name,
            framework=self._trainer.framework,
            backend=self._comm.backend,
            ranks=self._comm.size,
            hosts=sorted(set(self._comm.allgather_object(self._comm.host))),
            epochs=self._recipe.epochs,
            iterations_per_epoch=self._rate.iterations_per_epoch,
            parameters=self._trainer.parameters,
        )
        for epoch in range(self._recipe.epochs):
            self._epoch(epoch)
        self._events.emit("end", status="done", seconds=time.perf_counter() - begin)

    def _epoch(self, epoch: int) -> None:
        begin = time.perf_counter()
        order = epoch_order(len(self._train), seed=self._recipe.seed, epoch=epoch)
        batches = list(global_batches(order, self._recipe.batch.size, drop_last=self._recipe.batch.drop_last))
        losses = [self._step(batch, epoch) for batch in batches]
        seconds = time.perf_counter() - begin
        sizes = [len(batch) for batch in batches]
        test_loss, test_accuracy = self._evaluate()
        self._events.emit(
            "epoch",
            epoch=epoch + 1,
            seconds=seconds,
            samples_per_s=sum(sizes) / seconds,
            train_loss=float(np.average(losses, weights=sizes)),
            test_loss=test_loss,
            test_accuracy=test_accuracy,
        )

    def _step(self, batch: Indices, epoch: int) -> float:
        """Train on one global batch; returns the mean loss over it."""
        begin = time.perf_counter()
        rate = self._rate(self._iteration)
        own = share(batch, self._comm.rank, self._comm.size)
        pieces = np.array_split(own.indices, min(self._recipe.batch.micro_batches, len(own.indices)))
        # ranks / samples of the global batch, or 0 for a rank that computes a sample of another's
        scale = own.weight / len(own.indices)
        own_loss = self._trainer.step([self._train[piece] for piece in pieces], scale, rate)
        loss = float(self._comm.allreduce(np.array([own_loss]), "mean")[0])
        self._iteration += 1
        self._events.emit(
            "step",
            iteration=self._iteration,
            epoch=epoch + 1,
            loss=loss,
            learning_rate=rate,
            samples=len(batch),
            seconds=time.perf_counter() - begin,
            communication_seconds=self._trainer.communication_seconds,
        )
        if self._iteration == _TRACED_STEP and self._trainer.timeline:
            self._events.emit("overlap", iteration=self._iteration, timeline=self._trainer.timeline)
        return loss

    def _evaluate(self) -> tuple[float, float]:
        """Mean loss and accuracy on the test set, of which every sample is seen by one rank."""
        own = np.array_split(np.arange(len(self._test)), self._comm.size)[self._comm.rank]
        size = self._recipe.batch.size
        results = [self._trainer.evaluate(self._test[own[start : start + size]]) for start in range(0, len(own), size)]
        own_sums = np.array(results, dtype=np.float64).reshape(-1, 2).sum(axis=0)
        loss_sum, correct = self._comm.allreduce(own_sums, "sum")
        return float(loss_sum) / len(self._test), float(correct) / len(self._test)


def learning_rate(recipe: Recipe, samples: int) -> LearningRate:
    """The rate of a recipe's steps over ``samples`` training samples."""
    batch = recipe.batch
    iterations = batch_count(samples, batch.size, drop_last=batch.drop_last)
    if not iterations:
        raise HpctrainError(
            f"batch.size={batch.size} with batch.drop_last leaves no step: there are {samples} training samples",
            f"--set batch.size={samples} or less, or --set batch.drop_last=false",
        )
    return LearningRate(
        schedule=recipe.schedule,
        learning_rate=recipe.optimizer.learning_rate,
        batch_size=batch.size,
        iterations_per_epoch=iterations,
        epochs=recipe.epochs,
    )
