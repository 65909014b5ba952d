"""Makes a folder of tokens from text files, with the same bytes for any number of processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error, require_empty
from hpctrain.common.files.locks import locked
from hpctrain.common.files.regular import read_regular, sha256
from hpctrain.common.files.whole import remove_leftovers, write_whole
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.run.directory import read_model
from hpctrain.common.shards.manifest import MANIFEST, SplitName
from hpctrain.common.shards.processes import Map
from hpctrain.common.shards.text.documents import Span, divide, documents, list_files, listing_digest
from hpctrain.common.shards.text.manifest import (
    SETTINGS,
    TOKEN,
    TextManifest,
    TextSettings,
    TokenFile,
    TokenSplit,
    command,
)
from hpctrain.common.shards.text.tokenizer import BYTES, Tokenizer, open_tokenizer

RECORDS = "records"
# The limit for a record, which has a line for each of two files.
_MOST_RECORD_BYTES = 1 << 16
_SPLITS: tuple[SplitName, ...] = ("train", "val")


class Preparation(FrozenModel):
    """Which folder of tokens to make, and from what.

    Attributes:
        sources: files and folders of text.
        tokenizer: ``bytes``, or the path of a ``tokenizer.json``.
        separator: the token between documents; ``bytes`` ignores it.
        validation_share: the share of the documents that are set apart, between 0 and 1.
        seed: decides which documents are set apart.
        part_bytes: text that one process turns into a shard at once.
    """

    sources: tuple[Path, ...]
    folder: Path
    tokenizer: str
    separator: str = "<|endoftext|>"
    validation_share: float = 0.0005
    seed: int = 0
    part_bytes: int = 64 << 20


class PartRecord(FrozenModel):
    """``DIR/records/NUMBER.json``: a part that is done."""

    train: TokenFile
    val: TokenFile


@dataclass(frozen=True, kw_only=True)
class PartTask:
    """The settings of one part; it is sent to other processes."""

    folder: Path
    number: int
    spans: tuple[Span, ...]
    settings: TextSettings

    @property
    def record(self) -> Path:
        return self.folder / RECORDS / f"{self.number:06}.json"

    def path(self, split: SplitName) -> Path:
        """The path of a part's tokens."""
        return self.folder / f"{split}-{self.number:06}.bin"


def prepare_text(preparation: Preparation, run: Map, say: Callable[[str], None]) -> TextManifest:
    """Make the folder, or its missing and damaged parts; the manifest comes last.

    Args:
        run: does the work, its results in order.
        say: is called with lines of progress.

    Raises:
        HpctrainError: a source or the tokeniser cannot be read, the folder is of another source or other settings,
            another process works in it, a split has no document, or the disk is full.
    """
    files = list_files(preparation.sources, say)
    settings = TextSettings(
        sources=tuple(str(source.absolute()) for source in preparation.sources),
        listing=listing_digest(files),
        tokenizer_file=BYTES if preparation.tokenizer == BYTES else str(Path(preparation.tokenizer).absolute()),
        separator=preparation.separator,
        tokenizer=open_tokenizer(preparation.tokenizer, preparation.separator).settings,
        validation_share=preparation.validation_share,
        seed=preparation.seed,
        part_bytes=preparation.part_bytes,
    )
    folder = preparation.folder
    parts = divide(files, preparation.part_bytes)
    tasks = [PartTask(folder=folder, number=number, spans=part, settings=settings) for number, part in enumerate(parts)]
    say(f"{len(files)} files of {sum(file.size for file in files) / 1e6:.3g} MB, {len(tasks)} parts")
    with locked(folder, seconds=0):
        _begin(folder, settings)
        _work(tasks, run, say)
        # Left by executors that were killed while the others went on.
        for place in (folder, folder / RECORDS):
            remove_leftovers(place)
        return _finish(folder, settings, tasks)


def _begin(folder: Path, wanted: TextSettings) -> None:
    """Make the folder for these settings, or go on with it."""
    path = folder / SETTINGS
    try:
        if path.exists():
            _require_same(folder, read_model(path, TextSettings, links=True), wanted)
        else:
            require_empty(folder)
        write_whole(path, (wanted.model_dump_json(indent=2) + "\n").encode())
        (folder / RECORDS).mkdir(exist_ok=True)
        for place in (folder, folder / RECORDS):
            remove_leftovers(place)
    except OSError as error:
        raise disk_error(error, folder, "choose another folder") from error


def _require_same(folder: Path, begun: TextSettings, wanted: TextSettings) -> None:
    names = {name for name in TextSettings.model_fields if getattr(begun, name) != getattr(wanted, name)}
    # The same files may have moved.
    if changed := sorted(names - {"sources", "tokenizer_file"}):
        raise HpctrainError(
            "HT-shards-begun-otherwise",
            "{folder} was begun with another source or other settings: {settings} differ",
            f"{command(begun, folder)} goes on with it; choose another folder for this one, or remove that one",
            folder=folder,
            settings=" and ".join(changed),
        )


def _work(tasks: Sequence[PartTask], run: Map, say: Callable[[str], None]) -> None:
    made = 0
    for number, fresh in enumerate(run(make_part, tasks), 1):
        made += fresh
        say(f"{number} of {len(tasks)} parts are done, {made} of them made now")


@cache
def _tokenizer(name: str, separator: str, sha256: str) -> Tokenizer:
    return open_tokenizer(name, separator)


def make_part(task: PartTask) -> bool:
    """Make the shards of a part unless they are there, as they were written. Their bytes depend on the task alone.

    Returns:
        Whether they had to be made.

    Raises:
        HpctrainError: a text cannot be read, the tokeniser has changed, or the disk is full.
    """
    if is_done(task):
        return False
    known = task.settings.tokenizer
    tokenizer = _tokenizer(task.settings.tokenizer_file, task.settings.separator, known.sha256)
    if tokenizer.settings != known:
        raise HpctrainError(
            "HT-tokenizer-changed",
            "{path} changed meanwhile",
            "begin again in another folder",
            path=task.settings.tokenizer_file,
        )
    texts: dict[SplitName, list[str]] = {split: [] for split in _SPLITS}
    for text in (text for span in task.spans for text in documents(span)):
        texts[split_of(text, task.settings)].append(text)
    files = {split: _write(task, split, tokenizer.tokens(own)) for split, own in texts.items()}
    record = PartRecord(train=files["train"], val=files["val"])
    write_whole(task.record, json.dumps(record.model_dump(mode="json")).encode())
    return True


def split_of(text: str, settings: TextSettings) -> SplitName:
    """The split of a text, by its hash: equal texts are in one split, wherever they appear."""
    digest = hashlib.sha256(f"{settings.seed} ".encode() + text.encode()).digest()
    return "val" if int.from_bytes(digest[:8], "big") < settings.validation_share * 2**64 else "train"


def _write(task: PartTask, split: SplitName, rows: Sequence[NDArray[np.uint16]]) -> TokenFile:
    tokens = np.concatenate([*rows, np.empty(0, np.uint16)])
    content = tokens.astype(TOKEN).tobytes()
    path = task.path(split)
    write_whole(path, content)
    digest = hashlib.sha256(content).hexdigest()
    return TokenFile(name=path.name, tokens=len(tokens), documents=len(rows), sha256=digest)


def read_record(task: PartTask) -> PartRecord | None:
    """The record of a part; None if there is no valid one."""
    try:
        return PartRecord.model_validate_json(read_regular(task.record, _MOST_RECORD_BYTES))
    except (OSError, ValidationError):
        return None


def is_done(task: PartTask) -> bool:
    """Whether both shards of a part are there, with the bytes that were written."""
    record = read_record(task)
    if record is None:
        return False
    try:
        found = [sha256(task.path(split))[0] for split in _SPLITS]
    except OSError:
        return False
    return found == [record.train.sha256, record.val.sha256]


def _finish(folder: Path, settings: TextSettings, tasks: Sequence[PartTask]) -> TextManifest:
    records = [record for task in tasks if (record := read_record(task))]
    if len(records) < len(tasks):
        raise HpctrainError(
            "HT-tokens-changed",
            "{path} changed meanwhile",
            command(settings, folder),
            exit_code=1,
            path=folder / RECORDS,
        )
    train, val = (TokenSplit(shards=tuple(getattr(each, split) for each in records)) for split in _SPLITS)
    manifest = TextManifest(train=train, val=val, settings=settings)
    for split in _SPLITS:
        if not manifest.split(split).documents:
            raise HpctrainError(
                "HT-text-split-empty",
                "none of {documents} documents is in {split}",
                "begin again in another folder with another --validation-share; documents are not split in two",
                documents=train.documents + val.documents,
                split=split,
            )
    write_whole(folder / MANIFEST, (manifest.model_dump_json(indent=2) + "\n").encode())
    return manifest
