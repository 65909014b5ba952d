"""Waits end in time, and are known while they last."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from hpctrain.common.settings import stall_seconds
from hpctrain.worker.comm.timeout import Timeout
from support.refusals import refused


@pytest.fixture
def timeout(monkeypatch) -> Timeout:
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.05")
    return Timeout("rank 1 on here")


def test_a_wait_ends_when_it_is_done_and_is_known_until_then(timeout):
    seen = []

    def done() -> bool:
        seen.append(timeout.oldest())
        return seen[-1] is not None

    timeout.wait(done, "bucket 3")
    assert seen[0] is None, "short waits cost nothing"
    assert seen[-1].what == "bucket 3" and not seen[-1].blocked
    assert timeout.oldest() is None


@pytest.mark.parametrize(("awaited", "whom"), [([], "the other ranks"), (["rank 2 on there"], "rank 2 on there")])
def test_a_timeout_names_whom_it_waited_for(timeout, awaited, whom):
    timeout.watch = SimpleNamespace(awaited=awaited)
    values = {"who": "rank 1 on here", "seconds": 0.05, "what": "bucket 3", "ranks": whom}
    with refused("HT-wait-timed-out", **values) as failure:
        timeout.wait(lambda: False, "bucket 3")
    assert failure.value.exit_code == 4
    assert timeout.oldest() is None


def test_a_dead_rank_ends_a_wait_at_once(monkeypatch):
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "60")
    deaths = iter([None, None, ValueError("rank 2 died")])

    def check() -> None:
        if death := next(deaths):
            raise death

    waiting = Timeout("rank 1 on here")
    waiting.survival = SimpleNamespace(check=check, explain=lambda error: None)
    with pytest.raises(ValueError):
        waiting.wait(lambda: False, "bucket 3")
    assert waiting.oldest() is None


@pytest.mark.parametrize(
    ("stall", "timeout", "seconds"), [(None, None, 60), ("5", None, 5), ("5", "8", 4), ("1000000", "600", 300)]
)
def test_stalls_are_named_before_the_timeout(monkeypatch, stall, timeout, seconds):
    for name, text in (("HPCTRAIN_STALL", stall), ("HPCTRAIN_TIMEOUT", timeout)):
        monkeypatch.delenv(name, raising=False) if text is None else monkeypatch.setenv(name, text)
    assert stall_seconds() == seconds


def test_requests_whose_wait_failed_are_kept_as_mpi_may_still_write_to_them(timeout):
    class Request:
        def Test(self) -> bool:
            return False

    kept: list[weakref.ref[Request]] = []

    def start() -> Request:
        request = Request()
        kept.append(weakref.ref(request))
        return request

    with refused("HT-wait-timed-out", what="bucket 3"):
        timeout.finish(start, "bucket 3")
    gc.collect()
    assert kept[0]() is not None
