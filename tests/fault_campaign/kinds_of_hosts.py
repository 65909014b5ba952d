"""Hosts of one run whose network fails, or that are switched off: four on this machine, each with a rank."""

from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fault_campaign.cases import Scene, kind
from fault_campaign.faulted_run import OutOfTimeError, Training
from fault_campaign.oracle import Event, Promise, foreign_records, trained_twice
from fault_campaign.references import STEPS
from support.hosts.local_hosts import LocalHosts, obstacle
from support.launching import AS_ROOT

# Until a host that is silent is lost, until a rank that is waited for is named, and until the others give up.
HOST_TIMEOUT, STALL, TIMEOUT = 8, 8, 25
# An attempt that is given up: until its ranks notice, until the launcher has ended them (their own end, TERM and KILL),
# until all hosts are asked whether they answer, and the wait before the next.
_GIVEN_UP = TIMEOUT + (5 + 10 + 5) + 10 + 4
# Four ranks that begin together on the cores of this machine, and train.
_WHOLE = 40
# One attempt that meets the fault, one that meets it again at its start, and the one that goes through.
LIMIT = 2 * _GIVEN_UP + 3 * _WHOLE
# Ranks that are cut off end with the daemon that misses the others, or when they have waited for too long.
LEAVE = HOST_TIMEOUT + TIMEOUT + 10

_WORK = ("digits", "--set", "epochs=2")
_LAST = STEPS // 2
# Slow enough for a fault to fall into a certain step, and for one that passes to be over before the run is.
_PACE = {"what": "pace", "seconds": 0.1}
_SLOW_WRITING = {"what": "slow_writing", "seconds": 0.3}
_SLOW = "100mbit"


def local_hosts(scene: Scene) -> LocalHosts:
    """One set for all cases; each leaves them as they were."""
    if reason := obstacle():
        pytest.skip(reason)
    folder = Path(tempfile.gettempdir(), f"hpctrain-hosts-{secrets.token_hex(4)}")
    # What links point to too: the environment may be one.
    shared = sorted({scene.library.folder.parent, Path(__file__).parents[2], Path(sys.prefix).resolve()})
    hosts: LocalHosts = scene.library.kept("hosts", lambda: LocalHosts(folder, shared=shared, variables=AS_ROOT))
    scene.place.undone.callback(hosts.restore)
    scene.place.hosts, scene.place.limit = hosts, LIMIT
    return hosts


def _begin(scene: Scene, hosts: LocalHosts, *arguments: str) -> Training:
    """Train on all hosts, and meet the fault at a moment that is drawn: before the first step, in an epoch, or while a
    checkpoint is written.
    """
    training = scene.place.begin(
        *(*_WORK, "-H", ",".join(hosts.names), "--framework", scene.case.framework),
        *("--backend", scene.case.backend, *arguments),
        injected=[_PACE, _SLOW_WRITING],
        HPCTRAIN_HOST_TIMEOUT=str(HOST_TIMEOUT),
        HPCTRAIN_STALL=str(STALL),
        HPCTRAIN_TIMEOUT=str(TIMEOUT),
    )
    scene.training = training
    directory = scene.place.directory
    moment = scene.draw.choice(("begin", "epoch", "checkpoint"))
    if moment == "begin":
        # While hosts are asked, while daemons start, and while ranks load what they need.
        stages: tuple[Callable[[], bool], ...] = (
            lambda: True,
            directory.events.exists,
            lambda: any(directory.ranks.glob("rank-*.json")),
            lambda: len(list(directory.ranks.glob("rank-*.json"))) == len(hosts.names),
        )
        stage = scene.draw.randrange(len(stages))
        training.wait_until(f"stage {stage} of the begin", stages[stage])
        time.sleep(scene.draw.uniform(0, 2))
    elif moment == "epoch":
        training.wait_for_step(*scene.moment(3, _LAST - 10))
    else:
        training.wait_for_step(scene.draw.choice((21, 43)))
        training.wait_for_writing(scene.draw.uniform(0, 0.2))
    training.since, training.leave = time.monotonic(), LEAVE
    return training


def _promise(scene: Scene, hosts: LocalHosts, *, passes: bool = False) -> Promise:
    """Of a run that a fault of the network met; one that ``passes`` stops no run for good."""
    # What is compared needs no hosts: a recipe's numbers are those of any ranks, to rounding.
    scene.change(ranks=1, backend="single", work=_WORK)

    def check(events: Sequence[Event]) -> list[str]:
        return [*trained_twice(events), *foreign_records(events, scene.place.directory.path)]

    return Promise(
        codes=(0,) if passes else (0, 4),
        says=(r"\b(lost|fell silent|waited|died|no answer|not (finish|begin|find each other|report back)|done)\b",),
        refusal=r"h\d(,h\d|\[.*\])* (does not answer|cannot connect)",
        mends=hosts.repair,
        equal="accuracy",
        check=check,
    )


_Act = Callable[[Scene, "LocalHosts", Training], None]


def _hurts(name: str, where: str, *, passes: bool = False) -> Callable[[_Act], _Act]:
    """Register a fault of the hosts, with and without the wish to go on from memory."""

    def register(act: _Act) -> _Act:
        def hurt(scene: Scene, *arguments: str) -> Promise:
            hosts = local_hosts(scene)
            act(scene, hosts, _begin(scene, hosts, *arguments))
            return _promise(scene, hosts, passes=passes)

        kind(f"hosts: {name}", where)(hurt)
        kind(f"hosts with shrink: {name}", "tm")(lambda scene: hurt(scene, "--set", "fault_tolerance.lost_rank=shrink"))
        return act

    return register


def _other(scene: Scene, hosts: LocalHosts) -> str:
    """Any but the one that the run was started from."""
    return scene.draw.choice(hosts.names[1:])


@_hurts("a cable is cut", "tm th tg")
def cut(scene: Scene, hosts: LocalHosts, training: Training) -> None:
    hosts.cut(_other(scene, hosts))


@_hurts("the cable of the launching host is cut", "tm")
def cut_launcher(scene: Scene, hosts: LocalHosts, training: Training) -> None:
    hosts.cut(hosts.names[0])


@_hurts("a cable is cut for seconds", "tm th", passes=True)
def cut_short(scene: Scene, hosts: LocalHosts, training: Training) -> None:
    host = _other(scene, hosts)
    hosts.cut(host)
    time.sleep(scene.draw.uniform(1, HOST_TIMEOUT - 2))
    hosts.mend(host)


@_hurts("a link is slow", "tm tg", passes=True)
def slow(scene: Scene, hosts: LocalHosts, training: Training) -> None:
    host = _other(scene, hosts)
    hosts.rate(host, _SLOW)
    if scene.draw.random() < 0.5:
        time.sleep(scene.draw.uniform(1, 4))
        hosts.rate(host, hosts.settings.rate)


@_hurts("one direction of a link is lost", "tm th tg")
def half_open(scene: Scene, hosts: LocalHosts, training: Training) -> None:
    scene.draw.choice((hosts.deafen, hosts.silence))(_other(scene, hosts))


@_hurts("two hosts and two", "tm th tg")
def two_and_two(scene: Scene, hosts: LocalHosts, training: Training) -> None:
    hosts.split(*scene.draw.sample(hosts.names[1:], 2))


@_hurts("three hosts and one", "tm")
def three_and_one(scene: Scene, hosts: LocalHosts, training: Training) -> None:
    hosts.split(scene.draw.choice(hosts.names))


@_hurts("a host is switched off", "tm th tg")
def switch_off(scene: Scene, hosts: LocalHosts, training: Training) -> None:
    hosts.kill(_other(scene, hosts))


@_hurts("a host is switched off and on", "tm")
def switch_off_and_on(scene: Scene, hosts: LocalHosts, training: Training) -> None:
    """Before the run has missed it, or just after."""
    host = _other(scene, hosts)
    hosts.kill(host)
    events = scene.place.directory.events
    if scene.draw.random() < 0.5:
        time.sleep(scene.draw.uniform(0, 2))
    else:
        with contextlib.suppress(OutOfTimeError):
            training.wait_until("the fault", lambda: events.exists() and b'"event": "fault"' in events.read_bytes())
    hosts.boot(host)
