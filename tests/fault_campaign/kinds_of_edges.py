"""What is around a run: its directory, and who cancels it."""

from __future__ import annotations

import shutil
import subprocess

from fault_campaign.cases import Scene, kind
from fault_campaign.faulted_run import BIN, Training
from fault_campaign.oracle import Promise


def _wait(training: Training) -> None:
    """For the end, if it comes; what does not end is found to hang later."""
    try:
        training.process.wait(training.place.limit)
    except subprocess.TimeoutExpired:
        return


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
        says=("No such file or directory",),
        check=lambda events: [f"made again: {left}"] if left else [],
    )


@kind("cancelled", tm=1, th=1, ts=1, tg=1, km=1)
def cancelled(scene: Scene) -> Promise:
    training = scene.begin()
    training.wait_for_step(*scene.moment(3, 40))
    done = subprocess.run(
        [str(BIN / "hpctrain"), "cancel", "run"],
        cwd=scene.place.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scene.place.limit,
    )
    wrong = [] if done.returncode == 0 and "resume with: " in done.stdout else [f"cancel: {done}"]
    return Promise(codes=(4,), says=("cancelled; all ranks saved their state and left",), check=lambda events: wrong)
