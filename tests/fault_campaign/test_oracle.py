"""The oracle refuses what is not as promised: a campaign that cannot fail would prove nothing."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fault_campaign.cases import case_of, deck
from fault_campaign.faulted_run import Ended
from fault_campaign.oracle import Promise, foreign_records, judge, trained_twice
from support.golden import check_text

SAMPLES, BATCH, SEED, EPOCHS = 10, 4, 3, 2
STEPS = EPOCHS * 3
SAID = "hpctrain: rank 1 on node was killed by signal 9"
KILLED = Promise(codes=(4,), says=("rank 1 on node was killed",))

Event = dict[str, Any]


def step_events() -> list[Event]:
    found = []
    for epoch in range(EPOCHS):
        order = np.random.default_rng((SEED, epoch)).permutation(SAMPLES)
        for first in range(0, SAMPLES, BATCH):
            batch = order[first : first + BATCH].astype("<i8")
            step = {
                "event": "step",
                "iteration": len(found) + 1,
                "epoch": epoch + 1,
                "first": first,
                "loss": 1 / (first + 1),
            }
            found.append({**step, "samples": len(batch), "order": zlib.crc32(batch.tobytes()), "learning_rate": 0.1})
    return found


def write(run: Path, events: list[Event], last: float = 1.0) -> None:
    newest = run / "checkpoints" / f"step-{STEPS:08}"
    newest.mkdir(parents=True)
    save_file({"model.a": np.arange(3, dtype=np.float32)}, newest / "rank-0-of-2.safetensors")
    save_file({"model.b": np.array([last], np.float32)}, newest / "rank-1-of-2.safetensors")
    recipe = {"seed": SEED, "batch": {"size": BATCH}, "data": {"name": "digits"}}
    (run / "plan.json").write_text(json.dumps({"recipe": recipe}))
    (run / "summary.json").write_text('{"status": "done"}')
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def interrupted(steps: list[Event], accuracy: float = 0.98) -> list[Event]:
    """Two attempts, of which the first lost two steps after its checkpoint."""
    start: Event = {"event": "start", "attempt": 1, "iteration": 0}
    lost = [{**step, "loss": 7.0} for step in steps[3:5]]
    again: Event = {"event": "start", "attempt": 2, "iteration": 3}
    epoch: Event = {"event": "epoch", "epoch": EPOCHS, "test_accuracy": accuracy}
    return [start, *steps[:3], *lost, again, *steps[3:], epoch]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write(tmp_path / "whole", interrupted(step_events()))
    return tmp_path / "whole"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "run", interrupted(step_events()))
    return tmp_path / "run"


FAULTED, FINISHED = Ended(code=4, printed=SAID), Ended(code=0, printed="done")


def test_what_is_promised_is_accepted(run: Path, whole: Path) -> None:
    assert judge(KILLED, [FAULTED, FINISHED], run, whole).outcome == "resumed"
    alone = judge(Promise(codes=(0,), says=KILLED.says), [Ended(code=0, printed=SAID)], run, whole)
    assert (alone.outcome, alone.faults) == ("recovered", ())


ENDS: dict[str, tuple[list[Ended], str]] = {
    "never": ([Ended(code=None, printed=SAID)], "did not end in time"),
    "another exit status": ([Ended(code=1, printed=SAID), FINISHED], "exit status 1, and 4 is documented"),
    "of another rank": ([Ended(code=4, printed=SAID.replace("1", "0")), FINISHED], "it does not say"),
    "with a traceback": ([Ended(code=4, printed=f"{SAID}\nTraceback (most recent"), FINISHED], "with a traceback"),
    "not at all": ([FAULTED, Ended(code=1, printed="no")], "did not come to its end: exit status 1"),
    "with processes left": (
        [Ended(code=4, printed=SAID, left=("process 7: orted",)), FINISHED],
        "left behind: process 7",
    ),
}


@pytest.mark.parametrize(("ends", "told"), ENDS.values(), ids=ENDS)
def test_an_end_that_is_not_promised_is_refused(run: Path, whole: Path, ends: list[Ended], told: str) -> None:
    verdict = judge(KILLED, ends, run, whole)
    assert verdict.outcome == ("hung" if any(end.code is None for end in ends) else "lost")
    assert any(told in fault for fault in verdict.faults), verdict.faults


def changed(number: int, **values: object) -> Callable[[list[Event]], list[Event]]:
    return lambda steps: [{**step, **values} if step["iteration"] == number else step for step in steps]


EVENTS: dict[str, tuple[Callable[[list[Event]], list[Event]], str]] = {
    "a step is missing": (lambda steps: [*steps[:4], *steps[5:]], "steps are not 1 to 5, once each"),
    "other samples": (changed(4, order=1), "step 4 has other samples than positions 0 on of epoch 2"),
    "samples again": (changed(5, first=0), "step 5 has other samples"),
    "fewer samples": (changed(6, samples=1), "step 6 has 1 samples, not 2"),
    "an epoch not whole": (lambda steps: steps[:5], "epoch 2 has seen 8 of 10 samples"),
    "another loss": (changed(5, loss=0.2000000000000001), "step 5 differs in loss"),
    "no order": (lambda steps: [{k: v for k, v in step.items() if k != "order"} for step in steps], "lacks 'order'"),
}


@pytest.mark.parametrize(("change", "told"), EVENTS.values(), ids=EVENTS)
def test_events_that_are_not_promised_are_refused(
    tmp_path: Path, whole: Path, change: Callable[[list[Event]], list[Event]], told: str
) -> None:
    write(tmp_path / "run", interrupted(change(step_events())))
    verdict = judge(KILLED, [FAULTED, FINISHED], tmp_path / "run", whole)
    assert verdict.outcome == "lost"
    assert any(told in fault for fault in verdict.faults), verdict.faults


def test_one_bit_of_the_state_is_enough(tmp_path: Path, whole: Path) -> None:
    write(tmp_path / "run", interrupted(step_events()), last=float(np.nextafter(np.float32(1), np.float32(2))))
    verdict = judge(KILLED, [FAULTED, FINISHED], tmp_path / "run", whole)
    check_text("oracle-other-bits", "\n".join(verdict.faults))
    near = Promise(codes=(4,), says=KILLED.says, equal="accuracy")
    assert judge(near, [FAULTED, FINISHED], tmp_path / "run", whole).outcome == "resumed"


def divide(directory: Path, *parts: tuple[str, int]) -> None:
    """Let the final state have an array of four in parts of two, each from its begin on, in files of their own."""
    newest = directory / "checkpoints" / f"step-{STEPS:08}"
    for number, (key, begin) in enumerate(parts):
        part = np.arange(begin, begin + 2, dtype=np.float32)
        save_file({key: part}, newest / f"rank-{number}-of-{len(parts)}.safetensors")


def test_an_array_is_the_same_however_it_is_divided(run: Path, whole: Path) -> None:
    divide(whole, ("model.a[0:2 of 4]", 0), ("model.a[2:4 of 4]", 2))
    divide(run, ("model.a[2:4 of 4]", 2), ("model.a[0:2 of 4]", 0))
    assert judge(KILLED, [FAULTED, FINISHED], run, whole).outcome == "resumed"


def test_elements_that_are_nowhere_or_twice_are_told(run: Path, whole: Path) -> None:
    anything = replace(KILLED, equal="order")
    divide(run, ("model.a[0:2 of 4]", 0), ("model.a[1:3 of 4]", 1))
    (fault,) = judge(anything, [FAULTED, FINISHED], run, whole).faults
    check_text("oracle-nowhere-and-twice", fault)


OTHER_MESH = replace(KILLED, equal="mesh")


@pytest.mark.parametrize(
    ("number", "more", "told"),
    [
        (3, 1e-12, "step 3 has a loss"),
        (5, 0.9e-5, None),
        (5, 1.1e-5, "step 5 has a loss"),
    ],
)
def test_on_another_mesh_the_losses_go_on_to_rounding(
    tmp_path: Path, whole: Path, number: int, more: float, told: str | None
) -> None:
    steps = step_events()
    write(tmp_path / "run", interrupted(changed(number, loss=steps[number - 1]["loss"] + more)(steps)))
    verdict = judge(OTHER_MESH, [FAULTED, FINISHED], tmp_path / "run", whole)
    assert (verdict.outcome == "resumed") == (told is None), verdict.faults
    assert told is None or told in verdict.faults[0]


def test_rounding_and_accuracy_have_bounds(tmp_path: Path, whole: Path) -> None:
    write(tmp_path / "run", interrupted(changed(5, loss=0.20005)(step_events()), accuracy=0.96), last=2.0)
    for equal, loss, accuracy, told in (
        ("rounding", 0.2005, 0.96, "step 5 has a loss"),
        ("accuracy", 0.2, 0.9, "test acc"),
    ):
        promise = Promise(codes=(4,), says=KILLED.says, equal=equal)  # type: ignore[arg-type]
        assert judge(promise, [FAULTED, FINISHED], tmp_path / "run", whole).outcome == "resumed"
        write(tmp_path / equal, interrupted(changed(5, loss=loss)(step_events()), accuracy=accuracy))
        assert told in judge(promise, [FAULTED, FINISHED], tmp_path / equal, whole).faults[0]


def test_a_case_follows_from_its_seed_alone() -> None:
    from fault_campaign import campaign  # noqa: F401

    cards = len(deck())
    assert cards >= 200
    assert case_of(7) == case_of(7)
    assert (case_of(7).kind, case_of(7).backend) == (case_of(7 + cards).kind, case_of(7 + cards).backend)
    for framework in ("torch", "keras"):
        for backend in ("horovod", "mpi"):
            kinds = {kind.name for kind, *where in deck() if where == [framework, backend, ""]}
            assert len(kinds) > 25, (framework, backend, re.sub(", ", "\n", str(kinds)))


def test_a_refusal_leaves_no_run_and_says_why(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    for directory in (run, whole):
        write(directory, interrupted(step_events()))
    refused = Ended(code=1, printed="hpctrain: h2 does not answer ssh", began=False)
    promise = Promise(codes=(0,), refusal=r"h\d does not answer", equal="order")
    assert judge(promise, [refused, FINISHED], run, whole).outcome == "refused"
    for wrong in (
        replace(refused, printed="hpctrain: no"),
        replace(refused, began=True),
        replace(refused, code=3),
        replace(refused, left=("process 7: prted",)),
    ):
        assert judge(promise, [wrong, FINISHED], run, whole).outcome == "lost"


def test_two_attempts_that_train_at_once_are_found() -> None:
    begin = [{"event": "start", "attempt": number, "iteration": 2 * (number - 1)} for number in (1, 2)]
    steps = [{"event": "step", "iteration": number} for number in range(1, 6)]
    end = {"event": "end"}
    whole = [begin[0], *steps[:3], begin[1], *steps[2:], end]
    assert not list(trained_twice(whole))
    # The first goes on: it repeats a step of the second, is ahead of it, or outlives it.
    for index, step in ((6, steps[2]), (5, steps[4]), (9, steps[3])):
        assert list(trained_twice([*whole[:index], step, *whole[index:]]))


def test_a_record_that_an_attempt_before_left_is_found(tmp_path: Path) -> None:
    events = [{"event": "start", "attempt": number, "iteration": 0, "time": 100.0 * number} for number in (1, 2)]
    (tmp_path / "ranks").mkdir()
    for rank, started in enumerate((200.5, 199.5)):
        (tmp_path / "ranks" / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "started": started}))
    assert not list(foreign_records(events, tmp_path))
    (tmp_path / "ranks" / "rank-2.json").write_text(json.dumps({"rank": 2, "started": 110.0}))
    (found,) = foreign_records(events, tmp_path)
    assert "rank 2 " in found
