"""The files of one run, by name; ``docs/first-run.md`` says what each holds."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError

from hpctrain.common.errors import HpctrainError, InvalidValueError, joined
from hpctrain.common.files.disk import disk_error, reading
from hpctrain.common.files.printable import dotted, json_text, printable, shell_word
from hpctrain.common.files.regular import make_folder, private, read_regular
from hpctrain.common.files.whole import remove_leftovers, write_whole

Model = TypeVar("Model", bound=BaseModel)

# The limit for a plan, a record or a summary: the plan of ten thousand ranks has about one megabyte.
_MOST_BYTES = 2**24
# How many faults a message lists.
_MOST_FAULTS = 20
_CODES = {
    "missing": "HT-file-missing-key",
    "extra_forbidden": "HT-file-unknown-key",
    "json_invalid": "HT-file-not-json",
}


# Below the ports that Linux and Kubernetes assign.
_FIRST_PORT, _PORTS = 20000, 10000

# Where `run` and `submit` make run directories unless they are told where. Scripts write to and delete `runs`, the
# default of TensorBoard's SummaryWriter(), so it is another name.
RUNS = Path("hpctrain-runs")


def port_of(path: Path) -> int:
    """A port for what the processes of a run start by themselves, which nothing else is likely to use.

    All need the same one before they can communicate, and two runs on one host need different ones. So it is a hash of
    the absolute path of the run's directory.
    """
    return _FIRST_PORT + zlib.crc32(bytes(path)) % _PORTS


class _Within:
    """The path of a file or folder of a run, from its directory's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """One run's directory. Making the object touches nothing."""

    path: Path

    plan: ClassVar = _Within("plan.json")
    events: ClassVar = _Within("events.jsonl")
    summary: ClassVar = _Within("summary.json")
    checkpoints: ClassVar = _Within("checkpoints")
    # While it is there, the ranks are asked to write a checkpoint and leave. The launcher makes it at a signal, and
    # removes it when it begins an attempt; `hpctrain cancel` makes it for a job.
    stop: ClassVar = _Within("stop")
    script: ClassVar = _Within("job.sh")
    submission: ClassVar = _Within("submission.json")
    verdict: ClassVar = _Within("verify.json")
    report: ClassVar = _Within("report.html")
    tensorboard: ClassVar = _Within("tensorboard")
    wandb: ClassVar = _Within("wandb")
    logs: ClassVar = _Within("logs")
    # The beginning of the names of PyTorch's files, which end in the rank.
    flight_recorder: ClassVar = _Within("logs/flight-recorder-rank-")
    # The identity of the MLflow run that a script has begun.
    mlflow_run: ClassVar = _Within("mlflow-run")
    ranks: ClassVar = _Within("ranks")
    code: ClassVar = _Within("code")
    code_diff: ClassVar = _Within("code.diff")

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def rank(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank}.json"

    def create(self, plan: BaseModel) -> None:
        """Make the directory, readable by its owner only, with its folders and its plan."""
        text = plan_text(plan)
        try:
            make_folder(self.path)
            # If several runs start in one directory, only one of them can create this file.
            with open(self.plan, "xb", opener=private) as file:
                try:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                    make_folder(self.logs)
                    make_folder(self.ranks)
                except OSError:
                    # Half a plan would be taken for a run, which neither goes on nor makes room for another.
                    self.plan.unlink(missing_ok=True)
                    raise
        except FileExistsError as error:
            if Path(error.filename) != self.plan:
                raise disk_error(error, self.path) from error
            raise HpctrainError(
                "HT-run-directory-taken",
                "{path} already holds a run",
                "--resume continues it; choose another place with --run-dir, or remove that directory",
                path=self.path,
            ) from error
        except OSError as error:
            raise disk_error(error, self.path) from error

    def begin_attempt(self, plan: BaseModel) -> None:
        """Replace the plan by ``plan``, and remove the files about how the last attempt ended."""
        write_whole(self.plan, plan_text(plan), private=True)
        try:
            for stale in (self.stop, self.summary, *self.ranks.glob("rank-*.json")):
                stale.unlink(missing_ok=True)
            self._keep_dumps()
            # Left by processes that were killed while they wrote; nothing else writes between two attempts.
            remove_leftovers(self.path)
            remove_leftovers(self.ranks)
        except OSError as error:
            raise disk_error(error, self.path) from error

    def _keep_dumps(self) -> None:
        """Move the flight recorder's dumps out of the next attempt's way: nobody may have looked at them yet."""
        dumps = [*self.logs.glob(f"{self.flight_recorder.name}*")]
        if dumps:
            folder = self.logs / "flight-recorder-before"
            shutil.rmtree(folder, ignore_errors=True)
            make_folder(folder)
            for dump in dumps:
                dump.replace(folder / dump.name)


def plan_text(plan: BaseModel) -> bytes:
    """The content of ``plan.json``."""
    try:
        return f"{plan.model_dump_json(indent=2)}\n".encode()
    except PydanticSerializationError as error:
        raise HpctrainError(
            "HT-plan-not-utf8",
            "an option holds text that is not UTF-8, and plan.json can hold no other",
            "rename the file that it names, or give the option another value",
        ) from error


def default_directory(title: str) -> Path:
    """The directory of a run for which none was named."""
    # Slurm gives the others a meaning in paths of logs, and a name with a slash would be a path.
    name = Path(title.translate(dict.fromkeys(map(ord, "%\\\0"), "-"))).stem
    return RUNS / f"{name or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"


def new_directory(path: Path) -> RunDirectory:
    """Make a directory of that name, with a number appended if it already exists."""
    number, free = 1, path
    while True:
        try:
            make_folder(free, exist_ok=False)
            return RunDirectory(free)
        except FileExistsError:
            number += 1
            free = path.with_name(f"{path.name}-{number}")
        except OSError as error:
            raise disk_error(error, free) from error


def resume_command(directory: RunDirectory, *options: str) -> str:
    """The command that resumes a run: for one that was submitted, the command that submits it again.

    Args:
        options: for ``hpctrain run``; with any, the run goes on where the command is typed.
    """
    if options or not directory.submission.exists():
        return " ".join([f"hpctrain run --resume --run-dir {shell_word(directory.path)}", *map(shlex.quote, options)])
    with contextlib.suppress(HpctrainError):
        if command := read_model(directory.submission, _Submitted).resume:
            return printable(command)
    return f"sbatch --chdir={shell_word(directory.path)} {shell_word(directory.script)}"


class _Submitted(BaseModel):
    resume: str | None = None


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader finds the old or the new file whole, even after a crash of the machine."""
    write_whole(path, f"{json_text(value, indent=2)}\n".encode(), private=True)


def read_model(path: Path, model: type[Model], *, links: bool = False) -> Model:
    """Read a JSON file and check it.

    Raises:
        HpctrainError: it is not there, not JSON, or not what ``model`` describes; names the file and the key.
    """
    with reading(path):
        content = read_regular(path, _MOST_BYTES, links=links)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise model_error(
            error, path, "the file is damaged, or of another version: restore it, or run again"
        ) from error


def model_error(error: ValidationError, path: str | Path, hint: str) -> HpctrainError:
    """What a model refuses in a JSON file, by its keys."""
    errors = error.errors(include_url=False)
    faults = [_fault(fault, str(path)) for fault in errors[:_MOST_FAULTS]]
    return joined(faults, hint, more=len(errors) - len(faults))


def _fault(fault: ErrorDetails, where: str) -> HpctrainError:
    key = dotted(fault["loc"])
    raised = fault.get("ctx", {}).get("error")
    # A file that is no JSON has no key to name.
    before = f"{where}: {key}: " if key else f"{where}: "
    if isinstance(raised, InvalidValueError):
        return raised.at(where=where, key=key).but(before=before)
    code = _CODES.get(fault["type"], "HT-file-value")
    return HpctrainError(code, "{problem}", where=where, key=key, problem=fault["msg"]).but(before=before)
