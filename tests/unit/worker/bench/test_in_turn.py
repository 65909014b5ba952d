"""Measuring in turn: what is called when, and whose times are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.refusals import refused

pytest.importorskip("torch")
pytest.importorskip("mpi4py.MPI", reason="needs an MPI library", exc_type=(ImportError, RuntimeError))

import torch
from mpi4py import MPI

from hpctrain.worker.bench.allreduce import TimedReduction, by_mpi, check
from hpctrain.worker.bench.in_turn import TimedGroup, time_in_turn


def test_groups_never_run_beside_each_other_and_each_alternative_comes_first():
    log: list[str] = []

    @contextmanager
    def running() -> Iterator[None]:
        log.append("start")
        yield
        log.append("stop")

    groups = [
        TimedGroup(calls={name: lambda name=name: log.append(name) for name in "ab"}),
        TimedGroup(calls={"c": lambda: log.append("c")}, running=running),
    ]
    seconds = time_in_turn(MPI.COMM_SELF, groups, rounds=7)
    assert {name: len(times) for name, times in seconds.items()} == {"a": 7, "b": 7, "c": 7}
    assert all(time > 0 for times in seconds.values() for time in times)
    # two blocks, of five rounds and of two, each after two calls that are not timed
    assert Counter(log) == {"a": 11, "b": 11, "c": 11, "start": 2, "stop": 2}
    text = "".join(word if len(word) == 1 else f" {word} " for word in log)
    assert text.split() == [*("aabbabbaabbaab", "start", "ccccccc", "stop"), *("start", "cccc", "stop", "aabbbaab")]


def test_a_wrong_mean_is_refused():
    reduction = by_mpi(MPI.COMM_SELF)(1000)
    check("MPI_Allreduce", reduction, MPI.COMM_SELF)
    off = TimedReduction(buffer=reduction.buffer, call=lambda: reduction.buffer[-1].add_(1))
    with refused("HT-reduction-wrong-result", name="broken", bytes=4000):
        check("broken", off, MPI.COMM_SELF)
    assert reduction.buffer.dtype == torch.float32
