"""What is around a run: its directory, the plan that it is resumed from, and who cancels it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from fault_campaign.cases import Scene, kind
from fault_campaign.faulted_run import BIN, Training
from fault_campaign.oracle import Promise


@kind("a digit of plan.json changed", tm=1, ts=1, km=1)
def plan_changed(scene: Scene) -> Promise:
    plan = scene.stopped() / "plan.json"
    text = plan.read_text()
    seed = json.loads(text)["recipe"]["seed"]
    changed = text.replace(f'"seed": {seed}', f'"seed": {seed + 1}', 1)
    assert changed != text
    plan.write_text(changed)
    says = ("was changed by something else than hpctrain",)
    return Promise(codes=(2,), says=says, mends=lambda: plan.write_text(text) and None)


def _begin_and_move(scene: Scene) -> tuple[Training, Path]:
    training = scene.begin()
    training.wait_for_step(*scene.moment(3, 40))
    moved = scene.place.folder / "moved"
    scene.place.directory.path.rename(moved)
    return training, moved


def _wait(training: Training) -> None:
    """For the end, if it comes; what does not end is found to hang later."""
    try:
        training.process.wait(training.place.limit)
    except subprocess.TimeoutExpired:
        return


@kind("the run directory renamed", tm=1, th=1, ts=1, kh=1)
def renamed(scene: Scene) -> Promise:
    training, moved = _begin_and_move(scene)
    _wait(training)
    at_the_old_name = scene.place.directory.path.exists()
    if not at_the_old_name:
        moved.rename(scene.place.directory.path)
    return Promise(
        codes=(4,),
        says=(rf"was moved to \S*{moved.name} while the run used it",),
        check=lambda events: ["something was made at the old name"] if at_the_old_name else [],
    )


@kind("another folder in place of the run directory", tm=1, tg=1, km=1)
def exchanged(scene: Scene) -> Promise:
    training, moved = _begin_and_move(scene)
    path = scene.place.directory.path
    path.mkdir()
    _wait(training)
    strange = sorted(each.name for each in path.rglob("*"))
    shutil.rmtree(path)
    moved.rename(path)
    return Promise(
        codes=(4,),
        says=(rf"was moved to \S*{moved.name} while the run used it",),
        check=lambda events: [f"in the other folder: {strange}"] if strange else [],
    )


@kind("the run directory deleted", tm=1, th=1, ts=1)
def deleted(scene: Scene) -> Promise:
    """Nothing is left to go on with: it is begun anew."""
    training = scene.begin()
    training.wait_for_step(*scene.moment(3, 40))
    path = scene.place.directory.path
    shutil.rmtree(path, ignore_errors=True)
    # What a rank was just writing may have kept the folder.
    shutil.rmtree(path, ignore_errors=True)
    _wait(training)
    left = sorted(str(each.relative_to(path)) for each in path.rglob("*"))
    shutil.rmtree(path, ignore_errors=True)
    return Promise(
        codes=(1,),
        says=("was deleted while the run used it",),
        check=lambda events: [f"made again: {left}"] if left else [],
    )


def cancel(scene: Scene) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "hpctrain"), "cancel", "run"],
        cwd=scene.place.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scene.place.limit,
    )


@kind("cancelled", tm=1, th=1, ts=1, tg=1, km=1)
def cancelled(scene: Scene) -> Promise:
    training = scene.begin()
    training.wait_for_step(*scene.moment(3, 40))
    done = cancel(scene)
    wrong = [] if done.returncode == 0 and "resume with: " in done.stdout else [f"cancel: {done}"]
    return Promise(codes=(4,), says=("cancelled; all ranks saved their state and left",), check=lambda events: wrong)


def _bystander(scene: Scene) -> subprocess.Popen[bytes]:
    """A process of the same user's that has nothing to do with the run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], cwd=scene.place.folder)
    scene.place.undone.callback(process.wait)
    scene.place.undone.callback(process.kill)
    return process


def _still_there(process: subprocess.Popen[bytes], done: Any) -> list[str]:
    return [] if process.poll() is None else [f"a process that is not of the run has ended: {done}"]


@kind("another's process in a running run's records, and cancelled", tm=1, tg=1)
def foreign_ranks(scene: Scene) -> Promise:
    """That process lives. All ranks save their state, but rank 1 does not write its end into a record of another's."""
    # A later process than the rank would not be taken for it.
    process = _bystander(scene)
    training = scene.begin()
    training.wait_for_step(*scene.moment(3, 40))
    path = scene.place.directory.rank(1)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "pid": process.pid}))
    done = cancel(scene)
    return Promise(
        codes=(4,),
        says=(r"rank 1 on \S+ ended before its work was done",),
        check=lambda events: _still_there(process, done),
    )
