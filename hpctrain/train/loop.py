"""The training loop, the same for either framework: batches, schedule, evaluation, events."""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from hpctrain.checkpoints.manifest import SavedProgress
from hpctrain.comm import Communicator
from hpctrain.data.samples import BROKEN, Samples
from hpctrain.data.sampling import Indices, batch_count, cut, sample_of
from hpctrain.data.source import Source
from hpctrain.errors import HpctrainError
from hpctrain.optim.schedule import learning_rate, sgd_share
from hpctrain.recipes.schema import Recipe
from hpctrain.run.events import EventWriter
from hpctrain.run.events.kinds import (
    BrokenImagesEvent,
    EndEvent,
    EpochEvent,
    OverlapEvent,
    RunEvent,
    StepEvent,
    StoppedEvent,
)
from hpctrain.train.checkpoint import Checkpoints
from hpctrain.train.feed import Feed
from hpctrain.train.non_finite import Done, NonFiniteWatch, mean_of_finite
from hpctrain.train.recovery import Recovery
from hpctrain.train.trainer import Trainer, TrainingStep

# The first step also allocates and compiles.
_TRACED_STEP = 2
# Of broken images, in the event that tells of them.
_NAMES = 20


class Loop:
    """One run of a recipe on the ranks of a communicator.

    Args:
        recipe: what to train, worked out for a number of ranks.
        comm: the ranks; every one runs its own loop over the same samples.
        trainer: the model of this rank.
        train, test: all samples, the same on every rank.
        events: where the run is recorded.
        checkpoints: where its state is kept: after the last step of each epoch, at a stop, and as the recipe says.
        dumps: the folder for what a step whose numbers end the run leaves behind.
        asked: why this rank was asked to stop, or None.
        recovery: goes on without ranks that died; None ends the run with the first of them.
        begun_ranks: what the recipe's batch is for, where ranks were lost before; by default those that there are.

    Raises:
        HpctrainError: the batch is so large that an epoch has no step.
    """

    def __init__(
        self,
        recipe: Recipe,
        comm: Communicator,
        trainer: Trainer,
        train: Source,
        test: Source,
        events: EventWriter,
        *,
        checkpoints: Checkpoints,
        dumps: Path,
        asked: Callable[[], str | None] = lambda: None,
        recovery: Recovery | None = None,
        begun_ranks: int | None = None,
    ) -> None:
        self._recipe = recipe
        self._comm = comm
        self._trainer = trainer
        self._train = train
        self._test = test
        self._events = events
        self._checkpoints = checkpoints
        self._watch = NonFiniteWatch(recipe.numbers, comm, trainer, checkpoints, events, dumps)
        self._asked = asked
        self._recovery = recovery
        self._begun_ranks = begun_ranks or comm.size
        self._feed = Feed(recipe, comm, len(train))
        self._rate = learning_rate(recipe, len(train))
        self._iteration = 0
        self._saved = 0
        # A checkpoint was lost, and is made up for after the next step.
        self._due = False
        self._last: SavedProgress | None = None
        self._epoch = 0
        self._losses: list[float] = []
        self._sizes: list[int] = []
        # Samples of the epoch in work.
        self._seen = 0
        self._epoch_seconds = 0.0
        self._seconds = 0.0
        self._run_begin = self._epoch_begin = time.perf_counter()
        self._begun: TrainingStep | None = None
        # This rank's samples in it.
        self._own: Indices = np.empty(0, np.int64)
        self._data_seconds = 0.0
        # Broken images that an event has reported, on whatever rank they are.
        self._told: set[str] = set()

    @property
    def iteration(self) -> int:
        """The number of steps done."""
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
            RunEvent(
                recipe=self._recipe.name,
                framework=self._trainer.framework,
                backend=self._comm.backend,
                ranks=self._comm.size,
                hosts=tuple(sorted(set(self._comm.allgather_object(self._comm.host)))),
                epochs=self._recipe.epochs,
                iterations_per_epoch=self._rate.iterations_per_epoch,
                parameters=self._trainer.parameters,
            )
        )
        now = time.perf_counter()
        self._run_begin, self._epoch_begin = now - self._seconds, now - self._epoch_seconds
        stopped = self._train_through_faults()
        if stopped:
            self._events.emit(StoppedEvent(iteration=self._iteration, reason=stopped))
        else:
            self._events.emit(EndEvent(status="done", seconds=time.perf_counter() - self._run_begin))
        return stopped is None

    def _train_through_faults(self) -> str | None:
        recovered = False
        while True:
            try:
                if recovered:
                    self._look_for_checkpoints()
                    recovered = False
                stopped = self._train_epochs()
                self._trainer.guard.check_last()
                # No rank leaves as long as another may need it.
                self._checkpoints.wait()
                return stopped
            except Exception as error:
                if not (self._recovery and self._recovery.concerns(error)):
                    raise
                loss = self._recovery.go_on(self._iteration, self._losses[-1] if self._losses else 0.0, self._begun)
                if loss is not None:
                    self._note(loss)
                # Another death may come upon it.
                recovered = True

    def _look_for_checkpoints(self) -> None:
        """After ranks died: which of those that were begun are there."""
        self._due = self._checkpoints.abandon()
        self._saved = self._checkpoints.newest

    def _train_epochs(self) -> str | None:
        """Train the remaining epochs, from wherever the run was left; returns why it was stopped."""
        self._watch.apply_rule()
        while self._epoch < self._recipe.epochs:
            stopped = self._train_epoch()
            if self._steps_left == 0:
                # Ahead of the checkpoint: it is of the model whose accuracy is recorded. Again after a resume, which
                # changes no bits of what is equal on all ranks.
                self._trainer.average_statistics()
            if self._iteration > self._saved:
                self._save()
            if stopped:
                return stopped
            self._end_epoch()
        if self._due and self._last:
            # The run's result was lost, and no step has come since.
            self._write(self._last.model_copy(update={"ranks": self._comm.size}))
        return None

    def _train_epoch(self) -> str | None:
        """The steps that the epoch still lacks; returns why it was stopped."""
        batches = self._feed.batches(self._epoch, self._seen, self._batch_size)
        with contextlib.closing(self._train.stream(self._feed.pieces(batches), self._epoch)) as stream:
            for batch in batches:
                if self._comm.size < self._recipe.fault_tolerance.min_ranks and self._recovery:
                    return (
                        f"{self._comm.size} of {self._begun_ranks} ranks are left, fewer than "
                        f"fault_tolerance.min_ranks={self._recipe.fault_tolerance.min_ranks}"
                    )
                if self._step(batch, stream):
                    return self._asked() or "asked on another rank"
                self._checkpoints.record_written()
                if self._steps_left and self._is_due():
                    self._save()
        return None

    def _is_due(self) -> bool:
        """Whether a checkpoint is, within an epoch."""
        every = self._recipe.checkpoints.every_steps
        return self._due or bool(every and self._iteration % every == 0)

    def _end_epoch(self) -> None:
        test_loss, test_accuracy = self._evaluate()
        broken = set().union(*self._comm.allgather_object(self._train.broken | self._test.broken)) - self._told
        # From here on the epoch is done for every rank, or for none.
        self._comm.agree()
        self._epoch += 1
        if math.isfinite(test_accuracy):
            self._checkpoints.scored(self._iteration, test_accuracy)
        self._events.emit(
            EpochEvent(
                epoch=self._epoch,
                seconds=self._epoch_seconds,
                samples_per_s=self._seen / self._epoch_seconds,
                train_loss=mean_of_finite(self._losses, self._sizes),
                test_loss=test_loss,
                test_accuracy=test_accuracy,
            )
        )
        if broken:
            names = tuple(sorted(broken)[:_NAMES])
            self._events.emit(BrokenImagesEvent(epoch=self._epoch, count=len(broken), names=names))
            self._told |= broken
        self._losses, self._sizes, self._seen = [], [], 0
        self._epoch_begin = time.perf_counter()

    def _save(self) -> None:
        progress = SavedProgress(
            iteration=self._iteration,
            epoch=self._epoch + 1,
            ends_epoch=self._steps_left == 0,
            losses=tuple(self._losses),
            sizes=tuple(self._sizes),
            epoch_seconds=self._epoch_seconds,
            seconds=self._seconds,
            ranks=self._comm.size,
            samples=self._train.fingerprint,
            recent=self._watch.recent,
            skipped=self._watch.skipped,
        )
        self._write(progress)

    def _write(self, progress: SavedProgress) -> None:
        self._checkpoints.save(progress, self._trainer)
        self._saved, self._due, self._last = progress.iteration, False, progress

    def _restore(self, iteration: int) -> None:
        progress = self._checkpoints.restore(iteration, self._trainer)
        if progress.samples != self._train.fingerprint:
            data = self._recipe.data
            raise HpctrainError(
                f"the training samples of {data.path or data.name} are not those that the run began with, or not in "
                "that order",
                "put back what the recipe's data section names, or begin a run of its own",
            )
        self._iteration = self._saved = self._trainer.updates = progress.iteration
        self._epoch = progress.epoch - 1
        self._losses, self._sizes = list(progress.losses), list(progress.sizes)
        self._seen = sum(self._sizes)
        self._watch.resume(progress.recent, progress.skipped)
        self._epoch_seconds, self._seconds = progress.epoch_seconds, progress.seconds

    def _step(self, batch: Indices, stream: Iterator[Samples]) -> bool:
        """Train on one global batch and note its mean loss; returns whether any rank was asked to stop."""
        own = self._feed.share(batch)
        self._begun = TrainingStep(
            samples=len(batch),
            own=own.count,
            ranks=self._comm.size,
            learning_rate=self._learning_rate,
            begin=time.perf_counter(),
            order=zlib.crc32(batch.astype("<i8").tobytes()),
        )
        self._own = sample_of(own.indices[: own.count])
        count, scale = self._feed.count(batch), self._comm.size / len(batch)
        waited_for, rate = self._waited_for(stream, batch, own.count), self._begun.learning_rate
        own_loss = self._trainer.step(waited_for, count, scale, rate, self._sgd_share, self._average)
        loss, stop = self._comm.allreduce(np.array([own_loss, float(self._asked() is not None)]), "mean")
        self._note(float(loss))
        self._watch.apply_rule()
        return bool(stop > 0)

    def _waited_for(self, stream: Iterator[Samples], batch: Indices, own: int) -> Generator[Samples]:
        """The next parts of a stream, those of a batch, whose waiting time becomes this step's.

        What is after this rank's ``own`` samples is there for layers that talk to other ranks, and trained on once.
        """
        self._data_seconds = 0.0
        for part in self._feed.parts(batch):
            begin = time.perf_counter()
            samples = self._feed.completed(next(stream), part, self._epoch, self._seen)
            self._data_seconds += time.perf_counter() - begin
            yield samples if own > 0 else replace(samples, labels=np.full_like(samples.labels, BROKEN))
            own -= len(samples)

    def _note(self, loss: float) -> None:
        """Count and record the step that was begun."""
        step, self._begun = self._begun, None
        assert step is not None
        now = time.perf_counter()
        self._epoch_seconds, self._seconds = now - self._epoch_begin, now - self._run_begin
        self._iteration += 1
        self._losses.append(loss)
        self._sizes.append(step.samples)
        self._seen += step.samples
        self._events.emit(
            StepEvent(
                iteration=self._iteration,
                epoch=self._epoch + 1,
                loss=loss,
                learning_rate=step.learning_rate,
                samples=step.samples,
                first=self._seen - step.samples,
                order=step.order,
                seconds=now - step.begin,
                communication_seconds=self._trainer.communication_seconds,
                data_seconds=self._data_seconds,
            )
        )
        if self._iteration == _TRACED_STEP and self._trainer.timeline:
            self._events.emit(OverlapEvent(iteration=self._iteration, timeline=tuple(self._trainer.timeline)))
        self._watch.look(
            Done(
                iteration=self._iteration,
                epoch=self._epoch + 1,
                loss=loss,
                learning_rate=step.learning_rate,
                samples=self._own,
            )
        )

    @property
    def _batch_size(self) -> int:
        """The size of the next global batch: the recipe's, or with ``batch: shrink`` that of the remaining ranks."""
        size, tolerance = self._recipe.global_batch, self._recipe.fault_tolerance
        if tolerance.fault_tolerant and tolerance.batch == "shrink":
            return max(1, round(size * self._comm.size / self._begun_ranks))
        return size

    @property
    def _learning_rate(self) -> float:
        """The schedule's where the epoch is, scaled linearly with the batch where that was shrunk."""
        return self._rate(self._steps) * (self._batch_size / self._recipe.global_batch)

    @property
    def _sgd_share(self) -> float:
        transition = self._recipe.optimizer.transition
        return sgd_share(self._steps / self._rate.iterations_per_epoch, transition) if transition else 1.0

    @property
    def _average(self) -> float | None:
        """The weight of the parameters in their average after the next step."""
        recipe = self._recipe
        if recipe.averaging is None:
            return None
        return recipe.averaging.weight(
            epoch=self._epoch, step=len(self._sizes), batch=recipe.global_batch, epochs=recipe.epochs
        )

    @property
    def _steps(self) -> float:
        """How far the run is, in steps of the recipe's batch."""
        return self._epoch * self._rate.iterations_per_epoch + self._seen / self._recipe.global_batch

    @property
    def _steps_left(self) -> int:
        """The steps that the current epoch still lacks."""
        rest = self._feed.per_epoch - self._seen
        return batch_count(rest, self._batch_size, drop_last=self._recipe.batch.drop_last)

    def _evaluate(self) -> tuple[float, float]:
        """Mean loss and accuracy on the test set, of which every sample is seen by one rank."""
        own = np.array_split(np.arange(len(self._test)), self._comm.size)[self._comm.rank]
        size = self._recipe.batch.at_once(self._comm.size)
        sums = np.zeros(3)
        with contextlib.closing(self._test.stream(cut(own, size), self._epoch)) as stream:
            for samples in stream:
                loss_sum, correct = self._trainer.evaluate(samples)
                sums += np.array([loss_sum, correct, np.count_nonzero(samples.labels == BROKEN)])
        loss_sum, correct, broken = self._comm.allreduce(sums, "sum")
        seen = len(self._test) - broken
        return float(loss_sum / seen), float(correct / seen)
