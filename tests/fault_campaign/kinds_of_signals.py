"""Processes that are killed, stopped, slowed or asked to leave."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

import psutil

from fault_campaign.cases import Scene, kind
from fault_campaign.oracle import Event, Promise

# What a run does by itself where nothing but a process was lost: it begins again from its newest checkpoint.
RESTARTED = (0,)
# Limits small enough to be reached: until a rank that is waited for is named, and until the others give up.
STALL, TIMEOUT = 2, 8


@kind("kill -9 of a rank", tm=3, th=3, tg=1, km=2, kh=2)
def kill_rank(scene: Scene) -> Promise:
    training = scene.begin()
    training.wait_for_step(*scene.moment())
    training.send(signal.SIGKILL, scene.rank())
    return Promise(codes=RESTARTED, says=(r"rank \d on \S+ (was killed by signal 9|died)",))


def _killed_within(scene: Scene, number: signal.Signals) -> Promise:
    """A rank gets the signal from within a step."""
    step, _ = scene.moment(2)
    what = {"what": "stop_here", "number": int(number)}
    scene.begin(injected=[{**what, "rank": scene.rank(), "step": step, "once": scene.once()}])
    return Promise(codes=RESTARTED, says=(rf"rank \d on \S+ (was killed by signal {int(number)}|died)",))


@kind("kill -9 within a step", tm=2, th=2, ts=1, km=1, kh=1)
def kill_within(scene: Scene) -> Promise:
    return _killed_within(scene, signal.SIGKILL)


@kind("a rank crashes", tm=1, th=1, ts=1, kh=1)
def crash(scene: Scene) -> Promise:
    return _killed_within(scene, signal.SIGSEGV)


@kind("kill -9 while a checkpoint is written", tm=2, th=2, km=1, kh=1)
def kill_writing(scene: Scene) -> Promise:
    training = scene.begin(injected=[{"what": "slow_writing", "seconds": 0.1}])
    training.wait_for_step(scene.draw.choice((20, 40, 60)))
    training.wait_for_writing(scene.draw.uniform(0, 0.2))
    training.send(signal.SIGKILL, scene.rank())
    return Promise(codes=RESTARTED, says=(r"rank \d on \S+ (was killed by signal 9|died)",))


@kind("kill -9 of mpirun", tm=1, th=1, km=1, kh=1)
def kill_mpirun(scene: Scene) -> Promise:
    training = scene.begin()
    training.wait_for_step(*scene.moment())
    (mpirun,) = [
        child for child in psutil.Process(training.process.pid).children() if child.name() in ("mpirun", "prterun")
    ]
    mpirun.kill()
    return Promise(
        codes=RESTARTED,
        says=("the program that started the ranks was killed|did not finish|died without",),
        leaves=True,
    )


@kind("kill -9 of the launcher", tm=1, th=1, ts=1, km=1, kh=1)
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


@kind("kill -9 of everything", tm=2, th=2, tg=1, ts=1, km=1, kh=1)
def kill_all(scene: Scene) -> Promise:
    """As a machine that loses its power, but for what it had not written."""
    training = scene.begin()
    training.wait_for_step(*scene.moment())
    scene.place.kill_all()
    return Promise(codes=(-signal.SIGKILL,), leaves=True)


@kind("SIGSTOP of a rank, and SIGCONT", tm=2, th=1, km=1, kh=1)
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


@kind("SIGSTOP of a rank for good", tm=1, th=1, km=1, kh=1)
def stop_for_good(scene: Scene, timeout: int = TIMEOUT) -> Promise:
    training = scene.begin(HPCTRAIN_STALL=str(STALL), HPCTRAIN_TIMEOUT=str(timeout))
    training.wait_for_step(*scene.moment())
    rank = scene.rank()
    training.send(signal.SIGSTOP, rank)
    # PyTorch itself waits on Gloo, and does not know for whom.
    gloo, named = (rf"rank {1 - rank} on \S+ failed", f"{timeout}000ms"), (rf"waited {timeout} s for rank {rank} on",)
    return Promise(codes=RESTARTED, says=gloo if scene.case.backend == "gloo" else named)


_ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@kind("a signal to the launcher", tm=4, th=4, tg=1, ts=1, km=2, kh=2)
def ask(scene: Scene) -> Promise:
    training = scene.begin()
    number = scene.draw.choice(_ASKS)
    training.wait_for_step(*scene.moment(3, 40))
    training.send(number)
    return Promise(codes=(4,), says=(f"interrupted by {number.name}; all ranks saved their state and left",))


@kind("a signal to a rank", tm=1, th=1, km=1, kh=1)
def ask_rank(scene: Scene) -> Promise:
    """As Slurm may send it."""
    training = scene.begin()
    training.wait_for_step(*scene.moment(3, 40))
    training.send(scene.draw.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)), scene.rank())
    return Promise(codes=(4,), says=("stopped as asked",))


@kind("a rank of three dies, and the others go on", tm=2, km=1)
def shrink(scene: Scene) -> Promise:
    """With ``fault_tolerance: shrink``."""
    scene.change(ranks=3)
    training = scene.begin("--set", "fault_tolerance=shrink")
    training.wait_for_step(*scene.moment(3, 80))
    rank = scene.rank()
    training.send(signal.SIGKILL, rank)

    def check(events: Sequence[Event]) -> list[str]:
        lost = [event["rank"] for event in events if event["event"] == "fault"]
        return [f"ranks told of as lost: {lost}, not {rank}"] if lost != [rank] else []

    return Promise(codes=(0,), equal="accuracy", check=check)
