"""Who is asked to stop, by what, and what a second SIGTERM does; each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.common.run import stopping


def python(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    imports = (
        "import os, signal, sys, time\nfrom pathlib import Path\nfrom hpctrain.common.run.stopping import this_process"
    )
    program = f"{imports}\n{text}"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["USR1", "USR2", "TERM", "INT"])
def test_a_signal_asks_and_does_not_end(name: str) -> None:
    result = python(
        f"this_process.listen('{name}', '{name}'); print(this_process.asked(look=False))\n"
        f"os.kill(os.getpid(), signal.SIG{name}); print(this_process.asked(look=False))"
    )
    assert (result.returncode, result.stdout) == (0, f"None\nSIG{name}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_one_ends_a_process_even_inside_a_c_call(number: signal.Signals) -> None:
    program = (
        "from hpctrain.common.run.stopping import this_process\n"
        f"this_process.listen('{number.name[3:]}'); print(flush=True)\n"
        "while not this_process.asked(look=False): pass\n"
        "print(flush=True); import ctypes; libc = ctypes.CDLL(None)\n"
        # As a collective: its own loop begins to wait again after each signal's handler.
        "while True: libc.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(number)
            process.stdout.readline()
            time.sleep(0.2)
            process.send_signal(number)
            assert process.wait(timeout=100) == -number
        finally:
            process.kill()


def test_a_task_of_srun_outlasts_repeats() -> None:
    result = python(
        "this_process.outlast_repeats(); this_process.listen('TERM', 'INT')\n"
        "for _ in range(3): os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(this_process.asked(look=False), flush=True); os.kill(os.getpid(), signal.SIGINT)\n"
        "os.kill(os.getpid(), signal.SIGINT); print('not reached')"
    )
    assert (result.returncode, result.stdout) == (-signal.SIGINT, "SIGTERM\n")


def test_a_forked_worker_is_ended_by_the_first() -> None:
    result = python(
        "this_process.listen('TERM', 'USR2')\n"
        "ready, say = os.pipe()\n"
        "child = os.fork()\n"
        "if not child: os.write(say, b'.'); time.sleep(30); os._exit(0)\n"
        "os.read(ready, 1); os.kill(child, signal.SIGTERM); print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert result.stdout == "-15\n"


def test_the_file_asks_only_who_looks(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    file.write_text("the time is over\n")
    result = python(
        "this_process.watch(Path(sys.argv[1]))\n"
        "print(this_process.asked(look=False)); print(this_process.asked(look=True))",
        str(file),
    )
    assert result.stdout == "None\nthe time is over\n"


@pytest.mark.parametrize(("replace", "says"), [(False, "first"), (True, "second")])
def test_the_first_request_stays_unless_it_is_replaced(tmp_path: Path, replace: bool, says: str) -> None:
    file = tmp_path / "stop"
    assert stopping.ask(file, "first")
    assert stopping.ask(file, "second", replace=replace) == replace
    assert stopping.reason_in(file) == says
    assert file.stat().st_mode & 0o777 == 0o600
