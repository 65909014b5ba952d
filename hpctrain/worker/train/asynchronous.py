"""Asynchronous training: each rank takes the next step that no other has taken, and exchanges with a server."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.recipes.sync import Sync
from hpctrain.common.run.events.kinds import StepEvent
from hpctrain.worker.comm.parameter_server import ParameterServer
from hpctrain.worker.comm.rank_run import run
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.data.sampling import Indices
from hpctrain.worker.train.feed import SamplesAhead
from hpctrain.worker.train.loop import Loop

Vector = NDArray[np.float32]


class Downpour:
    """The server adds what a rank's steps changed (Dean et al. 2012, Large Scale Distributed Deep Networks, 4.1).

    The paper sends gradients, with which the server makes plain updates; with SGD that is the same. The learning rate
    is meant for the recipe's batch, of which a rank's is one part in ``ranks``, so its change counts ``1 / ranks``: if
    all ranks exchange at the same time, the result is the mean of their parameters.

    Args:
        begun: the parameters that both the server and the rank have.
    """

    def __init__(self, server: ParameterServer, begun: Vector, ranks: int) -> None:
        self._server = server
        self._got = begun
        self._share = np.float32(1 / ranks)

    def exchange(self, own: Vector) -> Vector:
        """Exchange a rank's parameters ``own`` with the server; returns those with which it continues."""
        change = (own - self._got) * self._share
        self._got = self._server.add(change) + change
        return self._got


class Elastic:
    """Rank and server move towards each other (Zhang, Choromanska and LeCun 2015, arXiv 1412.6651, algorithm 1).

    Args:
        rate: alpha, the part of the distance that each moves: the paper's beta / ranks.
    """

    def __init__(self, server: ParameterServer, rate: float) -> None:
        self._server = server
        self._rate = np.float32(rate)

    def exchange(self, own: Vector) -> Vector:
        move = (own - self._server.read()) * self._rate
        self._server.push(move)
        return own - move


def rule_of(sync: Sync, server: ParameterServer, begun: Vector, ranks: int) -> Downpour | Elastic:
    """The recipe's rule."""
    if sync.rule == "easgd":
        return Elastic(server, sync.moving_rate / ranks)
    return Downpour(server, begun, ranks)


@dataclass(frozen=True, kw_only=True)
class _BatchPart:
    """One rank's part of a global batch, which it computes in one step.

    Attributes:
        number: counts the steps of the epoch, from 0.
        batch, place: which of the epoch's remaining batches it belongs to, and which part of that it is.
        indices: the samples of the whole batch.
        first: how many samples of the epoch come before the batch.
    """

    number: int
    batch: int
    place: int
    indices: Indices
    first: int


@dataclass(kw_only=True)
class _Recorded:
    """How far rank 0 has recorded an epoch, and what it has done since its last event.

    Attributes:
        samples: all ranks' samples up to the last event.
        time: when that was emitted, by ``time.perf_counter``.
        data_seconds, communication_seconds: what this rank has spent since then.
    """

    samples: int
    time: float
    data_seconds: float = 0.0
    communication_seconds: float = 0.0


class AsynchronousLoop(Loop):
    """A run with ``sync.mode: async``. The ranks meet before the first step of an epoch and after its last.

    An epoch has the same samples and batches as in a synchronous run, and each batch as many parts as there are ranks.
    Which rank computes a part, and with which parameters, depends on which is free: two runs give different numbers,
    except on a single rank. A part is trained with its batch's learning rate. At the end of an epoch all ranks take the
    server's parameters, with which the model is evaluated and saved.
    """

    @cached_property
    def _server(self) -> ParameterServer:
        return self._comm.parameter_server(len(self._trainer.vector()))

    def _train_epoch(self) -> str | None:
        stopped = None
        # Several times where a rank closed the epoch early, because a step was not finite.
        while self._steps_left and stopped is None:
            stopped = self._train_apart()
        return stopped

    def _train_apart(self) -> str | None:
        """Take the steps that the epoch still lacks, until a rank closes it; returns why the run is to stop."""
        assert self._recipe.sync is not None
        begun, ranks = self._trainer.vector(), self._comm.size
        # Every rank calls it, also one that gets no step in this epoch.
        self._trainer.before_update()
        self._server.begin(begun, staleness=self._recipe.sync.staleness * ranks)
        self._trainer.alone = self._trainer.guard.apart = True
        rule = rule_of(self._recipe.sync, self._server, begun, ranks)
        parts = self._parts()
        losses, asked = self._take_steps(parts, rule)
        self._server.end()
        return self._gather_epoch(parts, losses, asked)

    def _parts(self) -> list[_BatchPart]:
        """The parts of the epoch's remaining batches, without those that have no sample."""
        parts: list[_BatchPart] = []
        first = self._seen
        for number, indices in enumerate(self._feed.batches(self._epoch, self._seen, self._recipe.global_batch)):
            for place in range(min(self._comm.size, len(indices))):
                parts.append(_BatchPart(number=len(parts), batch=number, place=place, indices=indices, first=first))
            first += len(indices)
        return parts

    def _take_steps(self, parts: Sequence[_BatchPart], rule: Downpour | Elastic) -> tuple[dict[int, float], str | None]:
        """Compute steps until none is left.

        Returns:
            The losses by step number, and why this rank was asked to stop.
        """
        assert self._recipe.sync is not None
        losses: dict[int, float] = {}
        taken: deque[_BatchPart] = deque()
        recorded = _Recorded(samples=self._seen, time=time.perf_counter())
        before, asked, closed = self._iteration, None, False
        with contextlib.closing(self._train.stream(self._pieces(parts, taken), self._epoch)) as stream:
            for samples in stream:
                part = taken.popleft()
                self._server.begin_step(part.number)
                self._seen, self._iteration = part.first, before + part.batch
                read_before = run.times.samples
                own = SamplesAhead(itertools.chain([samples], stream), lambda samples: samples)
                losses[part.number] = self._compute(part, own)
                recorded.data_seconds += run.times.samples - read_before
                if len(losses) % self._recipe.sync.every == 0:
                    self._exchange(rule, recorded)
                self._iteration += 1
                recorded = self._record_progress(part, losses[part.number], recorded)
                self._checkpoints.record_written()
                asked = asked or self._asked()
                if (asked or self._watch.found) and not closed:
                    closed = True
                    self._server.close()
        self._iteration = before
        if len(losses) % self._recipe.sync.every:
            self._exchange(rule, recorded)
        return losses, asked

    def _pieces(self, parts: Sequence[_BatchPart], taken: deque[_BatchPart]) -> Iterator[Indices]:
        """The samples to load; takes the next step whenever the loader asks for more."""
        while (number := self._server.take_step()) is not None and number < len(parts):
            taken.append(parts[number])
            for piece in self._feed.parts(parts[number].indices, parts[number].place):
                yield parts[number].indices[piece.positions]

    def _compute(self, part: _BatchPart, stream: Iterator[Samples]) -> float:
        own = self._feed.share(part.indices, part.place)
        pieces = self._feed.parts(part.indices, part.place)
        scale = self._comm.size / len(part.indices)
        rate = self._rate(self._steps)
        samples = self._completed(stream, pieces, own.count)
        loss = self._trainer.step(samples, self._feed.count(part.indices), scale, rate, self._sgd_share)
        self._watch.check(self._iteration + 1, self._epoch + 1, loss)
        return loss

    def _exchange(self, rule: Downpour | Elastic, recorded: _Recorded) -> None:
        begin = time.perf_counter()
        self._trainer.set_vector(rule.exchange(self._trainer.vector()))
        recorded.communication_seconds += time.perf_counter() - begin

    def _record_progress(self, part: _BatchPart, loss: float, recorded: _Recorded) -> _Recorded:
        """Record how far the ranks are, with this rank's own loss; once for each batch of which it computes a part."""
        now, reached = time.perf_counter(), part.first + len(part.indices)
        if reached <= recorded.samples:
            return recorded
        self._events.emit(
            StepEvent(
                iteration=self._iteration,
                epoch=self._epoch + 1,
                loss=loss,
                learning_rate=self._rate(self._steps),
                samples=reached - recorded.samples,
                first=recorded.samples,
                seconds=now - recorded.time,
                communication_seconds=recorded.communication_seconds,
                data_seconds=recorded.data_seconds,
            )
        )
        return _Recorded(samples=reached, time=now)

    def _gather_epoch(self, parts: Sequence[_BatchPart], losses: dict[int, float], asked: str | None) -> str | None:
        """Wait for all ranks and take the server's parameters; returns why any of them was asked to stop."""
        everyone = self._comm.allgather_object((losses, asked, self._watch.found))
        self._trainer.set_vector(self._server.read())
        self._count(parts, {number: loss for done, *_ in everyone for number, loss in done.items()})
        self._trainer.guard.steps = self._iteration
        self._trainer.guard.averaged()
        self._watch.apply_rule(elsewhere=any(found for *_, found in everyone))
        return next((reason for _, reason, _ in everyone if reason), None)

    def _count(self, parts: Sequence[_BatchPart], losses: dict[int, float]) -> None:
        """Count what all ranks have done. Steps are given out in order, so it is the first ``len(losses)`` parts."""
        sums: dict[int, list[float]] = {}
        for part in parts[: len(losses)]:
            count = self._feed.share(part.indices, part.place).count
            total = sums.setdefault(part.batch, [0.0, 0])
            # The trainer scales its loss so that the mean over the ranks is the batch's.
            total[0] += losses[part.number] * len(part.indices) / self._comm.size
            total[1] += count
        self._losses += [total / count for total, count in sums.values()]
        self._sizes += [int(count) for _, count in sums.values()]
        self._seen = sum(self._sizes)
        self._iteration += len(sums)
        now = time.perf_counter()
        self._epoch_seconds, self._seconds = now - self._epoch_begin, now - self._run_begin
