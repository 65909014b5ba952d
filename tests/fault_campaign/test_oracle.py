"""The oracle refuses what is not as promised: a campaign that cannot fail would prove nothing."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fault_campaign.faulted_run import Ended
from fault_campaign.oracle import Promise, foreign_records, judge, trained_twice

SAMPLES, BATCH, SEED, EPOCHS = 10, 4, 3, 2
STEPS = EPOCHS * 3
SAID = "hpctrain: rank 1 on node was killed by signal 9"
KILLED = Promise(codes=(4,), says=("rank 1 on node was killed",))
FAULTED, FINISHED = Ended(code=4, printed=SAID), Ended(code=0, printed="done")

Event = dict[str, Any]
Change = Callable[[list[Event]], list[Event]]


def step_events() -> list[Event]:
    found: list[Event] = []
    for epoch in range(EPOCHS):
        order = np.random.default_rng((SEED, epoch)).permutation(SAMPLES)
        for first in range(0, SAMPLES, BATCH):
            batch = order[first : first + BATCH].astype("<i8")
            step = {"event": "step", "iteration": len(found) + 1, "epoch": epoch + 1, "first": first}
            step |= {"loss": 1 / (first + 1), "samples": len(batch), "learning_rate": 0.1}
            found.append({**step, "order": zlib.crc32(batch.tobytes())})
    return found


def changed(number: int, **values: object) -> Change:
    return lambda steps: [{**step, **values} if step["iteration"] == number else step for step in steps]


def write(run: Path, change: Change = lambda steps: steps, *, last: float = 1.0, accuracy: float = 0.98) -> Path:
    """A run of two attempts, of which the first lost two steps after its checkpoint."""
    newest = run / "checkpoints" / f"step-{STEPS:08}"
    newest.mkdir(parents=True)
    save_file({"model.a": np.arange(3, dtype=np.float32)}, newest / "rank-0-of-2.safetensors")
    save_file({"model.b": np.array([last], np.float32)}, newest / "rank-1-of-2.safetensors")
    recipe = {"seed": SEED, "batch": {"size": BATCH}, "data": {"name": "digits"}}
    (run / "plan.json").write_text(json.dumps({"recipe": recipe}))
    (run / "summary.json").write_text('{"status": "done"}')
    steps = change(step_events())
    lost = [{**step, "loss": 7.0} for step in steps[3:5]]
    first, again = ({"event": "start", "attempt": number, "iteration": 3 * (number - 1)} for number in (1, 2))
    epoch = {"event": "epoch", "epoch": EPOCHS, "test_accuracy": accuracy}
    events = [first, *steps[:3], *lost, again, *steps[3:], epoch]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "whole")


ENDS: dict[str, tuple[list[Ended], str]] = {
    "never": ([Ended(code=None, printed=SAID)], "did not end in time"),
    "another exit status": ([Ended(code=1, printed=SAID), FINISHED], "exit status 1, and 4 is documented"),
    "of another rank": ([Ended(code=4, printed=SAID.replace("1", "0")), FINISHED], "it does not say"),
    "with a traceback": ([Ended(code=4, printed=f"{SAID}\nTraceback (most recent"), FINISHED], "with a traceback"),
    "not at all": ([FAULTED, Ended(code=1, printed="no")], "did not come to its end: exit status 1"),
    "with processes left": ([replace(FAULTED, left=("process 7: orted",)), FINISHED], "left behind: process 7"),
}


@pytest.mark.parametrize(("ends", "told"), ENDS.values(), ids=ENDS)
def test_an_end_that_is_not_promised_is_refused(tmp_path: Path, whole: Path, ends: list[Ended], told: str) -> None:
    faults = judge(KILLED, ends, write(tmp_path / "run"), whole)
    assert any(told in fault for fault in faults), faults


NOT_PROMISED: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing": ("bits", {}, ""),
    "a step is missing": ("bits", {"change": lambda steps: [*steps[:4], *steps[5:]]}, "steps are not 1 to 5"),
    "other samples": ("bits", {"change": changed(4, order=1)}, "step 4 has other samples than positions 0"),
    "samples again": ("bits", {"change": changed(5, first=0)}, "step 5 has other samples"),
    "fewer samples": ("bits", {"change": changed(6, samples=1)}, "step 6 has 1 samples, not 2"),
    "an epoch not whole": ("bits", {"change": lambda steps: steps[:5]}, "epoch 2 has seen 8 of 10 samples"),
    "another loss": ("bits", {"change": changed(5, loss=0.2000000000000001)}, "step 5 differs in loss"),
    "one bit of the state": ("bits", {"last": float(np.nextafter(np.float32(1), np.float32(2)))}, "have other bits"),
    "bits need not be equal": ("accuracy", {"last": 2.0, "accuracy": 0.96}, ""),
    "another accuracy": ("accuracy", {"accuracy": 0.9}, "test acc"),
    "rounding": ("rounding", {"change": changed(5, loss=0.20005), "last": 2.0}, ""),
    "more than rounding": ("rounding", {"change": changed(5, loss=0.2005)}, "step 5 has a loss"),
    "another mesh": ("mesh", {"change": changed(5, loss=0.2 + 0.9e-5)}, ""),
    "more than another mesh": ("mesh", {"change": changed(5, loss=0.2 + 1.1e-5)}, "step 5 has a loss"),
    "bits of the first mesh": ("mesh", {"change": changed(3, loss=1 / 9 + 1e-12)}, "step 3 has a loss"),
}


@pytest.mark.parametrize(("equal", "written", "told"), NOT_PROMISED.values(), ids=NOT_PROMISED)
def test_a_run_that_is_not_as_promised_is_refused(
    tmp_path: Path, whole: Path, equal: Any, written: dict[str, Any], told: str
) -> None:
    faults = judge(replace(KILLED, equal=equal), [FAULTED, FINISHED], write(tmp_path / "run", **written), whole)
    assert any(told in fault for fault in faults) if told else not faults, faults


def test_a_refusal_leaves_no_run_and_says_why(tmp_path: Path, whole: Path) -> None:
    run = write(tmp_path / "run")
    refused = Ended(code=1, printed="hpctrain: h2 does not answer ssh", began=False)
    promise = Promise(codes=(0,), refusal=r"h\d does not answer", equal="order")
    assert not judge(promise, [refused, FINISHED], run, whole)
    for wrong in (
        replace(refused, printed="hpctrain: no"),
        replace(refused, began=True),
        replace(refused, code=3),
        replace(refused, left=("process 7: prted",)),
    ):
        assert judge(promise, [wrong, FINISHED], run, whole)


def test_two_attempts_that_train_at_once_are_found() -> None:
    begin = [{"event": "start", "attempt": number, "iteration": 2 * (number - 1)} for number in (1, 2)]
    steps = [{"event": "step", "iteration": number} for number in range(1, 6)]
    whole = [begin[0], *steps[:3], begin[1], *steps[2:], {"event": "end"}]
    assert not list(trained_twice(whole))
    # The first goes on: it repeats a step of the second, is ahead of it, or outlives it.
    for index, step in ((6, steps[2]), (5, steps[4]), (9, steps[3])):
        assert list(trained_twice([*whole[:index], step, *whole[index:]]))


def test_a_record_that_an_attempt_before_left_is_found(tmp_path: Path) -> None:
    events = [{"event": "start", "attempt": number, "iteration": 0, "time": 100.0 * number} for number in (1, 2)]
    (tmp_path / "ranks").mkdir()
    for rank, started in enumerate((200.5, 199.5, 110.0)):
        (tmp_path / "ranks" / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "started": started}))
    (found,) = foreign_records(events, tmp_path)
    assert "rank 2 " in found
