"""Makes a folder of shards, of images or of text, part by part, and goes on with one that was begun."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error, require_empty
from hpctrain.common.files.regular import read_regular
from hpctrain.common.files.whole import remove_leftovers, write_whole
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.run.directory import read_model
from hpctrain.common.shards.manifest import StoredFile

# The built-in map, or a function like it that uses other processes.
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
RECORDS = "records"

Settings = TypeVar("Settings", bound=FrozenModel)
Record = TypeVar("Record", bound=FrozenModel)
Task = TypeVar("Task")


def begin(path: Path, wanted: Settings, moved: Collection[str], command: Callable[[Settings, Path], str]) -> None:
    """Make a folder for these settings, or go on with it.

    Args:
        path: the file of the settings in the folder.
        moved: settings that may have changed, because the same source is at another place.
        command: makes the command that goes on with the folder.

    Raises:
        HpctrainError: the folder holds other files, was begun with other settings, or cannot be written.
    """
    folder = path.parent
    try:
        if path.exists():
            begun = read_model(path, type(wanted), links=True)
            names = [name for name in type(wanted).model_fields if getattr(begun, name) != getattr(wanted, name)]
            if others := [name for name in names if name not in moved]:
                raise HpctrainError(
                    "HT-shards-begun-otherwise",
                    "{folder} was begun with another source or other settings: {settings} differ",
                    f"{command(begun, folder)} goes on with it; choose another folder for this one, or remove that one",
                    folder=folder,
                    settings="images or texts" if "listing" in others else " and ".join(others),
                )
        else:
            require_empty(folder)
        write_model(path, wanted)
        (folder / RECORDS).mkdir(exist_ok=True)
        _clean(folder)
    except OSError as error:
        raise disk_error(error, folder, "choose another folder") from error


def make_all(
    folder: Path,
    make: Callable[[Task], tuple[Record, bool]],
    tasks: Sequence[Task],
    run: Map,
    say: Callable[[str], None],
) -> list[Record]:
    """The records of all tasks, each of which tells whether it had to be done."""
    records: list[Record] = []
    made = 0
    # Progress is said after each tenth.
    lines = {len(tasks) * tenth // 10 for tenth in range(1, 11)}
    for record, fresh in run(make, tasks):
        records.append(record)
        made += fresh
        if len(records) in lines:
            say(f"{len(records)} of {len(tasks)} shards are done, {made} of them made now")
    # Left by processes that were killed while the others went on.
    _clean(folder)
    return records


def _clean(folder: Path) -> None:
    for place in (folder, folder / RECORDS):
        remove_leftovers(place)


def read_record(path: Path, model: type[Record], limit: int) -> Record | None:
    """The record of a part that is done; None if there is no valid one."""
    try:
        return model.model_validate_json(read_regular(path, limit))
    except (OSError, ValidationError):
        return None


def all_there(folder: Path, files: Iterable[StoredFile]) -> bool:
    """Whether files are there, with the bytes that were written."""
    return not any(file.fault(folder) for file in files)


def write_model(path: Path, model: FrozenModel) -> None:
    """Write settings or a manifest as JSON."""
    write_whole(path, (model.model_dump_json(indent=2) + "\n").encode())
