"""``state.json``, which makes a checkpoint whole: its content, and the progress of the training.

Its own hash is in ``state.sha256``, as ``sha256sum --check`` reads it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hpctrain.common.checkpoints.layout import MANIFEST, SUM, share_name
from hpctrain.common.checkpoints.pieces import damaged
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import read_error
from hpctrain.common.files.regular import private, read_regular
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.run.directory import model_error

# The limit leaves room for every piece of every tensor on thousands of ranks.
_MOST_BYTES = 2**30


class OtherVersionError(HpctrainError):
    """A whole checkpoint that another version of hpctrain wrote. It must not be passed over in silence."""

    def __init__(self, path: Path, difference: str) -> None:
        super().__init__(
            "HT-checkpoint-other-version",
            "{path} was written by another version of hpctrain: {difference}",
            "resume with that version, or start a new run with another --run-dir",
            exit_code=1,
            path=path,
            difference=difference,
        )


class SavedProgress(BaseModel):
    """The progress of a training.

    Attributes:
        epoch: the one in work, from 1. Its evaluation comes after the checkpoint of its last step.
        losses, sizes: of the steps of that epoch: the mean loss, and how many samples it is of. The sum of the sizes is
            where the epoch is, although ranks that died may have made later batches smaller.
        epoch_seconds, seconds: spent on the steps of that epoch, and on the whole run.
        samples: which ones are trained on (see hpctrain.worker.data.samples.Source.fingerprint).
        skipped: how many steps in a row were left out (see hpctrain.worker.train.non_finite).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants", defer_build=True)

    iteration: int = Field(ge=1)
    epoch: int = Field(ge=1)
    ends_epoch: bool
    losses: tuple[float, ...]
    sizes: tuple[int, ...]
    epoch_seconds: float
    seconds: float
    ranks: int = Field(ge=1)
    samples: str
    skipped: int = Field(default=0, ge=0)


class FileRecord(FrozenModel):
    """The length of a file, and its hash (XXH3, 128 bits) as ``xxh128sum`` prints it.

    A hash that lies beside its file finds damage and no forgery, whichever it is: so it is one that takes next to
    nothing from the training, whose cores work beside it.
    """

    bytes: int = Field(ge=0)
    xxh128: str = Field(pattern=r"^[0-9a-f]{32}$")


class CheckpointManifest(BaseModel):
    """The content of ``state.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants", defer_build=True)

    format: Literal["hpctrain 2"] = "hpctrain 2"
    progress: SavedProgress
    plan: dict[str, Any]
    files: dict[str, FileRecord]

    @field_validator("plan")
    @classmethod
    def _has_keys_in_its_recipe(cls, plan: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(plan.get("recipe"), dict | None):
            raise ValueError("recipe: not a mapping")
        return plan

    @property
    def bytes(self) -> int:
        """The size of all files except the manifest."""
        return sum(file.bytes for file in self.files.values())


def read_manifest(path: Path) -> CheckpointManifest:
    """The manifest of the checkpoint at ``path``.

    Raises:
        OtherVersionError: it is of another version of hpctrain.
    """
    try:
        manifest = CheckpointManifest.model_validate_json(_content(path))
    except ValidationError as error:
        # By its hash it is what was written.
        raise OtherVersionError(path, model_error(error, MANIFEST, "").message) from error
    # The names are opened below the checkpoint's folder.
    ranks, names = manifest.progress.ranks, list(manifest.files)
    if len(names) != ranks or names != [share_name(rank, ranks) for rank in range(ranks)]:
        raise damaged(path / MANIFEST, f"files: not those of {ranks} ranks, but {names[:10]}")
    return manifest


def write_manifest(path: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest and its hash into a folder that has neither."""
    text = manifest.model_dump_json(indent=2) + "\n"
    content = text.encode()
    for name, part in ((MANIFEST, content), (SUM, _sum(content))):
        with open(path / name, "xb", opener=private) as file:
            file.write(part)
            file.flush()
            os.fsync(file.fileno())


def _content(path: Path) -> bytes:
    """The bytes of a manifest, if they are what was written."""
    try:
        content, wanted = read_regular(path / MANIFEST, _MOST_BYTES), read_regular(path / SUM, _MOST_BYTES)
    except OSError as error:
        raise read_error(error, error.filename, exit_code=1) from error
    if wanted != _sum(content):
        raise damaged(path / MANIFEST, "not what was written: its SHA-256 differs")
    return content


def _sum(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()
