"""Mutates the directory of a run, as a disk, a bug or somebody else may have left it, and asks each command about it.

    python tests/support/fuzz/run_directories.py RUN SEED CASES

A command may refuse such a directory. It may not end in a traceback, send a signal, write outside of the directory,
print what controls a terminal, write markup of others into the page or numbers into JSON that JSON has not, print or
write more than two million characters apart from logs, or take more than two seconds of processor time or half a
gigabyte. Each case is one seed. Links and devices are put in place of files too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.cli.main import main as hpctrain
from support.fuzz.outside_texts import RARE

MOST_SECONDS, MOST_MB = 2.0, 500
# A text of 10^6 characters in a file is in its JSON too. Logs are printed whole.
MOST_CHARACTERS = 2 * 10**6
# What a hung command gets before it is ended.
_HUNG_SECONDS = 120
FAULT, HUNG = 99, -1

_NUMBERS = (0, -1, 1, 10**9, 10**18, 2**63, 10**400, 1e308, float("nan"), float("inf"), 1e-320, 0.5)
_TERMINAL = "\x1b]0;x\x07\x9b2J\u202e"
_MARKUP = "<script>'$\\frac$[red]{x}%s"
_TEXTS = ("", "n[1", "n[1-999999999]", _TERMINAL, _MARKUP, "x" * 10**6, "../../outside", "-lead", "a\nb", "\ud800")
_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("status",),
    ("status", "--json"),
    ("report",),
    ("report", "--json"),
    ("checkpoint", "list"),
    ("checkpoint", "verify"),
    ("logs",),
    ("cancel",),
    ("run", "--resume", "--dry-run", "--run-dir"),
)
# What no terminal should get, besides the styles of tables, which are not written to a pipe.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")

# A number as a line of indented JSON has it, which strict readers refuse.
_NO_JSON = re.compile(r'^ *("[^"]*": )?-?(NaN|Infinity),?$', re.MULTILINE)

_JSON = (".json", ".jsonl")

Mutation = Callable[[random.Random, Path, Path], None]


def _is_small(path: Path) -> bool:
    """Whether it is a file that can be read here: an earlier mutation may have made another of it."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 2**26


def _some_file(chance: random.Random, run: Path) -> Path:
    small = [path for path in sorted(run.rglob("*")) if _is_small(path)]
    # What is read first is mutated most.
    known = [path for path in small if path.suffix in (".json", ".jsonl", ".log")]
    return chance.choice(known if known and chance.random() < 0.8 else small or [run / "plan.json"])


def _cut(chance: random.Random, run: Path, outside: Path) -> None:
    path = _some_file(chance, run)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(chance.choice((0, size // 2, max(0, size - 1), size + 4096)))


def _gone(chance: random.Random, run: Path, outside: Path) -> None:
    path = chance.choice(sorted(run.rglob("*")))
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _value(chance: random.Random, run: Path, outside: Path) -> None:
    """Another value somewhere in JSON: extreme, of another type, a process of somebody else's."""
    path = chance.choice([each for each in sorted(run.rglob("*.*")) if each.suffix in _JSON and _is_small(each)])
    text = path.read_text(errors="replace")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    for _ in range(chance.choice((1, 1, 5))):
        number = chance.randrange(len(lines) or 1)
        with contextlib.suppress(ValueError, IndexError):
            value = json.loads(lines[number])
            _change(chance, value)
            lines[number] = json.dumps(value)
    path.write_text("\n".join([*lines, ""]))


def _change(chance: random.Random, value: Any) -> None:
    keys = list(value) if isinstance(value, dict) else list(range(len(value)) if isinstance(value, list) else ())
    if not keys:
        return
    key = chance.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and chance.random() < 0.7:
        _change(chance, value[key])
        return
    deep = json.loads("[" * 400 + "]" * 400)
    others: tuple[Any, ...] = (None, [], {}, [["wide"] * 3] * 1000, deep, True, os.getpid(), os.getppid(), 1)
    value[key] = chance.choice((*_NUMBERS, *_TEXTS, *others))
    if isinstance(value, dict) and chance.random() < 0.1:
        value[chance.choice(_TEXTS) or "new"] = value.pop(key)


def _odd(chance: random.Random, run: Path, outside: Path) -> None:
    """Something else in place of a file, or of one that a command writes or looks for."""
    names = ("report.html", "stop", "submission.json", "lock", "ranks/rank-7.json", "logs/rank-9.log")
    path = _some_file(chance, run) if chance.random() < 0.6 else run / chance.choice(names)
    path.unlink(missing_ok=True)
    match chance.randrange(8):
        case 0:
            os.mkfifo(path)
        case 1:
            path.symlink_to(chance.choice(("/dev/zero", str(path))))
        case 2:
            path.symlink_to(outside / chance.choice(("authorized_keys", "not-there")))
        case 3:
            path.mkdir()
        case 4:
            with path.open("wb") as file:
                # All of a log is printed, if that is asked for.
                file.truncate(10**6 if path.suffix == ".log" else 20 * 10**9)
        case 5:
            path.write_bytes(chance.randbytes(1000))
        case 6:
            path.write_text(json.dumps({"jobs": ["1"], "pid": os.getppid(), "seeds": [10**9]}))
        case _:
            path.hardlink_to(outside / "authorized_keys")


MUTATIONS: tuple[Mutation, ...] = (_cut, _gone, _value, _value, _odd)


def mutate(seed: int, run: Path, outside: Path) -> tuple[str, ...]:
    """Change a copy of a run's directory; returns the command to ask about it."""
    chance = random.Random(seed)
    for mutation in chance.choices(MUTATIONS, k=chance.choice((1, 1, 1, 2, 4))):
        # An earlier one may have taken away what this one would change.
        with contextlib.suppress(OSError, IndexError):
            mutation(chance, run, outside)
    return (*chance.choice(_COMMANDS), str(run))


def refuse_signals(sent: list[str]) -> None:
    for module, name in ((os, "kill"), (os, "killpg"), (signal, "pidfd_send_signal")):

        def send(*arguments: Any, name: str = name) -> None:
            # Signal 0 asks whether a process is there.
            if arguments[1]:
                sent.append(f"{name}{arguments}")

        setattr(module, name, send)


def ask(command: Sequence[str]) -> tuple[int, float, float, str]:
    """Run a command in a process of its own: exit code, seconds of processor time, MB, and what it printed."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape", newline="") as out:
        if (child := os.fork()) == 0:
            code = FAULT
            try:
                code = _ask_here(command, out)
            finally:
                out.flush()
                os._exit(code)
        status, used = _wait(child)
        out.seek(0)
        return status, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, out.read()


def _ask_here(command: Sequence[str], out: io.TextIOBase) -> int:
    sent: list[str] = []
    refuse_signals(sent)
    faulthandler.enable(out.fileno())
    # Where a command takes far too much, the others need not suffer.
    resource.setrlimit(resource.RLIMIT_DATA, (4 * 2**30, 4 * 2**30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**28, 2**28))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = hpctrain(command)
        except BaseException:
            traceback.print_exc(file=out)
            return FAULT
    if sent:
        out.write(f"signals were sent: {sent}\n")
        return FAULT
    return code


def _wait(child: int) -> tuple[int, resource.struct_rusage]:
    def end(*_: Any) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end)
    signal.alarm(_HUNG_SECONDS)
    _, status, used = os.wait4(child, 0)
    signal.alarm(0)
    return (HUNG if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)), used


def outside_state(outside: Path) -> list[tuple[str, bytes, int]]:
    """What lies outside of the run."""
    return [(path.name, path.read_bytes(), path.lstat().st_mode) for path in sorted(outside.rglob("*"))]


def cases(run: Path, seeds: Sequence[int], folder: Path) -> Iterator[tuple[int, Sequence[str], str]]:
    """Try the seeds; gives those at which something is wrong, the command, and what."""
    outside = folder / "outside"
    for seed in seeds:
        shutil.rmtree(outside, ignore_errors=True)
        outside.mkdir()
        (outside / "authorized_keys").write_text("ssh-ed25519 AAAA me\n")
        copy = folder / "runs" / "run"
        shutil.rmtree(folder / "runs", ignore_errors=True)
        shutil.copytree(run, copy)
        command = mutate(seed, copy, outside)
        known = outside_state(outside)
        code, seconds, mb, said = ask(command)
        wrong = verdict(code, seconds, mb, said) or page_verdict(copy / "report.html")
        if len(said) > MOST_CHARACTERS and command[0] != "logs":
            wrong = f"printed {len(said)} characters"
        if outside_state(outside) != known or {each.name for each in folder.iterdir()} != {"outside", "runs"}:
            wrong = "wrote outside of the directory"
        yield seed, command, f"{wrong}\n{said[-3000:]}" if wrong else ""


def verdict(code: int, seconds: float, mb: float, said: str) -> str:
    if code == HUNG:
        return f"was killed, or hung for {_HUNG_SECONDS} s"
    if code == FAULT or "Traceback (most recent call last)" in said:
        return "ended in a traceback, or sent a signal"
    if seconds > MOST_SECONDS or mb > MOST_MB:
        return f"took {seconds:.1f} s and {mb:.0f} MB"
    if found := _CONTROLS.search(said):
        return f"printed {found[0]!r}"
    return "printed what is no JSON" if _NO_JSON.search(said) else ""


def page_verdict(page: Path) -> str:
    if not _is_small(page) or not (text := page.read_bytes()).startswith(b"<!doctype"):
        return ""
    if len(text) > MOST_CHARACTERS:
        return f"wrote a page of {len(text)} bytes"
    return "wrote markup of others" if b"<script>'" in text else ""


def add_rare_events(run: Path) -> None:
    """Write an event of each other kind between those of a run."""
    place = run / "events.jsonl"
    lines = place.read_text().splitlines(keepends=True)
    moment = json.loads(lines[-1])["time"]
    rare = [json.dumps({"time": moment, **event}) + "\n" for event in RARE]
    place.write_text("".join([*lines[:-1], *rare, lines[-1]]))


def warm_up(run: Path) -> None:
    """Import what the commands import, of which each case then has a copy for nothing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for command in _COMMANDS:
            hpctrain([*command, str(run)])


def main(trained: str, first: str, count: str) -> int:
    faults = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-runs-") as name:
        run = Path(shutil.copytree(trained, Path(name) / "run"))
        add_rare_events(run)
        warm_up(run)
        (folder := Path(name) / "cases").mkdir()
        for seed, command, wrong in cases(run, range(int(first), int(first) + int(count)), folder):
            if wrong:
                faults += 1
                print(f"seed {seed}: hpctrain {' '.join(command[:-1])}: {wrong}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
