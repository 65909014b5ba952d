"""Ranks whose numbers, clock or code go wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from fault_campaign.cases import Scene, kind
from fault_campaign.kinds_of_signals import RESTARTED
from fault_campaign.oracle import Event, Promise

GUARDED = 5


# An hour, as when a clock is set by hand or by a time server that was wrong.
def once(scene: Scene, what: str, **arguments: Any) -> dict[str, Any]:
    """Something that happens to one rank before one step, in one attempt."""
    step, _ = scene.moment(2)
    return {"what": what, "rank": scene.rank(), "step": step, "once": scene.once(), **arguments}


@kind("a rank raises", tm=2, th=2, ts=1, km=1, kh=1)
def raise_on_rank(scene: Scene) -> Promise:
    injected = once(scene, "fail", message="the sensor is gone")
    scene.begin(injected=[injected])
    return Promise(
        codes=RESTARTED, says=(rf"rank {injected['rank']} on \S+ failed", "RuntimeError: the sensor is gone")
    )


@kind("a bit flipped in a rank's parameters", tm=3, th=3, km=2, kh=1)
def flip_bit(scene: Scene) -> Promise:
    """The guard's next check finds it: with three ranks it names the one, of two it cannot tell which."""
    if scene.draw.random() < 0.5:
        scene.change(ranks=3)
    injected = once(scene, "flip", parameter=scene.draw.randrange(6), bit=scene.draw.randint(8, 22))
    scene.begin("--set", f"guard.every={GUARDED}", injected=[injected])

    def check(events: Sequence[Event]) -> list[str]:
        first = [event["event"] for event in events].index("fault")
        found = [event["iteration"] for event in events[:first] if event["event"] == "step"][-1]
        late = not injected["step"] <= found + 1 <= injected["step"] + GUARDED
        return [f"flipped before step {injected['step']}, found after step {found}"] if late else []

    alone, two = rf"differs on rank {injected['rank']} \(", r"differs between rank 0 \(\S+\) and rank 1 \("
    names = r"different parameters: '\S+' " + (alone if scene.setting.ranks > 2 else two)
    return Promise(codes=RESTARTED, says=(names, "its element"), check=check)


def _not_finite(events: Sequence[Event], rule: str, step: int, rank: int) -> list[str]:
    told = [(event["rule"], event["iteration"], event["ranks"]) for event in events if event["event"] == "non_finite"]
    return [] if told == [(rule, step, [rank])] else [f"told of as not finite: {told}, not {(rule, step, [rank])}"]


@kind("a sample that is not a number, rule stop", tm=1, th=1, ts=1, km=1, kh=1)
def poison_and_stop(scene: Scene) -> Promise:
    injected = once(scene, "poison")
    scene.begin(injected=[injected])
    dumps = scene.place.directory.path / "dumps" / f"step-{injected['step']:08}"

    def check(events: Sequence[Event]) -> list[str]:
        wrong = _not_finite(events, "stop", injected["step"], injected["rank"])
        ranks = [json.loads(dump.read_text())["rank"] for dump in sorted(dumps.glob("rank-*.json"))]
        return wrong if ranks == list(range(scene.setting.ranks)) else [*wrong, f"{dumps} is of ranks {ranks}"]

    named = rf"step {injected['step']} of epoch \d+ has numbers that are not finite on rank {injected['rank']} \("
    return Promise(codes=(1,), says=(named,), check=check)


def poison_and_go_on(scene: Scene, rule: str, steps: tuple[int, int]) -> Promise:
    injected = {**once(scene, "poison"), "step": scene.draw.randint(*steps)}
    scene.begin("--set", f"numbers.non_finite={rule}", injected=[injected])
    told = partial(_not_finite, rule=rule, step=injected["step"], rank=injected["rank"])
    return Promise(codes=(0,), equal="accuracy", check=told)


# There is a checkpoint to go back to.
poison_and_skip = partial(poison_and_go_on, rule="skip", steps=(2, 82))
poison_and_roll_back = partial(poison_and_go_on, rule="roll_back", steps=(25, 85))
kind("a sample that is not a number, rule skip", tm=1, th=1, ts=1, km=1, kh=1)(poison_and_skip)
kind("a sample that is not a number, rule roll_back", tm=1, th=1, km=1, kh=1)(poison_and_roll_back)
