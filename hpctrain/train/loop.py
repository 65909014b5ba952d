"""The training loop, the same for either framework: batches, schedule, evaluation, events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from hpctrain.checkpoints import Progress
from hpctrain.comm import Communicator
from hpctrain.data.samples import Samples
from hpctrain.data.sampling import Indices, batch_count, epoch_order, global_batches, share
from hpctrain.errors import HpctrainError
from hpctrain.events import EventWriter
from hpctrain.optim.schedule import LearningRate
from hpctrain.recipes.schema import Recipe
from hpctrain.train.checkpoint import Checkpoints, Stateful

Timeline = Sequence[tuple[float, str, int]]

# The first step also allocates and compiles.
_TRACED_STEP = 2


class Trainer(Stateful, Protocol):
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
        checkpoints: where its state is kept: after the last step of each epoch, and at a stop.
        asked: why this rank was asked to stop, or None.

    Raises:
        HpctrainError: the batch is so large that an epoch has no step.
    """

    def __init__(
        self,
        recipe: Recipe,
        comm: Communicator,
        trainer: Trainer,
        train: Samples,
        test: Samples,
        events: EventWriter,
        *,
        checkpoints: Checkpoints,
        asked: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._recipe = recipe
        self._comm = comm
        self._trainer = trainer
        self._train = train
        self._test = test
        self._events = events
        self._checkpoints = checkpoints
        self._asked = asked
        self._rate = learning_rate(recipe, len(train))
        self._iteration = 0
        self._losses: list[float] = []
        self._epoch_seconds = 0.0
        self._seconds = 0.0

    @property
    def iteration(self) -> int:
        """How many steps are done."""
        return self._iteration

    def run(self, resume_from: int = 0) -> bool:
        """Train for the recipe's epochs, evaluating after each.

        Args:
            resume_from: the iteration of the checkpoint to go on from; 0 to begin.

        Returns:
            Whether the run is done; else it was stopped, and its last step is in a checkpoint.
        """
        if resume_from:
            self._restore(resume_from)
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
        begin = time.perf_counter() - self._seconds
        # A checkpoint of an epoch's last step lacks its evaluation, so it belongs to that epoch.
        first = (self._iteration - len(self._losses)) // self._rate.iterations_per_epoch
        for epoch in range(first, self._recipe.epochs):
            if not self._epoch(epoch, begin):
                return False
        self._events.emit("end", status="done", seconds=time.perf_counter() - begin)
        return True

    def _epoch(self, epoch: int, run_begin: float) -> bool:
        """What an epoch still lacks: steps, of which some may have been done before, and its evaluation."""
        begin = time.perf_counter() - self._epoch_seconds
        order = epoch_order(len(self._train), seed=self._recipe.seed, epoch=epoch)
        batches = list(global_batches(order, self._recipe.batch.size, drop_last=self._recipe.batch.drop_last))
        for batch in batches[len(self._losses) :]:
            stop = self._step(batch, epoch)
            if stop or len(self._losses) == len(batches):
                self._epoch_seconds, self._seconds = time.perf_counter() - begin, time.perf_counter() - run_begin
                self._save(epoch)
            if stop:
                self._events.emit("stopped", iteration=self._iteration, reason=self._asked() or "asked on another rank")
                return False
        sizes = [len(batch) for batch in batches]
        test_loss, test_accuracy = self._evaluate()
        self._events.emit(
            "epoch",
            epoch=epoch + 1,
            seconds=self._epoch_seconds,
            samples_per_s=sum(sizes) / self._epoch_seconds,
            train_loss=float(np.average(self._losses, weights=sizes)),
            test_loss=test_loss,
            test_accuracy=test_accuracy,
        )
        self._losses, self._epoch_seconds = [], 0.0
        return True

    def _save(self, epoch: int) -> None:
        progress = Progress(
            iteration=self._iteration,
            epoch=epoch + 1,
            losses=tuple(self._losses),
            epoch_seconds=self._epoch_seconds,
            seconds=self._seconds,
            ranks=self._comm.size,
        )
        self._checkpoints.save(progress, self._trainer)

    def _restore(self, iteration: int) -> None:
        progress = self._checkpoints.restore(iteration, self._trainer)
        self._iteration, self._losses = progress.iteration, list(progress.losses)
        self._epoch_seconds, self._seconds = progress.epoch_seconds, progress.seconds

    def _step(self, batch: Indices, epoch: int) -> bool:
        """Train on one global batch and note its mean loss; returns whether any rank was asked to stop."""
        begin = time.perf_counter()
        rate = self._rate(self._iteration)
        own = share(batch, self._comm.rank, self._comm.size)
        pieces = np.array_split(own.indices, min(self._recipe.batch.micro_batches, len(own.indices)))
        # ranks / samples of the global batch, or 0 for a rank that computes a sample of another's
        scale = own.weight / len(own.indices)
        own_loss = self._trainer.step([self._train[piece] for piece in pieces], scale, rate)
        loss, stop = self._comm.allreduce(np.array([own_loss, float(self._asked() is not None)]), "mean")
        self._iteration += 1
        self._losses.append(float(loss))
        self._events.emit(
            "step",
            iteration=self._iteration,
            epoch=epoch + 1,
            loss=float(loss),
            learning_rate=rate,
            samples=len(batch),
            seconds=time.perf_counter() - begin,
            communication_seconds=self._trainer.communication_seconds,
        )
        if self._iteration == _TRACED_STEP and self._trainer.timeline:
            self._events.emit("overlap", iteration=self._iteration, timeline=self._trainer.timeline)
        return bool(stop > 0)

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
