"""One rank's work: scripts run as Python runs them, and every way to end is recorded."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan, Script, Slots, Start
from support.launching import Launch
from support.small_disks import small_disk_at


def run_rank(folder: Path, text: str, *arguments: str, launcher: str = "auto") -> tuple[int, dict[str, Any], str]:
    """Run a script as the only rank, as a launch does; returns exit status, record and log."""
    script = folder / "script.py"
    script.write_text(text)
    directory = RunDirectory(folder / "run")
    host = socket.gethostname()
    plan = Plan(
        script=Script(path=script, arguments=arguments),
        backend="single",
        ranks=1,
        hosts=(Slots(host=host, slots=1),),
        start=Start(launcher=launcher),
        threads_per_rank=1,
    )
    directory.create(plan)
    command = [sys.executable, "-P", "-m", "hpctrain.worker.train", str(directory.path)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    status = subprocess.run(command, check=False, cwd=folder, env=environment, timeout=120).returncode
    return status, json.loads(directory.rank(0).read_text()), directory.log(0).read_text()


def test_a_rank_of_an_attempt_before_leaves_the_records_and_events_of_the_next_alone(tmp_path: Path) -> None:
    """A host that was cut off may still run it, and reach the run directory."""
    others = {"rank": 0, "host": "another", "pid": 1, "started": 1.0, "status": "running"}
    text = f"""
import json, pathlib
from hpctrain.common.run.events.kinds import StallEvent
from hpctrain.worker.comm.stalls import reports
record = pathlib.Path("run/ranks/rank-0.json")
reports.record(StallEvent(rank=1, host="n", iteration=1, waiting_for="before", seconds=1.0))
record.write_text(json.dumps({others}))
reports.record(StallEvent(rank=1, host="n", iteration=1, waiting_for="after", seconds=1.0))
raise SystemExit("too late")
"""
    code, record, log = run_rank(tmp_path, text)
    assert (code, record) == (1, others)
    assert "too late" in log
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(event)["waiting_for"] for event in events] == ["before"]


def test_a_single_rank_has_no_need_of_srun(tmp_path: Path) -> None:
    text = "import hpctrain as ht; raise SystemExit(ht.init().size + 6)"
    status, record, log = run_rank(tmp_path, text, launcher="srun-none")
    assert (status, record["exit_code"]) == (7, 7), log


def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    """Its own name and arguments, its folder on the path, a module that can be pickled and spawned again."""
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    status, record, log = run_rank(
        tmp_path,
        """
import multiprocessing, os, pickle, subprocess, sys
import beside

class Point:
    pass

def square(x):
    return x * x + beside.VALUE

if __name__ == "__main__":
    here, name = os.path.split(__file__)
    print(sys.argv[1:], os.path.basename(sys.argv[0]), name, sys.path[0] == here)
    assert isinstance(pickle.loads(pickle.dumps(Point())), Point)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3]))
    subprocess.run(["echo", "child"], check=True)
    sys.exit()
""",
        "--lr",
        "a b",
    )
    assert (status, record["status"]) == (0, "done"), log
    arguments, *rest = log.splitlines()
    assert arguments.startswith("['--lr', 'a b'] ") and arguments.endswith("script.py True")
    assert rest == ["[14]", "child"]
    assert record["ended"] > record["started"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "status", "error", "logged"),
    [
        ("import sys; sys.exit(7)", 7, ("SystemExit", "exit status 7"), ""),
        ("import sys; sys.exit(256)", 1, ("SystemExit", "exit status 256"), ""),
        ("import sys; sys.exit('no data')", 1, ("SystemExit", "no data"), "no data\n"),
        (
            "import hpctrain; raise hpctrain.HpctrainError('HT-of-test', 'm', 'h')",
            2,
            ("HpctrainError", "m\n  h"),
            "hpctrain: error[HT-of-test]: m\n  h\n",
        ),
        ("raise KeyboardInterrupt", 1, ("KeyboardInterrupt", ""), "KeyboardInterrupt"),
        ("def f(:", 1, ("SyntaxError", "invalid syntax (script.py, line 1)"), "SyntaxError: invalid syntax"),
        ("1 / 0", 1, ("ZeroDivisionError", "division by zero"), "Traceback (most recent call last):\n  File "),
    ],
)
def test_how_a_script_failed(tmp_path: Path, text: str, status: int, error: tuple[str, str], logged: str) -> None:
    code, record, log = run_rank(tmp_path, text)
    assert code == status
    assert (record["status"], record["exit_code"]) == ("failed", status)
    assert (record["error"]["type"], record["error"]["message"]) == error
    assert logged in log
    assert "rank.py" not in log


@pytest.mark.parametrize(
    ("script", "status", "recorded"),
    [
        ("threading.Thread(target=time.sleep, args=(600,)).start()\nos._exit(0)", 0, "done"),
        ("try: os._exit(0)\nfinally: print('not reached')", 0, "done"),
        ("child = os.fork()\nif not child: os._exit(0)\nos.waitpid(child, 0)\nraise ValueError", 1, "failed"),
        ("threading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(600)", 0, "running"),
        ("os._exit(3)", 3, "running"),
        ("import atexit\natexit.register(os._exit, 0)\nraise ValueError", 0, "failed"),
    ],
)
def test_os_exit_with_status_0_on_the_main_thread_is_a_good_end(
    tmp_path: Path, script: str, status: int, recorded: str
) -> None:
    code, record, log = run_rank(tmp_path, f"import os, threading, time\nprint('said')\n{script}")
    assert (code, record["status"]) == (status, recorded)
    assert "said" in log and "not reached" not in log


def test_a_crash_leaves_its_trace(tmp_path: Path) -> None:
    code, record, log = run_rank(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (code, record["status"]) == (-11, "running")
    assert "Segmentation fault" in log


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_disk_at(tmp_path / "disk", "256k") as place:
        yield place


@pytest.mark.long
def test_a_disk_that_fills_up_during_the_run(hpctrain: Launch, tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "fill.py").write_text("while True:\n    print('x' * 1000)\n")
    result = hpctrain("run", "fill.py", "--run-dir", str(small_disk / "run"))
    assert result.returncode == 1
    said = "\n".join(line for line in result.stdout.splitlines() if not line.startswith("xxx"))
    assert "rank 0" in said
    assert "[Errno 28]" in said and "--run-dir" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "status", "said"),
    [
        ("", "failed", "exit status 4, which says that it was stopped, but nobody asked it to stop"),
        ("os.kill(os.getpid(), signal.SIGUSR2)", "resumable", None),
        ("open('run/stop', 'w').close()", "resumable", None),
    ],
)
def test_exit_status_4_is_for_a_rank_that_was_asked(tmp_path: Path, before: str, status: str, said: str | None) -> None:
    _, record, _ = run_rank(tmp_path, f"import os, signal, sys\n{before}\nsys.exit(4)")
    assert (record["status"], record["error"] and record["error"]["message"]) == (status, said)
