"""Handles of collectives, with the worker that runs them and nothing to move."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hpctrain.common.errors import HpctrainError  # noqa: E402
from hpctrain.worker.comm.process_group.work import CollectiveWork  # noqa: E402
from hpctrain.worker.comm.shared.worker import Worker  # noqa: E402


@pytest.fixture(params=[False, True])
def worker(request):
    worker = Worker(beside=request.param, closed=lambda: HpctrainError("HT-of-test", "closed"))
    yield worker
    worker.close()


def task(worker, body=lambda _: None, *, small=False):
    collectives = SimpleNamespace(begin=lambda what, pause: None)
    return CollectiveWork(worker, collectives, "test", body, [torch.ones(1)], small=small)


@pytest.mark.parametrize("small", [False, True])
def test_a_callback_of_a_collective_that_is_under_way_may_not_call_another(worker, small):
    attached = threading.Event()
    first, second, last = task(worker, lambda _: attached.wait(10)), task(worker, small=small), task(worker)

    def call(_):
        worker.submit(second)
        second.wait()

    worker.submit(first)
    chained = first.get_future().then(call)
    attached.set()
    first.wait()
    with pytest.raises(RuntimeError, match="HT-group-call-in-callback"):
        chained.wait()
    # The group goes on.
    worker.submit(last)
    last.wait()


def test_a_future_that_is_asked_for_as_the_collective_ends_is_settled_once(worker):
    ended = task(worker)

    class AsksAtTheEnd:
        """The lock of an ending task, after which another thread comes at once."""

        left = 0

        def __enter__(self):
            return None

        def __exit__(self, *_):
            self.left += 1
            if self.left == 1:
                ended.get_future()

    ended._ending = AsksAtTheEnd()
    worker.submit(ended)
    ended.wait()
    assert ended.get_future().wait() == ended.result()
