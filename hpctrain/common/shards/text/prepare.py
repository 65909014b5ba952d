"""Makes a folder of tokens from text files, with the same bytes for any number of processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator

from hpctrain.common.files.whole import locked, write_whole
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.shards.manifest import MANIFEST, AbsolutePath, SplitName, wrong_source
from hpctrain.common.shards.resumable import (
    RECORDS,
    Map,
    all_there,
    begin,
    make_all,
    read_record,
    write_model,
)
from hpctrain.common.shards.text.documents import Span, divide, documents, list_files, listing_digest
from hpctrain.common.shards.text.token_manifest import (
    SETTINGS,
    TOKEN,
    TextManifest,
    TextOptions,
    TextSettings,
    TokenFile,
    TokenSplit,
    command,
)
from hpctrain.common.shards.text.tokenizer import BYTES, Tokenizer, open_tokenizer, wrong_tokenizer

# The limit for a record, which has a line for each of two files.
_MOST_RECORD_BYTES = 1 << 16
_SPLITS: tuple[SplitName, ...] = ("train", "val")


class Preparation(TextOptions):
    """Which folder of tokens to make, and from what: files and folders of text, and ``bytes`` or the path of a
    ``tokenizer.json``.
    """

    sources: tuple[AbsolutePath, ...]
    folder: AbsolutePath
    tokenizer: Annotated[str, AfterValidator(lambda name: name if name == BYTES else str(Path(name).absolute()))]


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
    def record_path(self) -> Path:
        return self.folder / RECORDS / f"{self.number:06}.json"

    def record(self) -> PartRecord | None:
        """The record of the part; None if there is no valid one."""
        return read_record(self.record_path, PartRecord, _MOST_RECORD_BYTES)


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
        **preparation.model_dump(include=set(TextOptions.model_fields)),
        sources=tuple(map(str, preparation.sources)),
        listing=listing_digest(files),
        tokenizer_file=preparation.tokenizer,
        tokenizer=open_tokenizer(preparation.tokenizer, preparation.separator).settings,
    )
    folder = preparation.folder
    parts = divide(files, preparation.part_bytes)
    tasks = [PartTask(folder=folder, number=number, spans=part, settings=settings) for number, part in enumerate(parts)]
    say(f"{len(files)} files of {sum(file.size for file in files) / 1e6:.3g} MB, {len(tasks)} parts")
    with locked(folder, seconds=0):
        # The same files may have moved.
        begin(folder / SETTINGS, settings, {"sources", "tokenizer_file"}, command)
        return _finish(folder, settings, make_all(folder, make_part, tasks, run, say))


@cache
def _tokenizer(name: str, separator: str, sha256: str) -> Tokenizer:
    return open_tokenizer(name, separator)


def make_part(task: PartTask) -> tuple[PartRecord, bool]:
    """Make the shards of a part unless they are there, as they were written. Their bytes depend on the task alone.

    Returns:
        Their record, and whether they had to be made.

    Raises:
        HpctrainError: a text cannot be read, the tokeniser has changed, or the disk is full.
    """
    if (done := task.record()) and all_there(task.folder, [done.train.stored, done.val.stored]):
        return done, False
    known = task.settings.tokenizer
    tokenizer = _tokenizer(task.settings.tokenizer_file, task.settings.separator, known.sha256)
    if tokenizer.settings != known:
        raise wrong_tokenizer(Path(task.settings.tokenizer_file), "changed meanwhile", "begin again in another folder")
    texts: dict[SplitName, list[str]] = {split: [] for split in _SPLITS}
    for text in (text for span in task.spans for text in documents(span)):
        texts[split_of(text, task.settings)].append(text)
    files = {split: _write(task, split, tokenizer.tokens(documents)) for split, documents in texts.items()}
    record = PartRecord(train=files["train"], val=files["val"])
    write_whole(task.record_path, json.dumps(record.model_dump(mode="json")).encode())
    return record, True


def split_of(text: str, settings: TextSettings) -> SplitName:
    """The split of a text, by its hash: equal texts are in one split, wherever they appear."""
    digest = hashlib.sha256(f"{settings.seed} ".encode() + text.encode()).digest()
    return "val" if int.from_bytes(digest[:8], "big") < settings.validation_share * 2**64 else "train"


def _write(task: PartTask, split: SplitName, rows: Sequence[NDArray[np.uint16]]) -> TokenFile:
    tokens = np.concatenate([*rows, np.empty(0, np.uint16)])
    content = tokens.astype(TOKEN).tobytes()
    path = task.folder / f"{split}-{task.number:06}.bin"
    write_whole(path, content)
    digest = hashlib.sha256(content).hexdigest()
    return TokenFile(name=path.name, tokens=len(tokens), documents=len(rows), sha256=digest)


def _finish(folder: Path, settings: TextSettings, records: Sequence[PartRecord]) -> TextManifest:
    train, val = (TokenSplit(shards=tuple(getattr(record, split) for record in records)) for split in _SPLITS)
    if not train.documents or not val.documents:
        raise wrong_source(
            folder,
            f"of {train.documents + val.documents} documents {train.documents} are in train, {val.documents} in val",
            "begin again in another folder with another --validation-share; documents are not split in two",
        )
    manifest = TextManifest(train=train, val=val, settings=settings)
    write_model(folder / MANIFEST, manifest)
    return manifest
