"""Ranks whose numbers, clock or code go wrong."""

from __future__ import annotations

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
    step, rank = injected["step"], injected["rank"]
    named = rf"step {step} of epoch \d+ has numbers that are not finite on rank {rank} \("
    return Promise(codes=(1,), says=(named,), check=lambda events: _not_finite(events, "stop", step, rank))


@kind("a sample that is not a number, rule skip", tm=1, th=1, ts=1, km=1, kh=1)
def poison_and_skip(scene: Scene) -> Promise:
    injected = {**once(scene, "poison"), "step": scene.draw.randint(2, 82)}
    scene.begin("--set", "numbers.non_finite=skip", injected=[injected])
    told = partial(_not_finite, rule="skip", step=injected["step"], rank=injected["rank"])
    return Promise(codes=(0,), equal="accuracy", check=told)
