"""What a faulted run must come to, judged from what it left behind and nothing else.

The order of samples is worked out here once more: ``numpy.random.default_rng((seed, epoch)).permutation(samples)``, cut
into batches, is what the recipe promises, on any ranks. A text's epochs are cut from such permutations of its windows,
one after the other.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fault_campaign.faulted_run import Ended
from support.written_checkpoints import tensors_of

Event = dict[str, Any]
Check = Callable[[list[Event]], Sequence[str]]
# The accuracy of a run whose numbers a rule of the recipe, or another number of ranks, has changed.
_NEAR = 0.03
# Of a loss, whose sums are made in another order on other ranks: of the first steps, and of all. 2, 3 and 4 ranks part
# from one by at most 2e-6 for 20 steps; later a unit or a pool decides otherwise, and then by up to 0.04.
_FIRST, _ROUNDING, _PARTED = 20, 1e-4, 0.1
# The same of the first steps on another mesh, from a state that was equal.
_OTHER_MESH = 1e-5
# Further attempts repeat what was measured of time.
_NUMBERS = ("epoch", "loss", "learning_rate", "samples", "first", "order")


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What is documented of a fault.

    Attributes:
        codes: the exit statuses that the command may have: 0 where the run gets over it.
        says: patterns that are all found in what it printed: the cause, and where it is.
        mends: what the user does about the cause before the run is resumed.
        equal: what the run then has in common with an uninterrupted one: all bits of its state and losses, its losses
            to rounding, its accuracy nearly, each of them with the order of samples; or that alone. With ``mesh`` all
            further attempts are on other meshes: until then the bits of its losses, then to rounding.
        leaves: a launcher that is killed cannot clear away.
        refusal: a pattern that is found in what it prints where it may refuse to begin instead, and leave no run.
        check: looks at the events for more; returns what is wrong.
    """

    codes: tuple[int, ...]
    says: tuple[str, ...] = ()
    mends: Callable[[], None] | None = None
    equal: Literal["bits", "rounding", "accuracy", "order", "mesh"] = "bits"
    leaves: bool = False
    refusal: str | None = None
    check: Check = lambda events: ()

    def __post_init__(self) -> None:
        assert self.says or not any(code > 0 for code in self.codes), "no run ends in silence"


def judge(promise: Promise, ends: Sequence[Ended], run: Path, whole: Path) -> list[str]:
    """What of a run is not as promised.

    Args:
        promise: what was to become of it.
        ends: of the command that met the fault, and of the resume where there was one.
        run: its directory.
        whole: that of the same run without any fault.
    """
    first, last = ends[0], ends[-1]
    if any(end.code is None for end in ends):
        return ["a command did not end in time"]
    refused = promise.refusal and first.code in (1, 2) and re.search(promise.refusal, first.printed)
    faults = [] if refused and not first.began else [*_of_the_first(promise, first)]
    if last.code != 0:
        faults.append(f"it did not come to its end: exit status {last.code}")
    else:
        faults += [*_of_the_end(promise, run, whole)]
    if not promise.leaves:
        faults += [f"left behind: {what}" for end in ends for what in end.left]
    return faults


def _of_the_first(promise: Promise, first: Ended) -> Iterator[str]:
    if first.code not in promise.codes:
        yield f"exit status {first.code}, and {' or '.join(map(str, promise.codes))} is documented"
    for pattern in promise.says:
        if not re.search(pattern, first.printed):
            yield f"it does not say {pattern!r}"
    # Rank 0's is printed too, and hpctrain says after it what became of the run.
    if re.search(r"^Traceback(?!.*^hpctrain: )", first.printed, re.M | re.S):
        yield "the launcher ended with a traceback"


def _of_the_end(promise: Promise, run: Path, whole: Path) -> Iterator[str]:
    events = read_lines(run / "events.jsonl")
    recipe = json.loads((run / "plan.json").read_text())["recipe"]
    try:
        windows = _windows(recipe)
        steps, size = kept_steps(events), recipe["batch"]["size"]
        yield from wrong_order(steps, samples=_samples(whole), seed=recipe["seed"], batch=size, windows=windows)
        accuracy = [event["test_accuracy"] for event in events if event["event"] == "epoch"][-1]
        yield from promise.check(events)
    except (KeyError, IndexError) as error:
        yield f"events.jsonl lacks {error}"
        return
    if json.loads((run / "summary.json").read_text())["status"] != "done":
        yield "summary.json does not say that it is done"
    wanted = [event for event in read_lines(whole / "events.jsonl") if event["event"] == "epoch"][-1]["test_accuracy"]
    if promise.equal == "bits":
        yield from other_bits(run, whole)
    if promise.equal == "mesh":
        yield from other_curve(run, whole, later=_PARTED if windows is None else _OTHER_MESH)
    if promise.equal == "rounding":
        yield from other_losses(run, whole)
    if promise.equal != "order" and not abs(accuracy - wanted) <= _NEAR:
        yield f"test accuracy {accuracy:.4f}, and {wanted:.4f} without the fault"


def _samples(whole: Path) -> int:
    """Of an epoch: those of an uninterrupted run's first."""
    return sum(step["samples"] for step in kept_steps(read_lines(whole / "events.jsonl")) if step["epoch"] == 1)


def _windows(recipe: dict[str, Any]) -> int | None:
    """Of the text that ships with Python, a byte a token with one after each document; None of other data."""
    if recipe["data"]["name"] != "text":
        return None
    from pydoc_data.topics import topics

    tokens = sum(len(topics[name].encode()) + 1 for number, name in enumerate(sorted(topics)) if number % 20)
    context: int = recipe["model"]["context"]
    return (tokens - context) // context


def read_lines(path: Path) -> list[Event]:
    """The events of a file, as JSON alone."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def kept_steps(events: Sequence[Event]) -> list[Event]:
    """The steps that made the final state: each attempt takes the place of those after its checkpoint."""
    kept: list[Event] = []
    for event in events:
        if event["event"] == "start":
            kept = [step for step in kept if step["iteration"] <= event["iteration"]]
        elif event["event"] == "step":
            kept.append(event)
    return kept


def wrong_order(
    steps: Sequence[Event], *, samples: int, seed: int, batch: int, windows: int | None = None
) -> Iterator[str]:
    """What is wrong with the samples of an epoch: each exactly once, in the recipe's order.

    ``windows`` are those of a text, all of whose epochs are in the first pass over it.
    """
    numbers = [step["iteration"] for step in steps]
    if numbers != list(range(1, len(steps) + 1)):
        yield f"steps are not 1 to {len(steps)}, once each"
    for epoch in range(1, max(step["epoch"] for step in steps) + 1):
        if windows is None:
            order = np.random.default_rng((seed, epoch - 1)).permutation(samples)
        else:
            order = np.random.default_rng((seed, 0)).permutation(windows)[(epoch - 1) * samples : epoch * samples]
        done = 0
        for step in (step for step in steps if step["epoch"] == epoch):
            if step["samples"] != min(batch, samples - done):
                yield f"step {step['iteration']} has {step['samples']} samples, not {min(batch, samples - done)}"
            indices = order[done : done + step["samples"]].astype("<i8")
            if step["first"] != done or step["order"] != zlib.crc32(indices.tobytes()):
                yield f"step {step['iteration']} has other samples than positions {done} on of epoch {epoch}"
                break
            done += step["samples"]
        if done != samples:
            yield f"epoch {epoch} has seen {done} of {samples} samples"


def trained_twice(events: Sequence[Event]) -> Iterator[str]:
    """Where an attempt's steps do not follow each other, or something follows its end: another trained beside it."""
    attempt, done, ended = 0, 0, False
    for event in events:
        if event["event"] == "start":
            attempt, done, ended = event["attempt"], event["iteration"], False
        elif ended:
            yield f"after the end of attempt {attempt}: {event}"
        elif event["event"] == "step":
            if event["iteration"] != done + 1:
                yield f"attempt {attempt} has step {event['iteration']} after step {done}"
            done = event["iteration"]
        ended = ended or event["event"] == "end"


def foreign_records(events: Sequence[Event], run: Path) -> Iterator[str]:
    """Records of ranks that did not begin in the last attempt."""
    begin = [event["time"] for event in events if event["event"] == "start"][-1]
    for path in sorted((run / "ranks").glob("rank-*.json")):
        record = json.loads(path.read_text())
        # The begin of a process is known to a second.
        if record["started"] < begin - 2:
            yield f"the record of rank {record['rank']} is of an attempt before: {record}"


def other_bits(run: Path, whole: Path) -> Iterator[str]:
    """Where the final state or a loss differs from the uninterrupted run's."""
    state, wanted = (
        {name: (array.dtype, array.shape, array.tobytes()) for name, array in _final_state(each).items()}
        for each in (run, whole)
    )
    if state.keys() != wanted.keys():
        yield f"the final state has other tensors: {sorted(state.keys() ^ wanted.keys())[:3]}"
        return
    if differs := [name for name in wanted if state[name] != wanted[name]]:
        yield f"{len(differs)} of {len(wanted)} tensors of the final state have other bits, {differs[0]} is the first"
    for step, other in zip(*(kept_steps(read_lines(each / "events.jsonl")) for each in (run, whole)), strict=False):
        if differ := [key for key in _NUMBERS if step.get(key) != other.get(key)]:
            yield f"step {step['iteration']} differs in {', '.join(differ)}"
            return


def _final_state(run: Path) -> dict[str, np.ndarray]:
    """The arrays in the files of the newest checkpoint, parts of one under names of their own."""
    return tensors_of(max((run / "checkpoints").glob("step-*")))


def other_curve(run: Path, whole: Path, *, later: float = _PARTED) -> Iterator[str]:
    """Where a run that went on on other meshes has other losses than one that was not disturbed.

    ``later`` bounds losses after the first steps there: a transformer has no unit or pool that decides otherwise.
    """
    events = read_lines(run / "events.jsonl")
    starts = [event["iteration"] for event in events if event["event"] == "start"]
    if len(starts) < 2:
        yield "nothing of it was done on another mesh"
        return
    for step, other in zip(kept_steps(events), kept_steps(read_lines(whole / "events.jsonl")), strict=False):
        done = step["iteration"] - starts[1]
        bound = 0.0 if done <= 0 else _OTHER_MESH if done <= _FIRST else later
        if not abs(step["loss"] - other["loss"]) <= bound:
            yield f"step {step['iteration']} has a loss of {step['loss']}, not {other['loss']}: {bound:g} is allowed"
            return


def other_losses(run: Path, whole: Path) -> Iterator[str]:
    """Where a loss differs from the uninterrupted run's by more than rounding and what follows from it."""
    both = (kept_steps(read_lines(each / "events.jsonl")) for each in (run, whole))
    for step, other in zip(*both, strict=False):
        bound = _ROUNDING if step["iteration"] <= _FIRST else _PARTED
        if not abs(step["loss"] - other["loss"]) <= bound:
            yield f"step {step['iteration']} has a loss of {step['loss']}, not {other['loss']}"
            return
