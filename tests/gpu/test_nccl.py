"""Several ranks over NCCL, which share a GPU where there are fewer: numbers, misuse, checkpoints and faults.

Over Gloo on a machine without a GPU, so that the checks do not rot.
"""

from __future__ import annotations

import json
import math
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import kept, read_events
from hpctrain.common.run.records import read_records
from support.comers import cells
from support.gpu_runs import BACKEND, FLOAT32, GPUS, PARALLEL, differences, launch, of_make_gpu, start
from support.imported_programs import imported
from support.interrupted_runs import interrupted
from support.pages import ROOT

pytestmark = of_make_gpu

ON_GPU = Path(__file__).with_name("programs") / "on_gpu.py"
OF_RANKS = ROOT / "tests" / "mpi" / "programs"
# What ranks that wait for one that is stopped may take, and when they name it.
_TIMEOUT, _STALL = 60, 10


# A GPU draws its random numbers otherwise.
_DRAWN = "start_from_rank_0"
on_every_backend = pytest.mark.parametrize("backend", [BACKEND, *(["mpi"] if GPUS else [])])


def on_gpu(folder: Path, program: str, ranks: int, *words: str, backend: str = BACKEND, seconds: float = 200) -> None:
    """Run a program of tests/mpi with what it makes on a GPU where there is one."""
    where = ("--run-dir", f"run-{ranks}", "--", str(OF_RANKS / program))
    launch(folder, "run", str(ON_GPU), *start(ranks, backend), *where, *words, seconds=seconds)


@on_every_backend
def test_scripts_equal_one_process(tmp_path, note, backend):
    """Optimizers, clipping, accumulation, unused, tied and sparse parameters, loss scaling, narrow types."""
    program = imported(OF_RANKS / "torch_equivalence.py")
    cases = [name for name in program.CASES if name != "compiled"]
    on_gpu(tmp_path, "torch_equivalence.py", 2, str(tmp_path / "out"), f"{backend}={','.join(cases)}", backend=backend)
    results = [np.load(tmp_path / f"out-{backend}-{rank}.npz") for rank in range(2)]
    rows = [
        {
            "case": name,
            "largest difference": float(np.abs(results[0][name] - program.reference(name)).max()),
            "allowed": program.TOLERANCE.get(name, 1e-10),
            "ranks are equal": bool(np.array_equal(results[0][name], results[1][name])),
        }
        for name in cases
    ]
    note(backend=backend, cases=rows)
    assert not [row for row in rows if not row["largest difference"] <= row["allowed"] or not row["ranks are equal"]]


@on_every_backend
def test_misuse_is_noticed_as_on_a_cpu(tmp_path, note, backend):
    """What it should be is in tests/mpi/test_torch_behaviour.py."""
    on_gpu(tmp_path, "torch_behaviour.py", 2, backend, str(tmp_path / "here"), backend=backend)
    over = "mpi" if backend == "mpi" else "gloo"
    program = str(OF_RANKS / "torch_behaviour.py")
    launch(tmp_path, "run", program, *start(2, "gloo"), "--", over, str(tmp_path / "cpu"))
    different = {}
    for rank in range(2):
        found = json.loads((tmp_path / f"here-{backend}-{rank}.json").read_text())
        wanted = json.loads((tmp_path / f"cpu-{over}-{rank}.json").read_text())
        for name, value in wanted.items():
            if name != _DRAWN and not alike(found.get(name), value):
                different[f"{name} on rank {rank}"] = {backend: found.get(name), "cpu": value}
    note(backend=backend, checks=len(wanted), different=different)
    assert len(wanted) > 10 and not different


def alike(one: Any, other: Any) -> bool:
    """Equal, or almost, or the same words where a checksum, an address or a random number is among them."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-4)
    if isinstance(one, str) and isinstance(other, str):
        return _words(one) == _words(other)
    return bool(one == other)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]{4,}", re.sub(r"\b[0-9a-f]{6,}\b|cuda", "", text))


def test_small_programs_equal_one_process(tmp_path, note):
    """Worker processes cannot use the GPU of the process that started them."""
    programs = imported(OF_RANKS / "whole_batches.py").programs("draws", "calls")
    names = [name for name in programs if "worker" not in name and not name.startswith(("compiled", "counts"))]
    for ranks in (1, 2):
        on_gpu(tmp_path, "whole_batches.py", ranks, str(tmp_path / f"of-{ranks}"), "draws,calls", *names, seconds=280)
    alone = json.loads((tmp_path / "of-1-0.json").read_text())
    wrong = {}
    for rank in range(2):
        found = json.loads((tmp_path / f"of-2-{rank}.json").read_text())
        close = {name: np.allclose(each["values"], alone[name]["values"], 1e-9, 1e-9) for name, each in found.items()}
        wrong |= {name: found[name] for name in names if found[name]["refused"] or not close[name]}
    note(backend=BACKEND, programs=len(names), wrong=wrong)
    assert not wrong


_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
_MESHES = {
    2: [
        *("fsdp", "fsdp_all", "fsdp_scaler", "fsdp_zero1", "fsdp_zero2", "fsdp_bfloat16", "fsdp_float32"),
        *("replicas_recompute", "tp", "tp_all", "tp_scaler", "tp_sequence", "tp_bare", "pp_scaler", "pp_recompute"),
        *(f"pp_{name}{features}" for name in _SCHEDULES for features in ("", "_all")),
    ],
    4: [
        *("fsdp_all", "hsdp", "hsdp_all", "hsdp_scaler", "hsdp_zero1", "tp_fsdp", "tp_fsdp_all", "tp_replicas_all"),
        *("pp4", "pp_fsdp_1f1b", "pp_fsdp_interleaved_1f1b_all", "pp_replicas_1f1b", "pp_tp_1f1b"),
    ],
}


@pytest.mark.parametrize("ranks", _MESHES)
def test_meshes_equal_one_process(tmp_path, note, ranks):
    arguments = (str(tmp_path / "out"), f"{BACKEND}={','.join(_MESHES[ranks])}")
    limit = {"HPCTRAIN_TIMEOUT": str(_TIMEOUT)}
    done = launch(tmp_path, "run", str(PARALLEL), *start(ranks), "--", *arguments, seconds=400, status=None, **limit)
    rows = differences(tmp_path / "out", ranks, _MESHES[ranks])
    note(backend=BACKEND, ranks=ranks, cases=rows)
    assert done.returncode == 0, done.stdout
    assert not [row for row in rows if not row["largest difference"] <= row["allowed"]]


def test_a_divided_checkpoint_resumes_on_other_meshes(tmp_path, note):
    """dp_shard 2, then tp 2 x dp_shard 2 on four ranks, then tp 2: the losses of one process throughout."""
    plain = imported(OF_RANKS / "gpt.py")
    for part, (ranks, case) in enumerate([(2, "dp_shard=2:5"), (4, "tp=2,dp_shard=2:8"), (2, "tp=2:12")]):
        arguments = ("--run-dir", f"run-{part}", "--", str(tmp_path / "out"), f"run:{case}")
        launch(tmp_path, "run", str(OF_RANKS / "gpt_on_meshes.py"), *start(ranks), *arguments, seconds=100)
    _, wanted, _ = plain.reference("uneven")
    events = kept(read_events(tmp_path / "out-run.jsonl"))
    losses = [event.loss for event in events if event.event == "step"]
    apart = float(np.abs(np.array(losses) - wanted).max())
    note(backend=BACKEND, steps=len(losses), largest_difference_of_a_loss=apart)
    assert len(losses) == 12 and apart <= FLOAT32


_DIGITS = ("digits", "--framework", "torch", "--set", "checkpoints.every_steps=4", "--set", "guard.every=1")


def hurt(folder: Path, number: signal.Signals) -> dict[str, Any]:
    """Send a signal to rank 1 in the middle of a run; what became of the run, and of its resumption."""
    began = 0.0

    def send(launcher: int) -> None:
        nonlocal began
        process = read_records(RunDirectory(folder / "run"))[1].process()
        assert process
        process.send_signal(number)
        began = time.monotonic()

    status, output = interrupted(folder, 8, [*_DIGITS, *start(2), "--restarts", "0"], send)
    seconds = time.monotonic() - began
    failure = json.loads((folder / "run" / "summary.json").read_text())["failure"]
    records = read_records(RunDirectory(folder / "run")).values()
    running = [record.pid for record in records if psutil.pid_exists(record.pid)]
    again = launch(folder, "run", "--resume", "--run-dir", "run", seconds=120, status=None)
    resumed = json.loads((folder / "run" / "summary.json").read_text())["status"]
    return {
        "status": status,
        "seconds": round(seconds, 1),
        "code": failure["code"],
        "rank": failure.get("rank"),
        "rank 1 is named": "rank 1" in output,
        "left running": running,
        "resumed": resumed if again.returncode == 0 else again.stdout[-2000:],
        "said": output.splitlines()[-5:],
    }


def test_a_killed_rank_ends_the_run_and_it_resumes(tmp_path, note):
    """Whether the failure is that of the killed rank, or of one that lost its connection first, is in the report."""
    found = hurt(tmp_path, signal.SIGKILL)
    note(backend=BACKEND, **found)
    assert (found["left running"], found["resumed"]) == ([], "done")


def test_a_stopped_rank_ends_the_run_in_time_and_it_resumes(tmp_path, note, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", str(_TIMEOUT))
    monkeypatch.setenv("HPCTRAIN_STALL", str(_STALL))
    found = hurt(tmp_path, signal.SIGSTOP)
    stalls = [event.record() for event in read_events(tmp_path / "run" / "events.jsonl") if event.event == "stall"]
    note(backend=BACKEND, **found, stalls=[json.dumps(each)[:300] for each in stalls[:2]])
    assert (found["left running"], found["resumed"]) == ([], "done")
    assert found["seconds"] < _TIMEOUT + 60


def test_lightning_fabric_accelerate_and_the_trainer(tmp_path, note):
    """Each takes the GPUs by itself where there are some."""
    cells.require("lightning_fit")
    script = str(cells.SCRIPTS / "frameworks.py")
    output = launch(tmp_path, "run", script, *start(2), "--run-dir", "run", **cells.OF_FRAMEWORKS).stdout
    losses, wanted = cells.all_losses(output), 4 * [*cells.alone("torch").values()]
    apart = float(np.abs(np.subtract(losses, wanted)).max()) if len(losses) == len(wanted) else np.inf
    note(backend=BACKEND, largest_difference_of_a_loss=apart, groups=re.findall("group of.*", output))
    assert "group of 2 over" in output
    assert apart < 1e-5
