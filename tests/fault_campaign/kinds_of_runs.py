"""Runs of many attempts, whose directory is deleted, or that are cancelled."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence

from fault_campaign.cases import Scene, kind
from fault_campaign.faulted_run import BIN, OutOfTimeError, Training
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


@kind("20 interruptions of one run", "tm th km kh")
def twenty_interruptions(scene: Scene) -> Promise:
    scene.change(work=("digits", "--set", f"epochs={_LONG}"))
    points = sorted(scene.draw.sample(range(2, _STEPS - 80), _COUNT))
    wrong: list[str] = []
    for number, point in enumerate(points):
        work = scene.setting.arguments if number == 0 else ("--resume",)
        training = scene.place.begin(*work, injected=[PACE])
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


def _wait_for(training: Training, step: int) -> None:
    """Until this start of the run has done a step, and the run as many."""
    begun = training.steps()
    training.wait_until(f"step {step}", lambda: training.steps() > begun and training.newest() >= step)


def of_ranks(wanted: Sequence[int]) -> Callable[[Sequence[Event]], list[str]]:
    """A check that the attempts had these numbers of ranks."""

    def check(events: Sequence[Event]) -> list[str]:
        ranks = [event["ranks"] for event in events if event["event"] == "run"]
        return [] if ranks == list(wanted) else [f"numbers of ranks: {ranks}, not {wanted}"]

    return check


def stop(training: Training, step: int, delay: float = 0.0) -> None:
    """Ask the ranks to stop after a step, which they have to do in good order."""
    training.wait_for_step(step, delay)
    training.send(signal.SIGTERM)
    ended = training.end()
    if ended.code != 4:
        raise OutOfTimeError(f"ranks that were asked to stop ended with {ended.code}:\n{ended.printed}")


@kind("4, 2 and then 3 ranks", "tm th km kh")
def other_ranks(scene: Scene) -> Promise:
    """The samples and their order are those of any number of ranks, and the result is one process's to rounding."""
    work = scene.setting.work
    scene.change(ranks=4)
    # Both changes within the first steps, where rounding is all that ranks differ by.
    stop(scene.place.begin(*scene.setting.arguments, injected=[PACE]), scene.draw.randint(3, 8))
    stop(scene.place.begin("--resume", "-np", "2", injected=[PACE]), scene.draw.randint(2, 6))
    scene.training = scene.place.begin("--resume", "-np", "3", "--oversubscribe")
    scene.change(ranks=1, backend="single", work=work)
    return Promise(codes=(0,), equal="rounding", check=of_ranks((4, 2, 3)))


@kind("the run directory deleted", "tm th ts")
def deleted(scene: Scene) -> Promise:
    """Nothing is left to go on with: it is begun anew."""
    training = scene.begin()
    training.wait_for_step(*scene.moment(3, 40))
    path = scene.place.directory.path
    # Twice, because what a rank was just writing may have kept the folder.
    shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)
    # What does not end is found to hang later.
    with contextlib.suppress(subprocess.TimeoutExpired):
        training.process.wait(training.place.limit)
    left = sorted(str(each.relative_to(path)) for each in path.rglob("*"))
    shutil.rmtree(path, ignore_errors=True)
    said = ("No such file or directory",)
    return Promise(codes=(1,), says=said, check=lambda events: [f"made again: {left}"] if left else [])


@kind("cancelled", "tm th ts tg km")
def cancelled(scene: Scene) -> Promise:
    training = scene.begin()
    training.wait_for_step(*scene.moment(3, 40))
    command = [str(BIN / "hpctrain"), "cancel", "run"]
    done = subprocess.run(
        command, cwd=scene.place.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    wrong = [] if done.returncode == 0 and "resume with: " in done.stdout + done.stderr else [f"cancel: {done}"]
    return Promise(codes=(4,), says=("cancelled; all ranks saved their state and left",), check=lambda events: wrong)
