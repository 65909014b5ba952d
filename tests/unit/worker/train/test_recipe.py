from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.worker.train import recipe
from hpctrain.worker.train.recipe import phase


def _rank(rank: int) -> Any:
    return SimpleNamespace(rank=rank)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "_REPEAT_SECONDS", 0.01)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hpctrain-phase"]


def _wait_until_said(capfd: pytest.CaptureFixture[str], text: str) -> str:
    said = ""
    deadline = time.monotonic() + 30
    while text not in said:
        assert time.monotonic() < deadline, said
        time.sleep(0.005)
        said += capfd.readouterr().err
    return said


def test_what_lasts_is_said_again_until_it_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with phase(_rank(0), "loading PyTorch"):
        said = _wait_until_said(capfd, "hpctrain: still loading PyTorch (0 s)\n")
    assert said.splitlines()[0].endswith("loading PyTorch")
    for thread in _threads():
        thread.join(timeout=30)
    assert not _threads()
    capfd.readouterr()
    time.sleep(0.05)
    assert capfd.readouterr().err == ""


def test_it_ends_ahead_of_its_block(capfd: pytest.CaptureFixture[str]) -> None:
    """The loop goes on long after the first step, in the same call."""
    first_step = threading.Event()
    with phase(_rank(0), "taking the first step", over=first_step.is_set):
        _wait_until_said(capfd, "still taking")
        first_step.set()
        for thread in _threads():
            thread.join(timeout=30)
        assert not _threads()


def test_it_ends_with_an_error() -> None:
    with pytest.raises(ValueError), phase(_rank(0), "building"):
        raise ValueError("no such model")
    for thread in _threads():
        thread.join(timeout=30)
    assert not _threads()


def test_the_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with phase(_rank(1), "loading PyTorch"):
        assert not _threads()
        time.sleep(0.05)
    assert capfd.readouterr().err == ""
