"""Files of a run that cannot be read or written, or are not what they were, while the run goes on.

Whoever watches a run must not end it.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import psutil

from fault_campaign.cases import NotHereError, Scene, kind
from fault_campaign.faulted_run import INJECTED, Training
from fault_campaign.oracle import Event, Promise

_SECONDS = 3.0
# Enough to show in a launcher's memory, where it is kept as a whole.
_LONG_BYTES = 256 << 20
# A launcher has some 60 MB, and what one look at a file reads.
_MOST_MEMORY = 200 << 20

# What a watching launcher reads; the part of the path by which a call is known, and what it says of it.
_READ: Mapping[str, tuple[str, str | None]] = {
    "a rank's record": ("ranks/rank-0.json", None),
    "the events": ("events.jsonl", "warning: the events: cannot read"),
    "rank 0's output": ("logs/rank-0.log", "warning: rank 0's output: cannot read"),
    "the plan": ("plan.json", None),
}


def failing(
    scene: Scene,
    file: str,
    call: Literal["open", "read", "write"],
    number: int,
    *,
    of: Literal["launcher", "rank"] = "launcher",
    once: bool = True,
) -> tuple[dict[str, str], Path]:
    """Variables with which calls fail, and a file: they do as long as it is there.

    Raises:
        NotHereError: there is no compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise NotHereError("a preloaded library takes a C compiler")
    library = scene.library.folder / "failing_calls.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        words = [compiler, "-shared", "-fPIC", "-o", str(library), str(INJECTED / "failing_calls.c"), "-ldl"]
        subprocess.run(words, check=True, capture_output=True)
    when = Path(scene.once("fails"))
    settings = {"FILE": file, "CALL": call, "ERRNO": number, "OF": of, "WHEN": when, "ONCE": int(once)}
    return {"LD_PRELOAD": str(library), **{f"FAILING_{name}": f"{value}" for name, value in settings.items()}}, when


def watched(training: Training) -> Callable[[], list[str]]:
    """Follow the launcher's memory from now on; what is returned says whether it took too much."""
    process, most = psutil.Process(training.process.pid), [0]

    def follow() -> None:
        try:
            while True:
                most[0] = max(most[0], process.memory_info().rss)
                time.sleep(0.05)
        except psutil.Error:
            return

    threading.Thread(target=follow, daemon=True).start()
    return lambda: [f"the launcher took {most[0] >> 20} MB"] if most[0] > _MOST_MEMORY else []


def _unread(scene: Scene, call: Literal["open", "read"], number: int, what: str) -> Promise:
    file, says = _READ[what]
    once = scene.draw.random() < 0.5
    variables, when = failing(scene, file, call, number, once=once)
    training = scene.begin(**variables)
    training.wait_for_step(*scene.moment(3, 40))
    when.touch()
    time.sleep(_SECONDS)
    # Nobody has to read the plan of a run that goes on.
    unmet = once and when.exists() and what != "the plan"
    when.unlink(missing_ok=True)
    said = () if says is None else (says,)
    return Promise(codes=(0,), says=said, check=lambda events: ["nothing was read"] if unmet else [])


for _number, _what in enumerate(_READ):
    _others = ("th", "ts", "tg", "km")
    kind(f"opening {_what} fails", tm=1, **{_others[_number]: 1})(
        functools.partial(_unread, call="open", number=errno.ESTALE, what=_what)
    )
    kind(f"reading {_what} fails", **{("tm", "ts")[_number % 2]: 1})(
        functools.partial(_unread, call="read", number=errno.EIO, what=_what)
    )


def _unwritten(scene: Scene, number: int, file: str, of: Literal["launcher", "rank"], says: str) -> Promise:
    variables, when = failing(scene, file, "write", number, of=of)
    training = scene.begin(**variables)
    training.wait_for_step(*scene.moment(3, 65))
    when.touch()
    return Promise(codes=(1,), says=(says,), check=lambda events: ["nothing was written"] if when.exists() else [])


@kind("writing the events fails", tm=1, ts=1)
def events_unwritten(scene: Scene) -> Promise:
    return _unwritten(scene, errno.EIO, "events.jsonl", "rank", r"cannot write .*events\.jsonl: Input/output error")


@kind("the disk fills within an event", tm=1, km=1)
def event_cut(scene: Scene) -> Promise:
    return _unwritten(scene, errno.ENOSPC, "events.jsonl", "rank", r"no space left to write .*events\.jsonl")


@kind("writing the summary fails", tm=1, ts=1)
def summary_unwritten(scene: Scene) -> Promise:
    """Everything else is done, and a resume writes it."""
    number = scene.draw.choice((errno.EIO, errno.ENOSPC))
    return _unwritten(scene, number, ".summary.json", "launcher", r"(cannot|no space left to) write .*summary\.json")


@kind("the events are emptied", tm=1, th=1, km=1)
def emptied(scene: Scene) -> Promise:
    training = scene.begin()
    training.wait_for_step(*scene.moment(3, 40))
    os.truncate(scene.place.directory.events, 0)
    return Promise(codes=(0,), equal="state")


@kind("garbage in a rank's record", tm=1, tg=1)
def garbage(scene: Scene) -> Promise:
    training = scene.begin()
    training.wait_for_step(*scene.moment())
    scene.place.directory.rank(scene.rank()).write_bytes(scene.draw.randbytes(300))
    return Promise(codes=(0,))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(_LONG_BYTES)


_PUT: Mapping[str, Callable[[Path], None]] = {
    "a pipe": _pipe,
    "a link": _link,
    "a folder": Path.mkdir,
    "a long file": _long,
}
_PLACES: Mapping[str, str] = {
    "a rank's record": "ranks/rank-0.json",
    "the events": "events.jsonl",
    "rank 0's output": "logs/rank-0.log",
    "the plan": "plan.json",
    "the request to stop": "stop",
}


def _replaced(scene: Scene, what: str, place: str) -> Promise:
    """Something else is there, and after a while, or after the run, what was there before."""
    path, kept = scene.place.directory.path / _PLACES[place], Path(scene.once("kept"))
    stays = scene.draw.random() < 0.5
    training = scene.begin()
    training.wait_for_step(*scene.moment(3, 40))
    too_much = watched(training)
    if path.exists():
        path.rename(kept)
    _PUT[what](path)
    put = path.lstat().st_ino
    if stays:
        training.process.wait(scene.place.limit)
    else:
        time.sleep(_SECONDS)
    _put_back(path, kept, put)
    if place == "the request to stop" and what == "a long file":
        # It is one, with a long reason.
        return Promise(codes=(4,), says=("stopped as asked|saved their state",), check=lambda events: too_much())
    codes: tuple[int, ...] = (0, 1, 2) if stays and place == "the events" else (0,)
    says = (_PLACES[place],) if place == "the events" else ()
    return Promise(codes=codes, says=says, check=lambda events: too_much())


def _put_back(path: Path, kept: Path, put: int) -> None:
    if os.path.lexists(path) and path.lstat().st_ino == put:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        if kept.exists():
            kept.rename(path)


for _at, _place in enumerate(_PLACES):
    for _by, _put in enumerate(_PUT):
        kind(f"{_put} in place of {_place}", **{("tm", "ts", "tm", "th", "tg")[(_at + _by) % 5]: 1})(
            functools.partial(_replaced, what=_put, place=_place)
        )


def _poured(scene: Scene, text: str, times: int) -> Promise:
    step, _ = scene.moment()
    training = scene.begin(injected=[{"what": "pour", "rank": 0, "step": step, "text": text, "times": times}])
    too_much = watched(training)

    def check(events: list[Event]) -> list[str]:
        log = scene.place.directory.log(0)
        short = log.stat().st_size < len(text) * times
        return [*too_much(), *([f"{log.name} lacks some of it"] if short else [])]

    return Promise(codes=(0,), check=check)


@kind("100 MB of output without a new line", tm=1, ts=1)
def endless_line(scene: Scene) -> Promise:
    return _poured(scene, "x" * 1000, 100_000)


@kind("40 MB of output with carriage returns", tm=1)
def bars(scene: Scene) -> Promise:
    return _poured(scene, "\r" + "#" * 79, 500_000)
