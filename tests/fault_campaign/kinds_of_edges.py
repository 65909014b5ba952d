"""What is around a run: its directory, what it is resumed from, its forks, its streams, other runs, who cancels it."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fault_campaign.cases import NotHereError, Scene, kind
from fault_campaign.faulted_run import BIN, Ended, OutOfTimeError, Place, Training
from fault_campaign.kinds_of_files import began_at, checkpoints, step_of
from fault_campaign.oracle import Event, Promise, read_lines
from fault_campaign.references import PACE

_SCRIPT = Path(__file__).parent / "forking_script.py"


def shell(redirection: str) -> tuple[str, ...]:
    """What executes a command with its streams as a shell has them."""
    return ("sh", "-c", f'exec "$@" {redirection}', "sh")


# What a run is resumed from.


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


@kind("the newest checkpoint gone", tm=1, th=1, ts=1, km=1)
def newest_gone(scene: Scene) -> Promise:
    before, newest = checkpoints(scene.stopped())[-2:]
    shutil.rmtree(newest)
    return Promise(codes=(0,), says=(newest.name,), check=began_at(step_of(before)))


@kind("events.jsonl gone before a resume", tm=1, ts=1)
def events_gone(scene: Scene) -> Promise:
    """The checkpoint is enough to go on, and what nothing tells of any more is said."""
    run = scene.stopped()
    (run / "events.jsonl").unlink()
    newest = step_of(checkpoints(run)[-1])
    return Promise(
        codes=(0,),
        says=(rf"warning: \S*events\.jsonl is lost, and with it the record of the steps up to {newest}",),
        equal="state",
        check=began_at(newest),
    )


@kind("a script changed before its resume", tm=1, tg=1)
def script_changed(scene: Scene) -> Promise:
    scene.change(work=(str(_SCRIPT),))
    own = Path(shutil.copy(_SCRIPT, scene.place.folder / "script.py"))
    training = scene.begin_as("run", *replace(scene.setting, work=(str(own),)).arguments)
    events = scene.place.directory.events
    training.wait_until("step 20", lambda: events.exists() and events.read_bytes().count(b'"event": "log"') >= 20)
    training.send(signal.SIGUSR2)
    _require(training.end(), 4)
    with own.open("a") as file:
        file.write("# another one\n")
    scene.training = scene.place.begin("--resume")
    return Promise(codes=(0,), says=(r"warning: .*script\.py",))


def _require(ended: Ended, code: int) -> None:
    if ended.code != code:
        raise OutOfTimeError(f"it ended with {ended.code}, not {code}:\n{ended.printed}")


# Its directory.


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


# Its forks.


def _forked(scene: Scene, ways: str) -> Promise:
    scene.change(work=(str(_SCRIPT),))
    scene.begin(FORKS=ways)
    return Promise(codes=(0,))


for _number, _ways in enumerate(("exit", "exception", "pool", "loader")):
    kind(f"a rank of a script forks: {_ways}", tm=1, **{("tg", "th")[_number % 2]: 1})(
        functools.partial(_forked, ways=_ways)
    )


# Its streams.


def _without(scene: Scene, redirection: str) -> Promise:
    """A run goes on without what it cannot print."""
    scene.begin(through=shell(redirection))
    return Promise(codes=(0,))


for _name, _redirection, _where in (
    ("stdout is closed", ">&-", ("tm", "ts")),
    ("stderr is closed", "2>&-", ("tm", "ts")),
    ("a full disk behind stdout and stderr", ">/dev/full 2>&1", ("tm", "kh")),
):
    kind(_name, **dict.fromkeys(_where, 1))(functools.partial(_without, redirection=_redirection))


# Others.


@kind("two runs with torchrun", tg=2)
def two_torchruns(scene: Scene) -> Promise:
    other = Place(folder=scene.place.folder / "other", limit=scene.place.limit, mark=scene.place.mark)
    other.folder.mkdir()
    arguments = (*scene.setting.arguments, "--launcher", "torchrun")
    beside = other.begin(*arguments, injected=[PACE])
    scene.begin("--launcher", "torchrun")
    code = beside.process.wait(scene.place.limit)
    printed = beside.printed()
    return Promise(codes=(0,), check=lambda events: [f"the other exited {code}:\n{printed}"] if code else [])


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


@kind("another's process in a stopped run's events, and cancelled", tm=1, ts=1)
def foreign_launcher(scene: Scene) -> Promise:
    run = scene.stopped()
    events, process = run / "events.jsonl", _bystander(scene)
    text = events.read_bytes()
    lines = [_named(event, process.pid) for event in read_lines(events) if event["event"] != "end"]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "summary.json").unlink()
    done = cancel(scene)
    wrong = _still_there(process, done)
    events.write_bytes(text)
    return Promise(codes=(0,), check=lambda events: wrong)


def _named(event: Event, pid: int) -> Event:
    return {**event, "host": socket.gethostname(), "pid": pid} if event["event"] == "start" else event


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


# What a host lacks.


def _unshared(prepare: str) -> tuple[str, ...]:
    """What executes a command with mounts of its own.

    Raises:
        NotHereError: that is not allowed.
    """
    through = ("unshare", "-m", "sh", "-c", f'{prepare} && exec "$@"', "sh")
    if shutil.which("unshare") is None or subprocess.run([*through, "true"], capture_output=True).returncode:
        raise NotHereError("mounts of its own take root")
    return through


@kind("/dev/shm is tiny", tm=1, th=1)
def tiny_shared(scene: Scene) -> Promise:
    scene.begin(through=_unshared("mount -t tmpfs -o size=64k tmpfs /dev/shm"))
    return Promise(codes=(1, 2, 4), says=("/dev/shm",))


@kind("TMPDIR is read-only", tm=1, ts=1)
def read_only_temporary(scene: Scene) -> Promise:
    folder = scene.place.folder / "tmp"
    folder.mkdir()
    prepare = f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"
    scene.begin(through=_unshared(prepare), TMPDIR=str(folder))
    return Promise(codes=(1, 2, 4), says=("TMPDIR",))
