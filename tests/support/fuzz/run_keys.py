"""Replaces one value at a time in each JSON file of run directories, and asks each command about the result.

    PYTHONPATH=tests python tests/support/fuzz/run_keys.py

Each key of each file is replaced by each of some twenty values, left out, and written twice: of a run that was
stopped, of one that is done and was submitted, of an array and of a series. The manifest of a checkpoint gets its hash
anew. What a command may not do is what :mod:`support.fuzz.run_directories` says. ``--share 50`` makes one case of
fifty, others for each ``--seed``.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.cli.main import main as hpctrain
from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.schedulers.request import JobRequest
from hpctrain.control.schedulers.submission import Submission
from support.fuzz import run_directories as directories

_HUNG_SECONDS = 60
_GONE, _TWICE = object(), object()
_DEEP = json.loads("[" * 300 + "]" * 300)
VALUES: tuple[Any, ...] = (
    *(_GONE, _TWICE, None, True, 0, 1, -1, 0.5, 10**9, 2**63, 10**400, 1e308, float("nan"), float("-inf")),
    *("", "1", "x" * 10**5, "\x1b]0;x\x07\x9b2J\u202e", "<script>'$\\frac$[red]{x}%s", "\ud800", "../../outside"),
    *("n[1-999999999]", "-lead", "a\nb", [], {}, [[]], [{"a": 1}], _DEEP),
)
_STATUS = (("status",), ("status", "--json"), ("cancel",))
_REPORT = (("report", "--json"), ("report",))
_CHECKPOINTS = (("checkpoint", "list"), ("checkpoint", "verify"))
_LOGS = (("logs",), ("logs", "--job"))
_RESUME = (("run", "--resume", "--dry-run", "--run-dir"),)
# Which commands read a file; all, where it is not named here.
_READERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "state.json": (*_CHECKPOINTS, *_RESUME),
    "rank-1.json": (*_STATUS, *_REPORT, *_LOGS, *_RESUME),
    "summary.json": (*_STATUS, *_REPORT),
    "prediction.json": _REPORT,
}
_ALL = (*_STATUS, *_REPORT, *_CHECKPOINTS, *_LOGS, *_RESUME)
# By directory the files whose keys are replaced; those that are left out are as these.
_FILES = {
    "stopped": ("plan.json", "events.jsonl", "ranks/rank-1.json", "checkpoints/*/state.json"),
    "done": ("summary.json", "submission.json", "prediction.json"),
    "array": ("submission.json",),
}
# Where a key of a file of JSON is: the line, if it has many, and the keys above it.
Place = tuple[int | None, tuple[str | int, ...]]


class HungError(BaseException):
    """A command took too long."""


def _keys(value: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*above, key)
        yield from _keys(each, (*above, key))


def places(file: Path) -> Iterator[Place]:
    """All keys of a file; of events the last of each kind, and of lists the first items."""
    if file.suffix == ".json":
        yield from ((None, keys) for keys in _keys(json.loads(file.read_text())))
        return
    kinds = {json.loads(line)["event"]: number for number, line in enumerate(file.read_text().splitlines())}
    for number in kinds.values():
        yield from ((number, keys) for keys in _keys(json.loads(file.read_text().splitlines()[number])))


def replaced(text: str, place: Place, value: Any) -> str:
    """The text of a file with another value at a place."""
    number, keys = place
    lines = [text] if number is None else text.splitlines()
    whole = copy.deepcopy(json.loads(lines[number or 0]))
    holder = whole
    for key in keys[:-1]:
        holder = holder[key]
    old = holder[keys[-1]]
    if value is _GONE:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = "TWICE" if value is _TWICE else value
    changed = json.dumps(whole)
    if value is _TWICE:
        name = json.dumps(keys[-1])
        changed = changed.replace(f'{name}: "TWICE"', f"{name}: {json.dumps(old)}, {name}: {json.dumps(old)}")
    lines[number or 0] = changed
    return "\n".join(lines) + "\n"


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    if file.name == "state.json":
        file.with_name("state.sha256").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  state.json\n")


def _ask(command: Sequence[str]) -> tuple[int, str]:
    """The exit code of a command, and what is wrong with its answer; empty where nothing is."""
    sent: list[str] = []
    directories.refuse_signals(sent)
    out = StringIO()
    began = time.process_time()
    signal.alarm(_HUNG_SECONDS)
    code = 0
    try:
        with redirect_stdout(out), redirect_stderr(out):
            code = hpctrain(command)
    except HungError:
        traceback.print_exc(file=out)
        code = directories.HUNG
    except BaseException:
        traceback.print_exc(file=out)
        code = directories.FAULT
    finally:
        signal.alarm(0)
    seconds, said = time.process_time() - began, out.getvalue()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    wrong = f"sent {sent}" if sent else directories.verdict(code, seconds, used, said)
    if not wrong and len(said) > directories.MOST_CHARACTERS:
        wrong = f"printed {len(said)} characters"
    return code, f"{wrong}\n{said[-2500:]}" if wrong else ""


def _hung(number: int, frame: Any) -> NoReturn:
    raise HungError


def _restore(run: Path, base: Path) -> None:
    """Make a directory what it was, without copying its checkpoints again."""
    there = {path.relative_to(base) for path in base.rglob("*")}
    for path in sorted(run.rglob("*"), reverse=True):
        if path.relative_to(run) not in there:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for name in there:
        if (base / name).is_file() and (
            not (run / name).is_file() or (run / name).stat().st_mtime_ns != (base / name).stat().st_mtime_ns
        ):
            shutil.copy2(base / name, run / name)


def key_cases(base: Path, name: Path, place: Place, values: Sequence[Any], folder: Path) -> Iterator[str]:
    """Ask about one key's values; gives what is wrong."""
    run, outside = folder / "runs" / base.name, folder / "outside"
    text = (base / name).read_text()
    known = directories.outside_state(outside)
    for value in values:
        shown = "left out" if value is _GONE else "twice" if value is _TWICE else ascii(value)[:60]
        try:
            changed = replaced(text, place, value)
        except TypeError:
            # No item of a list can be left out by this.
            continue
        refused = False
        for command in _READERS.get(name.name, _ALL):
            # The page, whose plots take the most time by far, reads what the summary reads and is refused as that is.
            if refused and command == ("report",):
                continue
            _restore(run, base)
            with suppress(UnicodeEncodeError):
                _write(run / name, changed)
            code, wrong = _ask([*command, str(run)])
            refused = code != 0
            wrong = wrong or directories.page_verdict(run / "report.html")
            if directories.outside_state(outside) != known:
                wrong = "wrote outside"
            if wrong:
                yield f"{base.name}/{name} {place} = {shown}: hpctrain {' '.join(command)}: {wrong}"
    _restore(run, base)


def _in_child(work: Callable[[], Iterator[str]], report: Path) -> None:
    """Do the work in a process of its own, so that memory and what was cached is of its cases alone."""
    if (child := os.fork()) == 0:
        try:
            signal.signal(signal.SIGALRM, _hung)
            with report.open("a") as file:
                for each in work():
                    file.write(f"{each}\n\x00")
                    file.flush()
        except BaseException:
            with report.open("a") as file:
                file.write(f"the campaign itself: {traceback.format_exc()}\n\x00")
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        with report.open("a") as file:
            file.write(f"a command ended the process: {status}\n\x00")


def bases(trained: Path, folder: Path) -> list[Path]:
    """Directories of runs, made of one that is done."""
    folder.mkdir()
    done, stopped, array = (folder / name for name in ("done", "stopped", "array"))
    shutil.copytree(trained, done)
    directories.add_rare_events(done)
    shutil.copytree(done, stopped)
    (stopped / "summary.json").unlink()
    lines = (stopped / "events.jsonl").read_text().splitlines(keepends=True)
    (stopped / "events.jsonl").write_text("".join(lines[:-1]))
    submission = Submission(
        cluster="generic", request=JobRequest(name="digits"), jobs=("12",), submitted=1.0, host="login", folder="/"
    ).model_dump_json()
    RunDirectory(done).submission.write_text(submission)
    with redirect_stdout(StringIO()) as predicted:
        assert (
            hpctrain(["predict", "digits", "--gpu", "v100-sxm", "--gpus-per-node", "2", "--nodes", "1", "--json"]) == 0
        )
    RunDirectory(done).prediction.write_text(predicted.getvalue())
    array.mkdir()
    RunDirectory(array).submission.write_text(submission)
    shutil.copytree(trained, array / "task-1")
    return [stopped, done, array]


def campaign(trained: Path, folder: Path, share: int, seed: int, say: Callable[[str], None]) -> tuple[int, list[str]]:
    """Make one case of ``share``; gives how many keys had some, and the faults."""
    made = bases(trained, folder / "bases")
    (work := folder / "work").mkdir()
    (work / "outside").mkdir()
    (work / "outside" / "authorized_keys").write_text("ssh-ed25519 AAAA me\n")
    slurm = folder / "bin"
    slurm.mkdir()
    for program in ("squeue", "sacct", "scontrol", "scancel", "sbatch", "sinfo"):
        (slurm / program).write_text("#!/bin/sh\nexit 1\n")
        (slurm / program).chmod(0o755)
    os.environ["PATH"] = f"{slurm}:{os.environ['PATH']}"
    chance, report, keys = random.Random(seed), folder / "faults", 0
    report.touch()
    for base in made:
        shutil.copytree(base, work / "runs" / base.name)
        directories.warm_up(work / "runs" / base.name)
        _restore(work / "runs" / base.name, base)
        for file in [max(base.glob(pattern)) for pattern in _FILES[base.name]]:
            name = file.relative_to(base)
            say(f"{base.name}/{name}")
            for place in places(file):
                values = [value for value in VALUES if share == 1 or chance.randrange(share) == 0]
                if not values:
                    continue
                keys += 1
                before = report.stat().st_size
                _in_child(lambda b=base, n=name, p=place, v=values: key_cases(b, n, p, v, work), report)
                if report.stat().st_size > before:
                    say(report.read_bytes()[before:].decode(errors="replace").replace("\x00", ""))
    return keys, [each for each in report.read_text(errors="replace").split("\x00") if each.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="by default a small training of digits, on two ranks")
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-keys-") as name:
        run = options.run or directories.trained(Path(name))
        keys, faults = campaign(run, Path(name), options.share, options.seed, lambda text: print(text, flush=True))
        kinds = Counter(each.rpartition(": ")[2].partition("\n")[0] for each in faults)
        print(f"{keys} keys, {len(faults)} faults", *kinds.items(), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
