"""Progress bars of rank 0 as somebody sees them: alive on a terminal, and a line a second at most in a log."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launching import AS_ROOT

SECONDS, STEPS = 4, 80
SCRIPT = f"""
import time
import keras, rich.progress, tqdm

for _ in tqdm.tqdm(range({STEPS}), desc="by tqdm"):
    time.sleep({SECONDS / STEPS})
for _ in rich.progress.track(range({STEPS}), description="by rich"):
    time.sleep({SECONDS / STEPS})
bar = keras.utils.Progbar({STEPS}, unit_name="by keras")
for step in range({STEPS}):
    time.sleep({SECONDS / STEPS})
    bar.update(step + 1, [("loss", 1.0)])
print("all three are done")
"""
# What is told of how far a bar is.
BARS = {
    "tqdm": r"^by tqdm: +(\d+)%",
    "rich": r"^by rich .*?(\d+)%",
    "keras": r"^ *(\d+)/" + str(STEPS),
}


@contextlib.contextmanager
def tmux(folder: Path, command: str) -> Iterator[list[str]]:
    """A terminal of 80 columns in which a command runs; gives the words that ask this tmux."""
    server = ["tmux", "-L", f"hpctrain-{os.getpid()}", "-f", "/dev/null"]
    environment = {**os.environ, **AS_ROOT, "TERM": "xterm-256color"}
    opened = [*server, "new-session", "-d", "-x", "80", "-y", "50", "-c", str(folder), command]
    subprocess.run(opened, check=True, env=environment, timeout=30)
    try:
        yield server
    finally:
        subprocess.run([*server, "kill-server"], check=False, timeout=30)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_bars_live_on_a_terminal_and_are_a_line_a_second_in_a_log(tmp_path: Path) -> None:
    for package in ("keras", "tensorflow", "tqdm"):
        pytest.importorskip(package)
    (tmp_path / "bars.py").write_text(SCRIPT)
    run = f"{sys.executable} -m hpctrain run bars.py -np 1 --run-dir"
    screens: list[list[str]] = []
    with (tmp_path / "log").open("wb") as log, tmux(tmp_path, f"{run} shown; sleep 600") as server:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        with subprocess.Popen(
            [*run.split(), "logged"], cwd=tmp_path, env={**os.environ, **AS_ROOT}, **streams
        ) as process:
            deadline = time.monotonic() + 200
            while not any("hpctrain report shown" in line for line in (screens[-1] if screens else [])):
                assert time.monotonic() < deadline, screens[-1]
                time.sleep(0.3)
                asked = [*server, "capture-pane", "-p"]
                screens.append(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.splitlines())
            assert process.wait(200) == 0
    # Keras colours its bar wherever it writes.
    logged = re.sub(r"\x1b\[[\d;]*m", "", (tmp_path / "log").read_text()).splitlines()
    for name, pattern in BARS.items():
        found = [[line for line in screen if re.search(pattern, line)] for screen in screens]
        assert max(map(len, found)) == 1, (name, screens[-1])
        assert len({line[0] for line in found if line}) >= SECONDS, name
        assert len(found[-1]) == 1 and re.search(rf"\b({STEPS}/|100%)", found[-1][0]), name
        lines = [line for line in logged if re.search(pattern, line)]
        # The seconds that the bar takes are more on a busy machine.
        assert 1 <= len(lines) <= 3 * SECONDS, (name, lines)
        assert re.search(rf"\b({STEPS}/|100%)", lines[-1]), (name, lines)
    assert logged.count("all three are done") == 1
    assert sum("all three are done" in line for line in screens[-1]) == 1
