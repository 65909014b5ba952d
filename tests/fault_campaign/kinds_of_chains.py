"""One training of many attempts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from fault_campaign.cases import Scene, kind
from fault_campaign.faulted_run import OutOfTimeError, Training
from fault_campaign.oracle import Event, Promise
from fault_campaign.references import PACE

# Long enough for so many interruptions at points of their own.
_COUNT, _LONG = 20, 24
_STEPS = 23 * _LONG


def _ask_rank(scene: Scene, training: Training) -> None:
    training.send(scene.draw.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)), scene.rank())


def _ask_launcher(scene: Scene, training: Training) -> None:
    training.send(scene.draw.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)))


def _make_file(scene: Scene, training: Training) -> None:
    scene.place.directory.stop.write_text("the time is over\n")


def _kill(scene: Scene, training: Training) -> None:
    scene.place.kill_all()


# What ends at the next step more often than what ends within a second.
_WAYS: tuple[Callable[[Scene, Training], None], ...] = (_ask_rank,) * 7 + (_ask_launcher, _make_file, _kill)


def _start(scene: Scene, *, first: bool, arguments: tuple[str, ...] = ()) -> Training:
    work = scene.setting.arguments if first else ("--resume",)
    return scene.place.begin(*work, *arguments, injected=[PACE])


def _wait_for(training: Training, step: int) -> None:
    """Until this start of the run has done a step, and the run as many."""
    begun = training.steps()
    training.wait_until(f"step {step}", lambda: training.steps() > begun and training.newest() >= step)


@kind("20 interruptions of one run", tm=1, th=1, km=1, kh=1)
def twenty_interruptions(scene: Scene) -> Promise:
    scene.change(work=("digits", "--set", f"epochs={_LONG}"))
    points = sorted(scene.draw.sample(range(2, _STEPS - 80), _COUNT))
    wrong: list[str] = []
    for number, point in enumerate(points):
        training = _start(scene, first=number == 0)
        way = scene.draw.choice(_WAYS)
        _wait_for(training, point)
        way(scene, training)
        ended, code = training.end(), 4 if way is not _kill else -signal.SIGKILL
        if ended.code != code:
            wrong.append(f"an interruption ended with exit status {ended.code}:\n{ended.printed}")
    scene.training = scene.place.begin("--resume")

    def check(events: Sequence[Event]) -> list[str]:
        starts = [event for event in events if event["event"] == "start"]
        return wrong if len(starts) == _COUNT + 1 else [*wrong, f"{len(starts)} attempts, not {_COUNT + 1}"]

    return Promise(codes=(0,), check=check, leaves=True)


@kind("4, 2 and then 3 ranks", tm=1, th=1, km=1, kh=1)
def other_ranks(scene: Scene) -> Promise:
    """The samples and their order are those of any number of ranks, and the result is one process's to rounding."""
    backend, work = scene.case.backend, scene.setting.work
    # Both changes within the first steps, where rounding is all that ranks differ by.
    for number, (ranks, step) in enumerate(((4, scene.draw.randint(3, 8)), (2, scene.draw.randint(2, 6)))):
        scene.change(ranks=ranks)
        training = _start(
            scene, first=number == 0, arguments=() if number == 0 else ("-np", str(ranks), "--oversubscribe")
        )
        training.wait_for_step(step)
        training.send(signal.SIGUSR1, 0)
        ended = training.end()
        if ended.code != 4:
            raise OutOfTimeError(f"{ranks} ranks that were asked to stop ended with {ended.code}:\n{ended.printed}")
    scene.training = scene.place.begin("--resume", "-np", "3", "--oversubscribe")
    scene.change(ranks=1, backend="single", work=work)

    def check(events: Sequence[Event]) -> list[str]:
        ranks = [event["ranks"] for event in events if event["event"] == "run"]
        return [] if ranks == [4, 2, 3] else [f"numbers of ranks: {ranks}, on {backend}"]

    return Promise(codes=(0,), equal="rounding", check=check)
