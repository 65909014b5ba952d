"""Training whose ranks wait for nobody: each takes the next step that nobody has, and exchanges with a server."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.common.run.events.kinds import StepEvent
from hpctrain.worker.comm.parameter_server import ParameterServer
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.data.sampling import Indices, sample_of
from hpctrain.worker.train.exchange import Rule, rule_of
from hpctrain.worker.train.loop import Loop
from hpctrain.worker.train.non_finite import Done


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one rank computes in one step: a part of a global batch.

    Attributes:
        number: of the step in the epoch.
        batch, place: which of the epoch's remaining batches, and which of its parts.
        indices: of the whole batch.
        first: samples of the epoch in front of the batch.
    """

    number: int
    batch: int
    place: int
    indices: Indices
    first: int


@dataclass(kw_only=True)
class _Told:
    """What rank 0 has recorded of an epoch, and what it has done since.

    Attributes:
        samples: of all ranks' steps, up to where the last event was.
        time: of it, as of ``time.perf_counter``.
        data_seconds, communication_seconds, bytes: of this rank since then.
    """

    samples: int
    time: float
    data_seconds: float = 0.0
    communication_seconds: float = 0.0
    bytes: int = 0


class AsynchronousLoop(Loop):
    """A run with ``sync: async``. The ranks are together before the first step of an epoch and after its last.

    An epoch has the samples and batches that it has in a synchronous run, and each batch as many parts as there are
    ranks. Who computes a part, and with which parameters, depends on who is free: the numbers of two runs differ, but
    on a single rank. A rank's learning rate is that of the batch that its part is of. At the end of an epoch all ranks
    take the server's parameters, with which the model is evaluated and saved.
    """

    @cached_property
    def _server(self) -> ParameterServer:
        return self._comm.parameter_server(len(self._trainer.vector()))

    def _train_epoch(self) -> str | None:
        stopped = None
        # More than once where a rank closed it after a step that was not finite.
        while self._steps_left and stopped is None:
            stopped = self._train_apart()
        return stopped

    def _train_apart(self) -> str | None:
        """Take the steps that the epoch still lacks, until a rank closes it; returns why the run is to stop."""
        assert self._recipe.sync is not None
        begun, ranks = self._trainer.vector(), self._comm.size
        # By all ranks: some may have no step in this epoch.
        self._trainer.before_update()
        self._server.begin(begun, staleness=self._recipe.sync.staleness * ranks)
        self._trainer.alone = self._trainer.guard.apart = True
        rule = rule_of(self._recipe.sync, self._server, begun, ranks)
        parts = self._parts()
        losses, asked = self._take_steps(parts, rule)
        self._server.end()
        return self._meet(parts, losses, asked)

    def _parts(self) -> list[_Part]:
        """The parts of the epoch's remaining batches, without those that have no sample."""
        batches = self._feed.batches(self._epoch, self._seen, self._batch_size)
        firsts = itertools.accumulate(map(len, batches), initial=self._seen)
        places = [
            (number, place, batch, first)
            for number, (batch, first) in enumerate(zip(batches, firsts, strict=False))
            for place in range(min(self._comm.size, len(batch)))
        ]
        return [
            _Part(number=number, batch=batch, place=place, indices=indices, first=first)
            for number, (batch, place, indices, first) in enumerate(places)
        ]

    def _take_steps(self, parts: Sequence[_Part], rule: Rule) -> tuple[dict[int, float], str | None]:
        """Compute steps until there are no more.

        Returns:
            The loss of each by its number, and why this rank was asked to stop.
        """
        assert self._recipe.sync is not None
        losses: dict[int, float] = {}
        taken: deque[_Part] = deque()
        told = _Told(samples=self._seen, time=time.perf_counter())
        before, asked, closed = self._iteration, None, False
        with contextlib.closing(self._train.stream(self._pieces(parts, taken), self._epoch)) as stream:
            for samples in stream:
                part = taken.popleft()
                self._server.begin_step(part.number)
                self._seen, self._iteration = part.first, before + part.batch
                losses[part.number] = self._compute(part, itertools.chain([samples], stream))
                told.data_seconds += self._data_seconds
                if len(losses) % self._recipe.sync.every == 0:
                    self._exchange(rule, told)
                self._iteration += 1
                told = self._tell(part, losses[part.number], told)
                self._checkpoints.record_written()
                asked = asked or self._asked()
                if (asked or self._watch.found) and not closed:
                    closed = True
                    self._server.close()
        self._iteration = before
        if len(losses) % self._recipe.sync.every:
            self._exchange(rule, told)
        return losses, asked

    def _pieces(self, parts: Sequence[_Part], taken: deque[_Part]) -> Iterator[Indices]:
        """What to load for the steps that this rank takes, whenever the loading gets to it."""
        while (number := self._server.take_step()) is not None and number < len(parts):
            taken.append(parts[number])
            for piece in self._feed.parts(parts[number].indices, parts[number].place):
                yield parts[number].indices[piece.positions]

    def _compute(self, part: _Part, stream: Iterator[Samples]) -> float:
        own = self._feed.share(part.indices, part.place)
        self._own = sample_of(own.indices[: own.count])
        pieces = self._feed.parts(part.indices, part.place)
        scale = self._comm.size / len(part.indices)
        rate = self._learning_rate
        samples = self._waited_for(stream, pieces, own.count)
        loss = self._trainer.step(samples, self._feed.count(part.indices), scale, rate, self._sgd_share, None)
        self._watch.look(
            Done(
                iteration=self._iteration + 1,
                epoch=self._epoch + 1,
                loss=loss,
                learning_rate=rate,
                samples=self._own,
            )
        )
        return loss

    def _exchange(self, rule: Rule, told: _Told) -> None:
        begin = time.perf_counter()
        self._trainer.set_vector(rule.exchange(self._trainer.vector()))
        told.communication_seconds += time.perf_counter() - begin
        told.bytes += rule.bytes

    def _tell(self, part: _Part, loss: float, told: _Told) -> _Told:
        """Record how far the ranks are, with this rank's own loss; once for each batch that it has a part of."""
        now, reached = time.perf_counter(), part.first + len(part.indices)
        if reached <= told.samples:
            return told
        self._events.emit(
            StepEvent(
                iteration=self._iteration,
                epoch=self._epoch + 1,
                loss=loss,
                learning_rate=self._learning_rate,
                samples=reached - told.samples,
                first=told.samples,
                seconds=now - told.time,
                communication_seconds=told.communication_seconds,
                data_seconds=told.data_seconds,
                communication_bytes=told.bytes,
            )
        )
        return _Told(samples=reached, time=now)

    def _meet(self, parts: Sequence[_Part], losses: dict[int, float], asked: str | None) -> str | None:
        """Wait until all ranks are through, and take the server's parameters; returns why any was asked to stop."""
        everyone = self._comm.allgather_object((losses, asked, self._watch.found))
        self._trainer.set_vector(self._server.read())
        self._count(parts, {number: loss for done, *_ in everyone for number, loss in done.items()})
        self._trainer.guard.steps = self._iteration
        self._trainer.guard.averaged()
        self._watch.apply_rule(elsewhere=any(found for *_, found in everyone))
        return next((reason for _, reason, _ in everyone if reason), None)

    def _count(self, parts: Sequence[_Part], losses: dict[int, float]) -> None:
        """Count what all ranks have done: the first so many parts, for steps are given out in order."""
        sums: dict[int, list[float]] = {}
        for part in parts[: len(losses)]:
            count = self._feed.share(part.indices, part.place).count
            total = sums.setdefault(part.batch, [0.0, 0])
            # The trainer's loss is a mean over the ranks' parts.
            total[0] += losses[part.number] * len(part.indices) / self._comm.size
            total[1] += count
        self._losses += [total / count for total, count in sums.values()]
        self._sizes += [int(count) for _, count in sums.values()]
        self._seen = sum(self._sizes)
        self._iteration += len(sums)
        now = time.perf_counter()
        self._epoch_seconds, self._seconds = now - self._epoch_begin, now - self._run_begin
