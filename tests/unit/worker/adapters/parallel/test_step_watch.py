"""A pipeline's watch on one rank; stand-ins for CUDA's events say when actions have begun."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from hpctrain.worker.adapters.torch.parallel.step_watch import Action, StepWatch
from hpctrain.worker.comm.single import SingleCommunicator

SECONDS = 30


@pytest.fixture
def port() -> Iterator[int]:
    """That of the store of a default group of one rank."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    port = store.port
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    del store
    yield port
    if dist.is_initialized():
        dist.destroy_process_group()


def watch_and_thread() -> tuple[StepWatch, threading.Thread]:
    before = set(threading.enumerate())
    watch = StepWatch(SingleCommunicator("one rank"), [0], lambda stage: 0, on_gpu=False)
    [thread] = set(threading.enumerate()) - before
    return watch, thread


@pytest.fixture
def watch(port: int) -> StepWatch:
    return watch_and_thread()[0]


class Begun:
    """The event of an action that has begun, if ``begun``; CUDA's answer takes a while."""

    def __init__(self, begun: bool) -> None:
        self.begun = begun

    def query(self) -> bool:
        time.sleep(0.2)
        return self.begun


class Failing:
    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)

    def query(self) -> bool:
        self.asked.release()
        raise IndexError


def actions(*events: Any) -> deque[Any]:
    return deque((Action(stage=0, what=str(number)), event) for number, event in enumerate(events))


def test_two_threads_agree_on_the_action(watch):
    together = threading.Barrier(2)

    def current() -> Action | None:
        together.wait(SECONDS)
        return watch._current()

    watch._actions = actions(Begun(True), Begun(True), Begun(False))
    with ThreadPoolExecutor(2) as pool:
        found = [each.result() for each in [pool.submit(current) for _ in range(2)]]
    assert [each.what for each in found] == ["1", "1"]


def test_an_error_leaves_later_steps_watched(watch):
    failing = Failing()
    watch._actions = actions(None, failing)
    assert all(failing.asked.acquire(timeout=SECONDS) for _ in range(3))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, RuntimeError])
def test_after_an_error_that_a_script_catches_a_rank_waits_for_nobody(watch, error):
    with pytest.raises(error), watch.step(0):
        assert watch._current().what
        raise error
    assert watch._current() is None


def test_the_store_ends_with_the_group_while_a_pipeline_lives(port):
    watch, thread = watch_and_thread()
    watch._actions = actions(None)
    deadline = time.monotonic() + SECONDS
    while watch._announced is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert watch._announced.what == "0"
    socket.create_connection(("127.0.0.1", port), SECONDS).close()
    dist.destroy_process_group()
    thread.join(SECONDS)
    assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), SECONDS)


def test_the_thread_ends_with_its_pipeline(port):
    watch, thread = watch_and_thread()
    del watch
    thread.join(SECONDS)
    assert not thread.is_alive()
