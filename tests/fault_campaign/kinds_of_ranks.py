"""Ranks that are killed, stopped, slowed or asked to leave, and whose numbers go wrong."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from functools import partial

import psutil

from fault_campaign.cases import Scene, kind
from fault_campaign.oracle import Event, Promise

# What a run does by itself where nothing but a process was lost: it begins again from its newest checkpoint.
RESTARTED = (0,)
# Limits small enough to be reached: until a rank that is waited for is named, and until the others give up.
STALL, TIMEOUT = 2, 8
GUARDED = 5
_DIED = r"rank \d on \S+ (was killed by signal {}|died)"
_ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@kind("kill -9 of a rank", "tm th tg km kh")
def kill_rank(scene: Scene) -> Promise:
    training = scene.begin()
    training.wait_for_step(*scene.moment())
    training.send(signal.SIGKILL, scene.rank())
    return Promise(codes=RESTARTED, says=(_DIED.format(9),))


def killed_within(scene: Scene, number: signal.Signals) -> Promise:
    """A rank gets the signal from within a step."""
    scene.begin(injected=[scene.once("stop_here", number=int(number))])
    return Promise(codes=RESTARTED, says=(_DIED.format(int(number)),))


kind("kill -9 within a step", "tm th ts km kh")(partial(killed_within, number=signal.SIGKILL))
kind("a rank crashes", "tm th ts kh")(partial(killed_within, number=signal.SIGSEGV))


@kind("kill -9 while a checkpoint is written", "tm th km kh")
def kill_writing(scene: Scene) -> Promise:
    training = scene.begin(injected=[{"what": "slow_writing", "seconds": 0.1}])
    training.wait_for_step(scene.draw.choice((20, 40, 60)))
    training.wait_for_writing(scene.draw.uniform(0, 0.2))
    training.send(signal.SIGKILL, scene.rank())
    return Promise(codes=RESTARTED, says=(_DIED.format(9),))


@kind("kill -9 of mpirun", "tm th km kh")
def kill_mpirun(scene: Scene) -> Promise:
    training = scene.begin()
    training.wait_for_step(*scene.moment())
    children = psutil.Process(training.process.pid).children()
    (mpirun,) = (child for child in children if child.name() in ("mpirun", "prterun"))
    mpirun.kill()
    said = "the program that started the ranks was killed|did not finish|died without"
    return Promise(codes=RESTARTED, says=(said,), leaves=True)


@kind("kill -9 of the launcher", "tm th ts km kh")
def kill_launcher(scene: Scene) -> Promise:
    """Its ranks may live on: a resume says so, and how to end them."""
    training = scene.begin(injected=[{"what": "pace", "seconds": 0.2}])
    training.wait_for_step(*scene.moment(3, 40))
    training.send(signal.SIGKILL)
    training.process.wait()
    wrong: list[str] = []

    def end_ranks() -> None:
        again = scene.place.begin("--resume").end()
        alive = [process.pid for process in training.ranks().values()]
        if not (again.code == 0 or (again.code == 2 and all(f"{pid}" in again.printed for pid in alive))):
            wrong.append(f"a resume beside ranks that live on: exit status {again.code}\n{again.printed}")
        scene.place.kill_all()

    return Promise(codes=(-signal.SIGKILL,), mends=end_ranks, leaves=True, check=lambda events: wrong)


@kind("kill -9 of everything", "tm th tg ts km kh")
def kill_all(scene: Scene) -> Promise:
    """As a machine that loses its power, but for what it had not written."""
    training = scene.begin()
    training.wait_for_step(*scene.moment())
    scene.place.kill_all()
    return Promise(codes=(-signal.SIGKILL,), leaves=True)


@kind("SIGSTOP of a rank, and SIGCONT", "tm th km kh")
def stop_and_continue(scene: Scene) -> Promise:
    training = scene.begin(HPCTRAIN_STALL=str(STALL))
    rank = scene.rank()
    training.wait_for_step(*scene.moment())
    training.send(signal.SIGSTOP, rank)
    time.sleep(2 * STALL)
    training.send(signal.SIGCONT, rank)

    def check(events: Sequence[Event]) -> list[str]:
        named = {event["rank"] for event in events if event["event"] == "stall"}
        return [] if named == {rank} else [f"named as stalled: {named}, not {rank}"]

    return Promise(codes=(0,), check=check)


@kind("SIGSTOP of a rank for good", "tm th km kh")
def stop_for_good(scene: Scene, timeout: int = TIMEOUT) -> Promise:
    training = scene.begin(HPCTRAIN_STALL=str(STALL), HPCTRAIN_TIMEOUT=str(timeout))
    training.wait_for_step(*scene.moment())
    rank = scene.rank()
    training.send(signal.SIGSTOP, rank)
    # PyTorch itself waits on Gloo, and does not know for whom.
    gloo, named = (rf"rank {1 - rank} on \S+ failed", f"{timeout}000ms"), (rf"waited {timeout} s for rank {rank} on",)
    return Promise(codes=RESTARTED, says=gloo if scene.case.backend == "gloo" else named)


@kind("a signal to the launcher", "tm th tg ts km kh")
def ask(scene: Scene) -> Promise:
    training = scene.begin()
    number = scene.draw.choice(_ASKS)
    training.wait_for_step(*scene.moment(3, 40))
    training.send(number)
    return Promise(codes=(4,), says=(f"interrupted by {number.name}; all ranks saved their state and left",))


@kind("a signal to a rank", "tm th km kh")
def ask_rank(scene: Scene) -> Promise:
    """As Slurm may send it."""
    training = scene.begin()
    training.wait_for_step(*scene.moment(3, 40))
    training.send(scene.draw.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)), scene.rank())
    return Promise(codes=(4,), says=("stopped as asked",))


@kind("a rank of three dies, and the others go on", "tm km")
def shrink(scene: Scene) -> Promise:
    """With ``fault_tolerance.lost_rank: shrink``."""
    scene.change(ranks=3)
    training = scene.begin("--set", "fault_tolerance.lost_rank=shrink")
    training.wait_for_step(*scene.moment(3, 80))
    rank = scene.rank()
    training.send(signal.SIGKILL, rank)

    def check(events: Sequence[Event]) -> list[str]:
        lost = [event["rank"] for event in events if event["event"] == "fault"]
        return [f"ranks told of as lost: {lost}, not {rank}"] if lost != [rank] else []

    return Promise(codes=(0,), equal="accuracy", check=check)


@kind("a rank raises", "tm th ts km kh")
def raise_on_rank(scene: Scene) -> Promise:
    injected = scene.once("fail", message="the sensor is gone")
    scene.begin(injected=[injected])
    said = (rf"rank {injected['rank']} on \S+ failed", "RuntimeError: the sensor is gone")
    return Promise(codes=RESTARTED, says=said)


@kind("a bit flipped in a rank's parameters", "tm th km kh")
def flip_bit(scene: Scene) -> Promise:
    """The guard's next check finds it: with three ranks it names the one, of two it cannot tell which."""
    if scene.draw.random() < 0.5:
        scene.change(ranks=3)
    injected = scene.once("flip", parameter=scene.draw.randrange(6), bit=scene.draw.randint(8, 22))
    scene.begin("--set", f"guard.every={GUARDED}", injected=[injected])

    def check(events: Sequence[Event]) -> list[str]:
        first = [event["event"] for event in events].index("fault")
        found = [event["iteration"] for event in events[:first] if event["event"] == "step"][-1]
        late = not injected["step"] <= found + 1 <= injected["step"] + GUARDED
        return [f"flipped before step {injected['step']}, found after step {found}"] if late else []

    alone, two = rf"differs on rank {injected['rank']} \(", r"differs between rank 0 \(\S+\) and rank 1 \("
    names = r"different parameters: '\S+' " + (alone if scene.setting.ranks > 2 else two)
    return Promise(codes=RESTARTED, says=(names, "its element"), check=check)


def not_finite(events: Sequence[Event], rule: str, step: int, rank: int | None = None) -> list[str]:
    """What is not told of the one step that was not finite; of any rank where none is named."""
    found = [event for event in events if event["event"] == "non_finite"]
    told = [(event["rule"], event["iteration"]) for event in found]
    right = told == [(rule, step)] and (rank is None or found[0]["ranks"] == [rank])
    return [] if right else [f"told of as not finite: {found}, not {(rule, step, rank)}"]


@kind("a sample that is not a number, rule stop", "tm th ts km kh")
def poison_and_stop(scene: Scene) -> Promise:
    injected = scene.once("poison")
    scene.begin(injected=[injected])
    step, rank = injected["step"], injected["rank"]
    named = rf"step {step} of epoch \d+ has numbers that are not finite on rank {rank} \("
    return Promise(codes=(1,), says=(named,), check=partial(not_finite, rule="stop", step=step, rank=rank))


@kind("a sample that is not a number, rule skip", "tm th ts km kh")
def poison_and_skip(scene: Scene) -> Promise:
    injected = {**scene.once("poison"), "step": scene.draw.randint(2, 82)}
    scene.begin("--set", "numbers.non_finite=skip", injected=[injected])
    told = partial(not_finite, rule="skip", step=injected["step"], rank=injected["rank"])
    return Promise(codes=(0,), equal="accuracy", check=told)
