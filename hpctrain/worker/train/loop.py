"""The training loop, the same for either framework: batches, schedule, evaluation, events."""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hpctrain.common.checkpoints.manifest import SavedProgress
from hpctrain.common.errors import HpctrainError
from hpctrain.common.optim.learning_rate import learning_rate, sgd_share
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import EndEvent, EpochEvent, StepEvent, StoppedEvent
from hpctrain.worker.adapters.data_ranks import data_place
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.rank_run import run
from hpctrain.worker.data.mixing import MixedSamples
from hpctrain.worker.data.samples import NO_LABEL, Samples, SampleSource
from hpctrain.worker.data.sampling import Indices, batch_count
from hpctrain.worker.energy_meter import RunEnergy
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.feed import Feed, SamplesAhead, evaluate
from hpctrain.worker.train.local_steps import LocalSteps
from hpctrain.worker.train.non_finite import NonFiniteWatch, mean_of_finite
from hpctrain.worker.train.recovery import Recovery
from hpctrain.worker.train.trainer import Trainer, TrainingStep, run_event


class Loop:
    """One run of a recipe on the ranks of a communicator.

    Args:
        recipe: with the batch worked out for a number of ranks.
        comm: the ranks, each of which runs its own loop over the same samples.
        train, test: all samples, the same on every rank.
        checkpoints: where the state is saved: after the last step of each epoch, at a stop, and as the recipe says.
        asked: gives the reason why this rank was asked to stop, or None.
        recovery: continues without ranks that died; None ends the run when one dies.
        energy: the meters of the hosts; by default new ones.

    Raises:
        HpctrainError: the batch is so large that an epoch has no step.
    """

    def __init__(
        self,
        recipe: Recipe,
        comm: Communicator,
        trainer: Trainer,
        train: SampleSource,
        test: SampleSource,
        events: EventWriter,
        *,
        checkpoints: Checkpoints,
        asked: Callable[[], str | None] = lambda: None,
        recovery: Recovery | None = None,
        energy: RunEnergy | None = None,
    ) -> None:
        self._recipe = recipe
        self._comm = comm
        self._trainer = trainer
        self._train = train
        self._test = test
        self._events = events
        self._checkpoints = checkpoints
        self._watch = NonFiniteWatch(recipe.numbers, comm, trainer, checkpoints, events)
        self._asked = asked
        self._recovery = recovery
        self._energy = energy or RunEnergy(comm, events)
        self._feed = Feed(recipe, comm, len(train))
        self._rate = learning_rate(recipe, len(train))
        self._local = LocalSteps(recipe, comm, trainer)
        self._iteration = 0
        self._saved = 0
        # A checkpoint is to be written after the next step: one was lost with a rank, or rank 0's clock says so.
        self._due = False
        self._last: SavedProgress | None = None
        self._epoch = 0
        self._losses: list[float] = []
        self._sizes: list[int] = []
        # How many samples of the current epoch are done.
        self._seen = 0
        self._epoch_seconds = 0.0
        self._seconds = 0.0
        self._run_begin = self._epoch_begin = time.perf_counter()
        self._begun: TrainingStep | None = None
        self._read_before = 0.0  # seconds of waiting for samples before the step

    @property
    def iteration(self) -> int:
        """The number of steps done."""
        return self._iteration

    def run(self, resume_from: int = 0) -> bool:
        """Train for the recipe's epochs, evaluating after each.

        Args:
            resume_from: the iteration of the checkpoint to continue from; 0 to begin.

        Returns:
            Whether the run is done; otherwise it was stopped, and a checkpoint contains its last step.
        """
        if resume_from:
            self._restore(resume_from)
        self._run_event = run_event(self._recipe, self._comm, self._trainer, self._rate.iterations_per_epoch)
        self._events.emit(self._run_event)
        self._energy.begin()
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
                    # Which of the checkpoints that were begun are complete?
                    self._due = self._checkpoints.abandon()
                    self._saved = self._checkpoints.newest
                    recovered = False
                stopped = self._train_epochs()
                self._energy.record(self._iteration)
                self._trainer.guard.check_last()
                # Collective, so that no rank leaves while another may still need it.
                self._checkpoints.wait()
                return stopped
            except Exception as error:
                if not (self._recovery and self._recovery.caused_by_lost_rank(error)):
                    raise
                loss = self._recovery.continue_run(
                    self._iteration, self._losses[-1] if self._losses else 0.0, self._begun
                )
                if loss is not None:
                    self._record_step(loss)
                # Handled inside the try block, because another rank may die meanwhile.
                recovered = True

    def _train_epochs(self) -> str | None:
        """Train the remaining epochs and steps; returns why the run was stopped."""
        self._watch.apply_rule()
        while self._epoch < self._recipe.epochs:
            stopped = self._train_epoch()
            if self._steps_left == 0:
                # Before the checkpoint, which has to hold the model whose accuracy is recorded. A resume does it again,
                # which changes no bit of statistics that are equal on all ranks.
                self._trainer.average_statistics()
            if self._iteration > self._saved:
                self._save()
            if stopped:
                return stopped
            self._end_epoch()
        if self._due and self._last:
            # The final checkpoint was lost, and no step has come since.
            self._write(self._last.model_copy(update={"ranks": self._comm.size}))
        return None

    def _train_epoch(self) -> str | None:
        """Train the remaining steps of the epoch; returns why the run was stopped."""
        batches = self._feed.batches(self._epoch, self._seen, self._recipe.global_batch)
        with contextlib.closing(self._train.stream(self._feed.pieces(batches), self._epoch)) as stream:
            ahead = SamplesAhead(stream, self._trainer.place)
            self._trainer.meanwhile = ahead.fetch
            for batch in batches:
                if self._comm.size < self._recipe.fault_tolerance.min_ranks and self._recovery:
                    least = self._recipe.fault_tolerance.min_ranks
                    return f"ranks died, and {self._comm.size} are fewer than fault_tolerance.min_ranks={least}"
                if self._step(batch, ahead):
                    return self._asked() or "asked on another rank"
                self._checkpoints.record_written()
                every = self._recipe.checkpoints.every_steps
                due = self._due or (isinstance(every, int) and self._iteration // every > self._saved // every)
                if due and self._steps_left and self._local.synchronised:
                    self._save()
        return None

    def _end_epoch(self) -> None:
        size = self._recipe.batch.at_once(data_place(self._comm).ranks)
        test_loss, test_accuracy = evaluate(self._trainer, self._comm, self._test, size, self._epoch)
        # Agreed, so that the epoch is done for all ranks or for none.
        self._comm.agree()
        self._epoch += 1
        if math.isfinite(test_accuracy):
            self._checkpoints.scored(self._iteration, test_accuracy)
        speed = self._seen / self._epoch_seconds
        event = EpochEvent(
            epoch=self._epoch,
            seconds=self._epoch_seconds,
            samples_per_s=speed,
            train_loss=mean_of_finite(self._losses, self._sizes),
            test_loss=test_loss,
            test_accuracy=test_accuracy,
        )
        self._events.emit(event.model_copy(update=self._run_event.speeds(speed)))
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
            skipped=self._watch.skipped,
        )
        self._write(progress)
        self._energy.record(self._iteration)

    def _write(self, progress: SavedProgress) -> None:
        self._checkpoints.save(progress, self._trainer)
        self._saved, self._due, self._last = progress.iteration, False, progress

    def _restore(self, iteration: int) -> None:
        progress = self._checkpoints.restore(iteration, self._trainer)
        if progress.samples != self._train.fingerprint:
            data = self._recipe.data
            raise HpctrainError(
                "HT-data-other-samples",
                "the training samples of {path} are not those that the run began with, or not in that order",
                "restore the data that the recipe's data section names, or begin a new run",
                path=data.path or data.name,
            )
        self._iteration = self._saved = self._trainer.updates = progress.iteration
        self._epoch = progress.epoch - 1
        self._losses, self._sizes = list(progress.losses), list(progress.sizes)
        self._seen = sum(self._sizes)
        self._watch.skipped = progress.skipped
        self._epoch_seconds, self._seconds = progress.epoch_seconds, progress.seconds

    def _step(self, batch: Indices, stream: Iterator[Samples]) -> bool:
        """Train on one global batch and record its mean loss; returns whether any rank was asked to stop.

        In a local step this rank's own loss is recorded, and no rank stops.
        """
        own = self._feed.share(batch)
        self._begun = TrainingStep(
            samples=len(batch),
            own=own.count,
            ranks=self._comm.size,
            learning_rate=self._rate(self._steps),
            begin=time.perf_counter(),
            order=zlib.crc32(batch.astype("<i8").tobytes()),
        )
        count, scale = self._feed.count(batch), data_place(self._comm).ranks / len(batch)
        self._read_before = run.times.samples
        parts, rate = self._completed(stream, self._feed.parts(batch), own.count), self._begun.learning_rate
        self._local.begin(self._steps / self._rate.iterations_per_epoch)
        self._trainer.average_weight = self._average
        own_loss = self._trainer.step(parts, count, scale, rate, self._sgd_share)
        if not self._local.end(own_loss, last=self._steps_left == 1):
            self._record_step(own_loss)
            return False
        losses, (stop, due, fault, save) = self._local.average(
            [self._asked() is not None, self._energy.due, self._watch.found, self._checkpoints.due]
        )
        self._record_step(losses[-1])
        self._losses[-len(losses) :] = losses
        self._watch.apply_rule(elsewhere=fault > 0)
        if due > 0:
            self._energy.record(self._iteration)
        self._due = self._due or save > 0
        return bool(stop > 0)

    def _completed(self, stream: Iterator[Samples], parts: Sequence[MixedSamples], own: int) -> Iterator[Samples]:
        """The next parts of a stream with their random choices.

        Samples after this rank's ``own`` lose their labels: they are there only for layers that communicate.
        """
        for part in parts:
            samples = self._feed.completed(next(stream), part, self._epoch, self._seen)
            yield samples if own > 0 else replace(samples, labels=np.full_like(samples.labels, NO_LABEL))
            own -= len(samples)

    def _record_step(self, loss: float) -> None:
        """Count and record the step that was begun, with its loss."""
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
                data_seconds=run.times.samples - self._read_before,
            )
        )
        self._watch.check(self._iteration, self._epoch + 1, loss)

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
        """How far the run is, counted in steps."""
        return self._epoch * self._rate.iterations_per_epoch + self._seen / self._recipe.global_batch

    @property
    def _steps_left(self) -> int:
        """How many steps of the current epoch remain."""
        rest = self._feed.per_epoch - self._seen
        return batch_count(rest, self._recipe.global_batch, drop_last=self._recipe.batch.drop_last)
