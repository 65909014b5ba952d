"""The scripts in the README and on the pages run as they are printed."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys

import pytest

from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import StoppedEvent
from support.interrupted_runs import ask, interrupted
from support.pages import scripts

SCRIPTS = {name: text for name, text in scripts().items() if name in ("digits_torch.py", "digits_keras.py")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs_on_two_ranks_as_printed(hpctrain, tmp_path, name):
    pytest.importorskip("torch" if "torch" in name else "keras")
    (tmp_path / name).write_text(SCRIPTS[name])
    result = hpctrain("run", name, "-np", "2")
    assert result.returncode == 0, result.stdout
    assert _accuracy(result.stdout) > 0.95


@pytest.mark.long
@pytest.mark.parametrize(("name", "lines"), [("digits_torch.py", 4), ("digits_keras.py", 5)])
def test_script_without_the_marked_lines_needs_no_hpctrain(tmp_path, name, lines):
    pytest.importorskip("torch" if "torch" in name else "keras")
    printed = SCRIPTS[name].splitlines()
    plain = [line for line in printed if not line.endswith("  #")]
    assert len(printed) - len(plain) == lines
    (tmp_path / "plain.py").write_text("import sys\nsys.modules['hpctrain'] = None\n" + "\n".join(plain))
    output = subprocess.run(
        [sys.executable, "plain.py"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=180
    ).stdout
    assert _accuracy(output) > 0.95


@pytest.mark.parametrize(
    ("name", "state"),
    [("digits_resume.py", "state.pt"), pytest.param("digits_resume_sharded.py", "state-5-0", marks=pytest.mark.long)],
)
def test_script_stopped_and_resumed_on_other_ranks_has_the_numbers_of_one_that_was_not(hpctrain, tmp_path, name, state):
    torch = pytest.importorskip("torch")
    (tmp_path / name).write_text(scripts()[name])
    whole = hpctrain("run", name, "-np", "1", "--run-dir", "first")
    assert whole.returncode == 0, whole.stdout
    expected = _model(torch, tmp_path / state)
    for each in ("newest", "state.pt"):
        (tmp_path / each).unlink(missing_ok=True)
    if (tmp_path / state).is_dir():
        shutil.rmtree(tmp_path / state)
    run = ["-np", "2", "--backend", "gloo"]
    status, output = interrupted(tmp_path, 40, [name, *run], lambda pid: ask(tmp_path / "run", pid, signal.SIGTERM))
    assert status == 4, output
    stopped = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, StoppedEvent)]
    # In the middle of one of the five epochs of 29 batches.
    assert stopped[-1].iteration % 29 and stopped[-1].iteration < 145
    resumed = hpctrain("run", "--resume", "--run-dir", "run", "-np", "3", "--oversubscribe")
    assert resumed.returncode == 0, resumed.stdout
    assert _accuracy(resumed.stdout) == pytest.approx(_accuracy(whole.stdout), abs=0.002)
    told = "its data begin again"
    assert told not in resumed.stdout
    found = _model(torch, tmp_path / state)
    assert found.keys() == expected.keys() and len(found) == 4
    for key in found:
        torch.testing.assert_close(found[key], expected[key], atol=2e-4, rtol=0)


def _model(torch, state):
    if state.is_dir():
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(state, file := state.with_name("whole.pt"))
        state = file
    return torch.load(state, weights_only=True)["model"]


def _accuracy(output: str) -> float:
    found = re.search(r"^accuracy (\d\.\d+)$", output, flags=re.MULTILINE)
    assert found, output
    return float(found[1])
