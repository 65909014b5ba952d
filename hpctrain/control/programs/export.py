"""Starts the export of a model from a checkpoint, in a process that may import its framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from pydantic import ValidationError

from hpctrain.common.checkpoints.find import require_whole
from hpctrain.common.checkpoints.manifest import read_manifest
from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.run.plan import Plan

# Frameworks and checkpoints may have to be read from slow disks.
_LIMIT_SECONDS = 1800.0
_LAST_LINES = 12
# By framework: the suffixes of the files that it writes.
_SUFFIXES = {"torch": (".pt", ".safetensors"), "keras": (".keras",)}


def export(checkpoint: Path, out: Path) -> int:
    """Write the model in a checkpoint to ``out``; returns how many parameters it has.

    Raises:
        HpctrainError: the checkpoint is damaged (exit code 3), of a script, or of another framework than ``out`` is
            for; ``out`` is there, or cannot be written; the framework is not installed.
    """
    require_whole(checkpoint)
    _require_fit(checkpoint, out)
    paths = [str(checkpoint.absolute()), str(out.absolute())]
    # Writing a model needs no GPU, and other work may use it.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}
    module = ("-P", "-m", "hpctrain.worker.train.export", *paths)
    environment = {**os.environ, **quiet}
    return _parameters(run_program(sys.executable, *module, seconds=_LIMIT_SECONDS, environment=environment), out)


def _require_fit(checkpoint: Path, out: Path) -> None:
    framework = _framework(checkpoint)
    suffixes = _SUFFIXES[framework]
    if out.suffix not in suffixes:
        raise HpctrainError(
            "HT-format-unknown",
            "{out} has no format of {framework}, in which {checkpoint} holds a model",
            f"name it {' or '.join(str(out.with_suffix(suffix)) for suffix in suffixes)}",
            out=out,
            framework=framework,
            checkpoint=checkpoint,
        )
    if out.exists():
        raise HpctrainError(
            "HT-output-exists", "{out} is there already", "name another file, or remove that one", out=out
        )
    require("train", framework)


def _framework(checkpoint: Path) -> str:
    try:
        plan = Plan.model_validate_json(json.dumps(read_manifest(checkpoint).plan))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise HpctrainError(
            "HT-checkpoint-other-version",
            "{checkpoint} is of another version of hpctrain: its plan's {key!r} is unknown here",
            exit_code=1,
            checkpoint=checkpoint,
            key=where,
        ) from error
    if plan.recipe is None or plan.framework is None:
        raise HpctrainError(
            "HT-checkpoint-not-of-recipe", "{checkpoint} does not belong to a recipe's model", checkpoint=checkpoint
        )
    return plan.framework


def _parameters(done: subprocess.CompletedProcess[str], out: Path) -> int:
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        end = "\n".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
        raise HpctrainError(
            "HT-export-failed",
            "{out} was not written (exit {status}); what was printed at the end:\n{end}",
            exit_code=1,
            out=out,
            status=done.returncode,
            end=end,
        ) from error
    if "error" in answer:
        raise HpctrainError.from_record(answer["error"])
    return int(answer["parameters"])
