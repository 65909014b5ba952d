"""``hpctrain checkpoint``: list, verify and export checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import AsJson
from hpctrain.common.checkpoints.find import GONE, missing, newest_whole, verify
from hpctrain.common.checkpoints.layout import MANIFEST, checkpoint_path, iterations
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import reading
from hpctrain.common.run.directory import RunDirectory
from hpctrain.report.output import answer, answer_json, print_table, tell

_DAMAGED = (
    "hpctrain run --resume skips damaged ones; where none is intact, restore one, or start with another --run-dir"
)

app = typer.Typer(add_completion=False, no_args_is_help=True, help="See, check and export the checkpoints of a run.")


def _named(text: str) -> Path:
    """The path that was given; for the word ``last`` the directory of the last run."""
    from hpctrain.control.schedulers.find_run import LAST, last_run

    return last_run() if text == LAST else Path(text)


RunOrCheckpoint = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|CHECKPOINT|last",
        help="A run's directory, a folder in its checkpoints/, or the last run in hpctrain-runs/.",
        parser=_named,
    ),
]


@app.command("list")
def list_checkpoints(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR|last", help="The directory of a run, or the last run in hpctrain-runs/.", parser=_named
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints, and which one --resume would use; only that one's hashes are compared."""
    from hpctrain.report.checkpoints import checkpoint_rows, checkpoint_table

    rows = checkpoint_rows(RunDirectory(run_dir))
    if as_json:
        answer_json({"checkpoints": [row.model_dump(mode="json") for row in rows]})
    elif rows:
        print_table(checkpoint_table(rows))
    else:
        tell(f"hpctrain: {run_dir} has no checkpoint yet")


@app.command("verify")
def verify_checkpoints(target: RunOrCheckpoint, as_json: AsJson = False) -> None:
    """Check the length and hash of every file of a checkpoint, or of all checkpoints of a run. Exits 3 on any fault.

    A checkpoint that a run's events tell of, and that is gone, is a fault too, unless the run deleted it by its rules.
    """
    gone = [] if _is_checkpoint(target) else _missing(target)
    faults_of = {path: verify(path) for path in _paths(target, gone)} | {path: [f"{path} is {GONE}"] for path in gone}
    faulty = any(faults_of.values())
    if as_json:
        rows = [{"path": str(path), "faults": faults} for path, faults in faults_of.items()]
        answer_json({"status": "failed" if faulty else "ok", "checkpoints": rows})
        if faulty:
            raise typer.Exit(3)
        return
    for path, faults in faults_of.items():
        answer(f"{path}: {'missing' if path in gone else 'damaged' if faults else 'ok'}")
    if faulty:
        lines = "\n".join(fault for faults in faults_of.values() for fault in faults)
        raise HpctrainError("HT-checkpoint-damaged", "{lines}", _DAMAGED, exit_code=3, lines=lines)


@app.command()
def export(
    source: RunOrCheckpoint,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="OUT.pt or OUT.safetensors: a state_dict for PyTorch; OUT.keras: a model."),
    ],
) -> None:
    """Export the model of a checkpoint, or of a run's newest, to a file that its framework loads without hpctrain."""
    from hpctrain.cli.output_files import require_place
    from hpctrain.control.programs.export import export as write

    require_place(out)
    checkpoint = source if _is_checkpoint(source) else _newest(source)
    answer(f"{out}: {write(checkpoint, out)} parameters of {checkpoint}")


def _is_checkpoint(path: Path) -> bool:
    with reading(path, "name a run directory that you may read"):
        return (path / MANIFEST).exists() or (path.is_dir() and path.name.startswith(("step-", "damaged-step-")))


def _paths(target: Path, gone: Sequence[Path]) -> list[Path]:
    """The checkpoint itself, or those of a run.

    Raises:
        HpctrainError: the run has none, and none is ``gone``.
    """
    if _is_checkpoint(target):
        return [target]
    folder = _folder(target)
    paths = [checkpoint_path(folder, iteration) for iteration in iterations(folder)]
    if not (paths or gone):
        raise HpctrainError("HT-checkpoint-none", "{target} has no checkpoint", exit_code=3, target=target)
    return paths


def _missing(run_dir: Path) -> list[Path]:
    """The checkpoints of a run that are gone, the oldest first."""
    from hpctrain.control.resuming.attempts import run_events

    folder = _folder(run_dir)
    try:
        return [checkpoint_path(folder, iteration) for iteration in missing(folder, run_events(RunDirectory(run_dir)))]
    except HpctrainError as error:
        tell(f"hpctrain: which checkpoints there should be is not known: {error.message}")
        return []


def _newest(run_dir: Path) -> Path:
    folder = _folder(run_dir)
    newest = newest_whole(folder)
    for path in _missing(run_dir):
        tell(f"hpctrain: {path} is {GONE}")
    for path, fault in newest.damaged:
        tell(f"hpctrain: {path} is damaged and was skipped: {fault}")
    if not newest.iteration:
        raise HpctrainError(
            "HT-checkpoint-none-intact",
            "{path} has no intact checkpoint",
            "" if newest.damaged else "a script saves its model by itself; a run of a recipe makes checkpoints",
            exit_code=3 if newest.damaged else 2,
            path=run_dir,
        )
    return checkpoint_path(folder, newest.iteration)


def _folder(run_dir: Path) -> Path:
    from hpctrain.report.checkpoints import require_checkpoints

    return require_checkpoints(RunDirectory(run_dir))
