"""Starts a user's script to trace the network that it trains, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.files.disk import temporary_folder
from hpctrain.common.settings import BACKEND
from hpctrain.common.workloads.workload import Workload

# Enough for a slow disk, a large data set and a step on a CPU.
LIMIT_SECONDS = 600.0
_LAST_LINES = 12
_IN_PYTHON = "or trace the network in Python: hpctrain.trace(model, batch, loss).write(path)"
# One process on a CPU: the counts are the same on a GPU, which other work may use. Compiled code would hide its
# operators. Unbuffered output is in order with the error that ends the script.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    BACKEND.name: "single",
    "TORCH_COMPILE_DISABLE": "1",
    "PYTHONUNBUFFERED": "1",
}


def trace_script(path: Path, arguments: Sequence[str] = (), *, limit_seconds: float = LIMIT_SECONDS) -> Workload:
    """The workload of the first model that a script gives to ``ht.distribute``.

    The script runs as one process on the CPU until the optimizer's first step, which is not made.

    Args:
        limit_seconds: the limit for everything before that step.

    Raises:
        HpctrainError: the script is not there, fails, ends without such a step or takes too long, or its model is not
            of PyTorch.
    """
    require("torch")
    if not path.is_file():
        raise HpctrainError("HT-work-not-a-script", "there is no script {path}", "name a Python file", path=path)
    with temporary_folder("hpctrain-trace-", None) as folder:
        out = Path(folder) / "traced.json"
        command = [sys.executable, "-m", "hpctrain.worker.programs.trace_script", str(out), str(path.absolute())]
        # A file, because a pipe would be held by a process that the script leaves behind.
        with tempfile.TemporaryFile("w+", errors="replace", dir=folder) as printed:
            try:
                done = subprocess.run(
                    [*command, *arguments],
                    check=False,
                    env={**os.environ, **_ENVIRONMENT},
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    timeout=limit_seconds,
                )
            except subprocess.TimeoutExpired as error:
                raise HpctrainError(
                    "HT-script-no-step-in-time",
                    "{path} reached no optimizer step within {seconds:g} s on the CPU",
                    f"give it arguments for less data or a smaller batch, {_IN_PYTHON}",
                    exit_code=1,
                    path=path,
                    seconds=limit_seconds,
                ) from error
            printed.seek(0)
            return _answer(path, done.returncode, out, printed.read())


def _answer(path: Path, exit_code: int, out: Path, printed: str) -> Workload:
    if out.exists():
        answer = json.loads(out.read_text())
        if "error" in answer:
            raise HpctrainError.from_record(answer["error"]).but(before=f"{path}: ")
        return Workload.model_validate_json(json.dumps(answer["workload"]))
    if exit_code:
        end = "\n".join(printed.strip().splitlines()[-_LAST_LINES:])
        raise HpctrainError(
            "HT-script-failed-before-step",
            "{path} failed before its first optimizer step (exit {status}); what it printed at the end:\n{end}",
            f"run it by itself first: python {path}",
            exit_code=1,
            path=path,
            status=exit_code,
            end=end,
        )
    raise HpctrainError(
        "HT-script-no-optimizer-step",
        "{path} ended without an optimizer step of a model that ht.distribute got",
        f"model, optimizer = ht.distribute(model, optimizer), and a step of that optimizer; {_IN_PYTHON}",
        path=path,
    )
